//! What a new file gets from the default access control list of its directory.
//!
//! The rules are in [`offshoot_vfs::acl`]. A list is an attribute of the file. Lists that fit in
//! the inode are set in the transaction that makes the file.

use offshoot_vfs::acl::Acl;
use offshoot_vfs::{FileType, NewFile, Result};
use offshoot_xfs_format::attr::XattrFlags;
use offshoot_xfs_format::attr::acl::{self, from_disk, to_disk};
use offshoot_xfs_format::inode::XfsInodeCore;
use offshoot_xfs_format::{Ino, XfsGeometry};

use super::change::NameTransaction;
use crate::attr::change::{OwnedXattr, XattrChange, find_xattr};
use crate::buffer::malformed;

/// The bytes of attributes in the inode, and of each beside its name and its value.
const SHORT_HEADER: usize = 4;
const SHORT_ENTRY: usize = 3;

/// The longest value in the inode.
const SHORT_MAX: usize = 255;

/// The bytes of an inode that a new file keeps for its data when it has attributes.
const DATA_BYTES: usize = 64;

/// What a new file gets.
#[derive(Clone, Debug)]
pub(super) struct InheritedLists {
    /// Its permissions.
    pub(super) permissions: u32,
    /// Its lists.
    pub(super) lists: Vec<OwnedXattr>,
}

impl InheritedLists {
    /// Whether all lists fit in the inode.
    pub(super) fn fit_in_inode(&self, geometry: &XfsGeometry) -> bool {
        let room = XfsInodeCore::literal_bytes(geometry);
        let bytes = |list: &OwnedXattr| SHORT_ENTRY + list.name.len() + list.value.len();
        self.lists.iter().all(|list| list.value.len() <= SHORT_MAX)
            && SHORT_HEADER + self.lists.iter().map(bytes).sum::<usize>() + DATA_BYTES <= room
    }
}

impl NameTransaction<'_> {
    /// What a new file of this type gets from `dir`.
    pub(super) fn inherited(
        &mut self,
        dir: Ino,
        file_type: FileType,
        new: &NewFile,
    ) -> Result<InheritedLists> {
        let mut all = InheritedLists { permissions: new.permissions, lists: Vec::new() };
        if file_type == FileType::Symlink {
            all.permissions = 0o777;
            return Ok(all);
        }
        let Some(umask) = new.umask else { return Ok(all) };
        let stored = find_xattr(&mut self.t, dir, XattrFlags::TRUSTED, acl::DEFAULT)?;
        let shown = stored.as_deref().map(from_disk).transpose().map_err(malformed)?;
        let Some(mut list) = shown.map_or(Ok(None), |shown| Acl::parse(&shown))? else {
            all.permissions &= !umask;
            return Ok(all);
        };
        if file_type == FileType::Directory {
            all.lists.push(stored_list(acl::DEFAULT, &list)?);
        }
        list.create_with(&mut all.permissions);
        if list.is_extended() {
            all.lists.push(stored_list(acl::ACCESS, &list)?);
        }
        Ok(all)
    }

    /// Sets lists that fit in the inode.
    pub(super) fn set_lists(&mut self, ino: Ino, lists: &[OwnedXattr]) -> Result<()> {
        for list in lists {
            let step = XattrChange::set(ino, list.clone()).step(&mut self.t)?;
            if !step.is_done {
                return Err(self.t.inode(ino)?.damaged("its lists do not fit in it"));
            }
        }
        Ok(())
    }
}

fn stored_list(name: &[u8], list: &Acl) -> Result<OwnedXattr> {
    let value = to_disk(&list.to_value()).map_err(malformed)?;
    Ok(OwnedXattr { namespace: XattrFlags::TRUSTED, name: name.to_vec(), value })
}
