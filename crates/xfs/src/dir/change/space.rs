//! Data blocks: where an entry has room, and blocks that come and go.

use offshoot_vfs::Result;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::data::{self, DirData};
use offshoot_xfs_format::dir::free::{self, DirFree};
use offshoot_xfs_format::dir::leaf::NO_BLOCK;
use offshoot_xfs_format::dir::{DirCookie, XfsDirEntry, leaf_start};
use offshoot_xfs_format::{BasicBlock, FileBlock, U16};

use super::ChangedDirectory;
use crate::buffer::malformed;
use crate::inode::change::{end, previous_mapped};
use crate::trans::ForkName;

const DATA: DaKind = DaKind::DirData;

/// The blocks of the index in which room for an entry is looked for: seven from a place on that
/// the name decides, and the last one. In blocks of 4 KiB they are about 16,000 data blocks, with
/// a million entries of 50 bytes, so all of smaller directories. In a larger one an addition that
/// finds no room there may make a data block although another one has room, but the next names look
/// elsewhere. So removals at random places keep a directory from growing, whatever its size.
const MOST_INDEX_BLOCKS: usize = 8;

/// The same in a directory that can have no more data blocks. The kernel would look at all
/// of them: 4,200 in blocks of 4 KiB, 69,900 in blocks of 1 KiB.
const MOST_INDEX_BLOCKS_IF_FULL: usize = 64;

/// Where an entry goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataSpot {
    /// The data block, in directory blocks.
    pub(super) number: usize,
    /// Whether it is not there yet.
    pub(super) is_new: bool,
}

impl DataSpot {
    /// The first block with `len` bytes in a row, or else the first one that is not there.
    pub(super) fn in_bests(bests: &[U16], len: usize) -> Option<Self> {
        let len = u16::try_from(len).unwrap_or(NO_BLOCK);
        let RoomInBests { existing, missing } = RoomInBests::find(bests, len);
        existing
            .map(|number| Self { number, is_new: false })
            .or_else(|| missing.map(|number| Self { number, is_new: true }))
    }
}

/// What is found in the longest unused pieces of data blocks.
#[derive(Clone, Copy, Debug, Default)]
struct RoomInBests {
    /// The first block with room.
    existing: Option<usize>,
    /// The first one that is not there, among those in front of that.
    missing: Option<usize>,
}

impl RoomInBests {
    fn find(bests: &[U16], len: u16) -> Self {
        const ROW: usize = 64;
        let mut missing = None;
        for (row, start) in bests.chunks(ROW).zip((0..).step_by(ROW)) {
            // Most rows of a large directory are full, and are passed over without a branch for
            // each block. NO_BLOCK is longer than any piece.
            if !row.iter().fold(false, |found, best| found | (best.get() >= len)) {
                continue;
            }
            for (best, number) in row.iter().zip(start..) {
                match best.get() {
                    NO_BLOCK => missing = missing.or(Some(number)),
                    best if best >= len => return Self { existing: Some(number), missing },
                    _ => {}
                }
            }
        }
        Self { existing: None, missing }
    }
}

impl ChangedDirectory<'_, '_> {
    /// The place in the fork of a data block.
    fn place_of_data(&self, number: usize) -> FileBlock {
        FileBlock((number as u64) << self.geometry().dir_block_log)
    }

    /// The longest unused piece of a data block without entries.
    pub(super) fn room_of_data(&self) -> usize {
        self.geometry().dir_block_size() - DATA.header_len(self.geometry())
    }

    /// The place on the device of the data block at `at`. Locks it.
    pub(super) fn data_block(&mut self, at: FileBlock) -> Result<BasicBlock> {
        let place = self.blocks.hold(at)?;
        if DaKind::of_directory(self.geometry(), self.blocks.bytes(place)?) == Some(DATA) {
            return Ok(place);
        }
        Err(self.blocks.damaged(format!("block {at} is in the place of one with entries")))
    }

    /// The place on the device of the block of the index at `at`, which is locked; `None` when the
    /// block is not there.
    pub(super) fn index_block(&mut self, at: FileBlock) -> Result<Option<BasicBlock>> {
        let Some(place) = self.blocks.find_held(at)? else { return Ok(None) };
        let bytes = self.blocks.bytes(place)?;
        if DaKind::of_directory(self.geometry(), bytes) != Some(DaKind::DirFree) {
            return Err(self.blocks.damaged(format!("block {at} is in the place of the index")));
        }
        Ok(Some(place))
    }

    /// The longest unused pieces that a block of the index says.
    pub(super) fn bests_at(&self, place: BasicBlock) -> Result<&[U16]> {
        let index = DirFree::view(self.geometry(), self.blocks.bytes(place)?);
        index.map(|index| index.bests).map_err(malformed)
    }

    /// The data blocks from the first to the last one, with those between that are not there.
    pub(super) fn data_blocks(&mut self) -> Result<usize> {
        let blocks = self.size()? / self.geometry().dir_block_size() as u64;
        Ok(usize::try_from(blocks).unwrap_or(usize::MAX))
    }

