//! A mount that is shown elsewhere with mapped ids.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use nix::libc;
use offshoot_testkit::run::{command, run};
use offshoot_testkit::scratch_dir;
use rustix::fs::{AtFlags, CWD, OFlags, linkat};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree};
use tempfile::TempDir;

use super::{NamespaceHolder, ServedMount, as_user, assert_alike, require, twins};

/// A user name space that maps users and groups 0..1000 to [`SHIFT`] and above.
pub(super) struct MappedIds(NamespaceHolder);

/// The difference of the ids.
const SHIFT: u32 = 10_000;

impl MappedIds {
    pub(super) fn new() -> Self {
        let holder = NamespaceHolder::start("--user", "", Path::new(""));
        for map in ["uid_map", "gid_map"] {
            let path = format!("/proc/{}/{map}", holder.id());
            fs::write(path, format!("0 {SHIFT} 1000")).expect("root may");
        }
        Self(holder)
    }

    fn space(&self) -> File {
        File::open(format!("/proc/{}/ns/user", self.0.id())).expect("it is there")
    }
}

/// A place that shows a mount with mapped ids.
pub(super) struct MappedPlace(TempDir);

impl MappedPlace {
    /// Shows the mount over `root`.
    #[expect(unsafe_code, reason = "no crate has it as a safe function")]
    pub(super) fn new(root: &Path, ids: &MappedIds) -> Result<Self, io::Error> {
        let tree = open_tree(CWD, root, OpenTreeFlags::OPEN_TREE_CLONE)?;
        let space = ids.space();
        let userns_fd = u64::try_from(space.as_raw_fd()).expect("a descriptor");
        let attributes = libc::mount_attr {
            attr_set: libc::MOUNT_ATTR_IDMAP,
            attr_clr: 0,
            propagation: 0,
            userns_fd,
        };
        // SAFETY: the pointers are to variables that outlive the call, and the last argument is
        // the length of the structure.
        let changed = unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                tree.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_EMPTY_PATH,
                &raw const attributes,
                size_of_val(&attributes),
            )
        };
        if changed != 0 {
            return Err(io::Error::last_os_error());
        }
        let place = scratch_dir();
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        move_mount(&tree, "", CWD, place.path(), flags)?;
        Ok(Self(place))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for MappedPlace {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

/// Uses the same files through the mount over `root` and through `mapped`, which shows it with
/// mapped ids, and returns the results.
fn use_both(root: &Path, mapped: &Path) -> Vec<String> {
    let mut said = Vec::new();
    let mut note = |what: String, result: io::Result<()>| {
        said.push(format!("{what}: {:?}", result.map_err(|error| error.raw_os_error())));
    };
    let make = |dir: &Path, what: &str, name: &str| {
        let path = dir.join(name);
        match what {
            "file" => File::create(&path).map(drop),
            "directory" => fs::create_dir(&path),
            "link" => symlink("x", &path),
            _ => {
                let flags = OFlags::TMPFILE | OFlags::RDWR;
                let file = rustix::fs::open(dir, flags, 0o600.into())?;
                Ok(linkat(&file, "", CWD, &path, AtFlags::EMPTY_PATH)?)
            }
        }
    };
    fs::set_permissions(root, fs::Permissions::from_mode(0o777)).expect("root may");
    for user in [0, 7, SHIFT, SHIFT + 7, SHIFT + 5000] {
        for what in ["file", "directory", "link", "unnamed"] {
            for (place, dir) in [("root", root), ("mapped", mapped)] {
                let name = format!("{what}-{user}-{place}");
                note(format!("make {name}"), as_user(user, || make(dir, what, &name)));
            }
        }
    }
    for (place, dir) in [("root", root), ("mapped", mapped)] {
        let file = dir.join("file-7-root");
        for owner in [0, 8, SHIFT + 9, 5000] {
            note(format!("chown {owner} in {place}"), chown(&file, Some(owner), Some(owner)));
            for user in [8, SHIFT + 8, SHIFT + 9] {
                let mode = fs::Permissions::from_mode(0o600);
                let changed = as_user(user, || fs::set_permissions(&file, mode));
                note(format!("chmod by {user} in {place}"), changed);
                let written = as_user(user, || fs::write(&file, "data"));
                note(format!("write by {user} in {place}"), written);
                let read = as_user(user, || fs::read(&file).map(drop));
                note(format!("read by {user} in {place}"), read);
            }
        }
    }
    let list = "u:10:rw,g:20:r";
    run("setfacl", &["-m".as_ref(), list.as_ref(), root.join("file-0-root").as_os_str()]);
    for (place, dir) in [("root", root), ("mapped", mapped)] {
        let mut names: Vec<_> =
            fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry")).collect();
        names.sort_by_key(fs::DirEntry::file_name);
        for entry in names {
            let stat = entry.path().symlink_metadata().expect("it is there");
            let (path, mode) = (entry.file_name(), stat.mode());
            let (name, user, group) = (path.display(), stat.uid(), stat.gid());
            said.push(format!("{name} in {place}: {mode:o} {user}:{group}"));
        }
        let shown = dir.join("file-0-root");
        let options = ["--numeric", "--omit-header"].map(OsStr::new);
        said.push(run("getfacl", &[&options[..], &["-p".as_ref(), shown.as_os_str()]].concat()));
    }
    said
}

/// A mount with `idmap` shows mapped ids as the kernel's btrfs does.
#[test]
fn mapped_ids_are_as_in_the_kernel() {
    let Some(judges) = require() else { return };
    let (ours, theirs) = twins(&judges, 256);
    let mounted = ServedMount::new(&ours.images()[0], "allow_other,idmap");
    let kernel = theirs.mount("noatime");
    let ids = MappedIds::new();
    let [said, expected] = [mounted.path(), kernel.path()].map(|root| {
        let mapped = MappedPlace::new(root, &ids).expect("the kernel maps ids");
        use_both(root, mapped.0.path())
    });
    assert_alike(&said, &expected);
    assert!(said.len() > 100, "only {}", said.len());
    // The kernel does not name the user to the server, so the server refuses all users.
    let trimmed = command("fstrim").arg(mounted.path()).output().expect("fstrim starts");
    let said = String::from_utf8_lossy(&trimmed.stderr);
    assert!(said.ends_with("Permission denied\n"), "{said}");
    mounted.unmount();
    ours.assert_checks();
    let plain = ServedMount::new(&ours.images()[0], "allow_other");
    let refused = MappedPlace::new(plain.path(), &ids).err().and_then(|e| e.raw_os_error());
    assert_eq!(refused, Some(libc::EINVAL), "without the option");
    plain.unmount();
}
