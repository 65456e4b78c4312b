//! Directories: entries, hashes, the index of free space, and what they say about other inodes.

use std::ops::Range;
use std::sync::Arc;

use offshoot_kit::ranges::joined;
use offshoot_kit::sync::atomic::Ordering;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::data::DirData;
use offshoot_xfs_format::dir::leaf::NO_BLOCK;
use offshoot_xfs_format::dir::short::ShortDirView;
use offshoot_xfs_format::dir::{DirCookie, XfsDirEntry, file_type as entry_type, free, leaf_start};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::inode::file_type;
use offshoot_xfs_format::{FileBlock, Ino};

use super::duplicates::{SameHash, SameNames};
use super::finding::XfsFindingCode as Code;
use super::inode::{InodePass, entry_type_of};
use super::tally::TallyPlace;
use crate::buffer::{DirectoryView, XfsBuffer};
use crate::da::HashTree;
use crate::inode::LoadedInode;
use crate::inode::fork::{ForkContents, end_of};

/// Entries or hashes in any order: how many, and the sum of their addresses and hashes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HashSum {
    count: u64,
    sum: u64,
}

impl HashSum {
    fn add(&mut self, hash: u32, address: u32) {
        // An odd number with many bits, so that no two differences are likely to cancel out.
        let mixed =
            (u64::from(hash) << 32 | u64::from(address)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.count += 1;
        self.sum = self.sum.wrapping_add(mixed ^ mixed >> 29);
    }
}

/// What the entries of a directory said so far.
#[derive(Default)]
struct DirectorySum {
    hashes: HashSum,
    has_dot: bool,
    above: Option<Ino>,
}

impl InodePass<'_> {
    /// Checks a directory.
    pub(super) fn directory(&self, inode: &LoadedInode) {
        if self.directory_parts(inode).is_none() {
            self.known.links.store(false, Ordering::Relaxed);
        }
    }

    /// Checks the parts of a directory. `None` when not all of its entries are known.
    fn directory_parts(&self, inode: &LoadedInode) -> Option<()> {
        let check = self.check;
        let mut sum = DirectorySum::default();
        match &inode.data.contents {
            ForkContents::Local(fork) => {
                // The bytes were proved with the inode.
                let short = ShortDirView::new(check.geometry(), fork).ok()?;
                sum = DirectorySum { has_dot: true, above: Some(short.parent), ..sum };
                short.entries().for_each(|entry| self.entry(inode, &entry));
                let mut names = SameNames::default();
                short.entries().for_each(|entry| self.once(inode, &mut names, entry.name));
            }
            ForkContents::Extents(_) | ForkContents::Btree(_) => {
                self.directory_blocks(inode, &mut sum).then_some(())?;
            }
            _ => {}
        }
        let Some(above) = sum.above.filter(|_| sum.has_dot) else {
            let problem = "`.` or `..` is missing or wrong";
            check.findings.add(Code::DirectoryBlock, inode.ino, problem);
            return None;
        };
        self.dots(inode, above);
        Some(())
    }

    /// Counts `.` and `..` of a directory.
    fn dots(&self, inode: &LoadedInode, above: Ino) {
        let check = self.check;
        let directory = entry_type_of(file_type::DIRECTORY, check);
        let fields = &check.superblock.fields;
        let is_root = fields.root() == Some(inode.ino)
            || check.geometry().layout.contains(XfsLayout::METADATA_TREE)
                && fields.metadirino.get() == inode.ino.0;
        // A directory that is unlinked has no directory above it any more.
        if inode.core.links() == 0 {
            return;
        }
        if let TallyPlace::Used(tally) = self.tally.place(check, inode.ino) {
            tally.add_link(directory);
            // Without types, an entry does not say that it is that of a directory.
            if check.geometry().layout.contains(XfsLayout::FILE_TYPES) {
                tally.take_above(above);
                if is_root {
                    tally.add_above(inode.ino);
                }
            }
        }
        match self.tally.place(check, above) {
            TallyPlace::Used(tally) => tally.add_link(directory),
            TallyPlace::Unused => {
                let problem = format!("`..` names inode {above}, which is not in use");
                check.findings.add(Code::DotDot, inode.ino, problem);
            }
            TallyPlace::Elsewhere => {}
        }
    }

