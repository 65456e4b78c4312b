//! The header of a qcow2, and its snapshots.
//!
//! ```text
//!   4  version       8  backing file: offset, length    20  cluster bits    24  size
//!  32  encryption   36  L1 entries  40  L1 table        48  refcount table, clusters of it
//!  60  snapshots    64  where they are
//!  72  incompatible features (version 3)    88  autoclear features
//!  96  bits of a count   100  length of the header  104  compression
//! ```
//!
//! All numbers are big-endian.

use std::io;
use std::ops::Range;

use super::super::{TABLE_BYTES_MAX, unsupported};
use super::REFCOUNT_TABLE_BYTES_MAX;
use super::layout::Qcow2Geometry;
use crate::BlockDevice;
use crate::fields::{self, invalid, u32_be, u64_be};

/// The features of version 3 that this crate knows, by bit.
const DIRTY: u64 = 1;
const CORRUPT: u64 = 1 << 1;
const EXTERNAL_DATA: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// The compression types of the header.
const DEFLATE: u8 = 0;
const ZSTD: u8 = 1;

/// The base-2 logarithm of the smallest cluster whose 32 subclusters have at least one sector each.
const SUBCLUSTERED_BITS_MIN: u32 = 14;

/// How many snapshots an image may have, and how many bytes the entry of each may take.
const SNAPSHOTS_MAX: u32 = 4096;
const SNAPSHOT_BYTES_MAX: u64 = 64 << 10;

/// The byte of the header at which the autoclear features begin.
const AUTOCLEAR: u64 = 88;

/// The header of a qcow2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Header {
    /// The version of the format, 2 or 3.
    pub version: u32,
    /// The size of the disk in bytes.
    pub size_bytes: u64,
    /// The name of the backing file.
    pub backing: Option<String>,
    /// The format of the backing file, when the image names it.
    pub backing_format: Option<String>,
    /// The internal snapshots.
    pub snapshots: Vec<Qcow2Snapshot>,
    cluster_bits: u32,
    is_encrypted: bool,
    l1_entries: u32,
    l1_offset: u64,
    refcount_offset: u64,
    refcount_clusters: u32,
    /// The base-2 logarithm of the bits of a reference count.
    refcount_order: u32,
    /// The bytes of the file that the table of snapshots takes.
    snapshot_table: Range<u64>,
    features: u64,
    autoclear: u64,
    /// The compression type, as the header numbers it.
    compression: u8,
}

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Snapshot {
    /// Its id, unique in the image.
    pub id: String,
    /// Its name.
    pub name: String,
    size_bytes: u64,
    l1_entries: u32,
    l1_offset: u64,
}

/// Reads `len` bytes from `offset` on. Refuses more than `most` bytes, and bytes past the end.
fn read(device: &dyn BlockDevice, offset: u64, len: u64, most: u64) -> io::Result<Vec<u8>> {
    fields::part(device, offset, len, most)?
        .ok_or_else(|| invalid("a part of its header lies outside of the file"))
}

impl Qcow2Header {
    /// Reads the header of the image on `device`.
    ///
    /// # Errors
    /// Those of the device; of kind `InvalidData` for a header that makes no sense, and
    /// `Unsupported` for a version that this crate does not know.
    pub fn read(device: &dyn BlockDevice) -> io::Result<Self> {
        let bytes = read(device, 0, 72, 72)?;
        let version = u32_be(&bytes, 4);
        if bytes[..4] != *b"QFI\xfb" {
            return Err(invalid("it does not begin as a qcow2 does"));
        }
        if !matches!(version, 2 | 3) {
            return Err(unsupported(format!(
                "no version {version} of qcow2 is known: qemu-img convert -O qcow2 IN OUT makes \
                 an image that is"
            )));
        }
        let cluster_bits = u32_be(&bytes, 20);
        if !(9..=21).contains(&cluster_bits) {
            return Err(invalid("its clusters have an impossible size"));
        }
        // Version 2 has counts of 16 bits.
        let (mut features, mut autoclear, mut refcount_order, mut header_bytes) = (0, 0, 4, 72);
        if version == 3 {
            let rest = read(device, 72, 32, 32)?;
            (features, autoclear) = (u64_be(&rest, 0), u64_be(&rest, 16));
            (refcount_order, header_bytes) = (u32_be(&rest, 24), u64::from(u32_be(&rest, 28)));
        }
        let compression = if header_bytes > 104 { read(device, 104, 1, 1)?[0] } else { DEFLATE };
        let name_at = u64_be(&bytes, 8);
        let backing = match name_at {
            0 => None,
            at => Some(text(&read(device, at, u32_be(&bytes, 16).into(), 1023)?)?),
        };
        let mut header = Self {
            version,
            size_bytes: u64_be(&bytes, 24),
            backing,
            backing_format: None,
            snapshots: Vec::new(),
            cluster_bits,
            is_encrypted: u32_be(&bytes, 32) != 0,
            l1_entries: u32_be(&bytes, 36),
            l1_offset: u64_be(&bytes, 40),
            refcount_offset: u64_be(&bytes, 48),
            refcount_clusters: u32_be(&bytes, 56),
            refcount_order,
            snapshot_table: 0..0,
            features,
            autoclear,
            compression,
        };
        header.backing_format = header.read_backing_format(device, header_bytes)?;
        let (count, at) = (u32_be(&bytes, 60), u64_be(&bytes, 64));
        (header.snapshots, header.snapshot_table) = read_snapshots(device, count, at)?;
        Ok(header)
    }

