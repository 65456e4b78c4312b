//! File handles: a file is found by its handle when the kernel has forgotten it, as NFS needs it.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::libc;
use offshoot_testkit::run::run;

use super::format::is_xfs;
use super::{ServedMount, assert_alike, does, on_both, require, twins, volume};

/// A handle, as `name_to_handle_at` fills it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct FileHandle {
    bytes: u32,
    kind: i32,
    data: [u8; 128],
}

impl FileHandle {
    #[expect(unsafe_code, reason = "no crate has it as a safe function")]
    pub(super) fn of(path: &Path) -> Self {
        let mut handle = Self { bytes: 128, kind: 0, data: [0; 128] };
        let path = CString::new(path.as_os_str().as_bytes()).expect("no NUL");
        let mut mount = 0;
        // SAFETY: all pointers are to variables that outlive the call, and `bytes` is the room
        // that the handle has.
        let done = unsafe {
            let handle = (&raw mut handle).cast();
            libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), handle, &raw mut mount, 0)
        };
        assert_eq!(done, 0, "{path:?}: {}", io::Error::last_os_error());
        handle
    }

    /// Opens the file in the file system of `root`.
    #[expect(unsafe_code, reason = "no crate has it as a safe function")]
    pub(super) fn open(mut self, root: &Path) -> io::Result<File> {
        let root = File::open(root).expect("the root");
        // SAFETY: the handle outlives the call, and `bytes` is no more than it has.
        let opened = unsafe {
            let handle = (&raw mut self).cast();
            libc::open_by_handle_at(root.as_raw_fd(), handle, libc::O_RDONLY | libc::O_CLOEXEC)
        };
        if opened < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it for this program.
        Ok(unsafe { File::from_raw_fd(opened) })
    }
}

/// Makes the kernel forget what no program uses.
fn forget() {
    for _ in 0..3 {
        fs::write("/proc/sys/vm/drop_caches", "2").expect("root may");
    }
}

/// What was opened: the path of a directory, or the contents of a file.
fn shown(opened: io::Result<File>, root: &Path) -> String {
    let mut file = match opened {
        Ok(file) => file,
        Err(error) => return error.to_string(),
    };
    let stat = file.metadata().expect("it is open");
    if stat.is_dir() {
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("a link");
        return format!("the directory {}", path.strip_prefix(root).expect("below").display());
    }
    let mut text = String::new();
    file.read_to_string(&mut text).expect("text");
    format!("{text:?} with {} names", stat.nlink())
}

