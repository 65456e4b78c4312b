//! Names, entries and counts of the files of a subvolume, mended from each other.
//!
//! | | what is believed | what is made from it |
//! |---|---|---|
//! | a name of an inode, and its directory is there | the name | both items of the entry |
//! | an entry to an inode that is there and lacks the name | the entry | the name |
//! | items of an inode that is not there | its items, and the entry to it | the inode ([`rebuilt`]) |
//! | a name in a directory that is not there | the name | the directory ([`rebuilt`]) |
//! | an entry to an inode of which nothing is there | | it is removed |
//! | an inode with links and without names | | a name in `lost+found` |
//! | links, size of a directory or link, bytes of a file | names, entries, extents | the counts |
//! | the name `..` of a root directory | | it is always the same |
//! | an inode without links | the inode | the item that lists it for removal |
//! | a range of a file without an extent | the others | an extent without data |
//! | a mode without a type, or against what the inode has | entries, items | the type ([`kinds`]) |
//! | extents that overlap or are damaged | the newer ones | they are cut ([`overlapping`]) |
//!
//! A directory gets a name from an entry only if it has no other. If another inode has the name of
//! the entry, or the inode has another name in this place, the entry is removed.
//!
//! No path that can be read is taken away. Where two entries want the same place, nothing is
//! changed, and the check names it again.

mod counts;
mod kinds;
mod lost;
mod names;
mod overlapping;
mod rebuilt;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::{DirItemEntry, dir_entries, file_type, name_hash};
use offshoot_btrfs_format::encode::dir_entry;
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::root::RootRef;
use offshoot_btrfs_format::{Generation, Ino, ItemType, Key, TreeId};
use offshoot_vfs::{FileType, Result};

use super::editor::TreeEdits;
use super::overlaps::OverlapStep;
use crate::check::{
    BtrfsFinding, BtrfsFindingCode as Code, BtrfsFindingPlace, CheckedVolume, KeyRange,
};
use crate::tree::TreeRoot;
use names::OwnedName;

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedEntry {
    pub(super) location: Key,
    pub(super) transid: u64,
    pub(super) file_type: u8,
    pub(super) name: Vec<u8>,
}

/// The edits that mend what was found, by subvolume; extents as far as `overlaps` says.
///
/// # Errors
/// When the caller has ended the repair.
pub(super) fn edits(
    volume: &CheckedVolume<'_>,
    findings: &[BtrfsFinding],
    generation: Generation,
    overlaps: &mut OverlapStep,
) -> Result<BTreeMap<TreeId, TreeEdits>> {
    let mut inodes: BTreeMap<TreeId, BTreeSet<u64>> = BTreeMap::new();
    let mut with_extents: BTreeSet<_> = overlaps.moved.keys().copied().collect();
    for finding in findings {
        let BtrfsFindingPlace::Inode { subvolume, ino } = finding.place else { continue };
        if overlaps.is_chosen && finding.code == Code::FileExtent {
            with_extents.insert((subvolume, ino));
        } else if is_mended(finding) {
            inodes.entry(subvolume).or_default().insert(ino);
        }
    }
    for &(subvolume, ino) in &with_extents {
        inodes.entry(subvolume).or_default().insert(ino);
    }
    let mut all = BTreeMap::new();
    for (subvolume, inodes) in inodes {
        volume.require_going_on()?;
        let Some(root) = volume.tree(subvolume) else { continue };
        let mut mender = FileMender::new(volume, root, generation);
        for &ino in &inodes {
            mender.mend_kind(ino);
            if with_extents.contains(&(subvolume, ino)) {
                volume.require_going_on()?;
                mender.mend_extents(ino, overlaps);
            }
        }
        mender.mend(&inodes);
        if !mender.edits.is_empty() {
            all.insert(subvolume, mender.edits);
        }
    }
    Ok(all)
}

/// Whether a finding may be mended here.
pub(super) fn is_mended(finding: &BtrfsFinding) -> bool {
    matches!(
        finding.code,
        Code::Inode
            | Code::LinkCount
            | Code::Orphan
            | Code::InodeSize
            | Code::InodeBytes
            | Code::MissingInode
            | Code::FileHole
            | Code::EntryItems
            | Code::EntryType
            | Code::NameWithoutEntry
            | Code::EntryWithoutName
    )
}

/// Mends the files of a subvolume.
pub(super) struct FileMender<'m, 'c> {
    volume: &'m CheckedVolume<'c>,
    root: TreeRoot,
    generation: Generation,
    edits: TreeEdits,
}

