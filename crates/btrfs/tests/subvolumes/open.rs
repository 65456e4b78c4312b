//! Open files in subvolumes that are deleted.

use offshoot_btrfs::{Filesystem, SubvolumeId};
use offshoot_btrfs_format::TreeId;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_vfs::{Errno, FileId, FileSystem, FileSystemMut, Result};

use crate::common::{AT, NEW, at, fresh, items, judge, open, place, top};

const PIECE: usize = 1 << 20;

fn root_of(id: SubvolumeId) -> FileId {
    FileId { dev: id.0, ino: 256 }
}

#[track_caller]
fn gone<T>(result: Result<T>) {
    let error = result.err().expect("it is gone");
    assert_eq!(error.errno(), Errno::NOENT, "{error}");
}

/// How many items of the subvolume `id` are in the root tree, with its orphan item.
fn left(fs: &Filesystem, id: SubvolumeId) -> u64 {
    items(fs, TreeId::ROOT, |key| key.objectid == id.0 || key.offset == id.0)
}

#[track_caller]
fn assert_bytes(fs: &Filesystem, file: FileId, len: usize, byte: u8) {
    let mut buf = vec![0; len + 1];
    assert_eq!(fs.read(file, 0, &mut buf).expect("it reads"), len);
    assert!(buf[..len].iter().all(|&found| found == byte), "bytes of {file}");
}

/// Regression: the files were gone at once, and the subvolume was dropped although they were open.
#[test]
fn they_are_used_until_the_last_one_is_closed() {
    let Some((disks, volume, fs)) = fresh(&[]) else { return };
    let other = fs.create_subvolume(place(fs.root(), "other"), &NEW).expect("a subvolume");
    fs.sync().expect("a commit");
    let id = fs.create_subvolume(place(fs.root(), "sub"), &NEW).expect("a subvolume");
    let dir = fs.mkdir(place(root_of(id), "dir"), &NEW).expect("a directory");
    let file = fs.create(place(dir, "file"), &NEW).expect("a file");
    let nameless = fs.create(place(root_of(id), "nameless"), &NEW).expect("a file");
    for file in [file, nameless] {
        fs.write(file, 0, &vec![1; 4 * PIECE], AT).expect("there is room");
    }
    for open in [file, dir, nameless, nameless] {
        fs.open(open).expect("it is there");
    }
    fs.unlink(place(root_of(id), "nameless"), AT).expect("it is there");
    fs.delete_subvolume(place(fs.root(), "sub"), AT).expect("it is there");

    gone(fs.lookup(fs.root(), b"sub"));
    gone(volume.subvolume(id));
    gone(volume.filesystem(id));
    assert_eq!(volume.subvolume_count().expect("they read"), 2);
    for round in 2..5 {
        volume.drop_deleted().expect("nothing is dropped");
        assert!(left(&fs, id) > 0);
        for file in [file, nameless] {
            assert_bytes(&fs, file, 4 * PIECE, round - 1);
            fs.write(file, 0, &vec![round; 4 * PIECE], AT).expect("there is room");
        }
        let name = format!("new-{round}");
        let new = fs.create(place(dir, &name), &NEW).expect("the directory is open");
        fs.write(new, 0, &[round; 100], AT).expect("there is room");
        match round {
            2 => fs.sync().expect("a commit"),
            3 => fs.fsync(file).expect("it is durable"),
            _ => {}
        }
    }
    // Every call that would need its name is refused.
    gone(fs.create(place(root_of(id), "new"), &NEW));
    gone(fs.rename(place(dir, "new-2"), place(root_of(id), "new"), AT));
    gone(fs.link(file, place(root_of(id), "new"), AT));
    gone(fs.create_subvolume(place(dir, "new"), &NEW));
    gone(fs.snapshot(other, place(dir, "new"), false, AT));
    gone(fs.snapshot(id, place(fs.root(), "new"), false, AT));
    gone(fs.rename(place(fs.root(), "other"), place(dir, "new"), AT));
    gone(volume.set_read_only(id, true, AT));
    gone(volume.set_default_subvolume(id));
    // A crash closes the files.
    fs.sync().expect("a commit");
    let crashed = judges::require().map(|judges| disks.copy(&judges)).expect("there are judges");
    crashed.assert_checks();
    let cut = open(&crashed);
    cut.drop_deleted().expect("everything reads");
    top(&cut).sync().expect("a commit");
    assert_eq!(left(&top(&cut), id), 0);
    drop(cut);
    judge(&crashed, 1);

    for closed in [nameless, dir, nameless] {
        fs.release(closed).expect("it is open");
        volume.drop_deleted().expect("nothing is dropped");
        assert_bytes(&fs, file, 4 * PIECE, 4);
    }
    fs.release(file).expect("it is open");
    gone(fs.attr(file));
    gone(fs.open(file));
    volume.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    assert_eq!(left(&fs, id), 0);
    assert_eq!(
        items(&fs, TreeId::EXTENT, |key| key.offset >= PIECE as u64 / 8 && key.item_type.0 == 168),
        0
    );
    drop((fs, volume));
    judge(&disks, 1);
}

/// Files are opened, used and closed while their subvolume is deleted. An open file can be used,
/// and the rest is dropped.
#[test]
fn they_are_opened_and_closed_while_it_is_deleted() {
    const THREADS: u64 = 3;
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&["-n", "4k"]);
    let volume = open(&disks);
    let fs = top(&volume);
    let (mut uses, mut ids) = (0, Vec::new());
    for round in 0..40_u64 {
        let name = format!("sub-{round}");
        let id = fs.create_subvolume(place(fs.root(), &name), &NEW).expect("a subvolume");
        ids.push(id);
        let make = |number: u64| fs.create(place(root_of(id), &number.to_string()), &NEW);
        let files: Vec<_> = (0..THREADS).map(|number| make(number).expect("a file")).collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> = files
                .iter()
                .map(|&file| {
                    let fs = &fs;
                    scope.spawn(move || {
                        for number in 0_u64.. {
                            if let Err(error) = fs.open(file) {
                                assert_eq!(error.errno(), Errno::NOENT, "{error}");
                                return number;
                            }
                            fs.write(file, number % 7 * 5000, &[1; 5000], AT).expect("it is open");
                            let mut buf = [0; 5000];
                            assert_eq!(
                                fs.read(file, number % 7 * 5000, &mut buf).expect("it is open"),
                                5000
                            );
                            fs.release(file).expect("it is open");
                        }
                        unreachable!("the subvolume is deleted")
                    })
                })
                .collect();
            std::thread::sleep(std::time::Duration::from_micros(100 * round));
            fs.delete_subvolume(place(fs.root(), &name), AT).expect("it is there");
            uses += threads.into_iter().map(|thread| thread.join().expect("no panic")).sum::<u64>();
        });
        fs.create(place(fs.root(), &format!("after-{round}")), &NEW).expect("it is written");
    }
    assert!(uses > 0, "no thread opened a file");
    volume.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    for id in ids {
        assert_eq!(left(&fs, id), 0, "of subvolume {id}");
    }
    assert_eq!(at(&fs, "after-0").dev, fs.root().dev);
    drop((fs, volume));
    judge(&disks, 40);
}
