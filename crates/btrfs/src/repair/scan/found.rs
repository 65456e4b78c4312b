//! From found blocks to the state of a volume: its members, chunks and root.
//!
//! The trees are read through the ordinary check. For that a first chunk tree, of what the leaves
//! describe, and superblocks that lead to it are written to staged devices, which nothing keeps.
//!
//! ```text
//! newest versions -> first chunks -> which device is which -> a draft that can be opened
//!     for each root that may be: open the draft with it, walk its trees   roots
//!     the chunks on which the structures of that root agree               agreed
//!     the newest chunk tree that says the same, or else a new one
//! ```

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::block::MAX_NODESIZE;
use offshoot_btrfs_format::chunk::DevItem;
use offshoot_btrfs_format::superblock::{Superblock, SuperblockItem};
use offshoot_btrfs_format::{Generation, ItemType, Logical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Result, Structure};
use uuid::Uuid;

use super::agreed::ChunkWitnesses;
use super::chunk_tree::{self, ChunkTreeItems};
use super::search::{FoundBlock, ScannedVolume};
use super::stored::StoredSuperblocks;
use super::{ScanPurpose, has_whole_root_tree, made, members, roots};
use crate::check::{self, CheckWatch, CheckedVolume, KeyRange};
use crate::repair::plan::member_bytes;
use crate::repair::{RepairOptions, stage_devices, superblocks};
use crate::rescue::DescribedChunk;
use crate::tree::TreeRoot;

/// The most roots that are tried, and the most chunk trees.
pub(super) const MOST_ROOTS: usize = 32;

/// What a scan works with.
#[derive(Clone, Copy)]
pub(super) struct Scan<'s> {
    pub(super) devices: &'s [Arc<dyn BlockDevice>],
    /// The superblocks of each device.
    pub(super) stored: &'s [StoredSuperblocks],
    pub(super) options: &'s RepairOptions,
    pub(super) watch: &'s CheckWatch<'s>,
    pub(super) purpose: ScanPurpose,
}

/// The state of a volume, as it was found.
#[derive(Debug)]
pub(super) struct FoundState {
    /// What the chunk tree has to say.
    pub(super) items: ChunkTreeItems,
    /// The item of each device, in their order.
    pub(super) order: Vec<DevItem>,
    /// The superblock; chunk tree and system chunks are those before the repair.
    pub(super) superblock: Box<SuperblockItem>,
    /// The chunk tree, if a whole one is there.
    pub(super) chunk_root: Option<TreeRoot>,
    /// The generation of the oldest leaf that items come from.
    pub(super) oldest: Generation,
    /// Whether the superblock was made from the trees.
    pub(super) is_made: bool,
}

impl FoundState {
    /// Puts the features into a superblock that was made from the trees. `trees` are those that the
    /// root leads to.
    pub(super) fn show_features(&mut self, scanned: &ScannedVolume, trees: &BTreeSet<TreeId>) {
        if !self.is_made {
            return;
        }
        let (incompat, compat_ro) = scanned.features.with_trees(trees);
        let of_chunks = scanned.features.incompat(scanned.node_size, &self.items.chunks);
        self.superblock.incompat_flags = of_chunks.union(incompat).0.into();
        self.superblock.compat_ro_flags = compat_ro.0.into();
    }
}

/// What leaves describe, before the trees are read.
pub(super) struct Draft<'s> {
    pub(super) scanned: &'s ScannedVolume,
    pub(super) items: ChunkTreeItems,
    pub(super) order: Vec<DevItem>,
    pub(super) oldest: Generation,
    /// The newest superblock that is sound or proved.
    pub(super) known: Option<Superblock>,
}

impl<'s> Scan<'s> {
    /// The state of the volume `scanned`.
    ///
    /// # Errors
    /// When a member is missing, no root is whole, several roots of a transaction are, or
    /// structures contradict each other.
    pub(super) fn find(&self, scanned: &ScannedVolume) -> Result<FoundState> {
        let draft = self.draft(scanned)?;
        let known = draft
            .known
            .as_ref()
            .map(|known| self.open(&draft, &known.item).map(|volume| (known.item.clone(), volume)));
        let (item, volume) = match known.transpose()? {
            Some((item, volume)) if has_whole_root_tree(&volume) => (item, volume),
            _ => self.newest_root(&draft)?,
        };
        let mut state = Self::state(&draft, item, &volume)?;
        state.show_features(scanned, &roots::trees(&volume));
        Ok(state)
    }

