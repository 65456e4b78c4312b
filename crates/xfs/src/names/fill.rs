//! What the inode of a new file holds.

use offshoot_vfs::{Errno, Error, FileType, NewFile, Result, Structure};
use offshoot_xfs_format::dir::file_type as entry_type;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::{
    XfsForkFormat, XfsInodeCore, XfsInodeFlags as Flags, XfsInodeFlags2 as Flags2, device_field,
};
use offshoot_xfs_format::symlink::MAX_LEN;
use offshoot_xfs_format::{Ino, XfsGeometry};

use super::change::{NameTransaction, Touched};
use crate::dir::change::make_empty;
use crate::inode::xfs_time;
use crate::trans::{ChangedFork, ForkName};

/// Where the attribute fork of a new file begins, in units of 8 bytes behind the core: behind room
/// for 12 extents, or behind the number of a device, as from the kernel.
const FORK_OFFSET: u8 = 24;
const DEVICE_FORK_OFFSET: u8 = 1;

/// The least bytes of an attribute fork.
const LEAST_ATTRIBUTES: usize = 4 + 16 * 2;

/// What kind of file is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XfsNewKind<'a> {
    Regular,
    Directory,
    /// A symbolic link to this target.
    Symlink(&'a [u8]),
    /// A device with its major and minor number, a pipe, or a socket.
    Node(FileType, (u32, u32)),
}

impl XfsNewKind<'_> {
    pub(super) fn file_type(self) -> FileType {
        match self {
            Self::Regular => FileType::Regular,
            Self::Directory => FileType::Directory,
            Self::Symlink(_) => FileType::Symlink,
            Self::Node(file_type, _) => file_type,
        }
    }

    pub(super) fn is_directory(self) -> bool {
        self == Self::Directory
    }

    /// The links that the file has with its first name.
    pub(super) fn links(self) -> u32 {
        if self.is_directory() { 2 } else { 1 }
    }

    /// The type in the entries of directories.
    pub(super) fn entry_type(self) -> u8 {
        entry_type::of_mode(self.type_bits())
    }

    /// The type in `mode`.
    fn type_bits(self) -> u16 {
        u16::try_from(self.file_type().mode_bits()).unwrap_or(0)
    }

    /// Proves that such a file can be made.
    ///
    /// # Errors
    /// `ENOENT` for an empty target, `ENAMETOOLONG` for one of 1,024 bytes or more, `EINVAL` for
    /// one with a NUL byte, for numbers that no device has, and for a node of another type.
    pub(super) fn check(self) -> Result<()> {
        let errno = match self {
            Self::Symlink(b"") => Errno::NOENT,
            Self::Symlink(target) if target.len() >= MAX_LEN => Errno::NAMETOOLONG,
            Self::Symlink(target) if target.contains(&0) => Errno::INVAL,
            Self::Node(FileType::CharDevice | FileType::BlockDevice, (major, minor))
                if device_field(major, minor).is_some() =>
            {
                return Ok(());
            }
            Self::Regular
            | Self::Directory
            | Self::Symlink(_)
            | Self::Node(FileType::Fifo | FileType::Socket, (0, 0)) => return Ok(()),
            Self::Node(..) => Errno::INVAL,
        };
        Err(Error::posix(errno, format!("a new file of type {:?}", self.file_type())))
    }

    /// Where the attribute fork begins. Links have one from the start only on a volume whose files
    /// always get an attribute.
    fn fork_offset(self, geometry: &XfsGeometry) -> Option<u8> {
        match self {
            Self::Regular | Self::Directory => Some(FORK_OFFSET),
            Self::Node(..) => Some(DEVICE_FORK_OFFSET),
            Self::Symlink(_) => geometry.layout.contains(XfsLayout::PARENTS).then_some(FORK_OFFSET),
        }
    }

    /// The target, if it has blocks of its own: it leaves the inode room for attributes.
    pub(super) fn remote_target(&self, geometry: &XfsGeometry) -> Option<&[u8]> {
        let room = XfsInodeCore::literal_bytes(geometry);
        let offset = self.fork_offset(geometry).map(usize::from);
        let offset = offset.unwrap_or(room.saturating_sub(LEAST_ATTRIBUTES) / 8);
        match self {
            Self::Symlink(target) if target.len() > 8 * offset => Some(target),
            _ => None,
        }
    }

    /// The data fork, without the blocks that it gets later.
    fn fork(self, geometry: &XfsGeometry) -> ChangedFork {
        match self {
            Self::Symlink(target) if self.remote_target(geometry).is_none() => {
                ChangedFork::Local(target.to_vec())
            }
            Self::Node(_, (major, minor)) => {
                ChangedFork::Device(device_field(major, minor).unwrap_or(0))
            }
            _ => ChangedFork::Extents(Vec::new()),
        }
    }
}

