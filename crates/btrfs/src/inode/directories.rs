//! A cache of facts about directories that are changed, so that operations need not look them up.
//!
//! | fact | what an operation does without it |
//! |---|---|
//! | the index of the next entry | searches for the last index |
//! | a group of adjacent numbers for new files | takes another group, and numbers stay unused |
//! | that the directory has no default access control list | searches for the attribute |
//! | the hashes of all names, for a directory made since the volume was opened | searches for the name |
//!
//! All facts may be forgotten at any time. A fact that is remembered is true:
//!
//! 1. Operations use the facts only under the lock of the directory. The exception is a lookup,
//!    which needs no lock to find that a name is missing: it was missing when the lookup began.
//! 2. The numbers of the files of a directory come from groups that no other directory has. So
//!    their items are adjacent, and threads that work in different directories change different
//!    leaves.
//! 3. The set of hashes contains the hash of every name in the directory, and possibly hashes of
//!    names that were removed. So a name is missing if its hash is not in the set.
//! 4. All sets together have a budget in bytes. A directory whose set would exceed it loses its
//!    set.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The facts about one directory.
#[derive(Debug, Default)]
pub(super) struct DirectoryFacts {
    next_index: Option<u64>,
    /// The unused numbers of the last group.
    numbers: Range<u64>,
    names: Option<NameHashes>,
    /// Files made in it get no access control list.
    pub(super) has_no_default_acl: bool,
}

impl DirectoryFacts {
    /// Notes that the directory was just made, and has no names.
    pub(super) fn made(&mut self, budget: &Arc<Budget>) {
        self.names = Some(NameHashes::new(budget));
    }

    /// The index of the next entry; `None` when it has to be looked up.
    pub(super) fn take_index(&mut self) -> Option<u64> {
        let index = self.next_index?;
        self.next_index = index.checked_add(1);
        Some(index)
    }

    /// Stores the index of the next entry, after a search.
    pub(super) fn set_next_index(&mut self, index: u64) {
        self.next_index = Some(index);
    }

    /// A number for a new file; `None` when there is no group.
    pub(super) fn take_number(&mut self) -> Option<u64> {
        self.numbers.next()
    }

    /// Stores a group of numbers for new files.
    pub(super) fn set_numbers(&mut self, numbers: Range<u64>) {
        self.numbers = numbers;
    }

    /// Whether the directory certainly has no name with this hash.
    pub(super) fn lacks_name(&self, hash: u64) -> bool {
        self.names.as_ref().is_some_and(|names| !names.contains(bits_of(hash)))
    }

    /// Adds the hash of a name that is about to be added. Returns whether the directory certainly
    /// had no name with that hash.
    pub(super) fn add_name(&mut self, hash: u64) -> bool {
        let Some(names) = &mut self.names else { return false };
        let is_new = names.insert(bits_of(hash));
        if is_new.is_none() {
            self.names = None;
        }
        is_new == Some(true)
    }
}

fn bits_of(hash: u64) -> u32 {
    u32::try_from(hash).expect("a name has a hash of 32 bits")
}

/// The bytes that all sets of hashes may take. While a set grows both its tables exist, and only
/// the new one counts.
#[derive(Debug)]
pub(super) struct Budget {
    most: u64,
    used: AtomicU64,
}

impl Budget {
    pub(super) fn new(most: u64) -> Self {
        Self { most, used: AtomicU64::new(0) }
    }

    fn take(&self, bytes: u64) -> bool {
        let sum = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum).is_ok()
    }

    fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The number of slots of the smallest table.
const FEWEST_SLOTS: usize = 64;

/// A set of hashes: a table with open addressing, at least a quarter of whose slots is empty.
#[derive(Debug)]
struct NameHashes {
    budget: Arc<Budget>,
    /// A power of two slots, or none. A slot with 0 is empty.
    slots: Box<[u32]>,
    count: usize,
    has_zero: bool,
}

fn bytes_of(slots: usize) -> u64 {
    (slots * size_of::<u32>()) as u64
}

