//! A device that is a file or a block device of the host.
//!
//! # Who may open what
//!
//! | | for reading | for writing |
//! |---|---|---|
//! | another `FileDevice` reads | yes | yes |
//! | another `FileDevice` [relies on it](FileDevice::open_relied_on) | yes | refused |
//! | another `FileDevice` writes, or anybody holds a lock on it | yes | refused |
//! | QEMU or one of its tools writes it, or reads it and forbids writing | yes | refused |
//! | the image backs a loop device | yes | refused |
//! | the block device is mounted, or part of a larger one | yes | refused |
//!
//! Two writers destroy a volume, so a writer takes the exclusive `flock` that other tools of the
//! host honour too, takes the [locks of QEMU](qemu_locks), opens block devices with `O_EXCL`, and
//! looks whether the kernel uses the image through a loop device. A reader takes no lock: it harms
//! nobody, it must be able to look at what the kernel has mounted, and a reader that was forgotten
//! somewhere must not keep the owner of a volume from writing it. What a reader gets while somebody
//! writes is the state of no single moment; the checksums of the volume tell it where that matters.
//!
//! # Invariants
//!
//! 1. The size is that of the moment of opening, and no request changes it; a device that
//!    [grows](FileDevice::growing), which is what an image of a disk needs, only becomes larger.
//! 2. After a flush failed every later one fails too: the host reports lost pages
//!    once and then takes them for clean, so a second success would be a lie.

mod direct;
mod discard;
mod in_use;
mod qemu_locks;

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, IoSlice, Seek, SeekFrom};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate, ioctl_blksszget};
use rustix::io::{Errno, pwritev};

use crate::{BlockDevice, request_range, total_bytes};
use direct::Direct;
use qemu_locks::Purpose;

/// An image file or a block device. It is accessed through the page cache of the host, but for
/// large writes and for [`read_medium_at`](BlockDevice::read_medium_at).
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    name: String,
    size_bytes: AtomicU64,
    /// A write behind the end makes the file longer.
    is_growing: bool,
    writable: bool,
    is_block_device: bool,
    logical_sector_bytes: Option<u64>,
    direct: Option<Direct>,
    /// The next flush has to make the length of the file durable as well.
    resized: AtomicBool,
    flush_failed: AtomicBool,
}

/// What a [`FileDevice`] is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// To be read, whatever others do with it.
    Read,
    /// To be read, while nobody writes it.
    Rely,
    /// To be read and written, while nobody else writes it.
    Write,
}

