//! All operations on a volume that may be damaged: on its old files, and on files that the
//! operations make.
//!
//! A hash of the path decides which half of the old files is left alone; these must be there
//! afterwards. An operation may fail, with an error of its own kind and after a bounded time.

use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;

use offshoot_btrfs::{Filesystem, ScrubEvent, ScrubOptions};
use offshoot_testkit::model::subvolumes::SubvolumeCalls;
use offshoot_testkit::random::Random;
use offshoot_vfs::{
    EntryPlace, Error, Fallocate, FileFlags, FileId, FilePosition, FileSystem, FileSystemMut,
    FileType, NewFile, NewNode, Rename, Result, SetAttr, Timestamp, XattrMode,
};

use crate::mutation::index;
use crate::subvolume_calls::OurSubvolumes;
use crate::view::PathView;

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 5 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 7, gid: 7, umask: None, at: AT };

/// How many times each kind of operation is done.
const ROUNDS: usize = 2;

/// A kind of operation.
type ChurnOperation = fn(&mut Churn) -> Result<()>;

/// All kinds.
const OPERATIONS: [(&str, ChurnOperation); 36] = [
    ("create", Churn::create),
    ("create many", Churn::create_many),
    ("mkdir", Churn::mkdir),
    ("symlink", Churn::symlink),
    ("mknod", Churn::mknod),
    ("unnamed", Churn::unnamed),
    ("link", Churn::link),
    ("unlink", Churn::unlink),
    ("unlink while open", Churn::unlink_open),
    ("rmdir", Churn::rmdir),
    ("rename", Churn::rename),
    ("replace", Churn::replace),
    ("exchange", Churn::exchange),
    ("append", Churn::append),
    ("overwrite", Churn::overwrite),
    ("write much", Churn::write_much),
    ("write directly", Churn::write_directly),
    ("truncate", Churn::truncate),
    ("allocate", Churn::allocate),
    ("punch", Churn::punch),
    ("zero", Churn::zero),
    ("move", Churn::move_data),
    ("clone", Churn::clone),
    ("dedupe", Churn::dedupe),
    ("copy", Churn::copy),
    ("set xattr", Churn::set_xattr),
    ("remove xattr", Churn::remove_xattr),
    ("attributes", Churn::attributes),
    ("flags", Churn::flags),
    ("fsync", Churn::fsync),
    ("fdatasync", Churn::fdatasync),
    ("sync", Churn::sync),
    ("new subvolume", Churn::new_subvolume),
    ("snapshot", Churn::snapshot),
    ("delete subvolume", Churn::delete_subvolume),
    ("read-only", Churn::read_only),
];

/// The work on one volume.
pub(crate) struct Churn {
    fs: Filesystem,
    calls: OurSubvolumes,
    random: Random,
    /// Files that may be changed, with their paths.
    files: Vec<(Vec<u8>, FileId)>,
    dirs: Vec<(Vec<u8>, FileId)>,
    subvolumes: Vec<(Vec<u8>, FileId)>,
    /// Directories in which operations make new names.
    places: Vec<FileId>,
    /// Other files that an operation changed, or may have changed.
    touched: HashSet<FileId>,
    /// Roots of subvolumes that were deleted.
    deleted: BTreeSet<u64>,
    next: u32,
    /// The operations that were done, and their results.
    pub(crate) told: Vec<String>,
}

/// Whether the file at `path` may be changed.
fn is_free(path: &[u8], seed: u64) -> bool {
    let mut hasher = DefaultHasher::new();
    (path, seed).hash(&mut hasher);
    hasher.finish().is_multiple_of(2)
}

