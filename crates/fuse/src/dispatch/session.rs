//! INIT, sizes, durability and FORGET.

use std::sync::atomic::Ordering;

use offshoot_vfs::{Errno, Error, Result};

use super::{Dispatcher, RequestContext};
use crate::attributes::statfs_out;
use crate::output::AnswerBody;
use crate::request::RequestArguments;
use crate::wire::{
    BatchForgetIn, FSYNC_FDATASYNC, ForgetIn, ForgetOne, FsyncIn, InitExt, InitFlags, InitIn,
    InitOut, MAJOR, MINOR, OLDEST_MINOR, ROOT_NODE,
};

/// The most bytes of one write, and of one read.
pub(crate) const MAX_BYTES: u32 = 1 << 20;

/// From this many bytes on, a request moves much data.
pub(crate) const LARGE_BYTES: u32 = 64 << 10;

/// [`MAX_BYTES`] in pages of the host, so that every request fits the buffers: 256 pages of 4 KiB,
/// or 64 of 16 KiB.
fn max_pages(page_size: usize) -> u16 {
    let bytes = usize::try_from(MAX_BYTES).expect("1 MiB");
    u16::try_from(bytes / page_size).unwrap_or(u16::MAX).max(1)
}

/// How many requests the kernel may have open that no program waits for: read-ahead and write-back.
const MAX_BACKGROUND: u16 = 64;

/// The features that this process asks for, if the kernel offers them.
///
/// Without HANDLE_KILLPRIV_V2 the kernel would clear the set-id bits itself, and ask for
/// `security.capability` before each write.
///
/// ASYNC_DIO (1 << 15) is left out. With it, the kernel drops the cached pages of a range only
/// before an asynchronous direct write, and a page that a reader cached meanwhile stays stale.
/// Without it, the kernel waits for each direct write, and drops these pages after it too.
const WANTED: InitFlags = InitFlags::ASYNC_READ
    // A node is found by its number, also when the kernel has forgotten it.
    .union(InitFlags::EXPORT_SUPPORT)
    .union(InitFlags::BIG_WRITES)
    // The filesystem knows whether the umask counts, or the default list of the directory.
    .union(InitFlags::DONT_MASK)
    .union(InitFlags::IOCTL_DIR)
    .union(InitFlags::DO_READDIRPLUS)
    .union(InitFlags::READDIRPLUS_AUTO)
    .union(InitFlags::PARALLEL_DIROPS)
    .union(InitFlags::POSIX_ACL)
    .union(InitFlags::MAX_PAGES)
    .union(InitFlags::CACHE_SYMLINKS)
    .union(InitFlags::HANDLE_KILLPRIV_V2)
    .union(InitFlags::SETXATTR_EXT)
    .union(InitFlags::INIT_EXT);

impl Dispatcher {
    /// Agrees with the kernel on version and features.
    pub(super) fn init(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let init: InitIn = arguments.take()?;
        if init.major > MAJOR {
            // The kernel asks again, in this version.
            return out.put(&InitOut { major: MAJOR, minor: MINOR, ..InitOut::default() });
        }
        if init.major < MAJOR || init.minor < OLDEST_MINOR {
            let what = format!("version {}.{} of the FUSE protocol", init.major, init.minor);
            return Err(Error::posix(Errno::PROTO, what));
        }
        let mut offered = u64::from(init.flags);
        if offered & InitFlags::INIT_EXT.bits() != 0 {
            offered |= u64::from(arguments.take::<InitExt>()?.flags2) << 32;
        }
        let mut wanted = WANTED;
        wanted.set(InitFlags::OVER_IO_URING, self.has_rings.load(Ordering::Relaxed));
        wanted.set(InitFlags::ALLOW_IDMAP, self.options.allows_idmap);
        let flags = wanted.bits() & offered;
        let over_ring = flags & InitFlags::OVER_IO_URING.bits() != 0;
        self.has_rings.store(over_ring, Ordering::Relaxed);
        let has_idmap = flags & InitFlags::ALLOW_IDMAP.bits() != 0;
        self.has_idmap.store(has_idmap, Ordering::Relaxed);
        let has_ext = flags & InitFlags::SETXATTR_EXT.bits() != 0;
        self.has_setxattr_ext.store(has_ext, Ordering::Relaxed);
        let [low, high] = [flags & 0xffff_ffff, flags >> 32];
        let half = |bits| u32::try_from(bits).expect("32 bits");
        out.put(&InitOut {
            major: MAJOR,
            minor: MINOR,
            max_readahead: MAX_BYTES,
            flags: half(low),
            max_background: MAX_BACKGROUND,
            congestion_threshold: MAX_BACKGROUND * 3 / 4,
            max_write: MAX_BYTES,
            time_gran: 1,
            max_pages: max_pages(rustix::param::page_size()),
            flags2: half(high),
            ..InitOut::default()
        })
    }
}

impl RequestContext<'_> {
    pub(super) fn statfs(&self, out: &mut AnswerBody<'_>) -> Result<()> {
        out.put(&statfs_out(&self.fs().statfs()?))
    }

    /// The kernel also sends this after each write to a file that is open with `O_SYNC` or
    /// `O_DSYNC`.
    pub(super) fn fsync(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let fsync: FsyncIn = arguments.take()?;
        let file = self.file()?;
        if fsync.fsync_flags & FSYNC_FDATASYNC == 0 {
            self.fs().fsync(file)
        } else {
            self.fs().fdatasync(file)
        }
    }

    /// FSYNCDIR of the root syncs the whole mount: the kernel sends SYNCFS only to mounts over a
    /// block device, so `offshoot unmount` asks in this way.
    pub(super) fn fsyncdir(&self, arguments: RequestArguments<'_>) -> Result<()> {
        if self.node == ROOT_NODE || self.to.is_shut_down() {
            self.to.sync()
        } else {
            self.fsync(arguments)
        }
    }

    pub(super) fn forget(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let forget: ForgetIn = arguments.take()?;
        self.forget_node(self.node, forget.nlookup);
        Ok(())
    }

    pub(super) fn batch_forget(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let batch: BatchForgetIn = arguments.take()?;
        for _ in 0..batch.count {
            // A count that is too large fails at the end of the request.
            let one: ForgetOne = arguments.take()?;
            self.forget_node(one.nodeid, one.nlookup);
        }
        Ok(())
    }

    pub(super) fn forget_node(&self, node: u64, count: u64) {
        if let Some(file) = self.to.nodes.forget(node, count) {
            self.to.release(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With pages of 16 KiB, INIT once allowed requests of 4 MiB, more than a buffer holds.
    #[test]
    fn the_most_pages_are_the_most_bytes() {
        for page_size in [4 << 10, 16 << 10, 64 << 10, 1 << 20] {
            let bytes = usize::from(max_pages(page_size)) * page_size;
            assert_eq!(u32::try_from(bytes), Ok(MAX_BYTES), "pages of {page_size}");
        }
    }
}
