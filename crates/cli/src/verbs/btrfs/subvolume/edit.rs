//! `offshoot subvolume create`, `snapshot`, `delete`, `set` and `set-default`.

use std::sync::Arc;

use offshoot_btrfs::Filesystem;
use offshoot_vfs::path::{LastLink, at_path, last_name, resolve, resolve_end};
use offshoot_vfs::{EntryPlace, Errno, Error, FileId, FileSystem, Timestamp};

use super::subvolume_at;
use crate::args::{EditSubvolumeArguments, SetArguments, SnapshotArguments, SubvolumesArguments};
use crate::edit::{Aim, Caller, Volumes, in_every_tree, new_file, require_one_volume};
use crate::exit::{ExitStatus, Result};
use crate::output::{Console, Escaped};
use crate::place::VolumePath;
use crate::places::Failures;
use crate::session::{Access, THIS_VERB};

pub(in crate::verbs) fn create(arguments: &SubvolumesArguments, console: &Arc<Console>) -> Result {
    let open = &arguments.edit.tree.open;
    let caller = Caller::of(open)?;
    let places = parsed(arguments);
    let volumes = Volumes::new(places.iter(), &arguments.edit, console)?.for_btrfs();
    in_every_tree(places, volumes, |tree, path, _| {
        let fs = tree.btrfs(THIS_VERB)?;
        let bare = without_slashes(path);
        let end = resolve_end(fs, bare, LastLink::Keep)?;
        let (None, Some((dir, name))) = (end.file, end.place) else {
            return Err(Error::posix(Errno::EXIST, Escaped(path).to_string()));
        };
        if let Some(rights) = open.rights() {
            rights.require_new_name(fs, dir).map_err(|error| at_path(error, path))?;
        }
        let new = new_file(fs, dir, 0o777, &caller)?;
        let place = EntryPlace { dir, name: &name };
        fs.create_subvolume(place, &new).map_err(|error| at_path(error, path))?;
        open.changed(place)
    })
}

pub(in crate::verbs) fn snapshot(arguments: &SnapshotArguments, console: &Arc<Console>) -> Result {
    let open = &arguments.edit.tree.open;
    let at = Caller::of(open)?.at;
    let places = [&arguments.source, &arguments.destination].map(|text| open.place(text));
    require_one_volume("snapshot", &places)?;
    let mut volumes = Volumes::new(places.iter(), &arguments.edit, console)?.for_btrfs();
    let [source, destination] = &places;
    let fs = volumes.open(&source.volume, Access::Write)?;
    let mut failures = Failures::new(console);
    let taken = take(fs.btrfs(THIS_VERB)?, &source.path, &destination.path, arguments, at);
    volumes.done(&destination.volume, &destination.path, taken.is_ok());
    if let Err(error) = taken {
        failures.inside(&source.volume, ExitStatus::of(&error), &error);
    }
    volumes.sync(&mut failures);
    failures.result()
}

fn take(
    fs: &Filesystem,
    source: &[u8],
    destination: &[u8],
    arguments: &SnapshotArguments,
    at: Timestamp,
) -> Result<(), Error> {
    let id = subvolume_at(fs, source)?;
    let rights = arguments.edit.tree.open.rights();
    if let Some(rights) = rights {
        let root = fs.volume().filesystem(id)?.root();
        rights.require_source(fs, root).map_err(|error| at_path(error, source))?;
    }
    let aim = Aim::of(fs, destination, false, 1, LastLink::Keep)?;
    if let (Aim::Into(_), None) = (&aim, last_name(source)) {
        let what = format!("{} is there, and the root has no name", Escaped(destination));
        return Err(Error::posix(Errno::EXIST, what));
    }
    let name = last_name(source).unwrap_or_default();
    let new = aim.new_name(fs, destination, name, true)?;
    let place = EntryPlace { dir: new.dir, name: &new.name };
    if let Some(rights) = rights {
        rights.require_new_name(fs, place.dir).map_err(|error| at_path(error, destination))?;
    }
    let taken = fs.snapshot(id, place, arguments.read_only, at);
    taken.map_err(|error| at_path(error, destination))?;
    arguments.edit.tree.open.changed(place)
}

