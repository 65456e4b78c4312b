//! Making subvolumes.

use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::encode;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, FileType, NewFile, Place, Result};
use uuid::Uuid;
use zerocopy::{FromZeros, IntoBytes};

use crate::inode::changes::{Changes, timespec};
use crate::inode::entries::{Target, require_name};
use crate::inode::subvolume::writable;
use crate::inode::xattr::COMPRESSION;
use crate::inode::{self, ROOT_DIR, acl};
use crate::space::Claim;
use crate::tree::TreeRoot;
use crate::volume::Engine;

/// Items that a new subvolume changes at most: a directory item, an index and the inode of the directory; its root item, both
/// references and two UUIDs; its leaf, and the root of the tree that it stands in.
pub(super) const NEW_ITEMS: u64 = 10;

/// What the kernel puts as the size of the inode that a root item carries.
const ROOT_INODE_SIZE: u64 = 3;

/// What can be wrong with the name of a new subvolume.
pub(super) fn require_new_name(name: &[u8]) -> Result<()> {
    if matches!(name, b"." | b"..") {
        return Err(Error::posix(Errno::EXIST, "the directory itself"));
    }
    require_name(name)
}

/// Makes an empty subvolume.
pub(crate) fn create(volume: &Engine, place: Place<'_>, new: &NewFile) -> Result<TreeId> {
    require_new_name(place.name)?;
    timespec(new.at)?;
    writable(volume, place.dir)?;
    let _locks = volume.inodes.lock(&[place.dir]);
    let handle = volume.join_for(NEW_ITEMS, Claim::Work)?;
    let mut changes = Changes::new(&handle, place.dir)?;
    changes.directory(place.dir)?;
    let index = changes.next_index(place.dir)?;
    let id = volume.live()?.subvolumes.take_id(volume)?;
    changes.add_entry(place, Target::subvolume(id), index, new.at)?;
    // The kernel takes the umask off in any case, and has the list after that.
    let permissions = new.permissions & !new.umask.unwrap_or(0);
    let new = NewFile { permissions, ..*new };
    let acl = acl::inherited(volume, place.dir, FileType::Directory, &new)?;
    let new = NewFile { permissions: acl.permissions, ..new };
    let items = directory(volume, handle.generation().0, place.dir, &new, acl.lists)?;
    let is_durable = changes.is_synchronous();
    handle.whole(|| {
        let root = handle.new_root(id, &items)?;
        let item = root_item(volume, root, &new)?;
        handle.add_subvolume(Key::new(id.0, ItemType::ROOT_ITEM, 0), &item, place, index)?;
        changes.apply()
    })?;
    drop(handle);
    volume.commit_if(is_durable)?;
    Ok(id)
}

/// The items of the root directory of a new subvolume in the subvolume of `dir`, with these attributes. It has the compression of that subvolume's root directory, as
/// the kernel has it, and no other flags.
fn directory(
    volume: &Engine,
    generation: u64,
    dir: FileId,
    new: &NewFile,
    mut xattrs: Vec<(&'static [u8], Vec<u8>)>,
) -> Result<Vec<(Key, Vec<u8>)>> {
    const COMPRESSION_FLAGS: u64 = inode_flags::COMPRESS | inode_flags::NOCOMPRESS;
    let at = timespec(new.at)?;
    let parent = FileId { ino: ROOT_DIR, ..dir };
    let compression = match inode::xattr(volume, parent, COMPRESSION) {
        Ok(value) => Some(value),
        Err(Error::Posix { errno: Errno::NODATA, .. }) => None,
        Err(e) => return Err(e),
    };
    let mut item = InodeItem {
        generation: generation.into(),
        transid: generation.into(),
        nlink: 1.into(),
        uid: new.uid.into(),
        gid: new.gid.into(),
        mode: (FileType::Directory.mode_bits() | new.permissions & 0o7777).into(),
        atime: at,
        ctime: at,
        mtime: at,
        otime: at,
        ..InodeItem::new_zeroed()
    };
    if let Some(value) = compression {
        let flags = inode::inode_item(volume, inode::tree_of(volume, parent)?, parent)?.flags.get();
        item.flags = (flags & COMPRESSION_FLAGS).into();
        xattrs.push((COMPRESSION, value));
    }
    let mut items = vec![
        (Key::new(ROOT_DIR, ItemType::INODE_ITEM, 0), item.as_bytes().to_vec()),
        (Key::new(ROOT_DIR, ItemType::INODE_REF, ROOT_DIR), encode::inode_ref(0, b"..")),
    ];
    items.extend(xattrs.iter().map(|(name, value)| {
        let key = Key::new(ROOT_DIR, ItemType::XATTR_ITEM, name_hash(name));
        (key, inode::xattr::encode(generation, name, value))
    }));
    items.sort_by_key(|(key, _)| *key);
    Ok(items)
}

fn root_item(volume: &Engine, root: TreeRoot, new: &NewFile) -> Result<RootItem> {
    let (at, node_size) = (timespec(new.at)?, u64::from(volume.superblock().node_size));
    let generation = root.generation.0.into();
    Ok(RootItem {
        inode: InodeItem {
            generation: 1.into(),
            size: ROOT_INODE_SIZE.into(),
            nbytes: node_size.into(),
            nlink: 1.into(),
            mode: (FileType::Directory.mode_bits() | 0o755).into(),
            flags: inode_flags::ROOT_ITEM_INIT.into(),
            ..InodeItem::new_zeroed()
        },
        generation,
        root_dirid: ROOT_DIR.into(),
        bytenr: root.logical.0.into(),
        bytes_used: node_size.into(),
        refs: 1.into(),
        level: root.level,
        generation_v2: generation,
        uuid: Uuid::new_v4().into_bytes(),
        ctransid: generation,
        otransid: generation,
        ctime: at,
        otime: at,
        ..RootItem::new_zeroed()
    })
}
