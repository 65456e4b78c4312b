//! The operations of an actor on flags, extended attributes and access control lists.
//!
//! The actor also clears the flags that make a file immutable or append-only: those of the oldest
//! such file when there are several, and those of all at the end.

use offshoot_vfs::acl::{ACCESS, DEFAULT};
use offshoot_vfs::{FileFlags, FileSystem, XattrMode};

use super::super::ModelManners;
use super::{Actor, ActorFile};

/// The flags, each with N if one in N files gets it.
const FLAGS: [(FileFlags, u64); 9] = [
    (FileFlags::NODUMP, 2),
    (FileFlags::NOATIME, 2),
    (FileFlags::COMPRESS, 4),
    (FileFlags::NOCOMPRESS, 6),
    (FileFlags::NODATACOW, 4),
    (FileFlags::IMMUTABLE, 6),
    (FileFlags::APPEND, 6),
    // Every change of such a file is a commit of its own.
    (FileFlags::SYNC, 16),
    (FileFlags::DIRSYNC, 16),
];

/// The flags that forbid changes.
const FIXED: FileFlags = FileFlags::IMMUTABLE.union(FileFlags::APPEND);

/// The flags that say how data is stored. Files without checksums are not compressed either, and
/// the model knows neither.
const STORAGE: FileFlags =
    FileFlags::COMPRESS.union(FileFlags::NOCOMPRESS).union(FileFlags::NODATACOW);

/// How many files may be immutable or append-only at the same time.
const MOST_FIXED: usize = 3;

impl Actor<'_> {
    /// Sets random flags, including ones that contradict each other.
    pub(super) fn set_flags(&mut self) {
        let Some(file) = self.file() else { return };
        let Some((ours, model)) = self.both("flags", |fs, of| fs.flags(of(file))) else { return };
        let unknown = if self.unsummed.is_some() { STORAGE } else { FileFlags::empty() };
        assert_eq!(ours - unknown, model - unknown, "flags of {file:?}");
        let mut flags: FileFlags =
            FLAGS.iter().filter(|one| self.random.below(one.1) == 0).map(|one| one.0).collect();
        if self.may_be_full {
            // On a full volume the flags could not be cleared again.
            flags.remove(FIXED);
        }
        if self.unsummed.is_some() {
            flags.remove(STORAGE);
        }
        flags.remove(self.lacks);
        let at = self.at;
        let is_set = self.both("set_flags", |fs, of| fs.set_flags(of(file), flags, at)).is_some();
        if is_set {
            self.reflagged.insert(file.ours);
        }
        if is_set && flags.intersects(FIXED) {
            self.fixed.push(file);
        }
        if self.fixed.len() > MOST_FIXED {
            let first = self.fixed.remove(0);
            self.let_go(first);
        }
    }

    /// Clears the flags that forbid changes. The file may be gone by now.
    pub(super) fn let_go(&self, file: ActorFile) {
        let at = self.at;
        let is_gone = self.model.flags(file.model).is_err();
        if is_gone && self.model.state().manners == ModelManners::Xfs {
            // Another file may have its number by now.
            return;
        }
        if let Some((_, flags)) = self.both("flags", |fs, of| fs.flags(of(file))) {
            self.both("set_flags", |fs, of| fs.set_flags(of(file), flags - FIXED, at));
        }
    }

    pub(super) fn xattr(&mut self) {
        let Some(file) = self.file() else { return };
        let (name, value) = match self.random.below(10) {
            0 => (b"btrfs.compression".to_vec(), self.property()),
            1 => (ACCESS.to_vec(), self.list()),
            2 => (DEFAULT.to_vec(), self.list()),
            kind => {
                let namespace: &[u8] = match kind {
                    3 => b"trusted.",
                    4 => b"security.",
                    _ => b"user.",
                };
                // Names of xattrs are hashed like names of files: some of these collide.
                let name = [namespace, &self.name()[..]].concat();
                let len = usize::try_from(self.random.below(200)).expect("small");
                (name, self.random.bytes(len))
            }
        };
        let has_property = self.unsummed.is_none() && !self.lacks.contains(FileFlags::COMPRESS);
        if name.starts_with(b"btrfs.") && !has_property {
            return;
        }
        let at = self.at;
        if self.random.below(4) == 0 {
            self.both("remove_xattr", |fs, of| fs.remove_xattr(of(file), &name, at));
            return;
        }
        let mode = match self.random.below(4) {
            0 => XattrMode::Create,
            1 => XattrMode::Replace,
            _ => XattrMode::Set,
        };
        self.both("set_xattr", |fs, of| fs.set_xattr(of(file), &name, &value, mode, at));
    }

    /// A random value of the compression property. The empty value removes the property, and some
    /// values are invalid.
    fn property(&mut self) -> Vec<u8> {
        const VALUES: [&str; 8] = ["zlib", "lzo", "zstd", "zstd:5", "none", "no", "", "gzip"];
        let value = VALUES[usize::try_from(self.random.below(8)).expect("below 8")];
        value.into()
    }

    /// A random access control list: the three entries that every list has, or more; rarely one
    /// that is invalid.
    fn list(&mut self) -> Vec<u8> {
        const NONE: u32 = u32::MAX;
        let random = &mut self.random;
        let mut permissions = || u16::try_from(random.below(8)).expect("three bits");
        let mut entries = vec![(0x01, permissions(), NONE)];
        let [user, group, mask, last] = [(); 4].map(|()| permissions());
        if user % 2 == 0 {
            entries.push((0x02, user, 1000));
            entries.push((0x02, group, 2000));
        }
        entries.push((0x04, permissions(), NONE));
        if group % 2 == 0 {
            entries.push((0x08, group, 100));
        }
        // An entry for a named user or group requires a mask; now and then the list has none.
        if entries.len() > 2 && last > 0 {
            entries.push((0x10, mask, NONE));
        }
        entries.push((0x20, last, NONE));
        let mut value = vec![2, 0, 0, 0];
        for (tag, permissions, id) in entries {
            let tag: u16 = tag;
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&permissions.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }
}
