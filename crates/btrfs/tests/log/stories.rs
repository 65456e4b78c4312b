//! Operations that broke real filesystems, each with its story, done by us and cut after the last
//! fsync.
//!
//! The kernel does the same in `scenarios`. The words are those with which the crash explorer
//! prints operations.

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::crash::Workload;
use offshoot_vfs::{
    EntryPlace, Fallocate, FileFlags, FileId, FilePosition, FileSystem, FileSystemMut, SetAttr,
    Timestamp,
};

use crate::by_us::{new_file, open, run_together, shapes, subvolume};
use crate::cut::{LogShape, PLAIN, judge, logs, make, read_only, top};
use crate::workloads::WorkloadCounts;

/// A story: its name, what is synced before, and the steps up to an fsync.
type LogStory = (&'static str, &'static str, &'static str);

const STORIES: &[LogStory] = &[
    // The new name is there and the old one is not, whichever of the three is synced. Never both
    // are there, and never neither.
    ("rename-file", "mkdir a; mkdir b; create a/x; write a/x 0+9000", "rename a/x b/y; fsync /b/y"),
    ("rename-new-parent", "mkdir a; mkdir b; create a/x", "rename a/x b/y; fsync /b"),
    ("rename-old-parent", "mkdir a; mkdir b; create a/x", "rename a/x b/y; fsync /a"),
    ("rename-in-place", "create x; write x 0+100", "rename x y; fsync /y"),
    ("rename-and-new-file", "create x", "rename x y; create x; write x 0+50; fsync /x"),
    ("rename-chain", "create x; create y", "rename y z; rename x y; fsync /y"),
    (
        "rename-there-and-back",
        "mkdir a; create x",
        "rename x a/x; fsync /a; rename a/x x; fsync /x",
    ),
    ("rename-logged", "create x", "write x 0+9000; fsync /x; rename x y; fsync /y"),
    ("exchange", "create x; create y", "exchange x y; fsync /x"),
    ("exchange-across", "mkdir a; create a/x; create y", "exchange a/x y; fsync /a"),
    // One of the two files is new, or got its name lately. After the exchange it is at the other
    // path, and still exists.
    (
        "exchange-with-a-new-file",
        "create x; write x 0+100; create y; write y 0+10000; mkdir a",
        "rename x a/x; fsync /a/x; create x; write x 0+100; exchange x y; fsync /x",
    ),
    (
        "exchange-with-a-new-link",
        "mkdir a; mkdir b; create b/x; create b/y",
        "link b/y a/y; exchange b/x a/y; fsync /a/y",
    ),
    // A file that is not synced took a name of the file that is. Afterwards the name still exists.
    (
        "linked-and-replaced",
        "create x; write x 0+5000",
        "link x y; create n; write n 0+7000; rename n x; fsync /y",
    ),
    (
        "linked-and-replaced-dir",
        "mkdir a; mkdir b; create a/x; write a/x 0+5000",
        "link a/x b/y; create a/n; rename a/n a/x; fsync /b",
    ),
    ("exchange-and-rename", "create x; create y", "exchange x y; rename y z; fsync /z"),
    (
        "exchange-across-and-rename",
        "mkdir a; create a/x; create y",
        "exchange a/x y; rename y z; fsync /z",
    ),
    (
        "replace-one-of-two",
        "create x; write x 0+5000; link x y",
        "create n; write n 0+7000; rename n x; write y 0+10; fsync /y",
    ),
    (
        "replace-a-logged-one",
        "mkdir a; create x; write x 0+5000",
        "rename x a/x; fsync /a; create n; write n 0+700; rename n a/x; fsync /",
    ),
    (
        "exchange-with-a-new-one",
        "mkdir a; create x; write x 0+5000",
        "create a/x; write a/x 0+700; exchange a/x x; fsync /a",
    ),
    // The steps of editors and package managers.
    (
        "replace",
        "create x; write x 0+5000",
        "create new; write new 0+7000; fsync /new; rename new x; fsync /x",
    ),
    (
        "replace-parent",
        "mkdir a; create a/x; write a/x 0+5000",
        "create a/new; write a/new 0+7000; fsync /a/new; rename a/new a/x; fsync /a",
    ),
    (
        "replace-twice",
        "create x; write x 0+500",
        "create n; write n 0+700; fsync /n; rename n x; create n; write n 0+900; fsync /n; rename n x; fsync /",
    ),
    (
        "unlink-and-make-again",
        "create x; write x 0+9000",
        "unlink x; create x; write x 0+70; fsync /x",
    ),
    // Links: the link count is the number of names.
    ("link-count", "create x", "link x y; link x z; fsync /x"),
    ("link-and-unlink", "mkdir a; create x; link x a/y; link x z", "unlink z; link x w; fsync /x"),
    (
        "link-after-log",
        "mkdir a; create x",
        "write x 0+300; fsync /x; link x a/y; create z; fsync /z",
    ),
    ("link-after-log-dir", "mkdir a; create x", "write x 0+300; fsync /x; link x a/y; fsync /a"),
    ("unlink-one-of-two", "mkdir a; create x; link x a/y", "unlink a/y; fsync /x"),
    ("unlink-one-of-two-dir", "mkdir a; create x; link x a/y", "unlink a/y; fsync /a"),
    (
        "unlink-after-log",
        "mkdir a; create x; link x a/y",
        "write x 0+9; fsync /x; unlink a/y; fsync /x",
    ),
    ("link-in-new-dir", "create x", "mkdir a; link x a/y; fsync /x"),
    ("unnamed", "mkdir a", "unnamed a/x; write a/x 0+5000; fsync /a/x"),
    // Three files had a name, one after the other. Afterwards the name is gone, and does not lead
    // to the first file again.
    (
        "a-name-of-three",
        "mkdir d; mkdir e",
        "create d/a; fsync /d; rename d/a e/1; create d/a; fsync /d/a; rename d/a e/2; fsync /e/2",
    ),
    (
        "all-names-but-one-gone",
        "create x; link x y; link x z; link x w",
        "unlink y; unlink z; unlink w; fsync /x",
    ),
    // A file replaced another one. A sync of the directory alone does not empty it.
    ("replaced-by-an-empty-one", "create x; write x 0+5000", "create n; rename n x; fsync /"),
    (
        "replaced-by-a-hole",
        "create x; write x 0+5000",
        "create n; truncate n 100000; rename n x; fsync /",
    ),
    (
        "replaced-after-log",
        "mkdir a",
        "create a/x; write a/x 0+5000; fsync /a/x; create a/n; write a/n 0+300; rename a/n a/x; fsync /a",
    ),
    (
        "replaced-after-log-of-both",
        "mkdir a; mkdir b; create b/y",
        "create a/x; write a/x 0+5000; fsync /a; create b/n; write b/n 0+9000; fsync /b; rename b/n a/x; fsync /b",
    ),
    // Directories.
    ("dir-over-empty", "mkdir a; mkdir b; create a/x", "rename a b; fsync /b"),
    ("dir-over-empty-parent", "mkdir a; mkdir b; create a/x", "rename a b; fsync /"),
    (
        "dir-over-empty-file",
        "mkdir a; mkdir b; create a/x",
        "rename a b; write b/x 0+10; fsync /b/x",
    ),
    ("dir-moved", "mkdir a; mkdir a/c; mkdir b; create a/c/x", "rename a/c b/c; fsync /b/c"),
    (
        "dir-moved-file",
        "mkdir a; mkdir a/c; mkdir b; create a/c/x",
        "rename a/c b/c; write b/c/x 0+9; fsync /b/c/x",
    ),
    (
        "new-tree",
        "",
        "mkdir a; mkdir a/b; mkdir a/b/c; create a/b/c/x; write a/b/c/x 0+9; fsync /a/b/c/x",
    ),
    (
        "new-tree-dir",
        "",
        "mkdir a; mkdir a/b; mkdir a/b/c; create a/b/c/x; symlink a/b/l; write a/b/c/x 0+9; fsync /a",
    ),
    (
        "deleted-dir",
        "mkdir a; mkdir a/b; create a/b/x",
        "unlink a/b/x; rmdir a/b; rmdir a; create b; fsync /",
    ),
    (
        "deleted-and-made",
        "mkdir a; create a/x",
        "unlink a/x; rmdir a; mkdir a; create a/y; write a/y 0+9; fsync /a/y",
    ),
    (
        "log-twice",
        "mkdir a; create a/x; create a/w",
        "unlink a/x; create a/y; fsync /a; unlink a/y; unlink a/w; create a/z; fsync /a",
    ),
    ("log-and-delete", "mkdir a", "create a/x; fsync /a/x; unlink a/x; fsync /a"),
    ("log-and-forget", "mkdir a", "create a/x; fsync /a; unlink a/x; create a/y; fsync /a/y"),
    // Data.
    ("append", "create x; write x 0+100000", "write x 100000+50000; fsync /x"),
    ("overwrite", "create x; write x 0+1000000", "write x 77000+5000; fsync /x"),
    (
        "overwrite-twice",
        "create x; write x 0+300000",
        "write x 8000+9000; fsync /x; write x 12000+9000; fsync /x",
    ),
    (
        "inline",
        "create x; write x 0+2; create y; write y 0+2",
        "write x 0+3; fsync /x; write y 2+2000; fsync /y",
    ),
    (
        "inline-grows",
        "create x; write x 0+100",
        "write x 100+50; fsync /x; write x 150+9000; fsync /x",
    ),
    ("truncate", "create x; write x 0+100000", "truncate x 5000; fsync /x"),
    (
        "truncate-to-nothing",
        "create x; write x 0+100000",
        "truncate x 0; fsync /x; write x 0+10; fsync /x",
    ),
    (
        "truncate-and-write",
        "create x; write x 0+100000",
        "truncate x 5000; truncate x 50000; write x 50000+9; fsync /x",
    ),
    ("hole-at-end", "create x; write x 0+65536", "punch x 40960+24576; fsync /x"),
    ("hole-at-end-logged", "create x", "write x 0+65536; fsync /x; punch x 40960+24576; fsync /x"),
    ("hole-inside", "create x; write x 0+1048576", "punch x 40960+245760; fsync /x"),
    ("hole-grown", "create x; write x 0+65536", "truncate x 1048576; fsync /x"),
    ("prealloc-behind", "create x; write x 0+65536", "allocate-behind x 65536+131072; fsync /x"),
    (
        "prealloc-behind-logged",
        "create x; write x 0+65536",
        "write x 0+9; fsync /x; allocate-behind x 65536+131072; fsync /x",
    ),
    ("prealloc-written", "create x; allocate x 0+262144", "write x 12288+65536; fsync /x"),
    (
        "prealloc-cut",
        "create x; write x 0+65536; allocate-behind x 65536+131072",
        "truncate x 70000; fsync /x",
    ),
    ("collapse", "create x; write x 0+262144", "collapse x 8192+8192; fsync /x"),
    (
        "insert",
        "create x; write x 0+65536",
        "insert x 8192+8192; fsync /x; insert x 4096+4096; fsync /x",
    ),
    ("zero", "create x; write x 0+65536", "zero x 5000+30000; fsync /x"),
    (
        "reflink",
        "create x; write x 0+262144; create y; create z",
        "copy x y; fsync /y; copy x z; fsync /z",
    ),
    (
        "reflink-new",
        "",
        "create x; write x 0+262144; create y; copy x y; fsync /x; write y 28672+9000; fsync /y",
    ),
    ("reflink-and-delete", "create x; write x 0+262144; create y", "copy x y; unlink x; fsync /y"),
    (
        "nocow",
        "create x; flags x C; write x 0+65536",
        "write x 12288+9000; write x 65536+90000; fsync /x",
    ),
    (
        "come-and-gone",
        "create y",
        "create x; write x 0+262144; fsync /x; truncate x 0; write y 0+262144; fsync /y",
    ),
    // Data alone.
    ("data-appended", "create x; write x 0+5000", "write x 5000+9000; fdatasync /x"),
    ("data-of-a-new-file", "", "create x; write x 0+50; fdatasync /x; truncate x 20; fdatasync /x"),
    (
        "data-in-place",
        "create x; flags x C; write x 0+65536",
        "write x 0+4096; fdatasync /x; write x 8192+9000; fdatasync /x; write x 60000+9000; fdatasync /x",
    ),
    (
        "data-in-place-logged",
        "create x; flags x C; write x 0+65536",
        "chmod x 600; fsync /x; write x 4096+100; fdatasync /x; link x y; write x 5000+100; fdatasync /x",
    ),
    ("data-and-mode", "create x; write x 0+5000", "chmod x 600; fdatasync /x"),
    // Attributes.
    (
        "xattr-removed",
        "create x; setxattr x user.one 10; setxattr x user.two 10",
        "write x 0+10; fsync /x; removexattr x user.one; fsync /x",
    ),
    (
        "xattr-dir",
        "mkdir a; setxattr a user.one 10",
        "removexattr a user.one; setxattr a user.two 10; fsync /a",
    ),
    (
        "xattr-all-gone",
        "create x; setxattr x user.one 10",
        "fsync /x; removexattr x user.one; fsync /x",
    ),
    ("mode", "create x", "chmod x 600; fsync /x"),
    ("open-and-gone", "create x; write x 0+9; create y", "open x; unlink x; write y 0+9; fsync /y"),
    ("symlink", "symlink l", "unlink l; symlink l; create x; fsync /x; fsync /"),
    // A snapshot's data is older than the snapshot. An fsync that takes it for stored loses it.
    ("snapshot", "subvolume a; create a/x; write a/x 0+9000", "snapshot a b; fsync /b/x"),
    ("snapshot-root", "subvolume a; create a/x", "write a/x 0+100; snapshot a b; fsync /b"),
    ("subvolume", "mkdir a", "subvolume a/s; create a/s/x; fsync /a/s/x"),
    (
        "subvolume-moved",
        "subvolume a; create a/x; mkdir b",
        "rename a b/a; write b/a/x 0+50; fsync /b/a/x",
    ),
    // A sync in between starts a new log.
    ("log-sync-log", "mkdir a", "create a/x; fsync /a/x; sync; rename a/x a/y; fsync /a"),
];

fn workload((name, setup, steps): &LogStory) -> Workload {
    Workload::parse(name, setup, steps).unwrap_or_else(|problem| panic!("{name}: {problem}"))
}

/// Does one story alone.
fn alone(name: &str) {
    let Some(judges) = judges::require() else { return };
    let story = STORIES.iter().find(|(known, ..)| *known == name).expect("a story");
    let mut tally = WorkloadCounts::default();
    run_together(&judges, PLAIN, &[workload(story)], &mut tally);
    tally.tell();
}

macro_rules! stories {
    ($($test:ident: $name:literal;)*) => {$(
        #[test]
        fn $test() {
            alone($name);
        }
    )*};
}

stories! {
    a_renamed_file_that_is_synced: "rename-file";
    a_rename_whose_new_parent_is_synced: "rename-new-parent";
    a_rename_whose_old_parent_is_synced: "rename-old-parent";
    a_name_that_is_taken_over_by_a_synced_file: "rename-and-new-file";
    a_name_that_is_replaced: "replace";
    links_are_counted: "link-count";
    a_link_to_a_file_that_was_logged_before: "link-after-log";
    a_directory_over_an_empty_one: "dir-over-empty";
    a_hole_at_the_end: "hole-at-end";
    space_preallocated_behind_the_end: "prealloc-behind";
    an_attribute_removed_after_a_log: "xattr-removed";
    a_snapshot_of_which_a_file_is_synced: "snapshot";
    a_name_that_three_had: "a-name-of-three";
    names_that_are_gone_but_for_one: "all-names-but-one-gone";
    a_file_replaced_by_one_that_holds_nothing: "replaced-by-a-hole";
    a_logged_file_that_is_replaced: "replaced-after-log";
    data_that_is_synced_in_place: "data-in-place-logged";
}

#[test]
fn all_of_them_on_all_kinds_of_volumes() {
    let Some(judges) = judges::require() else { return };
    let all: Vec<_> = STORIES.iter().map(workload).collect();
    for shape in shapes() {
        let mut tally = WorkloadCounts::default();
        for part in all.chunks(24) {
            run_together(&judges, shape, part, &mut tally);
        }
        print!("{shape:?}: ");
        tally.tell();
    }
}

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 5 };

