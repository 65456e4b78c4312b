//! Headers of groups that a transaction wanted and must not wait for: it has one that comes behind.
//!
//! An operation that has changed nothing yet begins again then. Its next transaction waits for what
//! the last one has missed, in the line of each lock, before it has any header:
//!
//! ```text
//! has AGF 5, wants 2, which is locked     dropped: 2 is missed
//! wants any header                        waits for 2 first, then for that one
//! ```
//!
//! A poll would not do: a lock with a line goes from each holder to the next, and is never free.

use std::collections::BTreeMap;

use offshoot_kit::sync::Mutex;
use offshoot_xfs_format::AgNumber;

use crate::buffer::{BufferRole, DiskRun};

/// The place of an AGI or AGF in the order in which transactions lock them.
pub(super) type GroupOrder = (u32, u8);

/// Headers, in the order in which they are locked.
pub(super) type HeadersInOrder = BTreeMap<GroupOrder, (DiskRun, BufferRole)>;

/// The place of a header in that order; `None` for all other buffers.
pub(super) fn group_order(role: BufferRole) -> Option<GroupOrder> {
    match role {
        BufferRole::Inodes(ag) => Some((ag.0, 0)),
        BufferRole::FreeSpace(ag) => Some((ag.0, 1)),
        _ => None,
    }
}

/// What the tries of an operation have missed.
#[derive(Debug, Default)]
pub(crate) struct MissedLocks(Mutex<MissedState>);

#[derive(Clone, Debug, Default)]
struct MissedState {
    headers: HeadersInOrder,
    /// Whether the last try has missed one more.
    has_new: bool,
    /// A group whose last blocks other chains may need for its trees.
    crowded: Option<AgNumber>,
}

impl MissedLocks {
    /// What the next try waits for first.
    pub(super) fn headers(&self) -> HeadersInOrder {
        self.0.lock().headers.clone()
    }

    pub(super) fn add(&self, missed: &MissedHeaders) {
        let mut state = self.0.lock();
        let known = state.headers.len();
        state.headers.extend(&missed.headers);
        state.has_new |= state.headers.len() > known;
        state.crowded = state.crowded.or(missed.crowded);
    }

    /// Whether the tries have missed one more header since this was asked last.
    pub(super) fn take_new(&self) -> bool {
        std::mem::take(&mut self.0.lock().has_new)
    }

    /// The group for whose blocks the last try has to wait.
    pub(super) fn take_crowded(&self) -> Option<AgNumber> {
        self.0.lock().crowded.take()
    }
}

/// What a transaction has missed since its last commit.
#[derive(Debug, Default)]
pub(super) struct MissedHeaders {
    pub(super) headers: HeadersInOrder,
    /// Whether the transaction has waited for all of them.
    pub(super) were_held: bool,
    pub(super) crowded: Option<AgNumber>,
}
