//! The counters of the engine, as text and in JSON.

use std::fmt;

use offshoot_btrfs::{Counter, Stats};
use serde::{Serialize, Serializer};

/// What the engine did: in JSON an object with every counter by its name, and as text a line for each that is not 0.
pub(crate) struct Statistics(pub(crate) Stats);

impl Serialize for Statistics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.counters().map(|counter| (counter.name, counter.value)))
    }
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Counter { name, about, value } in self.0.counters().filter(|counter| counter.value > 0)
        {
            writeln!(f, "  {value:>14}  {name:<28}  {about}")?;
        }
        Ok(())
    }
}
