//! Making one file in a directory of the destination.
//!
//! Every name is made with a call that fails when the name exists (`O_EXCL`, `mknod`, `symlink`).
//! So a worker writes only to new files, and to those that a copy finds ([`super::existing`]). When
//! its data cannot be read, a new file is removed again, with all names that it got by then. A file
//! that was there keeps what was written.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::PoisonError;

use offshoot_vfs::{Attr, Errno, Error, FileId, FileType, HeldFile, SafeName, Structure};
use rustix::fs::{self, AtFlags, Mode, OFlags};

use super::attributes::{MadeFile, MadeHandle};
use super::context::{ExtractTrouble, TransferContext};
use super::directory::ExtractDirectoryRef;
use super::existing::{self, ExtractTarget, TargetKind};
use super::links::LinkName;
use super::problems::Unapplied;
use crate::stream::{StreamFailure, write_contents};

/// A file to be made.
pub(crate) struct FileJob<'a> {
    /// Where.
    pub(crate) directory: ExtractDirectoryRef<'a>,
    /// Under which name.
    pub(crate) name: SafeName,
    /// The file of the volume.
    pub(crate) _held: HeldFile<'a>,
    /// What it is to become.
    pub(crate) attr: Attr,
    /// What of it is there already.
    pub(crate) begun: BegunFile,
}

/// What of a file is there before it goes to a worker.
pub(crate) enum BegunFile {
    Nothing,
    /// It was made, because it has several names, and is to be filled.
    Made(ExtractTarget),
    /// All of its data, by the extraction that this one goes on with.
    Whole,
}

impl FileJob<'_> {
    /// Makes it, and reports what goes wrong.
    pub(crate) fn run(mut self, context: &TransferContext<'_>) {
        let result = match self.attr.file_type {
            FileType::Regular => match std::mem::replace(&mut self.begun, BegunFile::Nothing) {
                BegunFile::Whole => self.apply_again(context),
                BegunFile::Made(target) => self.fill(context, &target),
                BegunFile::Nothing => create(context, &self.directory, &self.name, &self.attr)
                    .and_then(|target| self.fill(context, &target)),
            },
            _ => make_special(context, &self.directory, &self.name, &self.attr),
        };
        match result {
            Ok(()) => {
                context.tell(self.directory.file(), &self.name);
                context.count_file();
            }
            Err(trouble) => {
                context.report(&context.path(self.directory.file(), &self.name), &trouble);
            }
        }
    }

    /// It is not made, because all must end. One that was made already, and is empty, goes.
    pub(crate) fn give_up(self, context: &TransferContext<'_>) {
        if let BegunFile::Made(ExtractTarget { kind: TargetKind::New, .. }) = self.begun {
            remove(context, &self.directory, &self.name, &self.attr);
        }
    }

    /// Gives its attributes once more to a file that has them. So the host refuses what it refused
    /// the first time, and the summary of a resumed extraction is that of one that was not
    /// interrupted.
    fn apply_again(&self, context: &TransferContext<'_>) -> Result<(), ExtractTrouble> {
        let (directory, name, attr) = (&self.directory, &self.name, &self.attr);
        let handle = MadeHandle::Named(directory.fd(), name);
        let made = MadeFile { handle, attr, mode_now: None, parent: directory.file(), name };
        // Its own permissions may keep its owner from giving it extended attributes. An error here
        // comes again, and is reported, when it gets its last permissions.
        let _ = made.set_mode(first_mode(attr));
        Ok(made.apply(context)?)
    }

    fn fill(
        &self,
        context: &TransferContext<'_>,
        target: &ExtractTarget,
    ) -> Result<(), ExtractTrouble> {
        let ExtractTarget { file, kind } = target;
        let size = self.attr.size;
        if *kind == TargetKind::Stream {
            return copy_to_stream(context, file, &self.attr);
        }
        let result = copy(context, file, self.attr.file, 0..size)
            .and_then(|end| if end < size { set_size(file, size) } else { Ok(()) });
        match result {
            Ok(()) => finish(context, &self.directory, &self.name, &self.attr, target),
            Err(trouble) => {
                if *kind == TargetKind::New {
                    remove(context, &self.directory, &self.name, &self.attr);
                }
                Err(trouble)
            }
        }
    }
}

/// The permissions with which a regular file is made: its own, so that most files need no
/// change of them, but for the set-id and sticky bits, and such that its owner may write it, which
/// its extended attributes need.
fn first_mode(attr: &Attr) -> u32 {
    attr.permissions & 0o777 | 0o600
}

/// Makes an empty regular file, or opens the file that is there, to be filled.
pub(crate) fn create(
    context: &TransferContext<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
    attr: &Attr,
) -> Result<ExtractTarget, ExtractTrouble> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = if directory.is_private() { first_mode(attr) } else { 0o600 };
    let make = || fs::openat(directory.fd(), &**name, flags, Mode::from_raw_mode(mode));
    let make = || make().and_then(|file| directory.unshare(&file).map(|()| file));
    let first = match make() {
        Err(Errno::EXIST) => match existing::open(context, directory, name)? {
            Some(target) => return Ok(target),
            None => directory.make_named(name, make)?,
        },
        result => result,
    };
    let file = first.map_err(|errno| ExtractTrouble::Host("cannot make the file", errno))?;
    Ok(ExtractTarget { file: file.into(), kind: TargetKind::New })
}

