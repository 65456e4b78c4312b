//! The headers of an allocation group: free space (AGF), inodes (AGI), and the free list (AGFL).
//!
//! Each occupies one sector: 1, 2 and 3 of the group, behind a superblock. V4 volumes have shorter
//! ones, without checksums: the fields behind the V4 length do not count there.

use offshoot_vfs::Structure;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::geometry::XfsLayout;
use crate::identity::XfsIdentity;
use crate::layout::{ensure, view};
use crate::superblock::LEAST_AG_BLOCKS;
use crate::{AgBlock, AgIno, AgNumber, Lsn, Malformed, U32, U64, XfsGeometry, csum};

/// The levels of a tree are at most these, more than the largest group or file can need.
pub const MOST_LEVELS: u16 = 16;

/// The lists of unlinked inodes of a group.
pub const UNLINKED_LISTS: usize = 64;

/// The header of free space (AGF), as it is stored.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the book")]
pub struct Agf {
    pub magicnum: [u8; 4],
    pub versionnum: U32,
    pub seqno: U32,
    pub length: U32,
    /// The roots of the trees: by block, by size, reverse map.
    pub roots: [U32; 3],
    /// The levels of these trees.
    pub levels: [U32; 3],
    pub flfirst: U32,
    pub fllast: U32,
    pub flcount: U32,
    pub freeblks: U32,
    pub longest: U32,
    pub btreeblks: U32,
    pub uuid: [u8; 16],
    pub rmap_blocks: U32,
    pub refcount_blocks: U32,
    pub refcount_root: U32,
    pub refcount_level: U32,
    pub spare: [U64; 14],
    pub lsn: U64,
    pub crc: [u8; 4],
    pub spare2: U32,
}

/// The header of inodes (AGI), as it is stored.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the book")]
pub struct Agi {
    pub magicnum: [u8; 4],
    pub versionnum: U32,
    pub seqno: U32,
    pub length: U32,
    pub count: U32,
    pub root: U32,
    pub level: U32,
    pub freecount: U32,
    pub newino: U32,
    pub dirino: U32,
    pub unlinked: [U32; UNLINKED_LISTS],
    pub uuid: [u8; 16],
    pub crc: [u8; 4],
    pub pad: U32,
    pub lsn: U64,
    pub free_root: U32,
    pub free_level: U32,
    pub iblocks: U32,
    pub fblocks: U32,
}

/// The header of a free list (AGFL) of a V5 volume, as it is stored. The list of blocks follows.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
#[expect(missing_docs, reason = "fields are named and explained by the book")]
pub struct AgflHeader {
    pub magicnum: [u8; 4],
    pub seqno: U32,
    pub uuid: [u8; 16],
    pub lsn: U64,
    pub crc: [u8; 4],
}

/// Where a kind of header sector has its fields.
struct SectorShape {
    structure: Structure,
    magic: [u8; 4],
    identity: XfsIdentity,
    /// The bytes of the fields in a V4 volume.
    v4_len: usize,
    /// The sector of the group that holds it.
    sector: u32,
}

const AGF: SectorShape = SectorShape {
    structure: Structure::GroupFreeSpace,
    magic: *b"XAGF",
    identity: XfsIdentity::AGF,
    v4_len: 64,
    sector: 1,
};

const AGI: SectorShape = SectorShape {
    structure: Structure::GroupInodes,
    magic: *b"XAGI",
    identity: XfsIdentity::AGI,
    v4_len: 296,
    sector: 2,
};

const AGFL: SectorShape = SectorShape {
    structure: Structure::GroupFreeList,
    magic: *b"XAFL",
    identity: XfsIdentity::AGFL,
    v4_len: 0,
    sector: 3,
};

impl SectorShape {
    /// The place of the sector in group `ag`, in bytes of the device.
    fn offset(&self, geometry: &XfsGeometry, ag: AgNumber) -> u64 {
        let start = geometry.place(ag, AgBlock(0)).bytes();
        start.saturating_add(u64::from(self.sector) << geometry.sector_log)
    }

