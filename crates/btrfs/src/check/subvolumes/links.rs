//! Links between subvolumes: both references, the entries that they describe, and which subvolumes
//! they lead to.

use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, name_hash};
use offshoot_btrfs_format::{ItemType, Key, TreeId};

use super::roots::{LinkPlace, RootTreeItems, SubvolumeLink};
use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::volume::{CheckedVolume, KeyRange};
use crate::tree::TreeRoot;

/// Checks all links, and the default subvolume.
pub(super) fn check(volume: &CheckedVolume<'_>, items: &RootTreeItems) {
    for (&(above, below), link) in &items.links {
        if volume.is_over() {
            return;
        }
        check_link(volume, items, above, below, link);
    }
    check_reachable(volume, items);
    check_default(volume, items);
}

fn check_link(
    volume: &CheckedVolume<'_>,
    items: &RootTreeItems,
    above: TreeId,
    below: TreeId,
    link: &SubvolumeLink,
) {
    let code = BtrfsFindingCode::RootReference;
    let reference = Key::new(above.0, ItemType::ROOT_REF, below.0);
    let back_reference = Key::new(below.0, ItemType::ROOT_BACKREF, above.0);
    let (own_key, other_key) = match link.reference {
        Some(_) => (reference, back_reference),
        None => (back_reference, reference),
    };
    let item = |key| BtrfsFindingPlace::Item { tree: TreeId::ROOT, key };
    let place = match (&link.reference, &link.back_reference) {
        (Some(place), Some(other)) if place == other => place,
        (Some(place), Some(other)) => {
            let what = "place of the subvolume";
            let (expected, found) = (shown(place), shown(other));
            volume.findings.differs(code, item(back_reference), what, expected, found);
            return;
        }
        (Some(place), None) | (None, Some(place)) => {
            volume.findings.add(code, item(own_key), format!("there is no {other_key}"));
            place
        }
        (None, None) => return,
    };
    for (id, which) in [(above, "above"), (below, "below")] {
        if items.root(id).is_none() {
            let problem = format!("the subvolume {which}, {id}, is not there");
            volume.findings.add(code, item(own_key), problem);
            return;
        }
    }
    if let Some(root) = items.root(above) {
        check_entries(volume, volume.actual_root(root.root), below, place);
    }
}

fn shown(place: &LinkPlace) -> String {
    let LinkPlace { dir, index, name } = place;
    format!("\"{}\" in inode {dir} with index {index}", name.escape_ascii())
}

/// Checks both entries of the subvolume `below` in the subvolume with this root.
fn check_entries(volume: &CheckedVolume<'_>, above: TreeRoot, below: TreeId, place: &LinkPlace) {
    let keys = [
        Key::new(place.dir, ItemType::DIR_ITEM, name_hash(&place.name)),
        Key::new(place.dir, ItemType::DIR_INDEX, place.index),
    ];
    for key in keys {
        let mut found = None;
        let range = KeyRange { first: key, last: key };
        let walked = volume.each_item(above, range, &mut |_, data| {
            found = dir_entries(data)
                .flatten()
                .find(|entry| *entry.name == *place.name)
                .map(|DirItemEntry { location, .. }| location);
            ControlFlow::Break(())
        });
        let problem = match found {
            Some(location) if leads_to(location, below) => continue,
            Some(location) => format!("leads to {location}, not to subvolume {below}"),
            None if !walked.is_whole() => continue,
            None => format!("has no entry of subvolume {below}, {}", shown(place)),
        };
        let place = BtrfsFindingPlace::Item { tree: above.id, key };
        volume.findings.add(BtrfsFindingCode::SubvolumeEntry, place, problem);
    }
}

/// Whether an entry with this location leads to the subvolume. The offset says nothing.
fn leads_to(location: Key, id: TreeId) -> bool {
    location.item_type == ItemType::ROOT_ITEM && location.objectid == id.0
}

/// Checks that links lead from the top level to each subvolume that was not deleted. Of subvolumes
/// that only each other lead to, one is reported.
fn check_reachable(volume: &CheckedVolume<'_>, items: &RootTreeItems) {
    for root in items.unreachable().into_iter().filter_map(|id| items.root(id)) {
        let place = BtrfsFindingPlace::Item { tree: TreeId::ROOT, key: root.key() };
        let problem = "no links lead from the top level to this subvolume";
        volume.findings.add(BtrfsFindingCode::UnreachableSubvolume, place, problem);
    }
}

/// Checks that the default subvolume is there. A volume that does not name one has the top level.
fn check_default(volume: &CheckedVolume<'_>, items: &RootTreeItems) {
    let Some((key, location)) = items.default else { return };
    if !items.is_live(TreeId(location.objectid)) || location.item_type != ItemType::ROOT_ITEM {
        let place = BtrfsFindingPlace::Item { tree: TreeId::ROOT, key };
        let problem = format!("the default subvolume, {location}, is not there");
        volume.findings.add(BtrfsFindingCode::SubvolumeEntry, place, problem);
    }
}
