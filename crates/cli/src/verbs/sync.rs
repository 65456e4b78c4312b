//! `offshoot sync`: everything that was done on a mounted volume is made durable.

use offshoot_vfs::FileSystemMut;

use crate::args::SyncArguments;
use crate::exit::{Failure, Result};

pub(super) fn run(arguments: &SyncArguments) -> Result {
    if let Some(live) = &arguments.live {
        return Ok(live.fs.sync()?);
    }
    let shown = arguments.directory.display();
    arguments.directory.metadata().map_err(|error| Failure::Host(shown.to_string(), error))?;
    Err(Failure::Usage(format!(
        "{shown}: there is nothing to sync: no volume is mounted there with offshoot, and what a verb does elsewhere is stored when it ends"
    )))
}
