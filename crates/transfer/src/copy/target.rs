//! One file, made in the volume and filled.
//!
//! A name that is there already is dealt with as `cp` does: a regular file is cut to nothing and
//! written again, also through a symbolic link, and keeps its other names, unless copies have names
//! of their own; anything else but a directory is replaced; and directories and other files are
//! never exchanged for each other. A name of the source itself is refused before anything is
//! changed: cut to nothing, it would be all that there was. So is a source that cannot be read.

use std::sync::PoisonError;

use offshoot_vfs::path::{LastLink, PathEnd, climb, leads_to_itself, resolve_end};
use offshoot_vfs::{
    Attr, EntryPlace, Errno, Error, FileId, FilePosition, FileType, HeldFile, HeldFiles, NewFile,
    NewNode, SafeName, SetAttr, SetTime, XattrMode, make_over,
};

use super::original::Original;
use super::{CopyNames, CopyTrouble, IntoVolume, SHOWN_PATH_MAX, same_file};
use super::{PreservedAttribute, ReflinkMode};
use crate::Hint;
use crate::extract::{KnownLink, LinkName, Unapplied};
use crate::xattrs::XattrPair;
use crate::zeros::{first_nonzero_run, whole_sectors};

/// How much is read and written at once.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// What has the name of a copy.
struct Old {
    /// The file: for a regular copy that to which a link leads.
    attr: Attr,
    /// A link leads to it.
    is_linked: bool,
}

/// A file of the volume that is to be filled.
struct UnfilledFile {
    file: FileId,
    /// It was made for the copy; otherwise it was there, and is written into.
    is_new: bool,
}

/// Copies a file that is no directory to `place`, with `buf` to read into. The caller holds the
/// directory of `place` and `original`.
pub(super) fn put(
    into: &IntoVolume<'_>,
    names: &CopyNames<'_>,
    place: EntryPlace<'_>,
    original: &dyn Original,
    buf: &mut Vec<u8>,
) -> Result<(), CopyTrouble> {
    let held = HeldFiles::new(into.fs);
    let into = &IntoVolume { fs: &held, ..*into };
    let host = (original.attr().file.dev, original.attr().file.ino);
    if into.devices.contains(&host) {
        let what = "it is a device of a volume of this command";
        return Err(CopyTrouble::Source(Error::posix(Errno::BUSY, what)));
    }
    let old = existing(into, place, original)?;
    let attr = into.preserve.of(original.attr());
    if let Some(old) = &old
        && into.manner.keeps(old.attr.mtime, original.attr().mtime)
    {
        if into.manner.is_apart && attr.nlink > 1 && !into.manner.keeps_all() {
            link_kept(into, names, place, old, &attr)?;
        }
        return Err(CopyTrouble::Kept);
    }
    let must_share = into.reflink == ReflinkMode::Always && attr.file_type == FileType::Regular;
    if must_share && original.in_same_volume().is_none() {
        return Err(not_shared(Error::posix(Errno::XDEV, "sharing its data")));
    }
    let target = match attr.file_type {
        FileType::Symlink => original.read_link().map_err(CopyTrouble::Source)?,
        _ => Vec::new(),
    };
    if let Some(old) = &old {
        require_replaceable(into, place, old, original, &target)?;
    }
    let begun = if attr.nlink < 2 {
        Some(make(into, names, place, old.as_ref(), original, &target, buf)?)
    } else {
        link(into, names, place, old.as_ref(), original, &target, buf)?
    };
    let Some(UnfilledFile { file, is_new }) = begun else { return Ok(()) };
    fill(into, names, place, file, original, &attr, buf).inspect_err(|_| {
        if attr.nlink > 1 {
            remove_all(into, place, original.attr(), file, is_new);
        } else if is_new {
            remove(into, place);
        }
    })
}

