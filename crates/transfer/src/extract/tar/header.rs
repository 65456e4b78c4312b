//! The blocks in front of the data of an entry.
//!
//! ```text
//! | ustar header, type x | records, padded to 512 |   only when there are records
//! | ustar header         | data, padded to 512    |
//! ```
//!
//! A record is `LENGTH KEY=VALUE\n`, where LENGTH counts itself. What the ustar header cannot
//! hold is left zero or cut there, and stands whole in a record. Names go into records as the
//! bytes that they are, UTF-8 or not, as GNU tar writes and reads them.

use offshoot_vfs::{Attr, Timestamp};
use tar::{EntryType, Header};

use super::acl::acl_record;
use crate::xattrs::XattrPair;

/// The unit of a tar archive.
pub(super) const BLOCK: usize = 512;

/// The largest number in a field of seven octal digits: owner, group, device.
const MAX_7: u64 = 0o777_7777;
/// The largest number in a field of eleven octal digits: size, time.
const MAX_11: u64 = 0o777_7777_7777;

/// What stands in front of the data of an entry.
pub(super) struct Front<'a> {
    /// The type.
    pub(super) entry_type: EntryType,
    /// The path, with `./` in front, and `/` at the end of a directory.
    pub(super) path: &'a [u8],
    /// The target of a symbolic or hard link.
    pub(super) link: &'a [u8],
    /// Where everything else comes from.
    pub(super) attr: &'a Attr,
    /// Length of the data in the archive.
    pub(super) size: u64,
    /// The length of a sparse file, whose data begins with a map.
    pub(super) sparse_size: Option<u64>,
    /// Extended attributes.
    pub(super) xattrs: &'a [XattrPair],
}

impl Front<'_> {
    /// Appends the blocks.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let records = self.records();
        if !records.is_empty() {
            let name = with_directory(self.path, b"PaxHeaders");
            let mut header = new_header(EntryType::XHeader, &name, records.len() as u64, 0o644);
            header.set_mtime(clamp_time(self.attr.mtime));
            push_header(out, header);
            out.extend_from_slice(&records);
            pad(out, records.len() as u64);
        }
        let name = self.header_name();
        let mut header =
            new_header(self.entry_type, &name, fit(self.size, MAX_11), self.attr.permissions);
        header.set_uid(fit(self.attr.uid.into(), MAX_7));
        header.set_gid(fit(self.attr.gid.into(), MAX_7));
        header.set_mtime(clamp_time(self.attr.mtime));
        if let Some(ustar) = header.as_ustar_mut() {
            copy_cut(&mut ustar.linkname, self.link);
            if matches!(self.entry_type, EntryType::Char | EntryType::Block) {
                // Larger numbers have no record; the field then holds them in binary.
                set_device(&mut ustar.dev_major, self.attr.rdev.0);
                set_device(&mut ustar.dev_minor, self.attr.rdev.1);
            }
        }
        push_header(out, header);
    }

    /// The name in the ustar header: that of a sparse file marks it for programs that know
    /// nothing of sparse files.
    fn header_name(&self) -> Vec<u8> {
        if self.sparse_size.is_some() {
            with_directory(self.path, b"GNUSparseFile.0")
        } else {
            self.path.to_vec()
        }
    }

    fn records(&self) -> Vec<u8> {
        let mut records = Vec::new();
        if let Some(size) = self.sparse_size {
            record(&mut records, b"GNU.sparse.major", b"1");
            record(&mut records, b"GNU.sparse.minor", b"0");
            record(&mut records, b"GNU.sparse.name", self.path);
            record(&mut records, b"GNU.sparse.realsize", size.to_string().as_bytes());
        } else if self.path.len() > 100 {
            record(&mut records, b"path", self.path);
        }
        if self.link.len() > 100 {
            record(&mut records, b"linkpath", self.link);
        }
        for (key, value, max) in [
            (&b"size"[..], self.size, MAX_11),
            (b"uid", self.attr.uid.into(), MAX_7),
            (b"gid", self.attr.gid.into(), MAX_7),
        ] {
            if value > max {
                record(&mut records, key, value.to_string().as_bytes());
            }
        }
        if self.entry_type == EntryType::Link {
            // The attributes belong to the inode and came with its first name.
            return records;
        }
        for (key, time) in
            [(b"mtime", self.attr.mtime), (b"atime", self.attr.atime), (b"ctime", self.attr.ctime)]
        {
            record(&mut records, key, time.decimal().as_bytes());
        }
        for (name, value) in self.xattrs {
            if let Some((key, text)) = acl_record(name, value, self.attr.file_type) {
                record(&mut records, key, text.as_bytes());
            }
            let mut key = b"SCHILY.xattr.".to_vec();
            for &byte in name {
                // The key ends at the first `=`; GNU tar reads this encoding of one.
                match byte {
                    b'=' => key.extend_from_slice(b"%3D"),
                    b'%' => key.extend_from_slice(b"%25"),
                    other => key.push(other),
                }
            }
            record(&mut records, &key, value);
        }
        records
    }
}

/// Appends `LENGTH KEY=VALUE\n`.
fn record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // A space, an equals sign and a newline.
    let rest = key.len() + value.len() + 3;
    // One more digit in the length can make the length one digit longer.
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.push(b' ');
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn new_header(entry_type: EntryType, name: &[u8], size: u64, mode: u32) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(entry_type);
    header.set_size(size);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    if let Some(ustar) = header.as_ustar_mut() {
        copy_cut(&mut ustar.name, name);
        set_device(&mut ustar.dev_major, 0);
        set_device(&mut ustar.dev_minor, 0);
    }
    header
}

