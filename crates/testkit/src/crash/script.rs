//! Parses workloads from the text that prints them, such as `create a; write a 0+100; fsync /a`.

use offshoot_vfs::{Fallocate, FileFlags};

use super::workload::{SharedRange, Workload, WorkloadOp, WorkloadStep};

/// The words of a script for each kind of `fallocate`.
pub(super) const FALLOCATE: [(&str, Fallocate); 7] = [
    ("allocate", Fallocate::Allocate { keeps_size: false }),
    ("allocate-behind", Fallocate::Allocate { keeps_size: true }),
    ("punch", Fallocate::PunchHole),
    ("zero", Fallocate::Zero { keeps_size: false }),
    ("zero-behind", Fallocate::Zero { keeps_size: true }),
    ("collapse", Fallocate::Collapse),
    ("insert", Fallocate::Insert),
];

impl Workload {
    /// Parses the set-up and the steps of a workload, in the form in which workloads are printed.
    /// Semicolons separate the operations.
    ///
    /// # Errors
    /// The first part that is not an operation.
    pub fn parse(name: &str, setup: &str, steps: &str) -> Result<Self, String> {
        fn each<T>(text: &str, parse: fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
            let parts = text.split(';').map(str::trim).filter(|part| !part.is_empty());
            parts.map(parse).collect()
        }
        let (setup, steps) = (each(setup, WorkloadOp::parse)?, each(steps, WorkloadStep::parse)?);
        Ok(Self { name: name.to_owned(), setup, steps })
    }
}

impl WorkloadOp {
    fn parse(text: &str) -> Result<Self, String> {
        let failed = || format!("{text:?} is no operation");
        let number = |text: &str| text.parse::<u64>().map_err(|_| failed());
        let length = |text: &str| text.parse::<usize>().map_err(|_| failed());
        let range = |text: &str| -> Result<(u64, usize), String> {
            let (offset, len) = text.split_once('+').ok_or_else(failed)?;
            Ok((number(offset)?, length(len)?))
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        let Some((verb, words)) = words.split_first() else { return Err(failed()) };
        let owned = |at: usize| words.get(at).map(|&word| word.to_owned()).ok_or_else(failed);
        let one = || owned(0);
        let two = || owned(0).and_then(|one| Ok((one, owned(1)?)));
        if let Some((_, what)) = FALLOCATE.iter().find(|(known, _)| known == verb) {
            let (path, text) = two()?;
            let (offset, len) = range(&text)?;
            return Ok(Self::Fallocate { path, what: *what, offset, len: len as u64 });
        }
        let share = || -> Result<SharedRange, String> {
            let (offset, len) = range(&owned(1)?)?;
            let to_offset = number(&owned(3)?)?;
            Ok(SharedRange { from: owned(0)?, offset, len: len as u64, to: owned(2)?, to_offset })
        };
        let octal =
            |at: usize| owned(at).and_then(|n| u32::from_str_radix(&n, 8).map_err(|_| failed()));
        Ok(match *verb {
            "create" => Self::Create(one()?),
            "mkdir" => Self::Mkdir(one()?),
            "symlink" => Self::Symlink(one()?),
            "link" => two().map(|(old, new)| Self::Link(old, new))?,
            "unlink" => Self::Unlink(one()?),
            "rmdir" => Self::Rmdir(one()?),
            "rename" => two().map(|(from, to)| Self::Rename(from, to))?,
            "exchange" => two().map(|(one, other)| Self::Exchange(one, other))?,
            "rename-noreplace" => two().map(|(from, to)| Self::RenameNoReplace(from, to))?,
            "fifo" => Self::Fifo(one()?),
            "device" => Self::Device(one()?),
            "flags" => {
                let letters = words.get(1).copied().unwrap_or_default();
                let flags =
                    letters.chars().map(FileFlags::of_letter).collect::<Option<FileFlags>>();
                Self::SetFlags(one()?, flags.ok_or_else(failed)?)
            }
            "unnamed" => Self::Unnamed(one()?),
            "open" => Self::Open(one()?),
            "write" => {
                let (offset, len) = range(&owned(1)?)?;
                Self::Write { path: one()?, offset, len }
            }
            "write-direct" => {
                let (offset, len) = range(&owned(1)?)?;
                Self::WriteDirect { path: one()?, offset, len }
            }
            "write-same" => two().map(|(from, to)| Self::WriteSame(from, to))?,
            "truncate" => Self::Truncate(one()?, number(&owned(1)?)?),
            "copy" => two().map(|(from, to)| Self::Copy(from, to))?,
            "clone" => Self::Clone(share()?),
            "dedupe" => Self::Dedupe(share()?),
            "setxattr" => Self::SetXattr(one()?, owned(1)?, length(&owned(2)?)?),
            "removexattr" => two().map(|(path, name)| Self::RemoveXattr(path, name))?,
            "chmod" => Self::Chmod(one()?, octal(1)?),
            "acl" | "default-acl" => {
                let (is_default, permissions) = (*verb == "default-acl", octal(1)?);
                Self::SetAcl { path: one()?, is_default, permissions }
            }
            "compression" => {
                Self::SetCompression(one()?, words.get(1).copied().unwrap_or_default().to_owned())
            }
            "subvolume" => Self::Subvolume(one()?),
            "snapshot" => {
                let (source, to) = two()?;
                let is_read_only = words.get(2).is_some_and(|&how| how == "read-only");
                Self::Snapshot { source, to, is_read_only }
            }
            "delete" => Self::DeleteSubvolume(one()?),
            "drop-deleted" => Self::DropDeleted,
            "read-only" => Self::SetReadOnly(one()?, true),
            "writable" => Self::SetReadOnly(one()?, false),
            "default" => Self::SetDefault(one()?.trim_start_matches('/').to_owned()),
            _ => return Err(failed()),
        })
    }
}

impl WorkloadStep {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text.split_once(' ') {
            None if text == "sync" => Self::Sync,
            Some(("fsync", path)) => Self::Fsync(path.trim_start_matches('/').to_owned()),
            Some(("fdatasync", path)) => Self::Fdatasync(path.trim_start_matches('/').to_owned()),
            Some(("try", op)) => Self::Try(WorkloadOp::parse(op)?),
            _ => Self::Do(WorkloadOp::parse(text)?),
        })
    }
}
