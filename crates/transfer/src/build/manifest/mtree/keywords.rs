//! The keywords of a line, and of `/set`.

use std::collections::BTreeMap;

use offshoot_vfs::escape::Escaped;
use offshoot_vfs::{FileFlags, FileType, Timestamp};

use super::super::super::entry::SourceProblem;
use super::super::super::tar::base64;
use super::super::digest::{DigestKind, ExpectedDigest};
use super::words::unescaped;

/// The digests, by the keywords that name them.
const DIGESTS: [(&str, DigestKind); 18] = [
    ("cksum", DigestKind::Cksum),
    ("md5", DigestKind::Md5),
    ("md5digest", DigestKind::Md5),
    ("rmd160", DigestKind::Ripemd160),
    ("rmd160digest", DigestKind::Ripemd160),
    ("ripemd160", DigestKind::Ripemd160),
    ("ripemd160digest", DigestKind::Ripemd160),
    ("sha1", DigestKind::Sha1),
    ("sha1digest", DigestKind::Sha1),
    ("sha256", DigestKind::Sha256),
    ("sha256digest", DigestKind::Sha256),
    ("sha384", DigestKind::Sha384),
    ("sha384digest", DigestKind::Sha384),
    ("sha512", DigestKind::Sha512),
    ("sha512digest", DigestKind::Sha512),
    ("sha512256", DigestKind::Sha512Of256),
    ("sha512256digest", DigestKind::Sha512Of256),
    ("sha512-256", DigestKind::Sha512Of256),
];

/// The flags that volumes have, by the names of BSD and of libarchive.
const FLAGS: [(&str, FileFlags); 18] = [
    ("nodump", FileFlags::NODUMP),
    ("sappnd", FileFlags::APPEND),
    ("sappend", FileFlags::APPEND),
    ("uappnd", FileFlags::APPEND),
    ("uappend", FileFlags::APPEND),
    ("schg", FileFlags::IMMUTABLE),
    ("schange", FileFlags::IMMUTABLE),
    ("simmutable", FileFlags::IMMUTABLE),
    ("uchg", FileFlags::IMMUTABLE),
    ("uchange", FileFlags::IMMUTABLE),
    ("uimmutable", FileFlags::IMMUTABLE),
    ("noatime", FileFlags::NOATIME),
    ("sync", FileFlags::SYNC),
    ("dirsync", FileFlags::DIRSYNC),
    ("compress", FileFlags::COMPRESS),
    ("nocompress", FileFlags::NOCOMPRESS),
    ("nocow", FileFlags::NODATACOW),
    ("cow", FileFlags::empty()),
];

/// Names for flags that are not set.
const NO_FLAGS: [&str; 8] =
    ["none", "dump", "nosappnd", "nouappnd", "noschg", "nouchg", "nosunlnk", "nouunlnk"];

/// The numbers of a device, or of a device with files.
type DeviceNumbers = (u32, u32);

/// What a line and the `/set` before it say of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Keywords {
    pub(super) file_type: Option<FileType>,
    pub(super) permissions: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    /// Names that stand for no number.
    pub(super) user: Option<Vec<u8>>,
    pub(super) group: Option<Vec<u8>>,
    pub(super) mtime: Option<Timestamp>,
    pub(super) size: Option<u64>,
    pub(super) nlink: Option<u32>,
    pub(super) inode: Option<u64>,
    /// The device that the file is in.
    pub(super) resident: Option<DeviceNumbers>,
    pub(super) device: Option<DeviceNumbers>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) contents: Option<Vec<u8>>,
    pub(super) flags: FileFlags,
    /// A flag that no volume here has.
    pub(super) other_flag: bool,
    pub(super) digests: BTreeMap<DigestKind, ExpectedDigest>,
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) is_optional: bool,
    pub(super) is_unchecked: bool,
}

impl Keywords {
    /// Takes one more word: `KEYWORD=VALUE`, or a keyword alone.
    pub(super) fn take(&mut self, word: &[u8]) -> Result<(), SourceProblem> {
        let at = word.iter().position(|&byte| byte == b'=');
        let (key, value) = match at {
            Some(at) => (word.get(..at).unwrap_or_default(), word.get(at + 1..)),
            None => (word, None),
        };
        let name = std::str::from_utf8(key).ok();
        match (name.unwrap_or_default(), value) {
            ("optional", None) => self.is_optional = true,
            ("nochange", None) => self.is_unchecked = true,
            // What is below the file is what the manifest has there.
            ("ignore", None) => {}
            (_, None) => return Err(unknown(key, "keyword")),
            (name, Some(value)) => {
                self.take_value(name, key, value)?;
            }
        }
        Ok(())
    }

