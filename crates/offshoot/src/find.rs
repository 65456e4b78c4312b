//! From a file of the host to the volume on it.
//!
//! ```text
//!   file ──> image (qcow2, VMDK, zstd > raw, ...) ──> partition ──> btrfs, XFS
//! ```
//!
//! A qcow2 that has a backing file, and a VMDK in several files, name further files of the host.
//! This module opens no file that the caller did not name, and refuses these images.

use std::path::Path;
use std::sync::Arc;

use offshoot_device::{
    BlockDevice, DiskContents, DiskError, DiskFormat, DiskObstacle, DiskOptions, OpenedDisk,
    OtherFiles, VolumeFormat, WindowDevice, occupant_at,
};
use offshoot_vfs::{Code, Errno, Error, Result};

use crate::OpenOptions;

/// The formats that are opened, in messages.
const KNOWN: &str = VolumeFormat::NAMES;

/// Opens what is at `path` and finds the volume on it: in the partition of the number `wanted`, or
/// wherever it is.
pub(crate) fn find(
    path: &Path,
    wanted: Option<u32>,
    options: &OpenOptions,
) -> Result<Arc<dyn BlockDevice>> {
    let disk = open_disk(path, options)?;
    let failed = |error| Error::io(path.display().to_string(), error);
    let look = |start, len| occupant_at(&*disk, start, len);
    let is_known = |what: &&str| VolumeFormat::of(what).is_some();
    let contents = DiskContents::read(&*disk, look, is_known).map_err(failed)?;
    let whole = contents.whole;
    let shown = path.display();
    let table = contents.table.filter(|(table, _)| !table.partitions.is_empty());
    let Some((table, held)) = table else {
        return match (wanted, whole) {
            (Some(number), _) => {
                let what = format!("{shown} has no partition table, and so no partition {number}");
                Err(Error::posix(Errno::NODEV, what))
            }
            // The engine may find more than a signature, and says what it misses.
            (None, None) => Ok(disk),
            (None, Some(what)) if is_known(&what) => Ok(disk),
            (None, Some(other)) => Err(Error::unsupported(
                Code::OtherFormat,
                format!("another format: {other} on {shown}; open a volume of {KNOWN}"),
            )),
        };
    };
    if let (Some(warned), Some(what)) = (&options.warned, &table.warning) {
        warned(&format!("{shown}: {what}"));
    }
    let all = table.partitions.iter().zip(&held);
    let chosen = all.filter(|(partition, held)| match wanted {
        Some(number) => partition.number == number,
        None => held.what.as_ref().is_some_and(is_known),
    });
    let chosen: Vec<_> = chosen.map(|(partition, _)| partition).collect();
    let several = |what: String| {
        let what = format!("more than one volume was found: {what}");
        Err(Error::unsupported(Code::SeveralVolumes, what))
    };
    match (&chosen[..], wanted) {
        (_, None) if whole.as_ref().is_some_and(is_known) => several(format!(
            "{shown} holds {} over the whole disk and a partition table too; choose with \
             OpenOptions::partition, or open the whole disk with OpenOptions::open_devices",
            whole.unwrap_or_default()
        )),
        ([partition], _) => {
            let name = format!("{shown}@{}", partition.number);
            let window = WindowDevice::new(disk.clone(), partition.range.clone(), name);
            Ok(Arc::new(window.map_err(failed)?))
        }
        ([], Some(number)) => {
            Err(Error::posix(Errno::NODEV, format!("{shown} has no partition {number}")))
        }
        ([], None) => Err(Error::unsupported(
            Code::NoVolume,
            format!("no volume was found: none of the partitions of {shown} holds {KNOWN}"),
        )),
        _ => {
            let numbers = chosen.iter().map(|partition| partition.number.to_string());
            several(format!(
                "the partitions {} of {shown} hold {KNOWN}; choose with OpenOptions::partition",
                numbers.collect::<Vec<_>>().join(", ")
            ))
        }
    }
}

/// Opens the disk in the file at `path`, through the images around it.
fn open_disk(path: &Path, options: &OpenOptions) -> Result<Arc<dyn BlockDevice>> {
    let mut disk_options = DiskOptions::default();
    disk_options.is_writable = options.is_writable;
    disk_options.format = options.is_raw.then_some(DiskFormat::Raw);
    disk_options.others = OtherFiles::Never;
    let opened = OpenedDisk::open(path, &disk_options).map_err(|error| match error {
        DiskError::Io { path, kind, source } => {
            let kind = kind.map_or_else(String::new, |kind| format!(": {kind}"));
            Error::io(format!("{}{kind}", path.display()), source)
        }
        DiskError::Obstacle { path, obstacle } => in_the_way(&path, &obstacle),
    })?;
    Ok(opened.device)
}

/// The error about what is in the way at `path`.
fn in_the_way(path: &Path, obstacle: &DiskObstacle) -> Error {
    let shown = path.display();
    let over = |what: String| {
        let what = format!("an image over other files: {shown} {what}");
        Error::unsupported(Code::ImageOverFiles, what)
    };
    let not_written = |what: String| {
        Error::unsupported(Code::ImageNotWritten, format!("writing the image {shown} {what}"))
    };
    match obstacle {
        DiskObstacle::OnlyRead(kind) => {
            not_written(format!("is {kind}, which is only read; convert it to raw or qcow2"))
        }
        DiskObstacle::CannotGrow => {
            not_written("is a sparse VMDK on a block device; copy it into a file".to_owned())
        }
        DiskObstacle::NeedsBacking(name) | DiskObstacle::BackingIsNoFile(name) => over(format!(
            "stands over {name}; open both with device::open_qcow2, and the volume with \
             OpenOptions::open_devices"
        )),
        DiskObstacle::NeedsExtent(_)
        | DiskObstacle::ExtentMissing(_)
        | DiskObstacle::ExtentTwice(_) => over(
            "names the files with its data; open them with device::VmdkDescriptor, and the volume \
             with OpenOptions::open_devices"
                .to_owned(),
        ),
        DiskObstacle::TooDeep | DiskObstacle::BackingLoop => Error::unsupported(
            Code::ImageNotRead,
            format!("the image {shown} has too many inside of each other"),
        ),
        DiskObstacle::NoSnapshots
        | DiskObstacle::OtherSnapshots(_)
        | DiskObstacle::SnapshotOnlyRead => {
            Error::posix(Errno::INVAL, format!("{shown}: snapshots of images are not opened here"))
        }
    }
}
