//! What a subvolume has lost of its names.
//!
//! 1. All of the tree is read once, so that all lost subtrees are known. Without any there is
//!    nothing to find.
//! 2. Each name that an inode has itself is looked up in its directory, if the entry may be lost;
//!    each entry by hash is looked for among those by index. What is not there is a *found name*.
//! 3. An inode whose own names may be lost is an orphan, unless an entry leads to it. So is a
//!    directory without any item that inodes name as theirs.
//!
//! The names that are kept are bounded by [`MOST_BYTES`].

use std::collections::{BTreeMap, BTreeSet};

use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::inode::{inode_extrefs, inode_refs};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{FileId, Parent, Result};

use crate::inode::{ROOT_DIR, Rooms, lookup_once};
use crate::storage::malformed;
use crate::tree::{Blocks, Cursor, TreeRoot, with_item};

/// The most memory that found names and numbers of one subvolume take, in bytes.
const MOST_BYTES: usize = 64 << 20;

/// The memory that a found name or number takes beside its bytes, about.
const ENTRY_BYTES: usize = 96;

/// A name that a directory has lost.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FoundName {
    pub(super) name: Vec<u8>,
    pub(super) file: FileId,
}

/// What a subvolume has lost of its names.
#[derive(Default)]
pub(super) struct NameSurvey {
    /// The found names, by the directory.
    names: BTreeMap<u64, Vec<FoundName>>,
    /// The inodes that nothing leads to.
    pub(super) orphans: BTreeSet<u64>,
    /// Where the directories are that have lost their own name.
    pub(super) parents: BTreeMap<u64, Parent>,
    /// The inodes whose inode items are lost.
    pub(super) inferred: BTreeSet<u64>,
    /// Whether there was more than is kept.
    pub(super) is_cut: bool,
    bytes: usize,
}

impl NameSurvey {
    /// Surveys the subvolume `id`.
    pub(super) fn of(volume: &Rooms, id: TreeId) -> Result<Self> {
        let mut survey = Self::default();
        let Ok(root) = volume.tree(id) else { return Ok(survey) };
        let mut cursor = Cursor::seek(volume, root, Key::MIN)?;
        while cursor.item().is_some() {
            cursor.advance()?;
        }
        if volume.lost_items().iter().all(|items| items.tree != id) {
            return Ok(survey);
        }
        let mut search =
            LostNameSearch { volume, root, orphans: BTreeSet::new(), survey: &mut survey };
        search.find_names()?;
        search.find_phantoms()?;
        search.find_entries()?;
        let orphans = search.orphans;
        survey.orphans = orphans;
        for names in survey.names.values_mut() {
            names.sort();
            names.dedup_by(|one, next| one.name == next.name);
        }
        Ok(survey)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.names.is_empty()
            && self.orphans.is_empty()
            && self.parents.is_empty()
            && self.inferred.is_empty()
    }

    /// The names that the directory `ino` has lost; `None` when no file names it.
    pub(super) fn names_in(&self, ino: u64) -> Option<&[FoundName]> {
        self.names.get(&ino).map(Vec::as_slice)
    }

    /// Adds a name that the directory `ino` has lost.
    pub(super) fn add_name(&mut self, ino: u64, name: &[u8], file: FileId) {
        if self.has_room(name.len()) {
            self.names.entry(ino).or_default().push(FoundName { name: name.to_vec(), file });
        }
    }

    fn has_room(&mut self, bytes: usize) -> bool {
        self.bytes = self.bytes.saturating_add(bytes + ENTRY_BYTES);
        self.is_cut |= self.bytes > MOST_BYTES;
        self.bytes <= MOST_BYTES
    }
}

/// A search for the lost names of a subvolume.
struct LostNameSearch<'v> {
    volume: &'v Rooms,
    root: TreeRoot,
    /// Inodes that may be orphans.
    orphans: BTreeSet<u64>,
    survey: &'v mut NameSurvey,
}

/// What is known of the inode whose items the search is at.
#[derive(Default)]
struct SearchedInode {
    ino: u64,
    has_item: bool,
    has_name: bool,
    /// The names of entries by hash, if some by index may be lost.
    entries: BTreeSet<Vec<u8>>,
}

