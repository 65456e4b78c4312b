//! Values in blocks of their own. The log does not carry them: they are written before the change
//! that makes their attribute complete, and are durable before it is.

use offshoot_vfs::Result;
use offshoot_xfs_format::da::DaExpected;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::{BasicBlock, FileBlock, FsBlock};

use super::fork::ChangedXattrs;
use crate::buffer::damaged_at;

const KIND: RemoteKind = RemoteKind::AttrValue;

/// Blocks of the fork that are in a row on the device.
struct ValueRun {
    block: FileBlock,
    place: BasicBlock,
    blocks: usize,
}

impl ChangedXattrs<'_, '_> {
    /// How many blocks a value has.
    pub(super) fn value_blocks(&self, len: usize) -> u32 {
        u32::try_from(RemoteKind::blocks(self.geometry(), len)).unwrap_or(u32::MAX)
    }

    /// The bytes of a value that so many of its blocks hold.
    pub(super) fn value_bytes(&self, blocks: u32) -> usize {
        let geometry = self.geometry();
        RemoteKind::room(geometry, geometry.block_size()) * blocks as usize
    }

    /// The run from block `block` of the fork on, with at most `most` blocks.
    fn value_run(&mut self, block: FileBlock, most: u32) -> Result<ValueRun> {
        let extent = self.blocks.extent(block)?;
        let inside = block.0 - extent.offset.0;
        let place = self.blocks.place(FsBlock(extent.start.0 + inside))?;
        let left = u64::from(extent.count) - inside;
        let blocks = usize::try_from(left.min(most.into())).unwrap_or(usize::MAX);
        Ok(ValueRun { block, place, blocks })
    }

    fn value_runs(&mut self, block: FileBlock, len: usize) -> Result<Vec<ValueRun>> {
        let (mut next, mut left) = (block, self.value_blocks(len));
        let mut runs = Vec::new();
        while left > 0 {
            let run = self.value_run(next, left)?;
            next.0 += run.blocks as u64;
            left = left.saturating_sub(u32::try_from(run.blocks).unwrap_or(u32::MAX));
            runs.push(run);
        }
        Ok(runs)
    }

    /// What block number `index` of a run says about itself.
    fn value_expected(&self, run: &ValueRun, index: usize) -> DaExpected {
        let index = index as u64;
        let place = run.place.0 + index * (self.geometry().block_size() as u64 / BASIC_BLOCK);
        let block = Some(FileBlock(run.block.0 + index));
        DaExpected {
            place: BasicBlock(place),
            owner: Some(self.blocks.ino),
            block,
            is_sealed: true,
        }
    }

    /// Writes a value to its blocks, which are mapped.
    pub(super) fn write_value(&mut self, block: FileBlock, value: &[u8]) -> Result<()> {
        let (geometry, size) = (self.geometry(), self.geometry().block_size());
        let mut offset = 0;
        for run in self.value_runs(block, value.len())? {
            let mut bytes = Vec::with_capacity(run.blocks * size);
            for index in 0..run.blocks {
                let expected = self.value_expected(&run, index);
                let block = KIND.encode(geometry, &expected, offset, value, size);
                bytes.extend(block.map_err(|problem| damaged_at(expected.place, problem))?);
                offset += RemoteKind::room(geometry, size);
            }
            self.blocks.t.engine().buffers().write(run.place, &bytes)?;
        }
        Ok(())
    }

    /// Reads the value of `len` bytes from a block on.
    pub(super) fn read_value(&mut self, block: FileBlock, len: usize) -> Result<Vec<u8>> {
        let (geometry, size) = (self.geometry(), self.geometry().block_size());
        let mut value = Vec::with_capacity(len);
        for run in self.value_runs(block, len)? {
            let mut bytes = vec![0; run.blocks * size];
            self.blocks.t.engine().buffers().read_into(run.place.bytes(), &mut bytes)?;
            for (index, part) in bytes.chunks_exact(size).enumerate() {
                let expected = self.value_expected(&run, index);
                let part = KIND.parse(geometry, part, &expected, value.len(), len);
                value.extend(part.map_err(|problem| damaged_at(expected.place, problem))?);
            }
        }
        Ok(value)
    }
}
