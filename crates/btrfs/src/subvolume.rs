//! Subvolumes: their roots, and how they hold each other.
//!
//! A subvolume is a tree of its own. Where it stands in another one is said three times: by a
//! directory entry whose location is a ROOT_ITEM key, by a ROOT_REF in the root
//! tree from the parent's id to the child's, and by a ROOT_BACKREF the other way. A snapshot
//! copies the directory entry of a nested subvolume but not the references, so an
//! entry leads to a subvolume only when the ROOT_REF agrees with it.

use std::collections::HashMap;

use offshoot_btrfs_format::dir::{dir_entries, name_hash};
use offshoot_btrfs_format::inode::Timespec;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::{Generation, ItemType, Key, Malformed, TreeId};
use offshoot_vfs::FileId;
use offshoot_vfs::{Errno, Error, Parent, Result, Timestamp};
use parking_lot::RwLock;
use uuid::Uuid;

use crate::SubvolumeId;
use crate::inode;
use crate::tree::{Cursor, TreeRoot, with_item};
use crate::volume::Volume;

/// Subvolume roots that were looked up, so that following a path does not search the
/// root tree at every step. A volume is only read, so they stay true.
#[derive(Default)]
pub(crate) struct RootCache {
    roots: RwLock<HashMap<TreeId, TreeRoot>>,
}

/// When this many roots are remembered, the cache starts afresh (about 1 MiB).
const MAX_CACHED_ROOTS: usize = 16_384;

/// What is known of a subvolume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubvolumeInfo {
    /// Its id.
    pub id: SubvolumeId,
    /// The subvolume that holds it; `None` for the top level, and for one that was
    /// orphaned.
    pub parent: Option<SubvolumeId>,
    /// Its path from the top level, without a leading slash; empty for the top level.
    pub path: Vec<u8>,
    /// The transaction that changed it last.
    pub generation: Generation,
    /// The transaction that made it.
    pub created_generation: Generation,
    /// When it was made.
    pub created: Timestamp,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Its UUID; `None` when an old kernel made it.
    pub uuid: Option<Uuid>,
    /// The UUID of the subvolume that it is a snapshot of.
    pub parent_uuid: Option<Uuid>,
    /// The UUID of the subvolume that it was received from.
    pub received_uuid: Option<Uuid>,
}

/// An item whose contents are not what they must be, though its block was verified.
pub(crate) fn malformed(e: Malformed) -> Error {
    Error::corrupt(e.structure, e.problem)
}

pub(crate) fn timestamp(time: &Timespec) -> Timestamp {
    Timestamp { secs: time.seconds(), nanos: time.nsec.get() }
}

/// The last root item of the tree `id`. Its key's offset is 0, or the generation in
/// which a snapshot was made.
fn root_item(volume: &Volume, id: TreeId) -> Result<Option<RootItem>> {
    let key = Key::new(id.0, ItemType::ROOT_ITEM, u64::MAX);
    let cursor = Cursor::seek_floor(volume, volume.root_tree(), key)?;
    cursor
        .item_of(id.0, ItemType::ROOT_ITEM)
        .map(|(_, data)| RootItem::parse(data).map_err(malformed))
        .transpose()
}

/// The root of the tree `id`.
pub(crate) fn tree_root(volume: &Volume, id: TreeId) -> Result<TreeRoot> {
    match id {
        TreeId::ROOT => return Ok(volume.root_tree()),
        TreeId::CHUNK => return Ok(chunk_tree_root(volume)),
        _ => {}
    }
    if let Some(root) = volume.subvolume_roots.roots.read().get(&id) {
        return Ok(*root);
    }
    let item = root_item(volume, id)?
        .filter(|item| !id.is_subvolume() || !item.is_dead())
        .ok_or_else(|| Error::posix(Errno::NOENT, format!("tree {id}")))?;
    let root =
        TreeRoot { id, logical: item.logical(), level: item.level, generation: item.generation() };
    let mut roots = volume.subvolume_roots.roots.write();
    if roots.len() >= MAX_CACHED_ROOTS {
        roots.clear();
    }
    roots.insert(id, root);
    Ok(root)
}

/// The root of the chunk tree, which the superblock names itself.
pub(crate) fn chunk_tree_root(volume: &Volume) -> TreeRoot {
    let superblock = volume.superblock();
    TreeRoot {
        id: TreeId::CHUNK,
        logical: superblock.chunk_root(),
        level: superblock.item.chunk_root_level,
        generation: Generation(superblock.item.chunk_root_generation.get()),
    }
}

