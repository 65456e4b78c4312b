//! Ranges that files share: the kernel and we do the same to copies of one volume, and get the same
//! extents.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use offshoot_btrfs::Filesystem;
use offshoot_btrfs_format::file_extent::FileExtentBody;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::sharing::assert_alike;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::sharing;
use offshoot_vfs::{Dedupe, Errno, FileId, FilePosition, FileSystem, FileSystemMut, SetAttr};
use rustix::fs::{FallocateFlags, IFlags};

use crate::common::{AT, NEW, at, check, judge, open_read_only, open_top, place};
use crate::layout::{SectorKind, for_each_extent, sectors};

/// A range of one file that another one gets.
#[derive(Clone, Debug)]
struct Clone {
    from: usize,
    offset: u64,
    to: usize,
    to_offset: u64,
    len: u64,
}

const SOURCES: [&str; 7] =
    ["plain", "inline", "zstd", "lzo", "allocated", "live/other", "nodatasum"];

/// The name of a file: one of the sources, or a target that has only clones.
fn name(number: usize) -> String {
    SOURCES.get(number).map_or_else(|| format!("target{number}"), |name| (*name).to_owned())
}

const FILES: usize = SOURCES.len() + 8;

/// Has the kernel make files with every kind of extent.
fn fill(disks: &Disks) {
    let mut random = Random::new(1);
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    run("btrfs", &["subvolume".as_ref(), "create".as_ref(), path("live").as_os_str()]);
    for name in (0..FILES).map(name) {
        File::create(path(&name)).expect("a file");
    }
    let nocow = File::options().write(true).open(path("nodatasum")).expect("it opens");
    rustix::fs::ioctl_setflags(&nocow, IFlags::NOCOW).expect("it is empty");
    drop(nocow);
    for name in ["plain", "live/other", "nodatasum"] {
        std::fs::write(path(name), random.text(300_000)).expect("data");
    }
    std::fs::write(path("inline"), random.text(900)).expect("data");
    for name in ["zstd", "lzo"] {
        run(
            "btrfs",
            &[
                "property".as_ref(),
                "set".as_ref(),
                path(name).as_os_str(),
                "compression".as_ref(),
                name.as_ref(),
            ],
        );
        std::fs::write(path(name), random.text(300_001)).expect("data");
    }
    std::fs::write(path("allocated"), random.text(9000)).expect("data");
    let file = File::options().write(true).open(path("allocated")).expect("it opens");
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 40_960, 80_000).expect("there is room");
}

/// The extents of all files: the name, the start and the length in the file, the number of the
/// extent, the offset in it, and whether it is written. Extents are numbered as they are met.
fn layout(fs: &Filesystem) -> Vec<(String, u64, u64, usize, u64, bool)> {
    let (mut all, mut known) = (Vec::new(), Vec::new());
    for name in (0..FILES).map(name) {
        for_each_extent(fs, at(fs, &name), |start, extent| {
            let FileExtentBody::Extent { disk_bytenr, offset, num_bytes, is_preallocated, .. } =
                extent.body
            else {
                return;
            };
            let number = known.iter().position(|one| *one == disk_bytenr).unwrap_or_else(|| {
                known.push(disk_bytenr);
                known.len() - 1
            });
            all.push((name.clone(), start, num_bytes, number, offset, is_preallocated));
        });
    }
    all
}

/// Clones no inline data beside other extents: there the kernel leaves it in its item, and we do
/// not.
fn random_clone(random: &mut Random, sizes: &[u64]) -> Clone {
    const INLINE: u64 = 1;
    let mut below = |bound: u64| random.below(bound);
    let (from, to) = (below(FILES as u64), below(FILES as u64 - 1));
    let to = if to == INLINE { FILES as u64 - 1 } else { to };
    let (offset, to_offset) = (below(30) * 4096, below(30) * 4096);
    let to_offset = if from == INLINE { to_offset + 4096 } else { to_offset };
    let [from, to] = [from, to].map(|number| usize::try_from(number).expect("small"));
    let len = match below(3) {
        // Up to the end of the source.
        0 => sizes[from].saturating_sub(offset),
        1 => below(60) * 4096,
        _ => below(20) * 4096,
    };
    // Unaligned ends: the end of the target, or a refusal.
    let (offset, to_offset, len) = match below(12) {
        0 => (offset + below(4096), to_offset, len),
        1 => (offset, to_offset + below(4096), len),
        2 => (offset, to_offset, len + below(4096)),
        _ => (offset, to_offset, len),
    };
    Clone { from, offset, to, to_offset, len }
}

