//! Compares two filesystems, path by path.
//!
//! [`Compare::run`] walks our filesystem and the judge's at the same time and records every
//! difference: entries and their order, identity, type, mode, owner, times, links, device numbers,
//! sizes, allocated space, extended attributes, link targets, holes, and the content through every
//! way to read it. It also asks for what must not exist: missing names (also one with the hash of
//! an existing name), missing attributes, and calls that do not fit the type of the file.
//!
//! A difference never ends the walk, so that one run shows all of them. An error on either side is
//! a difference too. Random choices come from a seed that the failure prints.

mod attributes;
mod content;

pub use attributes::sorted_xattrs;
pub(crate) use content::data_ranges;

use std::collections::HashMap;
use std::fmt::{self, Debug, Write};
use std::ops::ControlFlow;

use offshoot_vfs::{Errno, FileId, FileSystem, FileType, Result};

use crate::host::HostFilesystem;
use crate::names;
use crate::random::Random;

/// How many differences are kept with their text; the others are only counted.
const KEPT: usize = 40;

/// The inode number that a kernel mount with subvolumes shows for a nested subvolume in a snapshot,
/// which does not contain that subvolume: an empty directory that is not stored. Its times are
/// those of the moment at which it is read.
const EMPTY_SUBVOLUME_INO: u64 = 2;

/// A property in which two filesystems may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aspect {
    /// Inode numbers and subvolume ids. Identity is still compared: two paths are one file on both
    /// sides or on neither.
    Ids,
    /// The order of directory entries.
    Order,
    /// Change time, birth time, and access time, which reading the other side changes.
    StoredTimes,
    /// The nanoseconds of a modification time.
    Nanoseconds,
    /// Size, link count and modification time of directories, which each format counts in its own
    /// way.
    DirectoryShape,
    /// The size of directories, and the space they take.
    DirectorySize,
    /// Modification times, which `mkfs.xfs` does not take from the files that it copies.
    ModificationTimes,
    /// Times that change when a name is added or removed: change times, and modification times of
    /// directories.
    TimesOfNames,
    /// How much space data takes, which depends on compression and preallocation.
    Allocation,
    /// Where there are holes.
    Holes,
    /// Flags, which copies do not preserve.
    Flags,
    /// The compression flags: an engine that compresses marks a file that did not get smaller.
    CompressionFlags,
    /// The attributes in which XFS stores access control lists. The kernel shows them to root,
    /// beside those of system calls with the same lists.
    StoredAcls,
}

/// What to compare.
#[derive(Clone, Debug, Default)]
pub struct Compare {
    without: Vec<Aspect>,
}

/// What a comparison saw.
#[derive(Debug, Default)]
pub struct ComparisonOutcome {
    /// Directories on both sides, subvolumes included.
    pub directories: u64,
    /// Names of files that are not directories.
    pub files: u64,
    /// Extended attributes whose values were compared.
    pub xattrs: u64,
    /// Bytes of content that were compared.
    pub bytes: u64,
    /// The first differences, one per line.
    pub differences: Vec<String>,
    /// How many further differences there were.
    pub more: u64,
    seed: u64,
}

impl ComparisonOutcome {
    /// Fails the test unless the two sides are equal and at least `at_least` names were seen,
    /// because two empty trees are equal as well.
    #[track_caller]
    pub fn assert_same(&self, at_least: u64) {
        assert!(self.differences.is_empty(), "{self}");
        let names = self.files + self.directories;
        assert!(names >= at_least, "only {names} names were compared, not {at_least}: {self}");
    }
}

impl fmt::Display for ComparisonOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} differences in {} directories, {} files, {} attributes, {} bytes (seed {:#x})",
            self.differences.len() as u64 + self.more,
            self.directories,
            self.files,
            self.xattrs,
            self.bytes,
            self.seed
        )?;
        for difference in &self.differences {
            writeln!(f, "  {difference}")?;
        }
        if self.more > 0 {
            writeln!(f, "  and {} more", self.more)?;
        }
        Ok(())
    }
}

/// Compares everything that the kernel shows at `path` with `ours`.
#[must_use]
pub fn compare(ours: &dyn FileSystem, path: &std::path::Path) -> ComparisonOutcome {
    Compare::default().run(ours, path)
}

impl Compare {
    /// Compares what two copies of one tree have in common.
    #[must_use]
    pub fn of_copies() -> Self {
        Self::default()
            .without(Aspect::Ids)
            .without(Aspect::Order)
            .without(Aspect::StoredTimes)
            .without(Aspect::Allocation)
            .without(Aspect::Flags)
    }

