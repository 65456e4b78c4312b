//! The options for a new volume, and their checked form.

use offshoot_btrfs_format::block::MAX_NODESIZE;
use offshoot_btrfs_format::chunk::Profile;
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::superblock::{CompatRo, Incompat};
use offshoot_vfs::{Code, Error, Result, Timestamp};
use uuid::Uuid;

use super::features::MkfsFeatures;
use super::invalid;
use crate::subvolume::derived_uuid;

/// The default node size, in bytes.
const DEFAULT_NODE_SIZE: u32 = 16384;

/// The longest label, in bytes. Its field of 256 bytes ends with a NUL.
const LABEL_LEN: usize = 255;

/// Options for a new volume. [`MkfsOptions::new`] gives the defaults of the current `mkfs.btrfs`.
#[derive(Clone, Debug)]
pub struct MkfsOptions {
    /// The filesystem id. Two volumes on one machine must not share it.
    pub fsid: Uuid,
    /// When the volume and its root directory were made.
    pub time: Timestamp,
    /// User and group of the root directory.
    pub root_owner: (u32, u32),
    /// Derives, together with `fsid`, the UUIDs that the options do not give.
    pub seed: u64,
    /// The label: at most 255 bytes, without NUL and line break.
    pub label: String,
    /// The UUIDs of the devices, or empty to derive them.
    pub device_uuids: Vec<Uuid>,
    /// The size of a tree block in bytes; `None` for 16 KiB, or the sector size in a volume with
    /// mixed groups.
    pub node_size: Option<u32>,
    /// The sector size, the unit of data, in bytes.
    pub sector_size: u32,
    /// The algorithm of checksums.
    pub checksum: ChecksumType,
    /// The profile of metadata; `None` for DUP on one device, RAID1 on several.
    pub metadata: Option<Profile>,
    /// The profile of data; `None` for single.
    pub data: Option<Profile>,
    /// The features.
    pub features: MkfsFeatures,
    /// Overwrite what is on the devices.
    pub is_forced: bool,
}

impl MkfsOptions {
    /// The defaults for a volume with this id that is made at this time.
    #[must_use]
    pub fn new(fsid: Uuid, time: Timestamp) -> Self {
        Self {
            fsid,
            time,
            root_owner: (0, 0),
            seed: 0,
            label: String::new(),
            device_uuids: Vec::new(),
            node_size: None,
            sector_size: 4096,
            checksum: ChecksumType::Crc32c,
            metadata: None,
            data: None,
            features: MkfsFeatures::default(),
            is_forced: false,
        }
    }

    /// Checks the options against each other and against the number of devices, and fills in
    /// defaults.
    pub(super) fn resolve(&self, devices: usize) -> Result<VolumeSpec> {
        if devices == 0 {
            return Err(invalid("no device was given"));
        }
        self.features.verify()?;
        let is_mixed = self.features.incompat.has(Incompat::MIXED_GROUPS);
        let default =
            if is_mixed { self.sector_size } else { self.sector_size.max(DEFAULT_NODE_SIZE) };
        let node_size = self.node_size.unwrap_or(default);
        self.verify_sizes(node_size, is_mixed)?;
        self.verify_identity()?;
        let (data, metadata) = self.profiles(devices, is_mixed)?;
        let mut incompat = self.features.incompat.union(Incompat::MIXED_BACKREF);
        if node_size > 4096 {
            incompat = incompat.union(Incompat::BIG_METADATA);
        }
        if [data, metadata].iter().any(|p| matches!(p, Profile::Raid1c3 | Profile::Raid1c4)) {
            incompat = incompat.union(Incompat::RAID1C34);
        }
        Ok(VolumeSpec {
            fsid: self.fsid,
            time: self.time,
            root_owner: self.root_owner,
            label: self.label.clone(),
            device_uuids: self.all_device_uuids(devices)?,
            chunk_tree_uuid: self.derive("chunk tree", 0),
            subvolume_uuid: self.derive("subvolume", 5),
            node_size,
            sector_size: self.sector_size,
            checksum: self.checksum,
            metadata,
            data,
            is_mixed,
            incompat,
            compat_ro: self.features.compat_ro,
        })
    }

