//! Compression of file extents.
//!
//! An extent is compressed as a whole, from at most 128 KiB. On disk it is padded with zeros to a
//! whole number of sectors; an inline extent has no padding.
//!
//! ```text
//! zlib   | one zlib stream | zeros |
//! zstd   | one frame | zeros |
//! LZO    | length | size, segment | size, segment | ... | zeros |
//! ```
//!
//! The framing of LZO is defined by btrfs. `length` counts everything up to the padding, itself
//! included. Each segment is one LZO1X stream that makes at most a sector. `length` and the sizes
//! are little-endian and have 32 bits. A size never crosses a sector of the input: where fewer than
//! four bytes of a sector are left, they are skipped. Example with sectors of 4096 bytes: when a
//! segment ends at byte 4093, the next size begins at byte 4096.
//!
//! A reader may need less than a stream holds, so decoding stops when the output is full. A stream
//! may also hold less than the extent claims: the rest reads as zeros.

use offshoot_vfs::Structure;
use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::str::FromStr;

use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};
use lzokay::compress::Dict;
use zstd::zstd_safe::{
    self, CCtx, CParameter, DCtx, DParameter, InBuffer, OutBuffer, ResetDirective,
};

use crate::Malformed;

/// The compression of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// No compression.
    None,
    /// A zlib stream.
    Zlib,
    /// LZO1X segments in the framing of btrfs.
    Lzo,
    /// A Zstandard frame.
    Zstd,
}

impl Compression {
    /// The compression with the number `value` in the format; `None` when it is unknown.
    #[must_use]
    pub fn from_disk(value: u8) -> Option<Self> {
        Some(match value {
            0 => Self::None,
            1 => Self::Zlib,
            2 => Self::Lzo,
            3 => Self::Zstd,
            _ => return None,
        })
    }

    /// Its name in mount options and properties.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Zlib => "zlib",
            Self::Lzo => "lzo",
            Self::Zstd => "zstd",
        }
    }
}

/// Decompresses the extent `input` into `output`. Returns how many bytes the stream made.
///
/// `input` is the extent as it is on disk, with its padding, or the data of an inline extent. A
/// stream that holds more than `output` is cut off there. When the stream holds less, the returned
/// count is smaller than `output`, and the rest of `output` is filled with zeros, as the file has
/// there.
///
/// # Errors
/// When the stream is damaged or ends early. The contents of `output` are undefined then.
pub fn decompress(
    compression: Compression,
    input: &[u8],
    sector_size: u32,
    output: &mut [u8],
) -> Result<usize, Malformed> {
    let made = match compression {
        Compression::None => {
            let len = input.len().min(output.len());
            output[..len].copy_from_slice(&input[..len]);
            len
        }
        Compression::Zlib => CONTEXTS.with_borrow_mut(|contexts| contexts.zlib(input, output))?,
        Compression::Zstd => CONTEXTS.with_borrow_mut(|contexts| contexts.zstd(input, output))?,
        Compression::Lzo => decompress_lzo(input, sector_size as usize, output)?,
    };
    // Decoders may use the space behind their output as scratch memory.
    output[made..].fill(0);
    Ok(made)
}

const STRUCTURE: Structure = Structure::CompressedExtent;

fn bad(problem: String) -> Malformed {
    Malformed::new(STRUCTURE, problem)
}

/// The decoders that a thread keeps. Making one costs as much as decompressing a small extent.
#[derive(Default)]
struct ThreadDecoders {
    zlib: Option<Decompress>,
    zstd: Option<DCtx<'static>>,
}

thread_local! {
    static CONTEXTS: RefCell<ThreadDecoders> = RefCell::default();
}

