//! `--rootdir`: volumes that are filled in their place.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use offshoot_testkit::btrfs::disks::{AttachedImages, Disks, MountedMembers, assert_image_checks};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::fill;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::{run, try_run};
use offshoot_testkit::sharing::extents;
use rustix::fs::{FlockOperation, flock};

use super::Bench;

/// Checks an image, mounts it with `options`, and shows the mount to `look`.
#[track_caller]
pub(super) fn judge(image: &Path, options: &str, look: impl FnOnce(&Path)) {
    assert_image_checks(image);
    let mount = MountedMembers::try_new(&[image.to_path_buf()], options);
    look(mount.unwrap_or_else(|reason| panic!("{reason}")).path());
}

/// Checks an image, and compares what the kernel shows in it with the source.
#[track_caller]
pub(super) fn assert_holds(image: &Path, source: &Path, at_least: u64) {
    judge(image, "ro,noatime", |mount| {
        let ours = HostFilesystem::new(mount).expect("the mount opens");
        let compare = Compare::of_copies().without(Aspect::DirectoryShape);
        compare.run(&ours, source).assert_same(at_least);
    });
}

/// A tree for any filesystem of the host.
pub(super) fn tree(root: &Path) {
    fill::names::hard_links(&fill::directory(root, "links"));
    fill::special::fill(&fill::directory(root, "special"));
    let etc = fill::directory(root, "etc");
    fs::write(etc.join("motd"), "hello\n".repeat(10_000)).expect("a file");
    fs::set_permissions(etc.join("motd"), fs::Permissions::from_mode(0o4751)).expect("a mode");
    std::os::unix::fs::chown(etc.join("motd"), Some(1234), Some(4_000_000_000)).expect("root");
    let home = fill::directory(root, "home");
    fs::write(home.join("notes"), "text ".repeat(100_000)).expect("a file");
    fs::create_dir(home.join("alice")).expect("a directory");
    fs::write(home.join("alice/f"), "f").expect("a file");
}

#[test]
fn a_missing_file_becomes_a_volume() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    tree(&top);
    let said = bench.does("--rootdir top -L filled new.img");
    assert!(said.contains("Rootdir from:"), "{said}");
    assert_holds(&bench.path("new.img"), &top, 20);
    let metadata = fs::metadata(bench.path("new.img")).expect("a file");
    // The mask of the caller applies.
    let plain = bench.image("plain", 0);
    let mode = fs::metadata(plain).expect("a file").mode();
    assert_eq!(metadata.mode(), mode);
    // The real tool fills another, and both hold the same. It takes no link of 4095 bytes, and
    // stores no numbers of devices.
    fs::remove_dir_all(top.join("special")).expect("a directory");
    bench.does("-q -f -r top new.img");
    let dir = bench.dir.path();
    run("mkfs.btrfs", &["-q".as_ref(), "-r".as_ref(), top.as_os_str(), dir.join("real").as_ref()]);
    let real = MountedMembers::try_new(&[dir.join("real")], "ro,noatime");
    let real = real.unwrap_or_else(|reason| panic!("{reason}"));
    judge(&bench.path("new.img"), "ro,noatime", |mount| {
        let ours = HostFilesystem::new(mount).expect("the mount opens");
        let compare = Compare::of_copies().without(Aspect::DirectoryShape);
        // It stores whole seconds.
        compare.without(Aspect::Nanoseconds).run(&ours, real.path()).assert_same(20);
    });
}