    /// Checks what all headers have: length, magic, checksum and uuid.
    fn verify(&self, sector: &[u8], geometry: &XfsGeometry) -> Result<(), Malformed> {
        let size = geometry.sector_size();
        let len = sector.len();
        ensure!(self.structure, len == size, "{len} bytes, not the {size} of a sector");
        let has_magic =
            sector.starts_with(&self.magic) || !geometry.has_checksums() && self.v4_len == 0;
        ensure!(self.structure, has_magic, "no magic");
        if geometry.has_checksums() {
            self.identity.verify(self.structure, sector, geometry, None, None)?;
        }
        Ok(())
    }

    /// Writes the fields of a header over the start of its sector, and seals it.
    ///
    /// # Panics
    ///
    /// When `sector` is not a sector.
    fn write(&self, fields: &[u8], sector: &mut [u8], geometry: &XfsGeometry) {
        let len = if geometry.has_checksums() { fields.len() } else { self.v4_len };
        sector[..len].copy_from_slice(&fields[..len]);
        if geometry.has_checksums() {
            csum::store(sector, self.identity.crc);
        }
    }
}

/// Checks the group, its length and the version that both the AGF and the AGI store.
fn verify_group(
    structure: Structure,
    (version, found, length): (U32, U32, U32),
    geometry: &XfsGeometry,
    ag: AgNumber,
) -> Result<(), Malformed> {
    ensure!(structure, version.get() == 1, "version {version}");
    ensure!(structure, found.get() == ag.0, "group {ag} expected, {found} found");
    // The log may hold a new length of the volume that is not in the superblock yet.
    let is_last = ag.0.checked_add(1) == Some(geometry.ag_count);
    let least = if is_last { LEAST_AG_BLOCKS } else { geometry.ag_blocks };
    ensure!(
        structure,
        (least..=geometry.ag_blocks).contains(&length.get()),
        "a length of {length} blocks, but groups have {}",
        geometry.ag_blocks
    );
    Ok(())
}

/// Checks the root of a tree of a group.
fn verify_root(
    structure: Structure,
    tree: &str,
    (root, level): (U32, U32),
    geometry: &XfsGeometry,
    length: u32,
) -> Result<(), Malformed> {
    let (block, levels) = (root.get(), level.get());
    ensure!(
        structure,
        (geometry.header_blocks()..length).contains(&block)
            && (1..=u32::from(MOST_LEVELS)).contains(&levels),
        "the root of the {tree} at {block} with {levels} levels"
    );
    Ok(())
}

impl Agf {
    /// The place of the AGF of group `ag`, in bytes of the device.
    #[must_use]
    pub fn offset(geometry: &XfsGeometry, ag: AgNumber) -> u64 {
        AGF.offset(geometry, ag)
    }

    /// Views a sector that [`parse`](Self::parse) has accepted before.
    ///
    /// # Errors
    /// When it is too short.
    pub fn view(sector: &[u8]) -> Result<&Self, Malformed> {
        view(AGF.structure, sector)
    }

    /// Checks and views the AGF of group `ag`.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn parse<'a>(
        sector: &'a [u8],
        geometry: &XfsGeometry,
        ag: AgNumber,
    ) -> Result<&'a Self, Malformed> {
        let structure = AGF.structure;
        AGF.verify(sector, geometry)?;
        let agf: &Self = view(structure, sector)?;
        verify_group(structure, (agf.versionnum, agf.seqno, agf.length), geometry, ag)?;
        let length = agf.length.get();
        let names = ["tree by block", "tree by size", "reverse map"];
        let has_reverse_map = geometry.layout.contains(XfsLayout::REVERSE_MAP);
        let roots = agf.roots.into_iter().zip(agf.levels).zip(names);
        for (root, name) in roots.take(if has_reverse_map { 3 } else { 2 }) {
            verify_root(structure, name, root, geometry, length)?;
        }
        if geometry.layout.contains(XfsLayout::SHARED_BLOCKS) {
            let root = (agf.refcount_root, agf.refcount_level);
            verify_root(structure, "reference counts", root, geometry, length)?;
        }
        let (free, longest) = (agf.freeblks.get(), agf.longest.get());
        ensure!(
            structure,
            longest <= free && free <= length,
            "{free} free blocks with {longest} in a row, of {length}"
        );
        let size = Agfl::size(geometry);
        let (first, last) = (agf.flfirst.get(), agf.fllast.get());
        ensure!(
            structure,
            [first, last].iter().all(|&index| (index as usize) < size)
                && agf.flcount.get() as usize <= size,
            "{} blocks from {first} to {last} in a free list of {size}",
            agf.flcount
        );
        Ok(agf)
    }

    /// Writes the fields over the start of `sector`, and seals it.
    ///
    /// # Panics
    ///
    /// When `sector` is not a sector.
    pub fn write(&self, sector: &mut [u8], geometry: &XfsGeometry) {
        AGF.write(self.as_bytes(), sector, geometry);
    }

    /// Whether the ends of the free list agree with its length. Old kernels counted 118
    /// places in an AGFL of 512 bytes; current ones empty a list whose ends do not agree.
    #[must_use]
    pub fn is_free_list_consistent(&self, geometry: &XfsGeometry) -> bool {
        let (first, last) = (self.flfirst.get() as usize, self.fllast.get() as usize);
        let (size, count) = (Agfl::size(geometry), self.flcount.get() as usize);
        // An empty list and a full one both end where they begin.
        (first + count + size - 1) % size == last
    }

    /// The LSN of the last change; none in a V4 volume.
    #[must_use]
    pub fn lsn(&self, geometry: &XfsGeometry) -> Option<Lsn> {
        geometry.has_checksums().then_some(Lsn(self.lsn.get()))
    }
}

