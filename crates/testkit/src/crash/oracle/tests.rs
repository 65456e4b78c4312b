//! Tests that the oracle rejects what must not be found and accepts what may be.

mod ordered;

use offshoot_vfs::{Fallocate, FileFlags, FileType, Timestamp};

use super::{History, PromiseMaker};
use crate::crash::manners::EngineManners;
use crate::crash::picture::{Picture, PictureName, ROOT};
use crate::crash::record::history;
use crate::crash::workload::{WorkloadOp, WorkloadStep};
use crate::model::Model;

fn of(steps: &[WorkloadStep]) -> History {
    history(&Model::made_at(Timestamp::default()), 1, steps, &[], EngineManners::default())
        .expect("it can be done")
}

fn create(path: &str) -> WorkloadStep {
    WorkloadStep::Do(WorkloadOp::Create(path.into()))
}

fn write(path: &str, offset: u64, len: usize) -> WorkloadStep {
    WorkloadStep::Do(WorkloadOp::Write { path: path.into(), offset, len })
}

fn rename(from: &str, to: &str) -> WorkloadStep {
    WorkloadStep::Do(WorkloadOp::Rename(from.into(), to.into()))
}

fn name(name: &str) -> PictureName {
    (ROOT, name.as_bytes().to_vec())
}

/// Sets the size of every directory to what its names add up to.
fn settle(picture: &mut Picture) {
    let Picture { names, files } = picture;
    for (id, file) in files {
        let names = names.keys().filter(|(dir, _)| dir == id);
        if file.kind == FileType::Directory {
            file.size = names.map(|(_, name)| 2 * name.len() as u64).sum();
        }
    }
}

/// Whether the picture is allowed after the first `kept` promises and the operations up to
/// `latest`.
fn allows(history: &History, found: &Picture, kept: usize, latest: usize) -> bool {
    history.judge(found, &(0..kept).collect::<Vec<_>>(), latest).is_empty()
}

/// The moments that may be found whole after these promises and operations.
fn allowed(history: &History, kept: usize, latest: usize) -> Vec<usize> {
    let pictures = 0..history.pictures.len();
    pictures.filter(|&at| allows(history, &history.pictures[at], kept, latest)).collect()
}

#[test]
fn moments_between_the_last_promise_and_the_latest_operation() {
    let steps =
        [create("a"), WorkloadStep::Sync, write("a", 0, 100), rename("a", "b"), WorkloadStep::Sync];
    let history = of(&steps);
    assert_eq!(allowed(&history, 0, 0), [0]);
    assert_eq!(allowed(&history, 0, 1), [0, 1]);
    assert_eq!(allowed(&history, 1, 1), [1]);
    assert_eq!(allowed(&history, 1, 3), [1, 2, 3]);
    assert_eq!(allowed(&history, 2, 3), [3]);
}

#[test]
fn a_rename_with_both_names_or_none() {
    let history =
        of(&[create("a"), WorkloadStep::Sync, rename("a", "b"), WorkloadStep::Fsync("b".into())]);
    let mut both = history.pictures[2].clone();
    both.names.extend(history.pictures[1].names.clone());
    settle(&mut both);
    assert!(!allows(&history, &both, 1, 2));
    let mut none = history.pictures[1].clone();
    none.names.clear();
    settle(&mut none);
    assert!(!allows(&history, &none, 1, 2));
    none.files.remove(&1);
    assert!(!allows(&history, &none, 1, 2), "the file went with its name");
}

#[test]
fn a_rename_over_a_file_that_leaves_both_or_the_wrong_one() {
    let fsync = WorkloadStep::Fsync("b".into());
    let steps = [create("a"), create("b"), WorkloadStep::Sync, rename("a", "b"), fsync];
    let history = of(&steps);
    let mut found = history.pictures[3].clone();
    found.names.insert(name("a"), 2);
    found.files.insert(2, history.pictures[2].files[&2].clone());
    settle(&mut found);
    assert!(!allows(&history, &found, 1, 3), "they changed places");
}

#[test]
fn a_count_of_links_that_is_none_of_names() {
    let link = WorkloadStep::Do(WorkloadOp::Link("a".into(), "b".into()));
    let history = of(&[create("a"), WorkloadStep::Sync, link, WorkloadStep::Fsync("a".into())]);
    let mut found = history.pictures[2].clone();
    found.files.get_mut(&1).expect("the file").nlink = 1;
    assert!(!allows(&history, &found, 1, 2));
}

