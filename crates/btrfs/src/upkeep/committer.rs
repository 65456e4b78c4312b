//! The thread of a volume. It commits at every interval, and when much was changed. It also removes
//! files without names that a crash left behind, drops the trees of deleted subvolumes, and
//! discards freed space if the options ask for that.
//!
//! The thread holds the engine only while it works. Dropping the volume ends the thread and waits
//! for it, so nothing is written to the devices after that. When writing has ended because of a
//! failure, the thread reports that once and ends by itself.

use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offshoot_vfs::{Error, Result};

use super::discard::discard_step;
use super::reclaim::make_room_ahead;
use crate::inode::orphans::Sweep;
use crate::inode::{Rooms, write_back};
use crate::report::VolumeReport;
use crate::subvolume::drop::drop_step;
use crate::subvolume::{DropProgress, SubvolumeState};
use crate::transaction::{CommitCause, CommitterSignal, LiveVolume};

/// The shortest interval between two timed commits.
const LEAST_INTERVAL: Duration = Duration::from_millis(1);

/// The thread of a volume. It ends when this is dropped.
pub(crate) struct Committer {
    signal: Arc<CommitterSignal>,
    thread: Option<JoinHandle<()>>,
}

impl Committer {
    /// Commits `volume`, which is open for writing, every `interval` from now on.
    pub(crate) fn start<V: Deref<Target = Rooms> + Send + Sync + 'static>(
        volume: &Arc<V>,
        subvolumes: Arc<SubvolumeState>,
        interval: Duration,
    ) -> Result<Self> {
        let signal = volume.live()?.pressure.clone();
        let (volume, thread_signal) = (Arc::downgrade(volume), signal.clone());
        let thread = std::thread::Builder::new()
            .name("offshoot-commit".into())
            .spawn(move || run(&volume, &subvolumes, &thread_signal, interval))
            .map_err(|e| Error::io("starting the thread that commits", e))?;
        Ok(Self { signal, thread: Some(thread) })
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        self.signal.stop();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

fn run(
    volume: &Weak<impl Deref<Target = Rooms>>,
    subvolumes: &SubvolumeState,
    signal: &CommitterSignal,
    interval: Duration,
) {
    // An interval beyond the end of the clock gives `None`, which is never due.
    let next = || Instant::now().checked_add(interval.max(LEAST_INTERVAL));
    let mut due = next();
    let mut sweep = Sweep::new();
    loop {
        // While the sweep has work, the thread does not wait.
        let is_pressed = signal.wait(if sweep.is_done() { due } else { Some(Instant::now()) });
        let Some(volume) = volume.upgrade() else { return };
        let Some(is_pressed) = is_pressed else {
            // This includes the space that the last commit freed.
            while discard_step(&volume) {}
            return;
        };
        let is_due = due.is_some_and(|due| Instant::now() >= due);
        let result = if is_due {
            volume.sync_because(CommitCause::Time)
        } else if is_pressed {
            ease(&volume)
        } else {
            Ok(())
        };
        let failed =
            result.err().map(|error| VolumeReport::CommitFailed { problem: error.to_string() });
        // One step a round, so that commits and above all the end of the volume do not wait for the
        // whole drop.
        let not_dropped = match drop_step(&volume, subvolumes) {
            Ok(DropProgress::Went) => {
                signal.press();
                None
            }
            Ok(DropProgress::Waits) => None,
            Err(error) => Some(VolumeReport::DropFailed { problem: error.to_string() }),
        };
        let not_swept =
            sweep.step(&volume).err().map(|e| VolumeReport::SweepFailed { problem: e.to_string() });
        if discard_step(&volume) {
            signal.press();
        }
        for report in [failed, not_dropped, not_swept].into_iter().flatten() {
            // The end of writing was reported already.
            if volume.live().and_then(LiveVolume::require_writing).is_err() {
                return;
            }
            volume.report(&report);
        }
        if is_due {
            due = next();
        }
    }
}

/// Makes room before any thread waits for it, and writes back or commits what has grown large. If
/// one of these fails, the others are still done.
fn ease(volume: &Rooms) -> Result<()> {
    // A chunk comes first: allocating it is quick, and other threads may be about to wait for it.
    let (made, eased) = (make_room_ahead(volume), volume.delayed.ease(&volume.base));
    let buffered = volume.buffers.bytes();
    let half = volume.options.dirty_bytes / 2;
    let is_first = volume.options.flushes_on_commit && volume.dirty_tree_bytes()? > half;
    let written = if is_first {
        write_back::sync_all(volume)
    } else if buffered > half {
        write_back::ease(volume)
    } else {
        Ok(())
    };
    let committed = volume.commit_over(half, CommitCause::DirtyBlocks);
    // The first error is the cause of the others.
    [made, eased, written, committed].into_iter().fold(Ok(()), Result::and)
}

#[cfg(test)]
mod tests {
    use offshoot_btrfs_format::{ItemType, TreeId};
    use offshoot_device::{BlockDevice, Fault, FaultDevice};
    use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut, NewFile, Timestamp};

    use super::*;
    use parking_lot::Mutex;

    use crate::test_volumes::{in_memory, xattr};
    use crate::tree::Blocks as _;
    use crate::{EngineOptions, Filesystem};

    const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };
    const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };

    fn create(fs: &Filesystem, name: &str) -> offshoot_vfs::FileId {
        fs.create(EntryPlace { dir: fs.root(), name: name.as_bytes() }, &NEW).unwrap()
    }

    /// Counts reports. Each must be of a failed commit, or of the end of writing.
    fn counted(options: &mut EngineOptions) -> Arc<Mutex<u64>> {
        let count = Arc::new(Mutex::new(0));
        let counter = count.clone();
        options.reporter = Some(Arc::new(move |report: &VolumeReport| {
            assert!(
                matches!(report, VolumeReport::CommitFailed { .. } | VolumeReport::ReadOnly { .. }),
                "{report}"
            );
            *counter.lock() += 1;
        }));
        count
    }

    /// A volume in which 172 sectors are buffered of a file that cannot be written back, because
    /// the leaf with the extents under them is damaged.
    fn with_a_bad_file(options: &EngineOptions) -> Filesystem {
        let device = in_memory(16384);
        let devices = || vec![device.clone() as Arc<dyn BlockDevice>];
        let quiet = EngineOptions { commit_interval: None, ..EngineOptions::default() };
        let volume = crate::BtrfsVolume::open_writable(devices(), &quiet).unwrap();
        let fs = volume.filesystem(TreeId::FS).unwrap();
        let bad = create(&fs, "bad");
        for extent in 0..2000 {
            fs.write(bad, extent * 8192, &[7; 4096], AT).unwrap();
        }
        fs.sync().unwrap();
        let root = volume.block(&volume.tree(TreeId::FS).unwrap().expected()).unwrap();
        let slot = root.len() / 2;
        let key = root.key(slot);
        assert_eq!((key.objectid, key.item_type), (bad.ino, ItemType::EXTENT_DATA));
        for (_, physical, _) in
            volume.storage.write_places(root.pointers()[slot].logical(), 16384).unwrap()
        {
            device.leave_unchecked("a leaf is damaged");
            device.write_at(physical.0, &[0xaa; 16384]).unwrap();
        }
        drop((fs, volume));
        let volume = crate::BtrfsVolume::open_writable(devices(), options).unwrap();
        let fs = volume.filesystem(TreeId::FS).unwrap();
        fs.write(bad, key.offset, &vec![1; 172 * 4096], AT).unwrap();
        fs
    }

    /// A file that could not be written back once kept everything else from the devices.
    #[test]
    fn one_bad_file_keeps_no_commit_from_being_made() {
        let options = EngineOptions {
            commit_interval: None,
            dirty_bytes: 1 << 20,
            ..EngineOptions::default()
        };
        let fs = with_a_bad_file(&options);
        let dirty_bytes = || fs.volume().dirty_tree_bytes().unwrap();
        let mut number = 0;
        while dirty_bytes() <= options.dirty_bytes / 2 {
            create(&fs, &format!("{number}"));
            number += 1;
        }
        let error = ease(fs.volume()).expect_err("a file cannot be written back");
        assert!(matches!(error, Error::Corrupt(_)), "{error}");
        assert!(dirty_bytes() <= options.dirty_bytes / 2, "{} are left", dirty_bytes());
    }

    /// An interval of zero once kept the thread busy for ever.
    #[test]
    fn a_commit_by_time_waits_for_a_millisecond() {
        let start = Instant::now();
        let mut options =
            EngineOptions { commit_interval: Some(Duration::ZERO), ..EngineOptions::default() };
        let count = counted(&mut options);
        let fs = with_a_bad_file(&options);
        std::thread::sleep(Duration::from_millis(100));
        drop(fs);
        let (failed, elapsed) = (*count.lock(), start.elapsed().as_millis());
        assert!(failed > 0, "nothing was tried");
        assert!(u128::from(failed) <= elapsed, "{failed} times in {elapsed} ms");
    }

    /// The time of the next commit once overflowed the clock.
    #[test]
    fn an_interval_without_end_is_never_due() {
        let options =
            EngineOptions { commit_interval: Some(Duration::MAX), ..EngineOptions::default() };
        let volume = crate::BtrfsVolume::open_writable(vec![in_memory(16384)], &options).unwrap();
        let fs = volume.filesystem(TreeId::FS).unwrap();
        create(&fs, "file");
        fs.sync().unwrap();
    }

    /// The thread once reported the end of writing again and again.
    #[test]
    fn a_volume_that_is_broken_off_says_so_once() {
        let mut options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
        let count = counted(&mut options);
        let memory = in_memory(16384);
        let device = Arc::new(FaultDevice::new(memory.clone()));
        let volume = crate::Engine::open_writable(vec![device.clone()], &options).unwrap();
        let volume = Arc::new(volume);
        let (key, data) = xattr(b"user.x", b"value");
        volume.join().unwrap().change(TreeId::FS, |tree| tree.insert(key, &data)).unwrap();
        device.add(0..memory.size_bytes(), Fault::Error);
        let committer =
            Committer::start(&volume, volume.subvolumes.clone(), Duration::from_millis(1)).unwrap();
        let thread = committer.thread.as_ref().unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while !thread.is_finished() {
            assert!(Instant::now() < end, "the thread goes on: {} reports", count.lock());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(*count.lock(), 1);
    }
}
