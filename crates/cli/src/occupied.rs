//! Files and devices of the host that hold a filesystem and therefore must not be overwritten.
//!
//! `cp v.img:/file w.img` is one `:/` away from `cp v.img:/file w.img:/`, and would replace a
//! volume by a file. Every verb that writes to a path of the host calls this module first. The
//! signatures come from `mkfs`, which refuses the same devices.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use offshoot_device::{Occupant, occupant};
use offshoot_transfer::host::look_at;
use offshoot_vfs::Errno;
use rustix::fs::{CWD, SeekFrom, seek};

use crate::exit::{Result, VerbFailure};
use crate::output::Escaped;

/// What the open file holds, if it is a regular file or a block device with a filesystem or another
/// known signature.
pub(crate) fn held_by(file: &File) -> io::Result<Option<&'static str>> {
    let metadata = file.metadata()?;
    let size_bytes = if metadata.file_type().is_block_device() {
        seek(file, SeekFrom::End(0))?
    } else if metadata.is_file() {
        metadata.len()
    } else {
        return Ok(None);
    };
    let read_at = |offset, buf: &mut [u8]| file.read_exact_at(buf, offset);
    let found = match occupant(size_bytes, read_at) {
        // Files of the kernel may be shorter than the size they report.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => None,
        found => found?,
    };
    // Some signatures have only two bytes, which any file may contain. They do not count.
    Ok(found.filter(|Occupant { is_certain, .. }| *is_certain).map(|found| found.what))
}

/// Why the file or device at `path`, open as `file`, must not be overwritten; `None` if it may be.
pub(crate) fn refusal(path: &Path, file: &File) -> io::Result<Option<String>> {
    use std::os::unix::ffi::OsStrExt;
    let Some(what) = held_by(file)? else { return Ok(None) };
    let shown = Escaped(path.as_os_str().as_bytes());
    let instead = if file.metadata()?.file_type().is_block_device() {
        "wipe the device first (wipefs -a)"
    } else {
        "remove the file first"
    };
    Ok(Some(format!(
        "{shown} holds {what}, and would be overwritten: a place in a volume is {shown}:/ and a \
         path; to overwrite it, {instead}"
    )))
}

/// Refuses to write to `path` if it holds a filesystem. If the file cannot be read, the call that
/// opens it for writing reports the error.
///
/// # Errors
/// The refusal, and errors of reading the file.
pub(crate) fn refuse(path: &Path) -> Result {
    let is_storage =
        |file_type: std::fs::FileType| file_type.is_file() || file_type.is_block_device();
    if !path.metadata().is_ok_and(|metadata| is_storage(metadata.file_type())) {
        return Ok(());
    }
    let file = match look_at(CWD, path) {
        Ok(file) => file,
        Err(Errno::ACCESS) => return Ok(()),
        Err(errno) => return Err(VerbFailure::Host(path.display().to_string(), errno.into())),
    };
    let found = refusal(path, &file);
    match found.map_err(|error| VerbFailure::Host(path.display().to_string(), error))? {
        Some(why) => Err(VerbFailure::Refused(why)),
        None => Ok(()),
    }
}
