//! Opening storage: from devices to a map of chunks.
//!
//! 1. Read the superblock of every device: the primary if it verifies, otherwise the newest copy
//!    that does.
//! 2. Choose the volume: that of the first device that is not a seed, as its newest superblock
//!    describes it.
//! 3. Map the system chunks of the superblock. They are enough to read the chunk tree.
//! 4. The caller reads the chunk tree. [`Storage::learn`] takes all members and all chunks from it.

use std::sync::Arc;

use offshoot_btrfs_format::DeviceId;
use offshoot_btrfs_format::check::Geometry;
use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::superblock::{
    Incompat, SUPER_FLAG_CHANGING_BG_TREE, SUPER_FLAG_CHANGING_DATA_CSUM, SUPER_FLAG_CHANGING_FSID,
    SUPER_FLAG_CHANGING_FSID_V2, SUPER_FLAG_CHANGING_META_CSUM, SUPER_FLAG_SEEDING, Superblock,
};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Errno, Error, Result};
use parking_lot::{Mutex, RwLock};
use uuid::Uuid;

use super::chunk_map::{ChunkMap, MappedChunk};
use super::lanes::MemberLanes;
use super::members::{GivenDevice, Member, Members};
use super::mirrors::MirrorChoices;
use super::{Storage, ways};
use crate::report::{self, Reporter, VolumeReport};
use crate::shared::Shared;

/// The incompatible features that this engine can read.
const SUPPORTED: Incompat = Incompat::MIXED_BACKREF
    .union(Incompat::DEFAULT_SUBVOL)
    .union(Incompat::MIXED_GROUPS)
    .union(Incompat::COMPRESS_LZO)
    .union(Incompat::COMPRESS_ZSTD)
    .union(Incompat::BIG_METADATA)
    .union(Incompat::EXTENDED_IREF)
    .union(Incompat::RAID56)
    .union(Incompat::SKINNY_METADATA)
    .union(Incompat::NO_HOLES)
    .union(Incompat::METADATA_UUID)
    .union(Incompat::RAID1C34)
    .union(Incompat::ZONED)
    .union(Incompat::RAID_STRIPE_TREE)
    .union(Incompat::SIMPLE_QUOTA);

impl Storage {
    /// Storage that knows the system chunks and the given devices: enough to read the chunk tree.
    /// The second value is for [`learn`](Self::learn).
    ///
    /// # Errors
    /// When the devices belong to several volumes, a device is given twice, a device of the chunk
    /// tree is missing, or the volume has a feature that this engine does not know.
    pub(crate) fn open(
        devices: Vec<Arc<dyn BlockDevice>>,
        reporter: Option<Reporter>,
        ignore_log: bool,
    ) -> Result<(Self, Vec<GivenDevice>)> {
        let mut reports = Vec::new();
        let found = devices
            .into_iter()
            .map(|device| GivenDevice::read(device, &mut reports))
            .collect::<Result<Vec<_>>>()?;
        let superblock = choose(&found, &mut reports)?.clone();
        require_supported(&superblock)?;
        if ignore_log && superblock.has_pending_log() {
            reports.push(VolumeReport::LogIgnored);
        }
        let storage = Self::bootstrap(superblock, &found, reporter)?;
        for report in &reports {
            storage.report(report);
        }
        Ok((storage, found))
    }

    /// As [`open`](Self::open), but of the commit with this superblock, which is whole. A volume
    /// that is written may have a newer one on its devices, and that is not complete yet.
    pub(crate) fn open_at(
        devices: Vec<Arc<dyn BlockDevice>>,
        superblock: Superblock,
        reporter: Option<Reporter>,
    ) -> Result<(Self, Vec<GivenDevice>)> {
        let read = |device| GivenDevice::read(device, &mut Vec::new());
        let found = devices.into_iter().map(read).collect::<Result<Vec<_>>>()?;
        let storage = Self::bootstrap(superblock, &found, reporter)?;
        Ok((storage, found))
    }

    /// Sets the reporter that is told from now on.
    pub(crate) fn set_reporter(&mut self, reporter: Option<Reporter>) {
        self.reporter = reporter;
    }

