//! Extraction of honest and of hostile trees, from a filesystem in memory that may lie about
//! everything. What comes out is judged with the host's own calls.

mod archive;
mod honest;
mod hostile;
mod resumed;

use std::fmt::Display;
use std::path::{Path, PathBuf};

use offshoot_testkit::memory::{self, MemoryFilesystem};
use offshoot_vfs::{ReadOnlyFiles, Timestamp};
use tempfile::TempDir;

use super::{ExtractOutcome, ExtractSource, Mark, extract};
use crate::host::Process;
use crate::{Hint, TransferProgress, Watcher, Worst};

/// Prints every report. The harness shows that for a test that fails.
pub(crate) struct Printed;

impl Watcher for Printed {
    fn words(&self, _: Hint) -> &'static str {
        "what the program says"
    }

    fn error(&self, text: &dyn Display) {
        println!("{text}");
    }

    fn detail(&self, text: &dyn Display) {
        println!("  {text}");
    }

    fn warning(&self, text: &dyn Display) {
        println!("warning: {text}");
    }

    fn note(&self, text: &dyn Display) {
        println!("{text}");
    }

    fn is_interrupted(&self) -> bool {
        false
    }

    fn start_progress(&self, _: &'static str) -> Box<dyn TransferProgress> {
        Box::new(HiddenProgress)
    }

    fn stop_progress(&self) {}
}

struct HiddenProgress;

impl TransferProgress for HiddenProgress {
    fn is_hidden(&self) -> bool {
        true
    }

    fn expect(&self, _: u64) {}

    fn add_bytes(&self, _: u64) {}

    fn add_file(&self) {}
}

fn mark() -> Mark {
    Mark { place: "a place".into(), state: "a state".into() }
}

pub(crate) fn process() -> Process {
    Process::prepare().expect("the host lets us")
}

/// A destination in a directory that must hold nothing else afterwards.
struct ExtractSandbox {
    temp: TempDir,
}

impl ExtractSandbox {
    fn new() -> Self {
        let temp = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(temp.path().join("outside"), "untouched").expect("a file in it");
        Self { temp }
    }

    fn out(&self) -> PathBuf {
        self.temp.path().join("out")
    }

    /// Extracts everything, and checks that nothing beside the destination changed.
    fn extract(&self, fs: &MemoryFilesystem) -> (ExtractOutcome, Option<Worst>) {
        let source =
            ExtractSource { fs: &ReadOnlyFiles::new(fs), top: memory::id(memory::ROOT), path: b"" };
        let outcome = extract(&source, &self.out(), &mark(), Timestamp::now(), process(), &Printed)
            .expect("the extraction starts");
        let mut beside: Vec<_> = std::fs::read_dir(self.temp.path())
            .expect("the sandbox is there")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        beside.sort();
        assert_eq!(beside, ["out", "outside"]);
        let outside = std::fs::read(self.temp.path().join("outside")).expect("it is there");
        assert_eq!(outside, b"untouched");
        let worst = outcome.worst;
        (outcome, worst)
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
