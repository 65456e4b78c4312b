//! The protocol, byte for byte: the requests of the kernel and the answers to them.
//!
//! A request is a header, the fixed part of its opcode, and a part without a fixed length: names,
//! each with a NUL behind it, or data. An answer is a header and the parts of its opcode. All
//! numbers are in the byte order of the machine.
//!
//! ```text
//! request   | InHeader 40 | fixed part 0..88 | names or data |
//! answer    | OutHeader 16 | fixed part | names or data |
//! ```
//!
//! Over io_uring the parts lie in two buffers that request and answer share. The fixed part of an
//! answer lies in its payload:
//!
//! ```text
//! RingHeader 288 | InHeader or OutHeader, of 128 | fixed part of the request, of 128 | which request, length of the payload 32 |
//! payload        | names or data |
//! ```
//!
//! The names are those of the protocol (`linux/fuse.h`), version 7.31 and later. INIT refuses a
//! kernel with an older version.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The version of the protocol. The minor number is that of the newest structures below.
pub(crate) const MAJOR: u32 = 7;
/// See [`MAJOR`].
pub(crate) const MINOR: u32 = 42;
/// The oldest minor version that has these structures.
pub(crate) const OLDEST_MINOR: u32 = 31;

/// The node of the root directory.
pub(crate) const ROOT_NODE: u64 = 1;

