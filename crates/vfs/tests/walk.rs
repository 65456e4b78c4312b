//! Walks through trees in memory.

use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
use offshoot_testkit::model::Model;
use offshoot_vfs::walk::{WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{
    EntryPlace, Error, FileSystem, FileSystemMut, FileType, NewFile, ReadOnlyFiles, Timestamp,
};

#[derive(Default)]
struct VisitCount {
    directories: usize,
    files: usize,
    errors: usize,
}

impl WalkVisitor for VisitCount {
    type Directory = ();

    fn enter(&mut self, (): &(), _: &WalkedFile<'_>) -> Option<()> {
        self.directories += 1;
        Some(())
    }

    fn visit(&mut self, (): &(), entry: &WalkedFile<'_>) {
        assert!(entry.path.ends_with(entry.name));
        self.files += 1;
    }

    fn failed(&mut self, _: &[u8], _: &Error) {
        self.errors += 1;
    }

    fn is_stopped(&self) -> bool {
        false
    }
}

/// The first entry of every directory leads down, so all of the others wait on all levels.
#[test]
fn what_was_given_up_is_read_again() {
    const LEVELS: u64 = 300;
    const FILES: usize = 700;
    let mut fs = MemoryFilesystem::new();
    fs.add(ROOT, b"file", 100_000, FileType::Regular);
    let mut directory = ROOT;
    for level in 0..LEVELS {
        let below = 300 + level;
        fs.add(directory, b"below", below, FileType::Directory);
        for n in 0..FILES {
            fs.enter(directory, format!("{n}").as_bytes(), 100_000);
        }
        directory = below;
    }
    let mut count = VisitCount::default();
    walk(&ReadOnlyFiles::new(&fs), id(ROOT), (), 1000, &mut count);
    let expected = (300, FILES * 300 + 1, 0);
    assert_eq!((count.directories, count.files, count.errors), expected);
}

#[test]
fn a_directory_without_a_parent_is_shown_when_it_is_empty() {
    let mut fs = MemoryFilesystem::new();
    fs.node(300, FileType::Directory);
    fs.enter(ROOT, b"stand-in", 300);
    fs.enter(ROOT, b"and again", 300);
    fs.node(301, FileType::Directory);
    fs.enter(301, b"self", 301);
    fs.enter(ROOT, b"full", 301);
    let mut count = VisitCount::default();
    walk(&ReadOnlyFiles::new(&fs), id(ROOT), (), 1000, &mut count);
    assert_eq!((count.directories, count.files, count.errors), (2, 0, 1));
}

/// The top is entered without an entry, so nothing but its own number keeps the walk from
/// entering it through the one that a cycle gives it.
#[test]
fn a_cycle_through_the_top_ends_at_the_top() {
    let mut fs = MemoryFilesystem::new();
    fs.node(300, FileType::Directory).parent = Some((301, b"again".to_vec()));
    fs.add(300, b"below", 301, FileType::Directory);
    fs.enter(301, b"again", 300);
    let mut count = VisitCount::default();
    walk(&ReadOnlyFiles::new(&fs), id(300), (), 1000, &mut count);
    assert_eq!((count.directories, count.files, count.errors), (1, 0, 1));
}

/// Removes `b` when it is shown `a`.
struct RemovalMeanwhile<'a>(&'a Model, VisitCount);

impl WalkVisitor for RemovalMeanwhile<'_> {
    type Directory = ();

    fn enter(&mut self, parent: &(), entry: &WalkedFile<'_>) -> Option<()> {
        self.1.enter(parent, entry)
    }

    fn visit(&mut self, parent: &(), entry: &WalkedFile<'_>) {
        if entry.path == b"a" {
            let place = EntryPlace { dir: self.0.root(), name: b"b" };
            self.0.unlink(place, Timestamp::default()).expect("it is there");
        }
        self.1.visit(parent, entry);
    }

    fn failed(&mut self, path: &[u8], error: &Error) {
        panic!("{}: {error}", path.escape_ascii());
    }

    fn is_stopped(&self) -> bool {
        false
    }
}

#[test]
fn what_another_thread_removes_is_left_out() {
    let root = MemoryFilesystem::new().attr(id(ROOT)).expect("it has a root");
    let model = Model::new(&root);
    for name in ["a", "b", "c"] {
        let place = EntryPlace { dir: model.root(), name: name.as_bytes() };
        let new = NewFile { permissions: 0, uid: 0, gid: 0, umask: None, at: Timestamp::default() };
        model.create(place, &new).expect("a new file");
    }
    let mut visitor = RemovalMeanwhile(&model, VisitCount::default());
    walk(&model, model.root(), (), 1000, &mut visitor);
    assert_eq!(visitor.1.files, 2);
}

#[test]
fn an_entry_that_leads_nowhere_is_an_error() {
    let mut fs = MemoryFilesystem::new();
    fs.enter(ROOT, b"nowhere", 999);
    let mut count = VisitCount::default();
    walk(&ReadOnlyFiles::new(&fs), id(ROOT), (), 1000, &mut count);
    assert_eq!((count.files, count.errors), (0, 1));
}
