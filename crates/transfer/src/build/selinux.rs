//! Labels of SELinux from a file of contexts, as `setfiles` gives them.
//!
//! ```text
//! /usr/bin(/.*)?          system_u:object_r:bin_t:s0
//! /usr/bin/passwd   --    system_u:object_r:passwd_exec_t:s0
//! /run/user/.*            <<none>>
//! ```
//!
//! A line has a regular expression for whole paths, if only files of one type have the label that
//! type as `ls -l` shows it, and the label. The last line that fits counts. Lines without anything
//! that is special in an expression count before all others. That is the order of libselinux up to
//! 3.7, and newer versions keep it for the policies that there are.
//!
//! Beside FILE are read, as `setfiles` does: `FILE.homedirs` and `FILE.local`, whose lines follow
//! those of FILE, and `FILE.subs_dist` and `FILE.subs`, which say what the beginning of a path is
//! replaced by first.
//!
//! The labels are given at the end, when each path is what it stays.
//!
//! | part | what it does |
//! |---|---|
//! | [`pattern`] | the expressions, which are those of PCRE |
//! | [`labels`] | sets the labels of a volume |

pub(super) mod labels;
mod pattern;

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use offshoot_vfs::FileType;
use offshoot_vfs::escape::Escaped;

use super::entry::SourceProblem;
use crate::Result;
use pattern::PathPattern;

/// The most that one of the files may hold. The ones of distributions have half a megabyte.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The most lines with labels.
const CONTEXTS_MAX: usize = 100_000;

/// The label that stands for none.
const NONE: &str = "<<none>>";

/// A line of a file of contexts.
struct FileContext {
    pattern: PathPattern,
    file_type: Option<FileType>,
    /// The value of the attribute; `None` for files that get none.
    label: Option<Vec<u8>>,
}

/// The beginning of a path, and what replaces it.
struct PathAlias {
    from: Vec<u8>,
    to: Vec<u8>,
}

/// What a file of contexts says.
#[derive(Default)]
pub struct FileContexts {
    /// In the order of the files.
    contexts: Vec<FileContext>,
    /// The lines whose paths have nothing special, by path, in order.
    exact: HashMap<Vec<u8>, Vec<usize>>,
    /// The others by the first name of all their paths, in order.
    by_name: HashMap<Vec<u8>, Vec<usize>>,
    /// Those that have none, in order.
    anywhere: Vec<usize>,
    /// Later lines first.
    aliases: Vec<PathAlias>,
    distribution_aliases: Vec<PathAlias>,
}

impl FileContexts {
    /// Reads the file at `path`, and what belongs to it.
    ///
    /// # Errors
    /// When one of them cannot be read, or has a line that is wrong, or an expression with more
    /// than is known here.
    pub fn read(path: &Path) -> Result<Self> {
        let mut contexts = Self::default();
        let beside = |end: &str| {
            let mut name = path.as_os_str().as_bytes().to_vec();
            name.extend_from_slice(end.as_bytes());
            PathBuf::from(std::ffi::OsString::from_vec(name))
        };
        for (path, is_needed) in
            [(path.to_path_buf(), true), (beside(".homedirs"), false), (beside(".local"), false)]
        {
            each_line(&path, is_needed, |line| contexts.add(line))?;
        }
        let aliases = &mut contexts.aliases;
        each_line(&beside(".subs"), false, |line| add_alias(aliases, line))?;
        let aliases = &mut contexts.distribution_aliases;
        each_line(&beside(".subs_dist"), false, |line| add_alias(aliases, line))?;
        contexts.aliases.reverse();
        contexts.distribution_aliases.reverse();
        Ok(contexts)
    }

    fn add(&mut self, line: &str) -> Result<(), String> {
        let mut words = line.split_ascii_whitespace();
        let (Some(expression), Some(second)) = (words.next(), words.next()) else {
            return Err("a path without a label".to_owned());
        };
        let (file_type, label) = match words.next() {
            Some(label) => (Some(file_type(second)?), label),
            None => (None, second),
        };
        if words.next().is_some() {
            return Err("more than a path, a type and a label".to_owned());
        }
        let label = match label {
            NONE => None,
            label if label.split(':').filter(|part| !part.is_empty()).count() >= 3 => {
                // The kernel stores it as a string of C.
                Some([label.as_bytes(), b"\0"].concat())
            }
            label => return Err(format!("{} is no label", Escaped(label.as_bytes()))),
        };
        if self.contexts.len() == CONTEXTS_MAX {
            return Err(format!("more than {CONTEXTS_MAX} lines"));
        }
        let pattern = PathPattern::new(expression)?;
        let at = self.contexts.len();
        if pattern.is_exact() {
            self.exact.entry(pattern.prefix().to_vec()).or_default().push(at);
        } else {
            match first_name(pattern.prefix()) {
                Some(name) => self.by_name.entry(name.to_vec()).or_default().push(at),
                None => self.anywhere.push(at),
            }
        }
        self.contexts.push(FileContext { pattern, file_type, label });
        Ok(())
    }

