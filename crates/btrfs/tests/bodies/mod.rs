//! The body of a test with hostile volumes for the check and the repair.
//!
//! The input is a program that damages the volume of the repository: each step changes a block or a
//! superblock, whose checksums are made right, so that everything behind them is reached. Then the
//! volume is checked, repaired, and the repair is undone. All of that must return for every input,
//! without a panic, an endless loop or much memory. Besides that:
//!
//! 1. A repair that is refused writes nothing.
//! 2. After a repair the check finds what the repair said, and the repair can be undone.
//! 3. A search for the volume without its superblocks, to read it, writes nothing.
//!
//! The stable tests pass in random bytes, and the fuzz target any bytes.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, BtrfsVolume, CheckEvent, CheckOptions,
    EngineOptions, RecoveredFiles, RepairClass, RepairOptions, Rescue, ScanOptions, check_btrfs,
    find_volume, repair_btrfs, undo_repair,
};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::fixture;
use offshoot_vfs::FileSystem as _;

use crate::damage::{DamageTarget, header};
use crate::image::{Patched, SparseImage};
use crate::mutation::{pack, unpack};

/// The bytes of a step.
const STEP: usize = 8;

/// More steps than these would only repeat what fewer do.
const MOST_STEPS: usize = 16;

/// Numbers that fields are set to.
const SPECIAL: [u64; 16] = [
    0,
    1,
    2,
    3,
    5,
    256,
    257,
    4096,
    16_384,
    65_536,
    1 << 20,
    13_631_488,
    1 << 32,
    1 << 48,
    1 << 63,
    u64::MAX,
];

/// What became of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostileEnd {
    /// It cannot be checked.
    NotChecked,
    /// Nothing can be mended.
    NothingToMend,
    /// The repair was refused.
    Refused,
    /// It was repaired.
    Repaired,
}

/// The volume of the repository.
fn target() -> &'static DamageTarget {
    static TARGET: OnceLock<DamageTarget> = OnceLock::new();
    TARGET.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("kernel.btrfs");
        fixture::unpack(&path).expect("the fixture unpacks");
        let image = SparseImage::read(&path).expect("an image");
        DamageTarget::new(vec![Arc::new(image)], true)
    })
}

/// A device that counts the writes to it.
#[derive(Debug)]
struct CountedDevice {
    below: MemoryDevice,
    writes: AtomicU64,
}

impl offshoot_device::Delegate for CountedDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &self.below
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        self.below.write_at(offset, buf)
    }
}

/// Damages the volume with the program in `data`, and checks and repairs it.
pub(crate) fn check_and_repair(data: &[u8]) -> HostileEnd {
    let Some((&options, steps)) = data.split_first() else { return HostileEnd::NotChecked };
    let target = target();
    let mut image = target.sound().remove(0);
    let mut blocks: Vec<_> = target.blocks.iter().map(|block| block.bytes.clone()).collect();
    for step in steps.chunks_exact(STEP).take(MOST_STEPS) {
        apply(target, &mut blocks, &mut image, step);
    }
    let below = MemoryDevice::over(Arc::new(image));
    let device = Arc::new(CountedDevice { below, writes: AtomicU64::new(0) });
    if options & 8 != 0 {
        read_without_superblocks(&device);
    }
    repair(&device, options)
}

/// Reads the volume as it is found without its superblocks.
fn read_without_superblocks(device: &Arc<CountedDevice>) {
    let wiped = MemoryDevice::over(device.clone());
    for offset in SUPERBLOCK_OFFSETS.into_iter().filter(|at| at + 4096 <= wiped.size_bytes()) {
        wiped.write_at(offset, &[0; SUPERBLOCK_SIZE]).expect("it is in memory");
    }
    let check = CheckOptions { memory_bytes: 16 << 20, ..CheckOptions::default() };
    let watch = |_: &CheckEvent| ControlFlow::Continue(());
    let found = find_volume(&[Arc::new(wiped)], ScanOptions::default(), &check, &watch);
    let found = match found {
        Ok(found) => found.expect("there is no superblock"),
        Err(error) => return drop(error.to_string()),
    };
    let options = EngineOptions { rescue: Rescue::EVERYTHING, ..EngineOptions::default() };
    if let Ok(volume) = BtrfsVolume::open(found.devices, &options) {
        let _ = volume.roots();
        let files = RecoveredFiles::open(&volume, TreeId::FS);
        let _ =
            files.map(|files| files.read_dir(files.root(), 0, &mut |_| ControlFlow::Continue(())));
    }
    assert_eq!(device.writes.load(Ordering::Relaxed), 0, "a reader writes nothing");
}