impl Churn {
    /// No operation was done yet on the volume that shows `view`.
    pub(crate) fn new(fs: &Filesystem, view: &PathView, mut random: Random) -> Self {
        let seed = random.number();
        let (mut files, mut dirs, mut subvolumes) = (Vec::new(), Vec::new(), Vec::new());
        let mut places = Vec::new();
        for (path, seen) in view {
            let entry = (path.clone(), seen.file);
            let is_root = seen.file.ino == 256;
            match seen.file_type {
                Some(FileType::Directory) => {
                    places.push(seen.file);
                    if !is_free(path, seed) || path.is_empty() {
                    } else if is_root {
                        subvolumes.push(entry);
                    } else {
                        dirs.push(entry);
                    }
                }
                _ if is_free(path, seed) => files.push(entry),
                _ => {}
            }
        }
        if places.is_empty() {
            // A damaged root is not a directory any more. Operations try it all the same.
            places.push(fs.root());
        }
        let calls = OurSubvolumes::new(fs.clone());
        let (touched, deleted, told) = (HashSet::new(), BTreeSet::new(), Vec::new());
        let next = 0;
        Self {
            fs: fs.clone(),
            calls,
            random,
            files,
            dirs,
            subvolumes,
            places,
            touched,
            deleted,
            next,
            told,
        }
    }

    /// Does every operation, in random order, and syncs at last.
    pub(crate) fn run(&mut self) {
        let mut order: Vec<_> =
            OPERATIONS.iter().cycle().take(ROUNDS * OPERATIONS.len()).copied().collect();
        for at in (1..order.len()).rev() {
            order.swap(at, index(&mut self.random, at + 1));
        }
        for (name, operation) in order {
            let outcome = operation(self);
            self.note(name, outcome);
        }
        let (volume, is_rare) = (self.fs.volume().clone(), self.random.below(4) == 0);
        let outcome = volume.drop_deleted();
        self.note("drop deleted", outcome);
        if is_rare {
            let outcome = self.fs.sync().and_then(|()| volume.trim(0..u64::MAX).map(drop));
            self.note("trim", outcome);
            let watch = |_: &ScrubEvent<'_>| ControlFlow::Continue(());
            let outcome = volume.scrub(&ScrubOptions::default(), &watch).map(drop);
            self.note("scrub", outcome);
        }
        let outcome = self.fs.sync();
        self.note("the last sync", outcome);
    }

    /// Whether the file at this path of `view` must be as it was.
    pub(crate) fn is_untouched(&self, view: &PathView, path: &[u8]) -> bool {
        let is_in_deleted = |file: FileId| self.deleted.contains(&file.dev);
        // The file is untouched only if everything above it is.
        let above = (0..=path.len()).filter(|&at| at == path.len() || path[at] == b'/');
        above.map(|at| view.get(&path[..at])).all(|seen| {
            seen.is_some_and(|seen| !is_in_deleted(seen.file) && !self.touched.contains(&seen.file))
        })
    }

    fn note(&mut self, name: &str, outcome: Result<()>) {
        let told = match outcome {
            Ok(()) => name.to_owned(),
            Err(error) => format!("{name}: {error}"),
        };
        self.told.push(told);
    }

    fn pick(random: &mut Random, of: &[(Vec<u8>, FileId)]) -> Result<(Vec<u8>, FileId)> {
        let none = || Error::posix(offshoot_vfs::Errno::NOENT, "nothing to change");
        of.get(index(random, of.len().max(1))).cloned().ok_or_else(none)
    }

    /// An old file, which counts as touched from now on.
    fn file(&mut self) -> Result<FileId> {
        let (_, file) = Self::pick(&mut self.random, &self.files)?;
        self.touched.insert(file);
        Ok(file)
    }

    /// The place of an old file, and the file, which counts as touched from now on.
    fn place_of(&mut self) -> Result<(FileId, Vec<u8>, FileId)> {
        let (path, file) = Self::pick(&mut self.random, &self.files)?;
        self.touched.insert(file);
        let (dir, name) = self.split(&path)?;
        Ok((dir, name, file))
    }

