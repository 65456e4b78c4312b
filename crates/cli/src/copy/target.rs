//! One file, made in the volume and filled.
//!
//! A name that is there already is dealt with as `cp` does: a regular file is cut to nothing and
//! written again, and keeps its other names; anything else but a directory is replaced; and
//! directories and other files are never exchanged for each other. A name of the source itself is
//! refused before anything is changed: cut to nothing, it would be all that there was.

use std::sync::PoisonError;

use offshoot_vfs::{
    Attr, Errno, Error, FileId, FileType, NewFile, Node, Place, Position, SetAttr, SetTime,
    XattrMode,
};

use super::original::Original;
use super::{IntoVolume, Trouble, same_file};
use crate::args::{Attribute, Reflink};
use crate::extract::{Known, Name, SafeName, Unapplied};
use crate::resolve::leads_to_itself;
use crate::xattrs::Xattr;

/// How much is read and written at once.
const PIECE_BYTES: usize = 1 << 20;

/// Copies what is no directory and has the path `path` to `name` in `dir`, with `buf` to read into.
pub(super) fn put(
    into: &IntoVolume<'_>,
    path: &[u8],
    dir: FileId,
    name: &[u8],
    original: &dyn Original,
    buf: &mut Vec<u8>,
) -> Result<(), Trouble> {
    put_at(into, &|| path.to_vec(), dir, name, original, buf)
}

/// The same for a path that is only found where it is needed.
pub(super) fn put_at(
    into: &IntoVolume<'_>,
    path: &dyn Fn() -> Vec<u8>,
    dir: FileId,
    name: &[u8],
    original: &dyn Original,
    buf: &mut Vec<u8>,
) -> Result<(), Trouble> {
    let host = (original.attr().file.dev, original.attr().file.ino);
    if into.devices.contains(&host) {
        let what = "it is a device of a volume of this command";
        return Err(Trouble::Source(Error::posix(Errno::BUSY, what)));
    }
    if into.manner.may_keep() {
        require_replaced(into, Place { dir, name }, original.attr())?;
    }
    let attr = into.preserve.of(original.attr());
    let must_share = into.reflink == Reflink::Always && attr.file_type == FileType::Regular;
    if must_share && original.in_same_volume().is_none() {
        return Err(not_shared(Error::posix(Errno::XDEV, "sharing its data")));
    }
    let place = Place { dir, name };
    if attr.nlink < 2 {
        let file = make(into, place, original, &attr)?;
        return fill(into, path, place, file, original, &attr, buf)
            .inspect_err(|_| remove(into, place));
    }
    match link(into, place, original, &attr)? {
        None => Ok(()),
        Some(file) => fill(into, path, place, file, original, &attr, buf)
            .inspect_err(|_| remove_all(into, place, attr.file)),
    }
}

/// Goes on unless what is at `place` stays.
fn require_replaced(into: &IntoVolume<'_>, place: Place<'_>, new: &Attr) -> Result<(), Trouble> {
    let file = match into.fs.lookup(place.dir, place.name) {
        Err(Error::Posix { errno: Errno::NOENT, .. }) => return Ok(()),
        found => found.map_err(Trouble::Target)?,
    };
    let old = into.fs.attr(file).map_err(Trouble::Target)?;
    if into.manner.keeps(old.mtime, new.mtime) { Err(Trouble::Kept) } else { Ok(()) }
}

/// Gives a file with several names one more, or makes it for its first.
fn link(
    into: &IntoVolume<'_>,
    place: Place<'_>,
    original: &dyn Original,
    attr: &Attr,
) -> Result<Option<FileId>, Trouble> {
    let failed = |error| Trouble::Source(Error::io("the table of hard links", error));
    let name =
        Name { parent: place.dir, name: SafeName::new(place.name).map_err(Trouble::Source)? };
    // Held until the name is in the table, so that a worker that cannot read the file
    // finds all of its names.
    let mut links = into.links.lock().unwrap_or_else(PoisonError::into_inner);
    match links.newest(attr.file).map_err(failed)? {
        None => {}
        Some(Known::Unreadable) => return Err(Trouble::OtherName),
        Some(Known::Name(known)) => match link_to(into, &known, place, original) {
            Ok(()) => {
                links.add(attr.file, &name).map_err(failed)?;
                return Ok(None);
            }
            // Another subvolume, or no more links for it: a file of its own.
            Err(Trouble::Target(Error::Posix { errno, .. }))
                if matches!(errno, Errno::XDEV | Errno::MLINK) =>
            {
                unapplied(into, Unapplied::HardLink, place, errno);
            }
            Err(trouble) => return Err(trouble),
        },
    }
    let file = make(into, place, original, attr)?;
    links.add(attr.file, &name).map_err(failed)?;
    Ok(Some(file))
}

