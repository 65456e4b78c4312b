//! Pieces of directory blocks: a block of several filesystem blocks may lie in several extents, and
//! the log has an item for each of them.
//!
//! Only the first piece has a header, with the checksum of all. The others may begin with anything,
//! also with what looks like a header. So each piece takes each change, whatever LSN it seems to
//! have, and nothing is proved until the end. Then the directories that the log changed say which
//! pieces belong together, and each block gets its LSN and its checksum.
//!
//! The kernel proves a first piece as if it were a whole block, and does not mount such a volume.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::log::items::XfsBufferType;
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino, Lsn, XfsGeometry};

use super::verify;
use crate::buffer::{DiskRun, XfsBuffers, damaged_at};
use crate::inode::fork::place_of;
use crate::inode::{LoadedInode, XfsInodes, file_id};

/// The caches for inodes and for trees of extents.
const CACHE_BYTES: u64 = 1 << 20;

/// A piece that the log changed.
#[derive(Clone, Copy, Debug)]
struct ReplayedPiece {
    bytes: usize,
    /// The last change.
    lsn: Lsn,
}

/// The pieces that the log changed, and the directories.
#[derive(Debug, Default)]
pub(super) struct DirectoryPieces {
    pieces: BTreeMap<u64, ReplayedPiece>,
    directories: BTreeSet<Ino>,
}

/// Whether a block of this type and length may be a piece of a directory block. Nodes of attributes
/// look like pieces of nodes of directories.
pub(super) fn may_be_piece(kind: XfsBufferType, geometry: &XfsGeometry, bytes: usize) -> bool {
    use XfsBufferType as Type;
    let is_of_directory = matches!(
        kind,
        Type::DirectoryBlock
            | Type::DirectoryData
            | Type::DirectoryFree
            | Type::DirectoryLeaf
            | Type::DirectoryLeafOfNode
            | Type::Node
    );
    is_of_directory && bytes < geometry.dir_block_size()
}

impl DirectoryPieces {
    pub(super) fn add(&mut self, place: BasicBlock, bytes: usize, lsn: Lsn) {
        self.pieces.insert(place.0, ReplayedPiece { bytes, lsn });
    }

    /// Forgets a block that is no piece any more: the root of a tree of attributes that became a
    /// leaf again.
    pub(super) fn forget(&mut self, place: BasicBlock) {
        self.pieces.remove(&place.0);
    }

    /// Notes a directory that the log changed.
    pub(super) fn add_directory(&mut self, ino: Ino) {
        self.directories.insert(ino);
    }

    /// Completes the blocks of all pieces on `device`.
    pub(super) fn complete(
        mut self,
        device: &Arc<dyn BlockDevice>,
        geometry: &XfsGeometry,
    ) -> Result<()> {
        if self.pieces.is_empty() {
            return Ok(());
        }
        let buffers = XfsBuffers::new(device.clone(), geometry.clone(), CACHE_BYTES);
        let inodes = XfsInodes::new(CACHE_BYTES);
        for ino in std::mem::take(&mut self.directories) {
            let inode = match inodes.get(&buffers, file_id(ino)) {
                Ok(inode) => inode,
                // It was removed later.
                Err(Error::Posix { .. }) => continue,
                Err(error) => return Err(error),
            };
            if inode.require_directory().is_ok() && inode.data.has_extents() {
                self.complete_directory(&**device, &buffers, &inode)?;
            }
        }
        for (place, piece) in self.pieces {
            let place = BasicBlock(place);
            let mut bytes = vec![0; piece.bytes];
            buffers.read_into(place.bytes(), &mut bytes)?;
            let kind = XfsBufferType::Node;
            if !verify::has_magic(kind, geometry, &bytes) {
                let problem = "a piece of a directory block that belongs to no directory";
                let problem = Malformed::new(Structure::DirectoryBlock, problem);
                return Err(damaged_at(place, problem));
            }
            XfsIdentity::NODE.seal(&mut bytes, piece.lsn);
            verify::verify(kind, geometry, place, &bytes)
                .map_err(|problem| damaged_at(place, problem))?;
            write(&**device, place.bytes(), &bytes)?;
        }
        Ok(())
    }

