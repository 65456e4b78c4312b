//! The check of an inode, and what its forks hold.

use zerocopy::FromBytes;

use super::{INODE_MAGIC, STRUCTURE, XfsForkFormat, XfsInodeCore, XfsInodeFlags};
use crate::btree::XfsForkRoot;
use crate::identity::XfsIdentity;
use crate::layout::{ensure, view};
use crate::record::{XfsExtentItem, XfsTreeRecord};
use crate::{AgNumber, Ino, Malformed, U32, XfsGeometry};

/// The contents of a fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XfsFork<'a> {
    /// The number of a device, as the field holds it: see [`device_number`](super::device_number).
    Device(u32),
    /// The contents themselves. Those of an attribute fork have the whole room of the fork, and
    /// their own header says how much they use.
    Local(&'a [u8]),
    /// All extents, in order.
    Extents(&'a [XfsExtentItem]),
    /// The root of the tree of extents.
    Btree(XfsForkRoot),
    /// The root of a tree of realtime metadata, which we do not read.
    MetaBtree(&'a [u8]),
}

/// A verified inode.
#[derive(Clone, Debug)]
pub struct XfsInode<'a> {
    /// The core. The fields of v3 have no meaning in an older one.
    pub core: &'a XfsInodeCore,
    /// The data fork; no extents in a free inode.
    pub data: XfsFork<'a>,
    /// The attribute fork, if there is one.
    pub attributes: Option<XfsFork<'a>>,
}

impl<'a> XfsInode<'a> {
    /// Checks everything that the inode in `bytes`, which has the number `ino`, can show by itself.
    /// The contents of local forks are not checked.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn verify(bytes: &'a [u8], geometry: &XfsGeometry, ino: Ino) -> Result<Self, Malformed> {
        Self::verify_as(bytes, geometry, ino, true)
    }

    /// Checks the same of an inode whose checksum is still to be written.
    ///
    /// # Errors
    /// The first fault in it.
    pub fn verify_unsealed(
        bytes: &'a [u8],
        geometry: &XfsGeometry,
        ino: Ino,
    ) -> Result<Self, Malformed> {
        Self::verify_as(bytes, geometry, ino, false)
    }

    fn verify_as(
        bytes: &'a [u8],
        geometry: &XfsGeometry,
        ino: Ino,
        is_sealed: bool,
    ) -> Result<Self, Malformed> {
        let (len, size) = (bytes.len(), geometry.inode_size());
        ensure!(STRUCTURE, len == size, "{len} bytes, not the {size} of an inode");
        let core: &XfsInodeCore = view(STRUCTURE, bytes)?;
        ensure!(STRUCTURE, core.magic == INODE_MAGIC, "no magic");
        if geometry.has_checksums() {
            ensure!(STRUCTURE, core.version == 3, "version {}, not 3", core.version);
            let identity = XfsIdentity::INODE;
            let owner = Some(ino.0);
            if is_sealed {
                identity.verify(STRUCTURE, bytes, geometry, None, owner)?;
            } else {
                identity.verify_unsealed(STRUCTURE, bytes, geometry, None, owner)?;
            }
        } else {
            ensure!(STRUCTURE, matches!(core.version, 1 | 2), "version {}", core.version);
        }
        if core.is_free() {
            return Ok(Self { core, data: XfsFork::Extents(&[]), attributes: None });
        }
        core.verify_flags2(geometry)?;
        let format = core.verify_type()?;
        let room = core.fork_room(geometry)?;
        let (extents, attribute_extents) = core.extent_counts();
        ensure!(
            STRUCTURE,
            extents.saturating_add(attribute_extents.into()) <= core.nblocks.get(),
            "{extents} and {attribute_extents} extents in {} blocks",
            core.nblocks
        );
        let is_realtime = core.flags().contains(XfsInodeFlags::REALTIME);
        let fork = &bytes[room.data];
        let local = Some(core.size.get());
        let data = parse_fork(fork, format, extents, local, is_realtime, geometry)
            .map_err(|error| in_fork("data", &error))?;
        let attributes = verify_attributes(core, &bytes[room.attributes], geometry)
            .map_err(|error| in_fork("attribute", &error))?;
        Ok(Self { core, data, attributes })
    }
}

