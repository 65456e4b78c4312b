//! Extents of a file that overlap: a repair keeps the newer ones, where that was chosen.
//!
//! A volume has files with one extent each: of known contents, in transactions of their own. The
//! extents of another file, the target, are replaced by ranges of these, which overlap at random.
//! What the target must show then follows block by block from the order of the generations.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{
    BtrfsFindingCode as Code, BtrfsVolume, EngineOptions, ItemChange, RepairClass, RepairOptions,
    RepairOutcome, SubvolumeId,
};
use offshoot_btrfs_format::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, FileExtentTail, extent_type,
};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::{crowd, sync};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::common::{DamagedVolume, EditedItems, checked, progs_complaints, show};
use crate::judged::{bytes, put_back, repair, repair_with, undo};
use crate::mutation::index;

/// The unit in which extents are cut, in bytes.
const BLOCK: u64 = BLOCK_LEN as u64;

/// The same, as a length in memory.
const BLOCK_LEN: usize = 4096;

/// The blocks of the target.
const BLOCKS: u64 = 24;

/// The blocks of each file whose extent is put into the target.
const DONOR_BLOCKS: u64 = 16;

/// The contents of a block of a file.
fn block(name: &str, number: u64) -> Vec<u8> {
    let line = format!("{name} {number}\n");
    line.bytes().cycle().take(BLOCK_LEN).collect()
}

/// Writes a file of whole blocks.
fn write(path: &Path, blocks: u64) {
    let name = path.file_name().expect("a name").to_str().expect("a plain name");
    let all: Vec<u8> = (0..blocks).flat_map(|number| block(name, number)).collect();
    fs::write(path, all).expect("it is written");
}

/// Files with one extent each, some of one transaction, and what is to be damaged.
pub(crate) fn fill(root: &Path) {
    crowd(root, 400);
    write(&root.join("target"), BLOCKS);
    fs::write(root.join("small"), b"in the item itself").expect("it is written");
    sync(root);
    for name in ["plain-0", "plain-1"] {
        write(&root.join(name), DONOR_BLOCKS);
        sync(root);
    }
    for name in ["equal-0", "equal-1", "equal-2"] {
        write(&root.join(name), DONOR_BLOCKS);
    }
    sync(root);
    let compressed = root.join("compressed");
    fs::write(&compressed, b"").expect("it is written");
    run("btrfs", &["property", "set", &compressed.display().to_string(), "compression", "zstd"]);
    write(&compressed, DONOR_BLOCKS);
    sync(root);
    let preallocated = root.join("preallocated").display().to_string();
    run("fallocate", &["-l", &(DONOR_BLOCKS * BLOCK).to_string(), &preallocated]);
    sync(root);
    write(&root.join("plain-2"), DONOR_BLOCKS);
    sync(root);
}

/// An extent that is put into the target.
#[derive(Clone)]
pub(crate) struct Donor {
    /// The file that it is of; empty for a range without data.
    name: &'static str,
    item: Vec<u8>,
}

const DONORS: [&str; 8] = [
    "plain-0",
    "plain-1",
    "equal-0",
    "equal-1",
    "equal-2",
    "compressed",
    "preallocated",
    "plain-2",
];

impl Donor {
    fn extent(&self) -> FileExtent<'_> {
        FileExtent::parse(&self.item).expect("an extent")
    }

    fn address(&self) -> u64 {
        match self.extent().body {
            FileExtentBody::Extent { disk_bytenr, .. } => disk_bytenr.0,
            _ => 0,
        }
    }

    /// The item of a range of it.
    pub(crate) fn slice(&self, first: u64, blocks: u64) -> Vec<u8> {
        let mut item = self.item.clone();
        let (head, rest) = FileExtentHead::mut_from_prefix(&mut item).expect("an extent");
        let tail = FileExtentTail::mut_from_bytes(rest).expect("an extent on disk");
        tail.num_bytes = (blocks * BLOCK).into();
        if tail.disk_bytenr.get() == 0 {
            head.ram_bytes = (blocks * BLOCK).into();
        } else {
            tail.offset = (first * BLOCK).into();
        }
        item
    }

    /// What a block of it reads as.
    fn block(&self, number: u64) -> Vec<u8> {
        if self.has_data() { block(self.name, number) } else { vec![0; BLOCK_LEN] }
    }

    fn has_data(&self) -> bool {
        !self.name.is_empty() && self.name != "preallocated"
    }
}

/// A range of a donor in the target, in blocks.
#[derive(Clone)]
struct Placed {
    donor: Donor,
    at: u64,
    first: u64,
    blocks: u64,
}

impl Placed {
    fn has(&self, block: u64) -> bool {
        (self.at..self.at + self.blocks).contains(&block)
    }
}

