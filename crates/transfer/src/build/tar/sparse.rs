//! Where the data of a sparse file belongs. Only what is no hole follows the header.
//!
//! | format | where the ranges are |
//! |---|---|
//! | that of GNU tar | in the header, and in blocks behind it |
//! | pax 0.0 | in pairs of records `GNU.sparse.offset` and `GNU.sparse.numbytes` |
//! | pax 0.1 | in one record `GNU.sparse.map`, with commas between the numbers |
//! | pax 1.0 | in front of the data, every number on a line |

use std::io::Read;
use std::ops::Range;

use super::header::{Header, number};
use super::records::{decimal, is_wrong, parsed};
use super::{BLOCK, SourceProblem};

/// The most ranges of one file.
const RANGES_MAX: usize = 4 << 20;

/// The most digits of a number, with its end.
const DIGITS_MAX: usize = 24;

/// What records say of a sparse file.
#[derive(Clone, Default)]
pub(super) struct SparseRecords {
    /// Its path. The one in the header is for programs that know nothing of sparse files.
    pub(super) name: Option<Vec<u8>>,
    /// Its length, holes included.
    pub(super) size: Option<u64>,
    major: Option<u64>,
    minor: Option<u64>,
    /// Offsets and lengths, one after the other.
    numbers: Vec<u64>,
    has_map: bool,
}

impl SparseRecords {
    /// Sets what the key `GNU.sparse.KEY` is for.
    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), SourceProblem> {
        let required = || parsed(key, value, decimal)?.ok_or_else(|| is_wrong(key));
        match key {
            b"name" => self.name = Some(value.to_vec()).filter(|name| !name.is_empty()),
            b"size" | b"realsize" => self.size = parsed(key, value, decimal)?,
            b"major" => self.major = parsed(key, value, decimal)?,
            b"minor" => self.minor = parsed(key, value, decimal)?,
            b"map" => {
                self.has_map = true;
                self.numbers.clear();
                for digits in value.split(|&byte| byte == b',').filter(|text| !text.is_empty()) {
                    self.push(decimal(digits).ok_or_else(|| is_wrong(key))?)?;
                }
            }
            b"offset" if self.numbers.len().is_multiple_of(2) => {
                self.has_map = true;
                self.push(required()?)?;
            }
            b"numbytes" if !self.numbers.len().is_multiple_of(2) => self.push(required()?)?,
            b"offset" | b"numbytes" => return Err(is_wrong(key)),
            // The number of ranges, which are counted here.
            b"numblocks" => self.has_map = true,
            _ => {}
        }
        Ok(())
    }

    fn push(&mut self, number: u64) -> Result<(), SourceProblem> {
        if self.numbers.len() >= 2 * RANGES_MAX {
            return Err(too_many());
        }
        self.numbers.push(number);
        Ok(())
    }

    pub(super) fn held_bytes(&self) -> usize {
        self.numbers.len() * 8 + self.name.as_ref().map_or(0, Vec::len)
    }

    /// Whether the ranges are in front of the data.
    pub(super) fn is_version_1(&self) -> bool {
        self.major == Some(1) && self.minor.unwrap_or_default() == 0
    }

    /// The ranges that the records name; `None` for a file that is not sparse.
    pub(super) fn map(&self) -> Result<Option<Vec<Range<u64>>>, SourceProblem> {
        if self.major.is_some_and(|major| major > 1) || self.minor.is_some_and(|minor| minor > 1) {
            return Err(SourceProblem::Refused("a newer format of sparse files".to_owned()));
        }
        if !self.has_map {
            return Ok(None);
        }
        let (pairs, []) = self.numbers.as_chunks::<2>() else { return Err(damaged()) };
        pairs.iter().map(|&[offset, len]| range(offset, len)).collect::<Result<_, _>>().map(Some)
    }
}

fn too_many() -> SourceProblem {
    SourceProblem::Refused(format!("a sparse file of more than {RANGES_MAX} ranges"))
}

fn damaged() -> SourceProblem {
    SourceProblem::Damaged("the map of a sparse file".to_owned())
}

