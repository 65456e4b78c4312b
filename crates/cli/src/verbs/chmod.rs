//! `offshoot chmod`: change permissions.

use std::sync::Arc;

use offshoot_vfs::{FileSystemMut, FileType, SetAttr};

use super::below::each;
use crate::args::ChmodArguments;
use crate::edit::{Caller, at_every_place};
use crate::exit::{Failure, Result};
use crate::output::Console;
use crate::permissions::ModeChange;
use crate::place::Place;
use crate::resolve::LastLink;

pub(super) fn run(arguments: &ChmodArguments, console: &Arc<Console>) -> Result {
    let change = ModeChange::parse(&arguments.mode).map_err(Failure::Usage)?;
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let places = arguments.places.iter().map(|text| Place::parse(text)).collect();
    at_every_place(places, &arguments.edit, console, |fs, path, report| {
        each(fs, path, LastLink::Follow, arguments.recursive, report, &mut |attr| {
            // A symbolic link has no permissions of its own.
            if attr.file_type == FileType::Symlink {
                return Ok(());
            }
            let is_directory = attr.file_type == FileType::Directory;
            let new = change.of(attr.permissions, is_directory, caller.umask);
            let set = SetAttr { permissions: Some(new), ..SetAttr::default() };
            fs.set_attr(attr.file, &set, caller.at)
        })
    })
}
