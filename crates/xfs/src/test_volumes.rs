//! Volumes that unit tests change by transactions.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_kit::counter::WriteStop;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_xfs_format::superblock::XfsSuperblock;

use crate::buffer::{XfsBuffers, sector_at};
use crate::group;
use crate::log::{LogDisk, XfsLog, XfsLogOptions};
use crate::recover::VolumeLog;
use crate::trans::XfsTransactions;

/// The engine on a volume with a clean log.
pub(crate) fn engine(disk: &XfsDisk) -> XfsTransactions {
    engine_on(disk.writable_device())
}

/// The engine on a device with a clean log.
pub(crate) fn engine_on(device: Arc<dyn BlockDevice>) -> XfsTransactions {
    engine_with(device, &XfsLogOptions::default())
}

/// The engine on a device with a clean log, which works as `options` say.
pub(crate) fn engine_with(
    device: Arc<dyn BlockDevice>,
    options: &XfsLogOptions,
) -> XfsTransactions {
    let superblock = XfsSuperblock::parse(&sector_at(&*device, 0).unwrap()).unwrap();
    let found = VolumeLog::find(&device, &superblock).unwrap();
    assert!(found.ends.is_clean);
    let stop = WriteStop::new(None);
    let ring = LogDisk::new(&device, &superblock).unwrap();
    let log = XfsLog::start(ring, &found.ends, &[], &stop, options).unwrap();
    let buffers = Arc::new(XfsBuffers::new(device, superblock.geometry.clone(), 4 << 20));
    group::begin_transactions(buffers, log, &superblock, &stop).unwrap()
}
