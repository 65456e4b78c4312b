//! What engines promise and do in different ways, where the explorer has to know it.

use offshoot_vfs::{Code, EntryPlace, Error, FileId, NewFile, Result, Timestamp};

use super::picture::SECTOR;
use crate::model::ModelManners;
use crate::model::subvolumes::{Settings, SubvolumeCalls};

/// The bytes that a device writes as a whole.
const DEVICE_SECTOR: u64 = 512;

/// The manners of an engine. The default ones are those of an engine that never overwrites what is
/// durable, and whose `fsync` may make one file durable and leave what came before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineManners {
    /// What the model does where POSIX leaves a choice.
    pub model: ModelManners,
    /// Data is overwritten in its place. A cut may leave each sector of a device old or new, and an
    /// operation that moves data may have moved a part of it.
    pub is_overwriting: bool,
    /// Names and attributes become durable in the order in which they changed. So a state shows all
    /// of them as of one moment, and an `fsync` makes durable everything up to the last change of
    /// its file. Data that was not synced is not a part of that order.
    pub is_ordered: bool,
    /// Dropping a volume writes, as an unmount does. So the explorer cuts the power before that in
    /// every other case.
    pub ends_with_writes: bool,
}

impl EngineManners {
    /// The unit, in bytes, in which data is old or new.
    pub(super) fn data_unit(self) -> u64 {
        if self.is_overwriting { DEVICE_SECTOR } else { SECTOR }
    }

    /// Whether a directory has one link, and a size that follows from the names in it.
    pub(super) fn has_plain_directories(self) -> bool {
        self.model == ModelManners::Btrfs
    }
}

/// The subvolumes of a format that has none: every change of them is refused.
#[derive(Clone, Copy, Debug)]
pub struct NoSubvolumes {
    /// The root directory.
    pub root: FileId,
}

impl NoSubvolumes {
    fn refused<T>() -> Result<T> {
        Err(Error::unsupported(Code::Unsupported, "subvolumes of this format"))
    }
}

impl SubvolumeCalls for NoSubvolumes {
    fn create_subvolume(&self, _: EntryPlace<'_>, _: &NewFile) -> Result<FileId> {
        Self::refused()
    }

    fn snapshot(&self, _: FileId, _: EntryPlace<'_>, _: bool, _: Timestamp) -> Result<FileId> {
        Self::refused()
    }

    fn delete_subvolume(&self, _: EntryPlace<'_>, _: Timestamp) -> Result<()> {
        Self::refused()
    }

    /// No subvolume was deleted.
    fn drop_deleted(&self) -> Result<()> {
        Ok(())
    }

    fn set_read_only(&self, _: FileId, _: bool) -> Result<()> {
        Self::refused()
    }

    fn set_default(&self, _: FileId) -> Result<()> {
        Self::refused()
    }

    fn settings(&self, _: FileId) -> Result<Option<Settings>> {
        Ok(None)
    }

    fn default(&self) -> Result<FileId> {
        Ok(self.root)
    }

    fn made(&self, _: FileId) -> Result<Timestamp> {
        Ok(Timestamp::default())
    }
}
