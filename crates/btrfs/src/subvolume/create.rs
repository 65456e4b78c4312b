//! Making subvolumes.

use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::encode;
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, Errno, Error, FileId, FileType, NewFile, Result};
use zerocopy::{FromZeros, IntoBytes};

use super::MadeSubvolume;
use super::SubvolumeState;
use super::items::{add_subvolume, uuids_with};
use crate::inode::Rooms;
use crate::inode::changes::{Changes, timespec};
use crate::inode::compression::{PROPERTY, inherited};
use crate::inode::entries::{EntryTarget, require_name};
use crate::inode::subvolume::writable;
use crate::inode::{self, ROOT_DIR, acl};
use crate::space::Claim;
use crate::transaction::{NewGroup, Obstacle};

/// The most items that a new subvolume changes: a directory item, an index and the inode of the
/// directory; its root item, both references and two UUIDs; its leaf, and the root of the tree in
/// which it is attached.
pub(super) const NEW_ITEMS: u64 = 10;

/// The size that the kernel stores in the inode of a root item.
const ROOT_INODE_SIZE: u64 = 3;

/// Refuses invalid names of a new subvolume.
pub(super) fn require_new_name(name: &[u8]) -> Result<()> {
    if matches!(name, b"." | b"..") {
        return Err(Error::posix(Errno::EXIST, "the directory itself"));
    }
    require_name(name)
}

/// Makes an empty subvolume.
pub(crate) fn create(
    volume: &Rooms,
    subvolumes: &SubvolumeState,
    place: EntryPlace<'_>,
    new: &NewFile,
) -> Result<TreeId> {
    require_new_name(place.name)?;
    timespec(new.at)?;
    writable(volume, place.dir)?;
    let _locks = volume.inodes.lock(&[place.dir]);
    // The kernel always applies the umask, and the access control list after that.
    let permissions = new.permissions & !new.umask.unwrap_or(0);
    let new = NewFile { permissions, ..*new };
    let acl = acl::inherited(volume, place.dir, FileType::Directory, &new)?;
    let new = NewFile { permissions: acl.permissions, ..new };
    let (flags, compression) = compression(volume, place.dir)?;
    let xattrs: Vec<_> = acl.lists.into_iter().chain(compression).collect();
    let group = NewGroup::below(volume, TreeId(place.dir.dev))?;

    let handle = volume.join_for(NEW_ITEMS + group.items() + xattrs.len() as u64, Claim::Work)?;
    let mut changes = Changes::new(&handle, place.dir)?;
    changes.directory(place.dir)?;
    let index = changes.next_index(place.dir)?;
    let id = subvolumes.take_id()?;
    handle.obstruct(Obstacle::Subvolumes);
    changes.add_entry(place, EntryTarget::subvolume(id), index, new.at)?;
    let generation = handle.generation();
    let items = directory(generation, flags, &new)?;
    let made = MadeSubvolume { id, source: None, generation, place, at: new.at };
    let mut item = root_item(volume, &made, &new)?;
    let uuids = uuids_with(volume, id, &item)?;
    let is_durable = changes.is_synchronous();
    handle.all_or_stop(|| {
        item.bytenr = handle.new_root(id, &items)?.logical.0.into();
        let key = Key::new(id.0, ItemType::ROOT_ITEM, 0);
        add_subvolume(&handle, key, &item, place, index, uuids, &group)?;
        // They may not fit into the one leaf of a new tree.
        for (name, value) in &xattrs {
            let key = Key::new(ROOT_DIR, ItemType::XATTR_ITEM, name_hash(name));
            let data = inode::xattr::encode(generation.0, name, value);
            handle.change(id, |tree| tree.insert(key, &data))?;
        }
        changes.apply()
    })?;
    drop(handle);
    volume.commit_if(is_durable)?;
    Ok(id)
}

/// An extended attribute.
type NewXattr = (&'static [u8], Vec<u8>);

/// The flags and the attribute for the compression of the root directory of a new subvolume in the
/// subvolume of `dir`. As in the kernel, it inherits the compression property of that subvolume's
/// root directory, and no flag but COMPRESS, not even NOCOMPRESS.
fn compression(volume: &Rooms, dir: FileId) -> Result<(u64, Option<NewXattr>)> {
    let parent = FileId { ino: ROOT_DIR, ..dir };
    match inode::xattr(volume, parent, PROPERTY) {
        Ok(value) => Ok(inherited(&value)
            .map_or((0, None), |name| (inode_flags::COMPRESS, Some((PROPERTY, name.to_vec()))))),
        Err(Error::Posix { errno: Errno::NODATA, .. }) => Ok((0, None)),
        Err(e) => Err(e),
    }
}

/// The items of the root directory of a new subvolume, without its attributes.
fn directory(generation: Generation, flags: u64, new: &NewFile) -> Result<[(Key, Vec<u8>); 2]> {
    let at = timespec(new.at)?;
    let item = InodeItem {
        generation: generation.0.into(),
        transid: generation.0.into(),
        nlink: 1.into(),
        uid: new.uid.into(),
        gid: new.gid.into(),
        mode: (FileType::Directory.mode_bits() | new.permissions & 0o7777).into(),
        flags: flags.into(),
        atime: at,
        ctime: at,
        mtime: at,
        otime: at,
        ..InodeItem::new_zeroed()
    };
    Ok([
        (Key::new(ROOT_DIR, ItemType::INODE_ITEM, 0), item.as_bytes().to_vec()),
        (Key::new(ROOT_DIR, ItemType::INODE_REF, ROOT_DIR), encode::inode_ref(0, b"..")),
    ])
}

/// The root item of a new subvolume, without the address of its root.
fn root_item(volume: &Rooms, made: &MadeSubvolume<'_>, new: &NewFile) -> Result<RootItem> {
    let (at, node_size) = (timespec(new.at)?, u64::from(volume.superblock().node_size));
    let generation = made.generation.0.into();
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
        bytes_used: node_size.into(),
        refs: 1.into(),
        generation_v2: generation,
        uuid: made.uuid(volume).into_bytes(),
        ctransid: generation,
        otransid: generation,
        ctime: at,
        otime: at,
        ..RootItem::new_zeroed()
    })
}
