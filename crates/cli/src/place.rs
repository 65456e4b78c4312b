//! Places: `VOLUME:/PATH`, or `VOLUME` alone for its root. A volume is a file or a [partition of
//! one](crate::disk), `FILE@PARTITION`.
//!
//! Both parts are bytes, and both may contain a colon. So one rule decides, by the files of the
//! host:
//!
//! 1. If the whole text names an existing file (not a directory) or a partition of one, it is the
//!    volume.
//! 2. Otherwise the text is split at the last `:/` that follows the name of such a file or
//!    partition.
//! 3. If there is no such file, the text is split at the first `:/`, so that the error names the
//!    volume that the user most likely meant.
//! 4. A text without `:/` is a volume.
//!
//! So `a:/b` in a directory called `a:` is a volume, and `disk.img:/x:/y` is the path `/x:/y` in
//! `disk.img`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::disk::{DiskName, is_file};
use crate::output::Escaped;

/// A path in a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumePath {
    /// The image or block device.
    pub(crate) volume: PathBuf,
    /// The path in the volume, beginning with `/`.
    pub(crate) path: Vec<u8>,
}

impl VolumePath {
    /// The place that `text` names on this host.
    pub(crate) fn parse(text: &OsStr) -> Self {
        Self::parse_with(text, is_disk)
    }

    /// The place that `text` names, if it is not a path of the host: it contains a `:/`, and no
    /// file of the host has that name.
    pub(crate) fn parse_unless_host(text: &OsStr) -> Option<Self> {
        let bytes = text.as_bytes();
        let has_sign = (1..bytes.len()).any(|at| bytes[at..].starts_with(b":/"));
        if !has_sign || Path::new(text).symlink_metadata().is_ok() {
            return None;
        }
        Some(Self::parse(text))
    }

    fn parse_with(text: &OsStr, is_disk: impl Fn(&Path) -> bool) -> Self {
        let bytes = text.as_bytes();
        let prefix = |at: usize| Path::new(OsStr::from_bytes(&bytes[..at]));
        // Before a colon at the very beginning there is no name of a volume.
        let splits: Vec<usize> =
            (1..bytes.len()).filter(|&at| bytes[at..].starts_with(b":/")).collect();
        let split = if is_disk(Path::new(text)) {
            None
        } else {
            splits.iter().rev().find(|&&at| is_disk(prefix(at))).or(splits.first()).copied()
        };
        match split {
            Some(at) => Self { volume: prefix(at).to_path_buf(), path: bytes[at + 1..].to_vec() },
            None => Self { volume: OsString::from_vec(bytes.to_vec()).into(), path: b"/".to_vec() },
        }
    }
}

/// Whether `path` names a file, or a partition of one.
fn is_disk(path: &Path) -> bool {
    DiskName::parse_with(path, is_file).is_some()
}

/// An error text for a missing volume whose name continues after the name of an existing file and a
/// colon: most likely the user meant a place.
pub(crate) fn mistaken_for_place(volume: &Path, may_have_path: bool) -> Option<String> {
    let bytes = volume.as_os_str().as_bytes();
    let prefixes = (1..bytes.len()).rev().filter(|&at| bytes[at] == b':');
    let mut prefixes = prefixes.map(|at| &bytes[..at]);
    let file = prefixes.find(|prefix| is_disk(Path::new(OsStr::from_bytes(prefix))))?;
    let (shown, file) = (Escaped(bytes), Escaped(file));
    Some(if may_have_path {
        format!("{shown}: a place is VOLUME:/PATH, and {file} is a file: write {file}:/ and a path")
    } else {
        format!("{shown}: this takes a volume without a path: write {file}")
    })
}

/// A hint for a path that continues after the name of a file: `disk.img/etc`.
pub(crate) fn without_colon(path: &Path) -> Option<String> {
    let file = path.ancestors().skip(1).find(|above| above.is_file())?;
    let rest = path.strip_prefix(file).ok()?;
    let (shown, file) =
        (Escaped(path.as_os_str().as_bytes()), Escaped(file.as_os_str().as_bytes()));
    let rest = Escaped(rest.as_os_str().as_bytes());
    Some(format!("{shown}: {file} is a file: write {file}:/{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, files: &[&str]) -> (String, String) {
        let place = VolumePath::parse_with(OsStr::new(text), |path| {
            let is_file = |path: &Path| files.iter().any(|file| Path::new(file) == path);
            DiskName::parse_with(path, is_file).is_some()
        });
        (place.volume.display().to_string(), String::from_utf8(place.path).unwrap())
    }

    #[test]
    fn places() {
        for (text, files, volume, path) in [
            ("disk.img", &["disk.img"][..], "disk.img", "/"),
            ("disk.img:/", &["disk.img"], "disk.img", "/"),
            ("disk.img:/etc", &["disk.img"], "disk.img", "/etc"),
            ("disk.img:/a:/b", &["disk.img"], "disk.img", "/a:/b"),
            ("disk.img:/a:/b", &["disk.img", "disk.img:/a"], "disk.img:/a", "/b"),
            ("disk.img:/a", &["disk.img", "disk.img:/a"], "disk.img:/a", "/"),
            ("pci-0:1:0/x.img:/b", &["pci-0:1:0/x.img"], "pci-0:1:0/x.img", "/b"),
            ("disk.img@2:/a", &["disk.img"], "disk.img@2", "/a"),
            ("disk.img@2", &["disk.img"], "disk.img@2", "/"),
            ("disk.img:/a@b:/c", &["disk.img"], "disk.img", "/a@b:/c"),
            ("missing:/a:/b", &[], "missing", "/a:/b"),
            ("missing", &[], "missing", "/"),
            ("x:y", &[], "x:y", "/"),
            (":/a", &[], ":/a", "/"),
            ("", &[], "", "/"),
        ] {
            assert_eq!(parse(text, files), (volume.into(), path.into()), "{text} with {files:?}");
        }
    }

    #[test]
    fn bytes_survive() {
        let place = VolumePath::parse_with(OsStr::from_bytes(b"v\xff:/p\xfe"), |_| false);
        assert_eq!(place.volume.as_os_str().as_bytes(), b"v\xff");
        assert_eq!(place.path, b"/p\xfe");
    }
}
