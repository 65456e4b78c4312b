//! Extents of files that overlap or are damaged, where the user has chosen that something of them
//! may be lost.
//!
//! | what is wrong | what becomes of it |
//! |---|---|
//! | extents overlap | the older ones are [cut](crate::repair::overlaps) |
//! | an extent without length, or on disk where no data can be | it is dropped |
//! | its length before compression is too low | it follows from the rest of the item |
//! | its generation is newer than the volume | it gets that of the last change of the file |
//! | preallocated and compressed | not compressed if its lengths say so, and dropped otherwise |
//! | extents of what the mode and all entries call no file | they are dropped |
//! | compressed data of a file without checksums | checksums of all its data clear the flag |
//!
//! What nothing speaks for stays, and the check names it again.

use std::collections::BTreeMap;

use offshoot_btrfs_format::compress::{self, Compression};
use offshoot_btrfs_format::file_extent::{
    FileExtent, FileExtentBody, FileExtentHead, MAX_COMPRESSED_EXTENT,
};
use offshoot_btrfs_format::inode::{InodeItem, inode_flags};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::FileType;
use zerocopy::FromBytes;

use super::FileMender;
use crate::check::used_range;
use crate::repair::accept::StoredChecksums;
use crate::repair::leaves::cut;
use crate::repair::overlaps::{
    ChangeLog, ExtentCutter, FileExtentItem, ItemChange, OverlapStep, len_in_file,
    newest_generation, problem_with_place,
};

/// Why an extent of what is no file is dropped.
const FOREIGN: &str = "the inode is no file that has extents";

/// What is wrong with an extent item, and what is done about it.
enum ExtentFault {
    /// The item with other values.
    Corrected(Vec<u8>, String),
    Dropped(String),
}

impl FileMender<'_, '_> {
    /// Mends the extents of an inode.
    pub(super) fn mend_extents(&mut self, ino: u64, overlaps: &mut OverlapStep) {
        let subvolume = self.root.id;
        let moved = overlaps.moved.remove(&(subvolume, ino)).unwrap_or_default();
        let log = &mut overlaps.log;
        let stored = self.items_of(ino, ItemType::EXTENT_DATA);
        let kind = self.type_of(ino);
        if kind.is_some_and(|kind| !matches!(kind, FileType::Regular | FileType::Symlink)) {
            for (offset, _) in moved {
                let key = Key::new(ino, ItemType::EXTENT_DATA, offset);
                log.add(subvolume, ino, ItemChange::Dropped { key, problem: FOREIGN.into() });
            }
            self.drop_foreign(ino, kind, &stored, log);
            return;
        }
        let mut extents: Vec<FileExtentItem> = Vec::with_capacity(stored.len() + moved.len());
        for (&key, data) in &stored {
            match self.fault(ino, data) {
                None => extents.push((key.offset, data.clone())),
                Some(ExtentFault::Corrected(data, problem)) => {
                    extents.push((key.offset, data));
                    log.add(subvolume, ino, ItemChange::Corrected { key, problem });
                }
                Some(ExtentFault::Dropped(problem)) => {
                    log.add(subvolume, ino, ItemChange::Dropped { key, problem });
                }
            }
        }
        extents.extend(moved);
        let cutter = ExtentCutter::new(self.volume);
        let kept = cutter.without_overlaps(extents, &mut |range, extent| {
            log.add(subvolume, ino, cut(&range, extent));
        });
        let mut gone = stored;
        for (offset, data) in kept {
            let key = Key::new(ino, ItemType::EXTENT_DATA, offset);
            gone.remove(&key);
            self.set(key, data);
        }
        self.edits.extend(gone.into_keys().map(|key| (key, None)));
        self.allow_checksums(ino, log);
    }

    /// Drops extents of an inode that is no file by its mode and by all entries that lead to it.
    fn drop_foreign(
        &mut self,
        ino: u64,
        kind: Option<FileType>,
        stored: &BTreeMap<Key, Vec<u8>>,
        log: &mut ChangeLog,
    ) {
        let told = self.told_kinds(ino);
        if told.is_empty() || told.iter().any(|one| Some(*one) != kind) {
            return;
        }
        for &key in stored.keys() {
            log.add(self.root.id, ino, ItemChange::Dropped { key, problem: FOREIGN.into() });
            self.edits.insert(key, None);
        }
    }