impl Agi {
    /// The place of the AGI of group `ag`, in bytes of the device.
    #[must_use]
    pub fn offset(geometry: &XfsGeometry, ag: AgNumber) -> u64 {
        AGI.offset(geometry, ag)
    }

    /// Views a sector that [`parse`](Self::parse) has accepted before.
    ///
    /// # Errors
    /// When it is too short.
    pub fn view(sector: &[u8]) -> Result<&Self, Malformed> {
        view(AGI.structure, sector)
    }

    /// Checks and views the AGI of group `ag`.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn parse<'a>(
        sector: &'a [u8],
        geometry: &XfsGeometry,
        ag: AgNumber,
    ) -> Result<&'a Self, Malformed> {
        let structure = AGI.structure;
        AGI.verify(sector, geometry)?;
        let agi: &Self = view(structure, sector)?;
        verify_group(structure, (agi.versionnum, agi.seqno, agi.length), geometry, ag)?;
        let length = agi.length.get();
        verify_root(structure, "inodes", (agi.root, agi.level), geometry, length)?;
        if geometry.layout.contains(XfsLayout::FREE_INODES) {
            let root = (agi.free_root, agi.free_level);
            verify_root(structure, "free inodes", root, geometry, length)?;
        }
        let (count, free) = (agi.count.get(), agi.freecount.get());
        let most = u64::from(length) << geometry.inodes_per_block_log();
        ensure!(
            structure,
            free <= count && u64::from(count) <= most,
            "{count} inodes and {free} free ones in {length} blocks"
        );
        for (list, first) in agi.unlinked.iter().enumerate() {
            let first = AgIno(first.get());
            ensure!(
                structure,
                first == AgIno::NULL || geometry.has_inode(ag, first),
                "list {list} of unlinked inodes begins with {first}"
            );
        }
        Ok(agi)
    }

    /// Writes the fields over the start of `sector`, and seals it.
    ///
    /// # Panics
    ///
    /// When `sector` is not a sector.
    pub fn write(&self, sector: &mut [u8], geometry: &XfsGeometry) {
        AGI.write(self.as_bytes(), sector, geometry);
    }

    /// The LSN of the last change; none in a V4 volume.
    #[must_use]
    pub fn lsn(&self, geometry: &XfsGeometry) -> Option<Lsn> {
        geometry.has_checksums().then_some(Lsn(self.lsn.get()))
    }

    /// The list of unlinked inodes that inode `inode` belongs to.
    #[must_use]
    pub fn unlinked_list(inode: AgIno) -> usize {
        inode.0 as usize % UNLINKED_LISTS
    }
}

/// A free list: a ring of blocks that belong to the trees of free space and the reverse map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Agfl {
    /// The LSN of the last change; none in a V4 volume.
    pub lsn: Option<Lsn>,
    /// All places of the ring. Those that are not in use hold any number.
    pub blocks: Vec<AgBlock>,
}

impl Agfl {
    /// The place of the AGFL of group `ag`, in bytes of the device.
    #[must_use]
    pub fn offset(geometry: &XfsGeometry, ag: AgNumber) -> u64 {
        AGFL.offset(geometry, ag)
    }

