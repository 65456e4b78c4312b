//! Extended attributes and access control lists.
//!
//! An access list changes the permissions in the transaction in which readers find it. It is not
//! stored when the permissions say the same.

use offshoot_vfs::acl::{ACCESS, Acl, DEFAULT};
use offshoot_vfs::{Errno, Error, FileId, Result, Timestamp, XattrMode, xattr};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::attr::{MAX_VALUE, XattrFlags, acl as stored_acl};
use offshoot_xfs_format::inode::XfsInodeCore;

use super::attributes::set_permissions;
use super::{FIXED, XfsLive, ino_of, refuse_flags, touch};
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::attr::stored_name;
use crate::buffer::malformed;
use crate::defer::change_xattr_with;
use crate::file::retry;
use crate::trans::{HASH_BLOCKS, XfsTransaction, XfsTransactionKind as Kind};

/// The blocks that a change of an attribute may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum XattrRoom {
    /// Those for a new value of so many bytes.
    New(usize),
    /// The same, with blocks of the reserve on a full volume: the value takes the place of one as
    /// long, or nothing does.
    Kept(usize),
}

/// What a value means that is set.
enum NewValue {
    /// It is stored.
    Stored(Vec<u8>),
    /// There is no attribute then: a list that says nothing, or what the permissions say too.
    Absent,
}

impl XfsLive {
    /// Sets an extended attribute.
    pub(crate) fn set_xattr(
        &self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()> {
        xattr::require_sizes(file, name, value)?;
        let is_list = matches!(name, ACCESS | DEFAULT);
        let list = if is_list { Acl::parse(value)? } else { None };
        let (namespace, stored) = require_stored(file, name)?;
        let _call = self.enter()?;
        let ino = ino_of(file);
        let _locked = self.inodes.write([ino]);
        let inode = self.inode(file)?;
        refuse_flags(&inode, FIXED)?;
        xattr::require_file_type(file, inode.file_type()?, name)?;
        let old = OwnedXattr { namespace, name: stored.to_vec(), value: Vec::new() };
        let is_there = self.has_xattr(ino, &old)?;
        match mode {
            XattrMode::Create if is_there => return Err(xattr::refused(Errno::EXIST, name, file)),
            XattrMode::Replace if !is_there => {
                return Err(xattr::refused(Errno::NODATA, name, file));
            }
            _ => {}
        }
        let permissions = list
            .as_ref()
            .filter(|_| name == ACCESS)
            .map(|list| list.permissions(u32::from(inode.core.mode.get() & 0o7777)));
        let change = |core: &mut XfsInodeCore| {
            if let Some(permissions) = permissions {
                set_permissions(core, permissions);
            }
        };
        let new = if is_list {
            value_of_list(file, name, list.as_ref())?
        } else {
            NewValue::Stored(value.to_vec())
        };
        match new {
            NewValue::Stored(value) => {
                let room = XattrRoom::New(value.len());
                let new = OwnedXattr { value, ..old };
                self.apply_xattr(&XattrChange::set(ino, new), room, at, change)?;
            }
            NewValue::Absent if is_there => {
                self.apply_xattr(&XattrChange::remove(ino, old), XattrRoom::Kept(0), at, change)?;
            }
            NewValue::Absent => self.change_core(ino, at, change)?,
        }
        self.keep_synchronous(&inode)
    }

    /// Removes an extended attribute.
    pub(crate) fn remove_xattr(&self, file: FileId, name: &[u8], at: Timestamp) -> Result<()> {
        xattr::require_sizes(file, name, b"")?;
        let (namespace, stored) = require_stored(file, name)?;
        let _call = self.enter()?;
        let ino = ino_of(file);
        let _locked = self.inodes.write([ino]);
        let inode = self.inode(file)?;
        refuse_flags(&inode, FIXED)?;
        xattr::require_file_type(file, inode.file_type()?, name)?;
        let old = OwnedXattr { namespace, name: stored.to_vec(), value: Vec::new() };
        if !self.has_xattr(ino, &old)? {
            return Err(xattr::refused(Errno::NODATA, name, file));
        }
        self.apply_xattr(&XattrChange::remove(ino, old), XattrRoom::Kept(0), at, |_| {})?;
        self.keep_synchronous(&inode)
    }

    /// Replaces the access list of a file by one as long, and changes its core with it.
    pub(super) fn set_list(
        &self,
        ino: Ino,
        list: &Acl,
        at: Timestamp,
        change: impl Fn(&mut XfsInodeCore),
    ) -> Result<()> {
        let value = stored_acl::to_disk(&list.to_value()).map_err(malformed)?;
        let (namespace, name) = (XattrFlags::TRUSTED, stored_acl::ACCESS.to_vec());
        let room = XattrRoom::Kept(value.len());
        let new = OwnedXattr { namespace, name, value };
        self.apply_xattr(&XattrChange::set(ino, new), room, at, change)
    }

    fn has_xattr(&self, ino: Ino, xattr: &OwnedXattr) -> Result<bool> {
        let mut t = self.transactions.begin(Kind::ChangeTimes, 0)?;
        XattrChange::remove(ino, xattr.clone()).is_there(&mut t)
    }

    /// Changes an attribute, and the core of its inode with it. No name changes meanwhile: a name
    /// that is added to a directory could fill the inode, when it has proved that it has room.
    fn apply_xattr(
        &self,
        change: &XattrChange,
        room: XattrRoom,
        at: Timestamp,
        with: impl Fn(&mut XfsInodeCore),
    ) -> Result<()> {
        let ino = change.ino();
        let _names = self.names().lock([ino])?;
        let mut t = self.transactions.begin(Kind::ChangeTimes, 0)?;
        let is_kept_out = change.is_kept_out_by_data(&mut t)?;
        drop(t);
        let data = self.data();
        if is_kept_out {
            data.with_space(|| self.names().make_way_in_locked(ino, at))?;
        }
        data.with_space(|| {
            retry(&self.transactions, |missed| {
                let mut t = self.begin_xattr(room)?;
                t.try_again(Some(missed));
                change_xattr_with(t, &self.ids, change.clone(), |core| {
                    with(core);
                    touch(core, at);
                })
            })
        })
    }

    /// Begins a change of an attribute.
    fn begin_xattr(&self, room: XattrRoom) -> Result<XfsTransaction<'_>> {
        let engine = &self.transactions;
        let (XattrRoom::New(len) | XattrRoom::Kept(len)) = room;
        let of_value = 4 * (len as u64 >> engine.geometry().block_log);
        let blocks = of_value + HASH_BLOCKS + 2 * engine.most_levels().attributes;
        match engine.begin(Kind::ChangeAttribute, blocks) {
            Err(error) if error.errno() == Errno::NOSPC && matches!(room, XattrRoom::Kept(_)) => {
                let mut t = engine.begin(Kind::ChangeAttribute, 0)?;
                t.promise_of_reserve(blocks);
                Ok(t)
            }
            begun => begun,
        }
    }
}

