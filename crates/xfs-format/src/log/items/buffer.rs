//! Buffers: parts of a block, in chunks of 128 bytes.

use std::ops::Range;

use zerocopy::little_endian as le;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::inode::NEXT_UNLINKED;
use super::{ItemHead, XfsItemType, overlaps, view};
use crate::log::{BLOCK, XfsLogVector, XfsRegions, bad_item};
use crate::{AgIno, BasicBlock, Malformed, U32, XfsGeometry};

/// The bytes of a chunk, which is what one bit of the map stands for.
pub const CHUNK: usize = 128;

/// The parts of these bytes of a buffer, cut where a chunk ends.
pub fn parts_in_chunks(bytes: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let part = rest.start..rest.end.min(rest.start - rest.start % CHUNK + CHUNK);
        rest.start = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// The chunks of a word of the map.
const WORD_CHUNKS: usize = 32;

/// The basic blocks of the largest buffers: directory blocks and clusters of inodes of 64 KiB.
const MOST_BLOCKS: u16 = 128;

/// The words of a map are at most these: those of 65,536 basic blocks, more than an item can name.
const MOST_WORDS: usize = (1 << 16) * BLOCK / CHUNK / WORD_CHUNKS;

/// The start of a buffer's first region; the words of its map follow.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct BufferFormat {
    head: ItemHead,
    flags: le::U16,
    len: le::U16,
    blkno: le::U64,
    map_size: le::U32,
}

const _: () = assert!(size_of::<BufferFormat>() == 20 && align_of::<BufferFormat>() == 1);

bitflags::bitflags! {
    /// What a buffer is, with its type in the upper 5 bits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsBufferFlags: u16 {
        /// Inodes, of which only the chains of unlinked ones are replayed.
        const INODES = 1;
        /// The block was freed: what was logged of it before is not replayed.
        const CANCEL = 2;
        /// Quota records of users.
        const USER_QUOTA = 4;
        /// Quota records of projects.
        const PROJECT_QUOTA = 8;
        /// Quota records of groups.
        const GROUP_QUOTA = 16;
        /// The type, and bits without a meaning.
        const _ = !0;
    }
}

macro_rules! buffer_types {
    ($(#[doc = $doc:literal] $name:ident = $number:literal,)+) => {
        /// What a block is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum XfsBufferType {
            $(#[doc = $doc] $name = $number,)+
        }

        impl XfsBufferFlags {
            /// The type of the block; `None` when it is unknown or not said.
            #[must_use]
            pub fn block_type(self) -> Option<XfsBufferType> {
                match self.bits() >> 11 {
                    $($number => Some(XfsBufferType::$name),)+
                    _ => None,
                }
            }
        }
    };
}

buffer_types! {
    /// Quota records of users.
    UserDquot = 1,
    /// Quota records of projects.
    ProjectDquot = 2,
    /// Quota records of groups.
    GroupDquot = 3,
    /// A block of a tree.
    Btree = 4,
    /// An AGF.
    Agf = 5,
    /// An AGFL.
    Agfl = 6,
    /// An AGI.
    Agi = 7,
    /// Inodes.
    Inodes = 8,
    /// The target of a symbolic link.
    Symlink = 9,
    /// A directory of one block.
    DirectoryBlock = 10,
    /// Entries of a directory.
    DirectoryData = 11,
    /// The free space of a directory.
    DirectoryFree = 12,
    /// The only leaf of a directory.
    DirectoryLeaf = 13,
    /// A leaf below a node of a directory.
    DirectoryLeafOfNode = 14,
    /// A node of a directory or of attributes.
    Node = 15,
    /// A leaf of attributes.
    AttributeLeaf = 16,
    /// The value of an attribute.
    AttributeValue = 17,
    /// A superblock.
    Superblock = 18,
    /// The bitmap of a realtime device.
    RealtimeBitmap = 19,
    /// The summary of a realtime device.
    RealtimeSummary = 20,
}

impl XfsBufferFlags {
    /// The flags of a block of this type.
    #[must_use]
    pub fn of(block_type: XfsBufferType) -> Self {
        Self::from_bits_retain(u16::from(block_type as u8) << 11)
    }
}

/// Chunks of a buffer that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsBufferRun<'a> {
    /// Where they lie in the buffer, in bytes.
    pub offset: usize,
    /// Their bytes.
    pub data: &'a [u8],
}

