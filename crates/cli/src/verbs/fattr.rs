//! `offshoot setfattr` and `getfattr`: extended attributes.

use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use offshoot_transfer::xattrs::{XattrPair, held_xattrs};
use offshoot_vfs::path::{LastLink, at_path, resolve, resolve_held};
use offshoot_vfs::{FileSystemMut, XattrMode};
use regex_lite::Regex;
use serde::Serialize;

use crate::args::{Encoding, GetfattrArguments, SetfattrArguments};
use crate::edit::{at_every_place, moment};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, json_name, write_line, write_name};
use crate::place::VolumePath;
use crate::places::{Failures, VolumePaths};
use crate::session::PlaceSession;

fn last_link(is_kept: bool) -> LastLink {
    if is_kept { LastLink::Keep } else { LastLink::Follow }
}

pub(super) fn set(arguments: &SetfattrArguments, console: &Arc<Console>) -> Result {
    let at = moment()?;
    let places = arguments.places.iter().map(|text| VolumePath::parse(text)).collect();
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
    let mut places = VolumePaths::new(&arguments.places, console);
    let mut failures = Failures::new(console);
    let matching = arguments.matching.as_deref().map(pattern).transpose()?;
    while let Some(opened) = places.next() {
        let session = match opened {
            Ok(session) => session,
            Err(failure) => {
                failures.opening(&failure);
                continue;
            }
        };
        match found(&session, arguments, matching.as_ref()) {
            Ok(xattrs) if arguments.only_values => {
                xattrs.iter().try_for_each(|(_, value)| write_name(out, value))?;
            }
            Ok(xattrs) if arguments.dump || arguments.encoding.is_some() => {
                dump(&session, &xattrs, arguments.encoding, out)?;
            }
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
    matching: Option<&Regex>,
) -> offshoot_vfs::Result<Vec<XattrPair>> {
    let held = resolve_held(&*session.fs, &session.path, last_link(arguments.no_dereference))?;
    let file = held.file();
    let of_name = |name: &OsStr| {
        let value = session.fs.xattr(file, name.as_bytes());
        value.map(|value| vec![(name.as_bytes().to_vec(), value)])
    };
    let all = || {
        let mut xattrs = held_xattrs(&*session.fs, file)?;
        xattrs.sort();
        xattrs.retain(|(name, _)| match matching {
            Some(pattern) => pattern.is_match(&String::from_utf8_lossy(name)),
            None => !arguments.dump || name.starts_with(b"user."),
        });
        Ok(xattrs)
    };
    let found = arguments.name.as_deref().map_or_else(all, of_name);
    found.map_err(|error| at_path(error, &session.path))
}

/// Parses a regular expression. As in getfattr, `-` matches everything.
fn pattern(text: &OsStr) -> Result<Regex> {
    let text = if text == "-" { "" } else { text.to_str().unwrap_or("\u{fffd}") };
    Regex::new(text).map_err(|error| VerbFailure::Usage(format!("-m {text}: {error}")))
}

/// Writes attributes as getfattr does.
fn dump(
    session: &PlaceSession,
    xattrs: &[XattrPair],
    encoding: Option<Encoding>,
    out: &mut dyn Write,
) -> Result {
    if xattrs.is_empty() {
        return Ok(());
    }
    let path = session.path.iter().position(|&byte| byte != b'/').map(|at| &session.path[at..]);
    out.write_all(b"# file: ")?;
    write_name(out, path.unwrap_or(b"."))?;
    writeln!(out)?;
    for (name, value) in xattrs {
        let encoding = encoding.unwrap_or_else(|| best_encoding(value));
        writeln!(out, "{}={}", Escaped(name), encoded(value, encoding))?;
    }
    Ok(writeln!(out)?)
}

/// Text, unless more than one byte in eight is not printable.
fn best_encoding(value: &[u8]) -> Encoding {
    // A NUL at the end terminates a C string, and does not count.
    let text = value.strip_suffix(b"\0").unwrap_or(value);
    let others = text.iter().filter(|byte| !matches!(byte, b' '..=b'~')).count();
    if value.len() >= others * 8 { Encoding::Text } else { Encoding::Base64 }
}

fn encoded(value: &[u8], encoding: Encoding) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    match encoding {
        Encoding::Text => {
            let character = |&byte: &u8| match byte {
                b'"' | b'\\' => format!("\\{}", char::from(byte)),
                b' '..=b'~' => char::from(byte).to_string(),
                byte => format!("\\{byte:03o}"),
            };
            format!("\"{}\"", value.iter().map(character).collect::<String>())
        }
        Encoding::Hex => {
            value.iter().fold("0x".to_owned(), |hex, byte| hex + &format!("{byte:02x}"))
        }
        Encoding::Base64 => {
            let mut text = String::from("0s");
            for group in value.chunks(3) {
                let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
                let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
                for at in 0..4 {
                    let digit = DIGITS[(bits >> (18 - 6 * at) & 63) as usize];
                    text.push(if at > group.len() { '=' } else { digit.into() });
                }
            }
            text
        }
    }
}

#[derive(Serialize)]
struct ShownXattr {
    place: String,
    name: String,
    value: String,
}

fn show(
    session: &PlaceSession,
    xattrs: &[XattrPair],
    is_json: bool,
    out: &mut dyn Write,
) -> Result {
    if is_json {
        for (name, value) in xattrs {
            let place = json_name(&session.path);
            let shown = ShownXattr { place, name: json_name(name), value: json_name(value) };
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
