//! What is read of a damaged volume: older roots, and trees with blocks that cannot be read.
//!
//! Words: a *root* is a root block of the root tree, so it stands for the volume as one commit left
//! it. A superblock names the newest one and, as backups, those of the last commits. A *lost
//! subtree* is a block of a tree that no copy gives, with the range of keys that are behind it.
//!
//! A reader that is told to goes past lost subtrees: their items seem to be absent. When a lost
//! block is a node, the blocks below it are still on the devices. A search through all chunks of
//! metadata finds them, and a node made in memory *stands in* for the lost one.
//!
//! | module | what it holds |
//! |---|---|
//! | `roots` | the roots that superblocks name, and those that a search finds |
//! | `chunks` | the chunks that a search finds, without the chunk tree |
//! | `described` | what leaves say of members and chunks, in all versions |
//! | `around` | what is lost so far, and what stands in for it |
//! | `index` | the blocks of trees that a search finds |
//! | `places` | all places of a device that may have a block |
//! | `stand_in` | which of these blocks were behind a lost node, and a node over them |

mod around;
mod chunks;
mod described;
mod index;
mod places;
mod roots;
mod stand_in;

pub(crate) use around::{AroundDamage, TreesAbove};
pub(crate) use chunks::{FoundChunks, find_chunks};
pub(crate) use described::{DescribedChunk, DescribedVersions, chunk_of_ranges};
pub(crate) use index::ScannedBlock;
pub(crate) use places::each_place;
pub use roots::{FoundRoot, RootSource};
pub(crate) use roots::{root_at, scanned_roots, stored_roots};
