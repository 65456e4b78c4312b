//! Manifests as sources: text that lists files, and a directory that has their contents.
//!
//! | part | what it does |
//! |---|---|
//! | [`mtree`] | the form of mtree(5) |
//! | [`composefs`] | the form of composefs-dump(5) |
//! | [`contents`] | the directory with the contents, which nothing leads out of |
//! | [`digest`] | the digests that a manifest gives for contents |
//! | [`lines`] | the lines of a manifest, one at a time |
//!
//! A manifest is read line by line and not kept in memory, and what one line may take has a bound.
//! It says where in the contents directory data is, so it is not trusted there: the kernel resolves
//! each path with that directory as the root.

mod composefs;
mod contents;
mod digest;
mod lines;
mod mtree;

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use offshoot_vfs::Error;
use offshoot_vfs::escape::Escaped;

use super::directory::HostData;
use super::entry::{BuildEntry, Contents, EntrySink, PIECE_BYTES, SourceProblem};
use super::unpack::{self, ArchivePacking, Pipe, packing_of_file, unpack, unpack_file};
use super::{BuildOptions, is_pipe};
use crate::copy::Original;
use crate::{Result, TransferFailure, Watcher};
use contents::ContentsDirectory;
use digest::{ExpectedDigest, Verified};
use lines::ManifestLines;

/// What stands between the manifest and its contents in the name of a source.
const CONTENTS: &[u8] = b",contents=";

/// The form of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManifestForm {
    /// That of mtree(5).
    Mtree,
    /// That of composefs-dump(5).
    Composefs,
}

/// A manifest, and a directory with the contents of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileManifest {
    /// The form of the file.
    pub form: ManifestForm,
    /// The file that lists files.
    pub path: PathBuf,
    /// The directory with their contents, if they have any.
    pub contents: Option<PathBuf>,
}

impl FileManifest {
    /// The manifest that `text` names: the form, a colon, the file, and if there are contents
    /// `,contents=` and their directory.
    #[must_use]
    pub fn named(text: &OsStr) -> Option<Self> {
        let text = text.as_bytes();
        let (form, rest) = match text.strip_prefix(b"mtree:") {
            Some(rest) => (ManifestForm::Mtree, rest),
            None => (ManifestForm::Composefs, text.strip_prefix(b"composefs:")?),
        };
        let at = rest.windows(CONTENTS.len()).rposition(|window| window == CONTENTS);
        let path_of = |bytes: &[u8]| PathBuf::from(std::ffi::OsString::from_vec(bytes.to_vec()));
        let (path, contents) = match at {
            Some(at) => (rest.get(..at)?, Some(path_of(rest.get(at + CONTENTS.len()..)?))),
            None => (rest, None),
        };
        Some(Self { form, path: path_of(path), contents })
    }

    /// The file that lists files.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives `sink` all files of the manifest.
    pub(super) fn read(
        &self,
        options: &BuildOptions,
        watcher: &dyn Watcher,
        sink: &mut dyn EntrySink,
    ) -> Result {
        let shown = self.path.as_os_str().as_bytes();
        let input = self.open(watcher).map_err(|problem| problem.at(shown))?;
        let contents = match &self.contents {
            Some(path) => Some(ContentsDirectory::open(path)?),
            None => None,
        };
        let reading = ManifestReading {
            lines: ManifestLines::new(input),
            name: shown,
            contents: contents.as_ref(),
            options,
            watcher,
            chunk: Vec::new(),
        };
        match self.form {
            ManifestForm::Mtree => mtree::read_mtree(reading, sink),
            ManifestForm::Composefs => composefs::read_composefs(reading, sink),
        }
    }

