//! Files of every kind that the kernel makes. We change each in every way, and the kernel changes
//! it again.
//!
//! The kernel makes a file for each of many pairs of a kind and a change, and a snapshot that
//! shares all of them. We do the change, and the model says what the file must hold. Then the
//! kernel does to the file what makes the next kind, and we do the next change, for some rounds. In
//! each round both sides also make a snapshot and delete the other side's last one. Either side
//! drops what the deleted one holds. The first snapshot of each side stays, and must not change.

mod changes;
mod kinds;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::File;
use std::path::Path;

use offshoot_btrfs::Filesystem;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::model::Model;
use offshoot_testkit::model::subvolumes::SubvolumeCalls;
use offshoot_testkit::random::is_in_run;
use offshoot_testkit::run::run;
use offshoot_vfs::{EntryPlace, FileId, FileSystemMut};

use crate::rounds::{assert_kernel_shows, assert_shows};
use crate::subvolume_calls::OurSubvolumes;
use crate::volume::{self, PingpongLayout, VolumeMaker, open, open_read_only};
use changes::{CHANGES, ChangedFile, at, make_in};
use kinds::{DIRS, KINDS};

const KIB: u64 = 1 << 10;

/// The attribute that holds a file's compression.
const PROPERTY: &str = "btrfs.compression";

