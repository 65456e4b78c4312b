//! Damage to inodes and names, each of one kind.
//!
//! Each volume has a file of each kind in one leaf. A test changes items of that leaf.

use std::collections::BTreeSet;
use std::path::Path;

use offshoot_btrfs::{BtrfsFindingCode as Code, BtrfsFindingPlace, CheckOutcome};
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail, extent_type};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::fill::{crowd, directory, handful, subvolumes, sync, write};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;
use zerocopy::{FromBytes, IntoBytes};

use crate::common::{DamagedVolume, EditedItems, ProgsVerdict, checked, progs_complaints, show};

/// The inode number of the root of a subvolume.
const ROOT: u64 = 256;

/// Some files of each kind. Beside them a subvolume with so many that the volume is no empty one.
pub(crate) fn fill(root: &Path) {
    subvolumes::create(&root.join("crowd"));
    crowd(&root.join("crowd"), 800);
    let dir = directory(root, "dir");
    write(&dir.join("file"), &vec![b'f'; 20_000]);
    write(&dir.join("small"), b"in the item itself");
    write(&dir.join("linked"), &[b'l'; 9000]);
    let other = directory(root, "other");
    std::fs::hard_link(dir.join("linked"), other.join("second")).expect("a second name");
    std::os::unix::fs::symlink("small", dir.join("symlink")).expect("a symbolic link");
    run("mkfifo", &[dir.join("fifo")]);
    let holes = std::fs::File::create(dir.join("holes")).expect("a file");
    for piece in 0..4 {
        let at = piece * 65_536;
        std::os::unix::fs::FileExt::write_all_at(&holes, &[b'h'; 4096], at).expect("a piece");
    }
    sync(root);
}

/// A volume with these files, to be damaged.
pub(crate) struct DamagedInodes {
    pub(crate) volume: DamagedVolume,
}

impl DamagedInodes {
    pub(crate) fn new(judges: &Judges) -> Self {
        Self::made(judges, Recipe::new().fill(fill))
    }

    fn made(judges: &Judges, recipe: Recipe) -> Self {
        Self { volume: DamagedVolume::of(recipe.mib(256).make(judges)) }
    }

    /// The inode that the first entry called `name` leads to.
    #[track_caller]
    pub(crate) fn ino(&self, name: &str) -> u64 {
        self.volume.ino(name)
    }

    /// Changes the leaf with the item `key`.
    #[track_caller]
    pub(crate) fn edit(&self, key: Key, change: impl FnOnce(&mut EditedItems, usize)) -> &Self {
        self.volume.edit(TreeId::FS, |found, _| found == key, change);
        self
    }

    #[track_caller]
    pub(crate) fn edit_inode(&self, ino: u64, change: impl FnOnce(&mut InodeItem)) -> &Self {
        self.edit(inode_key(ino), |items, slot| change(inode_of(items, slot)))
    }

    /// Requires exactly these findings, and what `btrfs check` says.
    #[track_caller]
    pub(crate) fn require(&self, expected: &[(Code, u64)], progs: ProgsVerdict) -> CheckOutcome {
        let outcome = checked(self.volume.disks());
        let place = |ino| BtrfsFindingPlace::Inode { subvolume: TreeId::FS, ino };
        let expected: BTreeSet<_> =
            expected.iter().map(|&(code, ino)| (code, place(ino))).collect();
        let found: BTreeSet<_> = outcome
            .findings
            .iter()
            // A block that the kernel refuses is one more finding, at the block.
            .filter(|finding| finding.code != Code::RefusedBlock)
            .map(|finding| (finding.code, finding.place))
            .collect();
        assert_eq!(found, expected, "{}", show(&outcome));
        let said = progs_complaints(self.volume.disks());
        assert_eq!(said.is_some(), progs == ProgsVerdict::Agrees, "btrfs check: {said:?}");
        outcome
    }

    /// As [`require`](Self::require), in a volume of which no block is refused.
    #[track_caller]
    pub(crate) fn require_only(
        &self,
        expected: &[(Code, u64)],
        progs: ProgsVerdict,
    ) -> CheckOutcome {
        let outcome = self.require(expected, progs);
        let is_refused = outcome.findings.iter().any(|one| one.code == Code::RefusedBlock);
        assert!(!is_refused, "{}", show(&outcome));
        outcome
    }
}

