//! Scrubbing reads and verifies every copy of everything that is allocated, and overwrites a bad
//! copy with the contents of a good one.
//!
//! ```text
//! superblocks of each member                                    superblocks
//! chunk by chunk, in the order of the devices
//!   a window of some MiB: extents and checksums, by the last commit   gather
//!     each of its copies, on all cores: read and verified       look
//!       64 KiB that are not right: once more, and repaired      settle
//!     rows of parity: compared with what the data adds up to    parity
//! owners of what cannot be repaired                             owners
//! members that missed commits: data without checksums first,    renew
//!     their superblocks last
//! ```
//!
//! Other threads change the volume meanwhile. A scrub reads what the last commit refers to. The
//! first look takes no lock, so other threads may free or overwrite what it reads, and it finds
//! errors that are none. The second look holds the last commit:
//!
//! 1. It enters a [handle](crate::transaction::TransactionHandle), and waits for a commit that is
//!    being written. From then on the last commit is the one on the devices. Until the handle is
//!    dropped, space that this commit refers to may be pinned, but is neither reused nor part of a
//!    removed chunk.
//! 2. The trees of that commit say whether the place is still allocated, and what it must hold. So
//!    places that were freed or written meanwhile do not count as errors.
//! 3. Tree blocks never change in place. Data without a checksum does, so it is not repaired on a
//!    volume that is open for writing. Data with a checksum in the last commit is never overwritten
//!    before its space was freed.
//!
//! So a repair only writes places that no other thread writes. It holds a handle only for a moment:
//! for 64 KiB of a copy.
//!
//! Memory: for each thread one window with its checksums, some hundred KiB, and a buffer of 1 MiB;
//! as many windows wait. Some bounds keep a hostile image from occupying a scrub forever. Chunks
//! that overlap on a device are refused. Extents beyond the ends of all devices are counted and not
//! read. Extents have a largest length.
//!
//! The error counters in the device tree (`DEV_STATS`) count errors of other readers. A scrub
//! counts its findings in [`ScrubCounts`].

mod gather;
mod look;
mod owners;
mod parity;
mod renew;
mod settle;
mod superblocks;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use offshoot_btrfs_format::chunk::{Chunk, Profile};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{Logical, Physical, TreeId};
use offshoot_vfs::{Code, Errno, Error, FileId, Result, Structure};
use parking_lot::Mutex;

use crate::cores;
use crate::inode::Rooms;
use crate::ranges::Ranges;
use gather::{CommittedTrees, ScrubWindow};
use look::ScrubBuffer;
use renew::Renewal;

/// The most threads that read and verify.
const MOST_THREADS: usize = 32;

/// Options of a scrub.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScrubOptions {
    /// Report errors, but write nothing.
    pub is_read_only: bool,
}

/// The counters of `btrfs scrub status -R`. Errors, and their outcomes, are counted in sectors, for
/// each copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubCounts {
    /// Extents of data, counted once in each unit of 64 KiB that they touch.
    pub data_extents_scrubbed: u64,
    /// Tree blocks, in the same way.
    pub tree_extents_scrubbed: u64,
    /// Bytes of data.
    pub data_bytes_scrubbed: u64,
    /// Bytes of tree blocks.
    pub tree_bytes_scrubbed: u64,
    /// Sectors that could not be read.
    pub read_errors: u64,
    /// Sectors of data whose checksum differs.
    pub csum_errors: u64,
    /// Sectors of tree blocks that fail verification.
    pub verify_errors: u64,
    /// Sectors of data without a checksum, which are only read.
    pub no_csum: u64,
    /// Wrong superblocks.
    pub super_errors: u64,
    /// Sectors of parity that do not match their data.
    pub parity_errors: u64,
    /// Sectors without a good copy, and sectors that could not be written.
    pub uncorrectable_errors: u64,
    /// Sectors that were repaired.
    pub corrected_errors: u64,
    /// Errors of all kinds that remain.
    pub left_errors: u64,
    /// Superblocks that were repaired.
    corrected_superblocks: u64,
}

/// The outcome of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubOutcome {
    /// It was repaired.
    Corrected,
    /// It could be repaired, but the scrub may not write, or may not write there.
    NotWritten,
    /// There is no good copy, or writing failed.
    Uncorrectable,
}

/// The owner of a bad place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrubOwner {
    /// A file.
    File {
        /// Its inode number, and its subvolume.
        file: FileId,
        /// Its path from the top level of the volume, by one of its names; `None` if it has none,
        /// or if the way up cannot be read.
        path: Option<Vec<u8>>,
    },
    /// A tree.
    Tree {
        /// Which one, if that is known.
        tree: Option<TreeId>,
        /// The level of the block in it.
        level: u8,
    },
    /// There are more owners than are listed.
    Others,
}

