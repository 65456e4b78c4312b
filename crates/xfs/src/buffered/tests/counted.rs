//! What does not grow: extents, writes to the device, promises.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::Errno;
use offshoot_xfs_format::{FileBlock, Ino};

use super::{BufferModel, BufferedEngine, BufferedVolume, WIDE, index, make_durable};
use crate::buffered::BufferLimits;
use crate::inode::change::{end, next_mapped};
use crate::trans::{ForkName, XfsTransactionKind as Kind, XfsTransactions};

fn extents(engine: &XfsTransactions, ino: Ino) -> usize {
    let mut t = engine.begin(Kind::ChangeTimes, 0).unwrap();
    let (mut count, mut at) = (0, 0);
    while let Some(extent) = next_mapped(&mut t, ino, ForkName::Data, FileBlock(at)).unwrap() {
        count += 1;
        at = end(&extent);
    }
    count
}

/// 40 MiB in writes of 64 KiB and of odd sizes, with 4 MiB of memory.
#[test]
fn a_file_that_is_written_in_order_has_one_extent() {
    let Some(volume) = BufferedVolume::make(1 << 10, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, BufferLimits { bytes: 4 << 20, ..WIDE });
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    for (file, len) in [(0, 64 << 10), (1, 50_001)] {
        for number in 0..(40 << 20) / len {
            model.write(data, file, number * len..(number + 1) * len, false);
            assert!(engine.files.bytes() <= (4 << 20) + (1 << 20), "{}", engine.files.bytes());
        }
        data.write_back_all().unwrap();
        assert_eq!(extents(&engine.transactions, model.files[file].ino), 1);
    }
    let found = engine.files.statistics();
    assert!(found.waits_at_bound > 10 && found.device_writes < 100, "{found:?}");
    volume.assert_unmounts(engine, &model);
}

/// Writes over blocks of a file promise nothing, and go to the same places.
#[test]
fn a_write_over_blocks_of_its_own_promises_none() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..100 * 4096, false);
    let after_first = engine.files.statistics().promised_blocks;
    // The blocks, one or two for extents, and what a step may need.
    assert!((101..130).contains(&after_first), "{after_first}");
    assert_eq!(engine.transactions.counters().promised(), after_first);
    model.write(data, 0, 10 * 4096..20 * 4096, false);
    data.write_back_all().unwrap();
    engine.assert_at_rest();
    model.write(data, 0, 5000..70_000, false);
    model.write(data, 0, 0..10, false);
    assert_eq!(engine.files.statistics().promised_blocks, after_first);
    data.write_back_all().unwrap();
    assert_eq!(extents(&engine.transactions, model.files[0].ino), 1);
    // Blocks that files share are promised again, and only these.
    model.share(data, (0, 10), (1, 10), 20);
    model.write(data, 0, 0..100 * 4096, false);
    let more = engine.files.statistics().promised_blocks - after_first;
    assert!((20..50).contains(&more), "{more}");
    volume.assert_unmounts(engine, &model);
}

/// A file that is removed before its write-back, and what is cut off, never touch the device.
#[test]
fn what_is_removed_in_time_is_not_written() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..300_000, false);
    data.discard(&model.files[0].buffer);
    model.files[0].bytes.clear();
    model.files[0].buffer = data.file(model.files[0].ino).unwrap();
    engine.assert_at_rest();
    model.write(data, 1, 0..300_000, false);
    model.truncate(data, 1, 0);
    engine.assert_at_rest();
    data.write_back_all().unwrap();
    assert_eq!(engine.files.statistics().device_bytes, 0);
    model.write(data, 1, 0..300_000, false);
    model.truncate(data, 1, 4096 * 3);
    data.write_back_all().unwrap();
    assert_eq!(engine.files.statistics().device_bytes, 4096 * 3);
    volume.assert_unmounts(engine, &model);
}

