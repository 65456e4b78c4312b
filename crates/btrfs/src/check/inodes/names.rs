//! Names of inodes and entries of directories, compared.
//!
//! ```text
//! directory 257, DIR_INDEX 4: "a" leads to inode 300, a file      hash(257, 4, 300, "a") * file
//! inode 300, INODE_REF 257: index 4, "a"                          hash(257, 4, 300, "a") * type
//!                                                                 of the inode
//! ```
//!
//! The sum of the first over all directories is that of the second over all inodes. When it is not,
//! [`compare`] sorts all names of the tree, so that an entry and its name follow each other.

use std::hash::{BuildHasher, Hasher};
use std::ops::ControlFlow;

use foldhash::quality::FixedState;
use offshoot_btrfs_format::block::item_data;
use offshoot_btrfs_format::dir::{dir_entries, file_type};
use offshoot_btrfs_format::inode::{InodeItem, InodeName, inode_extrefs, inode_refs};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{FileType, Result};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::super::sort::{SortedRecord, Sorter};
use super::super::volume::{CheckedVolume, KeyRange};
use crate::block::TreeBlock;
use crate::tree::TreeRoot;

/// The names that are gathered before they are passed on.
const NAMES_AT_ONCE: usize = 4096;

const FIRST: FixedState = FixedState::with_seed(1);
const SECOND: FixedState = FixedState::with_seed(2);

/// A hash of 128 bits, so that sums of billions of them are the same only when all are.
fn hash(add: impl Fn(&mut <FixedState as BuildHasher>::Hasher)) -> u128 {
    let (mut first, mut second) = (FIRST.build_hasher(), SECOND.build_hasher());
    add(&mut first);
    add(&mut second);
    u128::from(first.finish()) << 64 | u128::from(second.finish())
}

/// The hash of a name.
pub(super) fn name_hash(parent: u64, index: u64, child: u64, name: &[u8]) -> u128 {
    hash(|hasher| {
        hasher.write_u64(parent);
        hasher.write_u64(index);
        hasher.write_u64(child);
        hasher.write(name);
    })
}

/// The hash of an entry in its directory.
pub(super) fn entry_hash(location: Key, file_type: u8, name: &[u8]) -> u128 {
    hash(|hasher| {
        hasher.write_u64(location.objectid);
        hasher.write_u8(location.item_type.0);
        hasher.write_u64(location.offset);
        hasher.write_u8(file_type);
        hasher.write(name);
    })
}

/// The hash of an inode that is to be removed.
pub(super) fn orphan_hash(ino: u64) -> u128 {
    hash(|hasher| hasher.write_u64(ino))
}

/// A name that an inode has, or that an entry gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct NameRecord {
    parent: u64,
    child: u64,
    name: [u64; 2],
    index: u64,
    /// [`ENTRY`] or [`NAME`].
    side: u64,
    /// The file type by the entry or by the inode; 0 for an inode that is not known.
    file_type: u64,
}

const ENTRY: u64 = 0;
const NAME: u64 = 1;

impl SortedRecord for NameRecord {
    fn address(&self) -> u64 {
        self.parent
    }
}

impl NameRecord {
    fn new(side: u64, name: InodeName<'_>, child: u64, file_type: u8) -> Self {
        let InodeName { parent, index, name } = name;
        let hash = hash(|hasher| hasher.write(name));
        #[expect(clippy::cast_possible_truncation, reason = "the hash is cut in halves")]
        let name = [(hash >> 64) as u64, hash as u64];
        Self { parent, child, name, index, side, file_type: u64::from(file_type) }
    }

    /// Whether both are of the same name in the same directory.
    fn is_like(&self, other: &Self) -> bool {
        (self.parent, self.child, self.name) == (other.parent, other.child, other.name)
    }
}

