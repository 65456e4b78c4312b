//! What the oracle looks up in all moments, computed once for all states of a workload.
//!
//! A long workload has hundreds of moments that differ in one file or one name each. So a state is
//! not compared with moments but with *versions*: the runs of moments in which a file is the same,
//! or in which a name leads to the same file.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use offshoot_vfs::FileType;

use crate::crash::picture::{Picture, PictureFile, PictureId, PictureName};

/// What a file or a name is from each of these moments on, up to the next; `None` where it is not
/// there.
type MomentVersions<T> = Vec<(usize, Option<T>)>;

/// The names of a file.
type NameSet = BTreeSet<PictureName>;

#[derive(Debug)]
pub(super) struct HistoryIndex {
    /// The versions of each file, as the moment in which each is found.
    files: BTreeMap<PictureId, MomentVersions<usize>>,
    /// The names of each file, from each moment on in which they change.
    names_of: BTreeMap<PictureId, MomentVersions<NameSet>>,
    /// The file that each name leads to.
    names: BTreeMap<PictureName, MomentVersions<PictureId>>,
    moves: Vec<FileMove>,
    replacements: Vec<FileReplacement>,
}

/// A rename of a file.
#[derive(Debug)]
pub(super) struct FileMove {
    /// The moment after the rename.
    pub(super) at: usize,
    pub(super) file: PictureId,
    pub(super) old: PictureName,
    pub(super) new: PictureName,
}

/// A rename of a regular file over another one, which takes its name for the first time.
#[derive(Debug)]
pub(super) struct FileReplacement {
    /// The moment after the rename.
    pub(super) at: usize,
    pub(super) file: PictureId,
    pub(super) name: PictureName,
}

impl HistoryIndex {
    /// The index of the moments `pictures`.
    pub(super) fn new(pictures: &[Picture]) -> Self {
        let mut index = Self {
            files: BTreeMap::new(),
            names_of: BTreeMap::new(),
            names: BTreeMap::new(),
            moves: Vec::new(),
            replacements: Vec::new(),
        };
        for (at, picture) in pictures.iter().enumerate() {
            let is_same = |id: &PictureId, file: &PictureFile, moment: usize| {
                pictures[moment].files.get(id) == Some(file)
            };
            for (id, file) in &picture.files {
                let versions = index.files.entry(*id).or_default();
                if !current(versions).is_some_and(|moment| is_same(id, file, *moment)) {
                    add(versions, at, at);
                }
            }
            end_missing(&mut index.files, at, |id| picture.files.contains_key(id));
            for (name, id) in &picture.names {
                let versions = index.names.entry(name.clone()).or_default();
                if current(versions) != Some(id) {
                    add(versions, at, *id);
                }
            }
            end_missing(&mut index.names, at, |name| picture.names.contains_key(name));
            let mut names_of = BTreeMap::<_, NameSet>::new();
            for (name, id) in &picture.names {
                names_of.entry(*id).or_default().insert(name.clone());
            }
            end_missing(&mut index.names_of, at, |id| names_of.contains_key(id));
            for (id, names) in names_of {
                let versions = index.names_of.entry(id).or_default();
                if current(versions) != Some(&names) {
                    add(versions, at, names);
                }
            }
        }
        for (at, (before, behind)) in (1..).zip(pictures.iter().zip(&pictures[1..])) {
            index.note_moves(at, before, behind);
            index.note_replacements(at, before, behind);
        }
        index
    }

    fn note_moves(&mut self, at: usize, before: &Picture, behind: &Picture) {
        for (old, &file) in before.names.iter().filter(|(old, id)| !behind.leads(old, **id)) {
            for new in behind.names_of(file) {
                if !before.leads(new, file) {
                    let (old, new) = (old.clone(), new.clone());
                    self.moves.push(FileMove { at, file, old, new });
                }
            }
        }
    }

    fn note_replacements(&mut self, at: usize, before: &Picture, behind: &Picture) {
        let is_regular =
            |id: &PictureId| before.files.get(id).is_some_and(|f| f.kind == FileType::Regular);
        // An exchange replaces nothing.
        let is_exchange = |other: PictureId| {
            let gained = behind.names_of(other);
            gained.iter().any(|name| !before.leads(name, other))
        };
        for (name, &file) in &behind.names {
            let Some(&other) = before.names.get(name).filter(|other| **other != file) else {
                continue;
            };
            let had_it_before =
                || self.names[name].iter().any(|(from, id)| *from < at && *id == Some(file));
            if is_regular(&file) && is_regular(&other) && !is_exchange(other) && !had_it_before() {
                self.replacements.push(FileReplacement { at, file, name: name.clone() });
            }
        }
    }

    /// All files of any moment.
    pub(super) fn files(&self) -> impl Iterator<Item = PictureId> {
        self.files.keys().copied()
    }

    /// All names of any moment.
    pub(super) fn names(&self) -> impl Iterator<Item = &PictureName> {
        self.names.keys()
    }

    /// All moves of files.
    pub(super) fn moves(&self) -> &[FileMove] {
        &self.moves
    }

    /// All replacements of files.
    pub(super) fn replacements(&self) -> &[FileReplacement] {
        &self.replacements
    }

    /// The versions of a file at these moments, as the moment in which each is found.
    pub(super) fn versions(
        &self,
        id: PictureId,
        moments: &RangeInclusive<usize>,
    ) -> impl Iterator<Item = Option<usize>> {
        at(self.files.get(&id), moments).map(Option::<&usize>::copied)
    }

    /// The sets of names that a file has at these moments; `None` for no names.
    pub(super) fn name_sets(
        &self,
        id: PictureId,
        moments: &RangeInclusive<usize>,
    ) -> impl Iterator<Item = Option<&NameSet>> {
        at(self.names_of.get(&id), moments)
    }

    /// The files that a name leads to at these moments.
    pub(super) fn bindings(
        &self,
        name: &PictureName,
        moments: &RangeInclusive<usize>,
    ) -> impl Iterator<Item = Option<&PictureId>> {
        at(self.names.get(name), moments)
    }
}

fn current<T>(versions: &MomentVersions<T>) -> Option<&T> {
    versions.last().and_then(|(_, version)| version.as_ref())
}

/// Adds a version that begins at the moment `at`.
fn add<T>(versions: &mut MomentVersions<T>, at: usize, version: T) {
    if versions.is_empty() && at > 0 {
        versions.push((0, None));
    }
    versions.push((at, Some(version)));
}

/// Ends the versions of everything that is not there at the moment `at`.
fn end_missing<K: Ord, T>(
    all: &mut BTreeMap<K, MomentVersions<T>>,
    at: usize,
    is_there: impl Fn(&K) -> bool,
) {
    for (key, versions) in all {
        if current(versions).is_some() && !is_there(key) {
            versions.push((at, None));
        }
    }
}

/// The versions that there are at these moments.
fn at<'v, T>(
    versions: Option<&'v MomentVersions<T>>,
    moments: &RangeInclusive<usize>,
) -> impl Iterator<Item = Option<&'v T>> + use<'v, T> {
    let all = versions.map_or(&[][..], Vec::as_slice);
    // The version at the first moment is the last one that begins no later.
    let first = all.partition_point(|(from, _)| from <= moments.start()).saturating_sub(1);
    let end = all.partition_point(|(from, _)| from <= moments.end());
    let never = all.is_empty().then_some(None);
    never.into_iter().chain(all[first..end].iter().map(|(_, version)| version.as_ref()))
}
