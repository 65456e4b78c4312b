//! Damage to names of inodes and entries of directories, each of one kind.

use offshoot_btrfs::BtrfsFindingCode as Code;
use offshoot_btrfs_format::dir::file_type;
use offshoot_btrfs_format::inode::inode_refs;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_testkit::btrfs::judges;

use crate::common::{EditedItems, ProgsVerdict};
use crate::inodes::{DamagedInodes, inode_key, inode_of, paths, remove};

/// Where the file type of the entry called `name` is in an item of entries.
fn type_offset(data: &[u8], name: &[u8]) -> Option<usize> {
    let found = data.windows(name.len()).position(|window| window == name)?;
    found.checked_sub(1)
}

#[test]
fn an_entry_whose_name_is_gone() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let (ino, other) = (damaged.ino("linked"), damaged.ino("other"));
    damaged.edit(inode_key(ino), |items, slot| {
        inode_of(items, slot).nlink = 1.into();
        remove(items, |key, _| *key == Key::new(ino, ItemType::INODE_REF, other));
    });
    let outcome = damaged.require_only(&[(Code::EntryWithoutName, other)], ProgsVerdict::Agrees);
    assert_eq!(paths(&outcome), ["/other".to_owned()].into());
}

#[test]
fn an_entry_that_leads_to_no_inode() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let (ino, dir) = (damaged.ino("small"), damaged.ino("dir"));
    damaged.edit(inode_key(ino), |items, _| {
        remove(items, |key, _| key.objectid == ino);
    });
    damaged.require_only(&[(Code::EntryWithoutName, dir)], ProgsVerdict::Agrees);
}

#[test]
fn a_name_whose_entry_is_gone() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let (ino, other) = (damaged.ino("linked"), damaged.ino("other"));
    damaged.edit(inode_key(other), |items, slot| {
        inode_of(items, slot).size = 0.into();
        let is_entry = |key: &Key, _: &[u8]| {
            key.objectid == other
                && [ItemType::DIR_ITEM, ItemType::DIR_INDEX].contains(&key.item_type)
        };
        remove(items, is_entry);
    });
    damaged.require_only(&[(Code::NameWithoutEntry, ino)], ProgsVerdict::Agrees);
}

#[test]
fn a_name_with_another_index_than_its_entry() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let (ino, dir) = (damaged.ino("small"), damaged.ino("dir"));
    damaged.edit(Key::new(ino, ItemType::INODE_REF, dir), |items, slot| {
        let data = &mut items[slot].1;
        let index = inode_refs(dir, data).next().expect("a name").expect("a name").index;
        data[..8].copy_from_slice(&(index + 100).to_le_bytes());
    });
    damaged.require_only(&[(Code::NameWithoutEntry, ino)], ProgsVerdict::Agrees);
}

#[test]
fn a_name_that_differs_from_its_entry() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let (ino, dir) = (damaged.ino("small"), damaged.ino("dir"));
    damaged.edit(Key::new(ino, ItemType::INODE_REF, dir), |items, slot| {
        *items[slot].1.last_mut().expect("a name") = b'L';
    });
    let expected = [(Code::EntryWithoutName, dir), (Code::NameWithoutEntry, ino)];
    damaged.require_only(&expected, ProgsVerdict::Agrees);
}

#[test]
fn an_entry_that_is_not_found_by_its_hash() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let dir = damaged.ino("dir");
    damaged.edit(inode_key(dir), |items, _| {
        let is_entry = |key: &Key, data: &[u8]| {
            (key.objectid, key.item_type) == (dir, ItemType::DIR_ITEM) && data.ends_with(b"small")
        };
        remove(items, is_entry);
    });
    damaged.require_only(&[(Code::EntryItems, dir)], ProgsVerdict::Agrees);
}

#[test]
fn an_entry_with_two_file_types() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let dir = damaged.ino("dir");
    damaged.edit(inode_key(dir), |items, _| {
        set_types(items, ItemType::DIR_ITEM, dir, b"small");
    });
    damaged.require_only(&[(Code::EntryItems, dir)], ProgsVerdict::Agrees);
}

#[test]
fn an_entry_with_another_file_type_than_its_inode() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedInodes::new(&judges);
    let (dir, ino) = (damaged.ino("dir"), damaged.ino("small"));
    damaged.edit(inode_key(dir), |items, _| {
        set_types(items, ItemType::DIR_ITEM, dir, b"small");
        set_types(items, ItemType::DIR_INDEX, dir, b"small");
    });
    damaged.require_only(&[(Code::EntryType, ino)], ProgsVerdict::Agrees);
}

/// Makes an entry that of a fifo, in the items of one type.
fn set_types(items: &mut EditedItems, item_type: ItemType, dir: u64, name: &[u8]) {
    let mut changed = 0;
    for (key, data) in items {
        if (key.objectid, key.item_type) == (dir, item_type)
            && let Some(at) = type_offset(data, name)
        {
            data[at] = file_type::FIFO;
            changed += 1;
        }
    }
    assert_eq!(changed, 1);
}
