//! Inodes that transactions have committed, and that are not in their clusters yet.
//!
//! A commit *publishes* the bytes of each inode that it changes, and readers find them here. They
//! leave this table when the cluster that has them is home, or was freed.
//!
//! Readers keep inodes that they have parsed, and must not keep them longer than they are right. So
//! each commit of an inode counts a number up that all inodes of its slot share, and a reader keeps
//! the number that it found before it looked for the bytes:
//!
//! ```text
//! reader   number 7    bytes in the cluster    keeps (7, inode)
//! commit               publishes, counts to 8
//! reader   number 8: (7, inode) is too old     bytes from here, keeps (8, inode)
//! ```
//!
//! A commit publishes an inode and blocks of it one after the other. A reader that needs several of
//! them as one commit has left them asks for a *moment* first. There is none while a commit is
//! about to publish, and it is over as soon as one begins:
//!
//! ```text
//! reader   moment 7                                          is it over? yes: reads again
//! commit             begins 8    publishes    counts to 8
//! ```
//!
//! A reader whose moments are over each time closes the *gate* of the slot, and commits wait.
//!
//! Which inodes are in use says a tree of their group, which has moments too: each commit that
//! changes an AGI counts them.

use std::sync::Arc;

use offshoot_kit::shards::MapShard;
use offshoot_kit::sync::atomic::{AtomicU64, Ordering};
use offshoot_kit::sync::{Mutex, MutexGuard, thread};
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::{AgNumber, Ino};

use super::XfsBuffers;

/// The slots. A reader may read again because of another inode of its slot.
const SLOTS: u64 = 1024;

/// How often a reader begins again because commits change what it reads.
pub(crate) const MOST_TRIES: usize = 100_000;

/// The slots of groups.
const GROUP_SLOTS: u32 = 64;

/// How often things that share a slot were committed.
#[derive(Debug, Default)]
struct PublishedMoments {
    /// How often a commit of one of them has begun to publish.
    begun: AtomicU64,
    /// How often one of them was committed.
    commits: AtomicU64,
}

impl PublishedMoments {
    fn begin(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        self.commits.fetch_add(1, Ordering::SeqCst);
    }

    fn moment(&self) -> Option<u64> {
        let moment = self.commits.load(Ordering::SeqCst);
        self.is_moment(moment).then_some(moment)
    }

    fn is_moment(&self, moment: u64) -> bool {
        self.begun.load(Ordering::SeqCst) == moment
    }
}

/// The inodes whose numbers end in the same bits.
#[derive(Debug, Default)]
struct InodeSlot {
    moments: PublishedMoments,
    by_number: Mutex<MapShard<Ino, Arc<[u8]>>>,
    /// Held while a commit publishes one of them, or a reader keeps them as they are.
    gate: Mutex<()>,
}

/// The newest bytes of each inode where its cluster has older ones.
#[derive(Debug)]
pub(super) struct CommittedInodes {
    slots: Box<[InodeSlot]>,
    groups: Box<[PublishedMoments]>,
}

impl Default for CommittedInodes {
    fn default() -> Self {
        let slots = (0..SLOTS).map(|_| InodeSlot::default()).collect();
        let groups = (0..GROUP_SLOTS).map(|_| PublishedMoments::default()).collect();
        Self { slots, groups }
    }
}

impl CommittedInodes {
    fn slot(&self, ino: Ino) -> Option<&InodeSlot> {
        self.slots.get(usize::try_from(ino.0 % SLOTS).unwrap_or(0))
    }

    fn group(&self, ag: AgNumber) -> Option<&PublishedMoments> {
        self.groups.get(usize::try_from(ag.0 % GROUP_SLOTS).unwrap_or(0))
    }
}

impl XfsBuffers {
    /// Makes these bytes what readers find of an inode, until it is home or its chunk is freed.
    pub(crate) fn publish_inode(&self, ino: Ino, bytes: Arc<[u8]>) {
        if let Some(slot) = self.committed.slot(ino) {
            slot.by_number.lock().insert(ino, bytes);
        }
    }

