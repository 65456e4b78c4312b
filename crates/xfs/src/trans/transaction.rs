//! One transaction: what it holds and changes.

mod commit;
mod hold;
mod space;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::inode::INODE_CRC;
use offshoot_xfs_format::log::items::{XfsIcreateItem, parts_in_chunks};
use offshoot_xfs_format::{AgIno, AgNumber, BasicBlock, Ino, XfsGeometry, csum};

use super::busy::AgExtent;
use super::chunks::DirtyChunks;
use super::counters::{CountChanges, SpaceClaim};
use super::inode::XfsChangedInode;
use super::inode_item::NEXT_UNLINKED;
use super::made::MadeChunk;
use super::missed::{HeadersInOrder, MissedHeaders, MissedLocks};
use super::promise::BlockPromise;
use super::runs::BufferRuns;
use super::statistics::BlockWork;
use super::{XfsTransactions, misused};
use crate::buffer::{BufferRole, DiskRun, XfsBuffer};
use crate::log::{LogSequence, LogTicket, LoggedItem};
pub(crate) use space::BusyBlocks;

/// A buffer that a transaction has locked.
#[derive(Debug)]
struct HeldBuffer {
    runs: BufferRuns,
    role: BufferRole,
    content: HeldContent,
    /// Whether it is a cluster of a new chunk of inodes, which the log has as a whole.
    is_made: bool,
    /// Whether the commit proves it whole.
    needs_proof: bool,
}

impl HeldBuffer {
    fn new(runs: BufferRuns, role: BufferRole, content: HeldContent) -> Self {
        Self { runs, role, content, is_made: false, needs_proof: false }
    }
}

#[derive(Debug)]
enum HeldContent {
    /// As the last transaction left it.
    Committed(Arc<XfsBuffer>),
    /// With changes of this one.
    Changed { bytes: Box<[u8]>, dirty: DirtyChunks },
    /// Its blocks are free.
    Cancelled,
}

/// A transaction. It holds what it reads and changes locked until its commit; others see nothing
/// of it before. Dropping it undoes everything.
#[derive(Debug)]
pub(crate) struct XfsTransaction<'e> {
    engine: &'e XfsTransactions,
    ticket: LogTicket,
    buffers: BTreeMap<BasicBlock, HeldBuffer>,
    inodes: BTreeMap<Ino, XfsChangedInode>,
    /// Chunks of new inodes, intents, and their ends.
    others: Vec<Arc<dyn LoggedItem>>,
    counts: CountChanges,
    /// The free blocks that it may still take.
    promised: u64,
    /// Which of them.
    claim: SpaceClaim,
    /// The promise that it borrows from, which gets back what it does not take.
    lender: Option<Arc<BlockPromise>>,
    /// What it has freed.
    freed: Vec<(AgNumber, AgExtent)>,
    /// What a file has lost by it, and another place has.
    given_up: Vec<(AgNumber, AgExtent)>,
    missed: MissedHeaders,
    /// The headers that it waits for before it has any, and who is told what it has missed.
    first: HeadersInOrder,
    told: Option<&'e MissedLocks>,
    /// The blocks that trees of groups may need in later steps.
    tree_rooms: BTreeMap<AgNumber, u64>,
    /// What it knows of the order of unlinked inodes, and others do not yet.
    unlinked: BTreeMap<Ino, Option<Ino>>,
    work: BlockWork,
}

impl<'e> XfsTransaction<'e> {
    pub(super) fn new(
        engine: &'e XfsTransactions,
        ticket: LogTicket,
        promised: u64,
        claim: SpaceClaim,
    ) -> Self {
        Self {
            engine,
            ticket,
            buffers: BTreeMap::new(),
            inodes: BTreeMap::new(),
            others: Vec::new(),
            counts: CountChanges::default(),
            promised,
            claim,
            lender: None,
            freed: Vec::new(),
            given_up: Vec::new(),
            missed: MissedHeaders::default(),
            first: HeadersInOrder::new(),
            told: None,
            tree_rooms: BTreeMap::new(),
            unlinked: BTreeMap::new(),
            work: BlockWork::default(),
        }
    }

