//! Full quotas: we mark the numbers as wrong, and the kernel corrects them.

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::model::subvolumes::SubvolumeCalls;
use offshoot_vfs::{EntryPlace, FileSystem, FileSystemMut};

use crate::common::{AT, Groups, NEW, assert_counted_anew, at, by_kernel, made, open, write};
use crate::subvolume_calls::OurSubvolumes;

/// Subvolumes with data in groups, and a snapshot that shares some of it.
const BEGINNING: &str = "btrfs -q subvolume create a; btrfs -q subvolume create b
    btrfs qgroup create 1/1 .; btrfs qgroup create 2/1 .
    btrfs qgroup assign 0/256 1/1 .; btrfs qgroup assign 0/257 1/1 .; btrfs qgroup assign 1/1 2/1 .
    head -c 300000 /dev/urandom > a/data; head -c 200000 /dev/urandom > b/data
    btrfs -q subvolume snapshot a c
    btrfs quota rescan -w . > rescanned; sync";

/// What the kernel logs when it takes a snapshot of a subvolume in a group.
const INHERITS: &str = "qgroup inherit needs a rescan";

/// A volume after `BEGINNING`, with correct numbers.
fn beginning(judges: &judges::Judges, mkfs: &str) -> Disks {
    let disks = made(judges, mkfs, "");
    by_kernel(&disks, BEGINNING, &[INHERITS]);
    let groups = Groups::of(&disks);
    assert!(!groups.is_inconsistent(), "{groups:?}");
    assert_eq!(groups.names(), ["0/256", "0/257", "0/258", "0/5", "1/1", "2/1"]);
    disks.assert_checks();
    disks
}

/// Every change of what groups count: we report it once, never leave a wrong number unmarked, and
/// the kernel corrects the numbers.
#[test]
fn what_is_written_is_counted_anew() {
    let Some(judges) = judges::require() else { return };
    for mkfs in ["-O quota", "-O quota -n 4096"] {
        let disks = beginning(&judges, mkfs);
        let (fs, told) = open(&disks);
        assert_eq!(told.not_kept(), 0, "nothing is written yet");
        let subvolumes = OurSubvolumes::new(fs.clone());
        let root = fs.root();
        let named = |name: &'static str| EntryPlace { dir: root, name: name.as_bytes() };
        subvolumes.create_subvolume(named("new"), &NEW).expect("a subvolume");
        write(&fs, at(&fs, "new"), "data", 500_000);
        let data = at(&fs, "a/data");
        fs.write(data, 100_000, &vec![1; 50_000], AT).expect("there is room");
        fs.sync().expect("a commit");
        assert_eq!(told.not_kept(), 1);
        let groups = Groups::in_volume(fs.volume());
        assert!(groups.is_inconsistent(), "{groups:?}");
        assert_eq!(groups.names(), ["0/256", "0/257", "0/258", "0/259", "0/5", "1/1", "2/1"]);
        let a = at(&fs, "a");
        subvolumes.snapshot(a, named("snapshot"), false, AT).expect("a snapshot");
        subvolumes.delete_subvolume(named("b"), AT).expect("it is deleted");
        subvolumes.drop_deleted().expect("everything reads");
        fs.unlink(EntryPlace { dir: at(&fs, "c"), name: b"data" }, AT).expect("it is removed");
        fs.sync().expect("a commit");
        assert_eq!(told.not_kept(), 1, "it is said once");
        drop((subvolumes, fs));
        disks.assert_checks();
        let groups = Groups::of(&disks);
        // The group of the dropped subvolume is gone, with its relations.
        assert_eq!(groups.names(), ["0/256", "0/258", "0/259", "0/260", "0/5", "1/1", "2/1"]);
        let relations = [["0/256", "1/1"], ["1/1", "0/256"], ["1/1", "2/1"], ["2/1", "1/1"]];
        assert_eq!(groups.relations, relations);
        let groups = assert_counted_anew(&disks);
        assert!(groups.used["0/259"][0] >= 500_000, "{groups:?}");
        // From then on the kernel keeps the numbers.
        by_kernel(&disks, "head -c 90000 /dev/urandom > new/more; rm a/data", &[]);
        assert!(!Groups::of(&disks).is_inconsistent());
        disks.assert_checks();
        // After the next opening, the first commit that writes reports it again.
        let (fs, told) = open(&disks);
        fs.sync().expect("nothing to commit");
        assert!(told.not_kept() == 0 && !Groups::in_volume(fs.volume()).is_inconsistent());
        write(&fs, fs.root(), "last", 100);
        fs.sync().expect("a commit");
        assert_eq!(told.not_kept(), 1);
        drop(fs);
        assert_counted_anew(&disks);
    }
}

/// We delete the subvolume `b`, and commit.
fn delete_b(disks: &Disks) {
    let (fs, _) = open(disks);
    OurSubvolumes::new(fs.clone())
        .delete_subvolume(EntryPlace { dir: fs.root(), name: b"b" }, AT)
        .expect("it goes");
    fs.sync().expect("a commit");
    drop(fs);
}

/// A commit that only drops what was deleted before changes the numbers too, and is reported.
#[test]
fn a_drop_alone_is_said() {
    let Some(judges) = judges::require() else { return };
    let disks = beginning(&judges, "-O quota");
    delete_b(&disks);
    let before = Groups::of(&disks);
    assert!(before.is_inconsistent() && before.used.contains_key("0/257"), "{before:?}");
    let (fs, told) = open(&disks);
    OurSubvolumes::new(fs.clone()).drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    assert_eq!(told.not_kept(), 0, "they were marked before");
    drop(fs);
    assert!(!Groups::of(&disks).used.contains_key("0/257"));
    assert_counted_anew(&disks);
}

/// The kernel drops what we deleted, and we drop what the kernel deleted.
#[test]
fn groups_go_whoever_drops_the_subvolume() {
    let Some(judges) = judges::require() else { return };
    let disks = beginning(&judges, "-O quota");
    delete_b(&disks);
    by_kernel(&disks, "btrfs -q filesystem sync .; btrfs -q subvolume sync .", &[]);
    assert!(!Groups::of(&disks).used.contains_key("0/257"));
    by_kernel(&disks, "btrfs -q subvolume delete -c c", &[]);
    let (fs, _) = open(&disks);
    OurSubvolumes::new(fs.clone()).drop_deleted().expect("everything reads");
    fs.sync().expect("a commit");
    drop(fs);
    assert_eq!(Groups::of(&disks).names(), ["0/256", "0/5", "1/1", "2/1"]);
    assert_counted_anew(&disks);
}
