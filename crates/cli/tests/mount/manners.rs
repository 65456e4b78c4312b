//! What users write for mount: lines of fstab, optional options, mounts that died, paths in a
//! mount.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_testkit::scratch_dir;
use rustix::fs::{FlockOperation, flock};
use rustix::process::Signal;

use super::callers::{MountLinks, NobodyHome, own_dir};
use super::{
    ServedMount, again_while_busy, command, does, is_done, offshoot, require, run_umount, unmount,
    volume,
};

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs `mount` of the program with these options and words.
fn mount(options: &str, words: &[&OsStr]) -> Output {
    let first = ["mount", "-o", options].map(OsStr::new);
    offshoot(&[&first[..], words].concat())
}

/// A line of a system's fstab: the mount point and the options.
type FstabLine = (&'static str, &'static str);

/// The subvolumes of a system, its default subvolume if it sets one, and the fstab that its
/// installer writes.
struct InstalledSystem {
    name: &'static str,
    subvolumes: &'static [&'static str],
    default: Option<&'static str>,
    lines: &'static [FstabLine],
}

const SYSTEMS: [InstalledSystem; 5] = [
    InstalledSystem {
        name: "Fedora",
        subvolumes: &["root", "home", "var"],
        default: None,
        lines: &[
            ("/", "subvol=root,compress=zstd:1,x-systemd.device-timeout=0"),
            ("/home", "subvol=home,compress=zstd:1,x-systemd.device-timeout=0"),
            ("/var", "subvol=var,compress=zstd:1,x-systemd.device-timeout=0"),
        ],
    },
    InstalledSystem {
        name: "openSUSE",
        subvolumes: &["@", "@/.snapshots", "@/.snapshots/1", "@/var", "@/home", "@/usr-local"],
        default: Some("@/.snapshots/1"),
        lines: &[
            ("/", "defaults"),
            ("/var", "subvol=/@/var,x-initrd.mount"),
            ("/usr-local", "subvol=/@/usr-local"),
            ("/home", "subvol=/@/home"),
            ("/.snapshots", "subvol=/@/.snapshots"),
        ],
    },
    InstalledSystem {
        name: "Debian",
        subvolumes: &["@rootfs"],
        default: None,
        lines: &[("/", "defaults,subvol=@rootfs")],
    },
    InstalledSystem {
        name: "Ubuntu",
        subvolumes: &["@", "@home"],
        default: None,
        lines: &[("/", "defaults,subvol=@"), ("/home", "defaults,subvol=@home,nofail,autodefrag")],
    },
    // As `genfstab` prints it from the kernel's table of mounts, with every option.
    InstalledSystem {
        name: "Arch",
        subvolumes: &["@", "@log"],
        default: None,
        lines: &[
            (
                "/",
                "rw,relatime,compress=zstd:3,ssd,discard=async,space_cache=v2,subvolid=256,subvol=/@",
            ),
            (
                "/log",
                "rw,noatime,ssd,discard=async,space_cache=v2,subvolid=257,subvol=/@log,x-gvfs-hide",
            ),
        ],
    },
];