    pub(crate) fn engine(&self) -> &'e XfsTransactions {
        self.engine
    }

    pub(crate) fn geometry(&self) -> &'e XfsGeometry {
        self.engine.geometry()
    }

    /// The bytes of a buffer, with the changes of this transaction. Locks it.
    pub(crate) fn read(&mut self, runs: impl Into<BufferRuns>, role: BufferRole) -> Result<&[u8]> {
        let runs = runs.into();
        let at = runs.at();
        self.hold(runs, role)?;
        self.bytes(at)
    }

    /// The bytes of a buffer that the transaction holds.
    pub(crate) fn bytes(&self, place: BasicBlock) -> Result<&[u8]> {
        bytes_of(&self.buffers, place)
    }

    /// These bytes of a buffer that the transaction holds, to be overwritten. They are logged.
    pub(crate) fn change(&mut self, place: BasicBlock, range: Range<usize>) -> Result<&mut [u8]> {
        let held = self.buffers.get_mut(&place);
        let held = held.ok_or_else(|| misused(format!("block {place} is not locked")))?;
        if let HeldContent::Committed(buffer) = &held.content {
            let (bytes, dirty) = (buffer.bytes().into(), DirtyChunks::new(held.runs.bytes()));
            self.work.copied_bytes += buffer.bytes().len() as u64;
            held.content = HeldContent::Changed { bytes, dirty };
        }
        let HeldContent::Changed { bytes, dirty } = &mut held.content else {
            return Err(misused(format!("block {place} is free")));
        };
        let len = bytes.len();
        let part = bytes
            .get_mut(range.clone())
            .ok_or_else(|| misused(format!("bytes {range:?} of the {len} at {place}")))?;
        dirty.add(range);
        Ok(part)
    }

    /// Overwrites bytes of a buffer that the transaction holds, and logs the chunks that differ.
    pub(crate) fn put(&mut self, place: BasicBlock, at: usize, new: &[u8]) -> Result<()> {
        for range in parts_in_chunks(at..at + new.len()) {
            let part = new.get(range.start - at..range.end - at).unwrap_or_default();
            if self.bytes(place)?.get(range.clone()) != Some(part) {
                self.change(place, range)?.copy_from_slice(part);
            }
        }
        Ok(())
    }

    /// Lets `edit` change the bytes of a buffer that the transaction holds. It says by its second
    /// argument which ones it changes: they are logged. One that says nothing changes nothing.
    ///
    /// What it has changed before an error stays, so the transaction is dropped then.
    pub(crate) fn edit<T>(
        &mut self,
        place: BasicBlock,
        edit: impl FnOnce(&mut [u8], &mut dyn FnMut(Range<usize>)) -> T,
    ) -> Result<T> {
        let held = self.buffers.get_mut(&place);
        let held = held.ok_or_else(|| misused(format!("block {place} is not locked")))?;
        match &mut held.content {
            HeldContent::Changed { bytes, dirty } => Ok(edit(bytes, &mut |range| dirty.add(range))),
            HeldContent::Committed(buffer) => {
                let mut bytes: Box<[u8]> = buffer.bytes().into();
                self.work.copied_bytes += bytes.len() as u64;
                let mut dirty = DirtyChunks::new(bytes.len());
                let outcome = edit(&mut bytes, &mut |range| dirty.add(range));
                // What has not changed is not published.
                if !dirty.is_empty() {
                    held.content = HeldContent::Changed { bytes, dirty };
                }
                Ok(outcome)
            }
            HeldContent::Cancelled => Err(misused(format!("block {place} is free"))),
        }
    }

    /// Lets the commit prove a block of a directory or of attributes whole: its change follows what
    /// the block or another one says of itself, and proves less than all of that.
    pub(crate) fn require_proof(&mut self, place: BasicBlock) {
        if let Some(held) = self.buffers.get_mut(&place) {
            held.needs_proof = true;
        }
    }

    /// Counts a copy of this many bytes.
    pub(crate) fn count_copy(&mut self, bytes: usize) {
        self.work.copied_bytes += bytes as u64;
    }

    /// Counts a search of a name or an attribute in a tree of hashes.
    pub(crate) fn count_search(&mut self) {
        self.work.searches += 1;
    }

    /// Counts the blocks and extents that one is compared with, to see whether it is known.
    pub(crate) fn count_compared(&mut self, known: usize) {
        self.work.compared += known as u64;
    }

    /// Makes a buffer of zeros of blocks that were just allocated. The caller logs what it fills.
    pub(crate) fn fresh(&mut self, runs: impl Into<BufferRuns>, role: BufferRole) -> Result<()> {
        let runs = runs.into();
        let len = runs.bytes();
        let (bytes, mut dirty) = (vec![0; len].into(), DirtyChunks::new(len));
        // What the log has of the block is older than all of this.
        dirty.add(0..len);
        self.make_buffer(runs, role, HeldContent::Changed { bytes, dirty }, false)
    }

    /// Makes a buffer of blocks that were just allocated.
    fn make_buffer(
        &mut self,
        runs: BufferRuns,
        role: BufferRole,
        content: HeldContent,
        is_made: bool,
    ) -> Result<()> {
        let at = runs.at();
        if !self.buffers.contains_key(&at) {
            self.lock_buffer(at, role)?;
            let (runs, content) = (runs.clone(), HeldContent::Cancelled);
            self.buffers.insert(at, HeldBuffer::new(runs, role, content));
        }
        runs.iter().try_for_each(|run| self.settle_cancel(run.at))?;
        let held = HeldBuffer { is_made, ..HeldBuffer::new(runs, role, content) };
        self.buffers.insert(at, held);
        Ok(())
    }

    /// The log must say durably that a block was freed before it says what it is now, so that a
    /// recovery tells the one from the other.
    fn settle_cancel(&self, at: BasicBlock) -> Result<()> {
        let is_cancelled = || {
            let item = self.engine.shared.logged_buffer(at);
            item.is_some_and(|item| item.is_cancelled())
        };
        if is_cancelled() {
            self.engine.log().force_all()?;
        }
        if is_cancelled() {
            return Err(misused(format!("block {at} is still being freed")));
        }
        Ok(())
    }

    /// Frees the buffer of blocks that are freed: what the log has of it is not replayed, and what
    /// was changed is not written home. Each run is cancelled by itself, because each may be a part
    /// of another buffer next.
    pub(crate) fn cancel(&mut self, runs: impl Into<BufferRuns>) -> Result<()> {
        for &run in runs.into().iter() {
            let (role, content) = (BufferRole::InodeCluster, HeldContent::Cancelled);
            if !self.buffers.contains_key(&run.at) {
                self.lock_buffer(run.at, role)?;
            }
            self.buffers.insert(run.at, HeldBuffer::new(run.into(), role, content));
        }
        Ok(())
    }

    /// Makes the clusters of a chunk of new inodes. The log gets one item for all of them.
    pub(crate) fn make_inodes(
        &mut self,
        item: XfsIcreateItem,
        clusters: Vec<(DiskRun, Box<[u8]>)>,
    ) -> Result<()> {
        for (run, bytes) in clusters {
            let content = HeldContent::Changed { bytes, dirty: DirtyChunks::new(run.bytes) };
            self.make_buffer(run.into(), BufferRole::InodeCluster, content, true)?;
        }
        self.others.push(Arc::new(MadeChunk::new(item)));
        Ok(())
    }

    /// The inode in front of `ino` in its list of unlinked ones, as far as it is known. The caller
    /// has the AGI.
    pub(crate) fn unlinked_before(&self, ino: Ino) -> Option<Ino> {
        let own = self.unlinked.get(&ino).copied();
        own.unwrap_or_else(|| self.engine.unlinked.before(ino))
    }

    /// Says which inode is in front of `ino`; `None` if `ino` is the first one, or in no list.
    pub(crate) fn note_unlinked_before(&mut self, ino: Ino, before: Option<Ino>) {
        self.unlinked.insert(ino, before);
    }

    /// The inode that follows `ino` in its list of unlinked ones. Locks the cluster; the caller has
    /// the AGI.
    pub(crate) fn next_unlinked(&mut self, ino: Ino) -> Result<Option<AgIno>> {
        let place = self.engine.inode_place(ino)?;
        let bytes = self.read(place.cluster, BufferRole::InodeCluster)?;
        let field = bytes.get(place.offset + NEXT_UNLINKED..).and_then(<[u8]>::first_chunk);
        let next = AgIno(field.map_or(u32::MAX, |field| u32::from_be_bytes(*field)));
        Ok((next != AgIno::NULL).then_some(next))
    }

    /// Sets which inode follows `ino` in its list of unlinked ones. The caller has the AGI.
    pub(crate) fn set_next_unlinked(&mut self, ino: Ino, next: AgIno) -> Result<()> {
        let place = self.engine.inode_place(ino)?;
        let size = self.geometry().inode_size();
        let bytes = self.read(place.cluster, BufferRole::InodeCluster)?;
        let inode = bytes.get(place.offset..place.offset + size);
        let mut inode = inode.map(<[u8]>::to_vec).unwrap_or_default();
        let field = inode.get_mut(NEXT_UNLINKED..).and_then(<[u8]>::first_chunk_mut::<4>);
        let Some(field) = field else {
            return Err(Error::corrupt(Structure::InodeCore, "it is outside of its cluster"));
        };
        *field = next.0.to_be_bytes();
        csum::store(&mut inode, INODE_CRC);
        let chain = NEXT_UNLINKED..INODE_CRC + csum::LEN;
        let at = place.offset + chain.start;
        let new = inode.get(chain).unwrap_or_default();
        self.put(place.cluster.at, at, new)
    }

    /// An inode, with the changes of this transaction. Locks it.
    pub(crate) fn inode(&mut self, ino: Ino) -> Result<&mut XfsChangedInode> {
        let missing = match self.inodes.entry(ino) {
            Entry::Occupied(inode) => return Ok(inode.into_mut()),
            Entry::Vacant(missing) => missing,
        };
        let engine = self.engine;
        engine.shared.inode_locks.lock(ino, ())?;
        let place = engine.inode_place(ino);
        // The transaction may have made the chunk of the inode itself.
        let own = place
            .as_ref()
            .ok()
            .filter(|place| self.buffers.get(&place.cluster.at).is_some_and(|held| held.is_made));
        let loaded = match own {
            Some(place) => bytes_of(&self.buffers, place.cluster.at).and_then(|bytes| {
                let inode = bytes.get(place.offset..);
                let inode = inode.and_then(|rest| rest.get(..engine.geometry().inode_size()));
                XfsChangedInode::load(*place, inode.unwrap_or_default(), engine.geometry())
            }),
            None => engine.load_inode(ino),
        };
        let loaded = loaded.inspect_err(|_| engine.shared.inode_locks.unlock(ino))?;
        Ok(missing.insert(loaded))
    }

    /// Makes `item`, an intent or the end of one, a part of the transaction.
    pub(crate) fn add_item(&mut self, item: Arc<dyn LoggedItem>) {
        self.others.push(item);
    }

    /// Commits: others see the changes, and the log has them. They are durable after a force of the
    /// log up to the sequence; `None` when nothing was changed.
    pub(crate) fn commit(mut self) -> Result<Option<LogSequence>> {
        self.commit_changes(&[])
    }

    /// Commits, and goes on as the next transaction of the same operation. The inodes `kept` stay
    /// locked, and are logged in each step so that they never hold the tail of the log.
    pub(crate) fn roll(&mut self, kept: &[Ino]) -> Result<()> {
        self.commit_changes(kept)?;
        self.ticket.roll()
    }

    /// The intents and the ends of intents that it has so far.
    pub(crate) fn item_count(&self) -> usize {
        self.others.len()
    }

    /// Undoes what was changed since the last commit, but for the first `items` intents and ends of
    /// intents. The inodes `kept` stay locked.
    pub(crate) fn undo(&mut self, kept: &[Ino], items: usize) -> Result<()> {
        self.unlock_all_but(kept);
        self.others.truncate(items);
        self.counts = CountChanges::default();
        self.freed.clear();
        self.given_up.clear();
        self.unlinked.clear();
        for (ino, inode) in &mut self.inodes {
            *inode = self.engine.load_inode(*ino)?;
        }
        Ok(())
    }

    fn unlock_all_but(&mut self, kept: &[Ino]) {
        let shared = &self.engine.shared;
        // Headers last: a transaction that gets one finds no buffer below it locked.
        for is_header in [false, true] {
            let held = self.buffers.iter();
            for (place, _) in held.filter(|(_, held)| held.role.is_header() == is_header) {
                shared.buffer_locks.unlock(*place);
            }
        }
        self.buffers.clear();
        self.inodes.retain(|ino, _| {
            let is_kept = kept.contains(ino);
            if !is_kept {
                shared.inode_locks.unlock(*ino);
            }
            is_kept
        });
    }
}

/// The bytes of one of the buffers that a transaction holds.
fn bytes_of(buffers: &BTreeMap<BasicBlock, HeldBuffer>, place: BasicBlock) -> Result<&[u8]> {
    match buffers.get(&place).map(|held| &held.content) {
        Some(HeldContent::Committed(buffer)) => Ok(buffer.bytes()),
        Some(HeldContent::Changed { bytes, .. }) => Ok(bytes),
        Some(HeldContent::Cancelled) => Err(misused(format!("block {place} is free"))),
        None => Err(misused(format!("block {place} is not locked"))),
    }
}

/// Undoes everything that was not committed: nobody has seen it.
impl Drop for XfsTransaction<'_> {
    fn drop(&mut self) {
        self.unlock_all_but(&[]);
        if let Some(told) = self.told {
            told.add(&self.missed);
        }
        self.engine.work.add(&self.work);
        let counters = &self.engine.counters;
        match &self.lender {
            Some(lender) => lender.take_back(self.promised),
            None => counters.release(self.promised),
        }
        for (ag, blocks) in &self.tree_rooms {
            counters.tree_rooms().release(*ag, *blocks);
        }
    }
}
