//! `offshoot recover` beside `btrfs restore -i`, over volumes of the kernel with wiped blocks.

mod without_superblocks;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use offshoot_testkit::btrfs::damage::SUPERBLOCKS;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill::subvolumes;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::progs::{MirrorPlace, Progs};
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::random::{Random, seed_of_run};
use serde_json::Value;

/// Regular files, by their paths from the top.
type FilesByPath = BTreeMap<PathBuf, Vec<u8>>;

const NODE: usize = 16 << 10;

fn contents(top: &Path) -> FilesByPath {
    let (mut found, mut dirs) = (FilesByPath::new(), vec![top.to_path_buf()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let kind = path.symlink_metadata().expect("its attributes").file_type();
            if kind.is_dir() {
                dirs.push(path);
            } else if kind.is_file() {
                let below = path.strip_prefix(top).expect("below the top").to_path_buf();
                found.insert(below, std::fs::read(path).expect("its contents"));
            }
        }
    }
    found
}

/// Files in few directories, small ones in leaves and larger ones in extents; a subvolume with a
/// snapshot; and some commits, so that there are backup roots.
fn fill(root: &Path) {
    let mut random = Random::new(11);
    for dir in 0..5 {
        let dir = root.join(format!("documents-{dir}"));
        std::fs::create_dir(&dir).expect("a directory");
        for number in 0..60 {
            let len = [40, 700, 1500, 9000, 40_000][number % 5];
            let path = dir.join(format!("document-with-a-name-{number}"));
            std::fs::write(path, random.bytes(len)).expect("a file");
        }
    }
    let large = b"text that is easily compressed, ".repeat(20_000);
    std::fs::write(root.join("large"), large).expect("a file");
    subvolumes::create(&root.join("subvolume"));
    for number in 0..80 {
        let path = root.join(format!("subvolume/file-{number}"));
        std::fs::write(path, random.bytes(900)).expect("a file");
    }
    for commit in 0..4 {
        std::fs::write(root.join(format!("commit-{commit}")), [b'c'; 30]).expect("a file");
        offshoot_testkit::run::run("sync", &["-f".as_ref(), root.as_os_str()]);
    }
    subvolumes::snapshot(&root.join("subvolume"), &root.join("snapshot"), true);
}

/// A sound volume, and what is in it.
struct Judged {
    disks: Disks,
    truth: FilesByPath,
    blocks: BTreeMap<&'static str, Vec<u64>>,
    places: BTreeMap<u64, Vec<MirrorPlace>>,
}

/// What a program got.
struct Got {
    _dir: tempfile::TempDir,
    files: FilesByPath,
    output: Output,
}

const TREES: [&str; 7] = ["root", "chunk", "extent", "dev", "fs", "csum", "256"];

impl Judged {
    fn make(judges: &Judges, mkfs: &'static str, devices: usize) -> Self {
        let recipe = Recipe::new().devices(devices).mib(300).mkfs(mkfs).fill(fill);
        let disks = recipe.mount("compress=zstd").make(judges);
        let mount = disks.mount("ro,noatime");
        let truth = contents(mount.path());
        drop(mount);
        let progs = Progs::of(&disks);
        let blocks: BTreeMap<_, _> = TREES.iter().map(|tree| (*tree, progs.blocks(tree))).collect();
        let all = blocks.values().flatten().copied();
        let places = all.map(|at| (at, progs.places(at, NODE as u64))).collect();
        drop(progs);
        Self { disks, truth, blocks, places }
    }

    /// A copy of the volume without these blocks.
    fn without(&self, judges: &Judges, blocks: &[u64]) -> Disks {
        let damaged = self.disks.copy(judges);
        for place in blocks.iter().flat_map(|block| &self.places[block]) {
            wipe(&damaged.images()[place.member], place.physical, NODE);
        }
        damaged
    }

