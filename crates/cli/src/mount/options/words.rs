//! The words of mount options that are not followed, and those that only one format has.

/// Options that mean nothing to this program, or that are true in any case.
pub(super) const LET_BE: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "_netdev",
    "silent",
    "loud",
    "async",
    "noatime",
    // The kernel keeps no access times for FUSE, so both options mean the same.
    "relatime",
    "nodiratime",
    "nolazytime",
    "norelatime",
    "nostrictatime",
    "noiversion",
    "nomand",
    "symfollow",
    "default_permissions",
    "nonempty",
    // An image is mounted without a loop device.
    "loop",
    "noautodefrag",
    "nouser_subvol_rm_allowed",
    "barrier",
    "acl",
    "space_cache=v2",
    "ssd",
    "nossd",
    "nossd_spread",
    "enospc_debug",
    "noenospc_debug",
    "noinode_cache",
    "fatal_errors=bug",
];

/// Options with a value that mount adds itself.
pub(super) const REPEATED: &[&str] = &[
    // Every FUSE mount has these in the table of mounts, and mount repeats them in a remount.
    "user_id", "group_id", "max_read", "blksize",
    // The user who mounted it, and the program that unmounts it.
    "user", "helper", "uhelper",
];

/// Wishes of btrfs(5) and mount(8). They change speed and what is stored besides files, but no
/// contents.
pub(super) const WISHES: &[&str] = &[
    "autodefrag",
    "lazytime",
    "atime",
    "diratime",
    "strictatime",
    "iversion",
    // The kernel has no mandatory locks any more.
    "mand",
    "user_xattr",
    "thread_pool",
    "metadata_ratio",
    "skip_balance",
    "clear_cache",
    "space_cache",
    "nospace_cache",
    "inode_cache",
    "rescan_uuid_tree",
    "ssd_spread",
    // This program always uses barriers.
    "nobarrier",
    // If a user may not delete subvolumes, they just stay.
    "user_subvol_rm_allowed",
    // The kernel ignores these options and still accepts them.
    "alloc_start",
    "subvolrootid",
];

/// Options that only btrfs has, of those in the other lists, and of those that are followed.
pub(super) const ONLY_BTRFS: &[&str] = &[
    "degraded",
    "nologreplay",
    "rescue",
    "usebackuproot",
    "recovery",
    "treelog",
    "notreelog",
    "flushoncommit",
    "noflushoncommit",
    "subvolid",
    "subvol",
    "device",
    "commit",
    "autodefrag",
    "noautodefrag",
    "user_subvol_rm_allowed",
    "nouser_subvol_rm_allowed",
    "space_cache",
    "nospace_cache",
    "clear_cache",
    "ssd",
    "nossd",
    "ssd_spread",
    "nossd_spread",
    "enospc_debug",
    "noenospc_debug",
    "inode_cache",
    "noinode_cache",
    "fatal_errors",
    "thread_pool",
    "metadata_ratio",
    "skip_balance",
    "rescan_uuid_tree",
    "alloc_start",
    "subvolrootid",
    // XFS is trimmed by `offshoot trim`, and not while files go.
    "discard",
];

/// Options of XFS that mean nothing to this program, or that are true in any case. Values are not
/// looked at: those of the log buffers are the kernel's memory.
pub(super) const XFS_LET_BE: &[&str] = &[
    "inode64",
    "attr2",
    "noattr2",
    "noquota",
    "noikeep",
    "nolargeio",
    "nogrpid",
    "sysvgroups",
    "nouuid",
    "logbufs",
    "logbsize",
];

/// Options of XFS that change where and how fast data is stored, and no contents.
pub(super) const XFS_WISHES: &[&str] =
    &["ikeep", "largeio", "swalloc", "noalign", "sunit", "swidth", "allocsize", "filestreams"];

/// Options of XFS that the kernel follows and this program does not.
pub(super) const XFS_REFUSED: &[&str] = &[
    "inode32",
    "wsync",
    "grpid",
    "bsdgroups",
    "logdev",
    "rtdev",
    "dax",
    "max_atomic_write",
    "max_open_zones",
    "quota",
    "usrquota",
    "uquota",
    "uquotanoenforce",
    "uqnoenforce",
    "qnoenforce",
    "grpquota",
    "gquota",
    "gquotanoenforce",
    "gqnoenforce",
    "prjquota",
    "pquota",
    "pquotanoenforce",
    "pqnoenforce",
];

/// Options that the kernel follows and this program does not. A user who sets one relies on it.
pub(super) const REFUSED: &[&str] = &[
    // From other FUSE filesystems. With it the kernel would send whole pages, which append-only
    // files refuse.
    "writeback",
    "allow_root",
    "auto_unmount",
    "sync",
    "dirsync",
    "nosymfollow",
    "noacl",
    "nouser_xattr",
    "context",
    "fscontext",
    "defcontext",
    "rootcontext",
    "offset",
    "sizelimit",
    "fatal_errors",
    "check_int",
    "check_int_data",
    "check_int_print_mask",
    "ref_verify",
    "ref_tracker",
    "fragment",
];
