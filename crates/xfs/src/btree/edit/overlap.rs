//! The records that have something in common with a range, also where records overlap.

use std::ops::ControlFlow;

use offshoot_vfs::Result;
use offshoot_xfs_format::btree::XfsSearchKey;
use offshoot_xfs_format::record::XfsTreeRecord;
use offshoot_xfs_format::{AgBlock, FsBlock};

use super::super::prove_child;
use super::{XfsEditRoot, XfsTreeEdit};

/// A block that is still to be searched, and what its parent says about it.
struct SearchedBlock {
    at: FsBlock,
    level: u32,
    first: Option<XfsSearchKey>,
    end: Option<XfsSearchKey>,
}

impl XfsTreeEdit<'_> {
    /// Calls `visit` for the records of a tree of a group that have a block from `first` to `last`,
    /// in order, until it breaks. The cursor is nowhere after that.
    ///
    /// In the reverse map the high keys lead past the blocks that have none of them.
    pub(crate) fn overlapping<R: XfsTreeRecord>(
        &mut self,
        (first, last): (AgBlock, AgBlock),
        visit: &mut dyn FnMut(&R) -> ControlFlow<()>,
    ) -> Result<()> {
        self.path.clear();
        let XfsEditRoot::Group { ag, block, levels, .. } = self.root else {
            return Err(self.broken("a search for blocks of a group"));
        };
        let (first, last) = (u64::from(first.0), u64::from(last.0));
        let at = self.geometry.fs_block(ag, block);
        let level = levels.saturating_sub(1);
        let mut stack = vec![SearchedBlock { at, level, first: None, end: None }];
        while let Some(SearchedBlock { at, level, first: lowest, end }) = stack.pop() {
            let block = self.view(at)?;
            let proof = prove_child(&block, level, lowest, end);
            let found: Vec<_> = (0..block.len())
                .filter(|&index| block.key(index).is_some_and(|key| key.0[0] <= last))
                .filter(|&index| block.high_key(index).is_none_or(|high| high.0[0] >= first))
                .map(|index| (index, block.key(index), block.key(index + 1).or(end)))
                .collect();
            let records: Vec<_> = found
                .iter()
                .filter_map(|&(index, ..)| block.records::<R>().get(index).copied())
                .collect();
            let below: Vec<_> = found
                .iter()
                .filter_map(|&(index, first, end)| Some((block.pointer(index)?, first, end)))
                .collect();
            proof.map_err(|problem| self.damaged(at, problem))?;
            if records.iter().any(|record| visit(record).is_break()) {
                return Ok(());
            }
            for (pointer, first, end) in below.into_iter().rev() {
                let (at, level) = (self.block_of(Some(pointer)), level.saturating_sub(1));
                stack.push(SearchedBlock { at, level, first, end });
            }
        }
        Ok(())
    }
}
