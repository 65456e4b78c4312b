//! The extended attributes of one file, where they are needed all at once.
//!
//! A volume may give a file as many as it has space for. A caller that sorts them, or writes their
//! length in front of them, needs all of them in memory. It gets them from here, up to a bound.

use std::ops::ControlFlow;

use offshoot_vfs::{Code, Error, FileId, FileSystem, Result};

/// Name and value.
pub type XattrPair = (Vec<u8>, Vec<u8>);

/// The most memory that the extended attributes of one file may take. Linux lists no more
/// than 64 KiB of names.
const HELD_MIB: usize = 4;

/// What an extended attribute takes beside its bytes: two vectors, and two allocations.
const EACH_BYTES: usize = 128;

/// The extended attributes of `file`, in the order of the volume.
pub fn held_xattrs(fs: &dyn FileSystem, file: FileId) -> Result<Vec<XattrPair>> {
    held_xattrs_within(fs, file, HELD_MIB << 20)?.ok_or_else(|| {
        let what = format!("more than {HELD_MIB} MiB of extended attributes of one file");
        Error::unsupported(Code::Unsupported, what)
    })
}

/// The same; `None` when they take more than `bytes_max`.
pub(crate) fn held_xattrs_within(
    fs: &dyn FileSystem,
    file: FileId,
    bytes_max: usize,
) -> Result<Option<Vec<XattrPair>>> {
    let (mut held, mut bytes) = (Vec::new(), 0);
    fs.xattrs(file, &mut |name, value| {
        bytes += name.len() + value.len() + EACH_BYTES;
        if bytes > bytes_max {
            return ControlFlow::Break(());
        }
        held.push((name.to_vec(), value.to_vec()));
        ControlFlow::Continue(())
    })?;
    Ok((bytes <= bytes_max).then_some(held))
}