    /// Requires that we get all that `btrfs restore` gets, and that each file at its place is
    /// right, or told to be replaced in parts. Returns how many files we got.
    fn judge(&self, what: &str, damaged: &Disks) -> usize {
        let restored = restore(damaged);
        let recovered = recover(damaged, &[]);
        let code = recovered.output.status.code();
        assert!(matches!(code, Some(0 | 3)), "{what}: {:?}", recovered.output);
        let report: Value = serde_json::from_slice(&recovered.output.stdout)
            .unwrap_or_else(|error| panic!("{what}: {error}: {:?}", recovered.output));
        let anywhere: BTreeSet<&Vec<u8>> = recovered.files.values().collect();
        for (path, bytes) in
            restored.files.iter().filter(|(path, got)| self.truth.get(*path) == Some(got))
        {
            let is_there = recovered.files.get(path) == Some(bytes) || anywhere.contains(bytes);
            assert!(is_there, "{what}: only restore gets {}: {report}", path.display());
        }
        let told: BTreeSet<_> = ["replaced", "unverified", "inferred"]
            .iter()
            .flat_map(|kind| report[kind].as_array().expect("a list"))
            .map(|range| range["path"].as_str().expect("a path").trim_start_matches('/').to_owned())
            .collect();
        let is_right = |(path, bytes): &(&PathBuf, &Vec<u8>)| self.truth.get(*path) == Some(bytes);
        for (path, _) in recovered.files.iter().filter(|got| !is_right(got)) {
            let is_elsewhere = path.starts_with("lost+found");
            let is_told = told.contains(path.to_str().expect("a plain path"));
            // In place of blocks that are lost there may be older states of them, which is told.
            let tree = match path.components().next().map(|first| first.as_os_str().to_owned()) {
                Some(first) if first == "subvolume" => 256,
                Some(first) if first == "snapshot" => 257,
                _ => 5,
            };
            let lost = report["lost"].as_array().expect("a list");
            let is_doubtful =
                lost.iter().any(|one| one["tree"] == tree && one["found_blocks"] != 0);
            assert!(
                is_elsewhere || is_told || is_doubtful,
                "{what}: {} is wrong: {report}",
                path.display()
            );
        }
        recovered.files.iter().filter(is_right).count()
    }
}

fn wipe(image: &Path, offset: u64, len: usize) {
    let file = File::options().write(true).open(image).expect("an image");
    file.write_all_at(&vec![0xa5; len], offset).expect("it is written");
}

fn got(run: impl FnOnce(&Path) -> Output) -> Got {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let top = dir.path().join("out");
    std::fs::create_dir(&top).expect("a directory");
    let output = run(&top);
    Got { files: contents(&top), output, _dir: dir }
}

/// `btrfs restore -i`, which works on files when there is one member.
fn restore(disks: &Disks) -> Got {
    let attached = offshoot_testkit::btrfs::disks::AttachedImages::new(disks.images());
    got(|top| {
        let mut command = Command::new("btrfs");
        command.args(["restore", "-i", attached.devices()[0]]).arg(top).output().expect("it runs")
    })
}

fn recover(disks: &Disks, options: &[&str]) -> Got {
    recover_from(disks.images(), options)
}

fn recover_from(images: &[PathBuf], options: &[&str]) -> Got {
    got(|top| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot"));
        command.args(["recover", "--json"]).args(options).arg(&images[0]);
        for image in &images[1..] {
            command.arg("--device").arg(image);
        }
        command.arg(top).output().expect("it runs")
    })
}

/// The root of each tree, and the primary superblock.
#[test]
fn without_any_root_we_get_what_restore_gets() {
    let Some(judges) = judges::require() else { return };
    let volume = Judged::make(&judges, "", 1);
    assert_eq!(volume.judge("sound", &volume.disks), volume.truth.len());
    let damaged = volume.disks.copy(&judges);
    wipe(&damaged.images()[0], SUPERBLOCKS[0], 4096);
    assert_eq!(volume.judge("primary superblock", &damaged), volume.truth.len());
    for tree in TREES {
        let damaged = volume.without(&judges, &volume.blocks[tree][..1]);
        let count = volume.judge(tree, &damaged);
        // An older root may not have what the last commit made.
        assert!(count + 82 >= volume.truth.len(), "{tree}: {count} of {}", volume.truth.len());
    }
}

/// One of these.
fn pick<'a, T>(random: &mut Random, all: &'a [T]) -> &'a T {
    let index = random.below(all.len() as u64);
    &all[usize::try_from(index).expect("it is below the length")]
}

