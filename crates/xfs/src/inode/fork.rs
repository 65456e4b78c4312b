//! Forks of an inode, and where their blocks are.

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::btree::XfsForkRoot;
use offshoot_xfs_format::inode::XfsFork;
use offshoot_xfs_format::record::{XfsExtent, XfsExtentItem};
use offshoot_xfs_format::{BasicBlock, FileBlock, Ino};

use crate::btree::{XfsTreeCursor, XfsTreeRoot, file_key};
use crate::buffer::{DiskRun, XfsBuffers};

/// A fork, apart from the bytes of the volume.
#[derive(Debug)]
pub(crate) struct LoadedFork {
    ino: Ino,
    is_attributes: bool,
    pub(crate) contents: ForkContents,
}

/// The contents of a fork.
#[derive(Debug)]
pub(crate) enum ForkContents {
    /// The number of a device.
    Device(u32),
    /// The contents themselves. Those of a directory and of attributes were proved.
    Local(Box<[u8]>),
    /// All extents, in order.
    Extents(Box<[XfsExtentItem]>),
    /// The root of the tree of extents.
    Btree(XfsForkRoot),
    /// The root of a tree of realtime metadata.
    RealtimeTree,
}

impl LoadedFork {
    pub(crate) fn new(ino: Ino, is_attributes: bool, fork: &XfsFork<'_>) -> Self {
        let contents = match fork {
            XfsFork::Device(field) => ForkContents::Device(*field),
            XfsFork::Local(bytes) => ForkContents::Local((*bytes).into()),
            XfsFork::Extents(items) => ForkContents::Extents((*items).into()),
            XfsFork::Btree(root) => ForkContents::Btree(root.clone()),
            XfsFork::MetaBtree(_) => ForkContents::RealtimeTree,
        };
        Self { ino, is_attributes, contents }
    }

    /// The bytes on the heap.
    pub(crate) fn heap_bytes(&self) -> usize {
        match &self.contents {
            ForkContents::Local(bytes) => bytes.len(),
            ForkContents::Extents(items) => size_of_val(&**items),
            ForkContents::Btree(root) => root.children.len() * 16,
            ForkContents::Device(_) | ForkContents::RealtimeTree => 0,
        }
    }

    /// Whether the fork has extents, in a list or in a tree.
    pub(crate) fn has_extents(&self) -> bool {
        matches!(self.contents, ForkContents::Extents(_) | ForkContents::Btree(_))
    }

    /// An error about the fork.
    #[cold]
    pub(crate) fn damaged(&self, problem: impl std::fmt::Display) -> Error {
        let which = if self.is_attributes { "attribute" } else { "data" };
        Error::corrupt(Structure::InodeCore, format!("{which} fork: {problem}"))
    }

    /// The extents from `at` on.
    pub(crate) fn extents<'a>(
        &'a self,
        buffers: &'a XfsBuffers,
        at: FileBlock,
    ) -> Result<ForkExtents<'a>> {
        let source = match &self.contents {
            ForkContents::Extents(items) => ExtentSource::List(
                &items[items.partition_point(|item| end_of(&item.get()) <= at.0)..],
            ),
            ForkContents::Btree(root) => {
                let root = XfsTreeRoot::Fork { root, owner: self.ino };
                let mut cursor = XfsTreeCursor::new(buffers, root);
                cursor.seek(file_key(at))?;
                let is_before = |item: &XfsExtentItem| end_of(&item.get()) <= at.0;
                let was_given = cursor.record().as_ref().is_some_and(is_before);
                ExtentSource::Tree { cursor, was_given }
            }
            _ => return Err(self.damaged("it has no extents")),
        };
        Ok(ForkExtents { fork: self, source, end: 0 })
    }

    /// Where the `count` blocks from `at` on are on the device, at least one; `None` when there is
    /// a hole in the place of the first one.
    pub(crate) fn runs(
        &self,
        buffers: &XfsBuffers,
        at: FileBlock,
        count: u32,
    ) -> Result<Option<Vec<DiskRun>>> {
        let mut extents = self.extents(buffers, at)?;
        let (mut next, end) = (at.0, at.0.saturating_add(count.into()));
        let mut runs = Vec::new();
        while next < end {
            let extent = match extents.next()? {
                Some(extent) if extent.offset.0 <= next => extent,
                _ if runs.is_empty() => return Ok(None),
                _ => return Err(self.damaged(format!("there is a hole at block {next}"))),
            };
            if extent.is_unwritten {
                return Err(self.damaged(format!("block {next} is unwritten")));
            }
            let part = end.min(end_of(&extent)) - next;
            run(buffers, &extent, next, part)?.push_to(&mut runs);
            next += part;
        }
        Ok(Some(runs))
    }
}

/// The block of the file behind an extent.
pub(crate) fn end_of(extent: &XfsExtent) -> u64 {
    extent.offset.0 + u64::from(extent.count)
}

/// Where `count` blocks of an extent from block `at` of the file on are.
fn run(buffers: &XfsBuffers, extent: &XfsExtent, at: u64, count: u64) -> Result<DiskRun> {
    let place = place_of(buffers, extent)?;
    let log = buffers.geometry().block_log;
    let basic = (at - extent.offset.0) << (log - 9);
    let bytes = usize::try_from(count << log).unwrap_or(usize::MAX);
    Ok(DiskRun { at: BasicBlock(place.0 + basic), bytes })
}

/// Where an extent begins on the device.
pub(crate) fn place_of(buffers: &XfsBuffers, extent: &XfsExtent) -> Result<BasicBlock> {
    let geometry = buffers.geometry();
    let is_inside = geometry.is_usable_extent(extent.start, extent.count);
    geometry.place_of(extent.start).filter(|_| is_inside).ok_or_else(|| {
        let problem = format!("{} blocks from {}", extent.count, extent.start);
        Error::corrupt(Structure::ExtentRecord, problem)
    })
}

enum ExtentSource<'a> {
    List(&'a [XfsExtentItem]),
    Tree {
        cursor: XfsTreeCursor<'a>,
        /// Whether the record at the cursor was given, or is not wanted.
        was_given: bool,
    },
}

/// The extents of a fork, in order.
pub(crate) struct ForkExtents<'a> {
    fork: &'a LoadedFork,
    source: ExtentSource<'a>,
    /// The block behind the last one.
    end: u64,
}

impl ForkExtents<'_> {
    /// The next extent.
    pub(crate) fn next(&mut self) -> Result<Option<XfsExtent>> {
        let item = match &mut self.source {
            ExtentSource::List(items) => {
                let Some((first, rest)) = items.split_first() else { return Ok(None) };
                *items = rest;
                *first
            }
            ExtentSource::Tree { cursor, was_given } => {
                if *was_given {
                    cursor.advance()?;
                }
                *was_given = true;
                let Some(item) = cursor.record::<XfsExtentItem>() else { return Ok(None) };
                item
            }
        };
        let extent = item.get();
        if extent.offset.0 < self.end {
            let problem = format!("an extent at {} begins before {}", extent.offset, self.end);
            return Err(self.fork.damaged(problem));
        }
        self.end = end_of(&extent);
        Ok(Some(extent))
    }
}
