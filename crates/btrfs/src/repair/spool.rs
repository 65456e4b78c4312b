//! Items in the order of their keys, in a file that can be read again and again.
//!
//! ```text
//! | object id 8 | type 1 | offset 8 | length 2 | data |
//! ```

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{Error, Result};

/// The length of what stands in front of the data of an item.
const HEAD: usize = 19;

/// Items that were written to a file.
#[derive(Debug)]
pub(super) struct ItemSpool {
    file: File,
    count: u64,
}

/// Writes items to a file.
#[derive(Debug)]
pub(super) struct SpoolWriter {
    out: BufWriter<File>,
    count: u64,
}

impl SpoolWriter {
    /// A file without a name in `scratch`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(super) fn new(scratch: &Path) -> Result<Self> {
        let file = tempfile::tempfile_in(scratch).map_err(spool_error)?;
        Ok(Self { out: BufWriter::with_capacity(1 << 20, file), count: 0 })
    }

    /// Adds an item.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn push(&mut self, key: Key, data: &[u8]) -> Result<()> {
        let len = u16::try_from(data.len()).map_err(|_| {
            spool_error(io::Error::new(io::ErrorKind::InvalidInput, "an item of 64 KiB"))
        })?;
        let mut head = Vec::with_capacity(HEAD);
        head.extend_from_slice(&key.objectid.to_le_bytes());
        head.push(key.item_type.0);
        head.extend_from_slice(&key.offset.to_le_bytes());
        head.extend_from_slice(&len.to_le_bytes());
        self.count += 1;
        self.out.write_all(&head).and_then(|()| self.out.write_all(data)).map_err(spool_error)
    }

    /// Ends writing.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) fn finish(self) -> Result<ItemSpool> {
        let file = self.out.into_inner().map_err(|error| spool_error(error.into_error()))?;
        Ok(ItemSpool { file, count: self.count })
    }
}

impl ItemSpool {
    /// Reads all items from the first one on. One reader at a time.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn read(&self) -> Result<SpooledItems<'_>> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0)).map_err(spool_error)?;
        let reader = BufReader::with_capacity(1 << 20, file);
        let mut items = SpooledItems { reader, left: self.count, next: None, data: Vec::new() };
        items.advance()?;
        Ok(items)
    }
}

/// A position among the items of a spool.
#[derive(Debug)]
pub(super) struct SpooledItems<'s> {
    reader: BufReader<&'s File>,
    left: u64,
    next: Option<Key>,
    data: Vec<u8>,
}

impl SpooledItems<'_> {
    /// The next item; `None` behind the last one.
    pub(super) fn item(&self) -> Option<(Key, &[u8])> {
        self.next.map(|key| (key, &self.data[..]))
    }

    /// Goes on to the item behind it.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn advance(&mut self) -> Result<()> {
        self.next = None;
        let Some(left) = self.left.checked_sub(1) else { return Ok(()) };
        self.left = left;
        self.read_item().map_err(spool_error)
    }

    fn read_item(&mut self) -> io::Result<()> {
        let (mut number, mut kind, mut len) = ([0; 8], [0; 1], [0; 2]);
        self.reader.read_exact(&mut number)?;
        let objectid = u64::from_le_bytes(number);
        self.reader.read_exact(&mut kind)?;
        self.reader.read_exact(&mut number)?;
        self.reader.read_exact(&mut len)?;
        self.data.resize(usize::from(u16::from_le_bytes(len)), 0);
        self.reader.read_exact(&mut self.data)?;
        let [kind] = kind;
        self.next = Some(Key::new(objectid, ItemType(kind), u64::from_le_bytes(number)));
        Ok(())
    }
}

fn spool_error(error: io::Error) -> Error {
    Error::io("a file for items of the new trees", error)
}
