//! What the kernel does to a mutant, so that what it leaves behind can be compared: about as much
//! as ours, to the same files.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Result, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use offshoot_testkit::random::Random;
use offshoot_testkit::run::try_run;
use rustix::fs::{FallocateFlags, XattrFlags};

/// New files.
const NEW: u64 = 100;

/// Changes the files at these paths below `mount`, and adds new ones. What fails is left: a mutant
/// may be such that nothing goes.
pub(crate) fn churn(mount: &Path, touched: &[Vec<u8>]) {
    let mut random = Random::new(5);
    let paths: Vec<_> = touched.iter().map(|path| mount.join(OsStr::from_bytes(path))).collect();
    let dirs: Vec<_> = paths.iter().filter(|path| path.is_dir()).cloned().collect();
    let dir_of = |number: u64| {
        let at = usize::try_from(number).expect("small") % dirs.len().max(1);
        dirs.get(at).map_or(mount, |dir| dir.as_path())
    };
    for round in 0..NEW {
        let path = dir_of(round).join(format!("kernel-{round}"));
        let len = [100, 5000, 70_000][usize::try_from(round % 3).expect("small")];
        let _ = std::fs::write(&path, random.bytes(len));
        let _ = symlink("elsewhere", dir_of(round).join(format!("kernel-link-{round}")));
    }
    for (number, path) in paths.iter().enumerate() {
        if !path.is_symlink() && path.is_file() {
            let _ = change(number, path, &random.bytes(10_000));
        }
    }
    sync(mount);
    for (number, path) in paths.iter().enumerate() {
        if path.is_dir() {
            continue;
        }
        match number % 4 {
            0 | 1 => drop(std::fs::remove_file(path)),
            2 => drop(std::fs::rename(path, path.with_extension("moved"))),
            _ => drop(std::fs::hard_link(path, path.with_extension("linked"))),
        }
    }
    let command = |args: &[&OsStr]| drop(try_run("btrfs", args));
    // An empty one first: it may get the number of one that the extent tree still knows.
    let to = mount.join("kernel-subvolume");
    command(&["subvolume".as_ref(), "create".as_ref(), to.as_ref()]);
    let snapshot = mount.join("kernel-snapshot");
    command(&["subvolume".as_ref(), "snapshot".as_ref(), mount.as_ref(), snapshot.as_ref()]);
    // Ours may have removed any of these. A second, damaged name of a removed file stays.
    for path in touched {
        drop(std::fs::remove_file(snapshot.join(OsStr::from_bytes(path))));
    }
    for path in &dirs {
        command(&["subvolume".as_ref(), "delete".as_ref(), path.as_ref()]);
        drop(std::fs::remove_dir(path));
    }
    // Not for longer than it makes sense: what was deleted may never go from a damaged volume.
    sync(mount);
    let wait = ["5".as_ref(), "btrfs".as_ref(), "subvolume".as_ref(), "sync".as_ref()];
    drop(try_run("timeout", &[&wait[..], &[mount.as_os_str()]].concat()));
    sync(mount);
}

/// Changes one file in several ways.
fn change(number: usize, path: &Path, bytes: &[u8]) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    file.write_all_at(bytes, 0)?;
    match number % 5 {
        0 => rustix::fs::fallocate(&file, FallocateFlags::empty(), 50_000, 100_000)?,
        1 => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, flags, 4096, 8192)?;
        }
        2 => file.set_len(3000)?,
        3 => {
            let copy = File::create(path.with_extension("clone"))?;
            rustix::fs::ioctl_ficlone(copy, &file)?;
        }
        _ => (&file).write_all(bytes)?,
    }
    rustix::fs::setxattr(path, "user.kernel", b"value", XattrFlags::empty())?;
    file.sync_all()
}

/// Has everything written, if it can be.
fn sync(mount: &Path) {
    if let Ok(root) = File::open(mount) {
        let _ = rustix::fs::syncfs(root);
    }
}
