//! Which block groups space is taken from: those of the profile that a new chunk gets.
//!
//! Volumes have block groups of several profiles for one purpose: `mkfs.btrfs` of old left an empty
//! `single` one beside each that it meant, and a conversion that was stopped leaves as many as it
//! had not reached. What is free in the others is not used, as the kernel does not use it: a tree
//! block in a `single` group of a volume with DUP would have one copy.
//!
//! ```text
//! metadata of the volume      one member          two members
//! single, DUP                 DUP                 DUP
//! single, RAID1, RAID0        RAID0               RAID1
//! RAID1                       single: any         RAID1
//! ```
//!
//! So a block group of another profile shrinks when what it holds is changed, and goes when it is
//! empty.

use offshoot_btrfs_format::chunk::{BlockGroupFlags, Profile};
use offshoot_vfs::Result;

use super::Purpose;
use crate::storage::malformed;

/// The type flags of block groups for `purpose`, of a volume with mixed ones or without.
pub(crate) fn types_for(purpose: Purpose, is_mixed: bool) -> u64 {
    match purpose {
        Purpose::Data | Purpose::Metadata if is_mixed => {
            Purpose::Data.flag() | Purpose::Metadata.flag()
        }
        _ => purpose.flag(),
    }
}

/// Whether a volume with block groups of these kinds has mixed ones. Then it allocates from no
/// others for data and metadata.
pub(crate) fn has_mixed(mut kinds: impl Iterator<Item = BlockGroupFlags>) -> bool {
    let mixed = types_for(Purpose::Data, true);
    kinds.any(|flags| flags.0 & mixed == mixed)
}

/// The flags of a new chunk for `purpose` on so many members, where the block groups are of these
/// kinds: the safest profile of those that there are and that so many members can have. A block
/// group with all of these flags is one to take space from; where none of the profiles is possible,
/// that is any of the type.
///
/// # Errors
/// When a block group has a profile that there is not.
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
    // A kind without block groups, as data may be, has no copies.
    let profile = safest(possible).unwrap_or(Profile::Single);
    Ok(BlockGroupFlags(types | profile.bits()))
}

/// How many members a chunk of this profile is on, at the least.
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
