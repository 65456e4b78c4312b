//! Invalidates what the kernel caches, after a change that did not come through the mount.
//!
//! The invalidation of a name waits in the kernel for the lock of the directory. A program may hold
//! that lock while it waits for an answer of ours. So the sender holds no lock that an answer could
//! need, and is not a thread that answers requests. A lookup takes the same lock, so no result from
//! before the invalidation enters the caches after it.
//!
//! No signal ends a thread whose invalidation waits, not even SIGKILL. If the process that had to
//! answer was killed, the mount hangs until root ends it by force (`umount -f`).

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use offshoot_vfs::{Error, FileId, Result};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::mappable::Mappable;
use crate::nodes::KnownFiles;
use crate::wire::{InvalEntryOut, InvalInodeOut, OutHeader, notice};

/// What the kernel caches of a mount.
#[derive(Clone)]
pub struct KernelCaches {
    device: Arc<OwnedFd>,
    nodes: Arc<KnownFiles>,
    mappable: Arc<Mappable>,
}

impl KernelCaches {
    pub(crate) fn new(
        device: Arc<OwnedFd>,
        nodes: Arc<KnownFiles>,
        mappable: Arc<Mappable>,
    ) -> Self {
        Self { device, nodes, mappable }
    }

    /// Hands the caller's opening of `file`, which is about to lose its name, to the mount. The
    /// mount releases it when the kernel forgets the file, which programs use until then. Returns
    /// `false`, and the caller keeps its opening, if the kernel does not know the file, or the
    /// mount already has an opening of it.
    #[must_use]
    pub fn hold(&self, file: FileId) -> bool {
        self.nodes.hold(file)
    }

    /// Waits until the kernel has forgotten `file`, for at most `patience`, because programs may be
    /// using it. Returns whether the kernel has forgotten it.
    #[must_use]
    pub fn wait_until_forgotten(&self, file: FileId, patience: Duration) -> bool {
        const PAUSE: Duration = Duration::from_millis(2);
        let since = Instant::now();
        while self.nodes.knows(file) {
            if since.elapsed() >= patience {
                return false;
            }
            thread::sleep(PAUSE);
        }
        true
    }

    /// Makes the kernel look up `name` in `dir` anew, list the directory anew, and ask for its
    /// attributes.
    ///
    /// # Errors
    /// Those of the host.
    pub fn forget_name(&self, dir: FileId, name: &[u8]) -> Result<()> {
        let parent = self.nodes.node(dir);
        let namelen = u32::try_from(name.len()).unwrap_or(u32::MAX);
        let entry = InvalEntryOut { parent, namelen, flags: 0 };
        self.tell(notice::INVAL_ENTRY, &[entry.as_bytes(), name, b"\0"])?;
        // A kernel that has not cached the name leaves the cached contents of the directory alone.
        self.forget_contents(parent)
    }

    /// Makes the kernel write back all that programs have stored through mappings so far, and waits
    /// until this process has answered. Only older kernels let `syncfs` wait for that.
    ///
    /// # Errors
    /// Those of the host.
    pub fn store_mappings(&self) -> Result<()> {
        let files = self.mappable.all().into_iter();
        files.map(|file| self.nodes.node(file)).try_for_each(|node| self.forget_contents(node))
    }

    /// The kernel writes dirty pages back before it drops them.
    fn forget_contents(&self, ino: u64) -> Result<()> {
        let whole = InvalInodeOut { ino, off: 0, len: 0 };
        self.tell(notice::INVAL_INODE, &[whole.as_bytes()])
    }

    /// Makes the kernel ask for the attributes of `file` before it uses them again. This waits for
    /// no other thread, so threads that answer requests may send it.
    ///
    /// # Errors
    /// Those of the host.
    pub(crate) fn forget_attributes(&self, file: FileId) -> Result<()> {
        let none = InvalInodeOut { ino: self.nodes.node(file), off: -1, len: 0 };
        self.tell(notice::INVAL_INODE, &[none.as_bytes()])
    }

    fn tell(&self, code: i32, parts: &[&[u8]]) -> Result<()> {
        let len = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        // `unique` 0 belongs to no request: it marks a notification, and `error` then holds its
        // code.
        let header = OutHeader { len, error: code, unique: 0 };
        let mut all = vec![IoSlice::new(header.as_bytes())];
        all.extend(parts.iter().map(|part| IoSlice::new(part)));
        match rustix::io::writev(&self.device, &all) {
            // The kernel has nothing to forget, or the mount has ended with all its caches.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => Ok(()),
            Err(errno) => Err(Error::io("telling the kernel what has changed", errno)),
        }
    }
}
