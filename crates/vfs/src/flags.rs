//! Flags of files.

use std::fmt;

bitflags::bitflags! {
    /// Flags of a file, as `chattr` sets them and `lsattr` shows them. The bits are those of
    /// `FS_IOC_GETFLAGS`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct FileFlags: u32 {
        /// What is done to it is durable when the call returns (`S`).
        const SYNC = 0x0000_0008;
        /// It cannot be changed, removed or linked to (`i`).
        const IMMUTABLE = 0x0000_0010;
        /// It can only be appended to, and not be removed (`a`).
        const APPEND = 0x0000_0020;
        /// Backups leave it out (`d`).
        const NODUMP = 0x0000_0040;
        /// Reading does not change its access time (`A`).
        const NOATIME = 0x0000_0080;
        /// Its data is compressed (`c`). New files in a directory begin with that of the directory.
        const COMPRESS = 0x0000_0004;
        /// Its data is not compressed (`m`). Inherited as `COMPRESS` is.
        const NOCOMPRESS = 0x0000_0400;
        /// What is done to the names in a directory is durable when the call returns (`D`).
        const DIRSYNC = 0x0001_0000;
        /// Its data is written in place, without checksums (`C`). Inherited as `COMPRESS` is.
        const NODATACOW = 0x0080_0000;
    }
}

impl FileFlags {
    /// Each flag and its letter.
    const LETTERS: [(Self, char); 9] = [
        (Self::SYNC, 'S'),
        (Self::DIRSYNC, 'D'),
        (Self::IMMUTABLE, 'i'),
        (Self::APPEND, 'a'),
        (Self::NODUMP, 'd'),
        (Self::NOATIME, 'A'),
        (Self::COMPRESS, 'c'),
        (Self::NOCOMPRESS, 'm'),
        (Self::NODATACOW, 'C'),
    ];

    /// The flag that `chattr` knows by this letter.
    #[must_use]
    pub fn of_letter(letter: char) -> Option<Self> {
        Self::LETTERS.iter().find(|one| one.1 == letter).map(|one| one.0)
    }
}

/// The letters of all flags that are set.
impl fmt::Display for FileFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = Self::LETTERS.iter().filter(|one| self.contains(one.0));
        f.write_str(&set.map(|one| one.1).collect::<String>())
    }
}
