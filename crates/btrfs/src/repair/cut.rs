//! Cuts off trees the blocks that cannot be used, where the user has chosen that.
//!
//! What such a block leads to is not known, so a repair is refused while there is one. Of a
//! subvolume that the user names, the node above loses its pointer, and everything else stays:
//!
//! ```text
//! cut      nodes without the pointers, a new root                          here
//! named    which files have lost something, as far as names tell           losses
//! mended   inodes, entries and names, from what is left of each other      files
//! ```
//!
//! 1. All subvolumes that share such a block must be chosen: a repair leaves no tree with one.
//! 2. Of a leaf whose checksum is right, what is intact is saved ([`leaves`](super::leaves)).
//! 3. A subvolume of which nothing is left becomes an empty one. It keeps its name, its number and
//!    its UUID, so everything that refers to it still does. One that was deleted becomes empty as a
//!    whole: nothing of it is needed.
//! 4. A subvolume that lost something is not what was sent or received any more, so it forgets that
//!    it was received, and counts as changed by the transaction of the repair.
//! 5. Data whose checksums were in a lost block has none, and the check names its files. Of the
//!    quota tree limits are lost, and the numbers are counted anew ([`quotas`](super::quotas)).
//!    Without the item that says which quotas they are, there are none any more.
//! 6. New blocks keep off what the old extent tree has. So what is below a lost node is not written
//!    over, as far as the extent tree can be read.

mod losses;

use std::collections::BTreeSet;
use std::ops::{ControlFlow, Range};

use offshoot_btrfs_format::chunk::Chunk;
use offshoot_btrfs_format::encode::inode_ref;
use offshoot_btrfs_format::inode::{InodeItem, Timespec};
use offshoot_btrfs_format::quota::STATUS_KEY;
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{Generation, Ino, ItemType, Key, Logical, TreeId};
use offshoot_vfs::{Errno, Error, Result, Structure};
use zerocopy::{FromZeros, IntoBytes};

use super::RepairBase;
use super::editor::PrunedTree;
use super::leaves::LeafSaver;
use super::overlaps::OverlapStep;
use super::roots::{RootStep, root_item};
use super::survey::SpaceSurvey;
use crate::check::{CheckedVolume, KeyRange, path_of_inode};
use crate::tree::{LostSubtree, TreeRoot};

pub(super) use losses::find as find_lost_files;

/// The most blocks of a subvolume that are listed.
const MOST_BLOCKS: usize = 10_000;

/// A subvolume by what a user calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubvolumeName {
    /// Its number.
    Id(TreeId),
    /// Its path from the top level of the volume.
    Path(Vec<u8>),
}

/// What a repair cuts off a subvolume, or off the checksum tree or quota tree.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CutOff {
    /// The subvolume or other tree.
    pub subvolume: TreeId,
    /// Its path from the top level of the volume, if it has one.
    pub path: Option<Vec<u8>>,
    /// The first 10,000 blocks that are lost.
    pub blocks: Vec<CutOffBlock>,
    /// How many blocks are lost, without those below a lost node.
    pub block_count: u64,
    /// Whether nothing is left, so that it becomes an empty subvolume, no data has a checksum, or
    /// quotas are off.
    pub is_emptied: bool,
    /// The first 10,000 files that have lost something, as far as that is known.
    pub files: Vec<CutOffFile>,
    /// Whether there are more of them.
    pub are_more: bool,
}

/// A block that a repair cuts off a subvolume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutOffBlock {
    /// Its address.
    pub logical: Logical,
    /// Its level. 0 for a leaf.
    pub level: u8,
    /// Its first key.
    pub first: Key,
    /// The key behind its last one; `None` at the end of the tree.
    pub behind: Option<Key>,
}

/// A file or directory that lost something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutOffFile {
    /// Its inode number.
    pub ino: u64,
    /// Its path from the top level of the volume, if that is known.
    pub path: Option<Vec<u8>>,
    /// Whether the inode itself is gone. Otherwise it may lack a part.
    pub is_gone: bool,
}

