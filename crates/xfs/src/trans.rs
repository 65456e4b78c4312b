//! Transactions: changes of metadata that happen as a whole or not at all.
//!
//! ```text
//! begin    reserves log space for the kind of the transaction, and blocks
//! read     locks a buffer or an inode; others that want it wait until the commit
//! change   the transaction gets bytes of its own, and notes which chunks differ
//! commit   items -> log; the bytes are published: readers find them from here on
//! home     later, the log has them written to their place, never before it has them itself
//! ```
//!
//! Readers take no lock: they see what the last commit has published. A reader that needs several
//! buffers of an inode as one commit has left them asks for a moment of that inode
//! ([`moment`](crate::buffer::XfsBuffers::moment)). Dropping a transaction undoes it.
//!
//! A commit encodes each inode that it changes, and proves it. Its checksum is computed on its way
//! home, as those of blocks are. A changed block of a directory or of attributes is proved whole
//! when the log is written: 100 names that go to one block in a context are one proof
//! ([`checkpoint`](crate::log) says what becomes of a block that is not sound).
//!
//! Locks are taken in this order: inodes ascending by number, AGI, clusters of inodes, AGF
//! ascending by group, blocks of trees from the root.
//!
//! | file | what it holds |
//! |---|---|
//! | `transaction`, `inode` | one transaction, and the inodes that it changes |
//! | `buffer_item`, `runs`, `inode_item`, `made` | what the log carries, and how it goes home |
//! | `missed` | groups that an operation waits for when it begins again |
//! | `statistics` | what commits cost |
//! | `shared`, `locks` | the tables of these, and the locks by place and by number |
//! | `busy`, `discards` | extents whose change is not durable, and those being discarded |
//! | `counters` | the counters of the superblock |
//! | `tree_rooms` | free blocks of groups that chains may still need for trees |
//! | `rooms` | which data blocks of directories have no room |
//! | `unlinked` | which inode is in front of which in the lists of unlinked ones |
//! | `promise` | free blocks that are promised to data before a transaction takes them |
//! | `reservation`, `log_sizes`, `levels` | how much log space each kind takes |
//! | `work` | what changes of blocks cost |

