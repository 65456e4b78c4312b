//! What the full check of a tree block accepts and refuses.
//!
//! The first test is the most important one: the check accepts every block that the kernel wrote.
//! The others build a correct leaf, change one thing, and expect the message that names it.

mod bodies;
mod leaves;
mod mutation;

use bodies::fix_checksum;
use leaves::{NODE, blocks, geometry};
use mutation::pack;
use offshoot_btrfs_format::block::{BlockHeader, HEADER_SIZE, NodePointer};
use offshoot_btrfs_format::check::{ExpectedBlock, Geometry, expect, verify};
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::dir::{DirEntryItem, extref_hash, name_hash};
use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::key::{DiskKey, objectid};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, TreeId};
use uuid::Uuid;
use zerocopy::{FromZeros, IntoBytes};

type CheckedItems = Vec<(Key, Vec<u8>)>;

#[test]
fn what_the_kernel_wrote_passes() {
    let blocks = blocks();
    assert!(blocks.len() >= 60);
    for block in blocks {
        let header = BlockHeader::view(&block).unwrap();
        let logical = Logical(header.bytenr.get());
        verify(&block, &geometry(&block), logical)
            .unwrap_or_else(|error| panic!("block {logical} of {}: {error}", header.owner()));
    }
}

/// A leaf of the tree `owner` with these items and the right checksum.
fn leaf(owner: TreeId, items: &CheckedItems) -> (Vec<u8>, Geometry, Logical) {
    let mut header = vec![0; NODE];
    header[32..48].fill(9);
    header[48..56].copy_from_slice(&1_048_576u64.to_le_bytes());
    header[80..88].copy_from_slice(&100u64.to_le_bytes());
    header[88..96].copy_from_slice(&owner.0.to_le_bytes());
    let mut leaf = pack(&header, items);
    fix_checksum(&mut leaf, ChecksumType::Crc32c);
    let geometry = geometry(&leaf);
    (leaf, geometry, Logical(1_048_576))
}

#[track_caller]
fn accepts(owner: TreeId, items: &CheckedItems) {
    let (leaf, geometry, logical) = leaf(owner, items);
    if let Err(error) = verify(&leaf, &geometry, logical) {
        panic!("refused: {error}");
    }
}

#[track_caller]
fn refuses(owner: TreeId, items: &CheckedItems, message: &str) {
    let (leaf, geometry, logical) = leaf(owner, items);
    match verify(&leaf, &geometry, logical) {
        Ok(()) => panic!("accepted, though {message}"),
        Err(error) => assert!(error.to_string().contains(message), "{error}: not {message}"),
    }
}

/// Accepts a correct item, and refuses each of its wrong variants with a message.
#[track_caller]
fn item(owner: TreeId, key: Key, right: &[u8], wrong: &[(Key, Vec<u8>, &str)]) {
    accepts(owner, &vec![(key, right.to_vec())]);
    for (key, data, message) in wrong {
        refuses(owner, &vec![(*key, data.clone())], message);
    }
}

fn key(objectid: u64, item_type: ItemType, offset: u64) -> Key {
    Key::new(objectid, item_type, offset)
}

/// `bytes` with the bytes from `at` on replaced by `field`.
fn with(bytes: &[u8], at: usize, field: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + field.len()].copy_from_slice(field);
    bytes
}

fn inode(mode: u32) -> Vec<u8> {
    let mut inode = InodeItem::new_zeroed();
    inode.generation = 100.into();
    inode.transid = 101.into();
    inode.nlink = 1.into();
    inode.mode = mode.into();
    inode.as_bytes().to_vec()
}

#[test]
fn inodes() {
    let at = key(257, ItemType::INODE_ITEM, 0);
    let file = inode(0o100_644);
    item(
        TreeId::FS,
        at,
        &file,
        &[
            (key(255, ItemType::INODE_ITEM, 0), file.clone(), "255 is not an inode number"),
            (key(257, ItemType::INODE_ITEM, 1), file.clone(), "key offset 0 expected"),
            (at, file[..159].to_vec(), "160 bytes expected, 159 found"),
            (at, inode(0o170_644), "mode 0o170644 names no file type"),
            (at, inode(0o1_100_644), "unknown bits"),
            (at, with(&inode(0o040_755), 40, &[2]), "a directory with 2 links"),
            (at, with(&file, 65, &[0x80]), "unknown flags 0x8000"),
        ],
    );
    // Accepted: an inode of a free-space cache without a type, wrong generations of very old
    // kernels, and a flag of fs-verity.
    accepts(TreeId::FS, &vec![(key(objectid::FREE_INO, ItemType::INODE_ITEM, 0), inode(0))]);
    accepts(TreeId::FS, &vec![(at, with(&file, 0, &[255; 16]))]);
    accepts(TreeId::FS, &vec![(at, with(&file, 68, &[1]))]);
}