#[test]
fn a_file_becomes_longer_only_if_it_must() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    let (small, large) =
        (fill::directory(bench.dir.path(), "small"), fill::directory(bench.dir.path(), "large"));
    fs::write(small.join("f"), "f").expect("a file");
    let mut bytes = vec![0; 200 << 20];
    offshoot_testkit::random::Random::new(7).bytes(4096).iter().zip(0..).for_each(|(byte, at)| {
        bytes[at * 51_200] = *byte;
    });
    bytes.iter_mut().step_by(4096).for_each(|byte| *byte |= 1);
    fs::write(large.join("f"), &bytes).expect("a file");
    let bytes_of = |name: &str| fs::metadata(bench.path(name)).expect("a file").len();
    for (line, name, before, range) in [
        ("-q -r small", "empty.img", 0, 128..129),
        ("-q -r small", "short.img", 10, 128..129),
        ("-q -r small", "fits.img", 150, 150..151),
        ("-q -r large", "full.img", 150, 250..600),
        ("-q -b 50M -r small", "counted.img", 0, 128..129),
        ("-q -b 200M -r small", "part.img", 300, 300..301),
    ] {
        bench.image(name, before);
        bench.does(&format!("{line} {name}"));
        let mib = bytes_of(name) >> 20;
        assert!(range.contains(&mib), "{line} {name}: {mib} MiB");
        let source = if line.ends_with("large") { &large } else { &small };
        assert_holds(&bench.path(name), source, 1);
    }
}

#[test]
fn subvolumes_compression_and_flags() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    tree(&top);
    bench.does(
        "-q -r top --subvol default-ro:./home -u home/alice --compress zstd:3 \
         --inode-flags nodatacow:etc --inode-flags nodatacow:home/notes new.img",
    );
    let image = bench.path("new.img");
    judge(&image, "ro,subvolid=5", |mount| {
        let read = |name: &str| fs::read(mount.join(name)).expect("a file");
        assert_eq!(read("etc/motd"), b"hello\n".repeat(10_000));
        assert_eq!(read("home/alice/f"), b"f");
        let ino = |name: &str| fs::metadata(mount.join(name)).expect("it is there").ino();
        assert_eq!((ino("home"), ino("home/alice")), (256, 256));
        let listed = run("btrfs", &["subvolume".as_ref(), "list".as_ref(), mount.as_os_str()]);
        assert_eq!(listed.lines().count(), 2, "{listed}");
        let flags = |name: &str| {
            let shown = run("lsattr", &["-d".as_ref(), mount.join(name).as_os_str()]);
            shown.split(' ').next().expect("the flags").to_owned()
        };
        for (name, is_in_place) in [
            ("etc", true),
            ("etc/motd", true),
            ("home/notes", true),
            ("home", false),
            ("links", false),
        ] {
            assert_eq!(flags(name).contains('C'), is_in_place, "{name}: {}", flags(name));
        }
    });
    judge(&image, "rw", |mount| {
        assert!(mount.join("notes").exists(), "the default subvolume");
        let error = fs::write(mount.join("new"), "new").expect_err("it is read-only");
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    });
    // The same without the flag is smaller.
    bench.does("-q -r top --compress zstd:15 packed.img");
    let blocks = |name: &str| fs::metadata(bench.path(name)).expect("a file").blocks();
    assert!(blocks("packed.img") < blocks("new.img"));
    assert_holds(&bench.path("packed.img"), &top, 20);
}

