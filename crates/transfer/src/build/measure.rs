//! How much sources hold, before a volume is made for it.

use offshoot_vfs::SafeName;

use super::entry::{BuildEntry, Contents, EntryKind, EntrySink};
use crate::extract::{LinkName, LinkTable};
use crate::zeros::SECTOR;
use crate::{Result, TransferFailure, Watcher};

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
    /// The inodes with several names whose data is counted.
    links: LinkTable,
}

impl<'a> Measure<'a> {
    pub(super) fn new(watcher: &'a dyn Watcher) -> Self {
        Self { size: SourceSize::default(), watcher, links: LinkTable::default() }
    }

    /// What comes next is of another source. What that has of the same inodes becomes files of
    /// their own.
    pub(super) fn begin_source(&mut self) {
        self.links = LinkTable::default();
    }

    /// Whether `entry` is one more name of a file that is counted.
    fn is_further_name(&mut self, entry: &BuildEntry) -> Result<bool> {
        let Some(inode) = &entry.inode else { return Ok(false) };
        let failed = |error: std::io::Error| {
            TransferFailure::Host("the table of hard links".to_owned(), error)
        };
        if self.links.newest(inode).map_err(failed)?.is_some() {
            return Ok(true);
        }
        let (_, name) = super::entry::split_path(&entry.path);
        let known = LinkName { parent: inode.file, name: SafeName::new(name)? };
        self.links.add(inode, &known).map_err(failed)?;
        Ok(false)
    }
}

impl EntrySink for Measure<'_> {
    fn put(&mut self, entry: BuildEntry, contents: &mut dyn Contents) -> Result {
        if self.watcher.is_interrupted() {
            return Err(TransferFailure::Interrupted);
        }
        let is_further_name = self.is_further_name(&entry)?;
        let size = &mut self.size;
        size.entries += 1;
        let xattrs: usize = entry.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        let (_, name) = super::entry::split_path(&entry.path);
        size.text_bytes += (name.len() + xattrs) as u64;
        match &entry.kind {
            EntryKind::Regular { .. } if is_further_name => {}
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
