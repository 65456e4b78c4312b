//! Opening: from devices to an [`Engine`].

use std::sync::Arc;

use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::{BlockDevice, MemoryBudget, MemoryDevice};
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_vfs::{Errno, Error, Result, Structure};

use super::{Engine, WriteDestination};
use crate::cores;
use crate::data::{Buffers, DecodedExtents};
use crate::delayed::Delayed;
use crate::inode::{Inodes, Rooms, SubvolumeMoves};
use crate::log::{self, RunningLog, in_volume};
use crate::options::{EngineOptions, Mechanisms, Rescue};
use crate::report::VolumeReport;
use crate::rescue::AroundDamage;
use crate::storage::{ChunkMap, GivenDevice, MappedChunk, Members, Storage, malformed};
use crate::subvolume::SubvolumeState;
use crate::transaction::{Base, chunk_tree_root};
use crate::tree::Cursor;
use crate::upkeep::Keeper;

impl Engine {
    /// Opens the volume to read it.
    pub(crate) fn open(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &EngineOptions,
    ) -> Result<Self> {
        let engine = Self::open_engine(devices.clone(), options)?;
        if options.is_log_ignored || !engine.superblock().has_pending_log() {
            return Ok(engine);
        }
        let is_dump = engine.superblock().is_metadata_only();
        drop(engine);
        let budget = MemoryBudget::new(options.replay_bytes);
        let in_memory = |below| Arc::new(MemoryDevice::over_within(below, &budget)) as Arc<_>;
        let changed: Vec<_> = devices.iter().cloned().map(in_memory).collect();
        // A replay changes trees, so all that it reads must be sound.
        let strict = EngineOptions { rescue: Rescue::default(), ..options.clone() };
        let replayed = Self::open_again(changed.clone(), &strict)
            .and_then(|engine| engine.replay(&strict, WriteDestination::InMemory));
        match replayed {
            Ok(()) => {}
            // A dump may lack blocks that a replay needs, and people only read it. A damaged
            // volume may lack them too.
            Err(error) if is_dump || options.rescue.is_set() => {
                let options = EngineOptions { is_log_ignored: true, ..options.clone() };
                let engine = Self::open_again(devices, &options)?;
                engine.report(&VolumeReport::LogNotReplayed { problem: error.to_string() });
                return Ok(engine);
            }
            Err(error) => return Err(error),
        }
        let devices = changed;
        let engine = Self::open_again(devices, options)?;
        engine.report(&VolumeReport::LogReplayed { is_stored: false });
        Ok(engine)
    }

    /// Opens the volume to read and to write it.
    pub(crate) fn open_writable(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &EngineOptions,
    ) -> Result<Self> {
        if options.rescue.is_set() {
            let what = "writing a volume with options to rescue what is in a damaged one";
            return Err(Error::posix(Errno::INVAL, what));
        }
        let engine = Self::open_engine(devices.clone(), options)?;
        if !engine.superblock().has_pending_log() {
            let engine = engine.into_writable(options, WriteDestination::Stored)?;
            engine.report_left_out();
            return Ok(engine);
        }
        if options.is_log_ignored {
            let what = "writing a volume while its pending tree log is ignored";
            return Err(Error::posix(Errno::INVAL, what));
        }
        engine.replay(options, WriteDestination::Stored)?;
        let engine =
            Self::open_again(devices, options)?.into_writable(options, WriteDestination::Stored)?;
        engine.report_left_out();
        engine.report(&VolumeReport::LogReplayed { is_stored: true });
        Ok(engine)
    }

    /// Replays the pending log, and commits.
    fn replay(self, options: &EngineOptions, change: WriteDestination) -> Result<()> {
        // This engine needs no reporter: if it stops writing, the caller gets an error.
        let options = EngineOptions {
            mechanisms: Mechanisms { has_delayed_items: false, ..options.mechanisms },
            commit_interval: None,
            reporter: None,
            ..options.clone()
        };
        let volume = self.into_writable(&options, change).map_err(in_volume)?;
        log::replay(&volume, options.replay_bytes)
    }

