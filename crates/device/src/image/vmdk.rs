//! VMware's VMDK: files with the bytes of a disk, its *extents*, and a text that names them, the
//! *descriptor*.
//!
//! ```text
//!   disk.vmdk   RW 4194304 FLAT "disk-f001.vmdk" 0     disk  | disk-f001.vmdk | disk-f002.vmdk |
//!               RW 1048576 FLAT "disk-f002.vmdk" 0           0             2 GiB          2.5 GiB
//! ```
//!
//! | image | its descriptor | its extents | written |
//! |---|---|---|---|
//! | monolithic sparse | in the extent | one [sparse] file | yes |
//! | stream-optimised | in the extent | one sparse file with deflated grains | no |
//! | flat, in one file or pieces of 2 GiB | a small file | the bytes of the disk | yes |
//! | sparse in pieces of 2 GiB | a small file | sparse files | yes |
//!
//! An extent of type ZERO has no file: it reads as zeros, and writes to it fail. An image with a
//! parent is refused.
//!
//! # The content id
//!
//! A child image stores the number behind `CID=` of its parent, to detect that the parent changed.
//! So the first write to an opened image changes the number, and flushes that before it changes
//! anything else.
//!
//! Source: VMware, "Virtual Disk Format 5.0", 2011.

mod sparse;
mod text;

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;

use super::unsupported;
use crate::fields::invalid;
use crate::{BlockDevice, WindowDevice, request_range, together, total_bytes};
pub(super) use sparse::COWD;
pub use sparse::open_vmdk;
use text::{ContentId, DescriptorText, ExtentLine};

const SECTOR_BYTES: u64 = 512;

/// The largest descriptor in bytes. A disk with many extents needs a few KiB.
const DESCRIPTOR_BYTES_MAX: u64 = 64 << 10;

/// How many extents a disk may have. Each needs an open file.
const EXTENTS_MAX: usize = 256;

/// The next step for a VMDK that we cannot read or write.
const WAY: &str = "qemu-img convert -O qcow2 IN OUT makes one image of all";

/// The descriptor of a VMDK, in a file of its own.
#[derive(Debug)]
pub struct VmdkDescriptor {
    /// The files that it names, each once. The text may name any file of the host, so the caller
    /// decides whether to open them.
    pub files: Vec<VmdkFile>,
    text: DescriptorText,
}

/// A file that a descriptor names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmdkFile {
    /// Its name, relative to the directory of the descriptor.
    pub name: OsString,
    /// Whether a write to the disk makes it longer.
    pub is_growing: bool,
    /// Whether a write to the disk may change it. If not, all extents in it are read-only.
    pub is_written: bool,
}

impl VmdkDescriptor {
    /// Reads the descriptor on `device`.
    ///
    /// # Errors
    /// Those of the device; of kind `InvalidData` for a text that makes no sense, and
    /// `Unsupported`, with the next step, for a kind of disk that this crate cannot read.
    pub fn read(device: &dyn BlockDevice) -> io::Result<Self> {
        // A guest can write the first bytes of a descriptor to its plain disk.
        if device.size_bytes() > DESCRIPTOR_BYTES_MAX {
            return Err(unsupported(
                "it begins as the descriptor of a VMDK does, and is too large for one: if it is \
                 a plain disk, say so with --image-format raw",
            ));
        }
        let text = DescriptorText::read(device, 0, device.size_bytes())?;
        if text.has_parent {
            return Err(unsupported(format!("a VMDK that stands over another is not read: {WAY}")));
        }
        if text.extents.is_empty() || text.extents.len() > EXTENTS_MAX {
            let count = text.extents.len();
            return Err(unsupported(format!(
                "its descriptor names {count} extents, and 1 to {EXTENTS_MAX} are read: {WAY}"
            )));
        }
        let mut files: Vec<VmdkFile> = Vec::new();
        for extent in &text.extents {
            let is_growing = match &*extent.kind {
                "FLAT" | "VMFS" => false,
                "SPARSE" => true,
                "ZERO" => continue,
                _ => return Err(extent.unknown_kind()),
            };
            extent.check_readable()?;
            let name = extent.file.clone();
            let name = name.ok_or_else(|| invalid("an extent in its descriptor has no file"))?;
            let file = VmdkFile { name, is_growing, is_written: extent.is_writable() };
            match files.iter_mut().find(|known| known.name == file.name) {
                None => files.push(file),
                // Two flat extents may be parts of one file. `refuse_overlaps` checks them later.
                Some(known) if !known.is_growing && !is_growing => {
                    known.is_written |= file.is_written;
                }
                Some(_) => return Err(invalid("two of its extents are in one file")),
            }
        }
        Ok(Self { files, text })
    }

