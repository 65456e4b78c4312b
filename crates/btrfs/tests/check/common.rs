//! What the tests of the check share: volumes that are damaged in one place, and both judges.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsFindingCode, CheckOptions, CheckOutcome, check_btrfs};
use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::run::{command, run};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::damage::{DamageTarget, header};
use crate::image::SparseImage;
use crate::mutation::{pack, unpack};

/// The items of a leaf.
pub(crate) type EditedItems = Vec<(Key, Vec<u8>)>;

/// A volume of 256 MiB in which a script made subvolumes.
pub(crate) fn made_by(judges: &Judges, script: &str) -> Disks {
    let disks = Disks::create(judges, 1, 256);
    disks.mkfs_and_settle(&[]);
    let mount = disks.mount("rw,noatime");
    run("sh", &["-ec", &format!("cd '{}'; {script}", mount.path().display())]);
    drop(mount);
    disks
}

/// The structure at the beginning of an item or superblock.
pub(crate) fn view<T>(bytes: &mut [u8]) -> &mut T
where
    T: FromBytes + IntoBytes + KnownLayout + Immutable,
{
    T::mut_from_prefix(bytes).expect("it is long enough").0
}

/// Whether the key of an item is this one.
pub(crate) fn is(objectid: u64, item_type: ItemType, offset: u64) -> impl Fn(Key, &[u8]) -> bool {
    move |key, _| key == Key::new(objectid, item_type, offset)
}

/// What `btrfs check` says of a damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgsVerdict {
    /// It finds something too.
    Agrees,
    /// It does not look at this.
    SeesNothing,
}

/// A volume that is damaged in one place.
pub(crate) struct DamagedVolume {
    disks: Disks,
    /// Its blocks as they were before the damage.
    pub(crate) target: DamageTarget,
}

impl DamagedVolume {
    /// The volume on `disks`, which is sound and not mounted.
    pub(crate) fn of(disks: Disks) -> Self {
        let read = |path| Arc::new(SparseImage::read(path).expect("an image reads"));
        let images = disks.images().iter().map(|path| read(path)).collect();
        Self { target: DamageTarget::new(images, false), disks }
    }

    /// The items of all leaves that were made for the tree `owner`, each leaf on its own.
    pub(crate) fn leaves(&self, owner: TreeId) -> Vec<EditedItems> {
        let is_leaf = |bytes: &[u8]| header(bytes).level == 0 && header(bytes).owner() == owner;
        let leaves = self.target.blocks.iter().filter(|block| is_leaf(&block.bytes));
        leaves.map(|leaf| unpack(&leaf.bytes)).collect()
    }

    /// The inode that the first entry called `name` of the top level leads to.
    #[track_caller]
    pub(crate) fn ino(&self, name: &str) -> u64 {
        let leaves = self.leaves(TreeId::FS);
        let mut items =
            leaves.iter().flatten().filter(|(key, _)| key.item_type == ItemType::DIR_INDEX);
        let found = items.find_map(|(_, data)| {
            let entry = dir_entries(data).next()?.ok()?;
            (entry.name == name.as_bytes()).then_some(entry.location.objectid)
        });
        found.expect("an entry of this name")
    }

    /// Makes the root item of the subvolume `id` lead to the root block of `other`.
    #[track_caller]
    pub(crate) fn share_root(&self, id: u64, other: u64) {
        let is_root = |key: Key, id| (key.objectid, key.item_type) == (id, ItemType::ROOT_ITEM);
        self.edit(
            TreeId::ROOT,
            |key, _| is_root(key, id),
            |items, slot| {
                let from = items.iter().find(|(key, _)| is_root(*key, other));
                let mut from = from.expect("it is in this leaf").1.clone();
                let from = view::<RootItem>(&mut from);
                let to = view::<RootItem>(&mut items[slot].1);
                (to.bytenr, to.level) = (from.bytenr, from.level);
                (to.generation, to.generation_v2) = (from.generation, from.generation_v2);
            },
        );
    }

    /// Calls `judge` with the volume once for each block of a tree that `is_wanted` says yes to by
    /// its owner, while all copies of that block are zeros.
    pub(crate) fn without_each(&self, is_wanted: impl Fn(TreeId) -> bool, judge: impl Fn(&Disks)) {
        for block in self.target.blocks.iter().filter(|one| is_wanted(header(&one.bytes).owner())) {
            let write = |bytes: &[u8]| {
                block.places.iter().for_each(|&(member, at)| self.write(member, at, bytes));
            };
            write(&vec![0; block.bytes.len()]);
            judge(&self.disks);
            write(&block.bytes);
        }
    }