/// Does `story` on an open volume, and returns the volume as it is cut then.
pub(crate) fn cut(judges: &Judges, story: impl FnOnce(&std::sync::Arc<BtrfsVolume>)) -> Disks {
    let disks = make(judges, PLAIN);
    let volume = open(&disks, PLAIN);
    story(&volume);
    let cut = disks.copy(judges);
    drop(volume);
    println!("{} logs", logs(&cut));
    cut
}

pub(crate) fn place<'n>(fs: &Filesystem, name: &'n str) -> EntryPlace<'n> {
    EntryPlace { dir: fs.root(), name: name.as_bytes() }
}

/// Makes or finds a file in the root, writes to it and syncs it.
pub(super) fn write_and_fsync(fs: &Filesystem, name: &str, data: &[u8]) -> FileId {
    let file = fs.lookup(fs.root(), name.as_bytes());
    let file = file.or_else(|_| fs.create(place(fs, name), &new_file())).expect("a file");
    fs.write(file, 0, data, AT).expect("there is room");
    fs.fsync(file).expect("an fsync");
    file
}

/// The contents of a file at a path below the top, if it is there.
pub(crate) fn held(fs: &Filesystem, path: &str) -> Option<Vec<u8>> {
    let find = |dir: FileId, name: &str| fs.lookup(dir, name.as_bytes());
    let file = path.split('/').try_fold(fs.root(), find).ok()?;
    let size = fs.attr(file).expect("a file").size;
    let mut data = vec![0; usize::try_from(size).expect("small")];
    fs.read(file, 0, &mut data).expect("data");
    Some(data)
}

