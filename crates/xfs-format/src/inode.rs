//! Inodes: the core, and the two forks behind it.
//!
//! ```text
//! core | data fork                     | attribute fork
//!      | from 176 (v1 and v2: from 100) | from there + 8 * forkoff, if that is not 0
//! ```
//!
//! V5 volumes have v3 inodes only, V4 volumes v1 and v2. Only v3 has the fields from byte 100 on.

mod check;

use std::ops::Range;

use offshoot_vfs::Structure;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use check::{XfsFork, XfsInode};

use crate::geometry::XfsLayout;
use crate::layout::{ensure, view};
use crate::symlink::MAX_LEN;
use crate::{AgIno, AgNumber, Ino, Lsn, Malformed, U16, U32, U64, XfsGeometry, csum};

const STRUCTURE: Structure = Structure::InodeCore;

/// The value of the `magic` field.
pub const INODE_MAGIC: [u8; 2] = *b"IN";

/// The place of the checksum, and the length of the core of v1 and v2.
pub const INODE_CRC: usize = 100;

/// Where the data of a directory ends: the leaves begin there.
const DIRECTORY_DATA_END: u64 = 32 << 30;

/// An inode core as it is stored.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the book")]
pub struct XfsInodeCore {
    pub magic: [u8; 2],
    pub mode: U16,
    pub version: u8,
    pub format: u8,
    /// The links of v1; in v3 the type of a metadata inode.
    pub onlink: U16,
    pub uid: U32,
    pub gid: U32,
    pub nlink: U32,
    pub projid_lo: U16,
    pub projid_hi: U16,
    /// The extents of the data fork, if the inode has `NREXT64`; else zero in v3.
    pub big_nextents: U64,
    pub atime: U64,
    pub mtime: U64,
    pub ctime: U64,
    pub size: U64,
    pub nblocks: U64,
    pub extsize: U32,
    /// The extents of the data fork; with `NREXT64` those of the attribute fork.
    pub nextents: U32,
    /// The extents of the attribute fork; with `NREXT64` zero.
    pub anextents: U16,
    pub forkoff: u8,
    pub aformat: u8,
    pub dmevmask: U32,
    pub dmstate: U16,
    pub flags: U16,
    pub generation: U32,
    pub next_unlinked: U32,
    pub crc: [u8; 4],
    pub changecount: U64,
    pub lsn: U64,
    pub flags2: U64,
    pub cowextsize: U32,
    pub pad: [u8; 12],
    pub crtime: U64,
    pub ino: U64,
    pub uuid: [u8; 16],
}

bitflags::bitflags! {
    /// The flags in `flags`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsInodeFlags: u16 {
        /// The data is on the realtime device.
        const REALTIME = 0x1;
        /// Blocks were preallocated.
        const PREALLOC = 0x2;
        /// The realtime bitmap has its new form.
        const NEWRTBM = 0x4;
        /// Nothing changes the file.
        const IMMUTABLE = 0x8;
        /// Writes only append.
        const APPEND = 0x10;
        /// All writes are synchronous.
        const SYNC = 0x20;
        /// Reads leave the access time.
        const NOATIME = 0x40;
        /// Backups leave out the file.
        const NODUMP = 0x80;
        /// New files in the directory get `REALTIME`.
        const RTINHERIT = 0x100;
        /// New files in the directory get its project.
        const PROJINHERIT = 0x200;
        /// No symbolic links in the directory.
        const NOSYMLINKS = 0x400;
        /// `extsize` is a hint for allocations.
        const EXTSIZE = 0x800;
        /// New files in the directory get its `extsize`.
        const EXTSZINHERIT = 0x1000;
        /// `xfs_fsr` leaves out the file.
        const NODEFRAG = 0x2000;
        /// Files of the directory are allocated in streams.
        const FILESTREAM = 0x4000;
    }

    /// The flags in `flags2` of v3.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsInodeFlags2: u64 {
        /// Access without the page cache.
        const DAX = 0x1;
        /// Some blocks are or were shared.
        const REFLINK = 0x2;
        /// `cowextsize` is a hint for copy-on-write.
        const COWEXTSIZE = 0x4;
        /// Times are nanoseconds since 1901.
        const BIGTIME = 0x8;
        /// Extents are counted in wider fields.
        const NREXT64 = 0x10;
        /// The inode belongs to the metadata directory tree.
        const METADATA = 0x20;
    }
}