/// A bad place on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubFinding {
    /// The kind of structure: data, a tree block, a superblock, parity.
    pub structure: &'static str,
    /// Its logical address, if it has one.
    pub logical: Option<Logical>,
    /// The length of the bad place, in bytes.
    pub len_bytes: u64,
    /// The device.
    pub device: String,
    /// The address on the device.
    pub physical: Physical,
    /// The problem.
    pub problem: String,
    /// The outcome.
    pub outcome: ScrubOutcome,
    /// The owners, unless it was corrected.
    pub owners: Vec<ScrubOwner>,
}

/// An event of a running scrub.
#[derive(Debug)]
pub enum ScrubEvent<'s> {
    /// The counters so far.
    Progress(&'s ScrubCounts),
    /// A bad place was found.
    Found(&'s ScrubFinding),
    /// Extents could not be read: the start of their chunk, and the reason.
    Skipped(Logical, &'s Error),
}

/// Receives every event, on the thread that it happens on. After a `Break` the scrub ends soon.
pub type ScrubWatch<'w> = dyn Fn(&ScrubEvent<'_>) -> ControlFlow<()> + Sync + 'w;

/// A running scrub.
struct ScrubRun<'v> {
    volume: &'v Rooms,
    options: ScrubOptions,
    watch: &'v ScrubWatch<'v>,
    counts: Mutex<ScrubCounts>,
    is_over: AtomicBool,
    /// The error that ended it.
    failure: Mutex<Option<Error>>,
    /// The members that the scrub brings up to date.
    renewed: Vec<usize>,
}

/// A copy for a thread to look at.
struct ScrubJob {
    chunk: Arc<Chunk>,
    window: Arc<ScrubWindow>,
    copy: usize,
}

/// As [`BtrfsVolume::scrub`](crate::BtrfsVolume::scrub).
pub(crate) fn scrub(
    volume: &Rooms,
    options: ScrubOptions,
    watch: &ScrubWatch<'_>,
) -> Result<ScrubCounts> {
    require_scrubbable(volume, options)?;
    let renewal = Renewal::of(volume, options.is_read_only);
    let mut run = ScrubRun {
        volume,
        options,
        watch,
        counts: Mutex::default(),
        is_over: AtomicBool::new(false),
        failure: Mutex::new(None),
        renewed: renewal.members.clone(),
    };
    superblocks::scrub(&run)?;
    let chunks = run.chunks_in_order();
    let left_before = run.counts.lock().left_errors;
    renewal.plain_data(&run, &chunks)?;
    if run.counts.lock().left_errors > left_before || run.failure.lock().is_some() {
        // With new tree blocks on them, the members would be trusted for data that is still
        // old.
        run.renewed.clear();
    }
    run.extents(&chunks)?;
    let counts = run.counts.lock().clone();
    if counts.corrected_errors + counts.corrected_superblocks > 0 {
        volume.storage.flush_members()?;
    }
    renewal.finish(&run)?;
    let counts = run.counts.into_inner();
    if let Some(failure) = run.failure.into_inner() {
        return Err(failure);
    }
    if run.is_over.into_inner() {
        return Err(Error::posix(Errno::INTR, "the scrub"));
    }
    Ok(counts)
}

fn require_scrubbable(volume: &Rooms, options: ScrubOptions) -> Result<()> {
    let incompat = volume.superblock().incompat;
    if incompat.has(Incompat::RAID_STRIPE_TREE) {
        return Err(Error::unsupported(
            Code::StripeTree,
            "scrubbing a volume with a RAID stripe tree",
        ));
    }
    if incompat.has(Incompat::ZONED) && !options.is_read_only {
        return Err(Error::unsupported(Code::ZonedWrite, "repairing a zoned volume"));
    }
    Ok(())
}

