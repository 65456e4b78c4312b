//! Making files, directories, special files and symbolic links.

use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::edit::{ITEM_SIZE, leaf_capacity};
use offshoot_btrfs_format::file_extent::{FileExtentHead, extent_type};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, Errno, Error, FileId, FileType, NewFile, NewNode, Result};
use zerocopy::{FromZeros, IntoBytes};

use super::changes::{Changes, timespec};
use super::compression::{PROPERTY, inherited};
use super::entries::{EntryTarget, require_name};
use super::evict::orphan_key;
use super::subvolume::{Subvolume, writable};
use super::{acl, xattr};
use crate::inode::Rooms;
use crate::space::Claim;
use crate::transaction::Obstacle;

/// The most items that making a file changes, beside access control lists: a directory item, an
/// index and the inode of the directory; the inode, its name, and the target of a link or the
/// compression property. A file without a name changes fewer.
const NEW_ITEMS: u64 = 6;

/// The kind of a new file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewFileKind<'a> {
    /// A regular file or a special one.
    Node(NewNode),
    /// A directory.
    Directory,
    /// A symbolic link with this target.
    Symlink(&'a [u8]),
}

impl NewFileKind<'_> {
    fn file_type(self) -> FileType {
        match self {
            Self::Node(node) => node.file_type,
            Self::Directory => FileType::Directory,
            Self::Symlink(_) => FileType::Symlink,
        }
    }

    fn size(self) -> u64 {
        if let Self::Symlink(target) = self { target.len() as u64 } else { 0 }
    }

    /// The device number as it is stored: 20 bits of minor below 12 bits of major.
    fn rdev(self) -> u64 {
        match self {
            Self::Node(NewNode { rdev: (major, minor), .. }) => {
                u64::from(major) << 20 | u64::from(minor)
            }
            _ => 0,
        }
    }

    /// Refuses arguments that are invalid in themselves.
    fn require_valid(self, volume: &Rooms) -> Result<()> {
        match self {
            Self::Directory => Ok(()),
            Self::Symlink(target) => require_target(volume, target),
            Self::Node(NewNode { file_type, rdev: (major, minor) }) => {
                let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
                let errno = match file_type {
                    FileType::Directory => Errno::PERM,
                    FileType::Symlink => Errno::INVAL,
                    _ if !is_device && (major, minor) != (0, 0) => Errno::INVAL,
                    _ if major >> 12 != 0 || minor >> 20 != 0 => Errno::INVAL,
                    _ => return Ok(()),
                };
                let what = format!("a node of type {file_type:?} with the number {major}:{minor}");
                Err(Error::posix(errno, what))
            }
        }
    }
}

/// Requires that the target of a link fits inline, is shorter than a sector, and is short enough
/// for system calls.
fn require_target(volume: &Rooms, target: &[u8]) -> Result<()> {
    const PATH_MAX: usize = 4096;
    let superblock = volume.superblock();
    let inline = leaf_capacity(superblock.node_size) - ITEM_SIZE - size_of::<FileExtentHead>();
    let most = inline.min(PATH_MAX - 1).min(superblock.sector_size as usize - 1);
    let errno = match target {
        [] => Errno::NOENT,
        _ if target.len() > most => Errno::NAMETOOLONG,
        _ if target.contains(&0) => Errno::INVAL,
        _ => return Ok(()),
    };
    Err(Error::posix(errno, format!("a link to {} bytes", target.len())))
}

