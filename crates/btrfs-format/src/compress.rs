//! Compression of file extents.
//!
//! An extent is compressed as a whole, from at most 128 KiB. What is on disk is
//! padded with zeros to a whole number of sectors; an inline extent is not padded.
//!
//! ```text
//! zlib   | one zlib stream | zeros |
//! zstd   | one frame | zeros |
//! LZO    | length | size, segment | size, segment | ... | zeros |
//! ```
//!
//! The framing of LZO is the format's own. `length` counts all that follows up to the
//! padding, itself included; each segment is one LZO1X stream that makes at most a
//! sector; all three sizes are 32-bit little-endian. A size never crosses a sector
//! of the input: where fewer than four bytes are left of one, they are skipped.
//!
//! A reader may want less than a stream holds, so a full output ends the work. A
//! stream may also hold less than the extent claims: what is missing reads as zeros.

use std::cell::RefCell;

use flate2::{Decompress, FlushDecompress, Status};
use zstd::zstd_safe::{self, DCtx, DParameter, InBuffer, OutBuffer, ResetDirective};

use crate::Malformed;

/// How an extent is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// Not at all.
    None,
    /// A zlib stream.
    Zlib,
    /// LZO1X segments in the framing of btrfs.
    Lzo,
    /// A Zstandard frame.
    Zstd,
}

impl Compression {
    /// The compression with this number; `None` when it is unknown.
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

    /// The name by which mount options and properties call it.
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

/// Decompresses the extent `input` into `output` and returns how many bytes it made.
///
/// `input` is the extent as it is on disk, with its padding, or the data of an
/// inline extent. A stream that holds more than `output` takes is cut off there. The
/// count is smaller than `output` when the stream holds less; what is behind it is
/// zero in the file, and is made zero here.
///
/// # Errors
/// When the stream is damaged or ends before it is complete. Then `output` holds
/// nothing of use.
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
    // Decoders use what is behind their output as room to work in.
    output[made..].fill(0);
    Ok(made)
}

const STRUCTURE: &str = "compressed extent";

fn bad(problem: String) -> Malformed {
    Malformed::new(STRUCTURE, problem)
}

/// What the decoders keep between extents. To make one anew costs as much as to
/// decompress a small extent with it.
#[derive(Default)]
struct Contexts {
    zlib: Option<Decompress>,
    zstd: Option<DCtx<'static>>,
}

thread_local! {
    static CONTEXTS: RefCell<Contexts> = RefCell::default();
}

impl Contexts {
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
        // Never more than the length of `output`, which is a usize.
        let made = usize::try_from(context.total_out()).unwrap_or(usize::MAX).min(output.len());
        if status == Status::StreamEnd || made == output.len() {
            return Ok(made);
        }
        Err(bad(format!("zlib stream ends early, after {made} bytes of data")))
    }

    fn zstd(&mut self, input: &[u8], output: &mut [u8]) -> Result<usize, Malformed> {
        // The largest window that the format allows. It bounds what a frame may make
        // the decoder allocate.
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
        // In one go, without a window of its own, when the whole frame fits.
        let claimed = zstd_safe::get_frame_content_size(frame).ok().flatten();
        if claimed.is_none_or(|bytes| bytes <= output.len() as u64) {
            if let Ok(made) = context.decompress(output, frame) {
                return Ok(made);
            }
            context.reset(ResetDirective::SessionOnly).map_err(fail)?;
        }
        // It holds more than `output` takes, or it is damaged: piece by piece, which
        // tells these apart.
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

/// The size of the sizes in the LZO framing, in bytes.
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
    // The last sector, of which not everything is wanted.
    let mut whole = vec![0; sector];
    let made = decode(&mut whole)?.min(output.len());
    output[..made].copy_from_slice(&whole[..made]);
    Ok(made)
}
