//! Logs directories.
//!
//! Indexes of entries only rise. So the new entries are behind the last entry of the last commit,
//! and the entries that are new since the directory was logged are behind the last logged one.
//! `notes` remembers the removed entries.
//!
//! - *A new entry* is logged with the inode that it leads to. A new inode is logged as an empty
//!   file: the inode item and its name. An inode is logged whole in three cases: it is not new, and
//!   may have lost another name for this one; it holds data; or another inode had the name.
//! - *A new directory* that an entry leads to is logged with its entries, and so on downwards:
//!   after a crash, everything new below a synced directory is there. A directory that is in the
//!   log is logged again if it has changed since. For that, the log remembers which new directories
//!   are below which.
//! - *A removed entry* is logged as gone, if the last commit has it. The inode that it led to is
//!   logged with its current names, if it has any.
//!
//! If there are many new entries, the delayed items of these entries and of their inodes are first
//! put into the tree of the subvolume. Then they go to the log as they stand there: runs of items
//! with one copy of their data (`heads`). Both kinds lie in leaves of this transaction, and older
//! leaves are not read. Each entry costs several times as much in a log as in a commit. So if the
//! new entries are a large part of the changes of the transaction, fsync makes a commit.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::file_type;
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{FileType, Result};

use super::heads::HeadReader;
use super::names::only_entry;
use super::record::{InodeItems, LogRecording, LoggingStop, inode_in, names_in};
use super::running::LoggedInode;
use crate::delayed;
use crate::inode::type_of;
use crate::storage::malformed;
use crate::transaction::{MOST_NOTES as MOST, Obstacle};
use crate::tree::Cursor;

/// How many entries one search reads.
const CHUNK: usize = 4096;

/// From this many new entries on, flushing delayed items into the tree and copying runs from there
/// pays.
const WORTH_RUNS: u64 = 64;

/// From this many new entries on, a commit may be cheaper. With fewer, the fixed costs of a commit
/// weigh more.
const WORTH_A_COMMIT: u64 = 512;

/// About how many bytes of tree blocks a new entry with a new file takes.
const ENTRY_BYTES: u64 = 512;

/// About how many times as much an entry costs in a log as in a commit.
const LOG_FACTOR: u64 = 3;

fn entry_key(dir: u64, index: u64) -> Key {
    Key::new(dir, ItemType::DIR_INDEX, index)
}

impl LogRecording<'_, '_> {
    /// Logs a locked directory, with its new and its removed entries.
    pub(super) fn directory(&mut self, dir: u64) -> Result<(), LoggingStop> {
        let (head, committed) = (self.head(dir)?, self.committed_head(dir)?);
        let item = inode_in(&head)?.filter(|item| item.nlink.get() > 0).ok_or(Obstacle::Failed)?;
        self.put_head(dir, &head)?;
        self.names(dir, &names_in(&head)?, &names_in(&committed)?)?;
        let after_committed = self.after_committed(dir)?;
        self.removed_entries(dir, after_committed)?;
        let logged = self.own.logged.entry(dir).or_default();
        logged.sequence = item.sequence.get();
        self.reached.extend_from_slice(&logged.below);
        self.new_entries(dir, after_committed)
    }

    /// One more than the highest index of an entry of the directory in the last commit.
    fn after_committed(&self, dir: u64) -> Result<u64> {
        let last = entry_key(dir, u64::MAX);
        let cursor = Cursor::seek_committed_floor(self.volume, self.own.committed, last)?;
        let found = cursor.item_of(dir, ItemType::DIR_INDEX);
        Ok(found.map_or(0, |(key, _)| key.offset.saturating_add(1)))
    }

    fn removed_entries(&mut self, dir: u64, after_committed: u64) -> Result<(), LoggingStop> {
        let removed = self.log.notes().take_removed(self.file(dir));
        for (&index, ino) in removed.range(..after_committed) {
            self.entry_gone(dir, index);
            self.give_way(ino.ok_or(Obstacle::Subvolumes)?)?;
            self.spill_much()?;
        }
        for (&index, ino) in removed.range(after_committed..) {
            self.edits.insert(entry_key(dir, index), None);
            // An inode that moved away must stay reachable although it was not synced itself.
            self.give_way(ino.ok_or(Obstacle::Subvolumes)?)?;
            self.spill_much()?;
        }
        Ok(())
    }

    /// Logs a new directory that an entry leads to, with its contents, unless the log has its
    /// current state.
    pub(super) fn reached_directory(&mut self, dir: u64) -> Result<(), LoggingStop> {
        if let Some(logged) = self.own.logged.get(&dir).filter(|logged| logged.is_whole) {
            let root = self.volume.tree(self.subvolume)?;
            let key = Key::new(dir, ItemType::INODE_ITEM, 0);
            let sequence = |data: &[u8]| {
                InodeItem::view(data).map(|item| item.sequence.get()).map_err(malformed)
            };
            if delayed::with_item(self.volume, root, key, sequence)? == Some(logged.sequence) {
                self.reached_batch = self.reached_batch.max(logged.batch);
                self.reached.extend_from_slice(&logged.below);
                return Ok(());
            }
        }
        self.seen.insert(dir);
        let _lock = self.lock(dir)?;
        self.directory(dir)
    }