fn link_to(
    into: &IntoVolume<'_>,
    known: &Name,
    place: Place<'_>,
    original: &dyn Original,
) -> Result<(), Trouble> {
    let file = into.fs.lookup(known.parent, &known.name).map_err(Trouble::Target)?;
    match into.fs.link(file, place, into.at) {
        Err(Error::Posix { errno: Errno::EXIST, .. }) => {
            if existing(into, place, original)?.file == file {
                return Ok(());
            }
            into.fs.unlink(place, into.at).map_err(Trouble::Target)?;
            into.fs.link(file, place, into.at).map_err(Trouble::Target)
        }
        result => result.map_err(Trouble::Target),
    }
}

/// Makes an empty file, or takes the regular one that is there.
fn make(
    into: &IntoVolume<'_>,
    place: Place<'_>,
    original: &dyn Original,
    attr: &Attr,
) -> Result<FileId, Trouble> {
    let new = new_file(into, attr);
    let target = match attr.file_type {
        FileType::Symlink => original.read_link().map_err(Trouble::Source)?,
        _ => Vec::new(),
    };
    let make = || match attr.file_type {
        FileType::Symlink => into.fs.symlink(place, &target, &new),
        file_type => into.fs.mknod(place, Node { file_type, rdev: attr.rdev }, &new),
    };
    match make() {
        Err(Error::Posix { errno: Errno::EXIST, .. }) => {}
        result => return result.map_err(Trouble::Target),
    }
    let old = existing(into, place, original)?;
    if into.reflink == Reflink::Always {
        require_sharing(into, place.dir, original, &old, &new)?;
    }
    if old.file_type == FileType::Regular && attr.file_type == FileType::Regular {
        let set = SetAttr { size: Some(0), ..owner_and_mode(attr) };
        into.fs.set_attr(old.file, &set, into.at).map_err(Trouble::Target)?;
        return Ok(old.file);
    }
    if attr.file_type == FileType::Symlink
        && leads_to_itself(into.fs, place, &target, old.file).map_err(Trouble::Target)?
    {
        return Err(same_file());
    }
    into.fs.unlink(place, into.at).map_err(Trouble::Target)?;
    make().map_err(Trouble::Target)
}

/// What is at `place`, which is no directory and not what is copied.
fn existing(
    into: &IntoVolume<'_>,
    place: Place<'_>,
    original: &dyn Original,
) -> Result<Attr, Trouble> {
    let file = into.fs.lookup(place.dir, place.name).map_err(Trouble::Target)?;
    if original.in_same_volume() == Some(file) {
        return Err(same_file());
    }
    let attr = into.fs.attr(file).map_err(Trouble::Target)?;
    if attr.file_type == FileType::Directory {
        let what = "a directory is in its place";
        return Err(Trouble::Source(Error::posix(Errno::ISDIR, what)));
    }
    Ok(attr)
}

fn new_file(into: &IntoVolume<'_>, attr: &Attr) -> NewFile {
    NewFile {
        permissions: attr.permissions,
        uid: attr.uid,
        gid: attr.gid,
        umask: None,
        at: into.at,
    }
}

fn owner_and_mode(attr: &Attr) -> SetAttr {
    SetAttr {
        permissions: Some(attr.permissions),
        uid: Some(attr.uid),
        gid: Some(attr.gid),
        ..SetAttr::default()
    }
}

