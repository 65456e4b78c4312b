//! Builds from hostile sources.
//!
//! The body must return for every input, without a panic, an endless loop or an allocation as large
//! as the input claims. Nothing outside of the directory with the contents is read and nothing is
//! written but the volume, which is in memory. The stable test passes in damaged real sources, and
//! the fuzz target any bytes.

#[path = "../shared/silent.rs"]
mod silent;

use std::collections::BTreeSet;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use offshoot_testkit::model::Model;
use offshoot_transfer::build::{
    BuildInput, BuildOptions, BuildSource, BuildTarget, build, measure_sources,
};
use offshoot_transfer::host::Process;
use offshoot_vfs::{FileSystem, FileType, Timestamp};
use silent::SilentWatcher;
use tempfile::TempDir;

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 0 };

/// What the file beside the directory with the contents holds.
const SECRET: &[u8] = b"what no source may read";

/// The sources, in the order of the first byte of an input.
pub(crate) const FORMS: [&str; 5] = ["", "mtree:", "composefs:", "oci-archive:", "docker-archive:"];

const SILENT: SilentWatcher = SilentWatcher { fails_on_errors: false };

/// The files that sources may read, and one that they may not.
struct HostileSite {
    dir: TempDir,
    before: BTreeSet<PathBuf>,
}

impl HostileSite {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| dir.path().join(name);
        fs::create_dir_all(path("contents/sub")).expect("directories");
        fs::write(path("secret"), SECRET).expect("a file");
        fs::write(path("source"), b"").expect("a file");
        fs::write(path("contents/hello"), b"hello").expect("a file");
        fs::write(path("contents/sub/world"), b"world").expect("a file");
        for (name, target) in
            [("up", "../secret".into()), ("abs", path("secret")), ("dir", "..".into())]
        {
            std::os::unix::fs::symlink(target, path("contents").join(name)).expect("a link");
        }
        let before = files(dir.path());
        Self { dir, before }
    }
}

/// All paths below `top`.
fn files(top: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut waiting = vec![top.to_path_buf()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(dir).expect("a directory") {
            let entry = entry.expect("an entry");
            if entry.file_type().expect("a type").is_dir() {
                waiting.push(entry.path());
            }
            found.insert(entry.path());
        }
    }
    found
}

/// Builds from what the input is. Its first byte chooses the form. Whether the build succeeded.
pub(crate) fn hostile_source(data: &[u8]) -> bool {
    static SITE: OnceLock<(Mutex<HostileSite>, Process)> = OnceLock::new();
    let Some((choice, bytes)) = data.split_first() else { return false };
    // What is packed may be very much, and means nothing else than what it was before.
    let packings = [&b"\x1f\x8b"[..], b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"];
    if packings.iter().any(|packing| bytes.starts_with(packing)) {
        return false;
    }
    let (site, process) = SITE.get_or_init(|| {
        let process = Process::prepare().expect("the host lets us");
        (Mutex::new(HostileSite::new()), process)
    });
    let site = site.lock().unwrap_or_else(PoisonError::into_inner);
    let path = site.dir.path().join("source");
    fs::write(&path, bytes).expect("a source");
    let form = FORMS[usize::from(*choice) % FORMS.len()];
    let contents = if matches!(form, "mtree:" | "composefs:") {
        format!(",contents={}", site.dir.path().join("contents").display())
    } else {
        String::new()
    };
    let source = BuildSource::named(format!("{form}{}{contents}", path.display()).as_ref());
    let inputs = [BuildInput { source, to: b"/to".to_vec() }];
    let options = BuildOptions::new(AT);
    let measured = measure_sources(&inputs, &options, *process, &SILENT);
    let model = Model::made_at(AT);
    let target = BuildTarget { fs: &model, snapshots: None };
    let built = build(&target, &inputs, &options, *process, &SILENT, None);
    // A link that leads nowhere is found when it is made.
    assert!(measured.is_ok() || built.is_err(), "a source can be built and not measured");
    assert_eq!(files(site.dir.path()), site.before);
    assert_eq!(fs::read(site.dir.path().join("secret")).expect("a file"), SECRET);
    assert_holds_no_secret(&model, bytes);
    built.is_ok()
}

/// Reads everything that was built.
fn assert_holds_no_secret(model: &Model, source: &[u8]) {
    let is_secret = |data: &[u8]| data.windows(SECRET.len()).any(|window| window == SECRET);
    if is_secret(source) {
        return;
    }
    let mut waiting = vec![model.root()];
    while let Some(dir) = waiting.pop() {
        let mut files = Vec::new();
        let read = model.read_dir(dir, 0, &mut |entry| {
            files.push(entry.file);
            ControlFlow::Continue(())
        });
        read.expect("a directory");
        for file in files {
            let attr = model.attr(file).expect("attributes");
            match attr.file_type {
                FileType::Directory => waiting.push(file),
                FileType::Regular => {
                    let mut data = [0; 4096];
                    let len = model.read(file, 0, &mut data).expect("data");
                    assert!(!is_secret(&data[..len]), "the secret was read");
                }
                _ => {}
            }
        }
    }
}
