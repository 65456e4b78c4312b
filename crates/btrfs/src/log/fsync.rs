//! fsync: makes a file durable, without a commit where possible.
//!
//! fsync writes back the buffered data of the file. If the running transaction has not changed the
//! file, it is durable with the last commit. Otherwise fsync logs it (`record`), and then the log
//! is written (`running`). The first thread that finds no writer writes the batch, for all threads
//! that have logged something until then. Threads that come meanwhile log into the next batch, and
//! one of them writes that.
//!
//! From logging to the end of the write-out the caller holds a handle. So a commit waits for it,
//! and the written log belongs to the last commit. If there is an [`Obstacle`], fsync makes a
//! commit. Without [`EngineOptions::has_tree_log`](crate::EngineOptions::has_tree_log) it always
//! does.

use std::sync::Arc;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Error, FileId, FileType, Result};
use tracing::{debug, info};

use super::datasync::{StoredPlace, stored_but_times};
use super::record::{LogRecording, LoggingStop};
use super::running::{LogTrees, RunningLog};
use crate::block::DirtyBlocks;
use crate::events::{LOG, clock, micros};
use crate::inode::subvolume::is_deleted;
use crate::inode::write_back::{self, Patience};
use crate::inode::{Rooms, RoomsHandle};
use crate::inode::{inode_item, placeholder_in, tree_of, type_of};
use crate::storage::malformed;
use crate::transaction::{CommitCause, LiveVolume, LogState, Obstacle};
use crate::tree::{Cursor, TreeRoot};

/// How large the log of one transaction may become, as a multiple of the dirty bytes that the
/// volume allows: with 64 MiB of these, 256 MiB.
const MOST_PARTS: u64 = 4;

/// Which part of a file has to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FsyncScope {
    /// All of it: fsync.
    Everything,
    /// All but its times: fdatasync.
    Data,
}

/// The outcome of trying to fsync without a commit.
enum FsyncOutcome {
    /// The file is durable.
    Done,
    /// This transaction has to be committed, for this reason.
    Commit(Generation, Obstacle),
}

/// Makes the wanted changes of `file` durable.
///
/// # Errors
/// As [`Rooms::sync`]. After an error that is not one of writing, the next fsync makes a commit.
pub(crate) fn fsync(
    volume: &Rooms,
    running: &RunningLog,
    file: FileId,
    wanted: FsyncScope,
) -> Result<()> {
    debug!(target: LOG, subvolume = file.dev, inode = file.ino, ?wanted, "fsync");
    // The empty directory that stands for a subvolume in a snapshot has nothing to log.
    let live = volume.live()?;
    if !volume.options.has_tree_log || placeholder_in(file).is_some() {
        write_back::sync_file(volume, file)?;
        write_back::sync_others(volume)?;
        return volume.commit();
    }
    match log_it(volume, running, file, wanted)? {
        FsyncOutcome::Done => {
            debug!(target: LOG, inode = file.ino, "fsync is done without a commit");
            Ok(())
        }
        FsyncOutcome::Commit(generation, obstacle) => {
            info!(target: LOG, inode = file.ino, reason = ?obstacle, "fsync makes a commit");
            obstacle.count(&live.stats);
            write_back::sync_others(volume)?;
            volume.upkeep.commit_one(volume, generation, CommitCause::Fsync)
        }
    }
}

