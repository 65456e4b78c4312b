//! The trees of groups, and those of the extents of files: each block, and each record of a leaf.
//!
//! A child has to be one level below its parent, and no block is shown twice. So the walk of a
//! hostile tree ends.

use std::collections::HashSet;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, Malformed, Structure};
use offshoot_xfs_format::btree::{XfsBtreeBlock, XfsTree};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::group::{Agf, Agi};
use offshoot_xfs_format::inode::{XfsFork, XfsInode};
use offshoot_xfs_format::record::{
    XfsExtentItem, XfsFreeExtent, XfsInodeChunk, XfsReverseMap, XfsSharedExtent,
};
use offshoot_xfs_format::{AgBlock, AgNumber, FsBlock, Ino, XfsGeometry};

use super::{DumpOutput, groups, open};
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::verbs::fields::Fields;

/// The trees by the names that the command line has for them.
const TREES: [(&str, XfsTree); 7] = [
    ("free-by-block", XfsTree::FreeByBlock),
    ("free-by-size", XfsTree::FreeBySize),
    ("inodes", XfsTree::Inodes),
    ("free-inodes", XfsTree::FreeInodes),
    ("reverse-map", XfsTree::ReverseMap),
    ("references", XfsTree::ReferenceCounts),
    ("extents", XfsTree::Extents),
];

/// A block of a tree that is still to be shown.
struct WantedBlock {
    at: FsBlock,
    level: u32,
}

struct TreeDump<'a, 'o> {
    device: &'a dyn BlockDevice,
    geometry: &'a XfsGeometry,
    to: DumpOutput<'o>,
    tree: XfsTree,
    owner: Option<Ino>,
    /// The blocks that were shown.
    seen: HashSet<u64>,
    is_sound: bool,
}

/// Shows the tree `name`: `inodes@2` is that of group 2, `inodes` those of all groups, and
/// `extents@131` is that of a file.
pub(in crate::verbs) fn run(
    device: &Arc<dyn BlockDevice>,
    name: &str,
    to: DumpOutput<'_>,
) -> Result {
    let volume = open(device)?;
    let geometry = &volume.superblock().geometry;
    let (tree, number) = parse(name)?;
    let owner = number.map(Ino).filter(|_| tree == XfsTree::Extents);
    let (device, seen) = (&**device, HashSet::new());
    let mut dump = TreeDump { device, geometry, to, tree, owner, seen, is_sound: true };
    if tree == XfsTree::Extents {
        let ino = owner.ok_or_else(|| bad_name(name))?;
        dump.show(dump.children_of(ino)?)?;
    } else {
        let wanted = |ag: &AgNumber| number.is_none_or(|number| u64::from(ag.0) == number);
        let all = groups(device, geometry).map(|(ag, _)| ag).filter(wanted);
        let all: Vec<_> = all.collect();
        if all.is_empty() {
            return Err(Error::posix(Errno::NOENT, format!("the group of tree `{name}`")).into());
        }
        for ag in all {
            match dump.root(ag)? {
                Ok(root) => dump.show(vec![root])?,
                Err(problem) => {
                    dump.bad("bad group", Fields::default().with("group", ag.0), problem)?;
                }
            }
        }
    }
    if dump.is_sound {
        return Ok(());
    }
    dump.to.console.error(&"not all of it verifies");
    Err(VerbFailure::Reported(ExitStatus::Corrupt))
}

fn bad_name(name: &str) -> VerbFailure {
    let what = format!("`{name}` as a tree of an XFS volume: {}", tree_names());
    Error::posix(Errno::INVAL, what).into()
}

/// What names a tree of XFS, for errors.
pub(in crate::verbs) fn tree_names() -> String {
    let names = TREES.map(|(name, _)| name).join(", ");
    format!(
        "those of XFS are {names}, with @ and the number of a group, or of an inode for extents"
    )
}

/// Whether a tree of XFS has this name.
pub(in crate::verbs) fn is_tree(name: &str) -> bool {
    parse(name).is_ok()
}

fn parse(name: &str) -> Result<(XfsTree, Option<u64>)> {
    let (word, number) = match name.split_once('@') {
        Some((word, number)) => (word, Some(number.parse().map_err(|_| bad_name(name))?)),
        None => (name, None),
    };
    let found = TREES.iter().find(|(known, _)| *known == word);
    found.map(|(_, tree)| (*tree, number)).ok_or_else(|| bad_name(name))
}

impl TreeDump<'_, '_> {
    /// The root of the tree of a group.
    fn root(&self, ag: AgNumber) -> Result<std::result::Result<WantedBlock, Malformed>> {
        let (device, geometry) = (self.device, self.geometry);
        let read = |offset| read(device, offset, geometry.sector_size());
        let (block, levels) = match self.tree {
            XfsTree::Inodes | XfsTree::FreeInodes => {
                let sector = read(Agi::offset(geometry, ag))?;
                let agi = match Agi::parse(&sector, geometry, ag) {
                    Ok(agi) => agi,
                    Err(problem) => return Ok(Err(problem)),
                };
                if self.tree == XfsTree::Inodes {
                    (agi.root, agi.level)
                } else {
                    self.require(XfsLayout::FREE_INODES)?;
                    (agi.free_root, agi.free_level)
                }
            }
            _ => {
                let sector = read(Agf::offset(geometry, ag))?;
                let agf = match Agf::parse(&sector, geometry, ag) {
                    Ok(agf) => agf,
                    Err(problem) => return Ok(Err(problem)),
                };
                let ([by_block, by_size, reverse], [levels, size_levels, reverse_levels]) =
                    (agf.roots, agf.levels);
                match self.tree {
                    XfsTree::FreeByBlock => (by_block, levels),
                    XfsTree::FreeBySize => (by_size, size_levels),
                    XfsTree::ReverseMap => {
                        self.require(XfsLayout::REVERSE_MAP)?;
                        (reverse, reverse_levels)
                    }
                    _ => {
                        self.require(XfsLayout::SHARED_BLOCKS)?;
                        (agf.refcount_root, agf.refcount_level)
                    }
                }
            }
        };
        let at = geometry.fs_block(ag, AgBlock(block.get()));
        Ok(Ok(WantedBlock { at, level: levels.get().saturating_sub(1) }))
    }

