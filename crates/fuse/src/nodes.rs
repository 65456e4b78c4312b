//! Which files the kernel knows, and by which number.
//!
//! A file of the filesystem is a [`FileId`]: a number space (a subvolume) and an inode number in
//! it. The kernel wants one number for a file on the whole mount, for two uses. One is the *node*
//! that requests are about. The other is `st_ino`: programs take it with `st_dev` for the identity
//! of a file, and keep it in archives, indexes and databases of backups. Here both are the same
//! number, except that the node of the root is 1:
//!
//! ```text
//! 63 62          40 39                                    0
//! +-+--------------+---------------------------------------+
//! |0|    space     |             inode number              |   what fits: it can be taken apart again
//! +-+--------------+---------------------------------------+
//! |1|                  a hash of the two                   |   what does not fit
//! +-+------------------------------------------------------+
//! ```
//!
//! Every file fits on a volume that has ever made fewer than 8 million (2^23) subvolumes, and fewer
//! than 10^12 (2^40) files in each. For example, 256 * 2^40 + 257 is the number of inode 257 of
//! subvolume 256. The number depends on the file alone: it is the same after every remount,
//! whatever subvolume is mounted, and no table is needed to find the file. The number of a file
//! that does not fit is a hash of the same two numbers. Two files can have the same hash only on a
//! volume that was made for it. Then the second file cannot be used while the kernel knows the
//! first.
//!
//! One number space, [`FileNumbers::plain_space`], stands for the space 0, and that space for it.
//! So the numbers of files in it are plain inode numbers. They fit 32 bits on all but the largest
//! volumes: a 32-bit program can fail to `stat` a file with a larger number.
//!
//! # Lookups and forgets
//!
//! The kernel counts how often an answer gave it a node (its *lookups*), and says with FORGET how
//! many of these it drops. The table counts along. A file can lose its last name while the kernel
//! knows it, because a program has it open or is in it. Such a file is *held*: the mount opens it
//! in the filesystem until the kernel forgets it. So OPEN and RELEASE need no call of the
//! filesystem. Files that the kernel opens without telling the mount (pipes, devices, `O_PATH`)
//! stay usable too.
//!
//! Invariant: a held node is in the table, and owns one opening of its file. Locks: a thread locks
//! one shard for a moment, and takes no other lock under it.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use offshoot_vfs::{Code, Errno, Error, FileId, Result};
use parking_lot::Mutex;

use crate::wire::ROOT_NODE;

/// Parts of the table, each with a lock of its own.
const SHARDS: usize = 64;
/// Bits of the inode number.
const INO_BITS: u32 = 40;
/// Bits of the number space.
const SPACE_BITS: u32 = 23;
/// Marks the number of a file that does not fit.
const HASHED: u64 = 1 << 63;

/// The inode number of a [gate](crate::Gate), which no file of a filesystem has. Each number space
/// has a gate of its own, so that no gate is its own parent.
const GATE_INO: u64 = 0;

/// The gate in a directory.
pub(crate) fn gate_in(dir: FileId) -> FileId {
    FileId { ino: GATE_INO, ..dir }
}

/// Whether a file is a gate.
pub(crate) fn is_gate(file: FileId) -> bool {
    file.ino == GATE_INO
}

/// How the files of a mount are numbered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileNumbers {
    /// The number space whose files have their inode numbers.
    pub(crate) plain_space: u64,
}

impl FileNumbers {
    /// Exchanges the plain space and space 0. Its own inverse.
    fn exchanged(self, space: u64) -> u64 {
        match space {
            0 => self.plain_space,
            space if space == self.plain_space => 0,
            space => space,
        }
    }

    /// The number of a file: `st_ino`, and its node unless it is the root.
    pub(crate) fn number(self, file: FileId) -> u64 {
        let FileId { dev, ino } = file;
        let space = self.exchanged(dev);
        // The protocol gives two numbers a meaning: 0 is no node, and 1 is the root.
        let is_taken = space == 0 && ino <= ROOT_NODE;
        if ino >> INO_BITS == 0 && space >> SPACE_BITS == 0 && !is_taken {
            return space << INO_BITS | ino;
        }
        let mixed = (dev.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ino)
            .wrapping_mul(0xd6e8_feb8_6659_fd93)
            .rotate_left(32)
            .wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed | HASHED
    }

    /// The file whose number this is; `None` for a hash.
    fn file_of(self, number: u64) -> Option<FileId> {
        let ino = number & ((1 << INO_BITS) - 1);
        let dev = self.exchanged(number >> INO_BITS);
        (number & HASHED == 0).then_some(FileId { dev, ino })
    }
}

