//! The rules that decide what a volume may show after a power cut.
//!
//! A [`History`] has two parts. The *moments* are pictures of the model: moment 0 is the start, and
//! moment N comes after operation N. The *promises* are the calls of `fsync` and `sync` that
//! returned, each with the moment that it made durable. A state is judged by the promises that were
//! made before the cut and by the latest operation that had begun. Between the two lie the moments
//! that a file or a name may show:
//!
//! ```text
//!   moment      0        1        2        3        4
//!   operation      create    write    fsync   rename  | cut
//!   of the file                  [2 ................ 4]      data, attributes, its names
//!   of a name   [0 ................................. 4]      what it leads to
//! ```
//!
//! 1. Each file, its contents, and whether a name is one of its names, are each as of one moment in
//!    between. A file that had a name all the time is not lost. `fdatasync` promises nothing about
//!    times.
//! 2. What a name leads to is as of one moment in between. `fsync` of a directory promises the
//!    names in it. A renamed file has at least one of its two names, and an exchange removes
//!    neither name.
//! 3. The link count of a file is the number of names that lead to it, and the size of a directory
//!    follows from the names in it.
//! 4. Each sector of data is as of a moment in between at which the file reached over it. The size
//!    is that of a moment, or a whole number of sectors between the sizes of two successive
//!    moments: the engine writes and truncates long ranges in pieces, and the part that it writes
//!    back first is durable first.
//!    An engine that overwrites data may leave each sector of the device old or new. Zeros behind a
//!    new end may be there before the new size is, and an operation that moves data leaves holes
//!    meanwhile.
//! 5. If no `fsync` can have begun since the last `sync` that returned, then all names and
//!    attributes together are as of one moment, because only commits happened. An `fsync` may write
//!    a log, which shows one file at a later moment than others. If names and attributes are
//!    ordered ([`EngineManners`]), they are always as of one moment: that of the last `sync`, or of
//!    the last change of a synced file before its `fsync`, or a later one.
//! 6. The settings of a subvolume are as of a moment since the last `sync`.
//! 7. A file has at least the preallocated space that it had at one of the moments. Data written
//!    into that space may still be in memory only.
//! 8. A file that replaced another one by a rename holds, under that name, at least what it held
//!    when it was renamed. An engine whose names are ordered does not promise that.
//!
//! A directory is identified independently of its path, so no rule says where a directory above a
//! synced file is: another operation may have moved it, and its own promise covers that. Nor does
//! an `fsync` of a subvolume promise its path, because the path is not stored inside the subvolume.

mod data;
mod index;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::ops::RangeInclusive;

use offshoot_vfs::{FileFlags, FileType};

use self::index::{FileMove, HistoryIndex};
use super::manners::EngineManners;
use super::picture::{Picture, PictureFile, PictureId, PictureName, SECTOR};

/// Extended attributes by name.
type PromisedXattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// What a returned `fsync` or `sync` made durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct DurablePromise {
    pub(super) moment: usize,
    /// The file that was synced; `None` for everything.
    pub(super) of: Option<PictureId>,
    /// The file is the root of a subvolume.
    pub(super) is_subvolume: bool,
    /// The promise covers times too: `fsync` and `sync`, but not `fdatasync`.
    pub(super) has_times: bool,
}

/// The implementation that made the promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromiseMaker {
    /// Ours: all rules hold.
    Ours,
    /// The kernel, which promises less about names. If a file is renamed and only its new directory
    /// is synced, it may have both names. If a file gains one name and loses another in two
    /// operations, an `fsync` of the directory that lost one may leave neither. An `fsync` of a
    /// file may leave a name that it lost since an earlier `fsync`, because that one may have
    /// logged the directory. If a file loses the name that an `fsync` logged, the log forgets the
    /// name, so the file may have the names of the last commit again. The kernel also writes zeros
    /// into preallocated sectors if a hole is punched in a part of them, or if they are behind the
    /// end of a file that grows.
    Kernels,
}

/// All moments and promises of a workload.
#[derive(Debug)]
pub(super) struct History {
    pub(super) pictures: Vec<Picture>,
    pub(super) promises: Vec<DurablePromise>,
    pub(super) whose: PromiseMaker,
    pub(super) manners: EngineManners,
    /// Some operation moves data within a file.
    moves_data: bool,
    index: HistoryIndex,
}

