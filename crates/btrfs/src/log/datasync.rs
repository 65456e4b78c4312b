//! What fdatasync leaves out: the times of a file.
//!
//! Who writes a file in place, and has it durable after each write, changes nothing of it but
//! times. Then it takes a barrier, and neither a log nor a commit.
//!
//! That is so if the inode, its names and its attributes are what the last commit has, or, where
//! the running transaction has logged the file, what the log has; and if no extents were noted
//! since.

use offshoot_btrfs_format::inode::{InodeItem, Timespec};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{FileId, FileType, Result};
use zerocopy::{FromZeros, IntoBytes};

use super::record::{Items, committed_head, current_head, inode_in, logged_head};
use crate::engine::Engine;
use crate::inode::type_of;
use crate::storage::malformed;
use crate::transaction::LogState;
use crate::tree::TreeRoot;

/// Where all of a file is but its times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// In the last commit.
    Committed,
    /// In this batch of the log.
    Logged(u64),
}

/// Where all of `file`, which is locked, is but its times, if it is somewhere. `committed` is its
/// subvolume in the last commit.
pub(super) fn stored_but_times(
    volume: &Engine,
    log: &LogState,
    file: FileId,
    committed: TreeRoot,
) -> Result<Option<Stored>> {
    if log.notes().has_extents(file) {
        return Ok(None);
    }
    let mut trees = volume.log.trees_for(file);
    let own = trees.of(offshoot_btrfs_format::TreeId(file.dev));
    let logged = own.and_then(|own| {
        let logged = own.logged.get(&file.ino)?;
        Some((logged.is_whole, logged.batch, *own.tree.root.read()))
    });
    let (stored, head) = match logged {
        Some((true, batch, root)) => (Stored::Logged(batch), logged_head(volume, root, file.ino)?),
        Some(_) => return Ok(None),
        None => (Stored::Committed, committed_head(volume, committed, file.ino)?),
    };
    drop(trees);
    let now = current_head(volume, file)?;
    let is_file = inode_in(&now)?.map(|item| type_of(&item)).transpose()?;
    let is_same = is_file == Some(FileType::Regular) && without_times(now)? == without_times(head)?;
    Ok(is_same.then_some(stored))
}

/// The items, as if the inode had no times.
fn without_times(mut head: Items) -> Result<Items> {
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
