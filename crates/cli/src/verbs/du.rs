//! `offshoot du`: shows the space that files take.
//!
//! One walk for each place. The line of a directory is written after everything below it was seen.
//! An inode with several names counts under the first name that the walk meets, over all places, as
//! in `du`. With `--shares`, the three columns are those of `btrfs filesystem du`: the space of the
//! data, the exclusive part of it, and for a place the shared part, in which each shared range
//! counts once.

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use offshoot_vfs::path::LastLink;
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Attr, Error, FileId, FileType, Nameless};
use serde::Serialize;

use super::btrfs::sharing::{self, ExtentUse, SharingCache};
use crate::args::DuArguments;
use crate::edit::joined;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, human_size, json_name, short_size, write_line, write_name};
use crate::places::{Failures, VolumePaths};
use crate::session::PlaceSession;

/// The space of some files.
#[derive(Clone, Copy, Default)]
struct DuSpace {
    bytes: u64,
    /// The part of it that no other file shares.
    exclusive: u64,
}

impl DuSpace {
    fn add(&mut self, more: Self) {
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.exclusive = self.exclusive.saturating_add(more.exclusive);
    }
}

/// A line as JSON.
#[derive(Serialize)]
struct DuLine {
    volume: String,
    path: String,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    exclusive: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shared: Option<u64>,
}

pub(super) fn run(arguments: &DuArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let mut places = VolumePaths::new(&arguments.places, console);
    let mut usage = DuRun {
        arguments,
        out,
        failures: Failures::new(console),
        counted: HashSet::new(),
        volumes: Vec::new(),
        counts_all: arguments.places.places.len() > 1,
        cache: SharingCache::default(),
    };
    let mut total = DuSpace::default();
    if arguments.shares && !arguments.json {
        writeln!(
            usage.out,
            "{:>10}  {:>10}  {:>10}  Filename",
            "Total", "Exclusive", "Set shared"
        )?;
    }
    while let Some(place) = places.next() {
        match place.and_then(|session| usage.place(&session)) {
            Ok(space) => total.add(space),
            Err(failure @ VerbFailure::Output(_)) => return Err(failure),
            Err(failure) => usage.failures.opening(&failure),
        }
    }
    if arguments.total && !arguments.json {
        usage.line(None, b"total", total, None)?;
    }
    usage.failures.result()
}

struct DuRun<'a> {
    arguments: &'a DuArguments,
    out: &'a mut dyn Write,
    failures: Failures<'a>,
    /// Files that were counted, each with the index of its volume: files with several names, or all
    /// files if places may overlap.
    counted: HashSet<(usize, FileId)>,
    /// The volumes, by index.
    volumes: Vec<PathBuf>,
    counts_all: bool,
    cache: SharingCache,
}

impl DuRun<'_> {
    fn place(&mut self, session: &PlaceSession) -> Result<DuSpace> {
        let held = session.file(LastLink::Keep)?;
        let file = held.file();
        let attr = session.fs.attr(file).map_err(|error| session.named(error))?;
        let mut shared = SharedRanges::default();
        if self.arguments.shares {
            sharing::require(&session.fs)?;
        }
        let own = self.space(session, &attr, &mut shared).map_err(|error| session.named(error))?;
        let Some(own) = own else { return Ok(DuSpace::default()) };
        let path = session.path.clone();
        if attr.file_type != FileType::Directory {
            let shared = self.arguments.shares.then(|| shared.bytes());
            self.line(Some(session), &path, own, shared)?;
            return Ok(own);
        }
        let mut sums = DuSums { usage: self, session, shared, levels: vec![own], failed: None };
        walk(&*session.fs, file, 0, DEPTH_MAX, &mut sums);
        let DuSums { shared, levels, failed, .. } = sums;
        if let Some(failure) = failed {
            return Err(failure);
        }
        let space = levels.first().copied().unwrap_or(own);
        let shared = self.arguments.shares.then(|| shared.bytes());
        self.line(Some(session), &path, space, shared)?;
        Ok(space)
    }

    /// The space of a file; `None` if it was counted under another name.
    fn space(
        &mut self,
        session: &PlaceSession,
        attr: &Attr,
        shared: &mut SharedRanges,
    ) -> Result<Option<DuSpace>, Error> {
        let is_directory = attr.file_type == FileType::Directory;
        if self.counts_all || attr.nlink > 1 && !is_directory {
            let known = self.volumes.iter().position(|volume| *volume == session.volume);
            let volume = known.unwrap_or_else(|| {
                self.volumes.push(session.volume.clone());
                self.volumes.len() - 1
            });
            if !self.counted.insert((volume, attr.file)) {
                return Ok(None);
            }
        }
        let arguments = self.arguments;
        if !arguments.shares {
            // As in du, the size of a directory is not data.
            let is_apparent = arguments.apparent_size || arguments.bytes;
            let is_counted = matches!(attr.file_type, FileType::Regular | FileType::Symlink);
            let bytes = match is_apparent {
                true if is_counted => attr.size,
                true => 0,
                false => attr.allocated_bytes,
            };
            return Ok(Some(DuSpace { bytes, exclusive: 0 }));
        }
        let mut space = DuSpace::default();
        if attr.file_type == FileType::Regular {
            sharing::extents(&session.fs, attr.file, &mut self.cache, &mut |used| {
                let ExtentUse { file_bytes, logical, is_shared } = used;
                let exclusive = if is_shared { 0 } else { file_bytes };
                space.add(DuSpace { bytes: file_bytes, exclusive });
                if is_shared {
                    shared.add(logical, file_bytes);
                }
            })?;
        }
        Ok(Some(space))
    }

    fn line(
        &mut self,
        session: Option<&PlaceSession>,
        path: &[u8],
        space: DuSpace,
        shared: Option<u64>,
    ) -> Result {
        let arguments = self.arguments;
        let volume = session.map(|session| session.volume.as_os_str().as_bytes());
        if arguments.json {
            let volume = json_name(volume.unwrap_or_default());
            let exclusive = arguments.shares.then_some(space.exclusive);
            let line =
                DuLine { volume, path: json_name(path), bytes: space.bytes, exclusive, shared };
            return Ok(write_line(self.out, &line)?);
        }
        if arguments.shares {
            let shared = shared.map_or("-".to_owned(), human_size);
            let (bytes, exclusive) = (human_size(space.bytes), human_size(space.exclusive));
            write!(self.out, "{bytes:>10}  {exclusive:>10}  {shared:>10}  ")?;
        } else if arguments.bytes {
            write!(self.out, "{}\t", space.bytes)?;
        } else if arguments.human_readable {
            write!(self.out, "{}\t", short_size(space.bytes))?;
        } else {
            write!(self.out, "{}\t", space.bytes.div_ceil(1024))?;
        }
        let name = volume.map_or_else(|| path.to_vec(), |volume| [volume, b":", path].concat());
        write_name(self.out, &name)?;
        Ok(self.out.write_all(if arguments.null { b"\0" } else { b"\n" })?)
    }

    /// Whether lines at this depth below the place are written.
    fn is_shown(&self, depth: usize) -> bool {
        !self.arguments.summarize && self.arguments.max_depth.is_none_or(|max| depth <= max)
    }
}

