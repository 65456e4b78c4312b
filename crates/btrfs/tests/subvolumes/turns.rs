//! The kernel and we change one volume by turns: each snapshots, changes and deletes what the other
//! side made.

use std::collections::BTreeMap;
use std::path::Path;

use offshoot_btrfs::Filesystem;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::common::{AT, NEW, at, judge, open, place, split, subvolume_at, top};

/// All subvolumes by their path from the top level, and whether each is read-only.
type SubvolumeFlags = BTreeMap<String, bool>;

/// The operations of a turn, which both sides can do.
trait TurnSide {
    fn create(&self, path: &str);
    fn snapshot(&self, from: &str, to: &str, is_read_only: bool);
    fn delete(&self, path: &str);
    /// Makes a file with data in a subvolume.
    fn write(&self, path: &str, len: usize);
}

struct KernelTurn<'a>(&'a Path);

impl TurnSide for KernelTurn<'_> {
    fn create(&self, path: &str) {
        fill::subvolumes::create(&self.0.join(path));
    }

    fn snapshot(&self, from: &str, to: &str, is_read_only: bool) {
        fill::subvolumes::snapshot(&self.0.join(from), &self.0.join(to), is_read_only);
    }

    fn delete(&self, path: &str) {
        let path = self.0.join(path);
        run("btrfs", &["subvolume".as_ref(), "delete".as_ref(), path.as_os_str()]);
    }

    fn write(&self, path: &str, len: usize) {
        std::fs::write(self.0.join(path), vec![b'k'; len]).expect("a file");
    }
}

struct OurTurn<'a>(&'a Filesystem);

impl TurnSide for OurTurn<'_> {
    fn create(&self, path: &str) {
        let (dir, name) = split(self.0, path);
        self.0.create_subvolume(place(dir, name), &NEW).expect("a subvolume");
    }

    fn snapshot(&self, from: &str, to: &str, is_read_only: bool) {
        let (dir, name) = split(self.0, to);
        let source = subvolume_at(self.0, from);
        self.0.snapshot(source, place(dir, name), is_read_only, AT).expect("a snapshot");
    }

    fn delete(&self, path: &str) {
        let (dir, name) = split(self.0, path);
        self.0.delete_subvolume(place(dir, name), AT).expect("it is there");
    }

    fn write(&self, path: &str, len: usize) {
        let (dir, name) = split(self.0, path);
        if self.0.lookup(dir, name.as_bytes()).is_err() {
            self.0.create(place(dir, name), &NEW).expect("a file");
        }
        self.0.write(at(self.0, path), 0, &vec![b'o'; len], AT).expect("there is room");
    }
}

/// One of the subvolumes for which `fits` is true, or the top level.
fn one(all: &SubvolumeFlags, random: &mut Random, fits: impl Fn(&str, bool) -> bool) -> String {
    let fitting: Vec<_> = all.iter().filter(|(path, ro)| fits(path, **ro)).collect();
    let index = usize::try_from(random.below(fitting.len() as u64 + 1)).expect("small");
    fitting.get(index).map_or(String::new(), |(path, _)| (*path).clone())
}

fn joined(dir: &str, name: &str) -> String {
    if dir.is_empty() { name.to_owned() } else { format!("{dir}/{name}") }
}

fn turn(side: &dyn TurnSide, all: &mut SubvolumeFlags, random: &mut Random, round: u64) {
    for step in 0..12 {
        let inside = one(all, random, |_, ro| !ro);
        let new = joined(&inside, &format!("{round}-{step}"));
        match random.below(10) {
            0..2 => {
                side.create(&new);
                all.insert(new, false);
            }
            2..5 => {
                let from = one(all, random, |_, _| true);
                let is_read_only = random.below(2) == 0;
                side.snapshot(&from, &new, is_read_only);
                all.insert(new, is_read_only);
            }
            5..7 => {
                let gone = one(all, random, |path, _| {
                    // It must hold no other subvolume, and must not be in a read-only one.
                    !all.keys().any(|other| other.starts_with(&format!("{path}/")))
                        && !all.iter().any(|(up, ro)| *ro && path.starts_with(&format!("{up}/")))
                });
                if !gone.is_empty() {
                    side.delete(&gone);
                    all.remove(&gone);
                }
            }
            _ => {
                let len = usize::try_from(random.below(50_000)).expect("small");
                for number in 0..40 {
                    side.write(&joined(&inside, &format!("file-{number}")), len / (number + 1));
                }
            }
        }
    }
}

fn play(mkfs: &[&str], rounds: u64) {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs_and_settle(mkfs);
    let mut all = SubvolumeFlags::new();
    for round in 0..rounds {
        let volume = open(&disks);
        let fs = top(&volume);
        turn(&OurTurn(&fs), &mut all, &mut random, 2 * round);
        if random.below(2) == 0 {
            volume.drop_deleted().expect("everything reads");
        }
        fs.sync().expect("a commit");
        drop((fs, volume));
        judge(&disks, 1);
        let mount = disks.mount_watched("rw,noatime", &[]);
        turn(&KernelTurn(mount.path()), &mut all, &mut random, 2 * round + 1);
        mount.sync();
        drop(mount);
        judge(&disks, 1);
    }
}

#[test]
fn in_turns() {
    play(&[], 3);
}

#[test]
fn in_turns_with_small_nodes() {
    play(&["-n", "4k", "-O", "^skinny-metadata,^no-holes"], 3);
}
