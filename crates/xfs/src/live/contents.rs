//! The contents of one file. The caller has the lock of the inode: exclusively to change them,
//! shared to read.
//!
//! A write leaves its bytes in memory (`buffered`), and the times of the file in a commit. Like the
//! kernel's clock for files, this one ticks: writes within one tick of the times that a file has
//! leave them as they are.

use std::ops::Range;
use std::sync::Arc;

use offshoot_vfs::{Attr, FileId, Result, Timestamp};
use offshoot_xfs_format::inode::XfsInodeFlags;

use super::{XfsLive, ino_of, refuse_flags};
use crate::buffered::{BufferedFile, XfsBufferedData};
use crate::data::{FileContent, ReadHints};
use crate::file::{index, require_bytes};
use crate::trans::XfsInodeCommit;

/// The most bytes that are shown at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Where data of a file begins and ends that a search found.
pub(super) type DataRun = Range<u64>;

/// The contents of a file.
pub(super) struct LiveContents<'l> {
    pub(super) data: XfsBufferedData<'l>,
    pub(super) buffer: Arc<BufferedFile>,
}

/// What each change of a file makes another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContentMarks {
    commit: Option<XfsInodeCommit>,
    /// Writes in place of all files.
    in_place: u64,
    buffered: u64,
}

impl LiveContents<'_> {
    pub(super) fn marks(&self) -> ContentMarks {
        let transactions = self.data.transactions;
        ContentMarks {
            commit: transactions.last_commit(self.buffer.ino()),
            in_place: transactions.in_place(),
            buffered: self.buffer.writes(),
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.buffer.size()
    }

    /// Fills `buf` from `offset` on, and returns the number of bytes.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.data.read(&self.buffer, offset, buf)
    }

    /// The first range of data from `offset` on.
    pub(super) fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.data.next_data(&self.buffer, offset)
    }

    /// Replaces `run`, if it ends before `at`, by the next data of the file, or by an empty range
    /// behind the end of all files. Returns where the data begins from `at` on.
    pub(super) fn data_from(&self, at: u64, run: &mut DataRun) -> Result<u64> {
        if run.end <= at {
            *run = self.next_data(at)?.unwrap_or(u64::MAX..u64::MAX);
        }
        Ok(run.start.max(at))
    }

    /// Writes bytes, and makes the file longer if it ends before them.
    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.data.write(&self.buffer, offset, data)
    }

    /// The same, and nothing of the file stays in memory.
    fn write_direct(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.data.write_direct(&self.buffer, offset, data)
    }

    /// Sets the size.
    pub(super) fn truncate(&self, size: u64) -> Result<()> {
        self.data.truncate(&self.buffer, size)
    }
}

impl XfsLive {
    /// What reads and changes data through memory.
    pub(super) fn data(&self) -> XfsBufferedData<'_> {
        XfsBufferedData {
            transactions: &self.transactions,
            ids: &self.ids,
            inodes: &self.reading,
            read_ahead: &self.read_ahead,
            files: &self.buffered,
        }
    }

    /// The contents of a file whose lock the caller has; `EISDIR` and `EINVAL` for what has none.
    pub(super) fn contents(&self, file: FileId) -> Result<LiveContents<'_>> {
        let (data, used) = (self.data(), self.inodes.get(ino_of(file)));
        let mut kept = used.buffer.lock();
        let buffer = match &*kept {
            Some(buffer) => buffer.clone(),
            None => kept.insert(data.file(ino_of(file))?).clone(),
        };
        Ok(LiveContents { data, buffer })
    }

    /// Writes bytes to a file. They are in memory until they are written back.
    pub(crate) fn write(
        &self,
        file: FileId,
        offset: u64,
        data: &[u8],
        at: Timestamp,
    ) -> Result<()> {
        self.change_data(file, offset, data, at, |contents| contents.write(offset, data))
    }

    /// The same, and nothing of the file stays in memory.
    pub(crate) fn write_direct(
        &self,
        file: FileId,
        offset: u64,
        data: &[u8],
        at: Timestamp,
    ) -> Result<()> {
        self.change_data(file, offset, data, at, |contents| contents.write_direct(offset, data))
    }

    fn change_data(
        &self,
        file: FileId,
        offset: u64,
        data: &[u8],
        at: Timestamp,
        write: impl FnOnce(&LiveContents<'_>) -> Result<()>,
    ) -> Result<()> {
        let _call = self.enter()?;
        let ino = ino_of(file);
        let _locked = self.inodes.write([ino]);
        let (inode, contents) = (self.inode(file)?, self.contents(file)?);
        refuse_flags(&inode, XfsInodeFlags::IMMUTABLE)?;
        if offset != contents.size() {
            refuse_flags(&inode, XfsInodeFlags::APPEND)?;
        }
        require_bytes(file, offset, data.len() as u64)?;
        if data.is_empty() {
            return Ok(());
        }
        let before = contents.marks();
        let written = write(&contents);
        // One that fails may have written its front.
        let is_changed = contents.marks() != before;
        let touched = if is_changed { self.touch_written(&inode, at) } else { Ok(()) };
        written.and(touched)?;
        self.keep_synchronous(&inode)
    }

    pub(crate) fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let _locked = self.inodes.read(ino_of(file));
        self.contents(file)?.read(offset, buf)
    }

    pub(crate) fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let _locked = self.inodes.read(ino_of(file));
        self.contents(file)?.next_data(offset)
    }

    /// Adds the data of a file that the device has.
    pub(crate) fn add_hints(&self, file: FileId, hints: &mut ReadHints) -> Result<()> {
        let inode = self.inode(file)?;
        let content = FileContent::new(self.buffers(), &inode)?;
        hints.add(&content, 0..content.size());
        Ok(())
    }

    /// Shows the data in a range, part by part. The file is not locked while a part is shown.
    pub(crate) fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (mut at, mut run, mut part) = (range.start, 0..0, Vec::new());
        while at < range.end {
            let found = self.read_part(file, at..range.end, &mut run, &mut part)?;
            let Some(start) = found else { return Ok(()) };
            visit(start, &part)?;
            at = start + part.len() as u64;
        }
        Ok(())
    }

    /// Reads the first data of a range. Returns where it begins.
    fn read_part(
        &self,
        file: FileId,
        range: Range<u64>,
        run: &mut DataRun,
        part: &mut Vec<u8>,
    ) -> Result<Option<u64>> {
        let _locked = self.inodes.read(ino_of(file));
        let contents = self.contents(file)?;
        let start = contents.data_from(range.start, run)?;
        let end = run.end.min(range.end).min(start.saturating_add(PIECE_BYTES));
        part.clear();
        part.resize(index(end.saturating_sub(start)), 0);
        let count = contents.read(start, part)?;
        part.truncate(count);
        Ok((count > 0).then_some(start))
    }

    /// The attributes of a file, with what of its data is in memory.
    pub(crate) fn attr(&self, file: FileId) -> Result<Attr> {
        // What leaves memory is on the device before.
        let in_memory = || {
            let buffer = self.buffered.in_use(ino_of(file))?;
            Some(buffer.size_and_blocks())
        };
        let before = in_memory();
        let inode = self.inode(file)?;
        inode.see();
        let mut attr = inode.attr(self.transactions.geometry())?;
        if let Some((size, blocks)) = before.or_else(in_memory) {
            attr.size = size;
            attr.allocated_bytes += blocks * self.block_bytes();
        }
        Ok(attr)
    }
}
