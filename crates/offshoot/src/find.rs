//! From a file of the host to the volume on it.
//!
//! ```text
//!   file ──> image (qcow2, VMDK, zstd > raw, ...) ──> partition ──> btrfs
//! ```
//!
//! A qcow2 that has a backing file, and a VMDK in several files, name further files of the host.
//! This module opens no file that the caller did not name, and refuses these images.

use std::io;
use std::path::Path;
use std::sync::Arc;

use offshoot_btrfs::occupant;
use offshoot_device::{
    BlockDevice, FileDevice, FileUse, ImageKind, PartitionTable, Qcow2Header, Qcow2Options,
    WindowDevice, open_image, open_qcow2, open_vmdk,
};
use offshoot_vfs::{Code, Errno, Error, Result};

use crate::OpenOptions;

/// The one format of filesystems that we know, by the name of its signature.
const KNOWN: &str = "btrfs";

/// How many images may be inside of each other.
const DEPTH_MAX: usize = 16;

/// Opens what is at `path` and finds the volume on it: in the partition of the number `wanted`, or
/// wherever it is.
pub(crate) fn find(
    path: &Path,
    wanted: Option<u32>,
    options: &OpenOptions,
) -> Result<Arc<dyn BlockDevice>> {
    let disk = open_disk(path, options)?;
    let failed = |error| Error::io(path.display().to_string(), error);
    let whole = occupant_at(&*disk, 0, disk.size_bytes()).map_err(failed)?;
    let table = match PartitionTable::read(&*disk) {
        // A volume may have the rest of a table in front of it.
        Err(error) if error.kind() == io::ErrorKind::InvalidData && whole == Some(KNOWN) => None,
        table => table.map_err(failed)?.filter(|table| !table.partitions.is_empty()),
    };
    let shown = path.display();
    let Some(table) = table else {
        return match (wanted, whole) {
            (Some(number), _) => {
                let what = format!("{shown} has no partition table, and so no partition {number}");
                Err(Error::posix(Errno::NODEV, what))
            }
            // The engine may find more than a signature, and says what it misses.
            (None, None | Some(KNOWN)) => Ok(disk),
            (None, Some(other)) => Err(Error::unsupported(
                Code::OtherFormat,
                format!("another format: {other} on {shown}; open a volume of {KNOWN}"),
            )),
        };
    };
    if let (Some(warned), Some(what)) = (&options.warned, &table.warning) {
        warned(&format!("{shown}: {what}"));
    }
    let mut chosen = Vec::new();
    for partition in &table.partitions {
        let range = partition.range.start..partition.range.end.min(disk.size_bytes());
        let held = occupant_at(&*disk, range.start, range.end - range.start).map_err(failed)?;
        match wanted {
            Some(number) if partition.number == number => chosen.push(partition),
            None if held == Some(KNOWN) => chosen.push(partition),
            _ => {}
        }
    }
    let numbers = || {
        let numbers = chosen.iter().map(|partition| partition.number.to_string());
        numbers.collect::<Vec<_>>().join(", ")
    };
    match (&chosen[..], wanted) {
        (_, None) if whole == Some(KNOWN) => Err(Error::unsupported(
            Code::SeveralVolumes,
            format!(
                "more than one volume was found: {shown} holds {KNOWN} over the whole disk and a partition table too; choose with \
             OpenOptions::partition, or open the whole disk with OpenOptions::open_devices"
            ),
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
        _ => Err(Error::unsupported(
            Code::SeveralVolumes,
            format!(
                "more than one volume was found: the partitions {} of {shown} hold {KNOWN}; choose with OpenOptions::partition",
                numbers()
            ),
        )),
    }
}

/// Opens the disk in the file at `path`, through the images around it.
fn open_disk(path: &Path, options: &OpenOptions) -> Result<Arc<dyn BlockDevice>> {
    let is_writable = options.is_writable;
    let failed = |error| Error::io(path.display().to_string(), error);
    let usage = if is_writable { FileUse::Write } else { FileUse::Read };
    let file = FileDevice::open_for(path, usage).map_err(failed)?;
    let mut kind = if options.is_raw { None } else { ImageKind::detect(&file).map_err(failed)? };
    let is_growing = matches!(kind, Some(ImageKind::Qcow2 | ImageKind::Vmdk));
    let file = if is_writable && is_growing { file.growing() } else { file };
    let mut disk: Arc<dyn BlockDevice> = Arc::new(file);
    for _ in 0..DEPTH_MAX {
        let Some(found) = kind else { return Ok(disk) };
        disk = open_layer(path, disk, found, is_writable)?;
        // What was compressed may be an image; what is in an image is a disk.
        kind = if found.is_stream() { ImageKind::detect(&*disk).map_err(failed)? } else { None };
    }
    let what = format!("the image {} has too many inside of each other", path.display());
    Err(Error::unsupported(Code::ImageNotRead, what))
}

/// Opens the image that `below` is.
fn open_layer(
    path: &Path,
    below: Arc<dyn BlockDevice>,
    kind: ImageKind,
    is_writable: bool,
) -> Result<Arc<dyn BlockDevice>> {
    let shown = path.display();
    let failed = |error| Error::io(format!("{shown}: {kind}"), error);
    if is_writable && !kind.is_written() {
        return Err(Error::unsupported(
            Code::ImageNotWritten,
            format!(
                "writing the image {shown} is {kind}, which is only read; convert it to raw or qcow2"
            ),
        ));
    }
    let opened = match kind {
        ImageKind::Qcow2 => {
            let header = Qcow2Header::read(&*below).map_err(failed)?;
            if let Some(backing) = &header.backing {
                return Err(Error::unsupported(
                    Code::ImageOverFiles,
                    format!(
                        "an image over other files: {shown} stands over {backing}; open both with device::open_qcow2, and the \
                     volume with OpenOptions::open_devices"
                    ),
                ));
            }
            let options = Qcow2Options { is_writable, backing: None, snapshot: None };
            open_qcow2(below, &header, options)
        }
        ImageKind::VmdkDescriptor => {
            return Err(Error::unsupported(
                Code::ImageOverFiles,
                format!(
                    "an image over other files: {shown} names the files with its data; open them with device::VmdkDescriptor, \
                 and the volume with OpenOptions::open_devices"
                ),
            ));
        }
        ImageKind::Vmdk => open_vmdk(below, is_writable),
        _ => open_image(below, kind),
    };
    opened.map_err(failed)
}

/// What is in the `len` bytes from `start` on, by a signature that nothing has by chance.
fn occupant_at(device: &dyn BlockDevice, start: u64, len: u64) -> io::Result<Option<&'static str>> {
    let found = occupant(len, |offset, buf| device.read_at(start + offset, buf))?;
    Ok(found.filter(|found| found.is_certain).map(|found| found.what))
}