impl ScrubRun<'_> {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn tell(&self, event: &ScrubEvent<'_>) {
        if (self.watch)(event).is_break() {
            self.is_over.store(true, Ordering::Relaxed);
        }
    }

    fn found(&self, finding: &ScrubFinding) {
        self.tell(&ScrubEvent::Found(finding));
    }

    /// Ends the scrub with an error.
    fn fail(&self, error: Error) {
        self.failure.lock().get_or_insert(error);
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Counts and reports that extents of `chunk` cannot be read.
    fn skip(&self, chunk: &Chunk, error: Error) {
        // These are errors of the whole volume: it has stopped writing, or must not be written.
        if matches!(error, Error::Posix { .. }) {
            return self.fail(error);
        }
        {
            let mut counts = self.counts.lock();
            counts.uncorrectable_errors += 1;
            counts.left_errors += 1;
        }
        self.tell(&ScrubEvent::Skipped(chunk.start, &error));
    }

    fn count_outcome(&self, outcome: ScrubOutcome, sectors: u64) {
        let mut counts = self.counts.lock();
        match outcome {
            ScrubOutcome::Corrected => counts.corrected_errors += sectors,
            ScrubOutcome::NotWritten => counts.left_errors += sectors,
            ScrubOutcome::Uncorrectable => {
                counts.uncorrectable_errors += sectors;
                counts.left_errors += sectors;
            }
        }
    }

    fn count_superblock(&self, outcome: ScrubOutcome) {
        let mut counts = self.counts.lock();
        counts.super_errors += 1;
        match outcome {
            ScrubOutcome::Corrected => counts.corrected_superblocks += 1,
            ScrubOutcome::NotWritten | ScrubOutcome::Uncorrectable => counts.left_errors += 1,
        }
    }

    /// Looks at all extents of these chunks.
    fn extents(&self, chunks: &[Arc<Chunk>]) -> Result<()> {
        let present = self.volume.members().iter().filter(|member| member.device.is_some());
        let threads = cores::count().max(present.count()).min(MOST_THREADS);
        let (sender, work) = sync_channel(threads);
        // Only the threads own the receiver: if all of them panic, sending fails instead of waiting
        // forever.
        let work = Arc::new(Mutex::new(work));
        thread::scope(move |scope| {
            // If a thread cannot be started, those that exist do all the work.
            let started = (0..threads).map_while(|_| {
                let (builder, work) =
                    (thread::Builder::new().name("scrub".to_owned()), work.clone());
                builder.spawn_scoped(scope, move || self.work(&work)).ok()
            });
            if started.count() == 0 {
                return Err(Error::io("starting a thread", Errno::AGAIN));
            }
            drop(work);
            self.gather(chunks, &sender);
            drop(sender);
            Ok(())
        })
    }

    /// Sends all extents to the threads, chunk by chunk.
    fn gather(&self, chunks: &[Arc<Chunk>], sender: &SyncSender<ScrubJob>) {
        for chunk in chunks {
            if self.is_over() {
                return;
            }
            if let Err(error) = self.gather_chunk(chunk, sender) {
                self.skip(chunk, error);
            }
        }
    }

    /// All chunks in the order of the devices, except those that overlap another one on a device.
    fn chunks_in_order(&self) -> Vec<Arc<Chunk>> {
        let mut all: Vec<_> = self.volume.chunks().map(Arc::new).collect();
        all.sort_by_key(|chunk| {
            chunk.stripes.first().map(|stripe| (stripe.device, stripe.physical))
        });
        // The stripes so far, for each member.
        let mut taken: HashMap<_, Ranges> = HashMap::new();
        all.retain(|chunk| {
            let len = chunk.stripe_bytes();
            let overlaps = chunk.stripes.iter().any(|stripe| {
                let own = taken.entry(stripe.device_uuid).or_default();
                let stripe = stripe.physical.0..stripe.physical.0 + len;
                let overlaps = own.overlaps(&stripe);
                if !overlaps {
                    own.insert(stripe);
                }
                overlaps
            });
            if overlaps {
                let problem = "it lies where another one does on a device";
                self.skip(chunk, Error::corrupt_at(Structure::Chunk, chunk.start.0, problem));
            }
            !overlaps
        });
        all
    }

    /// Sends the extents of a chunk to the threads.
    fn gather_chunk(&self, chunk: &Arc<Chunk>, sender: &SyncSender<ScrubJob>) -> Result<()> {
        let copies = chunk.profile.shape().copies.into();
        let end = chunk.start.0 + self.volume.storage.reachable_bytes(chunk);
        let mut from = chunk.start.0;
        while from < end && !self.is_over() {
            let window = CommittedTrees::of(self.volume)?.next_window(chunk, from, end)?;
            let Some(window) = window.map(Arc::new) else { break };
            from = window.range.end;
            for copy in 0..copies {
                let work = ScrubJob { chunk: chunk.clone(), window: window.clone(), copy };
                // The threads end before this one only by a panic, which the scope passes on.
                if sender.send(work).is_err() {
                    return Ok(());
                }
            }
        }
        self.beyond_devices(chunk, end)
    }

    /// Counts the extents of a chunk behind `end`, which no device reaches, because members are
    /// missing or images were cut off.
    fn beyond_devices(&self, chunk: &Chunk, end: u64) -> Result<()> {
        if end >= chunk.end().0 || self.is_over() {
            return Ok(());
        }
        let sector = u64::from(self.volume.superblock().sector_size);
        let (mut sectors, mut first) = (0, None);
        CommittedTrees::of(self.volume)?.for_each_extent(end, chunk.end().0, |extent| {
            sectors += (extent.end - extent.start) / sector;
            first.get_or_insert(extent.start);
        })?;
        let Some(first) = first else { return Ok(()) };
        self.counts.lock().read_errors += sectors;
        self.count_outcome(ScrubOutcome::Uncorrectable, sectors);
        let problem =
            format!("no device that is there reaches it, and {sectors} sectors from there on");
        self.tell(&ScrubEvent::Skipped(
            chunk.start,
            &Error::corrupt_at(Structure::Extent, first, problem),
        ));
        Ok(())
    }

    /// Looks at copies until the sender is gone.
    fn work(&self, work: &Mutex<Receiver<ScrubJob>>) {
        cores::use_all();
        let mut pages = ScrubBuffer::default();
        loop {
            let next = work.lock().recv();
            let Ok(ScrubJob { chunk, window, copy }) = next else { return };
            if self.is_over() {
                continue;
            }
            let look::FirstLook { suspects, counts } =
                look::look(self.volume, chunk.start, &window, copy, &mut pages);
            self.counts.lock().add_seen(&counts);
            for unit in &suspects {
                if self.is_over() {
                    break;
                }
                if let Err(error) = settle::settle(self, &chunk, *unit, copy, &mut pages) {
                    self.skip(&chunk, error);
                }
            }
            if matches!(chunk.profile, Profile::Raid5 | Profile::Raid6) {
                parity::look(self, &chunk, &window, &suspects, &mut pages);
            }
            if copy == 0
                && let Err(error) = self.count_lost(&chunk, &window)
            {
                self.skip(&chunk, error);
            }
            let counts = self.counts.lock().clone();
            self.tell(&ScrubEvent::Progress(&counts));
        }
    }

    /// Counts the sectors of `window` that only missing members have.
    fn count_lost(&self, chunk: &Chunk, window: &ScrubWindow) -> Result<()> {
        let lost = |piece: &gather::ScrubPiece| self.volume.storage.lost_bytes(&piece.range);
        let lost: u64 = window.pieces.iter().map(lost).sum::<Result<_>>()?;
        let sectors = lost / u64::from(self.volume.superblock().sector_size);
        if sectors == 0 {
            return Ok(());
        }
        self.counts.lock().read_errors += sectors;
        self.count_outcome(ScrubOutcome::Uncorrectable, sectors);
        let problem = format!("{sectors} sectors from there on are on missing members alone");
        let error = Error::corrupt_at(Structure::Extent, window.range.start, problem);
        self.tell(&ScrubEvent::Skipped(chunk.start, &error));
        Ok(())
    }
}

