//! Groups: headers, free space, chunks of inodes, and what their own structures occupy.

use offshoot_kit::sync::Mutex;
use offshoot_vfs::{Malformed, Result, Structure};
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsTree};
use offshoot_xfs_format::features::XfsRoCompat;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agfl, Agi};
use offshoot_xfs_format::record::{
    CHUNK_INODES, XfsFreeExtent, XfsInodeChunk, XfsOwner, XfsReverseMap, XfsSharedExtent,
    XfsTreeRecord,
};
use offshoot_xfs_format::{AgBlock, AgNumber, U32, XfsGeometry};

use super::finding::XfsFindingCode as Code;
use super::space::{OwnedRun, SharedRun};
use super::whole::VolumeCheck;
use crate::btree::XfsTreeRoot;
use crate::buffer::BufferRole;
use crate::group;

/// The counters of a group, or their sum over groups, as the superblock has them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct GroupCounts {
    pub(super) inodes: u64,
    pub(super) free_inodes: u64,
    pub(super) free_blocks: u64,
}

/// The counters of all groups whose trees were read so far.
pub(super) struct SummedCounts(Mutex<Option<GroupCounts>>);

impl SummedCounts {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Some(GroupCounts::default())))
    }

    /// Adds the counters of a part of a group; with `None` the sum is not known any more.
    pub(super) fn add(&self, counts: Option<&GroupCounts>) {
        let mut sum = self.0.lock();
        *sum = sum.zip(counts).map(|(sum, counts)| sum.with(counts));
    }

    /// The sum, if all parts are known.
    pub(super) fn into_sum(self) -> Option<GroupCounts> {
        self.0.into_inner()
    }
}

/// The headers of a group.
pub(super) struct GroupHeaders {
    pub(super) agf: Agf,
    pub(super) agi: Agi,
    list: Agfl,
}

/// The records of a tree, and what its blocks are.
struct TreeRecords<R> {
    records: Vec<R>,
    /// The blocks, ascending in the order of the walk.
    blocks: Vec<u32>,
    is_whole: bool,
}

impl<R> TreeRecords<R> {
    const NONE: Self = Self { records: Vec::new(), blocks: Vec::new(), is_whole: true };

    /// The blocks besides the root.
    fn below_root(&self) -> usize {
        self.blocks.len().saturating_sub(1)
    }
}

/// What the structures of a group say about its blocks.
pub(super) struct GroupSpace {
    /// The free extents, ascending.
    pub(super) free: Vec<XfsFreeExtent>,
    /// The blocks of the structures of the group itself.
    pub(super) owned: Vec<OwnedRun>,
    /// The reverse map, if the volume has one.
    pub(super) reverse: Option<Vec<OwnedRun>>,
    /// The reference counts of shared extents, if the volume has them.
    pub(super) shared: Option<Vec<SharedRun>>,
    /// Whether all trees could be read.
    pub(super) is_whole: bool,
}

/// The inodes of a group.
pub(super) struct GroupInodes {
    /// All chunks, ascending.
    pub(super) chunks: Vec<XfsInodeChunk>,
    /// The blocks of both trees.
    tree_blocks: Vec<u32>,
    is_whole: bool,
}

