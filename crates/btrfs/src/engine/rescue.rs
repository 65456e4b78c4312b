//! Opening a damaged volume: which chunk tree and which root are used, and what may be absent.
//!
//! 1. The chunk tree is that of the superblock. If it cannot be read, the devices are searched for
//!    leaves that describe chunks. A caller that forbids the search gets the chunk trees that
//!    backups name, the newest first.
//! 2. The root is the one that the caller chose. A root is *usable* when its block and the root of
//!    the top-level subvolume can be read, or what was behind that can be found.
//! 3. A checksum tree whose root cannot be read counts as absent, if the caller allows that.

use std::cmp::Reverse;

use offshoot_btrfs_format::TreeId;
use offshoot_vfs::{Errno, Error, Result, Structure};

use super::Engine;
use crate::options::{EngineOptions, RootChoice};
use crate::report::VolumeReport;
use crate::rescue::{
    AroundDamage, FoundChunks, FoundRoot, find_chunks, root_at, scanned_roots, stored_roots,
};
use crate::storage::{ChunkMap, GivenDevice, MappedChunk};
use crate::transaction::Base;
use crate::tree::{Blocks, TreeRoot};

/// Whether `error` says that something is damaged or cannot be read, and not that the call is
/// wrong.
fn is_damage(error: &Error) -> bool {
    matches!(error, Error::Corrupt(_) | Error::Io { .. })
}

impl Engine {
    /// Learns members and chunks through the first chunk tree that can be read.
    pub(super) fn learn_chunks(
        &mut self,
        found: &[GivenDevice],
        options: &EngineOptions,
    ) -> Result<()> {
        let first = self.try_chunks(found, options);
        let Err(error) = &first else { return first };
        if options.rescue.root == RootChoice::Newest || !is_damage(error) {
            return first;
        }
        if options.rescue.scans {
            return self.search_chunks(found, options).or(first);
        }
        let own = self.rooms.base.chunk_root();
        let backups = stored_roots(&self.rooms.base.storage);
        for root in backups.iter().filter_map(|found| found.chunk_root).filter(|root| *root != own)
        {
            self.rooms.base.use_chunk_root(root);
            if self.try_chunks(found, options).is_ok() {
                self.report(&VolumeReport::OtherRoot {
                    tree: TreeId::CHUNK,
                    generation: root.generation,
                    logical: root.logical,
                });
                return Ok(());
            }
        }
        self.rooms.base.use_chunk_root(own);
        first
    }

    /// Learns the chunks that leaves on the devices describe.
    fn search_chunks(&mut self, found: &[GivenDevice], options: &EngineOptions) -> Result<()> {
        let storage = &mut self.rooms.base.storage;
        let FoundChunks { devices, chunks } = find_chunks(storage, found);
        let members = storage.match_members(&devices, found, options.is_degraded)?;
        let mut map = ChunkMap::default();
        let added = chunks.into_iter().map(|chunk| map.add(MappedChunk::new(chunk, &members)));
        let count = added.flatten().count();
        if count == 0 {
            return Err(Error::corrupt(Structure::Chunk, "no leaf describes any"));
        }
        storage.learn(&devices, members, map);
        self.report(&VolumeReport::SearchedChunks { count });
        Ok(())
    }

    /// Uses the root that the options choose.
    pub(super) fn choose_root(&mut self, options: &EngineOptions) -> Result<()> {
        let own = self.root_tree();
        let chosen = match options.rescue.root {
            RootChoice::Newest => return Ok(()),
            RootChoice::Block(logical) => root_at(&self.rooms.base.storage, logical)?,
            RootChoice::Generation(generation) => {
                let mut roots = self.found_roots().into_iter();
                let found = roots.find(|found| found.root.generation == generation);
                found.map(|found| found.root).ok_or_else(|| {
                    let what = format!("a root of generation {generation}");
                    Error::posix(Errno::NOENT, what)
                })?
            }
            RootChoice::Usable => self.usable_root(),
        };
        self.rooms.base.use_root(chosen);
        if (chosen.logical, chosen.generation) != (own.logical, own.generation) {
            self.report(&VolumeReport::OtherRoot {
                tree: TreeId::ROOT,
                generation: chosen.generation,
                logical: chosen.logical,
            });
        }
        Ok(())
    }

