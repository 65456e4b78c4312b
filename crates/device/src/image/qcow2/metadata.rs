//! The clusters of the file that hold metadata. No write of data may touch them.

use std::collections::HashSet;
use std::io;
use std::ops::Range;

use foldhash::fast::RandomState;

use super::layout::{OFFSET_BITS, Qcow2Geometry};
use crate::BlockDevice;
use crate::fields::{invalid, part};
use crate::image::TABLE_BYTES_MAX;

/// The clusters of metadata, by number.
#[derive(Debug, Default)]
pub(super) struct MetadataClusters {
    /// The header, the L1 table, and the tables of the snapshots, in ascending order.
    fixed: Vec<Range<u64>>,
    pub(super) count_table: Range<u64>,
    /// L2 tables of the disk, and blocks of counts.
    tables: HashSet<u64, RandomState>,
}

impl MetadataClusters {
    /// Collects the metadata of an image that is opened for writing. `snapshots` are the bytes of
    /// the file that the tables of the snapshots take.
    ///
    /// # Errors
    /// Those of the device, and of kind `InvalidData` when two tables have a cluster in common.
    pub(super) fn read(
        device: &dyn BlockDevice,
        layout: &Qcow2Geometry,
        snapshots: Vec<Range<u64>>,
    ) -> io::Result<Self> {
        let table = |at: u64, len: u64| layout.clusters(at..at.saturating_add(len));
        let l1 = table(layout.l1_offset, layout.l1_entries * 8);
        let snapshots = snapshots.into_iter().map(|range| layout.clusters(range));
        let count_table = table(layout.count_table_offset, layout.count_table_bytes);
        let fixed = [0..1, l1].into_iter().chain(snapshots).filter(|one| !one.is_empty());
        let mut fixed: Vec<_> = fixed.collect();
        fixed.sort_by_key(|range| range.start);
        let overlaps = |pair: &[Range<u64>]| pair[0].end > pair[1].start;
        let holds_counts =
            |one: &Range<u64>| one.start < count_table.end && count_table.start < one.end;
        if fixed.windows(2).any(overlaps) || fixed.iter().any(holds_counts) {
            return Err(invalid("two of its tables are in the same place"));
        }
        let mut found = Self { fixed, count_table, tables: HashSet::default() };
        for (at, len) in [
            (layout.l1_offset, layout.l1_entries * 8),
            (layout.count_table_offset, layout.count_table_bytes),
        ] {
            let bytes = part(device, at, len, TABLE_BYTES_MAX)?;
            let bytes = bytes.ok_or_else(|| invalid("one of its tables is not in the file"))?;
            for entry in bytes.as_chunks::<8>().0 {
                let offset = u64::from_be_bytes(*entry) & OFFSET_BITS;
                if offset != 0 {
                    found.add_entry(layout, offset, device.size_bytes())?;
                }
            }
        }
        Ok(found)
    }

    fn add_entry(
        &mut self,
        layout: &Qcow2Geometry,
        offset: u64,
        file_bytes: u64,
    ) -> io::Result<()> {
        if layout.inside(offset) != 0 || offset >= file_bytes {
            return Err(invalid("an entry of its tables is damaged"));
        }
        let cluster = offset >> layout.cluster_bits;
        if self.is_fixed(cluster) || !self.tables.insert(cluster) {
            return Err(invalid(
                "two of its tables are in the same place: qemu-img check -r all FILE may repair it",
            ));
        }
        Ok(())
    }

    /// Whether `cluster` belongs to the header, the L1 table, a table of snapshots or the count
    /// table.
    pub(super) fn is_fixed(&self, cluster: u64) -> bool {
        let behind = self.fixed.partition_point(|range| range.start <= cluster);
        let is_in = |range: &Range<u64>| range.contains(&cluster);
        self.fixed[..behind].last().is_some_and(is_in) || is_in(&self.count_table)
    }

    pub(super) fn contains(&self, cluster: u64) -> bool {
        self.is_fixed(cluster) || self.tables.contains(&cluster)
    }

    pub(super) fn insert(&mut self, cluster: u64) {
        self.tables.insert(cluster);
    }

    pub(super) fn remove(&mut self, cluster: u64) {
        self.tables.remove(&cluster);
    }
}