/// How a fork holds its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum XfsForkFormat {
    /// The number of a device.
    Device = 0,
    /// The contents themselves.
    Local = 1,
    /// A list of extents.
    Extents = 2,
    /// The root of a tree of extents.
    Btree = 3,
    /// The root of a tree of metadata of the realtime device.
    MetaBtree = 5,
}

impl XfsForkFormat {
    /// The format with this number; `None` when it has no meaning.
    #[must_use]
    pub fn from_disk(number: u8) -> Option<Self> {
        let all = [Self::Device, Self::Local, Self::Extents, Self::Btree, Self::MetaBtree];
        all.into_iter().find(|format| *format as u8 == number)
    }
}

/// The types of files in `mode`.
pub mod file_type {
    /// The bits of the type.
    pub const MASK: u16 = 0o170_000;
    /// A pipe.
    pub const FIFO: u16 = 0o010_000;
    /// A character device.
    pub const CHARACTER: u16 = 0o020_000;
    /// A directory.
    pub const DIRECTORY: u16 = 0o040_000;
    /// A block device.
    pub const BLOCK: u16 = 0o060_000;
    /// A regular file.
    pub const REGULAR: u16 = 0o100_000;
    /// A symbolic link.
    pub const SYMLINK: u16 = 0o120_000;
    /// A socket.
    pub const SOCKET: u16 = 0o140_000;
}

/// A time: seconds since 1970, and nanoseconds below 1,000,000,000.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct XfsTime {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds of the second.
    pub nanoseconds: u32,
}

const NANOSECONDS: u64 = 1_000_000_000;

/// The seconds from 1901-12-13T20:45:52Z, where wide times begin, to 1970.
const WIDE_EPOCH: i64 = 1 << 31;

impl XfsTime {
    /// The time that a field holds, as nanoseconds since 1901 (`is_wide`), or as 32 bits each of
    /// seconds and nanoseconds.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "two halves, and a remainder")]
    pub fn from_disk(field: u64, is_wide: bool) -> Self {
        if is_wide {
            let seconds = (field / NANOSECONDS).cast_signed() - WIDE_EPOCH;
            return Self { seconds, nanoseconds: (field % NANOSECONDS) as u32 };
        }
        let seconds = i64::from(((field >> 32) as u32).cast_signed());
        Self { seconds, nanoseconds: (field as u32).min(NANOSECONDS as u32 - 1) }
    }

    /// The field that holds the time, or the nearest time that it can hold.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "clamped to 32 bits")]
    pub fn to_disk(self, is_wide: bool) -> u64 {
        let nanoseconds = u64::from(self.nanoseconds).min(NANOSECONDS - 1);
        if is_wide {
            let seconds = self.seconds.saturating_add(WIDE_EPOCH);
            return u64::try_from(seconds).map_or(0, |seconds| {
                seconds.saturating_mul(NANOSECONDS).saturating_add(nanoseconds)
            });
        }
        let seconds = self.seconds.clamp(i32::MIN.into(), i32::MAX.into()) as i32;
        u64::from(seconds.cast_unsigned()) << 32 | nanoseconds
    }
}

/// Where the forks lie in the bytes of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsForkRoom {
    /// The data fork.
    pub data: Range<usize>,
    /// The attribute fork; empty when there is none.
    pub attributes: Range<usize>,
}

/// The major and the minor number of a device. The field has 14 and 18 bits for them.
#[must_use]
pub fn device_number(field: u32) -> (u32, u32) {
    (field >> 18 & 0x3fff, field & 0x3_ffff)
}

/// The field for a device; `None` when the numbers do not fit.
#[must_use]
pub fn device_field(major: u32, minor: u32) -> Option<u32> {
    (major <= 0x3fff && minor <= 0x3_ffff).then_some(major << 18 | minor)
}

impl XfsInodeCore {
    /// The bytes of the core on a volume.
    #[must_use]
    pub fn len(geometry: &XfsGeometry) -> usize {
        if geometry.has_checksums() { size_of::<Self>() } else { INODE_CRC }
    }

    /// The bytes of an inode behind its core: the literal area, which its forks share.
    #[must_use]
    pub fn literal_bytes(geometry: &XfsGeometry) -> usize {
        geometry.inode_size() - Self::len(geometry)
    }

    /// Views the core of an inode, whose bytes may be those of any.
    ///
    /// # Errors
    /// When there are too few of them.
    pub fn view(inode: &[u8]) -> Result<&Self, Malformed> {
        view(STRUCTURE, inode)
    }