    /// Where an entry of `len` bytes, whose name has `hash`, goes in a directory with an index of
    /// free space.
    pub(super) fn room_by_index(&mut self, len: usize, hash: u32) -> Result<DataSpot> {
        let geometry = self.geometry();
        let (blocks, in_one) = (self.data_blocks()?, free::per_block(geometry).max(1));
        let last = blocks.saturating_sub(1) / in_one;
        let is_full = self.place_of_data(blocks) >= leaf_start(geometry);
        let most = if is_full { MOST_INDEX_BLOCKS_IF_FULL } else { MOST_INDEX_BLOCKS };
        let start = usize::try_from(hash).unwrap_or(0) % last.max(1);
        let others = (start..last).chain(0..start).take(most - 1);
        let (dir, rooms) = (self.blocks.ino, self.blocks.t.engine().directory_rooms());
        let len = u16::try_from(len).unwrap_or(NO_BLOCK);
        let mut new = None;
        for index in others.chain([last]) {
            let full = rooms.full(dir, index, len);
            if index < last && full >= in_one {
                continue;
            }
            let start = index * in_one;
            let (at, _) = free::locate(geometry, u32::try_from(start).unwrap_or(u32::MAX));
            let Some(place) = self.index_block(at)? else {
                new = Some(start);
                continue;
            };
            let bests = self.bests_at(place)?;
            let full = if full <= bests.len() { full } else { 0 };
            let RoomInBests { existing, missing } =
                RoomInBests::find(bests.get(full..).unwrap_or_default(), len);
            let behind = existing.map_or(bests.len(), |number| full + number);
            if missing.is_none() && behind != full {
                rooms.note_full(dir, index, (behind, len));
            }
            if existing.is_some() {
                return Ok(DataSpot { number: start + behind, is_new: false });
            }
            match missing {
                Some(number) => new = Some(start + full + number),
                None if index < last && bests.len() < in_one => new = Some(start + bests.len()),
                None => {}
            }
        }
        if new.is_none() && is_full {
            return Err(self.blocks.no_space("one more data block"));
        }
        Ok(DataSpot { number: new.unwrap_or(blocks), is_new: true })
    }

    /// Writes an entry to a data block. Returns where it is, and the longest unused piece that the
    /// block has left.
    pub(super) fn put_entry(
        &mut self,
        spot: DataSpot,
        entry: &XfsDirEntry<'_>,
    ) -> Result<(DirCookie, u16)> {
        let at = self.place_of_data(spot.number);
        if spot.is_new {
            self.create_data(at)?;
        }
        self.data_block(at)?;
        let (offset, longest) = self.blocks.edit((at, DATA), |geometry, edit| {
            let offset = data::insert(geometry, edit, entry)?;
            Ok((offset, DirData::view(geometry, edit.block())?.longest()))
        })?;
        let cookie = offset.and_then(|offset| DirCookie::new(self.geometry(), at, offset));
        let cookie = cookie.ok_or_else(|| {
            self.blocks.damaged(format!("block {at} has less room than the index says"))
        })?;
        Ok((cookie, self.best(longest)?))
    }

    fn best(&self, longest: usize) -> Result<u16> {
        let best = u16::try_from(longest).ok().filter(|best| *best != NO_BLOCK);
        best.ok_or_else(|| self.blocks.damaged(format!("an unused piece of {longest} bytes")))
    }

    fn create_data(&mut self, at: FileBlock) -> Result<()> {
        let geometry = self.geometry();
        if at >= leaf_start(geometry) {
            return Err(self.blocks.no_space("one more data block"));
        }
        self.blocks.create_at(at)?;
        let expected = self.blocks.expected(at)?;
        let bytes = data::encode_empty(geometry, &expected).map_err(malformed)?;
        self.blocks.store(at, &bytes)?;
        let end = (at.0 << geometry.block_log) + geometry.dir_block_size() as u64;
        let size = self.size()?.max(end);
        self.set_size(size)
    }

    /// Removes an entry from its data block, which goes when it has no other and can be given up.
    /// Returns the block, and its longest unused piece.
    pub(super) fn take_entry(&mut self, cookie: DirCookie) -> Result<(usize, u16)> {
        let geometry = self.geometry();
        let (at, offset) = cookie.split(geometry);
        // The hash may lead into an entry, or into an unused piece that has an old one.
        self.blocks.require_proof(at)?;
        let longest = self.blocks.edit((at, DATA), |geometry, edit| {
            data::remove(geometry, edit, offset)?;
            DirData::view(geometry, edit.block()).map(|data| data.longest())
        })?;
        let number = usize::try_from(at.0 >> geometry.dir_block_log).unwrap_or(usize::MAX);
        if longest < self.room_of_data() || number == 0 || !self.free_data(number)? {
            return Ok((number, self.best(longest)?));
        }
        Ok((number, NO_BLOCK))
    }

    /// Proves that a data block has no entries.
    pub(super) fn prove_empty(&mut self, number: usize) -> Result<()> {
        let at = self.place_of_data(number);
        let place = self.data_block(at)?;
        let data = DirData::view(self.geometry(), self.blocks.bytes(place)?).map_err(malformed)?;
        if data.longest() == self.room_of_data() {
            return Ok(());
        }
        Err(self
            .blocks
            .damaged(format!("block {at} has entries, and a leaf says that it has none")))
    }

    /// Frees a data block. Behind the last one that is left, the directory ends. Returns false when
    /// the block has to stay: an entry can go there again.
    pub(super) fn free_data(&mut self, number: usize) -> Result<bool> {
        let (geometry, at) = (self.geometry(), self.place_of_data(number));
        if !self.blocks.may_free(&[at])? {
            return Ok(false);
        }
        self.blocks.free(at)?;
        if number + 1 < self.data_blocks()? {
            return Ok(true);
        }
        let ino = self.blocks.ino;
        let last = previous_mapped(self.blocks.t, ino, ForkName::Data, at)?;
        self.set_size(last.as_ref().map_or(0, end) << geometry.block_log)?;
        Ok(true)
    }
}
