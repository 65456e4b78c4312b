//! A change of names: its transaction, the work that follows, and the inodes that it changes.

use std::collections::BTreeMap;

use offshoot_vfs::{Errno, Error, Result, Timestamp};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::{XfsInodeCore, XfsInodeFlags, file_type};
use offshoot_xfs_format::parent::ParentValue;
use offshoot_xfs_format::{Ino, attr::XattrFlags};
use zerocopy::IntoBytes;

use super::{NamePlace, XfsNames, is_directory, look_up_in};
use crate::attr::change::{OwnedXattr, XattrChange};
use crate::defer::{DeferredChain, DeferredWork};
use crate::dir::change::{FreeName, XfsEntryTarget, find_free_name};
use crate::inode::xfs_time;
use crate::trans::{HASH_BLOCKS, XfsTransaction, XfsTransactionKind, XfsTransactions};

/// The most names that a file can have, and the most directories in one.
const MOST_LINKS: u32 = i32::MAX.cast_unsigned();

/// What a change does when its blocks cannot be promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceNeed {
    /// It fails.
    Always,
    /// It goes on, and fails if it takes a block.
    IfTaken,
    /// It takes what it needs of the reserve, and fails if it takes more than there is.
    Removal,
}

/// What of an inode a change has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Touched {
    /// The inode.
    Inode,
    /// The contents of the directory.
    Contents,
}

/// A change of names.
pub(super) struct NameTransaction<'e> {
    pub(super) names: XfsNames<'e>,
    pub(super) t: XfsTransaction<'e>,
    pub(super) work: Vec<DeferredWork>,
    /// The inodes that stay locked until the last step.
    pub(super) inodes: Vec<Ino>,
    touched: BTreeMap<Ino, Touched>,
    at: Timestamp,
    /// The blocks that changes of parent pointers take, which were proved, in later steps.
    later: u64,
    /// Whether it has made a chunk of inodes, for one of which blocks were promised to it.
    pub(super) has_made_chunk: bool,
    /// Whether a group has room for a chunk when the log is on the device.
    pub(super) has_met_busy: bool,
}

/// The blocks that one more parent pointer may take: on each level of the tree, where a leaf may
/// become three, and for its extents.
pub(super) fn parent_blocks(engine: &XfsTransactions) -> u64 {
    if engine.geometry().layout.contains(XfsLayout::PARENTS) {
        HASH_BLOCKS + 2 + 2 * engine.most_levels().attributes
    } else {
        0
    }
}

impl<'e> XfsNames<'e> {
    /// Begins a change at the moment `at`, and locks these inodes, which are in use. Those that
    /// only names lead to are locked by [`NameTransaction::hold`], when the names are proved.
    pub(super) fn begin(
        &self,
        kind: XfsTransactionKind,
        (need, blocks): (SpaceNeed, u64),
        inodes: &[Ino],
        at: Timestamp,
    ) -> Result<NameTransaction<'e>> {
        let is_full = |error: &Error| error.errno() == Errno::NOSPC;
        let has_parents = self.transactions.geometry().layout.contains(XfsLayout::PARENTS);
        let may_go_on = match need {
            SpaceNeed::Always => false,
            SpaceNeed::IfTaken => !has_parents,
            SpaceNeed::Removal => true,
        };
        let mut t = match self.transactions.begin_chain(kind, blocks) {
            Err(error) if may_go_on && is_full(&error) => {
                let mut t = self.transactions.begin_chain(kind, 0)?;
                if need == SpaceNeed::Removal {
                    t.promise_of_reserve(blocks);
                }
                t
            }
            begun => begun?,
        };
        t.try_again(self.missed);
        let (work, touched, held) = (Vec::new(), BTreeMap::new(), Vec::new());
        let names = *self;
        let mut change = NameTransaction {
            names,
            t,
            work,
            inodes: held,
            touched,
            at,
            later: 0,
            has_made_chunk: false,
            has_met_busy: false,
        };
        change.hold(inodes)?;
        Ok(change)
    }
}