/// Makes a file.
pub(crate) fn make(
    volume: &Rooms,
    place: EntryPlace<'_>,
    kind: NewFileKind<'_>,
    new: &NewFile,
) -> Result<FileId> {
    if matches!(place.name, b"." | b"..") {
        return Err(Error::posix(Errno::EXIST, "the directory itself"));
    }
    require_name(place.name)?;
    kind.require_valid(volume)?;
    let subvolume = writable(volume, place.dir)?;
    let _locks = volume.inodes.lock(&[place.dir]);
    let acl = acl::inherited(volume, place.dir, kind.file_type(), new)?;
    let handle = volume.join_for(NEW_ITEMS + acl.items(), Claim::Work)?;
    let mut changes = Changes::new(&handle, place.dir)?;
    changes.directory(place.dir)?;
    let file = add_named(&mut changes, &subvolume, place, kind, new, acl)?;
    if matches!(kind, NewFileKind::Directory) {
        volume.inodes.directory_made(file);
    }
    let is_durable = changes.is_synchronous();
    changes.apply()?;
    drop(handle);
    volume.commit_if(is_durable)?;
    Ok(file)
}

/// Makes a regular file without a name (`O_TMPFILE`). It is open once.
pub(crate) fn make_unnamed(
    volume: &Rooms,
    dir: FileId,
    is_linkable: bool,
    new: &NewFile,
) -> Result<FileId> {
    let kind = NewFileKind::Node(NewNode { file_type: FileType::Regular, rdev: (0, 0) });
    let subvolume = writable(volume, dir)?;
    let _locks = volume.inodes.lock(&[dir]);
    let acl = acl::inherited(volume, dir, kind.file_type(), new)?;
    let handle = volume.join_for(NEW_ITEMS + acl.items(), Claim::Work)?;
    let mut changes = Changes::new(&handle, dir)?;
    changes.directory(dir)?;
    let file = FileId { dev: dir.dev, ino: volume.inodes.take_number(dir, &subvolume)? };
    add_file(&mut changes, file, kind, new, acl, dir)?;
    changes.put_new(orphan_key(file.ino), Vec::new());
    changes.adjust_inode(file, |item| item.nlink = 0.into())?;
    // The file counts as open before a sweep for orphans can find it.
    let mut locks = volume.inodes.try_lock(file).expect("nobody else knows the new number");
    (*locks.opens(file), *locks.is_linkable(file)) = (1, is_linkable);
    // While a handle exists, no subvolume ends.
    let made = changes.apply().and_then(|()| handle.tree(TreeId(dir.dev))?.open_file());
    if made.is_err() {
        (*locks.opens(file), *locks.is_linkable(file)) = (0, false);
    }
    made.map(|()| file)
}

/// Adds a new file with its first name. Its directory is locked.
fn add_named(
    changes: &mut Changes<'_, '_>,
    subvolume: &Subvolume,
    place: EntryPlace<'_>,
    kind: NewFileKind<'_>,
    new: &NewFile,
    acl: acl::InheritedAcl,
) -> Result<FileId> {
    let index = changes.next_index(place.dir)?;
    let ino = changes.volume().inodes.take_number(place.dir, subvolume)?;
    let file = FileId { dev: place.dir.dev, ino };
    changes.add_entry(place, EntryTarget::inode(ino, kind.file_type()), index, new.at)?;
    changes.first_name(ino, place, index);
    add_file(changes, file, kind, new, acl, place.dir)?;
    Ok(file)
}

/// A character device 0:0, which a move leaves at the old name.
pub(crate) struct Whiteout {
    new: NewFile,
    acl: acl::InheritedAcl,
}

impl Whiteout {
    const NODE: NewNode = NewNode { file_type: FileType::CharDevice, rdev: (0, 0) };

    /// A whiteout that begins with `new`, in `dir`, which is locked.
    pub(crate) fn new(volume: &Rooms, dir: FileId, new: NewFile) -> Result<Self> {
        let acl = acl::inherited(volume, dir, FileType::CharDevice, &new)?;
        Ok(Self { new, acl })
    }

    /// The most items that [`put`](Self::put) changes.
    pub(crate) fn items(&self) -> u64 {
        NEW_ITEMS + self.acl.items()
    }

    /// Makes the whiteout at `place`. An fsync commits then: a log of the moved file alone would
    /// leave its old name empty.
    pub(crate) fn put(
        self,
        changes: &mut Changes<'_, '_>,
        subvolume: &Subvolume,
        place: EntryPlace<'_>,
    ) -> Result<()> {
        changes.handle().obstruct(Obstacle::Whiteout);
        let kind = NewFileKind::Node(Self::NODE);
        add_named(changes, subvolume, place, kind, &self.new, self.acl).map(drop)
    }
}

