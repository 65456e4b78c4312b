//! The roots that superblocks name, and blocks that may be roots.
//!
//! Each superblock names the root of its commit, and in its backups those of that commit and of the
//! three before it. The copies of the superblock may be older than the primary, so their roots
//! count too.

use std::cmp::Reverse;
use std::fmt;

use offshoot_btrfs_format::block::BlockHeader;
use offshoot_btrfs_format::superblock::{RootBackup, Superblock};
use offshoot_btrfs_format::{Generation, Logical, TreeId, check};
use offshoot_vfs::{Error, Result};

use super::index::{BlockIndex, ScannedBlock};
use crate::storage::{Storage, malformed};
use crate::tree::TreeRoot;

/// What names a root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RootSource {
    /// A superblock, as the root of its commit.
    Superblock,
    /// A backup in a superblock.
    Backup,
    /// Nothing: a search has found its block.
    Search,
}

impl fmt::Display for RootSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Superblock => "superblock",
            Self::Backup => "backup",
            Self::Search => "search",
        })
    }
}

/// A root of the root tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundRoot {
    /// The root.
    pub root: TreeRoot,
    /// The chunk tree of the same commit, if the source names it.
    pub chunk_root: Option<TreeRoot>,
    /// What names it.
    pub source: RootSource,
}

fn tree_root(id: TreeId, logical: u64, level: u8, generation: u64) -> TreeRoot {
    let (logical, generation) = (Logical(logical), Generation(generation));
    TreeRoot { id, logical, level, generation }
}

impl FoundRoot {
    /// The root of the commit of a superblock.
    fn of(superblock: &Superblock) -> Self {
        let item = &superblock.item;
        let (chunk_root, generation) = (item.chunk_root.get(), item.chunk_root_generation.get());
        Self {
            root: TreeRoot::of_root_tree(item),
            chunk_root: Some(tree_root(
                TreeId::CHUNK,
                chunk_root,
                item.chunk_root_level,
                generation,
            )),
            source: RootSource::Superblock,
        }
    }

    /// The root that a backup names; `None` for a backup that was never written.
    fn of_backup(backup: &RootBackup) -> Option<Self> {
        let (root, chunk_root) = (backup.tree_root.get(), backup.chunk_root.get());
        let chunk_root = (chunk_root != 0).then(|| {
            let generation = backup.chunk_root_gen.get();
            tree_root(TreeId::CHUNK, chunk_root, backup.chunk_root_level, generation)
        });
        let generation = backup.tree_root_gen.get();
        (root != 0).then(|| Self {
            root: tree_root(TreeId::ROOT, root, backup.tree_root_level, generation),
            chunk_root,
            source: RootSource::Backup,
        })
    }
}

/// The roots that the superblocks of all members name, the newest first.
pub(crate) fn stored_roots(storage: &Storage) -> Vec<FoundRoot> {
    let newest = storage.superblock();
    let mut roots = Vec::new();
    for superblock in std::iter::once(newest).chain(&storage.stored_superblocks()) {
        roots.push(FoundRoot::of(superblock));
        roots.extend(superblock.item.super_roots.iter().filter_map(FoundRoot::of_backup));
    }
    roots.retain(|found| found.root.generation <= newest.generation);
    roots.sort_by_key(|found| (Reverse(found.root.generation), found.root.logical, found.source));
    roots.dedup_by_key(|found| (found.root.generation, found.root.logical));
    roots
}

/// The roots that a search finds, the newest first: of each commit its highest block of the root
/// tree. Of several those with the lowest key count. The others were below a block that is gone.
/// Two with the same key are two states of a transaction that wrote its root twice. A transaction
/// mostly allocates in ascending order, so the higher address comes first.
pub(crate) fn scanned_roots(index: &BlockIndex) -> Vec<FoundRoot> {
    let mut blocks: Vec<_> = index.of_tree(TreeId::ROOT).to_vec();
    blocks.sort_by_key(|block| {
        (Reverse((block.generation, block.level)), block.first, Reverse(block.logical))
    });
    let rank = |block: &ScannedBlock| (block.level, block.first);
    let of_commits = blocks.chunk_by(|one, next| one.generation == next.generation);
    let best = of_commits.flat_map(|blocks| {
        let first = blocks.first().map(rank);
        blocks.iter().take_while(move |block| Some(rank(block)) == first)
    });
    let root = |block: &ScannedBlock| FoundRoot {
        root: TreeRoot {
            id: TreeId::ROOT,
            logical: block.logical,
            level: block.level,
            generation: block.generation,
        },
        chunk_root: None,
        source: RootSource::Search,
    };
    best.map(root).collect()
}

/// The root of the root tree at `logical`, as its block describes itself.
///
/// # Errors
/// When no copy of the block verifies, or it belongs to another tree.
pub(crate) fn root_at(storage: &Storage, logical: Logical) -> Result<TreeRoot> {
    let bytes =
        storage.find_block(logical, |bytes| check::verify(bytes, storage.geometry(), logical))?;
    let header = BlockHeader::view(&bytes).map_err(malformed)?;
    if header.owner() != TreeId::ROOT {
        return Err(Error::corrupt_at(
            offshoot_vfs::Structure::TreeBlock,
            logical.0,
            format!("a block of the root tree expected, one of tree {} found", header.owner()),
        ));
    }
    Ok(tree_root(TreeId::ROOT, logical.0, header.level, header.generation.get()))
}