/// A block device keeps its size, and one that is in use is left alone.
#[test]
fn block_devices_are_filled() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    tree(&top);
    let image = bench.image("disk.img", 300);
    {
        let attached = AttachedImages::new(std::slice::from_ref(&image));
        let device = attached.devices()[0].to_owned();
        bench.does(&format!("-q -r top {device}"));
        let said = bench.fails(&format!("-r top {device}"));
        assert!(said.contains("holds btrfs"), "{said}");
        // A program that locks the device and starts us is one user with us.
        let line = format!("{device} {} -f -q -r top {device}", bench.link().display());
        let locked = bench.run(Path::new("/usr/bin/flock"), &line);
        assert!(locked.status.success(), "{}", String::from_utf8_lossy(&locked.stderr));
        // A mount goes on when the program that started it has ended, so it takes no such lock.
        let offshoot = env!("CARGO_BIN_EXE_offshoot");
        let mounted = bench.path("mounted");
        fs::create_dir(&mounted).expect("a directory");
        let line = format!("{device} {offshoot} mount {device} {}", mounted.display());
        let locked = bench.run(Path::new("/usr/bin/flock"), &line);
        let said = String::from_utf8_lossy(&locked.stderr);
        assert!(!locked.status.success() && said.contains("in use by process"), "{said}");
        // Another user may share a lock, and this namespace of processes does not show it.
        let line = format!(
            "-s {device} unshare --pid --fork --mount-proc flock -s {device} {} -f -q -r top {device}",
            bench.link().display()
        );
        let locked = bench.run(Path::new("/usr/bin/flock"), &line);
        let said = String::from_utf8_lossy(&locked.stderr);
        assert!(!locked.status.success() && said.contains("in use by"), "{said}");
        // Another one is not.
        let mut other = Command::new("/usr/bin/flock")
            .args([&device, "sh", "-c", "echo; read end"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("flock starts");
        let mut begun = [0];
        let mut stdout = other.stdout.take().expect("a pipe");
        std::io::Read::read_exact(&mut stdout, &mut begun).expect("it begins");
        let said = bench.fails(&format!("-f -q -r top {device}"));
        assert!(said.contains("in use by process"), "{said}");
        drop(other.stdin.take());
        other.wait().expect("it ends");
        // This process is one, and has the device as such.
        let held = fs::File::open(&device).expect("the device opens");
        flock(&held, FlockOperation::LockExclusive).expect("a lock");
        bench.does(&format!("-f -q -r top {device}"));
    }
    assert_eq!(fs::metadata(&image).expect("a file").len(), 300 << 20);
    assert_holds(&image, &top, 20);
}

/// Nothing looks like a volume when the files do not fit.
#[test]
fn a_device_that_is_too_small_holds_no_volume() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    let mut file = fs::File::create(top.join("f")).expect("a file");
    for at in 0..256_u32 {
        let piece: Vec<u8> = (0..1 << 18).flat_map(|word: u32| (word * at).to_le_bytes()).collect();
        file.write_all(&piece).expect("it is written");
    }
    let image = bench.image("disk.img", 200);
    let attached = AttachedImages::new(std::slice::from_ref(&image));
    let said = bench.fails(&format!("-q -r top {}", attached.devices()[0]));
    assert!(said.contains("space"), "{said}");
    let found = try_run("blkid", &["-p", attached.devices()[0]]);
    assert!(found.is_err(), "{found:?}");
}

/// A directory with a file of so many MiB that are not zeros.
fn large_tree(bench: &Bench, mib: usize) {
    let top = fill::directory(bench.dir.path(), "top");
    fs::write(top.join("f"), vec![b'x'; mib << 20]).expect("a file");
}

/// A file that cannot become longer, when the volume in it is full, holds no half a volume.
#[test]
fn a_failure_between_two_attempts_leaves_no_volume() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    large_tree(&bench, 160);
    bench.image("disk.img", 150);
    // 200 MiB, in blocks of 512 bytes.
    let script = format!(
        "trap '' XFSZ; ulimit -f 409600; exec '{}' -f -q -r top disk.img",
        bench.link().display()
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .current_dir(bench.dir.path())
        .output()
        .expect("a shell starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("too large"), "{said}");
    assert_eq!(fs::metadata(bench.path("disk.img")).expect("a file").len(), 150 << 20);
    let found = try_run("blkid", &["-p".as_ref(), bench.path("disk.img").as_os_str()]);
    assert!(found.is_err(), "{found:?}");
}

/// What lies behind the bytes that `-b` counts stays as it is, whether the files fit or not.
#[test]
fn nothing_changes_behind_the_bytes_that_are_given() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    large_tree(&bench, 160);
    fs::create_dir(bench.path("small")).expect("a directory");
    fs::write(bench.path("small/f"), "f").expect("a file");
    let image = bench.occupied("disk.img", 400);
    let behind = |mib: usize| fs::read(&image).expect("an image").split_off(mib << 20);
    for (line, mib) in [("-b 140M -r top", 140), ("-b 20M -r top", 20)] {
        let before = behind(mib);
        let said = bench.fails(&format!("-f -q {line} disk.img"));
        assert!(said.contains("space") || said.contains("small"), "{line}: {said}");
        assert!(behind(mib) == before, "{line}");
        let found = try_run("blkid", &["-p".as_ref(), image.as_os_str()]);
        assert!(mib < 140 || found.is_err(), "{line}: {found:?}");
    }
    for line in ["-b 200M", "-b 200M -r small", "-b 200M -r small --shrink"] {
        let before = behind(200);
        bench.does(&format!("-f -q {line} disk.img"));
        assert!(behind(200) == before, "{line}");
        assert_image_checks(&image);
    }
}