/// A file that the kernel knows.
struct KnownFile {
    file: FileId,
    /// How often answers gave the kernel this node, less what it forgot.
    lookups: u64,
    /// The mount has the file open in the filesystem.
    is_held: bool,
    /// The kernel has known the file since it was made, and no request has set its capabilities.
    lacks_capability: bool,
}

type NodeShard = HashMap<u64, KnownFile, RandomState>;

/// All files that the kernel knows.
pub(crate) struct KnownFiles {
    pub(crate) numbers: FileNumbers,
    root: FileId,
    shards: [Mutex<NodeShard>; SHARDS],
}

impl KnownFiles {
    /// A table for a kernel that knows only the root.
    pub(crate) fn new(root: FileId, numbers: FileNumbers) -> Self {
        Self { numbers, root, shards: std::array::from_fn(|_| Mutex::default()) }
    }

    /// The node of a file.
    pub(crate) fn node(&self, file: FileId) -> u64 {
        if file == self.root { ROOT_NODE } else { self.numbers.number(file) }
    }

    fn shard(&self, node: u64) -> &Mutex<NodeShard> {
        // Neighbours in a directory go to different shards.
        &self.shards[usize::try_from(node % SHARDS as u64).expect("a shard")]
    }

    /// The file of `node`.
    ///
    /// # Errors
    /// `ESTALE` for a hash that is not in the table. A number that fits is taken apart without a
    /// look at the table.
    pub(crate) fn file(&self, node: u64) -> Result<FileId> {
        if node == ROOT_NODE {
            return Ok(self.root);
        }
        if let Some(file) = self.numbers.file_of(node) {
            return Ok(file);
        }
        let known = self.shard(node).lock().get(&node).map(|node| node.file);
        known.ok_or_else(|| Error::posix(Errno::STALE, format!("node {node:#x}")))
    }

    /// Counts one more lookup of `file`, and returns its node.
    ///
    /// # Errors
    /// `Unsupported` when the kernel knows another file by the same number: two hashes collide.
    pub(crate) fn told(&self, file: FileId) -> Result<u64> {
        self.told_of(file, false)
    }

    /// As [`KnownFiles::told`], for a file that was just made.
    pub(crate) fn told_new(&self, file: FileId) -> Result<u64> {
        self.told_of(file, true)
    }

    fn told_of(&self, file: FileId, is_new: bool) -> Result<u64> {
        if file == self.root {
            return Ok(ROOT_NODE);
        }
        let node = self.numbers.number(file);
        let mut shard = self.shard(node).lock();
        let new = KnownFile { file, lookups: 0, is_held: false, lacks_capability: is_new };
        let known = shard.entry(node).or_insert(new);
        if known.file != file {
            let other = known.file;
            let what = format!("{file} beside {other}: both have the number {node} on a mount");
            return Err(Error::unsupported(Code::Unsupported, what));
        }
        known.lookups += 1;
        Ok(node)
    }

    /// Whether the kernel knows `file`, and nobody has marked it as held.
    pub(crate) fn may_be_held(&self, file: FileId) -> bool {
        self.with(file, |node| !node.is_held).unwrap_or(false)
    }

    /// Marks `file`, which is about to lose a name, as held by the opening of the caller. Returns
    /// false if the caller is to release it: it is held already, or the kernel does not know it.
    pub(crate) fn hold(&self, file: FileId) -> bool {
        self.with(file, |node| !std::mem::replace(&mut node.is_held, true)).unwrap_or(false)
    }

    /// Whether `file` surely has no extended attribute with capabilities.
    pub(crate) fn lacks_capability(&self, file: FileId) -> bool {
        self.with(file, |node| node.lacks_capability).unwrap_or(false)
    }

    /// `file` is about to get capabilities.
    pub(crate) fn may_have_capability(&self, file: FileId) {
        self.with(file, |node| node.lacks_capability = false);
    }

    /// Whether the kernel knows `file`, which is not the root.
    pub(crate) fn knows(&self, file: FileId) -> bool {
        self.with(file, |_| ()).is_some()
    }

    /// Looks at the node of `file`, if the kernel knows it.
    fn with<T>(&self, file: FileId, look: impl FnOnce(&mut KnownFile) -> T) -> Option<T> {
        let number = self.numbers.number(file);
        let mut shard = self.shard(number).lock();
        shard.get_mut(&number).filter(|node| node.file == file).map(look)
    }

    /// The kernel drops `count` lookups of `node`. Returns the file if the caller has to release it
    /// now.
    pub(crate) fn forget(&self, node: u64, count: u64) -> Option<FileId> {
        let mut shard = self.shard(node).lock();
        let known = shard.get_mut(&node)?;
        known.lookups = known.lookups.saturating_sub(count);
        if known.lookups > 0 {
            return None;
        }
        let known = shard.remove(&node).expect("it was there");
        known.is_held.then_some(known.file)
    }

