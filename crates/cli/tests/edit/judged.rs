//! `cp` judged by the kernel: whole trees into a volume, out of it, and between volumes.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Stdio;

use offshoot_testkit::btrfs::disks::{Disks, MountedMembers};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::{check, does, fails, offshoot, program, volume, words};

#[track_caller]
fn assert_copies(ours: &Path, theirs: &Path, at_least: u64) {
    let ours = HostFilesystem::new(ours).expect("the copy opens");
    Compare::of_copies().run(&ours, theirs).assert_same(at_least);
}

/// Runs `cp -r`, which must succeed, and returns its messages.
#[track_caller]
fn copies(dir: &Path, args: &[&Path]) -> String {
    let output = offshoot(dir, &[&[Path::new("cp"), Path::new("-r")], args].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "offshoot cp -r {args:?}: {said}");
    said
}

fn mounted(image: &Path, options: &str) -> MountedMembers {
    MountedMembers::try_new(&[image.to_path_buf()], options)
        .unwrap_or_else(|reason| panic!("{reason}"))
}

/// One of everything: from the host into a volume, from there into another volume, and out again
/// over existing files.
#[test]
fn everything_goes_in_and_between_and_out() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(fill::everything).make(&judges);
    let source = disks.mount("ro,noatime");
    let dir = scratch_dir();
    volume(dir.path(), "a.img", 1024);
    volume(dir.path(), "b.img", 1024);
    let contents = source.path().join(".");
    let said = copies(dir.path(), &[&contents, Path::new("a.img:/")]);
    assert_eq!(said, "");
    check(&dir.path().join("a.img"));
    copies(dir.path(), &[Path::new("a.img:/"), Path::new("b.img:/")]);
    check(&dir.path().join("b.img"));
    for image in ["a.img", "b.img"] {
        let mount = mounted(&dir.path().join(image), "ro,noatime");
        assert_copies(mount.path(), source.path(), fill::EVERYTHING_AT_LEAST);
    }
    // Twice: the second time everything exists already.
    let empty = Disks::create(&judges, 1, 1024);
    empty.mkfs(&[]);
    let to = empty.mount("rw,noatime");
    let out = to.path().join("out");
    copies(dir.path(), &[Path::new("b.img:/"), &out]);
    assert_copies(&out, source.path(), fill::EVERYTHING_AT_LEAST);
    copies(dir.path(), &[Path::new("a.img:/."), &out]);
    assert_copies(&out, source.path(), fill::EVERYTHING_AT_LEAST);
    // And into the volume, where everything exists as well.
    copies(dir.path(), &[&contents, Path::new("a.img:/")]);
    check(&dir.path().join("a.img"));
    let mount = mounted(&dir.path().join("a.img"), "ro,noatime");
    assert_copies(mount.path(), source.path(), fill::EVERYTHING_AT_LEAST);
}

/// The kernel can change what we wrote, and we can change what the kernel leaves.
#[test]
fn the_kernel_goes_on_where_we_stopped() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let path = dir.path();
    volume(path, "v.img", 512);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    copies(path, &[&sources, Path::new("v.img:/src")]);
    {
        let mount = mounted(&path.join("v.img"), "rw");
        fs::rename(mount.path().join("src/args"), mount.path().join("moved")).expect("a rename");
        fs::write(mount.path().join("src/new"), "of the kernel").expect("a file");
        fs::remove_file(mount.path().join("src/main.rs")).expect("it goes");
    }
    does(path, "mv v.img:/moved v.img:/src/args");
    does(path, "rm v.img:/src/new");
    copies(path, &[&sources.join("main.rs"), Path::new("v.img:/src")]);
    // Both sides have changed the directories since.
    copies(path, &[&sources.join("."), Path::new("v.img:/src")]);
    check(&path.join("v.img"));
    let mount = mounted(&path.join("v.img"), "ro");
    let ours = HostFilesystem::new(&mount.path().join("src")).expect("the copy opens");
    // The sources may be on a filesystem that counts the sizes and links of directories in its own
    // way.
    Compare::of_copies().without(Aspect::DirectoryShape).run(&ours, &sources).assert_same(40);
    drop(ours);
    drop(mount);
    does(path, "rm -r v.img:/src");
    check(&path.join("v.img"));
    assert_eq!(does(path, "ls v.img"), "");
}

