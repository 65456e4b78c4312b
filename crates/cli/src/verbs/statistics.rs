//! What an engine counted, as text and in JSON.

use std::fmt;

use offshoot_xfs::{Counter, XfsVolume};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::btrfs::statistics::Statistics;

/// What the engine of either format counted since a volume was opened.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum EngineStatistics {
    Btrfs(Box<Statistics>),
    Xfs(XfsCounters),
}

impl fmt::Display for EngineStatistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Btrfs(statistics) => statistics.fmt(f),
            Self::Xfs(counters) => counters.fmt(f),
        }
    }
}

/// The counters of the engine of XFS: in JSON an object with each by name, and as text a line for
/// each that is not 0.
pub(crate) struct XfsCounters(Vec<Counter>);

impl XfsCounters {
    /// The counters up to now.
    pub(crate) fn of(volume: &XfsVolume) -> Self {
        Self(volume.counters())
    }
}

impl Serialize for XfsCounters {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for Counter { name, value, .. } in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl fmt::Display for XfsCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().filter(|counter| counter.value > 0).try_for_each(|counter| {
            let Counter { name, about, value } = counter;
            writeln!(f, "  {value:>14}  {name:<28}  {about}")
        })
    }
}
