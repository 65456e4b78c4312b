//! Attributes and flags.

use offshoot_vfs::acl::{ACCESS, Acl};
use offshoot_vfs::{Errno, Error, FileFlags, FileId, FileType, Result, SetAttr, Timestamp};
use offshoot_xfs_format::inode::{XfsInodeCore, XfsInodeFlags};

use super::{FIXED, XfsLive, ino_of, refuse_flags};
use crate::attr::FileXattrs;
use crate::inode::{LoadedInode, SHOWN_FLAGS, xfs_time};

impl XfsLive {
    /// Changes attributes: the length first, and then all others in one transaction.
    pub(crate) fn set_attr(&self, file: FileId, set: &SetAttr, at: Timestamp) -> Result<()> {
        let _call = self.enter()?;
        let ino = ino_of(file);
        let _locked = self.inodes.write([ino]);
        let inode = self.inode(file)?;
        let refused = if *set == SetAttr::TOUCH { XfsInodeFlags::IMMUTABLE } else { FIXED };
        refuse_flags(&inode, refused)?;
        if set.permissions.is_some() && inode.file_type()? == FileType::Symlink {
            let what = format!("permissions of the link {file}");
            return Err(Error::posix(Errno::OPNOTSUPP, what));
        }
        let list = match set.permissions {
            Some(permissions) => self.list_with(&inode, permissions)?,
            None => None,
        };
        if let Some(size) = set.size {
            self.contents(file)?.truncate(size)?;
        }
        let change = |core: &mut XfsInodeCore| change_attributes(core, set, at);
        match list {
            Some(list) => self.set_list(ino, &list, at, change)?,
            None => self.change_core(ino, at, change)?,
        }
        self.keep_synchronous(&inode)
    }

    /// The access control list of a file with these permissions, if it has one.
    fn list_with(&self, inode: &LoadedInode, permissions: u32) -> Result<Option<Acl>> {
        let value = match FileXattrs::new(self.buffers(), &self.reading, inode.file()).get(ACCESS) {
            Err(Error::Posix { errno: Errno::NODATA, .. }) => return Ok(None),
            value => value?,
        };
        let mut list = Acl::parse(&value)?;
        if let Some(list) = &mut list {
            list.set_permissions(permissions);
        }
        Ok(list)
    }

    /// Sets all flags of a file.
    pub(crate) fn set_flags(&self, file: FileId, flags: FileFlags, at: Timestamp) -> Result<()> {
        let refused = |what: &str| {
            let what = format!("the flags `{flags}` ({:#x}) of {file}{what}", flags.bits());
            Err(Error::posix(Errno::OPNOTSUPP, what))
        };
        let known: FileFlags = SHOWN_FLAGS.iter().map(|(_, shown)| *shown).collect();
        if !known.contains(flags) {
            return refused("");
        }
        let _call = self.enter()?;
        let ino = ino_of(file);
        let _locked = self.inodes.write([ino]);
        let inode = self.inode(file)?;
        if !matches!(inode.file_type()?, FileType::Regular | FileType::Directory) {
            return refused(", which is no file or directory");
        }
        self.change_core(ino, at, |core| {
            let mut stored = core.flags();
            for (flag, shown) in SHOWN_FLAGS {
                stored.set(flag, flags.contains(shown));
            }
            core.flags = stored.bits().into();
        })?;
        self.keep_synchronous(&inode)
    }
}

fn change_attributes(core: &mut XfsInodeCore, set: &SetAttr, at: Timestamp) {
    if let Some(permissions) = set.permissions {
        set_permissions(core, permissions);
    }
    core.uid = set.uid.map_or(core.uid, Into::into);
    core.gid = set.gid.map_or(core.gid, Into::into);
    let time = |time: Timestamp| core.time_field(xfs_time(time));
    let atime = set.atime.map(|set| time(set.at(at)));
    let mtime = set.mtime.map(|set| set.at(at)).or(set.size.map(|_| at)).map(time);
    core.atime = atime.unwrap_or(core.atime);
    core.mtime = mtime.unwrap_or(core.mtime);
}

/// Sets permission, set-id and sticky bits.
pub(super) fn set_permissions(core: &mut XfsInodeCore, permissions: u32) {
    let permissions = u16::try_from(permissions & 0o7777).unwrap_or(0);
    core.mode = (core.mode.get() & !0o7777 | permissions).into();
}
