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
//!
//! A thread may write a block that it copied out of the cache before another one counted there. So
//! [`Counts`] remembers what was counted here, and puts it into such a block, until a block has it
//! by itself. Counts of less than a byte share one with their neighbours, so the caller lets one
//! thread at a time write metadata.

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

    /// Counts `cluster` once, where it is not counted; that count.
    fn count(&self, device: &dyn BlockDevice, cluster: u64) -> io::Result<Option<Count>> {
        let (index, inside) = self.block_of(cluster);
        let Some(at) = self.references.start.checked_add(index * 8) else { return Ok(None) };
        if at + 8 > self.references.end {
            return Ok(None);
        }
        let block = entry_at(device, at)? & OFFSET_BITS;
        if block == 0 {
            return Ok(None);
        }
        let bits = 1u64 << self.count_order;
        let first = block + inside * bits / 8;
        let mut bytes = vec![0; usize::try_from(bits.div_ceil(8)).map_err(io::Error::other)?];
        device.read_at(first, &mut bytes)?;
        // Counts of less than a byte begin at its lowest bits; others are big-endian.
        let shift = if bits < 8 { inside * bits % 8 } else { 0 };
        let mask = if bits < 8 { ((1u8 << bits) - 1) << shift } else { u8::MAX };
        let count = Count { first, len: bytes.len(), mask, one: 1 << shift };
        let is_new = count.add_to(&mut bytes);
        if is_new {
            device.write_at(first, &bytes)?;
        }
        Ok(is_new.then_some(count))
    }
}

/// Where the count of a cluster is, which is one.
#[derive(Debug)]
struct Count {
    first: u64,
    len: usize,
    /// Its bits in its last byte, and the lowest of them.
    mask: u8,
    one: u8,
}

impl Count {
    /// Makes the count in `bytes`, which are those of the count, one where it is zero. Whether it
    /// was.
    fn add_to(&self, bytes: &mut [u8]) -> bool {
        let Some((last, others)) = bytes.split_last_mut() else { return false };
        let is_zero = others.iter().all(|&byte| byte == 0) && *last & self.mask == 0;
        if is_zero {
            *last |= self.one;
        }
        is_zero
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

/// What was counted here, and is in no block that was written since.
#[derive(Debug, Default)]
pub(super) struct Counts(Vec<Count>);

impl Counts {
    /// `bytes` are about to be written at `offset`: what new entries of the two tables in it refer
    /// to is counted, and what was counted before is put into blocks of counts. Whether a count was
    /// written.
    pub(super) fn before_write(
        &mut self,
        device: &dyn BlockDevice,
        offset: u64,
        bytes: &mut [u8],
    ) -> io::Result<bool> {
        self.0.retain(|count| {
            let start = count.first.checked_sub(offset).and_then(|at| usize::try_from(at).ok());
            let range = start.and_then(|start| bytes.get_mut(start..start + count.len));
            range.is_none_or(|bytes| count.add_to(bytes))
        });
        let tables = Tables::read(device)?;
        let mut has_written = false;
        for (at, entry) in (offset..).step_by(8).zip(bytes.as_chunks::<8>().0) {
            let is_entry = tables.l1.contains(&at) || tables.references.contains(&at);
            let place = u64::from_be_bytes(*entry) & OFFSET_BITS;
            if is_entry && place != 0 && entry_at(device, at)? & OFFSET_BITS != place {
                let count = tables.count(device, place >> tables.cluster_bits)?;
                has_written |= count.is_some();
                self.0.extend(count);
            }
        }
        Ok(has_written)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryDevice;

    /// Clusters of 512 bytes: header, L1 table, reference table, block of counts of one bit.
    #[test]
    fn a_block_that_was_copied_too_early_does_not_take_a_count_back() {
        const L1: u64 = 512;
        const REFERENCES: u64 = 1024;
        const BLOCK: u64 = 1536;
        let mut image = [0; 2048];
        image[7] = 3;
        image[23] = 9;
        image[36..40].copy_from_slice(&1u32.to_be_bytes());
        image[40..48].copy_from_slice(&L1.to_be_bytes());
        image[48..56].copy_from_slice(&REFERENCES.to_be_bytes());
        image[56..60].copy_from_slice(&1u32.to_be_bytes());
        image[1024..1032].copy_from_slice(&BLOCK.to_be_bytes());
        image[1536] = 0b0000_1111;
        let device = MemoryDevice::new(image.to_vec());
        let mut counts = Counts::default();
        let mut write = |offset, bytes: &mut [u8]| {
            let has_written = counts.before_write(&device, offset, bytes).expect("memory");
            device.write_at(offset, bytes).expect("memory");
            let mut found = [0];
            device.read_at(BLOCK, &mut found).expect("memory");
            (has_written, found[0])
        };
        // A table of the second level in cluster 5.
        let mut entry = (5u64 * 512).to_be_bytes();
        assert_eq!(write(L1, &mut entry), (true, 0b0010_1111));
        let mut copied_before = [0; 512];
        copied_before[0] = 0b0100_1111;
        assert_eq!(write(BLOCK, &mut copied_before), (false, 0b0110_1111));
        let mut copied_since = [0; 512];
        copied_since[0] = 0b0110_1111;
        assert_eq!(write(BLOCK, &mut copied_since), (false, 0b0110_1111));
        // Now the count is known to who writes blocks, and may take it away.
        let mut freed = [0; 512];
        freed[0] = 0b0100_1111;
        assert_eq!(write(BLOCK, &mut freed), (false, 0b0100_1111));
    }
}
