//! Inodes, their forks, and what these map.

use offshoot_kit::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use offshoot_xfs_format::btree::XfsBtreeBlock;
use offshoot_xfs_format::dir::file_type as entry_type;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::Agi;
use offshoot_xfs_format::inode::{XfsInodeFlags, XfsInodeFlags2, file_type};
use offshoot_xfs_format::record::{
    CHUNK_INODES, XfsExtent, XfsExtentItem, XfsInodeChunk, XfsReverseFlags,
};
use offshoot_xfs_format::{AgBlock, AgIno, AgNumber, Ino};

use super::finding::XfsFindingCode as Code;
use super::group::GroupInodes;
use super::space::{OwnedRun, SpaceGather};
use super::tally::{LinkTally, TallyPlace};
use super::whole::VolumeCheck;
use crate::btree::XfsTreeRoot;
use crate::buffer::{BufferRole, DiskRun};
use crate::inode::LoadedInode;
use crate::inode::fork::{ForkContents, LoadedFork, end_of};
use crate::symlink;

/// One pass over all inodes.
pub(super) struct InodePass<'a> {
    pub(super) check: &'a VolumeCheck<'a>,
    pub(super) gather: &'a SpaceGather,
    pub(super) tally: &'a LinkTally<'a>,
    /// For each group, the inodes that no directory has.
    pub(super) without_links: &'a [AtomicU64],
    pub(super) known: &'a KnownParts,
    /// The blocks of directories, attributes and trees that are still to be read: no two inodes
    /// share any, so there are at most as many as the volume has.
    pub(super) blocks_left: AtomicU64,
}

/// What a pass could read all of.
pub(super) struct KnownParts {
    /// The mappings of all inodes.
    pub(super) mappings: AtomicBool,
    /// The names of all directories.
    pub(super) links: AtomicBool,
}

/// What a fork has.
#[derive(Default)]
struct ForkCounts {
    extents: u64,
    /// With the blocks of the tree.
    blocks: u64,
    /// The block of the file behind the last extent.
    end: u64,
}