fn inode_ref(index: u64, name: &[u8]) -> Vec<u8> {
    let len = u16::try_from(name.len()).unwrap();
    [&index.to_le_bytes()[..], &len.to_le_bytes(), name].concat()
}

#[test]
fn names_of_inodes() {
    let at = key(257, ItemType::INODE_REF, 256);
    let two = [inode_ref(2, b"one"), inode_ref(3, &[0xff; 255])].concat();
    item(
        TreeId::FS,
        at,
        &two,
        &[
            (at, Vec::new(), "at least 10 bytes expected"),
            (at, two[..two.len() - 1].to_vec(), "its name is 255 bytes, but only 254 are left"),
            (at, inode_ref(2, b"a/b"), "holds a slash or a NUL"),
            (at, inode_ref(2, b"a\0"), "holds a slash or a NUL"),
            (at, inode_ref(2, b"."), "the name is ."),
            (at, inode_ref(2, b".."), "the name is .."),
            (at, inode_ref(2, b""), "a name of 1 to 255 bytes expected, 0 found"),
            (at, inode_ref(2, &[b'n'; 256]), "a name of 1 to 255 bytes expected, 256 found"),
        ],
    );
    // A root directory is its own parent, and has the name `..` there.
    accepts(TreeId::FS, &vec![(key(256, ItemType::INODE_REF, 256), inode_ref(0, b".."))]);
    accepts(TreeId::ROOT, &vec![(key(6, ItemType::INODE_REF, 6), inode_ref(0, b".."))]);

    let extref = [&256u64.to_le_bytes()[..], &inode_ref(4, b"name")].concat();
    let at = key(257, ItemType::INODE_EXTREF, extref_hash(256, b"name"));
    let elsewhere = key(257, ItemType::INODE_EXTREF, at.offset ^ 1);
    item(
        TreeId::FS,
        at,
        &extref,
        &[
            (elsewhere, extref.clone(), "the name name in 256 has the hash"),
            (at, extref[..21].to_vec(), "its name is 4 bytes, but only 3 are left"),
        ],
    );
}

fn entry(location: Key, file_type: u8, name: &[u8], data: &[u8]) -> Vec<u8> {
    let item = DirEntryItem {
        location: DiskKey::from(location),
        transid: 7.into(),
        data_len: u16::try_from(data.len()).unwrap().into(),
        name_len: u16::try_from(name.len()).unwrap().into(),
        file_type,
    };
    [item.as_bytes(), name, data].concat()
}

#[test]
fn directory_entries() {
    let target = key(258, ItemType::INODE_ITEM, 0);
    let subvolume = key(300, ItemType::ROOT_ITEM, u64::MAX);
    let at = key(256, ItemType::DIR_ITEM, name_hash(b"name"));
    let index = key(256, ItemType::DIR_INDEX, 2);
    let right = entry(target, 1, b"name", b"");
    let named = |name: &[u8]| (index, entry(target, 1, name, b""));
    item(
        TreeId::FS,
        at,
        &right,
        &[
            (key(256, ItemType::DIR_ITEM, 5), right.clone(), "the name name has the hash"),
            (at, entry(target, 0, b"name", b""), "type 0 is none of a directory entry"),
            (at, entry(target, 8, b"name", b""), "type 8 is none of a directory entry"),
            (at, entry(target, 1, b"name", b"x"), "1 bytes of data after the name"),
            (at, entry(key(1, ItemType::DIR_ITEM, 0), 1, b"name", b""), "neither an inode nor"),
            (at, right[..33].to_vec(), "its name is 4 bytes, but only 3 are left"),
            (at, right[..29].to_vec(), "29 bytes, but it needs 30"),
            (named(b"..").0, named(b"..").1, "the name is .."),
            (named(b"a/b").0, named(b"a/b").1, "holds a slash"),
            (named(b"").0, named(b"").1, "a name of 1 to 255"),
            (named(&[b'n'; 256]).0, named(&[b'n'; 256]).1, "256 found"),
            (index, Vec::new(), "one entry expected, 0 found"),
            (index, [right.clone(), right.clone()].concat(), "one entry expected, 2 found"),
        ],
    );
    accepts(TreeId::FS, &vec![(at, entry(subvolume, 2, b"name", b""))]);
    accepts(TreeId::FS, &vec![(index, entry(target, 7, &[0xff; 255], b""))]);
}

