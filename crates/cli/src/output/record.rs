//! A file as JSON, the same for `ls` and `stat`.

use offshoot_transfer::xattrs::XattrPair;
use offshoot_vfs::{Attr, FileFlags, FileId};
use serde::Serialize;

use super::json_name;
use super::mode::type_name;

/// The object that `ls --json` and `stat --json` write.
#[derive(Serialize)]
pub(crate) struct FileRecord<'a> {
    volume: &'a str,
    path: String,
    #[serde(rename = "type")]
    file_type: &'static str,
    /// Permissions in octal.
    mode: String,
    subvolume: u64,
    inode: u64,
    links: u32,
    uid: u32,
    gid: u32,
    size: u64,
    allocated: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<(u32, u32)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    atime: String,
    mtime: String,
    ctime: String,
    btime: String,
    /// The letters of the flags, as in `chattr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    flags: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    xattrs: Option<Vec<XattrRecord>>,
}

#[derive(Serialize)]
struct XattrRecord {
    name: String,
    value: String,
}

/// The inode number that the kernel would show. In place of a subvolume that is elsewhere, a
/// snapshot shows an empty directory. The engine gives that directory a number above `i64::MAX`,
/// which no stored inode has; the kernel gives each of them 2.
pub(crate) fn shown_inode(file: FileId) -> u64 {
    const STAND_IN: u64 = 2;
    if file.ino > i64::MAX.unsigned_abs() { STAND_IN } else { file.ino }
}

impl<'a> FileRecord<'a> {
    /// The file at `path` in `volume`, which is a JSON name. `target` is the target of a symbolic
    /// link.
    pub(crate) fn new(volume: &'a str, path: &[u8], attr: &Attr, target: Option<&[u8]>) -> Self {
        let is_device = matches!(
            attr.file_type,
            offshoot_vfs::FileType::CharDevice | offshoot_vfs::FileType::BlockDevice
        );
        Self {
            volume,
            path: json_name(path),
            file_type: type_name(attr.file_type),
            mode: format!("{:04o}", attr.permissions),
            subvolume: attr.file.dev,
            inode: shown_inode(attr.file),
            links: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            size: attr.size,
            allocated: attr.allocated_bytes,
            device: is_device.then_some(attr.rdev),
            target: target.map(json_name),
            atime: attr.atime.decimal(),
            mtime: attr.mtime.decimal(),
            ctime: attr.ctime.decimal(),
            btime: attr.btime.decimal(),
            flags: None,
            xattrs: None,
        }
    }

    /// The same with flags and extended attributes.
    pub(crate) fn with(mut self, flags: FileFlags, xattrs: &[XattrPair]) -> Self {
        self.flags = Some(flags.to_string());
        let xattr = |(name, value): &XattrPair| XattrRecord {
            name: json_name(name),
            value: json_name(value),
        };
        self.xattrs = Some(xattrs.iter().map(xattr).collect());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stand_in_has_the_number_that_the_kernel_gives_it() {
        assert_eq!(shown_inode(FileId { dev: 5, ino: (1 << 63) + 264 }), 2);
        assert_eq!(shown_inode(FileId { dev: 5, ino: 264 }), 264);
    }
}
