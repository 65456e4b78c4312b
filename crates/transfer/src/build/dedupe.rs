//! Equal data of the files of a build is stored once.
//!
//! ```text
//! file      | unit 128 KiB | unit 128 KiB | end |
//!             known          new            known
//!             clone_range    write          clone_range
//! ```
//!
//! Files are cut into *units* at multiples of 128 KiB. A unit that was written before is not
//! written again: `clone_range` lets the file share it. Units that follow each other, and do so in
//! the file where they were written, are shared by one call. So a file that is there already is
//! shared as a whole.
//!
//! A table leads from the hash of a unit to the place where it was written. The hash only proposes:
//! the bytes of that place are compared with those of the unit before it is shared. So a weak and
//! fast hash does, an archive that is made of collisions loses nothing but space, and a place whose
//! file was removed or replaced meanwhile is found out. What is compared was written lately or must
//! be read again; it is never larger than what would be written otherwise.
//!
//! Only whole blocks of the volume can be shared, and the end of a file with the end of another. A
//! file that is smaller than a block is written: btrfs stores small ones in its trees.
//!
//! The table has two halves. When the newer one is full, the older one is forgotten, and what was
//! found in it lately is in the newer one. So memory is bounded, and the same sources share the
//! same units.

use std::collections::HashMap;
use std::io;

use offshoot_vfs::{
    Code, Errno, Error, FileId, FilePosition, FileSystemMut, Result as VfsResult, Timestamp,
};
use xxhash_rust::xxh64::xxh64;

/// The length of a unit. The builder reads pieces of a multiple of it.
pub(super) const UNIT_BYTES: usize = 128 << 10;

/// How many units a half of the table holds, of 33 bytes each: a full hash table of 2^19 slots.
const HALF_UNITS: usize = (1 << 19) / 8 * 7;

/// Why nothing can be shared on a volume.
const NO_SHARING: &str = "the volume cannot share data (XFS needs the feature reflink for that): \
                          build without --dedupe";

/// A file that is filled.
#[derive(Clone, Copy)]
pub(super) struct FilledFile<'a> {
    pub(super) fs: &'a dyn FileSystemMut,
    pub(super) file: FileId,
    /// Its length in the end.
    pub(super) size: u64,
    pub(super) at: Timestamp,
}

/// A range that will be shared.
#[derive(Clone, Copy)]
struct FoundRange {
    from: FilePosition,
    /// Where it begins in the file that is filled.
    to: u64,
    len: u64,
}

impl FoundRange {
    fn end(&self) -> u64 {
        self.to.saturating_add(self.len)
    }

    /// The place behind its source.
    fn next_source(&self) -> FilePosition {
        FilePosition { offset: self.from.offset.saturating_add(self.len), ..self.from }
    }
}

/// The units that were written; see the top of this file.
pub(super) struct StoredUnits {
    /// The unit in which the volume shares data.
    block_bytes: u64,
    newer: HashMap<u64, FilePosition>,
    older: HashMap<u64, FilePosition>,
    /// What is found of the file that is being filled, and not shared yet.
    found: Option<FoundRange>,
    /// What is compared.
    buf: Vec<u8>,
    /// How much was shared and not written.
    shared_bytes: u64,
}

impl StoredUnits {
    /// No units of the volume.
    pub(super) fn new(fs: &dyn FileSystemMut) -> VfsResult<Self> {
        Ok(Self {
            block_bytes: u64::from(fs.statfs()?.block_size).max(1),
            newer: HashMap::new(),
            older: HashMap::new(),
            found: None,
            buf: vec![0; UNIT_BYTES],
            shared_bytes: 0,
        })
    }

    /// How much was shared and not written, in bytes.
    pub(super) fn shared_bytes(&self) -> u64 {
        self.shared_bytes
    }

    /// Lets `into` have `data` at `offset`. The pieces of a file come in ascending order, and the
    /// caller [ends](Self::end_file) the file behind the last one.
    pub(super) fn put(&mut self, into: &FilledFile<'_>, offset: u64, data: &[u8]) -> VfsResult<()> {
        let mut piece = FilledPiece { offset, data, stored: 0 };
        let mut done = 0;
        while let Some((at, unit)) = piece.unit(done) {
            if let Some(from) = self.source_of(into, &mut piece, done)? {
                self.write(into, &mut piece, done)?;
                self.find(into, from, at, unit.len() as u64)?;
                piece.stored = done + unit.len();
            }
            done += unit.len();
        }
        self.write(into, &mut piece, done)
    }

    /// Shares what is found of the file and not shared yet.
    pub(super) fn end_file(&mut self, into: &FilledFile<'_>) -> VfsResult<()> {
        let Some(FoundRange { from, to, len }) = self.found.take() else { return Ok(()) };
        let place = FilePosition { file: into.file, offset: to };
        match into.fs.clone_range(from, place, len, into.at) {
            Ok(()) => {
                self.shared_bytes = self.shared_bytes.saturating_add(len);
                Ok(())
            }
            // One of the two has checksums or copies on write, and the other does not.
            Err(error) if error.errno() == Errno::INVAL => {
                let copied = into.fs.copy_range(from, place, len, into.at)?;
                if copied == len {
                    return Ok(());
                }
                Err(Error::io("copying equal data", io::Error::from(io::ErrorKind::UnexpectedEof)))
            }
            Err(error) if error.errno() == Errno::OPNOTSUPP => {
                Err(Error::unsupported(Code::Unsupported, NO_SHARING.to_owned()))
            }
            Err(error) => Err(error),
        }
    }

