//! Disks that are compressed as a stream (gzip, xz, zstd), and only read.
//!
//! A [seekable] zstd stream is read in place. Any other stream can be read only from its beginning.
//! So it is unpacked once, into an unnamed file in the directory for temporary files (`TMPDIR`),
//! where zeros become holes. A few bytes of a hostile stream can stand for any number of zeros, so
//! there are three limits: [`SPOOL_BYTES_MAX`] for the bytes that are not zeros, [`DISK_BYTES_MAX`]
//! for the size of the disk, and limits of the decoders for their memory.

mod seekable;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::{ImageKind, unsupported};
use crate::fields::invalid;
use crate::{BlockDevice, request_range};

/// How many bytes of pieces that are not all zeros may be unpacked.
const SPOOL_BYTES_MAX: u64 = 64 << 30;

/// The largest disk in bytes. Zeros take no space, but they take time.
const DISK_BYTES_MAX: u64 = 1 << 40;

/// The memory limit of the xz decoder. A stream of `xz -9` needs 65 MiB.
const XZ_MEMORY_KIB: u32 = 256 << 10;

const PIECE_BYTES: usize = 1 << 16;

/// Opens the disk in the stream on `below`.
pub(super) fn open(
    below: &Arc<dyn BlockDevice>,
    kind: ImageKind,
) -> io::Result<Arc<dyn BlockDevice>> {
    if kind == ImageKind::Zstd
        && let Some(seekable) = seekable::open(below)?
    {
        return Ok(Arc::new(seekable));
    }
    let below = &**below;
    let packed = BufReader::with_capacity(1 << 20, DeviceReader { below, at: 0 });
    let spool = match kind {
        ImageKind::Gzip => unpack(flate2::bufread::MultiGzDecoder::new(packed), kind)?,
        ImageKind::Xz => {
            let reader = lzma_rust2::XzReader::new_mem_limit(packed, true, XZ_MEMORY_KIB);
            unpack(reader, kind)?
        }
        _ => {
            let decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
            unpack(decoder, kind)?
        }
    };
    let (file, size_bytes) = spool;
    Ok(Arc::new(UnpackedDisk { file, name: below.name().to_owned(), size_bytes }))
}

/// Reads a device from its beginning to its end.
struct DeviceReader<'a> {
    below: &'a dyn BlockDevice,
    at: u64,
}

impl Read for DeviceReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.below.size_bytes() - self.at;
        let len = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        self.below.read_at(self.at, &mut buf[..len])?;
        self.at += len as u64;
        Ok(len)
    }
}

/// Writes a stream to a temporary file, with holes for zeros. Returns the file and the length of
/// the stream in bytes.
fn unpack(mut stream: impl Read, kind: ImageKind) -> io::Result<(File, u64)> {
    let file = tempfile::tempfile()?;
    let (mut at, mut stored) = (0, 0);
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        let len = read_piece(&mut stream, &mut piece)
            .map_err(|error| invalid(format!("unpacking its {kind} stream: {error}")))?;
        if len == 0 {
            break;
        }
        if piece[..len].iter().any(|&byte| byte != 0) {
            file.write_all_at(&piece[..len], at)?;
            stored += len as u64;
        }
        at += len as u64;
        let most = if stored > SPOOL_BYTES_MAX {
            format!("{} GiB that are not zeros", SPOOL_BYTES_MAX >> 30)
        } else if at > DISK_BYTES_MAX {
            format!("a disk of {} GiB", DISK_BYTES_MAX >> 30)
        } else {
            continue;
        };
        return Err(unsupported(format!(
            "more than is unpacked for a look at it ({most}): unpack it with {kind} -d, and name \
             the file that this makes"
        )));
    }
    file.set_len(at)?;
    Ok((file, at))
}

/// Fills `piece`, or the part of it that is left at the end of the stream. Returns its length.
fn read_piece(stream: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < piece.len() {
        match stream.read(&mut piece[done..]) {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// A disk that was unpacked.
#[derive(Debug)]
struct UnpackedDisk {
    file: File,
    name: String,
    size_bytes: u64,
}

impl BlockDevice for UnpackedDisk {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.size_bytes, offset, buf.len() as u64)?;
        self.file.read_exact_at(buf, offset)
    }

    read_only!();
}
