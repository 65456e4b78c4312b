//! How much room there is, as `statfs` shows it.
//!
//! The available bytes are the free bytes of data block groups, and the data that new chunks could
//! hold on the rest of the devices. Both assume that only the data of large files is written.
//!
//! A volume that is open for reading may have damaged block group items. Then the free bytes of its
//! block groups are unknown, and count as none. This is no error, because the files can still be
//! read.

use offshoot_btrfs_format::chunk::{Chunk, Profile};
use offshoot_vfs::{Result, StatFs};

use super::Engine;
use crate::space::{Purpose, RESERVED_BYTES, StoredGroup, profile};
use crate::storage::malformed;
use crate::transaction::LiveVolume;

impl Engine {
    /// The size of the volume, and its used and available bytes.
    ///
    /// # Errors
    /// When a block group has an unknown profile.
    pub(crate) fn statfs(&self) -> Result<StatFs> {
        let item = &self.superblock().item;
        let members = self.members().iter().filter(|member| !member.is_seed).count();
        let (used_bytes, free, profile) = if let Some(live) = self.live_part() {
            let ledger = live.space.ledger(Purpose::Data);
            let (_, free) = live.space.totals(Purpose::Data);
            let profile = live.space.flags_for(Purpose::Data).profile().map_err(malformed)?;
            (live.space.bytes_used(), free.saturating_sub(ledger.reserved()), profile)
        } else {
            let groups = self.block_groups().unwrap_or_else(|_| self.full_groups());
            let (free, profile) = of_data(&groups, members)?;
            (item.bytes_used.get(), free, profile)
        };
        let allocated = self.live_part().map(|live| live.space.allocated());
        let unallocated = self.members().iter().enumerate().map(|(i, member)| {
            let allocated = allocated.as_ref().map_or(member.allocated_bytes, |all| all[i]);
            let usable = if member.is_seed { 0 } else { member.usable_bytes() };
            usable.saturating_sub(RESERVED_BYTES).saturating_sub(allocated)
        });
        Ok(StatFs {
            total_bytes: self.live_part().map_or(item.total_bytes.get(), LiveVolume::total_bytes),
            used_bytes,
            available_bytes: free.saturating_add(capacity(unallocated, profile)),
            block_size: self.superblock().sector_size,
        })
    }

    /// The block groups of all chunks, as if nothing were free in them.
    fn full_groups(&self) -> Vec<StoredGroup> {
        let full =
            |Chunk { start, length: len, flags, .. }| StoredGroup { start, len, flags, used: len };
        self.chunks().map(full).collect()
    }
}

/// The free bytes of the block groups that data goes to, and their profile, which is also that of
/// new chunks.
fn of_data(groups: &[StoredGroup], members: usize) -> Result<(u64, Profile)> {
    let kinds = groups.iter().map(|group| group.flags);
    let flags = profile::flags_of_new_chunk(Purpose::Data, kinds, members)?;
    let groups = groups.iter().filter(|group| group.flags.0 & flags.0 == flags.0);
    let free = groups.map(|group| group.len.saturating_sub(group.used));
    let free = free.fold(0u64, u64::saturating_add);
    Ok((free, flags.profile().map_err(malformed)?))
}