/// Parts of a block.
///
/// A buffer of several extents of the device, such as a large directory block, is one such item an
/// extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsBufferItem<'a> {
    /// What it is.
    pub flags: XfsBufferFlags,
    /// Where it lies.
    pub place: BasicBlock,
    /// Its basic blocks.
    pub blocks: u16,
    map: &'a [le::U32],
    data: XfsRegions<'a>,
}

impl<'a> XfsBufferItem<'a> {
    pub(super) fn parse(first: &'a [u8], regions: XfsRegions<'a>) -> Result<Self, Malformed> {
        let format = view::<BufferFormat>(first)?;
        let words = format.map_size.get() as usize;
        let rest = first.get(size_of::<BufferFormat>()..).unwrap_or_default();
        let map = <[le::U32]>::ref_from_prefix_with_elems(rest, words).ok();
        let Some((map, _)) = map.filter(|_| words <= MOST_WORDS) else {
            return Err(bad_item(format!("a map of {words} words in {} bytes", rest.len())));
        };
        let data = regions.split_at(1).map_or(regions, |(_, data)| data);
        let flags = XfsBufferFlags::from_bits_retain(format.flags.get());
        let place = BasicBlock(format.blkno.get());
        let item = Self { flags, place, blocks: format.len.get(), map, data };
        item.prove_runs()?;
        Ok(item)
    }

    /// Proves that the regions are those of the map. A run of the map may be in several regions:
    /// the kernel cuts it where the memory of the buffer is not contiguous.
    fn prove_runs(&self) -> Result<(), Malformed> {
        let size = usize::from(self.blocks) * BLOCK;
        let mut chunk = self.next_chunk(0);
        for data in self.data.iter() {
            let Some(start) = chunk else {
                return Err(bad_item(format!("{} bytes of data behind its map", data.len())));
            };
            let end = start + data.len() / CHUNK;
            let is_run = (start..end).all(|chunk| self.is_logged(chunk));
            if data.is_empty() || !data.len().is_multiple_of(CHUNK) || !is_run || end * CHUNK > size
            {
                return Err(bad_item(format!(
                    "{} bytes of data at {} of {size}",
                    data.len(),
                    start * CHUNK
                )));
            }
            chunk = self.next_chunk(end);
        }
        chunk.map_or(Ok(()), |chunk| {
            Err(bad_item(format!("no data for its byte {} of {size}", chunk * CHUNK)))
        })
    }

    fn is_logged(&self, chunk: usize) -> bool {
        has_chunk(self.map, chunk)
    }

    /// The first chunk from `from` on that the map has.
    fn next_chunk(&self, from: usize) -> Option<usize> {
        (from..self.map.len() * WORD_CHUNKS).find(|&chunk| self.is_logged(chunk))
    }

    /// What was logged, in ascending order.
    pub fn runs(&self) -> impl Iterator<Item = XfsBufferRun<'a>> {
        let item = *self;
        let mut from = 0;
        item.data.iter().map_while(move |data| {
            let start = item.next_chunk(from)?;
            from = start + data.len() / CHUNK;
            Some(XfsBufferRun { offset: start * CHUNK, data })
        })
    }

    /// What a buffer of inodes ([`XfsBufferFlags::INODES`]) says of the chains of unlinked inodes:
    /// the index of an inode in the buffer, and the one behind it in its chain. Nothing else of it
    /// is replayed.
    pub fn unlinked(&self, inode_size: usize) -> impl Iterator<Item = (usize, AgIno)> {
        self.runs().flat_map(move |run| {
            let inode_size = inode_size.max(1);
            let first = run.offset.saturating_sub(NEXT_UNLINKED).div_ceil(inode_size);
            (first..).map_while(move |index| {
                let at = index * inode_size + NEXT_UNLINKED - run.offset;
                let (next, _) = U32::ref_from_prefix(run.data.get(at..)?).ok()?;
                Some((index, AgIno(next.get())))
            })
        })
    }

    pub(super) fn check(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        let range = (self.place.0, u64::from(self.blocks));
        let shift = geometry.block_log - 9;
        let all = geometry.blocks << shift;
        let log = geometry.place_of(geometry.log_start).filter(|log| log.0 != 0);
        let is_in_log = log
            .is_some_and(|log| overlaps(range, (log.0, u64::from(geometry.log_blocks) << shift)));
        if range.1 == 0
            || self.blocks > MOST_BLOCKS
            || range.0 >= all
            || range.1 > all - range.0
            || is_in_log
        {
            return Err(bad_item(format!("a buffer of {} blocks at {}", range.1, range.0)));
        }
        Ok(())
    }

    pub(super) fn encode(&self, to: &mut XfsLogVector) {
        let regions = 1 + self.data.len();
        encode_format(self.flags, self.place, self.blocks, regions, self.map.as_bytes(), to);
        for data in self.data.iter() {
            to.push(&[data]);
        }
    }
}

