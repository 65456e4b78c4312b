//! The items of the UUID tree, from the UUIDs of root items.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::encode::uuid_key;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};

use super::{SubvolumeEdits, SubvolumeMender};
use crate::check::KeyRange;
use crate::repair::editor::TreeEdits;

/// Adds the edits that make the UUID tree say what the root items say. `is_bad` says whether the
/// tree is made anew as a whole.
pub(super) fn mend(mender: &SubvolumeMender<'_, '_>, is_bad: bool, edits: &mut SubvolumeEdits) {
    let Some(tree) = mender.items.root(TreeId::UUID) else { return };
    let mut all = TreeEdits::new();
    for (key, ids) in expected(mender) {
        all.insert(key, Some(ids.into_iter().flat_map(u64::to_le_bytes).collect()));
    }
    if is_bad {
        edits.uuids = Some(all);
        return;
    }
    // What differs is left of `all`, and what does not belong there is removed.
    let tree = mender.volume.actual_root(tree.root);
    mender.volume.each_item(tree, KeyRange::ALL, &mut |key, data| {
        if is_of_subvolume(key) {
            match all.get(&key).map(|wanted| wanted.as_deref().map(sorted)) {
                Some(wanted) if wanted == Some(sorted(data)) => drop(all.remove(&key)),
                Some(_) => {}
                None => drop(all.insert(key, None)),
            }
        }
        ControlFlow::Continue(())
    });
    if !all.is_empty() {
        edits.trees.insert(TreeId::UUID, all);
    }
}

/// The subvolumes of each UUID, ascending.
fn expected(mender: &SubvolumeMender<'_, '_>) -> BTreeMap<Key, Vec<u64>> {
    let mut expected = BTreeMap::<Key, Vec<u64>>::new();
    for root in mender.items.subvolumes().filter(|root| root.refs > 0) {
        for (uuid, item_type) in [
            (root.uuid, ItemType::UUID_KEY_SUBVOL),
            (root.received_uuid, ItemType::UUID_KEY_RECEIVED_SUBVOL),
        ] {
            if let Some(uuid) = RootItem::uuid(uuid) {
                expected.entry(uuid_key(uuid, item_type)).or_default().push(root.root.id.0);
            }
        }
    }
    expected
}

fn is_of_subvolume(key: Key) -> bool {
    [ItemType::UUID_KEY_SUBVOL, ItemType::UUID_KEY_RECEIVED_SUBVOL].contains(&key.item_type)
}

/// The numbers in an item. Their order says nothing.
fn sorted(data: &[u8]) -> Vec<u64> {
    let (ids, _) = data.as_chunks();
    let mut ids: Vec<_> = ids.iter().map(|id| u64::from_le_bytes(*id)).collect();
    ids.sort_unstable();
    ids
}
