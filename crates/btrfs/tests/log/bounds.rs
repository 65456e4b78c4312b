//! What a log leaves out, and when an fsync commits instead: many changes, little room, many names,
//! and data alone.

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::names::colliding;
use offshoot_vfs::{
    EntryPlace, Fallocate, FileFlags, FilePosition, FileSystem, FileSystemMut, SetAttr, Timestamp,
};

use crate::by_us::{new_file, open};
use crate::cut::{PLAIN, judge, logs, read_only, top};
use crate::stories::{cut, held, place};

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 9 };
const SECTOR: usize = 4096;

/// A large file changes in more ranges than the log remembers one by one. The fsync does not log
/// the unchanged data between them.
#[test]
fn what_is_between_many_changes_is_not_logged() {
    const EXTENTS: u64 = 6000;
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let [x, y] =
            ["x", "y"].map(|name| fs.create(place(&fs, name), &new_file()).expect("a file"));
        // By turns, so that no two extents of one file merge.
        for number in 0..EXTENTS {
            for file in [x, y] {
                fs.write_direct(file, number * 4096, &[1; SECTOR], AT).expect("there is room");
            }
        }
        fs.sync().expect("a commit");
        for number in (0..EXTENTS).step_by(60) {
            fs.write(x, number * 4096, &[2; SECTOR], AT).expect("there is room");
        }
        let before = volume.stats();
        fs.fsync(x).expect("an fsync");
        let stats = volume.stats();
        assert_eq!(stats.fsyncs_logged, before.fsyncs_logged + 1, "{stats:?}");
        let items = stats.log_items - before.log_items;
        assert!(items < EXTENTS / 2, "{items} items for {} places", EXTENTS / 60);
    });
    judge(&judges, &cut, "many places", 1);
}

/// For more extents than a log is worth, the fsync commits.
#[test]
fn an_fsync_of_very_many_extents_makes_a_commit() {
    let Some(judges) = judges::require() else { return };
    // The volume is so large that such a log would fit.
    let disks = Disks::create(&judges, 1, 4096);
    disks.mkfs(&[]);
    let volume = open(&disks, PLAIN);
    let fs = top(&volume);
    let [x, y] = ["x", "y"].map(|name| fs.create(place(&fs, name), &new_file()).expect("a file"));
    fs.write(x, 0, &[1; 2 * SECTOR], AT).expect("there is room");
    fs.sync().expect("a commit");
    for number in 0..66_000 {
        // The second sector and the first by turns, so that no two extents merge.
        let from = FilePosition { file: x, offset: (number + 1) % 2 * 4096 };
        fs.clone_range(from, FilePosition { file: y, offset: number * 4096 }, 4096, AT)
            .expect("room");
    }
    fs.fsync(y).expect("a commit");
    let stats = volume.stats();
    assert_eq!(stats.fsyncs_of_too_much, 1, "{stats:?}");
    assert_eq!((stats.commits_for_fsync, stats.fsyncs_logged), (1, 0), "{stats:?}");
    drop((fs, volume));
    disks.assert_checks();
}

/// A file without a name was extended without data. It has its new length after a sync of the
/// directory in which it then got a name.
#[test]
fn an_unnamed_file_that_is_a_hole() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        fs.sync().expect("a commit");
        let file = fs.create_unnamed(fs.root(), true, &new_file()).expect("a file");
        let size = SetAttr { size: Some(1 << 20), ..SetAttr::default() };
        fs.set_attr(file, &size, AT).expect("a size");
        fs.fsync(file).expect("an fsync");
        fs.link(file, place(&fs, "f"), AT).expect("a name");
        fs.fsync(fs.root()).expect("an fsync");
    });
    assert_eq!(logs(&cut), 1);
    judge(&judges, &cut, "a hole", 1);
    assert!(held(&read_only(cut.devices()), "f") == Some(vec![0; 1 << 20]));
}

