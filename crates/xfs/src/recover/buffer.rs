//! Items of buffers: parts of blocks.

use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::log::BLOCK;
use offshoot_xfs_format::log::items::{XfsBufferFlags, XfsBufferItem, XfsBufferType};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgIno, BasicBlock, Ino, Lsn, XfsGeometry, csum, inode};

use super::inode::is_whole;
use super::pieces::may_be_piece;
use super::replay::{LogReplay, ReplayedContent};
use super::{require_whole, verify};
use crate::buffer::{damaged_at, malformed};
use crate::report::{XfsReport, tell};

/// Where an inode has the next one of its chain of unlinked inodes.
const NEXT_UNLINKED: usize = std::mem::offset_of!(inode::XfsInodeCore, next_unlinked);

const QUOTAS: XfsBufferFlags = XfsBufferFlags::USER_QUOTA
    .union(XfsBufferFlags::PROJECT_QUOTA)
    .union(XfsBufferFlags::GROUP_QUOTA);

/// Whether the block holds records of quotas, which we neither show nor keep.
pub(super) fn is_of_quotas(item: &XfsBufferItem<'_>) -> bool {
    use XfsBufferType::{GroupDquot, ProjectDquot, UserDquot};
    let of_type = matches!(item.flags.block_type(), Some(UserDquot | ProjectDquot | GroupDquot));
    of_type || item.flags.intersects(QUOTAS)
}

/// What a block on the device says about a change of it.
enum StoredBlock {
    /// It is older, or has no LSN.
    Older,
    /// It has the change already.
    Newer,
    /// A write of it was torn, or it is damaged.
    Doubtful,
}

/// Whether blocks of this type have a header of their own. The contents of the bitmaps of a
/// realtime device may look like one.
fn has_header(kind: Option<XfsBufferType>) -> bool {
    use XfsBufferType::{Inodes, RealtimeBitmap, RealtimeSummary};
    !matches!(kind, Some(Inodes | RealtimeBitmap | RealtimeSummary))
}

/// What a block that no item changed yet says about a change at `now`.
fn stored(
    kind: Option<XfsBufferType>,
    geometry: &XfsGeometry,
    (place, bytes): (BasicBlock, &[u8]),
    (now, head): (Lsn, Lsn),
) -> Result<StoredBlock, Malformed> {
    let identity = XfsIdentity::of_magic(geometry, bytes)
        .filter(|identity| has_header(kind) && *identity != XfsIdentity::INODE);
    let Some(identity) = identity else { return Ok(StoredBlock::Older) };
    if identity.uuid_of(bytes) != Some(geometry.uuid) {
        return Ok(StoredBlock::Older);
    }
    let lsn = identity.lsn_of(bytes).filter(|&lsn| lsn != Lsn::NONE && lsn.0 != 0);
    if lsn.is_none_or(|lsn| lsn < now) {
        let is_whole = csum::is_right(bytes, identity.crc);
        return Ok(if is_whole { StoredBlock::Older } else { StoredBlock::Doubtful });
    }
    let known = kind.filter(|&kind| verify::has_magic(kind, geometry, bytes));
    let proof = known.map(|kind| verify::verify(kind, geometry, place, bytes));
    if let Some(lsn) = lsn.filter(|&lsn| lsn > head) {
        // Only what is such a block has an LSN: other contents may look like one.
        if proof.is_none_or(|proof| proof.is_err()) {
            return Ok(StoredBlock::Doubtful);
        }
        let problem = format!("its last change is of {lsn}, and the log ends at {head}");
        return Err(Malformed::new(Structure::LogRecord, problem));
    }
    let is_right = proof.is_none_or(|proof| proof.is_ok());
    Ok(if is_right { StoredBlock::Newer } else { StoredBlock::Doubtful })
}