/// The volume with the target.
pub(crate) struct OverlapVolume {
    pub(crate) volume: DamagedVolume,
    pub(crate) donors: Vec<Donor>,
    pub(crate) target: u64,
    pub(crate) before: BTreeMap<String, Vec<u8>>,
}

impl OverlapVolume {
    pub(crate) fn new(judges: &Judges, mkfs: &'static str, fill: fn(&Path)) -> Self {
        let disks = Recipe::new().mib(256).mkfs(mkfs).fill(fill).make(judges);
        let before = shown(&disks);
        let volume = DamagedVolume::of(disks);
        let mut made = Self { volume, donors: Vec::new(), target: 0, before };
        made.target = made.ino("target");
        made.donors = DONORS.map(|name| made.donor(name)).to_vec();
        for generation in [0, 2].map(|index: usize| made.donors[index].extent().generation) {
            let head = FileExtentHead {
                generation: generation.0.into(),
                extent_type: extent_type::REG,
                ..FileExtentHead::new_zeroed()
            };
            let tail = FileExtentTail::new_zeroed();
            let item = [head.as_bytes(), tail.as_bytes()].concat();
            made.donors.push(Donor { name: "", item });
        }
        made
    }

    pub(crate) fn disks(&self) -> &Disks {
        self.volume.disks()
    }

    pub(crate) fn ino(&self, name: &str) -> u64 {
        self.volume.ino(name)
    }

    /// The only extent of a file.
    fn donor(&self, name: &'static str) -> Donor {
        let key = Key::new(self.ino(name), ItemType::EXTENT_DATA, 0);
        let leaves = self.volume.leaves(TreeId::FS);
        let (_, item) = leaves.iter().flatten().find(|(one, _)| *one == key).expect("an extent");
        let donor = Donor { name, item: item.clone() };
        let FileExtentBody::Extent { num_bytes, .. } = donor.extent().body else {
            panic!("{name} has its data in an extent")
        };
        assert_eq!(num_bytes, DONOR_BLOCKS * BLOCK, "{name} is one extent");
        donor
    }

    /// Changes the leaf with the inode of a file.
    pub(crate) fn edit(&self, ino: u64, change: impl FnOnce(&mut EditedItems)) {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        self.volume.edit(TreeId::FS, |found, _| found == key, |items, _| change(items));
    }

    /// Replaces the extents of a file by these items, by block.
    pub(crate) fn replace(&self, ino: u64, extents: &[(u64, Vec<u8>)]) {
        self.edit(ino, |items| {
            let is_extent =
                |key: &Key| key.objectid == ino && key.item_type == ItemType::EXTENT_DATA;
            items.retain(|(key, _)| !is_extent(key));
            // The kernel looks for preallocated extents only where an inode has this flag.
            let inode = Key::new(ino, ItemType::INODE_ITEM, 0);
            let (_, data) = items.iter_mut().find(|(key, _)| *key == inode).expect("an inode");
            InodeItem::mut_from_bytes(data).expect("an inode").flags |= inode_flags::PREALLOC;
            let key = |block| Key::new(ino, ItemType::EXTENT_DATA, block * BLOCK);
            items.extend(extents.iter().map(|(block, item)| (key(*block), item.clone())));
            items.sort_by_key(|(key, _)| *key);
        });
    }

    fn place(&self, placed: &[Placed]) {
        let item = |one: &Placed| (one.at, one.donor.slice(one.first, one.blocks));
        let items: Vec<_> = placed.iter().map(item).collect();
        self.replace(self.target, &items);
    }

    /// Requires that the damage is found and not mended unless that is chosen, that it is mended
    /// then and both checks are clean, that the kernel and our engine show `expected` for a file
    /// and all others as before, and that an undo brings the damage back.
    #[track_caller]
    pub(crate) fn require(&self, name: &str, expected: &[u8]) -> RepairOutcome {
        let outcome = require_mended(self.disks());
        let mut all = self.before.clone();
        all.insert(name.to_owned(), expected.to_vec());
        let now = shown(self.disks());
        require_same(&now, &all);
        let volume =
            BtrfsVolume::open(self.disks().devices(), &EngineOptions::default()).expect("it opens");
        let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
        let ours = offshoot_testkit::manifest::manifest(&fs).expect("it is read");
        let theirs = crate::judged::shown_by_kernel(self.disks());
        let differences = offshoot_testkit::manifest::differences(&ours, &theirs);
        assert_eq!(differences, Vec::<String>::new());
        drop((fs, volume));
        require_undone(self.disks(), &outcome);
        outcome
    }
}