/// Names that kernels before 6.16 count once too often, and names that do not fit beside the names
/// of the last commit.
#[test]
fn names_that_a_log_is_not_good_for() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let names = colliding(b"name", 200, 60);
        let at = |name| EntryPlace { dir: fs.root(), name };
        for name in &names[..20] {
            fs.create(at(name), &new_file()).expect("a file");
        }
        fs.sync().expect("a commit");
        for (old, new) in names[..15].iter().zip(names[50..].iter().cycle()) {
            fs.unlink(at(old), AT).expect("it is there");
            if fs.lookup(fs.root(), new).is_err() {
                fs.create(at(new), &new_file()).expect("a file");
            }
        }
        let new = fs.lookup(fs.root(), &names[55]).expect("it is there");
        fs.fsync(new).expect("an fsync");
        assert_eq!(volume.stats().fsyncs_with_many_names, 0, "they all fit");
        fs.sync().expect("a commit");
        // Many links of one file. The first of them are removed.
        let dir = fs.mkdir(place(&fs, "dir"), &new_file()).expect("a directory");
        let file = fs.create(EntryPlace { dir, name: b"file" }, &new_file()).expect("a file");
        let link = |number: u32| format!("{number:0200}");
        for number in 0..100 {
            fs.link(file, EntryPlace { dir, name: link(number).as_bytes() }, AT).expect("a link");
        }
        fs.fsync(dir).expect("an fsync");
        assert_eq!(volume.stats().fsyncs_with_many_names, 1);
    });
    judge(&judges, &cut, "many names", 100);
}

/// How a log gets a name that has no room beside the names of its directory, and the entry with it.
#[derive(Clone, Copy, Debug)]
enum LongNameOrder {
    /// The test syncs the file, and then its directory.
    FileFirst,
    /// The test syncs the directory, and this is the only name that the file still has.
    OnlyName,
    /// The same, among many entries.
    OnlyNameOfMany,
    /// The test syncs a directory in which the file has another name. From there the log reaches
    /// the directory with this name.
    Reached,
}

/// Kernels before 6.16 count a name in an INODE_EXTREF once too often if the log also has its
/// entry. So no log has both, whichever of them comes first.
#[test]
fn an_extended_name_and_its_entry_are_not_in_one_log() {
    use LongNameOrder::{FileFirst, OnlyName, OnlyNameOfMany, Reached};
    let Some(judges) = judges::require() else { return };
    for order in [FileFirst, OnlyName, OnlyNameOfMany, Reached] {
        let cut = cut(&judges, |volume| {
            let fs = top(volume);
            let top = fs.mkdir(place(&fs, "top"), &new_file()).expect("a directory");
            fs.sync().expect("a commit");
            let dir = match order {
                Reached => fs.mkdir(EntryPlace { dir: top, name: b"dir" }, &new_file()),
                _ => Ok(top),
            };
            let dir = dir.expect("a directory");
            let file =
                fs.create(EntryPlace { dir: top, name: b"file" }, &new_file()).expect("a file");
            let links: Vec<_> = (0..100).map(|number| format!("{number:0200}")).collect();
            for link in &links {
                fs.link(file, EntryPlace { dir, name: link.as_bytes() }, AT).expect("a link");
            }
            if matches!(order, OnlyName | OnlyNameOfMany) {
                for gone in links[..99].iter().map(String::as_str).chain(["file"]) {
                    fs.unlink(EntryPlace { dir, name: gone.as_bytes() }, AT).expect("it is there");
                }
            }
            if matches!(order, OnlyNameOfMany) {
                for number in 0..100 {
                    let name = format!("new{number}");
                    fs.create(EntryPlace { dir, name: name.as_bytes() }, &new_file())
                        .expect("a file");
                }
            }
            let first = if matches!(order, FileFirst) { file } else { top };
            fs.fsync(first).expect("an fsync");
            fs.fsync(top).expect("an fsync");
            assert_eq!(volume.stats().fsyncs_with_many_names, 1, "{order:?}");
        });
        judge(&judges, &cut, &format!("{order:?}"), 1);
    }
}