impl<'m, 'c> FileMender<'m, 'c> {
    /// A mender of the subvolume with this root.
    pub(super) fn new(
        volume: &'m CheckedVolume<'c>,
        root: TreeRoot,
        generation: Generation,
    ) -> Self {
        Self { volume, root, generation, edits: TreeEdits::new() }
    }

    /// What was mended.
    pub(super) fn into_edits(self) -> TreeEdits {
        self.edits
    }
}

impl FileMender<'_, '_> {
    fn mend(&mut self, inodes: &BTreeSet<u64>) {
        let mut touched = inodes.clone();
        self.rebuild_inodes(&mut touched);
        if touched.contains(&Ino::ROOT_DIR.0) {
            self.name_root();
        }
        // Entries that need an index of their own come behind all that have one.
        let mut without_index = Vec::new();
        for ino in touched.clone() {
            if self.type_of(ino) == Some(FileType::Directory) {
                self.mend_directory(ino, &mut touched, &mut without_index);
            }
        }
        for ino in touched.clone() {
            self.mend_names(ino, &mut touched);
        }
        for (dir, entry) in without_index {
            self.mend_entry(dir, None, &entry, &mut touched);
        }
        for ino in touched.clone() {
            self.give_name(ino, &mut touched);
        }
        for ino in touched {
            self.mend_counts(ino);
        }
    }

    /// The items of the keys in a range, with the edits so far.
    fn items(&self, range: KeyRange) -> BTreeMap<Key, Vec<u8>> {
        let mut items = BTreeMap::new();
        self.volume.each_item(self.root, range, &mut |key, data| {
            items.insert(key, data.to_vec());
            ControlFlow::Continue(())
        });
        for (key, data) in self.edits.range(range.first..=range.last) {
            match data {
                Some(data) => drop(items.insert(*key, data.clone())),
                None => drop(items.remove(key)),
            }
        }
        items
    }

    /// The items of an inode of one type.
    fn items_of(&self, ino: u64, item_type: ItemType) -> BTreeMap<Key, Vec<u8>> {
        let key = |offset| Key::new(ino, item_type, offset);
        self.items(KeyRange { first: key(0), last: key(u64::MAX) })
    }

    fn item(&self, key: Key) -> Option<Vec<u8>> {
        self.items(KeyRange { first: key, last: key }).remove(&key)
    }

    fn set(&mut self, key: Key, data: Vec<u8>) {
        if self.item(key).as_ref() != Some(&data) {
            self.edits.insert(key, Some(data));
        }
    }

    fn inode(&self, ino: u64) -> Option<InodeItem> {
        let data = self.item(Key::new(ino, ItemType::INODE_ITEM, 0))?;
        InodeItem::view(&data).ok().copied()
    }

    pub(super) fn type_of(&self, ino: u64) -> Option<FileType> {
        FileType::from_mode(self.inode(ino)?.mode.get())
    }

    /// The entries of a directory by index.
    fn entries(&self, dir: u64) -> Vec<(u64, OwnedEntry)> {
        let items = self.items_of(dir, ItemType::DIR_INDEX);
        let one = |(key, data): (&Key, &Vec<u8>)| Some((key.offset, owned(data).pop()?));
        items.iter().filter_map(one).collect()
    }

    /// The entry of a name by its index, which is `index` most often.
    fn find_entry(
        &self,
        dir: u64,
        index: u64,
        name: &[u8],
        location: Key,
    ) -> Option<(u64, OwnedEntry)> {
        let is_it = |one: &OwnedEntry| one.name == name && one.location == location;
        let first = self.item(Key::new(dir, ItemType::DIR_INDEX, index));
        let first = first.and_then(|data| owned(&data).pop()).filter(is_it);
        let all = || self.entries(dir).into_iter().find(|(_, entry)| is_it(entry));
        first.map(|entry| (index, entry)).or_else(all)
    }

    /// The entries with the hash of a name.
    pub(super) fn hashed_entries(&self, dir: u64, name: &[u8]) -> Vec<OwnedEntry> {
        self.item(Self::hash_key(dir, name)).map(|data| owned(&data)).unwrap_or_default()
    }

    /// The entries with an index, of which there should be one at most.
    pub(super) fn indexed_entries(&self, dir: u64, index: u64) -> Vec<OwnedEntry> {
        let key = Key::new(dir, ItemType::DIR_INDEX, index);
        self.item(key).map(|data| owned(&data)).unwrap_or_default()
    }

