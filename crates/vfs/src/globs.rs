//! Patterns in paths: `/var/log/*.gz`.
//!
//! A shell cannot see into a volume, so [`expand`] does there what a shell does on the host. When a
//! file has the pattern itself as its path, the pattern stands for that file alone. A pattern that
//! matches nothing stays as it is, and looking it up then fails. `*` and `?` match no dot at the
//! beginning of a name. The paths are sorted.

use std::ops::ControlFlow;

use crate::path::{LastLink, resolve};
use crate::{Code, Error, FileSystem, FileType, Result};

use crate::wildcard::{Pattern, is_pattern, unescaped};

/// The most paths that a pattern may stand for.
const PATHS_MAX: usize = 1 << 20;

/// The paths that `path` stands for: at least one.
pub fn expand(fs: &dyn FileSystem, path: &[u8]) -> Result<Vec<Vec<u8>>> {
    let as_it_is = || Ok(vec![path.to_vec()]);
    if !is_pattern(path) || resolve(fs, path, LastLink::Keep).is_ok() {
        return as_it_is();
    }
    let mut found = vec![Vec::new()];
    let parts: Vec<&[u8]> =
        path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()).collect();
    for (at, part) in parts.iter().enumerate() {
        let mut below = Vec::new();
        let is_on_the_way = at + 1 < parts.len() || path.ends_with(b"/");
        for directory in &found {
            step(fs, directory, part, is_on_the_way, &mut below)?;
            if below.len() > PATHS_MAX {
                return Err(Error::unsupported(
                    Code::Unsupported,
                    format!("a pattern of more than {PATHS_MAX} files"),
                ));
            }
        }
        found = below;
    }
    if found.is_empty() {
        return as_it_is();
    }
    if path.ends_with(b"/") {
        for path in &mut found {
            path.push(b'/');
        }
    }
    found.sort();
    Ok(found)
}

/// Adds what `part` stands for in `directory`; only directories, if more or a slash comes after it.
fn step(
    fs: &dyn FileSystem,
    directory: &[u8],
    part: &[u8],
    is_on_the_way: bool,
    below: &mut Vec<Vec<u8>>,
) -> Result<()> {
    let path_of = |name: &[u8]| [directory, b"/", name].concat();
    let last = if is_on_the_way { LastLink::Follow } else { LastLink::Keep };
    let is_there = |path: &[u8]| {
        let file = resolve(fs, path, last).and_then(|file| fs.attr(file));
        file.is_ok_and(|attr| !is_on_the_way || attr.file_type == FileType::Directory)
    };
    if !is_pattern(part) {
        let path = path_of(&unescaped(part));
        below.extend(is_there(&path).then_some(path));
        return Ok(());
    }
    let pattern = Pattern::new(part);
    let top = resolve(fs, if directory.is_empty() { b"/" } else { directory }, LastLink::Follow)?;
    let mut names = Vec::new();
    fs.read_dir(top, 0, &mut |entry| {
        let is_hidden = entry.name.starts_with(b".") && !part.starts_with(b".");
        if !is_hidden && pattern.matches(entry.name) {
            names.push(entry.name.to_vec());
        }
        if names.len() > PATHS_MAX { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    below.extend(
        names.iter().map(|name| path_of(name)).filter(|path| !is_on_the_way || is_there(path)),
    );
    Ok(())
}
