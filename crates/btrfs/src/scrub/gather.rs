//! Gathers the extents of a range of the logical space in the last commit, and their checksums.

use std::ops::Range;

use offshoot_btrfs_format::check;
use offshoot_btrfs_format::chunk::{Chunk, STRIPE_LEN};
use offshoot_btrfs_format::extent::{EXTENT_FLAG_TREE_BLOCK, InlineRef, ParsedExtent};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, Malformed, TreeId, block};
use offshoot_vfs::{Error, Result, Structure};

use crate::data::committed_sums;
use crate::inode::{Rooms, RoomsHandle};
use crate::log::committed_root;
use crate::storage::malformed;
use crate::tree::{Cursor, TreeRoot};

/// About how many bytes of the logical space a window has.
const WINDOW_BYTES: u64 = 8 << 20;

/// The largest length of an extent, in bytes: four times the longest that any writer makes. An
/// extent that claims more would keep a scrub busy with space that does not exist.
const MOST_EXTENT_BYTES: u64 = 1 << 30;

/// The trees of the last commit. As long as this value exists, nothing that they refer to is freed
/// or overwritten.
pub(super) struct CommittedTrees<'v> {
    pub(super) volume: &'v Rooms,
    pub(super) extents: TreeRoot,
    sums: Option<TreeRoot>,
    /// Space that is freed meanwhile becomes free with the next commit, which waits for this
    /// handle.
    _handle: Option<RoomsHandle<'v>>,
}

/// A tree block, as its extent item describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScrubbedBlock {
    pub(super) level: u8,
    generation: Generation,
    /// The first tree that the extent item names, if it names one.
    pub(super) owner: Option<TreeId>,
}

/// The contents of a piece of an extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ScrubContent {
    /// A whole tree block.
    Block(ScrubbedBlock),
    /// Data with these checksums, one behind the other.
    Summed(Vec<u8>),
    /// Data without checksums.
    Plain,
}

/// A piece of an extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScrubPiece {
    pub(super) range: Range<u64>,
    /// The address of the extent.
    pub(super) extent: u64,
    pub(super) content: ScrubContent,
}

/// The extents of a part of a chunk.
#[derive(Debug)]
pub(super) struct ScrubWindow {
    pub(super) range: Range<u64>,
    /// In ascending order, without overlaps.
    pub(super) pieces: Vec<ScrubPiece>,
}

impl ScrubbedBlock {
    /// Checks that `bytes`, read from `logical`, are this block.
    pub(super) fn verify(
        &self,
        volume: &Rooms,
        logical: Logical,
        bytes: &[u8],
    ) -> Result<(), Malformed> {
        check::verify(bytes, volume.storage.geometry(), logical)?;
        let owner = self.owner.unwrap_or(block::BlockHeader::view(bytes)?.owner());
        let Self { level, generation, .. } = *self;
        check::expect(
            bytes,
            &check::ExpectedBlock { logical, level, generation, owner, first_key: None },
        )
    }
}

impl<'v> CommittedTrees<'v> {
    /// The last commit. On a volume that is open for writing, waits until that commit is on the
    /// devices.
    ///
    /// # Errors
    /// When the roots of the trees cannot be read; `EROFS` when the volume has stopped writing.
    pub(super) fn of(volume: &'v Rooms) -> Result<Self> {
        let Some(live) = volume.live_part() else {
            let extents = volume.tree(TreeId::EXTENT)?;
            return Ok(Self { volume, extents, sums: volume.csum_tree(), _handle: None });
        };
        let handle = volume.enter_committed()?;
        let none = || Error::corrupt(Structure::RootTree, "it has no extent tree");
        let extents = committed_root(live, &handle, TreeId::EXTENT)?.ok_or_else(none)?;
        let sums = committed_root(live, &handle, TreeId::CSUM)?;
        Ok(Self { volume, extents, sums, _handle: Some(handle) })
    }

    /// The first window of `chunk` from `from` on that has an extent; `None` if no extent lies
    /// before `end`.
    ///
    /// # Errors
    /// When the trees cannot be read.
    pub(super) fn next_window(
        &self,
        chunk: &Chunk,
        from: u64,
        end: u64,
    ) -> Result<Option<ScrubWindow>> {
        let mut cursor = self.cursor_over(from)?;
        let Some(first) = self.next_extent(&mut cursor, from, end)? else { return Ok(None) };
        // Whole rows, so that parity is checked together with its data.
        let has_parity = chunk.profile.shape().parity > 0;
        let row = if has_parity { STRIPE_LEN * chunk.data_stripes() } else { STRIPE_LEN };
        let begin = first.range.start.max(from);
        let begin = chunk.start.0 + (begin - chunk.start.0) / row * row;
        let len = (WINDOW_BYTES / row).max(1) * row;
        let range = begin.max(from)..begin.saturating_add(len).min(end);
        self.window(range).map(Some)
    }

    /// Calls `visit` with the part between `from` and `end` of every extent.
    ///
    /// # Errors
    /// When the extent tree cannot be read.
    pub(super) fn for_each_extent(
        &self,
        from: u64,
        end: u64,
        mut visit: impl FnMut(Range<u64>),
    ) -> Result<()> {
        let mut cursor = self.cursor_over(from)?;
        while let Some(extent) = self.next_extent(&mut cursor, from, end)? {
            visit(extent.range.start.max(from)..extent.range.end.min(end));
        }
        Ok(())
    }

