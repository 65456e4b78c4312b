//! An inode that a transaction has locked, and may change.

use std::sync::Arc;

use offshoot_vfs::{Error, Malformed, Result, Structure};
use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::btree::XfsForkRoot;
use offshoot_xfs_format::inode::{XfsFork, XfsForkFormat, XfsForkRoom, XfsInode, XfsInodeCore};
use offshoot_xfs_format::log::items::XfsInodeFields as Fields;
use offshoot_xfs_format::record::XfsExtentItem;
use zerocopy::IntoBytes;

use super::inode_item::{InodeChange, InodePlace};
use crate::buffer::malformed;

/// Which fork of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForkName {
    Data,
    Attributes,
}

/// The contents of a fork that may be changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ChangedFork {
    /// The number of a device.
    Device(u32),
    /// The contents themselves.
    Local(Vec<u8>),
    /// All extents, in order.
    Extents(Vec<XfsExtentItem>),
    /// The root of the tree of extents.
    Btree(XfsForkRoot),
    /// The root of a tree of realtime metadata, which is never changed.
    RealtimeTree(Vec<u8>),
}

impl ChangedFork {
    fn of(fork: &XfsFork<'_>) -> Self {
        match fork {
            XfsFork::Device(field) => Self::Device(*field),
            XfsFork::Local(bytes) => Self::Local(bytes.to_vec()),
            XfsFork::Extents(items) => Self::Extents(items.to_vec()),
            XfsFork::Btree(root) => Self::Btree(root.clone()),
            XfsFork::MetaBtree(bytes) => Self::RealtimeTree(bytes.to_vec()),
        }
    }

    /// The number that the core stores for it.
    pub(crate) fn format(&self) -> XfsForkFormat {
        match self {
            Self::Device(_) => XfsForkFormat::Device,
            Self::Local(_) => XfsForkFormat::Local,
            Self::Extents(_) => XfsForkFormat::Extents,
            Self::Btree(_) => XfsForkFormat::Btree,
            Self::RealtimeTree(_) => XfsForkFormat::MetaBtree,
        }
    }

    /// Writes the fork to its room, which has zeros. Returns whether it fits.
    fn put(&self, room: &mut [u8]) -> bool {
        let mut write = |bytes: &[u8]| {
            let to = room.get_mut(..bytes.len());
            to.map(|to| to.copy_from_slice(bytes)).is_some()
        };
        match self {
            Self::Btree(tree) => tree.write(room),
            Self::Device(field) => write(&field.to_be_bytes()),
            Self::Local(bytes) | Self::RealtimeTree(bytes) => write(bytes),
            Self::Extents(items) => write(items.as_bytes()),
        }
    }

    /// What of an inode is logged when the fork changes.
    fn fields(&self, name: ForkName) -> Fields {
        let [local, extents, root] = match name {
            ForkName::Data => [Fields::DATA_LOCAL, Fields::DATA_EXTENTS, Fields::DATA_ROOT],
            ForkName::Attributes => {
                [Fields::ATTRIBUTES_LOCAL, Fields::ATTRIBUTES_EXTENTS, Fields::ATTRIBUTES_ROOT]
            }
        };
        match self {
            Self::Device(_) => Fields::DEVICE,
            Self::Local(_) => local,
            Self::Extents(_) => extents,
            Self::Btree(_) => root,
            Self::RealtimeTree(_) => Fields::empty(),
        }
    }
}

/// An inode that a transaction has locked. What it changes is logged when the transaction commits;
/// [`Self::core_mut`] and [`Self::set_fork`] say that it has changed.
#[derive(Debug)]
pub(crate) struct XfsChangedInode {
    place: InodePlace,
    core: XfsInodeCore,
    data: ChangedFork,
    attributes: Option<ChangedFork>,
    fields: Fields,
}

impl XfsChangedInode {
    /// The inode in `bytes` of its cluster, which may be free.
    pub(super) fn load(place: InodePlace, bytes: &[u8], geometry: &XfsGeometry) -> Result<Self> {
        Self::of(place, XfsInode::verify(bytes, geometry, place.ino))
    }

    /// The inode in the bytes of its last commit, which have no checksum.
    pub(super) fn load_committed(
        place: InodePlace,
        bytes: &[u8],
        geometry: &XfsGeometry,
    ) -> Result<Self> {
        Self::of(place, XfsInode::verify_unsealed(bytes, geometry, place.ino))
    }

    fn of(place: InodePlace, inode: Result<XfsInode<'_>, Malformed>) -> Result<Self> {
        let inode = inode.map_err(|Malformed { structure, problem }| {
            Error::corrupt(structure, format!("inode {}: {problem}", place.ino))
        })?;
        Ok(Self {
            place,
            core: *inode.core,
            data: ChangedFork::of(&inode.data),
            attributes: inode.attributes.as_ref().map(ChangedFork::of),
            fields: Fields::empty(),
        })
    }

    pub(super) fn place(&self) -> InodePlace {
        self.place
    }

    pub(crate) fn core(&self) -> &XfsInodeCore {
        &self.core
    }

    /// The core, to be changed. Formats of forks and the counts of their extents are kept by
    /// [`Self::set_fork`] and [`Self::set_extent_count`].
    pub(crate) fn core_mut(&mut self) -> &mut XfsInodeCore {
        self.fields |= Fields::CORE;
        &mut self.core
    }

