//! Where a fork has room: holes between its extents, and the room that it has in the inode.

use offshoot_vfs::{Errno, Error, Result};
use offshoot_xfs_format::btree::XfsForkRoot;
use offshoot_xfs_format::record::{XfsExtent, XfsExtentItem};
use offshoot_xfs_format::{FileBlock, FsBlock, Ino};

use super::{ForkRecords, ForkTree, end};
use crate::btree::edit::{XfsEditRoot, XfsTreeEdit};
use crate::trans::{ChangedFork, ForkName, XfsTransaction};

/// What `look` finds in the records of a fork.
fn look<T>(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    look: impl FnOnce(&mut dyn ForkRecords) -> Result<T>,
) -> Result<T> {
    let geometry = t.geometry();
    let inode = t.inode(ino)?;
    let most = XfsForkRoot::capacity(inode.room(fork, geometry)?);
    match inode.fork(fork).cloned() {
        Some(ChangedFork::Extents(mut items)) => look(&mut items),
        Some(ChangedFork::Btree(root)) => {
            let root = XfsEditRoot::Fork { root, owner: ino, room: most };
            let mut blocks = ForkTree { t, ino, fork, freed: Vec::new() };
            look(&mut XfsTreeEdit::new(geometry, root, &mut blocks))
        }
        _ => Err(inode.damaged("the fork has no extents")),
    }
}

/// The extent that has block `at` of a fork.
pub(crate) fn mapped(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    fork: ForkName,
    at: FileBlock,
) -> Result<Option<XfsExtent>> {
    let found = look(t, ino, fork, |records| records.at_most(at))?;
    Ok(found.filter(|extent| end(extent) > at.0))
}

/// The first `count` blocks in a row of the attribute fork that no extent has. Attributes name
/// their blocks by 32 bits.
pub(crate) fn first_hole(t: &mut XfsTransaction<'_>, ino: Ino, count: u32) -> Result<FileBlock> {
    let hole = look(t, ino, ForkName::Attributes, |records| {
        let mut hole = 0;
        while let Some(extent) = records.at_least(FileBlock(hole))? {
            if extent.offset.0 - hole >= u64::from(count) {
                break;
            }
            hole = end(&extent);
        }
        Ok(hole)
    })?;
    if hole + u64::from(count) > u64::from(u32::MAX) {
        let what = format!("{count} blocks in the attribute fork of inode {ino}");
        return Err(Error::posix(Errno::NOSPC, what));
    }
    Ok(FileBlock(hole))
}

/// Lets the attribute fork begin at `offset`, in units of 8 bytes behind the core. A list of
/// extents of the data fork that has no room any more becomes a tree. Locks the AGF for that.
pub(crate) fn set_fork_offset(t: &mut XfsTransaction<'_>, ino: Ino, offset: u8) -> Result<()> {
    let geometry = t.geometry();
    let inode = t.inode(ino)?;
    inode.set_fork_offset(offset);
    let bytes = inode.room(ForkName::Data, geometry)?;
    let Some(ChangedFork::Extents(items)) = inode.fork(ForkName::Data).cloned() else {
        return Ok(());
    };
    if items.len() <= bytes / size_of::<XfsExtentItem>() {
        return Ok(());
    }
    let near = items.first().map_or(FsBlock(0), |item| item.get().start);
    let mut blocks = ForkTree { t, ino, fork: ForkName::Data, freed: Vec::new() };
    let room = XfsForkRoot::capacity(bytes);
    XfsTreeEdit::plant(geometry, (ino, room), near, &items, &mut blocks).map(drop)
}
