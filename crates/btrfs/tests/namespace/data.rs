//! Where data goes: into the extent item, over the old data, or to a new extent.

use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;
use offshoot_vfs::{FileId, FileSystem, FileSystemMut, SetAttr, SetTime, Timestamp};

use crate::common::{AT, NEW, at, check, in_memory, judge, open_read_only, open_top, place};
use crate::layout::sectors;

/// Where the data of an extent item is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemData {
    Inline(usize),
    Hole,
    At(u64),
}

/// The extent items of a file: their offset in the file, and where their data is.
fn stored(disks: &Disks, file: FileId) -> Vec<(u64, ItemData)> {
    let volume = BtrfsVolume::open(disks.devices(), &EngineOptions::default()).expect("it opens");
    let root = volume.tree(TreeId(file.dev)).expect("the subvolume");
    let mut all = Vec::new();
    let first = Key::new(file.ino, ItemType::EXTENT_DATA, 0);
    let visit = |key: Key, data: &[u8]| {
        if key.objectid != file.ino || key.item_type != ItemType::EXTENT_DATA {
            return ControlFlow::Break(());
        }
        let extent = FileExtent::parse(data).expect("an extent item");
        all.push((
            key.offset,
            match extent.body {
                FileExtentBody::Inline(data) => ItemData::Inline(data.len()),
                FileExtentBody::Hole { .. } => ItemData::Hole,
                FileExtentBody::Extent { disk_bytenr, offset, .. } => {
                    ItemData::At(disk_bytenr.0 + offset)
                }
            },
        ));
        ControlFlow::Continue(())
    };
    volume.for_each_item(root, first, visit).expect("the tree reads");
    all
}

fn count(bytes: &[u8], byte: u8) -> usize {
    bytes.iter().map(|&one| usize::from(one == byte)).sum()
}

/// Files of all sizes around the limits. We keep the same files inline as the kernel: new ones,
/// growing ones and shrinking ones.
#[test]
fn small_files_are_inline_where_the_kernel_has_them_inline() {
    let Some(judges) = judges::require() else { return };
    for mkfs in [&["-n", "4k"][..], &["-O", "^no-holes"]] {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(mkfs);
        let sizes = [0usize, 1, 100, 2047, 2048, 2049, 4095, 4096, 4097, 9000];
        let byte = |size: usize| u8::try_from(size % 251).expect("below 251");
        let mount = disks.mount("rw,noatime");
        for size in sizes {
            let path = mount.path().join(format!("kernel{size}"));
            std::fs::write(path, vec![byte(size); size]).expect("a file");
        }
        drop(mount);
        let fs = open_top(&disks);
        for size in sizes {
            for kind in ["new", "grown", "cut"] {
                let name = format!("{kind}{size}");
                let file = fs.create(place(fs.root(), &name), &NEW).expect("a file");
                let first = match kind {
                    "grown" => size / 2,
                    "cut" => size + 5000,
                    _ => size,
                };
                fs.write(file, 0, &vec![byte(size); first], AT).expect("there is room");
                if kind != "new" {
                    fs.sync().expect("a commit");
                }
                if kind == "cut" {
                    let set = SetAttr { size: Some(size as u64), ..SetAttr::default() };
                    fs.set_attr(file, &set, AT).expect("it is cut");
                }
                fs.write(file, first as u64, &vec![byte(size); size.saturating_sub(first)], AT)
                    .expect("there is room");
            }
        }
        fs.sync().expect("a commit");
        let files = sizes.map(|size| {
            ["kernel", "new", "grown", "cut"].map(|kind| at(&fs, &format!("{kind}{size}")))
        });
        drop(fs);
        let is_inline = |file| matches!(stored(&disks, file)[..], [(0, ItemData::Inline(_))]);
        for (size, [kernel, new, grown, cut]) in sizes.into_iter().zip(files) {
            if size == 0 {
                continue;
            }
            assert_eq!(is_inline(new), is_inline(kernel), "a new file of {size} bytes");
            assert_eq!(is_inline(grown), is_inline(kernel), "a file that grew to {size} bytes");
            assert!(!is_inline(cut), "a file of extents that was cut to {size} bytes");
        }
        judge(&disks, 40);
    }
}

