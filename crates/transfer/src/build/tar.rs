//! A tar archive as a source.
//!
//! ```text
//! | header 512 | data, padded to 512 | header | data | ... | 1024 zeros |
//! ```
//!
//! All dialects are read that are in use: the one of before POSIX, ustar, that of GNU tar and pax.
//! What a header has no room for comes in entries before it, whose data is a long name of GNU tar,
//! or the records of pax, which count for the next entry or, from a global one, for all that
//! follow.
//!
//! | part | what it does |
//! |---|---|
//! | [`header`] | the fields of a header |
//! | [`records`] | the records of pax, and what they say |
//! | [`sparse`] | where the data of a sparse file belongs, in the four formats of GNU tar |
//!
//! Attributes come from the archive alone: numbers of users and groups, not their names. Of two
//! entries with one path the later counts. A path is taken as relative, whatever it begins with,
//! and one with `..` is refused. An archive is read in one go and not kept in memory; what is kept
//! of one entry has bounds.

mod header;
mod records;
mod sparse;
#[cfg(test)]
pub(super) mod tests;

use std::io::{self, Read};
use std::ops::Range;

use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::escape::Escaped;
use offshoot_vfs::{FileFlags, FileType, NewNode, Timestamp};

use super::acl::acl_value;
use super::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, SourceProblem, drop_second_lists, normal_path,
    piece_len,
};
use super::unpack::{ArchiveInput, fill};
use crate::xattrs::XattrPair;
use crate::{Result, TransferFailure, Watcher};
use header::Header;
use records::Records;
pub(super) use records::base64;

/// The unit of an archive.
const BLOCK: usize = 512;

/// The longest name of GNU tar.
const LONG_NAME_MAX: u64 = 4 << 20;

/// The most that the records of one entry may take. The extended attributes of one file that an
/// extraction writes are within it, with a path.
const RECORDS_MAX: u64 = 24 << 20;

/// The most that global records may take. Commonly they hold one comment. Each entry gets a copy of
/// them, though its header has 512 bytes.
const GLOBAL_RECORDS_MAX: u64 = 64 << 10;

/// The most names of a path, each of which may become a directory that is open. An extraction
/// writes no deeper one.
const PATH_NAMES_MAX: usize = 2048;

/// Stands in an entry for a list that is text and could not be read.
pub(super) const UNREADABLE_ACL: &[u8] = b"system.posix_acl_as_text";

/// How an archive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArchiveEnd {
    /// With the mark that is for this.
    Marked,
    /// Behind a whole entry, without a mark.
    Missing,
}

/// Gives `sink` all files of the archive `input`, whose name for messages is `source`.
pub(super) fn read_tar(
    input: &mut dyn ArchiveInput,
    source: &[u8],
    watcher: &dyn Watcher,
    sink: &mut dyn EntrySink,
) -> Result<ArchiveEnd> {
    let mut reader = TarReader { input, source, watcher, global: Records::default() };
    reader.run(sink)
}

struct TarReader<'a> {
    input: &'a mut dyn ArchiveInput,
    source: &'a [u8],
    watcher: &'a dyn Watcher,
    /// What counts for all entries from here on.
    global: Records,
}

/// What came before a header, and counts for it.
#[derive(Default)]
struct Preceding {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    records: Option<Records>,
}

/// An entry as its headers have it, and where its data belongs.
struct TarFile {
    entry: BuildEntry,
    /// How much data follows.
    stored: u64,
    /// Where it belongs, for a sparse file.
    map: Option<Vec<Range<u64>>>,
}