/// The slot that has the hash, or else the empty one where it belongs.
fn slot_of(slots: &[u32], hash: u32) -> usize {
    let mask = slots.len() - 1;
    // Hashes of names are nearly random, but a crafted image may choose them. Multiplying spreads
    // adjacent hashes over the table.
    let mut at = (hash.wrapping_mul(0x9e37_79b1).rotate_left(15)) as usize & mask;
    while slots[at] != 0 && slots[at] != hash {
        at = (at + 1) & mask;
    }
    at
}

impl NameHashes {
    fn new(budget: &Arc<Budget>) -> Self {
        Self { budget: budget.clone(), slots: Box::default(), count: 0, has_zero: false }
    }

    fn contains(&self, hash: u32) -> bool {
        match hash {
            0 => self.has_zero,
            _ => !self.slots.is_empty() && self.slots[slot_of(&self.slots, hash)] == hash,
        }
    }

    /// Adds a hash, and returns whether it is new; `None` when the budget is exhausted.
    fn insert(&mut self, hash: u32) -> Option<bool> {
        if hash == 0 {
            return Some(!std::mem::replace(&mut self.has_zero, true));
        }
        if (self.count + 1) * 4 > self.slots.len() * 3 {
            self.grow()?;
        }
        let at = slot_of(&self.slots, hash);
        let is_new = self.slots[at] == 0;
        self.slots[at] = hash;
        self.count += usize::from(is_new);
        Some(is_new)
    }

    fn grow(&mut self) -> Option<()> {
        let len = (self.slots.len() * 2).max(FEWEST_SLOTS);
        if !self.budget.take(bytes_of(len) - bytes_of(self.slots.len())) {
            return None;
        }
        let mut slots = vec![0; len].into_boxed_slice();
        for &hash in self.slots.iter().filter(|&&hash| hash != 0) {
            slots[slot_of(&slots, hash)] = hash;
        }
        self.slots = slots;
        Some(())
    }
}

impl Drop for NameHashes {
    fn drop(&mut self) {
        self.budget.give_back(bytes_of(self.slots.len()));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use offshoot_testkit::random::Random;

    use super::*;

    #[test]
    fn a_set_has_what_was_added() {
        let budget = Arc::new(Budget::new(1 << 20));
        let mut directory = DirectoryFacts::default();
        assert!(!directory.add_name(1), "nothing is known of what was there before");
        assert!(!directory.lacks_name(1) && !directory.lacks_name(2));
        directory.made(&budget);
        let mut random = Random::new(7);
        let mut model = BTreeSet::new();
        for _ in 0..20_000 {
            let hash = random.below(1 << 15) << 16;
            assert_eq!(directory.lacks_name(hash), !model.contains(&hash), "{hash:#x}");
            assert_eq!(directory.add_name(hash), model.insert(hash), "{hash:#x}");
        }
        assert!(budget.used.load(Ordering::Relaxed) >= 4 * model.len() as u64);
        drop(directory);
        assert_eq!(budget.used.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn over_its_budget_a_directory_has_no_set() {
        let budget = Arc::new(Budget::new(600));
        let [mut one, mut other] = [DirectoryFacts::default(), DirectoryFacts::default()];
        one.made(&budget);
        other.made(&budget);
        assert!((1..=48).all(|hash| one.add_name(hash)));
        assert!((1..=48).all(|hash| other.add_name(hash)));
        assert!(!one.add_name(49), "a larger table does not fit beside the other two");
        assert!(!one.add_name(1_000_000), "what is not remembered may be there");
        assert!(!one.lacks_name(1_000_001));
        assert!(other.add_name(49), "there is room again");
    }

    #[test]
    fn indexes_and_numbers_run_out_without_overflow() {
        let mut directory = DirectoryFacts::default();
        assert_eq!((directory.take_index(), directory.take_number()), (None, None));
        directory.set_next_index(u64::MAX);
        directory.set_numbers(320..322);
        assert_eq!((directory.take_index(), directory.take_index()), (Some(u64::MAX), None));
        let numbers: Vec<_> = std::iter::from_fn(|| directory.take_number()).collect();
        assert_eq!(numbers, [320, 321]);
    }
}
