//! An operation on its way: what it changes, before anything is changed.
//!
//! An operation reads and changes items here, in memory. Whatever can be wrong with the call is
//! found out meanwhile, and then nothing has happened. At last everything is applied to the tree at once, in
//! an order in which a reader without locks finds no name that leads nowhere: new inodes come
//! before their entries, and what is removed goes last.
//!
//! Items of inodes whose locks the operation holds do not change under it.

use std::collections::BTreeMap;

use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::inode::{InodeItem, Timespec, inode_flags};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result, Timestamp};
use zerocopy::IntoBytes;

use super::{evict, no_such_file, type_of};
use crate::subvolume::malformed;
use crate::transaction::Handle;
use crate::tree::{Edit, TreeWriter, with_item};
use crate::volume::Engine;

/// What becomes of one item.
struct Change {
    old: Option<Vec<u8>>,
    new: Option<Vec<u8>>,
}

/// What an operation changes in one subvolume.
pub(super) struct Changes<'h, 'v> {
    handle: &'h Handle<'v>,
    tree: TreeId,
    items: BTreeMap<Key, Change>,
    /// Inodes that go with all their items.
    removed: Vec<u64>,
}

impl<'h, 'v> Changes<'h, 'v> {
    /// No changes yet, to the subvolume of `file`.
    pub(super) fn new(handle: &'h Handle<'v>, file: FileId) -> Self {
        Self { handle, tree: TreeId(file.dev), items: BTreeMap::new(), removed: Vec::new() }
    }

    pub(super) fn volume(&self) -> &'v Engine {
        self.handle.volume()
    }

    pub(super) fn generation(&self) -> Generation {
        self.handle.generation()
    }

    /// Whether an item can have this many bytes of data and still be one among others.
    pub(super) fn fits(&self, size: usize) -> bool {
        size + ITEM_SIZE <= leaf_capacity(self.volume().superblock().node_size)
    }

    fn item(&mut self, key: Key) -> Result<&mut Change> {
        match self.items.entry(key) {
            std::collections::btree_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::btree_map::Entry::Vacant(entry) => {
                let volume = self.handle.volume();
                let old =
                    with_item(volume, volume.tree(self.tree)?, key, |data| Ok(data.to_vec()))?;
                Ok(entry.insert(Change { new: old.clone(), old }))
            }
        }
    }

    /// The item with this key, as the operation has made it so far.
    pub(super) fn get(&mut self, key: Key) -> Result<Option<&[u8]>> {
        Ok(self.item(key)?.new.as_deref())
    }

    /// The item becomes this.
    pub(super) fn put(&mut self, key: Key, data: Vec<u8>) -> Result<()> {
        self.item(key)?.new = Some(data);
        Ok(())
    }

    /// An item that cannot exist comes to be: its key holds a number that was never used.
    pub(super) fn put_new(&mut self, key: Key, data: Vec<u8>) {
        self.items.insert(key, Change { old: None, new: Some(data) });
    }

    /// The item goes; whether there was one.
    pub(super) fn remove(&mut self, key: Key) -> Result<bool> {
        Ok(self.item(key)?.new.take().is_some())
    }

    /// The item becomes this, or goes when nothing is left of it.
    pub(super) fn put_or_remove(&mut self, key: Key, data: Vec<u8>) -> Result<()> {
        self.item(key)?.new = Some(data).filter(|data| !data.is_empty());
        Ok(())
    }

    /// The inode goes with all its items, of which there are few.
    pub(super) fn remove_inode(&mut self, ino: u64) {
        self.removed.push(ino);
    }

    /// The inode item of `file`.
    pub(super) fn inode(&mut self, file: FileId) -> Result<InodeItem> {
        let key = Key::new(file.ino, ItemType::INODE_ITEM, 0);
        let data = self.get(key)?.ok_or_else(|| no_such_file(file))?;
        InodeItem::view(data).copied().map_err(malformed)
    }

    /// The inode item of the directory `dir`, to which entries can be added.
    ///
    /// # Errors
    /// `ENOTDIR`, `ENOENT` when it was removed, `EPERM` when it is immutable.
    pub(super) fn directory(&mut self, dir: FileId) -> Result<InodeItem> {
        let item = self.inode(dir)?;
        if type_of(&item)? != FileType::Directory {
            return Err(Error::posix(Errno::NOTDIR, dir.to_string()));
        }
        if item.nlink.get() == 0 {
            return Err(no_such_file(dir));
        }
        refuse_flags(&item, inode_flags::IMMUTABLE, dir)?;
        Ok(item)
    }

    /// Changes the inode item of `file`, whose change time becomes `at`.
    pub(super) fn change_inode(
        &mut self,
        file: FileId,
        at: Timestamp,
        change: impl FnOnce(&mut InodeItem),
    ) -> Result<()> {
        let mut item = self.inode(file)?;
        item.ctime = timespec(at)?;
        item.transid = self.generation().0.into();
        item.sequence = item.sequence.get().wrapping_add(1).into();
        change(&mut item);
        let key = Key::new(file.ino, ItemType::INODE_ITEM, 0);
        self.put(key, item.as_bytes().to_vec())
    }

    /// Applies everything to the tree.
    pub(super) fn apply(self) -> Result<()> {
        let Self { handle, tree, items, removed } = self;
        let is_entry =
            |key: &Key| matches!(key.item_type, ItemType::DIR_ITEM | ItemType::DIR_INDEX);
        handle.change(tree, |tree| {
            for entries in [false, true] {
                let those = || items.iter().filter(|(key, _)| is_entry(key) == entries);
                let new: Vec<(Key, &[u8])> = those()
                    .filter(|(_, change)| change.old.is_none())
                    .filter_map(|(key, change)| Some((*key, change.new.as_deref()?)))
                    .collect();
                tree.insert_batch(&new)?;
                those().try_for_each(|(key, change)| change.modify(&tree, *key))?;
            }
            for (key, change) in &items {
                if change.old.is_some() && change.new.is_none() {
                    tree.remove(*key)?;
                }
            }
            Ok(())
        })?;
        removed.into_iter().try_for_each(|ino| evict::remove_all_items(handle, tree, ino))
    }
}

impl Change {
    /// Puts what an existing item becomes in its place.
    fn modify(&self, tree: &TreeWriter<'_>, key: Key) -> Result<()> {
        match (&self.old, &self.new) {
            (Some(old), Some(new)) if old != new => {
                let growth = new.len().saturating_sub(old.len());
                tree.modify(key, growth, |_| Ok(Edit::Put(new.clone())))
            }
            _ => Ok(()),
        }
    }
}

/// A time as it is stored.
pub(super) fn timespec(at: Timestamp) -> Result<Timespec> {
    if at.nanos >= 1_000_000_000 {
        return Err(Error::posix(Errno::INVAL, format!("{} nanoseconds", at.nanos)));
    }
    Ok(Timespec { sec: at.secs.cast_unsigned().into(), nsec: at.nanos.into() })
}

/// `EPERM` when the inode has one of `flags`.
pub(super) fn refuse_flags(item: &InodeItem, flags: u64, file: FileId) -> Result<()> {
    let set = item.flags.get() & flags;
    if set == 0 {
        return Ok(());
    }
    let names = inode_flags::names(set).join(", ");
    Err(Error::posix(Errno::PERM, format!("{file}, which has the flag {names}")))
}
