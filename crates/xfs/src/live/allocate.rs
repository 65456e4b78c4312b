//! Space of files: allocated, freed, zeroed, and ranges that move.
//!
//! A range that fails in the middle has its front done, or for a hole its end (`file`). The size
//! and the times change behind it.

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Fallocate, FileId, Result, Timestamp};
use offshoot_xfs_format::inode::XfsInodeFlags;

use super::{XfsLive, ino_of, refuse_flags};
use crate::file::require_bytes;

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
        self.contents(file).size()?;
        refuse_flags(&inode, XfsInodeFlags::IMMUTABLE)?;
        if !matches!(what, Fallocate::Allocate { .. }) {
            refuse_flags(&inode, XfsInodeFlags::APPEND)?;
        }
        if len == 0 {
            return Err(Error::posix(Errno::INVAL, format!("no bytes at {offset} of {file}")));
        }
        let range = require_bytes(file, offset, len)?;
        let before = self.transactions.last_commit(ino);
        let outcome = self.change_space(file, what, &range);
        let is_changed = self.transactions.last_commit(ino) != before;
        self.touch_changed(ino, at, outcome, is_changed)?;
        self.keep_synchronous(&inode)
    }

    fn change_space(&self, file: FileId, what: Fallocate, range: &Range<u64>) -> Result<()> {
        let (ino, changes) = (ino_of(file), self.file_changes());
        let block = self.block_bytes();
        match what {
            Fallocate::Allocate { keeps_size } => {
                changes.allocate(ino, range.start / block..range.end.div_ceil(block))?;
                self.grow(file, range.end, keeps_size)
            }
            Fallocate::Zero { keeps_size } => {
                changes.zero(ino, range)?;
                self.grow(file, range.end, keeps_size)
            }
            Fallocate::PunchHole => changes.punch(ino, range),
            Fallocate::Collapse => changes.collapse(ino, range),
            Fallocate::Insert => changes.insert(ino, range.start, range.end - range.start),
        }
    }

    fn grow(&self, file: FileId, end: u64, keeps_size: bool) -> Result<()> {
        let contents = self.contents(file);
        if keeps_size || contents.size()? >= end { Ok(()) } else { contents.truncate(end) }
    }
}
