//! Opening: from devices to a [`Engine`].

use std::sync::Arc;
use std::time::Duration;

use offshoot_btrfs_format::check::Geometry;
use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::superblock::{
    Incompat, SUPER_FLAG_CHANGING_BG_TREE, SUPER_FLAG_CHANGING_DATA_CSUM, SUPER_FLAG_CHANGING_FSID,
    SUPER_FLAG_CHANGING_FSID_V2, SUPER_FLAG_CHANGING_META_CSUM, SUPER_FLAG_SEEDING, Superblock,
};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, Result};
use parking_lot::RwLock;
use uuid::Uuid;

use super::chunk_map::{ChunkMap, MappedChunk};
use super::members::{Found, Member, Members};
use super::report::{Report, Reporter};
use super::{Engine, ways};
use crate::block::BlockCache;
use crate::cores;
use crate::subvolume::RootCache;
use crate::tree::TreeRoot;

/// How a volume is opened.
#[derive(Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub struct OpenOptions {
    /// Open it although members are missing.
    pub degraded: bool,
    /// Leave a pending tree log alone: the volume is read as the last commit left it, without what was fsynced since. It cannot be
    /// written then.
    pub ignore_log: bool,
    /// What replaying a pending log may take of memory, in bytes: the tree blocks that it changes, and once more those that a volume
    /// which is opened for reading keeps instead of writing them.
    pub replay_bytes: u64,
    /// What the cache of tree blocks may hold, in bytes. In a volume that is written, the names that are
    /// remembered of new directories may take half as much beside it.
    pub cache_bytes: u64,
    /// Who is told of what was survived.
    pub reporter: Option<Reporter>,
    /// What may be changed and not on the devices yet, in bytes: of data, and of tree blocks. A volume that is
    /// written begins to write at half of it, and lets nobody change more at all of it.
    pub dirty_bytes: u64,
    /// How the data of files is compressed that do not say so themselves; `None` for not at all.
    pub compress: Option<crate::Compress>,
    /// How the data of new files is stored.
    pub new_files: crate::NewFiles,
    /// The largest file that is kept in its extent item, in bytes; 0 for none. More than there is room for in an item counts as that.
    pub max_inline: u64,
    /// Whether fsync writes the tree log where that is possible, instead of committing. The mount option `notreelog` of the kernel is the opposite
    /// of it.
    pub tree_log: bool,
    /// Whether the devices are told what commits have freed, as with the mount option `discard` of the kernel. It is done soon after the commit, by
    /// the thread of the volume; in one that does not commit by itself, by whoever commits.
    pub discard: bool,
    /// Whether files are written back before each commit, whatever it is made for, as with the mount option `flushoncommit` of the kernel. One that is
    /// made for want of room, or because of dirty blocks by who changes them, leaves out the files that somebody is changing then.
    pub flush_on_commit: bool,
    /// How often a volume that is written commits by itself; `None` for never. A thread of
    /// its own does that. It waits a millisecond at least, whatever less is asked for.
    pub commit_interval: Option<Duration>,
    /// Whether items of the namespace are gathered in memory and put into the tree many at a time. To be measured, not to be
    /// changed otherwise.
    pub delayed_items: bool,
    /// Whether every delayed item keeps all the space that was reserved for it; else new items of a directory share that of a
    /// leaf. To be measured, not to be changed otherwise.
    pub reserve_by_item: bool,
    /// Whether a log gets every item of a directory by itself, also where a commit is cheaper; else those that are side by side in the subvolume go
    /// together, with one copy of their data. To be measured, not to be changed otherwise.
    pub log_by_item: bool,
    /// How many commits one cycle of making room may have before an operation is told that there is no space: one, or two; to
    /// be measured, not to be changed otherwise.
    pub commits_per_cycle: u32,
    /// How writers latch what is above a leaf; to be measured, not to be changed otherwise.
    pub latching: Latching,
}

/// How writers of a tree latch what is above a leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latching {
    /// All writers take exclusive latches all the way down. Else those do whose change reaches further than the block above the leaf.
    pub exclusive: bool,
    /// When an insertion lets go of what is above.
    pub unlock: Unlock,
}