/// Adds the item of a buffer that holds `bytes`, of which the chunks with their bit set in `dirty`
/// have changed. With [`XfsBufferFlags::CANCEL`] the item has no chunks, whatever has changed.
///
/// # Panics
/// When the buffer has more than 65,535 basic blocks; the largest has 128.
pub fn encode_buffer(
    flags: XfsBufferFlags,
    place: BasicBlock,
    bytes: &[u8],
    dirty: &[le::U32],
    to: &mut XfsLogVector,
) {
    let blocks = u16::try_from(bytes.len() / BLOCK).expect("no buffer is that large");
    let dirty = if flags.contains(XfsBufferFlags::CANCEL) { &[] } else { dirty };
    let regions = 1 + runs(bytes, dirty).count();
    encode_format(flags, place, blocks, regions, dirty.as_bytes(), to);
    for run in runs(bytes, dirty) {
        to.push(&[run.data]);
    }
}

/// The bytes and the regions of the item that [`encode_buffer`] makes.
#[must_use]
pub fn buffer_size(bytes: &[u8], dirty: &[le::U32]) -> (usize, usize) {
    let format = size_of::<BufferFormat>() + size_of_val(dirty);
    runs(bytes, dirty).fold((format, 1), |(len, count), run| (len + run.data.len(), count + 1))
}

/// Brings a vector up to date that [`encode_buffer`] has filled for the same buffer and the same
/// map `dirty`: copies the chunks of `changed`, all of which are in `dirty`, over what it has of
/// them. Returns false when the vector has no place for a chunk.
pub fn patch_buffer(
    bytes: &[u8],
    dirty: &[le::U32],
    changed: &[le::U32],
    vector: &mut XfsLogVector,
) -> bool {
    let format = size_of::<BufferFormat>() + size_of_val(dirty);
    // Chunks that follow each other in the buffer do so in the vector too.
    runs(bytes, changed).all(|run| {
        let before = chunks_before(dirty, run.offset / CHUNK);
        vector.overwrite(format + before * CHUNK, run.data)
    })
}

/// Whether a map has a chunk.
fn has_chunk(map: &[le::U32], chunk: usize) -> bool {
    let word = map.get(chunk / WORD_CHUNKS).map_or(0, |word| word.get());
    word >> (chunk % WORD_CHUNKS) & 1 != 0
}

/// How many chunks in front of `chunk` a map has.
fn chunks_before(map: &[le::U32], chunk: usize) -> usize {
    let (whole, rest) = (chunk / WORD_CHUNKS, chunk % WORD_CHUNKS);
    let below = !(u32::MAX << rest);
    let last = map.get(whole).map_or(0, |word| word.get() & below);
    let words = map.iter().take(whole).map(|word| word.get()).chain([last]);
    words.map(|word| word.count_ones() as usize).sum()
}

/// The first chunk from `from` on, and below `end`, that is in a map (`is_in`), or is not.
fn find_chunk(map: &[le::U32], from: usize, end: usize, is_in: bool) -> Option<usize> {
    let flip = if is_in { 0 } else { u32::MAX };
    let mut wanted = u32::MAX << (from % WORD_CHUNKS);
    for index in from / WORD_CHUNKS..end.div_ceil(WORD_CHUNKS) {
        let word = (map.get(index).map_or(0, |word| word.get()) ^ flip) & wanted;
        if word != 0 {
            let chunk = index * WORD_CHUNKS + word.trailing_zeros() as usize;
            return (chunk < end).then_some(chunk);
        }
        wanted = u32::MAX;
    }
    None
}