/// The file at `place`.
fn existing(
    into: &IntoVolume<'_>,
    place: EntryPlace<'_>,
    original: &dyn Original,
) -> Result<Option<Old>, CopyTrouble> {
    let file = match into.fs.lookup(place.dir, place.name) {
        Err(Error::Posix { errno: Errno::NOENT, .. }) => return Ok(None),
        found => found.map_err(CopyTrouble::Target)?,
    };
    let mut attr = into.fs.attr(file).map_err(CopyTrouble::Target)?;
    let mut is_linked = false;
    if attr.file_type == FileType::Symlink && original.attr().file_type == FileType::Regular {
        match behind_link(into, place) {
            Ok(file) => {
                (attr, is_linked) = (into.fs.attr(file).map_err(CopyTrouble::Target)?, true);
            }
            Err(Error::Posix { errno: Errno::LOOP, .. }) if into.manner.is_forced => {}
            Err(error) => return Err(CopyTrouble::Source(error)),
        }
    }
    if original.in_same_volume() == Some(attr.file) && !into.manner.keeps_all() {
        return Err(same_file());
    }
    Ok(Some(Old { attr, is_linked }))
}

/// The file that the symbolic link at `place` leads to: what a regular file is written into, as
/// by `cp`.
fn behind_link(into: &IntoVolume<'_>, place: EntryPlace<'_>) -> Result<FileId, Error> {
    let Some(way) = climb(into.fs, into.fs.root(), place.dir, SHOWN_PATH_MAX)? else {
        let what = "a symbolic link is in its place, too deep to be followed";
        return Err(Error::posix(Errno::NAMETOOLONG, what));
    };
    let path = [b"/", &way[..], b"/", place.name].concat();
    match resolve_end(into.fs, &path, LastLink::Follow) {
        Ok(PathEnd { file: Some(file), .. }) => Ok(file),
        Ok(PathEnd { file: None, .. }) | Err(Error::Posix { errno: Errno::NOENT, .. }) => {
            let what = "a symbolic link to nothing is in its place, and is not written through";
            Err(Error::posix(Errno::INVAL, what))
        }
        Err(error) => Err(error),
    }
}

/// Refuses to replace what another source of the same command has become.
pub(super) fn require_not_just_made(
    into: &IntoVolume<'_>,
    place: EntryPlace<'_>,
    original: &dyn Original,
) -> Result<(), CopyTrouble> {
    let Some(Old { attr, .. }) = existing(into, place, original)? else { return Ok(()) };
    let is_kept = into.manner.keeps(attr.mtime, original.attr().mtime);
    if is_kept || attr.file_type == FileType::Directory {
        return Ok(());
    }
    let what = into.problems.words(Hint::JustMade);
    Err(CopyTrouble::Source(Error::posix(Errno::EXIST, what)))
}

/// Refuses a copy to `place` where the file there is of a kind that stays.
fn require_replaceable(
    into: &IntoVolume<'_>,
    place: EntryPlace<'_>,
    Old { attr: old, is_linked }: &Old,
    original: &dyn Original,
    target: &[u8],
) -> Result<(), CopyTrouble> {
    if old.file_type == FileType::Directory {
        return Err(directory_in_place());
    }
    if *is_linked && old.file_type != FileType::Regular {
        let what = "a symbolic link to what is no regular file is in its place, and is not \
                    written through";
        return Err(CopyTrouble::Source(Error::posix(Errno::INVAL, what)));
    }
    if original.attr().file_type == FileType::Symlink
        && leads_to_itself(into.fs, place, target, old.file).map_err(CopyTrouble::Target)?
    {
        return Err(same_file());
    }
    Ok(())
}

