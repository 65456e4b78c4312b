//! The names of an inode, as stored with the inode.
//!
//! All names of an inode in one directory share an INODE_REF item. Names that do not fit into it go
//! to INODE_EXTREF items, whose key has a hash of directory and name, if the volume has that
//! feature.

use offshoot_btrfs_format::dir::extref_hash;
use offshoot_btrfs_format::encode;
use offshoot_btrfs_format::inode::{InodeName, inode_extrefs, inode_refs};
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_vfs::{EntryPlace, Errno, Error, Result, Structure};

use super::changes::Changes;
use super::entries::EntryTarget;
use crate::storage::malformed;

/// The most names that an inode can have.
pub(super) const LINK_MAX: u32 = 65_535;

impl Changes<'_, '_> {
    /// Gives the inode `ino` the name at `place`, whose entry has this index.
    ///
    /// # Errors
    /// `EMLINK` when neither item has room for it.
    pub(crate) fn add_name(&mut self, ino: u64, place: EntryPlace<'_>, index: u64) -> Result<()> {
        let EntryPlace { dir, name } = place;
        let key = Key::new(ino, ItemType::INODE_REF, dir.ino);
        let mut names = self.get(key)?.unwrap_or_default().to_vec();
        names.extend_from_slice(&encode::inode_ref(index, name));
        if self.fits(names.len()) {
            return self.put(key, names);
        }
        let full = || {
            let what = format!("one more name in {dir} for the inode {ino}");
            Error::posix(Errno::MLINK, what)
        };
        if !self.volume().superblock().incompat.has(Incompat::EXTENDED_IREF) {
            return Err(full());
        }
        let key = Key::new(ino, ItemType::INODE_EXTREF, extref_hash(dir.ino, name));
        let mut names = self.get(key)?.unwrap_or_default().to_vec();
        names.extend_from_slice(&encode::inode_extref(dir.ino, index, name));
        if !self.fits(names.len()) {
            return Err(full());
        }
        self.put(key, names)
    }

    /// Gives the inode `ino`, which is new, its first name.
    pub(super) fn first_name(&mut self, ino: u64, place: EntryPlace<'_>, index: u64) {
        let key = Key::new(ino, ItemType::INODE_REF, place.dir.ino);
        self.put_new(key, encode::inode_ref(index, place.name));
    }

    /// Takes the name at `place` from `target`, which is the inode `ino`, and returns the index of
    /// its entry. A damaged inode may have the same name several times; then this removes the one
    /// whose entry exists.
    ///
    /// # Errors
    /// When the inode does not have the name.
    pub(crate) fn remove_name(
        &mut self,
        ino: u64,
        target: EntryTarget,
        place: EntryPlace<'_>,
    ) -> Result<u64> {
        let EntryPlace { dir, name } = place;
        let keys = [
            Key::new(ino, ItemType::INODE_REF, dir.ino),
            Key::new(ino, ItemType::INODE_EXTREF, extref_hash(dir.ino, name)),
        ];
        for key in keys {
            let data = self.get(key)?.unwrap_or_default().to_vec();
            let all = names_in(key, &data)?;
            let is_same = |one: &&InodeName<'_>| one.parent == dir.ino && one.name == name;
            let same: Vec<u64> = all.iter().filter(is_same).map(|one| one.index).collect();
            let Some(&first) = same.first() else { continue };
            let mut index = first;
            for &other in same.iter().filter(|_| same.len() > 1) {
                if self.is_entry(place, target, other)? {
                    index = other;
                    break;
                }
            }
            let gone = all.iter().position(|one| is_same(&one) && one.index == index);
            let kept = all.iter().enumerate().filter(|(at, _)| Some(*at) != gone);
            let rest: Vec<_> = kept.map(|(_, one)| encoded(key, one)).collect();
            self.put_or_remove(key, rest.concat())?;
            self.note_lost(dir.ino, index, ino);
            return Ok(index);
        }
        let name = name.escape_ascii();
        let problem = format!("inode {ino} does not know its name `{name}` in {dir}");
        Err(Error::corrupt(Structure::InodeRef, problem))
    }
}

/// The names in an INODE_REF or INODE_EXTREF item.
fn names_in(key: Key, data: &[u8]) -> Result<Vec<InodeName<'_>>> {
    let all: std::result::Result<Vec<_>, _> = if key.item_type == ItemType::INODE_REF {
        inode_refs(key.offset, data).collect()
    } else {
        inode_extrefs(data).collect()
    };
    all.map_err(malformed)
}

/// A name as it is stored in an item with this key.
fn encoded(key: Key, one: &InodeName<'_>) -> Vec<u8> {
    if key.item_type == ItemType::INODE_REF {
        encode::inode_ref(one.index, one.name)
    } else {
        encode::inode_extref(one.parent, one.index, one.name)
    }
}
