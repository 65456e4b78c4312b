//! `offshoot ln`: gives a file one more name, or makes a symbolic link.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, last_name, leads_to_itself, resolve, resolve_end};
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, FileType, HeldFiles, make_over,
};

use crate::args::LnArguments;
use crate::edit::{Aim, Caller, Volumes, is_same, joined, new_file, place_in, require_one_volume};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, write_name};
use crate::place::VolumePath;
use crate::places::Failures;
use crate::session::Access;

pub(super) fn run(arguments: &LnArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let place = VolumePath::parse(&arguments.place);
    if arguments.symbolic
        && let Some(target) = VolumePath::parse_unless_host(&arguments.target)
        && is_same(&target.volume, &place.volume)
    {
        let path = Escaped(&target.path);
        let message = format!("with -s TARGET is the text that the link will hold: write {path}");
        return Err(VerbFailure::Usage(message));
    }
    let mut places = vec![place];
    let target = if arguments.symbolic {
        arguments.target.as_bytes().to_vec()
    } else {
        places.push(VolumePath::parse(&arguments.target));
        places[1].path.clone()
    };
    require_one_volume("ln", &places)?;
    let mut volumes = Volumes::new(places.iter(), &arguments.edit, console)?;
    let VolumePath { volume, path } = &places[0];
    let fs = volumes.open(volume, Access::Write)?;
    let mut failures = Failures::new(console);
    let linked = link(&HeldFiles::new(&*fs), arguments, &target, path, &caller);
    volumes.done(volume, path, linked.is_ok());
    let mut told = Ok(());
    match linked {
        Ok(new) if arguments.verbose => {
            let place = place_in(volume, &new);
            told = tell(out, &place, arguments);
        }
        Ok(_) => {}
        Err(error) => failures.inside(volume, ExitStatus::of(&error), &error),
    }
    volumes.sync(&mut failures);
    told?;
    failures.result()
}

fn tell(out: &mut dyn Write, place: &[u8], arguments: &LnArguments) -> io::Result<()> {
    out.write_all(b"'")?;
    write_name(out, place)?;
    out.write_all(if arguments.symbolic { b"' -> '" } else { b"' => '" })?;
    write_name(out, arguments.target.as_bytes())?;
    writeln!(out, "'")
}

/// Makes the link. Returns its path.
fn link(
    fs: &dyn FileSystemMut,
    arguments: &LnArguments,
    target: &[u8],
    path: &[u8],
    caller: &Caller,
) -> Result<Vec<u8>, Error> {
    let file = if arguments.symbolic { None } else { Some(linkable(fs, target)?) };
    let is_link = || -> Result<bool, Error> {
        let Some(file) = resolve_end(fs, path, LastLink::Keep)?.file else { return Ok(false) };
        Ok(fs.attr(file)?.file_type == FileType::Symlink)
    };
    let is_name = arguments.no_target_directory || arguments.no_dereference && is_link()?;
    let aim = Aim::of(fs, path, is_name, 1, LastLink::Keep)?;
    let last = last_name(target).unwrap_or(target);
    let new = aim.new_name(fs, path, last, false)?;
    let place = EntryPlace { dir: new.dir, name: &new.name };
    let shown = match aim {
        Aim::Into(_) => joined(path, &new.name),
        Aim::Name(_) => path.to_vec(),
    };
    if file.is_some() && new.existing == file && arguments.force {
        return require_other_name(fs, target, place, path).map(|()| shown);
    }
    if let (None, Some(existing)) = (file, new.existing)
        && leads_to_itself(fs, place, target, existing)?
    {
        return Err(one_name(target, path));
    }
    let new_link = new_file(fs, new.dir, 0o777, caller)?;
    let make = |place: EntryPlace<'_>| match file {
        Some(file) => fs.link(file, place, caller.at),
        None => fs.symlink(place, target, &new_link).map(drop),
    };
    let linked = match new.existing {
        None => make(place),
        Some(_) if arguments.force => make_over(fs, place, caller.at, make),
        Some(_) => Err(Error::posix(Errno::EXIST, "")),
    };
    linked.map(|()| shown).map_err(|error| match error {
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

/// Accepts a file that has the name already, unless the target was given by that very name.
fn require_other_name(
    fs: &dyn FileSystem,
    target: &[u8],
    place: EntryPlace<'_>,
    path: &[u8],
) -> Result<(), Error> {
    match resolve_end(fs, target, LastLink::Keep)?.place {
        Some((dir, name)) if (EntryPlace { dir, name: &name }) == place => {
            Err(one_name(target, path))
        }
        _ => Ok(()),
    }
}

fn one_name(target: &[u8], path: &[u8]) -> Error {
    let what = format!("{} and {} are one name", Escaped(target), Escaped(path));
    Error::posix(Errno::INVAL, what)
}
