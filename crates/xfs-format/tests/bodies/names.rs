//! Bodies of tests with hostile directories and attributes.

use offshoot_xfs_format::attr::leaf::{self as xattrs, XattrLeaf};
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::attr::{XfsXattr, acl};
use offshoot_xfs_format::da::{DaEdit, DaExpected, DaKind, DaNode};
use offshoot_xfs_format::dir::block::{self, DirBlock};
use offshoot_xfs_format::dir::data::{self, DirData};
use offshoot_xfs_format::dir::free::{self, DirFree};
use offshoot_xfs_format::dir::leaf::{self, DirHash, DirLeaf};
use offshoot_xfs_format::dir::short::{ShortDir, ShortDirView};
use offshoot_xfs_format::dir::{DirCookie, XfsDirEntry, file_type};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::parent::ParentPointer;
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino, Lsn, Malformed, XfsGeometry, csum, symlink};

use super::geometry;

/// What blocks have to be.
const EXPECTED: DaExpected = DaExpected {
    place: BasicBlock(800),
    owner: Some(Ino(131)),
    block: Some(FileBlock(0)),
    is_sealed: true,
};

/// The kinds of blocks, and then the kinds of lists in an inode and in blocks of their own.
const KINDS: [DaKind; 8] = [
    DaKind::DirBlock,
    DaKind::DirData,
    DaKind::DirFree,
    DaKind::DirLeaf,
    DaKind::DirNodeLeaf,
    DaKind::DirNode,
    DaKind::AttrLeaf,
    DaKind::AttrNode,
];

/// The entries of a block, whatever its kind; proves it on the way.
pub(crate) fn walk(
    geometry: &XfsGeometry,
    bytes: &[u8],
    expected: &DaExpected,
) -> Result<Vec<(String, Ino)>, Malformed> {
    let Some(kind) = DaKind::of_directory(geometry, bytes) else {
        return DirData::parse(geometry, bytes, expected).map(|_| Vec::new());
    };
    let list = |data: &DirData<'_>| {
        let named = |entry: XfsDirEntry<'_>| {
            assert_eq!(data.entry(entry.offset).unwrap(), entry);
            (String::from_utf8_lossy(entry.name).into_owned(), entry.ino)
        };
        data.entries(0).map(named).collect()
    };
    Ok(match kind {
        DaKind::DirBlock => {
            let directory = DirBlock::parse(geometry, bytes, expected)?;
            for entry in directory.data.entries(0) {
                assert!(directory.find(entry.name).unwrap().is_some());
            }
            if let Ok(short) = block::to_short(geometry, &directory) {
                let _ = short.encode(geometry);
            }
            list(&directory.data)
        }
        DaKind::DirData => list(&DirData::parse(geometry, bytes, expected)?),
        DaKind::DirFree => {
            DirFree::parse(geometry, bytes, expected)?;
            Vec::new()
        }
        DaKind::DirLeaf | DaKind::DirNodeLeaf => {
            DirLeaf::parse(geometry, kind, bytes, expected)?;
            Vec::new()
        }
        _ => {
            DaNode::parse(geometry, kind, bytes, expected)?;
            Vec::new()
        }
    })
}

/// Changes a block that was not proved: it must not panic.
pub(crate) fn change_blindly(geometry: &XfsGeometry, kind: DaKind, bytes: &mut [u8]) {
    if let Ok(directory) = DirBlock::view(geometry, bytes) {
        let _ = (directory.find(b".."), directory.data.entries(0).count());
    }
    if let Ok(data) = DirData::view(geometry, bytes) {
        let _ = (data.entries(0).count(), data.entry(bytes.len() / 2));
    }
    let mut edit = DaEdit::fill(kind, bytes);
    let entry =
        XfsDirEntry { name: b"new", ino: Ino(128), file_type: file_type::REG_FILE, offset: 0 };
    let hash = DirHash::new(7, DirCookie(9));
    match kind {
        DaKind::DirBlock => {
            let at = kind.header_len(geometry);
            let _ = block::insert(geometry, &mut edit, &entry);
            let _ = block::remove(geometry, &mut edit, at, b".");
        }
        DaKind::DirData => {
            let _ = data::insert(geometry, &mut edit, &entry);
            let _ = data::remove(geometry, &mut edit, kind.header_len(geometry));
            let _ = data::set_file(geometry, &mut edit, 200, (entry.ino, 1));
            let _ = block::from_leaf(geometry, &mut edit, &[hash]);
        }
        DaKind::DirLeaf => {
            let _ = leaf::spare(geometry, kind, edit.block());
            let _ = leaf::insert(geometry, &mut edit, hash);
            let _ = leaf::remove(geometry, &mut edit, hash);
            let _ = leaf::set_best(geometry, &mut edit, 3, 8);
        }
        DaKind::DirFree => {
            let _ = free::set_best(geometry, &mut edit, 3, 8);
        }
        _ => {}
    }
}

