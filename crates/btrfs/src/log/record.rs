//! Chooses what fsync puts into the log: an inode, and what its names need.
//!
//! A log says how inodes differ from the last commit. The trees of that commit do not change
//! meanwhile, so this module compares with them:
//!
//! - *The inode:* its item, all its names and all its attributes, because replay removes those that
//!   the log lacks. The extents that changed, as whole items, with holes, and the checksums of new
//!   data.
//! - *A new name:* the directory, if it is new, with its own name, and so on upwards. Another inode
//!   may have that name in the last commit, or in the log. It would lose the name, and if that is
//!   its last name, it would be lost itself. So it is logged too, with its current names, or
//!   removed from the log if it is deleted.
//! - *A removed name:* the log says that its entry is gone from the directory. For that, the log
//!   has the directory as it is in the last commit.
//!
//! - *A name that moved to another inode:* that inode is in the log with the name. If it is not,
//!   fsync makes a commit instead.
//!
//! All this goes to the log as batches of edits. If something turns out to be impossible to log,
//! later fsyncs of this transaction log nothing, so it does not matter what the log has by then.
//! The inode that is fsynced is locked. Other inodes are locked too, unless the thread that has one
//! locked is waiting for the log trees, to log it. This thread waits for such a lock only briefly,
//! because its holder may be waiting for this fsync in another way. After that time fsync makes a
//! commit instead.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::{Range, RangeInclusive};

use offshoot_btrfs_format::dir::name_hash;
use offshoot_btrfs_format::edit::{ITEM_SIZE, items_bytes, leaf_capacity};
use offshoot_btrfs_format::inode::InodeItem;
use offshoot_btrfs_format::space::DirLogItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Errno, Error, FileId, FileType, Result};
use zerocopy::IntoBytes;

use super::fsync::require_small;
use super::names::{LoggedName, is_of_names, names_of};
use super::running::{LoggedInode, NameHolder, RunningLog, SubvolumeLog, apply, put_run};
use crate::block::TreeBlock;
use crate::delayed;
use crate::inode::{Locks, entry_called, lookup_once, type_of};
use crate::inode::{Rooms, RoomsHandle};
use crate::space::Reservation;
use crate::storage::malformed;
use crate::transaction::{LogState, MOST_NOTES as MOST, Obstacle};
use crate::tree::{Cursor, TreeRoot};
use std::ops::ControlFlow;
use std::time::Duration;

/// Why logging stopped.
pub(super) enum LoggingStop {
    Obstacle(Obstacle),
    Error(Error),
}

impl LoggingStop {
    pub(super) fn obstacle(&self) -> Obstacle {
        match self {
            Self::Obstacle(obstacle) => *obstacle,
            Self::Error(_) => Obstacle::Failed,
        }
    }
}

impl From<Error> for LoggingStop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

impl From<Obstacle> for LoggingStop {
    fn from(obstacle: Obstacle) -> Self {
        Self::Obstacle(obstacle)
    }
}

/// How many edits are gathered before they are put into the log.
const MOST_GATHERED: usize = 8192;

/// How long to wait for the lock of another inode. Most operations end sooner, and a commit takes
/// longer. But some holders of such a lock wait for this fsync.
const PATIENCE: Duration = Duration::from_millis(1);

/// Items of one inode.
pub(super) type InodeItems = Vec<(Key, Vec<u8>)>;

/// The work of one fsync on the log.
pub(super) struct LogRecording<'a, 'v> {
    pub(super) handle: &'a RoomsHandle<'v>,
    pub(super) volume: &'v Rooms,
    pub(super) log: &'a LogState,
    pub(super) running: &'a RunningLog,
    pub(super) own: &'a mut SubvolumeLog,
    pub(super) subvolume: TreeId,
    pub(super) batch: u64,
    /// Gathered edits: the new item for a key, or `None` to remove it.
    pub(super) edits: BTreeMap<Key, Option<Vec<u8>>>,
    /// Locks of inodes other than the one that is fsynced.
    held: Vec<Locks>,
    /// Locked files that are still to be logged whole.
    files: Vec<u64>,
    /// New directories that names need, still to be logged.
    directories: Vec<u64>,
    /// New directories that entries lead to, still to be logged.
    pub(super) reached: Vec<u64>,
    /// The last batch of those among them that were already in the log and had not changed.
    pub(super) reached_batch: u64,
    /// Some of the edits are in the log already.
    is_spilled: bool,
    /// Names that the log takes away from inodes.
    taken: BTreeSet<(u64, Vec<u8>)>,
    /// Inodes that this fsync has dealt with.
    pub(super) seen: HashSet<u64>,
    /// How many extent items were added to the log or removed from it.
    pub(super) extents: usize,
}

