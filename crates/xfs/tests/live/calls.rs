//! Single calls and their rules.

use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{Code, Errno, Fallocate, SetAttr, SetTime, XattrMode};

use super::*;

#[test]
fn what_we_do_not_write_is_refused_by_name() {
    let Some(judges) = judges::require() else { return };
    let old = made(
        &judges,
        64,
        "--unsupported -m crc=0,finobt=0,rmapbt=0,reflink=0,bigtime=0,inobtcount=0 \
         -i sparse=0,nrext64=0",
    );
    let quotas = made(&judges, 64, "--unsupported");
    quotas.change_with_xfs_db(&["sb 0", "write qflags 0x7", "write versionnum 0xb4e5"]);
    for (disk, name) in [(&old, "version 4"), (&quotas, "quotas")] {
        let outcome = XfsVolume::open_writable(disk.writable_device(), &XfsOptions::default());
        let error = outcome.map(drop).unwrap_err();
        assert_eq!(error.code(), Code::FeatureNotKept, "{error}");
        assert!(error.to_string().contains(name), "{error}");
        XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
    }
}

#[test]
fn the_label_is_kept() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 64, "--unsupported -L before");
    let opened = WrittenXfs::new(&disk);
    assert_eq!(opened.volume.label(), b"before");
    let long = opened.volume.set_label(b"thirteen byte").unwrap_err();
    assert_eq!(long.errno(), Errno::INVAL);
    opened.volume.set_label(b"twelve bytes").unwrap();
    assert_eq!(opened.volume.label(), b"twelve bytes");
    opened.make("file", b"content");
    opened.shut_down();
    assert_checks(&disk);
    for sb in ["sb 0", "sb 3"] {
        let shown = disk.xfs_db(&[sb, "print fname"]);
        assert!(shown.contains("twelve bytes"), "{shown}");
    }
    drop(disk.mount("", &[]));
}

#[test]
fn trim_discards_free_blocks_alone() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 300, "");
    let opened = WrittenXfs::new(&disk);
    let bytes = Random::new(seed_of_run()).bytes(20 << 20);
    let kept = opened.make("kept", &bytes);
    opened.make("removed", &bytes);
    opened.files.sync().unwrap();
    let allocated = || std::fs::metadata(disk.image()).unwrap().blocks() * 512;
    let before = allocated();
    opened.files.unlink(opened.place("removed"), AT).unwrap();
    // Before that is durable, a crash would bring the file back.
    opened.volume.trim(0..u64::MAX).unwrap();
    assert!(allocated() + (1 << 20) > before);
    opened.files.sync().unwrap();
    let trimmed = opened.volume.trim(0..u64::MAX).unwrap();
    assert!(trimmed.bytes > 200 << 20 && trimmed.unable.is_empty(), "{trimmed:?}");
    assert!(allocated() + (18 << 20) < before, "{} of {before}", allocated());
    assert!(opened.content(kept) == bytes);
    opened.shut_down();
    assert_checks(&disk);
}

#[test]
fn a_file_without_a_name_lives_until_its_last_release() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 64, "--unsupported");
    let opened = WrittenXfs::new(&disk);
    let free = || opened.files.statfs().unwrap().available_bytes;
    let files = &opened.files;
    let before = free();
    let file = opened.make("file", &vec![7; 1 << 20]);
    files.open(file).unwrap();
    files.open(file).unwrap();
    files.unlink(opened.place("file"), AT).unwrap();
    files.release(file).unwrap();
    files.write(file, 1 << 20, &[8; 4096], AT).unwrap();
    assert_eq!(opened.content(file).len(), (1 << 20) + 4096);
    assert_eq!(files.link(file, opened.place("again"), AT).unwrap_err().errno(), Errno::NOENT);
    files.release(file).unwrap();
    for error in [files.attr(file).map(drop), files.open(file), files.fsync(file)] {
        assert_eq!(error.unwrap_err().errno(), Errno::NOENT);
    }
    assert_eq!(files.release(file).unwrap_err().errno(), Errno::BADF);
    assert_eq!(free(), before);
    // A directory too, and one that is open when all writing ends.
    let dir = files.mkdir(opened.place("dir"), &NEW).unwrap();
    files.open(dir).unwrap();
    files.rmdir(opened.place("dir"), AT).unwrap();
    let inside = EntryPlace { dir, name: b"x" };
    assert_eq!(files.create(inside, &NEW).unwrap_err().errno(), Errno::NOENT);
    files.read_dir(dir, 0, &mut |_| ControlFlow::Continue(())).unwrap();
    opened.shut_down();
    assert_checks(&disk);
}

