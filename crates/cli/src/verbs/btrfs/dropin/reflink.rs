//! `--reflink`: the image shares the data of files with the source, where both are on one
//! filesystem of the host that shares blocks.
//!
//! The volume is filled as always. Then `copy_file_range` is called from each file of the source to
//! the places of the image where its data lies: the host makes them share their blocks where it
//! can, and elsewhere it copies the same bytes once more. The last sector of a file that is not
//! full stays a copy.
//!
//! A source that changes after the volume was filled would put bytes there that the checksums do
//! not cover. So each file is read once more through its checksums afterwards, and ends the run if
//! it differs. That reads one copy of the data, so the source is asked for one copy alone, and
//! every other one is shared with that. Files without checksums are not shared.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::path::at_path;
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{self as vfs, Errno, FileFlags, FileId, FileSystemMut, FileType, Volume};
use rustix::fs::{OFlags, copy_file_range, ioctl_ficlone};

use super::devices::failed;
use crate::exit::{Result, VerbFailure};
use crate::interrupt::is_interrupted;

/// The unit in which blocks are shared: a sector of the volume, and a block of the host.
const UNIT: u64 = 4096;

/// How much of a file is read at a time to verify it.
const PIECE_BYTES: usize = 1 << 20;

/// Refuses a source and an image that cannot share blocks. It tries that with the first file of the
/// source and a file without a name beside the image.
pub(super) fn require_sharing(top: &Path, image: &Path) -> Result {
    let Some(source) = first_file(top)? else { return Ok(()) };
    let directory = directory_of(image).map_err(|error| failed(image, error))?;
    let trial = tempfile::tempfile_in(&directory).map_err(|error| failed(&directory, error))?;
    let opened = File::open(&source).map_err(|error| failed(&source, error))?;
    ioctl_ficlone(&trial, &opened).map_err(|errno| {
        let (source, image) = (source.display(), image.display());
        VerbFailure::Refused(format!(
            "--reflink: {source} and {image} cannot share blocks ({}): leave --reflink out, and \
             the data is copied",
            vfs::OsReason(&io::Error::from(errno))
        ))
    })
}

/// The directory in which the image is or will be, behind the links that lead to it.
fn directory_of(image: &Path) -> io::Result<PathBuf> {
    match image.canonicalize() {
        Ok(image) => Ok(image.parent().unwrap_or(Path::new("/")).to_path_buf()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let parent = image.parent().filter(|parent| !parent.as_os_str().is_empty());
            parent.unwrap_or(Path::new(".")).canonicalize()
        }
        Err(error) => Err(error),
    }
}

/// The first regular file with data that is found in a directory.
fn first_file(top: &Path) -> Result<Option<PathBuf>> {
    let mut directories = vec![top.to_path_buf()];
    while let Some(directory) = directories.pop() {
        let fail = |error| failed(&directory, error);
        for entry in fs::read_dir(&directory).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let metadata = entry.metadata().map_err(|error| failed(&entry.path(), error))?;
            if metadata.is_dir() {
                directories.push(entry.path());
            } else if metadata.is_file() && metadata.len() >= UNIT {
                return Ok(Some(entry.path()));
            }
        }
    }
    Ok(None)
}

/// Makes the image at `path`, whose volume is on `device`, share the data of files with the source
/// `top`, from which it was filled.
pub(super) fn share(top: &Path, path: &Path, device: Arc<dyn BlockDevice>) -> Result {
    let volume = BtrfsVolume::open(vec![device], &EngineOptions::default())?;
    let files = volume.clone().files(TreeId::FS.0)?;
    let image = OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| failed(path, error))?;
    let chunks = volume.chunks().collect();
    let mut walked = SharedFiles { top, image, volume, chunks, files: &*files, failure: None };
    walk(&*files, files.root(), (), DEPTH_MAX, &mut walked);
    if let Some(failure) = walked.failure {
        return Err(failure);
    }
    walked.image.sync_all().map_err(|error| failed(path, error))
}

/// A walk through the volume.
struct SharedFiles<'a> {
    top: &'a Path,
    image: File,
    volume: Arc<BtrfsVolume>,
    chunks: Vec<Chunk>,
    files: &'a dyn FileSystemMut,
    /// Why it ended.
    failure: Option<VerbFailure>,
}

/// A range of a file that is stored as it is.
struct StoredRange {
    offset: u64,
    logical: Logical,
    len: u64,
}