    /// Reads the header extension that names the format of the backing file.
    fn read_backing_format(
        &self,
        device: &dyn BlockDevice,
        mut at: u64,
    ) -> io::Result<Option<String>> {
        const BACKING_FORMAT: u32 = 0xe279_2aca;
        let end = (1u64 << self.cluster_bits).min(device.size_bytes());
        // The loop ends: every extension takes at least the eight bytes of its own header.
        while at + 8 <= end {
            let bytes = read(device, at, 8, 8)?;
            let (kind, len) = (u32_be(&bytes, 0), u64::from(u32_be(&bytes, 4)));
            match kind {
                0 => break,
                BACKING_FORMAT => return Ok(Some(text(&read(device, at + 8, len, 64)?)?)),
                _ => at += 8 + len.next_multiple_of(8),
            }
        }
        Ok(None)
    }

    /// The snapshot with this id or name.
    #[must_use]
    pub fn snapshot(&self, called: &str) -> Option<&Qcow2Snapshot> {
        let is_called = |one: &&Qcow2Snapshot| one.name == called || one.id == called;
        self.snapshots.iter().find(is_called)
    }

    /// Refuses features that this crate does not know, and tables whose size is impossible.
    pub(super) fn check(&self, file_bytes: u64, is_writable: bool) -> io::Result<()> {
        let convert = |what: &str| {
            unsupported(format!(
                "a qcow2 with {what} is not read here: qemu-img convert -O qcow2 IN OUT makes one \
                 without"
            ))
        };
        if self.is_encrypted {
            return Err(unsupported(
                "a qcow2 with encryption is not read here: qemu-img convert --object \
                 secret,id=key,file=PASSWORD_FILE --image-opts \
                 driver=qcow2,encrypt.key-secret=key,file.filename=IN -O qcow2 OUT makes one \
                 without",
            ));
        }
        if self.features & EXTERNAL_DATA != 0 {
            return Err(convert("its data in another file"));
        }
        if !matches!(self.compression, DEFLATE | ZSTD) {
            return Err(convert("a compression that is not known"));
        }
        if self.has_subclusters() && self.cluster_bits < SUBCLUSTERED_BITS_MIN {
            return Err(invalid("its clusters are too small for extended L2 entries"));
        }
        if self.features & CORRUPT != 0 && is_writable {
            let what = "the image is marked as corrupt: qemu-img check -r all FILE repairs it";
            return Err(invalid(what));
        }
        if self.features & DIRTY != 0 && is_writable {
            let what = "the image was not closed: qemu-img check -r all FILE repairs it";
            return Err(invalid(what));
        }
        let known = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION_TYPE | EXTENDED_L2;
        if self.features & !known != 0 {
            return Err(convert("features that are not known"));
        }
        if self.refcount_order > 6 {
            return Err(invalid("its reference counts have an impossible size"));
        }
        let cluster = 1u64 << self.cluster_bits;
        let refcount_bytes = u64::from(self.refcount_clusters) << self.cluster_bits;
        if refcount_bytes > REFCOUNT_TABLE_BYTES_MAX.max(cluster) {
            return Err(invalid("its table of reference counts is impossibly large"));
        }
        if !self.refcount_offset.is_multiple_of(cluster) {
            return Err(invalid("its table of reference counts is not at a cluster"));
        }
        self.check_l1(self.size_bytes, self.l1_entries, self.l1_offset, file_bytes)
    }

    fn has_subclusters(&self) -> bool {
        self.features & EXTENDED_L2 != 0
    }

