//! Locks of inodes, which are taken before a transaction begins. A change takes all of its inodes
//! in one call, ascending by number, so no two changes wait for each other.

use offshoot_vfs::Result;
use offshoot_xfs_format::Ino;

use crate::trans::KeyLocks;

/// The locks of the inodes of a volume.
#[derive(Debug)]
pub(super) struct InodeLocks(KeyLocks<Ino>);

impl Default for InodeLocks {
    fn default() -> Self {
        Self(KeyLocks::new())
    }
}

impl InodeLocks {
    pub(super) fn lock(&self, inodes: impl IntoIterator<Item = Ino>) -> Result<LockedInodes<'_>> {
        let mut wanted: Vec<_> = inodes.into_iter().collect();
        wanted.sort_unstable();
        wanted.dedup();
        let mut locked = LockedInodes { locks: &self.0, inodes: Vec::with_capacity(wanted.len()) };
        for ino in wanted {
            self.0.lock(ino, ())?;
            locked.inodes.push(ino);
        }
        Ok(locked)
    }
}

/// Inodes that are locked until this is dropped.
#[derive(Debug)]
pub(crate) struct LockedInodes<'l> {
    locks: &'l KeyLocks<Ino>,
    inodes: Vec<Ino>,
}

impl Drop for LockedInodes<'_> {
    fn drop(&mut self) {
        self.inodes.iter().for_each(|ino| self.locks.unlock(*ino));
    }
}
