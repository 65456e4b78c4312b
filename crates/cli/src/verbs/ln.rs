//! `offshoot ln`: give a file one more name, or make a symbolic link.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_btrfs::Filesystem;
use offshoot_vfs::{
    Errno, Error, FileId, FileSystem, FileSystemMut, FileType, Place, Timestamp,
};

use crate::args::LnArguments;
use crate::edit::{Aim, NewName, Volumes, moment, new_file, one_volume};
use crate::exit::Result;
use crate::output::{Console, Escaped};
use crate::place::Place as NamedPlace;
use crate::places::Failures;
use crate::resolve::{LastLink, at_path, last_name, resolve};
use crate::session::Access;

pub(super) fn run(arguments: &LnArguments, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let place = NamedPlace::parse(&arguments.place);
    let (volume, target, path) = if arguments.symbolic {
        (place.volume, arguments.target.as_bytes().to_vec(), place.path)
    } else {
        let target = NamedPlace::parse(&arguments.target);
        let (volume, mut paths) = one_volume("ln", [target, place].into_iter())?;
        let path = paths.pop().unwrap_or_default();
        (volume, paths.pop().unwrap_or_default(), path)
    };
    let mut volumes = Volumes::new(&arguments.tree, console);
    let fs = volumes.open(&volume, Access::Write)?;
    let mut failures = Failures::naming(false, console);
    if let Err(error) = link(&fs, arguments, &target, &path, at) {
        failures.inside(&volume, crate::exit::ExitStatus::of(&error), &error);
    }
    volumes.sync(&mut failures);
    failures.result()
}

fn link(
    fs: &Filesystem,
    arguments: &LnArguments,
    target: &[u8],
    path: &[u8],
    at: Timestamp,
) -> Result<(), Error> {
    let file = match arguments.symbolic {
        true => None,
        false => Some(linkable(fs, target)?),
    };
    let aim = Aim::of(fs, path, arguments.no_target_directory, 1, LastLink::Keep)?;
    let last = last_name(target).unwrap_or(target);
    let new = aim.new_name(fs, path, last, false)?;
    let place = Place { dir: new.dir, name: &new.name };
    make_room(fs, &new, file, path, arguments.force, at)?;
    let made = match file {
        Some(file) => fs.link(file, place, at),
        None => fs.symlink(place, target, &new_file(fs, new.dir, 0o777, at)?).map(|_| ()),
    };
    made.map_err(|error| match error {
        Error::Posix { errno: Errno::XDEV, .. } => {
            let what = format!("{} and {}", Escaped(target), Escaped(path));
            Error::posix(Errno::XDEV, format!("{what} are in different subvolumes"))
        }
        other => at_path(other, path),
    })
}

/// The file that gets one more name.
fn linkable(fs: &dyn FileSystem, path: &[u8]) -> Result<FileId, Error> {
    let file = resolve(fs, path, LastLink::Keep)?;
    if fs.attr(file)?.file_type == FileType::Directory {
        let what = format!("{} is a directory, which has one name", Escaped(path));
        return Err(Error::posix(Errno::PERM, what));
    }
    Ok(file)
}

/// Takes the name from what has it, if that is asked for.
fn make_room(
    fs: &dyn FileSystemMut,
    new: &NewName,
    file: Option<FileId>,
    path: &[u8],
    force: bool,
    at: Timestamp,
) -> Result<(), Error> {
    let Some(existing) = new.existing else { return Ok(()) };
    if !force || Some(existing) == file {
        return Err(Error::posix(Errno::EXIST, Escaped(path).to_string()));
    }
    fs.unlink(Place { dir: new.dir, name: &new.name }, at).map_err(|error| at_path(error, path))
}
