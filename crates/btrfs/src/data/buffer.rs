//! Data that was written and is not in extents yet.
//!
//! A write goes into memory, in whole sectors: what it does not cover of its first and last sector
//! is read into the buffer with it. So every sector of a file is either buffered, all of it, or not
//! at all. What is buffered has its space reserved, and becomes extents at *write-back*.
//!
//! | what | when it changes | under what |
//! |---|---|---|
//! | what a file has buffered | writes, truncation, write-back | the lock of the inode, and its own for the moment |
//! | the table | a file's first sector is buffered, its last is written back | the lock of the inode, and that of a shard |
//!
//! Runs that are on their way to the devices do not change: who writes over one gets a copy
//! (`ordered`).
//!
//! Readers take only the short locks. A reader looks into the buffer first and into the tree after
//! that; write-back empties the buffer when the extents are in the tree. So no reader misses what
//! was written before it began.
//!
//! Replacing extents takes several changes of the tree. Who looks for extents, and who replaces
//! some, say so ([`Buffers::looking`], [`Buffers::changing`]), so that nobody sees a hole where one
//! extent has gone and the other has not come. Under these locks only trees are locked.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::RandomState;
use offshoot_vfs::{FileId, Timestamp};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::ordered::OrderedExtent;
use super::pack::chunks_of;
use super::{SHARDS, shard_of};
use crate::counter::{Counter, Stop};
use crate::space::{Kept, Promise, Reservation};

/// The longest run of sectors in one piece of memory, in bytes.
const RUN_BYTES: usize = 1 << 20;

/// Bytes that lie one behind the other in a file, from this offset on.
pub(crate) type Run = (u64, Arc<Vec<u8>>);

/// What is buffered of a file.
pub(crate) type FileBuffer = Arc<RwLock<Dirty>>;

/// What one file has in memory only.
#[derive(Debug)]
pub(crate) struct Dirty {
    /// The file.
    pub(crate) file: FileId,
    runs: BTreeMap<u64, Arc<Vec<u8>>>,
    /// Bytes in all runs.
    bytes: u64,
    /// What [`chunks_of`] all runs come to.
    extents: u64,
    /// The length of the file, in bytes.
    pub(crate) size: u64,
    /// When it was written, unless another time was set since.
    pub(crate) mtime: Option<Timestamp>,
    /// When the inode changed with that.
    pub(crate) ctime: Timestamp,
    /// The space that the data takes.
    reserved: Option<Kept>,
    /// Metadata that is promised because write-back makes trees larger.
    promised: Option<Kept>,
    /// Other data is about to stand beside this, so it is not kept in the extent item.
    pub(crate) is_beside: bool,
    /// It has no data reserved: all of it goes where it may be written in place.
    pub(crate) is_in_place: bool,
    /// Its beginning is on its way to the devices, or there.
    pub(crate) ordered: Option<Arc<OrderedExtent>>,
}