/// Regression: a read from behind the end of a file, within a buffered sector, computed an end
/// before its beginning.
#[test]
fn a_read_behind_the_end_of_what_is_buffered_finds_nothing() {
    let devices = vec![in_memory(16384, 160) as Arc<dyn BlockDevice>];
    let volume = BtrfsVolume::open_writable(devices, &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    fs.write(file, 0, &[1; 63], AT).expect("there is room");
    for offset in [63, 64, 4095, 4096, 9000] {
        assert_eq!(fs.read(file, offset, &mut [0; 10]).expect("it reads"), 0, "at {offset}");
        let mut pieces = 0;
        let mut count = |_, _: &[u8]| {
            pieces += 1;
            Ok(())
        };
        fs.read_data(file, offset..offset, &mut count).expect("it reads");
        fs.read_data(file, offset..offset + 10, &mut count).expect("it reads");
        assert_eq!(pieces, 0, "pieces at {offset}");
    }
}

/// A direct write is in the tree before any sync, and so is what was written before it to the same
/// file.
#[test]
fn direct_writes_leave_nothing_in_memory() {
    let devices = vec![in_memory(16384, 160) as Arc<dyn BlockDevice>];
    let volume = BtrfsVolume::open_writable(devices, &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    let stored = || sectors(&fs, file).into_keys().collect::<Vec<_>>();
    fs.write(file, 0, &[1; 9000], AT).expect("there is room");
    assert_eq!(stored(), [0; 0]);
    fs.write_direct(file, 20_480, &[2; 4096], AT).expect("there is room");
    assert_eq!(stored(), [0, 1, 2, 5]);
    fs.write(file, 4096, &[3; 10], AT).expect("there is room");
    let mut found = vec![9; 30_000];
    assert_eq!(fs.read(file, 0, &mut found).expect("it reads"), 24_576);
    assert_eq!([1, 2, 3].map(|byte| count(&found[..24_576], byte)), [8990, 4096, 10]);
}

/// A file with NODATACOW is overwritten in place, unless a snapshot or a clone shares the data.
#[test]
fn nodatacow_files_are_overwritten_in_place() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    for name in ["alone", "cloned", "kept"] {
        std::fs::write(path(name), b"").expect("a file");
        run("chattr", &["+C".as_ref(), path(name).as_os_str()]);
        std::fs::write(path(name), vec![1; 1 << 20]).expect("data");
    }
    std::fs::write(path("other"), b"").expect("a file");
    run("chattr", &["+C".as_ref(), path("other").as_os_str()]);
    run(
        "cp",
        &["--reflink=always".as_ref(), path("cloned").as_os_str(), path("other").as_os_str()],
    );
    run("sync", &["-f".as_ref(), mount.path().as_os_str()]);
    drop(mount);

    let overwrite = |name: &str, byte: u8| {
        let fs = open_top(&disks);
        let file = at(&fs, name);
        let old = stored(&disks, file);
        // Partial sectors, across an end, and far from each other.
        for offset in [0, 5000, 300_000, (1 << 20) - 10] {
            fs.write(file, offset, &[byte; 100], AT).expect("there is room");
        }
        fs.sync().expect("a commit");
        let mut found = vec![0; (1 << 20) + 100];
        assert_eq!(fs.read(file, 0, &mut found).expect("it reads"), (1 << 20) + 90);
        let written = count(&found, byte);
        assert_eq!(written, 400, "{name}");
        drop(fs);
        check(&disks);
        (old, stored(&disks, file))
    };
    let (old, new) = overwrite("alone", 2);
    assert_eq!(new[..old.len()], old, "the extents are where they were");
    assert_eq!(new.len(), old.len() + 1, "and one that the file grew by");
    let (old, new) = overwrite("cloned", 3);
    assert!(new.len() > old.len() + 3, "data that another file has went to new extents: {new:?}");

    let mount = disks.mount("rw,noatime");
    let snapshot = mount.path().join("before");
    let ends = [mount.path().as_os_str(), snapshot.as_os_str()];
    run("btrfs", &[&["subvolume", "snapshot", "-r"].map(std::ffi::OsStr::new)[..], &ends].concat());
    drop(mount);
    let (old, new) = overwrite("kept", 4);
    assert!(new.len() > old.len() + 3, "data that a snapshot has went to new extents: {new:?}");
    // Data that is newer than the snapshot belongs to the file alone.
    let (old, new) = overwrite("kept", 5);
    assert_eq!(old, new);

    let mount = disks.mount("ro,noatime");
    for (name, bytes) in
        [("other", 1 << 20), ("before/kept", 1 << 20), ("before/cloned", (1 << 20) + 90)]
    {
        let found = std::fs::read(mount.path().join(name)).expect("it reads");
        assert_eq!(found.len(), bytes, "{name}");
        let ones = count(&found, 1);
        assert_eq!(ones, if name == "before/cloned" { (1 << 20) - 310 } else { bytes }, "{name}");
    }
    let found = std::fs::read(mount.path().join("kept")).expect("it reads");
    assert_eq!(count(&found, 5), 400);
    drop(mount);
    judge(&disks, 8);
}

/// Times that a caller set stay, although older data is written back after that.
#[test]
fn times_that_were_set_outlive_write_back() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
    let at_second = |secs| Timestamp { secs, nanos: 5 };
    fs.write(file, 0, b"something", at_second(2_000)).expect("there is room");
    assert_eq!(fs.attr(file).expect("attributes").mtime, at_second(2_000));
    let set = SetAttr { mtime: Some(SetTime::To(at_second(1_000))), ..SetAttr::default() };
    fs.set_attr(file, &set, at_second(3_000)).expect("times change");
    let before = fs.attr(file).expect("attributes");
    fs.sync().expect("a commit");
    let after = fs.attr(file).expect("attributes");
    assert_eq!((before.mtime, before.size), (at_second(1_000), 9));
    assert_eq!((after.mtime, after.ctime, after.size), (before.mtime, before.ctime, 9));
    drop(fs);
    let fs = open_top(&disks);
    assert_eq!(fs.attr(at(&fs, "file")).expect("attributes").mtime, at_second(1_000));
}