impl FileDevice {
    /// Opens `path` for reading. Whoever else uses it does not matter.
    ///
    /// # Errors
    /// When it cannot be opened, or is neither a regular file nor a block device.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_for(path, FileUse::Read)
    }

    /// Opens `path` for reading and writing, and keeps other writers away until it
    /// is dropped.
    ///
    /// # Errors
    /// As [`open`](Self::open); of kind `ResourceBusy` when another process or the
    /// kernel uses it, and the message says who, as far as that can be known.
    pub fn open_writable(path: &Path) -> io::Result<Self> {
        Self::open_for(path, FileUse::Write)
    }

    /// Opens `path` for reading, and keeps QEMU and other writers like us away until it is dropped:
    /// what is written elsewhere stands on what is here.
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
        Self::open_with(path, usage, OFlags::empty())
    }

    /// As [`open_for`](Self::open_for) for a regular file at `path` itself: a link there is not
    /// followed. The open file is checked, so another process cannot put one there in between.
    ///
    /// # Errors
    /// As [`open_writable`](Self::open_writable), and for a link and a block device.
    pub fn open_plain(path: &Path, usage: FileUse) -> io::Result<Self> {
        // A pipe that has just come there would wait for its other end.
        let device = Self::open_with(path, usage, OFlags::NOFOLLOW | OFlags::NONBLOCK)?;
        if device.is_block_device {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(device)
    }

    fn open_with(path: &Path, usage: FileUse, mut flags: OFlags) -> io::Result<Self> {
        let is_writable = usage == FileUse::Write;
        if is_block_device(&fs::metadata(path)?)? && is_writable {
            flags |= OFlags::EXCL;
        }
        let mut options = OpenOptions::new();
        options.read(true).write(is_writable).custom_flags(flags.bits().cast_signed());
        let file = match options.open(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && is_writable => {
                return Err(in_use::of_block_device(path));
            }
            result => result?,
        };
        match usage {
            FileUse::Read => {}
            FileUse::Rely => in_use::claim(&file, Purpose::Rely)?,
            FileUse::Write => in_use::claim(&file, Purpose::Write)?,
        }
        Self::with(file, path, is_writable)
    }

    /// What the host says of the open file: of what type it is, and which one.
    ///
    /// # Errors
    /// Those of the host.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Makes an image file of `size_bytes`, all of it a hole, and opens it for writing.
    /// A file that is there already is kept with its contents and made longer where
    /// needed.
    ///
    /// # Errors
    /// As [`open_writable`](Self::open_writable); when `path` is longer than
    /// `size_bytes`, because what is behind would be lost; when it is not a regular
    /// file, because a block device has the size that it has.
    pub fn create(path: &Path, size_bytes: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).open(path) {
            Ok(file) => {
                in_use::claim(&file, Purpose::Write)?;
                let made = Self::with(file, path, true).and_then(|mut device| {
                    device.grow(size_bytes)?;
                    sync_parent(path)?;
                    Ok(device)
                });
                if made.is_err() {
                    // It is ours alone and empty. Its stay would be a second problem
                    // beside the one that is reported.
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
            *self.resized.get_mut() = true;
        }
        Ok(())
    }

    fn with(mut file: File, path: &Path, writable: bool) -> io::Result<Self> {
        let is_block_device = is_block_device(&file.metadata()?)?;
        // The metadata of a block device says nothing of its size; its end does.
        let size_bytes = file.seek(SeekFrom::End(0))?;
        // The engine says itself what it will read next; the host's guess from
        // interleaved readers would only fetch what nobody asked for.
        fadvise(&file, 0, None, Advice::Random)?;
        let direct = Direct::open(&file, writable);
        let said = if is_block_device { ioctl_blksszget(&file).ok() } else { None };
        let logical_sector_bytes = said.map(u64::from);
        Ok(Self {
            file,
            name: path.display().to_string(),
            size_bytes: AtomicU64::new(size_bytes),
            is_growing: false,
            writable,
            is_block_device,
            logical_sector_bytes,
            direct,
            resized: AtomicBool::new(false),
            flush_failed: AtomicBool::new(false),
        })
    }

    /// The same device, which a write behind its end makes longer where it is a regular file. This
    /// is for images of disks, whose files have what was written so far and no more.
    #[must_use]
    pub fn growing(mut self) -> Self {
        self.is_growing = !self.is_block_device;
        self
    }

    /// Writes `bufs`, and makes the file as long as that takes. The kernel makes it so: a program
    /// in a sandbox may write and not change sizes.
    fn write_growing(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let Some(end) = offset.checked_add(total_bytes(bufs)) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        if !self.writable {
            return Err(Errno::ROFS.into());
        }
        write_all(&self.file, offset, bufs)?;
        // Only now: who sees the size may read up to it.
        self.size_bytes.fetch_max(end, Ordering::AcqRel);
        Ok(())
    }

    /// Whether a change of `len` bytes at `offset` is one that this device may make.
    fn check_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.writable {
            return Err(Errno::ROFS.into());
        }
        // A write past the end would make a regular file longer.
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

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        request_range(self.size_bytes(), offset, buf.len() as u64)?;
        match &self.direct {
            Some(direct) if direct.read(offset, buf)? => Ok(()),
            _ => self.read_at(offset, buf),
        }
    }

    fn prefetch(&self, offset: u64, len: u64) {
        // A hint that is refused costs speed and nothing else.
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
        if let Some(direct) = &self.direct
            && direct.write(offset, bufs)?
        {
            return Ok(());
        }
        Ok(write_all(&self.file, offset, bufs)?)
    }

    fn flush(&self) -> io::Result<()> {
        if !self.writable {
            // Nothing was written, so everything that was is durable.
            return Ok(());
        }
        if self.flush_failed.load(Ordering::Acquire) {
            return Err(io::Error::other("an earlier flush failed, and what it lost stays lost"));
        }
        let resized = self.resized.load(Ordering::Acquire);
        let result = if resized { self.file.sync_all() } else { self.file.sync_data() };
        match result {
            Ok(()) if resized => self.resized.store(false, Ordering::Release),
            Ok(()) => {}
            Err(_) => self.flush_failed.store(true, Ordering::Release),
        }
        result
    }

    /// Makes a hole in an image file, which reads as zeros and takes no space. A block device is
    /// told of the whole pages.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_change(offset, len)?;
        let discarded = if self.is_block_device {
            discard::on_block_device(&self.file, offset..offset + len)
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
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        in_use::release(&self.file);
    }
}

/// Writes all of `bufs` one behind the other at `offset`.
fn write_all(file: &File, mut offset: u64, bufs: &[IoSlice<'_>]) -> Result<(), Errno> {
    let mut slices = bufs.to_vec();
    let mut rest = &mut slices[..];
    // Takes buffers without bytes off the front, for which the kernel returns 0.
    IoSlice::advance_slices(&mut rest, 0);
    while !rest.is_empty() {
        // It takes as many of the buffers as the kernel does at once.
        match pwritev(file, rest, offset) {
            // No device has become full: it is the host that does not go on.
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

/// Whether it is a block device and not a regular file. Anything else is refused, and that
/// before it is opened: a pipe would wait for its other end, and a device of characters
/// may act on being opened.
fn is_block_device(metadata: &Metadata) -> io::Result<bool> {
    let file_type = metadata.file_type();
    if !file_type.is_file() && !file_type.is_block_device() {
        let reason = "neither a regular file nor a block device";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    Ok(file_type.is_block_device())
}

/// Makes the name of a file that was just made durable.
fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match File::open(parent.unwrap_or(Path::new(".")))?.sync_all() {
        // Some filesystems know no such thing, and keep names by themselves.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        result => result,
    }
}