/// `mount -a` with the lines of each system, and then `umount`. Every line shows its subvolume, and
/// the kernel finds there what was written.
#[test]
fn lines_of_fstab_as_systems_write_them() {
    let Some(judges) = require() else { return };
    let _links = MountLinks::new();
    for system in SYSTEMS {
        let disks = volume(&judges, 256);
        let (image, dir) = (&disks.images()[0], scratch_dir());
        // The mount points of the lines are below a directory of the test.
        let place = |path: &str| PathBuf::from(format!("{}{path}", dir.path().display()));
        let in_volume = |path: &str| format!("{}:/{path}", image.display());
        for subvolume in system.subvolumes {
            does(&["subvolume", "create", &in_volume(subvolume)].map(OsStr::new));
        }
        let root = system.default.unwrap_or(system.subvolumes[0]);
        for (path, _) in &system.lines[1..] {
            let path = in_volume(&format!("{root}{path}"));
            does(&["mkdir", "-p", &path].map(OsStr::new));
        }
        if let Some(default) = system.default {
            does(&["subvolume", "set-default", &in_volume(default)].map(OsStr::new));
        }
        let fstab = image.with_extension("fstab");
        let line = |(path, options): &FstabLine| {
            let (image, dir) = (image.display(), dir.path().display());
            format!("{image} {dir}{path} fuse.offshoot {options} 0 0\n")
        };
        // A line with `nofail` whose image is missing.
        let absent =
            format!("/no/such.img {}/none fuse.offshoot nofail 0 0\n", dir.path().display());
        let text: String = system.lines.iter().map(line).chain([absent]).collect();
        fs::write(&fstab, text).expect("a file");
        let output = Command::new("mount").arg("-a").arg("-T").arg(&fstab).output();
        let output = output.expect("mount runs");
        assert!(output.status.success(), "{}: {output:?}", system.name);
        let written: Vec<_> = system
            .lines
            .iter()
            .map(|(path, options)| fs::write(place(path).join("written by"), options))
            .collect();
        // A second `mount -a` mounts nothing twice.
        let again = Command::new("mount").arg("-a").arg("-T").arg(&fstab).output();
        let again = again.expect("mount runs");
        assert!(again.status.success(), "{}: {again:?}", system.name);
        let listed = String::from_utf8(offshoot(&["mount"]).stdout).expect("plain paths");
        for (path, _) in system.lines.iter().rev() {
            let umount = run_umount(&place(path));
            assert!(umount.status.success(), "{}: {umount:?}", system.name);
        }
        let wishes = system.lines.iter().any(|(_, options)| options.contains("autodefrag"));
        assert_eq!(said(&output).contains("autodefrag"), wishes, "{}: {output:?}", system.name);
        assert!(written.iter().all(Result::is_ok), "{}: {written:?}", system.name);
        let shown = listed.lines().filter(|line| line.contains(&*dir.path().to_string_lossy()));
        assert_eq!(shown.count(), system.lines.len(), "{}: {listed}", system.name);
        let table = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
        assert!(!table.contains(&*dir.path().to_string_lossy()), "{}: {table}", system.name);
        let lock = File::open(image).expect("an image");
        flock(&lock, FlockOperation::LockExclusive).expect("its server ends");
        drop(lock);
        disks.assert_checks();
        for (path, options) in system.lines {
            let theirs = options.replace(",autodefrag", "");
            let theirs = theirs.split(',').filter(|o| o.starts_with("subvol"));
            let theirs = theirs.fold("ro".to_owned(), |all, option| format!("{all},{option}"));
            let kernel = disks.mount(&theirs);
            let found = fs::read_to_string(kernel.path().join("written by"));
            assert_eq!(found.ok().as_deref(), Some(*options), "{} {path}", system.name);
        }
    }
}

/// A further place has its own `ro`, is unmounted on its own, and takes verbs. The server ends with
/// the last place.
#[test]
fn further_places() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = disks.images()[0].as_os_str();
    let place = |path: &str| format!("{}:/{path}", image.display());
    does(&["subvolume", "create", &place("one"), &place("two")].map(OsStr::new));
    let first = ServedMount::new(&disks.images()[0], "subvol=one");
    let (second, third) = (scratch_dir(), scratch_dir());
    let output = mount("subvol=two,ro,compress=zstd", &[image, second.path().as_os_str()]);
    assert!(output.status.success(), "{output:?}");
    assert!(said(&output).contains("without compress=zstd"), "{}", said(&output));
    does(
        &["mount", "-o", "subvol=/two"]
            .map(OsStr::new)
            .into_iter()
            .chain([image, third.path().as_os_str()])
            .collect::<Vec<_>>(),
    );
    let refused = fs::write(second.path().join("file"), "x").map_err(|error| error.kind());
    assert_eq!(refused, Err(ErrorKind::ReadOnlyFilesystem));
    fs::write(third.path().join("file"), "x").expect("it is written there");
    assert_eq!(fs::read_to_string(second.path().join("file")).ok().as_deref(), Some("x"));
    assert!(!first.path().join("file").exists());
    // Verbs work on the subvolume that the place shows.
    does(&["subvolume".as_ref(), "create".as_ref(), third.path().join("inner").as_os_str()]);
    assert!(second.path().join("inner").is_dir() && !first.path().join("inner").exists());
    let listed = offshoot(&["ls".as_ref(), second.path().as_os_str()]);
    assert_eq!(String::from_utf8_lossy(&listed.stdout), "file\ninner\n", "{listed:?}");
    let both = [first.path().join("a"), third.path().join("b")];
    let both =
        ["subvolume", "create"].iter().map(OsStr::new).chain(both.iter().map(|p| p.as_os_str()));
    assert_eq!(offshoot(&both.collect::<Vec<_>>()).status.code(), Some(2));
    // A path that is not a subvolume, or is another one, is not mounted.
    for options in ["subvol=none", "subvolid=999", "subvolid=256,subvol=two"] {
        let dir = scratch_dir();
        let output = mount(options, &[image, dir.path().as_os_str()]);
        assert!(!output.status.success() && dir.path().read_dir().expect("it").count() == 0);
    }
    // One place becomes writable, and the others stay as they are.
    let remount = mount("remount,rw", &[second.path().as_os_str()]);
    assert!(remount.status.success(), "{remount:?}");
    fs::write(second.path().join("file"), "y").expect("it can be written");
    let output = unmount(&[second.path().as_os_str()]);
    assert!(output.status.success() && said(&output).contains("still mounted"), "{output:?}");
    fs::write(third.path().join("file"), "z").expect("it is there");
    // SIGTERM ends all places.
    first.signal(Signal::TERM);
    first.ends_well();
    assert!(!third.path().join("file").exists());
    disks.assert_checks();
    let read = fs::read_to_string(disks.mount("ro,subvol=two").path().join("file"));
    assert_eq!(read.ok().as_deref(), Some("z"));
}

