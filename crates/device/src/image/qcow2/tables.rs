//! The tables that map a byte of the disk to a byte of the file.
//!
//! ```text
//!   L1 table ──> L2 table (a cluster) ──> data (a cluster)
//! ```
//!
//! A table or cluster that a snapshot shares has a count above 1. It is copied on the first write
//! (copy on write), and the disk drops its reference to the old one.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use super::Qcow2Limits;
use super::file::ImageFile;
use super::layout::{COPIED, L2Entry, OFFSET_BITS, Qcow2Geometry};
use super::metadata::MetadataClusters;
use super::pages::{CommitStep, PageCache};
use crate::fields::invalid;

/// The tables and the counts of an image.
#[derive(Debug)]
pub(super) struct Qcow2Tables {
    pub(super) file: Arc<ImageFile>,
    pub(super) layout: Qcow2Geometry,
    pub(super) pages: PageCache,
    pub(super) metadata: MetadataClusters,
    /// Clusters whose reference was dropped. Their counts stay until no entry on the medium leads
    /// to them.
    pub(super) dropped: Vec<u64>,
    /// Clusters that became free.
    pub(super) freed: BTreeSet<u64>,
    /// All free clusters before this one are in `freed`.
    pub(super) next: u64,
    pub(super) limits: Qcow2Limits,
}

/// The error for counts that contradict the tables.
pub(super) fn wrong_counts() -> io::Error {
    invalid("its reference counts are wrong: qemu-img check -r all FILE may repair it")
}

/// The error for a cluster of the disk that the file lost when its end was cut off.
pub(super) fn behind_the_end() -> io::Error {
    invalid("a part of the disk is behind the end of the file")
}

impl Qcow2Tables {
    pub(super) fn new(
        file: Arc<ImageFile>,
        layout: Qcow2Geometry,
        metadata: MetadataClusters,
        limits: Qcow2Limits,
    ) -> Self {
        Self {
            pages: PageCache::new(file.clone(), layout.cluster_bytes(), limits),
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

    /// Whether the changes in memory exceed a limit, so that the next write must commit first.
    pub(super) fn needs_commit(&self) -> bool {
        self.pages.are_many_changed() || self.dropped.len() > self.limits.dropped
    }

    /// The byte of the file at which the L2 table for byte `at` of the disk begins, and whether the
    /// L1 entry says that its count is 1. The first is 0 when there is no table.
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

    /// The L2 entry for byte `at` of the disk.
    pub(super) fn entry(&self, at: u64) -> io::Result<L2Entry> {
        match self.table(at)? {
            (0, _) => Ok(L2Entry::default()),
            (table, _) => self.entry_in(table + self.layout.entry_in_table(at)),
        }
    }

    fn entry_in(&self, entry_at: u64) -> io::Result<L2Entry> {
        self.pages.with(entry_at, |bytes| self.layout.decode(bytes))?
    }

    /// The L2 entry for byte `at` of the disk, to be changed, and its byte of the file. A missing
    /// table is made and a shared one copied first.
    pub(super) fn entry_to_change(&mut self, at: u64) -> io::Result<(u64, L2Entry)> {
        let (mut table, is_copied) = self.table(at)?;
        let cluster_bits = self.layout.cluster_bits;
        if table == 0 || !self.is_ours(table, is_copied)? {
            let mut bytes = vec![0; self.cluster_len()];
            if table != 0 {
                // No writer changes a shared table in place, so the file has its current contents.
                self.file.read(table, &mut bytes)?;
            }
            let cluster = self.allocate()?;
            let word = (cluster << cluster_bits | COPIED).to_be_bytes();
            let written = self.write_new_metadata(cluster, &bytes).and_then(|()| {
                self.pages.change(self.layout.l1_entry_at(at), &word, CommitStep::Tables)
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

    /// Whether the cluster at byte `place` of the file may be written in place: its count is 1, and
    /// the entry that leads to it says so.
    fn is_ours(&self, place: u64, is_copied: bool) -> io::Result<bool> {
        match self.count(place >> self.layout.cluster_bits)? {
            0 => Err(wrong_counts()),
            1 => Ok(is_copied),
            _ => Ok(false),
        }
    }

    /// Whether data may be written in place, to the cluster of `entry`.
    pub(super) fn is_written_in_place(&self, entry: &L2Entry) -> io::Result<bool> {
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
    fn check_no_metadata(&self, entry: &L2Entry) -> io::Result<()> {
        let mut clusters = self.layout.clusters_of(entry);
        if clusters.any(|cluster| self.metadata.contains(cluster)) {
            return Err(invalid(
                "an entry of its tables leads to its metadata: qemu-img check -r all FILE may \
                 repair it",
            ));
        }
        Ok(())
    }

    /// Refuses an entry that leads to a cluster with a count of 0: its reference cannot be dropped.
    pub(super) fn check_drop(&self, entry: &L2Entry) -> io::Result<()> {
        self.check_no_metadata(entry)?;
        for cluster in self.layout.clusters_of(entry) {
            if self.count(cluster)? == 0 {
                return Err(wrong_counts());
            }
        }
        Ok(())
    }

    /// Stores `entry` at `entry_at`, which [`Self::entry_to_change`] returned.
    pub(super) fn set_entry(&mut self, entry_at: u64, entry: &L2Entry) -> io::Result<()> {
        let bytes = self.layout.encode(entry);
        self.pages.change(entry_at, &bytes[..self.layout.entry_bytes()], CommitStep::Tables)
    }

    /// Drops the references of an entry that was replaced.
    pub(super) fn drop_references(&mut self, entry: &L2Entry) {
        self.dropped.extend(self.layout.clusters_of(entry));
    }

    /// Writes metadata to free clusters, beginning with `cluster`. The file has it before any entry
    /// leads to it, and it is complete without the changes that wait in memory.
    pub(super) fn write_new_metadata(&mut self, cluster: u64, bytes: &[u8]) -> io::Result<()> {
        let at = cluster << self.layout.cluster_bits;
        self.file.write(at, bytes)?;
        // The cache may have pages of the earlier use of these clusters.
        self.pages.forget(at..at + bytes.len() as u64);
        for cluster in self.layout.clusters(at..at + bytes.len() as u64) {
            self.metadata.insert(cluster);
        }
        Ok(())
    }
}