#[test]
fn a_size_without_the_data() {
    let steps = [create("a"), write("a", 0, 4096), WorkloadStep::Sync, write("a", 4096, 4096)];
    let history = of(&steps);
    let mut found = history.pictures[3].clone();
    let sectors = found.files.get_mut(&1).and_then(|file| file.sectors.as_mut());
    sectors.expect("data")[1] = 0;
    assert!(!allows(&history, &found, 1, 3));
}

#[test]
fn data_that_was_written_back_in_part() {
    let steps = [create("a"), WorkloadStep::Sync, write("a", 0, 3 * 4096)];
    let history = of(&steps);
    let mut found = history.pictures[2].clone();
    let file = found.files.get_mut(&1).expect("the file");
    file.size = 8192;
    file.sectors.as_mut().expect("data").truncate(2);
    assert!(allows(&history, &found, 1, 2));
    // Not if all of it was promised, and not in parts of sectors.
    let promised = of(&[&steps[..], &[WorkloadStep::Fsync("a".into())]].concat());
    assert!(!allows(&promised, &found, 2, 2));
    found.files.get_mut(&1).expect("the file").size = 8000;
    assert!(!allows(&history, &found, 1, 2));
}

#[test]
fn old_data_where_new_data_was_promised() {
    let fsync = WorkloadStep::Fsync("a".into());
    let steps = [create("a"), write("a", 0, 9000), WorkloadStep::Sync, write("a", 0, 9000), fsync];
    let history = of(&steps);
    assert_eq!(allowed(&history, 1, 3), [2, 3]);
    assert_eq!(allowed(&history, 2, 3), [3]);
}

#[test]
fn an_fsync_promises_one_file_and_a_sync_all() {
    let chmod = WorkloadStep::Do(WorkloadOp::Chmod("a".into(), 0o600));
    let before = [create("a"), WorkloadStep::Sync, chmod, create("b")];
    // The found state lacks the change of `a`.
    let old = |history: &History| {
        let mut found = history.pictures[3].clone();
        found.files.insert(1, history.pictures[1].files[&1].clone());
        found
    };
    let one = of(&[&before[..], &[WorkloadStep::Fsync("b".into())]].concat());
    assert!(allows(&one, &old(&one), 2, 3));
    assert!(allows(&one, &old(&one), 1, 3), "the log may be written before the fsync returns");
    let all = of(&[&before[..], &[WorkloadStep::Sync]].concat());
    assert!(!allows(&all, &old(&all), 2, 3));
    assert!(!allows(&all, &old(&all), 1, 3), "there are no logs, and a commit is of one moment");
    let mut without = one.pictures[3].clone();
    without.names.remove(&name("b"));
    without.files.remove(&3);
    settle(&mut without);
    assert!(!allows(&one, &without, 2, 3));
}

/// A log may show a file at a later moment, until a sync; after that everything is of one moment
/// again.
#[test]
fn a_sync_ends_what_a_log_may_show() {
    let change = |path: &str| WorkloadStep::Do(WorkloadOp::Chmod(path.into(), 0o600));
    let steps = [create("a"), create("b"), WorkloadStep::Sync, change("a"), change("b")];
    let fsync = WorkloadStep::Fsync("b".into());
    let found = |history: &History, of: usize, is: usize| {
        let mut found = history.pictures[of].clone();
        found.files.insert(1, history.pictures[is].files[&1].clone());
        found
    };
    let logged = of(&[&steps[..], std::slice::from_ref(&fsync)].concat());
    assert!(allows(&logged, &found(&logged, 4, 2), 2, 4));
    let chmod = |path: &str| WorkloadStep::Do(WorkloadOp::Chmod(path.into(), 0o400));
    let more = [WorkloadStep::Sync, chmod("a"), chmod("b")];
    let synced = of(&[&steps[..], &[fsync], &more].concat());
    assert!(!allows(&synced, &found(&synced, 4, 2), 3, 4));
    assert_eq!(allowed(&synced, 3, 6), [4, 5, 6]);
    assert!(!allows(&synced, &found(&synced, 6, 4), 3, 6), "b is newer than a");
}

