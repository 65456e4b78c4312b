//! Items of inodes: the core and the forks.

use std::collections::HashSet;

use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::btree::{LongBlockHeader, XfsBtreeBlock, XfsForkRoot, XfsTree};
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::inode::{
    INODE_CRC, INODE_MAGIC, XfsForkFormat, XfsInode, XfsInodeCore, file_type,
};
use offshoot_xfs_format::log::items::{XfsBufferType, XfsInodeFields, XfsInodeItem, check_extent};
use offshoot_xfs_format::{BasicBlock, FsBlock, Ino, Lsn, XfsGeometry, csum};

use super::replay::{LogReplay, ReplayedContent};
use crate::buffer::damaged_at;

/// Where a block of a tree of extents has its owner.
const OWNER: usize = std::mem::offset_of!(LongBlockHeader, owner);

/// Where an inode of version 1 or 2 counts how often it was written.
const FLUSHES: usize = 30;

/// Up to this half of its range, a count of writes may have begun anew.
const HALF: u16 = u16::MAX >> 1;

impl LogReplay<'_> {
    /// Calls `change` with the inode at a byte of the device. It returns whether it changed it.
    pub(super) fn change_inode<T>(
        &mut self,
        at: u64,
        change: impl FnOnce(&mut [u8]) -> Result<(bool, T), Malformed>,
    ) -> Result<T> {
        let size = self.geometry.inode_size();
        let place = BasicBlock(at / BASIC_BLOCK);
        // Inodes of 256 bytes share a basic block.
        let inside = usize::try_from(at % BASIC_BLOCK).unwrap_or(0);
        let block = self.block(place, size.next_multiple_of(1 << BASIC_BLOCK.ilog2()))?;
        let outside = || Malformed::new(Structure::InodeCore, "it is outside of its block");
        let inode = block.bytes.get_mut(inside..inside + size).ok_or_else(outside);
        let (is_changed, found) =
            inode.and_then(change).map_err(|problem| damaged_at(place, problem))?;
        if is_changed {
            block.content = ReplayedContent::Plain;
        }
        Ok(found)
    }

    /// Replays an inode. Returns false when it is passed over.
    pub(super) fn inode(&mut self, item: &XfsInodeItem<'_>) -> Result<bool> {
        if self.cancels.has(item.place, item.blocks) {
            return Ok(false);
        }
        let at = item.place.bytes() + u64::from(item.offset);
        let (geometry, lsn) = (self.geometry.clone(), self.lsn);
        let (is_replayed, is_sound, is_directory, trees) = self.change_inode(at, |inode| {
            if !inode.starts_with(&INODE_MAGIC) {
                let problem = format!("the log has inode {}, but it is none", item.ino);
                return Err(Malformed::new(Structure::InodeCore, problem));
            }
            let is_replayed = !is_newer(inode, item, &geometry, lsn);
            if is_replayed {
                let new = replayed_inode(inode, item, &geometry, lsn)?;
                inode.copy_from_slice(&new);
            }
            let is_sound = XfsInode::verify(inode, &geometry, item.ino).is_ok();
            let is_directory = XfsInodeCore::view(inode)?.file_type() == file_type::DIRECTORY;
            let trees = trees_of_others(inode, item, &geometry)?;
            Ok((is_replayed, (is_replayed, is_sound, is_directory, trees)))
        })?;
        if is_sound {
            self.doubtful_inodes.remove(&item.ino);
        } else {
            self.doubtful_inodes.insert(item.ino);
        }
        if is_directory && geometry.dir_block_log > 0 {
            self.pieces.add_directory(item.ino);
        }
        for (root, most_blocks) in trees {
            self.change_owner(item.ino, &root, most_blocks)?;
        }
        Ok(is_replayed)
    }

    /// Makes the blocks of a tree of extents those of `ino`, which got it from another file. They
    /// are at most `most_blocks`.
    fn change_owner(&mut self, ino: Ino, root: &XfsForkRoot, most_blocks: u64) -> Result<()> {
        let geometry = self.geometry.clone();
        let mut rest: Vec<_> =
            root.children.iter().map(|(_, block)| (*block, root.level - 1)).collect();
        let most_blocks = most_blocks.min(geometry.blocks);
        let block_blocks = 1_u32 << (geometry.block_log - 9);
        let mut visited = HashSet::new();
        while let Some((at, level)) = rest.pop() {
            let bad = |problem: &str| {
                let problem = format!("block {at} of the tree of inode {ino}: {problem}");
                Error::corrupt(Structure::BtreeBlock, problem)
            };
            check_extent(&geometry, (at, 1)).map_err(|Malformed { problem, .. }| bad(&problem))?;
            let place = geometry.place_of(at).ok_or_else(|| bad("it is not in the volume"))?;
            if self.cancels.has(place, block_blocks) {
                // It was freed later, so it may hold anything by now.
                continue;
            }
            let is_first_visit = visited.insert(at.0);
            let block = self.block(place, geometry.block_size())?;
            let view = XfsBtreeBlock::view(&block.bytes, &geometry, XfsTree::Extents);
            if XfsTree::of_block(&block.bytes, &geometry) != Some(XfsTree::Extents)
                || view.header.level != level
                || !is_first_visit
                || visited.len() as u64 > most_blocks
            {
                return Err(bad("the tree does not have it"));
            }
            let is_other = view.header.owner != Some(ino.0);
            if let Some(below) = level.checked_sub(1) {
                let children = (0..view.len()).filter_map(|index| view.pointer(index));
                rest.extend(children.map(|child| (FsBlock(child), below)));
            }
            if is_other && let Some(owner) = block.bytes.get_mut(OWNER..OWNER + 8) {
                owner.copy_from_slice(&ino.0.to_be_bytes());
                block.content = ReplayedContent::Typed(XfsBufferType::Btree);
            }
        }
        Ok(())
    }
}

