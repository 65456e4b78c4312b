//! `offshoot resize`: makes a device of a volume larger or smaller.

use std::io::Write;
use std::sync::Arc;

use serde::Serialize;

use super::dump::xfs_on;
use super::{btrfs, xfs};
use crate::args::ResizeArguments;
use crate::exit::Result;
use crate::output::{Console, human_size, write_line};
use crate::session::Access;

/// What a device has become.
#[derive(Serialize)]
pub(in crate::verbs) struct ResizeReport {
    /// The number of the device.
    pub(in crate::verbs) device: u64,
    /// Its size before, in bytes.
    pub(in crate::verbs) before: u64,
    /// Its size now, in bytes.
    pub(in crate::verbs) after: u64,
    /// The bytes of the image or block device.
    pub(in crate::verbs) device_bytes: u64,
}

pub(super) fn run(
    arguments: &ResizeArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let ResizeArguments { info, size } = arguments;
    let is_mounted = info.volume.open.live.is_some();
    let device = if is_mounted { None } else { xfs_on(&info.volume, Access::Write, console)? };
    let report = match device {
        Some(device) => xfs::resize::run(&device, *size, console)?,
        None => btrfs::resize::run(arguments, console)?,
    };
    if info.json {
        return Ok(write_line(out, &report)?);
    }
    let (after, before) = (human_size(report.after), human_size(report.before));
    writeln!(out, "device {} has {after}, and had {before}", report.device)?;
    Ok(())
}
