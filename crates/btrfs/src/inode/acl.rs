//! How access control lists and permissions change each other.
//!
//! The rules are in [`offshoot_vfs::acl`]. A list is stored as an extended attribute. It changes
//! together with the inode, in one operation.

use offshoot_vfs::acl::{ACCESS, Acl, DEFAULT};
use offshoot_vfs::{Errno, Error, FileId, FileType, NewFile, Result, Structure};

use super::changes::Changes;
use super::xattr;
use crate::inode::Rooms;

/// What a new file gets from the default list of its directory.
pub(crate) struct InheritedAcl {
    /// The permissions of the file.
    pub(crate) permissions: u32,
    /// The lists of the file, by the names of their attributes.
    pub(crate) lists: Vec<(&'static [u8], Vec<u8>)>,
}

impl InheritedAcl {
    /// The number of items that the lists add.
    pub(super) fn items(&self) -> u64 {
        self.lists.len() as u64
    }

    /// Adds the lists to `file`, which is new.
    pub(super) fn put(self, changes: &mut Changes<'_, '_>, file: FileId) -> Result<()> {
        for (name, value) in self.lists {
            xattr::replace(changes, file, name, Some(&value))?;
        }
        Ok(())
    }
}

/// What a new file of this type gets from `dir`, whose lock the caller holds.
pub(crate) fn inherited(
    volume: &Rooms,
    dir: FileId,
    file_type: FileType,
    new: &NewFile,
) -> Result<InheritedAcl> {
    let mut permissions = new.permissions;
    let mut lists = Vec::new();
    if let Some(umask) = new.umask.filter(|_| file_type != FileType::Symlink) {
        match default_of(volume, dir)? {
            Some(mut list) => {
                if file_type == FileType::Directory {
                    lists.push((DEFAULT, list.to_value()));
                }
                list.create_with(&mut permissions);
                if list.is_extended() {
                    lists.push((ACCESS, list.to_value()));
                }
            }
            None => permissions &= !umask,
        }
    }
    Ok(InheritedAcl { permissions, lists })
}

/// The default list of the directory `dir`.
fn default_of(volume: &Rooms, dir: FileId) -> Result<Option<Acl>> {
    if volume.inodes.with_directory(dir, |directory| directory.has_no_default_acl) {
        return Ok(None);
    }
    let list = list_of(volume, dir, DEFAULT)?;
    volume.inodes.with_directory(dir, |directory| directory.has_no_default_acl = list.is_none());
    Ok(list)
}

fn list_of(volume: &Rooms, file: FileId, name: &[u8]) -> Result<Option<Acl>> {
    match super::xattr(volume, file, name) {
        Ok(value) => Acl::parse(&value)
            .map_err(|error| Error::corrupt(Structure::XattrItem, error.to_string())),
        Err(Error::Posix { errno: Errno::NODATA, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The access list of `file`, if it has one beyond its permissions.
pub(super) fn access_of(volume: &Rooms, file: FileId) -> Result<Option<Acl>> {
    list_of(volume, file, ACCESS)
}

/// Changes the access list of `file` to `list` with the new `permissions`.
pub(super) fn follow(
    changes: &mut Changes<'_, '_>,
    file: FileId,
    mut list: Acl,
    permissions: u32,
) -> Result<()> {
    list.set_permissions(permissions);
    xattr::replace(changes, file, ACCESS, Some(&list.to_value()))
}
