//! Attributes and extended attributes of files.

use std::ops::ControlFlow;

use offshoot_vfs::{
    Attr, Errno, Error, FileId, FileType, Result, SetAttr, SetTime, Timestamp, XattrMode,
};
use rustix::fs::XattrFlags;

use super::RequestContext;
use crate::attributes::{attr_out, attributes, statx_out};
use crate::output::AnswerBody;
use crate::request::RequestArguments;
use crate::wire::{
    GetxattrIn, GetxattrOut, SETXATTR_ACL_KILL_SGID, SetattrIn, SetattrValid, SetxattrIn,
    SetxattrOldIn,
};

/// The most bytes that LISTXATTR returns: the limit of the system call.
const LIST_MAX: usize = 65_536;

/// The attribute that the kernel asks for before the first write to a file.
const CAPABILITY: &[u8] = b"security.capability";

/// The permissions after a change of the file: without the set-user-id bit, and without the
/// set-group-id bit if the group may execute the file. Without execution by the group, that bit
/// stays if the program is in the group (`is_member`). For example, 0o6755 becomes 0o755, and
/// 0o6745 becomes 0o2745 or 0o745.
fn without_set_id(attr: &Attr, is_member: bool) -> u32 {
    const SUID: u32 = 0o4000;
    const SGID: u32 = 0o2000;
    const GROUP_EXECUTES: u32 = 0o010;
    let keeps_group = is_member && attr.permissions & GROUP_EXECUTES == 0;
    attr.permissions & !(SUID | if keeps_group { 0 } else { SGID })
}

fn time(secs: u64, nanos: u32) -> Timestamp {
    Timestamp { secs: secs.cast_signed(), nanos }
}

