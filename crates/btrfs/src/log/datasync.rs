//! fdatasync leaves out the times of a file.
//!
//! A program that overwrites a file in place, and calls fdatasync after each write, changes only
//! its times. Then a flush of the devices is enough, without a log and without a commit.
//!
//! There are two conditions. The inode, its names and its attributes are the same as in the last
//! commit, or as in the log if the running transaction has logged the file. And `notes` has no
//! changed extents of it.

use offshoot_btrfs_format::inode::{InodeItem, Timespec};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{FileId, FileType, Result};
use zerocopy::{FromZeros, IntoBytes};

use super::record::{InodeItems, committed_head, current_head, inode_in, logged_head};
use super::running::RunningLog;
use crate::inode::Rooms;
use crate::inode::type_of;
use crate::storage::malformed;
use crate::transaction::LogState;
use crate::tree::TreeRoot;

/// The place where everything but the times of a file is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StoredPlace {
    /// In the last commit.
    Committed,
    /// In this batch of the log.
    Logged(u64),
}

/// Finds the place where everything but the times of `file`, which is locked, is stored; `None` if
/// there is none. `committed` is its subvolume in the last commit.
pub(super) fn stored_but_times(
    volume: &Rooms,
    running: &RunningLog,
    log: &LogState,
    file: FileId,
    committed: TreeRoot,
) -> Result<Option<StoredPlace>> {
    if log.notes().has_extents(file) {
        return Ok(None);
    }
    let mut trees = running.trees_for(file);
    let own = trees.of(offshoot_btrfs_format::TreeId(file.dev));
    let logged = own.and_then(|own| {
        let logged = own.logged.get(&file.ino)?;
        Some((logged.is_whole, logged.batch, *own.tree.root.read()))
    });
    let (stored, head) = match logged {
        Some((true, batch, root)) => {
            (StoredPlace::Logged(batch), logged_head(volume, root, file.ino)?)
        }
        Some(_) => return Ok(None),
        None => (StoredPlace::Committed, committed_head(volume, committed, file.ino)?),
    };
    drop(trees);
    let now = current_head(volume, file)?;
    let is_file = inode_in(&now)?.map(|item| type_of(&item)).transpose()?;
    let is_same = is_file == Some(FileType::Regular) && without_times(now)? == without_times(head)?;
    Ok(is_same.then_some(stored))
}

/// The items with the times of the inode set to zero, and the two counters that rise with every
/// change.
fn without_times(mut head: InodeItems) -> Result<InodeItems> {
    for (_, data) in head.iter_mut().filter(|(key, _)| is_inode(key)) {
        let mut item = *InodeItem::view(data).map_err(malformed)?;
        (item.transid, item.sequence) = (0.into(), 0.into());
        [item.atime, item.mtime, item.ctime] = [Timespec::new_zeroed(); 3];
        *data = item.as_bytes().to_vec();
    }
    Ok(head)
}

fn is_inode(key: &Key) -> bool {
    key.item_type == ItemType::INODE_ITEM
}
