//! Devices that fail: data stays in memory, and each call says so once.

use std::sync::Arc;

use offshoot_device::{BlockDevice, Fault, FaultDevice, RequestKind};
use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::Errno;
use offshoot_xfs_format::FileBlock;

use super::{BufferModel, BufferedEngine, BufferedVolume, WIDE, make_durable};
use crate::buffered::BufferLimits;
use crate::inode::change::next_mapped;
use crate::log::XfsLogOptions;
use crate::trans::{ForkName, XfsTransactionKind};

#[test]
fn data_that_cannot_be_written_stays_in_memory() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let device = Arc::new(FaultDevice::new(volume.disk.writable_device()));
    let limits = BufferLimits { bytes: 4 << 20, ..WIDE };
    let engine = BufferedEngine::on(device.clone(), limits, &XfsLogOptions::default());
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..50 * 4096, false);
    model.share(data, (0, 0), (1, 0), 50);
    // The next write to the device is that of data. It fails for a hole, for shared blocks, in
    // place, and past memory.
    for (file, bytes) in [(2, 0..30_000), (0, 5000..90_000), (2, 100..20_000)] {
        model.write(data, file, bytes, false);
        let counters = engine.transactions.counters();
        let unpromised = || counters.counts().free_blocks - counters.promised();
        let before = unpromised();
        for _ in 0..2 {
            let number = device.count(RequestKind::Writes);
            device.strike(RequestKind::Writes, number, Fault::Error);
            let error = make_durable(&data, &model.files[file].buffer).unwrap_err();
            assert_eq!(error.errno(), Errno::IO, "{error}");
            assert!(model.files[file].buffer.is_dirty());
            model.read(data, file);
        }
        // What staged blocks took is promised again, and what the file has got is not.
        assert_eq!(unpromised(), before, "file {file}");
        make_durable(&data, &model.files[file].buffer).unwrap();
        assert!(!model.files[file].buffer.is_dirty());
        assert_eq!(engine.transactions.counters().promised(), 0);
    }
    assert_eq!(engine.files.statistics().failures, 6);
    let number = device.count(RequestKind::Writes);
    device.strike(RequestKind::Writes, number, Fault::Error);
    let error = data.write_direct(&model.files[0].buffer, 0, &[7; 8192]).unwrap_err();
    assert_eq!(error.errno(), Errno::IO, "{error}");
    volume.assert_cut_recovers(&engine, &model);
    volume.assert_unmounts(engine, &model);
}

/// What a failed flush has lost is not known, so nothing says afterwards that data is durable.
#[test]
fn a_flush_that_fails_ends_writing() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let device = Arc::new(FaultDevice::new(volume.disk.writable_device()));
    let engine = BufferedEngine::on(device.clone(), WIDE, &XfsLogOptions::default());
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    for file in [0, 1] {
        model.write(data, file, 0..20_000, false);
        make_durable(&data, &model.files[file].buffer).unwrap();
        model.write(data, file, 0..5000, false);
    }
    let number = device.count(RequestKind::Flushes);
    device.strike(RequestKind::Flushes, number, Fault::Error);
    let buffers = [0, 1].map(|file| model.files[file].buffer.clone());
    let error = make_durable(&data, &buffers[0]).unwrap_err();
    assert_eq!(error.errno(), Errno::IO, "{error}");
    for buffer in &buffers {
        let error = make_durable(&data, buffer).unwrap_err();
        assert_eq!(error.errno(), Errno::ROFS, "{error}");
        let error = data.write(buffer, 0, &[7; 10]).unwrap_err();
        assert_eq!(error.errno(), Errno::ROFS, "{error}");
    }
}

/// A file on a part of the device that fails keeps its data. Writers of others go on.
#[test]
fn a_file_that_cannot_be_written_stops_no_other() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let device = Arc::new(FaultDevice::new(volume.disk.writable_device()));
    let limits = BufferLimits { bytes: 1 << 20, ..WIDE };
    let engine = BufferedEngine::on(device.clone(), limits, &XfsLogOptions::default());
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    model.write(data, 0, 0..3 << 19, false);
    data.write_back_all().unwrap();
    let stored = model.files[0].bytes.clone();
    let mut t = engine.transactions.begin(XfsTransactionKind::ChangeTimes, 0).unwrap();
    let bad = model.files[0].ino;
    let found = next_mapped(&mut t, bad, ForkName::Data, FileBlock(0)).unwrap().unwrap();
    drop(t);
    let start = engine.transactions.geometry().place_of(found.start).unwrap().bytes();
    device.add_to(RequestKind::Writes, start..start + (3 << 19), Fault::Error);
    for part in 0..3 {
        model.write(data, 0, part << 19..(part + 1) << 19, false);
    }
    for part in 0..80 {
        let file = 1 + usize::try_from(part % 2).unwrap();
        model.write(data, file, part * 50_000..(part + 1) * 50_000, false);
        assert!(engine.files.bytes() < 4 << 20);
    }
    let error = data.write(&model.files[0].buffer, 0, &[7]).unwrap_err();
    assert_eq!(error.errno(), Errno::IO, "{error}");
    assert_eq!(data.write_back_all().unwrap_err().errno(), Errno::IO);
    assert_eq!(engine.files.all().len(), 1);
    // What the device had before is still there.
    data.discard(&model.files[0].buffer);
    model.files[0].bytes = stored;
    volume.assert_unmounts(engine, &model);
}

/// At the bound a writer gets the error, so memory stays bounded. No thread tries without an end.
#[test]
fn a_writer_at_the_bound_gets_the_error_of_the_device() {
    let Some(volume) = BufferedVolume::make(300, "") else { return };
    let device = Arc::new(FaultDevice::new(volume.disk.writable_device()));
    let limits = BufferLimits { bytes: 1 << 20, ..WIDE };
    let engine = BufferedEngine::on(device.clone(), limits, &XfsLogOptions::default());
    let data = engine.data();
    let model = BufferModel::new(&volume, data, seed_of_run());
    device.add_to(RequestKind::Writes, 0..device.size_bytes(), Fault::Error);
    let mut written = 0;
    let error = loop {
        match data.write(&model.files[0].buffer, written, &vec![7; 64 << 10]) {
            Ok(()) => written += 64 << 10,
            Err(error) => break error,
        }
        assert!(written < 8 << 20);
    };
    assert_eq!(error.errno(), Errno::IO, "{error}");
    let mut found = vec![0; 100];
    assert_eq!(data.read(&model.files[0].buffer, written - 100, &mut found).unwrap(), 100);
    assert!(found == [7; 100] && engine.files.statistics().failures < 10);
}
