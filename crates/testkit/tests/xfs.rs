//! The judges of XFS: volumes hold what a reader must know, and damage is told.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use offshoot_testkit::compare::Aspect;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::model::{Model, ModelManners};
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::fill::{self, SOME_AT_LEAST, XfsFillShape};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::{MATRIX, XfsVolumeKind};
use offshoot_testkit::xfs::recipe::{FilledXfs, XfsRecipe};
use offshoot_vfs::{
    EntryPlace, FileSystem, FileSystemMut, FileType, NewFile, NewNode, Rename, Timestamp,
};

/// The kernel shows of a copy what it shows of the volume.
#[test]
fn a_copy_shows_the_same() {
    let Some(judges) = judges::require() else { return };
    let kind = XfsVolumeKind::named("today-1k");
    let filled = XfsRecipe::new(kind).fill(|root| fill::some(root, 0x0f5)).make(&judges);
    let copy = filled.disk.copy();
    let mount = copy.mount("ro,noatime,nouuid", kind.kernel_says);
    let ours = HostFilesystem::new(mount.path()).expect("the copy opens");
    // Reading the copy changes what the kernel takes for holes in it.
    filled.compare_without(&[Aspect::Holes], &ours).assert_same(SOME_AT_LEAST);
}

#[test]
fn old_kinds_are_filled_and_clean() {
    let Some(judges) = judges::require() else { return };
    for kind in MATRIX.iter().filter(|kind| !kind.is_mounted) {
        let filled = XfsRecipe::new(kind).make(&judges);
        assert!(filled.disk.try_mount("ro").is_err(), "{}", kind.name);
        assert!(filled.disk.field(&["sb 0"], "icount") > kind.names_at_least, "{}", kind.name);
        let place = ["path /directories/of-4000"];
        assert!(filled.disk.field(&place, "core.format") >= 2, "{}", kind.name);
        let value = filled.disk.xfs_db(&["path /attributes/of-1", "print a.sfattr"]);
        assert!(value.contains("vvvvv"), "{value}");
    }
}

/// A model with the manners of XFS, and the kernel, agree on the same calls.
#[test]
fn a_model_has_the_manners_of_xfs() {
    let Some(judges) = judges::require() else { return };
    let fill = |root: &Path| {
        for path in ["a", "a/b", "a/b/c", "a/d", "e"] {
            std::fs::create_dir(root.join(path)).expect("a directory");
        }
        std::fs::write(root.join("a/file"), b"file").expect("a file");
        std::fs::rename(root.join("a/b"), root.join("e/b")).expect("another parent");
        std::fs::remove_dir(root.join("a/d")).expect("a directory goes");
    };
    let filled = XfsRecipe::new(XfsVolumeKind::named("usual")).fill(fill).make(&judges);
    let at = Timestamp { secs: 0, nanos: 0 };
    let model = Model::made_at(at).with_manners(ModelManners::Xfs);
    let new = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at };
    let mkdir = |dir, name| model.mkdir(EntryPlace { dir, name }, &new).expect("a directory");
    let root = model.root();
    let a = mkdir(root, b"a".as_slice());
    let b = mkdir(a, b"b");
    mkdir(b, b"c");
    mkdir(a, b"d");
    let e = mkdir(root, b"e");
    let place = EntryPlace { dir: a, name: b"file" };
    let kind = NewNode { file_type: FileType::Regular, rdev: (0, 0) };
    let made = model.mknod(place, kind, &NewFile { permissions: 0o644, ..new }).expect("a file");
    model.write(made, 0, b"file", at).expect("contents");
    let [from, to] = [a, e].map(|dir| EntryPlace { dir, name: b"b" });
    model.rename_with(from, to, Rename::Replace, at).expect("another parent");
    model.rmdir(EntryPlace { dir: a, name: b"d" }, at).expect("a directory goes");
    let aspects = [
        Aspect::Ids,
        Aspect::Order,
        Aspect::StoredTimes,
        Aspect::ModificationTimes,
        Aspect::DirectorySize,
    ];
    filled.compare_without(&aspects, &model).assert_same(6);
    // A copy of what the kernel shows counts the same.
    let mount = filled.disk.mount("ro", &[]);
    let host = HostFilesystem::new(mount.path()).expect("the volume opens");
    let copy = Model::copy(&host).expect("it reads").with_manners(ModelManners::Xfs);
    let links = |model: &Model| model.attr(model.root()).expect("the root").nlink;
    assert_eq!((links(&copy), links(&model)), (4, 4));
}

/// The format of the data fork, or of the attribute fork.
fn format(disk: &XfsDisk, path: &str, fork: &str) -> u64 {
    disk.field(&[&format!("path {path}")], &format!("core.{fork}"))
}

