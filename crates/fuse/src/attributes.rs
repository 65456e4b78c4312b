//! Attributes of files, in the structures of the protocol.

use offshoot_vfs::{Attr, FileType, StatFs, Timestamp};

use crate::options::ShownFiles;
use crate::wire::{AttrOut, Attributes, EntryOut, ROOT_NODE, StatfsOut, StatxOut, StatxTime};

/// How long the kernel may cache an answer, in seconds: a year. Only the kernel changes what is
/// mounted.
const FOREVER_SECS: u64 = 365 * 24 * 3600;

/// How long the kernel may cache attributes that change without a request, in seconds. The space
/// that a file takes is an estimate until its data is written back.
const GUESS_SECS: u64 = 1;

/// The latest time at which written data is written back, in seconds, unless the mount asks for
/// longer intervals.
const STORED_SECS: i64 = 60;

/// How long the kernel may cache these attributes, in seconds.
fn lifetime(attr: &Attr) -> u64 {
    let is_stored = Timestamp::now().secs.saturating_sub(attr.ctime.secs) > STORED_SECS;
    if is_stored || attr.file_type != FileType::Regular { FOREVER_SECS } else { GUESS_SECS }
}

/// The attributes in an answer to STATX: the basic ones and the time of birth.
const STATX_MASK: u32 = 0x0fff;

/// A device number in the encoding of the protocol: (8, 1) is 0x801.
fn device_number((major, minor): (u32, u32)) -> u32 {
    minor & 0xff | major << 8 | (minor & !0xff) << 12
}

/// The reverse: the major and minor number.
pub(crate) fn device_of(number: u32) -> (u32, u32) {
    (number >> 8 & 0xfff, number & 0xff | number >> 12 & 0xf_ff00)
}

/// The attributes of a file, shown with the number `ino` and as `shown` says.
pub(crate) fn attributes(ino: u64, attr: &Attr, shown: ShownFiles) -> Attributes {
    Attributes {
        ino,
        size: attr.size,
        blocks: attr.allocated_bytes.div_ceil(512),
        atime: attr.atime.secs.cast_unsigned(),
        mtime: attr.mtime.secs.cast_unsigned(),
        ctime: attr.ctime.secs.cast_unsigned(),
        atimensec: attr.atime.nanos,
        mtimensec: attr.mtime.nanos,
        ctimensec: attr.ctime.nanos,
        mode: attr.mode(),
        nlink: attr.nlink,
        uid: shown.owner.uid.unwrap_or(attr.uid),
        gid: shown.owner.gid.unwrap_or(attr.gid),
        rdev: device_number(attr.rdev),
        blksize: shown.block_bytes,
        flags: 0,
    }
}

/// The answer to GETATTR and SETATTR.
pub(crate) fn attr_out(ino: u64, attr: &Attr, shown: ShownFiles) -> AttrOut {
    AttrOut { attr_valid: lifetime(attr), attr: attributes(ino, attr, shown), ..AttrOut::default() }
}

/// A name that leads to `node`, which shows the number `ino`.
pub(crate) fn entry_out(node: u64, ino: u64, attr: &Attr, shown: ShownFiles) -> EntryOut {
    EntryOut {
        nodeid: node,
        generation: if node == ROOT_NODE { 0 } else { generation(attr).into() },
        entry_valid: FOREVER_SECS,
        attr_valid: lifetime(attr),
        attr: attributes(ino, attr, shown),
        ..EntryOut::default()
    }
}

/// The generation of a file in the 32 bits that the kernel has for it.
pub(crate) fn generation(attr: &Attr) -> u32 {
    u32::try_from(attr.generation & 0xffff_ffff).expect("32 bits")
}

/// A name that does not exist, which the kernel may cache too.
pub(crate) fn no_entry() -> EntryOut {
    EntryOut { entry_valid: FOREVER_SECS, ..EntryOut::default() }
}

fn statx_time(time: Timestamp) -> StatxTime {
    StatxTime { tv_sec: time.secs, tv_nsec: time.nanos, reserved: 0 }
}

/// The answer to STATX.
pub(crate) fn statx_out(ino: u64, attr: &Attr, shown: ShownFiles) -> StatxOut {
    let plain = attributes(ino, attr, shown);
    StatxOut {
        attr_valid: lifetime(attr),
        mask: STATX_MASK,
        blksize: plain.blksize,
        nlink: plain.nlink,
        uid: plain.uid,
        gid: plain.gid,
        mode: u16::try_from(plain.mode).expect("types and permissions are 16 bits"),
        ino,
        size: plain.size,
        blocks: plain.blocks,
        atime: statx_time(attr.atime),
        btime: statx_time(attr.btime),
        ctime: statx_time(attr.ctime),
        mtime: statx_time(attr.mtime),
        rdev_major: attr.rdev.0,
        rdev_minor: attr.rdev.1,
        ..StatxOut::default()
    }
}

/// The answer to STATFS.
pub(crate) fn statfs_out(sizes: &StatFs) -> StatfsOut {
    let unit = u64::from(sizes.block_size.max(1));
    StatfsOut {
        blocks: sizes.total_bytes / unit,
        bfree: sizes.total_bytes.saturating_sub(sizes.used_bytes) / unit,
        bavail: sizes.available_bytes / unit,
        bsize: sizes.block_size,
        frsize: sizes.block_size,
        namelen: u32::try_from(offshoot_vfs::NAME_MAX).expect("a short name"),
        ..StatfsOut::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_numbers_go_there_and_back() {
        for device in [(0, 0), (1, 3), (0xfff, 0xf_ffff), (8, 256), (259, 0x1_0001)] {
            assert_eq!(device_of(device_number(device)), device);
        }
        assert_eq!(device_number((8, 1)), 0x801);
    }
}
