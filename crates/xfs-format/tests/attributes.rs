//! Attributes and targets of links as the kernel writes them, and damage to them.

mod volume;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use offshoot_xfs_format::attr::leaf::{self, XattrLeaf};
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::attr::{XattrContent, XattrFlags, XfsXattr, acl};
use offshoot_xfs_format::da::{DaEdit, DaExpected, DaKind, DaNode};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::hash::{name_hash, parent_hash};
use offshoot_xfs_format::parent::{ParentPointer, ParentValue};
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino, Lsn, Malformed, XfsGeometry, symlink};
use volume::{FileBytes, MadeVolume, SeededNumbers, numbers_only, told};

type Attributes = BTreeMap<String, Vec<u8>>;

/// The attributes of a file by its name: many, and short and long values.
fn attributes(name: &str) -> Attributes {
    let (count, len) = match name {
        "short" => (3, 9),
        "leaf" => (9, 40),
        "node" => (700, 50),
        _ => (4, 5000),
    };
    let space = |i: usize| ["user", "trusted", "security"][i % 3];
    let value = |i: usize| vec![u8::try_from(i % 251).unwrap(); len + i % 7];
    (0..count).map(|i| (format!("{}.name{i}", space(i)), value(i))).collect()
}

fn set(point: &Path, name: &str) {
    fs::write(point.join(name), "").unwrap();
    let mut text = format!("# file: {name}\n");
    for (key, value) in attributes(name) {
        let hex = value.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
        writeln!(text, "{key}=0x{hex}").unwrap();
    }
    let dump = point.join("dump");
    fs::write(&dump, text).unwrap();
    let restore = Command::new("setfattr").current_dir(point).arg("--restore=dump").output();
    let output = restore.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::remove_file(dump).unwrap();
}

/// The name that system calls have for an attribute.
fn full_name(xattr: &XfsXattr<'_>) -> String {
    let space = match xattr.flags.namespace() {
        XattrFlags::TRUSTED => "trusted",
        XattrFlags::SECURE => "security",
        _ => "user",
    };
    format!("{space}.{}", String::from_utf8_lossy(xattr.name))
}

/// All attributes of a file, with values in blocks.
fn read(volume: &MadeVolume, file: &FileBytes) -> (Attributes, Vec<DaKind>) {
    let geometry = &volume.geometry;
    let mut found = Attributes::new();
    if file.attr_format == 1 {
        for xattr in ShortXattrs::parse(&file.attr).unwrap().list {
            let XattrContent::Local(value) = xattr.value else { panic!("a remote value") };
            found.insert(full_name(&xattr), value.to_vec());
        }
        return (found, Vec::new());
    }
    let blocks = volume.attribute_blocks(file);
    let block = |at: FileBlock| {
        let found = blocks.iter().find(|(expected, _)| expected.block == Some(at)).unwrap();
        (&found.0, &found.1[..])
    };
    let mut kinds = Vec::new();
    let mut todo = vec![FileBlock(0)];
    while let Some(at) = todo.pop() {
        let (expected, bytes) = block(at);
        let kind = DaKind::of_attributes(geometry, bytes).unwrap();
        kinds.push(kind);
        if kind == DaKind::AttrNode {
            let node = DaNode::parse(geometry, kind, bytes, expected).unwrap();
            todo.extend(node.entries.iter().map(|entry| FileBlock(entry.before.get().into())));
            continue;
        }
        let leaf = XattrLeaf::parse(geometry, bytes, expected).unwrap();
        for xattr in leaf.xattrs(0) {
            let value = match xattr.value {
                XattrContent::Local(value) => value.to_vec(),
                XattrContent::Remote { block: first, len } => {
                    let mut value = Vec::new();
                    for i in 0..RemoteKind::blocks(geometry, len) {
                        let (expected, bytes) = block(FileBlock(first.0 + i as u64));
                        let offset = value.len();
                        let kind = RemoteKind::AttrValue;
                        let part = kind.parse(geometry, bytes, expected, offset, len).unwrap();
                        value.extend_from_slice(part);
                    }
                    for (i, part) in
                        value.chunks(RemoteKind::room(geometry, geometry.block_size())).enumerate()
                    {
                        let (expected, bytes) = block(FileBlock(first.0 + i as u64));
                        let offset = i * RemoteKind::room(geometry, geometry.block_size());
                        let ours = RemoteKind::AttrValue.encode(
                            geometry,
                            expected,
                            offset,
                            &value,
                            bytes.len(),
                        );
                        assert_eq!(ours.unwrap()[..56 + part.len()], bytes[..56 + part.len()]);
                    }
                    value
                }
            };
            let (_, same) = leaf.find(xattr.flags.namespace(), xattr.name).unwrap();
            assert_eq!(same, xattr);
            found.insert(full_name(&xattr), value);
        }
        again(geometry, bytes, expected);
    }
    (found, kinds)
}

