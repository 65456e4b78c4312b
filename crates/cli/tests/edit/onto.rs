//! `cp` out of a volume onto existing files, beside the `cp` of the core utilities.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Output;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::{command, run, try_run};
use offshoot_testkit::scratch_dir;
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::{does, fails, offshoot, program, volume, words};

/// The contents of the file that is copied.
const TEXT: &str = "contents of the volume\n";

/// A directory with a volume that has the file `a`, the same file beside it, and two equal
/// directories in which targets may exist.
fn start() -> tempfile::TempDir {
    let dir = scratch_dir();
    let path = dir.path();
    fs::write(path.join("a"), TEXT).expect("a file");
    fs::set_permissions(path.join("a"), fs::Permissions::from_mode(0o640)).expect("a mode");
    volume(path, "v.img", 128);
    does(path, "cp a v.img:/a");
    for side in ["ours", "theirs"] {
        let side = path.join(side);
        fs::create_dir(&side).expect("a directory");
        fs::create_dir(side.join("d")).expect("a directory");
        for name in ["plain", "linked", "behind", "d/a"] {
            fs::write(side.join(name), "what was there, and longer than what comes")
                .expect("a file");
        }
        fs::hard_link(side.join("linked"), side.join("other-name")).expect("a hard link");
        symlink("behind", side.join("link")).expect("a link");
        symlink("link", side.join("link-to-link")).expect("a link");
        symlink("nowhere/at/all", side.join("dangling")).expect("a link");
        symlink("loop", side.join("loop")).expect("a link");
        symlink("d", side.join("to-d")).expect("a link");
    }
    dir
}

/// Everything in a directory: the name, whether the inode is that of `before`, mode, links, the
/// time of a copy, and the contents.
fn list(side: &Path, before: &[(String, u64)]) -> Vec<String> {
    let mut found = Vec::new();
    for name in names(side) {
        let path = side.join(&name);
        let stat = path.symlink_metadata().expect("it is there");
        let known = before.iter().find(|(known, _)| *known == name);
        let is_same = known.is_some_and(|(_, ino)| *ino == stat.ino());
        let contents = match stat.file_type() {
            kind if kind.is_symlink() => {
                fs::read_link(&path).expect("a link").display().to_string()
            }
            kind if kind.is_file() => fs::read_to_string(&path).expect("a file"),
            _ => String::new(),
        };
        let (mode, links, mtime) = (stat.mode(), stat.nlink(), stat.mtime());
        let mtime = if stat.file_type().is_file() && contents == TEXT { mtime } else { 0 };
        found.push(format!("{name} {is_same} {mode:o} {links} {mtime} {contents}"));
    }
    found
}

fn names(side: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for dir in ["", "d/"] {
        for entry in fs::read_dir(side.join(dir)).expect("listed").flatten() {
            names.push(format!("{dir}{}", entry.file_name().to_string_lossy()));
        }
    }
    names.sort();
    names
}

fn inodes(side: &Path) -> Vec<(String, u64)> {
    let ino = |name: &String| side.join(name).symlink_metadata().expect("it is there").ino();
    names(side).into_iter().map(|name| (name.clone(), ino(&name))).collect()
}

/// The `cp` of the core utilities, with options to preserve what ours preserves.
fn theirs(dir: &Path, options: &str, target: &str) -> Output {
    let mut words: Vec<&str> = options.split_whitespace().collect();
    words.push(if words.contains(&"-r") { "-a" } else { "-p" });
    words.retain(|word| *word != "-r");
    command("cp")
        .args(words)
        .args(["../a", target])
        .current_dir(dir.join("theirs"))
        .env("LC_ALL", "C")
        .output()
        .expect("the core utilities are there")
}

