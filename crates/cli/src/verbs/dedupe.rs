//! `offshoot dedupe`: makes files share the space of their equal parts.
//!
//! The verb compares ranges of [`MOST_COMPARED`] bytes. If two ranges differ, it halves them and
//! compares the halves, down to [`LEAST_COMPARED`] bytes. So equal files share large ranges, and
//! files that differ share everything except what is around the differences.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, resolve};
use offshoot_vfs::{Dedupe, Errno, Error, FileId, FilePosition, FileSystemMut};
use serde::Serialize;

use crate::args::DedupeArguments;
use crate::edit::{at_every_place, require_one_volume};
use crate::exit::Result;
use crate::interrupt::{self, is_interrupted};
use crate::output::{Console, Escaped, JsonArray, human_size, json_name};
use crate::place::VolumePath;

/// The most that the filesystem compares in one call, in bytes.
const MOST_COMPARED: u64 = 16 << 20;

/// A differing range of this size in bytes is not halved any more. Each shared range becomes an
/// extent item.
const LEAST_COMPARED: u64 = 128 << 10;

/// The result for one file.
#[derive(Serialize)]
struct DedupeOutcome {
    path: String,
    /// How many bytes were compared.
    compared: u64,
    /// How many of them are equal and share their space.
    same: u64,
}

pub(super) fn run(
    arguments: &DedupeArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    interrupt::watch(console)?;
    let original = VolumePath::parse(&arguments.original);
    let places: Vec<_> = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    require_one_volume("dedupe", &[std::slice::from_ref(&original), &places].concat())?;
    let mut outcomes = Vec::new();
    let result = at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let from = resolve(fs, &original.path, LastLink::Follow)?;
        let to = resolve(fs, path, LastLink::Follow)?;
        let pair = DedupeRanges::new(fs, from, to, arguments);
        let (compared, same) =
            pair.and_then(|pair| pair.dedupe()).map_err(|error| explained(error, path))?;
        outcomes.push((path.to_vec(), compared, same));
        Ok(())
    });
    // The outcomes below say more.
    console.take_done();
    // The outcomes are printed only after they are durable.
    if arguments.edit.json {
        let mut array = JsonArray::new(out)?;
        for (path, compared, same) in outcomes {
            array.push(&DedupeOutcome { path: json_name(&path), compared, same })?;
        }
        array.finish()?;
    } else {
        for (path, compared, same) in outcomes {
            let (same, compared) = (human_size(same), human_size(compared));
            writeln!(out, "{}: {same} of {compared} are the same", Escaped(&path))?;
        }
    }
    result
}

/// Ranges of two files.
struct DedupeRanges<'a> {
    fs: &'a dyn FileSystemMut,
    from: FilePosition,
    to: FilePosition,
    len: u64,
}

impl<'a> DedupeRanges<'a> {
    /// The ranges in `arguments`. Without a length, the range ends where the shorter file does.
    fn new(
        fs: &'a dyn FileSystemMut,
        from: FileId,
        to: FileId,
        arguments: &DedupeArguments,
    ) -> Result<Self, Error> {
        let from = FilePosition { file: from, offset: arguments.offset };
        let to = FilePosition { file: to, offset: arguments.to_offset.unwrap_or(arguments.offset) };
        let rest = |at: FilePosition| {
            let rest = fs.attr(at.file)?.size.checked_sub(at.offset);
            rest.ok_or_else(|| Error::posix(Errno::INVAL, "a range behind the end"))
        };
        let len = match arguments.length {
            Some(len) => len,
            None => rest(from)?.min(rest(to)?),
        };
        Ok(Self { fs, from, to, len })
    }

    /// Makes equal parts share their space. Returns how many bytes were compared, and how many of
    /// them are equal.
    fn dedupe(&self) -> Result<(u64, u64), Error> {
        let (mut same, mut start) = (0, 0_u64);
        loop {
            // An empty range is passed on too, to check whether the files could share at all.
            let end = self.len.min(start.saturating_add(MOST_COMPARED));
            same += self.share(start..end)?;
            if end == self.len || is_interrupted() {
                return Ok((end, same));
            }
            start = end;
        }
    }

    /// The same for a range, counted from where both begin, or for its halves. Returns the equal
    /// bytes.
    fn share(&self, range: Range<u64>) -> Result<u64, Error> {
        let at = |begin: FilePosition| {
            let offset = begin.offset.checked_add(range.start);
            let offset = offset.ok_or_else(|| Error::posix(Errno::INVAL, "beyond any file"))?;
            Ok::<_, Error>(FilePosition { offset, ..begin })
        };
        let len = range.end - range.start;
        if let Dedupe::Same { len } = self.fs.dedupe_range(at(self.from)?, at(self.to)?, len)? {
            return Ok(len);
        }
        let half = (len / 2).next_multiple_of(LEAST_COMPARED);
        if half >= len {
            return Ok(0);
        }
        let middle = range.start + half;
        Ok(self.share(range.start..middle)? + self.share(middle..range.end)?)
    }
}

/// Explains why two files cannot share.
fn explained(error: Error, path: &[u8]) -> Error {
    match error.errno() {
        Errno::INVAL => {
            let why = "cannot share this range: that takes whole sectors, or the ends of both, of regular files which have them, do not overlap, \
                and both have checksums or none";
            Error::posix(Errno::INVAL, format!("{} {why}", Escaped(path)))
        }
        _ => at_path(error, path),
    }
}