/// Opens files by their handles on a mount, and returns what that showed.
fn open_all(root: &Path, make_subvolume: impl Fn(&Path)) -> Vec<String> {
    let path = |name: &str| root.join(name);
    fs::create_dir_all(path("d/e")).expect("directories");
    make_subvolume(&path("d/sub"));
    fs::create_dir(path("d/sub/f")).expect("a directory");
    let names = ["a", "d/e/b", "d/sub/c", "d/sub/f/g"];
    for name in names {
        fs::write(path(name), name).expect("a file");
    }
    let all = names.into_iter().chain(["", "d", "d/e", "d/sub", "d/sub/f"]);
    let handles: Vec<_> = all.map(|name| (name, FileHandle::of(&path(name)))).collect();
    let mut said = Vec::new();
    let mut open = |what: &str| {
        forget();
        for (name, handle) in &handles {
            said.push(format!("{what}: {name:?}: {}", shown(handle.open(root), root)));
        }
    };
    open("forgotten");
    fs::rename(path("d/e"), path("e")).expect("a move");
    fs::hard_link(path("d/sub/c"), path("d/sub/h")).expect("a link");
    open("moved");
    let kept = File::open(path("a")).expect("it is there");
    for name in ["a", "d/sub/f/g", "e/b"] {
        fs::remove_file(path(name)).expect("it is there");
    }
    fs::remove_dir(path("e")).expect("it is empty");
    open("removed, and one still open");
    drop(kept);
    // FUSE keeps a closed file until the server was told of it.
    for _ in 0..500 {
        if handles[0].1.open(root).is_err() {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    open("removed");
    said
}

/// As on a mount of the kernel, handles lead to their files, and those of removed files are stale.
fn handles_find_what_is_forgotten() {
    let Some(judges) = require() else { return };
    let (ours, theirs) = twins(&judges, 256);
    let (mounted, kernel) = (ServedMount::new(&ours.images()[0], "rw"), theirs.mount("noatime"));
    let create = ["subvolume", "create"].map(OsStr::new);
    // XFS has directories there.
    let plain = |path: &Path| fs::create_dir(path).expect("a directory");
    let ours = |path: &Path| does(&[create[0], create[1], path.as_os_str()]);
    let theirs = |path: &Path| drop(run("btrfs", &[create[0], create[1], path.as_os_str()]));
    let (said, expected) = if is_xfs() {
        (open_all(mounted.path(), plain), open_all(kernel.path(), plain))
    } else {
        (open_all(mounted.path(), ours), open_all(kernel.path(), theirs))
    };
    assert_alike(&said, &expected);
    assert!(said.iter().any(|said| said.contains("Stale")), "{said:#?}");
    mounted.unmount();
}

/// The handles of files in a deleted subvolume are stale, also while a program has one of its files
/// open.
#[test]
fn handles_into_a_deleted_subvolume_are_stale() {
    let Some(judges) = require() else { return };
    let (ours, theirs) = twins(&judges, 256);
    let (mounted, kernel) = (ServedMount::new(&ours.images()[0], "rw"), theirs.mount("noatime"));
    let open = |root: &Path, subvolume: &dyn Fn(&OsStr, &Path)| {
        let path = |name: &str| root.join(name);
        subvolume("create".as_ref(), &path("sub"));
        fs::create_dir(path("sub/d")).expect("a directory");
        for name in ["sub/kept", "sub/d/a"] {
            fs::write(path(name), name).expect("a file");
        }
        let handles = ["sub/d", "sub/d/a"].map(|name| FileHandle::of(&path(name)));
        let kept = File::open(path("sub/kept")).expect("it is there");
        subvolume("delete".as_ref(), &path("sub"));
        forget();
        let said = handles.map(|handle| shown(handle.open(root), root));
        assert_eq!(shown(Ok(kept), root), "\"sub/kept\" with 1 names");
        said
    };
    let verb: &OsStr = "subvolume".as_ref();
    let said = open(mounted.path(), &|word, path| does(&[verb, word, path.as_os_str()]));
    let expected = open(kernel.path(), &|word, path| {
        run("btrfs", &[verb, word, path.as_os_str()]);
    });
    assert_eq!(said, expected);
    assert!(said.iter().all(|said| said.contains("Stale")), "{said:?}");
    mounted.unmount();
}

/// A handle outlives the mount. When its number is given to a new file, it is stale.
fn handles_outlive_the_mount() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mount = || ServedMount::new(&disks.images()[0], "rw");
    let mounted = mount();
    let path = mounted.path().join("old");
    fs::write(&path, "old").expect("a file");
    let (handle, number) = (FileHandle::of(&path), fs::metadata(&path).expect("a file").ino());
    mounted.unmount();
    let mounted = mount();
    let opened = handle.open(mounted.path());
    assert_eq!(shown(opened, mounted.path()), "\"old\" with 1 names");
    fs::remove_file(mounted.path().join("old")).expect("it is there");
    mounted.unmount();
    let mounted = mount();
    let path = mounted.path().join("new");
    fs::write(&path, "new").expect("a file");
    assert_eq!(fs::metadata(&path).expect("a file").ino(), number, "the number is used again");
    for is_known in [true, false] {
        let opened = handle.open(mounted.path());
        assert!(shown(opened, mounted.path()).contains("Stale"), "known: {is_known}");
        forget();
    }
    let opened = FileHandle::of(&path).open(mounted.path());
    assert_eq!(shown(opened, mounted.path()), "\"new\" with 1 names");
    mounted.unmount();
}

on_both! {
    handles_outlive_the_mount,
    handles_find_what_is_forgotten,
}
