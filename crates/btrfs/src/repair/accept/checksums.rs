//! The items of the checksum tree, and the changes of them.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::csum::Checksum;
use offshoot_btrfs_format::edit::leaf_capacity;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{Error, Result, Structure};

use super::small;
use crate::check::{CheckedVolume, KeyRange};
use crate::repair::editor::TreeEdits;
use crate::tree::TreeRoot;

/// Calls with an item, and the addresses that it covers.
type ChecksumVisitor<'v> = dyn FnMut(Key, &[u8], Range<u64>) + 'v;

/// The checksum tree of a volume.
pub(in crate::repair) struct StoredChecksums<'a, 'c> {
    volume: &'a CheckedVolume<'c>,
    pub(super) root: TreeRoot,
    sum_len: usize,
    sector: u64,
}

impl<'a, 'c> StoredChecksums<'a, 'c> {
    pub(in crate::repair) fn new(volume: &'a CheckedVolume<'c>, root: TreeRoot) -> Self {
        let sum_len = volume.superblock().checksum.len();
        Self { volume, root, sum_len, sector: volume.sector_size() }
    }

    fn key(at: u64) -> Key {
        Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at)
    }

    /// Calls `visit` with each item that has checksums of `range`, and the addresses that the item
    /// covers. Returns whether all of them could be read.
    fn each_item(&self, range: &Range<u64>, visit: &mut ChecksumVisitor<'_>) -> bool {
        let most = leaf_capacity(self.volume.superblock().node_size) / self.sum_len;
        let before = (most as u64).saturating_mul(self.sector);
        let keys = KeyRange {
            first: Self::key(range.start.saturating_sub(before)),
            last: Self::key(range.end.saturating_sub(1)),
        };
        let walked = self.volume.each_item(self.root, keys, &mut |key, data| {
            let len = (data.len() / self.sum_len) as u64 * self.sector;
            let covered = key.offset..key.offset.saturating_add(len);
            if covered.end > range.start {
                visit(key, data, covered);
            }
            ControlFlow::Continue(())
        });
        walked.is_whole()
    }

    /// The parts of `range` without checksums.
    ///
    /// # Errors
    /// When a block of the tree cannot be used, so that this is not known.
    pub(in crate::repair) fn missing(&self, range: &Range<u64>) -> Result<Vec<Range<u64>>> {
        let (mut missing, mut at) = (Vec::new(), range.start);
        let is_whole = self.each_item(range, &mut |_, _, covered| {
            if covered.start > at {
                missing.push(at..covered.start.min(range.end));
            }
            at = at.max(covered.end);
        });
        if !is_whole {
            let problem = "a block of the checksum tree cannot be used";
            return Err(Error::corrupt(Structure::TreeBlock, problem));
        }
        if at < range.end {
            missing.push(at..range.end);
        }
        Ok(missing)
    }

    /// The checksums of `range`, with `new` ones in place of those of the tree.
    pub(super) fn sums(&self, range: &Range<u64>, new: &BTreeMap<u64, Checksum>) -> Vec<u8> {
        let sectors = (range.end - range.start) / self.sector;
        let mut sums = vec![0; small(sectors) * self.sum_len];
        self.each_item(range, &mut |_, data, covered| {
            let (from, to) = (covered.start.max(range.start), covered.end.min(range.end));
            for at in (from..to).step_by(small(self.sector)) {
                let source = data.get(self.slot(at - covered.start));
                let target = sums.get_mut(self.slot(at - range.start));
                if let (Some(source), Some(target)) = (source, target) {
                    target.copy_from_slice(source);
                }
            }
        });
        self.overlay(&mut sums, range, new);
        sums
    }

    /// The place of a checksum among those that begin `offset` bytes before it.
    fn slot(&self, offset: u64) -> Range<usize> {
        let from = small(offset / self.sector).saturating_mul(self.sum_len);
        from..from.saturating_add(self.sum_len)
    }

    /// Puts `new` checksums in the place of those of the addresses in `covered`.
    fn overlay(&self, sums: &mut [u8], covered: &Range<u64>, new: &BTreeMap<u64, Checksum>) {
        for (at, sum) in new.range(covered.clone()) {
            if let Some(target) = sums.get_mut(self.slot(at - covered.start)) {
                target.copy_from_slice(sum.bytes());
            }
        }
    }

    /// The changes that put `new` checksums into the tree. `runs` are their sectors, joined.
    pub(super) fn edits(&self, runs: &[Range<u64>], new: &BTreeMap<u64, Checksum>) -> TreeEdits {
        let mut edits = TreeEdits::new();
        let most = leaf_capacity(self.volume.superblock().node_size) / 2 / self.sum_len;
        let most = (most as u64).saturating_mul(self.sector);
        for run in runs {
            let mut at = run.start;
            let mut bare = Vec::new();
            self.each_item(run, &mut |key, data, covered| {
                if covered.start > at {
                    bare.push(at..covered.start);
                }
                at = at.max(covered.end);
                edits.entry(key).or_insert_with(|| {
                    let mut data = data.to_vec();
                    self.overlay(&mut data, &covered, new);
                    Some(data)
                });
            });
            if at < run.end {
                bare.push(at..run.end);
            }
            for gap in bare {
                for start in (gap.start..gap.end).step_by(small(most)) {
                    let piece = start..start.saturating_add(most).min(gap.end);
                    let sums = small((piece.end - piece.start) / self.sector) * self.sum_len;
                    let mut data = vec![0; sums];
                    self.overlay(&mut data, &piece, new);
                    edits.insert(Self::key(start), Some(data));
                }
            }
        }
        edits
    }
}