/// A snapshot includes what the log holds, so the log ends before it. An fsync after it starts
/// another log.
#[test]
fn a_snapshot_between_log_and_commit() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let (top, fs) = (top(volume), subvolume(volume, "s"));
        fs.create(place(&fs, "x"), &new_file()).expect("a file");
        top.sync().expect("a commit");
        write_and_fsync(&fs, "x", &[2; 9000]);
        let id = offshoot_btrfs::SubvolumeId { 0: fs.root().dev };
        top.snapshot(id, place(&top, "t"), false, AT).expect("a snapshot");
        write_and_fsync(&fs, "y", &[3; 5000]);
        write_and_fsync(&fs, "x", &[4; 100]);
    });
    judge(&judges, &cut, "a snapshot", 4);
    let found = read_only(cut.devices());
    assert_eq!(held(&found, "s/y"), Some(vec![3; 5000]));
    assert_eq!(held(&found, "s/x"), Some([vec![4; 100], vec![2; 8900]].concat()));
    // The snapshot came after a sync, and before the later writes.
    if let Some(x) = held(&found, "t/x") {
        assert_eq!(x, vec![2; 9000]);
        assert_eq!(held(&found, "t/y"), None);
    }
}

/// The log of a subvolume that was deleted afterwards is not replayed.
#[test]
fn a_subvolume_deleted_after_its_fsync() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let (top, [s, t]) = (top(volume), ["s", "t"].map(|name| subvolume(volume, name)));
        s.create(place(&s, "x"), &new_file()).expect("a file");
        top.sync().expect("a commit");
        write_and_fsync(&s, "x", &[2; 9000]);
        top.delete_subvolume(place(&top, "s"), AT).expect("it can be deleted");
        write_and_fsync(&t, "y", &[3; 5000]);
    });
    judge(&judges, &cut, "a deleted subvolume", 2);
    let found = read_only(cut.devices());
    assert_eq!(held(&found, "t/y"), Some(vec![3; 5000]));
    let left = held(&found, "s/x");
    assert!(left.is_none() || left == Some(vec![2; 9000]), "half of it: {left:?}");
}