    /// The window over `range`.
    ///
    /// # Errors
    /// When the trees cannot be read.
    pub(super) fn window(&self, range: Range<u64>) -> Result<ScrubWindow> {
        let mut window = ScrubWindow { pieces: Vec::new(), range: range.clone() };
        let mut sums = None;
        let mut cursor = self.cursor_over(range.start)?;
        let mut at = range.start;
        while let Some(extent) = self.next_extent(&mut cursor, at, range.end)? {
            if at > range.start && extent.range.start < at {
                let problem = format!("it begins before {at}, where the one before it ends");
                return Err(Error::corrupt_at(Structure::ExtentItem, extent.range.start, problem));
            }
            at = extent.range.end;
            let own = extent.range.start.max(range.start)..extent.range.end.min(range.end);
            if let Some(block) = extent.block {
                // A block belongs to the window that it begins in.
                if own.start == extent.range.start {
                    let (range, extent) = (extent.range.clone(), extent.range.start);
                    window.pieces.push(ScrubPiece {
                        range,
                        extent,
                        content: ScrubContent::Block(block),
                    });
                }
                continue;
            }
            if sums.is_none() {
                sums = Some(match self.sums {
                    Some(root) => committed_sums(self.volume, root, &range)?,
                    None => Vec::new(),
                });
            }
            let sums = sums.as_deref().unwrap_or_default();
            self.add_data(&mut window.pieces, own, extent.range.start, sums);
        }
        Ok(window)
    }

    /// Adds data, split into pieces with and without checksums.
    fn add_data(
        &self,
        pieces: &mut Vec<ScrubPiece>,
        range: Range<u64>,
        extent: u64,
        sums: &[(u64, Vec<u8>)],
    ) {
        let superblock = self.volume.superblock();
        let (sector, sum_len) = (u64::from(superblock.sector_size), superblock.checksum.len());
        let bytes = |len: u64| usize::try_from(len / sector).expect("within a window") * sum_len;
        let covered = |at: u64, sums: &[u8]| at + (sums.len() / sum_len) as u64 * sector;
        let mut at = range.start;
        let first = sums.partition_point(|(from, sums)| covered(*from, sums) <= range.start);
        for (from, sums) in &sums[first..] {
            let end = covered(*from, sums).min(range.end);
            if *from >= range.end {
                break;
            }
            let begin = (*from).max(at);
            if begin >= end {
                continue;
            }
            if begin > at {
                pieces.push(ScrubPiece { range: at..begin, extent, content: ScrubContent::Plain });
            }
            let sums = sums[bytes(begin - from)..bytes(end - from)].to_vec();
            pieces.push(ScrubPiece {
                range: begin..end,
                extent,
                content: ScrubContent::Summed(sums),
            });
            at = end;
        }
        if at < range.end {
            pieces.push(ScrubPiece { range: at..range.end, extent, content: ScrubContent::Plain });
        }
    }

    /// A cursor before all extents that end behind `from`.
    fn cursor_over(&self, from: u64) -> Result<Cursor<'v>> {
        let last = Key::new(from, ItemType(u8::MAX), u64::MAX);
        let before = Cursor::seek_committed_floor(self.volume, self.extents, last)?;
        let start = before.item().map_or(from, |(key, _)| key.objectid.min(from));
        let first = Key::new(start, ItemType::EXTENT_ITEM, 0);
        Cursor::seek_committed(self.volume, self.extents, first)
    }

    /// The next extent that has a part between `from` and `end`. Moves the cursor behind it.
    fn next_extent(
        &self,
        cursor: &mut Cursor<'v>,
        from: u64,
        end: u64,
    ) -> Result<Option<FoundExtent>> {
        while let Some((key, data)) = cursor.item().filter(|(key, _)| key.objectid < end) {
            let found = match key.item_type {
                ItemType::EXTENT_ITEM | ItemType::METADATA_ITEM => Some(self.found(key, data)?),
                _ => None,
            };
            cursor.advance()?;
            if let Some(found) = found.filter(|found| found.range.end > from) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    fn found(&self, key: Key, data: &[u8]) -> Result<FoundExtent> {
        let extent = ParsedExtent::parse(key.item_type, data).map_err(malformed)?;
        let is_block = extent.item.flags.get() & EXTENT_FLAG_TREE_BLOCK != 0;
        let is_skinny = key.item_type == ItemType::METADATA_ITEM;
        let node_size = u64::from(self.volume.superblock().node_size);
        let len = if is_skinny { node_size } else { key.offset };
        let end = key.objectid.checked_add(len).filter(|_| len <= MOST_EXTENT_BYTES);
        let end = end.ok_or_else(|| {
            let problem = format!("{len} bytes, longer than any extent");
            Error::corrupt_at(Structure::ExtentItem, key.objectid, problem)
        })?;
        let level = if is_skinny {
            u8::try_from(key.offset).unwrap_or(u8::MAX)
        } else {
            extent.block.map_or(0, |block| block.level)
        };
        let mut owner = None;
        for inline in extent.inline_refs().filter(|_| is_block) {
            if let InlineRef::TreeBlock(root) = inline.map_err(malformed)? {
                owner = Some(TreeId(root));
                break;
            }
        }
        let generation = Generation(extent.item.generation.get());
        let block = is_block.then_some(ScrubbedBlock { level, generation, owner });
        Ok(FoundExtent { range: key.objectid..end, block })
    }
}

/// An extent.
struct FoundExtent {
    range: Range<u64>,
    block: Option<ScrubbedBlock>,
}
