//! Data that was written and is not in extents yet.
//!
//! A write goes into memory in whole sectors. The rest of its first and last sector is read into
//! the buffer with it. So each sector of a file is either completely buffered or not at all.
//! Buffered data has its space reserved, and becomes extents at *write-back*.
//!
//! | state | when it changes | under which locks |
//! |---|---|---|
//! | the buffer of a file | writes, truncation, write-back | the lock of the inode, and its own for a moment |
//! | the table | the first sector of a file is buffered, its last is written back | the lock of the inode, and that of a shard |
//!
//! A step of write-back takes space under the reservation of the data that it stores, and the files
//! get that back when the space is taken ([`lend`]). The buffered data has it until the extents are
//! in the tree. It is on loan under the locks of the inodes, so no other thread misses it.
//!
//! Runs on their way to the devices do not change. A thread that writes over one gets a copy
//! (`ordered`).
//!
//! Readers take only the short locks. A reader looks into the buffer first and then into the tree,
//! while write-back empties the buffer after the extents are in the tree. So a reader misses no
//! data that was written before it began.
//!
//! Replacing extents takes several changes of the tree. A thread that looks for extents holds
//! [`Buffers::looking`], and a thread that replaces some holds [`Buffers::changing`]. So no reader
//! sees a hole between the removal of one extent and the insertion of the next. Under these locks
//! only trees are locked.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::RandomState;
pub(crate) use offshoot_kit::runs::BufferRun;
use offshoot_kit::runs::{DirtyRuns, RUN_BYTES};
use offshoot_kit::shards::{SHARDS, shard_of};
use offshoot_vfs::{FileId, Timestamp};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::AlignedBytes;
use super::ordered::OrderedExtent;
use super::pack::chunks_of;
use crate::counter::{NonNegativeCounter, WriteStop};
use crate::shared::Padded;
use crate::space::{Kept, KeptAs, Promise, Purpose, Reservation, Space};

/// The buffer of a file.
pub(crate) type FileBuffer = Arc<RwLock<DirtyFile>>;

/// The state of one file that is only in memory.
#[derive(Debug)]
pub(crate) struct DirtyFile {
    /// The file.
    pub(crate) file: FileId,
    /// They weigh as many extents as they may become, by [`chunks_of`].
    runs: DirtyRuns,
    /// The length of the file, in bytes.
    pub(crate) size: u64,
    /// When it was last written, unless another time was set since.
    pub(crate) mtime: Option<Timestamp>,
    /// The change time of the inode, from the last write.
    pub(crate) ctime: Timestamp,
    /// The reserved data space.
    reserved: Option<Kept>,
    /// The promised metadata, for the growth of trees at write-back.
    promised: Option<Kept>,
    /// Whether other data is about to stand beside this, so that it cannot be inline.
    pub(crate) is_beside: bool,
    /// Whether all of it will be written in place, so that no data space is reserved.
    pub(crate) is_in_place: bool,
    /// The beginning of the data, if it is being written ahead or was.
    pub(crate) ordered: Option<Arc<OrderedExtent>>,
}

impl DirtyFile {
    /// An empty buffer of a file of this size.
    fn new(file: FileId, size: u64, at: Timestamp) -> Self {
        Self {
            file,
            runs: DirtyRuns::new(chunks_of),
            size,
            mtime: None,
            ctime: at,
            reserved: None,
            promised: None,
            is_beside: false,
            is_in_place: false,
            ordered: None,
        }
    }

    /// Keeps the reservation and the promise for data that is about to be buffered.
    pub(crate) fn keep(&mut self, data: Option<&Reservation<'_>>, promise: Promise<'_>) {
        if let Some(data) = data {
            match &mut self.reserved {
                Some(reserved) => _ = reserved.take_over(data, u64::MAX),
                None => self.reserved = Some(data.keep()),
            }
        }
        match &mut self.promised {
            Some(promised) => promised.add(promise),
            None => self.promised = Some(promise.keep()),
        }
    }

