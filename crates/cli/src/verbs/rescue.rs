//! `offshoot rescue`: ways on with a volume that cannot be opened as it is.

use std::io::Write;
use std::sync::Arc;

use crate::args::{RescueVerb, VolumeArguments};
use crate::exit::Result;
use crate::output::Console;
use crate::session::Session;

pub(super) fn run(verb: &RescueVerb, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    match verb {
        RescueVerb::ZeroLog(arguments) => zero_log(arguments, out, console),
    }
}

fn zero_log(arguments: &VolumeArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let session = Session::open_to_rescue(arguments, console)?;
    let Some(lost) = session.volume.zero_log()? else {
        writeln!(out, "no log is pending: nothing was changed")?;
        return Ok(());
    };
    for (subvolume, inodes) in &lost.inodes {
        writeln!(out, "thrown away: the log of subvolume {subvolume}, with {inodes} inodes")?;
    }
    if let Some(problem) = lost.problem {
        writeln!(out, "thrown away: what could not be read of the log ({problem})")?;
    }
    Ok(())
}