/// A reader takes these. A volume that is written has none of them, because the kernel refuses the
/// leaf.
#[test]
fn what_only_a_writer_refuses() {
    let inode_at = key(257, ItemType::INODE_ITEM, 0);
    let inode_of = |ino| (key(ino, ItemType::INODE_ITEM, 0), inode(0o100_644));
    let name_at = key(257, ItemType::DIR_ITEM, name_hash(b"name"));
    let leads = |place| vec![(name_at, entry(place, 1, b"name", b""))];
    let attribute = |place| {
        let at = key(257, ItemType::XATTR_ITEM, name_hash(b"user.a"));
        vec![(at, entry(place, 8, b"user.a", b"value"))]
    };
    let data_ref = |root: u64, ino: u64, offset: u64, count: u32| {
        let numbers = [root.to_le_bytes(), ino.to_le_bytes(), offset.to_le_bytes()];
        [&numbers.concat()[..], &count.to_le_bytes()].concat()
    };
    let keyed = |data_ref| vec![(key(1 << 20, ItemType::EXTENT_DATA_REF, 5), data_ref)];
    let inline = |roots: [u64; 2]| {
        // Two references, of generation 5, a tree block.
        let head = [2u64.to_le_bytes(), 5u64.to_le_bytes(), 2u64.to_le_bytes()].concat();
        let one = |root: u64| [&[ItemType::TREE_BLOCK_REF.0][..], &root.to_le_bytes()].concat();
        let item = [head, one(roots[0]), one(roots[1])].concat();
        vec![(key(1 << 20, ItemType::METADATA_ITEM, 0), item)]
    };
    let fs = TreeId::FS;
    let place = |objectid, item_type, offset| key(objectid, item_type, offset);
    let newer = with(&inode(0o100_644), 0, &300u64.to_le_bytes());
    let touched_later = with(&inode(0o100_644), 8, &300u64.to_le_bytes());
    let hole = |disk_num_bytes, offset| {
        let item = regular(1, 0, [4 * K, 0, disk_num_bytes, offset, 4 * K]);
        vec![(key(257, ItemType::EXTENT_DATA, 0), item)]
    };
    let cases = [
        (fs, vec![inode_of(256), (name_at, leads(inode_at)[0].1.clone())], "is missing before"),
        (fs, vec![(inode_at, newer)], "generation at most 201"),
        (fs, vec![(inode_at, touched_later)], "transid at most 201"),
        (fs, vec![(inode_at, inode(0o644))], "names no file type"),
        (fs, leads(place(12, ItemType::INODE_ITEM, 0)), "which is no inode"),
        (fs, leads(place(u64::MAX, ItemType::INODE_ITEM, 0)), "which is no inode"),
        (fs, leads(place(300, ItemType::INODE_ITEM, 1)), "which is no inode"),
        (fs, leads(place(7, ItemType::ROOT_ITEM, u64::MAX)), "which is no subvolume"),
        (fs, leads(place(1 << 48, ItemType::ROOT_ITEM, 0)), "which is no subvolume"),
        (fs, attribute(place(300, ItemType::INODE_ITEM, 0)), "an extended attribute leads"),
        (fs, attribute(place(7, ItemType::ROOT_ITEM, 0)), "which is no subvolume"),
        (
            fs,
            vec![(key(257, ItemType::EXTENT_DATA, 0), [head(0, 0, 5), vec![1; 4]].concat())],
            "inline data of 4 bytes, 5 expected",
        ),
        (fs, hole(5, 0), "disk_num_bytes 5"),
        (fs, hole(0, 5), "offset 5"),
        (TreeId::EXTENT, keyed(data_ref(6, 257, 0, 1)), "a reference of the tree 6"),
        (TreeId::EXTENT, keyed(data_ref(5, 12, 0, 1)), "a reference of the inode 12"),
        (TreeId::EXTENT, keyed(data_ref(5, 257, 1, 1)), "file offset 1"),
        (TreeId::EXTENT, keyed(data_ref(5, 257, 0, 0)), "counted 0 times"),
        (TreeId::EXTENT, inline([5, 256]), "out of order"),
    ];
    for (owner, items, message) in cases {
        accepts(owner, &items);
        let (leaf, geometry, logical) = leaf(owner, &items);
        let geometry = Geometry { is_strict: true, ..geometry };
        let error = verify(&leaf, &geometry, logical).expect_err(message).to_string();
        assert!(error.contains(message), "{error}: not {message}");
    }
}

