//! The second pass: transactions onto blocks, in the order of their commit ops.
//!
//! Blocks that items change stay in memory until the LSN changes, because several transactions of
//! one record have one LSN, and a block that carries it takes no more of their changes. Then each
//! gets the LSN and its checksum, is proved as its type, and is written.
//!
//! When the changes of one LSN take too much memory, the blocks that wait are written with the LSN
//! before it, at which no record begins. So a recovery that is cut then replays them again.
//!
//! ```text
//! record at 3:40, two transactions     block 8: changes of both, written once with LSN 3:40
//! too much for memory after the first  block 8: written with 3:39, read again, written with 3:40
//! ```

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::IoSlice;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Malformed, Result};
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::inode::{XfsInode, XfsInodeCore};
use offshoot_xfs_format::log::items::{XfsBufferType, XfsIcreateItem, XfsItemType, XfsReplayTurn};
use offshoot_xfs_format::log::{XfsCheckpoint, XfsLogItem};
use offshoot_xfs_format::{AgIno, BasicBlock, Ino, Lsn, XfsGeometry};

use super::cancel::CancelledBuffers;
use super::log::in_log;
use super::pieces::DirectoryPieces;
use super::verify;
use crate::buffer::{damaged_at, malformed};
use crate::report::XfsReporter;

/// The bytes of blocks that wait for the LSN to change.
const MOST_WAITING: usize = 32 << 20;

/// The blocks that one request writes.
const MOST_SLICES: usize = 256;

/// The turns of the items of a transaction.
const TURNS: [XfsReplayTurn; 4] = [
    XfsReplayTurn::Buffers,
    XfsReplayTurn::Others,
    XfsReplayTurn::InodeBuffers,
    XfsReplayTurn::Cancels,
];

/// What a block in memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayedContent {
    /// What the device has.
    Unchanged,
    /// A block of a type, which gets the LSN and a checksum.
    Typed(XfsBufferType),
    /// Bytes that are written as they are: inodes, which have their checksums already, and blocks
    /// of no known type.
    Plain,
}

/// A block, or an inode, in memory.
#[derive(Debug)]
pub(super) struct ReplayedBlock {
    pub(super) bytes: Vec<u8>,
    pub(super) content: ReplayedContent,
}

/// A replay onto a device.
pub(super) struct LogReplay<'a> {
    pub(super) device: &'a Arc<dyn BlockDevice>,
    pub(super) geometry: XfsGeometry,
    /// No block has an LSN from here on.
    pub(super) head: Lsn,
    pub(super) reporter: Option<&'a XfsReporter>,
    pub(super) cancels: CancelledBuffers,
    /// The LSN of the transactions that are replayed now.
    pub(super) lsn: Lsn,
    /// Blocks by their place. No two overlap.
    waiting: BTreeMap<u64, ReplayedBlock>,
    waiting_bytes: usize,
    /// Blocks that were torn or damaged on the device, by place: their types and lengths. Changes
    /// that they have already are replayed too, which mends a torn write. They are proved at the
    /// end, because they may contradict themselves until then.
    pub(super) doubtful: BTreeMap<u64, (XfsBufferType, usize)>,
    /// Inodes that are not sound yet. Those that were torn may contradict themselves until the last
    /// of their items, so they are proved at the end too.
    pub(super) doubtful_inodes: BTreeSet<Ino>,
    pub(super) pieces: DirectoryPieces,
    pub(super) counts: ReplayCounts,
}

/// What a replay did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplayCounts {
    pub(super) transactions: u64,
    /// Items that were replayed.
    pub(super) replayed: u64,
    /// Items that were not, because the block was newer or is free.
    pub(super) skipped: u64,
}

impl<'a> LogReplay<'a> {
    pub(super) fn new(
        device: &'a Arc<dyn BlockDevice>,
        geometry: &XfsGeometry,
        head: Lsn,
        reporter: Option<&'a XfsReporter>,
        cancels: CancelledBuffers,
    ) -> Self {
        Self {
            device,
            geometry: geometry.clone(),
            head,
            reporter,
            cancels,
            lsn: Lsn(0),
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            doubtful: BTreeMap::new(),
            doubtful_inodes: BTreeSet::new(),
            pieces: DirectoryPieces::default(),
            counts: ReplayCounts::default(),
        }
    }

