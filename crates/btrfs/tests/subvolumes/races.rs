//! Subvolumes that are made and deleted while other threads use them.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use offshoot_btrfs::{Filesystem, SubvolumeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{
    Errno, FileFlags, FileId, FilePosition, FileSystem, FileSystemMut, Rename, Result,
};

use crate::common::{AT, NEW, at, fresh, judge, open, place, top};

fn root_of(id: SubvolumeId) -> FileId {
    FileId { dev: id.0, ino: 256 }
}

/// Makes files with data in a directory, and removes every third one.
fn work(fs: &Filesystem, dir: FileId, prefix: &str, count: u64) -> Result<()> {
    for number in 0..count {
        let name = format!("{prefix}-{number}");
        let file = fs.create(place(dir, &name), &NEW)?;
        fs.write(file, 0, &[1; 5000], AT)?;
        if number % 3 == 0 {
            fs.unlink(place(dir, &name), AT)?;
        }
    }
    Ok(())
}

#[track_caller]
fn is_done_or_gone<T>(result: Result<T>) -> bool {
    match result {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.errno(), Errno::NOENT, "{error}");
            false
        }
    }
}

/// Regression: a snapshot looked up its source at a point where a failure stops all writing.
#[test]
fn a_source_is_deleted_while_a_snapshot_is_taken() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&["-n", "4k"]);
    let volume = open(&disks);
    let fs = top(&volume);
    let mut taken = 0;
    for round in 0..60 {
        let [name, to] = ["source", "snapshot"].map(|what| format!("{what}-{round}"));
        let id = fs.create_subvolume(place(fs.root(), &name), &NEW).expect("a subvolume");
        work(&fs, root_of(id), "file", 5).expect("there is room");
        std::thread::scope(|scope| {
            let snapshot = scope.spawn(|| fs.snapshot(id, place(fs.root(), &to), false, AT));
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            fs.delete_subvolume(place(fs.root(), &name), AT).expect("it is there");
            volume.drop_deleted().expect("everything reads");
            taken += u32::from(is_done_or_gone(snapshot.join().expect("no panic")));
        });
        fs.create(place(fs.root(), &format!("after-{round}")), &NEW).expect("it is written");
    }
    fs.sync().expect("a commit");
    println!("{taken} of 60 snapshots were taken");
    assert!(taken > 0, "every snapshot was too late");
    drop((fs, volume));
    judge(&disks, 60);
}

/// A file is cloned step by step while its subvolume is deleted and dropped. The cloned part is
/// whole, and nothing refers to freed space.
#[test]
fn a_source_is_deleted_while_it_is_cloned() {
    const ROUNDS: u32 = 30;
    const EXTENTS: u64 = 2000;
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(&["-n", "4k"]);
    let volume = open(&disks);
    let fs = top(&volume);
    let mut done = 0;
    for round in 0..ROUNDS {
        let id = fs.create_subvolume(place(fs.root(), "source"), &NEW).expect("a subvolume");
        let from = fs.create(place(root_of(id), "file"), &NEW).expect("a file");
        for extent in 0..EXTENTS {
            fs.write(from, extent * 8192, &[1; 4096], AT).expect("there is room");
        }
        fs.sync().expect("a commit");
        let to = fs.create(place(fs.root(), &format!("clone-{round}")), &NEW).expect("a file");
        let begin = |file| FilePosition { file, offset: 0 };
        std::thread::scope(|scope| {
            let clone = scope.spawn(|| fs.clone_range(begin(from), begin(to), 0, AT));
            // The clone has begun, or is over already.
            while fs.attr(to).expect("it stays").size == 0 && !clone.is_finished() {
                std::hint::spin_loop();
            }
            fs.delete_subvolume(place(fs.root(), "source"), AT).expect("it is there");
            volume.drop_deleted().expect("everything reads");
            done += u32::from(is_done_or_gone(clone.join().expect("no panic")));
        });
        let size = fs.attr(to).expect("it stays").size;
        let mut bytes = vec![9; usize::try_from(size).expect("small")];
        fs.read(to, 0, &mut bytes).expect("it reads");
        let expected = |at: usize| u8::from((at / 4096).is_multiple_of(2));
        let differs = (0..bytes.len()).find(|&at| bytes[at] != expected(at));
        assert_eq!(differs, None, "first byte of {size} that differs in round {round}");
        fs.unlink(place(fs.root(), &format!("clone-{round}")), AT).expect("it is there");
    }
    println!("{done} of {ROUNDS} clones came to their end");
    assert!(done < ROUNDS, "no subvolume was deleted in time");
    fs.create(place(fs.root(), "after"), &NEW).expect("writing goes on");
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 1);
}

