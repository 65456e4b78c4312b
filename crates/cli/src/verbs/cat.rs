//! `offshoot cat`: writes the contents of files. A file that cannot be read is reported, and the
//! others are written.
//!
//! Binary data goes to files and pipes, but not to a terminal, which would interpret it.

use std::io::Write;
use std::sync::Arc;

use offshoot_transfer::stream::{StreamFailure, write_contents};

use crate::args::CatArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::places::{Failures, VolumePaths};
use crate::session::PlaceSession;
use crate::stream::TextOnly;

pub(super) fn run(arguments: &CatArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    if arguments.json {
        let what =
            "cat writes contents as they are, so it has no --json; `stat --json` describes files";
        return Err(VerbFailure::Usage(what.into()));
    }
    let mut places = VolumePaths::new(&arguments.places, console);
    let mut failures = Failures::new(console);
    while let Some(place) = places.next() {
        let session = match place {
            Ok(session) => session,
            Err(failure) => {
                failures.opening(&failure);
                continue;
            }
        };
        match copy(&session, out) {
            Ok(()) => {}
            Err(failure @ VerbFailure::Output(_)) => return Err(failure),
            Err(failure) => {
                // Write what was read before the error that ended it.
                out.flush()?;
                failures.opening(&failure);
            }
        }
    }
    failures.result()
}

/// Writes the contents of the file at a place.
fn copy(session: &PlaceSession, out: &mut dyn Write) -> Result {
    let held = session.regular_file()?;
    let file = held.file();
    let size = session.fs.attr(file).map_err(|error| session.named(error))?.size;
    let mut checked = TextOnly::new(out);
    write_contents(&*session.fs, file, size, &mut checked, |_| {}).map_err(
        |failure| match failure {
            StreamFailure::Source(error) => session.named(error),
            StreamFailure::Target(error) => TextOnly::failure(error, &session.path),
        },
    )
}
