//! What a copy does with a name that is there already.
//!
//! When the caller named the destination of a regular file, the copy writes into the file there, as
//! `cp` does: it follows a symbolic link, other names of the file stay, and a device or a FIFO
//! takes the data and keeps its attributes. In all other cases the copy removes the file that is
//! there and gives its name again: below a directory that is copied, and for all but regular files.
//! A file with several names is removed too when
//! [`Manner::is_apart`](crate::copy::Manner::is_apart) says so.
//!
//! A file or device that the caller refuses is neither written into nor removed.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use offshoot_vfs::walk::WalkedFile;
use offshoot_vfs::{Attr, Errno, SafeName, Timestamp};
use rustix::fs::{self, AtFlags, Mode, OFlags};

use super::context::{ExtractTrouble, TransferContext};
use super::directory::ExtractDirectoryRef;
use super::onto::Overwrite;
use crate::copy::PreservedAttribute;
use crate::host::{host_id, look_at};

/// A file that is to be filled.
pub(crate) struct ExtractTarget {
    /// The file, open to be written.
    pub(crate) file: File,
    /// What it was.
    pub(crate) kind: TargetKind,
}

/// What a file was before it is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TargetKind {
    /// It was made for this, and is removed when it cannot be filled.
    New,
    /// A regular file that was there, and is empty now.
    Emptied,
    /// A device, a FIFO or a terminal, which takes one byte after the other.
    Stream,
}

/// What a name of the destination leads to.
enum ExistingEntry {
    /// It is written into.
    Open(ExtractTarget),
    /// It is replaced.
    Replace,
}

/// Opens what has the name `name` in `directory` to be filled with a regular file. `None` when
/// that is to be replaced instead.
pub(crate) fn open(
    context: &TransferContext<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
) -> Result<Option<ExtractTarget>, ExtractTrouble> {
    let Some(overwrite) = context.overwrite.filter(|overwrite| overwrite.is_named) else {
        return Ok(None);
    };
    match find(context, &overwrite, directory, name)? {
        ExistingEntry::Open(target) => Ok(Some(target)),
        ExistingEntry::Replace => Ok(None),
    }
}

fn find(
    context: &TransferContext<'_>,
    overwrite: &Overwrite<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
) -> Result<ExistingEntry, ExtractTrouble> {
    let fail = |errno| ExtractTrouble::Host("cannot open what is there", errno);
    let stat = match fs::statat(directory.fd(), &**name, AtFlags::empty()) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => {
            let path = context.host_path(directory.file(), name);
            let what = format!("{} is a symbolic link to nothing", path.display());
            return Err(ExtractTrouble::Refused(format!("{what}, and is not written through")));
        }
        Err(errno) => return Err(fail(errno)),
    };
    let file_type = fs::FileType::from_raw_mode(stat.st_mode);
    if overwrite.devices.contains(&host_id(stat.st_dev, stat.st_ino, stat.st_rdev)) {
        return Err(fail(Errno::BUSY));
    }
    if file_type.is_dir() {
        return Err(fail(Errno::ISDIR));
    }
    let is_regular = file_type.is_file();
    if is_regular || file_type.is_block_device() {
        refuse_occupied(context, overwrite, directory, name)?;
    }
    if is_regular && overwrite.manner.is_apart && stat.st_nlink > 1 {
        return Ok(ExistingEntry::Replace);
    }
    let truncate = if is_regular { OFlags::empty() } else { OFlags::TRUNC };
    let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC | truncate;
    let file = fs::openat(directory.fd(), &**name, flags, Mode::empty()).map_err(fail)?;
    let file = File::from(file);
    // Another program may have exchanged it since it was looked at.
    let is_same = fs::fstat(&file).is_ok_and(|now| {
        (now.st_dev, now.st_ino, now.st_mode) == (stat.st_dev, stat.st_ino, stat.st_mode)
    });
    if !is_same {
        return Err(fail(Errno::AGAIN));
    }
    if !is_regular {
        return Ok(ExistingEntry::Open(ExtractTarget { file, kind: TargetKind::Stream }));
    }
    fs::ftruncate(&file, 0)
        .map_err(|errno| ExtractTrouble::Host("cannot empty what is there", errno))?;
    Ok(ExistingEntry::Open(ExtractTarget { file, kind: TargetKind::Emptied }))
}

