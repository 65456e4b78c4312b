//! What is mounted where, by `/proc/self/mountinfo`.
//!
//! ```text
//! 36 35 0:45 / /mnt rw,nosuid,nodev - fuse.offshoot /images/disk.img rw,user_id=0,...
//!       dev     where                  kind          what
//! ```

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use offshoot_vfs::Errno;

use crate::exit::{Failure, Result};

/// What a mount of this program is to the kernel.
pub(super) const SUBTYPE: &str = "offshoot";

/// A mount of this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    /// The number of its device, as `MAJOR:MINOR`.
    pub(super) device: String,
    /// The volume.
    pub(super) source: PathBuf,
}

/// What this program has mounted over `dir`.
///
/// # Errors
/// `EINVAL` when that is nothing.
pub(super) fn find(dir: &Path) -> Result<Mounted> {
    // What came last is on top.
    let top = lines()?.into_iter().rev().find(|line| line.dir == dir.as_os_str());
    top.filter(|line| line.is_ours).map(|line| line.mounted).ok_or_else(|| {
        let what = format!("{}: no volume is mounted there with offshoot", dir.display());
        Failure::Host(what, Errno::INVAL.into())
    })
}

/// Where the mount with this device number can be reached.
pub(super) fn places_of(device: &str) -> Result<Vec<PathBuf>> {
    let lines = lines()?.into_iter().filter(|line| line.mounted.device == device);
    Ok(lines.map(|line| line.dir.into()).collect())
}

/// All lines of the table.
fn lines() -> Result<Vec<Line>> {
    let path = "/proc/self/mountinfo";
    let table = fs::read(path).map_err(|error| Failure::Host(path.to_owned(), error))?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(Line::parse).collect())
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    dir: OsString,
    is_ours: bool,
    mounted: Mounted,
}

impl Line {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|&byte| byte == b' ');
        let device = String::from_utf8(words.nth(2)?.to_vec()).ok()?;
        let dir = unescaped(words.nth(1)?);
        words.find(|word| word == b"-")?;
        let mut kind = words;
        let is_ours = kind.next()?.strip_prefix(b"fuse.") == Some(SUBTYPE.as_bytes());
        let mounted = Mounted { device, source: unescaped(kind.next()?).into() };
        Some(Self { dir, is_ours, mounted })
    }
}

/// Blanks and the like stand in the table as a backslash and three octal digits.
fn unescaped(text: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if first == b'\\' => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

/// Lets the kernel read files ahead as far as one request goes. Who may not say so has what the kernel takes for right.
pub(super) fn read_ahead(mounted: &Mounted) {
    let _ = fs::write(format!("/sys/class/bdi/{}/read_ahead_kb", mounted.device), "1024");
}

/// The name under which a volume is found from everywhere, in the table too.
pub(super) fn source_name(volume: &Path) -> OsString {
    volume.canonicalize().unwrap_or_else(|_| volume.to_path_buf()).into_os_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_table() {
        let ours =
            b"36 35 0:45 / /mnt/a\\040b rw shared:1 - fuse.offshoot /x\\134y.img rw,user_id=0";
        let line = Line::parse(ours).expect("a line");
        assert_eq!((line.dir, line.is_ours), ("/mnt/a b".into(), true));
        assert_eq!(line.mounted, Mounted { device: "0:45".into(), source: r"/x\y.img".into() });
        // Names are any bytes.
        let bytes =
            Line::parse(b"37 36 0:46 / /mnt/\xff rw - fuse.offshoot /\xfe rw").expect("a line");
        assert_eq!(bytes.dir, OsString::from_vec(b"/mnt/\xff".to_vec()));
        assert_eq!(bytes.mounted.source, PathBuf::from(OsString::from_vec(b"/\xfe".to_vec())));
        let other = Line::parse(b"37 36 0:46 / /mnt/c rw - fuse.sshfs host: rw").expect("a line");
        assert!(!other.is_ours);
        for bad in ["", " - ", "36 35", "1 2 3 4 - fuse.offshoot", "1 2 3 4 5 - fuse.offshoot"] {
            assert_eq!(Line::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
