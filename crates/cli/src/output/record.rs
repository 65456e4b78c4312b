//! A file as JSON, the same for `ls` and `stat`.

use offshoot_vfs::Attr;
use serde::Serialize;

use super::mode::type_name;
use super::{json_name, json_time};

/// The object that `ls --json` and `stat --json` write.
#[derive(Serialize)]
pub(crate) struct FileRecord {
    path: String,
    #[serde(rename = "type")]
    file_type: &'static str,
    /// Permissions in octal, as people read them.
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
    #[serde(skip_serializing_if = "Option::is_none")]
    xattrs: Option<Vec<Xattr>>,
}

#[derive(Serialize)]
struct Xattr {
    name: String,
    value: String,
}

impl FileRecord {
    /// The file at `path`; `target` is that of a symbolic link.
    pub(crate) fn new(path: &[u8], attr: &Attr, target: Option<&[u8]>) -> Self {
        let is_device = matches!(
            attr.file_type,
            offshoot_vfs::FileType::CharDevice | offshoot_vfs::FileType::BlockDevice
        );
        Self {
            path: json_name(path),
            file_type: type_name(attr.file_type),
            mode: format!("{:04o}", attr.permissions),
            subvolume: attr.file.dev,
            inode: attr.file.ino,
            links: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            size: attr.size,
            allocated: attr.allocated_bytes,
            device: is_device.then_some(attr.rdev),
            target: target.map(json_name),
            atime: json_time(attr.atime),
            mtime: json_time(attr.mtime),
            ctime: json_time(attr.ctime),
            btime: json_time(attr.btime),
            xattrs: None,
        }
    }

    /// The same with extended attributes.
    pub(crate) fn with_xattrs(mut self, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Self {
        let xattr = |(name, value): &(Vec<u8>, Vec<u8>)| Xattr {
            name: json_name(name),
            value: json_name(value),
        };
        self.xattrs = Some(xattrs.iter().map(xattr).collect());
        self
    }
}