/// Lines that are mounted at the same moment, as systems do it. One of the processes serves the
/// volume, whichever is first.
#[test]
fn places_that_are_mounted_at_once() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    let dirs = [(); 4].map(|()| scratch_dir());
    let start = |dir: &tempfile::TempDir| {
        command().arg("mount").arg(image).arg(dir.path()).spawn().expect("it starts")
    };
    let children: Vec<_> = dirs.iter().map(start).collect();
    let ended: Vec<_> = children.into_iter().map(|mut c| c.wait().expect("a child")).collect();
    fs::write(dirs[0].path().join("file"), "x").expect("a file");
    let seen = dirs.iter().filter(|dir| dir.path().join("file").exists()).count();
    for dir in &dirs {
        assert!(unmount(&[dir.path().as_os_str()]).status.success());
    }
    assert!(ended.iter().all(std::process::ExitStatus::success), "{ended:?}");
    assert_eq!(seen, dirs.len());
    disks.assert_checks();
}

/// A remount may repeat the options that are in force, and no others.
#[test]
fn remounting_repeats_what_is_in_force() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let options = "compress=zstd:1,uid=root,commit=7,lazytime";
    let mounted = ServedMount::new(&disks.images()[0], options);
    let remount = |options: &str| mount(options, &["any".as_ref(), mounted.path().as_os_str()]);
    let output = remount(&format!("remount,ro,{options}"));
    assert!(output.status.success() && said(&output).contains("lazytime"), "{output:?}");
    assert!(fs::write(mounted.path().join("file"), "x").is_err());
    let output = remount("remount,rw,commit=8");
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert!(said(&output).contains("not in force: commit=8"), "{output:?}");
    assert!(remount("remount,rw,uid=0").status.success());
    fs::write(mounted.path().join("file"), "x").expect("it can be written");
    mounted.unmount();
    let mounted = ServedMount::new(&disks.images()[0], "ro");
    let output = mount("remount,rw", &["any".as_ref(), mounted.path().as_os_str()]);
    assert!(said(&output).contains("mounted to be read only"), "{output:?}");
    mounted.unmount();
}

/// `mount` names a mount whose server was killed, and removes it when another volume is mounted
/// there.
#[test]
fn a_dead_mount_is_named_and_taken_away() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = disks.images()[0].as_os_str();
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let dir = mounted.path().as_os_str();
    mounted.signal(Signal::KILL);
    // Requests that were under way fail with another error.
    let is_dead = || rustix::fs::statfs(mounted.path()).err() == Some(rustix::io::Errno::NOTCONN);
    while !is_dead() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let listed = String::from_utf8(offshoot(&["mount"]).stdout).expect("plain paths");
    let line = listed.lines().find(|line| line.contains(&*dir.to_string_lossy()));
    assert!(line.is_some_and(|line| line.contains("has ended")), "{listed}");
    let output = offshoot(&["ls".as_ref(), dir]);
    assert!(said(&output).contains("offshoot unmount"), "{output:?}");
    // At another directory, the volume is mounted anew, and the dead mount is not used.
    let other = scratch_dir();
    does(&["mount".as_ref(), image, other.path().as_os_str()]);
    let words = ["umount".as_ref(), other.path().as_os_str()];
    is_done(&words, &again_while_busy(|| offshoot(&words)));
    let output = mount("rw", &[image, dir]);
    assert!(
        output.status.success() && said(&output).contains("has ended: unmounted"),
        "{output:?}"
    );
    fs::write(mounted.path().join("file"), "x").expect("it is served");
    assert!(unmount(&[dir]).status.success());
    let table = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    assert!(!table.contains(&*dir.to_string_lossy()));
    disks.assert_checks();
}