/// A file that is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewInode<'a> {
    pub(super) kind: XfsNewKind<'a>,
    pub(super) new: &'a NewFile,
    /// The permissions, after those that the directory takes away.
    pub(super) permissions: u32,
    /// The links that it begins with.
    pub(super) links: u32,
}

impl NameTransaction<'_> {
    /// Fills an inode that was just taken for a file in `dir`.
    pub(super) fn fill(&mut self, ino: Ino, dir: Ino, what: &NewInode<'_>) -> Result<()> {
        let (geometry, parent) = (self.t.geometry(), self.core(dir)?);
        let inode = self.t.inode(ino)?;
        let old = *inode.core();
        if !old.is_free() {
            let problem = format!("inode {ino}: the tree of inodes says that it is free");
            return Err(Error::corrupt(Structure::InodeCore, problem));
        }
        *inode.core_mut() = core_of(geometry, ino, what, (&old, &parent));
        inode.set_fork(ForkName::Data, what.kind.fork(geometry));
        if let Some(offset) = what.kind.fork_offset(geometry) {
            inode.set_fork_offset(offset);
        }
        if what.kind.is_directory() {
            make_empty(&mut self.t, ino, dir)?;
        }
        if let Some(target) = what.kind.remote_target(geometry) {
            self.store_target(ino, target)?;
        }
        self.touch(ino, Touched::Contents);
        Ok(())
    }
}

/// The core of a new file in a directory with the core `parent`, in an inode that was `old`.
fn core_of(
    geometry: &XfsGeometry,
    ino: Ino,
    what: &NewInode<'_>,
    (old, parent): (&XfsInodeCore, &XfsInodeCore),
) -> XfsInodeCore {
    let mut core = XfsInodeCore::fresh(geometry, ino, old.generation.get());
    let permissions = u16::try_from(what.permissions & 0o7777).unwrap_or(0);
    core.mode = (what.kind.type_bits() | permissions).into();
    core.lsn = old.lsn;
    core.aformat = XfsForkFormat::Extents as u8;
    core.uid = what.new.uid.into();
    core.gid = what.new.gid.into();
    core.nlink = what.links.into();
    if let XfsNewKind::Symlink(target) = what.kind {
        core.size = (target.len() as u64).into();
    }
    let mut flags2 = Flags2::empty();
    flags2.set(Flags2::BIGTIME, geometry.layout.contains(XfsLayout::BIG_TIMES));
    flags2.set(Flags2::NREXT64, geometry.layout.contains(XfsLayout::WIDE_COUNTS));
    core.flags2 = flags2.bits().into();
    let time = core.time_field(xfs_time(what.new.at));
    (core.atime, core.mtime, core.ctime, core.crtime) = (time, time, time, time);
    if parent.flags().contains(Flags::PROJINHERIT) {
        (core.projid_lo, core.projid_hi) = (parent.projid_lo, parent.projid_hi);
    }
    inherit_flags(&mut core, parent, what.kind);
    core
}

/// What the directory hands down to files and directories in it. The rest of its flags, and all of
/// them for special files and links, stay with it.
fn inherit_flags(core: &mut XfsInodeCore, parent: &XfsInodeCore, kind: XfsNewKind<'_>) {
    let of_parent = parent.flags();
    let mut flags = of_parent & (Flags::NOATIME | Flags::NODUMP | Flags::SYNC | Flags::NODEFRAG);
    flags |= of_parent & Flags::FILESTREAM;
    match kind {
        XfsNewKind::Directory => {
            flags |= of_parent & (Flags::RTINHERIT | Flags::PROJINHERIT | Flags::EXTSZINHERIT);
        }
        XfsNewKind::Regular => {
            flags.set(Flags::EXTSIZE, of_parent.contains(Flags::EXTSZINHERIT));
        }
        XfsNewKind::Symlink(_) | XfsNewKind::Node(..) => return,
    }
    if of_parent.contains(Flags::EXTSZINHERIT) {
        core.extsize = parent.extsize;
    }
    core.flags = flags.bits().into();
    let flags2 = parent.flags2() & (Flags2::COWEXTSIZE | Flags2::DAX);
    if flags2.contains(Flags2::COWEXTSIZE) {
        core.cowextsize = parent.cowextsize;
    }
    core.flags2 = (core.flags2() | flags2).bits().into();
}