/// The bytes of data in chunks of `profile` that fill members with so much room each. Damaged items
/// may claim any number of bytes, so the sum is 128 bits wide.
fn capacity(room: impl Iterator<Item = u64>, profile: Profile) -> u64 {
    let mut room: Vec<_> = room.map(u128::from).collect();
    room.sort_unstable();
    let shape = profile.shape();
    let bytes = match shape.max_stripes {
        _ if profile == Profile::Dup => room.iter().map(|room| room / 2).sum(),
        // Each chunk is on as many members as it has copies. Chunks can fill all members, except
        // some that are too large for the others to go with them. For RAID1 on 5, 7 and 100 that
        // leaves 12.
        Some(width) if shape.copies == width => (0..usize::from(width))
            .map(|left_out| {
                let rest = room.len().saturating_sub(left_out);
                room[..rest].iter().sum::<u128>() / (u128::from(width) - left_out as u128)
            })
            .min()
            .unwrap_or(0),
        // Each chunk is on all members that have room.
        _ => {
            let step = if profile == Profile::Raid10 { 2 } else { 1 };
            let (mut total, mut taken) = (0, 0);
            for i in 0..room.len() {
                let width = (room.len() - i) / step * step;
                if width < usize::from(shape.min_stripes) {
                    break;
                }
                let data = width as u128 / u128::from(shape.copies) - u128::from(shape.parity);
                total += (room[i] - taken) * data;
                taken = room[i];
            }
            total
        }
    };
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use offshoot_btrfs_format::TreeId;
    use offshoot_btrfs_format::encode::seal_block;
    use offshoot_device::BlockDevice;
    use offshoot_testkit::btrfs::checked::CheckedDevice;

    use super::*;
    use crate::test_volumes::{edit_root, in_memory};
    use crate::{BtrfsVolume, EngineOptions};

    #[test]
    fn the_capacity_of_every_profile() {
        for (room, profile, expected) in [
            (&[5, 7][..], Profile::Single, 12),
            (&[5, 7], Profile::Dup, 5),
            (&[5, 7], Profile::Raid1, 5),
            (&[5, 7, 100], Profile::Raid1, 12),
            (&[50, 70, 100], Profile::Raid1, 110),
            (&[10, 10], Profile::Raid1c3, 0),
            (&[10, 20, 30, 30], Profile::Raid1c3, 30),
            (&[10, 20, 30], Profile::Raid0, 60),
            (&[10, 20, 30, 30], Profile::Raid10, 40),
            (&[10, 10, 10], Profile::Raid5, 20),
            (&[10], Profile::Raid1, 0),
            (&[], Profile::Single, 0),
            (&[u64::MAX, u64::MAX], Profile::Single, u64::MAX),
            (&[u64::MAX, u64::MAX], Profile::Raid1, u64::MAX),
            (&[u64::MAX, u64::MAX, u64::MAX], Profile::Raid5, u64::MAX),
        ] {
            let found = capacity(room.iter().copied(), profile);
            assert_eq!(found, expected, "{profile} on {room:?}");
        }
    }

    fn devices(device: &Arc<CheckedDevice>) -> Vec<Arc<dyn BlockDevice>> {
        vec![device.clone()]
    }

    /// `statfs` once failed when block groups could not be read, and so did all that asked it.
    #[test]
    fn damaged_block_groups_leave_what_is_unallocated() {
        let device = in_memory(16384);
        let volume = BtrfsVolume::open(devices(&device), &EngineOptions::default()).unwrap();
        let sound = volume.statfs().unwrap();
        let free = of_data(&volume.block_groups().unwrap(), 1).unwrap().0;
        assert!(free > 0);
        let tree = volume.tree(TreeId::BLOCK_GROUP).unwrap();
        edit_root(&device, &volume, tree, |bytes| bytes.fill(0xaa));
        drop(volume);
        let volume = BtrfsVolume::open(devices(&device), &EngineOptions::default()).unwrap();
        assert!(volume.block_groups().is_err(), "they are damaged");
        let expected = StatFs { available_bytes: sound.available_bytes - free, ..sound };
        assert_eq!(volume.statfs().unwrap(), expected);
    }

    /// Sums of sizes in device items once overflowed.
    #[test]
    fn a_member_has_no_more_room_than_its_device() {
        let device = in_memory(16384);
        let volume = BtrfsVolume::open(devices(&device), &EngineOptions::default()).unwrap();
        let sound = volume.statfs().unwrap();
        let member = &volume.members()[0];
        let sizes = [member.total_bytes(), member.allocated_bytes].map(u64::to_le_bytes).concat();
        let enlarge = |bytes: &mut [u8]| {
            let at = bytes.windows(16).position(|window| window == sizes).unwrap();
            bytes[at..at + 8].fill(0xff);
            bytes[at + 8..at + 16].fill(0);
            seal_block(bytes, volume.superblock().checksum);
        };
        edit_root(&device, &volume, volume.tree(TreeId::CHUNK).unwrap(), enlarge);
        let allocated = member.allocated_bytes;
        drop(volume);
        let volume = BtrfsVolume::open(devices(&device), &EngineOptions::default()).unwrap();
        assert_eq!(volume.members()[0].total_bytes(), u64::MAX);
        let expected = StatFs { available_bytes: sound.available_bytes + allocated, ..sound };
        assert_eq!(volume.statfs().unwrap(), expected);
    }
}