    fn bootstrap(
        superblock: Superblock,
        found: &[GivenDevice],
        reporter: Option<Reporter>,
    ) -> Result<Self> {
        let (fsid, newest) = (superblock.metadata_uuid, superblock.generation);
        let members = Members::new(
            found
                .iter()
                .map(|one| Member::present(&one.superblock.item.dev_item, Some(one), fsid, newest))
                .collect(),
        );
        for one in found {
            report_size(one, reporter.as_ref());
        }
        let mut chunks = ChunkMap::default();
        for chunk in superblock.system_chunks.iter().cloned() {
            chunks.add(MappedChunk::new(chunk, &members))?;
        }
        require_chunk_tree(&chunks)?;
        let mut geometry = Geometry::of(&superblock);
        geometry.seeds = found
            .iter()
            .map(|one| one.superblock.metadata_uuid)
            .filter(|&seed| seed != fsid)
            .collect();
        Ok(Self {
            lanes: MemberLanes::new(members.all()),
            mirrors: MirrorChoices::default(),
            members,
            chunks: Shared::new("chunks", RwLock::new(Arc::new(chunks))),
            geometry,
            reporter,
            failing: Mutex::default(),
            chunk_tree_uuid: [0; 16],
            superblock,
        })
    }

    /// Replaces the members and chunks that were assumed so far by those of the chunk tree.
    /// `devices` are its device items.
    pub(crate) fn learn(&mut self, devices: &[DevItem], members: Members, chunks: ChunkMap) {
        self.members = members;
        self.lanes = MemberLanes::new(self.members.all());
        // A block may carry the UUID of the volume or of one of its seeds. A given device that is
        // no seed of this volume does not count.
        let is_seed = |seed: &Uuid| devices.iter().any(|item| item.fsid == *seed.as_bytes());
        self.geometry.seeds.retain(is_seed);
        let chunks = Arc::new(chunks);
        *self.chunks.write() = chunks.clone();
        for mapped in chunks.mapped().filter(|mapped| ways::is_lost(mapped)) {
            let Chunk { start, length, flags, profile, .. } = &mapped.chunk;
            let kind = format!("{} {profile}", flags.kind());
            self.report(&VolumeReport::LostChunk { logical: *start, length: *length, kind });
        }
    }

    /// Pairs the devices that the chunk tree knows with those that were given.
    ///
    /// # Errors
    /// When a member is missing and `degraded` is false, or two device items contradict each other.
    pub(crate) fn match_members(
        &self,
        devices: &[DevItem],
        found: &[GivenDevice],
        degraded: bool,
    ) -> Result<Members> {
        let (fsid, newest) = (self.superblock.metadata_uuid, self.superblock.generation);
        let mut all = Vec::with_capacity(devices.len());
        for item in devices {
            let uuid = Uuid::from_bytes(item.uuid);
            let device = found.iter().find(|one| one.uuid() == uuid);
            let member = Member::present(item, device, fsid, newest);
            match device {
                None if !degraded => {
                    return Err(missing_member(member.id, uuid));
                }
                None => self.report(&VolumeReport::MissingMember { id: member.id, uuid }),
                Some(one) => self.report_condition(&member, one),
            }
            all.push(member);
        }
        for stranger in found.iter().filter(|one| !all.iter().any(|m| m.uuid == one.uuid())) {
            self.report(&VolumeReport::NotAMember { device: stranger.device.name().to_owned() });
        }
        let members = Members::new(all);
        members.require_distinct()?;
        Ok(members)
    }

    fn report_condition(&self, member: &Member, found: &GivenDevice) {
        if member.is_stale() {
            self.report(&VolumeReport::StaleMember {
                device: member.name(),
                generation: found.superblock.generation,
                newest: self.superblock.generation,
            });
        }
    }
}

/// Reports a device that is shorter than its own superblock says. Reading what is cut off fails
/// later.
fn report_size(found: &GivenDevice, reporter: Option<&Reporter>) {
    let device = found.device.name().to_owned();
    let size_bytes = found.device.size_bytes();
    let expected_bytes = found.superblock.item.dev_item.total_bytes.get();
    if size_bytes < expected_bytes {
        report::tell(reporter, &VolumeReport::ShortMember { device, size_bytes, expected_bytes });
    }
}

