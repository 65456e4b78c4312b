//! The features of a volume, as its leaves show them.
//!
//! Without a superblock nothing names the features. What is stored shows them: a form of an item, a
//! profile, a tree. Three features need not be shown. Any volume may have `EXTENDED_IREF`,
//! `NO_HOLES` and `SKINNY_METADATA`, whatever its items are (`btrfstune` sets them on volumes
//! that are older), so they are always set.

use std::collections::BTreeSet;

use offshoot_btrfs_format::block::MAX_NODESIZE;
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, Profile};
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::file_extent::FileExtentHead;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::{CompatRo, Incompat};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use zerocopy::FromBytes;

/// Where the flags of the state of quotas are, and the flag of simple quotas.
const QUOTA_FLAGS: std::ops::Range<usize> = 16..24;
const QUOTA_SIMPLE: u64 = 1 << 3;

/// The largest size of a tree block that needs no feature, in bytes.
const PLAIN_NODE: u32 = 4096;

/// Features that leaves show.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SeenFeatures {
    incompat: Incompat,
    compat_ro: CompatRo,
}

impl SeenFeatures {
    /// Takes an item of a leaf of the tree `owner`.
    pub(super) fn take(&mut self, owner: TreeId, key: Key, data: &[u8]) {
        let found = match key.item_type {
            ItemType::EXTENT_DATA => match FileExtentHead::ref_from_prefix(data) {
                Ok((head, _)) => match Compression::from_disk(head.compression) {
                    Some(Compression::Lzo) => Incompat::COMPRESS_LZO,
                    Some(Compression::Zstd) => Incompat::COMPRESS_ZSTD,
                    _ => return,
                },
                Err(_) => return,
            },
            ItemType::VERITY_DESC_ITEM => {
                self.compat_ro = self.compat_ro.union(CompatRo::VERITY);
                return;
            }
            ItemType::QGROUP_STATUS if owner == TreeId::QUOTA => {
                let flags = data.get(QUOTA_FLAGS).and_then(|flags| flags.try_into().ok());
                match flags.map(u64::from_le_bytes) {
                    Some(flags) if flags & QUOTA_SIMPLE != 0 => Incompat::SIMPLE_QUOTA,
                    _ => return,
                }
            }
            ItemType::DIR_ITEM
                if owner == TreeId::ROOT && key.objectid == objectid::ROOT_TREE_DIR =>
            {
                let is_other = |entry: offshoot_btrfs_format::dir::DirItemEntry<'_>| {
                    entry.name == b"default" && entry.location.objectid != TreeId::FS.0
                };
                if !dir_entries(data).flatten().any(is_other) {
                    return;
                }
                Incompat::DEFAULT_SUBVOL
            }
            _ => return,
        };
        self.incompat = self.incompat.union(found);
    }

    /// The features of the volume with these chunks.
    pub(super) fn incompat(&self, node_size: u32, chunks: &[Chunk]) -> Incompat {
        let mut all = self
            .incompat
            .union(Incompat::MIXED_BACKREF)
            .union(Incompat::EXTENDED_IREF)
            .union(Incompat::NO_HOLES)
            .union(Incompat::SKINNY_METADATA);
        if (PLAIN_NODE + 1..=MAX_NODESIZE).contains(&node_size) {
            all = all.union(Incompat::BIG_METADATA);
        }
        for chunk in chunks {
            let of_profile = match chunk.profile {
                Profile::Raid5 | Profile::Raid6 => Incompat::RAID56,
                Profile::Raid1c3 | Profile::Raid1c4 => Incompat::RAID1C34,
                _ => Incompat::default(),
            };
            all = all.union(of_profile);
            let mixed = BlockGroupFlags::DATA | BlockGroupFlags::METADATA;
            if chunk.flags.0 & mixed == mixed {
                all = all.union(Incompat::MIXED_GROUPS);
            }
        }
        all
    }

    /// The features of the volume with these trees.
    pub(super) fn with_trees(&self, trees: &BTreeSet<TreeId>) -> (Incompat, CompatRo) {
        let (mut incompat, mut compat_ro) = (Incompat::default(), self.compat_ro);
        if trees.contains(&TreeId::FREE_SPACE) {
            compat_ro =
                compat_ro.union(CompatRo::FREE_SPACE_TREE).union(CompatRo::FREE_SPACE_TREE_VALID);
        }
        if trees.contains(&TreeId::BLOCK_GROUP) {
            compat_ro = compat_ro.union(CompatRo::BLOCK_GROUP_TREE);
        }
        if trees.contains(&TreeId::RAID_STRIPE) {
            incompat = incompat.union(Incompat::RAID_STRIPE_TREE);
        }
        (incompat, compat_ro)
    }
}
