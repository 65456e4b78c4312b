//! One patch of one structure: drawn by a number, described in words, and written to a volume with
//! right checksums.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use offshoot_btrfs_format::block;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::Random;

use crate::damage::{DamageTarget, header};
use crate::fields::{self, ItemField};
use crate::mutation::{index, pack, unpack};

/// The size of a sector, in bytes.
pub(crate) const SECTOR: u64 = 4096;

/// The items of a leaf.
pub(crate) type LeafItems = Vec<(Key, Vec<u8>)>;

/// A change of a volume.
pub(crate) struct Patch {
    /// In words: the structure, the field, the values.
    pub(crate) what: String,
    /// The number of the tree block that changes, among those of the volume, and its new contents.
    block: Option<(usize, Vec<u8>)>,
    /// Whether the block is of the extent tree or the checksum tree.
    pub(crate) is_of_extents: bool,
    /// The inode whose record of an extent changes.
    pub(crate) extent_of: Option<u64>,
    /// The bytes that change in all superblocks, by their offset.
    superblock: Option<(usize, Vec<u8>)>,
}

/// The leaves of a volume, unpacked, and where there are items of each type.
pub(crate) struct Structures {
    leaves: BTreeMap<usize, LeafItems>,
    by_type: BTreeMap<u8, Vec<(usize, usize)>>,
    /// Leaves that a pointer leads to. The pointer repeats their first key.
    pointed: HashSet<usize>,
}

/// The number for the superblock among the types of items.
const SUPERBLOCK: u8 = 255;

/// Whether structures of this type are patched: all are, unless `OFFSHOOT_STRUCTURES` names some.
fn is_asked_for(item_type: u8) -> bool {
    let Ok(names) = std::env::var("OFFSHOOT_STRUCTURES") else { return true };
    let name = ItemType(item_type).name().unwrap_or("SUPERBLOCK");
    names.split(',').any(|asked| asked == name)
}

impl Structures {
    pub(crate) fn of(target: &DamageTarget) -> Self {
        let mut leaves = BTreeMap::new();
        let mut by_type: BTreeMap<u8, Vec<_>> = BTreeMap::new();
        let mut children = HashSet::new();
        for block in &target.blocks {
            if header(&block.bytes).level > 0 {
                let pointers = block::pointers(&block.bytes).expect("a node");
                children.extend(pointers.iter().map(|pointer| pointer.blockptr.get()));
            }
        }
        let mut pointed = HashSet::new();
        for (number, block) in target.blocks.iter().enumerate() {
            let header = header(&block.bytes);
            if header.level > 0 {
                continue;
            }
            let items = unpack(&block.bytes);
            for (slot, (key, _)) in items.iter().enumerate() {
                by_type.entry(key.item_type.0).or_default().push((number, slot));
            }
            leaves.insert(number, items);
            if children.contains(&header.bytenr.get()) {
                pointed.insert(number);
            }
        }
        Self { leaves, by_type, pointed }
    }

    /// A patch of a structure of any type, each type with the same chance; `None` when the drawn
    /// patch cannot be done.
    pub(crate) fn draw(&self, target: &DamageTarget, random: &mut Random) -> Option<Patch> {
        let types: Vec<_> = self.by_type.keys().copied().filter(|&one| is_asked_for(one)).collect();
        let drawn = index(random, types.len() + 1);
        let Some(item_type) = types.get(drawn) else {
            return is_asked_for(SUPERBLOCK).then(|| superblock(target, random));
        };
        let places = &self.by_type[item_type];
        let place = places[index(random, places.len())];
        self.patch(target, random, place)
    }

    /// A patch of one item of a leaf.
    pub(crate) fn draw_in(
        &self,
        target: &DamageTarget,
        random: &mut Random,
        leaf: usize,
    ) -> Option<Patch> {
        let slot = index(random, self.leaves[&leaf].len());
        self.patch(target, random, (leaf, slot))
    }

    /// Whether a pointer leads to this leaf, which is no root then.
    pub(crate) fn has_pointer(&self, leaf: usize) -> bool {
        self.pointed.contains(&leaf)
    }

