//! Compressing data that is about to be written back.
//!
//! Data is cut into chunks at multiples of the longest extent that may be compressed. Each chunk is
//! compressed by itself, several of them at once (`workers`), while the chunks before them are
//! written. Compression happens before a transaction is joined, so no thread waits for it. A chunk
//! stays plain unless compression saves at least one sector.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::compress::{CompressionMethod, compress, decompress};
use offshoot_btrfs_format::file_extent::MAX_COMPRESSED_EXTENT;
use offshoot_kit::workers::WorkerTask;

use super::AlignedBytes;
use super::store::Sectors;

/// The most that is compressed before some of it is written, in bytes.
const AHEAD_BYTES: u64 = 8 << 20;

/// The most compressed chunks that are written at once. Consecutive plain chunks go into one
/// extent, of up to [`AHEAD_BYTES`].
pub(crate) const MOST_AT_ONCE: usize = 16;

/// A part of a file that becomes one compressed extent, or a part of a plain one.
#[derive(Debug)]
pub(crate) struct CompressionChunk {
    pub(crate) range: Range<u64>,
    /// The compressed bytes in whole sectors, if that saves a sector.
    pub(crate) packed: PackedBytes,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    pub(crate) method: CompressionMethod,
    /// The size of a sector, in bytes.
    pub(crate) sector: u32,
}

/// The compressed bytes of a chunk, if it is compressed.
type PackedBytes = Option<Arc<AlignedBytes>>;

/// Consecutive chunks that are about to be written.
#[derive(Default)]
pub(crate) struct CompressionChunks {
    ready: Vec<CompressionChunk>,
    /// The chunks behind `ready`, which are being compressed.
    coming: VecDeque<(Range<u64>, WorkerTask<PackedBytes>)>,
}

impl CompressionChunks {
    /// Starts compressing the beginning of `data`, as far as it is not compressed yet, and waits
    /// for the first chunks.
    pub(crate) fn prepare(&mut self, packing: Packing, data: Sectors<'_>) {
        self.ready.retain(|chunk| chunk.range.start >= data.start);
        self.coming.retain(|(range, _)| range.start >= data.start);
        let ahead = (data.start + AHEAD_BYTES) / MAX_COMPRESSED_EXTENT * MAX_COMPRESSED_EXTENT;
        let ahead = ahead.min(data.range().end);
        let (mut first, mut last) = self.known().unwrap_or((data.start, data.start));
        if first > ahead {
            *self = Self::default();
            (first, last) = (data.start, data.start);
        }
        let start = |range: Range<u64>| {
            let (runs, wanted) = (data.runs_of(&range), range.clone());
            let pack = move || pack_one(packing, &Sectors::new(&runs).contents(&wanted));
            let is_alone = ahead - data.start <= MAX_COMPRESSED_EXTENT;
            (range, if is_alone { WorkerTask::now(pack) } else { WorkerTask::start(pack) })
        };
        // If a chunk was stored in part, its rest is compressed again.
        let before: Vec<_> = cut(data.start..first).map(start).collect();
        self.coming.extend(cut(last..ahead.max(last)).map(start));
        let finished =
            |(range, task): (_, WorkerTask<_>)| CompressionChunk { range, packed: task.finish() };
        self.ready.splice(..0, before.into_iter().map(finished));
        while (self.ready.len() < MOST_AT_ONCE || self.are_plain())
            && let Some((range, task)) = self.coming.pop_front()
        {
            self.ready.push(CompressionChunk { range, packed: task.finish() });
        }
    }

    /// Whether all ready chunks stay plain.
    fn are_plain(&self) -> bool {
        self.ready.iter().all(|chunk| chunk.packed.is_none())
    }

    /// The range of all known chunks.
    fn known(&self) -> Option<(u64, u64)> {
        let ready = self.ready.iter().map(|chunk| &chunk.range);
        let mut all = ready.chain(self.coming.iter().map(|(range, _)| range));
        let first = all.next()?;
        Some((first.start, all.last().unwrap_or(first).end))
    }