/// Makes room for a copy: gives the regular file that the copy writes into, and removes any other.
fn take(
    into: &IntoVolume<'_>,
    names: &CopyNames<'_>,
    place: EntryPlace<'_>,
    Old { attr: old, .. }: &Old,
    original: &dyn Original,
    buf: &mut Vec<u8>,
) -> Result<Option<FileId>, CopyTrouble> {
    let is_regular = original.attr().file_type == FileType::Regular;
    let has_other_names = into.manner.is_apart && old.nlink > 1;
    let is_written = is_regular && old.file_type == FileType::Regular && !has_other_names;
    let written = is_written.then_some(old.file);
    if is_regular {
        let may_share = into.reflink != ReflinkMode::Never && original.in_same_volume().is_some();
        let sharing = if may_share {
            let new = new_file(into, &into.preserve.of(original.attr()));
            Some(require_sharing(into, place.dir, original, written, &new))
        } else {
            None
        };
        match sharing {
            // Its data is not read.
            Some(Ok(())) => {}
            Some(Err(trouble)) if into.reflink == ReflinkMode::Always => return Err(trouble),
            Some(Err(_)) | None => original.require_readable(buf).map_err(CopyTrouble::Source)?,
        }
    }
    if written.is_none() {
        into.fs.unlink(place, into.at).map_err(CopyTrouble::Target)?;
        into.manner.tell_removed(names.to);
    }
    Ok(written)
}

/// Makes an empty file for a copy, or empties the one that is written into.
fn make(
    into: &IntoVolume<'_>,
    names: &CopyNames<'_>,
    place: EntryPlace<'_>,
    old: Option<&Old>,
    original: &dyn Original,
    target: &[u8],
    buf: &mut Vec<u8>,
) -> Result<UnfilledFile, CopyTrouble> {
    let taken = match old {
        Some(old) => take(into, names, place, old, original, buf)?,
        None => None,
    };
    let file = begin(into, place, taken, target, &into.preserve.of(original.attr()))?;
    Ok(UnfilledFile { file, is_new: taken.is_none() })
}

/// Gives a file with several names one more, or begins it for its first.
fn link(
    into: &IntoVolume<'_>,
    names: &CopyNames<'_>,
    place: EntryPlace<'_>,
    old: Option<&Old>,
    original: &dyn Original,
    target: &[u8],
    buf: &mut Vec<u8>,
) -> Result<Option<UnfilledFile>, CopyTrouble> {
    let attr = original.attr();
    let name = name_of(place)?;
    // Held until the name is in the table, so that a worker that cannot read the file
    // finds all of its names.
    let mut links = into.links.lock().unwrap_or_else(PoisonError::into_inner);
    match links.newest(attr).map_err(table_failed)? {
        None => {}
        Some(KnownLink::Unreadable) => return Err(CopyTrouble::OtherName),
        Some(KnownLink::Name(known)) => {
            match link_to(into, names, &known, attr.file_type, place, old) {
                Ok(is_made) => {
                    if is_made {
                        links.add(attr, &name).map_err(table_failed)?;
                    }
                    return Ok(None);
                }
                Err(trouble) => match not_linkable(&trouble) {
                    // A file of its own.
                    Some(errno) => unapplied(into, Unapplied::HardLink, place, errno),
                    None => return Err(trouble),
                },
            }
        }
    }
    let begun = make(into, names, place, old, original, target, buf)?;
    links.add(attr, &name).map_err(table_failed)?;
    Ok(Some(begun))
}

/// A file that stays, in the place of one with several names: it gets the next ones, or has its
/// name given to the copy that was made before.
fn link_kept(
    into: &IntoVolume<'_>,
    names: &CopyNames<'_>,
    place: EntryPlace<'_>,
    old: &Old,
    attr: &Attr,
) -> Result<(), CopyTrouble> {
    let is_directory = old.attr.file_type == FileType::Directory;
    let name = name_of(place)?;
    let mut links = into.links.lock().unwrap_or_else(PoisonError::into_inner);
    let is_name = match links.newest(attr).map_err(table_failed)? {
        None => !old.is_linked && !is_directory,
        Some(KnownLink::Name(_)) if is_directory => return Err(directory_in_place()),
        Some(KnownLink::Name(known)) => {
            match link_to(into, names, &known, attr.file_type, place, Some(old)) {
                Err(trouble) if not_linkable(&trouble).is_some() => false,
                linked => linked?,
            }
        }
        Some(KnownLink::Unreadable) => false,
    };
    if is_name {
        links.add(attr, &name).map_err(table_failed)?;
    }
    Ok(())
}

