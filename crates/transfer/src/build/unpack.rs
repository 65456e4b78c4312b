//! What compressed an archive, told by its first bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;

use super::entry::SourceProblem;

/// The most memory that unpacking may take, in KiB. `xz -9` needs 65 MiB.
const XZ_KIB_MAX: u32 = 256 << 10;

/// How much is read at once.
const BUFFER_BYTES: usize = 256 << 10;

/// The bytes of an archive, unpacked.
pub(super) trait ArchiveInput: Read {
    /// Goes on `bytes` further.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;
}

/// An archive that is read as a stream.
struct Streamed<R>(R);

impl<R: Read> Read for Streamed<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl<R: Read> ArchiveInput for Streamed<R> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.0.by_ref().take(bytes), &mut io::sink())?;
        if skipped < bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

/// A regular file that is not compressed.
struct Plain(BufReader<File>);

impl Read for Plain {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl ArchiveInput for Plain {
    /// What is behind the end of the file is found missing by the next read.
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let bytes = i64::try_from(bytes).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        self.0.seek_relative(bytes)
    }
}

/// The archive in a regular file.
pub(super) fn unpack_file(file: File) -> Result<Box<dyn ArchiveInput>, SourceProblem> {
    let mut input = BufReader::with_capacity(BUFFER_BYTES, file);
    Ok(if packed_by(&mut input)? == Packing::None {
        Box::new(Plain(input))
    } else {
        unpack_buffered(input)?
    })
}

/// The archive in a stream.
pub(super) fn unpack<'a>(
    input: impl Read + 'a,
) -> Result<Box<dyn ArchiveInput + 'a>, SourceProblem> {
    unpack_buffered(BufReader::with_capacity(BUFFER_BYTES, input))
}

fn unpack_buffered<'a>(
    mut input: BufReader<impl Read + 'a>,
) -> Result<Box<dyn ArchiveInput + 'a>, SourceProblem> {
    Ok(match packed_by(&mut input)? {
        Packing::None => Box::new(Streamed(input)),
        Packing::Gzip => Box::new(Streamed(MultiGzDecoder::new(input))),
        Packing::Zstd => Box::new(Streamed(zstd::stream::read::Decoder::with_buffer(input)?)),
        Packing::Xz => Box::new(Streamed(XzReader::new_mem_limit(input, true, XZ_KIB_MAX))),
        Packing::Bzip2 => Box::new(Streamed(MultiBzDecoder::new(input))),
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Packing {
    None,
    Gzip,
    Zstd,
    Xz,
    Bzip2,
}

/// What packed the bytes that come next, which stay there.
fn packed_by(input: &mut BufReader<impl Read>) -> Result<Packing, SourceProblem> {
    let start = loop {
        match input.fill_buf() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            start => break start?,
        }
    };
    let refused = |what: &str| {
        let what = format!("it is {what}, and not a tar archive");
        Err(SourceProblem::Refused(what))
    };
    Ok(match start {
        [] => return refused("empty"),
        [0x1f, 0x8b, ..] => Packing::Gzip,
        // The second is a frame that decoders skip.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Packing::Zstd,
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Packing::Xz,
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => Packing::Bzip2,
        [0x1f, 0x9d, ..] => return refused("packed by compress (.Z)"),
        [0x04, 0x22, 0x4d, 0x18, ..] => return refused("packed by lz4"),
        [b'L', b'Z', b'I', b'P', ..] => return refused("packed by lzip"),
        [b'P', b'K', 3, 4, ..] => return refused("a zip archive"),
        [b'7', b'z', 0xbc, 0xaf, ..] => return refused("a 7z archive"),
        [b'0', b'7', b'0', b'7', b'0', ..] => return refused("a cpio archive"),
        [b'!', b'<', b'a', b'r', b'c', b'h', b'>', ..] => return refused("an ar archive"),
        _ => Packing::None,
    })
}