    /// Opens the disk. `below` holds this descriptor, and `files` are the files that it names, in
    /// the order of [`files`](Self::files).
    ///
    /// # Errors
    /// Those of the files, and as [`read`](Self::read).
    pub fn open(
        self,
        below: Arc<dyn BlockDevice>,
        files: &[Arc<dyn BlockDevice>],
        is_writable: bool,
    ) -> io::Result<Arc<dyn BlockDevice>> {
        let Self { files: names, text } = self;
        if is_writable {
            text.check_writable()?;
        }
        refuse_overlaps(&text.extents)?;
        let mut pieces = Vec::new();
        let mut end: u64 = 0;
        for extent in text.extents {
            let start = end;
            end = start.checked_add(extent.size_bytes).ok_or_else(|| invalid("it is too large"))?;
            let is_writable = is_writable && extent.is_writable();
            let number = names.iter().position(|file| Some(&file.name) == extent.file.as_ref());
            let file = match (&*extent.kind, number.and_then(|number| files.get(number))) {
                ("ZERO", _) => None,
                ("SPARSE", Some(file)) => {
                    let disk = sparse::open_extent(file.clone(), is_writable)?;
                    Some(window(disk, 0..extent.size_bytes)?)
                }
                (_, Some(file)) => {
                    let part = extent.offset..extent.offset.saturating_add(extent.size_bytes);
                    Some(window(file.clone(), part)?)
                }
                (_, None) => return Err(invalid("a file of one of its extents is missing")),
            };
            pieces.push(ExtentPiece { range: start..end, file, is_writable });
        }
        let (name, content_id) = (below.name().to_owned(), text.content_id);
        Ok(Arc::new(PiecesDevice { below, name, size_bytes: end, content_id, pieces, is_writable }))
    }
}

fn window(file: Arc<dyn BlockDevice>, range: Range<u64>) -> io::Result<WindowDevice> {
    let name = file.name().to_owned();
    let what = format!("{name}: the extent of the VMDK in it");
    WindowDevice::new(file, range, name).map_err(|error| invalid(format!("{what}: {error}")))
}

/// Refuses extents that have bytes in common.
fn refuse_overlaps(extents: &[ExtentLine]) -> io::Result<()> {
    for (at, second) in extents.iter().enumerate().filter(|(_, one)| one.file.is_some()) {
        let end = |one: &ExtentLine| one.offset.saturating_add(one.size_bytes);
        let overlaps = |first: &ExtentLine| {
            first.file == second.file && first.offset < end(second) && second.offset < end(first)
        };
        if extents[..at].iter().any(overlaps) {
            return Err(invalid("two of its extents have bytes in common"));
        }
    }
    Ok(())
}

/// A part of a disk: one extent.
#[derive(Debug)]
struct ExtentPiece {
    /// The bytes of the disk that it covers.
    range: Range<u64>,
    /// `None` for an extent of zeros, which has no file.
    file: Option<WindowDevice>,
    is_writable: bool,
}

impl ExtentPiece {
    /// The file that a write to this part goes to.
    fn writable(&self) -> io::Result<&WindowDevice> {
        match &self.file {
            None => Err(unsupported(
                "the descriptor of the VMDK has no file for this part of the disk (ZERO)",
            )),
            Some(_) if !self.is_writable => Err(unsupported(
                "the descriptor of the VMDK says that this part of the disk is only read (RDONLY)",
            )),
            Some(file) => Ok(file),
        }
    }
}

