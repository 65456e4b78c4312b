//! Named damage: what we must do with it, and what the kernel does with the same.

mod left;
mod names;
mod strict;
mod sums;

use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, Reporter, SubvolumeId};
use offshoot_btrfs_format::{Key, TreeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, NewFile, Timestamp};

use crate::damage::{DamageTarget, header};
use crate::image::{Patched, SparseImage};
use crate::judge::{CheckComplaints, CheckJudge, CheckMode};
use crate::mutation::{pack, unpack};
use crate::{MutantMembers, copies, devices};

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// A volume of the kernel, with one named damage.
struct DamageStory {
    target: DamageTarget,
    judge: CheckJudge,
    members: MutantMembers,
}

impl DamageStory {
    /// A volume with the files that `fill` writes, in small tree blocks.
    fn new(judges: &Judges, fill: fn(&Path)) -> Self {
        Self::of(judges, fill, |_| {})
    }

    /// The same, and then we change it.
    fn of(judges: &Judges, fill: fn(&Path), change: impl FnOnce(&Filesystem)) -> Self {
        Self::made(judges, "-n 4096", fill, change)
    }

    /// The same with these options of `mkfs.btrfs`.
    fn made(
        judges: &Judges,
        mkfs: &'static str,
        fill: fn(&Path),
        change: impl FnOnce(&Filesystem),
    ) -> Self {
        let disks = Recipe::new().mib(256).mkfs(mkfs).fill(fill).make(judges);
        let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
        let volume =
            BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
        change(&volume.filesystem(SubvolumeId::FS).expect("every volume has one"));
        drop(volume);
        Self::on(disks)
    }

    /// The volume on these disks in its present state.
    fn on(disks: Disks) -> Self {
        let read = |path: &std::path::PathBuf| Arc::new(SparseImage::read(path).expect("an image"));
        let images: Vec<_> = disks.images().iter().map(read).collect();
        let target = DamageTarget::new(images.clone(), false);
        let judge = CheckJudge::new(disks, &images);
        let over = |image| Arc::new(MemoryDevice::over(Arc::new(Patched::new(image))));
        Self { target, judge, members: images.iter().map(over).collect() }
    }

    /// Writes `bytes` over a tree block, in all copies.
    fn write(&self, block: usize, bytes: &[u8]) {
        for &(member, offset) in &self.target.blocks[block].places {
            self.members[member].write_at(offset, bytes).expect("memory");
        }
    }

    /// The present contents of the block of `tree` that has an item with this key, and the number
    /// of the block.
    #[track_caller]
    fn leaf(&self, tree: TreeId, key: Key) -> (usize, Vec<u8>) {
        for (number, block) in self.target.blocks.iter().enumerate() {
            let (member, offset) = block.places[0];
            let mut bytes = block.bytes.clone();
            self.members[member].read_at(offset, &mut bytes).expect("memory");
            let header = header(&bytes);
            if header.level == 0
                && header.owner.get() == tree.0
                && unpack(&bytes).iter().any(|item| item.0 == key)
            {
                return (number, bytes);
            }
        }
        panic!("no leaf of tree {tree} has {key}");
    }

    /// Changes the items of the leaf of `tree` that has an item with this key.
    #[track_caller]
    fn edit(&self, tree: TreeId, key: Key, edit: impl FnOnce(&mut Vec<(Key, Vec<u8>)>)) {
        let (number, bytes) = self.leaf(tree, key);
        let mut items = unpack(&bytes);
        edit(&mut items);
        items.sort();
        let mut packed = pack(&bytes, &items);
        assert_eq!(unpack(&packed).len(), items.len(), "there is no room");
        self.target.fit_checksum(&mut packed);
        self.write(number, &packed);
    }

    /// Spoils the leaf of `tree` that has an item with this key, in all copies.
    #[track_caller]
    fn spoil(&self, tree: TreeId, key: Key) {
        let (number, bytes) = self.leaf(tree, key);
        self.write(number, &vec![0xa5; bytes.len()]);
    }

    /// What `btrfs check` reports about the volume now.
    fn check(&mut self) -> CheckComplaints {
        self.judge.check(&self.members, CheckMode::Original)
    }

    /// Requires that `btrfs check` finds nothing that it did not find before.
    #[track_caller]
    fn assert_no_worse_than(&mut self, before: &CheckComplaints) {
        let beyond = self.check().beyond(before);
        assert!(beyond.is_empty(), "btrfs check: {:#?}", beyond.values());
    }

    /// Opens it for writing, without a thread of the volume.
    fn open(&self) -> Filesystem {
        self.open_with(None, None)
    }

    fn open_with(
        &self,
        reporter: Option<Reporter>,
        commit_interval: Option<std::time::Duration>,
    ) -> Filesystem {
        let options = EngineOptions { commit_interval, reporter, ..EngineOptions::default() };
        let volume =
            BtrfsVolume::open_writable(devices(&self.members), &options).expect("it opens");
        volume.filesystem(SubvolumeId::FS).expect("every volume has one")
    }

    /// The keys of an object in `tree`.
    fn keys(&self, tree: TreeId, objectid: u64) -> Vec<Key> {
        self.keys_while(tree, Key { objectid, ..Key::MIN }, |key| key.objectid == objectid)
    }

    /// The keys of `tree` from `first` on, as long as `is_wanted` holds.
    fn keys_while(&self, tree: TreeId, first: Key, is_wanted: impl Fn(&Key) -> bool) -> Vec<Key> {
        let volume = BtrfsVolume::open(devices(&self.members), &EngineOptions::default());
        let volume = volume.expect("it opens");
        let root = volume.tree(tree).expect("there is such a tree");
        let mut cursor = volume.cursor(root, first).expect("it reads");
        let mut keys = Vec::new();
        while let Some((key, _)) = cursor.item().filter(|(key, _)| is_wanted(key)) {
            keys.push(key);
            cursor.advance().expect("it reads");
        }
        keys
    }

    /// The contents of the item of `tree` with this key.
    #[track_caller]
    fn item(&self, tree: TreeId, key: Key) -> Vec<u8> {
        let items = unpack(&self.leaf(tree, key).1);
        items.into_iter().find(|item| item.0 == key).expect("the leaf has it").1
    }

    /// Has the kernel mount a copy of the present volume and run `work` on it. Returns the copy.
    fn kernel_does(&mut self, work: impl FnOnce(&Path) + Send + 'static) -> Self {
        let members = copies(&self.members);
        let changed = self.judge.kernel_changes(&members, work);
        let disks = changed.expect("the kernel mounts it for writing");
        Self::on(disks)
    }
}

/// The file at a path below the root.
#[track_caller]
fn at(fs: &dyn FileSystem, path: &str) -> FileId {
    path.split('/').fold(fs.root(), |dir, name| {
        fs.lookup(dir, name.as_bytes()).unwrap_or_else(|error| panic!("{path}: {error}"))
    })
}

fn place(dir: FileId, name: &str) -> EntryPlace<'_> {
    EntryPlace { dir, name: name.as_bytes() }
}