/// Regression: the removal of orphans met a subvolume that was deleted meanwhile, and reported that
/// its inodes are missing.
#[test]
fn a_subvolume_is_deleted_while_its_orphans_are_removed() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&["-n", "4k"]);
    for round in 0..8 {
        let volume = open(&disks);
        let fs = top(&volume);
        let id = fs.create_subvolume(place(fs.root(), "orphans"), &NEW).expect("a subvolume");
        for number in 0..60 {
            let name = number.to_string();
            let file = fs.create(place(root_of(id), &name), &NEW).expect("a file");
            fs.write(file, 0, &[1; 5000], AT).expect("there is room");
            fs.open(file).expect("it is there");
            fs.unlink(place(root_of(id), &name), AT).expect("it is there");
        }
        fs.sync().expect("a commit");
        drop((fs, volume));
        let volume = open(&disks);
        let fs = top(&volume);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| fs.create(place(root_of(id), "late"), &NEW));
            std::thread::sleep(std::time::Duration::from_micros(200 * round));
            fs.delete_subvolume(place(fs.root(), "orphans"), AT).expect("it is there");
            volume.drop_deleted().expect("everything reads");
            is_done_or_gone(first.join().expect("no panic"));
        });
        fs.sync().expect("a commit");
        drop((fs, volume));
        disks.assert_checks();
    }
}

/// Two snapshots change while the blocks that they share with their source are dropped. The
/// reference counts are right, whichever of the three drops the last reference but one.
#[test]
fn shared_blocks_are_copied_while_they_are_dropped() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(&["-n", "4k"]);
    for round in 0..2 {
        let volume = open(&disks);
        let fs = top(&volume);
        let name = |what: &str| format!("{what}-{round}");
        let source = fs.create_subvolume(place(fs.root(), &name("a")), &NEW).expect("a subvolume");
        work(&fs, root_of(source), "shared", 1500).expect("there is room");
        let one = fs.snapshot(source, place(fs.root(), &name("b")), false, AT).expect("one");
        work(&fs, root_of(one), "first", 20).expect("there is room");
        let other = fs.snapshot(one, place(fs.root(), &name("c")), false, AT).expect("another");
        fs.delete_subvolume(place(fs.root(), &name("a")), AT).expect("it is there");
        fs.sync().expect("a commit");
        std::thread::scope(|scope| {
            for id in [one, other] {
                let fs = &fs;
                scope.spawn(move || {
                    for number in 0..1500 {
                        let path = format!("shared-{number}");
                        match fs.lookup(root_of(id), path.as_bytes()) {
                            Ok(file) => fs.write(file, 100, &[2; 10], AT).expect("there is room"),
                            Err(error) => assert_eq!(error.errno(), Errno::NOENT, "{error}"),
                        }
                    }
                    work(fs, root_of(id), "late", 200).expect("there is room");
                });
            }
            volume.drop_deleted().expect("everything reads");
        });
        fs.sync().expect("a commit");
        drop((fs, volume));
        disks.assert_checks();
    }
    judge(&disks, 100);
}

/// In-place writes do not change a snapshot: in each snapshot all bytes of the file are the same,
/// and they ascend from one snapshot to the next.
#[test]
fn files_that_are_overwritten_in_place_are_copied_for_snapshots() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&[]);
    let volume = open(&disks);
    let fs = top(&volume);
    let live = fs.create_subvolume(place(fs.root(), "live"), &NEW).expect("a subvolume");
    let file = fs.create(place(root_of(live), "file"), &NEW).expect("a file");
    fs.set_flags(file, FileFlags::NODATACOW, AT).expect("it is empty");
    let write = |byte: u8| fs.write(file, 0, &vec![byte; 64 << 10], AT).expect("there is room");
    write(0);
    let stop = AtomicBool::new(false);
    let count: u8 = 20;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for byte in (1..=u8::MAX).take_while(|_| !stop.load(SeqCst)) {
                write(byte);
                fs.sync().expect("a commit");
            }
        });
        for number in 0..count {
            let name = number.to_string();
            fs.snapshot(live, place(fs.root(), &name), true, AT).expect("a snapshot");
        }
        stop.store(true, SeqCst);
    });
    fs.sync().expect("a commit");
    let mut last = 0;
    for number in 0..count {
        let mut data = vec![0; 64 << 10];
        fs.read(at(&fs, &format!("{number}/file")), 0, &mut data).expect("it reads");
        assert!(data.iter().all(|&byte| byte == data[0]), "snapshot {number} is torn");
        assert!(data[0] >= last, "snapshot {number} is older than the one before");
        last = data[0];
    }
    drop((fs, volume));
    judge(&disks, 20);
}

