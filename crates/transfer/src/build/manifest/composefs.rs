//! A manifest in the form of composefs-dump(5), as `composefs-info dump` writes it and
//! `mkcomposefs --from-file` reads it.
//!
//! ```text
//! PATH SIZE MODE NLINK UID GID RDEV MTIME PAYLOAD CONTENT DIGEST [XATTR=VALUE ...]
//!
//! / 4096 40755 4 0 0 0 1695372970.944925700 - - -
//! /etc/motd 5 100644 1 0 0 0 1695372970.0 - hello -
//! /usr/bin/sh 125560 100755 1 0 0 0 1695372970.0 35/d02f8132... - 35d02f8132...
//! /bin/sh 125560 @100755 1 0 0 0 1695372970.0 /usr/bin/sh - 35d02f8132...
//! ```
//!
//! One space is between fields, and `-` is an empty one. The mode is octal, with the type; behind
//! `@` the line is one more name of the file at the path in PAYLOAD. That is the target of a
//! symbolic link, too, and the path of a regular file in the directory with the contents. The
//! digest is that of fs-verity ([`super::super::verity`]), and is compared.

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::{FileFlags, FileType, NewNode, Timestamp};

use super::super::entry::{
    BuildEntry, Contents, EntryKind, EntrySink, NoContents, SourceProblem, piece_len,
};
use super::super::tar::{archived_path, symlink_target};
use super::super::verity::VerityHash;
use super::digest::{DigestKind, ExpectedDigest};
use super::lines::WORDS_MAX;
use super::{ManifestReading, hex_byte};
use crate::Result;

/// Gives `sink` all files of the manifest.
pub(super) fn read_composefs(mut reading: ManifestReading<'_>, sink: &mut dyn EntrySink) -> Result {
    let mut line = Vec::new();
    loop {
        reading.require_not_interrupted()?;
        let read = reading.lines.next_line(&mut line);
        if !read.map_err(|problem| reading.at_line(problem))? {
            return Ok(());
        }
        let file = composefs_file(&line).map_err(|problem| reading.at_line(problem))?;
        let ComposefsFile { entry, payload, inline, digest } = file;
        if reading.options.leaves_out_way(&entry.path) {
            continue;
        }
        let EntryKind::Regular { size } = entry.kind else {
            sink.put(entry, &mut NoContents)?;
            continue;
        };
        let digests = digest.as_slice();
        match (inline, payload) {
            (Some(bytes), _) => {
                let mut data = InlineContents { bytes: &bytes, at: 0 };
                reading.put_verified(entry, &mut data, digests, size, sink)?;
            }
            (None, Some(place)) if size > 0 => {
                reading.put_contents(entry, &place, digests, size, sink)?;
            }
            _ => reading.put_verified(entry, &mut NoContents, digests, size, sink)?,
        }
    }
}

/// A line of the manifest.
struct ComposefsFile {
    entry: BuildEntry,
    /// Where its data is in the directory with the contents.
    payload: Option<Vec<u8>>,
    /// Its data, where the line has it.
    inline: Option<Vec<u8>>,
    digest: Option<ExpectedDigest>,
}

/// Data that a line has.
struct InlineContents<'a> {
    bytes: &'a [u8],
    at: u64,
}

impl Contents for InlineContents<'_> {
    fn read_piece(&mut self, buf: &mut [u8]) -> Result<Option<(u64, usize)>> {
        let len = piece_len(self.at, self.at.saturating_add(self.bytes.len() as u64), buf);
        if len == 0 {
            return Ok(None);
        }
        let (piece, rest) = self.bytes.split_at(len);
        buf.get_mut(..len).unwrap_or_default().copy_from_slice(piece);
        let offset = self.at;
        (self.bytes, self.at) = (rest, offset + len as u64);
        Ok(Some((offset, len)))
    }

    fn data_bytes(&mut self) -> Result<u64> {
        Ok(self.bytes.len() as u64)
    }
}