pub(in crate::verbs) fn delete(arguments: &SubvolumesArguments, console: &Arc<Console>) -> Result {
    let open = &arguments.edit.tree.open;
    let at = Caller::of(open)?.at;
    let places = parsed(arguments);
    let volumes = Volumes::new(places.iter(), &arguments.edit, console)?.for_btrfs();
    in_every_tree(places, volumes, |tree, path, _| {
        let fs = tree.btrfs(THIS_VERB)?;
        let (dir, name) = named_place(fs, path)?;
        let place = EntryPlace { dir, name };
        if let Some(rights) = open.rights() {
            rights.require_removal(fs, place).map_err(|error| at_path(error, path))?;
        }
        let root = open.deleting(place)?;
        fs.delete_subvolume(place, at).map_err(|error| explained(error, path))?;
        open.changed(place)?;
        open.deleted(root);
        fs.volume().drop_deleted()
    })
}

/// Explains why a subvolume cannot be deleted.
fn explained(error: Error, path: &[u8]) -> Error {
    let why = match error.errno() {
        Errno::NOTEMPTY => "holds other subvolumes",
        Errno::PERM => "is the default subvolume, or in a directory that may not be changed",
        Errno::INVAL => "is no subvolume",
        _ => return at_path(error, path),
    };
    Error::posix(error.errno(), format!("{} {why}", Escaped(path)))
}

pub(in crate::verbs) fn set_default(
    arguments: &EditSubvolumeArguments,
    console: &Arc<Console>,
) -> Result {
    change(arguments, console, |fs, path| {
        fs.volume().set_default_subvolume(subvolume_at(fs, path)?)
    })
}

pub(in crate::verbs) fn set(arguments: &SetArguments, console: &Arc<Console>) -> Result {
    let open = &arguments.subvolume.edit.tree.open;
    let at = Caller::of(open)?.at;
    change(&arguments.subvolume, console, |fs, path| {
        if let Some(rights) = open.rights() {
            let root = fs.volume().filesystem(subvolume_at(fs, path)?)?.root();
            rights.require_settings(fs, root).map_err(|error| at_path(error, path))?;
        }
        set_read_only(fs, path, arguments.read_only, arguments.force, at)
    })
}

/// Makes the subvolume at `path` read-only or writable. A received subvolume becomes writable only
/// with `is_forced`, and then no longer counts as received.
pub(in crate::verbs) fn set_read_only(
    fs: &Filesystem,
    path: &[u8],
    is_read_only: bool,
    is_forced: bool,
    at: Timestamp,
) -> Result<(), Error> {
    let (id, volume) = (subvolume_at(fs, path)?, fs.volume());
    let is_received = volume.subvolume(id)?.received_uuid.is_some();
    if is_received && !is_read_only && !is_forced {
        let why = "was received, and what is received on top of it needs it as it is";
        let what = format!("{} {why}: --force", Escaped(path));
        return Err(Error::posix(Errno::PERM, what));
    }
    volume.set_read_only(id, is_read_only, at).map_err(|error| at_path(error, path))
}

/// Calls `change` for the subvolume at a place.
fn change(
    arguments: &EditSubvolumeArguments,
    console: &Arc<Console>,
    change: impl Fn(&Filesystem, &[u8]) -> Result<(), Error>,
) -> Result {
    let places = vec![arguments.edit.tree.open.place(&arguments.place)];
    let volumes = Volumes::new(places.iter(), &arguments.edit, console)?.for_btrfs();
    in_every_tree(places, volumes, |tree, path, _| change(tree.btrfs(THIS_VERB)?, path))
}

fn parsed(arguments: &SubvolumesArguments) -> Vec<VolumePath> {
    let open = &arguments.edit.tree.open;
    arguments.places.iter().map(|text| open.place(text)).collect()
}

/// The path without trailing slashes.
fn without_slashes(path: &[u8]) -> &[u8] {
    let end = path.iter().rposition(|&byte| byte != b'/').map_or(0, |at| at + 1);
    &path[..end]
}

/// The directory and the name of `path`. The file itself may be damaged, so it is not read.
fn named_place<'p>(fs: &Filesystem, path: &'p [u8]) -> Result<(FileId, &'p [u8]), Error> {
    let path = without_slashes(path);
    let busy = || Error::posix(Errno::BUSY, Escaped(path).to_string());
    let name = last_name(path).ok_or_else(busy)?;
    let dir = resolve(fs, &path[..path.len() - name.len()], LastLink::Follow)?;
    Ok((dir, name))
}
