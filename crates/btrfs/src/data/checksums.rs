//! Finding and storing the checksums of data.
//!
//! The checksum tree has items for runs of sectors that have checksums. The offset in the key is
//! the address of the first sector.

use std::ops::Range;

use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::edit::leaf_capacity;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_kit::cores;
use offshoot_kit::workers::WorkerTask;
use offshoot_vfs::{Error, Result, Structure};

use super::index;
use super::store::Sectors;
use crate::space::Kept;
use crate::transaction::{Base, TransactionHandle, remove_checksums_beside_writers};
use crate::tree::{Cursor, TreeRoot};

/// The checksums of all sectors of `len` bytes from `logical` on, concatenated.
///
/// # Errors
/// When a sector has no checksum, because its data cannot be verified then.
pub(super) fn checksums(volume: &Base, logical: Logical, len: u64) -> Result<Vec<u8>> {
    let superblock = volume.superblock();
    let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
    let end = logical.0.saturating_add(len);
    let none = |at: u64| Error::corrupt_at(Structure::Data, at, "it has no checksum");
    let root = volume.csum_tree().ok_or_else(|| none(logical.0))?;
    let _whole = volume.live_part().map(|live| live.checksums.read());
    let key = |at| Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at);
    let mut cursor = Cursor::seek_floor(volume, root, key(logical.0))?;
    if cursor.item().is_some_and(|(at, _)| at < key(0)) {
        cursor.advance()?;
    }
    let mut sums = Vec::new();
    let mut at = logical.0;
    while at < end {
        let Some((found, data)) = cursor.item_of(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM)
        else {
            return Err(none(at));
        };
        if found.offset > at {
            return Err(none(at));
        }
        let skip = usize::try_from((at - found.offset) / sector).unwrap_or(usize::MAX);
        let rest = data.get(skip.saturating_mul(sum_len)..).unwrap_or_default();
        let wanted = usize::try_from((end - at) / sector).unwrap_or(usize::MAX) * sum_len;
        let taken = &rest[..rest.len().min(wanted)];
        sums.extend_from_slice(taken);
        at += (taken.len() / sum_len) as u64 * sector;
        if at < end {
            cursor.advance()?;
        }
    }
    Ok(sums)
}

/// The existing checksums of the data in `range`, one entry for each item: the address of its first
/// sector, and the checksums.
pub(crate) fn stored_sums(volume: &Base, range: &Range<u64>) -> Result<Vec<(u64, Vec<u8>)>> {
    let Some(root) = volume.csum_tree() else { return Ok(Vec::new()) };
    let _whole = volume.live_part().map(|live| live.checksums.read());
    sums_from(volume, Cursor::seek_floor(volume, root, csum_key(range.start))?, range)
}

/// As [`stored_sums`], in the committed checksum tree `root`. The caller keeps the blocks of that
/// commit from being freed.
pub(crate) fn committed_sums(
    volume: &Base,
    root: TreeRoot,
    range: &Range<u64>,
) -> Result<Vec<(u64, Vec<u8>)>> {
    let cursor = Cursor::seek_committed_floor(volume, root, csum_key(range.start))?;
    sums_from(volume, cursor, range)
}

fn csum_key(at: u64) -> Key {
    Key::new(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM, at)
}

/// The checksums of `range` in the items from the cursor on.
fn sums_from(
    volume: &Base,
    mut cursor: Cursor<'_>,
    range: &Range<u64>,
) -> Result<Vec<(u64, Vec<u8>)>> {
    let superblock = volume.superblock();
    let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
    let bytes = |len: u64| usize::try_from(len / sector).expect("within an item") * sum_len;
    let mut found = Vec::new();
    while let Some((at, data)) = cursor.item().filter(|(at, _)| *at < csum_key(range.end)) {
        let covers = at.offset..at.offset + (data.len() / sum_len) as u64 * sector;
        let (from, to) = (covers.start.max(range.start), covers.end.min(range.end));
        if at >= csum_key(0) && from < to {
            found.push((from, data[bytes(from - covers.start)..bytes(to - covers.start)].to_vec()));
        }
        cursor.advance()?;
    }
    Ok(found)
}

/// Whether any sector of the `len` bytes from `logical` on has a checksum.
pub(crate) fn has_checksums(volume: &Base, logical: Logical, len: u64) -> Result<bool> {
    Ok(last_item(volume, logical, len)?.is_some_and(|item| item.end > logical.0))
}

