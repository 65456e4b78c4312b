//! Volumes that are full: what needs blocks fails before it changes anything, and removals work.

use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::Errno;
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::geometry::XfsLayout;

use super::{ModelVolume, assert_nothing_is_staged, engine, index, store};
use crate::file::XfsFileChanges;
use crate::file::share::XfsCloneRange;
use crate::file::write::XfsWriteKind;
use crate::trans::XfsTransactions;

/// The free blocks that files may have.
fn free(engine: &XfsTransactions) -> u64 {
    engine.counters().counts().free_blocks - engine.counters().held_back()
}

/// Gives a file all blocks, of which it does not use any.
fn fill(volume: &ModelVolume, engine: &XfsTransactions, file: usize) {
    let changes = XfsFileChanges::new(engine, &volume.ids);
    let (ino, mut at, mut piece) = (volume.model.files[file].ino, 1 << 20, 1 << 14);
    while piece > 0 {
        match changes.allocate(ino, at..at + piece) {
            Ok(()) => at += piece,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                piece /= 2;
            }
        }
    }
}

fn full(options: &str) {
    let Some(mut volume) = ModelVolume::make(300, options, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let block = engine.geometry().block_size() as u64;
    let first = free(&engine);
    volume.model.write(changes, 0, 0..60 * block, false);
    if engine.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
        volume.model.share(changes, (0, 0), (1, 0), 40);
    }
    fill(&volume, &engine, 2);
    assert!(free(&engine) < 200, "{} free blocks", free(&engine));
    let ino = volume.model.files[1].ino;

    // In place, nothing is needed. Shared blocks, and holes, cannot be written.
    volume.model.write(changes, 0, 45 * block..50 * block, false);
    let left = free(&engine);
    for wanted in [0..20, 0..200] {
        let outcome = changes.prepare_write(ino, wanted.clone());
        if left < wanted.end {
            assert_eq!(outcome.unwrap_err().errno(), Errno::NOSPC);
        } else {
            changes.abandon_write(&outcome.unwrap()).unwrap();
        }
    }
    assert_nothing_is_staged(&engine);
    // A clone is done, or changes nothing.
    let (from, to) = ((volume.model.files[0].ino, FileBlock(50)), (ino, FileBlock(50)));
    match changes.clone_range(&XfsCloneRange { from, to, blocks: 1 }, Some(51 * block)) {
        Ok(()) => {
            let copied = volume.model.files[0].bytes[index(50 * block)..index(51 * block)].to_vec();
            volume.model.files[1].bytes.resize(index(50 * block), 0);
            volume.model.files[1].bytes.extend(copied);
        }
        Err(error) => {
            let is_full = engine.geometry().layout.contains(XfsLayout::SHARED_BLOCKS);
            let wanted = if is_full { Errno::NOSPC } else { Errno::OPNOTSUPP };
            assert_eq!(error.errno(), wanted, "{error}");
        }
    }

    // Holes and truncations need none, also where they cut extents, and blocks that are shared.
    for at in 0..12 {
        let file = index(at % 2);
        let start = at * 3 * block + at;
        volume.model.punch(changes, file, &(start..start + block + 7), true);
        volume.model.truncate(changes, file, 60 * block - at * 2 * block - 5);
    }
    volume.assert_cut_recovers(&engine);
    let unwritten = volume.model.files[2].ino;
    for at in 0..300 {
        let start = ((1 << 20) + 5 * at) * block;
        changes.punch(unwritten, &(start..start + block)).unwrap();
    }
    for file in 0..3 {
        volume.model.truncate(changes, file, 0);
    }
    engine.log().force_all().unwrap();
    let left = free(&engine);
    assert!(first.abs_diff(left) < 40, "{first} blocks were free, and {left} are");
    volume.model.write(changes, 3, 0..100 * block, false);
    volume.assert_unmounts(engine);
}

#[test]
fn a_full_volume_loses_nothing() {
    full("");
}

#[test]
fn a_full_volume_without_reverse_map_and_shared_blocks_loses_nothing() {
    full("-m rmapbt=0,reflink=0");
}

/// What was staged before the volume was full is committed.
#[test]
fn written_data_becomes_visible_on_a_full_volume() {
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let block = engine.geometry().block_size() as u64;
    volume.model.write(changes, 0, 0..60 * block, false);
    volume.model.share(changes, (0, 0), (1, 0), 60);
    let ino = volume.model.files[1].ino;
    let mut places = Vec::new();
    for at in 0..30 {
        places.extend(changes.prepare_write(ino, 2 * at..2 * at + 1).unwrap());
    }
    places.extend(changes.prepare_write(ino, 60..62).unwrap());
    assert!(places.iter().any(|place| place.kind == XfsWriteKind::Staged));
    fill(&volume, &engine, 2);
    let content = volume.model.random.bytes(index(62 * block));
    for at in (0..60).step_by(2) {
        let bytes = index(at * block)..index((at + 1) * block);
        volume.model.files[1].bytes[bytes.clone()].copy_from_slice(&content[bytes]);
    }
    volume.model.files[1].bytes.extend_from_slice(&content[index(60 * block)..]);
    store(&engine, &volume.model.files[1].bytes, &places);
    let size = Some(62 * block);
    changes.commit_write(ino, &places, size).unwrap();
    volume.assert_cut_recovers(&engine);
    volume.assert_unmounts(engine);
}
