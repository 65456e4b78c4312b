//! From which block groups space is taken: those with the profile of a new chunk.
//!
//! A volume may have block groups of several profiles for one purpose. An old `mkfs.btrfs` left an
//! empty `single` group beside each intended one, and a conversion that was stopped leaves the
//! groups that it had not reached. Like the kernel, this engine takes no space from groups of other
//! profiles: a tree block in a `single` group of a volume with DUP would have only one copy.
//!
//! ```text
//! metadata of the volume      one member          two members
//! single, DUP                 DUP                 DUP
//! single, RAID1, RAID0        RAID0               RAID1
//! RAID1                       single: any         RAID1
//! ```
//!
//! So a block group of another profile shrinks as its contents change, and is removed when it is
//! empty.

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Profile};
use offshoot_vfs::Result;

use super::Purpose;
use crate::storage::malformed;

/// The type flags of block groups for `purpose`, in a volume with mixed block groups or without.
pub(super) fn types_for(purpose: Purpose, is_mixed: bool) -> u64 {
    match purpose {
        Purpose::Data | Purpose::Metadata if is_mixed => {
            Purpose::Data.flag() | Purpose::Metadata.flag()
        }
        _ => purpose.flag(),
    }
}

/// Whether a volume with block groups of these kinds has mixed ones. Then only mixed ones are used
/// for data and metadata.
pub(super) fn has_mixed(mut kinds: impl Iterator<Item = BlockGroupFlags>) -> bool {
    let mixed = types_for(Purpose::Data, true);
    kinds.any(|flags| flags.0 & mixed == mixed)
}

/// The flags of a new chunk for `purpose` on so many members: the safest profile among the block
/// groups of these kinds that this many members allow. Space is taken from block groups with all of
/// these flags. When none of the profiles is possible, the flags are those of `single`, which every
/// group of the type has.
///
/// # Errors
/// When a block group has an unknown profile.
pub(crate) fn flags_of_new_chunk(
    purpose: Purpose,
    kinds: impl Iterator<Item = BlockGroupFlags> + Clone,
    members: usize,
) -> Result<BlockGroupFlags> {
    let types = types_for(purpose, has_mixed(kinds.clone()));
    let profiles = kinds
        .filter(|flags| flags.0 & types == types)
        .map(|flags| flags.profile().map_err(malformed))
        .collect::<Result<Vec<_>>>()?;
    let possible = profiles.into_iter().filter(|&profile| least_members(profile) <= members);
    // A purpose without block groups, as data may be, gets one copy.
    let profile = safest(possible).unwrap_or(Profile::Single);
    Ok(BlockGroupFlags(types | profile.bits()))
}

/// The fewest members that a chunk of this profile needs.
fn least_members(profile: Profile) -> usize {
    match profile {
        Profile::Dup => 1,
        _ => profile.shape().min_stripes.into(),
    }
}

/// The safest of these profiles.
fn safest(profiles: impl Iterator<Item = Profile>) -> Option<Profile> {
    const SAFEST_FIRST: [Profile; 9] = [
        Profile::Raid1c4,
        Profile::Raid6,
        Profile::Raid1c3,
        Profile::Raid5,
        Profile::Raid10,
        Profile::Raid1,
        Profile::Dup,
        Profile::Raid0,
        Profile::Single,
    ];
    profiles.min_by_key(|profile| SAFEST_FIRST.iter().position(|one| one == profile))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_chunk(purpose: Purpose, kinds: &[(u64, Profile)], members: usize) -> (u64, Profile) {
        let kinds = kinds.iter().map(|(types, profile)| BlockGroupFlags(types | profile.bits()));
        let flags = flags_of_new_chunk(purpose, kinds, members).expect("all profiles are known");
        (flags.0 & BlockGroupFlags::TYPES, flags.profile().expect("it is one"))
    }

    const DATA: u64 = BlockGroupFlags::DATA;
    const METADATA: u64 = BlockGroupFlags::METADATA;

    #[test]
    fn the_safest_profile_that_members_can_have_is_taken() {
        use Profile::{Dup, Raid0, Raid1, Raid1c3, Single};
        let kinds = [(METADATA, Single), (METADATA, Raid1), (METADATA, Raid0), (DATA, Dup)];
        for (purpose, members, expected) in [
            (Purpose::Metadata, 2, (METADATA, Raid1)),
            (Purpose::Metadata, 1, (METADATA, Raid0)),
            (Purpose::Data, 1, (DATA, Dup)),
            (Purpose::System, 2, (BlockGroupFlags::SYSTEM, Single)),
        ] {
            assert_eq!(new_chunk(purpose, &kinds, members), expected, "{purpose}, {members}");
        }
        let wide = [(METADATA, Raid1c3)];
        assert_eq!(new_chunk(Purpose::Metadata, &wide, 2), (METADATA, Single));
    }

    #[test]
    fn mixed_block_groups_go_before_others() {
        let kinds = [(METADATA, Profile::Raid1), (DATA | METADATA, Profile::Dup)];
        for purpose in [Purpose::Data, Purpose::Metadata] {
            assert_eq!(new_chunk(purpose, &kinds, 2), (DATA | METADATA, Profile::Dup));
        }
    }
}
