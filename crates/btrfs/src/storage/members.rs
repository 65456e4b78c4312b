//! Members: the devices of a volume, and their superblocks.
//!
//! The superblock of a device is its primary one, if that verifies. Otherwise it is the copy with
//! the highest generation among those that verify. A good primary wins over a copy of a higher
//! generation: the primary is the one that the kernel reads, and a commit is complete when the
//! primary is written.
//!
//! The member with the newest superblock describes the volume. The chunk tree has the UUIDs of all
//! members, and the volume finds the others by these.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_btrfs_format::chunk::DevItem;
use offshoot_btrfs_format::superblock::{
    MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, SuperblockItem,
};
use offshoot_btrfs_format::{DeviceId, Generation, Malformed};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Corrupt, Errno, Error, Result, Structure};
use uuid::Uuid;

use super::failing::MemberCondition;
use crate::report::VolumeReport;

/// A device of a volume.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its number.
    pub id: DeviceId,
    /// Its UUID.
    pub uuid: Uuid,
    /// The size that the volume uses, in bytes. Clones share it.
    size: Arc<AtomicU64>,
    /// How many bytes of it belonged to chunks when the volume was opened.
    pub allocated_bytes: u64,
    /// Whether it belongs to a seed of the volume.
    pub is_seed: bool,
    /// The device; `None` when it is missing.
    pub device: Option<Arc<dyn BlockDevice>>,
    /// The device item of its own superblock; that of the chunk tree when the device is missing.
    pub(crate) item: DevItem,
    /// How many generations its superblock is behind.
    missed: u64,
    /// The lowest generation that its superblock may have, as the chunk tree says. An older
    /// superblock means that the member failed before that generation.
    expected: Generation,
    /// The generation of its superblock.
    own: Generation,
    /// What happened to it since the volume was opened. Clones share it.
    pub(super) condition: Arc<MemberCondition>,
}

impl Member {
    /// The member of the chunk tree's `item`, on the device `found`; without it the member is
    /// missing.
    pub(super) fn present(
        item: &DevItem,
        found: Option<&GivenDevice>,
        fsid: Uuid,
        newest: Generation,
    ) -> Self {
        let is_seed = Uuid::from_bytes(item.fsid) != fsid;
        // A seed is never written again, so it keeps the generation in which it became a seed.
        let own = found.filter(|_| !is_seed).map_or(newest, |found| found.superblock.generation);
        Self {
            id: item.id(),
            uuid: Uuid::from_bytes(item.uuid),
            size: Arc::new(AtomicU64::new(item.total_bytes.get())),
            allocated_bytes: item.bytes_used.get(),
            is_seed,
            device: found.map(|found| found.device.clone()),
            item: found.map_or(*item, |found| found.superblock.item.dev_item),
            missed: newest.0.saturating_sub(own.0),
            expected: Generation(item.generation.get()).min(newest),
            own,
            condition: Arc::default(),
        }
    }

    /// The size that the volume uses, in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Notes that the running transaction gives it another size.
    pub(crate) fn set_total_bytes(&self, bytes: u64) {
        self.size.store(bytes, Ordering::Release);
    }

    /// How many bytes of it exist: `total_bytes`, or less when the device is shorter than the
    /// volume says.
    pub(crate) fn usable_bytes(&self) -> u64 {
        let size_bytes = self.device.as_ref().map_or(u64::MAX, |device| device.size_bytes());
        self.total_bytes().min(size_bytes)
    }

    /// Whether it missed commits, or failed since the volume was opened.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.missed > 0 || self.has_failed()
    }

    /// Whether the volume has stopped writing to it, until the volume is opened again: because a
    /// write failed, or because the member missed commits.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.condition.has_failed()
    }

    /// The generation of its superblock.
    pub(super) fn generation(&self) -> Generation {
        self.own
    }

    /// Whether the chunk tree says that it failed, and its superblock is older than that.
    pub(super) fn is_noted_as_failed(&self) -> bool {
        self.own < self.expected
    }

    /// Whether it has counted errors that no commit has stored yet.
    pub(crate) fn has_errors(&self) -> bool {
        self.condition.has_errors()
    }

    /// How many generations it is behind.
    pub(crate) fn missed(&self) -> u64 {
        self.missed
    }

    /// The name of the device, or its number when it is missing.
    #[must_use]
    pub fn name(&self) -> String {
        match &self.device {
            Some(device) => device.name().to_owned(),
            None => format!("missing device {}", self.id),
        }
    }
}

/// All members, by number.
#[derive(Debug)]
pub(crate) struct Members {
    all: Vec<Member>,
    /// The indexes in `all` of the members that are present, by UUID.
    present: HashMap<Uuid, usize>,
}

impl Members {
    pub(super) fn new(mut all: Vec<Member>) -> Self {
        all.sort_by_key(|member| (member.id, member.uuid));
        let present = (0..)
            .zip(&all)
            .filter(|(_, member)| member.device.is_some())
            .map(|(index, member)| (member.uuid, index))
            .collect();
        Self { all, present }
    }

