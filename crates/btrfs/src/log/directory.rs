//! A directory in the log.
//!
//! Indexes of entries only rise, so the entries that are new are behind the last one of the last commit; and those that are new since the directory was logged
//! are behind what was logged then. Entries that are gone were noted.
//!
//! - *A new entry* is logged as it is, with the inode that it leads to: if that is new, the inode itself and its name, as a file that holds nothing. Where something is stored in it, or another had the name, and if it is not new, all of it, because it may have lost another name for this one.
//! - *An entry that is gone* is said to be gone, if the last commit has it. The inode that it led to is logged with the names that it has now, if it has one.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{Error, FileType, Result};
use zerocopy::IntoBytes;

use super::record::{Items, Record, Stop, inode_in, names_in};
use super::running::{Logged, Obstacle};
use crate::delayed;
use crate::inode::type_of;
use crate::subvolume::malformed;
use crate::tree::Cursor;

/// Entries that are looked at in one go.
const CHUNK: usize = 4096;

fn entry_key(dir: u64, index: u64) -> Key {
    Key::new(dir, ItemType::DIR_INDEX, index)
}

/// The inode that the entry in a DIR_INDEX item leads to.
fn target(data: &[u8]) -> Result<u64, Stop> {
    let entry = dir_entries(data).next();
    let missing = || Error::corrupt("directory index", "an item without an entry");
    let location = entry.ok_or_else(missing)?.map_err(malformed)?.location;
    if location.item_type != ItemType::INODE_ITEM {
        return Err(Obstacle::Subvolumes.into());
    }
    Ok(location.objectid)
}

impl Record<'_, '_> {
    /// Logs a directory, which is locked, with the entries that came and went.
    pub(super) fn directory(&mut self, dir: u64) -> Result<(), Stop> {
        let (head, committed) = (self.head(dir)?, self.committed_head(dir)?);
        inode_in(&head)?.filter(|item| item.nlink.get() > 0).ok_or(Obstacle::Failed)?;
        self.put_head(dir, &head)?;
        self.names(dir, &names_in(&head)?, &names_in(&committed)?)?;
        let after_committed = self.after_committed(dir)?;
        self.removed_entries(dir, after_committed)?;
        self.new_entries(dir, after_committed)
    }

    /// The index behind that of the last entry that the directory has in the last commit.
    fn after_committed(&self, dir: u64) -> Result<u64> {
        let last = entry_key(dir, u64::MAX);
        let cursor = Cursor::seek_committed_floor(self.volume, self.own.committed, last)?;
        let found = cursor.item_of(dir, ItemType::DIR_INDEX);
        Ok(found.map_or(0, |(key, _)| key.offset.saturating_add(1)))
    }

    fn removed_entries(&mut self, dir: u64, after_committed: u64) -> Result<(), Stop> {
        let removed = self.log.notes().take_removed(self.file(dir));
        for &index in removed.range(..after_committed).map(|(index, _)| index) {
            let key = entry_key(dir, index);
            let cursor = Cursor::seek_committed(self.volume, self.own.committed, key)?;
            // One that came and went before the last commit is none.
            if let Some((_, data)) = cursor.item().filter(|(found, _)| *found == key) {
                let target = target(data)?;
                self.entry_gone(dir, index);
                self.give_way(target)?;
                self.spill_much()?;
            }
        }
        for (&index, ino) in removed.range(after_committed..) {
            self.edits.insert(entry_key(dir, index), None);
            // Moved away, it must not be in no place because it was not synced itself.
            self.give_way(ino.ok_or(Obstacle::Subvolumes)?)?;
            self.spill_much()?;
        }
        Ok(())
    }

    fn new_entries(&mut self, dir: u64, after_committed: u64) -> Result<(), Stop> {
        let known = self.own.logged.entry(dir).or_default().next_entry;
        let mut next = after_committed.max(known);
        loop {
            let entries = self.entries_from(dir, next)?;
            for (key, data) in &entries {
                self.entry(*key, data)?;
                self.spill_much()?;
            }
            if let Some((last, _)) = entries.last() {
                next = last.offset.saturating_add(1);
            }
            if entries.len() < CHUNK {
                break;
            }
        }
        let logged = self.own.logged.entry(dir).or_default();
        (logged.next_entry, logged.is_whole) = (next, true);
        Ok(())
    }

    /// The first entries of a directory from this index on.
    fn entries_from(&self, dir: u64, index: u64) -> Result<Items> {
        let mut entries = Vec::new();
        let root = self.volume.tree(self.subvolume)?;
        let range = entry_key(dir, index)..=entry_key(dir, u64::MAX);
        delayed::for_each_item(self.volume, root, range, &mut |key, data| {
            entries.push((key, data.to_vec()));
            let is_enough = entries.len() == CHUNK;
            Ok(if is_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(entries)
    }

    /// Logs a new entry, and what it leads to.
    fn entry(&mut self, key: Key, data: &[u8]) -> Result<(), Stop> {
        let ino = target(data)?;
        self.edits.insert(key, Some(data.to_vec()));
        let is_this = |at: &(u64, Vec<u8>)| {
            let holder = self.own.names.get(at);
            at.0 == key.objectid && holder.is_some_and(|holder| holder.index == key.offset)
        };
        if self.seen.contains(&ino) {
            return Ok(());
        }
        let logged = self.own.logged.get(&ino);
        if logged.is_some_and(|logged| logged.names.iter().any(is_this)) {
            return Ok(());
        }
        if logged.is_some() || self.is_committed(ino)? || !self.mention(ino)? {
            return self.lock_also(ino);
        }
        Ok(())
    }

    /// Logs that a new inode exists, if its only name is the entry at hand and that is enough of it; whether it is so.
    fn mention(&mut self, ino: u64) -> Result<bool, Stop> {
        let mut head = self.head(ino)?;
        let names = names_in(&head)?;
        let Some(item) = inode_in(&head)?.filter(|_| names.len() == 1) else { return Ok(false) };
        match type_of(&item)? {
            FileType::Symlink => return Ok(false),
            FileType::Regular => {
                // Empty, it must not take the place of one that was not.
                let is_over = names.iter().map(|(name, _)| self.is_of_another(ino, name));
                if item.nbytes.get() > 0 || is_over.collect::<Result<Vec<_>>>()?.contains(&true) {
                    return Ok(false);
                }
                without_data(&mut head)?;
            }
            _ => {}
        }
        self.put_head(ino, &head)?;
        self.own.logged.insert(ino, Logged { batch: self.batch, ..Logged::default() });
        self.names(ino, &names, &BTreeSet::new())?;
        Ok(true)
    }
}

/// Makes the file one that holds nothing.
fn without_data(head: &mut Items) -> Result<()> {
    for (_, data) in head.iter_mut().filter(|(key, _)| key.item_type == ItemType::INODE_ITEM) {
        let mut item = *InodeItem::view(data).map_err(malformed)?;
        (item.size, item.nbytes) = (0.into(), 0.into());
        *data = item.as_bytes().to_vec();
    }
    Ok(())
}
