//! What is lost so far, and what stands in for it.
//!
//! A subtree is looked for once: what was found, or that nothing was, is remembered by the address
//! and the generation of its block. So a device that fails slowly is asked once, and the reporter
//! is told once. The memory is bounded by [`MOST_LOST`]; beyond that the volume counts as too
//! damaged to go on.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::{Generation, Key, Logical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use parking_lot::{Mutex, RwLock};

use super::index::{BlockIndex, ScannedBlock};
use super::stand_in::{choose, tower};
use crate::block::TreeBlock;
use crate::options::Rescue;
use crate::report::{LostItems, VolumeReport};
use crate::storage::Storage;
use crate::tree::{Blocks, LostSubtree};

/// The most lost subtrees that are remembered.
const MOST_LOST: usize = 1 << 16;

/// A lost block, by its address and generation.
type LostBlock = (Logical, Generation);

#[derive(Default)]
struct LostSubtrees {
    /// What stands in for each; `None` for nothing.
    known: HashMap<LostBlock, Option<Arc<TreeBlock>>>,
    /// How many blocks were found that were behind each.
    found: HashMap<LostBlock, usize>,
    /// Their items, by the tree, the first key and the level of the block.
    items: BTreeMap<(TreeId, Key, u8), LostItems>,
    /// The keys that some of the items may have, as ranges that are apart: by the tree and the
    /// first key, the key behind the last one.
    keys: BTreeMap<(TreeId, Key), Option<Key>>,
}

impl LostSubtrees {
    fn insert(&mut self, level: u8, items: LostItems) {
        let LostItems { tree, mut from, mut to, .. } = items;
        self.items.insert((tree, from, level), items);
        // Ranges that it touches become one with it.
        while let Some((begin, end)) = self.range_before(tree, to.unwrap_or(Key::MAX))
            && end.is_none_or(|end| from <= end)
        {
            self.keys.remove(&(tree, begin));
            from = from.min(begin);
            to = to.zip(end).map(|(one, other)| one.max(other));
        }
        self.keys.insert((tree, from), to);
    }

    /// The last range of `tree` that begins at `key` or before.
    fn range_before(&self, tree: TreeId, key: Key) -> Option<(Key, Option<Key>)> {
        let (&(of, begin), &end) = self.keys.range(..=(tree, key)).next_back()?;
        (of == tree).then_some((begin, end))
    }

    /// Whether an item of `tree` with a key from `from` to `to` may be lost.
    fn may_have(&self, tree: TreeId, from: Key, to: Key) -> bool {
        self.range_before(tree, to).is_some_and(|(_, end)| end.is_none_or(|end| from < end))
    }

    /// The lost items of `tree` that may have had keys from `from` to `to`. Those behind a node may
    /// contain others, so all that begin before are looked at.
    fn between(&self, tree: TreeId, from: Key, to: Key) -> impl Iterator<Item = &LostItems> {
        let begun = self.items.range((tree, Key::MIN, 0)..=(tree, to, u8::MAX));
        let reaches = move |items: &&LostItems| items.to.is_none_or(|end| from < end);
        begun.map(|(_, items)| items).filter(reaches)
    }
}

/// The questions that this room asks the trees above it.
pub(crate) trait TreesAbove {
    /// Whether `block` is in use, as the extent tree says; `None` when that cannot be read.
    fn is_allocated(&self, block: &ScannedBlock) -> Option<bool>;

    /// The trees that blocks of `tree` may have been made for: `tree` itself, and for a snapshot
    /// the subvolumes that it comes from.
    fn makers(&self, tree: TreeId) -> Vec<TreeId>;
}

/// How a volume is read around damage.
pub(crate) struct AroundDamage {
    scans: bool,
    lost: Mutex<LostSubtrees>,
    index: OnceLock<BlockIndex>,
    /// The nodes that stand in, by addresses that no chunk has.
    made: RwLock<HashMap<Logical, Arc<TreeBlock>>>,
}

impl AroundDamage {
    /// As `rescue` says; `None` when damage is an error.
    pub(crate) fn new(rescue: &Rescue) -> Option<Self> {
        rescue.goes_past_damage.then(|| Self {
            scans: rescue.scans,
            lost: Mutex::default(),
            index: OnceLock::new(),
            made: RwLock::default(),
        })
    }

    /// The block that `expected` describes, if it was made in memory.
    ///
    /// # Errors
    /// When it is known to be lost.
    pub(crate) fn known(&self, expected: &ExpectedBlock) -> Result<Option<Arc<TreeBlock>>> {
        if let Some(made) = self.made.read().get(&expected.logical) {
            return Ok(Some(made.clone()));
        }
        if self.lost.lock().known.contains_key(&(expected.logical, expected.generation)) {
            let problem = "it could not be read before";
            return Err(Error::corrupt_at(Structure::TreeBlock, expected.logical.0, problem));
        }
        Ok(None)
    }

