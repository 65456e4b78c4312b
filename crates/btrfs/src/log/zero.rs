//! Throws a log away: changes that were fsynced since the last commit are lost.

use std::io::IoSlice;
use std::ops::ControlFlow;

use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{ItemType, Key, Physical};
use offshoot_vfs::{Error, Result};

use super::log_trees;
use crate::SubvolumeId;
use crate::inode::Rooms;
use crate::storage::superblock_at;

/// The contents of a log that was thrown away.
#[derive(Debug)]
pub struct LostLog {
    /// The subvolumes in it, each with the number of its inodes in the log.
    pub inodes: Vec<(SubvolumeId, u64)>,
    /// The first error in reading it, if it could not be read completely.
    pub problem: Option<Error>,
}

/// As [`Engine::zero_log`](crate::Engine::zero_log).
pub(crate) fn zero_log(volume: &Rooms) -> Result<Option<LostLog>> {
    if !volume.superblock().has_pending_log() {
        return Ok(None);
    }
    let lost = lost_log(volume);
    let [primary, copies @ ..] = SUPERBLOCK_OFFSETS;
    zero_log_at(volume, &[primary])?;
    volume.storage.flush_members()?;
    zero_log_at(volume, &copies)?;
    volume.storage.flush_members()?;
    Ok(Some(lost))
}

fn lost_log(volume: &Rooms) -> LostLog {
    let mut lost = LostLog { inodes: Vec::new(), problem: None };
    let logs = log_trees(volume).unwrap_or_else(|error| {
        lost.problem = Some(error);
        Vec::new()
    });
    for log in logs {
        let mut inodes = 0;
        let read = volume.for_each_item(log.root, Key::MIN, |key, _| {
            inodes += u64::from(key.item_type == ItemType::INODE_ITEM);
            ControlFlow::Continue(())
        });
        lost.inodes.push((log.subvolume, inodes));
        lost.problem = lost.problem.or(read.err());
    }
    lost
}

/// Removes the log from the valid superblocks at these offsets.
fn zero_log_at(volume: &Rooms, offsets: &[u64]) -> Result<()> {
    for (index, member) in volume.members().iter().enumerate() {
        let Some(device) = member.device.as_ref().filter(|_| !member.is_seed) else { continue };
        for &offset in offsets {
            if offset + SUPERBLOCK_SIZE as u64 > device.size_bytes() {
                continue;
            }
            let mut found = match superblock_at(&**device, offset) {
                Ok(found) if found.has_pending_log() => found,
                Err(error @ Error::Io { .. }) => return Err(error),
                // No reader uses a superblock that fails verification.
                Ok(_) | Err(_) => continue,
            };
            found.item.log_root = 0.into();
            found.item.log_root_transid = 0.into();
            found.item.log_root_level = 0;
            let bytes = sealed_superblock(&found.item, Physical(offset), found.checksum);
            volume.storage.write_member(index, offset, &[IoSlice::new(&bytes[..])])?;
        }
    }
    Ok(())
}
