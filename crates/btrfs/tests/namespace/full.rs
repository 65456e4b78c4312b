//! Full volumes.
//!
//! Threads write until there is no space. After a commit, everything that was accepted is there,
//! whatever was refused around it. Then all of it can be removed, and about as much can be written
//! again. The test repeats this in rounds. In some rounds it closes the volume between filling and
//! removing, and in some it keeps half of the files.

use std::ops::ControlFlow;

use offshoot_btrfs::Filesystem;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::{Aspect, Compare, compare};
use offshoot_testkit::model::Model;
use offshoot_testkit::model::actor::Actor;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{Errno, Error, FileId, FileSystem, FileSystemMut, XattrMode};

use crate::common::{AT, NEW, at, open_read_only, open_top, place};

/// The size of one write: a write of this size at a multiple of it is done whole or not at all.
const PIECE: usize = 64 << 10;

/// The most files of a thread: more than any volume here has room for.
const MOST_FILES: u64 = 1 << 20;

const ROUNDS: u64 = 3;

/// What fills the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FullFilling {
    /// Files of 4 MiB.
    Data,
    /// Empty files with an attribute.
    Metadata,
    /// Files of any size up to 100 KB, with an attribute.
    Both,
}

/// A file as it was accepted.
#[derive(Clone, Debug)]
struct AcceptedFile {
    name: String,
    len: usize,
    attribute: usize,
}

impl AcceptedFile {
    /// Bytes that only this file has.
    fn bytes(&self, len: usize) -> Vec<u8> {
        let seed = self.name.bytes().fold(0, |sum: u64, byte| sum * 31 + u64::from(byte));
        Random::new(seed).bytes(len)
    }
}

/// Fills the directory `dir` until there is no space.
struct Filler<'a> {
    fs: &'a Filesystem,
    dir: FileId,
    filling: FullFilling,
    random: Random,
    made: Vec<AcceptedFile>,
}

/// Whether it was done. The only error that it may give is a lack of space.
#[track_caller]
fn accepted<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(done) => Some(done),
        Err(error) if error.errno() == Errno::NOSPC => None,
        Err(error) => panic!("{error}"),
    }
}

impl Filler<'_> {
    fn fill(&mut self, round: u64) {
        let full = (0..MOST_FILES).any(|number| self.add(&format!("{round}-{number}")).is_none());
        assert!(full, "the volume has no end");
    }

    /// Adds a file; `None` when the volume refused a part of it.
    fn add(&mut self, name: &str) -> Option<()> {
        let (fs, random) = (self.fs, &mut self.random);
        let (len, attribute) = match self.filling {
            FullFilling::Data => (4 << 20, 0),
            FullFilling::Metadata => (0, 3000),
            FullFilling::Both => (random.below(100_000), random.below(1500)),
        };
        let file = accepted(fs.create(place(self.dir, name), &NEW))?;
        self.made.push(AcceptedFile { name: name.to_owned(), len: 0, attribute: 0 });
        let made = self.made.last_mut().expect("it was just added");
        let bytes = made.bytes(usize::try_from(len).expect("small"));
        for piece in bytes.chunks(PIECE) {
            accepted(fs.write(file, made.len as u64, piece, AT))?;
            made.len += piece.len();
        }
        let value = vec![7; usize::try_from(attribute).expect("small")];
        accepted(fs.set_xattr(file, b"user.filling", &value, XattrMode::Set, AT))?;
        made.attribute = value.len();
        Some(())
    }
}

/// Requires that the directory holds everything that was accepted, and nothing else.
fn verify(fs: &Filesystem, dir: &str, made: &[AcceptedFile]) {
    let dir = at(fs, dir);
    let mut names = 0;
    fs.read_dir(dir, 0, &mut |_| {
        names += 1;
        ControlFlow::Continue(())
    })
    .expect("the directory reads");
    assert_eq!(names, made.len(), "names");
    for made in made {
        let file = fs.lookup(dir, made.name.as_bytes()).expect("it was accepted");
        let mut found = vec![0; made.len + 1];
        let len = fs.read(file, 0, &mut found).expect("it reads");
        assert_eq!(len, made.len, "length of {}", made.name);
        assert!(found[..len] == made.bytes(len), "contents of {}", made.name);
        let value = fs.xattr(file, b"user.filling").map_or(0, |value| value.len());
        assert_eq!(value, made.attribute, "attribute of {}", made.name);
    }
}

