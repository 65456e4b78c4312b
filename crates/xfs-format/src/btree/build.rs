//! Values to blocks.

use zerocopy::IntoBytes;

use super::{LongBlockHeader, ShortBlockHeader, XfsBtreeHeader, XfsTree};
use crate::{AgBlock, FsBlock, Ino, Lsn, U64, XfsGeometry, csum};

/// A block of a tree that is being built.
///
/// A caller makes one, sets its content and its neighbours, and takes its bytes, which then have
/// their checksum.
#[derive(Clone, Debug)]
pub struct XfsBtreeBuilder<'g> {
    geometry: &'g XfsGeometry,
    tree: XfsTree,
    bytes: Vec<u8>,
}

impl<'g> XfsBtreeBuilder<'g> {
    /// A block at `at` without entries and neighbours. `owner` is the file of a long block; short
    /// ones belong to their group. `None` when the volume has no such block or no such tree.
    #[must_use]
    pub fn new(
        geometry: &'g XfsGeometry,
        tree: XfsTree,
        at: FsBlock,
        owner: Ino,
        level: u16,
    ) -> Option<Self> {
        let (ag, block) = geometry.split(at)?;
        let magic = tree.magic(geometry)?;
        let mut bytes = vec![0; geometry.block_size()];
        let (blkno, uuid) = (geometry.place(ag, block).0.into(), geometry.uuid.into_bytes());
        if tree.is_long() {
            let header = long_header(magic, level, blkno, uuid, owner);
            copy(&mut bytes, 0, &header.as_bytes()[..tree.header_len(geometry)]);
        } else {
            let header = ShortBlockHeader {
                magic,
                level: level.into(),
                numrecs: 0.into(),
                left: AgBlock::NULL.0.into(),
                right: AgBlock::NULL.0.into(),
                blkno,
                lsn: 0.into(),
                uuid,
                owner: ag.0.into(),
                crc: [0; 4],
            };
            copy(&mut bytes, 0, &header.as_bytes()[..tree.header_len(geometry)]);
        }
        Some(Self { geometry, tree, bytes })
    }

    /// Sets the neighbours on the same level.
    pub fn set_siblings(&mut self, left: Option<u64>, right: Option<u64>) {
        let len = self.tree.pointer_len();
        for (index, block) in [left, right].into_iter().enumerate() {
            let block = block.unwrap_or(u64::MAX).to_be_bytes();
            copy(&mut self.bytes, 8 + index * len, &block[8 - len..]);
        }
    }

    /// Sets the LSN of the last change, which V4 volumes do not have.
    pub fn set_lsn(&mut self, lsn: Lsn) {
        if self.geometry.has_checksums() {
            copy(&mut self.bytes, self.tree.identity().lsn, &lsn.0.to_be_bytes());
        }
    }

    /// Replaces the records of a leaf by those in `records`, as they are stored. Returns whether
    /// they fit; nothing is changed if not.
    pub fn set_records(&mut self, records: &[u8]) -> bool {
        let count = records.len() / self.tree.record_len();
        if !records.len().is_multiple_of(self.tree.record_len()) || !self.set_count(count, true) {
            return false;
        }
        let header = self.tree.header_len(self.geometry);
        copy(&mut self.bytes, header, records);
        true
    }

    /// Replaces the children of a node. `keys` is what the node stores about them, made by
    /// [`XfsTree::push_key`]. Returns whether they fit; nothing is changed if not.
    pub fn set_children(&mut self, keys: &[u8], pointers: &[u64]) -> bool {
        let (len, count) = (self.tree.pointer_len(), pointers.len());
        if keys.len() != count * self.tree.key_len() || !self.set_count(count, false) {
            return false;
        }
        let header = self.tree.header_len(self.geometry);
        copy(&mut self.bytes, header, keys);
        let first = header + self.tree.capacity(self.geometry, 1) * self.tree.key_len();
        for (index, pointer) in pointers.iter().enumerate() {
            copy(&mut self.bytes, first + index * len, &pointer.to_be_bytes()[8 - len..]);
        }
        true
    }

    /// Sets the number of entries of a leaf or a node, if it is one and they fit, and clears the
    /// old ones.
    fn set_count(&mut self, count: usize, is_leaf: bool) -> bool {
        let level = XfsBtreeHeader::read(&self.bytes, self.geometry, self.tree).level;
        let fits = count <= self.tree.capacity(self.geometry, level) && (level == 0) == is_leaf;
        if let Some(count) = u16::try_from(count).ok().filter(|_| fits) {
            copy(&mut self.bytes, 6, &count.to_be_bytes());
            self.bytes[self.tree.header_len(self.geometry)..].fill(0);
        }
        fits
    }

    /// The bytes of the header, without a checksum.
    #[must_use]
    pub fn header(&self) -> &[u8] {
        &self.bytes[..self.tree.header_len(self.geometry)]
    }

    /// The bytes, with their checksum.
    #[must_use]
    pub fn into_bytes(mut self) -> Vec<u8> {
        seal(&mut self.bytes, self.geometry, self.tree);
        self.bytes
    }
}

/// Stores the checksum of a block of a tree.
///
/// # Panics
///
/// When `bytes` is shorter than the header of a block.
pub fn seal(bytes: &mut [u8], geometry: &XfsGeometry, tree: XfsTree) {
    if geometry.has_checksums() {
        csum::store(bytes, tree.identity().crc);
    }
}

/// Copies `from` to `at`; the callers have proved that it fits.
pub(super) fn copy(bytes: &mut [u8], at: usize, from: &[u8]) {
    bytes[at..at + from.len()].copy_from_slice(from);
}

pub(super) fn long_header(
    magic: [u8; 4],
    level: u16,
    blkno: U64,
    uuid: [u8; 16],
    owner: Ino,
) -> LongBlockHeader {
    LongBlockHeader {
        magic,
        level: level.into(),
        numrecs: 0.into(),
        left: FsBlock::NULL.0.into(),
        right: FsBlock::NULL.0.into(),
        blkno,
        lsn: 0.into(),
        uuid,
        owner: owner.0.into(),
        crc: [0; 4],
        pad: 0.into(),
    }
}
