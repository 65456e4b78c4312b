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

use std::collections::HashMap;
use std::sync::Arc;

use offshoot_kit::sync::Mutex;
use offshoot_kit::sync::atomic::{AtomicU64, Ordering};
use offshoot_xfs_format::Ino;

use super::XfsBuffers;

/// The slots.
const SLOTS: u64 = 64;

/// The inodes whose numbers end in the same bits.
#[derive(Debug, Default)]
struct InodeSlot {
    /// How often one of them was committed.
    commits: AtomicU64,
    by_number: Mutex<HashMap<Ino, Arc<[u8]>>>,
}

/// The newest bytes of each inode where its cluster has older ones.
#[derive(Debug)]
pub(super) struct CommittedInodes(Box<[InodeSlot]>);

impl Default for CommittedInodes {
    fn default() -> Self {
        Self((0..SLOTS).map(|_| InodeSlot::default()).collect())
    }
}

impl CommittedInodes {
    fn slot(&self, ino: Ino) -> Option<&InodeSlot> {
        self.0.get(usize::try_from(ino.0 % SLOTS).unwrap_or(0))
    }
}

impl XfsBuffers {
    /// Makes these bytes what readers find of an inode, until it is home or its chunk is freed.
    pub(crate) fn publish_inode(&self, ino: Ino, bytes: Arc<[u8]>) {
        if let Some(slot) = self.committed.slot(ino) {
            slot.by_number.lock().insert(ino, bytes);
            slot.commits.fetch_add(1, Ordering::Release);
        }
    }

    /// Says that the cluster of an inode has its newest bytes, or that its chunk was freed.
    pub(crate) fn forget_inode(&self, ino: Ino) {
        if let Some(slot) = self.committed.slot(ino) {
            slot.by_number.lock().remove(&ino);
        }
    }

    /// The committed bytes of an inode, but for its LSN and its chain of unlinked inodes; `None`
    /// when its cluster has them.
    pub(crate) fn committed_inode(&self, ino: Ino) -> Option<Arc<[u8]>> {
        self.committed.slot(ino)?.by_number.lock().get(&ino).cloned()
    }

    /// A number that is another one after each commit of an inode.
    pub(crate) fn inode_commits(&self, ino: Ino) -> u64 {
        self.committed.slot(ino).map_or(0, |slot| slot.commits.load(Ordering::Acquire))
    }
}
