//! Values of attributes and targets of links that have blocks of their own.

use offshoot_vfs::Result;
use offshoot_xfs_format::da::DaExpected;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::{FileBlock, Ino};

use crate::buffer::{BufferRole, XfsBuffers, damaged_at};
use crate::inode::fork::LoadedFork;

/// Reads a value of `len` bytes, at least one, from block `at` of a fork on. The caller has bounded
/// `len`.
pub(crate) fn read(
    buffers: &XfsBuffers,
    fork: &LoadedFork,
    owner: Ino,
    kind: RemoteKind,
    at: FileBlock,
    len: usize,
) -> Result<Vec<u8>> {
    let geometry = buffers.geometry();
    let count = u32::try_from(RemoteKind::blocks(geometry, len)).unwrap_or(u32::MAX);
    let mut value = Vec::with_capacity(len);
    let runs = fork.runs(buffers, at, count)?;
    let runs = runs.ok_or_else(|| fork.damaged(format!("a value at {at} is not there")))?;
    let mut block_of_fork = at;
    let mut bytes = Vec::new();
    for run in runs {
        if kind == RemoteKind::SymlinkTarget {
            // A link has one header in an extent. The log has it, so it may not be home yet.
            let buffer = buffers.read(&[run], BufferRole::SymlinkTarget(owner))?;
            let part = kind.view(geometry, buffer.bytes(), value.len(), len);
            value.extend_from_slice(part.map_err(|problem| buffer.damaged(problem))?);
            continue;
        }
        bytes.resize(run.bytes, 0);
        buffers.read_into(run.at.bytes(), &mut bytes)?;
        let mut place = run.at;
        for part in bytes.chunks_exact(geometry.block_size()) {
            let expected = DaExpected {
                place,
                owner: Some(owner),
                block: Some(block_of_fork),
                is_sealed: true,
            };
            let part = kind
                .parse(geometry, part, &expected, value.len(), len)
                .map_err(|problem| damaged_at(place, problem))?;
            value.extend_from_slice(part);
            block_of_fork.0 += 1;
            place.0 += geometry.block_size() as u64 / BASIC_BLOCK;
        }
    }
    Ok(value)
}