/// The error that a member was not given.
fn missing_member(id: DeviceId, uuid: Uuid) -> Error {
    let what = format!("device {id} ({uuid}) of the volume is missing");
    Error::posix(Errno::NODEV, what).with_code(Code::Incomplete)
}

/// Refuses a volume whose chunk tree lies on devices that were not given.
fn require_chunk_tree(chunks: &ChunkMap) -> Result<()> {
    for mapped in chunks.mapped().filter(|mapped| ways::is_lost(mapped)) {
        let missing = mapped.chunk.stripes.iter().zip(&mapped.members).find(|(_, m)| m.is_none());
        if let Some((stripe, _)) = missing {
            let (id, uuid) = (stripe.device, stripe.device_uuid);
            return Err(missing_member(id, uuid));
        }
    }
    Ok(())
}

/// The newest superblock of the volume, which describes it.
///
/// The volume is that of the first device that is not a seed. When no device qualifies, it is that
/// of the first device.
fn choose<'f>(found: &'f [GivenDevice], reports: &mut Vec<VolumeReport>) -> Result<&'f Superblock> {
    let is_seed = |one: &GivenDevice| one.superblock.item.flags.get() & SUPER_FLAG_SEEDING != 0;
    let main = found
        .iter()
        .find(|one| !is_seed(one))
        .or(found.first())
        .ok_or_else(|| Error::posix(Errno::INVAL, "no device was given"))?;
    let fsid = main.superblock.fsid;
    for (i, one) in found.iter().enumerate() {
        if one.superblock.fsid != fsid && !is_seed(one) {
            return Err(Error::posix(
                Errno::INVAL,
                format!(
                    "{} belongs to volume {}, {} to another one, {fsid}",
                    one.device.name(),
                    one.superblock.fsid,
                    main.device.name()
                ),
            ));
        }
        if let Some(twin) = found[..i].iter().find(|other| other.uuid() == one.uuid()) {
            return Err(Error::posix(
                Errno::INVAL,
                format!(
                    "{} and {} are the same device of the volume, {}",
                    twin.device.name(),
                    one.device.name(),
                    one.uuid()
                ),
            ));
        }
    }
    let newest = found
        .iter()
        .map(|one| &one.superblock)
        .filter(|superblock| superblock.fsid == fsid)
        // One member may give a copy in place of a damaged primary. The copy may not name the log
        // that the primaries of the other members name.
        .max_by_key(|superblock| (superblock.generation, superblock.has_pending_log()))
        .expect("`main` is one of them");
    if newest.is_metadata_only() {
        reports.push(VolumeReport::MetadataOnly);
    }
    Ok(newest)
}

/// Refuses features that the engine does not know, by name. Features that forbid only writing do
/// not matter to a reader.
fn require_supported(superblock: &Superblock) -> Result<()> {
    let unknown = superblock.incompat.without(SUPPORTED).names();
    if !unknown.is_empty() {
        return Err(Error::unsupported(
            Code::UnknownFeature,
            format!("the volume's feature {}", unknown.join(", ")),
        ));
    }
    let flags = superblock.item.flags.get();
    for (flag, what) in [
        (SUPER_FLAG_CHANGING_FSID, "a volume whose fsid is being changed"),
        (SUPER_FLAG_CHANGING_FSID_V2, "a volume whose fsid is being changed"),
        (SUPER_FLAG_CHANGING_BG_TREE, "a volume that is being converted to a block group tree"),
        (SUPER_FLAG_CHANGING_DATA_CSUM, "a volume whose data checksums are being converted"),
        (SUPER_FLAG_CHANGING_META_CSUM, "a volume whose metadata checksums are being converted"),
    ] {
        if flags & flag != 0 {
            return Err(Error::unsupported(
                Code::UnfinishedConversion,
                format!("{what}; finish it with the program that began it"),
            ));
        }
    }
    Ok(())
}
