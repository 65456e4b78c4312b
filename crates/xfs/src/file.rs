//! Changes of regular files: their extents, where their data goes, and their sizes.
//!
//! The data itself never goes through the log. A caller asks for places, writes there, and then
//! makes visible what it has written:
//!
//! ```text
//! prepare_write   hole     -> unwritten blocks, mapped
//!                 shared   -> other blocks, staged: the count tree has them, and no file
//!                 the rest -> the blocks that the file has
//! the caller      writes whole blocks to these places
//! commit_write    unwritten -> written     staged -> mapped, in the place of the shared ones
//!                 and the size grows, in the last of these transactions
//! ```
//!
//! The log flushes the device before the first record of a checkpoint. So what is mapped as
//! written, and what a larger size shows, is durable before the log says so. After a crash a file
//! has the old data or the new data of each block, and never what the blocks held before. Recovery,
//! ours or the kernel's, frees blocks that are still staged. A write in place changes no metadata:
//! the caller that wants it durable flushes the device.
//!
//! Blocks are written in place only if the log says durably that the file has them alone:
//!
//! ```text
//! two files share a block; the second is truncated       in memory: one reference
//! the first is written in place                          the device has the new data
//! crash: the log does not have the truncation            the second would show that data
//! ```
//!
//! So `prepare_write` forces the log for blocks that lost a reference, moved to another place, or
//! were exchanged, and whose change is not durable.
//!
//! Each operation takes steps. A step is one transaction and the deferred work that follows from
//! it, and leaves the volume right. Between steps the inode is not locked, so the caller keeps
//! other changes of the file away; to be the source of a clone is one, and `commit_write` finds out
//! when data went in place meanwhile. An operation that fails in
//! the middle has done a part of its range: the front, or for a hole and a truncation the end. A
//! step that needs blocks finds out that there are none before it changes anything. Truncations,
//! holes, and commits of what was written work on a full volume, with blocks of its reserve.
//!
//! The caller sets the times of the inode, and proves that the user may change the file.
//!
//! | file | what it does |
//! |---|---|
//! | `allocate` | blocks for holes |
//! | `needs` | what a write will take |
//! | `write` | places to write to, and the commit of what was written |
//! | `remove` | truncation, holes, zeros, and the bytes at the edges of all these |
//! | `shift` | ranges that are taken out of a file, or put in |
//! | `share` | clones of ranges |

mod allocate;
mod needs;
mod remove;
mod share;
mod shift;
mod write;

#[cfg(test)]
mod tests;

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use offshoot_vfs::{Code, Errno, Error, Result};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::inode::{XfsInodeFlags, file_type};

use crate::defer::{DeferredChain, DeferredWork, IntentIds};
use crate::trans::{
    BlockPromise, ForkName, MissedLocks, XfsTransaction, XfsTransactionKind as Kind,
    XfsTransactions,
};

pub(crate) use needs::XfsWriteNeed;
pub(crate) use share::XfsCloneRange;
pub(crate) use write::{XfsWritePlace, require_room_to_unmap};

/// The fork with the data.
const FORK: ForkName = ForkName::Data;

/// The bytes of a file are at most these.
pub(crate) const MOST_BYTES: u64 = i64::MAX.cast_unsigned();

/// How often a step begins again because other transactions have locked the groups that it wants.
const MOST_TRIES: usize = 1000;

/// The extents that one step passes over at most because nothing is to be done about them.
const MOST_PASSED_OVER: usize = 1000;

/// What changes the files of a volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XfsFileChanges<'e> {
    transactions: &'e XfsTransactions,
    ids: &'e IntentIds,
    /// What is promised to the data that is written, if that was done before.
    promise: Option<&'e Arc<BlockPromise>>,
    /// What the tries of a step have missed before this one.
    missed: Option<&'e MissedLocks>,
}

impl<'e> XfsFileChanges<'e> {
    pub(crate) fn new(transactions: &'e XfsTransactions, ids: &'e IntentIds) -> Self {
        Self { transactions, ids, promise: None, missed: None }
    }

    /// The same, with blocks that are promised to the data of a file.
    pub(crate) fn with_promise(self, promise: &'e Arc<BlockPromise>) -> Self {
        Self { promise: Some(promise), ..self }
    }

    /// Makes a step, and makes it again while it finds groups locked that it must not wait for.
    fn retry<T>(&self, mut step: impl FnMut(XfsFileChanges<'_>) -> Result<T>) -> Result<T> {
        retry(self.transactions, |missed| step(XfsFileChanges { missed: Some(missed), ..*self }))
    }

    fn block_log(&self) -> u8 {
        self.transactions.geometry().block_log
    }

    fn block_bytes(&self) -> u64 {
        1 << self.block_log()
    }

    /// Proves that a file can have these blocks: none lies behind the most bytes of a file.
    ///
    /// # Errors
    /// `EFBIG` when it cannot.
    fn require_blocks(&self, ino: Ino, blocks: &Range<u64>) -> Result<()> {
        if blocks.end <= MOST_BYTES.div_ceil(self.block_bytes()) {
            return Ok(());
        }
        Err(Error::posix(Errno::FBIG, format!("blocks {blocks:?} of inode {ino}")))
    }

    /// The blocks that the tree of extents of a fork may take when a step adds two extents.
    fn tree_blocks(&self) -> u64 {
        2 * self.transactions.most_levels().data
    }

    /// Begins a step that changes a file, and locks its inode.
    fn begin(&self, kind: Kind, ino: Ino) -> Result<XfsTransaction<'e>> {
        let mut t = self.transactions.begin(kind, 0)?;
        t.try_again(self.missed);
        if let Some(promise) = self.promise {
            t.borrow_from(promise);
        }
        require_file(&mut t, ino)?;
        Ok(t)
    }