/// The subvolumes that the user has chosen, and other trees.
///
/// # Errors
/// `ENOENT` when there is no such subvolume or tree.
pub(super) fn chosen(
    volume: &CheckedVolume<'_>,
    names: &[SubvolumeName],
) -> Result<BTreeSet<TreeId>> {
    let trees = if names.is_empty() { Vec::new() } else { trees_to_cut(volume) };
    let find = |name: &SubvolumeName| {
        let is_it = |id: &TreeId| match name {
            SubvolumeName::Id(wanted) => id == wanted,
            SubvolumeName::Path(path) => {
                path_of_inode(volume, *id, Ino::ROOT_DIR.0).is_some_and(|own| own == plain(path))
            }
        };
        let found = trees.iter().copied().find(is_it);
        found.ok_or_else(|| {
            let name = match name {
                SubvolumeName::Id(id) => id.to_string(),
                SubvolumeName::Path(path) => format!("\"{}\"", path.escape_ascii()),
            };
            let what = format!(
                "no subvolume {name}: where names are lost on the way to a subvolume, its number \
                 is to be given"
            );
            Error::posix(Errno::NOENT, what)
        })
    };
    names.iter().map(find).collect()
}

/// A path with one slash in front of each name.
fn plain(path: &[u8]) -> Vec<u8> {
    let names: Vec<_> = path.split(|&byte| byte == b'/').filter(|name| !name.is_empty()).collect();
    [b"/".as_slice(), &names.join(&b'/')].concat()
}

/// All subvolumes, deleted ones included.
pub(super) fn subvolumes(volume: &CheckedVolume<'_>) -> Vec<TreeId> {
    trees_to_cut(volume).into_iter().filter(|id| id.is_subvolume()).collect()
}

/// All trees of which blocks may be cut off.
fn trees_to_cut(volume: &CheckedVolume<'_>) -> Vec<TreeId> {
    let mut ids = Vec::new();
    volume.each_item(volume.root_tree(), KeyRange::ALL, &mut |key, _| {
        let id = TreeId(key.objectid);
        if key.item_type == ItemType::ROOT_ITEM && CutOff::is_possible(id) {
            ids.push(id);
        }
        ControlFlow::Continue(())
    });
    ids
}

/// Refuses when trees have blocks that cannot be used, and the user has not chosen to cut these
/// off.
///
/// # Errors
/// [`Error::Corrupt`] with the subvolumes to choose.
pub(super) fn require_chosen(
    volume: &CheckedVolume<'_>,
    damaged: &BTreeSet<TreeId>,
    chosen: &BTreeSet<TreeId>,
) -> Result<()> {
    let (to_cut, others): (Vec<TreeId>, Vec<TreeId>) =
        damaged.difference(chosen).partition(|id| CutOff::is_possible(**id));
    if !others.is_empty() {
        let step = if others.contains(&TreeId::CHUNK) {
            "repair --scan makes the chunk tree anew"
        } else if others.contains(&TreeId::ROOT) {
            "get out the files with recover; repair --scan looks for an older state that is whole"
        } else {
            "get out the files with extract"
        };
        let others: Vec<_> = others.iter().map(ToString::to_string).collect();
        let what = format!(
            "blocks of the trees {} cannot be used, and what they lead to is not known: {step}; \
             nothing was written",
            others.join(", ")
        );
        return Err(Error::corrupt(Structure::TreeBlock, what));
    }
    if to_cut.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = to_cut.iter().map(|id| shown(volume, *id)).collect();
    let options: Vec<_> = damaged
        .iter()
        .filter(|id| CutOff::is_possible(**id))
        .map(|id| format!("--cut-off {}", id.0))
        .collect();
    let what = format!(
        "blocks of the trees {} cannot be used, and what they lead to is not known: get out the \
         files with extract; a repair with --class overlaps is enough for subvolumes where their \
         checksums are right, and one with {} gives up what was in these blocks; nothing was \
         written",
        names.join(", "),
        options.join(" ")
    );
    Err(Error::corrupt(Structure::TreeBlock, what))
}

