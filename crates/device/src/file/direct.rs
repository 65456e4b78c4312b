//! Large writes go past the page cache of the host, and so does who reads to see what is on the
//! medium.
//!
//! A volume keeps what it needs of its blocks itself. To copy them into the page cache as well
//! takes the memory twice, and much more time than the disk needs for them. So requests of
//! [`LEAST_BYTES`] and more, in whole pages, are written directly; what does not lie in memory as
//! the host wants it goes through a buffer that does. Small ones are left to the page cache, which
//! answers sooner and brings many of them to the disk at once.
//!
//! The host sees to it that both ways show the same bytes, and that a flush makes both durable.
//! Where a filesystem does not know such writes everything goes through the page cache.

use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::write_all;
use crate::total_bytes;

/// Less than this goes through the page cache, in bytes.
const LEAST_BYTES: u64 = 64 << 10;

/// Where requests and buffers begin and end, in bytes. Most hosts want that or less; what one
/// refuses goes through the page cache.
const PAGE_BYTES: usize = 4096;

/// The pages of a buffer.
const BUFFER_PAGES: usize = 256;

/// Buffers that are kept for the next requests.
const MOST_BUFFERS: usize = 2;

/// What the host reads directly.
#[derive(Clone, FromBytes, Immutable, IntoBytes)]
#[repr(C, align(4096))]
struct Page([u8; PAGE_BYTES]);

type Buffer = Box<[Page]>;

/// A second way to an open file, past the page cache.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    /// The host has refused such a write.
    is_refused: AtomicBool,
    /// The host has refused such a read.
    reads_are_refused: AtomicBool,
    buffers: Mutex<Vec<Buffer>>,
}

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a page")
    }
}

impl Direct {
    /// The way to `file`, which is open for reading, or for writing too; `None` where there is no
    /// such way.
    pub(super) fn open(file: &File, writable: bool) -> Option<Self> {
        // Opened by what it is and not by its name, which may be another file's by now.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::DIRECT.bits().cast_signed();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(writable).custom_flags(flags).open(path).ok()?;
        let [is_refused, reads_are_refused] = [(); 2].map(|()| AtomicBool::new(false));
        Some(Self { file, is_refused, reads_are_refused, buffers: Mutex::default() })
    }

