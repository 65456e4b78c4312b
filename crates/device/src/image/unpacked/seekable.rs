//! Zstd streams with a table of their frames at the end. They are read without unpacking all of
//! them.
//!
//! ```text
//!   | frame 0 | frame 1 | ... | 0x184d2a5e, length | sizes of frame 0 | of frame 1 | ... footer |
//!   sizes    0  packed   4  unpacked   8  low half of the XXH64, if the footer says so
//!   footer   0  how many frames   4  bit 7: checksums; bits 2 to 6: zero   5  0x8f92eab1
//! ```
//!
//! When the table does not describe the whole file, or lists a frame of more than
//! [`FRAME_BYTES_MAX`], it is ignored and the stream is unpacked as any other. When a frame
//! contradicts the table, the read of that frame fails.
//!
//! We do not use the crate `zeekstd`: it allocates as much as the footer says, it waits for ever
//! for the end of a missing frame, and it does not check checksums.
//!
//! Source: `zstd_seekable_compression_format.md` of zstd, version 0.1.0.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use xxhash_rust::xxh64::xxh64;
use zstd::bulk::Decompressor;

use crate::fields::{invalid, part, u32_le};
use crate::image::TABLE_BYTES_MAX;
use crate::{BlockDevice, request_range};

const FOOTER_BYTES: u64 = 9;
const HEADER_BYTES: u64 = 8;

/// The largest frame in unpacked bytes. Most tools make frames of 1 to 16 MiB.
const FRAME_BYTES_MAX: u32 = 64 << 20;

/// How many unpacked bytes are cached; one frame is cached in any case.
const KEPT_BYTES_MAX: u32 = 64 << 20;

/// How many unpacked frames are cached, however small they are: each read searches all of them.
const KEPT_FRAMES_MAX: u32 = 64;

/// A frame that holds bytes of the disk.
#[derive(Debug)]
struct ZstdFrame {
    /// Its first byte in the file, and its length there.
    packed_at: u64,
    packed_bytes: u32,
    /// Its first byte on the disk, and its length there.
    start: u64,
    len: u32,
    checksum: Option<u32>,
}

/// A cached frame, which a reader has unpacked or is unpacking.
#[derive(Debug, Default)]
struct CachedFrame {
    number: usize,
    /// The thread that unpacks the frame holds this lock, and other readers of the frame wait for
    /// it.
    bytes: Mutex<Option<Arc<Vec<u8>>>>,
}

/// A disk in frames that are unpacked on demand.
#[derive(Debug)]
pub(super) struct Seekable {
    below: Arc<dyn BlockDevice>,
    name: String,
    size_bytes: u64,
    frames: Vec<ZstdFrame>,
    /// The cached frames, the most recently used at the end.
    kept: Mutex<VecDeque<Arc<CachedFrame>>>,
    /// How many frames are cached at most.
    kept_max: usize,
}

/// Opens the stream on `below` if it has a table that describes all of it.
pub(super) fn open(below: &Arc<dyn BlockDevice>) -> io::Result<Option<Seekable>> {
    let Some(frames) = read_table(&**below)? else { return Ok(None) };
    let size_bytes = frames.last().map_or(0, |last| last.start + u64::from(last.len));
    let largest = frames.iter().map(|frame| frame.len).max().unwrap_or(1).max(1);
    let kept_max = (KEPT_BYTES_MAX / largest).clamp(1, KEPT_FRAMES_MAX);
    let kept_max = usize::try_from(kept_max).map_err(io::Error::other)?;
    Ok(Some(Seekable {
        below: below.clone(),
        name: below.name().to_owned(),
        size_bytes,
        frames,
        kept: Mutex::default(),
        kept_max,
    }))
}

