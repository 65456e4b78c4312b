//! A change of a synchronous file or directory is durable when the call returns: these tests never
//! sync, and the power cut comes after each call.

use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashEntry, MemoryDevice};
use offshoot_testkit::compare::Compare;
use offshoot_testkit::crash::{OpenedVolume, TestedEngine};
use offshoot_testkit::random::Random;
use offshoot_vfs::{
    EntryPlace, Fallocate, FileFlags, FileId, FilePosition, FileSystem, FileType, NewFile, NewNode,
    Rename, Result, SetAttr, Timestamp, XattrMode,
};

use crate::engine::{ONE, OURS, volume};
use crate::judge::OutsideJudges;

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 3 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

type SynchronousCall<'c> = (&'static str, &'c dyn Fn(&OpenedVolume) -> Result<()>);

fn at(fs: &dyn FileSystem, path: &str) -> FileId {
    let step = |dir, name: &str| fs.lookup(dir, name.as_bytes()).expect("it is there");
    path.split('/').filter(|name| !name.is_empty()).fold(fs.root(), step)
}

fn place<'p>(fs: &dyn FileSystem, path: &'p str) -> EntryPlace<'p> {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    EntryPlace { dir: at(fs, dir), name: name.as_bytes() }
}

/// What a power cut leaves when it loses every write that no barrier made durable.
fn flushed(device: &CrashDevice, base: &Arc<dyn BlockDevice>) -> Arc<MemoryDevice> {
    let log = device.log();
    let is_barrier = |entry: &CrashEntry| matches!(entry, CrashEntry::Barrier { .. });
    let end = log.entries().iter().rposition(is_barrier).map_or(0, |last| last + 1);
    let left = MemoryDevice::over(base.clone());
    for entry in &log.entries()[..end] {
        if let CrashEntry::Write { offset, data, .. } = entry {
            left.write_at(*offset, data).expect("it has room");
        }
    }
    Arc::new(left)
}

