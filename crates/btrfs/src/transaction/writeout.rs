//! Writing a finished transaction to the devices.
//!
//! Checksums are computed, and every block checked once more, on all cores. Blocks go out in the order
//! of the devices, those side by side in one request. Then a barrier, the superblocks, a barrier, and their copies.
//!
//! A superblock is several sectors, so a power cut may tear it. Its copies are not written before it is
//! on the medium, and the first barrier of the next commit is behind them: one of them is always
//! whole, that of the last commit or that of the one before.

use std::io::IoSlice;
use std::sync::Arc;

use offshoot_btrfs_format::check;
use offshoot_btrfs_format::encode::{seal_block, sealed_superblock};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SuperblockItem};
use offshoot_btrfs_format::{Logical, Physical};
use offshoot_vfs::{Error, Result};

use super::Transaction;
use super::dirty::Latch;
use crate::block::TreeBlock;
use crate::sync::{RwLock, thread};
use crate::volume::Engine;

/// The most that goes out in one request, in bytes.
const REQUEST_BYTES: usize = 1 << 20;

impl Engine {
    pub(super) fn write_out(
        &self,
        transaction: &Transaction,
        superblock: &SuperblockItem,
    ) -> Result<()> {
        let blocks = transaction.dirty.in_order();
        let sealed = self.seal(&blocks)?;
        let mut writes = Vec::new();
        for block in &sealed {
            let logical = Logical(block.header().bytenr.get());
            let bytes = block.bytes();
            for (member, physical, part) in self.write_places(logical, bytes.len() as u64)? {
                let [from, to] =
                    [part.start, part.end].map(|at| usize::try_from(at).expect("in a block"));
                writes.push((member, physical.0, &bytes[from..to]));
            }
        }
        writes.sort_unstable_by_key(|&(member, physical, _)| (member, physical));
        let mut rest = &writes[..];
        while let Some(&(member, start, _)) = rest.first() {
            let mut end = start;
            let count = rest
                .iter()
                .take_while(|&&(m, physical, bytes)| {
                    let joins = m == member
                        && physical == end
                        && end - start + bytes.len() as u64 <= REQUEST_BYTES as u64;
                    end += bytes.len() as u64;
                    joins
                })
                .count();
            let bufs: Vec<_> = rest[..count].iter().map(|w| IoSlice::new(w.2)).collect();
            self.write_member(member, start, &bufs)?;
            rest = &rest[count..];
        }
        let [primary, copies @ ..] = SUPERBLOCK_OFFSETS;
        self.flush_members()?;
        self.write_superblocks(transaction, superblock, &[primary])?;
        self.flush_members()?;
        self.write_superblocks(transaction, superblock, &copies)
    }

    /// Gives every block its checksum and checks it once more.
    fn seal(&self, blocks: &[(Logical, Arc<Latch>)]) -> Result<Vec<Arc<TreeBlock>>> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = blocks.len().div_ceil(threads).max(1);
        thread::scope(|scope| {
            let parts: Vec<_> = blocks
                .chunks(share)
                .map(|part| {
                    scope.spawn(move || {
                        part.iter()
                            .map(|(at, latch)| self.seal_one(*at, latch))
                            .collect::<Result<Vec<_>>>()
                    })
                })
                .collect();
            let mut all = Vec::with_capacity(blocks.len());
            for part in parts {
                all.extend(part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
            }
            Ok(all)
        })
    }

    fn seal_one(&self, logical: Logical, latch: &RwLock<Arc<TreeBlock>>) -> Result<Arc<TreeBlock>> {
        let mut latch = latch.write();
        let bytes = Arc::make_mut(&mut latch).bytes_mut();
        seal_block(bytes, self.superblock().checksum);
        check::verify(bytes, self.geometry(), logical).map_err(|e| {
            Error::corrupt_at(e.structure, logical.0, format!("about to be written: {}", e.problem))
        })?;
        Ok(latch.clone())
    }

    fn write_superblocks(
        &self,
        transaction: &Transaction,
        superblock: &SuperblockItem,
        offsets: &[u64],
    ) -> Result<()> {
        for &offset in offsets {
            for (index, member) in self.members().iter().enumerate() {
                if offset + SUPERBLOCK_SIZE as u64 > member.total_bytes {
                    continue;
                }
                let mut item = Box::new(*superblock);
                item.dev_item = member.item;
                if let Some(allocated) = transaction.allocated.get() {
                    item.dev_item.bytes_used = allocated[index].into();
                }
                let checksum = self.superblock().checksum;
                let bytes = sealed_superblock(&item, Physical(offset), checksum);
                self.write_member(index, offset, &[IoSlice::new(&bytes[..])])?;
            }
        }
        Ok(())
    }

    /// Writes `bufs` one behind the other at `offset` of a member.
    pub(crate) fn write_member(
        &self,
        member: usize,
        offset: u64,
        bufs: &[IoSlice<'_>],
    ) -> Result<()> {
        let member = &self.members()[member];
        let device = member.device.as_ref().ok_or_else(|| {
            Error::io(format!("writing to {}", member.name()), offshoot_vfs::Errno::NXIO)
        })?;
        device
            .write_vectored_at(offset, bufs)
            .map_err(|e| Error::io(format!("{}: writing at {offset}", device.name()), e))
    }

    fn flush_members(&self) -> Result<()> {
        for device in self.members().iter().filter_map(|member| member.device.as_ref()) {
            device.flush().map_err(|e| Error::io(format!("{}: flushing", device.name()), e))?;
        }
        Ok(())
    }
}
