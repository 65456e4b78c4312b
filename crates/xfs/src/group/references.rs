//! The reference counts of a group: which blocks several files share, and which are staged for copy
//! on write.
//!
//! A block without a record has one reference, if it has an owner. Blocks beside each other with
//! the same count are one record.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::btree::{XfsSearchKey, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::log::items::XfsCountOp;
use offshoot_xfs_format::record::{STAGED, XfsSharedExtent};
use offshoot_xfs_format::{AgBlock, AgNumber};

use super::{free_list, tree};
use crate::trans::{AgExtent, XfsTransaction};

/// The records that one step changes at most. A transaction has log space for the blocks of trees
/// that so many lie in.
const STEP_RECORDS: usize = 8;

/// The records that a search for shared blocks joins at most.
const MOST_JOINED: usize = 64;

/// What one step of a change has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReferenceStep {
    /// The blocks that are done, from the front.
    pub(crate) done: u32,
    /// Those that have no owner any more. The caller frees them.
    pub(crate) freed: Vec<AgExtent>,
}

/// Blocks with a count. `start` has [`STAGED`] for staged ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CountedRun {
    start: u32,
    count: u32,
    references: u32,
}

impl CountedRun {
    fn of(record: &XfsSharedExtent) -> Self {
        let (start, count) = (record.start.get(), record.count.get());
        Self { start, count, references: record.references.get() }
    }

    fn end(&self) -> u32 {
        self.start.saturating_add(self.count)
    }

    fn part(&self, start: u32, end: u32) -> Self {
        let (start, end) = (self.start.max(start), self.end().min(end));
        Self { start, count: end.saturating_sub(start), ..*self }
    }

    fn record(&self) -> XfsSharedExtent {
        XfsSharedExtent {
            start: self.start.into(),
            count: self.count.into(),
            references: self.references.into(),
        }
    }

    fn key(&self) -> XfsSearchKey {
        XfsSearchKey([self.start.into(), 0, 0])
    }

    /// Whether the tree has no record of such blocks.
    fn is_plain(&self) -> bool {
        self.count == 0 || self.references < if self.start & STAGED != 0 { 1 } else { 2 }
    }
}

/// Changes the references of the blocks of an extent, from its front on, as an intent asks for. It
/// may stop early: the caller goes on with the rest in its next transaction. Locks the AGF.
pub(crate) fn change_references(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    extent: AgExtent,
    op: XfsCountOp,
) -> Result<ReferenceStep> {
    if !t.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
        let problem = format!("group {ag}: the volume has no reference counts");
        return Err(Error::corrupt(Structure::CountRecord, problem));
    }
    free_list::prepare(t, ag)?;
    let is_staging = matches!(op, XfsCountOp::Stage | XfsCountOp::Unstage);
    let mark = if is_staging { STAGED } else { 0 };
    let (first, last) = (extent.start.0 | mark, extent.end() | mark);
    let (runs, end) = runs(t, ag, first, last)?;
    let mut step = ReferenceStep { done: end - first, freed: Vec::new() };
    let mut changed = Vec::new();
    for run in with_gaps(&runs, first, end, u32::from(!is_staging)) {
        let inside = run.part(first, end);
        if inside.count == 0 {
            changed.push(run);
            continue;
        }
        let references = counted(ag, op, &inside)?;
        if !is_staging && references == 0 {
            step.freed.push(AgExtent::new(inside.start, inside.count));
        }
        if op == XfsCountOp::Decrease && references == 1 {
            // The last file may write to them in place now.
            let start = t.geometry().fs_block(ag, AgBlock(inside.start));
            t.give_up((start, inside.count));
        }
        changed.extend([
            run.part(run.start, first),
            CountedRun { references, ..inside },
            run.part(end, run.end()),
        ]);
    }
    replace(t, ag, &runs, &joined(&changed))?;
    Ok(step)
}

/// The count of blocks behind a change.
fn counted(ag: AgNumber, op: XfsCountOp, run: &CountedRun) -> Result<u32> {
    let references = run.references;
    let result = match op {
        // The most references are pinned there.
        XfsCountOp::Increase => Some(references.saturating_add(1)),
        XfsCountOp::Decrease if references == u32::MAX => Some(references),
        XfsCountOp::Decrease => references.checked_sub(1),
        XfsCountOp::Stage => (references == 0).then_some(1),
        XfsCountOp::Unstage => (references == 1).then_some(0),
    };
    result.ok_or_else(|| {
        let problem = format!("group {ag}: {op:?} of {run:?}");
        Error::corrupt(Structure::CountRecord, problem)
    })
}