/// Writes the file back, and logs it if possible.
fn log_it(
    volume: &Rooms,
    running: &RunningLog,
    file: FileId,
    wanted: FsyncScope,
) -> Result<FsyncOutcome> {
    let live = volume.live()?;
    // Write back once without the lock, while other threads may change the file and commit. Then
    // little is left to write back and to wait for under the lock.
    write_back::sync_file(volume, file)?;
    live.wait_for_commit()?;
    let locks = volume.inodes.lock(&[file]);
    write_back::write_back(volume, file, Patience::Waits)?;
    let handle = volume.enter_committed()?;
    let log = handle.log();
    let commit = |obstacle| Ok(FsyncOutcome::Commit(handle.generation(), obstacle));
    // Replay does not look into subvolumes without names.
    if is_deleted(volume, file)? || handle.tree(TreeId(file.dev))?.is_removed() {
        return commit(Obstacle::Subvolumes);
    }
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let is_changed = item.transid.get() >= handle.generation().0;
    // The contents that a snapshot shares with its source may be durable there, while the snapshot
    // itself is not in a commit yet.
    let committed = match committed_root(live, &handle, TreeId(file.dev)) {
        Ok(Some(committed)) => committed,
        Ok(None) => return commit(Obstacle::Subvolumes),
        Err(error) => return commit(failed(live, error)?),
    };
    if !is_changed && !log.notes().has_extents(file) {
        live.stats.fsynced_nothing();
        return Ok(FsyncOutcome::Done);
    }
    if item.nlink.get() == 0 {
        // A file without a name does not survive a crash, so its log would be useless.
        if let Some(obstacle) = barrier(live, volume)? {
            return commit(obstacle);
        }
        live.stats.fsynced_nameless();
        return Ok(FsyncOutcome::Done);
    }
    if let Some(obstacle) = log.obstacle() {
        return commit(obstacle);
    }
    let stored = match wanted {
        FsyncScope::Everything => Ok(None),
        FsyncScope::Data => stored_but_times(volume, running, log, file, committed),
    };
    let stored = match stored {
        Ok(stored) => stored,
        Err(error) => return commit(failed(live, error)?),
    };
    if let Some(stored) = stored {
        drop(locks);
        if let StoredPlace::Logged(batch) = stored
            && let Some(obstacle) = write_batch(live, running, &handle, batch)?
        {
            return commit(obstacle);
        }
        if let Some(obstacle) = barrier(live, volume)? {
            return commit(obstacle);
        }
        live.stats.fsynced_in_place();
        return Ok(FsyncOutcome::Done);
    }
    let is_directory = type_of(&item)? == FileType::Directory;
    let batch = match log_file(live, running, &handle, file, committed, is_directory) {
        Ok(batch) => batch,
        Err(LoggingStop::Obstacle(obstacle)) => return commit(obstacle),
        Err(LoggingStop::Error(error)) => return commit(failed(live, error)?),
    };
    drop(locks);
    match write_batch(live, running, &handle, batch)? {
        None => {
            live.stats.fsynced();
            Ok(FsyncOutcome::Done)
        }
        Some(obstacle) => commit(obstacle),
    }
}

/// Flushes the members, which is enough for data that was written in place. Returns an obstacle if
/// a member has failed whose stale data would be used after a crash.
fn barrier(live: &LiveVolume, volume: &Rooms) -> Result<Option<Obstacle>> {
    live.all_or_stop(|| volume.storage.flush_members())?;
    Ok(volume.storage.hides_failures().then_some(Obstacle::MemberFailed))
}

/// Turns an error into an obstacle: a commit may not need the block that could not be read for the
/// log.
///
/// # Errors
/// The error, when the volume has stopped writing.
fn failed(live: &LiveVolume, error: Error) -> Result<Obstacle> {
    live.require_writing().map(|()| Obstacle::Failed).map_err(|_| error)
}

/// Logs a locked file, and returns the batch that it is in.
fn log_file(
    live: &LiveVolume,
    running: &RunningLog,
    handle: &RoomsHandle<'_>,
    file: FileId,
    committed: TreeRoot,
    is_directory: bool,
) -> Result<u64, LoggingStop> {
    let mut trees = running.trees_for(file);
    begun(handle.log(), || {
        log_into(running, &mut trees, live, handle, file, committed, is_directory)
    })
}

/// Runs `work`, which logs something. If it fails or panics, nothing more is logged in this
/// transaction, because the tables may describe edits that are not in the log. The caller holds the
/// lock of the log trees, so no thread writes a half-done log.
pub(super) fn begun<T>(
    log: &LogState,
    work: impl FnOnce() -> Result<T, LoggingStop>,
) -> Result<T, LoggingStop> {
    let mut begun = ObstacleOnPanic { log, is_done: false };
    let logged = work();
    if let Err(stop) = &logged {
        log.obstruct(stop.obstacle());
    }
    begun.is_done = logged.is_ok();
    logged
}

/// Sets an obstacle when it is dropped unfinished, by a panic.
struct ObstacleOnPanic<'l> {
    log: &'l LogState,
    is_done: bool,
}

impl Drop for ObstacleOnPanic<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.log.obstruct(Obstacle::Failed);
        }
    }
}

/// Logs a locked file into the log trees, and returns the batch that it is in.
pub(super) fn log_into(
    running: &RunningLog,
    trees: &mut LogTrees,
    live: &LiveVolume,
    handle: &RoomsHandle<'_>,
    file: FileId,
    committed: TreeRoot,
    is_directory: bool,
) -> Result<u64, LoggingStop> {
    let (log, subvolume) = (handle.log(), TreeId(file.dev));
    // Set this before reading anything: extents that are freed from now on stay intact until the
    // commit.
    log.use_it();
    require_small(log, handle.volume())?;
    let batch = trees.batch;
    if trees.of(subvolume).is_none() {
        let Some(_room) = live.space.try_reserve(live.space.cost(1)) else {
            return Err(Obstacle::NoRoom.into());
        };
        trees.begin(handle, subvolume, committed)?;
    }
    let Some(own) = trees.of(subvolume) else { return Err(Obstacle::Failed.into()) };
    LogRecording::new(handle, running, own, subvolume, batch).run(file.ino, is_directory)
}

