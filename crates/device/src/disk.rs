//! From a file of the host to the disk in it: images and the files that they name.
//!
//! ```text
//!   file ──> image (qcow2, VMDK, zstd > raw, ...) ──> disk
//! ```
//!
//! A qcow2 can name any file of the host as its backing file. A guest that writes to a plain disk
//! can make the disk look like such a qcow2. So a backing file is opened only if the caller asks
//! for it, and a backing file that the qcow2 declares as raw is opened as raw. The caller can
//! declare the first file as raw too.
//!
//! The descriptor of a VMDK names the files with the data. It is a file of a few KiB, which no disk
//! of a guest is, but the user may have it from an untrusted source. So [`OtherFiles`] says which
//! of these files are opened.
//!
//! Another process may replace a file while we look at it. So we check the type of a file, and
//! whether it is open already, on the file that we opened.

mod contents;

use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::{
    BlockDevice, FileDevice, FileUse, ImageKind, Qcow2Header, Qcow2Options, Qcow2Snapshot,
    VmdkDescriptor, open_image, open_qcow2, open_vmdk,
};
pub use contents::{DiskContents, PartitionContents};

/// How many images may be nested, and how many may be in one chain of backing files.
const DEPTH_MAX: usize = 16;

/// What a file with a disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFormat {
    /// A plain disk, whatever its first bytes look like.
    Raw,
    /// An image. [`ImageKind::Vmdk`] is a descriptor too, if the file is one.
    Image(ImageKind),
}

/// Which files are opened that an image names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtherFiles {
    /// None.
    #[default]
    Never,
    /// Plain files beside the descriptor of a VMDK.
    Beside,
    /// All.
    All,
}

/// How a disk is opened.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct DiskOptions {
    /// Whether it is opened for writing.
    pub is_writable: bool,
    /// What the file is; with `None` its first bytes say it.
    pub format: Option<DiskFormat>,
    /// Which files are opened that an image names.
    pub others: OtherFiles,
    /// The name of the internal snapshot of a qcow2 that is read.
    pub snapshot: Option<String>,
}

/// A disk in a file.
pub struct OpenedDisk {
    /// The disk.
    pub device: Arc<dyn BlockDevice>,
    /// The image layers above the file, lowest first, such as `zstd` and `qcow2`.
    pub layers: Vec<String>,
    /// The names of the snapshots in the image.
    pub snapshots: Vec<String>,
    /// All files that were opened for the disk, backing files included.
    pub files: Vec<Metadata>,
}

/// Why a disk was not opened.
#[derive(Debug)]
pub enum DiskError {
    /// The host failed, or an image cannot be read.
    Io {
        /// The file.
        path: PathBuf,
        /// The kind of the image, if it was being opened.
        kind: Option<ImageKind>,
        /// What is wrong.
        source: io::Error,
    },
    /// Something is in the way.
    Obstacle {
        /// The file that has it.
        path: PathBuf,
        /// What it is.
        obstacle: DiskObstacle,
    },
}

/// What can keep a disk from being opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskObstacle {
    /// The image is its own backing file, directly or through others.
    BackingLoop,
    /// Too many images are inside of each other.
    TooDeep,
    /// Images of this kind are only read.
    OnlyRead(ImageKind),
    /// A sparse VMDK on a block device, which cannot grow.
    CannotGrow,
    /// The image needs this backing file, and [`OtherFiles`] excludes it.
    NeedsBacking(String),
    /// The backing file is no file.
    BackingIsNoFile(String),
    /// The descriptor names this file, and [`OtherFiles`] excludes it.
    NeedsExtent(OsString),
    /// The descriptor names this file, which is not there.
    ExtentMissing(OsString),
    /// The descriptor names this file twice, or itself.
    ExtentTwice(OsString),
    /// The image has no snapshots.
    NoSnapshots,
    /// The image has these snapshots, and not the one that was asked for.
    OtherSnapshots(Vec<String>),
    /// A snapshot can only be read.
    SnapshotOnlyRead,
}

type Result<T, E = DiskError> = std::result::Result<T, E>;

impl OpenedDisk {
    /// Opens the disk in the file at `path`.
    ///
    /// # Errors
    /// Those of the host, and the obstacles.
    pub fn open(path: &Path, options: &DiskOptions) -> Result<Self> {
        let mut layers = DiskLayers { options, files: Vec::new() };
        let opened = layers.open(path, options.is_writable, options.format)?;
        Ok(Self { files: layers.files, ..opened })
    }
}

fn obstacle(path: &Path, obstacle: DiskObstacle) -> DiskError {
    DiskError::Obstacle { path: path.to_path_buf(), obstacle }
}

/// Turns an error of the host about `path` into one of opening.
fn failed(path: &Path, kind: Option<ImageKind>) -> impl Fn(io::Error) -> DiskError {
    move |source| DiskError::Io { path: path.to_path_buf(), kind, source }
}