/// Why a file gets no further name where it is wanted, and a file of its own is possible: that is
/// another subvolume, or the file has as many names as it can have.
fn not_linkable(trouble: &CopyTrouble) -> Option<Errno> {
    match trouble {
        CopyTrouble::Target(Error::Posix {
            errno: errno @ (Errno::XDEV | Errno::MLINK), ..
        }) => Some(*errno),
        _ => None,
    }
}

fn name_of(place: EntryPlace<'_>) -> Result<LinkName, CopyTrouble> {
    Ok(LinkName {
        parent: place.dir,
        name: SafeName::new(place.name).map_err(CopyTrouble::Source)?,
    })
}

fn directory_in_place() -> CopyTrouble {
    CopyTrouble::Source(Error::posix(Errno::ISDIR, "a directory is in its place"))
}

fn table_failed(error: std::io::Error) -> CopyTrouble {
    CopyTrouble::Source(Error::io("the table of hard links", error))
}

/// Gives what was copied to `known` the name `place`, which `old` has until then. Whether it did
/// not have the name already.
fn link_to(
    into: &IntoVolume<'_>,
    names: &CopyNames<'_>,
    known: &LinkName,
    file_type: FileType,
    place: EntryPlace<'_>,
    old: Option<&Old>,
) -> Result<bool, CopyTrouble> {
    let known = EntryPlace { dir: known.parent, name: &known.name };
    let mut file = into.fs.lookup(known.dir, known.name).map_err(CopyTrouble::Target)?;
    if file_type == FileType::Regular
        && into.fs.attr(file).map_err(CopyTrouble::Target)?.file_type == FileType::Symlink
    {
        // The copy was written through it.
        file = behind_link(into, known).map_err(CopyTrouble::Target)?;
    }
    let link = |place: EntryPlace<'_>| into.fs.link(file, place, into.at);
    match old {
        Some(old) if old.attr.file == file => return Ok(false),
        Some(_) => {
            make_over(into.fs, place, into.at, link).map_err(CopyTrouble::Target)?;
            into.manner.tell_removed(names.to);
        }
        None => link(place).map_err(CopyTrouble::Target)?,
    }
    Ok(true)
}

