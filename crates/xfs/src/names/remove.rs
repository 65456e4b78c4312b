//! Names that are removed.

use offshoot_vfs::{Errno, Error, Result, Structure, Timestamp};
use offshoot_xfs_format::Ino;

use super::change::{NameTransaction, SpaceNeed, Touched, parent_blocks};
use super::{NameOutcome, NamePlace, XfsNames, is_directory, until_done};
use crate::dir::change::{
    XfsEntryTarget, check_name, is_empty, most_blocks_to_remove, remove_name, set_parent,
};
use crate::group;
use crate::trans::XfsTransactionKind as Kind;

impl XfsNames<'_> {
    /// Removes a name of a file. Returns the file if that was its last one: the caller frees it by
    /// [`Self::inactivate`] when no program has it open.
    ///
    /// # Errors
    /// `ENOENT`, `ENOTDIR`, `EISDIR` for a directory, `EPERM` for what is immutable or append-only.
    pub(crate) fn unlink(&self, place: NamePlace<'_>, at: Timestamp) -> Result<Option<Ino>> {
        self.remove(place, at, false)
    }

    /// Removes an empty directory, which the caller frees as a file without names.
    ///
    /// # Errors
    /// As for [`Self::unlink`]; `ENOTDIR` for another file, and `ENOTEMPTY`.
    pub(crate) fn rmdir(&self, place: NamePlace<'_>, at: Timestamp) -> Result<Ino> {
        let removed = self.remove(place, at, true)?;
        removed.ok_or_else(|| {
            let name = place.name.escape_ascii();
            let problem = format!("directory `{name}` was removed and has a name left");
            Error::corrupt(Structure::InodeCore, problem)
        })
    }

    fn remove(
        &self,
        place: NamePlace<'_>,
        at: Timestamp,
        wants_directory: bool,
    ) -> Result<Option<Ino>> {
        check_name(place.name)?;
        until_done(|| {
            let target = self.find(place)?;
            let errno = match (is_directory(target), wants_directory) {
                (true, false) => Errno::ISDIR,
                (false, true) => Errno::NOTDIR,
                _ => {
                    let _locked = self.lock([place.dir, target.0])?;
                    return self.retry(|names| names.remove_once(place, target, at));
                }
            };
            Err(place.error(errno))
        })
    }

    /// Removes a name, if it still leads to `target`.
    fn remove_once(
        &self,
        place: NamePlace<'_>,
        target: XfsEntryTarget,
        at: Timestamp,
    ) -> Result<NameOutcome> {
        let (ino, is_directory) = (target.0, is_directory(target));
        let blocks = most_blocks_to_remove(self.transactions) + parent_blocks(self.transactions);
        let need = (SpaceNeed::Removal, blocks);
        let mut change = self.begin(Kind::Remove, need, &[place.dir], at)?;
        if !change.leads_to(place, Some(target))? {
            return Ok(NameOutcome::Moved);
        }
        change.hold(&[ino])?;
        change.require_entry(target)?;
        change.require_shrinkable(place.dir)?;
        change.require_movable(ino)?;
        if is_directory {
            change.require_empty(ino, Errno::NOTEMPTY)?;
        }
        change.prove_parent(ino, Some(place), None)?;
        let is_last = change.drop_link(ino, is_directory)?;
        if is_last {
            group::enter_unlinked(&mut change.t, ino)?;
        }
        if is_directory {
            change.lose_directory(place.dir)?;
            // Nothing of it leads to a directory that may be gone before it is freed.
            if let Some(root) = self.transactions.superblock().root() {
                let work = set_parent(&mut change.t, ino, root)?;
                change.work.extend(work);
            }
        }
        let work = remove_name(&mut change.t, place.dir, place.name)?;
        change.work.extend(work);
        change.touch(place.dir, Touched::Contents);
        change.change_parent(ino, Some(place), None)?;
        change.finish()?;
        Ok(NameOutcome::Done(is_last.then_some(ino)))
    }
}

impl NameTransaction<'_> {
    /// Proves that a directory has no names, and none above it.
    pub(super) fn require_empty(&mut self, dir: Ino, errno: Errno) -> Result<()> {
        if is_empty(&mut self.t, dir)? && self.core(dir)?.links() <= 2 {
            return Ok(());
        }
        Err(Error::posix(errno, format!("directory {dir}")))
    }

    /// Counts a name of a file less, or the last one of a directory. Returns whether none is left.
    pub(super) fn drop_link(&mut self, ino: Ino, is_directory: bool) -> Result<bool> {
        let links = self.core(ino)?.links();
        let dropped = if is_directory { links.max(1) } else { 1 };
        self.add_links(ino, -i32::try_from(dropped).unwrap_or(i32::MAX))?;
        Ok(self.core(ino)?.links() == 0)
    }
}
