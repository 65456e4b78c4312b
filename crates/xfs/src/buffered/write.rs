//! Calls that change the bytes of a file, or its size.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use offshoot_kit::counter::count;
use offshoot_kit::sync::MutexGuard;
use offshoot_vfs::{Errno, Error, Result};

use super::XfsBufferedData;
use super::memory::{BufferedFile, DirtyState};
use crate::file::{XfsWriteNeed, XfsWritePlace, index, require_bytes};

/// The most bytes that a write brings to memory at a time. Parts end at multiples of it, so no
/// block is in two of them.
const PART_BYTES: u64 = 1 << 20;

/// What blocks of a file need.
type BlockNeeds = Vec<(Range<u64>, XfsWriteNeed)>;

/// A range of a file that has nothing in memory, and is not written back until this is dropped.
#[derive(Debug)]
pub(crate) struct SettledFile<'f> {
    file: &'f BufferedFile,
    _outgoing: MutexGuard<'f, ()>,
}

impl SettledFile<'_> {
    /// Says what size the change has given the file. Behind a smaller one, nothing is in memory:
    /// the range was settled up to the end of the file.
    pub(crate) fn resized(&self, size: u64) {
        let mut state = self.file.state.write();
        state.size = size;
        state.stored_size = size;
        state.hole_from = None;
    }
}