    /// The promised bytes of metadata.
    pub(crate) fn promised(&self) -> u64 {
        self.promised.as_ref().map_or(0, Kept::bytes)
    }

    /// Takes out the reservation for `data` bytes, and `promised` bytes of the promise or all of
    /// it. The caller drops them after it has unlocked the buffer.
    pub(crate) fn give_up(&mut self, data: u64, promised: u64) -> [Option<Kept>; 2] {
        let split = |kept: &mut Option<Kept>, bytes| kept.as_mut().map(|kept| kept.split(bytes));
        let promised = promised.min(self.promised());
        [split(&mut self.reserved, data), split(&mut self.promised, promised)]
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Notes that the file was written up to `end`.
    pub(crate) fn written(&mut self, end: u64, at: Timestamp) {
        self.size = self.size.max(end);
        self.mtime = Some(at);
        self.ctime = self.ctime.max(at);
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.runs.bytes()
    }

    /// How many runs there are.
    pub(crate) fn run_count(&self) -> u64 {
        self.runs.len() as u64
    }

    /// How many extents the runs may become: each chunk may be compressed to an extent of its own.
    pub(crate) fn extent_count(&self) -> u64 {
        self.runs.weight()
    }

    /// The runs that overlap `range`, in order.
    pub(crate) fn runs(&self, range: &Range<u64>) -> Vec<BufferRun> {
        self.runs.overlapping(range)
    }

    /// The parts of `range` that are not buffered, in order.
    pub(crate) fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        self.runs.gaps(range)
    }

    /// The first consecutive runs, of at most `most` bytes together, but at least one run.
    pub(crate) fn first_runs(&self, most: u64) -> Vec<BufferRun> {
        let mut found: Vec<BufferRun> = Vec::new();
        let mut end = None;
        let mut bytes = 0;
        for (at, run) in self.runs.iter() {
            let len = run.len() as u64;
            if end.is_some_and(|end| end != at || bytes + len > most) {
                break;
            }
            found.push((at, run.clone()));
            end = Some(at + len);
            bytes += len;
        }
        found
    }

    /// As [`first_runs`](Self::first_runs), but without a last run at the end of the file that may
    /// still grow.
    pub(crate) fn first_whole_runs(&self, most: u64) -> Vec<BufferRun> {
        let mut runs = self.first_runs(most);
        let may_grow = |(at, run): &mut BufferRun| {
            run.len() < RUN_BYTES && *at + run.len() as u64 >= self.size
        };
        runs.pop_if(may_grow);
        runs
    }

    /// How many bytes of `runs` are still unchanged at the beginning of the buffer.
    pub(crate) fn unchanged(&self, runs: &[BufferRun]) -> u64 {
        let pairs = runs.iter().zip(self.runs.iter());
        let same = pairs.take_while(|((at, run), (now, kept))| at == now && Arc::ptr_eq(run, kept));
        same.map(|((_, run), _)| run.len() as u64).sum()
    }

    /// The data of the file, if it is all in one run and has its space reserved. `sector` is the
    /// size of a sector.
    pub(crate) fn all_in_one_run(&self, sector: u64) -> Option<Arc<AlignedBytes>> {
        let len = self.size.next_multiple_of(sector);
        let is_all = self.runs.len() == 1 && self.bytes() == len && !self.is_in_place;
        self.runs.at(0).filter(|_| is_all).cloned()
    }

    /// Overwrites sectors, all of which are buffered.
    pub(crate) fn overwrite(&mut self, offset: u64, data: &[u8]) {
        self.runs.overwrite(offset, data);
    }
}

/// Lends `take` the reservations of so many bytes of each buffer. The caller has the locks of the
/// inodes.
pub(crate) fn lend<T>(
    space: &Arc<Space>,
    lenders: &[(&FileBuffer, u64)],
    take: impl FnOnce(&Kept) -> T,
) -> T {
    let mut claim = Kept::none(space, KeptAs::Reserved(Purpose::Data));
    for &(buffer, bytes) in lenders {
        if let Some(reserved) = &mut buffer.write().reserved {
            reserved.pass(&mut claim, bytes);
        }
    }
    let taken = take(&claim);
    for &(buffer, bytes) in lenders {
        if let Some(reserved) = &mut buffer.write().reserved {
            claim.pass(reserved, bytes);
        }
    }
    taken
}

