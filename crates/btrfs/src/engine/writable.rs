//! Opening a volume for writing: the conditions, and what is refused.
//!
//! A writer must keep everything in the volume consistent. A feature that the engine does not
//! maintain is refused here by name, before anything is changed. The volume can still be opened for
//! reading.

mod chunks;
#[cfg(test)]
mod shared_lock_tests;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use offshoot_btrfs_format::check::ExpectedBlock;
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, Profile};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::space::{BlockGroupItem, DevReplaceItem};
use offshoot_btrfs_format::superblock::{CompatRo, Incompat, SUPER_FLAG_SEEDING};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{Code, Error, Result, Structure};

use super::Engine;
use crate::counter::WriteStop;
use crate::data::Buffers;
use crate::delayed::{Delayed, DelayedConfig};
use crate::inode::write_back::most_inline;
use crate::options::EngineOptions;
use crate::report::{self, VolumeReport};
use crate::space::{Space, StoredGroup};
use crate::storage::{Member, malformed};
use crate::transaction::{LiveVolume, Quotas, chunk_tree_root};
use crate::tree::{Blocks, Cursor, TreeRoot, with_item};

/// The compat_ro features that a writer maintains, or may leave as they are.
const KEPT: CompatRo = CompatRo::FREE_SPACE_TREE
    .union(CompatRo::FREE_SPACE_TREE_VALID)
    .union(CompatRo::BLOCK_GROUP_TREE);

/// How much of the cache the search for block groups may fill, in bytes. Of a large volume it reads
/// much of the extent tree, once and in order.
const OPENING_CACHE_BYTES: u64 = 4 << 20;

/// Where changes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteDestination {
    /// To the devices. Later writers find them, so everything that writers rely on is maintained.
    Stored,
    /// To memory, for readers only. Structures that only writers need may be out of date.
    InMemory,
}

impl Engine {
    /// Makes the volume writable.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a volume that can only be read, [`Error::Corrupt`] for a volume
    /// whose chunks, device extents and block groups do not agree.
    pub(super) fn into_writable(
        self,
        options: &EngineOptions,
        change: WriteDestination,
    ) -> Result<Self> {
        let mut volume = self;
        volume.require_writable_features(change)?;
        let mut quotas = Quotas::Off;
        if change == WriteDestination::Stored {
            volume.rooms.base.set_strict(options.cache_bytes);
            volume.require_kept_features()?;
            volume.require_quiet_trees()?;
            volume.require_own_uuid_tree()?;
            quotas = Quotas::of(&volume)?;
        }
        volume.require_whole_members(change)?;
        let groups = if change == WriteDestination::Stored {
            let cache = &volume.rooms.base.cache;
            cache.set_budget(options.cache_bytes.min(OPENING_CACHE_BYTES));
            let groups = volume.require_sound_chunks(volume.block_group_root()?)?;
            cache.set_budget(options.cache_bytes);
            groups
        } else {
            volume.block_groups()?
        };
        let chunk_root = chunk_tree_root(&volume).expected();
        let chunk_tree_uuid = volume.block(&chunk_root)?.header().chunk_tree_uuid;
        let reporter = options.reporter.clone();
        let stop = WriteStop::new(Some(Box::new(move |problem| {
            let report = VolumeReport::ReadOnly { problem: problem.to_owned() };
            report::tell(reporter.as_ref(), &report);
        })));
        volume.rooms.buffers = Buffers::new(&stop);
        let space = Space::new(groups, &volume.storage, options.is_discarding, stop.clone())?;
        let space = Arc::new(space);
        volume.rooms.base.storage.set_written(chunk_tree_uuid);
        let (superblock, node_size) =
            (volume.superblock().item.clone(), volume.superblock().node_size);
        let config = DelayedConfig {
            is_on: options.mechanisms.has_delayed_items,
            is_by_item: options.mechanisms.reserves_by_item,
            is_reproducible: options.is_reproducible,
            most_bytes: options.dirty_bytes / 8,
        };
        volume.rooms.delayed = Delayed::new(config, node_size, &stop);
        let max_inline = options.max_inline.min(most_inline(node_size));
        volume.rooms.options = EngineOptions { max_inline, ..options.clone() };
        let (mechanisms, has_log) = (&options.mechanisms, options.has_tree_log);
        volume.rooms.base.live =
            Some(LiveVolume::new(space, superblock, quotas, mechanisms, has_log, stop));
        volume.live()?.open_trees_of_commits(&volume)?;
        volume.subvolumes.load(&volume)?;
        if change == WriteDestination::Stored {
            volume.refresh_superblock_copies()?;
        }
        Ok(volume)
    }

    /// Refuses features that a writer must maintain and that the engine does not.
    fn require_kept_features(&self) -> Result<()> {
        if self.superblock().incompat.has(Incompat::ZONED) {
            return Err(Error::unsupported(Code::ZonedWrite, "writing a zoned volume"));
        }
        let unknown = self.superblock().compat_ro.without(KEPT).names();
        if unknown.is_empty() {
            return Ok(());
        }
        let what = format!("writing a volume with the feature {}", unknown.join(", "));
        Err(Error::unsupported(Code::FeatureNotKept, what))
    }

