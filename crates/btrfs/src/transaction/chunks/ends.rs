//! Chunks that become shorter, or have a stripe at another place.
//!
//! Both change in all places that a chunk is recorded in, but for the logical addresses: no tree of
//! contents notices.

use offshoot_btrfs_format::chunk::{Chunk, DevExtent, Stripe};
use offshoot_btrfs_format::encode::{chunk_item, chunk_key};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::space::BlockGroupItem;
use offshoot_btrfs_format::{ItemType, Key, Logical, Physical, TreeId};
use offshoot_vfs::{Error, Result, Structure};
use zerocopy::{FromBytes, IntoBytes};

use crate::space::{BlockGroup, edits_of_shortened};
use crate::transaction::TransactionHandle;
use crate::tree::with_item;

impl TransactionHandle<'_> {
    /// Makes a block group and its chunk end after `len` bytes, which is the limit of the group. No
    /// thread has a handle or commits, nothing behind the limit is in use, and `len` is a multiple
    /// of what one row of the chunk holds.
    pub(crate) fn shorten_group(&self, group: &BlockGroup, len: u64) -> Result<()> {
        let volume = self.volume();
        let chunk = volume.storage.chunk_at(group.start)?;
        let rows = chunk.length / chunk.stripe_bytes().max(1);
        let short = Chunk { length: len, ..chunk.clone() };
        debug_assert_eq!(short.stripe_bytes() * rows, len, "whole rows");
        let edits = edits_of_shortened(volume, group, len)?;
        let edits: Vec<_> = edits.iter().map(|(key, data)| (*key, data.as_deref())).collect();
        if !edits.is_empty() {
            self.change(TreeId::FREE_SPACE, |tree| tree.apply_batch(&edits))?;
        }
        let tree = self.block_group_tree();
        let key = Key::new(group.start.0, ItemType::BLOCK_GROUP_ITEM, group.len);
        let item = BlockGroupItem {
            used: group.used_to_store().into(),
            chunk_objectid: objectid::FIRST_CHUNK_TREE.into(),
            flags: group.flags.0.into(),
        };
        self.remove_one(tree, key)?;
        let key = Key { offset: len, ..key };
        self.change(tree, |tree| tree.insert(key, item.as_bytes()))?;
        for stripe in &chunk.stripes {
            let key = Key::new(stripe.device.0, ItemType::DEV_EXTENT, stripe.physical.0);
            self.change(TreeId::DEV, |tree| {
                tree.modify(key, 0, |data| {
                    let extent = DevExtent::read_from_bytes(data.unwrap_or_default());
                    let mut extent = extent.map_err(|_| {
                        Error::corrupt(Structure::DeviceExtent, format!("{key}: it is cut"))
                    })?;
                    extent.length = short.stripe_bytes().into();
                    Ok(extent.as_bytes().to_vec())
                })
            })?;
        }
        let item = chunk_item(&short, volume.superblock().sector_size);
        self.change(TreeId::CHUNK, |tree| tree.modify(chunk_key(&short), 0, |_| Ok(item)))?;
        self.change_ends(&chunk, &short)?;
        volume.storage.replace_chunk(short)?;
        self.space().shorten_group(group, len);
        self.note_next_chunk()
    }

    /// Makes the stripe `number` of the chunk at `start` begin at `to` on its member, where its
    /// bytes were copied to. No thread writes to the chunk. The old place counts as allocated until
    /// the spaces of members are found anew, after the commit.
    pub(crate) fn repoint_stripe(&self, start: Logical, number: usize, to: Physical) -> Result<()> {
        let volume = self.volume();
        let mut chunk = volume.storage.chunk_at(start)?;
        let len = chunk.stripe_bytes();
        let missing = || Error::corrupt_at(Structure::Chunk, start.0, "it has no such stripe");
        let stripe = chunk.stripes.get_mut(number).ok_or_else(missing)?;
        let from = std::mem::replace(&mut stripe.physical, to);
        let (device, key) =
            (stripe.device, |at: Physical| Key::new(stripe.device.0, ItemType::DEV_EXTENT, at.0));
        let root = volume.tree(TreeId::DEV)?;
        let item = with_item(volume, root, key(from), |data| Ok(data.to_vec()))?;
        let item = item.ok_or_else(missing)?;
        self.remove_one(TreeId::DEV, key(from))?;
        self.change(TreeId::DEV, |tree| tree.insert(key(to), &item))?;
        let item = chunk_item(&chunk, volume.superblock().sector_size);
        self.change(TreeId::CHUNK, |tree| tree.modify(chunk_key(&chunk), 0, |_| Ok(item)))?;
        let index = volume.members().iter().position(|member| member.id == device);
        if let Some(all) = &mut *self.space().member_spaces.lock()
            && let Some(member) = index.and_then(|index| all.get_mut(index))
        {
            member.take(to.0..to.0 + len);
        }
        volume.storage.replace_chunk(chunk)
    }

    /// Counts what the stripes of a chunk lose that becomes shorter.
    fn change_ends(&self, chunk: &Chunk, short: &Chunk) -> Result<()> {
        let (before, after) = (chunk.stripe_bytes(), short.stripe_bytes());
        let lost = |stripe: &Stripe| stripe.physical.0 + after..stripe.physical.0 + before;
        self.change_allocated_ranges(chunk, lost, false)
    }
}
