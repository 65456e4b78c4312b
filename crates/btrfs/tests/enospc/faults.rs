//! Devices that fail while room is made.
//!
//! Many threads work on a volume that has little room. While the counters say that one flush state
//! is under way, requests of one kind fail. Then no thread hangs, and the error reaches an
//! operation or stops all writing. The devices hold what was synced, and of every thread the first
//! so many operations since, each of them whole.

mod hand;
mod trap;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use offshoot_btrfs::FlushState::{AllocateChunk, Commit, DelayedItems, DirtyData, LookAround};
use offshoot_btrfs::{EngineOptions, Filesystem, FlushState};
use offshoot_device::RequestKind::{Flushes, Reads, Writes};
use offshoot_device::{MemoryDevice, RequestKind};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::{EntryPlace, Errno, Error, FileSystem, FileSystemMut};

use crate::watch::{ThreadNotice, watched};
use crate::worker::NEW;
use crate::{MIB, disks_of, open};
use FaultedOutcome::{Done, Ended, NoRoom};
use hand::Hand;
use trap::Trap;

const HANDS: usize = 12;

/// The most operations of a thread: enough to bring a volume through all flush states many times.
const MOST_OPERATIONS: u64 = 600;

/// Options without commits by the clock.
fn quiet() -> EngineOptions {
    EngineOptions { commit_interval: None, ..EngineOptions::default() }
}

/// The result of an operation.
#[derive(Debug, PartialEq, Eq)]
enum FaultedOutcome {
    Done,
    NoRoom,
    Failed,
    /// The engine has stopped all writing.
    Ended,
}

impl FaultedOutcome {
    fn of<T>(fs: &Filesystem, result: &Result<T, Error>) -> Self {
        let has_ended = || fs.sync().is_err_and(|error| error.errno() == Errno::ROFS);
        match result {
            Ok(_) => Self::Done,
            Err(Error::Io { .. } | Error::Corrupt(_)) => Self::Failed,
            Err(error) if error.errno() == Errno::NOSPC => Self::NoRoom,
            Err(error) if error.errno() == Errno::ROFS => Self::Ended,
            // A removal that failed may have taken the name before the failure stopped all writing.
            Err(error) if error.errno() == Errno::NOENT && has_ended() => Self::Ended,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Lets all hands work until the trap has struck and an operation got the error, or until they have
/// worked long enough. Returns how many operations failed, and how many found that all writing had
/// stopped.
fn work(fs: &Filesystem, hands: &mut [Hand], trap: &Trap) -> [u64; 2] {
    let posts: Vec<ThreadNotice> = hands.iter().map(|_| ThreadNotice::default()).collect();
    let told = [AtomicU64::new(0), AtomicU64::new(0)];
    let hands: Vec<_> = hands.iter_mut().map(Mutex::new).collect();
    watched(fs, &posts, |number| {
        let mut hand = hands[number].lock().expect("it is of this thread");
        for _ in 0..MOST_OPERATIONS {
            posts[number].begin("an operation");
            match hand.act(fs) {
                FaultedOutcome::Done | FaultedOutcome::NoRoom => {}
                FaultedOutcome::Failed => drop(told[0].fetch_add(1, Ordering::Relaxed)),
                FaultedOutcome::Ended => drop(told[1].fetch_add(1, Ordering::Relaxed)),
            }
            if trap.struck() > 0 && fs.volume().space_stats().tickets_failed > 0 {
                break;
            }
        }
    });
    told.map(AtomicU64::into_inner)
}

/// A volume with a directory for each hand, and the files that the hands made.
struct PreparedVolume {
    judges: Judges,
    memory: Arc<MemoryDevice>,
    hands: Vec<Hand>,
}

impl PreparedVolume {
    /// Fills the volume completely, or a little. Returns `None` where there is no judge.
    fn new(seed: u64, is_full: bool) -> Option<Self> {
        let judges = judges::require()?;
        let disks = Disks::create(&judges, 1, MIB);
        disks.mkfs(&["-m", "single"]);
        let memory = Arc::new(MemoryDevice::over(disks.devices().remove(0)));
        let fs = open(&memory, &quiet());
        let hands = (0..HANDS as u64).map(|number| {
            let name = number.to_string();
            let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
            Hand::new(fs.mkdir(place, &NEW).expect("a directory"), seed ^ number << 32)
        });
        let mut hands: Vec<_> = hands.collect();
        let most = if is_full { u64::MAX } else { 20 };
        for hand in &mut hands {
            (0..most).find(|_| {
                let outcome = hand.act(&fs);
                assert!(matches!(outcome, Done | NoRoom), "nothing fails yet: {outcome:?}");
                outcome == NoRoom
            });
        }
        fs.sync().expect("there is room for what was acknowledged");
        hands.iter_mut().for_each(Hand::synced);
        drop(fs);
        Some(Self { judges, memory, hands })
    }

    /// Lets all hands work, with faults while the state is under way, and checks what the devices
    /// hold.
    fn strike(&self, state: FlushState, requests: RequestKind) {
        let (memory, mut hands) = (Arc::new(self.memory.snapshot()), self.hands.clone());
        let trap = Arc::new(Trap::new(memory.clone(), state, requests));
        let fs = open(&trap, &EngineOptions { cache_bytes: 0, ..quiet() });
        trap.arm(fs.volume());
        let [failed, ended] = work(&fs, &mut hands, &trap);
        let (struck, space) = (trap.struck(), fs.volume().space_stats());
        println!("{state}, {requests:?}: {struck} faults, {failed} failed, {ended} ended");
        assert!(struck > 0, "{state} was never under way: {space:#?}");
        // A file that fails in write-back stays buffered if nothing in the trees was changed for
        // it.
        let stays_buffered = state == DirtyData && ended == 0;
        assert!(
            space.tickets_failed > 0 || stays_buffered,
            "{state}, no operation failed: {space:#?}"
        );
        // Acknowledged changes get stored, unless all writing has stopped.
        trap.disarm();
        let synced = FaultedOutcome::of(&fs, &fs.sync());
        // A failure may have stopped all writing without any operation that got the error.
        let is_told =
            if synced == Done { ended == 0 } else { synced == Ended && failed + ended > 0 };
        assert!(is_told, "{state}, {requests:?}: {synced:?}");
        drop(fs);
        self.assert_left(&memory, &hands, synced == Done);
    }

    /// Requires that the volume is sound, holds what it may hold, and can be emptied.
    fn assert_left(&self, memory: &Arc<MemoryDevice>, hands: &[Hand], needs_all: bool) {
        disks_of(&self.judges, memory).assert_checks();
        let left = open(memory, &quiet());
        for hand in hands {
            hand.assert_left(&left, needs_all);
            hand.remove_all(&left);
        }
        left.sync().expect("a commit");
        drop(left);
        disks_of(&self.judges, memory).assert_checks();
    }
}

#[test]
fn a_fault_while_room_is_made_is_told_and_does_nothing_by_half() {
    let Some(full) = PreparedVolume::new(seed_of_run(), true) else { return };
    full.strike(LookAround, Reads);
    full.strike(DelayedItems, Reads);
    full.strike(DirtyData, Reads);
    full.strike(DirtyData, Writes);
    full.strike(Commit, Reads);
    full.strike(Commit, Writes);
    full.strike(Commit, Flushes);
}

#[test]
fn a_fault_while_a_chunk_is_allocated_is_told_and_does_nothing_by_half() {
    let Some(roomy) = PreparedVolume::new(seed_of_run(), false) else { return };
    roomy.strike(AllocateChunk, Reads);
}
