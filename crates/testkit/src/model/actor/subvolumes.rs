//! The operations of an actor on subvolumes.
//!
//! An actor never makes a subvolume inside another one of its own, so no snapshot shows an empty
//! directory in place of a nested subvolume. Only that actor works in its subvolumes, so a snapshot
//! holds the same on both sides.

use offshoot_vfs::{EntryPlace, FileId, FileSystem, Result};

use super::super::subvolumes::SubvolumeCalls;
use super::{Actor, ActorFile};

impl<'a> Actor<'a> {
    /// Lets the actor also make subvolumes and snapshots, delete them, and set whether they are
    /// read-only. `ours` makes these calls on the filesystem under test.
    #[must_use]
    pub fn with_subvolumes(self, ours: &'a dyn SubvolumeCalls) -> Self {
        Self { subvolumes: Some(ours), ..self }
    }

    /// Like [`both`](Self::both), for the calls on subvolumes.
    fn both_subvolumes<T>(
        &self,
        what: &'static str,
        ours: &dyn SubvolumeCalls,
        call: impl Fn(&dyn SubvolumeCalls, &dyn Fn(ActorFile) -> FileId) -> Result<T>,
    ) -> Option<(T, T)> {
        (self.tell)(what);
        self.agree(what, call(ours, &|pair: ActorFile| pair.ours), || {
            call(self.model, &|pair: ActorFile| pair.model)
        })
    }

    /// A directory in the subvolume in which the actor started.
    fn outer_dir(&mut self) -> ActorFile {
        let dir = self.dir();
        let is_outer = self.model.are_in_one_subvolume(dir.model, self.root.model);
        if is_outer { dir } else { self.root }
    }

    /// A subvolume of the actor, if one of eight random names leads to one.
    fn subvolume(&mut self) -> Option<ActorFile> {
        for _ in 0..8 {
            let (dir, name) = (self.outer_dir(), self.name());
            if let Some(found) =
                self.find(dir, &name).filter(|one| self.model.is_subvolume(one.model))
            {
                return Some(found);
            }
        }
        None
    }

    pub(super) fn change_subvolumes(&mut self) {
        let Some(ours) = self.subvolumes else { return };
        let at = self.at;
        match self.random.below(11) {
            0..3 => {
                let (dir, name, new) = (self.outer_dir(), self.name(), self.new_file());
                self.both_subvolumes("create_subvolume", ours, |fs, of| {
                    fs.create_subvolume(EntryPlace { dir: of(dir), name: &name }, &new)
                });
            }
            3..7 => {
                let Some(source) = self.subvolume() else { return };
                let (dir, name) = (self.outer_dir(), self.name());
                let is_read_only = self.random.below(3) == 0;
                self.both_subvolumes("snapshot", ours, |fs, of| {
                    fs.snapshot(
                        of(source),
                        EntryPlace { dir: of(dir), name: &name },
                        is_read_only,
                        at,
                    )
                });
            }
            7 => {
                let (dir, name) = (self.outer_dir(), self.name());
                self.close_subvolume(dir, &name);
                self.both_subvolumes("delete_subvolume", ours, |fs, of| {
                    fs.delete_subvolume(EntryPlace { dir: of(dir), name: &name }, at)
                });
            }
            8 if self.number == 0 => {
                let Some(root) = self.subvolume() else { return };
                self.both_subvolumes("set_default", ours, |fs, of| fs.set_default(of(root)));
                self.assert_default(ours, root);
            }
            _ => {
                let Some(root) = self.subvolume() else { return };
                let is_read_only = self.random.below(3) == 0;
                // An open file that loses its last name here could not be removed from a read-only
                // subvolume.
                self.close_all_in(root);
                self.both_subvolumes("set_read_only", ours, |fs, of| {
                    fs.set_read_only(of(root), is_read_only)
                });
            }
        }
    }

    /// Checks that both sides have this default subvolume, which a mount shows.
    fn assert_default(&self, ours: &dyn SubvolumeCalls, root: ActorFile) {
        let default = self.both_subvolumes("default", ours, |fs, _| fs.default());
        assert_eq!(default, Some((root.ours, root.model)), "the default subvolume");
    }

    /// Restores the first default subvolume. Only actor 0 changes it, because a volume has only
    /// one.
    pub(super) fn leave_default(&self) {
        if let Some(ours) = self.subvolumes.filter(|_| self.number == 0) {
            let root = ActorFile { ours: self.ours.root(), model: self.model.root() };
            self.both_subvolumes("set_default", ours, |fs, of| fs.set_default(of(root)));
            self.assert_default(ours, root);
        }
    }

    /// Releases the files that are open in the subvolume of this name, if there is one.
    pub(super) fn close_subvolume(&mut self, dir: ActorFile, name: &[u8]) {
        if let Some(root) = self.find(dir, name).filter(|root| self.model.is_subvolume(root.model))
        {
            self.close_all_in(root);
        }
    }

    /// Releases the files that are open in a subvolume.
    fn close_all_in(&mut self, root: ActorFile) {
        let is_in = |file: &ActorFile| self.model.are_in_one_subvolume(file.model, root.model);
        let (closed, kept): (Vec<_>, Vec<_>) = self.opened.iter().partition(|file| is_in(file));
        self.opened = kept;
        for file in closed {
            self.both("release", |fs, of| fs.release(of(file)));
        }
    }

    /// Whether the actor may try this move: it moves a subvolume only from one directory outside
    /// its subvolumes to another one. This holds for both names of an exchange.
    pub(super) fn may_move(&self, from: (ActorFile, &[u8]), to: (ActorFile, &[u8])) -> bool {
        let is_outer = |(dir, _): (ActorFile, &[u8])| {
            self.model.are_in_one_subvolume(dir.model, self.root.model)
        };
        let is_subvolume = |(dir, name): (ActorFile, &[u8])| {
            self.find(dir, name).is_some_and(|file| self.model.is_subvolume(file.model))
        };
        let both = [from, to];
        both.into_iter().all(is_outer) || !both.into_iter().any(is_subvolume)
    }
}