    /// Opens the manifest, packed or not.
    fn open<'a>(
        &self,
        watcher: &'a dyn Watcher,
    ) -> Result<Box<dyn unpack::ArchiveInput + 'a>, SourceProblem> {
        let file = File::open(&self.path)?;
        if is_pipe(&file.metadata()?) {
            return unpack(Pipe::new(file, watcher), watcher);
        }
        match packing_of_file(&file) {
            Err(SourceProblem::Refused(_)) | Ok(ArchivePacking::None) => {
                Ok(unpack::plain_file(file, watcher))
            }
            _ => unpack_file(file, watcher),
        }
    }
}

/// A manifest while it is read.
struct ManifestReading<'a> {
    lines: ManifestLines<'a>,
    /// The name of the manifest for messages.
    name: &'a [u8],
    contents: Option<&'a ContentsDirectory>,
    options: &'a BuildOptions,
    watcher: &'a dyn Watcher,
    /// Where files are searched for zeros.
    chunk: Vec<u8>,
}

impl ManifestReading<'_> {
    /// The failure that `problem` is in the line that was read last.
    fn at_line(&self, problem: SourceProblem) -> TransferFailure {
        let line = self.lines.number();
        let told = match problem {
            SourceProblem::Damaged(what) | SourceProblem::Refused(what) => {
                SourceProblem::Refused(format!("line {line}: {what}"))
            }
            other => other,
        };
        told.at(self.name)
    }

    /// What messages call the file at `path`.
    fn shown(&self, path: &[u8]) -> Vec<u8> {
        [self.name, b": ", path].concat()
    }

    /// Gives the sink a regular file, whose data must have these digests.
    fn put_verified(
        &self,
        entry: BuildEntry,
        data: &mut dyn Contents,
        digests: &[ExpectedDigest],
        size: u64,
        sink: &mut dyn EntrySink,
    ) -> Result {
        let shown = self.shown(&entry.path);
        let mut data = Verified::new(data, digests, size, &shown, self.watcher);
        sink.put(entry, &mut data)?;
        data.verify_untouched()
    }

    /// Gives the sink a regular file, whose data is at `place` in the directory with the contents.
    fn put_contents(
        &mut self,
        entry: BuildEntry,
        place: &[u8],
        digests: &[ExpectedDigest],
        size: u64,
        sink: &mut dyn EntrySink,
    ) -> Result {
        let shown = self.shown(&entry.path);
        let refused = |what: String| Err(SourceProblem::Refused(what).at(&shown));
        let Some(contents) = self.contents else {
            let what = "its data is in no directory: name one with `,contents=DIRECTORY` behind \
                        the manifest";
            return refused(what.to_owned());
        };
        let Some(file) = contents.open_regular(place)? else {
            let directory = Escaped(contents.path());
            return refused(format!("its data is not in the directory {directory}"));
        };
        let actual = file.attr().size;
        if actual != size {
            return refused(format!("its data has {actual} bytes, and the manifest says {size}"));
        }
        let fail = |error: &Error| contents.failed(place, error);
        let mut chunk = std::mem::take(&mut self.chunk);
        let finds_zeros = self.options.finds_zeros;
        if finds_zeros {
            chunk.resize(PIECE_BYTES, 0);
        }
        let data = HostData { file: &file, size, watcher: self.watcher, fail: &fail };
        let given = data.give(finds_zeros.then_some(&mut chunk[..]), |data| {
            self.put_verified(entry, data, digests, size, sink)
        });
        self.chunk = chunk;
        given
    }

    fn require_not_interrupted(&self) -> Result {
        if self.watcher.is_interrupted() { Err(TransferFailure::Interrupted) } else { Ok(()) }
    }
}

/// The byte that the first two of these are as hexadecimal digits, and what is behind them.
fn hex_byte(text: &[u8]) -> Option<(u8, &[u8])> {
    let (digits, rest) = text.split_first_chunk::<2>()?;
    let digits = std::str::from_utf8(digits).ok()?;
    let byte = u8::from_str_radix(digits, 16).ok().filter(|_| !digits.starts_with('+'))?;
    Some((byte, rest))
}