/// Regression: the numbers of a subvolume and of its inodes were used again, if it had the highest
/// number, was older than the opening of the volume, and was dropped.
#[test]
fn numbers_are_not_used_again() {
    let Some((disks, volume, fs)) = fresh(&[]) else { return };
    let old = fs.create_subvolume(place(fs.root(), "old"), &NEW).expect("a subvolume");
    fs.sync().expect("a commit");
    drop((fs, volume));
    let volume = open(&disks);
    let fs = top(&volume);
    work(&fs, root_of(old), "file", 10).expect("there is room");
    fs.delete_subvolume(place(fs.root(), "old"), AT).expect("it is there");
    volume.drop_deleted().expect("everything reads");
    let new = fs.create_subvolume(place(fs.root(), "new"), &NEW).expect("a subvolume");
    assert!(new > old, "{new} was used before");
    work(&fs, root_of(new), "file", 10).expect("there is room");
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 8);
}

/// Regression: a reader that looked at a subvolume while it was moved or deleted saw an empty
/// directory in its place.
#[test]
fn nobody_sees_the_place_of_one_that_moves() {
    let Some((disks, volume, fs)) = fresh(&[]) else { return };
    let dirs = [fs.root(), fs.mkdir(place(fs.root(), "dir"), &NEW).expect("a directory")];
    let id = fs.create_subvolume(place(fs.root(), "one"), &NEW).expect("a subvolume");
    let stop = AtomicBool::new(false);
    let mut seen = 0;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            while !stop.load(SeqCst) {
                for dir in dirs {
                    match fs.lookup(dir, b"one") {
                        Ok(found) => assert_eq!(found, root_of(id)),
                        Err(error) => assert_eq!(error.errno(), Errno::NOENT, "{error}"),
                    }
                    fs.read_dir(dir, 0, &mut |entry| {
                        if entry.name == b"one" {
                            assert_eq!(entry.file, root_of(id));
                            seen += 1;
                        }
                        ControlFlow::Continue(())
                    })
                    .expect("it reads");
                }
            }
            seen
        });
        for round in 0..2000 {
            let (from, to) = (dirs[round % 2], dirs[(round + 1) % 2]);
            fs.rename(place(from, "one"), place(to, "one"), AT).expect("it moves");
        }
        fs.delete_subvolume(place(dirs[0], "one"), AT).expect("it is there");
        stop.store(true, SeqCst);
        seen = reader.join().expect("it saw nothing else");
    });
    assert!(seen > 0, "nothing was seen at all");
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 2);
}

/// Regression: a rename of a subvolume with `NOREPLACE` returned `ENOTDIR` when another thread just
/// then made a file at the new name.
#[test]
fn a_file_comes_to_stand_where_a_subvolume_may_replace_nothing() {
    let Some((disks, volume, fs)) = fresh(&[]) else { return };
    let root = fs.root();
    fs.create_subvolume(place(root, "one"), &NEW).expect("a subvolume");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                match fs.create(place(root, "to"), &NEW) {
                    Ok(_) => fs.unlink(place(root, "to"), AT).expect("nothing takes its place"),
                    Err(error) => assert_eq!(error.errno(), Errno::EXIST, "{error}"),
                }
            }
        });
        let (mut moved, mut refused) = (0, Vec::new());
        while refused.len() < 1000 {
            match fs.rename_with(place(root, "one"), place(root, "to"), Rename::NoReplace, AT) {
                Ok(()) => {
                    moved += 1;
                    fs.rename(place(root, "to"), place(root, "one"), AT).expect("it moves back");
                }
                Err(error) => refused.push(error.errno()),
            }
        }
        stop.store(true, SeqCst);
        println!("{moved} moves, {} refused", refused.len());
        assert!(refused.iter().all(|&errno| errno == Errno::EXIST), "{refused:?}");
    });
    fs.sync().expect("a commit");
    drop((fs, volume));
    judge(&disks, 1);
}
