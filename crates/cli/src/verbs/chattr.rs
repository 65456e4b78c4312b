//! `offshoot chattr`: change flags.

use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, resolve};
use offshoot_vfs::{FileSystem, FileSystemMut};

use crate::args::{ChattrArguments, FlagChange};
use crate::edit::{at_every_place, moment};
use crate::exit::Result;
use crate::output::Console;
use crate::place::VolumePath;

pub(super) fn run(arguments: &ChattrArguments, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let places = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let file = resolve(fs, path, LastLink::Follow)?;
        let change = || {
            let old = fs.flags(file)?;
            let new = match arguments.flags {
                FlagChange::Add(flags) => old | flags,
                FlagChange::Remove(flags) => old - flags,
                FlagChange::Set(flags) => flags,
            };
            fs.set_flags(file, new, at)
        };
        change().map_err(|error| at_path(error, path))
    })
}