#[test]
fn a_named_destination_is_written_into_as_by_cp() {
    for options in ["", "-r", "-T", "-rT"] {
        for target in [
            "plain",
            "linked",
            "link",
            "link-to-link",
            "dangling",
            "loop",
            "d",
            "to-d",
            "new",
            "new/",
            "plain/x",
            "no/such",
            ".",
            "d/a",
        ] {
            let options = options.replace("-rT", "-r -T");
            let dir = start();
            let path = dir.path();
            let before = [inodes(&path.join("ours")), inodes(&path.join("theirs"))];
            let line = format!("cp {options} ../v.img:/a {target}");
            let ours = offshoot(&path.join("ours"), &words(&line));
            let theirs = theirs(path, &options, target);
            let said = String::from_utf8_lossy(&ours.stderr).into_owned();
            let judge = String::from_utf8_lossy(&theirs.stderr).into_owned();
            assert_eq!(ours.status.code(), theirs.status.code(), "{line}\n{said}\n{judge}");
            assert_eq!(said.is_empty(), judge.is_empty(), "{line}\n{said}\n{judge}");
            let found = list(&path.join("ours"), &before[0]);
            let expected = list(&path.join("theirs"), &before[1]);
            assert_eq!(found, expected, "{line}\n{said}\n{judge}");
        }
    }
}

/// Attributes that are not preserved stay as they are on an existing file.
#[test]
fn attributes_that_are_not_kept_stay() {
    let dir = start();
    let path = dir.path();
    let plain = path.join("ours/plain");
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o606)).expect("a mode");
    does(path, "cp --no-preserve=mode,ownership v.img:/a ours/plain");
    assert_eq!(plain.metadata().expect("it is there").mode() & 0o7777, 0o606);
    assert_eq!(fs::read_to_string(&plain).expect("it is there"), TEXT);
}

/// Targets for which the kernel provides a pipe or a file as a path.
#[test]
fn standard_output_takes_a_file() {
    let dir = start();
    let path = dir.path();
    fs::write(path.join("hole"), "").expect("a file");
    command("truncate")
        .args(["-s", "200000", "hole"])
        .current_dir(path)
        .status()
        .expect("truncate");
    fs::write(path.join("big"), TEXT.repeat(100_000)).expect("a file");
    symlink("a", path.join("to-a")).expect("a link");
    does(path, "cp -r hole big to-a v.img:/");
    for target in ["-", "/dev/stdout", "/dev/fd/1"] {
        let before = Path::new("/dev/stdout").symlink_metadata().expect("a link").ino();
        assert_eq!(does(path, &format!("cp v.img:/a {target}")), TEXT, "{target}");
        assert_eq!(does(path, &format!("cp v.img:/to-a {target}")), TEXT, "{target}");
        assert_eq!(does(path, &format!("cp v.img:/big {target}")), TEXT.repeat(100_000));
        assert!(does(path, &format!("cp v.img:/hole {target}")) == "\0".repeat(200_000));
        let after = Path::new("/dev/stdout").symlink_metadata().expect("it is there still");
        assert_eq!((after.is_symlink(), after.ino()), (true, before), "{target}");
        // A file as standard output keeps its inode.
        let file = path.join("out");
        let out = fs::File::create(&file).expect("a file");
        let ino = out.metadata().expect("it is open").ino();
        let line = format!("cp v.img:/a {target}");
        let status = program(path).args(words(&line)).stdout(out).status().expect("it runs");
        assert!(status.success());
        assert_eq!(fs::read_to_string(&file).expect("it is there"), TEXT);
        assert_eq!(file.metadata().expect("it is there").ino(), ino);
    }
    assert_eq!(does(path, "cp -r v.img:/to-a -"), TEXT);
    assert!(!path.join("-").exists());
    does(path, "mkdir v.img:/d");
    for line in ["cp -r v.img:/d -", "cp v.img:/d -", "cp v.img:/nothing -"] {
        fails(path, line, 1);
    }
    for line in ["cp v.img:/a v.img:/a -", "cp --json v.img:/a -", "cp a -", "cp - -"] {
        fails(path, line, 2);
    }
}

