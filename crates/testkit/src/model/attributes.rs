//! Flags, extended attributes and access control lists of the model.
//!
//! Each call checks with [`ModelState::refuse`] whether a flag forbids it. The rules of access
//! control lists are those of [`offshoot_vfs::acl`].

use std::collections::BTreeMap;

use offshoot_vfs::acl::{ACCESS, Acl, DEFAULT};
use offshoot_vfs::{Errno, FileFlags, FileId, FileType, NewFile, Result, Timestamp, XattrMode};

use super::{ModelManners, ModelNode, ModelState, id, posix};

/// The attribute with the compression of a file, in words.
const PROPERTY: &[u8] = b"btrfs.compression";

/// The flags about compression. A file has at most one of them.
const COMPRESSION: FileFlags = FileFlags::COMPRESS.union(FileFlags::NOCOMPRESS);

/// A file with one of these flags cannot be moved, removed or overwritten.
pub(super) const FIXED: FileFlags = FileFlags::IMMUTABLE.union(FileFlags::APPEND);

/// The extended attributes of a file.
type ModelXattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// What a new file inherits from its directory.
pub(super) struct InheritedAttributes {
    pub(super) permissions: u32,
    pub(super) flags: FileFlags,
    pub(super) xattrs: ModelXattrs,
}

impl ModelNode {
    /// Sets the compression of a new file and clears everything else that says how its data is
    /// stored.
    pub(super) fn compress_with(&mut self, method: Option<&'static str>) {
        self.flags = method.map_or(FileFlags::empty(), |_| FileFlags::COMPRESS);
        self.xattrs.remove(PROPERTY);
        if let Some(name) = method {
            self.xattrs.insert(PROPERTY.to_vec(), name.into());
        }
    }
}

impl ModelState {
    /// `EPERM` if the file has one of these flags.
    pub(super) fn refuse(&self, file: FileId, flags: FileFlags) -> Result<()> {
        if self.node(file)?.flags.intersects(flags) { posix(Errno::PERM, file) } else { Ok(()) }
    }

    /// `EINVAL` if one file has checksums and the other has none: a file that is written in place
    /// has none.
    pub(super) fn require_alike(&self, one: FileId, other: FileId) -> Result<()> {
        let in_place = [self.node(one)?, self.node(other)?]
            .map(|node| node.flags.contains(FileFlags::NODATACOW));
        if in_place[0] == in_place[1] { Ok(()) } else { posix(Errno::INVAL, one) }
    }

    pub(super) fn set_flags(
        &mut self,
        file: FileId,
        flags: FileFlags,
        at: Timestamp,
    ) -> Result<()> {
        const NODATACOW: FileFlags = FileFlags::NODATACOW;
        let compresses_in_place = FileFlags::COMPRESS | NODATACOW;
        if flags.contains(COMPRESSION) || flags.contains(compresses_in_place) {
            return posix(Errno::INVAL, file);
        }
        self.require_writable(file)?;
        let compression = self.compression;
        let node = self.node_mut(file)?;
        if !is_plain(node) {
            return posix(Errno::OPNOTSUPP, file);
        }
        let old = node.flags;
        let meet = |one: FileFlags, other: FileFlags| {
            one.contains(NODATACOW) && other.intersects(COMPRESSION)
        };
        if meet(old, flags) || meet(flags, old) {
            return posix(Errno::INVAL, file);
        }
        let mut new = flags;
        if node.attr.file_type == FileType::Regular {
            new.remove(FileFlags::DIRSYNC);
            if node.attr.size > 0 {
                new = (new - NODATACOW) | (old & NODATACOW);
            }
        }
        if new & COMPRESSION != old & COMPRESSION {
            node.xattrs.remove(PROPERTY);
            if new.contains(FileFlags::COMPRESS) {
                node.xattrs.insert(PROPERTY.to_vec(), compression.into());
            }
        }
        node.flags = new;
        node.attr.ctime = at;
        Ok(())
    }

    /// What a file of this type inherits when it is made in `dir`.
    pub(super) fn inherited(
        &self,
        dir: FileId,
        file_type: FileType,
        new: &NewFile,
    ) -> Result<InheritedAttributes> {
        let dir = self.node(dir)?;
        let is_plain = matches!(file_type, FileType::Regular | FileType::Directory);
        let inherited = match self.manners {
            ModelManners::Btrfs => COMPRESSION | FileFlags::NODATACOW,
            ModelManners::Xfs if is_plain => {
                FileFlags::SYNC | FileFlags::NODUMP | FileFlags::NOATIME
            }
            ModelManners::Xfs => FileFlags::empty(),
        };
        let flags = dir.flags & inherited;
        let (mut permissions, mut xattrs) = (new.permissions, BTreeMap::new());
        if let Some(umask) = new.umask.filter(|_| file_type != FileType::Symlink) {
            match list_of(dir, DEFAULT)? {
                Some(mut list) => {
                    if file_type == FileType::Directory {
                        xattrs.insert(DEFAULT.to_vec(), list.to_value());
                    }
                    list.create_with(&mut permissions);
                    if list.is_extended() {
                        xattrs.insert(ACCESS.to_vec(), list.to_value());
                    }
                }
                None => permissions &= !umask,
            }
        }
        let stores = matches!(file_type, FileType::Regular | FileType::Directory);
        let property = dir.xattrs.get(PROPERTY).filter(|_| stores);
        if let Some(name) = property.and_then(|value| method(value)) {
            xattrs.insert(PROPERTY.to_vec(), name.into());
        }
        if file_type == FileType::Symlink {
            permissions = 0o777;
        }
        Ok(InheritedAttributes { permissions, flags, xattrs })
    }

