//! Which files a program can write through a shared mapping.
//!
//! The kernel alone knows what a program stores in a shared mapping, until it writes that back. It
//! reports no mappings. But only a file that is open for reading and writing can have one. The
//! kernel writes all of it back before it sends RELEASE for such a file.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use offshoot_vfs::FileId;
use rustix::fs::OFlags;

/// Files that are open for reading and writing, each with the number of its openings.
#[derive(Default)]
pub(crate) struct Mappable {
    files: Mutex<HashMap<FileId, u64>>,
}

impl Mappable {
    fn files(&self) -> MutexGuard<'_, HashMap<FileId, u64>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an opening of `file` with these flags.
    pub(crate) fn opened(&self, file: FileId, flags: u32) {
        if is_both(flags) {
            *self.files().entry(file).or_default() += 1;
        }
    }

    /// An opening of `file` with these flags has ended.
    pub(crate) fn closed(&self, file: FileId, flags: u32) {
        if !is_both(flags) {
            return;
        }
        let mut files = self.files();
        if let Some(count) = files.get_mut(&file) {
            *count -= 1;
            if *count == 0 {
                files.remove(&file);
            }
        }
    }

    /// All files that a program can write through a mapping.
    pub(crate) fn all(&self) -> Vec<FileId> {
        self.files().keys().copied().collect()
    }

    /// Whether a program can write `file` through a mapping.
    pub(crate) fn contains(&self, file: FileId) -> bool {
        self.files().contains_key(&file)
    }
}

/// Whether an opening with these flags can read and write.
fn is_both(flags: u32) -> bool {
    OFlags::from_bits_retain(flags) & OFlags::ACCMODE == OFlags::RDWR
}
