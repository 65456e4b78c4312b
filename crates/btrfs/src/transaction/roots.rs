//! Finding the roots of trees.

use std::collections::HashMap;

use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result, Structure};
use parking_lot::RwLock;

use super::Base;
use crate::storage::malformed;
use crate::tree::{Blocks, Cursor, TreeRoot, with_item};

/// Subvolume roots that were looked up, so that following a path does not search the root tree at
/// every step. It is used in volumes that are only read, so the roots stay true.
#[derive(Default)]
pub(crate) struct RootCache {
    roots: RwLock<HashMap<TreeId, TreeRoot>>,
}

/// When this many roots are remembered, the cache starts afresh (about 1 MiB).
const MAX_CACHED_ROOTS: usize = 16_384;

/// The key of the last root item of the tree `id`. Its offset is 0, or the generation in
/// which a snapshot was made.
pub(crate) fn root_item_key(volume: &Base, id: TreeId) -> Result<Key> {
    let last = Key::new(id.0, ItemType::ROOT_ITEM, u64::MAX);
    let cursor = Cursor::seek_floor(volume, volume.root_tree(), last)?;
    let found = cursor.item_of(id.0, ItemType::ROOT_ITEM).map(|(key, _)| key);
    found.ok_or_else(|| no_such_tree(id))
}

/// Refuses to change a tree that has several root items, which the format rules out. A change would
/// update only one of them. The other one would then lead to blocks that are used for something
/// else.
pub(crate) fn require_one_root_item(volume: &Base, id: TreeId) -> Result<()> {
    if matches!(id, TreeId::ROOT | TreeId::CHUNK) {
        return Ok(());
    }
    let key = root_item_key(volume, id)?;
    let Some(below) = key.offset.checked_sub(1) else { return Ok(()) };
    let below = Key { offset: below, ..key };
    let cursor = Cursor::seek_floor(volume, volume.root_tree(), below)?;
    match cursor.item_of(id.0, ItemType::ROOT_ITEM) {
        None => Ok(()),
        Some((other, _)) => {
            let problem = format!("tree {id} has two, {other} and {key}, and is only read");
            Err(Error::corrupt(Structure::RootItem, problem))
        }
    }
}

/// Refuses to change a subvolume whose root is a block of another subvolume: when one of them frees
/// a block, the other loses it. A snapshot has a root of its own. A root that cannot be read
/// passes: the caller that reads it next reports the error.
///
/// # Errors
/// [`Error::Corrupt`] for such a subvolume.
pub(crate) fn require_own_root(volume: &Base, root: &TreeRoot) -> Result<()> {
    if !root.id.is_subvolume() {
        return Ok(());
    }
    let Ok(block) = volume.block(&root.expected()) else { return Ok(()) };
    let owner = block.header().owner();
    if owner == root.id {
        return Ok(());
    }
    let problem = format!("the root of tree {} is a block of tree {owner}", root.id);
    Err(Error::corrupt_at(Structure::RootItem, root.logical.0, problem))
}

fn no_such_tree(id: TreeId) -> Error {
    Error::posix(Errno::NOENT, format!("tree {id}"))
}

/// The root item of the tree `id`.
pub(crate) fn root_item(volume: &Base, id: TreeId) -> Result<Option<RootItem>> {
    let last = Key::new(id.0, ItemType::ROOT_ITEM, u64::MAX);
    let cursor = Cursor::seek_floor(volume, volume.root_tree(), last)?;
    cursor
        .item_of(id.0, ItemType::ROOT_ITEM)
        .map(|(_, data)| RootItem::parse(data).map_err(malformed))
        .transpose()
}

/// The largest believed size of a tree, in bytes. No volume is so large, and sums of the sizes in
/// damaged root items do not wrap.
const MOST_USED_BYTES: u64 = 1 << 56;

/// The root of a tree as its root item, or the superblock, describes it.
pub(crate) struct StoredRoot {
    pub(crate) root: TreeRoot,
    /// The transaction that took the last snapshot of it; 0 for none.
    pub(crate) last_snapshot: Generation,
    /// The bytes of its blocks. Nothing counts them for the two trees that the superblock names.
    pub(crate) used_bytes: u64,
    pub(crate) is_read_only: bool,
}

/// The root of the tree `id` as its root item, or the superblock, describes it.
pub(crate) fn stored_root(volume: &Base, id: TreeId) -> Result<StoredRoot> {
    let named = match id {
        TreeId::ROOT => Some(volume.root_tree()),
        TreeId::CHUNK => Some(chunk_tree_root(volume)),
        _ => None,
    };
    if let Some(root) = named {
        let last_snapshot = Generation(0);
        return Ok(StoredRoot { root, last_snapshot, used_bytes: 0, is_read_only: false });
    }
    let item = root_item(volume, id)?
        .filter(|item| !id.is_subvolume() || !item.is_dead())
        .ok_or_else(|| no_such_tree(id))?;
    Ok(StoredRoot {
        root: root_of(id, &item),
        last_snapshot: Generation(item.last_snapshot.get()),
        used_bytes: item.bytes_used.get().min(MOST_USED_BYTES),
        is_read_only: item.is_read_only(),
    })
}

/// The root that the root item of the tree `id` names.
pub(crate) fn root_of(id: TreeId, item: &RootItem) -> TreeRoot {
    let (logical, level, generation) = (item.logical(), item.level, item.generation());
    TreeRoot { id, logical, level, generation }
}

/// The root of the tree `id`.
pub(crate) fn tree_root(volume: &Base, id: TreeId) -> Result<TreeRoot> {
    if let Some(live) = volume.live_part() {
        let tree = live.tree(volume, id)?;
        tree.require_alive()?;
        let root = *tree.root.read();
        return Ok(root);
    }
    if let Some(root) = volume.subvolume_roots.roots.read().get(&id) {
        return Ok(*root);
    }
    let root = stored_root(volume, id)?.root;
    let mut roots = volume.subvolume_roots.roots.write();
    if roots.len() >= MAX_CACHED_ROOTS {
        roots.clear();
    }
    roots.insert(id, root);
    Ok(root)
}

/// The root of the chunk tree, which the superblock names.
pub(crate) fn chunk_tree_root(volume: &Base) -> TreeRoot {
    let superblock = volume.superblock();
    TreeRoot {
        id: TreeId::CHUNK,
        logical: superblock.chunk_root(),
        level: superblock.item.chunk_root_level,
        generation: Generation(superblock.item.chunk_root_generation.get()),
    }
}

/// Whether the entry `name` of the directory `dir` leads to the subvolume `child`.
pub(crate) fn stands_at(volume: &Base, child: TreeId, dir: FileId, name: &[u8]) -> Result<bool> {
    let key = Key::new(dir.dev, ItemType::ROOT_REF, child.0);
    let found = with_item(volume, volume.root_tree(), key, |data| {
        let reference = RootRef::parse(data).map_err(malformed)?;
        Ok(reference.dirid == dir.ino && reference.name == name)
    })?;
    Ok(found.unwrap_or(false))
}
