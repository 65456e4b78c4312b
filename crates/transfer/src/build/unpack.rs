//! What compressed an archive, told by its first bytes.

use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Timespec;

use super::entry::SourceProblem;
use crate::Watcher;

/// The most memory that unpacking may take, in KiB. `xz -9` needs 65 MiB.
const XZ_KIB_MAX: u32 = 256 << 10;

/// How much is read at once.
const BUFFER_BYTES: usize = 256 << 10;

/// How many bytes tell what packed an archive.
const START_BYTES: usize = 8;

/// How long a reader waits for a pipe before it asks again whether it should end.
const PIPE_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// The bytes of an archive, unpacked.
pub(super) trait ArchiveInput: Read {
    /// Goes on `bytes` further.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;
}

/// Bytes whose reader fails once the user interrupts the build. So a long stretch without a file,
/// such as a large one that is only measured, ends as soon.
pub(super) struct Interruptible<'a, R> {
    inner: R,
    watcher: &'a dyn Watcher,
}

impl<'a, R> Interruptible<'a, R> {
    pub(super) fn new(inner: R, watcher: &'a dyn Watcher) -> Self {
        Self { inner, watcher }
    }
}

/// Fails when the user interrupted the build. The kind of the error is not `Interrupted`, because
/// callers repeat a read that fails with that one.
pub(super) fn require_not_interrupted(watcher: &dyn Watcher) -> io::Result<()> {
    if watcher.is_interrupted() { Err(io::Error::other("interrupted")) } else { Ok(()) }
}

impl<R: Read> Read for Interruptible<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        require_not_interrupted(self.watcher)?;
        self.inner.read(buf)
    }
}

/// A pipe, or another file that can make its reader wait. The reader fails once the user interrupts
/// the build, also while it waits.
pub(super) struct Pipe<'a, F> {
    file: F,
    watcher: &'a dyn Watcher,
}

impl<'a, F> Pipe<'a, F> {
    pub(super) fn new(file: F, watcher: &'a dyn Watcher) -> Self {
        Self { file, watcher }
    }
}

impl<F: Read + AsFd> Read for Pipe<'_, F> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            require_not_interrupted(self.watcher)?;
            let mut ready = [PollFd::new(&self.file, PollFlags::IN)];
            match poll(&mut ready, Some(&PIPE_PAUSE)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return self.file.read(buf),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// An archive that is read as a stream.
struct Streamed<'a, R>(Interruptible<'a, R>);

impl<R: Read> Read for Streamed<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl<R: Read> ArchiveInput for Streamed<'_, R> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let skipped = io::copy(&mut self.0.by_ref().take(bytes), &mut io::sink())?;
        if skipped < bytes { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }
}

/// A regular file that is not compressed.
struct Plain<'a>(BufReader<Interruptible<'a, File>>);

impl Read for Plain<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl io::Seek for Interruptible<'_, File> {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

impl ArchiveInput for Plain<'_> {
    /// What is behind the end of the file is found missing by the next read.
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let bytes = i64::try_from(bytes).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        self.0.seek_relative(bytes)
    }
}

/// The archive in a regular file.
pub(super) fn unpack_file(
    file: File,
    watcher: &dyn Watcher,
) -> Result<Box<dyn ArchiveInput + '_>, SourceProblem> {
    if packing_of_file(&file)? != ArchivePacking::None {
        return unpack(file, watcher);
    }
    Ok(plain_file(file, watcher))
}

/// A regular file as it is.
pub(super) fn plain_file(file: File, watcher: &dyn Watcher) -> Box<dyn ArchiveInput + '_> {
    let input = Interruptible::new(file, watcher);
    Box::new(Plain(BufReader::with_capacity(BUFFER_BYTES, input)))
}

/// What packed the archive in a regular file.
pub(super) fn packing_of_file(file: &File) -> Result<ArchivePacking, SourceProblem> {
    let mut start = [0; START_BYTES];
    let len = fill_with(&mut start, |buf, at| file.read_at(buf, at as u64))?;
    packed_by(start.get(..len).unwrap_or_default())
}

/// The archive in a stream.
pub(super) fn unpack<'a>(
    input: impl Read + 'a,
    watcher: &'a dyn Watcher,
) -> Result<Box<dyn ArchiveInput + 'a>, SourceProblem> {
    let mut input = Interruptible::new(input, watcher);
    // A pipe may give its first bytes one by one.
    let mut start = [0; START_BYTES];
    let len = fill(&mut input, &mut start)?;
    let packing = packed_by(start.get(..len).unwrap_or_default())?;
    let input = Cursor::new(start).take(len as u64).chain(input);
    let input = BufReader::with_capacity(BUFFER_BYTES, input);
    Ok(match packing {
        ArchivePacking::None => streamed(input, watcher),
        ArchivePacking::Gzip => streamed(MultiGzDecoder::new(input), watcher),
        ArchivePacking::Zstd => streamed(zstd::stream::read::Decoder::with_buffer(input)?, watcher),
        ArchivePacking::Xz => streamed(XzReader::new_mem_limit(input, true, XZ_KIB_MAX), watcher),
        ArchivePacking::Bzip2 => streamed(MultiBzDecoder::new(input), watcher),
    })
}

fn streamed<'a>(unpacked: impl Read + 'a, watcher: &'a dyn Watcher) -> Box<dyn ArchiveInput + 'a> {
    Box::new(Streamed(Interruptible::new(unpacked, watcher)))
}

/// Reads until `buf` is full or nothing more comes.
pub(super) fn fill(input: &mut (impl Read + ?Sized), buf: &mut [u8]) -> io::Result<usize> {
    fill_with(buf, |buf, _| input.read(buf))
}

/// The same with a call that gets the rest of `buf`, and how much of it is filled.
fn fill_with(
    buf: &mut [u8],
    mut read: impl FnMut(&mut [u8], usize) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match read(buf.get_mut(done..).unwrap_or_default(), done) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// What packed an archive.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ArchivePacking {
    None,
    Gzip,
    Zstd,
    Xz,
    Bzip2,
}

impl ArchivePacking {
    /// The program that packs so.
    pub(super) fn program(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Gzip => Some("gzip"),
            Self::Zstd => Some("zstd"),
            Self::Xz => Some("xz"),
            Self::Bzip2 => Some("bzip2"),
        }
    }
}

/// What packed an archive that begins with `start`.
fn packed_by(start: &[u8]) -> Result<ArchivePacking, SourceProblem> {
    let refused = |what: &str| {
        let what = format!("it is {what}, and not a tar archive");
        Err(SourceProblem::Refused(what))
    };
    Ok(match start {
        [] => return refused("empty"),
        [0x1f, 0x8b, ..] => ArchivePacking::Gzip,
        // The second is a frame that decoders skip.
        [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => ArchivePacking::Zstd,
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => ArchivePacking::Xz,
        [b'B', b'Z', b'h', b'1'..=b'9', ..] => ArchivePacking::Bzip2,
        [0x1f, 0x9d, ..] => return refused("packed by compress (.Z)"),
        [0x04, 0x22, 0x4d, 0x18, ..] => return refused("packed by lz4"),
        [b'L', b'Z', b'I', b'P', ..] => return refused("packed by lzip"),
        [b'P', b'K', 3, 4, ..] => return refused("a zip archive"),
        [b'7', b'z', 0xbc, 0xaf, ..] => return refused("a 7z archive"),
        [b'0', b'7', b'0', b'7', b'0', ..] => return refused("a cpio archive"),
        [b'!', b'<', b'a', b'r', b'c', b'h', b'>', ..] => return refused("an ar archive"),
        _ => ArchivePacking::None,
    })
}
