//! Links between subvolumes, mended from each other and from the entries of directories.
//!
//! ```text
//! ROOT_REF (above, below)  ─┐
//! ROOT_BACKREF (below, above) ├─ each says: directory, index, name
//! DIR_ITEM, DIR_INDEX in above ┘
//! ```
//!
//! Where both references disagree, the one counts that more of the two entries agree with, and the
//! ROOT_REF if both have as many. A reference without its other half is stale when another link of
//! the subvolume is whole and no entry agrees with it; otherwise it gets its other half. Then the
//! entries are made that are missing. If something else is in the place, the subvolume gets a place
//! in `lost+found` of the one above it.

use std::collections::BTreeSet;

use offshoot_btrfs_format::dir::file_type;
use offshoot_btrfs_format::encode::root_ref;
use offshoot_btrfs_format::root::RootRef;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{FileType, Result};

use super::SubvolumeMender;
use crate::check::LinkPlace;
use crate::repair::files::{FileMender, OwnedEntry};

/// The key of the reference from above.
fn reference_key(above: TreeId, below: TreeId) -> Key {
    Key::new(above.0, ItemType::ROOT_REF, below.0)
}

/// The key of the reference from below.
fn back_reference_key(above: TreeId, below: TreeId) -> Key {
    Key::new(below.0, ItemType::ROOT_BACKREF, above.0)
}

/// Whether an entry leads to the subvolume. The offset says nothing.
fn leads_to(entry: &OwnedEntry, below: TreeId) -> bool {
    entry.location.item_type == ItemType::ROOT_ITEM && entry.location.objectid == below.0
}

impl<'m, 'c> SubvolumeMender<'m, 'c> {
    /// The mender of the files of a subvolume; `None` when that is not there or was deleted.
    fn mender(&mut self, id: TreeId) -> Option<&mut FileMender<'m, 'c>> {
        if !self.items.is_live(id) {
            return None;
        }
        if !self.menders.contains_key(&id) {
            let root = self.volume.tree(id)?;
            self.menders.insert(id, FileMender::new(self.volume, root, self.generation));
        }
        self.menders.get_mut(&id)
    }

    /// How many of the two entries of a subvolume are in this place.
    fn entries_at(&mut self, above: TreeId, below: TreeId, place: &LinkPlace) -> usize {
        let Some(mender) = self.mender(above) else { return 0 };
        let is_it = |entry: &OwnedEntry| *entry.name == *place.name && leads_to(entry, below);
        let by_hash = mender.hashed_entries(place.dir, &place.name).iter().any(is_it);
        let by_index = mender.indexed_entries(place.dir, place.index).iter().any(is_it);
        usize::from(by_hash) + usize::from(by_index)
    }

    /// Whether a subvolume has both references, from a subvolume that is there, and an entry.
    pub(super) fn is_linked(&mut self, below: TreeId) -> bool {
        let links = self.links_to(below);
        links.into_iter().any(|(above, reference, back_reference)| {
            reference.is_some()
                && reference == back_reference
                && reference.is_some_and(|place| self.entries_at(above, below, &place) > 0)
        })
    }

    /// The links to a subvolume: the one above, and what both references say.
    fn links_to(&self, below: TreeId) -> Vec<(TreeId, Option<LinkPlace>, Option<LinkPlace>)> {
        let links = self.items.links.iter().filter(|((_, to), _)| *to == below);
        links
            .map(|((above, _), link)| (*above, link.reference.clone(), link.back_reference.clone()))
            .collect()
    }

    /// Mends all links, and gives links to what has none.
    pub(super) fn mend_links(&mut self) -> Result<()> {
        let below: BTreeSet<_> = self.items.links.keys().map(|(_, below)| *below).collect();
        for below in below {
            self.volume.require_going_on()?;
            self.mend_links_to(below);
        }
        for lost in self.items.unreachable() {
            self.volume.require_going_on()?;
            for (above, ..) in self.links_to(lost) {
                self.remove_link(above, lost);
            }
            self.link_as_lost(TreeId::FS, lost);
        }
        Ok(())
    }

    fn mend_links_to(&mut self, below: TreeId) {
        let is_there = self.items.root(below).is_some();
        // The place of each link, and by how much it is believed.
        let mut believed = Vec::new();
        for (above, reference, back_reference) in self.links_to(below) {
            let halves = [reference.clone(), back_reference.clone()];
            if !is_there || self.items.root(above).is_none() {
                self.remove_link(above, below);
                for place in halves.iter().flatten().filter(|_| !is_there) {
                    self.remove_entries(above, below, place);
                }
                continue;
            }
            let is_whole = reference.is_some() && reference == back_reference;
            let mut best: Option<(usize, LinkPlace)> = None;
            for place in halves.into_iter().flatten() {
                let entries = self.entries_at(above, below, &place);
                if best.as_ref().is_none_or(|(most, _)| entries > *most) {
                    best = Some((entries, place));
                }
            }
            if let Some((entries, place)) = best {
                believed.push((is_whole, entries, above, place));
            }
        }
        let has_whole = believed.iter().any(|(is_whole, ..)| *is_whole);
        for (is_whole, entries, above, place) in believed {
            if !is_whole && entries == 0 && has_whole {
                self.remove_link(above, below);
            } else if !is_whole || entries < 2 {
                self.mend_link(above, below, place);
            }
        }
    }