/// Each name leads to something that it led to at some moment, and yet the rename is half done.
#[test]
fn a_log_with_half_an_operation() {
    let moved = |path: &str| WorkloadStep::Fsync(path.into());
    let dir = |path: &str| WorkloadStep::Do(WorkloadOp::Mkdir(path.into()));
    let steps = [dir("d"), create("a"), WorkloadStep::Sync, rename("a", "d/a"), moved("d")];
    let history = of(&steps);
    let in_dir = (1, b"a".to_vec());
    let mut both = history.pictures[3].clone();
    both.names.insert(name("a"), 2);
    both.files.get_mut(&2).expect("the file").nlink = 2;
    settle(&mut both);
    assert!(!allows(&history, &both, 2, 3));
    let mut none = history.pictures[2].clone();
    none.names.remove(&name("a"));
    none.files.remove(&2);
    settle(&mut none);
    assert!(!allows(&history, &none, 1, 3));
    let mut other = history.pictures[3].clone();
    other.names.remove(&in_dir);
    other.names.insert(name("a"), 2);
    settle(&mut other);
    assert!(!allows(&history, &other, 2, 3), "the names in the directory were promised");
}

/// What the kernel may leave of a move, and of a name that a file gained before it lost another
/// one.
#[test]
fn the_kernel_promises_less_of_names() {
    let dir = || WorkloadStep::Do(WorkloadOp::Mkdir("d".into()));
    let fsync = |path: &str| WorkloadStep::Fsync(path.into());
    let kernels = |steps: &[WorkloadStep]| History { whose: PromiseMaker::Kernels, ..of(steps) };
    let in_dir = (1, b"a".to_vec());
    let found = |history: &History, names: &[&PictureName]| {
        let mut found = history.pictures.last().expect("a moment").clone();
        found.names.retain(|_, id| *id != 2);
        found.names.extend(names.iter().map(|&name| (name.clone(), 2)));
        found.files.get_mut(&2).expect("the file").nlink = u32::try_from(names.len()).expect("2");
        if names.is_empty() {
            found.files.remove(&2);
        }
        settle(&mut found);
        found
    };
    let moved = [dir(), create("a"), WorkloadStep::Sync, rename("a", "d/a")];
    let history = kernels(&[&moved[..], &[fsync("d")]].concat());
    assert!(allows(&history, &found(&history, &[&name("a"), &in_dir]), 2, 3), "both");
    assert!(!allows(&history, &found(&history, &[&name("a")]), 2, 3), "d was synced");
    let history = kernels(&[&moved[..], &[fsync("")]].concat());
    assert!(!allows(&history, &found(&history, &[]), 2, 3), "none");

    let link = WorkloadStep::Do(WorkloadOp::Link("a".into(), "d/a".into()));
    let steps = [
        dir(),
        create("a"),
        WorkloadStep::Sync,
        link,
        WorkloadStep::Do(WorkloadOp::Unlink("a".into())),
        fsync(""),
    ];
    let history = kernels(&steps);
    assert!(allows(&history, &found(&history, &[]), 2, 4), "the link is in no log");
    let history = of(&steps);
    assert!(!allows(&history, &found(&history, &[]), 2, 4), "ours never loses a file");
}

/// A directory is renamed, synced and removed, and another one that takes its name is synced. The
/// kernel's log then says nothing of the first directory, which has its old name again.
#[test]
fn the_kernel_may_give_back_the_name_of_the_last_commit() {
    let mkdir = || WorkloadStep::Do(WorkloadOp::Mkdir("a".into()));
    let fsync = || WorkloadStep::Fsync("b".into());
    let rmdir = WorkloadStep::Do(WorkloadOp::Rmdir("b".into()));
    let moved = [mkdir(), WorkloadStep::Sync, rename("a", "b"), fsync()];
    let mut removed = of(&[&moved[..], &[mkdir(), rmdir, rename("a", "b"), fsync()]].concat());
    removed.forget_times();
    let found = |history: &History| {
        let mut found = history.pictures.last().expect("a moment").clone();
        found.names.insert(name("a"), 1);
        found.names.retain(|name, id| *id != 1 || name.1 == b"a");
        found.files.insert(1, history.pictures[1].files[&1].clone());
        settle(&mut found);
        found
    };
    let state = found(&removed);
    assert!(!allows(&removed, &state, 3, 5), "ours keeps what was synced");
    let removed = History { whose: PromiseMaker::Kernels, ..removed };
    assert!(allows(&removed, &state, 3, 5));
    let stayed = History { whose: PromiseMaker::Kernels, ..of(&moved) };
    assert!(!allows(&stayed, &found(&stayed), 2, 2), "the kernel keeps the name of what stays");
}

