//! The cache of tables and reference counts.
//!
//! A page is a part of a cluster of metadata. A changed page stays in memory until the
//! [committer](super::commit) wrote it. Unchanged pages are evicted when others need the room.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use foldhash::fast::RandomState;
use parking_lot::Mutex;

use super::Qcow2Limits;
use super::file::ImageFile;

/// The size of a page in bytes; smaller clusters have one page of their own size.
const PAGE_BYTES_MAX: u64 = 4096;

/// The step of a commit that writes a page. The committer makes a barrier between two steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum CommitStep {
    /// First: reference counts.
    Counts,
    /// Second: the count table and the header, which lead to blocks of counts.
    CountTable,
    /// Last: L1 and L2 entries, which lead to tables and data.
    Tables,
}

/// A copy of a changed page, made when the committer took it.
#[derive(Debug)]
pub(super) struct ChangedPage {
    pub(super) order: CommitStep,
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
}

#[derive(Debug)]
struct TablePage {
    bytes: Vec<u8>,
    /// The step that writes its changes; `None` for an unchanged page.
    changed: Option<CommitStep>,
    /// The committer is writing it.
    is_being_written: bool,
    was_used: bool,
}

/// The pages in memory. Several readers may fill the cache at the same time. A thread that changes
/// a page holds the image exclusively.
#[derive(Debug)]
pub(super) struct PageCache {
    file: Arc<ImageFile>,
    page_bytes: u64,
    limits: Qcow2Limits,
    map: Mutex<PageMap>,
}

#[derive(Debug, Default)]
struct PageMap {
    pages: HashMap<u64, TablePage, RandomState>,
    changed: u64,
}

impl PageCache {
    pub(super) fn new(file: Arc<ImageFile>, cluster_bytes: u64, limits: Qcow2Limits) -> Self {
        let page_bytes = cluster_bytes.min(PAGE_BYTES_MAX);
        Self { file, page_bytes, limits, map: Mutex::default() }
    }

    pub(super) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Calls `read` with the bytes from `at` to the end of the page, and returns its result. Past
    /// the end of the file the bytes are zeros.
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
        // Another reader may have inserted it meanwhile, with the same bytes.
        let page = map.pages.entry(page_at).or_insert(TablePage {
            bytes,
            changed: None,
            is_being_written: false,
            was_used: true,
        });
        Ok(read(&page.bytes[inside..]))
    }

    /// The big-endian number at `at`.
    pub(super) fn number(&self, at: u64) -> io::Result<u64> {
        self.with(at, |bytes| crate::fields::u64_be(bytes, 0))
    }

    /// Changes the page in memory: `bytes` at `at`, all in one page.
    pub(super) fn change(&mut self, at: u64, bytes: &[u8], order: CommitStep) -> io::Result<()> {
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

    /// Drops the pages of `range` with their changes, because its clusters have a new use.
    pub(super) fn forget(&mut self, range: Range<u64>) {
        let map = self.map.get_mut();
        for at in range.step_by(usize::try_from(self.page_bytes).expect("a page is small")) {
            if map.pages.remove(&at).is_some_and(|page| page.changed.is_some()) {
                map.changed -= 1;
            }
        }
    }

    /// Whether the changed pages exceed the limit.
    pub(super) fn are_many_changed(&self) -> bool {
        self.map.lock().changed * self.page_bytes > self.limits.changed_bytes
    }

    /// Copies of the changed pages, in the order in which the committer writes them.
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

    /// Notes that the committer has written the pages that it [took](Self::take_changed).
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

impl PageMap {
    /// When there are more than `most` pages, evicts the unchanged pages that no thread used since
    /// the last eviction. If more than half of `most` are left, it evicts all unchanged pages.
    fn make_room(&mut self, most: u64) {
        if self.pages.len() as u64 <= most {
            return;
        }
        let is_kept = |page: &TablePage| page.changed.is_some() || page.is_being_written;
        self.pages.retain(|_, page| is_kept(page) || std::mem::take(&mut page.was_used));
        if self.pages.len() as u64 > most / 2 {
            self.pages.retain(|_, page| is_kept(page));
        }
    }
}
