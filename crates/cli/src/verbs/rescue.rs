//! `offshoot rescue`: goes on with a volume that cannot be opened as it is.

use std::io::Write;
use std::sync::Arc;

use super::dump::xfs_on;
use super::{btrfs, xfs};
use crate::args::RescueVerb;
use crate::exit::Result;
use crate::output::Console;
use crate::session::Access;

pub(super) fn run(verb: &RescueVerb, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let (RescueVerb::ZeroLog(arguments) | RescueVerb::ReplayLog(arguments)) = verb;
    let Some(device) = xfs_on(&arguments.volume, Access::Write, console)? else {
        return btrfs::rescue::run(verb, out, console);
    };
    match verb {
        RescueVerb::ZeroLog(_) => xfs::rescue::zero_log(&device, arguments.json, out, console),
        RescueVerb::ReplayLog(_) => xfs::rescue::replay_log(&device, arguments.json, out, console),
    }
}
