//! Options that switch mechanisms of the engine off.

use clap::{Args, ValueEnum};
use offshoot_btrfs::{Latching, Mechanisms, UnlockTime};

/// What is switched off, or done in another way, to be measured.
#[derive(Args)]
pub(super) struct MechanismArguments {
    /// Put every item into its tree at once
    #[arg(long, help_heading = "To be measured")]
    no_delayed_items: bool,
    /// Let every delayed item keep the space that was reserved for it, and not every leaf of them
    #[arg(long, conflicts_with = "no_delayed_items", help_heading = "To be measured")]
    reserve_by_item: bool,
    /// Put every item of a directory into logs by itself, and not those that are side by side with
    /// one copy
    #[arg(long, help_heading = "To be measured")]
    log_by_item: bool,
    /// How many commits may be made to make room for one reservation before it is refused
    #[arg(long, value_name = "N", default_value = "1", help_heading = "To be measured")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=2))]
    commits_per_cycle: u32,
    /// How writers latch what is above a leaf: shared, or exclusive until before-search,
    /// after-search or after-change
    #[arg(long, value_name = "HOW", help_heading = "To be measured")]
    latching: Option<LatchingName>,
}

/// What [`Latching`] can be.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum LatchingName {
    /// Shared where the leaf alone changes, let go before the search in it, as it is otherwise
    Shared,
    /// Exclusive, let go before the search in the leaf
    BeforeSearch,
    /// Exclusive, let go after the search in the leaf
    AfterSearch,
    /// Exclusive, let go when the item is in its place
    AfterChange,
}

impl MechanismArguments {
    /// The mechanisms of the engine as these options want them.
    pub(super) fn chosen(&self) -> Mechanisms {
        let exclusive = |unlock| Latching { is_exclusive: true, unlock };
        let latching = self.latching.map_or_else(Latching::default, |name| match name {
            LatchingName::Shared => Latching::default(),
            LatchingName::BeforeSearch => exclusive(UnlockTime::BeforeSearch),
            LatchingName::AfterSearch => exclusive(UnlockTime::AfterSearch),
            LatchingName::AfterChange => exclusive(UnlockTime::AfterChange),
        });
        Mechanisms::default()
            .delayed_items(!self.no_delayed_items)
            .reserve_by_item(self.reserve_by_item)
            .log_by_item(self.log_by_item)
            .commits_per_cycle(self.commits_per_cycle)
            .latching(latching)
    }
}
