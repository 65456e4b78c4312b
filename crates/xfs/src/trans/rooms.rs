//! What is known of the room in directories: an addition does not look again at data blocks that
//! have none.
//!
//! ```text
//! index block 0: 2,016 data blocks without a piece of 56 bytes     a name that needs 56 skips it
//! index block 1: 700 of them                                       and begins here with number 700
//! ```
//!
//! A removal makes room, so it makes the engine forget the directory. Additions only take room, and
//! new data blocks come behind those that are known: what one addition has seen stays true. If its
//! transaction is dropped, the directory may have more room than is known, until the next removal
//! in it.

use std::collections::BTreeMap;

use offshoot_kit::sync::Mutex;
use offshoot_xfs_format::Ino;

/// The blocks of the index of which something is known at most, in all directories. With one more,
/// all are forgotten. The largest directory has 4,200 of them in blocks of 4 KiB, and 69,900 in
/// blocks of 1 KiB.
const MOST_BLOCKS: usize = 1 << 14;

/// What is known of a block of the index: its first `full` data blocks are there, and none of them
/// has an unused piece of `len` bytes.
#[derive(Clone, Copy, Debug)]
struct FullBlocks {
    full: u16,
    len: u16,
}

/// What is known of the room in directories, by directory and number of the block of the index.
#[derive(Debug, Default)]
pub(crate) struct DirectoryRooms(Mutex<BTreeMap<(Ino, usize), FullBlocks>>);

impl DirectoryRooms {
    /// The data blocks of a block of the index that are known to have no piece of `len` bytes: as
    /// many, from the first one on.
    pub(crate) fn full(&self, dir: Ino, index: usize, len: u16) -> usize {
        let known = self.0.lock();
        let block = known.get(&(dir, index));
        block.filter(|block| block.len <= len).map_or(0, |block| block.full.into())
    }

    /// Says that the first `full` data blocks of a block of the index are there, and have no such
    /// piece.
    pub(crate) fn note_full(&self, dir: Ino, index: usize, (full, len): (usize, u16)) {
        let Ok(full) = u16::try_from(full) else { return };
        let mut known = self.0.lock();
        if known.len() >= MOST_BLOCKS && !known.contains_key(&(dir, index)) {
            known.clear();
        }
        known.insert((dir, index), FullBlocks { full, len });
    }

    /// Forgets a directory in which a name is removed.
    pub(crate) fn forget(&self, dir: Ino) {
        let mut known = self.0.lock();
        while let Some((&block, _)) = known.range((dir, 0)..=(dir, usize::MAX)).next() {
            known.remove(&block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DirectoryRooms, MOST_BLOCKS};
    use offshoot_xfs_format::Ino;

    #[test]
    fn longer_pieces_are_not_looked_for_where_shorter_ones_are_missing() {
        let (rooms, dir) = (DirectoryRooms::default(), Ino(128));
        assert_eq!(rooms.full(dir, 1, 56), 0);
        rooms.note_full(dir, 1, (700, 56));
        let full = |len| rooms.full(dir, 1, len);
        assert_eq!([full(48), full(56), full(64), rooms.full(dir, 0, 56)], [0, 700, 700, 0]);
        rooms.note_full(dir, 1, (20, 32));
        assert_eq!([full(24), full(32), full(56)], [0, 20, 20]);
        rooms.forget(dir);
        assert_eq!(rooms.full(dir, 1, 56), 0);
    }

    #[test]
    fn few_blocks_are_known_wherever_they_are() {
        let rooms = DirectoryRooms::default();
        let note = |index: usize| rooms.note_full(Ino(index as u64 % 300), index * 5, (1, 56));
        (0..MOST_BLOCKS).for_each(note);
        note(0);
        assert_eq!(rooms.0.lock().len(), MOST_BLOCKS);
        rooms.forget(Ino(7));
        assert_eq!(rooms.0.lock().len(), MOST_BLOCKS - MOST_BLOCKS.div_ceil(300));
        (0..MOST_BLOCKS).for_each(note);
        note(MOST_BLOCKS);
        assert_eq!(rooms.0.lock().len(), 1);
    }
}
