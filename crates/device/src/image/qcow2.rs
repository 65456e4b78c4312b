//! QEMU's qcow2.
//!
//! The crate `imago`, by people of QEMU's block layer, maps, allocates and copies on write. This
//! module stands around it:
//!
//! | part | what it does |
//! |---|---|
//! | [`header`] | looks at the header first: bounds what `imago` allocates, and refuses by name what it does not know |
//! | [`store`] | gives `imago` a device for a file, orders its writes, and shows a snapshot as if it were the disk |
//! | [`counts`] | counts clusters before the first tables refer to them |
//! | [`Qcow2Device`] | is a [`BlockDevice`] |
//! | [`reader`] | reads images with what `imago` does not know, without it |
//!
//! # What a barrier promises
//!
//! `imago` writes reference counts before the tables that use them when it allocates, and after
//! them when it frees, but it puts no barrier between. [`store`] does: each write of metadata is
//! preceded by one, if anything was written since the last. Entries of the L1 table and of the
//! table of reference counts `imago` writes at once, before the counts of what they refer to;
//! [`counts`] writes these first. So after a power cut at any point every
//! table refers to clusters that are counted; at worst some are counted and not used, which
//! `qemu-img check` calls leaks and repairs. A [`flush`](BlockDevice::flush) returns when data,
//! reference counts and tables are on the medium, in this order.

mod counts;
mod header;
mod reader;
mod store;

use std::io::{self, IoSlice};
use std::sync::Arc;

use imago::io_buffers::IoVector;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};
use parking_lot::RwLock;

pub use header::{Qcow2Header, Qcow2Snapshot};
use reader::Reader;
use store::{Order, Store};

use crate::{BlockDevice, request_range, together, total_bytes};

/// How a qcow2 is opened.
#[derive(Debug, Default)]
pub struct Qcow2Options {
    /// Whether it is to be written.
    pub is_writable: bool,
    /// The disk that its backing file holds.
    pub backing: Option<Arc<dyn BlockDevice>>,
    /// The internal snapshot that is to be read instead of the disk.
    pub snapshot: Option<Qcow2Snapshot>,
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
    if let Some(layout) = header.layout_for_reader(snapshot.as_ref()) {
        return Ok(Arc::new(Reader::new(below, backing, layout)));
    }
    if is_writable {
        counts::check(&*below)?;
    }
    let backing = match backing {
        Some(device) => {
            let store = Store::new(device, Order::Free, Vec::new());
            let raw = Raw::builder(store).open(DenyImplicitOpenGate::default())?;
            Some(FormatAccess::new(raw))
        }
        None => None,
    };
    let overlay = header.overlay(snapshot.as_ref());
    let name = below.name().to_owned();
    let metadata = Store::new(below.clone(), Order::AfterAll, overlay);
    let data = metadata.beside(Order::Free);
    let image = Qcow2::<Store>::builder(metadata)
        .write(is_writable)
        .backing(backing)
        .data_file(Some(data))
        .open(DenyImplicitOpenGate::default())?;
    let access = FormatAccess::new(image);
    let size_bytes = access.size();
    Ok(Arc::new(Qcow2Device { access: RwLock::new(access), below, name, size_bytes, is_writable }))
}

/// The disk in a qcow2.
#[derive(Debug)]
struct Qcow2Device {
    /// Reads share it where nothing is written. Otherwise each call has it alone: with several,
    /// `imago` may write a table between two others, also to make room in its cache for one that is
    /// read, and after a power cut it would refer to what is not counted.
    access: RwLock<FormatAccess<Store>>,
    below: Arc<dyn BlockDevice>,
    name: String,
    size_bytes: u64,
    is_writable: bool,
}

impl Qcow2Device {
    fn check_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.is_writable {
            return Err(rustix::io::Errno::ROFS.into());
        }
        request_range(self.size_bytes, offset, len).map(drop)
    }
}

impl BlockDevice for Qcow2Device {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.size_bytes, offset, buf.len() as u64)?;
        if self.is_writable {
            self.access.write().read(buf, offset)
        } else {
            self.access.read().read(buf, offset)
        }
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check_change(offset, buf.len() as u64)?;
        self.access.write().write(buf, offset)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.check_change(offset, total_bytes(bufs))?;
        self.access.write().write(IoVector::from(&*together(bufs)), offset)
    }

    fn flush(&self) -> io::Result<()> {
        if !self.is_writable {
            return Ok(());
        }
        // What the caches hold goes to the file, in order, and then to the medium.
        self.access.write().flush()?;
        self.below.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_change(offset, len)?;
        self.access.write().discard_to_any(offset, len)
    }
}

impl Drop for Qcow2Device {
    fn drop(&mut self) {
        if self.is_writable {
            // What was promised is stored already. Without this some clusters would stay counted
            // that nothing uses, and an error here would mean no more than that.
            let _ = self.access.read().flush();
        }
    }
}