    /// Counts an entry other than `.` and `..`.
    fn entry(&self, directory: &LoadedInode, entry: &XfsDirEntry<'_>) {
        let tally = match self.tally.place(self.check, entry.ino) {
            TallyPlace::Used(tally) => tally,
            TallyPlace::Elsewhere => return,
            TallyPlace::Unused => {
                let (name, ino) = (entry.name.escape_ascii(), entry.ino);
                let problem = format!("`{name}` names inode {ino}, which is not in use");
                return self.check.findings.add(Code::Entry, directory.ino, problem);
            }
        };
        // A whiteout is a device.
        let is_whiteout = entry.file_type == entry_type::WHT;
        tally.add_link(if is_whiteout { entry_type::CHRDEV } else { entry.file_type });
        let generation = directory.core.generation.get();
        tally.add_name(directory.ino, generation, entry.name);
        if entry.file_type == entry_type::DIR {
            tally.add_above(directory.ino);
        }
    }

    /// Checks the blocks of a directory. `false` when not all of its entries are known.
    fn directory_blocks(&self, inode: &LoadedInode, sum: &mut DirectorySum) -> bool {
        let check = self.check;
        let tree =
            HashTree { buffers: check.buffers, inode, fork: &inode.data, is_directory: true };
        let blocks = match self.data_blocks(inode) {
            Ok(blocks) => blocks,
            Err(problem) => {
                check.findings.add(Code::DirectoryBlock, inode.ino, problem);
                return false;
            }
        };
        let mut spaces = Vec::new();
        let (mut is_sound, mut is_one_block) = (true, false);
        for range in blocks {
            let mut at = range.start;
            while at < range.end {
                let found = self.data_block(&tree, FileBlock(at), sum);
                is_sound &= found.is_some();
                if let Some((is_whole, longest)) = found {
                    is_one_block |= is_whole;
                    spaces.push((FileBlock(at), longest));
                }
                at += 1 << check.geometry().dir_block_log;
            }
        }
        if is_one_block {
            if spaces.len() != 1 {
                let problem = "one block says that it is all of the directory, but there are more";
                check.findings.add(Code::DirectoryBlock, inode.ino, problem);
                return false;
            }
            return is_sound;
        }
        let mut hashes = HashSum::default();
        let mut bests = None;
        let mut same = SameHash::default();
        let root = leaf_start(check.geometry());
        let is_whole = check.walk_hashes(&tree, root, &mut |buffer| {
            let Ok(DirectoryView::Leaf(leaf)) = buffer.directory(check.geometry()) else { return };
            for hash in leaf.hashes {
                if let Some(cookie) = hash.cookie() {
                    hashes.add(hash.hash.get(), cookie.0);
                    if let Some(run) = same.add(hash.hash.get(), cookie) {
                        self.names_with_one_hash(&tree, &run);
                    }
                }
            }
            if DaKind::of_directory(check.geometry(), buffer.bytes()) == Some(DaKind::DirLeaf) {
                bests = Some(leaf.bests.iter().map(|best| best.get()).collect::<Vec<_>>());
            }
        });
        self.names_with_one_hash(&tree, same.last());
        if !is_whole || !is_sound {
            return is_sound;
        }
        if hashes != sum.hashes {
            let (entries, hashes) = (sum.hashes.count, hashes.count);
            let problem = format!("its {hashes} hashes do not lead to its {entries} entries");
            check.findings.add(Code::DirectoryHash, inode.ino, problem);
        }
        self.spaces(&tree, &spaces, bests.as_deref());
        true
    }