/// The part of a history that one state is judged by.
pub(super) struct Judgement<'a> {
    history: &'a History,
    /// The indexes of the promises that were made before the cut.
    kept: &'a [usize],
    /// The moment after the last operation that had begun.
    latest: usize,
    /// The first moment that names and attributes may show together, if they are ordered.
    floor: usize,
    problems: Vec<String>,
}

/// A description of a file or a name, made when there is something wrong with it.
type ProblemSubject<'f> = &'f dyn Fn() -> String;

/// The names of each file in a picture.
type FoundNames<'f> = BTreeMap<PictureId, BTreeSet<&'f PictureName>>;

impl History {
    /// Our promises at these moments.
    pub(super) fn new(
        pictures: Vec<Picture>,
        promises: Vec<DurablePromise>,
        manners: EngineManners,
        moves_data: bool,
    ) -> Self {
        let index = HistoryIndex::new(&pictures);
        Self { pictures, promises, whose: PromiseMaker::Ours, manners, moves_data, index }
    }

    /// Lists what is wrong in `found`, given that the promises `kept` were made and that the
    /// operation before the moment `latest` had begun.
    pub(super) fn judge(&self, found: &Picture, kept: &[usize], latest: usize) -> Vec<String> {
        // A kept promise implies that the operations before it had begun, even if nothing had to be
        // written for them.
        let promised = kept.iter().map(|&kept| self.promises[kept].moment);
        let latest = promised.chain([latest]).max().unwrap_or(latest);
        let floor = self.floor(kept);
        let mut judgement = Judgement { history: self, kept, latest, floor, problems: Vec::new() };
        judgement.files(found);
        judgement.names(found);
        judgement.replacements(found);
        judgement.whole(found);
        judgement.problems
    }

    /// The moment up to which ordered names and attributes are durable behind the promises `kept`:
    /// that of a `sync`, and the last change of a synced file before its `fsync`.
    fn floor(&self, kept: &[usize]) -> usize {
        if !self.manners.is_ordered {
            return 0;
        }
        let durable = kept.iter().map(|&kept| {
            let promise = &self.promises[kept];
            promise.of.map_or(promise.moment, |of| self.last_change(of, promise))
        });
        durable.max().unwrap_or(0)
    }

    /// The moment of the last change that a promise for the file `of` covers.
    fn last_change(&self, of: PictureId, promise: &DurablePromise) -> usize {
        let versions: Vec<_> = self.index.versions(of, &(0..=promise.moment)).flatten().collect();
        let file = |moment: usize| &self.pictures[moment].files[&of];
        let changes = versions.windows(2).filter(|pair| {
            promise.has_times || !file(pair[0]).differs_in_data_alone(file(pair[1]))
        });
        let last = changes.map(|pair| pair[1]).next_back();
        last.or(versions.first().copied()).unwrap_or(0)
    }

    /// Clears all times, to judge an implementation that uses another clock.
    pub(super) fn forget_times(&mut self) {
        self.pictures.iter_mut().for_each(Picture::forget_times);
    }
}

impl<'a> Judgement<'a> {
    /// The moments that the file `of` may show.
    fn moments(&self, of: PictureId) -> RangeInclusive<usize> {
        self.moments_since(|promise| promise.of.is_none_or(|file| file == of))
    }

    /// The moments that ordered names and attributes may show, or else those of the file `of`.
    fn moments_of_metadata(&self, of: PictureId) -> RangeInclusive<usize> {
        if self.history.manners.is_ordered { self.floor..=self.latest } else { self.moments(of) }
    }

    /// The moments that the names in the directory `of` may show.
    fn moments_of_names(&self, of: PictureId) -> RangeInclusive<usize> {
        if self.history.manners.is_ordered {
            return self.floor..=self.latest;
        }
        self.moments_since(|promise| {
            promise.of.is_none_or(|file| file == of && !promise.is_subvolume)
        })
    }

    /// The moments since the last kept promise that `is_made` selects.
    fn moments_since(&self, is_made: impl Fn(&DurablePromise) -> bool) -> RangeInclusive<usize> {
        let promises = self.kept.iter().map(|&kept| &self.history.promises[kept]);
        let since = promises.filter(|promise| is_made(promise)).map(|promise| promise.moment);
        since.max().unwrap_or(0)..=self.latest
    }