impl VolumeCheck<'_> {
    /// The headers of a group; `None` when one of them is damaged.
    pub(super) fn headers(&self, ag: AgNumber) -> Option<GroupHeaders> {
        self.read_headers(ag)
            .map_err(|error| self.findings.add_error(Code::GroupHeader, ag, &error))
            .ok()
    }

    fn read_headers(&self, ag: AgNumber) -> Result<GroupHeaders> {
        let geometry = self.geometry();
        let read = |role, offset| {
            group::header(self.buffers, role, offset).inspect(|buffer| self.note_lsn(buffer))
        };
        let space_sector = read(BufferRole::FreeSpace(ag), Agf::offset(geometry, ag))?;
        let inode_sector = read(BufferRole::Inodes(ag), Agi::offset(geometry, ag))?;
        let list_sector = read(BufferRole::FreeList(ag), Agfl::offset(geometry, ag))?;
        let agf =
            *Agf::view(space_sector.bytes()).map_err(|problem| space_sector.damaged(problem))?;
        let agi =
            *Agi::view(inode_sector.bytes()).map_err(|problem| inode_sector.damaged(problem))?;
        for (buffer, length) in [(&space_sector, agf.length), (&inode_sector, agi.length)] {
            if length.get() != geometry.ag_len(ag) {
                let problem = format!("{length} blocks, not {}", geometry.ag_len(ag));
                return Err(buffer.damaged(Malformed::new(Structure::GroupFreeSpace, problem)));
            }
        }
        let list = Agfl::parse(list_sector.bytes(), geometry, ag)
            .map_err(|problem| list_sector.damaged(problem))?;
        Ok(GroupHeaders { agf, agi, list })
    }

    /// All records of a tree of a group.
    fn records<R: XfsTreeRecord>(
        &self,
        ag: AgNumber,
        tree: XfsTree,
        (block, levels): (u32, u32),
    ) -> TreeRecords<R> {
        let mut found = TreeRecords::NONE;
        let root = XfsTreeRoot::Group { tree, ag, block: AgBlock(block), levels };
        found.is_whole = self.walk_tree(root, &mut |at, block: &XfsBtreeBlock<'_>| {
            found.blocks.extend(self.geometry().split(at).map(|(_, block)| block.0));
            found.records.extend_from_slice(block.records::<R>());
        });
        found
    }

    fn has(&self, feature: XfsLayout) -> bool {
        self.geometry().layout.contains(feature)
    }

    /// Checks the inode trees of a group. Returns their inodes, and adds their counts to `counts`.
    pub(super) fn check_inode_trees(
        &self,
        ag: AgNumber,
        headers: &GroupHeaders,
        counts: &mut GroupCounts,
    ) -> GroupInodes {
        let agi = &headers.agi;
        let all =
            self.records::<XfsInodeChunk>(ag, XfsTree::Inodes, (agi.root.get(), agi.level.get()));
        let with_free = if self.has(XfsLayout::FREE_INODES) {
            let root = (agi.free_root.get(), agi.free_level.get());
            Some(self.records::<XfsInodeChunk>(ag, XfsTree::FreeInodes, root))
        } else {
            None
        };
        let geometry = self.geometry();
        let sum = |mask: fn(&XfsInodeChunk, &XfsGeometry) -> u64| {
            all.records.iter().map(|chunk| u64::from(mask(chunk, geometry).count_ones())).sum()
        };
        let (inodes, free): (u64, u64) = (sum(XfsInodeChunk::allocated), sum(XfsInodeChunk::free));
        counts.inodes += inodes;
        counts.free_inodes += free;
        let is_whole = all.is_whole && with_free.as_ref().is_none_or(|tree| tree.is_whole);
        if is_whole {
            self.compare(ag, Code::InodeCounter, "inodes", agi.count.get(), inodes);
            self.compare(ag, Code::InodeCounter, "free inodes", agi.freecount.get(), free);
            if self.superblock.fields.ro_compat().contains(XfsRoCompat::INOBTCNT) {
                let (blocks, free) = (all.blocks.len(), with_free.as_ref().map(|t| t.blocks.len()));
                let what = ["blocks of the tree of inodes", "blocks of the tree of free inodes"];
                self.compare(ag, Code::InodeCounter, what[0], agi.iblocks.get(), blocks as u64);
                let free = free.unwrap_or(0) as u64;
                self.compare(ag, Code::InodeCounter, what[1], agi.fblocks.get(), free);
            }
            if let Some(with_free) = &with_free {
                let expected = all.records.iter().filter(|chunk| chunk.free(geometry) != 0);
                self.compare_chunks(ag, expected, &with_free.records);
            }
        }
        let mut tree_blocks = all.blocks;
        tree_blocks.extend(with_free.into_iter().flat_map(|tree| tree.blocks));
        GroupInodes { chunks: all.records, tree_blocks, is_whole: all.is_whole }
    }

    /// Adds the blocks of the inodes of a group, and those of its inode trees.
    pub(super) fn push_inodes(&self, owned: &mut Vec<OwnedRun>, inodes: &GroupInodes) {
        push_blocks(owned, &inodes.tree_blocks, XfsOwner::InodeTrees);
        self.push_chunks(owned, &inodes.chunks);
    }

    fn compare(&self, ag: AgNumber, code: Code, what: &str, counted: u32, found: u64) {
        if u64::from(counted) != found {
            let problem = format!("{counted} {what} are counted, but there are {found}");
            self.findings.add(code, ag, problem);
        }
    }

    fn compare_chunks<'c>(
        &self,
        ag: AgNumber,
        expected: impl Iterator<Item = &'c XfsInodeChunk>,
        found: &[XfsInodeChunk],
    ) {
        let mut found = found.iter().peekable();
        let bad = |problem| self.findings.add(Code::FreeInodes, ag, problem);
        for chunk in expected {
            let start = chunk.start();
            while let Some(other) = found.next_if(|other| other.start() < start) {
                bad(format!("chunk {} has no free inode or is not there", other.start()));
            }
            match found.next_if(|other| other.start() == start) {
                None => bad(format!("chunk {start} is missing")),
                Some(other) if other != chunk => {
                    let masks = [other.free, chunk.free];
                    bad(format!(
                        "chunk {start} has the free mask {:#x}, not {:#x}",
                        masks[0], masks[1]
                    ));
                }
                Some(_) => {}
            }
        }
        for other in found {
            bad(format!("chunk {} has no free inode or is not there", other.start()));
        }
    }

    /// Adds the blocks of chunks. Small inodes in large blocks make several chunks share a block.
    fn push_chunks(&self, owned: &mut Vec<OwnedRun>, chunks: &[XfsInodeChunk]) {
        let geometry = self.geometry();
        let mut end = 0;
        for chunk in chunks {
            let allocated = chunk.allocated(geometry);
            for index in (0..CHUNK_INODES).filter(|index| allocated & 1 << index != 0) {
                let inode = chunk.start().0.saturating_add(index);
                let block = inode >> geometry.inodes_per_block_log();
                if block >= end {
                    owned.push(OwnedRun::of(XfsOwner::Inodes, block, 1));
                    end = block.saturating_add(1);
                }
            }
        }
    }

    /// Checks the trees of free space of a group, and reads the owners of its blocks.
    pub(super) fn check_free_space(
        &self,
        ag: AgNumber,
        headers: &GroupHeaders,
        counts: &mut GroupCounts,
    ) -> GroupSpace {
        let agf = &headers.agf;
        let [by_block, by_size, reverse] = agf.roots.map(U32::get);
        let [block_levels, size_levels, reverse_levels] = agf.levels.map(U32::get);
        let by_block =
            self.records::<XfsFreeExtent>(ag, XfsTree::FreeByBlock, (by_block, block_levels));
        let by_size =
            self.records::<XfsFreeExtent>(ag, XfsTree::FreeBySize, (by_size, size_levels));
        let reverse = self.has(XfsLayout::REVERSE_MAP).then(|| {
            self.records::<XfsReverseMap>(ag, XfsTree::ReverseMap, (reverse, reverse_levels))
        });
        let shared = self.has(XfsLayout::SHARED_BLOCKS).then(|| {
            let root = (agf.refcount_root.get(), agf.refcount_level.get());
            self.records::<XfsSharedExtent>(ag, XfsTree::ReferenceCounts, root)
        });
        let free: u64 = by_block.records.iter().map(|extent| u64::from(extent.count.get())).sum();
        let is_free_whole = by_block.is_whole && by_size.is_whole;
        let is_whole = is_free_whole
            && reverse.as_ref().is_none_or(|tree| tree.is_whole)
            && shared.as_ref().is_none_or(|tree| tree.is_whole);
        if is_free_whole {
            let longest = by_block.records.iter().map(|extent| extent.count.get()).max();
            self.compare(ag, Code::FreeCounter, "free blocks", agf.freeblks.get(), free);
            let longest = u64::from(longest.unwrap_or(0));
            let what = "blocks of the longest free extent";
            self.compare(ag, Code::FreeCounter, what, agf.longest.get(), longest);
            self.compare_free(ag, &by_block.records, &by_size.records);
        }
        let mut tree_blocks = by_block.below_root() + by_size.below_root();
        let mut owned = self.push_headers(ag);
        push_blocks(&mut owned, &by_block.blocks, XfsOwner::FreeTrees);
        push_blocks(&mut owned, &by_size.blocks, XfsOwner::FreeTrees);
        if let Some(reverse) = &reverse {
            tree_blocks += reverse.below_root();
            push_blocks(&mut owned, &reverse.blocks, XfsOwner::FreeTrees);
            let (what, blocks) = ("blocks of the reverse map", reverse.blocks.len() as u64);
            if reverse.is_whole {
                self.compare(ag, Code::FreeCounter, what, agf.rmap_blocks.get(), blocks);
            }
        }
        if let Some(shared) = &shared {
            push_blocks(&mut owned, &shared.blocks, XfsOwner::CountTree);
            for extent in shared.records.iter().filter(|extent| extent.is_staged()) {
                let block = extent.block().0;
                owned.push(OwnedRun::of(XfsOwner::Staging, block, extent.count.get()));
            }
            let (what, blocks) = ("blocks of the reference counts", shared.blocks.len() as u64);
            if shared.is_whole {
                self.compare(ag, Code::FreeCounter, what, agf.refcount_blocks.get(), blocks);
            }
        }
        if is_whole && self.counts_free_trees() {
            let what = "blocks of trees of free space";
            self.compare(ag, Code::FreeCounter, what, agf.btreeblks.get(), tree_blocks as u64);
        }
        self.check_free_list(ag, headers, &mut owned);
        let in_list = u64::from(agf.flcount.get());
        let of_trees = if self.counts_free_trees() { tree_blocks as u64 } else { 0 };
        counts.free_blocks += free + in_list + of_trees;
        GroupSpace {
            free: by_block.records,
            owned,
            reverse: reverse.map(|tree| tree.records.iter().map(OwnedRun::from).collect()),
            shared: shared.map(|tree| {
                let records = tree.records.iter().filter(|extent| !extent.is_staged());
                records.map(SharedRun::from).collect()
            }),
            is_whole,
        }
    }

    fn compare_free(&self, ag: AgNumber, by_block: &[XfsFreeExtent], by_size: &[XfsFreeExtent]) {
        let mut sorted = by_size.to_vec();
        sorted.sort_unstable_by_key(|extent| extent.start.get());
        let pairs = by_block.iter().map(Some).chain([None]);
        let others = sorted.iter().map(Some).chain([None]);
        // One finding tells: behind the first difference all of them may differ.
        if let Some((one, other)) = pairs.zip(others).find(|(one, other)| one != other) {
            let text = |extent: Option<&XfsFreeExtent>| {
                extent.map_or_else(
                    || "nothing".to_owned(),
                    |extent| format!("{} blocks from {}", extent.count, extent.start),
                )
            };
            let problem = format!("by block {} is free, by size {}", text(one), text(other));
            self.findings.add(Code::FreeTrees, ag, problem);
        }
    }

    /// The headers of a group, and the log if it is there.
    fn push_headers(&self, ag: AgNumber) -> Vec<OwnedRun> {
        let geometry = self.geometry();
        let mut owned = vec![OwnedRun::of(XfsOwner::Headers, 0, geometry.header_blocks())];
        if geometry.log_start.0 != 0
            && let Some((group, block)) = geometry.split(geometry.log_start)
            && group == ag
        {
            owned.push(OwnedRun::of(XfsOwner::Log, block.0, geometry.log_blocks));
        }
        owned
    }

    fn check_free_list(&self, ag: AgNumber, headers: &GroupHeaders, owned: &mut Vec<OwnedRun>) {
        let GroupHeaders { agf, list, .. } = headers;
        if !agf.is_free_list_consistent(self.geometry()) {
            let (first, last) = (agf.flfirst, agf.fllast);
            let problem = format!("{} blocks, but from {first} to {last}", agf.flcount);
            self.findings.add(Code::FreeList, ag, problem);
        }
        match list.ring(agf, self.geometry(), ag) {
            Err(problem) => self.findings.add(Code::FreeList, ag, problem.problem),
            Ok(blocks) => {
                let mut blocks: Vec<_> = blocks.into_iter().map(|block| block.0).collect();
                blocks.sort_unstable();
                for pair in blocks.windows(2) {
                    if let [one, other] = pair
                        && one == other
                    {
                        self.findings.add(Code::FreeList, ag, format!("it has block {one} twice"));
                    }
                }
                push_blocks(owned, &blocks, XfsOwner::FreeTrees);
            }
        }
    }
}