impl ThreadDecoders {
    fn zlib(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, Malformed> {
        let context = match &mut self.zlib {
            Some(context) => {
                context.reset(true);
                context
            }
            none => none.insert(Decompress::new(true)),
        };
        let status = context
            .decompress(input, output, FlushDecompress::Finish)
            .map_err(|error| bad(format!("zlib stream: {error}")))?;
        // At most the length of `output`, which fits a usize.
        let made = usize::try_from(context.total_out()).unwrap_or(usize::MAX).min(output.len());
        if status == Status::StreamEnd || made == output.len() {
            return Ok(made);
        }
        Err(bad(format!("zlib stream ends early, after {made} bytes of data")))
    }

    fn zstd(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, Malformed> {
        // The largest window that btrfs allows, 128 KiB. It limits how much a frame can make the
        // decoder allocate.
        const WINDOW_LOG_MAX: u32 = 17;
        let fail = |code| bad(format!("zstd frame: {}", zstd_safe::get_error_name(code)));
        let context = match &mut self.zstd {
            Some(context) => context,
            none => {
                let context = none.insert(
                    DCtx::try_create().ok_or_else(|| bad("no memory for zstd".to_owned()))?,
                );
                context.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX)).map_err(fail)?;
                context
            }
        };
        context.reset(ResetDirective::SessionOnly).map_err(fail)?;
        let frame = zstd_safe::find_frame_compressed_size(input).map_err(fail)?;
        let frame = input.get(..frame).ok_or_else(|| bad("zstd frame ends early".to_owned()))?;
        // When the whole frame fits, decode it in one call, which needs no window buffer.
        let claimed = zstd_safe::get_frame_content_size(frame).ok().flatten();
        if claimed.is_none_or(|bytes| bytes <= output.len() as u64) {
            if let Ok(made) = context.decompress(output, frame) {
                return Ok(made);
            }
            context.reset(ResetDirective::SessionOnly).map_err(fail)?;
        }
        // The frame holds more than `output`, or it is damaged. Decoding it in steps tells which.
        let capacity = output.len();
        let mut from = InBuffer::around(frame);
        let mut to = OutBuffer::around(output);
        loop {
            let before = (from.pos(), to.pos());
            let left = context.decompress_stream(&mut to, &mut from).map_err(fail)?;
            if left == 0 || to.pos() == capacity {
                return Ok(to.pos());
            }
            if (from.pos(), to.pos()) == before {
                return Err(bad(format!(
                    "zstd frame ends early, after {} bytes of data",
                    to.pos()
                )));
            }
        }
    }
}

/// The bytes of a size field in the LZO framing.
const LZO_SIZE_BYTES: usize = 4;

fn decompress_lzo(input: &[u8], sector: usize, output: &mut [u8]) -> Result<usize, Malformed> {
    let size_at = |at: usize| -> Result<usize, Malformed> {
        let bytes = input.get(at..).and_then(|rest| rest.first_chunk::<LZO_SIZE_BYTES>());
        let bytes = bytes.ok_or_else(|| bad(format!("LZO size at {at} lies outside")))?;
        Ok(u32::from_le_bytes(*bytes) as usize)
    };
    let length = size_at(0)?;
    if !(LZO_SIZE_BYTES..=input.len()).contains(&length) {
        return Err(bad(format!("LZO length {length} in an extent of {}", input.len())));
    }
    let mut at = LZO_SIZE_BYTES;
    let mut made = 0;
    while at < length && made < output.len() {
        let left_of_sector = sector - at % sector;
        if left_of_sector < LZO_SIZE_BYTES {
            at += left_of_sector;
            continue;
        }
        let size = size_at(at)?;
        at += LZO_SIZE_BYTES;
        let segment = input
            .get(at..at + size)
            .ok_or_else(|| bad(format!("LZO segment of {size} bytes at {at} does not fit")))?;
        made += decompress_segment(segment, sector, &mut output[made..])
            .map_err(|problem| bad(format!("LZO segment at {at}: {problem}")))?;
        at += size;
    }
    Ok(made)
}

/// Decompresses one segment, which makes at most a sector, into the start of `output`.
fn decompress_segment(segment: &[u8], sector: usize, output: &mut [u8]) -> Result<usize, String> {
    let decode = |into: &mut [u8]| {
        lzokay::decompress::decompress(segment, into).map_err(|error| error.to_string())
    };
    if let Some(room) = output.get_mut(..sector) {
        return decode(room);
    }
    // The reader wants only a part of the last sector.
    let mut whole = vec![0; sector];
    let made = decode(&mut whole)?.min(output.len());
    output[..made].copy_from_slice(&whole[..made]);
    Ok(made)
}

/// How to compress extents: the algorithm and its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompressionMethod {
    /// The algorithm; never [`Compression::None`].
    compression: Compression,
    /// The level; 0 for LZO, which has no levels.
    level: i32,
}

impl CompressionMethod {
    /// The algorithm with its default level; `None` for [`Compression::None`].
    #[must_use]
    pub fn new(compression: Compression) -> Option<Self> {
        Some(match compression {
            Compression::None => return None,
            Compression::Lzo => Self { compression, level: 0 },
            Compression::Zlib | Compression::Zstd => Self { compression, level: 3 },
        })
    }

    /// The algorithm.
    #[must_use]
    pub fn compression(self) -> Compression {
        self.compression
    }

    /// The levels of an algorithm, the same as in the kernel.
    fn levels(compression: Compression) -> &'static [RangeInclusive<i32>] {
        match compression {
            Compression::None | Compression::Lzo => &[],
            Compression::Zlib => &[1..=9],
            Compression::Zstd => &[-15..=-1, 1..=15],
        }
    }
}

impl FromStr for CompressionMethod {
    type Err = String;

