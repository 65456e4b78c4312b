//! Disks that were compressed as a stream: gzip, xz and zstd. They are read.
//!
//! A [seekable] stream of zstd is read where it is. Every other one has no middle, so all of it is
//! unpacked once, into a file without a name in the directory for temporary files (`TMPDIR`). Zeros
//! become holes there. What is not zeros is bounded by [`SPOOL_BYTES_MAX`], the size of the disk by
//! [`DISK_BYTES_MAX`], and the memory by what the decoders are told: a few bytes of a hostile
//! stream stand for any number of zeros.

mod seekable;

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::{ImageKind, unsupported};
use crate::fields::invalid;
use crate::{BlockDevice, request_range};

/// How much is unpacked that is not zeros.
const SPOOL_BYTES_MAX: u64 = 64 << 30;

/// How large the disk may be, zeros included: they cost time.
const DISK_BYTES_MAX: u64 = 1 << 40;

/// The memory that a decoder of xz may take; what `xz -9` makes needs 65 MiB.
const XZ_MEMORY_KIB: u32 = 256 << 10;

const PIECE_BYTES: usize = 1 << 16;

/// Unpacks what is on `below`.
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
    let packed = BufReader::with_capacity(1 << 20, Stream { below, at: 0 });
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
    Ok(Arc::new(Unpacked { file, name: below.name().to_owned(), size_bytes }))
}

/// A device as a stream.
struct Stream<'a> {
    below: &'a dyn BlockDevice,
    at: u64,
}

impl Read for Stream<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let left = self.below.size_bytes() - self.at;
        let len = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
        self.below.read_at(self.at, &mut buf[..len])?;
        self.at += len as u64;
        Ok(len)
    }
}

/// Writes a stream to a file, zeros as holes; the file and how long the stream is.
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
        if stored > SPOOL_BYTES_MAX || at > DISK_BYTES_MAX {
            return Err(unsupported(format!(
                "more than is unpacked for a look at it ({} GiB): unpack it with {kind} -d, and \
                 name the file that this makes",
                SPOOL_BYTES_MAX >> 30
            )));
        }
    }
    file.set_len(at)?;
    Ok((file, at))
}

/// Fills `piece`, but for the last one.
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
struct Unpacked {
    file: File,
    name: String,
    size_bytes: u64,
}

impl BlockDevice for Unpacked {
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
