//! Records: what one write brings to the ring.
//!
//! A record is a header of 512 bytes, further headers when its buffer has more than 32 KiB, and a
//! body. The first word of every basic block of it is the cycle, so that a reader sees how far a
//! write came. What stood in those words of the body is kept in the headers, 64 words each: the
//! body is *packed*. A record that reaches the end of the ring goes on at its start, with the next
//! cycle.

use std::mem::offset_of;

use uuid::Uuid;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ring::{XfsLogRing, previous_cycle};
use super::{BLOCK, BLOCK_BYTES, bad_record};
use crate::{Lsn, Malformed, U32, U64};

/// The first word of a record.
pub const MAGIC: u32 = 0xfeed_babe;

/// How many words a header keeps.
const WORDS: usize = 64;

/// The bytes of a log buffer that one header serves.
const HEADER_SERVES: u32 = 32 << 10;

/// The largest log buffer.
pub const BUFFER_MAX: u32 = 256 << 10;

/// The byte order of little-endian Linux, as headers name it.
const LITTLE_ENDIAN: u32 = 1;

/// The bytes of a header that its checksum covers: as 64-bit machines have it, and i386.
const CHECKED: [usize; 2] = [328, 324];

/// The bytes of a further header that the checksum covers.
const CHECKED_FURTHER: usize = 4 + 4 * WORDS;

/// The header of a record.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RecordHeader {
    magicno: U32,
    cycle: U32,
    version: U32,
    len: U32,
    lsn: U64,
    tail_lsn: U64,
    crc: [u8; 4],
    prev_block: U32,
    num_logops: U32,
    cycle_data: [U32; WORDS],
    fmt: U32,
    fs_uuid: [u8; 16],
    size: U32,
    zeros: [u8; 188],
}

const _: () = {
    assert!(HEADER_SERVES as usize == WORDS * BLOCK);
    assert!(size_of::<RecordHeader>() == BLOCK && align_of::<RecordHeader>() == 1);
    assert!(offset_of!(RecordHeader, crc) == 32 && offset_of!(RecordHeader, cycle_data) == 44);
    assert!(offset_of!(RecordHeader, fmt) == 300 && offset_of!(RecordHeader, size) == 320);
};

/// What the header of a record says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsLogRecord {
    /// Where the record begins, and its cycle.
    pub lsn: Lsn,
    /// Where recovery had to begin when the record was written.
    pub tail: Lsn,
    /// The version of the log: 1 has only buffers of 32 KiB.
    pub version: u32,
    /// The bytes of the body, with its padding.
    pub len: u32,
    /// Where the record before this one begins; `None` in the first one after a mount.
    pub previous: Option<u32>,
    /// How many ops the body holds.
    pub ops: u32,
    /// The byte order of items, as the header names it.
    pub byte_order: u32,
    /// The id of the volume. It is `uuid` of the superblock also where `meta_uuid` is on. IRIX
    /// left it nil.
    pub uuid: Uuid,
    /// The bytes of the log buffer that the record was written from.
    pub buffer: u32,
}

/// What the checksum of a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XfsLogChecksum {
    /// The record holds the checksum of its contents.
    Right,
    /// The record holds another checksum.
    Wrong,
    /// The record holds none: `mkfs.xfs` and old kernels on V4 volumes write such records. The
    /// search for the head accepts them. Recovery of a V5 volume does not.
    Missing,
}

/// Whether a basic block begins with the word of a header.
#[must_use]
pub fn is_header(block: &[u8]) -> bool {
    block.first_chunk() == Some(&MAGIC.to_be_bytes())
}

/// The cycle that a basic block of the ring carries, header or not.
#[must_use]
pub fn cycle_of(block: &[u8]) -> u32 {
    let word = |at: usize| U32::ref_from_prefix(block.get(at..).unwrap_or_default());
    let first = word(0).map_or(0, |(word, _)| word.get());
    if first != MAGIC {
        return first;
    }
    word(4).map_or(0, |(word, _)| word.get())
}

/// The length of the body of a record with `used` bytes of ops, when the record with its headers
/// has to fill units of `unit` bytes: `logsunit` of the superblock, and at least a sector.
#[must_use]
pub fn padded_len(used: usize, headers: u32, unit: usize) -> usize {
    let headers = headers as usize * BLOCK;
    (headers + used).next_multiple_of(unit.max(BLOCK)) - headers
}

