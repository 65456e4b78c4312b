//! The contents of a file, from the first byte to the last one: what a pipe, a terminal, a
//! device or standard output takes. Holes are zeros there.

use std::io::{self, Write};

use offshoot_vfs::{Errno, Error, FileId, FileSystem, Structure};

/// The zeros of which holes are written.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// Which end of a stream failed.
#[derive(Debug)]
pub enum StreamFailure {
    /// The volume cannot give the data.
    Source(Error),
    /// What takes it refused it.
    Target(io::Error),
}

impl From<io::Error> for StreamFailure {
    fn from(error: io::Error) -> Self {
        Self::Target(error)
    }
}

/// Writes the `size` bytes of `file` to `out`, and calls `wrote` with the length of each piece of
/// data that it took, holes left out.
///
/// # Errors
/// The failure of either end. Everything before it is written.
pub fn write_contents(
    fs: &dyn FileSystem,
    file: FileId,
    size: u64,
    out: &mut dyn Write,
    mut wrote: impl FnMut(usize),
) -> Result<(), StreamFailure> {
    let mut at = 0;
    let mut refused = None;
    let result = fs.read_data(file, 0..size, &mut |offset, data| {
        let Some(hole) = offset.checked_sub(at) else {
            return Err(Error::corrupt(Structure::FileExtent, "data that was there already"));
        };
        fill(out, hole).and_then(|()| out.write_all(data)).map_err(|error| {
            refused = Some(error);
            Error::posix(Errno::IO, "the destination refused data")
        })?;
        wrote(data.len());
        at = offset + data.len() as u64;
        Ok(())
    });
    if let Some(error) = refused {
        return Err(error.into());
    }
    result.map_err(StreamFailure::Source)?;
    Ok(fill(out, size.saturating_sub(at))?)
}

fn fill(out: &mut dyn Write, mut count: u64) -> io::Result<()> {
    while count > 0 {
        let step = usize::try_from(count).map_or(ZEROS.len(), |count| count.min(ZEROS.len()));
        out.write_all(&ZEROS[..step])?;
        count -= step as u64;
    }
    Ok(())
}
