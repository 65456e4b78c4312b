//! Direct I/O: large writes, and reads that verify the medium, bypass the page cache of the host.
//!
//! A volume caches its blocks itself. Copying them into the page cache as well takes the memory
//! twice, and much more time than the disk needs to store them. So a request of [`LEAST_BYTES`] or
//! more that consists of whole pages is written directly. Where the memory of the caller is not
//! aligned as the host wants it, the bytes go through an aligned buffer. Small requests go to the
//! page cache, which answers sooner and merges many of them.
//!
//! The host keeps both ways coherent: they show the same bytes, and a flush makes both durable.
//! Where a filesystem has no direct I/O, everything goes through the page cache.

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

/// Writes of fewer bytes go through the page cache.
const LEAST_BYTES: u64 = 64 << 10;

/// The alignment of requests and buffers in bytes. Most hosts need this or less. When a host needs
/// more and refuses a request, the request goes through the page cache.
const PAGE_BYTES: usize = 4096;

/// The length of a buffer in pages: 1 MiB.
const BUFFER_PAGES: usize = 256;

/// How many buffers are kept for later requests.
const MOST_BUFFERS: usize = 2;

/// A page of memory with the alignment that direct I/O needs.
#[derive(Clone, FromBytes, Immutable, IntoBytes)]
#[repr(C, align(4096))]
struct AlignedPage([u8; PAGE_BYTES]);

type AlignedBuffer = Box<[AlignedPage]>;

/// The second descriptor of a file, for direct I/O.
#[derive(Debug)]
pub(super) struct Direct {
    file: File,
    /// The host refused a direct write, so all later writes go through the page cache.
    is_refused: AtomicBool,
    /// The host refused a direct read, so all later reads go through the page cache.
    reads_are_refused: AtomicBool,
    buffers: Mutex<Vec<AlignedBuffer>>,
}

impl std::fmt::Debug for AlignedPage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a page")
    }
}

impl Direct {
    /// Opens `file` a second time, for direct reads and, if `is_writable`, direct writes. `None`
    /// where the host has no direct I/O.
    pub(super) fn open(file: &File, is_writable: bool) -> Option<Self> {
        // Opened through /proc, because the name of the file may lead to another file by now.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::DIRECT.bits().cast_signed();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(is_writable).custom_flags(flags).open(path).ok()?;
        let [is_refused, reads_are_refused] = [(); 2].map(|()| AtomicBool::new(false));
        Some(Self { file, is_refused, reads_are_refused, buffers: Mutex::default() })
    }

    /// Fills `buf` from `offset` on. `false` means that the caller must read through the page
    /// cache.
    ///
    /// # Errors
    /// Those of the host.
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

    /// Writes `bufs` one behind the other at `offset`. `false` means that the caller must write all
    /// of them through the page cache.
    ///
    /// # Errors
    /// Those of the host. A part may have been written.
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

    /// Writes `bufs` through an aligned buffer.
    fn write_copied(&self, mut offset: u64, bufs: &[IoSlice<'_>]) -> Result<(), Errno> {
        let kept = self.buffers.lock().pop();
        let mut buffer =
            kept.unwrap_or_else(|| vec![AlignedPage::new_zeroed(); BUFFER_PAGES].into());
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

/// Whether direct I/O can use this memory without a copy.
fn is_aligned(buf: &[u8]) -> bool {
    buf.as_ptr().addr().is_multiple_of(PAGE_BYTES) && buf.len().is_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use offshoot_testkit::random::{Random, seed_of_run};

    use super::*;

    const SIZE: usize = 8 << 20;

    /// Writes random requests, from aligned and unaligned memory, and compares the file with a copy
    /// in memory.
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
        let mut pages = vec![AlignedPage::new_zeroed(); 2 * BUFFER_PAGES];
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
        // Requests that are no whole pages, or begin between two pages, go through the page cache.
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
