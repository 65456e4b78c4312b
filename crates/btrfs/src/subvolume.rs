//! Subvolumes: their roots, and how they are nested.
//!
//! A subvolume is a tree of its own. Three items say where it is attached in another one: a
//! directory entry whose location is a ROOT_ITEM key, a ROOT_REF in the root tree from the parent's
//! id to the child's, and a ROOT_BACKREF the other way. A snapshot copies the directory entry of a
//! nested subvolume but not the references. So an entry leads to a subvolume only if the ROOT_REF
//! agrees with it. Otherwise it shows a *placeholder*, an empty directory.
//!
//! This module finds and lists subvolumes. These modules change them:
//!
//! | module | what it holds |
//! |---|---|
//! | `create`, `snapshot` | new subvolumes |
//! | `rename` | moving one to another place, or exchanging two |
//! | `delete`, `drop` | removing the name, and later all blocks |
//! | `settings` | read-only, the default subvolume, the label |
//! | `items` | the items of a subvolume in the root tree and the UUID tree |
//! | `state` | numbers for new subvolumes, and the deleted ones that are being dropped |

pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod drop;
mod items;
pub(crate) mod rename;
pub(crate) mod settings;
pub(crate) mod snapshot;
mod state;

use std::collections::HashMap;

use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::dir::{dir_entries, name_hash};
use offshoot_btrfs_format::inode::Timespec;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::{Generation, ItemType, Key, TreeId};
use offshoot_vfs::{EntryPlace, FileId};
use offshoot_vfs::{Errno, Error, Parent, Result, Structure, Timestamp};
use uuid::Uuid;

use crate::SubvolumeId;
use crate::data::timestamp;
use crate::inode;
use crate::inode::Rooms;
use crate::storage::malformed;
use crate::transaction::root_item;
use crate::tree::{Cursor, with_item};
pub(crate) use drop::DropProgress;
pub(crate) use state::SubvolumeState;

/// A UUID that follows from these bytes.
pub(crate) fn derived_uuid(parts: &[&[u8]]) -> Uuid {
    let digest = ChecksumType::Sha256.compute(&parts.concat());
    let bytes = digest.bytes()[..16].try_into().expect("16 of 32 bytes");
    uuid::Builder::from_random_bytes(bytes).into_uuid()
}

/// What is made: a subvolume or a snapshot.
struct MadeSubvolume<'a> {
    id: TreeId,
    /// The subvolume that it is a snapshot of.
    source: Option<TreeId>,
    /// The transaction that makes it.
    generation: Generation,
    place: EntryPlace<'a>,
    at: Timestamp,
}

impl MadeSubvolume<'_> {
    /// Its UUID. In a reproducible volume it follows from that of the volume and from what is made.
    /// A volume gives the id of the last subvolume again when that is gone. So the transaction is a
    /// part of it: the UUIDs of a volume are different all the same. The other parts tell copies of
    /// one volume apart in which different things were made.
    fn uuid(&self, volume: &Rooms) -> Uuid {
        if !volume.options.is_reproducible {
            return Uuid::new_v4();
        }
        let Self { id, source, generation, place, at } = self;
        let numbers =
            [id.0, source.map_or(0, |id| id.0), generation.0, place.dir.dev, place.dir.ino];
        let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let time = [at.secs.to_le_bytes().as_slice(), &at.nanos.to_le_bytes()].concat();
        let seed = volume.superblock().metadata_uuid;
        derived_uuid(&[seed.as_bytes(), b"new subvolume", &numbers, &time, place.name])
    }
}

/// The name of the entry in the root tree that leads to the default subvolume.
const DEFAULT: &[u8] = b"default";

/// The properties of a subvolume.
#[derive(Debug)]
pub struct SubvolumeInfo {
    /// Its id.
    pub id: SubvolumeId,
    /// The subvolume in which it is attached; `None` for the top level, and for an orphan.
    pub parent: Option<SubvolumeId>,
    /// Its path from the top level, without a leading slash; empty for the top level. An error if a
    /// directory above it cannot be read; the subvolume itself may be sound.
    pub path: Result<Vec<u8>>,
    /// The transaction that changed it last.
    pub generation: Generation,
    /// The transaction that made it.
    pub created_generation: Generation,
    /// When it was made.
    pub created: Timestamp,
    /// Whether it is read-only.
    pub is_read_only: bool,
    /// Its UUID; `None` when an old kernel made it.
    pub uuid: Option<Uuid>,
    /// The UUID of the subvolume that it is a snapshot of.
    pub parent_uuid: Option<Uuid>,
    /// The UUID of the subvolume that it was received from.
    pub received_uuid: Option<Uuid>,
    /// The transaction of the sending volume in which it was sent, and the time.
    pub sent: Option<(Generation, Timestamp)>,
    /// The transaction in which it was received, and the time.
    pub received: Option<(Generation, Timestamp)>,
}