/// Removes stale checksums of `len` bytes from `logical` on, which were free until now. Only a
/// damaged volume has such checksums, and `btrfs check` reports them if the data is to have none.
pub(super) fn remove_stale_checksums(
    handle: &TransactionHandle<'_>,
    logical: Logical,
    len: u64,
) -> Result<()> {
    let unchanging = handle.checksums_unchanging();
    let are_there = has_checksums(handle.volume(), logical, len)?;
    drop(unchanging);
    if are_there { remove_checksums_beside_writers(handle, logical, len) } else { Ok(()) }
}

/// Takes space for at most `wanted` bytes of data under `claim`, as `Space::take_data` does: no
/// more than the handle has room for to remove stale checksums of it.
pub(crate) fn take_until_next_leaf(
    handle: &TransactionHandle<'_>,
    claim: &Kept,
    wanted: u64,
) -> Result<(Logical, u64)> {
    let base = handle.volume();
    let (logical, taken) = handle.space().take_data(base, claim, wanted)?;
    let len = until_next_leaf_of_stale(base, logical, taken);
    let rest = taken - len.as_ref().unwrap_or(&0);
    if rest > 0 {
        handle.space().give_back(Logical(logical.0 + taken - rest), rest)?;
    }
    Ok((logical, len?))
}

/// The length of the beginning of `len` bytes from `logical` on whose stale checksums are all in
/// one leaf. A step that reserves for one leaf of checksums can remove these.
pub(crate) fn until_next_leaf_of_stale(volume: &Base, logical: Logical, len: u64) -> Result<u64> {
    let Some(root) = volume.csum_tree() else { return Ok(len) };
    if len <= u64::from(volume.superblock().sector_size) {
        // All checksums of one sector are in one item.
        return Ok(len);
    }
    let _whole = volume.live_part().map(|live| live.checksums.read());
    if !has_checksums(volume, logical, len)? {
        return Ok(len);
    }
    let mut cursor = Cursor::seek_floor(volume, root, csum_key(logical.0))?;
    let leaf = cursor.leaf();
    while cursor.leaf() == leaf && cursor.item().is_some() {
        cursor.advance()?;
    }
    let next = cursor.item().filter(|(next, _)| *next < csum_key(logical.0 + len));
    Ok(next.map_or(len, |(next, _)| next.offset - logical.0))
}

/// The most items that the checksums of `len` bytes fill, beside one that they continue.
pub(crate) fn checksum_items(volume: &Base, len: u64) -> u64 {
    len.div_ceil(bytes_with_checksums(volume, 1))
}

/// The bytes of data whose checksums fit into so many items.
pub(crate) fn bytes_with_checksums(volume: &Base, items: u64) -> u64 {
    let superblock = volume.superblock();
    let sum_len = superblock.checksum.len();
    let most = most_per_item(superblock.node_size, sum_len) / sum_len;
    items * most as u64 * u64::from(superblock.sector_size)
}

/// Stores the checksums of `data`, which was written at `logical`.
pub(crate) fn insert_checksums(
    handle: &TransactionHandle<'_>,
    logical: Logical,
    data: Sectors<'_>,
) -> Result<()> {
    let superblock = handle.volume().superblock();
    insert_sums(handle, logical, &sums_of(superblock.checksum, superblock.sector_size, data))
}

/// The bytes of data that one thread computes checksums of: so many that this takes much longer
/// than to hand them over to another thread.
fn bytes_at_once(checksum: ChecksumType) -> u64 {
    match checksum {
        ChecksumType::Crc32c | ChecksumType::Xxhash64 => 512 << 10,
        ChecksumType::Sha256 | ChecksumType::Blake2b => 128 << 10,
    }
}

/// The checksums of the sectors of `data`, concatenated. Those of much data are computed by this
/// thread and the worker threads together.
fn sums_of(checksum: ChecksumType, sector: u32, data: Sectors<'_>) -> Vec<u8> {
    let at_once = bytes_at_once(checksum);
    let sums = move |data: Sectors<'_>, part: Range<u64>| {
        let mut sums = Vec::new();
        for sector in data.slices(part).flat_map(|slice| slice.chunks(sector as usize)) {
            sums.extend_from_slice(checksum.compute(sector).bytes());
        }
        sums
    };
    if data.len <= at_once || cores::count() == 1 {
        return sums(data, 0..data.len);
    }
    let end = data.range().end;
    let starts = (data.start..end).step_by(index(at_once));
    let tasks: Vec<_> = starts
        .map(|start| {
            let part = start..end.min(start + at_once);
            let runs = data.runs_of(&part);
            WorkerTask::start(move || {
                let data = Sectors::new(&runs);
                sums(data, part.start - data.start..part.end - data.start)
            })
        })
        .collect();
    tasks.into_iter().flat_map(WorkerTask::finish).collect()
}

