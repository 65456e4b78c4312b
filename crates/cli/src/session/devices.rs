//! Opening the devices of a volume. The format of the first one decides whether the volume is
//! opened at all, before anything of it is read.

use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_vfs::{Code, Error};

use super::{Access, Opening, THIS_VERB};
use crate::args::OpenArguments;
use crate::disk::{MemberDisk, refuse_shared};
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::verbs::btrfs::storing::Storing;

/// The devices of a volume, open.
pub(super) struct OpenDevices {
    pub(super) format: VolumeFormat,
    pub(super) devices: Vec<Arc<dyn BlockDevice>>,
    pub(super) layers: Vec<String>,
}

impl OpenDevices {
    /// Opens the further devices of the volume whose first member is on `disk`.
    pub(super) fn open(
        disk: MemberDisk,
        arguments: &OpenArguments,
        opening: &mut Opening,
        console: &Console,
    ) -> Result<Self> {
        let format = VolumeFormat::on(&*disk.device);
        if let Some(refusal) = refusal_of(format, arguments, opening) {
            return Err(VerbFailure::Inside(disk.device.name().into(), refusal));
        }
        let mut disks = vec![disk];
        let layers = arguments.layers.of_further_device();
        for path in &arguments.devices {
            disks.push(MemberDisk::open(path, opening.access, &layers, false)?);
        }
        refuse_shared(&disks)?;
        disks.iter().flat_map(|disk| &disk.warnings).for_each(|what| console.warning(what));
        let layers = disks[0].layers.clone();
        let devices: Vec<_> = disks.into_iter().map(|disk| disk.device).collect();
        if let Some(happens) = opening.when_devices_are_open.take() {
            happens();
        }
        Ok(Self { format, devices, layers })
    }
}

/// The error about `what`, which only volumes of btrfs have.
pub(crate) fn only_in_btrfs(what: &str) -> Error {
    let what = format!("{what} on an XFS volume: that is for btrfs alone");
    Error::unsupported(Code::NotInFormat, what)
}

/// Why a volume of this format is not opened in this way.
fn refusal_of(format: VolumeFormat, arguments: &OpenArguments, opening: &Opening) -> Option<Error> {
    if format == VolumeFormat::Btrfs {
        let what = opening.only_xfs.as_ref()?;
        let what = format!("{what} on a btrfs volume: that is for XFS alone");
        return Some(Error::unsupported(Code::NotInFormat, what));
    }
    if opening.is_for_btrfs {
        return Some(only_in_btrfs(THIS_VERB));
    }
    if let Some(what) = &opening.only_btrfs {
        return Some(only_in_btrfs(what));
    }
    if opening.before_writing.is_some() {
        let what = "the mount option fuseblk on an XFS volume: mount it without";
        return Some(Error::unsupported(Code::NotInFormat, what));
    }
    for (is_asked, what) in [
        (!arguments.devices.is_empty(), "a further device"),
        (arguments.degraded, "opening without members"),
        (arguments.rescue.is_set() || opening.rescue.is_set(), "reading around damage"),
        (
            opening.storing != Storing::default(),
            "compression, and data that is not copied on write",
        ),
    ] {
        if is_asked {
            return Some(only_in_btrfs(what));
        }
    }
    None
}

/// Opens the disk with the first member of a volume. When the host refuses to open it for writing,
/// its format may refuse that too: then the user is told so, as rights would not help.
/// `may_have_path` is that of [`MemberDisk::open`].
pub(crate) fn member_disk(
    path: &Path,
    arguments: &OpenArguments,
    opening: &Opening,
    may_have_path: bool,
) -> Result<MemberDisk> {
    let open = |access| MemberDisk::open(path, access, &arguments.layers, may_have_path);
    open(opening.access).map_err(|failure| {
        let readable = (opening.access == Access::Write).then(|| open(Access::Read).ok());
        let device = readable.flatten().map(|disk| disk.device);
        let refusal = device.and_then(|device| {
            let refusal = refusal_of(VolumeFormat::on(&*device), arguments, opening)?;
            Some(VerbFailure::Inside(device.name().into(), refusal))
        });
        refusal.unwrap_or(failure)
    })
}
