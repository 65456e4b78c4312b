//! Files by their paths, from the top level of a volume that is not open.

use offshoot_btrfs_format::dir::{dir_entries, name_hash};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileType, Result};

use crate::check::CheckedVolume;
use crate::tree::TreeRoot;

/// A regular file.
pub(super) struct FoundFile {
    /// The tree of its subvolume.
    pub(super) root: TreeRoot,
    pub(super) ino: u64,
    pub(super) inode: InodeItem,
}

/// The regular file at `path`. Symbolic links are not followed.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `EISDIR`, and `EINVAL` for another kind of file.
pub(super) fn find(volume: &CheckedVolume<'_>, path: &[u8]) -> Result<FoundFile> {
    let fail = |errno| Error::posix(errno, path.escape_ascii().to_string());
    let top = volume.tree(TreeId::FS).ok_or_else(|| fail(Errno::NOENT))?;
    let (mut root, mut ino) = (top, Ino::ROOT_DIR.0);
    let names = path.split(|&byte| byte == b'/');
    for name in names.filter(|name| !name.is_empty() && *name != b".") {
        let inode = inode_of(volume, root, ino).ok_or_else(|| fail(Errno::NOENT))?;
        if FileType::from_mode(inode.mode.get()) != Some(FileType::Directory) {
            return Err(fail(Errno::NOTDIR));
        }
        let location = entry(volume, root, ino, name).ok_or_else(|| fail(Errno::NOENT))?;
        if location.item_type == ItemType::ROOT_ITEM {
            let id = TreeId(location.objectid);
            root = volume.tree(id).ok_or_else(|| fail(Errno::NOENT))?;
            ino = Ino::ROOT_DIR.0;
        } else {
            ino = location.objectid;
        }
    }
    let inode = inode_of(volume, root, ino).ok_or_else(|| fail(Errno::NOENT))?;
    match FileType::from_mode(inode.mode.get()) {
        Some(FileType::Regular) => Ok(FoundFile { root, ino, inode }),
        Some(FileType::Directory) => Err(fail(Errno::ISDIR)),
        _ => Err(fail(Errno::INVAL)),
    }
}

fn inode_of(volume: &CheckedVolume<'_>, root: TreeRoot, ino: u64) -> Option<InodeItem> {
    let key = Key::new(ino, ItemType::INODE_ITEM, 0);
    volume.with_item(root, key, |data| InodeItem::view(data).ok().copied())
}

/// What the entry of a name leads to.
fn entry(volume: &CheckedVolume<'_>, root: TreeRoot, dir: u64, name: &[u8]) -> Option<Key> {
    let key = Key::new(dir, ItemType::DIR_ITEM, name_hash(name));
    volume.with_item(root, key, |data| {
        let found = dir_entries(data).flatten().find(|one| one.name == name);
        found.map(|one| one.location)
    })
}