    /// What the leaves of the volume `scanned` describe.
    ///
    /// # Errors
    /// When no leaf describes a chunk, or nothing tells which device is which.
    pub(super) fn draft<'d>(&self, scanned: &'d ScannedVolume) -> Result<Draft<'d>> {
        let described = &scanned.described;
        let mut devices = described.newest_devices();
        let sound = self.stored.iter().filter_map(|stored| stored.sound.as_ref());
        let sound: Vec<_> = sound.filter(|one| one.metadata_uuid == scanned.fsid).collect();
        for own in sound.iter().map(|superblock| superblock.item.dev_item) {
            if devices.iter().all(|item| item.uuid != own.uuid) {
                devices.push(own);
            }
        }
        let sector_size = sound.first().map(|superblock| superblock.sector_size);
        let sector_size = sector_size.or(described.sector_size());
        let of_devices = devices.iter().map(|item| item.sector_size.get());
        let sector_size = sector_size.or(of_devices.max()).unwrap_or_default();
        let is_sector =
            sector_size.is_power_of_two() && (512..=MAX_NODESIZE).contains(&sector_size);
        let chunks = described.first_chunks(&devices, sector_size);
        if chunks.is_empty() || !is_sector {
            let what = format!(
                "of volume {} no leaf is left that describes a chunk; nothing was written",
                scanned.fsid
            );
            return Err(Error::corrupt(Structure::ChunkTree, what));
        }
        let mut items = ChunkTreeItems::new(devices, chunks, sector_size);
        let known = (&items.devices[..], &items.chunks[..]);
        let order = members::of_devices(self.devices, self.stored, scanned, known, self.purpose)?;
        let oldest = described.oldest_of_newest();
        items.devices.clone_from(&order);
        items.devices.sort_by_key(|item| item.devid.get());
        let system = items.system_items();
        let newest = sound.into_iter().max_by_key(|one| (one.generation, one.has_pending_log()));
        let proved = || {
            let all = self.stored.iter().filter_map(|stored| stored.proved(&system));
            all.max_by_key(|superblock| superblock.generation)
        };
        let known = newest.cloned().or_else(proved);
        let mut known = known.filter(|one| one.metadata_uuid == scanned.fsid);
        match self.require_newest(scanned, known.as_ref()) {
            // There is no need to know which member missed commits: a reader proves every block.
            Err(_) if self.purpose == ScanPurpose::Read => known = None,
            required => required?,
        }
        Ok(Draft { scanned, items, order, oldest, known })
    }

    /// Refuses superblocks that are older than what another member has, whose superblocks are lost.
    fn require_newest(&self, scanned: &ScannedVolume, known: Option<&Superblock>) -> Result<()> {
        let Some(known) = known else { return Ok(()) };
        let are_some_lost = self.stored.iter().any(|stored| stored.sound.is_none());
        // A transaction that was not complete leaves blocks that are newer by one.
        if are_some_lost && scanned.newest.0 > known.generation.0 + 1 {
            let what = format!(
                "repairing a volume whose last superblock is of transaction {}, while there are \
                 blocks of transaction {}: the device that missed commits is not to be chosen; \
                 get the files out with recover",
                known.generation, scanned.newest
            );
            return Err(Error::unsupported(Code::MemberBehind, what));
        }
        Ok(())
    }

    /// Opens the draft with the root that is in `item`, and a chunk tree that is made of the draft.
    fn open(&self, draft: &Draft<'_>, item: &SuperblockItem) -> Result<CheckedVolume<'s>> {
        self.open_through(draft, item, None)
    }

    /// The same through this chunk tree, if there is one.
    pub(super) fn open_through(
        &self,
        draft: &Draft<'_>,
        item: &SuperblockItem,
        chunk_root: Option<TreeRoot>,
    ) -> Result<CheckedVolume<'s>> {
        let staged = stage_devices(self.devices, self.options)?;
        let devices = (&staged[..], &draft.order[..]);
        let generations = (Generation(item.generation.get()), draft.oldest);
        let lead_to = draft.known.as_ref().map(|known| &*known.item);
        let made = || {
            let (items, scanned) = (&draft.items, draft.scanned);
            chunk_tree::stage(items, scanned, devices, generations, lead_to, self.purpose)
        };
        let root = chunk_root.map_or_else(made, Ok)?;
        let item = made::with_chunk_tree(item, &draft.items, root)?;
        made::stage(&item, devices, draft.scanned.checksum)?;
        check::open(superblocks::as_devices(&staged), None, &self.options.check, self.watch)
    }

    /// The newest whole root, which is not newer than a superblock that is known: a superblock that
    /// leads to it, and the volume.
    fn newest_root(&self, draft: &Draft<'_>) -> Result<(Box<SuperblockItem>, CheckedVolume<'s>)> {
        let mut all = draft.scanned.highest(TreeId::ROOT);
        if let Some(known) = &draft.known {
            all.retain(|root| root.generation <= known.generation);
        }
        let (mut why, mut whole) = (None, Vec::<(FoundBlock, Box<SuperblockItem>)>::new());
        let mut opened = None;
        for root in all.iter().take(MOST_ROOTS) {
            if whole.first().is_some_and(|(first, _)| first.generation > root.generation) {
                break;
            }
            let item = Box::new(match &draft.known {
                Some(known) => made::with_root(&known.item, root),
                None => made::superblock(draft.scanned, &draft.items, root),
            });
            let volume = self.open(draft, &item)?;
            match roots::why_not_whole(&volume, draft.scanned, root)? {
                None => {
                    whole.push((*root, item));
                    opened = Some(volume);
                }
                Some(problem) => {
                    let what = format!(
                        "the newest is at {} of transaction {}: {problem}",
                        root.logical, root.generation
                    );
                    why.get_or_insert(what);
                }
            }
        }
        match (&whole[..], opened) {
            ([(_, item)], Some(volume)) => Ok((item.clone(), volume)),
            ([(one, _), (other, _), ..], _) => {
                let what = format!(
                    "transaction {} has whole roots at {} and at {}; nothing was written: look at \
                     them with recover --list-roots",
                    one.generation, one.logical, other.logical
                );
                Err(Error::corrupt(Structure::RootTree, what))
            }
            _ => {
                let known = draft.known.as_ref();
                let lost =
                    known.map_or("no superblock is left", |_| "the root tree has lost blocks");
                let what = format!(
                    "{lost}, and no root of the root tree is whole ({}); nothing was written: get \
                     the files out with recover",
                    why.unwrap_or_else(|| "no block of that tree is there".into())
                );
                Err(Error::corrupt(Structure::RootTree, what))
            }
        }
    }

    /// The state of the commit that `item` leads to, and that `volume` shows.
    fn state(
        draft: &Draft<'_>,
        item: Box<SuperblockItem>,
        volume: &CheckedVolume<'_>,
    ) -> Result<FoundState> {
        let trees = chunk_roots(draft, &item);
        let mut trees = trees.into_iter().filter_map(|root| {
            read_chunk_tree(volume, root, draft.items.sector_size).map(|items| (root, items))
        });
        let is_made = draft.known.is_none();
        let whole = match &draft.known {
            // The superblock says which chunk tree it is.
            Some(_) => trees.next(),
            None => None,
        };
        let (chunk_root, items, oldest) = if let Some((root, items)) = whole {
            (Some(root), items, draft.oldest)
        } else {
            let witnesses = ChunkWitnesses::read(volume);
            let devices = (&draft.items.devices[..], draft.items.sector_size);
            let (chunks, oldest) = witnesses.chunks(&draft.scanned.described, devices)?;
            let is_equal = |items: &ChunkTreeItems| {
                items.chunks.iter().eq(chunks.iter().map(|described| &described.chunk))
            };
            match trees.find(|(_, items)| is_equal(items)) {
                Some((root, items)) => (Some(root), items, oldest),
                None => (None, agreed_items(draft, chunks)?, oldest.min(draft.oldest)),
            }
        };
        let order = own_items(&draft.order, &items)?;
        Ok(FoundState { items, order, superblock: item, chunk_root, oldest, is_made })
    }
}