/// As `rm -r` does: names go while a listing is under way.
#[test]
fn a_listing_goes_on_while_names_change() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 64, "--unsupported");
    let opened = WrittenXfs::new(&disk);
    let dir = opened.files.mkdir(opened.place("dir"), &NEW).unwrap();
    let name = |number: usize| format!("a name that takes room {number}").into_bytes();
    for number in 0..2000 {
        opened.files.create(EntryPlace { dir, name: &name(number) }, &NEW).unwrap();
    }
    let (mut after, mut seen) = (0, 0);
    loop {
        let mut part = Vec::new();
        opened
            .files
            .read_dir(dir, after, &mut |entry| {
                part.push(entry.name.to_vec());
                after = entry.cookie;
                if part.len() < 37 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            })
            .unwrap();
        if part.is_empty() {
            break;
        }
        seen += part.len();
        for name in part {
            opened.files.unlink(EntryPlace { dir, name: &name }, AT).unwrap();
        }
    }
    assert_eq!(seen, 2000);
    opened.files.rmdir(opened.place("dir"), AT).unwrap();
    opened.shut_down();
    assert_checks(&disk);
}

/// Links of the kernel may fill the inode; so may directories that never had attributes.
#[test]
fn what_fills_an_inode_makes_way_for_attributes() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 64, "--unsupported");
    let mount = disk.mount("", &[]);
    for len in [310, 335, 336] {
        symlink("t".repeat(len), mount.path().join(format!("link-{len}"))).unwrap();
    }
    drop(mount);
    let opened = WrittenXfs::new(&disk);
    for len in [310, 335, 336] {
        let file = opened.files.lookup(opened.root(), format!("link-{len}").as_bytes()).unwrap();
        for (name, value) in [(&b"trusted.name"[..], 40), (b"security.long", 3000)] {
            opened.files.set_xattr(file, name, &vec![9; value], XattrMode::Set, AT).unwrap();
        }
        assert_eq!(opened.files.read_link(file).unwrap(), "t".repeat(len).into_bytes());
        assert_eq!(opened.files.xattr(file, b"security.long").unwrap(), vec![9; 3000]);
    }
    opened.shut_down();
    assert_checks(&disk);
    let mount = disk.mount("", &[]);
    for len in [310, 335, 336] {
        let target = std::fs::read_link(mount.path().join(format!("link-{len}"))).unwrap();
        assert_eq!(target.as_os_str().len(), len);
    }
}

