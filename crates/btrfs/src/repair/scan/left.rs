//! What is left of a volume of which no state fits together, to be read.
//!
//! A repair that scans refuses such a volume, because a wrong guess would destroy what is there. A
//! reader may guess: each block and each sector of data proves itself by its checksum.
//!
//! ```text
//! chunks    the newest version of each, and what ranges and block groups say together
//! root      the newest one that leads to the top level and that nothing speaks against,
//!           or else the highest block of the root tree of the newest transaction. A whole one of
//!           the transaction before is better, because the newest one may not have been complete
//! members   the devices that are there; the others may be left out if the caller allows that
//! ```

use std::collections::BTreeSet;

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::superblock::SuperblockItem;
use offshoot_vfs::{Code, Errno, Error, Result, Structure};

use super::found::{Draft, FoundState, MOST_ROOTS, Scan};
use super::search::ScannedVolume;
use super::{made, roots};
use crate::check::CheckedVolume;
use crate::tree::TreeRoot;

/// A root through which a draft may be read.
struct OpenedRoot<'s> {
    superblock: Box<SuperblockItem>,
    /// The chunk tree; `None` for one that is made of the draft.
    chunk_root: Option<TreeRoot>,
    /// The volume, if its chunk tree can be read.
    volume: Option<CheckedVolume<'s>>,
}

impl<'s> Scan<'s> {
    /// What is left of the volume `scanned`.
    ///
    /// # Errors
    /// When no chunk or no root is left, or a member is missing and the options forbid that.
    pub(super) fn find_what_is_left(&self, scanned: &ScannedVolume) -> Result<FoundState> {
        let mut draft = self.draft(scanned)?;
        draft.items.keep_chunks_on(&draft.order);
        self.require_members(&draft)?;
        let opened = match &draft.known {
            Some(known) => self.open_what_is_left(&draft, known.item.clone())?,
            None => self.likely_root(&draft)?,
        };
        let trees = opened.volume.as_ref().map(roots::trees).unwrap_or_default();
        let OpenedRoot { superblock, chunk_root, .. } = opened;
        let is_made = draft.known.is_none();
        let Draft { items, order, oldest, .. } = draft;
        let mut state = FoundState { items, order, superblock, chunk_root, oldest, is_made };
        state.show_features(scanned, &trees);
        Ok(state)
    }

    /// Opens the draft with the root that is in `superblock`.
    fn open_what_is_left(
        &self,
        draft: &Draft<'_>,
        superblock: Box<SuperblockItem>,
    ) -> Result<OpenedRoot<'s>> {
        let error = match self.open_through(draft, &superblock, None) {
            Ok(volume) => {
                return Ok(OpenedRoot { superblock, chunk_root: None, volume: Some(volume) });
            }
            Err(error) => error,
        };
        // A chunk tree has no place, as on system chunks with parity. One that is there is read
        // then, or its leaves are searched for when the volume is opened.
        let chunk_root = newest_chunk_root(draft.scanned);
        if error.errno() == Errno::INTR || chunk_root.is_none() {
            return Err(error);
        }
        match self.open_through(draft, &superblock, chunk_root) {
            Err(error) if error.errno() == Errno::INTR => Err(error),
            opened => Ok(OpenedRoot { superblock, chunk_root, volume: opened.ok() }),
        }
    }

    /// What is left of commits behind the one after `whole`: that one may not have been complete.
    ///
    /// # Errors
    /// `EINTR` when the caller has ended the scan.
    pub(super) fn find_what_is_newer(
        &self,
        scanned: &ScannedVolume,
        whole: &FoundState,
    ) -> Result<Option<FoundState>> {
        let next = whole.superblock.generation.get() + 1;
        if !whole.is_made || scanned.newest.0 <= next {
            return Ok(None);
        }
        match self.find_what_is_left(scanned) {
            Ok(left) if left.superblock.generation.get() > next => Ok(Some(left)),
            Err(error) if error.errno() == Errno::INTR => Err(error),
            _ => Ok(None),
        }
    }

    /// Refuses a volume of which chunks are on a device that was not given.
    fn require_members(&self, draft: &Draft<'_>) -> Result<()> {
        let stripes = draft.items.chunks.iter().flat_map(|chunk| &chunk.stripes);
        let given: BTreeSet<_> = draft.order.iter().map(|item| item.devid.get()).collect();
        let absent = stripes.map(|stripe| stripe.device).find(|id| !given.contains(&id.0));
        match absent {
            Some(id) if !self.options.check.is_degraded => {
                let what = format!(
                    "device {id} of volume {} is missing, unless it was removed: name it with \
                     --device, or read without it with --degraded",
                    draft.scanned.fsid
                );
                Err(Error::posix(Errno::NODEV, what).with_code(Code::Incomplete))
            }
            _ => Ok(()),
        }
    }

    /// The newest root below which something can be read.
    fn likely_root(&self, draft: &Draft<'_>) -> Result<OpenedRoot<'s>> {
        let all = draft.scanned.highest(TreeId::ROOT);
        let mut newest = None;
        for root in all.iter().take(MOST_ROOTS) {
            let superblock = Box::new(made::superblock(draft.scanned, &draft.items, root));
            let opened = self.open_what_is_left(draft, superblock)?;
            let may_be = |volume| roots::may_be_root(volume, draft.scanned, root);
            if opened.volume.as_ref().is_some_and(may_be) {
                return Ok(opened);
            }
            newest.get_or_insert(opened);
        }
        newest.ok_or_else(|| {
            let what = format!(
                "no superblock of volume {} is left, and no block of the root tree, without which \
                 subvolumes are not found",
                draft.scanned.fsid
            );
            Error::corrupt(Structure::RootTree, what)
        })
    }
}

/// The highest block of the chunk tree of the newest transaction that has one.
fn newest_chunk_root(scanned: &ScannedVolume) -> Option<TreeRoot> {
    scanned.highest(TreeId::CHUNK).first().map(|block| TreeRoot {
        id: TreeId::CHUNK,
        logical: block.logical,
        level: block.level,
        generation: block.generation,
    })
}
