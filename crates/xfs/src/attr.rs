//! Extended attributes, in all their forms.
//!
//! Names have the namespace in front, as system calls have it. Access control lists have the names
//! and the form of system calls. Parent pointers, and attributes whose change is not complete, are
//! not shown. They may change while they are read: what a call finds is of one moment, as with
//! directories.

pub(crate) mod change;

use std::ops::ControlFlow;

use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::{Errno, Error, FileId, Result};
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::attr::{XattrContent, XattrFlags, XfsXattr, acl as stored_acl};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::remote::RemoteKind;

use crate::buffer::{AttributeView, XfsBuffers, malformed};
use crate::da::{HashTree, LeafWalk};
use crate::inode::fork::{ForkContents, LoadedFork};
use crate::inode::{LoadedInode, XfsInodes};
use crate::remote;

/// The namespaces with their prefixes.
const NAMESPACES: [(&[u8], XattrFlags); 3] = [
    (b"user.", XattrFlags::empty()),
    (b"trusted.", XattrFlags::TRUSTED),
    (b"security.", XattrFlags::SECURE),
];

/// The access control lists: the name of system calls, and that of the disk.
const ACLS: [(&[u8], &[u8]); 2] = [(ACCESS, stored_acl::ACCESS), (DEFAULT, stored_acl::DEFAULT)];

/// The namespace and the name on disk of an attribute; `None` for names that have none.
pub(crate) fn stored_name(name: &[u8]) -> Option<(XattrFlags, &[u8])> {
    let acl = ACLS.iter().find(|(shown, _)| *shown == name);
    if let Some((_, stored)) = acl {
        return Some((XattrFlags::TRUSTED, *stored));
    }
    NAMESPACES.iter().find_map(|(prefix, flags)| Some((*flags, name.strip_prefix(*prefix)?)))
}

/// Gets the name and the value of an attribute.
pub(crate) type XattrVisitor<'a> = dyn FnMut(&[u8], &[u8]) -> ControlFlow<()> + 'a;

/// An attribute of a listing.
struct ListedXattr {
    /// The name that is shown.
    shown: Vec<u8>,
    namespace: XattrFlags,
    /// The name that is stored.
    stored: Vec<u8>,
    /// The value, if it is beside the name. Others are read one by one.
    local: Option<Vec<u8>>,
}

/// The attributes of a file, which may change while they are read: each call reads what one commit
/// has left.
pub(crate) struct FileXattrs<'a> {
    buffers: &'a XfsBuffers,
    inodes: &'a XfsInodes,
    file: FileId,
}

/// The attributes of a file at one moment.
struct XattrMoment<'a> {
    buffers: &'a XfsBuffers,
    inode: &'a LoadedInode,
}

impl<'a> FileXattrs<'a> {
    pub(crate) fn new(buffers: &'a XfsBuffers, inodes: &'a XfsInodes, file: FileId) -> Self {
        Self { buffers, inodes, file }
    }