/// A transaction and its time; `None` for transaction 0.
fn moment(generation: u64, time: &Timespec) -> Option<(Generation, Timestamp)> {
    (generation > 0).then(|| (Generation(generation), timestamp(time)))
}

/// The root item of the subvolume `id`.
///
/// # Errors
/// `ENOENT` when there is no such subvolume.
fn require_subvolume(volume: &Rooms, id: SubvolumeId) -> Result<RootItem> {
    root_item(volume, id)?
        .filter(|item| id.is_subvolume() && !item.is_dead())
        .ok_or_else(|| Error::posix(Errno::NOENT, format!("subvolume {id}")))
}

/// The directory and the name of the subvolume `child`; `None` for the top level and for orphans.
///
/// # Errors
/// When it is attached in two subvolumes, which the format rules out.
pub(crate) fn parent_of(volume: &Rooms, child: SubvolumeId) -> Result<Option<Parent>> {
    let first = Key::new(child.0, ItemType::ROOT_BACKREF, 0);
    let mut cursor = Cursor::seek(volume, volume.root_tree(), first)?;
    let Some((key, data)) = cursor.item_of(child.0, ItemType::ROOT_BACKREF) else {
        return Ok(None);
    };
    let reference = RootRef::parse(data).map_err(malformed)?;
    let parent = Parent {
        dir: FileId { dev: key.offset, ino: reference.dirid },
        name: reference.name.to_vec(),
    };
    cursor.advance()?;
    if cursor.item_of(child.0, ItemType::ROOT_BACKREF).is_some() {
        return Err(Error::corrupt(
            Structure::RootBackref,
            format!("subvolume {child} has two parents"),
        ));
    }
    Ok(Some(parent))
}

/// As [`Engine::default_subvolume`](crate::Engine::default_subvolume).
pub(crate) fn default_subvolume(volume: &Rooms) -> Result<SubvolumeId> {
    let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(DEFAULT));
    let named = with_item(volume, volume.root_tree(), key, |data| {
        for entry in dir_entries(data) {
            let entry = entry.map_err(malformed)?;
            if entry.name == DEFAULT {
                return Ok(Some(TreeId(entry.location.objectid)));
            }
        }
        Ok(None)
    })?;
    Ok(named.flatten().unwrap_or(TreeId::FS))
}

/// As [`Engine::subvolumes`](crate::Engine::subvolumes).
pub(crate) fn all(volume: &Rooms) -> Subvolumes<'_> {
    Subvolumes { volume, next: Some(TreeId::FS), paths: DirectoryPaths::default() }
}

/// As [`Engine::subvolume_count`](crate::Engine::subvolume_count).
pub(crate) fn count(volume: &Rooms) -> Result<usize> {
    let mut all = all(volume);
    let mut count = 0;
    while all.find()?.is_some() {
        count += 1;
    }
    Ok(count)
}

/// As [`Engine::subvolume`](crate::Engine::subvolume).
pub(crate) fn info(volume: &Rooms, id: SubvolumeId) -> Result<SubvolumeInfo> {
    let item = require_subvolume(volume, id)?;
    subvolume_info(volume, id, &item, &mut DirectoryPaths::default())
}

fn subvolume_info(
    volume: &Rooms,
    id: SubvolumeId,
    item: &RootItem,
    paths: &mut DirectoryPaths,
) -> Result<SubvolumeInfo> {
    let parent = parent_of(volume, id)?;
    let path = match &parent {
        Some(parent) => paths.of(volume, parent.dir).map(|dir| join(&dir, &parent.name)),
        None => Ok(Vec::new()),
    };
    Ok(SubvolumeInfo {
        id,
        parent: parent.map(|parent| TreeId(parent.dir.dev)),
        path,
        generation: item.generation(),
        created_generation: Generation(item.otransid.get()),
        created: timestamp(&item.otime),
        is_read_only: item.is_read_only(),
        uuid: RootItem::uuid(item.uuid),
        parent_uuid: RootItem::uuid(item.parent_uuid),
        received_uuid: RootItem::uuid(item.received_uuid),
        sent: moment(item.stransid.get(), &item.stime),
        received: moment(item.rtransid.get(), &item.rtime),
    })
}

