//! `offshoot fallocate`: space of a file is allocated, freed, zeroed or moved.

use std::sync::Arc;

use offshoot_vfs::{Errno, Error, Fallocate, FileId, FileSystemMut, Place};

use crate::args::FallocateArguments;
use crate::edit::{Caller, at_every_place, new_file};
use crate::exit::Result;
use crate::output::{Console, Escaped};
use crate::place::Place as NamedPlace;
use crate::resolve::{LastLink, at_path, resolve, resolve_end};

pub(super) fn run(arguments: &FallocateArguments, console: &Arc<Console>) -> Result {
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let what = what(arguments);
    let places = vec![NamedPlace::parse(&arguments.place)];
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let file = match what {
            Fallocate::Allocate { .. } => opened(fs, path, &caller)?,
            _ => resolve(fs, path, LastLink::Follow)?,
        };
        let done = fs.fallocate(file, what, arguments.offset, arguments.length, caller.at);
        done.map_err(|error| at_path(error, path))
    })
}

fn what(arguments: &FallocateArguments) -> Fallocate {
    let keep_size = arguments.keep_size;
    match arguments {
        FallocateArguments { punch_hole: true, .. } => Fallocate::PunchHole,
        FallocateArguments { zero_range: true, .. } => Fallocate::Zero { keep_size },
        FallocateArguments { collapse_range: true, .. } => Fallocate::Collapse,
        FallocateArguments { insert_range: true, .. } => Fallocate::Insert,
        _ => Fallocate::Allocate { keep_size },
    }
}

/// The file at `path`, which is made when nothing is there.
fn opened(fs: &dyn FileSystemMut, path: &[u8], caller: &Caller) -> Result<FileId, Error> {
    let end = resolve_end(fs, path, LastLink::Follow)?;
    match (end.file, end.place) {
        (Some(file), _) => Ok(file),
        (None, Some((dir, name))) if !end.must_be_directory => {
            let new = new_file(fs, dir, 0o666, caller)?;
            fs.create(Place { dir, name: &name }, &new).map_err(|error| at_path(error, path))
        }
        _ => Err(Error::posix(Errno::ISDIR, Escaped(path).to_string())),
    }
}
