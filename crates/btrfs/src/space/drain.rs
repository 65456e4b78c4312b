//! Block groups that are emptied or become shorter, and members that become smaller.
//!
//! | | what it keeps threads from | until |
//! |---|---|---|
//! | a *draining* group | taking space in it | it is removed, or used again |
//! | the *limit* of a group | taking space behind it | the group ends there, or the limit is lifted |
//! | the *limit* of a member | placing chunks behind it | the member ends there, or the limit is lifted |
//!
//! Free space that cannot be taken counts for no ledger. So it is withdrawn only while all claims
//! stay backed.

use std::sync::Arc;

use offshoot_vfs::Result;

use super::block_group::BlockGroup;
use super::{Purpose, Roots, Space, profile};
use crate::counter::NonNegativeCounter;

/// While this exists, no empty block group is removed but by its owner.
pub(crate) struct KeptGroups<'s> {
    reasons: &'s NonNegativeCounter,
}

impl Drop for KeptGroups<'_> {
    fn drop(&mut self) {
        self.reasons.sub(1);
    }
}

impl Space {
    /// Keeps all threads from taking space in `group`. Returns false, without a change, unless
    /// `keep` bytes beside all claims stay free elsewhere.
    pub(crate) fn drain(&self, group: &BlockGroup, keep: u64) -> bool {
        if group.is_draining() {
            return true;
        }
        match self.ledger_of(group) {
            Some(ledger) => ledger.withdraw(group.known_usable(), keep, || group.drain()),
            None => group.drain().is_some(),
        }
    }

    /// Allows threads to take space in `group` again.
    pub(crate) fn undrain(&self, group: &BlockGroup) {
        group.undrain(|free| self.count_free(group, free));
        self.serve_all();
    }

    /// Keeps all threads from taking space in `group` behind `end`. Returns false, without a
    /// change, unless `keep` bytes beside all claims stay free.
    pub(crate) fn limit_group(
        &self,
        volume: &dyn Roots,
        group: &BlockGroup,
        end: u64,
        keep: u64,
    ) -> Result<bool> {
        self.load(volume, group)?;
        // A piece that is being discarded counts as free, wherever it is.
        let _still = self.without_piece();
        Ok(match self.ledger_of(group) {
            // What is withdrawn is known only afterwards.
            Some(ledger) => {
                let less = group.limit(end).unwrap_or(0);
                let is_done = ledger.withdraw(less, keep, || Some(less));
                if !is_done {
                    group.lift_limit(|_| ());
                }
                is_done
            }
            None => group.limit(end).is_some(),
        })
    }

    /// Lifts the limit of a group.
    pub(crate) fn lift_limit(&self, group: &BlockGroup) {
        {
            let _still = self.without_piece();
            group.lift_limit(|more| self.count_free(group, more));
        }
        self.serve_all();
    }

    /// Makes `group` end at its limit, after `len` bytes. No thread has a handle, and nothing
    /// behind the limit is in use.
    pub(crate) fn shorten_group(&self, group: &BlockGroup, len: u64) {
        self.groups.write().shorten(group.start, len);
    }

    /// What the space of `group` is for, as far as space is taken from groups like it.
    pub(crate) fn purpose_of(&self, group: &BlockGroup) -> Purpose {
        let has_type =
            |purpose: &Purpose| group.serves(profile::types_for(*purpose, self.is_mixed));
        Purpose::ALL.into_iter().find(has_type).unwrap_or(Purpose::Data)
    }

    /// Whether no group but `group` is left from which space for `purpose` may be taken.
    pub(crate) fn is_last_to_take(&self, purpose: Purpose, group: &BlockGroup) -> bool {
        let may_take = |other: &&Arc<BlockGroup>| {
            other.start != group.start && !other.is_retired() && self.may_take(purpose, other)
        };
        !self.groups.read().overlapping(&(0..u64::MAX)).any(|other| may_take(&other))
    }

    /// Keeps empty block groups from being removed, until the guard is dropped: they are about to
    /// be filled.
    pub(crate) fn keep_empty_groups(&self) -> KeptGroups<'_> {
        self.keeps_empty.add(1);
        KeptGroups { reasons: &self.keeps_empty }
    }

    /// Whether empty block groups are about to be filled.
    pub(crate) fn keeps_empty_groups(&self) -> bool {
        self.keeps_empty.get() > 0
    }

    /// Limits new chunks on a member to its first bytes, or no longer.
    pub(crate) fn limit_member(&self, index: usize, bytes: Option<u64>) {
        let mut limits = self.member_limits.lock();
        match bytes {
            Some(bytes) => drop(limits.insert(index, bytes)),
            None => drop(limits.remove(&index)),
        }
        // The holes are found anew.
        *self.member_spaces.lock() = None;
    }

    /// How many bytes of the member new chunks may use.
    pub(crate) fn member_limit(&self, index: usize) -> u64 {
        self.member_limits.lock().get(&index).copied().unwrap_or(u64::MAX)
    }
}
