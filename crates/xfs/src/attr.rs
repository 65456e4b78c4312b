//! Extended attributes, in all their forms.
//!
//! Names have the namespace in front, as system calls have it. Access control lists have the names
//! and the form of system calls. Parent pointers, and attributes whose change is not complete, are
//! not shown.

#[cfg_attr(not(test), expect(dead_code, reason = "calls that set attributes are to come"))]
pub(crate) mod change;

use std::ops::ControlFlow;

use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::attr::{XattrContent, XattrFlags, XfsXattr, acl as stored_acl};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::remote::RemoteKind;

use crate::buffer::{AttributeView, XfsBuffers, malformed};
use crate::da::{HashTree, LeafWalk};
use crate::inode::LoadedInode;
use crate::inode::fork::{ForkContents, LoadedFork};
use crate::remote;

/// The namespaces with their prefixes.
const NAMESPACES: [(&[u8], XattrFlags); 3] = [
    (b"user.", XattrFlags::empty()),
    (b"trusted.", XattrFlags::TRUSTED),
    (b"security.", XattrFlags::SECURE),
];

/// The access control lists: the name of system calls, and that of the disk.
const ACLS: [(&[u8], &[u8]); 2] = [(ACCESS, stored_acl::ACCESS), (DEFAULT, stored_acl::DEFAULT)];

/// Gets the name and the value of an attribute.
pub(crate) type XattrVisitor<'a> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'a;

/// The attributes of a file.
pub(crate) struct FileXattrs<'a> {
    buffers: &'a XfsBuffers,
    inode: &'a LoadedInode,
}

impl<'a> FileXattrs<'a> {
    pub(crate) fn new(buffers: &'a XfsBuffers, inode: &'a LoadedInode) -> Self {
        Self { buffers, inode }
    }

    /// The value of the attribute with a name; `ENODATA` when there is none.
    pub(crate) fn get(&self, name: &[u8]) -> Result<Vec<u8>> {
        let refused = |errno| {
            let (name, file) = (name.escape_ascii(), self.inode.file());
            Error::posix(errno, format!("xattr `{name}` of {file}"))
        };
        let acl = ACLS.iter().find(|(shown, _)| *shown == name);
        let in_namespace = |(prefix, flags): &(&[u8], XattrFlags)| {
            name.strip_prefix(*prefix).map(|name| (*flags, name))
        };
        let (namespace, stored) = match acl {
            Some((_, stored)) => (XattrFlags::TRUSTED, *stored),
            None => {
                NAMESPACES.iter().find_map(in_namespace).ok_or_else(|| refused(Errno::OPNOTSUPP))?
            }
        };
        if stored.is_empty() {
            return Err(refused(Errno::INVAL));
        }
        let value = self.find(namespace, stored)?.ok_or_else(|| refused(Errno::NODATA))?;
        if acl.is_some() { shown_acl(&value) } else { Ok(value) }
    }

    fn find(&self, namespace: XattrFlags, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let Some(fork) = &self.inode.attributes else { return Ok(None) };
        if let ForkContents::Local(bytes) = &fork.contents {
            let found = ShortXattrs::view(bytes).find(|xattr| xattr.is(namespace, name));
            return found.map(|xattr| self.value(fork, &xattr)).transpose();
        }
        let hash = name_hash(name);
        let Some(mut walk) = self.walk(fork, hash)? else { return Ok(None) };
        loop {
            let buffer = walk.leaf.buffer.clone();
            let view = buffer.attributes(self.buffers.geometry())?;
            let AttributeView::Leaf(leaf) = view else { return Ok(None) };
            if let Some((_, xattr)) = leaf.find(namespace, name) {
                return self.value(fork, &xattr).map(Some);
            }
            let goes_on = leaf.hashes.last().is_none_or(|last| last.hash.get() == hash);
            if !goes_on || !walk.advance(leaf.info)? {
                return Ok(None);
            }
        }
    }

    /// A walk along the leaves from that with `hash` on; `None` when there are none.
    fn walk(&self, fork: &'a LoadedFork, hash: u32) -> Result<Option<LeafWalk<'a>>> {
        // A fork without blocks has no attributes.
        if matches!(&fork.contents, ForkContents::Extents(items) if items.is_empty()) {
            return Ok(None);
        }
        let tree = HashTree { buffers: self.buffers, inode: self.inode, fork, is_directory: false };
        Ok(tree.find(FileBlock(0), hash)?.map(|leaf| tree.walk(leaf)))
    }

    fn value(&self, fork: &LoadedFork, xattr: &XfsXattr<'_>) -> Result<Vec<u8>> {
        match xattr.value {
            XattrContent::Local(value) => Ok(value.to_vec()),
            XattrContent::Remote { len: 0, .. } => Ok(Vec::new()),
            XattrContent::Remote { block, len } => {
                let kind = RemoteKind::AttrValue;
                remote::read(self.buffers, fork, self.inode.ino, kind, block, len)
            }
        }
    }

    /// Calls `visit` with the name and the value of each attribute until it breaks.
    pub(crate) fn list(&self, visit: &mut XattrVisitor<'_>) -> Result<()> {
        let Some(fork) = &self.inode.attributes else { return Ok(()) };
        if let ForkContents::Local(bytes) = &fork.contents {
            for xattr in ShortXattrs::view(bytes) {
                if self.show(fork, &xattr, visit)?.is_break() {
                    break;
                }
            }
            return Ok(());
        }
        let Some(mut walk) = self.walk(fork, 0)? else { return Ok(()) };
        loop {
            let buffer = walk.leaf.buffer.clone();
            let view = buffer.attributes(self.buffers.geometry())?;
            let AttributeView::Leaf(leaf) = view else { return Ok(()) };
            for xattr in leaf.xattrs(0) {
                if self.show(fork, &xattr, visit)?.is_break() {
                    return Ok(());
                }
            }
            if !walk.advance(leaf.info)? {
                return Ok(());
            }
        }
    }

    fn show(
        &self,
        fork: &LoadedFork,
        xattr: &XfsXattr<'_>,
        visit: &mut XattrVisitor<'_>,
    ) -> Result<ControlFlow<()>> {
        if xattr.flags.contains(XattrFlags::INCOMPLETE) {
            return Ok(ControlFlow::Continue(()));
        }
        let namespace = xattr.flags.namespace();
        let Some((prefix, _)) = NAMESPACES.iter().find(|(_, flags)| *flags == namespace) else {
            return Ok(ControlFlow::Continue(()));
        };
        let value = self.value(fork, xattr)?;
        let acl = ACLS.iter().find(|(_, stored)| xattr.is(XattrFlags::TRUSTED, stored));
        Ok(match acl {
            Some((shown, _)) => visit(shown, &shown_acl(&value)?),
            None => visit(&[prefix, xattr.name].concat(), &value),
        })
    }
}

/// An access control list in the form of system calls.
fn shown_acl(value: &[u8]) -> Result<Vec<u8>> {
    stored_acl::from_disk(value).map_err(malformed)
}
