//! Opens what `mkfs.btrfs` was given, and makes a volume there in its place.
//!
//! Every device is opened and looked at, and the volume is planned, before the first one is
//! changed: what is refused leaves all of them as they are. Then each that is a block device is
//! discarded, its old signatures go, and the volume is made. With `-b` that is at the
//! beginning of each device only, and the rest is left as it is.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_btrfs::{MkfsOptions, check_mkfs, mkfs};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_device::{BlockDevice, FileDevice, Occupant, WindowDevice, occupant};
use offshoot_kit::new_volume;
use offshoot_transfer::host::host_id_of_file;
use rustix::fs::{major, minor};

use super::arguments::DropinArguments;
use super::summary;
use crate::disk::in_common;
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, human_size};
use crate::verbs::mkfs::usage;

/// A device that becomes a member of the new volume.
pub(super) struct NewMember {
    /// What the volume gets of it, and nothing outside of that changes.
    pub(super) device: Arc<dyn BlockDevice>,
    is_block: bool,
}

/// Makes a volume without files.
pub(super) fn run(
    arguments: &DropinArguments,
    new: MkfsOptions,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    refuse_same(&arguments.devices)?;
    let open = |path: &PathBuf| {
        let device =
            FileDevice::open_writable_for_parent(path).map_err(|error| failed(path, error))?;
        NewMember::of(path, device, arguments.byte_count, arguments.force)
    };
    let members: Vec<_> = arguments.devices.iter().map(open).collect::<Result<_>>()?;
    check(&members, &new)?;
    make(&members, new, arguments)?;
    let devices = members.into_iter().map(|member| member.device).collect();
    summary::print(arguments, devices, out, console)
}

/// Refuses a volume that cannot be made on `members`. Nothing is written.
pub(super) fn check(members: &[NewMember], new: &MkfsOptions) -> Result {
    // What they hold was looked at.
    let new = MkfsOptions { is_forced: true, ..new.clone() };
    check_mkfs(&devices_of(members), &new).map_err(usage)
}

/// Makes the volume `new` on `members`, which was [checked](check).
pub(super) fn make(members: &[NewMember], new: MkfsOptions, arguments: &DropinArguments) -> Result {
    for member in members {
        member.discard(arguments.nodiscard)?;
    }
    mkfs(&devices_of(members), &MkfsOptions { is_forced: true, ..new }).map_err(usage)?;
    Ok(())
}

fn devices_of(members: &[NewMember]) -> Vec<Arc<dyn BlockDevice>> {
    members.iter().map(|member| member.device.clone()).collect()
}

pub(super) fn failed(path: &Path, error: io::Error) -> VerbFailure {
    VerbFailure::Host(path.display().to_string(), error)
}

/// Whether there is a block device at `path`.
pub(super) fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
}

impl NewMember {
    /// The first `size` bytes of the open device at `path`, or all of them.
    ///
    /// # Errors
    /// When it is smaller, when it holds something and `is_forced` is not set, and when it is
    /// zoned.
    pub(super) fn of(
        path: &Path,
        device: FileDevice,
        size: Option<u64>,
        is_forced: bool,
    ) -> Result<Self> {
        let is_block = is_block_device(path);
        if is_block && queue_attribute(path, "zoned").is_some_and(|zoned| zoned != "none") {
            let message = "it is zoned, and volumes of zones are not made";
            return Err(VerbFailure::Refused(format!("{}: {message}", path.display())));
        }
        let whole: Arc<dyn BlockDevice> = Arc::new(device);
        let size_bytes = whole.size_bytes();
        let device = match size {
            Some(size) if size > size_bytes => {
                let (has, size) = (human_size(size_bytes), human_size(size));
                let message = format!("it has {has}, which is less than {size}");
                return Err(VerbFailure::Refused(format!("{}: {message}", path.display())));
            }
            Some(size) if size < size_bytes => {
                let name = path.display().to_string();
                let window = WindowDevice::new(whole.clone(), 0..size, name);
                Arc::new(window.map_err(|error| failed(path, error))?)
            }
            _ => whole.clone(),
        };
        if !is_forced {
            refuse_used(&*whole)?;
        }
        Ok(Self { device, is_block })
    }

    /// Gives a block device back what it holds. What a file holds beside its signatures stays
    /// there, as bytes that the volume does not use.
    fn discard(&self, keeps_blocks: bool) -> Result {
        if self.is_block && !keeps_blocks {
            match self.device.discard(0, self.device.size_bytes()) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
                discarded => discarded.map_err(|error| {
                    VerbFailure::Host(format!("{}: discarding it", self.device.name()), error)
                })?,
            }
        }
        Ok(())
    }

    /// Makes that no program takes the device for a volume.
    pub(super) fn wipe(&self) -> Result {
        new_volume::wipe(&*self.device)?;
        Ok(new_volume::flush(&*self.device)?)
    }

    /// Gives back to the host what a file holds, before it is filled again.
    pub(super) fn empty_file(&self) -> Result {
        if self.is_block {
            return Ok(());
        }
        match self.device.discard(0, self.device.size_bytes()) {
            Err(error) if error.kind() != io::ErrorKind::Unsupported => {
                Err(VerbFailure::Host(self.device.name().to_owned(), error))
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a device that holds something. Further superblocks of btrfs count for nothing, because
/// `wipefs` leaves them, and what it wiped is free.
fn refuse_used(device: &dyn BlockDevice) -> Result {
    let [_, copies @ ..] = SUPERBLOCK_OFFSETS;
    let read_at = |offset, buf: &mut [u8]| {
        let is_in_copy = |at: &u64| (*at..at + SUPERBLOCK_SIZE as u64).contains(&offset);
        if copies.iter().any(is_in_copy) {
            buf.fill(0);
            return Ok(());
        }
        device.read_at(offset, buf)
    };
    let found = occupant(device.size_bytes(), read_at).map_err(|error| {
        VerbFailure::Host(format!("{}: reading what it holds", device.name()), error)
    })?;
    match found {
        None => Ok(()),
        Some(Occupant { what, .. }) => {
            let message = format!("{} holds {what}, which -f overwrites", device.name());
            Err(VerbFailure::Refused(message))
        }
    }
}

/// What the kernel says of the queue of the block device at `path`, or of the disk that it is a
/// partition of.
pub(super) fn queue_attribute(path: &Path, name: &str) -> Option<String> {
    let rdev = path.metadata().ok()?.rdev();
    let device = format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev));
    let places = [format!("{device}/queue/{name}"), format!("{device}/../queue/{name}")];
    let text = places.iter().find_map(|place| fs::read_to_string(place).ok())?;
    Some(text.trim_end().to_owned())
}

/// Refuses a device that is given twice.
fn refuse_same(paths: &[PathBuf]) -> Result {
    for (at, second) in paths.iter().enumerate() {
        let id = host_id_of_file(second);
        let mut before = paths.iter().take(at);
        if let Some(first) = before.find(|first| id.is_some() && host_id_of_file(first) == id) {
            let (first, second) = (first.to_string_lossy(), second.to_string_lossy());
            return Err(VerbFailure::Refused(in_common(&first, &second)));
        }
    }
    Ok(())
}
