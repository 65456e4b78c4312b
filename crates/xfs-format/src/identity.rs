//! Where each kind of unit says what it is: the sectors, blocks and inodes of V5 volumes.
//!
//! A replay compares the LSN that a unit carries with that of the log, and writes the new one with
//! the checksum. It knows the kind of a unit by its magic number alone.

use std::mem::offset_of;

use offshoot_vfs::Structure;
use uuid::Uuid;

use crate::btree::{LongBlockHeader, ShortBlockHeader};
use crate::da::{DaInfo, DaStamp};
use crate::features::XfsIncompat;
use crate::group::{Agf, AgflHeader, Agi};
use crate::inode::XfsInodeCore;
use crate::layout::{ensure, number};
use crate::remote::RemoteHeader;
use crate::superblock::XfsSuperblockFields;
use crate::{BasicBlock, Lsn, Malformed, XfsGeometry, csum};

/// The offsets of the fields with which a kind of unit says what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsIdentity {
    /// The checksum.
    pub crc: usize,
    /// The LSN of the last change.
    pub lsn: usize,
    /// The id of the volume.
    pub uuid: usize,
    /// The place on the device, where the unit says it.
    pub blkno: Option<usize>,
    /// The group or the inode, and the bytes of that number, where the unit says it.
    pub owner: Option<(usize, usize)>,
}

macro_rules! identity {
    ($type:ty, $blkno:expr, $owner:expr) => {
        XfsIdentity {
            crc: offset_of!($type, crc),
            lsn: offset_of!($type, lsn),
            uuid: offset_of!($type, uuid),
            blkno: $blkno,
            owner: $owner,
        }
    };
    ($type:ty, $owner:ident $len:literal) => {
        identity!($type, Some(offset_of!($type, blkno)), Some((offset_of!($type, $owner), $len)))
    };
}

/// That of a block of a directory or an attribute fork whose stamp begins at `start`.
const fn stamped(start: usize) -> XfsIdentity {
    XfsIdentity {
        crc: start + offset_of!(DaStamp, crc),
        lsn: start + offset_of!(DaStamp, lsn),
        uuid: start + offset_of!(DaStamp, uuid),
        blkno: Some(start + offset_of!(DaStamp, blkno)),
        owner: Some((start + offset_of!(DaStamp, owner), 8)),
    }
}

/// The magic number of a remote value of an attribute.
const VALUE_MAGIC: &[u8] = b"XARM";

impl XfsIdentity {
    /// A superblock.
    pub const SUPERBLOCK: Self = identity!(XfsSuperblockFields, None, None);
    /// An AGF.
    pub const AGF: Self = identity!(Agf, None, Some((offset_of!(Agf, seqno), 4)));
    /// An AGI.
    pub const AGI: Self = identity!(Agi, None, Some((offset_of!(Agi, seqno), 4)));
    /// An AGFL.
    pub const AGFL: Self = identity!(AgflHeader, None, Some((offset_of!(AgflHeader, seqno), 4)));
    /// A block of a tree of a group.
    pub const SHORT_BLOCK: Self = identity!(ShortBlockHeader, owner 4);
    /// A block of the tree of extents of a file.
    pub const LONG_BLOCK: Self = identity!(LongBlockHeader, owner 8);
    /// A block with entries of a directory, or with its free space.
    pub const DIRECTORY: Self = stamped(4);
    /// A node or a leaf of a directory or of an attribute fork.
    pub const NODE: Self = stamped(size_of::<DaInfo>());
    /// A block of a remote value or of the target of a link.
    pub const REMOTE: Self = identity!(RemoteHeader, owner 8);
    /// An inode.
    pub const INODE: Self = identity!(XfsInodeCore, None, Some((offset_of!(XfsInodeCore, ino), 8)));

    /// The magic numbers of V5 volumes, and where they lie.
    const MAGICS: &[(usize, &[&[u8]], Self)] = &[
        (0, &[b"XFSB"], Self::SUPERBLOCK),
        (0, &[b"XAGF"], Self::AGF),
        (0, &[b"XAGI"], Self::AGI),
        (0, &[b"XAFL"], Self::AGFL),
        (0, &[b"AB3B", b"AB3C", b"IAB3", b"FIB3", b"RMB3", b"R3FC"], Self::SHORT_BLOCK),
        (0, &[b"BMA3"], Self::LONG_BLOCK),
        (0, &[b"XDB3", b"XDD3", b"XDF3"], Self::DIRECTORY),
        (0, &[VALUE_MAGIC, b"XSLM"], Self::REMOTE),
        // A node begins with a block number, an inode has its owner where nodes have their magic.
        (0, &[b"IN"], Self::INODE),
        (
            offset_of!(DaInfo, magic),
            &[&[0x3d, 0xf1], &[0x3d, 0xff], &[0x3e, 0xbe], &[0x3b, 0xee]],
            Self::NODE,
        ),
    ];