mod buffer_item;
mod busy;
mod chunks;
mod counters;
mod discards;
mod inode;
mod inode_item;
mod levels;
mod locks;
mod log_sizes;
mod made;
mod missed;
mod promise;
mod reservation;
mod rooms;
mod runs;
mod shared;
mod statistics;
mod transaction;
mod tree_rooms;
mod unlinked;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::Ordering::{self, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;
use std::time::Duration;

use offshoot_kit::counter::WriteStop;
use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::features::XfsVersionBits;
#[cfg(test)]
use offshoot_xfs_format::inode::XfsInodeCore;
use offshoot_xfs_format::superblock::{XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{BasicBlock, Ino, U16, XfsGeometry};

pub(crate) use busy::AgExtent;
use busy::UnsettledExtents;
pub(crate) use counters::{CountChanges, SpaceAtStart, SpaceClaim, VolumeCounters, VolumeCounts};
pub(crate) use discards::DiscardGuard;
use discards::DiscardedExtents;
pub(crate) use inode::{ChangedFork, ForkName, XfsChangedInode};
use inode_item::InodePlace;
pub(crate) use inode_item::XfsInodeCommit;
pub(crate) use levels::MostTreeLevels;
pub(crate) use locks::KeyLocks;
pub(crate) use log_sizes::{DIRECTORY_BLOCKS, HASH_BLOCKS, ReservationSizes};
pub(crate) use missed::MissedLocks;
pub(crate) use promise::BlockPromise;
pub(crate) use reservation::{
    LogReservations, MOST_TARGET_BLOCKS, QUOTAS, XfsLogReservation, XfsTransactionKind,
};
use rooms::DirectoryRooms;
pub(crate) use runs::BufferRuns;
use shared::{EmptiedTables, TransactionShared};
pub(crate) use statistics::CommitStatistics;
use statistics::{BlockWorkCounters, BlockWorkStatistics};
pub(crate) use transaction::{BusyBlocks, XfsTransaction};
use unlinked::UnlinkedOrder;

use crate::buffer::{BufferRole, DiskRun, XfsBuffers};
use crate::log::{LogSequence, XfsLog};

/// How long an operation waits before it begins again: when it has missed no lock that it did not
/// know, and when other chains may need the last blocks of a group.
const SHORT_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Everything that transactions of a volume need.
#[derive(Debug)]
pub(crate) struct XfsTransactions {
    shared: Arc<TransactionShared>,
    log: XfsLog,
    /// Behind the log, whose threads know items.
    _tables: EmptiedTables,
    reservations: LogReservations,
    most_levels: MostTreeLevels,
    counters: Arc<VolumeCounters>,
    /// What was freed. No file gets it before that is durable.
    busy: UnsettledExtents,
    /// What a file has lost, and another place has. No data is written to it before.
    given_up: UnsettledExtents,
    /// What is being discarded. No transaction takes it meanwhile.
    discarded: DiscardedExtents,
    unlinked: UnlinkedOrder,
    directory_rooms: DirectoryRooms,
    work: BlockWorkCounters,
    /// How often data was written in place, where no commit flushes the device for it.
    in_place: AtomicU64,
    /// The fields of the superblock, which change only when it is written.
    superblock: XfsSuperblockFields,
    /// Whether the superblock says that the volume has attributes.
    has_attributes: AtomicBool,
    /// Whether each commit proves all blocks of directories and attributes that it changes.
    proves_all: AtomicBool,
}

impl XfsTransactions {
    /// Transactions on the volume in `buffers`, whose log is `log`.
    pub(crate) fn new(
        buffers: Arc<XfsBuffers>,
        log: XfsLog,
        superblock: &XfsSuperblock,
        space: SpaceAtStart,
        stop: &Arc<WriteStop>,
    ) -> Self {
        let shared = TransactionShared::new(buffers);
        Self {
            _tables: EmptiedTables(shared.clone()),
            shared,
            log,
            reservations: LogReservations::of(&superblock.geometry),
            most_levels: MostTreeLevels::of(&superblock.geometry),
            counters: Arc::new(VolumeCounters::new(space, superblock.geometry.blocks, stop)),
            busy: UnsettledExtents::default(),
            given_up: UnsettledExtents::default(),
            discarded: DiscardedExtents::default(),
            unlinked: UnlinkedOrder::default(),
            directory_rooms: DirectoryRooms::default(),
            work: BlockWorkCounters::default(),
            in_place: AtomicU64::new(0),
            superblock: superblock.fields,
            has_attributes: AtomicBool::new(
                superblock.fields.version_bits().contains(XfsVersionBits::ATTR),
            ),
            proves_all: AtomicBool::new(cfg!(debug_assertions)),
        }
    }

    /// Lets each commit prove all blocks of directories and attributes that it changes, or only
    /// those whose changes ask for it.
    pub(crate) fn prove_all(&self, proves_all: bool) {
        self.proves_all.store(proves_all, Ordering::Relaxed);
    }

    pub(crate) fn geometry(&self) -> &XfsGeometry {
        self.shared.buffers.geometry()
    }

    /// The fields of the superblock; its counters are in [`Self::counters`].
    pub(crate) fn superblock(&self) -> &XfsSuperblockFields {
        &self.superblock
    }

    fn superblock_run(&self) -> DiskRun {
        DiskRun { at: BasicBlock(0), bytes: self.geometry().sector_size() }
    }

    /// Whether the superblock says that the volume has attributes.
    fn has_attributes(&self) -> bool {
        self.has_attributes.load(Ordering::Relaxed)
    }

    /// The version of the superblock, with the bit that says so.
    fn version_with_attributes(&self) -> U16 {
        (self.superblock.versionnum.get() | XfsVersionBits::ATTR.bits()).into()
    }

    /// The most levels that each tree can get.
    pub(crate) fn most_levels(&self) -> &MostTreeLevels {
        &self.most_levels
    }

    pub(crate) fn buffers(&self) -> &Arc<XfsBuffers> {
        &self.shared.buffers
    }

    pub(crate) fn log(&self) -> &XfsLog {
        &self.log
    }

    /// What commits did.
    pub(crate) fn statistics(&self) -> CommitStatistics {
        self.shared.counters.get()
    }

    /// Says that data was written in place: no commit flushes the device for it.
    pub(crate) fn note_in_place(&self) {
        self.in_place.fetch_add(1, SeqCst);
    }

    /// How often data was written in place.
    pub(crate) fn in_place(&self) -> u64 {
        self.in_place.load(SeqCst)
    }

    pub(crate) fn counters(&self) -> &VolumeCounters {
        &self.counters
    }

    /// What is known of the room in directories.
    pub(crate) fn directory_rooms(&self) -> &DirectoryRooms {
        &self.directory_rooms
    }

    /// What transactions that have ended did with blocks.
    pub(crate) fn block_work(&self) -> BlockWorkStatistics {
        self.work.get()
    }

    /// The free bytes of the log with which [`begin_step`](Self::begin_step) does not wait.
    pub(crate) fn room_for_step(&self, kind: XfsTransactionKind) -> u64 {
        self.log.room_for(self.reservations.get(kind).bytes)
    }

    /// Begins a transaction that may take up to `blocks` free blocks. It waits for log space, so
    /// the caller holds no lock that a transaction may want.
    ///
    /// # Errors
    /// `ENOSPC` when too few blocks are free that files may have.
    pub(crate) fn begin(
        &self,
        kind: XfsTransactionKind,
        blocks: u64,
    ) -> Result<XfsTransaction<'_>> {
        self.begin_with(self.reservations.get(kind), blocks, SpaceClaim::Files)
    }

    /// The same for a chain: a transaction of this kind, and deferred work in further steps, each
    /// of which has the log space of the largest.
    pub(crate) fn begin_chain(
        &self,
        kind: XfsTransactionKind,
        blocks: u64,
    ) -> Result<XfsTransaction<'_>> {
        self.begin_with(self.reservations.chain(kind), blocks, SpaceClaim::Files)
    }