    /// Whether an entry leads to an inode that has its name.
    pub(super) fn is_real(&self, dir: u64, entry: &OwnedEntry) -> bool {
        let names = self.names(entry.location.objectid);
        entry.location.item_type == ItemType::INODE_ITEM
            && names.iter().any(|one| one.parent == dir && one.name == entry.name)
    }

    fn hash_key(dir: u64, name: &[u8]) -> Key {
        Key::new(dir, ItemType::DIR_ITEM, name_hash(name))
    }

    /// Stores the entries of a hash.
    fn set_hashed(&mut self, key: Key, entries: &[OwnedEntry]) {
        if entries.is_empty() {
            self.edits.insert(key, None);
        } else {
            self.set(key, entries.iter().flat_map(OwnedEntry::encode).collect());
        }
    }

    /// Makes both items of an entry say the same: that `name` leads to `location`. Returns whether
    /// nothing else is in the way.
    pub(super) fn enter(&mut self, dir: u64, index: u64, entry: &OwnedEntry) -> bool {
        let index_key = Key::new(dir, ItemType::DIR_INDEX, index);
        let hash_key = Self::hash_key(dir, &entry.name);
        let by_index = self.item(index_key).map(|data| owned(&data));
        let mut by_hash = self.item(hash_key).map(|data| owned(&data)).unwrap_or_default();
        let is_same = |one: &OwnedEntry| one.name == entry.name && one.location == entry.location;
        let is_taken = by_index.is_some_and(|entries| !entries.iter().all(is_same))
            || by_hash.iter().any(|one| one.name == entry.name && one.location != entry.location);
        by_hash.retain(|one| one.name != entry.name);
        by_hash.push(entry.clone());
        let len = by_hash.iter().map(|one| one.encode().len()).sum();
        if is_taken || !self.fits(len) {
            return false;
        }
        self.set_hashed(hash_key, &by_hash);
        self.set(index_key, entry.encode());
        true
    }

    /// Takes an entry out of a directory.
    pub(super) fn remove_entry(&mut self, dir: u64, index: Option<u64>, entry: &OwnedEntry) {
        if let Some(index) = index {
            self.edits.insert(Key::new(dir, ItemType::DIR_INDEX, index), None);
        }
        let key = Self::hash_key(dir, &entry.name);
        let mut by_hash = self.item(key).map(|data| owned(&data)).unwrap_or_default();
        let before = by_hash.len();
        by_hash.retain(|one| (&one.name, one.location) != (&entry.name, entry.location));
        if by_hash.len() != before {
            self.set_hashed(key, &by_hash);
        }
    }

    /// Mends the entries of a directory by those of their inodes. Adds those by hash to
    /// `without_index` that no index is known of.
    fn mend_directory(
        &mut self,
        dir: u64,
        touched: &mut BTreeSet<u64>,
        without_index: &mut Vec<(u64, OwnedEntry)>,
    ) {
        for (index, entry) in self.entries(dir) {
            self.mend_entry(dir, Some(index), &entry, touched);
        }
        let by_index = self.entries(dir).into_iter().map(|(_, one)| (one.name, one.location));
        let known: BTreeSet<_> = by_index.collect();
        for (key, data) in self.items_of(dir, ItemType::DIR_ITEM) {
            let all = owned(&data);
            let is_here = |one: &OwnedEntry| name_hash(&one.name) == key.offset;
            if !all.iter().all(is_here) {
                let kept: Vec<_> = all.iter().filter(|one| is_here(one)).cloned().collect();
                self.set_hashed(key, &kept);
            }
            for entry in all {
                if known.contains(&(entry.name.clone(), entry.location)) {
                    continue;
                }
                if self.is_real(dir, &entry) {
                    self.mend_entry(dir, None, &entry, touched);
                } else {
                    without_index.push((dir, entry));
                }
            }
        }
    }

