//! The files of the repository, for the checks that read them.

use std::fs;
use std::path::{Path, PathBuf};

use offshoot_machine::repository;

use crate::shell::Result;

/// Calls `visit` with each file whose name ends in one of `extensions`: its path in the repository,
/// and its text. `places` are files and folders of the repository; the files of a folder come in
/// the order of their names.
///
/// # Errors
/// Those of the host.
pub(crate) fn each(
    places: &[&str],
    extensions: &[&str],
    mut visit: impl FnMut(&Path, &str),
) -> Result {
    for place in places {
        let place = repository().join(place);
        walk(&place, extensions, &mut visit)
            .map_err(|error| format!("{}: {error}", place.display()))?;
    }
    Ok(())
}

fn walk(
    path: &Path,
    extensions: &[&str],
    visit: &mut impl FnMut(&Path, &str),
) -> std::io::Result<()> {
    if path.is_dir() {
        let entries: std::io::Result<Vec<PathBuf>> =
            fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect();
        let mut entries = entries?;
        entries.sort();
        // A separate workspace, such as `fuzz`, builds into its own folder `target`.
        entries.retain(|path| path.file_name().is_some_and(|name| name != "target"));
        return entries.iter().try_for_each(|entry| walk(entry, extensions, visit));
    }
    if path.extension().is_some_and(|extension| extensions.iter().any(|one| extension == *one)) {
        visit(path.strip_prefix(repository()).unwrap_or(path), &fs::read_to_string(path)?);
    }
    Ok(())
}
