//! Writes the changes that are in memory in an order that survives a power cut at any point.
//!
//! ```text
//!            data (written at once), counts of new clusters, new tables
//!   barrier ─────────────────────────────────────────────────────────────
//!            entries of the count table     (only with new blocks of counts)
//!   barrier ─────────────────────────────────────────────────────────────
//!            L2 and L1 entries: the disk has the new data
//!   barrier ─────────────────────────────────────────────────────────────
//!            counts of what no entry leads to any more, in the next commit
//! ```
//!
//! So whatever an entry on the medium leads to is counted and whole. A cut leaves at most clusters
//! that are counted and not used. `qemu-img check` calls them leaks and repairs them.
//!
//! The committer takes all changed pages while it holds the tables exclusively. At that moment the
//! file has everything that an entry in these pages leads to, and the pages count it. Other
//! requests continue while the committer writes.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::Qcow2Disk;
use super::pages::{ChangedPage, CommitStep};
use super::tables::wrong_counts;

/// Neighbouring pages are written together, up to this many bytes in one request.
const WRITE_BYTES_MAX: usize = 1 << 20;

impl Qcow2Disk {
    /// Makes every write durable that returned before the call.
    pub(super) fn commit(&self) -> io::Result<()> {
        let _one = self.committing.lock();
        self.check_not_failed()?;
        let (changed, dropped) = {
            let mut tables = self.tables.write();
            (tables.pages.take_changed(), std::mem::take(&mut tables.dropped))
        };
        let written = self.write_in_order(&changed);
        if written.is_err() {
            // The state of the medium is unknown now, so no later entry may lead to it.
            self.has_failed.store(true, Release);
            return written;
        }
        self.tables.read().pages.were_written(&changed);
        self.count_down(dropped)
    }

    /// Commits when the changes in memory exceed the limits.
    pub(super) fn commit_if_needed(&self) -> io::Result<()> {
        if self.tables.read().needs_commit() { self.commit() } else { Ok(()) }
    }

    fn write_in_order(&self, changed: &[ChangedPage]) -> io::Result<()> {
        for pages in changed.chunk_by(|one, next| one.order == next.order) {
            if pages[0].order != CommitStep::Counts {
                self.file.barrier()?;
            }
            let mut rest = pages;
            while let Some(first) = rest.first() {
                let mut bytes = Vec::new();
                let is_next = |page: &&ChangedPage, len: usize| {
                    page.at == first.at + len as u64 && len < WRITE_BYTES_MAX
                };
                while let Some(page) = rest.first().filter(|page| is_next(page, bytes.len())) {
                    bytes.extend_from_slice(&page.bytes);
                    rest = &rest[1..];
                }
                self.file.write(first.at, &bytes)?;
            }
        }
        self.file.barrier()
    }

    /// Lowers the count of each cluster by the references to it that were dropped. A cluster whose
    /// count becomes 0 is free.
    fn count_down(&self, mut dropped: Vec<u64>) -> io::Result<()> {
        dropped.sort_unstable();
        let mut counts = Vec::new();
        {
            let tables = self.tables.read();
            for group in dropped.chunk_by(|one, next| one == next) {
                let Some(left) = tables.count(group[0])?.checked_sub(group.len() as u64) else {
                    // The count is lower than the number of entries, so freeing the cluster would
                    // damage data.
                    self.has_failed.store(true, Release);
                    return Err(wrong_counts());
                };
                counts.push((group[0], left));
            }
        }
        // Make the holes while these clusters are still counted, so that no writer allocates them.
        let unused: Vec<_> = counts.iter().filter(|count| count.1 == 0).map(|one| one.0).collect();
        for clusters in unused.chunk_by(|one, next| one + 1 == *next) {
            let start = clusters[0] << self.layout.cluster_bits;
            let len = (clusters.len() as u64) << self.layout.cluster_bits;
            self.file.discard(start, start + len);
        }
        let mut tables = self.tables.write();
        for (cluster, left) in counts {
            match left {
                0 => tables.free(cluster)?,
                left => tables.set_count(cluster, left)?,
            }
        }
        Ok(())
    }

    pub(super) fn check_not_failed(&self) -> io::Result<()> {
        if self.has_failed.load(Acquire) {
            return Err(io::Error::other("an earlier flush failed, and what it lost stays lost"));
        }
        Ok(())
    }
}
