//! Scrubbing: every copy of everything that is allocated is read and verified, and a bad one is
//! written over with what a good one gives.
//!
//! ```text
//! superblocks of each member                                    superblocks
//! chunk by chunk, in the order of the devices
//!   a window of some MiB: extents and checksums, by the last commit   gather
//!     each of its copies, on all cores: read and verified       look
//!       64 KiB that are not right: once more, and repaired      settle
//!     rows of parity: compared with what the data adds up to    parity
//! who has what cannot be repaired                               owners
//! members that missed commits: data without checksums before    renew
//!     all of this, and their superblocks behind it
//! ```
//!
//! Others change the volume meanwhile. What is looked at is what the last commit refers to, and
//! nobody is kept from freeing it: the first look has no lock, and finds things that are gone and
//! places that are written. The second look holds the commit:
//!
//! 1. A [handle](crate::transaction::Handle) is entered, and the commit waited for that is being
//!    written. From then on the last commit is the one on the devices, and what it refers to is
//!    pinned at the most until the handle is dropped: nobody takes it, and no chunk of it goes.
//! 2. The trees of that commit say whether the place is still allocated, and what it must be. So
//!    what was freed or written meanwhile is no error.
//! 3. Tree blocks are never changed where they are. Data is written in place where it has no
//!    checksum, and is not repaired there on a volume that others use; what has one in the last
//!    commit is not written again before it was free.
//!
//! So what is repaired is what nobody else writes, and it takes a moment: a handle is held for 64
//! KiB of a copy.
//!
//! Memory: for each thread one window with its checksums, some hundred KiB, and 1 MiB that is read;
//! as many windows wait. Bounds that keep an image that lies from keeping it busy: chunks that
//! overlap on a device are refused, extents beyond the ends of all devices are counted and not
//! looked at, and extents have a longest length.
//!
//! Of errors the counters in the device tree (`DEV_STATS`) have those that other readers meet; what
//! a scrub finds is in its own.

mod gather;
mod look;
mod owners;
mod parity;
mod renew;
mod settle;
mod superblocks;

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use offshoot_btrfs_format::chunk::{Chunk, Profile};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{Logical, Physical, TreeId};
use offshoot_vfs::{Errno, Error, FileId, Result};
use parking_lot::Mutex;

use crate::cores;
use crate::engine::Engine;
use gather::{Committed, Window};
use look::Pages;
use renew::Renewal;

/// The most threads that read and verify.
const MOST_THREADS: usize = 32;

/// How a volume is scrubbed.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScrubOptions {
    /// Nothing is written: what is bad is told.
    pub read_only: bool,
}

/// What a scrub has seen, in the counters of `btrfs scrub status -R`: errors and what became of
/// them are counted in sectors, and in each copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubCounts {
    /// Extents of data, once in each unit of 64 KiB that they are in.
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
    /// Sectors of tree blocks that are not what they must be.
    pub verify_errors: u64,
    /// Sectors of data without a checksum, which were read.
    pub no_csum: u64,
    /// Superblocks that are wrong.
    pub super_errors: u64,
    /// Sectors of parity that are not what the data adds up to.
    pub parity_errors: u64,
    /// Sectors that no copy gives right, or that could not be written.
    pub uncorrectable_errors: u64,
    /// Sectors that were written anew and are right now.
    pub corrected_errors: u64,
    /// Errors of all kinds that are still there.
    pub left_errors: u64,
    /// Superblocks that were written anew.
    corrected_superblocks: u64,
}

/// What became of something bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubOutcome {
    /// It was written anew, and is right now.
    Corrected,
    /// It could be put right, and was not: nothing is to be written, or not there.
    NotWritten,
    /// Nothing tells what belongs there, or it could not be written.
    Uncorrectable,
}

/// Whose something bad is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScrubOwner {
    /// A file.
    File {
        /// Its number, in its subvolume.
        file: FileId,
        /// Its path from the top level of the volume, by one of its names; `None` when it has none.
        path: Option<Vec<u8>>,
    },
    /// A tree.
    Tree {
        /// Which one, if that is known.
        tree: Option<TreeId>,
        /// The level of the block in it.
        level: u8,
    },
    /// More than are named.
    Others,
}

/// Something that is bad on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrubFinding {
    /// What it is: data, a tree block, a superblock, parity.
    pub structure: &'static str,
    /// Its logical address, if it has one.
    pub logical: Option<Logical>,
    /// How much of it is bad, in bytes.
    pub len_bytes: u64,
    /// The device.
    pub device: String,
    /// Where it is there.
    pub physical: Physical,
    /// What is wrong.
    pub problem: String,
    /// What became of it.
    pub outcome: ScrubOutcome,
    /// Whose it is, unless it was corrected.
    pub owners: Vec<ScrubOwner>,
}