    /// The directory of a path, and the name in it.
    fn split(&self, path: &[u8]) -> Result<(FileId, Vec<u8>)> {
        let mut dir = self.fs.root();
        let mut rest = path;
        while let Some(at) = rest.iter().position(|&byte| byte == b'/') {
            dir = self.fs.lookup(dir, &rest[..at])?;
            rest = &rest[at + 1..];
        }
        Ok((dir, rest.to_vec()))
    }

    /// A directory and a new name.
    fn new_place(&mut self) -> (FileId, Vec<u8>) {
        self.next += 1;
        let dir = self.places[index(&mut self.random, self.places.len())];
        (dir, format!("new-{}", self.next).into_bytes())
    }

    /// A directory in the subvolume of `file`, and a new name.
    fn new_place_beside(&mut self, file: FileId) -> (FileId, Vec<u8>) {
        let mut place = self.new_place();
        for _ in 0..20 {
            if place.0.dev == file.dev {
                break;
            }
            place = self.new_place();
        }
        place
    }

    fn offset(&mut self, file: FileId) -> Result<u64> {
        let size = self.fs.attr(file)?.size;
        Ok(self.random.below(size.clamp(1, 1 << 20)))
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        if self.random.below(2) == 0 { self.random.bytes(len) } else { self.random.text(len) }
    }

    fn create(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        let file = self.fs.create(EntryPlace { dir, name: &name }, &NEW)?;
        let len = [0, 100, 5000, 70_000][index(&mut self.random, 4)];
        let bytes = self.bytes(len);
        self.fs.write(file, 0, &bytes, AT)
    }

    fn create_many(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        for number in 0..12 {
            let name = [&name[..], format!("-{number}").as_bytes()].concat();
            let file = self.fs.create(EntryPlace { dir, name: &name }, &NEW)?;
            self.fs.write(file, 0, &name, AT)?;
        }
        Ok(())
    }

    fn mkdir(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        let made = self.fs.mkdir(EntryPlace { dir, name: &name }, &NEW)?;
        self.places.push(made);
        Ok(())
    }

    fn symlink(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        self.fs.symlink(EntryPlace { dir, name: &name }, b"elsewhere", &NEW).map(drop)
    }

    fn mknod(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        let node = NewNode { file_type: FileType::CharDevice, rdev: (1, 3) };
        self.fs.mknod(EntryPlace { dir, name: &name }, node, &NEW).map(drop)
    }

    fn unnamed(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        let file = self.fs.create_unnamed(dir, true, &NEW)?;
        let bytes = self.bytes(9000);
        let written = self.fs.write(file, 0, &bytes, AT);
        let is_linked = self.random.below(2) == 0;
        let linked = if is_linked {
            self.fs.link(file, EntryPlace { dir, name: &name }, AT)
        } else {
            Ok(())
        };
        self.fs.release(file).and(written).and(linked)
    }

    fn link(&mut self) -> Result<()> {
        let file = self.file()?;
        let (dir, name) = self.new_place_beside(file);
        self.fs.link(file, EntryPlace { dir, name: &name }, AT)
    }

    fn unlink(&mut self) -> Result<()> {
        let (dir, name, _) = self.place_of()?;
        self.fs.unlink(EntryPlace { dir, name: &name }, AT)
    }

    fn unlink_open(&mut self) -> Result<()> {
        let (dir, name, file) = self.place_of()?;
        self.fs.open(file)?;
        let gone = self.fs.unlink(EntryPlace { dir, name: &name }, AT);
        let written = self.fs.write(file, 0, b"while it has no name", AT);
        self.fs.release(file).and(gone).and(written)
    }

    fn rmdir(&mut self) -> Result<()> {
        let (path, file) = Self::pick(&mut self.random, &self.dirs)?;
        let (dir, name) = self.split(&path)?;
        let removed = self.fs.rmdir(EntryPlace { dir, name: &name }, AT);
        if removed.is_ok() {
            self.touched.insert(file);
            self.dirs.retain(|one| one.1 != file);
            self.places.retain(|&one| one != file);
        }
        removed
    }

