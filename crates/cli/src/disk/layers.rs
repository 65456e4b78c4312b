//! From a file of the host to the disk in it: images and their backing files.
//!
//! A qcow2 can name any file of the host as its backing file. A guest that writes to a plain disk
//! can make the disk look like such a qcow2. So a backing file is opened only if the command line
//! asks for it, and a backing file that the qcow2 declares as raw is opened as raw. The file on the
//! command line can be declared as raw too, with `--image-format raw`.
//!
//! The descriptor of a VMDK names the files with the data. It is a file of a few KiB, which no disk
//! of a guest is, but the user may have it from an untrusted source. So we open a plain file next
//! to the descriptor. Any other file that it names (by a path, through a link, a device) we open
//! only if the command line asks for it.
//!
//! Another process may replace a file while we look at it. So we check the type of a file, and
//! whether it is open already, on the file that we opened.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use offshoot_device::{
    BlockDevice, FileDevice, FileUse, ImageKind, Qcow2Header, Qcow2Options, VmdkDescriptor,
    open_image, open_qcow2, open_vmdk,
};
use offshoot_transfer::host::{HostId, host_id_of, host_id_of_file};

use crate::args::{ImageFormat, LayerArguments};
use crate::exit::{Failure, Result};
use crate::output::Escaped;
use crate::session::Access;

/// How many images may be nested, and how many may be in one chain of backing files.
const DEPTH_MAX: usize = 16;

/// The disk in a file.
pub(super) struct Layered {
    /// The disk.
    pub(super) device: Arc<dyn BlockDevice>,
    /// The image layers, outermost first.
    pub(super) layers: Vec<String>,
    /// The names of the snapshots in the image.
    pub(super) snapshots: Vec<String>,
    /// All files that were opened for the disk, backing files included.
    pub(super) files: Vec<HostId>,
}

/// Opens the disk in the file at `path`.
pub(super) fn open_layers(
    path: &Path,
    access: Access,
    arguments: &LayerArguments,
) -> Result<Layered> {
    let mut layers = Layers { arguments, top: access, seen: Vec::new() };
    let layered = layers.open(path, access, arguments.image_format)?;
    Ok(Layered { files: layers.seen, ..layered })
}

struct Layers<'a> {
    arguments: &'a LayerArguments,
    /// The access to the file on the command line.
    top: Access,
    /// The files above the one that is being opened, in the chain of backing files.
    seen: Vec<HostId>,
}

