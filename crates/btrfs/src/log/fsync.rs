//! fsync: a file to the devices, without a commit where that is possible.
//!
//! What the file has buffered is written back. If nothing of it changed in the running transaction,
//! it is on the devices when the commit before is. Otherwise it is logged (`record`), and the log
//! is written (`running`): by the first who finds nobody at it, for all who have logged something
//! until then. Those who come meanwhile log, and the first of them writes next.
//!
//! From logging to the end of the write-out the caller has a handle. So a commit waits for it, and
//! what is written goes with the commit before. Where there is an [`Obstacle`], a commit is made;
//! and always in a volume that is opened without
//! [`OpenOptions::tree_log`](crate::OpenOptions::tree_log).

use std::sync::Arc;

use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{Error, FileId, FileType, Result};

use super::datasync::{Stored, stored_but_times};
use super::record::{Record, Stop};
use super::running::{RunningLog, Trees};
use crate::block::DirtyBlocks;
use crate::engine::{Engine, Handle};
use crate::inode::subvolume::is_deleted;
use crate::inode::write_back::{self, Patience};
use crate::inode::{inode_item, placeholder_in, tree_of, type_of};
use crate::storage::malformed;
use crate::transaction::{Cause, Live, LogState, Obstacle};
use crate::tree::{Cursor, TreeRoot};

/// Blocks of a log that one transaction takes at most, in parts of what may be changed and not on
/// the devices.
const MOST_PARTS: u64 = 4;

/// What has to be durable of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// All of it: fsync.
    Everything,
    /// All but its times: fdatasync.
    Data,
}

/// What becomes of an fsync.
enum Outcome {
    /// It is done.
    Done,
    /// The transaction has to be committed.
    Commit(Generation, Obstacle),
}

/// Makes durable what is wanted of what was changed of `file`.
///
/// # Errors
/// As [`Engine::sync`]. After an error that is not one of writing, another fsync makes a commit.
pub(crate) fn fsync(volume: &Engine, file: FileId, wanted: Wanted) -> Result<()> {
    // The place of a subvolume in a snapshot has nothing that could be logged.
    let live = volume.live()?;
    if !volume.options.tree_log || placeholder_in(file).is_some() {
        write_back::sync_file(volume, file)?;
        write_back::sync_others(volume)?;
        return volume.commit();
    }
    match log_it(volume, file, wanted)? {
        Outcome::Done => Ok(()),
        Outcome::Commit(generation, obstacle) => {
            obstacle.count(&live.stats);
            write_back::sync_others(volume)?;
            volume.commit_one(generation, Cause::Fsync)
        }
    }
}

/// Writes the file back, and logs it if possible.
fn log_it(volume: &Engine, file: FileId, wanted: Wanted) -> Result<Outcome> {
    let live = volume.live()?;
    // Others may change the file, and commit, while this waits. Then there is little left to write
    // back and to wait for.
    write_back::sync_file(volume, file)?;
    live.wait_for_commit()?;
    let locks = volume.inodes.lock(&[file]);
    write_back::write_back(volume, file, Patience::Waits)?;
    let handle = volume.enter_committed()?;
    let log = handle.log();
    let commit = |obstacle| Ok(Outcome::Commit(handle.generation(), obstacle));
    // What replays a log looks for no files in subvolumes without names.
    if is_deleted(volume, file)? || handle.tree(TreeId(file.dev))?.is_removed() {
        return commit(Obstacle::Subvolumes);
    }
    let item = inode_item(volume, tree_of(volume, file)?, file)?;
    let is_changed = item.transid.get() >= handle.generation().0;
    // What a snapshot took from its source was stored there, and the snapshot itself may not be
    // yet.
    let committed = match committed_root(live, &handle, TreeId(file.dev)) {
        Ok(Some(committed)) => committed,
        Ok(None) => return commit(Obstacle::Subvolumes),
        Err(error) => return commit(failed(live, error)?),
    };
    if !is_changed && !log.notes().has_extents(file) {
        live.stats.fsynced_nothing();
        return Ok(Outcome::Done);
    }
    if item.nlink.get() == 0 {
        // Nobody finds it after a crash.
        if let Some(obstacle) = barrier(live, volume)? {
            return commit(obstacle);
        }
        live.stats.fsynced_nameless();
        return Ok(Outcome::Done);
    }
    if let Some(obstacle) = log.obstacle() {
        return commit(obstacle);
    }
    let stored = match wanted {
        Wanted::Everything => Ok(None),
        Wanted::Data => stored_but_times(volume, log, file, committed),
    };
    let stored = match stored {
        Ok(stored) => stored,
        Err(error) => return commit(failed(live, error)?),
    };
    if let Some(stored) = stored {
        drop(locks);
        if let Stored::Logged(batch) = stored
            && let Some(obstacle) = write_batch(live, &handle, batch)?
        {
            return commit(obstacle);
        }
        if let Some(obstacle) = barrier(live, volume)? {
            return commit(obstacle);
        }
        live.stats.fsynced_in_place();
        return Ok(Outcome::Done);
    }
    let is_directory = type_of(&item)? == FileType::Directory;
    let batch = match log_file(live, &handle, file, committed, is_directory) {
        Ok(batch) => batch,
        Err(Stop::Obstacle(obstacle)) => return commit(obstacle),
        Err(Stop::Error(error)) => return commit(failed(live, error)?),
    };
    drop(locks);
    match write_batch(live, &handle, batch)? {
        None => {
            live.stats.fsynced();
            Ok(Outcome::Done)
        }
        Some(obstacle) => commit(obstacle),
    }
}

