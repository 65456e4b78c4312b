//! One more name for a file.

use offshoot_vfs::{Errno, Error, Result, Timestamp};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::dir::file_type as entry_type;
use offshoot_xfs_format::inode::file_type;

use super::change::{SpaceNeed, Touched, parent_blocks};
use super::{NamePlace, XfsNames};
use crate::dir::change::{add_free_name, check_name, most_blocks_to_add};
use crate::group;
use crate::trans::XfsTransactionKind as Kind;

impl XfsNames<'_> {
    /// Gives a file one more name.
    ///
    /// # Errors
    /// `EEXIST` when the name is taken, `ENOENT` for a file that lost its last name, and when there
    /// is no such directory, `EPERM` for a directory, an immutable and an append-only file,
    /// `EMLINK` when it can have no more names, `EXDEV` where its project is kept out, `ENOSPC`.
    pub(crate) fn link(&self, ino: Ino, place: NamePlace<'_>, at: Timestamp) -> Result<()> {
        self.link_file(ino, place, at, false)
    }

    /// Gives a file that was made without a name its first one.
    ///
    /// # Errors
    /// As for [`Self::link`].
    pub(crate) fn link_unnamed(&self, ino: Ino, place: NamePlace<'_>, at: Timestamp) -> Result<()> {
        self.link_file(ino, place, at, true)
    }

    fn link_file(
        &self,
        ino: Ino,
        place: NamePlace<'_>,
        at: Timestamp,
        may_be_unnamed: bool,
    ) -> Result<()> {
        check_name(place.name)?;
        let _locked = self.lock([place.dir, ino])?;
        self.retry(|names| names.link_once(ino, place, at, may_be_unnamed))
    }

    fn link_once(
        &self,
        ino: Ino,
        place: NamePlace<'_>,
        at: Timestamp,
        may_be_unnamed: bool,
    ) -> Result<()> {
        let engine = self.transactions;
        let need = (SpaceNeed::IfTaken, most_blocks_to_add(engine) + parent_blocks(engine));
        let mut change = self.begin(Kind::Link, need, &[place.dir, ino], at)?;
        change.require_growable(place.dir)?;
        let free = change.require_free(place)?;
        let core = change.require_movable(ino)?;
        let is_unnamed = core.links() == 0;
        if core.is_free() || is_unnamed && !may_be_unnamed {
            return Err(Error::posix(Errno::NOENT, format!("inode {ino} has lost its last name")));
        }
        if core.file_type() == file_type::DIRECTORY {
            return Err(Error::posix(Errno::PERM, format!("another name for directory {ino}")));
        }
        change.require_link(ino)?;
        change.require_project(place.dir, ino)?;
        change.prove_parent(ino, None, Some(place))?;
        if is_unnamed {
            group::leave_unlinked(&mut change.t, ino)?;
        }
        change.add_links(ino, 1)?;
        let target = (ino, entry_type::of_mode(core.mode.get()));
        let work = add_free_name(&mut change.t, free, place.name, target)?;
        change.work.extend(work);
        change.touch(place.dir, Touched::Contents);
        change.change_parent(ino, None, Some(place))?;
        change.finish()
    }
}
