//! What a filesystem shows, as text.
//!
//! A manifest is the judgement of the kernel put on paper. We write it once, from the kernel's
//! mount of a volume. Wherever our engine reads that volume later, without root and without the
//! kernel's driver, it must produce the same text.
//!
//! There is one line per path, ordered by the bytes of the path. Fields have names, so that a
//! difference shows which field differs.

use std::fmt::Write;
use std::ops::ControlFlow;

use offshoot_vfs::{FileId, FileSystem, FileType, Result, Timestamp};

use crate::compare::{show, sorted_xattrs};

/// Writes the manifest of everything below the root of `fs`.
///
/// # Errors
/// The first error of the filesystem.
pub fn manifest(fs: &dyn FileSystem) -> Result<String> {
    let mut lines = Vec::new();
    let mut stack = vec![(Vec::from(*b"."), fs.root())];
    while let Some((path, file)) = stack.pop() {
        lines.push((path.clone(), line(fs, &path, file)?));
        if fs.attr(file)?.file_type == FileType::Directory {
            fs.read_dir(file, 0, &mut |entry| {
                let mut below = path.clone();
                below.push(b'/');
                below.extend_from_slice(entry.name);
                stack.push((below, entry.file));
                ControlFlow::Continue(())
            })?;
        }
    }
    lines.sort();
    Ok(lines.into_iter().map(|(_, line)| line).collect())
}

fn line(fs: &dyn FileSystem, path: &[u8], file: FileId) -> Result<String> {
    let attr = fs.attr(file)?;
    if stands_in(file) && attr.file_type == FileType::Directory {
        return Ok(format!("{} stands for a nested subvolume\n", show(path)));
    }
    let mut line = format!(
        "{} {:?} id={}/{} mode={:04o} links={} owner={}:{} size={} allocated={}",
        show(path),
        attr.file_type,
        file.dev,
        file.ino,
        attr.permissions,
        attr.nlink,
        attr.uid,
        attr.gid,
        attr.size,
        attr.allocated_bytes,
    );
    let mut add = |name: &str, value: &str| write!(line, " {name}={value}").expect("a string");
    // Access times are left out: reading the volume may change them.
    for (name, time) in [("mtime", attr.mtime), ("ctime", attr.ctime), ("btime", attr.btime)] {
        let Timestamp { secs, nanos } = time;
        add(name, &format!("{secs}.{nanos:09}"));
    }
    for (name, value) in sorted_xattrs(fs, file)? {
        add(&format!("xattr:{}", show(&name)), &show(&value));
    }
    match attr.file_type {
        FileType::CharDevice | FileType::BlockDevice => {
            add("device", &format!("{}:{}", attr.rdev.0, attr.rdev.1));
        }
        FileType::Symlink => add("target", &show(&fs.read_link(file)?)),
        FileType::Regular => {
            let mut sum = 0;
            for range in crate::compare::data_ranges(fs, file)? {
                add("data", &format!("{}..{}", range.start, range.end));
                fs.read_data(file, range, &mut |_, bytes| {
                    sum = crc32c::crc32c_append(sum, bytes);
                    Ok(())
                })?;
            }
            add("crc32c", &format!("{sum:08x}"));
        }
        FileType::Directory | FileType::Fifo | FileType::Socket => {}
    }
    line.push('\n');
    Ok(line)
}

/// Whether a directory is the one that a snapshot shows in place of a subvolume nested in its
/// source. It is not stored in the volume. The kernel shows it as inode 2 with the current time;
/// our engine gives it a number above `i64::MAX`, which no stored inode has.
fn stands_in(file: FileId) -> bool {
    file.ino == 2 || file.ino > i64::MAX.cast_unsigned()
}

/// The first lines in which two manifests differ, for the message of a failure.
#[must_use]
pub fn differences(ours: &str, judge: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (ours, judge): (Vec<_>, Vec<_>) = (ours.lines().collect(), judge.lines().collect());
    for line in &ours {
        if !judge.contains(line) {
            found.push(format!("ours:  {line}"));
        }
    }
    for line in &judge {
        if !ours.contains(line) {
            found.push(format!("judge: {line}"));
        }
    }
    found.sort_by_key(|line| line[7..].to_owned());
    found.truncate(20);
    found
}
