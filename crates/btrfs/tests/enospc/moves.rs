//! Subvolumes that move on a nearly full volume. Each move is done whole or refused whole. It is
//! refused only where less is free than it may take.
//!
//! Links fill metadata, and are removed a few at a time to make room. So the volume refuses some
//! moves and does others, at every amount of free space in between.

use std::collections::VecDeque;

use offshoot_btrfs::{EngineOptions, Filesystem, SubvolumeId};
use offshoot_device::MemoryDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::progs;
use offshoot_vfs::{EntryPlace, Errno, FileId, FileSystem, FileSystemMut, Rename};

use crate::quiet::{assert_no_chunk_is_left, metadata, room};
use crate::shapes::{device, is_accepted};
use crate::worker::{AT, NEW};
use crate::{MIB, open};

/// How many names fill a few leaves, so that two directories do not share a leaf.
const FILES: u64 = 300;

/// The target of the links that fill metadata, and how many of these links fill a leaf.
const TARGET: [u8; 3000] = [b'x'; 3000];
const LINKS_OF_A_LEAF: usize = 5;

/// More than the worst case of what an exchange changes, with nodes of 16 KiB and trees of three
/// levels, and the same where snapshots share blocks.
const MOVE_BYTES: u64 = 4 << 20;
const SHARED_MOVE_BYTES: u64 = 12 << 20;

/// The place of a subvolume: a directory and a name.
#[derive(Clone, Debug)]
struct NamedSubvolume {
    dir: FileId,
    name: String,
}

impl NamedSubvolume {
    fn place(&self) -> EntryPlace<'_> {
        EntryPlace { dir: self.dir, name: self.name.as_bytes() }
    }
}

fn long(what: &str, number: u64) -> String {
    format!("{what}-{number}-{}", "n".repeat(200))
}

/// What takes and makes room: links in a directory of their own, and snapshots.
struct RoomTaker<'a> {
    fs: &'a Filesystem,
    dir: FileId,
    count: u64,
    snapshots: VecDeque<String>,
}

impl RoomTaker<'_> {
    fn fill(&mut self) {
        loop {
            let name = self.count.to_string();
            let place = EntryPlace { dir: self.dir, name: name.as_bytes() };
            if !is_accepted(self.fs.symlink(place, &TARGET, &NEW)) {
                return;
            }
            self.count += 1;
        }
    }

    /// Removes as many links as fill a leaf. The volume may refuse this where snapshots keep the
    /// blocks that it copies. It never refuses to delete one of the snapshots.
    fn make_room(&mut self) {
        for _ in 0..LINKS_OF_A_LEAF {
            let last = self.count.checked_sub(1).expect("moves are done before all links are gone");
            let name = last.to_string();
            let place = EntryPlace { dir: self.dir, name: name.as_bytes() };
            if !is_accepted(self.fs.unlink(place, AT)) {
                return self.delete_snapshot();
            }
            self.count = last;
        }
    }

    fn delete_snapshot(&mut self) {
        let name = self.snapshots.pop_front().expect("only beside a snapshot a removal is refused");
        let place = EntryPlace { dir: self.fs.root(), name: name.as_bytes() };
        self.fs.delete_subvolume(place, AT).expect("it makes room");
        self.fs.volume().drop_deleted().expect("it makes room");
    }
}

/// Two subvolumes that move.
struct MovedPair<'a> {
    fs: &'a Filesystem,
    /// Two directories in each of three subvolumes.
    dirs: Vec<FileId>,
    subvolumes: [(SubvolumeId, NamedSubvolume); 2],
    tries: u64,
}

impl MovedPair<'_> {
    /// Moves a subvolume in one of several ways. Returns whether it was done.
    fn try_one(&mut self) -> bool {
        self.tries += 1;
        let (fs, tries) = (self.fs, self.tries);
        let which = usize::from(tries.is_multiple_of(3));
        let to_dir = self.dirs[usize::try_from(tries * 7 / 2).expect("small") % self.dirs.len()];
        let to = NamedSubvolume { dir: to_dir, name: long("moved", tries) };
        let from = self.subvolumes[which].1.clone();
        let is_done = match tries % 4 {
            0 => {
                let other = self.subvolumes[1 - which].1.clone();
                let done = fs.rename_with(from.place(), other.place(), Rename::Exchange, AT);
                let is_done = is_accepted(done);
                if is_done {
                    let [one, two] = &mut self.subvolumes;
                    std::mem::swap(&mut one.1, &mut two.1);
                }
                self.assert_places();
                return is_done;
            }
            1 => {
                // Onto an empty directory, if there is room for one.
                let is_made = is_accepted(fs.mkdir(to.place(), &NEW));
                let is_done = is_accepted(fs.rename(from.place(), to.place(), AT));
                if is_made && !is_done {
                    fs.rmdir(to.place(), AT).expect("it is as empty as it was");
                }
                is_done
            }
            _ => is_accepted(fs.rename_with(from.place(), to.place(), Rename::NoReplace, AT)),
        };
        if is_done {
            self.subvolumes[which].1 = to.clone();
        }
        let gone = if is_done { from } else { to };
        let found = fs.lookup(gone.dir, gone.name.as_bytes()).map_err(|error| error.errno());
        assert_eq!(found, Err(Errno::NOENT), "{gone:?}");
        self.assert_places();
        is_done
    }

    /// Requires that each subvolume is where it was last moved to.
    fn assert_places(&self) {
        for (id, NamedSubvolume { dir, name }) in &self.subvolumes {
            let found = self.fs.lookup(*dir, name.as_bytes()).expect("it is there");
            assert_eq!(found, FileId { dev: id.0, ino: 256 });
        }
    }
}