type BufferShard = RwLock<HashMap<FileId, FileBuffer, RandomState>>;

/// The buffers of all files of a volume.
pub(crate) struct Buffers {
    shards: [Padded<BufferShard>; SHARDS],
    bytes: NonNegativeCounter,
    /// Held exclusively while extents of a file of this shard are replaced.
    extents: [Padded<RwLock<()>>; SHARDS],
}

impl Buffers {
    /// Empty buffers.
    pub(crate) fn new(stop: &Arc<WriteStop>) -> Self {
        let bytes = NonNegativeCounter::new("buffered bytes", stop);
        Self { shards: Default::default(), bytes, extents: Default::default() }
    }

    fn shard(&self, file: FileId) -> &BufferShard {
        &self.shards[shard_of(file)]
    }

    /// Allows the caller to look for extents of `file` until the guard is dropped. None is replaced
    /// meanwhile.
    pub(super) fn looking(&self, file: FileId) -> RwLockReadGuard<'_, ()> {
        self.extents[shard_of(file)].read()
    }

    /// Allows the caller to replace extents of `file` until the guard is dropped.
    pub(crate) fn changing(&self, file: FileId) -> RwLockWriteGuard<'_, ()> {
        self.extents[shard_of(file)].write()
    }

    /// The buffer of `file`, if it has one.
    pub(crate) fn get(&self, file: FileId) -> Option<FileBuffer> {
        self.shard(file).read().get(&file).cloned()
    }

    /// The buffer of `file`, which is `size` bytes long. It is made if there is none.
    pub(crate) fn get_or_add(&self, file: FileId, size: u64, at: Timestamp) -> FileBuffer {
        let new = || Arc::new(RwLock::new(DirtyFile::new(file, size, at)));
        self.shard(file).write().entry(file).or_insert_with(new).clone()
    }

    /// Takes the buffer of `file` out of the table. Its bytes are counted until they are removed.
    pub(crate) fn take(&self, file: FileId) -> Option<FileBuffer> {
        self.shard(file).write().remove(&file)
    }

    /// The buffered bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// All files with buffers, in the order of their inodes in trees.
    pub(crate) fn files(&self) -> Vec<FileId> {
        let files = |shard: &Padded<BufferShard>| shard.read().keys().copied().collect::<Vec<_>>();
        let mut all: Vec<_> = self.shards.iter().flat_map(files).collect();
        all.sort_unstable();
        all
    }

    /// Adds `parts`, which together are whole sectors of a file, none of which is buffered.
    pub(crate) fn add(&self, buffer: &FileBuffer, start: u64, parts: &[&[u8]]) {
        self.bytes.add(parts.iter().map(|part| part.len() as u64).sum());
        buffer.write().runs.add(start, parts);
    }

    /// Removes whole sectors from a buffer, and returns how many bytes it removed.
    pub(crate) fn remove(&self, buffer: &FileBuffer, range: &Range<u64>) -> u64 {
        let mut dirty = buffer.write();
        let before = dirty.bytes();
        dirty.runs.remove(range);
        let removed = before - dirty.bytes();
        self.bytes.sub(removed);
        removed
    }

    /// Makes the file `size` bytes long, and returns how many bytes it removed from the buffer.
    pub(crate) fn resize(&self, buffer: &FileBuffer, size: u64, sector: u64) -> u64 {
        let removed = self.remove(buffer, &(size.next_multiple_of(sector)..u64::MAX));
        let mut dirty = buffer.write();
        dirty.runs.clear_behind(size, sector);
        dirty.size = size;
        removed
    }
}