#[test]
fn the_kernel_shares_the_same_extents() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let [theirs, ours] = [(); 2].map(|()| {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(&[]);
        fill(&disks);
        disks
    });
    let mount = theirs.mount("rw,noatime");
    let fs = open_top(&ours);
    let mut done = 0;
    for number in 0..250 {
        let size = |number| fs.attr(at(&fs, &name(number))).expect("attributes").size;
        let clone = random_clone(&mut random, &(0..FILES).map(size).collect::<Vec<_>>());
        let Clone { from, offset, to, to_offset, len } = clone.clone();
        let position =
            |number: usize, offset| FilePosition { file: at(&fs, &name(number)), offset };
        let ours = fs.clone_range(position(from, offset), position(to, to_offset), len, AT);
        let path = |number| mount.path().join(name(number));
        let kernel = sharing::clone_range((&path(from), offset), (&path(to), to_offset), len);
        let ours = ours.map_err(|error| error.errno().raw_os_error());
        assert_eq!(ours, kernel, "{clone:?}, number {number}");
        done += u64::from(ours.is_ok());
    }
    assert!(done > 60, "only {done} clones were made");
    rustix::fs::syncfs(File::open(mount.path()).expect("the root")).expect("a sync");
    fs.sync().expect("a commit");
    let read = |number| std::fs::read(mount.path().join(name(number))).expect("it reads");
    let expected: Vec<_> = (0..FILES).map(read).collect();
    drop((mount, fs));
    judge(&ours, FILES as u64);
    let [our_mount, their_mount] = [&ours, &theirs].map(|disks| disks.mount("ro,noatime"));
    assert_alike(our_mount.path(), their_mount.path(), FILES / 2);
    drop((our_mount, their_mount));
    let [their_layout, our_layout] = [&theirs, &ours].map(|disks| layout(&open_read_only(disks)));
    let differs = our_layout.iter().zip(&their_layout).find(|(ours, theirs)| ours != theirs);
    assert_eq!(differs, None, "the first extents that differ");
    assert_eq!(our_layout.len(), their_layout.len());
    let mount = ours.mount("rw,noatime");
    for (number, expected) in expected.iter().enumerate() {
        let path = mount.path().join(name(number));
        assert!(std::fs::read(&path).expect("it reads") == *expected, "bytes of {path:?}");
        // The kernel goes on writing what we shared.
        std::fs::write(&path, b"short").expect("it writes");
    }
    drop(mount);
    check(&ours);
}

/// A clone behind the end makes the part of a sector at the old end data, whatever it was.
#[test]
fn the_kernel_stores_the_same_ends() {
    const FILES: [&str; 3] = ["hole", "allocated", "data"];
    let Some(judges) = judges::require() else { return };
    let [theirs, ours] = [(); 2].map(|()| {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(&[]);
        let mount = disks.mount("rw,noatime");
        let path = |name: &str| mount.path().join(name);
        std::fs::write(path("source"), [7; 8192]).expect("data");
        for name in FILES {
            File::create(path(name)).expect("a file").set_len(6000).expect("a hole");
        }
        let file = File::options().write(true).open(path("allocated")).expect("it opens");
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 6000).expect("there is room");
        std::fs::write(path("data"), [8; 6000]).expect("data");
        drop((file, mount));
        disks
    });
    let (mount, fs) = (theirs.mount("rw,noatime"), open_top(&ours));
    let kinds = |fs: &Filesystem| FILES.map(|name| sectors(fs, at(fs, name)));
    for name in FILES {
        let path = |name| mount.path().join(name);
        sharing::clone_range((&path("source"), 0), (&path(name), 65_536), 8192).expect("a clone");
        let position = |name, offset| FilePosition { file: at(&fs, name), offset };
        let (from, to) = (position("source", 0), position(name, 65_536));
        fs.clone_range(from, to, 8192, AT).expect("a clone");
    }
    fs.sync().expect("a commit");
    drop((mount, fs));
    check(&ours);
    let [theirs, ours] = [&theirs, &ours].map(|disks| kinds(&open_read_only(disks)));
    assert_eq!(ours, theirs);
    assert!(ours.iter().all(|kinds| kinds[&1] == SectorKind::Data), "{ours:?}");
}