    /// Refuses volumes that cannot be written at all. A change in memory may be to a metadata dump,
    /// because only trees change there.
    fn require_writable_features(&self, change: WriteDestination) -> Result<()> {
        let refuse = |code, what: &str| Err(Error::unsupported(code, format!("writing {what}")));
        let superblock = self.superblock();
        let has = |feature| superblock.compat_ro.has(feature);
        if has(CompatRo::FREE_SPACE_TREE) && !has(CompatRo::FREE_SPACE_TREE_VALID) {
            return refuse(
                Code::InvalidFreeSpaceTree,
                "a volume whose free-space tree is not valid; the kernel rebuilds it",
            );
        }
        if superblock.incompat.has(Incompat::RAID_STRIPE_TREE) {
            return refuse(Code::StripeTree, "a volume with a RAID stripe tree");
        }
        let flags = superblock.item.flags.get();
        if superblock.is_metadata_only() && change == WriteDestination::Stored {
            return refuse(Code::MetadataDump, "a volume that holds metadata only");
        }
        if flags & SUPER_FLAG_SEEDING != 0 {
            return refuse(Code::Seed, "a seed");
        }
        if self.csum_tree().is_none() {
            return refuse(Code::NoChecksumTree, "a volume without a checksum tree");
        }
        let mut profiles = self.chunks().map(|chunk| chunk.profile);
        if let Some(profile) = profiles.find(|p| matches!(p, Profile::Raid5 | Profile::Raid6)) {
            return refuse(Code::Parity, &format!("a volume with {profile}"));
        }
        Ok(())
    }

    /// Refuses members that would miss writes, or leaves them out if the volume can do without
    /// them. With changes in memory a member may be missing, because readers find its data on
    /// another one.
    fn require_whole_members(&self, change: WriteDestination) -> Result<()> {
        let refuse = |code, member: &Member, why: &str| {
            Err(Error::unsupported(code, format!("writing while {} {why}", member.name())))
        };
        for member in self.members() {
            if member.device.is_none() && change == WriteDestination::Stored {
                return refuse(Code::MemberMissing, member, "is missing");
            }
            if member.is_seed {
                return refuse(Code::Seed, member, "belongs to a seed");
            }
        }
        let mut behind = Vec::new();
        for index in 0..self.members().len() {
            if !self.storage.is_current(&self.base, index)? {
                behind.push(index);
            }
        }
        for index in behind {
            if !self.storage.leave_out(index) {
                let why = "missed commits, and no other member has all that is on it; \
                           a scrub brings it up to date";
                return refuse(Code::MemberBehind, &self.members()[index], why);
            }
        }
        Ok(())
    }

    /// Reports the members that are left out because they missed commits.
    pub(super) fn report_left_out(&self) {
        for member in self.members().iter().filter(|member| member.has_failed()) {
            self.report(&VolumeReport::LeftOut { device: member.name() });
        }
    }

    /// Refuses a volume with an unfinished balance, relocation or device replacement.
    fn require_quiet_trees(&self) -> Result<()> {
        let balance = Key::new(objectid::BALANCE, ItemType::TEMPORARY_ITEM, 0);
        if with_item(&self.rooms, self.root_tree(), balance, |_| Ok(()))?.is_some() {
            return Err(Error::unsupported(
                Code::UnfinishedBalance,
                "writing a volume with an unfinished balance",
            ));
        }
        let first = Key::new(TreeId::TREE_RELOC.0, ItemType::ROOT_ITEM, 0);
        if Cursor::seek(&self.rooms, self.root_tree(), first)?
            .item_of(TreeId::TREE_RELOC.0, ItemType::ROOT_ITEM)
            .is_some()
        {
            return Err(Error::unsupported(
                Code::UnfinishedBalance,
                "writing a volume with an unfinished relocation",
            ));
        }
        let replace = Key::new(0, ItemType::DEV_REPLACE, 0);
        let state = with_item(&self.rooms, self.tree(TreeId::DEV)?, replace, |data| {
            DevReplaceItem::view(data).map(|item| item.replace_state.get()).map_err(malformed)
        })?;
        // Never started 0, started 1, finished 2, cancelled 3, suspended 4.
        if matches!(state, Some(1 | 4)) {
            return Err(Error::unsupported(
                Code::UnfinishedReplace,
                "writing while a device is being replaced",
            ));
        }
        Ok(())
    }

    /// Refuses a UUID tree whose root is a block of a subvolume, as the kernel does. When the
    /// subvolume freed the block, the UUID tree would lose it. The block is read here, because
    /// nothing else reads that tree before it is changed.
    fn require_own_uuid_tree(&self) -> Result<()> {
        let Ok(root) = self.tree(TreeId::UUID) else { return Ok(()) };
        if self.block(&root.expected()).is_ok() {
            return Ok(());
        }
        // Any tree id of a subvolume accepts the blocks of all subvolumes.
        let of_subvolume = ExpectedBlock { owner: TreeId::FS, ..root.expected() };
        let Ok(block) = self.block(&of_subvolume) else { return Ok(()) };
        let owner = block.header().owner();
        let problem = format!("the root of the UUID tree is a block of tree {owner}");
        Err(Error::corrupt_at(Structure::RootItem, root.logical.0, problem))
    }

    /// The tree that has the block group items.
    fn block_group_root(&self) -> Result<TreeRoot> {
        let has_tree = self.superblock().compat_ro.has(CompatRo::BLOCK_GROUP_TREE);
        self.tree(if has_tree { TreeId::BLOCK_GROUP } else { TreeId::EXTENT })
    }

    /// The block groups of all chunks.
    pub(crate) fn block_groups(&self) -> Result<Vec<StoredGroup>> {
        let root = self.block_group_root()?;
        self.chunks()
            .map(|Chunk { start, length: len, .. }| {
                let key = Key::new(start.0, ItemType::BLOCK_GROUP_ITEM, len);
                let item = with_item(&self.rooms, root, key, |data| {
                    BlockGroupItem::view(data).copied().map_err(malformed)
                })?
                .ok_or_else(|| {
                    let problem = "the chunk has no block group";
                    Error::corrupt_at(Structure::BlockGroupItem, start.0, problem)
                })?;
                let flags = BlockGroupFlags(item.flags.get());
                Ok(StoredGroup { start, len, flags, used: item.used.get() })
            })
            .collect()
    }
}
