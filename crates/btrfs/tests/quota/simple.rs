//! Simple quotas: we keep the numbers as the kernel keeps them.

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::progs::Progs;
use offshoot_testkit::model::subvolumes::SubvolumeCalls;
use offshoot_vfs::{EntryPlace, FileId, FilePosition, FileSystem, FileSystemMut};

use crate::common::{AT, Groups, NEW, at, by_kernel, cut, made, open, write};
use crate::subvolume_calls::OurSubvolumes;

/// Two subvolumes, one of them in groups from the beginning. If a group that already uses space is
/// added to another one by two ways, the kernel adds its use twice.
const BEGINNING: &str =
    "btrfs qgroup create 1/1 .; btrfs qgroup create 2/1 .; btrfs qgroup create 1/2 .
    btrfs qgroup assign 1/1 2/1 .; btrfs qgroup assign 1/2 2/1 .
    btrfs -q subvolume create -i 1/1 -i 1/2 a; btrfs -q subvolume create b; sync";

/// The calls of the kernel; [`ours`] makes the same calls. Everything fits into a few tree blocks,
/// so both sides have the same number of blocks.
const CALLS: &str = "btrfs -q subvolume create a/inner
    head -c 1048576 /dev/zero > a/one; head -c 1048576 /dev/zero > a/two
    head -c 300000 /dev/zero > a/inner/three; head -c 4096 /dev/zero > four; sync
    btrfs -q subvolume snapshot a b/kept; btrfs -q subvolume snapshot b a/other; sync
    cp --reflink=always b/kept/one b/clone; sync
    dd if=/dev/zero of=b/kept/two bs=1M count=1 conv=notrunc status=none
    truncate -s 102400 a/one; rm four; sync
    btrfs -q subvolume delete a/inner a/other; btrfs -q subvolume delete a
    btrfs -q subvolume sync .; sync";

fn clone_all(fs: &dyn FileSystemMut, from: FileId, to: FileId, len: u64) {
    let from = FilePosition { file: from, offset: 0 };
    fs.clone_range(from, FilePosition { file: to, offset: 0 }, len, AT).expect("a clone");
}

fn ours(disks: &Disks) {
    let (fs, told) = open(disks);
    let subvolumes = OurSubvolumes::new(fs.clone());
    let within =
        |dir: &str, name: &'static str| EntryPlace { dir: at(&fs, dir), name: name.as_bytes() };
    subvolumes.create_subvolume(within("a", "inner"), &NEW).expect("a subvolume");
    for (dir, name, bytes) in [
        ("a", "one", 1 << 20),
        ("a", "two", 1 << 20),
        ("a/inner", "three", 300_000),
        ("", "four", 4096),
    ] {
        write(&fs, at(&fs, dir), name, bytes);
    }
    fs.sync().expect("a commit");
    for (source, dir, name) in [("a", "b", "kept"), ("b", "a", "other")] {
        subvolumes.snapshot(at(&fs, source), within(dir, name), false, AT).expect("a snapshot");
    }
    fs.sync().expect("a commit");
    let clone = fs.create(within("b", "clone"), &NEW).expect("a file");
    clone_all(&fs, at(&fs, "b/kept/one"), clone, 1 << 20);
    fs.sync().expect("a commit");
    fs.write(at(&fs, "b/kept/two"), 0, &vec![7; 1 << 20], AT).expect("there is room");
    cut(&fs, at(&fs, "a/one"), 102_400);
    fs.unlink(within("", "four"), AT).expect("it is removed");
    fs.sync().expect("a commit");
    for (dir, name) in [("a", "inner"), ("a", "other"), ("", "a")] {
        subvolumes.delete_subvolume(within(dir, name), AT).expect("it is deleted");
    }
    subvolumes.drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    assert_eq!(told.not_kept(), 0, "they are kept");
}

fn beginning(judges: &Judges) -> Disks {
    made(judges, "-O squota", BEGINNING)
}

/// The groups and their numbers are the same as after the same calls of the kernel.
#[test]
fn the_kernel_counts_the_same() {
    let Some(judges) = judges::require() else { return };
    let (one, other) = (beginning(&judges), beginning(&judges));
    ours(&one);
    by_kernel(&other, CALLS, &[]);
    let (ours, theirs) = (Groups::of(&one), Groups::of(&other));
    one.assert_checks();
    other.assert_checks();
    // `a` is deleted. Its data still counts for it, because `kept` and a clone hold the data.
    assert!(theirs.used["0/256"][0] >= 1 << 20, "{theirs:?}");
    assert_eq!(ours, theirs);
    // Each side goes on counting from what the other one left.
    by_kernel(&one, "rm -r b/kept/one b/clone; sync", &[]);
    let (fs, _) = open(&other);
    for (dir, name) in [("b/kept", "one"), ("b", "clone")] {
        let place = EntryPlace { dir: at(&fs, dir), name: name.as_bytes() };
        fs.unlink(place, AT).expect("it is removed");
    }
    fs.sync().expect("a commit");
    drop(fs);
    assert_eq!(Groups::of(&other), Groups::of(&one));
    one.assert_checks();
    other.assert_checks();
}

