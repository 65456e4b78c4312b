//! One of many threads on a full volume.
//!
//! The worker makes each change in the volume and then in the model, unless the volume has no room
//! for it. It makes files of every size, in a directory of its own and in the one that all workers
//! share, until the volume refuses something. Then it removes some. In a third directory, which it
//! shares with a few other workers, it is an [`Actor`].

use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_btrfs::Filesystem;
use offshoot_testkit::model::Model;
use offshoot_testkit::model::actor::Actor;
use offshoot_testkit::random::Random;
use offshoot_vfs::{
    EntryPlace, Errno, Fallocate, FileId, FileSystem, FileSystemMut, FileType, NewFile, Result,
    Timestamp,
};

use crate::watch::ThreadNotice;

/// The time of all changes: a directory's time then does not depend on which thread changed it
/// last.
pub(crate) const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };

/// A new file that belongs to root.
pub(crate) const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// The directory that all workers share.
pub(crate) const ALL: &str = "all";

/// How many actors share a directory. Half of their names have the same hash, and all names of one
/// hash have to fit into a leaf.
const ACTORS: u64 = 4;

/// The directory of the worker with this number.
pub(crate) fn own_dir(number: u64) -> String {
    format!("of-{number}")
}

/// The directory where this worker is an actor.
pub(crate) fn actors_dir(number: u64) -> String {
    format!("actors-{}", number / ACTORS)
}

/// The names of this worker begin with this.
pub(crate) fn prefix(number: u64) -> String {
    format!("{number}-")
}

/// The size of a sector, in bytes.
const SECTOR: u64 = 4096;

/// The size of one write: a write of this size at a multiple of it is done whole or not at all.
const PIECE: usize = 32 << 10;

/// Names end with a part of this.
const LONG_NAME: &str = "a name that is as long as names of files often are";

/// The volume, and the model of what the volume acknowledged.
pub(crate) struct VolumeAndModel<'a> {
    pub(crate) fs: &'a Filesystem,
    pub(crate) model: &'a Model,
}

/// What all workers count together.
#[derive(Debug, Default)]
pub(crate) struct WorkerCounts {
    /// Calls that changed something.
    pub(crate) done: AtomicU64,
    /// Calls that were refused for want of space.
    pub(crate) refused: AtomicU64,
}

impl WorkerCounts {
    fn count(&self, is_done: bool) {
        let count = if is_done { &self.done } else { &self.refused };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

impl VolumeAndModel<'_> {
    /// The directory at the root with this name, in the volume and in the model.
    pub(crate) fn dir(&self, name: &str) -> [FileId; 2] {
        self.sides().map(|fs| fs.lookup(fs.root(), name.as_bytes()).expect("it was made"))
    }

    fn sides(&self) -> [&dyn FileSystemMut; 2] {
        [self.fs, self.model]
    }

    /// Makes the same call on both, which must succeed.
    pub(crate) fn must<T>(
        &self,
        what: &str,
        dir: [FileId; 2],
        call: impl Fn(&dyn FileSystemMut, FileId) -> Result<T>,
    ) -> [T; 2] {
        let [fs, model] = self.sides();
        [(fs, dir[0]), (model, dir[1])]
            .map(|(fs, dir)| call(fs, dir).unwrap_or_else(|e| panic!("{what}: {e}")))
    }

    /// The names in a directory of the model, with their file types.
    fn names(&self, dir: FileId) -> Vec<(Vec<u8>, FileType)> {
        let mut names = Vec::new();
        let visited = self.model.read_dir(dir, 0, &mut |entry| {
            names.push((entry.name.to_vec(), entry.file_type));
            std::ops::ControlFlow::Continue(())
        });
        visited.expect("the model reads");
        names
    }

    /// Removes the chosen entries of a directory, with all that is below. The volume must refuse
    /// none of that.
    pub(crate) fn remove_all(
        &self,
        dir: [FileId; 2],
        post: &ThreadNotice,
        chosen: &dyn Fn(&[u8]) -> bool,
    ) {
        for (name, file_type) in self.names(dir[1]) {
            if !chosen(&name) {
                continue;
            }
            let place = |dir| EntryPlace { dir, name: &name };
            if file_type == FileType::Directory {
                let below = self.must("lookup", dir, |fs, dir| fs.lookup(dir, &name));
                self.remove_all(below, post, &|_| true);
                post.begin("rmdir at the end");
                self.must("rmdir", dir, |fs, dir| fs.rmdir(place(dir), AT));
            } else {
                post.begin("unlink at the end");
                self.must("unlink", dir, |fs, dir| fs.unlink(place(dir), AT));
            }
        }
    }
}

/// A name: which of the worker's directories, and the name in it.
type WorkerName = (usize, Vec<u8>);

/// The volume or the model, with the directories of a worker.
struct WorkerSide<'a> {
    fs: &'a dyn FileSystemMut,
    dirs: [FileId; 2],
}