/// Removes the files for which `is_kept` does not hold. The volume must refuse none of that.
fn remove(
    fs: &Filesystem,
    dir: &str,
    made: &mut Vec<AcceptedFile>,
    is_kept: impl Fn(usize) -> bool,
) {
    let dir = at(fs, dir);
    let mut index = 0;
    made.retain(|made| {
        index += 1;
        let keep = is_kept(index);
        if !keep {
            fs.unlink(place(dir, &made.name), AT)
                .unwrap_or_else(|error| panic!("{} stays: {error}", made.name));
        }
        keep
    });
}

/// Fills the volume with one thread for each list in `made`. Each list has the files of that
/// thread.
fn fill(
    fs: &Filesystem,
    filling: FullFilling,
    made: &mut [Vec<AcceptedFile>],
    round: u64,
    seed: u64,
) {
    std::thread::scope(|scope| {
        for (thread, made) in made.iter_mut().enumerate() {
            let random = Random::new(seed ^ (round << 32) ^ thread as u64);
            let dir = at(fs, &thread.to_string());
            let mut filler = Filler { fs, dir, filling, random, made: std::mem::take(made) };
            scope.spawn(move || {
                filler.fill(round);
                *made = filler.made;
            });
        }
    });
}

/// How much the volume holds: the bytes of data and attributes, and 300 bytes for each file.
fn weight(made: &[Vec<AcceptedFile>]) -> u64 {
    made.iter().flatten().map(|made| (made.len + made.attribute + 300) as u64).sum()
}

fn rounds(mib: u64, mkfs: &[&str], filling: FullFilling, threads: usize) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disks = Disks::create(&judges, 1, mib);
    disks.mkfs_and_settle(mkfs);
    let mut made = vec![Vec::new(); threads];
    let mut fs = open_top(&disks);
    for thread in 0..threads {
        fs.mkdir(place(fs.root(), &thread.to_string()), &NEW).expect("a directory");
    }
    let mut first = 0;
    for round in 0..ROUNDS {
        fill(&fs, filling, &mut made, round, seed);
        let full = weight(&made);
        eprintln!("round {round}: {full} bytes in {} files", made.iter().flatten().count());
        assert!(full > (mib << 20) / 4, "{full} bytes in a volume of {mib} MiB");
        first = first.max(full);
        // Data and metadata get chunks on demand, so what fits of both differs by a chunk.
        assert!(full > first / 4 * 3, "{full} bytes fit now, {first} did before");
        if round % 2 == 0 {
            fs.sync().expect("what was accepted can be stored");
            drop(fs);
            verdict(&disks, &made);
            fs = open_top(&disks);
        }
        // Runs of 64 files stay or go. If single files stayed, the space beside them in their
        // leaves could only take their neighbours.
        for (thread, made) in made.iter_mut().enumerate() {
            remove(&fs, &thread.to_string(), made, |index| round == 1 && index / 64 % 2 == 0);
        }
    }
    fs.sync().expect("a commit");
    drop(fs);
    verdict(&disks, &made);
}

/// Our reader, `btrfs check` and the kernel find what was accepted, and the kernel can write the
/// volume.
fn verdict(disks: &Disks, made: &[Vec<AcceptedFile>]) {
    disks.assert_checks();
    let fs = open_read_only(disks);
    for (thread, made) in made.iter().enumerate() {
        verify(&fs, &thread.to_string(), made);
    }
    compare(&fs, disks.mount("ro,noatime").path()).assert_same(made.len() as u64);
    drop(disks.mount_watched("rw,noatime", &[]));
    disks.assert_checks();
}