    /// Leaves `aspect` out of the comparison.
    #[must_use]
    pub fn without(mut self, aspect: Aspect) -> Self {
        self.without.push(aspect);
        self
    }

    /// Compares `ours` with the directory of the host at `path`.
    #[must_use]
    pub fn run(&self, ours: &dyn FileSystem, path: &std::path::Path) -> ComparisonOutcome {
        let judge = HostFilesystem::new(path).expect("the directory of the judge opens");
        let has_subvolumes = judge.tells_subvolumes();
        self.start(ours, &judge, has_subvolumes, !has_subvolumes)
    }

    /// Compares `ours` with any other filesystem.
    #[must_use]
    pub fn run_filesystems(
        &self,
        ours: &dyn FileSystem,
        judge: &dyn FileSystem,
    ) -> ComparisonOutcome {
        self.start(ours, judge, false, false)
    }

    fn start(
        &self,
        ours: &dyn FileSystem,
        judge: &dyn FileSystem,
        has_subvolumes: bool,
        is_host: bool,
    ) -> ComparisonOutcome {
        let seed = std::process::id().into();
        let mut walk = ComparisonWalk {
            ours,
            judge,
            compare: self,
            has_subvolumes,
            is_host,
            outcome: ComparisonOutcome { seed, ..ComparisonOutcome::default() },
            identities: HashMap::new(),
            random: Random::new(seed),
        };
        walk.run();
        walk.outcome
    }

    fn includes(&self, aspect: Aspect) -> bool {
        !self.without.contains(&aspect)
    }
}

/// A file of which both sides have a version.
#[derive(Clone, Debug)]
struct ComparedPair {
    path: Vec<u8>,
    ours: FileId,
    judge: FileId,
}

/// A directory entry that outlives the visit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct VisitedEntry {
    name: Vec<u8>,
    file: FileId,
    file_type: FileType,
    cookie: u64,
}

struct ComparisonWalk<'a> {
    ours: &'a dyn FileSystem,
    judge: &'a dyn FileSystem,
    compare: &'a Compare,
    /// Whether the judge is a kernel mount with subvolumes.
    has_subvolumes: bool,
    /// Whether the judge is a kernel mount without subvolumes.
    is_host: bool,
    outcome: ComparisonOutcome,
    /// The file of ours for each file of the judge. An entry also means that the contents were
    /// compared under another name.
    identities: HashMap<FileId, FileId>,
    random: Random,
}

