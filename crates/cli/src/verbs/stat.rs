//! `offshoot stat`: shows everything that is known of files.

mod format;

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_transfer::xattrs::held_xattrs;
use offshoot_vfs::FileType;
use offshoot_vfs::path::LastLink;

use crate::args::StatArguments;
use crate::edit::place_in;
use crate::exit::{Result, VerbFailure};
use crate::output::{
    CivilTime, Console, Escaped, FileRecord, ModeLetters, OwnerNames, json_name, shown_inode,
    type_words, write_line,
};
use crate::places::{Failures, VolumePaths};
use crate::session::PlaceSession;
use format::Subject;

/// The longest value of an extended attribute that is shown as text, in bytes.
const VALUE_SHOWN: usize = 256;

pub(super) fn run(
    arguments: &StatArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let mut places = VolumePaths::new(&arguments.places, console);
    let mut failures = Failures::new(console);
    while let Some(place) = places.next() {
        match place.and_then(|session| show(&session, arguments, out)) {
            Ok(()) => {}
            Err(failure @ VerbFailure::Output(_)) => return Err(failure),
            Err(failure) => failures.opening(&failure),
        }
    }
    failures.result()
}

fn show(session: &PlaceSession, arguments: &StatArguments, out: &mut dyn Write) -> Result {
    let last = if arguments.dereference { LastLink::Follow } else { LastLink::Keep };
    let held = session.file(last)?;
    let file = held.file();
    let attr = session.fs.attr(file).map_err(|error| session.named(error))?;
    let target = match attr.file_type {
        FileType::Symlink => {
            Some(session.fs.read_link(file).map_err(|error| session.named(error))?)
        }
        _ => None,
    };
    if let Some(format) = arguments.format.as_ref().or(arguments.printf.as_ref()) {
        let subject = Subject {
            name: &place_in(&session.volume, &session.path),
            attr: &attr,
            target: target.as_deref(),
            owners: &OwnerNames::of(&*session.fs),
            sector_bytes: session.fs.volume().block_size(),
        };
        let has_escapes = arguments.format.is_none();
        format::write(out, format.as_bytes(), has_escapes, &subject)?;
        return if has_escapes { Ok(()) } else { Ok(writeln!(out)?) };
    }
    let mut xattrs = held_xattrs(&*session.fs, file).map_err(|error| session.named(error))?;
    xattrs.sort();
    let flags = session.fs.flags(file).map_err(|error| session.named(error))?;
    if arguments.json {
        let volume = json_name(session.volume.as_os_str().as_bytes());
        let record = FileRecord::new(&volume, &session.path, &attr, target.as_deref());
        return Ok(write_line(out, &record.with(flags, &xattrs))?);
    }
    let owners = OwnerNames::of(&*session.fs);
    let called =
        |name: Option<&[u8]>| name.map_or("?".to_owned(), |name| Escaped(name).to_string());
    write!(out, "  File: {}", Escaped(&session.path))?;
    if let Some(target) = &target {
        write!(out, " -> {}", Escaped(target))?;
    }
    let is_device = matches!(attr.file_type, FileType::CharDevice | FileType::BlockDevice);
    writeln!(
        out,
        "\n  Size: {:<15} Blocks: {:<10} IO Block: {:<6} {}",
        attr.size,
        attr.allocated_bytes.div_ceil(512),
        session.fs.volume().block_size(),
        type_words(attr.file_type)
    )?;
    write!(
        out,
        "Subvolume: {:<10} Inode: {:<11} Links: {}",
        file.dev,
        shown_inode(file),
        attr.nlink
    )?;
    if is_device {
        write!(out, "     Device type: {},{}", attr.rdev.0, attr.rdev.1)?;
    }
    writeln!(
        out,
        "\nAccess: ({:04o}/{})  Uid: ({:>5}/{:>8})   Gid: ({:>5}/{:>8})",
        attr.permissions,
        ModeLetters(attr.file_type, attr.permissions),
        attr.uid,
        called(owners.user(attr.uid)),
        attr.gid,
        called(owners.group(attr.gid))
    )?;
    for (name, time) in [
        ("Access", attr.atime),
        ("Modify", attr.mtime),
        ("Change", attr.ctime),
        (" Birth", attr.btime),
    ] {
        writeln!(out, "{name}: {}", CivilTime(time))?;
    }
    if !flags.is_empty() {
        writeln!(out, " Flags: {flags}")?;
    }
    for (name, value) in &xattrs {
        let shown = &value[..value.len().min(VALUE_SHOWN)];
        write!(out, " Xattr: {}={}", Escaped(name), Escaped(shown))?;
        match value.len() - shown.len() {
            0 => writeln!(out)?,
            more => writeln!(out, "... and {more} more bytes")?,
        }
    }
    Ok(())
}