/// Actors work on a full volume. A refused operation has changed nothing, even if it consists of
/// several steps. Removals and commits are never refused.
fn act_on_full(mib: u64, mkfs: &[&str], filling: FullFilling) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disks = Disks::create(&judges, 1, mib);
    disks.mkfs_and_settle(mkfs);
    let fs = open_top(&disks);
    fs.mkdir(place(fs.root(), "0"), &NEW).expect("a directory");
    let mut made = [Vec::new()];
    for round in 0..3 {
        fill(&fs, filling, &mut made, round, seed);
        let model = Model::copy(&fs).expect("it reads");
        std::thread::scope(|scope| {
            for number in 0..4 {
                let actor = Actor::new(&fs, &model, number, seed ^ (round << 32), AT);
                let mut actor = actor.where_space_is_short();
                scope.spawn(move || actor.act(400));
            }
        });
        fs.sync().expect("what was accepted can be stored");
        disks.assert_checks();
        Compare::default()
            .without(Aspect::Ids)
            .without(Aspect::Order)
            .without(Aspect::Allocation)
            .run_filesystems(&open_read_only(&disks), &model)
            .assert_same(20);
        // This makes as much room as a few actors need in the next round.
        let half = made[0].len() / 4;
        remove(&fs, "0", &mut made[0], |index| index > half);
    }
}

/// The kernel removes all files from a volume that we filled: we leave enough free space for it.
fn kernel_empties(mib: u64, mkfs: &[&str], filling: FullFilling) {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, mib);
    disks.mkfs_and_settle(mkfs);
    let fs = open_top(&disks);
    fs.mkdir(place(fs.root(), "0"), &NEW).expect("a directory");
    let mut made = [Vec::new()];
    fill(&fs, filling, &mut made, 0, seed_of_run());
    fs.sync().expect("what was accepted can be stored");
    drop(fs);
    let mount = disks.mount_watched("rw,noatime", &[]);
    for made in &made[0] {
        std::fs::remove_file(mount.path().join("0").join(&made.name)).expect("it can be removed");
    }
    drop(mount);
    disks.assert_checks();
}

#[test]
fn the_kernel_empties_what_metadata_fills() {
    kernel_empties(128, &["-m", "single"], FullFilling::Metadata);
    kernel_empties(160, &["-m", "dup", "-n", "4k"], FullFilling::Metadata);
}

#[test]
fn the_kernel_empties_mixed_groups() {
    kernel_empties(96, &["--mixed"], FullFilling::Both);
}

#[test]
fn actors_where_data_fills() {
    act_on_full(128, &["-m", "single"], FullFilling::Data);
}

#[test]
fn actors_where_metadata_fills() {
    act_on_full(128, &["-m", "single", "-n", "4k", "-O", "^no-holes"], FullFilling::Metadata);
}

#[test]
fn actors_where_both_fill_mixed_groups() {
    act_on_full(96, &["--mixed"], FullFilling::Both);
}

/// Makes one test of each line: its name, MiB, options of mkfs, filling, threads.
macro_rules! full {
    ($($name:ident: $mib:expr, $mkfs:expr, $filling:ident, $threads:expr;)*) => {
        $(
            #[test]
            fn $name() {
                rounds($mib, &$mkfs, FullFilling::$filling, $threads);
            }
        )*
    };
}

full! {
    by_data: 160, ["-m", "single"], Data, 1;
    by_data_of_4_threads: 160, ["-m", "dup"], Data, 4;
    by_metadata: 128, ["-m", "single"], Metadata, 1;
    by_metadata_of_4_threads: 160, ["-m", "dup"], Metadata, 4;
    by_both: 160, ["-m", "dup", "-n", "4k"], Both, 1;
    by_both_of_4_threads: 160, ["-m", "single", "-O", "^no-holes"], Both, 4;
    mixed_by_data_of_4_threads: 128, ["--mixed"], Data, 4;
    mixed_by_metadata: 64, ["--mixed"], Metadata, 1;
    mixed_by_both_of_4_threads: 256, ["--mixed", "-d", "dup", "-m", "dup"], Both, 4;
}
