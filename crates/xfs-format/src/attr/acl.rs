//! Access control lists. XFS has a form of its own for them, in the namespace `trusted`; system
//! calls have that of `linux/posix_acl_xattr.h`, which is little-endian.
//!
//! XFS: a count of 4 bytes, and entries of 12: tag 4, id 4, permissions 2, zeros 2. System calls:
//! the version 2 in 4 bytes, and entries of 8: tag 2, permissions 2, id 4 (seen).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{Malformed, Structure, U16, U32};

/// The attribute with the list of a file, in [`super::XattrFlags::TRUSTED`].
pub const ACCESS: &[u8] = b"SGI_ACL_FILE";

/// The attribute with the list that new files in a directory get.
pub const DEFAULT: &[u8] = b"SGI_ACL_DEFAULT";

/// An entry of a list on disk. 12 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct XfsAclEntry {
    /// Which kind of user or group.
    pub tag: U32,
    /// The user or group, or [`NO_ID`].
    pub id: U32,
    /// The permissions.
    pub perm: U16,
    /// Zero.
    pub pad: U16,
}

const _: () = assert!(size_of::<XfsAclEntry>() == 12 && align_of::<XfsAclEntry>() == 1);

/// The id of an entry that names no user or group.
pub const NO_ID: u32 = u32::MAX;

/// Tags of entries with an id: a user, a group.
const WITH_ID: [u16; 2] = [0x02, 0x08];

const VERSION: [u8; 4] = [2, 0, 0, 0];

fn bad(problem: String) -> Malformed {
    Malformed::new(Structure::AttributeBlock, problem)
}

/// The list in the form of system calls, from that of the disk.
pub fn from_disk(value: &[u8]) -> Result<Vec<u8>, Malformed> {
    let cut = || bad(format!("an access control list of {} bytes", value.len()));
    let (count, entries) = U32::ref_from_prefix(value).map_err(|_| cut())?;
    let entries = <[XfsAclEntry]>::ref_from_bytes(entries).map_err(|_| cut())?;
    if u32::try_from(entries.len()) != Ok(count.get()) {
        return Err(bad(format!(
            "an access control list counts {count} entries and has {}",
            entries.len()
        )));
    }
    let mut list = Vec::with_capacity(4 + entries.len() * 8);
    list.extend(VERSION);
    for entry in entries {
        let tag = u16::try_from(entry.tag.get());
        let tag = tag.map_err(|_| bad(format!("an entry of a list has the tag {}", entry.tag)))?;
        let id = if WITH_ID.contains(&tag) { entry.id.get() } else { NO_ID };
        list.extend(tag.to_le_bytes());
        list.extend(entry.perm.get().to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    Ok(list)
}

/// The list in the form of the disk, from that of system calls.
pub fn to_disk(value: &[u8]) -> Result<Vec<u8>, Malformed> {
    let entries = value.strip_prefix(&VERSION).map(<[u8]>::as_chunks::<8>);
    let Some((entries, [])) = entries else {
        return Err(bad(format!("no access control list: {} bytes", value.len())));
    };
    let count = u32::try_from(entries.len()).map_err(|_| bad("too many entries".to_owned()))?;
    let mut list = Vec::with_capacity(4 + entries.len() * 12);
    list.extend(count.to_be_bytes());
    for &[a, b, c, d, e, f, g, h] in entries {
        let tag = u16::from_le_bytes([a, b]);
        let id = if WITH_ID.contains(&tag) { u32::from_le_bytes([e, f, g, h]) } else { NO_ID };
        let entry = XfsAclEntry {
            tag: u32::from(tag).into(),
            id: id.into(),
            perm: u16::from_le_bytes([c, d]).into(),
            pad: U16::ZERO,
        };
        list.extend_from_slice(entry.as_bytes());
    }
    Ok(list)
}
