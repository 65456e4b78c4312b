//! The items of fs-verity of a file: the descriptor and the Merkle tree.
//!
//! A file under fs-verity has a header that counts the bytes of the descriptor, the descriptor
//! itself and the blocks of the Merkle tree. Both are cut into items of some 2 KiB.

use std::ops::Range;

use offshoot_btrfs_format::{ItemType, Key};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// The items of fs-verity of an inode.
#[derive(Clone, Debug, Default)]
pub(super) struct VerityItems {
    /// The length of the descriptor by its header, in bytes.
    pub(super) descriptor_size: Option<u64>,
    /// What the descriptor says of the file.
    pub(super) head: Option<DescriptorHead>,
    /// The descriptor. Its offsets begin with 1.
    pub(super) descriptor: VeritySequence,
    /// The Merkle tree.
    pub(super) merkle: VeritySequence,
}

/// Items that follow each other without gaps.
#[derive(Clone, Debug, Default)]
pub(super) struct VeritySequence {
    range: Option<Range<u64>>,
    is_broken: bool,
}

/// The offset of the descriptor in its items: the header has 0.
const DESCRIPTOR_START: u64 = 1;

/// The beginning of a descriptor.
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct DescriptorHead {
    version: u8,
    hash_algorithm: u8,
    log_block_size: u8,
    salt_size: u8,
    signature_size: U32,
    /// The size of the file, in bytes.
    data_size: U64,
}

impl DescriptorHead {
    /// The size of the Merkle tree in bytes; `None` when a number is unknown.
    ///
    /// A file of 1,000,000 bytes has 245 blocks of 4 KiB. A block has room for 128 SHA-256 digests,
    /// so the tree has two blocks of digests, and one above them.
    fn tree_size(&self) -> Option<u64> {
        let digest_size = match self.hash_algorithm {
            1 => 32,
            2 => 64,
            _ => return None,
        };
        let block_size = 1u64.checked_shl(u32::from(self.log_block_size))?;
        let fanout = block_size / digest_size;
        if fanout < 2 {
            return None;
        }
        let (mut level, mut all) = (self.data_size.get().div_ceil(block_size), 0u64);
        while level > 1 {
            level = level.div_ceil(fanout);
            all += level;
        }
        all.checked_mul(block_size)
    }
}

impl VerityItems {
    /// Adds an item.
    pub(super) fn add(&mut self, key: Key, data: &[u8]) {
        if key.item_type == ItemType::VERITY_MERKLE_ITEM {
            self.merkle.extend(key.offset, data.len() as u64);
        } else if key.offset == 0 {
            let size = data.first_chunk().copied();
            self.descriptor_size = size.map(u64::from_le_bytes);
        } else {
            if key.offset == DESCRIPTOR_START {
                self.head = DescriptorHead::read_from_prefix(data).ok().map(|(head, _)| head);
            }
            self.descriptor.extend(key.offset, data.len() as u64);
        }
    }

    /// Adds the items of the same inode in the part that follows.
    pub(super) fn append(&mut self, right: &Self) {
        self.descriptor_size = self.descriptor_size.or(right.descriptor_size);
        self.head = self.head.or(right.head);
        self.descriptor.append(&right.descriptor);
        self.merkle.append(&right.merkle);
    }

    /// What is wrong with the items of a file of `size` bytes that is under fs-verity.
    pub(super) fn problem(&self, size: u64) -> Option<String> {
        let Some(expected) = self.descriptor_size else {
            return Some("the header of the fs-verity descriptor is missing".into());
        };
        match self.descriptor.len_from(DESCRIPTOR_START) {
            Some(found) if found == expected => {}
            Some(found) => {
                return Some(format!(
                    "a fs-verity descriptor of {expected} bytes expected, {found} found"
                ));
            }
            None => return Some("the items of the fs-verity descriptor have gaps".into()),
        }
        let Some(head) = self.head else {
            return Some("the fs-verity descriptor is too short".into());
        };
        if head.data_size.get() != size {
            let of = head.data_size;
            return Some(format!("a fs-verity descriptor of {of} bytes, the file has {size}"));
        }
        let Some(found) = self.merkle.len_from(0) else {
            return Some("the items of the fs-verity Merkle tree have gaps".into());
        };
        let expected = head.tree_size().unwrap_or(found);
        if found != expected {
            return Some(format!(
                "a fs-verity Merkle tree of {expected} bytes expected, {found} found"
            ));
        }
        None
    }
}

impl VeritySequence {
    fn extend(&mut self, start: u64, len: u64) {
        self.append(&Self { range: Some(start..start.saturating_add(len)), is_broken: false });
    }

    fn append(&mut self, right: &Self) {
        self.is_broken |= right.is_broken;
        match (&mut self.range, &right.range) {
            (Some(left), Some(right)) => {
                self.is_broken |= left.end != right.start;
                left.end = right.end;
            }
            (None, Some(right)) => self.range = Some(right.clone()),
            (_, None) => {}
        }
    }

    /// The length of the items in bytes; `None` when they do not begin at `start`, or have gaps.
    fn len_from(&self, start: u64) -> Option<u64> {
        match &self.range {
            None => Some(0),
            Some(range) if range.start == start && !self.is_broken => Some(range.end - start),
            Some(_) => None,
        }
    }
}
