//! Upkeep: the work that keeps a volume usable and that no single operation asks for.
//!
//! It decides when to commit, makes room for the threads that wait for space
//! ([`MakesRoom`](crate::space::MakesRoom)), allocates and removes chunks, and discards free space.
//! It calls all rooms below, and no room below names it.

mod chunks;
mod commit;
mod committer;
mod compact;
mod discard;
mod reclaim;
mod relocate;
mod resize;

use std::sync::Arc;

use crate::log::RunningLog;
use crate::subvolume::SubvolumeState;
#[cfg(test)]
pub(crate) use chunks::{look_around, remove_empty_groups, try_grow};
pub(crate) use committer::Committer;
pub(crate) use discard::{discard_step, trim};
#[cfg(test)]
pub(crate) use reclaim::make_room_ahead;
pub(crate) use relocate::relocate;
pub use resize::Resized;
pub(crate) use resize::{alone, resize, resize_to_minimum};

/// The states of rooms below that [`Rooms`](crate::inode::Rooms) does not hold, for the methods of
/// [`Upkeep`](crate::inode::Upkeep).
pub(crate) struct Keeper {
    pub(crate) subvolumes: Arc<SubvolumeState>,
    pub(crate) log: Arc<RunningLog>,
}
