//! The btrfs on-disk format.
//!
//! Structures, keys, items, checksums and compression framing, as the disk stores them. The crate
//! has no I/O, no locks and no unsafe code: a caller passes bytes in, and gets typed values or a
//! [`Malformed`] out. All integers on disk are little-endian and unaligned, so every structure here
//! has alignment 1 and is viewed in place.
//!
//! Fields keep the names of the format's documentation
//! (<https://btrfs.readthedocs.io/en/latest/dev/On-disk-format.html>). [`layout`] proves the sizes
//! and offsets of all structures.
//!
//! The parts, from the disk upwards:
//!
//! | module | what it holds |
//! |---|---|
//! | [`ids`], [`key`] | numbers with types, keys, item types, well-known object ids |
//! | [`superblock`], [`chunk`] | where a volume begins, how logical space maps to devices |
//! | [`block`] | header of a tree block, items of a leaf, pointers of a node |
//! | [`inode`], [`dir`], [`file_extent`], [`root`] | items of subvolume trees and of the root tree |
//! | [`extent`], [`space`] | items of the extent, block-group, free-space and device trees |
//! | [`quota`] | quota groups, and the items of the quota tree |
//! | [`csum`], [`compress`] | the four checksums, the three compressions |
//! | [`edit`], [`encode`] | changes of tree blocks in memory, and values to bytes |
//! | [`check`] | the full check of a tree block: header, order, bounds, item contents |

pub mod block;
pub mod check;
pub mod chunk;
pub mod compress;
pub mod csum;
pub mod dir;
pub mod edit;
pub mod encode;
pub mod extent;
pub mod file_extent;
pub mod ids;
pub mod inode;
pub mod key;
pub mod layout;
pub mod quota;
pub mod root;
pub mod space;
pub mod superblock;
mod view;

pub use ids::{DeviceId, Generation, Ino, Logical, Physical, TreeId};
pub use key::{ItemType, Key};
pub use offshoot_vfs::Malformed;
pub use zerocopy::little_endian::{U16, U32, U64};
