//! What the inodes of a subvolume say of themselves and of each other.
//!
//! The items of an inode follow each other in the tree, so most inodes lie in one leaf and are
//! judged there. The first and the last inode of a part of a tree may go on outside of it. They
//! stay in the summary of the part as they are, and are judged when a join shows that they are
//! complete:
//!
//! ```text
//! leaf 1            leaf 2                leaf 3
//! [256 257 258a]    [258b 259 260 261a]   [261b]
//!      judged             judged
//! [256 ......... 258 judged here .. 261a]              joined with leaf 3: 261 judged
//! ```
//!
//! What inodes say of each other is compared as sums. Each entry of a directory adds the hash of
//! the name that it gives to an inode, and each inode takes away the hashes of its names. So a
//! part that several snapshots share is looked at once. When the sum of a tree is not zero, a
//! second pass over that tree finds the names ([`names`]).

mod data;
mod items;
mod judge;
mod names;
mod verity;

use offshoot_btrfs_format::block::item_data;
use offshoot_btrfs_format::{Ino, ItemType, Key, TreeId, key};
use offshoot_vfs::Result;

use super::finding::{BtrfsFindingCode, BtrfsFindingPlace};
use super::volume::{CheckedVolume, KeyRange};
use super::walk::{GatheredRecords, Walk, WalkedTree};
use crate::block::TreeBlock;
use crate::tree::TreeRoot;
use items::CheckedInode;
use judge::{InodeFinding, InodeRules};

/// The most findings that the summary of a part keeps: one more than a check reports.
const MOST_FINDINGS: usize = super::finding::MOST_FINDINGS + 1;

/// What a part of a subvolume says, from a leaf to the whole tree.
#[derive(Clone, Debug, Default)]
pub(super) struct SubtreeSummary {
    /// The first inode of the part.
    first: Option<SummaryEdge>,
    /// The last inode, if there are two or more.
    last: Option<SummaryEdge>,
    has_gap: bool,
    /// The inodes that were closed.
    inodes: u64,
    /// The hashes of all entries less those of the names of closed inodes, each times its file
    /// type.
    names: u128,
    /// The hashes of closed inodes without links, less those of all orphan items.
    orphans: u128,
    findings: Vec<InodeFinding>,
}

/// What is at the beginning or the end of a part.
#[derive(Clone, Debug)]
enum SummaryEdge {
    /// An inode, which may go on outside of the part.
    Inode(Box<CheckedInode>),
    /// Something that cannot be read.
    Gap,
}

impl SubtreeSummary {
    /// A part of the tree that cannot be read.
    pub(super) fn gap() -> Self {
        Self { first: Some(SummaryEdge::Gap), has_gap: true, ..Self::default() }
    }

    /// About how much memory it takes, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let edge = size_of::<CheckedInode>() as u64;
        let findings = self.findings.iter().map(InodeFinding::bytes).sum::<u64>();
        size_of::<Self>() as u64 + 2 * edge + findings
    }

    /// Whether all of the part could be read.
    pub(super) fn is_whole(&self) -> bool {
        !self.has_gap
    }

    /// Adds `edge` behind the last one, as a part of the same inode if it is. Returns an inode that
    /// was closed.
    fn push(&mut self, rules: InodeRules, mut edge: SummaryEdge) -> Option<Box<CheckedInode>> {
        match (self.last.as_mut().or(self.first.as_mut()), &mut edge) {
            (Some(SummaryEdge::Gap), SummaryEdge::Gap) => return None,
            (Some(SummaryEdge::Gap), SummaryEdge::Inode(right)) => right.is_cut = true,
            (Some(SummaryEdge::Inode(left)), SummaryEdge::Gap) => left.is_cut = true,
            (Some(SummaryEdge::Inode(left)), SummaryEdge::Inode(right))
                if left.ino == right.ino =>
            {
                left.append(right);
                return None;
            }
            _ => {}
        }
        self.append(rules, edge)
    }

    /// Adds `edge` behind the last one. What is between the first and the last one is complete: it
    /// is closed and returned.
    fn append(&mut self, rules: InodeRules, edge: SummaryEdge) -> Option<Box<CheckedInode>> {
        if self.first.is_none() {
            self.first = Some(edge);
            return None;
        }
        let SummaryEdge::Inode(complete) = self.last.replace(edge)? else { return None };
        self.close(rules, &complete);
        Some(complete)
    }

    /// Takes an inode into the sums, and judges it.
    fn close(&mut self, rules: InodeRules, inode: &CheckedInode) {
        self.names = self.names.wrapping_sub(inode.weighted_names());
        if let Some(item) = &inode.item {
            self.inodes += 1;
            if item.links == 0 {
                self.orphans = self.orphans.wrapping_add(names::orphan_hash(inode.ino));
            }
        }
        if !inode.is_cut && self.findings.len() < MOST_FINDINGS {
            judge::judge(rules, inode, &mut self.findings);
        }
    }

    /// Adds what `right` has closed.
    fn add_closed(&mut self, right: &Self) {
        self.has_gap |= right.has_gap;
        self.inodes += right.inodes;
        self.names = self.names.wrapping_add(right.names);
        self.orphans = self.orphans.wrapping_add(right.orphans);
        let room = MOST_FINDINGS.saturating_sub(self.findings.len());
        self.findings.extend(right.findings.iter().take(room).cloned());
    }

    /// Joins the part that follows this one.
    fn join(&mut self, rules: InodeRules, right: &Self) {
        if let Some(first) = &right.first {
            self.push(rules, first.clone());
        }
        self.add_closed(right);
        if let Some(last) = &right.last {
            self.append(rules, last.clone());
        }
    }

    /// Whether the root directory may be there: it has the lowest number of all inodes.
    fn may_have_root(&self) -> bool {
        match &self.first {
            Some(SummaryEdge::Inode(first)) => first.ino == Ino::ROOT_DIR.0,
            Some(SummaryEdge::Gap) => true,
            None => false,
        }
    }

    /// Closes all inodes of a whole tree.
    fn close_all(&mut self, rules: InodeRules) {
        for edge in [self.first.take(), self.last.take()].into_iter().flatten() {
            if let SummaryEdge::Inode(inode) = edge {
                self.close(rules, &inode);
            }
        }
    }

    /// Takes the items of a leaf.
    fn add_items<'l>(&mut self, rules: InodeRules, items: impl Iterator<Item = (Key, &'l [u8])>) {
        let mut current: Option<Box<CheckedInode>> = None;
        for (key, data) in items {
            if !is_inode(key.objectid) {
                if key.objectid == key::objectid::ORPHAN && key.item_type == ItemType::ORPHAN_ITEM {
                    let hash = names::orphan_hash(key.offset);
                    self.orphans = self.orphans.wrapping_sub(hash);
                }
                continue;
            }
            if let Some(inode) = current.take_if(|inode| inode.ino != key.objectid) {
                // The memory of a closed inode serves for the next one.
                current = self.push(rules, SummaryEdge::Inode(inode));
                if let Some(inode) = &mut current {
                    **inode = CheckedInode::new(key.objectid);
                }
            }
            let inode = current.get_or_insert_with(|| Box::new(CheckedInode::new(key.objectid)));
            self.names = self.names.wrapping_add(inode.add(rules, key, data));
        }
        if let Some(inode) = current {
            self.push(rules, SummaryEdge::Inode(inode));
        }
    }
}