/// Removes all attributes of a leaf of the kernel but one, and adds them anew.
fn again(geometry: &XfsGeometry, bytes: &[u8], expected: &DaExpected) {
    let theirs = XattrLeaf::parse(geometry, bytes, expected).unwrap();
    let kind = DaKind::AttrLeaf;
    let mut ours = bytes.to_vec();
    for _ in 1..theirs.hashes.len() {
        told(DaKind::AttrLeaf, &mut ours, |edit| leaf::remove(geometry, edit, 1).unwrap());
        kind.seal(geometry, &mut ours, Lsn(1));
        XattrLeaf::parse(geometry, &ours, expected).unwrap();
    }
    for xattr in theirs.xattrs(1) {
        assert!(
            told(DaKind::AttrLeaf, &mut ours, |edit| leaf::insert(geometry, edit, &xattr).unwrap())
        );
        kind.seal(geometry, &mut ours, Lsn(1));
    }
    let links = (theirs.info.forw.get(), theirs.info.back.get());
    let all: Vec<_> = theirs.xattrs(0).collect();
    let mut fresh = XattrLeaf::encode(geometry, expected, links, &all).unwrap();
    kind.seal(geometry, &mut fresh, Lsn(1));
    for bytes in [&ours, &fresh] {
        let ours = XattrLeaf::parse(geometry, bytes, expected).unwrap();
        assert!(ours.xattrs(0).eq(theirs.xattrs(0)));
        // The bytes in use, as the kernel counts them.
        assert_eq!(bytes[58..60], fresh[58..60]);
    }
    assert_eq!(fresh[58..60], bytes[58..60]);
}

#[test]
fn attributes_of_the_kernel_are_read_in_all_forms() {
    if !volume::has_judges() {
        return;
    }
    let names = ["short", "leaf", "node", "long"];
    for options in [&["-b", "size=1024"][..], &["-i", "size=1024"]] {
        let volume = MadeVolume::make(options, "");
        let target = "t".repeat(1000);
        volume.mounted(|point| {
            for name in names {
                set(point, name);
            }
            for i in (0..700).step_by(2) {
                let key = format!("{}.name{i}", ["user", "trusted", "security"][i % 3]);
                let mut remove = Command::new("setfattr");
                remove.args(["-x", &key]).arg(point.join("node"));
                assert!(remove.status().unwrap().success());
            }
            std::os::unix::fs::symlink(&target, point.join("link")).unwrap();
            std::os::unix::fs::symlink("near", point.join("near")).unwrap();
            fs::write(point.join("listed"), "").unwrap();
            let mut list = Command::new("setfacl");
            list.args(["-m", "u:1000:rwx,g:5:r"]).arg(point.join("listed"));
            assert!(list.status().unwrap().success());
        });
        let mut seen = Vec::new();
        for name in names {
            let mut wanted = attributes(name);
            if name == "node" {
                wanted.retain(|key, _| !key.ends_with(['0', '2', '4', '6', '8']));
            }
            let (found, kinds) = read(&volume, &volume.file(&format!("/{name}")));
            assert_eq!(found, wanted);
            seen.extend(kinds);
        }
        assert!(seen.contains(&DaKind::AttrNode) && seen.contains(&DaKind::AttrLeaf));

        let link = volume.file("/link");
        let mut found = Vec::new();
        for (expected, bytes) in volume.directory_blocks(&link) {
            let kind = RemoteKind::SymlinkTarget;
            let geometry = &volume.geometry;
            let offset = found.len();
            let part = kind.parse(geometry, &bytes, &expected, offset, target.len()).unwrap();
            found.extend_from_slice(part);
            let whole = target.as_bytes();
            let mut ours = kind.encode(geometry, &expected, offset, whole, bytes.len()).unwrap();
            let lsn = u64::from_be_bytes(bytes[48..56].try_into().unwrap());
            kind.seal(geometry, &mut ours, Lsn(lsn));
            let len = 56 + part.len();
            assert_eq!(ours[16..len], bytes[16..len]);
        }
        assert_eq!(found, target.as_bytes());
        symlink::check(&found).unwrap();
        assert_eq!(volume.file("/near").data, b"near");

        let listed = volume.file("/listed").attr;
        ShortXattrs::parse(&listed).unwrap();
        let mut listed = ShortXattrs::view(&listed);
        let list = listed.find(|xattr| xattr.is(XattrFlags::TRUSTED, acl::ACCESS)).unwrap();
        let XattrContent::Local(list) = list.value else { panic!("a remote value") };
        let given = acl::from_disk(list).unwrap();
        assert_eq!(given[..12], [2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255]);
        assert_eq!(given[12..20], [2, 0, 7, 0, 0xe8, 3, 0, 0]);
        assert_eq!(acl::to_disk(&given).unwrap(), list);
    }
}