/// Readers of a file find the bytes of this file or zeros, whatever its writers do with its blocks.
#[test]
fn readers_find_no_bytes_of_other_files() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disk = made(&judges, 64, "--unsupported");
    let opened = WrittenXfs::new(&disk);
    let all: Vec<_> = (1..=3_u8)
        .map(|byte| (byte, opened.make(&byte.to_string(), &vec![byte; 100_000])))
        .collect();
    let (files, is_done) = (&opened.files, AtomicBool::new(false));
    std::thread::scope(|scope| {
        for &(byte, file) in &all {
            let is_done = &is_done;
            scope.spawn(move || {
                let mut found = vec![0; 300_000];
                while !is_done.load(Ordering::Relaxed) {
                    let count = files.read(file, 0, &mut found).unwrap();
                    let other = found[..count].iter().position(|found| ![0, byte].contains(found));
                    assert_eq!(other, None, "a byte of another file than {byte}");
                    files.next_data(file, 5000).unwrap();
                }
            });
        }
        let writers: Vec<_> = all
            .iter()
            .map(|&(byte, file)| {
                scope.spawn(move || {
                    let mut random = Random::new(seed ^ u64::from(byte));
                    for _ in 0..250 {
                        let at = random.below(200_000);
                        let len = 1 + random.below(60_000);
                        match random.below(4) {
                            0 => {
                                let set = SetAttr { size: Some(at), ..SetAttr::default() };
                                files.set_attr(file, &set, AT).unwrap();
                            }
                            1 => files.fallocate(file, Fallocate::PunchHole, at, len, AT).unwrap(),
                            2 => files.fsync(file).unwrap(),
                            _ => {
                                let bytes = vec![byte; usize::try_from(len).unwrap()];
                                files.write(file, at, &bytes, AT).unwrap();
                            }
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(ScopedJoinHandle::join).collect();
        is_done.store(true, Ordering::Relaxed);
        for ended in ended {
            ended.unwrap();
        }
    });
    opened.shut_down();
    assert_checks(&disk);
}

/// Readers of names find what one change has left, and never damage.
#[test]
fn readers_of_names_find_whole_directories() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disk = made(&judges, 64, "--unsupported -b size=1024 -n parent=1");
    let opened = WrittenXfs::new(&disk);
    let (files, root) = (&opened.files, opened.root());
    let stays = opened.files.mkdir(opened.place("a directory that stays"), &NEW).unwrap();
    let places = [EntryPlace { dir: stays, name: b"in" }, EntryPlace { dir: root, name: b"out" }];
    let moves = opened.files.mkdir(places[1], &NEW).unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    let mut has_it = false;
                    let mut found = Vec::new();
                    files
                        .read_dir(root, 0, &mut |entry| {
                            has_it |= entry.file == stays;
                            found.push((entry.name.to_vec(), entry.file));
                            ControlFlow::Continue(())
                        })
                        .unwrap();
                    assert!(has_it, "a name that stays");
                    assert_eq!(files.parent(stays).unwrap().unwrap().dir, root);
                    let above = files.parent(moves).unwrap().unwrap().dir;
                    assert!([root, stays].contains(&above));
                    for (name, file) in found.iter().take(20) {
                        let gone = [
                            files.attr_of_entry(root, name, *file).map(drop),
                            files.xattrs(*file, &mut |_, _| ControlFlow::Continue(())),
                        ];
                        for error in gone.into_iter().filter_map(Result::err) {
                            assert_eq!(error.errno(), Errno::NOENT, "{error}");
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            for number in 0.. {
                let from = usize::from(number % 2 == 0);
                files.rename(places[from], places[1 - from], AT).unwrap();
                if is_done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let writers: Vec<_> = (0..2)
            .map(|thread| {
                scope.spawn(move || {
                    let mut random = Random::new(seed ^ thread);
                    for _ in 0..1500 {
                        let name =
                            format!("thread {thread} and a long name, number {}", random.below(60));
                        let place = EntryPlace { dir: root, name: name.as_bytes() };
                        let outcome = match random.below(5) {
                            0 => files.mkdir(place, &NEW).map(drop),
                            1 => files.unlink(place, AT),
                            2 => files.rmdir(place, AT),
                            3 => {
                                let to = format!(
                                    "thread {thread} and a long name, number {}",
                                    random.below(60)
                                );
                                files.rename(
                                    place,
                                    EntryPlace { dir: root, name: to.as_bytes() },
                                    AT,
                                )
                            }
                            _ => files.create(place, &NEW).map(drop),
                        };
                        if let Err(error) = outcome {
                            let errno = error.errno();
                            let may_be = [Errno::NOENT, Errno::EXIST, Errno::ISDIR, Errno::NOTDIR];
                            assert!(may_be.contains(&errno), "{error}");
                        }
                    }
                })
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(ScopedJoinHandle::join).collect();
        is_done.store(true, Ordering::Relaxed);
        for ended in ended {
            ended.unwrap();
        }
    });
    opened.shut_down();
    assert_checks(&disk);
}

/// A call that is refused keeps the times of the file, also when its data was only in memory.
#[test]
fn moves_that_are_refused_keep_the_times() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, 512, "");
    let opened = WrittenXfs::new(&disk);
    let file = opened.make("file", &[1; 10_000]);
    let old = Timestamp { secs: 1_000_000, nanos: 0 };
    let set = SetAttr { mtime: Some(SetTime::To(old)), ..SetAttr::default() };
    opened.files.set_attr(file, &set, AT).unwrap();
    let before = opened.files.attr(file).unwrap();
    let later = Timestamp { secs: AT.secs + 100, nanos: 0 };
    for (what, at, len) in [
        (Fallocate::Collapse, 1, 4096),
        (Fallocate::Collapse, 4096, 8192),
        (Fallocate::Insert, 4096, 100),
        (Fallocate::Insert, 12_288, 4096),
    ] {
        let error = opened.files.fallocate(file, what, at, len, later).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
        let after = opened.files.attr(file).unwrap();
        assert_eq!((after.mtime, after.ctime), (before.mtime, before.ctime), "{what:?} at {at}");
    }
    opened.shut_down();
    assert_checks(&disk);
}
