//! Further places of a volume that is mounted: one line of fstab for each subvolume is what most
//! systems have.
//!
//! One process may write a volume. So the second mount of it is a bind mount of what the first one
//! serves, of the directory that the subvolume has behind the gate ([`super::gate`]). `ro`, `suid`,
//! `dev` and `exec` belong to the place; every other option is that of the first mount, as it is
//! with the kernel's btrfs.
//!
//! Systems mount the lines of fstab side by side. Who mounts a volume for writing therefore holds a
//! lock on it until that is done ([`Turn`]), and looks for
//! other mounts only then. It is on a byte that no volume has, and another lock than the one that
//! keeps other writers out.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::mount::{MountFlags, UnmountFlags};

use super::control::in_force;
use super::gate;
use super::options::Wanted;
use super::table::{Line, find_line, is_dead, places_of_volume};
use super::{Mounting, flags_of};
use crate::edit::host_id;
use crate::exit::{Failure, Result};
use crate::output::Console;

/// The right to mount a volume for writing, for as long as it is there.
pub(super) struct Turn(#[expect(dead_code, reason = "its end is that of the lock")] File);

impl Turn {
    /// Waits for it. `file` is the volume, open for writing.
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

/// Mounts the volume from where it is mounted already, by this program and for writing; whether it
/// is.
pub(super) fn mount(mounting: &Mounting<'_>, wanted: &Wanted, console: &Console) -> Result<bool> {
    let is_served =
        |place: &Line| !place.is_read_only && place.is_on_top() && !is_dead(Path::new(&place.dir));
    let places = places_of_volume(mounting.volume)?.into_iter();
    let mut places: Vec<_> = places.filter(is_served).collect();
    // What is mounted as a whole shows everything that is served.
    places.sort_by_key(|place| place.root != Path::new("/"));
    match places.first() {
        Some(first) => bind(first, mounting, wanted, console).map(|()| true),
        None => Ok(false),
    }
}

fn bind(first: &Line, mounting: &Mounting<'_>, wanted: &Wanted, console: &Console) -> Result {
    let there = Path::new(&first.dir);
    let (volume, directory) = (mounting.volume.display(), mounting.directory);
    if !rustix::process::geteuid().is_root() {
        let there = there.display();
        let what = format!("{volume} is mounted over {there}; only root mounts it elsewhere too");
        return Err(Failure::Refused(what));
    }
    let by_id = || wanted.subvolume_id.map(|id| id.to_string().into());
    let asked = wanted.subvolume.clone().or_else(by_id);
    let served = in_force(there, asked.as_deref())?;
    if wanted.subvolume_id.is_some_and(|id| id != served.subvolume) {
        return Err(wanted.other_subvolume(served.subvolume));
    }
    // Which subvolume it is belongs to the place, and of the others nothing is opened.
    let is_of_volume = |option: &&String| {
        !["subvol", "device=", "io_uring", "noio_uring"].iter().any(|name| option.starts_with(name))
    };
    let options: Vec<String> = mounting.options.iter().filter(is_of_volume).cloned().collect();
    let others = Wanted::parse(&served.options, true)?.others(&options, true)?;
    if !others.is_empty() {
        let (others, there) = (others.join(", "), there.display());
        console.warning(&format_args!("{volume} is mounted over {there}, without {others}"));
    }
    // To the kernel the directory that is served as the root has no name.
    let source = if served.subvolume != served.root {
        there.join(gate::path(served.subvolume))
    } else if first.root == Path::new("/") {
        there.to_path_buf()
    } else {
        let there = there.display();
        let what = format!("{volume} was mounted with this subvolume first, and that is unmounted");
        return Err(Failure::Refused(format!("{what}: to mount it again, unmount {there} too")));
    };
    let directory = directory
        .canonicalize()
        .map_err(|error| Failure::Host(directory.display().to_string(), error))?;
    // Mounting all lines of fstab once more mounts nothing twice.
    if find_line(&directory).is_ok() && host_id(&directory) == host_id(&source) {
        console.warning(&format_args!("{volume} is mounted over {} already", directory.display()));
        return Ok(());
    }
    bind_with(&source, &directory, flags_of(wanted))
        .map_err(|error| Failure::Host(format!("mounting over {}", directory.display()), error))
}

/// Binds `source` over `directory` with `flags`. The kernel gives a bind mount those of the mount
/// that it is made from. So this makes a first one in a directory that only root may search,
/// changes its flags, and makes the second one from that: no other user ever reaches a mount with
/// other rights than the caller asked for.
fn bind_with(source: &Path, directory: &Path, flags: MountFlags) -> io::Result<()> {
    let closed = Permissions::from_mode(0o700);
    let mut builder = tempfile::Builder::new();
    let make = builder.prefix("offshoot-").permissions(closed);
    let make = |above: &Path| make.tempdir_in(above);
    // Early in the boot nothing else may be written.
    let private = make(Path::new("/run")).or_else(|_| make(&std::env::temp_dir()))?;
    // What is in it is the volume: it must never be removed with its contents.
    let private = private.keep();
    // A mount hides the mode of the directory that it is over. So it is over one in the closed one.
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