/// A file loses its two names one after the other, and another file that takes the second name is
/// synced: the first removal need not be durable.
#[test]
fn operations_that_are_no_move_may_be_found_in_part() {
    let unlink = |path: &str| WorkloadStep::Do(WorkloadOp::Unlink(path.into()));
    let link = WorkloadStep::Do(WorkloadOp::Link("a".into(), "d/a".into()));
    let before =
        [WorkloadStep::Do(WorkloadOp::Mkdir("d".into())), create("a"), link, WorkloadStep::Sync];
    let after = [unlink("d/a"), unlink("a"), create("a"), WorkloadStep::Fsync("a".into())];
    let history = of(&[&before[..], &after].concat());
    let mut found = history.pictures[6].clone();
    found.names.insert((1, b"a".to_vec()), 2);
    found.files.insert(2, history.pictures[4].files[&2].clone());
    for nlink in [1, 2] {
        found.files.get_mut(&2).expect("the file").nlink = nlink;
        settle(&mut found);
        assert_eq!(allows(&history, &found, 2, 6), nlink == 1);
    }
}

/// A file took the name of another file and gave it up again: the earlier file may have the name
/// back.
#[test]
fn a_name_that_was_taken_and_left() {
    let steps = [
        WorkloadStep::Do(WorkloadOp::Mkdir("d".into())),
        create("a"),
        create("d/a"),
        create("d/b"),
        WorkloadStep::Sync,
        rename("a", "d/a"),
        rename("d/a", "d/b"),
        WorkloadStep::Fsync("d/b".into()),
    ];
    let history = of(&steps);
    let mut found = history.pictures[6].clone();
    found.names.insert((1, b"a".to_vec()), 3);
    found.files.insert(3, history.pictures[4].files[&3].clone());
    settle(&mut found);
    assert!(allows(&history, &found, 2, 6));
    found.names.insert((1, b"a".to_vec()), 2);
    found.files.get_mut(&2).expect("the file").nlink = 2;
    found.files.remove(&3);
    assert!(!allows(&history, &found, 2, 6), "it moved on");
}

/// A file that moved there and back has one name.
#[test]
fn a_file_that_moved_there_and_back() {
    let there = [create("a"), WorkloadStep::Sync, rename("a", "b")];
    let both = |steps: &[WorkloadStep]| {
        let history = of(&[&there[..], steps, &[WorkloadStep::Fsync("a".into())]].concat());
        let mut found = history.pictures.last().expect("a moment").clone();
        found.names.extend([(name("a"), 1), (name("b"), 1)]);
        found.files.get_mut(&1).expect("the file").nlink = 2;
        settle(&mut found);
        allows(&history, &found, 1, history.pictures.len() - 1)
    };
    assert!(!both(&[rename("b", "a")]));
    assert!(both(&[WorkloadStep::Do(WorkloadOp::Link("b".into(), "a".into()))]));
}

/// After a cut, each name of an exchange leads to something that it led to at some moment.
#[test]
fn an_exchange_in_part() {
    let exchange = WorkloadStep::Do(WorkloadOp::Exchange("a".into(), "b".into()));
    let steps =
        [create("a"), create("b"), WorkloadStep::Sync, exchange, WorkloadStep::Fsync("a".into())];
    let history = of(&steps);
    for names in [vec![("a", 2)], vec![("a", 2), ("b", 2)], vec![("b", 1)]] {
        let mut found = history.pictures[3].clone();
        found.names = names.iter().map(|&(path, id)| (name(path), id)).collect();
        found.files.retain(|id, _| *id == ROOT || names.iter().any(|(_, named)| named == id));
        settle(&mut found);
        assert!(!allows(&history, &found, 1, 3), "{names:?}");
    }
}

/// A log shows one of two names. The directory has the size of the names in it, although it never
/// had that size.
#[test]
fn a_directory_is_as_large_as_its_names() {
    let steps = [
        create("a"),
        WorkloadStep::Sync,
        create("second"),
        create("b"),
        WorkloadStep::Fsync("b".into()),
    ];
    let history = of(&steps);
    let mut found = history.pictures[3].clone();
    found.names.remove(&name("second"));
    found.files.remove(&2);
    assert!(!allows(&history, &found, 2, 3));
    settle(&mut found);
    assert!(allows(&history, &found, 2, 3));
}

