//! One file of a source, in the form that all sources have in common.

use std::fmt;
use std::io;

use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::escape::Escaped;
use offshoot_vfs::{Attr, FileFlags, NewNode, OsReason, Timestamp};

use crate::xattrs::XattrPair;
use crate::{Result, TransferFailure};

/// How much is read and written at once.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// A file of a source.
pub(super) struct BuildEntry {
    /// The path below the place that the source is built into: names with `/` between them, and
    /// none of them empty, `.` or `..`. Empty for that place itself.
    pub(super) path: Vec<u8>,
    /// What the file is.
    pub(super) kind: EntryKind,
    /// Permission, set-id and sticky bits.
    pub(super) permissions: u32,
    /// The user that owns it.
    pub(super) uid: u32,
    /// The group that owns it.
    pub(super) gid: u32,
    /// Last change of the contents.
    pub(super) mtime: Timestamp,
    /// Last access, where the source knows one that reading it does not change.
    pub(super) atime: Option<Timestamp>,
    /// Extended attributes, access control lists among them.
    pub(super) xattrs: Vec<XattrPair>,
    /// Flags of the inode.
    pub(super) flags: FileFlags,
    /// Whether it has flags that no volume here has.
    pub(super) has_other_flags: bool,
    /// The attributes of the inode, where the source gives one inode several names and does not say
    /// which of them comes first.
    pub(super) inode: Option<Attr>,
}

/// What a file of a source is.
pub(super) enum EntryKind {
    /// A regular file of so many bytes. Its data comes from a [`Contents`].
    Regular {
        /// The length, holes included.
        size: u64,
    },
    /// A directory.
    Directory,
    /// A symbolic link to this target.
    Symlink(Vec<u8>),
    /// A device, FIFO or socket.
    Node(NewNode),
    /// One more name of the file at this path, which has the form of [`BuildEntry::path`].
    HardLink(Vec<u8>),
}

/// The data of a regular file, from its beginning to its end. It comes once.
pub(super) trait Contents {
    /// Reads the next piece of data, holes left out, into `buf`. Gives its offset in the file and
    /// its length; `None` behind the last piece.
    fn read_piece(&mut self, buf: &mut [u8]) -> Result<Option<(u64, usize)>>;

    /// How many bytes all pieces have together, for a caller that reads none of them.
    fn data_bytes(&mut self) -> Result<u64>;
}

/// What has no data.
pub(super) struct NoContents;

impl Contents for NoContents {
    fn read_piece(&mut self, _: &mut [u8]) -> Result<Option<(u64, usize)>> {
        Ok(None)
    }

    fn data_bytes(&mut self) -> Result<u64> {
        Ok(0)
    }
}

/// What takes the files of sources, in the order in which these give them.
pub(super) trait EntrySink {
    /// Takes one more file. It need not read all of `contents`.
    fn put(&mut self, entry: BuildEntry, contents: &mut dyn Contents) -> Result;
}

/// How much of the data from `at` to `end` goes into one piece. Pieces end at multiples of the
/// largest piece, so that no sector is written twice.
pub(super) fn piece_len(at: u64, end: u64, buf: &[u8]) -> usize {
    let max = buf.len().max(1) as u64;
    let cut = (at / max + 1).saturating_mul(max);
    usize::try_from(cut.min(end).saturating_sub(at)).unwrap_or(buf.len()).min(buf.len())
}

/// Why a source cannot be used.
#[derive(Debug)]
pub enum SourceProblem {
    /// It contradicts its format, or itself.
    Damaged(String),
    /// It asks for what no build does.
    Refused(String),
    /// The host cannot read it.
    Unreadable(io::Error),
    /// The host failed, while doing what the text says.
    Failed(String),
}

impl fmt::Display for SourceProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(what) => write!(f, "it is damaged: {what}"),
            Self::Refused(what) | Self::Failed(what) => f.write_str(what),
            Self::Unreadable(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("it ends before it should: it is cut off")
            }
            // A decompressor says what is wrong in words of its own.
            Self::Unreadable(error) if error.raw_os_error().is_none() => {
                write!(f, "reading it: {error}")
            }
            Self::Unreadable(error) => write!(f, "reading it: {}", OsReason(error)),
        }
    }
}

impl SourceProblem {
    /// The failure that this is for the source, or the file of a source, at `place`.
    pub(super) fn at(self, place: &[u8]) -> TransferFailure {
        TransferFailure::Source(place.to_vec(), self)
    }
}

impl From<io::Error> for SourceProblem {
    fn from(error: io::Error) -> Self {
        Self::Unreadable(error)
    }
}

/// Takes the lists away that are there twice. The kernel shows root each access control list of XFS
/// under the name by which the volume stores it, too, which no system call sets.
pub(super) fn drop_second_lists(xattrs: &mut Vec<XattrPair>) {
    for (list, stored) in
        [(ACCESS, &b"trusted.SGI_ACL_FILE"[..]), (DEFAULT, b"trusted.SGI_ACL_DEFAULT")]
    {
        if xattrs.iter().any(|(name, _)| name == list) {
            xattrs.retain(|(name, _)| name != stored);
        }
    }
}

/// A path of a source as an [`BuildEntry`] has it. What an archive calls `/etc/passwd` is that file
/// below the place that is built into.
pub(super) fn normal_path(path: &[u8]) -> Result<Vec<u8>, SourceProblem> {
    let mut normal = Vec::with_capacity(path.len());
    for name in path.split(|&byte| byte == b'/') {
        match name {
            b"" | b"." => continue,
            b".." => {
                let shown = Escaped(path);
                let what = format!("the name {shown} leads upwards with `..`");
                return Err(SourceProblem::Refused(what));
            }
            _ => {}
        }
        if !normal.is_empty() {
            normal.push(b'/');
        }
        normal.extend_from_slice(name);
    }
    if normal.contains(&0) {
        return Err(SourceProblem::Damaged(format!("a NUL byte in the name {}", Escaped(path))));
    }
    Ok(normal)
}

/// A path of an [`BuildEntry`] as the path of its directory and the name in it.
pub(super) fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
        None => (b"", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_the_place_that_is_built_into() {
        let normal = |path: &str| normal_path(path.as_bytes()).ok();
        for (path, expected) in [
            ("./", ""),
            ("/", ""),
            ("./a//b/", "a/b"),
            ("/etc/passwd", "etc/passwd"),
            ("..a", "..a"),
        ] {
            assert_eq!(normal(path), Some(expected.as_bytes().to_vec()), "{path}");
        }
        for path in ["..", "../a", "a/../b", "a/..", "/..", "a\0b"] {
            assert_eq!(normal(path), None, "{path:?}");
        }
        assert_eq!(split_path(b"a/b/c"), (&b"a/b"[..], &b"c"[..]));
        assert_eq!(split_path(b"c"), (&b""[..], &b"c"[..]));
    }

    #[test]
    fn pieces_end_at_multiples_of_the_largest() {
        let buf = [0; 16];
        assert_eq!(piece_len(0, 100, &buf), 16);
        assert_eq!(piece_len(5, 100, &buf), 11);
        assert_eq!(piece_len(96, 100, &buf), 4);
        assert_eq!(piece_len(u64::MAX - 3, u64::MAX, &buf), 3);
    }
}