/// An access control list that gives one user more than others, as the kernel stores it.
fn access_list() -> Vec<u8> {
    let entry = |tag: u16, may: u16, id: u32| {
        [&tag.to_le_bytes()[..], &may.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let none = u32::MAX;
    let of_all = [(1, 6, none), (2, 7, 1000), (4, 4, none), (16, 7, none), (32, 4, none)];
    let entries = of_all.map(|(tag, may, id)| entry(tag, may, id)).concat();
    [&2u32.to_le_bytes()[..], &entries].concat()
}

/// A file, with the number of the kind that the kernel makes it as, and of the change that we do
/// first.
struct KindAndChange {
    name: String,
    kind: usize,
    change: usize,
}

/// Every third pair of a kind and a change. Three volumes that start at different pairs have all
/// pairs. On each volume every kind meets every change in three rounds.
fn pairs(third: usize) -> Vec<KindAndChange> {
    let all =
        (0..KINDS.len()).flat_map(|kind| (0..CHANGES.len()).map(move |change| (kind, change)));
    all.filter(|(kind, change)| (kind + change) % 3 == third % 3)
        .map(|(kind, change)| {
            let name = format!("{}-{}", KINDS[kind].name, CHANGES[change].0);
            KindAndChange { name, kind, change }
        })
        .collect()
}

fn subvolume(words: &[&str], paths: &[&Path]) {
    let words = ["-q", "subvolume"].iter().chain(words).map(OsStr::new);
    run("btrfs", &words.chain(paths.iter().map(|path| path.as_os_str())).collect::<Vec<_>>());
}

/// Has the kernel make all files, a file for exchanges, a file to clone from, and a snapshot of
/// them.
fn make(path: &Path, pairs: &[KindAndChange]) {
    let live = path.join("live");
    subvolume(&["create"], &[&live]);
    for (name, prepare) in DIRS {
        let dir = live.join(name);
        std::fs::create_dir(&dir).expect("a new directory");
        prepare(&dir);
    }
    for KindAndChange { name, kind, .. } in pairs {
        let kind = &KINDS[*kind];
        let (born, place) = (live.join(kind.dir).join(name), live.join(name));
        (kind.make)(&born, &File::create_new(&born).expect("a new file"));
        if kind.dir != "." {
            std::fs::rename(&born, &place).expect("a rename");
        }
    }
    for (name, len) in [("partner", 10_000), ("source", 200_000)] {
        std::fs::write(live.join(name), kinds::bytes(len)).expect("a new file");
    }
    for name in ["of-the-kernel", "theirs-0"] {
        subvolume(&["snapshot"], &[&live, &path.join(name)]);
    }
}

/// The names of the files of `live` without checksums.
fn names_without_checksums(fs: &Filesystem, pairs: &[KindAndChange]) -> HashSet<String> {
    let (files, live) = (volume::without_checksums(fs.volume()), live_of(fs));
    let names = pairs.iter().map(|pair| pair.name.clone()).chain(["source".into()]);
    names.filter(|name| files.contains(&find(fs, live, name))).collect()
}

fn find(fs: &dyn FileSystemMut, dir: FileId, name: &str) -> FileId {
    fs.lookup(dir, name.as_bytes()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn live_of(fs: &dyn FileSystemMut) -> FileId {
    find(fs, fs.root(), "live")
}

/// Does to every file the change `round` places after its own, and makes a file in each directory
/// that new files inherit from. Makes a snapshot, and deletes one of the kernel's; every second
/// time it drops that to the end. `unsummed` are the files without checksums.
fn change(
    fs: &dyn FileSystemMut,
    subvolumes: &dyn SubvolumeCalls,
    is_model: bool,
    pairs: &[KindAndChange],
    unsummed: &HashSet<String>,
    round: usize,
) {
    let live = live_of(fs);
    let source = (find(fs, live, "source"), !unsummed.contains("source"));
    for KindAndChange { name, change, .. } in pairs {
        let file = find(fs, live, name);
        let size = fs.attr(file).expect("its attributes").size;
        let place = EntryPlace { dir: live, name: name.as_bytes() };
        let has_checksums = !unsummed.contains(name);
        let target = ChangedFile { fs, is_model, place, file, size, has_checksums, source };
        target.unlock();
        (CHANGES[(change + round) % CHANGES.len()].1)(&target);
    }
    for (dir, _) in DIRS {
        make_in(fs, is_model, find(fs, live, dir), &format!("ours-{round}"));
    }
    let snapshot = |name: &str, is_read_only| {
        let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
        subvolumes.snapshot(live, place, is_read_only, at()).expect("a snapshot");
    };
    if round == 0 {
        snapshot("of-ours", true);
    }
    snapshot(&format!("ours-{round}"), round == 1);
    let theirs = format!("theirs-{round}");
    let place = EntryPlace { dir: fs.root(), name: theirs.as_bytes() };
    subvolumes.delete_subvolume(place, at()).expect("it is deleted");
    if round % 2 == 1 {
        subvolumes.drop_deleted().expect("everything reads");
    }
}

/// The kernel does to every file what makes the kind `round + 1` places after its own. It makes a
/// snapshot, and deletes one of ours; every second time it waits until that is dropped.
fn change_by_kernel(path: &Path, pairs: &[KindAndChange], round: usize) {
    let (live, ours) = (path.join("live"), path.join(format!("ours-{round}")));
    for KindAndChange { name, kind, .. } in pairs {
        let kind = &KINDS[(kind + round + 1) % KINDS.len()];
        let place = live.join(name);
        kinds::unlock(&place);
        let file = File::options().read(true).write(true).open(&place);
        (kind.make)(&place, &file.expect("it is there"));
    }
    subvolume(&["snapshot"], &[&live, &path.join(format!("theirs-{}", round + 1))]);
    subvolume(&["delete"], &[&ours]);
    if round.is_multiple_of(2) {
        // The sync wakes the kernel's cleaner, which otherwise sleeps for half a minute.
        run("btrfs", &["filesystem".as_ref(), "sync".as_ref(), path.as_os_str()]);
        subvolume(&["sync"], &[path]);
    }
}

fn play(third: usize, devices: usize, options: &'static str, maker: VolumeMaker, mount: &str) {
    const ROUNDS: usize = 2;
    let Some(judges) = judges::require() else { return };
    if !is_in_run(&format!("kept {devices} {options} {mount}")) {
        return;
    }
    let layout = PingpongLayout { devices, mib: 512, options };
    let disks = layout.make(&judges, maker);
    let mount = format!("rw,noatime,{mount}");
    let pairs = pairs(third);
    make(disks.mount_watched(&mount, &layout.expected(maker == VolumeMaker::Progs)).path(), &pairs);
    for round in 0..ROUNDS {
        let model = shown(&disks);
        let fs = open(&disks, [None, Some("lzo")][round]);
        let unsummed = names_without_checksums(&fs, &pairs);
        change(&fs, &OurSubvolumes::new(fs.clone()), false, &pairs, &unsummed, round);
        change(&model, &model, true, &pairs, &unsummed, round);
        assert_shows(&fs, &model);
        fs.sync().expect("a commit");
        drop(fs);
        verdict(&disks, &model);
        let kernel = disks.mount_watched(&mount, &layout.expected(false));
        change_by_kernel(kernel.path(), &pairs, round);
        drop(kernel);
        disks.assert_checks();
        assert_shows(&open_read_only(&disks), &shown(&disks));
    }
    // Everything that was deleted is dropped, and what stays is sound.
    let (model, fs) = (shown(&disks), open(&disks, None));
    OurSubvolumes::new(fs.clone()).drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    drop(fs);
    verdict(&disks, &model);
}

/// The contents of the volume as the kernel shows them.
fn shown(disks: &Disks) -> Model {
    let mount = disks.mount("ro,noatime");
    let host = HostFilesystem::new(mount.path()).expect("the mounted directory opens");
    Model::copy(&host).expect("the kernel shows its own volume")
}

fn verdict(disks: &Disks, model: &Model) {
    disks.assert_checks();
    assert_shows(&open_read_only(disks), model);
    assert_kernel_shows(disks.mount("ro,noatime").path(), model);
}

#[test]
fn defaults() {
    play(0, 1, "", VolumeMaker::Progs, "compress=zstd,max_inline=4095");
}

#[test]
fn block_group_tree_lzo() {
    play(1, 1, "-O block-group-tree", VolumeMaker::Ours, "compress=lzo");
}

#[test]
fn explicit_holes_small_nodes() {
    let options = "-n 4096 -O ^block-group-tree,^no-holes";
    play(2, 1, options, VolumeMaker::Ours, "compress=zlib,max_inline=2000");
}

#[test]
fn old_references_mixed() {
    let options = "-n 4096 -d single -m single -O mixed-bg,^no-holes,^skinny-metadata,^extref";
    play(0, 1, options, VolumeMaker::Progs, "compress=zlib");
}

#[test]
fn without_checksums() {
    play(1, 1, "", VolumeMaker::Ours, "nodatasum");
}

#[test]
fn without_cow() {
    play(2, 1, "--csum xxhash", VolumeMaker::Progs, "nodatacow");
}

#[test]
fn two_copies_all_compressed() {
    play(0, 1, "-d dup -m dup --csum sha256", VolumeMaker::Progs, "compress-force=zstd:3");
}

#[test]
fn two_members_large_nodes() {
    let options = "-d raid1 -m raid1 -n 65536 --csum blake2";
    play(1, 2, options, VolumeMaker::Progs, "compress-force=lzo,max_inline=0");
}

#[test]
fn quotas() {
    play(0, 1, "-O quota", VolumeMaker::Progs, "compress=zstd");
}

/// A subvolume's quota counts the same, whichever side made, shared or released the space.
#[test]
fn simple_quotas_small_nodes() {
    play(1, 1, "-n 4096 -O squota", VolumeMaker::Progs, "compress=lzo");
}

/// The kernel keeps free space in files. We do not trust these, and leave them invalid.
#[test]
fn free_space_in_files() {
    let options = "-O ^block-group-tree,^free-space-tree";
    play(2, 1, options, VolumeMaker::Progs, "space_cache=v1,compress=zstd");
}
