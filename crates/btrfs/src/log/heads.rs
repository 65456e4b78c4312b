//! Copies the heads of new inodes into the log as they stand in the tree of the subvolume.
//!
//! New files of a directory get ascending numbers, so their heads follow each other: inode, name,
//! attributes, and the next inode. A run is a stretch of one leaf with heads that say only that
//! empty files exist. If no delayed item of these inodes waits, the run goes to the log in one
//! copy.
//!
//! The copy misses later changes of these inodes. That is allowed, because they are not the file
//! that is synced: a log may have them as they were when their leaf was read. But it must not have
//! half of a change, such as the mode that belongs to an access control list without that list. So
//! the inodes are locked from before their delayed items are flushed until the leaf is taken. An
//! inode that another thread has locked at that moment is not copied.

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{FileType, Result};

use super::names::{LoggedName, names_of};
use super::record::{LogRecording, LoggingStop, head_range};
use super::running::{LoggedInode, NameHolder};
use crate::block::TreeBlock;
use crate::delayed::GROUP;
use crate::inode::type_of;
use crate::storage::malformed;
use crate::tree::Cursor;

/// A leaf, and the slots in it that are the head of an inode.
type InodeHead = (Arc<TreeBlock>, Range<usize>);

/// The leaf of the subvolume that heads are read from.
#[derive(Default)]
pub(super) struct HeadReader {
    leaf: Option<Arc<TreeBlock>>,
    /// The range of inodes that no other thread changed while the leaf was taken, except those in
    /// `changing`.
    quiet: Range<u64>,
    /// Inodes in that range that another thread had locked, and may have changed.
    changing: Vec<u64>,
    /// The slots of the leaf that are to go to the log.
    run: Range<usize>,
}

/// The name of an inode, if its head says only that it exists and is empty, with one name, which
/// belongs to `entry`, and without attributes.
fn only_name(leaf: &TreeBlock, slots: Range<usize>, entry: Key) -> Result<Option<LoggedName>> {
    let (inode, names) = (slots.start, slots.start + 1);
    // A log with the entry of a name cannot have that name as INODE_EXTREF.
    if slots.len() != 2 || leaf.key(names).item_type != ItemType::INODE_REF {
        return Ok(None);
    }
    let item = InodeItem::view(leaf.data(inode)).map_err(malformed)?;
    let is_plain = match type_of(item)? {
        FileType::Regular => item.size.get() == 0 && item.nbytes.get() == 0,
        FileType::Directory | FileType::Symlink => false,
        _ => true,
    };
    let mut names = names_of(leaf.key(names), leaf.data(names))?;
    let only = names.pop().filter(|_| names.is_empty() && is_plain && item.nlink.get() == 1);
    Ok(only.filter(|name| (name.dir, name.index) == (entry.objectid, entry.offset)))
}

impl HeadReader {
    /// Logs that the new inode `ino`, which `entry` leads to, exists, if its head can be copied.
    /// Returns whether it could.
    pub(super) fn mention(
        &mut self,
        record: &mut LogRecording<'_, '_>,
        ino: u64,
        entry: Key,
    ) -> Result<bool, LoggingStop> {
        let Some((leaf, slots)) = self.find(record, ino)? else { return Ok(false) };
        let Some(name) = only_name(&leaf, slots.clone(), entry)? else { return Ok(false) };
        let at = (name.dir, name.bytes.clone());
        let (_, beside) = record.committed_entry(&name)?;
        if beside > 0 || record.own.names.contains_key(&at) {
            // Another inode may have to lose this name.
            return Ok(false);
        }
        if self.run.end != slots.start {
            self.put(record)?;
            self.run = slots.start..slots.start;
        }
        self.run.end = slots.end;
        record
            .own
            .names
            .insert(at.clone(), NameHolder { ino, index: name.index, is_extref: false });
        let (batch, names) = (record.batch, vec![at]);
        record.own.logged.insert(ino, LoggedInode { batch, names, ..LoggedInode::default() });
        Ok(true)
    }

    /// Puts the gathered run into the log.
    pub(super) fn put(&mut self, record: &mut LogRecording<'_, '_>) -> Result<(), LoggingStop> {
        let run = std::mem::take(&mut self.run);
        match &self.leaf {
            Some(leaf) => record.put_run(leaf, run),
            None => Ok(()),
        }
    }

    /// Finds the head of an inode, if it is in one leaf, has no delayed items, and no other thread
    /// has the inode locked.
    fn find(
        &mut self,
        record: &mut LogRecording<'_, '_>,
        ino: u64,
    ) -> Result<Option<InodeHead>, LoggingStop> {
        let (first, last) = head_range(ino).into_inner();
        let in_leaf = |leaf: &Arc<TreeBlock>, near: usize| {
            let (from, exists) = leaf.search_near(near, first);
            let (end, _) = leaf.search_near(from, last);
            // If the head ends with the leaf, more of it may be in the next one.
            (exists && end < leaf.len()).then(|| (leaf.clone(), from..end))
        };
        if self.quiet.contains(&ino) {
            if self.changing.contains(&ino) {
                return Ok(None);
            }
            if let Some(found) = self.leaf.as_ref().and_then(|leaf| in_leaf(leaf, self.run.end)) {
                return Ok(Some(found));
            }
        }
        self.put(record)?;
        *self = Self::default();
        // The inodes from this one to the end of its group of delayed items: they are flushed
        // together, and may share a leaf.
        let quiet = ino..(ino / GROUP + 1).saturating_mul(GROUP);
        let mut locks = Vec::new();
        for other in quiet.clone() {
            let file = record.file(other);
            match record.volume.inodes.try_lock(file) {
                Some(lock) => locks.push(lock),
                None if record.running.is_waiting(file) => {}
                None if other == ino => return Ok(None),
                None => self.changing.push(other),
            }
        }
        if !record.volume.delayed.flush_beside(record.handle, record.subvolume, first)? {
            return Ok(None);
        }
        let root = record.volume.tree(record.subvolume)?;
        let run = Cursor::seek(record.volume, root, first)?.take_run(last)?;
        drop(locks);
        let found = run.and_then(|(leaf, slots)| in_leaf(&leaf, slots.start));
        if let Some((leaf, slots)) = &found {
            (self.leaf, self.run) = (Some(leaf.clone()), slots.start..slots.start);
            self.quiet = quiet;
        }
        Ok(found)
    }
}
