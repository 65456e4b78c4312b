//! Which names an inode with several names was given already.
//!
//! The table may have to hold every file of a volume, so it is not in memory: it is a
//! hash table in an unnamed temporary file, made when the first inode with
//! several names is met.
//!
//! ```text
//! 0            8 * SLOTS                        end
//! | slot | ... | record | record | ... | record |
//! ```
//!
//! A slot holds the offset of the newest record of its bucket (0: none), a record the offset
//! of the one before it in the bucket:
//!
//! ```text
//! | previous 8 | dev 8 | ino 8 | generation 8 | parent dev 8 | parent ino 8 |
//! | name length 2 | name |
//! ```
//!
//! The generation tells an inode from one that gets its number while the copy runs.
//!
//! Every name that was made has a record; a record with an empty name says that the inode could not
//! be read, so that later names of it are not made from half a file. A name is kept with its
//! directory instead of as a path, because paths grow with the depth of the tree.
//!
//! The hash is keyed with a random key, so an image cannot choose inode numbers that all
//! fall into one bucket.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::FileExt;

use offshoot_vfs::{Attr, FileId, SafeName};

const SLOTS: u64 = 1 << 20;
const HEADER: usize = 50;

/// The newest thing known of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KnownLink {
    /// It was given this name.
    Name(LinkName),
    /// It could not be read.
    Unreadable,
}

/// A name that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkName {
    /// The directory that holds it.
    pub(crate) parent: FileId,
    /// The name in it.
    pub(crate) name: SafeName,
}

/// An inode with several names.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct LinkedInode {
    file: FileId,
    generation: u64,
}

impl LinkedInode {
    fn of(attr: &Attr) -> Self {
        Self { file: attr.file, generation: attr.generation }
    }
}

/// The table; see the top of this file.
pub struct LinkTable {
    file: Option<File>,
    end: u64,
    key: RandomState,
}

struct LinkRecord {
    previous: u64,
    inode: LinkedInode,
    parent: FileId,
    name: Vec<u8>,
}

impl Default for LinkTable {
    /// An empty table, which takes no space.
    fn default() -> Self {
        Self { file: None, end: SLOTS * 8, key: RandomState::new() }
    }
}

impl LinkTable {
    /// The newest record of an inode.
    pub(crate) fn newest(&self, attr: &Attr) -> io::Result<Option<KnownLink>> {
        let Some(record) = self.records(attr)?.next().transpose()? else { return Ok(None) };
        Ok(Some(match record.into_name() {
            Some(name) => KnownLink::Name(name),
            None => KnownLink::Unreadable,
        }))
    }

    /// Every name that an inode was given, newest first.
    pub(crate) fn names(
        &self,
        attr: &Attr,
    ) -> io::Result<impl Iterator<Item = io::Result<LinkName>> + '_> {
        let names = self.records(attr)?.filter_map(|record| match record {
            Ok(record) => record.into_name().map(Ok),
            Err(error) => Some(Err(error)),
        });
        Ok(names)
    }

    /// Notes that an inode was given a name.
    pub(crate) fn add(&mut self, attr: &Attr, name: &LinkName) -> io::Result<()> {
        self.append(attr, name.parent, &name.name)
    }

    /// Notes that an inode could not be read.
    pub(crate) fn mark_unreadable(&mut self, attr: &Attr) -> io::Result<()> {
        self.append(attr, attr.file, b"")
    }

    fn append(&mut self, attr: &Attr, parent: FileId, name: &[u8]) -> io::Result<()> {
        let inode = LinkedInode::of(attr);
        let slot = self.slot(inode);
        let table = match &mut self.file {
            Some(table) => table,
            none => {
                let table = tempfile::tempfile()?;
                table.set_len(SLOTS * 8)?;
                none.insert(table)
            }
        };
        let mut previous = [0; 8];
        table.read_exact_at(&mut previous, slot)?;
        let mut record = Vec::with_capacity(HEADER + name.len());
        record.extend_from_slice(&previous);
        let LinkedInode { file, generation } = inode;
        for number in [file.dev, file.ino, generation, parent.dev, parent.ino] {
            record.extend_from_slice(&number.to_le_bytes());
        }
        let name_len = u16::try_from(name.len()).map_err(io::Error::other)?;
        record.extend_from_slice(&name_len.to_le_bytes());
        record.extend_from_slice(name);
        table.write_all_at(&record, self.end)?;
        table.write_all_at(&self.end.to_le_bytes(), slot)?;
        self.end += record.len() as u64;
        Ok(())
    }

    /// The offset of the slot of an inode.
    fn slot(&self, inode: LinkedInode) -> u64 {
        self.key.hash_one(inode) % SLOTS * 8
    }

    fn records(
        &self,
        attr: &Attr,
    ) -> io::Result<impl Iterator<Item = io::Result<LinkRecord>> + '_> {
        let inode = LinkedInode::of(attr);
        let mut next = 0;
        if let Some(table) = &self.file {
            let mut slot = [0; 8];
            table.read_exact_at(&mut slot, self.slot(inode))?;
            next = u64::from_le_bytes(slot);
        }
        let bucket = std::iter::from_fn(move || {
            let table = self.file.as_ref().filter(|_| next != 0)?;
            let record = read_record(table, next);
            next = record.as_ref().map_or(0, |record| record.previous);
            Some(record)
        });
        Ok(bucket
            .filter(move |record| record.as_ref().map_or(true, |record| record.inode == inode)))
    }
}