    /// The places of the ring: 119 in a sector of 512 bytes.
    #[must_use]
    pub fn size(geometry: &XfsGeometry) -> usize {
        (geometry.sector_size() - Self::header_len(geometry)) / size_of::<U32>()
    }

    fn header_len(geometry: &XfsGeometry) -> usize {
        if geometry.has_checksums() { size_of::<AgflHeader>() } else { 0 }
    }

    /// Checks the AGFL of group `ag`. [`Self::ring`] checks the blocks that are in use.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn parse(sector: &[u8], geometry: &XfsGeometry, ag: AgNumber) -> Result<Self, Malformed> {
        AGFL.verify(sector, geometry)?;
        let mut lsn = None;
        if geometry.has_checksums() {
            let header: &AgflHeader = view(AGFL.structure, sector)?;
            let found = header.seqno;
            ensure!(AGFL.structure, found.get() == ag.0, "group {ag} expected, {found} found");
            lsn = Some(Lsn(header.lsn.get()));
        }
        let (places, _) = sector[Self::header_len(geometry)..].as_chunks::<4>();
        let blocks = places.iter().map(|&bytes| AgBlock(u32::from_be_bytes(bytes))).collect();
        Ok(Self { lsn, blocks })
    }

    /// The blocks that are in use, in order from `flfirst`.
    ///
    /// # Errors
    /// A block outside of the group, or an AGF whose numbers do not fit the ring.
    pub fn ring(
        &self,
        agf: &Agf,
        geometry: &XfsGeometry,
        ag: AgNumber,
    ) -> Result<Vec<AgBlock>, Malformed> {
        let (first, count) = (agf.flfirst.get() as usize, agf.flcount.get() as usize);
        let size = self.blocks.len();
        ensure!(
            AGFL.structure,
            first < size.max(1) && count <= size,
            "{count} blocks from {first} of {size}"
        );
        let blocks: Vec<_> = self.blocks.iter().cycle().skip(first).take(count).copied().collect();
        for &block in &blocks {
            ensure!(AGFL.structure, geometry.is_usable(ag, block), "block {block}");
        }
        Ok(blocks)
    }

    /// The bytes of the sector.
    #[must_use]
    pub fn encode(&self, geometry: &XfsGeometry, ag: AgNumber) -> Vec<u8> {
        let mut sector = Vec::with_capacity(geometry.sector_size());
        if geometry.has_checksums() {
            let header = AgflHeader {
                magicnum: AGFL.magic,
                seqno: ag.0.into(),
                uuid: geometry.uuid.into_bytes(),
                lsn: self.lsn.unwrap_or(Lsn(0)).0.into(),
                crc: [0; 4],
            };
            sector.extend_from_slice(header.as_bytes());
        }
        let blocks = self.blocks.iter().flat_map(|block| block.0.to_be_bytes());
        sector.extend(blocks.take(Self::size(geometry) * size_of::<U32>()));
        sector.resize(geometry.sector_size(), 0);
        if geometry.has_checksums() {
            csum::store(&mut sector, AGFL.identity.crc);
        }
        sector
    }
}

/// The fields of a new AGF of group `ag`: no free blocks, no trees yet, and an empty free list.
#[must_use]
pub fn new_agf(geometry: &XfsGeometry, ag: AgNumber) -> Agf {
    let last = u32::try_from(Agfl::size(geometry) - 1).unwrap_or(u32::MAX);
    Agf {
        magicnum: AGF.magic,
        versionnum: 1.into(),
        seqno: ag.0.into(),
        length: geometry.ag_len(ag).into(),
        fllast: last.into(),
        uuid: geometry.uuid.into_bytes(),
        ..zerocopy::FromZeros::new_zeroed()
    }
}

/// The fields of a new AGI of group `ag`: no inodes, no trees yet, and empty lists.
#[must_use]
pub fn new_agi(geometry: &XfsGeometry, ag: AgNumber) -> Agi {
    Agi {
        magicnum: AGI.magic,
        versionnum: 1.into(),
        seqno: ag.0.into(),
        length: geometry.ag_len(ag).into(),
        newino: AgIno::NULL.0.into(),
        dirino: AgIno::NULL.0.into(),
        unlinked: [AgIno::NULL.0.into(); UNLINKED_LISTS],
        uuid: geometry.uuid.into_bytes(),
        ..zerocopy::FromZeros::new_zeroed()
    }
}