/// The program reports what the volume cannot hold, and copies everything else.
#[test]
fn what_a_volume_does_not_take_is_counted() {
    let Some(judges) = judges::require() else { return };
    let disks = Recipe::new().fill(|root| fill::data::fill_by(root, &["zstd"])).make(&judges);
    let source = disks.mount("ro,noatime");
    let dir = scratch_dir();
    volume(dir.path(), "v.img", 512);
    {
        // Files that are written in place are never compressed.
        let mount = mounted(&dir.path().join("v.img"), "rw");
        let data = mount.path().join("data");
        fs::create_dir(&data).expect("a directory");
        run("chattr", &["+C".as_ref(), data.as_os_str()]);
    }
    let said = copies(dir.path(), &[&source.path().join("."), Path::new("v.img:/data")]);
    assert!(said.starts_with("offshoot: not everything could be applied:"), "{said}");
    assert!(said.contains("extended attributes (the first: /data/"), "{said}");
    check(&dir.path().join("v.img"));
}

/// With the option, copies into a volume are compressed, and read as before.
#[test]
fn copies_are_compressed() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let path = dir.path();
    volume(path, "v.img", 512);
    let text = "the same again and again\n".repeat(40_000);
    fs::write(path.join("text"), &text).expect("a file");
    fails(path, "cp --compress gzip text v.img:/", 2);
    for (name, method) in [("a", "zlib:9"), ("b", "lzo"), ("c", "zstd:3")] {
        does(path, &format!("cp --compress {method} text v.img:/{name}"));
        assert_eq!(does(path, &format!("cat v.img:/{name}")), text);
        let items = does(path, "dump tree v.img fs --json");
        let (compression, _) = method.split_once(':').unwrap_or((method, ""));
        let field = format!("\"compression\":\"{compression}\"");
        assert!(items.contains(&field), "nothing is compressed with {method}");
    }
    check(&path.join("v.img"));
    let mount = mounted(&path.join("v.img"), "ro");
    for name in ["a", "b", "c"] {
        assert!(fs::read_to_string(mount.path().join(name)).expect("it reads") == text, "{name}");
    }
}