impl Dirty {
    /// Nothing yet, of a file of this size.
    fn new(file: FileId, size: u64, at: Timestamp) -> Self {
        Self {
            file,
            runs: BTreeMap::new(),
            bytes: 0,
            extents: 0,
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

    /// Keeps space for data that is about to be buffered, and what was promised for that.
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

    /// What is promised, in bytes of metadata.
    pub(crate) fn promised(&self) -> u64 {
        self.promised.as_ref().map_or(0, Kept::bytes)
    }

    /// Takes out what is kept for so many bytes of data, and so much of what is promised, or all
    /// of it. The caller drops it when the buffer is not locked any more.
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
        self.bytes
    }

    /// How many runs there are.
    pub(crate) fn run_count(&self) -> u64 {
        self.runs.len() as u64
    }

    /// How many extents it may become, each run of sectors in chunks that are compressed by
    /// themselves.
    pub(crate) fn extent_count(&self) -> u64 {
        self.extents
    }

    /// The runs that overlap `range`, in order.
    pub(crate) fn runs(&self, range: &Range<u64>) -> Vec<Run> {
        let first = self.runs.range(..=range.start).next_back().map_or(range.start, |(&at, _)| at);
        self.runs
            .range(first..range.end.max(first))
            .filter(|(at, run)| **at + run.len() as u64 > range.start)
            .map(|(&at, run)| (at, run.clone()))
            .collect()
    }

    /// The parts of `range` that are not buffered, in order.
    pub(crate) fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for (start, run) in self.runs(range) {
            if at < start {
                gaps.push(at..start);
            }
            at = start + run.len() as u64;
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }

    /// The first runs that lie one behind the other, `most` bytes of them or the first alone.
    pub(crate) fn first_runs(&self, most: u64) -> Vec<Run> {
        let mut found: Vec<Run> = Vec::new();
        let mut end = None;
        let mut bytes = 0;
        for (&at, run) in &self.runs {
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

    /// As [`first_runs`](Self::first_runs), but without one at the end of the file that may become
    /// longer.
    pub(crate) fn first_whole_runs(&self, most: u64) -> Vec<Run> {
        let mut runs = self.first_runs(most);
        let may_grow =
            |(at, run): &mut Run| run.len() < RUN_BYTES && *at + run.len() as u64 >= self.size;
        runs.pop_if(may_grow);
        runs
    }

    /// How many bytes of `runs` are the first that is buffered, as they were.
    pub(crate) fn unchanged(&self, runs: &[Run]) -> u64 {
        let pairs = runs.iter().zip(&self.runs);
        let same =
            pairs.take_while(|((at, run), (now, kept))| at == *now && Arc::ptr_eq(run, kept));
        same.map(|((_, run), _)| run.len() as u64).sum()
    }

    /// The data of the file, if that is one run of sectors of this size, and has its space
    /// reserved.
    pub(crate) fn all_in_one_run(&self, sector: u64) -> Option<Arc<Vec<u8>>> {
        let len = self.size.next_multiple_of(sector);
        let is_all = self.runs.len() == 1 && self.bytes == len && !self.is_in_place;
        self.runs.get(&0).filter(|_| is_all).cloned()
    }

    /// Adds whole sectors, none of which is buffered.
    fn add(&mut self, start: u64, bytes: Vec<u8>) {
        self.bytes += bytes.len() as u64;
        let end = start + bytes.len() as u64;
        if let Some((&at, run)) = self.runs.range_mut(..start).next_back()
            && at + run.len() as u64 == start
            && run.len() + bytes.len() <= RUN_BYTES
        {
            Arc::make_mut(run).extend_from_slice(&bytes);
            self.extents += chunks_of(&(at..end)) - chunks_of(&(at..start));
        } else {
            self.extents += chunks_of(&(start..end));
            self.runs.insert(start, Arc::new(bytes));
        }
    }

    /// Puts `data` over sectors that are buffered, all of them.
    pub(crate) fn overwrite(&mut self, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        let first = self.runs.range(..=offset).next_back().map_or(offset, |(&at, _)| at);
        for (&at, run) in self.runs.range_mut(first..end) {
            let covered = offset.max(at)..end.min(at + run.len() as u64);
            if !covered.is_empty() {
                let target = index(covered.start - at)..index(covered.end - at);
                let source = index(covered.start - offset)..index(covered.end - offset);
                Arc::make_mut(run)[target].copy_from_slice(&data[source]);
            }
        }
    }

    /// Takes out everything from `start` to `end`, the ends of sectors.
    fn remove(&mut self, range: &Range<u64>) {
        for (at, run) in self.runs(range) {
            let end = at + run.len() as u64;
            self.runs.remove(&at);
            self.bytes -= end.min(range.end) - at.max(range.start);
            self.extents -= chunks_of(&(at..end));
            if at < range.start {
                self.extents += chunks_of(&(at..range.start));
                self.runs.insert(at, Arc::new(run[..index(range.start - at)].to_vec()));
            }
            if range.end < end {
                self.extents += chunks_of(&(range.end..end));
                self.runs.insert(range.end, Arc::new(run[index(range.end - at)..].to_vec()));
            }
        }
    }

    /// Zeros what lies behind `size` in its sector.
    fn clear_behind(&mut self, size: u64, sector: u64) {
        let tail = size..size.next_multiple_of(sector);
        if !tail.is_empty() && self.gaps(&tail).is_empty() {
            self.overwrite(size, &vec![0; index(tail.end - tail.start)]);
        }
    }
}

type Shard = RwLock<HashMap<FileId, FileBuffer, RandomState>>;

/// What is buffered of all files of a volume.
pub(crate) struct Buffers {
    shards: [Shard; SHARDS],
    bytes: Counter,
    /// Held exclusively while extents of a file of this shard are replaced.
    extents: [RwLock<()>; SHARDS],
}

impl Buffers {
    /// Nothing is buffered.
    pub(crate) fn new(stop: &Arc<Stop>) -> Self {
        let bytes = Counter::new("buffered bytes", stop);
        Self { shards: Default::default(), bytes, extents: Default::default() }
    }

    fn shard(&self, file: FileId) -> &Shard {
        &self.shards[shard_of(file)]
    }

    /// Until this is dropped extents of `file` may be looked for, and none is replaced.
    pub(super) fn looking(&self, file: FileId) -> RwLockReadGuard<'_, ()> {
        self.extents[shard_of(file)].read()
    }

    /// Until this is dropped extents of `file` may be replaced.
    pub(crate) fn changing(&self, file: FileId) -> RwLockWriteGuard<'_, ()> {
        self.extents[shard_of(file)].write()
    }

    /// What of `file` is buffered, if anything.
    pub(crate) fn get(&self, file: FileId) -> Option<FileBuffer> {
        self.shard(file).read().get(&file).cloned()
    }

    /// What of `file`, which is `size` bytes long, is buffered.
    pub(crate) fn get_or_add(&self, file: FileId, size: u64, at: Timestamp) -> FileBuffer {
        let new = || Arc::new(RwLock::new(Dirty::new(file, size, at)));
        self.shard(file).write().entry(file).or_insert_with(new).clone()
    }

    /// Takes what is buffered of `file` out of the table. Its bytes are counted until they are
    /// removed.
    pub(crate) fn take(&self, file: FileId) -> Option<FileBuffer> {
        self.shard(file).write().remove(&file)
    }

    /// Bytes in memory, of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// All files that have something buffered, in the order of their inodes in trees.
    pub(crate) fn files(&self) -> Vec<FileId> {
        let files = |shard: &Shard| shard.read().keys().copied().collect::<Vec<_>>();
        let mut all: Vec<_> = self.shards.iter().flat_map(files).collect();
        all.sort_unstable();
        all
    }

    /// Adds whole sectors of a file, none of which is buffered.
    pub(crate) fn add(&self, buffer: &FileBuffer, start: u64, bytes: Vec<u8>) {
        self.bytes.add(bytes.len() as u64);
        buffer.write().add(start, bytes);
    }

    /// Takes whole sectors of a file out.
    pub(crate) fn remove(&self, buffer: &FileBuffer, range: &Range<u64>) -> u64 {
        let mut dirty = buffer.write();
        let before = dirty.bytes();
        dirty.remove(range);
        let removed = before - dirty.bytes();
        self.bytes.sub(removed);
        removed
    }

    /// Makes the file `size` bytes long, and gives how many bytes are not buffered any more.
    pub(crate) fn resize(&self, buffer: &FileBuffer, size: u64, sector: u64) -> u64 {
        let removed = self.remove(buffer, &(size.next_multiple_of(sector)..u64::MAX));
        let mut dirty = buffer.write();
        dirty.clear_behind(size, sector);
        dirty.size = size;
        removed
    }
}

/// A length of what is in memory, or about to be.
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
                    buffers.add(&buffer, gap.start, vec![0; index(gap.end - gap.start)]);
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
}
