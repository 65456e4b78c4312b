//! A device that is a file or a block device of the host.
//!
//! # Which openings succeed
//!
//! | | for reading | for writing |
//! |---|---|---|
//! | another `FileDevice` reads | yes | yes |
//! | another `FileDevice` [relies on it](FileDevice::open_relied_on) | yes | refused |
//! | another `FileDevice` writes, or another program holds a `flock` on it | yes | refused |
//! | QEMU or one of its tools writes it, or reads it and forbids writing | yes | refused |
//! | the image backs a loop device | yes | refused |
//! | the block device is mounted, or part of a larger one | yes | refused |
//!
//! Two writers destroy a volume. So a writer takes the exclusive `flock`, which other tools of the
//! host honour too, and the [locks of QEMU](qemu_locks). On a block device the lock of a process
//! that started this one counts as its own, if the caller
//! [asks for that](FileDevice::open_writable_for_parent). It [holds](exclusive) a block device with
//! `O_EXCL`, and it checks whether the kernel uses the image through a loop device.
//!
//! A reader takes no lock, for three reasons: it harms no other user; it must be able to read what
//! the kernel has mounted; and a forgotten reader must not keep the owner of a volume from writing
//! it. While another program writes, a reader may see a mix of old and new bytes. Where that
//! matters, the checksums of the volume detect it.
//!
//! # Invariants
//!
//! 1. The size is fixed when the device is opened, and no request for bytes changes it. The
//!    exceptions are a device that [grows](FileDevice::growing), as the file of a disk image must:
//!    its size only rises; and [`resize`](BlockDevice::resize).
//! 2. After a flush failed, every later flush fails too. The host reports lost pages once and then
//!    takes them for clean, so a later success would be a lie.

mod direct;
mod discard;
mod exclusive;
mod in_use;
mod qemu_locks;

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut, Seek, SeekFrom};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate, ioctl_blksszget};
use rustix::io::{Errno, preadv, pwritev};

use crate::{BlockDevice, request_range, total_bytes};
use direct::Direct;
use exclusive::ChangePass;
pub use exclusive::{Borrower, ExclusiveHold, hold_block_device};
use in_use::ParentLocks;
use qemu_locks::LockPurpose;

/// An image file or a block device. Requests go through the page cache of the host, except large
/// writes and [`read_medium_at`](BlockDevice::read_medium_at).
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    name: String,
    size_bytes: AtomicU64,
    /// A write past the end makes the file longer.
    is_growing: bool,
    is_writable: bool,
    is_block_device: bool,
    logical_sector_bytes: Option<u64>,
    direct: Option<Direct>,
    /// Of a block device that is open for writing.
    exclusive: Option<Arc<ExclusiveHold>>,
    /// The next flush must make the length of the file durable as well.
    is_resized: AtomicBool,
    has_failed_flush: AtomicBool,
}

/// What a [`FileDevice`] is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// The caller reads it, whatever other programs do with it.
    Read,
    /// The caller reads it, and other programs must not write it.
    Rely,
    /// The caller reads and writes it, and other programs must not write it.
    Write,
}

