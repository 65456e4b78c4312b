//! What a transfer does to its process: nothing. Alone in this file, because it changes the process
//! of its tests.

#[path = "shared/silent.rs"]
mod silent;

use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
use offshoot_transfer::extract::{ExtractSource, Mark, extract};
use offshoot_transfer::host::{Process, umask};
use offshoot_vfs::{ReadOnlyFiles, Timestamp};
use rustix::fs::Mode;
use rustix::process::{self, Resource, Rlimit};
use silent::SilentWatcher;

#[test]
fn only_the_program_changes_the_process() {
    let ready = Process::prepare().expect("the host lets us");
    assert_eq!(umask(), 0);
    let raised = process::getrlimit(Resource::Nofile);
    assert_eq!(raised.current, raised.maximum);

    let lower = Rlimit { current: Some(200), maximum: raised.maximum };
    process::setrlimit(Resource::Nofile, lower).expect("a lower limit");
    process::umask(Mode::from_raw_mode(0o027));
    let mut fs = MemoryFilesystem::new();
    fs.file(ROOT, b"file", 300, b"some data");
    let source = ExtractSource { fs: &ReadOnlyFiles::new(&fs), top: id(ROOT), path: b"" };
    let temp = tempfile::tempdir().expect("a temporary directory");
    let mark = Mark { place: "a place".into(), state: "a state".into() };
    let path = temp.path().join("out");
    let silent = SilentWatcher { fails_on_errors: true };
    let outcome = extract(&source, &path, &mark, Timestamp::now(), ready, &silent);
    assert_eq!(outcome.expect("it is extracted").files, 1);
    assert_eq!(umask(), 0o027);
    assert_eq!(process::getrlimit(Resource::Nofile).current, Some(200));
}