#[test]
fn extended_attributes() {
    let at = key(257, ItemType::XATTR_ITEM, name_hash(b"user.a"));
    let right = entry(Key::MIN, 8, b"user.a", b"value");
    let hash_of_empty = key(257, ItemType::XATTR_ITEM, name_hash(b""));
    item(
        TreeId::FS,
        at,
        &right,
        &[
            (at, entry(Key::MIN, 1, b"user.a", b"value"), "type 8 of an extended attribute"),
            (hash_of_empty, entry(Key::MIN, 8, b"", b""), "a name of 1 to 255 bytes"),
            (at, right[..right.len() - 1].to_vec(), "its data is 5 bytes, but only 4"),
            (at, entry(Key::MIN, 8, b"user.b", b""), "the name user.b has the hash"),
            (at, entry(key(0, ItemType(230), 0), 8, b"user.a", b""), "attribute leads to"),
            (at, entry(key(0, ItemType(0), 1 << 43), 8, b"user.a", b""), "attribute leads to"),
            (at, entry(key(257, ItemType(0), 0), 8, b"user.a", b""), "attribute leads to"),
        ],
    );
    // The name of an extended attribute is no part of a path, so it may hold a slash.
    let slash = key(257, ItemType::XATTR_ITEM, name_hash(b"user.a/b"));
    accepts(TreeId::FS, &vec![(slash, entry(Key::MIN, 8, b"user.a/b", b""))]);
}

fn head(extent_type: u8, compression: u8, ram_bytes: u64) -> Vec<u8> {
    let head = FileExtentHead {
        generation: 5.into(),
        ram_bytes: ram_bytes.into(),
        compression,
        encryption: 0,
        other_encoding: 0.into(),
        extent_type,
    };
    head.as_bytes().to_vec()
}

/// A file extent that is not inline. `numbers` are `ram_bytes`, `disk_bytenr`, `disk_num_bytes`,
/// `offset` and `num_bytes`.
fn regular(extent_type: u8, compression: u8, numbers: [u64; 5]) -> Vec<u8> {
    let [ram_bytes, disk_bytenr, disk_num_bytes, offset, num_bytes] = numbers;
    let tail = FileExtentTail {
        disk_bytenr: disk_bytenr.into(),
        disk_num_bytes: disk_num_bytes.into(),
        offset: offset.into(),
        num_bytes: num_bytes.into(),
    };
    [&head(extent_type, compression, ram_bytes)[..], tail.as_bytes()].concat()
}

const K: u64 = 1024;
const TOP: u64 = u64::MAX - 4095;