/// The number of a subvolume, and its path if it has one; the name of another tree.
fn shown(volume: &CheckedVolume<'_>, id: TreeId) -> String {
    if !id.is_subvolume() {
        return id.to_string();
    }
    match path_of_inode(volume, id, Ino::ROOT_DIR.0) {
        Some(path) => format!("{} ({})", id.0, path.escape_ascii()),
        None => id.0.to_string(),
    }
}

/// Leaves only those free places that are free by the old extent tree, too, as far as that can be
/// read.
pub(super) fn keep_off_known(
    volume: &CheckedVolume<'_>,
    chunks: &[Chunk],
    survey: &mut SpaceSurvey,
) {
    let Some(tree) = volume.tree(TreeId::EXTENT) else { return };
    let node_size = volume.node_size();
    let mut free = Vec::<Range<u64>>::new();
    for chunk in chunks.iter().filter(|chunk| chunk.flags.has_metadata()) {
        let (mut behind, end) = (chunk.start.0, chunk.end().0);
        let mut pass = |start: u64, len: u64| {
            let (from, to) = (behind.next_multiple_of(node_size), start / node_size * node_size);
            if from < to {
                free.push(from..to);
            }
            behind = behind.max(start.saturating_add(len));
        };
        volume.each_item(tree, KeyRange::of_objects(chunk.start.0, end), &mut |key, _| {
            match key.item_type {
                ItemType::METADATA_ITEM => pass(key.objectid, node_size),
                ItemType::EXTENT_ITEM => pass(key.objectid, key.offset),
                _ => {}
            }
            ControlFlow::Continue(())
        });
        pass(end, 0);
    }
    survey.keep_metadata_in(&free);
}

/// Subvolumes with blocks that cannot be used.
pub(super) struct TornSubvolumes<'t> {
    /// Those that the user has chosen: what cannot be saved of them is cut off.
    pub(super) chosen: &'t BTreeSet<TreeId>,
    /// Those of whose leaves all that is intact is saved.
    pub(super) saved: &'t BTreeSet<TreeId>,
}

/// Saves what is intact in blocks that cannot be used, and cuts off the rest. Returns what is cut
/// off.
///
/// # Errors
/// When something would have to be cut off a subvolume that was not chosen; `EINVAL` when all
/// blocks of a chosen one can be used; when a block cannot be written, or there is no room.
pub(super) fn stage(
    volume: &CheckedVolume<'_>,
    survey: &SpaceSurvey,
    base: &RepairBase,
    torn: &TornSubvolumes<'_>,
    overlaps: &mut OverlapStep,
) -> Result<Vec<CutOff>> {
    let mut step = RootStep::new(volume, survey, base);
    let (mut all, mut unsaved) = (Vec::new(), BTreeSet::new());
    for &id in torn.chosen.union(torn.saved) {
        let Some((_, root, item)) = root_item(volume, id) else { continue };
        let mut cut = CutOff {
            subvolume: id,
            path: path_of_inode(volume, id, Ino::ROOT_DIR.0),
            blocks: Vec::new(),
            block_count: 0,
            is_emptied: false,
            files: Vec::new(),
            are_more: false,
        };
        let mut saver = LeafSaver::new(volume, overlaps);
        let pruned = step.editor.prune(root, &mut |lost| {
            let items = if id.is_subvolume() { saver.save(id, lost) } else { None };
            if items.is_none() {
                cut.add(lost);
            }
            items
        })?;
        if cut.block_count > 0 && !torn.chosen.contains(&id) {
            unsaved.insert(id);
            continue;
        }
        match pruned {
            PrunedTree::Whole => {
                let what = format!(
                    "nothing is to be cut off {}: all its blocks can be used; nothing was written",
                    shown(volume, id)
                );
                return Err(Error::posix(Errno::INVAL, what));
            }
            PrunedTree::InPart(new) if id == TreeId::CSUM => step.set_root(id, new, |_| {}),
            PrunedTree::InPart(new) if id == TreeId::QUOTA && has_status(volume, root) => {
                step.set_root(id, new, |_| {});
            }
            _ if id == TreeId::QUOTA => {
                cut.is_emptied = true;
                step.remove(id);
            }
            PrunedTree::Lost if id == TreeId::CSUM => {
                cut.is_emptied = true;
                let new = step.editor.plant(id, &[])?;
                step.set_root(id, new, |_| {});
            }
            PrunedTree::InPart(new) if !item.is_dead() => {
                step.set_root(id, new, |item| forget_origin(item, base.generation));
            }
            _ => {
                cut.is_emptied = true;
                let new = step.editor.plant(id, &empty_subvolume(&item, base.generation))?;
                step.set_root(id, new, |item| forget_origin(item, base.generation));
            }
        }
        if cut.block_count > 0 {
            all.push(cut);
        }
    }
    require_chosen(volume, &unsaved, torn.chosen)?;
    step.finish()?;
    Ok(all)
}