    /// That of the unit in `unit`, by its magic number; `None` on a V4 volume, whose units carry
    /// neither a checksum nor an LSN, and for a unit without one, such as user data.
    #[must_use]
    pub fn of_magic(geometry: &XfsGeometry, unit: &[u8]) -> Option<Self> {
        let has = |at: usize, magics: &[&[u8]]| {
            unit.get(at..).is_some_and(|rest| magics.iter().any(|magic| rest.starts_with(magic)))
        };
        let found = Self::MAGICS.iter().find(|(at, magics, _)| has(*at, magics));
        found.filter(|_| geometry.has_checksums()).map(|(_, _, identity)| *identity)
    }

    /// The bytes that hold all these fields.
    fn end(&self) -> usize {
        let ends = [self.crc + csum::LEN, self.lsn + 8, self.uuid + 16];
        let place = self.blkno.map_or(0, |at| at + 8);
        let owner = self.owner.map_or(0, |(at, len)| at + len);
        ends.into_iter().chain([place, owner]).max().unwrap_or(0)
    }

    /// The LSN that a unit carries; `None` for one that is too short.
    #[must_use]
    pub fn lsn_of(&self, unit: &[u8]) -> Option<Lsn> {
        unit.get(self.lsn..self.lsn + 8).map(|lsn| Lsn(number(lsn, 0, 8)))
    }

    /// The id of the volume that blocks of its volume carry; `None` for a unit that is too short.
    /// A superblock with `meta_uuid` has it there.
    #[must_use]
    pub fn uuid_of(&self, unit: &[u8]) -> Option<Uuid> {
        let mut at = self.uuid;
        if *self == Self::SUPERBLOCK {
            let incompat = number(unit, offset_of!(XfsSuperblockFields, incompat), 4);
            if incompat & u64::from(XfsIncompat::META_UUID.bits()) != 0 {
                at = offset_of!(XfsSuperblockFields, meta_uuid);
            }
        }
        Uuid::from_slice(unit.get(at..at + 16)?).ok()
    }

    /// Writes the LSN of the last change, and then the checksum. A value of an attribute keeps
    /// [`Lsn::NONE`], because it is never logged. Returns whether the unit is long enough; nothing
    /// is changed if not.
    pub fn seal(&self, unit: &mut [u8], lsn: Lsn) -> bool {
        if unit.len() < self.end() {
            return false;
        }
        let lsn = if unit.starts_with(VALUE_MAGIC) { Lsn::NONE } else { lsn };
        unit[self.lsn..self.lsn + 8].copy_from_slice(&lsn.0.to_be_bytes());
        csum::store(unit, self.crc);
        true
    }

    /// Proves the checksum and the volume of a unit, and what the caller knows of its place and
    /// its owner.
    pub(crate) fn verify(
        &self,
        structure: Structure,
        unit: &[u8],
        geometry: &XfsGeometry,
        place: Option<BasicBlock>,
        owner: Option<u64>,
    ) -> Result<(), Malformed> {
        let is_right = unit.len() < self.end() || csum::is_right(unit, self.crc);
        ensure!(structure, is_right, "its checksum is wrong");
        self.verify_unsealed(structure, unit, geometry, place, owner)
    }

    /// Proves the same of a unit whose checksum is still to be written.
    pub(crate) fn verify_unsealed(
        &self,
        structure: Structure,
        unit: &[u8],
        geometry: &XfsGeometry,
        place: Option<BasicBlock>,
        owner: Option<u64>,
    ) -> Result<(), Malformed> {
        let len = unit.len();
        ensure!(structure, len >= self.end(), "{len} bytes, but it needs {}", self.end());
        let uuid = self.uuid_of(unit).unwrap_or_default();
        ensure!(
            structure,
            uuid == geometry.uuid,
            "filesystem id {} expected, {uuid} found",
            geometry.uuid
        );
        if let (Some(place), Some(at)) = (place, self.blkno) {
            let found = number(unit, at, 8);
            ensure!(structure, found == place.0, "place {place} expected, {found} found");
        }
        if let (Some(owner), Some((at, len))) = (owner, self.owner) {
            let found = number(unit, at, len);
            ensure!(structure, found == owner, "owner {owner} expected, {found} found");
        }
        Ok(())
    }
}
