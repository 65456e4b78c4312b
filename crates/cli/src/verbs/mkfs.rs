//! `offshoot mkfs`: makes a volume of any format.

mod arguments;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;

use offshoot_btrfs::{MkfsOptions, mkfs};
use offshoot_device::{BlockDevice, FileDevice, ImageKind};
use offshoot_vfs::{Errno, Error};
use offshoot_xfs::{XfsMkfsOptions, mkfs_xfs};
use serde::Serialize;
use uuid::Uuid;

use crate::args::LayerArguments;
use crate::disk::{DiskName, MemberDisk, in_common, refuse_shared};
use crate::edit::host_id;
use crate::exit::{Result, VerbFailure};
use crate::output::{human_size, write_line};
use crate::verbs::{btrfs, xfs};
pub(crate) use arguments::{
    MKFS_HELP, MkfsArguments, NewVolumeArguments, NewVolumeFormat, XfsMkfsArguments,
    parse_checksum, parse_node_size, parse_owner, parse_profile,
};

/// The new volume.
#[derive(Serialize)]
struct NewVolumeInfo {
    uuid: Uuid,
    total_bytes: u64,
    devices: Vec<String>,
}

pub(super) fn run(arguments: &MkfsArguments, out: &mut dyn Write) -> Result {
    let volume = &arguments.volume;
    if volume.format == NewVolumeFormat::Xfs && arguments.devices.len() > 1 {
        return Err(VerbFailure::Usage("an XFS volume has one device".to_owned()));
    }
    let owner = volume.root_owner.unwrap_or_else(caller);
    let options = NewVolumeOptions::of(volume, owner, arguments.force)?;
    let layers = LayerArguments {
        offset: arguments.offset,
        image_format: arguments.image_format,
        backing: arguments.backing,
        image_snapshot: None,
    };
    let mut images = NewImages::default();
    let mut disks = Vec::new();
    if layers.offset.is_some() && arguments.devices.len() > 1 {
        // `--device` searches a further member at the beginning of its device, not at the offset.
        let message = "--offset takes one device".to_owned();
        return Err(VerbFailure::Usage(message));
    }
    if arguments.size.is_some() {
        refuse_same(&arguments.devices)?;
    }
    for path in &arguments.devices {
        disks.push(images.open(path, arguments.size, &layers)?);
    }
    refuse_shared(&disks)?;
    let devices: Vec<_> = disks.into_iter().map(|disk| disk.device).collect();
    let uuid = options.make(&devices).map_err(usage)?;
    images.keep();
    let made = NewVolumeInfo {
        uuid,
        total_bytes: devices.iter().map(|device| device.size_bytes()).sum(),
        devices: devices.iter().map(|device| device.name().to_owned()).collect(),
    };
    if arguments.json {
        return Ok(write_line(out, &made)?);
    }
    let over = match made.devices.len() {
        1 => String::new(),
        count => format!(" on {count} devices"),
    };
    writeln!(out, "made volume {uuid}, {}{over}", human_size(made.total_bytes))?;
    Ok(())
}

/// Refuses a file that is named twice, before it is made or extended.
fn refuse_same(paths: &[PathBuf]) -> Result {
    let id = |path: &Path| host_id(path).ok_or_else(|| absolute(path).ok());
    for (at, second) in paths.iter().enumerate() {
        if let Some(first) = paths[..at].iter().find(|first| id(first) == id(second)) {
            let (first, second) = (first.to_string_lossy(), second.to_string_lossy());
            return Err(VerbFailure::Refused(in_common(&first, &second)));
        }
    }
    Ok(())
}

/// The options of the engine that makes the volume.
pub(super) enum NewVolumeOptions {
    Btrfs(MkfsOptions),
    Xfs(XfsMkfsOptions),
}

impl NewVolumeOptions {
    /// Those that `volume` says. The root directory belongs to `owner`, and what is on the devices
    /// is overwritten if `is_forced`.
    pub(super) fn of(
        volume: &NewVolumeArguments,
        owner: (u32, u32),
        is_forced: bool,
    ) -> Result<Self> {
        if let Some(option) = volume.foreign_option() {
            let format = volume.format;
            return Err(VerbFailure::Usage(format!("{format} volumes have no {option}")));
        }
        Ok(match volume.format {
            NewVolumeFormat::Btrfs => Self::Btrfs(MkfsOptions {
                root_owner: owner,
                is_forced,
                ..btrfs::mkfs::options(volume)?
            }),
            NewVolumeFormat::Xfs => Self::Xfs(XfsMkfsOptions {
                root_owner: owner,
                is_forced,
                ..xfs::mkfs::options(volume)?
            }),
        })
    }

