//! Volumes that are full: what was accepted is on the device in the end.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::Errno;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::XfsInodeFlags;

use super::{BufferModel, BufferedEngine, BufferedModelFile, BufferedVolume, WIDE, index};
use crate::buffered::{BufferedFile, XfsBufferedData};
use crate::trans::XfsTransactionKind as Kind;

/// Gives a file all blocks but about `left`, of which it does not use any.
fn fill(engine: &BufferedEngine, file: &BufferedModelFile, left: u64) {
    let (mut at, mut piece) = (1 << 20, 1 << 14);
    while piece > 0 {
        let free = engine.transactions.counters().free_for_files();
        if free < left + piece + 20 {
            piece /= 2;
            continue;
        }
        match engine.data().changes().allocate(file.ino, at..at + piece) {
            Ok(()) => at += piece,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                piece /= 2;
            }
        }
    }
}

/// Writes at random places until no block is free. Returns how many writes were accepted.
fn write_until_full(
    data: XfsBufferedData<'_>,
    random: &mut Random,
    (buffer, bytes): (&Arc<BufferedFile>, &mut Vec<u8>),
    blocks: u64,
) -> usize {
    let (mut accepted, mut refused) = (0, 0);
    while refused < 5 {
        let (start, len) = (random.below(blocks * 4096), 1 + random.below(20_000));
        // A write that is refused at a multiple of 1 MiB has done its front.
        let len = len.min((1 << 20) - start % (1 << 20));
        let new = random.bytes(index(len));
        match data.write(buffer, start, &new) {
            Ok(()) => {
                let end = index(start + len);
                bytes.resize(bytes.len().max(end), 0);
                bytes[index(start)..end].copy_from_slice(&new);
                accepted += 1;
            }
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                refused += 1;
            }
        }
    }
    accepted
}

fn full(options: &str) {
    let Some(volume) = BufferedVolume::make(300, options) else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..1000 * 4096, false);
    if data.transactions.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
        model.share(data, (0, 0), (1, 0), 1000);
    }
    model.write(data, 3, 0..10 * 4096, false);
    data.write_back_all().unwrap();
    fill(&engine, &model.files[2], 1500);
    let before = engine.files.statistics();
    let mut random = Random::new(model.random.number());
    for file in [0, 1, 3] {
        let file = &mut model.files[file];
        write_until_full(data, &mut random, (&file.buffer, &mut file.bytes), 3000);
    }
    // The first refusal has brought back what was promised to trees, so little is free.
    assert!(engine.files.statistics().waits_for_space > before.waits_for_space);
    assert!(engine.transactions.counters().free_for_files() < 20);
    data.write_back_all().unwrap();
    assert_eq!(engine.files.statistics().failures, 0);
    // Writes over blocks of a file need none.
    let promised = engine.files.statistics().promised_blocks;
    model.write(data, 3, 10..4097, false);
    assert_eq!(engine.files.statistics().promised_blocks, promised);
    volume.assert_cut_recovers(&engine, &model);
    let filler = &model.files[2].buffer;
    data.truncate(filler, 0).unwrap();
    volume.assert_unmounts(engine, &model);
}

#[test]
fn what_a_full_volume_accepts_is_written() {
    full("");
}

#[test]
fn what_a_full_volume_without_reverse_map_and_shared_blocks_accepts_is_written() {
    full("-m rmapbt=0,reflink=0");
}

/// Writes to holes of a file that the kernel has made split blocks of its tree of extents: 14 for
/// 91 writes. Not all blocks of that tree are full, so this is not the worst case.
#[test]
fn what_splits_blocks_of_a_tree_has_room() {
    const EXTENTS: u64 = 18_000;
    /// The extents in a block of the tree.
    const RECORDS: usize = 59;
    let Some(volume) = BufferedVolume::make(300, "-b size=1024") else { return };
    let mount = volume.disk.mount("", &[]);
    let file = File::options().write(true).open(mount.path().join("one")).unwrap();
    let mut bytes = vec![0; index(EXTENTS * 2048)];
    file.set_len(bytes.len() as u64).unwrap();
    for number in 0..EXTENTS {
        file.write_all_at(&[1; 1024], number * 2048).unwrap();
        bytes[index(number * 2048)..][..1024].fill(1);
    }
    drop((file, mount));
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.files[0].bytes = bytes;
    fill(&engine, &model.files[2], 110);
    let free = || engine.transactions.counters().counts().free_blocks;
    let (before, mut accepted) = (free(), 0);
    // One in three blocks of the tree.
    for number in (RECORDS as u64 / 2..EXTENTS).step_by(3 * RECORDS) {
        let at = number * 2048 + 1024;
        match data.write(&model.files[0].buffer, at, &[2; 1024]) {
            Ok(()) => model.files[0].bytes[index(at)..][..1024].fill(2),
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                break;
            }
        }
        accepted += 1;
    }
    data.write_back_all().unwrap();
    assert_eq!(engine.files.statistics().failures, 0);
    let taken = before - free();
    assert!(accepted > 30 && taken > accepted, "{taken} blocks for {accepted}");
    data.truncate(&model.files[2].buffer, 0).unwrap();
    volume.assert_unmounts(engine, &model);
}

/// A hint makes allocations larger where blocks are free, and takes none that are promised to other
/// data of the file.
#[test]
fn a_hint_takes_nothing_that_is_promised() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    let mut t = engine.transactions.begin(Kind::ChangeInode, 0).unwrap();
    let core = t.inode(model.files[0].ino).unwrap().core_mut();
    core.extsize = 64.into();
    core.flags = (core.flags() | XfsInodeFlags::EXTSIZE).bits().into();
    t.commit().unwrap();
    fill(&engine, &model.files[2], 700);
    let mut at = 0;
    let refused = loop {
        // One block of each 100.
        let written = data.write(&model.files[0].buffer, at * 4096, &[7; 4096]);
        if let Err(error) = written {
            break error;
        }
        model.files[0].bytes.resize(index(at * 4096), 0);
        model.files[0].bytes.extend([7; 4096]);
        at += 100;
    };
    assert_eq!(refused.errno(), Errno::NOSPC, "{refused}");
    data.write_back_all().unwrap();
    assert_eq!(engine.files.statistics().failures, 0);
    data.truncate(&model.files[2].buffer, 0).unwrap();
    volume.assert_unmounts(engine, &model);
}

/// Other threads take every block that is not promised, while data is written back.
#[test]
fn no_other_thread_takes_what_is_promised() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..400 * 4096, false);
    model.share(data, (0, 0), (1, 0), 400);
    fill(&engine, &model.files[2], 3000);
    let (first, rest) = model.files.split_at_mut(1);
    let ([first], [second, third, fourth]) = (first, rest) else { unreachable!() };
    let seed = model.random.number();
    thread::scope(|scope| {
        for (number, file) in (0..).zip([first, second, fourth]) {
            let mut random = Random::new(seed + number);
            scope.spawn(move || {
                for _ in 0..4 {
                    let of = (&file.buffer, &mut file.bytes);
                    write_until_full(data, &mut random, of, 2000);
                    data.write_back(&file.buffer).unwrap();
                }
            });
        }
        let engine = &engine;
        scope.spawn(move || (0..3).for_each(|_| fill(engine, third, 0)));
    });
    data.write_back_all().unwrap();
    assert_eq!(engine.files.statistics().failures, 0);
    volume.assert_cut_recovers(&engine, &model);
    volume.assert_unmounts(engine, &model);
}
