//! Disk images: files that store the bytes of a disk in another order, or compressed.
//!
//! ```text
//!   file ──> image (qcow2 > raw) ──> partition ──> volume
//! ```
//!
//! | image | read | written | by |
//! |---|---|---|---|
//! | qcow2, versions 2 and 3 | yes | yes | [`qcow2`] |
//! | VMDK, sparse and flat | yes | yes | [`vmdk`] |
//! | VMDK, stream-optimised | yes | no | [`vmdk`] |
//! | VDI, VHD, VHDX | yes | no | [`mapped`] |
//! | gzip, xz, zstd over any of these | yes | no | [`unpacked`] |
//!
//! For every other image, the error names a command that converts it into one that we read.
//!
//! # Invariants
//!
//! 1. The first bytes of an image decide its kind (for a fixed VHD the last sector). A caller that
//!    knows better opens the file as a plain disk.
//! 2. This module opens no other file. The caller passes in what an image needs besides: a backing
//!    file, or the files that a descriptor names.
//! 3. A table is read into memory only up to [`TABLE_BYTES_MAX`], whatever size the image claims.

/// The part of `BlockDevice` that every read-only disk answers in the same way.
macro_rules! read_only {
    () => {
        fn write_at(&self, _offset: u64, _buf: &[u8]) -> io::Result<()> {
            Err(rustix::io::Errno::ROFS.into())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }

        fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
            Err(rustix::io::Errno::ROFS.into())
        }
    };
}

mod mapped;
mod qcow2;
mod unpacked;
mod vmdk;

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::BlockDevice;
pub use qcow2::{
    Qcow2Header, Qcow2Limits, Qcow2Options, Qcow2Snapshot, open_qcow2, open_qcow2_within,
};
pub use vmdk::{VmdkDescriptor, VmdkFile, open_vmdk};

/// The largest table of an image, in bytes: 8 Mi entries of 4 bytes. That is a disk of 8 TiB with
/// the blocks of a VDI (1 MiB), and one of 512 GiB with the grains of a VMDK (64 KiB).
const TABLE_BYTES_MAX: u64 = 32 << 20;

/// The kind of a file that holds a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// QEMU's own format.
    Qcow2,
    /// VirtualBox.
    Vdi,
    /// Virtual PC and Hyper-V, the older format.
    Vhd,
    /// Hyper-V, the newer format.
    Vhdx,
    /// VMware, one sparse extent.
    Vmdk,
    /// VMware, the text that names the extents, the files with the data.
    VmdkDescriptor,
    /// Compressed by gzip.
    Gzip,
    /// Compressed by xz.
    Xz,
    /// Compressed by zstd.
    Zstd,
}

impl fmt::Display for ImageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl ImageKind {
    /// Its name, as the user writes it in a stack of layers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Vdi => "vdi",
            Self::Vhd => "vhd",
            Self::Vhdx => "vhdx",
            Self::Vmdk | Self::VmdkDescriptor => "vmdk",
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
        }
    }

    /// Whether it is a compressed stream, which must be unpacked first.
    #[must_use]
    pub fn is_stream(self) -> bool {
        matches!(self, Self::Gzip | Self::Xz | Self::Zstd)
    }

    /// Whether this crate can write images of this kind.
    #[must_use]
    pub fn is_written(self) -> bool {
        matches!(self, Self::Qcow2 | Self::Vmdk | Self::VmdkDescriptor)
    }

    /// The kind of the image on `device`; `None` for a plain disk.
    ///
    /// # Errors
    /// Those of the device.
    pub fn detect(device: &dyn BlockDevice) -> io::Result<Option<Self>> {
        let mut start = [0; 80];
        let len = usize::try_from(device.size_bytes()).map_or(80, |size| size.min(80));
        device.read_at(0, &mut start[..len])?;
        let signatures: [(usize, &[u8], Self); 10] = [
            (0, b"QFI\xfb", Self::Qcow2),
            (0, b"conectix", Self::Vhd),
            (0, b"vhdxfile", Self::Vhdx),
            (0, b"KDMV", Self::Vmdk),
            (0, vmdk::COWD, Self::Vmdk),
            (0, b"# Disk DescriptorFile", Self::VmdkDescriptor),
            (64, &[0x7f, 0x10, 0xda, 0xbe], Self::Vdi),
            (0, &[0x1f, 0x8b, 8], Self::Gzip),
            (0, b"\xfd7zXZ\0", Self::Xz),
            (0, &[0x28, 0xb5, 0x2f, 0xfd], Self::Zstd),
        ];
        let found = signatures.iter().find(|(at, bytes, _)| start[*at..].starts_with(bytes));
        if let Some((_, _, kind)) = found {
            return Ok(Some(*kind));
        }
        // The first frame may be one that decoders skip; pzstd writes such frames.
        if start[0] & 0xf0 == 0x50 && start[1..4] == [0x2a, 0x4d, 0x18] {
            return Ok(Some(Self::Zstd));
        }
        Ok(mapped::is_fixed_vhd(device)?.then_some(Self::Vhd))
    }
}

/// Opens the disk in an image for reading.
///
/// # Errors
/// Those of the device; of kind `InvalidData` for a damaged image, and `Unsupported`, with the next
/// step for the user, for one that this crate cannot read.
pub fn open_image(
    below: Arc<dyn BlockDevice>,
    kind: ImageKind,
) -> io::Result<Arc<dyn BlockDevice>> {
    match kind {
        ImageKind::Vdi => mapped::vdi(below),
        ImageKind::Vhd => mapped::vhd(below),
        ImageKind::Vhdx => mapped::vhdx::open(below),
        ImageKind::Vmdk => open_vmdk(below, false),
        ImageKind::Gzip | ImageKind::Xz | ImageKind::Zstd => unpacked::open(&below, kind),
        ImageKind::VmdkDescriptor => Err(unsupported("its files are opened by its descriptor")),
        ImageKind::Qcow2 => Err(unsupported("a qcow2 is opened by its header")),
    }
}

/// Reads a range of a disk that is stored in blocks of `block_bytes`. It calls `read` once for each
/// block that the range touches, with the byte of the disk at which that part begins and the part
/// of `buf`.
fn read_by_blocks(
    offset: u64,
    buf: &mut [u8],
    block_bytes: u64,
    read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (mut at, mut rest) = (offset, buf);
    while !rest.is_empty() {
        let left = usize::try_from(block_bytes - at % block_bytes).unwrap_or(usize::MAX);
        let (part, behind) = rest.split_at_mut(left.min(rest.len()));
        read(at, part)?;
        at += part.len() as u64;
        rest = behind;
    }
    Ok(())
}

fn unsupported(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what.into())
}
