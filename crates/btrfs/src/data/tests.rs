//! Random writes and truncations, judged by `btrfs check` and the kernel.

use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_device::FileDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut, NewFile, SetAttr, Timestamp};

use crate::{BtrfsVolume, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_000_000, nanos: 7 };

fn open(disks: &Disks) -> Arc<BtrfsVolume> {
    let device = FileDevice::open_writable(&disks.images()[0]).expect("nobody else has it");
    BtrfsVolume::open_writable(vec![Arc::new(device)], &EngineOptions::default()).expect("it opens")
}

/// A write or a change of length, applied to the file and to a model of it.
fn step(fs: &Filesystem, file: FileId, model: &mut Vec<u8>, random: &mut Random) {
    let place = |below: u64| usize::try_from(below).expect("small");
    if random.below(5) == 0 {
        let size = random.below(5 << 20);
        let set = SetAttr { size: Some(size), ..SetAttr::default() };
        fs.set_attr(file, &set, AT).expect("the length changes");
        model.resize(place(size), 0);
        return;
    }
    let offset = random.below(5 << 20);
    let len = [1, 100, 4096, 5000, 70_000, 1 << 20][place(random.below(6))];
    let len = place(1 + random.below(len));
    let data = random.bytes(len);
    fs.write(file, offset, &data, AT).expect("there is room");
    let end = place(offset) + data.len();
    model.resize(model.len().max(end), 0);
    model[place(offset)..end].copy_from_slice(&data);
}

fn verify(fs: &Filesystem, file: FileId, model: &[u8]) {
    assert_eq!(fs.attr(file).expect("attributes").size, model.len() as u64);
    let mut found = vec![1; model.len() + 1];
    assert_eq!(fs.read(file, 0, &mut found).expect("it reads"), model.len());
    assert!(found[..model.len()] == *model, "what is read is not what was written");
}

fn check(disks: &Disks) {
    let image = disks.images()[0].to_str().expect("a plain path").to_owned();
    run("btrfs", &["check", "--readonly", "--check-data-csum", &image]);
}

fn judge(mkfs: &[&str], mount: &str) {
    let Some(judges) = judges::require() else { return };
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("OFFSHOOT_SEED={seed}");
    let mut random = Random::new(seed);
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(mkfs);
    // The kernel writes the first contents of the files, with the extents that its options make. A
    // snapshot shares one file, and one is inline.
    let names = ["shared", "inline", "new"];
    let mut models = [random.text(2 << 20), random.text(700), Vec::new()];
    let kernel = disks.mount(mount);
    for (name, model) in names.iter().zip(&models).take(2) {
        std::fs::write(kernel.path().join(name), model).expect("a file");
    }
    let snapshot = kernel.path().join("before");
    run(
        "btrfs",
        &[
            "subvolume".as_ref(),
            "snapshot".as_ref(),
            kernel.path().as_os_str(),
            snapshot.as_os_str(),
        ],
    );
    let before = models[0].clone();
    drop(kernel);

    for round in 0..3 {
        let volume = open(&disks);
        let fs = volume.filesystem(TreeId::FS).expect("the top level");
        if round == 0 {
            let new = NewFile { permissions: 0o644, uid: 1, gid: 2, umask: None, at: AT };
            fs.create(EntryPlace { dir: fs.root(), name: b"new" }, &new).expect("a file");
        }
        for number in 0..50 {
            let which = usize::try_from(random.below(3)).expect("small");
            let file = fs.lookup(fs.root(), names[which].as_bytes()).expect("the file");
            step(&fs, file, &mut models[which], &mut random);
            verify(&fs, file, &models[which]);
            if number % 20 == 7 {
                fs.sync().expect("a commit");
            }
        }
        fs.sync().expect("a commit");
        drop((fs, volume));
        check(&disks);
        let kernel = disks.mount(mount);
        for (name, model) in names.iter().zip(&mut models) {
            let path = kernel.path().join(name);
            let mut bytes = std::fs::read(&path).expect("it reads");
            assert!(bytes == *model, "the kernel shows something else in {name}");
            // The kernel continues with the volume that we wrote.
            bytes.reverse();
            std::fs::write(&path, &bytes).expect("it writes");
            *model = bytes;
        }
        assert!(std::fs::read(snapshot_of(&kernel)).expect("it reads") == before);
        drop(kernel);
        check(&disks);
    }
}

fn snapshot_of(kernel: &offshoot_testkit::btrfs::disks::MountedMembers) -> std::path::PathBuf {
    kernel.path().join("before/shared")
}

#[test]
fn plain() {
    judge(&[], "rw,noatime");
}

#[test]
fn explicit_holes_and_old_references() {
    judge(&["-O", "^no-holes,^skinny-metadata", "-n", "4k", "--csum", "sha256"], "rw,noatime");
}

#[test]
fn over_files_that_are_not_copied_on_write() {
    judge(&[], "rw,noatime,nodatacow");
}

#[test]
fn over_compressed_extents() {
    judge(&["-O", "block-group-tree"], "rw,noatime,compress-force=zstd");
}

/// A file of thousands of extents is cut in several transactions.
#[test]
fn a_file_of_many_extents_is_cut() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&[]);
    let volume = open(&disks);
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    let new = NewFile { permissions: 0o600, uid: 0, gid: 0, umask: None, at: AT };
    let file = fs.create(EntryPlace { dir: fs.root(), name: b"many" }, &new).expect("a file");
    for number in 0..1500u64 {
        fs.write(file, number * 8192, &[1], AT).expect("there is room");
    }
    let set = SetAttr { size: Some(10_000), ..SetAttr::default() };
    fs.set_attr(file, &set, AT).expect("the length changes");
    assert_eq!(fs.attr(file).expect("attributes").allocated_bytes, 8192);
    fs.sync().expect("a commit");
    drop((fs, volume));
    check(&disks);
}
