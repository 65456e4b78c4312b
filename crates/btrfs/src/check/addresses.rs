//! A set of sectors of the logical space, as bits.
//!
//! The set allocates a page of bits when the first sector of the 128 MiB that the page covers is
//! added. Only sectors of tree blocks that were read and verified are added, so a damaged volume
//! cannot make the set larger than what it stores: a terabyte of tree blocks takes 32 MiB.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_btrfs_format::Logical;
use parking_lot::RwLock;

/// The bits of a page: 4096 bytes.
const PAGE_BITS: u64 = 32_768;

type AddressPage = [AtomicU64; 512];

/// A set of sectors.
#[derive(Debug, Default)]
pub(super) struct AddressSet {
    pages: RwLock<HashMap<u64, Arc<AddressPage>>>,
}

/// The page of a sector, the word in it, and the bit.
fn position(logical: Logical) -> (u64, usize, u64) {
    let sector = logical.0 >> 12;
    let bit = sector % PAGE_BITS;
    let word = usize::try_from(bit / 64).expect("below the words of a page");
    (sector / PAGE_BITS, word, 1 << (bit % 64))
}

impl AddressSet {
    /// Adds the sector at `logical`. Returns whether it is new.
    pub(super) fn insert(&self, logical: Logical) -> bool {
        let (page, word, bit) = position(logical);
        let known = self.pages.read().get(&page).cloned();
        let page = known.unwrap_or_else(|| {
            let new = || Arc::new(std::array::from_fn(|_| AtomicU64::new(0)));
            self.pages.write().entry(page).or_insert_with(new).clone()
        });
        let Some(word) = page.get(word) else { return false };
        word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Whether the sector at `logical` is in the set.
    pub(super) fn contains(&self, logical: Logical) -> bool {
        let (page, word, bit) = position(logical);
        let page = self.pages.read().get(&page).cloned();
        let word = page.as_ref().and_then(|page| page.get(word));
        word.is_some_and(|word| word.load(Ordering::Relaxed) & bit != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_is_new_once() {
        let set = AddressSet::default();
        for sector in [0, 1, 63, 64, 32_767, 32_768, u64::MAX >> 12] {
            let logical = Logical(sector << 12);
            assert!(!set.contains(logical));
            assert!(set.insert(logical) && !set.insert(logical));
            assert!(set.contains(logical));
        }
        assert!(!set.contains(Logical(2 << 12)));
    }
}
