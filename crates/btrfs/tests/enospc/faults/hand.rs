//! A thread that knows what it did, and which of it a failure may leave.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs::Filesystem;
use offshoot_testkit::random::Random;
use offshoot_vfs::{EntryPlace, FileId, FileSystem, FileSystemMut};

use super::FaultedOutcome;
use crate::worker::{AT, NEW};

/// Names, and the identities of the files that they lead to.
type NamedFiles = BTreeMap<String, u64>;

/// A change of names.
#[derive(Clone)]
enum NameChange {
    Made(String, u64),
    Moved(String, String),
    Gone(String),
}

#[derive(Clone)]
pub(super) struct Hand {
    dir: FileId,
    random: Random,
    /// The names that exist now.
    names: NamedFiles,
    /// The length of every file, by its identity.
    lens: BTreeMap<u64, usize>,
    next: u64,
    /// The names and lengths at the last sync, and the changes since.
    synced: NamedFiles,
    synced_lens: BTreeMap<u64, usize>,
    changes: Vec<NameChange>,
}

impl Hand {
    pub(super) fn new(dir: FileId, seed: u64) -> Self {
        let (names, lens, synced, synced_lens, changes) = Default::default();
        Self { dir, random: Random::new(seed), names, lens, next: 0, synced, synced_lens, changes }
    }

    /// Notes that everything so far is on the devices.
    pub(super) fn synced(&mut self) {
        self.synced.clone_from(&self.names);
        self.synced_lens.clone_from(&self.lens);
        self.changes.clear();
    }

    /// Bytes that only this file has.
    fn bytes(id: u64, len: usize) -> Vec<u8> {
        Random::new(id).bytes(len)
    }

    /// Does one operation, most often one that takes room.
    pub(super) fn act(&mut self, fs: &Filesystem) -> FaultedOutcome {
        let some = self.some_name();
        let (outcome, change) = match (self.random.below(8), some) {
            (0, Some(name)) => {
                let gone = fs.unlink(self.place(&name), AT);
                (FaultedOutcome::of(fs, &gone), NameChange::Gone(name))
            }
            (1, Some(name)) => {
                let to = self.new_name();
                let moved = fs.rename(self.place(&name), self.place(&to), AT);
                (FaultedOutcome::of(fs, &moved), NameChange::Moved(name, to))
            }
            (2..5, Some(name)) => return self.write(fs, &name),
            _ => {
                let (name, id) = (self.new_name(), self.next);
                let made = fs.create(self.place(&name), &NEW);
                (FaultedOutcome::of(fs, &made), NameChange::Made(name, id))
            }
        };
        if outcome == FaultedOutcome::Done {
            apply(&mut self.names, &change);
            self.changes.push(change);
        }
        outcome
    }

    /// One of the names. A name that was made early is as likely as one that was made late.
    fn some_name(&mut self) -> Option<String> {
        let number = 1 + self.random.below(self.next.max(1));
        let mut names = self.names.range(name(number)..).chain(&self.names);
        names.next().map(|(name, _)| name.clone())
    }

    fn place<'n>(&self, name: &'n str) -> EntryPlace<'n> {
        EntryPlace { dir: self.dir, name: name.as_bytes() }
    }

    fn new_name(&mut self) -> String {
        self.next += 1;
        name(self.next)
    }

    /// Makes a file longer.
    fn write(&mut self, fs: &Filesystem, name: &str) -> FaultedOutcome {
        let id = self.names[name];
        let len = self.lens.get(&id).copied().unwrap_or(0);
        let more = 1 + usize::try_from(self.random.below(20_000)).expect("small");
        let bytes = Self::bytes(id, len + more);
        let file = fs.lookup(self.dir, name.as_bytes());
        let written = file.and_then(|file| fs.write(file, len as u64, &bytes[len..], AT));
        if written.is_ok() {
            self.lens.insert(id, len + more);
        }
        FaultedOutcome::of(fs, &written)
    }

    /// Requires that the directory holds what was synced, with the first so many changes since, or
    /// with all of them if `needs_all` is set. Every file has the length of then, or a later one
    /// that write-back stored, and holds its own bytes.
    pub(super) fn assert_left(&self, fs: &Filesystem, needs_all: bool) {
        let found = self.found(fs);
        let is_it = |names: &NamedFiles| names.keys().eq(found.iter().map(|(name, _)| name));
        let mut names = self.synced.clone();
        let mut left = is_it(&names).then(|| names.clone());
        for change in &self.changes {
            apply(&mut names, change);
            left = if is_it(&names) { Some(names.clone()) } else { left };
        }
        let left = left.expect("the names are those of a moment");
        assert!(!needs_all || left == self.names, "something is lost");
        for (name, file) in found {
            self.assert_file(fs, left[&name], file, needs_all);
        }
    }

    /// The entries of the directory, sorted.
    fn found(&self, fs: &Filesystem) -> Vec<(String, FileId)> {
        let mut found = Vec::new();
        fs.read_dir(self.dir, 0, &mut |entry| {
            found.push((String::from_utf8(entry.name.to_vec()).expect("plain"), entry.file));
            ControlFlow::Continue(())
        })
        .expect("it reads");
        found.sort();
        found
    }

    /// Removes all entries of the directory.
    pub(super) fn remove_all(&self, fs: &Filesystem) {
        for (name, _) in self.found(fs) {
            fs.unlink(self.place(&name), AT).expect("it is there");
        }
    }

    fn assert_file(&self, fs: &Filesystem, id: u64, file: FileId, needs_all: bool) {
        let len = |lens: &BTreeMap<u64, usize>| lens.get(&id).copied().unwrap_or(0);
        let (synced, len) = (len(&self.synced_lens), len(&self.lens));
        let least = if needs_all { len } else { synced };
        let mut bytes = vec![0; len + 1];
        let count = fs.read(file, 0, &mut bytes).expect("it reads");
        assert!((least..=len).contains(&count), "{count} bytes in {id}, and not {least} to {len}");
        assert!(bytes[..count] == Self::bytes(id, len)[..count], "the bytes of {id}");
    }
}

fn name(number: u64) -> String {
    format!("{number:06}-a-file")
}

fn apply(names: &mut NamedFiles, change: &NameChange) {
    match change {
        NameChange::Made(name, id) => drop(names.insert(name.clone(), *id)),
        NameChange::Gone(name) => drop(names.remove(name)),
        NameChange::Moved(from, to) => {
            let id = names.remove(from).expect("it was there");
            names.insert(to.clone(), id);
        }
    }
}
