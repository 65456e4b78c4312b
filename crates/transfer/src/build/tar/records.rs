//! The records of pax, and what they say of the entry behind them.
//!
//! A record is `LENGTH KEY=VALUE\n`, where LENGTH counts itself. An empty value takes back what an
//! earlier record said.
//!
//! | key | |
//! |---|---|
//! | `path`, `linkpath`, `size`, `uid`, `gid`, `mtime`, `atime` | instead of the fields of the header |
//! | `SCHILY.xattr.NAME` | an extended attribute; GNU tar writes `%3D` for a `=` in its name |
//! | `LIBARCHIVE.xattr.NAME` | the same in base64, and the name as in a URL |
//! | `RHT.security.selinux` | the attribute `security.selinux`, from older programs |
//! | `SCHILY.acl.access`, `SCHILY.acl.default` | lists as text |
//! | `SCHILY.devmajor`, `SCHILY.devminor` | numbers of a device |
//! | `GNU.sparse.*` | see [`super::sparse`] |
//!
//! Others are for what a volume has no place for, and left out: names of users and groups,
//! comments, the time of the last change of the inode.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_vfs::Timestamp;
use offshoot_vfs::escape::Escaped;

use super::SourceProblem;
use super::sparse::SparseRecords;

/// What records say.
#[derive(Clone, Default)]
pub(super) struct Records {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) mtime: Option<Timestamp>,
    pub(super) atime: Option<Timestamp>,
    pub(super) dev_major: Option<u32>,
    pub(super) dev_minor: Option<u32>,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The names that libarchive, which quotes more, has in the other record of an attribute.
    misspelled: BTreeSet<Vec<u8>>,
    pub(super) acl_access: Option<Vec<u8>>,
    pub(super) acl_default: Option<Vec<u8>>,
    pub(super) sparse: SparseRecords,
    /// The memory that all records took that were added, about. Those that a later one replaced
    /// count until the next [`recount`](Self::recount).
    taken_bytes: usize,
}

/// What an extended attribute takes beside its bytes.
const XATTR_BYTES: usize = 128;

impl Records {
    /// Adds all records in `text`. They may take `bytes_max`, with those that are there.
    pub(super) fn apply(&mut self, mut text: &[u8], bytes_max: u64) -> Result<(), SourceProblem> {
        let damaged = || SourceProblem::Damaged("a record that is none".to_owned());
        while let Some(&first) = text.first() {
            if first == 0 {
                // Some programs fill up the last block in this way and count it.
                break;
            }
            let space = text.iter().position(|&byte| byte == b' ').ok_or_else(damaged)?;
            let (digits, _) = text.split_at(space);
            let len: usize = decimal(digits).ok_or_else(damaged)?;
            let record = text.get(space + 1..len).ok_or_else(damaged)?;
            let record = record.strip_suffix(b"\n").ok_or_else(damaged)?;
            let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(damaged)?;
            let (key, value) = record.split_at(equals);
            self.set(key, value.get(1..).unwrap_or_default())?;
            if self.taken_bytes as u64 > bytes_max {
                let what = format!("records that take more than {} KiB", bytes_max >> 10);
                return Err(SourceProblem::Refused(what));
            }
            text = text.get(len..).unwrap_or_default();
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), SourceProblem> {
        let text = (!value.is_empty()).then(|| value.to_vec());
        let xattrs: [&[u8]; 3] = [b"SCHILY.xattr.", b"LIBARCHIVE.xattr.", b"RHT."];
        let is_xattr = xattrs.iter().any(|start| key.starts_with(start));
        self.taken_bytes += value.len() + if is_xattr { key.len() + XATTR_BYTES } else { 0 };
        match key {
            b"path" => self.path = text,
            b"linkpath" => self.link = text,
            b"size" => self.size = parsed(key, value, decimal)?,
            b"uid" => self.uid = parsed(key, value, decimal)?,
            b"gid" => self.gid = parsed(key, value, decimal)?,
            b"mtime" => self.mtime = parsed(key, value, time)?,
            b"atime" => self.atime = parsed(key, value, time)?,
            b"SCHILY.devmajor" => self.dev_major = parsed(key, value, decimal)?,
            b"SCHILY.devminor" => self.dev_minor = parsed(key, value, decimal)?,
            b"SCHILY.acl.access" => self.acl_access = text,
            b"SCHILY.acl.default" => self.acl_default = text,
            b"RHT.security.selinux" => {
                self.xattrs.insert(b"security.selinux".to_vec(), value.to_vec());
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    let name = schily_name(name);
                    if !self.misspelled.contains(&name) {
                        self.xattrs.insert(name, value.to_vec());
                    }
                } else if let Some(name) = key.strip_prefix(b"LIBARCHIVE.xattr.") {
                    let (exact, misspelled) = (unquoted(name, |_| true), schily_name(name));
                    let value = base64(value).ok_or_else(|| is_wrong(key))?;
                    if misspelled != exact {
                        self.xattrs.remove(&misspelled);
                        self.misspelled.insert(misspelled);
                    }
                    self.xattrs.insert(exact, value);
                } else if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    self.sparse.set(key, value)?;
                }
            }
        }
        Ok(())
    }

    /// Forgets the memory of what was replaced. Gives that of the rest.
    pub(super) fn recount(&mut self) -> usize {
        self.taken_bytes = self.held_bytes();
        self.taken_bytes
    }

    /// The memory that it takes, about.
    fn held_bytes(&self) -> usize {
        let texts = [&self.path, &self.link, &self.acl_access, &self.acl_default];
        let texts = texts.into_iter().flatten().map(Vec::len);
        let xattrs = self.xattrs.iter().map(|(name, value)| name.len() + value.len() + XATTR_BYTES);
        let misspelled = self.misspelled.iter().map(|name| name.len() + 64);
        texts.chain(xattrs).chain(misspelled).sum::<usize>() + self.sparse.held_bytes()
    }
}

