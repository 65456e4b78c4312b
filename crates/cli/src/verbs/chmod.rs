//! `offshoot chmod`: changes permissions, and with `-v` or `-c` reports each file.

use std::fmt;
use std::io::{self, Write};
use std::sync::Arc;

use offshoot_vfs::path::{LastLink, resolve};
use offshoot_vfs::{FileSystem, FileSystemMut, FileType, SetAttr};

use super::below::each;
use crate::args::ChmodArguments;
use crate::edit::{Caller, at_every_place};
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, ModeLetters, write_name};
use crate::permissions::ModeChange;
use crate::place::VolumePath;

pub(super) fn run(
    arguments: &ChmodArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let change = ModeChange::parse(&arguments.mode).map_err(VerbFailure::Usage)?;
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let places = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    let mut told = ChangePrinter { out, failed: None };
    let result = at_every_place(places, &arguments.edit, console, |fs, path, report| {
        report.is_silent = arguments.silent;
        if arguments.verbose && resolve(fs, path, LastLink::Follow).is_err() {
            told.tell("", &report.place(path), &"could not be accessed");
        }
        each(fs, path, LastLink::Follow, arguments.recursive, report, &mut |attr, path, report| {
            // A symbolic link has no permissions of its own.
            if attr.file_type == FileType::Symlink {
                if arguments.verbose {
                    let what = "nor referent has been changed";
                    told.tell("neither symbolic link ", &report.place(&path()), &what);
                }
                return Ok(());
            }
            let is_directory = attr.file_type == FileType::Directory;
            // A file with several names may have been changed under another name since the walk
            // read it.
            let old = if attr.nlink > 1 { fs.attr(attr.file)? } else { *attr }.permissions;
            let new = change.of(old, is_directory, caller.umask);
            let set = SetAttr { permissions: Some(new), ..SetAttr::default() };
            let result = fs.set_attr(attr.file, &set, caller.at);
            let [was, is] = [old, new].map(|mode| ShownMode(attr.file_type, mode));
            let mut tell = |verb: &str, what: &dyn fmt::Display| {
                told.tell(&format!("{verb}mode of "), &report.place(&path()), what);
            };
            match &result {
                Err(_) if arguments.verbose => {
                    tell("failed to change ", &format_args!("from {was} to {is}"));
                }
                Ok(()) if new != old && (arguments.verbose || arguments.changes) => {
                    tell("", &format_args!("changed from {was} to {is}"));
                }
                Ok(()) if arguments.verbose => tell("", &format_args!("retained as {is}")),
                Ok(()) | Err(_) => {}
            }
            result?;
            // A caller who writes `-w` may not expect that the umask keeps some bits.
            let meant = change.of(old, is_directory, 0);
            if arguments.mode.starts_with('-') && new & !meant != 0 {
                let [is, meant] = [new, meant].map(|mode| letters(attr.file_type, mode));
                let what = format_args!("new permissions are {is}, not {meant}");
                report.failed(&path(), &what);
            }
            Ok(())
        })
    });
    told.failed.map_or(result, |error| Err(error.into()))
}

/// Permissions as `0644 (rw-r--r--)`.
struct ShownMode(FileType, u32);

impl fmt::Display for ShownMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o} ({})", self.1, letters(self.0, self.1))
    }
}

/// The nine letters of permissions.
fn letters(file_type: FileType, mode: u32) -> String {
    ModeLetters(file_type, mode).to_string().split_off(1)
}

/// Prints what was changed.
struct ChangePrinter<'a> {
    out: &'a mut dyn Write,
    /// Why standard output cannot be written any more.
    failed: Option<io::Error>,
}

impl ChangePrinter<'_> {
    fn tell(&mut self, before: &str, place: &[u8], after: &dyn fmt::Display) {
        if self.failed.is_some() {
            return;
        }
        let told = write!(self.out, "{before}'")
            .and_then(|()| write_name(self.out, place))
            .and_then(|()| writeln!(self.out, "' {after}"));
        self.failed = told.err();
    }
}