/// The roots that the chunk tree may have: that of the superblock, or else those of the newest
/// transactions of the commit or before it.
fn chunk_roots(draft: &Draft<'_>, item: &SuperblockItem) -> Vec<TreeRoot> {
    let root =
        |logical, level, generation| TreeRoot { id: TreeId::CHUNK, logical, level, generation };
    if draft.known.is_some() {
        let generation = Generation(item.chunk_root_generation.get());
        return vec![root(Logical(item.chunk_root.get()), item.chunk_root_level, generation)];
    }
    let newest = Generation(item.generation.get());
    let found = draft.scanned.highest(TreeId::CHUNK).into_iter();
    let found = found.filter(|block| block.generation <= newest).take(MOST_ROOTS);
    found.map(|block| root(block.logical, block.level, block.generation)).collect()
}

/// What a chunk tree says; `None` when a block of it is lost or an item is malformed.
fn read_chunk_tree(
    volume: &CheckedVolume<'_>,
    root: TreeRoot,
    sector_size: u32,
) -> Option<ChunkTreeItems> {
    let (mut devices, mut chunks, mut is_sound) = (Vec::new(), Vec::new(), true);
    let walked = volume.each_item(root, KeyRange::ALL, &mut |key, data| {
        match key.item_type {
            ItemType::DEV_ITEM => match DevItem::view(data) {
                Ok(item) => devices.push(*item),
                Err(_) => is_sound = false,
            },
            ItemType::CHUNK_ITEM => match DescribedChunk::parse(key, data, sector_size) {
                Some(chunk) => chunks.push(chunk),
                None => is_sound = false,
            },
            _ => {}
        }
        ControlFlow::Continue(())
    });
    let is_whole = walked.is_whole() && is_sound && !devices.is_empty();
    is_whole.then(|| ChunkTreeItems::new(devices, chunks, sector_size))
}