/// An orphan is known only to the process that has it open. An fsync of it brings no name back, and
/// loses nothing else.
#[test]
fn an_orphan_that_is_synced() {
    let Some(judges) = judges::require() else { return };
    for is_logged_before in [false, true] {
        let cut = cut(&judges, |volume| {
            let fs = top(volume);
            let x = write_and_fsync(&fs, "x", &[1; 9000]);
            fs.sync().expect("a commit");
            if is_logged_before {
                write_and_fsync(&fs, "x", &[2; 4000]);
            }
            fs.open(x).expect("it is there");
            fs.unlink(place(&fs, "x"), AT).expect("it is there");
            fs.write(x, 0, &[3; 5000], AT).expect("there is room");
            fs.fsync(x).expect("an fsync");
            write_and_fsync(&fs, "y", &[4; 5000]);
            fs.fsync(fs.root()).expect("an fsync");
        });
        judge(&judges, &cut, "an orphan", 1);
        let found = read_only(cut.devices());
        assert_eq!(held(&found, "y"), Some(vec![4; 5000]));
        assert_eq!(held(&found, "x"), None);
    }
}

/// A new file gets the name that an orphan had, and is synced.
#[test]
fn the_name_of_an_orphan() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let x = write_and_fsync(&fs, "x", &[1; 9000]);
        fs.sync().expect("a commit");
        fs.open(x).expect("it is there");
        fs.unlink(place(&fs, "x"), AT).expect("it is there");
        write_and_fsync(&fs, "x", &[4; 5000]);
    });
    judge(&judges, &cut, "the name of an orphan", 1);
    assert_eq!(held(&read_only(cut.devices()), "x"), Some(vec![4; 5000]));
}