fn read_table(below: &dyn BlockDevice) -> io::Result<Option<Vec<ZstdFrame>>> {
    let Some(footer_at) = below.size_bytes().checked_sub(FOOTER_BYTES) else { return Ok(None) };
    let mut footer = [0; 9];
    below.read_at(footer_at, &mut footer)?;
    let descriptor = footer[4];
    if u32_le(&footer, 5) != 0x8f92_eab1 || descriptor & 0x7c != 0 {
        return Ok(None);
    }
    let has_checksums = descriptor & 0x80 != 0;
    let entry_bytes = if has_checksums { 12 } else { 8 };
    let table_bytes = u64::from(u32_le(&footer, 0)) * entry_bytes;
    let Some(packed_end) = footer_at.checked_sub(table_bytes + HEADER_BYTES) else {
        return Ok(None);
    };
    let len = HEADER_BYTES + table_bytes;
    let Some(table) = part(below, packed_end, len, TABLE_BYTES_MAX)? else { return Ok(None) };
    let says = (u32_le(&table, 0), u64::from(u32_le(&table, 4)));
    if says != (0x184d_2a5e, table_bytes + FOOTER_BYTES) {
        return Ok(None);
    }
    let (mut packed_at, mut start, mut frames) = (0, 0, Vec::new());
    for entry in table[8..].chunks_exact(usize::try_from(entry_bytes).map_err(io::Error::other)?) {
        let (packed_bytes, len) = (u32_le(entry, 0), u32_le(entry, 4));
        // Compression makes no frame much larger, so a packed size of more than twice the limit is
        // wrong.
        if len > FRAME_BYTES_MAX || packed_bytes / 2 > FRAME_BYTES_MAX {
            return Ok(None);
        }
        if len > 0 {
            let checksum = has_checksums.then(|| u32_le(entry, 8));
            frames.push(ZstdFrame { packed_at, packed_bytes, start, len, checksum });
        }
        packed_at += u64::from(packed_bytes);
        start += u64::from(len);
    }
    Ok((packed_at == packed_end).then_some(frames))
}

impl Seekable {
    /// The unpacked bytes of frame `number`.
    fn frame(&self, number: usize) -> io::Result<Arc<Vec<u8>>> {
        let kept = {
            let mut all = self.kept.lock();
            let known = all.iter().position(|kept| kept.number == number);
            let kept = known.and_then(|at| all.remove(at)).unwrap_or_else(|| {
                if all.len() >= self.kept_max {
                    all.pop_front();
                }
                Arc::new(CachedFrame { number, bytes: Mutex::default() })
            });
            all.push_back(kept.clone());
            kept
        };
        let mut bytes = kept.bytes.lock();
        if let Some(bytes) = &*bytes {
            return Ok(bytes.clone());
        }
        let unpacked = Arc::new(self.unpack(&self.frames[number])?);
        *bytes = Some(unpacked.clone());
        Ok(unpacked)
    }

    fn unpack(&self, frame: &ZstdFrame) -> io::Result<Vec<u8>> {
        let size = |bytes: u32| usize::try_from(bytes).map_err(io::Error::other);
        let mut packed = vec![0; size(frame.packed_bytes)?];
        self.below.read_at(frame.packed_at, &mut packed)?;
        let mut unpacked = vec![0; size(frame.len)?];
        let wrong = |what: String| {
            let at = frame.packed_at;
            invalid(format!("the zstd frame at byte {at} is not what the seek table says: {what}"))
        };
        let len = Decompressor::new()?
            .decompress_to_buffer(&packed, &mut unpacked[..])
            .map_err(|error| wrong(error.to_string()))?;
        if len != unpacked.len() {
            return Err(wrong(format!("it has {len} bytes, not {}", unpacked.len())));
        }
        let low_half = |sum: u64| u32::try_from(sum & u64::from(u32::MAX)).ok();
        if frame.checksum.is_some() && frame.checksum != low_half(xxh64(&unpacked, 0)) {
            return Err(wrong("its checksum is wrong".to_owned()));
        }
        Ok(unpacked)
    }
}

impl BlockDevice for Seekable {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.size_bytes, offset, buf.len() as u64)?;
        let mut number = self.frames.partition_point(|frame| frame.start <= offset);
        let (mut at, mut rest) = (offset, buf);
        while !rest.is_empty() {
            // `number` is the first frame that begins behind `at`. Frames cover the disk without
            // gaps, so the frame before it has `at`.
            let frame = &self.frames[number - 1];
            let bytes = self.frame(number - 1)?;
            let there = &bytes[usize::try_from(at - frame.start).map_err(io::Error::other)?..];
            let len = there.len().min(rest.len());
            let (part, behind) = rest.split_at_mut(len);
            part.copy_from_slice(&there[..len]);
            at += len as u64;
            number += 1;
            rest = behind;
        }
        Ok(())
    }

    read_only!();
}