pub(crate) fn inode_key(ino: u64) -> Key {
    Key::new(ino, ItemType::INODE_ITEM, 0)
}

pub(crate) fn inode_of(items: &mut EditedItems, slot: usize) -> &mut InodeItem {
    InodeItem::mut_from_bytes(&mut items[slot].1).expect("an inode")
}

pub(crate) fn remove(items: &mut EditedItems, is_removed: impl Fn(&Key, &[u8]) -> bool) {
    let before = items.len();
    items.retain(|(key, data)| !is_removed(key, data));
    assert!(items.len() < before, "something is removed");
}

/// Puts items where their keys belong.
pub(crate) fn insert(items: &mut EditedItems, new: impl IntoIterator<Item = (Key, Vec<u8>)>) {
    items.extend(new);
    items.sort_by_key(|(key, _)| *key);
}

/// The paths of the findings.
pub(crate) fn paths(outcome: &CheckOutcome) -> BTreeSet<String> {
    let shown = |path: &Vec<u8>| String::from_utf8(path.clone()).expect("a plain path");
    outcome.findings.iter().filter_map(|finding| finding.path.as_ref().map(shown)).collect()
}

#[test]
fn an_inode_that_is_missing() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("small");
    damaged.edit(inode_key(ino), |items, slot| {
        items.remove(slot);
    });
    let outcome = damaged.require(&[(Code::MissingInode, ino)], ProgsVerdict::Agrees);
    assert_eq!(paths(&outcome), ["/dir/small".to_owned()].into());
}

/// The kernel does not see this: the inode would be the last item of one leaf, and the other items
/// of it are in the next one.
#[test]
fn an_inode_that_is_missing_at_the_end_of_a_leaf() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mkfs("-n 4096").fill(|root| {
        for number in 0..400 {
            write(&root.join(format!("file-{number}")), &[]);
        }
        sync(root);
    });
    let damaged = DamagedInodes::made(&judges, recipe);
    let leaves = damaged.volume.leaves(TreeId::FS);
    let mut lasts = leaves.iter().filter_map(|leaf| leaf.last());
    let (key, _) = lasts
        .rfind(|(key, _)| key.item_type == ItemType::INODE_ITEM)
        .expect("a leaf that ends with an inode");
    damaged.edit(*key, |items, slot| {
        items.remove(slot);
    });
    damaged.require_only(&[(Code::MissingInode, key.objectid)], ProgsVerdict::Agrees);
}

#[test]
fn flags_that_a_symbolic_link_cannot_have() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("symlink");
    damaged.edit_inode(ino, |inode| inode.flags = inode_flags::IMMUTABLE.into());
    damaged.require_only(&[(Code::Inode, ino)], ProgsVerdict::Agrees);
}

#[test]
fn a_mode_without_a_type() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("file");
    damaged.edit_inode(ino, |inode| inode.mode = 0o644.into());
    damaged.require(&[(Code::Inode, ino)], ProgsVerdict::Agrees);
}

#[test]
fn a_directory_that_became_a_file() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("dir");
    damaged.edit_inode(ino, |inode| inode.mode = 0o100_755.into());
    // Without records of holes, a file of this size is one hole.
    damaged.require_only(&[(Code::Inode, ino), (Code::EntryType, ino)], ProgsVerdict::Agrees);
}

#[test]
fn links_that_are_counted_wrong() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("linked");
    damaged.edit_inode(ino, |inode| inode.nlink = 3.into());
    let outcome = damaged.require_only(&[(Code::LinkCount, ino)], ProgsVerdict::Agrees);
    assert_eq!(paths(&outcome), ["/dir/linked".to_owned()].into());
}

