//! The superblock of each member, its copies, and the backup roots in it.
//!
//! The backup of the newest commit has the roots of that commit. The kernel reads them when the
//! next transaction may already run, so a root in the backup may be newer than the commit: such a
//! root says nothing.

use std::mem::offset_of;

use offshoot_btrfs_format::superblock::{
    RootBackup, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, SuperblockItem, is_kept_superblock,
};
use offshoot_btrfs_format::{Generation, TreeId};
use offshoot_device::BlockDevice;
use uuid::Uuid;
use zerocopy::IntoBytes;

use super::devices::KnownDevices;
use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::volume::CheckedVolume;
use crate::storage::{Member, superblock_at};

macro_rules! fields {
    ($($field:ident)*) => {
        [$((stringify!($field), offset_of!(SuperblockItem, $field)),)*]
    };
}

/// The fields of a superblock, and where each begins.
const FIELDS: [(&str, usize); 34] = fields! {
    csum fsid bytenr flags magic generation root chunk_root log_root log_root_transid total_bytes
    bytes_used root_dir_objectid num_devices sectorsize nodesize leafsize stripesize
    sys_chunk_array_size chunk_root_generation compat_flags compat_ro_flags incompat_flags csum_type
    root_level chunk_root_level log_root_level dev_item label cache_generation uuid_tree_generation
    metadata_uuid nr_global_roots reserved
};

/// Where the fields begin that are behind [`FIELDS`]: system chunks and backups.
const BEHIND: [(&str, usize); 3] = fields! { sys_chunk_array super_roots padding };

/// Fields in which any two superblocks of a commit may differ: the checksum, the place, and what an
/// fsync writes.
const OWN: [&str; 5] = ["csum", "bytenr", "log_root", "log_root_transid", "log_root_level"];

/// A field in which two superblocks differ, with the bytes of both.
struct Difference<'s> {
    field: &'static str,
    expected: &'s [u8],
    found: &'s [u8],
}

/// Checks the superblocks of all members.
pub(super) fn check(volume: &CheckedVolume<'_>, devices: &KnownDevices) {
    let item = &volume.superblock().item;
    if item.stripesize != item.sectorsize {
        let (code, what) = (BtrfsFindingCode::Superblock, "stripe size");
        let (expected, found) = (item.sectorsize, item.stripesize);
        volume.findings.differs(code, BtrfsFindingPlace::Volume, what, expected, found);
    }
    // Those of a volume that is written are newer than the commit that is checked.
    if volume.is_written {
        return check_backup(volume);
    }
    for member in volume.storage.members() {
        if let Some(device) = member.device.as_deref() {
            check_member(volume, member, device, devices);
        }
    }
    check_backup(volume);
}

fn check_member(
    volume: &CheckedVolume<'_>,
    member: &Member,
    device: &dyn BlockDevice,
    devices: &KnownDevices,
) {
    let place = BtrfsFindingPlace::Member(member.id.0);
    let [primary_at, copies_at @ ..] = SUPERBLOCK_OFFSETS;
    let primary = match superblock_at(device, primary_at) {
        Ok(primary) => Some(primary),
        Err(error) => {
            volume.findings.add_error(BtrfsFindingCode::Superblock, place, &error);
            None
        }
    };
    let fsid_of_device = primary.as_ref().map(|primary| primary.metadata_uuid);
    // A device may be longer than the volume, which has no copy behind its end.
    let end = primary
        .as_ref()
        .map_or(member.total_bytes(), |primary| primary.item.dev_item.total_bytes.get());
    let end = end.min(device.size_bytes());
    for at in copies_at.into_iter().filter(|&at| is_kept_superblock(at, end)) {
        match superblock_at(device, at) {
            Ok(copy) => {
                if let Some(primary) = &primary {
                    check_copy(volume, place, at, primary, &copy);
                }
            }
            Err(error) => {
                volume.findings.add_error(BtrfsFindingCode::SuperblockCopy, place, &error);
            }
        }
    }
    if let Some(primary) = primary.filter(|_| !member.is_seed) {
        check_primary(volume, place, &primary, devices);
    }
    devices.check_size(volume, member, device.size_bytes());
    let fsid = devices.get(member.id.0).map(|item| Uuid::from_bytes(item.fsid));
    if let (Some(found), Some(expected)) = (fsid, fsid_of_device)
        && found != expected
    {
        let what = "filesystem id in the item of the device";
        volume.findings.differs(BtrfsFindingCode::Member, place, what, expected, found);
    }
}

/// Compares a copy with its primary.
fn check_copy(
    volume: &CheckedVolume<'_>,
    place: BtrfsFindingPlace,
    at: u64,
    primary: &Superblock,
    copy: &Superblock,
) {
    let code = BtrfsFindingCode::SuperblockCopy;
    let what = format!("the copy of the superblock at byte {at}");
    if primary.generation != copy.generation {
        let what = format!("generation of {what}");
        return volume.findings.differs(code, place, what, primary.generation, copy.generation);
    }
    if let Some(difference) = first_difference(&primary.item, &copy.item, &OWN) {
        report(volume, code, place, &what, &difference);
    }
}

/// Compares the primary of a member that is no seed with the newest superblock.
fn check_primary(
    volume: &CheckedVolume<'_>,
    place: BtrfsFindingPlace,
    primary: &Superblock,
    devices: &KnownDevices,
) {
    let newest = volume.superblock();
    let missed = newest.generation.0.saturating_sub(primary.generation.0);
    if missed > 0 {
        let code = match missed {
            1 => BtrfsFindingCode::Superblock,
            _ => BtrfsFindingCode::MissingMember,
        };
        let what = "generation of the primary superblock";
        return volume.findings.differs(code, place, what, newest.generation, primary.generation);
    }
    let own = [&OWN[..], &["dev_item"]].concat();
    if let Some(difference) = first_difference(&newest.item, &primary.item, &own) {
        let code = BtrfsFindingCode::Superblock;
        report(volume, code, place, "the primary superblock", &difference);
    }
    devices.check_own_item(volume, place, &primary.item.dev_item);
}