impl LostNameSearch<'_> {
    fn id(&self) -> TreeId {
        self.root.id
    }

    fn may_have_lost(&self, ino: u64, item_type: ItemType, offset: u64) -> bool {
        self.volume.may_have_lost(self.id(), Key::new(ino, item_type, offset))
    }

    /// Whether some entry by index of the directory `ino` may be lost.
    fn may_lack_entries(&self, ino: u64) -> bool {
        let key = |index| Key::new(ino, ItemType::DIR_INDEX, index);
        self.volume.may_have_lost_between(self.id(), key(0), key(u64::MAX))
    }

    /// Goes through all items, for the names that inodes have and for entries by hash.
    fn find_names(&mut self) -> Result<()> {
        let mut cursor = Cursor::seek(self.volume, self.root, Key::MIN)?;
        let mut inode = SearchedInode::default();
        while let Some((key, data)) = cursor.item() {
            if key.objectid != inode.ino {
                self.end_inode(&inode);
                inode = SearchedInode { ino: key.objectid, ..SearchedInode::default() };
            }
            match key.item_type {
                ItemType::INODE_ITEM => inode.has_item = true,
                ItemType::INODE_REF => {
                    inode.has_name = true;
                    for name in inode_refs(key.offset, data) {
                        let name = name.map_err(malformed)?;
                        self.found_own(key.objectid, name.parent, name.index, name.name)?;
                    }
                }
                ItemType::INODE_EXTREF => {
                    inode.has_name = true;
                    for name in inode_extrefs(data) {
                        let name = name.map_err(malformed)?;
                        self.found_own(key.objectid, name.parent, name.index, name.name)?;
                    }
                }
                ItemType::DIR_ITEM if self.may_lack_entries(key.objectid) => {
                    for entry in dir_entries(data) {
                        let name = entry.map_err(malformed)?.name;
                        if self.survey.has_room(name.len()) {
                            inode.entries.insert(name.to_vec());
                        }
                    }
                }
                ItemType::DIR_INDEX if !inode.entries.is_empty() => {
                    for entry in dir_entries(data) {
                        inode.entries.remove(entry.map_err(malformed)?.name);
                    }
                }
                _ => {}
            }
            cursor.advance()?;
        }
        self.end_inode(&inode);
        Ok(())
    }

    fn end_inode(&mut self, inode: &SearchedInode) {
        let dir = FileId { dev: self.id().0, ino: inode.ino };
        for name in &inode.entries {
            if let Ok(file) = lookup_once(self.volume, dir, name) {
                self.survey.add_name(inode.ino, name, file);
            }
        }
        let is_file = inode.ino > ROOT_DIR && inode.ino <= TreeId::LAST_FREE.0;
        if inode.ino >= ROOT_DIR
            && !inode.has_item
            && self.may_have_lost(inode.ino, ItemType::INODE_ITEM, 0)
            && self.survey.has_room(0)
        {
            self.survey.inferred.insert(inode.ino);
        }
        if is_file
            && !inode.has_name
            && self.may_have_lost(inode.ino, ItemType::INODE_REF, 0)
                | self.may_have_lost(inode.ino, ItemType::INODE_REF, u64::MAX)
        {
            self.add_orphan(inode.ino);
        }
    }

    fn add_orphan(&mut self, ino: u64) {
        if self.survey.has_room(0) {
            self.orphans.insert(ino);
        }
    }

    /// Looks up the entry of a name that the inode `ino` has itself.
    fn found_own(&mut self, ino: u64, parent: u64, index: u64, name: &[u8]) -> Result<()> {
        if ino == ROOT_DIR || !self.may_have_lost(parent, ItemType::DIR_INDEX, index) {
            return Ok(());
        }
        let key = Key::new(parent, ItemType::DIR_INDEX, index);
        if with_item(self.volume, self.root, key, |_| Ok(()))?.is_none() {
            self.survey.add_name(parent, name, FileId { dev: self.id().0, ino });
        }
        Ok(())
    }

    /// Finds directories without any item that inodes name as theirs.
    fn find_phantoms(&mut self) -> Result<()> {
        let named: Vec<u64> = self.survey.names.keys().copied().collect();
        for dir in named.into_iter().filter(|&dir| dir != ROOT_DIR) {
            let first = Key::new(dir, ItemType(0), 0);
            let cursor = Cursor::seek(self.volume, self.root, first)?;
            if cursor.item().is_none_or(|(key, _)| key.objectid != dir) {
                self.add_orphan(dir);
            }
        }
        Ok(())
    }

    /// Goes through all entries, for those that lead to inodes that may be orphans.
    fn find_entries(&mut self) -> Result<()> {
        if self.orphans.is_empty() {
            return Ok(());
        }
        let mut cursor = Cursor::seek(self.volume, self.root, Key::MIN)?;
        while let Some((key, data)) = cursor.item() {
            if [ItemType::DIR_ITEM, ItemType::DIR_INDEX].contains(&key.item_type) {
                for entry in dir_entries(data) {
                    let entry = entry.map_err(malformed)?;
                    let ino = entry.location.objectid;
                    if entry.location.item_type == ItemType::INODE_ITEM && self.orphans.remove(&ino)
                    {
                        let dir = FileId { dev: self.id().0, ino: key.objectid };
                        let parent = Parent { dir, name: entry.name.to_vec() };
                        self.survey.parents.insert(ino, parent);
                    }
                }
            }
            cursor.advance()?;
        }
        Ok(())
    }
}
