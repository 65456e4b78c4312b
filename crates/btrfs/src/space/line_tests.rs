//! Threads that wait in line, while another event happens in the middle of making room.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread::JoinHandle;
use std::time::Duration;

use offshoot_btrfs_format::TreeId;
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, Timestamp,
};
use parking_lot::Mutex;

use super::place::PlaceInLine;
use super::stats::FlushState;
use super::tickets::{Claim, Demand};
use super::{Purpose, Reservation, Space};
use crate::test_volumes::in_memory_of;
use crate::{BtrfsVolume, EngineOptions, Filesystem};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

/// Longer than any step here takes that does not hang.
const PATIENCE: Duration = Duration::from_secs(60);

type Hook = Box<dyn FnOnce() + Send>;

/// A device that runs a hook at the first flush after the test has asked for it.
struct Hooked {
    below: Arc<CheckedDevice>,
    hook: Mutex<Option<Hook>>,
}

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.below.fmt(f)
    }
}

impl offshoot_device::Delegate for Hooked {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn flush(&self) -> io::Result<()> {
        let hook = self.hook.lock().take();
        if let Some(hook) = hook {
            hook();
        }
        self.inner().flush()
    }
}

/// A volume of this size without background work, and its device.
fn small(size_bytes: u64) -> (Arc<Hooked>, Arc<Filesystem>) {
    let below = in_memory_of(16384, size_bytes);
    let device = Arc::new(Hooked { below, hook: Mutex::new(None) });
    let quiet = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let volume =
        BtrfsVolume::open_writable(vec![device.clone() as Arc<_>], &quiet).expect("it opens");
    (device, Arc::new(volume.filesystem(TreeId::FS).expect("every volume has one")))
}

fn create(fs: &Filesystem, name: &str) -> FileId {
    fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW).expect("a file")
}

fn space(fs: &Filesystem) -> &Arc<Space> {
    &fs.volume().live().expect("it is writable").space
}

fn is_full(error: &Error) -> bool {
    error.errno() == Errno::NOSPC
}

/// Writes a file until there is no space for data.
fn fill(fs: &Filesystem, file: FileId) {
    let data = vec![1; 1 << 20];
    let refused = (0u64..).find_map(|mib| fs.write(file, mib << 20, &data, AT).err());
    assert!(refused.as_ref().is_some_and(is_full), "{refused:?}");
    fs.sync().expect("a commit");
}

/// Work in a thread of its own, which has the volume only while this value exists: a volume that is
/// dropped later by another thread is not checked.
struct Beside<T> {
    outcome: Receiver<T>,
    thread: Option<JoinHandle<()>>,
}

/// Does `work` in a thread of its own. The test can receive the result.
fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Beside<T> {
    let (send, outcome) = mpsc::channel();
    let thread = std::thread::spawn(move || drop(send.send(work())));
    Beside { outcome, thread: Some(thread) }
}

