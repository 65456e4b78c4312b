//! `offshoot fallocate`: allocates, frees, zeros or moves space of a file.

use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, resolve};
use offshoot_vfs::{Fallocate, FileSystemMut};

use crate::args::FallocateArguments;
use crate::edit::{Caller, at_every_place, file_or_new};
use crate::exit::Result;
use crate::output::Console;
use crate::place::VolumePath;

pub(super) fn run(arguments: &FallocateArguments, console: &Arc<Console>) -> Result {
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let what = what(arguments);
    let places = vec![VolumePath::parse(&arguments.place)];
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let file = match what {
            Fallocate::Allocate { .. } => file_or_new(fs, path, &caller)?,
            _ => resolve(fs, path, LastLink::Follow)?,
        };
        let done = fs.fallocate(file, what, arguments.offset, arguments.length, caller.at);
        done.map_err(|error| at_path(error, path))
    })
}

fn what(arguments: &FallocateArguments) -> Fallocate {
    let keeps_size = arguments.keep_size;
    match arguments {
        FallocateArguments { punch_hole: true, .. } => Fallocate::PunchHole,
        FallocateArguments { zero_range: true, .. } => Fallocate::Zero { keeps_size },
        FallocateArguments { collapse_range: true, .. } => Fallocate::Collapse,
        FallocateArguments { insert_range: true, .. } => Fallocate::Insert,
        _ => Fallocate::Allocate { keeps_size },
    }
}