#[test]
fn repair_and_the_kernel_agree_with_what_we_changed() {
    if !volume::has_judges() {
        return;
    }
    let seed = 0x5eed_0006;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    let volume = MadeVolume::make(&["-b", "size=1024"], "");
    volume.mounted(|point| set(point, "leaf"));
    let geometry = &volume.geometry;
    let file = volume.file("/leaf");
    let (expected, mut bytes) = volume.attribute_blocks(&file).remove(0);
    let mut model = attributes("leaf");
    for round in 0..200 {
        let leaf = XattrLeaf::parse(geometry, &bytes, &expected).unwrap();
        let place = numbers.below(leaf.hashes.len());
        model.remove(&full_name(&leaf.xattrs(place).next().unwrap())).unwrap();
        told(DaKind::AttrLeaf, &mut bytes, |edit| leaf::remove(geometry, edit, place).unwrap());
        let name = format!("new{round}");
        let value = vec![b'v'; 1 + numbers.below(60)];
        let flags = XattrFlags::empty();
        let xattr = XfsXattr { flags, name: name.as_bytes(), value: XattrContent::Local(&value) };
        assert!(told(DaKind::AttrLeaf, &mut bytes, |edit| leaf::insert(geometry, edit, &xattr)
            .unwrap()));
        DaKind::AttrLeaf.seal(geometry, &mut bytes, Lsn(0));
        model.insert(full_name(&xattr), value);
        if round % 40 == 0 {
            volume.write_blocks(&[(expected, bytes.clone())]);
            volume.disk.assert_checks();
        }
    }
    volume.write_blocks(&[(expected, bytes)]);
    volume.disk.assert_checks();
    volume.mounted(|point| {
        for (name, value) in &model {
            let mut get = Command::new("getfattr");
            let output = get.args(["--only-values", "-n", name]).arg(point.join("leaf")).output();
            assert_eq!(output.unwrap().stdout, *value, "{name}");
        }
        // The kernel works with the free pieces that we listed.
        for name in model.keys() {
            let mut change = Command::new("setfattr");
            change.args(["-n", name, "-v", "another value"]).arg(point.join("leaf"));
            assert!(change.status().unwrap().success());
        }
    });
    volume.disk.assert_checks();
    let (found, _) = read(&volume, &volume.file("/leaf"));
    assert!(found.keys().eq(model.keys()));
}

#[test]
fn bad_lists_are_refused() {
    for bad in [&b""[..], &[0, 0, 0, 1], &[0, 0, 0, 0, 0], &[1; 16]] {
        assert!(acl::from_disk(bad).is_err());
        assert!(acl::to_disk(bad).is_err());
    }
    assert_eq!(acl::from_disk(&[0; 4]).unwrap(), [2, 0, 0, 0]);
}

const EXPECTED: DaExpected = DaExpected {
    place: BasicBlock(800),
    owner: Some(Ino(131)),
    block: Some(FileBlock(0)),
    is_sealed: true,
};