pub(crate) fn options(is_dry_run: bool) -> RepairOptions {
    let classes = vec![RepairClass::Overlaps];
    RepairOptions { classes, is_dry_run, ..RepairOptions::default() }
}

/// Whether a finding is one that the class mends.
fn is_overlap(code: Code) -> bool {
    [Code::TreeBlock, Code::FileExtent].contains(&code)
}

/// Requires that the damage is mended if that is chosen, and not otherwise.
#[track_caller]
fn require_mended(disks: &Disks) -> RepairOutcome {
    let found = checked(disks);
    assert!(found.findings.iter().any(|one| is_overlap(one.code)), "{}", show(&found));
    let old = bytes(disks);
    if let Ok(outcome) = repair(disks, &[]) {
        let rest = outcome.after.as_ref().unwrap_or(&outcome.before);
        assert!(rest.findings.iter().any(|one| is_overlap(one.code)), "{}", show(rest));
        put_back(disks, &old);
    }
    let dry = repair_with(disks, &options(true)).expect("it would be mended");
    assert!(bytes(disks) == old, "nothing is written");
    let outcome = repair_with(disks, &options(false)).expect("it is mended");
    assert_eq!(dry.overlaps, outcome.overlaps, "a dry run says what a repair does");
    let after = outcome.after.as_ref().expect("there was something to mend");
    assert!(after.findings.is_empty(), "{}", show(after));
    let again = checked(disks);
    assert!(again.findings.is_empty(), "{}", show(&again));
    assert_eq!(progs_complaints(disks), None);
    outcome
}

/// Requires that an undo brings back what was found before the repair.
#[track_caller]
fn require_undone(disks: &Disks, outcome: &RepairOutcome) {
    undo(disks).expect("it is undone");
    let texts = |findings: &[offshoot_btrfs::BtrfsFinding]| -> Vec<String> {
        findings.iter().map(ToString::to_string).collect()
    };
    let options = offshoot_btrfs::CheckOptions::default();
    let watch = |_: &offshoot_btrfs::CheckEvent| std::ops::ControlFlow::Continue(());
    let found = offshoot_btrfs::check_btrfs(disks.devices(), &options, &watch);
    let found = found.expect("it is checked");
    assert_eq!(texts(&found.findings), texts(&outcome.before.findings));
}

/// All regular files that the kernel shows, by path, and what links lead to.
pub(crate) fn shown(disks: &Disks) -> BTreeMap<String, Vec<u8>> {
    let mount = disks.mount("ro,noatime");
    let (mut files, mut next) = (BTreeMap::new(), vec![mount.path().to_owned()]);
    while let Some(dir) = next.pop() {
        for entry in fs::read_dir(&dir).expect("a directory is read") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                next.push(path);
            } else if path.is_file() {
                let name = path.strip_prefix(mount.path()).expect("below").display().to_string();
                files.insert(name, fs::read(&path).expect("a file is read"));
            }
        }
    }
    files
}

#[track_caller]
pub(crate) fn require_same(now: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(now.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, bytes) in expected {
        let found = &now[name];
        let differs = found.iter().zip(bytes).position(|(one, other)| one != other);
        assert_eq!(differs.map(|at| at as u64 / BLOCK), None, "{name} differs in this block");
        assert_eq!(found.len(), bytes.len(), "{name}");
    }
}

/// What the target reads as, block by block.
fn expected(placed: &[Placed]) -> Vec<u8> {
    let of_block = |number: u64| {
        let rivals = placed.iter().filter(|one| one.has(number));
        // The last one of those with the highest rank, so the order is turned.
        let best = rivals.rev().max_by_key(|one| {
            let generation = one.donor.extent().generation;
            let (fits, address) = (one.donor.has_data(), one.donor.address());
            (generation, fits, address, std::cmp::Reverse(one.at))
        });
        match best {
            Some(best) => best.donor.block(best.first + number - best.at),
            None => vec![0; BLOCK_LEN],
        }
    };
    (0..BLOCKS).flat_map(of_block).collect()
}

/// Some ranges of donors of which at least two overlap, by where they begin.
fn draw(random: &mut Random, donors: &[Donor]) -> Vec<Placed> {
    loop {
        let one = |random: &mut Random| {
            let donor = donors[index(random, donors.len())].clone();
            let blocks = 1 + random.below(DONOR_BLOCKS);
            let first = random.below(DONOR_BLOCKS - blocks + 1);
            Placed { donor, at: random.below(BLOCKS - blocks + 1), first, blocks }
        };
        let count = 2 + random.below(4);
        let mut placed: Vec<_> = (0..count).map(|_| one(random)).collect();
        placed.sort_by_key(|one| one.at);
        if placed.windows(2).any(|two| two[1].at < two[0].at + two[0].blocks) {
            return placed;
        }
    }
}