/// A full volume refuses data that it has no room for, and keeps what it accepted. Data that was
/// accepted for an overwrite gets written although there is no room beside the old data.
#[test]
fn what_was_accepted_is_there_on_a_full_volume() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 128);
    disks.mkfs(&["-m", "single"]);
    let fs = open_top(&disks);
    let file = fs.create(place(fs.root(), "large"), &NEW).expect("a file");
    let mut accepted = 0u64;
    let mut data = vec![7; 100_000];
    while fs.write(file, accepted, &data, AT).is_ok() {
        accepted += 100_000;
    }
    assert!(accepted > 60 << 20, "{accepted} bytes are too few for the volume");
    fs.sync().expect("what was accepted is stored");
    drop(fs);
    let fs = open_top(&disks);
    let file = at(&fs, "large");
    assert!(fs.attr(file).expect("attributes").size >= accepted);
    let mut found = vec![0; 100_000];
    for offset in (0..accepted).step_by(100_000) {
        assert_eq!(fs.read(file, offset, &mut found).expect("it reads"), 100_000);
        assert!(found.iter().all(|&byte| byte == 7));
    }
    fs.unlink(place(fs.root(), "large"), AT).expect("a full volume lets go of files");
    fs.sync().expect("a commit");
    data.fill(8);
    let file = fs.create(place(fs.root(), "again"), &NEW).expect("a file");
    for offset in (0..accepted - 1_000_000).step_by(100_000) {
        fs.write(file, offset, &data, AT).expect("the space came back");
    }
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 1);
}