    /// Makes both references and both entries say that the subvolume is in this place.
    fn mend_link(&mut self, above: TreeId, below: TreeId, place: LinkPlace) {
        match self.enter(above, below, &place) {
            Some(place) => self.set_link(above, below, place),
            None if self.items.is_live(above) && self.items.is_live(below) => {
                self.remove_link(above, below);
                self.link_as_lost(above, below);
            }
            None => self.set_link(above, below, place),
        }
    }

    /// Enters a subvolume into a directory of the one above it. Returns the place, whose index may
    /// be another one; `None` when the directory is not there, or something else has the name.
    fn enter(&mut self, above: TreeId, below: TreeId, place: &LinkPlace) -> Option<LinkPlace> {
        let (transid, live) = (self.generation.0, self.linked_below(above));
        let mender = self.mender(above)?;
        if mender.type_of(place.dir) != Some(FileType::Directory) {
            return None;
        }
        let (dir, mut index) = (place.dir, place.index);
        let by_hash = mender.hashed_entries(dir, &place.name);
        let by_index = mender.indexed_entries(dir, index);
        // An entry with this name that leads to nothing is wrong.
        let rivals: Vec<_> = by_hash.iter().chain(&by_index).cloned().collect();
        for rival in rivals.iter().filter(|one| *one.name == *place.name && !leads_to(one, below)) {
            if mender.is_real(dir, rival) || live.contains(&rival.location.objectid) {
                return None;
            }
            let at = by_index.contains(rival).then_some(index);
            mender.remove_entry(dir, at, rival);
        }
        let is_other = |one: &OwnedEntry| *one.name != *place.name;
        if index < 2 || mender.indexed_entries(dir, index).iter().any(is_other) {
            index = mender.next_index(dir);
        }
        let known = rivals.into_iter().find(|one| leads_to(one, below) && *one.name == *place.name);
        let entry = OwnedEntry {
            location: known
                .map_or(Key::new(below.0, ItemType::ROOT_ITEM, u64::MAX), |one| one.location),
            transid,
            file_type: file_type::DIR,
            name: place.name.to_vec(),
        };
        if !mender.enter(dir, index, &entry) {
            return None;
        }
        self.touched.insert((above, dir));
        Some(LinkPlace { index, ..place.clone() })
    }

    /// The subvolumes that a subvolume has whole links to, by number.
    fn linked_below(&self, above: TreeId) -> BTreeSet<u64> {
        let links = self.items.links.iter().filter(|((from, _), link)| {
            *from == above && link.reference.is_some() && link.reference == link.back_reference
        });
        links.map(|((_, to), _)| to.0).collect()
    }

    /// Gives a subvolume a place in `lost+found` of another one.
    fn link_as_lost(&mut self, above: TreeId, below: TreeId) {
        let Some(mender) = self.mender(above) else { return };
        let mut touched = BTreeSet::new();
        let Some(dir) = mender.lost_and_found(&mut touched) else { return };
        let (name, index) = (below.0.to_string().into_bytes(), mender.next_index(dir));
        self.touched.extend(touched.into_iter().map(|dir| (above, dir)));
        let place = LinkPlace { dir, index, name: name.into() };
        if let Some(place) = self.enter(above, below, &place) {
            self.set_link(above, below, place);
        }
    }

    /// Stores both references.
    fn set_link(&mut self, above: TreeId, below: TreeId, place: LinkPlace) {
        let data =
            root_ref(&RootRef { dirid: place.dir, sequence: place.index, name: &place.name });
        self.roots.insert(reference_key(above, below), Some(data.clone()));
        self.roots.insert(back_reference_key(above, below), Some(data));
        let link = self.items.links.entry((above, below)).or_default();
        (link.reference, link.back_reference) = (Some(place.clone()), Some(place));
    }

    /// Removes both references.
    fn remove_link(&mut self, above: TreeId, below: TreeId) {
        for key in [reference_key(above, below), back_reference_key(above, below)] {
            if self.root_tree_item(key).is_some() {
                self.roots.insert(key, None);
            }
        }
        self.items.links.remove(&(above, below));
    }

    /// Removes the entries of a subvolume that is not there.
    fn remove_entries(&mut self, above: TreeId, below: TreeId, place: &LinkPlace) {
        let Some(mender) = self.mender(above) else { return };
        let is_it = |entry: &OwnedEntry| *entry.name == *place.name && leads_to(entry, below);
        let by_index = mender.indexed_entries(place.dir, place.index).into_iter().find(is_it);
        let by_hash = mender.hashed_entries(place.dir, &place.name).into_iter().find(is_it);
        if let Some(entry) = &by_index {
            mender.remove_entry(place.dir, Some(place.index), entry);
        }
        if let Some(entry) = &by_hash {
            mender.remove_entry(place.dir, None, entry);
        }
        if by_index.or(by_hash).is_some() {
            self.touched.insert((above, place.dir));
        }
    }
}