/// Writes the data of a file to what takes one byte after the other.
fn copy_to_stream(
    context: &TransferContext<'_>,
    file: &File,
    attr: &Attr,
) -> Result<(), ExtractTrouble> {
    let wrote = |bytes| context.count_bytes(bytes);
    match write_contents(context.fs, attr.file, attr.size, &mut &*file, wrote) {
        Ok(()) => Ok(()),
        Err(StreamFailure::Source(error)) => Err(error.into()),
        Err(StreamFailure::Target(error)) => Err(ExtractTrouble::from_io("cannot write", &error)),
    }
}

/// Copies the data in `range`, holes left out, and gives the end of what was written.
pub(crate) fn copy(
    context: &TransferContext<'_>,
    file: &File,
    id: FileId,
    range: Range<u64>,
) -> Result<u64, ExtractTrouble> {
    let mut end = range.start;
    let mut refused = None;
    let result = context.fs.read_data(id, range.clone(), &mut |offset, data| {
        let inside = offset >= end && (data.len() as u64) <= range.end.saturating_sub(offset);
        if !inside {
            return Err(Error::corrupt(
                Structure::FileExtent,
                "data outside of the range that was read",
            ));
        }
        file.write_all_at(data, offset).map_err(|error| {
            refused = Some(ExtractTrouble::from_io("cannot write", &error));
            Error::posix(Errno::IO, "the destination refused data")
        })?;
        end = offset + data.len() as u64;
        context.count_bytes(data.len());
        Ok(())
    });
    match (refused, result) {
        (Some(trouble), _) => Err(trouble),
        (None, Err(error)) => Err(error.into()),
        (None, Ok(())) => Ok(end),
    }
}

/// Gives a file its length, when it ends with a hole.
pub(crate) fn set_size(file: &File, size: u64) -> Result<(), ExtractTrouble> {
    fs::ftruncate(file, size).map_err(|errno| ExtractTrouble::Host("cannot set the size", errno))
}

/// Gives a regular file that is complete its attributes.
pub(crate) fn finish(
    context: &TransferContext<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
    attr: &Attr,
    target: &ExtractTarget,
) -> Result<(), ExtractTrouble> {
    let handle = MadeHandle::Open(target.file.as_fd());
    let is_new = target.kind == TargetKind::New;
    let mode_now = (is_new && directory.is_private()).then(|| first_mode(attr));
    let attr = if is_new { *attr } else { existing::wanted(context, attr, &target.file) };
    MadeFile { handle, attr: &attr, mode_now, parent: directory.file(), name }.apply(context)?;
    Ok(())
}

/// Makes anything but a regular file or a directory, with its attributes.
pub(crate) fn make_special(
    context: &TransferContext<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
    attr: &Attr,
) -> Result<(), ExtractTrouble> {
    let first_mode = if directory.is_private() { attr.permissions & 0o777 } else { 0 };
    let node = |file_type, device| {
        let mode = Mode::from_raw_mode(first_mode);
        directory.make_named(name, || fs::mknodat(directory.fd(), &**name, file_type, mode, device))
    };
    let device = fs::makedev(attr.rdev.0, attr.rdev.1);
    let result = match attr.file_type {
        FileType::Symlink => {
            let target = context.fs.read_link(attr.file)?;
            directory.make_named(name, || fs::symlinkat(&target[..], directory.fd(), &**name))
        }
        FileType::Fifo => node(fs::FileType::Fifo, 0),
        FileType::Socket => node(fs::FileType::Socket, 0),
        FileType::CharDevice => node(fs::FileType::CharacterDevice, device),
        FileType::BlockDevice => node(fs::FileType::BlockDevice, device),
        FileType::Regular | FileType::Directory => Ok(Err(Errno::INVAL)),
    };
    match result? {
        Ok(()) => {}
        Err(errno @ Errno::PERM)
            if matches!(attr.file_type, FileType::CharDevice | FileType::BlockDevice) =>
        {
            context.unapplied(Unapplied::Device, directory.file(), name, errno);
            return Ok(());
        }
        Err(errno) => return Err(ExtractTrouble::Host("cannot make it", errno)),
    }
    let handle = MadeHandle::Named(directory.fd(), name);
    let mode_now = directory.is_private().then_some(first_mode);
    MadeFile { handle, attr, mode_now, parent: directory.file(), name }.apply(context)?;
    Ok(())
}

/// Removes a file whose data could not be read, under every name that it was given.
pub(crate) fn remove(
    context: &TransferContext<'_>,
    directory: &ExtractDirectoryRef<'_>,
    name: &SafeName,
    attr: &Attr,
) {
    let report = |parent, name: &SafeName, errno| {
        let trouble = ExtractTrouble::Host("cannot remove what was written of it", errno);
        context.report(&context.path(parent, name), &trouble);
    };
    if attr.nlink < 2 {
        if let Err(errno) = fs::unlinkat(directory.fd(), &**name, AtFlags::empty()) {
            report(directory.file(), name, errno);
        }
        return;
    }
    let mut links = context.links.lock().unwrap_or_else(PoisonError::into_inner);
    let mut remove_all = || -> std::io::Result<()> {
        links.mark_unreadable(attr)?;
        for made in links.names(attr)? {
            let LinkName { parent, name } = made?;
            let removed =
                context.with_directory(parent, |fd| fs::unlinkat(fd, &*name, AtFlags::empty()));
            match removed {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => report(parent, &name, errno),
            }
        }
        Ok(())
    };
    if let Err(error) = remove_all() {
        let trouble = ExtractTrouble::from_io("cannot remove its names", &error);
        context.report(&context.path(directory.file(), name), &trouble);
    }
}