#[test]
fn an_fsync_of_a_directory_promises_the_names_in_it() {
    let steps =
        [create("a"), WorkloadStep::Sync, rename("a", "b"), WorkloadStep::Fsync(String::new())];
    let history = of(&steps);
    assert_eq!(allowed(&history, 1, 2), [1, 2]);
    assert_eq!(allowed(&history, 2, 2), [2]);
}

/// A rename from one name of a file to another name of the same file does nothing, so the `sync`
/// writes nothing for it.
#[test]
fn a_promise_for_which_nothing_was_written() {
    let link = WorkloadStep::Do(WorkloadOp::Link("a".into(), "b".into()));
    let steps = [create("a"), link, WorkloadStep::Sync, rename("a", "b"), WorkloadStep::Sync];
    let history = of(&steps);
    assert_eq!(history.pictures[2], history.pictures[3]);
    assert_eq!(allowed(&history, 2, 2), [2, 3]);
}

#[test]
fn a_new_size_with_the_old_data() {
    let cut = WorkloadStep::Do(WorkloadOp::Truncate("a".into(), 5000));
    let steps = [create("a"), write("a", 0, 9000), WorkloadStep::Sync, write("a", 4000, 3000), cut];
    let history = of(&steps);
    let mut found = history.pictures[4].clone();
    let old = history.pictures[2].files[&1].clone();
    let file = found.files.get_mut(&1).expect("the file");
    let mut head = old.head[..5000].to_vec();
    file.head = head.clone().into();
    file.sectors = Some(vec![old.sectors.expect("data")[0], 0]);
    assert!(allows(&history, &found, 1, 4), "the write is still in memory");
    head[4999] ^= 1;
    found.files.get_mut(&1).expect("the file").head = head.into();
    assert!(!allows(&history, &found, 1, 4));
}

/// Preallocated blocks behind the end of a file are never read, and yet the `fsync` promised them.
#[test]
fn space_behind_the_end_that_is_lost() {
    let what = Fallocate::Allocate { keeps_size: true };
    let allocate = WorkloadOp::Fallocate { path: "a".into(), what, offset: 4096, len: 8192 };
    let steps = [
        create("a"),
        WorkloadStep::Sync,
        WorkloadStep::Do(allocate),
        WorkloadStep::Fdatasync("a".into()),
    ];
    let history = of(&steps);
    let mut found = history.pictures[2].clone();
    let file = found.files.get_mut(&1).expect("the file");
    assert_eq!(std::mem::take(&mut file.preallocated), 8192);
    assert!(allows(&history, &found, 1, 2));
    assert!(!allows(&history, &found, 2, 2));
}

#[test]
fn flags_that_are_lost() {
    let set = WorkloadStep::Do(WorkloadOp::SetFlags("a".into(), FileFlags::NODUMP));
    let history = of(&[create("a"), WorkloadStep::Sync, set, WorkloadStep::Fdatasync("a".into())]);
    let mut found = history.pictures[2].clone();
    found.files.get_mut(&1).expect("the file").flags = FileFlags::empty();
    assert!(allows(&history, &found, 1, 2));
    assert!(!allows(&history, &found, 2, 2));
}

/// The settings of a subvolume are not stored inside it: `sync` promises them, and `fsync` of its
/// root does not.
#[test]
fn what_is_set_of_a_subvolume() {
    let steps = |op, last| {
        [
            WorkloadStep::Do(WorkloadOp::Subvolume("a".into())),
            WorkloadStep::Sync,
            WorkloadStep::Do(op),
            last,
        ]
    };
    let read_only = || WorkloadOp::SetReadOnly("a".into(), true);
    for op in [read_only(), WorkloadOp::SetDefault("a".into())] {
        let history = of(&steps(op, WorkloadStep::Sync));
        assert_eq!(allowed(&history, 1, 2), [1, 2]);
        assert_eq!(allowed(&history, 2, 2), [2]);
    }
    let history = of(&steps(read_only(), WorkloadStep::Fsync("a".into())));
    assert_eq!(allowed(&history, 2, 2), [1, 2]);
}