/// Stores `sums`, the checksums of consecutive sectors from `logical` on. Existing checksums of
/// these sectors are replaced; a damaged volume has some even of free space.
pub(crate) fn insert_sums(
    handle: &TransactionHandle<'_>,
    logical: Logical,
    sums: &[u8],
) -> Result<()> {
    let superblock = handle.volume().superblock();
    let (sector, sum_len) = (superblock.sector_size as usize, superblock.checksum.len());
    let most = most_per_item(superblock.node_size, sum_len);
    let len = (sums.len() / sum_len * sector) as u64;
    // While we hold this lock, no other writer removes stale checksums, which could take away the
    // item that we extend, or put one in our way.
    let mut unchanging = handle.checksums_unchanging();
    let mut before = last_item(handle.volume(), logical, len)?;
    if before.as_ref().is_some_and(|item| item.end > logical.0) {
        drop(unchanging);
        remove_checksums_beside_writers(handle, logical, len)?;
        unchanging = handle.checksums_unchanging();
        before = last_item(handle.volume(), logical, len)?;
    }
    let mut at = logical.0;
    let mut rest = sums;
    // The first checksums extend the previous item, as long as it has room.
    if let Some(item) = before.filter(|item| item.end == logical.0) {
        let joined = rest.len().min(most.saturating_sub(item.size));
        let (part, behind) = rest.split_at(joined);
        handle.change(TreeId::CSUM, |tree| {
            tree.modify(item.key, joined, |old| Ok([old.unwrap_or_default(), part].concat()))
        })?;
        at += (joined / sum_len * sector) as u64;
        rest = behind;
    }
    let items: Vec<_> = rest
        .chunks(most)
        .map(|part| {
            let item = (csum_key(at), part);
            at += (part.len() / sum_len * sector) as u64;
            item
        })
        .collect();
    handle.change(TreeId::CSUM, |tree| tree.insert_batch(&items))?;
    drop(unchanging);
    Ok(())
}

/// The most bytes of checksums that one item holds: it stays within a quarter of a leaf, so that
/// items move between leaves easily.
fn most_per_item(node_size: u32, sum_len: usize) -> usize {
    leaf_capacity(node_size) / 4 / sum_len * sum_len
}

/// An item of the checksum tree.
struct SumsItem {
    key: Key,
    /// The bytes of checksums in the item.
    size: usize,
    /// The end of the last sector with a checksum in the item.
    end: u64,
}

/// The last item that begins before the end of `len` bytes from `logical` on.
fn last_item(volume: &Base, logical: Logical, len: u64) -> Result<Option<SumsItem>> {
    let Some(root) = volume.csum_tree() else { return Ok(None) };
    let superblock = volume.superblock();
    let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
    let last = csum_key(logical.0.saturating_add(len).saturating_sub(1));
    let cursor = Cursor::seek_floor(volume, root, last)?;
    Ok(cursor.item_of(objectid::EXTENT_CSUM, ItemType::EXTENT_CSUM).and_then(|(key, data)| {
        let end = key.offset.saturating_add((data.len() / sum_len) as u64 * sector);
        // If no item begins before `last`, the cursor is on the first item behind it.
        (key <= last).then_some(SumsItem { key, size: data.len(), end })
    }))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use offshoot_testkit::random::{Random, seed_of_run};

    use super::*;
    use crate::data::AlignedBytes;

    /// Checksums are the same however many threads compute them, and wherever the runs end.
    #[test]
    fn threads_compute_the_same_checksums_as_one() {
        const SECTOR: u32 = 4096;
        let mut random = Random::new(seed_of_run());
        let types = [
            ChecksumType::Crc32c,
            ChecksumType::Xxhash64,
            ChecksumType::Sha256,
            ChecksumType::Blake2b,
        ];
        for checksum in types {
            for _ in 0..10 {
                let mut at = 4096 * random.below(1000);
                let runs: Vec<_> = (0..=random.below(8))
                    .map(|_| {
                        let len = 4096 * (1 + random.below(100));
                        let run = (at, Arc::new(AlignedBytes::of(&[&random.bytes(index(len))])));
                        at += len;
                        run
                    })
                    .collect();
                let whole = Sectors::new(&runs);
                let data = whole.first(4096 * (1 + random.below(whole.len / 4096)));
                let bytes = data.contents(&data.range());
                let sums = bytes.chunks(SECTOR as usize).map(|sector| checksum.compute(sector));
                let expected: Vec<_> = sums.flat_map(|sum| sum.bytes().to_vec()).collect();
                assert_eq!(sums_of(checksum, SECTOR, data), expected, "{checksum:?}");
            }
        }
    }
}
