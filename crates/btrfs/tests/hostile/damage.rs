//! Kinds of damage, and volumes to inflict them on.

#![allow(dead_code, reason = "each of the programs that share this calls a part of it")]

use std::collections::HashMap;
use std::sync::Arc;

use offshoot_btrfs_format::block::{self, BlockHeader, HEADER_SIZE, NodePointer};
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_device::BlockDevice;
use offshoot_testkit::random::Random;

use crate::image::{Patched, SparseImage};
use crate::mutation::{index, mutate_item, pack, scramble, unpack};

/// A tree block of the last commit, and every place that holds a copy.
pub(crate) struct CommittedBlock {
    pub(crate) bytes: Vec<u8>,
    /// The member and the offset on it, of every copy.
    pub(crate) places: Vec<(usize, u64)>,
}

/// A volume to be damaged.
pub(crate) struct DamageTarget {
    images: Vec<Arc<SparseImage>>,
    pub(crate) blocks: Vec<CommittedBlock>,
    checksum: ChecksumType,
    /// Whether all data has checksums, so that damage to it never goes unnoticed.
    pub(crate) is_all_checked: bool,
}

/// What a survey may see of a damaged volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllowedView {
    /// Exactly what the sound volume shows: another copy is good.
    Nothing,
    /// Errors, and otherwise what the sound volume shows: a checksum reveals the damage.
    Errors,
    /// Anything but a crash: the checksums fit the damage.
    Anything,
}

impl DamageTarget {
    /// The volume with these `images` as its members. The volume is sound.
    pub(crate) fn new(images: Vec<Arc<SparseImage>>, is_all_checked: bool) -> Self {
        let superblock = superblock(&images[0], SUPERBLOCK_OFFSETS[0]);
        let superblock = Superblock::parse(&superblock, SUPERBLOCK_OFFSETS[0]).expect("a volume");
        let blocks = blocks(&images, &superblock);
        Self { images, blocks, checksum: superblock.checksum, is_all_checked }
    }

    /// The members, undamaged.
    pub(crate) fn sound(&self) -> Vec<Patched> {
        self.images.iter().map(Patched::new).collect()
    }

    /// The members with one random damage, and what a survey may see of it.
    pub(crate) fn damaged(&self, random: &mut Random) -> (Vec<Patched>, AllowedView) {
        let mut members = self.sound();
        let allowed = match random.below(20) {
            0 => self.truncate(random, &mut members),
            1..4 => self.garbage(random, &mut members),
            4 => self.superblock(random, &mut members, false),
            5 | 6 => self.superblock(random, &mut members, true),
            7..10 => self.flip(random, &mut members),
            _ => self.lie(random, &mut members),
        };
        (members, allowed)
    }

    /// Cuts the end off a member.
    fn truncate(&self, random: &mut Random, members: &mut [Patched]) -> AllowedView {
        let member = index(random, members.len());
        let used = self.images[member].used();
        members[member].truncate(used[index(random, used.len())] + random.below(4096));
        AllowedView::Errors
    }

    /// Writes noise or zeros over a page that is in use.
    fn garbage(&self, random: &mut Random, members: &mut [Patched]) -> AllowedView {
        let member = index(random, members.len());
        let used = self.images[member].used();
        let page = used[index(random, used.len())];
        let len = 1 + index(random, 4096);
        let noise = if random.below(2) == 0 { vec![0; len] } else { random.bytes(len) };
        members[member].write(page, &noise);
        if self.is_all_checked { AllowedView::Errors } else { AllowedView::Anything }
    }

    /// Damages superblocks: all copies with right checksums if `has_right_checksums` is set,
    /// otherwise the primary of one member.
    fn superblock(
        &self,
        random: &mut Random,
        members: &mut [Patched],
        has_right_checksums: bool,
    ) -> AllowedView {
        let member = index(random, members.len());
        let mut bytes = superblock(&self.images[member], SUPERBLOCK_OFFSETS[0]);
        let end = [299, 1200, SUPERBLOCK_SIZE][index(random, 3)];
        (0..=random.below(2)).for_each(|_| scramble(random, &mut bytes[32..end]));
        if !has_right_checksums {
            members[member].write(SUPERBLOCK_OFFSETS[0], &bytes);
            return AllowedView::Nothing;
        }
        for offset in SUPERBLOCK_OFFSETS {
            if offset + SUPERBLOCK_SIZE as u64 <= members[member].size_bytes() {
                bytes[48..56].copy_from_slice(&offset.to_le_bytes());
                self.fit_checksum(&mut bytes);
                members[member].write(offset, &bytes);
            }
        }
        AllowedView::Anything
    }

    /// Changes bytes of a tree block, in one copy of it or in all.
    fn flip(&self, random: &mut Random, members: &mut [Patched]) -> AllowedView {
        let block = self.block(random);
        let one = random.below(3) == 0;
        let mut bytes = block.bytes.clone();
        (0..=random.below(3)).for_each(|_| scramble(random, &mut bytes));
        let places = &block.places[..if one { 1 } else { block.places.len() }];
        for &(member, offset) in places {
            members[member].write(offset, &bytes);
        }
        if places.len() < block.places.len() { AllowedView::Nothing } else { AllowedView::Errors }
    }

