//! The hashes in the only leaf of a directory, or in a tree of leaves.

use offshoot_vfs::Result;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::free::{self, DirFree};
use offshoot_xfs_format::dir::leaf::{self, DirHash, DirLeaf, NO_BLOCK};
use offshoot_xfs_format::dir::{DirCookie, XfsDirEntry, block, data, free_start};
use offshoot_xfs_format::hash::name_hash;
use offshoot_xfs_format::{BasicBlock, FileBlock, U16};

use super::space::DataSpot;
use super::{ChangedDirectory, XfsEntryTarget};
use crate::buffer::malformed;
use crate::da::change::HashPath;
use crate::inode::change::{end, previous_mapped};
use crate::trans::ForkName;

/// The bytes of a hash.
const HASH: usize = size_of::<DirHash>();

/// A leaf that uses less than this share of its block, in percent, is joined with a neighbour.
const JOINED_BELOW: usize = 37;

/// The blocks without contents that a removal takes from the end of a directory at most. Removals
/// on a full volume have left them, ours or those of a kernel.
const MOST_TRIMMED: usize = 16;

/// An entry that was found by its hash.
pub(super) struct FoundEntry {
    /// The way to its hash.
    path: HashPath,
    pub(super) cookie: DirCookie,
    pub(super) target: XfsEntryTarget,
}

/// What a search has found.
pub(super) struct NameSearch {
    pub(super) found: Option<FoundEntry>,
    /// The way to where the hash of the name is added.
    pub(super) first: HashPath,
}

