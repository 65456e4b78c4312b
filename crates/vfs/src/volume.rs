//! What a volume is to its callers beside its files.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use crate::{FileSystemMut, Result};

/// A volume that is open: what its format shares with every other one and is about no file.
///
/// Its sizes are those of [`FileSystem::statfs`](crate::FileSystem::statfs), and
/// [`FileSystemMut::sync`] makes durable what was done to it. All methods may be called from many
/// threads at once.
pub trait Volume: Send + Sync {
    /// The files in the number space `dev` ([`FileId::dev`](crate::FileId::dev)), and those in the
    /// ones that are nested in it. `ENOENT` when there is none.
    fn files(self: Arc<Self>, dev: u64) -> Result<Box<dyn FileSystemMut>>;

    /// Which volume it is, and as what it is open.
    fn version(&self) -> VolumeVersion;

    /// The unit in which data is allocated, in bytes.
    fn block_size(&self) -> u32;

    /// The label; empty when it has none.
    fn label(&self) -> Vec<u8>;

    /// Gives it another label, which is durable after the next sync. `EINVAL` for one that the
    /// format cannot hold.
    fn set_label(&self, label: &[u8]) -> Result<()>;

    /// Tells its devices which ranges of them hold nothing: those `within` this range of the
    /// addresses of the volume, and all that have no address yet.
    fn trim(&self, within: Range<u64>) -> Result<Trimmed>;

    /// Makes everything durable that was done, and then ends all writing, also when that fails:
    /// nothing is written to the devices any more until the volume is opened again.
    fn shut_down(&self) -> Result<()>;
}

/// Tells a volume from other ones, and from itself before and after a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeVersion {
    /// The identity that the format gives to a volume. It stays the same for as long as the volume
    /// exists.
    pub volume: String,
    /// The state that the volume is in on its devices. It is another one after each change that
    /// was made durable. Where the format does not tell, it is another one at each opening.
    pub state: String,
}

/// What [`Volume::trim`] discarded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trimmed {
    /// How much that was, on all devices together, in bytes.
    pub bytes: u64,
    /// The devices whose host cannot discard, by name.
    pub unable: BTreeSet<String>,
}
