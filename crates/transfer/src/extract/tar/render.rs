//! One entry of the archive as bytes.

use std::ops::Range;

use offshoot_vfs::{Attr, Code, Error, FileSystem, FileType, Result, Structure};
use tar::EntryType;

use super::header::{BLOCK, Front, pad};
use crate::xattrs::XattrPair;

/// Holes smaller than this, all together, are not worth a sparse entry.
const HOLES_MIN: u64 = 4096;

/// The path of an entry as it stands in the archive.
pub(super) fn entry_path(path: &[u8], file_type: FileType) -> Vec<u8> {
    match file_type {
        FileType::Directory if path.is_empty() => b"./".to_vec(),
        FileType::Directory => [b"./", path, b"/"].concat(),
        _ => [b"./", path].concat(),
    }
}

/// Appends an entry with all of its data, or nothing when there is an error.
pub(super) fn render(
    fs: &dyn FileSystem,
    path: &[u8],
    attr: &Attr,
    xattrs: &[XattrPair],
    out: &mut Vec<u8>,
) -> Result<usize> {
    let mut link = Vec::new();
    let entry_type = match attr.file_type {
        FileType::Regular => return render_regular(fs, path, attr, xattrs, out),
        FileType::Directory => EntryType::Directory,
        FileType::Symlink => {
            link = fs.read_link(attr.file)?;
            EntryType::Symlink
        }
        FileType::CharDevice => EntryType::Char,
        FileType::BlockDevice => EntryType::Block,
        FileType::Fifo => EntryType::Fifo,
        FileType::Socket => {
            return Err(Error::unsupported(Code::Unsupported, "a socket in a tar archive"));
        }
    };
    let path = entry_path(path, attr.file_type);
    Front { entry_type, path: &path, link: &link, attr, size: 0, sparse_size: None, xattrs }
        .write(out);
    Ok(0)
}

/// Appends a further name of a file that is in the archive as `target`.
pub(super) fn render_link(path: &[u8], target: &[u8], attr: &Attr, out: &mut Vec<u8>) {
    let path = entry_path(path, FileType::Regular);
    let target = entry_path(target, FileType::Regular);
    Front {
        entry_type: EntryType::Link,
        path: &path,
        link: &target,
        attr,
        size: 0,
        sparse_size: None,
        xattrs: &[],
    }
    .write(out);
}

/// Appends a regular file: its data is read to where it belongs if the file has no holes, and
/// moved once, inside of `out`, if it has some.
fn render_regular(
    fs: &dyn FileSystem,
    path: &[u8],
    attr: &Attr,
    xattrs: &[XattrPair],
    out: &mut Vec<u8>,
) -> Result<usize> {
    let front = Regular { path: &entry_path(path, FileType::Regular), attr, xattrs };
    let begin = out.len();
    front.write(out);
    let start = out.len();
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let read = fs.read_data(attr.file, 0..attr.size, &mut |offset, piece| {
        let end = piece_end(offset, piece, attr.size)?;
        match ranges.last_mut() {
            Some(last) if last.end > offset => return Err(out_of_order()),
            Some(last) if last.end == offset => last.end = end,
            _ => ranges.push(offset..end),
        }
        out.extend_from_slice(piece);
        Ok(())
    });
    if let Err(error) = read {
        out.truncate(begin);
        return Err(error);
    }
    let data_len = out.len() - start;
    if attr.size - (data_len as u64) < HOLES_MIN {
        spread(out, start, data_len, &ranges, attr.size)?;
        pad(out, attr.size);
    } else {
        let mut map = SparseMap::default();
        for range in &ranges {
            map.count(range);
        }
        map.count_end(attr.size);
        let mut head = Vec::new();
        front.write_sparse(&mut head, &map);
        let mut text = map.first_line();
        for range in &ranges {
            map_line(&mut text, range);
        }
        map.last_line(&mut text, attr.size);
        pad_map(&mut text);
        head.extend_from_slice(&text);
        out.splice(begin..start, head);
        pad(out, data_len as u64);
    }
    Ok(data_len)
}

