//! How a copy goes about what it meets: what is left out, what is replaced, what is told.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::sync::{Mutex, PoisonError};

use offshoot_vfs::Timestamp;
use offshoot_vfs::path::last_name;
use offshoot_vfs::wildcard::Pattern;

use super::Preserve;
use crate::args::{Attribute, CpArguments};
use crate::exit::{Failure, Result};
use crate::output::write_name;

/// What becomes of a file that has the name of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Existing {
    Replaced,
    /// It stays (`-n`).
    Kept,
    /// It stays, unless it is older (`-u`).
    KeptIfNew,
}

/// See the top of this file.
pub(crate) struct Manner {
    existing: Existing,
    /// A file of the destination that has other names is replaced and not written into, so that
    /// what is copied has names of its own.
    pub(crate) is_apart: bool,
    /// A link that leads to itself is replaced, too (`-f`).
    pub(crate) is_forced: bool,
    /// Other filesystems of the host, and other subvolumes, are not entered (`-x`).
    pub(crate) is_one_filesystem: bool,
    /// Names that are left out, wherever they are.
    names: Vec<Pattern>,
    /// Paths below the source that are left out.
    paths: Vec<Pattern>,
    told: Option<Mutex<Told>>,
}

/// Where it is told what was copied: standard output, by several threads.
struct Told {
    out: BufWriter<File>,
    failed: Option<io::Error>,
}

impl Manner {
    /// Everything is copied and replaced, and nothing is told.
    pub(crate) fn plain() -> Self {
        Self {
            existing: Existing::Replaced,
            is_apart: false,
            is_forced: false,
            is_one_filesystem: false,
            names: Vec::new(),
            paths: Vec::new(),
            told: None,
        }
    }

    /// What the options ask for.
    pub(crate) fn new(arguments: &CpArguments, preserve: &Preserve) -> Result<Self> {
        let existing = match arguments {
            CpArguments { no_clobber: true, .. } => Existing::Kept,
            CpArguments { update: true, .. } => Existing::KeptIfNew,
            _ => Existing::Replaced,
        };
        let (paths, names): (Vec<_>, Vec<_>) = arguments
            .exclude
            .iter()
            .map(|text| text.as_bytes())
            .map(|text| text.strip_suffix(b"/").unwrap_or(text))
            .partition(|text| text.contains(&b'/'));
        let told: Option<Result<_>> = arguments.verbose.then(|| {
            // A descriptor of its own: this thread has locked standard output for itself.
            let out =
                rustix::io::dup(io::stdout()).map_err(|errno| Failure::Output(errno.into()))?;
            Ok(Mutex::new(Told { out: BufWriter::new(out.into()), failed: None }))
        });
        Ok(Self {
            existing,
            is_apart: preserve.keeps(Attribute::Links)
                && (arguments.recursive
                    || arguments.no_dereference
                    || arguments.preserve.contains(&Attribute::Links)),
            is_forced: arguments.force,
            is_one_filesystem: arguments.one_file_system,
            names: names.into_iter().map(Pattern::new).collect(),
            paths: paths
                .into_iter()
                .map(|path| Pattern::new(path.strip_prefix(b"/").unwrap_or(path)))
                .collect(),
            told: told.transpose()?,
        })
    }

    /// Whether the source with this path, as the caller wrote it, is left out by its name.
    pub(crate) fn leaves_out_source(&self, path: &[u8]) -> bool {
        last_name(path).is_some_and(|name| self.names.iter().any(|pattern| pattern.matches(name)))
    }

    /// Whether a file is left out: `path` gives its path below the source, without a `/` in front.
    pub(crate) fn leaves_out(&self, name: &[u8], path: impl FnOnce() -> Vec<u8>) -> bool {
        if self.names.iter().any(|pattern| pattern.matches(name)) {
            return true;
        }
        if self.paths.is_empty() {
            return false;
        }
        let path = path();
        self.paths.iter().any(|pattern| pattern.matches(&path))
    }

    /// Whether anything that is there may stay.
    pub(crate) fn may_keep(&self) -> bool {
        self.existing != Existing::Replaced
    }

    /// Whether all that is there stays.
    pub(crate) fn keeps_all(&self) -> bool {
        self.existing == Existing::Kept
    }

    /// Whether what is there stays, last modified at `old`, where the source was at `new`.
    pub(crate) fn keeps(&self, old: Timestamp, new: Timestamp) -> bool {
        match self.existing {
            Existing::Replaced => false,
            Existing::Kept => true,
            Existing::KeptIfNew => (old.secs, old.nanos) >= (new.secs, new.nanos),
        }
    }

    /// Tells that something was copied, if that is asked for.
    pub(crate) fn tell(&self, from: impl FnOnce() -> Vec<u8>, to: impl FnOnce() -> Vec<u8>) {
        self.say(|out| {
            out.write_all(b"'")?;
            write_name(out, &from())?;
            out.write_all(b"' -> '")?;
            write_name(out, &to())?;
            out.write_all(b"'\n")
        });
    }

    /// Tells that what had the name of a copy was removed for it, if that is asked for.
    pub(crate) fn tell_removed(&self, to: impl FnOnce() -> Vec<u8>) {
        self.say(|out| {
            out.write_all(b"removed '")?;
            write_name(out, &to())?;
            out.write_all(b"'\n")
        });
    }

    fn say(&self, line: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        let Some(told) = &self.told else { return };
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        let Told { out, failed } = &mut *told;
        if failed.is_some() {
            return;
        }
        // Who looks at a terminal sees each file when it is copied.
        let flush = |out: &mut BufWriter<File>| {
            if out.get_ref().is_terminal() { out.flush() } else { Ok(()) }
        };
        *failed = line(out).and_then(|()| flush(out)).err();
    }

    /// Writes what was told and is not written yet.
    pub(crate) fn finish(&self) -> Result {
        let Some(told) = &self.told else { return Ok(()) };
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        let flushed = told.out.flush();
        Ok(told.failed.take().map_or(flushed, Err)?)
    }
}