impl FileDevice {
    /// Opens `path` for reading. Other programs may read and write it.
    ///
    /// # Errors
    /// When it cannot be opened, or is neither a regular file nor a block device.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_for(path, FileUse::Read)
    }

    /// Opens `path` for reading and writing, and keeps other writers away until it is dropped.
    ///
    /// # Errors
    /// As [`open`](Self::open); of kind `ResourceBusy` when another process or the kernel uses it.
    /// The message names the user, as far as the host shows it.
    pub fn open_writable(path: &Path) -> io::Result<Self> {
        Self::open_for(path, FileUse::Write)
    }

    /// Opens `path` as [`open_writable`](Self::open_writable) does, also when it is a block device
    /// that a process that started this one has locked. It is for a program that ends before that
    /// process: the lock keeps others away no longer than that.
    ///
    /// # Errors
    /// As [`open_writable`](Self::open_writable).
    pub fn open_writable_for_parent(path: &Path) -> io::Result<Self> {
        Self::open_with(path, FileUse::Write, OFlags::empty(), ParentLocks::Share)
    }

    /// Opens `path` for reading, and keeps other writers (QEMU and this crate) away until it is
    /// dropped. It is for a file that other data depends on, such as the backing file of an image
    /// that is written.
    ///
    /// # Errors
    /// As [`open_writable`](Self::open_writable).
    pub fn open_relied_on(path: &Path) -> io::Result<Self> {
        Self::open_for(path, FileUse::Rely)
    }

    /// Opens `path` for `usage`.
    ///
    /// # Errors
    /// As [`open_writable`](Self::open_writable).
    pub fn open_for(path: &Path, usage: FileUse) -> io::Result<Self> {
        Self::open_with(path, usage, OFlags::empty(), ParentLocks::Exclude)
    }

    /// Opens `path` as [`open_for`](Self::open_for) does, but only a regular file at `path` itself:
    /// it does not follow a symbolic link. The type is checked on the open file, so that another
    /// process cannot swap the file between the check and the open.
    ///
    /// # Errors
    /// As [`open_writable`](Self::open_writable), and for a link and a block device.
    pub fn open_plain(path: &Path, usage: FileUse) -> io::Result<Self> {
        // NONBLOCK: opening a pipe would wait for its other end.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let device = Self::open_with(path, usage, flags, ParentLocks::Exclude)?;
        if device.is_block_device {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(device)
    }

    fn open_with(
        path: &Path,
        usage: FileUse,
        flags: OFlags,
        parents: ParentLocks,
    ) -> io::Result<Self> {
        let is_writable = usage == FileUse::Write;
        let is_held = is_block_device(&fs::metadata(path)?)? && is_writable;
        let exclusive = is_held.then(|| ExclusiveHold::take(path).map(Arc::new)).transpose()?;
        let mut options = OpenOptions::new();
        options.read(true).write(is_writable).custom_flags(flags.bits().cast_signed());
        let file = options.open(path)?;
        match usage {
            FileUse::Read => {}
            FileUse::Rely => in_use::claim(&file, LockPurpose::Rely, parents)?,
            FileUse::Write => in_use::claim(&file, LockPurpose::Write, parents)?,
        }
        let mut device = Self::with(file, path, is_writable)?;
        device.exclusive = exclusive;
        Ok(device)
    }

    /// The metadata of the open file: its type, its device and its inode.
    ///
    /// # Errors
    /// Those of the host.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Makes an image file of `size_bytes`, all of it a hole, and opens it for writing. It keeps a
    /// file that exists, with its contents, and makes it longer where needed.
    ///
    /// # Errors
    /// As [`open_writable`](Self::open_writable); when the file at `path` is longer than
    /// `size_bytes`, because its end would be lost; when `path` is a block device, whose size is
    /// fixed.
    pub fn create(path: &Path, size_bytes: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).open(path) {
            Ok(file) => {
                let claimed = in_use::claim(&file, LockPurpose::Write, ParentLocks::Exclude);
                let made = claimed.and_then(|()| Self::with(file, path, true));
                let made = made.and_then(|mut device| {
                    device.grow(size_bytes)?;
                    sync_parent(path)?;
                    Ok(device)
                });
                if made.is_err() {
                    // The file is new and empty. If removing it fails too, the first error is the
                    // one to report.
                    let _ = fs::remove_file(path);
                }
                made
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let mut device = Self::open_writable(path)?;
                device.grow(size_bytes)?;
                Ok(device)
            }
            Err(error) => Err(error),
        }
    }

    fn grow(&mut self, size_bytes: u64) -> io::Result<()> {
        let refused = |reason| Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        if self.is_block_device {
            return refused("a block device has the size that it has".to_owned());
        }
        let now = *self.size_bytes.get_mut();
        if size_bytes < now {
            return refused(format!(
                "it has {now} bytes, and making it {size_bytes} bytes long would cut off its end"
            ));
        }
        if size_bytes > now {
            self.file.set_len(size_bytes)?;
            *self.size_bytes.get_mut() = size_bytes;
            *self.is_resized.get_mut() = true;
        }
        Ok(())
    }

    fn with(mut file: File, path: &Path, is_writable: bool) -> io::Result<Self> {
        let is_block_device = is_block_device(&file.metadata()?)?;
        // The metadata of a block device has no size, so seek to its end.
        let size_bytes = file.seek(SeekFrom::End(0))?;
        // The engine asks for its own read-ahead. The host would guess from interleaved readers and
        // fetch bytes that no reader needs.
        fadvise(&file, 0, None, Advice::Random)?;
        let direct = Direct::open(&file, is_writable);
        let said = if is_block_device { ioctl_blksszget(&file).ok() } else { None };
        let logical_sector_bytes = said.map(u64::from);
        Ok(Self {
            file,
            name: path.display().to_string(),
            size_bytes: AtomicU64::new(size_bytes),
            is_growing: false,
            is_writable,
            is_block_device,
            logical_sector_bytes,
            direct,
            exclusive: None,
            is_resized: AtomicBool::new(false),
            has_failed_flush: AtomicBool::new(false),
        })
    }

    /// The same device, except that a write past its end makes a regular file longer. It is for
    /// disk images: such a file ends behind the last byte that was written to it.
    #[must_use]
    pub fn growing(mut self) -> Self {
        self.is_growing = !self.is_block_device;
        self
    }

    /// Writes `bufs`. When they end past the file, the kernel makes the file longer as part of the
    /// write. A program in a sandbox may write, but `ftruncate` may be forbidden.
    fn write_growing(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let Some(end) = offset.checked_add(total_bytes(bufs)) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        if !self.is_writable {
            return Err(Errno::ROFS.into());
        }
        write_all(&self.file, offset, bufs)?;
        // Raise the size after the write, because readers may read up to it.
        self.size_bytes.fetch_max(end, Ordering::AcqRel);
        Ok(())
    }

    /// The permission to change the device, which another program may have by now.
    fn pass(&self) -> io::Result<Option<ChangePass<'_>>> {
        self.exclusive.as_deref().map(ExclusiveHold::pass).transpose()
    }

    /// Writes `bufs`, for a caller with a pass.
    fn write_now(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        if let Some(direct) = &self.direct
            && direct.write(offset, bufs)?
        {
            return Ok(());
        }
        Ok(write_all(&self.file, offset, bufs)?)
    }

    /// The barrier, for a caller with a pass.
    fn flush_now(&self) -> io::Result<()> {
        if self.has_failed_flush.load(Ordering::Acquire) {
            return Err(io::Error::other("an earlier flush failed, and what it lost stays lost"));
        }
        let is_resized = self.is_resized.load(Ordering::Acquire);
        let result = if is_resized { self.file.sync_all() } else { self.file.sync_data() };
        match result {
            // The host told another flush, at the same time, of what was lost.
            Ok(()) if self.has_failed_flush.load(Ordering::Acquire) => {
                return Err(io::Error::other("another flush failed at the same time"));
            }
            Ok(()) if is_resized => self.is_resized.store(false, Ordering::Release),
            Ok(()) => {}
            Err(_) => self.has_failed_flush.store(true, Ordering::Release),
        }
        result
    }

    /// Refuses a change of `len` bytes at `offset` on a read-only device or past its end.
    fn check_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.is_writable {
            return Err(Errno::ROFS.into());
        }
        // Checked here, because the kernel would make a regular file longer.
        request_range(self.size_bytes(), offset, len).map(drop)
    }
}