    /// Changes the first leaf of the tree `owner` that has an item for which `is_wanted` says yes.
    /// `change` gets the items of the leaf and the slot of that item. It must not change the first
    /// key of a leaf.
    #[track_caller]
    pub(crate) fn edit(
        &self,
        owner: TreeId,
        is_wanted: impl Fn(Key, &[u8]) -> bool,
        change: impl FnOnce(&mut EditedItems, usize),
    ) -> &Self {
        let found = self.target.blocks.iter().find_map(|block| {
            let header = header(&block.bytes);
            if header.level > 0 || header.owner() != owner {
                return None;
            }
            let items = unpack(&block.bytes);
            let slot = items.iter().position(|(key, data)| is_wanted(*key, data))?;
            Some((block, items, slot))
        });
        let (block, mut items, slot) = found.expect("a leaf has such an item");
        let before = items.len();
        change(&mut items, slot);
        let mut bytes = pack(&block.bytes, &items);
        assert_eq!(unpack(&bytes).len(), items.len(), "the leaf had {before} items: there is room");
        self.target.fit_checksum(&mut bytes);
        for &(member, offset) in &block.places {
            self.write(member, offset, &bytes);
        }
        self
    }

    /// Breaks the checksum of the second leaf of the tree `owner`, or of its only one, in all
    /// copies.
    #[track_caller]
    pub(crate) fn break_leaf(&self, owner: TreeId) {
        let is_leaf = |bytes: &[u8]| header(bytes).level == 0 && header(bytes).owner() == owner;
        let leaves = self.target.blocks.iter().filter(|block| is_leaf(&block.bytes));
        let block = leaves.take(2).last().expect("the tree has a leaf");
        let mut bytes = block.bytes.clone();
        bytes[200] ^= 1;
        for &(member, offset) in &block.places {
            self.write(member, offset, &bytes);
        }
    }

    /// Changes all superblocks of a member.
    pub(crate) fn edit_superblocks(&self, member: usize, change: impl Fn(&mut [u8])) -> &Self {
        for at in SUPERBLOCK_OFFSETS {
            self.edit_superblock(member, at, &change);
        }
        self
    }

    /// Changes the superblock at `offset` of a member, if the member is that long.
    pub(crate) fn edit_superblock(&self, member: usize, offset: u64, change: impl Fn(&mut [u8])) {
        let file = File::open(&self.disks.images()[member]).expect("an image opens");
        let mut bytes = vec![0; SUPERBLOCK_SIZE];
        if file.read_exact_at(&mut bytes, offset).is_ok() {
            change(&mut bytes);
            self.target.fit_checksum(&mut bytes);
            self.write(member, offset, &bytes);
        }
    }

    /// Writes bytes to a member.
    pub(crate) fn write(&self, member: usize, offset: u64, bytes: &[u8]) {
        let file = File::options().write(true).open(&self.disks.images()[member]);
        file.expect("an image opens").write_all_at(bytes, offset).expect("it is written");
    }

    /// The images.
    pub(crate) fn disks(&self) -> &Disks {
        &self.disks
    }

    /// Requires that our check finds exactly `code`, once or more, and what `btrfs check` says.
    /// Returns what ours found.
    #[track_caller]
    pub(crate) fn require(&self, code: BtrfsFindingCode, progs: ProgsVerdict) -> CheckOutcome {
        let outcome = checked(&self.disks);
        let is_only = outcome.findings.iter().all(|finding| finding.code == code);
        assert!(is_only && !outcome.findings.is_empty(), "{code:?} expected: {}", show(&outcome));
        let said = progs_complaints(&self.disks);
        assert_eq!(said.is_some(), progs == ProgsVerdict::Agrees, "btrfs check: {said:?}");
        outcome
    }
}

/// What our check finds, data included.
#[track_caller]
pub(crate) fn checked(disks: &Disks) -> CheckOutcome {
    let options = CheckOptions { verifies_data: true, ..CheckOptions::default() };
    check_btrfs(disks.devices(), &options, &|_| ControlFlow::Continue(())).expect("it is checked")
}

/// Requires that our check finds nothing, and that `btrfs check` does not either.
#[track_caller]
pub(crate) fn require_sound(disks: &Disks) -> CheckOutcome {
    let outcome = checked(disks);
    assert!(outcome.findings.is_empty(), "a sound volume: {}", show(&outcome));
    assert_eq!(progs_complaints(disks), None);
    outcome
}

/// The findings, one on each line.
pub(crate) fn show(outcome: &CheckOutcome) -> String {
    let lines = outcome.findings.iter().take(30).map(|finding| format!("\n  {finding}"));
    format!("{} findings{}", outcome.findings.len(), lines.collect::<String>())
}

/// What `btrfs check` finds, data included; `None` for nothing.
pub(crate) fn progs_complaints(disks: &Disks) -> Option<String> {
    let check = |device: &str| {
        let args = ["check", "--readonly", "--check-data-csum", device];
        command("btrfs").args(args).output().expect("btrfs check runs")
    };
    let output = match disks.images() {
        [image] => check(image.to_str().expect("a plain path")),
        images => AttachedImages::new(images).checked(check),
    };
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let is_sound = output.status.success() && said.contains("no error found");
    let lines = errors.lines().filter(|line| !line.starts_with('['));
    (!is_sound).then(|| lines.chain(said.lines()).take(12).collect::<Vec<_>>().join("\n"))
}
