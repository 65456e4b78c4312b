//! New files, with a name and without.

use offshoot_vfs::{Errno, Error, NewFile, Result};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::dir::file_type;
use offshoot_xfs_format::inode::XfsInodeFlags;

use super::change::{NameTransaction, SpaceNeed, Touched, parent_blocks};
use super::fill::NewInode;
use super::inherited::InheritedLists;
use super::take::inode_blocks;
use super::target::target_blocks;
use super::{NamePlace, XfsNames, XfsNewKind};
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::change_xattr;
use crate::dir::change::{FreeName, XfsEntryTarget, add_free_name, check_name, most_blocks_to_add};
use crate::group;
use crate::trans::{HASH_BLOCKS, XfsTransactionKind as Kind};

/// What became of a try to make a file in one transaction.
enum CreateOutcome {
    Made(Ino),
    /// Its lists take transactions of their own.
    NeedsSteps(InheritedLists),
}

impl XfsNames<'_> {
    /// Makes a file. A regular file is empty, and so is a directory.
    ///
    /// # Errors
    /// `EEXIST` when the name is taken, `ENOENT` and `ENOTDIR` when there is no such directory,
    /// `EMLINK` when it can have no more directories, `ENOSPC`, and what [`check_name`] and the
    /// kind say. `EPERM` in an immutable directory, and for a link in one that refuses them.
    pub(crate) fn create(
        &self,
        place: NamePlace<'_>,
        kind: XfsNewKind<'_>,
        new: &NewFile,
    ) -> Result<Ino> {
        check_name(place.name)?;
        kind.check()?;
        let _locked = self.lock([place.dir])?;
        match self.retry(|names| names.create_at_once(place, kind, new))? {
            CreateOutcome::Made(ino) => Ok(ino),
            CreateOutcome::NeedsSteps(lists) => self.create_in_steps(place, kind, new, &lists),
        }
    }

    fn create_at_once(
        &self,
        place: NamePlace<'_>,
        kind: XfsNewKind<'_>,
        new: &NewFile,
    ) -> Result<CreateOutcome> {
        let which = match kind {
            XfsNewKind::Directory => Kind::Mkdir,
            XfsNewKind::Symlink(_) => Kind::Symlink,
            XfsNewKind::Regular | XfsNewKind::Node(..) => Kind::Create,
        };
        let engine = self.transactions;
        let is_remote = kind.remote_target(engine.geometry()).is_some();
        let target = if is_remote { target_blocks(engine) } else { 0 };
        let blocks =
            inode_blocks(engine) + most_blocks_to_add(engine) + target + parent_blocks(engine);
        let mut change = self.begin(which, (SpaceNeed::Always, blocks), &[place.dir], new.at)?;
        let free = change.require_new(place, kind)?;
        let inherited = change.inherited(place.dir, kind.file_type(), new)?;
        if !inherited.fit_in_inode(engine.geometry()) {
            return Ok(CreateOutcome::NeedsSteps(inherited));
        }
        let ino = change.take_inode(place.dir, kind.is_directory(), new.at)?;
        let permissions = inherited.permissions;
        let what = NewInode { kind, new, permissions, links: kind.links() };
        change.fill(ino, place.dir, &what)?;
        change.set_lists(ino, &inherited.lists)?;
        change.add_new(place, free, (ino, kind.entry_type()))?;
        change.finish()?;
        Ok(CreateOutcome::Made(ino))
    }

    /// Makes a file whose lists do not fit in its inode: first without a name, so that a crash
    /// leaves no file without its lists.
    fn create_in_steps(
        &self,
        place: NamePlace<'_>,
        kind: XfsNewKind<'_>,
        new: &NewFile,
        inherited: &InheritedLists,
    ) -> Result<Ino> {
        let ino = self
            .retry(|names| names.make_unnamed(place.dir, kind, new, inherited.permissions, &[]))?;
        let named = self
            .set_long_lists(ino, &inherited.lists)
            .and_then(|()| self.retry(|names| names.name_new(place, (ino, kind), new)));
        named.map(|()| ino).map_err(|error| self.given_up(ino, error))
    }

    fn set_long_lists(&self, ino: Ino, lists: &[OwnedXattr]) -> Result<()> {
        let engine = self.transactions;
        // The blocks of a list, and of a tree of so few attributes.
        let blocks = |list: &OwnedXattr| {
            let log = engine.geometry().block_log;
            4 * (list.value.len() as u64 >> log) + HASH_BLOCKS + 2 * engine.most_levels().attributes
        };
        lists.iter().try_for_each(|list| {
            self.retry(|names| {
                let mut t = engine.begin(Kind::ChangeAttribute, blocks(list))?;
                t.try_again(names.missed);
                change_xattr(t, self.ids, XattrChange::set(ino, list.clone()))
            })
        })
    }

    /// Frees a file that could not be finished, and returns the error of that. If the file cannot
    /// be freed either, it stays in its list of unlinked inodes, for a recovery or a repair.
    pub(super) fn given_up(&self, ino: Ino, error: Error) -> Error {
        let _freed = self.inactivate_locked(ino);
        error
    }

    /// Gives the first name to a file that is made in steps.
    fn name_new(
        &self,
        place: NamePlace<'_>,
        (ino, kind): (Ino, XfsNewKind<'_>),
        new: &NewFile,
    ) -> Result<()> {
        let engine = self.transactions;
        let blocks = most_blocks_to_add(engine) + parent_blocks(engine);
        let need = (SpaceNeed::Always, blocks);
        let mut change = self.begin(Kind::Link, need, &[place.dir, ino], new.at)?;
        let free = change.require_new(place, kind)?;
        change.prove_parent(ino, None, Some(place))?;
        group::leave_unlinked(&mut change.t, ino)?;
        change.t.inode(ino)?.core_mut().nlink = kind.links().into();
        change.touch(ino, Touched::Inode);
        change.add_new(place, free, (ino, kind.entry_type()))?;
        change.finish()
    }

    /// Makes a file without a name, as if it were made in `dir`. It can get one by
    /// [`Self::link_unnamed`]; else the caller frees it by [`Self::inactivate`].
    ///
    /// # Errors
    /// As for [`Self::create`].
    pub(crate) fn create_unnamed(
        &self,
        dir: Ino,
        kind: XfsNewKind<'_>,
        new: &NewFile,
    ) -> Result<Ino> {
        kind.check()?;
        let _locked = self.lock([dir])?;
        self.make_unnamed_with_lists(dir, kind, new)
    }

    /// Makes a file without a name, with the permissions and lists that the directory hands down.
    /// The caller has the lock of the directory.
    pub(super) fn make_unnamed_with_lists(
        &self,
        dir: Ino,
        kind: XfsNewKind<'_>,
        new: &NewFile,
    ) -> Result<Ino> {
        let inherited = {
            let need = (SpaceNeed::Always, 0);
            let mut change = self.begin(Kind::ChangeTimes, need, &[dir], new.at)?;
            change.require_growable(dir)?;
            change.inherited(dir, kind.file_type(), new)?
        };
        let fits = inherited.fit_in_inode(self.transactions.geometry());
        let (short, long) =
            if fits { (&inherited.lists[..], &[][..]) } else { (&[][..], &inherited.lists[..]) };
        let ino =
            self.retry(|names| names.make_unnamed(dir, kind, new, inherited.permissions, short))?;
        self.set_long_lists(ino, long).map(|()| ino).map_err(|error| self.given_up(ino, error))
    }

    /// Makes a file without a name in one transaction, with lists that fit in its inode. The caller
    /// has the lock of the directory.
    fn make_unnamed(
        &self,
        dir: Ino,
        kind: XfsNewKind<'_>,
        new: &NewFile,
        permissions: u32,
        lists: &[OwnedXattr],
    ) -> Result<Ino> {
        let engine = self.transactions;
        let is_remote = kind.remote_target(engine.geometry()).is_some();
        let target = if is_remote { target_blocks(engine) } else { 0 };
        let need = (SpaceNeed::Always, inode_blocks(engine) + target);
        let mut change = self.begin(Kind::CreateUnnamed, need, &[dir], new.at)?;
        change.require_growable(dir)?;
        let ino = change.take_inode(dir, kind.is_directory(), new.at)?;
        // The AGI is locked already; blocks for a target come behind it.
        group::enter_unlinked(&mut change.t, ino)?;
        change.fill(ino, dir, &NewInode { kind, new, permissions, links: 0 })?;
        change.set_lists(ino, lists)?;
        change.finish()?;
        Ok(ino)
    }
}

impl NameTransaction<'_> {
    /// Proves that a new file of a kind can have a name. Returns where that goes.
    fn require_new(&mut self, place: NamePlace<'_>, kind: XfsNewKind<'_>) -> Result<FreeName> {
        let dir = self.require_growable(place.dir)?;
        let free = self.require_free(place)?;
        let refuses_links = dir.flags().contains(XfsInodeFlags::NOSYMLINKS);
        if refuses_links && matches!(kind, XfsNewKind::Symlink(_)) {
            return Err(place.error(Errno::PERM));
        }
        if kind.is_directory() {
            self.require_link(place.dir)?;
        }
        Ok(free)
    }

    /// Adds the first name of a new file.
    fn add_new(
        &mut self,
        place: NamePlace<'_>,
        free: FreeName,
        (ino, entry_type): XfsEntryTarget,
    ) -> Result<()> {
        let work = add_free_name(&mut self.t, free, place.name, (ino, entry_type))?;
        self.work.extend(work);
        if entry_type == file_type::DIR {
            self.add_links(place.dir, 1)?;
        }
        self.touch(place.dir, Touched::Contents);
        self.change_parent(ino, None, Some(place))
    }
}
