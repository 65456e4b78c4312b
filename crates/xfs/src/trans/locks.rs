//! Locks by key: of buffers by their places, of inodes by their numbers. A transaction holds its
//! locks until its commit, and another thread may release them. Waiters get a lock in the order of
//! their requests.
//!
//! No thread waits for ever for what only one transaction should want: on a damaged volume two
//! structures may have the same blocks, and two transactions that hold one each may want the
//! other's.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use offshoot_kit::sync::Mutex;
use offshoot_kit::sync::mpsc::{self, Receiver, Sender};
use offshoot_vfs::{Error, Result, Structure};

/// The locks that are held, each with the threads that wait for it.
#[derive(Debug)]
pub(crate) struct KeyLocks<K> {
    held: Mutex<HashMap<K, VecDeque<Sender<()>>>>,
}

impl<K: Copy + Eq + Hash + Debug> KeyLocks<K> {
    pub(crate) fn new() -> Self {
        Self { held: Mutex::new(HashMap::new()) }
    }

    /// Takes the lock, or a place in the line for it.
    fn line_up(&self, key: K) -> Option<Receiver<()>> {
        match self.held.lock().entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(VecDeque::new());
                None
            }
            Entry::Occupied(mut entry) => {
                let (sender, turn) = mpsc::channel();
                entry.get_mut().push_back(sender);
                Some(turn)
            }
        }
    }

    /// Takes the lock, once its holder releases it.
    pub(crate) fn lock(&self, key: K) -> Result<()> {
        let Some(turn) = self.line_up(key) else { return Ok(()) };
        turn.recv().map_err(|_| {
            let problem = format!("the lock of {key:?} went away");
            Error::corrupt(Structure::BtreeBlock, problem)
        })
    }

    /// The same, but waits no longer than this. Returns whether it has the lock.
    pub(super) fn lock_within(&self, key: K, longest: Duration) -> bool {
        let Some(turn) = self.line_up(key) else { return true };
        if turn.recv_timeout(longest).is_ok() {
            return true;
        }
        // The lock may have come at the last moment. If not, it goes to the next in the line: this
        // place ends under the lock of the table, which the holder takes to release the lock.
        let held = self.held.lock();
        let has_lock = turn.try_recv().is_ok();
        drop(turn);
        drop(held);
        has_lock
    }

    /// Takes the lock if nobody holds it.
    pub(super) fn try_lock(&self, key: K) -> bool {
        match self.held.lock().entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(VecDeque::new());
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// Releases a lock that the caller holds: the next waiter has it then.
    pub(crate) fn unlock(&self, key: K) {
        let mut held = self.held.lock();
        let Some(waiters) = held.get_mut(&key) else { return };
        while let Some(next) = waiters.pop_front() {
            if next.send(()).is_ok() {
                return;
            }
        }
        held.remove(&key);
    }
}