    /// The label of the file of this type at `path`, which begins with a `/`; with the NUL byte at
    /// its end that the attribute has.
    #[must_use]
    pub fn label(&self, path: &[u8], file_type: FileType) -> Option<&[u8]> {
        let local = replaced(&self.aliases, path);
        let path = local.as_deref().unwrap_or(path);
        let distributed = replaced(&self.distribution_aliases, path);
        let path = distributed.as_deref().unwrap_or(path);
        let fits = |at: &usize| {
            let context = self.contexts.get(*at)?;
            let is_type = context.file_type.is_none_or(|only| only == file_type);
            (is_type && context.pattern.matches(path)).then_some(context)
        };
        let exact = self.exact.get(path).into_iter().flatten().rev().find_map(fits);
        let found = exact.or_else(|| {
            let named = first_name(path).and_then(|name| self.by_name.get(name));
            later_first(named.map_or(&[], Vec::as_slice), &self.anywhere).find_map(|at| fits(&at))
        });
        found?.label.as_deref()
    }
}

/// The members of both lists, each in order, from the largest on.
fn later_first<'a>(one: &'a [usize], other: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    let (mut one, mut other) = (one.iter().rev().peekable(), other.iter().rev().peekable());
    std::iter::from_fn(move || {
        let is_one = match (one.peek(), other.peek()) {
            (Some(first), Some(second)) => first > second,
            (first, _) => first.is_some(),
        };
        if is_one { one.next().copied() } else { other.next().copied() }
    })
}

/// The first name of a path, with the `/` before it, if another `/` follows.
fn first_name(path: &[u8]) -> Option<&[u8]> {
    let end = path.iter().skip(1).position(|&byte| byte == b'/')? + 1;
    path.get(..end)
}

fn file_type(text: &str) -> Result<FileType, String> {
    Ok(match text {
        "--" => FileType::Regular,
        "-d" => FileType::Directory,
        "-l" => FileType::Symlink,
        "-c" => FileType::CharDevice,
        "-b" => FileType::BlockDevice,
        "-p" => FileType::Fifo,
        "-s" => FileType::Socket,
        _ => return Err(format!("{} is no type of a file", Escaped(text.as_bytes()))),
    })
}

fn add_alias(aliases: &mut Vec<PathAlias>, line: &str) -> Result<(), String> {
    let mut words = line.split_ascii_whitespace().map(str::as_bytes);
    let (Some(from), Some(to)) = (words.next(), words.next()) else {
        return Err("a path without another one".to_owned());
    };
    aliases.push(PathAlias { from: from.to_vec(), to: to.to_vec() });
    Ok(())
}

/// The path with its beginning replaced, if one of the aliases is that.
fn replaced(aliases: &[PathAlias], path: &[u8]) -> Option<Vec<u8>> {
    aliases.iter().find_map(|PathAlias { from, to }| {
        let rest = path.strip_prefix(&from[..])?;
        match rest.first() {
            None => Some(to.clone()),
            // What replaces it may be the root.
            Some(b'/') if to == b"/" => Some(rest.to_vec()),
            Some(b'/') => Some([to, rest].concat()),
            Some(_) => None,
        }
    })
}

/// Gives `take` each line that says something, of the file at `path`, if it is there.
fn each_line(
    path: &Path,
    is_needed: bool,
    mut take: impl FnMut(&str) -> Result<(), String>,
) -> Result {
    let shown = path.as_os_str().as_bytes();
    let failed = |problem: SourceProblem| problem.at(shown);
    let file = match File::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_needed => return Ok(()),
        opened => opened.map_err(|error| failed(error.into()))?,
    };
    let mut text = Vec::new();
    let read = file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text);
    read.map_err(|error| failed(error.into()))?;
    if text.len() as u64 > FILE_BYTES_MAX {
        let what = format!("a file of contexts has at most {} MiB", FILE_BYTES_MAX >> 20);
        return Err(failed(SourceProblem::Refused(what)));
    }
    for (number, line) in (1..).zip(text.split(|&byte| byte == b'\n')) {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let taken = match std::str::from_utf8(line) {
            Ok(line) => take(line),
            Err(_) => Err("it is no text of UTF-8".to_owned()),
        };
        taken.map_err(|what| failed(SourceProblem::Refused(format!("line {number}: {what}"))))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