/// When an insertion lets go of what is above its leaf, so that others get past. Only a leaf with room whose
/// first key stays what it is lets go of anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unlock {
    /// Before the leaf is searched: its first key and its free space say enough.
    #[default]
    BeforeSearch,
    /// When the search has told where the item goes.
    AfterSearch,
    /// When the item is in its place.
    AfterChange,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            degraded: false,
            ignore_log: false,
            replay_bytes: 1 << 30,
            cache_bytes: 64 << 20,
            reporter: None,
            dirty_bytes: 64 << 20,
            compress: None,
            new_files: crate::NewFiles::default(),
            max_inline: 2048,
            tree_log: true,
            discard: false,
            flush_on_commit: false,
            commit_interval: Some(Duration::from_secs(30)),
            delayed_items: true,
            reserve_by_item: false,
            log_by_item: false,
            commits_per_cycle: 1,
            latching: Latching::default(),
        }
    }
}

/// Everything that the reading half of the engine knows.
const SUPPORTED: Incompat = Incompat::MIXED_BACKREF
    .union(Incompat::DEFAULT_SUBVOL)
    .union(Incompat::MIXED_GROUPS)
    .union(Incompat::COMPRESS_LZO)
    .union(Incompat::COMPRESS_ZSTD)
    .union(Incompat::BIG_METADATA)
    .union(Incompat::EXTENDED_IREF)
    .union(Incompat::RAID56)
    .union(Incompat::SKINNY_METADATA)
    .union(Incompat::NO_HOLES)
    .union(Incompat::METADATA_UUID)
    .union(Incompat::RAID1C34)
    .union(Incompat::ZONED)
    .union(Incompat::RAID_STRIPE_TREE)
    .union(Incompat::SIMPLE_QUOTA);

impl Engine {
    pub(crate) fn open_engine(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &OpenOptions,
    ) -> Result<Self> {
        cores::learn();
        let mut reports = Vec::new();
        let found = devices
            .into_iter()
            .map(|device| Found::read(device, &mut reports))
            .collect::<Result<Vec<_>>>()?;
        let superblock = choose(&found, &mut reports)?.clone();
        require_supported(&superblock)?;
        if options.ignore_log && superblock.log_is_pending() {
            reports.push(Report::LogIgnored);
        }
        let mut volume = Self::bootstrap(superblock, &found, options)?;
        for report in &reports {
            volume.report(report);
        }
        volume.read_chunk_tree(&found, options.degraded)?;
        volume.csum_tree = match volume.tree(TreeId::CSUM) {
            Ok(root) => Some(root),
            Err(Error::Posix { .. }) => None,
            Err(e) => return Err(e),
        };
        if volume.superblock.incompat.has(Incompat::RAID_STRIPE_TREE) {
            volume.stripe_tree = Some(volume.tree(TreeId::RAID_STRIPE).map_err(|e| match e {
                Error::Posix { .. } => {
                    Error::corrupt("root tree", "the feature RAID_STRIPE_TREE without such a tree")
                }
                e => e,
            })?);
        }
        Ok(volume)
    }

    /// Opens the volume again, without the reports that opening it has made before.
    pub(crate) fn open_again(
        devices: Vec<Arc<dyn BlockDevice>>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let quiet = OpenOptions { reporter: None, ..options.clone() };
        let volume = Self::open_engine(devices, &quiet)?;
        Ok(Self { reporter: options.reporter.clone(), ..volume })
    }

    /// A volume that knows the system chunks and the devices that were given, which is
    /// enough to read the chunk tree.
    fn bootstrap(superblock: Superblock, found: &[Found], options: &OpenOptions) -> Result<Self> {
        let (fsid, newest) = (superblock.metadata_uuid, superblock.generation);
        let members = Members::new(
            found
                .iter()
                .map(|one| Member::present(&one.superblock.item.dev_item, Some(one), fsid, newest))
                .collect(),
        );
        for one in found {
            report_size(one, options);
        }
        let chunks = map_chunks(superblock.system_chunks.clone(), &members)?;
        require_chunk_tree(&chunks)?;
        let mut geometry = Geometry::of(&superblock);
        geometry.seeds = found
            .iter()
            .map(|one| one.superblock.metadata_uuid)
            .filter(|&seed| seed != fsid)
            .collect();
        let root_tree = TreeRoot::of_root_tree(&superblock.item);
        Ok(Self {
            members,
            chunks: RwLock::new(Arc::new(chunks)),
            geometry,
            cache: BlockCache::new(options.cache_bytes, superblock.node_size),
            root_tree,
            csum_tree: None,
            stripe_tree: None,
            subvolume_roots: RootCache::default(),
            inodes: crate::inode::Inodes::new(options.cache_bytes / 2),
            buffers: crate::data::Buffers::default(),
            read_ahead: crate::data::ReadAhead::default(),
            reporter: options.reporter.clone(),
            live: None,
            chunk_tree_uuid: [0; 16],
            superblock,
        })
    }