/// The length of data in memory as an index.
pub(crate) fn index(len: u64) -> usize {
    usize::try_from(len).expect("it is in memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: Timestamp = Timestamp { secs: 1, nanos: 0 };

    /// Random writes, cuts and write-backs of a file, beside an array of its sectors.
    #[test]
    fn what_is_buffered_is_what_was_written() {
        const SECTOR: u64 = 16;
        const SECTOR_BYTES: usize = 16;
        const SECTORS: u64 = 40;
        // A chunk ends in the middle.
        const BASE: u64 = (128 << 10) - 20 * SECTOR;
        let mut random = offshoot_testkit::random::Random::new(7);
        let buffers = Buffers::new(&Arc::default());
        let file = FileId { dev: 5, ino: 257 };
        let buffer = buffers.get_or_add(file, 0, AT);
        let mut model: Vec<Option<[u8; SECTOR_BYTES]>> = vec![None; index(SECTORS)];
        for step in 0..20_000u64 {
            let start = random.below(SECTORS);
            let end = start + 1 + random.below(SECTORS - start);
            let range = BASE + start * SECTOR..BASE + end * SECTOR;
            let sectors = index(start)..index(end);
            if random.below(4) == 0 {
                let removed = buffers.remove(&buffer, &range);
                let there = model[sectors.clone()].iter().flatten().count() as u64;
                assert_eq!(removed, there * SECTOR);
                model[sectors].fill(None);
            } else {
                let byte = u8::try_from(step % 251).expect("below 251");
                let gaps = buffer.read().gaps(&range);
                for gap in gaps {
                    let sector = |at: u64| index((at - BASE) / SECTOR);
                    let missing = sector(gap.start)..sector(gap.end);
                    assert!(model[missing].iter().all(Option::is_none));
                    let zeros = vec![0; index(gap.end - gap.start)];
                    let (first, rest) = zeros.split_at(5);
                    buffers.add(&buffer, gap.start, &[first, rest]);
                }
                buffer.write().overwrite(range.start, &vec![byte; index(range.end - range.start)]);
                model[sectors].fill(Some([byte; SECTOR_BYTES]));
            }
            let mut found = vec![None; index(SECTORS)];
            let runs = buffer.read().runs(&(0..u64::MAX));
            for (at, run) in &runs {
                for (i, sector) in run.chunks(SECTOR_BYTES).enumerate() {
                    found[index((at - BASE) / SECTOR) + i] =
                        Some(sector.try_into().expect("whole sectors"));
                }
            }
            assert_eq!(found, model, "step {step}");
            let chunks = runs.iter().map(|(at, run)| chunks_of(&(*at..at + run.len() as u64)));
            assert_eq!(buffer.read().extent_count(), chunks.sum::<u64>());
            assert_eq!(buffers.bytes(), model.iter().flatten().count() as u64 * SECTOR);
        }
    }

    /// Appends to a short run make it longer. A long run that another thread holds stays as it is.
    #[test]
    fn a_long_run_that_is_held_is_not_copied() {
        let buffers = Buffers::new(&Arc::default());
        let buffer = buffers.get_or_add(FileId { dev: 5, ino: 257 }, 0, AT);
        let bytes = vec![1; 4096];
        let mut at = 0;
        let mut append = |count: u64| {
            for _ in 0..count {
                buffers.add(&buffer, at, &[&bytes[..100], &bytes[100..]]);
                at += 4096;
            }
            buffer.read().runs(&(0..u64::MAX))
        };
        let short = append(2);
        let long = append(30);
        assert_eq!((long.len(), long[0].1.len()), (1, 32 * 4096));
        assert_eq!(short[0].1.len(), 2 * 4096, "the reader has what it had");
        let runs = append(3);
        assert_eq!(
            runs.iter().map(|(_, run)| run.len()).collect::<Vec<_>>(),
            [32 * 4096, 3 * 4096]
        );
        assert!(Arc::ptr_eq(&runs[0].1, &long[0].1));
        drop((short, long, runs));
        assert_eq!(append(1)[1].1.len(), 4 * 4096);
    }
}
