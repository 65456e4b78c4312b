//! What an actor does with subvolumes.
//!
//! Its subvolumes stand beside each other: none is in one that it made, so no snapshot shows the
//! place of another one. Nobody else works in them, so a snapshot holds the same on both sides.

use offshoot_vfs::{FileId, FileSystem, Place, Result};

use super::super::subvolumes::Subvolumes;
use super::{Actor, Pair};

impl<'a> Actor<'a> {
    /// The actor makes subvolumes and snapshots too, deletes them, and sets whether they may be
    /// changed; `ours` does that to the filesystem.
    #[must_use]
    pub fn with_subvolumes(self, ours: &'a dyn Subvolumes) -> Self {
        Self { subvolumes: Some(ours), ..self }
    }

    /// As [`both`](Self::both), for the calls of subvolumes.
    fn both_subvolumes<T>(
        &self,
        what: &'static str,
        ours: &dyn Subvolumes,
        call: impl Fn(&dyn Subvolumes, &dyn Fn(Pair) -> FileId) -> Result<T>,
    ) -> Option<(T, T)> {
        (self.tell)(what);
        self.agree(what, call(ours, &|pair: Pair| pair.ours), || {
            call(self.model, &|pair: Pair| pair.model)
        })
    }

    /// A directory that is in the subvolume where the actor works.
    fn outer_dir(&mut self) -> Pair {
        let dir = self.dir();
        let is_outer = self.model.are_in_one_subvolume(dir.model, self.root.model);
        if is_outer { dir } else { self.root }
    }

    /// A subvolume of the actor, if it comes upon one.
    fn subvolume(&mut self) -> Option<Pair> {
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
                    fs.create_subvolume(Place { dir: of(dir), name: &name }, &new)
                });
            }
            3..7 => {
                let Some(source) = self.subvolume() else { return };
                let (dir, name) = (self.outer_dir(), self.name());
                let is_read_only = self.random.below(3) == 0;
                self.both_subvolumes("snapshot", ours, |fs, of| {
                    fs.snapshot(of(source), Place { dir: of(dir), name: &name }, is_read_only, at)
                });
            }
            7 => {
                let (dir, name) = (self.outer_dir(), self.name());
                self.close_subvolume(dir, &name);
                self.both_subvolumes("delete_subvolume", ours, |fs, of| {
                    fs.delete_subvolume(Place { dir: of(dir), name: &name }, at)
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
                // Nor does what loses its last name here go as long as nobody may change it.
                self.close_all_in(root);
                self.both_subvolumes("set_read_only", ours, |fs, of| {
                    fs.set_read_only(of(root), is_read_only)
                });
            }
        }
    }

    /// The subvolume that a mount shows is this one.
    fn assert_default(&self, ours: &dyn Subvolumes, root: Pair) {
        let default = self.both_subvolumes("default", ours, |fs, _| fs.default());
        assert_eq!(default, Some((root.ours, root.model)), "the default subvolume");
    }

    /// Has a mount show what it showed first. Only one actor changes that, because there is one of
    /// it.
    pub(super) fn leave_default(&self) {
        if let Some(ours) = self.subvolumes.filter(|_| self.number == 0) {
            let root = Pair { ours: self.ours.root(), model: self.model.root() };
            self.both_subvolumes("set_default", ours, |fs, of| fs.set_default(of(root)));
            self.assert_default(ours, root);
        }
    }

    /// Lets go of what is open in the subvolume of this name, if there is one.
    pub(super) fn close_subvolume(&mut self, dir: Pair, name: &[u8]) {
        if let Some(root) = self.find(dir, name).filter(|root| self.model.is_subvolume(root.model))
        {
            self.close_all_in(root);
        }
    }

    /// Lets go of what is open in a subvolume.
    fn close_all_in(&mut self, root: Pair) {
        let is_in = |file: &Pair| self.model.are_in_one_subvolume(file.model, root.model);
        let (closed, kept): (Vec<_>, Vec<_>) = self.opened.iter().partition(|file| is_in(file));
        self.opened = kept;
        for file in closed {
            self.both("release", |fs, of| fs.release(of(file)));
        }
    }

    /// Whether a move is one of those that are tried: a subvolume goes only beside its like,
    /// whichever of the two names it has.
    pub(super) fn may_move(&self, from: (Pair, &[u8]), to: (Pair, &[u8])) -> bool {
        let is_outer =
            |(dir, _): (Pair, &[u8])| self.model.are_in_one_subvolume(dir.model, self.root.model);
        let is_subvolume = |(dir, name): (Pair, &[u8])| {
            self.find(dir, name).is_some_and(|file| self.model.is_subvolume(file.model))
        };
        let both = [from, to];
        both.into_iter().all(is_outer) || !both.into_iter().any(is_subvolume)
    }
}
