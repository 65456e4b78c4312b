//! `offshoot mkdir`: makes directories.

use std::io::{self, Write};
use std::sync::Arc;

use offshoot_vfs::path::{LastLink, at_path, bare, resolve, resolve_end};
use offshoot_vfs::{EntryPlace, Errno, Error, FileSystem, FileSystemMut, FileType, SetAttr};

use crate::args::MkdirArguments;
use crate::edit::{Caller, at_every_place, new_file};
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, Escaped, write_name};
use crate::permissions::ModeChange;
use crate::place::VolumePath;

pub(super) fn run(
    arguments: &MkdirArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let caller = Caller::of(&arguments.edit.tree.open)?;
    let change = arguments.mode.as_deref().map(ModeChange::parse).transpose();
    let change = change.map_err(VerbFailure::Usage)?;
    let plain = DirectoryMode { change: None, caller };
    let mode = DirectoryMode { change: change.as_ref(), caller };
    let places = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
    let mut told = Ok(());
    let result = at_every_place(places, &arguments.edit, console, |fs, path, report| {
        let mut make = |path: &[u8], mode| {
            make(fs, path, mode)?;
            if arguments.verbose && told.is_ok() {
                told = tell(out, &report.place(path));
            }
            Ok(())
        };
        if !arguments.parents {
            return make(path, mode);
        }
        for end in prefixes(path) {
            let prefix = &path[..end];
            // The caller must be able to go on inside the directories above, whatever the umask is.
            let caller = Caller { umask: caller.umask & !0o300, ..caller };
            let on_the_way = DirectoryMode { caller, ..plain };
            let mode = if end == path.len() { mode } else { on_the_way };
            if !is_directory(fs, prefix)? {
                make(prefix, mode)?;
            }
        }
        Ok(())
    });
    told.map_or_else(|error| Err(error.into()), |()| result)
}

fn tell(out: &mut dyn Write, place: &[u8]) -> io::Result<()> {
    out.write_all(b"mkdir: created directory '")?;
    write_name(out, place)?;
    writeln!(out, "'")
}

/// The permissions of a new directory.
#[derive(Clone, Copy)]
struct DirectoryMode<'a> {
    /// The permissions that the caller named. Then the default access control list of the directory
    /// above does not reduce them.
    change: Option<&'a ModeChange>,
    caller: Caller,
}

/// Where each component of `path` ends; the last one is the whole path.
fn prefixes(path: &[u8]) -> Vec<usize> {
    let is_end = |at: usize| path[at - 1] != b'/' && path.get(at).is_none_or(|&next| next == b'/');
    let mut ends: Vec<usize> = (1..=path.len()).filter(|&at| is_end(at)).collect();
    match ends.last_mut() {
        Some(last) => *last = path.len(),
        None => ends.push(path.len()),
    }
    ends
}

/// Whether there is a directory at `path`; `EEXIST` if there is another file.
fn is_directory(fs: &dyn FileSystem, path: &[u8]) -> Result<bool, Error> {
    if resolve_end(fs, path, LastLink::Keep)?.file.is_none() {
        return Ok(false);
    }
    let file = resolve(fs, path, LastLink::Follow)?;
    if fs.attr(file)?.file_type == FileType::Directory {
        return Ok(true);
    }
    Err(Error::posix(Errno::EXIST, Escaped(path).to_string()))
}

fn make(fs: &dyn FileSystemMut, path: &[u8], mode: DirectoryMode<'_>) -> Result<(), Error> {
    // Trailing slashes do not belong to the name.
    let end = resolve_end(fs, bare(path), LastLink::Keep)?;
    let (None, Some((dir, name))) = (end.file, end.place) else {
        return Err(Error::posix(Errno::EXIST, Escaped(path).to_string()));
    };
    let mut new = new_file(fs, dir, 0o777, &mode.caller)?;
    new.permissions |= fs.attr(dir)?.permissions & 0o2000;
    if let Some(change) = mode.change {
        new.permissions = change.of(new.permissions, true, mode.caller.umask);
        new.umask = None;
    }
    let new_dir =
        fs.mkdir(EntryPlace { dir, name: &name }, &new).map_err(|error| at_path(error, path))?;
    if mode.change.is_some() && fs.attr(new_dir)?.permissions != new.permissions {
        let exact = SetAttr { permissions: Some(new.permissions), ..SetAttr::default() };
        fs.set_attr(new_dir, &exact, new.at).map_err(|error| at_path(error, path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::prefixes;

    #[test]
    fn components_end() {
        for (path, ends) in
            [("/", vec![1]), ("/a", vec![2]), ("/a//bc/", vec![2, 7]), ("a/b", vec![1, 3])]
        {
            assert_eq!(prefixes(path.as_bytes()), ends, "{path}");
        }
    }
}
