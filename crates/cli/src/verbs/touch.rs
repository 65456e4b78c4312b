//! `offshoot touch`: changes times, and makes empty files.

use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, resolve};
use offshoot_vfs::{Errno, Error, FileSystemMut, SetAttr, SetTime, Timestamp};

use crate::args::TouchArguments;
use crate::edit::{Caller, at_every_place, file_or_new, require_one_volume};
use crate::exit::{Result, VerbFailure};
use crate::moments::{parse_stamp, parse_time};
use crate::output::Console;
use crate::place::VolumePath;

pub(super) fn run(arguments: &TouchArguments, console: &Arc<Console>) -> Result {
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let given = match (&arguments.date, &arguments.stamp) {
        (Some(text), _) => Some(parse_time(text, caller.at)),
        (None, Some(text)) => Some(parse_stamp(text, caller.at)),
        (None, None) => None,
    };
    let given = given.transpose().map_err(VerbFailure::Usage)?;
    let reference = arguments.reference.as_ref().map(|text| VolumePath::parse(text));
    let places: Vec<_> = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    if let Some(reference) = &reference {
        require_one_volume("touch -r", &[std::slice::from_ref(reference), &places].concat())?;
    }
    let both = arguments.access == arguments.modification;
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let last = if arguments.no_dereference { LastLink::Keep } else { LastLink::Follow };
        let (access, modification) = match &reference {
            Some(VolumePath { path, .. }) => times_of(fs, path, last)?,
            None => given.map_or((caller.at, caller.at), |time| (time, time)),
        };
        let file = match resolve(fs, path, last) {
            Err(Error::Posix { errno: Errno::NOENT, .. }) if arguments.no_create => return Ok(()),
            Err(Error::Posix { errno: Errno::NOENT, .. }) if !arguments.no_dereference => {
                file_or_new(fs, path, &caller)?
            }
            found => found?,
        };
        let set = SetAttr {
            atime: (both || arguments.access).then_some(SetTime::To(access)),
            mtime: (both || arguments.modification).then_some(SetTime::To(modification)),
            ..SetAttr::default()
        };
        fs.set_attr(file, &set, caller.at).map_err(|error| at_path(error, path))
    })
}

fn times_of(
    fs: &dyn FileSystemMut,
    path: &[u8],
    last: LastLink,
) -> Result<(Timestamp, Timestamp), Error> {
    let file = resolve(fs, path, last)?;
    let attr = fs.attr(file).map_err(|error| at_path(error, path))?;
    Ok((attr.atime, attr.mtime))
}