impl LogReplay<'_> {
    /// Replays parts of a block. Returns false when they are passed over.
    pub(super) fn buffer(&mut self, item: &XfsBufferItem<'_>) -> Result<bool> {
        let (place, blocks) = (item.place, u32::from(item.blocks));
        if item.flags.contains(XfsBufferFlags::CANCEL) {
            self.cancels.pass(place, blocks);
            return Ok(true);
        }
        let is_empty = item.runs().next().is_none();
        if is_empty || self.cancels.has(place, blocks) || is_of_quotas(item) {
            return Ok(false);
        }
        if item.flags.contains(XfsBufferFlags::INODES) {
            return self.chains_of_unlinked(item).map(|()| true);
        }
        let (geometry, now, head) = (self.geometry.clone(), self.lsn, self.head);
        let kind = item.flags.block_type();
        let len = usize::from(item.blocks) * BLOCK;
        let is_piece = kind.is_some_and(|kind| may_be_piece(kind, &geometry, len));
        let block = self.block(place, len)?;
        let mut is_doubtful = false;
        if block.content == ReplayedContent::Unchanged && !is_piece {
            let found = stored(kind, &geometry, (place, &block.bytes), (now, head));
            match found.map_err(|problem| damaged_at(place, problem))? {
                StoredBlock::Older => {}
                StoredBlock::Newer => {
                    self.forget(place);
                    return Ok(false);
                }
                StoredBlock::Doubtful => is_doubtful = true,
            }
        }
        for run in item.runs() {
            let to = block.bytes.get_mut(run.offset..run.offset + run.data.len());
            let to = to.ok_or_else(|| {
                Error::corrupt(Structure::LogItem, "parts of a buffer lead out of it")
            })?;
            to.copy_from_slice(run.data);
        }
        if is_piece {
            block.content = ReplayedContent::Plain;
            self.pieces.add(place, len, now);
            // It is proved when its directory is known.
            self.doubtful.remove(&place.0);
            return Ok(true);
        }
        let known = kind.filter(|&kind| verify::has_magic(kind, &geometry, &block.bytes));
        block.content = match known.filter(|_| has_header(kind)) {
            Some(kind) => ReplayedContent::Typed(kind),
            None => ReplayedContent::Plain,
        };
        if let Some(kind) = known
            && (is_doubtful || self.doubtful.contains_key(&place.0))
        {
            self.doubtful.insert(place.0, (kind, len));
        }
        self.pieces.forget(place);
        if known == Some(XfsBufferType::Superblock) && place.0 == 0 {
            let bytes = self.block(place, len)?.bytes.clone();
            self.follow_superblock(bytes)?;
        }
        if known.is_none() {
            let (at, lsn) = (place.bytes(), now.to_string());
            tell(self.reporter, &XfsReport::UnknownBlock { at, lsn });
        }
        Ok(true)
    }

    /// Follows a superblock that makes the volume larger.
    fn follow_superblock(&mut self, mut bytes: Vec<u8>) -> Result<()> {
        if self.geometry.has_checksums() {
            XfsIdentity::SUPERBLOCK.seal(&mut bytes, self.lsn);
        }
        let new = XfsSuperblock::parse(&bytes).map_err(malformed)?.geometry;
        let XfsGeometry { blocks, ag_count, layout, .. } = new;
        let expected = XfsGeometry { blocks, ag_count, layout, ..self.geometry.clone() };
        if new != expected {
            let problem = "a superblock in the log has other sizes or another place of the log";
            return Err(Error::corrupt(Structure::LogItem, problem));
        }
        require_whole(&**self.device, &new)?;
        self.geometry = new;
        Ok(())
    }

    /// Replays what a buffer of inodes says of the chains of unlinked ones.
    fn chains_of_unlinked(&mut self, item: &XfsBufferItem<'_>) -> Result<()> {
        let geometry = self.geometry.clone();
        let outside = || Error::corrupt(Structure::LogItem, "inodes outside of the groups");
        let (ag, block) = geometry.at(item.place).ok_or_else(outside)?;
        for (index, next) in item.unlinked(geometry.inode_size()) {
            let at = item.place.bytes() + ((index as u64) << geometry.inode_log);
            if next != AgIno::NULL && !geometry.has_inode(ag, next) {
                let problem = format!("the inode at byte {at} has {next} behind it in its chain");
                return Err(Error::corrupt(Structure::LogItem, problem));
            }
            let is_whole = self.change_inode(at, |inode| {
                if !inode.starts_with(&inode::INODE_MAGIC) {
                    let problem = "the log has its chain of unlinked inodes, but it is no inode";
                    return Err(Malformed::new(Structure::InodeCore, problem));
                }
                let is_whole = is_whole(inode, &geometry);
                if let Some(field) = inode.get_mut(NEXT_UNLINKED..NEXT_UNLINKED + 4) {
                    field.copy_from_slice(&next.0.to_be_bytes());
                }
                // A torn inode stays one, until an item of its own mends it.
                if is_whole {
                    inode::seal(inode, &geometry);
                }
                Ok((true, is_whole))
            })?;
            if !is_whole {
                let first = geometry.ino(ag, AgIno(block.0 << geometry.inodes_per_block_log())).0;
                let inside = item.place.bytes() % geometry.block_size() as u64;
                let index = (inside >> geometry.inode_log) + index as u64;
                self.doubtful_inodes.insert(Ino(first + index));
            }
        }
        Ok(())
    }
}
