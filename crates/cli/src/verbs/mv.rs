//! `offshoot mv`: moves or renames inside a volume.

use std::collections::HashSet;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_transfer::Hint;
use offshoot_vfs::globs::expand;
use offshoot_vfs::path::{LastLink, at_path, bare, last_name, resolve, resolve_end};
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileId, FileSystemMut, FileType, HeldFiles, Rename, Timestamp,
};

use crate::args::MvArguments;
use crate::edit::{Aim, Volumes, joined, moment, place_in, require_one_source, require_one_volume};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, words, write_name};
use crate::place::VolumePath;
use crate::places::Failures;
use crate::session::Access;

pub(super) fn run(arguments: &MvArguments, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let mut places: Vec<VolumePath> =
        arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    if let [only] = &arguments.places[..] {
        return Err(VerbFailure::Usage(format!("where to move {} is missing", only.display())));
    }
    if let [_, more, _, ..] = &arguments.places[..] {
        require_one_source(arguments.no_target_directory, Some(more.as_bytes()))?;
    }
    require_one_volume("mv", &places).map_err(|failure| {
        VerbFailure::Usage(format!("{failure}; copy with `offshoot cp` and remove"))
    })?;
    let mut volumes = Volumes::new(places.iter(), &arguments.edit, console)?;
    let Some(VolumePath { volume, path }) = places.pop() else { return Ok(()) };
    let fs = volumes.open(&volume, Access::Write)?;
    let mut failures = Failures::new(console);
    let inside = |error| VerbFailure::Inside(volume.clone(), error);
    let held = HeldFiles::new(&*fs);
    let mut sources = Vec::new();
    for place in places {
        sources.extend(expand(&held, &place.path).map_err(inside)?);
    }
    let shown = |path: &[u8]| place_in(&volume, path);
    let more = sources.get(1).map(|path| shown(path));
    require_one_source(arguments.no_target_directory, more.as_deref())?;
    let aim = Aim::of(&held, &path, arguments.no_target_directory, sources.len(), LastLink::Keep)
        .map_err(inside)?;
    let how = match arguments {
        MvArguments { exchange: true, .. } => Rename::Exchange,
        MvArguments { no_clobber: true, .. } => Rename::NoReplace,
        _ => Rename::Replace,
    };
    let mut told = Ok(());
    let mut made = HashSet::new();
    for source in &sources {
        let renamed = rename(&held, source, &aim, &path, &mut made, (how, at));
        volumes.done(&volume, source, renamed.is_ok());
        match renamed {
            Ok(Some(new)) if arguments.verbose => {
                told = tell(out, &shown(source), &shown(&new));
                if told.is_err() {
                    break;
                }
            }
            Ok(_) => {}
            Err(error) => failures.inside(&volume, ExitStatus::of(&error), &error),
        }
    }
    drop(held);
    // Changes are made durable even if standard output cannot be written any more.
    volumes.sync(&mut failures);
    told?;
    failures.result()
}

fn tell(out: &mut dyn Write, from: &[u8], to: &[u8]) -> std::io::Result<()> {
    out.write_all(b"renamed '")?;
    write_name(out, from)?;
    out.write_all(b"' -> '")?;
    write_name(out, to)?;
    writeln!(out, "'")
}

/// Gives the file at `source` its new name. Returns the name, or `None` if it must not be replaced.
fn rename(
    fs: &dyn FileSystemMut,
    source: &[u8],
    aim: &Aim,
    path: &[u8],
    made: &mut HashSet<(FileId, Vec<u8>)>,
    (how, at): (Rename, Timestamp),
) -> Result<Option<Vec<u8>>, Error> {
    let fail = |errno, what: String| Err(Error::posix(errno, what));
    let shown = Escaped(source);
    // A link is moved itself, even if a slash follows its name.
    let bare = bare(source);
    let found = resolve_end(fs, bare, LastLink::Keep)?;
    let Some(file) = found.file else { return fail(Errno::NOENT, shown.to_string()) };
    if how == Rename::NoReplace && matches!(aim, Aim::Name(end) if end.file.is_some()) {
        return Ok(None);
    }
    super::rm::require_name(bare)?;
    let Some((dir, name)) = found.place else { return Err(super::rm::root()) };
    let attr = fs.attr(file)?;
    let is_directory = attr.file_type == FileType::Directory;
    if bare.len() < source.len() && !is_directory {
        return fail(Errno::NOTDIR, shown.to_string());
    }
    let new = aim.new_name(fs, path, last_name(source).unwrap_or(&name), is_directory)?;
    let shown_new = match aim {
        Aim::Into(_) => joined(path, &new.name),
        Aim::Name(_) => path.to_vec(),
    };
    let (from, to) =
        (EntryPlace { dir, name: &name }, EntryPlace { dir: new.dir, name: &new.name });
    if how == Rename::NoReplace && new.existing.is_some() {
        return Ok(None);
    }
    let new_name = (new.dir, new.name.clone());
    if made.contains(&new_name) && new.existing.is_some() && !is_directory {
        let what = format!("{}: {}", Escaped(&shown_new), words(Hint::JustMade));
        return fail(Errno::EXIST, what);
    }
    // If a link replaced the file that it leads to, the file would be lost.
    let is_of_link = |existing| {
        how == Rename::Replace
            && attr.file_type == FileType::Symlink
            && resolve(fs, source, LastLink::Follow).is_ok_and(|target| target == existing)
    };
    if new.existing.is_some_and(|existing| existing == file || is_of_link(existing)) {
        let what = format!("{shown} and {} are one file", Escaped(&shown_new));
        return fail(Errno::INVAL, what);
    }
    let renamed = fs.rename_with(from, to, how, at);
    if renamed.is_ok() {
        made.insert(new_name);
    }
    renamed.map(|()| Some(shown_new.clone())).map_err(|error| {
        let Error::Posix { errno, .. } = error else { return at_path(error, source) };
        let (between, advice) = match how {
            Rename::Exchange => {
                ("and", "of two subvolumes; only subvolumes themselves can be exchanged then")
            }
            _ => ("to", "in another subvolume; copy and remove it"),
        };
        let what = format!("{shown} {between} {}", Escaped(&shown_new));
        let what = if errno == Errno::XDEV { format!("{what}, {advice}") } else { what };
        Error::posix(errno, what)
    })
}