    /// Makes the volume.
    pub(super) fn make(&self, devices: &[Arc<dyn BlockDevice>]) -> offshoot_vfs::Result<Uuid> {
        match self {
            Self::Btrfs(options) => mkfs(devices, options),
            // The verb requires that there is one.
            Self::Xfs(options) => mkfs_xfs(&*devices[0], options),
        }
    }
}

/// The user of the program. The root directory belongs to this user, so the same user can write to
/// the volume when it is mounted.
fn caller() -> (u32, u32) {
    (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw())
}

/// Contradictory options are wrong usage; every other error is a failure.
pub(super) fn usage(error: Error) -> VerbFailure {
    match error {
        Error::Posix { what, errno: Errno::INVAL, .. } => VerbFailure::Usage(what),
        other => VerbFailure::Volume(other),
    }
}

/// Image files that were made or extended. They become what they were if no volume was made on
/// them.
#[derive(Default)]
pub(super) struct NewImages<'a>(Vec<(&'a Path, SizeBefore)>);

/// The size of a file in bytes before it was extended; `None` for one that did not exist.
type SizeBefore = Option<u64>;

impl<'a> NewImages<'a> {
    /// Opens `path`, or makes an image of `size` there.
    pub(super) fn open(
        &mut self,
        path: &'a Path,
        size: Option<u64>,
        layers: &LayerArguments,
    ) -> Result<MemberDisk> {
        let name = DiskName::parse(path);
        let before = match fs::metadata(&name.file) {
            Ok(metadata) => Some(metadata.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(VerbFailure::Host(path.display().to_string(), error)),
        };
        let shown = path.display();
        let Some(size_bytes) = size else {
            if before.is_none() {
                return Err(VerbFailure::Usage(format!(
                    "{shown} does not exist; make it with --size"
                )));
            }
            return MemberDisk::open_to_make(path, layers);
        };
        if name.partition.is_some() {
            let what = format!("{shown} is a partition, which has the size that it has");
            return Err(VerbFailure::Usage(what));
        }
        let kind = match layers.image_format {
            Some(format) => format.kind(),
            None => image_at(path),
        };
        if let Some(kind) = kind {
            let what = format!(
                "{shown} is an image ({kind}), and --size is for plain ones: make the volume in \
                 it without --size, or remove it first"
            );
            return Err(VerbFailure::Refused(what));
        }
        let device = self.create(path, size_bytes)?;
        let failed = |e| VerbFailure::Host(shown.to_string(), e);
        MemberDisk::of_file(path, device).map_err(failed)
    }

    /// Opens the plain file at `path`, made if there is none, and made longer if it is too short.
    pub(super) fn create(&mut self, path: &'a Path, size_bytes: u64) -> Result<FileDevice> {
        let failed = |error| VerbFailure::Host(path.display().to_string(), error);
        let before = match fs::metadata(path) {
            Ok(metadata) => Some(metadata.len()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        let device = FileDevice::create(path, size_bytes).map_err(failed)?;
        // A second call for a file finds what the first has made of it.
        if self.0.iter().all(|(known, _)| *known != path) {
            self.0.push((path, before));
        }
        Ok(device)
    }

    pub(super) fn keep(mut self) {
        self.0.clear();
    }
}

/// The kind of the image at `path`. If it cannot be read, the call that writes it reports the
/// error.
fn image_at(path: &Path) -> Option<ImageKind> {
    ImageKind::detect(&FileDevice::open(path).ok()?).ok()?
}

fn cut_to(path: &Path, bytes: u64) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(path)?.set_len(bytes)
}

impl Drop for NewImages<'_> {
    fn drop(&mut self) {
        for (path, before) in &self.0 {
            // The user needs to see the first failure, not this one.
            let _ = match before {
                Some(bytes) => cut_to(path, *bytes),
                None => fs::remove_file(path),
            };
        }
    }
}
