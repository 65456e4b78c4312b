//! Blocks that change hands: a crash shows no file the data of another one.

use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::xfs::disk::RECOVERY;
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::inode::XfsInodeFlags2;
use offshoot_xfs_format::log::items::{XfsExchangeFlags, XfsExchangeIntent};

use super::{FileModel, ModelVolume, engine, index, store};
use crate::defer::{DeferredChain, DeferredWork};
use crate::file::XfsFileChanges;
use crate::file::write::XfsWriteKind;
use crate::trans::XfsTransactionKind as Kind;

/// What lets blocks change hands, and then writes to them.
type Handover = fn(&mut FileModel, XfsFileChanges<'_>, &mut dyn FnMut(&FileModel));

/// The handovers by name. Files one and two share blocks 0..8, and three has eight of its own.
const HANDOVERS: [(&str, Handover); 6] = [
    ("the other file is truncated", |m, c, done| {
        m.truncate(c, 1, 0);
        done(m);
        m.write(c, 0, 0..4 * 4096, false);
    }),
    ("the other file has got a copy", |m, c, done| {
        m.write(c, 1, 2 * 4096..6 * 4096, false);
        done(m);
        m.write(c, 0, 0..8 * 4096, false);
    }),
    ("the other file has a hole, and zeros became unwritten blocks", |m, c, done| {
        m.punch(c, 1, &(0..6 * 4096), true);
        m.punch(c, 0, &(0..8 * 4096), false);
        done(m);
        m.write(c, 0, 4096..5 * 4096, false);
    }),
    ("the other file has a clone of a third one", |m, c, done| {
        m.share(c, (2, 0), (1, 0), 8);
        done(m);
        m.write(c, 0, 0..8 * 4096, false);
    }),
    ("blocks moved to the front", |m, c, done| {
        m.collapse(c, 2, &(0..2 * 4096));
        done(m);
        m.write(c, 2, 4096..4 * 4096, false);
    }),
    ("files exchanged blocks", |m, c, done| {
        exchange(m, c, (0, 2), 8);
        done(m);
        m.write(c, 0, 0..3 * 4096, false);
        m.write(c, 2, 4 * 4096..8 * 4096, false);
    }),
];

/// Exchanges the first blocks of two files.
fn exchange(m: &mut FileModel, c: XfsFileChanges<'_>, (one, two): (usize, usize), blocks: u64) {
    let inodes = [one, two].map(|file| m.files[file].ino);
    let mut t = c.transactions.begin(Kind::Truncate, 64).unwrap();
    let mut generations = [0; 2];
    for ino in [inodes[0].min(inodes[1]), inodes[0].max(inodes[1])] {
        let core = t.inode(ino).unwrap().core_mut();
        core.flags2 = (core.flags2() | XfsInodeFlags2::REFLINK).bits().into();
        generations[usize::from(ino == inodes[1])] = core.generation.get();
    }
    let intent = XfsExchangeIntent {
        id: 0,
        inodes,
        generations,
        offsets: [FileBlock(0); 2],
        blocks,
        flags: XfsExchangeFlags::empty(),
        sizes: [0; 2],
    };
    let mut chain = DeferredChain::new(c.ids);
    chain.defer(&mut t, [DeferredWork::Exchange(intent)]);
    chain.finish(t, &inodes).unwrap();
    let bytes = index(blocks * 4096);
    let [first, second] = [one, two].map(|file| m.files[file].bytes[..bytes].to_vec());
    m.files[one].bytes[..bytes].copy_from_slice(&second);
    m.files[two].bytes[..bytes].copy_from_slice(&first);
}

/// Each handover is followed by a write, and the power is cut before the log is forced.
#[test]
fn a_crash_shows_no_file_what_another_wrote_in_place() {
    for (name, handover) in HANDOVERS {
        let Some(mut volume) = ModelVolume::make(64, "--unsupported", seed_of_run()) else {
            return;
        };
        let engine = engine(&volume.disk);
        let changes = XfsFileChanges::new(&engine, &volume.ids);
        volume.model.write(changes, 0, 0..8 * 4096, false);
        volume.model.write(changes, 2, 0..8 * 4096, false);
        volume.model.share(changes, (0, 0), (1, 0), 8);
        engine.log().force_all().unwrap();
        let mut snapshots = Vec::new();
        let mut note = |model: &FileModel| {
            let bytes = |file: &super::ModelFile| file.bytes.clone();
            snapshots.push(model.files.iter().map(bytes).collect::<Vec<_>>());
        };
        note(&volume.model);
        handover(&mut volume.model, changes, &mut note);
        note(&volume.model);
        let cut = volume.disk.copy();
        let mount = cut.mount("nouuid", &[RECOVERY]);
        for (number, file) in volume.model.files.iter().enumerate() {
            let found = std::fs::read(mount.path().join(file.name)).unwrap();
            for (at, block) in found.chunks(4096).enumerate() {
                let is_of =
                    |files: &Vec<Vec<u8>>| files[number].chunks(4096).nth(at) == Some(block);
                assert!(snapshots.iter().any(is_of), "{name}: block {at} of {}", file.name);
            }
        }
        drop(mount);
        cut.assert_checks();
        volume.assert_unmounts(engine);
    }
}

/// Another thread has given the file other blocks since the places were prepared: what these hold
/// must not be seen.
#[test]
fn blocks_that_nobody_wrote_stay_unwritten() {
    let Some(mut volume) = ModelVolume::make(64, "--unsupported", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let ino = volume.model.files[0].ino;
    volume.model.files[0].bytes = vec![0; 8 * 4096];
    let old = changes.prepare_write(ino, 0..8).unwrap();
    store(&engine, &vec![7; 8 * 4096], &old);
    changes.punch(ino, &(2 * 4096..8 * 4096)).unwrap();
    changes.allocate(ino, 2..8).unwrap();
    let new = changes.prepare_write(ino, 0..8).unwrap();
    assert!(new.iter().all(|place| place.kind == XfsWriteKind::Unwritten));
    assert!(new.iter().any(|place| !old.iter().any(|old| old.start == place.start)), "{new:?}");
    let are_new = new.into_iter().filter(|place| place.at.0 >= 2).collect::<Vec<_>>();
    store(&engine, &vec![9; 8 * 4096], &are_new);
    changes.commit_write(ino, &old, Some(8 * 4096)).unwrap();
    volume.model.files[0].bytes[..2 * 4096].fill(7);
    volume.assert_cut_recovers(&engine);
    volume.assert_unmounts(engine);
}

/// A place that is settled needs no force.
#[test]
fn a_write_in_place_forces_the_log_at_most_once() {
    let Some(mut volume) = ModelVolume::make(64, "--unsupported", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    volume.model.write(changes, 0, 0..8 * 4096, false);
    volume.model.share(changes, (0, 0), (1, 0), 8);
    volume.model.truncate(changes, 1, 0);
    let forces = || engine.log().statistics().forces;
    let before = forces();
    for at in 0..8 {
        volume.model.write(changes, 0, at * 4096..(at + 1) * 4096, false);
    }
    assert_eq!(forces() - before, 1);
}
