//! `offshoot truncate`: sets the length of files.

use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, resolve};
use offshoot_vfs::{Errno, Error, FileId, FileSystemMut, SetAttr};

use crate::args::{TruncateArguments, TruncateSize};
use crate::edit::{Caller, at_every_place, file_or_new};
use crate::exit::Result;
use crate::output::{Console, Escaped};
use crate::place::VolumePath;

pub(super) fn run(arguments: &TruncateArguments, console: &Arc<Console>) -> Result {
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let places = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let file = if arguments.no_create {
            match resolve(fs, path, LastLink::Follow) {
                Err(Error::Posix { errno: Errno::NOENT, .. }) => return Ok(()),
                found => found?,
            }
        } else {
            file_or_new(fs, path, &caller)?
        };
        truncate(fs, file, path, arguments.size, &caller)
    })
}

fn truncate(
    fs: &dyn FileSystemMut,
    file: FileId,
    path: &[u8],
    length: TruncateSize,
    caller: &Caller,
) -> Result<(), Error> {
    let size = length.of(fs.attr(file)?.size);
    let size = size.ok_or_else(|| Error::posix(Errno::FBIG, Escaped(path).to_string()))?;
    let set = SetAttr { size: Some(size), ..SetAttr::default() };
    fs.set_attr(file, &set, caller.at).map_err(|error| at_path(error, path))
}
