//! How much sources hold, before a volume is made for it.

use super::entry::{Contents, Entry, EntryKind, EntrySink};
use crate::{Result, TransferFailure, Watcher};

/// The unit in which data is counted.
const SECTOR: u64 = 4096;

/// What sources hold. Files that replace others are counted, too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SourceSize {
    /// Files of all kinds, and further names of them.
    pub entries: u64,
    /// Directories among them.
    pub directories: u64,
    /// The data of all regular files, holes left out.
    pub data_bytes: u64,
    /// The same, each file rounded up to whole sectors.
    pub sector_bytes: u64,
    /// Names, targets of links and extended attributes.
    pub text_bytes: u64,
}

/// Counts what comes.
pub(super) struct Measure<'a> {
    pub(super) size: SourceSize,
    watcher: &'a dyn Watcher,
}

impl<'a> Measure<'a> {
    pub(super) fn new(watcher: &'a dyn Watcher) -> Self {
        Self { size: SourceSize::default(), watcher }
    }
}

impl EntrySink for Measure<'_> {
    fn put(&mut self, entry: Entry, contents: &mut dyn Contents) -> Result {
        if self.watcher.is_interrupted() {
            return Err(TransferFailure::Interrupted);
        }
        let size = &mut self.size;
        size.entries += 1;
        let xattrs: usize = entry.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        let (_, name) = super::entry::split_path(&entry.path);
        size.text_bytes += (name.len() + xattrs) as u64;
        match &entry.kind {
            EntryKind::Regular { .. } => {
                let bytes = contents.data_bytes()?;
                size.data_bytes = size.data_bytes.saturating_add(bytes);
                let sectors = bytes.div_ceil(SECTOR).saturating_mul(SECTOR);
                size.sector_bytes = size.sector_bytes.saturating_add(sectors);
            }
            EntryKind::Directory => size.directories += 1,
            EntryKind::Symlink(target) => size.text_bytes += target.len() as u64,
            EntryKind::Node(_) | EntryKind::HardLink(_) => {}
        }
        Ok(())
    }
}