    /// Completes the blocks of a directory that have pieces.
    fn complete_directory(
        &mut self,
        device: &dyn BlockDevice,
        buffers: &XfsBuffers,
        inode: &LoadedInode,
    ) -> Result<()> {
        let geometry = buffers.geometry();
        let log = geometry.dir_block_log;
        // The last change of each block with pieces.
        let mut blocks = BTreeMap::new();
        let mut extents = inode.data.extents(buffers, FileBlock(0))?;
        while let Some(extent) = extents.next()? {
            let start = place_of(buffers, &extent)?.0;
            let end = start + (u64::from(extent.count) << (geometry.block_log - 9));
            let found: Vec<_> =
                self.pieces.range(start..end).map(|(at, piece)| (*at, piece.lsn)).collect();
            for (at, lsn) in found {
                self.pieces.remove(&at);
                let block = extent.offset.0 + ((at - start) >> (geometry.block_log - 9));
                let last = blocks.entry(block >> log << log).or_insert(lsn);
                *last = lsn.max(*last);
            }
        }
        for (block, lsn) in blocks {
            let runs = inode.data.runs(buffers, FileBlock(block), 1 << log)?.unwrap_or_default();
            complete_block(device, buffers, &runs, lsn)
                .map_err(|error| error.in_file(inode.file()))?;
        }
        Ok(())
    }
}

/// Gives the directory block in `runs` its LSN and its checksum.
fn complete_block(
    device: &dyn BlockDevice,
    buffers: &XfsBuffers,
    runs: &[DiskRun],
    lsn: Lsn,
) -> Result<()> {
    let geometry = buffers.geometry();
    let mut bytes = vec![0; geometry.dir_block_size()];
    each_run(runs, &mut bytes, |run, part| buffers.read_into(run.at.bytes(), part))?;
    let place = runs.first().map_or(BasicBlock(0), |run| run.at);
    let kind = match DaKind::of_directory(geometry, &bytes) {
        Some(DaKind::DirBlock) => XfsBufferType::DirectoryBlock,
        Some(DaKind::DirData) => XfsBufferType::DirectoryData,
        Some(DaKind::DirFree) => XfsBufferType::DirectoryFree,
        Some(DaKind::DirLeaf) => XfsBufferType::DirectoryLeaf,
        Some(DaKind::DirNodeLeaf) => XfsBufferType::DirectoryLeafOfNode,
        Some(DaKind::DirNode) => XfsBufferType::Node,
        _ => {
            let problem = "its magic number is that of no directory block";
            let problem = Malformed::new(Structure::DirectoryBlock, problem);
            return Err(damaged_at(place, problem));
        }
    };
    if let Some(identity) = XfsIdentity::of_magic(geometry, &bytes) {
        identity.seal(&mut bytes, lsn);
    }
    verify::verify(kind, geometry, place, &bytes).map_err(|problem| damaged_at(place, problem))?;
    each_run(runs, &mut bytes, |run, part| write(device, run.at.bytes(), part))
}

/// Calls `visit` with the runs of a block, and the bytes of each.
fn each_run(
    runs: &[DiskRun],
    mut bytes: &mut [u8],
    mut visit: impl FnMut(&DiskRun, &mut [u8]) -> Result<()>,
) -> Result<()> {
    for run in runs {
        let len = run.bytes.min(bytes.len());
        let (part, rest) = bytes.split_at_mut(len);
        visit(run, part)?;
        bytes = rest;
    }
    Ok(())
}

fn write(device: &dyn BlockDevice, at: u64, bytes: &[u8]) -> Result<()> {
    device
        .write_at(at, bytes)
        .map_err(|error| Error::io(format!("writing at {at} of {}", device.name()), error))
}