/// The records with a block from `first` to `last`, and those beside them, ascending; and the end
/// of the blocks that one step does.
fn runs(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    first: u32,
    last: u32,
) -> Result<(Vec<CountedRun>, u32)> {
    tree::edit(t, ag, XfsTree::ReferenceCounts, |tree| {
        let key = XfsSearchKey([first.into(), 0, 0]);
        let mut found = Vec::new();
        // Not the record at `first`: the one in front of it may have to be joined.
        let before = XfsSearchKey([u64::from(first).saturating_sub(1), 0, 0]);
        let mut next = tree.at_most::<XfsSharedExtent>(before)?;
        if next.is_none_or(|record| CountedRun::of(&record).end() < first) {
            next = tree.at_least::<XfsSharedExtent>(key)?;
        }
        while let Some(record) = next {
            let run = CountedRun::of(&record);
            if run.start > last || (run.start ^ first) & STAGED != 0 {
                break;
            }
            // What lies in front of the next record is one step. The record behind the last block
            // is no part of it, but may have to be joined.
            if found.len() >= STEP_RECORDS && run.start < last {
                return Ok((found, run.start));
            }
            found.push(run);
            next = tree.next()?;
        }
        Ok((found, last))
    })
}

/// The runs and what lies between them from `first` to `end`, which has `plain` references.
fn with_gaps(runs: &[CountedRun], first: u32, end: u32, plain: u32) -> Vec<CountedRun> {
    let (mut all, mut at) = (Vec::new(), first);
    let gap = |start: u32, end: u32| CountedRun { start, count: end - start, references: plain };
    for run in runs {
        if run.start > at {
            all.push(gap(at, run.start.min(end)));
        }
        all.push(*run);
        at = at.max(run.end());
    }
    if at < end {
        all.push(gap(at, end));
    }
    all
}

/// The runs that need a record, with those beside each other joined.
fn joined(runs: &[CountedRun]) -> Vec<CountedRun> {
    let mut all: Vec<CountedRun> = Vec::new();
    for run in runs.iter().filter(|run| !run.is_plain()) {
        match all.last_mut() {
            Some(last) if last.end() == run.start && last.references == run.references => {
                last.count += run.count;
            }
            _ => all.push(*run),
        }
    }
    all
}

/// Replaces records by others.
fn replace(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    old: &[CountedRun],
    new: &[CountedRun],
) -> Result<()> {
    tree::edit(t, ag, XfsTree::ReferenceCounts, |tree| {
        for run in old.iter().filter(|run| !new.contains(run)) {
            tree::must_find::<XfsSharedExtent>(tree, run.key())?;
            tree.remove()?;
        }
        let added = new.iter().filter(|run| !old.contains(run));
        added.map(CountedRun::record).try_for_each(|record| tree.insert(&record))
    })
}

/// The extents of a group that are staged for copy on write, at most `most`.
pub(crate) fn staged(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    most: usize,
) -> Result<Vec<AgExtent>> {
    if !t.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
        return Ok(Vec::new());
    }
    tree::edit(t, ag, XfsTree::ReferenceCounts, |tree| {
        let mut found = Vec::new();
        let mut next = tree.at_least::<XfsSharedExtent>(XfsSearchKey([STAGED.into(), 0, 0]))?;
        while let Some(record) = next
            && found.len() < most
        {
            found.push(AgExtent { start: record.block(), count: record.count.get() });
            next = tree.next()?;
        }
        Ok(found)
    })
}

/// The first blocks in a row of an extent that several files have. More of them may follow at once:
/// no more than [`MOST_JOINED`] records are looked at. Locks the AGF.
pub(crate) fn shared_part(
    t: &mut XfsTransaction<'_>,
    ag: AgNumber,
    extent: AgExtent,
) -> Result<Option<AgExtent>> {
    if !t.geometry().layout.contains(XfsLayout::SHARED_BLOCKS) {
        return Ok(None);
    }
    let (first, last) = (extent.start.0, extent.end());
    tree::edit(t, ag, XfsTree::ReferenceCounts, |tree| {
        let key = XfsSearchKey([first.into(), 0, 0]);
        let mut next = tree.at_most::<XfsSharedExtent>(key)?;
        if next.is_none_or(|record| CountedRun::of(&record).end() <= first) {
            next = tree.at_least::<XfsSharedExtent>(key)?;
        }
        let mut found: Option<CountedRun> = None;
        for _ in 0..MOST_JOINED {
            // Staged blocks have numbers above all others.
            let Some(run) = next.map(|record| CountedRun::of(&record).part(first, last)) else {
                break;
            };
            match &mut found {
                _ if run.count == 0 => break,
                None => found = Some(run),
                Some(found) if found.end() == run.start => found.count += run.count,
                Some(_) => break,
            }
            next = tree.next()?;
        }
        Ok(found.map(|run| AgExtent::new(run.start, run.count)))
    })
}
