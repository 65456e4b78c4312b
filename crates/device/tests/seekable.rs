//! Zstd streams with a table of their frames: they are read without unpacking all of them. A table
//! that does not fit the file is ignored, and one that contradicts a frame is an error.

mod bodies;

use std::io::{ErrorKind, Write};
use std::sync::Arc;

use offshoot_device::{FaultDevice, ImageKind, MemoryDevice, RequestKind, open_image};
use offshoot_testkit::random::{Random, seed_of_run};

/// Compresses `bytes` in frames of `frame` bytes, with a table that has checksums.
fn with_checksums(bytes: &[u8], frame: usize) -> Vec<u8> {
    let (mut packed, mut table) = (Vec::new(), Vec::new());
    for part in bytes.chunks(frame) {
        let one = zstd::bulk::compress(part, 1).expect("it is compressed");
        let sum = xxhash_rust::xxh64::xxh64(part, 0);
        table.extend(u32::try_from(one.len()).expect("small").to_le_bytes());
        table.extend(u32::try_from(part.len()).expect("small").to_le_bytes());
        table.extend(&sum.to_le_bytes()[..4]);
        packed.extend(one);
    }
    let count = table.len() / 12;
    packed.extend(0x184d_2a5e_u32.to_le_bytes());
    packed.extend(u32::try_from(table.len() + 9).expect("small").to_le_bytes());
    packed.extend(table);
    packed.extend(u32::try_from(count).expect("small").to_le_bytes());
    packed.extend([0x80, 0xb1, 0xea, 0x92, 0x8f]);
    packed
}

/// Compresses `bytes` with the crate `zeekstd`, which writes no checksums.
fn by_zeekstd(bytes: &[u8], frame: u32) -> Vec<u8> {
    let mut packed = Vec::new();
    let policy = zeekstd::FrameSizePolicy::Uncompressed(frame);
    let options = zeekstd::EncodeOptions::new().frame_size_policy(policy);
    let mut encoder = options.into_encoder(&mut packed).expect("an encoder");
    encoder.write_all(bytes).expect("it is compressed");
    encoder.finish().expect("it ends");
    packed
}

fn data(random: &mut Random) -> Vec<u8> {
    let mut bytes = random.bytes(3_000_000);
    bytes[500_000..1_500_000].fill(7);
    bytes
}

#[test]
fn any_range_is_read_from_its_frames_alone() {
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let bytes = data(&mut random);
    for packed in [
        by_zeekstd(&bytes, 100_000),
        by_zeekstd(&bytes, 4 << 20),
        with_checksums(&bytes, 65_536),
        with_checksums(&bytes, 1000),
    ] {
        let below = Arc::new(FaultDevice::new(Arc::new(MemoryDevice::new(packed))));
        assert_eq!(ImageKind::detect(&*below).expect("it is read"), Some(ImageKind::Zstd));
        let disk = open_image(below.clone(), ImageKind::Zstd).expect("it opens");
        // Opening reads the footer and the table.
        assert!(below.count(RequestKind::Reads) <= 3, "it was read to its end");
        assert_eq!(disk.size_bytes(), bytes.len() as u64);
        for _ in 0..200 {
            let at = random.below(bytes.len() as u64);
            let len = random.below((bytes.len() as u64 - at).min(150_000) + 1);
            let range =
                usize::try_from(at).expect("small")..usize::try_from(at + len).expect("small");
            let mut found = vec![1; range.len()];
            disk.read_at(at, &mut found).expect("it is read");
            assert!(found == bytes[range], "seed {seed}: {at}+{len}");
        }
        disk.read_at(bytes.len() as u64, &mut [0]).expect_err("behind the end");
        let error = disk.write_at(0, &[1]).expect_err("it is only read");
        assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
        // Eight threads read few frames.
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (disk, bytes) = (&disk, &bytes);
                scope.spawn(move || {
                    let at = thread * 40_000;
                    let mut found = vec![0; 40_000];
                    disk.read_at(at as u64, &mut found).expect("it is read");
                    assert!(found == bytes[at..at + 40_000]);
                });
            }
        });
    }
}

