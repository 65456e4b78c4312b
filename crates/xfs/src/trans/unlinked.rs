//! The order of unlinked inodes. On the device each one of a list names the next one, and none the
//! one before it, which changes too when an inode leaves the list. So that is kept here:
//!
//! ```text
//! list on the device     AGI -> 7 -> 5 -> 3          5 leaves: 7 names 3 then
//! table                  5: 7, 3: 5                  3: 7
//! ```
//!
//! A transaction changes the table when it commits, while it has the AGI of the list. The table has
//! no more inodes than the lists. It does not know lists that were there when the volume was
//! opened, and what it says is compared with the device.

use std::collections::{BTreeMap, HashMap};

use offshoot_kit::sync::Mutex;
use offshoot_xfs_format::Ino;

/// Which inode is in front of each unlinked one that is not the first of its list.
#[derive(Debug, Default)]
pub(super) struct UnlinkedOrder(Mutex<HashMap<Ino, Ino>>);

impl UnlinkedOrder {
    pub(super) fn before(&self, ino: Ino) -> Option<Ino> {
        self.0.lock().get(&ino).copied()
    }

    pub(super) fn apply(&self, changes: BTreeMap<Ino, Option<Ino>>) {
        if changes.is_empty() {
            return;
        }
        let mut table = self.0.lock();
        for (ino, before) in changes {
            match before {
                Some(before) => table.insert(ino, before),
                None => table.remove(&ino),
            };
        }
    }
}