impl SharedFiles<'_> {
    fn share_file(&self, entry: &WalkedFile<'_>) -> Result {
        let file = entry.attr.file;
        let fail = |error| at_path(error, entry.path);
        if self.files.flags(file).map_err(fail)?.contains(FileFlags::NODATACOW) {
            return Ok(());
        }
        let mut options = OpenOptions::new();
        options.read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
        // What cannot be opened any more stays a copy.
        let Ok(source) = options.open(self.top.join(OsStr::from_bytes(entry.path))) else {
            return Ok(());
        };
        let whole = entry.attr.size / UNIT * UNIT;
        for StoredRange { offset, logical, len } in self.ranges(file).map_err(fail)? {
            let len = len.min(whole.saturating_sub(offset));
            self.share_range(&source, offset, logical, len)?;
        }
        self.verify(file).map_err(|error| fail(error).into())
    }

    /// The extents of a file, as far as their data is stored as it is.
    fn ranges(&self, file: FileId) -> vfs::Result<Vec<StoredRange>> {
        let mut ranges = Vec::new();
        let mut malformed = None;
        let start = Key::new(file.ino, ItemType::EXTENT_DATA, 0);
        self.volume.for_each_item(self.volume.tree(TreeId(file.dev))?, start, |key, data| {
            if key.objectid != file.ino || key.item_type != ItemType::EXTENT_DATA {
                return ControlFlow::Break(());
            }
            let extent = match FileExtent::parse(data) {
                Ok(extent) => extent,
                Err(error) => {
                    malformed = Some(error);
                    return ControlFlow::Break(());
                }
            };
            if let FileExtentBody::Extent {
                disk_bytenr, offset, num_bytes, is_preallocated, ..
            } = extent.body
                && extent.compression == Compression::None
                && !is_preallocated
            {
                let logical = Logical(disk_bytenr.0.saturating_add(offset));
                ranges.push(StoredRange { offset: key.offset, logical, len: num_bytes });
            }
            ControlFlow::Continue(())
        })?;
        match malformed {
            Some(error) => Err(vfs::Error::corrupt_at(error.structure, file.ino, error.problem)),
            None => Ok(ranges),
        }
    }

    /// Shares `len` bytes at `offset` of the source with the first copy of the data at `logical`,
    /// and that with the others.
    fn share_range(&self, source: &File, offset: u64, logical: Logical, len: u64) -> Result {
        let chunk = self.chunks.iter().find(|chunk| (chunk.start..chunk.end()).contains(&logical));
        let Some(chunk) = chunk else { return Ok(()) };
        let mut done = 0;
        while done < len {
            let Some(run) = chunk.run(Logical(logical.0 + done), len - done) else { break };
            let mut first = None;
            for (_, place) in run.copies {
                match first {
                    None => self.share_run(source, offset + done, place.0, run.len)?,
                    Some(first) => self.share_run(&self.image, first, place.0, run.len)?,
                }
                first.get_or_insert(place.0);
            }
            done += run.len;
        }
        Ok(())
    }

    fn share_run(&self, source: &File, from: u64, to: u64, len: u64) -> Result {
        let (mut from, mut to, end) = (from, to, from + len);
        while from < end {
            let rest = usize::try_from(end - from).unwrap_or(usize::MAX);
            match copy_file_range(source, Some(&mut from), &self.image, Some(&mut to), rest) {
                // The source is shorter by now, which the checksums show.
                Ok(0) => break,
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::IO)) => {
                    return Err(VerbFailure::Host("sharing data".to_owned(), errno.into()));
                }
                // What the host cannot share here stays a copy.
                Err(_) => break,
            }
        }
        Ok(())
    }

    /// Reads all of a file, which compares it with its checksums.
    fn verify(&self, file: FileId) -> vfs::Result<()> {
        let mut buf = vec![0; PIECE_BYTES];
        let mut at = 0;
        loop {
            let read = self.files.read(file, at, &mut buf)?;
            if read == 0 {
                return Ok(());
            }
            at += read as u64;
        }
    }
}

impl WalkVisitor for SharedFiles<'_> {
    type Directory = ();

    fn enter(&mut self, (): &(), _: &WalkedFile<'_>) -> Option<()> {
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        if entry.attr.file_type == FileType::Regular
            && entry.attr.size >= UNIT
            && let Err(failure) = self.share_file(entry)
        {
            self.failure = Some(failure);
        }
    }

    fn failed(&mut self, path: &[u8], error: &vfs::Error) {
        let what = String::from_utf8_lossy(path).into_owned();
        let error = io::Error::other(error.to_string());
        self.failure.get_or_insert(VerbFailure::Host(what, error));
    }

    fn is_stopped(&self) -> bool {
        self.failure.is_some() || is_interrupted()
    }
}
