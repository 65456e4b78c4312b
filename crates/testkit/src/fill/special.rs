//! Files that are not data: nodes, links, owners and modes, times.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, makedev};
use rustix::io::Errno;

use super::{directory, write};

/// Nodes, symbolic links, owners and modes.
pub fn fill(dir: &Path) {
    let nodes = [
        ("fifo", FileType::Fifo, (0, 0)),
        ("socket", FileType::Socket, (0, 0)),
        ("char", FileType::CharacterDevice, (1, 3)),
        ("block", FileType::BlockDevice, (8, 17)),
        ("char-large", FileType::CharacterDevice, (4095, 1_048_575)),
        ("block-large", FileType::BlockDevice, (300, 70_000)),
        ("char-0-0", FileType::CharacterDevice, (0, 0)),
    ];
    for (name, file_type, number) in nodes {
        let node = |(major, minor)| {
            let mode = Mode::from_raw_mode(0o640);
            rustix::fs::mknodat(CWD, dir.join(name), file_type, mode, makedev(major, minor))
        };
        // XFS takes 9 bits of the major number and 18 of the minor one.
        let made = match node(number) {
            Err(Errno::INVAL) => node((511, 262_143)),
            made => made,
        };
        made.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    symlinks(dir);
    owners_and_modes(&directory(dir, "owners"));
}

/// Makes symbolic links of many lengths, up to the longest that the format has. A leaf of btrfs
/// with the smallest nodes holds no 4095 bytes, XFS ends at 1023.
fn symlinks(dir: &Path) {
    for len in [1, 59, 60, 1000, 1023, 2048, 3900, 4095] {
        let path = dir.join(format!("symlink-{len}"));
        match rustix::fs::symlinkat("/".repeat(len), CWD, path) {
            Ok(()) => {}
            Err(Errno::NAMETOOLONG) if len > 1023 => return,
            Err(error) => panic!("a symbolic link of {len} bytes: {error}"),
        }
    }
}

fn owners_and_modes(dir: &Path) {
    for mode in [0, 0o111, 0o644, 0o755, 0o1777, 0o2755, 0o4755, 0o6711, 0o7777] {
        let path = dir.join(format!("mode-{mode:04o}"));
        write(&path, b"mode");
        chown(&path, Some(1000), Some(100)).expect("a new owner");
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).expect("a new mode");
    }
    for id in [1, 65_534, 65_536, 2_147_483_648, u32::MAX - 1] {
        let path = dir.join(format!("owner-{id}"));
        std::fs::create_dir(&path).expect("a directory");
        chown(&path, Some(id), Some(id - 1)).expect("a new owner");
        std::fs::set_permissions(&path, Permissions::from_mode(0o3770)).expect("a new mode");
        let link = dir.join(format!("link-owner-{id}"));
        symlink("x", &link).expect("a symbolic link");
        lchown(&link, Some(id), Some(7)).expect("a new owner");
    }
}

/// Makes files with times far from now, each on a file, a directory and a symbolic link.
pub fn times(dir: &Path) {
    let seconds = [0, 1, -1, -62_135_596_800, 2_147_483_647, 2_147_483_648, 4_294_967_296];
    let far = [15_032_385_536, 253_402_300_800, i64::from(i32::MIN) * 4, 1 << 50];
    for (index, secs) in seconds.into_iter().chain(far).enumerate() {
        let nanos = [0, 1, 999_999_999, 123_456_789][index % 4];
        let file = dir.join(format!("file-{index}"));
        let subdir = dir.join(format!("dir-{index}"));
        let link = dir.join(format!("link-{index}"));
        write(&file, b"time");
        std::fs::create_dir(&subdir).expect("a directory");
        symlink("x", &link).expect("a symbolic link");
        let times = Timestamps {
            last_access: Timespec { tv_sec: secs, tv_nsec: nanos },
            last_modification: Timespec { tv_sec: secs - 5, tv_nsec: 999_999_999 - nanos },
        };
        for path in [file, subdir, link] {
            rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)
                .expect("times of a file");
        }
    }
}