/// The barrier, which is enough for what was written in place; the obstacle, if a member has failed
/// that would be believed after a crash.
fn barrier(live: &Live, volume: &Engine) -> Result<Option<Obstacle>> {
    live.whole(|| volume.flush_members())?;
    Ok(volume.storage.hides_failures().then_some(Obstacle::MemberFailed))
}

/// The obstacle that an error is: a commit may do without what could not be read to be logged.
///
/// # Errors
/// The error, when nothing is written any more.
fn failed(live: &Live, error: Error) -> Result<Obstacle> {
    live.require_whole().map(|()| Obstacle::Failed).map_err(|_| error)
}

/// Logs a file that is locked, and gives the batch in which it is.
fn log_file(
    live: &Live,
    handle: &Handle<'_>,
    file: FileId,
    committed: TreeRoot,
    is_directory: bool,
) -> Result<u64, Stop> {
    let mut trees = handle.volume().log.trees_for(file);
    begun(handle.log(), || log_into(&mut trees, live, handle, file, committed, is_directory))
}

/// Logs something. When that fails, or panics, nothing more is logged: what is known of the log may
/// be what it was to become. The caller has the log trees locked, so that nobody writes half of it.
pub(super) fn begun<T>(log: &LogState, work: impl FnOnce() -> Result<T, Stop>) -> Result<T, Stop> {
    let mut begun = Begun { log, is_done: false };
    let logged = work();
    if let Err(stop) = &logged {
        log.obstruct(stop.obstacle());
    }
    begun.is_done = logged.is_ok();
    logged
}

/// Something that is being logged.
struct Begun<'l> {
    log: &'l LogState,
    is_done: bool,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            self.log.obstruct(Obstacle::Failed);
        }
    }
}

/// Logs a file that is locked into the log trees, and gives the batch in which it is.
pub(super) fn log_into(
    trees: &mut Trees,
    live: &Live,
    handle: &Handle<'_>,
    file: FileId,
    committed: TreeRoot,
    is_directory: bool,
) -> Result<u64, Stop> {
    let (log, subvolume) = (handle.log(), TreeId(file.dev));
    // Before anything is looked at: what is given up from now on stays as it is until the commit.
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
    Record::new(handle, own, subvolume, batch).run(file.ino, is_directory)
}

/// The root of a tree that the root tree names, as the last commit has it. That commit is on the
/// devices.
pub(crate) fn committed_root(
    live: &Live,
    handle: &Handle<'_>,
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

/// Waits until `batch` is on the devices, and writes it if nobody else is at it. The obstacle, if
/// there is one.
fn write_batch(live: &Live, handle: &Handle<'_>, batch: u64) -> Result<Option<Obstacle>> {
    let (log, running) = (handle.log(), &handle.volume().log);
    loop {
        let mut progress = running.progress();
        if progress.done > batch {
            return Ok(None);
        }
        if let Some(obstacle) = log.obstacle() {
            return Ok(Some(obstacle));
        }
        live.require_whole()?;
        if progress.is_written {
            running.wait(&mut progress);
            continue;
        }
        progress.is_written = true;
        drop(progress);
        let _lead = Lead { running };
        live.whole(|| write_log(live, handle))?;
    }
}

/// Who writes the log. When this is dropped the next one may.
struct Lead<'l> {
    running: &'l RunningLog,
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        self.running.progress().is_written = false;
        self.running.tell();
    }
}

/// Writes what was logged, unless there is an obstacle.
fn write_log(live: &Live, handle: &Handle<'_>) -> Result<()> {
    let (log, volume) = (handle.log(), handle.volume());
    let Some((root, blocks, batch)) = end_batch(live, handle)? else { return Ok(()) };
    let is_reliable =
        !volume.storage.hides_failures() && volume.write_log(live, &blocks.all(), &root)?;
    if !is_reliable {
        // The commit that follows has no use for its blocks.
        log.obstruct(Obstacle::MemberFailed);
        return Ok(());
    }
    blocks.move_to(&volume.cache, |_| true);
    live.stats.log_written();
    volume.log.progress().done = batch;
    Ok(())
}

/// Ends the batch that is being logged: the root of all logs, the blocks that have to be written,
/// and the next batch.
fn end_batch(
    live: &Live,
    handle: &Handle<'_>,
) -> Result<Option<(TreeRoot, Arc<DirtyBlocks>, u64)>> {
    let log = handle.log();
    let mut trees = handle.volume().log.trees();
    let Some(_room) = live.space.try_reserve(live.space.cost(1 + trees.number() as u64)) else {
        log.obstruct(Obstacle::NoRoom);
        return Ok(None);
    };
    let root = trees.end_batch(handle)?;
    // All blocks are there now. Who set an obstacle before has done it before there was anything
    // that the log must not have.
    if log.obstacle().is_some() {
        return Ok(None);
    }
    Ok(Some((root, log.take_off(), trees.batch)))
}

/// A log that became large is no better than a commit.
pub(super) fn require_small(log: &LogState, volume: &Engine) -> Result<(), Stop> {
    let node_size = u64::from(volume.superblock().node_size);
    let is_large = log.taken() * node_size > MOST_PARTS * volume.options.dirty_bytes;
    if is_large { Err(Obstacle::LargeLog.into()) } else { Ok(()) }
}