/// The subvolumes of a volume, see [`Engine::subvolumes`](crate::Engine::subvolumes). It holds one
/// at a time.
pub struct Subvolumes<'v> {
    volume: &'v Rooms,
    /// The id at which the search for the next one starts; `None` behind the last.
    next: Option<SubvolumeId>,
    paths: DirectoryPaths,
}

impl Subvolumes<'_> {
    /// The next subvolume and its root item. If there are several root items, the last counts.
    fn find(&mut self) -> Result<Option<(SubvolumeId, RootItem)>> {
        while let Some(from) = self.next.take() {
            let first = Key::new(from.0, ItemType::ROOT_ITEM, 0);
            let mut cursor = Cursor::seek(self.volume, self.volume.root_tree(), first)?;
            while cursor.item().is_some_and(|(key, _)| key.item_type != ItemType::ROOT_ITEM) {
                cursor.advance()?;
            }
            let Some(id) = cursor.item().map(|(key, _)| TreeId(key.objectid)) else { break };
            if id > TreeId::LAST_FREE {
                break;
            }
            self.next = Some(TreeId(id.0 + 1));
            let item = if id.is_subvolume() { root_item(self.volume, id)? } else { None };
            if let Some(item) = item.filter(|item| !item.is_dead()) {
                return Ok(Some((id, item)));
            }
        }
        Ok(None)
    }
}

impl Iterator for Subvolumes<'_> {
    type Item = Result<SubvolumeInfo>;

    fn next(&mut self) -> Option<Self::Item> {
        let found = self.find().transpose()?;
        Some(found.and_then(|(id, item)| subvolume_info(self.volume, id, &item, &mut self.paths)))
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

/// The path of `file` from the top level of the volume, by one of its names, without a leading
/// slash.
///
/// # Errors
/// `ENOENT` when it has no name, or when its subvolume is gone. Other errors when a directory above
/// it cannot be read.
pub(crate) fn path_of(volume: &Rooms, file: FileId) -> Result<Vec<u8>> {
    let name = inode::one_name(volume, file)?;
    let name = name.ok_or_else(|| Error::posix(Errno::NOENT, format!("a name of {file}")))?;
    Ok(join(&DirectoryPaths::default().of(volume, name.dir)?, &name.name))
}

/// A cache of paths of directories from the top level. Subvolumes are siblings or nested, so their
/// paths mostly have the same beginning.
#[derive(Default)]
struct DirectoryPaths {
    known: HashMap<FileId, Vec<u8>>,
    bytes: usize,
}

impl DirectoryPaths {
    /// When the paths take more bytes than this, all are forgotten.
    const MAX_BYTES: usize = 1 << 20;
    /// The longest path, in bytes. No system call follows such a path. It bounds the search for
    /// parents, which may be circular in a damaged volume.
    const MAX_PATH: usize = 64 << 10;

    /// The path of the directory `dir`, without a leading slash; empty for the top level.
    fn of(&mut self, volume: &Rooms, dir: FileId) -> Result<Vec<u8>> {
        let (mut names, mut len, mut at) = (Vec::new(), 0, dir);
        let mut path = loop {
            if let Some(known) = self.known.get(&at) {
                break known.clone();
            }
            let parent = if at.ino == inode::ROOT_DIR {
                parent_of(volume, TreeId(at.dev))?
            } else {
                Some(inode::parent(volume, at)?)
            };
            let Some(parent) = parent else { break Vec::new() };
            len += parent.name.len() + 1;
            if len > Self::MAX_PATH {
                let problem = format!("the way up from {dir} is longer than any path");
                return Err(Error::corrupt(Structure::RootBackref, problem));
            }
            names.push((at, parent.name));
            at = parent.dir;
        };
        self.keep(at, &path);
        for (dir, name) in names.iter().rev() {
            path = join(&path, name);
            self.keep(*dir, &path);
        }
        Ok(path)
    }

    fn keep(&mut self, dir: FileId, path: &[u8]) {
        /// The approximate memory of an entry beside its path, in bytes.
        const ENTRY_BYTES: usize = 64;
        if self.bytes > Self::MAX_BYTES {
            *self = Self::default();
        }
        self.bytes += path.len() + ENTRY_BYTES;
        self.known.insert(dir, path.to_vec());
    }
}
