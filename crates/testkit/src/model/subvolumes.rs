//! Subvolumes, which not every filesystem has: the calls, and their implementation in the model.
//!
//! A subvolume is named by its root directory. The model does not support a snapshot of a subvolume
//! that contains another subvolume: other tests cover what a snapshot shows there.

use std::collections::BTreeMap;

use offshoot_vfs::{
    EntryPlace, Errno, FileId, FileType, NewFile, NewNode, Parent, Result, Timestamp,
};

use super::attributes::FIXED;
use super::{Model, ModelDirectory, ModelNode, ModelState, NodeBody, ROOT, id, posix};

/// The calls on subvolumes. Unless stated otherwise, they return the errors of making and removing
/// directories.
pub trait SubvolumeCalls: Sync {
    /// Makes an empty subvolume. Returns its root.
    fn create_subvolume(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId>;

    /// Makes a snapshot of the subvolume with the root `source`. Returns the root of the snapshot.
    fn snapshot(
        &self,
        source: FileId,
        place: EntryPlace<'_>,
        is_read_only: bool,
        at: Timestamp,
    ) -> Result<FileId>;

    /// Deletes a subvolume with everything in it. `EINVAL` if it is not a subvolume, `EPERM` if it
    /// is the default one.
    fn delete_subvolume(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()>;

    /// Drops the contents of all deleted subvolumes, to the end. Nothing that is shown changes.
    fn drop_deleted(&self) -> Result<()>;

    /// Makes the subvolume with this root read-only, or writable again.
    fn set_read_only(&self, root: FileId, is_read_only: bool) -> Result<()>;

    /// Makes the subvolume with this root the default one, which a mount without options shows. It
    /// cannot be deleted then: `EPERM`.
    fn set_default(&self, root: FileId) -> Result<()>;

    /// The settings of the subvolume with this root; `None` for the top-level one, and for a file
    /// that is not a root.
    fn settings(&self, file: FileId) -> Result<Option<Settings>>;

    /// The root of the subvolume that a mount without options shows.
    fn default(&self) -> Result<FileId>;

    /// When the subvolume of `file` was made; 0 for the top-level one, which was made with the
    /// volume.
    fn made(&self, file: FileId) -> Result<Timestamp>;
}

/// The settings of a subvolume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The subvolume is read-only.
    pub is_read_only: bool,
    /// A mount without options shows this subvolume.
    pub is_default: bool,
}

impl Model {
    /// Whether this is the root of a subvolume.
    #[must_use]
    pub fn is_subvolume(&self, file: FileId) -> bool {
        self.state().is_subvolume(file)
    }

    /// Whether two files, which are there, are in one subvolume.
    #[must_use]
    pub fn are_in_one_subvolume(&self, one: FileId, other: FileId) -> bool {
        self.state().require_same_subvolume(one, other).is_ok()
    }
}

impl SubvolumeCalls for Model {
    fn create_subvolume(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        let mut state = self.state();
        let kind = NewNode { file_type: FileType::Directory, rdev: (0, 0) };
        // The umask applies in any case, and after it what a default access control list allows.
        let permissions = new.permissions & !new.umask.unwrap_or(0);
        let new = NewFile { permissions, ..*new };
        let root = state.make(place, NodeBody::Directory(ModelDirectory::default()), kind, &new)?;
        let method = state.compression_of_subvolume(place.dir)?;
        let node = state.node_mut(root)?;
        node.subvolume = root.ino;
        node.compress_with(method);
        state.made.insert(root.ino, new.at);
        Ok(root)
    }

    fn snapshot(
        &self,
        source: FileId,
        place: EntryPlace<'_>,
        is_read_only: bool,
        at: Timestamp,
    ) -> Result<FileId> {
        let mut state = self.state();
        state.require_writable(place.dir)?;
        state.require_free(place)?;
        let root = state.copy_subvolume(source)?;
        if is_read_only {
            state.read_only.insert(root.ino);
        }
        state.made.insert(root.ino, at);
        state.add_entry(place, root, at)?;
        Ok(root)
    }

    fn delete_subvolume(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        let mut state = self.state();
        state.require_writable(place.dir)?;
        let root = state.lookup(place.dir, place.name)?;
        if !state.is_subvolume(root) {
            return posix(Errno::INVAL, root);
        }
        state.refuse(place.dir, FIXED)?;
        state.refuse(root, FIXED)?;
        if root.ino == state.default {
            return posix(Errno::PERM, root);
        }
        state.remove_entry(place, at)?;
        state.nodes.retain(|_, node| node.subvolume != root.ino);
        state.read_only.remove(&root.ino);
        Ok(())
    }

    /// The model drops the contents of a subvolume when it is deleted.
    fn drop_deleted(&self) -> Result<()> {
        Ok(())
    }

    fn set_read_only(&self, root: FileId, is_read_only: bool) -> Result<()> {
        let mut state = self.state();
        state.node(root)?;
        if is_read_only {
            state.read_only.insert(root.ino);
        } else {
            state.read_only.remove(&root.ino);
        }
        Ok(())
    }

    fn set_default(&self, root: FileId) -> Result<()> {
        let mut state = self.state();
        state.node(root)?;
        state.default = root.ino;
        Ok(())
    }

    fn settings(&self, file: FileId) -> Result<Option<Settings>> {
        let state = self.state();
        let is_read_only = state.read_only.contains(&file.ino);
        let settings = Settings { is_read_only, is_default: state.default == file.ino };
        Ok(Some(settings).filter(|_| state.is_subvolume(file) && file.ino != ROOT))
    }

    fn default(&self) -> Result<FileId> {
        Ok(id(self.state().default))
    }

    fn made(&self, file: FileId) -> Result<Timestamp> {
        let state = self.state();
        let made = state.made.get(&state.node(file)?.subvolume);
        Ok(made.copied().unwrap_or_default())
    }
}

impl ModelState {
    /// Copies everything that has a name in the subvolume with this root. Returns the root of the
    /// copy, which has no name yet.
    fn copy_subvolume(&mut self, source: FileId) -> Result<FileId> {
        let named = |node: &&ModelNode| node.subvolume == source.ino && node.attr.nlink > 0;
        let inos: Vec<u64> =
            self.nodes.values().filter(named).map(|node| node.attr.file.ino).collect();
        let copies: BTreeMap<u64, u64> = inos.iter().copied().zip(self.next_ino..).collect();
        self.next_ino += inos.len() as u64;
        for ino in inos {
            let mut node = self.node(id(ino))?.clone();
            node.attr.file = id(copies[&ino]);
            (node.subvolume, node.opens, node.is_linkable) = (copies[&source.ino], 0, false);
            if let NodeBody::Directory(directory) = &mut node.body {
                directory.follow(&copies);
            }
            self.nodes.insert(copies[&ino], node);
        }
        Ok(id(copies[&source.ino]))
    }
}

impl ModelDirectory {
    /// Replaces each file that the directory leads to by its copy.
    fn follow(&mut self, copies: &BTreeMap<u64, u64>) {
        self.parent = self.parent.take().and_then(|Parent { dir, name }| {
            copies.get(&dir.ino).map(|&dir| Parent { dir: id(dir), name })
        });
        for (_, ino) in self.entries.values_mut() {
            *ino = copies[ino];
        }
    }
}
