//! Mutations of real structures: nothing panics, and whatever passes the checks is safe.
//!
//! A wrong checksum or a badly packed leaf is refused at once. So the test corrects both after each
//! mutation, and the checks of the contents get to see the damage.
//!
//! `OFFSHOOT_SEED` repeats a run; `OFFSHOOT_ROUNDS` makes it longer.

mod bodies;
mod leaves;
mod mutation;

use bodies::{checked_block, chunk_item, compressed_extent, superblock};
use leaves::{NODE, blocks, geometry};
use mutation::{from_env, index, mutate_item, scramble, seed_of};
use offshoot_btrfs_format::block::{BlockHeader, HEADER_SIZE};
use offshoot_btrfs_format::key::DiskKey;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_testkit::random::Random;
use zerocopy::IntoBytes;

/// The random numbers of a test, and its number of rounds.
fn start(test: &str) -> (Random, u64) {
    (Random::new(seed_of(test)), from_env("OFFSHOOT_ROUNDS").unwrap_or(4))
}

#[test]
fn tree_blocks() {
    let (mut random, rounds) = start("tree_blocks");
    let (mut accepted, mut refused) = (0, 0);
    for block in blocks() {
        let geometry = geometry(&block);
        assert!(checked_block(&mut block.clone(), &geometry), "a real block is refused");
        let is_leaf = BlockHeader::view(&block).expect("a block").level == 0;
        for _ in 0..700 * rounds {
            let mut mutated = block.clone();
            if is_leaf && random.below(5) != 0 {
                mutated = mutate_item(&mut random, &mutated);
            } else {
                let used = HEADER_SIZE + if random.below(2) == 0 { 0 } else { NODE - HEADER_SIZE };
                (0..=random.below(3)).for_each(|_| scramble(&mut random, &mut mutated[32..used]));
            }
            if checked_block(&mut mutated, &geometry) {
                accepted += 1;
            } else {
                refused += 1;
            }
        }
    }
    println!("{accepted} mutations accepted, {refused} refused");
    // Some bytes may have any value, but most may not.
    assert!(accepted > refused / 20, "{accepted} accepted of {refused}");
    assert!(refused > accepted / 20, "{refused} refused of {accepted}");
}

/// The key and the item of a system chunk with the DUP profile.
fn chunk() -> Vec<u8> {
    let mut item = Vec::new();
    item.extend_from_slice(
        DiskKey::from(Key::new(256, ItemType::CHUNK_ITEM, 22_020_096)).as_bytes(),
    );
    for value in [8_388_608u64, 2, 65_536, 0x22] {
        item.extend_from_slice(&value.to_le_bytes());
    }
    for value in [65_536u32, 65_536, 4096] {
        item.extend_from_slice(&value.to_le_bytes());
    }
    item.extend_from_slice(&[2, 0, 1, 0]);
    for offset in [22_020_096u64, 30_408_704] {
        item.extend_from_slice(&1u64.to_le_bytes());
        item.extend_from_slice(&offset.to_le_bytes());
        item.extend_from_slice(&[7; 16]);
    }
    item
}

#[test]
fn chunk_items() {
    let (mut random, rounds) = start("chunk_items");
    assert!(chunk_item(&chunk()), "a chunk that is right is refused");
    let mut accepted = 0;
    for _ in 0..40_000 * rounds {
        let mut mutated = chunk();
        if random.below(4) == 0 {
            mutated.truncate(index(&mut random, mutated.len() + 1));
        }
        (0..=random.below(3)).for_each(|_| scramble(&mut random, &mut mutated));
        accepted += u64::from(chunk_item(&mutated));
    }
    assert!((1..30_000 * rounds).contains(&accepted), "{accepted} mutations accepted");
}

/// A superblock with the fields of a small volume.
fn small_superblock() -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(32, &[5; 16]);
    put(72, &9u64.to_le_bytes());
    put(80, &30_441_472u64.to_le_bytes());
    put(88, &22_020_096u64.to_le_bytes());
    put(112, &(1u64 << 29).to_le_bytes());
    put(136, &1u64.to_le_bytes());
    put(144, &4096u32.to_le_bytes());
    put(148, &16_384u32.to_le_bytes());
    put(152, &16_384u32.to_le_bytes());
    put(164, &8u64.to_le_bytes());
    put(188, &0x161u64.to_le_bytes());
    put(160, &u32::try_from(chunk().len()).expect("small").to_le_bytes());
    put(201, &1u64.to_le_bytes());
    put(201 + 82, &[5; 16]);
    put(811, &chunk());
    bytes
}

#[test]
fn superblocks() {
    let (mut random, rounds) = start("superblocks");
    assert!(superblock(&small_superblock()), "a superblock that is right is refused");
    let mut accepted = 0;
    for _ in 0..20_000 * rounds {
        let mut mutated = small_superblock();
        let end = [311, 1000, 4096][index(&mut random, 3)];
        (0..=random.below(3)).for_each(|_| scramble(&mut random, &mut mutated[..end]));
        accepted += u64::from(superblock(&mutated));
    }
    assert!((1..20_000 * rounds).contains(&accepted), "{accepted} mutations accepted");
}

#[test]
fn compressed_extents() {
    let (mut random, rounds) = start("compressed_extents");
    let extents: [(u8, &[u8]); 3] = [
        (1, include_bytes!("data/zlib.extent")),
        (2, include_bytes!("data/lzo.extent")),
        (3, include_bytes!("data/zstd.extent")),
    ];
    for (kind, extent) in extents {
        let input = |len: u16, extent: &[u8]| {
            let [low, high] = len.to_le_bytes();
            [&[kind, low, high], extent].concat()
        };
        assert!(compressed_extent(&input(25_000, extent)), "a real extent does not decompress");
        let mut accepted = 0;
        for _ in 0..400 * rounds {
            let mut mutated = extent.to_vec();
            if random.below(3) == 0 {
                mutated.truncate(index(&mut random, mutated.len() + 1));
            }
            // The framing is at the beginning, so damage there has the most effect.
            let end = [64, 4096, mutated.len()][index(&mut random, 3)].min(mutated.len());
            (0..=random.below(3)).for_each(|_| scramble(&mut random, &mut mutated[..end]));
            let [low, high, ..] = random.number().to_le_bytes();
            accepted +=
                u64::from(compressed_extent(&input(u16::from_le_bytes([low, high]), &mutated)));
        }
        println!("compression {kind}: {accepted} mutations decompress");
    }
}
