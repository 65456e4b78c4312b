//! Copying out of a volume to where something may be already: `cp`.
//!
//! It is an extraction but for this. Directories that are there are gone into, if they are no
//! symbolic links, and what else has a name is dealt with by [`super::existing`]: below a directory
//! it is removed before its name is given again, so neither a link nor another name of a file leads
//! anything outside of the destination. A directory that was there may be open to other users. So a
//! file in it is made for its owner alone first, and without the ACL that the directory would give
//! to it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use offshoot_vfs::walk::WalkedFile;
use offshoot_vfs::{Attr, Error, FileId, FileType, SafeName};
use rustix::fs::{self, AtFlags, CWD, Mode, OFlags};

use super::context::{ExtractTrouble, TransferContext};
use super::destination::Limits;
use super::directory::ExtractDirectoryRef;
use super::{ExtractSource, parent_path, tree};
use crate::copy::{Manner, Preserve, SharedCopy};
use crate::host::{HostId, Process};
use crate::{Result, TransferFailure};

/// Says why the file or device at a path, which is open, is not written over; `None` when it may
/// be.
pub type Refuse<'a> = &'a (dyn Fn(&Path, &File) -> io::Result<Option<String>> + Sync);

/// What a copy does that an extraction does not.
#[derive(Clone, Copy)]
pub(crate) struct Overwrite<'a> {
    /// Which attributes are kept.
    pub(crate) preserve: &'a Preserve,
    /// What is left out, replaced and reported.
    pub(crate) manner: &'a Manner,
    /// The devices of the volumes, which are never replaced.
    pub(crate) devices: &'a [HostId],
    /// The caller named the destination of this file; otherwise it is below a directory.
    pub(crate) is_named: bool,
    /// It resumes an extraction, which made all files that are there in a directory of its own.
    pub(crate) is_resumed: bool,
    /// The directory of the host that the copy goes into, as the caller named it.
    pub(crate) parent: &'a Path,
    /// Says which files and devices are not written over; `None` for a copy that asks about none.
    pub(crate) refuse: Option<Refuse<'a>>,
}

/// A copy to the host.
#[non_exhaustive]
pub struct Onto<'a> {
    /// What it shares with other copies. No data is shared with the host.
    pub shared: SharedCopy<'a>,
    /// The process, made ready.
    pub process: Process,
    /// Says which files and devices are not written over; `None` for a copy that asks about none.
    pub refuse: Option<Refuse<'a>>,
}

impl<'a> Onto<'a> {
    /// A copy that asks about no file and no device.
    #[must_use]
    pub fn new(shared: SharedCopy<'a>, process: Process) -> Self {
        Self { shared, process, refuse: None }
    }

    /// Copies `source` into the directory `parent` as `name`. Without a name it copies the files in
    /// `source`.
    pub fn copy(
        &self,
        source: &ExtractSource<'_>,
        parent: &Path,
        name: Option<&SafeName>,
    ) -> Result<()> {
        let fail = |error| TransferFailure::Host(parent.display().to_string(), error);
        let SharedCopy { preserve, manner, devices, problems, progress, counters, .. } =
            self.shared;
        let attr = preserve.of(&source.fs.attr(source.top)?);
        let is_directory = attr.file_type == FileType::Directory;
        // To write a file that is there takes no right to list its directory.
        let way = if is_directory { OFlags::RDONLY } else { OFlags::PATH };
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | way;
        let opened = fs::openat(CWD, parent, flags, Mode::empty()).map_err(|e| fail(e.into()))?;
        let overwrite = Overwrite {
            preserve,
            manner,
            devices,
            is_named: !is_directory,
            is_resumed: false,
            parent: &host_top(parent, is_directory.then_some(name).flatten()),
            refuse: self.refuse,
        };
        let prefix = if is_directory { source.path } else { parent_path(source.path) };
        let mut context = TransferContext::new(source.fs, source.top, prefix, problems, progress);
        context.overwrite = Some(overwrite);
        let parent = File::from(opened);
        let result = if is_directory {
            self.directory(&context, source.top, attr, parent, name)
        } else {
            self.file(&context, source, &attr, parent, name)
        };
        if let Err(trouble) = result {
            context.report(source.path, &trouble);
        }
        counters.add(&context.counters);
        Ok(())
    }

    fn limits(&self) -> Limits {
        Limits::share(self.process.descriptors, tree::batches_in_flight())
    }

    fn directory(
        &self,
        context: &TransferContext<'_>,
        top: FileId,
        attr: Attr,
        parent: File,
        name: Option<&SafeName>,
    ) -> Result<(), ExtractTrouble> {
        let directory = match name {
            None => ExtractDirectoryRef::shared(context, parent, top, Some(attr)),
            Some(name) => {
                let is_new = fs::statat(&parent, &**name, AtFlags::SYMLINK_NOFOLLOW).is_err();
                let made =
                    ExtractDirectoryRef::shared(context, parent, top, None).make(name, &attr)?;
                let to = || shown_top(context);
                if is_new {
                    self.shared.manner.tell(|| context.prefix.to_vec(), to);
                }
                made
            }
        };
        context.set_destination(&directory)?;
        context.counters.directories.fetch_add(1, Ordering::Relaxed);
        tree::extract_below(context, self.limits(), top, directory);
        Ok(())
    }

    fn file(
        &self,
        context: &TransferContext<'_>,
        source: &ExtractSource<'_>,
        attr: &Attr,
        parent: File,
        name: Option<&SafeName>,
    ) -> Result<(), ExtractTrouble> {
        let name = name.ok_or_else(|| {
            Error::posix(offshoot_vfs::Errno::ISDIR, "the destination is a directory")
        })?;
        let directory = ExtractDirectoryRef::shared(context, parent, source.top, None);
        context.set_destination(&directory)?;
        let path = source.path.get(context.prefix.len() + 1..).unwrap_or_default();
        let entry = WalkedFile { parent: source.top, name, path, attr };
        tree::extract_one(context, self.limits(), &directory, &entry);
        Ok(())
    }
}

/// The path of the host that the top of a copy becomes: that of its directory, for a file.
fn host_top(parent: &Path, name: Option<&SafeName>) -> PathBuf {
    let parent = if parent == Path::new(".") { Path::new("") } else { parent };
    name.map_or_else(|| parent.to_path_buf(), |name| parent.join(OsStr::from_bytes(name)))
}

/// The path of the host that the top became.
fn shown_top(context: &TransferContext<'_>) -> Vec<u8> {
    let top = context.overwrite.map_or(Path::new(""), |overwrite| overwrite.parent);
    top.as_os_str().as_bytes().to_vec()
}