    /// Parses a method as in mount options: `zlib`, `lzo` or `zstd`. `zlib` and `zstd` may have a
    /// level: `zstd:15`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text, None),
        };
        let all = [Compression::Zlib, Compression::Lzo, Compression::Zstd];
        let compression = all.into_iter().find(|compression| compression.name() == name);
        let method = compression.and_then(Self::new);
        let method = method.ok_or_else(|| format!("no compression is called `{name}`"))?;
        let Some(level) = level else { return Ok(method) };
        let wrong = || format!("{name} has no level `{level}`");
        let level = level.parse().map_err(|_| wrong())?;
        let is_one = Self::levels(method.compression).iter().any(|levels| levels.contains(&level));
        is_one.then_some(Self { level, ..method }).ok_or_else(wrong)
    }
}

/// Compresses `input`, at most [`MAX_COMPRESSED_EXTENT`](crate::file_extent::MAX_COMPRESSED_EXTENT)
/// bytes, without padding. `None` when the result has more than `most` bytes.
#[must_use]
pub fn compress(
    method: CompressionMethod,
    input: &[u8],
    sector_size: u32,
    most: usize,
) -> Option<Vec<u8>> {
    COMPRESSORS.with_borrow_mut(|all| {
        // The encoder writes into memory of the thread, so that the result takes no more than it
        // needs, and nothing is cleared.
        let mut room = std::mem::take(&mut all.output);
        if room.len() < most {
            room.resize(most, 0);
        }
        let (sector, output) = (sector_size as usize, &mut room[..most]);
        let made = match method.compression {
            Compression::None => None,
            Compression::Zlib => all.zlib(method.level, input, output),
            Compression::Zstd => all.zstd(method.level, input, output),
            Compression::Lzo => {
                compress_lzo(all.lzo.get_or_insert_with(Dict::new), input, sector, output)
            }
        };
        let packed = made.map(|made| room[..made].to_vec());
        all.output = room;
        packed
    })
}

/// The encoders that a thread keeps.
#[derive(Default)]
struct Compressors {
    zlib: Option<(i32, Compress)>,
    zstd: Option<CCtx<'static>>,
    lzo: Option<Box<Dict>>,
    /// Memory for what they make.
    output: Vec<u8>,
}

thread_local! {
    static COMPRESSORS: RefCell<Compressors> = RefCell::default();
}

impl Compressors {
    fn zlib(&mut self, level: i32, input: &[u8], output: &mut [u8]) -> Option<usize> {
        let kept = self.zlib.take().filter(|(made_for, _)| *made_for == level);
        let new = || Compress::new(flate2::Compression::new(level.unsigned_abs()), true);
        let mut context = kept.map_or_else(new, |(_, context)| context);
        context.reset();
        let status = context.compress(input, output, FlushCompress::Finish).ok()?;
        let made = usize::try_from(context.total_out()).ok();
        // An encoder that did not reach the end of its stream cannot be used again, not even after
        // a reset.
        if status != Status::StreamEnd {
            return None;
        }
        self.zlib = Some((level, context));
        made
    }

    fn zstd(&mut self, level: i32, input: &[u8], output: &mut [u8]) -> Option<usize> {
        if self.zstd.is_none() {
            self.zstd = CCtx::try_create();
        }
        let context = self.zstd.as_mut()?;
        context.reset(ResetDirective::SessionAndParameters).ok()?;
        // The window becomes as large as the input, which is at most the 128 KiB that the kernel
        // allows.
        context.set_parameter(CParameter::CompressionLevel(level)).ok()?;
        context.compress2(output, input).ok()
    }
}

/// Compresses `input` in the framing that [`decompress_lzo`] reads.
fn compress_lzo(dict: &mut Dict, input: &[u8], sector: usize, output: &mut [u8]) -> Option<usize> {
    let mut segment = vec![0; lzokay::compress::compress_worst_size(sector)];
    let mut at = LZO_SIZE_BYTES;
    for part in input.chunks(sector) {
        let size = lzokay::compress::compress_no_alloc(part, &mut segment, dict).ok()?;
        let left_of_sector = sector - at % sector;
        if left_of_sector < LZO_SIZE_BYTES {
            output.get_mut(at..at + left_of_sector)?.fill(0);
            at += left_of_sector;
        }
        let to = output.get_mut(at..at + LZO_SIZE_BYTES + size)?;
        to[..LZO_SIZE_BYTES].copy_from_slice(&lzo_size(size));
        to[LZO_SIZE_BYTES..].copy_from_slice(&segment[..size]);
        at += LZO_SIZE_BYTES + size;
    }
    output.get_mut(..LZO_SIZE_BYTES)?.copy_from_slice(&lzo_size(at));
    Some(at)
}

/// A size field of the LZO framing.
fn lzo_size(size: usize) -> [u8; LZO_SIZE_BYTES] {
    u32::try_from(size).expect("an extent is small").to_le_bytes()
}