    /// A fork; `None` for attributes that the inode has no room for.
    pub(crate) fn fork(&self, name: ForkName) -> Option<&ChangedFork> {
        match name {
            ForkName::Data => Some(&self.data),
            ForkName::Attributes => self.attributes.as_ref(),
        }
    }

    /// Replaces a fork.
    pub(crate) fn set_fork(&mut self, name: ForkName, fork: ChangedFork) {
        self.fields |= Fields::CORE | fork.fields(name);
        let format = fork.format() as u8;
        match name {
            ForkName::Data => (self.core.format, self.data) = (format, fork),
            ForkName::Attributes => {
                (self.core.aformat, self.attributes) = (format, Some(fork));
            }
        }
    }

    /// Sets where the attribute fork begins, in units of 8 bytes behind the core. An inode without
    /// one gets an empty one.
    pub(crate) fn set_fork_offset(&mut self, offset: u8) {
        if self.core.forkoff == offset && self.attributes.is_some() {
            return;
        }
        self.core.forkoff = offset;
        let fork = self.attributes.take().unwrap_or(ChangedFork::Extents(Vec::new()));
        self.set_fork(ForkName::Attributes, fork);
        if let ChangedFork::Btree(_) = &self.data {
            // A root is stored with room for all that fit, so it moves.
            self.fields |= self.data.fields(ForkName::Data);
        }
    }

    /// Removes the attribute fork, which must be empty. The data fork gets its room.
    pub(crate) fn drop_attribute_fork(&mut self) {
        self.fields |= Fields::CORE;
        self.core.forkoff = 0;
        self.core.aformat = XfsForkFormat::Extents as u8;
        self.attributes = None;
        // A root is stored with room for all that fit, so it moves.
        self.fields |= self.data.fields(ForkName::Data);
    }

    /// The extents of a fork by its count.
    pub(crate) fn extent_count(&self, name: ForkName) -> u64 {
        let (data, attributes) = self.core.extent_counts();
        match name {
            ForkName::Data => data,
            ForkName::Attributes => attributes.into(),
        }
    }

    /// Sets how many extents a fork has.
    pub(crate) fn set_extent_count(&mut self, name: ForkName, count: u64) -> Result<()> {
        let (data, attributes) = self.core.extent_counts();
        let too_many = || self.damaged(format!("{count} extents"));
        let (data, attributes) = match name {
            ForkName::Data => (count, attributes),
            ForkName::Attributes => (data, u32::try_from(count).map_err(|_| too_many())?),
        };
        if !self.core.set_extent_counts(data, attributes) {
            return Err(self.damaged(format!("{count} extents")));
        }
        self.fields |= Fields::CORE;
        Ok(())
    }

    /// Adds to the blocks of the inode.
    pub(crate) fn add_blocks(&mut self, change: i64) -> Result<()> {
        let blocks = self.core.nblocks.get().checked_add_signed(change);
        let blocks = blocks.ok_or_else(|| {
            self.damaged(format!("{} blocks, and a change by {change}", self.core.nblocks))
        })?;
        self.core_mut().nblocks = blocks.into();
        Ok(())
    }

    /// The room of a fork in the inode, in bytes.
    pub(crate) fn room(&self, name: ForkName, geometry: &XfsGeometry) -> Result<usize> {
        let XfsForkRoom { data, attributes } = self.core.fork_room(geometry).map_err(malformed)?;
        Ok(match name {
            ForkName::Data => data.len(),
            ForkName::Attributes => attributes.len(),
        })
    }

    /// Logs the core, changed or not.
    pub(super) fn log_core(&mut self) {
        self.fields |= Fields::CORE;
    }

    /// Proves that the core counts as many extents as a list has: a list ends where its count does.
    fn prove_count(&self, name: ForkName) -> Result<()> {
        let Some(ChangedFork::Extents(items)) = self.fork(name) else { return Ok(()) };
        let (items, counted) = (items.len() as u64, self.extent_count(name));
        if items == counted {
            return Ok(());
        }
        Err(self.damaged(format!("{name:?}: {items} extents, and {counted} are counted")))
    }

    /// What a commit makes of the inode; `None` when it has not changed.
    pub(super) fn change(&mut self, geometry: &XfsGeometry) -> Result<Option<InodeChange>> {
        if self.fields.is_empty() {
            return Ok(None);
        }
        let mut encoded: Arc<[u8]> = std::iter::repeat_n(0, geometry.inode_size()).collect();
        // This is the only reference to it.
        let bytes = Arc::get_mut(&mut encoded).unwrap_or_default();
        self.core.put(bytes, geometry);
        if !self.core.is_free() {
            self.prove_count(ForkName::Data)?;
            self.prove_count(ForkName::Attributes)?;
            let room = self.core.fork_room(geometry).map_err(malformed)?;
            let data = bytes.get_mut(room.data).is_some_and(|room| self.data.put(room));
            let attributes = self.attributes.as_ref().is_none_or(|fork| {
                bytes.get_mut(room.attributes).is_some_and(|room| fork.put(room))
            });
            if !data || !attributes {
                return Err(self.damaged("a fork does not fit"));
            }
        }
        let fields = std::mem::replace(&mut self.fields, Fields::empty());
        let change = InodeChange::new(encoded, fields, geometry, self.place.ino);
        change.map(Some).map_err(malformed)
    }

    /// The error about the inode.
    #[cold]
    pub(crate) fn damaged(&self, problem: impl std::fmt::Display) -> Error {
        Error::corrupt(Structure::InodeCore, format!("inode {}: {problem}", self.place.ino))
    }
}
