//! Snapshots in a volume that is filled: those of the layers of container images, and those that
//! options name.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::TreeId;
use offshoot_transfer::build::Snapshots;
use offshoot_vfs::path::at_path;
use offshoot_vfs::{
    self as vfs, EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, NewFile, SetAttr,
    SetTime, Timestamp,
};

use super::names_of;
use crate::exit::{Result, VerbFailure};
use crate::output::Escaped;
use crate::verbs::btrfs::subvolume::subvolume_at;

/// The snapshots of a volume that is filled.
pub(in crate::verbs) struct VolumeSnapshots<'a>(pub(in crate::verbs) &'a Filesystem);

impl VolumeSnapshots<'_> {
    fn root_of(&self, id: TreeId) -> vfs::Result<FileId> {
        Ok(self.0.volume().filesystem(id)?.root())
    }
}

impl Snapshots for VolumeSnapshots<'_> {
    fn create(&self, place: EntryPlace<'_>, new: &NewFile) -> vfs::Result<FileId> {
        self.root_of(self.0.create_subvolume(place, new)?)
    }

    fn snapshot(&self, of: FileId, place: EntryPlace<'_>, at: Timestamp) -> vfs::Result<FileId> {
        self.root_of(self.0.snapshot(TreeId(of.dev), place, false, at)?)
    }

    fn make_read_only(&self, subvolume: FileId, at: Timestamp) -> vfs::Result<()> {
        self.0.volume().set_read_only(TreeId(subvolume.dev), true, at)
    }
}

/// A snapshot that a build makes at its end.
pub(in crate::verbs) struct NewSnapshot {
    source: Vec<u8>,
    path: Vec<u8>,
    is_read_only: bool,
}

impl NewSnapshot {
    /// The snapshot that an option names: its source, a colon and its path, and before them `rw:`
    /// for one that can be written.
    pub(in crate::verbs) fn parse(text: &OsStr) -> Result<Self> {
        let refused = || {
            let text = Escaped(text.as_bytes());
            let message = format!("{text} names no snapshot: write SOURCE:PATH or rw:SOURCE:PATH");
            VerbFailure::Usage(message)
        };
        let text = text.as_bytes();
        let (is_read_only, pair) = match (text.strip_prefix(b"rw:"), text.strip_prefix(b"ro:")) {
            (Some(pair), _) => (false, pair),
            (_, Some(pair)) => (true, pair),
            (None, None) => (true, text),
        };
        let colon = pair.iter().position(|&byte| byte == b':').ok_or_else(refused)?;
        let (source, path) = pair.split_at(colon);
        let path = path.get(1..).unwrap_or_default();
        let leads_up = |path| names_of(path).any(|name| name == b"..");
        if source.is_empty()
            || names_of(path).next().is_none()
            || leads_up(source)
            || leads_up(path)
        {
            return Err(refused());
        }
        Ok(Self { source: source.to_vec(), path: path.to_vec(), is_read_only })
    }

    /// Takes the snapshot. Directories on the way to it that are missing are made, as `new`; the
    /// one in which something is made keeps its times.
    pub(in crate::verbs) fn take(&self, fs: &Filesystem, new: &NewFile) -> vfs::Result<()> {
        let source =
            subvolume_at(fs, &self.source).map_err(|error| at_path(error, &self.source))?;
        self.take_of(source, fs, new).map_err(|error| at_path(error, &self.path))
    }

    fn take_of(&self, source: TreeId, fs: &Filesystem, new: &NewFile) -> vfs::Result<()> {
        let names: Vec<&[u8]> = names_of(&self.path).collect();
        let (name, way) =
            names.split_last().ok_or_else(|| Error::posix(Errno::INVAL, "no path"))?;
        let (mut dir, mut at) = (fs.root(), 0);
        while let Some(name) = way.get(at) {
            match fs.lookup(dir, name) {
                Err(error) if error.errno() == Errno::NOENT => break,
                found => (dir, at) = (found?, at + 1),
            }
        }
        let (changed, times) = (dir, fs.attr(dir)?);
        for name in way.get(at..).unwrap_or_default() {
            dir = fs.mkdir(EntryPlace { dir, name }, new)?;
        }
        fs.snapshot(source, EntryPlace { dir, name }, self.is_read_only, new.at)?;
        let times = SetAttr {
            atime: Some(SetTime::To(times.atime)),
            mtime: Some(SetTime::To(times.mtime)),
            ..SetAttr::default()
        };
        fs.set_attr(changed, &times, new.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_named_by_source_and_path() {
        let parse = |text: &str| {
            let text: &OsStr = text.as_ref();
            let parsed = NewSnapshot::parse(text).ok()?;
            let shown = |path: Vec<u8>| String::from_utf8_lossy(&path).into_owned();
            Some((shown(parsed.source), shown(parsed.path), parsed.is_read_only))
        };
        let of = |source: &str, path: &str, is_read_only| {
            Some((source.to_owned(), path.to_owned(), is_read_only))
        };
        assert_eq!(parse("/@:/snap/1"), of("/@", "/snap/1", true));
        assert_eq!(parse("ro:@:a:b"), of("@", "a:b", true));
        assert_eq!(parse("rw:/:/copy"), of("/", "/copy", false));
        for wrong in ["", "/@", "/@:", ":/x", "/@:/", "/@:/../x", "rw:/@", "/../@:/x"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
