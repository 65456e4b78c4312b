//! Which entries of directories a walk goes down.
//!
//! A hostile image may let many entries lead to one directory, or lead in a circle. A directory
//! is entered only through the one entry that [`FileSystem::parent`] gives for it, and the
//! top of the walk, which is entered without any entry, through none. So no directory is
//! entered twice, and every walk ends.
//!
//! A directory without a parent stands in for a subvolume that is elsewhere. It may be met in
//! many places, and is only shown when it is empty.

use std::ops::ControlFlow;

use crate::{Attr, Errno, Error, FileId, FileSystem, Result, Structure, missing};

/// How a directory may be entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entrance {
    /// This is its place in the tree.
    Walk,
    /// It stands in for something else and is empty: it is shown and not walked.
    StandIn,
}

/// Whether a walk that began at `top` may go from the directory `parent` through its entry `name`
/// into the directory `directory`.
///
/// # Errors
/// When the entry leads to another place in the tree, and when the place of the directory cannot
/// be read.
pub fn may_enter(
    fs: &dyn FileSystem,
    top: FileId,
    parent: FileId,
    name: &[u8],
    directory: FileId,
) -> Result<Entrance> {
    let elsewhere = |what| {
        Error::corrupt(Structure::DirectoryEntry, format!("it leads to {directory}, which {what}"))
    };
    if directory == top {
        return Err(elsewhere("is the directory that everything here is in"));
    }
    match fs.parent(directory)? {
        Some(place) if place.dir == parent && place.name == name => Ok(Entrance::Walk),
        Some(_) => Err(elsewhere("is at another place in the tree")),
        None if is_empty(fs, directory)? => Ok(Entrance::StandIn),
        None => Err(elsewhere("has no parent")),
    }
}

/// The attributes of `file`, which the entry `name` of a directory that was just read leads to. The
/// volume is open here alone, or does not change, so a file that is not there is damage.
pub fn attr_of(fs: &dyn FileSystem, name: &[u8], file: FileId) -> Result<Attr> {
    fs.attr(file).map_err(|error| match error {
        Error::Posix { errno: Errno::NOENT, .. } => missing(name, file),
        error => error,
    })
}

/// Whether a directory has no entries.
pub fn is_empty(fs: &dyn FileSystem, directory: FileId) -> Result<bool> {
    let mut is_empty = true;
    fs.read_dir(directory, 0, &mut |_| {
        is_empty = false;
        ControlFlow::Break(())
    })?;
    Ok(is_empty)
}