#[test]
fn file_extents() {
    let at = key(257, ItemType::EXTENT_DATA, 4096);
    let right = regular(1, 0, [8192, 1 << 20, 8192, 4096, 4096]);
    item(
        TreeId::FS,
        at,
        &right,
        &[
            (key(257, ItemType::EXTENT_DATA, 1), right.clone(), "file offset 1 is not a multiple"),
            (key(257, ItemType::EXTENT_DATA, TOP), right.clone(), "4096 bytes overflow the file"),
            (at, right[..20].to_vec(), "20 bytes, but it needs 21"),
            (at, right[..52].to_vec(), "31 bytes, but it needs 32"),
            (at, [&right[..], &[0]].concat(), "53 bytes expected, 54 found"),
            (at, with(&right, 16, &[4]), "unknown compression 4"),
            (at, with(&right, 17, &[1]), "encrypted or in another encoding"),
            (at, with(&right, 20, &[3]), "unknown type 3"),
            (at, regular(1, 0, [8191, 1 << 20, 8192, 4096, 4096]), "ram_bytes 8191 is not"),
            (at, regular(1, 0, [8192, 4095, 8192, 4096, 4096]), "disk_bytenr 4095 is not"),
            (at, regular(1, 0, [8192, 1 << 20, 1, 0, 4096]), "disk_num_bytes 1 is not"),
            (at, regular(1, 0, [8192, 1 << 20, 8192, 1, 4096]), "offset 1 is not"),
            (at, regular(1, 0, [8192, 1 << 20, 8192, 0, 1]), "num_bytes 1 is not"),
            (at, regular(1, 0, [8192, 1 << 20, 0, 0, 4096]), "without length on disk"),
            (at, regular(1, 0, [8192, TOP, 8192, 0, 4096]), "overflow the address space"),
            (at, regular(1, 0, [16 * K, 1 << 20, 8192, 4096, 8192]), "do not lie in an extent"),
            (at, regular(1, 0, [8192, 1 << 20, 8192, TOP, 8192]), "do not lie in an extent"),
            (at, regular(1, 3, [8192, 1 << 20, 4096, 4096, 8192]), "do not lie in an extent"),
            (at, regular(1, 1, [256 * K, 1 << 20, 4096, 0, 4096]), "at most 131072 expected"),
            (at, regular(1, 2, [4096, 1 << 20, 256 * K, 0, 4096]), "at most 131072 expected"),
        ],
    );
    // Accepted: a hole, preallocation, compression, and a wrong `ram_bytes` of an old kernel.
    for data in [
        regular(1, 0, [4096, 0, 0, 0, 4096]),
        regular(2, 0, [1 << 30, 1 << 20, 1 << 30, 0, 1 << 30]),
        regular(1, 3, [128 * K, 1 << 20, 4096, 64 * K, 64 * K]),
        regular(1, 0, [4096, 1 << 20, 64 * K, 32 * K, 32 * K]),
    ] {
        accepts(TreeId::FS, &vec![(at, data)]);
    }
}

#[test]
fn inline_extents() {
    let at = key(257, ItemType::EXTENT_DATA, 0);
    let inline = |compression, ram, len| [head(0, compression, ram), vec![b'x'; len]].concat();
    item(
        TreeId::FS,
        at,
        &inline(0, 100, 100),
        &[
            (key(257, ItemType::EXTENT_DATA, 4096), inline(0, 9, 9), "not at the start"),
            (at, inline(0, 1 << 40, 100), "bytes when it is decompressed"),
            (at, inline(1, 1 << 40, 100), "bytes when it is decompressed"),
        ],
    );
    accepts(TreeId::FS, &vec![(at, inline(2, 4096, 60))]);
    // A truncation of an old kernel updated only one of the two lengths.
    accepts(TreeId::FS, &vec![(at, inline(0, 100, 99))]);
    accepts(TreeId::FS, &vec![(at, inline(0, 99, 100))]);
    let next = key(257, ItemType::EXTENT_DATA, 4096);
    let extent = regular(1, 0, [4096, 1 << 20, 4096, 0, 4096]);
    accepts(TreeId::FS, &vec![(at, inline(0, 100, 100)), (next, extent.clone())]);
    refuses(
        TreeId::FS,
        &vec![(at, inline(1, 4097, 60)), (next, extent.clone())],
        "overlaps the extent before it, which ends at 8192",
    );
    let long = regular(1, 0, [8192, 1 << 20, 8192, 0, 8192]);
    refuses(TreeId::FS, &vec![(at, long.clone()), (next, extent.clone())], "ends at 8192");
    accepts(TreeId::FS, &vec![(at, long), (key(258, ItemType::EXTENT_DATA, 4096), extent)]);
}

#[test]
fn checksums() {
    let at = key(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, 1 << 20);
    let next = key(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, (1 << 20) + 4096);
    item(
        TreeId::CSUM,
        at,
        &[0; 40],
        &[
            (key(5, ItemType::EXTENT_CSUM, 0), vec![0; 4], "object id -10 expected"),
            (key(at.objectid, at.item_type, 1), vec![0; 4], "address 1 is not a multiple"),
            (at, vec![0; 41], "checksums of 4 bytes expected, 41 bytes found"),
            (key(at.objectid, at.item_type, TOP), vec![0; 8], "more than the address space"),
        ],
    );
    let overlapping = vec![(at, vec![0; 8]), (next, vec![0; 4])];
    refuses(TreeId::CSUM, &overlapping, "overlaps the checksums before it");
    accepts(TreeId::TREE_LOG, &overlapping);
    accepts(TreeId::CSUM, &vec![(at, vec![0; 4]), (next, vec![0; 4])]);
}

