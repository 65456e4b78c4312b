//! Changes that the kernel makes to a mutant: about as many as we make, to the same files. So the
//! results can be compared.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Result, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use offshoot_testkit::random::Random;
use offshoot_testkit::run::try_run;
use rustix::fs::{FallocateFlags, XattrFlags};

/// How many new files it makes.
const NEW: u64 = 100;

/// Changes the files at these paths below `mount`, and adds new ones. In four turns each of them is
/// removed, moved and linked. Errors are ignored: on some mutants every call fails.
pub(crate) fn churn(mount: &Path, touched: &[Vec<u8>], turn: usize) {
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
        match (number + turn) % 4 {
            0 | 1 => drop(std::fs::remove_file(path)),
            2 => drop(std::fs::rename(path, path.with_extension("moved"))),
            _ => drop(std::fs::hard_link(path, path.with_extension("linked"))),
        }
    }
    let command = |args: &[&OsStr]| drop(try_run("btrfs", args));
    // An empty one first: it may get the number of a subvolume that the extent tree still has.
    let to = mount.join("kernel-subvolume");
    command(&["subvolume".as_ref(), "create".as_ref(), to.as_ref()]);
    let snapshot = mount.join("kernel-snapshot");
    command(&["subvolume".as_ref(), "snapshot".as_ref(), mount.as_ref(), snapshot.as_ref()]);
    // We may have removed any of these files. If a damaged file has a second name, that name stays.
    for path in touched {
        drop(std::fs::remove_file(snapshot.join(OsStr::from_bytes(path))));
    }
    for path in &dirs {
        command(&["subvolume".as_ref(), "delete".as_ref(), path.as_ref()]);
        drop(std::fs::remove_dir(path));
    }
    // With a time limit: a damaged volume may never drop what was deleted.
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

/// Has the kernel write everything. Errors are ignored.
fn sync(mount: &Path) {
    if let Ok(root) = File::open(mount) {
        let _ = rustix::fs::syncfs(root);
    }
}
