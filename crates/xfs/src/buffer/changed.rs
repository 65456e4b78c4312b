//! Buffers that transactions have changed, and that are not in their places yet.
//!
//! A commit *publishes* the new bytes of a place, and readers find them here. The bytes leave this
//! table when they are *home*: written to their place on the device. The cache gets them then, once
//! for all commits since they were last home. What is here has no right checksum, and the LSN of an
//! older change: a write to the device makes both, and the cache gets them as the device does.
//!
//! The cache may have older bytes of a place that is in this table, so readers look here first:
//!
//! ```text
//! reader    here: none        cache: none     device: old       is told that the cache has newer
//! commit          publishes                                     bytes, and keeps none
//! log                  writes home, cache gets new, leaves here
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use offshoot_kit::shards::ShardedMap;
use offshoot_vfs::Result;
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::{BasicBlock, Lsn};

use super::{BufferRole, XfsBuffer, XfsBuffers};

/// The newest bytes of each place where the device has older ones.
#[derive(Debug, Default)]
pub(super) struct ChangedBuffers {
    by_place: ShardedMap<u64, Arc<XfsBuffer>>,
    /// Whether there was ever one. Readers of a volume that is only read take no lock here.
    is_used: AtomicBool,
}

impl ChangedBuffers {
    pub(super) fn get(&self, place: BasicBlock) -> Option<Arc<XfsBuffer>> {
        if !self.is_used.load(Ordering::Acquire) {
            return None;
        }
        self.by_place.shard(&place.0).get(&place.0).cloned()
    }
}

impl XfsBuffer {
    /// The bytes that a transaction makes those of `place`.
    pub(crate) fn changed(role: BufferRole, place: BasicBlock, bytes: Box<[u8]>) -> Self {
        Self { role, place, bytes }
    }

    pub(crate) fn role(&self) -> BufferRole {
        self.role
    }

    /// A copy that says the LSN of its last change and has its checksum, proved as its role.
    pub(crate) fn sealed(&self, buffers: &XfsBuffers, lsn: Lsn) -> Result<Self> {
        let geometry = buffers.geometry();
        let mut sealed = Self { role: self.role, place: self.place, bytes: self.bytes.clone() };
        // Then its new checksum has to be right, and is not computed again.
        let is_proved = self.role.is_proved_whole();
        if is_proved {
            self.role.verify_changed(geometry, self.place, &sealed.bytes)?;
        }
        // Inodes have one each, which the changes of an inode keep right.
        let is_one_unit = self.role != BufferRole::InodeCluster;
        let identity = XfsIdentity::of_magic(geometry, &sealed.bytes).filter(|_| is_one_unit);
        if let Some(identity) = identity {
            identity.seal(&mut sealed.bytes, lsn);
        }
        if !is_proved {
            sealed.verify(geometry).map_err(|problem| sealed.damaged(problem))?;
        }
        Ok(sealed)
    }

    /// The same bytes as another role, proved.
    pub(super) fn as_role(&self, buffers: &XfsBuffers, role: BufferRole) -> Result<Self> {
        let identity = XfsIdentity::of_magic(buffers.geometry(), &self.bytes);
        let lsn = identity.and_then(|identity| identity.lsn_of(&self.bytes));
        let bytes = self.bytes.clone();
        Self { role, place: self.place, bytes }.sealed(buffers, lsn.unwrap_or(Lsn(0)))
    }
}

impl XfsBuffers {
    /// Makes `buffer` what readers find at its place, until the place is written or freed.
    pub(crate) fn publish(&self, buffer: Arc<XfsBuffer>) {
        let place = buffer.place.0;
        self.changed.is_used.store(true, Ordering::Release);
        let before = self.changed.by_place.shard(&place).insert(place, buffer);
        if before.is_none() {
            // Readers that look here find no use for it.
            self.cache.remove(&place);
        }
    }

    /// Says that `buffer` was written to its place, as `sealed`. A newer one that was published
    /// meanwhile stays.
    ///
    /// The cache gets what the device got. So what a transaction finds at a place, and with it what
    /// the log gets of it, does not depend on what the cache has room for.
    pub(crate) fn settle(&self, buffer: &Arc<XfsBuffer>, sealed: &Arc<XfsBuffer>) {
        let place = buffer.place.0;
        let mut by_place = self.changed.by_place.shard(&place);
        if by_place.get(&place).is_some_and(|newest| Arc::ptr_eq(newest, buffer)) {
            // Before it leaves the table: the cache may have got older bytes.
            self.cache.insert(place, sealed.clone());
            by_place.remove(&place);
        }
    }

    /// Forgets what is at a place, because its blocks were freed.
    pub(crate) fn forget(&self, place: BasicBlock) {
        let mut by_place = self.changed.by_place.shard(&place.0);
        by_place.remove(&place.0);
        self.cache.remove(&place.0);
    }
}