/// A long log: several threads fsync at once, again and again without a commit.
#[test]
fn many_fsyncs_at_once() {
    let Some(judges) = judges::require() else { return };
    let mut expected = Vec::new();
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let work = |thread: u8| {
            let name = format!("file{thread}");
            for round in 1..=40 {
                write_and_fsync(&fs, &name, &vec![round; 700 * usize::from(round)]);
                let new = format!("new{thread}-{round}");
                write_and_fsync(&fs, &new, &[thread; 300]);
                if round.is_multiple_of(4) {
                    fs.rename(place(&fs, &new), place(&fs, &format!("moved{thread}")), AT)
                        .expect("it is there");
                    fs.fsync(fs.root()).expect("an fsync");
                }
            }
        };
        std::thread::scope(|scope| {
            for thread in 1..=4 {
                let work = &work;
                scope.spawn(move || work(thread));
            }
        });
    });
    for thread in 1..=4 {
        expected.push((format!("file{thread}"), Some(vec![40; 28000])));
        expected.push((format!("moved{thread}"), Some(vec![thread; 300])));
        expected.push((format!("new{thread}-39"), Some(vec![thread; 300])));
        expected.push((format!("new{thread}-40"), None));
    }
    judge(&judges, &cut, "many at once", 4 * 32);
    let volume = BtrfsVolume::open(cut.devices(), &EngineOptions::default()).expect("it opens");
    let fs = top(&volume);
    for (name, data) in expected {
        assert!(held(&fs, &name) == data, "{name} is not as it was synced");
    }
}

