//! A volume that is open for writing: what the calls of the `vfs` traits do with the rooms below.
//!
//! ```text
//! call      gate, shared | locks of inodes | checks | rooms below: transactions, commits
//! reader    lock of the inode, shared, while it reads data | what the last commit has published
//! fsync     force of the log up to the last commit of the inode, and no further
//! ```
//!
//! # Locks
//!
//! A thread takes locks in this order:
//!
//! ```text
//! 1  the gate                    shared by each call that changes something; exclusive for the
//!                                end of all writing
//! 2  inodes (`inodes`)           ascending by number, in one call: exclusively to change data,
//!                                attributes and flags, and to free the inode; shared to read data
//! 3  the state of an inode       a leaf: how often it is open; and its buffer
//! 4  the locks of `buffered`     data in memory, and its way to the device
//! 5  the locks of `names`        changes of names, and the transactions of all rooms
//! ```
//!
//! Changes of names take 2 only to link a file and to free one: each of their transactions leaves
//! an inode whole, and they touch neither data nor flags. A reader of names, attributes or links
//! takes none of these locks: it reads what one commit has left, and again when another came
//! between. Attributes come with what the buffer of the file says. A reader of data has the lock
//! while it reads a piece, and not while it shows it: what the caller does with that may lock other
//! inodes.
//!
//! # Inodes without names
//!
//! The change that takes the last name of an inode says so here. The inode is freed at once if it
//! is not open, or with its last release, under its lock: so no call is using it. Until then it is
//! in a list of unlinked inodes on the device, for the recovery of a crash.
//!
//! # Contents
//!
//! A write leaves its bytes in memory, with a promise of the blocks that they need (`buffered`),
//! and commits the times of the file. A sync of the file writes them back first. Write-back commits
//! places and size behind the bytes, and the log flushes the device before each checkpoint. So a
//! force of the log up to the last commit of the file makes its data durable too. What changes the
//! mapping of a file beside writes has the range written back before, and keeps it so.
//!
//! A change that finds too few blocks free is tried once more after everything was written back:
//! most of what is promised is free then.
//!
//! | file | what it does |
//! |---|---|
//! | `open` | opens, and ends all writing |
//! | `idle` | the threads that make changes durable in time, and cover the log |
//! | `inodes` | inodes in use: their locks, and how often they are open |
//! | `names` | changes of names, openings |
//! | `attributes`, `xattrs` | attributes and flags; extended attributes and access control lists |
//! | `contents`, `allocate`, `share` | data: written and read, allocated and moved, shared |
//! | `durable` | what `fsync` and its relatives do |
//! | `space` | free space, the label, and discards |

mod allocate;
mod attributes;
mod contents;
mod durable;
mod idle;
mod inodes;
mod names;
mod open;
mod share;
mod space;
#[cfg(test)]
mod tests;
mod xattrs;

use std::sync::Arc;

use offshoot_kit::counter::WriteStop;
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_kit::spread::SpreadRwLock;
use offshoot_kit::sync::{Mutex, RwLockReadGuard};
use offshoot_vfs::{Errno, Error, FileId, Result, Timestamp};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::inode::{XfsInodeCore, XfsInodeFlags};

use crate::buffer::XfsBuffers;
use crate::buffered::BufferedFiles;
use crate::defer::IntentIds;
use crate::inode::{LoadedInode, XfsInodes, xfs_time};
use crate::names::{XfsNameState, XfsNames};
use crate::report::XfsReporter;
use crate::trans::{XfsTransactionKind as Kind, XfsTransactions};
pub(crate) use idle::XfsIdleThreads;
use inodes::LiveInodes;
pub(crate) use open::open_live;

/// Files whose data must not be replaced, and whose names must not change.
const FIXED: XfsInodeFlags = XfsInodeFlags::IMMUTABLE.union(XfsInodeFlags::APPEND);

/// A volume that is written.
pub(crate) struct XfsLive {
    transactions: XfsTransactions,
    ids: IntentIds,
    name_state: XfsNameState,
    inodes: LiveInodes,
    /// The files with data in memory.
    buffered: BufferedFiles,
    /// The inodes that readers keep.
    reading: Arc<XfsInodes>,
    read_ahead: ReadAhead,
    gate: SpreadRwLock<()>,
    /// The label, with zeros behind it.
    label: Mutex<[u8; 12]>,
    stop: Arc<WriteStop>,
    reporter: Option<XfsReporter>,
}

impl std::fmt::Debug for XfsLive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("XfsLive").field("stop", &self.stop).finish_non_exhaustive()
    }
}

impl XfsLive {
    /// Begins a call that changes something. No thread ends writing until it is dropped.
    ///
    /// # Errors
    /// `EROFS` when writing has ended.
    fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let call = self.gate.read();
        self.require_writing().map(|()| call)
    }

    fn require_writing(&self) -> Result<()> {
        match self.stop.cause() {
            None => Ok(()),
            Some(cause) => {
                let what = format!("the volume, which is not written any more: {cause}");
                Err(Error::posix(Errno::ROFS, what))
            }
        }
    }

    fn buffers(&self) -> &XfsBuffers {
        self.transactions.buffers()
    }

    fn block_bytes(&self) -> u64 {
        self.transactions.geometry().block_size() as u64
    }

    fn names(&self) -> XfsNames<'_> {
        XfsNames::new(&self.transactions, &self.ids, &self.name_state)
    }

    /// An inode as the last commit has left it; `ENOENT` when it is not in use.
    fn inode(&self, file: FileId) -> Result<Arc<LoadedInode>> {
        self.reading.get(self.buffers(), file)
    }

    /// Changes the core of an inode, at the moment `at`.
    fn change_core(
        &self,
        ino: Ino,
        at: Timestamp,
        change: impl FnOnce(&mut XfsInodeCore),
    ) -> Result<()> {
        let mut t = self.transactions.begin(Kind::ChangeInode, 0)?;
        let core = t.inode(ino)?.core_mut();
        change(core);
        touch(core, at);
        t.commit().map(drop)
    }
}

/// Says that an inode has changed at this moment.
fn touch(core: &mut XfsInodeCore, at: Timestamp) {
    core.ctime = core.time_field(xfs_time(at));
    core.changecount = core.changecount.get().wrapping_add(1).into();
}

/// The number of a file.
fn ino_of(file: FileId) -> Ino {
    Ino(file.ino)
}

/// `EPERM` when an inode has one of these flags.
fn refuse_flags(inode: &LoadedInode, flags: XfsInodeFlags) -> Result<()> {
    if inode.core.flags().intersects(flags) {
        return Err(Error::posix(Errno::PERM, format!("{}, by its flags", inode.file())));
    }
    Ok(())
}
