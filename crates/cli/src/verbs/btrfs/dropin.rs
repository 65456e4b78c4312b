//! The program as `mkfs.btrfs`: called by that name, it takes the options of that tool.
//!
//! ```text
//! ln -s /usr/bin/offshoot /usr/local/sbin/mkfs.btrfs
//!
//! arguments ──> the options of mkfs and of build ──> devices made, or made and filled ──> summary
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`arguments`] | the command line |
//! | [`features`] | what `-O` names |
//! | [`devices`] | opens devices and files, and makes the volume on them |
//! | [`filled`] | the same with the files of `--rootdir` |
//! | [`reflink`] | makes the image share the data of these files |
//! | [`summary`] | what is printed at the end |
//!
//! Volumes are made and filled by the code of `offshoot mkfs` and `offshoot build`. This module
//! only translates: the options, what happens to a file that is missing or too small, and the exit
//! code, which is 0 or 1. Programs that build images read that code, give `-q`, and look at the
//! volume afterwards; so the messages are our own.
//!
//! The options are those of btrfs-progs 6.19, and the defaults those that 6.14 has, which any
//! kernel since 5.15 mounts: 6.19 turned `block-group-tree` on. What we do not make is refused by
//! its name before anything is written: quotas, RAID5 and RAID6, zoned devices.

mod arguments;
mod devices;
mod features;
mod filled;
mod reflink;
mod summary;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use crate::exit::{self, ExitStatus, Result};
use crate::output::Console;
use arguments::Parsed;

/// The name by which the program is this tool.
const NAME: &str = "mkfs.btrfs";

/// Whether the first of the words on the command line is this tool.
pub(crate) fn is_called(words: &[OsString]) -> bool {
    let name = words.first().and_then(|word| Path::new(word).file_name());
    name == Some(OsStr::new(NAME))
}

/// Runs as the tool.
pub(crate) fn main(words: &[OsString]) -> ExitCode {
    let console = Arc::new(Console::default());
    let mut out = io::BufWriter::new(io::stdout().lock());
    let result = run(words, &mut out, &console);
    let flushed = out.flush().map_err(exit::VerbFailure::from);
    let status = exit::report(result.and(flushed), &console);
    // The tool has one exit code for all that fails, wrong usage among it.
    if status == ExitStatus::Done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(words: &[OsString], out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let arguments = match arguments::parse(words)? {
        Parsed::Volume(arguments) => arguments,
        Parsed::Text(text) => return Ok(out.write_all(text.as_bytes())?),
    };
    if arguments.lists_features() {
        return features::list(out);
    }
    if arguments.runtime_features.is_some() {
        console.warning(&"-R is old: name these features with -O");
    }
    let new = arguments.new_volume()?;
    if arguments.rootdir.is_some() {
        filled::run(&arguments, new, out, console)
    } else {
        devices::run(&arguments, new, out, console)
    }
}