    fn mend_entry(
        &mut self,
        dir: u64,
        index: Option<u64>,
        entry: &OwnedEntry,
        touched: &mut BTreeSet<u64>,
    ) {
        let child = entry.location.objectid;
        if entry.location.item_type != ItemType::INODE_ITEM {
            self.mend_subvolume_entry(dir, index, entry);
            return;
        }
        let Some(file_type) = self.type_of(child) else {
            self.remove_entry(dir, index, entry);
            return;
        };
        touched.insert(child);
        let entry = OwnedEntry { file_type: file_type::of(file_type), ..entry.clone() };
        let names = self.names(child);
        let known = names.iter().find(|one| one.parent == dir && one.name == entry.name);
        let at = index;
        let index = match (known, index) {
            (Some(name), None) => name.index,
            (Some(_), Some(index)) => index,
            (None, _)
                if file_type == FileType::Directory && !names.is_empty()
                    || names.iter().any(|one| one.parent == dir && Some(one.index) == index)
                    || self.is_claimed(dir, &entry, touched) =>
            {
                self.remove_entry(dir, index, &entry);
                return;
            }
            (None, index) => {
                let index = index.unwrap_or_else(|| self.next_index(dir));
                if !self.add_name(child, dir, index, &entry.name) {
                    self.remove_entry(dir, at, &entry);
                    return;
                }
                index
            }
        };
        self.enter(dir, index, &entry);
    }

    /// Mends an entry that leads to a subvolume. That by hash follows from that by index, and an
    /// entry by hash alone gets the index of the link to the subvolume. A snapshot has entries of
    /// subvolumes without any link.
    fn mend_subvolume_entry(&mut self, dir: u64, index: Option<u64>, entry: &OwnedEntry) {
        let above = self.root.id.0;
        let key = Key::new(above, ItemType::ROOT_REF, entry.location.objectid);
        let link = self.volume.with_item(self.volume.root_tree(), key, |data| {
            let link = RootRef::parse(data).ok()?;
            Some((link.dirid == dir && link.name == entry.name, link.sequence))
        });
        let index = match (index, link) {
            (Some(index), _) | (None, Some((true, index))) => index,
            (None, Some((false, _))) => {
                self.remove_entry(dir, None, entry);
                return;
            }
            (None, None) => self.next_index(dir),
        };
        self.enter(dir, index, entry);
    }

    /// Whether another inode has the name of an entry, and another entry leads to that inode.
    fn is_claimed(&self, dir: u64, entry: &OwnedEntry, touched: &mut BTreeSet<u64>) -> bool {
        let by_hash = self.item(Self::hash_key(dir, &entry.name));
        let by_hash = by_hash.map(|data| owned(&data)).unwrap_or_default();
        let by_index = self.entries(dir).into_iter().map(|(_, one)| one);
        let others = by_hash.into_iter().chain(by_index);
        let rival = others
            .filter(|one| one.name == entry.name && one.location != entry.location)
            .find(|one| {
                let names = self.names(one.location.objectid);
                names.iter().any(|name| name.parent == dir && name.name == entry.name)
            });
        touched.extend(rival.as_ref().map(|one| one.location.objectid));
        rival.is_some()
    }

    /// An index behind those of all entries.
    pub(super) fn next_index(&self, dir: u64) -> u64 {
        // 0 and 1 are those of `.` and `..`.
        let last = self.items_of(dir, ItemType::DIR_INDEX).keys().next_back().map(|key| key.offset);
        last.map_or(2, |last| last.saturating_add(1).max(2))
    }

    /// Mends the entries that the names of an inode must have.
    fn mend_names(&mut self, ino: u64, touched: &mut BTreeSet<u64>) {
        let Some(file_type) = self.type_of(ino) else { return };
        for OwnedName { parent, index, name } in self.names(ino) {
            if parent == ino || self.type_of(parent) != Some(FileType::Directory) {
                continue;
            }
            let location = Key::new(ino, ItemType::INODE_ITEM, 0);
            let transid = self.generation.0;
            let file_type = file_type::of(file_type);
            let (at, entry) = match self.find_entry(parent, index, &name, location) {
                Some((at, entry)) => (at, OwnedEntry { file_type, ..entry }),
                None => (index, OwnedEntry { location, transid, file_type, name: name.clone() }),
            };
            if at != index {
                self.correct_index(ino, parent, &name, at);
            }
            if self.enter(parent, at, &entry) {
                touched.insert(parent);
            }
        }
    }
}

impl OwnedEntry {
    fn encode(&self) -> Vec<u8> {
        dir_entry(&DirItemEntry {
            location: self.location,
            transid: self.transid,
            file_type: self.file_type,
            name: &self.name,
            data: b"",
        })
    }
}

/// The entries of an item.
fn owned(data: &[u8]) -> Vec<OwnedEntry> {
    let entry = |one: DirItemEntry<'_>| OwnedEntry {
        location: one.location,
        transid: one.transid,
        file_type: one.file_type,
        name: one.name.to_vec(),
    };
    dir_entries(data).flatten().map(entry).collect()
}