#[test]
fn the_same_bytes_are_shared_and_others_are_not() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let data = Random::new(2).bytes(300_001);
    let make = |name: &str, data: &[u8]| {
        let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
        fs.write(file, 0, data, AT).expect("there is room");
        file
    };
    let [one, same] = ["one", "same"].map(|name| make(name, &data));
    let mut changed = data.clone();
    changed[299_000] ^= 1;
    let other = make("other", &changed);
    let small = make("small", &data[..100]);
    let place = |file: FileId, offset| FilePosition { file, offset };
    let whole = data.len() as u64;
    let before = [one, same, other, small].map(|file| fs.attr(file).expect("attributes"));
    let dedupe = |from, to, len| fs.dedupe_range(from, to, len);
    for (file, len, found) in [
        (same, whole, Dedupe::Same { len: whole }),
        (other, whole, Dedupe::Differs),
        (other, 65_537, Dedupe::Same { len: 65_536 }),
        (small, 100, Dedupe::Same { len: 0 }),
    ] {
        let compared = dedupe(place(one, 0), place(file, 0), len).expect("they are compared");
        assert_eq!(compared, found, "{len} bytes");
    }
    let refused = dedupe(place(one, 0), place(small, 0), 4096).expect_err("more than there is");
    assert_eq!(refused.errno(), Errno::INVAL, "{refused}");
    let after = [one, same, other, small].map(|file| fs.attr(file).expect("attributes"));
    assert_eq!(
        before.map(|a| (a.size, a.mtime, a.ctime)),
        after.map(|a| (a.size, a.mtime, a.ctime))
    );
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 4);
    let fs = open_read_only(&disks);
    let first = |name: &str| {
        let mut found = Vec::new();
        for_each_extent(&fs, at(&fs, name), |start, extent| {
            if let FileExtentBody::Extent { disk_bytenr, .. } = extent.body {
                found.push((start, disk_bytenr));
            }
        });
        found
    };
    assert_eq!(first("same"), first("one"));
    assert_eq!(first("other")[0], first("one")[0]);
    assert_ne!(first("other")[1].1, first("one")[0].1);
    assert_eq!(
        disks.mount("ro").path().join("same").metadata().expect("it is there").blocks(),
        592
    );
}

/// Holes too large to read in a lifetime are compared, and so is what follows them.
#[test]
fn holes_in_both_files_are_not_read() {
    const FAR: u64 = 1 << 60;
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let fs = open_top(&disks);
    let data = Random::new(3).bytes(100_000);
    let make = |name: &str, last: u8| {
        let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
        fs.write(file, FAR, &data, AT).expect("there is room");
        fs.write(file, 2 * FAR, &[last; 9000], AT).expect("there is room");
        let set = SetAttr { size: Some(4 * FAR), ..SetAttr::default() };
        fs.set_attr(file, &set, AT).expect("a hole");
        file
    };
    let [one, same, other] = [("one", 1), ("same", 1), ("other", 2)].map(|(n, last)| make(n, last));
    let dedupe = |to, len| {
        let begin = |file| FilePosition { file, offset: 0 };
        fs.dedupe_range(begin(one), begin(to), len).expect("they are compared")
    };
    assert_eq!(dedupe(same, 4 * FAR), Dedupe::Same { len: 4 * FAR });
    assert_eq!(dedupe(other, 4 * FAR), Dedupe::Differs);
    assert_eq!(dedupe(other, 2 * FAR), Dedupe::Same { len: 2 * FAR });
    fs.sync().expect("a commit");
    drop(fs);
    check(&disks);
    let fs = open_read_only(&disks);
    let first = |name: &str| {
        let mut found = None;
        for_each_extent(&fs, at(&fs, name), |start, extent| {
            if let FileExtentBody::Extent { disk_bytenr, .. } = extent.body {
                found.get_or_insert((start, disk_bytenr));
            }
        });
        found.expect("an extent")
    };
    assert_eq!([first("same"), first("other")], [first("one"); 2]);
}
