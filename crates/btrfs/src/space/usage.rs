//! How much room there is, as `statfs` shows it.
//!
//! What is available is what is free in block groups for data, and what chunks for data could take of the
//! devices; both are what they would be if nothing but data of large files were written.

use offshoot_btrfs_format::chunk::Profile;
use offshoot_vfs::{Result, StatFs};

use super::{BlockGroup, Purpose, chunk_plan};
use crate::subvolume::malformed;
use crate::volume::Volume;

/// What is left free at the start of every device.
const RESERVED_BYTES: u64 = 1 << 20;

impl Volume {
    /// What the volume holds and could hold.
    ///
    /// # Errors
    /// When the block groups cannot be read.
    pub(crate) fn statfs(&self) -> Result<StatFs> {
        let item = &self.superblock().item;
        let (used_bytes, free, profiles) = if let Some(live) = self.live_part() {
            let ledger = live.space.ledger(Purpose::Data);
            let groups = live.space.groups.read();
            let (free, profiles) = of_data(groups.values().map(AsRef::as_ref))?;
            (live.space.bytes_used(), free.saturating_sub(ledger.reserved()), profiles)
        } else {
            let (free, profiles) = of_data(self.block_groups()?.iter())?;
            (item.bytes_used.get(), free, profiles)
        };
        let allocated = self.live_part().map(|live| live.space.allocated());
        let unallocated = self.members().iter().enumerate().map(|(i, member)| {
            let allocated = allocated.as_ref().map_or(member.allocated_bytes, |all| all[i]);
            let usable = if member.is_seed { 0 } else { member.total_bytes };
            usable.saturating_sub(RESERVED_BYTES).saturating_sub(allocated)
        });
        let profile = chunk_plan::safest(profiles.into_iter()).unwrap_or(Profile::Single);
        Ok(StatFs {
            total_bytes: item.total_bytes.get(),
            used_bytes,
            available_bytes: free + capacity(unallocated.collect(), profile),
            block_size: self.superblock().sector_size,
        })
    }
}

/// What is free in the block groups for data, and their profiles. Where there are mixed ones, data goes to these only.
fn of_data<'g>(
    groups: impl Iterator<Item = &'g BlockGroup> + Clone,
) -> Result<(u64, Vec<Profile>)> {
    let mixed = Purpose::Data.flag() | Purpose::Metadata.flag();
    let is_mixed = groups.clone().any(|group| group.serves(mixed));
    let flags = if is_mixed { mixed } else { Purpose::Data.flag() };
    let (mut free, mut profiles) = (0, Vec::new());
    for group in groups.filter(|group| group.serves(flags)) {
        free += group.free_bytes();
        profiles.push(group.flags.profile().map_err(malformed)?);
    }
    Ok((free, profiles))
}

/// How much data chunks of this profile hold that take all there is on members with so much room.
fn capacity(mut room: Vec<u64>, profile: Profile) -> u64 {
    let shape = profile.shape();
    room.sort_unstable();
    match shape.max_stripes {
        _ if profile == Profile::Dup => room.iter().map(|room| room / 2).sum(),
        // Each chunk is on as many members as it has copies. The fullest use leaves out none but those that are
        // so large that the others do not suffice to go with them.
        Some(width) if shape.copies == width => (0..usize::from(width))
            .map(|left_out| {
                let rest = room.len().saturating_sub(left_out);
                room[..rest].iter().sum::<u64>() / (u64::from(width) - left_out as u64)
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
                let data = width as u64 / u64::from(shape.copies) - u64::from(shape.parity);
                total += (room[i] - taken) * data;
                taken = room[i];
            }
            total
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        ] {
            assert_eq!(capacity(room.to_vec(), profile), expected, "{profile} on {room:?}");
        }
    }
}
