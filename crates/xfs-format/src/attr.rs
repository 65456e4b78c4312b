//! Extended attributes (book, "Extended Attributes").
//!
//! They are in the inode ([`short`]), or in one leaf, or in a tree of leaves ([`leaf`]) below nodes
//! ([`crate::da::DaNode`]). Values that do not fit in a leaf lie in blocks of their own
//! ([`crate::remote`]).

pub mod acl;
pub mod leaf;
pub mod short;

use crate::hash::{name_hash, parent_hash};
use crate::parent::ParentPointer;
use crate::{FileBlock, Malformed, Structure};

bitflags::bitflags! {
    /// The flags of an attribute.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct XattrFlags: u8 {
        /// The value is in the leaf.
        const LOCAL = 1;
        /// It is of the namespace `trusted`.
        const TRUSTED = 2;
        /// It is of the namespace `security`.
        const SECURE = 4;
        /// It is a parent pointer.
        const PARENT = 8;
        /// A change of its value in blocks is not complete: readers pass over it.
        const INCOMPLETE = 0x80;
    }
}

impl XattrFlags {
    /// The flags that say the namespace. Without them it is `user`.
    pub const NAMESPACE: Self = Self::TRUSTED.union(Self::SECURE).union(Self::PARENT);

    /// The namespace alone.
    #[must_use]
    pub fn namespace(self) -> Self {
        self & Self::NAMESPACE
    }

    /// The flags of a stored byte, of which those in `allowed` may be set.
    fn parse(byte: u8, allowed: Self) -> Result<Self, Malformed> {
        let flags = Self::from_bits(byte).filter(|&flags| allowed.contains(flags));
        let flags = flags.filter(|flags| flags.namespace().bits().count_ones() <= 1);
        flags.ok_or_else(|| {
            Malformed::new(Structure::AttributeBlock, format!("an attribute has flags {byte:#x}"))
        })
    }
}

/// The longest value, in bytes.
pub const MAX_VALUE: usize = 65_536;

/// Where the value of an attribute is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XattrContent<'a> {
    /// Beside the name.
    Local(&'a [u8]),
    /// In blocks of the attribute fork.
    Remote {
        /// The first block; 0 while an incomplete attribute has none.
        block: FileBlock,
        /// The bytes of the value.
        len: usize,
    },
}

/// An extended attribute, in any form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsXattr<'a> {
    /// The namespace, and whether it is incomplete. [`XattrFlags::LOCAL`] is not here: the value
    /// says that.
    pub flags: XattrFlags,
    /// The name, without its namespace.
    pub name: &'a [u8],
    /// The value.
    pub value: XattrContent<'a>,
}

impl XfsXattr<'_> {
    /// Whether this is the attribute with a namespace and a name.
    #[must_use]
    pub fn is(&self, namespace: XattrFlags, name: &[u8]) -> bool {
        self.flags.namespace() == namespace && self.name == name
    }

    /// The hash by which leaves are sorted.
    pub fn hash(&self) -> Result<u32, Malformed> {
        if self.flags.contains(XattrFlags::PARENT) {
            let pointer = ParentPointer::parse(self)?;
            return Ok(parent_hash(pointer.parent, pointer.name));
        }
        Ok(name_hash(self.name))
    }

    /// Proves what attributes of all forms must have.
    fn check(&self) -> Result<(), Malformed> {
        let bad = |problem| Err(Malformed::new(Structure::AttributeBlock, problem));
        if self.name.is_empty() || self.name.len() > 255 {
            return bad(format!("a name of {} bytes", self.name.len()));
        }
        if self.name.contains(&0) {
            return bad("its name holds a NUL byte".to_owned());
        }
        match self.value {
            XattrContent::Remote { len, .. } if len > MAX_VALUE => {
                bad(format!("a value of {len} bytes"))
            }
            XattrContent::Remote { block: FileBlock(0), len: 1.. }
                if !self.flags.contains(XattrFlags::INCOMPLETE) =>
            {
                bad("a value lies in the first block".to_owned())
            }
            _ => Ok(()),
        }
    }
}