    /// The moments that the times of the file `of` may show.
    fn moments_of_times(&self, of: PictureId) -> RangeInclusive<usize> {
        self.moments_since(|promise| promise.has_times && promise.of.is_none_or(|file| file == of))
    }

    /// The versions of a file at these moments, without those in which it is not there.
    fn versions(&self, id: PictureId, moments: &RangeInclusive<usize>) -> Vec<&'a PictureFile> {
        let history = self.history;
        let found = history.index.versions(id, moments).flatten();
        found.map(|moment| &history.pictures[moment].files[&id]).collect()
    }

    fn files(&mut self, found: &Picture) {
        let mut found_names = FoundNames::new();
        for (name, id) in &found.names {
            found_names.entry(*id).or_default().insert(name);
        }
        let history = self.history;
        let known = history.index.files();
        let all: BTreeSet<PictureId> = known.chain(found.files.keys().copied()).collect();
        for id in all {
            self.size_of_directory(found, id);
            let moments = self.moments(id);
            let latest = &history.pictures[self.latest];
            let of = || format!("file {id} ({})", latest.path(id));
            let versions = self.versions(id, &moments);
            let shown = self.moments_of_metadata(id);
            let names = found_names.remove(&id).unwrap_or_default();
            match found.files.get(&id) {
                None if history.index.versions(id, &shown).all(|version| version.is_some())
                    && !self.may_lose(id, &shown) =>
                {
                    self.problems.push(format!("{} is lost", of()));
                }
                None => {}
                Some(_) if versions.is_empty() => {
                    self.problems.push(format!("{} is there, which it never was since", of()));
                }
                Some(file) => {
                    self.attributes(&of, file, &self.versions(id, &shown));
                    self.file(&of, file, names.len(), &versions);
                    self.times(&of, id, file);
                    self.settings(&of, id, file);
                }
            }
            self.names_of(&of, &names, id);
        }
    }

    /// Whether a file may be lost although it always had a name.
    fn may_lose(&self, id: PictureId, moments: &RangeInclusive<usize>) -> bool {
        let sets = self.history.index.name_sets(id, moments);
        let counts: Vec<_> = sets.map(|names| names.map_or(0, BTreeSet::len)).collect();
        self.history.whose == PromiseMaker::Kernels
            && counts.windows(2).any(|pair| pair[1] < pair[0])
    }

    /// Checks the names of a file, by rule 1.
    fn names_of(&mut self, of: ProblemSubject<'_>, found: &BTreeSet<&PictureName>, id: PictureId) {
        let moments = self.moments_of_names(id);
        let none = BTreeSet::new();
        let sets = self.history.index.name_sets(id, &moments);
        let sets: Vec<_> = sets.map(|names| names.unwrap_or(&none)).collect();
        let is_of_moment =
            |name: &PictureName, is: bool| sets.iter().any(|set| set.contains(name) == is);
        let lost_a_name = sets.first().is_some_and(|first| {
            sets.iter().any(|set| first.iter().any(|name| !set.contains(name)))
        });
        // A log shows the names of a directory as they were when an `fsync` logged them. A name
        // that the file lost since is in no log, and then the last commit counts.
        let may_stay = |name: &PictureName| {
            let committed = *self.moments_since(|promise| promise.of.is_none()).start();
            let committed = &self.history.pictures[committed];
            let promises = self.kept.iter().map(|&kept| &self.history.promises[kept]);
            let mut logged = promises.filter(|promise| promise.of.is_some());
            self.history.whose == PromiseMaker::Kernels
                && found.contains(name)
                && (logged.any(|promise| self.history.pictures[promise.moment].leads(name, id))
                    || (lost_a_name && committed.leads(name, id)))
        };
        let mut all = sets.iter().copied().flatten().chain(found.iter().copied());
        if !all.all(|name| is_of_moment(name, found.contains(name)) || may_stay(name)) {
            self.problems.push(format!("{}: names {found:?}, which may be of {sets:?}", of()));
        }
    }

    fn attributes(&mut self, of: ProblemSubject<'_>, file: &PictureFile, all: &[&PictureFile]) {
        self.one_of(of, "attributes", &attributes(file), all.iter().map(|v| attributes(v)));
    }

    fn file(
        &mut self,
        of: ProblemSubject<'_>,
        file: &PictureFile,
        names: usize,
        versions: &[&PictureFile],
    ) {
        let all = || versions.iter().copied();
        self.one_of(of, "type", &file.kind, all().map(|v| v.kind));
        self.one_of(of, "target", &&file.target, all().map(|v| &v.target));
        if file.kind != FileType::Directory && file.nlink as usize != names {
            self.problems.push(format!("{} has {names} names and counts {}", of(), file.nlink));
        }
        if let Err(problem) = self.history.data(file, versions) {
            self.problems.push(format!("{}: {problem}", of()));
        }
        let least = all().map(|version| version.preallocated).min();
        // Blocks may be smaller than the sectors of the model.
        let is_exact =
            self.history.whose == PromiseMaker::Ours && !self.history.manners.is_overwriting;
        let written = if is_exact { 0 } else { 2 * SECTOR };
        if least.is_some_and(|least| file.preallocated + written < least) {
            let problem = format!("{} bytes are preallocated, of {least:?}", file.preallocated);
            self.problems.push(format!("{}: {problem}", of()));
        }
    }

    fn settings(&mut self, of: ProblemSubject<'_>, id: PictureId, file: &PictureFile) {
        let moments = self.moments_since(|promise| promise.of.is_none());
        let versions = self.versions(id, &moments).into_iter();
        self.one_of(of, "settings", &file.settings, versions.map(|version| version.settings));
    }

    fn times(&mut self, of: ProblemSubject<'_>, id: PictureId, file: &PictureFile) {
        let versions = self.versions(id, &self.moments_of_times(id));
        self.one_of(of, "mtime", &file.mtime, versions.iter().map(|v| v.mtime));
        self.one_of(of, "ctime", &file.ctime, versions.iter().map(|v| v.ctime));
    }

    /// Checks rule 8.
    fn replacements(&mut self, found: &Picture) {
        if self.history.whose == PromiseMaker::Kernels || self.history.manners.is_ordered {
            return;
        }
        let History { pictures, index, .. } = self.history;
        for replacement in index.replacements().iter().filter(|one| one.at <= self.latest) {
            let (at, id, name) = (replacement.at, replacement.file, &replacement.name);
            if !found.leads(name, id) {
                continue;
            }
            let versions = self.versions(id, &(at - 1..=pictures.len() - 1));
            if let Some(Err(problem)) =
                found.files.get(&id).map(|file| self.history.data(file, &versions))
            {
                let (dir, name) = (name.0, name.1.escape_ascii());
                let of = format!("file {id}, which took the name {name} in directory {dir}");
                self.problems.push(format!("{of} from another: {problem}"));
            }
        }
    }

    /// Checks the second half of rule 3.
    fn size_of_directory(&mut self, found: &Picture, id: PictureId) {
        let file = found.files.get(&id).filter(|file| file.kind == FileType::Directory);
        let Some(file) = file.filter(|_| self.history.manners.has_plain_directories()) else {
            return;
        };
        let names = found.names.keys().filter(|(dir, _)| *dir == id);
        let size = names.map(|(_, name)| 2 * name.len() as u64).sum();
        if file.size != size {
            let problem = format!("directory {id} counts {}, and its names {size}", file.size);
            self.problems.push(problem);
        }
    }

    /// Checks rule 2.
    fn names(&mut self, found: &Picture) {
        let History { pictures, index, .. } = self.history;
        let all: BTreeSet<&PictureName> = index.names().chain(found.names.keys()).collect();
        for name in all {
            let of = || format!("the name {} in directory {}", name.1.escape_ascii(), name.0);
            let moments = self.moments_of_metadata(name.0);
            let bindings = index.bindings(name, &moments);
            self.one_of(&of, "file", &found.names.get(name), bindings);
        }
        let moves = self.moves(found);
        let mut shown = BTreeMap::new();
        for name in moves.iter().flat_map(|one| [&one.old, &one.new]) {
            let is_of = |at: &usize| pictures[*at].names.get(name) == found.names.get(name);
            let moments = self.moments_of_metadata(name.0);
            shown.insert(name, moments.filter(is_of).collect::<Vec<_>>());
        }
        if !are_whole(&moves, &shown, &BTreeMap::new()) {
            self.problems.push("a file that moved has both names".into());
        }
    }

    /// The moves after which the found state has both names of the file. That is allowed only if
    /// the move gave the new name and a later operation gave the old name back.
    fn moves(&self, found: &Picture) -> Vec<&'a FileMove> {
        if self.history.whose == PromiseMaker::Kernels {
            return Vec::new();
        }
        let moves = self.history.index.moves().iter().filter(|one| one.at <= self.latest);
        let has_both =
            |one: &&FileMove| found.leads(&one.old, one.file) && found.leads(&one.new, one.file);
        moves.filter(has_both).collect()
    }

    /// Checks rule 5.
    fn whole(&mut self, found: &Picture) {
        if self.history.manners.is_ordered {
            return self.one_moment(found, self.floor);
        }
        let is_sync = |kept: &&usize| self.history.promises[**kept].of.is_none();
        let behind_sync = self.kept.iter().filter(is_sync).max().map_or(0, |sync| sync + 1);
        let mut since_sync = self.history.promises[behind_sync..].iter();
        // If the last operation that had begun is done, an `fsync` right after it may have begun
        // too.
        if since_sync.any(|promise| promise.of.is_some() && promise.moment <= self.latest) {
            return;
        }
        let since = self.kept.iter().map(|&kept| self.history.promises[kept].moment).max();
        self.one_moment(found, since.unwrap_or(0));
    }

    /// Checks that all names and attributes are as of one moment from `since` on.
    fn one_moment(&mut self, found: &Picture, since: usize) {
        let moments = &self.history.pictures[since..=self.latest];
        if !moments.iter().any(|picture| are_alike(picture, found)) {
            self.problems.push("names and attributes are not altogether as of one moment".into());
        }
    }

    fn one_of<T: PartialEq + Debug>(
        &mut self,
        of: ProblemSubject<'_>,
        what: &str,
        found: &T,
        versions: impl Iterator<Item = T>,
    ) {
        let versions: Vec<T> = versions.collect();
        if !versions.contains(found) {
            let of = of();
            self.problems.push(format!("{of}: {what} {found:?}, which may be {versions:?}"));
        }
    }
}

