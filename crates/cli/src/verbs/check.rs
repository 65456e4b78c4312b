//! `offshoot check`: compares everything that the structures of a volume say about each other.

use std::io::Write;
use std::sync::Arc;

use super::dump::xfs_on;
use super::{btrfs, xfs};
use crate::args::CheckArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::session::{Access, only_in_btrfs};

pub(super) fn run(
    arguments: &CheckArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    if arguments.info.volume.open.live.is_some() {
        return btrfs::check::run(arguments, out, console);
    }
    let Some(device) = xfs_on(&arguments.info.volume, Access::Read, console)? else {
        return btrfs::check::run(arguments, out, console);
    };
    for (is_asked, what) in [
        (arguments.data, "--data: there are no checksums of data"),
        (arguments.room.memory.is_some(), "--memory"),
        (arguments.room.scratch.is_some(), "--scratch"),
    ] {
        if is_asked {
            return Err(VerbFailure::Inside(device.name().into(), only_in_btrfs(what)));
        }
    }
    xfs::check::run(&device, &arguments.info, out, console)
}