    fn verify_sizes(&self, node_size: u32, is_mixed: bool) -> Result<()> {
        let sector_size = self.sector_size;
        if !sector_size.is_power_of_two() || !(4096..=MAX_NODESIZE).contains(&sector_size) {
            return Err(invalid(format!(
                "a sector size of {sector_size}; it is a power of two from 4096 to {MAX_NODESIZE}"
            )));
        }
        if !node_size.is_power_of_two() || !(sector_size..=MAX_NODESIZE).contains(&node_size) {
            return Err(invalid(format!(
                "a node size of {node_size}; it is a power of two from the sector size, \
                 {sector_size}, to {MAX_NODESIZE}"
            )));
        }
        if is_mixed && node_size != sector_size {
            return Err(invalid(format!(
                "a node size of {node_size}; with mixed groups it is the sector size, {sector_size}"
            )));
        }
        Ok(())
    }

    fn verify_identity(&self) -> Result<()> {
        if self.fsid.is_nil() {
            return Err(invalid("a filesystem id of all zeros"));
        }
        if self.label.len() > LABEL_LEN || self.label.contains(['\0', '\n']) {
            return Err(invalid(format!(
                "the label {:?}; it has at most {LABEL_LEN} bytes and neither NUL nor line break",
                self.label
            )));
        }
        if self.time.nanos >= 1_000_000_000 {
            return Err(invalid(format!("a time with {} nanoseconds", self.time.nanos)));
        }
        Ok(())
    }

    /// The profiles of data and metadata.
    fn profiles(&self, devices: usize, is_mixed: bool) -> Result<(Profile, Profile)> {
        let (data, metadata) = if is_mixed {
            let one = self.metadata.or(self.data).unwrap_or(Profile::Single);
            if self.data.is_some_and(|data| data != one) {
                return Err(invalid("mixed groups have one profile for data and metadata"));
            }
            (one, one)
        } else {
            let redundant = if devices == 1 { Profile::Dup } else { Profile::Raid1 };
            (self.data.unwrap_or(Profile::Single), self.metadata.unwrap_or(redundant))
        };
        for profile in [data, metadata] {
            if profile.shape().parity > 0 {
                return Err(Error::unsupported(Code::Parity, format!("writing {profile}")));
            }
            // DUP has both stripes on one device.
            let least = if profile == Profile::Dup { 1 } else { profile.shape().min_stripes };
            if devices < usize::from(least) {
                return Err(invalid(format!(
                    "{profile} needs at least {least} devices; given: {devices}"
                )));
            }
        }
        Ok((data, metadata))
    }

    fn all_device_uuids(&self, devices: usize) -> Result<Vec<Uuid>> {
        let uuids: Vec<Uuid> = if self.device_uuids.is_empty() {
            (1..=devices as u64).map(|number| self.derive("device", number)).collect()
        } else {
            self.device_uuids.clone()
        };
        if uuids.len() != devices {
            return Err(invalid(format!("{} device UUIDs for {devices} devices", uuids.len())));
        }
        for (i, uuid) in uuids.iter().enumerate() {
            if uuid.is_nil() || uuids[..i].contains(uuid) {
                return Err(invalid(format!(
                    "the device UUID {uuid}, which is none or not unique"
                )));
            }
        }
        Ok(uuids)
    }

    /// A UUID that follows from the filesystem id, the seed, the purpose and the number.
    fn derive(&self, purpose: &str, number: u64) -> Uuid {
        let parts: [&[u8]; 4] = [
            self.fsid.as_bytes(),
            &self.seed.to_le_bytes(),
            &number.to_le_bytes(),
            purpose.as_bytes(),
        ];
        derived_uuid(&parts)
    }
}

/// Checked options, with all defaults filled in.
#[derive(Debug)]
pub(super) struct VolumeSpec {
    pub(super) fsid: Uuid,
    pub(super) time: Timestamp,
    pub(super) root_owner: (u32, u32),
    pub(super) label: String,
    /// One for every device.
    pub(super) device_uuids: Vec<Uuid>,
    pub(super) chunk_tree_uuid: Uuid,
    /// The UUID of the top-level subvolume.
    pub(super) subvolume_uuid: Uuid,
    pub(super) node_size: u32,
    pub(super) sector_size: u32,
    pub(super) checksum: ChecksumType,
    pub(super) metadata: Profile,
    pub(super) data: Profile,
    /// Data and metadata share block groups.
    pub(super) is_mixed: bool,
    pub(super) incompat: Incompat,
    pub(super) compat_ro: CompatRo,
}