    fn rename(&mut self) -> Result<()> {
        let (dir, name, file) = self.place_of()?;
        let (to, new) = self.new_place_beside(file);
        self.fs.rename(EntryPlace { dir, name: &name }, EntryPlace { dir: to, name: &new }, AT)
    }

    fn replace(&mut self) -> Result<()> {
        let ((dir, name, _), (to, new, _)) = (self.place_of()?, self.place_of()?);
        self.fs.rename(EntryPlace { dir, name: &name }, EntryPlace { dir: to, name: &new }, AT)
    }

    fn exchange(&mut self) -> Result<()> {
        let ((dir, name, _), (to, new, _)) = (self.place_of()?, self.place_of()?);
        let (from, to) = (EntryPlace { dir, name: &name }, EntryPlace { dir: to, name: &new });
        self.fs.rename_with(from, to, Rename::Exchange, AT)
    }

    fn append(&mut self) -> Result<()> {
        let file = self.file()?;
        let size = self.fs.attr(file)?.size;
        let bytes = self.bytes(6000);
        self.fs.write(file, size, &bytes, AT)
    }

    fn overwrite(&mut self) -> Result<()> {
        let file = self.file()?;
        let (at, bytes) = (self.offset(file)?, self.bytes(10_000));
        self.fs.write(file, at, &bytes, AT)
    }

    fn write_much(&mut self) -> Result<()> {
        let file = self.file()?;
        let bytes = self.bytes(300_000);
        self.fs.write(file, 4096, &bytes, AT)?;
        self.fs.fsync(file)
    }

    fn write_directly(&mut self) -> Result<()> {
        let file = self.file()?;
        let (at, bytes) = (self.offset(file)? / 4096 * 4096, self.bytes(16_384));
        self.fs.write_direct(file, at, &bytes, AT)
    }

    fn truncate(&mut self) -> Result<()> {
        let file = self.file()?;
        let size = match self.random.below(3) {
            0 => 0,
            1 => self.fs.attr(file)?.size.saturating_add(10_000),
            _ => self.offset(file)?,
        };
        self.fs.set_attr(file, &SetAttr { size: Some(size), ..SetAttr::default() }, AT)
    }

    fn fallocate(&mut self, what: Fallocate, len: u64) -> Result<()> {
        let file = self.file()?;
        let at = self.offset(file)? / 4096 * 4096;
        self.fs.fallocate(file, what, at, len, AT)
    }

    fn allocate(&mut self) -> Result<()> {
        let keeps_size = self.random.below(2) == 0;
        self.fallocate(Fallocate::Allocate { keeps_size }, 100_000)
    }

    fn punch(&mut self) -> Result<()> {
        self.fallocate(Fallocate::PunchHole, 20_000)
    }

    fn zero(&mut self) -> Result<()> {
        self.fallocate(Fallocate::Zero { keeps_size: true }, 30_000)
    }

    fn move_data(&mut self) -> Result<()> {
        let is_insert = self.random.below(2) == 0;
        self.fallocate(if is_insert { Fallocate::Insert } else { Fallocate::Collapse }, 8192)
    }

    /// The same range of an old file and of a new one beside it.
    fn pair(&mut self) -> Result<(FilePosition, FilePosition, u64)> {
        let file = self.file()?;
        let (dir, name) = self.new_place_beside(file);
        let other = self.fs.create(EntryPlace { dir, name: &name }, &NEW)?;
        let at = |file| FilePosition { file, offset: 0 };
        Ok((at(file), at(other), self.fs.attr(file)?.size.min(1 << 20)))
    }

