//! What a program that makes a volume does with the device, whatever the format.

use std::ops::Range;

use offshoot_device::{BlockDevice, occupant, signature_places};
use offshoot_vfs::{Errno, Error, Result};

/// The size of a read and of a write when a device is zeroed, in bytes.
const ZEROED_PIECE: usize = 64 << 10;

static ZEROS: [u8; ZEROED_PIECE] = [0; ZEROED_PIECE];

/// Fails if the device has known contents.
///
/// # Errors
/// `EEXIST` with the name of the contents; those of the device.
pub fn refuse_used(device: &dyn BlockDevice) -> Result<()> {
    let read_at = |offset, buf: &mut [u8]| device.read_at(offset, buf);
    let found = occupant(device.size_bytes(), read_at)
        .map_err(|e| Error::io(format!("{}: reading what it holds", device.name()), e))?;
    let Some(found) = found else { return Ok(()) };
    let (name, what) = (device.name(), found.what);
    let what = format!("{name} holds {what}, which is only overwritten by force");
    Err(Error::posix(Errno::EXIST, what))
}

/// Zeroes everything by which a program could recognise what a device held.
///
/// # Errors
/// Those of the device.
pub fn wipe(device: &dyn BlockDevice) -> Result<()> {
    signature_places(device.size_bytes()).try_for_each(|place| zero(device, place))
}

/// Zeroes these bytes of a device. It writes only pieces that are not zero already, so an image
/// stays as sparse as it was.
///
/// # Errors
/// Those of the device.
pub fn zero(device: &dyn BlockDevice, place: Range<u64>) -> Result<()> {
    let mut bytes = Vec::new();
    let mut at = place.start;
    while at < place.end {
        let rest = usize::try_from(place.end - at).unwrap_or(ZEROED_PIECE);
        let zeros = ZEROS.get(..rest).unwrap_or(&ZEROS);
        bytes.resize(zeros.len(), 0);
        device
            .read_at(at, &mut bytes)
            .map_err(|e| Error::io(format!("{}: reading at {at}", device.name()), e))?;
        if bytes != zeros {
            write(device, at, zeros)?;
        }
        at += zeros.len() as u64;
    }
    Ok(())
}

/// Writes to a device.
///
/// # Errors
/// That of the device, with what was written where.
pub fn write(device: &dyn BlockDevice, at: u64, bytes: &[u8]) -> Result<()> {
    let len = bytes.len();
    device
        .write_at(at, bytes)
        .map_err(|e| Error::io(format!("{}: writing {len} bytes at {at}", device.name()), e))
}

/// Makes what was written durable.
///
/// # Errors
/// That of the device.
pub fn flush(device: &dyn BlockDevice) -> Result<()> {
    device.flush().map_err(|e| Error::io(format!("{}: flush", device.name()), e))
}