impl RequestContext<'_> {
    pub(super) fn getattr(&self, out: &mut AnswerBody<'_>) -> Result<()> {
        let (attr, shown) = self.attr()?;
        out.put(&attr_out(self.number(attr.file), &attr, shown))
    }

    pub(super) fn statx(&self, out: &mut AnswerBody<'_>) -> Result<()> {
        let (attr, shown) = self.attr()?;
        out.put(&statx_out(self.number(attr.file), &attr, shown))
    }

    pub(super) fn setattr(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let wanted: SetattrIn = arguments.take()?;
        let valid = SetattrValid::from_bits_truncate(wanted.valid);
        let file = self.file()?;
        let now = Timestamp::now();
        let has = |flag| valid.contains(flag);
        let time_of = |now_flag, flag, at| {
            has(now_flag).then_some(SetTime::Now).or(has(flag).then_some(SetTime::To(at)))
        };
        let atime = time(wanted.atime, wanted.atimensec);
        let mtime = time(wanted.mtime, wanted.mtimensec);
        let mut set = SetAttr {
            permissions: has(SetattrValid::MODE).then_some(wanted.mode & 0o7777),
            uid: has(SetattrValid::UID).then_some(wanted.uid),
            gid: has(SetattrValid::GID).then_some(wanted.gid),
            size: has(SetattrValid::SIZE).then_some(wanted.size),
            atime: time_of(SetattrValid::ATIME_NOW, SetattrValid::ATIME, atime),
            mtime: time_of(SetattrValid::MTIME_NOW, SetattrValid::MTIME, mtime),
        };
        let of_mode =
            SetattrValid::MODE | SetattrValid::UID | SetattrValid::GID | SetattrValid::KILL_SUIDGID;
        let _mode = valid.intersects(of_mode).then(|| self.to.modes.lock(self.number(file)));
        self.apply_rules(file, &mut set, has(SetattrValid::KILL_SUIDGID))?;
        let is_dated = has(SetattrValid::CTIME);
        let at = if is_dated { time(wanted.ctime, wanted.ctimensec) } else { now };
        if set != SetAttr::default() || is_dated {
            self.fs().set_attr(file, &set, at)?;
        }
        self.getattr(out)
    }

    /// Adds the changes that follow from those in `set`, and refuses what the mount does not allow.
    fn apply_rules(&self, file: FileId, set: &mut SetAttr, kills_set_id: bool) -> Result<()> {
        let owner = self.to.options.owner;
        let has_owner = set.uid.is_some() || set.gid.is_some();
        if !has_owner && !kills_set_id {
            return Ok(());
        }
        let attr = self.fs().attr(file)?;
        let shown = attributes(self.number(file), &attr, self.to.shown);
        let is_kept = |one: Option<u32>, fixed: Option<u32>, shown: u32| {
            fixed.is_none() || one.is_none_or(|one| one == shown)
        };
        if !is_kept(set.uid, owner.uid, shown.uid) || !is_kept(set.gid, owner.gid, shown.gid) {
            return Err(Error::posix(Errno::PERM, format!("another owner of {file}")));
        }
        // An owner that the mount only shows is not stored.
        set.uid = set.uid.filter(|_| owner.uid.is_none());
        set.gid = set.gid.filter(|_| owner.gid.is_none());
        // Root keeps the bit when it changes the owner, for which the kernel always sends
        // KILL_SUIDGID. With a new length it sends that for users without the right alone.
        let is_trusted = self.uid == 0 && has_owner;
        let rest = without_set_id(&attr, is_trusted || self.is_member(&attr));
        if attr.file_type != FileType::Directory && rest != attr.permissions {
            set.permissions = set.permissions.or(Some(rest));
        }
        Ok(())
    }

    /// Clears the set-id bits of a file before a change by a program that may not keep them. Then
    /// invalidates the mode in the kernel's cache, so that the kernel does not run the file with
    /// these bits.
    pub(super) fn drop_set_id(&self, file: FileId) -> Result<()> {
        let rest = |attr: &Attr| {
            let rest = without_set_id(attr, self.is_member(attr));
            Some(rest).filter(|rest| *rest != attr.permissions)
        };
        if rest(&self.fs().attr(file)?).is_none() {
            return Ok(());
        }
        let _mode = self.to.modes.lock(self.number(file));
        let Some(rest) = rest(&self.fs().attr(file)?) else { return Ok(()) };
        let set = SetAttr { permissions: Some(rest), ..SetAttr::default() };
        self.fs().set_attr(file, &set, Timestamp::now())?;
        self.to.caches.forget_attributes(file)
    }

    /// Whether the program is surely in the group of a file. The kernel sends one of its groups.
    fn is_member(&self, attr: &Attr) -> bool {
        self.gid == attr.gid
    }

    /// As [`Self::drop_set_id`], for requests that do not say whether the program may keep the
    /// bits: root may.
    pub(super) fn drop_set_id_unless_root(&self, file: FileId) -> Result<()> {
        if self.uid == 0 { Ok(()) } else { self.drop_set_id(file) }
    }

    pub(super) fn setxattr(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let (size, flags, extra) = if self.to.has_setxattr_ext() {
            let set: SetxattrIn = arguments.take()?;
            (set.size, set.flags, set.setxattr_flags)
        } else {
            let set: SetxattrOldIn = arguments.take()?;
            (set.size, set.flags, 0)
        };
        let name = arguments.text()?;
        let value = arguments.data(size)?;
        let flags = XattrFlags::from_bits_retain(flags);
        let mode = if flags.is_empty() {
            XattrMode::Set
        } else if flags == XattrFlags::CREATE {
            XattrMode::Create
        } else if flags == XattrFlags::REPLACE {
            XattrMode::Replace
        } else {
            return Err(Error::posix(Errno::INVAL, format!("an attribute with {flags:?}")));
        };
        let file = self.file()?;
        let now = Timestamp::now();
        if name == CAPABILITY {
            self.to.nodes.may_have_capability(file);
        }
        self.fs().set_xattr(file, name, value, mode, now)?;
        if extra & SETXATTR_ACL_KILL_SGID != 0 {
            let permissions = Some(self.fs().attr(file)?.permissions & !0o2000);
            self.fs().set_attr(file, &SetAttr { permissions, ..SetAttr::default() }, now)?;
        }
        Ok(())
    }

    pub(super) fn removexattr(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        self.fs().remove_xattr(self.file()?, arguments.text()?, Timestamp::now())
    }

    pub(super) fn getxattr(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let get: GetxattrIn = arguments.take()?;
        let (file, name) = (self.file()?, arguments.text()?);
        if name == CAPABILITY && self.to.nodes.lacks_capability(file) {
            return Err(Error::posix(Errno::NODATA, "the capabilities of a new file"));
        }
        let value = self.fs().xattr(file, name)?;
        put_sized(&value, get.size, out)
    }

    pub(super) fn listxattr(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let list: GetxattrIn = arguments.take()?;
        let mut names = Vec::new();
        self.fs().xattrs(self.file()?, &mut |name, _| {
            // As in the kernel, only root sees `trusted.` names.
            if self.uid == 0 || !name.starts_with(b"trusted.") {
                names.extend_from_slice(name);
                names.push(0);
            }
            if names.len() > LIST_MAX { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        if names.len() > LIST_MAX {
            return Err(Error::posix(Errno::TOOBIG, "the names of the extended attributes"));
        }
        put_sized(&names, list.size, out)
    }
}

/// Answers with `value`, or only with its length if the request offers 0 bytes of room.
fn put_sized(value: &[u8], size: u32, out: &mut AnswerBody<'_>) -> Result<()> {
    let len = u32::try_from(value.len()).unwrap_or(u32::MAX);
    if size == 0 {
        return out.put(&GetxattrOut { size: len, padding: 0 });
    }
    if len > size {
        return Err(Error::posix(Errno::RANGE, format!("a value of {len} bytes")));
    }
    out.put_bytes(value)
}