pub(super) fn is_wrong(key: &[u8]) -> SourceProblem {
    SourceProblem::Damaged(format!("its record {} is wrong", Escaped(key)))
}

/// The value of a record; `None` for an empty one.
pub(super) fn parsed<T>(
    key: &[u8],
    value: &[u8],
    parse: impl Fn(&[u8]) -> Option<T>,
) -> Result<Option<T>, SourceProblem> {
    if value.is_empty() {
        return Ok(None);
    }
    parse(value).map(Some).ok_or_else(|| is_wrong(key))
}

/// A number in decimal digits.
pub(super) fn decimal<T: std::str::FromStr>(digits: &[u8]) -> Option<T> {
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Seconds with a fraction, of which nanoseconds are kept.
fn time(text: &[u8]) -> Option<Timestamp> {
    let text = std::str::from_utf8(text).ok()?;
    let (is_negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let secs: i64 = decimal(whole.as_bytes())?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanos = digits.fold(0, |nanos, digit| nanos * 10 + u32::from(digit - b'0'));
    Some(match (is_negative, nanos) {
        (false, nanos) => Timestamp { secs, nanos },
        (true, 0) => Timestamp { secs: -secs, nanos: 0 },
        // One and a half seconds before the epoch is kept as -2 s and +0.5 s.
        (true, nanos) => Timestamp { secs: -secs - 1, nanos: 1_000_000_000 - nanos },
    })
}

/// The name of an extended attribute in a key of GNU tar.
fn schily_name(name: &[u8]) -> Vec<u8> {
    unquoted(name, |byte| matches!(byte, b'=' | b'%'))
}

/// The bytes that a text with `%3D` for some of them stands for.
fn unquoted(text: &[u8], is_quoted: impl Fn(u8) -> bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let quoted = match rest {
            [b'%', high, low, ..] => hex(*high).zip(hex(*low)).map(|(high, low)| high << 4 | low),
            _ => None,
        };
        if let Some(byte) = quoted.filter(|&byte| is_quoted(byte)) {
            bytes.push(byte);
            rest = rest.get(3..).unwrap_or_default();
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    bytes
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

/// The bytes that base64 stands for; the `=` at its end may be missing.
pub(in crate::build) fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let end = text.iter().rposition(|&byte| byte != b'=').map_or(0, |at| at + 1);
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in text.get(..end)?.chunks(4) {
        let mut bits = 0_u32;
        for &letter in group {
            let value = match letter {
                b'A'..=b'Z' => letter - b'A',
                b'a'..=b'z' => letter - b'a' + 26,
                b'0'..=b'9' => letter - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * (4 - group.len());
        let [_, one, two, three] = bits.to_be_bytes();
        let count = match group.len() {
            4 => 3,
            3 => 2,
            2 => 1,
            _ => return None,
        };
        bytes.extend([one, two, three].into_iter().take(count));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let time = |text: &str| time(text.as_bytes()).map(|time| (time.secs, time.nanos));
        assert_eq!(time("1700000000.000000001"), Some((1_700_000_000, 1)));
        assert_eq!(time("5"), Some((5, 0)));
        assert_eq!(time("-1.5"), Some((-2, 500_000_000)));
        assert_eq!(time("-0.000000001"), Some((-1, 999_999_999)));
        assert_eq!(time("1.1234567899"), Some((1, 123_456_789)));
        for text in ["", "x", "1.", "1.x", "--1", "99999999999999999999"] {
            assert_eq!(time(text), (text == "1.").then_some((1, 0)), "{text}");
        }
    }

    #[test]
    fn base64_with_and_without_its_end() {
        for (text, bytes) in [
            ("", &b""[..]),
            ("QQ==", b"A"),
            ("QQ", b"A"),
            ("QUI", b"AB"),
            ("QUJD", b"ABC"),
            ("AAAA/w", b"\0\0\0\xff"),
        ] {
            assert_eq!(base64(text.as_bytes()).as_deref(), Some(bytes), "{text}");
        }
        for text in ["Q", "Q!==", "QUJDQ"] {
            assert_eq!(base64(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn records_count_from_the_last() {
        let mut records = Records::default();
        let text = b"12 path=abc\n5 x=\n8 path=\n37 SCHILY.xattr.user.a%3Db%25c%41=v=\n";
        records.apply(text, 1 << 20).expect("they are records");
        assert_eq!(records.path, None);
        // libarchive writes each attribute in both records, with a name that is quoted.
        let both = b"33 SCHILY.xattr.user.of%20it=yes\n38 LIBARCHIVE.xattr.user.of%20it=eWVz\n";
        for half in [&both[..], &both[33..], &both[..33]] {
            records.apply(half, 1 << 20).expect("they are records");
        }
        let names: Vec<_> =
            records.xattrs.keys().map(|name| name.escape_ascii().to_string()).collect();
        assert_eq!(names, ["user.a=b%c%41", "user.of it"]);
        assert_eq!(records.xattrs.get(&b"user.a=b%c%41"[..]).map(Vec::as_slice), Some(&b"v="[..]));
        for text in
            [&b"5"[..], b"5 a=b", b"3 a=b\n", b"99 a=b\n", b"6 abc\n", b"0 a=b\n", b"-6 a=b\n"]
        {
            assert!(Records::default().apply(text, 1 << 20).is_err(), "{}", text.escape_ascii());
        }
    }
}
