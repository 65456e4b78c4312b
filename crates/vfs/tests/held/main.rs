//! Calls by path where numbers are given again, with another thread at every place between.

mod files;

use files::{OtherThreadStep, ReusingFiles};
use offshoot_vfs::path::{LastLink, resolve, resolve_end};
use offshoot_vfs::walk::{WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{
    Attr, EntryPlace, Errno, Error, FileId, FileSystem, FileSystemMut, FileType, HeldFiles,
    NewFile, Result, SetAttr, Timestamp,
};

const AT: Timestamp = Timestamp { secs: 0, nanos: 0 };

/// More than any call of a test looks at names.
const MOST_CALLS: usize = 40;

const NEW: NewFile = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at: AT };

fn tree() -> ReusingFiles {
    let files = ReusingFiles::new();
    files.make("/d", FileType::Directory);
    files.make("/d/a", FileType::Regular);
    files
}

fn step(change: impl FnOnce(&ReusingFiles) + Send + 'static) -> OtherThreadStep {
    Box::new(change)
}

/// The file goes, and another one gets its number.
fn replace_file() -> Vec<OtherThreadStep> {
    vec![step(|files| files.remove("/d/a")), step(|files| files.make("/other", FileType::Regular))]
}

/// The directory goes, and another one gets its number, with a file of the same name.
fn replace_directory() -> Vec<OtherThreadStep> {
    vec![
        step(|files| {
            files.remove("/d/a");
            files.remove("/d");
        }),
        step(|files| {
            files.make("/other", FileType::Directory);
            files.make("/other/a", FileType::Regular);
        }),
    ]
}

/// Calls `call` with both steps of another thread at each two places between, and returns how often
/// it touched what never had the path.
fn wrong_touches(
    steps: fn() -> Vec<OtherThreadStep>,
    call: impl Fn(&ReusingFiles) -> Result<()>,
) -> usize {
    let mut wrong = 0;
    for first in 0..MOST_CALLS {
        for second in first..MOST_CALLS {
            let files = tree();
            files.begin();
            files.interleave([first, second].into_iter().zip(steps()));
            let done = call(&files);
            assert!(done.is_ok() || done.is_err_and(|error| error.errno() == Errno::NOENT));
            if files.left() > 0 {
                // All later places are behind the call.
                break;
            }
            wrong += files.wrong("/d").len();
            assert!(files.is_released(), "{first}, {second}");
        }
    }
    wrong
}

/// A call by path, on files that it holds or does not hold.
type ByPath = fn(&dyn FileSystemMut) -> Result<()>;

fn write(fs: &dyn FileSystemMut) -> Result<()> {
    fs.write(resolve(fs, b"/d/a", LastLink::Follow)?, 0, b"x", AT)
}

fn chmod(fs: &dyn FileSystemMut) -> Result<()> {
    let file = resolve(fs, b"/d/../d/./a", LastLink::Follow)?;
    let permissions = Some(0o600 & fs.attr(file)?.permissions);
    fs.set_attr(file, &SetAttr { permissions, ..SetAttr::default() }, AT)
}

fn unlink(fs: &dyn FileSystemMut) -> Result<()> {
    let (dir, name) = resolve_end(fs, b"/d/a", LastLink::Keep)?.place.expect("a name");
    fs.unlink(EntryPlace { dir, name: &name }, AT)
}

fn read(fs: &dyn FileSystemMut) -> Result<()> {
    fs.read(resolve(fs, b"d/a", LastLink::Follow)?, 0, &mut []).map(drop)
}

#[test]
fn a_call_by_path_never_uses_a_file_that_never_had_the_path() {
    for steps in [replace_file, replace_directory] {
        for call in [write as ByPath, chmod, read] {
            assert_eq!(wrong_touches(steps, |files| call(&HeldFiles::new(files))), 0);
            assert!(wrong_touches(steps, |files| call(files)) > 0, "the test sees nothing");
        }
    }
    assert_eq!(wrong_touches(replace_directory, |files| unlink(&HeldFiles::new(files))), 0);
    assert!(wrong_touches(replace_directory, |files| unlink(files)) > 0);
}

/// A file that is made is that one, or has gone again.
#[test]
fn a_new_file_is_the_one_that_was_made() {
    let make = |fs: &dyn FileSystemMut| {
        let dir = resolve(fs, b"/d", LastLink::Follow)?;
        fs.write(fs.create(EntryPlace { dir, name: b"new" }, &NEW)?, 0, b"x", AT)
    };
    let steps = || -> Vec<OtherThreadStep> {
        vec![
            step(|files| {
                if files.has("/d/new") {
                    files.remove("/d/new");
                }
            }),
            step(|files| files.make("/other", FileType::Regular)),
        ]
    };
    assert_eq!(wrong_touches(steps, |files| make(&HeldFiles::new(files))), 0);
    assert!(wrong_touches(steps, |files| make(files)) > 0, "the test sees nothing");
}

/// Reads every file, and removes it.
struct Emptying<'a> {
    fs: &'a ReusingFiles,
    errors: Vec<Error>,
}

impl Emptying<'_> {
    fn keep(&mut self, done: Result<()>) {
        self.errors.extend(done.err());
    }
}

impl WalkVisitor for Emptying<'_> {
    type Directory = (FileId, Vec<u8>);

    fn enter(&mut self, _: &Self::Directory, entry: &WalkedFile<'_>) -> Option<Self::Directory> {
        Some((entry.parent, entry.name.to_vec()))
    }

    fn leave(&mut self, (dir, name): Self::Directory, _: &[u8]) {
        self.keep(self.fs.rmdir(EntryPlace { dir, name: &name }, AT));
    }

    fn visit(&mut self, _: &Self::Directory, entry: &WalkedFile<'_>) {
        let Attr { file, .. } = *entry.attr;
        self.keep(self.fs.read(file, 0, &mut []).map(drop));
        self.keep(self.fs.unlink(EntryPlace { dir: entry.parent, name: entry.name }, AT));
    }

    fn failed(&mut self, _: &[u8], error: &Error) {
        assert!(!matches!(error, Error::Corrupt(_)), "{error}");
        self.errors.push(Error::posix(error.errno(), "the walk"));
    }

    fn is_stopped(&self) -> bool {
        false
    }
}

fn empty(files: &ReusingFiles) -> Result<()> {
    let held = HeldFiles::new(files);
    let end = resolve_end(&held, b"/d", LastLink::Keep)?;
    let place = end.place.expect("a name");
    let top = end.file.ok_or_else(|| Error::posix(Errno::NOENT, "/d"))?;
    let mut emptying = Emptying { fs: files, errors: Vec::new() };
    walk(held.inner(), top, place, 100, &mut emptying);
    emptying.errors.into_iter().next().map_or(Ok(()), Err)
}

#[test]
fn a_walk_never_uses_a_file_that_never_was_in_the_tree() {
    for steps in [replace_file, replace_directory] {
        assert_eq!(wrong_touches(steps, empty), 0);
    }
    // What goes before the walk comes to it is no error.
    let files = tree();
    files.make("/d/b", FileType::Regular);
    files.interleave([(5, step(|files| files.remove("/d/b")))]);
    empty(&files).expect("it was removed by another thread");
    assert!(!files.has("/d"));
}
