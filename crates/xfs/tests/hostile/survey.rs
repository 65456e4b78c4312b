//! Everything that a volume shows.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::ops::ControlFlow;

use offshoot_vfs::{FileId, FileSystem, FileType, Result};

/// What each path shows, or the error.
pub(crate) type ShownPaths = BTreeMap<Vec<u8>, std::result::Result<String, String>>;

/// Everything that a file shows. Of data, and of many attributes, only a part is read.
fn show(fs: &dyn FileSystem, file: FileId) -> Result<String> {
    let attr = fs.attr(file)?;
    let mut text = format!("{attr:?}");
    fs.xattrs(file, &mut |name, value| {
        write!(text, " {}={}", name.escape_ascii(), value.escape_ascii()).unwrap();
        ControlFlow::Continue(())
    })?;
    fs.xattr(file, b"user.number 8").map(drop).or_else(is_posix)?;
    match attr.file_type {
        FileType::Regular => {
            let mut bytes = vec![0; 100_000];
            let count = fs.read(file, 0, &mut bytes)?;
            write!(text, " {:x}", crc32(&bytes[..count])).unwrap();
            for offset in [0, 1 << 20, attr.size / 2] {
                write!(text, " {:?}", fs.next_data(file, offset)?).unwrap();
            }
            let mut left = 20;
            let read = fs.read_data(file, 0..attr.size, &mut |at, bytes| {
                write!(text, " {at}+{}", bytes.len()).unwrap();
                left -= 1;
                let error = || offshoot_vfs::Error::posix(offshoot_vfs::Errno::INTR, "enough");
                if left == 0 { Err(error()) } else { Ok(()) }
            });
            read.or_else(is_posix)?;
        }
        FileType::Symlink => text += &fs.read_link(file)?.escape_ascii().to_string(),
        _ => {}
    }
    Ok(text)
}

/// Lets errors of the kind POSIX pass.
fn is_posix(error: offshoot_vfs::Error) -> Result<()> {
    if matches!(error, offshoot_vfs::Error::Posix { .. }) { Ok(()) } else { Err(error) }
}

fn crc32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum: u32, &byte| sum.rotate_left(5) ^ u32::from(byte))
}

/// Everything that a volume shows; each directory once, and so many entries.
pub(crate) fn survey(fs: &dyn FileSystem) -> ShownPaths {
    let mut shown = ShownPaths::new();
    let mut seen = HashSet::new();
    let mut stack = vec![(b"/".to_vec(), fs.root())];
    let mut left = 20_000;
    while let Some((path, file)) = stack.pop() {
        let text = show(fs, file);
        let is_directory = fs.attr(file).is_ok_and(|attr| attr.file_type == FileType::Directory);
        if is_directory && seen.insert(file) {
            let mut names = Vec::new();
            let read = fs.read_dir(file, 0, &mut |entry| {
                names.push((entry.name.to_vec(), entry.file));
                left -= 1;
                if left > 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            if let Err(error) = read.and_then(|()| fs.parent(file).map(drop)) {
                shown.insert([&path[..], b"/"].concat(), Err(error.to_string()));
            }
            for (index, (name, below)) in names.into_iter().enumerate() {
                let below_path = [&path[..], b"/", &name].concat();
                // Looking all names up would take most of the time.
                if index % 16 == 0
                    && let Err(error) = fs.lookup(file, &name)
                {
                    shown.insert([&below_path[..], b"?"].concat(), Err(error.to_string()));
                }
                stack.push((below_path, below));
            }
        }
        shown.insert(path, text.map_err(|error| error.to_string()));
        if left <= 0 {
            break;
        }
    }
    shown
}