/// Only few frames are cached, however small they are.
#[test]
fn very_many_tiny_frames_are_read_and_not_kept() {
    const FRAMES: usize = 50_000;
    let bytes = Random::new(3).bytes(FRAMES);
    let packed = with_checksums(&bytes, 1);
    let below = Arc::new(FaultDevice::new(Arc::new(MemoryDevice::new(packed))));
    let disk = open_image(below.clone(), ImageKind::Zstd).expect("it opens");
    let mut found = vec![0; FRAMES];
    disk.read_at(0, &mut found).expect("it is read");
    assert!(found == bytes);
    let before = below.count(RequestKind::Reads);
    disk.read_at(FRAMES as u64 - 10, &mut [0; 10]).expect("the last frames are kept");
    assert_eq!(below.count(RequestKind::Reads), before);
    disk.read_at(FRAMES as u64 - 1000, &mut [0; 100]).expect("they are read again");
    assert_eq!(below.count(RequestKind::Reads), before + 100);
}

/// A table that does not describe the file is ignored, and the whole stream is unpacked.
#[test]
fn a_table_that_does_not_fit_is_left_alone() {
    let bytes = data(&mut Random::new(1));
    let packed = with_checksums(&bytes, 1 << 20);
    let end = packed.len();
    let table = end - 9 - 3 * 12;
    for (at, value) in [
        // The number of frames; reserved bits; the magic number.
        (end - 9, 2),
        (end - 6, 0xff),
        (end - 5, 0x84),
        (end - 1, 0),
        // The packed size of the first frame; an unpacked size above the limit.
        (table, packed[table] ^ 1),
        (table + 7, 0xff),
    ] {
        let mut packed = packed.clone();
        packed[at] = value;
        let disk = open_image(Arc::new(MemoryDevice::new(packed)), ImageKind::Zstd);
        let disk = disk.unwrap_or_else(|error| panic!("byte {at}: {error}"));
        let mut found = vec![0; bytes.len()];
        disk.read_at(0, &mut found).expect("it is read");
        assert!(found == bytes, "byte {at}");
    }
}

/// The table fits the file, but contradicts the frame that a read needs.
#[test]
fn a_frame_that_is_not_what_the_table_says_is_an_error() {
    let bytes = data(&mut Random::new(2));
    let packed = with_checksums(&bytes, 1 << 20);
    let table = packed.len() - 9 - 3 * 12;
    let change = |changes: &[(usize, i64)]| {
        let mut packed = packed.clone();
        for &(at, more) in changes {
            let mut number = [0; 4];
            number.copy_from_slice(&packed[at..at + 4]);
            let changed = i64::from(u32::from_le_bytes(number)) + more;
            let changed = u32::try_from(changed).expect("it fits").to_le_bytes();
            packed[at..at + 4].copy_from_slice(&changed);
        }
        packed
    };
    let damaged = {
        let mut packed = packed.clone();
        packed[1000] ^= 1;
        packed
    };
    for (what, packed) in [
        ("a shorter frame and a longer one", change(&[(table, -5), (table + 12, 5)])),
        ("fewer bytes than are there", change(&[(table + 4, -1), (table + 16, 1)])),
        ("more bytes than are there", change(&[(table + 4, 1), (table + 16, -1)])),
        ("its checksum", change(&[(table + 8, -1)])),
        ("its bytes", damaged),
    ] {
        let disk = open_image(Arc::new(MemoryDevice::new(packed)), ImageKind::Zstd);
        let disk = disk.expect("the table fits");
        let error = disk.read_at(10, &mut [0; 100]).expect_err(what);
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{what}: {error}");
        assert!(error.to_string().contains("not what the seek table says"), "{what}: {error}");
        // A frame that the read does not need causes no error.
        disk.read_at((2 << 20) + 5, &mut [0; 100]).expect("another frame");
    }
}

/// Seeded mutations, mostly of the table.
#[test]
fn hostile_tables() {
    let mut random = Random::new(0x7a73_7464);
    let packed = with_checksums(&random.bytes(20_000), 5000);
    for _ in 0..400 {
        let mut bytes = packed.clone();
        for _ in 0..=random.below(3) {
            let back = if random.below(4) == 0 { bytes.len() as u64 } else { 70 };
            let at = bytes.len() - 1 - usize::try_from(random.below(back)).expect("small");
            bytes[at] =
                [0, 0xff, random.bytes(1)[0]][usize::try_from(random.below(3)).expect("small")];
        }
        bodies::image(&bytes);
    }
}
