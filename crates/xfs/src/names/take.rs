//! Which inode a new file gets. Files lie in the group of their directory, near to it. Directories
//! go around all groups, so that threads in different directories change different groups.

use std::sync::atomic::Ordering;

use offshoot_vfs::{Errno, Error, Result, Timestamp};
use offshoot_xfs_format::record::CHUNK_INODES;
use offshoot_xfs_format::{AgIno, AgNumber, Ino};

use super::change::NameTransaction;
use super::{XfsNameState, XfsNames};
use crate::group::{self, ChunkOutcome};
use crate::trans::XfsTransactions;

/// How often other threads may take all inodes of a chunk that was made here.
const MOST_CHUNKS: usize = 100;

/// The blocks of a chunk of inodes.
fn chunk_blocks(engine: &XfsTransactions) -> u64 {
    u64::from((CHUNK_INODES >> engine.geometry().inodes_per_block_log()).max(1))
}

/// The blocks that taking an inode may take: a chunk, and the trees of inodes.
pub(super) fn inode_blocks(engine: &XfsTransactions) -> u64 {
    chunk_blocks(engine) + 2 * engine.most_levels().inodes
}

impl XfsNameState {
    /// The generation of the inodes of a new chunk: another one for each chunk, so that no file
    /// gets the number and the generation of one before it. Inodes that are freed count on from it.
    fn generation(&self, at: Timestamp, ag: AgNumber) -> u32 {
        let count = self.chunks.fetch_add(1, Ordering::Relaxed);
        let mut mixed = at.secs.cast_unsigned() ^ u64::from(at.nanos) << 32 ^ u64::from(ag.0) << 20;
        mixed = (mixed ^ count.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        u32::try_from(mixed >> 32).unwrap_or(0)
    }
}

impl XfsNames<'_> {
    /// Where the inode of a new file is looked for first.
    fn first_group(&self, dir: Ino, is_directory: bool) -> AgNumber {
        let geometry = self.transactions.geometry();
        if is_directory {
            let next = self.state.rotor.fetch_add(1, Ordering::Relaxed);
            return AgNumber(next % geometry.ag_count.max(1));
        }
        geometry.split_ino(dir).map_or(AgNumber(0), |(ag, _)| ag)
    }
}

impl NameTransaction<'_> {
    /// Takes an inode for a file in `dir`. The transaction may roll, so it comes before all changes
    /// of the directory.
    ///
    /// # Errors
    /// `ENOSPC` when no group has one, and none has room for a chunk.
    pub(super) fn take_inode(
        &mut self,
        dir: Ino,
        is_directory: bool,
        at: Timestamp,
    ) -> Result<Ino> {
        let first = self.names.first_group(dir, is_directory).0;
        if let Some(ino) = self.take_anywhere(first, dir, at)? {
            return Ok(ino);
        }
        if std::mem::take(&mut self.has_met_busy) {
            // Once for all groups: blocks that were freed a moment ago are the last resort.
            self.t.engine().log().force_all()?;
            if let Some(ino) = self.take_anywhere(first, dir, at)? {
                return Ok(ino);
            }
        }
        Err(Error::posix(Errno::NOSPC, format!("an inode for a file in directory {dir}")))
    }

    /// Takes an inode in the first group from `first` on that has one, those with room for the
    /// contents of a file before the others.
    fn take_anywhere(&mut self, first: u32, dir: Ino, at: Timestamp) -> Result<Option<Ino>> {
        let groups = self.t.geometry().ag_count;
        for is_roomy in [true, false] {
            for ag in (first..groups).chain(0..first.min(groups)).map(AgNumber) {
                if is_roomy && !self.is_roomy(ag)? {
                    continue;
                }
                if let Some(ino) = self.take_in_group(ag, dir, at)? {
                    self.inodes.push(ino);
                    return Ok(Some(ino));
                }
            }
        }
        Ok(None)
    }

    /// Whether a group has a block for the contents of a new file too. Others may take it.
    fn is_roomy(&self, ag: AgNumber) -> Result<bool> {
        let engine = self.t.engine();
        let (_, free_inodes) = group::inode_counts(engine.buffers(), ag)?;
        let chunk = if free_inodes == 0 { chunk_blocks(engine) } else { 0 };
        let levels = engine.most_levels();
        Ok(group::free_blocks(engine.buffers(), ag)? > chunk + levels.free * 2 + levels.inodes)
    }

    /// Takes an inode in a group, which may make a chunk; `None` when it has no room for one.
    fn take_in_group(&mut self, ag: AgNumber, dir: Ino, at: Timestamp) -> Result<Option<Ino>> {
        let near = self.t.geometry().split_ino(dir).filter(|(home, _)| *home == ag);
        let near = near.map_or(AgIno(0), |(_, near)| near);
        for _ in 0..MOST_CHUNKS {
            let before = self.t.held_buffers();
            if let Some(ino) = group::take_inode(&mut self.t, ag, near)? {
                return Ok(Some(ino));
            }
            if self.has_made_chunk {
                // Other threads have taken all inodes of the one that was promised.
                self.t.promise(inode_blocks(self.t.engine()))?;
            }
            let generation = self.names.state.generation(at, ag);
            let outcome = group::make_chunk_now(&mut self.t, ag, generation)?;
            self.has_met_busy |= outcome == ChunkOutcome::Busy;
            if outcome == ChunkOutcome::Made {
                self.has_made_chunk = true;
                self.t.roll(&self.inodes)?;
                continue;
            }
            self.t.release_unchanged(&before);
            if self.t.held_buffers() != before {
                // The next group may be a lower one.
                self.t.roll(&self.inodes)?;
            }
            return Ok(None);
        }
        Ok(None)
    }
}