/// A sound block of a kind with nothing in it.
fn empty(geometry: &XfsGeometry, kind: DaKind) -> Result<Vec<u8>, Malformed> {
    let expected = &EXPECTED;
    match kind {
        DaKind::DirBlock => {
            let short = ShortDir { parent: Ino(128), entries: Vec::new() };
            block::from_short(geometry, expected, &short)
        }
        DaKind::DirData => data::encode_empty(geometry, expected),
        DaKind::DirFree => DirFree::encode(geometry, expected, 0, &[]),
        DaKind::DirLeaf | DaKind::DirNodeLeaf => {
            DirLeaf::encode(geometry, kind, expected, (0, 0), &[], &[])
        }
        DaKind::DirNode | DaKind::AttrNode => {
            DaNode::encode(geometry, kind, expected, (0, 0, 1), &[])
        }
        DaKind::AttrLeaf => XattrLeaf::encode(geometry, expected, (0, 0), &[]),
    }
}

/// Lists attributes, and uses everything in them.
fn use_xattrs<'a>(list: impl Iterator<Item = XfsXattr<'a>>) {
    for xattr in list {
        let _ = (xattr.hash(), ParentPointer::parse(&xattr));
    }
}

/// A block of an attribute fork.
fn walk_attributes(geometry: &XfsGeometry, kind: DaKind, bytes: &mut [u8]) {
    if kind == DaKind::AttrNode {
        let node = DaNode::parse(geometry, kind, bytes, &EXPECTED);
        let _ = node.map(|node| node.find(7));
        return;
    }
    if let Ok(leaf) = XattrLeaf::parse(geometry, bytes, &EXPECTED) {
        use_xattrs(leaf.xattrs(0));
        let _ = (leaf.check_space(geometry), leaf.with_hash(7).count());
    }
    let mut edit = DaEdit::fill(kind, bytes);
    let _ = xattrs::remove(geometry, &mut edit, 0);
    let _ = xattrs::set_remote(geometry, &mut edit, 1, FileBlock(1), 9);
    let _ = xattrs::set_incomplete(geometry, &mut edit, 1, true);
}

/// Lists in an inode, and values in blocks of their own.
fn lists_and_values(data: &[u8], geometry: &XfsGeometry) {
    if let Ok(directory) = ShortDir::parse(geometry, data) {
        let _ = directory.encode(geometry);
    }
    if let Ok(view) = ShortDirView::new(geometry, data) {
        let _ = (view.entries().count(), view.find(b"name"));
    }
    if let Ok(xattrs) = ShortXattrs::parse(data) {
        let _ = xattrs.encode();
        use_xattrs(xattrs.list.into_iter());
    }
    let _ = (ShortXattrs::view(data).count(), acl::from_disk(data), acl::to_disk(data));
    let _ = symlink::check(data);
    for kind in [RemoteKind::AttrValue, RemoteKind::SymlinkTarget] {
        // Behind a right header that has other numbers.
        let size = geometry.block_size();
        let Ok(mut block) = kind.encode(geometry, &EXPECTED, 0, &[1; 100], size) else { continue };
        if let Some((first, rest)) = data.split_first_chunk::<8>() {
            block[4..12].copy_from_slice(first);
            let len = rest.len().min(size - 56);
            block[56..56 + len].copy_from_slice(&rest[..len]);
        }
        kind.seal(geometry, &mut block, Lsn::NONE);
        let _ = kind.check(geometry, &block, &EXPECTED);
        let _ = kind.parse(geometry, &block, &EXPECTED, data.len() / 2, data.len());
    }
}

/// The first byte chooses a kind of blocks of directories and attributes, or all lists without a
/// block, and the version of the volume. The others are the block, which says that it is what the
/// volume expects there, with a right checksum.
pub(crate) fn names(data: &[u8]) {
    let Some((&choice, data)) = data.split_first() else { return };
    let mut geometry = geometry();
    if choice & 0x80 != 0 {
        geometry.layout -= XfsLayout::CHECKSUMS;
    }
    let Some(&kind) = KINDS.get(usize::from(choice & 0xf)) else {
        return lists_and_values(data, &geometry);
    };
    let sound = empty(&geometry, kind).expect("an empty block");
    let mut bytes = data.to_vec();
    bytes.resize(sound.len(), 0);
    let identity = kind.identity();
    let magic = if identity.crc < 12 { 0..4 } else { 8..10 };
    let mut fixed = vec![magic];
    if geometry.has_checksums() {
        let fields = [(identity.uuid, 16)].into_iter().chain(identity.blkno.map(|at| (at, 8)));
        let fields = fields.chain(identity.owner);
        fixed.extend(fields.map(|(at, len)| at..at + len));
    }
    for range in fixed {
        bytes[range.clone()].copy_from_slice(&sound[range]);
    }
    if geometry.has_checksums() {
        csum::store(&mut bytes, identity.crc);
    }
    if matches!(kind, DaKind::AttrLeaf | DaKind::AttrNode) {
        walk_attributes(&geometry, kind, &mut bytes);
    } else {
        let _ = walk(&geometry, &bytes, &EXPECTED);
        change_blindly(&geometry, kind, &mut bytes);
    }
}

/// The bytes of an empty block of each kind, after the byte that chooses it.
pub(crate) fn sound_inputs() -> impl Iterator<Item = Vec<u8>> {
    (0_u8..16).flat_map(|choice| {
        let geometry = geometry();
        let kind = KINDS.get(usize::from(choice));
        let bytes =
            kind.map_or_else(|| vec![1; 60], |kind| empty(&geometry, *kind).expect("sound"));
        [choice, choice | 0x80].map(|choice| [&[choice], &bytes[..]].concat())
    })
}