impl BlockDevice for FileDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn logical_sector_bytes(&self) -> Option<u64> {
        self.logical_sector_bytes
    }

    fn exclusive_hold(&self) -> Option<Arc<ExclusiveHold>> {
        self.exclusive.clone()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.size_bytes(), offset, buf.len() as u64)?;
        self.file.read_exact_at(buf, offset)
    }

    fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        request_range(self.size_bytes(), offset, total_bytes(bufs))?;
        read_all(&self.file, offset, bufs)
    }

    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.size_bytes(), offset, buf.len() as u64)?;
        match &self.direct {
            Some(direct) if direct.read(offset, buf)? => Ok(()),
            _ => self.read_at(offset, buf),
        }
    }

    fn prefetch(&self, offset: u64, len: u64) {
        // A hint that the host refuses costs only speed.
        let _ = fadvise(&self.file, offset, NonZeroU64::new(len), Advice::WillNeed);
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored_at(offset, &[IoSlice::new(buf)])
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        if self.is_growing {
            return self.write_growing(offset, bufs);
        }
        self.check_change(offset, total_bytes(bufs))?;
        let _pass = self.pass()?;
        self.write_now(offset, bufs)?;
        if let Some(exclusive) = &self.exclusive {
            exclusive.note_write(offset, bufs);
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        if !self.is_writable {
            // This device has written nothing that could be lost.
            return Ok(());
        }
        let _pass = self.pass()?;
        self.flush_now()
    }

    /// Makes a hole in an image file: it takes no space and reads as zeros. On a block device it
    /// discards the whole units of 4 KiB in the range.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_change(offset, len)?;
        let _pass = self.pass()?;
        let discarded = if self.is_block_device {
            match discard::on_block_device(&self.file, offset..offset + len) {
                // For a descriptor that is not the holder, the kernel discards nothing that its
                // page cache has yet to write.
                Err(Errno::BUSY) => {
                    self.flush_now()?;
                    discard::on_block_device(&self.file, offset..offset + len)
                }
                result => result,
            }
        } else if len == 0 {
            Ok(())
        } else {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.file, flags, offset, len)
        };
        discarded.map_err(|errno| match errno {
            Errno::OPNOTSUPP | Errno::NOSYS => io::Error::new(io::ErrorKind::Unsupported, errno),
            other => other.into(),
        })
    }

    fn resize(&self, size_bytes: u64) -> io::Result<()> {
        if !self.is_writable {
            return Err(Errno::ROFS.into());
        }
        if self.is_block_device {
            // No request uses the position.
            let now = (&self.file).seek(SeekFrom::End(0))?;
            self.size_bytes.store(now, Ordering::Release);
            if now < size_bytes {
                let what = format!("the block device has {now} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
            }
            return Ok(());
        }
        let _pass = self.pass()?;
        let grows = size_bytes > self.size_bytes();
        match self.file.set_len(size_bytes) {
            // In the sandbox of a mount, only a write makes a file longer.
            Err(error) if grows && error.kind() == io::ErrorKind::PermissionDenied => {
                write_all(&self.file, size_bytes - 1, &[IoSlice::new(&[0])])?;
            }
            result => result?,
        }
        self.size_bytes.store(size_bytes, Ordering::Release);
        self.is_resized.store(true, Ordering::Release);
        Ok(())
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        // A program that waits for the locks then finds the device free.
        if let Some(exclusive) = &self.exclusive {
            exclusive.give_up("it is closed");
        }
        in_use::release(&self.file);
    }
}