    fn take_value(&mut self, name: &str, key: &[u8], value: &[u8]) -> Result<(), SourceProblem> {
        let wrong = || {
            let (key, value) = (Escaped(key), Escaped(value));
            SourceProblem::Refused(format!("{key}={value} is no value of {key}"))
        };
        let text = || std::str::from_utf8(value).map_err(|_| wrong());
        let bytes = || unescaped(value).ok_or_else(wrong);
        match name {
            "type" => self.file_type = Some(file_type(text()?).ok_or_else(wrong)?),
            "mode" => {
                let digits = text()?;
                if digits.contains(|letter: char| letter.is_ascii_alphabetic()) {
                    let shown = Escaped(value);
                    let what = format!("mode={shown}: permissions are read as an octal number");
                    return Err(SourceProblem::Refused(what));
                }
                let mode = u32::from_str_radix(digits, 8).ok().filter(|mode| *mode <= 0o7777);
                self.permissions = Some(mode.ok_or_else(wrong)?);
            }
            "uid" => self.uid = Some(text()?.parse().map_err(|_| wrong())?),
            "gid" => self.gid = Some(text()?.parse().map_err(|_| wrong())?),
            "uname" => self.user = Some(bytes()?),
            "gname" => self.group = Some(bytes()?),
            "time" | "tar_time" => self.mtime = Some(time(text()?).ok_or_else(wrong)?),
            "size" => self.size = Some(text()?.parse().map_err(|_| wrong())?),
            "nlink" => self.nlink = Some(text()?.parse().map_err(|_| wrong())?),
            "inode" => self.inode = Some(text()?.parse().map_err(|_| wrong())?),
            "resdevice" => self.resident = Some(device(text()?).ok_or_else(wrong)?),
            "device" => self.device = Some(device(text()?).ok_or_else(wrong)?),
            "link" => self.link = Some(bytes()?),
            "contents" => self.contents = Some(bytes()?),
            "flags" => self.take_flags(text()?).ok_or_else(wrong)?,
            // Labels for programs that choose lines.
            "tags" => {}
            _ => return self.take_digest_or_xattr(name, key, value).ok_or_else(wrong)?,
        }
        Ok(())
    }

    /// `None` for a value that is wrong.
    fn take_digest_or_xattr(
        &mut self,
        name: &str,
        key: &[u8],
        value: &[u8],
    ) -> Option<Result<(), SourceProblem>> {
        if let Some((name, kind)) = DIGESTS.iter().find(|one| one.0 == name) {
            let text = std::str::from_utf8(value).ok()?.to_ascii_lowercase();
            // go-mtree writes the digest of 256 bits under this name, too.
            let is_short = *kind == DigestKind::Sha512 && text.len() == 64;
            let kind = if is_short { DigestKind::Sha512Of256 } else { *kind };
            let is_fitting = match kind.digits() {
                0 => text.parse::<u32>().is_ok(),
                digits => text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit()),
            };
            if !is_fitting {
                return None;
            }
            self.digests.insert(kind, ExpectedDigest { name, kind, text });
            return Some(Ok(()));
        }
        let xattr = key.strip_prefix(b"xattr.").or_else(|| key.strip_prefix(b"xattrs."));
        let Some(xattr) = xattr else { return Some(Err(unknown(key, "keyword"))) };
        let xattr = unescaped(xattr).filter(|name| !name.is_empty() && !name.contains(&0))?;
        self.xattrs.insert(xattr, base64(value)?);
        Some(Ok(()))
    }

    fn take_flags(&mut self, text: &str) -> Option<()> {
        (self.flags, self.other_flag) = (FileFlags::empty(), false);
        for name in text.split(',') {
            if let Some((_, flag)) = FLAGS.iter().find(|one| one.0 == name) {
                self.flags |= *flag;
            } else if name.is_empty() {
                return None;
            } else if !NO_FLAGS.contains(&name) {
                self.other_flag = true;
            }
        }
        Some(())
    }

    /// Takes back what `/set` said of the keyword.
    pub(super) fn unset(&mut self, key: &[u8]) -> Result<(), SourceProblem> {
        let name = std::str::from_utf8(key).unwrap_or_default();
        match name {
            "all" => *self = Self::default(),
            "type" => self.file_type = None,
            "mode" => self.permissions = None,
            "uid" => self.uid = None,
            "gid" => self.gid = None,
            "uname" => self.user = None,
            "gname" => self.group = None,
            "time" | "tar_time" => self.mtime = None,
            "size" => self.size = None,
            "nlink" => self.nlink = None,
            "inode" => self.inode = None,
            "resdevice" => self.resident = None,
            "device" => self.device = None,
            "link" => self.link = None,
            "contents" => self.contents = None,
            "flags" => (self.flags, self.other_flag) = (FileFlags::empty(), false),
            "optional" => self.is_optional = false,
            "nochange" => self.is_unchecked = false,
            "ignore" | "tags" => {}
            _ => {
                if let Some((_, kind)) = DIGESTS.iter().find(|one| one.0 == name) {
                    self.digests.remove(kind);
                } else if let Some(xattr) = key.strip_prefix(b"xattr.") {
                    self.xattrs.remove(xattr);
                } else {
                    return Err(unknown(key, "keyword"));
                }
            }
        }
        Ok(())
    }
}

