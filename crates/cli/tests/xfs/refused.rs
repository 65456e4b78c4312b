//! What XFS volumes have not, and volumes that do not open.

use std::fs::File;
use std::os::unix::fs::FileExt;

use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::old::mkfs_with;

use super::{FewFiles, lines};

/// What only btrfs has is refused by name before the volume is opened, and the image stays as it
/// is.
#[test]
fn what_only_btrfs_has_is_refused_by_name() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let image = few.dir().join("v.img");
    let before = std::fs::read(&image).expect("an image");
    std::fs::write(few.dir().join("file"), "x").expect("a file");
    for line in [
        "scrub v.img",
        "scrub -r v.img",
        "subvolume create v.img:/sub",
        "subvolume snapshot v.img:/ v.img:/snapshot",
        "subvolume delete v.img:/dir",
        "subvolume set-default v.img:/dir",
        "subvolume list v.img",
        "subvolume show v.img:/",
        "subvolume get-default v.img",
        "property get v.img:/text compression",
        "property get v.img:/ ro",
        "dump chunks v.img",
        "du --shares v.img",
        "ls --subvolume 5 v.img",
        "ls --device v.img v.img",
        "ls --degraded v.img",
        "cp --compress zstd file v.img:/",
        "cp --nodatacow file v.img:/",
    ] {
        let said = few.fails(line, 4);
        assert!(said.contains("on an XFS volume: that is for btrfs alone"), "{line}: {said}");
        assert_eq!(said.lines().count(), 1, "{line}: {said}");
    }
    let said = few.fails("mkfs v.img", 1);
    assert!(said.contains("XFS"), "{said}");
    assert!(std::fs::read(&image).expect("an image") == before, "the image was changed");
    // Opened to be written.
    let said = few.fails("property set v.img:/ compression zstd", 4);
    assert!(said.contains("the property compression on an XFS volume"), "{said}");
}

/// The host refuses to open the image for writing too, but no right would help the user.
#[test]
fn the_format_is_named_before_what_the_host_refuses() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    std::fs::create_dir(few.dir().join("out")).expect("a folder");
    let _in_use = few.filled.disk.writable_device();
    for line in ["scrub v.img", "subvolume create v.img:/sub", "mount -o subvol=x v.img out"] {
        let said = few.fails(line, 4);
        assert!(said.contains("on an XFS volume: that is for btrfs alone"), "{line}: {said}");
    }
    // These write a volume of XFS.
    for line in [
        "mkdir v.img:/new",
        "find v.img -delete",
        "cp v.img:/text v.img:/copy",
        "mount v.img out",
        "trim v.img",
        "rescue replay-log v.img",
        "rescue zero-log v.img",
    ] {
        let said = few.fails(line, 1);
        assert!(said.contains("in use"), "{line}: {said}");
    }
}

#[test]
fn a_log_on_another_device_is_refused_with_the_next_step() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 512);
    let (folder, image) = (disk.image().parent().expect("a folder"), disk.image());
    let log = folder.join("log");
    File::create(&log).and_then(|log| log.set_len(100 << 20)).expect("a log");
    disk.mkfs(&format!("-l logdev={},size=64m", log.display()));
    let (image, mount) = (image.display(), folder.join("mount"));
    std::fs::create_dir(&mount).expect("a folder");
    let mount = mount.display();
    for line in ["ls", "cat", "check", "df", "extract", "rescue replay-log", "mount -o ro"] {
        let last = match line {
            "cat" => ":/text".to_owned(),
            "extract" => " out".to_owned(),
            "mount -o ro" => format!(" {mount}"),
            _ => String::new(),
        };
        let said = lines::fails(folder, &format!("{line} {image}{last}"), 4);
        let is_told = said.contains("XFS with a log on another device: mount and unmount");
        assert!(is_told && said.contains("then open it with the log ignored"), "{line}: {said}");
    }
    for line in [format!("mount {image} {mount}"), format!("mkdir {image}:/new")] {
        let said = lines::fails(folder, &line, 4);
        assert!(said.contains("writing XFS with a log on another device"), "{said}");
    }
    let said = lines::fails(folder, &format!("rescue zero-log {image}"), 4);
    assert!(said.contains("xfs_repair -L"), "{said}");
    let said = lines::fails(folder, &format!("dump log {image}"), 4);
    assert!(said.contains("on another device: xfs_logprint"), "{said}");
    // It was unmounted.
    for line in ["ls --ignore-log", "check --ignore-log", "info", "dump super", "dump groups"] {
        let words = format!("{line} {image}");
        let output = lines::offshoot(folder, &words.split(' ').collect::<Vec<_>>());
        assert!(output.status.success(), "{line}: {output:?}");
    }
}