/// Whether two pictures have the same names and attributes.
fn are_alike(one: &Picture, other: &Picture) -> bool {
    let is_alike = |one: &PictureFile, other: &PictureFile| {
        let PictureFile { permissions, flags, rdev, nlink, xattrs, settings, .. } = one;
        *permissions == other.permissions
            && *flags == other.flags
            && *rdev == other.rdev
            && *nlink == other.nlink
            && *xattrs == other.xattrs
            && *settings == other.settings
    };
    let mut pairs = one.files.iter().zip(&other.files);
    one.names == other.names
        && one.files.len() == other.files.len()
        && pairs.all(|((id, file), (other_id, other))| id == other_id && is_alike(file, other))
}

/// Whether each name can be assigned one of the moments that it shows, so that no move is half
/// done: if the new name of a move shows a moment after the move, the old name must do so too.
/// `chosen` holds the names that have their moment already.
fn are_whole<'a>(
    moves: &[&'a FileMove],
    shown: &BTreeMap<&'a PictureName, Vec<usize>>,
    chosen: &BTreeMap<&'a PictureName, usize>,
) -> bool {
    let is_half = |FileMove { at, old, new, .. }: &FileMove| {
        let is_behind = |name| chosen.get(name).map(|moment| moment >= at);
        is_behind(new) == Some(true) && is_behind(old) == Some(false)
    };
    if moves.iter().any(|one| is_half(one)) {
        return false;
    }
    let mut names = moves.iter().flat_map(|one| [&one.new, &one.old]);
    let Some(next) = names.find(|name| !chosen.contains_key(*name)) else { return true };
    let moments = shown.get(next).into_iter().flatten();
    moments.copied().any(|moment| {
        let mut chosen = chosen.clone();
        chosen.insert(next, moment);
        are_whole(moves, shown, &chosen)
    })
}

/// The attributes that an `fsync` of a file makes durable together.
fn attributes(file: &PictureFile) -> (u32, FileFlags, (u32, u32), &PromisedXattrs) {
    (file.permissions, file.flags, file.rdev, &file.xattrs)
}