/// Compares all names of a tree with all entries.
///
/// # Errors
/// When a file for records cannot be written or read, or the caller has ended the check.
pub(super) fn compare(volume: &CheckedVolume<'_>, root: TreeRoot) -> Result<()> {
    let names = gather(volume, root)?;
    let comparison = NameComparison { volume, root };
    let mut sorted = names.take(0)?;
    let mut single: Option<NameRecord> = None;
    while let Some(record) = sorted.next()? {
        volume.require_going_on()?;
        let partner = sorted.peek().filter(|next| {
            next.is_like(&record) && next.index == record.index && next.side != record.side
        });
        if let Some(&name) = partner {
            comparison.types(&record, &name);
            sorted.next()?;
            continue;
        }
        match single.take() {
            Some(other) if other.is_like(&record) && other.side != record.side => {
                comparison.indexes(&other, &record);
            }
            other => {
                if let Some(other) = other {
                    comparison.single(&other);
                }
                single = Some(record);
            }
        }
    }
    if let Some(other) = single {
        comparison.single(&other);
    }
    Ok(())
}

/// All names and all entries of a tree.
fn gather(volume: &CheckedVolume<'_>, root: TreeRoot) -> Result<Sorter<NameRecord>> {
    let sorter = Sorter::new(Vec::new(), volume.options.memory_bytes / 4, &volume.scratch());
    let (mut names, mut failure) = (Vec::new(), None);
    let mut inode = (0, file_type::UNKNOWN);
    volume.each_leaf(root, KeyRange::ALL, &mut |leaf| {
        names_of_leaf(leaf, &mut inode, &mut names);
        if names.len() >= NAMES_AT_ONCE
            && let Err(error) = sorter.add_all(&mut names)
        {
            failure = Some(error);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    });
    if let Some(error) = failure {
        return Err(error);
    }
    volume.require_going_on()?;
    sorter.add_all(&mut names)?;
    Ok(sorter)
}

/// Adds the names and entries of a leaf. `inode` is the last inode and its file type.
fn names_of_leaf(leaf: &TreeBlock, inode: &mut (u64, u8), names: &mut Vec<NameRecord>) {
    for item in leaf.items() {
        let key = item.key.get();
        let Ok(data) = item_data(leaf.bytes(), item) else { continue };
        if !super::is_inode(key.objectid) {
            continue;
        }
        if inode.0 != key.objectid {
            *inode = (key.objectid, file_type::UNKNOWN);
        }
        let mut add = |name: InodeName<'_>| {
            if name.parent != key.objectid {
                names.push(NameRecord::new(NAME, name, key.objectid, inode.1));
            }
        };
        match key.item_type {
            ItemType::INODE_ITEM => inode.1 = type_of(data),
            ItemType::INODE_REF => inode_refs(key.offset, data).flatten().for_each(&mut add),
            ItemType::INODE_EXTREF => inode_extrefs(data).flatten().for_each(&mut add),
            ItemType::DIR_INDEX => {
                for entry in dir_entries(data).flatten() {
                    if entry.location.item_type == ItemType::INODE_ITEM {
                        let index = key.offset;
                        let name = InodeName { parent: key.objectid, index, name: entry.name };
                        let file_type = entry.file_type & !file_type::ENCRYPTED;
                        let child = entry.location.objectid;
                        names.push(NameRecord::new(ENTRY, name, child, file_type));
                    }
                }
            }
            _ => {}
        }
    }
}

/// The file type of an inode, as entries have it.
fn type_of(item: &[u8]) -> u8 {
    let mode = InodeItem::view(item).map_or(0, |item| item.mode.get());
    FileType::from_mode(mode).map_or(file_type::UNKNOWN, file_type::of)
}

/// Reports the differences of the names of a tree.
struct NameComparison<'n, 'c> {
    volume: &'n CheckedVolume<'c>,
    root: TreeRoot,
}

impl NameComparison<'_, '_> {
    fn place(&self, ino: u64) -> BtrfsFindingPlace {
        BtrfsFindingPlace::Inode { subvolume: self.root.id, ino }
    }

    /// Compares the file types of an entry and of the inode that it leads to.
    fn types(&self, entry: &NameRecord, name: &NameRecord) {
        let unknown = u64::from(file_type::UNKNOWN);
        if entry.file_type != name.file_type && name.file_type != unknown {
            let what = format!("file type of the entry {} of {}", entry.index, entry.parent);
            let place = self.place(entry.child);
            let code = BtrfsFindingCode::EntryType;
            self.volume.findings.differs(code, place, what, name.file_type, entry.file_type);
        }
    }