/// Makes each call on a volume that `prepare` set up, and requires that a power cut after it loses
/// nothing.
fn none_is_lost(prepare: impl Fn(&OpenedVolume) -> Result<()>, calls: &[SynchronousCall<'_>]) {
    let base = volume(calls.len() as u64, ONE)[0].clone();
    let fs = OURS.open_writable(vec![base.clone()]).expect("it opens");
    prepare(&fs).expect("there is room");
    fs.sync().expect("a commit");
    drop(fs);
    let device = Arc::new(CrashDevice::new(base.clone()));
    let fs = OURS.open_writable(vec![device.clone()]).expect("it opens");
    for (name, call) in calls {
        call(&fs).unwrap_or_else(|error| panic!("{name}: {error}"));
        let left = OURS.open(vec![flushed(&device, &base)]).expect("what is left opens");
        let outcome = Compare::default().run_filesystems(&*left.files, &*fs.files);
        println!("{name}");
        outcome.assert_same(1);
    }
    if let Some(outside) = OutsideJudges::new() {
        outside.judge(&[flushed(&device, &base)]).unwrap_or_else(|problem| panic!("{problem}"));
    }
}

#[test]
fn files() {
    let data = Random::new(5).bytes(100_000);
    let prepare = |fs: &OpenedVolume| {
        for name in ["file", "other"] {
            fs.create(place(&*fs.files, name), &NEW)?;
        }
        fs.write(at(&*fs.files, "other"), 0, &data, AT)?;
        fs.set_flags(at(&*fs.files, "file"), FileFlags::SYNC, AT)
    };
    let file = |fs: &OpenedVolume| at(&*fs.files, "file");
    let position =
        |fs: &OpenedVolume, name: &str, offset| FilePosition { file: at(&*fs.files, name), offset };
    let size = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    let allocate =
        |what, offset, len| move |fs: &OpenedVolume| fs.fallocate(file(fs), what, offset, len, AT);
    none_is_lost(
        prepare,
        &[
            ("write", &|fs| fs.write(file(fs), 0, &data[..300], AT)),
            ("a longer write", &|fs| fs.write(file(fs), 200, &data, AT)),
            ("a direct write", &|fs| fs.write_direct(file(fs), 5000, &data[..5000], AT)),
            ("a write behind the end", &|fs| fs.write(file(fs), 300_000, &data, AT)),
            ("truncate", &|fs| fs.set_attr(file(fs), &size(150_001), AT)),
            ("truncate up", &|fs| fs.set_attr(file(fs), &size(200_000), AT)),
            ("allocate", &allocate(Fallocate::Allocate { keeps_size: false }, 190_000, 90_000)),
            ("punch", &allocate(Fallocate::PunchHole, 5000, 50_000)),
            ("zero", &allocate(Fallocate::Zero { keeps_size: true }, 60_000, 20_000)),
            ("collapse", &allocate(Fallocate::Collapse, 8192, 8192)),
            ("insert", &allocate(Fallocate::Insert, 4096, 12_288)),
            ("clone", &|fs| {
                fs.clone_range(position(fs, "other", 4096), position(fs, "file", 0), 8192, AT)
            }),
            ("copy", &|fs| {
                let (from, to) = (position(fs, "other", 100), position(fs, "file", 50));
                fs.copy_range(from, to, 30_000, AT).map(drop)
            }),
            ("set_xattr", &|fs| fs.set_xattr(file(fs), b"user.name", b"value", XattrMode::Set, AT)),
            ("remove_xattr", &|fs| fs.remove_xattr(file(fs), b"user.name", AT)),
            ("chmod", &|fs| {
                let set = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
                fs.set_attr(file(fs), &set, AT)
            }),
            ("link", &|fs| fs.link(file(fs), place(&*fs.files, "link"), AT)),
            ("rename", &|fs| {
                fs.rename(place(&*fs.files, "link"), place(&*fs.files, "renamed"), AT)
            }),
            ("unlink", &|fs| fs.unlink(place(&*fs.files, "renamed"), AT)),
            ("set_flags", &|fs| fs.set_flags(file(fs), FileFlags::SYNC | FileFlags::NODUMP, AT)),
        ],
    );
}

#[test]
fn directories() {
    for flag in [FileFlags::DIRSYNC, FileFlags::SYNC] {
        let prepare = |fs: &OpenedVolume| {
            fs.mkdir(place(&*fs.files, "plain"), &NEW)?;
            let dir = fs.mkdir(place(&*fs.files, "dir"), &NEW)?;
            fs.set_flags(dir, flag, AT)
        };
        let create =
            |path| move |fs: &OpenedVolume| fs.create(place(&*fs.files, path), &NEW).map(drop);
        let mkdir =
            |path| move |fs: &OpenedVolume| fs.mkdir(place(&*fs.files, path), &NEW).map(drop);
        let rename = |from, to, how| {
            move |fs: &OpenedVolume| {
                fs.rename_with(place(&*fs.files, from), place(&*fs.files, to), how, AT)
            }
        };
        let fifo = NewNode { file_type: FileType::Fifo, rdev: (0, 0) };
        none_is_lost(
            prepare,
            &[
                ("create", &create("dir/file")),
                ("mknod", &|fs| fs.mknod(place(&*fs.files, "dir/fifo"), fifo, &NEW).map(drop)),
                ("mkdir", &mkdir("dir/below")),
                ("symlink", &|fs| {
                    fs.symlink(place(&*fs.files, "dir/symlink"), b"target", &NEW).map(drop)
                }),
                ("link", &|fs| {
                    fs.link(at(&*fs.files, "dir/file"), place(&*fs.files, "dir/link"), AT)
                }),
                ("a new name there", &rename("dir/link", "dir/name", Rename::NoReplace)),
                ("out of it", &rename("dir/name", "plain/name", Rename::Replace)),
                ("into it", &rename("plain/name", "dir/again", Rename::Replace)),
                ("exchange", &rename("dir/below", "dir/symlink", Rename::Exchange)),
                ("over another", &rename("dir/again", "dir/fifo", Rename::Replace)),
                ("unlink", &|fs| fs.unlink(place(&*fs.files, "dir/fifo"), AT)),
                ("rmdir", &|fs| fs.rmdir(place(&*fs.files, "dir/symlink"), AT)),
                ("subvolume", &|fs| {
                    let place = place(&*fs.files, "dir/subvolume");
                    fs.subvolumes.create_subvolume(place, &NEW).map(drop)
                }),
                ("snapshot", &|fs| {
                    let source = at(&*fs.files, "dir/subvolume");
                    let place = place(&*fs.files, "dir/snapshot");
                    fs.subvolumes.snapshot(source, place, true, AT).map(drop)
                }),
                ("a subvolume goes", &|fs| {
                    fs.subvolumes.delete_subvolume(place(&*fs.files, "dir/subvolume"), AT)
                }),
                ("attributes", &|fs| {
                    let set = SetAttr { permissions: Some(0o700), ..SetAttr::default() };
                    fs.set_attr(at(&*fs.files, "dir"), &set, AT)
                }),
            ],
        );
    }
}