    /// Where the bytes of the unit at `done` are already.
    fn source_of(
        &mut self,
        into: &FilledFile<'_>,
        piece: &mut FilledPiece<'_>,
        done: usize,
    ) -> VfsResult<Option<FilePosition>> {
        let Some((at, unit)) = piece.unit(done) else { return Ok(None) };
        if !self.can_share(into, at, unit.len() as u64) {
            return Ok(None);
        }
        let next = self.found.filter(|found| found.end() == at).map(|found| found.next_source());
        if let Some(next) = next
            && self.is_same(into.fs, next, unit)?
        {
            return Ok(Some(next));
        }
        let hash = hash_of(unit);
        let known = self.newer.get(&hash).or_else(|| self.older.get(&hash));
        let Some(&known) = known else { return Ok(None) };
        if known.file == into.file {
            // It may be a place that is not written yet.
            self.write(into, piece, done)?;
        }
        if !self.is_same(into.fs, known, unit)? {
            return Ok(None);
        }
        self.remember(hash, known);
        Ok(Some(known))
    }

    /// Whether a unit can be shared: whole blocks, or those at the end of a file.
    fn can_share(&self, into: &FilledFile<'_>, at: u64, len: u64) -> bool {
        let is_whole = |bytes: u64| bytes.is_multiple_of(self.block_bytes);
        let ends = at.saturating_add(len) >= into.size;
        into.size >= self.block_bytes && is_whole(at) && (is_whole(len) || ends)
    }

    /// Whether the file at `place` has these bytes now, and ends behind them if they are not whole
    /// blocks. Its place in the table may be one of a file that is gone.
    fn is_same(
        &mut self,
        fs: &dyn FileSystemMut,
        place: FilePosition,
        unit: &[u8],
    ) -> VfsResult<bool> {
        let buf = self.buf.get_mut(..unit.len()).unwrap_or_default();
        match fs.read(place.file, place.offset, buf) {
            Ok(read) if read < unit.len() || buf != unit => return Ok(false),
            Ok(_) => {}
            Err(Error::Posix { .. }) => return Ok(false),
            Err(error) => return Err(error),
        }
        let len = unit.len() as u64;
        if len.is_multiple_of(self.block_bytes) {
            return Ok(true);
        }
        Ok(fs.attr(place.file)?.size == place.offset.saturating_add(len))
    }

    /// Notes that the unit at `to` is shared with `from`.
    fn find(
        &mut self,
        into: &FilledFile<'_>,
        from: FilePosition,
        to: u64,
        len: u64,
    ) -> VfsResult<()> {
        match &mut self.found {
            Some(found) if found.end() == to && found.next_source() == from => found.len += len,
            _ => {
                self.end_file(into)?;
                self.found = Some(FoundRange { from, to, len });
            }
        }
        Ok(())
    }

    /// Writes what is not stored yet of the first `end` bytes of the piece.
    fn write(
        &mut self,
        into: &FilledFile<'_>,
        piece: &mut FilledPiece<'_>,
        end: usize,
    ) -> VfsResult<()> {
        if piece.stored >= end {
            return Ok(());
        }
        self.end_file(into)?;
        let data = piece.data.get(piece.stored..end).unwrap_or_default();
        into.fs.write(into.file, piece.at(piece.stored), data, into.at)?;
        while piece.stored < end
            && let Some((at, unit)) = piece.unit(piece.stored)
        {
            if self.can_share(into, at, unit.len() as u64) {
                self.remember(hash_of(unit), FilePosition { file: into.file, offset: at });
            }
            piece.stored += unit.len();
        }
        Ok(())
    }

    fn remember(&mut self, hash: u64, place: FilePosition) {
        if self.newer.len() >= HALF_UNITS {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(hash, place);
    }
}

/// A piece of a file, of which the first part is stored.
struct FilledPiece<'a> {
    offset: u64,
    data: &'a [u8],
    /// How much of it is written or found.
    stored: usize,
}

impl<'a> FilledPiece<'a> {
    /// The place in the file of a byte of the piece.
    fn at(&self, index: usize) -> u64 {
        self.offset.saturating_add(index as u64)
    }

    /// The unit, or its part in the piece, that begins at a byte of it; `None` behind the end.
    fn unit(&self, index: usize) -> Option<(u64, &'a [u8])> {
        let at = self.at(index);
        let inside = usize::try_from(at % UNIT_BYTES as u64).unwrap_or(0);
        let left = self.data.get(index..).filter(|left| !left.is_empty())?;
        Some((at, left.get(..UNIT_BYTES - inside).unwrap_or(left)))
    }
}

/// The hash of a unit. Equal bytes of another length have another one, because their ends are.
fn hash_of(unit: &[u8]) -> u64 {
    xxh64(unit, unit.len() as u64)
}