fn read_record(table: &File, at: u64) -> io::Result<LinkRecord> {
    let mut header = [0; HEADER];
    table.read_exact_at(&mut header, at)?;
    let (numbers, name_len) = header.split_at(HEADER - 2);
    let mut numbers = numbers.as_chunks::<8>().0.iter().copied().map(u64::from_le_bytes);
    let mut number = || numbers.next().unwrap_or_default();
    let previous = number();
    let file = FileId { dev: number(), ino: number() };
    let inode = LinkedInode { file, generation: number() };
    let parent = FileId { dev: number(), ino: number() };
    let mut name = vec![0; usize::from(u16::from_le_bytes([name_len[0], name_len[1]]))];
    table.read_exact_at(&mut name, at + HEADER as u64)?;
    Ok(LinkRecord { previous, inode, parent, name })
}

impl LinkRecord {
    fn into_name(self) -> Option<LinkName> {
        // What was written came from a safe name; only the empty one is none.
        SafeName::new(&self.name).ok().map(|name| LinkName { parent: self.parent, name })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use offshoot_vfs::{FileType, Timestamp};

    use super::*;

    fn id(ino: u64) -> FileId {
        FileId { dev: 5, ino }
    }

    /// The attributes of an inode with two names.
    fn linked(ino: u64, generation: u64) -> Attr {
        let at = Timestamp::default();
        Attr {
            file: id(ino),
            file_type: FileType::Regular,
            permissions: 0o644,
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: (0, 0),
            size: 0,
            allocated_bytes: 0,
            atime: at,
            mtime: at,
            ctime: at,
            btime: at,
            generation,
        }
    }

    fn name(parent: u64, name: &str) -> LinkName {
        LinkName { parent: id(parent), name: SafeName::new(name.as_bytes()).unwrap() }
    }

    #[test]
    fn an_empty_table_has_no_file() {
        let table = LinkTable::default();
        assert_eq!(table.newest(&linked(257, 0)).unwrap(), None);
        assert_eq!(table.names(&linked(257, 0)).unwrap().count(), 0);
        assert!(table.file.is_none());
    }

    #[test]
    fn names_are_found_again_in_crowded_buckets() {
        // A fixed key is not to be had; many files make sure that buckets are shared.
        let mut table = LinkTable::default();
        let mut model: HashMap<u64, Vec<LinkName>> = HashMap::new();
        for round in 0..3u64 {
            for ino in 0..20_000 {
                let name = name(ino % 7, &format!("{round}-{ino}"));
                table.add(&linked(ino, 0), &name).unwrap();
                model.entry(ino).or_default().insert(0, name);
            }
        }
        for (ino, names) in model {
            assert_eq!(
                table.newest(&linked(ino, 0)).unwrap(),
                Some(KnownLink::Name(names[0].clone()))
            );
            let found: Vec<LinkName> =
                table.names(&linked(ino, 0)).unwrap().map(Result::unwrap).collect();
            assert_eq!(found, names);
        }
        let other = Attr { file: FileId { dev: 6, ino: 3 }, ..linked(3, 0) };
        assert_eq!(table.newest(&other).unwrap(), None);
    }

    #[test]
    fn an_inode_that_gets_the_number_of_another_one_is_a_new_one() {
        let mut table = LinkTable::default();
        table.add(&linked(1, 7), &name(2, "a")).unwrap();
        assert_eq!(table.newest(&linked(1, 8)).unwrap(), None);
        assert_eq!(table.newest(&linked(1, 7)).unwrap(), Some(KnownLink::Name(name(2, "a"))));
    }

    #[test]
    fn unreadable_hides_names_but_keeps_them() {
        let mut table = LinkTable::default();
        table.add(&linked(1, 0), &name(2, "a")).unwrap();
        table.mark_unreadable(&linked(1, 0)).unwrap();
        assert_eq!(table.newest(&linked(1, 0)).unwrap(), Some(KnownLink::Unreadable));
        assert_eq!(table.names(&linked(1, 0)).unwrap().count(), 1);
    }
}