impl NameTransaction<'_> {
    /// Locks more inodes until the last step.
    pub(super) fn hold(&mut self, inodes: &[Ino]) -> Result<()> {
        let mut inodes = inodes.to_vec();
        inodes.sort_unstable();
        for ino in inodes {
            self.t.inode(ino)?;
            if !self.inodes.contains(&ino) {
                self.inodes.push(ino);
            }
        }
        Ok(())
    }

    /// The core of an inode as it is now.
    pub(super) fn core(&mut self, ino: Ino) -> Result<XfsInodeCore> {
        self.t.inode(ino).map(|inode| *inode.core())
    }

    pub(super) fn look_up(&mut self, place: NamePlace<'_>) -> Result<Option<XfsEntryTarget>> {
        look_up_in(&mut self.t, place)
    }

    /// Proves that a directory, which can get a name, does not have this one. Returns where it
    /// goes.
    ///
    /// # Errors
    /// `EEXIST`.
    pub(super) fn require_free(&mut self, place: NamePlace<'_>) -> Result<FreeName> {
        let free = find_free_name(&mut self.t, place.dir, place.name)?;
        free.ok_or_else(|| place.error(Errno::EXIST))
    }

    /// Whether a name leads where it did when it was looked up.
    pub(super) fn leads_to(
        &mut self,
        place: NamePlace<'_>,
        found: Option<XfsEntryTarget>,
    ) -> Result<bool> {
        Ok(self.look_up(place)? == found)
    }

    /// Proves that a name can be added to the directory.
    ///
    /// # Errors
    /// `ENOENT` for a directory that was removed, `ENOTDIR`, and `EPERM` for an immutable one.
    pub(super) fn require_growable(&mut self, dir: Ino) -> Result<XfsInodeCore> {
        self.require_directory(dir, XfsInodeFlags::IMMUTABLE)
    }

    /// Proves that a name can be taken from the directory, which is not append-only either.
    pub(super) fn require_shrinkable(&mut self, dir: Ino) -> Result<XfsInodeCore> {
        self.require_directory(dir, XfsInodeFlags::IMMUTABLE | XfsInodeFlags::APPEND)
    }

    fn require_directory(&mut self, dir: Ino, forbids: XfsInodeFlags) -> Result<XfsInodeCore> {
        let core = self.core(dir)?;
        let errno = match core.file_type() {
            _ if core.is_free() || core.links() == 0 => Errno::NOENT,
            file_type::DIRECTORY if core.flags().intersects(forbids) => Errno::PERM,
            file_type::DIRECTORY => return Ok(core),
            _ => Errno::NOTDIR,
        };
        Err(Error::posix(errno, format!("directory {dir}")))
    }

    /// Proves that the names of a file can change.
    ///
    /// # Errors
    /// `EPERM` for one that is immutable or append-only.
    pub(super) fn require_movable(&mut self, ino: Ino) -> Result<XfsInodeCore> {
        let core = self.core(ino)?;
        if core.flags().intersects(XfsInodeFlags::IMMUTABLE | XfsInodeFlags::APPEND) {
            return Err(Error::posix(Errno::PERM, format!("inode {ino} lets no name change")));
        }
        Ok(core)
    }

    /// Proves that one more name or directory can be counted.
    ///
    /// # Errors
    /// `EMLINK`.
    pub(super) fn require_link(&mut self, ino: Ino) -> Result<()> {
        if self.core(ino)?.links() < MOST_LINKS {
            return Ok(());
        }
        Err(Error::posix(Errno::MLINK, format!("inode {ino}")))
    }

    /// Proves that a name leads to what its entry says: to a file that is in use, and that is a
    /// directory or not. What follows from the type of the entry would damage the volume else.
    pub(super) fn require_entry(&mut self, target: XfsEntryTarget) -> Result<()> {
        let inode = self.t.inode(target.0)?;
        let core = inode.core();
        if core.is_free() || core.links() == 0 {
            return Err(inode.damaged("it has a name and is not in use"));
        }
        if is_directory(target) != (core.file_type() == file_type::DIRECTORY) {
            return Err(inode.damaged("its entry has another type"));
        }
        Ok(())
    }

    /// Proves that the project of a directory that hands it down lets the file in.
    ///
    /// # Errors
    /// `EXDEV` for a file of another project; special files without a project go anywhere.
    pub(super) fn require_project(&mut self, dir: Ino, ino: Ino) -> Result<()> {
        let (parent, core) = (self.core(dir)?, self.core(ino)?);
        let has_project = matches!(
            core.file_type(),
            file_type::REGULAR | file_type::DIRECTORY | file_type::SYMLINK
        );
        let may_enter = !parent.flags().contains(XfsInodeFlags::PROJINHERIT)
            || parent.project() == core.project()
            || !has_project && core.project() == 0;
        if may_enter {
            return Ok(());
        }
        Err(Error::posix(Errno::XDEV, format!("inode {ino} is of another project than {dir}")))
    }

    /// Adds to the links of an inode. A repair pins the count of one with more than can be counted
    /// at the largest number: it stays, and the inode with it.
    pub(super) fn add_links(&mut self, ino: Ino, change: i32) -> Result<()> {
        const PINNED: u32 = u32::MAX;
        let inode = self.t.inode(ino)?;
        let links = match inode.core().links() {
            PINNED => Some(PINNED),
            links => links.checked_add_signed(change),
        };
        let links = links.ok_or_else(|| inode.damaged("it has fewer links than names"))?;
        inode.core_mut().nlink = links.into();
        self.touch(ino, Touched::Inode);
        Ok(())
    }

    /// A directory has one less below it. What is left counts itself and its name.
    pub(super) fn lose_directory(&mut self, dir: Ino) -> Result<()> {
        let inode = self.t.inode(dir)?;
        if inode.core().links() <= 2 {
            return Err(inode.damaged("it counts fewer directories than it has"));
        }
        self.add_links(dir, -1)
    }

    /// Says that an inode has changed at this moment.
    pub(super) fn touch(&mut self, ino: Ino, what: Touched) {
        let touched = self.touched.entry(ino).or_insert(what);
        *touched = what.max(*touched);
    }

    /// The change of a parent pointer: `old` goes, `new` comes. `None` on a volume without them.
    fn parent_change(
        &mut self,
        ino: Ino,
        old: Option<NamePlace<'_>>,
        new: Option<NamePlace<'_>>,
    ) -> Result<Option<XattrChange>> {
        if !self.t.geometry().layout.contains(XfsLayout::PARENTS) {
            return Ok(None);
        }
        let mut pointer = |place: Option<NamePlace<'_>>| {
            let Some(NamePlace { dir, name }) = place else { return Ok(None) };
            let value = ParentValue::new(dir, self.core(dir)?.generation.get());
            let (name, value) = (name.to_vec(), value.as_bytes().to_vec());
            Ok::<_, Error>(Some(OwnedXattr { namespace: XattrFlags::PARENT, name, value }))
        };
        let (old, new) = (pointer(old)?, pointer(new)?);
        let file = (ino, self.core(ino)?.generation.get());
        Ok(Some(XattrChange::of_parents(file, old, new)))
    }

    /// Proves that a parent pointer can change, while nothing is changed: a later step of the
    /// chain that found the attributes damaged, or no block for them, would end all writing.
    pub(super) fn prove_parent(
        &mut self,
        ino: Ino,
        old: Option<NamePlace<'_>>,
        new: Option<NamePlace<'_>>,
    ) -> Result<()> {
        let Some(change) = self.parent_change(ino, old, new)? else { return Ok(()) };
        self.later += change.prove(&mut self.t, &self.inodes)?;
        Ok(())
    }

    /// Notes the change of a parent pointer, which was proved: `old` goes, `new` comes.
    /// [`Self::finish`] makes it, in the inode at once, and else as deferred work. As with the
    /// kernel, that changes the inode: files that change places otherwise keep their times.
    pub(super) fn change_parent(
        &mut self,
        ino: Ino,
        old: Option<NamePlace<'_>>,
        new: Option<NamePlace<'_>>,
    ) -> Result<()> {
        let Some(change) = self.parent_change(ino, old, new)? else { return Ok(()) };
        self.work.push(DeferredWork::Attribute(change));
        self.touch(ino, Touched::Inode);
        Ok(())
    }

    /// Sets the times of all inodes that have changed, and counts the change of each.
    fn apply_touches(&mut self) -> Result<()> {
        let time = xfs_time(self.at);
        for (ino, what) in std::mem::take(&mut self.touched) {
            let core = self.t.inode(ino)?.core_mut();
            core.ctime = core.time_field(time);
            if what == Touched::Contents {
                core.mtime = core.ctime;
            }
            core.changecount = core.changecount.get().wrapping_add(1).into();
        }
        Ok(())
    }

    /// Commits the change, and does the work that follows from it. The part of that work that needs
    /// no block is a part of the change itself.
    pub(super) fn finish(mut self) -> Result<()> {
        self.apply_touches()?;
        self.t.require_promised_beside(self.later)?;
        // Parent pointers in inodes take no step of their own.
        let mut done = 0;
        for work in &self.work {
            if !work.perform_at_once(&mut self.t)? {
                break;
            }
            done += 1;
        }
        self.work.drain(..done);
        let mut chain = DeferredChain::new(self.names.ids);
        chain.defer(&mut self.t, self.work);
        chain.finish(self.t, &self.inodes)
    }
}