/// How many headers the records of a log buffer with this many bytes have.
#[must_use]
pub fn header_count(version: u32, buffer: u32) -> u32 {
    if version < 2 { 1 } else { buffer.div_ceil(HEADER_SERVES).max(1) }
}

impl XfsLogRecord {
    /// The first record of a new log: one without a body, in a buffer of the least size.
    #[must_use]
    pub fn first(lsn: Lsn, uuid: Uuid) -> Self {
        Self {
            lsn,
            tail: lsn,
            version: 2,
            len: 0,
            previous: None,
            ops: 0,
            byte_order: LITTLE_ENDIAN,
            uuid,
            buffer: HEADER_SERVES,
        }
    }

    /// What the header in the basic block `block` says.
    ///
    /// The caller reads [`Self::block_count`] blocks then, so the numbers that it depends on are
    /// proved. [`Self::check_place`] and [`Self::check_readable`] prove more.
    ///
    /// # Errors
    /// The first number that is out of bounds.
    pub fn parse(block: &[u8]) -> Result<Self, Malformed> {
        let Ok((header, _)) = RecordHeader::ref_from_prefix(block) else {
            return Err(bad_record(format!("{} bytes are no header", block.len())));
        };
        let version = header.version.get();
        if header.magicno.get() != MAGIC {
            return Err(bad_record(format!(
                "magic {MAGIC:#x} expected, {:#x} found",
                header.magicno
            )));
        }
        if !(1..=2).contains(&version) {
            return Err(bad_record(format!("version 1 or 2 expected, {version} found")));
        }
        let buffer = if version == 1 { HEADER_SERVES } else { header.size.get() };
        if buffer == 0 || buffer > BUFFER_MAX {
            return Err(bad_record(format!(
                "a log buffer of at most {BUFFER_MAX} bytes expected, {buffer} found"
            )));
        }
        let len = header.len.get();
        // `mkfs.xfs` named a buffer of 32 KiB also where its one op filled a larger unit.
        let ops = header.num_logops.get();
        let most = if ops == 1 { BUFFER_MAX } else { buffer };
        if len == 0 || len > most {
            return Err(bad_record(format!(
                "a body of at most {most} bytes expected, {len} found"
            )));
        }
        let record = Self {
            lsn: Lsn(header.lsn.get()),
            tail: Lsn(header.tail_lsn.get()),
            version,
            len,
            previous: Some(header.prev_block.get()).filter(|&previous| previous != u32::MAX),
            ops,
            byte_order: header.fmt.get(),
            uuid: Uuid::from_bytes(header.fs_uuid),
            buffer,
        };
        if header.cycle.get() != record.lsn.cycle() {
            return Err(bad_record(format!(
                "cycle {} in a record of cycle {}",
                header.cycle,
                record.lsn.cycle()
            )));
        }
        Ok(record)
    }

    /// Proves that the record is the one at `block` of the ring, and that its tail is in the ring.
    ///
    /// # Errors
    /// The first number that leads elsewhere.
    pub fn check_place(&self, ring: XfsLogRing, block: u32) -> Result<(), Malformed> {
        if self.lsn.block() != block || !ring.has(self.lsn) {
            return Err(bad_record(format!("at block {block}, but it says {}", self.lsn)));
        }
        if self.block_count() > ring.blocks() {
            return Err(bad_record(format!("{} blocks, more than the log", self.block_count())));
        }
        if ring.distance(self.tail, self.lsn).is_none() {
            let Self { tail, lsn, .. } = self;
            return Err(bad_record(format!("{tail} is no tail of a record at {lsn}")));
        }
        Ok(())
    }

    /// Proves that the items of the record can be read: it belongs to the volume with `uuid` in its
    /// superblock, and is of a little-endian machine.
    ///
    /// # Errors
    /// What is foreign about it.
    pub fn check_readable(&self, uuid: Uuid) -> Result<(), Malformed> {
        if self.byte_order != LITTLE_ENDIAN {
            let order = match self.byte_order {
                2 => "of a big-endian Linux machine",
                3 => "of an IRIX machine",
                _ => "of an unknown byte order",
            };
            return Err(bad_record(format!("{order} ({})", self.byte_order)));
        }
        if self.uuid != uuid {
            return Err(bad_record(format!("of volume {uuid} expected, of {} found", self.uuid)));
        }
        Ok(())
    }