    fn clone(&mut self) -> Result<()> {
        if self.random.below(2) == 0 {
            let (from, to, _) = self.pair()?;
            return self.fs.clone_range(from, to, 0, AT);
        }
        let (from, to) = (self.file()?, self.file()?);
        let (from, to) =
            (FilePosition { file: from, offset: 0 }, FilePosition { file: to, offset: 4096 });
        self.fs.clone_range(from, to, 8192, AT)
    }

    fn dedupe(&mut self) -> Result<()> {
        let (from, to, len) = self.pair()?;
        let mut bytes = vec![0; usize::try_from(len).expect("bounded")];
        let count = self.fs.read(from.file, 0, &mut bytes)?;
        self.fs.write(to.file, 0, &bytes[..count], AT)?;
        self.fs.dedupe_range(from, to, count as u64).map(drop)
    }

    fn copy(&mut self) -> Result<()> {
        let (from, to, len) = self.pair()?;
        self.fs.copy_range(from, to, len, AT).map(drop)
    }

    fn set_xattr(&mut self) -> Result<()> {
        let file = self.file()?;
        let len = [10, 900][index(&mut self.random, 2)];
        let value = self.random.bytes(len);
        self.fs.set_xattr(file, b"user.churn", &value, XattrMode::Set, AT)
    }

    fn remove_xattr(&mut self) -> Result<()> {
        let file = self.file()?;
        let mut first = None;
        self.fs.xattrs(file, &mut |name, _| {
            first = Some(name.to_vec());
            ControlFlow::Break(())
        })?;
        first.map_or(Ok(()), |name| self.fs.remove_xattr(file, &name, AT))
    }

    fn attributes(&mut self) -> Result<()> {
        let file = self.file()?;
        let set = SetAttr { permissions: Some(0o600), uid: Some(3), ..SetAttr::default() };
        self.fs.set_attr(file, &set, AT)
    }

    fn flags(&mut self) -> Result<()> {
        let file = self.file()?;
        self.fs.set_flags(file, FileFlags::NODUMP | FileFlags::NOATIME, AT)
    }

    fn fsync(&mut self) -> Result<()> {
        let file = self.file()?;
        self.fs.write(file, 0, b"synced", AT)?;
        self.fs.fsync(file)
    }

    fn fdatasync(&mut self) -> Result<()> {
        let file = self.file()?;
        self.fs.write(file, 3, b"synced", AT)?;
        self.fs.fdatasync(file)
    }

    fn sync(&mut self) -> Result<()> {
        self.fs.sync()
    }

    fn new_subvolume(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        let root = self.calls.create_subvolume(EntryPlace { dir, name: &name }, &NEW)?;
        self.places.push(root);
        self.subvolumes.push((Vec::new(), root));
        self.fs.create(EntryPlace { dir: root, name: b"first" }, &NEW).map(drop)
    }

    fn snapshot(&mut self) -> Result<()> {
        let (dir, name) = self.new_place();
        let roots: Vec<_> = self.places.iter().filter(|one| one.ino == 256).copied().collect();
        let source = roots[index(&mut self.random, roots.len())];
        let is_read_only = self.random.below(3) == 0;
        let place = EntryPlace { dir, name: &name };
        let root = self.calls.snapshot(source, place, is_read_only, AT)?;
        self.places.push(root);
        Ok(())
    }

    fn delete_subvolume(&mut self) -> Result<()> {
        let (path, root) = Self::pick(&mut self.random, &self.subvolumes)?;
        if path.is_empty() {
            return Ok(());
        }
        let (dir, name) = self.split(&path)?;
        self.calls.delete_subvolume(EntryPlace { dir, name: &name }, AT)?;
        self.deleted.insert(root.dev);
        self.subvolumes.retain(|one| one.1 != root);
        self.places.retain(|one| one.dev != root.dev);
        Ok(())
    }

    fn read_only(&mut self) -> Result<()> {
        let (_, root) = Self::pick(&mut self.random, &self.subvolumes)?;
        let is_read_only = self.random.below(2) == 0;
        self.calls.set_read_only(root, is_read_only)
    }
}