/// The items of a new chunk tree with these chunks.
fn agreed_items(draft: &Draft<'_>, chunks: Vec<DescribedChunk>) -> Result<ChunkTreeItems> {
    let devices = draft.items.devices.clone();
    let mut items = ChunkTreeItems::new(devices, chunks, draft.items.sector_size);
    for chunk in &items.chunks {
        for stripe in &chunk.stripes {
            let item = items.devices.iter().find(|item| item.devid.get() == stripe.device.0);
            let uuid = item.map(|item| Uuid::from_bytes(item.uuid));
            if uuid != Some(stripe.device_uuid) {
                return Err(missing(stripe.device.0));
            }
        }
    }
    for device in &mut items.devices {
        device.bytes_used = member_bytes(&items.chunks, device.devid.get()).into();
    }
    Ok(items)
}

/// The items of the devices, as the chunk tree has them.
fn own_items(order: &[DevItem], items: &ChunkTreeItems) -> Result<Vec<DevItem>> {
    if let Some(other) =
        items.devices.iter().find(|item| order.iter().all(|own| own.uuid != item.uuid))
    {
        return Err(missing(other.devid.get()));
    }
    let find = |own: &DevItem| {
        let found = items.devices.iter().find(|item| item.uuid == own.uuid);
        found.copied().ok_or_else(|| {
            let what = format!(
                "repairing a volume together with device {}, which is not of it any more: leave \
                 it out",
                own.devid
            );
            Error::unsupported(Code::MemberMissing, what)
        })
    };
    order.iter().map(find).collect()
}

/// The error when a member was not given.
pub(super) fn missing(id: u64) -> Error {
    let what = format!("repairing a volume without its device {id}: name all with --device");
    Error::unsupported(Code::MemberMissing, what)
}
