//! Leaves, the index of free space, and nodes.

use offshoot_xfs_format::da::{self, DaExpected, DaKind, DaNode, DaNodeEntry};
use offshoot_xfs_format::dir::free::{self, DirFree};
use offshoot_xfs_format::dir::leaf::{self, DirHash, DirLeaf};
use offshoot_xfs_format::dir::{DirCookie, leaf_start};
use offshoot_xfs_format::{BasicBlock, Lsn, U16};

use crate::volume::{SeededNumbers, numbers_only, told};
use crate::{EXPECTED, V5};

#[test]
fn a_leaf_forgets_the_last_data_blocks() {
    let geometry = numbers_only(10, 0, V5);
    let kind = DaKind::DirLeaf;
    let expected = DaExpected { block: Some(leaf_start(&geometry)), ..EXPECTED };
    let hashes = [DirHash { hash: 7.into(), address: 8.into() }];
    let bests = [100, 200, leaf::NO_BLOCK, 300].map(U16::new);
    let mut bytes = DirLeaf::encode(&geometry, kind, &expected, (0, 0), &hashes, &bests).unwrap();
    for (blocks, left) in [(9, 4), (4, 4), (2, 2), (0, 0)] {
        told(kind, &mut bytes, |edit| leaf::truncate_bests(&geometry, edit, blocks).unwrap());
        kind.seal(&geometry, &mut bytes, Lsn(0));
        let found = DirLeaf::parse(&geometry, kind, &bytes, &expected).unwrap();
        assert_eq!(found.bests, &bests[..left]);
        assert_eq!(found.hashes.len(), 1);
    }
}

#[test]
fn hashes_and_free_space_come_and_go() {
    let seed = 0x5eed_0002;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    let geometry = numbers_only(10, 0, V5);
    for kind in [DaKind::DirLeaf, DaKind::DirNodeLeaf] {
        let mut bytes = DirLeaf::encode(&geometry, kind, &EXPECTED, (0, 0), &[], &[]).unwrap();
        let mut model: Vec<(u32, DirCookie)> = Vec::new();
        let mut bests: Vec<u16> = Vec::new();
        let mut refused = 0;
        for round in 0..3000 {
            if numbers.below(10) < if round / 300 % 2 == 0 { 7 } else { 3 } {
                let hash = u32::try_from(numbers.below(40)).unwrap();
                let pair = (hash, DirCookie(round + 1));
                let fits = told(kind, &mut bytes, |edit| {
                    leaf::insert(&geometry, edit, DirHash::new(pair.0, pair.1)).unwrap()
                });
                if fits { model.push(pair) } else { refused += 1 }
            } else if !model.is_empty() {
                let pair = model.swap_remove(numbers.below(model.len()));
                told(kind, &mut bytes, |edit| {
                    leaf::remove(&geometry, edit, DirHash::new(pair.0, pair.1)).unwrap();
                });
            }
            if kind == DaKind::DirLeaf && round % 50 == 0 {
                let index = numbers.below(bests.len() + 2);
                let best = u16::try_from(numbers.below(900)).unwrap();
                let fits = told(kind, &mut bytes, |edit| {
                    leaf::set_best(&geometry, edit, index, best).unwrap()
                });
                if fits {
                    bests.resize(bests.len().max(index + 1), leaf::NO_BLOCK);
                    bests[index] = best;
                }
            }
            kind.seal(&geometry, &mut bytes, Lsn(0));
            let found = DirLeaf::parse(&geometry, kind, &bytes, &EXPECTED).unwrap();
            assert_eq!(found.hashes.len() - found.stale, model.len());
            assert!(found.bests.iter().map(|best| best.get()).eq(bests.iter().copied()));
            for &(hash, cookie) in &model {
                assert!(leaf::find(found.hashes, hash).any(|other| other == cookie));
            }
        }
        assert!(refused > 0);
    }
    let expected = DaExpected { block: None, ..EXPECTED };
    let mut bytes = DirFree::encode(&geometry, &expected, 0, &[]).unwrap();
    let mut model = vec![leaf::NO_BLOCK; free::per_block(&geometry)];
    for _ in 0..2000 {
        let place = numbers.below(40);
        let best = u16::try_from(numbers.below(900)).unwrap();
        let best = if numbers.below(2) == 0 { best } else { leaf::NO_BLOCK };
        model[place] = best;
        told(DaKind::DirFree, &mut bytes, |edit| {
            free::set_best(&geometry, edit, place, best).unwrap();
        });
        DaKind::DirFree.seal(&geometry, &mut bytes, Lsn(0));
        let found = DirFree::parse(&geometry, &bytes, &expected).unwrap();
        let live = model.iter().rposition(|&best| best != leaf::NO_BLOCK).map_or(0, |i| i + 1);
        assert!(found.bests.iter().copied().map(U16::get).eq(model[..live].iter().copied()));
    }
}

#[test]
fn entries_of_a_node_come_and_go() {
    let seed = 0x5eed_0005;
    println!("seed {seed:#x}");
    let mut numbers = SeededNumbers(seed);
    let geometry = numbers_only(10, 0, V5);
    let kind = DaKind::DirNode;
    let child = |before: u32| DaNodeEntry { hash: (before / 3).into(), before: before.into() };
    let mut model = vec![5_000_u32];
    let mut bytes = DaNode::encode(&geometry, kind, &EXPECTED, (0, 0, 1), &[child(5_000)]).unwrap();
    let mut refused = 0;
    for _ in 0..2000 {
        let before = u32::try_from(1 + numbers.below(9_000)).unwrap();
        let place = model.partition_point(|&other| other < before);
        let stop = (place + numbers.below(4) / 3).min(model.len());
        let fits = told(kind, &mut bytes, |edit| {
            da::splice_node(&geometry, edit, place..stop, &[child(before)]).unwrap()
        });
        if fits {
            model.splice(place..stop, [before]);
        } else {
            refused += 1;
            told(kind, &mut bytes, |edit| {
                assert!(da::splice_node(&geometry, edit, 20..90, &[]).unwrap());
            });
            model.drain(20..90);
        }
        kind.seal(&geometry, &mut bytes, Lsn(0));
        let node = DaNode::parse(&geometry, kind, &bytes, &EXPECTED).unwrap();
        assert!(node.entries.iter().map(|entry| entry.before.get()).eq(model.iter().copied()));
        let first = node.entries.iter().position(|entry| entry.hash.get() >= before / 3);
        assert_eq!(node.find(before / 3), first);
    }
    assert!(refused > 0);
}

#[test]
fn a_leaf_moves_to_the_place_of_the_root() {
    let geometry = numbers_only(10, 0, V5);
    let kind = DaKind::DirNodeLeaf;
    let hashes = [DirHash::new(7, DirCookie(8))];
    let mut bytes = DirLeaf::encode(&geometry, kind, &EXPECTED, (3, 4), &hashes, &[]).unwrap();
    let root = DaExpected { place: BasicBlock(4000), ..EXPECTED };
    da::move_block(&geometry, kind, &mut bytes, &root).unwrap();
    kind.seal(&geometry, &mut bytes, Lsn(0));
    let moved = DirLeaf::parse(&geometry, kind, &bytes, &root).unwrap();
    assert_eq!((moved.info.forw.get(), moved.info.back.get(), moved.hashes), (0, 0, &hashes[..]));
    assert!(DirLeaf::parse(&geometry, kind, &bytes, &EXPECTED).is_err());
    assert_eq!(DirLeaf::capacity(&geometry), 120);
}
