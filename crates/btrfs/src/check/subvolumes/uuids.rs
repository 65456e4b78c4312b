//! The UUID tree against the UUIDs in root items, both ways.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::encode::uuid_key;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};

use super::roots::RootTreeItems;
use crate::check::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use crate::check::volume::{CheckedVolume, KeyRange};

/// Compares them, if the volume has the tree and the kernel would use it.
pub(super) fn check(volume: &CheckedVolume<'_>, items: &RootTreeItems) {
    let superblock = &volume.superblock().item;
    let is_current = superblock.uuid_tree_generation == superblock.generation;
    let Some(tree) = items.root(TreeId::UUID).filter(|_| is_current) else { return };
    let mut expected = BTreeMap::<Key, Vec<u64>>::new();
    for root in items.subvolumes().filter(|root| root.refs > 0) {
        for (uuid, item_type) in [
            (root.uuid, ItemType::UUID_KEY_SUBVOL),
            (root.received_uuid, ItemType::UUID_KEY_RECEIVED_SUBVOL),
        ] {
            if let Some(uuid) = RootItem::uuid(uuid) {
                expected.entry(uuid_key(uuid, item_type)).or_default().push(root.root.id.0);
            }
        }
    }
    let code = BtrfsFindingCode::UuidTree;
    let place = |key| BtrfsFindingPlace::Item { tree: TreeId::UUID, key };
    let walked =
        volume.each_item(volume.actual_root(tree.root), KeyRange::ALL, &mut |key, data| {
            let types = [ItemType::UUID_KEY_SUBVOL, ItemType::UUID_KEY_RECEIVED_SUBVOL];
            if types.contains(&key.item_type) {
                let (ids, _) = data.as_chunks();
                let mut found: Vec<_> = ids.iter().map(|id| u64::from_le_bytes(*id)).collect();
                found.sort_unstable();
                let subvolumes = expected.remove(&key).unwrap_or_default();
                if subvolumes != found {
                    let what = "the subvolumes with this UUID";
                    volume.findings.differs(
                        code,
                        place(key),
                        what,
                        list(&subvolumes),
                        list(&found),
                    );
                }
            }
            ControlFlow::Continue(())
        });
    if walked.is_whole() {
        for (key, ids) in expected {
            let problem = format!("the item is missing, of {}", list(&ids));
            volume.findings.add(code, place(key), problem);
        }
    }
}

/// The numbers in words.
fn list(ids: &[u64]) -> String {
    match ids {
        [] => "none".to_owned(),
        ids => ids.iter().map(u64::to_string).collect::<Vec<_>>().join(", "),
    }
}