    /// The blocks with entries, in ranges that begin and end with directory blocks.
    fn data_blocks(&self, inode: &LoadedInode) -> Result<Vec<Range<u64>>, String> {
        let (check, text) = (self.check, |error: offshoot_vfs::Error| error.to_string());
        let most = inode.core.nblocks.get().min(check.geometry().blocks);
        let unit = 1_u64 << check.geometry().dir_block_log;
        let mut extents = inode.data.extents(check.buffers, FileBlock(0)).map_err(text)?;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut count = 0_u64;
        while let Some(extent) = extents.next().map_err(text)? {
            count += u64::from(extent.count);
            if count > most {
                return Err(format!("it has more than {most} blocks"));
            }
            if extent.offset >= leaf_start(check.geometry()) {
                break;
            }
            ranges.push(extent.offset.0..end_of(&extent));
        }
        let ranges = joined(ranges);
        let is_unit =
            |range: &Range<u64>| range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit);
        match ranges.iter().find(|range| !is_unit(range)) {
            Some(range) => Err(format!("blocks {range:?} are a part of a directory block")),
            None => Ok(ranges),
        }
    }

    /// Checks a block with entries. Returns whether it is all of a directory, and its longest
    /// unused piece.
    fn data_block(
        &self,
        tree: &HashTree<'_>,
        at: FileBlock,
        sum: &mut DirectorySum,
    ) -> Option<(bool, usize)> {
        let (check, inode) = (self.check, tree.inode);
        let buffer: Arc<XfsBuffer> = tree
            .require(at)
            .map_err(|error| check.findings.add_error(Code::DirectoryBlock, inode.ino, &error))
            .ok()?;
        check.note_lsn(&buffer);
        let view = buffer.directory(check.geometry());
        let (is_whole, data) = match &view {
            Ok(DirectoryView::Whole(block)) => (true, &block.data),
            Ok(DirectoryView::Data(data)) => (false, data),
            _ => {
                let problem = format!("block {at} of the fork is in the place of one with entries");
                check.findings.add(Code::DirectoryBlock, inode.ino, problem);
                return None;
            }
        };
        self.entries(inode, at, data, sum);
        if is_whole {
            let mut names = SameNames::default();
            data.entries(0).for_each(|entry| self.once(inode, &mut names, entry.name));
        }
        Some((is_whole, data.longest()))
    }

    fn entries(
        &self,
        inode: &LoadedInode,
        at: FileBlock,
        data: &DirData<'_>,
        sum: &mut DirectorySum,
    ) {
        for entry in data.entries(0) {
            let cookie = DirCookie::new(self.check.geometry(), at, entry.offset);
            sum.hashes.add(name_hash(entry.name), cookie.map_or(0, |cookie| cookie.0));
            match entry.name {
                b"." => sum.has_dot |= entry.ino == inode.ino,
                b".." => sum.above = Some(entry.ino),
                _ => self.entry(inode, &entry),
            }
        }
    }

    /// Compares the longest unused piece of each block with entries with the index.
    fn spaces(&self, tree: &HashTree<'_>, spaces: &[(FileBlock, usize)], bests: Option<&[u16]>) {
        let (check, geometry) = (self.check, self.check.geometry());
        for &(at, longest) in spaces {
            let index = u32::try_from(at.0 >> geometry.dir_block_log).unwrap_or(u32::MAX);
            let found = match bests {
                Some(bests) => bests.get(index as usize).copied(),
                None => self.indexed(tree, index),
            };
            if found.map(usize::from) != Some(longest) {
                let found = found.filter(|best| *best != NO_BLOCK);
                let problem =
                    format!("block {at} has {longest} bytes in a row, its index {found:?}");
                check.findings.add(Code::DirectorySpace, tree.inode.ino, problem);
            }
        }
        let there = bests.map(|bests| bests.iter().filter(|best| **best != NO_BLOCK).count());
        if there.is_some_and(|there| there != spaces.len()) {
            let problem = format!("its index has {there:?} blocks, there are {}", spaces.len());
            check.findings.add(Code::DirectorySpace, tree.inode.ino, problem);
        }
    }

    /// What the index in blocks of its own says about a block with entries.
    fn indexed(&self, tree: &HashTree<'_>, index: u32) -> Option<u16> {
        let check = self.check;
        let (block, inside) = free::locate(check.geometry(), index);
        let buffer = tree
            .require(block)
            .map_err(|error| check.findings.add_error(Code::DirectorySpace, tree.inode.ino, &error))
            .ok()?;
        check.note_lsn(&buffer);
        match buffer.directory(check.geometry()) {
            Ok(DirectoryView::Free(free)) => free.bests.get(inside).map(|best| best.get()),
            _ => None,
        }
    }
}
