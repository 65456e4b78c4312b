//! What is there while a workload is put together, and what has to be done so that something else is.

use std::collections::BTreeMap;

use super::Op;
use crate::crash::workload::split;

/// What an operation needs to be possible, and to be what its description says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// Nothing is there; the directory for it is.
    Absent(&'static str),
    /// A regular file with data, of which the length is given when it has to be made.
    File(&'static str, usize),
    /// A directory.
    Dir(&'static str),
    /// A directory without entries.
    EmptyDir(&'static str),
    /// The second is another name of the first.
    Linked(&'static str, &'static str),
    /// The file or directory has this extended attribute.
    Xattr(&'static str, &'static str),
    /// The file is open.
    Opened(&'static str),
}

/// What stands at a path: directories, and files by a number that all names of one share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Is {
    Dir,
    Symlink,
    File(usize),
}

/// What is there.
#[derive(Debug, Default)]
pub(super) struct Tree {
    paths: BTreeMap<String, Is>,
    made: usize,
}

impl Tree {
    /// Does what is missing of `needs`, and tells what that was.
    pub(super) fn ensure(&mut self, needs: &[Need]) -> Vec<Op> {
        let mut ops = Vec::new();
        for need in needs {
            self.ensure_one(need, &mut ops);
        }
        ops
    }

    /// Something was done.
    pub(super) fn note(&mut self, op: &Op) {
        match op {
            Op::Create(path) | Op::Unnamed(path) => {
                self.made += 1;
                self.paths.insert(path.clone(), Is::File(self.made));
            }
            Op::Mkdir(path) => drop(self.paths.insert(path.clone(), Is::Dir)),
            Op::Symlink(path) => drop(self.paths.insert(path.clone(), Is::Symlink)),
            Op::Link(old, new) => drop(self.paths.insert(new.clone(), self.paths[old])),
            Op::Unlink(path) | Op::Rmdir(path) => drop(self.paths.remove(path)),
            Op::Rename(from, to) => self.rename(from, to),
            Op::Exchange(one, other) => {
                // A name that nothing else has.
                self.rename(one, "aside");
                self.rename(other, one);
                self.rename("aside", other);
            }
            Op::Open(_)
            | Op::NoCow(_)
            | Op::Write { .. }
            | Op::Truncate(..)
            | Op::Fallocate { .. }
            | Op::Copy(..)
            | Op::SetXattr(..)
            | Op::RemoveXattr(..)
            | Op::Chmod(..) => {}
        }
    }

    fn rename(&mut self, from: &str, to: &str) {
        let is = self.paths[from];
        if is == Is::Dir {
            for child in self.children(from) {
                self.rename(&child, &child.replacen(from, to, 1));
            }
        } else if self.paths.get(to) == Some(&is) {
            // Two names of one file: nothing happens.
            return;
        }
        self.paths.remove(from);
        self.paths.insert(to.to_owned(), is);
    }

    fn children(&self, dir: &str) -> Vec<String> {
        self.paths.keys().filter(|path| split(path).0 == dir).cloned().collect()
    }

    fn act(&mut self, op: Op, ops: &mut Vec<Op>) {
        self.note(&op);
        ops.push(op);
    }

    fn ensure_one(&mut self, need: &Need, ops: &mut Vec<Op>) {
        match *need {
            Need::Absent(path) => {
                self.dir(split(path).0, ops);
                self.remove(path, ops);
            }
            Need::File(path, len) => self.file(path, len, ops),
            Need::Dir(path) => self.dir(path, ops),
            Need::EmptyDir(path) => {
                self.dir(path, ops);
                for child in self.children(path) {
                    self.remove(&child, ops);
                }
            }
            Need::Linked(old, new) => {
                if self.paths.get(old) != self.paths.get(new) {
                    self.dir(split(new).0, ops);
                    self.remove(new, ops);
                    self.act(Op::Link(old.to_owned(), new.to_owned()), ops);
                }
            }
            Need::Xattr(path, name) => {
                self.act(Op::SetXattr(path.to_owned(), name.to_owned(), 20), ops);
            }
            Need::Opened(path) => self.act(Op::Open(path.to_owned()), ops),
        }
    }

    fn dir(&mut self, path: &str, ops: &mut Vec<Op>) {
        if path.is_empty() || self.paths.get(path) == Some(&Is::Dir) {
            return;
        }
        self.dir(split(path).0, ops);
        self.remove(path, ops);
        self.act(Op::Mkdir(path.to_owned()), ops);
    }

    fn file(&mut self, path: &str, len: usize, ops: &mut Vec<Op>) {
        if matches!(self.paths.get(path), Some(Is::File(_))) {
            return;
        }
        self.dir(split(path).0, ops);
        self.remove(path, ops);
        self.act(Op::Create(path.to_owned()), ops);
        if len > 0 {
            self.act(Op::Write { path: path.to_owned(), offset: 0, len }, ops);
        }
    }

    fn remove(&mut self, path: &str, ops: &mut Vec<Op>) {
        match self.paths.get(path) {
            None => {}
            Some(Is::Dir) => {
                for child in self.children(path) {
                    self.remove(&child, ops);
                }
                self.act(Op::Rmdir(path.to_owned()), ops);
            }
            Some(Is::File(_) | Is::Symlink) => self.act(Op::Unlink(path.to_owned()), ops),
        }
    }
}