/// A disk whose parts are in several files.
#[derive(Debug)]
struct PiecesDevice {
    /// The device that holds the descriptor.
    below: Arc<dyn BlockDevice>,
    name: String,
    size_bytes: u64,
    content_id: ContentId,
    /// In the order of the disk, which they cover without gaps.
    pieces: Vec<ExtentPiece>,
    is_writable: bool,
}

impl PiecesDevice {
    /// The pieces that a range of the disk touches: each with the first byte of the range in the
    /// piece, and the number of bytes there.
    fn parts(
        &self,
        offset: u64,
        len: u64,
    ) -> io::Result<impl Iterator<Item = (&ExtentPiece, u64, u64)>> {
        let range = request_range(self.size_bytes, offset, len)?;
        let first = self.pieces.partition_point(|piece| piece.range.end <= range.start);
        let parts = self.pieces[first..].iter().map(move |piece| {
            let start = piece.range.start.max(range.start);
            let end = piece.range.end.min(range.end);
            (piece, start - piece.range.start, end.saturating_sub(start))
        });
        Ok(parts.take_while(|(.., len)| *len > 0))
    }

    /// As [`parts`](Self::parts), for a caller that changes the pieces that `is_changed` picks;
    /// returns the file of each. It fails before the first write when one of them is read-only.
    fn parts_to_change(
        &self,
        offset: u64,
        len: u64,
        is_changed: impl Fn(&ExtentPiece) -> bool,
    ) -> io::Result<Vec<(&WindowDevice, u64, u64)>> {
        if !self.is_writable {
            return Err(rustix::io::Errno::ROFS.into());
        }
        let parts = self.parts(offset, len)?.filter(|(piece, ..)| is_changed(piece));
        let parts = parts.map(|(piece, inside, len)| Ok((piece.writable()?, inside, len)));
        let parts = parts.collect::<io::Result<Vec<_>>>()?;
        if !parts.is_empty() {
            self.content_id.change(&*self.below)?;
        }
        Ok(parts)
    }

    /// Fills `buf` with `read`, which reads from one file.
    fn read_by(
        &self,
        offset: u64,
        buf: &mut [u8],
        read: impl Fn(&WindowDevice, u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut rest = buf;
        let len = rest.len() as u64;
        for (piece, inside, len) in self.parts(offset, len)? {
            let (part, behind) = rest.split_at_mut(usize::try_from(len).map_err(io::Error::other)?);
            match &piece.file {
                Some(file) => read(file, inside, part)?,
                None => part.fill(0),
            }
            rest = behind;
        }
        Ok(())
    }
}

impl BlockDevice for PiecesDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_by(offset, buf, BlockDevice::read_at)
    }

    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_by(offset, buf, BlockDevice::read_medium_at)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        let len = len.min(self.size_bytes.saturating_sub(offset));
        for (piece, inside, len) in self.parts(offset, len).into_iter().flatten() {
            if let Some(file) = &piece.file {
                file.prefetch(inside, len);
            }
        }
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored_at(offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let parts = self.parts_to_change(offset, total_bytes(bufs), |_| true)?;
        if let [(file, inside, _)] = parts[..] {
            return file.write_vectored_at(inside, bufs);
        }
        let all = together(bufs);
        let mut rest = &*all;
        for (file, inside, len) in parts {
            let (part, behind) = rest.split_at(usize::try_from(len).map_err(io::Error::other)?);
            file.write_at(inside, part)?;
            rest = behind;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        if !self.is_writable {
            return Ok(());
        }
        self.below.flush()?;
        self.pieces.iter().filter_map(|piece| piece.file.as_ref()).try_for_each(BlockDevice::flush)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let parts = self.parts_to_change(offset, len, |piece| piece.file.is_some())?;
        parts.into_iter().try_for_each(|(file, inside, len)| file.discard(inside, len))
    }
}
