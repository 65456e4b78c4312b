//! New roots for trees that a repair changes before the derived trees are made anew.
//!
//! Such a change is a step of its own: new blocks of the tree, new blocks of the root tree, and
//! superblocks that lead to these, all on staged devices. The next step opens the result.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::Result;
use zerocopy::IntoBytes;

use super::editor::{TreeEditor, TreeEdits};
use super::subvolumes::SubvolumeEdits;
use super::survey::SpaceSurvey;
use super::{RepairBase, cut, superblocks};
use crate::check::{CheckedVolume, KeyRange};
use crate::tree::TreeRoot;

/// A step of a repair that gives trees new roots.
pub(super) struct RootStep<'s, 'c> {
    volume: &'s CheckedVolume<'c>,
    base: &'s RepairBase,
    pub(super) editor: TreeEditor<'s, 'c>,
    /// The changes of the root tree.
    roots: TreeEdits,
}

impl<'s, 'c> RootStep<'s, 'c> {
    /// A step from the state of `volume`, whose free places `survey` has.
    pub(super) fn new(
        volume: &'s CheckedVolume<'c>,
        survey: &'s SpaceSurvey,
        base: &'s RepairBase,
    ) -> Self {
        let of_blocks = (base.generation, base.chunk_tree_uuid);
        let editor = TreeEditor::new(volume, of_blocks, &survey.metadata);
        Self { volume, base, editor, roots: TreeEdits::new() }
    }

    /// Gives the tree `id` a new root. `change` may change other fields of its root item.
    pub(super) fn set_root(
        &mut self,
        id: TreeId,
        new: TreeRoot,
        change: impl FnOnce(&mut RootItem),
    ) {
        self.change_root(id, |item| {
            change(item);
            lead_to(item, new);
        });
    }

    /// Removes the tree `id`.
    pub(super) fn remove(&mut self, id: TreeId) {
        if let Some((key, _, _)) = root_item(self.volume, id) {
            self.roots.insert(key, None);
        }
    }

    /// Changes other fields of the root item of a tree.
    fn change_root(&mut self, id: TreeId, change: impl FnOnce(&mut RootItem)) {
        let Some((key, _, stored)) = root_item(self.volume, id) else { return };
        let edited = self.roots.get(&key).and_then(|data| RootItem::parse(data.as_ref()?).ok());
        let mut item = edited.unwrap_or(stored);
        change(&mut item);
        self.roots.insert(key, Some(item.as_bytes().to_vec()));
    }

    /// Makes a subvolume that has lost something forget that it was sent or received.
    pub(super) fn forget_origin(&mut self, id: TreeId) {
        let generation = self.base.generation;
        self.change_root(id, |item| cut::forget_origin(item, generation));
    }

    /// Applies edits to trees. Those of the root tree do not remove root items.
    ///
    /// # Errors
    /// When a block cannot be read or written, or there is no room.
    pub(super) fn apply(&mut self, mut edits: BTreeMap<TreeId, TreeEdits>) -> Result<()> {
        self.roots.extend(edits.remove(&TreeId::ROOT).unwrap_or_default());
        for (id, edits) in edits {
            let Some((_, root, _)) = root_item(self.volume, id) else { continue };
            let new = self.editor.apply(root, edits)?;
            self.set_root(id, new, |_| {});
        }
        Ok(())
    }

    /// Applies the edits for subvolumes.
    ///
    /// # Errors
    /// When a block cannot be read or written, or there is no room.
    pub(super) fn apply_to_subvolumes(&mut self, edits: SubvolumeEdits) -> Result<()> {
        self.apply(edits.trees)?;
        for id in edits.emptied {
            let Some((_, _, item)) = root_item(self.volume, id) else { continue };
            let new = self.editor.plant(id, &cut::empty_subvolume(&item, self.base.generation))?;
            self.set_root(id, new, cut::become_empty);
        }
        if let Some(uuids) = edits.uuids {
            let items: Vec<_> =
                uuids.into_iter().filter_map(|(key, data)| Some((key, data?))).collect();
            let new = self.editor.plant(TreeId::UUID, &items)?;
            self.set_root(TreeId::UUID, new, |_| {});
        }
        Ok(())
    }

    /// Stages superblocks that lead to the new roots.
    ///
    /// # Errors
    /// When a block cannot be read or written, or there is no room.
    pub(super) fn finish(mut self) -> Result<()> {
        let new = self.editor.apply(self.volume.root_tree(), self.roots)?;
        let mut item = self.base.old.clone();
        item.root = new.logical.0.into();
        item.root_level = new.level;
        item.generation = self.base.generation.0.into();
        for member in self.volume.storage.members() {
            let mut item = item.clone();
            item.dev_item = member.item;
            superblocks::stage(self.volume, member, &item, None)?;
        }
        Ok(())
    }
}

/// Makes a root item lead to `root`.
pub(super) fn lead_to(item: &mut RootItem, root: TreeRoot) {
    item.bytenr = root.logical.0.into();
    item.level = root.level;
    item.generation = root.generation.0.into();
    item.generation_v2 = root.generation.0.into();
}

/// The key of the root item of a tree, the root, and the whole item, whose newer fields are zero
/// where a very old kernel wrote it.
pub(super) fn root_item(
    volume: &CheckedVolume<'_>,
    id: TreeId,
) -> Option<(Key, TreeRoot, RootItem)> {
    let range = KeyRange {
        first: Key::new(id.0, ItemType::ROOT_ITEM, 0),
        last: Key::new(id.0, ItemType::ROOT_ITEM, u64::MAX),
    };
    let mut found = None;
    volume.each_item(volume.root_tree(), range, &mut |key, data| {
        found = RootItem::parse(data).ok().map(|item| (key, item));
        ControlFlow::Break(())
    });
    let (key, item) = found?;
    Some((key, volume.tree(id)?, item))
}
