//! Visits a file and, with `-R`, everything below it, for verbs that change attributes.

use offshoot_vfs::path::{LastLink, at_path, resolve};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Attr, Error, FileSystem, FileType, HeldFiles};

use crate::edit::{EditReport, joined};

/// The change of one file. It gets the attributes, the path, and the report for errors.
type ChangeFile<'c> =
    &'c mut dyn FnMut(&Attr, &dyn Fn() -> Vec<u8>, &mut EditReport<'_, '_>) -> Result<(), Error>;

/// Calls `change` for the file at `path` and, if `is_recursive`, for everything below it. A file
/// that cannot be changed is reported, and the walk goes on.
pub(super) fn each(
    fs: &HeldFiles<'_>,
    path: &[u8],
    last: LastLink,
    is_recursive: bool,
    report: &mut EditReport<'_, '_>,
    change: ChangeFile<'_>,
) -> Result<(), Error> {
    let top = resolve(fs, path, last)?;
    let attr = fs.attr(top).map_err(|error| at_path(error, path))?;
    change(&attr, &|| path.to_vec(), report).map_err(|error| at_path(error, path))?;
    if is_recursive && attr.file_type == FileType::Directory {
        walk(fs.inner(), top, (), DEPTH_MAX, &mut Below { top: path, report, change });
    }
    Ok(())
}

struct Below<'a, 'r, 'f, 'c> {
    top: &'a [u8],
    report: &'a mut EditReport<'r, 'f>,
    change: ChangeFile<'c>,
}

impl Below<'_, '_, '_, '_> {
    fn change(&mut self, entry: &WalkedFile<'_>) {
        let path = || joined(self.top, entry.path);
        if let Err(error) = (self.change)(entry.attr, &path, self.report) {
            self.report.error(&at_path(error, &path()));
        }
    }
}

impl WalkVisitor for Below<'_, '_, '_, '_> {
    type Directory = ();

    fn enter(&mut self, (): &(), entry: &WalkedFile<'_>) -> Option<()> {
        self.change(entry);
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        self.change(entry);
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        self.report.at(&joined(self.top, path), error);
    }

    fn is_stopped(&self) -> bool {
        false
    }
}