impl ScrubCounts {
    /// All counters, with their names.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 13] {
        [
            ("data_extents_scrubbed", self.data_extents_scrubbed),
            ("tree_extents_scrubbed", self.tree_extents_scrubbed),
            ("data_bytes_scrubbed", self.data_bytes_scrubbed),
            ("tree_bytes_scrubbed", self.tree_bytes_scrubbed),
            ("read_errors", self.read_errors),
            ("csum_errors", self.csum_errors),
            ("verify_errors", self.verify_errors),
            ("no_csum", self.no_csum),
            ("super_errors", self.super_errors),
            ("parity_errors", self.parity_errors),
            ("uncorrectable_errors", self.uncorrectable_errors),
            ("corrected_errors", self.corrected_errors),
            ("left_errors", self.left_errors),
        ]
    }

    /// All errors that were found, repaired or not.
    #[must_use]
    pub fn found_errors(&self) -> u64 {
        self.corrected_errors + self.corrected_superblocks + self.left_errors
    }

    /// Adds the counters of what was read.
    fn add_seen(&mut self, seen: &Self) {
        self.data_extents_scrubbed += seen.data_extents_scrubbed;
        self.tree_extents_scrubbed += seen.tree_extents_scrubbed;
        self.data_bytes_scrubbed += seen.data_bytes_scrubbed;
        self.tree_bytes_scrubbed += seen.tree_bytes_scrubbed;
        self.no_csum += seen.no_csum;
    }
}