impl Layers<'_> {
    /// Opens a file and the images in it. `known` is the format of the file, if it is known.
    fn open(&mut self, path: &Path, access: Access, known: Option<ImageFormat>) -> Result<Layered> {
        let failed = |error| Failure::Host(path.display().to_string(), error);
        if self.seen.len() >= DEPTH_MAX {
            return Err(in_a_loop(path));
        }
        let file = self.open_file(path, access, false)?.ok_or_else(|| in_a_loop(path))?;
        let kind = match known {
            // `vmdk` names two formats: the descriptor and the sparse image.
            Some(ImageFormat::Vmdk)
                if ImageKind::detect(&file).map_err(failed)? == Some(ImageKind::VmdkDescriptor) =>
            {
                Some(ImageKind::VmdkDescriptor)
            }
            Some(format) => format.kind(),
            None => ImageKind::detect(&file).map_err(failed)?,
        };
        let device: Arc<dyn BlockDevice> = match kind {
            Some(ImageKind::Qcow2) if access == Access::Write => Arc::new(file.growing()),
            Some(ImageKind::Vmdk) if access == Access::Write => Arc::new(growing_vmdk(file, path)?),
            _ => Arc::new(file),
        };
        let mut layered =
            Layered { device, layers: Vec::new(), snapshots: Vec::new(), files: Vec::new() };
        let mut kind = kind;
        while let Some(found) = kind {
            if layered.layers.len() >= DEPTH_MAX {
                let what = format!("{}: too many images inside of each other", path.display());
                return Err(Failure::Refused(what));
            }
            layered = self.open_one(path, layered, found, access)?;
            // A decompressed stream may be an image; the inside of an image is a disk.
            kind = if found.is_stream() {
                ImageKind::detect(&*layered.device).map_err(failed)?
            } else {
                None
            };
        }
        if layered.snapshots.is_empty() && self.arguments.image_snapshot.is_some() {
            let what = format!("{} has no image snapshots", path.display());
            return Err(Failure::Usage(what));
        }
        Ok(layered)
    }

    /// Opens a file; `None` if it is open already. With `is_plain`, a link or a device is an error.
    fn open_file(
        &mut self,
        path: &Path,
        access: Access,
        is_plain: bool,
    ) -> Result<Option<FileDevice>> {
        let failed = |error| Failure::Host(path.display().to_string(), error);
        // The lock of the first writer would refuse a second open, even by this process.
        if host_id_of_file(path).is_some_and(|host| self.seen.contains(&host)) {
            return Ok(None);
        }
        let usage = match (access, self.top) {
            (Access::Write, _) => FileUse::Write,
            // Data that we write above a backing file is right only while the backing file stays
            // unchanged.
            (Access::Read, Access::Write) => FileUse::Rely,
            (Access::Read, Access::Read) => FileUse::Read,
        };
        let open = if is_plain { FileDevice::open_plain } else { FileDevice::open_for };
        let file = open(path, usage).map_err(failed)?;
        let host = host_id_of(&file.metadata().map_err(failed)?);
        if self.seen.contains(&host) {
            return Ok(None);
        }
        self.seen.push(host);
        Ok(Some(file))
    }

    /// Opens the image in `layered`.
    fn open_one(
        &mut self,
        path: &Path,
        layered: Layered,
        kind: ImageKind,
        access: Access,
    ) -> Result<Layered> {
        let failed = |error| Failure::Host(format!("{}: {kind}", path.display()), error);
        if kind == ImageKind::Qcow2 {
            return self.open_qcow2(path, layered, access);
        }
        if access == Access::Write && !kind.is_written() {
            let shown = path.display();
            let way = if kind.is_stream() {
                format!("unpack it ({kind} -d), and name the file that this makes")
            } else {
                format!("make an image that is: qemu-img convert -O qcow2 {shown} {shown}.qcow2")
            };
            let what = format!("{shown}: {kind} is only read here, and not written: {way}");
            return Err(Failure::Refused(what));
        }
        let below = layered.device.clone();
        let device = match kind {
            ImageKind::Vmdk => open_vmdk(below, access == Access::Write).map_err(failed)?,
            ImageKind::VmdkDescriptor => self.open_extents(path, below, access)?,
            _ => open_image(below, kind).map_err(failed)?,
        };
        let layers = [layered.layers.clone(), vec![kind.name().to_owned()]].concat();
        Ok(Layered { device, layers, ..layered })
    }

    /// Opens the disk in the files that the VMDK descriptor at `path` names. `below` holds the
    /// descriptor.
    fn open_extents(
        &mut self,
        path: &Path,
        below: Arc<dyn BlockDevice>,
        access: Access,
    ) -> Result<Arc<dyn BlockDevice>> {
        let failed = |error| Failure::Host(format!("{}: vmdk", path.display()), error);
        let descriptor = VmdkDescriptor::read(&*below).map_err(failed)?;
        let mut files: Vec<Arc<dyn BlockDevice>> = Vec::new();
        for file in &descriptor.files {
            let name = path.parent().unwrap_or(Path::new("")).join(&file.name);
            let refused = |why: &str| {
                let (shown, file) = (path.display(), Escaped(file.name.as_bytes()));
                Err(Failure::Refused(format!("{shown}: its data is in {file}, which {why}")))
            };
            if !self.arguments.backing && !is_beside(&name, &file.name) {
                return refused(
                    "is no plain file beside it, and is only opened when you say so: --backing",
                );
            }
            if !name.exists() {
                return refused("is not there");
            }
            let access = if file.is_written { access } else { Access::Read };
            let Some(device) = self.open_file(&name, access, !self.arguments.backing)? else {
                return refused(
                    "is the descriptor itself, or another name of a file that it names",
                );
            };
            let is_growing = file.is_growing && access == Access::Write;
            let device = if is_growing { growing_vmdk(device, &name)? } else { device };
            files.push(Arc::new(device));
        }
        descriptor.open(below, &files, access == Access::Write).map_err(failed)
    }

    fn open_qcow2(&mut self, path: &Path, layered: Layered, access: Access) -> Result<Layered> {
        let failed = |error| Failure::Host(format!("{}: qcow2", path.display()), error);
        let header = Qcow2Header::read(&*layered.device).map_err(failed)?;
        let snapshots: Vec<_> = header.snapshots.iter().map(|one| one.name.clone()).collect();
        let snapshot = match &self.arguments.image_snapshot {
            Some(_) if access == Access::Write => {
                let what = format!("{}: an image snapshot can only be read", path.display());
                return Err(Failure::Usage(what));
            }
            // The option selects a snapshot of the image on the command line, not of its backing
            // files.
            Some(name) if self.seen.len() == 1 => {
                let Some(snapshot) = header.snapshot(name) else {
                    let what = if snapshots.is_empty() {
                        "it has none".to_owned()
                    } else {
                        format!("it has {}", snapshots.join(", "))
                    };
                    let shown = path.display();
                    let what = format!("{shown}: no image snapshot is called {name}: {what}");
                    return Err(Failure::Usage(what));
                };
                Some(snapshot.clone())
            }
            _ => None,
        };
        let mut layer = "qcow2".to_owned();
        let backing = match &header.backing {
            Some(name) => {
                let below = self.open_backing(path, name, header.backing_format.as_deref())?;
                layer = format!(
                    "qcow2({})",
                    [std::slice::from_ref(name), &*below.layers].concat().join(", ")
                );
                Some(below.device)
            }
            None => None,
        };
        if let Some(name) = &self.arguments.image_snapshot
            && snapshot.is_some()
        {
            layer.push(':');
            layer.push_str(name);
        }
        let options = Qcow2Options { is_writable: access == Access::Write, backing, snapshot };
        let device = open_qcow2(layered.device, &header, options).map_err(failed)?;
        let layers = [layered.layers, vec![layer]].concat();
        Ok(Layered { device, layers, snapshots, files: layered.files })
    }

    /// Opens the backing file `name` of the image at `path`.
    fn open_backing(&mut self, path: &Path, name: &str, format: Option<&str>) -> Result<Layered> {
        let shown = path.display();
        if !self.arguments.backing {
            let what = format!(
                "{shown}: it needs its backing file {name}, which is only opened when you say so: \
                 --backing"
            );
            return Err(Failure::Refused(what));
        }
        let file = name.strip_prefix("file:").unwrap_or(name);
        let directory = path.parent().unwrap_or(Path::new(""));
        // `join` keeps an absolute name as it is.
        let below: PathBuf = directory.join(file);
        if file.contains(':') && !below.exists() {
            let what = format!(
                "{shown}: its backing file {name} is no file: qemu-img convert -O qcow2 {shown} \
                 {shown}.qcow2 makes an image without one"
            );
            return Err(Failure::Refused(what));
        }
        let arguments = LayerArguments { image_snapshot: None, ..self.arguments.clone() };
        let seen = std::mem::take(&mut self.seen);
        let mut layers = Layers { arguments: &arguments, top: self.top, seen };
        let known = (format == Some("raw")).then_some(ImageFormat::Raw);
        let opened = layers.open(&below, Access::Read, known);
        self.seen = layers.seen;
        opened
    }
}

/// The file at `path`, which grows when the sparse VMDK in it is written.
fn growing_vmdk(file: FileDevice, path: &Path) -> Result<FileDevice> {
    let shown = path.display();
    let metadata = file.metadata().map_err(|error| Failure::Host(shown.to_string(), error))?;
    if !metadata.is_file() {
        let what = format!(
            "{shown}: a sparse VMDK on a block device cannot become longer, so it is not written: \
             copy it into a file (cp {shown} FILE), and name that"
        );
        return Err(Failure::Refused(what));
    }
    Ok(file.growing())
}

/// The message about an image that is its own backing file, directly or through others.
fn in_a_loop(path: &Path) -> Failure {
    Failure::Refused(format!("{}: its backing files go round in a loop", path.display()))
}

/// Whether `name` is a plain file next to the image: `name` is not a path, and at `path` there is a
/// plain file or nothing.
fn is_beside(path: &Path, name: &OsStr) -> bool {
    Path::new(name).components().eq([Component::Normal(name)])
        && path.symlink_metadata().map_or(true, |there| there.is_file())
}