    /// The numbers of the image. With `snapshot` they are for reading the snapshot instead of the
    /// disk.
    pub(super) fn layout(&self, snapshot: Option<&Qcow2Snapshot>) -> Qcow2Geometry {
        let (size_bytes, l1_offset, l1_entries) = match snapshot {
            Some(snapshot) => (snapshot.size_bytes, snapshot.l1_offset, snapshot.l1_entries),
            None => (self.size_bytes, self.l1_offset, self.l1_entries),
        };
        Qcow2Geometry {
            version: self.version,
            size_bytes,
            cluster_bits: self.cluster_bits,
            has_subclusters: self.has_subclusters(),
            has_zstd: self.compression == ZSTD,
            l1_offset,
            l1_entries: l1_entries.into(),
            count_order: self.refcount_order,
            count_table_offset: self.refcount_offset,
            count_table_bytes: u64::from(self.refcount_clusters) << self.cluster_bits,
        }
    }

    /// The bytes of the file that the table of snapshots and the L1 tables of the snapshots take.
    pub(super) fn snapshot_tables(&self) -> Vec<Range<u64>> {
        let l1 = |one: &Qcow2Snapshot| {
            one.l1_offset..one.l1_offset.saturating_add(u64::from(one.l1_entries) * 8)
        };
        self.snapshots.iter().map(l1).chain([self.snapshot_table.clone()]).collect()
    }

    /// Clears the autoclear features before the first write: data that depends on them (bitmaps of
    /// changed blocks, and whatever this crate does not know) does not follow our writes.
    pub(super) fn clear_autoclear(&self, device: &dyn BlockDevice) -> io::Result<()> {
        if self.autoclear == 0 {
            return Ok(());
        }
        device.write_at(AUTOCLEAR, &[0; 8])?;
        device.flush()
    }

    fn check_l1(&self, size: u64, entries: u32, offset: u64, file_bytes: u64) -> io::Result<()> {
        let table = u64::from(entries) * 8;
        // One L1 entry covers as many data clusters as one L2 table (a cluster) has entries.
        let entry_bits = if self.has_subclusters() { 4 } else { 3 };
        let covered = u128::from(entries) << (2 * self.cluster_bits - entry_bits);
        let is_there = offset.checked_add(table).is_some_and(|end| end <= file_bytes)
            && offset.trailing_zeros() >= self.cluster_bits;
        if table > TABLE_BYTES_MAX || covered < u128::from(size) || !is_there && size != 0 {
            return Err(invalid("its table of clusters does not fit its size or the file"));
        }
        Ok(())
    }

    /// Refuses a snapshot whose L1 table does not fit its size or the file.
    pub(super) fn check_snapshot(
        &self,
        snapshot: &Qcow2Snapshot,
        file_bytes: u64,
    ) -> io::Result<()> {
        self.check_l1(snapshot.size_bytes, snapshot.l1_entries, snapshot.l1_offset, file_bytes)
    }
}

/// Reads `count` snapshots from byte `at` on. Returns them and the bytes of the file that they
/// take.
fn read_snapshots(
    device: &dyn BlockDevice,
    count: u32,
    mut at: u64,
) -> io::Result<(Vec<Qcow2Snapshot>, Range<u64>)> {
    const ENTRY_BYTES: u64 = 40;
    if count > SNAPSHOTS_MAX {
        return Err(invalid("it has impossibly many snapshots"));
    }
    let (mut snapshots, start) = (Vec::new(), at);
    for _ in 0..count {
        let bytes = read(device, at, ENTRY_BYTES, ENTRY_BYTES)?;
        let half = |at: usize| u64::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]));
        let (id_bytes, name_bytes) = (half(12), half(14));
        let extra_bytes = u64::from(u32_be(&bytes, 36));
        let rest = extra_bytes + id_bytes + name_bytes;
        let rest = read(device, at + ENTRY_BYTES, rest, SNAPSHOT_BYTES_MAX * 2)?;
        let (extra, names) = rest.split_at(usize::try_from(extra_bytes).map_err(io::Error::other)?);
        let (id, name) = names.split_at(usize::try_from(id_bytes).map_err(io::Error::other)?);
        // In version 2 a snapshot has no size of its own: it has the size of the disk.
        let size_bytes =
            if extra.len() >= 16 { u64_be(extra, 8) } else { u64_be(&read(device, 24, 8, 8)?, 0) };
        snapshots.push(Qcow2Snapshot {
            id: text(id)?,
            name: text(name)?,
            size_bytes,
            l1_entries: u32_be(&bytes, 8),
            l1_offset: u64_be(&bytes, 0),
        });
        at += (ENTRY_BYTES + rest.len() as u64).next_multiple_of(8);
    }
    Ok((snapshots, start..at))
}

fn text(bytes: &[u8]) -> io::Result<String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| invalid("a name in its header is no text"))
}
