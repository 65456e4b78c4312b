//! `stat -c FORMAT`: the directives of GNU stat.

use std::io::{self, Write};

use offshoot_vfs::{Attr, FileType, Timestamp};

use crate::output::{CivilTime, ModeLetters, OwnerNames, shown_inode, shown_name, type_words};

/// The file that is described.
pub(super) struct Subject<'a> {
    /// Its name, as the caller gave it.
    pub(super) name: &'a [u8],
    pub(super) attr: &'a Attr,
    /// The target of a symbolic link.
    pub(super) target: Option<&'a [u8]>,
    pub(super) owners: &'a OwnerNames,
    pub(super) sector_bytes: u32,
}

/// Writes `format` for a file. With `has_escapes`, backslash escapes are interpreted.
///
/// # Errors
/// Those of `out`. An unknown directive is no error: like stat, it is written as `?`.
pub(super) fn write(
    out: &mut dyn Write,
    format: &[u8],
    has_escapes: bool,
    subject: &Subject<'_>,
) -> io::Result<()> {
    let mut rest = format;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'%' => rest = directive(out, rest, subject)?,
            b'\\' if has_escapes => rest = escape(out, rest)?,
            byte => out.write_all(&[byte])?,
        }
    }
    Ok(())
}

/// Writes the character that an escape after a backslash stands for. Returns the rest of the
/// format.
fn escape<'f>(out: &mut dyn Write, format: &'f [u8]) -> io::Result<&'f [u8]> {
    let octal = format.iter().take(3).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
    if octal > 0 {
        let number =
            format[..octal].iter().fold(0_u32, |sum, digit| sum * 8 + u32::from(digit - b'0'));
        out.write_all(&[number.to_le_bytes()[0]])?;
        return Ok(&format[octal..]);
    }
    let Some((&letter, rest)) = format.split_first() else {
        out.write_all(b"\\")?;
        return Ok(format);
    };
    let byte = match letter {
        b'a' => 7,
        b'b' => 8,
        b'e' => 27,
        b'f' => 12,
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'v' => 11,
        other => other,
    };
    out.write_all(&[byte])?;
    Ok(rest)
}

/// Writes the value of the directive after a `%`. Returns the rest of the format.
fn directive<'f>(
    out: &mut dyn Write,
    format: &'f [u8],
    subject: &Subject<'_>,
) -> io::Result<&'f [u8]> {
    /// More columns than any terminal has.
    const WIDTH_MAX: usize = 4096;
    let flags = format.iter().take_while(|byte| b"-0#+ ".contains(byte)).count();
    let digits = format[flags..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let width = std::str::from_utf8(&format[flags..flags + digits]).unwrap_or_default();
    let width = width.parse().unwrap_or(0).min(WIDTH_MAX);
    let (flags, rest) = (&format[..flags], &format[flags + digits..]);
    let (letter, rest) = match rest {
        [b'H' | b'L', b'r', ..] => (&rest[..2], &rest[2..]),
        [_, ..] => (&rest[..1], &rest[1..]),
        [] => {
            out.write_all(b"%")?;
            return Ok(rest);
        }
    };
    if letter == b"%" {
        out.write_all(b"%")?;
        return Ok(rest);
    }
    let (text, is_number) = value(letter, subject, flags.contains(&b'#'));
    let gap = width.saturating_sub(text.len());
    match flags {
        flags if flags.contains(&b'-') => {
            out.write_all(&text)?;
            out.write_all(&b" ".repeat(gap))?;
        }
        flags if flags.contains(&b'0') && is_number => {
            out.write_all(&b"0".repeat(gap))?;
            out.write_all(&text)?;
        }
        _ => {
            out.write_all(&b" ".repeat(gap))?;
            out.write_all(&text)?;
        }
    }
    Ok(rest)
}

/// The value of a directive, and whether it is a number.
fn value(letter: &[u8], subject: &Subject<'_>, is_alternate: bool) -> (Vec<u8>, bool) {
    let Subject { name, attr, target, owners, sector_bytes } = subject;
    let number = |number: u64| (number.to_string().into_bytes(), true);
    let hexadecimal = |number: u64| {
        let prefix = if is_alternate { "0x" } else { "" };
        (format!("{prefix}{number:x}").into_bytes(), true)
    };
    let text = |text: &[u8]| (text.to_vec(), false);
    let from_volume = |name: &[u8]| (shown_name(name), false);
    let time = |time: Timestamp| text(CivilTime(time).to_string().as_bytes());
    let seconds = |time: Timestamp| (time.secs.to_string().into_bytes(), true);
    let (major, minor) = (u64::from(attr.rdev.0), u64::from(attr.rdev.1));
    // glibc combines both into one number in this way.
    let device =
        (major & 0xfff) << 8 | (major & !0xfff) << 32 | minor & 0xff | (minor & !0xff) << 12;
    match letter {
        b"a" => {
            let prefix = if is_alternate && attr.permissions != 0 { "0" } else { "" };
            (format!("{prefix}{:o}", attr.permissions).into_bytes(), true)
        }
        b"A" => text(ModeLetters(attr.file_type, attr.permissions).to_string().as_bytes()),
        b"b" => number(attr.allocated_bytes.div_ceil(512)),
        b"B" => number(512),
        b"d" => number(attr.file.dev),
        b"D" => hexadecimal(attr.file.dev),
        b"f" => hexadecimal(attr.mode().into()),
        b"F" if attr.file_type == FileType::Regular && attr.size == 0 => {
            text(b"regular empty file")
        }
        b"F" => text(type_words(attr.file_type).as_bytes()),
        b"g" => number(attr.gid.into()),
        b"G" => from_volume(owners.group(attr.gid).unwrap_or(b"UNKNOWN")),
        b"h" => number(attr.nlink.into()),
        b"i" => number(shown_inode(attr.file)),
        b"m" => text(b"/"),
        b"n" => from_volume(name),
        b"N" => {
            let quoted = |name: &[u8]| [b"'", &shown_name(name)[..], b"'"].concat();
            let target = target.map(|target| [&b" -> "[..], &quoted(target)].concat());
            text(&[quoted(name), target.unwrap_or_default()].concat())
        }
        b"o" => number((*sector_bytes).into()),
        b"r" => number(device),
        b"R" => hexadecimal(device),
        b"s" => number(attr.size),
        b"t" => hexadecimal(major),
        b"Hr" => number(major),
        b"T" => hexadecimal(minor),
        b"Lr" => number(minor),
        b"u" => number(attr.uid.into()),
        b"U" => from_volume(owners.user(attr.uid).unwrap_or(b"UNKNOWN")),
        b"w" => time(attr.btime),
        b"W" => seconds(attr.btime),
        b"x" => time(attr.atime),
        b"X" => seconds(attr.atime),
        b"y" => time(attr.mtime),
        b"Y" => seconds(attr.mtime),
        b"z" => time(attr.ctime),
        b"Z" => seconds(attr.ctime),
        _ => text(b"?"),
    }
}
