//! The size of a device that a volume is to fill.

use std::io::ErrorKind;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Result};

/// Makes a device at least `bytes` bytes long, and that durable.
///
/// # Errors
/// [`Error::Unsupported`] for a device whose size is fixed, and those of the host.
pub fn lengthen(device: &dyn BlockDevice, bytes: u64) -> Result<()> {
    let exists = device.size_bytes();
    if bytes <= exists {
        return Ok(());
    }
    device.resize(bytes).map_err(|error| {
        let name = device.name();
        if error.kind() == ErrorKind::Unsupported {
            let what = format!("giving {name} {bytes} bytes: it has {exists}, and that is fixed");
            return Error::unsupported(Code::FixedSize, what);
        }
        Error::io(format!("{name}: giving it {bytes} bytes, it has {exists}"), error)
    })?;
    device.flush().map_err(|error| Error::io(format!("{}: a barrier", device.name()), error))
}
