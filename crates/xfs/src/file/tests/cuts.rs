//! Power cuts at any write: each block has its bytes of before a change or of behind it, and blocks
//! are neither lost nor shared wrongly, after our recovery and after the kernel's.

use std::cell::Cell;
use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::{FileBlock, Ino};

use super::{FileModel, ModelVolume, contents, engine, index, store};
use crate::defer::{DeferredChain, DeferredWork, MOST_UNMAPPED};
use crate::file::share::XfsCloneRange;
use crate::file::{FORK, XfsFileChanges};
use crate::inode::change::{piece_at, unmap_extents};
use crate::log::XfsLogOptions;
use crate::test_volumes::engine_with;
use crate::trans::{XfsTransaction, XfsTransactionKind as Kind, XfsTransactions};
use crate::{XfsOptions, XfsVolume, check_xfs};

/// The bytes of all files after one change.
type FileSnapshot = Vec<Vec<u8>>;

/// The changes at random.
const AT_RANDOM: usize = 25;

/// Every which of the states the kernel recovers.
const BY_KERNEL: usize = 40;

impl FileModel {
    fn snapshot(&self) -> FileSnapshot {
        self.files.iter().map(|file| file.bytes.clone()).collect()
    }

    /// The changes that are cut. Each is durable before the next.
    fn cut_changes(
        &mut self,
        device: &dyn BlockDevice,
        changes: XfsFileChanges<'_>,
        mut done: impl FnMut(&Self),
    ) {
        let block = changes.block_bytes();
        let first: [fn(&mut Self, XfsFileChanges<'_>, u64); 9] = [
            |m, c, b| m.write(c, 0, 0..11 * b + 5, false),
            |m, c, b| m.write(c, 0, 20 * b..23 * b, false),
            |m, c, _| m.share(c, (0, 0), (1, 3), 23),
            |m, c, b| m.write(c, 1, 4 * b..9 * b, false),
            |m, c, b| m.write(c, 0, 2 * b + 9..6 * b, false),
            |m, c, b| m.punch(c, 1, &(5 * b + 3..8 * b + 7), true),
            |m, c, b| m.punch(c, 1, &(10 * b..24 * b), false),
            |m, c, b| m.truncate(c, 0, 10 * b + 100),
            |m, c, _| m.share(c, (0, 0), (0, 30), 6),
        ];
        done(self);
        for number in 0..first.len() + AT_RANDOM {
            if let Some(change) = first.get(number) {
                change(self, changes, block);
            } else {
                // None that moves data, of which a cut leaves a part where it was.
                let choice = self.random.below(30);
                self.change(changes, if choice < 23 { choice } else { choice + 7 });
            }
            changes.transactions.log().force_all().unwrap();
            // A write in place changes no metadata, so the log has nothing to flush for it.
            device.flush().unwrap();
            done(self);
        }
    }
}

/// Whether each block of `found` is that of one of the two, and its size too.
fn is_between(found: &[u8], [old, new]: [&[u8]; 2], block: usize) -> bool {
    let padded = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes.resize(found.len(), 0);
        bytes
    };
    let sides = [old, new].map(padded);
    let is_of_one = |(at, here): (usize, &[u8])| {
        sides.iter().any(|side| side.chunks(block).nth(at) == Some(here))
    };
    let size_is_right = [old.len(), new.len()].contains(&found.len());
    size_is_right && found.chunks(block).enumerate().all(is_of_one)
}

/// Copies a device to an image, without its zeros.
fn image_of(device: &dyn BlockDevice) -> Option<XfsDisk> {
    let disk = XfsDisk::create(&judges::require()?, device.size_bytes() >> 20);
    let to = disk.writable_device();
    let mut part = vec![0; 1 << 20];
    for at in (0..device.size_bytes()).step_by(part.len()) {
        device.read_at(at, &mut part).unwrap();
        if part.iter().any(|byte| *byte != 0) {
            to.write_at(at, &part).unwrap();
        }
    }
    Some(disk)
}

