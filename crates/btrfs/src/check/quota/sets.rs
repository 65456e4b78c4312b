//! Sets of subvolumes, each stored once.
//!
//! Snapshots of one subvolume share most blocks, so thousands of sets that are alike are alive at a
//! time, for example all subvolumes from the third on. A set is a binary tree over the numbers of
//! subvolumes. Equal trees have one id, so sets share what they have in common.
//!
//! ```text
//! {2, 3} of 0..4        node              {0, 2, 3} has the same right half
//!                      /    \
//!                  empty    node
//!                           /  \
//!                      member  member
//! ```

use std::collections::{BTreeMap, HashMap};

/// The id of a set. Sets are equal when their ids are.
pub(super) type SetId = u32;

/// The set without members, whatever its height.
pub(super) const EMPTY: SetId = 0;

/// The set of the one subvolume that a tree of height 0 covers.
const MEMBER: SetId = 1;

/// The unions that are remembered.
const KEPT_UNIONS: usize = 100_000;

/// The bytes that a node takes, with its place in the map.
const NODE_BYTES: u64 = 48;

/// All sets.
pub(super) struct SubvolumeSets {
    /// The halves of each set, from the first behind [`MEMBER`] on.
    nodes: Vec<(SetId, SetId)>,
    ids: HashMap<(SetId, SetId), SetId>,
    unions: HashMap<(SetId, SetId), SetId>,
    height: u32,
    most: usize,
}

impl SubvolumeSets {
    /// Sets of `count` subvolumes, which take at most about `memory_bytes`.
    pub(super) fn new(count: usize, memory_bytes: u64) -> Self {
        let most = usize::try_from(memory_bytes / NODE_BYTES).unwrap_or(usize::MAX);
        Self {
            nodes: Vec::new(),
            ids: HashMap::new(),
            unions: HashMap::new(),
            height: count.next_power_of_two().trailing_zeros(),
            most: most.min(u32::MAX as usize - 2),
        }
    }

    /// Whether there are more sets than there is room for. Further sets are wrong then.
    pub(super) fn are_too_many(&self) -> bool {
        self.nodes.len() >= self.most
    }

    /// The set of one subvolume.
    pub(super) fn single(&mut self, number: usize) -> SetId {
        (0..self.height).fold(MEMBER, |set, bit| {
            if number >> bit & 1 == 0 { self.node(set, EMPTY) } else { self.node(EMPTY, set) }
        })
    }

    /// The set with all members of both.
    pub(super) fn union(&mut self, one: SetId, other: SetId) -> SetId {
        match (one.min(other), one.max(other)) {
            (EMPTY, set) => set,
            (one, other) if one == other => one,
            pair => {
                if let Some(&known) = self.unions.get(&pair) {
                    return known;
                }
                let ((left, right), (other_left, other_right)) =
                    (self.halves(pair.0), self.halves(pair.1));
                let (left, right) = (self.union(left, other_left), self.union(right, other_right));
                let set = self.node(left, right);
                if self.unions.len() >= KEPT_UNIONS {
                    self.unions.clear();
                }
                self.unions.insert(pair, set);
                set
            }
        }
    }

    /// Whether the set has exactly one member.
    pub(super) fn is_single(&self, set: SetId) -> bool {
        match (set, self.halves(set)) {
            (EMPTY, _) => false,
            (MEMBER, _) | (_, (EMPTY, EMPTY)) => true,
            (_, (EMPTY, half) | (half, EMPTY)) => self.is_single(half),
            _ => false,
        }
    }

    /// Whether two sets have a member in common.
    pub(super) fn meet(&self, one: SetId, other: SetId) -> bool {
        if one == EMPTY || other == EMPTY || one == other {
            return one == other && one != EMPTY;
        }
        let ((left, right), (other_left, other_right)) = (self.halves(one), self.halves(other));
        self.meet(left, other_left) || self.meet(right, other_right)
    }