/// With `--shrink` a file is about as small as that of the real tool, and a device stays.
#[test]
fn shrunk_volumes() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    tree(&top);
    fs::remove_dir_all(top.join("special")).expect("a directory");
    fs::write(top.join("f"), vec![b'x'; 20 << 20]).expect("a file");
    bench.image("given.img", 300);
    let dir = bench.dir.path();
    let real = dir.join("real");
    let options = ["-q".as_ref(), "--shrink".as_ref(), "-r".as_ref()];
    run("mkfs.btrfs", &[&options[..], &[top.as_os_str(), real.as_ref()]].concat());
    let bytes_of = |name: &str| fs::metadata(bench.path(name)).expect("a file").len();
    for name in ["new.img", "given.img"] {
        let said = bench.does(&format!("--shrink --rootdir top {name}"));
        assert!(said.contains("  Shrink:           yes"), "{said}");
        let (ours, real) = (bytes_of(name), bytes_of("real"));
        assert!(ours <= real + (32 << 20), "{name}: {ours} and {real}");
        assert!(ours < 200 << 20, "{name}: {ours}");
        assert_holds(&bench.path(name), &top, 20);
        judge(&bench.path(name), "rw", |mount| {
            fs::write(mount.join("new"), "new").expect("it can be written");
        });
    }
    let image = bench.image("disk.img", 300);
    {
        let attached = AttachedImages::new(std::slice::from_ref(&image));
        bench.does(&format!("-q --shrink -r top {}", attached.devices()[0]));
    }
    assert_eq!(bytes_of("disk.img"), 300 << 20);
    assert_holds(&image, &top, 20);
    let shown =
        run("btrfs", &["inspect-internal".as_ref(), "dump-super".as_ref(), image.as_os_str()]);
    let total = shown.lines().find_map(|line| line.strip_prefix("total_bytes"));
    let total: u64 = total.expect("a size").trim().parse().expect("a number");
    assert!(total < 200 << 20, "{total}");
}

