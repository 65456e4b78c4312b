//! Changes of names: files are made, linked, moved and removed, and inodes without names are freed.
//!
//! ```text
//! create          inode taken | filled | entry added, and a parent pointer
//! long lists      unnamed inode | its attributes | entry added, and it leaves the unlinked list
//! unlink, rmdir   last name: the inode enters the unlinked list | entry removed | chain
//! inactivate      blocks freed, step by step | it leaves the list and is free
//! ```
//!
//! Each change of a name is one transaction, and the deferred work that follows from it: blocks of
//! directories are freed, and parent pointers that are in blocks are set and removed. Those in
//! inodes change with the name. All inodes of the change stay locked until the last step. Only what
//! an inode without names holds is freed in calls of its own ([`XfsNames::inactivate`]), when the
//! caller knows that no program has it open. The device always has such an inode in a list of
//! unlinked ones, so the recovery of a crash frees it.
//!
//! # Locks
//!
//! A thread takes locks in this order. Those above the line are held without log space, so a
//! thread may wait for log space under them.
//!
//! ```text
//! 1  moves of directories        one at a time: such a move asks what is above its new place
//! 2  inodes of the change        ascending by number, in one call (`locks`)
//! -------------------------- the transaction begins: log space, promised blocks
//! 3  the same inodes             directories, and when their names are proved, the files: both
//!                                ascending. Other rooms lock files alone, and no directories
//! 4  AGI, clusters of inodes     ascending by group: lists of unlinked inodes, free inodes
//! 5  AGF                         ascending by group: blocks for directories and attributes
//! 6  a new inode                 no other thread knows its number
//! ```
//!
//! A name is looked up before its file can be locked. So it is looked up again under the locks, and
//! the call begins again when it leads elsewhere. A step that needs a lower AGF than it has is
//! undone and begins again ([`retry`]): it waits for that one before it has any.
//!
//! # Space
//!
//! A change is promised the most blocks that it may take, for all its steps, before it changes
//! anything: so a chain never ends without space. On a full volume, removals may take blocks of the
//! reserve. Links and moves go on if their directories have room, unless the volume has parent
//! pointers, for which a block may be needed later.
//!
//! # What the caller does
//!
//! It proves that the user may make the change, and that the inodes are in use.
//! [`offshoot_vfs::NewFile`] says the owner and the permissions with the set-group-id bit: the
//! rules that depend on the user are the caller's. What a directory hands down by its flags, its
//! project and its default access control list is done here.
//!
//! | file | what it does |
//! |---|---|
//! | `change` | the transaction of a change, and what every change proves |
//! | `locks` | inodes that are locked together |
//! | `create`, `fill`, `inherited` | new files, and what they get from their directory |
//! | `take` | which inode a new file gets |
//! | `target` | targets of symbolic links |
//! | `remove`, `link`, `rename`, `exchange` | the changes of names |
//! | `inactive` | inodes without names are freed |

mod change;
mod create;
mod exchange;
mod fill;
pub(crate) mod inactive;
mod inherited;
mod link;
mod locks;
mod remove;
mod rename;
mod take;
mod target;
#[cfg(test)]
mod tests;

use offshoot_kit::sync::Mutex;
use offshoot_kit::sync::atomic::{AtomicU32, AtomicU64};
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::dir::file_type;

use crate::defer::IntentIds;
use crate::dir::change::{XfsEntryTarget, find_name};
use crate::file::retry;
use crate::trans::{MissedLocks, XfsTransaction, XfsTransactionKind as Kind, XfsTransactions};
pub(crate) use fill::XfsNewKind;
use locks::{InodeLocks, LockedInodes};

/// How often a name is looked up again because other threads have changed it meanwhile.
const MOST_LOOKUPS: usize = 1000;

/// A directory, and a name in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamePlace<'a> {
    pub(crate) dir: Ino,
    pub(crate) name: &'a [u8],
}

