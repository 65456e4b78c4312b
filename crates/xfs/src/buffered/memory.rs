//! The bytes of one file that are only in memory, and what is promised to them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use offshoot_kit::ranges::Ranges;
use offshoot_kit::runs::DirtyRuns;
use offshoot_kit::sync::{Mutex, RwLock};
use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::btree::XfsTree;

use super::XfsBufferedData;
use crate::file::XfsWriteNeed;
use crate::trans::{BlockPromise, XfsTransactions};

/// The buffer of a file.
#[derive(Debug)]
pub(crate) struct BufferedFile {
    pub(super) ino: Ino,
    /// Held while data is written back, and while the mapping of the file is changed.
    pub(super) outgoing: Mutex<()>,
    pub(super) state: RwLock<DirtyState>,
    /// What is promised to the bytes in memory.
    pub(super) promise: Arc<BlockPromise>,
}

impl BufferedFile {
    pub(super) fn new(transactions: &XfsTransactions, ino: Ino, size: u64) -> Self {
        Self {
            ino,
            outgoing: Mutex::default(),
            state: RwLock::new(DirtyState::new(size)),
            promise: BlockPromise::none(transactions),
        }
    }

    pub(crate) fn ino(&self) -> Ino {
        self.ino
    }

    /// The size of the file.
    pub(crate) fn size(&self) -> u64 {
        self.state.read().size
    }

    /// How often bytes were written to memory.
    pub(crate) fn writes(&self) -> u64 {
        self.state.read().writes
    }

    /// The size of the file, and the blocks in memory that take others at write-back.
    pub(crate) fn size_and_blocks(&self) -> (u64, u64) {
        let state = self.state.read();
        (state.size, state.take_count)
    }

    /// Whether its last row could not be written back.
    pub(super) fn is_stuck(&self) -> bool {
        self.state.read().is_stuck
    }

    /// Whether it has bytes in memory.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.state.read().runs.is_empty()
    }
}

/// The bytes of a file in memory.
#[derive(Debug)]
pub(super) struct DirtyState {
    pub(super) runs: DirtyRuns,
    pub(super) size: u64,
    /// How often bytes were written to memory.
    pub(super) writes: u64,
    /// The size on the device.
    pub(super) stored_size: u64,
    /// When the oldest bytes were written.
    pub(super) since: Option<Instant>,
    /// The blocks in memory that take other blocks at write-back.
    takes: Ranges,
    take_count: u64,
    /// The blocks in memory at whose write-back extents change; those of `takes` among them.
    changes: Ranges,
    change_count: u64,
    /// The most extents that the file has on the device, as far as was seen.
    pub(super) extents: u64,
    /// The block from which on the file was seen to have a hole.
    pub(super) hole_from: Option<u64>,
    /// Whether the file is removed. Another one may have the inode, so nothing is written to it.
    pub(super) is_discarded: bool,
    /// Whether its last row could not be written back.
    pub(super) is_stuck: bool,
}

impl DirtyState {
    fn new(size: u64) -> Self {
        Self {
            runs: DirtyRuns::new(|_| 0),
            size,
            writes: 0,
            stored_size: size,
            since: None,
            takes: Ranges::default(),
            take_count: 0,
            changes: Ranges::default(),
            change_count: 0,
            extents: 0,
            hole_from: None,
            is_discarded: false,
            is_stuck: false,
        }
    }

    /// Proves that the file is not removed.
    pub(super) fn require_file(&self, ino: Ino) -> Result<()> {
        if self.is_discarded {
            return Err(Error::posix(Errno::NOENT, format!("inode {ino}, which is removed")));
        }
        Ok(())
    }

    /// Notes what the write-back of blocks needs, none of which are in memory.
    pub(super) fn add_need(&mut self, blocks: &Range<u64>, need: XfsWriteNeed) {
        let count = blocks.end - blocks.start;
        if need == XfsWriteNeed::Blocks {
            self.takes.insert(blocks.clone());
            self.take_count += count;
        }
        if need != XfsWriteNeed::Nothing {
            self.changes.insert(blocks.clone());
            self.change_count += count;
        }
    }

    /// Notes that what these blocks needed is done. Each was at most two extents more.
    pub(super) fn meet_needs(&mut self, blocks: &Range<u64>) {
        self.extents = self.extents.saturating_add(2 * self.changes.count(blocks));
        self.remove_needs(blocks);
    }

    /// Forgets what blocks need: they are not in memory, or the file maps others for them.
    pub(super) fn remove_needs(&mut self, blocks: &Range<u64>) {
        self.take_count -= self.takes.count(blocks);
        self.takes.remove(blocks);
        self.change_count -= self.changes.count(blocks);
        self.changes.remove(blocks);
    }
}

impl XfsBufferedData<'_> {
    /// The free blocks that the write-back of a file may take.
    ///
    /// A file that was written in order may have a tree whose blocks are all full. One more extent
    /// splits such a block, and so may the first of each range of changes. From then on, a block
    /// has room for half of its records. For three blocks at three places of a tree with 250
    /// records in a block, these are `3 + 6 / 125`, rounded up: 4.
    pub(super) fn needed(&self, state: &DirtyState) -> u64 {
        if state.change_count == 0 {
            return 0;
        }
        let geometry = self.transactions.geometry();
        let levels = self.transactions.most_levels().data;
        // An extent that becomes written in its middle is three, so each block adds up to two.
        let mut added = state.change_count.saturating_mul(2);
        let (mut splits, mut records) = (state.changes.len() as u64, state.extents);
        let mut tree = 0;
        for level in 0..levels {
            let most = XfsTree::Extents.capacity(geometry, u16::from(level > 0)) as u64;
            let half = (most / 2).max(2);
            if level > 0 {
                // What other calls have added meanwhile is not known: it can fill many blocks with
                // extents, but hardly one above them.
                splits = splits.min(records / most.max(1));
            }
            added = added.div_ceil(half) + splits;
            tree += added;
            if added <= 1 {
                break;
            }
            (splits, records) = (added, records.div_ceil(half));
        }
        // What one step may need, and a copy of the block at the old end that files share.
        state.take_count + tree + 2 * levels + 1
    }

    /// Removes bytes that are whole blocks from memory, and gives back what was promised to them.
    /// The caller has `outgoing`.
    pub(super) fn forget(&self, file: &BufferedFile, state: &mut DirtyState, range: &Range<u64>) {
        let before = state.runs.bytes();
        state.runs.remove(range);
        self.files.bytes.sub(before - state.runs.bytes());
        let log = self.transactions.geometry().block_log;
        state.remove_needs(&(range.start >> log..range.end.div_ceil(self.block_bytes())));
        self.settle_accounts(file, state);
    }

    /// Gives back what is promised beyond the needs of a file. One without bytes in memory leaves
    /// the table.
    pub(super) fn settle_accounts(&self, file: &BufferedFile, state: &mut DirtyState) {
        file.promise.lower_to(self.needed(state));
        if state.runs.is_empty() {
            state.since = None;
            state.is_stuck = false;
            self.files.dirty.lock().remove(&file.ino);
        }
    }
}
