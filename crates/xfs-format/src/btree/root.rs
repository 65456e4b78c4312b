//! The root of a tree of extents in an inode.

use zerocopy::IntoBytes;

use super::build::{copy, long_header};
use super::{STRUCTURE, XfsTree};
use crate::group::MOST_LEVELS;
use crate::layout::{ensure, number};
use crate::{FileBlock, FsBlock, Ino, Malformed, XfsGeometry};

/// The root of a tree of extents, as it lies in a fork of an inode.
///
/// ```text
/// inode  level 2, count 2, keys with room for all that fit in the fork, pointers
/// log    a long header as of a block, keys, pointers close up                             (seen)
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsForkRoot {
    /// The level, at least 1.
    pub level: u16,
    /// The first offset and the block of each child.
    pub children: Vec<(FileBlock, FsBlock)>,
}

/// The bytes of the header of a root in an inode.
const ROOT_HEADER: usize = 4;

/// The bytes of a key, and of a pointer.
const ROOT_FIELD: usize = 8;

impl XfsForkRoot {
    /// The children that fit in a fork of `len` bytes.
    #[must_use]
    pub fn capacity(len: usize) -> usize {
        len.saturating_sub(ROOT_HEADER) / (2 * ROOT_FIELD)
    }

    /// Checks the root in `fork`, which is the whole room of the fork.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn parse(fork: &[u8], geometry: &XfsGeometry) -> Result<Self, Malformed> {
        let count = number(fork, 2, 2);
        let room = Self::capacity(fork.len());
        let keys = fork.get(ROOT_HEADER..).unwrap_or_default();
        Self::of(number(fork, 0, 2), count, room, keys, geometry)
    }

    /// Checks the root in a region of the log.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn from_log(region: &[u8], geometry: &XfsGeometry) -> Result<Self, Malformed> {
        let magic = XfsTree::Extents.magic(geometry);
        ensure!(
            STRUCTURE,
            magic.is_some_and(|magic| region.starts_with(&magic)),
            "not the root of a tree of extents"
        );
        let keys = region.get(XfsTree::Extents.header_len(geometry)..).unwrap_or_default();
        let room = keys.len() / (2 * ROOT_FIELD);
        Self::of(number(region, 4, 2), number(region, 6, 2), room, keys, geometry)
    }

    /// Checks the root with these keys, behind which there is room for `room` of them.
    #[expect(clippy::cast_possible_truncation, reason = "numbers of two bytes")]
    fn of(
        level: u64,
        count: u64,
        room: usize,
        keys: &[u8],
        geometry: &XfsGeometry,
    ) -> Result<Self, Malformed> {
        ensure!(
            STRUCTURE,
            (1..MOST_LEVELS.into()).contains(&level) && (1..=room as u64).contains(&count),
            "a root at level {level} with {count} children, where {room} fit"
        );
        let mut children: Vec<(FileBlock, FsBlock)> = Vec::with_capacity(count as usize);
        for index in 0..count as usize {
            let key = FileBlock(number(keys, index * ROOT_FIELD, ROOT_FIELD));
            let block = FsBlock(number(keys, (room + index) * ROOT_FIELD, ROOT_FIELD));
            ensure!(
                STRUCTURE,
                children.last().is_none_or(|&(before, _)| before < key)
                    && geometry.is_usable_extent(block, 1),
                "child {index} at offset {key} in block {block}"
            );
            children.push((key, block));
        }
        Ok(Self { level: level as u16, children })
    }

    /// Writes the root to `fork`, the whole room of the fork, and returns whether it fits. Nothing
    /// is written if not. A root has at least one child.
    pub fn write(&self, fork: &mut [u8]) -> bool {
        let (room, len) = (Self::capacity(fork.len()), self.children.len());
        let Some(count) = u16::try_from(len).ok().filter(|_| (1..=room).contains(&len)) else {
            return false;
        };
        fork.fill(0);
        copy(fork, 0, &self.level.to_be_bytes());
        copy(fork, 2, &count.to_be_bytes());
        for (index, (key, block)) in self.children.iter().enumerate() {
            copy(fork, ROOT_HEADER + index * ROOT_FIELD, &key.0.to_be_bytes());
            copy(fork, ROOT_HEADER + (room + index) * ROOT_FIELD, &block.0.to_be_bytes());
        }
        true
    }

    /// The region of the log that carries the root of file `owner`.
    #[must_use]
    pub fn to_log(&self, geometry: &XfsGeometry, owner: Ino) -> Vec<u8> {
        let magic = XfsTree::Extents.magic(geometry).unwrap_or_default();
        // The header says no place, LSN 0, the volume and the file (seen).
        let uuid = geometry.uuid.into_bytes();
        let mut header = long_header(magic, self.level, u64::MAX.into(), uuid, owner);
        header.numrecs = u16::try_from(self.children.len()).unwrap_or(u16::MAX).into();
        let mut region = header.as_bytes()[..XfsTree::Extents.header_len(geometry)].to_vec();
        region.extend(self.children.iter().flat_map(|(key, _)| key.0.to_be_bytes()));
        region.extend(self.children.iter().flat_map(|(_, block)| block.0.to_be_bytes()));
        region
    }
}
