//! What the engine counted, as text and in JSON.

use std::fmt;

use offshoot_btrfs::{Counter, Engine, SpaceStats, Stats};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

/// The counters of the engine since a volume was opened.
///
/// In JSON, this is an object with every counter by name, and with `reservations`, `flush_states`
/// and `space`. As text, it is a line for every counter that is not 0; counters of locks only on
/// request.
pub(crate) struct Statistics {
    counters: Stats,
    space: SpaceStats,
    has_locks: bool,
}

impl Statistics {
    /// The counters up to now.
    pub(crate) fn of(volume: &Engine) -> Self {
        Self { counters: volume.stats(), space: volume.space_stats(), has_locks: false }
    }

    /// The same with a line for each counter of locks.
    pub(crate) fn with_locks(self) -> Self {
        Self { has_locks: true, ..self }
    }
}

/// The counters of locks. They help only engineers who work on the engine.
const LOCKS: [&str; 5] =
    ["locks_taken", "lock_waits", "shared_locks_taken", "shared_lock_waits", "early_unlocks"];

/// The quantile of reservation times that is shown.
const SHARE: f64 = 0.999;

impl Serialize for Statistics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for counter in self.counters.counters() {
            map.serialize_entry(counter.name, &counter.value)?;
        }
        map.serialize_entry("reservations", &reservations(&self.space))?;
        map.serialize_entry("flush_states", &flush_states(&self.space))?;
        map.serialize_entry("space", &kinds(&self.space))?;
        map.end()
    }
}

fn reservations(space: &SpaceStats) -> Value {
    let buckets = (0..).zip(space.latency.buckets).filter(|(_, count)| *count > 0);
    let buckets = buckets.map(|(i, count)| json!({ "below_us": 1u64 << i, "count": count }));
    json!({
        "granted_at_once": space.granted_at_once,
        "granted_soon": space.granted_soon,
        "tickets_granted": space.tickets_granted,
        "tickets_refused": space.tickets_refused,
        "tickets_failed": space.tickets_failed,
        "latency": buckets.collect::<Vec<_>>(),
        "p999_below_us": space.latency.quantile_us(SHARE),
    })
}

fn flush_states(space: &SpaceStats) -> Value {
    let states = space.flushes.iter().map(|flush| {
        json!({
            "state": flush.state.to_string(),
            "entered": flush.entered,
            "entered_ahead": flush.entered_ahead,
            "reclaimed_bytes": flush.reclaimed_bytes,
        })
    });
    states.collect()
}

fn kinds(space: &SpaceStats) -> Value {
    let kinds = space.kinds.iter().map(|kind| {
        json!({
            "kind": kind.kind.to_string(),
            "total_bytes": kind.total_bytes,
            "used_bytes": kind.used_bytes,
            "pinned_bytes": kind.pinned_bytes,
            "free_bytes": kind.free_bytes,
            "unknown_bytes": kind.unknown_bytes,
            "other_profile_bytes": kind.other_profile_bytes,
            "reserved_bytes": kind.reserved_bytes,
            "promised_bytes": kind.promised_bytes,
            "next_chunk_bytes": kind.next_chunk_bytes,
            "commit_bytes": kind.commit_bytes,
            "kept_bytes": kind.kept_bytes,
            "reserved_peak_bytes": kind.reserved_peak_bytes,
        })
    });
    kinds.collect()
}

impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |value: u64, name: &str, about: &str| match value {
            0 => Ok(()),
            _ => writeln!(f, "  {value:>14}  {name:<28}  {about}"),
        };
        for Counter { name, about, value } in self.counters.counters() {
            if self.has_locks || !LOCKS.contains(&name) {
                line(value, name, about)?;
            }
        }
        let space = &self.space;
        line(
            space.granted_soon,
            "granted_soon",
            "Reservations that were granted a moment later, before they waited.",
        )?;
        line(
            space.tickets_granted,
            "tickets_granted",
            "Reservations that waited and were granted.",
        )?;
        line(
            space.tickets_refused,
            "tickets_refused",
            "Reservations for which there was no room.",
        )?;
        line(
            space.tickets_failed,
            "tickets_failed",
            "Reservations that failed with what makes room.",
        )?;
        for flush in &space.flushes {
            let about = format!(
                "Times that room was made by this, {} bytes; {} times before a reservation waited.",
                flush.reclaimed_bytes, flush.entered_ahead
            );
            line(flush.entered, &format!("flush state: {}", flush.state), &about)?;
        }
        for kind in &space.kinds {
            let about = "The most that was spoken for at a time, in bytes.";
            line(kind.reserved_peak_bytes, &format!("reserved peak: {}", kind.kind), about)?;
        }
        if space.latency.count() > 0 {
            let below = space.latency.quantile_us(SHARE);
            line(below, "reservation_us", "What 99.9 % of reservations took at most.")?;
        }
        Ok(())
    }
}