#[track_caller]
fn require_drawn(mkfs: &'static str, cases: u64) {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let made = OverlapVolume::new(&judges, mkfs, fill);
    for case in 0..cases {
        let placed = draw(&mut random, &made.donors);
        for Placed { donor, at, first, blocks } in &placed {
            let generation = donor.extent().generation;
            println!("{case}: {blocks} at {at}: {} from {first}, {generation}", donor.name);
        }
        made.place(&placed);
        let outcome = made.require("target", &expected(&placed));
        let [file] = &outcome.overlaps.files[..] else { panic!("{:?}", outcome.overlaps) };
        assert_eq!(file.path.as_deref(), Some(&b"/target"[..]));
        assert!(file.changes.iter().all(|one| matches!(one, ItemChange::Cut { .. })));
    }
}

#[test]
fn extents_that_overlap_at_random() {
    require_drawn("", 6);
}

#[test]
fn extents_that_overlap_at_random_where_holes_are_recorded() {
    require_drawn("-O ^no-holes", 4);
}

/// The kinds of overlap, one by one: the number of the donor, the block in the target, and how many
/// blocks.
#[test]
fn each_kind_of_overlap() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "", fill);
    let kinds: [&[(usize, u64, u64)]; 8] = [
        // The newer one is inside: the older one is split in two.
        &[(0, 2, 12), (1, 6, 4)],
        // The older one is inside.
        &[(1, 2, 12), (0, 6, 4)],
        // The older one loses its end, and then its beginning.
        &[(0, 0, 10), (1, 6, 10)],
        &[(1, 0, 10), (0, 6, 10)],
        // One transaction, and the same place twice.
        &[(2, 0, 10), (3, 0, 10), (4, 5, 10)],
        // Compressed data is cut on both sides.
        &[(1, 0, 16), (5, 4, 16), (7, 12, 12)],
        &[(5, 0, 16), (7, 5, 3)],
        // Three deep.
        &[(0, 0, 16), (1, 2, 14), (7, 4, 4)],
    ];
    for kind in kinds {
        let place = |&(donor, at, blocks): &(usize, u64, u64)| {
            let donor = made.donors[donor].clone();
            Placed { donor, at, first: 0, blocks }
        };
        let placed: Vec<_> = kind.iter().map(place).collect();
        made.place(&placed);
        made.require("target", &expected(&placed));
    }
}

/// Data in an item stays as a whole or goes.
#[test]
fn data_in_an_item_overlaps_an_extent() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "", fill);
    let small = made.ino("small");
    let key = Key::new(small, ItemType::EXTENT_DATA, 0);
    let leaves = made.volume.leaves(TreeId::FS);
    let (_, inline) = leaves.iter().flatten().find(|(one, _)| *one == key).expect("an extent");
    let newer = made.donors[1].slice(3, 2);
    made.replace(small, &[(0, inline.clone()), (0, newer)]);
    made.require("small", &block("plain-1", 3)[..18]);
    let mut older = made.donors[1].slice(3, 1);
    FileExtentHead::mut_from_prefix(&mut older).expect("an extent").0.generation = 1.into();
    made.replace(small, &[(0, older), (0, inline.clone())]);
    made.require("small", b"in the item itself");
}

/// Where nothing else says which one is right, the data does.
#[test]
fn data_that_fits_its_checksums_comes_first() {
    let Some(judges) = judges::require() else { return };
    let made = OverlapVolume::new(&judges, "-d single", fill);
    let placed = |donor: usize| Placed {
        donor: made.donors[donor].clone(),
        at: 0,
        first: 0,
        blocks: DONOR_BLOCKS,
    };
    let mut equal = [2, 3, 4].map(placed);
    equal.sort_by_key(|one| one.donor.address());
    let [_, sound, damaged] = &equal;
    let image = &made.disks().images()[0];
    let wanted = block(damaged.donor.name, 5);
    let all = fs::read(image).expect("an image");
    let at = all.chunks(BLOCK_LEN).position(|found| found == wanted).expect("it is there");
    let file = fs::File::options().write(true).open(image).expect("an image opens");
    file.write_all_at(b"damage", at as u64 * BLOCK).expect("it is written");
    made.place(&equal);
    let outcome = repair_with(made.disks(), &options(false)).expect("it is mended");
    assert!(outcome.after.expect("it is mended").findings.is_empty());
    let mount = made.disks().mount("ro,noatime");
    let found = fs::read(mount.path().join("target")).expect("it is read");
    assert!(found == expected(std::slice::from_ref(sound)), "the data that fits");
}
