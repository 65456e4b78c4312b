//! `offshoot in-force`, a hidden verb: reports to other runs of the program how a volume is served.

use std::io::Write;

use crate::args::InForceArguments;
use crate::exit::{Result, VerbFailure};
use crate::mount::Served;
use crate::output::write_line;

pub(in crate::verbs) fn run(arguments: &InForceArguments, out: &mut dyn Write) -> Result {
    let live = arguments.live.as_ref().ok_or_else(|| {
        let directory = arguments.directory.display();
        VerbFailure::Usage(format!("{directory}: no volume is mounted there with offshoot"))
    })?;
    let subvolume = live.fs.subvolume(arguments.subvolume.as_deref())?;
    let (root, options) = (live.first, live.options.clone());
    Ok(write_line(out, &Served { subvolume, root, options })?)
}
