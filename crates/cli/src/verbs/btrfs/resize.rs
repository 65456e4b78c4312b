//! `offshoot resize` for btrfs.

use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, Resized};
use offshoot_btrfs_format::DeviceId;
use offshoot_vfs::{self as vfs, Errno, Error, Volume};

use crate::args::{NewSize, ResizeArguments, SizeChange};
use crate::exit::Result;
use crate::output::{Console, human_size};
use crate::session::{Access, Session};
use crate::verbs::resize::ResizeReport;

pub(in crate::verbs) fn run(
    arguments: &ResizeArguments,
    console: &Arc<Console>,
) -> Result<ResizeReport> {
    let ResizeArguments { info, size } = arguments;
    let session = Session::open_to(Access::Write, &info.volume, console)?;
    let volume = &session.volume;
    let resized = resize(volume, *size);
    if info.volume.open.live.is_none() {
        resized.as_ref().map_or(Ok(()), |_| volume.shut_down())?;
    }
    let Resized { before, after, device_bytes } = resized?;
    if after < before && device_bytes > after && device_bytes <= before {
        console.warning(&format_args!(
            "the device keeps its {}; the volume uses the first {} bytes",
            human_size(device_bytes),
            after
        ));
    }
    Ok(ResizeReport { device: size.device, before, after, device_bytes })
}

/// Gives a device the size that was asked for.
fn resize(volume: &BtrfsVolume, wanted: NewSize) -> vfs::Result<Resized> {
    let id = DeviceId(wanted.device);
    let member = volume.members().iter().find(|member| member.id == id);
    let member = member.ok_or_else(|| {
        Error::posix(Errno::NODEV, format!("device {id}, which the volume does not have"))
    })?;
    let now = member.total_bytes();
    let too_much = || Error::posix(Errno::INVAL, "a size of that many bytes");
    let bytes = match wanted.size {
        SizeChange::To(bytes) => bytes,
        SizeChange::More(bytes) => now.checked_add(bytes).ok_or_else(too_much)?,
        SizeChange::Less(bytes) => now.checked_sub(bytes).ok_or_else(too_much)?,
        SizeChange::Max => member.device.as_ref().map_or(now, |device| device.size_bytes()),
        SizeChange::Minimal(slack) => return volume.resize_to_minimum(id, slack),
    };
    volume.resize(id, bytes)
}