/// A disk while it is opened.
struct DiskLayers<'a> {
    options: &'a DiskOptions,
    /// The files that are open already: those above the one that is being opened, in the chain of
    /// backing files, among them.
    files: Vec<Metadata>,
}

impl DiskLayers<'_> {
    /// Opens a file and the images in it. `known` is the format of the file, if it is known.
    fn open(
        &mut self,
        path: &Path,
        is_writable: bool,
        known: Option<DiskFormat>,
    ) -> Result<OpenedDisk> {
        let failed = failed(path, None);
        let is_first = self.files.is_empty();
        let in_a_loop = || obstacle(path, DiskObstacle::BackingLoop);
        if self.files.len() >= DEPTH_MAX {
            return Err(obstacle(path, DiskObstacle::TooDeep));
        }
        let file = self.open_file(path, is_writable, false)?.ok_or_else(in_a_loop)?;
        let mut kind = match known {
            Some(DiskFormat::Raw) => None,
            Some(DiskFormat::Image(ImageKind::Vmdk))
                if ImageKind::detect(&file).map_err(&failed)?
                    == Some(ImageKind::VmdkDescriptor) =>
            {
                Some(ImageKind::VmdkDescriptor)
            }
            Some(DiskFormat::Image(kind)) => Some(kind),
            None => ImageKind::detect(&file).map_err(&failed)?,
        };
        let device: Arc<dyn BlockDevice> = match kind {
            Some(ImageKind::Qcow2) if is_writable => Arc::new(file.growing()),
            Some(ImageKind::Vmdk) if is_writable => Arc::new(growing_vmdk(file, path)?),
            _ => Arc::new(file),
        };
        let mut opened =
            OpenedDisk { device, layers: Vec::new(), snapshots: Vec::new(), files: Vec::new() };
        while let Some(found) = kind {
            if opened.layers.len() >= DEPTH_MAX {
                return Err(obstacle(path, DiskObstacle::TooDeep));
            }
            opened = self.open_one(path, opened, found, is_writable, is_first)?;
            // A decompressed stream may be an image; the inside of an image is a disk.
            kind = if found.is_stream() {
                ImageKind::detect(&*opened.device).map_err(&failed)?
            } else {
                None
            };
        }
        if is_first && opened.snapshots.is_empty() && self.options.snapshot.is_some() {
            return Err(obstacle(path, DiskObstacle::NoSnapshots));
        }
        Ok(opened)
    }

    /// Opens a file; `None` if it is open already. With `is_plain`, a link or a device is an error.
    fn open_file(
        &mut self,
        path: &Path,
        is_writable: bool,
        is_plain: bool,
    ) -> Result<Option<FileDevice>> {
        let failed = failed(path, None);
        let is_open = |at: &Metadata| self.files.iter().any(|file| identity(file) == identity(at));
        // The lock of the first writer would refuse a second open, even by this process.
        if path.metadata().is_ok_and(|metadata| is_open(&metadata)) {
            return Ok(None);
        }
        let usage = match (is_writable, self.options.is_writable) {
            (true, _) => FileUse::Write,
            // Data that we write above a backing file is right only while the backing file stays
            // unchanged.
            (false, true) => FileUse::Rely,
            (false, false) => FileUse::Read,
        };
        let open = if is_plain { FileDevice::open_plain } else { FileDevice::open_for };
        let file = open(path, usage).map_err(&failed)?;
        let metadata = file.metadata().map_err(&failed)?;
        if is_open(&metadata) {
            return Ok(None);
        }
        self.files.push(metadata);
        Ok(Some(file))
    }

    /// Opens the image in `opened`, a file that is the first one or not.
    fn open_one(
        &mut self,
        path: &Path,
        opened: OpenedDisk,
        kind: ImageKind,
        is_writable: bool,
        is_first: bool,
    ) -> Result<OpenedDisk> {
        if kind == ImageKind::Qcow2 {
            return self.open_qcow2(path, opened, is_writable, is_first);
        }
        if is_writable && !kind.is_written() {
            return Err(obstacle(path, DiskObstacle::OnlyRead(kind)));
        }
        let failed = failed(path, Some(kind));
        let below = opened.device.clone();
        let device = match kind {
            ImageKind::Vmdk => open_vmdk(below, is_writable).map_err(failed)?,
            ImageKind::VmdkDescriptor => self.open_extents(path, below, is_writable)?,
            _ => open_image(below, kind).map_err(failed)?,
        };
        let layers = [opened.layers.clone(), vec![kind.name().to_owned()]].concat();
        Ok(OpenedDisk { device, layers, ..opened })
    }

    /// Opens the disk in the files that the VMDK descriptor at `path` names. `below` holds the
    /// descriptor.
    fn open_extents(
        &mut self,
        path: &Path,
        below: Arc<dyn BlockDevice>,
        is_writable: bool,
    ) -> Result<Arc<dyn BlockDevice>> {
        let failed = failed(path, Some(ImageKind::Vmdk));
        let descriptor = VmdkDescriptor::read(&*below).map_err(&failed)?;
        let mut files: Vec<Arc<dyn BlockDevice>> = Vec::new();
        for file in &descriptor.files {
            let name = path.parent().unwrap_or(Path::new("")).join(&file.name);
            let may_open = match self.options.others {
                OtherFiles::Never => false,
                OtherFiles::Beside => is_beside(&name, &file.name),
                OtherFiles::All => true,
            };
            let refused =
                |why: fn(OsString) -> DiskObstacle| Err(obstacle(path, why(file.name.clone())));
            if !may_open {
                return refused(DiskObstacle::NeedsExtent);
            }
            if !name.exists() {
                return refused(DiskObstacle::ExtentMissing);
            }
            let is_plain = self.options.others != OtherFiles::All;
            let is_writable = is_writable && file.is_written;
            let Some(device) = self.open_file(&name, is_writable, is_plain)? else {
                return refused(DiskObstacle::ExtentTwice);
            };
            let is_growing = file.is_growing && is_writable;
            let device = if is_growing { growing_vmdk(device, &name)? } else { device };
            files.push(Arc::new(device));
        }
        descriptor.open(below, &files, is_writable).map_err(failed)
    }

    fn open_qcow2(
        &mut self,
        path: &Path,
        opened: OpenedDisk,
        is_writable: bool,
        is_first: bool,
    ) -> Result<OpenedDisk> {
        let failed = failed(path, Some(ImageKind::Qcow2));
        let header = Qcow2Header::read(&*opened.device).map_err(&failed)?;
        let snapshots: Vec<_> = header.snapshots.iter().map(|one| one.name.clone()).collect();
        let snapshot = self.wanted_snapshot(path, &header, is_writable, is_first)?;
        let mut layer = "qcow2".to_owned();
        let backing = match &header.backing {
            Some(name) => {
                let below = self.open_backing(path, name, header.backing_format.as_deref())?;
                let names = [std::slice::from_ref(name), &*below.layers].concat();
                layer = format!("qcow2({})", names.join(", "));
                Some(below.device)
            }
            None => None,
        };
        if let Some(name) = self.options.snapshot.as_ref().filter(|_| snapshot.is_some()) {
            layer.push(':');
            layer.push_str(name);
        }
        let options = Qcow2Options { is_writable, backing, snapshot };
        let device = open_qcow2(opened.device, &header, options).map_err(failed)?;
        let layers = [opened.layers, vec![layer]].concat();
        Ok(OpenedDisk { device, layers, snapshots, files: opened.files })
    }

    /// The snapshot that is read. Only the first file has it, and not its backing files.
    fn wanted_snapshot(
        &self,
        path: &Path,
        header: &Qcow2Header,
        is_writable: bool,
        is_first: bool,
    ) -> Result<Option<Qcow2Snapshot>> {
        let Some(name) = self.options.snapshot.as_ref().filter(|_| is_first) else {
            return Ok(None);
        };
        if is_writable {
            return Err(obstacle(path, DiskObstacle::SnapshotOnlyRead));
        }
        let there = || header.snapshots.iter().map(|one| one.name.clone()).collect();
        let found = header.snapshot(name).cloned();
        found.map(Some).ok_or_else(|| obstacle(path, DiskObstacle::OtherSnapshots(there())))
    }

    /// Opens the backing file `name` of the image at `path`.
    fn open_backing(
        &mut self,
        path: &Path,
        name: &str,
        format: Option<&str>,
    ) -> Result<OpenedDisk> {
        if self.options.others != OtherFiles::All {
            return Err(obstacle(path, DiskObstacle::NeedsBacking(name.to_owned())));
        }
        let file = name.strip_prefix("file:").unwrap_or(name);
        let directory = path.parent().unwrap_or(Path::new(""));
        // `join` keeps an absolute name as it is.
        let below: PathBuf = directory.join(file);
        if file.contains(':') && !below.exists() {
            return Err(obstacle(path, DiskObstacle::BackingIsNoFile(name.to_owned())));
        }
        let known = (format == Some("raw")).then_some(DiskFormat::Raw);
        self.open(&below, false, known)
    }
}

/// The file at `path`, which grows when the sparse VMDK in it is written.
fn growing_vmdk(file: FileDevice, path: &Path) -> Result<FileDevice> {
    if !file.metadata().map_err(failed(path, None))?.is_file() {
        return Err(obstacle(path, DiskObstacle::CannotGrow));
    }
    Ok(file.growing())
}

/// What two names of one file, or of one device, have in common.
fn identity(file: &Metadata) -> (u64, u64) {
    if file.rdev() == 0 { (file.dev(), file.ino()) } else { (file.rdev(), 0) }
}

/// Whether `name` is a plain file next to the image: `name` is not a path, and at `path` there is a
/// plain file or nothing.
fn is_beside(path: &Path, name: &OsStr) -> bool {
    Path::new(name).components().eq([Component::Normal(name)])
        && path.symlink_metadata().map_or(true, |there| there.is_file())
}
