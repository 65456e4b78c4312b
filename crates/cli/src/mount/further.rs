//! Mounts a volume in further places. Most systems have one line in fstab for each subvolume.
//!
//! Only one process may write a volume. So the second mount is a bind mount of a directory that the
//! first one serves: the subvolume's directory behind the gate ([`super::gate`]). `ro`, `suid`,
//! `dev` and `exec` apply to the place. Every other option is that of the first mount, as with the
//! kernel's btrfs.
//!
//! Systems mount the lines of fstab in parallel. So a run that mounts a volume for writing holds a
//! lock on the volume until it is mounted ([`WritableMountLock`]), and only then looks for other
//! mounts. The lock is on a byte behind the end of every volume, and is not the lock that keeps
//! other writers out.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::mount::{MountFlags, UnmountFlags};

use super::control::in_force;
use super::gate;
use super::options::MountCommandOptions;
use super::table::{MountTableLine, find_line, is_dead, places_of_volume};
use super::{Mounting, flags_of};
use crate::edit::host_id;
use crate::exit::{Result, VerbFailure};
use crate::output::Console;

/// The right to mount a volume for writing. Dropping it gives the right up.
pub(super) struct WritableMountLock(
    #[expect(dead_code, reason = "its end is that of the lock")] File,
);

impl WritableMountLock {
    /// Waits for the right. `file` is the volume, open for writing.
    pub(super) fn wait(file: File) -> io::Result<Self> {
        let lock = libc::flock {
            l_type: i16::try_from(libc::F_WRLCK).expect("a small number"),
            l_whence: i16::try_from(libc::SEEK_SET).expect("a small number"),
            l_start: i64::MAX - 1,
            l_len: 1,
            l_pid: 0,
        };
        loop {
            match fcntl(&file, FcntlArg::F_OFD_SETLKW(&lock)) {
                Err(nix::errno::Errno::EINTR) => {}
                result => return result.map(|_| Self(file)).map_err(io::Error::from),
            }
        }
    }
}

/// Mounts the volume as a bind mount if this program has it mounted for writing already. Returns
/// whether it does.
pub(super) fn mount(
    mounting: &Mounting<'_>,
    wanted: &MountCommandOptions,
    console: &Console,
) -> Result<bool> {
    let is_served = |place: &MountTableLine| {
        !place.is_read_only && place.is_on_top() && !is_dead(Path::new(&place.dir))
    };
    let places = places_of_volume(mounting.volume)?.into_iter();
    let mut places: Vec<_> = places.filter(is_served).collect();
    // A mount of the whole tree shows everything that is served, so prefer it.
    places.sort_by_key(|place| place.root != Path::new("/"));
    match places.first() {
        Some(first) => bind(first, mounting, wanted, console).map(|()| true),
        None => Ok(false),
    }
}

fn bind(
    first: &MountTableLine,
    mounting: &Mounting<'_>,
    wanted: &MountCommandOptions,
    console: &Console,
) -> Result {
    let there = Path::new(&first.dir);
    let (volume, directory) = (mounting.volume.display(), mounting.directory);
    if !rustix::process::geteuid().is_root() {
        let there = there.display();
        let what = format!("{volume} is mounted over {there}; only root mounts it elsewhere too");
        return Err(VerbFailure::Refused(what));
    }
    let by_id = || wanted.subvolume_id.map(|id| id.to_string().into());
    let asked = wanted.subvolume.clone().or_else(by_id);
    let served = in_force(there, asked.as_deref())?;
    if wanted.subvolume_id.is_some_and(|id| id != served.subvolume) {
        return Err(wanted.other_subvolume(served.subvolume));
    }
    // The subvolume belongs to the place, and the other options only concern opening the volume.
    let is_of_volume = |option: &&String| {
        !["subvol", "device=", "io_uring", "noio_uring"].iter().any(|name| option.starts_with(name))
    };
    let options: Vec<String> = mounting.options.iter().filter(is_of_volume).cloned().collect();
    let others = MountCommandOptions::parse(&served.options, true)?.others(&options, true)?;
    if !others.is_empty() {
        let (others, there) = (others.join(", "), there.display());
        console.warning(&format_args!("{volume} is mounted over {there}, without {others}"));
    }
    // The kernel has no path through the gate for the directory that is served as the root.
    let source = if served.subvolume != served.root {
        there.join(gate::path(served.subvolume))
    } else if first.root == Path::new("/") {
        there.to_path_buf()
    } else {
        let there = there.display();
        let what = format!("{volume} was mounted with this subvolume first, and that is unmounted");
        return Err(VerbFailure::Refused(format!(
            "{what}: to mount it again, unmount {there} too"
        )));
    };
    let directory = directory
        .canonicalize()
        .map_err(|error| VerbFailure::Host(directory.display().to_string(), error))?;
    // If all lines of fstab are mounted again, this place is mounted already.
    if find_line(&directory).is_ok() && host_id(&directory) == host_id(&source) {
        console.warning(&format_args!("{volume} is mounted over {} already", directory.display()));
        return Ok(());
    }
    bind_with(&source, &directory, flags_of(wanted))
        .map_err(|error| VerbFailure::Host(format!("mounting over {}", directory.display()), error))
}

/// Binds `source` over `directory` with `flags`. The kernel gives a bind mount the flags of the
/// mount that it is made from. So this function makes a first bind mount in a directory that only
/// root may search, changes its flags, and makes the second one from it. No other user ever reaches
/// a mount with more rights than the caller asked for.
fn bind_with(source: &Path, directory: &Path, flags: MountFlags) -> io::Result<()> {
    let closed = Permissions::from_mode(0o700);
    let mut builder = tempfile::Builder::new();
    let make = builder.prefix("offshoot-").permissions(closed);
    let make = |above: &Path| make.tempdir_in(above);
    // Early in the boot only `/run` can be written.
    let private = make(Path::new("/run")).or_else(|_| make(&std::env::temp_dir()))?;
    // The directory will contain the volume, so it must never be removed with its contents.
    let private = private.keep();
    // A mount hides the mode of its mount point, so it goes over a directory inside the closed one.
    let inner = private.join("mount");
    std::fs::create_dir(&inner)?;
    let bound = rustix::mount::mount_bind(source, &inner).and_then(|()| {
        let result = rustix::mount::mount_remount(&inner, MountFlags::BIND | flags, "")
            .and_then(|()| rustix::mount::mount_bind(&inner, directory));
        result.and(rustix::mount::unmount(&inner, UnmountFlags::DETACH))
    });
    let removed = std::fs::remove_dir(&inner).and_then(|()| std::fs::remove_dir(&private));
    bound?;
    removed
}