#[test]
fn an_inode_without_links_that_is_not_listed() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(256).fill(fill).make(&judges);
    let mount = disks.mount("rw,noatime");
    let path = mount.path().join("unlinked");
    write(&path, &vec![b'u'; 30_000]);
    let file = std::fs::File::open(&path).expect("it opens");
    std::fs::remove_file(&path).expect("it is removed");
    mount.sync();
    let copy = disks.copy(&judges);
    drop((file, mount));
    crate::common::require_sound(&copy);
    let damaged = DamagedInodes { volume: DamagedVolume::of(copy) };
    let orphan = |key: &Key| key.item_type == ItemType::ORPHAN_ITEM;
    let leaves = damaged.volume.leaves(TreeId::FS);
    let (key, _) = leaves.iter().flatten().find(|(key, _)| orphan(key)).expect("an orphan");
    damaged.edit(*key, |items, slot| {
        items.remove(slot);
    });
    let outcome = damaged.require_only(&[(Code::Orphan, key.offset)], ProgsVerdict::Agrees);
    assert!(paths(&outcome).is_empty());
}

/// A crash may leave these: the next mount removes them.
#[test]
fn orphan_items_without_an_orphan_are_sound() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let linked = damaged.ino("linked");
    let orphan = 0u64.wrapping_sub(5);
    damaged.edit(inode_key(linked), |items, _| {
        let key = |ino| Key::new(orphan, ItemType::ORPHAN_ITEM, ino);
        insert(items, [(key(linked), Vec::new()), (key(5000), Vec::new())]);
    });
    damaged.require_only(&[], ProgsVerdict::SeesNothing);
}

#[test]
fn the_size_of_a_directory() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("dir");
    damaged.edit_inode(ino, |inode| inode.size += 2);
    damaged.require_only(&[(Code::InodeSize, ino)], ProgsVerdict::Agrees);
}

#[test]
fn the_size_of_a_symbolic_link() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("symlink");
    damaged.edit_inode(ino, |inode| inode.size = 4.into());
    damaged.require_only(&[(Code::InodeSize, ino)], ProgsVerdict::SeesNothing);
}

#[test]
fn bytes_that_are_counted_wrong() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("file");
    damaged.edit_inode(ino, |inode| inode.nbytes += 4096);
    damaged.require_only(&[(Code::InodeBytes, ino)], ProgsVerdict::Agrees);
}

/// A hole at the end of a leaf that reaches into the first extent of the next leaf.
#[test]
fn extents_that_overlap_in_two_leaves() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mkfs("-n 4096 -O ^no-holes").fill(fill_with_holes);
    let damaged = DamagedInodes::made(&judges, recipe);
    let (ino, leaves) = (damaged.ino("holes"), damaged.volume.leaves(TreeId::FS));
    let last_hole = |leaf: &EditedItems| {
        let (key, data) = leaf.last()?;
        let is_of_file = key.objectid == ino && key.item_type == ItemType::EXTENT_DATA;
        let tail = data.get(size_of::<FileExtentHead>()..)?;
        let is_hole = FileExtentTail::read_from_bytes(tail).ok()?.disk_bytenr.get() == 0;
        (is_of_file && is_hole).then_some(*key)
    };
    let key = leaves.iter().find_map(last_hole).expect("a leaf that ends with a hole");
    damaged.edit(key, |items, slot| {
        let tail = &mut items[slot].1[size_of::<FileExtentHead>()..];
        let tail = FileExtentTail::mut_from_bytes(tail).expect("an extent");
        tail.num_bytes += 4096;
    });
    damaged.require_only(&[(Code::FileExtent, ino)], ProgsVerdict::Agrees);
}

#[test]
fn a_fifo_with_contents() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("fifo");
    damaged.edit(inode_key(ino), |items, _| {
        let head = FileExtentHead {
            generation: 5.into(),
            ram_bytes: 3.into(),
            compression: 0,
            encryption: 0,
            other_encoding: 0.into(),
            extent_type: extent_type::INLINE,
        };
        let data = [head.as_bytes(), b"abc"].concat();
        insert(items, [(Key::new(ino, ItemType::EXTENT_DATA, 0), data)]);
    });
    damaged.require_only(&[(Code::FileExtent, ino)], ProgsVerdict::SeesNothing);
}