/// What a scrub tells while it runs.
#[derive(Debug)]
pub enum ScrubEvent<'s> {
    /// So much is done.
    Progress(&'s ScrubCounts),
    /// Something is bad.
    Found(&'s ScrubFinding),
    /// Extents could not be looked at: where the chunk begins that they are in, and why.
    Skipped(Logical, &'s Error),
}

/// Called with every event, from whichever thread has it. After a break the scrub ends soon.
pub type ScrubWatch<'w> = dyn Fn(&ScrubEvent<'_>) -> ControlFlow<()> + Sync + 'w;

/// A scrub that runs.
struct Run<'v> {
    volume: &'v Engine,
    options: ScrubOptions,
    watch: &'v ScrubWatch<'v>,
    counts: Mutex<ScrubCounts>,
    is_over: AtomicBool,
    /// What ended it.
    failure: Mutex<Option<Error>>,
    /// The members that are brought up to date.
    renewed: Vec<usize>,
}

/// A copy that a thread looks at.
struct Work {
    chunk: Arc<Chunk>,
    window: Arc<Window>,
    copy: usize,
}

impl Engine {
    /// Reads every copy of everything that is allocated, verifies what can be, and repairs what is
    /// bad from what is good.
    ///
    /// On a volume that was opened for writing others may change it meanwhile. One that was opened
    /// for reading is repaired too unless the options forbid it, and nothing else of it is changed:
    /// its devices must be writable then, nobody else may use them, and it must have been opened
    /// with [`OpenOptions::ignore_log`](crate::OpenOptions::ignore_log). Volumes with RAID5 or 6
    /// are read; of these nothing but copies with checksums is written. Seeds are only read.
    ///
    /// Members that missed commits are brought up to date: everything on them that differs is
    /// written anew, and when nothing is left that is wrong they get the superblock of the last
    /// commit. That takes a volume that was opened for reading and has no pending log; they are
    /// only read otherwise.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for volumes with a RAID stripe tree, which says elsewhere where
    /// copies are, and for the repair of zoned ones; `EINTR` after `watch` broke it off; `EROFS`
    /// when nothing is written any more; what the devices fail with when they are flushed. What is
    /// bad is no error, but counted.
    pub fn scrub(&self, options: &ScrubOptions, watch: &ScrubWatch<'_>) -> Result<ScrubCounts> {
        self.require_scrubbable(*options)?;
        let renewal = Renewal::of(self, options.read_only);
        let mut run = Run {
            volume: self,
            options: *options,
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
            // With newer tree blocks the members would be believed in what is still old.
            run.renewed.clear();
        }
        run.extents(&chunks)?;
        let counts = run.counts.lock().clone();
        if counts.corrected_errors + counts.corrected_superblocks > 0 {
            self.flush_members()?;
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

    fn require_scrubbable(&self, options: ScrubOptions) -> Result<()> {
        let incompat = self.superblock().incompat;
        if incompat.has(Incompat::RAID_STRIPE_TREE) {
            return Err(Error::Unsupported("scrubbing a volume with a RAID stripe tree".into()));
        }
        if incompat.has(Incompat::ZONED) && !options.read_only {
            return Err(Error::Unsupported("repairing a zoned volume".into()));
        }
        Ok(())
    }
}

impl Run<'_> {
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

    /// Ends it, because of this.
    fn fail(&self, error: Error) {
        self.failure.lock().get_or_insert(error);
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Extents of `chunk` cannot be looked at.
    fn skip(&self, chunk: &Chunk, error: Error) {
        // Nothing is written any more, or nothing is to be.
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
        // Only the threads have it: when all of them have panicked nobody waits for one.
        let work = Arc::new(Mutex::new(work));
        thread::scope(move |scope| {
            // When this fails to start one more, those that there are do it all.
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

    /// Has all that there is looked at, chunk by chunk.
    fn gather(&self, chunks: &[Arc<Chunk>], sender: &SyncSender<Work>) {
        for chunk in chunks {
            if self.is_over() {
                return;
            }
            if let Err(error) = self.gather_chunk(chunk, sender) {
                self.skip(chunk, error);
            }
        }
    }

    /// All chunks in the order of the devices, but for those that cannot be what they say.
    fn chunks_in_order(&self) -> Vec<Arc<Chunk>> {
        let mut all: Vec<_> = self.volume.chunks().map(Arc::new).collect();
        all.sort_by_key(|chunk| {
            chunk.stripes.first().map(|stripe| (stripe.device, stripe.physical))
        });
        // By member, where the stripes begin and end that were met.
        let mut taken: HashMap<_, BTreeMap<u64, u64>> = HashMap::new();
        all.retain(|chunk| {
            let len = chunk.stripe_bytes();
            let overlaps = chunk.stripes.iter().any(|stripe| {
                let own = taken.entry(stripe.device_uuid).or_default();
                let (start, end) = (stripe.physical.0, stripe.physical.0 + len);
                let before = own.range(..end).next_back().is_some_and(|(_, &last)| last > start);
                if !before {
                    own.insert(start, end);
                }
                before
            });
            if overlaps {
                let problem = "it lies where another one does on a device";
                self.skip(chunk, Error::corrupt_at("chunk", chunk.start.0, problem));
            }
            !overlaps
        });
        all
    }

    /// Has the extents of a chunk looked at.
    fn gather_chunk(&self, chunk: &Arc<Chunk>, sender: &SyncSender<Work>) -> Result<()> {
        let copies = chunk.profile.shape().copies.into();
        let end = chunk.start.0 + self.volume.storage.reachable_bytes(chunk);
        let mut from = chunk.start.0;
        while from < end && !self.is_over() {
            let window = Committed::of(self.volume)?.next_window(chunk, from, end)?;
            let Some(window) = window.map(Arc::new) else { break };
            from = window.range.end;
            for copy in 0..copies {
                let work = Work { chunk: chunk.clone(), window: window.clone(), copy };
                // Those who listen end before this only when they panic, and that is passed on.
                if sender.send(work).is_err() {
                    return Ok(());
                }
            }
        }
        self.beyond_devices(chunk, end)
    }

    /// Counts the extents of a chunk behind `end`, where no device reaches: members that are
    /// missing, and images that were cut.
    fn beyond_devices(&self, chunk: &Chunk, end: u64) -> Result<()> {
        if end >= chunk.end().0 || self.is_over() {
            return Ok(());
        }
        let sector = u64::from(self.volume.superblock().sector_size);
        let (mut sectors, mut first) = (0, None);
        Committed::of(self.volume)?.for_each_extent(end, chunk.end().0, |extent| {
            sectors += (extent.end - extent.start) / sector;
            first.get_or_insert(extent.start);
        })?;
        let Some(first) = first else { return Ok(()) };
        self.counts.lock().read_errors += sectors;
        self.count_outcome(ScrubOutcome::Uncorrectable, sectors);
        let problem =
            format!("no device that is there reaches it, and {sectors} sectors from there on");
        self.tell(&ScrubEvent::Skipped(chunk.start, &Error::corrupt_at("extent", first, problem)));
        Ok(())
    }

    /// Looks at copies until there are no more.
    fn work(&self, work: &Mutex<Receiver<Work>>) {
        cores::use_all();
        let mut pages = Pages::default();
        loop {
            let next = work.lock().recv();
            let Ok(Work { chunk, window, copy }) = next else { return };
            if self.is_over() {
                continue;
            }
            let look::Seen { suspects, counts } =
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

    /// Counts what of `window` is on missing members alone.
    fn count_lost(&self, chunk: &Chunk, window: &Window) -> Result<()> {
        let lost = |piece: &gather::Piece| self.volume.storage.lost_bytes(&piece.range);
        let lost: u64 = window.pieces.iter().map(lost).sum::<Result<_>>()?;
        let sectors = lost / u64::from(self.volume.superblock().sector_size);
        if sectors == 0 {
            return Ok(());
        }
        self.counts.lock().read_errors += sectors;
        self.count_outcome(ScrubOutcome::Uncorrectable, sectors);
        let problem = format!("{sectors} sectors from there on are on missing members alone");
        let error = Error::corrupt_at("extent", window.range.start, problem);
        self.tell(&ScrubEvent::Skipped(chunk.start, &error));
        Ok(())
    }
}

impl ScrubCounts {
    /// All of them, by name.
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

    /// Errors of all kinds that were there.
    #[must_use]
    pub fn found_errors(&self) -> u64 {
        self.corrected_errors + self.corrected_superblocks + self.left_errors
    }

    /// Adds what was looked at.
    fn add_seen(&mut self, seen: &Self) {
        self.data_extents_scrubbed += seen.data_extents_scrubbed;
        self.tree_extents_scrubbed += seen.tree_extents_scrubbed;
        self.data_bytes_scrubbed += seen.data_bytes_scrubbed;
        self.tree_bytes_scrubbed += seen.tree_bytes_scrubbed;
        self.no_csum += seen.no_csum;
    }
}
