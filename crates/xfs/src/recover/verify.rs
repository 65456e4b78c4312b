//! The types of blocks that the log names, and the checks of each.

use offshoot_vfs::{Malformed, Structure};
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsTree};
use offshoot_xfs_format::da::{DaExpected, DaKind, DaNode};
use offshoot_xfs_format::dir::block::DirBlock;
use offshoot_xfs_format::dir::data::DirData;
use offshoot_xfs_format::dir::free::DirFree;
use offshoot_xfs_format::dir::leaf::DirLeaf;
use offshoot_xfs_format::group::{Agf, Agfl, Agi};
use offshoot_xfs_format::inode::INODE_MAGIC;
use offshoot_xfs_format::log::items::XfsBufferType;
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::superblock::{MAGIC, XfsSuperblock};
use offshoot_xfs_format::{AgNumber, BasicBlock, XfsGeometry};

/// Whether `bytes` have the magic number of such a block, if it has one.
pub(super) fn has_magic(kind: XfsBufferType, geometry: &XfsGeometry, bytes: &[u8]) -> bool {
    use XfsBufferType as Type;
    let v5 = geometry.has_checksums();
    let directory = |kind| DaKind::of_directory(geometry, bytes) == Some(kind);
    match kind {
        Type::Btree => XfsTree::of_block(bytes, geometry).is_some(),
        Type::Agf => bytes.starts_with(b"XAGF"),
        Type::Agfl => !v5 || bytes.starts_with(b"XAFL"),
        Type::Agi => bytes.starts_with(b"XAGI"),
        Type::Inodes => bytes.starts_with(&INODE_MAGIC),
        Type::Symlink => !v5 || bytes.starts_with(b"XSLM"),
        Type::AttributeValue => !v5 || bytes.starts_with(b"XARM"),
        Type::DirectoryBlock => directory(DaKind::DirBlock),
        Type::DirectoryData => directory(DaKind::DirData),
        Type::DirectoryFree => directory(DaKind::DirFree),
        Type::DirectoryLeaf => directory(DaKind::DirLeaf),
        Type::DirectoryLeafOfNode => directory(DaKind::DirNodeLeaf),
        Type::Node => directory(DaKind::DirNode),
        Type::AttributeLeaf => DaKind::of_attributes(geometry, bytes) == Some(DaKind::AttrLeaf),
        Type::Superblock => bytes.starts_with(&MAGIC),
        Type::UserDquot
        | Type::ProjectDquot
        | Type::GroupDquot
        | Type::RealtimeBitmap
        | Type::RealtimeSummary => true,
    }
}

/// Proves a block with the magic number of its type: its checksum, and all that it shows by itself.
pub(super) fn verify(
    kind: XfsBufferType,
    geometry: &XfsGeometry,
    place: BasicBlock,
    bytes: &[u8],
) -> Result<(), Malformed> {
    use XfsBufferType as Type;
    let group = geometry.at(place).map_or(AgNumber(u32::MAX), |(ag, _)| ag);
    let expected = &DaExpected { place, owner: None, block: None, is_sealed: true };
    match kind {
        Type::Btree => {
            let outside = || Malformed::new(Structure::BtreeBlock, "it is not in the volume");
            let (ag, block) = geometry.at(place).ok_or_else(outside)?;
            let tree = XfsTree::of_block(bytes, geometry).unwrap_or(XfsTree::Extents);
            let at = geometry.fs_block(ag, block);
            XfsBtreeBlock::verify(bytes, geometry, tree, at, None).map(drop)
        }
        Type::Agf => Agf::parse(bytes, geometry, group).map(drop),
        Type::Agfl => Agfl::parse(bytes, geometry, group).map(drop),
        Type::Agi => Agi::parse(bytes, geometry, group).map(drop),
        Type::Symlink => RemoteKind::SymlinkTarget.check(geometry, bytes, expected),
        Type::AttributeValue => RemoteKind::AttrValue.check(geometry, bytes, expected),
        Type::DirectoryBlock => DirBlock::parse(geometry, bytes, expected).map(drop),
        Type::DirectoryData => DirData::parse(geometry, bytes, expected).map(drop),
        Type::DirectoryFree => DirFree::parse(geometry, bytes, expected).map(drop),
        Type::DirectoryLeaf => DirLeaf::parse(geometry, DaKind::DirLeaf, bytes, expected).map(drop),
        Type::DirectoryLeafOfNode => {
            DirLeaf::parse(geometry, DaKind::DirNodeLeaf, bytes, expected).map(drop)
        }
        Type::Node => {
            // Both kinds of nodes have one magic number.
            let is_block = bytes.len() == geometry.block_size();
            let kind = if is_block { DaKind::AttrNode } else { DaKind::DirNode };
            DaNode::parse(geometry, kind, bytes, expected).map(drop)
        }
        Type::AttributeLeaf => XattrLeaf::parse(geometry, bytes, expected).map(drop),
        Type::Superblock => XfsSuperblock::parse(bytes).map(drop),
        // Each inode is proved when it is read.
        Type::Inodes
        | Type::UserDquot
        | Type::ProjectDquot
        | Type::GroupDquot
        | Type::RealtimeBitmap
        | Type::RealtimeSummary => Ok(()),
    }
}