/// The runs of `bytes` whose chunks are in the map `dirty`.
fn runs<'a>(bytes: &'a [u8], dirty: &'a [le::U32]) -> impl Iterator<Item = XfsBufferRun<'a>> {
    let chunks = bytes.len() / CHUNK;
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = find_chunk(dirty, from, chunks, true)?;
        let end = find_chunk(dirty, start, chunks, false).unwrap_or(chunks);
        from = end;
        let data = bytes.get(start * CHUNK..end * CHUNK)?;
        Some(XfsBufferRun { offset: start * CHUNK, data })
    })
}

fn encode_format(
    flags: XfsBufferFlags,
    place: BasicBlock,
    blocks: u16,
    regions: usize,
    map: &[u8],
    to: &mut XfsLogVector,
) {
    let regions = u16::try_from(regions).expect("a buffer has at most 65,536 chunks");
    let words = u32::try_from(map.len() / 4).expect("a region is below 4 GiB");
    let format = BufferFormat {
        head: ItemHead::new(XfsItemType::Buffer, regions),
        flags: le::U16::new(flags.bits()),
        len: le::U16::new(blocks),
        blkno: le::U64::new(place.0),
        map_size: le::U32::new(words),
    };
    to.push(&[format.as_bytes(), map]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maps of one word, of several, and shorter than the buffer: word arithmetic finds what a walk
    /// over all chunks finds.
    #[test]
    fn runs_are_those_of_the_map() {
        let mut number = 1_u32;
        let mut next = || {
            number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            [0, u32::MAX, number, number & number.rotate_left(9), number | number << 1]
                [(number >> 13) as usize % 5]
        };
        for round in 0..2000 {
            let len = [1, 8, 32, 33, 100, 128][round % 6];
            let bytes: Vec<u8> =
                (0..len * CHUNK).map(|at| u8::try_from(at / CHUNK).unwrap()).collect();
            let map: Vec<_> = (0..[1, 4][round % 2]).map(|_| le::U32::new(next())).collect();
            let found: Vec<_> = runs(&bytes, &map)
                .flat_map(|run| {
                    let start = run.offset / CHUNK;
                    assert_eq!(usize::from(run.data[0]), start);
                    let end = start + run.data.len() / CHUNK;
                    assert!(end == len || !has_chunk(&map, end), "it is whole");
                    start..end
                })
                .collect();
            let walked: Vec<_> = (0..len).filter(|&chunk| has_chunk(&map, chunk)).collect();
            assert_eq!(found, walked, "{map:?}");
            for chunk in 0..map.len() * WORD_CHUNKS {
                let before = (0..chunk).filter(|&chunk| has_chunk(&map, chunk)).count();
                assert_eq!(chunks_before(&map, chunk), before);
            }
        }
    }

    #[test]
    fn a_patched_vector_is_a_new_one() {
        let dirty = [0xff00_00ff, 0, 0x0180_0001, 1].map(le::U32::new);
        let changed = [0x0100_0081, 0, 0x0100_0000, 1].map(le::U32::new);
        let flags = XfsBufferFlags::of(XfsBufferType::Btree);
        let mut bytes = vec![1; 4 * WORD_CHUNKS * CHUNK];
        let [mut patched, mut fresh] = [XfsLogVector::default(), XfsLogVector::default()];
        encode_buffer(flags, BasicBlock(8), &bytes, &dirty, &mut patched);
        for run in runs(&bytes.clone(), &changed) {
            bytes[run.offset..run.offset + run.data.len()].fill(7);
        }
        assert!(patch_buffer(&bytes, &dirty, &changed, &mut patched));
        encode_buffer(flags, BasicBlock(8), &bytes, &dirty, &mut fresh);
        assert_eq!(patched, fresh);
        assert!(!patch_buffer(&bytes, &dirty, &changed, &mut XfsLogVector::default()));
    }
}