/// A new subvolume joins the groups of the subvolume that holds it.
#[test]
fn a_new_subvolume_is_in_the_groups_of_its_holder() {
    let Some(judges) = judges::require() else { return };
    let disks = beginning(&judges);
    let (fs, _) = open(&disks);
    let subvolumes = OurSubvolumes::new(fs.clone());
    let within =
        |dir: &str, name: &'static str| EntryPlace { dir: at(&fs, dir), name: name.as_bytes() };
    subvolumes.create_subvolume(within("a", "new"), &NEW).expect("a subvolume");
    subvolumes.snapshot(at(&fs, "b"), within("a", "of-b"), true, AT).expect("a snapshot");
    subvolumes.snapshot(at(&fs, "a"), within("b", "of-a"), false, AT).expect("a snapshot");
    fs.sync().expect("a commit");
    drop((subvolumes, fs));
    let Groups { relations, used, .. } = Groups::of(&disks);
    let in_group = |group: &str| -> Vec<String> {
        let members = relations.iter().filter(|[child, parent]| parent == group && child < parent);
        members.map(|[child, _]| child.clone()).collect()
    };
    for group in ["1/1", "1/2"] {
        assert_eq!(in_group(group), ["0/256", "0/258", "0/259"], "{relations:?}");
        assert_eq!(used[group], [3 * 16384; 2], "{used:?}");
    }
    // Space that comes to a group by two ways counts once.
    assert_eq!(used["2/1"], [3 * 16384; 2], "{used:?}");
    disks.assert_checks();
}

/// Data that is older than the quotas counts for no group, whichever side frees it.
#[test]
fn what_is_older_than_the_quotas_does_not_count() {
    let Some(judges) = judges::require() else { return };
    let fill = "btrfs -q subvolume create a; for i in $(seq 40); do head -c 20000 /dev/zero > a/$i; done; sync";
    let disks = made(&judges, "", &format!("{fill}; btrfs quota enable --simple ."));
    let (fs, _) = open(&disks);
    let dir = at(&fs, "a");
    for number in 1..=20 {
        let name = number.to_string();
        let place = EntryPlace { dir, name: name.as_bytes() };
        fs.unlink(place, AT).expect("it is removed");
        write(&fs, dir, &format!("new-{number}"), 40_000);
    }
    fs.sync().expect("a commit");
    drop(fs);
    disks.assert_checks();
    let used = Groups::of(&disks).used["0/256"][0];
    assert!((20 * 40_960..20 * 40_960 + (96 << 10)).contains(&used), "{used} bytes");
    by_kernel(&disks, "rm a/new-* a/3*; sync", &[]);
    disks.assert_checks();
}

/// Data keeps its owner items while quotas are off, whichever file gains or loses it then.
#[test]
fn owners_stay_when_quotas_are_off() {
    let Some(judges) = judges::require() else { return };
    let fill = "btrfs -q subvolume create a; for i in $(seq 20); do head -c 20000 /dev/zero > a/$i; done; sync";
    let disks = made(&judges, "-O squota", &format!("{fill}; btrfs quota disable ."));
    let owners = |disks: &Disks| {
        Progs::of(disks).dump_tree("extent").matches("textent owner root 256").count()
    };
    assert_eq!(owners(&disks), 20);
    let (fs, _) = open(&disks);
    let dir = at(&fs, "a");
    for number in 1..=10 {
        let name = number.to_string();
        let clone = format!("clone-{number}");
        let clone = fs.create(EntryPlace { dir, name: clone.as_bytes() }, &NEW).expect("a file");
        clone_all(&fs, at(&fs, &format!("a/{name}")), clone, 16384);
    }
    write(&fs, dir, "new", 40_000);
    fs.unlink(EntryPlace { dir, name: b"20" }, AT).expect("it is removed");
    fs.sync().expect("a commit");
    OurSubvolumes::new(fs.clone())
        .snapshot(dir, EntryPlace { dir: fs.root(), name: b"snapshot" }, false, AT)
        .expect("a snapshot");
    write(&fs, dir, "newer", 40_000);
    fs.sync().expect("a commit");
    drop(fs);
    disks.assert_checks();
    // As in the kernel: data that is written while quotas are off has no owner.
    assert_eq!(owners(&disks), 19);
    by_kernel(
        &disks,
        "btrfs quota enable --simple .; head -c 90000 /dev/zero > a/last; rm a/1*",
        &[],
    );
    disks.assert_checks();
}

/// A dropped subvolume had the highest number, so a new one gets that number. The old group still
/// exists because a clone holds its data, and it goes on counting.
#[test]
fn a_group_that_was_left_is_taken_over() {
    let Some(judges) = judges::require() else { return };
    let beginning = "btrfs -q subvolume create b; btrfs -q subvolume create a
        head -c 500000 /dev/zero > a/data; cp --reflink=always a/data b/clone; sync
        btrfs -q subvolume delete -c a; btrfs -q subvolume sync .; sync";
    let (one, other) =
        (made(&judges, "-O squota", beginning), made(&judges, "-O squota", beginning));
    let left = Groups::of(&one).used["0/257"][0];
    assert!(left >= 500_000, "{left} bytes");
    let (fs, _) = open(&one);
    fs.create_subvolume(EntryPlace { dir: fs.root(), name: b"new" }, &NEW).expect("a subvolume");
    write(&fs, at(&fs, "new"), "data", 70_000);
    fs.sync().expect("a commit");
    drop(fs);
    let script = "btrfs -q subvolume create new; head -c 70000 /dev/zero > new/data; sync";
    by_kernel(&other, script, &[]);
    one.assert_checks();
    other.assert_checks();
    assert_eq!(Groups::of(&one), Groups::of(&other));
    assert!(Groups::of(&one).used["0/257"][0] > left);
}