/// Gives a file that was made its data, its extended attributes and its times.
fn fill(
    into: &IntoVolume<'_>,
    path: &dyn Fn() -> Vec<u8>,
    place: Place<'_>,
    file: FileId,
    original: &dyn Original,
    attr: &Attr,
    buf: &mut Vec<u8>,
) -> Result<(), Trouble> {
    let mut set = SetAttr {
        atime: Some(SetTime::To(attr.atime)),
        mtime: Some(SetTime::To(attr.mtime)),
        ..SetAttr::default()
    };
    if attr.file_type == FileType::Regular {
        let copied = match share_data(into, file, original)? {
            Some(end) => Copied { end, is_all: true },
            None => copy_data(into, file, original, buf)?,
        };
        if copied.is_all {
            set.size = (copied.end < attr.size).then_some(attr.size);
        } else if original.size_now().map_err(Trouble::Source)? < attr.size {
            let what = format_args!(
                "it became shorter: {} bytes of {} were copied",
                copied.end, attr.size
            );
            into.problems.warning(&path(), &what);
        }
    }
    if into.preserve.keeps(Attribute::Xattr) {
        set_xattrs(into, place, file, &original.xattrs().map_err(Trouble::Source)?)?;
    }
    into.fs.set_attr(file, &set, into.at).map_err(Trouble::Target)
}

/// Shares the data where both files are in one volume, and gives its end; `None` for data that is to be copied.
fn share_data(
    into: &IntoVolume<'_>,
    file: FileId,
    original: &dyn Original,
) -> Result<Option<u64>, Trouble> {
    let from = original.in_same_volume().filter(|_| into.reflink != Reflink::Never);
    let Some(from) = from else { return Ok(None) };
    match into.fs.clone_range(beginning(from), beginning(file), 0, into.at) {
        Ok(()) => {
            let size = original.attr().size;
            into.count_bytes(usize::try_from(size).unwrap_or(usize::MAX));
            Ok(Some(size))
        }
        // One of them has no checksums.
        Err(Error::Posix { errno: Errno::INVAL, .. }) if into.reflink == Reflink::Auto => Ok(None),
        Err(error) => Err(not_shared(error)),
    }
}

/// Refuses what cannot be shared with the file that takes the place of `old`, which still is as it was.
fn require_sharing(
    into: &IntoVolume<'_>,
    dir: FileId,
    original: &dyn Original,
    old: &Attr,
    new: &NewFile,
) -> Result<(), Trouble> {
    let is_regular = original.attr().file_type == FileType::Regular;
    let Some(from) = original.in_same_volume().filter(|_| is_regular) else { return Ok(()) };
    // No bytes are the same in any two files: what remains are the reasons that forbid it.
    let ask = |file| into.fs.dedupe_range(beginning(from), beginning(file), 0).map(drop);
    let answer = if old.file_type == FileType::Regular {
        ask(old.file)
    } else {
        // Whether a new file has checksums is for its directory to say.
        into.fs.create_unnamed(dir, false, new).and_then(|file| {
            let answer = ask(file);
            into.fs.release(file).and(answer)
        })
    };
    answer.map_err(not_shared)
}

fn beginning(file: FileId) -> Position {
    Position { file, offset: 0 }
}

/// Why data is not shared: two files that cannot are no trouble of the volume.
fn not_shared(error: Error) -> Trouble {
    match error {
        Error::Posix { errno: errno @ (Errno::INVAL | Errno::XDEV), .. } => {
            Trouble::Source(Error::posix(errno, "sharing its data"))
        }
        error => Trouble::Target(error),
    }
}

/// How far the data of a file was copied.
struct Copied {
    /// The end of what was written.
    end: u64,
    /// Behind it is a hole, and not what the file lost while it was read.
    is_all: bool,
}

/// Copies the data, holes left out. A file that ends before its size, because something changes it
/// or because it is one of the kernel's, which know no size, is copied as far as it goes.
fn copy_data(
    into: &IntoVolume<'_>,
    file: FileId,
    original: &dyn Original,
    buf: &mut Vec<u8>,
) -> Result<Copied, Trouble> {
    let mut end = 0;
    while let Some(data) = original.next_data(end).map_err(Trouble::Source)? {
        let mut at = data.start.max(end);
        while at < data.end {
            // Cut at multiples, so that no sector is written twice.
            let cut = (at / PIECE_BYTES as u64 + 1) * PIECE_BYTES as u64;
            let len = usize::try_from(cut.min(data.end) - at).unwrap_or(PIECE_BYTES);
            if buf.len() < len {
                buf.resize(len, 0);
            }
            let count = original.read(at, &mut buf[..len]).map_err(Trouble::Source)?;
            into.fs.write(file, at, &buf[..count], into.at).map_err(Trouble::Target)?;
            into.count_bytes(count);
            at += count as u64;
            if count < len {
                // What knows no end may end before the size that it says.
                return Ok(Copied {
                    end: at,
                    is_all: data.end == u64::MAX && at >= original.attr().size,
                });
            }
            if into.problems.is_stopped() {
                return Err(Trouble::Stopped);
            }
        }
        end = at;
        if end >= original.attr().size && data.end != u64::MAX {
            break;
        }
    }
    Ok(Copied { end, is_all: true })
}

