//! `offshoot sync`: makes all changes on a mounted volume durable.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use serde::Serialize;

use crate::args::SyncArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::{json_name, write_line};

#[derive(Serialize)]
struct Synced {
    volume: String,
    stored: bool,
}

pub(super) fn run(arguments: &SyncArguments, out: &mut dyn Write) -> Result {
    if let Some(live) = &arguments.live {
        live.fs.sync()?;
        if arguments.json {
            let volume = json_name(live.volume.as_os_str().as_bytes());
            write_line(out, &Synced { volume, stored: true })?;
        }
        return Ok(());
    }
    let shown = arguments.directory.display();
    arguments.directory.metadata().map_err(|error| VerbFailure::Host(shown.to_string(), error))?;
    Err(VerbFailure::Usage(format!(
        "{shown}: there is nothing to sync: no volume is mounted there with offshoot, and what a verb does elsewhere is stored when it ends"
    )))
}
