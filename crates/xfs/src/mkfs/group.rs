//! A group of a new volume: what owns its blocks, its headers, and its trees of one leaf each.

use offshoot_vfs::Result;
use offshoot_xfs_format::btree::{XfsBtreeBuilder, XfsTree};
use offshoot_xfs_format::dir::short::ShortDir;
use offshoot_xfs_format::features::{XfsIncompat, XfsRoCompat};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agfl, new_agf, new_agi};
use offshoot_xfs_format::inode::{
    XfsForkFormat, XfsInodeCore, XfsInodeFlags, XfsInodeFlags2, XfsTime, file_type,
};
use offshoot_xfs_format::record::{
    CHUNK_INODES, XfsFreeExtent, XfsInodeChunk, XfsOwner, XfsReverseMap,
};
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, Ino};
use zerocopy::IntoBytes;

use super::invalid;
use super::layout::{NewXfsLayout, roots_end, roots_of};
use super::options::XfsMkfsOptions;
use crate::buffer::malformed;

/// The inodes of the root chunk that are in use: the root directory, and the two files of a
/// realtime device that the volume does not have.
const USED_INODES: u32 = 3;

/// A run of blocks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupBlocks {
    start: u32,
    count: u32,
}

/// A group of a new volume.
#[derive(Debug)]
pub(super) struct NewXfsGroup {
    ag: AgNumber,
    /// What is free, ascending.
    free: Vec<GroupBlocks>,
    free_list: GroupBlocks,
    /// What owns the blocks that are not free, ascending.
    owners: Vec<(GroupBlocks, XfsOwner)>,
    /// The first chunk of inodes, in group 0.
    root_chunk: Option<GroupBlocks>,
}

impl NewXfsGroup {
    /// Group `ag` of the volume.
    pub(super) fn of(layout: &NewXfsLayout, ag: AgNumber) -> Self {
        let geometry = &layout.geometry;
        let roots = roots_end(geometry);
        let mut group = Self {
            ag,
            free: vec![GroupBlocks { start: roots, count: geometry.ag_len(ag) - roots }],
            free_list: GroupBlocks { start: roots, count: 0 },
            owners: vec![(
                GroupBlocks { start: 0, count: geometry.header_blocks() },
                XfsOwner::Headers,
            )],
            root_chunk: None,
        };
        for (root, tree) in roots_of(geometry) {
            group.own(GroupBlocks { start: root, count: 1 }, owner_of(tree));
        }
        let (log_ag, AgBlock(start)) = layout.log;
        if log_ag == ag {
            group.take(GroupBlocks { start, count: geometry.log_blocks }, XfsOwner::Log);
        }
        let count = free_list_len(layout);
        group.free_list = group.smallest(count);
        if count > 0 {
            group.take(group.free_list, XfsOwner::FreeTrees);
        }
        if ag.0 == 0 {
            let chunk = group.place_of_chunk(layout);
            group.take(chunk, XfsOwner::Inodes);
            group.root_chunk = Some(chunk);
        }
        group
    }

    /// The start of the smallest free run that has `count` blocks, or of the largest one.
    fn smallest(&self, count: u32) -> GroupBlocks {
        let fits = self.free.iter().filter(|run| run.count >= count);
        let smallest = fits.min_by_key(|run| (run.count, run.start));
        let run = smallest.or(self.free.iter().max_by_key(|run| run.count));
        let run = run.copied().unwrap_or(GroupBlocks { start: 0, count: 0 });
        GroupBlocks { start: run.start, count: count.min(run.count) }
    }

    /// Where the first chunk of inodes lies: at the first place that is aligned.
    fn place_of_chunk(&self, layout: &NewXfsLayout) -> GroupBlocks {
        let count = CHUNK_INODES.div_ceil(layout.fields.inopblock.get().into());
        let (chunk, unit) = (layout.fields.inoalignmt.get(), layout.fields.unit.get());
        let is_striped = chunk > 1 && unit > 0 && unit.is_multiple_of(chunk);
        let alignment = if is_striped { unit } else { chunk.max(1) };
        let at = |alignment: u32| {
            self.free.iter().find_map(|run| {
                let start = run.start.next_multiple_of(alignment);
                let end = run.start + run.count;
                (start + count <= end).then_some(GroupBlocks { start, count })
            })
        };
        at(alignment).or_else(|| at(chunk.max(1))).unwrap_or_else(|| self.smallest(count))
    }

