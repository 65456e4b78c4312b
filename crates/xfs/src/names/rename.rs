//! Names that move.

use offshoot_vfs::{Errno, Error, FileType, Rename, Result, Structure, Timestamp};
use offshoot_xfs_format::{AgNumber, Ino};

use super::change::{NameTransaction, SpaceNeed, Touched, parent_blocks};
use super::{NameOutcome, NamePlace, XfsNames, XfsNewKind, is_directory, look_up_in, until_done};
use crate::dir::change::{
    XfsEntryTarget, add_name, check_name, most_blocks_to_add, most_blocks_to_remove, remove_name,
    replace_name, set_parent,
};
use crate::group;
use crate::trans::XfsTransactionKind as Kind;

/// What replaces the old name: a character device 0:0.
const WHITEOUT: XfsNewKind<'static> = XfsNewKind::Node(FileType::CharDevice, (0, 0));

/// A move, with what its names led to when they were looked up.
#[derive(Clone, Copy, Debug)]
pub(super) struct RenamePlan<'a> {
    pub(super) from: NamePlace<'a>,
    pub(super) to: NamePlace<'a>,
    pub(super) source: XfsEntryTarget,
    pub(super) target: Option<XfsEntryTarget>,
    pub(super) at: Timestamp,
    is_exchange: bool,
    /// What gets the old name.
    whiteout: Option<Ino>,
}

impl RenamePlan<'_> {
    pub(super) fn is_between_directories(&self) -> bool {
        self.from.dir != self.to.dir
    }

    fn directories(&self) -> [Ino; 2] {
        [self.from.dir, self.to.dir]
    }

    fn files(&self) -> Vec<Ino> {
        let target = self.target.map(|(ino, _)| ino);
        [self.source.0].into_iter().chain(target).chain(self.whiteout).collect()
    }
}

