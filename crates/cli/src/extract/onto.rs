//! Copying out of a volume to where something may be already: `cp`.
//!
//! It is an extraction but for this. Directories that are there are gone into, if they are no
//! symbolic links, and what else is there is removed before its name is given again. So
//! neither a link nor another name of a file leads anything outside of the destination. A
//! directory that was there may be open to others, so what is made in it is made for its owner
//! alone first, and without what the directory would give to it.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::Ordering;

use indicatif::ProgressBar;
use offshoot_vfs::{Attr, Error, FileId, FileType};
use rustix::fs::{self, CWD, Mode, OFlags};

use super::context::{Context, Counters, Trouble};
use super::destination::Limits;
use super::directory::DirectoryRef;
use super::name::SafeName;
use super::problems::Problems;
use super::walk::Entry;
use super::{Source, parent_path, tree};
use crate::copy::Preserve;
use crate::edit::HostId;
use crate::exit::{Failure, Result};

/// What a copy does that an extraction does not.
#[derive(Clone, Copy)]
pub(crate) struct Overwrite<'a> {
    /// Which attributes are kept.
    pub(crate) preserve: &'a Preserve,
    /// The devices of the volumes, which are never replaced.
    pub(crate) devices: &'a [HostId],
}

/// A copy to the host.
pub(crate) struct Onto<'a> {
    pub(crate) overwrite: Overwrite<'a>,
    pub(crate) problems: &'a Problems<'a>,
    pub(crate) progress: &'a ProgressBar,
    pub(crate) counters: &'a Counters,
    pub(crate) limits: Limits,
}

impl Onto<'_> {
    /// Copies `source` into the directory `parent`, as `name` or, without a name, what is in it.
    pub(crate) fn copy(
        &self,
        source: &Source<'_>,
        parent: &Path,
        name: Option<&SafeName>,
    ) -> Result<()> {
        let fail = |error| Failure::Host(parent.display().to_string(), error);
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let parent =
            File::from(fs::openat(CWD, parent, flags, Mode::empty()).map_err(|e| fail(e.into()))?);
        let attr = self.overwrite.preserve.of(&source.fs.attr(source.top)?);
        let is_directory = attr.file_type == FileType::Directory;
        let prefix = if is_directory { source.path } else { parent_path(source.path) };
        let progress = self.progress.clone();
        let mut context = Context::new(source.fs, source.top, prefix, self.problems, progress);
        context.overwrite = Some(self.overwrite);
        let result = if is_directory {
            self.directory(&context, source.top, attr, parent, name)
        } else {
            self.file(&context, source, &attr, parent, name)
        };
        if let Err(trouble) = result {
            context.report(source.path, &trouble);
        }
        self.counters.add(&context.counters);
        Ok(())
    }

    fn directory(
        &self,
        context: &Context<'_>,
        top: FileId,
        attr: Attr,
        parent: File,
        name: Option<&SafeName>,
    ) -> Result<(), Trouble> {
        let directory = match name {
            None => DirectoryRef::shared(context, parent, top, Some(attr)),
            Some(name) => DirectoryRef::shared(context, parent, top, None).make(name, &attr)?,
        };
        context.set_destination(&directory)?;
        context.counters.directories.fetch_add(1, Ordering::Relaxed);
        tree::extract_below(context, self.limits, top, directory);
        Ok(())
    }

    fn file(
        &self,
        context: &Context<'_>,
        source: &Source<'_>,
        attr: &Attr,
        parent: File,
        name: Option<&SafeName>,
    ) -> Result<(), Trouble> {
        let name = name.ok_or_else(|| {
            Error::posix(offshoot_vfs::Errno::ISDIR, "the destination is a directory")
        })?;
        let directory = DirectoryRef::shared(context, parent, source.top, None);
        context.set_destination(&directory)?;
        let path = source.path.get(context.prefix.len() + 1..).unwrap_or_default();
        let entry = Entry { parent: source.top, name, path, attr };
        tree::extract_one(context, self.limits, &directory, &entry);
        Ok(())
    }
}
