//! Finding the superblock.

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs_format::superblock::{MAGIC, XfsSuperblock};

use crate::report::XfsReporter;

/// The most bytes of a sector.
const MOST_SECTOR_BYTES: u64 = 32 << 10;

/// The superblock of the volume on `device`.
pub(super) fn read(
    device: &dyn BlockDevice,
    _reporter: Option<&XfsReporter>,
) -> Result<XfsSuperblock> {
    let len = device.size_bytes().min(MOST_SECTOR_BYTES);
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
    device.read_at(0, &mut bytes).map_err(|error| {
        Error::io(format!("reading {len} bytes at 0 of {}", device.name()), error)
    })?;
    if !bytes.starts_with(&MAGIC) {
        let what = format!("{} holds no XFS volume", device.name());
        return Err(Error::unsupported(Code::NoVolume, what));
    }
    XfsSuperblock::parse(&bytes).map_err(|problem| {
        Error::corrupt(problem.structure, problem.problem).in_file_if_unnamed(device.name())
    })
}
