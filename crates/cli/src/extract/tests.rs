//! Extraction of honest and of hostile trees, from a filesystem in memory that may lie about
//! everything. What comes out is judged with the host's own calls.

mod archive;
mod honest;
mod hostile;
mod resumed;

use std::path::{Path, PathBuf};

use offshoot_testkit::memory::{self, Memory};
use tempfile::TempDir;

use super::{Mark, Outcome, Source, extract};
use crate::exit::ExitStatus;
use crate::output::Console;

fn mark() -> Mark {
    Mark { place: "a place".into(), state: "a state".into() }
}

/// A destination in a directory that must hold nothing else afterwards.
struct Sandbox {
    temp: TempDir,
}

impl Sandbox {
    fn new() -> Self {
        let temp = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(temp.path().join("outside"), "untouched").expect("a file in it");
        Self { temp }
    }

    fn out(&self) -> PathBuf {
        self.temp.path().join("out")
    }

    /// Extracts everything, and checks that nothing beside the destination changed.
    fn extract(&self, fs: &Memory) -> (Outcome, ExitStatus) {
        let source = Source { fs, top: memory::id(memory::ROOT), path: b"" };
        let (outcome, result) = extract(&source, &self.out(), &mark(), &Console::default())
            .expect("the extraction starts");
        let mut beside: Vec<_> = std::fs::read_dir(self.temp.path())
            .expect("the sandbox is there")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        beside.sort();
        assert_eq!(beside, ["out", "outside"]);
        let outside = std::fs::read(self.temp.path().join("outside")).expect("it is there");
        assert_eq!(outside, b"untouched");
        (outcome, result.map_or_else(|failure| failure.status(), |()| ExitStatus::Done))
    }

    /// The names in the destination, sorted.
    fn names(&self) -> Vec<String> {
        names(&self.out())
    }
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .expect("the directory is there")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
