//! Bad bytes at chosen places.
//!
//! [`FaultyMembers`] puts a device with faults over every member, so that one set of images serves
//! many kinds of damage. Damage that a checksum must fit is patched into the image itself.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, Fault, FaultDevice};

use crate::btrfs::disks::Disks;
use crate::btrfs::progs::MirrorPlace;

/// The offsets of the superblock and its copies on a member, in bytes.
pub const SUPERBLOCKS: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];

/// The size of a superblock, in bytes.
pub const SUPERBLOCK_BYTES: u64 = 4096;

/// The members of a volume with faults over them.
#[derive(Debug)]
pub struct FaultyMembers {
    members: Vec<Arc<FaultDevice>>,
}

impl FaultyMembers {
    /// The members of `disks`, sound until a fault is added.
    #[must_use]
    pub fn over(disks: &Disks) -> Self {
        let devices = disks.devices().into_iter();
        Self { members: devices.map(|device| Arc::new(FaultDevice::new(device))).collect() }
    }

    /// Makes `len` bytes at a place faulty.
    pub fn strike(&self, place: &MirrorPlace, len: u64, fault: Fault) {
        self.strike_at(place.member, place.physical, len, fault);
    }

    /// Makes `len` bytes at `offset` of one member faulty.
    pub fn strike_at(&self, member: usize, offset: u64, len: u64, fault: Fault) {
        self.members[member].add(offset..offset + len, fault);
    }

    /// All members as devices.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.members.iter().map(|member| member.clone() as Arc<dyn BlockDevice>).collect()
    }
}

/// Inverts the bits of `mask` in the byte at `offset` of an image.
pub fn flip(image: &Path, offset: u64, mask: u8) {
    let file = File::options().read(true).write(true).open(image).expect("an image opens");
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).expect("the byte is in the image");
    file.write_all_at(&[byte[0] ^ mask], offset).expect("the byte is written");
}

/// Changes every superblock of an image with `edit` and gives it a fitting CRC-32C.
pub fn edit_superblocks(image: &Path, edit: impl Fn(&mut [u8])) {
    let file = File::options().read(true).write(true).open(image).expect("an image opens");
    let size = file.metadata().expect("its length").len();
    for offset in SUPERBLOCKS.into_iter().filter(|offset| offset + SUPERBLOCK_BYTES <= size) {
        let mut block = [0; 4096];
        file.read_exact_at(&mut block, offset).expect("a superblock is read");
        edit(&mut block);
        let sum = crc32c::crc32c(&block[32..]);
        block[..32].fill(0);
        block[..4].copy_from_slice(&sum.to_le_bytes());
        file.write_all_at(&block, offset).expect("a superblock is written");
    }
}

/// Changes every leaf of an image with nodes of 16 KiB and CRC-32C, and gives it a fitting
/// checksum.
fn edit_leaves(image: &Path, mut edit: impl FnMut(&mut [u8])) {
    const NODE_BYTES: usize = 16 << 10;
    let mut bytes = std::fs::read(image).expect("an image is read");
    for at in (0..bytes.len().saturating_sub(NODE_BYTES)).step_by(4096) {
        let block = &mut bytes[at..at + NODE_BYTES];
        if block[..4] != crc32c::crc32c(&block[32..]).to_le_bytes() || block[100] != 0 {
            continue;
        }
        edit(block);
        let sum = crc32c::crc32c(&block[32..]);
        block[..4].copy_from_slice(&sum.to_le_bytes());
    }
    std::fs::write(image, bytes).expect("an image is written");
}

/// Makes every directory entry called `name` lead to a missing inode, in all mirrors of the leaves
/// of an image with nodes of 16 KiB and CRC-32C. Returns the number of that inode.
///
/// # Panics
/// When no leaf has such an entry.
#[must_use]
pub fn lead_nowhere(image: &Path, name: &str) -> u64 {
    const MISSING: u64 = 30_583;
    // Before its name, an entry has a location of 17 bytes, a transaction, two lengths and a type.
    const BEFORE_NAME: usize = 17 + 8 + 2 + 2 + 1;
    let mut found = 0;
    edit_leaves(image, |block| {
        for place in BEFORE_NAME..block.len() - name.len() {
            let name_len = u16::from_le_bytes([block[place - 3], block[place - 2]]);
            // The key of an inode has the type 1 and the offset 0.
            let key_end = &block[place - BEFORE_NAME + 8..place - BEFORE_NAME + 17];
            let is_entry = block[place..].starts_with(name.as_bytes())
                && usize::from(name_len) == name.len()
                && key_end == [1, 0, 0, 0, 0, 0, 0, 0, 0];
            if is_entry {
                block[place - BEFORE_NAME..][..8].copy_from_slice(&MISSING.to_le_bytes());
                found += 1;
            }
        }
    });
    assert!(found > 0, "no entry is called {name}");
    MISSING
}

/// Sets the usage of a subvolume's quota group to zero, in all mirrors of the leaves of an image
/// with nodes of 16 KiB and CRC-32C.
///
/// # Panics
/// When no leaf has such a group.
pub fn use_nothing(image: &Path, subvolume: u64) {
    const HEADER_BYTES: usize = 101;
    const ITEM_BYTES: usize = 25;
    const QGROUP_INFO: u8 = 242;
    let key = [&[0; 8][..], &[QGROUP_INFO], &subvolume.to_le_bytes()].concat();
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize;
    let mut found = 0;
    edit_leaves(image, |block| {
        let count = number(&block[96..100]);
        for item in (0..count).map(|index| HEADER_BYTES + index * ITEM_BYTES) {
            if item + ITEM_BYTES <= block.len() && block[item..].starts_with(&key) {
                let data = HEADER_BYTES + number(&block[item + 17..item + 21]);
                let len = number(&block[item + 21..item + ITEM_BYTES]);
                // The first number is the transaction.
                block[data + 8..data + len].fill(0);
                found += 1;
            }
        }
    });
    assert!(found > 0, "no group is that of subvolume {subvolume}");
}

/// The kinds of feature bits in a superblock.
#[derive(Clone, Copy, Debug)]
pub enum Features {
    /// An implementation that does not know one of them must not write.
    ReadOnlyCompatible,
    /// An implementation that does not know one of them must not open the volume.
    Incompatible,
}

/// Sets feature bits in every superblock of an image.
pub fn set_features(image: &Path, kind: Features, bits: u64) {
    let at = match kind {
        Features::ReadOnlyCompatible => 0xb4,
        Features::Incompatible => 0xbc,
    };
    edit_superblocks(image, |block| {
        let field: &mut [u8] = &mut block[at..at + 8];
        let old = u64::from_le_bytes(field.try_into().expect("eight bytes"));
        field.copy_from_slice(&(old | bits).to_le_bytes());
    });
}
