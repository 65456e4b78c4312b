//! The space of files as the kernel and `btrfs filesystem du` show it.

use std::collections::BTreeMap;
use std::path::Path;

use crate::run::run;
use crate::sharing::{ShownExtent, extents};

/// What is shown of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSpace {
    /// The extents that `filefrag` prints.
    pub extents: Vec<ShownExtent>,
    /// What `btrfs filesystem du` counts, in bytes: all space of the file, and its exclusive part.
    pub usage: (u64, u64),
}

/// What is shown of all regular files below a mounted directory, by relative path.
#[must_use]
pub fn spaces(mount: &Path) -> BTreeMap<String, FileSpace> {
    let with_extents = |(path, extents)| (path, FileSpace { extents, usage: (0, 0) });
    let mut all: BTreeMap<_, _> = extents(mount).into_iter().map(with_extents).collect();
    let script = r#"cd "$1"; btrfs filesystem du --raw ."#;
    let shown = run("sh", &["-ec".as_ref(), script.as_ref(), "sh".as_ref(), mount.as_os_str()]);
    for line in shown.lines().skip(1) {
        let path = &line[line.find("./").unwrap_or(line.len())..];
        // The other lines are for directories.
        if let Some(space) = all.get_mut(path) {
            let mut words = line.split_whitespace();
            let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
            space.usage = (number(), number());
        }
    }
    all
}

/// Checks that the kernel shows the same extents of all files below both directories, and that at
/// least `at_least` files share extents.
#[track_caller]
pub fn assert_alike(ours: &Path, theirs: &Path, at_least: usize) {
    let [ours, theirs] = [ours, theirs].map(spaces);
    for (path, theirs) in &theirs {
        assert_eq!(ours.get(path), Some(theirs), "extents of {path}, ours and the kernel's");
    }
    assert_eq!(ours.len(), theirs.len(), "files");
    let is_shared = |space: &&FileSpace| {
        space.extents.iter().any(|(_, flags)| flags.iter().any(|flag| flag == "shared"))
    };
    let shared = theirs.values().filter(is_shared).count();
    assert!(shared >= at_least, "only {shared} files share extents, not {at_least}");
}
