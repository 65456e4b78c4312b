//! Volumes of version 4. The kernel here does not mount them, so `mkfs.xfs` fills them from a list
//! of files, and `xfs_db` adds the attributes.

use std::fmt::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::compare::sorted_xattrs;
use crate::host::HostFilesystem;
use crate::xfs::disk::XfsDisk;
use offshoot_vfs::FileSystem;

/// Runs `mkfs.xfs` with `options`, so that the volume holds the files below `source`.
///
/// # Panics
/// When a name or a link holds blanks, which such a list cannot have.
pub fn mkfs_with(disk: &XfsDisk, options: &str, source: &Path) {
    let mut list = "/dev/null\n0 0\n".to_owned();
    let mut attributed = Vec::new();
    write_file(&mut list, source, "", &mut attributed);
    let path = disk.image().with_extension("list");
    std::fs::write(&path, list).expect("a list of files");
    disk.mkfs(&format!("{options} -p {}", path.display()));
    set_attributes(disk, source, &attributed);
}

/// Adds the lines of a file, and of everything below a directory. `attributed` gets the paths,
/// relative to the source, of files with attributes.
fn write_file(list: &mut String, path: &Path, below: &str, attributed: &mut Vec<String>) {
    let stat = path.symlink_metadata().expect("a file of the source");
    let kind = stat.file_type();
    let letter = match () {
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'l',
        () if kind.is_fifo() => 'p',
        () if kind.is_char_device() => 'c',
        () if kind.is_block_device() => 'b',
        () => '-',
    };
    let bit = |bit: u32, letter: char| if stat.mode() & bit == 0 { '-' } else { letter };
    let (mode, uid, gid) = (stat.mode() & 0o777, stat.uid(), stat.gid());
    let (setuid, setgid) = (bit(0o4000, 'u'), bit(0o2000, 'g'));
    write!(list, "{letter}{setuid}{setgid}{mode:03o} {uid} {gid}").expect("a string");
    if kind.is_dir() {
        list.push('\n');
        let mut names: Vec<_> = std::fs::read_dir(path)
            .expect("a directory of the source")
            .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
            .collect();
        names.sort();
        for name in names {
            assert!(!name.contains(char::is_whitespace), "a blank in {name}");
            write!(list, "{name} ").expect("a string");
            write_file(list, &path.join(&name), &format!("{below}/{name}"), attributed);
        }
        list.push_str("$\n");
        return;
    }
    match letter {
        'l' => {
            let target = std::fs::read_link(path).expect("a link of the source");
            writeln!(list, " {}", target.display())
        }
        'c' | 'b' => {
            let device = stat.rdev();
            writeln!(list, " {} {}", rustix::fs::major(device), rustix::fs::minor(device))
        }
        '-' => writeln!(list, " {}", path.display()),
        _ => writeln!(list),
    }
    .expect("a string");
    if kind.is_file() && rustix::fs::llistxattr(path, &mut [0_u8; 0][..]).is_ok_and(|len| len > 0) {
        attributed.push(below.to_owned());
    }
}

fn set_attributes(disk: &XfsDisk, source: &Path, attributed: &[String]) {
    let host = HostFilesystem::new(source).expect("the source opens");
    let mut commands = Vec::new();
    for path in attributed {
        let mut file = host.root();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            file = host.lookup(file, name.as_bytes()).expect("a path of the source");
        }
        commands.push(format!("path {path}"));
        for (name, value) in sorted_xattrs(&host, file).expect("attributes of the source") {
            let name = String::from_utf8(name).expect("a name in UTF-8");
            let name = name.strip_prefix("user.").expect("a name of users");
            // `xfs_db` gives values of a length, made of one letter.
            assert!(value.iter().all(|byte| *byte == b'v'), "a value of other letters");
            commands.push(format!("attr_set -u -v {} {name}", value.len()));
        }
    }
    if !commands.is_empty() {
        let commands: Vec<_> = commands.iter().map(String::as_str).collect();
        disk.change_with_xfs_db(&commands);
    }
}