    /// # Errors
    /// When two members have the same number or the same UUID.
    pub(super) fn require_distinct(&self) -> Result<()> {
        let mut seen = (HashSet::new(), HashSet::new());
        for Member { id, uuid, .. } in &self.all {
            if !seen.0.insert(*id) || !seen.1.insert(*uuid) {
                let problem = format!("device {id} ({uuid}) is there twice");
                return Err(Error::corrupt(Structure::DeviceItem, problem));
            }
        }
        Ok(())
    }

    pub(super) fn all(&self) -> &[Member] {
        &self.all
    }

    pub(super) fn get(&self, index: usize) -> &Member {
        &self.all[index]
    }

    /// The index of the member with this UUID, when it is present.
    pub(super) fn find_present(&self, uuid: Uuid) -> Option<usize> {
        self.present.get(&uuid).copied()
    }
}

/// A device that the caller gave, with its superblock.
#[derive(Debug)]
pub(crate) struct GivenDevice {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) superblock: Superblock,
}

impl GivenDevice {
    /// The device.
    pub(crate) fn device(&self) -> &dyn BlockDevice {
        &*self.device
    }

    /// Its device item, as its own superblock has it.
    pub(crate) fn device_item(&self) -> DevItem {
        self.superblock.item.dev_item
    }

    /// The UUID of the device.
    pub(super) fn uuid(&self) -> Uuid {
        Uuid::from_bytes(self.superblock.item.dev_item.uuid)
    }

    /// Reads the superblock of `device`, by the rule at the top of this file.
    ///
    /// # Errors
    /// When no superblock of it verifies: the error of the primary.
    pub(super) fn read(
        device: Arc<dyn BlockDevice>,
        report: &mut Vec<VolumeReport>,
    ) -> Result<Self> {
        let [primary, copies @ ..] = SUPERBLOCK_OFFSETS;
        let fits = |offset: u64| offset + SUPERBLOCK_SIZE as u64 <= device.size_bytes();
        let read_copies = || {
            copies
                .into_iter()
                .filter(|&offset| fits(offset))
                .map(|o| (o, superblock_at(&*device, o)))
        };
        let problem = match superblock_at(&*device, primary) {
            Ok(superblock) => {
                // A device may be longer than the volume, which has no copy behind its end.
                let end = superblock.item.dev_item.total_bytes.get();
                let is_inside = |offset: u64| offset + SUPERBLOCK_SIZE as u64 <= end;
                let copies = read_copies().filter(|(offset, _)| is_inside(*offset));
                report.extend(copies.filter_map(|(offset, copy)| {
                    let problem = copy.err()?.to_string();
                    let device = device.name().to_owned();
                    Some(VolumeReport::BadSuperblockCopy { device, offset, problem })
                }));
                return Ok(Self { device, superblock });
            }
            Err(problem) => problem,
        };
        let best = read_copies()
            .filter_map(|(offset, copy)| Some((offset, copy.ok()?)))
            .max_by_key(|(_, found)| (found.generation, found.has_pending_log()));
        let Some((offset, superblock)) = best else {
            let is_btrfs = SUPERBLOCK_OFFSETS.iter().any(|&offset| has_magic(&*device, offset));
            let other = || {
                Error::posix(
                    Errno::INVAL,
                    format!("{}: no btrfs superblock; not a btrfs volume", device.name()),
                )
                .with_code(Code::NoVolume)
            };
            return Err(if is_btrfs || matches!(problem, Error::Io { .. }) && fits(primary) {
                problem
            } else {
                other()
            });
        };
        report.push(VolumeReport::SuperblockCopy {
            device: device.name().to_owned(),
            offset,
            problem: problem.to_string(),
        });
        Ok(Self { device, superblock })
    }
}

/// Whether the magic number of a superblock is at `offset`. The rest may be damaged.
fn has_magic(device: &dyn BlockDevice, offset: u64) -> bool {
    let mut bytes = [0; SUPERBLOCK_SIZE];
    device.read_at(offset, &mut bytes).is_ok()
        && SuperblockItem::view(&bytes).is_ok_and(|item| item.magic == MAGIC)
}

/// The superblock at `offset` of a device.
///
/// # Errors
/// When it does not verify.
pub(crate) fn superblock_at(device: &dyn BlockDevice, offset: u64) -> Result<Superblock> {
    let mut bytes = [0; SUPERBLOCK_SIZE];
    device.read_at(offset, &mut bytes).map_err(|e| {
        Error::io(format!("{}: reading the superblock at {offset}", device.name()), e)
    })?;
    Superblock::parse(&bytes, offset).map_err(|malformed| {
        let Malformed { structure, problem } = malformed;
        Corrupt {
            structure: format!("{structure} of {} at byte {offset}", device.name()),
            code: structure.code(),
            logical: None,
            problem: problem.into(),
            file: None,
        }
        .into()
    })
}
