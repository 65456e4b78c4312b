//! Locks by key: of buffers by their places, of inodes by their numbers. A transaction holds its
//! locks until its commit, and another thread may release them. Waiters get a lock in the order of
//! their requests.
//!
//! No thread waits for ever for what only one transaction should want: on a damaged volume two
//! structures may have the same blocks, and two transactions that hold one each may want the
//! other's. What writes home holds its lock as long as the device needs, and waits for no other.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Duration;

use offshoot_kit::shards::ShardedMap;
use offshoot_kit::sync::mpsc::{self, Receiver, Sender};
use offshoot_vfs::{Error, Result, Structure};

/// The locks that are held. Each holder and each waiter says by a note what it wants the lock for.
#[derive(Debug)]
pub(crate) struct KeyLocks<K, N = ()> {
    held: ShardedMap<K, LockLine<N>>,
}

/// The holder of a lock, and the threads that wait for it.
#[derive(Debug)]
struct LockLine<N> {
    holder: N,
    waiters: VecDeque<(Sender<()>, N)>,
}

impl<K: Copy + Eq + Hash + Debug, N: Copy> KeyLocks<K, N> {
    pub(crate) fn new() -> Self {
        Self { held: ShardedMap::default() }
    }

    /// Takes the lock, or a place in the line for it.
    fn line_up(&self, key: K, holder: N) -> Option<Receiver<()>> {
        match self.held.shard(&key).entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(LockLine { holder, waiters: VecDeque::new() });
                None
            }
            Entry::Occupied(mut entry) => {
                let (sender, turn) = mpsc::channel();
                entry.get_mut().waiters.push_back((sender, holder));
                Some(turn)
            }
        }
    }

    /// Takes the lock, once its holder releases it.
    pub(crate) fn lock(&self, key: K, holder: N) -> Result<()> {
        let Some(turn) = self.line_up(key, holder) else { return Ok(()) };
        turn.recv().map_err(|_| {
            let problem = format!("the lock of {key:?} went away");
            Error::corrupt(Structure::BtreeBlock, problem)
        })
    }

    /// The same, but gives up when this time has passed and `is_legal` says of the holder that no
    /// thread may wait for it. Returns that holder then.
    pub(super) fn lock_within(
        &self,
        key: K,
        holder: N,
        longest: Duration,
        is_legal: impl Fn(&N) -> bool,
    ) -> Result<(), N> {
        let Some(turn) = self.line_up(key, holder) else { return Ok(()) };
        loop {
            if turn.recv_timeout(longest).is_ok() {
                return Ok(());
            }
            // The lock may have come at the last moment. If not, it goes to the next in the line:
            // this place ends under the lock of the table, which the holder takes to release the
            // lock.
            let held = self.held.shard(&key);
            if turn.try_recv().is_ok() {
                return Ok(());
            }
            match held.get(&key).map(|line| line.holder) {
                Some(holder) if !is_legal(&holder) => {
                    drop(turn);
                    return Err(holder);
                }
                _ => {}
            }
        }
    }

    /// Takes the lock if nobody holds it.
    pub(super) fn try_lock(&self, key: K, holder: N) -> bool {
        match self.held.shard(&key).entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(LockLine { holder, waiters: VecDeque::new() });
                true
            }
            Entry::Occupied(_) => false,
        }
    }

    /// Releases a lock that the caller holds: the next waiter has it then.
    pub(crate) fn unlock(&self, key: K) {
        let mut held = self.held.shard(&key);
        let Some(line) = held.get_mut(&key) else { return };
        while let Some((next, holder)) = line.waiters.pop_front() {
            line.holder = holder;
            if next.send(()).is_ok() {
                return;
            }
        }
        held.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    /// The thread that writes home may be slow, and a transaction may not.
    #[test]
    fn a_wait_ends_only_where_none_may_wait() {
        let locks = Arc::new(KeyLocks::<u32, &str>::new());
        let is_slow = |holder: &&str| *holder == "slow";
        let wait = Duration::from_millis(20);
        locks.lock(1, "other").unwrap();
        assert_eq!(locks.lock_within(1, "me", wait, is_slow), Err("other"));
        locks.unlock(1);
        assert!(locks.try_lock(1, "slow"));
        let waiter = {
            let locks = locks.clone();
            thread::spawn(move || locks.lock_within(1, "me", wait, is_slow))
        };
        thread::sleep(5 * wait);
        locks.unlock(1);
        assert_eq!(waiter.join().unwrap(), Ok(()));
        // The one that got it from the line is named next.
        assert_eq!(locks.lock_within(1, "third", wait, is_slow), Err("me"));
        locks.unlock(1);
        assert!(locks.try_lock(1, "fourth"));
    }
}