/// Makes an empty file, or empties the one that is written into.
fn begin(
    into: &IntoVolume<'_>,
    place: EntryPlace<'_>,
    taken: Option<FileId>,
    target: &[u8],
    attr: &Attr,
) -> Result<FileId, CopyTrouble> {
    let new = new_file(into, attr);
    let file_type = attr.file_type;
    match taken {
        Some(file) => {
            let set = SetAttr { size: Some(0), ..owner_and_mode(into, attr) };
            into.fs.set_attr(file, &set, into.at).map(|()| file)
        }
        None if file_type == FileType::Symlink => into.fs.symlink(place, target, &new),
        None => into.fs.mknod(place, NewNode { file_type, rdev: attr.rdev }, &new),
    }
    .map_err(CopyTrouble::Target)
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

/// The owner and mode that a file gets that was there before. What the copy does not keep of the
/// source stays as it is.
fn owner_and_mode(into: &IntoVolume<'_>, attr: &Attr) -> SetAttr {
    let is_owner_kept = into.preserve.keeps(PreservedAttribute::Ownership);
    SetAttr {
        permissions: into.preserve.keeps(PreservedAttribute::Mode).then_some(attr.permissions),
        uid: is_owner_kept.then_some(attr.uid),
        gid: is_owner_kept.then_some(attr.gid),
        ..SetAttr::default()
    }
}

/// Gives a file that was made its data, its extended attributes and its times.
fn fill(
    into: &IntoVolume<'_>,
    names: &CopyNames<'_>,
    place: EntryPlace<'_>,
    file: FileId,
    original: &dyn Original,
    attr: &Attr,
    buf: &mut Vec<u8>,
) -> Result<(), CopyTrouble> {
    let mut set = SetAttr {
        atime: Some(SetTime::To(attr.atime)),
        mtime: Some(SetTime::To(attr.mtime)),
        ..SetAttr::default()
    };
    if attr.file_type == FileType::Regular {
        let copied = match share_data(into, file, original)? {
            Some(end) => CopiedExtent { end, written_end: end, is_all: true },
            None => copy_data(into, file, original, buf)?,
        };
        set.size = copied.missing_size(attr.size);
        if !copied.is_all && original.size_now().map_err(CopyTrouble::Source)? < attr.size {
            let what = format_args!(
                "it became shorter: {} bytes of {} were copied",
                copied.end, attr.size
            );
            into.problems.warning(&(names.from)(), &what);
        }
    }
    if into.preserve.keeps(PreservedAttribute::Xattr) {
        set_xattrs(into, place, file, &original.xattrs().map_err(CopyTrouble::Source)?)?;
    }
    into.fs.set_attr(file, &set, into.at).map_err(CopyTrouble::Target)
}

/// Shares the data where both files are in one volume, and gives its end; `None` for data that is
/// to be copied.
fn share_data(
    into: &IntoVolume<'_>,
    file: FileId,
    original: &dyn Original,
) -> Result<Option<u64>, CopyTrouble> {
    let from = original.in_same_volume().filter(|_| into.reflink != ReflinkMode::Never);
    let Some(from) = from else { return Ok(None) };
    match into.fs.clone_range(beginning(from), beginning(file), 0, into.at) {
        Ok(()) => {
            let size = original.attr().size;
            into.count_bytes(usize::try_from(size).unwrap_or(usize::MAX));
            Ok(Some(size))
        }
        // One of them has no checksums, or the volume has no shared blocks.
        Err(Error::Posix { errno: Errno::INVAL | Errno::OPNOTSUPP, .. })
            if into.reflink == ReflinkMode::Auto =>
        {
            Ok(None)
        }
        Err(error) => Err(not_shared(error)),
    }
}

/// Refuses what cannot be shared with the file that is written into, or else with a new one in
/// `dir`. What is there still is as it was.
fn require_sharing(
    into: &IntoVolume<'_>,
    dir: FileId,
    original: &dyn Original,
    written: Option<FileId>,
    new: &NewFile,
) -> Result<(), CopyTrouble> {
    let is_regular = original.attr().file_type == FileType::Regular;
    let Some(from) = original.in_same_volume().filter(|_| is_regular) else { return Ok(()) };
    // No bytes are the same in any two files: what remains are the reasons that forbid it.
    let ask = |file| into.fs.dedupe_range(beginning(from), beginning(file), 0).map(drop);
    let answer = if let Some(file) = written {
        ask(file)
    } else {
        // Whether a new file has checksums is for its directory to say.
        into.fs.create_unnamed(dir, false, new).and_then(|file| {
            let answer = ask(file);
            into.fs.release(file).and(answer)
        })
    };
    answer.map_err(not_shared)
}

fn beginning(file: FileId) -> FilePosition {
    FilePosition { file, offset: 0 }
}

/// Why data is not shared: two files that cannot, or a volume whose files cannot, are no trouble of
/// the target.
fn not_shared(error: Error) -> CopyTrouble {
    match error {
        Error::Posix { errno: errno @ (Errno::INVAL | Errno::XDEV | Errno::OPNOTSUPP), .. } => {
            CopyTrouble::Source(Error::posix(errno, "sharing its data"))
        }
        error => CopyTrouble::Target(error),
    }
}

/// How far the data of a file was copied.
struct CopiedExtent {
    /// The end of what was read.
    end: u64,
    /// The end of what was written: from there to `end` are zeros.
    written_end: u64,
    /// Behind `end` is a hole, and not what the file lost while it was read.
    is_all: bool,
}

impl CopiedExtent {
    /// The size that the copy has to get, where what was written does not give it that.
    fn missing_size(&self, size: u64) -> Option<u64> {
        let end = if self.is_all { self.end.max(size) } else { self.end };
        (end > self.written_end).then_some(end)
    }
}

/// Copies the data, holes left out. A file that ends before its size, because something changes it
/// or because it is one of the kernel's, which know no size, is copied as far as it goes.
fn copy_data(
    into: &IntoVolume<'_>,
    file: FileId,
    original: &dyn Original,
    buf: &mut Vec<u8>,
) -> Result<CopiedExtent, CopyTrouble> {
    let finds_zeros = into.manner.is_reproducible && original.has_chance_data();
    let size = original.attr().size;
    let (mut end, mut written_end) = (0, 0);
    while let Some(data) = original.next_data(end).map_err(CopyTrouble::Source)? {
        let data = if finds_zeros { whole_sectors(data, size) } else { data };
        let mut at = data.start.max(end);
        while at < data.end {
            // Cut at multiples, so that no sector is written twice.
            let cut = (at / PIECE_BYTES as u64 + 1) * PIECE_BYTES as u64;
            let len = usize::try_from(cut.min(data.end) - at).unwrap_or(PIECE_BYTES);
            if buf.len() < len {
                buf.resize(len, 0);
            }
            let piece = buf.get_mut(..len).unwrap_or_default();
            let count = original.read(at, piece).map_err(CopyTrouble::Source)?;
            let piece = piece.get(..count).unwrap_or_default();
            let written = write_piece(into, FilePosition { file, offset: at }, piece, finds_zeros);
            written_end = written.map_err(CopyTrouble::Target)?.unwrap_or(written_end);
            into.count_bytes(count);
            at += count as u64;
            if count < len {
                // What knows no end may end before the size that it says.
                let is_all = data.end == u64::MAX && at >= size;
                return Ok(CopiedExtent { end: at, written_end, is_all });
            }
            if into.problems.is_stopped() {
                return Err(CopyTrouble::Stopped);
            }
        }
        end = at;
        if end >= size && data.end != u64::MAX {
            break;
        }
    }
    Ok(CopiedExtent { end, written_end, is_all: true })
}

/// Writes a piece of data; with `finds_zeros` without the sectors that are all zeros. Gives the end
/// of what was written, if anything was.
fn write_piece(
    into: &IntoVolume<'_>,
    at: FilePosition,
    piece: &[u8],
    finds_zeros: bool,
) -> Result<Option<u64>, Error> {
    let (mut rest, mut begin, mut written_end) = (piece, at.offset, None);
    while !rest.is_empty() {
        let run = if finds_zeros { first_nonzero_run(rest) } else { 0..rest.len() };
        let data = rest.get(run.clone()).unwrap_or_default();
        if !data.is_empty() {
            into.fs.write(at.file, begin + run.start as u64, data, into.at)?;
            written_end = Some(begin + run.end as u64);
        }
        rest = rest.get(run.end..).unwrap_or_default();
        begin += run.end as u64;
    }
    Ok(written_end)
}

/// Sets extended attributes. Those that a volume has no place for are counted.
fn set_xattrs(
    into: &IntoVolume<'_>,
    place: EntryPlace<'_>,
    file: FileId,
    xattrs: &[XattrPair],
) -> Result<(), CopyTrouble> {
    for (name, value) in xattrs {
        match into.fs.set_xattr(file, name, value, XattrMode::Set, into.at) {
            Ok(()) => {}
            Err(error) if is_refusal(&error) => {
                unapplied(into, Unapplied::Xattr, place, error.errno());
            }
            Err(error) => return Err(CopyTrouble::Target(error)),
        }
    }
    Ok(())
}

/// Whether the volume has no place for this attribute, but for others.
pub(crate) fn is_refusal(error: &Error) -> bool {
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

fn unapplied(into: &IntoVolume<'_>, kind: Unapplied, place: EntryPlace<'_>, errno: Errno) {
    into.problems.unapplied(kind, || into.path_of(place), errno);
}

/// Makes a directory, or takes the one that is there; and whether it is new.
pub(super) fn make_directory<'a>(
    into: &IntoVolume<'a>,
    dir: FileId,
    name: &[u8],
    attr: &Attr,
) -> Result<(HeldFile<'a>, bool), CopyTrouble> {
    let place = EntryPlace { dir, name };
    let held = |file| HeldFile::of_entry(into.fs, dir, name, file).map_err(CopyTrouble::Target);
    match into.fs.mkdir(place, &new_file(into, &into.preserve.of(attr))) {
        Err(Error::Posix { errno: Errno::EXIST, .. }) => {}
        made => return Ok((held(made.map_err(CopyTrouble::Target)?)?, true)),
    }
    let held = held(into.fs.lookup(dir, name).map_err(CopyTrouble::Target)?)?;
    let file = held.file();
    if into.fs.attr(file).map_err(CopyTrouble::Target)?.file_type != FileType::Directory {
        let what = "what is in its place is no directory";
        return Err(CopyTrouble::Source(Error::posix(Errno::NOTDIR, what)));
    }
    Ok((held, false))
}

/// Gives a directory that is filled its attributes: all of them, when it was there before.
pub(super) fn finish_directory(
    into: &IntoVolume<'_>,
    file: FileId,
    attr: &Attr,
    is_new: bool,
) -> Result<(), Error> {
    let attr = into.preserve.of(attr);
    let all = if is_new { SetAttr::default() } else { owner_and_mode(into, &attr) };
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
) -> Result<(), CopyTrouble> {
    if !into.preserve.keeps(PreservedAttribute::Xattr) {
        return Ok(());
    }
    let place = EntryPlace { dir: file, name: b"." };
    set_xattrs(into, place, file, &original.xattrs().map_err(CopyTrouble::Source)?)
}

/// Removes a file that could not be filled.
fn remove(into: &IntoVolume<'_>, place: EntryPlace<'_>) {
    if let Err(error) = into.fs.unlink(place, into.at) {
        let error = Error::posix(error.errno(), "removing what was copied of it");
        into.problems.unreadable(&into.path_of(place), &error);
    }
}

/// Removes all names of `made`, the copy of `source` that could not be filled, but for `place` when
/// that was not new. Another copy of `source`, and a file that stayed, keep theirs.
fn remove_all(
    into: &IntoVolume<'_>,
    place: EntryPlace<'_>,
    source: &Attr,
    made: FileId,
    is_new: bool,
) {
    let mut links = into.links.lock().unwrap_or_else(PoisonError::into_inner);
    let mut names = || -> std::io::Result<Vec<LinkName>> {
        links.mark_unreadable(source)?;
        links.names(source)?.collect()
    };
    match names() {
        Ok(names) => {
            for LinkName { parent, name } in names {
                let copy = EntryPlace { dir: parent, name: &name };
                match into.fs.lookup(parent, &name) {
                    Ok(file) if file == made && (is_new || copy != place) => remove(into, copy),
                    Ok(_) | Err(Error::Posix { errno: Errno::NOENT, .. }) => {}
                    Err(error) => into.problems.unreadable(&into.path_of(copy), &error),
                }
            }
        }
        Err(error) => {
            let error = Error::io("the table of hard links", error);
            into.problems.unreadable(&into.path_of(place), &error);
        }
    }
}