/// The first field besides `ignored` in which two superblocks differ.
fn first_difference<'s>(
    expected: &'s SuperblockItem,
    found: &'s SuperblockItem,
    ignored: &[&str],
) -> Option<Difference<'s>> {
    let starts = || FIELDS.iter().chain(&BEHIND);
    let ends = starts().skip(1).map(|(_, start)| *start).chain([SUPERBLOCK_SIZE]);
    starts().zip(ends).find_map(|(&(field, start), end)| {
        let expected = expected.as_bytes().get(start..end)?;
        let found = found.as_bytes().get(start..end)?;
        let differs = expected != found && !ignored.contains(&field);
        differs.then_some(Difference { field, expected, found })
    })
}

fn report(
    volume: &CheckedVolume<'_>,
    code: BtrfsFindingCode,
    place: BtrfsFindingPlace,
    what: &str,
    difference: &Difference<'_>,
) {
    let Difference { field, expected, found } = difference;
    let number = |bytes: &[u8]| {
        let mut all = [0; 8];
        all.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(u64::from_le_bytes(all))
    };
    match (number(expected), number(found)) {
        (Some(expected), Some(found)) => {
            volume.findings.differs(code, place, format!("{field} of {what}"), expected, found);
        }
        _ => volume.findings.add(code, place, format!("{what} has another {field}")),
    }
}

/// The place and age of a root.
#[derive(Clone, Copy, PartialEq, Eq)]
struct RememberedRoot {
    logical: u64,
    generation: Generation,
    level: u8,
}

/// The roots in a backup.
fn roots_of(backup: &RootBackup) -> [(TreeId, RememberedRoot); 6] {
    let root = |logical: u64, generation: u64, level| RememberedRoot {
        logical,
        generation: Generation(generation),
        level,
    };
    let RootBackup { tree_root, chunk_root, extent_root, fs_root, dev_root, csum_root, .. } =
        *backup;
    let of = |logical: offshoot_btrfs_format::U64,
              generation: offshoot_btrfs_format::U64,
              level| { root(logical.get(), generation.get(), level) };
    [
        (TreeId::ROOT, of(tree_root, backup.tree_root_gen, backup.tree_root_level)),
        (TreeId::CHUNK, of(chunk_root, backup.chunk_root_gen, backup.chunk_root_level)),
        (TreeId::EXTENT, of(extent_root, backup.extent_root_gen, backup.extent_root_level)),
        (TreeId::FS, of(fs_root, backup.fs_root_gen, backup.fs_root_level)),
        (TreeId::DEV, of(dev_root, backup.dev_root_gen, backup.dev_root_level)),
        (TreeId::CSUM, of(csum_root, backup.csum_root_gen, backup.csum_root_level)),
    ]
}

/// Compares the backup of the newest commit, if there is one, with the roots of that commit.
fn check_backup(volume: &CheckedVolume<'_>) {
    let newest = volume.superblock().generation;
    let backups = &volume.superblock().item.super_roots;
    for backup in backups.iter().filter(|backup| backup.tree_root_gen.get() == newest.0) {
        for (id, found) in roots_of(backup) {
            // A commit during the replay of a log, for example, does not know the top level yet.
            let is_unknown = found.logical == 0 && found.generation == Generation(0);
            if is_unknown || found.generation > newest {
                continue;
            }
            let is_named = matches!(id, TreeId::ROOT | TreeId::CHUNK);
            let root = match id {
                TreeId::ROOT => Some(volume.root_tree()),
                TreeId::CHUNK => Some(volume.chunk_tree()),
                _ => volume.tree(id),
            };
            let Some(root) = root else { continue };
            let expected = RememberedRoot {
                logical: root.logical.0,
                generation: root.generation,
                level: root.level,
            };
            // The kernel may copy the roots of other trees before they get their last address.
            let is_of_commit = is_named || expected.generation == found.generation;
            if is_of_commit && expected != found {
                let shown = |root: RememberedRoot| {
                    let RememberedRoot { logical, generation, level } = root;
                    format!("{logical} of generation {generation} and level {level}")
                };
                let what = format!("the backup of the root of tree {id}");
                let place = BtrfsFindingPlace::Volume;
                let (expected, found) = (shown(expected), shown(found));
                volume.findings.differs(BtrfsFindingCode::BackupRoot, place, what, expected, found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields cover the whole superblock, in order.
    #[test]
    fn a_difference_has_the_name_of_its_field() {
        let starts: Vec<_> = FIELDS.iter().chain(&BEHIND).map(|(_, start)| *start).collect();
        assert!(starts.is_sorted() && starts.first() == Some(&0));
        let one = SuperblockItem::default();
        for (field, start) in FIELDS.iter().chain(&BEHIND) {
            let mut other = one;
            other.as_mut_bytes()[*start] = 1;
            let found = first_difference(&one, &other, &[]).expect("it differs");
            assert_eq!(found.field, *field);
            assert!(first_difference(&one, &other, &[*field]).is_none());
        }
        let mut other = one;
        other.padding[564] = 1;
        assert_eq!(first_difference(&one, &other, &OWN).map(|found| found.field), Some("padding"));
    }
}