    /// The compression of a new subvolume whose name is in `dir`. It is inherited from the root of
    /// the subvolume of `dir`; no other storage setting is inherited.
    pub(super) fn compression_of_subvolume(&self, dir: FileId) -> Result<Option<&'static str>> {
        let parent = self.node(id(self.node(dir)?.subvolume))?;
        Ok(parent.xattrs.get(PROPERTY).and_then(|value| method(value)))
    }

    /// Sets the permissions of `file`, in its access control list too.
    pub(super) fn set_permissions(&mut self, file: FileId, permissions: u32) -> Result<()> {
        let node = self.node_mut(file)?;
        if let Some(mut list) = list_of(node, ACCESS)? {
            list.set_permissions(permissions);
            node.xattrs.insert(ACCESS.to_vec(), list.to_value());
        }
        node.attr.permissions = permissions;
        Ok(())
    }

    pub(super) fn set_xattr(
        &mut self,
        file: FileId,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
        at: Timestamp,
    ) -> Result<()> {
        let list = if matches!(name, ACCESS | DEFAULT) { Acl::parse(value)? } else { None };
        let says = if name == PROPERTY { property_flags(value) } else { None };
        if name.starts_with(b"btrfs.") && says.is_none() {
            return posix(Errno::INVAL, file);
        }
        self.require_writable(file)?;
        self.refuse(file, FIXED)?;
        let node = self.node_mut(file)?;
        require_allowed(node, name)?;
        if name == PROPERTY && !value.is_empty() && node.flags.contains(FileFlags::NODATACOW) {
            return posix(Errno::INVAL, file);
        }
        match (mode, node.xattrs.contains_key(name)) {
            (XattrMode::Create, true) => return posix(Errno::EXIST, file),
            (XattrMode::Replace, false) => return posix(Errno::NODATA, file),
            _ => {}
        }
        // An empty property is removed, and only regular files and directories have one.
        if name == PROPERTY && !is_plain(node) {
            return Ok(());
        }
        let is_stored = match name {
            PROPERTY => !value.is_empty(),
            DEFAULT => list.is_some(),
            // A list that says no more than the permissions is not stored.
            ACCESS => list.as_ref().is_some_and(Acl::is_extended),
            _ => true,
        };
        if is_stored {
            node.xattrs.insert(name.to_vec(), value.to_vec());
        } else {
            node.xattrs.remove(name);
        }
        if let Some(list) = list.filter(|_| name == ACCESS) {
            node.attr.permissions = list.permissions(node.attr.permissions);
        }
        if let Some(says) = says {
            node.flags = (node.flags - COMPRESSION) | says;
        }
        node.attr.ctime = at;
        Ok(())
    }

    pub(super) fn remove_xattr(&mut self, file: FileId, name: &[u8], at: Timestamp) -> Result<()> {
        self.require_writable(file)?;
        self.refuse(file, FIXED)?;
        let node = self.node_mut(file)?;
        require_allowed(node, name)?;
        if node.xattrs.remove(name).is_none() {
            return posix(Errno::NODATA, file);
        }
        if name == PROPERTY {
            node.flags.remove(COMPRESSION);
        }
        node.attr.ctime = at;
        Ok(())
    }
}

fn is_plain(node: &ModelNode) -> bool {
    matches!(node.attr.file_type, FileType::Regular | FileType::Directory)
}

fn list_of(node: &ModelNode, name: &[u8]) -> Result<Option<Acl>> {
    node.xattrs.get(name).map_or(Ok(None), |value| Acl::parse(value))
}

/// The method that a value of the property begins with. New files inherit it.
fn method(value: &[u8]) -> Option<&'static str> {
    ["zlib", "lzo", "zstd"].into_iter().find(|name| value.starts_with(name.as_bytes()))
}

/// The flags that a value of the property stands for; `None` for an invalid value.
fn property_flags(value: &[u8]) -> Option<FileFlags> {
    match value {
        b"" => Some(FileFlags::empty()),
        b"no" | b"none" => Some(FileFlags::NOCOMPRESS),
        _ => method(value).map(|_| FileFlags::COMPRESS),
    }
}

/// Refuses attributes that files of this type cannot have.
fn require_allowed(node: &ModelNode, name: &[u8]) -> Result<()> {
    let errno = match node.attr.file_type {
        FileType::Symlink if matches!(name, ACCESS | DEFAULT) => Errno::OPNOTSUPP,
        file_type if file_type != FileType::Directory && name == DEFAULT => Errno::ACCESS,
        _ if name.starts_with(b"user.") && !is_plain(node) => Errno::PERM,
        _ => return Ok(()),
    };
    posix(errno, node.attr.file)
}
