//! The verbs for what only btrfs has: its structures, subvolumes, mirrors and counters.

pub(super) mod bench;
pub(super) mod dump;
pub(super) mod in_force;
pub(super) mod info;
pub(super) mod mkfs;
pub(super) mod property;
pub(super) mod rescue;
pub(super) mod scrub;
pub(super) mod sharing;
mod space;
pub(super) mod stats;
pub(super) mod subvolume;
