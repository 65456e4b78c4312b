//! Targets of symbolic links that the inode has no room for: in blocks, which the log carries. Each
//! extent has a header of its own.

use offshoot_vfs::{Errno, Error, Result, Structure, Timestamp};
use offshoot_xfs_format::da::DaExpected;
use offshoot_xfs_format::inode::file_type;
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::{FileBlock, Ino};

use super::XfsNames;
use super::change::{NameTransaction, SpaceNeed};
use crate::buffer::{BufferRole, DiskRun, damaged_at};
use crate::defer::DeferredWork;
use crate::dir::change::{most_blocks_to_add, move_to_block};
use crate::group::{ExtentWish, ReverseOwner, allocate_anywhere};
use crate::inode::change::{map_extent, mapped};
use crate::trans::{
    ChangedFork, ForkName, MOST_TARGET_BLOCKS, XfsTransactionKind as Kind, XfsTransactions,
};

const KIND: RemoteKind = RemoteKind::SymlinkTarget;

/// The blocks that a target may take, with those for its extents. It has as many extents at most.
pub(super) fn target_blocks(engine: &XfsTransactions) -> u64 {
    MOST_TARGET_BLOCKS + engine.most_levels().data
}

impl XfsNames<'_> {
    /// Moves what an inode holds itself to blocks, so that it has room for attributes: the target
    /// of a link, or the entries of a directory.
    ///
    /// The caller has locked it against changes of names ([`Self::lock`]), and keeps that until it
    /// has set the attribute.
    ///
    /// # Errors
    /// `ENOSPC` when there are no blocks.
    pub(crate) fn make_way_in_locked(&self, ino: Ino, at: Timestamp) -> Result<()> {
        let engine = self.transactions;
        let blocks = target_blocks(engine) + most_blocks_to_add(engine);
        self.retry(|names| {
            let mut change = names.begin(Kind::Symlink, (SpaceNeed::Always, blocks), &[ino], at)?;
            let inode = change.t.inode(ino)?;
            let Some(ChangedFork::Local(target)) = inode.fork(ForkName::Data) else {
                return Ok(());
            };
            if inode.core().file_type() == file_type::SYMLINK {
                let target = target.clone();
                inode.set_fork(ForkName::Data, ChangedFork::Extents(Vec::new()));
                change.store_target(ino, &target)?;
            } else {
                let work = move_to_block(&mut change.t, ino)?;
                change.work.extend(work);
            }
            change.finish()
        })
    }
}

impl NameTransaction<'_> {
    /// Stores the target of a link.
    pub(super) fn store_target(&mut self, ino: Ino, target: &[u8]) -> Result<()> {
        let geometry = self.t.geometry();
        let count = u32::try_from(RemoteKind::blocks(geometry, target.len())).unwrap_or(u32::MAX);
        let (mut next, mut least) = (0, count);
        while next < count {
            match self.map_target(ino, next, (least, count - next))? {
                Some(mapped) => next += mapped,
                None if least > 1 => least = 1,
                None => {
                    let what = format!("blocks for the target of link {ino}");
                    return Err(Error::posix(Errno::NOSPC, what));
                }
            }
        }
        let (mut next, mut offset) = (0, 0);
        while next < count {
            let found = mapped(&mut self.t, ino, ForkName::Data, FileBlock(next.into()))?;
            let extent = found.ok_or_else(|| {
                let problem = format!("link {ino}: its block {next} is not there");
                Error::corrupt(Structure::SymlinkBlock, problem)
            })?;
            offset += self.write_target(ino, &extent, (offset, target))?;
            next += extent.count;
        }
        Ok(())
    }

    /// Maps blocks from `next` on, `least` or up to `most` in a row. Returns how many.
    fn map_target(
        &mut self,
        ino: Ino,
        next: u32,
        (least, most): (u32, u32),
    ) -> Result<Option<u32>> {
        let (geometry, at) = (self.t.geometry(), FileBlock(next.into()));
        let near = geometry.locate(ino).map(|(ag, block, _)| (ag, block));
        let owner = Some(ReverseOwner::file(ino, ForkName::Data, at, false));
        let wish = ExtentWish { owner, least: least.min(most), ..ExtentWish::blocks(most) };
        let Some((ag, found)) = allocate_anywhere(&mut self.t, near, &wish)? else {
            return Ok(None);
        };
        let start = geometry.fs_block(ag, found.start);
        let extent = XfsExtent { offset: at, start, count: found.count, is_unwritten: false };
        let step = map_extent(&mut self.t, ino, ForkName::Data, &extent)?;
        self.work.extend(DeferredWork::of_tree_blocks(ino, ForkName::Data, &step.tree_blocks));
        Ok(Some(found.count))
    }

    /// Writes the part of a target at `offset` to an extent. Returns how many bytes that has room
    /// for.
    fn write_target(
        &mut self,
        ino: Ino,
        extent: &XfsExtent,
        (offset, target): (usize, &[u8]),
    ) -> Result<usize> {
        let geometry = self.t.geometry();
        let place = geometry.place_of(extent.start).ok_or_else(|| {
            let problem = format!("block {} is not in the volume", extent.start);
            Error::corrupt(Structure::SymlinkBlock, problem)
        })?;
        let size = (extent.count as usize) << geometry.block_log;
        let block = Some(extent.offset);
        let expected = DaExpected { place, owner: Some(ino), block, is_sealed: true };
        let bytes = KIND
            .encode(geometry, &expected, offset, target, size)
            .map_err(|problem| damaged_at(place, problem))?;
        let run = DiskRun { at: place, bytes: size };
        self.t.fresh(run, BufferRole::SymlinkTarget(ino))?;
        self.t.change(place, 0..size)?.copy_from_slice(&bytes);
        Ok(RemoteKind::room(geometry, size))
    }
}
