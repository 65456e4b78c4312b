//! What is read of a damaged volume: older roots, and trees with blocks that cannot be read.
//!
//! Words: a *root* is a root block of the root tree, so it stands for the volume as one commit left
//! it. A superblock names the newest one and, as backups, those of the last commits.
//!
//! | module | what it holds |
//! |---|---|
//! | `roots` | the roots that superblocks name |

mod roots;

pub use roots::{FoundRoot, RootSource};
pub(crate) use roots::{root_at, stored_roots};
