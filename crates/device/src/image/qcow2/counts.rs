//! Reference counts that have to be on the medium before something refers to their clusters.
//!
//! ```text
//!   reference table ──> reference block ──> count of a cluster
//!   L1 table        ──> L2 table (a cluster)  ──> data (a cluster)
//! ```
//!
//! `imago` keeps counts in a cache and writes them before the L2 tables there, but it writes an
//! entry of the L1 table or of the reference table as soon as it has it. After a power cut such an
//! entry could refer to a cluster that counts as free. So before one of these is written, the count
//! of its cluster becomes one where it is none. The cache has the same count, and writes it later.

use std::io;
use std::ops::Range;

use crate::BlockDevice;
use crate::fields::invalid;

/// The bits of an entry that say where something is.
const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;

/// Where the tables are, by the header as it is now.
struct Tables {
    cluster_bits: u32,
    l1: Range<u64>,
    references: Range<u64>,
    /// The logarithm of the bits of a count.
    count_order: u32,
}

impl Tables {
    fn read(device: &dyn BlockDevice) -> io::Result<Self> {
        let mut bytes = [0; 104];
        let len = usize::try_from(device.size_bytes()).map_or(104, |size| size.min(104));
        device.read_at(0, &mut bytes[..len])?;
        let number = |at: usize, len: usize| {
            bytes[at..at + len].iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte))
        };
        let cluster_bits = bytes[23].into();
        if !(9..=21).contains(&cluster_bits) {
            return Err(invalid("its clusters have an impossible size"));
        }
        let table = |start: u64, len: u64| start..start.saturating_add(len);
        Ok(Self {
            cluster_bits,
            l1: table(number(40, 8), number(36, 4) * 8),
            references: table(number(48, 8), number(56, 4) << cluster_bits),
            // Version 2 has counts of 16 bits.
            count_order: if bytes[7] == 2 { 4 } else { u32::from(bytes[99]).min(6) },
        })
    }

    /// The bits of a block's index in the reference table, and the place of the count in its block.
    fn block_of(&self, cluster: u64) -> (u64, u64) {
        let counts_bits = self.cluster_bits + 3 - self.count_order;
        (cluster >> counts_bits, cluster & ((1 << counts_bits) - 1))
    }

    /// Counts `cluster` once, where it is not counted. Whether that changed anything.
    fn count(&self, device: &dyn BlockDevice, cluster: u64) -> io::Result<bool> {
        let (index, inside) = self.block_of(cluster);
        let Some(at) = self.references.start.checked_add(index * 8) else { return Ok(false) };
        if at + 8 > self.references.end {
            return Ok(false);
        }
        let block = entry_at(device, at)? & OFFSET_BITS;
        if block == 0 {
            return Ok(false);
        }
        let bits = 1u64 << self.count_order;
        let first = block + inside * bits / 8;
        let mut bytes = vec![0; usize::try_from(bits.div_ceil(8)).map_err(io::Error::other)?];
        device.read_at(first, &mut bytes)?;
        // Counts of less than a byte begin at its lowest bits; others are big-endian.
        let shift = if bits < 8 { inside * bits % 8 } else { 0 };
        let mask = if bits < 8 { (1u8 << bits) - 1 } else { u8::MAX };
        let last = bytes.len() - 1;
        let is_counted =
            bytes[..last].iter().any(|&byte| byte != 0) || bytes[last] >> shift & mask != 0;
        if is_counted {
            return Ok(false);
        }
        bytes[last] |= 1 << shift;
        device.write_at(first, &bytes)?;
        Ok(true)
    }
}

fn entry_at(device: &dyn BlockDevice, at: u64) -> io::Result<u64> {
    let mut bytes = [0; 8];
    // Behind the end of the file there are zeros.
    if at.checked_add(8).is_some_and(|end| end <= device.size_bytes()) {
        device.read_at(at, &mut bytes)?;
    }
    Ok(u64::from_be_bytes(bytes))
}

/// `bytes` are about to be written at `offset`: what new entries of the two tables in it refer to
/// is counted. Whether a count was written.
pub(super) fn before_write(
    device: &dyn BlockDevice,
    offset: u64,
    bytes: &[u8],
) -> io::Result<bool> {
    let tables = Tables::read(device)?;
    let mut has_written = false;
    for (at, entry) in (offset..).step_by(8).zip(bytes.as_chunks::<8>().0) {
        let is_entry = tables.l1.contains(&at) || tables.references.contains(&at);
        let place = u64::from_be_bytes(*entry) & OFFSET_BITS;
        if is_entry && place != 0 && entry_at(device, at)? & OFFSET_BITS != place {
            has_written |= tables.count(device, place >> tables.cluster_bits)?;
        }
    }
    Ok(has_written)
}

/// Refuses to write an image whose reference table has holes: blocks are allocated one behind the
/// other, and looking for room around a hole would never end.
pub(super) fn check(device: &dyn BlockDevice) -> io::Result<()> {
    let tables = Tables::read(device)?;
    let Range { start, end } = tables.references;
    if end > device.size_bytes() || start == 0 {
        return Err(invalid("its table of reference counts is not in the file"));
    }
    let mut bytes = vec![0; usize::try_from(end - start).map_err(io::Error::other)?];
    device.read_at(start, &mut bytes)?;
    let entries = bytes.as_chunks::<8>().0.iter().map(|entry| u64::from_be_bytes(*entry));
    let mut entries = entries.map(|entry| entry & OFFSET_BITS != 0);
    let used = entries.by_ref().take_while(|is_used| *is_used).count();
    if used == 0 || entries.any(|is_used| is_used) {
        return Err(invalid(
            "its table of reference counts has holes: qemu-img convert -O qcow2 IN OUT makes an \
             image that can be written",
        ));
    }
    Ok(())
}
