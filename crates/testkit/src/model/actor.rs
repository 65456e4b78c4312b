//! Random operations on a filesystem and on its model at the same time.
//!
//! An [`Actor`] makes one call after the other on both sides and compares the results. Several
//! actors work at the same time, on threads of their own, in one directory and all below it. An
//! actor makes and uses only names that begin with its own prefix, so the results of its calls do
//! not depend on the others, though they meet in the same directories, blocks and transactions. All
//! actors use one fixed time, so that even the times of shared directories do not depend on which
//! actor came last.

mod attributes;
mod data;
mod subvolumes;

use std::collections::HashSet;

use offshoot_vfs::{
    EntryPlace, Errno, FileFlags, FileId, FileSystem, FileSystemMut, FileType, NewFile, NewNode,
    Rename, Result, SetAttr, SetTime, Timestamp,
};

use super::Model;
use super::subvolumes::SubvolumeCalls;
use crate::names;
use crate::random::Random;

/// How many different names an actor uses in a directory. Half of them have the same hash.
const NAMES: usize = 24;

/// The calls that must work on a full volume too.
const MUST_WORK: [&str; 5] = ["unlink", "rmdir", "release", "fsync", "sync"];

/// A file in the filesystem under test and in the model.
#[derive(Clone, Copy, Debug)]
struct ActorFile {
    ours: FileId,
    model: FileId,
}

/// A source of random operations.
pub struct Actor<'a> {
    ours: &'a dyn FileSystemMut,
    model: &'a Model,
    random: Random,
    at: Timestamp,
    number: u64,
    prefix: Vec<u8>,
    root: ActorFile,
    names: Vec<Vec<u8>>,
    opened: Vec<ActorFile>,
    /// Immutable and append-only files.
    fixed: Vec<ActorFile>,
    sees_holes: bool,
    unsummed: Option<&'a HashSet<FileId>>,
    /// Files of ours whose flags the actor has set. An empty file that had no checksums has some
    /// from then on.
    reflagged: HashSet<FileId>,
    may_be_full: bool,
    /// The flags that the filesystem does not have.
    lacks: FileFlags,
    shares: bool,
    subvolumes: Option<&'a dyn SubvolumeCalls>,
    tell: &'a (dyn Fn(&'static str) + Sync),
}

fn prefix(number: u64) -> Vec<u8> {
    format!("actor{number}-").into_bytes()
}

/// All names that the actor with this number uses, in every directory.
#[must_use]
pub fn names_of(number: u64) -> Vec<Vec<u8>> {
    let prefix = prefix(number);
    let mut all = names::colliding(&prefix, 40, NAMES / 2);
    all.extend((all.len()..NAMES).map(|i| [&prefix[..], i.to_string().as_bytes()].concat()));
    all
}

impl<'a> Actor<'a> {
    /// The actor with this number, from which its prefix follows. The same seed makes the same
    /// operations.
    #[must_use]
    pub fn new(
        ours: &'a dyn FileSystemMut,
        model: &'a Model,
        number: u64,
        seed: u64,
        at: Timestamp,
    ) -> Self {
        let prefix = prefix(number);
        let root = ActorFile { ours: ours.root(), model: model.root() };
        let random = Random::new(seed ^ number.wrapping_mul(0x9e37_79b9));
        let names = names_of(number);
        Self {
            ours,
            model,
            random,
            at,
            number,
            prefix,
            root,
            names,
            opened: Vec::new(),
            fixed: Vec::new(),
            sees_holes: true,
            unsummed: None,
            reflagged: HashSet::new(),
            may_be_full: false,
            lacks: FileFlags::empty(),
            shares: true,
            subvolumes: None,
            tell: &|_| {},
        }
    }

    /// Lets the actor work only in this directory of the root, which must exist on both sides.
    ///
    /// # Panics
    /// When a side does not have it.
    #[must_use]
    pub fn within(mut self, dir: &[u8]) -> Self {
        self.root = self.find(self.root, dir).expect("the directory is there");
        self
    }

    /// Lets the actor not ask where the holes are.
    #[must_use]
    pub fn without_holes(self) -> Self {
        Self { sees_holes: false, ..self }
    }

    /// Tells the actor which files of ours have no checksums, because no call returns that. Such
    /// files cannot share data with files that have checksums, so the actor does not try that.
    #[must_use]
    pub fn where_some_have_no_checksums(self, unsummed: &'a HashSet<FileId>) -> Self {
        Self { unsummed: Some(unsummed), ..self }
    }

    /// Lets the filesystem refuse, for lack of space, every call that does not free space. The
    /// actor then does not make a refused call on the model either.
    #[must_use]
    pub fn where_space_is_short(self) -> Self {
        Self { may_be_full: true, ..self }
    }

    /// Lets the actor not set these flags, which the filesystem does not have.
    #[must_use]
    pub fn without_flags(self, lacks: FileFlags) -> Self {
        Self { lacks, ..self }
    }

    /// Lets the actor share no data between files.
    #[must_use]
    pub fn without_sharing(self) -> Self {
        Self { shares: false, ..self }
    }

