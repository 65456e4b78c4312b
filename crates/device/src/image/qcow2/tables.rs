//! The tables that lead from a byte of the disk to one of the file.
//!
//! ```text
//!   L1 table ──> L2 table (a cluster) ──> data (a cluster)
//! ```
//!
//! A table or a cluster that a snapshot shares is counted more than once. It is copied before it
//! is changed, and the reference of the disk to the old one is dropped.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use super::Qcow2Limits;
use super::file::File;
use super::layout::{COPIED, Entry, Layout, OFFSET_BITS};
use super::metadata::Metadata;
use super::pages::{Order, Pages};
use crate::fields::invalid;

/// The tables and the counts of an image.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) file: Arc<File>,
    pub(super) layout: Layout,
    pub(super) pages: Pages,
    pub(super) metadata: Metadata,
    /// Clusters to which an entry led. They are counted until the medium has the entry no more.
    pub(super) dropped: Vec<u64>,
    /// Clusters that became free.
    pub(super) freed: BTreeSet<u64>,
    /// No cluster before this one is free but for those that became free.
    pub(super) next: u64,
    pub(super) limits: Qcow2Limits,
}

/// The error for counts that do not fit the tables.
pub(super) fn wrong_counts() -> io::Error {
    invalid("its reference counts are wrong: qemu-img check -r all FILE may repair it")
}

/// The error for a cluster of the disk that the file lost when its end was cut off.
pub(super) fn behind_the_end() -> io::Error {
    invalid("a part of the disk is behind the end of the file")
}

impl Tables {
    pub(super) fn new(
        file: Arc<File>,
        layout: Layout,
        metadata: Metadata,
        limits: Qcow2Limits,
    ) -> Self {
        Self {
            pages: Pages::new(file.clone(), layout.cluster_bytes(), limits),
            file,
            layout,
            metadata,
            dropped: Vec::new(),
            freed: BTreeSet::new(),
            next: 0,
            limits,
        }
    }

    pub(super) fn cluster_len(&self) -> usize {
        usize::try_from(self.layout.cluster_bytes()).expect("at most 2 MiB")
    }

    /// Whether so much waits for a commit that the next change should, too.
    pub(super) fn need_commit(&self) -> bool {
        self.pages.are_many_changed() || self.dropped.len() > self.limits.dropped
    }

    /// Where the L2 table for byte `at` of the disk is, 0 when there is none, and whether it may be
    /// counted once.
    fn table(&self, at: u64) -> io::Result<(u64, bool)> {
        let word = self.pages.number(self.layout.l1_entry_at(at))?;
        let table = word & OFFSET_BITS;
        if self.layout.inside(table) != 0 || table >= self.file.size_bytes() {
            return Err(invalid("an entry of its tables is damaged"));
        }
        Ok((table, word & COPIED != 0))
    }

    /// Whether there is an L2 table for byte `at` of the disk.
    pub(super) fn has_table(&self, at: u64) -> io::Result<bool> {
        Ok(self.table(at)?.0 != 0)
    }

    /// The entry for byte `at` of the disk.
    pub(super) fn entry(&self, at: u64) -> io::Result<Entry> {
        match self.table(at)? {
            (0, _) => Ok(Entry::default()),
            (table, _) => self.entry_in(table + self.layout.entry_in_table(at)),
        }
    }

    fn entry_in(&self, entry_at: u64) -> io::Result<Entry> {
        self.pages.with(entry_at, |bytes| self.layout.decode(bytes))?
    }

    /// The entry for byte `at` of the disk, and where it is: in a table that may be changed.
    pub(super) fn entry_to_change(&mut self, at: u64) -> io::Result<(u64, Entry)> {
        let (mut table, is_copied) = self.table(at)?;
        let cluster_bits = self.layout.cluster_bits;
        if table == 0 || !self.is_ours(table, is_copied)? {
            let mut bytes = vec![0; self.cluster_len()];
            if table != 0 {
                // No writer changes a table that is shared, so the file has it as it is.
                self.file.read(table, &mut bytes)?;
            }
            let cluster = self.allocate()?;
            let word = (cluster << cluster_bits | COPIED).to_be_bytes();
            let written = self.write_new_metadata(cluster, &bytes).and_then(|()| {
                self.pages.change(self.layout.l1_entry_at(at), &word, Order::Tables)
            });
            if let Err(error) = written {
                self.metadata.remove(cluster);
                return self.free(cluster).and(Err(error));
            }
            if table != 0 {
                self.dropped.push(table >> cluster_bits);
                self.metadata.remove(table >> cluster_bits);
            }
            table = cluster << cluster_bits;
        }
        let entry_at = table + self.layout.entry_in_table(at);
        Ok((entry_at, self.entry_in(entry_at)?))
    }

    /// Whether what is at `place` of the file may be changed there: nothing else leads to it.
    fn is_ours(&self, place: u64, is_copied: bool) -> io::Result<bool> {
        match self.count(place >> self.layout.cluster_bits)? {
            0 => Err(wrong_counts()),
            1 => Ok(is_copied),
            _ => Ok(false),
        }
    }

    /// Whether data may be written to where `entry` has its cluster.
    pub(super) fn is_written_in_place(&self, entry: &Entry) -> io::Result<bool> {
        if entry.host == 0 {
            return Ok(false);
        }
        self.check_no_metadata(entry)?;
        let is_ours = self.is_ours(entry.host, entry.is_copied)?;
        if entry.host >= self.file.size_bytes() {
            return Err(behind_the_end());
        }
        Ok(is_ours)
    }

    /// Refuses an entry that leads to metadata.
    fn check_no_metadata(&self, entry: &Entry) -> io::Result<()> {
        let mut clusters = self.layout.clusters_of(entry);
        if clusters.any(|cluster| self.metadata.contains(cluster)) {
            return Err(invalid(
                "an entry of its tables leads to its metadata: qemu-img check -r all FILE may \
                 repair it",
            ));
        }
        Ok(())
    }

    /// Refuses to drop the references of an entry that has none to drop.
    pub(super) fn check_drop(&self, entry: &Entry) -> io::Result<()> {
        self.check_no_metadata(entry)?;
        for cluster in self.layout.clusters_of(entry) {
            if self.count(cluster)? == 0 {
                return Err(wrong_counts());
            }
        }
        Ok(())
    }

    /// Puts `entry` to `entry_at`, which [`Self::entry_to_change`] gave.
    pub(super) fn set_entry(&mut self, entry_at: u64, entry: &Entry) -> io::Result<()> {
        let bytes = self.layout.encode(entry);
        self.pages.change(entry_at, &bytes[..self.layout.entry_bytes()], Order::Tables)
    }

    /// Drops the references of an entry that was replaced.
    pub(super) fn drop_references(&mut self, entry: &Entry) {
        self.dropped.extend(self.layout.clusters_of(entry));
    }

    /// Writes metadata to clusters that are free, beginning with `cluster`. It is there before any
    /// entry that leads to it, and whole without the changes that wait in memory.
    pub(super) fn write_new_metadata(&mut self, cluster: u64, bytes: &[u8]) -> io::Result<()> {
        let at = cluster << self.layout.cluster_bits;
        self.file.write(at, bytes)?;
        // Pages of what was there before.
        self.pages.forget(at..at + bytes.len() as u64);
        for cluster in self.layout.clusters(at..at + bytes.len() as u64) {
            self.metadata.insert(cluster);
        }
        Ok(())
    }
}