/// A file took the name of another, and was not synced itself. After a sync of its directory it
/// holds what it held, and is not empty.
#[test]
fn a_file_replaced_in_a_directory_that_is_synced() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let x = fs.create(place(&fs, "x"), &new_file()).expect("a file");
        fs.write(x, 0, &[1; 5000], AT).expect("there is room");
        fs.sync().expect("a commit");
        let new = fs.create(place(&fs, "new"), &new_file()).expect("a file");
        fs.write(new, 0, &[2; 7000], AT).expect("there is room");
        fs.rename(place(&fs, "new"), place(&fs, "x"), AT).expect("a rename");
        fs.fsync(fs.root()).expect("an fsync");
    });
    assert_eq!(logs(&cut), 1, "it is logged");
    judge(&judges, &cut, "replaced", 1);
    assert_eq!(held(&read_only(cut.devices()), "x"), Some(vec![2; 7000]));
}

/// The place of a subvolume in a snapshot has no item that a log could hold.
#[test]
fn fsync_of_the_place_of_a_subvolume() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let (fs, outer) = (top(volume), subvolume(volume, "outer"));
        outer.create_subvolume(place(&outer, "inner"), &new_file()).expect("a subvolume");
        let outer = SubvolumeId { 0: outer.root().dev };
        fs.snapshot(outer, place(&fs, "snapshot"), false, AT).expect("a snapshot");
        let root = fs.lookup(fs.root(), b"snapshot").expect("it is there");
        let snapshot = volume.filesystem(SubvolumeId { 0: root.dev }).expect("it is there");
        let inner = snapshot.lookup(root, b"inner").expect("its place");
        snapshot.fsync(inner).expect("an fsync");
    });
    judge(&judges, &cut, "placeholder", 1);
}