/// Random blocks of random trees, alone and several.
#[test]
fn without_random_blocks_we_get_what_restore_gets() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    for (mkfs, devices) in [("", 1), ("-m raid1 -d raid0", 2)] {
        let volume = Judged::make(&judges, mkfs, devices);
        for round in 0..6 {
            let mut blocks = Vec::new();
            for _ in 0..=random.below(4) {
                let tree = *pick(&mut random, &["fs", "fs", "256", "csum", "extent", "root"]);
                blocks.push(*pick(&mut random, &volume.blocks[tree]));
            }
            let damaged = volume.without(&judges, &blocks);
            volume.judge(&format!("{mkfs} {round}: {blocks:?}"), &damaged);
        }
    }
}

/// Makes files, commits, and removes some of them and a subvolume.
fn fill_and_remove(root: &Path) {
    let sync = || offshoot_testkit::run::run("sync", &["-f".as_ref(), root.as_os_str()]);
    let mut random = Random::new(12);
    std::fs::create_dir(root.join("photos")).expect("a directory");
    for number in 0..4 {
        let path = root.join(format!("photos/photo-{number}.jpg"));
        std::fs::write(path, random.bytes(100_000)).expect("a file");
    }
    std::fs::write(root.join("note.txt"), b"a note").expect("a file");
    subvolumes::create(&root.join("subvolume"));
    std::fs::write(root.join("subvolume/inside"), random.bytes(5000)).expect("a file");
    sync();
    std::fs::remove_file(root.join("photos/photo-1.jpg")).expect("it goes");
    std::fs::remove_file(root.join("note.txt")).expect("it goes");
    std::fs::rename(root.join("photos/photo-2.jpg"), root.join("renamed.jpg")).expect("it moves");
    sync();
    let subvolume = root.join("subvolume");
    let words = ["subvolume".as_ref(), "delete".as_ref(), subvolume.as_os_str()];
    offshoot_testkit::run::run("btrfs", &words);
}

/// Files that only older roots show come back with their data, and renamed ones do not count.
#[test]
fn deleted_files_come_back_from_older_roots() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(300).fill(fill_and_remove).make(&judges);
    let mut random = Random::new(12);
    let photos: Vec<_> = (0..4).map(|_| random.bytes(100_000)).collect();
    let inside = random.bytes(5000);
    let wanted = [
        ("photos/photo-1.jpg", photos[1].clone()),
        ("note.txt", b"a note".to_vec()),
        ("subvolume/inside", inside),
    ];
    let found = recover(&disks, &["--deleted"]);
    assert_eq!(found.output.status.code(), Some(0), "{:?}", found.output);
    // Each path begins with the generation of the root that shows it.
    let without_generation = |path: &PathBuf| path.components().skip(1).collect::<PathBuf>();
    let all: FilesByPath =
        found.files.iter().map(|(path, bytes)| (without_generation(path), bytes.clone())).collect();
    let expected: FilesByPath =
        wanted.iter().map(|(path, bytes)| (path.into(), bytes.clone())).collect();
    assert!(all == expected, "{:?} found", all.keys());
    let some = recover(&disks, &["--deleted=*.jpg"]);
    let paths: Vec<_> = some.files.keys().map(without_generation).collect();
    assert_eq!(paths, [PathBuf::from("photos/photo-1.jpg")]);
}

/// What was fsynced since the last commit is there when its log can be replayed, and the rest is
/// there in any case.
#[test]
fn a_pending_log_is_replayed_if_that_works() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().mib(300).fill(fill).make(&judges);
    let mount = disks.mount("rw,noatime");
    let path = mount.path().join("fsynced");
    std::fs::write(&path, b"only in the log").expect("a file");
    File::open(&path).and_then(|file| file.sync_all()).expect("it is fsynced");
    let crashed = disks.copy(&judges);
    drop(mount);
    let found = recover(&crashed, &[]);
    assert_eq!(found.output.status.code(), Some(0), "{:?}", found.output);
    let logged = Path::new("fsynced");
    assert_eq!(found.files.get(logged).map(Vec::as_slice), Some(&b"only in the log"[..]));
    let progs = Progs::of(&crashed);
    let places = progs.places(progs.blocks("extent")[0], NODE as u64);
    drop(progs);
    for place in places {
        wipe(&crashed.images()[0], place.physical, NODE);
    }
    let without = recover(&crashed, &[]);
    let said = String::from_utf8_lossy(&without.output.stderr).into_owned();
    assert!(said.contains("the last commit is shown"), "{said}");
    let mut expected = found.files;
    expected.remove(logged);
    assert!(without.files == expected, "{said}");
}
