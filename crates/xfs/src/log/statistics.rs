//! What the log counts.

use offshoot_kit::statistics;

statistics! {
    /// What a log did since it was opened.
    LogStatistics, LogCounters, "log_":
    /// Vectors that were allocated: the only memory that commits take for each item.
    shadow_allocations,
    /// Their bytes.
    shadow_bytes,
    /// Items that were formatted.
    formats,
    /// Those that fitted the vector that their context had of them already, and were formatted
    /// anew.
    formats_in_place,
    /// Those of which only the bytes that changed were copied there.
    patches,
    /// Intents that left a context with their done items.
    whiteouts,
    /// Checkpoints that are durable.
    checkpoints,
    /// Those of them without an item, which only tell recovery a newer tail.
    empty_checkpoints,
    /// Records that were written.
    records,
    /// Their bytes.
    bytes,
    /// How often a thread wanted something to be durable.
    forces,
    /// Barriers of the device.
    flushes,
    /// Items that were written home.
    written_home,
    /// How often a thread waited for room in the log.
    waits,
}
