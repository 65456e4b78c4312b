//! Names of users and groups, from the volume itself.
//!
//! The host has other users with the same ids, so its names are never shown. For a volume without
//! `/etc/passwd`, ids are shown.

use std::collections::HashMap;

use offshoot_vfs::{FileSystem, FileType};

use offshoot_vfs::path::{LastLink, resolve};

/// The most bytes that are read of each file: enough for thousands of users.
const BYTES_MAX: usize = 4 << 20;

/// The users and groups of a volume.
#[derive(Default)]
pub(crate) struct OwnerNames {
    users: Table,
    groups: Table,
    /// The primary group of each user.
    main_groups: HashMap<u32, u32>,
}

#[derive(Default)]
struct Table {
    names: HashMap<u32, Vec<u8>>,
    numbers: HashMap<Vec<u8>, u32>,
}

impl Table {
    /// The first line for an id or a name wins, as in the C library.
    fn add(&mut self, number: u32, name: &[u8]) {
        self.names.entry(number).or_insert_with(|| name.to_vec());
        self.numbers.entry(name.to_vec()).or_insert(number);
    }

    fn number(&self, name: &[u8]) -> Option<u32> {
        let as_number = || std::str::from_utf8(name).ok()?.parse().ok();
        self.numbers.get(name).copied().or_else(as_number)
    }
}

impl OwnerNames {
    /// Reads them from the tree of files. They are empty if the files are missing or cannot be
    /// read.
    pub(crate) fn of(fs: &dyn FileSystem) -> Self {
        let read = |path: &[u8]| contents(fs, path).unwrap_or_default();
        Self::parse(&read(b"/etc/passwd"), &read(b"/etc/group"))
    }

    fn parse(passwd: &[u8], group: &[u8]) -> Self {
        let mut owners = Self::default();
        for line in passwd.split(|&byte| byte == b'\n') {
            // A line is `alice:x:1000:100:Alice:/home/alice:/bin/sh`.
            let fields: Vec<&[u8]> = line.split(|&byte| byte == b':').collect();
            let [name @ [_, ..], _, uid, rest @ ..] = &fields[..] else { continue };
            let Some(uid) = number(uid) else { continue };
            owners.users.add(uid, name);
            if let Some(gid) = rest.first().and_then(|gid| number(gid)) {
                owners.main_groups.entry(uid).or_insert(gid);
            }
        }
        for line in group.split(|&byte| byte == b'\n') {
            let fields: Vec<&[u8]> = line.split(|&byte| byte == b':').collect();
            let [name @ [_, ..], _, gid, ..] = &fields[..] else { continue };
            if let Some(gid) = number(gid) {
                owners.groups.add(gid, name);
            }
        }
        owners
    }

    /// The name of a user.
    pub(crate) fn user(&self, uid: u32) -> Option<&[u8]> {
        self.users.names.get(&uid).map(Vec::as_slice)
    }

    /// The name of a group.
    pub(crate) fn group(&self, gid: u32) -> Option<&[u8]> {
        self.groups.names.get(&gid).map(Vec::as_slice)
    }

    /// The id of a user, given by name or id.
    pub(crate) fn uid(&self, name: &[u8]) -> Option<u32> {
        self.users.number(name)
    }

    /// The id of a group, given by name or id.
    pub(crate) fn gid(&self, name: &[u8]) -> Option<u32> {
        self.groups.number(name)
    }

    /// The primary group of a user.
    pub(crate) fn main_group(&self, uid: u32) -> Option<u32> {
        self.main_groups.get(&uid).copied()
    }
}

fn number(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn contents(fs: &dyn FileSystem, path: &[u8]) -> Option<Vec<u8>> {
    let file = resolve(fs, path, LastLink::Follow).ok()?;
    let attr = fs.attr(file).ok()?;
    let len = usize::try_from(attr.size).ok().filter(|&len| len <= BYTES_MAX)?;
    if attr.file_type != FileType::Regular {
        return None;
    }
    let mut bytes = vec![0; len];
    let count = fs.read(file, 0, &mut bytes).ok()?;
    bytes.truncate(count);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_lines_count_and_bad_ones_do_not() {
        let owners = OwnerNames::parse(
            b"root:x:0:0::/root:/bin/sh\nalice:x:1000:100::\nal:x:1000:7\n:x:5:5\nbad\nbob:x:none:1\n77:x:8:8",
            b"root:x:0:\nusers:x:100:alice\nshort:x\n",
        );
        assert_eq!(owners.user(1000), Some(&b"alice"[..]));
        assert_eq!((owners.uid(b"al"), owners.main_group(1000)), (Some(1000), Some(100)));
        assert_eq!((owners.uid(b"bob"), owners.uid(b"bad"), owners.user(5)), (None, None, None));
        // A name takes precedence over an id.
        assert_eq!((owners.uid(b"77"), owners.uid(b"78")), (Some(8), Some(78)));
        assert_eq!((owners.group(100), owners.gid(b"users")), (Some(&b"users"[..]), Some(100)));
        assert_eq!(owners.group(8), None);
    }
}
