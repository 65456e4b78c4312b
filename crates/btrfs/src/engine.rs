//! The engine of an open volume: the state that its rooms keep between calls.
//!
//! Opening reads the superblocks, the chunk tree and the root of the root tree. Except for the
//! chunk tree it reads nothing that grows with the contents of the volume.

mod calls;
mod open;
mod rescue;
mod usage;
mod writable;

use std::ops::Deref;
use std::sync::Arc;

use crate::inode::Rooms;
use crate::log::RunningLog;
use crate::space::SpaceStats;
use crate::stats::Stats;
use crate::subvolume::SubvolumeState;
use writable::WriteDestination;

/// The engine of an open volume: everything that a [`BtrfsVolume`](crate::BtrfsVolume) can do.
pub struct Engine {
    pub(crate) rooms: Rooms,
    /// Numbers of new subvolumes, and deleted ones.
    pub(crate) subvolumes: Arc<SubvolumeState>,
    /// The log trees of the running transaction.
    pub(crate) log: Arc<RunningLog>,
}

impl Deref for Engine {
    type Target = Rooms;

    fn deref(&self) -> &Rooms {
        &self.rooms
    }
}

impl Engine {
    /// What the engine has done since the volume was opened. All counters are zero if it was opened
    /// for reading.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Some(live) = self.live_part() else { return Stats::default() };
        live.stats.note_backlog(self.delayed.peak_bytes());
        live.stats.note_metadata_reserved(live.space.metadata_reserved_peak());
        live.stats.read()
    }

    /// What happened to reservations since the volume was opened, and how much there is of each
    /// kind of space. All zero if the volume was opened for reading.
    #[must_use]
    pub fn space_stats(&self) -> SpaceStats {
        let Some(live) = self.live_part() else { return SpaceStats::default() };
        live.space.stats(live.stats.read().reservations_at_once)
    }
}
