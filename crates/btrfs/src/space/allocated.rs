//! How much of the members belongs to chunks.

use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_vfs::{Error, Result};
use parking_lot::Mutex;

use crate::storage::Member;

/// Where less than this belongs to no chunk, one of metadata takes much of what data may need, in
/// bytes.
const LEAST_ROOM_BYTES: u64 = 1 << 30;

/// What of every member belongs to chunks, and what of all of them.
#[derive(Debug)]
pub(crate) struct Allocated {
    members: Mutex<Vec<u64>>,
    count: u64,
    /// The sum of `members`, to be looked at without the lock.
    bytes: AtomicU64,
    /// What all members have.
    usable_bytes: u64,
}

impl Allocated {
    /// As the members of the volume say.
    pub(crate) fn new(members: &[Member]) -> Self {
        let sum = |all: u64, bytes| all.saturating_add(bytes);
        Self {
            members: Mutex::new(members.iter().map(|member| member.allocated_bytes).collect()),
            count: members.len() as u64,
            bytes: AtomicU64::new(members.iter().map(|m| m.allocated_bytes).fold(0, sum)),
            usable_bytes: members.iter().map(Member::usable_bytes).fold(0, sum),
        }
    }

    /// How many members there are.
    pub(crate) fn member_count(&self) -> u64 {
        self.count
    }

    /// What of each member belongs to chunks, in bytes.
    pub(crate) fn of_members(&self) -> Vec<u64> {
        self.members.lock().clone()
    }

    /// Whether most of the members belongs to no chunk, and a GiB at least, when so many bytes more
    /// do.
    pub(crate) fn has_much_room(&self, more: i64) -> bool {
        let bytes = self.bytes.load(Ordering::Relaxed).saturating_add_signed(more);
        bytes < self.usable_bytes / 2 && self.usable_bytes - bytes >= LEAST_ROOM_BYTES
    }

    /// What of all members belongs to no chunk, in bytes.
    pub(crate) fn unallocated(&self) -> u64 {
        self.usable_bytes.saturating_sub(self.bytes.load(Ordering::Relaxed))
    }

    /// Counts `bytes` of a member that a chunk takes or leaves, and says what of it is allocated
    /// now.
    ///
    /// # Errors
    /// When its device item counts less as allocated than its chunks take.
    pub(crate) fn change(&self, member: usize, bytes: u64, is_new: bool) -> Result<u64> {
        let mut members = self.members.lock();
        let count = &mut members[member];
        let changed = if is_new { count.checked_add(bytes) } else { count.checked_sub(bytes) };
        *count = changed.ok_or_else(|| {
            let problem = format!("it counts {count} bytes as allocated, and a chunk has {bytes}");
            Error::corrupt("device item", problem)
        })?;
        let now = *count;
        let sum = members.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        self.bytes.store(sum, Ordering::Relaxed);
        Ok(now)
    }
}
