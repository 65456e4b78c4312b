//! Attributes in the inode, and the way from there to leaves and back.
//!
//! The room of the inode is shared by two forks: attributes may take what the data fork does not
//! need. An inode of 512 bytes has 336 bytes for both. Three extents need 48 of them, so attributes
//! may have 280 (the data fork keeps at least 56), and the fork offset moves from 24 to 7.

use offshoot_vfs::{Code, Error, Result};
use offshoot_xfs_format::attr::XattrContent;
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::inode::XfsInodeCore;

use super::fork::{ChangedXattrs, FORK};
use super::tree::ROOT;
use super::{OwnedXattr, XattrChange};
use crate::buffer::malformed;
use crate::inode::change::set_fork_offset;
use crate::trans::{ChangedFork, ForkName};

/// The longest name and value in short form, and the bytes of a fork without attributes.
const SHORT_MAX: usize = 255;
const EMPTY: [u8; 4] = [0, 4, 0, 0];

/// The bytes of the root of a tree with so many children.
const fn root_bytes(children: usize) -> usize {
    4 + 16 * children
}

/// The room that each fork keeps at least, so that it can hold the root of a tree.
const LEAST_DATA: usize = root_bytes(3);
const LEAST_ATTRIBUTES: usize = root_bytes(2);

/// Where the attribute fork begins when its attributes are not in the inode, unless the data fork
/// needs more.
const USUAL_OFFSET: usize = root_bytes(12) / 8;

/// What became of a change of attributes in the inode.
pub(super) enum ShortOutcome {
    /// It is done.
    Done,
    /// The attributes are in a leaf now, or have been before.
    InBlocks,
}

impl ChangedXattrs<'_, '_> {
    /// Where the attribute fork has to begin to have room for `bytes`, in units of 8 bytes; `None`
    /// when the data fork does not leave so much.
    fn offset_for(&mut self, bytes: usize) -> Result<Option<u8>> {
        let geometry = self.geometry();
        let inode = self.inode()?;
        let offset = inode.core().forkoff;
        if offset > 0 && bytes <= inode.room(FORK, geometry)? {
            return Ok(Some(offset));
        }
        if offset > 0 && matches!(inode.fork(ForkName::Data), Some(ChangedFork::Btree(_))) {
            return Ok(None);
        }
        let (least, most) = self.offsets()?;
        let literal = XfsInodeCore::literal_bytes(geometry);
        let wanted = literal.checked_sub(bytes).map(|left| left / 8);
        let wanted = wanted.filter(|wanted| *wanted >= least && least <= most);
        Ok(wanted.and_then(|wanted| u8::try_from(wanted.min(most)).ok()))
    }

    /// The least and the most offset of the attribute fork, in units of 8 bytes.
    fn offsets(&mut self) -> Result<(usize, usize)> {
        let geometry = self.geometry();
        let literal = XfsInodeCore::literal_bytes(geometry);
        let most = literal.saturating_sub(LEAST_ATTRIBUTES) / 8;
        let needed = match self.inode()?.fork(ForkName::Data) {
            // A device never gets a tree.
            Some(ChangedFork::Device(_)) => return Ok((1, 1)),
            Some(ChangedFork::Local(bytes) | ChangedFork::RealtimeTree(bytes)) => bytes.len(),
            Some(ChangedFork::Extents(items)) => size_of_val(items.as_slice()),
            Some(ChangedFork::Btree(root)) => root_bytes(root.children.len()),
            None => 0,
        };
        Ok((needed.max(LEAST_DATA).div_ceil(8), most))
    }

    /// Whether data that is in the inode, and cannot move from here, leaves no room for a fork.
    pub(super) fn has_data_everywhere(&mut self) -> Result<bool> {
        let (least, most) = self.offsets()?;
        let inode = self.inode()?;
        let is_local = matches!(inode.fork(ForkName::Data), Some(ChangedFork::Local(_)));
        Ok(is_local && inode.core().forkoff == 0 && least > most)
    }

    /// Gives an inode without an attribute fork an empty one.
    fn add_fork(&mut self) -> Result<()> {
        let (least, most) = self.offsets()?;
        let mut offset = least.max(USUAL_OFFSET.min(most));
        if offset > most {
            // Extents become a tree when they have too little room, and the root of a tree moves to
            // a block. Other contents cannot move from here: the caller has to ask first whether
            // they are in the way.
            let data = self.inode()?.fork(ForkName::Data);
            let can_move = matches!(data, Some(ChangedFork::Extents(_) | ChangedFork::Btree(_)));
            if !can_move {
                let what = format!(
                    "room for attributes in inode {}, whose data fills it",
                    self.blocks.ino
                );
                return Err(Error::unsupported(Code::Unsupported, what));
            }
            offset = USUAL_OFFSET.min(most);
        }
        let offset = u8::try_from(offset).map_err(|_| self.damaged("the inode is too large"))?;
        set_fork_offset(self.blocks.t, self.blocks.ino, offset)
    }

    /// The attributes in the inode; `None` when they are in blocks.
    pub(super) fn short(&mut self) -> Result<Option<Vec<u8>>> {
        Ok(match self.inode()?.fork(FORK) {
            Some(ChangedFork::Local(bytes)) => Some(bytes.clone()),
            Some(ChangedFork::Extents(items)) if !items.is_empty() => None,
            Some(ChangedFork::Extents(_)) | None => Some(EMPTY.to_vec()),
            _ => None,
        })
    }