    /// A free inode, as a new chunk is filled with. Version 2 on a V4 volume.
    #[must_use]
    pub fn fresh(geometry: &XfsGeometry, ino: Ino, generation: u32) -> Self {
        let is_v3 = geometry.has_checksums();
        let core = Self {
            magic: INODE_MAGIC,
            version: if is_v3 { 3 } else { 2 },
            generation: generation.into(),
            next_unlinked: AgIno::NULL.0.into(),
            ..zerocopy::FromZeros::new_zeroed()
        };
        if is_v3 {
            Self { ino: ino.0.into(), uuid: geometry.uuid.into_bytes(), ..core }
        } else {
            core
        }
    }

    /// Writes the core over the start of an inode, and seals it.
    ///
    /// # Panics
    ///
    /// When `inode` is not as long as an inode.
    pub fn write(&self, inode: &mut [u8], geometry: &XfsGeometry) {
        self.put(inode, geometry);
        seal(inode, geometry);
    }

    /// Writes the core over the start of an inode whose checksum is still to be written.
    ///
    /// # Panics
    ///
    /// When `inode` is not as long as an inode.
    pub fn put(&self, inode: &mut [u8], geometry: &XfsGeometry) {
        let len = Self::len(geometry);
        inode[..len].copy_from_slice(&self.as_bytes()[..len]);
    }

    /// The flags.
    #[must_use]
    pub fn flags(&self) -> XfsInodeFlags {
        XfsInodeFlags::from_bits_retain(self.flags.get())
    }

    /// The flags of v3; none in an older inode.
    #[must_use]
    pub fn flags2(&self) -> XfsInodeFlags2 {
        let bits = if self.version == 3 { self.flags2.get() } else { 0 };
        XfsInodeFlags2::from_bits_retain(bits)
    }

    /// The links.
    #[must_use]
    pub fn links(&self) -> u32 {
        if self.version == 1 { self.onlink.get().into() } else { self.nlink.get() }
    }

    /// The project; 0 in v1, which has none.
    #[must_use]
    pub fn project(&self) -> u32 {
        let project = u32::from(self.projid_hi.get()) << 16 | u32::from(self.projid_lo.get());
        if self.version == 1 { 0 } else { project }
    }

    /// The type of the file in `mode`: see [`file_type`].
    #[must_use]
    pub fn file_type(&self) -> u16 {
        self.mode.get() & file_type::MASK
    }