impl XfsBufferedData<'_> {
    /// Writes bytes to memory, and makes the file longer if it ends before them.
    ///
    /// # Errors
    /// `EFBIG` when no file can have them, `EROFS` when writing has ended, `ENOSPC` when too few
    /// blocks are free, and the errors of write-back when all of the bound is used. The bytes at
    /// the front may be written then.
    pub(crate) fn write(&self, file: &Arc<BufferedFile>, offset: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        require_bytes(format_args!("inode {}", file.ino), offset, data.len() as u64)?;
        self.transactions.log().require_running()?;
        let (mut at, mut rest) = (offset, data);
        while !rest.is_empty() {
            let room = index(PART_BYTES - at % PART_BYTES);
            let (part, behind) = rest.split_at(rest.len().min(room));
            self.keep_bound(file)?;
            self.with_space(|| self.write_part(file, at, part))?;
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    /// Calls `change`, and once more after everything was written back if too few blocks were free.
    /// The caller has no transaction and no [`SettledFile`].
    pub(crate) fn with_space<T>(&self, mut change: impl FnMut() -> Result<T>) -> Result<T> {
        match change() {
            Err(Error::Posix { errno: Errno::NOSPC, .. }) => {
                count(&self.files.counters.waits_for_space, 1);
                // What cannot be written back stays in memory, and its own calls say so.
                let _ = self.write_back_all();
                change()
            }
            outcome => outcome,
        }
    }

    /// The blocks of these bytes, as bytes.
    pub(super) fn covered(&self, bytes: &Range<u64>) -> Range<u64> {
        let block = self.block_bytes();
        bytes.start / block * block..bytes.end.div_ceil(block).saturating_mul(block)
    }

    fn write_part(&self, file: &Arc<BufferedFile>, offset: u64, data: &[u8]) -> Result<()> {
        let bytes = offset..offset + data.len() as u64;
        // While this is held, no write-back removes anything. Only write-backs want it.
        let mut state = file.state.write();
        state.require_file(file.ino)?;
        let gaps = state.runs.gaps(&self.covered(&bytes));
        let needs = self.needs_of(file, &mut state, &gaps)?;
        let edges = self.edges(file, &state, &gaps, &bytes)?;
        self.promise(file, &mut state, &needs)?;
        let was_empty = state.runs.is_empty();
        self.add(&mut state, &gaps, &edges, (offset, data));
        state.size = state.size.max(bytes.end);
        state.writes += 1;
        if was_empty && !gaps.is_empty() {
            state.since = Some(Instant::now());
            self.files.dirty.lock().insert(file.ino, file.clone());
        }
        Ok(())
    }

    /// What the write-back of bytes needs.
    pub(super) fn needs_of(
        &self,
        file: &BufferedFile,
        state: &mut DirtyState,
        gaps: &[Range<u64>],
    ) -> Result<BlockNeeds> {
        let (log, mut needs) = (self.transactions.geometry().block_log, Vec::new());
        for gap in gaps {
            let mut blocks = gap.start >> log..gap.end >> log;
            while !blocks.is_empty() {
                let is_hole = state.hole_from.is_some_and(|from| from <= blocks.start);
                let (end, need) = if is_hole {
                    (blocks.end, XfsWriteNeed::Blocks)
                } else {
                    let front = self.changes().write_need(file.ino, &blocks)?;
                    state.extents = front.extents;
                    (front.end, front.need)
                };
                if end == u64::MAX {
                    state.hole_from = Some(blocks.start);
                }
                let part = blocks.start..end.clamp(blocks.start + 1, blocks.end);
                blocks.start = part.end;
                needs.push((part, need));
            }
        }
        Ok(needs)
    }

    /// Promises what blocks need that are about to be in memory.
    fn promise(
        &self,
        file: &BufferedFile,
        state: &mut DirtyState,
        needs: &BlockNeeds,
    ) -> Result<()> {
        let before = self.needed(state);
        for (blocks, need) in needs {
            state.add_need(blocks, *need);
        }
        let more = self.needed(state).saturating_sub(before);
        let promised = file.promise.raise(more);
        match promised {
            Ok(()) => count(&self.files.counters.promised_blocks, more),
            Err(_) => needs.iter().for_each(|(blocks, _)| state.remove_needs(blocks)),
        }
        promised
    }

    /// What the first and the last block of a range hold in front of it and behind it, as far as
    /// they are not in memory.
    fn edges(
        &self,
        file: &BufferedFile,
        state: &DirtyState,
        gaps: &[Range<u64>],
        bytes: &Range<u64>,
    ) -> Result<[Vec<u8>; 2]> {
        let front = gaps.first().map_or(0..0, |gap| gap.start.min(bytes.start)..bytes.start);
        let behind = gaps.last().map_or(0..0, |gap| bytes.end..gap.end.max(bytes.end));
        let mut edges = [Vec::new(), Vec::new()];
        for (edge, content) in [front, behind].into_iter().zip(&mut edges) {
            content.resize(index(edge.end - edge.start), 0);
            if edge.start < edge.end.min(state.stored_size) {
                self.read_stored(file.ino, edge.start, content)?;
            }
        }
        Ok(edges)
    }

    /// Brings bytes to memory: those of `gaps` with the edges of their blocks, the others over what
    /// is there.
    fn add(
        &self,
        state: &mut DirtyState,
        gaps: &[Range<u64>],
        [front, behind]: &[Vec<u8>; 2],
        (offset, data): (u64, &[u8]),
    ) {
        let end = offset + data.len() as u64;
        let inside = |range: &Range<u64>| {
            let first = range.start.clamp(offset, end) - offset;
            let last = range.end.clamp(offset, end) - offset;
            data.get(index(first)..index(last)).unwrap_or_default()
        };
        let mut at = offset;
        for gap in gaps {
            if at < gap.start {
                state.runs.overwrite(at, inside(&(at..gap.start)));
            }
            let head: &[u8] = if gap.start < offset { front } else { &[] };
            let tail: &[u8] = if gap.end > end { behind } else { &[] };
            state.runs.add(gap.start, &[head, inside(gap), tail]);
            self.files.bytes.add(gap.end - gap.start);
            at = gap.end.min(end);
        }
        if at < end {
            state.runs.overwrite(at, inside(&(at..end)));
        }
    }

    /// Writes bytes past memory, in which nothing of the file stays. Those that are no whole blocks
    /// go through memory.
    ///
    /// # Errors
    /// As [`Self::write`], and those of the device.
    pub(crate) fn write_direct(
        &self,
        file: &Arc<BufferedFile>,
        offset: u64,
        data: &[u8],
    ) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let bytes = require_bytes(format_args!("inode {}", file.ino), offset, data.len() as u64)?;
        if self.covered(&bytes) != bytes {
            self.write(file, offset, data)?;
            return self.write_back(file);
        }
        self.with_space(|| self.write_to_places(file, &bytes, data))
    }

    fn write_to_places(&self, file: &BufferedFile, bytes: &Range<u64>, data: &[u8]) -> Result<()> {
        let settled = self.settle(file, &(0..u64::MAX))?;
        let log = self.transactions.geometry().block_log;
        let changes = self.changes();
        let places = changes.prepare_write(file.ino, bytes.start >> log..bytes.end >> log)?;
        let part = |place: &XfsWritePlace| {
            let start = index((place.at.0 << log) - bytes.start);
            let len = index(u64::from(place.count) << log);
            data.get(start..).and_then(|rest| rest.get(..len)).unwrap_or_default()
        };
        let pieces: Vec<_> = places.iter().map(|place| (place.start, part(place))).collect();
        if let Err(error) = self.send(pieces) {
            return changes.abandon_write(file.ino, &places).and(Err(error));
        }
        let size = file.size();
        let grown = Some(bytes.end).filter(|end| *end > size);
        changes.commit_write(file.ino, &places, grown)?;
        settled.resized(grown.unwrap_or(size));
        Ok(())
    }

    /// Writes back what a range has in memory, and keeps the file from being written back until the
    /// guard is dropped. Before a range is punched, zeroed, allocated, cloned from or to, or read
    /// directly; before a file is collapsed or something is inserted, or exchanged, with a range up
    /// to its end. Then what is in memory is what the device has, and so is the size.
    pub(crate) fn settle<'f>(
        &self,
        file: &'f BufferedFile,
        bytes: &Range<u64>,
    ) -> Result<SettledFile<'f>> {
        let outgoing = file.outgoing.lock();
        let is_longer = {
            let state = file.state.read();
            state.require_file(file.ino)?;
            state.size != state.stored_size
        };
        let all = 0..u64::MAX;
        self.write_back_held(file, if is_longer { &all } else { bytes })?;
        Ok(SettledFile { file, _outgoing: outgoing })
    }

    /// Sets the size. What is in memory behind a smaller one goes away without being written.
    ///
    /// # Errors
    /// `EFBIG` when no file can have this size, and those of the change. The file keeps what is in
    /// memory then, up to the size that it has.
    pub(crate) fn truncate(&self, file: &BufferedFile, size: u64) -> Result<()> {
        require_bytes(format_args!("inode {}", file.ino), size, 0)?;
        self.with_space(|| self.truncate_once(file, size))
    }

    fn truncate_once(&self, file: &BufferedFile, size: u64) -> Result<()> {
        let _outgoing = file.outgoing.lock();
        let is_longer = {
            let mut state = file.state.write();
            state.require_file(file.ino)?;
            let is_longer = size > state.stored_size;
            if is_longer {
                // The device has nothing behind it, and only grows.
                self.cut(file, &mut state, size);
            }
            is_longer && state.size > state.stored_size
        };
        // A size on the device shows no blocks that are only in memory.
        let outcome = if is_longer { self.write_back_held(file, &(0..u64::MAX)) } else { Ok(()) };
        let outcome = outcome.and_then(|()| self.changes().truncate(file.ino, size));
        // One that failed may have set the size, and left blocks behind it. If the size cannot be
        // read either, the file is as it was.
        let found = if outcome.is_ok() { Some(size) } else { self.changes().size(file.ino).ok() };
        let mut state = file.state.write();
        state.hole_from = None;
        let before = state.stored_size;
        state.stored_size = found.unwrap_or(before);
        if outcome.is_ok() || state.stored_size < before {
            let size = state.stored_size;
            self.cut(file, &mut state, size);
            state.size = size;
        }
        outcome
    }

    /// Cuts off what is in memory behind a size.
    fn cut(&self, file: &BufferedFile, state: &mut DirtyState, size: u64) {
        self.forget(file, state, &(size.next_multiple_of(self.block_bytes())..u64::MAX));
        state.runs.clear_behind(size, self.block_bytes());
        state.size = state.size.min(size);
    }

    /// Forgets what is in memory: the file is removed. Nothing of it is written back any more.
    pub(crate) fn discard(&self, file: &BufferedFile) {
        let _outgoing = file.outgoing.lock();
        let mut state = file.state.write();
        // A thread that waits for `outgoing` finds this.
        state.is_discarded = true;
        self.forget(file, &mut state, &(0..u64::MAX));
        drop(state);
        self.files.open(file.ino).lock().remove(file);
    }
}
