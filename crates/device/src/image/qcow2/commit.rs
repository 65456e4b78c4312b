//! Writing what waits in memory in an order that survives a cut at any point.
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
//! So whatever the medium leads to is counted and whole. A cut leaves at most clusters that are
//! counted and not used, which `qemu-img check` calls leaks and repairs.
//!
//! The committer takes all pages at one moment, while no request changes one: everything that an
//! entry in them leads to is in the file, and counted in them. Then requests go on while it writes.

use std::io;
use std::sync::atomic::Ordering::{Acquire, Release};

use super::Disk;
use super::pages::{Changed, Order};

/// How many bytes of pages beside each other are written at once.
const WRITE_BYTES_MAX: usize = 1 << 20;

impl Disk {
    /// Makes everything durable that was written before.
    pub(super) fn commit(&self) -> io::Result<()> {
        let _one = self.committing.lock();
        self.check_not_failed()?;
        let (changed, dropped) = {
            let mut tables = self.tables.write();
            (tables.pages.take_changed(), std::mem::take(&mut tables.dropped))
        };
        let written = self.write_in_order(&changed);
        if written.is_err() {
            // What the medium has now is not known, and must not be led to.
            self.has_failed.store(true, Release);
            return written;
        }
        self.tables.read().pages.were_written(&changed);
        self.count_down(dropped)
    }

    /// Commits when much waits for it.
    pub(super) fn commit_if_needed(&self) -> io::Result<()> {
        if self.tables.read().need_commit() { self.commit() } else { Ok(()) }
    }

    fn write_in_order(&self, changed: &[Changed]) -> io::Result<()> {
        for pages in changed.chunk_by(|one, next| one.order == next.order) {
            if pages[0].order != Order::Counts {
                self.file.barrier()?;
            }
            let mut rest = pages;
            while let Some(first) = rest.first() {
                let mut bytes = Vec::new();
                let is_next = |page: &&Changed, len: usize| {
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

    /// Counts clusters down, once for each time that they were dropped. What nothing leads to any
    /// more is free.
    fn count_down(&self, mut dropped: Vec<u64>) -> io::Result<()> {
        dropped.sort_unstable();
        let groups = || dropped.chunk_by(|one, next| one == next);
        let mut unused = Vec::new();
        {
            let tables = self.tables.read();
            for group in groups() {
                if tables.count(group[0])? <= group.len() as u64 {
                    unused.push(group[0]);
                }
            }
        }
        // As long as they are counted, nobody writes to them.
        let result = unused.chunk_by(|one, next| one + 1 == *next).try_for_each(|clusters| {
            let start = clusters[0] << self.layout.cluster_bits;
            let len = (clusters.len() as u64) << self.layout.cluster_bits;
            self.file.discard(start, start + len)
        });
        let mut tables = self.tables.write();
        for group in groups() {
            let left = tables.count(group[0])?.saturating_sub(group.len() as u64);
            match left {
                0 => tables.free(group[0])?,
                left => tables.set_count(group[0], left)?,
            }
        }
        result
    }

    pub(super) fn check_not_failed(&self) -> io::Result<()> {
        if self.has_failed.load(Acquire) {
            return Err(io::Error::other("an earlier flush failed, and what it lost stays lost"));
        }
        Ok(())
    }
}