#[cold]
fn in_fork(which: &str, error: &Malformed) -> Malformed {
    Malformed::new(error.structure, format!("{which} fork: {}", error.problem))
}

/// Checks the attribute fork, whose room is `fork`.
fn verify_attributes<'a>(
    core: &XfsInodeCore,
    fork: &'a [u8],
    geometry: &XfsGeometry,
) -> Result<Option<XfsFork<'a>>, Malformed> {
    let (_, extents) = core.extent_counts();
    if fork.is_empty() {
        // Old kernels leave the format of a new inode 0 until it has an attribute.
        let is_empty = matches!(core.aformat, 0 | 2) && extents == 0;
        ensure!(STRUCTURE, is_empty, "format {} with {extents} extents, no room", core.aformat);
        return Ok(None);
    }
    let format = XfsForkFormat::from_disk(core.aformat)
        .filter(|format| !matches!(format, XfsForkFormat::Device | XfsForkFormat::MetaBtree));
    let Some(format) = format else {
        return Err(Malformed::new(STRUCTURE, format!("format {}", core.aformat)));
    };
    let fork = parse_fork(fork, format, extents.into(), None, false, geometry)?;
    Ok(Some(fork))
}

/// Checks a fork with `count` extents. `local` is the size of local contents, if the core has it.
fn parse_fork<'a>(
    fork: &'a [u8],
    format: XfsForkFormat,
    count: u64,
    local: Option<u64>,
    is_realtime: bool,
    geometry: &XfsGeometry,
) -> Result<XfsFork<'a>, Malformed> {
    let room = fork.len();
    Ok(match format {
        XfsForkFormat::Device => XfsFork::Device(view::<U32>(STRUCTURE, fork)?.get()),
        XfsForkFormat::Local => {
            let size = local.map_or(Some(room), |size| usize::try_from(size).ok());
            let contents = size.and_then(|size| fork.get(..size));
            let Some(contents) = contents.filter(|_| count == 0) else {
                let problem = format!("{local:?} local bytes and {count} extents in {room} bytes");
                return Err(Malformed::new(STRUCTURE, problem));
            };
            XfsFork::Local(contents)
        }
        XfsForkFormat::Extents => {
            let fit = room / size_of::<XfsExtentItem>();
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            ensure!(STRUCTURE, count <= fit, "{count} extents, where {fit} fit");
            let bytes = &fork[..count * size_of::<XfsExtentItem>()];
            let extents = <[XfsExtentItem]>::ref_from_bytes(bytes).unwrap_or_default();
            verify_extents(extents, is_realtime, geometry)?;
            XfsFork::Extents(extents)
        }
        XfsForkFormat::Btree => XfsFork::Btree(XfsForkRoot::parse(fork, geometry)?),
        XfsForkFormat::MetaBtree => XfsFork::MetaBtree(fork),
    })
}

/// Checks that extents lie inside the volume, and ascend in the file without overlap.
fn verify_extents(
    extents: &[XfsExtentItem],
    is_realtime: bool,
    geometry: &XfsGeometry,
) -> Result<(), Malformed> {
    let mut end = 0;
    for (index, item) in extents.iter().enumerate() {
        let extent = item.get();
        if is_realtime {
            ensure!(STRUCTURE, extent.count > 0, "extent {index} has no blocks");
        } else {
            // Extents name their own group.
            item.verify(geometry, AgNumber(0))?;
        }
        ensure!(
            STRUCTURE,
            extent.offset.0 >= end,
            "extent {index} at offset {} begins before {end}",
            extent.offset
        );
        end = extent.offset.0 + u64::from(extent.count);
    }
    Ok(())
}