    /// Lets the actor call `tell` with the name of each call before it makes it.
    #[must_use]
    pub fn telling(self, tell: &'a (dyn Fn(&'static str) + Sync)) -> Self {
        Self { tell, ..self }
    }

    /// Does `count` random operations, and then releases the files that it opened.
    ///
    /// # Panics
    /// When the two sides return different results.
    pub fn act(&mut self, count: u64) {
        for _ in 0..count {
            self.step();
        }
        for pair in std::mem::take(&mut self.opened) {
            self.both("release", |fs, of| fs.release(of(pair)));
        }
        for pair in std::mem::take(&mut self.fixed) {
            self.let_go(pair);
        }
        self.leave_default();
    }

    /// Makes the same call on both sides and compares the results.
    fn both<T>(
        &self,
        what: &'static str,
        call: impl Fn(&dyn FileSystemMut, &dyn Fn(ActorFile) -> FileId) -> Result<T>,
    ) -> Option<(T, T)> {
        (self.tell)(what);
        self.agree(what, call(self.ours, &|pair: ActorFile| pair.ours), || {
            call(self.model, &|pair: ActorFile| pair.model)
        })
    }

    /// Compares the result `ours` with what the model returns.
    fn agree<T>(
        &self,
        what: &'static str,
        ours: Result<T>,
        model: impl FnOnce() -> Result<T>,
    ) -> Option<(T, T)> {
        if self.may_be_full
            && !MUST_WORK.contains(&what)
            && ours.as_ref().is_err_and(|error| error.errno() == Errno::NOSPC)
        {
            return None;
        }
        match (ours, model()) {
            (Ok(ours), Ok(model)) => Some((ours, model)),
            (Err(ours), Err(model)) if ours.errno() == model.errno() => None,
            // If a flag forbids the call and it is wrong for another reason too, either error may
            // be returned.
            (Err(ours), Err(model)) if [ours.errno(), model.errno()].contains(&Errno::PERM) => None,
            (ours, model) => panic!(
                "{what} by {}: we say {:?}, the model {:?}",
                self.prefix.escape_ascii(),
                ours.err().map(|e| e.to_string()),
                model.err().map(|e| e.to_string()),
            ),
        }
    }

    fn name(&mut self) -> Vec<u8> {
        let index = usize::try_from(self.random.below(NAMES as u64)).expect("below 24");
        self.names[index].clone()
    }

    fn find(&self, dir: ActorFile, name: &[u8]) -> Option<ActorFile> {
        let found = self.both("lookup", |fs, of| fs.lookup(of(dir), name))?;
        Some(ActorFile { ours: found.0, model: found.1 })
    }

    /// The root, or a directory of this actor at a random depth below it.
    fn dir(&mut self) -> ActorFile {
        let mut dir = self.root;
        for _ in 0..self.random.below(4) {
            let name = self.name();
            match self.find(dir, &name) {
                Some(found) if self.file_type(found) == Some(FileType::Directory) => dir = found,
                _ => {}
            }
        }
        dir
    }

    fn file_type(&self, pair: ActorFile) -> Option<FileType> {
        let (ours, model) = self.both("attr", |fs, of| fs.attr(of(pair)))?;
        assert_eq!(ours.file_type, model.file_type, "of {pair:?}");
        assert_eq!(ours.nlink, model.nlink, "links of {pair:?}");
        Some(model.file_type)
    }

    /// A file of this actor, if a random name leads to one.
    fn file(&mut self) -> Option<ActorFile> {
        let (dir, name) = (self.dir(), self.name());
        self.find(dir, &name)
    }

    fn new_file(&mut self) -> NewFile {
        let permissions = u32::try_from(self.random.below(0o10000)).expect("12 bits");
        let [uid, gid] = [3, 7].map(|n| u32::try_from(self.random.below(n)).expect("small") * 1000);
        let umask = u32::try_from(self.random.below(0o1000)).expect("9 bits");
        let umask = (self.random.below(2) == 0).then_some(umask);
        NewFile { permissions, uid, gid, umask, at: self.at }
    }

    fn step(&mut self) {
        match self.random.below(if self.subvolumes.is_some() { 205 } else { 190 }) {
            0..22 => self.make_node(FileType::Regular),
            22..34 => self.make_directory(),
            34..39 => {
                const TYPES: [FileType; 4] =
                    [FileType::CharDevice, FileType::BlockDevice, FileType::Fifo, FileType::Socket];
                let file_type = TYPES[usize::try_from(self.random.below(4)).expect("below 4")];
                self.make_node(file_type);
            }
            39..45 => self.make_symlink(),
            45..53 => self.link(),
            53..66 => self.remove(),
            66..80 => self.rename(),
            80..86 => self.set_attr(),
            86..95 | 182..190 => self.xattr(),
            95..98 => self.open_or_release(),
            98 => {
                let file = self.file_or_open().unwrap_or(self.root);
                self.both("fsync", |fs, of| fs.fsync(of(file)));
                self.both("fdatasync", |fs, of| fs.fdatasync(of(file)));
            }
            99 => {
                self.both("sync", |fs, _| fs.sync());
            }
            126..138 => self.resize(),
            138..150 => self.fallocate(),
            150..162 if self.shares => self.share(),
            100..126 | 150..162 => self.write(),
            162..165 => self.make_unnamed(),
            165..170 => self.set_flags(),
            170..182 => self.read(),
            _ => self.change_subvolumes(),
        }
    }

    fn make_node(&mut self, file_type: FileType) {
        let (dir, name, new) = (self.dir(), self.name(), self.new_file());
        let is_device = matches!(file_type, FileType::CharDevice | FileType::BlockDevice);
        let rdev = if is_device { (8, 70_000) } else { (0, 0) };
        let kind = NewNode { file_type, rdev };
        self.both("mknod", |fs, of| fs.mknod(EntryPlace { dir: of(dir), name: &name }, kind, &new));
    }

    fn make_directory(&mut self) {
        let (dir, name, new) = (self.dir(), self.name(), self.new_file());
        self.both("mkdir", |fs, of| fs.mkdir(EntryPlace { dir: of(dir), name: &name }, &new));
    }

    fn make_symlink(&mut self) {
        let (dir, name, new) = (self.dir(), self.name(), self.new_file());
        let len = usize::try_from(1 + self.random.below(1000)).expect("small");
        let target = self.random.text(len);
        self.both("symlink", |fs, of| {
            fs.symlink(EntryPlace { dir: of(dir), name: &name }, &target, &new)
        });
    }

    fn link(&mut self) {
        let Some(file) = self.file() else { return };
        let (dir, name, at) = (self.dir(), self.name(), self.at);
        self.both("link", |fs, of| fs.link(of(file), EntryPlace { dir: of(dir), name: &name }, at));
    }

    fn remove(&mut self) {
        let (dir, name, at) = (self.dir(), self.name(), self.at);
        if self.random.below(3) == 0 {
            // `rmdir` removes an empty subvolume too, so close the files that are open in it first.
            self.close_subvolume(dir, &name);
            self.both("rmdir", |fs, of| fs.rmdir(EntryPlace { dir: of(dir), name: &name }, at));
        } else {
            self.both("unlink", |fs, of| fs.unlink(EntryPlace { dir: of(dir), name: &name }, at));
        }
    }

    fn rename(&mut self) {
        let (from, old, to, new) = (self.dir(), self.name(), self.dir(), self.name());
        if !self.may_move((from, &old), (to, &new)) {
            return;
        }
        let at = self.at;
        let how = match self.random.below(7) {
            0 => Rename::NoReplace,
            1 | 2 => Rename::Exchange,
            3 => Rename::Whiteout { new: self.new_file(), replaces: self.random.below(2) == 0 },
            _ => Rename::Replace,
        };
        self.both("rename", |fs, of| {
            let from = EntryPlace { dir: of(from), name: &old };
            fs.rename_with(from, EntryPlace { dir: of(to), name: &new }, how, at)
        });
    }

    /// Makes a file without a name, which stays open and may get a name later.
    fn make_unnamed(&mut self) {
        let (dir, new, is_linkable) = (self.dir(), self.new_file(), self.random.below(4) > 0);
        let made =
            self.both("create_unnamed", |fs, of| fs.create_unnamed(of(dir), is_linkable, &new));
        let Some((ours, model)) = made else { return };
        let file = ActorFile { ours, model };
        self.opened.push(file);
        if self.random.below(2) == 0 {
            let (dir, name, at) = (self.dir(), self.name(), self.at);
            self.both("link", |fs, of| {
                fs.link(of(file), EntryPlace { dir: of(dir), name: &name }, at)
            });
        }
    }

    fn set_attr(&mut self) {
        let Some(file) = self.file() else { return };
        let at = self.at;
        let mut maybe = |bound: u64| {
            let value = u32::try_from(self.random.below(bound)).expect("small");
            (self.random.below(2) == 0).then_some(value)
        };
        let time = |secs: u32| match secs % 4 {
            0 => SetTime::Now,
            _ => SetTime::To(Timestamp { secs: i64::from(secs) - 1000, nanos: secs * 7 }),
        };
        let set = SetAttr {
            permissions: maybe(0o10000),
            uid: maybe(1 << 31),
            gid: maybe(1 << 31),
            atime: maybe(1 << 20).map(time),
            mtime: maybe(1 << 20).map(time),
            size: maybe(10_000).map(u64::from),
        };
        self.both("set_attr", |fs, of| fs.set_attr(of(file), &set, at));
    }

    /// Opens a file, or releases one, which may have lost its last name in between.
    fn open_or_release(&mut self) {
        if self.opened.len() > 5 || self.random.below(3) == 0 {
            if let Some(pair) = self.opened.pop() {
                self.file_type(pair);
                self.both("release", |fs, of| fs.release(of(pair)));
            }
        } else if let Some(file) = self.file() {
            self.both("open", |fs, of| fs.open(of(file)));
            self.opened.push(file);
        }
    }
}
