//! Paths of the inodes with findings.
//!
//! A path is found upwards: an inode has a reference to its directory (INODE_REF), and a subvolume
//! one to the directory that it is in (ROOT_BACKREF). Names are what is damaged, so the way up may
//! end anywhere, or go in a circle. Then there is no path.

use std::ops::ControlFlow;

use offshoot_btrfs_format::inode::{InodeName, inode_extrefs, inode_refs};
use offshoot_btrfs_format::root::RootRef;
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId};

use super::finding::{BtrfsFinding, BtrfsFindingPlace};
use super::volume::{CheckedVolume, KeyRange};
use crate::tree::TreeRoot;

/// The longest path that is shown, in bytes. A step up takes two of them at least, so this also
/// ends a circle.
const LONGEST_PATH: usize = 4096;

/// The steps upwards for all findings together. The paths of the others are left out.
pub(super) const MOST_STEPS: usize = 1_000_000;

/// Gives each finding at an inode the path of the inode, from the top level of the volume.
pub(super) fn find(volume: &CheckedVolume<'_>, findings: &mut [BtrfsFinding]) {
    let mut steps = MOST_STEPS;
    let mut last: Option<(BtrfsFindingPlace, Option<Vec<u8>>)> = None;
    for finding in findings {
        let BtrfsFindingPlace::Inode { subvolume, ino } = finding.place else { continue };
        let path = match last.take_if(|(place, _)| *place == finding.place) {
            Some((_, path)) => path,
            None => path_of(volume, subvolume, ino, &mut steps),
        };
        finding.path.clone_from(&path);
        last = Some((finding.place, path));
    }
}

/// The path of one inode from the top level of the volume; `None` when no names lead up from it.
pub(crate) fn path_of_inode(
    volume: &CheckedVolume<'_>,
    subvolume: TreeId,
    ino: u64,
) -> Option<Vec<u8>> {
    let mut steps = LONGEST_PATH;
    path_of(volume, subvolume, ino, &mut steps)
}

/// The path of an inode from the top level of the volume; `None` if it has none, or the way up
/// takes more than `steps`.
pub(super) fn path_of(
    volume: &CheckedVolume<'_>,
    mut subvolume: TreeId,
    mut ino: u64,
    steps: &mut usize,
) -> Option<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut len = 0;
    let mut root = volume.tree(subvolume)?;
    while (subvolume, ino) != (TreeId::FS, Ino::ROOT_DIR.0) {
        *steps = steps.checked_sub(1)?;
        let name = if ino == Ino::ROOT_DIR.0 {
            let (above, directory, name) = subvolume_above(volume, subvolume)?;
            (subvolume, ino) = (above, directory);
            root = volume.tree(subvolume)?;
            name
        } else {
            let (directory, name) = name_of(volume, root, ino)?;
            ino = directory;
            name
        };
        len += name.len() + 1;
        if len > LONGEST_PATH {
            return None;
        }
        names.push(name);
    }
    names.reverse();
    Some([b"/".as_slice(), &names.join(&b'/')].concat())
}

/// The first name of an inode, and the directory that it is in.
fn name_of(volume: &CheckedVolume<'_>, root: TreeRoot, ino: u64) -> Option<(u64, Vec<u8>)> {
    let range = KeyRange {
        first: Key::new(ino, ItemType::INODE_REF, 0),
        last: Key::new(ino, ItemType::INODE_EXTREF, u64::MAX),
    };
    let mut found = None;
    volume.each_item(root, range, &mut |key, data| {
        let first = if key.item_type == ItemType::INODE_REF {
            inode_refs(key.offset, data).next()
        } else {
            inode_extrefs(data).next()
        };
        let owned = |name: InodeName<'_>| (name.parent, name.name.to_vec());
        found = first.and_then(Result::ok).map(owned);
        ControlFlow::Break(())
    });
    found
}

/// The subvolume that contains a subvolume, the directory in it, and the name there.
fn subvolume_above(volume: &CheckedVolume<'_>, id: TreeId) -> Option<(TreeId, u64, Vec<u8>)> {
    let range = KeyRange {
        first: Key::new(id.0, ItemType::ROOT_BACKREF, 0),
        last: Key::new(id.0, ItemType::ROOT_BACKREF, u64::MAX),
    };
    let mut found = None;
    volume.each_item(volume.root_tree(), range, &mut |key, data| {
        found = RootRef::parse(data)
            .ok()
            .map(|above| (TreeId(key.offset), above.dirid, above.name.to_vec()));
        ControlFlow::Break(())
    });
    found
}
