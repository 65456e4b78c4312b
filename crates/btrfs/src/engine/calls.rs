//! Calls of an open volume that the `vfs` traits do not have.

use std::ops::Range;

use offshoot_btrfs_format::{DeviceId, Logical};
use offshoot_vfs::{FileId, Result, Timestamp, Trimmed};

use super::Engine;
use crate::SubvolumeId;
use crate::log::{self, LogTree, LostLog};
use crate::subvolume::{self, SubvolumeInfo, Subvolumes, drop, settings};
use crate::upkeep::{self, Keeper, Resized};

impl Engine {
    /// The subvolume that a mount without options shows.
    ///
    /// # Errors
    /// When the entry that names it is malformed.
    pub fn default_subvolume(&self) -> Result<SubvolumeId> {
        subvolume::default_subvolume(self)
    }

    /// All subvolumes that were not deleted, the top level first, by id.
    pub fn subvolumes(&self) -> Subvolumes<'_> {
        subvolume::all(self)
    }

    /// How many subvolumes there are that were not deleted.
    pub fn subvolume_count(&self) -> Result<usize> {
        subvolume::count(self)
    }

    /// The properties of the subvolume `id`.
    ///
    /// # Errors
    /// `ENOENT` when there is no such subvolume.
    pub fn subvolume(&self, id: SubvolumeId) -> Result<SubvolumeInfo> {
        subvolume::info(self, id)
    }

    /// The path of `file` from the top level of the volume, by one of its names, without a leading
    /// slash.
    ///
    /// # Errors
    /// `ENOENT` when it has no name, or when its subvolume is gone; other errors when a directory
    /// above it cannot be read.
    pub fn path_of(&self, file: FileId) -> Result<Vec<u8>> {
        subvolume::path_of(self, file)
    }

    /// Makes the subvolume `id` read-only, or writable again. Data that was accepted before is in
    /// it.
    ///
    /// A received subvolume that becomes writable can no longer be the base of another receive. So
    /// it loses its received UUID and the sent generation and time, and `at` becomes its time of
    /// receive. The caller decides whether that is allowed.
    ///
    /// # Errors
    /// `ENOENT` when there is no such subvolume.
    pub fn set_read_only(&self, id: SubvolumeId, is_read_only: bool, at: Timestamp) -> Result<()> {
        settings::set_read_only(self, id, is_read_only, at)
    }

    /// Makes the subvolume `id` the one that a mount without options shows.
    ///
    /// # Errors
    /// `ENOENT` when there is no such subvolume.
    pub fn set_default_subvolume(&self, id: SubvolumeId) -> Result<()> {
        settings::set_default_subvolume(self, id)
    }

    /// The label of the volume, as the next commit stores it.
    #[must_use]
    pub fn label(&self) -> Vec<u8> {
        settings::label(self)
    }

    /// Gives the volume another label. Like any change it is durable after the next sync.
    ///
    /// # Errors
    /// `EINVAL` for a label of more than 255 bytes, or with NUL or a line break.
    pub fn set_label(&self, label: &[u8]) -> Result<()> {
        settings::set_label(self, label)
    }

    /// Drops all blocks of deleted subvolumes, except those with open files. The thread of the
    /// volume does the same little by little. Work that is left when a volume is closed continues
    /// when it is opened again.
    ///
    /// # Errors
    /// When a block of a subvolume cannot be read: the first such error, after all others were
    /// dropped. `EROFS` when the volume was opened for reading or all writing has ended.
    pub fn drop_deleted(&self) -> Result<()> {
        drop::drop_deleted(self, &self.subvolumes)
    }

    /// The log trees of the pending log, one for each subvolume with logged changes.
    ///
    /// # Errors
    /// When the tree of them is damaged.
    pub fn log_trees(&self) -> Result<Vec<LogTree>> {
        log::log_trees(self)
    }

    /// Removes the log from all superblocks, and returns what was in it; `None` if no log is
    /// pending. The caller has opened the volume for reading, without its log, on devices that can
    /// be written. Afterwards it opens the volume again.
    ///
    /// # Errors
    /// When a superblock cannot be written. Others may be written already. The log is pending as
    /// long as the primary superblocks name it.
    pub fn zero_log(&self) -> Result<Option<LostLog>> {
        log::zero_log(self)
    }

    /// Tells all devices which ranges hold no data: free ranges of block groups `within` this range
    /// of logical addresses, and all space that belongs to no chunk. Units of 64 KiB that the range
    /// cuts are left out. Other threads may change the volume meanwhile. Space of deleted
    /// subvolumes that are not dropped yet, and space that was freed and is in no commit yet, is
    /// not free.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or has stopped writing;
    /// [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) when no device can discard; errors
    /// of the devices and of reading the trees.
    pub fn trim(&self, within: Range<u64>) -> Result<Trimmed> {
        upkeep::trim(self, &within)
    }

    /// Makes the member `id` `bytes` long, rounded down to sectors. What lies behind a new end
    /// moves first, to free space or new chunks on any member. When it returns, the new size is
    /// durable. Other threads may use the volume meanwhile.
    ///
    /// The device becomes longer first, where it can and must. After the member has shrunk, a
    /// device that was just as long is cut off.
    ///
    /// # Errors
    /// `EROFS` when the volume was opened for reading, or has stopped writing; `ENODEV` when there
    /// is no such member; `ENOSPC` when the contents do not fit;
    /// [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) when something cannot be moved, or
    /// the size of the device is fixed; errors of the device and of reading what moves. After an
    /// error the member has its old size, and what moved stays where it is then.
    pub fn resize(&self, id: DeviceId, bytes: u64) -> Result<Resized> {
        upkeep::resize(self, &self.keeper(), id, bytes)
    }

    /// Makes the member `id` as small as its contents allow, and `slack` bytes longer than that.
    /// The kernel can mount and write the volume then. As [`resize`](Self::resize) otherwise.
    ///
    /// # Errors
    /// As [`resize`](Self::resize); [`Error::Unsupported`](offshoot_vfs::Error::Unsupported) for a
    /// volume with several members.
    pub fn resize_to_minimum(&self, id: DeviceId, slack: u64) -> Result<Resized> {
        upkeep::resize_to_minimum(self, &self.keeper(), id, slack)
    }

    /// Moves everything out of the block group at `start`, to free space or new chunks, and removes
    /// the group with its chunk. When it returns, that is durable. Other threads may use the volume
    /// meanwhile.
    ///
    /// # Errors
    /// As [`resize`](Self::resize); `ENOENT` when no block group begins at `start`.
    pub fn relocate(&self, start: Logical) -> Result<()> {
        upkeep::relocate(self, &self.keeper(), start)
    }

    fn keeper(&self) -> Keeper {
        Keeper { subvolumes: self.subvolumes.clone(), log: self.log.clone() }
    }

    /// Makes everything durable that was done, and then ends all writing, also when that fails.
    /// What other threads change meanwhile may be lost. Changes fail with `EROFS` from then on.
    ///
    /// # Errors
    /// Those of making everything durable.
    pub fn shut_down(&self) -> Result<()> {
        let Some(live) = self.live_part() else { return Ok(()) };
        let stored = self.sync();
        // What the last commit has freed.
        while upkeep::discard_step(self) {}
        live.shut_down();
        stored
    }
}
