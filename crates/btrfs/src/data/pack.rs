//! Compressing what is about to be written back.
//!
//! Data is cut into chunks at multiples of the longest extent that may be compressed, and each chunk is compressed by itself: several of
//! them at once, and before a transaction is joined, so that nobody waits for it. A chunk that does not become a sector
//! smaller stays as it is.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::thread;

use offshoot_btrfs_format::compress::{Method, compress, decompress};
use offshoot_btrfs_format::file_extent::MAX_COMPRESSED_EXTENT;
use parking_lot::Mutex;

use super::store::Sectors;

/// The most that is compressed before some of it is written, in bytes.
const AHEAD_BYTES: u64 = 8 << 20;

/// A part of a file that becomes one extent, or a part of one.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) range: Range<u64>,
    /// What it is compressed, in whole sectors, if that is less.
    pub(crate) packed: Option<Arc<Vec<u8>>>,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    pub(crate) method: Method,
    /// The size of a sector, in bytes.
    pub(crate) sector: u32,
}

/// Chunks that are about to be written, one behind the other.
#[derive(Debug, Default)]
pub(crate) struct Chunks(Vec<Chunk>);

impl Chunks {
    /// Has the beginning of `data` compressed, as far as it is not yet.
    pub(crate) fn prepare(&mut self, packing: Packing, data: Sectors<'_>) {
        self.0.retain(|chunk| chunk.range.start >= data.start);
        let known = self.0.first().map_or(u64::MAX, |chunk| chunk.range.start);
        let ahead = (data.start + AHEAD_BYTES) / MAX_COMPRESSED_EXTENT * MAX_COMPRESSED_EXTENT;
        if known > ahead {
            self.0.clear();
        }
        self.0.splice(..0, pack(packing, data.first(known.min(ahead) - data.start)));
    }

    /// What of `data`, which was prepared, can be written at once: `most` compressed chunks, or what is not compressed.
    pub(crate) fn first<'s>(&self, data: Sectors<'s>, most: usize) -> (Sectors<'s>, &[Chunk]) {
        let end = data.range().end;
        let is_packed = |chunk: &&Chunk| chunk.packed.is_some() && chunk.range.end <= end;
        let packed = self.0.iter().take(most).take_while(is_packed).count();
        let packed = &self.0[..packed];
        // A chunk of which only a part can be replaced now goes as it is.
        let plain = || self.0.iter().take_while(|chunk| chunk.packed.is_none()).last();
        let last = packed.last().or_else(plain).or(self.0.first());
        (last.map_or(data, |last| data.first(last.range.end - data.start)), packed)
    }

    /// Whether the file begins with these, and is not worth to be compressed if that tells it.
    pub(crate) fn are_useless(&self, packing: Packing) -> bool {
        self.0.first().is_some_and(|Chunk { range, packed }| {
            // A single sector says nothing.
            range.start == 0 && range.end > u64::from(packing.sector) && packed.is_none()
        })
    }
}

/// The chunks of a range.
fn cut(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let chunk = at..range.end.min((at / MAX_COMPRESSED_EXTENT + 1) * MAX_COMPRESSED_EXTENT);
        at = chunk.end;
        (!chunk.is_empty()).then_some(chunk)
    })
}

/// How many chunks a range is.
pub(crate) fn chunks_of(range: &Range<u64>) -> u64 {
    range.end.div_ceil(MAX_COMPRESSED_EXTENT) - range.start / MAX_COMPRESSED_EXTENT
}

/// Held by the one who compresses on several threads: others do it on their own.
static WIDE: Mutex<()> = Mutex::new(());

/// Compresses `data`, on all cores when nobody else does.
fn pack(packing: Packing, data: Sectors<'_>) -> Vec<Chunk> {
    let ranges: Vec<_> = cut(data.range()).collect();
    let done: Vec<OnceLock<_>> = ranges.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((range, place)) = {
            let at = next.fetch_add(1, Relaxed);
            ranges.get(at).zip(done.get(at))
        } {
            place.get_or_init(|| pack_one(packing, &data.contents(range)));
        }
    };
    let permit = if ranges.len() > 1 { WIDE.try_lock() } else { None };
    let cores = permit.map_or(1, |_| thread::available_parallelism().map_or(1, usize::from));
    thread::scope(|scope| {
        for _ in 1..cores.min(ranges.len()) {
            // Without a thread it takes longer.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
    let packed = done.into_iter().map(|one| one.into_inner().expect("all were worked on"));
    ranges.into_iter().zip(packed).map(|(range, packed)| Chunk { range, packed }).collect()
}

/// Whole sectors, compressed and filled up to whole sectors, if at least one is saved.
fn pack_one(packing: Packing, bytes: &[u8]) -> Option<Arc<Vec<u8>>> {
    let sector = packing.sector as usize;
    let most = bytes.len().checked_sub(sector).filter(|&most| most > 0)?;
    let mut packed = pack_bytes(packing, bytes, most)?;
    packed.resize(packed.len().next_multiple_of(sector), 0);
    Some(Arc::new(packed))
}

/// Bytes that are to be kept in an extent item, compressed, if that is less.
pub(crate) fn pack_inline(packing: Packing, bytes: &[u8]) -> Option<Vec<u8>> {
    pack_bytes(packing, bytes, bytes.len() - 1)
}

fn pack_bytes(Packing { method, sector }: Packing, bytes: &[u8], most: usize) -> Option<Vec<u8>> {
    let packed = compress(method, bytes, sector, most)?;
    if cfg!(debug_assertions) {
        let mut again = vec![0; bytes.len()];
        let made = decompress(method.compression(), &packed, sector, &mut again);
        assert!(made.is_ok() && again == bytes, "{method:?} does not give back what it took");
    }
    Some(packed)
}
