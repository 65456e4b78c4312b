//! Tracks which files exist while a workload is put together, and finds the operations that make a
//! needed state.

use std::collections::BTreeMap;

use offshoot_vfs::FileFlags;

use super::WorkloadOp;
use crate::crash::workload::split;

/// What must be true before an operation, so that it is possible and does what its description
/// says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OpNeed {
    /// The path is free, and its directory exists.
    Absent(&'static str),
    /// A regular file with data, copied on write and not protected by flags. If it has to be made,
    /// it gets this length in bytes.
    File(&'static str, usize),
    /// A regular file whose data is written in place. If it has to be made, it gets this length.
    InPlace(&'static str, usize),
    /// A new file without data.
    Empty(&'static str),
    /// The second file begins with the data of the first, in space of its own.
    Same(&'static str, &'static str),
    /// A directory.
    Dir(&'static str),
    /// A directory without entries.
    EmptyDir(&'static str),
    /// The second is another name of the first.
    Linked(&'static str, &'static str),
    /// The file or directory has this extended attribute.
    Xattr(&'static str, &'static str),
    /// The file or directory has an access control list.
    Acl(&'static str),
    /// The file or directory has a compression property.
    Compression(&'static str),
    /// The file is open.
    Opened(&'static str),
    /// A subvolume that is not read-only.
    Subvolume(&'static str),
    /// The second is a subvolume that was made as a snapshot of the first, or of an earlier
    /// subvolume with its name.
    Snapshot(&'static str, &'static str),
    /// There is no subvolume below the directory.
    NoneBelow(&'static str),
    /// The subvolume is read-only.
    ReadOnly(&'static str),
    /// The subvolume is the default one, which a mount without options shows.
    Default(&'static str),
    /// The subvolume is not the default one.
    NotDefault(&'static str),
    /// The two paths, or the files that will be there, are in one subvolume.
    Together(&'static str, &'static str),
}

/// What a path leads to. A file has a number that all of its names share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathLead {
    Dir,
    Subvolume {
        is_read_only: bool,
        is_snapshot: bool,
        is_default: bool,
    },
    /// A symbolic link, a pipe or a device.
    Other,
    File(usize),
}

impl PathLead {
    fn is_directory(self) -> bool {
        matches!(self, Self::Dir | Self::Subvolume { .. })
    }

    fn is_default(self) -> bool {
        matches!(self, Self::Subvolume { is_default: true, .. })
    }
}

fn is_below(path: &str, dir: &str) -> bool {
    dir.is_empty() || path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}

/// All paths, and what each leads to.
#[derive(Debug, Default)]
pub(super) struct PathTree {
    paths: BTreeMap<String, PathLead>,
    made: usize,
    /// The flags of files that have any.
    flags: BTreeMap<usize, FileFlags>,
}

impl PathTree {
    /// Adds what `needs` requires and is missing. Returns the operations that do so.
    pub(super) fn ensure(&mut self, needs: &[OpNeed]) -> Vec<WorkloadOp> {
        let mut ops = Vec::new();
        for need in needs {
            self.ensure_one(need, &mut ops);
        }
        ops
    }

    /// Updates the tree as `op` changes it.
    pub(super) fn note(&mut self, op: &WorkloadOp) {
        match op {
            WorkloadOp::Create(path) | WorkloadOp::Unnamed(path) => {
                self.made += 1;
                self.paths.insert(path.clone(), PathLead::File(self.made));
            }
            WorkloadOp::Mkdir(path) => drop(self.paths.insert(path.clone(), PathLead::Dir)),
            WorkloadOp::Subvolume(path) => {
                let is = PathLead::Subvolume {
                    is_read_only: false,
                    is_snapshot: false,
                    is_default: false,
                };
                self.paths.insert(path.clone(), is);
            }
            WorkloadOp::Snapshot { source, to, is_read_only } => {
                self.snapshot(source, to, *is_read_only);
            }
            WorkloadOp::DeleteSubvolume(path) => {
                self.paths.retain(|other, _| other != path && !is_below(other, path));
            }
            WorkloadOp::Symlink(path) | WorkloadOp::Fifo(path) | WorkloadOp::Device(path) => {
                self.paths.insert(path.clone(), PathLead::Other);
            }
            WorkloadOp::Link(old, new) => drop(self.paths.insert(new.clone(), self.paths[old])),
            WorkloadOp::Unlink(path) | WorkloadOp::Rmdir(path) => drop(self.paths.remove(path)),
            WorkloadOp::Rename(from, to) | WorkloadOp::RenameNoReplace(from, to) => {
                self.rename(from, to);
            }
            WorkloadOp::Exchange(one, other) => {
                // No other path has this name.
                self.rename(one, "aside");
                self.rename(other, one);
                self.rename("aside", other);
            }
            WorkloadOp::SetFlags(path, flags) => {
                if let Some(PathLead::File(number)) = self.paths.get(path) {
                    self.flags.insert(*number, *flags);
                }
            }
            WorkloadOp::SetReadOnly(path, is) => {
                if let Some(PathLead::Subvolume { is_read_only, .. }) = self.paths.get_mut(path) {
                    *is_read_only = *is;
                }
            }
            WorkloadOp::SetDefault(path) => {
                for (other, is) in &mut self.paths {
                    if let PathLead::Subvolume { is_default, .. } = is {
                        *is_default = other == path;
                    }
                }
            }
            WorkloadOp::Open(_)
            | WorkloadOp::Write { .. }
            | WorkloadOp::WriteDirect { .. }
            | WorkloadOp::WriteSame(..)
            | WorkloadOp::Truncate(..)
            | WorkloadOp::Fallocate { .. }
            | WorkloadOp::Copy(..)
            | WorkloadOp::Clone(_)
            | WorkloadOp::Dedupe(_)
            | WorkloadOp::SetAcl { .. }
            | WorkloadOp::SetCompression(..)
            | WorkloadOp::SetXattr(..)
            | WorkloadOp::RemoveXattr(..)
            | WorkloadOp::Chmod(..)
            | WorkloadOp::DropDeleted => {}
        }
    }

    fn rename(&mut self, from: &str, to: &str) {
        let is = self.paths[from];
        if is.is_directory() {
            for child in self.children(from) {
                self.rename(&child, &child.replacen(from, to, 1));
            }
        } else if self.paths.get(to) == Some(&is) {
            // Both are names of one file, so a rename does nothing.
            return;
        }
        self.paths.remove(from);
        self.paths.insert(to.to_owned(), is);
    }

    /// Everything below the source is below the snapshot too, as new files.
    fn snapshot(&mut self, source: &str, to: &str, is_read_only: bool) {
        let below = self.paths.range(source.to_owned()..);
        let below: Vec<_> = below
            .filter(|(path, _)| is_below(path, source))
            .map(|(path, &is)| (path.replacen(source, to, 1), is))
            .collect();
        let mut copies = BTreeMap::new();
        for (path, is) in below {
            let is = match is {
                PathLead::File(number) => {
                    PathLead::File(*copies.entry(number).or_insert_with(|| {
                        self.made += 1;
                        if let Some(&flags) = self.flags.get(&number) {
                            self.flags.insert(self.made, flags);
                        }
                        self.made
                    }))
                }
                is => is,
            };
            self.paths.insert(path, is);
        }
        let is = PathLead::Subvolume { is_read_only, is_snapshot: true, is_default: false };
        self.paths.insert(to.to_owned(), is);
    }

    /// Whether a path is in, or is, a read-only subvolume.
    fn is_read_only(&self, path: &str) -> bool {
        let subvolume = self.paths.get(self.subvolume_of(path));
        matches!(subvolume, Some(PathLead::Subvolume { is_read_only: true, .. }))
    }

    /// The flags of the file at a path, if that is one.
    fn flags(&self, path: &str) -> Option<FileFlags> {
        match self.paths.get(path) {
            Some(PathLead::File(number)) => {
                Some(self.flags.get(number).copied().unwrap_or_default())
            }
            _ => None,
        }
    }

    /// The path of the subvolume that contains a path; "" for the top-level one.
    fn subvolume_of<'p>(&self, mut path: &'p str) -> &'p str {
        while !path.is_empty() && !matches!(self.paths.get(path), Some(PathLead::Subvolume { .. }))
        {
            path = split(path).0;
        }
        path
    }

    fn subvolumes_below(&self, dir: &str) -> Vec<String> {
        let all = self.paths.iter().filter(|(_, is)| matches!(is, PathLead::Subvolume { .. }));
        all.map(|(path, _)| path).filter(|path| is_below(path, dir)).cloned().collect()
    }

    fn children(&self, dir: &str) -> Vec<String> {
        self.paths.keys().filter(|path| split(path).0 == dir).cloned().collect()
    }

    fn act(&mut self, op: WorkloadOp, ops: &mut Vec<WorkloadOp>) {
        self.note(&op);
        ops.push(op);
    }

    fn ensure_one(&mut self, need: &OpNeed, ops: &mut Vec<WorkloadOp>) {
        match *need {
            OpNeed::Absent(path) => {
                self.dir(split(path).0, ops);
                self.remove(path, ops);
            }
            OpNeed::File(path, len) => self.file(path, len, ops),
            OpNeed::InPlace(path, len) => {
                if self.flags(path) != Some(FileFlags::NODATACOW) || self.is_read_only(path) {
                    self.new_file(path, ops);
                    self.act(WorkloadOp::SetFlags(path.to_owned(), FileFlags::NODATACOW), ops);
                    self.act(WorkloadOp::Write { path: path.to_owned(), offset: 0, len }, ops);
                }
            }
            OpNeed::Empty(path) => self.new_file(path, ops),
            OpNeed::Same(from, to) => {
                self.act(WorkloadOp::WriteSame(from.to_owned(), to.to_owned()), ops);
            }
            OpNeed::Dir(path) => self.dir(path, ops),
            OpNeed::EmptyDir(path) => {
                self.dir(path, ops);
                self.let_go(path, ops);
                for child in self.children(path) {
                    self.remove(&child, ops);
                }
            }
            OpNeed::Linked(old, new) => {
                if self.paths.get(old) != self.paths.get(new) {
                    self.dir(split(new).0, ops);
                    self.remove(new, ops);
                    self.act(WorkloadOp::Link(old.to_owned(), new.to_owned()), ops);
                }
            }
            OpNeed::Xattr(path, name) => {
                self.act(WorkloadOp::SetXattr(path.to_owned(), name.to_owned(), 20), ops);
            }
            OpNeed::Acl(path) => {
                let (path, is_default, permissions) = (path.to_owned(), false, 0o750);
                self.act(WorkloadOp::SetAcl { path, is_default, permissions }, ops);
            }
            OpNeed::Compression(path) => {
                self.act(WorkloadOp::SetCompression(path.to_owned(), "zstd".to_owned()), ops);
            }
            OpNeed::Opened(path) => self.act(WorkloadOp::Open(path.to_owned()), ops),
            OpNeed::Subvolume(path) => self.subvolume(path, ops),
            OpNeed::Snapshot(source, to) => {
                let is_snapshot =
                    |is: &PathLead| matches!(is, PathLead::Subvolume { is_snapshot: true, .. });
                if !self.paths.get(to).is_some_and(is_snapshot) {
                    self.dir(split(to).0, ops);
                    self.remove(to, ops);
                    let (source, to) = (source.to_owned(), to.to_owned());
                    self.act(WorkloadOp::Snapshot { source, to, is_read_only: false }, ops);
                }
            }
            OpNeed::NoneBelow(dir) => {
                // Nested subvolumes sort behind the ones that contain them, so they are deleted
                // first.
                for path in self.subvolumes_below(dir).into_iter().rev() {
                    self.delete(path, ops);
                }
            }
            OpNeed::ReadOnly(path) => self.act(WorkloadOp::SetReadOnly(path.to_owned(), true), ops),
            OpNeed::Default(path) => self.act(WorkloadOp::SetDefault(path.to_owned()), ops),
            OpNeed::NotDefault(path) => self.let_go(path, ops),
            OpNeed::Together(one, other) => {
                for dir in [one, other] {
                    // Both paths may be in one subvolume above the two; then it stays.
                    while self.subvolume_of(one) != self.subvolume_of(other)
                        && let path = self.subvolume_of(dir).to_owned()
                        && !path.is_empty()
                    {
                        self.remove(&path, ops);
                        self.act(WorkloadOp::Mkdir(path), ops);
                    }
                }
            }
        }
    }

    fn dir(&mut self, path: &str, ops: &mut Vec<WorkloadOp>) {
        let is_directory = self.paths.get(path).is_some_and(|is| is.is_directory());
        if path.is_empty() || is_directory && !self.is_read_only(path) {
            return;
        }
        self.dir(split(path).0, ops);
        self.remove(path, ops);
        self.act(WorkloadOp::Mkdir(path.to_owned()), ops);
    }

    fn subvolume(&mut self, path: &str, ops: &mut Vec<WorkloadOp>) {
        let is_subvolume =
            |is: &PathLead| matches!(is, PathLead::Subvolume { is_read_only: false, .. });
        if !self.paths.get(path).is_some_and(is_subvolume) {
            self.dir(split(path).0, ops);
            self.remove(path, ops);
            self.act(WorkloadOp::Subvolume(path.to_owned()), ops);
        }
    }

    fn file(&mut self, path: &str, len: usize, ops: &mut Vec<WorkloadOp>) {
        let flags = self.flags(path).filter(|flags| !flags.contains(FileFlags::NODATACOW));
        if let Some(flags) = flags.filter(|_| !self.is_read_only(path)) {
            self.unlock(path, flags, ops);
            return;
        }
        self.new_file(path, ops);
        self.act(WorkloadOp::Write { path: path.to_owned(), offset: 0, len }, ops);
    }

    /// Replaces the file at a path, if any, by a new empty one.
    fn new_file(&mut self, path: &str, ops: &mut Vec<WorkloadOp>) {
        self.dir(split(path).0, ops);
        self.remove(path, ops);
        self.act(WorkloadOp::Create(path.to_owned()), ops);
    }

    /// Clears the flags of a file that forbid to change it.
    fn unlock(&mut self, path: &str, flags: FileFlags, ops: &mut Vec<WorkloadOp>) {
        if flags.intersects(FileFlags::IMMUTABLE | FileFlags::APPEND) {
            self.act(WorkloadOp::SetFlags(path.to_owned(), FileFlags::empty()), ops);
        }
    }

    /// Deletes a subvolume. The subvolume that contains it becomes writable first.
    fn delete(&mut self, path: String, ops: &mut Vec<WorkloadOp>) {
        self.let_go(&path, ops);
        let around = split(&path).0;
        if self.is_read_only(around) {
            let around = self.subvolume_of(around).to_owned();
            self.act(WorkloadOp::SetReadOnly(around, false), ops);
        }
        self.act(WorkloadOp::DeleteSubvolume(path), ops);
    }

    /// Makes another subvolume the default one: the default subvolume cannot be removed.
    fn let_go(&mut self, path: &str, ops: &mut Vec<WorkloadOp>) {
        if self.paths.get(path).is_some_and(|is| is.is_default()) {
            self.act(WorkloadOp::SetDefault(String::new()), ops);
        }
    }

    fn remove(&mut self, path: &str, ops: &mut Vec<WorkloadOp>) {
        match self.paths.get(path) {
            None => {}
            Some(PathLead::Dir) => {
                for child in self.children(path) {
                    self.remove(&child, ops);
                }
                self.act(WorkloadOp::Rmdir(path.to_owned()), ops);
            }
            Some(PathLead::Subvolume { .. }) => {
                for nested in self.subvolumes_below(path).into_iter().rev() {
                    self.delete(nested, ops);
                }
                self.delete(path.to_owned(), ops);
            }
            Some(PathLead::File(_) | PathLead::Other) => {
                self.unlock(path, self.flags(path).unwrap_or_default(), ops);
                self.act(WorkloadOp::Unlink(path.to_owned()), ops);
            }
        }
    }
}
