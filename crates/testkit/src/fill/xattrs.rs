//! Extended attributes: namespaces, access control lists, capabilities, large values.

use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::{directory, write};
use crate::names::colliding;
use crate::random::Random;

/// Attributes of all kinds.
pub fn fill(dir: &Path) {
    plain(dir);
    many_and_large(dir);
    capability(dir);
    access_control_lists(dir);
}

fn set(path: &Path, name: &[u8], value: &[u8]) -> Result<(), Errno> {
    let name = CString::new(name).expect("no NUL in the name");
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
}

fn must_set(path: &Path, name: &[u8], value: &[u8]) {
    set(path, name, value).unwrap_or_else(|error| {
        panic!("{} of {}: {error}", String::from_utf8_lossy(name), path.display())
    });
}

fn plain(dir: &Path) {
    let file = dir.join("plain");
    write(&file, b"plain");
    must_set(&file, b"user.text", b"value");
    must_set(&file, b"user.empty", b"");
    must_set(&file, b"user.binary", &(0..=255).collect::<Vec<u8>>());
    must_set(&file, b"user.\xff\x01 strange", b"name");
    must_set(&file, b"trusted.text", b"only root sees it");
    must_set(&file, &[b"user.".as_slice(), &[b'n'; 250]].concat(), b"the longest name");

    let subdir = directory(dir, "directory");
    must_set(&subdir, b"user.of a directory", b"yes");
    let link = dir.join("symlink");
    std::os::unix::fs::symlink("nowhere", &link).expect("a symbolic link");
    must_set(&link, b"trusted.of a symlink", b"yes");
    let fifo = dir.join("fifo");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0)
        .expect("a fifo");
    must_set(&fifo, b"trusted.of a fifo", b"yes");
}

fn many_and_large(dir: &Path) {
    let many = dir.join("many");
    write(&many, b"");
    let mut random = Random::new(0xa77);
    for number in 0..150_u32 {
        let len = usize::try_from(random.below(200)).expect("small");
        let name = format!("user.number.{number}");
        must_set(&many, name.as_bytes(), &random.bytes(len));
    }
    let colliding_names = dir.join("colliding");
    write(&colliding_names, b"");
    for name in colliding(b"user.", 30, 6) {
        must_set(&colliding_names, &name, &name);
    }
    // The largest value fills a leaf except for the headers, whatever the node size.
    for node_bytes in [65_536, 32_768, 16_384, 8192, 4096] {
        let file = dir.join(OsStr::from_bytes(b"large"));
        write(&file, b"");
        let name = b"user.large";
        let overhead = 101 + 25 + 30 + name.len();
        let value = random.bytes(node_bytes - overhead);
        match set(&file, name, &value) {
            Ok(()) => return,
            Err(Errno::NOSPC | Errno::TOOBIG) => {}
            Err(error) => panic!("a large value: {error}"),
        }
    }
    panic!("no large value fits");
}

/// Sets `cap_net_bind_service,cap_net_raw=ep`, as the kernel stores it.
fn capability(dir: &Path) {
    let file = dir.join("capable");
    write(&file, b"#!/bin/true\n");
    let permitted: u32 = 1 << 10 | 1 << 13;
    let mut value = 0x0200_0001_u32.to_le_bytes().to_vec();
    for word in [permitted, 0, 0, 0] {
        value.extend_from_slice(&word.to_le_bytes());
    }
    must_set(&file, b"security.capability", &value);
}

/// An entry of an access control list: tag, permissions and id.
type AclEntry = (u16, u16, u32);

/// Access control lists on files and directories, set and inherited.
pub fn access_control_lists(dir: &Path) {
    const NO_ID: u32 = u32::MAX;
    let entries: [AclEntry; 6] = [
        (1, 7, NO_ID),
        (2, 5, 1000),
        (2, 4, 70_000),
        (4, 5, NO_ID),
        (16, 7, NO_ID),
        (32, 0, NO_ID),
    ];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&permissions.to_le_bytes());
        list.extend_from_slice(&id.to_le_bytes());
    }
    let file = dir.join("acl");
    write(&file, b"acl");
    must_set(&file, b"system.posix_acl_access", &list);
    let subdir = directory(dir, "acl-directory");
    must_set(&subdir, b"system.posix_acl_access", &list);
    must_set(&subdir, b"system.posix_acl_default", &list);
    write(&subdir.join("inherits"), b"");
    std::fs::create_dir(subdir.join("inherits-both")).expect("a directory");
}