impl NamePlace<'_> {
    /// The error about the name.
    #[cold]
    fn error(&self, errno: Errno) -> Error {
        Error::posix(errno, format!("`{}` in directory {}", self.name.escape_ascii(), self.dir))
    }
}

/// What all changes of names of a volume share.
#[derive(Debug, Default)]
pub(crate) struct XfsNameState {
    locks: InodeLocks,
    /// Held while a directory moves to another one.
    moves: Mutex<()>,
    /// Counts directories: each goes to the next group.
    rotor: AtomicU32,
    /// Counts chunks of inodes.
    chunks: AtomicU64,
}

/// What changes the names of a volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct XfsNames<'e> {
    transactions: &'e XfsTransactions,
    ids: &'e IntentIds,
    state: &'e XfsNameState,
    /// What the tries of a change have missed before this one.
    missed: Option<&'e MissedLocks>,
}

impl<'e> XfsNames<'e> {
    pub(crate) fn new(
        transactions: &'e XfsTransactions,
        ids: &'e IntentIds,
        state: &'e XfsNameState,
    ) -> Self {
        Self { transactions, ids, state, missed: None }
    }

    /// Makes a change, and makes it again while it finds groups locked that it must not wait for.
    fn retry<T>(&self, mut change: impl FnMut(XfsNames<'_>) -> Result<T>) -> Result<T> {
        retry(self.transactions, |missed| change(XfsNames { missed: Some(missed), ..*self }))
    }

    /// Locks inodes against all changes of names. The caller has no such lock.
    pub(crate) fn lock(&self, inodes: impl IntoIterator<Item = Ino>) -> Result<LockedInodes<'e>> {
        self.state.locks.lock(inodes)
    }

    /// What a name leads to at this moment.
    fn look_up(&self, place: NamePlace<'_>) -> Result<Option<XfsEntryTarget>> {
        let mut t = self.transactions.begin(Kind::ChangeTimes, 0)?;
        look_up_in(&mut t, place)
    }

    /// The same for a name that has to be there.
    fn find(&self, place: NamePlace<'_>) -> Result<XfsEntryTarget> {
        self.look_up(place)?.ok_or_else(|| place.error(Errno::NOENT))
    }

    /// Frees an inode without names that no program has open, and all that it holds.
    pub(crate) fn inactivate(&self, ino: Ino) -> Result<()> {
        let _locked = self.lock([ino])?;
        self.inactivate_locked(ino)
    }

    fn inactivate_locked(&self, ino: Ino) -> Result<()> {
        retry(self.transactions, |missed| {
            inactive::free_unlinked_inode(self.transactions, self.ids, ino, missed)
        })
    }
}

/// Whether an entry says that it leads to a directory.
fn is_directory(target: XfsEntryTarget) -> bool {
    target.1 == file_type::DIR
}

/// What became of a change whose names were looked up before they were locked.
enum NameOutcome {
    /// A name leads elsewhere by now, so nothing was changed.
    Moved,
    /// It is done, and this file has lost its last name.
    Done(Option<Ino>),
}

/// Calls `change`, and calls it again while names lead elsewhere than they did when it looked them
/// up. Returns the file that has lost its last name.
fn until_done(mut change: impl FnMut() -> Result<NameOutcome>) -> Result<Option<Ino>> {
    for _ in 0..MOST_LOOKUPS {
        if let NameOutcome::Done(lost) = change()? {
            return Ok(lost);
        }
    }
    Err(Error::posix(Errno::AGAIN, "other threads change the same names all the time"))
}

/// What a name leads to. Locks the directory.
fn look_up_in(t: &mut XfsTransaction<'_>, place: NamePlace<'_>) -> Result<Option<XfsEntryTarget>> {
    if t.inode(place.dir)?.core().is_free() {
        return Err(place.error(Errno::NOENT));
    }
    find_name(t, place.dir, place.name)
}
