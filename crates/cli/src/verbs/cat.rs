//! `offshoot cat`: the contents of files. One that cannot be read does not keep the others back.

use std::io::Write;
use std::sync::Arc;

use offshoot_vfs::{Errno, Error, FileSystem};

use crate::args::CatArguments;
use crate::exit::{Failure, Result};
use crate::output::Console;
use crate::places::{Failures, Places};
use crate::session::PlaceSession;

/// The zeros of which holes are written.
const ZEROS_BYTES: usize = 64 << 10;

pub(super) fn run(arguments: &CatArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let mut places = Places::new(&arguments.places, console);
    let mut failures = Failures::new(&places);
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
            Err(failure @ Failure::Output(_)) => return Err(failure),
            Err(failure) => {
                // What was read comes before the reason why no more was.
                out.flush()?;
                failures.inside(&session.volume, failure.status(), &failure);
            }
        }
    }
    failures.result()
}

/// Writes the contents of the file at a place.
fn copy(session: &PlaceSession, out: &mut dyn Write) -> Result {
    let file = session.regular_file()?;
    let size = session.fs.attr(file).map_err(|error| session.named(error))?.size;
    let zeros = vec![0; ZEROS_BYTES];
    let mut at = 0;
    let mut refused = None;
    let result = session.fs.read_data(file, 0..size, &mut |offset, data| {
        let Some(hole) = offset.checked_sub(at) else {
            return Err(Error::corrupt("file extent", "data that was there already"));
        };
        fill(out, &zeros, hole).and_then(|()| out.write_all(data)).map_err(|error| {
            refused = Some(error);
            Error::posix(Errno::IO, "standard output")
        })?;
        at = offset + data.len() as u64;
        Ok(())
    });
    if let Some(error) = refused {
        return Err(Failure::Output(error));
    }
    result.map_err(|error| session.named(error))?;
    Ok(fill(out, &zeros, size.saturating_sub(at))?)
}

fn fill(out: &mut dyn Write, zeros: &[u8], mut count: u64) -> std::io::Result<()> {
    while count > 0 {
        let step = usize::try_from(count).map_or(zeros.len(), |count| count.min(zeros.len()));
        out.write_all(&zeros[..step])?;
        count -= step as u64;
    }
    Ok(())
}