/// A large file with holes, a stream, and a directory deeper than any path.
#[test]
fn large_and_deep() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let path = dir.path();
    let sparse = fs::File::create(path.join("sparse")).expect("a file");
    sparse.set_len(40 << 30).expect("a size");
    for at in [0, (5 << 20) + 123, 9 << 30, (40 << 30) - 5] {
        sparse.write_all_at(b"data!", at).expect("data");
    }
    volume(path, "v.img", 512);
    does(path, "cp sparse v.img:/sparse");
    let stream: Vec<u8> = (0..5_000_001_u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    let mut child = program(path)
        .args(words("cp - v.img:/stream"))
        .stdin(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().expect("a pipe").write_all(&stream).expect("it reads all");
    assert!(child.wait().expect("it ends").success());
    check(&path.join("v.img"));
    does(path, "cp v.img:/sparse v.img:/stream .");
    assert!(fs::read(path.join("stream")).expect("it came back") == stream);
    let mount = mounted(&path.join("v.img"), "ro");
    let theirs = mount.path().join("sparse").metadata().expect("it is there");
    assert_eq!(theirs.size(), 40 << 30);
    assert!(theirs.blocks() < 100, "{} blocks", theirs.blocks());
    assert!(fs::read(mount.path().join("stream")).expect("it is read") == stream);
    drop(mount);

    // There are 100 levels, each with a name of 200 bytes.
    let mut fd = rustix::fs::open(path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
        .expect("a directory");
    let name = "n".repeat(200);
    for _ in 0..100 {
        rustix::fs::mkdirat(&fd, &*name, rustix::fs::Mode::RWXU).expect("a level");
        fd = rustix::fs::openat(&fd, &*name, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
            .expect("a level");
    }
    does(path, &format!("cp -r {name} v.img:/deep"));
    does(path, "cp -r v.img:/deep v.img:/again");
    does(path, "cp -r v.img:/again out");
    check(&path.join("v.img"));
    does(path, "rm -r v.img:/deep v.img:/again");
    check(&path.join("v.img"));
    assert_eq!(does(path, "ls v.img"), "sparse\nstream\n");
}

/// Attributes that are not preserved are those of a file that the caller makes.
#[test]
fn what_is_not_preserved() {
    let dir = scratch_dir();
    let path = dir.path();
    fs::write(path.join("a"), "a").expect("a file");
    fs::hard_link(path.join("a"), path.join("b")).expect("a hard link");
    rustix::fs::chmod(path.join("a"), rustix::fs::Mode::from_raw_mode(0o6777)).expect("a mode");
    let old = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
    let file = fs::File::options().write(true).open(path.join("a")).expect("it opens");
    file.set_times(old).expect("times");
    volume(path, "v.img", 128);
    let stat = |place: &str| -> serde_json::Value {
        serde_json::from_str(&does(path, &format!("stat --json {place}"))).expect("JSON")
    };
    does(path, "cp a b v.img:/");
    let kept = stat("v.img:/a");
    assert_eq!((&kept["mode"], &kept["links"]), (&"6777".into(), &2.into()));
    assert_eq!(kept["mtime"], "0.000000000");
    assert_eq!(stat("v.img:/b")["inode"], kept["inode"]);
    does(path, "mkdir v.img:/none");
    does(path, "cp --no-preserve all a b v.img:/none");
    let left = stat("v.img:/none/a");
    assert_eq!((&left["mode"], &left["links"]), (&"0755".into(), &1.into()));
    assert_ne!(left["mtime"], kept["mtime"]);
    does(path, "mkdir v.img:/some");
    does(path, "cp --no-preserve links,ownership a b v.img:/some");
    let some = stat("v.img:/some/a");
    assert_eq!((&some["mode"], &some["links"]), (&"0777".into(), &1.into()));
    assert_eq!(some["mtime"], kept["mtime"]);
    does(path, "cp --no-preserve mode,timestamps v.img:/a out");
    assert_eq!(path.join("out").metadata().expect("it is there").mode() & 0o7777, 0o755);
}

#[test]
fn machine_output() {
    let dir = scratch_dir();
    volume(dir.path(), "v.img", 128);
    fs::create_dir(dir.path().join("d")).expect("a directory");
    fs::write(dir.path().join("d/file"), "12345").expect("a file");
    let expected = "{\"directories\":1,\"files\":1,\"bytes\":5,\"errors\":0,\"not_applied\":[]}\n";
    assert_eq!(does(dir.path(), "cp -r --json d v.img:/"), expected);
    assert_eq!(does(dir.path(), "cp -r --json v.img:/d v.img:/e"), expected);
    assert_eq!(does(dir.path(), "cp -r --json v.img:/e ."), expected);
}

/// The kernel's tools show the same flags and exchanged names.
#[test]
fn flags_and_exchanges() {
    let Some(_) = judges::require() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let at = dir.path();
    volume(at, "v.img", 128);
    does(at, "mkdir v.img:/one v.img:/one/inner v.img:/two");
    does(at, "mv --exchange -T v.img:/one v.img:/two");
    fails(at, "mv --exchange -T v.img:/one v.img:/none", 1);
    does(at, "chattr +dA v.img:/two v.img:/two/inner");
    does(at, "chattr -A v.img:/two");
    does(at, "chattr =iC v.img:/one");
    fails(at, "mkdir v.img:/one/x", 1);
    fails(at, "chattr +cC v.img:/two", 1);
    assert!(does(at, "stat v.img:/one").contains("\n Flags: iC\n"));
    assert!(does(at, "stat --json v.img:/two").contains("\"flags\":\"d\""));
    let mount = mounted(&at.join("v.img"), "rw,noatime");
    let shown = |name: &str| {
        let path = mount.path().join(name);
        let line = run("lsattr", &["-d".as_ref(), path.as_os_str()]);
        line.split(' ').next().expect("flags").replace('-', "")
    };
    assert_eq!([shown("one"), shown("two"), shown("two/inner")], ["iC", "d", "dA"]);
    drop(mount);
    does(at, "chattr -- -i v.img:/one");
    check(&at.join("v.img"));
}
