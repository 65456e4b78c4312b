//! Items of inodes: the core and the forks.

use offshoot_vfs::{Code, Error, Malformed, Result, Structure};
use offshoot_xfs_format::btree::XfsForkRoot;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::inode::{
    self, INODE_MAGIC, XfsForkFormat, XfsInodeCore, file_type,
};
use offshoot_xfs_format::log::items::{XfsInodeFields, XfsInodeItem};
use offshoot_xfs_format::{BasicBlock, Lsn, XfsGeometry};

use super::replay::{LogReplay, ReplayedContent};
use crate::buffer::damaged_at;

/// Where an inode has its LSN.
const LSN: usize = std::mem::offset_of!(XfsInodeCore, lsn);

/// Where an inode of version 1 or 2 counts how often it was written.
const FLUSHES: usize = 30;

/// Up to this half of its range, a count of writes may have begun anew.
const HALF: u16 = u16::MAX >> 1;

impl LogReplay<'_> {
    /// Calls `change` with the inode at a byte of the device.
    pub(super) fn change_inode<T>(
        &mut self,
        at: u64,
        change: impl FnOnce(&mut [u8]) -> Result<T, Malformed>,
    ) -> Result<T> {
        let size = self.geometry.inode_size();
        let place = BasicBlock(at / BASIC_BLOCK);
        // Inodes of 256 bytes share a basic block.
        let inside = usize::try_from(at % BASIC_BLOCK).unwrap_or(0);
        let block = self.block(place, size.next_multiple_of(1 << BASIC_BLOCK.ilog2()))?;
        let outside = || Malformed::new(Structure::InodeCore, "it is outside of its block");
        let inode = block.bytes.get_mut(inside..inside + size).ok_or_else(outside);
        let changed = inode.and_then(change).map_err(|problem| damaged_at(place, problem))?;
        block.content = ReplayedContent::Plain;
        Ok(changed)
    }

    /// Replays an inode. Returns false when it is passed over.
    pub(super) fn inode(&mut self, item: &XfsInodeItem<'_>) -> Result<bool> {
        if self.cancels.has(item.place, item.blocks) {
            return Ok(false);
        }
        if item.fields.intersects(XfsInodeFields::DATA_OWNER | XfsInodeFields::ATTRIBUTES_OWNER) {
            let what = format!("inode {} in the log got the tree of another file", item.ino);
            return Err(Error::unsupported(Code::LogNotReplayed, what));
        }
        let at = item.place.bytes() + u64::from(item.offset);
        let (geometry, lsn) = (self.geometry.clone(), self.lsn);
        let replayed = self.change_inode(at, |inode| {
            if !inode.starts_with(&INODE_MAGIC) {
                let problem = format!("the log has inode {}, but it is none", item.ino);
                return Err(Malformed::new(Structure::InodeCore, problem));
            }
            if is_newer(inode, item, lsn) {
                return Ok(false);
            }
            let new = replayed_inode(inode, item, &geometry, lsn)?;
            inode.copy_from_slice(&new);
            Ok(true)
        })?;
        Ok(replayed)
    }
}

/// Whether an inode was written after the item was logged.
fn is_newer(inode: &[u8], item: &XfsInodeItem<'_>, lsn: Lsn) -> bool {
    if inode.get(4) == Some(&3) {
        let stored = inode.get(LSN..).and_then(<[u8]>::first_chunk);
        let stored = Lsn(u64::from_be_bytes(*stored.unwrap_or(&[0; 8])));
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
    for (what, logged, root, room) in forks {
        let Some(logged) = logged else { continue };
        let fork = new.get_mut(room).unwrap_or_default();
        if item.fields.contains(root) {
            let root = XfsForkRoot::from_log(logged, geometry)?;
            if !root.write(fork) {
                return Err(short(what, logged.len()));
            }
        } else {
            let to = fork.get_mut(..logged.len());
            to.ok_or_else(|| short(what, logged.len()))?.copy_from_slice(logged);
        }
    }
    if geometry.has_checksums()
        && let Some(field) = new.get_mut(LSN..).and_then(<[u8]>::first_chunk_mut)
    {
        *field = lsn.0.to_be_bytes();
    }
    inode::seal(&mut new, geometry);
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
