//! Shards of tables, so that threads at different files take different locks.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash};

use foldhash::fast::RandomState;
use offshoot_vfs::FileId;

use crate::sync::{Mutex, MutexGuard};

/// Scatters numbers (Fibonacci hashing): neighbours get results far apart, all below 2^32.
#[inline]
#[must_use]
pub fn scatter(number: u64) -> usize {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize
}

/// The number of shards of a table of inodes, a power of two.
pub const SHARDS: usize = 16;

/// The shard that `file` is in.
#[inline]
#[must_use]
pub fn shard_of(file: FileId) -> usize {
    scatter(file.ino ^ file.dev) & (SHARDS - 1)
}

/// A shard of a [`ShardedMap`].
///
/// Its hash is a fast one for numbers. Each table has a seed of its own, so the maker of an image
/// cannot choose block numbers that collide.
pub type MapShard<K, V> = HashMap<K, V, RandomState>;

/// A table in shards, each with a lock of its own.
#[derive(Debug)]
pub struct ShardedMap<K, V> {
    shards: [Mutex<MapShard<K, V>>; SHARDS],
    chooser: RandomState,
}

impl<K, V> Default for ShardedMap<K, V> {
    fn default() -> Self {
        Self { shards: Default::default(), chooser: RandomState::default() }
    }
}

impl<K: Eq + Hash, V> ShardedMap<K, V> {
    /// The shard that a key is in, locked.
    pub fn shard(&self, key: &K) -> MutexGuard<'_, MapShard<K, V>> {
        self.shard_of_hash(self.chooser.hash_one(key))
    }

    /// The shard of all keys to which the caller gives this number, locked.
    #[must_use = "the shard is locked no longer than the guard lives"]
    pub fn shard_numbered(&self, number: u64) -> MutexGuard<'_, MapShard<K, V>> {
        self.shard_of_hash(scatter(number) as u64)
    }

    fn shard_of_hash(&self, hash: u64) -> MutexGuard<'_, MapShard<K, V>> {
        let [first, ..] = &self.shards;
        let index = usize::try_from(hash % SHARDS as u64).unwrap_or(0);
        self.shards.get(index).unwrap_or(first).lock()
    }

    /// Takes everything out.
    pub fn clear(&self) {
        for shard in &self.shards {
            // Values may look for others when they are dropped.
            let values = std::mem::take(&mut *shard.lock());
            drop(values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_always_in_the_same_shard() {
        let map = ShardedMap::default();
        for key in 0..1000_u64 {
            assert!(map.shard(&key).insert(key, 2 * key).is_none());
        }
        assert!((0..1000).all(|key| map.shard(&key).get(&key) == Some(&(2 * key))));
        let used = map.shards.iter().filter(|shard| !shard.lock().is_empty()).count();
        assert_eq!(used, SHARDS);
        map.clear();
        assert!((0..1000).all(|key| map.shard(&key).is_empty()));
        // Neighbours may be given one number, so that one lock is enough for all of them.
        map.shard_numbered(3).extend([(1, 1), (2, 2)]);
        assert_eq!(map.shard_numbered(3).len(), 2);
    }
}