    /// Moves `taken` from the free blocks to `owner`.
    fn take(&mut self, taken: GroupBlocks, owner: XfsOwner) {
        let taken_end = taken.start + taken.count;
        self.free = std::mem::take(&mut self.free)
            .into_iter()
            .flat_map(|run| {
                let end = run.start + run.count;
                let before = run.start..end.min(taken.start);
                let behind = run.start.max(taken_end)..end;
                [before, behind]
            })
            .filter(|range| !range.is_empty())
            .map(|range| GroupBlocks { start: range.start, count: range.end - range.start })
            .collect();
        self.own(taken, owner);
    }

    /// Adds `blocks` to those of `owner`. The blocks right before them may be of the same owner.
    fn own(&mut self, blocks: GroupBlocks, owner: XfsOwner) {
        let place = self.owners.partition_point(|(other, _)| other.start < blocks.start);
        let before = place.checked_sub(1).and_then(|before| self.owners.get_mut(before));
        match before {
            Some((run, of)) if *of == owner && run.start + run.count == blocks.start => {
                run.count += blocks.count;
            }
            _ => self.owners.insert(place, (blocks, owner)),
        }
    }

    /// The free blocks, with those of the free list.
    pub(super) fn free_blocks(&self) -> u64 {
        let free: u64 = self.free.iter().map(|run| u64::from(run.count)).sum();
        free + u64::from(self.free_list.count)
    }

    /// The blocks of the root chunk.
    pub(super) fn chunk_blocks(&self) -> u32 {
        self.root_chunk.map_or(0, |chunk| chunk.count)
    }

    /// The root directory, if it is in this group.
    pub(super) fn root(&self, layout: &NewXfsLayout) -> Option<Ino> {
        let start = self.root_chunk?.start << layout.geometry.inodes_per_block_log();
        Some(layout.geometry.ino(self.ag, AgIno(start)))
    }

    /// How many inodes the group has, and how many of them are free.
    pub(super) fn inodes(&self, layout: &NewXfsLayout) -> (u32, u32) {
        let count = self.chunk_blocks() << layout.geometry.inodes_per_block_log();
        (count, count.saturating_sub(USED_INODES))
    }

    /// What is written for the group but for its superblock and its inodes: pieces of the device,
    /// with their places in bytes.
    pub(super) fn pieces(&self, layout: &NewXfsLayout) -> Result<Vec<(u64, Vec<u8>)>> {
        let geometry = &layout.geometry;
        let at = |block: u32| geometry.place(self.ag, AgBlock(block)).bytes();
        // The superblock comes last, in a write of its own.
        let headers = at(0) + geometry.sector_size() as u64;
        let mut pieces = vec![(headers, self.headers(layout))];
        for (root, tree) in roots_of(geometry) {
            let place = geometry.fs_block(self.ag, AgBlock(root));
            let mut leaf = XfsBtreeBuilder::new(geometry, tree, place, Ino::NULL, 0)
                .ok_or_else(|| invalid("a tree that the volume does not have"))?;
            if !leaf.set_records(&self.records(layout, tree)) {
                return Err(invalid("more records than a leaf holds"));
            }
            pieces.push((at(root), leaf.into_bytes()));
        }
        Ok(pieces)
    }

    /// The root chunk, with its place in bytes, if it is in this group.
    pub(super) fn inodes_piece(
        &self,
        layout: &NewXfsLayout,
        options: &XfsMkfsOptions,
    ) -> Result<Option<(u64, Vec<u8>)>> {
        let Some(chunk) = self.root_chunk else { return Ok(None) };
        let place = layout.geometry.place(self.ag, AgBlock(chunk.start)).bytes();
        Ok(Some((place, self.chunk(layout, options)?)))
    }

