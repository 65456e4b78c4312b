//! The files of a damaged volume, with those whose names are lost.
//!
//! It shows what a [`Filesystem`] shows, and besides:
//!
//! - in a directory, the names that it has lost and that its files still have,
//! - in the root, a directory `lost+found`. It has a directory for each subvolume with files that
//!   have no name any more. They are called by their inode numbers there; the root directory of a
//!   subvolume that stands nowhere is 256.
//!
//! | in a leaf that cannot be read | what is shown |
//! |---|---|
//! | the entry of a file | the file, by the name that it has itself |
//! | the inode item | a file of root that nobody else may use, with the data that is left |
//! | the name in the inode | the file, where its entry is |
//! | the entry and the name | the file, in `lost+found` |
//! | a whole directory | the directory in `lost+found`, with the files that name it as theirs |
//!
//! What is lost is found by a [`NameSurvey`] of each subvolume, which reads all of its tree. The
//! numbers of the directories that are made here are above those of all inodes.

mod survey;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_vfs::path::climb;
use offshoot_vfs::{
    Attr, DirEntry, Errno, Error, FileFlags, FileId, FileSystem, FileType, Parent, ReadOnlyFiles,
    Result, StatFs, Timestamp,
};

use super::{BtrfsVolume, Filesystem};
use crate::{SubvolumeId, inode, subvolume};
use survey::NameSurvey;

/// The inode numbers of directories that are made here, and the cookies of entries that are added.
const ADDED: u64 = 1 << 62;
/// The number of `lost+found`.
const LOST_AND_FOUND: u64 = ADDED + 1;
/// The number of a directory in `lost+found`; its device is the subvolume.
const OF_SUBVOLUME: u64 = ADDED + 2;

/// The files of a damaged volume, see the top of this file.
pub struct RecoveredFiles {
    fs: Filesystem,
    lost_and_found: Vec<u8>,
    surveys: BTreeMap<u64, NameSurvey>,
}

impl RecoveredFiles {
    /// The files of the subvolume `root`, and those in it that have no name any more. For the top
    /// level, those of all subvolumes. This reads all trees of them.
    ///
    /// # Errors
    /// When there is no such subvolume, or when the volume is not open to be read around damage and
    /// something is damaged.
    pub fn open(volume: &Arc<BtrfsVolume>, root: SubvolumeId) -> Result<Arc<Self>> {
        let fs = Filesystem::new(volume.clone(), root);
        volume.tree(root)?;
        let mut surveys = BTreeMap::from([(root.0, NameSurvey::of(volume, root)?)]);
        if root == TreeId::FS {
            survey_all(volume, &fs, &mut surveys)?;
        }
        surveys.retain(|_, survey| !survey.is_empty());
        let mut lost_and_found = b"lost+found".to_vec();
        while fs.lookup(fs.root(), &lost_and_found).is_ok() {
            lost_and_found.push(b'_');
        }
        Ok(Arc::new(Self { fs, lost_and_found, surveys }))
    }

    /// The same, for callers that take files that can be changed. Each change is refused.
    #[must_use]
    pub fn read_only(self: &Arc<Self>) -> ReadOnlyFiles<Arc<Self>> {
        ReadOnlyFiles::new(self.clone())
    }

    /// How many files there are in `lost+found`.
    #[must_use]
    pub fn orphans(&self) -> usize {
        self.surveys.values().map(|survey| survey.orphans.len()).sum()
    }

    /// The files whose inodes are lost, and are inferred from what is left of them. Their sizes may
    /// be too large by less than a sector.
    #[must_use]
    pub fn inferred(&self) -> Vec<FileId> {
        let surveys = self.surveys.iter();
        let of = |(&dev, survey): (&u64, &NameSurvey)| {
            survey.inferred.iter().map(|&ino| FileId { dev, ino }).collect::<Vec<_>>()
        };
        surveys.flat_map(of).collect()
    }

