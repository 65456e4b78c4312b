//! Extents that stay in their place of the order of a fork: other blocks take the place of a part
//! of one, one moves to another place of the file, or becomes two.
//!
//! Records are changed where they are, so a move, which adds none, never needs a block.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::record::XfsExtent;
use offshoot_xfs_format::{FileBlock, FsBlock, Ino};

use super::{ForkRecords, count, edit, end, joined, missing, part};
use crate::trans::{ForkName, XfsTransaction};

/// Maps `new` in the place of what one extent maps there: other blocks, or the same ones that
/// become written or unwritten. Returns what was mapped there, and the blocks that the tree has no
/// longer. Locks the inode, and the AGF if the tree grows.
pub(crate) fn replace_part(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    new: &XfsExtent,
) -> Result<(XfsExtent, Vec<FsBlock>)> {
    let mut replaced = None;
    let (change, tree_blocks) = edit(t, ino, fork, |records| {
        let found = records.at_most(new.offset)?;
        let old = found.filter(|old| end(old) >= end(new)).ok_or_else(|| missing(new))?;
        replaced = part(&old, new.offset.0, end(new));
        put(records, &old, new)
    })?;
    count(t, ino, fork, change, 0)?;
    Ok((replaced.ok_or_else(|| missing(new))?, tree_blocks))
}

/// Puts `new` in the place of a part of `old`, joined with what is beside it. Returns how many
/// records more there are.
fn put(records: &mut dyn ForkRecords, old: &XfsExtent, new: &XfsExtent) -> Result<i64> {
    let before = part(old, old.offset.0, new.offset.0);
    let after = part(old, end(new), end(old));
    let (mut left, mut right, mut whole) = (None, None, *new);
    if before.is_none() && old.offset.0 > 0 {
        left = records.at_most(FileBlock(old.offset.0 - 1))?;
        let with_left = left.and_then(|left| joined(&left, &whole));
        left = left.filter(|_| with_left.is_some());
        whole = with_left.unwrap_or(whole);
    }
    if after.is_none() {
        right = records.at_least(FileBlock(end(old)))?;
        let with_right = right.and_then(|right| joined(&whole, &right));
        right = right.filter(|_| with_right.is_some());
        whole = with_right.unwrap_or(whole);
    }
    let own = (left.is_none() && right.is_none()).then_some(whole);
    let rests: Vec<_> = before.into_iter().chain(own).chain(after).collect();
    // The old one becomes shorter before others become longer.
    records.replace(old, &rests)?;
    let change = i64::try_from(rests.len()).unwrap_or(0) - 1;
    match (left, right) {
        (Some(left), Some(right)) => {
            records.replace(&right, &[])?;
            records.replace(&left, &[whole])?;
            return Ok(change - 1);
        }
        (Some(beside), None) | (None, Some(beside)) => records.replace(&beside, &[whole])?,
        (None, None) => {}
    }
    Ok(change)
}

/// Moves an extent to another place of the file, with no extent between the two. It is joined with
/// the one in front of it. Returns the blocks that the tree has no longer.
pub(crate) fn move_extent(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    old: &XfsExtent,
    to: FileBlock,
) -> Result<Vec<FsBlock>> {
    let moved = XfsExtent { offset: to, ..*old };
    let (change, tree_blocks) = edit(t, ino, fork, |records| {
        let before = old.offset.0.checked_sub(1);
        let left = before.map_or(Ok(None), |before| records.at_most(FileBlock(before)))?;
        let right = records.at_least(FileBlock(end(old)))?;
        let is_mapped = left.is_some_and(|left| end(&left) > to.0)
            || right.is_some_and(|right| right.offset.0 < end(&moved));
        if is_mapped {
            let problem = format!("inode {ino}: {old:?} moves to {to}, and another one is there");
            return Err(Error::corrupt(Structure::ExtentRecord, problem));
        }
        match left.and_then(|left| Some((left, joined(&left, &moved)?))) {
            Some((left, whole)) => {
                records.replace(old, &[])?;
                records.replace(&left, &[whole]).map(|()| -1)
            }
            None => records.replace(old, &[moved]).map(|()| 0),
        }
    })?;
    count(t, ino, fork, change, 0)?;
    Ok(tree_blocks)
}

/// Makes two of the extent that has blocks in front of `at` and behind it, if there is one. Returns
/// the blocks that the tree has no longer. Locks the AGF if the tree grows.
pub(crate) fn split_extent(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    at: FileBlock,
) -> Result<Vec<FsBlock>> {
    let (change, tree_blocks) = edit(t, ino, fork, |records| {
        let found = records.at_most(at)?.filter(|old| end(old) > at.0 && old.offset < at);
        let Some(old) = found else { return Ok(0) };
        let parts = [part(&old, old.offset.0, at.0), part(&old, at.0, end(&old))];
        let parts: Vec<_> = parts.into_iter().flatten().collect();
        records.replace(&old, &parts).map(|()| 1)
    })?;
    count(t, ino, fork, change, 0)?;
    Ok(tree_blocks)
}
