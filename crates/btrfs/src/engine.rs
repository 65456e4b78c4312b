//! The engine of an open volume: the state that its rooms keep between calls.
//!
//! Opening reads the superblocks, the chunk tree and the root of the root tree. Except for the
//! chunk tree it reads nothing that grows with the contents of the volume.

mod handle;
mod mechanisms;
mod open;
mod usage;
mod writable;

use std::ops::Deref;
use std::sync::Arc;

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::check::Expected;
use offshoot_vfs::Result;

use crate::block::{Held, TreeBlock};
use crate::data::{Buffers, Files, ReadAhead};
use crate::delayed::{Delayed, Queues};
use crate::log::RunningLog;
use crate::space::SpaceStats;
use crate::stats::Stats;
use crate::subvolume::State;
use crate::transaction::Base;
use crate::tree::Blocks;
pub(crate) use handle::Handle;
pub use mechanisms::Mechanisms;
pub use open::OpenOptions;
pub(crate) use writable::Change;

/// The engine of an open volume: everything that a [`Volume`](crate::Volume) can do.
pub struct Engine {
    pub(crate) base: Base,
    /// How it was opened.
    pub(crate) options: OpenOptions,
    /// Delayed items of the trees of subvolumes.
    pub(crate) delayed: Delayed,
    /// Inodes that are being changed or are open.
    pub(crate) inodes: crate::inode::Inodes,
    /// Data that was written and waits for write-back.
    pub(crate) buffers: Buffers,
    pub(crate) read_ahead: ReadAhead,
    /// The log trees of the running transaction.
    pub(crate) log: RunningLog,
    /// Numbers of new subvolumes, and deleted ones.
    pub(crate) subvolumes: State,
}

impl Deref for Engine {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.base
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

impl Queues for Engine {
    fn delayed(&self) -> &Delayed {
        &self.delayed
    }
}

impl Files for Engine {
    fn base(&self) -> &Base {
        &self.base
    }

    fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    fn read_ahead(&self) -> &ReadAhead {
        &self.read_ahead
    }
}

impl Blocks for Engine {
    fn is_changing(&self) -> bool {
        self.base.is_changing()
    }

    fn epoch(&self) -> u64 {
        self.base.epoch()
    }

    fn block(&self, expected: &Expected) -> Result<Arc<TreeBlock>> {
        self.base.block(expected)
    }

    fn child(&self, node: &TreeBlock, slot: usize, owner: TreeId) -> Result<Arc<TreeBlock>> {
        self.base.child(node, slot, owner)
    }

    fn hold_root(&self, id: TreeId) -> Result<Held> {
        self.base.hold_root(id)
    }

    fn hold(&self, expected: &Expected) -> Result<Held> {
        self.base.hold(expected)
    }
}
