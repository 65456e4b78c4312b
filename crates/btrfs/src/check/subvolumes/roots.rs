//! What the root tree says, read once.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use offshoot_btrfs_format::dir::dir_entries;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::root::{RootItem, RootRef};
use offshoot_btrfs_format::{ItemType, Key, TreeId};

use crate::check::volume::{CheckedVolume, KeyRange, root_of};
use crate::tree::TreeRoot;

/// The name of the entry of the default subvolume, in the directory of the root tree.
const DEFAULT: &[u8] = b"default";

/// The trees that a volume with several of each kind would have more of.
const SINGLE_TREES: [TreeId; 3] = [TreeId::EXTENT, TreeId::CSUM, TreeId::FREE_SPACE];

/// The items of the root tree that are compared.
pub(crate) struct RootTreeItems {
    /// By number.
    pub(crate) roots: BTreeMap<TreeId, ListedRoot>,
    /// By the subvolume above and the one below.
    pub(crate) links: BTreeMap<(TreeId, TreeId), SubvolumeLink>,
    /// The numbers in orphan items, ascending.
    pub(crate) orphans: Vec<u64>,
    /// The item with the default subvolume, and the key that it leads to.
    pub(crate) default: Option<(Key, Key)>,
    /// Whether the directory that names the default subvolume is there.
    pub(crate) has_root_dir: bool,
    /// Items behind the root of a tree of which there is only one. The tools of btrfs take them for
    /// further roots, and open no such volume.
    pub(crate) strays: Vec<Key>,
    /// Whether all items could be read.
    pub(crate) is_whole: bool,
}

/// What the item of a root says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListedRoot {
    pub(crate) root: TreeRoot,
    /// The offset in the key of its item.
    pub(crate) offset: u64,
    /// How many links lead to the subvolume; 0 for a deleted one.
    pub(crate) refs: u32,
    /// The key of the next pointer that the removal gives up; its object id is 0 before the first.
    pub(crate) drop_progress: Key,
    /// The level of the node with that pointer.
    pub(crate) drop_level: u8,
    pub(crate) uuid: [u8; 16],
    pub(crate) received_uuid: [u8; 16],
}

impl ListedRoot {
    /// The key of its item.
    pub(crate) fn key(&self) -> Key {
        Key::new(self.root.id.0, ItemType::ROOT_ITEM, self.offset)
    }
}

/// A link from a subvolume to one in it, as each side stores it.
#[derive(Clone, Debug, Default)]
pub(crate) struct SubvolumeLink {
    /// The ROOT_REF, which is found from above.
    pub(crate) reference: Option<LinkPlace>,
    /// The ROOT_BACKREF, which is found from below.
    pub(crate) back_reference: Option<LinkPlace>,
}

/// Where the entry of a subvolume is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkPlace {
    /// The inode number of the directory.
    pub(crate) dir: u64,
    /// The index of the entry in it.
    pub(crate) index: u64,
    pub(crate) name: Box<[u8]>,
}

impl RootTreeItems {
    /// Reads them.
    pub(crate) fn read(volume: &CheckedVolume<'_>) -> Self {
        let mut items = Self {
            roots: BTreeMap::new(),
            links: BTreeMap::new(),
            orphans: Vec::new(),
            default: None,
            has_root_dir: false,
            strays: Vec::new(),
            is_whole: false,
        };
        let walked = volume.each_item(volume.root_tree(), KeyRange::ALL, &mut |key, data| {
            items.add(key, data);
            ControlFlow::Continue(())
        });
        items.is_whole = walked.is_whole();
        items
    }

    /// The root of the tree `id`.
    pub(crate) fn root(&self, id: TreeId) -> Option<&ListedRoot> {
        self.roots.get(&id)
    }

    /// Whether the subvolume is there and was not deleted.
    pub(crate) fn is_live(&self, id: TreeId) -> bool {
        id.is_subvolume() && self.root(id).is_some_and(|root| root.refs > 0)
    }

    /// All subvolumes, deleted ones included.
    pub(crate) fn subvolumes(&self) -> impl Iterator<Item = &ListedRoot> {
        self.roots.values().filter(|root| root.root.id.is_subvolume())
    }

    /// The subvolumes that were not deleted and that no links lead to from the top level. Of those
    /// that only each other lead to, one.
    pub(crate) fn unreachable(&self) -> Vec<TreeId> {
        let mut below = BTreeMap::<TreeId, Vec<TreeId>>::new();
        let mut has_link = BTreeSet::new();
        for &(from, to) in self.links.keys() {
            if self.is_live(from) && from != to {
                below.entry(from).or_default().push(to);
                has_link.insert(to);
            }
        }
        let mut reached = BTreeSet::new();
        let mut reach = |from: TreeId| {
            let mut next = vec![from];
            let is_new = reached.insert(from);
            while let Some(from) = next.pop() {
                let children = below.get(&from).into_iter().flatten();
                next.extend(children.filter(|child| reached.insert(**child)));
            }
            is_new
        };
        reach(TreeId::FS);
        let live = || self.subvolumes().filter(|root| root.refs > 0).map(|root| root.root.id);
        let without_link = live().filter(|id| !has_link.contains(id));
        without_link.chain(live()).filter(|&id| reach(id)).collect()
    }

    fn add(&mut self, key: Key, data: &[u8]) {
        let is_single = SINGLE_TREES.iter().any(|tree| tree.0 == key.objectid);
        if is_single && (key.item_type, key.offset) > (ItemType::ROOT_ITEM, 0) {
            self.strays.push(key);
        }
        match key.item_type {
            ItemType::ROOT_ITEM => self.add_root(key, data),
            ItemType::ROOT_REF => {
                let link = (TreeId(key.objectid), TreeId(key.offset));
                self.links.entry(link).or_default().reference = place(data);
            }
            ItemType::ROOT_BACKREF => {
                let link = (TreeId(key.offset), TreeId(key.objectid));
                self.links.entry(link).or_default().back_reference = place(data);
            }
            ItemType::ORPHAN_ITEM if key.objectid == objectid::ORPHAN => {
                self.orphans.push(key.offset);
            }
            ItemType::INODE_ITEM if key.objectid == objectid::ROOT_TREE_DIR => {
                self.has_root_dir = true;
            }
            ItemType::DIR_ITEM if key.objectid == objectid::ROOT_TREE_DIR => {
                let mut entries = dir_entries(data).flatten();
                if let Some(entry) = entries.find(|entry| entry.name == DEFAULT) {
                    self.default = Some((key, entry.location));
                }
            }
            _ => {}
        }
    }

    fn add_root(&mut self, key: Key, data: &[u8]) {
        let Ok(item) = RootItem::parse(data) else { return };
        let id = TreeId(key.objectid);
        let stored = ListedRoot {
            root: root_of(id, &item),
            offset: key.offset,
            refs: item.refs.get(),
            drop_progress: item.drop_progress.get(),
            drop_level: item.drop_level,
            uuid: item.uuid,
            received_uuid: item.received_uuid,
        };
        // Readers take the first item of a tree.
        self.roots.entry(id).or_insert(stored);
    }
}

/// The place in a ROOT_REF or ROOT_BACKREF. One that cannot be parsed is refused with its leaf.
fn place(data: &[u8]) -> Option<LinkPlace> {
    let RootRef { dirid, sequence, name } = RootRef::parse(data).ok()?;
    Some(LinkPlace { dir: dirid, index: sequence, name: name.into() })
}
