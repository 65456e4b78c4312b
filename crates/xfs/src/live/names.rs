//! Changes of names, and openings.

use std::sync::Arc;

use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileType, NewFile, NewNode, Rename, Result, Timestamp,
};
use offshoot_xfs_format::Ino;

use super::inodes::LiveInodeState;
use super::{XfsLive, ino_of};
use crate::dir::XfsDirectory;
use crate::inode::{LoadedInode, file_id};
use crate::names::{NamePlace, XfsNewKind};

/// A place in the words of the room of names.
fn place_of(place: EntryPlace<'_>) -> NamePlace<'_> {
    NamePlace { dir: ino_of(place.dir), name: place.name }
}

impl XfsLive {
    /// A directory in which a name changes.
    fn directory(&self, dir: FileId) -> Result<Arc<LoadedInode>> {
        let inode = self.inode(dir)?;
        inode.require_directory()?;
        Ok(inode)
    }

    /// Makes a file of any type.
    fn make(&self, place: EntryPlace<'_>, kind: XfsNewKind<'_>, new: &NewFile) -> Result<FileId> {
        let _call = self.enter()?;
        let dir = self.directory(place.dir)?;
        let create = || self.names().create(place_of(place), kind, new);
        let ino = self.data().with_space(create)?;
        self.keep_synchronous(&dir)?;
        Ok(file_id(ino))
    }

    pub(crate) fn mknod(
        &self,
        place: EntryPlace<'_>,
        node: NewNode,
        new: &NewFile,
    ) -> Result<FileId> {
        let refused = |errno| Err(Error::posix(errno, format!("a node of {:?}", node.file_type)));
        let kind = match node.file_type {
            FileType::Directory => return refused(Errno::PERM),
            FileType::Symlink => return refused(Errno::INVAL),
            FileType::Regular => XfsNewKind::Regular,
            file_type => XfsNewKind::Node(file_type, node.rdev),
        };
        self.make(place, kind, new)
    }

    pub(crate) fn mkdir(&self, place: EntryPlace<'_>, new: &NewFile) -> Result<FileId> {
        self.make(place, XfsNewKind::Directory, new)
    }

    pub(crate) fn symlink(
        &self,
        place: EntryPlace<'_>,
        target: &[u8],
        new: &NewFile,
    ) -> Result<FileId> {
        self.make(place, XfsNewKind::Symlink(target), new)
    }

    /// Makes a file without a name, which is open once.
    pub(crate) fn create_unnamed(
        &self,
        dir: FileId,
        is_linkable: bool,
        new: &NewFile,
    ) -> Result<FileId> {
        let _call = self.enter()?;
        self.directory(dir)?;
        let create = || self.names().create_unnamed(ino_of(dir), XfsNewKind::Regular, new);
        let ino = self.data().with_space(create)?;
        // A thread that knows the number from the file before may be about to open that.
        let used = self.inodes.get(ino);
        let mut state = used.state.lock();
        let opens = state.opens + 1;
        *state = LiveInodeState { opens, is_nameless: true, is_linkable, ..state.renewed() };
        drop(state);
        Ok(file_id(ino))
    }

    pub(crate) fn link(&self, file: FileId, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        let _call = self.enter()?;
        let dir = self.directory(place.dir)?;
        let ino = ino_of(file);
        // So that the file is not freed meanwhile.
        let locked = self.inodes.write([ino]);
        self.inode(file)?;
        let is_linkable = locked.with_state(ino, |state| state.is_linkable).unwrap_or(false);
        if is_linkable {
            let link = || self.names().link_unnamed(ino, place_of(place), at);
            self.data().with_space(link)?;
            locked.with_state(ino, |state| {
                (state.is_nameless, state.is_linkable) = (false, false);
            });
        } else {
            self.data().with_space(|| self.names().link(ino, place_of(place), at))?;
        }
        drop(locked);
        self.keep_synchronous(&dir)
    }

    pub(crate) fn unlink(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        let _call = self.enter()?;
        let dir = self.directory(place.dir)?;
        let lost = self.data().with_space(|| self.names().unlink(place_of(place), at))?;
        self.settle(&[dir], lost)
    }

    pub(crate) fn rmdir(&self, place: EntryPlace<'_>, at: Timestamp) -> Result<()> {
        let _call = self.enter()?;
        let dir = self.directory(place.dir)?;
        let lost = self.data().with_space(|| self.names().rmdir(place_of(place), at))?;
        self.settle(&[dir], Some(lost))
    }

    pub(crate) fn rename(
        &self,
        from: EntryPlace<'_>,
        to: EntryPlace<'_>,
        how: Rename,
        at: Timestamp,
    ) -> Result<()> {
        let _call = self.enter()?;
        let directories = [self.directory(from.dir)?, self.directory(to.dir)?];
        if self.buffered.bytes() > 0 && self.look_up(&directories[1], to.name).is_ok() {
            // Programs write a new file and move it over the old one, and often sync neither. After
            // a crash one of the two is there whole.
            if let Ok(ino) = self.look_up(&directories[0], from.name) {
                self.write_back(ino)?;
            }
        }
        let rename = || self.names().rename(place_of(from), place_of(to), how, at);
        let lost = self.data().with_space(rename)?;
        self.settle(&directories, lost)
    }

    /// What a name leads to.
    fn look_up(&self, dir: &LoadedInode, name: &[u8]) -> Result<Ino> {
        XfsDirectory::new(self.buffers(), &self.reading, dir)?.lookup(name)
    }

    /// Ends a change of names: a file that has lost its last one is freed if it is not open.
    fn settle(&self, changed: &[Arc<LoadedInode>], lost: Option<Ino>) -> Result<()> {
        if let Some(ino) = lost {
            self.lose(ino);
        }
        changed.iter().try_for_each(|dir| self.keep_synchronous(dir))
    }

    /// Counts one more opening. A file that has lost its last name is found only while it is open.
    ///
    /// It is announced first, so the file is not freed while its inode is read, which may take as
    /// long as the device does.
    pub(crate) fn open(&self, file: FileId) -> Result<()> {
        let used = self.inodes.get(ino_of(file));
        let was_open = {
            let mut state = used.state.lock();
            state.openings += 1;
            state.opens > 0
        };
        let found = self.inode(file).and_then(|inode| {
            if was_open || inode.core.links() > 0 {
                return Ok(());
            }
            Err(Error::posix(Errno::NOENT, format!("{file}, which has no name")))
        });
        let is_unused = {
            let mut state = used.state.lock();
            state.openings = state.openings.saturating_sub(1);
            state.opens += u64::from(found.is_ok());
            state.is_unused()
        };
        self.free_closed(used.ino, is_unused);
        found
    }

    /// Counts one opening less, and frees the file if that was the last and it has no name.
    pub(crate) fn release(&self, file: FileId) -> Result<()> {
        let used = self.inodes.get(ino_of(file));
        let is_unused = {
            let mut state = used.state.lock();
            let left = state.opens.checked_sub(1);
            state.opens = left
                .ok_or_else(|| Error::posix(Errno::BADF, format!("{file}, which is not open")))?;
            state.is_unused()
        };
        self.free_closed(used.ino, is_unused);
        Ok(())
    }

    /// Frees a file that was found unused. When writing has ended, a recovery frees it.
    fn free_closed(&self, ino: Ino, is_unused: bool) {
        if is_unused && let Ok(_call) = self.enter() {
            self.free_if_unused(&self.inodes.write([ino]), ino);
        }
    }
}