    /// The beginning of `data` that can be written at once, after [`prepare`](Self::prepare): at
    /// most `most` compressed chunks, or plain ones.
    pub(crate) fn first<'s>(
        &self,
        data: Sectors<'s>,
        most: usize,
    ) -> (Sectors<'s>, &[CompressionChunk]) {
        let end = data.range().end;
        let is_packed =
            |chunk: &&CompressionChunk| chunk.packed.is_some() && chunk.range.end <= end;
        let packed = self.ready.iter().take(most).take_while(is_packed).count();
        let packed = &self.ready[..packed];
        // A chunk of which only a part can be replaced now is stored plain.
        let plain = || self.ready.iter().take_while(|chunk| chunk.packed.is_none()).last();
        let last = packed.last().or_else(plain).or(self.ready.first());
        (last.map_or(data, |last| data.first(last.range.end - data.start)), packed)
    }

    /// Whether the chunks show that the file is not worth compressing: its first chunk did not
    /// become smaller.
    pub(crate) fn are_useless(&self, packing: Packing) -> bool {
        self.ready.first().is_some_and(|CompressionChunk { range, packed }| {
            // A single sector can never become a sector smaller, so it shows nothing.
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

/// The number of chunks of a range.
pub(crate) fn chunks_of(range: &Range<u64>) -> u64 {
    range.end.div_ceil(MAX_COMPRESSED_EXTENT) - range.start / MAX_COMPRESSED_EXTENT
}

/// Compresses whole sectors, and pads the result to whole sectors. `None` unless that saves a
/// sector.
fn pack_one(packing: Packing, bytes: &[u8]) -> PackedBytes {
    let sector = packing.sector as usize;
    let most = bytes.len().checked_sub(sector).filter(|&most| most > 0)?;
    let packed = pack_bytes(packing, bytes, most)?;
    let padding = vec![0; packed.len().next_multiple_of(sector) - packed.len()];
    Some(Arc::new(AlignedBytes::of(&[&packed, &padding])))
}

/// Compresses inline data. `None` unless that saves a byte.
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

#[cfg(test)]
mod tests {
    use offshoot_btrfs_format::compress::Compression;
    use offshoot_testkit::random::{Random, seed_of_run};

    use super::*;

    /// Plain chunks are written in one piece, up to the first compressed chunk or to the end.
    #[test]
    fn data_that_does_not_shrink_is_not_cut() {
        let mut random = Random::new(seed_of_run());
        let method = CompressionMethod::new(Compression::Zstd).expect("it is one");
        let packing = Packing { method, sector: 4096 };
        let noise = random.bytes(8 << 20);
        for plain in [8 << 20, 5 << 20, 2 << 20] {
            let text = random.text((8 << 20) - plain);
            let runs = [(0, Arc::new(AlignedBytes::of(&[&noise[..plain], &text])))];
            let data = Sectors::new(&runs);
            let mut chunks = CompressionChunks::default();
            chunks.prepare(packing, data);
            let (stored, packed) = chunks.first(data, MOST_AT_ONCE);
            assert_eq!((stored.range(), packed.len()), (0..plain as u64, 0));
        }
    }

    /// Stores a file in steps, some of which store less than they could or end in the middle of a
    /// chunk.
    #[test]
    fn what_is_stored_in_steps_is_what_was_given() {
        const SECTOR: u64 = 4096;
        let mut random = Random::new(seed_of_run());
        let method = CompressionMethod::new(Compression::Zstd).expect("it is one");
        let packing = Packing { method, sector: 4096 };
        let len = 20 << 20;
        let from = SECTOR * random.below(64);
        let text = random.text(len);
        let runs: Vec<_> = (from..)
            .step_by(1 << 20)
            .zip(text.chunks(1 << 20))
            .map(|(at, bytes)| (at, Arc::new(AlignedBytes::of(&[bytes]))))
            .collect();
        let mut chunks = CompressionChunks::default();
        let mut at = from;
        let end = from + len as u64;
        while at < end {
            let all = Sectors::new(&runs);
            let rest: Vec<_> = all.runs_of(&(at..end));
            let (start, first) = &rest[0];
            let skip = usize::try_from(at - start).expect("small");
            let first = (at, Arc::new(AlignedBytes::of(&[&first[skip..]])));
            let rest: Vec<_> = [first].into_iter().chain(rest[1..].iter().cloned()).collect();
            let data = Sectors::new(&rest);
            chunks.prepare(packing, data);
            let (stored, packed) =
                chunks.first(data, 1 + usize::try_from(random.below(16)).unwrap());
            assert_eq!(stored.start, at);
            if packed.is_empty() {
                assert_eq!(stored.len, SECTOR, "text becomes smaller");
                at = stored.range().end;
                continue;
            }
            let mut next = at;
            for CompressionChunk { range, packed } in packed {
                assert_eq!(range.start, next, "one behind the other");
                let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap()];
                let packed = packed.as_ref().expect("it is packed");
                decompress(Compression::Zstd, packed, 4096, &mut bytes).expect("a frame");
                assert!(*bytes == *data.contents(range), "{range:?} holds something else");
                next = range.end;
            }
            assert_eq!(stored.range().end, next);
            at = match random.below(4) {
                0 => (at + SECTOR * (1 + random.below(100))).min(next),
                1 => packed[0].range.end,
                _ => next,
            };
        }
    }
}
