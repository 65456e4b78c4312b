//! Compression: the decoders that read the kernel's extents read ours.

use offshoot_btrfs_format::compress::{Compression, CompressionMethod, compress, decompress};
use offshoot_testkit::random::Random;

const SECTOR: u32 = 4096;
const EXTENT: usize = 128 << 10;

fn all() -> Vec<CompressionMethod> {
    let zlib = (1..=9).map(|level| format!("zlib:{level}"));
    let zstd = (-15..=15).filter(|&level| level != 0).map(|level| format!("zstd:{level}"));
    let plain = ["zlib", "lzo", "zstd"].map(str::to_owned);
    zlib.chain(zstd).chain(plain).map(|name| name.parse().expect("a method")).collect()
}

#[test]
fn what_is_compressed_is_read_again() {
    let mut random = Random::new(3);
    // Text, text with noise in it, and a single byte repeated.
    let text = random.text(EXTENT);
    let mut mixed = text.clone();
    for at in (0..EXTENT).step_by(7) {
        mixed[at] = random.bytes(1)[0];
    }
    let inputs = [
        (&text[..], true),
        (&text[..4096], true),
        (&vec![9; EXTENT], true),
        (&text[..100], false),
        (&mixed, false),
        (&mixed[..70_001], false),
    ];
    for method in all() {
        for (input, shrinks) in inputs {
            let packed = compress(method, input, SECTOR, input.len());
            let Some(packed) = packed else {
                assert!(!shrinks, "{method:?} of {}", input.len());
                continue;
            };
            let mut stored = packed.clone();
            stored.resize(packed.len().next_multiple_of(SECTOR as usize), 0);
            let mut output = vec![1; input.len()];
            let made =
                decompress(method.compression(), &stored, SECTOR, &mut output).expect("it reads");
            assert!(made == input.len() && output == input, "{method:?} of {}", input.len());
            // The result depends on the room, but is never larger than the room.
            let fits = compress(method, input, SECTOR, packed.len());
            let short = compress(method, input, SECTOR, packed.len() - 1);
            assert!(fits.is_none_or(|fits| fits.len() <= packed.len()), "{method:?}");
            assert!(short.is_none_or(|short| short.len() < packed.len()), "{method:?}");
        }
    }
}

/// An encoder uses its memory again. Nothing of an earlier input is in a later result, not even in
/// the bytes that LZO skips at the end of a sector.
#[test]
fn a_result_has_nothing_of_an_earlier_input() {
    let mut random = Random::new(6);
    let (noise, text) = (random.bytes(EXTENT), random.text(EXTENT));
    // Each segment is a byte longer than that of the input before, so that some end just before the
    // end of a sector.
    let lengths = 3900..4096;
    let inputs = lengths.map(|len| [&noise[..len], &vec![0; 4096 - len], &text[..4096]].concat());
    let inputs: Vec<_> = [text.clone()].into_iter().chain(inputs).collect();
    for method in all() {
        let fresh = |input: &[u8]| {
            let thread = || compress(method, input, SECTOR, EXTENT);
            std::thread::scope(|scope| scope.spawn(thread).join().expect("it ends"))
        };
        let count = if method.compression() == Compression::Lzo { inputs.len() } else { 3 };
        // This fills all of the memory, and is given up.
        let _ = compress(method, &noise, SECTOR, EXTENT);
        for input in &inputs[..count] {
            assert!(compress(method, input, SECTOR, EXTENT) == fresh(input), "{method:?}");
        }
    }
}

#[test]
fn noise_does_not_become_smaller() {
    let noise = Random::new(4).bytes(EXTENT);
    for method in all() {
        let packed = compress(method, &noise, SECTOR, EXTENT - 4096);
        assert_eq!(packed, None, "{method:?}");
    }
}

/// An encoder that gave up must start anew. The zlib encoder of level 1 continued in the middle of
/// the stream that it had given up, although it was reset.
#[test]
fn what_was_given_up_is_forgotten() {
    let mut random = Random::new(5);
    for method in all() {
        for len in [600, 4096, EXTENT] {
            let (noise, text) = (random.bytes(EXTENT), random.text(len));
            assert_eq!(compress(method, &noise, SECTOR, len), None, "{method:?}");
            let packed = compress(method, &text, SECTOR, 2 * len).expect("it fits");
            let mut output = vec![0; len];
            decompress(method.compression(), &packed, SECTOR, &mut output).expect("it reads");
            assert!(output == text, "{method:?} of {len}");
        }
    }
}

#[test]
fn methods_are_called_as_the_kernel_calls_them() {
    for wrong in [
        "", "none", "gzip", "zlib:0", "zlib:10", "zstd:0", "zstd:16", "zstd:-16", "lzo:1", "zstd:",
        "zstd:x",
    ] {
        assert!(wrong.parse::<CompressionMethod>().is_err(), "{wrong}");
    }
    let default = |compression| CompressionMethod::new(compression).expect("it is one");
    assert_eq!("zlib:3".parse(), Ok(default(Compression::Zlib)));
    assert_eq!("zstd".parse(), Ok(default(Compression::Zstd)));
    assert_eq!("lzo".parse(), Ok(default(Compression::Lzo)));
    assert_eq!(CompressionMethod::new(Compression::None), None);
}