/// The inode of a file that is removed belongs to the next file that gets it, with its size.
#[test]
fn a_discarded_file_does_nothing_to_its_inode() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..300_000, false);
    let old = model.files[0].buffer.clone();
    data.discard(&old);
    data.changes().truncate(old.ino, 5000).unwrap();
    data.write_back(&old).unwrap();
    make_durable(&data, &old).unwrap();
    assert_eq!(data.changes().size(old.ino).unwrap(), 5000);
    assert_eq!(data.write(&old, 0, &[7]).unwrap_err().errno(), Errno::NOENT);
    assert_eq!(data.truncate(&old, 0).unwrap_err().errno(), Errno::NOENT);
    model.files[0].buffer = data.file(old.ino).unwrap();
    model.files[0].bytes = vec![0; 5000];
    model.write(data, 0, 100..200, false);
    volume.assert_unmounts(engine, &model);
}

/// A buffer that is asked for while another one is in use is that one, with its size.
#[test]
fn an_inode_in_use_has_one_buffer() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..300_000, false);
    data.write_back_all().unwrap();
    let ino = model.files[0].ino;
    assert!(Arc::ptr_eq(&data.file(ino).unwrap(), &model.files[0].buffer));
    // The last reference of the old one goes away first.
    model.files[0].buffer = model.files[1].buffer.clone();
    model.files[0].buffer = data.file(ino).unwrap();
    assert_eq!(model.files[0].buffer.size(), 300_000);
    volume.assert_unmounts(engine, &model);
}

/// What no file can have changes nothing, and neither does a write of nothing.
#[test]
fn calls_without_an_effect_leave_a_file_as_it_was() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..10_000, false);
    let file = &model.files[0].buffer;
    for size in [u64::MAX, u64::MAX - 4000, 1 << 63] {
        assert_eq!(data.truncate(file, size).unwrap_err().errno(), Errno::FBIG);
        data.write_direct(file, size, &[]).unwrap();
        data.write(file, size, &[]).unwrap();
    }
    data.write_direct(file, 1 << 20, &[]).unwrap();
    volume.assert_unmounts(engine, &model);
}

/// Many small files go out together.
#[test]
fn small_files_share_writes_to_the_device() {
    const COUNT: usize = 200;
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let mount = volume.disk.mount("", &[]);
    let inodes: Vec<_> = (0..COUNT)
        .map(|number| {
            let path = mount.path().join(format!("small {number}"));
            std::fs::write(&path, b"").unwrap();
            Ino(offshoot_testkit::xfs::disk::XfsDisk::ino(&path))
        })
        .collect();
    drop(mount);
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let model = BufferModel::new(&volume, data, seed_of_run());
    for (number, ino) in inodes.iter().enumerate() {
        let content = vec![u8::try_from(number).unwrap(); 5000 + number];
        data.write(&data.file(*ino).unwrap(), 0, &content).unwrap();
    }
    data.write_back_all().unwrap();
    let found = engine.files.statistics();
    assert_eq!((found.rows, found.places), (200, 200));
    assert!(found.device_writes <= 20, "{found:?}");
    volume.assert_unmounts(engine, &model);
    let mount = volume.disk.mount("", &[]);
    for number in 0..COUNT {
        let content = std::fs::read(mount.path().join(format!("small {number}"))).unwrap();
        assert!(content == vec![u8::try_from(number).unwrap(); 5000 + number], "{number}");
    }
}

/// Old data, and what is above half of the bound, goes out by itself.
#[test]
fn the_background_writes_back_what_is_old_or_much() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let limits = BufferLimits { bytes: 2 << 20, age: Duration::from_millis(300) };
    let engine = BufferedEngine::new(&volume.disk, limits);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    let wait_until = |is_there: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !is_there() {
            assert!(begin.elapsed() < Duration::from_secs(20));
            thread::sleep(Duration::from_millis(5));
        }
    };
    thread::scope(|scope| {
        scope.spawn(move || data.run_background(|| Some(())));
        model.write(data, 0, 0..5000, false);
        wait_until(&|| engine.files.bytes() == 0);
        assert_eq!(engine.files.statistics().waits_at_bound, 0);
        model.write(data, 0, 0..3 << 19, false);
        wait_until(&|| engine.files.bytes() <= 1 << 20);
        data.end_background();
    });
    assert_eq!(index(model.files[0].buffer.size()), model.files[0].bytes.len());
    volume.assert_unmounts(engine, &model);
}