/// The file that a line describes.
fn composefs_file(line: &[u8]) -> Result<ComposefsFile, SourceProblem> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut next = |name: &'static str| {
        let field = fields.next().filter(|field| !field.is_empty());
        field.ok_or_else(|| SourceProblem::Refused(format!("the field {name} is missing")))
    };
    let path = path_of(next("PATH")?)?;
    let size: u64 = number(next("SIZE")?, "SIZE", 10)?;
    let mode = next("MODE")?;
    let (is_link, mode) = match mode.strip_prefix(b"@") {
        Some(mode) => (true, mode),
        None => (false, mode),
    };
    let mode: u32 = number(mode, "MODE", 8)?;
    let _nlink: u64 = number(next("NLINK")?, "NLINK", 10)?;
    let uid = number(next("UID")?, "UID", 10)?;
    let gid = number(next("GID")?, "GID", 10)?;
    let rdev: u64 = number(next("RDEV")?, "RDEV", 10)?;
    let mtime = next("MTIME")?;
    let mtime = time(mtime).ok_or_else(|| wrong("MTIME", mtime))?;
    let payload = optional(next("PAYLOAD")?)?;
    let inline = optional(next("CONTENT")?)?;
    let digest = optional(next("DIGEST")?)?;
    let xattrs = fields.by_ref().take(WORDS_MAX).map(xattr).collect::<Result<Vec<_>, _>>()?;
    if fields.next().is_some() {
        let what = format!("a line of more than {WORDS_MAX} attributes");
        return Err(SourceProblem::Refused(what));
    }

    let file_type = FileType::from_mode(mode).filter(|_| mode <= 0o177_777);
    let file_type = file_type.ok_or_else(|| {
        SourceProblem::Refused(format!("{}: the mode {mode:o} names no type", Escaped(&path)))
    })?;
    let lacks = |what: &str| SourceProblem::Refused(format!("{}: {what}", Escaped(&path)));
    let kind = match file_type {
        _ if is_link => {
            let target =
                payload.as_deref().ok_or_else(|| lacks("a hard link without a payload"))?;
            EntryKind::HardLink(archived_path(target)?)
        }
        FileType::Regular => EntryKind::Regular { size },
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => {
            let target =
                payload.clone().ok_or_else(|| lacks("a symbolic link without a payload"))?;
            EntryKind::Symlink(symlink_target(target)?)
        }
        FileType::CharDevice | FileType::BlockDevice => {
            let rdev = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
            EntryKind::Node(NewNode { file_type, rdev })
        }
        FileType::Fifo | FileType::Socket => EntryKind::Node(NewNode { file_type, rdev: (0, 0) }),
    };
    let is_regular = matches!(kind, EntryKind::Regular { .. });
    if let Some(bytes) = inline.as_ref().filter(|bytes| is_regular && bytes.len() as u64 != size) {
        let len = bytes.len();
        return Err(lacks(&format!("it has {len} bytes in the line, and the size {size}")));
    }
    if is_regular && size > 0 && inline.is_none() && payload.is_none() {
        return Err(lacks("it has neither a payload nor data in the line"));
    }
    let digest = digest.filter(|_| is_regular).map(|text| expected(&text)).transpose()?;
    let xattrs = if is_link { Vec::new() } else { xattrs };
    let entry = BuildEntry {
        kind,
        permissions: mode & 0o7777,
        uid,
        gid,
        mtime,
        atime: None,
        xattrs,
        flags: FileFlags::empty(),
        has_other_flags: false,
        inode: None,
        path,
    };
    Ok(ComposefsFile { entry, payload, inline, digest })
}

fn wrong(name: &str, field: &[u8]) -> SourceProblem {
    SourceProblem::Refused(format!("{} is no value of the field {name}", Escaped(field)))
}

/// A path from the top: `/`, or names behind a `/` each.
fn path_of(field: &[u8]) -> Result<Vec<u8>, SourceProblem> {
    let path = unescaped(field).ok_or_else(|| wrong("PATH", field))?;
    let names = path.strip_prefix(b"/").ok_or_else(|| wrong("PATH", field))?;
    if !names.is_empty() && names.split(|&byte| byte == b'/').any(|name| matches!(name, b"" | b"."))
    {
        return Err(wrong("PATH", field));
    }
    archived_path(&path)
}

/// A field that may be empty.
fn optional(field: &[u8]) -> Result<Option<Vec<u8>>, SourceProblem> {
    if field == b"-" {
        return Ok(None);
    }
    let wrong = || SourceProblem::Refused(format!("{} has a wrong escape", Escaped(field)));
    unescaped(field).map(Some).ok_or_else(wrong)
}

fn number<T: TryFrom<u64>>(field: &[u8], name: &str, base: u32) -> Result<T, SourceProblem> {
    let digits = std::str::from_utf8(field).ok().filter(|text| !text.starts_with('+'));
    let number = digits.and_then(|digits| u64::from_str_radix(digits, base).ok());
    number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| wrong(name, field))
}

/// Seconds, and behind a point nanoseconds as a number.
fn time(field: &[u8]) -> Option<Timestamp> {
    let (secs, nanos) = std::str::from_utf8(field).ok()?.split_once('.')?;
    let time = Timestamp { secs: secs.parse().ok()?, nanos: nanos.parse().ok()? };
    (time.nanos < 1_000_000_000).then_some(time)
}

/// An extended attribute: its name, `=` and its value.
fn xattr(field: &[u8]) -> Result<(Vec<u8>, Vec<u8>), SourceProblem> {
    let wrong = || SourceProblem::Refused(format!("{} is no attribute", Escaped(field)));
    let at = field.iter().position(|&byte| byte == b'=').ok_or_else(wrong)?;
    let (name, value) = field.split_at(at);
    let name = unescaped(name).filter(|name| !name.is_empty() && !name.contains(&0));
    let value = unescaped(value.get(1..).unwrap_or_default());
    Ok((name.ok_or_else(wrong)?, value.ok_or_else(wrong)?))
}

/// The digest in a field.
fn expected(text: &[u8]) -> Result<ExpectedDigest, SourceProblem> {
    let hash = match text.len() {
        64 => VerityHash::Sha256,
        128 => VerityHash::Sha512,
        _ => return Err(wrong("DIGEST", text)),
    };
    let text = std::str::from_utf8(text).map_err(|_| wrong("DIGEST", text))?;
    if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(wrong("DIGEST", text.as_bytes()));
    }
    let text = text.to_ascii_lowercase();
    Ok(ExpectedDigest { name: "fs-verity digest", kind: DigestKind::Verity(hash), text })
}

/// The bytes that a field stands for: `\xHH`, `\\`, `\n`, `\r` and `\t` are escapes.
fn unescaped(field: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        let (&letter, after) = rest.split_first()?;
        rest = after;
        bytes.push(match letter {
            b'\\' => b'\\',
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'x' => {
                let (byte, after) = hex_byte(rest)?;
                rest = after;
                byte
            }
            _ => return None,
        });
    }
    Some(bytes)
}