/// Whether an object of a subvolume is an inode that is judged. The inode that kept free inode
/// numbers in old volumes is none.
fn is_inode(objectid: u64) -> bool {
    (TreeId::FIRST_FREE.0..=TreeId::LAST_FREE.0).contains(&objectid)
}

/// The summary of a leaf. Adds its references to data to `records`, if there are any.
pub(super) fn leaf(
    walk: &Walk<'_, '_>,
    tree: &WalkedTree,
    leaf: &TreeBlock,
    records: Option<&mut GatheredRecords>,
) -> SubtreeSummary {
    let mut summary = SubtreeSummary::default();
    if let Some(records) = records {
        data::gather(walk, tree, leaf, records);
    }
    if tree.has_inodes {
        let items = leaf.items().iter();
        let items =
            items.filter_map(|item| Some((item.key.get(), item_data(leaf.bytes(), item).ok()?)));
        summary.add_items(InodeRules::of(walk.volume), items);
    }
    summary
}

/// The summary of two parts that follow each other in a tree.
pub(super) fn join(
    walk: &Walk<'_, '_>,
    _tree: &WalkedTree,
    mut left: SubtreeSummary,
    right: &SubtreeSummary,
) -> SubtreeSummary {
    left.join(InodeRules::of(walk.volume), right);
    left
}

/// Finishes a tree. Returns how many inodes it has.
///
/// # Errors
/// When a file for records cannot be written or read, or the caller has ended the check.
pub(super) fn finish(
    walk: &Walk<'_, '_>,
    tree: &WalkedTree,
    mut summary: SubtreeSummary,
) -> Result<u64> {
    let volume = walk.volume;
    if tree.root.id.is_subvolume() && !summary.may_have_root() {
        let place = BtrfsFindingPlace::Inode { subvolume: tree.root.id, ino: Ino::ROOT_DIR.0 };
        let problem = "the subvolume has no root directory";
        volume.findings.add(BtrfsFindingCode::MissingInode, place, problem);
    }
    summary.close_all(InodeRules::of(volume));
    for finding in summary.findings {
        report(volume, tree.root, finding);
    }
    if summary.names != 0 {
        names::compare(volume, tree.root)?;
    }
    if summary.orphans != 0 {
        names::find_lost_orphans(volume, tree.root)?;
    }
    Ok(summary.inodes)
}

/// Adds a finding to those of the check.
fn report(volume: &CheckedVolume<'_>, root: TreeRoot, finding: InodeFinding) {
    let InodeFinding { code, ino, problem, values, is_legal_for_orphans } = finding;
    if is_legal_for_orphans && orphan_item(volume, root, ino) != Some(false) {
        return;
    }
    let place = BtrfsFindingPlace::Inode { subvolume: root.id, ino };
    match values {
        Some((expected, found)) => {
            volume.findings.differs(code, place, problem, expected, found);
        }
        None => volume.findings.add(code, place, problem),
    }
}

/// Whether a tree lists an inode for removal; `None` when that cannot be read.
fn orphan_item(volume: &CheckedVolume<'_>, root: TreeRoot, ino: u64) -> Option<bool> {
    let key = Key::new(key::objectid::ORPHAN, ItemType::ORPHAN_ITEM, ino);
    let mut is_there = false;
    let walked = volume.each_item(root, KeyRange { first: key, last: key }, &mut |_, _| {
        is_there = true;
        std::ops::ControlFlow::Break(())
    });
    (is_there || walked.is_whole()).then_some(is_there)
}

#[cfg(test)]
mod tests;
