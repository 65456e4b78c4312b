//! Mutations of the structures of a volume.
//!
//! The first check refuses random damage at once. So the functions here damage one item and keep
//! everything around it right: they unpack a leaf, change an item, and pack the leaf again. The
//! check of that item gets to see the damage then.

#![allow(dead_code, reason = "each of the programs that share this calls a part of it")]

use offshoot_btrfs_format::block::{self, HEADER_SIZE, LeafItem};
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_testkit::random::Random;
use zerocopy::IntoBytes;

/// The number in the environment variable `name`.
pub(crate) fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The seed of a test: `OFFSHOOT_SEED`, or else the current time. It is printed, so that a failing
/// test shows it.
pub(crate) fn seed_of(test: &str) -> u64 {
    let seed = from_env("OFFSHOOT_SEED").unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.expect("a clock").as_micros().try_into().expect("before the year 500000")
    });
    println!("{test}: OFFSHOOT_SEED={seed}");
    seed
}

pub(crate) fn index(random: &mut Random, len: usize) -> usize {
    usize::try_from(random.below(len as u64)).expect("below a usize")
}

/// Changes a few bytes: a bit, a byte, or a field that gets a special value or one near it.
pub(crate) fn scramble(random: &mut Random, bytes: &mut [u8]) {
    if bytes.is_empty() {
        return;
    }
    let at = index(random, bytes.len());
    match random.below(4) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.number().to_le_bytes()[0],
        _ => {
            let special = [
                0,
                1,
                2,
                255,
                256,
                4095,
                4096,
                65_536,
                131_072,
                1 << 31,
                1 << 32,
                1 << 63,
                u64::MAX,
            ];
            let value = special[index(random, special.len())].wrapping_sub(random.below(3));
            let width = [2, 4, 8][index(random, 3)].min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }
}

/// The items of a leaf, with their data.
pub(crate) fn unpack(leaf: &[u8]) -> Vec<(Key, Vec<u8>)> {
    let items = block::items(leaf).expect("a real leaf");
    let data = |item| block::item_data(leaf, item).expect("a real leaf").to_vec();
    items.iter().map(|item| (item.key.get(), data(item))).collect()
}

/// Packs items into a leaf with the header of `like`. It leaves out the items that do not fit.
pub(crate) fn pack(like: &[u8], items: &[(Key, Vec<u8>)]) -> Vec<u8> {
    let mut leaf = vec![0; like.len()];
    leaf[..HEADER_SIZE].copy_from_slice(&like[..HEADER_SIZE]);
    let mut end = like.len();
    let mut count = 0u32;
    for (key, data) in items {
        let header = HEADER_SIZE + count as usize * size_of::<LeafItem>();
        if header + size_of::<LeafItem>() + data.len() > end {
            break;
        }
        end -= data.len();
        leaf[end..end + data.len()].copy_from_slice(data);
        let item = LeafItem {
            key: DiskKey::from(*key),
            offset: u32::try_from(end - HEADER_SIZE).expect("in a block").into(),
            size: u32::try_from(data.len()).expect("in a block").into(),
        };
        leaf[header..header + size_of::<LeafItem>()].copy_from_slice(item.as_bytes());
        count += 1;
    }
    leaf[96..100].copy_from_slice(&count.to_le_bytes());
    leaf
}

/// Damages one item of the leaf: its key, its contents or its length.
pub(crate) fn mutate_item(random: &mut Random, leaf: &[u8]) -> Vec<u8> {
    let mut items = unpack(leaf);
    let at = index(random, items.len());
    let (key, data) = &mut items[at];
    match random.below(8) {
        0 => {
            let mut bytes = DiskKey::from(*key);
            scramble(random, bytes.as_mut_bytes());
            *key = bytes.get();
        }
        1 => data.truncate(index(random, data.len() + 1)),
        2 => {
            let more = 1 + index(random, 40);
            data.extend_from_slice(&random.bytes(more));
        }
        3 => key.item_type = ItemType(random.number().to_le_bytes()[0]),
        _ => (0..=random.below(3)).for_each(|_| scramble(random, data)),
    }
    pack(leaf, &items)
}