impl WorkerSide<'_> {
    fn place<'n>(&self, (dir, name): &'n WorkerName) -> EntryPlace<'n> {
        EntryPlace { dir: self.dirs[*dir], name }
    }

    fn find(&self, (dir, name): &WorkerName) -> Result<FileId> {
        self.fs.lookup(self.dirs[*dir], name)
    }
}

/// One of the threads.
pub(crate) struct EnospcWorker<'a> {
    both: &'a VolumeAndModel<'a>,
    number: u64,
    post: &'a ThreadNotice,
    tally: &'a WorkerCounts,
    seed: u64,
    random: Random,
    /// Its own directory, and the one that all workers share.
    dirs: [[FileId; 2]; 2],
    /// The names in them, as [`WorkerName`] says. The ones that it found at the start come first.
    names: Vec<WorkerName>,
    /// How many of these names, the first ones, it leaves alone.
    kept: usize,
    made: u64,
}

impl<'a> EnospcWorker<'a> {
    pub(crate) fn new(
        both: &'a VolumeAndModel<'a>,
        number: u64,
        seed: u64,
        post: &'a ThreadNotice,
        tally: &'a WorkerCounts,
    ) -> Self {
        let dirs = [own_dir(number), ALL.to_owned()].map(|dir| both.dir(&dir));
        let names =
            |dir: usize| both.names(dirs[dir][1]).into_iter().map(move |(name, _)| (dir, name));
        let is_own = |(_, name): &WorkerName| name.starts_with(prefix(number).as_bytes());
        let names = names(0).chain(names(1)).filter(is_own).collect();
        let random = Random::new(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { both, number, post, tally, seed, random, dirs, names, kept: 0, made: 0 }
    }

    /// Works until `is_over`, which gets the number of steps since the volume first refused
    /// something.
    pub(crate) fn work(&mut self, is_over: impl Fn(u64) -> bool) {
        let (both, post, seed) = (self.both, self.post, self.random.number());
        let tell = |call| post.begin(call);
        let mut actor = Actor::new(both.fs, both.model, self.number, seed, AT)
            .within(actors_dir(self.number).as_bytes())
            .where_space_is_short()
            .telling(&tell);
        let mut steps = 0;
        while !is_over(steps) {
            steps += u64::from(self.tally.refused.load(Ordering::Relaxed) > 0);
            if self.random.below(8) == 0 {
                actor.act(4);
            } else {
                self.step();
            }
        }
    }

    /// Works until `is_over` on files that it makes from now on. It does not change older files.
    pub(crate) fn add(&mut self, is_over: impl Fn(u64) -> bool) {
        self.kept = self.names.len();
        for _ in (0..).take_while(|&step| !is_over(step)) {
            self.step();
        }
    }

    fn step(&mut self) {
        let is_done = match self.random.below(13) {
            0 => self.rename(),
            1 => self.link(),
            2 => self.overwrite(),
            3 => self.allocate(),
            4 => {
                self.remove(1);
                Some(())
            }
            _ => self.make(),
        };
        if is_done.is_none() {
            // A number of files that makes room for a few more.
            let count = self.random.below(6);
            self.remove(count);
        }
    }

    /// Makes the same call on both, unless the volume has no room.
    fn change(
        &self,
        what: &'static str,
        call: impl Fn(&WorkerSide<'_>) -> Result<()>,
    ) -> Option<()> {
        let [ours, model] = [0, 1].map(|side| WorkerSide {
            fs: self.both.sides()[side],
            dirs: self.dirs.map(|dir| dir[side]),
        });
        self.post.begin(what);
        let result = call(&ours);
        self.tally.count(result.is_ok());
        match result {
            Ok(()) => {}
            Err(error) if error.errno() == Errno::NOSPC => return None,
            Err(error) => panic!("{what} by {}: {error}", self.number),
        }
        call(&model).unwrap_or_else(|e| panic!("{what} in the model: {e}"));
        Some(())
    }

    /// A name that never existed before.
    fn new_name(&mut self) -> WorkerName {
        self.made += 1;
        let dir = usize::from(self.random.below(3) == 0);
        let len = usize::try_from(self.random.below(40)).expect("small");
        let unique = self.seed.wrapping_add(self.made);
        let name = format!("{}{unique:x}-{:.len$}", prefix(self.number), LONG_NAME);
        (dir, name.into_bytes())
    }

    /// One of the names that it may change.
    fn some_index(&mut self) -> Option<usize> {
        let count = self.names.len().checked_sub(self.kept).filter(|&count| count > 0)?;
        let index = self.random.below(count as u64);
        Some(self.kept + usize::try_from(index).expect("an index"))
    }

    /// Makes a file: empty, small enough for a leaf, of some sectors, or of many.
    fn make(&mut self) -> Option<()> {
        let name = self.new_name();
        self.change("create", |side| side.fs.create(side.place(&name), &NEW).map(drop))?;
        self.names.push(name.clone());
        let bound = [1, 2000, 20_000, 300_000][usize::try_from(self.random.below(4)).expect("few")];
        let len = usize::try_from(self.random.below(bound)).expect("small");
        self.write(&name, len)
    }

    fn overwrite(&mut self) -> Option<()> {
        let Some(index) = self.some_index() else { return Some(()) };
        let name = self.names[index].clone();
        let len = usize::try_from(self.random.below(50_000)).expect("small");
        self.write(&name, len)
    }

    /// Writes `len` bytes from the beginning.
    fn write(&mut self, name: &WorkerName, len: usize) -> Option<()> {
        let bytes = self.random.bytes(len);
        for (offset, piece) in (0..).step_by(PIECE).zip(bytes.chunks(PIECE)) {
            self.change("write", |side| side.fs.write(side.find(name)?, offset, piece, AT))?;
        }
        Some(())
    }

    /// Allocates, frees, zeroes or moves whole sectors of a file. A call that does not allocate
    /// covers one sector: a refused call may have changed a part of a longer range.
    fn allocate(&mut self) -> Option<()> {
        let Some(index) = self.some_index() else { return Some(()) };
        let name = self.names[index].clone();
        let keeps_size = self.random.below(2) == 0;
        let (what, most) = match self.random.below(6) {
            0..3 => (Fallocate::Allocate { keeps_size }, 32),
            // The call extends the file after it has zeroed the range, and the extension may be
            // refused.
            3 => (Fallocate::Zero { keeps_size: true }, 1),
            4 => (Fallocate::PunchHole, 1),
            _ if keeps_size => (Fallocate::Collapse, 1),
            _ => (Fallocate::Insert, 1),
        };
        let [offset, len] = [self.random.below(16), 1 + self.random.below(most)];
        let (offset, len) = (offset * SECTOR, len * SECTOR);
        self.change("fallocate", |side| {
            let file = side.find(&name)?;
            let moves = matches!(what, Fallocate::Collapse | Fallocate::Insert);
            if moves && side.fs.attr(file)?.size <= offset + len {
                return Ok(());
            }
            side.fs.fallocate(file, what, offset, len, AT)
        })
    }

    fn rename(&mut self) -> Option<()> {
        let Some(index) = self.some_index() else { return Some(()) };
        let (old, new) = (&self.names[index].clone(), self.new_name());
        self.change("rename", |side| side.fs.rename(side.place(old), side.place(&new), AT))?;
        self.names[index] = new;
        Some(())
    }

    fn link(&mut self) -> Option<()> {
        let Some(index) = self.some_index() else { return Some(()) };
        let (old, new) = (&self.names[index].clone(), self.new_name());
        self.change("link", |side| side.fs.link(side.find(old)?, side.place(&new), AT))?;
        self.names.push(new);
        Some(())
    }

    /// Removes `count` names. The volume must never refuse that.
    fn remove(&mut self, count: u64) {
        for _ in 0..count {
            let Some(index) = self.some_index() else { return };
            let name = self.names.swap_remove(index);
            self.change("unlink", |side| side.fs.unlink(side.place(&name), AT))
                .unwrap_or_else(|| panic!("a removal by {} was refused", self.number));
        }
    }
}