    /// The basic blocks of its headers.
    #[must_use]
    pub fn header_blocks(&self) -> u32 {
        header_count(self.version, self.buffer)
    }

    /// The basic blocks of the whole record.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.header_blocks() + self.len.div_ceil(BLOCK_BYTES)
    }

    /// The whole record in `blocks`, as headers and body.
    fn split<'a>(&self, blocks: &'a [u8]) -> Result<(&'a [u8], &'a [u8]), Malformed> {
        let need = self.block_count() as usize * BLOCK;
        let record = blocks
            .get(..need)
            .and_then(|record| record.split_at_checked(self.header_blocks() as usize * BLOCK));
        record
            .ok_or_else(|| bad_record(format!("{} bytes, but the record has {need}", blocks.len())))
    }

    /// What the checksum of the record in `blocks` says. The body is still packed.
    ///
    /// Both lengths of a header are accepted: that of 64-bit machines, and that of i386.
    ///
    /// # Errors
    /// When `blocks` are fewer than the record has.
    pub fn checksum(&self, blocks: &[u8]) -> Result<XfsLogChecksum, Malformed> {
        let (headers, body) = self.split(blocks)?;
        let body = body.get(..self.len as usize).unwrap_or(body);
        let stored = headers.get(offset_of!(RecordHeader, crc)..).and_then(<[u8]>::first_chunk);
        let stored = u32::from_le_bytes(*stored.unwrap_or(&[0; 4]));
        if stored == 0 {
            return Ok(XfsLogChecksum::Missing);
        }
        let is_right = CHECKED.iter().any(|&checked| crc(headers, body, checked) == stored);
        Ok(if is_right { XfsLogChecksum::Right } else { XfsLogChecksum::Wrong })
    }

    /// Puts the words back that cycles stand for, in the record that `blocks` holds, and returns
    /// its body.
    ///
    /// # Errors
    /// When `blocks` are fewer than the record has.
    pub fn unpack<'a>(&self, blocks: &'a mut [u8]) -> Result<&'a [u8], Malformed> {
        self.split(blocks)?;
        let header_len = self.header_blocks() as usize * BLOCK;
        let (headers, body) = blocks.split_at_mut(header_len);
        let body_len = (self.len as usize).next_multiple_of(BLOCK).min(body.len());
        let (body, _) = body.split_at_mut(body_len);
        // A record of `mkfs.xfs` may have more blocks than its headers have words. They are zero
        // but for the cycle, and lie behind the only op.
        for (block, word) in body.chunks_mut(BLOCK).zip(words(headers)) {
            if let Some(first) = block.first_chunk_mut() {
                *first = word.to_bytes();
            }
        }
        let body = &*body;
        Ok(body.get(..self.len as usize).unwrap_or(body))
    }

    /// Makes a record of `blocks`: room for the headers, then a body of [`Self::len`] bytes with
    /// zeros as its padding. Packs the body and writes the headers with their checksum.
    ///
    /// # Errors
    /// When the numbers do not fit each other: the length is no whole number of basic blocks or
    /// exceeds the buffer, or `blocks` has another length.
    pub fn seal(&self, ring: XfsLogRing, blocks: &mut [u8]) -> Result<(), Malformed> {
        let header_len = self.header_blocks() as usize * BLOCK;
        let fits = self.len.is_multiple_of(BLOCK_BYTES)
            && blocks.len() == header_len + self.len as usize
            && blocks.len() <= self.buffer as usize
            && self.buffer <= BUFFER_MAX;
        if !fits {
            return Err(bad_record(format!(
                "{} bytes cannot hold a body of {} and its headers in a buffer of {}",
                blocks.len(),
                self.len,
                self.buffer
            )));
        }
        let (headers, body) = blocks.split_at_mut(header_len);
        headers.fill(0);
        // Every block but the first one begins with the cycle that its place in the ring has.
        let cycle_at = |index: usize| {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            U32::new(ring.advance(self.lsn, index).cycle())
        };
        let header_blocks = headers.len() / BLOCK;
        let packed = body.chunks_exact_mut(BLOCK).zip(words_mut(headers)).enumerate();
        for (index, (block, word)) in packed {
            if let Some(first) = block.first_chunk_mut() {
                *word = U32::from_bytes(*first);
                *first = cycle_at(header_blocks + index).to_bytes();
            }
        }
        for (index, further) in headers.chunks_exact_mut(BLOCK).enumerate().skip(1) {
            if let Some(first) = further.first_chunk_mut() {
                *first = cycle_at(index).to_bytes();
            }
        }
        self.write_header(headers);
        let crc = crc(headers, body, CHECKED[0]);
        if let Ok((header, _)) = RecordHeader::mut_from_prefix(headers) {
            header.crc = crc.to_le_bytes();
        }
        Ok(())
    }

    /// The `count` headers that stand for no record and go behind the head of a ring whose last
    /// record is `self`. Each has the cycle before that of its place, so no older record there is
    /// ever taken for a new one.
    ///
    /// For example, 3 of them from block 6 of cycle 5 on, in a ring of 8 blocks, have cycles 4, 4
    /// and, at its start, 5.
    pub fn stamps(
        &self,
        ring: XfsLogRing,
        head: Lsn,
        count: u32,
    ) -> impl Iterator<Item = [u8; BLOCK]> {
        let like = self.clone();
        (0..count).map(move |index| {
            let place = ring.advance(head, index);
            let cycle = previous_cycle(place.cycle()).unwrap_or(0);
            let stamp = Self {
                lsn: Lsn::new(cycle, place.block()),
                len: 0,
                previous: Some(0),
                ops: 0,
                byte_order: LITTLE_ENDIAN,
                buffer: 0,
                ..like.clone()
            };
            let mut block = [0; BLOCK];
            stamp.write_header(&mut block);
            block
        })
    }

    /// Writes all fields of the header but its words and its checksum.
    fn write_header(&self, headers: &mut [u8]) {
        let Ok((header, _)) = RecordHeader::mut_from_prefix(headers) else { return };
        header.magicno = U32::new(MAGIC);
        header.cycle = U32::new(self.lsn.cycle());
        header.version = U32::new(self.version);
        header.len = U32::new(self.len);
        header.lsn = U64::new(self.lsn.0);
        header.tail_lsn = U64::new(self.tail.0);
        header.prev_block = U32::new(self.previous.unwrap_or(u32::MAX));
        header.num_logops = U32::new(self.ops);
        header.fmt = U32::new(self.byte_order);
        header.fs_uuid = *self.uuid.as_bytes();
        header.size = U32::new(self.buffer);
    }
}