    /// Waits for readers that keep these inodes as they are. A commit calls it before it publishes
    /// them, and keeps what it gets until it has done so.
    pub(crate) fn gates(&self, inodes: impl Iterator<Item = Ino>) -> Vec<MutexGuard<'_, ()>> {
        // Two commits take them in the same order.
        let mut slots: Vec<_> = inodes.map(|ino| ino.0 % SLOTS).collect();
        slots.sort_unstable();
        slots.dedup();
        let slots = slots.into_iter().filter_map(|slot| self.committed.slot(Ino(slot)));
        slots.map(|slot| slot.gate.lock()).collect()
    }

    /// Keeps an inode and its blocks as they are, for a reader that has found no moment of it: no
    /// commit publishes them before the reader drops this. The reader takes no other lock.
    pub(crate) fn hold_still(&self, ino: Ino) -> Option<MutexGuard<'_, ()>> {
        self.committed.slot(ino).map(|slot| slot.gate.lock())
    }

    /// Says that a commit publishes an inode and blocks of it from now on.
    pub(crate) fn begin_publishing(&self, ino: Ino) {
        if let Some(slot) = self.committed.slot(ino) {
            slot.moments.begin();
        }
    }

    /// Says that it has published them.
    pub(crate) fn end_publishing(&self, ino: Ino) {
        if let Some(slot) = self.committed.slot(ino) {
            slot.moments.end();
        }
    }

    /// The moment of an inode and its blocks; `None` while a commit publishes them.
    pub(crate) fn moment(&self, ino: Ino) -> Option<u64> {
        self.committed.slot(ino)?.moments.moment()
    }

    /// Whether no commit has begun to publish the inode or its blocks since a moment.
    pub(crate) fn is_moment(&self, ino: Ino, moment: u64) -> bool {
        self.committed.slot(ino).is_none_or(|slot| slot.moments.is_moment(moment))
    }

    /// Says that a commit publishes the AGI of a group and its trees from now on.
    pub(crate) fn begin_publishing_group(&self, ag: AgNumber) {
        if let Some(moments) = self.committed.group(ag) {
            moments.begin();
        }
    }

    /// Says that it has published them.
    pub(crate) fn end_publishing_group(&self, ag: AgNumber) {
        if let Some(moments) = self.committed.group(ag) {
            moments.end();
        }
    }

    /// What `read` finds in the trees of inodes of a group, and in inodes of it, as one commit has
    /// left them. It is called again when another commit came between, whatever it found.
    ///
    /// # Errors
    /// `EAGAIN` when commits come one after the other without an end.
    pub(crate) fn at_one_moment_of_group<T>(
        &self,
        ag: AgNumber,
        mut read: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        let Some(moments) = self.committed.group(ag) else { return read() };
        for _ in 0..MOST_TRIES {
            if let Some(moment) = moments.moment() {
                let found = read();
                if moments.is_moment(moment) {
                    return found;
                }
            }
            thread::yield_now();
        }
        Err(Error::posix(Errno::AGAIN, format!("the inodes of group {ag} never stay the same")))
    }

    /// Says that the cluster of an inode has its newest bytes, or that its chunk was freed.
    pub(crate) fn forget_inode(&self, ino: Ino) {
        if let Some(slot) = self.committed.slot(ino) {
            slot.by_number.lock().remove(&ino);
        }
    }

    /// The committed bytes of an inode, but for its LSN, its chain of unlinked inodes, and its
    /// checksum; `None` when its cluster has them.
    pub(crate) fn committed_inode(&self, ino: Ino) -> Option<Arc<[u8]>> {
        self.committed.slot(ino)?.by_number.lock().get(&ino).cloned()
    }

    /// A number that is another one after each commit of an inode.
    pub(crate) fn inode_commits(&self, ino: Ino) -> u64 {
        self.committed.slot(ino).map_or(0, |slot| slot.moments.commits.load(Ordering::Acquire))
    }
}
