//! Which data of a file other files share, for `offshoot du --shares`.

pub(in crate::verbs) use offshoot_btrfs::{ExtentUse, SharingCache};
use offshoot_vfs::{FileId, Result};

use crate::session::OpenTree;

const SHARES: &str = "--shares";

/// Fails if the volume does not tell.
pub(in crate::verbs) fn require(tree: &OpenTree) -> Result<()> {
    tree.btrfs(SHARES).map(drop)
}

/// Calls `visit` for each extent that `file` uses. `cache` serves all files of a volume.
pub(in crate::verbs) fn extents(
    tree: &OpenTree,
    file: FileId,
    cache: &mut SharingCache,
    visit: &mut dyn FnMut(ExtentUse),
) -> Result<()> {
    tree.btrfs(SHARES)?.extents(file, cache, visit)
}
