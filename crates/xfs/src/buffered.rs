//! Data of files that is only in memory: written by programs, and not on the device yet.
//!
//! ```text
//! write        | promise of blocks | bytes go to memory
//! write-back   | places (`file`)   | bytes go to the device | places are mapped, the size grows
//! ```
//!
//! A file has whole blocks in memory. A write fills the rest of its first and its last block from
//! the device, or with zeros. Memory behind the end of a file is always zeros.
//!
//! # Promises
//!
//! A write of a block that a hole has, or that files share, takes a promise of one block. While a
//! file has such blocks, or unwritten ones, in memory, it has a promise for its tree of extents
//! too: as if each block became an extent of its own, each range of blocks were the first to split
//! a full block of the tree, and what one step may need on top. `ENOSPC` is an answer to a write,
//! and never to a write-back. With blocks of 4 KiB and a tree of at most five levels:
//!
//! ```text
//! written over blocks of its own    0 blocks
//! the first block of a file         1 for data, 3 for extents, 2 * 5 + 1 for a step      15
//! 1000 blocks of a hole             1000, and 18 for extents, and 11                   1029
//! 1000 blocks apart in a hole       1000, and 1026 for extents, and 11                 2037
//! ```
//!
//! The trees of groups have blocks that are held back for them (`group`). A volume without so many
//! free blocks writes everything back once: most of what is promised to trees comes back then, and
//! only if that is too little the write fails.
//!
//! A promise is the worst case, so a change that makes it too large needs no care: another thread
//! allocates the hole, or the other file that shared a block is removed. What could make it too
//! small needs the range written back first: a clone lets files share blocks.
//!
//! # Write-back
//!
//! The longest rows of blocks go first to places in few extents, and then to the device in few
//! writes; those of many small files together. A write-back has the bytes as they were when it
//! began. What programs write meanwhile goes to a copy, and stays for the next one. The bytes leave
//! memory when the file maps what is on the device. So a reader, which looks into memory first and
//! at the mapping then, misses none of them. The size on the device grows with each row, up
//! to its end, so that a crash shows no size without the data. When a write-back fails, all that it
//! did not commit stays in memory, and the next one tries again.
//!
//! Files are written back when a thread asks for it, when their data is old, when half of the bound
//! is used, and by a writer that finds all of the bound used.
//!
//! # Locks
//!
//! | call | the lock of the inode |
//! |---|---|
//! | `write`, `write_direct`, `truncate`, `discard` | exclusively |
//! | `settle` | exclusively, with the change that follows; shared for a direct read |
//! | `read`, `next_data` | shared |
//! | `write_back`, `flush_places`, `write_back_all`, `write_back_due` | any, or none |
//!
//! A thread that has a `SettledFile` calls only `settle` for files with larger numbers, and reads.
//!
//! A file has two locks. `outgoing` is held by a write-back from its beginning to its end, and by a
//! change of the mapping of the file (`settle`); those of several files are taken in ascending
//! order, or only tried. `state` is held for the bytes in memory. In this order: locks of inodes,
//! `outgoing`, `state` or the table of buffers in use, and then those of transactions or the table
//! of files with data. No transaction is open when a lock of this room is taken.
//!
//! | file | what it does |
//! |---|---|
//! | `memory` | the bytes of one file, and what is promised to them |
//! | `read`, `write` | calls that read and change a file |
//! | `write_back` | from memory to the device |
//! | `upkeep` | bounds, ages, the background |

mod memory;
mod read;
#[cfg(test)]
mod tests;
mod upkeep;
mod write;
mod write_back;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use offshoot_kit::counter::{NonNegativeCounter, WriteStop};
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_kit::shards::{SHARDS, shard_of};
use offshoot_kit::statistics;
use offshoot_kit::sync::Mutex;
use offshoot_vfs::Result;
use offshoot_xfs_format::Ino;

use crate::buffer::XfsBuffers;
use crate::defer::IntentIds;
use crate::file::XfsFileChanges;
use crate::inode::{XfsInodes, file_id};
use crate::log::WorkSignal;
use crate::trans::XfsTransactions;
pub(crate) use memory::BufferedFile;
pub(crate) use write::SettledFile;

/// So many entries of a shard for buffers are kept whether these are in use or not.
const LEAST_OPEN: usize = 16;

/// How much data is in memory at most, and how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferLimits {
    /// The bytes of all files. A write may go over it by its last MiB. Files that cannot be
    /// written back may have as much besides.
    pub(crate) bytes: u64,
    /// The age at which data is written back in the background.
    pub(crate) age: Duration,
}

