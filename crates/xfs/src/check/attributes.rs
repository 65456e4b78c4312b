//! Attributes: leaves, values in blocks of their own, and parent pointers.

use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::attr::{XattrContent, XattrFlags, XfsXattr};
use offshoot_xfs_format::parent::ParentPointer;
use offshoot_xfs_format::remote::RemoteKind;

use super::finding::XfsFindingCode as Code;
use super::inode::InodePass;
use super::tally::TallyPlace;
use crate::buffer::AttributeView;
use crate::da::HashTree;
use crate::inode::LoadedInode;
use crate::inode::fork::{ForkContents, LoadedFork};
use crate::remote;

impl InodePass<'_> {
    /// Checks the attributes of an inode, whose fork has so many blocks.
    pub(super) fn attributes(&self, inode: &LoadedInode, blocks: u64) {
        let Some(fork) = &inode.attributes else { return };
        // No two values share a block.
        let mut left = blocks;
        match &fork.contents {
            ForkContents::Local(bytes) => {
                ShortXattrs::view(bytes)
                    .for_each(|xattr| self.attribute(inode, fork, &xattr, &mut left));
            }
            // A fork without blocks has no attributes.
            ForkContents::Extents(items) if items.is_empty() => {}
            _ => {
                let check = self.check;
                let tree = HashTree { buffers: check.buffers, inode, fork, is_directory: false };
                check.walk_hashes(&tree, FileBlock(0), &mut |buffer| {
                    let view = buffer.attributes(check.geometry());
                    if let Ok(AttributeView::Leaf(leaf)) = view {
                        if let Err(problem) = leaf.check_space(check.geometry()) {
                            let code = Code::AttributeSpace;
                            check.findings.add(code, inode.ino, problem.problem);
                        }
                        leaf.xattrs(0)
                            .for_each(|xattr| self.attribute(inode, fork, &xattr, &mut left));
                    }
                });
            }
        }
    }

    fn attribute(
        &self,
        inode: &LoadedInode,
        fork: &LoadedFork,
        xattr: &XfsXattr<'_>,
        left: &mut u64,
    ) {
        let check = self.check;
        if xattr.flags.contains(XattrFlags::INCOMPLETE) {
            return;
        }
        if let XattrContent::Remote { block, len: len @ 1.. } = xattr.value {
            let kind = RemoteKind::AttrValue;
            let blocks = RemoteKind::blocks(check.geometry(), len) as u64;
            let Some(rest) = left.checked_sub(blocks) else {
                let problem = "its values have more blocks than its fork";
                return check.findings.add(Code::Attribute, inode.ino, problem);
            };
            *left = rest;
            let value = remote::read(check.buffers, fork, inode.ino, kind, block, len);
            if let Err(error) = value {
                check.findings.add_error(Code::Attribute, inode.ino, &error);
            }
        }
        if !xattr.flags.contains(XattrFlags::PARENT) {
            return;
        }
        match ParentPointer::parse(xattr) {
            Ok(ParentPointer { parent, generation, name }) => {
                if let TallyPlace::Used(tally) = self.tally.place(check, inode.ino) {
                    tally.take_name(parent, generation, name);
                }
            }
            Err(problem) => {
                check.findings.add(Code::ParentPointer, inode.ino, problem.problem);
            }
        }
    }
}
