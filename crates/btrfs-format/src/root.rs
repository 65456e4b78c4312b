//! Roots of trees, and the links between subvolumes.

use offshoot_vfs::Structure;
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::inode::{InodeItem, Timespec};
use crate::key::DiskKey;
use crate::view::{take, view};
use crate::{Generation, Logical, Malformed};

/// The root of a tree. 439 bytes; volumes of very old kernels have the first 239 only.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the format's documentation")]
pub struct RootItem {
    pub inode: InodeItem,
    pub generation: U64,
    pub root_dirid: U64,
    pub bytenr: U64,
    pub byte_limit: U64,
    pub bytes_used: U64,
    pub last_snapshot: U64,
    pub flags: U64,
    pub refs: U32,
    pub drop_progress: DiskKey,
    pub drop_level: u8,
    pub level: u8,
    pub generation_v2: U64,
    pub uuid: [u8; 16],
    pub parent_uuid: [u8; 16],
    pub received_uuid: [u8; 16],
    pub ctransid: U64,
    pub otransid: U64,
    pub stransid: U64,
    pub rtransid: U64,
    pub ctime: Timespec,
    pub otime: Timespec,
    pub stime: Timespec,
    pub rtime: Timespec,
    pub reserved: [U64; 8],
}

/// The subvolume is read-only.
pub const ROOT_SUBVOL_RDONLY: u64 = 1 << 0;
/// The subvolume was deleted, and its tree must still be dropped.
pub const ROOT_SUBVOL_DEAD: u64 = 1 << 48;

/// The size of a root item that a kernel before 3.6 wrote, in bytes.
pub const LEGACY_ROOT_ITEM_SIZE: usize = 239;

impl RootItem {
    /// Parses a root item of either size. The fields that only the long one has are zero in two
    /// cases: the item is short, or an old kernel was the last to write it. Such a kernel updates
    /// `generation` and leaves `generation_v2`, so the two differ.
    ///
    /// # Errors
    /// When the item has neither size.
    pub fn parse(data: &[u8]) -> Result<Self, Malformed> {
        let mut item = Self::new_zeroed();
        if data.len() != size_of::<Self>() && data.len() != LEGACY_ROOT_ITEM_SIZE {
            return Err(Malformed::new(Structure::RootItem, format!("{} bytes", data.len())));
        }
        item.as_mut_bytes()[..data.len()].copy_from_slice(data);
        if item.generation_v2 != item.generation {
            item.as_mut_bytes()[LEGACY_ROOT_ITEM_SIZE..].fill(0);
        }
        Ok(item)
    }

    /// The address of the root block.
    #[must_use]
    pub fn logical(&self) -> Logical {
        Logical(self.bytenr.get())
    }

    /// The generation of the root block.
    #[must_use]
    pub fn generation(&self) -> Generation {
        Generation(self.generation.get())
    }

    /// Whether the subvolume is read-only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.flags.get() & ROOT_SUBVOL_RDONLY != 0
    }

    /// Whether the subvolume was deleted.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.flags.get() & ROOT_SUBVOL_DEAD != 0 || self.refs.get() == 0
    }

    /// The UUID in `bytes`; `None` when it is all zero.
    #[must_use]
    pub fn uuid(bytes: [u8; 16]) -> Option<Uuid> {
        Some(Uuid::from_bytes(bytes)).filter(|uuid| !uuid.is_nil())
    }
}

/// The fixed part of a ROOT_REF or ROOT_BACKREF. 18 bytes; the name follows.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RootRefItem {
    /// The inode number of the directory that holds the subvolume.
    pub dirid: U64,
    /// The index of its entry in that directory.
    pub sequence: U64,
    /// The length of the name.
    pub name_len: U16,
}

/// A parsed ROOT_REF or ROOT_BACKREF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RootRef<'a> {
    /// The inode number of the directory that holds the subvolume.
    pub dirid: u64,
    /// The index of its entry in that directory.
    pub sequence: u64,
    /// Its name in that directory.
    pub name: &'a [u8],
}

impl<'a> RootRef<'a> {
    /// Parses a ROOT_REF or ROOT_BACKREF.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let (item, rest) = view::<RootRefItem>(Structure::RootRef, data)?;
        let (name, _) = take(Structure::RootRef, "name", rest, usize::from(item.name_len.get()))?;
        Ok(Self { dirid: item.dirid.get(), sequence: item.sequence.get(), name })
    }
}