    /// Replays a transaction.
    pub(super) fn transaction(&mut self, checkpoint: &XfsCheckpoint) -> Result<()> {
        if self.lsn != checkpoint.lsn {
            self.write_out(self.lsn).map_err(|error| in_log(self.lsn, error))?;
            self.lsn = checkpoint.lsn;
        }
        self.counts.transactions += 1;
        for turn in TURNS {
            for regions in checkpoint.items() {
                let replayed = XfsLogItem::parse(regions)
                    .map_err(malformed)
                    .and_then(|item| if item.turn() == turn { self.item(&item) } else { Ok(()) });
                replayed.map_err(|error| in_log(self.lsn, error))?;
            }
        }
        Ok(())
    }

    /// Writes what waits, and completes and proves what could not be before.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.complete_rest().map_err(|error| in_log(self.lsn, error))
    }

    fn complete_rest(&mut self) -> Result<()> {
        self.write_out(self.lsn)?;
        let geometry = self.geometry.clone();
        for ino in std::mem::take(&mut self.doubtful_inodes) {
            let Some(at) = geometry.inode_offset(ino) else { continue };
            self.change_inode(at, |inode| {
                XfsInode::verify(inode, &geometry, ino).map(|_| (false, ()))
            })?;
            self.forget(BasicBlock(at / BASIC_BLOCK));
        }
        std::mem::take(&mut self.pieces).complete(self.device, &geometry)?;
        for (place, (kind, len)) in std::mem::take(&mut self.doubtful) {
            let place = BasicBlock(place);
            let bytes = &self.block(place, len)?.bytes;
            verify::verify(kind, &geometry, place, bytes)
                .map_err(|problem| damaged_at(place, problem))?;
            self.forget(place);
        }
        Ok(())
    }

    fn item(&mut self, item: &XfsLogItem<'_>) -> Result<()> {
        item.check(&self.geometry).map_err(malformed)?;
        let is_replayed = match item {
            XfsLogItem::Buffer(buffer) => self.buffer(buffer)?,
            XfsLogItem::Inode(inode) => self.inode(inode)?,
            XfsLogItem::Icreate(create) => self.create_inodes(create)?,
            // Records of quotas are neither shown nor kept: a volume with quotas is only read.
            XfsLogItem::Unsupported(XfsItemType::Dquot | XfsItemType::QuotaOff) => false,
            XfsLogItem::Unsupported(item) => return Err(unsupported(*item)),
            _ => return Ok(()),
        };
        self.counts.replayed += u64::from(is_replayed);
        self.counts.skipped += u64::from(!is_replayed);
        Ok(())
    }

    /// Fills a chunk with free inodes. Their own items follow.
    fn create_inodes(&mut self, create: &XfsIcreateItem) -> Result<bool> {
        if self.cancels.has_cluster_of(create, &self.geometry) {
            return Ok(false);
        }
        let geometry = self.geometry.clone();
        if !geometry.has_checksums() {
            return Err(unsupported(XfsItemType::Icreate));
        }
        let first = create.block.0 << geometry.inodes_per_block_log();
        let start = geometry.place(create.ag, create.block);
        for index in 0..create.count {
            let ino = geometry.ino(create.ag, AgIno(first + index));
            let mut bytes = vec![0; geometry.inode_size()];
            XfsInodeCore::fresh(&geometry, ino, create.generation).write(&mut bytes, &geometry);
            let place = BasicBlock(start.0 + (u64::from(index) << geometry.inode_log >> 9));
            self.put(place, ReplayedBlock { bytes, content: ReplayedContent::Plain })?;
        }
        Ok(true)
    }

    /// The block of `len` bytes at `place`, as all items before left it.
    pub(super) fn block(&mut self, place: BasicBlock, len: usize) -> Result<&mut ReplayedBlock> {
        self.make_room(place, len)?;
        match self.waiting.entry(place.0) {
            Entry::Occupied(block) => Ok(block.into_mut()),
            Entry::Vacant(room) => {
                let mut bytes = vec![0; len];
                self.device.read_at(place.bytes(), &mut bytes).map_err(|error| {
                    let (at, name) = (place.bytes(), self.device.name());
                    Error::io(format!("reading {len} bytes at {at} of {name}"), error)
                })?;
                self.waiting_bytes += len;
                Ok(room.insert(ReplayedBlock { bytes, content: ReplayedContent::Unchanged }))
            }
        }
    }

    /// Keeps a block in the place of an older one.
    fn put(&mut self, place: BasicBlock, block: ReplayedBlock) -> Result<()> {
        let len = block.bytes.len();
        self.make_room(place, len)?;
        if self.waiting.insert(place.0, block).is_none() {
            self.waiting_bytes += len;
        }
        Ok(())
    }

    /// Forgets the block at `place` if no item changed it.
    pub(super) fn forget(&mut self, place: BasicBlock) {
        if let Entry::Occupied(block) = self.waiting.entry(place.0)
            && block.get().content == ReplayedContent::Unchanged
        {
            self.waiting_bytes -= block.remove().bytes.len();
        }
    }

    /// Writes all that waits if there is too much, or if one that is not this block overlaps it.
    fn make_room(&mut self, place: BasicBlock, len: usize) -> Result<()> {
        let end = place.0 + (len as u64 >> 9);
        let last = self.waiting.range(..end).next_back();
        let overlaps = last.is_some_and(|(&at, block)| {
            at + (block.bytes.len() as u64 >> 9) > place.0
                && (at, block.bytes.len()) != (place.0, len)
        });
        if overlaps || self.waiting_bytes > MOST_WAITING {
            self.write_out(Lsn(self.lsn.0.saturating_sub(1)))?;
        }
        Ok(())
    }

    /// Completes all blocks that wait, with the LSN `stamp`, and writes them.
    fn write_out(&mut self, stamp: Lsn) -> Result<()> {
        let mut blocks = std::mem::take(&mut self.waiting);
        self.waiting_bytes = 0;
        blocks.retain(|_, block| block.content != ReplayedContent::Unchanged);
        for (&place, block) in &mut blocks {
            if let ReplayedContent::Typed(kind) = block.content {
                let at = BasicBlock(place);
                let proof = complete(kind, &self.geometry, at, &mut block.bytes, stamp);
                if !self.doubtful.contains_key(&place) {
                    proof.map_err(|problem| damaged_at(at, problem))?;
                }
            }
        }
        let mut blocks = blocks.iter().peekable();
        while let Some((&start, first)) = blocks.next() {
            let mut slices = vec![IoSlice::new(&first.bytes)];
            let mut end = start + (first.bytes.len() as u64 >> 9);
            while slices.len() < MOST_SLICES
                && let Some((&at, next)) = blocks.next_if(|(at, _)| **at == end)
            {
                slices.push(IoSlice::new(&next.bytes));
                end = at + (next.bytes.len() as u64 >> 9);
            }
            let at = BasicBlock(start).bytes();
            self.device.write_vectored_at(at, &slices).map_err(|error| {
                let what = format!("writing at {at} of {}", self.device.name());
                Error::io(what, error)
            })?;
        }
        Ok(())
    }
}

/// Gives a block its LSN and its checksum, and proves it.
fn complete(
    kind: XfsBufferType,
    geometry: &XfsGeometry,
    place: BasicBlock,
    bytes: &mut [u8],
    stamp: Lsn,
) -> Result<(), Malformed> {
    if let Some(identity) = XfsIdentity::of_magic(geometry, bytes)
        && identity != XfsIdentity::INODE
    {
        identity.seal(bytes, stamp);
    }
    verify::verify(kind, geometry, place, bytes)
}

/// The error about an item that we do not replay.
fn unsupported(item: XfsItemType) -> Error {
    let what = format!("an item of the log: {}", item.name());
    Error::unsupported(Code::LogNotReplayed, what)
}
