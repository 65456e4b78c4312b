//! What the kernel is told to forget, because somebody else has changed what is mounted.
//!
//! A message about a name waits in the kernel for the lock of the directory, which a program may
//! hold while it waits for an answer. So who sends one holds nothing that any answer could wait
//! for, and is no thread that gives answers. On the other hand nothing that was looked up before
//! comes back into the caches after it: a lookup holds that lock too.
//!
//! While such a message waits nothing ends its thread, SIGKILL neither. Where it waits for an
//! answer of a process that was killed, the mount hangs until root takes it away by force
//! (`umount -f`).

use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use offshoot_vfs::{Error, FileId, Result};
use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::mappable::Mappable;
use crate::nodes::{Nodes, node};
use crate::wire::{InvalEntryOut, InvalInodeOut, OutHeader, notice};

/// What the kernel keeps of what is mounted.
#[derive(Clone)]
pub struct KernelCaches {
    device: Arc<OwnedFd>,
    root: FileId,
    nodes: Arc<Nodes>,
    mappable: Arc<Mappable>,
}

impl KernelCaches {
    pub(crate) fn new(
        device: Arc<OwnedFd>,
        root: FileId,
        nodes: Arc<Nodes>,
        mappable: Arc<Mappable>,
    ) -> Self {
        Self { device, root, nodes, mappable }
    }

    /// Leaves to the mount the opening that the caller has of `file`, which is about to lose its
    /// name: it ends when the kernel, which uses the file for programs, forgets it. `false` when
    /// the kernel does not know the file, or one is left to the mount already: then it stays the
    /// caller's.
    #[must_use]
    pub fn hold(&self, file: FileId) -> bool {
        self.nodes.hold(file)
    }

    /// Waits until the kernel has forgotten `file`, but no longer than `patience`: programs may be
    /// using it. Whether it has.
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

    /// Has the kernel look up anew what `name` in `dir` leads to, list the directory anew, and ask
    /// for its attributes.
    ///
    /// # Errors
    /// Those of the host.
    pub fn forget_name(&self, dir: FileId, name: &[u8]) -> Result<()> {
        let parent = node(self.root, dir);
        let namelen = u32::try_from(name.len()).unwrap_or(u32::MAX);
        let entry = InvalEntryOut { parent, namelen, flags: 0 };
        self.tell(notice::INVAL_ENTRY, &[entry.as_bytes(), name, b"\0"])?;
        // Without the name in its caches the kernel lets be what it has of the directory.
        self.forget_contents(parent)
    }

    /// Has the kernel send what programs have stored through mappings until now, and waits until
    /// that is answered. `syncfs` waits for it in older kernels only.
    ///
    /// # Errors
    /// Those of the host.
    pub fn store_mappings(&self) -> Result<()> {
        let files = self.mappable.all().into_iter();
        files.map(|file| node(self.root, file)).try_for_each(|node| self.forget_contents(node))
    }

    /// What is changed is sent before it is forgotten.
    fn forget_contents(&self, ino: u64) -> Result<()> {
        let whole = InvalInodeOut { ino, off: 0, len: 0 };
        self.tell(notice::INVAL_INODE, &[whole.as_bytes()])
    }

    /// Has the kernel ask for the attributes of `file` before it uses them again. This waits for
    /// nobody, so threads that give answers may send it.
    ///
    /// # Errors
    /// Those of the host.
    pub(crate) fn forget_attributes(&self, file: FileId) -> Result<()> {
        let none = InvalInodeOut { ino: node(self.root, file), off: -1, len: 0 };
        self.tell(notice::INVAL_INODE, &[none.as_bytes()])
    }

    fn tell(&self, code: i32, parts: &[&[u8]]) -> Result<()> {
        let len = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        // A number that no request has says that this is no answer, and then the error says what it
        // is.
        let header = OutHeader { len, error: code, unique: 0 };
        let mut all = vec![IoSlice::new(header.as_bytes())];
        all.extend(parts.iter().map(|part| IoSlice::new(part)));
        match rustix::io::writev(&self.device, &all) {
            // The kernel has nothing to forget, or the mount is gone with all its caches.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => Ok(()),
            Err(errno) => Err(Error::io("telling the kernel what has changed", errno)),
        }
    }
}