impl ComparisonWalk<'_> {
    fn run(&mut self) {
        let root =
            ComparedPair { path: b".".to_vec(), ours: self.ours.root(), judge: self.judge.root() };
        let parent = self.ours.parent(root.ours);
        self.same(&root, "parent of the root", &parent.map_err(|e| e.to_string()), &Ok(None));
        let mut stack = vec![root];
        while let Some(pair) = stack.pop() {
            if self.node(&pair) == Some(FileType::Directory) {
                self.outcome.directories += 1;
                self.directory(&pair, &mut stack);
            } else {
                self.outcome.files += 1;
            }
        }
    }

    /// Compares one file without its entries. Returns its type if both sides agree on it.
    fn node(&mut self, pair: &ComparedPair) -> Option<FileType> {
        let is_empty_subvolume = self.is_empty_subvolume(pair);
        let first_visit = is_empty_subvolume || self.is_first_name(pair);
        let file_type = self.attributes(pair, is_empty_subvolume)?;
        if first_visit && !is_empty_subvolume {
            self.xattrs(pair);
            match file_type {
                FileType::Regular => self.content(pair),
                FileType::Symlink => {
                    let ours = self.ours.read_link(pair.ours);
                    let judge = self.judge.read_link(pair.judge);
                    self.same_results(pair, "link target", ours, judge);
                }
                _ => {}
            }
            self.refusals(pair, file_type);
        }
        Some(file_type)
    }

    fn is_empty_subvolume(&self, pair: &ComparedPair) -> bool {
        self.has_subvolumes && pair.judge.ino == EMPTY_SUBVOLUME_INO
    }

    /// Compares the identity of the file. Returns whether this is its first name.
    fn is_first_name(&mut self, pair: &ComparedPair) -> bool {
        if self.compare.includes(Aspect::Ids) {
            // The number of a device is that of a mount. The volume does not hold it.
            let dev = if self.is_host { pair.ours.dev } else { pair.judge.dev };
            self.same(pair, "identity", &pair.ours, &FileId { dev, ..pair.judge });
        }
        match self.identities.insert(pair.judge, pair.ours) {
            None => true,
            Some(before) => {
                self.same(pair, "identity under another name", &pair.ours, &before);
                false
            }
        }
    }

    /// Checks that calls that do not fit the file fail as they fail in the kernel.
    fn refusals(&mut self, pair: &ComparedPair, file_type: FileType) {
        let missing = self.ours.xattr(pair.ours, b"user.not there");
        self.refused(pair, "a missing attribute", missing.map(drop), Errno::NODATA);
        if file_type != FileType::Symlink {
            let target = self.ours.read_link(pair.ours);
            self.refused(pair, "the target of no link", target.map(drop), Errno::INVAL);
        }
        if file_type == FileType::Directory {
            let read = self.ours.read(pair.ours, 0, &mut [0; 16]);
            self.refused(pair, "reading a directory", read.map(drop), Errno::ISDIR);
        } else {
            let found = self.ours.lookup(pair.ours, b"x");
            self.refused(pair, "a name in no directory", found.map(drop), Errno::NOTDIR);
        }
    }

    fn directory(&mut self, pair: &ComparedPair, stack: &mut Vec<ComparedPair>) {
        let listings = (entries(self.ours, pair.ours), entries(self.judge, pair.judge));
        let (mut ours, mut judge) = match listings {
            (Ok(ours), Ok(judge)) => (ours, judge),
            (ours, judge) => {
                self.same_results(pair, "entries", ours, judge);
                return;
            }
        };
        self.piecewise(pair, &ours);
        if !self.compare.includes(Aspect::Order) {
            ours.sort_by(|a, b| a.name.cmp(&b.name));
            judge.sort_by(|a, b| a.name.cmp(&b.name));
        }
        let names = |list: &[VisitedEntry]| list.iter().map(|e| e.name.clone()).collect::<Vec<_>>();
        if names(&ours) != names(&judge) {
            self.explain_names(pair, &ours, &judge);
        }
        let by_name: HashMap<_, _> = ours.iter().map(|entry| (&entry.name, entry)).collect();
        for theirs in &judge {
            let mut path = pair.path.clone();
            path.push(b'/');
            path.extend_from_slice(&theirs.name);
            let Some(mine) = by_name.get(&theirs.name) else { continue };
            let below = ComparedPair { path, ours: mine.file, judge: theirs.file };
            self.same(&below, "type in the directory", &mine.file_type, &theirs.file_type);
            let found = self.ours.lookup(pair.ours, &theirs.name).map_err(|e| e.to_string());
            self.same(&below, "lookup", &found, &Ok(mine.file));
            if theirs.file_type == FileType::Directory {
                self.below(pair, &below, &theirs.name);
            }
            stack.push(below);
        }
        self.missing_names(pair, &judge);
    }

    /// Checks the way back from a directory to its parent.
    fn below(&mut self, dir: &ComparedPair, below: &ComparedPair, name: &[u8]) {
        if self.is_empty_subvolume(below) {
            return;
        }
        let parent = self.ours.parent(below.ours).map_err(|e| e.to_string());
        let expected = offshoot_vfs::Parent { dir: dir.ours, name: name.to_vec() };
        self.same(below, "parent", &parent, &Ok(Some(expected)));
    }

    /// Checks that reading a directory in pieces shows the same as reading it at once.
    fn piecewise(&mut self, pair: &ComparedPair, whole: &[VisitedEntry]) {
        let mut pieces: Vec<VisitedEntry> = Vec::new();
        let mut after = 0;
        loop {
            let mut left = 1 + self.random.below(1 + whole.len() as u64);
            let before = pieces.len();
            let result = self.ours.read_dir(pair.ours, after, &mut |entry| {
                pieces.push(VisitedEntry::from(entry));
                left -= 1;
                if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            if let Err(error) = result {
                self.differs(pair, &format!("entries after {after}: {error}"));
                return;
            }
            match pieces.last() {
                Some(last) if pieces.len() > before => after = last.cookie,
                _ => break,
            }
            if pieces.len() > whole.len() {
                break;
            }
        }
        if pieces != whole {
            self.differs(pair, "entries read in pieces are not those read at once");
        }
        if !whole.is_sorted_by(|a, b| a.cookie < b.cookie) {
            self.differs(pair, "cookies do not ascend");
        }
    }

    fn missing_names(&mut self, pair: &ComparedPair, judge: &[VisitedEntry]) {
        let mut absent = vec![b"not there".to_vec(), vec![b'z'; 255]];
        if let Some(first) = judge.first() {
            let hash = names::hash(&first.name);
            absent.push(names::with_hash(b"", 20, hash, &mut self.random));
            let mut longer = first.name.clone();
            longer.truncate(254);
            longer.push(0xfe);
            absent.push(longer);
        }
        for name in absent {
            if judge.iter().all(|entry| entry.name != name) {
                let found = self.ours.lookup(pair.ours, &name);
                self.refused(pair, "a missing name", found.map(drop), Errno::NOENT);
            }
        }
    }

    fn explain_names(
        &mut self,
        pair: &ComparedPair,
        ours: &[VisitedEntry],
        judge: &[VisitedEntry],
    ) {
        let mut counts: HashMap<&[u8], i64> = HashMap::new();
        for entry in ours {
            *counts.entry(&entry.name).or_default() += 1;
        }
        for entry in judge {
            *counts.entry(&entry.name).or_default() -= 1;
        }
        let mut same_set = true;
        for (name, count) in counts {
            if count != 0 {
                same_set = false;
                let side = if count > 0 { "only ours has" } else { "only the judge has" };
                self.differs(pair, &format!("{side} the entry {}", show(name)));
            }
        }
        if same_set {
            let at = ours.iter().zip(judge).position(|(a, b)| a.name != b.name);
            self.differs(pair, &format!("the order of entries differs from entry {at:?} on"));
        }
    }

    fn refused(&mut self, pair: &ComparedPair, what: &str, result: Result<()>, errno: Errno) {
        match result {
            Err(offshoot_vfs::Error::Posix { errno: found, .. }) if found == errno => {}
            Err(error) => self.differs(pair, &format!("{what}: {error} instead of {errno}")),
            Ok(()) => self.differs(pair, &format!("{what} succeeds instead of {errno}")),
        }
    }

    fn same_results<T: PartialEq + Debug>(
        &mut self,
        pair: &ComparedPair,
        what: &str,
        ours: Result<T>,
        judge: Result<T>,
    ) {
        // If both sides fail, they do not agree: a judge that returns an error is no judge.
        if let Err(error) = &judge {
            self.differs(pair, &format!("{what}: the judge fails: {error}"));
        }
        let text = |result: Result<T>| result.map_err(|error| error.to_string());
        self.same(pair, what, &text(ours), &text(judge));
    }

    fn same<T: PartialEq + Debug>(&mut self, pair: &ComparedPair, what: &str, ours: &T, judge: &T) {
        if ours != judge {
            let mut text = format!("{what}: ours {ours:?}, judge {judge:?}");
            if let Some((cut, _)) = text.char_indices().nth(600) {
                text.truncate(cut);
                text.push_str(" ...");
            }
            self.differs(pair, &text);
        }
    }

    fn differs(&mut self, pair: &ComparedPair, what: &str) {
        if self.outcome.differences.len() < KEPT {
            self.outcome.differences.push(format!("{}: {what}", show_path(&pair.path)));
        } else {
            self.outcome.more += 1;
        }
    }
}

impl From<offshoot_vfs::DirEntry<'_>> for VisitedEntry {
    fn from(entry: offshoot_vfs::DirEntry<'_>) -> Self {
        Self {
            name: entry.name.to_vec(),
            file: entry.file,
            file_type: entry.file_type,
            cookie: entry.cookie,
        }
    }
}

fn entries(fs: &dyn FileSystem, dir: FileId) -> Result<Vec<VisitedEntry>> {
    let mut list = Vec::new();
    fs.read_dir(dir, 0, &mut |entry| {
        list.push(VisitedEntry::from(entry));
        ControlFlow::Continue(())
    })?;
    Ok(list)
}

/// A path for a message. A long one is shortened in the middle.
fn show_path(path: &[u8]) -> String {
    match path {
        [start @ .., _] if start.len() > 300 => {
            format!("{}...{}", show(&path[..100]), show(&path[path.len() - 150..]))
        }
        _ => show(path),
    }
}

/// Bytes of a path for a message. Everything except printable ASCII is escaped.
#[must_use]
pub fn show(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, &byte| {
        if byte.is_ascii_graphic() && byte != b'\\' {
            text.push(byte.into());
        } else {
            write!(text, "\\x{byte:02x}").expect("writing to a string");
        }
        text
    })
}