    /// The blocks of the headers, without the superblock.
    fn headers(&self, layout: &NewXfsLayout) -> Vec<u8> {
        let geometry = &layout.geometry;
        let root =
            |tree| roots_of(geometry).find(|(_, other)| *other == tree).map(|(root, _)| root);
        let root_and_level = |tree| root(tree).map_or((0, 0), |root| (root, 1));
        let mut agf = new_agf(geometry, self.ag);
        let trees = [XfsTree::FreeByBlock, XfsTree::FreeBySize, XfsTree::ReverseMap];
        agf.roots = trees.map(|tree| root_and_level(tree).0.into());
        agf.levels = trees.map(|tree| root_and_level(tree).1.into());
        // The first place of the list stays empty.
        agf.flfirst = 1.into();
        agf.fllast = self.free_list.count.into();
        agf.flcount = self.free_list.count.into();
        agf.freeblks = self.free.iter().map(|run| run.count).sum::<u32>().into();
        agf.longest = self.free.iter().map(|run| run.count).max().unwrap_or(0).into();
        agf.rmap_blocks = root_and_level(XfsTree::ReverseMap).1.into();
        let (counts, level) = root_and_level(XfsTree::ReferenceCounts);
        agf.refcount_root = counts.into();
        agf.refcount_level = level.into();
        agf.refcount_blocks = level.into();

        let mut agi = new_agi(geometry, self.ag);
        let (inodes, free) = self.inodes(layout);
        agi.count = inodes.into();
        agi.freecount = free.into();
        if let Some(chunk) = self.root_chunk {
            agi.newino = (chunk.start << geometry.inodes_per_block_log()).into();
        }
        let (tree, level) = root_and_level(XfsTree::Inodes);
        agi.root = tree.into();
        agi.level = level.into();
        let (free_tree, free_level) = root_and_level(XfsTree::FreeInodes);
        agi.free_root = free_tree.into();
        agi.free_level = free_level.into();
        if layout.fields.ro_compat().contains(XfsRoCompat::INOBTCNT) {
            agi.iblocks = level.into();
            agi.fblocks = free_level.into();
        }

        let listed = (0..self.free_list.count).map(|index| AgBlock(self.free_list.start + index));
        let blocks = std::iter::once(AgBlock::NULL)
            .chain(listed)
            .chain(std::iter::repeat(AgBlock::NULL))
            .take(Agfl::size(geometry))
            .collect();
        let free_list = Agfl { lsn: None, blocks }.encode(geometry, self.ag);

        let sector = geometry.sector_size();
        let mut bytes =
            Vec::with_capacity(geometry.header_blocks() as usize * geometry.block_size());
        let mut first = vec![0; sector];
        agf.write(&mut first, geometry);
        let mut second = vec![0; sector];
        agi.write(&mut second, geometry);
        bytes.extend([first, second, free_list].concat());
        bytes.resize(geometry.header_blocks() as usize * geometry.block_size() - sector, 0);
        bytes
    }

    /// The records of a tree, as they are stored.
    fn records(&self, layout: &NewXfsLayout, tree: XfsTree) -> Vec<u8> {
        let free_record =
            |run: &GroupBlocks| XfsFreeExtent { start: run.start.into(), count: run.count.into() };
        match tree {
            XfsTree::FreeByBlock => bytes_of(self.free.iter().map(free_record)),
            XfsTree::FreeBySize => {
                let mut free = self.free.clone();
                free.sort_unstable_by_key(|run| (run.count, run.start));
                bytes_of(free.iter().map(free_record))
            }
            XfsTree::Inodes | XfsTree::FreeInodes => {
                let geometry = &layout.geometry;
                let first = self.root(layout).map(|root| geometry.split_ino(root));
                let first = first.flatten().map_or(0, |(_, first)| first.0);
                let chunks = self.inodes(layout).0 / CHUNK_INODES;
                bytes_of((0..chunks).map(|index| {
                    let used = if index == 0 { (1 << USED_INODES) - 1 } else { 0 };
                    let start = AgIno(first + index * CHUNK_INODES);
                    XfsInodeChunk::new(geometry, start, 0, !used)
                }))
            }
            XfsTree::ReverseMap => {
                bytes_of(self.owners.iter().map(|(blocks, owner)| XfsReverseMap {
                    start: blocks.start.into(),
                    count: blocks.count.into(),
                    owner: owner.number().into(),
                    offset: 0.into(),
                }))
            }
            XfsTree::ReferenceCounts | XfsTree::Extents => Vec::new(),
        }
    }

