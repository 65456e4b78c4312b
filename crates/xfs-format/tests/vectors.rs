//! Real blocks, and what becomes of them when they are damaged.
//!
//! `blocks.bin` holds parts of a volume that `volumes/make.sh` made with blocks of 1 KiB. A changed
//! byte is found by the checksum. With a new checksum on the damage, nothing panics: neither the
//! check, nor the views of what it lets pass. `OFFSHOOT_SEED` repeats a run.

mod bodies;

use bodies::{BLOCKS, VectorKind, geometry, log_record, names, unit, vectors};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::{XfsFork, XfsInode};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{Ino, XfsGeometry, csum};

#[test]
fn real_blocks_are_right() {
    let geometry = geometry();
    assert_eq!(vectors().map(|(_, bytes)| bytes.len()).sum::<usize>(), BLOCKS.len());
    for (kind, bytes) in vectors() {
        kind.exercise(bytes, &geometry).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    }
    let inode = |index: usize| {
        let (kind, bytes) = vectors().nth(index).expect("a vector");
        let VectorKind::Inode(ino) = kind else { panic!("{kind:?} is no inode") };
        XfsInode::verify(bytes, &geometry, Ino(ino)).expect("a right inode").data
    };
    let forks = [11, 12, 13].map(inode);
    assert!(forks.iter().any(|fork| matches!(fork, XfsFork::Btree(_))));
    assert!(forks.contains(&XfsFork::Local(b"target")));
}

#[test]
fn each_changed_bit_and_each_missing_end_is_found() {
    let geometry = geometry();
    for (kind, bytes) in vectors() {
        for at in 0..bytes.len() {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1 << (at % 8);
            assert!(kind.exercise(&changed, &geometry).is_err(), "{kind:?}: byte {at}");
            assert!(kind.exercise(&bytes[..at], &geometry).is_err(), "{kind:?}: {at} bytes");
        }
    }
}

#[test]
fn damage_with_a_right_checksum_never_panics() {
    let geometry = geometry();
    let mut refused = 0;
    let mut tried = 0;
    let v4 = XfsGeometry { layout: geometry.layout - XfsLayout::CHECKSUMS, ..geometry.clone() };
    let mut damaged = |kind: VectorKind, bytes: &mut Vec<u8>| {
        csum::store(bytes, kind.identity().crc);
        tried += 1;
        let verdict = kind.exercise(bytes, &geometry);
        refused += u32::from(verdict.is_err());
        if let Ok(superblock) = XfsSuperblock::parse(bytes) {
            for (kind, bytes) in vectors().skip(1) {
                let _ = kind.exercise(bytes, &superblock.geometry);
            }
        }
        kind.make_v4(bytes, &v4);
        let _ = kind.exercise(bytes, &v4);
    };
    for (kind, bytes) in vectors() {
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.to_vec();
                changed[at] = value;
                damaged(kind, &mut changed);
            }
        }
    }
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut state: u64 = seed.unwrap_or_else(|| now.map_or(1, |now| u64::from(now.subsec_nanos())));
    println!("OFFSHOOT_SEED={state}");
    let mut random = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).expect("31 bits") % below
    };
    for (kind, bytes) in vectors() {
        for _ in 0..2000 {
            let mut changed = bytes.to_vec();
            for _ in 0..=random(3) {
                // Most of what is read lies in the first quarter.
                let end = if random(2) == 0 { bytes.len() / 4 } else { bytes.len() };
                let width = [1, 2, 4, 8][random(4)];
                let at = random(end - width);
                let special = [0, 1, 64, u64::MAX, u64::MAX - 1, 1 << 31, 1 << 63, 1 << 53];
                let value = special[random(special.len())].to_be_bytes();
                changed[at..at + width].copy_from_slice(&value[8 - width..]);
            }
            damaged(kind, &mut changed);
        }
    }
    println!("{refused} of {tried} refused");
    assert!(refused > tried / 20 && refused < tried);
}

/// What the fuzz targets run, on real structures and on nothing.
#[test]
fn the_bodies_of_the_fuzz_targets_return() {
    for (index, (_, bytes)) in (0_u8..).zip(vectors()) {
        for choice in [index, index | 0x80] {
            unit(&[&[choice], bytes].concat());
            unit(&[choice]);
        }
        log_record(bytes);
    }
    unit(&[]);
    log_record(&[]);
}

#[test]
fn damaged_directories_and_attributes_never_panic() {
    names::names(&[]);
    for mut bytes in names::sound_inputs() {
        names::names(&bytes);
        // What leads a parser is in front, and at the end of a block.
        let places = (1..bytes.len()).filter(|at| *at < 200 || at + 40 > bytes.len());
        for at in places.collect::<Vec<_>>() {
            for value in [0, 1, 7, 0x7f, 0x80, 0xff] {
                let was = std::mem::replace(&mut bytes[at], value);
                names::names(&bytes);
                names::names(&bytes[..at]);
                bytes[at] = was;
            }
        }
    }
}