impl XfsNames<'_> {
    /// Moves a name. Returns the file whose last name it replaced, if there is one: the caller
    /// frees it by [`Self::inactivate`] when no program has it open. Two names of one file are left
    /// alone, unless nothing may stand at the new one.
    ///
    /// # Errors
    /// `ENOENT`; `EEXIST` when nothing may stand at the new name, or a directory with names stands
    /// there, as from the kernel's XFS; `EINVAL` for a directory moved below itself; `EISDIR`,
    /// `ENOTDIR` and `ENOTEMPTY` when what stands at the new name cannot be replaced; `EMLINK`,
    /// `EXDEV`, `EPERM` and `ENOSPC` as for other changes.
    pub(crate) fn rename(
        &self,
        from: NamePlace<'_>,
        to: NamePlace<'_>,
        how: Rename,
        at: Timestamp,
    ) -> Result<Option<Ino>> {
        check_name(from.name)?;
        check_name(to.name)?;
        let is_exchange = how == Rename::Exchange;
        until_done(|| {
            let (source, target) = (self.find(from)?, self.look_up(to)?);
            if target.is_some() && !is_exchange && !how.replaces() {
                return Err(to.error(Errno::EXIST));
            }
            if target.is_none() && is_exchange {
                return Err(to.error(Errno::NOENT));
            }
            if target.is_some_and(|target| target.0 == source.0) {
                return Ok(NameOutcome::Done(None));
            }
            let plan = RenamePlan { from, to, source, target, at, is_exchange, whiteout: None };
            self.rename_found(&plan, how)
        })
    }

    /// Moves a name, if both still lead where `plan` says.
    fn rename_found(&self, plan: &RenamePlan<'_>, how: Rename) -> Result<NameOutcome> {
        // One that is replaced does not move, but it may be above the file that replaces it.
        let moves_directory = plan.is_between_directories()
            && (is_directory(plan.source) || plan.target.is_some_and(is_directory));
        let _moves = moves_directory.then(|| self.state.moves.lock());
        let _locked = self.lock(plan.directories().into_iter().chain(plan.files()))?;
        if moves_directory {
            let is_settled = self.look_up(plan.from)? == Some(plan.source)
                && self.look_up(plan.to)? == plan.target;
            if !is_settled {
                return Ok(NameOutcome::Moved);
            }
            self.require_not_above(plan)?;
        }
        let Some(new) = how.whiteout() else { return self.retry(|names| names.rename_once(plan)) };
        let whiteout = self.make_unnamed_with_lists(plan.from.dir, WHITEOUT, &new)?;
        let plan = RenamePlan { whiteout: Some(whiteout), ..*plan };
        match self.retry(|names| names.rename_once(&plan)) {
            Ok(NameOutcome::Moved) => self.inactivate_locked(whiteout).map(|()| NameOutcome::Moved),
            outcome => outcome.map_err(|error| self.given_up(whiteout, error)),
        }
    }

    /// Proves that no directory would be below itself.
    fn require_not_above(&self, plan: &RenamePlan<'_>) -> Result<()> {
        let is_above =
            |of: Option<XfsEntryTarget>, dir: Ino| match of.filter(|of| is_directory(*of)) {
                Some((above, _)) => self.is_below(dir, above),
                None => Ok(false),
            };
        if is_above(Some(plan.source), plan.to.dir)? {
            return Err(plan.from.error(Errno::INVAL));
        }
        if is_above(plan.target, plan.from.dir)? {
            let errno = if plan.is_exchange { Errno::INVAL } else { Errno::NOTEMPTY };
            return Err(plan.to.error(errno));
        }
        Ok(())
    }

    /// Whether a directory is another one, or below it. No directory moves meanwhile.
    fn is_below(&self, dir: Ino, above: Ino) -> Result<bool> {
        let root = self.transactions.superblock().root();
        // On a damaged volume the way up may be a ring. Then it comes to a mark again, which moves
        // up after 1, 2, 4, 8 and so on steps.
        let (mut at, mut mark, mut steps) = (dir, dir, 0_u64);
        loop {
            if at == above {
                return Ok(true);
            }
            if Some(at) == root {
                return Ok(false);
            }
            at = self.above(at)?;
            if at == mark {
                let problem = format!("what is above directory {dir} is a ring");
                return Err(Error::corrupt(Structure::DirectoryBlock, problem));
            }
            steps += 1;
            if steps.is_power_of_two() {
                mark = at;
            }
        }
    }

    /// The directory above one.
    ///
    /// # Errors
    /// `ENOENT` for one that was removed: what was above it may be gone.
    fn above(&self, dir: Ino) -> Result<Ino> {
        let place = NamePlace { dir, name: b".." };
        let mut t = self.transactions.begin(Kind::ChangeTimes, 0)?;
        let found = match t.inode(dir)?.core().links() {
            0 => None,
            _ => look_up_in(&mut t, place)?,
        };
        found.map(|(above, _)| above).ok_or_else(|| place.error(Errno::NOENT))
    }

    fn rename_once(&self, plan: &RenamePlan<'_>) -> Result<NameOutcome> {
        let engine = self.transactions;
        let blocks = 2 * most_blocks_to_add(engine)
            + most_blocks_to_remove(engine)
            + 3 * parent_blocks(engine);
        let need = (SpaceNeed::IfTaken, blocks);
        let mut change = self.begin(Kind::Rename, need, &plan.directories(), plan.at)?;
        let is_settled = change.leads_to(plan.from, Some(plan.source))?
            && change.leads_to(plan.to, plan.target)?;
        if !is_settled {
            return Ok(NameOutcome::Moved);
        }
        change.hold(&plan.files())?;
        change.require_entry(plan.source)?;
        plan.target.map_or(Ok(()), |target| change.require_entry(target))?;
        change.require_rename(plan)?;
        change.prove_parent(plan.source.0, Some(plan.from), Some(plan.to))?;
        if let Some(target) = plan.target {
            let goes_to = plan.is_exchange.then_some(plan.from);
            change.prove_parent(target.0, Some(plan.to), goes_to)?;
        }
        if plan.is_exchange {
            change.exchange(plan)?;
            change.finish()?;
            return Ok(NameOutcome::Done(None));
        }
        let lost = change.rename(plan)?;
        change.finish()?;
        Ok(NameOutcome::Done(lost))
    }
}

