//! Reading items that may be queued: the nodes first, then the tree.

use std::ops::{ControlFlow, Range, RangeInclusive};

use offshoot_btrfs_format::{Key, TreeId};
use offshoot_vfs::Result;

use super::node::{QueuedItem, QueuedItems};
use super::{Delayed, NodeId, Queues};
use crate::tree::{self, Cursor, TreeRoot};

/// A callback that gets a key and its data, and returns whether to continue.
pub(crate) type ItemVisit<'a> = &'a mut dyn FnMut(Key, &[u8]) -> Result<ControlFlow<()>>;

/// The number of queued items that are copied at a time.
const CHUNK: usize = 256;

/// Calls `found` with the data of the item with exactly this key; returns `None` when there is
/// none. `found` must take no lock and search no tree.
pub(crate) fn with_item<T>(
    volume: &impl Queues,
    root: TreeRoot,
    key: Key,
    found: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<Option<T>> {
    let mut found = Some(found);
    let mut call = |data: &[u8]| found.take().map(|found| found(data)).transpose();
    let queued = volume.delayed().look(root.id, key, |data| data.map_or(Ok(None), &mut call));
    match queued {
        Some(outcome) => outcome,
        None => tree::with_item(volume, root, key, call).map(Option::flatten),
    }
}

/// Calls `visit` with the items of `range` in the order of keys, until it breaks. `range` is within
/// one inode.
///
/// An item that exists when this begins is visited once, unless it is removed meanwhile.
pub(crate) fn for_each_item(
    volume: &impl Queues,
    root: TreeRoot,
    range: RangeInclusive<Key>,
    visit: ItemVisit<'_>,
) -> Result<()> {
    let (mut first, last) = range.into_inner();
    loop {
        // The queue is copied before the tree is searched. An item that a flush forgets later is in
        // the copy, and one that it forgot earlier is in the tree. For the same reason each chunk
        // searches the tree anew.
        let queued = volume.delayed().copy(root.id, first..=last);
        let end = queued.end.unwrap_or(last);
        if visit_merged(volume, root, first..=end, &queued, visit)?.is_break() {
            return Ok(());
        }
        match end.successor() {
            Some(next) if end < last => first = next,
            _ => return Ok(()),
        }
    }
}

/// Visits the items of `range`: those that are queued, and those of the tree that are not.
fn visit_merged(
    volume: &impl Queues,
    root: TreeRoot,
    range: RangeInclusive<Key>,
    queued: &CopiedItems,
    visit: ItemVisit<'_>,
) -> Result<ControlFlow<()>> {
    let mut queued = queued.items().peekable();
    let mut cursor = Cursor::seek(volume, root, *range.start())?;
    loop {
        let stored = cursor.item().filter(|(key, _)| key <= range.end());
        let next = queued.peek().map(|(key, _)| *key);
        let is_stored = match (&stored, next) {
            (None, None) => return Ok(ControlFlow::Continue(())),
            (Some((stored, _)), Some(queued)) if *stored == queued => {
                cursor.advance()?;
                continue;
            }
            (Some((stored, _)), Some(queued)) => *stored < queued,
            (stored, _) => stored.is_some(),
        };
        let shown =
            if is_stored { stored.map(|(key, data)| (key, Some(data))) } else { queued.next() };
        if let Some((key, Some(data))) = shown
            && visit(key, data)?.is_break()
        {
            return Ok(ControlFlow::Break(()));
        }
        if is_stored {
            cursor.advance()?;
        }
    }
}

/// The last key of `range` that is queued or in the tree. `range` is within one inode. An item with
/// a tombstone counts too.
pub(crate) fn last_below(
    volume: &impl Queues,
    root: TreeRoot,
    range: RangeInclusive<Key>,
) -> Result<Option<Key>> {
    let queued = volume.delayed().last(root.id, range.clone());
    let cursor = Cursor::seek_floor(volume, root, *range.end())?;
    let stored = cursor.item().map(|(key, _)| key).filter(|key| range.contains(key));
    Ok(queued.max(stored))
}

/// The queued keys of `range`, which is within one inode. The flag is `false` for a tombstone.
pub(crate) fn queued_between(
    volume: &impl Queues,
    tree: TreeId,
    range: RangeInclusive<Key>,
) -> Vec<(Key, bool)> {
    volume.delayed().merged(tree, range, |all| {
        all.map(|(key, pending)| (key, pending.data().is_some())).collect()
    })
}

/// A copy of the items that were queued at one moment.
#[derive(Default)]
struct CopiedItems {
    items: Vec<(Key, Option<Range<usize>>)>,
    data: Vec<u8>,
    /// The last key that was copied, if there may be more behind it.
    end: Option<Key>,
}

impl CopiedItems {
    fn items(&self) -> impl Iterator<Item = (Key, Option<&[u8]>)> {
        self.items.iter().map(|(key, data)| (*key, data.clone().map(|range| &self.data[range])))
    }
}

impl Delayed {
    /// Copies the queued items of `range` from its beginning on, at most [`CHUNK`].
    fn copy(&self, tree: TreeId, range: RangeInclusive<Key>) -> CopiedItems {
        self.merged(tree, range, |all| {
            let mut copied = CopiedItems::default();
            for (key, pending) in all.take(CHUNK) {
                let from = copied.data.len();
                let data = pending.data().map(|data| {
                    copied.data.extend_from_slice(data);
                    from..copied.data.len()
                });
                copied.items.push((key, data));
            }
            if copied.items.len() == CHUNK {
                copied.end = copied.items.last().map(|(key, _)| *key);
            }
            copied
        })
    }

    fn last(&self, tree: TreeId, range: RangeInclusive<Key>) -> Option<Key> {
        let id = NodeId::of(tree, *range.end()).filter(|_| self.is_on)?;
        let shard = self.shard(id).read();
        let node = shard.get(&id)?;
        let last = |items: &QueuedItems| items.range(range.clone()).next_back().map(|(key, _)| key);
        last(&node.active).max(node.flushing.as_ref().and_then(|items| last(items)))
    }

    /// Calls `look` with the queued items of `range` in the order of keys. `range` is within one
    /// node. `look` must take no lock.
    fn merged<T: Default>(
        &self,
        tree: TreeId,
        range: RangeInclusive<Key>,
        look: impl FnOnce(&mut dyn Iterator<Item = (Key, &QueuedItem)>) -> T,
    ) -> T {
        let Some(id) = NodeId::of(tree, *range.start()).filter(|_| self.is_on) else {
            return T::default();
        };
        #[cfg(debug_assertions)]
        let _looking = crate::block::lock_order::NotedDelayedLock::begin();
        let shard = self.shard(id).read();
        let Some(node) = shard.get(&id) else { return T::default() };
        match &node.flushing {
            None => look(&mut node.active.range(range)),
            Some(flushing) => {
                let mut active = node.active.range(range.clone()).peekable();
                let mut flushing = flushing.range(range).peekable();
                look(&mut std::iter::from_fn(|| match (active.peek(), flushing.peek()) {
                    (Some((new, _)), Some((old, _))) if old < new => flushing.next(),
                    (Some((new, _)), Some((old, _))) if old == new => {
                        flushing.next();
                        active.next()
                    }
                    (Some(_), _) => active.next(),
                    (None, _) => flushing.next(),
                }))
            }
        }
    }
}
