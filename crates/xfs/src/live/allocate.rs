//! Space of files: allocated, freed, zeroed, and ranges that move.
//!
//! A range that fails in the middle has its front done, or for a hole its end (`file`). The size
//! and the times change behind it.

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Fallocate, FileId, Result, Timestamp};
use offshoot_xfs_format::inode::XfsInodeFlags;

use super::contents::LiveContents;
use super::{XfsLive, ino_of, refuse_flags};
use crate::buffered::SettledFile;
use crate::file::{XfsFileChanges, require_bytes};

impl XfsLive {
    /// Allocates, frees, zeros or moves a range of a file.
    pub(crate) fn fallocate(
        &self,
        file: FileId,
        what: Fallocate,
        offset: u64,
        len: u64,
        at: Timestamp,
    ) -> Result<()> {
        let _call = self.enter()?;
        let ino = ino_of(file);
        let _locked = self.inodes.write([ino]);
        let inode = self.inode(file)?;
        let contents = self.contents(file)?;
        refuse_flags(&inode, XfsInodeFlags::IMMUTABLE)?;
        if !matches!(what, Fallocate::Allocate { .. }) {
            refuse_flags(&inode, XfsInodeFlags::APPEND)?;
        }
        if len == 0 {
            return Err(Error::posix(Errno::INVAL, format!("no bytes at {offset} of {file}")));
        }
        let range = require_bytes(file, offset, len)?;
        let before = contents.marks();
        let outcome = contents.change_space(what, &range);
        self.touch_changed(ino, at, outcome, contents.marks() != before)?;
        self.keep_synchronous(&inode)
    }
}

impl LiveContents<'_> {
    fn change_space(&self, what: Fallocate, range: &Range<u64>) -> Result<()> {
        let (ino, block) = (self.buffer.ino(), self.data.block_bytes());
        match what {
            Fallocate::Allocate { keeps_size } => {
                let blocks = range.start / block..range.end.div_ceil(block);
                self.change_range(range, |changes| changes.allocate(ino, blocks.clone()))?;
                self.grow(range.end, keeps_size)
            }
            Fallocate::Zero { keeps_size } => {
                self.change_range(range, |changes| changes.zero(ino, range))?;
                self.grow(range.end, keeps_size)
            }
            Fallocate::PunchHole => self.punch(range),
            // What is refused changes nothing: it writes no data back, which commits would show.
            Fallocate::Collapse => {
                self.data.changes().require_collapse(ino, self.size(), range)?;
                self.move_blocks(range.start, |changes| changes.collapse(ino, range))
            }
            Fallocate::Insert => {
                let len = range.end - range.start;
                self.data.changes().require_insert(ino, self.size(), range.start, len)?;
                self.move_blocks(range.start, |changes| changes.insert(ino, range.start, len))
            }
        }
    }

    /// Makes a hole of a range, and zeros of parts of blocks.
    pub(super) fn punch(&self, range: &Range<u64>) -> Result<()> {
        self.change_range(range, |changes| changes.punch(self.buffer.ino(), range))
    }

    /// Calls `change`, which moves what lies from `at` on. It is called again only if the call
    /// before has moved nothing.
    fn move_blocks(
        &self,
        at: u64,
        change: impl Fn(&XfsFileChanges<'_>) -> Result<()>,
    ) -> Result<()> {
        let once = || {
            let settled = self.data.settle(&self.buffer, &(at..u64::MAX))?;
            let before = self.marks();
            let outcome = self.change_settled(&settled, &change);
            // An error behind the first move is the answer.
            if self.marks() == before { outcome.map(Ok) } else { Ok(outcome) }
        };
        self.data.with_space(once)?
    }

    /// Calls `change`, which may be called twice, while nothing of a range is in memory.
    fn change_range(
        &self,
        range: &Range<u64>,
        change: impl Fn(&XfsFileChanges<'_>) -> Result<()>,
    ) -> Result<()> {
        self.data.with_space(|| {
            let settled = self.data.settle(&self.buffer, range)?;
            self.change_settled(&settled, &change)
        })
    }

    /// Calls `change` for a file that is settled.
    pub(super) fn change_settled(
        &self,
        settled: &SettledFile<'_>,
        change: impl Fn(&XfsFileChanges<'_>) -> Result<()>,
    ) -> Result<()> {
        let changes = self.data.changes();
        let outcome = change(&changes);
        // Also one that fails may have changed the size.
        settled.resized(changes.size(self.buffer.ino())?);
        outcome
    }

    fn grow(&self, end: u64, keeps_size: bool) -> Result<()> {
        if keeps_size || self.size() >= end { Ok(()) } else { self.truncate(end) }
    }
}