/// The roots of trees that the item says are those of another file until now, and the blocks that
/// each may have.
fn trees_of_others(
    inode: &[u8],
    item: &XfsInodeItem<'_>,
    geometry: &XfsGeometry,
) -> Result<Vec<(XfsForkRoot, u64)>, Malformed> {
    let core = XfsInodeCore::view(inode)?;
    let room = core.fork_room(geometry)?;
    let forks = [
        (XfsInodeFields::DATA_OWNER, core.format, room.data),
        (XfsInodeFields::ATTRIBUTES_OWNER, core.aformat, room.attributes),
    ];
    let is_tree = |format| XfsForkFormat::from_disk(format) == Some(XfsForkFormat::Btree);
    let others = forks.into_iter().filter(|(field, format, _)| {
        item.fields.contains(*field) && is_tree(*format) && !core.is_free()
    });
    others
        .map(|(_, _, room)| {
            let fork = inode.get(room).unwrap_or_default();
            Ok((XfsForkRoot::parse(fork, geometry)?, core.nblocks.get()))
        })
        .collect()
}

/// Whether the checksum of an inode is right, if it has one.
pub(super) fn is_whole(inode: &[u8], geometry: &XfsGeometry) -> bool {
    !geometry.has_checksums() || csum::is_right(inode, INODE_CRC)
}

/// Whether an inode was written after the item was logged. An inode of several sectors may be torn:
/// then its LSN says nothing of its forks.
fn is_newer(inode: &[u8], item: &XfsInodeItem<'_>, geometry: &XfsGeometry, lsn: Lsn) -> bool {
    if geometry.has_checksums() {
        if !is_whole(inode, geometry) {
            return false;
        }
        let stored = XfsIdentity::INODE.lsn_of(inode).unwrap_or(Lsn(0));
        return stored != Lsn::NONE && stored > lsn;
    }
    let flushes = |bytes: &[u8]| bytes.get(FLUSHES..).and_then(<[u8]>::first_chunk).copied();
    let stored = u16::from_be_bytes(flushes(inode).unwrap_or_default());
    let logged = u16::from_le_bytes(flushes(item.core).unwrap_or_default());
    let began_anew = stored == u16::MAX && logged < HALF;
    logged < stored && !began_anew
}

/// The inode with the changes of an item. Everything is proved before a byte is copied.
fn replayed_inode(
    old: &[u8],
    item: &XfsInodeItem<'_>,
    geometry: &XfsGeometry,
    lsn: Lsn,
) -> Result<Vec<u8>, Malformed> {
    let bad = |problem: String| {
        Malformed::new(Structure::LogItem, format!("inode {}: {problem}", item.ino))
    };
    let mut new = old.to_vec();
    item.put_core(&mut new)?;
    let core = *XfsInodeCore::view(&new)?;
    check_core(&core).map_err(bad)?;
    let room = core.fork_room(geometry)?;
    let short = |what: &str, len: usize| bad(format!("{what} fork with {len} bytes has no room"));
    if item.fields.contains(XfsInodeFields::DEVICE) {
        let field = new.get_mut(room.data.clone()).and_then(<[u8]>::first_chunk_mut);
        *field.ok_or_else(|| short("data", 4))? = item.device.to_be_bytes();
    }
    let forks = [
        ("data", item.data, XfsInodeFields::DATA_ROOT, room.data),
        ("attribute", item.attributes, XfsInodeFields::ATTRIBUTES_ROOT, room.attributes),
    ];
    for (what, logged, in_tree, room) in forks {
        let Some(logged) = logged else { continue };
        let fork = new.get_mut(room).unwrap_or_default();
        if item.fields.contains(in_tree) {
            if !XfsForkRoot::from_log(logged, geometry)?.write(fork) {
                return Err(short(what, logged.len()));
            }
        } else {
            let to = fork.get_mut(..logged.len());
            to.ok_or_else(|| short(what, logged.len()))?.copy_from_slice(logged);
        }
    }
    if geometry.has_checksums() {
        XfsIdentity::INODE.seal(&mut new, lsn);
    }
    Ok(new)
}

/// Checks what decides how the forks are read: their formats, and the counts of their extents.
fn check_core(core: &XfsInodeCore) -> Result<(), String> {
    use XfsForkFormat as Format;
    let format = Format::from_disk(core.format);
    let is_listed = matches!(format, Some(Format::Extents | Format::Btree));
    let suits = match core.file_type() {
        file_type::REGULAR => is_listed || format == Some(Format::MetaBtree),
        file_type::DIRECTORY => is_listed || format == Some(Format::Local),
        _ => true,
    };
    let (data, attributes) = core.extent_counts();
    if !suits {
        return Err(format!("mode {:o} with a data fork of format {}", core.mode, core.format));
    }
    if data.saturating_add(attributes.into()) > core.nblocks.get() {
        return Err(format!("{data} and {attributes} extents in {} blocks", core.nblocks));
    }
    Ok(())
}
