//! Power cuts at any write: each block of a file is as it was at a moment since it was last made
//! durable, and what was made durable is there.

use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan};
use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;

use super::{BufferModel, BufferedEngine, BufferedVolume, WIDE, contents, make_durable};
use crate::log::XfsLogOptions;
use crate::{XfsOptions, XfsVolume, check_xfs};

/// The bytes of all files at one moment.
type BufferSnapshot = Vec<Vec<u8>>;

/// Every which of the states the kernel recovers.
const BY_KERNEL: usize = 60;

/// Whether a file is as it was at some of these moments, block by block.
fn is_of(found: &[u8], moments: &[&[u8]], block: usize) -> bool {
    let sizes = || moments.iter().map(|bytes| bytes.len());
    let is_size = sizes().min() <= Some(found.len()) && Some(found.len()) <= sizes().max();
    // A moment at which the file ended in front of what was found says nothing about that: a size
    // without its data would look like it. But a truncation writes the zeros behind its size before
    // the log has that, so the end of its block may be zeros while the size is that from before.
    let has = |number: usize, at: usize, here: &[u8]| {
        let there = moments[number].get(at * block..).unwrap_or_default();
        let (front, behind) = here.split_at(there.len().min(here.len()));
        let may_be_cut = || moments[..number].iter().any(|old| old.len() >= found.len());
        there.starts_with(front)
            && (behind.is_empty()
                || !front.is_empty() && behind.iter().all(|byte| *byte == 0) && may_be_cut())
    };
    let is_block = |(at, here)| (0..moments.len()).any(|number| has(number, at, here));
    is_size && found.chunks(block).enumerate().all(is_block)
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
    let Some(volume) = BufferedVolume::make(64, options) else { return };
    let device = Arc::new(CrashDevice::new(volume.disk.device()));
    // Each commit is pushed, so that checkpoints end in the middle of write-backs.
    let log_options = XfsLogOptions { context_bytes: Some(1), ..XfsLogOptions::default() };
    let engine = BufferedEngine::on(device.clone(), WIDE, &log_options);
    let data = engine.data();
    let block = engine.transactions.geometry().block_size();
    let mut model = BufferModel::new(&volume, data, seed);
    model.most_blocks = 40;
    let (mut snapshots, mut durable): (Vec<BufferSnapshot>, Vec<usize>) = (Vec::new(), Vec::new());
    let mut note = |model: &BufferModel, is_durable: bool| {
        let last = durable.last().copied().unwrap_or(0);
        durable.push(if is_durable { snapshots.len() } else { last });
        device.mark(&snapshots.len().to_string());
        snapshots.push(model.files.iter().map(|file| file.bytes.clone()).collect());
    };
    note(&model, true);
    for number in 0..60 {
        // None that moves data, of which a cut leaves a part where it was.
        let choice = model.random.below(30);
        model.change(data, choice);
        note(&model, false);
        if number % 6 == 5 {
            for file in &model.files {
                make_durable(&data, &file.buffer).unwrap();
            }
            engine.transactions.log().force_all().unwrap();
            note(&model, true);
        }
    }
    data.write_back_all().unwrap();
    engine.transactions.unmount().unwrap();
    let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 3, seed, tears: false };
    let (options, mut count) = (XfsOptions::default(), 0);
    for state in device.log().states(&plan) {
        let state = state.unwrap();
        let earliest = state.marks_before_earliest_cut().saturating_sub(1);
        let latest = (state.marks().len()).min(snapshots.len() - 1);
        let from = durable[earliest];
        let description = state.description.clone();
        let judge = |number: usize, found: &[u8]| {
            let moments: Vec<_> =
                snapshots[from..=latest].iter().map(|all| all[number].as_slice()).collect();
            assert!(
                is_of(found, &moments, block),
                "{description}: file {number}, from {from} to {latest}, {} of {:?} bytes",
                found.len(),
                moments.iter().map(|bytes| bytes.len()).collect::<Vec<_>>()
            );
        };
        let [memory] = <[_; 1]>::try_from(state.devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(memory);
        let by_kernel = if count % BY_KERNEL == 0 { image_of(&*device) } else { None };
        XfsVolume::recover(&device, &options).unwrap();
        if count % 4 == 0 {
            let found = check_xfs(&device, &options).unwrap().findings;
            assert!(found.is_empty(), "{description}: {}", found[0]);
        }
        let opened = XfsVolume::open(device.clone(), &options).unwrap();
        for (number, file) in model.files.iter().enumerate() {
            judge(number, &contents(&opened, file.ino));
        }
        if let Some(cut) = by_kernel {
            let mount = cut.mount("nouuid", &[RECOVERY]);
            for (number, file) in model.files.iter().enumerate() {
                judge(number, &std::fs::read(mount.path().join(file.name)).unwrap());
            }
            drop(mount);
            cut.assert_checks();
        }
        count += 1;
    }
    assert!(count > 60, "{count} states");
}

#[test]
fn a_cut_leaves_bytes_of_a_moment_since_the_file_was_durable() {
    cut("--unsupported");
}

#[test]
fn a_cut_leaves_bytes_of_a_moment_without_reverse_map() {
    cut("--unsupported -m rmapbt=0 -b size=1024");
}
