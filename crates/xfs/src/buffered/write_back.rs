//! Write-back: from memory to places on the device.
//!
//! A row is what consecutive blocks of one file have in memory. Rows of several files go to the
//! device together, in the order of their places there:
//!
//! ```text
//! rows      file 7: 0..3    file 8: 0..1    file 9: 0..2
//! places    100..103        103..104        104..106         one write of six blocks
//! ```

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use offshoot_kit::counter::count;
use offshoot_kit::runs::BufferRun;
use offshoot_vfs::Result;
use offshoot_xfs_format::FsBlock;

use super::XfsBufferedData;
use super::memory::BufferedFile;
use crate::file::{XfsWritePlace, index};

/// The most bytes of a row.
const ROW_BYTES: u64 = 32 << 20;

/// The files that are written back together at most, and the most bytes that each has.
const MOST_TOGETHER: usize = 64;
const SMALL_BYTES: u64 = 128 << 10;

/// The pieces and the bytes of one write to the device at most.
const MOST_PIECES: usize = 1000;
const MOST_WRITE_BYTES: usize = 32 << 20;

/// Consecutive blocks of a file on their way to the device.
struct OutgoingRow<'f> {
    file: &'f BufferedFile,
    bytes: Range<u64>,
    runs: Vec<BufferRun>,
    /// The size of the file with them, if it grows.
    size: Option<u64>,
    places: Vec<XfsWritePlace>,
}

impl OutgoingRow<'_> {
    /// The first row of a range of a file.
    fn first_of<'f>(file: &'f BufferedFile, bytes: &Range<u64>) -> Option<OutgoingRow<'f>> {
        let state = file.state.read();
        let mut row = state.runs.first_row(bytes)?;
        row.end = row.end.min(row.start + ROW_BYTES);
        let size = Some(state.size.min(row.end)).filter(|size| *size > state.stored_size);
        let runs = state.runs.overlapping(&row);
        Some(OutgoingRow { file, bytes: row, runs, size, places: Vec::new() })
    }

    /// The bytes of the places, in the pieces in which memory has them, each with the block that it
    /// goes to. Places and runs both ascend, so each is looked at once.
    fn pieces(&self, block_log: u8) -> Vec<(FsBlock, &[u8])> {
        let (mut pieces, mut runs) = (Vec::new(), self.runs.iter().peekable());
        for place in &self.places {
            let start = place.at.0 << block_log;
            let wanted = start..start + (u64::from(place.count) << block_log);
            while let Some((at, run)) = runs.peek() {
                let end = at + run.len() as u64;
                let covered = wanted.start.max(*at)..wanted.end.min(end);
                if !covered.is_empty() {
                    let part = run.get(index(covered.start - at)..index(covered.end - at));
                    let block = FsBlock(place.start.0 + ((covered.start - start) >> block_log));
                    pieces.extend(part.map(|part| (block, part)));
                }
                if end > wanted.end {
                    break;
                }
                runs.next();
            }
        }
        pieces
    }
}