    /// Whether there were more lost names than are kept.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.surveys.values().any(|survey| survey.is_cut)
    }

    /// The path of `file` from the root, by one of its names, without a leading slash. A file that
    /// has lost its own name has that of its entry, or its place in `lost+found`.
    ///
    /// # Errors
    /// `ENOENT` when nothing leads to it; other errors when a directory above it cannot be read.
    pub fn path_of(&self, file: FileId) -> Result<Vec<u8>> {
        /// Longer than any path that is shown.
        const PATH_MAX: usize = 1 << 20;
        let gone = || Error::posix(Errno::NOENT, format!("a name of {file}"));
        let place = match self.recorded_place(file) {
            Some(place) => place,
            None => inode::one_name(self.fs.volume(), file)?.ok_or_else(gone)?,
        };
        let mut path = climb(self, self.root(), place.dir, PATH_MAX)?.ok_or_else(gone)?;
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(&place.name);
        Ok(path)
    }

    /// Where a file is that has lost its own name.
    fn recorded_place(&self, file: FileId) -> Option<Parent> {
        let survey = self.survey(file.dev)?;
        if survey.orphans.contains(&file.ino) {
            let dir = FileId { dev: file.dev, ino: OF_SUBVOLUME };
            return Some(Parent { dir, name: file.ino.to_string().into_bytes() });
        }
        survey.parents.get(&file.ino).cloned()
    }

    fn lost_and_found(&self) -> FileId {
        FileId { dev: self.fs.root().dev, ino: LOST_AND_FOUND }
    }

    fn survey(&self, dev: u64) -> Option<&NameSurvey> {
        self.surveys.get(&dev)
    }

    /// Whether a directory is one that is made here, or whose own items are all lost.
    fn is_made(&self, dir: FileId) -> bool {
        let is_known =
            || self.survey(dir.dev).is_some_and(|survey| survey.names_in(dir.ino).is_some());
        dir == self.lost_and_found()
            || dir.ino == OF_SUBVOLUME
            || is_known() && self.fs.attr(dir).is_err()
    }

    /// The entries that are added to `dir`, each with its name.
    fn added(&self, dir: FileId) -> Vec<(Vec<u8>, FileId)> {
        let orphaned = || self.surveys.iter().filter(|(_, survey)| !survey.orphans.is_empty());
        if dir == self.lost_and_found() {
            let of = |dev: u64| (dev.to_string().into_bytes(), FileId { dev, ino: OF_SUBVOLUME });
            return orphaned().map(|(dev, _)| of(*dev)).collect();
        }
        let Some(survey) = self.survey(dir.dev) else { return self.in_root(dir) };
        if dir.ino == OF_SUBVOLUME {
            let of = |&ino: &u64| (ino.to_string().into_bytes(), FileId { dev: dir.dev, ino });
            return survey.orphans.iter().map(of).collect();
        }
        let names = survey.names_in(dir.ino).unwrap_or_default();
        let found = names.iter().map(|found| (found.name.clone(), found.file));
        found.chain(self.in_root(dir)).collect()
    }

    /// The entry of `lost+found`, if `dir` is the root and it has something.
    fn in_root(&self, dir: FileId) -> Vec<(Vec<u8>, FileId)> {
        let has_some = self.surveys.values().any(|survey| !survey.orphans.is_empty());
        if dir == self.fs.root() && has_some {
            vec![(self.lost_and_found.clone(), self.lost_and_found())]
        } else {
            Vec::new()
        }
    }

    fn made_attr(file: FileId) -> Attr {
        let never = Timestamp { secs: 0, nanos: 0 };
        Attr {
            file,
            file_type: FileType::Directory,
            permissions: 0o700,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            size: 0,
            allocated_bytes: 0,
            atime: never,
            mtime: never,
            ctime: never,
            btime: never,
            generation: 0,
        }
    }
}

/// Surveys all subvolumes, and finds those that stand nowhere.
fn survey_all(
    volume: &Arc<BtrfsVolume>,
    fs: &Filesystem,
    surveys: &mut BTreeMap<u64, NameSurvey>,
) -> Result<()> {
    for info in volume.subvolumes() {
        let Ok(info) = info else { continue };
        if info.id != TreeId::FS {
            surveys.insert(info.id.0, NameSurvey::of(volume, info.id)?);
        }
    }
    for id in surveys.keys().copied().filter(|&id| id != TreeId::FS.0).collect::<Vec<_>>() {
        let own = FileId { dev: id, ino: inode::ROOT_DIR };
        let parent = subvolume::parent_of(volume, TreeId(id)).ok().flatten();
        if let Some(Parent { dir, name }) = &parent {
            if fs.lookup(*dir, name).is_ok_and(|found| found == own) {
                continue;
            }
            if fs.attr(*dir).is_ok()
                && let Some(survey) = surveys.get_mut(&dir.dev)
            {
                survey.add_name(dir.ino, name, own);
                continue;
            }
        }
        if let Some(survey) = surveys.get_mut(&id) {
            survey.orphans.insert(inode::ROOT_DIR);
        }
    }
    Ok(())
}

impl FileSystem for RecoveredFiles {
    fn root(&self) -> FileId {
        self.fs.root()
    }

    fn reuses_numbers(&self) -> bool {
        false
    }

    fn statfs(&self) -> Result<StatFs> {
        self.fs.statfs()
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        let found = if self.is_made(dir) {
            Err(Error::posix(Errno::NOENT, format!("`{}` in {dir}", name.escape_ascii())))
        } else {
            self.fs.lookup(dir, name)
        };
        found.or_else(|error| {
            let added = self.added(dir).into_iter().find(|(added, _)| added == name);
            added.map(|(_, file)| file).ok_or(error)
        })
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        let place = |dir, name: Vec<u8>| Ok(Some(Parent { dir, name }));
        if dir == self.root() {
            return Ok(None);
        }
        if dir == self.lost_and_found() {
            return place(self.root(), self.lost_and_found.clone());
        }
        if dir.ino == OF_SUBVOLUME {
            return place(self.lost_and_found(), dir.dev.to_string().into_bytes());
        }
        self.recorded_place(dir).map_or_else(|| self.fs.parent(dir), |place| Ok(Some(place)))
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        if self.is_made(file) { Ok(Self::made_attr(file)) } else { self.fs.attr(file) }
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        if self.is_made(file) { Ok(FileFlags::empty()) } else { self.fs.flags(file) }
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut has_ended = false;
        if after < ADDED && !self.is_made(dir) {
            self.fs.read_dir(dir, after, &mut |entry| {
                // Only a damaged entry has such an index.
                if entry.cookie >= ADDED {
                    return ControlFlow::Break(());
                }
                let flow = visit(entry);
                has_ended = flow.is_break();
                flow
            })?;
        }
        if has_ended {
            return Ok(());
        }
        for (cookie, (name, file)) in (ADDED + 1..).zip(self.added(dir)) {
            if cookie <= after {
                continue;
            }
            // A file without an inode fails when it is read, and is told then.
            let file_type = self.attr(file).map_or(FileType::Regular, |attr| attr.file_type);
            let entry = DirEntry { name: &name, file, file_type, cookie };
            if visit(entry).is_break() {
                break;
            }
        }
        Ok(())
    }

    offshoot_vfs::forward_contents!(fs);

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        if self.is_made(file) { Ok(()) } else { self.fs.xattrs(file, visit) }
    }
}