/// Sets extended attributes. Those that a volume has no place for are counted.
fn set_xattrs(
    into: &IntoVolume<'_>,
    place: Place<'_>,
    file: FileId,
    xattrs: &[Xattr],
) -> Result<(), Trouble> {
    for (name, value) in xattrs {
        match into.fs.set_xattr(file, name, value, XattrMode::Set, into.at) {
            Ok(()) => {}
            Err(error) if is_refusal(&error) => {
                unapplied(into, Unapplied::Xattr, place, error.errno());
            }
            Err(error) => return Err(Trouble::Target(error)),
        }
    }
    Ok(())
}

/// Whether the volume has no place for this attribute, but for others.
fn is_refusal(error: &Error) -> bool {
    matches!(
        error.errno(),
        Errno::OPNOTSUPP
            | Errno::TOOBIG
            | Errno::RANGE
            | Errno::INVAL
            | Errno::PERM
            | Errno::ACCESS
    )
}

fn unapplied(into: &IntoVolume<'_>, kind: Unapplied, place: Place<'_>, errno: Errno) {
    into.problems.unapplied(kind, || into.path_of(place), errno);
}

/// Makes a directory, or takes the one that is there; and whether it is new.
pub(super) fn make_directory(
    into: &IntoVolume<'_>,
    dir: FileId,
    name: &[u8],
    attr: &Attr,
) -> Result<(FileId, bool), Trouble> {
    let place = Place { dir, name };
    match into.fs.mkdir(place, &new_file(into, &into.preserve.of(attr))) {
        Err(Error::Posix { errno: Errno::EXIST, .. }) => {}
        result => return result.map(|file| (file, true)).map_err(Trouble::Target),
    }
    let file = into.fs.lookup(dir, name).map_err(Trouble::Target)?;
    if into.fs.attr(file).map_err(Trouble::Target)?.file_type != FileType::Directory {
        let what = "what is in its place is no directory";
        return Err(Trouble::Source(Error::posix(Errno::NOTDIR, what)));
    }
    Ok((file, false))
}

/// Gives a directory that is filled its attributes: all of them, when it was there before.
pub(super) fn finish_directory(
    into: &IntoVolume<'_>,
    file: FileId,
    attr: &Attr,
    is_new: bool,
) -> Result<(), Error> {
    let attr = into.preserve.of(attr);
    let all = if is_new { SetAttr::default() } else { owner_and_mode(&attr) };
    let set = SetAttr {
        atime: Some(SetTime::To(attr.atime)),
        mtime: Some(SetTime::To(attr.mtime)),
        ..all
    };
    into.fs.set_attr(file, &set, into.at)
}

/// Gives a directory its extended attributes.
pub(super) fn dress_directory(
    into: &IntoVolume<'_>,
    file: FileId,
    original: &dyn Original,
) -> Result<(), Trouble> {
    if !into.preserve.keeps(Attribute::Xattr) {
        return Ok(());
    }
    let place = Place { dir: file, name: b"." };
    set_xattrs(into, place, file, &original.xattrs().map_err(Trouble::Source)?)
}

/// Removes a file that could not be filled.
fn remove(into: &IntoVolume<'_>, place: Place<'_>) {
    if let Err(error) = into.fs.unlink(place, into.at) {
        let error = Error::posix(error.errno(), "removing what was copied of it");
        into.problems.unreadable(&into.path_of(place), &error);
    }
}

/// Removes all names of a file that could not be filled.
fn remove_all(into: &IntoVolume<'_>, place: Place<'_>, file: FileId) {
    let mut links = into.links.lock().unwrap_or_else(PoisonError::into_inner);
    let mut names = || -> std::io::Result<Vec<Name>> {
        links.mark_unreadable(file)?;
        links.names(file)?.collect()
    };
    match names() {
        Ok(names) => {
            for Name { parent, name } in names {
                remove(into, Place { dir: parent, name: &name });
            }
        }
        Err(error) => {
            let error = Error::io("the table of hard links", error);
            into.problems.unreadable(&into.path_of(place), &error);
        }
    }
}
