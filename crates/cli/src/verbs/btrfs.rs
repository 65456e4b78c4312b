//! The verbs for what only btrfs has: its structures, subvolumes, mirrors and counters.

pub(super) mod build;
pub(super) mod check;
pub(crate) mod dropin;
pub(super) mod dump;
pub(super) mod in_force;
pub(super) mod info;
pub(crate) mod label;
pub(crate) mod last_stored;
pub(super) mod losses;
pub(crate) mod mkfs;
pub(super) mod recover;
pub(super) mod repair;
pub(super) mod rescue;
pub(crate) mod rescuing;
pub(super) mod resize;
mod scanned;
pub(super) mod scrub;
pub(super) mod sharing;
pub(super) mod space;
pub(crate) mod statistics;
pub(crate) mod storing;
pub(super) mod subvolume;