/// The keys of the *head* of an inode: its inode item, names and attributes, which come before its
/// entries or extents.
pub(super) fn head_range(ino: u64) -> RangeInclusive<Key> {
    Key::new(ino, ItemType::INODE_ITEM, 0)..=Key::new(ino, ItemType::XATTR_ITEM, u64::MAX)
}

fn is_of_head(item_type: ItemType) -> bool {
    matches!(item_type, ItemType::INODE_ITEM | ItemType::XATTR_ITEM) || is_of_names(item_type)
}

/// The inode item of a head.
pub(super) fn inode_in(head: &InodeItems) -> Result<Option<InodeItem>> {
    let item = head.iter().find(|(key, _)| key.item_type == ItemType::INODE_ITEM);
    item.map(|(_, data)| InodeItem::view(data).copied().map_err(malformed)).transpose()
}

/// The names in a head, each with the type of its item.
pub(super) fn names_in(head: &InodeItems) -> Result<BTreeMap<LoggedName, ItemType>> {
    let mut names = BTreeMap::new();
    for (key, data) in head.iter().filter(|(key, _)| is_of_names(key.item_type)) {
        // The root directory has the name `..` in itself, which is skipped.
        if key.offset != key.objectid || key.item_type != ItemType::INODE_REF {
            names.extend(names_of(*key, data)?.into_iter().map(|name| (name, key.item_type)));
        }
    }
    Ok(names)
}