    fn open_engine(devices: Vec<Arc<dyn BlockDevice>>, options: &EngineOptions) -> Result<Self> {
        cores::learn();
        let (storage, found) =
            Storage::open(devices, options.reporter.clone(), options.is_log_ignored)?;
        let mut volume = Self::over(storage, options);
        volume.learn_chunks(&found, options)?;
        volume.rooms.base.around = AroundDamage::new(&options.rescue);
        volume.rooms.base.replaces_bad_data = options.rescue.replaces_bad_data;
        volume.choose_root(options)?;
        volume.find_checksums(options)?;
        if volume.superblock().incompat.has(Incompat::RAID_STRIPE_TREE) {
            volume.rooms.base.stripe_tree =
                Some(volume.tree(TreeId::RAID_STRIPE).map_err(|e| match e {
                    Error::Posix { .. } => Error::corrupt(
                        Structure::RootTree,
                        "the feature RAID_STRIPE_TREE without such a tree",
                    ),
                    e => e,
                })?);
        }
        Ok(volume)
    }

    /// Learns members and chunks from the chunk tree.
    pub(super) fn try_chunks(
        &mut self,
        found: &[GivenDevice],
        options: &EngineOptions,
    ) -> Result<()> {
        let devices = self.read_device_items()?;
        let storage = &self.rooms.base.storage;
        let members = storage.match_members(&devices, found, options.is_degraded)?;
        let chunks = self.read_chunks(&members)?;
        self.rooms.base.storage.learn(&devices, members, chunks);
        Ok(())
    }

    /// Opens the volume again, without repeating the reports of the first opening.
    fn open_again(devices: Vec<Arc<dyn BlockDevice>>, options: &EngineOptions) -> Result<Self> {
        let quiet = EngineOptions { reporter: None, ..options.clone() };
        let mut volume = Self::open_engine(devices, &quiet)?;
        volume.rooms.base.storage.set_reporter(options.reporter.clone());
        Ok(volume)
    }

    /// An engine over `storage` that knows only the root tree so far.
    fn over(storage: Storage, options: &EngineOptions) -> Self {
        let (subvolumes, log) = (Arc::<SubvolumeState>::default(), Arc::<RunningLog>::default());
        let rooms = Rooms {
            delayed: Delayed::off(storage.superblock().node_size),
            options: options.clone(),
            inodes: Inodes::new(options.cache_bytes / 2),
            buffers: Buffers::new(&Arc::default()),
            read_ahead: ReadAhead::default(),
            decoded: DecodedExtents::new(options.cache_bytes / 2),
            moves: SubvolumeMoves::default(),
            upkeep: Box::new(Keeper { subvolumes: subvolumes.clone(), log: log.clone() }),
            base: Base::new(storage, options.cache_bytes),
        };
        Self { rooms, subvolumes, log }
    }

    /// The device items of the chunk tree, which are in front of the chunks.
    fn read_device_items(&self) -> Result<Vec<DevItem>> {
        let mut devices = Vec::new();
        let chunks = Key::new(objectid::FIRST_CHUNK_TREE, ItemType(0), 0);
        self.for_each_chunk_item(ItemType::DEV_ITEM, chunks, |_, data| {
            devices.push(*DevItem::view(data).map_err(malformed)?);
            Ok(())
        })?;
        Ok(devices)
    }

    /// The chunks of the chunk tree. There may be 100,000, so they are nowhere else meanwhile.
    fn read_chunks(&self, members: &Members) -> Result<ChunkMap> {
        let sector_size = self.superblock().sector_size;
        let mut chunks = ChunkMap::default();
        self.for_each_chunk_item(ItemType::CHUNK_ITEM, Key::MAX, |key, data| {
            let chunk = Chunk::parse_prefix(key, data, sector_size);
            let (chunk, _) = chunk.map_err(malformed)?;
            chunks.add(MappedChunk::new(chunk, members))
        })?;
        Ok(chunks)
    }

    /// Shows the items of one type of the chunk tree that are in front of `end`.
    fn for_each_chunk_item(
        &self,
        item_type: ItemType,
        end: Key,
        mut show: impl FnMut(Key, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut cursor = Cursor::seek(&self.rooms, chunk_tree_root(self), Key::MIN)?;
        while let Some((key, data)) = cursor.item().filter(|(key, _)| *key < end) {
            if key.item_type == item_type {
                show(key, data)?;
            }
            cursor.advance()?;
        }
        Ok(())
    }
}