    /// The newest usable root, or else the newest one whose block can be read, or else that of the
    /// superblock.
    fn usable_root(&mut self) -> TreeRoot {
        let own = self.root_tree();
        let roots: Vec<_> = stored_roots(&self.rooms.base.storage);
        let roots: Vec<_> = roots.iter().filter(|found| self.has_block(&found.root)).collect();
        let usable = roots.iter().find(|found| self.is_usable(found));
        if let Some(found) = usable.or(roots.first()) {
            return found.root;
        }
        let searched = self.searched_roots();
        let usable = searched.iter().find(|found| self.is_usable(found));
        usable.or(searched.first()).map_or(own, |found| found.root)
    }

    /// The roots that a search finds, if the options allow one.
    fn searched_roots(&self) -> Vec<FoundRoot> {
        let Base { around, storage, .. } = &self.rooms.base;
        let index = around.as_ref().and_then(|around| around.index(storage));
        index.map(scanned_roots).unwrap_or_default()
    }

    /// All roots that are found, the newest first, and of one commit those that superblocks name
    /// first.
    fn found_roots(&self) -> Vec<FoundRoot> {
        let mut roots = stored_roots(&self.rooms.base.storage);
        roots.extend(self.searched_roots());
        let place = |found: &FoundRoot| (Reverse(found.root.generation), found.root.logical);
        roots.sort_by_key(|found| (place(found), found.source));
        roots.dedup_by_key(|found| place(found));
        roots.sort_by_key(|found| {
            (Reverse(found.root.generation), found.source, Reverse(found.root.logical))
        });
        roots
    }

    fn has_block(&self, root: &TreeRoot) -> bool {
        self.block(&root.expected()).is_ok()
    }

    /// Whether the root of the top-level subvolume can be read through `found`.
    fn is_usable(&mut self, found: &FoundRoot) -> bool {
        self.rooms.base.use_root(found.root);
        // What was behind a node can be found.
        let scans = self.rooms.base.around.as_ref().is_some_and(AroundDamage::scans);
        let top = self.tree(TreeId::FS);
        top.is_ok_and(|top| scans && top.level > 0 || self.has_block(&top))
    }

    /// Finds the checksum tree, and settles whether data is compared with it.
    pub(super) fn find_checksums(&mut self, options: &EngineOptions) -> Result<()> {
        let rescue = options.rescue;
        let found = self.tree(TreeId::CSUM).and_then(|root| {
            // What was behind a node can be found.
            if rescue.ignores_bad_roots && (!rescue.scans || root.level == 0) {
                self.block(&root.expected())?;
            }
            Ok(root)
        });
        let (tree, problem) = match found {
            Ok(root) => (Some(root), None),
            Err(error @ Error::Posix { .. }) => (None, Some(error)),
            Err(error) if rescue.ignores_bad_roots && is_damage(&error) => (None, Some(error)),
            Err(error) => return Err(error),
        };
        let is_absent = tree.is_none() && rescue.ignores_bad_roots;
        let base = &mut self.rooms.base;
        base.csum_tree = tree;
        base.ignores_checksums = rescue.ignores_checksums || is_absent;
        if let Some(problem) = problem.filter(|_| is_absent) {
            let problem = problem.to_string();
            self.report(&VolumeReport::NoChecksums { problem });
        }
        Ok(())
    }

    /// The roots of the volume that are still there, the newest first, each with whether its block
    /// can be read: those that superblocks name, and with [`Rescue::scans`](crate::Rescue::scans)
    /// those that a search finds.
    pub fn roots(&self) -> Vec<(FoundRoot, bool)> {
        let roots = self.found_roots().into_iter();
        roots.map(|found| (found, self.has_block(&found.root))).collect()
    }
}
