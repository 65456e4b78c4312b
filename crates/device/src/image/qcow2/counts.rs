//! Reference counts, and the free clusters: those whose count is 0.
//!
//! ```text
//!   count table ──> block of counts ──> count of a cluster: how many entries lead to it
//! ```
//!
//! A block of counts also counts itself: a new block goes to the first cluster that it counts and
//! that holds no metadata. When the count table has no entry left, a larger table is made behind
//! all clusters that the old one counts, together with the blocks that count it. The next commit
//! makes the header lead to it.

use std::io;

use super::REFCOUNT_TABLE_BYTES_MAX;
use super::layout::{OFFSET_BITS, Qcow2Geometry};
use super::pages::CommitStep;
use super::tables::{Qcow2Tables, wrong_counts};
use crate::fields::invalid;

/// The byte of the header with the offset of the count table; its number of clusters follows.
const HEADER_COUNT_TABLE: u64 = 48;

impl Qcow2Geometry {
    /// The base-2 logarithm of the number of counts in a block.
    fn block_bits(&self) -> u32 {
        self.cluster_bits + 3 - self.count_order
    }
}

/// The count of `1 << order` bits that begins at `bit` of `bytes`.
fn count_in(bytes: &[u8], bit: usize, order: u32) -> u64 {
    let (bits, first) = (1 << order, bit / 8);
    if bits < 8 {
        // Counts that are smaller than a byte fill it from its lowest bits on.
        return u64::from(bytes[first] >> (bit % 8)) & ((1 << bits) - 1);
    }
    let bytes = &bytes[first..first + bits / 8];
    bytes.iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Sets the count that begins at `bit` of `bytes` to `count`.
fn set_count_in(bytes: &mut [u8], bit: usize, order: u32, count: u64) {
    let (bits, first) = (1 << order, bit / 8);
    if bits < 8 {
        let mask = ((1u8 << bits) - 1) << (bit % 8);
        bytes[first] = bytes[first] & !mask | count.to_be_bytes()[7] << (bit % 8) & mask;
        return;
    }
    let len = bits / 8;
    bytes[first..first + len].copy_from_slice(&count.to_be_bytes()[8 - len..]);
}

impl Qcow2Tables {
    /// How many entries lead to `cluster`.
    pub(super) fn count(&self, cluster: u64) -> io::Result<u64> {
        let order = self.layout.count_order;
        match self.count_at(cluster)? {
            Some((at, bit)) => self.pages.with(at, |bytes| count_in(bytes, bit, order)),
            None => Ok(0),
        }
    }

    /// Where the count of `cluster` is: its first byte in the file, and its first bit in that byte.
    /// `None` when no block has a count for it.
    fn count_at(&self, cluster: u64) -> io::Result<Option<(u64, usize)>> {
        let block = self.block(cluster >> self.layout.block_bits())?;
        let inside = cluster & ((1 << self.layout.block_bits()) - 1);
        let bit = inside << self.layout.count_order;
        let place = (block + bit / 8, usize::try_from(bit % 8).expect("small"));
        Ok((block != 0).then_some(place))
    }

    /// The byte of the file at which block `index` begins; 0 when there is none.
    fn block(&self, index: u64) -> io::Result<u64> {
        if index >= self.count_table_bytes() / 8 {
            return Ok(0);
        }
        let block = self.pages.number(self.count_table_at() + index * 8)? & OFFSET_BITS;
        let is_possible = self.layout.inside(block) == 0
            && block < self.file.size_bytes()
            && (block == 0 || !self.metadata.is_fixed(block >> self.layout.cluster_bits));
        if is_possible { Ok(block) } else { Err(invalid("an entry of its tables is damaged")) }
    }

    fn count_table_at(&self) -> u64 {
        self.metadata.count_table.start << self.layout.cluster_bits
    }

    fn count_table_bytes(&self) -> u64 {
        let clusters = self.metadata.count_table.end - self.metadata.count_table.start;
        clusters << self.layout.cluster_bits
    }

    /// Sets the count of `cluster` to `count`. A block for it must exist.
    pub(super) fn set_count(&mut self, cluster: u64, count: u64) -> io::Result<()> {
        let order = self.layout.count_order;
        let Some((at, bit)) = self.count_at(cluster)? else { return Err(wrong_counts()) };
        let len = (1usize << order).div_ceil(8);
        let mut bytes = [0; 8];
        self.pages.with(at, |page| bytes[..len].copy_from_slice(&page[..len]))?;
        set_count_in(&mut bytes[..len], bit, order, count);
        self.pages.change(at, &bytes[..len], CommitStep::Counts)
    }

    /// Allocates a free cluster: sets its count to 1 and returns its number. Its contents are not
    /// defined.
    pub(super) fn allocate(&mut self) -> io::Result<u64> {
        while let Some(&cluster) = self.freed.first() {
            let is_free = self.count(cluster)? == 0;
            if is_free {
                self.take(cluster)?;
            }
            self.freed.remove(&cluster);
            if is_free {
                return Ok(cluster);
            }
        }
        let order = self.layout.count_order;
        loop {
            let block_index = self.next >> self.layout.block_bits();
            if block_index >= self.count_table_bytes() / 8 {
                self.grow_count_table()?;
                continue;
            }
            let Some((at, bit)) = self.count_at(self.next)? else {
                self.add_block(block_index)?;
                continue;
            };
            let (free, looked_at) = self.pages.with(at, |bytes| {
                let counts = (bytes.len() * 8 - bit) >> order;
                let is_free = |index: &usize| count_in(bytes, bit + (index << order), order) == 0;
                ((0..counts).find(is_free), counts)
            })?;
            match free {
                Some(index) => {
                    let cluster = self.next + index as u64;
                    let cluster = self.take(cluster)?;
                    self.next = cluster + 1;
                    return Ok(cluster);
                }
                None => self.next += looked_at as u64,
            }
        }
    }

    fn take(&mut self, cluster: u64) -> io::Result<u64> {
        if self.metadata.contains(cluster) {
            return Err(wrong_counts());
        }
        self.set_count(cluster, 1)?;
        Ok(cluster)
    }

    /// Frees a cluster to which no entry leads: sets its count to 0.
    pub(super) fn free(&mut self, cluster: u64) -> io::Result<()> {
        self.set_count(cluster, 0)?;
        if self.freed.len() < self.limits.freed {
            self.freed.insert(cluster);
        } else {
            self.next = self.next.min(cluster);
        }
        Ok(())
    }

    /// Makes block `index`.
    fn add_block(&mut self, index: u64) -> io::Result<()> {
        let first = index << self.layout.block_bits();
        let mut clusters = first..first + (1 << self.layout.block_bits());
        if clusters.end > OFFSET_BITS >> self.layout.cluster_bits {
            return Err(full());
        }
        let cluster = clusters.find(|&cluster| !self.metadata.contains(cluster));
        let cluster = cluster.ok_or_else(wrong_counts)?;
        let mut bytes = vec![0; self.cluster_len()];
        let bit = usize::try_from(cluster - first).map_err(io::Error::other)?;
        let order = self.layout.count_order;
        set_count_in(&mut bytes, bit << order, order, 1);
        self.write_new_metadata(cluster, &bytes)?;
        let at = self.count_table_at() + index * 8;
        let entry = cluster << self.layout.cluster_bits;
        self.pages.change(at, &entry.to_be_bytes(), CommitStep::CountTable)
    }

    /// Makes a larger count table, with new blocks behind those of the old one.
    fn grow_count_table(&mut self) -> io::Result<()> {
        let Qcow2Geometry { cluster_bits, count_order, .. } = self.layout;
        let cluster_bytes = self.layout.cluster_bytes();
        let old_entries = self.count_table_bytes() / 8;
        let first = old_entries << self.layout.block_bits();
        let most = REFCOUNT_TABLE_BYTES_MAX.max(cluster_bytes) >> cluster_bits;
        let (mut blocks, mut clusters);
        blocks = 0;
        loop {
            blocks += 1;
            let needed = (old_entries + blocks) * 8;
            // Half as large again as needed, so that the table seldom grows.
            clusters = (needed + needed / 2).div_ceil(cluster_bytes).min(most);
            if needed > clusters << cluster_bits {
                return Err(full());
            }
            if blocks << self.layout.block_bits() > blocks + clusters {
                break;
            }
        }
        let new = first..first + blocks + clusters;
        if new.end > OFFSET_BITS >> cluster_bits {
            return Err(full());
        }
        if new.clone().any(|cluster| self.metadata.contains(cluster)) {
            return Err(wrong_counts());
        }
        // The new blocks are neighbours in the file, so their counts follow each other in `counts`.
        let len = |clusters: u64| usize::try_from(clusters << cluster_bits);
        let mut bytes = vec![0; len(blocks + clusters).map_err(io::Error::other)?];
        let (counts, table) = bytes.split_at_mut(len(blocks).map_err(io::Error::other)?);
        for index in 0..new.clone().count() {
            set_count_in(counts, index << count_order, count_order, 1);
        }
        let (old, mut at) = (self.metadata.count_table.clone(), 0);
        let old_at = self.count_table_at();
        for page_at in (old_at..old_at + old_entries * 8)
            .step_by(usize::try_from(self.pages.page_bytes()).map_err(io::Error::other)?)
        {
            at += self.pages.with(page_at, |page| {
                table[at..at + page.len()].copy_from_slice(page);
                page.len()
            })?;
        }
        for (entry, block) in
            table[at..].as_chunks_mut::<8>().0.iter_mut().zip(first..first + blocks)
        {
            *entry = (block << cluster_bits).to_be_bytes();
        }
        // Do everything that can fail before the first change.
        self.pages.with(HEADER_COUNT_TABLE, |_| ())?;
        self.write_new_metadata(first, &bytes)?;
        let mut header = [0; 12];
        let table = first + blocks..new.end;
        header[..8].copy_from_slice(&(table.start << cluster_bits).to_be_bytes());
        let clusters = u32::try_from(clusters).map_err(io::Error::other)?;
        header[8..].copy_from_slice(&clusters.to_be_bytes());
        self.pages.change(HEADER_COUNT_TABLE, &header, CommitStep::CountTable)?;
        self.pages.forget(old.start << cluster_bits..old.end << cluster_bits);
        self.dropped.extend(old);
        table.clone().for_each(|cluster| self.metadata.remove(cluster));
        self.metadata.count_table = table;
        Ok(())
    }
}

fn full() -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, "its table of reference counts cannot grow")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sets counts of every width between two others.
    #[test]
    fn a_count_leaves_its_neighbours_alone() {
        for order in 0..=6 {
            let most = u64::MAX >> (64 - (1u32 << order));
            let mut bytes = [0xff; 64];
            let bit = 3 << order;
            for count in [0, 1, most] {
                set_count_in(&mut bytes, bit, order, count);
                let found: Vec<_> =
                    (2..=4).map(|at| count_in(&bytes, at << order, order)).collect();
                assert_eq!(found, [most, count, most], "{order}");
            }
        }
        // A count of 16 bits is big-endian; a count of 1 bit is taken from the lowest bit of its
        // byte on.
        let mut bytes = [0; 4];
        set_count_in(&mut bytes, 16, 4, 0x102);
        set_count_in(&mut bytes, 1, 0, 1);
        assert_eq!(bytes, [2, 0, 1, 2]);
    }
}