#[test]
fn a_fifo_and_a_device_take_the_data_and_stay() {
    let dir = start();
    let path = dir.path();
    let fifo = path.join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("a FIFO");
    let before = fifo.symlink_metadata().expect("a FIFO");
    let reader = {
        let fifo = fifo.clone();
        std::thread::spawn(move || fs::read_to_string(fifo).expect("the FIFO is read"))
    };
    does(path, "cp v.img:/a fifo");
    assert_eq!(reader.join().expect("the reader ends"), TEXT);
    let after = fifo.symlink_metadata().expect("a FIFO");
    let same = |stat: &fs::Metadata| (stat.ino(), stat.mode(), stat.uid());
    assert_eq!(same(&before), same(&after));
    assert!(fails(path, "cp v.img:/a /dev/full", 1).contains("No space left"));
    let null = Path::new("/dev/null").symlink_metadata().expect("a device");
    does(path, "cp v.img:/a /dev/null");
    let after = Path::new("/dev/null").symlink_metadata().expect("it is there still");
    assert!(after.file_type().is_char_device());
    assert_eq!(same(&null), same(&after));
}

/// A block device gets the data from its first byte on. One with a filesystem is refused.
#[test]
fn a_block_device_takes_the_data() {
    let Some(judges) = judges::require() else { return };
    let dir = start();
    let path = dir.path();
    let disks = Disks::create(&judges, 1, 64);
    let image = disks.images()[0].clone();
    fs::write(&image, vec![7; 64 << 20]).expect("something on it");
    let device = run("losetup", &["--find".as_ref(), "--show".as_ref(), image.as_os_str()]);
    let device = device.trim();
    let node = Path::new(device).symlink_metadata().expect("a device");
    let sparse = path.join("sparse");
    fs::write(&sparse, TEXT).expect("a file");
    let file = fs::File::options().write(true).open(&sparse).expect("a file");
    file.set_len(40 << 20).expect("a length");
    does(path, "cp sparse v.img:/");
    let copied = offshoot(path, &["cp", "v.img:/sparse", device]);
    let too_large = {
        file.set_len(65 << 20).expect("a length");
        does(path, "cp sparse v.img:/large");
        offshoot(path, &["cp", "v.img:/large", device])
    };
    let mut on_device = Vec::new();
    let read = fs::File::open(device).and_then(|mut file| file.read_to_end(&mut on_device));
    let made = try_run("mkfs.ext4", &["-q", device]);
    let refused = offshoot(path, &["cp", "v.img:/a", device]);
    let checked = try_run("e2fsck", &["-fn", device]);
    let after = Path::new(device).symlink_metadata().expect("it is there still");
    run("losetup", &["--detach", device]);
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    let said = String::from_utf8_lossy(&too_large.stderr);
    assert_eq!(too_large.status.code(), Some(1), "{said}");
    assert!(said.contains("No space left"), "{said}");
    read.expect("the device is read");
    assert_eq!(&on_device[..TEXT.len()], TEXT.as_bytes());
    assert!(on_device[TEXT.len()..40 << 20].iter().all(|&byte| byte == 0), "holes are zeros");
    assert_eq!((node.ino(), node.mode()), (after.ino(), after.mode()));
    if made.is_ok() {
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{said}");
        assert!(said.contains("ext") && said.contains(&format!("{device}:/")), "{said}");
        checked.expect("the filesystem is whole");
    }
}