    /// The block that stands in for `lost`, which could not be read because of `error`; `None` to
    /// go past it.
    ///
    /// # Errors
    /// `error`, when it says nothing about damage.
    pub(crate) fn stand_in(
        &self,
        storage: &Storage,
        blocks: &dyn Blocks,
        trees: &dyn TreesAbove,
        lost: &LostSubtree,
        error: Error,
    ) -> Result<Option<Arc<TreeBlock>>> {
        if !matches!(error, Error::Corrupt(_) | Error::Io { .. }) {
            return Err(error);
        }
        let id = (lost.block.logical, lost.block.generation);
        let known = self.lost.lock().known.get(&id).cloned();
        let block = match known {
            Some(known) => known,
            None => self.find(storage, blocks, trees, lost)?,
        };
        // Snapshots share blocks, so the block may be lost in several trees.
        let mut state = self.lost.lock();
        let place = (lost.block.owner, lost.from, lost.block.level);
        if state.items.contains_key(&place) || state.items.len() >= MOST_LOST {
            return Ok(block);
        }
        let found_blocks = state.found.get(&id).copied().unwrap_or_default();
        let items =
            LostItems { tree: lost.block.owner, from: lost.from, to: lost.to, found_blocks };
        state.insert(lost.block.level, items);
        drop(state);
        let logical = lost.block.logical;
        storage.report(&VolumeReport::LostItems { items, logical, problem: error.to_string() });
        Ok(block)
    }

    /// Looks for what stands in for a lost subtree that is not known yet, and remembers that.
    fn find(
        &self,
        storage: &Storage,
        blocks: &dyn Blocks,
        trees: &dyn TreesAbove,
        lost: &LostSubtree,
    ) -> Result<Option<Arc<TreeBlock>>> {
        let id = (lost.block.logical, lost.block.generation);
        if self.lost.lock().known.len() >= MOST_LOST {
            let problem = format!("more than {MOST_LOST} blocks of trees cannot be read");
            return Err(Error::corrupt_at(Structure::TreeBlock, lost.block.logical.0, problem));
        }
        let index = if lost.block.level > 0 { self.index(storage) } else { None };
        let chosen = index.map(|index| choose(index, blocks, trees, lost)).unwrap_or_default();
        let mut state = self.lost.lock();
        // Another thread may have been here meanwhile.
        if let Some(known) = state.known.get(&id) {
            return Ok(known.clone());
        }
        state.found.insert(id, chosen.len());
        let block = tower(storage, &mut self.made.write(), &lost.block, chosen);
        state.known.insert(id, block.clone());
        Ok(block)
    }

    /// The lost items of `tree` that may have had keys from `from` to `to`.
    pub(crate) fn lost_between(&self, tree: TreeId, from: Key, to: Key) -> Vec<LostItems> {
        let state = self.lost.lock();
        if !state.may_have(tree, from, to) {
            return Vec::new();
        }
        state.between(tree, from, to).copied().collect()
    }

    /// All lost items.
    pub(crate) fn all_lost(&self) -> Vec<LostItems> {
        self.lost.lock().items.values().copied().collect()
    }

    /// Whether an item of `tree` with this key may be lost.
    pub(crate) fn may_have_lost(&self, tree: TreeId, key: Key) -> bool {
        self.lost.lock().may_have(tree, key, key)
    }

    /// The blocks of trees that a search finds; `None` when it is not to search.
    pub(crate) fn index(&self, storage: &Storage) -> Option<&BlockIndex> {
        self.scans.then(|| self.index.get_or_init(|| BlockIndex::scan(storage)))
    }

    /// Whether the blocks below a lost node are looked for.
    pub(crate) fn scans(&self) -> bool {
        self.scans
    }
}

#[cfg(test)]
mod tests {
    use offshoot_btrfs_format::ItemType;
    use offshoot_testkit::random::{Random, seed_of_run};

    use super::*;

    /// The joined ranges say the same as a look at every lost subtree.
    #[test]
    fn ranges_of_lost_keys_are_joined() {
        let key = |number| Key::new(256, ItemType::EXTENT_DATA, number);
        let mut random = Random::new(seed_of_run());
        for _ in 0..200 {
            let mut lost = LostSubtrees::default();
            for _ in 0..random.below(12) {
                let from = random.below(60);
                let to = (random.below(8) > 0).then(|| key(from + 1 + random.below(10)));
                let tree = [TreeId::FS, TreeId::CSUM][usize::from(random.below(2) > 0)];
                // A subtree is added once.
                if !lost.items.contains_key(&(tree, key(from), 0)) {
                    lost.insert(0, LostItems { tree, from: key(from), to, found_blocks: 0 });
                }
            }
            for tree in [TreeId::FS, TreeId::CSUM, TreeId::EXTENT] {
                for from in 0..75 {
                    let (begin, end) = (key(from), key(from + random.below(3)));
                    let is_lost = lost.between(tree, begin, end).next().is_some();
                    assert_eq!(lost.may_have(tree, begin, end), is_lost, "{tree} {begin} {end}");
                }
            }
        }
    }
}