/// The run of a good volume does not fail when the caller closes its standard output.
#[test]
fn a_closed_output_does_not_fail_the_run() {
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    fs::write(top.join("f"), "f").expect("a file");
    for words in [&["-r", "top", "a.img"][..], &["-f", "a.img"]] {
        let mut child = Command::new(bench.link())
            .args(words)
            .current_dir(bench.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{words:?}: {said}");
    }
}

/// The image shares the data of large files with the source, where the host can.
#[test]
fn data_is_shared_with_the_source() {
    let Some(judges) = judges::require() else { return };
    let bench = Bench::new();
    let host = Disks::create(&judges, 1, 1024);
    host.mkfs(&[]);
    let host = host.mount("noatime");
    let top = fill::directory(host.path(), "top");
    tree(&top);
    let mut random = offshoot_testkit::random::Random::new(11);
    fs::write(top.join("large"), random.bytes((8 << 20) + 100)).expect("a file");
    fs::File::create(top.join("sparse"))
        .and_then(|file| {
            file.set_len(64 << 20)?;
            std::os::unix::fs::FileExt::write_all_at(&file, &random.bytes(1 << 20), 32 << 20)
        })
        .expect("a file");
    host.sync();
    let (image, copy) = (host.path().join("new.img"), host.path().join("copy.img"));
    for (options, image) in [("--reflink -d dup", &image), ("-d dup", &copy)] {
        bench.does(&format!("-q -r {} {options} {}", top.display(), image.display()));
        assert_holds(image, &top, 20);
    }
    host.sync();
    let shared = |name: &str| -> u64 {
        let extents = extents(host.path()).remove(&format!("./{name}")).expect("its extents");
        let shared = extents.iter().filter(|(_, kinds)| kinds.iter().any(|kind| kind == "shared"));
        shared.map(|(range, _)| range.end - range.start).sum()
    };
    // Each file is in the image twice.
    assert!(shared("new.img") >= 18 << 20, "{}", shared("new.img"));
    assert_eq!(shared("copy.img"), 0);
    // This host filesystem has another image.
    let plain = bench.path("new.img");
    let said = bench.fails(&format!("-q -r {} --reflink {}", top.display(), plain.display()));
    assert!(said.contains("cannot share blocks") && !plain.exists(), "{said}");
}

/// Under `fakeroot` the files have the owners, types and attributes that it shows.
#[test]
fn under_fakeroot() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    fs::create_dir(bench.path("top")).expect("a directory");
    let script = format!(
        "cd '{}' && echo x > top/f && chown 4321:8765 top/f top && chmod 4755 top/f && \
         mknod top/null c 1 3 && chown 55:66 top/null && ln -s f top/l && chown -h 77:88 top/l && \
         setfattr -n user.color -v red top/f && '{}' -q -r top new.img",
        bench.dir.path().display(),
        bench.link().display()
    );
    let mut fakeroot = offshoot_testkit::run::command("fakeroot");
    let done = fakeroot.args(["--", "sh", "-c", &script]).output().expect("fakeroot starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let is_fake = fs::symlink_metadata(bench.path("top/null")).expect("a file").is_file();
    assert!(is_fake, "the host has no device there");
    judge(&bench.path("new.img"), "ro", |mount| {
        let owner = |name: &str| {
            let metadata = fs::symlink_metadata(mount.join(name)).expect("it is there");
            (metadata.uid(), metadata.gid())
        };
        assert_eq!(owner("f"), (4321, 8765));
        assert_eq!(owner(""), (4321, 8765));
        assert_eq!(owner("l"), (77, 88));
        assert_eq!(owner("null"), (55, 66));
        let null = fs::symlink_metadata(mount.join("null")).expect("it is there");
        assert!(null.file_type().is_char_device());
        assert_eq!(null.rdev(), rustix::fs::makedev(1, 3));
        assert_eq!(fs::metadata(mount.join("f")).expect("a file").mode() & 0o7777, 0o4755);
        let path = mount.join("f");
        let shown = run("getfattr", &["-d".as_ref(), path.as_os_str()]);
        assert!(shown.contains("user.color=\"red\""), "{shown}");
    });
}

#[test]
fn the_same_sources_and_time_make_the_same_bytes() {
    let bench = Bench::new();
    let top = fill::directory(bench.dir.path(), "top");
    fs::create_dir(top.join("d")).expect("a directory");
    fs::write(top.join("d/f"), "text ".repeat(50_000)).expect("a file");
    for name in ["a.img", "b.img"] {
        let mut command = Command::new(bench.link());
        command.args(["-q", "-U", "0f3c92a4-7a0e-4d5e-9c1b-2d6e8f1a3b5c", "-r", "top", name]);
        command.args(["--subvol", "d", "--compress", "zstd"]);
        command.env("SOURCE_DATE_EPOCH", "1000000000").current_dir(bench.dir.path());
        assert!(command.status().expect("it starts").success());
    }
    let read = |name: &str| fs::read(bench.path(name)).expect("an image");
    assert!(read("a.img") == read("b.img"), "two images of one directory differ");
}