fn repair(device: &Arc<CountedDevice>, chosen: u8) -> HostileEnd {
    let devices = || vec![device.clone() as Arc<dyn BlockDevice>];
    let check = CheckOptions {
        verifies_data: chosen & 1 != 0,
        memory_bytes: 16 << 20,
        ..CheckOptions::default()
    };
    let watch = |_: &CheckEvent| ControlFlow::Continue(());
    let places = |findings: &[BtrfsFinding]| -> Vec<(BtrfsFindingCode, BtrfsFindingPlace)> {
        findings.iter().map(|one| (one.code, one.place)).collect()
    };
    let Ok(before) = check_btrfs(devices(), &check, &watch) else { return HostileEnd::NotChecked };
    let repair = RepairOptions {
        check: check.clone(),
        classes: if chosen & 2 != 0 { RepairClass::ALL.to_vec() } else { Vec::new() },
        accepted: if chosen & 4 != 0 { vec![b"/root/etc/os-release".to_vec()] } else { Vec::new() },
        ..RepairOptions::default()
    };
    let outcome = match repair_btrfs(&devices(), &repair, &watch) {
        Ok(outcome) => outcome,
        Err(error) => {
            let _ = error.to_string();
            assert_eq!(device.writes.load(Ordering::Relaxed), 0, "refused after a write: {error}");
            return HostileEnd::Refused;
        }
    };
    assert_eq!(places(&outcome.before.findings), places(&before.findings));
    let Some(after) = outcome.after else { return HostileEnd::NothingToMend };
    let found = check_btrfs(devices(), &check, &watch).expect("it was checked before");
    assert_eq!(places(&found.findings), places(&after.findings), "after the repair");
    undo_repair(&devices(), &repair, &watch).expect("nothing has written since");
    check_btrfs(devices(), &check, &watch).expect("it was checked before");
    HostileEnd::Repaired
}

/// Carries out one step.
fn apply(target: &DamageTarget, blocks: &mut [Vec<u8>], image: &mut Patched, step: &[u8]) {
    let &[low, high, kind, slot, at_low, at_high, what, less] = step else { return };
    let number = usize::from(u16::from_le_bytes([low, high]));
    let at = usize::from(u16::from_le_bytes([at_low, at_high]));
    let value = SPECIAL[usize::from(what & 15)].wrapping_sub(u64::from(less % 4));
    let width = [1, 2, 4, 8][usize::from(what >> 4 & 3)];
    let set = |bytes: &mut [u8]| {
        let Some(at) = at.checked_rem(bytes.len()) else { return };
        let width = width.min(bytes.len() - at);
        bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    };
    if kind % 8 == 7 {
        let size = image.size_bytes();
        let places = SUPERBLOCK_OFFSETS.into_iter().filter(|offset| offset + 4096 <= size);
        for offset in places {
            let mut bytes = vec![0; SUPERBLOCK_SIZE];
            image.read_at(offset, &mut bytes).expect("it is in the image");
            // The checksum, the address and the magic make it a superblock.
            let (_, fields) = bytes.split_at_mut(72);
            set(&mut fields[..1200]);
            target.fit_checksum(&mut bytes);
            image.write(offset, &bytes);
        }
        return;
    }
    let number = number % blocks.len();
    let (bytes, block) = (&mut blocks[number], &target.blocks[number]);
    if kind % 8 == 6 || header(&block.bytes).level > 0 {
        // Everything behind the address of the block.
        let (_, rest) = bytes.split_at_mut(56);
        set(rest);
    } else {
        let mut items = unpack_any(bytes, &block.bytes);
        change_items(&mut items, kind % 8, usize::from(slot), value, set);
        *bytes = pack(&block.bytes, &items);
    }
    target.fit_checksum(bytes);
    for &(_, offset) in &block.places {
        image.write(offset, bytes);
    }
}

/// The items of a leaf; those of `before` if a step has spoilt it.
fn unpack_any(bytes: &[u8], before: &[u8]) -> Vec<(Key, Vec<u8>)> {
    let is_whole = offshoot_btrfs_format::block::items(bytes).is_ok_and(|items| {
        items.iter().all(|item| offshoot_btrfs_format::block::item_data(bytes, item).is_ok())
    });
    unpack(if is_whole { bytes } else { before })
}

fn change_items(
    items: &mut Vec<(Key, Vec<u8>)>,
    kind: u8,
    slot: usize,
    value: u64,
    set: impl Fn(&mut [u8]),
) {
    let Some(slot) = slot.checked_rem(items.len()) else { return };
    match kind {
        0..=2 => set(&mut items[slot].1),
        3 => {
            let key = &mut items[slot].0;
            match value % 3 {
                0 => key.objectid = value,
                1 => key.offset = value,
                _ => key.item_type = ItemType(value.to_le_bytes()[0]),
            }
        }
        4 => drop(items.remove(slot)),
        _ => {
            let (mut key, data) = items[slot].clone();
            key.offset = key.offset.wrapping_add(value);
            items.insert(slot + 1, (key, data));
        }
    }
}