    /// Makes a change in the inode, if the attributes are there and have room. If not, they go to a
    /// leaf, from which only what the change removes is missing.
    pub(super) fn change_short(&mut self, change: &XattrChange) -> Result<ShortOutcome> {
        if self.change_in_inode(change)? {
            return Ok(ShortOutcome::Done);
        }
        let Some(bytes) = self.short()? else { return Ok(ShortOutcome::InBlocks) };
        let ShortXattrs { mut list } = ShortXattrs::parse(&bytes).map_err(malformed)?;
        let geometry = self.geometry();
        let local = change.new.as_ref().filter(|new| new.is_local(geometry));
        for gone in [change.old.as_ref(), local].into_iter().flatten() {
            list.retain(|xattr| !gone.is(xattr));
        }
        self.move_to_leaf(&ShortXattrs { list })
    }

    /// The same, but returns false and changes nothing if the attributes are in blocks, or have no
    /// room in the inode.
    pub(super) fn change_in_inode(&mut self, change: &XattrChange) -> Result<bool> {
        let Some(bytes) = self.short()? else { return Ok(false) };
        if change.is_written {
            return Ok(true);
        }
        let ShortXattrs { mut list } = ShortXattrs::parse(&bytes).map_err(malformed)?;
        let count = list.len();
        let keeps = |gone: &Option<OwnedXattr>| gone.as_ref().is_none_or(|gone| !gone.is_in(&list));
        let (old, new) = (&change.old, &change.new);
        if keeps(old) && new.as_ref().is_none_or(|new| list.contains(&new.local())) {
            return Ok(true);
        }
        for gone in [old, new].into_iter().flatten() {
            list.retain(|xattr| !gone.is(xattr));
        }
        if let Some(new) = new {
            list.push(new.local());
            let is_short = |len: usize| len <= SHORT_MAX;
            let fits = is_short(new.name.len()) && is_short(new.value.len());
            return Ok(fits && is_short(list.len()) && self.store_short(&ShortXattrs { list })?);
        }
        if list.is_empty() && count > 0 {
            self.drop_fork()?;
        } else if !self.store_short(&ShortXattrs { list })? {
            return Err(self.damaged("fewer attributes have no room"));
        }
        Ok(true)
    }

    /// Stores attributes in the inode. Returns false when they have no room.
    fn store_short(&mut self, xattrs: &ShortXattrs<'_>) -> Result<bool> {
        let bytes = xattrs.encode().map_err(malformed)?;
        let Some(offset) = self.offset_for(bytes.len())? else { return Ok(false) };
        set_fork_offset(self.blocks.t, self.blocks.ino, offset)?;
        self.inode()?.set_fork(FORK, ChangedFork::Local(bytes));
        Ok(true)
    }

    fn move_to_leaf(&mut self, xattrs: &ShortXattrs<'_>) -> Result<ShortOutcome> {
        if self.inode()?.core().forkoff == 0 {
            self.add_fork()?;
        }
        self.inode()?.set_fork(FORK, ChangedFork::Extents(Vec::new()));
        self.plant(&xattrs.list)?;
        Ok(ShortOutcome::InBlocks)
    }

    /// Ends a fork that has no attributes and no blocks. Its room goes to the data, but for data in
    /// a tree, and in volumes whose files always get attributes.
    fn drop_fork(&mut self) -> Result<()> {
        let has_parents = self.geometry().layout.contains(XfsLayout::PARENTS);
        let inode = self.inode()?;
        if has_parents || matches!(inode.fork(ForkName::Data), Some(ChangedFork::Btree(_))) {
            inode.set_fork(FORK, ChangedFork::Local(EMPTY.to_vec()));
        } else {
            inode.drop_attribute_fork();
        }
        Ok(())
    }

    /// Brings attributes back to the inode that fit there, and ends a fork without attributes.
    /// Returns false when that takes one more step.
    pub(super) fn settle_form(&mut self) -> Result<bool> {
        let block = self.blocks.copy(ROOT)?;
        if self.blocks.node(&block)?.is_some() {
            return Ok(true);
        }
        let leaf = self.leaf(&block)?;
        let list: Vec<_> = leaf.xattrs(0).collect();
        if list.is_empty() {
            // Blocks of values that a crash has left are mapped still.
            let is_done = self.blocks.unmap(1..u64::from(u32::MAX), super::MOST_UNMAPPED)?;
            if is_done {
                self.blocks.free(ROOT)?;
                self.drop_fork()?;
            }
            return Ok(is_done);
        }
        let is_short = list.iter().all(|xattr| {
            let is_plain = xattr.flags == xattr.flags.namespace();
            is_plain
                && matches!(xattr.value, XattrContent::Local(value) if value.len() <= SHORT_MAX)
        });
        let is_alone =
            self.inode()?.extent_count(FORK) == 1 && self.blocks.extent(ROOT)?.count == 1;
        if !is_short || !is_alone || list.len() > SHORT_MAX {
            return Ok(true);
        }
        let bytes = ShortXattrs { list }.encode().map_err(malformed)?;
        if let Some(offset) = self.offset_for(bytes.len())? {
            self.blocks.free(ROOT)?;
            set_fork_offset(self.blocks.t, self.blocks.ino, offset)?;
            self.inode()?.set_fork(FORK, ChangedFork::Local(bytes));
        }
        Ok(true)
    }
}
