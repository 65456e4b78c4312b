//! What takes data out of a file: truncation, holes, zeros.
//!
//! Bytes of a block that the range has only a part of are overwritten with zeros on the device, at
//! once: in place, or in another block if files share it. Whole blocks are unmapped, or become
//! unwritten. A truncation comes first, and the zeros behind it when it is durable: a crash that
//! brings the old size back would show them.
//!
//! ```text
//! punch    |  data  |00 data| data  | data |data 00|  data  |     blocks
//!                    '------ the range --------'
//! after    |  data  |  zeros|       hole   |zeros  |  data  |
//! ```

use std::ops::Range;

use offshoot_vfs::{Errno, Error, Result, Structure};
use offshoot_xfs_format::inode::XfsInodeFlags2;
use offshoot_xfs_format::record::{MOST_FILE_BLOCKS, XfsExtent};
use offshoot_xfs_format::{BasicBlock, FileBlock, FsBlock, Ino};

use super::write::{SpaceFor, require_room_to_map, require_room_to_unmap, shared_range};
use super::{
    FORK, MOST_BYTES, MOST_PASSED_OVER, XfsFileChanges, index, require_extents, require_file,
};
use crate::defer::{DeferredWork, MOST_UNMAPPED};
use crate::inode::change::{end, mapped, next_mapped, part, piece_at, unmap_extents};
use crate::trans::{XfsTransaction, XfsTransactionKind as Kind};

/// What a step of zeroing does to an extent.
enum ZeroStep {
    /// It becomes unwritten.
    Convert(XfsExtent),
    /// It is unmapped, because other files have its blocks.
    Unmap(XfsExtent),
    /// Nothing is left from this block on.
    Done,
    /// The next step begins there.
    Next(u64),
}