/// Whether what has the name of an entry stays, as the caller asked for. What cannot be looked at
/// is left to the call that makes the file.
pub(crate) fn is_kept(
    context: &TransferContext<'_>,
    directory: &ExtractDirectoryRef<'_>,
    entry: &WalkedFile<'_>,
) -> bool {
    let Some(overwrite) = context.overwrite.filter(|overwrite| overwrite.manner.may_keep()) else {
        return false;
    };
    // Through a link the copy writes to the file that it leads to.
    let follows = overwrite.is_named && entry.attr.file_type == offshoot_vfs::FileType::Regular;
    let flags = if follows { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
    let stat = fs::statat(directory.fd(), &**entry.name, flags);
    let stat =
        stat.or_else(|_| fs::statat(directory.fd(), &**entry.name, AtFlags::SYMLINK_NOFOLLOW));
    let Ok(stat) = stat else { return false };
    let nanos = u32::try_from(stat.st_mtime_nsec).unwrap_or_default();
    let old = Timestamp { secs: stat.st_mtime, nanos };
    overwrite.manner.keeps(old, entry.attr.mtime)
}

/// Removes what has the name `name` in `directory`, so that it can be given again.
///
/// The inner error is that of the host.
pub(crate) fn remove(
    context: &TransferContext<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
    overwrite: &Overwrite<'_>,
) -> Result<rustix::io::Result<()>, ExtractTrouble> {
    let stat = match fs::statat(directory.fd(), &**name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(errno) => return Ok(Err(errno)),
    };
    if overwrite.devices.contains(&host_id(stat.st_dev, stat.st_ino, stat.st_rdev)) {
        return Ok(Err(Errno::BUSY));
    }
    // Of a device only its node goes, and of a symbolic link only itself.
    if fs::FileType::from_raw_mode(stat.st_mode).is_file() {
        refuse_occupied(context, overwrite, directory, name)?;
    }
    Ok(fs::unlinkat(directory.fd(), &**name, AtFlags::empty()))
}

/// Asks the caller whether the file may be written over. A file that cannot be read is left to the
/// call that opens it.
fn refuse_occupied(
    context: &TransferContext<'_>,
    overwrite: &Overwrite<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
) -> Result<(), ExtractTrouble> {
    let Some(refuse) = overwrite.refuse else { return Ok(()) };
    let file = match look_at(directory.fd(), &**name) {
        Ok(file) => file,
        Err(Errno::ACCESS) => return Ok(()),
        Err(errno) => return Err(ExtractTrouble::Host("cannot look at what is there", errno)),
    };
    let path = context.host_path(directory.file(), name);
    let found = refuse(&path, &file);
    match found.map_err(|error| ExtractTrouble::from_io("cannot look at what is there", &error))? {
        Some(why) => Err(ExtractTrouble::Refused(why)),
        None => Ok(()),
    }
}

/// The attributes that a file gets that was there before: those that are not kept of the source
/// stay as they are.
pub(crate) fn wanted(context: &TransferContext<'_>, attr: &Attr, file: &File) -> Attr {
    let (Some(overwrite), Ok(now)) = (context.overwrite, file.metadata()) else { return *attr };
    let mut wanted = *attr;
    if !overwrite.preserve.keeps(PreservedAttribute::Mode) {
        wanted.permissions = now.mode() & 0o7777;
    }
    if !overwrite.preserve.keeps(PreservedAttribute::Ownership) {
        (wanted.uid, wanted.gid) = (now.uid(), now.gid());
    }
    wanted
}
