//! Decompresses extents that the kernel compressed.
//!
//! Linux 6.18 wrote the files in `tests/data`: `*.extent` is a whole extent with its padding, and
//! `*.inline` is an EXTENT_DATA item with inline data. All of them hold the beginning of one text,
//! which [`plain`] generates.

use offshoot_btrfs_format::compress::{Compression, decompress};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};

const SECTOR: u32 = 4096;
const EXTENT_BYTES: usize = 50_000;
const INLINE_BYTES: usize = 1500;

const EXTENTS: [(Compression, &[u8], &[u8]); 3] = [
    (Compression::Zlib, include_bytes!("data/zlib.extent"), include_bytes!("data/zlib.inline")),
    (Compression::Lzo, include_bytes!("data/lzo.extent"), include_bytes!("data/lzo.inline")),
    (Compression::Zstd, include_bytes!("data/zstd.extent"), include_bytes!("data/zstd.inline")),
];

fn plain(len: usize) -> Vec<u8> {
    let mut text = Vec::new();
    let mut x = 1u32;
    for line in 0.. {
        if text.len() >= len {
            break;
        }
        x = x.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        text.extend_from_slice(format!("{line} {x:08x} of the extent\n").as_bytes());
    }
    text.truncate(len);
    text
}

#[test]
fn whole_extents() {
    let expected = plain(EXTENT_BYTES);
    for (compression, extent, _) in EXTENTS {
        let mut output = vec![0xaa; EXTENT_BYTES.next_multiple_of(SECTOR as usize)];
        let made = decompress(compression, extent, SECTOR, &mut output).unwrap();
        assert!(made >= EXTENT_BYTES, "{compression:?} made {made} bytes");
        assert_eq!(output[..EXTENT_BYTES], expected, "{compression:?}");
        assert!(output[EXTENT_BYTES..].iter().all(|&byte| byte == 0), "{compression:?}");
    }
}

#[test]
fn inline_extents() {
    for (compression, _, item) in EXTENTS {
        let extent = FileExtent::parse(item).unwrap();
        assert_eq!(extent.compression, compression);
        let FileExtentBody::Inline(data) = extent.body else { panic!("{extent:?}") };
        let mut output = vec![0; usize::try_from(extent.ram_bytes).unwrap()];
        let made = decompress(compression, data, SECTOR, &mut output).unwrap();
        assert_eq!((made, &output), (INLINE_BYTES, &plain(INLINE_BYTES)), "{compression:?}");
    }
}

#[test]
fn a_smaller_output_is_filled_and_no_more_is_read() {
    let expected = plain(EXTENT_BYTES);
    for (compression, extent, _) in EXTENTS {
        for len in [0, 1, 4095, 4096, 4097, 12_345, EXTENT_BYTES - 1] {
            let mut output = vec![0; len];
            let made = decompress(compression, extent, SECTOR, &mut output).unwrap();
            assert_eq!((made, &output[..]), (len, &expected[..len]), "{compression:?}");
        }
    }
}

#[test]
fn a_larger_output_is_filled_as_far_as_the_stream_goes() {
    for (compression, extent, _) in EXTENTS {
        let mut output = vec![0xaa; 128 << 10];
        let made = decompress(compression, extent, SECTOR, &mut output).unwrap();
        assert!((EXTENT_BYTES..output.len()).contains(&made), "{compression:?} made {made}");
        assert_eq!(output[..EXTENT_BYTES], plain(EXTENT_BYTES), "{compression:?}");
    }
}

#[test]
fn a_stream_that_ends_early_is_an_error() {
    for (compression, extent, item) in EXTENTS {
        let FileExtentBody::Inline(inline) = FileExtent::parse(item).unwrap().body else {
            panic!("not inline")
        };
        for whole in [extent, inline] {
            for len in (0..whole.len() / 2).step_by(97) {
                let mut output = vec![0; 64 << 10];
                let result = decompress(compression, &whole[..len], SECTOR, &mut output);
                assert!(result.is_err(), "{compression:?} cut to {len} bytes: {result:?}");
            }
        }
    }
}

/// An LZO segment that holds `literals`.
fn literal_segment(literals: &[u8]) -> Vec<u8> {
    lzokay::compress::compress(literals).unwrap()
}

/// Frames the segments one after the other, as the definition of the framing says.
fn frame(segments: &[Vec<u8>], sector: usize) -> Vec<u8> {
    let mut framed = vec![0; 4];
    for segment in segments {
        let left = sector - framed.len() % sector;
        if left < 4 {
            framed.resize(framed.len() + left, 0);
        }
        framed.extend_from_slice(&u32::try_from(segment.len()).unwrap().to_le_bytes());
        framed.extend_from_slice(segment);
    }
    let len = u32::try_from(framed.len()).unwrap();
    framed[..4].copy_from_slice(&len.to_le_bytes());
    framed
}

/// Places the size of the third segment at every position around the end of a sector.
#[test]
fn an_lzo_header_never_crosses_a_sector() {
    let sector = 512;
    let literals: Vec<u8> = (0..=255).collect();
    let mut skipped = 0;
    for len in 200..256 {
        let first = literal_segment(&literals);
        let second = literal_segment(&literals[..len]);
        let third = literal_segment(b"behind the end of a sector");
        let segments = [first, second, third];
        let framed = frame(&segments, sector);
        let sizes: usize = segments.iter().map(|segment| segment.len() + 4).sum();
        skipped += usize::from(framed.len() != sizes + 4);
        let mut output = vec![0; 4 * sector];
        let made =
            decompress(Compression::Lzo, &framed, sector.try_into().unwrap(), &mut output).unwrap();
        let expected = [&literals[..], &literals[..len], b"behind the end of a sector"].concat();
        assert_eq!(output[..made], expected, "with a segment of {len} bytes");
    }
    assert_eq!(skipped, 3, "one to three bytes of padding occur once each");
}

#[test]
fn lzo_sizes_that_lie_are_errors() {
    let (_, extent, _) = EXTENTS[1];
    let mut output = vec![0; 64 << 10];
    for (at, size) in [(0, 3u32), (0, u32::MAX), (0, 28_673), (4, 0), (4, 1 << 20), (4, u32::MAX)] {
        let mut extent = extent.to_vec();
        extent[at..at + 4].copy_from_slice(&size.to_le_bytes());
        let result = decompress(Compression::Lzo, &extent, SECTOR, &mut output);
        assert!(result.is_err(), "size {size} at {at}: {result:?}");
    }
}