impl<T> Drop for Beside<T> {
    fn drop(&mut self) {
        // A failed test may have left the thread waiting for ever.
        if !std::thread::panicking() {
            // Some threads panic on purpose, and the test checks their result.
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

/// The result of work that must not hang.
fn soon<T>(beside: &Beside<T>) -> T {
    soon_told(&beside.outcome)
}

fn soon_told<T>(told: &Receiver<T>) -> T {
    told.recv_timeout(PATIENCE).expect("it comes to an end")
}

/// Reserves all metadata that this claim may have.
fn take_all_metadata(fs: &Filesystem, claim: Claim) -> Vec<Reservation<'_>> {
    let (mut taken, mut bytes) = (Vec::new(), 1 << 20);
    while bytes > 64 {
        if space(fs).try_grant(Purpose::Metadata, Demand::new(claim, bytes)) {
            taken.push(Reservation::granted(space(fs), Purpose::Metadata, bytes));
        } else {
            bytes /= 2;
        }
    }
    taken
}

/// A file was removed while a cycle was at its commit. Only the next commit frees its space, and
/// the cycle had none.
#[test]
fn what_is_given_up_after_the_commit_of_a_cycle_is_waited_for() {
    let (device, fs) = small(128 << 20);
    let old = create(&fs, "old");
    fill(&fs, old);
    let new = create(&fs, "new");
    let remover = fs.clone();
    let remove = move || remover.unlink(EntryPlace { dir: remover.root(), name: b"old" }, AT);
    *device.hook.lock() = Some(Box::new(|| soon(&beside(remove)).expect("a removal")));
    fs.write(new, 0, &vec![2; 4 << 20], AT).expect("there is room for it");
    assert!(device.hook.lock().is_none(), "a commit was made");
    fs.sync().expect("a commit");
}

/// How often the leader looked around: once in a pass.
fn passes(fs: &Filesystem) -> u64 {
    let flushes = fs.volume().space_stats().flushes;
    flushes.iter().find(|one| one.state == FlushState::LookAround).expect("all are there").entered
}

/// Commits when another commit is done. In the middle of its commit, it lets the leader for data
/// continue, and it continues itself when so many passes have begun.
fn commit_slowly(fs: &Arc<Filesystem>, device: &Hooked, begun: u64) {
    while fs.volume().live().expect("it is writable").is_committing() {
        std::thread::yield_now();
    }
    let waiting = fs.clone();
    *device.hook.lock() = Some(Box::new(move || {
        let space = space(&waiting);
        drop(Reservation::granted(space, Purpose::Data, 0));
        while passes(&waiting) < begun && space.ledger(Purpose::Data).line().len() > 0 {
            std::thread::yield_now();
        }
    }));
    fs.volume().commit().expect("a commit");
}

/// The same, but another commit was freeing the space when the cycle ended.
#[test]
fn what_another_commit_is_about_to_free_is_waited_for() {
    let (device, fs) = small(128 << 20);
    let old = create(&fs, "old");
    fill(&fs, old);
    let new = create(&fs, "new");
    let (hooked, committer) = (device.clone(), fs.clone());
    let (tell, told) = mpsc::channel();
    *device.hook.lock() = Some(Box::new(move || {
        let remover = committer.clone();
        let remove = move || remover.unlink(EntryPlace { dir: remover.root(), name: b"old" }, AT);
        soon(&beside(remove)).expect("a removal");
        // The leader waits for this reservation before the last pass of the cycle.
        let demand = Demand::new(Claim::MakesRoom, 0);
        assert!(space(&committer).try_grant_aside(Purpose::Data, demand), "it is nothing");
        let done = passes(&committer);
        tell.send(beside(move || commit_slowly(&committer, &hooked, done + 2))).expect("it waits");
    }));
    fs.write(new, 0, &vec![2; 4 << 20], AT).expect("there is room for it");
    soon(&soon_told(&told));
    assert!(device.hook.lock().is_none(), "there was another commit");
}

/// A thread that leaves the line gives back what was granted to it. Before the mend, the leader
/// slept on.
#[test]
fn what_is_given_back_in_line_wakes_who_makes_room() {
    let (_, fs) = small(128 << 20);
    create(&fs, "file");
    let ledger = || space(&fs).ledger(Purpose::Metadata);
    let before = ledger().reserved();
    let place = PlaceInLine::join(ledger(), Demand::new(Claim::Work, 4096));
    space(&fs).serve(Purpose::Metadata);
    assert!(place.is_granted());
    let leading = fs.clone();
    let waits = beside(move || {
        let ledger = space(&leading).ledger(Purpose::Metadata);
        let waiter = ledger.line().join(Demand::new(Claim::Work, u64::MAX));
        let granted = ledger.line().begin_cycle();
        ledger.wait_for_those_under_way(&waiter, granted)
    });
    while ledger().line().len() == 0 {
        std::thread::yield_now();
    }
    // Gives the leader time to go to sleep.
    std::thread::sleep(Duration::from_millis(50));
    drop(place);
    assert!(!soon(&waits), "nothing was granted");
    assert_eq!(ledger().reserved(), before);
}

/// Other threads had all metadata for a moment. Before the mend, a thread that needed a chunk for
/// data was told that there is no space.
#[test]
fn who_needs_a_chunk_for_data_waits_for_metadata() {
    let (_, fs) = small(128 << 20);
    create(&fs, "file");
    fs.sync().expect("a commit");
    let all = take_all_metadata(&fs, Claim::MakesRoom);
    let data = fs.clone();
    let waits = beside(move || data.volume().reserve_data(16 << 20).map(drop));
    while space(&fs).ledger(Purpose::Metadata).line().len() == 0 {
        if let Ok(outcome) = waits.outcome.try_recv() {
            panic!("it did not wait: {outcome:?}");
        }
        std::thread::yield_now();
    }
    drop(all);
    soon(&waits).expect("there is room for a chunk");
}

/// Promises counted on the next chunk of metadata. Before the mend, the last chunk of data that
/// leaves much room was refused because of that.
#[test]
fn promises_do_not_keep_room_from_data() {
    const LEN: u64 = 3 << 30;
    let (_, fs) = small(LEN);
    create(&fs, "file");
    let (volume, space) = (fs.volume(), space(&fs));
    let mut bytes = 1 << 30;
    while bytes > 1 << 20 {
        if !space.try_grant(Purpose::Metadata, Demand::promise(bytes)) {
            bytes /= 2;
        }
    }
    let promised = space.ledger(Purpose::Metadata).promised();
    assert!(promised > space.ledger(Purpose::Metadata).free(), "{promised} bytes are promised");
    let piece = LEN / 64;
    let reserve = || volume.reserve_data(piece).map(|piece| piece.keep()).ok();
    let pieces: Vec<_> = std::iter::from_fn(reserve).collect();
    let data = piece * pieces.len() as u64;
    assert!(data > LEN / 3 * 2, "{data} bytes for data");
}

/// A chunk could not be recorded for a moment. Before the mend, no promise counted on a chunk any
/// more until a thread waited.
#[test]
fn a_commit_that_frees_system_space_lets_a_chunk_count_again() {
    let (_, fs) = small(4 << 30);
    create(&fs, "file");
    let space = space(&fs);
    assert!(space.is_roomy());
    let system = space.ledger(Purpose::System);
    let free = system.free();
    system.remove_free(free);
    // The chunk of metadata that is allocated first is the last one.
    crate::upkeep::look_around(fs.volume(), Purpose::Metadata, || false).expect("it reads");
    space.ledger(Purpose::Metadata).note_next_chunk(0);
    crate::upkeep::look_around(fs.volume(), Purpose::Metadata, || false).expect("it reads");
    assert!(!space.is_roomy(), "no chunk can be written down");
    system.add_free(free);
    create(&fs, "another");
    fs.sync().expect("a commit");
    assert!(space.is_roomy());
}

/// Before the mend, all others waited for ever when the leader was gone.
#[test]
fn who_makes_room_and_panics_leaves_the_line_to_others() {
    let (device, fs) = small(128 << 20);
    create(&fs, "file");
    let reserve = |fs: Arc<Filesystem>| beside(move || fs.volume().reserve_data(1 << 30).map(drop));
    let (tell, told) = mpsc::channel();
    let waiting = fs.clone();
    *device.hook.lock() = Some(Box::new(move || {
        tell.send(()).expect("somebody waits for it");
        while space(&waiting).ledger(Purpose::Data).line().len() < 2 {
            std::thread::yield_now();
        }
        panic!("a device that panics");
    }));
    let first = reserve(fs.clone());
    soon_told(&told);
    let second = reserve(fs.clone());
    let error = soon(&second).expect_err("nothing is written any more");
    assert_eq!(error.errno(), Errno::ROFS, "{error}");
    assert!(first.outcome.recv().is_err(), "it panicked");
    assert_eq!(space(&fs).ledger(Purpose::Data).line().len(), 0);
}

/// Other threads reserved space all the time. Before the mend, the leader waited for a moment
/// without reservations.
#[test]
fn who_makes_room_does_not_wait_for_those_who_come_later() {
    let (_, fs) = small(128 << 20);
    create(&fs, "file");
    let grant = {
        let fs = fs.clone();
        move || {
            let demand = Demand::new(Claim::MakesRoom, 4096);
            assert!(space(&fs).try_grant_aside(Purpose::Metadata, demand), "it is little");
        }
    };
    let take = |fs| Reservation::granted(space(fs), Purpose::Metadata, 4096);
    grant();
    let mut last = take(&fs);
    let leading = fs.clone();
    let waits = beside(move || {
        let ledger = space(&leading).ledger(Purpose::Metadata);
        let waiter = ledger.line().join(Demand::new(Claim::Work, u64::MAX));
        ledger.note_waiting(&ledger.line());
        let before = ledger.line().begin_cycle();
        ledger.wait_for_those_under_way(&waiter, before)
    });
    let end = std::time::Instant::now() + PATIENCE;
    let was_served = loop {
        grant();
        // There is always a reservation.
        drop(std::mem::replace(&mut last, take(&fs)));
        match waits.outcome.try_recv() {
            Ok(was_served) => break was_served,
            Err(_) => assert!(std::time::Instant::now() < end, "it waits for ever"),
        }
    };
    assert!(!was_served);
    drop(last);
}

/// The buffer of a file had the last room. Before the mend, one more run of sectors of the file was
/// refused.
#[test]
fn a_file_makes_room_for_itself() {
    let (_, fs) = small(128 << 20);
    let file = create(&fs, "file");
    // No chunk can be allocated.
    let mut kept = Vec::new();
    while let Ok(one) = fs.volume().reserve_data(1 << 20) {
        kept.push(one.keep());
    }
    drop(kept.pop());
    fs.write(file, 0, &[1; 4096], AT).expect("there is room");
    fs.volume().delayed.flush(&fs.volume().base, u64::MAX).expect("a flush");
    kept.extend(take_all_metadata(&fs, Claim::Work).iter().map(Reservation::keep));
    fs.write(file, 1 << 16, &[2; 4096], AT).expect("the file is written back");
}

/// Before the mend, threads that removed files had room for one at a time until all files were
/// gone, because no commit freed the space of removed files.
#[test]
fn what_removals_gave_up_is_committed_for_those_who_find_no_room() {
    let (_, fs) = small(128 << 20);
    fill(&fs, create(&fs, "filler"));
    let names = (0..).map(|number| format!("{number}"));
    let make = |name: &String| {
        let place = EntryPlace { dir: fs.root(), name: name.as_bytes() };
        fs.symlink(place, &[b'x'; 1500], &NEW)
    };
    let names: Vec<_> = names.take_while(|name| make(name).is_ok()).collect();
    fs.sync().expect("a commit");
    let live = fs.volume().live().expect("it is writable");
    let ahead = || {
        live.ask_for_commit();
        crate::upkeep::make_room_ahead(fs.volume()).expect("a commit");
        let flushes = fs.volume().space_stats().flushes;
        let commit = flushes.iter().find(|one| one.state == FlushState::Commit);
        commit.expect("all are there").entered_ahead
    };
    assert_eq!(ahead(), 0, "nothing was given up");
    let free = || space(&fs).ledger(Purpose::Metadata).free();
    let mut left = names.iter();
    while live.given_up().1 < space(&fs).worth_a_commit() {
        let name = left.next().expect("more is given up by all of them");
        fs.unlink(EntryPlace { dir: fs.root(), name: name.as_bytes() }, AT).expect("a removal");
    }
    let (given_up, before) = (live.given_up().1, free());
    assert_eq!(ahead(), 1);
    assert!(free() > before + given_up / 2, "{} bytes are free, and {before} before", free());
    assert_eq!(ahead(), 1, "nothing more was given up");
}