impl TarReader<'_> {
    fn fail(&self, problem: SourceProblem) -> TransferFailure {
        problem.at(self.source)
    }

    fn run(&mut self, sink: &mut dyn EntrySink) -> Result<ArchiveEnd> {
        let mut preceding = Preceding::default();
        let mut is_first = true;
        loop {
            if self.watcher.is_interrupted() {
                return Err(TransferFailure::Interrupted);
            }
            let header = match self.header(is_first).map_err(|problem| self.fail(problem))? {
                Ok(header) => header,
                Err(end) => return Ok(end),
            };
            is_first = false;
            let name = header.path();
            let shown = |problem: SourceProblem| match problem {
                SourceProblem::Damaged(what) => {
                    SourceProblem::Damaged(format!("{}: {what}", Escaped(&name)))
                }
                SourceProblem::Refused(what) => {
                    SourceProblem::Refused(format!("{}: {what}", Escaped(&name)))
                }
                other => other,
            };
            let taken = self.take_preceding(&header, &mut preceding);
            if taken.map_err(|problem| self.fail(shown(problem)))? {
                continue;
            }
            let file = self.file(&header, std::mem::take(&mut preceding));
            let Some(TarFile { entry, stored, map }) =
                file.map_err(|problem| self.fail(shown(problem)))?
            else {
                continue;
            };
            let mut contents = TarContents::new(self, stored, map);
            sink.put(entry, &mut contents)?;
            let left = contents.left;
            let skipped = self.skip_padded(left, stored);
            skipped.map_err(|problem| self.fail(problem))?;
        }
    }

    /// The next header, or how the archive ends.
    fn header(&mut self, is_first: bool) -> Result<Result<Header, ArchiveEnd>, SourceProblem> {
        let mut block = [0; BLOCK];
        let len = fill(&mut *self.input, &mut block)?;
        if len == 0 && !is_first {
            return Ok(Err(ArchiveEnd::Missing));
        }
        if len < BLOCK {
            return Err(if is_first {
                SourceProblem::Refused("it is no tar archive".to_owned())
            } else {
                io::Error::from(io::ErrorKind::UnexpectedEof).into()
            });
        }
        if block.iter().all(|&byte| byte == 0) {
            // What follows fills up the archive, and of a compressed one has the checksum.
            io::copy(&mut self.input, &mut io::sink())?;
            return Ok(Err(ArchiveEnd::Marked));
        }
        let header = Header::new(&block);
        if !header.has_right_checksum() {
            return Err(if is_first {
                SourceProblem::Refused("it is no tar archive".to_owned())
            } else {
                SourceProblem::Damaged("a header has a wrong checksum".to_owned())
            });
        }
        Ok(Ok(header))
    }

    /// Reads an entry that only says something of later ones. Whether it was one.
    fn take_preceding(
        &mut self,
        header: &Header,
        preceding: &mut Preceding,
    ) -> Result<bool, SourceProblem> {
        match header.entry_type() {
            b'L' => preceding.path = Some(self.long_name(header)?),
            b'K' => preceding.link = Some(self.long_name(header)?),
            b'x' | b'X' => {
                let text = self.data(header, RECORDS_MAX, "records")?;
                let mut records = preceding.records.take().unwrap_or_else(|| self.global.clone());
                records.apply(&text, RECORDS_MAX)?;
                preceding.records = Some(records);
            }
            b'g' => {
                let text = self.data(header, GLOBAL_RECORDS_MAX, "global records")?;
                // A later record may replace one before it.
                self.global.apply(&text, 2 * GLOBAL_RECORDS_MAX)?;
                if self.global.recount() as u64 > GLOBAL_RECORDS_MAX {
                    return Err(SourceProblem::Refused("too many global records".to_owned()));
                }
            }
            // The label of a volume of tapes.
            b'V' => self.skip_padded(header.size()?, header.size()?)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn long_name(&mut self, header: &Header) -> Result<Vec<u8>, SourceProblem> {
        let mut name = self.data(header, LONG_NAME_MAX, "a name")?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        name.truncate(end);
        Ok(name)
    }

    /// The data of an entry, which is kept in memory.
    fn data(&mut self, header: &Header, max: u64, what: &str) -> Result<Vec<u8>, SourceProblem> {
        let size = header.size()?;
        if size > max {
            let mib = max >> 20;
            let max = if mib > 0 { format!("{mib} MiB") } else { format!("{} KiB", max >> 10) };
            return Err(SourceProblem::Refused(format!("{what} of more than {max}")));
        }
        let mut data = Vec::new();
        self.input.take(size).read_to_end(&mut data)?;
        if (data.len() as u64) < size {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        self.skip_padded(0, size)?;
        Ok(data)
    }

    /// Skips what is left of `stored` bytes of data, and what fills up their last block.
    fn skip_padded(&mut self, left: u64, stored: u64) -> Result<(), SourceProblem> {
        let padding = stored.wrapping_neg() % BLOCK as u64;
        let bytes = left.checked_add(padding).ok_or_else(too_large)?;
        if bytes > 0 {
            self.input.skip(bytes)?;
        }
        Ok(())
    }

    /// The file that `header` describes; `None` for an entry that is none.
    fn file(
        &mut self,
        header: &Header,
        preceding: Preceding,
    ) -> Result<Option<TarFile>, SourceProblem> {
        let records = preceding.records.unwrap_or_else(|| self.global.clone());
        let path = records.sparse.name.clone().or_else(|| records.path.clone());
        let path = path.or(preceding.path).unwrap_or_else(|| header.path());
        let link = records.link.clone().or(preceding.link).unwrap_or_else(|| header.link());
        let mut stored = match records.size {
            Some(size) => size,
            None => header.size()?,
        };
        let mut map = None;
        let is_old_directory = path.ends_with(b"/");
        let kind = match header.entry_type() {
            0 | b'0' | b'7' if is_old_directory => EntryKind::Directory,
            0 | b'0' | b'7' | b'S' => {
                let (ranges, length) = if header.entry_type() == b'S' {
                    let length = header.real_size()?;
                    (Some(sparse::read_gnu(header, &mut self.input)?), Some(length))
                } else if records.sparse.is_version_1() {
                    let (ranges, map_bytes) = sparse::read_version_1(&mut self.input, stored)?;
                    stored -= map_bytes;
                    (Some(ranges), records.sparse.size)
                } else {
                    (records.sparse.map()?, records.sparse.size)
                };
                let size = length.unwrap_or(stored);
                if let Some(ranges) = ranges {
                    map = Some(sparse::checked(ranges, size, stored)?);
                }
                EntryKind::Regular { size }
            }
            b'1' => EntryKind::HardLink(archived_path(&link)?),
            b'2' => EntryKind::Symlink(symlink_target(link)?),
            b'3' | b'4' => {
                let is_character = header.entry_type() == b'3';
                let file_type =
                    if is_character { FileType::CharDevice } else { FileType::BlockDevice };
                let major = records.dev_major.map_or_else(|| header.dev_major(), Ok)?;
                let minor = records.dev_minor.map_or_else(|| header.dev_minor(), Ok)?;
                EntryKind::Node(NewNode { file_type, rdev: (major, minor) })
            }
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Node(NewNode { file_type: FileType::Fifo, rdev: (0, 0) }),
            b'D' => {
                // A list of the names in it, of an incremental archive.
                self.skip_padded(stored, stored)?;
                EntryKind::Directory
            }
            b'M' => return Err(SourceProblem::Refused("it goes on in another volume".to_owned())),
            other => {
                let letter = char::from(other).escape_default();
                let what = format!("an entry of the unknown type `{letter}`");
                return Err(SourceProblem::Refused(what));
            }
        };
        // Only the data of regular files follows the header, whatever it says.
        if !matches!(kind, EntryKind::Regular { .. }) {
            stored = 0;
        }
        let mtime = match records.mtime {
            Some(time) => time,
            None => Timestamp { secs: header.mtime()?, nanos: 0 },
        };
        let atime = match records.atime {
            None => header.gnu_atime().map(|secs| Timestamp { secs, nanos: 0 }),
            known => known,
        };
        let entry = BuildEntry {
            path: archived_path(&path)?,
            permissions: header.permissions()?,
            uid: records.uid.map_or_else(|| header.uid(), Ok)?,
            gid: records.gid.map_or_else(|| header.gid(), Ok)?,
            mtime,
            atime,
            xattrs: xattrs(records, &kind),
            kind,
            flags: FileFlags::empty(),
            has_other_flags: false,
            inode: None,
        };
        Ok(Some(TarFile { entry, stored, map }))
    }
}

/// The extended attributes that records give a file. The raw value of a list is preferred to its
/// text.
fn xattrs(records: Records, kind: &EntryKind) -> Vec<XattrPair> {
    if matches!(kind, EntryKind::HardLink(_)) {
        return Vec::new();
    }
    let Records { xattrs: mut named, acl_access, acl_default, .. } = records;
    for (name, text) in [(ACCESS, acl_access), (DEFAULT, acl_default)] {
        let Some(text) = text.filter(|text| !text.is_empty()) else { continue };
        if named.contains_key(name) {
            continue;
        }
        match acl_value(&text) {
            Some(value) => named.insert(name.to_vec(), value),
            None => named.insert(UNREADABLE_ACL.to_vec(), Vec::new()),
        };
    }
    let mut xattrs = named.into_iter().collect();
    drop_second_lists(&mut xattrs);
    xattrs
}

/// A path of the archive as an [`BuildEntry`] has it.
pub(super) fn archived_path(path: &[u8]) -> Result<Vec<u8>, SourceProblem> {
    if path.split(|&byte| byte == b'/').nth(PATH_NAMES_MAX).is_some() {
        let what = format!("a path of more than {PATH_NAMES_MAX} names");
        return Err(SourceProblem::Refused(what));
    }
    normal_path(path)
}

/// The target of a symbolic link, if it is one.
pub(super) fn symlink_target(target: Vec<u8>) -> Result<Vec<u8>, SourceProblem> {
    if target.is_empty() || target.contains(&0) {
        return Err(SourceProblem::Damaged("a symbolic link without a target".to_owned()));
    }
    Ok(target)
}

fn too_large() -> SourceProblem {
    SourceProblem::Damaged("a number that is too large".to_owned())
}

/// The data of the entry that the reader is at.
struct TarContents<'r, 'a> {
    reader: &'r mut TarReader<'a>,
    /// How much of it was not read yet.
    left: u64,
    /// Where what was not read yet belongs, the next range last.
    ranges: Vec<Range<u64>>,
}

impl<'r, 'a> TarContents<'r, 'a> {
    fn new(reader: &'r mut TarReader<'a>, stored: u64, map: Option<Vec<Range<u64>>>) -> Self {
        let mut ranges = match map {
            Some(map) => map,
            None => std::iter::once(0..stored).collect(),
        };
        ranges.reverse();
        Self { reader, left: stored, ranges }
    }
}

impl Contents for TarContents<'_, '_> {
    fn read_piece(&mut self, buf: &mut [u8]) -> Result<Option<(u64, usize)>> {
        let Some(range) = self.ranges.iter_mut().rfind(|range| !range.is_empty()) else {
            return Ok(None);
        };
        let (offset, len) = (range.start, piece_len(range.start, range.end, buf));
        range.start += len as u64;
        while self.ranges.last().is_some_and(Range::is_empty) {
            self.ranges.pop();
        }
        let piece = buf.get_mut(..len).unwrap_or_default();
        let read = self.reader.input.read_exact(piece);
        read.map_err(|error| self.reader.fail(error.into()))?;
        self.left -= len as u64;
        Ok(Some((offset, len)))
    }

    fn data_bytes(&mut self) -> Result<u64> {
        Ok(self.left)
    }
}