/// Adds up the space of what the walk visits.
struct DuSums<'u, 'a, 's> {
    usage: &'u mut DuRun<'a>,
    session: &'s PlaceSession,
    shared: SharedRanges,
    /// For each directory that the walk is in, its space and that of its subdirectories that were
    /// left.
    levels: Vec<DuSpace>,
    /// Why no more can be written.
    failed: Option<VerbFailure>,
}

impl DuSums<'_, '_, '_> {
    fn seen(&mut self, entry: &WalkedFile<'_>) -> Option<DuSpace> {
        match self.usage.space(self.session, entry.attr, &mut self.shared) {
            Ok(space) => space,
            Err(error) => {
                self.failed(entry.path, &error);
                Some(DuSpace::default())
            }
        }
    }
}

impl WalkVisitor for DuSums<'_, '_, '_> {
    /// How many directories the walk was in before it entered this one.
    type Directory = usize;

    fn enter(&mut self, _: &usize, entry: &WalkedFile<'_>) -> Option<usize> {
        if self.usage.arguments.one_file_system && entry.attr.file.dev != entry.parent.dev {
            return None;
        }
        let space = self.seen(entry)?;
        self.levels.push(space);
        Some(self.levels.len())
    }

    fn visit(&mut self, _: &usize, entry: &WalkedFile<'_>) {
        let Some(space) = self.seen(entry) else { return };
        let depth = self.levels.len();
        if let Some(level) = self.levels.last_mut() {
            level.add(space);
        }
        if self.usage.arguments.all && self.usage.is_shown(depth) {
            let path = joined(&self.session.path, entry.path);
            self.failed = self.usage.line(Some(self.session), &path, space, None).err();
        }
    }

    fn leave(&mut self, level: usize, path: &[u8]) {
        // The line of the place itself is written at the end.
        if level == 0 {
            return;
        }
        let Some(space) = self.levels.pop() else { return };
        if let Some(above) = self.levels.last_mut() {
            above.add(space);
        }
        if self.usage.is_shown(self.levels.len()) && self.failed.is_none() {
            let path = joined(&self.session.path, path);
            self.failed = self.usage.line(Some(self.session), &path, space, None).err();
        }
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        let path = joined(&self.session.path, path);
        let text = format_args!("{}: {}", Escaped(&path), Nameless(error));
        self.usage.failures.inside(&self.session.volume, ExitStatus::of(error), &text);
    }

    fn is_stopped(&self) -> bool {
        self.failed.is_some()
    }
}

/// Ranges that may overlap. Each byte counts once.
#[derive(Default)]
struct SharedRanges {
    /// Start and end of each range; no two ranges touch.
    ranges: BTreeMap<u64, u64>,
}

impl SharedRanges {
    fn add(&mut self, start: u64, len: u64) {
        let (mut start, mut end) = (start, start.saturating_add(len));
        while let Some((&low, &high)) =
            self.ranges.range(..=end).next_back().filter(|(_, high)| **high >= start)
        {
            (start, end) = (start.min(low), end.max(high));
            self.ranges.remove(&low);
        }
        self.ranges.insert(start, end);
    }

    fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(start, end)| end - start).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::SharedRanges;

    #[test]
    fn each_byte_counts_once() {
        let mut ranges = SharedRanges::default();
        for (start, len, sum) in [(10, 10, 10), (30, 5, 15), (15, 5, 15), (5, 40, 40), (0, 5, 45)] {
            ranges.add(start, len);
            assert_eq!(ranges.bytes(), sum, "{start} {len}");
        }
    }
}
