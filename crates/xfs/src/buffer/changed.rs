//! Buffers that transactions have changed, and that are not in their places yet.
//!
//! A commit *publishes* the new bytes of a place. Readers then find them in the cache, or here when
//! the cache had no room. The bytes leave this table when they are *home*: written to their place
//! on the device. What is here has no right checksum: a write to the device makes it.

use std::collections::HashMap;
use std::sync::Arc;

use offshoot_kit::sync::Mutex;
use offshoot_vfs::Result;
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::{BasicBlock, Lsn};

use super::{BufferRole, XfsBuffer, XfsBuffers};

/// The newest bytes of each place where the device has older ones.
#[derive(Debug, Default)]
pub(super) struct ChangedBuffers {
    by_place: Mutex<HashMap<u64, Arc<XfsBuffer>>>,
}

impl ChangedBuffers {
    pub(super) fn get(&self, place: BasicBlock) -> Option<Arc<XfsBuffer>> {
        self.by_place.lock().get(&place.0).cloned()
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

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes.into_vec()
    }

    /// A copy that says the LSN of its last change and has its checksum, proved as its role.
    pub(crate) fn sealed(&self, buffers: &XfsBuffers, lsn: Lsn) -> Result<Self> {
        let geometry = buffers.geometry();
        let mut bytes = self.bytes.clone();
        // Inodes have one each, which the changes of an inode keep right.
        let is_one_unit = self.role != BufferRole::InodeCluster;
        if let Some(identity) = XfsIdentity::of_magic(geometry, &bytes).filter(|_| is_one_unit) {
            identity.seal(&mut bytes, lsn);
        }
        let sealed = Self { role: self.role, place: self.place, bytes };
        sealed.verify(geometry).map_err(|problem| sealed.damaged(problem))?;
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
        self.changed.by_place.lock().insert(place, buffer.clone());
        self.cache.insert(place, buffer);
    }

    /// Says that `buffer` was written to its place. A newer one that was published meanwhile stays.
    pub(crate) fn settle(&self, buffer: &Arc<XfsBuffer>) {
        let mut by_place = self.changed.by_place.lock();
        let place = buffer.place.0;
        if by_place.get(&place).is_some_and(|newest| Arc::ptr_eq(newest, buffer)) {
            by_place.remove(&place);
        }
    }

    /// Forgets what is at a place, because its blocks were freed.
    pub(crate) fn forget(&self, place: BasicBlock) {
        self.changed.by_place.lock().remove(&place.0);
        self.cache.remove(&place.0);
    }
}