fn unknown(word: &[u8], what: &str) -> SourceProblem {
    SourceProblem::Refused(format!("the {what} {} is not known", Escaped(word)))
}

fn file_type(text: &str) -> Option<FileType> {
    Some(match text {
        "file" => FileType::Regular,
        "dir" => FileType::Directory,
        "link" => FileType::Symlink,
        "char" => FileType::CharDevice,
        "block" => FileType::BlockDevice,
        "fifo" => FileType::Fifo,
        "socket" => FileType::Socket,
        _ => return None,
    })
}

/// Seconds, and behind a point nanoseconds as a number: `5.25` is 25 nanoseconds after 5.
fn time(text: &str) -> Option<Timestamp> {
    let (secs, nanos) = text.split_once('.').unwrap_or((text, "0"));
    let nanos = if nanos.is_empty() { 0 } else { nanos.parse().ok()? };
    let time = Timestamp { secs: secs.parse().ok()?, nanos };
    (nanos < 1_000_000_000).then_some(time)
}

/// The numbers of a device: `FORMAT,MAJOR,MINOR`, or the one number by which Linux calls it.
fn device(text: &str) -> Option<DeviceNumbers> {
    if let Some((format, numbers)) = text.split_once(',') {
        let is_format = format.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let (major, minor) = numbers.split_once(',')?;
        let number = |text| u32::try_from(c_number(text)?).ok();
        return is_format.then_some((number(major)?, number(minor)?));
    }
    let number = c_number(text)?;
    Some((rustix::fs::major(number), rustix::fs::minor(number)))
}

/// A number as C has it: hexadecimal behind `0x`, octal behind `0`.
fn c_number(text: &str) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        return u64::from_str_radix(digits, 16).ok();
    }
    match text.strip_prefix('0') {
        Some(digits) if !digits.is_empty() => u64::from_str_radix(digits, 8).ok(),
        _ => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_keywords() {
        assert_eq!(device("native,300,70000"), Some((300, 70000)));
        assert_eq!(device("linux,0x1f,010"), Some((31, 8)));
        assert_eq!(device("0x11112c70"), Some((300, 70000)));
        assert_eq!(device("259"), Some((1, 3)));
        for wrong in ["", "native", "native,1", "bsdos,1,2,3", "linux,-1,2", "0x"] {
            assert_eq!(device(wrong), None, "{wrong}");
        }
        let at = |secs, nanos| Some(Timestamp { secs, nanos });
        assert_eq!(time("-2.250000000"), at(-2, 250_000_000));
        assert_eq!(time("7."), at(7, 0));
        assert_eq!(time("7.5"), at(7, 5));
        for wrong in ["", ".5", "7.1000000000", "7.-1", "x"] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_a_keyword_cannot_be_is_refused_by_name() {
        for (word, said) in [
            ("type=door", "type=door is no value of type"),
            ("mode=u=rwx", "read as an octal number"),
            ("mode=10000", "mode=10000 is no value"),
            ("uid=-1", "uid=-1 is no value"),
            ("sha256digest=ab", "sha256digest=ab is no value"),
            ("cksum=99999999999", "is no value of cksum"),
            ("xattr.=AA", "is no value of xattr."),
            ("xattr.user.a=!", "is no value"),
            ("rubbish=1", "the keyword rubbish is not known"),
            ("optional=1", "the keyword optional is not known"),
            ("flags=", "is no value of flags"),
            ("alone", "the keyword alone is not known"),
        ] {
            let said_now = Keywords::default().take(word.as_bytes()).expect_err(word).to_string();
            assert!(said_now.contains(said), "{word}: {said_now}");
        }
    }
}
