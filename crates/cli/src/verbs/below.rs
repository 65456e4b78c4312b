//! A file and, where that is asked for, everything below it: what `-R` means to verbs that change
//! attributes.

use offshoot_vfs::{Attr, Error, FileSystem, FileType};

use crate::edit::{Report, joined};
use crate::extract::{Entry, Visitor, walk};
use crate::resolve::{LastLink, at_path, resolve};

/// The deepest tree that is gone through: far beyond what any path names.
const DEPTH_MAX: usize = 1 << 16;

/// Calls `change` for the file at `path` and, if `is_recursive`, for all below it. What cannot be
/// changed is reported, and the others are changed.
pub(super) fn each(
    fs: &dyn FileSystem,
    path: &[u8],
    last: LastLink,
    is_recursive: bool,
    report: &mut Report<'_, '_>,
    change: &mut dyn FnMut(&Attr) -> Result<(), Error>,
) -> Result<(), Error> {
    let top = resolve(fs, path, last)?;
    let attr = fs.attr(top).map_err(|error| at_path(error, path))?;
    change(&attr).map_err(|error| at_path(error, path))?;
    if is_recursive && attr.file_type == FileType::Directory {
        walk(fs, top, (), DEPTH_MAX, &mut Below { top: path, report, change });
    }
    Ok(())
}

struct Below<'a, 'r, 'f> {
    top: &'a [u8],
    report: &'a mut Report<'r, 'f>,
    change: &'a mut dyn FnMut(&Attr) -> Result<(), Error>,
}

impl Below<'_, '_, '_> {
    fn change(&mut self, entry: &Entry<'_>) {
        if let Err(error) = (self.change)(entry.attr) {
            self.report.error(&at_path(error, &joined(self.top, entry.path)));
        }
    }
}

impl Visitor for Below<'_, '_, '_> {
    type Directory = ();

    fn enter(&mut self, (): &(), entry: &Entry<'_>) -> Option<()> {
        self.change(entry);
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &Entry<'_>) {
        self.change(entry);
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        self.report.at(&joined(self.top, path), error);
    }

    fn is_stopped(&self) -> bool {
        false
    }
}