    /// Whether no file has the inode.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.mode.get() == 0
    }

    /// The extents of the data fork and of the attribute fork.
    #[must_use]
    pub fn extent_counts(&self) -> (u64, u32) {
        if self.flags2().contains(XfsInodeFlags2::NREXT64) {
            (self.big_nextents.get(), self.nextents.get())
        } else {
            (self.nextents.get().into(), self.anextents.get().into())
        }
    }

    /// Sets the extents of the data fork and of the attribute fork, and returns whether the fields
    /// can hold them. Nothing is changed if not.
    pub fn set_extent_counts(&mut self, data: u64, attributes: u32) -> bool {
        if self.flags2().contains(XfsInodeFlags2::NREXT64) {
            let fits = data < 1 << 48;
            if fits {
                self.big_nextents = data.into();
                self.nextents = attributes.into();
                self.anextents = U16::ZERO;
            }
            return fits;
        }
        let (Ok(data), Ok(attributes)) = (i32::try_from(data), i16::try_from(attributes)) else {
            return false;
        };
        self.nextents = data.cast_unsigned().into();
        self.anextents = attributes.cast_unsigned().into();
        // Older versions count there how often they were flushed.
        if self.version == 3 {
            self.big_nextents = U64::ZERO;
        }
        true
    }

    /// The time that `field`, one of its fields, holds.
    #[must_use]
    pub fn time(&self, field: U64) -> XfsTime {
        XfsTime::from_disk(field.get(), self.flags2().contains(XfsInodeFlags2::BIGTIME))
    }

    /// The value for one of its fields that holds `time`.
    #[must_use]
    pub fn time_field(&self, time: XfsTime) -> U64 {
        time.to_disk(self.flags2().contains(XfsInodeFlags2::BIGTIME)).into()
    }

    /// The LSN of the last change; none before v3.
    #[must_use]
    pub fn lsn(&self) -> Option<Lsn> {
        (self.version == 3).then_some(Lsn(self.lsn.get()))
    }

    /// Where the forks lie.
    ///
    /// # Errors
    /// The attribute fork begins behind the end of the inode.
    pub fn fork_room(&self, geometry: &XfsGeometry) -> Result<XfsForkRoom, Malformed> {
        let (core, end) = (Self::len(geometry), geometry.inode_size());
        let forkoff = usize::from(self.forkoff) * 8;
        let split = if forkoff == 0 { end } else { core + forkoff };
        ensure!(
            STRUCTURE,
            split < end || forkoff == 0,
            "an attribute fork at byte {split} of {end}"
        );
        Ok(XfsForkRoom { data: core..split, attributes: split..end })
    }

    /// The next inode in the list of unlinked ones of group `ag`.
    ///
    /// # Errors
    /// The group has no such inode.
    pub fn next_unlinked(
        &self,
        geometry: &XfsGeometry,
        ag: AgNumber,
    ) -> Result<Option<AgIno>, Malformed> {
        let next = AgIno(self.next_unlinked.get());
        if next == AgIno::NULL {
            return Ok(None);
        }
        ensure!(STRUCTURE, geometry.has_inode(ag, next), "next unlinked inode {next}");
        Ok(Some(next))
    }

    /// Makes `next` the next inode in the list of unlinked ones.
    pub fn set_next_unlinked(&mut self, next: Option<AgIno>) {
        self.next_unlinked = next.unwrap_or(AgIno::NULL).0.into();
    }

    /// Checks that the volume has the features that `flags2` of an inode in use needs, and that the
    /// count of extents that does not count is zero.
    pub(crate) fn verify_flags2(&self, geometry: &XfsGeometry) -> Result<(), Malformed> {
        use XfsInodeFlags2 as Flags;
        if self.version != 3 || self.is_free() {
            return Ok(());
        }
        let flags = self.flags2();
        let needs = [
            (Flags::REFLINK | Flags::COWEXTSIZE, XfsLayout::SHARED_BLOCKS),
            (Flags::BIGTIME, XfsLayout::BIG_TIMES),
            (Flags::NREXT64, XfsLayout::WIDE_COUNTS),
            (Flags::METADATA, XfsLayout::METADATA_TREE),
        ];
        let has_features = needs
            .iter()
            .all(|(flag, feature)| !flags.intersects(*flag) || geometry.layout.contains(*feature));
        let may_share = self.file_type() == file_type::REGULAR || !flags.contains(Flags::REFLINK);
        ensure!(
            STRUCTURE,
            has_features && may_share,
            "flags {:#x} in mode {:o} of this volume",
            self.flags2,
            self.mode
        );
        let unused = if flags.contains(Flags::NREXT64) {
            self.anextents.get().into()
        } else {
            self.big_nextents.get()
        };
        ensure!(STRUCTURE, unused == 0, "{unused} in the count of extents that is not in use");
        Ok(())
    }

    /// Checks that the size and the format suit the type of the file.
    fn verify_type(&self) -> Result<XfsForkFormat, Malformed> {
        use XfsForkFormat as Format;
        let (mode, size) = (self.mode.get(), self.size.get());
        let format = Format::from_disk(self.format);
        let listed = matches!(format, Some(Format::Extents | Format::Btree));
        let is_linked = self.links() > 0;
        let (suits, most) = match self.file_type() {
            file_type::REGULAR => {
                let is_metadata = self.flags2().contains(XfsInodeFlags2::METADATA);
                (listed || format == Some(Format::MetaBtree) && is_metadata, u64::MAX >> 1)
            }
            file_type::DIRECTORY => (listed || format == Some(Format::Local), DIRECTORY_DATA_END),
            file_type::SYMLINK => (listed || format == Some(Format::Local), MAX_LEN as u64),
            file_type::FIFO | file_type::CHARACTER | file_type::BLOCK | file_type::SOCKET => {
                (format == Some(Format::Device), u64::MAX >> 1)
            }
            _ => (false, 0),
        };
        // An unlinked directory or symbolic link may be on its way to become a free inode.
        let is_named = matches!(self.file_type(), file_type::DIRECTORY | file_type::SYMLINK);
        let least = u64::from(is_named && is_linked);
        let Some(format) = format.filter(|_| suits) else {
            return Err(Malformed::new(
                STRUCTURE,
                format!("mode {mode:o} with a data fork of format {}", self.format),
            ));
        };
        ensure!(STRUCTURE, (least..=most).contains(&size), "mode {mode:o} with {size} bytes");
        Ok(format)
    }
}

/// Stores the checksum of an inode, which V4 volumes do not have.
///
/// # Panics
///
/// When `inode` is shorter than a core.
pub fn seal(inode: &mut [u8], geometry: &XfsGeometry) {
    if geometry.has_checksums() {
        csum::store(inode, INODE_CRC);
    }
}