#[test]
fn attributes_come_and_go_in_a_leaf() {
    let seed = 0x5eed_0003;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    for (block_log, layout) in [(10, 1), (12, 0), (16, 1)] {
        let geometry = numbers_only(block_log, 0, XfsLayout::from_bits_retain(layout));
        let mut bytes = XattrLeaf::encode(&geometry, &EXPECTED, (0, 0), &[]).unwrap();
        let mut model: BTreeMap<(u8, String), (Vec<u8>, bool)> = BTreeMap::new();
        let mut refused = 0;
        for round in 0..2500 {
            let space = [0, 2, 4][numbers.below(3)];
            let key = (space, format!("n{}", numbers.below(60)));
            let namespace = XattrFlags::from_bits_retain(space);
            let is_filling = round / 250 % 2 == 0;
            let leaf = XattrLeaf::parse(&geometry, &sealed(&geometry, &bytes), &EXPECTED)
                .map(|leaf| leaf.find(namespace, key.1.as_bytes()).map(|(place, _)| place));
            let place = leaf.unwrap();
            assert_eq!(place.is_some(), model.contains_key(&key));
            if let Some(place) = place {
                told(DaKind::AttrLeaf, &mut bytes, |edit| {
                    leaf::remove(&geometry, edit, place).unwrap();
                });
                model.remove(&key);
            }
            if is_filling || numbers.below(5) == 0 {
                let value = vec![7; numbers.below(1 << (block_log - 4))];
                let is_remote = numbers.below(4) == 0;
                let stored = if is_remote {
                    XattrContent::Remote { block: FileBlock(3), len: value.len() }
                } else {
                    XattrContent::Local(&value)
                };
                let xattr = XfsXattr { flags: namespace, name: key.1.as_bytes(), value: stored };
                if told(DaKind::AttrLeaf, &mut bytes, |edit| {
                    leaf::insert(&geometry, edit, &xattr).unwrap()
                }) {
                    model.insert(key, (value, is_remote));
                } else {
                    refused += 1;
                }
            }
            let bytes = sealed(&geometry, &bytes);
            let leaf = XattrLeaf::parse(&geometry, &bytes, &EXPECTED).unwrap();
            assert_eq!(leaf.hashes.len(), model.len());
            for ((space, name), (value, is_remote)) in &model {
                let namespace = XattrFlags::from_bits_retain(*space);
                let (_, found) = leaf.find(namespace, name.as_bytes()).unwrap();
                match found.value {
                    XattrContent::Local(found) => assert!(!is_remote && found == value),
                    XattrContent::Remote { len, .. } => assert!(*is_remote && len == value.len()),
                }
            }
        }
        assert!(refused > 0, "{block_log}");
    }
}

fn sealed(geometry: &XfsGeometry, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    DaKind::AttrLeaf.seal(geometry, &mut bytes, Lsn(0));
    bytes
}

#[test]
fn a_value_in_blocks_is_hidden_until_it_is_complete() {
    let geometry = numbers_only(12, 0, XfsLayout::from_bits_retain(1));
    let flags = XattrFlags::INCOMPLETE;
    let value = XattrContent::Remote { block: FileBlock(0), len: 0 };
    let xattr = XfsXattr { flags, name: b"long", value };
    let mut bytes = XattrLeaf::encode(&geometry, &EXPECTED, (0, 0), &[xattr]).unwrap();
    let find = |bytes: &[u8]| {
        let bytes = sealed(&geometry, bytes);
        let leaf = XattrLeaf::parse(&geometry, &bytes, &EXPECTED).unwrap();
        let found = leaf.find(XattrFlags::empty(), b"long");
        assert_eq!(leaf.with_hash(name_hash(b"long")).count(), 1);
        match found.map(|(_, xattr)| xattr.value) {
            Some(XattrContent::Remote { block, len }) => Some((block, len)),
            _ => None,
        }
    };
    assert_eq!(find(&bytes), None);
    told(DaKind::AttrLeaf, &mut bytes, |edit| {
        leaf::set_remote(&geometry, edit, 0, FileBlock(5), 9000).unwrap();
        leaf::set_incomplete(&geometry, edit, 0, false).unwrap();
    });
    assert_eq!(find(&bytes), Some((FileBlock(5), 9000)));
    assert_eq!(RemoteKind::blocks(&geometry, 9000), 3);
    assert!(leaf::is_local(&geometry, b"long", &[0; 3060]));
    assert!(!leaf::is_local(&geometry, b"long", &[0; 3064]));
}

