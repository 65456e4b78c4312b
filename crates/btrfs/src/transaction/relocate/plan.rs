//! Which extents move, and with them which blocks.

use std::collections::BTreeMap;
use std::ops::Range;

use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_vfs::Result;

use super::{
    MovingBlock, MovingData, PlannedRelocation, Relocation, RelocationLimits, TouchedBlock,
    in_another_tree,
};
use crate::transaction::RefOwner;
use crate::transaction::TransactionHandle;
use crate::transaction::extent_tree::{known_references, no_parent};
use crate::transaction::refs::ExtentKind;
use crate::tree::{Cursor, with_item};

/// The most extents that one commit moves.
const MOST_EXTENTS: usize = 4096;

/// An extent in the range, as its key has it.
#[derive(Clone, Copy)]
struct ListedExtent {
    at: Logical,
    len: u64,
    /// The key of a tree block says so, if the volume has such keys.
    is_metadata: bool,
}

impl ListedExtent {
    /// The bytes of data that it may have. The key of a tree block tells none in old volumes.
    fn data_bytes(&self) -> u64 {
        if self.is_metadata { 0 } else { self.len }
    }
}

impl<'h, 'v> Relocation<'h, 'v> {
    /// Plans to move the first extents in `range`. Nothing changes.
    ///
    /// # Errors
    /// When a tree cannot be read, or the trees contradict the extent tree;
    /// [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) for what cannot be moved.
    pub(crate) fn plan(
        handle: &'h TransactionHandle<'v>,
        range: &Range<u64>,
        limits: RelocationLimits,
    ) -> Result<PlannedRelocation<'h, 'v>> {
        let listed = list(handle, range, limits.data_bytes)?;
        let Some(first) = listed.first() else { return Ok(PlannedRelocation::Empty) };
        let needed = |blocks, data_bytes| {
            Ok(PlannedRelocation::NeedsRoom(RelocationLimits { blocks, data_bytes }))
        };
        if first.data_bytes() > limits.data_bytes {
            return needed(0, first.data_bytes());
        }
        let mut most = listed.len();
        loop {
            let mut plan = Self {
                handle,
                first: first.at,
                blocks: BTreeMap::new(),
                data: BTreeMap::new(),
                own: std::collections::BTreeSet::new(),
                roots: BTreeMap::new(),
                touched: Vec::new(),
                cost: 0,
            };
            let mut added = 0;
            for extent in listed.iter().take(most) {
                if added > 0 && plan.cost() >= limits.blocks / 2 {
                    break;
                }
                plan.add(extent)?;
                if plan.cost() > limits.blocks {
                    break;
                }
                added += 1;
            }
            if plan.cost() <= limits.blocks {
                return Ok(PlannedRelocation::Moves(plan));
            }
            if added == 0 {
                return needed(plan.cost(), 0);
            }
            // The last extent was too much.
            most = added;
        }
    }

    /// Adds an extent, and all blocks on all ways to it.
    fn add(&mut self, extent: &ListedExtent) -> Result<()> {
        let volume = self.handle.volume();
        let found = known_references(volume, extent.at, extent.len, extent.is_metadata)?;
        match found.kind() {
            ExtentKind::Data => {
                let mut is_written = false;
                for (owner, count) in found.owners() {
                    is_written |= match owner {
                        RefOwner::File { root, .. } if !root.is_subvolume() => {
                            return Err(in_another_tree(root));
                        }
                        RefOwner::File { root, ino, offset } => {
                            self.add_leaves(root, (ino, offset), extent.at, count)?
                        }
                        RefOwner::Leaf { parent } => self.add_leaf(parent, extent.at)?,
                        RefOwner::Tree { .. } | RefOwner::Block { .. } => {
                            return Err(no_parent(extent.at, owner));
                        }
                    };
                }
                let to = Logical(0);
                let moving = MovingData { len: extent.len, references: found, is_written, to };
                self.data.insert(extent.at.0, moving);
                self.cost += 1;
                Ok(())
            }
            ExtentKind::Block { level } => {
                let tree = found.owners().find_map(|(owner, _)| owner.root());
                match tree.filter(|tree| !tree.is_subvolume()) {
                    Some(tree) => self.add_touched(extent.at, level, found.generation(), tree),
                    None => self.add_block(extent.at, level),
                }
            }
        }
    }

