//! The formats of volumes that this program opens.

use std::io;

use offshoot_device::{BlockDevice, occupant_at};
use offshoot_xfs_format::superblock::XfsSuperblock;

use crate::verbs::btrfs::label::label_at;

/// The names of all formats, in messages.
pub(super) const KNOWN: &str = "btrfs or XFS";

/// The largest sector of XFS, in bytes.
const MOST_SECTOR_BYTES: u64 = 32 << 10;

/// The format of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VolumeFormat {
    Btrfs,
    Xfs,
}

impl VolumeFormat {
    const ALL: [Self; 2] = [Self::Btrfs, Self::Xfs];

    /// The name, which is that of its signature too.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Xfs => "XFS",
        }
    }

    /// The format whose signature has this name.
    pub(super) fn of(signature: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == signature)
    }

    /// The format of the volume on `device`. Without a signature, or if it cannot be read, it is
    /// btrfs: that engine may find copies, and otherwise its error says what is missing.
    pub(crate) fn on(device: &dyn BlockDevice) -> Self {
        let found = occupant_at(device, 0, device.size_bytes());
        found.ok().flatten().and_then(Self::of).unwrap_or(Self::Btrfs)
    }

    /// The label of the volume that begins at `start`; empty when its first superblock is damaged.
    pub(super) fn label_at(self, device: &dyn BlockDevice, start: u64) -> io::Result<Vec<u8>> {
        if self == Self::Btrfs {
            return label_at(device, start);
        }
        let len = device.size_bytes().saturating_sub(start).min(MOST_SECTOR_BYTES);
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        device.read_at(start, &mut bytes)?;
        let superblock = XfsSuperblock::parse(&bytes);
        Ok(superblock.map(|superblock| superblock.fields.label().to_vec()).unwrap_or_default())
    }
}