    /// The same for one that ends with more free space than it began with: it may take blocks that
    /// are held back from files. It has log space for one step: old intents may hold the tail of a
    /// log that is nearly full.
    pub(crate) fn begin_step(
        &self,
        kind: XfsTransactionKind,
        blocks: u64,
    ) -> Result<XfsTransaction<'_>> {
        let bytes = self.reservations.get(kind).bytes;
        self.begin_with(XfsLogReservation { bytes, count: 1 }, blocks, SpaceClaim::All)
    }

    fn begin_with(
        &self,
        XfsLogReservation { bytes, count }: XfsLogReservation,
        blocks: u64,
        claim: SpaceClaim,
    ) -> Result<XfsTransaction<'_>> {
        let ticket = self.log.reserve(bytes, u32::try_from(count).unwrap_or(1))?;
        self.counters.promise(blocks, claim)?;
        Ok(XfsTransaction::new(self, ticket, blocks, claim))
    }

    /// Waits before an operation begins again that has missed these locks. Its next transaction
    /// waits for the locks themselves.
    pub(crate) fn wait_for_missed(&self, missed: &MissedLocks) {
        let has_new = missed.take_new();
        match missed.take_crowded() {
            Some(ag) => self.counters.tree_rooms().wait(ag, LONGEST_PAUSE),
            None if has_new => {}
            None => thread::sleep(SHORT_PAUSE),
        }
    }

    /// Ends all writing: work whose intents are in the log cannot be done, so only a recovery may
    /// write the volume again.
    pub(crate) fn stop_writing(&self, error: &Error) {
        self.counters.stop(&error.to_string());
    }

    /// Where an inode lies.
    fn inode_place(&self, ino: Ino) -> Result<InodePlace> {
        let geometry = self.geometry();
        let (Some((ag, block, _)), Some(at)) = (geometry.locate(ino), geometry.inode_offset(ino))
        else {
            let problem = format!("inode {ino} is not in the volume");
            return Err(Error::corrupt(Structure::InodeCore, problem));
        };
        let cluster = DiskRun::cluster(geometry, ag, block);
        let offset = usize::try_from(at - cluster.at.bytes()).unwrap_or(usize::MAX);
        Ok(InodePlace { ino, cluster, offset })
    }

    /// The inode as the last commit left it. The caller has its lock.
    fn load_inode(&self, ino: Ino) -> Result<XfsChangedInode> {
        let place = self.inode_place(ino)?;
        if let Some(bytes) = self.shared.logged_inode(ino).and_then(|item| item.bytes()) {
            return XfsChangedInode::load_committed(place, &bytes, self.geometry());
        }
        let cluster = self.shared.buffers.read(&[place.cluster], BufferRole::InodeCluster)?;
        let bytes = cluster.bytes().get(place.offset..);
        let bytes = bytes.and_then(|rest| rest.get(..self.geometry().inode_size()));
        XfsChangedInode::load(place, bytes.unwrap_or_default(), self.geometry())
    }

    /// The committed core of an inode, which readers may not see in its cluster yet.
    #[cfg(test)]
    pub(crate) fn committed_core(&self, ino: Ino) -> Option<XfsInodeCore> {
        let bytes = self.shared.logged_inode(ino)?.bytes()?;
        XfsInodeCore::view(&bytes).ok().copied()
    }

    /// The last commit of an inode; `None` when the inode is in its place, so that all its commits
    /// are durable.
    pub(crate) fn last_commit(&self, ino: Ino) -> Option<XfsInodeCommit> {
        self.shared.logged_inode(ino)?.last_commit()
    }

    /// Changes the superblock.
    pub(crate) fn change_superblock(
        &self,
        change: impl FnOnce(&mut XfsSuperblockFields),
    ) -> Result<Option<LogSequence>> {
        let mut transaction = self.begin(XfsTransactionKind::Superblock, 0)?;
        transaction.change_superblock(change)?;
        transaction.commit()
    }

    /// Writes the counters to the superblock. Nothing may change them meanwhile.
    pub(crate) fn write_counters(&self) -> Result<()> {
        let counts = self.counters.counts();
        let has_attributes = self.has_attributes();
        let sequence = self.change_superblock(|fields| {
            if has_attributes {
                fields.versionnum = self.version_with_attributes();
            }
            fields.icount = counts.inodes.into();
            fields.ifree = counts.free_inodes.into();
            fields.fdblocks = counts.free_blocks.into();
            fields.log_incompat = 0.into();
        })?;
        sequence.map_or(Ok(()), |sequence| self.log.force(sequence))
    }

    /// Ends all writing: the counters go to the superblock, everything is written home, and the log
    /// is empty. No transaction runs, and none may begin behind it.
    pub(crate) fn end(&self) -> Result<()> {
        self.write_counters()?;
        self.log.unmount()
    }

    /// The same for the only user of the volume.
    pub(crate) fn unmount(self) -> Result<()> {
        self.end()
    }
}

/// The error about a transaction that does what it must not.
#[cold]
fn misused(problem: impl Into<String>) -> Error {
    Error::corrupt(Structure::BtreeBlock, problem.into())
}