    /// Changes the contents of a few tree blocks, in all copies, and makes the checksums right.
    fn lie(&self, random: &mut Random, members: &mut [Patched]) -> AllowedView {
        for _ in 0..=random.below(3) {
            let block = self.block(random);
            let is_leaf = header(&block.bytes).level == 0;
            let mut bytes = match random.below(10) {
                0 => {
                    let mut bytes = block.bytes.clone();
                    scramble(random, &mut bytes[32..]);
                    bytes
                }
                1..5 if is_leaf => self.splice(random, &block.bytes),
                _ if is_leaf => mutate_item(random, &block.bytes),
                _ => self.redirect(random, &block.bytes),
            };
            self.fit_checksum(&mut bytes);
            for &(member, offset) in &block.places {
                members[member].write(offset, &bytes);
            }
        }
        AllowedView::Anything
    }

    fn block(&self, random: &mut Random) -> &CommittedBlock {
        &self.blocks[index(random, self.blocks.len())]
    }

    /// Gives an item of a leaf the contents of another one of its type.
    fn splice(&self, random: &mut Random, leaf: &[u8]) -> Vec<u8> {
        let mut items = unpack(leaf);
        if items.is_empty() {
            return leaf.to_vec();
        }
        let at = index(random, items.len());
        let donors = (0..8).flat_map(|_| {
            let donor = &self.block(random).bytes;
            if header(donor).level == 0 { unpack(donor) } else { Vec::new() }
        });
        let kind = items[at].0.item_type;
        let donors: Vec<_> = donors.filter(|(key, _)| key.item_type == kind).collect();
        if let Some((_, data)) = donors.get(index(random, donors.len().max(1))) {
            items[at].1.clone_from(data);
        }
        pack(leaf, &items)
    }

    /// Makes a pointer of a node lead to another block that exists.
    fn redirect(&self, random: &mut Random, node: &[u8]) -> Vec<u8> {
        let mut bytes = node.to_vec();
        let count = block::pointers(node).map_or(0, <[NodePointer]>::len);
        let at = HEADER_SIZE + index(random, count.max(1)) * size_of::<NodePointer>();
        let target = header(&self.block(random).bytes);
        bytes[at + 17..at + 25].copy_from_slice(&target.bytenr.get().to_le_bytes());
        bytes[at + 25..at + 33].copy_from_slice(&target.generation.get().to_le_bytes());
        bytes
    }

    /// Makes the checksum of a tree block, or of a superblock, right.
    pub(crate) fn fit_checksum(&self, bytes: &mut [u8]) {
        let sum = self.checksum.compute(&bytes[32..]);
        bytes[..self.checksum.len()].copy_from_slice(sum.bytes());
    }
}

pub(crate) fn header(bytes: &[u8]) -> &BlockHeader {
    BlockHeader::view(bytes).expect("a whole block")
}

fn superblock(image: &Arc<SparseImage>, offset: u64) -> Vec<u8> {
    let mut bytes = vec![0; SUPERBLOCK_SIZE];
    Patched::new(image).read_at(offset, &mut bytes).expect("every image has a superblock");
    bytes
}

/// All tree blocks that can be reached from the superblock.
fn blocks(images: &[Arc<SparseImage>], superblock: &Superblock) -> Vec<CommittedBlock> {
    let mut written = scan(images, superblock);
    let mut wanted = vec![
        (superblock.root().0, superblock.generation.0),
        (superblock.chunk_root().0, superblock.item.chunk_root_generation.get()),
    ];
    let mut found = Vec::new();
    while let Some(place) = wanted.pop() {
        // A block that several trees share was met already.
        let Some(block) = written.remove(&place) else { continue };
        if header(&block.bytes).level > 0 {
            let pointers = block::pointers(&block.bytes).expect("a node");
            wanted.extend(pointers.iter().map(|p| (p.blockptr.get(), p.generation.get())));
        } else {
            wanted.extend(roots_in(&block.bytes));
        }
        found.push(block);
    }
    assert!(found.len() > 8, "a volume has more than {} tree blocks", found.len());
    // In a fixed order, so that the same seed does the same damage.
    found.sort_by_key(|block| header(&block.bytes).bytenr.get());
    found
}

fn roots_in(leaf: &[u8]) -> Vec<(u64, u64)> {
    let root = |(key, data): &(Key, Vec<u8>)| {
        let root = (key.item_type == ItemType::ROOT_ITEM).then(|| RootItem::parse(data))?.ok()?;
        Some((root.logical().0, root.generation().0))
    };
    unpack(leaf).iter().filter_map(root).collect()
}

/// All tree blocks on the images, old ones too, by address and generation.
fn scan(
    images: &[Arc<SparseImage>],
    superblock: &Superblock,
) -> HashMap<(u64, u64), CommittedBlock> {
    let mut found: HashMap<(u64, u64), CommittedBlock> = HashMap::new();
    let mut bytes = vec![0; superblock.node_size as usize];
    for (member, image) in images.iter().enumerate() {
        let device = Patched::new(image);
        for offset in image.used() {
            if device.read_at(offset, &mut bytes).is_err() || bytes[64..72] == *b"_BHRfS_M" {
                continue;
            }
            let head = header(&bytes);
            let sum = superblock.checksum.compute(&bytes[32..]);
            if head.fsid == *superblock.metadata_uuid.as_bytes()
                && head.csum.starts_with(sum.bytes())
            {
                let place = (head.bytenr.get(), head.generation.get());
                let new = || CommittedBlock { bytes: bytes.clone(), places: Vec::new() };
                found.entry(place).or_insert_with(new).places.push((member, offset));
            }
        }
    }
    found
}
