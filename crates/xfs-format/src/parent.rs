//! Parent pointers: an attribute for each name of a file, which says in which directory it is.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::attr::{XattrContent, XattrFlags, XfsXattr};
use crate::{Ino, Malformed, Structure, U32, U64};

/// The value of a parent pointer. 12 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ParentValue {
    /// The directory.
    pub inode: U64,
    /// The generation of the directory.
    pub generation: U32,
}

const _: () = assert!(size_of::<ParentValue>() == 12 && align_of::<ParentValue>() == 1);

impl ParentValue {
    /// The value for a directory.
    #[must_use]
    pub fn new(parent: Ino, generation: u32) -> Self {
        Self { inode: parent.0.into(), generation: generation.into() }
    }

    /// The attribute that says that a file is in this directory under a name.
    #[must_use]
    pub fn xattr<'a>(&'a self, name: &'a [u8]) -> XfsXattr<'a> {
        let value = XattrContent::Local(self.as_bytes());
        XfsXattr { flags: XattrFlags::PARENT, name, value }
    }
}

/// A name of a file, and the directory that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParentPointer<'a> {
    /// The directory.
    pub parent: Ino,
    /// The generation of the directory.
    pub generation: u32,
    /// The name.
    pub name: &'a [u8],
}

impl<'a> ParentPointer<'a> {
    /// The parent pointer that an attribute with the flag [`XattrFlags::PARENT`] is.
    pub fn parse(xattr: &XfsXattr<'a>) -> Result<Self, Malformed> {
        let bad = |problem| Malformed::new(Structure::ParentPointer, problem);
        let XattrContent::Local(value) = xattr.value else {
            return Err(bad("its value is not beside its name"));
        };
        let value =
            ParentValue::ref_from_bytes(value).map_err(|_| bad("its value is not 12 bytes"));
        let value = value?;
        let is_plain = xattr.flags - XattrFlags::INCOMPLETE == XattrFlags::PARENT;
        if !is_plain || value.inode.get() == 0 {
            return Err(bad("it has other flags, or no inode"));
        }
        let name = xattr.name;
        if name.is_empty() || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
            return Err(bad("its name is not one of an entry"));
        }
        let (parent, generation) = (Ino(value.inode.get()), value.generation.get());
        Ok(Self { parent, generation, name })
    }
}
