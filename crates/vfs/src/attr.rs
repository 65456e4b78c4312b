//! Identity and attributes of files.

use std::fmt;
use std::time::SystemTime;

/// Which file: the pair that POSIX calls `st_dev` and `st_ino`.
///
/// A btrfs volume has an inode number space in every subvolume, so the inode
/// number alone does not name a file. A format with one number space gives it 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// The number space: on btrfs the id of the subvolume; 0 where there is only one.
    pub dev: u64,
    /// The inode number in it.
    pub ino: u64,
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {}", self.ino)?;
        if self.dev == 0 { Ok(()) } else { write!(f, " of subvolume {}", self.dev) }
    }
}

/// The type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FileType {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A Unix-domain socket.
    Socket,
}

impl FileType {
    /// The type in the `S_IFMT` bits of a mode; `None` when the bits name no type.
    #[must_use]
    pub fn from_mode(mode: u32) -> Option<Self> {
        Some(match mode & 0o170_000 {
            0o010_000 => Self::Fifo,
            0o020_000 => Self::CharDevice,
            0o040_000 => Self::Directory,
            0o060_000 => Self::BlockDevice,
            0o100_000 => Self::Regular,
            0o120_000 => Self::Symlink,
            0o140_000 => Self::Socket,
            _ => return None,
        })
    }

    /// The `S_IFMT` bits of this type.
    #[must_use]
    pub fn mode_bits(self) -> u32 {
        match self {
            Self::Fifo => 0o010_000,
            Self::CharDevice => 0o020_000,
            Self::Directory => 0o040_000,
            Self::BlockDevice => 0o060_000,
            Self::Regular => 0o100_000,
            Self::Symlink => 0o120_000,
            Self::Socket => 0o140_000,
        }
    }
}

/// A point in time: seconds since 1970-01-01 UTC, negative before, and the
/// nanoseconds (below 1,000,000,000) that follow them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    /// Seconds since the epoch.
    pub secs: i64,
    /// Nanoseconds after `secs`.
    pub nanos: u32,
}

impl Timestamp {
    /// Seconds and nanoseconds as the decimal that JSON consumers and PAX headers read:
    /// `1700000000.000000001`, `-0.500000000`.
    #[must_use]
    pub fn decimal(self) -> String {
        if self.secs < 0 && self.nanos > 0 {
            // One and a half seconds before the epoch is kept as -2 s and +0.5 s.
            let whole = (self.secs + 1).unsigned_abs();
            format!("-{whole}.{:09}", 1_000_000_000 - self.nanos)
        } else {
            format!("{}.{:09}", self.secs, self.nanos)
        }
    }

    /// The moment of the call, by the clock of the host.
    #[must_use]
    pub fn now() -> Self {
        let (now, epoch) = (SystemTime::now(), SystemTime::UNIX_EPOCH);
        let whole = |secs: u64| i64::try_from(secs).unwrap_or(i64::MAX);
        match now.duration_since(epoch) {
            Ok(since) => Self { secs: whole(since.as_secs()), nanos: since.subsec_nanos() },
            // A clock that was set before the epoch; what is below a second does not matter then.
            Err(before) => Self { secs: -whole(before.duration().as_secs()), nanos: 0 },
        }
    }
}

/// What `stat` tells of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// The file itself.
    pub file: FileId,
    /// Its type.
    pub file_type: FileType,
    /// Permission, set-id and sticky bits (the low 12 bits of `st_mode`).
    pub permissions: u32,
    /// The number of names it has. Directories always have 1 on btrfs, and on XFS one more for `.`
    /// and for each `..` that leads to them.
    pub nlink: u32,
    /// The user that owns it.
    pub uid: u32,
    /// The group that owns it.
    pub gid: u32,
    /// Major and minor number of a device node; (0, 0) for everything else.
    pub rdev: (u32, u32),
    /// Its length in bytes.
    pub size: u64,
    /// Space that its data occupies, in bytes.
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of the contents.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Birth.
    pub btime: Timestamp,
    /// Tells the file from others that had its number before it; 0 where the filesystem gives no
    /// number to a second file.
    pub generation: u64,
}

impl Attr {
    /// Type and permissions as one `st_mode`.
    #[must_use]
    pub fn mode(&self) -> u32 {
        self.file_type.mode_bits() | self.permissions
    }
}

/// Sizes of a filesystem, all in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatFs {
    /// Space of all devices together.
    pub total_bytes: u64,
    /// Space that is in use, counted as the format counts it.
    pub used_bytes: u64,
    /// How much more data could be written, counted as the data itself.
    pub available_bytes: u64,
    /// The unit in which data is allocated.
    pub block_size: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_seconds() {
        let decimal = |secs, nanos| Timestamp { secs, nanos }.decimal();
        assert_eq!(decimal(1, 5), "1.000000005");
        assert_eq!(decimal(-2, 500_000_000), "-1.500000000");
        assert_eq!(decimal(-1, 500_000_000), "-0.500000000");
        assert_eq!(decimal(-1, 0), "-1.000000000");
    }
}