/// Three subvolumes, with two directories full of names in each of them, and two subvolumes in
/// these directories.
fn set_up(fs: &Filesystem) -> ([FileId; 3], MovedPair<'_>) {
    let subvolume = |dir, name: &str| {
        fs.create_subvolume(EntryPlace { dir, name: name.as_bytes() }, &NEW).expect("there is room")
    };
    let [one, other] =
        ["one", "other"].map(|name| FileId { dev: subvolume(fs.root(), name).0, ino: 256 });
    let holders = [fs.root(), one, other];
    let mut dirs = Vec::new();
    for (holder, name) in holders.iter().flat_map(|&holder| [(holder, "d"), (holder, "e")]) {
        let dir = fs.mkdir(EntryPlace { dir: holder, name: name.as_bytes() }, &NEW);
        let dir = dir.expect("there is room");
        for number in 0..FILES {
            let name = long("file", number);
            fs.create(EntryPlace { dir, name: name.as_bytes() }, &NEW).expect("there is room");
        }
        dirs.push(dir);
    }
    let subvolumes = [0, 3].map(|number: usize| {
        let at = NamedSubvolume { dir: dirs[number], name: long("subvolume", 0) };
        (subvolume(at.dir, &at.name), at)
    });
    (holders, MovedPair { fs, dirs, subvolumes, tries: 0 })
}

fn moves(has_snapshots: bool) {
    /// How many times the test fills all room again.
    const ROUNDS: u64 = 12;
    let Some(device) = device(&["-m", "single"]) else { return };
    let quiet = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let fs = open(&device, &quiet);
    let (holders, mut moved) = set_up(&fs);
    let dir = fs.mkdir(EntryPlace { dir: fs.root(), name: b"links" }, &NEW).expect("there is room");
    let mut links = RoomTaker { fs: &fs, dir, count: 0, snapshots: VecDeque::new() };
    links.fill();
    fs.sync().expect("a commit");
    assert_no_chunk_is_left(&fs);
    let most = if has_snapshots { SHARED_MOVE_BYTES } else { MOVE_BYTES };
    let (mut refused, mut done, mut most_refused) = (0, 0, 0);
    for round in 0..ROUNDS {
        // From now on a move has to copy what is shared, and the snapshots keep the old blocks.
        for (number, holder) in holders[1..].iter().enumerate().filter(|_| has_snapshots) {
            let (source, name) = (SubvolumeId { 0: holder.dev }, format!("{round}-{number}"));
            let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
            while !is_accepted(fs.snapshot(source, place, true, AT)) {
                links.make_room();
            }
            links.snapshots.push_back(name);
        }
        links.fill();
        fs.sync().expect("a commit");
        while !moved.try_one() {
            refused += 1;
            fs.sync().expect("what was refused leaves nothing behind");
            let left = metadata(&fs);
            most_refused = room(&left).max(most_refused);
            assert!(room(&left) < most && left.unknown_bytes == 0, "refused with {left:#?}");
            links.make_room();
        }
        // Where snapshots keep what moves copy, more moves use up the remaining room.
        done += 1 + (0..20).filter(|_| moved.try_one()).count();
        fs.sync().expect("there is room for what was done");
    }
    println!("{done} moves, {refused} refused, with {most_refused} bytes at most");
    assert!(refused > ROUNDS / 2 && done > 12, "{refused} refused, {done} done");
    let places = moved.subvolumes.map(|(id, at)| {
        let path = fs.volume().subvolume(id).and_then(|one| one.path).expect("it has a path");
        assert!(path.ends_with(at.name.as_bytes()), "{}", path.escape_ascii());
        (id, path)
    });
    drop(fs);
    judge(&device, &places);
}

/// Requires that the kernel sees the subvolumes where we see them, and that the volume is sound.
fn judge(device: &MemoryDevice, places: &[(SubvolumeId, Vec<u8>)]) {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, MIB);
    disks.fill(&[device]).expect("a copy of the volume");
    disks.assert_checks();
    let mount = disks.mount("ro,noatime,subvolid=5");
    let listed = progs::subvolumes(mount.path());
    for (id, path) in places {
        let one = listed.iter().find(|one| one.id == id.0).expect("it is listed");
        assert_eq!(one.path.as_bytes(), path);
    }
}

#[test]
fn subvolumes_move_whole_or_not_at_all() {
    moves(false);
}

#[test]
fn subvolumes_move_beside_snapshots_whole_or_not_at_all() {
    moves(true);
}
