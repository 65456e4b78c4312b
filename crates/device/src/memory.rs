//! A device in memory.
//!
//! ```text
//!   bytes of the device   | extent 0, 1 MiB      | extent 1             | ...
//!   shards                | shard 0              | shard 1              | ... | shard 0 again
//!     each a map of pages   page 0  page 1  ...    -       page 65
//!                             |                            |
//!   base                    zeros, bytes or a device: what no page covers
//! ```
//!
//! Only written pages take memory. The first write to a page of [`PAGE_BYTES`] makes it, with the
//! bytes that the base has there. The base is never written. A discarded page takes no memory: it
//! is only noted as zeros, or as undefined bytes.
//!
//! Locks: there is one for each of [`SHARDS`] shards. A request locks the shards that it touches
//! one after the other, and never two at once. So threads on different extents copy at the same
//! time, and threads that read never wait for each other. Only [`MemoryDevice::snapshot`] holds all
//! locks, and takes them in the order of their numbers.
//!
//! A snapshot shares everything with its origin. The first write to a shard after it copies the map
//! of that shard, and the first write to a page copies that page.
//!
//! Devices may share a [`MemoryBudget`]: a write that would make more pages than it allows fails.
//! The budget does not count pages that are copied because a snapshot shares them.

use std::collections::{HashMap, hash_map};
use std::hash::{DefaultHasher, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use parking_lot::RwLock;

use crate::{BlockDevice, request_range};

/// The unit that is allocated, and copied after a snapshot.
const PAGE_BYTES: u64 = 16 << 10;
const PAGE_LEN: usize = 16 << 10;

/// How many contiguous bytes of the device one lock covers.
const EXTENT_BYTES: u64 = 1 << 20;

const SHARDS: u64 = 64;

/// A device whose bytes are in memory, for the images of tests and fuzz targets.
pub struct MemoryDevice {
    size_bytes: u64,
    base: BaseBytes,
    shards: Vec<RwLock<Arc<ShardPages>>>,
    budget: Option<Arc<MemoryBudget>>,
}

/// The memory that the pages of several devices may take together.
#[derive(Debug)]
pub struct MemoryBudget {
    most_bytes: u64,
    left_bytes: AtomicU64,
}

impl MemoryBudget {
    /// A budget of `most_bytes`.
    #[must_use]
    pub fn new(most_bytes: u64) -> Arc<Self> {
        Arc::new(Self { most_bytes, left_bytes: AtomicU64::new(most_bytes) })
    }

    fn take_page(&self) -> io::Result<()> {
        let less = |left: u64| left.checked_sub(PAGE_BYTES);
        let taken = self.left_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        taken.map(drop).map_err(|_| {
            io::Error::other(format!("more than {} bytes to keep in memory", self.most_bytes))
        })
    }

    fn give_page_back(&self) {
        self.left_bytes.fetch_add(PAGE_BYTES, Ordering::Relaxed);
    }
}

/// The pages of one shard by number.
#[derive(Clone, Debug, Default)]
struct ShardPages {
    slots: HashMap<u64, PageSlot>,
    /// The hash of the pages, once it is computed, until one changes. Snapshots share it.
    hash: OnceLock<u64>,
}

impl ShardPages {
    /// The pages, to be changed.
    fn slots_mut(&mut self) -> &mut HashMap<u64, PageSlot> {
        self.hash = OnceLock::new();
        &mut self.slots
    }

    fn hash(&self) -> u64 {
        *self.hash.get_or_init(|| {
            let mut hasher = DefaultHasher::new();
            let mut numbers: Vec<_> = self.slots.keys().copied().collect();
            numbers.sort_unstable();
            for number in numbers {
                hasher.write_u64(number);
                match &self.slots[&number] {
                    PageSlot::Zeros => hasher.write_u8(0),
                    PageSlot::Undefined => hasher.write_u8(1),
                    PageSlot::Written(page) => hasher.write(&page[..]),
                }
            }
            hasher.finish()
        })
    }
}

type PageBytes = [u8; PAGE_LEN];

/// A page that hides the page of the base.
#[derive(Clone, Debug)]
enum PageSlot {
    /// Zeros.
    Zeros,
    /// Bytes that no caller wrote: [`undefined`].
    Undefined,
    /// A page that a caller wrote.
    Written(Arc<PageBytes>),
}

impl PageSlot {
    fn is_written(&self) -> bool {
        matches!(self, Self::Written(_))
    }

    /// Fills `buf` with what the page has from byte `offset` of the device on.
    fn read(&self, offset: u64, buf: &mut [u8]) {
        match self {
            Self::Zeros => buf.fill(0),
            Self::Undefined => undefined(offset, buf),
            Self::Written(page) => {
                let from = small(offset % PAGE_BYTES);
                buf.copy_from_slice(&page[from..from + buf.len()]);
            }
        }
    }
}

/// Fills `buf` with bytes that no caller wrote. They depend only on their `offset` on the device.
fn undefined(offset: u64, buf: &mut [u8]) {
    for (at, byte) in (offset..).zip(buf) {
        // The high bits of the product depend on all bits of `at`.
        *byte = (at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    }
}

/// The bytes of the device where no page is.
#[derive(Clone)]
enum BaseBytes {
    Zeros,
    Bytes(Arc<Vec<u8>>),
    Device(Arc<dyn BlockDevice>),
}

impl MemoryDevice {
    /// A device that holds `bytes`.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self::with(bytes.len() as u64, BaseBytes::Bytes(Arc::new(bytes)))
    }

    /// A device of zeros, which takes no memory until it is written.
    #[must_use]
    pub fn sparse(size_bytes: u64) -> Self {
        Self::with(size_bytes, BaseBytes::Zeros)
    }

    /// A device that shows `below`, and keeps the writes to it in memory.
    #[must_use]
    pub fn over(below: Arc<dyn BlockDevice>) -> Self {
        Self::with(below.size_bytes(), BaseBytes::Device(below))
    }

    /// As [`over`](Self::over), with the memory for written pages taken from `budget`.
    #[must_use]
    pub fn over_within(below: Arc<dyn BlockDevice>, budget: &Arc<MemoryBudget>) -> Self {
        Self { budget: Some(budget.clone()), ..Self::over(below) }
    }

    fn with(size_bytes: u64, base: BaseBytes) -> Self {
        let shards = (0..SHARDS).map(|_| RwLock::default()).collect();
        Self { size_bytes, base, shards, budget: None }
    }

    /// A copy of the device as it is now. Both share the pages that neither of them writes, and the
    /// cost does not depend on how much the device holds. Of a write that runs at the same time,
    /// the copy may have a part.
    #[must_use]
    pub fn snapshot(&self) -> Self {
        let shards: Vec<_> = self.shards.iter().map(RwLock::read).collect();
        Self {
            size_bytes: self.size_bytes,
            base: self.base.clone(),
            shards: shards.iter().map(|pages| RwLock::new((*pages).clone())).collect(),
            budget: self.budget.clone(),
        }
    }

    /// Feeds `hasher` with the changed pages: devices over the same base with the same hash hold
    /// the same bytes. The cost is proportional to the pages of the shards that changed since they
    /// were last hashed, here or in the device of which this is a snapshot.
    pub fn hash_changes(&self, hasher: &mut impl Hasher) {
        for shard in &self.shards {
            let pages = shard.read().clone();
            hasher.write_u64(pages.hash());
        }
    }

    /// Calls `visit` with the offset and the bytes of every page that was written or discarded, in
    /// no particular order. The cost is proportional to these pages.
    ///
    /// # Errors
    /// The first error of `visit`, which stops the calls.
    pub fn visit_changes(
        &self,
        visit: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut bytes = [0; PAGE_LEN];
        for shard in &self.shards {
            let pages = shard.read().clone();
            for (number, slot) in &pages.slots {
                let start = number * PAGE_BYTES;
                let inside = small(PAGE_BYTES.min(self.size_bytes - start));
                slot.read(start, &mut bytes[..inside]);
                visit(start, &bytes[..inside])?;
            }
        }
        Ok(())
    }

    fn shard(&self, offset: u64) -> &RwLock<Arc<ShardPages>> {
        &self.shards[small(offset / EXTENT_BYTES % SHARDS)]
    }

    fn take_page(&self) -> io::Result<()> {
        self.budget.as_ref().map_or(Ok(()), |budget| budget.take_page())
    }

    /// The page with the bytes at `offset`, to be changed.
    fn page_mut<'a>(
        &self,
        pages: &'a mut Arc<ShardPages>,
        offset: u64,
    ) -> io::Result<&'a mut PageBytes> {
        let number = offset / PAGE_BYTES;
        let slot = match Arc::make_mut(pages).slots_mut().entry(number) {
            hash_map::Entry::Occupied(slot) => slot.into_mut(),
            hash_map::Entry::Vacant(slot) => {
                self.take_page()?;
                let start = number * PAGE_BYTES;
                let mut page = [0; PAGE_LEN];
                let inside = small(PAGE_BYTES.min(self.size_bytes - start));
                self.base.read(start, &mut page[..inside])?;
                slot.insert(PageSlot::Written(Arc::new(page)))
            }
        };
        if !slot.is_written() {
            self.take_page()?;
            let mut page = [0; PAGE_LEN];
            slot.read(number * PAGE_BYTES, &mut page);
            *slot = PageSlot::Written(Arc::new(page));
        }
        let PageSlot::Written(page) = slot else { unreachable!("it was made one") };
        Ok(Arc::make_mut(page))
    }

    /// Leaves bytes in the range that no caller wrote, as a discard may. They are the same each
    /// time.
    ///
    /// # Errors
    /// As [`write_at`](BlockDevice::write_at).
    pub fn spoil(&self, offset: u64, len: u64) -> io::Result<()> {
        self.cover(offset, len, &PageSlot::Undefined)
    }

    /// Makes the range read as `slot` says.
    fn cover(&self, offset: u64, len: u64, slot: &PageSlot) -> io::Result<()> {
        let range = request_range(self.size_bytes, offset, len)?;
        let is_base = matches!((slot, &self.base), (PageSlot::Zeros, BaseBytes::Zeros));
        let mut at = range.start;
        while at < range.end {
            let end = range.end.min((at / PAGE_BYTES + 1) * PAGE_BYTES);
            let mut pages = self.shard(at).write();
            if end - at < PAGE_BYTES {
                let from = small(at % PAGE_BYTES);
                slot.read(at, &mut self.page_mut(&mut pages, at)?[from..from + small(end - at)]);
            } else {
                let number = at / PAGE_BYTES;
                let before = if !is_base {
                    Arc::make_mut(&mut pages).slots_mut().insert(number, slot.clone())
                } else if pages.slots.contains_key(&number) {
                    Arc::make_mut(&mut pages).slots_mut().remove(&number)
                } else {
                    None
                };
                // A snapshot may keep the page.
                if let Some(budget) = &self.budget
                    && let Some(PageSlot::Written(page)) = before
                    && Arc::into_inner(page).is_some()
                {
                    budget.give_page_back();
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Copies `range`, which is inside one extent, into `buf`.
    fn read_extent(&self, range: Range<u64>, buf: &mut [u8]) -> io::Result<()> {
        let pages = self.shard(range.start).read();
        // Bytes without a page are read from the base in one request up to the next page.
        let mut uncovered = 0..0;
        for (at, piece) in pieces(range.clone(), PAGE_BYTES) {
            let Some(page) = pages.slots.get(&(at / PAGE_BYTES)) else {
                uncovered.end = piece.end;
                continue;
            };
            self.base.read(range.start + uncovered.start as u64, &mut buf[uncovered])?;
            uncovered = piece.end..piece.end;
            page.read(at, &mut buf[piece]);
        }
        self.base.read(range.start + uncovered.start as u64, &mut buf[uncovered])
    }
}

/// Shows the size and not the bytes.
impl fmt::Debug for MemoryDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = &self.size_bytes;
        formatter.debug_struct("MemoryDevice").field("size_bytes", size).finish_non_exhaustive()
    }
}

impl BlockDevice for MemoryDevice {
    fn name(&self) -> &str {
        match &self.base {
            BaseBytes::Device(below) => below.name(),
            BaseBytes::Zeros | BaseBytes::Bytes(_) => "memory",
        }
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = request_range(self.size_bytes, offset, buf.len() as u64)?;
        for (at, piece) in pieces(range, EXTENT_BYTES) {
            let piece = &mut buf[piece];
            self.read_extent(at..at + piece.len() as u64, piece)?;
        }
        Ok(())
    }

    fn prefetch(&self, offset: u64, len: u64) {
        if let BaseBytes::Device(below) = &self.base {
            below.prefetch(offset, len);
        }
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        let range = request_range(self.size_bytes, offset, buf.len() as u64)?;
        for (extent_at, extent) in pieces(range, EXTENT_BYTES) {
            let buf = &buf[extent];
            let mut pages = self.shard(extent_at).write();
            for (at, piece) in pieces(extent_at..extent_at + buf.len() as u64, PAGE_BYTES) {
                let from = small(at % PAGE_BYTES);
                let to = from + piece.len();
                self.page_mut(&mut pages, at)?[from..to].copy_from_slice(&buf[piece]);
            }
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// The range reads as zeros afterwards.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.cover(offset, len, &PageSlot::Zeros)
    }
}

impl BaseBytes {
    /// Fills `buf` from `offset` on. The device has checked the range.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        match self {
            _ if buf.is_empty() => Ok(()),
            Self::Zeros => {
                buf.fill(0);
                Ok(())
            }
            Self::Bytes(bytes) => {
                let start = small(offset);
                buf.copy_from_slice(&bytes[start..start + buf.len()]);
                Ok(())
            }
            Self::Device(below) => below.read_at(offset, buf),
        }
    }
}

/// `range` cut at the multiples of `grain`. Each item is the byte of the device at which a piece
/// begins, and its range in the buffer of the request.
fn pieces(range: Range<u64>, grain: u64) -> impl Iterator<Item = (u64, Range<usize>)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = range.end.min((at / grain + 1) * grain);
        let piece = (at, small(at - range.start)..small(end - range.start));
        let more = at < range.end;
        at = end;
        more.then_some(piece)
    })
}

/// A number that is bounded by the length of something in memory.
fn small(number: u64) -> usize {
    usize::try_from(number).expect("lengths in memory fit usize")
}
