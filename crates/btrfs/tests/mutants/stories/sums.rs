//! Checksums of space that is free.

use std::path::Path;
use std::thread;

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{Fallocate, FileFlags, FileSystem, FileSystemMut};

use super::{AT, DamageStory, NEW, at, place};

const SECTOR: u64 = 4096;
/// So many sectors of free space behind the data may have checksums.
const REACH: u64 = 512;
/// How many files each of the two threads makes.
const FILES: u64 = 60;

fn index(number: u64) -> usize {
    usize::try_from(number).expect("a small one")
}

/// Regression: free space had checksums, and new data there got its own beside them. Then two items
/// covered one sector, or preallocated space and files without checksums had some.
#[test]
fn checksums_of_free_space_are_replaced() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    println!("OFFSHOOT_SEED={seed}");
    let mut random = Random::new(seed);
    let write = |root: &Path| {
        fill::write(&root.join("data"), &[b'd'; 3 << 12]);
        for number in 0..100 {
            fill::write(&root.join(format!("small-{number}")), b"data");
        }
    };
    let mut story = DamageStory::new(&judges, write);
    let some = *story.keys(TreeId::CSUM, objectid::EXTENT_CSUM).first().expect("data has some");
    let mut stale = Vec::new();
    let mut sector = 4;
    while sector < REACH {
        let len = 1 + random.below(30);
        let key = Key::new(some.objectid, ItemType::EXTENT_CSUM, some.offset + sector * SECTOR);
        stale.push((key, random.bytes(index(4 * len))));
        sector += len + random.below(20);
    }
    story.edit(TreeId::CSUM, some, |items| items.extend(stale));
    let before = story.check();
    assert!(!before.is_empty(), "btrfs check sees checksums of free space");

    let fs = story.open();
    let contents = move |thread: u64, file: u64| {
        let mut random = Random::new(seed ^ (thread << 32 | file));
        let len = 1 + random.below(6 * SECTOR);
        (format!("file-{thread}-{file}"), random.below(4), random.bytes(index(len)))
    };
    thread::scope(|scope| {
        for thread in 0..2 {
            let fs = &fs;
            scope.spawn(move || {
                for number in 0..FILES {
                    let (name, kind, bytes) = contents(thread, number);
                    let file = fs.create(place(fs.root(), &name), &NEW).expect("there is room");
                    if kind == 1 {
                        fs.set_flags(file, FileFlags::NODATACOW, AT).expect("it is empty");
                    }
                    if kind >= 2 {
                        let what = Fallocate::Allocate { keeps_size: kind == 3 };
                        let len = 2 * bytes.len() as u64;
                        fs.fallocate(file, what, 0, len, AT).expect("there is room");
                    }
                    fs.write(file, 0, &bytes, AT).expect("there is room");
                    if number % 7 == 0 {
                        fs.fsync(file).expect("it is written");
                    }
                }
            });
        }
    });
    fs.sync().expect("a commit");
    drop(fs);

    story.assert_no_worse_than(&before);
    let fs = story.open();
    let all = || (0..2).flat_map(|thread| (0..FILES).map(move |file| (thread, file)));
    for (name, _, bytes) in all().map(|(thread, file)| contents(thread, file)) {
        let mut read = vec![0; bytes.len()];
        let count = fs.read(at(&fs, &name), 0, &mut read).expect("the checksums are right");
        assert_eq!((count, read == bytes), (bytes.len(), true), "{name}");
    }
    drop(fs);
    story.kernel_does(move |mount| {
        for (name, _, bytes) in all().map(|(thread, file)| contents(thread, file)) {
            let read = std::fs::read(mount.join(&name)).expect("the checksums are right");
            assert!(read.starts_with(&bytes), "{name}");
        }
    });
}
