//! The pages of tables and reference counts that are in memory.
//!
//! A page is a part of a cluster of metadata. One that was changed stays until the
//! [committer](super::commit) wrote it; others make room for those that are needed.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::RandomState;
use parking_lot::Mutex;

use super::Qcow2Limits;
use super::file::File;

/// A page has so many bytes, or as many as a cluster if that is smaller.
const PAGE_BYTES_MAX: u64 = 4096;

/// When a page may be written. A barrier is between each two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    /// First: counts.
    Counts,
    /// After them: what leads to blocks of counts.
    CountTable,
    /// Last: what leads to data and to tables.
    Tables,
}

/// A page that was changed, as it was when the committer took it.
#[derive(Debug)]
pub(super) struct ChangedPage {
    pub(super) order: Order,
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
}

#[derive(Debug)]
struct Page {
    bytes: Vec<u8>,
    /// It was changed, and when it may be written.
    changed: Option<Order>,
    /// The committer writes it.
    is_being_written: bool,
    was_used: bool,
}

/// The pages in memory. Threads that only read fill it side by side; one that changes a page has
/// the image alone.
#[derive(Debug)]
pub(super) struct Pages {
    file: Arc<File>,
    page_bytes: u64,
    limits: Qcow2Limits,
    map: Mutex<Map>,
}

#[derive(Debug, Default)]
struct Map {
    pages: HashMap<u64, Page, RandomState>,
    changed: u64,
}

impl Pages {
    pub(super) fn new(file: Arc<File>, cluster_bytes: u64, limits: Qcow2Limits) -> Self {
        let page_bytes = cluster_bytes.min(PAGE_BYTES_MAX);
        Self { file, page_bytes, limits, map: Mutex::default() }
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// What `read` makes of the bytes from `at` to the end of the page. Behind the end of the file
    /// there are zeros.
    pub(super) fn with<T>(&self, at: u64, read: impl FnOnce(&[u8]) -> T) -> io::Result<T> {
        let (page_at, inside) = self.split(at);
        if let Some(page) = self.map.lock().pages.get_mut(&page_at) {
            page.was_used = true;
            return Ok(read(&page.bytes[inside..]));
        }
        let mut bytes = vec![0; usize::try_from(self.page_bytes).map_err(io::Error::other)?];
        self.file.read(page_at, &mut bytes)?;
        let mut map = self.map.lock();
        map.make_room(self.limits.kept_bytes / self.page_bytes);
        // Another reader may have put it there meanwhile, with the same bytes.
        let page = map.pages.entry(page_at).or_insert(Page {
            bytes,
            changed: None,
            is_being_written: false,
            was_used: true,
        });
        Ok(read(&page.bytes[inside..]))
    }

    /// The number at `at`.
    pub(super) fn number(&self, at: u64) -> io::Result<u64> {
        self.with(at, |bytes| crate::fields::u64_be(bytes, 0))
    }

    /// Writes `bytes` at `at`, all in one page.
    pub(super) fn change(&mut self, at: u64, bytes: &[u8], order: Order) -> io::Result<()> {
        self.with(at, |_| ())?;
        let (page_at, inside) = self.split(at);
        let map = self.map.get_mut();
        let page = map.pages.get_mut(&page_at).expect("it was just read");
        page.bytes[inside..inside + bytes.len()].copy_from_slice(bytes);
        if page.changed.replace(order).is_none() {
            map.changed += 1;
        }
        Ok(())
    }

    /// Forgets the pages of `range`, which holds something else from now on.
    pub(super) fn forget(&mut self, range: Range<u64>) {
        let map = self.map.get_mut();
        for at in range.step_by(usize::try_from(self.page_bytes).expect("a page is small")) {
            if map.pages.remove(&at).is_some_and(|page| page.changed.is_some()) {
                map.changed -= 1;
            }
        }
    }

    /// Whether more was changed than should wait in memory.
    pub(super) fn are_many_changed(&self) -> bool {
        self.map.lock().changed * self.page_bytes > self.limits.changed_bytes
    }

    /// The pages that were changed, in the order in which they are to be written.
    pub(super) fn take_changed(&mut self) -> Vec<ChangedPage> {
        let map = self.map.get_mut();
        map.changed = 0;
        let mut changed = Vec::new();
        for (&at, page) in &mut map.pages {
            if let Some(order) = page.changed.take() {
                page.is_being_written = true;
                changed.push(ChangedPage { order, at, bytes: page.bytes.clone() });
            }
        }
        changed.sort_by_key(|page| (page.order, page.at));
        changed
    }

    /// The committer has written what it [took](Self::take_changed).
    pub(super) fn were_written(&self, changed: &[ChangedPage]) {
        let mut map = self.map.lock();
        for ChangedPage { at, .. } in changed {
            if let Some(page) = map.pages.get_mut(at) {
                page.is_being_written = false;
            }
        }
    }

    fn split(&self, at: u64) -> (u64, usize) {
        let inside = at % self.page_bytes;
        (at - inside, usize::try_from(inside).expect("a page is small"))
    }
}

impl Map {
    /// Where there are more than `most` pages, drops those that were not used since the last time.
    fn make_room(&mut self, most: u64) {
        if self.pages.len() as u64 <= most {
            return;
        }
        let is_kept = |page: &Page| page.changed.is_some() || page.is_being_written;
        self.pages.retain(|_, page| is_kept(page) || std::mem::take(&mut page.was_used));
        if self.pages.len() as u64 > most / 2 {
            self.pages.retain(|_, page| is_kept(page));
        }
    }
}