/// Puts data that lies together from `start` on to where its ranges are in a file of `size` bytes,
/// and zeros between them.
fn spread(
    out: &mut Vec<u8>,
    start: usize,
    data_len: usize,
    ranges: &[Range<u64>],
    size: u64,
) -> Result<()> {
    if size == data_len as u64 {
        return Ok(());
    }
    let mut gap_end = to_usize(size)?;
    let mut from = data_len;
    out.resize(start + gap_end, 0);
    // From the end, so that nothing is moved over what was not moved yet.
    for range in ranges.iter().rev() {
        let (at, end) = (to_usize(range.start)?, to_usize(range.end)?);
        from -= end - at;
        out.copy_within(start + from..start + from + (end - at), start + at);
        out[start + end..start + gap_end].fill(0);
        gap_end = at;
    }
    out[start..start + gap_end].fill(0);
    Ok(())
}

fn to_usize(number: u64) -> Result<usize> {
    usize::try_from(number)
        .map_err(|_| Error::unsupported(Code::Unsupported, "a file this large in memory"))
}

/// The end of a piece of a file, which must be inside of it.
fn piece_end(offset: u64, piece: &[u8], size: u64) -> Result<u64> {
    offset.checked_add(piece.len() as u64).filter(|&end| end <= size).ok_or_else(out_of_order)
}

pub(super) fn out_of_order() -> Error {
    Error::corrupt(Structure::FileExtent, "data outside of the range that was read")
}

/// What the headers of a regular file are made from.
pub(super) struct Regular<'a> {
    /// The path in the archive.
    pub(super) path: &'a [u8],
    /// The attributes.
    pub(super) attr: &'a Attr,
    /// The extended attributes.
    pub(super) xattrs: &'a [XattrPair],
}

impl Regular<'_> {
    /// Appends the headers of a file whose data follows as it is.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        self.front(self.attr.size, None).write(out);
    }

    /// Appends the headers of a file of which only the ranges in `map` follow, after the map.
    pub(super) fn write_sparse(&self, out: &mut Vec<u8>, map: &SparseMap) {
        self.front(map.text_bytes() + map.data_bytes, Some(self.attr.size)).write(out);
    }

    fn front(&self, size: u64, sparse_size: Option<u64>) -> Front<'_> {
        let Self { path, attr, xattrs } = *self;
        Front { entry_type: EntryType::Regular, path, link: b"", attr, size, sparse_size, xattrs }
    }
}

/// The size of the map of a sparse file, which stands in front of the data: the number
/// of ranges, then offset and length of each, every number on a line of its own, padded to a block.
/// A hole at the end is an empty range behind it.
///
/// The size is needed before the first line, and the map of a hostile file may be long, so it is
/// counted first and written later.
#[derive(Default)]
pub(super) struct SparseMap {
    ranges: u64,
    lines_bytes: u64,
    end: u64,
    has_end_hole: bool,
    /// How much data the ranges hold.
    pub(super) data_bytes: u64,
}

impl SparseMap {
    /// Counts a range.
    pub(super) fn count(&mut self, range: &Range<u64>) {
        let mut line = Vec::with_capacity(44);
        map_line(&mut line, range);
        self.ranges += 1;
        self.lines_bytes += line.len() as u64;
        self.data_bytes += range.end - range.start;
        self.end = range.end;
    }

    /// Counts the hole at the end, if there is one.
    pub(super) fn count_end(&mut self, size: u64) {
        if self.end < size {
            self.count(&(size..size));
            self.has_end_hole = true;
        }
    }

    /// The length of the map with its padding.
    pub(super) fn text_bytes(&self) -> u64 {
        (self.first_line().len() as u64 + self.lines_bytes).next_multiple_of(BLOCK as u64)
    }

    /// Whether everything but a few bytes is data.
    pub(super) fn is_dense(&self, size: u64) -> bool {
        size - self.data_bytes < HOLES_MIN
    }

    /// The line with the number of ranges.
    pub(super) fn first_line(&self) -> Vec<u8> {
        format!("{}\n", self.ranges).into_bytes()
    }

    /// Appends the line for the hole at the end, if it was counted.
    pub(super) fn last_line(&self, text: &mut Vec<u8>, size: u64) {
        if self.has_end_hole {
            map_line(text, &(size..size));
        }
    }
}

/// Appends the two lines of a range.
pub(super) fn map_line(text: &mut Vec<u8>, range: &Range<u64>) {
    text.extend_from_slice(format!("{}\n{}\n", range.start, range.end - range.start).as_bytes());
}

/// Fills up the last block of a map.
pub(super) fn pad_map(text: &mut Vec<u8>) {
    text.resize(text.len().next_multiple_of(BLOCK), 0);
}