impl InodePass<'_> {
    /// Checks the inodes of a chunk.
    pub(super) fn chunk(&self, ag: AgNumber, chunk: &XfsInodeChunk) {
        let geometry = self.check.geometry();
        let log = geometry.inodes_per_block_log();
        let allocated = chunk.allocated(geometry);
        self.prefetch(ag, chunk);
        let mut buffer = None;
        let mut runs = Vec::new();
        for index in (0..CHUNK_INODES).filter(|index| allocated & 1 << index != 0) {
            let inode = AgIno(chunk.start().0.saturating_add(index));
            let block = AgBlock(inode.0 >> log);
            if buffer.as_ref().is_none_or(|(at, _)| *at != block) {
                let bytes = geometry.block_size();
                let run = DiskRun { at: geometry.place(ag, block), bytes };
                buffer = match self.check.buffers.read(&[run], BufferRole::InodeCluster) {
                    Ok(read) => Some((block, read)),
                    Err(error) => {
                        self.forget();
                        self.check.findings.add_error(Code::Inode, (ag, block), &error);
                        continue;
                    }
                };
            }
            let Some((_, read)) = &buffer else { continue };
            let inside = (inode.0 & ((1 << log) - 1)) as usize;
            let bytes = read.bytes().chunks_exact(geometry.inode_size()).nth(inside);
            let is_used = chunk.in_use() & 1 << index != 0;
            let ino = geometry.ino(ag, inode);
            self.inode(ino, bytes.unwrap_or_default(), is_used, &mut runs);
        }
        self.gather.add(&mut runs);
    }

    fn prefetch(&self, ag: AgNumber, chunk: &XfsInodeChunk) {
        let geometry = self.check.geometry();
        let first = AgBlock(chunk.start().0 >> geometry.inodes_per_block_log());
        let len = u64::from(CHUNK_INODES) << geometry.inode_log;
        self.check.buffers.prefetch(geometry.place(ag, first).bytes(), len);
    }

    /// Takes blocks that an inode shares with no other from those that are left. `false` when there
    /// are not as many: then inodes share what they must not, and reading it might never end.
    fn charge(&self, ino: Ino, blocks: u64) -> bool {
        let take = |left: u64| left.checked_sub(blocks);
        let taken = self.blocks_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        if taken.is_err() {
            self.forget();
            let problem = "inodes have more blocks than the volume";
            self.check.findings.add(Code::OwnedTwice, ino, problem);
        }
        taken.is_ok()
    }

    /// Notes that an inode could not be read.
    fn forget(&self) {
        self.known.mappings.store(false, Ordering::Relaxed);
        self.known.links.store(false, Ordering::Relaxed);
    }

    fn inode(&self, ino: Ino, bytes: &[u8], is_used: bool, runs: &mut Vec<(AgNumber, OwnedRun)>) {
        let check = self.check;
        let inode = match LoadedInode::parse(check.geometry(), ino, bytes) {
            Ok(inode) => inode,
            Err(problem) => {
                self.forget();
                return check.findings.add(Code::Inode, ino, problem.problem);
            }
        };
        if inode.is_some() != is_used {
            let [own, of_tree] = if is_used { ["free", "in use"] } else { ["in use", "free"] };
            let problem = format!("it is {own}, but {of_tree} in the tree of inodes");
            check.findings.add(Code::InodeState, ino, problem);
            return;
        }
        let Some(inode) = inode else { return };
        check.note_lsn_of(inode.core.lsn(), ino);
        let is_realtime = inode.core.flags().contains(XfsInodeFlags::REALTIME);
        let data = self.fork(&inode.data, ino, false, is_realtime, runs);
        let attributes = inode.attributes.as_ref();
        let attributes = attributes.map(|fork| self.fork(fork, ino, true, false, runs));
        let attributes = attributes.unwrap_or_default();
        let (extents, of_attributes) = inode.core.extent_counts();
        let counted = (extents, u64::from(of_attributes));
        let found = (data.extents, attributes.extents);
        if counted != found {
            let problem = format!("{counted:?} extents are counted, but there are {found:?}");
            check.findings.add(Code::ExtentCount, ino, problem);
        }
        let (counted, found) = (inode.core.nblocks.get(), data.blocks + attributes.blocks);
        if counted != found {
            let problem = format!("{counted} blocks are counted, but there are {found}");
            check.findings.add(Code::BlockCount, ino, problem);
        }
        self.links(&inode);
        self.contents(&inode, attributes.blocks);
    }

    /// Checks a fork, and adds what it maps to `runs`.
    fn fork(
        &self,
        fork: &LoadedFork,
        ino: Ino,
        is_attributes: bool,
        is_realtime: bool,
        runs: &mut Vec<(AgNumber, OwnedRun)>,
    ) -> ForkCounts {
        let mut counts = ForkCounts::default();
        let which =
            if is_attributes { XfsReverseFlags::ATTRIBUTES } else { XfsReverseFlags::empty() };
        match &fork.contents {
            ForkContents::Extents(items) => {
                for item in items {
                    self.extent(&item.get(), ino, which, is_realtime, &mut counts, runs);
                }
            }
            // A tree has 1 block at least.
            ForkContents::Btree(root) if self.charge(ino, 1) => {
                let root = XfsTreeRoot::Fork { root, owner: ino };
                let is_whole = self.check.walk_tree(root, &mut |at, block: &XfsBtreeBlock<'_>| {
                    counts.blocks += 1;
                    if let Some((ag, at)) = self.check.geometry().split(at) {
                        let flags = which | XfsReverseFlags::TREE_BLOCK;
                        runs.push((ag, OwnedRun::of_file(ino.0, flags.bits(), at.0, 1)));
                    }
                    for item in block.records::<XfsExtentItem>() {
                        self.extent(&item.get(), ino, which, is_realtime, &mut counts, runs);
                    }
                    self.gather.add(runs);
                });
                if !is_whole {
                    self.known.mappings.store(false, Ordering::Relaxed);
                }
            }
            _ => {}
        }
        counts
    }

    fn extent(
        &self,
        extent: &XfsExtent,
        ino: Ino,
        mut flags: XfsReverseFlags,
        is_realtime: bool,
        counts: &mut ForkCounts,
        runs: &mut Vec<(AgNumber, OwnedRun)>,
    ) {
        let geometry = self.check.geometry();
        if extent.offset.0 < counts.end {
            let problem = format!("an extent at {} begins before {}", extent.offset, counts.end);
            self.check.findings.add(Code::Extents, ino, problem);
        }
        counts.end = end_of(extent);
        counts.extents += 1;
        counts.blocks = counts.blocks.saturating_add(extent.count.into());
        if is_realtime {
            return;
        }
        let place = geometry.split(extent.start);
        let place = place.filter(|_| geometry.is_usable_extent(extent.start, extent.count));
        let Some((ag, start)) = place else {
            let problem = format!("{} blocks from {}", extent.count, extent.start);
            return self.check.findings.add(Code::Extents, ino, problem);
        };
        flags.set(XfsReverseFlags::UNWRITTEN, extent.is_unwritten);
        let offset = flags.bits() | extent.offset.0;
        runs.push((ag, OwnedRun::of_file(ino.0, offset, start.0, extent.count)));
    }

    /// Takes the links of an inode from its counters.
    fn links(&self, inode: &LoadedInode) {
        let (check, links) = (self.check, inode.core.links());
        if links == 0
            && let Some((ag, _, _)) = check.geometry().locate(inode.ino)
            && let Some(count) = self.without_links.get(ag.0 as usize)
        {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let TallyPlace::Used(tally) = self.tally.place(check, inode.ino) else { return };
        tally.take_links(links, entry_type_of(inode.core.file_type(), check));
        // No directory has these: the superblock does.
        let fields = &check.superblock.fields;
        let inner = [
            fields.rbmino.get(),
            fields.rsumino.get(),
            fields.uquotino.get(),
            fields.gquotino.get(),
            fields.pquotino.get(),
        ];
        let has_directory = inode.core.flags2().contains(XfsInodeFlags2::METADATA);
        if inner.contains(&inode.ino.0) && !has_directory && links > 0 {
            tally.add_link(entry_type_of(inode.core.file_type(), check));
        }
    }

    fn contents(&self, inode: &LoadedInode, attribute_blocks: u64) {
        match inode.core.file_type() {
            file_type::DIRECTORY => {
                let blocks = inode.core.nblocks.get().saturating_sub(attribute_blocks);
                if self.charge(inode.ino, blocks) {
                    self.directory(inode);
                }
            }
            file_type::SYMLINK => {
                if let Err(error) = symlink::target(self.check.buffers, inode) {
                    self.check.findings.add_error(Code::SymbolicLink, inode.ino, &error);
                }
            }
            _ => {}
        }
        if self.charge(inode.ino, attribute_blocks) {
            self.attributes(inode, attribute_blocks);
        }
    }
}