impl ChangedDirectory<'_, '_> {
    fn leaf<'b>(&self, bytes: &'b [u8]) -> Result<DirLeaf<'b>> {
        let geometry = self.geometry();
        match DaKind::of_directory(geometry, bytes) {
            Some(kind @ (DaKind::DirLeaf | DaKind::DirNodeLeaf)) => {
                DirLeaf::view(geometry, kind, bytes).map_err(malformed)
            }
            _ => Err(self.blocks.damaged("a block is in the place of a leaf")),
        }
    }

    /// The place on the device of the root, if it is of this kind: the only leaf is a
    /// [`DaKind::DirLeaf`], or it is a [`DaKind::DirNodeLeaf`] when the free space is in blocks of
    /// its own.
    fn root_of_kind(&mut self, kind: DaKind) -> Result<Option<BasicBlock>> {
        let root = self.blocks.root();
        let place = self.blocks.hold(root)?;
        let found = DaKind::of_directory(self.geometry(), self.blocks.bytes(place)?);
        Ok((found == Some(kind)).then_some(place))
    }

    /// The leaf that the transaction has at a place.
    fn leaf_at(&self, place: BasicBlock) -> Result<DirLeaf<'_>> {
        self.leaf(self.blocks.bytes(place)?)
    }

    /// Looks a name up.
    pub(super) fn search_tree(&mut self, name: &[u8]) -> Result<NameSearch> {
        let (geometry, hash) = (self.geometry(), name_hash(name));
        let mut left = self.blocks.inode()?.core().nblocks.get();
        let first = self.blocks.find(hash)?;
        let mut next = Some(first.clone());
        // Many names with one hash lie in few data blocks.
        let mut last_data = None;
        while let Some(path) = next {
            let place = self.blocks.hold(path.leaf)?;
            // Few names have one hash, and most searches find none.
            let cookies: Vec<_> = leaf::find(self.leaf_at(place)?.hashes, hash).collect();
            for cookie in cookies {
                let (at, offset) = cookie.split(geometry);
                let data = match last_data {
                    Some((last, data)) if last == at => data,
                    _ => self.data_block(at)?,
                };
                last_data = Some((at, data));
                let damaged = self.blocks.in_block(at);
                let view = data::DirData::view(geometry, self.blocks.bytes(data)?);
                let entry = view.and_then(|view| view.entry(offset)).map_err(damaged)?;
                if entry.name == name {
                    let target = (entry.ino, entry.file_type);
                    let found = Some(FoundEntry { path, cookie, target });
                    return Ok(NameSearch { found, first });
                }
            }
            // The following leaves may have the hash too.
            next = match self.leaf_at(place)?.hashes.last() {
                Some(last) if last.hash.get() != hash => None,
                _ => self.blocks.next(&path, first.leaf)?,
            };
            left = left.checked_sub(1).ok_or_else(|| self.blocks.damaged("endless leaves"))?;
        }
        Ok(NameSearch { found: None, first })
    }

    /// Adds an entry whose name, with this hash, the directory does not have. `path` is the way to
    /// where the hash goes, unless the directory got its leaf just now.
    pub(super) fn add_to_tree(
        &mut self,
        entry: &XfsDirEntry<'_>,
        hash: u32,
        path: Option<HashPath>,
    ) -> Result<()> {
        let path = match path {
            Some(path) => path,
            None => self.blocks.find(hash)?,
        };
        let len = entry.len_in_block(self.geometry());
        if let Some(spot) = self.room_with_leaf(len)? {
            let (cookie, best) = self.put_entry(spot, entry)?;
            return self.add_to_only_leaf(DirHash::new(hash, cookie), spot, best);
        }
        let spot = self.room_by_index(len, hash)?;
        let (cookie, best) = self.put_entry(spot, entry)?;
        self.set_index(spot.number, best)?;
        self.add_hash(&path, DirHash::new(hash, cookie))
    }

    /// Where the entry goes in a directory with one leaf; `None` in one with a tree of leaves, and
    /// when the leaf had no room and became such a tree.
    fn room_with_leaf(&mut self, len: usize) -> Result<Option<DataSpot>> {
        let Some(place) = self.root_of_kind(DaKind::DirLeaf)? else { return Ok(None) };
        let blocks = self.data_blocks()?;
        let bytes = self.blocks.bytes(place)?;
        let leaf = self.leaf(bytes)?;
        self.prove_bests(&leaf, blocks)?;
        let spot = DataSpot::in_bests(leaf.bests, len);
        let spot = spot.unwrap_or(DataSpot { number: leaf.bests.len(), is_new: true });
        let more_bests = (spot.number + 1).saturating_sub(leaf.bests.len()) * size_of::<U16>();
        let more_hash = if leaf.stale == 0 { HASH } else { 0 };
        let spare = leaf::spare(self.geometry(), DaKind::DirLeaf, bytes).map_err(malformed)?;
        if spare >= more_bests + more_hash {
            return Ok(Some(spot));
        }
        let has_room = spare + leaf.stale * HASH >= more_bests + HASH;
        let (hashes, bests) = (leaf.live().collect::<Vec<_>>(), leaf.bests.to_vec());
        if has_room {
            self.store_only_leaf(&hashes, &bests)?;
            return Ok(Some(spot));
        }
        self.leaf_to_node(&hashes, &bests)?;
        Ok(None)
    }

    /// Stores the only leaf.
    fn store_only_leaf(&mut self, hashes: &[DirHash], bests: &[U16]) -> Result<()> {
        self.store_root(DaKind::DirLeaf, hashes, bests)
    }

    fn store_root(&mut self, kind: DaKind, hashes: &[DirHash], bests: &[U16]) -> Result<()> {
        let root = self.blocks.root();
        let expected = self.blocks.expected(root)?;
        let bytes = DirLeaf::encode(self.geometry(), kind, &expected, (0, 0), hashes, bests);
        self.blocks.store(root, &bytes.map_err(malformed)?)
    }

    fn add_to_only_leaf(&mut self, hash: DirHash, spot: DataSpot, best: u16) -> Result<()> {
        let only = (self.blocks.root(), DaKind::DirLeaf);
        let has_room = self.blocks.edit(only, |geometry, edit| {
            Ok(leaf::set_best(geometry, edit, spot.number, best)?
                && leaf::insert(geometry, edit, hash)?)
        })?;
        if has_room {
            return Ok(());
        }
        Err(self.blocks.damaged("its leaf has no room where it has"))
    }

    /// Adds a hash to the leaf of a path, which is one of several.
    fn add_hash(&mut self, path: &HashPath, hash: DirHash) -> Result<()> {
        let geometry = self.geometry();
        let kind = DaKind::DirNodeLeaf;
        let has_room = self
            .blocks
            .edit((path.leaf, kind), |geometry, edit| leaf::insert(geometry, edit, hash))?;
        if has_room {
            return self.blocks.note_last(path);
        }
        let place = self.blocks.hold(path.leaf)?;
        let mut all: Vec<_> = self.leaf_at(place)?.live().collect();
        let index = all.partition_point(|other| other.hash.get() < hash.hash.get());
        all.insert(index, hash);
        let (left, right) = all.split_at(all.len() / 2);
        self.blocks.split_leaf(path, 2, |index, expected, links| {
            let half = if index == 0 { left } else { right };
            DirLeaf::encode(geometry, kind, expected, links, half, &[])
        })
    }

    pub(super) fn replace_in_tree(&mut self, name: &[u8], target: XfsEntryTarget) -> Result<()> {
        let found = self.search_tree(name)?.found.ok_or_else(|| self.missing(name))?;
        let (at, offset) = found.cookie.split(self.geometry());
        // The hash may lead into an entry, or into an unused piece that has an old one.
        self.blocks.require_proof(at)?;
        self.blocks.edit((at, DaKind::DirData), |geometry, edit| {
            data::set_file(geometry, edit, offset, target)
        })
    }

    pub(super) fn remove_from_tree(&mut self, name: &[u8]) -> Result<()> {
        let FoundEntry { path, cookie, .. } =
            self.search_tree(name)?.found.ok_or_else(|| self.missing(name))?;
        self.blocks.t.engine().directory_rooms().forget(self.blocks.ino);
        let hash = DirHash::new(name_hash(name), cookie);
        let only = self.root_of_kind(DaKind::DirLeaf)?;
        if let Some(place) = only {
            let blocks = self.data_blocks()?;
            self.prove_bests(&self.leaf_at(place)?, blocks)?;
        }
        let (number, best) = self.take_entry(cookie)?;
        if only.is_some() {
            let only = (path.leaf, DaKind::DirLeaf);
            self.blocks.edit(only, |geometry, edit| leaf::remove(geometry, edit, hash))?;
            self.set_best_in_leaf(number, best)?;
            return self.leaf_to_block();
        }
        self.set_index(number, best)?;
        self.remove_hash(&path, hash)?;
        self.node_to_leaf()
    }

    /// Makes the hash of a leaf that is one of several stale. A leaf without others goes, and one
    /// with few others is joined with its neighbour.
    fn remove_hash(&mut self, path: &HashPath, hash: DirHash) -> Result<()> {
        let kind = DaKind::DirNodeLeaf;
        let size = self.geometry().dir_block_size();
        let header = kind.header_len(self.geometry());
        let live = self.blocks.edit((path.leaf, kind), |geometry, edit| {
            leaf::remove(geometry, edit, hash)?;
            let leaf = DirLeaf::view(geometry, kind, edit.block())?;
            Ok(leaf.hashes.len().saturating_sub(leaf.stale))
        })?;
        if live == 0 {
            return self.blocks.drop_leaf(path);
        }
        if (header + live * HASH) * 100 < size * JOINED_BELOW {
            return self.blocks.join(&path.nodes);
        }
        Ok(())
    }

    /// Moves the free space from the only leaf to an index block.
    fn leaf_to_node(&mut self, hashes: &[DirHash], bests: &[U16]) -> Result<()> {
        let geometry = self.geometry();
        let at = free_start(geometry);
        self.blocks.create_at(at)?;
        let expected = self.blocks.expected(at)?;
        let index = DirFree::encode(geometry, &expected, 0, bests).map_err(malformed)?;
        self.blocks.store(at, &index)?;
        self.store_root(DaKind::DirNodeLeaf, hashes, &[])
    }

    /// Moves the free space to the only leaf, if there is just one, and it has room.
    fn node_to_leaf(&mut self) -> Result<()> {
        let geometry = self.geometry();
        let Some(root) = self.root_of_kind(DaKind::DirNodeLeaf)? else { return Ok(()) };
        if !self.has_one_index_block()? {
            return Ok(());
        }
        let at = free_start(geometry);
        let Some(index) = self.index_block(at)? else { return Ok(()) };
        let bests = self.bests_at(index)?.to_vec();
        let hashes: Vec<_> = self.leaf_at(root)?.live().collect();
        let header = DaKind::DirLeaf.header_len(geometry);
        let needed = header + hashes.len() * HASH + size_of_val(&bests[..]) + leaf::TAIL;
        if needed > geometry.dir_block_size() {
            return Ok(());
        }
        self.store_only_leaf(&hashes, &bests)?;
        self.blocks.free(at)?;
        self.leaf_to_block()
    }

    /// Whether the free space is in one block. Blocks of the index behind it that say nothing go.
    fn has_one_index_block(&mut self) -> Result<bool> {
        let (geometry, ino) = (self.geometry(), self.blocks.ino);
        let unit = u64::from(self.blocks.unit());
        for _ in 0..=MOST_TRIMMED {
            let all = FileBlock(u64::MAX);
            let last = previous_mapped(self.blocks.t, ino, ForkName::Data, all)?;
            let end = last.as_ref().map_or(0, end);
            let at = FileBlock(end.saturating_sub(unit));
            if at <= free_start(geometry) {
                return Ok(at == free_start(geometry));
            }
            let Some(index) = self.index_block(at)? else { return Ok(false) };
            let index = DirFree::view(geometry, self.blocks.bytes(index)?);
            if index.map_err(malformed)?.used > 0 {
                return Ok(false);
            }
            self.blocks.free(at)?;
        }
        Ok(false)
    }

    /// Moves the hashes to the only data block, if there is just one, and it has room.
    fn leaf_to_block(&mut self) -> Result<()> {
        self.trim_data()?;
        let root = self.blocks.root();
        let place = self.blocks.hold(root)?;
        self.leaf_at(place)?;
        if self.data_blocks()? != 1 {
            return Ok(());
        }
        let hashes = self.leaf_at(place)?.hashes.to_vec();
        let geometry = self.geometry();
        let is_elsewhere = |hash: &DirHash| {
            hash.cookie().is_some_and(|cookie| cookie.split(geometry).0 != FileBlock(0))
        };
        if hashes.iter().any(is_elsewhere) {
            return Err(self.blocks.damaged(format!("block {root} leads behind the last entry")));
        }
        self.data_block(FileBlock(0))?;
        // The leaf may have more hashes than there are entries, or lead to none.
        self.blocks.require_proof(FileBlock(0))?;
        let first = (FileBlock(0), DaKind::DirData);
        let has_room =
            self.blocks.edit(first, |geometry, edit| block::from_leaf(geometry, edit, &hashes))?;
        if has_room {
            self.blocks.free(root)?;
            self.block_to_short()?;
        }
        Ok(())
    }

    /// Proves that the only leaf says something about each of the data blocks, and of no other.
    fn prove_bests(&self, leaf: &DirLeaf<'_>, blocks: usize) -> Result<()> {
        let (root, bests) = (self.blocks.root(), leaf.bests.len());
        // Entries behind the last data block may say that none is there.
        let behind = leaf.bests.get(blocks..);
        if behind.is_some_and(|behind| behind.iter().all(|best| best.get() == NO_BLOCK)) {
            return Ok(());
        }
        let problem = format!("block {root} is about {bests} data blocks, and {blocks} are there");
        Err(self.blocks.damaged(problem))
    }

    /// Frees data blocks without entries at the end of a directory with one leaf.
    fn trim_data(&mut self) -> Result<()> {
        for _ in 0..MOST_TRIMMED {
            let (root, blocks) = (self.blocks.root(), self.data_blocks()?);
            let place = self.blocks.hold(root)?;
            let leaf = self.leaf_at(place)?;
            self.prove_bests(&leaf, blocks)?;
            let last = leaf.bests.last().map(|best| usize::from(best.get()));
            let number = leaf.bests.len().saturating_sub(1);
            if number == 0 || last != Some(self.room_of_data()) {
                return Ok(());
            }
            self.prove_empty(number)?;
            if !self.free_data(number)? {
                return Ok(());
            }
            self.set_best_in_leaf(number, NO_BLOCK)?;
        }
        Ok(())
    }

    /// Writes the longest unused piece of a data block into the only leaf. Blocks at the end that
    /// are not there any more are forgotten.
    fn set_best_in_leaf(&mut self, number: usize, best: u16) -> Result<()> {
        let only = (self.blocks.root(), DaKind::DirLeaf);
        self.blocks.edit(only, |geometry, edit| {
            leaf::set_best(geometry, edit, number, best)?;
            let bests = DirLeaf::view(geometry, DaKind::DirLeaf, edit.block())?.bests;
            let is_there = |best: &U16| best.get() != NO_BLOCK;
            let there = bests.iter().rposition(is_there).map_or(0, |last| last + 1);
            if there < bests.len() {
                leaf::truncate_bests(geometry, edit, there)?;
            }
            Ok(())
        })
    }

    /// Writes the longest unused piece of a data block into the index. A block of the index is
    /// there as long as one of its data blocks is: the kernel looks for no other.
    fn set_index(&mut self, number: usize, best: u16) -> Result<()> {
        let geometry = self.geometry();
        let data = u32::try_from(number).unwrap_or(u32::MAX);
        let (at, inside) = free::locate(geometry, data);
        if self.index_block(at)?.is_none() {
            self.blocks.create_at(at)?;
            let expected = self.blocks.expected(at)?;
            let mut bests = vec![U16::new(NO_BLOCK); inside];
            bests.push(best.into());
            let first = data - u32::try_from(inside).unwrap_or(0);
            let bytes = DirFree::encode(geometry, &expected, first, &bests).map_err(malformed)?;
            return self.blocks.store(at, &bytes);
        }
        let used = self.blocks.edit((at, DaKind::DirFree), |geometry, edit| {
            free::set_best(geometry, edit, inside, best)?;
            DirFree::view(geometry, edit.block()).map(|index| index.used)
        })?;
        if used == 0 && self.blocks.may_free(&[at])? { self.blocks.free(at) } else { Ok(()) }
    }
}