/// Readers find the latest data, whether it is in memory, in write-back or in extents. They never
/// find what other files wrote where the data once was.
#[test]
fn readers_find_the_latest_while_extents_come_and_go() {
    const SECTOR: usize = 4096;
    const SECTORS: usize = 64;
    let devices = vec![in_memory(16384, 256) as Arc<dyn BlockDevice>];
    let volume = BtrfsVolume::open_writable(devices, &EngineOptions::default()).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    let files = ["one", "two"].map(|name| fs.create(place(fs.root(), name), &NEW).expect("a file"));
    let written = [const { std::sync::atomic::AtomicU32::new(0) }; 2];
    let order = std::sync::atomic::Ordering::SeqCst;
    let fill = |which: usize, version: u32| -> Vec<u8> {
        let sector = |i: usize| {
            let stamp =
                [u32::try_from(which).expect("small"), u32::try_from(i).expect("small"), version];
            stamp.iter().flat_map(|n| n.to_le_bytes()).cycle().take(SECTOR).collect::<Vec<_>>()
        };
        (0..SECTORS).flat_map(sector).collect()
    };
    for (which, &file) in files.iter().enumerate() {
        fs.write(file, 0, &fill(which, 0), AT).expect("there is room");
    }
    std::thread::scope(|scope| {
        let (fs, written) = (&fs, &written);
        let readers: Vec<_> = (0..2)
            .map(|which| {
                scope.spawn(move || {
                    let mut found = vec![0; SECTOR * SECTORS];
                    while written[which].load(order) < 150 {
                        let least = written[which].load(order);
                        let len = fs.read(files[which], 0, &mut found).expect("it reads");
                        assert_eq!(len, found.len());
                        for (i, sector) in found.chunks(SECTOR).enumerate() {
                            let number = |at: usize| {
                                u32::from_le_bytes(sector[at..at + 4].try_into().expect("four"))
                            };
                            assert_eq!((number(0) as usize, number(4) as usize), (which, i));
                            assert!(number(8) >= least, "sector {i} is as old as {}", number(8));
                        }
                    }
                })
            })
            .collect();
        for version in 1..=150 {
            for (which, &file) in files.iter().enumerate() {
                fs.write(file, 0, &fill(which, version), AT).expect("there is room");
                written[which].store(version, order);
                if version % 3 == u32::try_from(which).expect("small") {
                    fs.sync().expect("a commit");
                }
            }
        }
        for reader in readers {
            reader.join().expect("what is read is right");
        }
    });
}

/// The available space is the kernel's number, and shrinks at once with what is written.
#[test]
fn what_is_available() {
    let Some(judges) = judges::require() else { return };
    for (members, mkfs) in [
        (1, &["-d", "single", "-m", "dup"][..]),
        (1, &["-M"]),
        (2, &["-d", "raid1", "-m", "raid1"]),
        (3, &["-d", "raid0", "-m", "raid1"]),
        (4, &["-d", "raid10", "-m", "raid1c3"]),
    ] {
        let disks = Disks::create(&judges, members, 600);
        disks.mkfs(mkfs);
        let fs = open_top(&disks);
        let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
        fs.sync().expect("a commit");
        let before = fs.statfs().expect("sizes").available_bytes;
        fs.write(file, 0, &vec![1; 10 << 20], AT).expect("there is room");
        assert!(fs.statfs().expect("sizes").available_bytes <= before - (10 << 20), "{mkfs:?}");
        fs.sync().expect("a commit");
        let after = fs.statfs().expect("sizes").available_bytes;
        drop(fs);
        let mount = disks.mount("ro");
        let kernel = rustix::fs::statvfs(mount.path()).expect("sizes");
        let available = kernel.f_bavail * kernel.f_frsize;
        drop(mount);
        // The engine knows the places of superblocks only after it has loaded the free space.
        let unloaded = open_read_only(&disks).statfs().expect("sizes").available_bytes;
        assert!(unloaded.abs_diff(after) <= 128 << 10, "{mkfs:?}: {after}, then {unloaded}");
        let difference = after.abs_diff(available);
        assert!(difference < available / 8, "{mkfs:?}: {after}, and {available} for the kernel");
    }
}