    fn require(&self, feature: XfsLayout) -> Result {
        if self.geometry.layout.contains(feature) {
            return Ok(());
        }
        Err(Error::posix(Errno::NOENT, format!("the tree {:?}", self.tree)).into())
    }

    /// The blocks below the root in an inode.
    fn children_of(&self, ino: Ino) -> Result<Vec<WantedBlock>> {
        let offset = self.geometry.inode_offset(ino);
        let offset = offset.ok_or_else(|| Error::posix(Errno::NOENT, format!("inode {ino}")))?;
        let bytes = read(self.device, offset, self.geometry.inode_size())?;
        let inode = XfsInode::verify(&bytes, self.geometry, ino).map_err(corrupt)?;
        let XfsFork::Btree(root) = &inode.data else {
            let what = format!("a tree of extents of inode {ino}, which has them in itself");
            return Err(Error::posix(Errno::NOENT, what).into());
        };
        let level = u32::from(root.level).saturating_sub(1);
        Ok(root.children.iter().rev().map(|(_, at)| WantedBlock { at: *at, level }).collect())
    }

    /// Shows blocks and all below them, the last one first.
    fn show(&mut self, mut stack: Vec<WantedBlock>) -> Result {
        while let Some(wanted) = stack.pop() {
            let shown = if self.seen.insert(wanted.at.0) {
                self.block(&wanted, &mut stack)?
            } else {
                Err(bad("it was shown before"))
            };
            if let Err(problem) = shown {
                self.bad("bad block", Fields::default().with("at", wanted.at.0), problem)?;
            }
        }
        Ok(())
    }

    /// Shows that something does not verify.
    fn bad(&mut self, what: &'static str, fields: Fields, problem: Malformed) -> Result {
        self.is_sound = false;
        self.to.line(what, fields.with("problem", problem.problem.into_owned()))
    }

    /// Shows a block, and puts its children on the stack.
    fn block(
        &mut self,
        wanted: &WantedBlock,
        stack: &mut Vec<WantedBlock>,
    ) -> Result<std::result::Result<(), Malformed>> {
        let (geometry, at) = (self.geometry, wanted.at);
        let Some(place) = geometry.place_of(at) else {
            return Ok(Err(bad("it is not in the volume")));
        };
        let bytes = read(self.device, place.bytes(), geometry.block_size())?;
        let block = match XfsBtreeBlock::verify(&bytes, geometry, self.tree, at, self.owner) {
            Ok(block) if u32::from(block.header.level) == wanted.level => block,
            Ok(_) => return Ok(Err(bad("its level is not that below its parent"))),
            Err(problem) => return Ok(Err(problem)),
        };
        let fields = Fields::default().with("at", at.0).with("level", block.header.level);
        self.to.line("block", fields.with("count", block.header.count))?;
        for fields in records(&block, geometry) {
            self.to.line("record", fields)?;
        }
        let ag = geometry.split(at).map_or(AgNumber(0), |(ag, _)| ag);
        for pointer in (0..block.len()).rev().filter_map(|index| block.pointer(index)) {
            let at = if self.tree.is_long() {
                FsBlock(pointer)
            } else {
                geometry.fs_block(ag, AgBlock(u32::try_from(pointer).unwrap_or(u32::MAX)))
            };
            stack.push(WantedBlock { at, level: wanted.level.saturating_sub(1) });
        }
        Ok(Ok(()))
    }
}

/// The records of a leaf. Each tree has records of one kind, so the others are none.
fn records(block: &XfsBtreeBlock<'_>, geometry: &XfsGeometry) -> Vec<Fields> {
    let new = Fields::default;
    let free = block.records::<XfsFreeExtent>().iter();
    let chunks = block.records::<XfsInodeChunk>().iter();
    let owned = block.records::<XfsReverseMap>().iter();
    let shared = block.records::<XfsSharedExtent>().iter();
    let extents = block.records::<XfsExtentItem>().iter().map(|item| item.get());
    free.map(|record| new().with("start", record.start).with("count", record.count))
        .chain(chunks.map(|record| {
            let fields = new().with("start", record.start).with("free", record.free);
            fields.with("holes", record.holes(geometry))
        }))
        .chain(owned.map(|record| {
            let fields = new().with("start", record.start).with("count", record.count);
            fields.with("owner", record.owner).with("offset", record.offset)
        }))
        .chain(shared.map(|record| {
            let fields = new().with("start", record.start).with("count", record.count);
            fields.with("references", record.references)
        }))
        .chain(extents.map(|extent| {
            let fields = new().with("offset", extent.offset.0).with("start", extent.start.0);
            fields.with("count", extent.count).with("unwritten", u8::from(extent.is_unwritten))
        }))
        .collect()
}

fn bad(problem: &'static str) -> Malformed {
    Malformed::new(Structure::BtreeBlock, problem)
}

fn corrupt(Malformed { structure, problem }: Malformed) -> VerbFailure {
    Error::corrupt(structure, problem).into()
}

fn read(device: &dyn BlockDevice, at: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let what = || format!("reading {len} bytes at {at} of {}", device.name());
    device.read_at(at, &mut bytes).map_err(|error| Error::io(what(), error))?;
    Ok(bytes)
}