/// A file of many pieces with holes between them, in several leaves.
fn fill_with_holes(root: &Path) {
    let holes = std::fs::File::create(root.join("holes")).expect("a file");
    for piece in 0..300u64 {
        let at = piece * 8192;
        std::os::unix::fs::FileExt::write_all_at(&holes, &[b'h'; 4096], at).expect("a piece");
    }
    sync(root);
}

#[test]
fn a_hole_that_is_not_recorded() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mkfs("-O ^no-holes").fill(fill);
    let damaged = DamagedInodes::made(&judges, recipe);
    let ino = damaged.ino("holes");
    damaged.edit(inode_key(ino), |items, _| {
        let hole = Key::new(ino, ItemType::EXTENT_DATA, 65_536 + 4096);
        remove(items, |key, _| *key == hole);
    });
    damaged.require_only(&[(Code::FileHole, ino)], ProgsVerdict::Agrees);
}

#[test]
fn the_reference_of_a_root_directory() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    damaged.edit(Key::new(ROOT, ItemType::INODE_REF, ROOT), |items, slot| {
        items.remove(slot);
    });
    let outcome = damaged.require_only(&[(Code::LinkCount, ROOT)], ProgsVerdict::Agrees);
    assert_eq!(paths(&outcome), ["/".to_owned()].into());
}

#[test]
fn the_name_of_a_root_directory() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    damaged.edit(Key::new(ROOT, ItemType::INODE_REF, ROOT), |items, slot| {
        *items[slot].1.last_mut().expect("a name") = b'-';
    });
    damaged.require_only(&[(Code::Inode, ROOT)], ProgsVerdict::Agrees);
}

/// Changes the head of the first extent of a large file.
#[track_caller]
fn require_bad_extent(change: impl FnOnce(&mut FileExtentHead)) {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let ino = damaged.ino("file");
    damaged.edit(Key::new(ino, ItemType::EXTENT_DATA, 0), |items, slot| {
        let head = FileExtentHead::mut_from_prefix(&mut items[slot].1).expect("an extent").0;
        change(head);
    });
    damaged.require_only(&[(Code::FileExtent, ino)], ProgsVerdict::Agrees);
}

#[test]
fn an_extent_shorter_than_its_range() {
    require_bad_extent(|head| head.ram_bytes = 4096.into());
}

#[test]
fn an_extent_of_a_later_transaction() {
    require_bad_extent(|head| head.generation = (1 << 45).into());
}

#[test]
fn a_subvolume_without_a_root_directory() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    damaged.edit(inode_key(ROOT), |items, _| remove(items, |key, _| key.objectid == ROOT));
    let outcome = checked(damaged.volume.disks());
    let place = BtrfsFindingPlace::Inode { subvolume: TreeId::FS, ino: ROOT };
    let found: BTreeSet<_> =
        outcome.findings.iter().map(|finding| (finding.code, finding.place)).collect();
    assert!(found.contains(&(Code::MissingInode, place)), "{}", show(&outcome));
    assert!(progs_complaints(damaged.volume.disks()).is_some());
}

/// Whatever block of a subvolume is lost: what is missing may have been in it, so nothing is said
/// of inodes and names.
#[test]
fn blocks_that_are_lost() {
    let Some(judges) = judges::require() else { return };
    let recipe = Recipe::new().mib(256).mkfs("-n 4096 -m single").fill(handful::fill);
    let volume = DamagedVolume::of(recipe.make(&judges));
    let lost = std::cell::Cell::new(0);
    volume.without_each(TreeId::is_subvolume, |disks| {
        let outcome = checked(disks);
        let codes: BTreeSet<_> = outcome.findings.iter().map(|finding| finding.code).collect();
        assert!(codes.contains(&Code::TreeBlock), "{}", show(&outcome));
        let of_inodes = codes.iter().any(|code| {
            (Code::MissingInode..=Code::FileHole).contains(code)
                || (Code::EntryWithoutName..=Code::EntryType).contains(code)
                || *code == Code::Verity
        });
        assert!(!of_inodes, "{}", show(&outcome));
        lost.set(lost.get() + 1);
    });
    assert!(lost.get() > 20, "{} blocks", lost.get());
}
