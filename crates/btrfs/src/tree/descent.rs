//! The search for one key, block by block down a tree.
//!
//! A pointer has the first key of the block that it leads to. So comparing the key with that of the
//! pointer also compares it with the first key of the next block:
//!
//! | the key is | in the next block |
//! |---|---|
//! | above that of the pointer | it is not at slot 0, and the search begins at slot 1 |
//! | that of the pointer | it is at slot 0 without a search, and so it is all the way down |
//! | below all keys | slot 0 is the nearest without a search, and so it is all the way down |

use std::cmp::Ordering;

use offshoot_btrfs_format::Key;

use crate::block::TreeBlock;

/// A search on its way down the tree.
pub(crate) struct Descent {
    key: Key,
    /// How the key compares with the first one of the next block; `None` at the root, which no
    /// pointer of a tree leads to.
    to_first: Option<Ordering>,
}

impl Descent {
    /// Begins a search for `key`, above the root.
    pub(crate) fn to(key: Key) -> Self {
        Self { key, to_first: None }
    }

    /// The last slot of `block` whose key is at most the searched one; `None` when all keys are
    /// greater. `block` is the next one on the way. The search then continues through that slot, or
    /// through slot 0.
    pub(crate) fn floor(&mut self, block: &TreeBlock) -> Option<usize> {
        if block.is_empty() {
            return None;
        }
        let compared = || self.key.cmp(&block.key(0));
        let to_first = self.to_first.unwrap_or_else(compared);
        // A pointer has the first key of its block. A node that stands in for a lost one may lack
        // the first blocks below it.
        debug_assert!(compared() <= to_first, "a block begins before its pointer");
        let slot = match to_first {
            Ordering::Less => None,
            Ordering::Equal => Some(0),
            Ordering::Greater => Some(block.floor_behind_first(self.key)),
        };
        self.to_first = Some(slot.map_or(to_first, |slot| self.key.cmp(&block.key(slot))));
        slot
    }
}

#[cfg(test)]
mod tests {
    use offshoot_btrfs_format::{ItemType, TreeId};

    use super::*;
    use crate::test_volumes::bare;
    use crate::tree::Blocks as _;
    use crate::{BtrfsVolume, EngineOptions};

    const OBJECT: u64 = 1 << 20;
    const ITEMS: u64 = 500;

    fn key(number: u64) -> Key {
        Key::new(OBJECT, ItemType::STRING_ITEM, number)
    }

    /// Keys with gaps between them, three to a leaf, in three levels.
    fn volume() -> std::sync::Arc<BtrfsVolume> {
        let volume = BtrfsVolume::open_writable(vec![bare(4096)], &EngineOptions::default());
        let volume = volume.expect("it opens");
        let handle = volume.join().expect("it is writable");
        let insert =
            |number| handle.change(TreeId::FS, |tree| tree.insert(key(number), &[7; 1300]));
        (1..=ITEMS).try_for_each(|number| insert(number * 3)).expect("the change goes through");
        drop(handle);
        volume
    }

    /// The search finds what a comparison with every slot of every block finds. It knows how the
    /// key compares with the first one of the next block, so an exact match, or a key below all
    /// others, needs no search further down.
    #[test]
    fn a_descent_finds_what_looking_at_every_slot_finds() {
        let volume = volume();
        let root = volume.tree(TreeId::FS).expect("the tree");
        assert_eq!(root.level, 2);
        let (mut exact_above, mut below_all) = (0, 0);
        let below = Key::new(0, ItemType::STRING_ITEM, 0);
        for key in (0..=ITEMS * 3 + 2).map(key).chain([below]) {
            let mut descent = Descent::to(key);
            let mut block = volume.block(&root.expected()).expect("it verifies");
            loop {
                let known = descent.to_first;
                let expected = (0..block.len()).rev().find(|&slot| block.key(slot) <= key);
                let found = descent.floor(&block);
                assert_eq!(found, expected, "{key} on level {}", block.header().level);
                let slot = found.unwrap_or(0);
                assert_eq!(descent.to_first, Some(key.cmp(&block.key(slot))));
                assert_eq!(known.is_none(), block.header().level == root.level);
                exact_above += u64::from(known == Some(Ordering::Equal));
                below_all += u64::from(known == Some(Ordering::Less));
                if block.is_leaf() {
                    break;
                }
                block = volume.child(&block, slot, TreeId::FS).expect("it verifies");
            }
        }
        // One key of each leaf, and one of each node but the first, is in a pointer above it.
        assert!(exact_above > ITEMS / 3, "{exact_above}");
        assert_eq!(below_all, 2, "both levels below the root");
    }
}
