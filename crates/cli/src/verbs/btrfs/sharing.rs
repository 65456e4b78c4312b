//! Which data of a file other files share, for `offshoot du --shares`.

pub(in crate::verbs) use offshoot_btrfs::{ExtentUse, SharingCache};
use offshoot_vfs::{FileId, Result};

use crate::session::OpenTree;

/// Calls `visit` for each extent that `file` uses. `cache` serves all files of a volume.
pub(in crate::verbs) fn extents(
    tree: &OpenTree,
    file: FileId,
    cache: &mut SharingCache,
    visit: &mut dyn FnMut(ExtentUse),
) -> Result<()> {
    tree.btrfs().extents(file, cache, visit)
}