#[test]
fn data_on_a_realtime_device_is_refused_with_the_next_step() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 512);
    let (folder, image) = (disk.image().parent().expect("a folder"), disk.image().display());
    let source = folder.join("source");
    std::fs::create_dir(&source).expect("a folder");
    std::fs::write(source.join("here"), "on the data device").expect("a file");
    std::fs::write(source.join("there"), "on the other one").expect("a file");
    let realtime = folder.join("realtime");
    File::create(&realtime).and_then(|file| file.set_len(100 << 20)).expect("a device");
    let options = format!("-m rmapbt=0,reflink=0 -r rtdev={}", realtime.display());
    mkfs_with(&disk, &options, &source);
    let ino = lines::does(folder, &format!("stat -c %i {image}:/there"));
    disk.change_with_xfs_db(&[&format!("inode {}", ino.trim()), "write -d core.realtime 1"]);
    assert_eq!(lines::does(folder, &format!("cat {image}:/here")), "on the data device");
    let said = lines::fails(folder, &format!("cat {image}:/there"), 4);
    assert!(said.contains("on a realtime device: copy it from a mount of the kernel"), "{said}");
    for line in [format!("mount {image} {}", folder.display()), format!("mkdir {image}:/new")] {
        let said = lines::fails(folder, &line, 4);
        assert!(said.contains("writing XFS with"), "{said}");
    }
}

#[test]
fn a_log_that_is_not_empty_is_replayed_in_memory_or_ignored() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let disk = &few.filled.disk;
    few.leave_a_log();
    let before = std::fs::read(disk.image()).expect("an image");
    for line in ["ls v.img", "cat v.img:/after", "extract v.img out", "df v.img"] {
        let words: Vec<_> = line.split(' ').collect();
        let output = lines::offshoot(few.dir(), &words);
        let said = String::from_utf8_lossy(&output.stderr);
        let is_told = said.contains("its log is replayed in memory");
        assert!(output.status.success() && is_told, "{line}: {said}");
    }
    assert_eq!(std::fs::read(few.dir().join("out/after")).expect("a file"), b"logged");
    assert!(std::fs::read(disk.image()).expect("an image") == before, "the image was changed");
    let output = lines::offshoot(few.dir(), &["cat", "--ignore-log", "v.img:/text"]);
    assert_eq!(output.stdout, b"what the kernel wrote\n");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("warning: the log is ignored"), "{said}");
    let output = lines::offshoot(few.dir(), &["info", "--json", "v.img"]);
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(info["log"], "pending");
    assert!(info["reports"][0].as_str().is_some_and(|it| it.contains("the log is ignored")));
    let log = few.does("dump log v.img");
    assert!(log.contains("\ntransaction ") && log.contains("\nitem         type=inode "), "{log}");
    let log = few.does("dump log --json v.img");
    assert!(log.lines().all(|line| line.starts_with('{')) && log.contains("{\"item\":{"), "{log}");
    drop(disk.mount("rw", &[RECOVERY]));
    assert_eq!(few.does("cat v.img:/after"), "logged");
}

#[test]
fn damage_is_told_and_ends_with_3() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let disk = &few.filled.disk;
    let file = File::options().write(true).open(few.dir().join("v.img")).expect("an image");
    // The inode of a file: the others are still read.
    let ino = few.does("stat -c %i v.img:/text");
    let place = format!("convert inode {} fsblock", ino.trim());
    let block = disk.xfs_db(&[&place]);
    let block = block.split(['(', ')']).nth(1).expect("a block").parse::<u64>().expect("a number");
    let block = disk.xfs_db(&[&format!("convert fsblock {block} daddr")]);
    let block = block.split(['(', ')']).nth(1).expect("a block").parse::<u64>().expect("a number");
    let inodes = disk.field(&["sb 0"], "inodesize");
    let index = ino.trim().parse::<u64>().expect("a number") % (4096 / inodes);
    file.write_all_at(&[0xa5; 16], block * 512 + index * inodes + 40).expect("a write");
    let said = few.fails("cat v.img:/text", 3);
    assert!(said.starts_with("offshoot: v.img:/text: corrupt inode"), "{said}");
    assert_eq!(few.does("stat -c %s v.img:/dir/big"), "300000\n");
    assert!(few.fails("extract v.img out", 3).contains("/text: corrupt inode"));
    assert_eq!(std::fs::read(few.dir().join("out/dir/big")).map(|it| it.len()).ok(), Some(300_000));
    // All superblocks, but the magic number.
    let group = disk.field(&["sb 0"], "agblocks") * 4096;
    for number in 0..disk.field(&["sb 0"], "agcount") {
        file.write_all_at(&[0xa5; 64], number * group + 16).expect("a write");
    }
    let said = lines::offshoot(few.dir(), &["dump", "super", "v.img"]);
    assert_eq!(said.status.code(), Some(3), "{said:?}");
    assert!(String::from_utf8_lossy(&said.stdout).contains("at 0: does NOT verify: "), "{said:?}");
    for line in ["ls v.img", "info v.img", "dump groups v.img", "mount -o ro v.img out"] {
        let said = few.fails(line, 3);
        assert!(said.starts_with("offshoot: v.img: corrupt superblock: "), "{line}: {said}");
    }
}