/// More names of one hash than one item holds: old ones that were removed, and new ones.
#[test]
fn names_of_one_hash_that_do_not_fit_together() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let names = colliding(b"name", 200, 100);
        let at = |name| EntryPlace { dir: fs.root(), name };
        for name in &names[..50] {
            fs.create(at(name), &new_file()).expect("a file");
        }
        fs.sync().expect("a commit");
        for (old, new) in names[..45].iter().zip(&names[50..]) {
            fs.unlink(at(old), AT).expect("it is there");
            fs.create(at(new), &new_file()).expect("a file");
        }
        fs.fsync(fs.root()).expect("an fsync");
        assert_eq!(volume.stats().fsyncs_with_many_names, 1);
    });
    judge(&judges, &cut, "names of one hash", 50);
}

/// An fdatasync of data that was written in place waits for a barrier and nothing else.
#[test]
fn fdatasync_in_place_writes_no_log() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let file = fs.create(place(&fs, "x"), &new_file()).expect("a file");
        fs.set_flags(file, FileFlags::NODATACOW, AT).expect("flags");
        fs.write(file, 0, &vec![1; 1 << 20], AT).expect("there is room");
        fs.sync().expect("a commit");
        let before = volume.stats();
        for number in 0..20_u8 {
            fs.write(file, u64::from(number) * 8192, &[number; SECTOR], AT).expect("room");
            fs.fdatasync(file).expect("a barrier");
        }
        let after = volume.stats();
        assert_eq!(after.fsyncs_in_place - before.fsyncs_in_place, 20);
        assert_eq!((after.commits, after.log_writes), (before.commits, before.log_writes));
        // A new length has to be logged; a new time need not be.
        fs.write(file, 1 << 20, &[7; 100], AT).expect("there is room");
        fs.fdatasync(file).expect("an fdatasync");
        assert_eq!(volume.stats().fsyncs_logged, after.fsyncs_logged + 1);
    });
    judge(&judges, &cut, "in place", 1);
    let data = held(&read_only(cut.devices()), "x").expect("it is there");
    assert_eq!(data.len(), (1 << 20) + 100);
    assert!(
        (0..20_u8).all(|number| data[usize::from(number) * 8192..][..SECTOR] == [number; SECTOR])
    );
}

/// On a full volume a write to preallocated space is accepted, and other writes are refused. Then a
/// clone or a log forbids to write there in place until a commit. The data is not lost, and its
/// fsync is not refused.
#[test]
fn data_for_preallocated_space_on_a_full_volume() {
    let Some(judges) = judges::require() else { return };
    let cut = cut(&judges, |volume| {
        let fs = top(volume);
        let create = |name| fs.create(place(&fs, name), &new_file()).expect("a file");
        let [kept, old, clone] = ["kept", "old", "clone"].map(create);
        let keep = Fallocate::Allocate { keeps_size: false };
        fs.fallocate(kept, keep, 0, 1 << 20, AT).expect("there is room");
        fs.write(old, 0, &vec![1; 65536], AT).expect("there is room");
        fs.sync().expect("a commit");
        let filler = create("filler");
        let piece = vec![9; 1 << 20];
        let mut at = 0;
        for len in [1 << 20, SECTOR] {
            while fs.write(filler, at, &piece[..len], AT).is_ok() {
                at += len as u64;
            }
        }
        fs.sync().expect("a commit");
        fs.write(kept, 0, &vec![2; 1 << 20], AT).expect("it has space of its own");
        let [from, to] = [old, clone].map(|file| FilePosition { file, offset: 0 });
        fs.clone_range(from, to, 0, AT).expect("it takes no data");
        let before = volume.stats();
        fs.fsync(clone).expect("an fsync");
        let logged = volume.stats();
        assert_eq!(logged.fsyncs_logged, before.fsyncs_logged + 1, "{logged:?}");
        assert_eq!(logged.commits, before.commits, "{logged:?}");
        fs.fsync(kept).expect("it was accepted");
        assert_eq!(volume.stats().commits, before.commits + 1, "{:?}", volume.stats());
    });
    judge(&judges, &cut, "preallocated", 3);
    assert!(held(&read_only(cut.devices()), "kept") == Some(vec![2; 1 << 20]));
}
