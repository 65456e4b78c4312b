//! Blocks of attribute values and symlink targets that do not fit where they belong.
//!
//! On V5 a header stands in front of each part of the value. A value of an attribute has a part in
//! each block. The target of a link has a part in each extent, which may be several blocks, with
//! one checksum (seen). On V4 the value fills the blocks.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::attr::MAX_VALUE;
use crate::da::DaExpected;
use crate::identity::XfsIdentity;
use crate::symlink::MAX_LEN;
use crate::{Lsn, Malformed, Structure, U32, U64, XfsGeometry};

/// The header of a block of a value. 56 bytes.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RemoteHeader {
    /// `XARM` or `XSLM`.
    pub magic: [u8; 4],
    /// The offset in the value.
    pub offset: U32,
    /// The bytes of the value in this block.
    pub bytes: U32,
    /// The checksum, little-endian.
    pub crc: [u8; 4],
    /// The id of the volume.
    pub uuid: [u8; 16],
    /// The inode.
    pub owner: U64,
    /// The place of the block on the device.
    pub blkno: U64,
    /// The place in the log of the last change; [`Lsn::NONE`] for values of attributes, which are
    /// not logged.
    pub lsn: U64,
}

const HEADER: usize = size_of::<RemoteHeader>();
const _: () = assert!(
    HEADER == 56
        && std::mem::offset_of!(RemoteHeader, crc) == 12
        && align_of::<RemoteHeader>() == 1
);

/// What the blocks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteKind {
    /// The value of an attribute.
    AttrValue,
    /// The target of a symbolic link.
    SymlinkTarget,
}

impl RemoteKind {
    fn magic(self) -> [u8; 4] {
        match self {
            Self::AttrValue => *b"XARM",
            Self::SymlinkTarget => *b"XSLM",
        }
    }

    fn structure(self) -> Structure {
        match self {
            Self::AttrValue => Structure::AttributeBlock,
            Self::SymlinkTarget => Structure::SymlinkBlock,
        }
    }

    /// The bytes of a value that `size` bytes of blocks have room for, with one header.
    #[must_use]
    pub fn room(geometry: &XfsGeometry, size: usize) -> usize {
        size.saturating_sub(if geometry.has_checksums() { HEADER } else { 0 })
    }

    /// How many blocks a value of `len` bytes occupies when each block is a part of its own. On V5
    /// each of them has a header.
    #[must_use]
    pub fn blocks(geometry: &XfsGeometry, len: usize) -> usize {
        len.div_ceil(Self::room(geometry, geometry.block_size()))
    }

    /// Whether a part may have so many bytes of blocks.
    fn check_size(self, geometry: &XfsGeometry, size: usize) -> Result<(), Malformed> {
        let unit = geometry.block_size();
        if size == unit || self == Self::SymlinkTarget && size != 0 && size.is_multiple_of(unit) {
            return Ok(());
        }
        Err(Malformed::new(self.structure(), format!("{size} bytes, in blocks of {unit}")))
    }