    /// The leaves, by the numbers of their blocks, with their items.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (usize, &LeafItems)> {
        self.leaves.iter().map(|(&number, items)| (number, items))
    }

    fn patch(
        &self,
        target: &DamageTarget,
        random: &mut Random,
        (leaf, slot): (usize, usize),
    ) -> Option<Patch> {
        let places = &self.by_type[&self.leaves[&leaf][slot].0.item_type.0];
        let other = places[index(random, places.len())];
        let donor = &self.leaves[&other.0][other.1];
        let mut items = self.leaves[&leaf].clone();
        let has_upper_key = self.has_pointer(leaf);
        let done = match random.below(20) {
            0..12 => field(random, &mut items[slot], donor),
            12 => {
                let is_same = items[slot].1 == donor.1;
                items[slot].1.clone_from(&donor.1);
                (!is_same).then(|| format!("has the contents of {}", donor.0))
            }
            13..16 if !(slot == 0 && has_upper_key) => {
                items.remove(slot);
                Some("is removed".to_owned())
            }
            16 | 17 if !(slot == 0 && has_upper_key) => key(random, &mut items, slot),
            18 => copy(random, &mut items, slot),
            _ => unknown(random, &mut items, slot),
        }?;
        let (number, bytes) = (leaf, &target.blocks[leaf].bytes);
        let packed = pack(bytes, &items);
        if unpack(&packed).len() != items.len() {
            return None;
        }
        let tree = TreeId(header(bytes).owner.get());
        let (key, at) = (self.leaves[&leaf][slot].0, header(bytes).bytenr.get());
        let what = format!("tree {tree}, leaf {at}, {key}: {done}");
        let is_of_extents = [TreeId::EXTENT, TreeId::CSUM].contains(&tree);
        let extent_of = (key.item_type == ItemType::EXTENT_DATA).then_some(key.objectid);
        let block = Some((number, packed));
        Some(Patch { what, block, is_of_extents, extent_of, superblock: None })
    }
}

/// A new value for a field that has `old`, and the change in words.
fn value(random: &mut Random, old: u64, other: u64, width: usize) -> (u64, &'static str) {
    let mask = if width >= 8 { u64::MAX } else { (1 << (width * 8)) - 1 };
    let (new, how) = match random.below(12) {
        0 => (0, "0"),
        1 => (1, "1"),
        2 | 3 => (old.wrapping_add(1), "one more"),
        4 | 5 => (old.wrapping_sub(1), "one less"),
        6 => (old.wrapping_add(SECTOR), "a sector more"),
        7 => (old.wrapping_sub(SECTOR), "a sector less"),
        8 => (u64::MAX, "the most"),
        9 => (other, "that of another one"),
        10 => (old ^ 1 << random.below(width as u64 * 8), "one bit"),
        _ => (random.number(), "any"),
    };
    (new & mask, how)
}