#[test]
fn all_forms_are_there() {
    let Some(judges) = judges::require() else { return };
    let filled = XfsRecipe::new(XfsVolumeKind::named("usual")).make(&judges);
    let disk = &filled.disk;
    for (path, fork, expected) in [
        ("/directories/of-4", "format", 1),
        ("/directories/of-60", "format", 2),
        ("/directories/of-700", "format", 2),
        ("/extents/few-3", "format", 2),
        ("/extents/scattered", "format", 3),
        ("/extents/unwritten", "format", 3),
        ("/extents/shared", "format", 3),
        ("/sizes/two-to-62", "format", 2),
        ("/special/symlink-59", "format", 1),
        ("/special/symlink-1000", "format", 2),
        ("/attributes/of-1", "aformat", 1),
        ("/attributes/of-60", "aformat", 2),
        ("/attributes/fragmented", "aformat", 3),
    ] {
        assert_eq!(format(disk, path, fork), expected, "{fork} of {path}");
    }
    let level = disk.field(&["path /extents/scattered"], "u3.bmbt.level");
    assert!(level >= 2, "the tree of extents has {level} levels");
    assert_eq!(disk.field(&["path /inodes/project-large"], "core.projid_hi"), 61_035);
    let has_sparse_chunk = |group: u32| {
        let shown = disk.xfs_db(&[&format!("agi {group}"), "addr root", "print recs"]);
        // `3:[192,0xff00,32,0,0]`: the first inode, the mask of holes, and counts
        let masks = shown.lines().filter_map(|line| line.split_once(":[")?.1.split(',').nth(1));
        masks.filter(|mask| !["0", "0x0", "holemask"].contains(mask)).count() > 0
    };
    assert!((0..4).any(has_sparse_chunk), "no group has a sparse chunk");
    let shape = XfsFillShape::of(disk);
    assert!(shape.has("REFLINK") && !shape.has("RMAPBT") && !shape.has("LINK"));
}

#[test]
fn large_numbers_are_above_32_bits() {
    let Some(judges) = judges::require() else { return };
    let filled = XfsRecipe::new(XfsVolumeKind::named("large-numbers"))
        .fill(|root| {
            for number in 0..16 {
                std::fs::create_dir(root.join(number.to_string())).expect("a directory");
            }
        })
        .make(&judges);
    let mount = filled.disk.mount("ro", &[]);
    let numbers = (0..16).map(|number| XfsDisk::ino(&mount.path().join(number.to_string())));
    assert!(numbers.max().is_some_and(|largest| largest > u64::from(u32::MAX)));
}

fn little(judges: &XfsJudges) -> FilledXfs {
    let fill = |root: &Path| std::fs::write(root.join("file"), b"synced").expect("a file");
    XfsRecipe::new(XfsVolumeKind::named("usual")).fill(fill).make(judges)
}

/// The message of the panic when `dropped` is dropped, if there is one.
fn complaint<T>(dropped: T) -> Option<String> {
    let panic = catch_unwind(AssertUnwindSafe(|| drop(dropped))).err()?;
    Some(*panic.downcast::<String>().expect("a message"))
}

#[test]
fn a_shutdown_leaves_a_dirty_log() {
    let Some(judges) = judges::require() else { return };
    for how in [XfsShutdown::LogWritten, XfsShutdown::LogLost] {
        let FilledXfs { disk, .. } = little(&judges);
        let mut mount = disk.mount("rw,noatime", &[]);
        std::fs::create_dir(mount.path().join("synced")).expect("a directory");
        mount.sync();
        std::fs::create_dir(mount.path().join("late")).expect("a directory");
        disk.shut_down(&mut mount, how);
        drop(mount);
        let finding = disk.check().expect_err("a dirty log");
        assert!(finding.contains("log"), "{finding}");
        let said = complaint(disk.copy().mount("rw,noatime", &[])).expect("a complaint");
        assert!(said.contains(RECOVERY), "{said}");
        let mount = disk.mount("rw,noatime", &[RECOVERY]);
        assert!(mount.path().join("synced").exists());
        assert_eq!(mount.path().join("late").exists(), how == XfsShutdown::LogWritten);
        drop(mount);
        disk.assert_checks();
    }
}

#[test]
fn damage_is_told() {
    let Some(judges) = judges::require() else { return };
    let FilledXfs { disk, .. } = little(&judges);
    disk.change_with_xfs_db(&["agf 1", "write -d freeblks 7"]);
    let finding = disk.check().expect_err("damage");
    assert!(finding.contains("freeblks"), "{finding}");
}

/// A test that panics cleans up as a test that passes does.
#[test]
fn a_panic_undoes_everything() {
    let Some(judges) = judges::require() else { return };
    let FilledXfs { disk, .. } = little(&judges);
    let mount = disk.mount("rw,noatime", &[]);
    let image = disk.image().to_owned();
    let point = mount.path().display().to_string();
    let mounts = || std::fs::read_to_string("/proc/mounts").expect("a list of mounts");
    assert!(image.exists() && mounts().contains(&point));
    let panicked = std::thread::spawn(move || {
        let (_disk, _mount) = (disk, mount);
        panic!("on purpose");
    });
    assert!(panicked.join().is_err());
    assert!(!image.exists() && !mounts().contains(&point));
}