    /// Forgets everything, and returns the files that the caller has to release.
    pub(crate) fn forget_all(&self) -> Vec<FileId> {
        let nodes = self.shards.iter().flat_map(|shard| std::mem::take(&mut *shard.lock()));
        nodes.map(|(_, node)| node).filter(|node| node.is_held).map(|node| node.file).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dev: u64, ino: u64) -> FileId {
        FileId { dev, ino }
    }

    const ROOT: FileId = FileId { dev: 5, ino: 256 };
    const NUMBERS: FileNumbers = FileNumbers { plain_space: 5 };

    #[test]
    fn what_fits_can_be_taken_apart() {
        let nodes = KnownFiles::new(ROOT, NUMBERS);
        let last = ((1 << 23) - 1, (1 << 40) - 1);
        for (dev, ino) in [(5, 257), (0, 0), (0, 2), (1, 0), last, (256, 256)] {
            let file = file(dev, ino);
            assert!(NUMBERS.number(file) < HASHED);
            assert_eq!(nodes.file(NUMBERS.number(file)).ok(), Some(file));
        }
        assert_eq!(nodes.file(ROOT_NODE).ok(), Some(ROOT));
        assert_eq!(NUMBERS.number(file(5, 257)), 257, "it is plain");
        assert_eq!(nodes.told(ROOT).ok(), Some(ROOT_NODE));
    }

    /// A file whose plain number has another meaning, or does not fit, gets a hash: always the same
    /// one, and the table finds the file by it.
    #[test]
    fn what_does_not_fit_is_remembered() {
        let nodes = KnownFiles::new(ROOT, NUMBERS);
        for (dev, ino) in [(5, 0), (5, 1), (1 << 23, 5), (5, 1 << 40), (u64::MAX, u64::MAX)] {
            let file = file(dev, ino);
            assert!(NUMBERS.number(file) >= HASHED);
            assert!(nodes.file(NUMBERS.number(file)).is_err(), "it was not told");
            assert_eq!(nodes.told(file).ok(), Some(NUMBERS.number(file)));
            assert_eq!(nodes.file(NUMBERS.number(file)).ok(), Some(file));
            assert_eq!(nodes.forget(NUMBERS.number(file), 1), None);
            assert!(nodes.file(NUMBERS.number(file)).is_err(), "it was forgotten");
        }
    }

    /// A hostile volume chooses inode numbers that collide.
    #[test]
    fn of_two_files_with_one_number_the_second_is_refused() {
        let nodes = KnownFiles::new(ROOT, NUMBERS);
        let (one, other) = (file(5, 1 << 63), file(6, 1 << 63));
        let node = nodes.told(one).expect("it is the first");
        nodes.shard(node).lock().get_mut(&node).expect("it is known").file = other;
        assert!(matches!(nodes.told(one), Err(Error::Unsupported { .. })));
        assert!(!nodes.hold(one));
        assert_eq!(nodes.file(node).ok(), Some(other));
    }

    /// The kernel asks for the capabilities of a file before its first write.
    #[test]
    fn new_files_lack_capabilities_until_they_get_some() {
        let nodes = KnownFiles::new(ROOT, NUMBERS);
        let (new, old) = (file(5, 300), file(5, 301));
        nodes.told_new(new).expect("its own number");
        nodes.told(old).expect("its own number");
        assert!(nodes.lacks_capability(new) && !nodes.lacks_capability(old));
        nodes.told(new).expect("its own number");
        assert!(nodes.lacks_capability(new));
        nodes.may_have_capability(new);
        assert!(!nodes.lacks_capability(new));
        nodes.forget(NUMBERS.number(old), 1);
        assert!(!nodes.lacks_capability(old), "it is not known");
    }

    #[test]
    fn what_is_held_is_released_with_the_last_lookup() {
        let nodes = KnownFiles::new(ROOT, NUMBERS);
        let file = file(5, 300);
        assert!(!nodes.hold(file), "the kernel does not know it");
        assert!(!nodes.may_be_held(file));
        let node = nodes.told(file).expect("its own number");
        assert_eq!([nodes.told(file).ok(), nodes.told(file).ok()], [Some(node); 2]);
        assert!(nodes.may_be_held(file) && nodes.hold(file));
        assert!(!nodes.may_be_held(file) && !nodes.hold(file), "it is held already");
        assert_eq!(nodes.forget(node, 2), None);
        assert_eq!(nodes.forget(node, 1), Some(file));
        assert_eq!(nodes.forget(node, 1), None, "once");
        nodes.told(file).expect("its own number");
        assert!(nodes.hold(file));
        assert_eq!(nodes.forget_all(), [file]);
        assert_eq!(nodes.forget_all(), []);
        assert_eq!(nodes.forget(u64::MAX, 1), None);
    }
}