    /// Commits a step, and does the work that follows from it. The inodes `kept` stay locked.
    fn finish(
        &self,
        mut t: XfsTransaction<'e>,
        work: Vec<DeferredWork>,
        kept: &[Ino],
    ) -> Result<()> {
        let mut chain = DeferredChain::new(self.ids);
        chain.defer(&mut t, work);
        chain.finish(t, kept)
    }

    /// The size of a file.
    pub(crate) fn size(&self, ino: Ino) -> Result<u64> {
        let mut t = self.begin(Kind::ChangeTimes, ino)?;
        Ok(t.inode(ino)?.core().size.get())
    }

    /// Sets the size, and nothing else.
    fn set_size(&self, ino: Ino, size: u64) -> Result<()> {
        let mut t = self.begin(Kind::ChangeInode, ino)?;
        t.inode(ino)?.core_mut().size = size.into();
        t.commit().map(drop)
    }

    /// The blocks that lie in a range of bytes as a whole.
    fn whole_blocks(&self, bytes: &Range<u64>) -> Range<u64> {
        let start = bytes.start.div_ceil(self.block_bytes());
        start..(bytes.end >> self.block_log()).max(start)
    }

    /// The blocks of a range whose ends lie between blocks.
    ///
    /// # Errors
    /// `EINVAL` for other ranges, and for an empty one.
    fn aligned(&self, bytes: &Range<u64>) -> Result<Range<u64>> {
        let blocks = self.whole_blocks(bytes);
        let is_aligned = blocks.start << self.block_log() == bytes.start
            && blocks.end << self.block_log() == bytes.end;
        if is_aligned && !blocks.is_empty() {
            return Ok(blocks);
        }
        let what = format!("bytes {bytes:?}, where blocks have {}", self.block_bytes());
        Err(Error::posix(Errno::INVAL, what))
    }
}

/// The `len` bytes from `offset` on of a file, which errors call `name`.
///
/// # Errors
/// `EFBIG` when no file has all of them.
pub(crate) fn require_bytes(name: impl Display, offset: u64, len: u64) -> Result<Range<u64>> {
    let end = offset.checked_add(len).filter(|end| *end <= MOST_BYTES);
    let end =
        end.ok_or_else(|| Error::posix(Errno::FBIG, format!("{len} bytes at {offset} of {name}")))?;
    Ok(offset..end)
}

/// A number of bytes that lie in memory.
pub(crate) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Calls `step`, and calls it again while it finds groups locked that it must not wait for, or the
/// last blocks of one claimed. It has committed nothing then: a chain that fails ends all writing.
/// It makes its transaction a try that waits first for what those before have missed.
pub(crate) fn retry<T>(
    transactions: &XfsTransactions,
    mut step: impl FnMut(&MissedLocks) -> Result<T>,
) -> Result<T> {
    let missed = MissedLocks::default();
    for _ in 1..MOST_TRIES {
        match step(&missed) {
            Err(Error::Posix { errno: Errno::AGAIN, .. }) => transactions.wait_for_missed(&missed),
            outcome => return outcome,
        }
    }
    step(&missed)
}

/// Locks an inode, and proves that its data can be changed here.
///
/// # Errors
/// `EINVAL` for what is no regular file; those on a realtime device are refused by name.
fn require_file(t: &mut XfsTransaction<'_>, ino: Ino) -> Result<()> {
    let core = t.inode(ino)?.core();
    if core.file_type() != file_type::REGULAR {
        return Err(Error::posix(Errno::INVAL, format!("inode {ino} is no regular file")));
    }
    if core.flags().contains(XfsInodeFlags::REALTIME) {
        let what = format!("changing the data of inode {ino}, which is on a realtime device");
        return Err(Error::unsupported(Code::UnknownFeature, what));
    }
    Ok(())
}

/// Proves that an inode can count this many extents more.
///
/// # Errors
/// `EFBIG` when it cannot. Nothing has been changed.
fn require_extents(t: &mut XfsTransaction<'_>, ino: Ino, more: u64) -> Result<()> {
    let mut core = *t.inode(ino)?.core();
    let (data, attributes) = core.extent_counts();
    if core.set_extent_counts(data.saturating_add(more), attributes) {
        return Ok(());
    }
    Err(Error::posix(Errno::FBIG, format!("inode {ino} has {data} extents, and cannot have more")))
}

/// Raises the size of an inode, if it is smaller.
fn raise_size(t: &mut XfsTransaction<'_>, ino: Ino, size: u64) -> Result<()> {
    let inode = t.inode(ino)?;
    if inode.core().size.get() < size {
        inode.core_mut().size = size.into();
    }
    Ok(())
}
