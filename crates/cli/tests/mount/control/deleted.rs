//! Files of deleted subvolumes that are open.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use offshoot_testkit::run::run as run_host;
use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, unlinkat};

use super::super::{ServedMount, require, volume};
use super::{LiveCommands, names};

/// What programs can do with open files of the subvolume `sub`, which `delete` deletes.
fn used_when_deleted(root: &Path, delete: &dyn Fn(&Path)) -> Vec<String> {
    let sub = root.join("sub");
    let open = |path: &str| {
        let file = File::options().read(true).write(true).open(sub.join(path));
        file.expect("a file that is there")
    };
    fs::create_dir(sub.join("dir")).expect("a directory");
    for name in ["dir/file", "dir/other", "nameless"] {
        fs::write(sub.join(name), vec![1; 100_000]).expect("a file");
    }
    let (file, nameless) = (open("dir/file"), open("nameless"));
    let [dir, top] = ["dir", ""].map(|path| File::open(sub.join(path)).expect("a directory"));
    fs::remove_file(sub.join("nameless")).expect("it is there");
    delete(&sub);

    let mut said = Vec::new();
    let mut note = |what: &str, done: std::io::Result<String>| {
        said.push(format!("{what}: {:?}", done.map_err(|error| error.kind())));
    };
    let bytes = |file: &File, len: usize| {
        let mut buf = vec![0; len];
        file.read_exact_at(&mut buf, 0)
            .map(|()| format!("{:?}", [buf[0], buf[len / 2], buf[len - 1]]))
    };
    let made = |dir: &File, name: &str| {
        let flags = OFlags::CREATE | OFlags::RDWR;
        let new = File::from(openat(dir, name, flags, Mode::from_raw_mode(0o600))?);
        new.write_all_at(b"new", 0)?;
        // When it is closed, the kernel drops its cached contents.
        bytes(&new, 3)
    };
    let listed = |dir: &File| {
        let entries = rustix::fs::Dir::read_from(dir)?.collect::<Result<Vec<_>, _>>()?;
        let mut names: Vec<_> =
            entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names.join(" "))
    };
    note("the path", fs::metadata(&sub).map(|_| String::new()));
    for (name, file) in [("a file", &file), ("a nameless file", &nameless)] {
        note(name, bytes(file, 100_000));
        note(name, file.write_all_at(&vec![2; 150_000], 50_000).map(|()| String::new()));
        note(name, file.sync_all().map(|()| String::new()));
        note(name, bytes(file, 200_000));
        note(name, file.set_len(300_000).map(|()| String::new()));
        note(name, file.metadata().map(|found| format!("{} {}", found.len(), found.nlink())));
    }
    note("a new file", made(&dir, "new"));
    note(
        "a new directory",
        mkdirat(&dir, "deeper", Mode::from_raw_mode(0o700))
            .map(|()| String::new())
            .map_err(Into::into),
    );
    note(
        "a file that goes",
        unlinkat(&dir, "other", AtFlags::empty()).map(|()| String::new()).map_err(Into::into),
    );
    note("the directory", listed(&dir));
    note("the directory", dir.sync_all().map(|()| String::new()));
    note("a new file at the top", made(&top, "new"));
    note("the file at last", bytes(&file, 200_000));
    said
}

/// Regression: programs could no longer use their open files of a deleted subvolume.
#[test]
fn who_uses_a_deleted_subvolume_goes_on_as_on_the_kernels_mount() {
    let Some(judges) = require() else { return };
    let (disks, theirs) = (volume(&judges, 256), volume(&judges, 256));
    let theirs = {
        let mount = theirs.mount("rw,noatime");
        does_btrfs("create", &mount.path().join("sub"));
        used_when_deleted(mount.path(), &|sub| does_btrfs("delete", sub))
    };
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    for round in 0..2 {
        mounted.does("subvolume create @/sub");
        let ours = used_when_deleted(mounted.path(), &|_| {
            mounted.does("subvolume delete @/sub");
        });
        assert_eq!(ours, theirs, "round {round}");
        assert_eq!(mounted.does("subvolume list --json @").matches("\"id\"").count(), 1);
    }
    // An empty subvolume, deleted by the system call.
    mounted.does("subvolume create @/sub");
    let sub = mounted.path().join("sub");
    fs::write(sub.join("file"), vec![1; 100_000]).expect("a file");
    let file = File::options().read(true).write(true).open(sub.join("file")).expect("a file");
    fs::remove_file(sub.join("file")).expect("it is there");
    fs::remove_dir(&sub).expect("it is empty");
    file.write_all_at(&[2; 8192], 0).expect("it is open");
    file.sync_all().expect("it is durable");
    let mut buf = [0; 8192];
    file.read_exact_at(&mut buf, 0).expect("it is open");
    assert_eq!(buf, [2; 8192]);
    drop(file);
    mounted.unmount();
    disks.assert_checks();
    assert!(names(disks.mount("ro").path()).is_empty());
}

/// Runs a verb of `btrfs subvolume`.
fn does_btrfs(verb: &str, path: &Path) {
    run_host("btrfs", &["subvolume".as_ref(), verb.as_ref(), path.as_os_str()]);
}