    /// Proves that a block, or the extent of a link, is the expected one, with the part at `offset`
    /// of a value of `len` bytes. Returns that part.
    pub fn parse<'a>(
        self,
        geometry: &XfsGeometry,
        block: &'a [u8],
        expected: &DaExpected,
        offset: usize,
        len: usize,
    ) -> Result<&'a [u8], Malformed> {
        if geometry.has_checksums() {
            self.header(geometry, block, Some(expected))?;
        }
        self.view(geometry, block, offset, len)
    }

    /// The same of a block that was proved before, whose checksum may be an old one.
    pub fn view<'a>(
        self,
        geometry: &XfsGeometry,
        block: &'a [u8],
        offset: usize,
        len: usize,
    ) -> Result<&'a [u8], Malformed> {
        self.check_size(geometry, block.len())?;
        let bad = |problem| Malformed::new(self.structure(), problem);
        let part = len.saturating_sub(offset).min(Self::room(geometry, block.len()));
        let mut rest = block;
        if geometry.has_checksums() {
            let (header, behind) = self.header(geometry, block, None)?;
            let claim = [header.offset, header.bytes].map(|number| u64::from(number.get()));
            if claim != [offset as u64, part as u64] {
                return Err(bad(format!(
                    "it has {} bytes of offset {}, not {part} of {offset}",
                    claim[1], claim[0]
                )));
            }
            rest = behind;
        }
        rest.get(..part).ok_or_else(|| bad("it is too short".to_owned()))
    }

    /// Proves what a block, or the extent of a link, shows by itself, for a caller that does not
    /// know the value: recovery. On V4 that is its size alone.
    pub fn check(
        self,
        geometry: &XfsGeometry,
        block: &[u8],
        expected: &DaExpected,
    ) -> Result<(), Malformed> {
        self.check_size(geometry, block.len())?;
        if !geometry.has_checksums() {
            return Ok(());
        }
        let (header, behind) = self.header(geometry, block, Some(expected))?;
        let (offset, bytes) = (u64::from(header.offset.get()), u64::from(header.bytes.get()));
        let most = match self {
            Self::AttrValue => MAX_VALUE,
            Self::SymlinkTarget => MAX_LEN,
        };
        if bytes == 0 || bytes > behind.len() as u64 || offset + bytes > most as u64 {
            let problem = format!("it has {bytes} bytes of offset {offset}");
            return Err(Malformed::new(self.structure(), problem));
        }
        Ok(())
    }

    /// The header of a V5 block with the right magic number, and the identity that is expected, and
    /// what is behind it.
    fn header<'a>(
        self,
        geometry: &XfsGeometry,
        block: &'a [u8],
        expected: Option<&DaExpected>,
    ) -> Result<(&'a RemoteHeader, &'a [u8]), Malformed> {
        let bad = |problem: &'static str| Malformed::new(self.structure(), problem);
        let (header, behind) =
            RemoteHeader::ref_from_prefix(block).map_err(|_| bad("its header leads out of it"))?;
        if header.magic != self.magic() {
            return Err(bad("its magic number is wrong"));
        }
        if let Some(expected) = expected {
            let (place, owner) = (Some(expected.place), expected.owner.map(|ino| ino.0));
            XfsIdentity::REMOTE.verify(self.structure(), block, geometry, place, owner)?;
        }
        Ok((header, behind))
    }

    /// The `size` bytes of blocks with the part at `offset` of a value. Its checksum is right; a
    /// caller that logs it seals it again.
    pub fn encode(
        self,
        geometry: &XfsGeometry,
        expected: &DaExpected,
        offset: usize,
        value: &[u8],
        size: usize,
    ) -> Result<Vec<u8>, Malformed> {
        self.check_size(geometry, size)?;
        let bad = |problem: &'static str| Malformed::new(self.structure(), problem);
        let part = value.get(offset..).ok_or_else(|| bad("a part behind its value"))?;
        let part = part.get(..Self::room(geometry, size)).unwrap_or(part);
        let mut block = Vec::with_capacity(size);
        if geometry.has_checksums() {
            let number = |number| {
                u32::try_from(number).map(U32::new).map_err(|_| bad("a value above 4 GiB"))
            };
            let header = RemoteHeader {
                magic: self.magic(),
                offset: number(offset)?,
                bytes: number(part.len())?,
                crc: [0; 4],
                uuid: geometry.uuid.into_bytes(),
                owner: expected.owner.ok_or_else(|| bad("its owner is missing"))?.0.into(),
                blkno: expected.place.0.into(),
                lsn: Lsn::NONE.0.into(),
            };
            block.extend_from_slice(header.as_bytes());
        }
        block.extend_from_slice(part);
        block.resize(size, 0);
        self.seal(geometry, &mut block, Lsn::NONE);
        Ok(block)
    }

    /// Writes the checksum, and for the target of a link the LSN. Does nothing on V4.
    pub fn seal(self, geometry: &XfsGeometry, block: &mut [u8], lsn: Lsn) {
        if geometry.has_checksums() {
            XfsIdentity::REMOTE.seal(block, lsn);
        }
    }
}
