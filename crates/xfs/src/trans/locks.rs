//! Locks by key: of buffers by their places, of inodes by their numbers. A transaction holds its
//! locks until its commit, and another thread may release them. Waiters get a lock in the order of
//! their requests.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;

use offshoot_kit::sync::Mutex;
use offshoot_kit::sync::mpsc::{self, Sender};
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

    /// Takes the lock, once its holder releases it.
    pub(crate) fn lock(&self, key: K) -> Result<()> {
        let turn = match self.held.lock().entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(VecDeque::new());
                return Ok(());
            }
            Entry::Occupied(mut entry) => {
                let (sender, turn) = mpsc::channel();
                entry.get_mut().push_back(sender);
                turn
            }
        };
        turn.recv().map_err(|_| {
            let problem = format!("the lock of {key:?} went away");
            Error::corrupt(Structure::BtreeBlock, problem)
        })
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