fn range(offset: u64, len: u64) -> Result<Range<u64>, SourceProblem> {
    Ok(offset..offset.checked_add(len).ok_or_else(damaged)?)
}

/// Reads the ranges of the format of GNU tar.
pub(super) fn read_gnu(
    header: &Header,
    mut input: impl Read,
) -> Result<Vec<Range<u64>>, SourceProblem> {
    let mut ranges = Vec::new();
    let (first, mut has_more) = header.gnu_ranges();
    gnu_ranges(first, &mut ranges)?;
    while has_more {
        let mut block = [0; BLOCK];
        input.read_exact(&mut block)?;
        gnu_ranges(block.get(..504).unwrap_or_default(), &mut ranges)?;
        has_more = block.get(504).is_some_and(|&byte| byte != 0);
    }
    Ok(ranges)
}

/// Adds ranges of twelve digits offset and twelve digits length each, up to an empty one.
fn gnu_ranges(fields: &[u8], ranges: &mut Vec<Range<u64>>) -> Result<(), SourceProblem> {
    for field in fields.chunks_exact(24) {
        let (offset, len) = field.split_at(12);
        if len.first().is_none_or(|&byte| byte == 0) {
            break;
        }
        if ranges.len() >= RANGES_MAX {
            return Err(too_many());
        }
        let count = |digits| number(digits).and_then(|number| u64::try_from(number).ok());
        let (offset, len) = count(offset).zip(count(len)).ok_or_else(damaged)?;
        ranges.push(range(offset, len)?);
    }
    Ok(())
}

/// Reads the ranges in front of the data, of which `stored` bytes follow with them. Gives how many
/// bytes they take.
pub(super) fn read_version_1(
    input: impl Read,
    stored: u64,
) -> Result<(Vec<Range<u64>>, u64), SourceProblem> {
    let mut lines = MapLines { input, block: [0; BLOCK], at: BLOCK, read: 0, stored };
    let count = lines.number()?;
    if count > RANGES_MAX as u64 {
        return Err(too_many());
    }
    let mut ranges = Vec::new();
    for _ in 0..count {
        let (offset, len) = (lines.number()?, lines.number()?);
        ranges.push(range(offset, len)?);
    }
    Ok((ranges, lines.read))
}

/// The lines of a map, read by the block.
struct MapLines<R> {
    input: R,
    block: [u8; BLOCK],
    at: usize,
    /// How many bytes were read.
    read: u64,
    stored: u64,
}

impl<R: Read> MapLines<R> {
    fn byte(&mut self) -> Result<u8, SourceProblem> {
        if self.at == BLOCK {
            if self.read + BLOCK as u64 > self.stored {
                return Err(damaged());
            }
            self.input.read_exact(&mut self.block)?;
            (self.read, self.at) = (self.read + BLOCK as u64, 0);
        }
        let byte = self.block.get(self.at).copied().unwrap_or_default();
        self.at += 1;
        Ok(byte)
    }

    fn number(&mut self) -> Result<u64, SourceProblem> {
        let mut digits = Vec::with_capacity(DIGITS_MAX);
        loop {
            match self.byte()? {
                b'\n' => return decimal(&digits).ok_or_else(damaged),
                digit if digits.len() < DIGITS_MAX => digits.push(digit),
                _ => return Err(damaged()),
            }
        }
    }
}

/// The ranges of a file of `size` bytes of which `stored` bytes follow, in their order, none of
/// them empty.
pub(super) fn checked(
    mut ranges: Vec<Range<u64>>,
    size: u64,
    stored: u64,
) -> Result<Vec<Range<u64>>, SourceProblem> {
    let (mut end, mut bytes) = (0, 0);
    for range in &ranges {
        if range.start < end || range.end > size {
            return Err(damaged());
        }
        end = range.end;
        bytes += range.end - range.start;
    }
    if bytes != stored {
        return Err(damaged());
    }
    ranges.retain(|range| !range.is_empty());
    Ok(ranges)
}