/// The opcodes of requests, and their names.
macro_rules! opcodes {
    ($($name:ident = $number:literal;)*) => {
        /// The opcodes of requests.
        pub(crate) mod opcode {
            $(pub(crate) const $name: u32 = $number;)*

            /// The name of an opcode; `None` for one that is not known.
            pub(crate) fn name(op: u32) -> Option<&'static str> {
                match op {
                    $($name => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

opcodes! {
    LOOKUP = 1;
    FORGET = 2;
    GETATTR = 3;
    SETATTR = 4;
    READLINK = 5;
    SYMLINK = 6;
    MKNOD = 8;
    MKDIR = 9;
    UNLINK = 10;
    RMDIR = 11;
    RENAME = 12;
    LINK = 13;
    OPEN = 14;
    READ = 15;
    WRITE = 16;
    STATFS = 17;
    RELEASE = 18;
    FSYNC = 20;
    SETXATTR = 21;
    GETXATTR = 22;
    LISTXATTR = 23;
    REMOVEXATTR = 24;
    INIT = 26;
    OPENDIR = 27;
    READDIR = 28;
    RELEASEDIR = 29;
    FSYNCDIR = 30;
    CREATE = 35;
    INTERRUPT = 36;
    DESTROY = 38;
    IOCTL = 39;
    BATCH_FORGET = 42;
    FALLOCATE = 43;
    READDIRPLUS = 44;
    RENAME2 = 45;
    LSEEK = 46;
    COPY_FILE_RANGE = 47;
    SYNCFS = 50;
    TMPFILE = 51;
    STATX = 52;
}

bitflags::bitflags! {
    /// What kernel and server agree on in INIT.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct InitFlags: u64 {
        const ASYNC_READ = 1 << 0;
        const EXPORT_SUPPORT = 1 << 4;
        const BIG_WRITES = 1 << 5;
        const DONT_MASK = 1 << 6;
        const IOCTL_DIR = 1 << 11;
        const DO_READDIRPLUS = 1 << 13;
        const READDIRPLUS_AUTO = 1 << 14;
        const PARALLEL_DIROPS = 1 << 18;
        const POSIX_ACL = 1 << 20;
        const MAX_PAGES = 1 << 22;
        const CACHE_SYMLINKS = 1 << 23;
        const HANDLE_KILLPRIV_V2 = 1 << 28;
        const SETXATTR_EXT = 1 << 29;
        const INIT_EXT = 1 << 30;
        const ALLOW_IDMAP = 1 << 40;
        const OVER_IO_URING = 1 << 41;
    }

    /// Which attributes SETATTR sets.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct SetattrValid: u32 {
        const MODE = 1 << 0;
        const UID = 1 << 1;
        const GID = 1 << 2;
        const SIZE = 1 << 3;
        const ATIME = 1 << 4;
        const MTIME = 1 << 5;
        const ATIME_NOW = 1 << 7;
        const MTIME_NOW = 1 << 8;
        const CTIME = 1 << 10;
        /// The caller may not keep the set-id bits.
        const KILL_SUIDGID = 1 << 11;
    }
}

/// SETXATTR of an access control list: the set-group-id bit is cleared.
pub(crate) const SETXATTR_ACL_KILL_SGID: u32 = 1;

/// WRITE by a program that may not keep the set-id bits.
pub(crate) const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// FSYNC of the data alone.
pub(crate) const FSYNC_FDATASYNC: u32 = 1;

/// An open file: the kernel keeps the cached data of the file.
pub(crate) const FOPEN_KEEP_CACHE: u32 = 1 << 1;
/// An open directory: the kernel may cache its entries.
pub(crate) const FOPEN_CACHE_DIR: u32 = 1 << 3;
/// An open file: the kernel sends no FLUSH when a program closes it.
pub(crate) const FOPEN_NOFLUSH: u32 = 1 << 5;
/// An open file: direct writes may overlap in time.
pub(crate) const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// An ioctl on an open directory.
pub(crate) const IOCTL_DIR: u32 = 1 << 4;

/// The numbers of ioctls, as on all machines but those that encode the direction in another way.
pub(crate) mod ioctl_number {
    pub(crate) const GETFLAGS: u32 = 0x8008_6601;
    pub(crate) const SETFLAGS: u32 = 0x4008_6602;
    /// The flags in another encoding. The kernel asks for it before it sends `SETFLAGS` too.
    pub(crate) const FSGETXATTR: u32 = 0x801c_581f;
    pub(crate) const FSSETXATTR: u32 = 0x401c_5820;
    pub(crate) const GETVERSION: u32 = 0x8008_7601;
    /// The same in a 32-bit program.
    pub(crate) const GETVERSION_32: u32 = 0x8004_7601;
    pub(crate) const GETFSLABEL: u32 = 0x8100_9431;
    pub(crate) const SETFSLABEL: u32 = 0x4100_9432;
    pub(crate) const FITRIM: u32 = 0xc018_5879;
    pub(crate) const SHUTDOWN: u32 = 0x8004_587d;
}

/// The size of the label in `FS_IOC_GETFSLABEL` and `FS_IOC_SETFSLABEL`, with a NUL at its end.
pub(crate) const LABEL_BYTES: usize = 256;

/// Notifications: messages to the kernel that answer no request.
pub(crate) mod notice {
    pub(crate) const INVAL_INODE: i32 = 2;
    pub(crate) const INVAL_ENTRY: i32 = 3;
}

/// The header of a request.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct InHeader {
    pub(crate) len: u32,
    pub(crate) opcode: u32,
    pub(crate) unique: u64,
    pub(crate) nodeid: u64,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    pub(crate) total_extlen: u16,
    pub(crate) padding: u16,
}

/// The header of an answer.
#[derive(Clone, Copy, Debug, Immutable, IntoBytes)]
#[repr(C)]
pub(crate) struct OutHeader {
    pub(crate) len: u32,
    pub(crate) error: i32,
    pub(crate) unique: u64,
}

/// Declares structures that the kernel sends.
macro_rules! received {
    ($($(#[$doc:meta])* $name:ident, $size:literal { $($field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }

        const _: () = assert!(size_of::<$name>() == $size);
    )* };
}

/// Declares structures that the kernel receives.
macro_rules! sent {
    ($($(#[$doc:meta])* $name:ident, $size:literal { $($field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, Immutable, IntoBytes)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }

        const _: () = assert!(size_of::<$name>() == $size);
    )* };
}

/// The header of a request over io_uring, and of its answer.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub(crate) struct RingHeader {
    pub(crate) in_out: [u8; 128],
    pub(crate) op_in: [u8; 128],
    pub(crate) flags: u64,
    pub(crate) commit_id: u64,
    pub(crate) payload_sz: u32,
    pub(crate) padding: u32,
    pub(crate) reserved: u64,
}

/// Commands over io_uring: register an entry with a queue, or take its answer and give it the next
/// request.
pub(crate) mod ring_command {
    pub(crate) const REGISTER: u32 = 1;
    pub(crate) const COMMIT_AND_FETCH: u32 = 2;
}

const _: () = assert!(size_of::<RingHeader>() == 288);
const _: () = assert!(size_of::<InHeader>() == 40 && size_of::<OutHeader>() == 16);

/// Declares structures that go both ways.
macro_rules! exchanged {
    ($($(#[$doc:meta])* $name:ident, $size:literal { $($field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, FromBytes, Immutable, IntoBytes, KnownLayout)]
        #[repr(C)]
        pub(crate) struct $name { $(pub(crate) $field: $type),* }

        const _: () = assert!(size_of::<$name>() == $size);
    )* };
}

exchanged! {
    /// `FS_IOC_FSGETXATTR` and `FS_IOC_FSSETXATTR`.
    FsXattr, 28 {
        xflags: u32, extsize: u32, nextents: u32, projid: u32, cowextsize: u32, padding: [u8; 8],
    }
    /// FITRIM.
    TrimRange, 24 { start: u64, len: u64, minlen: u64 }
}

received! {
    /// INIT, without what newer kernels add.
    InitIn, 16 { major: u32, minor: u32, max_readahead: u32, flags: u32 }
    /// The rest of INIT, with `INIT_EXT`.
    InitExt, 48 { flags2: u32, unused: [u32; 11] }
    /// FORGET.
    ForgetIn, 8 { nlookup: u64 }
    /// BATCH_FORGET.
    BatchForgetIn, 8 { count: u32, dummy: u32 }
    /// One node of BATCH_FORGET.
    ForgetOne, 16 { nodeid: u64, nlookup: u64 }
    /// GETATTR.
    GetattrIn, 16 { getattr_flags: u32, dummy: u32, fh: u64 }
    /// STATX.
    StatxIn, 24 { getattr_flags: u32, reserved: u32, fh: u64, sx_flags: u32, sx_mask: u32 }
    /// SETATTR.
    SetattrIn, 88 {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64,
        atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    /// MKNOD.
    MknodIn, 16 { mode: u32, rdev: u32, umask: u32, padding: u32 }
    /// MKDIR.
    MkdirIn, 8 { mode: u32, umask: u32 }
    /// RENAME.
    RenameIn, 8 { newdir: u64 }
    /// RENAME2.
    Rename2In, 16 { newdir: u64, flags: u32, padding: u32 }
    /// LINK.
    LinkIn, 8 { oldnodeid: u64 }
    /// OPEN.
    OpenIn, 8 { flags: u32, open_flags: u32 }
    /// CREATE and TMPFILE.
    CreateIn, 16 { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    /// RELEASE and RELEASEDIR.
    ReleaseIn, 24 { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 }
    /// FSYNC and FSYNCDIR.
    FsyncIn, 16 { fh: u64, fsync_flags: u32, padding: u32 }
    /// READ, READDIR and READDIRPLUS.
    ReadIn, 40 {
        fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    /// WRITE.
    WriteIn, 40 {
        fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32,
    }
    /// SETXATTR, with `SETXATTR_EXT`.
    SetxattrIn, 16 { size: u32, flags: u32, setxattr_flags: u32, padding: u32 }
    /// SETXATTR, without it.
    SetxattrOldIn, 8 { size: u32, flags: u32 }
    /// GETXATTR and LISTXATTR.
    GetxattrIn, 8 { size: u32, padding: u32 }
    /// FALLOCATE.
    FallocateIn, 32 { fh: u64, offset: u64, length: u64, mode: u32, padding: u32 }
    /// LSEEK.
    LseekIn, 24 { fh: u64, offset: u64, whence: u32, padding: u32 }
    /// COPY_FILE_RANGE.
    CopyFileRangeIn, 56 {
        fh_in: u64, off_in: u64, nodeid_out: u64, fh_out: u64, off_out: u64, len: u64, flags: u64,
    }
    /// IOCTL.
    IoctlIn, 32 { fh: u64, flags: u32, cmd: u32, arg: u64, in_size: u32, out_size: u32 }
}

sent! {
    /// INIT.
    InitOut, 64 {
        major: u32, minor: u32, max_readahead: u32, flags: u32,
        max_background: u16, congestion_threshold: u16, max_write: u32, time_gran: u32,
        max_pages: u16, map_alignment: u16, flags2: u32, unused: [u32; 7],
    }
    /// The attributes of a file.
    Attributes, 88 {
        ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64,
        atimensec: u32, mtimensec: u32, ctimensec: u32,
        mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
    }
    /// The answer to LOOKUP, and to requests that make a name.
    EntryOut, 128 {
        nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64,
        entry_valid_nsec: u32, attr_valid_nsec: u32, attr: Attributes,
    }
    /// GETATTR and SETATTR.
    AttrOut, 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: Attributes }
    /// A time in STATX.
    StatxTime, 16 { tv_sec: i64, tv_nsec: u32, reserved: i32 }
    /// STATX.
    StatxOut, 288 {
        attr_valid: u64, attr_valid_nsec: u32, flags: u32, spare: [u64; 2],
        mask: u32, blksize: u32, attributes: u64, nlink: u32, uid: u32, gid: u32, mode: u16, spare0: u16,
        ino: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: StatxTime, btime: StatxTime, ctime: StatxTime, mtime: StatxTime,
        rdev_major: u32, rdev_minor: u32, dev_major: u32, dev_minor: u32, spare2: [u64; 14],
    }
    /// OPEN and OPENDIR; CREATE and TMPFILE, behind an entry.
    OpenOut, 16 { fh: u64, open_flags: u32, backing_id: i32 }
    /// WRITE and COPY_FILE_RANGE.
    WriteOut, 8 { size: u32, padding: u32 }
    /// STATFS.
    StatfsOut, 80 {
        blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64,
        bsize: u32, namelen: u32, frsize: u32, padding: u32, spare: [u32; 6],
    }
    /// GETXATTR and LISTXATTR, when only the length is asked for.
    GetxattrOut, 8 { size: u32, padding: u32 }
    /// LSEEK.
    LseekOut, 8 { offset: u64 }
    /// IOCTL.
    IoctlOut, 16 { result: i32, flags: u32, in_iovs: u32, out_iovs: u32 }
    /// INVAL_INODE: the kernel drops the cached attributes, and the cached contents of `len` bytes
    /// from `off` on. Length 0 means up to the end; a negative `off` leaves the contents alone.
    InvalInodeOut, 24 { ino: u64, off: i64, len: i64 }
    /// INVAL_ENTRY, without the name and the NUL behind it.
    InvalEntryOut, 16 { parent: u64, namelen: u32, flags: u32 }
    /// The arguments of a command over io_uring.
    RingCommand, 24 { flags: u64, commit_id: u64, qid: u16, padding: [u8; 6] }
    /// An entry of READDIR, without its name.
    Dirent, 24 { ino: u64, off: u64, namelen: u32, file_type: u32 }
}