/// A volume that can only be read is mounted read-only, and the program says so. So is one that is
/// read without its log.
#[test]
fn read_only_where_it_cannot_be_written() {
    let Some(judges) = require() else { return };
    let home = NobodyHome::new();
    let mode = fs::Permissions::from_mode(0o444);
    fs::set_permissions(home.image(), mode).expect("a mode");
    let dir = own_dir();
    let image = home.image();
    let output = home.run(&["mount".as_ref(), image.as_os_str(), dir.path().as_os_str()]);
    let table = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    let line = table.lines().find(|line| line.contains(&*dir.path().to_string_lossy()));
    let unmounted = home.run(&["unmount".as_ref(), dir.path().as_os_str()]);
    assert!(output.status.success() && unmounted.status.success(), "{output:?} {unmounted:?}");
    assert!(said(&output).contains("may only be read: mounted read-only"), "{output:?}");
    assert!(line.is_some_and(|line| line.contains(" ro,")), "{line:?}");
    let disks = volume(&judges, 256);
    // The log has what was fsynced before the server is killed.
    let mounted = ServedMount::new(&disks.images()[0], "commit=300");
    let file = File::create(mounted.path().join("file")).expect("a file");
    file.sync_all().expect("it is stored");
    mounted.signal(Signal::KILL);
    drop(mounted);
    for (options, is_there) in [("norecovery", false), ("ro,nologreplay", false), ("ro", true)] {
        let dir = scratch_dir();
        let output = mount(options, &[disks.images()[0].as_os_str(), dir.path().as_os_str()]);
        let found = dir.path().join("file").exists();
        let refused = File::create(dir.path().join("other")).map_err(|error| error.kind());
        assert!(unmount(&[dir.path().as_os_str()]).status.success(), "{output:?}");
        assert_eq!(found, is_there, "{options}: {output:?}");
        assert_eq!(refused.map(drop), Err(ErrorKind::ReadOnlyFilesystem), "{options}");
        assert_eq!(said(&output).contains("read-only"), options == "norecovery", "{output:?}");
    }
}

/// When `mount` calls it, the program ends with the exit codes of mount.
#[test]
fn exit_codes_of_mount() {
    let dir = scratch_dir();
    let helper = dir.path().join("mount.fuse.offshoot");
    symlink(env!("CARGO_BIN_EXE_offshoot"), &helper).expect("a link");
    fs::write(dir.path().join("zeros"), vec![0; 1 << 20]).expect("a file");
    fs::create_dir(dir.path().join("place")).expect("a directory");
    for (volume, options, code) in [
        ("zeros", "rw,bogus", 1),
        ("zeros", "rw,uid=no such user", 1),
        ("zeros", "rw", 32),
        ("zeros", "rw,sync", 32),
        ("none", "rw", 32),
        ("none", "rw,nofail", 0),
    ] {
        let mut command = Command::new(&helper);
        command.current_dir(dir.path()).args([volume, "place", "-o", options]);
        let output = command.output().expect("it starts");
        assert_eq!(output.status.code(), Some(code), "{volume} {options}: {output:?}");
        assert_eq!(output.stderr.is_empty(), code == 0, "{output:?}");
    }
}

