//! How much of each member belongs to chunks.

use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_vfs::{Error, Result, Structure};
use parking_lot::Mutex;

use crate::storage::Member;

/// When less than this belongs to no chunk, in bytes, a chunk of metadata would take much of the
/// space that data may need.
const LEAST_ROOM_BYTES: u64 = 1 << 30;

/// How many bytes of each member, and of all members, belong to chunks.
#[derive(Debug)]
pub(crate) struct Allocated {
    members: Mutex<Vec<u64>>,
    count: u64,
    /// The sum of `members`, for reading without the lock.
    bytes: AtomicU64,
    /// The sizes of all members together.
    usable_bytes: AtomicU64,
}

impl Allocated {
    /// Starts with the values of the device items.
    pub(super) fn new(members: &[Member]) -> Self {
        let sum = |all: u64, bytes| all.saturating_add(bytes);
        Self {
            members: Mutex::new(members.iter().map(|member| member.allocated_bytes).collect()),
            count: members.len() as u64,
            bytes: AtomicU64::new(members.iter().map(|m| m.allocated_bytes).fold(0, sum)),
            usable_bytes: AtomicU64::new(usable_bytes(members)),
        }
    }

    /// Notes that members have other sizes.
    pub(crate) fn note_sizes(&self, members: &[Member]) {
        self.usable_bytes.store(usable_bytes(members), Ordering::Relaxed);
    }

    /// How many members there are.
    pub(crate) fn member_count(&self) -> u64 {
        self.count
    }

    /// How many bytes of each member belong to chunks.
    pub(super) fn of_members(&self) -> Vec<u64> {
        self.members.lock().clone()
    }

    /// Whether more than half of all members, and at least 1 GiB, belongs to no chunk after `more`
    /// bytes are allocated.
    pub(crate) fn has_much_room(&self, more: i64) -> bool {
        let bytes = self.bytes.load(Ordering::Relaxed).saturating_add_signed(more);
        let usable = self.usable_bytes.load(Ordering::Relaxed);
        bytes < usable / 2 && usable - bytes >= LEAST_ROOM_BYTES
    }

    /// How many bytes of all members belong to no chunk.
    pub(super) fn unallocated(&self) -> u64 {
        let usable = self.usable_bytes.load(Ordering::Relaxed);
        usable.saturating_sub(self.bytes.load(Ordering::Relaxed))
    }

    /// Counts `bytes` of a member that a chunk takes or gives up. Returns how many bytes of the
    /// member are allocated now.
    ///
    /// # Errors
    /// When the device item counts fewer bytes as allocated than the chunk has.
    pub(crate) fn change(&self, member: usize, bytes: u64, is_new: bool) -> Result<u64> {
        let mut members = self.members.lock();
        let count = &mut members[member];
        let changed = if is_new { count.checked_add(bytes) } else { count.checked_sub(bytes) };
        *count = changed.ok_or_else(|| {
            let problem = format!("it counts {count} bytes as allocated, and a chunk has {bytes}");
            Error::corrupt(Structure::DeviceItem, problem)
        })?;
        let now = *count;
        let sum = members.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        self.bytes.store(sum, Ordering::Relaxed);
        Ok(now)
    }
}

/// The sizes of all members together, in bytes.
fn usable_bytes(members: &[Member]) -> u64 {
    members.iter().map(Member::usable_bytes).fold(0, u64::saturating_add)
}
