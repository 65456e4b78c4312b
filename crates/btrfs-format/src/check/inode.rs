//! Checks of inodes and their names.

use super::dir::verify_name;
use super::item::{ItemChecked, ItemContext, ensure};
use crate::dir::extref_hash;
use crate::inode::{
    InodeExtrefItem, InodeItem, InodeRefItem, inode_extrefs, inode_flags, inode_refs,
};
use crate::key::objectid;
use crate::{Ino, Key, TreeId};

const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;

pub(super) fn verify_inode(item: &ItemContext<'_>) -> ItemChecked {
    item.size(size_of::<InodeItem>())?;
    verify_inode_key(item.key)?;
    let inode = InodeItem::view(item.data)?;
    // Nothing that is read depends on generations, and kernels before 2014 left wrong ones in
    // inodes that volumes carry to this day. The kernel of today refuses them.
    if item.geometry.is_strict {
        item.generation("generation", inode.generation.get())?;
        item.generation("transid", inode.transid.get())?;
    }
    verify_mode(item, inode)?;
    let unknown = inode.flags.get() & !inode_flags::READABLE;
    ensure!(unknown == 0, "unknown flags {unknown:#x}");
    Ok(())
}

/// Checks the key of an inode, which entries of directories have too.
pub(super) fn verify_inode_key(key: Key) -> ItemChecked {
    let id = key.objectid;
    ensure!(
        is_free(id) || id == objectid::ROOT_TREE_DIR || id == objectid::FREE_INO,
        "{id} is not an inode number"
    );
    ensure!(key.offset == 0, "key offset 0 expected");
    Ok(())
}

/// Whether inodes and subvolumes are given this number.
pub(super) fn is_free(id: u64) -> bool {
    (TreeId::FIRST_FREE.0..=TreeId::LAST_FREE.0).contains(&id)
}

fn verify_mode(item: &ItemContext<'_>, inode: &InodeItem) -> ItemChecked {
    let mode = inode.mode.get();
    ensure!(mode & !(S_IFMT | 0o7777) == 0, "mode {mode:#o} has unknown bits");
    // Old kernels wrote inodes without a type, of free-space caches above all, which are in the
    // root tree. Such a file cannot be read; those beside it can.
    let may_be_untyped = !item.geometry.is_strict || item.owner == TreeId::ROOT;
    let known = mode >> 12 == 0 && may_be_untyped
        || matches!(mode >> 12, 0o01 | 0o02 | 0o04 | 0o06 | 0o10 | 0o12 | 0o14);
    ensure!(known, "mode {mode:#o} names no file type");
    let links = inode.nlink.get();
    ensure!(mode & S_IFMT != S_IFDIR || links <= 1, "a directory with {links} links");
    Ok(())
}

pub(super) fn verify_refs(item: &ItemContext<'_>) -> ItemChecked {
    item.size_at_least(size_of::<InodeRefItem>())?;
    let directory = item.key.offset;
    for name in inode_refs(directory, item.data) {
        let name = name?.name;
        // A root directory has the name `..` in itself.
        if directory == item.key.objectid && name == b".." && is_root_directory(directory) {
            continue;
        }
        verify_name(name)?;
    }
    Ok(())
}

fn is_root_directory(id: u64) -> bool {
    id == Ino::ROOT_DIR.0 || id == objectid::ROOT_TREE_DIR
}

pub(super) fn verify_extrefs(item: &ItemContext<'_>) -> ItemChecked {
    item.size_at_least(size_of::<InodeExtrefItem>())?;
    for name in inode_extrefs(item.data) {
        let name = name?;
        verify_name(name.name)?;
        let hash = extref_hash(name.parent, name.name);
        ensure!(
            hash == item.key.offset,
            "the name {} in {} has the hash {hash}",
            name.name.escape_ascii(),
            name.parent
        );
    }
    Ok(())
}