/// Verbs that show things say the same for a path in a mount as for the place in the volume.
#[test]
fn paths_in_a_mount_are_places() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let root = mounted.path().to_path_buf();
    fs::create_dir_all(root.join("dir/below")).expect("directories");
    fs::write(root.join("dir/file"), "contents").expect("a file");
    symlink("file", root.join("dir/link")).expect("a link");
    // A path to an image in a mount means the volume in that image.
    let inner = root.join("inner.img");
    does(&["mkfs".as_ref(), inner.as_os_str(), "--size=128M".as_ref()]);
    does(&["mkdir".as_ref(), format!("{}:/inside", inner.display()).as_ref()]);
    let listed = offshoot(&["ls".as_ref(), inner.as_os_str()]);
    assert_eq!(String::from_utf8_lossy(&listed.stdout), "inside\n");
    let set = ["property", "set", "@/dir/file", "compression", "zstd"];
    let run = |line: &[&str], place: &str| {
        let words: Vec<String> = line.iter().map(|word| word.replacen('@', place, 1)).collect();
        let output = offshoot(&words);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), said(&output))
    };
    let live = root.to_str().expect("a plain path").to_owned();
    assert_eq!(run(&set, &live), (Some(0), String::new(), String::new()));
    does(&["sync".as_ref(), root.as_os_str()]);
    let lines: [&[&str]; 9] = [
        &["ls", "-l", "@/dir"],
        &["ls", "-lR", "@/"],
        &["ls", "-l", "@/dir/file", "@/dir/below"],
        &["stat", "@/dir/file"],
        &["stat", "@/dir/link"],
        &["stat", "@/"],
        &["property", "get", "@/dir/file"],
        &["property", "list", "@/"],
        &["stat", "@/none"],
    ];
    let ours: Vec<_> = lines.iter().map(|line| run(line, &live)).collect();
    let info = run(&["info", "@"], &live);
    mounted.unmount();
    let image = disks.images()[0].to_str().expect("a plain path");
    for (line, ours) in lines.iter().zip(ours) {
        assert_eq!(ours, run(line, &format!("{image}:")), "{line:?}");
    }
    assert!(ours_of(&info.1, "UUID").is_some(), "{info:?}");
    assert_eq!(ours_of(&info.1, "UUID"), ours_of(&run(&["info", "@"], image).1, "UUID"));
    let _: &Path = &inner;
}

/// The line of `text` that begins with `name`.
fn ours_of(text: &str, name: &str) -> Option<String> {
    text.lines().find(|line| line.starts_with(name)).map(str::to_owned)
}

/// The last line of the table of mounts for `dir`.
fn line_of(dir: &Path) -> Option<String> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the table");
    let dir = dir.to_str().expect("text");
    table.lines().rfind(|line| line.split(' ').nth(4) == Some(dir)).map(str::to_owned)
}

/// The path by which root reaches another subvolume is closed to other users, even just after root
/// used it.
#[test]
fn others_do_not_pass_the_gate() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = disks.images()[0].as_os_str();
    let place = |path: &str| format!("{}:/{path}", image.display());
    does(&["mkdir", "-m", "700", &place("closed")].map(OsStr::new));
    does(&["subvolume", "create", &place("one"), &place("closed/two")].map(OsStr::new));
    let first = ServedMount::new(&disks.images()[0], "subvol=one,allow_other,uid=65534");
    let second = scratch_dir();
    let words = ["mount", "-o", "subvol=closed/two"].map(OsStr::new);
    does(&[&words[..], &[image, second.path().as_os_str()]].concat());
    fs::write(second.path().join("secret"), "x").expect("it is written there");
    let line = line_of(second.path()).expect("it is mounted");
    let root = line.split(' ').nth(3).expect("what is seen there").trim_start_matches('/');
    let way = first.path().join(root);
    let gate = way.parent().expect("the gate");
    let as_nobody = |words: &str, dir: &Path| {
        let mut sh = Command::new("sh");
        let output = sh.args(["-c", words]).arg(dir).uid(65534).gid(65534).output();
        output.expect("sh starts").status.success()
    };
    assert!(as_nobody("ls \"$0\"", first.path()), "it may be used by others");
    for _ in 0..2 {
        // So that the kernel has the names in its cache.
        assert!(way.join("secret").is_file());
        let found = fs::metadata(gate).expect("root sees it");
        assert_eq!((found.permissions().mode() & 0o7777, found.uid()), (0o700, 0));
        assert!(!as_nobody("ls \"$0\"", &way));
        assert!(!as_nobody("cat \"$0/secret\"", &way));
        assert!(!as_nobody("ls \"$0\"", gate));
    }
    assert_eq!(fs::read_dir(first.path()).expect("a listing").count(), 0);
    let shown = fs::read_dir(gate).map_or(0, |listing| listing.take_while(Result::is_ok).count());
    assert!(shown == 0 && !gate.join("999").exists());
    assert!(fs::write(gate.join("x"), "").is_err());
    assert!(unmount(&[second.path().as_os_str()]).status.success());
    first.unmount();
    disks.assert_checks();
}