/// Adds all items of a new file in `dir`, except its name.
fn add_file(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    kind: NewFileKind<'_>,
    new: &NewFile,
    acl: acl::InheritedAcl,
    dir: FileId,
) -> Result<()> {
    let dir_item = changes.inode(dir)?;
    let new = NewFile { permissions: acl.permissions, ..*new };
    add_inode(changes, file, kind, &new, &dir_item)?;
    acl.put(changes, file)?;
    inherit_compression(changes, file, kind, dir, &dir_item)
}

fn add_inode(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    kind: NewFileKind<'_>,
    new: &NewFile,
    dir: &InodeItem,
) -> Result<()> {
    let (at, generation) = (timespec(new.at)?, changes.generation().0);
    let is_link = matches!(kind, NewFileKind::Symlink(_));
    let permissions = if is_link { 0o777 } else { new.permissions & 0o7777 };
    let mut item = InodeItem::new_zeroed();
    item.generation = generation.into();
    item.transid = generation.into();
    item.size = kind.size().into();
    item.nbytes = kind.size().into();
    item.nlink = 1.into();
    item.uid = new.uid.into();
    item.gid = new.gid.into();
    item.mode = (kind.file_type().mode_bits() | permissions).into();
    item.rdev = kind.rdev().into();
    let mut flags = inherited_flags(dir.flags.get(), kind.file_type());
    if kind.file_type() == FileType::Regular {
        flags |= changes.volume().options.new_files.flags();
    }
    item.flags = flags.into();
    (item.atime, item.ctime, item.mtime, item.otime) = (at, at, at, at);
    changes.new_inode(file.ino, item);
    if let NewFileKind::Symlink(target) = kind {
        let head = FileExtentHead {
            generation: generation.into(),
            ram_bytes: kind.size().into(),
            compression: Compression::None as u8,
            encryption: 0,
            other_encoding: 0.into(),
            extent_type: extent_type::INLINE,
        };
        let extent = [head.as_bytes(), target].concat();
        changes.put_new(Key::new(file.ino, ItemType::EXTENT_DATA, 0), extent);
    }
    Ok(())
}

/// The flags that a new file inherits from a directory with the flags `dir`.
fn inherited_flags(dir: u64, file_type: FileType) -> u64 {
    let mut flags = 0;
    if dir & inode_flags::NOCOMPRESS != 0 {
        flags |= inode_flags::NOCOMPRESS;
    } else if dir & inode_flags::COMPRESS != 0 {
        flags |= inode_flags::COMPRESS;
    }
    if dir & inode_flags::NODATACOW != 0 {
        flags |= inode_flags::NODATACOW;
        if file_type == FileType::Regular {
            flags |= inode_flags::NODATASUM;
        }
    }
    flags
}

/// Gives a new file the compression property of its directory.
fn inherit_compression(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    kind: NewFileKind<'_>,
    dir: FileId,
    dir_item: &InodeItem,
) -> Result<()> {
    let says = dir_item.flags.get() & (inode_flags::NOCOMPRESS | inode_flags::COMPRESS) != 0;
    let stores = matches!(kind.file_type(), FileType::Regular | FileType::Directory);
    if !says || !stores {
        return Ok(());
    }
    match super::xattr(changes.volume(), dir, PROPERTY) {
        Ok(value) => {
            if let Some(value) = inherited(&value) {
                let key = Key::new(file.ino, ItemType::XATTR_ITEM, name_hash(PROPERTY));
                let item = xattr::encode(changes.generation().0, PROPERTY, value);
                changes.put_new(key, item);
            }
            Ok(())
        }
        Err(Error::Posix { errno: Errno::NODATA, .. }) => Ok(()),
        Err(e) => Err(e),
    }
}
