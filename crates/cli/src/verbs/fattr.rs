//! `offshoot setfattr` and `getfattr`: extended attributes.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_vfs::{FileSystem, FileSystemMut, XattrMode};
use serde::Serialize;

use crate::args::{GetfattrArguments, SetfattrArguments};
use crate::edit::{at_every_place, moment};
use crate::exit::{ExitStatus, Result};
use crate::output::{Console, Escaped, json_name, write_line};
use crate::place::Place;
use crate::places::{Failures, Places};
use crate::resolve::{LastLink, at_path, resolve};
use crate::session::PlaceSession;
use crate::xattrs::{Xattr, held_xattrs};

fn last_link(is_kept: bool) -> LastLink {
    if is_kept { LastLink::Keep } else { LastLink::Follow }
}

pub(super) fn set(arguments: &SetfattrArguments, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let places = arguments.places.iter().map(|text| Place::parse(text)).collect();
    let value = arguments.value.as_ref().map_or(&[][..], |value| &value.0);
    at_every_place(places, &arguments.edit, console, |fs, path, _| {
        let file = resolve(fs, path, last_link(arguments.no_dereference))?;
        let change = || {
            if let Some(name) = &arguments.name {
                fs.set_xattr(file, name.as_bytes(), value, XattrMode::Set, at)?;
            }
            let removed = arguments.remove.as_ref();
            removed.map_or(Ok(()), |name| fs.remove_xattr(file, name.as_bytes(), at))
        };
        change().map_err(|error| at_path(error, path))
    })
}

pub(super) fn get(
    arguments: &GetfattrArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let mut places = Places::new(&arguments.places, console);
    let mut failures = Failures::naming(places.are_in_several_volumes(), console);
    while let Some(opened) = places.next() {
        let session = match opened {
            Ok(session) => session,
            Err(failure) => {
                failures.opening(&failure);
                continue;
            }
        };
        match found(&session, arguments) {
            Ok(xattrs) => show(&session, &xattrs, arguments.json, out)?,
            Err(error) => {
                failures.inside(&session.volume, ExitStatus::of(&error), &error);
            }
        }
    }
    failures.result()
}

fn found(
    session: &PlaceSession,
    arguments: &GetfattrArguments,
) -> offshoot_vfs::Result<Vec<Xattr>> {
    let file = resolve(&session.fs, &session.path, last_link(arguments.no_dereference))?;
    let of_name = |name: &OsStr| {
        let value = session.fs.xattr(file, name.as_bytes());
        value.map(|value| vec![(name.as_bytes().to_vec(), value)])
    };
    let all = || {
        let mut xattrs = held_xattrs(&session.fs, file)?;
        xattrs.sort();
        Ok(xattrs)
    };
    let found = arguments.name.as_deref().map_or_else(all, of_name);
    found.map_err(|error| at_path(error, &session.path))
}

#[derive(Serialize)]
struct Shown {
    place: String,
    name: String,
    value: String,
}

fn show(session: &PlaceSession, xattrs: &[Xattr], is_json: bool, out: &mut dyn Write) -> Result {
    if is_json {
        for (name, value) in xattrs {
            let place = json_name(&session.path);
            let shown = Shown { place, name: json_name(name), value: json_name(value) };
            write_line(out, &shown)?;
        }
        return Ok(());
    }
    if !xattrs.is_empty() {
        writeln!(out, "# file: {}", Escaped(&session.path))?;
    }
    for (name, value) in xattrs {
        write!(out, "{}=", Escaped(name))?;
        let is_text = |&byte: &u8| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\');
        if value.iter().all(is_text) {
            writeln!(out, "\"{}\"", Escaped(value))?;
        } else {
            write!(out, "0x")?;
            value.iter().try_for_each(|byte| write!(out, "{byte:02x}"))?;
            writeln!(out)?;
        }
    }
    Ok(())
}