/// An fsync of a file without a name does not force later fsyncs to commit.
#[test]
fn fsync_of_a_file_without_a_name_makes_no_commit() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        fs.sync().expect("a commit");
        let file = fs.create_unnamed(fs.root(), true, &new_file()).expect("a file");
        fs.write(file, 0, &[1; 5000], AT).expect("there is room");
        fs.fsync(file).expect("an fsync");
        let commits = volume.stats().commits;
        write_and_fsync(&fs, "y", &[2; 9000]);
        assert_eq!(volume.stats().commits, commits);
    });
    assert_eq!(logs(&cut), 1);
    judge(&judges, &cut, "nameless", 1);
    assert_eq!(held(&read_only(cut.devices()), "y"), Some(vec![2; 9000]));
}

/// A log refers to data that files share, or that has moved within a file since. A write to such a
/// file does not change that data in place.
#[test]
fn data_that_a_log_has_is_not_written_in_place() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let [a, b, shifted] = ["a", "b", "shifted"]
            .map(|name| fs.create(place(&fs, name), &new_file()).expect("a file"));
        for file in [a, b, shifted] {
            fs.set_flags(file, FileFlags::NODATACOW, AT).expect("flags");
        }
        fs.write(a, 0, &vec![1; 65536], AT).expect("there is room");
        fs.sync().expect("a commit");
        let at = |file| FilePosition { file, offset: 0 };
        fs.clone_range(at(a), at(b), 0, AT).expect("a clone");
        fs.fsync(b).expect("an fsync");
        fs.write(shifted, 0, &[vec![1; 65536], vec![3; 65536]].concat(), AT)
            .expect("there is room");
        fs.fsync(shifted).expect("an fsync");
        // No fsync follows these changes. The last calls have the engine write back what is
        // buffered.
        fs.set_attr(b, &SetAttr { size: Some(0), ..SetAttr::default() }, AT).expect("a size");
        fs.write(a, 0, &vec![2; 65536], AT).expect("there is room");
        fs.fallocate(a, Fallocate::PunchHole, 1 << 20, 4096, AT).expect("nothing is there");
        fs.fallocate(shifted, Fallocate::Collapse, 0, 65536, AT).expect("it moves");
        fs.write(shifted, 0, &vec![2; 65536], AT).expect("there is room");
        fs.fallocate(shifted, Fallocate::Collapse, 0, 4096, AT).expect("it moves");
    });
    assert_eq!(logs(&cut), 1);
    judge(&judges, &cut, "in place", 1);
    let fs = read_only(cut.devices());
    assert!(held(&fs, "b") == Some(vec![1; 65536]), "as its fsync left it");
    assert!(held(&fs, "shifted") == Some([vec![1; 65536], vec![3; 65536]].concat()), "as well");
}

/// A log becomes valid by a superblock that repeats the last commit. That commit must already have
/// all feature bits that the log needs.
#[test]
fn the_first_compressed_file_makes_a_commit() {
    let Some(judges) = judges::require() else { return };
    let shape = LogShape { mount: ",compress-force=zstd", ..PLAIN };
    let disks = make(&judges, PLAIN);
    let volume = open(&disks, shape);
    let fs = top(&volume);
    write_and_fsync(&fs, "x", &vec![1; 1 << 17]);
    assert_eq!(volume.stats().fsyncs_with_new_feature, 1);
    write_and_fsync(&fs, "x", &vec![2; 1 << 17]);
    assert_eq!(volume.stats().fsyncs_logged, 1);
    let cut = disks.copy(&judges);
    judge(&judges, &cut, "compressed", 1);
    assert!(held(&read_only(cut.devices()), "x") == Some(vec![2; 1 << 17]));
}
