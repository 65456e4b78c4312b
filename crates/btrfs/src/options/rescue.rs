//! How a damaged volume is opened to read what is left of it.

use offshoot_btrfs_format::{Generation, Logical};

/// How a damaged volume is read. By default nothing is special: what is damaged is an error. Such
/// a volume is only read; it is refused to be opened for writing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct Rescue {
    /// The root of the root tree through which the volume is read.
    pub root: RootChoice,
    /// Whether data is taken as it is read, without comparing its checksums.
    pub ignores_checksums: bool,
    /// Whether a tree that is not needed to read files is treated as absent when its root cannot
    /// be read. Without the checksum tree data is taken as it is read.
    pub ignores_bad_roots: bool,
    /// Whether readers go past blocks of trees that cannot be read. What stood in them seems to be
    /// absent then, and [`VolumeReport::LostItems`](crate::VolumeReport::LostItems) says where.
    pub goes_past_damage: bool,
    /// Whether data that no copy gives is read as zeros, which
    /// [`VolumeReport::ReplacedData`](crate::VolumeReport::ReplacedData) reports. Data whose
    /// checksum cannot be read is taken as it is, which
    /// [`VolumeReport::UnverifiedData`](crate::VolumeReport::UnverifiedData) reports.
    pub replaces_bad_data: bool,
    /// Whether the devices are searched for blocks of trees, when a root, the chunk tree or a node
    /// cannot be read.
    pub scans: bool,
}

impl Rescue {
    /// All that helps to get files out of a damaged volume. Checksums of data are compared.
    pub const EVERYTHING: Self = Self {
        root: RootChoice::Usable,
        ignores_checksums: false,
        ignores_bad_roots: true,
        goes_past_damage: true,
        replaces_bad_data: true,
        scans: true,
    };

    /// Whether anything is special.
    #[must_use]
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }
}

/// The root of the root tree through which a volume is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RootChoice {
    /// That of the newest superblock.
    #[default]
    Newest,
    /// The newest that can be used: that of the superblock, or else of one of its backups.
    Usable,
    /// That of the commit with this generation.
    Generation(Generation),
    /// The block at this address.
    Block(Logical),
}
