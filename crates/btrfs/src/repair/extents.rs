//! The items of the extent tree, from the references that the trees have.
//!
//! An extent has one item, which counts its references and holds as many of them as fit. Each of
//! the others has an item of its own behind it. What the references do not tell comes from the old
//! extent tree where that has an item of the same extent: in which transaction data was made, and
//! for which subvolume (simple quotas). Without it, data counts as older than every snapshot, so a
//! writer takes it as shared and copies it.

use std::cmp::Reverse;

use offshoot_btrfs_format::extent::{
    EXTENT_FLAG_DATA, EXTENT_FLAG_FULL_BACKREF, EXTENT_FLAG_TREE_BLOCK, ExtentItem, RefOwner,
    TreeBlockInfo, most_extent_item,
};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use zerocopy::IntoBytes;

use crate::check::{ExtentWithOwners, ReferenceTarget};

/// What the references to an extent do not tell.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ExtentFacts {
    /// The transaction that made the data; 0 when that is not known.
    pub(super) generation: u64,
    /// The subvolume that simple quotas count the data for.
    pub(super) owner: Option<TreeId>,
    /// The first key of a tree block.
    pub(super) first_key: Key,
}

/// How extents are stored in a volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExtentForm {
    pub(super) node_size: u32,
    /// Whether tree blocks have METADATA_ITEMs.
    pub(super) is_skinny: bool,
}

/// The key and the fixed part of the item of a tree block.
pub(super) fn block_head(
    (logical, level): (Logical, u8),
    head: (u64, Generation, bool),
    first_key: Key,
    form: ExtentForm,
) -> (Key, Vec<u8>) {
    let (refs, generation, is_full) = head;
    let full = if is_full { EXTENT_FLAG_FULL_BACKREF } else { 0 };
    let item = ExtentItem {
        refs: refs.into(),
        generation: generation.0.into(),
        flags: (EXTENT_FLAG_TREE_BLOCK | full).into(),
    };
    let mut data = item.as_bytes().to_vec();
    if form.is_skinny {
        return (Key::new(logical.0, ItemType::METADATA_ITEM, level.into()), data);
    }
    data.extend_from_slice(TreeBlockInfo { key: first_key.into(), level }.as_bytes());
    (Key::new(logical.0, ItemType::EXTENT_ITEM, form.node_size.into()), data)
}

/// The items of an extent, in the order of their keys.
pub(super) fn items(
    extent: &ExtentWithOwners,
    facts: &ExtentFacts,
    form: ExtentForm,
) -> Vec<(Key, Vec<u8>)> {
    let refs = extent.owners.iter().map(|(_, count)| u64::from(*count)).sum();
    let logical = extent.logical;
    let (key, mut data) = match extent.target {
        ReferenceTarget::Block { level, generation } => {
            let head = (refs, generation, extent.has_full_references);
            block_head((logical, level), head, facts.first_key, form)
        }
        ReferenceTarget::Data { len } => {
            let item = ExtentItem {
                refs: refs.into(),
                generation: facts.generation.into(),
                flags: EXTENT_FLAG_DATA.into(),
            };
            (Key::new(logical.0, ItemType::EXTENT_ITEM, len), item.as_bytes().to_vec())
        }
    };
    if let (Some(owner), ReferenceTarget::Data { .. }) = (facts.owner, extent.target) {
        data.push(ItemType::EXTENT_OWNER_REF.0);
        data.extend_from_slice(&owner.0.to_le_bytes());
    }
    let mut owners = extent.owners.clone();
    // The format orders by type, and within a type in descending order.
    owners.sort_by_key(|(owner, _)| (owner.item_type(), Reverse(owner.sequence())));
    let most = most_extent_item(form.node_size);
    let mut keyed = Vec::new();
    for (owner, count) in owners {
        let before = data.len();
        data.push(owner.item_type().0);
        owner.encode(count, true, &mut data);
        if data.len() > most {
            data.truncate(before);
            keyed.push((owner, count));
        }
    }
    let mut items = vec![(key, data)];
    let key_of = |owner: RefOwner| Key::new(logical.0, owner.item_type(), owner.sequence());
    keyed.sort_by_key(|(owner, _)| key_of(*owner));
    for (owner, count) in keyed {
        let mut data = Vec::new();
        owner.encode(count, false, &mut data);
        let mut key = key_of(owner);
        // References of files with equal hashes have successive keys.
        if let Some((last, _)) = items.last().filter(|(last, _)| *last >= key) {
            key = last.successor().unwrap_or(key);
        }
        items.push((key, data));
    }
    items
}

#[cfg(test)]
mod tests {
    use offshoot_btrfs_format::extent::{InlineRef, ParsedExtent};

    use super::*;

    /// An extent with more references than fit keeps all of them, each once, in order.
    #[test]
    fn many_references_spill_into_items() {
        let file = |ino| RefOwner::File { root: TreeId(5), ino, offset: 0 };
        let leaf = |at: u64| RefOwner::Leaf { parent: Logical(at << 14) };
        let owners: Vec<_> =
            (0..100).map(|n| (file(256 + n), 2)).chain((1..60).map(|n| (leaf(n), 1))).collect();
        let extent = ExtentWithOwners {
            logical: Logical(1 << 30),
            target: ReferenceTarget::Data { len: 1 << 20 },
            owners: owners.clone(),
            has_full_references: false,
        };
        let form = ExtentForm { node_size: 16_384, is_skinny: true };
        let facts = ExtentFacts { owner: Some(TreeId(257)), ..ExtentFacts::default() };
        let items = items(&extent, &facts, form);
        assert!(items.is_sorted_by(|(one, _), (next, _)| one < next));
        let (first, data) = &items[0];
        assert_eq!(*first, Key::new(1 << 30, ItemType::EXTENT_ITEM, 1 << 20));
        assert!(data.len() <= (16_384 - 101) / 16 - 25);
        let parsed = ParsedExtent::parse(first.item_type, data).unwrap();
        assert_eq!(parsed.item.refs.get(), 259);
        let inline: Vec<_> = parsed.inline_refs().map(Result::unwrap).collect();
        assert!(matches!(inline[0], InlineRef::Owner(257)));
        assert_eq!(inline.len() - 1 + items.len() - 1, owners.len());
    }
}