    fn new_entries(&mut self, dir: u64, after_committed: u64) -> Result<(), LoggingStop> {
        let known = self.own.logged.entry(dir).or_default().next_entry;
        let first = after_committed.max(known);
        let root = self.volume.tree(self.subvolume)?;
        let all = entry_key(dir, first)..=entry_key(dir, u64::MAX);
        if let Some(last) = delayed::last_below(self.volume, root, all)? {
            let next = last.offset.saturating_add(1);
            if next - first > MOST as u64 {
                return Err(Obstacle::TooMuch.into());
            }
            let by_item = self.volume.options.mechanisms.logs_by_item;
            if !by_item && self.is_commit_cheaper(next - first)? {
                return Err(Obstacle::Cheaper.into());
            }
            let in_runs = next - first >= WORTH_RUNS && !by_item;
            if !in_runs || !self.entries_in_runs(dir, first)? {
                self.entries_by_item(dir, first)?;
            }
            self.own.logged.entry(dir).or_default().next_entry = next;
        }
        self.own.logged.entry(dir).or_default().is_whole = true;
        Ok(())
    }

    /// Whether a commit is cheaper than logging this many new entries.
    fn is_commit_cheaper(&self, entries: u64) -> Result<bool> {
        Ok(entries >= WORTH_A_COMMIT
            && entries * ENTRY_BYTES * LOG_FACTOR > self.volume.dirty_tree_bytes()?)
    }

    /// Logs the entries from this index on as they stand in the tree. Returns `false` and logs
    /// nothing if another thread is putting some of them there right now.
    fn entries_in_runs(&mut self, dir: u64, first: u64) -> Result<bool, LoggingStop> {
        let first = entry_key(dir, first);
        if !self.volume.delayed.flush_beside(self.handle, self.subvolume, first)? {
            return Ok(false);
        }
        let root = self.volume.tree(self.subvolume)?;
        let mut cursor = Cursor::seek(self.volume, root, first)?;
        let mut heads = HeadReader::default();
        while let Some((leaf, slots)) = cursor.take_run(entry_key(dir, u64::MAX))? {
            for slot in slots.clone() {
                self.entry(leaf.key(slot), leaf.data(slot), Some(&mut heads))?;
            }
            self.put_run(&leaf, slots)?;
        }
        heads.put(self)?;
        Ok(true)
    }

    /// Logs the entries from this index on one by one.
    fn entries_by_item(&mut self, dir: u64, mut next: u64) -> Result<(), LoggingStop> {
        loop {
            let entries = self.entries_from(dir, next)?;
            for (key, data) in &entries {
                self.edits.insert(*key, Some(data.clone()));
                self.entry(*key, data, None)?;
            }
            match entries.last() {
                Some((last, _)) if entries.len() == CHUNK => next = last.offset.saturating_add(1),
                _ => return Ok(()),
            }
        }
    }

    /// The first entries of a directory from this index on.
    fn entries_from(&self, dir: u64, index: u64) -> Result<InodeItems> {
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

    /// Logs the inode that a new entry leads to.
    fn entry(
        &mut self,
        key: Key,
        data: &[u8],
        heads: Option<&mut HeadReader>,
    ) -> Result<(), LoggingStop> {
        self.spill_much()?;
        if self.own.logged.len() + self.reached.len() > MOST {
            return Err(Obstacle::TooMuch.into());
        }
        let entry = only_entry(data)?;
        if entry.location.item_type != ItemType::INODE_ITEM {
            return Err(Obstacle::Subvolumes.into());
        }
        let (ino, at) = (entry.location.objectid, (key.objectid, entry.name.to_vec()));
        let holder =
            self.own.names.get(&at).filter(|one| (one.ino, one.index) == (ino, key.offset));
        if holder.is_some_and(|holder| holder.is_extref) {
            return Err(Obstacle::ManyNames.into());
        }
        let is_logged = holder.is_some();
        // A new directory may be in the log because a name needs it, and then without its entries.
        if entry.file_type == file_type::DIR && !self.is_committed(ino)? {
            self.own.logged.entry(key.objectid).or_default().below.push(ino);
            self.reached.push(ino);
            return Ok(());
        }
        if is_logged || self.seen.contains(&ino) {
            return Ok(());
        }
        if !self.own.logged.contains_key(&ino) && !self.is_committed(ino)? {
            if let Some(heads) = heads {
                if heads.mention(self, ino, key)? {
                    return Ok(());
                }
                heads.put(self)?;
            }
            if self.mention(ino)? {
                return Ok(());
            }
        }
        self.lock_also(ino)
    }

    /// Logs that a new inode exists, if it has one name and holds no data. Returns whether that was
    /// enough.
    fn mention(&mut self, ino: u64) -> Result<bool, LoggingStop> {
        // A thread that changes the inode has it locked until all of its items are there.
        let lock = self.lock(ino)?;
        let head = self.head(ino)?;
        drop(lock);
        let names = names_in(&head)?;
        let only = names.first_key_value().filter(|_| names.len() == 1);
        let Some((name, &ItemType::INODE_REF)) = only else { return Ok(false) };
        let Some(item) = inode_in(&head)? else { return Ok(false) };
        match type_of(&item)? {
            FileType::Symlink => return Ok(false),
            FileType::Regular => {
                // An inode that is logged as empty must not replace another one that has data.
                let is_over = self.is_of_another(ino, name)?;
                if item.nbytes.get() > 0 || item.size.get() > 0 || is_over {
                    return Ok(false);
                }
            }
            _ => {}
        }
        self.put_head(ino, &head)?;
        self.own.logged.insert(ino, LoggedInode { batch: self.batch, ..LoggedInode::default() });
        self.names(ino, &names, &BTreeMap::new())?;
        Ok(true)
    }
}