    /// What is wrong with an extent item of a file on its own.
    fn fault(&self, ino: u64, data: &[u8]) -> Option<ExtentFault> {
        let extent = match FileExtent::parse(data) {
            Ok(extent) => extent,
            Err(malformed) => return Some(ExtentFault::Dropped(malformed.problem.into_owned())),
        };
        if len_in_file(&extent, self.volume.sector_size()) == 0 {
            return Some(ExtentFault::Dropped("it is empty".into()));
        }
        if let Some(problem) = problem_with_place(self.volume, &extent) {
            return Some(ExtentFault::Dropped(problem));
        }
        let mut corrected = data.to_vec();
        let mut problems = Vec::new();
        let (head, _) = FileExtentHead::mut_from_prefix(&mut corrected).ok()?;
        if extent.generation > newest_generation(self.volume) {
            let newest = self.volume.superblock().generation.0;
            let changed = self.inode(ino).map_or(newest, |inode| inode.transid.get());
            head.generation = changed.min(newest).into();
            problems.push(format!("its generation was {}", extent.generation));
        }
        if let FileExtentBody::Extent { disk_num_bytes, is_preallocated: true, .. } = extent.body
            && extent.compression != Compression::None
        {
            if disk_num_bytes != extent.ram_bytes {
                return Some(ExtentFault::Dropped("preallocated and compressed".into()));
            }
            head.compression = 0;
            problems.push("it was preallocated and compressed".into());
        }
        match self.len_before_compression(&extent) {
            None => {
                let problem = "its data does not fit into an item".into();
                return Some(ExtentFault::Dropped(problem));
            }
            Some(len) if len != extent.ram_bytes => {
                head.ram_bytes = len.into();
                problems.push(format!("its length before compression was {}", extent.ram_bytes));
            }
            Some(_) => {}
        }
        let problem = problems.join("; ");
        (!problem.is_empty()).then_some(ExtentFault::Corrected(corrected, problem))
    }

    /// The length before compression that an extent has, or must have at least, in bytes; `None`
    /// for data in an item that is longer than a sector.
    fn len_before_compression(&self, extent: &FileExtent<'_>) -> Option<u64> {
        let sector = self.volume.sector_size();
        match extent.body {
            FileExtentBody::Inline(_) if extent.ram_bytes <= sector => Some(extent.ram_bytes),
            FileExtentBody::Inline(bytes) => {
                let len = if extent.compression == Compression::None {
                    bytes.len() as u64
                } else {
                    let most = usize::try_from(extent.ram_bytes.min(MAX_COMPRESSED_EXTENT)).ok()?;
                    let sector = u32::try_from(sector).ok()?;
                    let mut plain = vec![0; most];
                    compress::decompress(extent.compression, bytes, sector, &mut plain).ok()? as u64
                };
                Some(len).filter(|&len| 0 < len && len <= sector)
            }
            FileExtentBody::Hole { num_bytes } => Some(extent.ram_bytes.max(num_bytes)),
            FileExtentBody::Extent { disk_num_bytes, offset, num_bytes, .. } => {
                let is_inside =
                    offset.checked_add(num_bytes).is_some_and(|end| end <= extent.ram_bytes);
                Some(if is_inside { extent.ram_bytes } else { disk_num_bytes })
            }
        }
    }

    /// Takes the flag from a file with compressed data that it has no checksums, if all of its data
    /// has checksums.
    fn allow_checksums(&mut self, ino: u64, log: &mut ChangeLog) {
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let Some(mut data) = self.item(key) else { return };
        let Ok(inode) = InodeItem::mut_from_bytes(&mut data) else { return };
        let flags = inode.flags.get();
        let Some(tree) = self.volume.tree(TreeId::CSUM) else { return };
        if flags & inode_flags::NODATASUM == 0 {
            return;
        }
        let checksums = StoredChecksums::new(self.volume, tree);
        let items = self.items_of(ino, ItemType::EXTENT_DATA);
        let extents: Vec<_> =
            items.values().filter_map(|data| FileExtent::parse(data).ok()).collect();
        let is_compressed = extents.iter().any(|one| one.compression != Compression::None);
        let has_checksums = |extent: &FileExtent<'_>| {
            let missing = used_range(extent).map(|range| checksums.missing(&range));
            missing.is_none_or(|missing| missing.is_ok_and(|missing| missing.is_empty()))
        };
        if !is_compressed || !extents.iter().all(has_checksums) {
            return;
        }
        inode.flags = (flags & !(inode_flags::NODATASUM | inode_flags::NODATACOW)).into();
        self.set(key, data);
        let problem = "compressed data of a file without checksums".into();
        log.add(self.root.id, ino, ItemChange::Corrected { key, problem });
    }
}
