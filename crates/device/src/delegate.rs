//! Devices that hand most requests on to another one.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};

use crate::BlockDevice;

/// A device over another one, which says only what it does otherwise: all else goes to
/// [`inner`](Self::inner). Whatever implements this is a [`BlockDevice`].
///
/// What is read past the memory of the host, or into several pieces of memory, is read by
/// [`read_at`](Self::read_at), and what is written in several pieces is written by
/// [`write_at`](Self::write_at), piece by piece, unless the device says otherwise. So one that
/// changes what is read or written need not change it twice.
///
/// Its methods have the names of those of `BlockDevice`. So it is not imported beside that, but
/// named by its path:
///
/// ```
/// use std::io;
/// use std::sync::Arc;
///
/// use offshoot_device::BlockDevice;
///
/// /// A device whose barriers do nothing.
/// #[derive(Debug)]
/// struct Unsafe(Arc<dyn BlockDevice>);
///
/// impl offshoot_device::Delegate for Unsafe {
///     fn inner(&self) -> &dyn BlockDevice {
///         &*self.0
///     }
///
///     fn flush(&self) -> io::Result<()> {
///         Ok(())
///     }
/// }
/// ```
#[expect(missing_docs, reason = "each method is that of the same name of `BlockDevice`")]
#[expect(clippy::missing_errors_doc, reason = "each method is that of the same name")]
pub trait Delegate: Send + Sync + fmt::Debug {
    /// The device that requests are handed on to.
    fn inner(&self) -> &dyn BlockDevice;

    fn name(&self) -> &str {
        self.inner().name()
    }

    fn size_bytes(&self) -> u64 {
        self.inner().size_bytes()
    }

    fn logical_sector_bytes(&self) -> Option<u64> {
        self.inner().logical_sector_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner().read_at(offset, buf)
    }

    /// By default one [`read_at`](Self::read_at) for each buffer, so one large request becomes many
    /// small ones.
    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let mut at = offset;
        for buf in bufs {
            Delegate::read_at(self, at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    /// By default [`read_at`](Self::read_at), so it can be served by the page cache of the host,
    /// and a scrub above does not verify the medium.
    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        Delegate::read_at(self, offset, buf)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner().prefetch(offset, len);
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.inner().write_at(offset, buf)
    }

    /// By default one [`write_at`](Self::write_at) for each buffer, so one large request becomes
    /// many small ones.
    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let mut at = offset;
        for buf in bufs {
            Delegate::write_at(self, at, buf)?;
            at += buf.len() as u64;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.inner().flush()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner().discard(offset, len)
    }

    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        self.inner().resize(size_bytes)
    }
}

impl<D: Delegate> BlockDevice for D {
    fn name(&self) -> &str {
        Delegate::name(self)
    }

    fn size_bytes(&self) -> u64 {
        Delegate::size_bytes(self)
    }

    fn logical_sector_bytes(&self) -> Option<u64> {
        Delegate::logical_sector_bytes(self)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        Delegate::read_at(self, offset, buf)
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        Delegate::read_vectored_at(self, offset, bufs)
    }

    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        Delegate::read_medium_at(self, offset, buf)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        Delegate::prefetch(self, offset, len);
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        Delegate::write_at(self, offset, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        Delegate::write_vectored_at(self, offset, bufs)
    }

    fn flush(&self) -> io::Result<()> {
        Delegate::flush(self)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        Delegate::discard(self, offset, len)
    }

    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        Delegate::resize(self, size_bytes)
    }
}