impl NameTransaction<'_> {
    fn require_rename(&mut self, plan: &RenamePlan<'_>) -> Result<()> {
        self.require_shrinkable(plan.from.dir)?;
        self.require_movable(plan.source.0)?;
        let source_is_directory = is_directory(plan.source);
        match plan.target {
            None => {
                self.require_growable(plan.to.dir)?;
                if source_is_directory && plan.is_between_directories() {
                    self.require_link(plan.to.dir)?;
                }
            }
            Some(target) => {
                self.require_shrinkable(plan.to.dir)?;
                self.require_movable(target.0)?;
                let errno = match (source_is_directory, is_directory(target)) {
                    _ if plan.is_exchange => None,
                    (true, false) => Some(Errno::NOTDIR),
                    (false, true) => Some(Errno::ISDIR),
                    (true, true) => {
                        self.require_empty(target.0, Errno::EXIST)?;
                        None
                    }
                    (false, false) => None,
                };
                if let Some(errno) = errno {
                    return Err(plan.to.error(errno));
                }
            }
        }
        self.require_project(plan.to.dir, plan.source.0)
    }

    /// Moves a name. Returns the file that has lost its last one.
    fn rename(&mut self, plan: &RenamePlan<'_>) -> Result<Option<Ino>> {
        let RenamePlan { from, to, source, target, whiteout, .. } = *plan;
        let lost = match target {
            Some(target) if self.drop_link(target.0, is_directory(target))? => Some(target.0),
            _ => None,
        };
        self.change_unlinked_lists(lost, whiteout)?;
        let work = match target {
            Some(_) => replace_name(&mut self.t, to.dir, to.name, source),
            None => add_name(&mut self.t, to.dir, to.name, source),
        }?;
        self.work.extend(work);
        if let Some(target) = target {
            if is_directory(target) {
                self.lose_directory(to.dir)?;
            }
            self.change_parent(target.0, Some(to), None)?;
        }
        if is_directory(source) && plan.is_between_directories() {
            let work = set_parent(&mut self.t, source.0, to.dir)?;
            self.work.extend(work);
            self.add_links(to.dir, 1)?;
            self.lose_directory(from.dir)?;
        }
        self.give_up_old_name(from, whiteout)?;
        self.change_parent(source.0, Some(from), Some(to))?;
        self.touch(source.0, Touched::Inode);
        self.touch(from.dir, Touched::Contents);
        self.touch(to.dir, Touched::Contents);
        Ok(lost)
    }

    /// The old name goes, or leads to a whiteout.
    fn give_up_old_name(&mut self, from: NamePlace<'_>, whiteout: Option<Ino>) -> Result<()> {
        let Some(whiteout) = whiteout else {
            let work = remove_name(&mut self.t, from.dir, from.name)?;
            self.work.extend(work);
            return Ok(());
        };
        self.add_links(whiteout, 1)?;
        let target = (whiteout, WHITEOUT.entry_type());
        let work = replace_name(&mut self.t, from.dir, from.name, target)?;
        self.work.extend(work);
        self.change_parent(whiteout, None, Some(from))
    }

    /// One file enters its list of unlinked inodes, and another leaves its own. Both change the AGI
    /// of their group, so the lower group comes first.
    fn change_unlinked_lists(&mut self, entering: Option<Ino>, leaving: Option<Ino>) -> Result<()> {
        let geometry = self.t.geometry();
        let group = |ino: Ino| geometry.split_ino(ino).map_or(AgNumber(0), |(ag, _)| ag).0;
        let entering = entering.map(|ino| (group(ino), ino, true));
        let leaving = leaving.map(|ino| (group(ino), ino, false));
        let mut all: Vec<_> = entering.into_iter().chain(leaving).collect();
        all.sort_unstable();
        for (_, ino, enters) in all {
            if enters {
                group::enter_unlinked(&mut self.t, ino)?;
            } else {
                group::leave_unlinked(&mut self.t, ino)?;
            }
        }
        Ok(())
    }
}