/// Whether the entry `name` of the directory `dir` is where the subvolume `child` stands.
pub(crate) fn stands_at(
    volume: &Volume,
    child: SubvolumeId,
    dir: FileId,
    name: &[u8],
) -> Result<bool> {
    let key = Key::new(dir.dev, ItemType::ROOT_REF, child.0);
    let found = with_item(volume, volume.root_tree(), key, |data| {
        let reference = RootRef::parse(data).map_err(malformed)?;
        Ok(reference.dirid == dir.ino && reference.name == name)
    })?;
    Ok(found.unwrap_or(false))
}

/// Where the subvolume `child` stands; `None` for the top level and for orphans.
///
/// # Errors
/// When it stands in two subvolumes, which the format rules out.
pub(crate) fn parent_of(volume: &Volume, child: SubvolumeId) -> Result<Option<Parent>> {
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
        return Err(Error::corrupt("root backref", format!("subvolume {child} has two parents")));
    }
    Ok(Some(parent))
}

impl Volume {
    /// The subvolume that a mount without options shows.
    ///
    /// # Errors
    /// When the entry that names it is malformed.
    pub fn default_subvolume(&self) -> Result<SubvolumeId> {
        const NAME: &[u8] = b"default";
        let key = Key::new(objectid::ROOT_TREE_DIR, ItemType::DIR_ITEM, name_hash(NAME));
        let named = with_item(self, self.root_tree(), key, |data| {
            for entry in dir_entries(data) {
                let entry = entry.map_err(malformed)?;
                if entry.name == NAME {
                    return Ok(Some(TreeId(entry.location.objectid)));
                }
            }
            Ok(None)
        })?;
        Ok(named.flatten().unwrap_or(TreeId::FS))
    }

    /// All subvolumes that were not deleted, the top level first, by id.
    pub fn subvolumes(&self) -> Result<Vec<SubvolumeInfo>> {
        let mut ids = Vec::new();
        let first = Key::new(TreeId::FS.0, ItemType::ROOT_ITEM, 0);
        let mut cursor = Cursor::seek(self, self.root_tree(), first)?;
        while let Some((key, data)) = cursor.item() {
            let id = TreeId(key.objectid);
            if key.item_type == ItemType::ROOT_ITEM && id.is_subvolume() {
                let item = RootItem::parse(data).map_err(malformed)?;
                if !item.is_dead() {
                    ids.push((id, item));
                }
            }
            if id > TreeId::LAST_FREE {
                break;
            }
            cursor.advance()?;
        }
        ids.dedup_by(|later, earlier| {
            let same = later.0 == earlier.0;
            if same {
                earlier.1 = later.1;
            }
            same
        });
        ids.iter().map(|(id, item)| self.subvolume_info(*id, item)).collect()
    }

    /// What is known of the subvolume `id`.
    ///
    /// # Errors
    /// `ENOENT` when there is no such subvolume.
    pub fn subvolume(&self, id: SubvolumeId) -> Result<SubvolumeInfo> {
        let item = root_item(self, id)?
            .filter(|item| id.is_subvolume() && !item.is_dead())
            .ok_or_else(|| Error::posix(Errno::NOENT, format!("subvolume {id}")))?;
        self.subvolume_info(id, &item)
    }

    fn subvolume_info(&self, id: SubvolumeId, item: &RootItem) -> Result<SubvolumeInfo> {
        let parent = parent_of(self, id)?;
        Ok(SubvolumeInfo {
            id,
            parent: parent.map(|parent| TreeId(parent.dir.dev)),
            path: self.subvolume_path(id)?,
            generation: item.generation(),
            created_generation: Generation(item.otransid.get()),
            created: timestamp(&item.otime),
            read_only: item.is_read_only(),
            uuid: RootItem::uuid(item.uuid),
            parent_uuid: RootItem::uuid(item.parent_uuid),
            received_uuid: RootItem::uuid(item.received_uuid),
        })
    }

    /// The path of a subvolume from the top level, without a leading slash.
    ///
    /// # Errors
    /// When the way up does not end, which a well-formed volume rules out.
    pub fn subvolume_path(&self, id: SubvolumeId) -> Result<Vec<u8>> {
        /// More than any path that a kernel can make, and a bound for a hostile one.
        const MAX_STEPS: usize = 4096;
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut at = FileId { dev: id.0, ino: inode::ROOT_DIR };
        for _ in 0..MAX_STEPS {
            let parent = if at.ino == inode::ROOT_DIR {
                parent_of(self, TreeId(at.dev))?
            } else {
                Some(inode::parent(self, at)?)
            };
            let Some(parent) = parent else {
                names.reverse();
                return Ok(names.join(&b'/'));
            };
            names.push(parent.name);
            at = parent.dir;
        }
        Err(Error::corrupt("root backref", format!("the way up from subvolume {id} does not end")))
    }
}