fn get(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

/// Changes a field in `bytes`, and describes the change; `None` when the field stays as it is.
fn change(
    random: &mut Random,
    bytes: &mut [u8],
    other: &[u8],
    field: &ItemField,
) -> Option<String> {
    let ItemField { name, at, width } = field;
    let range = *at..at + width;
    if *width > 8 {
        let bit = random.below(*width as u64 * 8);
        bytes[at + usize::try_from(bit / 8).expect("in an item")] ^= 1 << (bit % 8);
        return Some(format!("bit {bit} of {name} is turned"));
    }
    let old = get(&bytes[range.clone()]);
    let other = other.get(range.clone()).map_or(old, get);
    let (new, how) = value(random, old, other, *width);
    bytes[range].copy_from_slice(&new.to_le_bytes()[..*width]);
    (new != old).then(|| format!("{name} from {old} to {new} ({how})"))
}

fn field(random: &mut Random, item: &mut (Key, Vec<u8>), other: &(Key, Vec<u8>)) -> Option<String> {
    let fields = fields::of_item(item.0.item_type, &item.1);
    let field = fields.get(index(random, fields.len().max(1)))?;
    change(random, &mut item.1, &other.1, field)
}

/// Whether the keys of a leaf ascend.
fn is_ordered(items: &LeafItems) -> bool {
    items.is_sorted_by(|one, other| one.0 < other.0)
}

/// Changes the key of an item, and leaves the item in its slot.
fn key(random: &mut Random, items: &mut LeafItems, slot: usize) -> Option<String> {
    let key = &mut items[slot].0;
    let change = |random: &mut Random, old: u64| value(random, old, old, 8).0;
    match random.below(4) {
        0 => key.objectid = change(random, key.objectid),
        1 => key.item_type = ItemType(change(random, key.item_type.0.into()).to_le_bytes()[0]),
        _ => key.offset = change(random, key.offset),
    }
    let new = items[slot].0;
    is_ordered(items).then(|| format!("its key becomes {new}"))
}

/// Adds a copy of an item behind it.
fn copy(random: &mut Random, items: &mut LeafItems, slot: usize) -> Option<String> {
    let (mut key, data) = items[slot].clone();
    key.offset = key.offset.checked_add([1, SECTOR, 16 << 10][index(random, 3)])?;
    items.insert(slot + 1, (key, data));
    is_ordered(items).then(|| format!("there is a copy of it at {key}"))
}

/// Gives the object of an item, often an inode, another item: of an unknown type, or of a type that
/// is not used here.
fn unknown(random: &mut Random, items: &mut LeafItems, slot: usize) -> Option<String> {
    const TYPES: [u8; 6] = [2, 36, 37, 38, 99, 254];
    let item_type = ItemType(TYPES[index(random, TYPES.len())]);
    let key = Key::new(items[slot].0.objectid, item_type, random.below(3));
    let at = items.partition_point(|item| item.0 < key);
    // The next key may be in the next leaf.
    if at == 0 || at == items.len() {
        return None;
    }
    let len = index(random, 50);
    items.insert(at, (key, random.bytes(len)));
    is_ordered(items).then(|| format!("beside it is {key} of {len} bytes"))
}

/// Changes a field of all superblocks.
fn superblock(target: &DamageTarget, random: &mut Random) -> Patch {
    let mut bytes = vec![0; SUPERBLOCK_SIZE];
    target.sound()[0].read_at(SUPERBLOCK_OFFSETS[0], &mut bytes).expect("a superblock");
    let fields = fields::of_superblock();
    let field = &fields[index(random, fields.len())];
    let other = bytes.clone();
    let done = change(random, &mut bytes, &other, field).unwrap_or_else(|| "stays".to_owned());
    let changed = bytes[field.at..field.at + field.width].to_vec();
    let superblock = Some((field.at, changed));
    let what = format!("superblock: {done}");
    Patch { what, block: None, is_of_extents: false, extent_of: None, superblock }
}

impl Patch {
    /// The tree block that changes and its new contents, without a checksum that fits.
    pub(crate) fn block(&self) -> Option<&(usize, Vec<u8>)> {
        self.block.as_ref()
    }

    /// Writes it to the members of the volume.
    pub(crate) fn apply(&self, target: &DamageTarget, members: &[Arc<MemoryDevice>]) {
        if let Some((number, bytes)) = &self.block {
            let mut bytes = bytes.clone();
            target.fit_checksum(&mut bytes);
            for &(member, offset) in &target.blocks[*number].places {
                members[member].write_at(offset, &bytes).expect("memory");
            }
        }
        let Some((at, changed)) = &self.superblock else { return };
        for member in members {
            for offset in SUPERBLOCK_OFFSETS {
                if offset + SUPERBLOCK_SIZE as u64 > member.size_bytes() {
                    continue;
                }
                let mut bytes = vec![0; SUPERBLOCK_SIZE];
                member.read_at(offset, &mut bytes).expect("memory");
                bytes[*at..at + changed.len()].copy_from_slice(changed);
                target.fit_checksum(&mut bytes);
                member.write_at(offset, &bytes).expect("memory");
            }
        }
    }
}
