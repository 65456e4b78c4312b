//! Logs that say anything.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::FileSystem;
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::Lsn;

use crate::crashed::{REMOVING, many_records, rounds};
use crate::log_on_disk::LogOnDisk;

/// Flipped bytes in a log, with checksums that are right again: everything ends, without a panic.
#[test]
fn hostile_logs_end_with_an_error_or_a_volume() {
    let mut random = Random::new(seed_of_run());
    let Some(judges) = judges::require() else { return };
    let crashed = many_records(&judges, REMOVING, &mut random);
    let log = LogOnDisk::of(&crashed.disk);
    let records = log.records();
    drop(judges);
    let options = XfsOptions { replay_bytes: 64 << 20, ..XfsOptions::default() };
    let (mut opened, mut refused) = (0, 0);
    for _ in 0..rounds(200) {
        let device = Arc::new(MemoryDevice::over(crashed.disk.device()));
        let change = |at: Lsn, random: &mut Random| {
            let (mut record, mut blocks) = log.read(at);
            record.unpack(&mut blocks).unwrap();
            let headers = record.header_blocks() as usize * 512;
            let len = blocks.len() - headers;
            for _ in 0..=random.below(3) {
                // Most of the sense is at the start.
                let most = if random.below(2) == 0 { len.min(600) } else { len };
                let at = usize::try_from(random.below(most as u64)).unwrap();
                blocks[headers + at] = match random.below(3) {
                    0 => 0xff,
                    1 => blocks[headers + at] ^ 1 << random.below(8),
                    _ => u8::try_from(random.below(256)).unwrap(),
                };
            }
            if random.below(8) == 0 {
                record.ops = u32::try_from(random.below(1 << 16)).unwrap();
            }
            if random.below(8) > 0 {
                record.seal(log.ring, &mut blocks).unwrap();
            }
            for (block, index) in blocks.chunks(512).zip(0..) {
                let place = log.place(log.ring.advance(at, index));
                device.write_at(place, block).unwrap();
            }
        };
        for _ in 0..2 {
            let index = usize::try_from(random.below(records.len() as u64)).unwrap();
            change(records[index].lsn, &mut random);
        }
        let start = Instant::now();
        let device: Arc<dyn BlockDevice> = device;
        let ours = XfsVolume::open(device.clone(), &options);
        match &ours {
            Ok(ours) => {
                opened += 1;
                let _ = ours.read_dir(ours.root(), 0, &mut |_| ControlFlow::Continue(()));
                let _ = ours.statfs();
            }
            Err(_) => refused += 1,
        }
        let _ = XfsVolume::recover(&device, &options);
        assert!(start.elapsed() < Duration::from_secs(20), "it takes {:?}", start.elapsed());
    }
    eprintln!("{opened} opened, {refused} refused");
    assert!(opened > 10 && refused > 10);
}