    /// The bytes of the root chunk.
    fn chunk(&self, layout: &NewXfsLayout, options: &XfsMkfsOptions) -> Result<Vec<u8>> {
        let geometry = &layout.geometry;
        let root = self.root(layout).unwrap_or(Ino::NULL);
        let size = geometry.inode_size();
        let (count, _) = self.inodes(layout);
        let mut bytes = vec![0; count as usize * size];
        for (index, inode) in (0..count).zip(bytes.chunks_exact_mut(size)) {
            let ino = Ino(root.0 + u64::from(index));
            let generation = if index == 0 { 0 } else { generation(options, ino) };
            let mut core = XfsInodeCore::fresh(geometry, ino, generation);
            if index < USED_INODES {
                fill(&mut core, index, layout, options);
            }
            if index == 0 {
                let fork = ShortDir { parent: ino, entries: Vec::new() }
                    .encode(geometry)
                    .map_err(malformed)?;
                core.size = (fork.len() as u64).into();
                let place = inode.get_mut(XfsInodeCore::len(geometry)..);
                place
                    .and_then(|place| place.get_mut(..fork.len()))
                    .ok_or_else(|| invalid("an inode without room for a directory"))?
                    .copy_from_slice(&fork);
            }
            core.write(inode, geometry);
        }
        Ok(bytes)
    }
}

/// Fills in an inode of the root chunk that is in use.
fn fill(core: &mut XfsInodeCore, index: u32, layout: &NewXfsLayout, options: &XfsMkfsOptions) {
    let incompat = layout.fields.incompat();
    let mut flags2 = XfsInodeFlags2::empty();
    flags2.set(XfsInodeFlags2::BIGTIME, incompat.contains(XfsIncompat::BIGTIME));
    flags2.set(XfsInodeFlags2::NREXT64, incompat.contains(XfsIncompat::NREXT64));
    core.flags2 = flags2.bits().into();
    core.aformat = XfsForkFormat::Extents as u8;
    core.changecount = 2.into();
    let time = core.time_field(options.xfs_time());
    core.atime = time;
    core.mtime = time;
    core.ctime = time;
    core.crtime = time;
    if index == 0 {
        core.mode = (file_type::DIRECTORY | 0o755).into();
        core.nlink = 2.into();
        core.format = XfsForkFormat::Local as u8;
        let (uid, gid) = options.root_owner;
        core.uid = uid.into();
        core.gid = gid.into();
        return;
    }
    core.mode = file_type::REGULAR.into();
    core.nlink = 1.into();
    core.format = XfsForkFormat::Extents as u8;
    if index == 1 {
        // The bitmap of a realtime device counts in its access time where it looked last.
        core.flags = XfsInodeFlags::NEWRTBM.bits().into();
        core.atime = core.time_field(XfsTime { seconds: 0, nanoseconds: 0 });
    }
}

/// A generation that follows from the id, the seed and the inode (splitmix64).
fn generation(options: &XfsMkfsOptions, ino: Ino) -> u32 {
    let (high, low) = options.uuid.as_u64_pair();
    let mixed = [high, low, options.seed, ino.0].into_iter().fold(0_u64, |state, word| {
        let mut mixed = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    });
    u32::try_from(mixed >> 32).unwrap_or(u32::MAX)
}

fn owner_of(tree: XfsTree) -> XfsOwner {
    match tree {
        XfsTree::Inodes | XfsTree::FreeInodes => XfsOwner::InodeTrees,
        XfsTree::ReferenceCounts => XfsOwner::CountTree,
        _ => XfsOwner::FreeTrees,
    }
}

/// The blocks of a new free list: those that the next split of each tree of free space needs, and
/// of the reverse map. A tree that can have only one level needs none.
fn free_list_len(layout: &NewXfsLayout) -> u32 {
    let has_reverse_map = layout.geometry.layout.contains(XfsLayout::REVERSE_MAP);
    let levels = &layout.levels;
    let growing = [levels.free, levels.free, if has_reverse_map { levels.reverse } else { 1 }];
    growing.into_iter().map(|most| if most > 1 { 2 } else { 0 }).sum()
}

fn bytes_of<T: IntoBytes + zerocopy::Immutable>(records: impl Iterator<Item = T>) -> Vec<u8> {
    records.flat_map(|record| record.as_bytes().to_vec()).collect()
}