/// The words that headers keep, in the order of the body's blocks.
fn words(headers: &[u8]) -> impl Iterator<Item = U32> {
    let first = RecordHeader::ref_from_prefix(headers).ok().map(|(header, _)| header.cycle_data);
    let further = headers.chunks_exact(BLOCK).skip(1).filter_map(|further| {
        let (words, _) = <[U32; WORDS]>::ref_from_prefix(further.get(4..)?).ok()?;
        Some(*words)
    });
    first.into_iter().chain(further).flatten()
}

/// The same, to be written.
fn words_mut(headers: &mut [u8]) -> impl Iterator<Item = &mut U32> {
    headers.chunks_exact_mut(BLOCK).enumerate().flat_map(|(index, header)| {
        let at = if index == 0 { offset_of!(RecordHeader, cycle_data) } else { 4 };
        let words = header.get_mut(at..).and_then(|header| {
            <[U32; WORDS]>::mut_from_prefix(header).ok().map(|(words, _)| words)
        });
        words.into_iter().flatten()
    })
}

/// The checksum over `checked` bytes of the first header, those further ones that keep words of
/// this body, and the packed body. For example, a body of 192,512 bytes has words in 6 headers, so
/// the last 2 of 8 are not covered.
fn crc(headers: &[u8], body: &[u8], checked: usize) -> u32 {
    let field = offset_of!(RecordHeader, crc);
    let part = |from: usize, to: usize| headers.get(from..to).unwrap_or_default();
    let crc = crc32c::crc32c(part(0, field));
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    let crc = crc32c::crc32c_append(crc, part(field + 4, checked));
    let used = body.len().div_ceil(WORDS * BLOCK);
    let crc = headers.chunks_exact(BLOCK).take(used).skip(1).fold(crc, |crc, further| {
        crc32c::crc32c_append(crc, further.get(..CHECKED_FURTHER).unwrap_or_default())
    });
    crc32c::crc32c_append(crc, body)
}