/// Fills all of `bufs` one behind the other from `offset` on.
fn read_all(file: &File, mut offset: u64, mut rest: &mut [IoSliceMut<'_>]) -> io::Result<()> {
    // Skips empty buffers at the front: the kernel returns 0 for them, as at the end of the file.
    IoSliceMut::advance_slices(&mut rest, 0);
    while !rest.is_empty() {
        // The kernel takes only the first buffers when there are more than its limit.
        match preadv(file, rest, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => {
                offset += read as u64;
                IoSliceMut::advance_slices(&mut rest, read);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Writes all of `bufs` one behind the other at `offset`.
fn write_all(file: &File, mut offset: u64, bufs: &[IoSlice<'_>]) -> Result<(), Errno> {
    let mut slices = bufs.to_vec();
    let mut rest = &mut slices[..];
    // Skips empty buffers at the front: the kernel returns 0 for them, which the loop takes for an
    // error.
    IoSlice::advance_slices(&mut rest, 0);
    while !rest.is_empty() {
        // The kernel takes only the first buffers when there are more than its limit.
        match pwritev(file, rest, offset) {
            // A full device reports ENOSPC. A write of 0 bytes means that the host makes no
            // progress.
            Ok(0) => return Err(Errno::IO),
            Ok(written) => {
                offset += written as u64;
                IoSlice::advance_slices(&mut rest, written);
            }
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether `metadata` is of a block device and not of a regular file. Every other type is refused
/// before it is opened: opening a pipe would wait for its other end, and opening a character device
/// may have side effects.
fn is_block_device(metadata: &Metadata) -> io::Result<bool> {
    let file_type = metadata.file_type();
    if !file_type.is_file() && !file_type.is_block_device() {
        let reason = "neither a regular file nor a block device";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    Ok(file_type.is_block_device())
}

/// Makes the directory entry of a new file durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match File::open(parent.unwrap_or(Path::new(".")))?.sync_all() {
        // Some filesystems cannot sync a directory. They make its entries durable themselves.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result,
    }
}