/// A user who forgets `:/` names the image itself.
#[test]
fn what_holds_a_filesystem_is_not_overwritten() {
    let dir = start();
    let path = dir.path();
    volume(path, "w.img", 128);
    symlink("w.img", path.join("link.img")).expect("a link");
    fs::create_dir(path.join("images")).expect("a directory");
    fs::hard_link(path.join("w.img"), path.join("images/a")).expect("a hard link");
    does(path, "mkdir v.img:/dir");
    does(path, "cp a v.img:/dir");
    does(path, "ln -s anything v.img:/dir/w.img");
    let before = fs::read(path.join("w.img")).expect("an image");
    let lines = [
        "cp v.img:/a w.img",
        "cp -T v.img:/a w.img",
        "cp -r v.img:/a w.img",
        "cp v.img:/a link.img",
        "cp v.img:/a images",
        "cp -r v.img:/dir/. images",
        "cp -r v.img:/dir/w.img w.img",
        "cp -r v.img:/dir/w.img .",
        "extract --tar w.img v.img",
        "extract --tar link.img v.img:/a",
        "mount --log w.img v.img images",
    ];
    for line in lines {
        let said = fails(path, line, 1);
        assert!(said.contains("holds btrfs") && said.contains(":/ and a path"), "{line}: {said}");
    }
    assert!(fails(path, "cp v.img:/a w.img", 1).contains("w.img:/"));
    assert!(fs::read(path.join("w.img")).expect("an image") == before, "it was changed");
    assert!(path.join("link.img").is_symlink());
    // A file without a filesystem is overwritten as before. With `:/`, the copy goes into the
    // volume.
    does(path, "cp v.img:/a w.img:/");
    assert_eq!(does(path, "cat w.img:/a"), TEXT);
    fs::remove_file(path.join("w.img")).expect("it goes");
    does(path, "cp v.img:/a w.img");
    does(path, "cp v.img:/a w.img");
    does(path, "extract --tar w.img v.img");
    assert!(path.join("w.img").metadata().expect("an archive").len() > 1000);
}

/// Filesystems and disks of other programs are recognised too.
#[test]
fn what_others_made_is_not_overwritten() {
    let makers: [(&str, &[&str]); 7] = [
        ("btrfs", &["mkfs.btrfs", "-q"]),
        ("ext", &["mkfs.ext4", "-q"]),
        ("ext", &["mke2fs", "-q", "-t", "ext2"]),
        ("XFS", &["mkfs.xfs", "-q"]),
        ("FAT", &["mkfs.vfat"]),
        ("swap", &["mkswap"]),
        ("partition table", &["sfdisk", "-q"]),
    ];
    let dir = start();
    let path = dir.path();
    for (name, words) in makers {
        let image = path.join("other.img");
        let _ = fs::remove_file(&image);
        fs::File::create(&image).and_then(|file| file.set_len(400 << 20)).expect("a file");
        let mut maker = command(words[0]);
        maker.args(&words[1..]).arg(&image).stdin(if words[0] == "sfdisk" {
            let script = path.join("script");
            fs::write(&script, ",,L\n").expect("a file");
            fs::File::open(script).expect("a file").into()
        } else {
            std::process::Stdio::null()
        });
        if !maker.output().is_ok_and(|output| output.status.success()) {
            eprintln!("not judged: {} is not here", words[0]);
            continue;
        }
        let before = fs::read(&image).expect("the image");
        let said = fails(path, "cp v.img:/a other.img", 1);
        assert!(said.contains(name) && said.contains("other.img:/"), "{words:?}: {said}");
        assert!(fs::read(&image).expect("the image") == before, "{words:?}");
    }
}

/// Plain files that happen to have two bytes of a signature are still overwritten.
#[test]
fn text_and_kernels_are_overwritten() {
    let dir = start();
    let path = dir.path();
    for (at, bytes) in [(1080, [0x53, 0xef]), (1030, *b"44"), (510, [0x55, 0xaa])] {
        let mut text = "some line of text\n".repeat(5000).into_bytes();
        text[at..at + 2].copy_from_slice(&bytes);
        fs::write(path.join("text"), text).expect("a file");
        does(path, "cp v.img:/a text");
        assert_eq!(fs::read_to_string(path.join("text")).expect("a file"), TEXT);
    }
}

/// Below a directory no link is followed: the copy replaces the link, and the file that it led to
/// stays.
#[test]
fn below_a_directory_links_are_replaced() {
    let dir = start();
    let path = dir.path();
    does(path, "mkdir v.img:/d");
    for name in ["link", "linked", "plain"] {
        does(path, &format!("cp a v.img:/d/{name}"));
    }
    does(path, "cp -r v.img:/d/. ours");
    let read = |name: &str| fs::read_to_string(path.join("ours").join(name)).expect("a file");
    for name in ["link", "linked", "plain"] {
        assert_eq!(read(name), TEXT, "{name}");
    }
    assert!(!path.join("ours/link").is_symlink());
    for name in ["behind", "other-name"] {
        assert!(read(name).starts_with("what was there"), "{name}");
    }
}