fn push_header(out: &mut Vec<u8>, mut header: Header) {
    header.set_cksum();
    out.extend_from_slice(header.as_bytes());
}

/// `a/b` becomes `a/DIRECTORY/b`.
fn with_directory(path: &[u8], directory: &[u8]) -> Vec<u8> {
    let path = path.strip_suffix(b"/").unwrap_or(path);
    let at = path.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1);
    [&path[..at], directory, b"/", &path[at..]].concat()
}

/// Copies as much as fits; the whole is in a record.
fn copy_cut(field: &mut [u8], bytes: &[u8]) {
    let len = bytes.len().min(field.len());
    field[..len].copy_from_slice(&bytes[..len]);
}

/// A number, or 0 where the field is too small for it and a record holds it.
fn fit(value: u64, max: u64) -> u64 {
    if value > max { 0 } else { value }
}

fn clamp_time(time: Timestamp) -> u64 {
    u64::try_from(time.secs).map_or(0, |secs| secs.min(MAX_11))
}

fn set_device(field: &mut [u8; 8], number: u32) {
    if u64::from(number) <= MAX_7 {
        field.copy_from_slice(format!("{number:07o}\0").as_bytes());
    } else {
        // The form of GNU tar for large numbers: a set high bit, then big-endian binary.
        field[..4].copy_from_slice(&[0x80, 0, 0, 0]);
        field[4..].copy_from_slice(&number.to_be_bytes());
    }
}

/// Fills up the last block after `len` bytes of data.
pub(super) fn pad(out: &mut Vec<u8>, len: u64) {
    #[expect(clippy::cast_possible_truncation, reason = "a remainder of 512")]
    let used = (len % BLOCK as u64) as usize;
    if used > 0 {
        out.resize(out.len() + BLOCK - used, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use offshoot_vfs::{FileId, FileType};

    use super::*;

    fn attr() -> Attr {
        Attr {
            file: FileId { dev: 5, ino: 300 },
            file_type: FileType::Regular,
            permissions: 0o4755,
            nlink: 1,
            uid: 3_000_000,
            gid: 7,
            rdev: (8, 300_000_000),
            size: 5,
            allocated_bytes: 0,
            atime: Timestamp { secs: 1, nanos: 2 },
            mtime: Timestamp { secs: -5, nanos: 250_000_000 },
            ctime: Timestamp { secs: 1, nanos: 2 },
            btime: Timestamp::default(),
            generation: 0,
        }
    }

    #[test]
    fn a_record_counts_its_own_length() {
        for len in 0..1200 {
            let mut records = Vec::new();
            record(&mut records, b"k", &vec![b'v'; len]);
            let text = String::from_utf8(records).unwrap();
            let (length, _) = text.split_once(' ').unwrap();
            assert_eq!(length.parse::<usize>().unwrap(), text.len());
        }
    }

    #[test]
    fn what_does_not_fit_the_header_is_read_back_from_the_records() {
        let path = [b"./".to_vec(), vec![b'd'; 200], b"/".to_vec(), vec![0xff; 255]].concat();
        let attr = attr();
        let no_list = b"system.posix_acl_access".to_vec();
        let xattrs =
            vec![(b"user.a=b%".to_vec(), b"a=b\0".to_vec()), (no_list, b"no list".to_vec())];
        let front = Front {
            entry_type: EntryType::Regular,
            path: &path,
            link: b"",
            attr: &attr,
            size: 5,
            sparse_size: None,
            xattrs: &xattrs,
        };
        let mut bytes = Vec::new();
        front.write(&mut bytes);
        bytes.extend_from_slice(b"hello");
        pad(&mut bytes, 5);
        bytes.extend_from_slice(&[0; 2 * BLOCK]);
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut entries = archive.entries().unwrap();
        let mut entry = entries.next().unwrap().unwrap();
        assert_eq!(&*entry.path_bytes(), &path[..]);
        assert_eq!(entry.header().mode().unwrap(), 0o4755);
        let mut found = std::collections::HashMap::new();
        for extension in entry.pax_extensions().unwrap().unwrap() {
            let extension = extension.unwrap();
            found.insert(extension.key_bytes().to_vec(), extension.value_bytes().to_vec());
        }
        assert_eq!(found[&b"mtime"[..]], b"-4.750000000");
        assert_eq!(found[&b"uid"[..]], b"3000000");
        assert!(!found.contains_key(&b"gid"[..]));
        assert_eq!(found[&b"SCHILY.xattr.user.a%3Db%25"[..]], b"a=b\0");
        assert_eq!(found[&b"SCHILY.xattr.system.posix_acl_access"[..]], b"no list");
        assert!(!found.contains_key(&b"SCHILY.acl.access"[..]));
        let mut data = String::new();
        entry.read_to_string(&mut data).unwrap();
        assert_eq!(data, "hello");
        assert!(entries.next().is_none());
    }

    #[test]
    fn large_device_numbers_are_kept() {
        let attr = Attr { file_type: FileType::BlockDevice, ..attr() };
        let front = Front {
            entry_type: EntryType::Block,
            path: b"./dev",
            link: b"",
            attr: &attr,
            size: 0,
            sparse_size: None,
            xattrs: &[],
        };
        let mut bytes = Vec::new();
        front.write(&mut bytes);
        let header = Header::from_byte_slice(&bytes[bytes.len() - BLOCK..]);
        assert_eq!(header.device_major().unwrap(), Some(8));
        let field = &header.as_ustar().unwrap().dev_minor;
        assert_eq!(field[0], 0x80);
        assert_eq!(u32::from_be_bytes(*field.last_chunk().unwrap()), 300_000_000);
    }
}