    /// Fills `buf` from `offset` on; `false` when it has to be read the other way.
    ///
    /// # Errors
    /// Whatever the host says.
    pub(super) fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<bool> {
        let is_whole = offset.is_multiple_of(PAGE_BYTES as u64) && is_aligned(buf);
        if !is_whole || self.reads_are_refused.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match self.file.read_exact_at(buf, offset) {
            Err(error)
                if [Errno::INVAL, Errno::OPNOTSUPP]
                    .iter()
                    .any(|errno| error.raw_os_error() == Some(errno.raw_os_error())) =>
            {
                self.reads_are_refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            result => result.map(|()| true),
        }
    }

    /// Writes `bufs` one behind the other at `offset`; `false` when they have to go the other way,
    /// the whole of them.
    ///
    /// # Errors
    /// Whatever the host says. A part may have been written.
    pub(super) fn write(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<bool> {
        let total = total_bytes(bufs);
        let is_whole = |bytes: u64| bytes.is_multiple_of(PAGE_BYTES as u64);
        if total < LEAST_BYTES
            || !is_whole(offset)
            || !is_whole(total)
            || self.is_refused.load(Ordering::Relaxed)
        {
            return Ok(false);
        }
        let written = if bufs.iter().all(|buf| is_aligned(buf)) {
            write_all(&self.file, offset, bufs)
        } else {
            self.write_copied(offset, bufs)
        };
        match written {
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                self.is_refused.store(true, Ordering::Relaxed);
                Ok(false)
            }
            result => result.map(|()| true).map_err(Into::into),
        }
    }

    /// Writes them through a buffer.
    fn write_copied(&self, mut offset: u64, bufs: &[IoSlice<'_>]) -> Result<(), Errno> {
        let kept = self.buffers.lock().pop();
        let mut buffer = kept.unwrap_or_else(|| vec![Page::new_zeroed(); BUFFER_PAGES].into());
        let bytes = buffer.as_mut_bytes();
        let (mut filled, mut result) = (0, Ok(()));
        for mut rest in bufs.iter().map(|buf| &**buf) {
            while !rest.is_empty() && result.is_ok() {
                let (part, more) = rest.split_at(rest.len().min(bytes.len() - filled));
                bytes[filled..][..part.len()].copy_from_slice(part);
                (filled, rest) = (filled + part.len(), more);
                if filled == bytes.len() {
                    result = write_all(&self.file, offset, &[IoSlice::new(bytes)]);
                    offset += filled as u64;
                    filled = 0;
                }
            }
        }
        if result.is_ok() {
            result = write_all(&self.file, offset, &[IoSlice::new(&bytes[..filled])]);
        }
        let mut buffers = self.buffers.lock();
        if buffers.len() < MOST_BUFFERS {
            buffers.push(buffer);
        }
        result
    }
}

/// Whether the host takes this from where it is.
fn is_aligned(buf: &[u8]) -> bool {
    buf.as_ptr().addr().is_multiple_of(PAGE_BYTES) && buf.len().is_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use offshoot_testkit::random::{Random, seed_of_run};

    use super::*;

    const SIZE: usize = 8 << 20;

    /// Random requests, from memory that the host takes as it is and from other, beside a copy that
    /// is kept by hand.
    #[test]
    fn what_goes_directly_is_what_was_given() {
        let path = tempfile::NamedTempFile::new().expect("a file").into_temp_path();
        let file = OpenOptions::new().read(true).write(true).open(&path).expect("it opens");
        file.set_len(SIZE as u64).expect("it is made longer");
        let Some(direct) = Direct::open(&file, true) else {
            return println!("skipped: {} has no direct writes", path.display());
        };
        let seed = seed_of_run();
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let number =
            |bound: u64, random: &mut Random| usize::try_from(random.below(bound)).unwrap();
        let mut expected = vec![0; SIZE];
        let mut pages = vec![Page::new_zeroed(); 2 * BUFFER_PAGES];
        for step in 0..200 {
            let content = random.bytes(pages.as_bytes().len() - 1);
            let shift = step % 2;
            pages.as_mut_bytes()[shift..][..content.len()].copy_from_slice(&content);
            let len = (16 + number(400, &mut random)) * PAGE_BYTES;
            let at = number(((SIZE - len) / PAGE_BYTES) as u64, &mut random) * PAGE_BYTES;
            let source = &pages.as_bytes()[shift..][..len];
            let (front, back) = source.split_at(number(len as u64, &mut random));
            let bufs = [IoSlice::new(front), IoSlice::new(&[]), IoSlice::new(back)];
            let whole = [IoSlice::new(source)];
            let bufs = if random.below(2) == 0 { &bufs[..] } else { &whole };
            if !direct.write(at as u64, bufs).expect("it is written") {
                return println!("skipped: {} refuses direct writes", path.display());
            }
            expected[at..][..len].copy_from_slice(source);
        }
        assert!(fs::read(&path).expect("it is read") == expected);
        let read = |direct: &Direct, offset: usize, buf: &mut [u8]| {
            direct.read(offset as u64, buf).expect("it is read")
        };
        let whole = &mut pages.as_mut_bytes()[..16 * PAGE_BYTES];
        for at in [0, 3 * PAGE_BYTES, SIZE - whole.len()] {
            assert!(read(&direct, at, whole) && *whole == expected[at..][..whole.len()]);
        }
        // What is no whole page, and what lies between two of them, goes the other way.
        assert!(!read(&direct, 512, whole) && !read(&direct, 0, &mut whole[..512]));
        assert!(!read(&direct, 0, &mut whole[1..=PAGE_BYTES]));
        let again = Direct::open(&file, false).expect("as before");
        assert!(read(&again, PAGE_BYTES, whole) && *whole == expected[PAGE_BYTES..][..whole.len()]);
    }

    #[test]
    fn small_requests_and_parts_of_pages_go_the_other_way() {
        let path = tempfile::NamedTempFile::new().expect("a file").into_temp_path();
        let file = OpenOptions::new().read(true).write(true).open(&path).expect("it opens");
        let Some(direct) = Direct::open(&file, true) else {
            return println!("skipped: {} has no direct writes", path.display());
        };
        let bytes = vec![1; SIZE];
        let goes = |offset, len| direct.write(offset, &[IoSlice::new(&bytes[..len])]).unwrap();
        assert!(!goes(0, PAGE_BYTES) && !goes(512, 1 << 20) && !goes(0, (1 << 20) + 512));
        assert_eq!(fs::metadata(&path).expect("it is there").len(), 0, "nothing was written");
    }
}