#[test]
fn roots() {
    let at = key(300, ItemType::ROOT_ITEM, 0);
    let mut root = RootItem::new_zeroed();
    root.generation = 100.into();
    root.bytenr = (1 << 20).into();
    let root = root.as_bytes();
    item(
        TreeId::ROOT,
        at,
        root,
        &[
            (key(0, ItemType::ROOT_ITEM, 0), root.to_vec(), "no tree has the id 0"),
            (key(TreeId::TREE_RELOC.0, at.item_type, 0), root.to_vec(), "a relocation tree of no"),
            (at, root[..300].to_vec(), "300 bytes"),
            (at, with(root, 160, &300u64.to_le_bytes()), "generation at most 201"),
            (at, with(root, 160, &101u64.to_le_bytes()), "generation 101 in a leaf of 100"),
            (at, with(root, 176, &5u64.to_le_bytes()), "bytenr 5 is not a multiple"),
            (at, with(root, 238, &[8]), "level 8, the highest is 7"),
            (at, with(root, 237, &[9]), "drop_level 9, the highest is 7"),
            (at, with(root, 208, &[2]), "unknown flags 0x2"),
        ],
    );
    // The short root item of kernels before 3.6.
    accepts(TreeId::ROOT, &vec![(at, root[..239].to_vec())]);

    let at = key(5, ItemType::ROOT_REF, 300);
    let right = [&256u64.to_le_bytes()[..], &inode_ref(2, b"sub")].concat();
    let dots = [&256u64.to_le_bytes()[..], &inode_ref(2, b"..")].concat();
    item(
        TreeId::ROOT,
        at,
        &right,
        &[
            (at, [&right[..], b"x"].concat(), "21 bytes expected, 22 found"),
            (at, right[..20].to_vec(), "its name is 3 bytes, but only 2 are left"),
            (at, dots, "the name is .."),
        ],
    );
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn extents() {
    let at = key(1 << 20, ItemType::EXTENT_ITEM, 8192);
    let block = key(1 << 20, ItemType::METADATA_ITEM, 1);
    let data_ref = |count: u32| [&[178][..], &words(&[5, 257, 0]), &count.to_le_bytes()].concat();
    let right = [words(&[3, 100, 1]), data_ref(2)].concat();
    let tree_ref = [&[176][..], &words(&[5])].concat();
    let skinny = [words(&[1, 100, 2]), tree_ref.clone()].concat();
    let full = [words(&[1, 100, 2]), vec![0; 18], tree_ref.clone()].concat();
    item(
        TreeId::EXTENT,
        at,
        &right,
        &[
            (key(5, at.item_type, 8192), right.clone(), "address 5 is not a multiple"),
            (key(TOP, at.item_type, 8192), right.clone(), "overflows the address space"),
            (key(1 << 20, at.item_type, 0), right.clone(), "an extent without length"),
            (key(1 << 20, at.item_type, 100), right.clone(), "length 100 is not a multiple"),
            (at, right[..20].to_vec(), "20 bytes, but it needs 24"),
            (at, [words(&[3, 999, 1]), data_ref(2)].concat(), "generation at most 201"),
            (at, [words(&[3, 100, 3]), data_ref(2)].concat(), "neither data nor a tree block"),
            (at, [words(&[3, 100, 257]), data_ref(2)].concat(), "of a tree block in an extent"),
            (at, [words(&[1, 100, 1]), data_ref(2)].concat(), "1 references counted, but 2"),
            (at, [words(&[1, 100, 1]), data_ref(0)].concat(), "counted 0 times"),
            (at, [words(&[1, 100, 1]), tree_ref].concat(), "a reference of the other kind"),
            (at, [words(&[1, 100, 1]), vec![99; 9]].concat(), "none of an inline ref"),
            (at, right[..50].to_vec(), "25 bytes, but it needs 28"),
            (block, right.clone(), "of a tree block in an extent of data"),
            (key(1 << 20, block.item_type, 8), skinny.clone(), "level 8, the highest is 7"),
            (at, full, "the length of a node, 4096, expected"),
        ],
    );
    accepts(TreeId::EXTENT, &vec![(block, skinny.clone())]);
    let after = key((1 << 20) + 4096, ItemType::METADATA_ITEM, 0);
    accepts(TreeId::EXTENT, &vec![(block, skinny.clone()), (after, skinny.clone())]);
    refuses(TreeId::EXTENT, &vec![(at, right), (after, skinny)], "overlaps the extent before it");
}

#[test]
fn small_items() {
    let group = words(&[4096, 256, 1]);
    let group_key = key(1 << 20, ItemType::BLOCK_GROUP_ITEM, 1 << 20);
    let two = [words(&[0, 256]), words(&[0x18 | 1])].concat();
    item(
        TreeId::BLOCK_GROUP,
        group_key,
        &group,
        &[
            (group_key, words(&[2 << 20, 256, 1]), "2097152 bytes used of 1048576"),
            (group_key, words(&[0, 256, 0]), "type bits 0x0"),
            (group_key, two, "are not one profile"),
            (key(1 << 20, group_key.item_type, 0), group.clone(), "a range of 0 bytes"),
        ],
    );
    let device = key(1, ItemType::DEV_EXTENT, 1 << 20);
    let extent = |length| [words(&[3, 256, 1 << 20, length]), vec![0; 16]].concat();
    let next = key(1, ItemType::DEV_EXTENT, (1 << 20) + 4096);
    item(
        TreeId::DEV,
        device,
        &extent(1 << 20),
        &[(device, extent(0), "a length of 0"), (device, extent(1), "length 1 is not")],
    );
    let both = vec![(device, extent(8192)), (next, extent(4096))];
    refuses(TreeId::DEV, &both, "overlaps the extent before it");
    for (key, size) in [
        (key(5, ItemType::ORPHAN_ITEM, 5), 0),
        (key(256, ItemType::DIR_LOG_INDEX, 5), 8),
        (key(1 << 20, ItemType::FREE_SPACE_INFO, 1 << 20), 8),
        (key(1 << 20, ItemType::FREE_SPACE_EXTENT, 1 << 20), 0),
    ] {
        let message = format!("{size} bytes expected, {} found", size + 1);
        item(TreeId::FS, key, &vec![0; size], &[(key, vec![0; size + 1], &message)]);
    }
    // The check ignores an item of an unknown type.
    accepts(TreeId::FS, &vec![(key(1, ItemType(77), 3), vec![1, 2, 3])]);
}

/// Changes each field that identifies a block, and its layout.
#[test]
fn headers_and_layout() {
    let items = vec![
        (key(257, ItemType::INODE_ITEM, 0), inode(0o100_644)),
        (key(258, ItemType::INODE_ITEM, 0), inode(0o100_644)),
    ];
    let (right, geometry, logical) = leaf(TreeId::FS, &items);
    let item = |slot: usize, at: usize| HEADER_SIZE + slot * 25 + at;
    for (at, field, message) in [
        (32, &[1][..], "filesystem id 09090909-0909-0909-0909-090909090909 expected"),
        (48, &[1], "address 1048576 expected, 1048577 found"),
        (80, &[201], "generation at most 200 expected, 201 found"),
        (88, &[0], "owner 0 is not a tree"),
        (88, &[0xff; 8], "owner 18446744073709551615 is not a tree"),
        (96, &[0xff, 0xff], "65535 entries do not fit"),
        (100, &[8], "level 8, the highest is 7"),
        (item(1, 0), &[1], "slot 1: key (257 INODE_ITEM 0) does not follow (257 INODE_ITEM 0)"),
        (item(0, 17), &[0], "slot 0 (257 INODE_ITEM 0): its data at"),
        (item(1, 21), &[0xff; 4], "slot 1 (258 INODE_ITEM 0): its data at"),
    ] {
        let mut bytes = with(&right, at, field);
        fix_checksum(&mut bytes, ChecksumType::Crc32c);
        let error = verify(&bytes, &geometry, logical).expect_err(message).to_string();
        assert!(error.contains(message), "{error}: not {message}");
    }
    let error = verify(&with(&right, 200, &[1]), &geometry, logical).unwrap_err().to_string();
    assert!(error.contains("checksum 0x") && error.contains("expected"), "{error}");
    assert!(verify(&right[..2048], &geometry, logical).is_err());

    // Accepted: a block that comes from a seed, and a block of a log, which is one transaction
    // ahead.
    let mut seeded = geometry.clone();
    seeded.seeds.push(std::mem::replace(&mut seeded.metadata_uuid, Uuid::nil()));
    verify(&right, &seeded, logical).unwrap();
    let (mut log, ..) = leaf(TreeId::TREE_LOG, &items);
    log[80..88].copy_from_slice(&201u64.to_le_bytes());
    fix_checksum(&mut log, ChecksumType::Crc32c);
    verify(&log, &geometry, logical).unwrap();

    // The item headers reach into the data of the last item.
    let empty = |n| (key(n, ItemType::STRING_ITEM, 0), Vec::new());
    let filler = (key(0, ItemType::STRING_ITEM, 0), vec![0; NODE - HEADER_SIZE - 3 * 25]);
    let mut crowded = vec![filler];
    crowded.extend((1..=2).map(empty));
    accepts(TreeId::FS, &crowded);
    let (mut block, ..) = leaf(TreeId::FS, &crowded);
    block[96] = 4;
    let last = DiskKey::from(key(9, ItemType::STRING_ITEM, 0));
    block[item(3, 0)..item(3, 17)].copy_from_slice(last.as_bytes());
    block[item(3, 17)..item(3, 25)].copy_from_slice(&[75, 0, 0, 0, 0, 0, 0, 0]);
    fix_checksum(&mut block, ChecksumType::Crc32c);
    let error = verify(&block, &geometry, logical).unwrap_err().to_string();
    assert!(error.contains("within 100 bytes of item headers"), "{error}");
    refuses(TreeId::ROOT, &Vec::new(), "an empty leaf");
    accepts(TreeId::CSUM, &Vec::new());
}

/// A node of level 1 with these pointers.
fn node(pointers: &[(Key, u64, u64)]) -> (Vec<u8>, Geometry, Logical) {
    let (mut bytes, geometry, logical) = leaf(TreeId::FS, &Vec::new());
    bytes[96] = u8::try_from(pointers.len()).unwrap();
    bytes[100] = 1;
    for (slot, &(key, blockptr, generation)) in pointers.iter().enumerate() {
        let pointer = NodePointer {
            key: DiskKey::from(key),
            blockptr: blockptr.into(),
            generation: generation.into(),
        };
        let at = HEADER_SIZE + slot * size_of::<NodePointer>();
        bytes[at..at + size_of::<NodePointer>()].copy_from_slice(pointer.as_bytes());
    }
    fix_checksum(&mut bytes, ChecksumType::Crc32c);
    (bytes, geometry, logical)
}

#[test]
fn nodes() {
    let (first, second) = (key(256, ItemType::INODE_ITEM, 0), key(257, ItemType::INODE_ITEM, 0));
    let right = [(first, 4096, 99), (second, 8192, 100)];
    let (bytes, geometry, logical) = node(&right);
    verify(&bytes, &geometry, logical).unwrap();
    for (pointers, message) in [
        (&[][..], "a node of level 1 without pointers"),
        (&[(second, 4096, 1), (second, 8192, 1)], "slot 1: key (257 INODE_ITEM 0) does not follow"),
        (&[(first, 0, 1)], "sectors of 4096 expected, 0 found"),
        (&[(first, 4097, 1)], "sectors of 4096 expected, 4097 found"),
        (&[right[0], (second, 8192, 101)], "generation at most 100 expected, 101 found"),
    ] {
        let (bytes, ..) = node(pointers);
        let error = verify(&bytes, &geometry, logical).expect_err(message).to_string();
        assert!(error.contains(message), "{error}: not {message}");
    }

    let expected = ExpectedBlock {
        logical,
        level: 1,
        generation: Generation(100),
        owner: TreeId(300),
        first_key: Some(first),
    };
    expect(&bytes, &expected).unwrap();
    for (other, message) in [
        (ExpectedBlock { logical: Logical(0), ..expected }, "address 0 expected, 1048576 found"),
        (ExpectedBlock { level: 0, ..expected }, "level 0 expected, 1 found"),
        (ExpectedBlock { generation: Generation(99), ..expected }, "generation 99 expected, 100"),
        (ExpectedBlock { owner: TreeId::ROOT, ..expected }, "owner 1 expected, 5 found"),
        (ExpectedBlock { owner: TreeId::DATA_RELOC, ..expected }, "expected, 5 found"),
        (ExpectedBlock { first_key: Some(second), ..expected }, "first key (257 INODE_ITEM 0)"),
    ] {
        let error = expect(&bytes, &other).expect_err(message).to_string();
        assert!(error.contains(message), "{error}: not {message}");
    }
    // The trees of a log and of a balance hold blocks of the subvolume.
    for owner in [TreeId::TREE_LOG, TreeId::TREE_RELOC, TreeId::FS] {
        expect(&bytes, &ExpectedBlock { owner, first_key: None, ..expected }).unwrap();
    }
}
