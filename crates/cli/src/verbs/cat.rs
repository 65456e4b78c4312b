//! `offshoot cat`: the contents of files. One that cannot be read does not keep the others back.

use std::io::Write;
use std::sync::Arc;

use offshoot_vfs::{Errno, Error, FileSystem};

use crate::args::CatArguments;
use crate::exit::{Failure, Result};
use crate::output::Console;
use crate::places::{Failures, Places};
use crate::session::PlaceSession;

/// How much is asked for at once. Holes are written from a buffer of this size, too.
const STEP_BYTES: u64 = 1 << 20;

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
    let zeros = vec![0; 64 << 10];
    let mut at = 0;
    let mut data_end = 0;
    while at < size {
        let end = (at + STEP_BYTES).min(size);
        let mut written = Ok(at);
        // A long hole costs nothing but its zeros.
        if data_end <= at {
            data_end = match session.fs.next_data(file, at).map_err(|error| session.named(error))? {
                Some(data) if data.start <= at => data.end,
                Some(data) => {
                    fill(out, &zeros, data.start.min(size) - at)?;
                    at = data.start.min(size);
                    continue;
                }
                None => {
                    fill(out, &zeros, size - at)?;
                    break;
                }
            };
        }
        let result = session.fs.read_data(file, at..end, &mut |offset, data| {
            let so_far = written.as_ref().map_or(offset, |&so_far| so_far);
            written = fill(out, &zeros, offset.saturating_sub(so_far))
                .and_then(|()| out.write_all(data))
                .map(|()| offset + data.len() as u64);
            match &written {
                Ok(_) => Ok(()),
                Err(_) => Err(Error::posix(Errno::IO, "standard output")),
            }
        });
        let so_far = written.map_err(Failure::Output)?;
        result.map_err(|error| session.named(error))?;
        fill(out, &zeros, end - so_far)?;
        at = end;
    }
    Ok(())
}

fn fill(out: &mut dyn Write, zeros: &[u8], mut count: u64) -> std::io::Result<()> {
    while count > 0 {
        let step = usize::try_from(count).map_or(zeros.len(), |count| count.min(zeros.len()));
        out.write_all(&zeros[..step])?;
        count -= step as u64;
    }
    Ok(())
}
