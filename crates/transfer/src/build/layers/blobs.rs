//! The files that hold a container image: in a directory, or in a tar archive that is not packed.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use offshoot_vfs::escape::Escaped;
use serde::de::DeserializeOwned;

use super::digest::Sha256Digest;
use crate::build::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, SourceProblem, normal_path, split_path,
};
use crate::build::tar::read_tar;
use crate::build::unpack::{ArchiveInput, packing_of_file, require_not_interrupted};
use crate::{Result, Watcher};

/// The largest manifest, index or configuration. Registries take manifests of up to 4 MiB.
const JSON_BYTES_MAX: u64 = 4 << 20;

/// The most files of an archive that holds an image.
const MEMBERS_MAX: usize = 1 << 20;

/// How much memory the names of these files may take.
const MEMBERS_BYTES_MAX: usize = 64 << 20;

/// What one of them takes beside its name.
const MEMBER_BYTES: usize = 128;

/// The most links that lead from one name in an archive to a file.
const LINKS_MAX: usize = 8;

/// The files of an image, by name.
pub(super) enum Blobs {
    Directory(PathBuf),
    Archive { file: File, members: BTreeMap<Vec<u8>, ArchiveMember> },
}

/// A file of an archive.
pub(super) enum ArchiveMember {
    /// It begins at this byte and has so many.
    File { offset: u64, len: u64 },
    /// It is another name of this one.
    Link(Vec<u8>),
}

impl Blobs {
    /// Those in the archive at `path`.
    pub(super) fn in_archive(path: &Path, watcher: &dyn Watcher) -> Result<Self, SourceProblem> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            let what = "it is no regular file, and its layers are read from several places";
            return Err(SourceProblem::Refused(what.to_owned()));
        }
        if let Some(program) = packing_of_file(&file)?.program() {
            let what = format!("it is packed by {program}: unpack it first");
            return Err(SourceProblem::Refused(what));
        }
        let position = Rc::new(Cell::new(0));
        let mut input = Positioned { file: file.try_clone()?, position: position.clone(), watcher };
        let mut index = MemberIndex { position, members: BTreeMap::new(), bytes: 0 };
        let shown = path.as_os_str().as_bytes();
        match read_tar(&mut input, shown, watcher, &mut index) {
            Ok(_) => Ok(Self::Archive { file, members: index.members }),
            Err(crate::TransferFailure::Source(_, problem)) => Err(problem),
            Err(other) => Err(SourceProblem::Failed(other.to_string())),
        }
    }

    /// Opens the file `name`.
    pub(super) fn open(&self, name: &str) -> Result<Box<dyn Read>, SourceProblem> {
        let missing = || SourceProblem::Damaged(format!("{} is missing", Escaped(name.as_bytes())));
        match self {
            Self::Directory(dir) => match File::open(dir.join(name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(missing()),
                opened => Ok(Box::new(opened?)),
            },
            Self::Archive { file, members } => {
                let mut path = normal_path(name.as_bytes())?;
                for _ in 0..LINKS_MAX {
                    match members.get(&path) {
                        Some(ArchiveMember::File { offset, len }) => {
                            let end = offset.saturating_add(*len);
                            let file = file.try_clone()?;
                            return Ok(Box::new(FilePart { file, at: *offset, end }));
                        }
                        Some(ArchiveMember::Link(target)) => path.clone_from(target),
                        None => return Err(missing()),
                    }
                }
                Err(missing())
            }
        }
    }

    /// The JSON in the file `name`, which has this digest.
    pub(super) fn json<T: DeserializeOwned>(
        &self,
        name: &str,
        digest: Option<&Sha256Digest>,
    ) -> Result<T, SourceProblem> {
        let mut text = Vec::new();
        self.open(name)?.take(JSON_BYTES_MAX + 1).read_to_end(&mut text)?;
        if text.len() as u64 > JSON_BYTES_MAX {
            let what = format!("{} has more than 4 MiB", Escaped(name.as_bytes()));
            return Err(SourceProblem::Refused(what));
        }
        if digest.is_some_and(|digest| *digest != Sha256Digest::of(&text)) {
            return Err(wrong_digest(name));
        }
        serde_json::from_slice(&text).map_err(|error| {
            SourceProblem::Damaged(format!("{}: {error}", Escaped(name.as_bytes())))
        })
    }
}

pub(super) fn wrong_digest(name: &str) -> SourceProblem {
    let name = Escaped(name.as_bytes());
    SourceProblem::Damaged(format!("{name} has another digest than the one it is named by"))
}

/// A file that is read from a position that others know.
struct Positioned<'a> {
    file: File,
    position: Rc<Cell<u64>>,
    watcher: &'a dyn Watcher,
}

impl Read for Positioned<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        require_not_interrupted(self.watcher)?;
        let count = self.file.read_at(buf, self.position.get())?;
        self.position.set(self.position.get() + count as u64);
        Ok(count)
    }
}

impl ArchiveInput for Positioned<'_> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let next = self.position.get().checked_add(bytes);
        self.position.set(next.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Notes where the files of an archive are.
struct MemberIndex {
    position: Rc<Cell<u64>>,
    members: BTreeMap<Vec<u8>, ArchiveMember>,
    /// The memory that they take, about.
    bytes: usize,
}

impl EntrySink for MemberIndex {
    fn put(&mut self, entry: BuildEntry, _: &mut dyn Contents) -> Result {
        let member = match entry.kind {
            EntryKind::Regular { size } => {
                ArchiveMember::File { offset: self.position.get(), len: size }
            }
            EntryKind::HardLink(target) => ArchiveMember::Link(target),
            // `docker save` once wrote equal layers as links: `../HEX/layer.tar`.
            EntryKind::Symlink(target) => {
                let (dir, _) = split_path(&entry.path);
                let (up, target) = match target.strip_prefix(b"../") {
                    Some(target) => (split_path(dir).0, target.to_vec()),
                    None => (dir, target),
                };
                let Ok(target) = normal_path(&[up, b"/", &target].concat()) else { return Ok(()) };
                ArchiveMember::Link(target)
            }
            EntryKind::Directory | EntryKind::Node(_) => return Ok(()),
        };
        let target_len = if let ArchiveMember::Link(target) = &member { target.len() } else { 0 };
        self.bytes += entry.path.len() + target_len + MEMBER_BYTES;
        if self.members.len() >= MEMBERS_MAX || self.bytes > MEMBERS_BYTES_MAX {
            let what = "an archive of too many files, or of too long names, for one with an image";
            return Err(SourceProblem::Refused(what.to_owned()).at(b""));
        }
        self.members.insert(entry.path, member);
        Ok(())
    }
}

/// A part of a file.
struct FilePart {
    file: File,
    at: u64,
    end: u64,
}

impl Read for FilePart {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let len = buf.len().min(left);
        let count = self.file.read_at(buf.get_mut(..len).unwrap_or_default(), self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}
