//! Which files may be written to through a mapping.
//!
//! What a program stores in a shared mapping is known to the kernel alone until it sends it, and
//! nobody is told of mappings. But only a file that is open for reading and writing can have one,
//! and the kernel has sent all of it before it says that such a file is closed.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use offshoot_vfs::FileId;
use rustix::fs::OFlags;

/// Files that are open for reading and writing, each with how often.
#[derive(Default)]
pub(crate) struct Mappable {
    files: Mutex<HashMap<FileId, u64>>,
}

impl Mappable {
    fn files(&self) -> MutexGuard<'_, HashMap<FileId, u64>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `file` was opened with these flags.
    pub(crate) fn opened(&self, file: FileId, flags: u32) {
        if is_both(flags) {
            *self.files().entry(file).or_default() += 1;
        }
    }

    /// What was opened with these flags is closed.
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

    /// All that may be written to through a mapping.
    pub(crate) fn all(&self) -> Vec<FileId> {
        self.files().keys().copied().collect()
    }

    /// Whether `file` may be written to through a mapping.
    pub(crate) fn contains(&self, file: FileId) -> bool {
        self.files().contains_key(&file)
    }
}

/// Whether these flags open for reading and writing.
fn is_both(flags: u32) -> bool {
    OFlags::from_bits_retain(flags) & OFlags::ACCMODE == OFlags::RDWR
}
