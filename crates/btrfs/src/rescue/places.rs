//! All places of a device that may have a tree block.

use std::ops::{ControlFlow, Range};

use offshoot_device::BlockDevice;

/// The bytes that are read from a device at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Calls `visit` with the bytes from each multiple of `step` on in `range`, which begins at one:
/// `len` bytes, or less at the end of the device. Bytes that the device cannot read are passed
/// over.
pub(crate) fn each_place(
    device: &dyn BlockDevice,
    range: Range<u64>,
    (step, len): (u32, u32),
    visit: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let end = range.end.min(device.size_bytes());
    let mut at = range.start;
    let mut bytes = Vec::new();
    while at < end {
        // The last blocks of a piece reach into the next one.
        let whole = (PIECE_BYTES + u64::from(len)).min(device.size_bytes() - at);
        bytes.resize(usize::try_from(whole).unwrap_or(0), 0);
        let next = at.saturating_add(PIECE_BYTES).min(end);
        if device.read_at(at, &mut bytes).is_ok() {
            for place in (at..next).step_by(step as usize) {
                let from = usize::try_from(place - at).unwrap_or(usize::MAX);
                let to = from.saturating_add(len as usize).min(bytes.len());
                visit(place, bytes.get(from..to).unwrap_or_default())?;
            }
        } else {
            by_block(device, at..next, (step, len), visit)?;
        }
        at = next;
    }
    ControlFlow::Continue(())
}

/// As [`each_place`], where the device cannot read a whole piece.
fn by_block(
    device: &dyn BlockDevice,
    range: Range<u64>,
    (step, len): (u32, u32),
    visit: &mut dyn FnMut(u64, &[u8]) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let mut block = vec![0; len as usize];
    for at in range.step_by(step as usize) {
        let room = usize::try_from(device.size_bytes() - at).unwrap_or(usize::MAX);
        let len = block.len().min(room);
        if let Some(block) = block.get_mut(..len)
            && device.read_at(at, block).is_ok()
        {
            visit(at, block)?;
        }
    }
    ControlFlow::Continue(())
}
