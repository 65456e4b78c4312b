//! However a tree is cut into parts, and in whatever order they are joined, it says the same.

use offshoot_btrfs_format::file_extent::{FileExtentHead, FileExtentTail, extent_type};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_testkit::random::Random;
use zerocopy::{FromZeros, IntoBytes};

use super::*;

const RULES: InodeRules = InodeRules::new(4096, false);

fn inode(mode: u32, links: u32, size: u64, bytes: u64) -> Vec<u8> {
    let mut item = InodeItem::new_zeroed();
    item.mode = mode.into();
    item.nlink = links.into();
    item.size = size.into();
    item.nbytes = bytes.into();
    item.as_bytes().to_vec()
}

fn reference(index: u64, name: &[u8]) -> Vec<u8> {
    let len = u16::try_from(name.len()).unwrap();
    [&index.to_le_bytes()[..], &len.to_le_bytes(), name].concat()
}

fn entry(child: u64, file_type: u8, name: &[u8]) -> Vec<u8> {
    let len = u16::try_from(name.len()).unwrap();
    let location = [&child.to_le_bytes()[..], &[ItemType::INODE_ITEM.0], &[0; 8]].concat();
    [&location[..], &[0; 8], &[0; 2], &len.to_le_bytes(), &[file_type], name].concat()
}

fn extent(bytenr: u64, num_bytes: u64) -> Vec<u8> {
    let mut head = FileExtentHead::new_zeroed();
    head.extent_type = extent_type::REG;
    head.ram_bytes = num_bytes.into();
    let mut tail = FileExtentTail::new_zeroed();
    tail.disk_bytenr = bytenr.into();
    tail.disk_num_bytes = num_bytes.into();
    tail.num_bytes = num_bytes.into();
    [head.as_bytes(), tail.as_bytes()].concat()
}

/// The items of a tree: files of several names and extents in one directory. Some are damaged.
fn items(random: &mut Random, is_damaged: bool) -> Vec<(Key, Vec<u8>)> {
    let mut items = Vec::new();
    let mut push = |ino, item_type, offset, data| {
        items.push((Key::new(ino, item_type, offset), data));
    };
    let (mut index, mut name_bytes) = (2, 0);
    for ino in 257..257 + 2 + random.below(12) {
        let (names, extents) = (random.below(4), random.below(5));
        let damage = if is_damaged { random.below(12) } else { 99 };
        let links = names + u64::from(damage == 0);
        let size = extents * 8192;
        let bytes = size + 4096 * u64::from(damage == 1);
        let links = u32::try_from(links).unwrap();
        if damage != 2 {
            push(ino, ItemType::INODE_ITEM, 0, inode(0o100_644, links, size, bytes));
        }
        if names == 0 && damage != 3 {
            push(u64::MAX - 4, ItemType::ORPHAN_ITEM, ino, Vec::new());
        }
        for _ in 0..names {
            let name = format!("name-{index}");
            // Each in an item of its own, as if it had another hash.
            let data = [&256u64.to_le_bytes()[..], &reference(index, name.as_bytes())].concat();
            push(ino, ItemType::INODE_EXTREF, index, data);
            let file_type = if damage == 4 { 7 } else { 1 };
            if damage != 5 {
                let data = entry(ino, file_type, name.as_bytes());
                push(256, ItemType::DIR_INDEX, index, data.clone());
                push(256, ItemType::DIR_ITEM, index, data);
            }
            name_bytes += 2 * name.len() as u64;
            index += 1;
        }
        for number in 0..extents {
            let missing = damage == 6 && number == 1;
            let len = if damage == 7 { 8192 + 4096 } else { 8192 };
            if !missing {
                let data = extent(1 << 20, len);
                push(ino, ItemType::EXTENT_DATA, number * 8192, data);
            }
        }
    }
    push(256, ItemType::INODE_ITEM, 0, inode(0o40_755, 1, name_bytes, 0));
    push(256, ItemType::INODE_REF, 256, reference(0, b".."));
    items.sort();
    items
}

/// The summary of some items, as if they were a leaf.
fn summary_of(items: &[(Key, Vec<u8>)]) -> SubtreeSummary {
    let mut summary = SubtreeSummary::default();
    summary.add_items(RULES, items.iter().map(|(key, data)| (*key, data.as_slice())));
    summary
}

/// Joins parts in a random order, and finishes them.
fn finished(mut parts: Vec<SubtreeSummary>, random: &mut Random) -> SubtreeSummary {
    while parts.len() > 1 {
        let at = usize::try_from(random.below(parts.len() as u64 - 1)).unwrap();
        let right = parts.remove(at + 1);
        parts[at].join(RULES, &right);
    }
    let mut whole = parts.pop().unwrap_or_default();
    whole.close_all(RULES);
    whole.findings.sort_by_key(|one| (one.ino, one.code, one.problem.clone()));
    whole
}

/// Cuts items into parts at random places. Some parts are empty.
fn cut(items: &[(Key, Vec<u8>)], random: &mut Random) -> Vec<Vec<(Key, Vec<u8>)>> {
    let mut parts = Vec::new();
    let mut rest = items;
    while !rest.is_empty() {
        let len = usize::try_from(random.below(6)).unwrap().min(rest.len());
        let (part, behind) = rest.split_at(len);
        parts.push(part.to_vec());
        rest = behind;
    }
    parts
}

#[test]
fn a_tree_says_the_same_however_it_is_cut() {
    let mut random = Random::new(11);
    let (mut findings, mut sound) = (0, 0);
    for round in 0..3000 {
        let items = items(&mut random, round % 3 > 0);
        let whole = finished(vec![summary_of(&items)], &mut random);
        for _ in 0..3 {
            let parts = cut(&items, &mut random).iter().map(|part| summary_of(part)).collect();
            let joined = finished(parts, &mut random);
            assert_eq!(joined.findings, whole.findings, "round {round}");
            assert_eq!(
                (joined.names, joined.orphans, joined.inodes),
                (whole.names, whole.orphans, whole.inodes),
                "round {round}"
            );
        }
        findings += whole.findings.len();
        if round % 3 == 0 {
            assert_eq!((whole.names, whole.orphans), (0, 0), "round {round}");
            assert_eq!(whole.findings, [], "round {round}");
            sound += 1;
        }
    }
    assert!(findings > 1000 && sound == 1000, "{findings} findings");
}

/// With parts that cannot be read, nothing is found that the whole tree does not have, and the
/// order of the joins does not matter.
#[test]
fn a_gap_adds_no_findings() {
    let mut random = Random::new(12);
    let mut found = 0;
    for round in 0..3000 {
        let items = items(&mut random, round % 3 > 0);
        let whole = finished(vec![summary_of(&items)], &mut random);
        let parts = cut(&items, &mut random);
        let is_lost: Vec<_> = parts.iter().map(|_| random.below(5) == 0).collect();
        let summaries: Vec<_> = parts
            .iter()
            .zip(is_lost)
            .map(|(part, is_lost)| if is_lost { SubtreeSummary::gap() } else { summary_of(part) })
            .collect();
        let one = finished(summaries.clone(), &mut random);
        let other = finished(summaries, &mut random);
        assert_eq!(one.findings, other.findings, "round {round}");
        assert_eq!((one.names, one.orphans), (other.names, other.orphans), "round {round}");
        for finding in &one.findings {
            assert!(whole.findings.contains(finding), "round {round}: {finding:?}");
        }
        found += one.findings.len();
    }
    assert!(found > 300, "{found} findings");
}