impl GroupInodes {
    /// Those of a group whose headers are damaged.
    pub(super) const UNKNOWN: Self =
        Self { chunks: Vec::new(), tree_blocks: Vec::new(), is_whole: false };

    /// Whether all chunks are known.
    pub(super) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// The chunk that inode `inode` of the group belongs to, by its number, and the place in it.
    pub(super) fn find(&self, inode: u32) -> Option<(usize, u32)> {
        let behind = self.chunks.partition_point(|chunk| chunk.start().0 <= inode);
        let number = behind.checked_sub(1)?;
        let index = inode - self.chunks.get(number)?.start().0;
        (index < CHUNK_INODES).then_some((number, index))
    }

    /// The chunk and the place in it of an inode that is in use.
    pub(super) fn find_used(&self, inode: u32) -> Option<(usize, u32)> {
        let (number, index) = self.find(inode)?;
        let chunk = self.chunks.get(number)?;
        (chunk.in_use() & 1 << index != 0).then_some((number, index))
    }
}

fn push_blocks(to: &mut Vec<OwnedRun>, blocks: &[u32], owner: XfsOwner) {
    to.extend(blocks.iter().map(|block| OwnedRun::of(owner, *block, 1)));
}

impl GroupCounts {
    /// The sum of two.
    fn with(self, other: &Self) -> Self {
        Self {
            inodes: self.inodes + other.inodes,
            free_inodes: self.free_inodes + other.free_inodes,
            free_blocks: self.free_blocks + other.free_blocks,
        }
    }
}