/// The root of a subvolume in the last commit, which is on the devices; `None` if that commit does
/// not have the subvolume.
pub(crate) fn committed_root(
    live: &LiveVolume,
    handle: &RoomsHandle<'_>,
    subvolume: TreeId,
) -> Result<Option<TreeRoot>> {
    let roots = TreeRoot::of_root_tree(&live.last_superblock());
    let first = Key::new(subvolume.0, ItemType::ROOT_ITEM, 0);
    let cursor = Cursor::seek_committed(handle.volume(), roots, first)?;
    let Some((_, data)) = cursor.item_of(subvolume.0, ItemType::ROOT_ITEM) else { return Ok(None) };
    let item = RootItem::parse(data).map_err(malformed)?;
    let (logical, level, generation) = (item.logical(), item.level, item.generation());
    Ok(Some(TreeRoot { id: subvolume, logical, level, generation }))
}

/// Waits until `batch` is on the devices, and writes it if no other thread does. Returns the
/// obstacle, if there is one.
fn write_batch(
    live: &LiveVolume,
    running: &RunningLog,
    handle: &RoomsHandle<'_>,
    batch: u64,
) -> Result<Option<Obstacle>> {
    let log = handle.log();
    loop {
        let mut progress = running.progress();
        if progress.done > batch {
            return Ok(None);
        }
        if let Some(obstacle) = log.obstacle() {
            return Ok(Some(obstacle));
        }
        live.require_writing()?;
        if progress.is_written {
            debug!(target: LOG, batch, "waiting for the thread that writes the log");
            running.wait(&mut progress);
            continue;
        }
        progress.is_written = true;
        drop(progress);
        let _lead = LogWriteTurn { running };
        live.all_or_stop(|| write_log(live, running, handle))?;
    }
}

/// The right to write the log. When this is dropped, the next thread may write.
struct LogWriteTurn<'l> {
    running: &'l RunningLog,
}

impl Drop for LogWriteTurn<'_> {
    fn drop(&mut self) {
        self.running.progress().is_written = false;
        self.running.tell();
    }
}

/// Writes the current batch, unless there is an obstacle.
fn write_log(live: &LiveVolume, running: &RunningLog, handle: &RoomsHandle<'_>) -> Result<()> {
    let (log, volume) = (handle.log(), handle.volume());
    let Some((root, blocks, batch)) = end_batch(live, running, handle)? else { return Ok(()) };
    let clock = clock!(LOG, DEBUG);
    debug!(
        target: LOG,
        transaction = handle.generation().0,
        batch,
        blocks = blocks.all().len(),
        "writing the log",
    );
    let is_reliable =
        !volume.storage.hides_failures() && volume.write_log(live, &blocks.all(), &root)?;
    if !is_reliable {
        // The commit that follows does not use the blocks of the log.
        log.obstruct(Obstacle::MemberFailed);
        return Ok(());
    }
    blocks.move_to(&volume.cache, |_| true);
    live.stats.log_written();
    debug!(target: LOG, batch, us = micros(clock), "the log is on the devices");
    running.progress().done = batch;
    Ok(())
}

/// Ends the current batch. Returns the root of the tree of log trees, the blocks to write, and the
/// number of the next batch; `None` if there is an obstacle.
fn end_batch(
    live: &LiveVolume,
    running: &RunningLog,
    handle: &RoomsHandle<'_>,
) -> Result<Option<(TreeRoot, Arc<DirtyBlocks>, u64)>> {
    let log = handle.log();
    let mut trees = running.trees();
    let Some(_room) = live.space.try_reserve(live.space.cost(1 + trees.number() as u64)) else {
        log.obstruct(Obstacle::NoRoom);
        return Ok(None);
    };
    let root = trees.end_batch(handle)?;
    // All blocks of the batch exist now. An obstacle is set before the change that the log must not
    // have, so if there is none by now, this batch is valid.
    if log.obstacle().is_some() {
        return Ok(None);
    }
    Ok(Some((root, log.take_off(), trees.batch)))
}

/// Stops a log that has become so large that a commit is as cheap.
pub(super) fn require_small(log: &LogState, volume: &Rooms) -> Result<(), LoggingStop> {
    let node_size = u64::from(volume.superblock().node_size);
    let is_large = log.taken() * node_size > MOST_PARTS * volume.options.dirty_bytes;
    if is_large { Err(Obstacle::LargeLog.into()) } else { Ok(()) }
}
