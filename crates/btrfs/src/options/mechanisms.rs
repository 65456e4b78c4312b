//! Mechanisms that a benchmark takes away to measure what they are worth.

use crate::tree::Latching;

/// Mechanisms of the engine that can be switched off or done in another way. A program needs none
/// of this. Only builds with the feature `measure` can name it and change its defaults.
#[derive(Clone, Copy, Debug)]
pub struct Mechanisms {
    /// Whether items of names and inodes are gathered in memory and put into the tree many at a
    /// time.
    pub(crate) has_delayed_items: bool,
    /// Whether every delayed item keeps all the space that was reserved for it. By default new
    /// items of a directory share the space of a leaf.
    pub(crate) reserves_by_item: bool,
    /// Whether a log gets every item of a directory by itself, even where a commit is cheaper. By
    /// default adjacent items of the subvolume go together, with one copy of their data.
    pub(crate) logs_by_item: bool,
    /// How many commits, 1 or 2, one cycle of making room may include before an operation gets
    /// `ENOSPC`.
    pub(crate) commits_per_cycle: u32,
    /// From how many changed extents on a commit looks them up before it stops writers. Fewer are
    /// looked up sooner than threads start.
    pub(crate) plans_from: usize,
    /// How writers latch the nodes above a leaf.
    pub(crate) latching: Latching,
}

impl Default for Mechanisms {
    fn default() -> Self {
        Self {
            has_delayed_items: true,
            reserves_by_item: false,
            logs_by_item: false,
            commits_per_cycle: 1,
            plans_from: 512,
            latching: Latching::default(),
        }
    }
}

/// Each method returns the mechanisms with one of them changed.
#[cfg(any(test, feature = "measure"))]
impl Mechanisms {
    /// Whether items of names and inodes are gathered in memory before they go to the tree.
    #[must_use]
    pub fn delayed_items(self, has_delayed_items: bool) -> Self {
        Self { has_delayed_items, ..self }
    }

    /// Whether every delayed item keeps all the space that was reserved for it.
    #[must_use]
    pub fn reserve_by_item(self, reserves_by_item: bool) -> Self {
        Self { reserves_by_item, ..self }
    }

    /// Whether a log gets every item of a directory by itself.
    #[must_use]
    pub fn log_by_item(self, logs_by_item: bool) -> Self {
        Self { logs_by_item, ..self }
    }

    /// How many commits, 1 or 2, one cycle of making room may include.
    #[must_use]
    pub fn commits_per_cycle(self, commits_per_cycle: u32) -> Self {
        Self { commits_per_cycle, ..self }
    }

    /// From how many changed extents on a commit looks them up before it stops writers.
    #[must_use]
    pub fn plans_from(self, plans_from: usize) -> Self {
        Self { plans_from, ..self }
    }

    /// How writers latch the nodes above a leaf.
    #[must_use]
    pub fn latching(self, latching: Latching) -> Self {
        Self { latching, ..self }
    }
}
