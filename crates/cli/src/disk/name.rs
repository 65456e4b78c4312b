//! Names of disks: `FILE`, or `FILE@PARTITION`.
//!
//! A name may contain an `@` itself, so the files of the host decide, as for
//! [places](crate::place). If a file with the whole name exists, that file is the disk. Otherwise
//! the name is split at the last `@` that follows the name of an existing file (not a directory).
//! The partition after it contains no `:/`, because that begins a path in the volume.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use offshoot_transfer::host::{HostId, host_id_of_file};

/// A disk as the command line names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DiskName {
    /// The image or block device.
    pub(crate) file: PathBuf,
    /// The number, label or UUID of the selected partition.
    pub(crate) partition: Option<OsString>,
}

impl DiskName {
    /// Parses `path` on this host.
    pub(crate) fn parse(path: &Path) -> Self {
        Self::parse_with(path, is_file)
            .unwrap_or_else(|| Self { file: path.to_path_buf(), partition: None })
    }

    /// Parses `path`; `None` if it names no file.
    pub(crate) fn parse_with(path: &Path, is_file: impl Fn(&Path) -> bool) -> Option<Self> {
        if is_file(path) {
            return Some(Self { file: path.to_path_buf(), partition: None });
        }
        let bytes = path.as_os_str().as_bytes();
        let prefix = |at: usize| Path::new(OsStr::from_bytes(&bytes[..at]));
        let mut splits = (1..bytes.len()).rev().filter(|&at| bytes[at] == b'@');
        let at = splits.find(|&at| is_file(prefix(at)))?;
        let partition = &bytes[at + 1..];
        let has_path = partition.windows(2).any(|two| two == b":/");
        (!has_path).then(|| Self {
            file: prefix(at).to_path_buf(),
            partition: Some(OsStr::from_bytes(partition).to_owned()),
        })
    }

    /// The identity of the disk: two names with the same identity are one disk, and one volume.
    pub(crate) fn id(&self) -> Option<(HostId, Option<OsString>)> {
        Some((host_id_of_file(&self.file)?, self.partition.clone()))
    }
}

/// Whether there is a file or device at `path`.
pub(crate) fn is_file(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| !metadata.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (text, files, expected) in [
            ("disk.img", &["disk.img"][..], Some(("disk.img", None))),
            ("disk.img@2", &["disk.img"], Some(("disk.img", Some("2")))),
            ("disk.img@2", &["disk.img", "disk.img@2"], Some(("disk.img@2", None))),
            ("a@b.img@x@y", &["a@b.img"], Some(("a@b.img", Some("x@y")))),
            ("a@b.img@x", &["a", "a@b.img"], Some(("a@b.img", Some("x")))),
            ("disk.img@", &["disk.img"], Some(("disk.img", Some("")))),
            ("disk.img@2:/x", &["disk.img"], None),
            ("missing@2", &[], None),
            ("@2", &[], None),
        ] {
            let is_file = |path: &Path| files.iter().any(|file| Path::new(file) == path);
            let name = DiskName::parse_with(Path::new(text), is_file);
            let expected = expected.map(|(file, partition)| DiskName {
                file: file.into(),
                partition: partition.map(OsString::from),
            });
            assert_eq!(name, expected, "{text} with {files:?}");
        }
    }
}