    /// Reads all devices and chunks, and takes them over from what was assumed so far.
    fn read_chunk_tree(&mut self, found: &[Found], degraded: bool) -> Result<()> {
        let root = crate::subvolume::chunk_tree_root(self);
        let (mut devices, mut chunks) = (Vec::new(), Vec::new());
        let mut cursor = crate::tree::Cursor::seek(self, root, Key::MIN)?;
        while let Some((key, data)) = cursor.item() {
            let parsed = match key.item_type {
                ItemType::DEV_ITEM => DevItem::view(data).map(|item| devices.push(*item)),
                ItemType::CHUNK_ITEM => Chunk::parse_prefix(key, data, self.superblock.sector_size)
                    .map(|(chunk, _)| chunks.push(chunk)),
                _ => Ok(()),
            };
            parsed.map_err(|e| Error::corrupt(e.structure, e.problem))?;
            cursor.advance()?;
        }
        drop(cursor);
        self.members = self.match_members(&devices, found, degraded)?;
        self.members.require_distinct()?;
        // What is neither the volume's nor of a seed that it has is not accepted in its blocks.
        let is_seed = |seed: &Uuid| devices.iter().any(|item| item.fsid == *seed.as_bytes());
        self.geometry.seeds.retain(is_seed);
        let chunks = Arc::new(map_chunks(chunks, &self.members)?);
        *self.chunks.get_mut() = chunks.clone();
        for mapped in chunks.mapped().filter(|mapped| ways::is_lost(mapped)) {
            let Chunk { start, length, flags, profile, .. } = &mapped.chunk;
            let kind = format!("{} {profile}", flags.kind());
            self.report(&Report::LostChunk { logical: *start, length: *length, kind });
        }
        Ok(())
    }

    /// Pairs the devices that the chunk tree knows with those that were given.
    fn match_members(
        &self,
        devices: &[DevItem],
        found: &[Found],
        degraded: bool,
    ) -> Result<Members> {
        let (fsid, newest) = (self.superblock.metadata_uuid, self.superblock.generation);
        let mut all = Vec::with_capacity(devices.len());
        for item in devices {
            let uuid = Uuid::from_bytes(item.uuid);
            let device = found.iter().find(|one| one.uuid() == uuid);
            let member = Member::present(item, device, fsid, newest);
            match device {
                None if !degraded => {
                    return Err(Error::posix(
                        Errno::NODEV,
                        format!("device {} ({uuid}) of the volume is missing", member.id),
                    ));
                }
                None => self.report(&Report::MissingMember { id: member.id, uuid }),
                Some(one) => self.report_condition(&member, one),
            }
            all.push(member);
        }
        for stranger in found.iter().filter(|one| !all.iter().any(|m| m.uuid == one.uuid())) {
            self.report(&Report::NotAMember { device: stranger.device.name().to_owned() });
        }
        Ok(Members::new(all))
    }

    fn report_condition(&self, member: &Member, found: &Found) {
        if member.is_stale() {
            self.report(&Report::StaleMember {
                device: member.name(),
                generation: found.superblock.generation,
                newest: self.superblock.generation,
            });
        }
    }
}

/// Tells of a device that is shorter than its own superblock says: what is cut off is missed later, by
/// whatever comes to need it.
fn report_size(found: &Found, options: &OpenOptions) {
    let device = found.device.name().to_owned();
    let size_bytes = found.device.size_bytes();
    let expected_bytes = found.superblock.item.dev_item.total_bytes.get();
    if let Some(reporter) = options.reporter.as_ref().filter(|_| size_bytes < expected_bytes) {
        reporter(&Report::ShortMember { device, size_bytes, expected_bytes });
    }
}

