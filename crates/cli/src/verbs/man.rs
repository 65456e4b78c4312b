//! `offshoot man`: writes a man page for each verb.

use clap::CommandFactory;

use crate::args::{Arguments, ManArguments};
use crate::exit::{Result, VerbFailure};

pub(super) fn run(arguments: &ManArguments) -> Result {
    let directory = &arguments.directory;
    let failed = |error| VerbFailure::Host(directory.display().to_string(), error);
    std::fs::create_dir_all(directory).map_err(failed)?;
    clap_mangen::generate_to(Arguments::command(), directory).map_err(failed)
}
