//! `offshoot resize` for XFS, which only grows.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{self as vfs, Code, Errno, Error};
use offshoot_xfs::{XfsOptions, XfsVolume, grow_xfs};

use super::rescue::options;
use crate::args::{NewSize, SizeChange};
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::verbs::resize::ResizeReport;

pub(in crate::verbs) fn run(
    device: &Arc<dyn BlockDevice>,
    wanted: NewSize,
    console: &Arc<Console>,
) -> Result<ResizeReport> {
    let options = options(console)?;
    let grown = bytes_of(device, wanted)
        .and_then(|bytes| grow_xfs(device, bytes, &options))
        .map_err(|error| VerbFailure::Inside(device.name().into(), error))?;
    Ok(ResizeReport {
        device: 1,
        before: grown.old_bytes,
        after: grown.bytes,
        device_bytes: device.size_bytes(),
    })
}

/// The size that was asked for.
fn bytes_of(device: &Arc<dyn BlockDevice>, wanted: NewSize) -> vfs::Result<u64> {
    if wanted.device != 1 {
        let what = format!("device {}: an XFS volume has device 1 alone", wanted.device);
        return Err(Error::posix(Errno::NODEV, what));
    }
    match wanted.size {
        SizeChange::To(bytes) => Ok(bytes),
        SizeChange::Max => Ok(device.size_bytes()),
        SizeChange::More(bytes) => {
            let reading = XfsOptions { is_log_ignored: true, ..XfsOptions::default() };
            let volume = XfsVolume::open(device.clone(), &reading)?;
            let geometry = &volume.superblock().geometry;
            let sum = (geometry.blocks << geometry.block_log).checked_add(bytes);
            sum.ok_or_else(|| Error::posix(Errno::INVAL, "a size of that many bytes"))
        }
        SizeChange::Less(_) | SizeChange::Minimal(_) => {
            let what = "making an XFS volume smaller: copy its files to a smaller one";
            Err(Error::unsupported(Code::NotInFormat, what))
        }
    }
}