/// Whether the item of a quota tree can be read that says which quotas they are.
fn has_status(volume: &CheckedVolume<'_>, root: TreeRoot) -> bool {
    volume.with_item(root, STATUS_KEY, |_| Some(())).is_some()
}

impl CutOff {
    /// Whether blocks of this tree are cut off if that is chosen: subvolumes, the checksum tree and
    /// the quota tree.
    #[must_use]
    pub fn is_possible(tree: TreeId) -> bool {
        tree.is_subvolume() || matches!(tree, TreeId::CSUM | TreeId::QUOTA)
    }

    fn add(&mut self, lost: &LostSubtree) {
        self.block_count += 1;
        if self.blocks.len() < MOST_BLOCKS {
            self.blocks.push(CutOffBlock {
                logical: lost.block.logical,
                level: lost.block.level,
                first: lost.from,
                behind: lost.to,
            });
        }
    }
}

/// The items of a subvolume without files.
pub(super) fn empty_subvolume(root: &RootItem, generation: Generation) -> Vec<(Key, Vec<u8>)> {
    let dir = Ino::ROOT_DIR.0;
    let item = root_directory(generation, root.ctime);
    vec![
        (Key::new(dir, ItemType::INODE_ITEM, 0), item.as_bytes().to_vec()),
        (Key::new(dir, ItemType::INODE_REF, dir), inode_ref(0, b"..")),
    ]
}

/// Makes a root item that of a subvolume as [`empty_subvolume`] makes it.
pub(super) fn become_empty(item: &mut RootItem) {
    forget_progress(item);
    item.root_dirid = Ino::ROOT_DIR.0.into();
}

/// The item of a directory that only root can enter: its owner and permissions are not known.
fn root_directory(generation: Generation, at: Timespec) -> InodeItem {
    InodeItem {
        generation: generation.0.into(),
        transid: generation.0.into(),
        nlink: 1.into(),
        mode: 0o040_700.into(),
        atime: at,
        ctime: at,
        mtime: at,
        otime: at,
        ..InodeItem::new_zeroed()
    }
}

/// Makes a root item say that the subvolume is not what was sent or received.
pub(super) fn forget_origin(item: &mut RootItem, generation: Generation) {
    let zeroed = RootItem::new_zeroed();
    item.ctransid = generation.0.into();
    item.received_uuid = zeroed.received_uuid;
    item.stransid = zeroed.stransid;
    item.rtransid = zeroed.rtransid;
    item.stime = zeroed.stime;
    item.rtime = zeroed.rtime;
    forget_progress(item);
}

/// Makes a root item say that no part of the subvolume was removed.
pub(super) fn forget_progress(item: &mut RootItem) {
    item.drop_progress = RootItem::new_zeroed().drop_progress;
    item.drop_level = 0;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_subvolumes_are_compared_without_needless_slashes() {
        for path in ["a/b", "/a/b", "//a//b/"] {
            assert_eq!(plain(path.as_bytes()), b"/a/b");
        }
        assert_eq!(plain(b"/"), b"/");
        assert_eq!(plain(b""), b"/");
    }
}