fn cut(options: &str) {
    let seed = seed_of_run();
    let Some(mut volume) = ModelVolume::make(64, options, seed) else { return };
    let device = Arc::new(CrashDevice::new(volume.disk.device()));
    // Each commit is pushed, so that checkpoints end in the middle of changes.
    let log_options = XfsLogOptions { context_bytes: Some(1), ..XfsLogOptions::default() };
    let engine = engine_with(device.clone(), &log_options);
    let block = engine.geometry().block_size();
    let mut snapshots = Vec::new();
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    volume.model.cut_changes(&*device, changes, |model| {
        device.mark(&snapshots.len().to_string());
        snapshots.push(model.snapshot());
    });
    engine.unmount().unwrap();
    let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 6, seed, tears: false };
    let (options, mut count) = (XfsOptions::default(), 0);
    for state in device.log().states(&plan) {
        let state = state.unwrap();
        let at = state.marks().len().saturating_sub(1);
        let between = [&snapshots[at], &snapshots[(at + 1).min(snapshots.len() - 1)]];
        let description = state.description.clone();
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let by_kernel = if count % BY_KERNEL == 0 { image_of(&*device) } else { None };
        XfsVolume::recover(&device, &options).unwrap();
        let found = check_xfs(&device, &options).unwrap().findings;
        assert!(found.is_empty(), "{description}: {}", found[0]);
        let opened = XfsVolume::open(device.clone(), &options).unwrap();
        for (number, file) in volume.model.files.iter().enumerate() {
            let found = contents(&opened, file.ino);
            let sides = between.map(|snapshot| snapshot[number].as_slice());
            assert!(is_between(&found, sides, block), "{description}: {} of {at}", file.name);
        }
        if let Some(cut) = by_kernel {
            let mount = cut.mount("nouuid", &[RECOVERY]);
            for (number, file) in volume.model.files.iter().enumerate() {
                let found = std::fs::read(mount.path().join(file.name)).unwrap();
                let sides = between.map(|snapshot| snapshot[number].as_slice());
                assert!(is_between(&found, sides, block), "{description}: {} of {at}", file.name);
            }
            drop(mount);
            cut.assert_checks();
        }
        count += 1;
    }
    assert!(count > 60, "{count} states");
}

#[test]
fn a_cut_leaves_the_old_blocks_or_the_new_ones() {
    cut("--unsupported");
}

#[test]
fn a_cut_leaves_the_old_blocks_or_the_new_ones_without_reverse_map() {
    cut("--unsupported -m rmapbt=0 -b size=1024");
}

/// What a step of a change does in its first transaction. Returns the work that follows.
type FirstOfChain<'a> = &'a dyn Fn(&mut XfsTransaction<'_>) -> Vec<DeferredWork>;

/// Does a change, and cuts the log behind each transaction of its chain. The kernel and we find the
/// bytes of the model each time.
fn cut_chain(volume: &ModelVolume, engine: &XfsTransactions, kept: Ino, first: FirstOfChain<'_>) {
    let mut t = engine.begin(Kind::Truncate, 0).unwrap();
    t.inode(kept).unwrap();
    let work = first(&mut t);
    let mut chain = DeferredChain::new(&volume.ids);
    chain.defer(&mut t, work);
    t.commit().unwrap();
    let cuts = Cell::new(0);
    chain
        .finish_alone(engine, |engine| {
            volume.assert_cut_recovers(engine);
            let by_us = volume.disk.copy();
            let device = by_us.writable_device();
            let recovered = XfsVolume::recover(&device, &XfsOptions::default()).unwrap().unwrap();
            assert!(recovered.finished_intents > 0);
            by_us.assert_checks();
            cuts.set(cuts.get() + 1);
            engine.begin_step(Kind::Truncate, 0)
        })
        .unwrap();
    assert!(cuts.get() > 1);
}

#[test]
fn each_transaction_of_a_chain_is_recovered() {
    let Some(mut volume) = ModelVolume::make(64, "--unsupported", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let block = changes.block_bytes();
    volume.model.write(changes, 0, 0..20 * block, false);
    volume.model.share(changes, (0, 0), (1, 0), 20);
    let [one, two] = [0, 1].map(|index| volume.model.files[index].ino);

    let places = changes.prepare_write(one, 4..9).unwrap();
    let [place] = places[..] else { panic!("{places:?}") };
    // What is staged, and nothing more, is free after a recovery.
    volume.assert_cut_recovers(&engine);
    let new = volume.model.random.bytes(index(5 * block));
    volume.model.files[0].bytes[index(4 * block)..index(9 * block)].copy_from_slice(&new);
    store(&engine, &volume.model.files[0].bytes, &places);
    cut_chain(&volume, &engine, one, &|t| changes.remap_front(t, one, &place).unwrap().1);

    let range = XfsCloneRange { from: (one, FileBlock(6)), to: (two, FileBlock(12)), blocks: 2 };
    let copied = volume.model.files[0].bytes[index(6 * block)..index(8 * block)].to_vec();
    volume.model.files[1].bytes[index(12 * block)..index(14 * block)].copy_from_slice(&copied);
    cut_chain(&volume, &engine, one, &|t| {
        t.inode(two).unwrap();
        let source = piece_at(t, one, FORK, 6, 2).unwrap().extent.unwrap();
        let old = piece_at(t, two, FORK, 12, 2).unwrap().extent;
        changes.share_extent(t, &range, &source, old).unwrap()
    });

    let removed = 2 * block..7 * block;
    volume.model.files[0].bytes[index(removed.start)..index(removed.end)].fill(0);
    cut_chain(&volume, &engine, one, &|t| {
        let step = unmap_extents(t, one, FORK, 2..7, MOST_UNMAPPED).unwrap();
        DeferredWork::unmapped(t, (one, FORK), &step).unwrap()
    });
    volume.assert_unmounts(engine);
}
