//! The kernel and we change one volume in turns.
//!
//! Our turn lets actors work on the volume and on a model. The kernel's turn makes random system
//! calls; a model of what it shows at the end goes on. Between the turns `xfs_repair` and our check
//! find nothing, and both sides show what the model holds.
//!
//! A turn ends with an unmount, or as by a power cut after a sync: then the other side recovers the
//! log.
//!
//! A run plays two rounds on about half of the kinds of volumes. `cargo xtask campaign
//! xfs-pingpong` plays more of them on all.

use offshoot_testkit::compare::Aspect;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::in_shares;
use offshoot_testkit::kernel_calls::KernelCalls;
use offshoot_testkit::model::actor::{Actor, names_of};
use offshoot_testkit::model::{Model, ModelManners};
use offshoot_testkit::random::{Random, is_in_run, seed_of_run};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::{MATRIX, XfsVolumeKind};
use offshoot_testkit::xfs::{MISSING_FLAGS, comparison};
use offshoot_vfs::{FileSystem, Timestamp, Volume};
use offshoot_xfs::{XfsOptions, XfsVolume, check_xfs};

/// Steps of each actor in a turn.
const STEPS: u64 = 300;

/// Operations of the kernel with the names of each actor in a turn.
const OPERATIONS: u64 = 150;

/// The actors. The number of an actor decides its names.
const ACTORS: [u64; 2] = [0, 1];

/// A game on one volume.
struct XfsGame {
    kind: &'static XfsVolumeKind,
    disk: XfsDisk,
    block_bytes: u64,
    random: Random,
    /// Whether the last turn ended as by a power cut.
    is_cut: bool,
}

impl XfsGame {
    fn new(kind: &'static XfsVolumeKind, judges: &XfsJudges, seed: u64) -> Self {
        let disk = XfsDisk::create(judges, kind.mib);
        disk.mkfs(kind.mkfs);
        if !kind.changes.is_empty() {
            disk.change_with_xfs_db(kind.changes);
        }
        Self { kind, disk, block_bytes: 0, random: Random::new(seed), is_cut: false }
    }

    /// What the kernel says when it mounts the volume now.
    fn kernel_says(&self) -> Vec<&'static str> {
        let recovery = self.is_cut.then_some(RECOVERY);
        self.kind.kernel_says.iter().copied().chain(recovery).collect()
    }

    fn play(&mut self, rounds: u64) {
        let volume = XfsVolume::open(self.disk.device(), &XfsOptions::default()).unwrap();
        self.block_bytes = volume.block_size().into();
        let root = volume.attr(volume.root()).unwrap();
        let mut model = self.with_manners(Model::new(&root));
        for round in 0..rounds {
            self.ours(&model, round);
            self.assert_sound(&model);
            model = self.theirs(&model);
            self.assert_sound(&model);
        }
    }

    fn with_manners(&self, model: Model) -> Model {
        // Access control lists have another name, too.
        model.forget_xattrs(|name| name.starts_with(b"trusted.SGI_ACL_"));
        model.with_manners(ModelManners::Xfs).with_blocks(self.block_bytes)
    }

    fn ours(&mut self, model: &Model, round: u64) {
        let is_cut = self.random.below(2) == 0;
        let mut options = XfsOptions::default();
        if is_cut {
            // Nothing is written by itself, so a copy is what a power cut leaves.
            options.sync_interval = None;
        }
        let volume = XfsVolume::open_writable(self.disk.writable_device(), &options).unwrap();
        let files = volume.clone().files(volume.root().dev).unwrap();
        let at = Timestamp { secs: 1_900_000_000 + round.cast_signed(), nanos: 7 };
        let has_sharing = !self.kind.mkfs.contains("reflink=0");
        std::thread::scope(|scope| {
            for number in ACTORS {
                let seed = self.random.number();
                let actor = Actor::new(&*files, model, number, seed, at)
                    .without_holes()
                    .without_flags(MISSING_FLAGS);
                let mut actor = if has_sharing { actor } else { actor.without_sharing() };
                scope.spawn(move || actor.act(STEPS));
            }
        });
        self.assert_alike(&*files, model);
        files.sync().unwrap();
        let left = is_cut.then(|| self.disk.copy());
        volume.shut_down().unwrap();
        drop((files, volume));
        self.is_cut = left.is_some();
        if let Some(left) = left {
            self.disk = left;
        }
    }

    /// Returns a model of what the kernel shows at the end.
    fn theirs(&mut self, model: &Model) -> Model {
        let mut mount = self.disk.mount("rw,noatime", &self.kernel_says());
        let host = HostFilesystem::new(mount.path()).unwrap();
        self.assert_alike(model, &host);
        drop(host);
        for number in ACTORS {
            let seed = self.random.number();
            KernelCalls::new(mount.path(), names_of(number), seed).on_xfs().act(OPERATIONS);
        }
        mount.sync();
        let host = HostFilesystem::new(mount.path()).unwrap();
        let model = self.with_manners(Model::copy(&host).unwrap());
        drop(host);
        self.is_cut = self.random.below(2) == 0;
        if self.is_cut {
            self.disk.shut_down(&mut mount, XfsShutdown::LogWritten);
        }
        drop(mount);
        model
    }

    /// Our reader shows what the model holds, and what a recovery would leave is sound.
    fn assert_sound(&self, model: &Model) {
        let reader = XfsVolume::open(self.disk.device(), &XfsOptions::default()).unwrap();
        self.assert_alike(&*reader, model);
        let found = check_xfs(&self.disk.device(), &XfsOptions::default()).unwrap();
        assert!(found.findings.is_empty(), "{}: {:#?}", self.kind.name, found.findings);
        if !self.is_cut {
            self.disk.assert_checks();
        }
    }

    fn assert_alike(&self, one: &dyn FileSystem, other: &dyn FileSystem) {
        let all = comparison().without(Aspect::Holes).without(Aspect::StoredAcls);
        // With parent pointers, files that exchange names get another change time, and else they
        // keep theirs, as the model has it.
        let knows_times = !self.kind.mkfs.contains("parent=1");
        let all = if knows_times { all } else { all.without(Aspect::StoredTimes) };
        all.run_filesystems(one, other).assert_same(1);
    }
}

/// The kinds that are written: version 4 and metadata directories are only read.
fn kinds() -> impl Iterator<Item = &'static XfsVolumeKind> {
    MATRIX.iter().filter(|kind| kind.is_mounted && kind.name != "metadir")
}

fn play(kind: &'static XfsVolumeKind, judges: &XfsJudges, rounds: u64) {
    eprintln!("{}, {rounds} rounds", kind.name);
    XfsGame::new(kind, judges, seed_of_run()).play(rounds);
}

/// Two rounds, unless the kind is left to other runs.
fn play_briefly(kind: &'static XfsVolumeKind) {
    let Some(judges) = judges::require() else { return };
    if is_in_run(&format!("pingpong on {}", kind.name)) {
        play(kind, &judges, 2);
    }
}

in_shares!(kinds(), play_briefly);

#[test]
#[ignore = "takes some minutes; cargo xtask campaign xfs-pingpong runs it"]
fn campaign() {
    let judges = judges::require().expect("root and loop devices");
    let rounds = std::env::var("OFFSHOOT_ROUNDS");
    let rounds = rounds.map_or(6, |text| text.parse().expect("a number of rounds"));
    kinds().for_each(|kind| play(kind, &judges, rounds));
}
