//! Everything that a volume shows, path by path, with errors. The test compares it before and after
//! a workload.

use std::collections::{BTreeMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;

use offshoot_vfs::{FileId, FileSystem, FileType, Result};

use crate::patch::SECTOR;

/// The most names that it visits, and the most bytes that it reads of one file: a damaged volume
/// may claim any number.
const MOST_NAMES: usize = 5000;
const MOST_BYTES: u64 = 16 << 20;

/// The deepest path.
const MOST_DEPTH: usize = 40;

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeenPath {
    pub(crate) file: FileId,
    /// The type, and what reads of it give: a hash of data, length, target and extended attributes,
    /// or the error.
    pub(crate) file_type: Option<FileType>,
    pub(crate) contents: std::result::Result<u64, String>,
    /// The target of a symbolic link that can be read.
    target: Option<Vec<u8>>,
}

impl SeenPath {
    /// Whether reads give the same for both. The place of a file does not matter.
    pub(crate) fn reads_as(&self, other: &Self) -> bool {
        self.file_type == other.file_type && self.contents == other.contents
    }

    /// Whether this is a symbolic link, and `old` read the beginning of its target. Zero bytes end
    /// a target.
    pub(crate) fn completes(&self, old: &Self) -> bool {
        let (Some(target), Some(old)) = (&self.target, &old.target) else { return false };
        target.starts_with(old.split(|&byte| byte == 0).next().unwrap_or_default())
    }
}

/// Everything below a root, by path; the root itself is the empty path.
pub(crate) type PathView = BTreeMap<Vec<u8>, SeenPath>;

/// Looks at everything.
pub(crate) fn view(fs: &dyn FileSystem) -> PathView {
    let mut view = PathView::new();
    let mut directories = HashSet::new();
    let mut left = vec![(Vec::new(), fs.root(), 0)];
    while let Some((path, file, depth)) = left.pop() {
        if view.len() >= MOST_NAMES {
            break;
        }
        let file_type = fs.attr(file).map(|attr| attr.file_type);
        let contents = match &file_type {
            Ok(file_type) => contents(fs, file, *file_type),
            Err(error) => Err(offshoot_vfs::Error::posix(error.errno(), "attributes")),
        };
        let is_new = file_type.as_ref().is_ok_and(|&file_type| file_type == FileType::Directory)
            && directories.insert(file);
        if is_new && depth < MOST_DEPTH {
            let mut entries = Vec::new();
            // When this fails, names are missing, and the comparison finds that. A new name that
            // cannot be opened, as of a snapshot of a damaged subvolume, is no loss.
            let _ = fs.read_dir(file, 0, &mut |entry| {
                entries.push((entry.name.to_vec(), entry.file));
                if entries.len() < MOST_NAMES {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            });
            // A directory belongs to the first path that leads to it. The sort makes that
            // independent of what was made in between.
            entries.sort();
            for (name, file) in entries.into_iter().rev() {
                let below = if path.is_empty() { name } else { [&path[..], b"/", &name].concat() };
                left.push((below, file, depth + 1));
            }
        }
        let contents = contents.map_err(|error| error.errno().to_string());
        let file_type = file_type.ok();
        let is_link = file_type == Some(FileType::Symlink);
        let target = is_link.then(|| fs.read_link(file).ok()).flatten();
        view.insert(path, SeenPath { file, file_type, contents, target });
    }
    view
}

/// A hash of what can be read of a file. Holes count as zeros.
fn contents(fs: &dyn FileSystem, file: FileId, file_type: FileType) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    let mut attributes = Vec::new();
    fs.xattrs(file, &mut |name, value| {
        attributes.push((name.to_vec(), value.to_vec()));
        ControlFlow::Continue(())
    })?;
    attributes.sort();
    attributes.hash(&mut hasher);
    match file_type {
        FileType::Symlink => fs.read_link(file)?.hash(&mut hasher),
        FileType::Regular => {
            fs.attr(file)?.size.hash(&mut hasher);
            data(fs, file, &mut hasher)?;
        }
        _ => {}
    }
    Ok(hasher.finish())
}

fn data(fs: &dyn FileSystem, file: FileId, hasher: &mut DefaultHasher) -> Result<()> {
    let (mut at, mut read) = (0, 0);
    while read < MOST_BYTES
        && let Some(range) = fs.next_data(file, at)?
    {
        let end = range.end.min(range.start.saturating_add(MOST_BYTES));
        at = range.start / SECTOR * SECTOR;
        while at < end {
            let mut sector = [0; 4096];
            let count = fs.read(file, at, &mut sector)?;
            if sector.iter().any(|&byte| byte != 0) {
                (at, sector).hash(hasher);
            }
            read += SECTOR;
            at += SECTOR;
            if count == 0 {
                break;
            }
        }
        at = at.max(end);
    }
    Ok(())
}
