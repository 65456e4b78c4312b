//! Checks of directory entries, extended attributes, and the directory ranges of a log.

use super::inode::verify_inode_key;
use super::item::{ItemChecked, ItemContext, ensure};
use super::root::is_fs_tree;
use crate::dir::{DirItemEntry, NAME_LEN, dir_entries, file_type, name_hash};
use crate::space::DirLogItem;
use crate::{ItemType, Key};

/// Checks that a file name can be one component of a path, and is neither `.` nor `..`.
pub(super) fn verify_name(name: &[u8]) -> ItemChecked {
    verify_name_length(name)?;
    ensure!(
        !name.iter().any(|&byte| byte == 0 || byte == b'/'),
        "the name {} holds a slash or a NUL",
        name.escape_ascii()
    );
    ensure!(name != b"." && name != b"..", "the name is {}", name.escape_ascii());
    Ok(())
}

fn verify_name_length(name: &[u8]) -> ItemChecked {
    ensure!(
        (1..=NAME_LEN).contains(&name.len()),
        "a name of 1 to {NAME_LEN} bytes expected, {} found",
        name.len()
    );
    Ok(())
}

pub(super) fn verify(item: &ItemContext<'_>) -> ItemChecked {
    let mut count = 0;
    for entry in dir_entries(item.data) {
        let entry = entry?;
        if item.key.item_type == ItemType::XATTR_ITEM {
            verify_xattr(item, &entry)?;
        } else {
            verify_entry(item, &entry)?;
        }
        if item.key.item_type != ItemType::DIR_INDEX {
            let hash = name_hash(entry.name);
            ensure!(
                hash == item.key.offset,
                "the name {} has the hash {hash}",
                entry.name.escape_ascii()
            );
        }
        count += 1;
    }
    // A DIR_INDEX holds exactly one entry.
    ensure!(
        item.key.item_type != ItemType::DIR_INDEX || count == 1,
        "one entry expected, {count} found"
    );
    Ok(())
}

fn verify_xattr(item: &ItemContext<'_>, entry: &DirItemEntry<'_>) -> ItemChecked {
    ensure!(
        entry.file_type == file_type::XATTR,
        "type {} of an extended attribute expected, {} found",
        file_type::XATTR,
        entry.file_type
    );
    verify_name_length(entry.name)?;
    ensure!(!entry.name.contains(&0), "the name {} holds a NUL", entry.name.escape_ascii());
    // It leads nowhere: the kernel does not read a leaf where its location is neither zero nor that
    // of a subvolume.
    let target = entry.location.item_type;
    ensure!(
        entry.location == Key::MIN
            || target == ItemType::INODE_ITEM && !item.geometry.is_strict
            || target == ItemType::ROOT_ITEM,
        "an extended attribute leads to {}",
        entry.location
    );
    verify_location(item, entry.location)
}

/// Checks where an entry leads.
fn verify_location(item: &ItemContext<'_>, location: Key) -> ItemChecked {
    if !item.geometry.is_strict {
        return Ok(());
    }
    match location.item_type {
        ItemType::INODE_ITEM => {
            ensure!(verify_inode_key(location).is_ok(), "leads to {location}, which is no inode");
            Ok(())
        }
        ItemType::ROOT_ITEM => {
            ensure!(is_fs_tree(location.objectid), "leads to {location}, which is no subvolume");
            Ok(())
        }
        _ => Ok(()),
    }
}

fn verify_entry(item: &ItemContext<'_>, entry: &DirItemEntry<'_>) -> ItemChecked {
    let kind = entry.file_type & !file_type::ENCRYPTED;
    ensure!(
        (file_type::REG_FILE..=file_type::SYMLINK).contains(&kind),
        "type {} is none of a directory entry",
        entry.file_type
    );
    ensure!(entry.data.is_empty(), "{} bytes of data after the name", entry.data.len());
    verify_name(entry.name)?;
    let target = entry.location.item_type;
    ensure!(
        target == ItemType::INODE_ITEM || target == ItemType::ROOT_ITEM,
        "leads to {}, neither an inode nor a subvolume",
        entry.location
    );
    verify_location(item, entry.location)
}

pub(super) fn verify_log(item: &ItemContext<'_>) -> ItemChecked {
    item.size(size_of::<DirLogItem>())
}