impl XfsFileChanges<'_> {
    /// Sets the size of a file. What is behind a smaller one is freed; behind the old one there are
    /// zeros.
    pub(crate) fn truncate(&self, ino: Ino, size: u64) -> Result<()> {
        if size > MOST_BYTES {
            return Err(Error::posix(Errno::FBIG, format!("{size} bytes for inode {ino}")));
        }
        let old = self.size(ino)?;
        if size > old {
            return self.extend(ino, size);
        }
        let blocks = size.div_ceil(self.block_bytes())..MOST_FILE_BLOCKS;
        while !self.retry(|changes| changes.truncate_step(ino, size, blocks.clone()))? {}
        let inside = size & (self.block_bytes() - 1);
        if inside == 0 || size == old {
            return Ok(());
        }
        match self.zero_in_block(ino, size >> self.block_log(), inside..self.block_bytes()) {
            // Files share the block, and there is none for a copy. The file is shorter even so,
            // and becomes no longer without these zeros.
            Err(error) if error.errno() == Errno::NOSPC => Ok(()),
            outcome => outcome,
        }
    }

    /// Makes a file longer, with zeros behind its old end. A longer one stays as it is.
    pub(crate) fn extend(&self, ino: Ino, size: u64) -> Result<()> {
        let old = self.size(ino)?;
        if size <= old {
            return Ok(());
        }
        self.clear(ino, old..size)?;
        self.set_size(ino, size)
    }

    /// Sets the size, and unmaps the last extents behind it. Returns whether none is left.
    fn truncate_step(&self, ino: Ino, size: u64, blocks: Range<u64>) -> Result<bool> {
        let mut t = self.transactions.begin_step(Kind::Truncate, 0)?;
        t.try_again(self.missed);
        require_file(&mut t, ino)?;
        if t.inode(ino)?.core().size.get() != size {
            t.inode(ino)?.core_mut().size = size.into();
            self.give_up_end(&mut t, ino, size)?;
        }
        let step = unmap_extents(&mut t, ino, FORK, blocks, MOST_UNMAPPED)?;
        require_room_to_unmap(&mut t, ino, &step.extents)?;
        let work = DeferredWork::unmapped(&mut t, (ino, FORK), &step)?;
        let inode = t.inode(ino)?;
        // A file without blocks shares none.
        let flags = inode.core().flags2();
        if inode.extent_count(FORK) == 0 && flags.contains(XfsInodeFlags2::REFLINK) {
            inode.core_mut().flags2 = (flags - XfsInodeFlags2::REFLINK).bits().into();
        }
        self.finish(t, work, &[ino])?;
        Ok(step.is_done)
    }

    /// Says that the block of the new end of a file has lost its end: nothing is written there in
    /// place before that is durable.
    fn give_up_end(&self, t: &mut XfsTransaction<'_>, ino: Ino, size: u64) -> Result<()> {
        if size.is_multiple_of(self.block_bytes()) {
            return Ok(());
        }
        let at = size >> self.block_log();
        let old = mapped(t, ino, FORK, FileBlock(at))?.and_then(|old| part(&old, at, at + 1));
        if let Some(old) = old {
            t.give_up((old.start, 1));
        }
        Ok(())
    }

    /// Makes a hole of a range of bytes.
    pub(crate) fn punch(&self, ino: Ino, bytes: &Range<u64>) -> Result<()> {
        let blocks = self.zero_edges(ino, bytes)?;
        self.unmap_blocks(ino, blocks)
    }

    /// Unmaps a range of blocks, and frees those that no other file has.
    pub(super) fn unmap_blocks(&self, ino: Ino, blocks: Range<u64>) -> Result<()> {
        let mut is_done = blocks.is_empty();
        while !is_done {
            is_done = self.retry(|changes| {
                let t = changes.begin(Kind::Truncate, ino)?;
                changes.unmap_step(t, ino, blocks.clone())
            })?;
        }
        Ok(())
    }

    /// Unmaps blocks of a file that lie from block `start` of the volume on and are unwritten, as
    /// far as that is so still.
    pub(super) fn unmap_unwritten(
        &self,
        ino: Ino,
        blocks: Range<u64>,
        start: FsBlock,
    ) -> Result<()> {
        let mut at = blocks.start;
        while at < blocks.end {
            at = self.retry(|changes| {
                let mut t = changes.begin(Kind::Truncate, ino)?;
                let piece = piece_at(&mut t, ino, FORK, at, blocks.end - at)?;
                let (next, there) = (at + piece.blocks, FsBlock(start.0 + (at - blocks.start)));
                let is_ours = |old: &XfsExtent| old.is_unwritten && old.start == there;
                if piece.extent.as_ref().is_some_and(is_ours) {
                    changes.unmap_step(t, ino, at..next)?;
                }
                Ok(next)
            })?;
        }
        Ok(())
    }

    /// Unmaps the last extents of a range. Returns whether none is left.
    fn unmap_step(&self, mut t: XfsTransaction<'_>, ino: Ino, blocks: Range<u64>) -> Result<bool> {
        require_extents(&mut t, ino, 1)?;
        t.promise_of_reserve(self.tree_blocks());
        let step = unmap_extents(&mut t, ino, FORK, blocks, MOST_UNMAPPED)?;
        t.require_promised()?;
        require_room_to_unmap(&mut t, ino, &step.extents)?;
        // Each may be cut in two.
        step.extents.iter().try_for_each(|old| require_room_to_map(&mut t, ino, old))?;
        let work = DeferredWork::unmapped(&mut t, (ino, FORK), &step)?;
        self.finish(t, work, &[ino])?;
        Ok(step.is_done)
    }

    /// Makes zeros of a range of bytes, and gives its holes unwritten blocks, also for a part of a
    /// block. The range may go beyond the size, which stays.
    ///
    /// # Errors
    /// `ENOSPC` when too few blocks are free for the holes. The range has zeros even so.
    pub(crate) fn zero(&self, ino: Ino, bytes: &Range<u64>) -> Result<()> {
        self.clear(ino, bytes.clone())?;
        let blocks = bytes.start >> self.block_log()..bytes.end.div_ceil(self.block_bytes());
        if bytes.is_empty() { Ok(()) } else { self.allocate(ino, blocks) }
    }

    /// Makes zeros of what is written in a range of bytes.
    pub(super) fn clear(&self, ino: Ino, bytes: Range<u64>) -> Result<()> {
        let blocks = self.zero_edges(ino, &bytes)?;
        let mut at = blocks.start;
        while at < blocks.end {
            at = self.retry(|changes| changes.clear_step(ino, at..blocks.end))?;
        }
        Ok(())
    }

    /// Makes zeros of the first written extent. Returns where the next step begins.
    fn clear_step(&self, ino: Ino, blocks: Range<u64>) -> Result<u64> {
        let mut t = self.begin(Kind::Truncate, ino)?;
        match next_zero_step(&mut t, ino, &blocks)? {
            ZeroStep::Convert(old) => {
                let work = self.convert_extent(&mut t, ino, &old)?;
                self.finish(t, work, &[ino])?;
                Ok(end(&old))
            }
            ZeroStep::Unmap(old) => {
                self.unmap_step(t, ino, old.offset.0..end(&old))?;
                Ok(end(&old))
            }
            ZeroStep::Next(at) => Ok(at),
            ZeroStep::Done => Ok(blocks.end),
        }
    }

    /// Overwrites the bytes of a range that are only a part of their blocks with zeros. Returns the
    /// whole blocks between them.
    fn zero_edges(&self, ino: Ino, bytes: &Range<u64>) -> Result<Range<u64>> {
        let (log, size) = (self.block_log(), self.block_bytes());
        let inside = |at: u64| at & (size - 1);
        let (first, last) = (bytes.start >> log, bytes.end >> log);
        if bytes.is_empty() {
            return Ok(first..first);
        }
        if first == last {
            self.zero_in_block(ino, first, inside(bytes.start)..inside(bytes.end))?;
            return Ok(first..first);
        }
        if inside(bytes.start) > 0 {
            self.zero_in_block(ino, first, inside(bytes.start)..size)?;
        }
        if inside(bytes.end) > 0 {
            self.zero_in_block(ino, last, 0..inside(bytes.end))?;
        }
        Ok(self.whole_blocks(bytes))
    }

    /// Overwrites these bytes of block `at` of a file with zeros, if anything is written there.
    fn zero_in_block(&self, ino: Ino, at: u64, bytes: Range<u64>) -> Result<()> {
        let mut t = self.begin(Kind::ChangeTimes, ino)?;
        let old = mapped(&mut t, ino, FORK, FileBlock(at))?.filter(|old| !old.is_unwritten);
        drop(t);
        let Some(old) = old.and_then(|old| part(&old, at, at + 1)) else { return Ok(()) };
        let buffers = self.transactions.buffers();
        let mut content = vec![0; buffers.geometry().block_size()];
        buffers.read_into(self.device_place(old.start)?.bytes(), &mut content)?;
        if let Some(part) = content.get_mut(index(bytes.start)..index(bytes.end)) {
            part.fill(0);
        }
        let places = self.places(ino, at..at + 1, SpaceFor::Removal)?;
        for place in &places {
            let written =
                self.device_place(place.start).and_then(|place| buffers.write(place, &content));
            if let Err(error) = written {
                return self.abandon_write(ino, &places).and(Err(error));
            }
        }
        self.commit_write(ino, &places, None)
    }

    /// Where a block of a file lies.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is not in the volume.
    pub(crate) fn device_place(&self, block: FsBlock) -> Result<BasicBlock> {
        self.transactions.geometry().place_of(block).ok_or_else(|| {
            let problem = format!("block {block} is not in the volume");
            Error::corrupt(Structure::ExtentRecord, problem)
        })
    }
}

/// What is to be done about the first written blocks of a range.
fn next_zero_step(t: &mut XfsTransaction<'_>, ino: Ino, blocks: &Range<u64>) -> Result<ZeroStep> {
    let mut at = blocks.start;
    for _ in 0..MOST_PASSED_OVER {
        let found = next_mapped(t, ino, FORK, FileBlock(at))?;
        let Some(found) = found.filter(|found| found.offset.0 < blocks.end) else {
            return Ok(ZeroStep::Done);
        };
        let (first, last) = (found.offset.0.max(at), end(&found).min(blocks.end));
        let written = part(&found, first, last).filter(|_| !found.is_unwritten);
        let Some(written) = written else {
            at = last;
            continue;
        };
        let shared = shared_range(t, ino, &written)?;
        let is_shared = shared.as_ref().is_some_and(|shared| shared.start <= first);
        let last = shared.map_or(last, |shared| if is_shared { shared.end } else { shared.start });
        return Ok(match part(&written, first, last) {
            Some(front) if is_shared => ZeroStep::Unmap(front),
            Some(front) => ZeroStep::Convert(front),
            None => ZeroStep::Done,
        });
    }
    Ok(ZeroStep::Next(at))
}
