//! QEMU's qcow2, versions 2 and 3.
//!
//! ```text
//!   L1 table ──> L2 table ──> cluster of data
//!                             else the backing file, else zeros
//!   count table ──> block of counts: how many entries lead to each cluster of the file
//! ```
//!
//! | part | what it does |
//! |---|---|
//! | [`header`] | the header and the snapshots; refuses unknown features by name |
//! | [`layout`] | the numbers of an image, and what an L2 entry says |
//! | [`pages`] | the tables and counts that are in memory, and which of them changed |
//! | [`tables`] | finds the L2 entry for a byte of the disk; copies shared tables |
//! | [`counts`] | reference counts, and the clusters that are free by them |
//! | [`file`](self::file) | the file, and whether it needs a barrier |
//! | [`metadata`] | which clusters no write of data may touch |
//! | [`read`], [`compressed`], [`write`] | requests to the disk |
//! | [`commit`] | the order in which changes reach the medium |
//!
//! # Invariants
//!
//! 1. When an entry on the medium leads to a cluster, the medium has that cluster and its count.
//! 2. A cluster stays counted until the medium has no entry that leads to it. So a power cut leaves
//!    at worst leaks, which `qemu-img check` repairs, and never corruption.
//! 3. A [`flush`](BlockDevice::flush) returns when data, counts and tables are on the medium.
//! 4. A cluster is written in place only while its count is 1, and data never goes to a cluster of
//!    metadata.
//!
//! # Locks
//!
//! The order is `committing`, then `tables`, then the map of the pages. Reads share `tables`, and
//! so do writes to clusters that are already allocated. A request that changes an entry locks it
//! exclusively.
//!
//! Source: the format's specification, `docs/interop/qcow2` of QEMU.

mod commit;
mod compressed;
mod counts;
mod file;
mod header;
mod layout;
mod metadata;
mod pages;
mod read;
mod tables;
mod write;

use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, RwLock};

use file::ImageFile;
pub use header::{Qcow2Header, Qcow2Snapshot};
use layout::{CompressedCluster, Qcow2Geometry};
use metadata::MetadataClusters;
use tables::Qcow2Tables;

use crate::{BlockDevice, request_range, together, total_bytes};

/// The largest table of reference counts in bytes. QEMU has the same limit.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;

/// How to open a qcow2.
#[derive(Debug, Default)]
pub struct Qcow2Options {
    /// Whether the caller writes it.
    pub is_writable: bool,
    /// The disk in its backing file.
    pub backing: Option<Arc<dyn BlockDevice>>,
    /// The internal snapshot to read instead of the disk.
    pub snapshot: Option<Qcow2Snapshot>,
}

/// How much of its tables and counts an open qcow2 keeps in memory.
#[derive(Clone, Copy, Debug)]
pub struct Qcow2Limits {
    /// How many bytes of unchanged pages it caches.
    pub kept_bytes: u64,
    /// How many bytes of changed pages may wait before the next write commits.
    pub changed_bytes: u64,
    /// How many dropped references to clusters may wait before the next write commits.
    pub dropped: usize,
    /// How many free clusters it remembers. It searches the counts for further ones.
    pub freed: usize,
}

impl Default for Qcow2Limits {
    fn default() -> Self {
        Self { kept_bytes: 8 << 20, changed_bytes: 4 << 20, dropped: 1 << 16, freed: 1 << 16 }
    }
}

/// Opens the qcow2 with this `header` on `below`.
///
/// # Errors
/// Those of the device, and of kind `InvalidData` for a damaged image.
pub fn open_qcow2(
    below: Arc<dyn BlockDevice>,
    header: &Qcow2Header,
    options: Qcow2Options,
) -> io::Result<Arc<dyn BlockDevice>> {
    open_qcow2_within(below, header, options, Qcow2Limits::default())
}

/// Opens a qcow2 as [`open_qcow2`] does, with other limits.
///
/// # Errors
/// As [`open_qcow2`].
pub fn open_qcow2_within(
    below: Arc<dyn BlockDevice>,
    header: &Qcow2Header,
    options: Qcow2Options,
    limits: Qcow2Limits,
) -> io::Result<Arc<dyn BlockDevice>> {
    let Qcow2Options { is_writable, backing, snapshot } = options;
    header.check(below.size_bytes(), is_writable)?;
    if let Some(snapshot) = &snapshot {
        header.check_snapshot(snapshot, below.size_bytes())?;
    }
    if is_writable && snapshot.is_some() {
        return Err(super::unsupported("a snapshot can only be read"));
    }
    if header.backing.is_some() && backing.is_none() {
        return Err(super::unsupported("it needs its backing file"));
    }
    let layout = header.layout(snapshot.as_ref());
    let metadata = if is_writable {
        let metadata = MetadataClusters::read(&*below, &layout, header.snapshot_tables())?;
        header.clear_autoclear(&*below)?;
        metadata
    } else {
        MetadataClusters::default()
    };
    let file = Arc::new(ImageFile::new(below));
    Ok(Arc::new(Qcow2Disk {
        tables: RwLock::new(Qcow2Tables::new(file.clone(), layout, metadata, limits)),
        file,
        backing,
        layout,
        is_writable,
        unpacked: Mutex::default(),
        committing: Mutex::default(),
        has_failed: AtomicBool::new(false),
    }))
}

/// The disk in a qcow2.
#[derive(Debug)]
struct Qcow2Disk {
    file: Arc<ImageFile>,
    backing: Option<Arc<dyn BlockDevice>>,
    layout: Qcow2Geometry,
    is_writable: bool,
    tables: RwLock<Qcow2Tables>,
    /// The cluster that was unpacked last.
    unpacked: Mutex<Option<(CompressedCluster, Arc<Vec<u8>>)>>,
    /// Held by the thread that commits.
    committing: Mutex<()>,
    /// A commit failed: all later writes and flushes fail.
    has_failed: AtomicBool,
}

impl Qcow2Disk {
    fn check_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.is_writable {
            return Err(rustix::io::Errno::ROFS.into());
        }
        request_range(self.layout.size_bytes, offset, len).map(drop)
    }
}

impl BlockDevice for Qcow2Disk {
    fn name(&self) -> &str {
        self.file.name()
    }

    fn size_bytes(&self) -> u64 {
        self.layout.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.layout.size_bytes, offset, buf.len() as u64)?;
        self.read(&self.tables.read(), offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check_change(offset, buf.len() as u64)?;
        self.write(offset, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.check_change(offset, total_bytes(bufs))?;
        self.write(offset, &together(bufs))
    }

    fn flush(&self) -> io::Result<()> {
        if self.is_writable { self.commit() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_change(offset, len)?;
        Qcow2Disk::discard(self, offset, len)
    }
}

impl Drop for Qcow2Disk {
    fn drop(&mut self) {
        if self.is_writable {
            // The medium has everything that a flush promised, so an error here only leaks
            // clusters. The first commit lowers counts in memory; the second one writes them.
            let _ = self.commit().and_then(|()| self.commit());
        }
    }
}
