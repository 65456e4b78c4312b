//! What a write will take, before it is done: for data that is buffered first.

use std::ops::Range;

use offshoot_vfs::Result;
use offshoot_xfs_format::{FileBlock, Ino};

use super::write::shared_range;
use super::{FORK, XfsFileChanges};
use crate::inode::change::{end, next_mapped, part};
use crate::trans::XfsTransactionKind as Kind;

/// What a write to blocks of a file takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XfsWriteNeed {
    /// Nothing: the file has them alone, and they are written.
    Nothing,
    /// Its extents change: the blocks are unwritten.
    Extents,
    /// Other blocks, and its extents change: there is a hole, or files share the blocks.
    Blocks,
}

/// The front of a range of blocks, all of which need the same.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XfsNeedyFront {
    pub(crate) need: XfsWriteNeed,
    /// A hole may end behind the range; the one behind the last extent ends at [`u64::MAX`].
    pub(crate) end: u64,
    /// The extents of the file.
    pub(crate) extents: u64,
}

impl XfsFileChanges<'_> {
    /// What a write to the front of a range of blocks takes.
    pub(crate) fn write_need(&self, ino: Ino, blocks: &Range<u64>) -> Result<XfsNeedyFront> {
        self.retry(|changes| {
            let mut t = changes.begin(Kind::ChangeTimes, ino)?;
            let extents = t.inode(ino)?.extent_count(FORK);
            let front = |end, need| XfsNeedyFront { need, end, extents };
            let found = next_mapped(&mut t, ino, FORK, FileBlock(blocks.start))?;
            let next = found.map_or(u64::MAX, |found| found.offset.0);
            let old = found.and_then(|old| part(&old, blocks.start, end(&old).min(blocks.end)));
            let Some(old) = old else {
                return Ok(front(next, XfsWriteNeed::Blocks));
            };
            if old.is_unwritten {
                return Ok(front(end(&old), XfsWriteNeed::Extents));
            }
            Ok(match shared_range(&mut t, ino, &old)? {
                Some(shared) if shared.start <= blocks.start => {
                    front(shared.end, XfsWriteNeed::Blocks)
                }
                Some(shared) => front(shared.start, XfsWriteNeed::Nothing),
                None => front(end(&old), XfsWriteNeed::Nothing),
            })
        })
    }
}