statistics! {
    /// What the buffers of a volume did since it was opened.
    BufferedStatistics, BufferedCounters, "data_":
    /// Blocks that writes have promised themselves.
    promised_blocks,
    /// Rows of blocks that were written back.
    rows,
    /// Places that they went to.
    places,
    /// Writes to the device.
    device_writes,
    /// Their bytes.
    device_bytes,
    /// How often a row could not be written back.
    failures,
    /// How often a writer wrote back because all of the bound was used.
    waits_at_bound,
    /// How often a writer wrote back because no block was free.
    waits_for_space,
}

/// A shard of the buffers that are in use.
#[derive(Debug, Default)]
struct OpenBuffers {
    by_number: BTreeMap<Ino, Weak<BufferedFile>>,
    /// With more entries, those of buffers that nothing uses go away.
    most: usize,
}

impl OpenBuffers {
    fn get(&self, ino: Ino) -> Option<Arc<BufferedFile>> {
        self.by_number.get(&ino).and_then(Weak::upgrade)
    }

    fn add(&mut self, file: &Arc<BufferedFile>) {
        self.by_number.insert(file.ino, Arc::downgrade(file));
        if self.by_number.len() > self.most {
            self.by_number.retain(|_, file| file.strong_count() > 0);
            self.most = 2 * self.by_number.len() + LEAST_OPEN;
        }
    }

    /// Removes a buffer: its file is removed.
    fn remove(&mut self, file: &BufferedFile) {
        if self.get(file.ino).is_some_and(|found| std::ptr::eq(Arc::as_ptr(&found), file)) {
            self.by_number.remove(&file.ino);
        }
    }
}

/// The files of a volume that have data in memory.
#[derive(Debug)]
pub(crate) struct BufferedFiles {
    /// Each inode in use has one buffer, so that there is one lock and one size.
    open: [Mutex<OpenBuffers>; SHARDS],
    /// Those with data in memory.
    dirty: Mutex<BTreeMap<Ino, Arc<BufferedFile>>>,
    /// The bytes of all files.
    bytes: NonNegativeCounter,
    /// How many writes in place are durable. Held by the thread that flushes the device for them.
    flushed: Mutex<u64>,
    limits: BufferLimits,
    signal: WorkSignal,
    counters: BufferedCounters,
}

impl BufferedFiles {
    /// None yet.
    pub(crate) fn new(limits: BufferLimits, stop: &Arc<WriteStop>) -> Self {
        Self {
            open: Default::default(),
            dirty: Mutex::default(),
            bytes: NonNegativeCounter::new("buffered bytes", stop),
            flushed: Mutex::default(),
            limits,
            signal: WorkSignal::default(),
            counters: BufferedCounters::default(),
        }
    }

    /// How many writes in place are durable.
    pub(crate) fn flushed(&self) -> u64 {
        *self.flushed.lock()
    }

    /// The bytes in memory of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    pub(crate) fn statistics(&self) -> BufferedStatistics {
        self.counters.get()
    }

    fn open(&self, ino: Ino) -> &Mutex<OpenBuffers> {
        &self.open[shard_of(file_id(ino))]
    }

    /// The buffer of a file, if it is in use.
    pub(crate) fn in_use(&self, ino: Ino) -> Option<Arc<BufferedFile>> {
        self.open(ino).lock().get(ino)
    }

    /// Those with data in memory, by number.
    fn all(&self) -> Vec<Arc<BufferedFile>> {
        self.dirty.lock().values().cloned().collect()
    }
}

/// What reads and changes the data of files through memory.
#[derive(Clone, Copy)]
pub(crate) struct XfsBufferedData<'e> {
    pub(crate) transactions: &'e XfsTransactions,
    pub(crate) ids: &'e IntentIds,
    pub(crate) inodes: &'e XfsInodes,
    pub(crate) read_ahead: &'e ReadAhead,
    pub(crate) files: &'e BufferedFiles,
}

impl<'e> XfsBufferedData<'e> {
    fn buffers(&self) -> &'e XfsBuffers {
        self.transactions.buffers()
    }

    pub(crate) fn changes(&self) -> XfsFileChanges<'e> {
        XfsFileChanges::new(self.transactions, self.ids)
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.transactions.geometry().block_size() as u64
    }

    /// The buffer of a regular file: the one in use, or a new one. The caller has the lock of the
    /// inode.
    pub(crate) fn file(&self, ino: Ino) -> Result<Arc<BufferedFile>> {
        if let Some(found) = self.files.in_use(ino) {
            return Ok(found);
        }
        // No write-back has a buffer of it, and no other thread changes it, so this stays.
        let size = self.stored_size(ino)?;
        let mut open = self.files.open(ino).lock();
        if let Some(found) = open.get(ino) {
            return Ok(found);
        }
        let file = Arc::new(BufferedFile::new(self.transactions, ino, size));
        open.add(&file);
        Ok(file)
    }
}
