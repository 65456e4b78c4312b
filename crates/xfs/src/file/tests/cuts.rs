//! Power cuts at any write: each block has its bytes of before a change or of behind it, and blocks
//! are neither lost nor shared wrongly, after our recovery and after the kernel's.

use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;

use super::{FileVolume, contents, engine_on};
use crate::trans::XfsTransactions;
use crate::{XfsOptions, XfsVolume, check_xfs};

/// The bytes of the files after one change, each file by its index.
type Snapshot = Vec<Vec<u8>>;

/// Every which of the states the kernel recovers.
const BY_KERNEL: usize = 40;

impl FileVolume {
    fn snapshot(&self) -> Snapshot {
        self.files.iter().map(|file| file.bytes.clone()).collect()
    }

    /// The changes that are cut. Each is durable before the next.
    fn cut_changes(
        &mut self,
        device: &dyn BlockDevice,
        engine: &XfsTransactions,
        mut done: impl FnMut(&Self),
    ) {
        let block = engine.geometry().block_size() as u64;
        let changes: [fn(&mut Self, &XfsTransactions, u64); 9] = [
            |v, e, b| v.write(e, 0, 0..11 * b + 5, false),
            |v, e, b| v.write(e, 0, 20 * b..23 * b, false),
            |v, e, _| v.share(e, (0, 0), (1, 3), 23),
            |v, e, b| v.write(e, 1, 4 * b..9 * b, false),
            |v, e, b| v.write(e, 0, 2 * b + 9..6 * b, false),
            |v, e, b| v.punch(e, 1, &(5 * b + 3..8 * b + 7), true),
            |v, e, b| v.punch(e, 1, &(10 * b..24 * b), false),
            |v, e, b| v.truncate(e, 0, 10 * b + 100),
            |v, e, _| v.share(e, (0, 0), (0, 30), 6),
        ];
        done(self);
        for change in changes {
            change(self, engine, block);
            engine.log().force_all().unwrap();
            // A write in place changes no metadata, so the log has nothing to flush for it.
            device.flush().unwrap();
            done(self);
        }
    }
}

/// Whether each block of `found` is that of one of the two, and its size too.
fn is_between(found: &[u8], [old, new]: [&[u8]; 2], block: usize) -> bool {
    let size_is_right = [old.len(), new.len()].contains(&found.len());
    let block_of = |bytes: &[u8], at: usize| {
        let mut block_bytes =
            bytes.get(at..bytes.len().min(at + block)).unwrap_or_default().to_vec();
        block_bytes.resize(block, 0);
        block_bytes
    };
    size_is_right
        && (0..found.len()).step_by(block).all(|at| {
            let here = block_of(found, at);
            let cut = |bytes| block_of(bytes, at);
            here == cut(old) || here == cut(new)
        })
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
    let Some(mut volume) = FileVolume::make(64, options, seed) else { return };
    let device = Arc::new(CrashDevice::new(volume.disk.device()));
    let engine = engine_on(device.clone());
    let block = engine.geometry().block_size();
    let mut snapshots = Vec::new();
    volume.cut_changes(&*device, &engine, |volume| {
        device.mark(&snapshots.len().to_string());
        snapshots.push(volume.snapshot());
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
        let found = check_xfs(&device, &options).unwrap().findings;
        assert!(found.is_empty(), "{description}: {}", found[0]);
        let opened = XfsVolume::open(device.clone(), &options).unwrap();
        for (number, file) in volume.files.iter().enumerate() {
            let found = contents(&opened, file.ino);
            let sides = between.map(|snapshot| snapshot[number].as_slice());
            assert!(is_between(&found, sides, block), "{description}: {} of {at}", file.name);
        }
        if count % BY_KERNEL == 0 {
            let Some(cut) = image_of(&*device) else { return };
            let mount = cut.mount("nouuid", &[RECOVERY]);
            for (number, file) in volume.files.iter().enumerate() {
                let found = std::fs::read(mount.path().join(file.name)).unwrap();
                let sides = between.map(|snapshot| snapshot[number].as_slice());
                assert!(is_between(&found, sides, block), "{description}: {} of {at}", file.name);
            }
            drop(mount);
            cut.assert_checks();
        }
        count += 1;
    }
    assert!(count > 100, "{count} states");
}

#[test]
fn a_cut_leaves_the_old_blocks_or_the_new_ones() {
    cut("--unsupported");
}

#[test]
fn a_cut_leaves_the_old_blocks_or_the_new_ones_without_reverse_map() {
    cut("--unsupported -m rmapbt=0 -b size=1024");
}
