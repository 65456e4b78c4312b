//! `offshoot repair`: mends structures that follow from others.

use std::io::Write;
use std::sync::Arc;

use offshoot_vfs::{Code, Error};

use super::btrfs;
use super::dump::xfs_on;
use crate::args::RepairArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::session::Access;

pub(super) fn run(
    arguments: &RepairArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let Some(device) = xfs_on(&arguments.info.volume, Access::Read, console)? else {
        return btrfs::repair::run(arguments, out, console);
    };
    let what = "repairing an XFS volume: xfs_repair does that";
    let error = Error::unsupported(Code::NotInFormat, what);
    Err(VerbFailure::Inside(device.name().into(), error))
}
