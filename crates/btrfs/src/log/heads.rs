//! Heads of new inodes that go to the log as they stand in the tree of the subvolume.
//!
//! A directory numbers its new files in the order in which they come, so their heads follow each
//! other: inode, name, attributes, and the next inode. When nothing of them waits to be put into
//! the tree, all that is in one leaf and says no more than that empty files exist goes to the log
//! as one run.
//!
//! What is done to these inodes meanwhile is not seen: they are not what is synced, and a log may
//! have them as they were when their leaf was looked at. But it has no half of a change, like the
//! mode that belongs to an access list without that list. So while what waits is put into the tree,
//! and until the leaf is taken from there, the inodes are locked. One that somebody else has locked
//! just then is not copied.

use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{FileType, Result};

use super::names::{Name, names_of};
use super::record::{Record, Stop, head_range};
use super::running::{Holder, Logged};
use crate::block::TreeBlock;
use crate::delayed::GROUP;
use crate::inode::type_of;
use crate::storage::malformed;
use crate::tree::Cursor;

/// A leaf, and which of its items are the head of an inode.
type Head = (Arc<TreeBlock>, Range<usize>);

/// The leaf of the subvolume that heads are read in.
#[derive(Default)]
pub(super) struct Heads {
    leaf: Option<Arc<TreeBlock>>,
    /// The inodes that nobody changed while the leaf was taken.
    quiet: Range<u64>,
    /// Those of them that somebody did change.
    changing: Vec<u64>,
    /// What of the leaf is to go to the log.
    run: Range<usize>,
}

/// The name of an inode, if its head in a leaf says no more than that it exists and is empty, with
/// one name, which has this entry. It has no attributes.
fn only_name(leaf: &TreeBlock, slots: Range<usize>, entry: Key) -> Result<Option<Name>> {
    let (inode, names) = (slots.start, slots.start + 1);
    // Names that are INODE_EXTREF are not for a log that has their entries.
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

impl Heads {
    /// Logs that the new inode exists to which this entry leads, if its head can be copied; whether
    /// it is so.
    pub(super) fn mention(
        &mut self,
        record: &mut Record<'_, '_>,
        ino: u64,
        entry: Key,
    ) -> Result<bool, Stop> {
        let Some((leaf, slots)) = self.find(record, ino)? else { return Ok(false) };
        let Some(name) = only_name(&leaf, slots.clone(), entry)? else { return Ok(false) };
        let at = (name.dir, name.bytes.clone());
        let (_, beside) = record.committed_entry(&name)?;
        if beside > 0 || record.own.names.contains_key(&at) {
            // Somebody else may have to give way.
            return Ok(false);
        }
        if self.run.end != slots.start {
            self.put(record)?;
            self.run = slots.start..slots.start;
        }
        self.run.end = slots.end;
        record.own.names.insert(at.clone(), Holder { ino, index: name.index, is_extref: false });
        let (batch, names) = (record.batch, vec![at]);
        record.own.logged.insert(ino, Logged { batch, names, ..Logged::default() });
        Ok(true)
    }

    /// Puts into the log what is to go there.
    pub(super) fn put(&mut self, record: &mut Record<'_, '_>) -> Result<(), Stop> {
        let run = std::mem::take(&mut self.run);
        match &self.leaf {
            Some(leaf) => record.put_run(leaf, run),
            None => Ok(()),
        }
    }

    /// Where the head of an inode is, if it is in one leaf, nothing of it waits, and nobody changes
    /// it.
    fn find(&mut self, record: &mut Record<'_, '_>, ino: u64) -> Result<Option<Head>, Stop> {
        let (first, last) = head_range(ino).into_inner();
        let in_leaf = |leaf: &Arc<TreeBlock>, near: usize| {
            let (from, exists) = leaf.search_near(near, first);
            let (end, _) = leaf.search_near(from, last);
            // More of it may be in the next leaf.
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
        // Those that wait together with it, and may be in the same leaf.
        let quiet = ino..(ino / GROUP + 1).saturating_mul(GROUP);
        let mut locks = Vec::new();
        for other in quiet.clone() {
            let file = record.file(other);
            match record.volume.inodes.try_lock(file) {
                Some(lock) => locks.push(lock),
                None if record.volume.log.is_waiting(file) => {}
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