/// The namespace and the name under which an attribute is stored.
///
/// # Errors
/// `EOPNOTSUPP` and `EINVAL` where there can be none; also for the stored names of access control
/// lists, which are set by those of system calls.
fn require_stored(file: FileId, name: &[u8]) -> Result<(XattrFlags, &[u8])> {
    xattr::require_namespace(file, name)?;
    let stored = stored_name(name).filter(|(namespace, stored)| {
        let is_list = [stored_acl::ACCESS, stored_acl::DEFAULT].contains(stored);
        !(is_list && *namespace == XattrFlags::TRUSTED && name.starts_with(b"trusted."))
    });
    stored.ok_or_else(|| xattr::refused(Errno::OPNOTSUPP, name, file))
}

/// What an access control list is stored as.
fn value_of_list(file: FileId, name: &[u8], list: Option<&Acl>) -> Result<NewValue> {
    let Some(list) = list.filter(|list| name == DEFAULT || list.is_extended()) else {
        return Ok(NewValue::Absent);
    };
    let value = stored_acl::to_disk(&list.to_value()).map_err(malformed)?;
    if value.len() > MAX_VALUE {
        return Err(Error::posix(
            Errno::NOSPC,
            format!("{} bytes of a list of {file}", value.len()),
        ));
    }
    Ok(NewValue::Stored(value))
}