/// Refuses a volume whose chunk tree lies on devices that were not given.
fn require_chunk_tree(chunks: &ChunkMap) -> Result<()> {
    for mapped in chunks.mapped().filter(|mapped| ways::is_lost(mapped)) {
        let missing = mapped.chunk.stripes.iter().zip(&mapped.members).find(|(_, m)| m.is_none());
        if let Some((stripe, _)) = missing {
            let (id, uuid) = (stripe.device, stripe.device_uuid);
            let what = format!("device {id} ({uuid}) of the volume is missing");
            return Err(Error::posix(Errno::NODEV, what));
        }
    }
    Ok(())
}

/// The superblock that says what the volume is: the newest of its members.
///
/// The volume is the one that is not a seed; when all that was given is seeds, or
/// there is no seed, it is that of the first device.
fn choose<'f>(found: &'f [Found], reports: &mut Vec<Report>) -> Result<&'f Superblock> {
    let is_seed = |one: &Found| one.superblock.item.flags.get() & SUPER_FLAG_SEEDING != 0;
    let main = found
        .iter()
        .find(|one| !is_seed(one))
        .or(found.first())
        .ok_or_else(|| Error::posix(Errno::INVAL, "no device was given"))?;
    let fsid = main.superblock.fsid;
    for (i, one) in found.iter().enumerate() {
        if one.superblock.fsid != fsid && !is_seed(one) {
            return Err(Error::posix(
                Errno::INVAL,
                format!(
                    "{} belongs to volume {}, {} to another one, {fsid}",
                    one.device.name(),
                    one.superblock.fsid,
                    main.device.name()
                ),
            ));
        }
        if let Some(twin) = found[..i].iter().find(|other| other.uuid() == one.uuid()) {
            return Err(Error::posix(
                Errno::INVAL,
                format!(
                    "{} and {} are the same device of the volume, {}",
                    twin.device.name(),
                    one.device.name(),
                    one.uuid()
                ),
            ));
        }
    }
    let newest = found
        .iter()
        .map(|one| &one.superblock)
        .filter(|superblock| superblock.fsid == fsid)
        // A copy, which is there for a primary one that is damaged, may not know of the log that others tell of.
        .max_by_key(|superblock| (superblock.generation, superblock.log_is_pending()))
        .expect("`main` is one of them");
    if newest.is_metadata_only() {
        reports.push(Report::MetadataOnly);
    }
    Ok(newest)
}

/// Refuses what the engine does not know, by name. Features that only forbid writing
/// do not matter to a reader.
fn require_supported(superblock: &Superblock) -> Result<()> {
    let unknown = superblock.incompat.without(SUPPORTED).names();
    if !unknown.is_empty() {
        return Err(Error::Unsupported(format!("the volume's feature {}", unknown.join(", "))));
    }
    let flags = superblock.item.flags.get();
    for (flag, what) in [
        (SUPER_FLAG_CHANGING_FSID, "a volume whose fsid is being changed"),
        (SUPER_FLAG_CHANGING_FSID_V2, "a volume whose fsid is being changed"),
        (SUPER_FLAG_CHANGING_BG_TREE, "a volume that is being converted to a block group tree"),
        (SUPER_FLAG_CHANGING_DATA_CSUM, "a volume whose data checksums are being converted"),
        (SUPER_FLAG_CHANGING_META_CSUM, "a volume whose metadata checksums are being converted"),
    ] {
        if flags & flag != 0 {
            return Err(Error::Unsupported(format!(
                "{what}; finish it with the program that began it"
            )));
        }
    }
    Ok(())
}

fn map_chunks(chunks: Vec<Chunk>, members: &Members) -> Result<ChunkMap> {
    ChunkMap::new(
        chunks
            .into_iter()
            .map(|chunk| {
                let on = chunk.stripes.iter().map(|s| members.find_present(s.device_uuid));
                MappedChunk { members: on.collect(), chunk }
            })
            .collect(),
    )
}
