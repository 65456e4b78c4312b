//! Random choices that depend only on their seed.
//!
//! This is SplitMix64, without a crate: a failing test prints its seed, and that seed must give the
//! same states with every version of our dependencies.

/// A random number generator.
#[derive(Clone, Debug)]
pub(super) struct CrashRandom(u64);

impl CrashRandom {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// A random index into a slice of `len` elements, which is not 0.
    pub(super) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below a usize")
    }

    /// True in `numerator` of `denominator` cases.
    pub(super) fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// Puts `items` into a random order.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.index(end + 1));
        }
    }
}