    /// Whether all members of `inner` are in `outer`.
    pub(super) fn contains(&self, outer: SetId, inner: SetId) -> bool {
        if inner == EMPTY || inner == outer {
            return true;
        }
        if outer == EMPTY {
            return false;
        }
        let ((left, right), (inner_left, inner_right)) = (self.halves(outer), self.halves(inner));
        self.contains(left, inner_left) && self.contains(right, inner_right)
    }

    /// Adds the bytes of each set to each of its members. Returns the sums of the members.
    pub(super) fn spread(&self, bytes: &HashMap<SetId, u64>) -> BTreeMap<usize, u64> {
        // The set within each part of the numbers, with its bytes.
        let mut parts: HashMap<(usize, SetId), u64> =
            bytes.iter().map(|(&set, &bytes)| ((0, set), bytes)).collect();
        for _ in 0..self.height {
            let mut below = HashMap::new();
            for ((part, set), bytes) in parts {
                let (left, right) = self.halves(set);
                for half in [(part * 2, left), (part * 2 + 1, right)] {
                    if half.1 != EMPTY {
                        let sum: &mut u64 = below.entry(half).or_default();
                        *sum = sum.saturating_add(bytes);
                    }
                }
            }
            parts = below;
        }
        let members = parts.into_iter().filter(|((_, set), _)| *set != EMPTY);
        members.map(|((number, _), bytes)| (number, bytes)).collect()
    }

    fn halves(&self, set: SetId) -> (SetId, SetId) {
        let index = (set as usize).checked_sub(2);
        index.and_then(|index| self.nodes.get(index)).copied().unwrap_or((EMPTY, EMPTY))
    }

    fn node(&mut self, left: SetId, right: SetId) -> SetId {
        if (left, right) == (EMPTY, EMPTY) {
            return EMPTY;
        }
        if let Some(&known) = self.ids.get(&(left, right)) {
            return known;
        }
        let next = self.nodes.len().checked_add(2).and_then(|next| u32::try_from(next).ok());
        let Some(next) = next.filter(|_| !self.are_too_many()) else { return left.max(right) };
        self.nodes.push((left, right));
        self.ids.insert((left, right), next);
        next
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use offshoot_testkit::random::Random;

    use super::*;

    /// Random sets behave as sets do, whatever their number is.
    #[test]
    fn they_are_sets() {
        let mut random = Random::new(11);
        for count in [1usize, 2, 3, 7, 8, 100] {
            let mut sets = SubvolumeSets::new(count, 1 << 20);
            let mut all = vec![(BTreeSet::new(), EMPTY)];
            for number in 0..count {
                all.push((BTreeSet::from([number]), sets.single(number)));
            }
            let mut pick = |len: usize| usize::try_from(random.below(len as u64)).unwrap();
            for _ in 0..300 {
                let (one, other) = (all[pick(all.len())].clone(), all[pick(all.len())].clone());
                let union: BTreeSet<_> = one.0.union(&other.0).copied().collect();
                let id = sets.union(one.1, other.1);
                assert_eq!(all.iter().any(|known| known.1 == id), all.iter().any(|k| k.0 == union));
                assert_eq!(sets.meet(one.1, other.1), !one.0.is_disjoint(&other.0));
                assert_eq!(sets.contains(one.1, other.1), one.0.is_superset(&other.0));
                assert_eq!(sets.is_single(id), union.len() == 1);
                all.push((union, id));
            }
            let mut expected = BTreeMap::<usize, u64>::new();
            let mut bytes = HashMap::<SetId, u64>::new();
            for (set, id) in &all {
                *bytes.entry(*id).or_default() += 3;
                for member in set {
                    *expected.entry(*member).or_default() += 3;
                }
            }
            assert_eq!(sets.spread(&bytes), expected);
        }
    }

    #[test]
    fn they_do_not_grow_without_bound() {
        let mut sets = SubvolumeSets::new(1 << 20, 4096);
        let all = (0..1 << 12).fold(EMPTY, |all, number| {
            let one = sets.single(number);
            sets.union(all, one)
        });
        assert!(sets.are_too_many() && all != EMPTY);
    }
}
