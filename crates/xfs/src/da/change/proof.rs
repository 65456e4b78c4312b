//! What a change proves of the blocks of a tree of hashes before it goes by them.
//!
//! A block from the device was proved by itself: its checksum, its owner, its place, the order of
//! its hashes. A hostile volume has such blocks in wrong places. So each block that a change comes
//! to has to be a node or a leaf of its level, and of two neighbours each has to name the other and
//! has its hashes on the right side. Nothing was changed when that fails; the transaction is
//! dropped, and other files are written on.
//!
//! What an edit makes of a block may still be wrong, because the block or another one lied about
//! its contents: then [`ChangedHashFork::require_proof`] finds it at the commit, with the same
//! outcome. A mistake that only the push finds ends all writing.
//!
//! Levels fall on the way down, so no way is endless. A walk along leaves that name each other can
//! only come back to its first leaf, where [`ChangedHashFork::next`] notices it.

use offshoot_vfs::Result;
use offshoot_xfs_format::dir::{free_start, leaf_start};
use offshoot_xfs_format::{BasicBlock, FileBlock};

use super::ChangedHashFork;

/// A node or a leaf that was proved.
#[derive(Clone, Debug)]
pub(super) struct ProvedHashBlock {
    pub(super) at: FileBlock,
    /// 0 for a leaf.
    pub(super) level: u16,
    /// The blocks that it names as its neighbours: the next one, and the one before.
    pub(super) links: (u32, u32),
    /// Its first hash and its last one.
    pub(super) hashes: Option<(u32, u32)>,
    /// Where the transaction has it.
    pub(super) place: BasicBlock,
}

/// On which side of a block a neighbour is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HashSide {
    Next,
    Before,
}

impl ProvedHashBlock {
    fn link(&self, side: HashSide) -> u32 {
        match side {
            HashSide::Next => self.links.0,
            HashSide::Before => self.links.1,
        }
    }

    /// Whether no hash is above the first one of `next`.
    fn is_in_front_of(&self, next: &Self) -> bool {
        let both = self.hashes.zip(next.hashes);
        both.is_none_or(|((_, last), (first, _))| last <= first)
    }
}

impl ChangedHashFork<'_, '_> {
    /// The block at `at`, to which the tree leads: a node or a leaf in a place for these.
    pub(super) fn hash_block(&mut self, at: FileBlock) -> Result<ProvedHashBlock> {
        let geometry = self.geometry();
        let range = if self.is_directory {
            leaf_start(geometry).0..free_start(geometry).0
        } else {
            0..u64::from(u32::MAX)
        };
        if !range.contains(&at.0) || !at.0.is_multiple_of(self.unit().into()) {
            return Err(self.damaged(format!("block {at} is no place for a node or a leaf")));
        }
        let place = self.hold(at)?;
        let bytes = self.bytes(place)?;
        let (level, info, hashes) = if let Some(node) = self.node(bytes)? {
            let ends = node.entries.first().zip(node.entries.last());
            let hashes = ends.map(|(first, last)| (first.hash.get(), last.hash.get()));
            (node.level, node.info, hashes)
        } else {
            let leaf = self.leaf_view(bytes);
            let leaf =
                leaf.map_err(|_| self.damaged(format!("block {at} is neither a node nor a leaf")))?;
            (0, leaf.info(), leaf.ends())
        };
        let links = (info.forw.get(), info.back.get());
        Ok(ProvedHashBlock { at, level, links, hashes, place })
    }

    /// The same on a level below the root. A leaf there is one of several.
    pub(super) fn hash_block_on(&mut self, at: FileBlock, level: u16) -> Result<ProvedHashBlock> {
        let block = self.hash_block(at)?;
        let is_right = match block.level {
            0 => self.kind(self.bytes(block.place)?) == Some(self.leaf_kind()),
            level => level > 0,
        };
        if block.level != level || !is_right {
            return Err(self.damaged(format!("block {at} is not on its level")));
        }
        Ok(block)
    }

    /// The neighbour of a block, which names the block too; `None` when there is none.
    pub(super) fn neighbour(
        &mut self,
        of: &ProvedHashBlock,
        side: HashSide,
    ) -> Result<Option<ProvedHashBlock>> {
        let at = match of.link(side) {
            0 => return Ok(None),
            at => FileBlock(at.into()),
        };
        let beside = self.hash_block_on(at, of.level)?;
        let (back, is_ordered) = match side {
            HashSide::Next => (HashSide::Before, of.is_in_front_of(&beside)),
            HashSide::Before => (HashSide::Next, beside.is_in_front_of(of)),
        };
        if at == of.at || u64::from(beside.link(back)) != of.at.0 {
            let problem = format!("block {at} is beside block {}, and does not name it", of.at);
            return Err(self.damaged(problem));
        }
        if !is_ordered {
            let problem = format!("block {at} has hashes that belong in front of or behind it");
            return Err(self.damaged(problem));
        }
        Ok(Some(beside))
    }

    /// Both neighbours of a block.
    pub(super) fn neighbours(
        &mut self,
        of: &ProvedHashBlock,
    ) -> Result<[Option<ProvedHashBlock>; 2]> {
        let next = self.neighbour(of, HashSide::Next)?;
        let before = self.neighbour(of, HashSide::Before)?;
        if let (Some(next), Some(before)) = (&next, &before)
            && next.at == before.at
        {
            return Err(self.damaged(format!("block {} is on both sides of another", next.at)));
        }
        Ok([next, before])
    }

    /// Proves that a block, the root or its only child, is alone on its level.
    pub(super) fn prove_alone(&self, block: &ProvedHashBlock) -> Result<()> {
        if block.links == (0, 0) {
            return Ok(());
        }
        Err(self.damaged(format!("block {} is alone on its level, and has neighbours", block.at)))
    }

    /// Proves that all hashes of a child lie between those that its node has for the child before
    /// and for this one.
    pub(super) fn prove_range(
        &self,
        child: &ProvedHashBlock,
        (before, last): (Option<u32>, u32),
    ) -> Result<()> {
        let is_in =
            |(first, end): (u32, u32)| end <= last && before.is_none_or(|before| before <= first);
        if child.hashes.is_none_or(is_in) {
            return Ok(());
        }
        let problem = format!("block {} has hashes outside of those of its node", child.at);
        Err(self.damaged(problem))
    }
}