    /// Adds a block of a tree that shares none.
    fn add_touched(
        &mut self,
        at: Logical,
        level: u8,
        generation: offshoot_btrfs_format::Generation,
        tree: TreeId,
    ) -> Result<()> {
        let volume = self.handle.volume();
        let block = self.read(at, level, generation, tree)?;
        // What no way leads to would be in the group for ever.
        self.parent_in(tree, at, level, generation)?;
        let key = (!block.is_empty()).then(|| block.key(0));
        if let Some(key) = key {
            // The item whose storing anew copies the block.
            let found = with_item(volume, volume.tree(tree)?, key, |_| Ok(()))?;
            found.ok_or_else(|| no_parent(at, RefOwner::Tree { root: tree }))?;
        }
        self.cost += u64::from(volume.tree(tree)?.level) + 2;
        self.touched.push(TouchedBlock { tree, key });
        Ok(())
    }

    /// Adds a block of subvolumes, and all blocks on all ways to it.
    pub(super) fn add_block(&mut self, at: Logical, level: u8) -> Result<()> {
        let mut next = vec![(at, level)];
        while let Some((at, level)) = next.pop() {
            if self.blocks.contains_key(&at.0) || self.own.contains(&at.0) {
                continue;
            }
            if self.handle.is_own(at) {
                // All blocks above it are of this transaction too.
                self.own.insert(at.0);
                continue;
            }
            let node_size = self.node_size();
            let references = known_references(self.handle.volume(), at, node_size, true)?;
            references.require_level(at, level)?;
            let generation = references.generation();
            for (owner, _) in references.owners() {
                let parent = match owner {
                    RefOwner::Block { parent } => Some(parent),
                    RefOwner::Tree { root } if root.is_subvolume() => {
                        self.parent_in(root, at, level, generation)?
                    }
                    _ => return Err(no_parent(at, owner)),
                };
                match parent {
                    Some(parent) => next.push((parent, level + 1)),
                    None => {
                        if let RefOwner::Tree { root } = owner {
                            self.roots.insert(root, at.0);
                        }
                    }
                }
            }
            self.cost += 1;
            self.blocks.insert(at.0, MovingBlock { level, generation, references, to: Logical(0) });
        }
        Ok(())
    }
}

/// The first extents in `range`, by address.
fn list(
    handle: &TransactionHandle<'_>,
    range: &Range<u64>,
    data_bytes: u64,
) -> Result<Vec<ListedExtent>> {
    let volume = handle.volume();
    let node_size = u64::from(volume.superblock().node_size);
    let (mut listed, mut bytes) = (Vec::new(), 0u64);
    let first = Key::new(range.start, ItemType(0), 0);
    let mut cursor = Cursor::seek(volume, volume.tree(TreeId::EXTENT)?, first)?;
    while let Some((key, _)) = cursor.item().filter(|(key, _)| key.objectid < range.end) {
        let at = Logical(key.objectid);
        match key.item_type {
            ItemType::METADATA_ITEM => {
                listed.push(ListedExtent { at, len: node_size, is_metadata: true });
            }
            ItemType::EXTENT_ITEM => {
                bytes = bytes.saturating_add(key.offset);
                if bytes > data_bytes && !listed.is_empty() {
                    break;
                }
                listed.push(ListedExtent { at, len: key.offset, is_metadata: false });
            }
            _ => {}
        }
        if listed.len() >= MOST_EXTENTS {
            break;
        }
        cursor.advance()?;
    }
    Ok(listed)
}
