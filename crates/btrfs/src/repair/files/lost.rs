//! `lost+found`: names for what has links and no name.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::file_type;
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId};
use zerocopy::{FromZeros, IntoBytes};

use super::{FileMender, OwnedEntry, owned};
use crate::check::KeyRange;

/// The directory for what has no name.
const LOST_AND_FOUND: &[u8] = b"lost+found";

impl FileMender<'_, '_> {
    /// Gives an inode that has links and no name one in `lost+found`.
    pub(super) fn give_name(&mut self, ino: u64, touched: &mut BTreeSet<u64>) {
        let has_links = self.inode(ino).is_some_and(|item| item.nlink.get() > 0);
        let (Some(file_type), true) = (self.type_of(ino), has_links) else { return };
        if ino == Ino::ROOT_DIR.0 || !self.names(ino).is_empty() {
            return;
        }
        let Some(dir) = self.lost_and_found(touched) else { return };
        let entry = OwnedEntry {
            location: Key::new(ino, ItemType::INODE_ITEM, 0),
            transid: self.generation.0,
            file_type: file_type::of(file_type),
            name: ino.to_string().into_bytes(),
        };
        let index = self.next_index(dir);
        if self.enter(dir, index, &entry) {
            self.add_name(ino, dir, index, &entry.name);
        }
    }

    /// The inode of `lost+found`, which is made if it is not there. `None` when a file has its
    /// name.
    pub(in crate::repair) fn lost_and_found(&mut self, touched: &mut BTreeSet<u64>) -> Option<u64> {
        let root = Ino::ROOT_DIR.0;
        let by_hash = self.item(Self::hash_key(root, LOST_AND_FOUND));
        let known = by_hash.map(|data| owned(&data)).unwrap_or_default();
        if let Some(entry) = known.iter().find(|one| one.name == LOST_AND_FOUND) {
            let is_directory = entry.file_type == file_type::DIR;
            let dir = entry.location.objectid;
            touched.insert(dir);
            return Some(dir).filter(|_| is_directory);
        }
        let ino = self.unused_ino()?;
        let above = self.inode(root)?;
        let item = InodeItem {
            generation: self.generation.0.into(),
            transid: self.generation.0.into(),
            nlink: 1.into(),
            mode: 0o040_700.into(),
            atime: above.ctime,
            ctime: above.ctime,
            mtime: above.ctime,
            otime: above.ctime,
            ..InodeItem::new_zeroed()
        };
        self.set(Key::new(ino, ItemType::INODE_ITEM, 0), item.as_bytes().to_vec());
        let entry = OwnedEntry {
            location: Key::new(ino, ItemType::INODE_ITEM, 0),
            transid: self.generation.0,
            file_type: file_type::DIR,
            name: LOST_AND_FOUND.to_vec(),
        };
        let index = self.next_index(root);
        self.add_name(ino, root, index, LOST_AND_FOUND);
        self.enter(root, index, &entry);
        touched.extend([ino, root]);
        Some(ino)
    }

    /// A number above those of all inodes.
    fn unused_ino(&self) -> Option<u64> {
        let mut last = Ino::ROOT_DIR.0;
        let range = KeyRange::of_objects(Ino::ROOT_DIR.0, TreeId::LAST_FREE.0);
        self.volume.each_item(self.root, range, &mut |key, _| {
            last = key.objectid;
            ControlFlow::Continue(())
        });
        let edited = self.edits.range(..range.last).next_back().map_or(0, |(key, _)| key.objectid);
        last.max(edited).checked_add(1).filter(|&ino| ino < TreeId::LAST_FREE.0)
    }
}