    /// Reports an entry and a name that are the same but for their index.
    fn indexes(&self, one: &NameRecord, other: &NameRecord) {
        let (entry, name) = if one.side == ENTRY { (one, other) } else { (other, one) };
        let what = format!("index of its name in the directory {}", name.parent);
        let place = self.place(name.child);
        let code = BtrfsFindingCode::NameWithoutEntry;
        self.volume.findings.differs(code, place, what, entry.index, name.index);
    }

    /// Reports an entry without its name, or a name without its entry, unless that may be in a
    /// block that cannot be read.
    fn single(&self, record: &NameRecord) {
        let NameRecord { parent, child, index, side, .. } = *record;
        if side == ENTRY {
            let range = KeyRange {
                first: Key::new(child, ItemType::INODE_ITEM, 0),
                last: Key::new(child, ItemType::INODE_EXTREF, u64::MAX),
            };
            let mut is_there = false;
            let walked = self.volume.each_item(self.root, range, &mut |_, _| {
                is_there = true;
                ControlFlow::Continue(())
            });
            if !walked.is_whole() {
                return;
            }
            let inode =
                if is_there { "which does not have this name" } else { "which is not there" };
            let name = self.entry_name(parent, index);
            let problem =
                format!("the entry {name} (index {index}) leads to inode {child}, {inode}");
            let code = BtrfsFindingCode::EntryWithoutName;
            self.volume.findings.add(code, self.place(parent), problem);
        } else {
            let key = Key::new(parent, ItemType::DIR_INDEX, index);
            let range = KeyRange { first: key, last: key };
            let walked =
                self.volume.each_item(self.root, range, &mut |_, _| ControlFlow::Continue(()));
            if !walked.is_whole() {
                return;
            }
            let name = self.inode_name(record);
            let problem = format!("its name {name} has no entry {index} in the directory {parent}");
            let code = BtrfsFindingCode::NameWithoutEntry;
            self.volume.findings.add(code, self.place(child), problem);
        }
    }

    /// The name of an entry, for a message.
    fn entry_name(&self, parent: u64, index: u64) -> String {
        let key = Key::new(parent, ItemType::DIR_INDEX, index);
        let name = self.volume.with_item(self.root, key, |data| {
            Some(dir_entries(data).next()?.ok()?.name.escape_ascii().to_string())
        });
        name.unwrap_or_default()
    }

    /// The name of an inode that `record` stands for, for a message.
    fn inode_name(&self, record: &NameRecord) -> String {
        let range = KeyRange {
            first: Key::new(record.child, ItemType::INODE_REF, 0),
            last: Key::new(record.child, ItemType::INODE_EXTREF, u64::MAX),
        };
        let mut found = None;
        self.volume.each_item(self.root, range, &mut |key, data| {
            let mut look = |name: InodeName<'_>| {
                if (name.parent, name.index) == (record.parent, record.index) {
                    found = Some(name.name.escape_ascii().to_string());
                }
            };
            if key.item_type == ItemType::INODE_REF {
                inode_refs(key.offset, data).flatten().for_each(&mut look);
            } else {
                inode_extrefs(data).flatten().for_each(&mut look);
            }
            if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        found.unwrap_or_default()
    }
}

/// Reports each inode without links that the tree does not list for removal.
///
/// # Errors
/// When the caller has ended the check.
pub(super) fn find_lost_orphans(volume: &CheckedVolume<'_>, root: TreeRoot) -> Result<()> {
    volume.each_item(root, KeyRange::ALL, &mut |key, data| {
        let is_unlinked = key.item_type == ItemType::INODE_ITEM
            && super::is_inode(key.objectid)
            && InodeItem::view(data).is_ok_and(|item| item.nlink.get() == 0);
        if is_unlinked && super::orphan_item(volume, root, key.objectid) == Some(false) {
            let place = BtrfsFindingPlace::Inode { subvolume: root.id, ino: key.objectid };
            let problem = "it has no links, and is not listed for removal";
            volume.findings.add(BtrfsFindingCode::Orphan, place, problem);
        }
        ControlFlow::Continue(())
    });
    volume.require_going_on()
}