    fn at_one_moment<T>(&self, mut read: impl FnMut(&XattrMoment<'_>) -> Result<T>) -> Result<T> {
        self.inodes.at_one_moment(self.buffers, self.file, |inode| {
            read(&XattrMoment { buffers: self.buffers, inode })
        })
    }

    /// The value of the attribute with a name; `ENODATA` when there is none.
    pub(crate) fn get(&self, name: &[u8]) -> Result<Vec<u8>> {
        let refused = |errno| {
            let (name, file) = (name.escape_ascii(), self.file);
            Error::posix(errno, format!("xattr `{name}` of {file}"))
        };
        let (namespace, stored) = stored_name(name).ok_or_else(|| refused(Errno::OPNOTSUPP))?;
        if stored.is_empty() {
            return Err(refused(Errno::INVAL));
        }
        let value = self.at_one_moment(|moment| moment.find(namespace, stored))?;
        let value = value.ok_or_else(|| refused(Errno::NODATA))?;
        if matches!(name, ACCESS | DEFAULT) { shown_acl(&value) } else { Ok(value) }
    }

    /// Calls `visit` with the name and the value of each attribute until it breaks. The names of a
    /// leaf are of one moment; they have no hash in common with those of the next one. Values in
    /// blocks of their own are read one by one, each at a moment of its own: all those of a leaf
    /// would be tens of megabytes, and commits would wait for them.
    pub(crate) fn list(&self, visit: &mut XattrVisitor<'_>) -> Result<()> {
        let mut start = Some(0);
        while let Some(hash) = start {
            let (listed, next) = self.at_one_moment(|moment| moment.list_from(hash))?;
            for ListedXattr { shown, namespace, stored, local } in listed {
                let value = match local {
                    Some(value) => Some(value),
                    None => self.at_one_moment(|moment| moment.find(namespace, &stored))?,
                };
                // It may have been removed meanwhile.
                let Some(value) = value else { continue };
                let is_acl = ACLS.iter().any(|(name, _)| *name == shown);
                let value = if is_acl { shown_acl(&value)? } else { value };
                if visit(&shown, &value).is_break() {
                    return Ok(());
                }
            }
            start = next;
        }
        Ok(())
    }
}

impl<'a> XattrMoment<'a> {
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

    /// The attributes from a hash on that are in one leaf, and in further ones as long as they have
    /// the last hash of it. Also returns from which hash on there may be more.
    fn list_from(&self, start: u32) -> Result<(Vec<ListedXattr>, Option<u32>)> {
        let mut listed = Vec::new();
        let Some(fork) = &self.inode.attributes else { return Ok((listed, None)) };
        if let ForkContents::Local(bytes) = &fork.contents {
            for xattr in ShortXattrs::view(bytes) {
                listed.extend(shown(&xattr));
            }
            return Ok((listed, None));
        }
        let Some(mut walk) = self.walk(fork, start)? else { return Ok((listed, None)) };
        let mut last = None;
        loop {
            let buffer = walk.leaf.buffer.clone();
            let view = buffer.attributes(self.buffers.geometry())?;
            let AttributeView::Leaf(leaf) = view else { return Ok((listed, None)) };
            for (entry, xattr) in leaf.hashes.iter().zip(leaf.xattrs(0)) {
                let hash = entry.hash.get();
                if last.is_some_and(|(end, is_full)| is_full && hash > end) {
                    return Ok((listed, Some(hash)));
                }
                if hash >= start {
                    listed.extend(shown(&xattr));
                    last = Some((hash, false));
                }
            }
            if !walk.advance(leaf.info)? {
                return Ok((listed, None));
            }
            last = last.map(|(hash, _)| (hash, true));
        }
    }
}

/// What a listing shows of an attribute; `None` for those that it does not show.
fn shown(xattr: &XfsXattr<'_>) -> Option<ListedXattr> {
    if xattr.flags.contains(XattrFlags::INCOMPLETE) {
        return None;
    }
    let namespace = xattr.flags.namespace();
    let (prefix, _) = NAMESPACES.iter().find(|(_, flags)| *flags == namespace)?;
    let acl = ACLS.iter().find(|(_, stored)| xattr.is(XattrFlags::TRUSTED, stored));
    Some(ListedXattr {
        shown: acl.map_or_else(|| [prefix, xattr.name].concat(), |(shown, _)| shown.to_vec()),
        namespace,
        stored: xattr.name.to_vec(),
        local: match xattr.value {
            XattrContent::Local(value) => Some(value.to_vec()),
            XattrContent::Remote { len: 0, .. } => Some(Vec::new()),
            XattrContent::Remote { .. } => None,
        },
    })
}

/// An access control list in the form of system calls.
fn shown_acl(value: &[u8]) -> Result<Vec<u8>> {
    stored_acl::from_disk(value).map_err(malformed)
}