/// The head of an inode as it is now.
pub(super) fn current_head(volume: &Rooms, file: FileId) -> Result<InodeItems> {
    let mut head = Vec::new();
    let root = volume.tree(TreeId(file.dev))?;
    delayed::for_each_item(volume, root, head_range(file.ino), &mut |key, data| {
        if is_of_head(key.item_type) {
            head.push((key, data.to_vec()));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(head)
}

/// The head of an inode of a subvolume in the last commit.
pub(super) fn committed_head(volume: &Rooms, subvolume: TreeRoot, ino: u64) -> Result<InodeItems> {
    head_behind(Cursor::seek_committed(volume, subvolume, *head_range(ino).start())?, ino)
}

/// The head of an inode in a log.
pub(super) fn logged_head(volume: &Rooms, log: TreeRoot, ino: u64) -> Result<InodeItems> {
    head_behind(Cursor::seek(volume, log, *head_range(ino).start())?, ino)
}

/// Reads the head of an inode from the cursor on.
fn head_behind(mut cursor: Cursor<'_>, ino: u64) -> Result<InodeItems> {
    let (mut head, range) = (Vec::new(), head_range(ino));
    while let Some((key, data)) = cursor.item().filter(|(key, _)| range.contains(key)) {
        if is_of_head(key.item_type) {
            head.push((key, data.to_vec()));
        }
        cursor.advance()?;
    }
    Ok(head)
}

impl<'a, 'v> LogRecording<'a, 'v> {
    pub(super) fn new(
        handle: &'a RoomsHandle<'v>,
        running: &'a RunningLog,
        own: &'a mut SubvolumeLog,
        subvolume: TreeId,
        batch: u64,
    ) -> Self {
        Self {
            handle,
            volume: handle.volume(),
            log: handle.log(),
            running,
            own,
            subvolume,
            batch,
            edits: BTreeMap::new(),
            held: Vec::new(),
            files: Vec::new(),
            directories: Vec::new(),
            reached: Vec::new(),
            reached_batch: 0,
            is_spilled: false,
            taken: BTreeSet::new(),
            seen: HashSet::new(),
            extents: 0,
        }
    }

    pub(super) fn file(&self, ino: u64) -> FileId {
        FileId { dev: self.subvolume.0, ino }
    }

    pub(super) fn log_root(&self) -> TreeRoot {
        *self.own.tree.root.read()
    }

    /// Logs the file or directory `ino`, which is locked, and returns the batch that it is in.
    pub(super) fn run(mut self, ino: u64, is_directory: bool) -> Result<u64, LoggingStop> {
        self.seen.insert(ino);
        if is_directory {
            self.directory(ino)?;
        } else {
            self.files.push(ino);
        }
        loop {
            if let Some(dir) = self.directories.pop() {
                self.new_directory(dir)?;
            } else if let Some(file) = self.files.pop() {
                self.whole(file)?;
            } else if let Some(dir) = self.reached.pop() {
                self.reached_directory(dir)?;
            } else {
                break;
            }
            self.require_few()?;
            self.spill_much()?;
        }
        self.require_holders()?;
        self.require_few()?;
        self.apply(ino)
    }

    /// Stops when the log has more inodes, ranges of checksums, files to log or locks than
    /// [`MOST`].
    fn require_few(&self) -> Result<(), LoggingStop> {
        let Self { own, files, held, .. } = self;
        let most = own.logged.len().max(own.sums.len()).max(files.len()).max(held.len());
        if most > MOST { Err(Obstacle::TooMuch.into()) } else { Ok(()) }
    }

    /// If the log takes a name from an inode, and another inode has that name now, the log must
    /// have that inode with the name. Otherwise no inode would have the name after a replay.
    fn require_holders(&self) -> Result<(), LoggingStop> {
        for at in &self.taken {
            let holder = match lookup_once(self.volume, self.file(at.0), &at.1) {
                Ok(holder) => holder,
                Err(error) if error.errno() == Errno::NOENT => continue,
                Err(error) => return Err(error.into()),
            };
            let is_logged = self.own.names.get(at).is_some_and(|one| one.ino == holder.ino);
            if holder.dev != self.subvolume.0 || !is_logged {
                return Err(Obstacle::NameTaken.into());
            }
        }
        Ok(())
    }

    /// Puts the remaining edits into the log, and returns the batch of `ino`.
    fn apply(mut self, ino: u64) -> Result<u64, LoggingStop> {
        let known = self.own.logged.get(&ino).map(|logged| logged.batch);
        if self.edits.is_empty()
            && !self.is_spilled
            && let Some(batch) = known
        {
            return Ok(batch.max(self.reached_batch));
        }
        for ino in &self.seen {
            if let Some(logged) = self.own.logged.get_mut(ino) {
                logged.batch = self.batch;
            }
        }
        self.spill()?;
        Ok(self.batch)
    }

    /// Puts the gathered edits into the log if there are many.
    pub(super) fn spill_much(&mut self) -> Result<(), LoggingStop> {
        if self.edits.len() < MOST_GATHERED { Ok(()) } else { self.spill() }
    }

    /// Reserves space to put this many items, with this many bytes of data in all, into the log.
    fn room(&self, items: usize, bytes: usize) -> Result<Reservation<'a>, LoggingStop> {
        let space = self.handle.space();
        let cost = space.cost_of_log(self.log.taken(), self.log_root().level, items, bytes);
        space.try_reserve(cost).ok_or(LoggingStop::Obstacle(Obstacle::NoRoom))
    }

    /// Copies items of a leaf of the subvolume into the log. No gathered edit has one of these
    /// keys.
    pub(super) fn put_run(
        &mut self,
        leaf: &TreeBlock,
        slots: Range<usize>,
    ) -> Result<(), LoggingStop> {
        if slots.is_empty() {
            return Ok(());
        }
        require_small(self.log, self.volume)?;
        self.is_spilled = true;
        let (items, bytes) = (slots.len(), items_bytes(leaf.bytes(), slots.start, slots.end));
        let _room = self.room(items, bytes)?;
        put_run(self.handle, &self.own.tree, leaf, slots)?;
        let stats = &self.volume.live()?.stats;
        stats.logged(items);
        stats.logged_run();
        Ok(())
    }

    fn spill(&mut self) -> Result<(), LoggingStop> {
        let live = self.volume.live()?;
        require_small(self.log, self.volume)?;
        self.is_spilled = true;
        let bytes = self.edits.values().flatten().map(Vec::len).sum();
        let _room = self.room(self.edits.len(), bytes)?;
        let edits: Vec<_> = self.edits.iter().map(|(key, data)| (*key, data.as_deref())).collect();
        apply(self.handle, &self.own.tree, &edits)?;
        live.stats.logged(edits.len());
        self.edits.clear();
        Ok(())
    }

    /// The head of an inode as it is now.
    pub(super) fn head(&self, ino: u64) -> Result<InodeItems> {
        current_head(self.volume, self.file(ino))
    }

    /// The head of an inode in the last commit.
    pub(super) fn committed_head(&self, ino: u64) -> Result<InodeItems> {
        committed_head(self.volume, self.own.committed, ino)
    }

    /// Whether the last commit has the inode.
    pub(super) fn is_committed(&self, ino: u64) -> Result<bool> {
        if ino >= self.own.first_new {
            return Ok(false);
        }
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        let cursor = Cursor::seek_committed(self.volume, self.own.committed, key)?;
        Ok(cursor.item().is_some_and(|(found, _)| found == key))
    }

    /// The location of the entry `name` in the last commit, and the length in bytes of the item
    /// with all entries of the same hash, 0 if there is none.
    pub(super) fn committed_entry(&self, name: &LoggedName) -> Result<(Option<Key>, usize)> {
        if name.dir >= self.own.first_new {
            return Ok((None, 0));
        }
        let key = Key::new(name.dir, ItemType::DIR_ITEM, name_hash(&name.bytes));
        let cursor = Cursor::seek_committed(self.volume, self.own.committed, key)?;
        match cursor.item().filter(|(found, _)| *found == key) {
            Some((_, data)) => {
                let location = entry_called(data, &name.bytes)?.map(|entry| entry.location);
                Ok((location, data.len()))
            }
            None => Ok((None, 0)),
        }
    }

    /// # Errors
    /// When the entries with the hash of this name do not fit into one item together with the
    /// `committed` bytes of those in the last commit. Replay first puts the new ones beside the old
    /// ones.
    fn require_room_for(&self, name: &LoggedName, committed: usize) -> Result<(), LoggingStop> {
        if committed == 0 {
            return Ok(());
        }
        let key = Key::new(name.dir, ItemType::DIR_ITEM, name_hash(&name.bytes));
        let (root, mut bytes) = (self.volume.tree(self.subvolume)?, committed + ITEM_SIZE);
        delayed::for_each_item(self.volume, root, key..=key, &mut |_, data| {
            bytes += data.len();
            Ok(ControlFlow::Continue(()))
        })?;
        let most = leaf_capacity(self.volume.superblock().node_size);
        if bytes > most { Err(Obstacle::ManyNames.into()) } else { Ok(()) }
    }

    /// Replaces the head of an inode in the log by `head`.
    pub(super) fn put_head(&mut self, ino: u64, head: &InodeItems) -> Result<()> {
        let logged = logged_head(self.volume, self.log_root(), ino)?;
        let mut logged: BTreeMap<_, _> = logged.into_iter().collect();
        for (key, data) in head {
            if logged.remove(key).as_ref() != Some(data) || self.edits.contains_key(key) {
                self.edits.insert(*key, Some(data.clone()));
            }
        }
        self.edits.extend(logged.into_keys().map(|key| (key, None)));
        Ok(())
    }

    /// Whether the last commit or the log has another inode, or a subvolume, under the name.
    pub(super) fn is_of_another(&self, ino: u64, name: &LoggedName) -> Result<bool> {
        let logged = self.own.names.get(&(name.dir, name.bytes.clone()));
        let (committed, _) = self.committed_entry(name)?;
        Ok(logged.is_some_and(|holder| holder.ino != ino)
            || committed.is_some_and(|location| location.objectid != ino))
    }

    /// Logs a file that is locked and has a name.
    fn whole(&mut self, ino: u64) -> Result<(), LoggingStop> {
        let (head, committed) = (self.head(ino)?, self.committed_head(ino)?);
        let item = inode_in(&head)?.filter(|item| item.nlink.get() > 0);
        let item = item.ok_or(Obstacle::Failed)?;
        self.put_head(ino, &head)?;
        if matches!(type_of(&item)?, FileType::Regular | FileType::Symlink) {
            self.extents(ino, &item, inode_in(&committed)?.is_some())?;
        }
        self.names(ino, &names_in(&head)?, &names_in(&committed)?)?;
        self.own.logged.entry(ino).or_default().is_whole = true;
        Ok(())
    }

    /// Logs a directory that the last commit does not have, so that names in it have a parent.
    fn new_directory(&mut self, dir: u64) -> Result<(), LoggingStop> {
        if self.own.logged.contains_key(&dir) {
            return Ok(());
        }
        let head = self.head(dir)?;
        let names = names_in(&head)?;
        if inode_in(&head)?.is_none_or(|item| item.nlink.get() == 0) || names.len() != 1 {
            return Err(Obstacle::DirectoryMoved.into());
        }
        self.put_head(dir, &head)?;
        self.own.logged.insert(dir, LoggedInode::default());
        self.seen.insert(dir);
        self.names(dir, &names, &BTreeMap::new())
    }

    /// Puts the head of a directory in the last commit into the log, unless the log has the
    /// directory.
    fn known_directory(&mut self, dir: u64) -> Result<(), LoggingStop> {
        if self.own.logged.contains_key(&dir) {
            return Ok(());
        }
        let mut head = self.committed_head(dir)?;
        for (key, data) in &mut head {
            if key.item_type == ItemType::INODE_ITEM {
                // Generation 0 says only that the inode exists.
                let mut item = *InodeItem::view(data).map_err(malformed)?;
                item.generation = 0.into();
                *data = item.as_bytes().to_vec();
            }
        }
        self.put_head(dir, &head)?;
        self.own.logged.insert(dir, LoggedInode::default());
        self.seen.insert(dir);
        Ok(())
    }

    /// Logs the change of the names of an inode, from `before` in the last commit to `now`.
    pub(super) fn names(
        &mut self,
        ino: u64,
        now: &BTreeMap<LoggedName, ItemType>,
        before: &BTreeMap<LoggedName, ItemType>,
    ) -> Result<(), LoggingStop> {
        for (name, &item_type) in now.iter().filter(|(name, _)| !before.contains_key(name)) {
            if item_type == ItemType::INODE_EXTREF && self.is_entry_logged(name.dir, name.index) {
                return Err(Obstacle::ManyNames.into());
            }
            self.gained(ino, name)?;
        }
        // The items of names imply this too. But from those alone the kernel's replay removes names
        // without counting the rest, and warns about it.
        for name in before.keys().filter(|name| !now.contains_key(name)) {
            self.taken.insert((name.dir, name.bytes.clone()));
            self.lost(name)?;
        }
        self.forget_names(ino, now);
        let mut names = Vec::with_capacity(now.len());
        for (name, &item_type) in now {
            let at = (name.dir, name.bytes.clone());
            let is_extref = item_type == ItemType::INODE_EXTREF;
            let holder = NameHolder { ino, index: name.index, is_extref };
            // An inode that had the name in the log is logged with other names, or is deleted.
            if let Some(other) = self.own.names.insert(at.clone(), holder)
                && other.index != name.index
            {
                self.forget_entry(name.dir, other.index);
            }
            names.push(at);
        }
        self.own.logged.entry(ino).or_default().names = names;
        Ok(())
    }

    /// Forgets the names of an inode in the log, and removes the entries of those that it does not
    /// have `now`.
    fn forget_names(&mut self, ino: u64, now: &BTreeMap<LoggedName, ItemType>) {
        let Some(logged) = self.own.logged.get_mut(&ino) else { return };
        let names = std::mem::take(&mut logged.names);
        let kept: HashSet<_> = now.keys().map(|name| (name.dir, name.index)).collect();
        for (dir, bytes) in names {
            let at = (dir, bytes);
            let Some(&NameHolder { index, .. }) =
                self.own.names.get(&at).filter(|one| one.ino == ino)
            else {
                continue;
            };
            self.own.names.remove(&at);
            if !kept.contains(&(dir, index)) {
                self.taken.insert(at);
                self.forget_entry(dir, index);
            }
        }
    }

    /// Whether the log has all new entries of a directory up to this index.
    fn is_entry_logged(&self, dir: u64, index: u64) -> bool {
        self.own.logged.get(&dir).is_some_and(|dir| dir.next_entry > index)
    }

    /// Removes an entry from the log, if the log may have it.
    fn forget_entry(&mut self, dir: u64, index: u64) {
        if self.is_entry_logged(dir, index) {
            self.edits.insert(Key::new(dir, ItemType::DIR_INDEX, index), None);
        }
    }

    /// Logs what a name needs that the inode did not have in the last commit.
    fn gained(&mut self, ino: u64, name: &LoggedName) -> Result<(), LoggingStop> {
        let in_log = self.own.names.get(&(name.dir, name.bytes.clone())).map(|holder| holder.ino);
        if in_log == Some(ino) {
            return Ok(());
        }
        if !self.own.logged.contains_key(&name.dir) && !self.is_committed(name.dir)? {
            self.directories.push(name.dir);
        }
        let (committed, beside) = self.committed_entry(name)?;
        self.require_room_for(name, beside)?;
        let committed = match committed {
            Some(location) if location.item_type != ItemType::INODE_ITEM => {
                return Err(Obstacle::Subvolumes.into());
            }
            location => location.map(|location| location.objectid),
        };
        for other in [in_log, committed].into_iter().flatten().filter(|&other| other != ino) {
            self.give_way(other)?;
        }
        Ok(())
    }

    /// Logs that the entry with this name, which the last commit has, is gone.
    pub(super) fn lost(&mut self, name: &LoggedName) -> Result<(), LoggingStop> {
        self.known_directory(name.dir)?;
        self.entry_gone(name.dir, name.index);
        Ok(())
    }

    /// Logs that a directory, which is in the log, has no entry at this index.
    pub(super) fn entry_gone(&mut self, dir: u64, index: u64) {
        let item = DirLogItem { end: index.into() };
        let key = Key::new(dir, ItemType::DIR_LOG_INDEX, index);
        self.edits.insert(key, Some(item.as_bytes().to_vec()));
    }

    /// Logs the inode `ino`, which lost a name to another inode since the last commit, or since it
    /// was logged.
    pub(super) fn give_way(&mut self, ino: u64) -> Result<(), LoggingStop> {
        if self.seen.contains(&ino) {
            return Ok(());
        }
        // A deleted inode does not come back, because no inode number is used twice.
        let root = self.volume.tree(self.subvolume)?;
        let key = Key::new(ino, ItemType::INODE_ITEM, 0);
        match delayed::with_item(self.volume, root, key, |_| Ok(()))? {
            None => self.gone(ino),
            Some(()) => self.lock_also(ino),
        }
    }

    /// Locks an inode other than the one that is fsynced. Returns `None` if the thread that has it
    /// locked waits for the log trees: that thread does not change the inode meanwhile.
    pub(super) fn lock(&self, ino: u64) -> Result<Option<Locks>, LoggingStop> {
        let file = self.file(ino);
        if self.running.is_waiting(file) {
            return Ok(None);
        }
        match self.volume.inodes.lock_within(file, PATIENCE) {
            None if !self.running.is_waiting(file) => Err(Obstacle::Contended.into()),
            locks => Ok(locks),
        }
    }

    /// Locks another inode, to log it with its current names. Removes it from the log if it has
    /// none.
    pub(super) fn lock_also(&mut self, ino: u64) -> Result<(), LoggingStop> {
        if !self.seen.insert(ino) {
            return Ok(());
        }
        let locks = self.lock(ino)?;
        self.held.extend(locks);
        match inode_in(&self.head(ino)?)?.filter(|item| item.nlink.get() > 0) {
            None => self.gone(ino),
            Some(item) if type_of(&item)? == FileType::Directory => {
                Err(Obstacle::DirectoryMoved.into())
            }
            Some(_) => {
                self.files.push(ino);
                Ok(())
            }
        }
    }

    /// Removes a deleted inode from the log, and logs that its names in the last commit are gone.
    fn gone(&mut self, ino: u64) -> Result<(), LoggingStop> {
        if !self.own.logged.contains_key(&ino) {
            return Ok(());
        }
        self.forget_names(ino, &BTreeMap::new());
        self.own.logged.remove(&ino);
        let first = Key::new(ino, ItemType::INODE_ITEM, 0);
        let mut cursor = Cursor::seek(self.volume, self.log_root(), first)?;
        while let Some((key, _)) = cursor.item().filter(|(key, _)| key.objectid == ino) {
            self.edits.insert(key, None);
            cursor.advance()?;
        }
        drop(cursor);
        for name in names_in(&self.committed_head(ino)?)?.into_keys() {
            self.lost(&name)?;
            self.taken.insert((name.dir, name.bytes));
        }
        Ok(())
    }
}