/// A place whose subvolume was deleted is listed as such, and can be unmounted.
#[test]
fn a_place_without_its_directory_is_listed_and_unmounted() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = disks.images()[0].as_os_str();
    does(&["subvolume", "create", &format!("{}:/two", image.display())].map(OsStr::new));
    let first = ServedMount::new(&disks.images()[0], "rw");
    let second = scratch_dir();
    let words = ["mount", "-o", "subvol=two"].map(OsStr::new);
    does(&[&words[..], &[image, second.path().as_os_str()]].concat());
    let two = first.path().join("two");
    let deleted = offshoot(&["subvolume".as_ref(), "delete".as_ref(), two.as_os_str()]);
    assert!(deleted.status.success(), "{deleted:?}");
    let line = line_of(second.path()).expect("it is mounted");
    assert!(line.contains("//deleted "), "{line}");
    let listed = offshoot(&["mount", "--json"]).stdout;
    let listed = String::from_utf8_lossy(&listed);
    assert!(listed.contains(second.path().to_str().expect("text")), "{listed}");
    let output = unmount(&[second.path().as_os_str()]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(line_of(second.path()), None);
    first.unmount();
    disks.assert_checks();
}

/// A further place never has more rights than its own, not even while it is made.
#[test]
fn further_places_have_their_rights_from_the_beginning() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let image = disks.images()[0].as_os_str();
    let first = ServedMount::new(&disks.images()[0], "rw,suid,dev,exec");
    let own = |line: &str| line.split(' ').nth(5).expect("options").to_owned();
    assert!(!own(&line_of(first.path()).expect("it is mounted")).contains("nosuid"));
    let second = scratch_dir();
    let source = disks.images()[0].to_str().expect("text");
    let is_over = AtomicBool::new(false);
    let (seen, closed) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let (mut seen, mut closed) = (BTreeSet::new(), 0);
            while !is_over.load(Ordering::Relaxed) {
                let table = fs::read_to_string("/proc/self/mountinfo").expect("the table");
                for line in table.lines().filter(|line| line.contains(source)) {
                    let place = Path::new(line.split(' ').nth(4).expect("a place"));
                    if place == second.path() {
                        seen.insert(own(line));
                    } else if place.starts_with("/run") {
                        // The directory where it is made is closed to other users.
                        let above = place.parent().expect("a directory").metadata();
                        closed += above.map_or(0, |above| {
                            assert_eq!(above.mode() & 0o7777, 0o700, "{line}");
                            1
                        });
                    }
                }
            }
            (seen, closed)
        });
        for _ in 0..50 {
            let output = mount("ro,nosuid,nodev,noexec", &[image, second.path().as_os_str()]);
            assert!(output.status.success(), "{output:?}");
            assert!(unmount(&[second.path().as_os_str()]).status.success());
        }
        is_over.store(true, Ordering::Relaxed);
        watch.join().expect("it does not panic")
    });
    assert!(!seen.is_empty() && closed > 0, "it was never seen");
    for options in &seen {
        for option in ["ro", "nosuid", "nodev", "noexec"] {
            assert!(options.split(',').any(|one| one == option), "{seen:?}");
        }
    }
    first.unmount();
    let left = fs::read_to_string("/proc/self/mountinfo").expect("the table");
    assert!(!left.contains("/run/offshoot-"), "{left}");
}

#[test]
fn sync_and_unmount_say_as_json_what_is_stored() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    fs::write(mounted.path().join("file"), "x").expect("it is written there");
    let (volume, dir) = (disks.images()[0].display(), mounted.path().display());
    let synced = offshoot(&["sync".as_ref(), "--json".as_ref(), mounted.path().as_os_str()]);
    let said = String::from_utf8_lossy(&synced.stdout);
    assert_eq!(said, format!("{{\"volume\":\"{volume}\",\"stored\":true}}\n"), "{synced:?}");
    let ended = unmount(&["--json".as_ref(), mounted.path().as_os_str()]);
    let said = String::from_utf8_lossy(&ended.stdout);
    let expected = format!("{{\"volume\":\"{volume}\",\"directory\":\"{dir}\",\"stored\":true}}\n");
    assert_eq!(said, expected, "{ended:?}");
    mounted.ends_well();
}