impl XfsBufferedData<'_> {
    /// Writes back what a range has in memory, and returns when that is on its way to the device:
    /// [`Self::flush_places`] and the log wait for the device.
    pub(crate) fn write_back_range(&self, file: &BufferedFile, bytes: &Range<u64>) -> Result<()> {
        let _outgoing = file.outgoing.lock();
        self.write_back_held(file, bytes)
    }

    /// Writes back everything that a file has in memory.
    ///
    /// # Errors
    /// Those of this call. What was not written back stays in memory, so an error that a write-back
    /// met before is met again, or is over.
    pub(crate) fn write_back(&self, file: &BufferedFile) -> Result<()> {
        self.write_back_range(file, &(0..u64::MAX))
    }

    /// Makes durable what was written in place, by write-backs and direct writes. What they wrote
    /// elsewhere is durable when the log is forced up to the last commit of the inode.
    ///
    /// # Errors
    /// Those of the device. A flush that fails ends all writing.
    pub(crate) fn flush_places(&self) -> Result<()> {
        let mut flushed = self.files.flushed.lock();
        self.transactions.log().require_running()?;
        let written = self.transactions.in_place();
        if *flushed < written {
            // A device may lose what a failed flush should have made durable, and say nothing of it
            // at the next one, which the log takes for all that was written before.
            let outcome = self.buffers().flush();
            outcome.inspect_err(|error| self.transactions.stop_writing(error))?;
            *flushed = written;
        }
        Ok(())
    }

    /// Writes back what is in memory of all files now.
    ///
    /// # Errors
    /// The first one, after all files were tried.
    pub(crate) fn write_back_all(&self) -> Result<()> {
        self.write_back_files(&self.files.all(), || false)
    }

    /// Writes back these files until `is_enough`, small ones together.
    pub(super) fn write_back_files(
        &self,
        files: &[Arc<BufferedFile>],
        is_enough: impl Fn() -> bool,
    ) -> Result<()> {
        let mut outcome = Ok(());
        for files in files.chunks(MOST_TOGETHER) {
            if is_enough() {
                break;
            }
            outcome = outcome.and(self.write_together(files));
            for file in files {
                if is_enough() {
                    break;
                }
                if file.is_dirty() {
                    outcome = outcome.and(self.write_back(file));
                }
            }
        }
        outcome
    }

    /// Writes the small ones of these files back together. Those that another thread writes back
    /// are left out.
    fn write_together(&self, files: &[Arc<BufferedFile>]) -> Result<()> {
        let is_small = |file: &&Arc<BufferedFile>| file.state.read().runs.bytes() <= SMALL_BYTES;
        let small = files.iter().filter(is_small);
        let held: Vec<_> =
            small.filter_map(|file| Some((file, file.outgoing.try_lock()?))).collect();
        let rows: Vec<_> = held
            .iter()
            .filter_map(|(file, _)| OutgoingRow::first_of(file, &(0..u64::MAX)))
            .collect();
        self.write_rows(rows)
    }

    /// Writes back what a range has in memory. The caller has `outgoing`.
    pub(super) fn write_back_held(&self, file: &BufferedFile, bytes: &Range<u64>) -> Result<()> {
        let begin = Instant::now();
        // What is written behind this end meanwhile stays for the next one.
        let (stored, size) = {
            let state = file.state.read();
            (state.stored_size, self.covered(&(0..state.size)).end)
        };
        let mut rest = self.covered(bytes);
        rest.end = rest.end.min(size);
        if rest.end > stored {
            // The size grows only over what is on the device.
            rest.start = rest.start.min(self.covered(&(stored..size)).start);
        }
        while let Some(row) = OutgoingRow::first_of(file, &rest) {
            rest.start = row.bytes.end;
            self.write_rows(vec![row])?;
        }
        if bytes.start == 0 && bytes.end >= size {
            // Only what was written meanwhile is left. After a part, older bytes may be.
            let mut state = file.state.write();
            state.since = state.since.map(|since| since.max(begin));
        }
        self.store_size(file)
    }

    /// Stores a size behind which nothing is in memory: a call that failed has left it so.
    fn store_size(&self, file: &BufferedFile) -> Result<()> {
        let size = {
            let state = file.state.read();
            let is_longer = state.runs.is_empty() && state.size > state.stored_size;
            (is_longer && !state.is_discarded).then_some(state.size)
        };
        let Some(size) = size else { return Ok(()) };
        self.changes().extend(file.ino, size)?;
        file.state.write().stored_size = size;
        Ok(())
    }

    /// Writes rows of different files back.
    ///
    /// # Errors
    /// The first one: the rows that met one stay in memory.
    fn write_rows(&self, rows: Vec<OutgoingRow<'_>>) -> Result<()> {
        let (mut ready, mut outcome) = (Vec::new(), Ok(()));
        for row in rows {
            match self.prepare(row) {
                Ok(row) => ready.push(row),
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        let log = self.transactions.geometry().block_log;
        let sent = self.send(ready.iter().flat_map(|row| row.pieces(log)).collect());
        for row in &ready {
            outcome = outcome.and(match &sent {
                Ok(()) => self.commit(row),
                Err(_) => self.abandon(row),
            });
        }
        sent.and(outcome)
    }

    /// Takes the places of a row.
    fn prepare<'f>(&self, mut row: OutgoingRow<'f>) -> Result<OutgoingRow<'f>> {
        let log = self.transactions.geometry().block_log;
        let blocks = row.bytes.start >> log..row.bytes.end >> log;
        let changes = self.changes().with_promise(&row.file.promise);
        let places = changes.prepare_write(row.file.ino, blocks);
        row.places = places.inspect_err(|_| self.failed(&row))?;
        count(&self.files.counters.rows, 1);
        count(&self.files.counters.places, row.places.len() as u64);
        Ok(row)
    }

    /// Lets the file map what was written. Bytes that did not change meanwhile leave memory.
    fn commit(&self, row: &OutgoingRow<'_>) -> Result<()> {
        let file = row.file;
        let changes = self.changes().with_promise(&file.promise);
        let committed = changes.commit_write(file.ino, &row.places, row.size);
        committed.inspect_err(|_| self.failed(row))?;
        let mut state = file.state.write();
        state.is_stuck = false;
        for (at, run) in &row.runs {
            if state.runs.at(*at).is_some_and(|now| Arc::ptr_eq(now, run)) {
                let part = row.bytes.start.max(*at)..row.bytes.end.min(at + run.len() as u64);
                let before = state.runs.bytes();
                state.runs.remove(&part);
                self.files.bytes.sub(before - state.runs.bytes());
            }
        }
        let log = self.transactions.geometry().block_log;
        let blocks = row.bytes.start >> log..row.bytes.end >> log;
        state.meet_needs(&blocks);
        state.hole_from = state.hole_from.map(|from| from.max(blocks.end));
        state.stored_size = state.stored_size.max(row.size.unwrap_or(0));
        self.settle_accounts(file, &mut state);
        Ok(())
    }

    /// Gives the places of a row back.
    fn abandon(&self, row: &OutgoingRow<'_>) -> Result<()> {
        let outcome = self.changes().abandon_write(row.file.ino, &row.places);
        self.failed(row);
        outcome
    }

    /// Notes that a row stays in memory. Blocks that were taken for it are free again, so they are
    /// promised again. For those that the file has by now, committed or unwritten as before, none
    /// is: one that is promised to them too would be lost to others, and each failure would take
    /// more.
    fn failed(&self, row: &OutgoingRow<'_>) {
        count(&self.files.counters.failures, 1);
        let (file, log) = (row.file, self.transactions.geometry().block_log);
        let mut state = file.state.write();
        state.is_stuck = true;
        state.hole_from = None;
        // Without an answer, the promise is that of the needs from before.
        if let Ok(needs) = self.needs_of(file, &mut state, std::slice::from_ref(&row.bytes)) {
            state.remove_needs(&(row.bytes.start >> log..row.bytes.end >> log));
            for (blocks, need) in &needs {
                state.add_need(blocks, *need);
            }
        }
        let needed = self.needed(&state);
        file.promise.restore(needed);
        file.promise.lower_to(needed);
    }

    /// Writes pieces of whole blocks to the device, those together that follow each other there.
    pub(super) fn send(&self, mut pieces: Vec<(FsBlock, &[u8])>) -> Result<()> {
        let log = self.transactions.geometry().block_log;
        pieces.sort_by_key(|(start, _)| *start);
        let mut rest = &pieces[..];
        while let Some((first, _)) = rest.first() {
            let (mut slices, mut next, mut bytes) = (Vec::new(), *first, 0);
            for (start, piece) in rest {
                let is_full = slices.len() == MOST_PIECES || bytes + piece.len() > MOST_WRITE_BYTES;
                if *start != next || is_full && !slices.is_empty() {
                    break;
                }
                slices.push(IoSlice::new(piece));
                bytes += piece.len();
                next = FsBlock(next.0 + (piece.len() as u64 >> log));
            }
            rest = rest.get(slices.len()..).unwrap_or_default();
            self.buffers().write_pieces(self.changes().device_place(*first)?, &slices)?;
            count(&self.files.counters.device_writes, 1);
            count(&self.files.counters.device_bytes, bytes as u64);
        }
        Ok(())
    }
}
