//! The sound volumes: the kernel fills them, and we leave in them what a crash leaves.
//!
//! The repository carries one of each layout (`fixtures/mutants`), so that a run can be repeated. A
//! campaign makes new ones, with other addresses, times and UUIDs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::handful;
use offshoot_testkit::btrfs::fixture::{pack_file, repository, unpack_file};
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut, NewFile, Timestamp};

use crate::damage::DamageTarget;
use crate::image::SparseImage;
use crate::judge::CheckJudge;
use crate::patch::Structures;

/// A layout: its name, its members, and the options of `mkfs.btrfs`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MutantLayout {
    pub(crate) name: &'static str,
    members: usize,
    mkfs: &'static str,
}

const fn layout(name: &'static str, members: usize, mkfs: &'static str) -> MutantLayout {
    MutantLayout { name, members, mkfs }
}

pub(crate) const LAYOUTS: [MutantLayout; 7] = [
    layout("default", 1, ""),
    layout("small-nodes", 1, "-n 4096 -m single"),
    layout("raid1", 2, "-d raid1 -m raid1"),
    layout("mixed", 1, "--mixed -n 4096 -s 4096"),
    layout("old", 1, "-n 4096 -m single -O ^no-holes,^extref,^free-space-tree,^skinny-metadata"),
    layout("block-group-tree", 1, "-n 4096 -O block-group-tree"),
    layout("xxhash", 1, "-n 4096 -m dup -d dup --csum xxhash"),
];

/// A sound volume, and the structures of it that are patched.
pub(crate) struct SoundVolume {
    /// The name of its layout, and a number for it.
    pub(crate) name: &'static str,
    pub(crate) number: u64,
    pub(crate) images: Vec<Arc<SparseImage>>,
    pub(crate) target: DamageTarget,
    pub(crate) structures: Structures,
    pub(crate) judge: CheckJudge,
    _turn: Option<MutexGuard<'static, ()>>,
}

/// Held by the test that has a carried volume of several members. All copies of it have one UUID,
/// so `btrfs check` and the kernel would take the member of another test's copy for one of theirs.
static SEVERAL_MEMBERS: Mutex<()> = Mutex::new(());

/// The size of a member, in MiB.
const MIB: u64 = 256;

impl MutantLayout {
    pub(crate) fn has_several_members(&self) -> bool {
        self.members > 1
    }

    pub(crate) fn make(&self, judges: &Judges) -> SoundVolume {
        self.sound(self.disks(judges))
    }

    /// The volume that the repository carries.
    pub(crate) fn carried(&self, judges: &Judges) -> SoundVolume {
        let turn = self
            .has_several_members()
            .then(|| SEVERAL_MEMBERS.lock().unwrap_or_else(PoisonError::into_inner));
        let disks = Disks::create(judges, self.members, MIB);
        for (member, image) in disks.images().iter().enumerate() {
            unpack_file(&self.packed(member), image).expect("a carried volume unpacks");
        }
        SoundVolume { _turn: turn, ..self.sound(disks) }
    }

    /// Makes the carried volume of this layout anew.
    pub(crate) fn carry(&self, judges: &Judges) {
        for (member, image) in self.disks(judges).images().iter().enumerate() {
            let packed = self.packed(member);
            std::fs::create_dir_all(packed.parent().expect("a directory")).expect("it is made");
            pack_file(image, &packed).expect("a volume is packed");
        }
    }

    fn packed(&self, member: usize) -> PathBuf {
        repository().join(format!("fixtures/mutants/{}-{member}.zst", self.name))
    }

    fn disks(&self, judges: &Judges) -> Disks {
        let recipe = Recipe::new().devices(self.members).mib(MIB).mkfs(self.mkfs);
        let disks = recipe.mount("commit=300").fill(handful::fill).make(judges);
        leave_orphans(&disks);
        disks
    }

    fn sound(&self, disks: Disks) -> SoundVolume {
        let read = |path: &std::path::PathBuf| {
            Arc::new(SparseImage::read(Path::new(path)).expect("an image reads"))
        };
        let images: Vec<_> = disks.images().iter().map(read).collect();
        let target = DamageTarget::new(images.clone(), false);
        let structures = Structures::of(&target);
        let judge = CheckJudge::new(disks, &images);
        let number = u64::from(offshoot_testkit::names::hash(self.name.as_bytes()));
        SoundVolume { name: self.name, number, images, target, structures, judge, _turn: None }
    }
}

/// Leaves files without names, and a subvolume that is deleted and not dropped.
fn leave_orphans(disks: &Disks) {
    let at = Timestamp { secs: 1_650_000_000, nanos: 0 };
    let new = NewFile { permissions: 0o600, uid: 1, gid: 1, umask: None, at };
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume = BtrfsVolume::open_writable(disks.writable_devices(), &options).expect("it opens");
    let fs = volume.filesystem(SubvolumeId::FS).expect("every volume has one");
    let volumes = fs.lookup(fs.root(), b"volumes").expect("it was filled");
    let source = fs.lookup(volumes, b"source").expect("it was filled");
    for (dir, len) in [(fs.root(), 30_000), (source, 100), (source, 50_000)] {
        // The file is never released: the next mount removes it.
        let file = fs.create_unnamed(dir, false, &new).expect("there is room");
        fs.write(file, 0, &vec![b'o'; len], at).expect("there is room");
    }
    fs.delete_subvolume(EntryPlace { dir: volumes, name: b"to-delete" }, at).expect("it goes");
    fs.sync().expect("a commit");
}