#[test]
fn parent_pointers_are_attributes() {
    let geometry = numbers_only(12, 0, XfsLayout::from_bits_retain(9));
    let values = [ParentValue::new(Ino(128), 3), ParentValue::new(Ino(131), 4)];
    let all = values.each_ref().map(|value| value.xattr(b"name"));
    let bytes = XattrLeaf::encode(&geometry, &EXPECTED, (0, 0), &all).unwrap();
    let bytes = sealed(&geometry, &bytes);
    let leaf = XattrLeaf::parse(&geometry, &bytes, &EXPECTED).unwrap();
    let found: Vec<_> = leaf.with_hash(parent_hash(Ino(131), b"name")).collect();
    let pointer = ParentPointer::parse(&found[0].1).unwrap();
    assert_eq!(pointer, ParentPointer { parent: Ino(131), generation: 4, name: b"name" });
    let short = ShortXattrs { list: all.to_vec() }.encode().unwrap();
    assert_eq!(short[..10], [0, 42, 2, 0, 4, 12, 8, b'n', b'a', b'm']);
    assert!(ShortXattrs::parse(&short).unwrap().list == all);
    let flags = XattrFlags::PARENT;
    for (name, value) in [(&b"a/b"[..], &[1; 12][..]), (b"name", &[1; 11]), (b"name", &[0; 12])] {
        let xattr = XfsXattr { flags, name, value: XattrContent::Local(value) };
        assert!(ParentPointer::parse(&xattr).is_err());
        let short = ShortXattrs { list: vec![xattr] }.encode().unwrap();
        assert!(ShortXattrs::parse(&short).is_err());
    }
}

#[test]
fn every_damage_to_attributes_is_found_or_harmless() {
    for layout in [0, 1] {
        let geometry = numbers_only(10, 0, XfsLayout::from_bits_retain(layout));
        let values: Vec<_> = (0..12).map(|i| vec![i; usize::from(i) * 5]).collect();
        let names: Vec<_> = (0..12).map(|i| format!("name{i}")).collect();
        let all: Vec<_> = names
            .iter()
            .zip(&values)
            .map(|(name, value)| XfsXattr {
                flags: XattrFlags::empty(),
                name: name.as_bytes(),
                value: XattrContent::Local(value),
            })
            .collect();
        let bytes = XattrLeaf::encode(&geometry, &EXPECTED, (0, 0), &all).unwrap();
        let bytes = sealed(&geometry, &bytes);
        let walk = |bytes: &[u8]| -> Result<usize, Malformed> {
            let leaf = XattrLeaf::parse(&geometry, bytes, &EXPECTED)?;
            assert_eq!(leaf.xattrs(0).count(), leaf.hashes.len());
            Ok(leaf.hashes.len())
        };
        assert_eq!(walk(&bytes), Ok(12));
        for at in 0..bytes.len() {
            assert!(walk(&bytes[..at]).is_err());
            for byte in 0..=255 {
                let mut damaged = bytes.clone();
                damaged[at] = byte;
                let is_found = walk(&damaged).is_err();
                assert!(is_found || layout == 0 || damaged == bytes, "at {at}");
                if byte % 5 != 0 {
                    continue;
                }
                let _ = walk(&sealed(&geometry, &damaged));
                let mut edit = DaEdit::fill(DaKind::AttrLeaf, &mut damaged);
                let _ = leaf::insert(&geometry, &mut edit, &all[3]);
                let _ = leaf::remove(&geometry, &mut edit, 5);
                let _ = leaf::set_remote(&geometry, &mut edit, 1, FileBlock(1), 9);
            }
        }
        let short = ShortXattrs { list: all }.encode().unwrap();
        for at in 0..short.len() {
            assert!(ShortXattrs::parse(&short[..at]).is_err());
            for byte in 0..=255 {
                let mut damaged = short.clone();
                damaged[at] = byte;
                if let Ok(found) = ShortXattrs::parse(&damaged) {
                    let mut again = found.encode().unwrap();
                    again[3] = damaged[3];
                    assert_eq!(again, damaged);
                }
            }
        }
        let kind = RemoteKind::SymlinkTarget;
        let target = [b't'; 1000];
        let block = kind.encode(&geometry, &EXPECTED, 0, &target, 2048).unwrap();
        assert_eq!(RemoteKind::blocks(&geometry, 1000), if layout == 0 { 1 } else { 2 });
        for at in 0..block.len() {
            let mut damaged = block.clone();
            damaged[at] ^= 4;
            let found = kind.parse(&geometry, &damaged, &EXPECTED, 0, 1000);
            assert!(found.is_err() || layout == 0);
            let cut = kind.parse(&geometry, &block[..at], &EXPECTED, 0, 1000);
            assert!(cut.is_err() || layout == 0 && at == 1024);
        }
    }
    for bad in [&b""[..], b"a\0b", &[b'x'; 1025]] {
        assert!(symlink::check(bad).is_err());
    }
}
