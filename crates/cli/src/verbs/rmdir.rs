//! `offshoot rmdir`: removes empty directories.

use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, bare, resolve_end};
use offshoot_vfs::{EntryPlace, Errno, Error, FileSystemMut, FileType, Timestamp};

use super::rm::{require_name, root, subvolume};
use crate::args::RmdirArguments;
use crate::edit::{at_every_place, moment};
use crate::exit::Result;
use crate::output::{Console, Escaped};
use crate::place::VolumePath;

pub(super) fn run(arguments: &RmdirArguments, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let places = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let mut path = bare(path);
        remove(fs, path, at)?;
        if !arguments.parents {
            return Ok(());
        }
        loop {
            let slash = path.iter().rposition(|&byte| byte == b'/').unwrap_or(0);
            path = bare(&path[..slash]);
            if path.is_empty() {
                return Ok(());
            }
            remove(fs, path, at)?;
        }
    })
}

fn remove(fs: &dyn FileSystemMut, path: &[u8], at: Timestamp) -> Result<(), Error> {
    let fail = |errno| Err(Error::posix(errno, Escaped(path).to_string()));
    let end = resolve_end(fs, path, LastLink::Keep)?;
    let Some(file) = end.file else { return fail(Errno::NOENT) };
    require_name(path)?;
    let Some((dir, name)) = end.place else { return Err(root()) };
    if fs.attr(file).map_err(|error| at_path(error, path))?.file_type != FileType::Directory {
        return fail(Errno::NOTDIR);
    }
    if file.dev != dir.dev {
        return Err(subvolume(path));
    }
    fs.rmdir(EntryPlace { dir, name: &name }, at).map_err(|error| at_path(error, path))
}
