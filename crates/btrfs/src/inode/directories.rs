//! What is remembered of directories that are changed, so that an operation need not look it up.
//!
//! | | without it |
//! |---|---|
//! | the index that the next entry gets | the last index is searched for |
//! | numbers for new files, a group of adjacent ones at a time | another group is taken, and numbers stay unused |
//! | that it has no default access control list | its attribute is searched for |
//! | the hashes of all names, of a directory that was made since the volume was opened | the name is searched for |
//!
//! All of it may be forgotten at any time, and what is remembered is right:
//!
//! 1. It is used under the lock of the directory only, but to say that a name is not there: it was
//!    not when the lookup began.
//! 2. The files of a directory have numbers of groups that no other directory has. Their items lie
//!    side by side, and threads that work in several directories do not meet there.
//! 3. The set of hashes has that of every name in the directory, and may have others, of names that
//!    were removed. So a name whose hash is not in it is not there.
//! 4. All sets together have a budget in bytes. A directory whose set would exceed it has none from
//!    then on.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is remembered of a directory.
#[derive(Debug, Default)]
pub(super) struct Directory {
    next_index: Option<u64>,
    /// Numbers that are left of the last group.
    numbers: Range<u64>,
    names: Option<NameHashes>,
    /// What is made in it gets no access control list.
    pub(super) has_no_default_acl: bool,
}

impl Directory {
    /// The directory was just made: it has no names.
    pub(super) fn made(&mut self, budget: &Arc<Budget>) {
        self.names = Some(NameHashes::new(budget));
    }

    /// The index of the next entry; `None` when it has to be looked up.
    pub(super) fn take_index(&mut self) -> Option<u64> {
        let index = self.next_index?;
        self.next_index = index.checked_add(1);
        Some(index)
    }

    /// The index of the next entry was looked up.
    pub(super) fn set_next_index(&mut self, index: u64) {
        self.next_index = Some(index);
    }

    /// A number for a new file; `None` when there is no group.
    pub(super) fn take_number(&mut self) -> Option<u64> {
        self.numbers.next()
    }

    /// Numbers for new files were taken.
    pub(super) fn set_numbers(&mut self, numbers: Range<u64>) {
        self.numbers = numbers;
    }

    /// Whether no name with this hash is there.
    pub(super) fn lacks_name(&self, hash: u64) -> bool {
        self.names.as_ref().is_some_and(|names| !names.contains(bits_of(hash)))
    }

    /// Adds the hash of a name that is about to be added, and says whether that name surely was not
    /// there.
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

/// The bytes that all sets of hashes may take. A set that grows is there twice for a moment, which
/// is not counted.
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

/// The slots of the smallest table.
const FEWEST_SLOTS: usize = 64;

/// A set of hashes: a table with open addressing, of which a quarter at least is empty.
#[derive(Debug)]
struct NameHashes {
    budget: Arc<Budget>,
    /// A power of two of them, or none; 0 is an empty one.
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
    // Hashes of names are as good as random, but an image may have chosen them: what is near each
    // other is spread over the table.
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

    /// Adds a hash, and says whether it is new; `None` when the budget does not allow to remember
    /// it.
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
        let mut directory = Directory::default();
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
        let [mut one, mut other] = [Directory::default(), Directory::default()];
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
        let mut directory = Directory::default();
        assert_eq!((directory.take_index(), directory.take_number()), (None, None));
        directory.set_next_index(u64::MAX);
        directory.set_numbers(320..322);
        assert_eq!((directory.take_index(), directory.take_index()), (Some(u64::MAX), None));
        let numbers: Vec<_> = std::iter::from_fn(|| directory.take_number()).collect();
        assert_eq!(numbers, [320, 321]);
    }
}