/// The type that an entry has for a file of this type in `mode`.
pub(super) fn entry_type_of(mode: u16, check: &VolumeCheck<'_>) -> u8 {
    if !check.geometry().layout.contains(XfsLayout::FILE_TYPES) {
        return entry_type::UNKNOWN;
    }
    entry_type::of_mode(mode)
}

impl VolumeCheck<'_> {
    /// Follows the lists of unlinked inodes of a group. Returns how many inodes they have.
    pub(super) fn check_unlinked(&self, ag: AgNumber, agi: &Agi, inodes: &GroupInodes) -> u64 {
        let mut count = 0_u64;
        for (list, first) in agi.unlinked.iter().enumerate() {
            let mut next = Some(AgIno(first.get())).filter(|first| *first != AgIno::NULL);
            while let Some(inode) = next {
                let bad = |problem: String| {
                    let problem = format!("list {list}, inode {inode}: {problem}");
                    self.findings.add(Code::Unlinked, ag, problem);
                };
                count += 1;
                if count > agi.count.get().into() {
                    bad("the list is longer than the group has inodes".to_owned());
                    return count;
                }
                if inodes.find_used(inode.0).is_none() || Agi::unlinked_list(inode) != list {
                    bad("it is free, or belongs to another list".to_owned());
                    break;
                }
                match self.next_unlinked(ag, inode) {
                    Ok(following) => next = following,
                    Err(problem) => {
                        bad(problem);
                        break;
                    }
                }
            }
        }
        count
    }

    fn next_unlinked(&self, ag: AgNumber, inode: AgIno) -> Result<Option<AgIno>, String> {
        let geometry = self.geometry();
        let log = geometry.inodes_per_block_log();
        let at = geometry.place(ag, AgBlock(inode.0 >> log));
        let run = DiskRun { at, bytes: geometry.block_size() };
        let read = self.buffers.read(&[run], BufferRole::InodeCluster);
        let read = read.map_err(|error| error.to_string())?;
        let inside = (inode.0 & ((1 << log) - 1)) as usize;
        let bytes = read.bytes().chunks_exact(geometry.inode_size()).nth(inside);
        let inode =
            LoadedInode::parse(geometry, geometry.ino(ag, inode), bytes.unwrap_or_default())
                .map_err(|problem| problem.problem.into_owned())?
                .ok_or_else(|| "it is free".to_owned())?;
        if inode.core.links() != 0 {
            return Err(format!("it has {} links", inode.core.links()));
        }
        inode.core.next_unlinked(geometry, ag).map_err(|problem| problem.problem.into_owned())
    }
}
