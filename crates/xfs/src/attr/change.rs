//! Changes of attributes: one is set, removed, or replaced, in every form that a fork may have.
//!
//! A change is made in steps, each in a transaction, and each leaves a volume that is right. What
//! the next step is shows from what the fork has. So a change whose steps a crash has cut is begun
//! again, and an attribute that is there already, or gone, is no error.
//!
//! ```text
//! value beside its name   out with the old entry, in with the new one         one step
//! value in blocks         a new entry, incomplete and without blocks
//!                         blocks, an extent in each step; the entry says how many it has
//!                         the value is written; the new entry is complete, the old one is not
//! old value in blocks     the old entry is incomplete
//!                         two extents fewer in each step; the entry says how many it has
//!                         the entry goes
//! ```
//!
//! Readers pass over incomplete entries. Those that a crash has left go with the next change of an
//! attribute of their name. The kernel names no blocks in incomplete entries, so it never finds
//! again what a crash left; ours name just those blocks that are mapped.
//!
//! A step frees no space: its result says what the fork has no longer, and the caller frees that
//! ([`crate::defer`] is above).

mod fork;
mod short;
#[cfg(test)]
mod tests;
mod tree;
mod value;

use offshoot_vfs::{Error, Result, Structure};
use offshoot_xfs_format::attr::leaf;
use offshoot_xfs_format::attr::short::ShortXattrs;
use offshoot_xfs_format::attr::{MAX_VALUE, XattrContent, XattrFlags, XfsXattr};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::log::items::{XfsAttributeIntent, XfsAttributeOp};
use offshoot_xfs_format::{FileBlock, Ino, XfsGeometry};

use crate::buffer::malformed;
use crate::inode::change::ForkStep;
use crate::inode::file_id;
use crate::trans::XfsTransaction;
use fork::ChangedXattrs;
use short::ShortOutcome;
use tree::{FoundValue, FoundXattr, FoundXattrs};

/// The extents that a step takes from a fork.
const MOST_UNMAPPED: usize = 2;

/// The steps that are proved at most. The change of a parent pointer has two, and more only to free
/// values that a crash has left.
const MOST_PROVED_STEPS: usize = 16;

/// An attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnedXattr {
    pub(crate) namespace: XattrFlags,
    /// The name, without its namespace.
    pub(crate) name: Vec<u8>,
    /// The value. A removal looks only at that of a parent pointer, which makes its name unique.
    pub(crate) value: Vec<u8>,
}

impl OwnedXattr {
    /// The attribute with its value beside its name.
    fn local(&self) -> XfsXattr<'_> {
        let value = XattrContent::Local(&self.value);
        XfsXattr { flags: self.namespace, name: &self.name, value }
    }

    /// The attribute without its value yet.
    fn incomplete(&self) -> XfsXattr<'_> {
        let value = XattrContent::Remote { block: FileBlock(0), len: 0 };
        XfsXattr { flags: self.namespace | XattrFlags::INCOMPLETE, name: &self.name, value }
    }

    /// Proves what attributes of all forms must have.
    fn check(&self) -> Result<()> {
        let fits = (1..=usize::from(u8::MAX)).contains(&self.name.len())
            && !self.name.contains(&0)
            && self.value.len() <= MAX_VALUE
            && self.namespace == self.namespace.namespace()
            && self.namespace.bits().count_ones() <= 1;
        if fits {
            return self.hash().map(drop);
        }
        let name = self.name.escape_ascii();
        let problem = format!("`{name}` of {:?} cannot be an attribute", self.namespace);
        Err(Error::corrupt(Structure::AttributeBlock, problem))
    }

    fn hash(&self) -> Result<u32> {
        self.local().hash().map_err(malformed)
    }

    fn is_parent(&self) -> bool {
        self.namespace == XattrFlags::PARENT
    }

    /// Whether `xattr` is this attribute, with any value.
    fn is(&self, xattr: &XfsXattr<'_>) -> bool {
        let is_named = xattr.is(self.namespace, &self.name);
        is_named && (!self.is_parent() || xattr.value == XattrContent::Local(&self.value))
    }

    fn is_in(&self, list: &[XfsXattr<'_>]) -> bool {
        list.iter().any(|xattr| self.is(xattr))
    }

    /// Whether a leaf has the value beside the name.
    fn is_local(&self, geometry: &XfsGeometry) -> bool {
        leaf::is_local(geometry, &self.name, &self.value)
    }
}

/// The value of an attribute of a file; `None` when it has none. Locks the inode.
pub(crate) fn find_xattr(
    t: &mut XfsTransaction<'_>,
    ino: Ino,
    namespace: XattrFlags,
    name: &[u8],
) -> Result<Option<Vec<u8>>> {
    let wanted = OwnedXattr { namespace, name: name.to_vec(), value: Vec::new() };
    let mut fork = ChangedXattrs::new(t, ino);
    if let Some(bytes) = fork.short()? {
        let ShortXattrs { list } = ShortXattrs::parse(&bytes).map_err(malformed)?;
        let found = list.iter().find(|xattr| wanted.is(xattr)).map(|xattr| &xattr.value);
        return Ok(found.and_then(|value| match value {
            XattrContent::Local(value) => Some(value.to_vec()),
            XattrContent::Remote { .. } => None,
        }));
    }
    match fork.matches(&wanted)?.complete.map(|found| found.value) {
        None => Ok(None),
        Some(FoundValue::Local(value)) => Ok(Some(value)),
        Some(FoundValue::Remote(block, len)) => fork.read_value(block, len).map(Some),
    }
}

/// The blocks of a value that are mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ValueBlocks {
    first: FileBlock,
    count: u32,
}

/// A change of an attribute, and how far it is.
#[derive(Clone, Debug)]
pub(crate) struct XattrChange {
    ino: Ino,
    op: XfsAttributeOp,
    /// The generation of the file; 0 where the log does not say it.
    generation: u32,
    /// What goes.
    old: Option<OwnedXattr>,
    /// What comes.
    new: Option<OwnedXattr>,
    /// The blocks of the new value, once its incomplete entry is there.
    blocks: Option<ValueBlocks>,
    /// Whether the new value is written and its entry complete: the old one is given up.
    is_written: bool,
    /// Whether readers find what the change is for. Later steps only clean up.
    is_in_force: bool,
}

impl XattrChange {
    /// Sets an attribute, whatever value it had.
    pub(crate) fn set(ino: Ino, new: OwnedXattr) -> Self {
        Self::new(ino, XfsAttributeOp::Set, (None, Some(new)))
    }

    /// Removes an attribute.
    pub(crate) fn remove(ino: Ino, old: OwnedXattr) -> Self {
        Self::new(ino, XfsAttributeOp::Remove, (Some(old), None))
    }

    /// Changes the parent pointers of a file with a generation: `old` goes, `new` comes.
    pub(crate) fn of_parents(
        (ino, generation): (Ino, u32),
        old: Option<OwnedXattr>,
        new: Option<OwnedXattr>,
    ) -> Self {
        let op = match (&old, &new) {
            (None, _) => XfsAttributeOp::SetParent,
            (_, None) => XfsAttributeOp::RemoveParent,
            _ => XfsAttributeOp::ReplaceParent,
        };
        Self { generation, ..Self::new(ino, op, (old, new)) }
    }

    /// The change that removes what the steps of this one have made, which cannot go on: incomplete
    /// entries, as when the new value is there.
    pub(crate) fn undoing(self) -> Self {
        Self { blocks: None, is_written: true, ..self }
    }

    fn new(
        ino: Ino,
        op: XfsAttributeOp,
        (old, new): (Option<OwnedXattr>, Option<OwnedXattr>),
    ) -> Self {
        let (blocks, is_written, is_in_force) = (None, false, false);
        Self { ino, op, generation: 0, old, new, blocks, is_written, is_in_force }
    }

    /// The change that an intent in the log says.
    pub(crate) fn of_intent(intent: &XfsAttributeIntent<'_>) -> Self {
        use XfsAttributeOp as Op;
        let flags =
            u8::try_from(intent.filter).map_or(XattrFlags::empty(), XattrFlags::from_bits_truncate);
        let namespace = flags.namespace();
        let xattr = |name: Option<&[u8]>, value: Option<&[u8]>| {
            let value = value.unwrap_or_default().to_vec();
            Some(OwnedXattr { namespace, name: name?.to_vec(), value })
        };
        let first = xattr(Some(intent.name), intent.value);
        let (old, new) = match intent.op {
            Op::Set | Op::Replace | Op::SetParent => (None, first),
            Op::Remove | Op::RemoveParent => (first, None),
            Op::ReplaceParent => (first, xattr(intent.new_name, intent.new_value)),
        };
        // An entry that is replaced by itself stays.
        let old = old.filter(|old| new.as_ref() != Some(old));
        let is_plain = old.is_none() && intent.op == Op::ReplaceParent;
        let op = if is_plain { Op::SetParent } else { intent.op };
        Self { generation: intent.generation, ..Self::new(intent.ino, op, (old, new)) }
    }

    /// The intent with this id that says the change.
    pub(crate) fn intent(&self, id: u64) -> XfsAttributeIntent<'_> {
        let both = [&self.old, &self.new].map(Option::as_ref);
        let (first, second) = if self.old.is_some() { (both[0], both[1]) } else { (both[1], None) };
        let value = first.map_or(&[][..], |xattr| &xattr.value);
        let has_value = !value.is_empty() && self.op != XfsAttributeOp::Remove;
        XfsAttributeIntent {
            id,
            ino: self.ino,
            generation: self.generation,
            op: self.op,
            filter: first.map_or(0, |xattr| xattr.namespace.bits().into()),
            name: first.map_or(&[], |xattr| &xattr.name),
            new_name: second.map(|xattr| xattr.name.as_slice()),
            value: has_value.then_some(value),
            new_value: second.map(|xattr| xattr.value.as_slice()),
        }
    }

    /// Whether readers find what the change is for, once its last step is committed.
    pub(crate) fn is_in_force(&self) -> bool {
        self.is_in_force
    }

    fn is_of_parents(&self) -> bool {
        use XfsAttributeOp as Op;
        matches!(self.op, Op::SetParent | Op::RemoveParent | Op::ReplaceParent)
    }

    /// The file.
    pub(crate) fn ino(&self) -> Ino {
        self.ino
    }

    /// Whether the attribute that the change sets or removes is there. Locks the inode.
    pub(crate) fn is_there(&self, t: &mut XfsTransaction<'_>) -> Result<bool> {
        let Some(wanted) = self.old.as_ref().or(self.new.as_ref()) else { return Ok(false) };
        let mut fork = ChangedXattrs::new(t, self.ino);
        if let Some(bytes) = fork.short()? {
            let short = ShortXattrs::parse(&bytes).map_err(malformed)?;
            return Ok(wanted.is_in(&short.list));
        }
        Ok(fork.matches(wanted)?.complete.is_some())
    }

    /// Whether the data of the file, which is in the inode, leaves no room for an attribute. Then
    /// it has to go to a block before the change. Locks the inode.
    pub(crate) fn is_kept_out_by_data(&self, t: &mut XfsTransaction<'_>) -> Result<bool> {
        Ok(self.new.is_some() && ChangedXattrs::new(t, self.ino).has_data_everywhere()?)
    }

    /// Makes the next step in a transaction, which locks the inode. The step is done when the
    /// change is.
    /// A step that fails leaves the change as it was, so that it can be made again.
    pub(crate) fn step(&mut self, t: &mut XfsTransaction<'_>) -> Result<ForkStep> {
        let progress = (self.blocks, self.is_written, self.is_in_force);
        self.try_step(t).map_err(|error| {
            (self.blocks, self.is_written, self.is_in_force) = progress;
            error.in_file_if_unnamed(file_id(self.ino))
        })
    }

    /// Proves that the change can be made, with the blocks that are promised to the transaction:
    /// makes its steps in it, and undoes them. It has changed nothing yet, and keeps the locks of
    /// these inodes. What the inode itself holds is proved by reading it. Returns how many blocks
    /// the steps take.
    pub(crate) fn prove(&self, t: &mut XfsTransaction<'_>, kept: &[Ino]) -> Result<u64> {
        if let Some(bytes) = ChangedXattrs::new(t, self.ino).short()? {
            ShortXattrs::parse(&bytes).map_err(malformed)?;
            return Ok(0);
        }
        let mut trial = self.clone();
        for _ in 0..MOST_PROVED_STEPS {
            if trial.step(t)?.is_done {
                break;
            }
        }
        t.require_promised()?;
        t.prove_changes()?;
        let taken = t.taken();
        t.undo(kept, 0).map(|()| taken)
    }

    /// Makes the change in one step, if the inode has the attributes and room for those behind the
    /// change. Returns whether it did; nothing has changed if not.
    pub(crate) fn make_in_inode(&self, t: &mut XfsTransaction<'_>) -> Result<bool> {
        let made = self.begin_step(t).and_then(|mut fork| fork.change_in_inode(self));
        made.map_err(|error| error.in_file_if_unnamed(file_id(self.ino)))
    }

    /// The attributes, which the next step changes.
    fn begin_step<'t, 'e>(&self, t: &'t mut XfsTransaction<'e>) -> Result<ChangedXattrs<'t, 'e>> {
        [&self.old, &self.new].into_iter().flatten().try_for_each(OwnedXattr::check)?;
        let mut fork = ChangedXattrs::new(t, self.ino);
        if self.is_of_parents() && !fork.geometry().layout.contains(XfsLayout::PARENTS) {
            return Err(fork.damaged("a parent pointer in a volume without them"));
        }
        let inode = fork.inode()?;
        let is_other = self.is_of_parents() && inode.core().generation.get() != self.generation;
        if inode.core().is_free() || is_other {
            return Err(inode.damaged("an attribute of a file that is gone is changed"));
        }
        Ok(fork)
    }

    fn try_step(&mut self, t: &mut XfsTransaction<'_>) -> Result<ForkStep> {
        let mut fork = self.begin_step(t)?;
        let is_done = match fork.change_short(self)? {
            ShortOutcome::Done => true,
            ShortOutcome::InBlocks => self.step_in_blocks(&mut fork)?,
        };
        Ok(ForkStep { is_done, ..fork.blocks.step })
    }

    fn step_in_blocks(&mut self, fork: &mut ChangedXattrs<'_, '_>) -> Result<bool> {
        if let Some(old) = &self.old {
            let found = fork.matches(old)?;
            let is_last = self.new.is_none();
            self.is_in_force = is_last;
            if let Some(complete) = &found.complete {
                let is_gone = give_up(fork, complete)? && found.incomplete.is_empty();
                return Ok(is_gone && is_last);
            }
            if let Some(rest) = found.incomplete.first() {
                let is_gone = drop_incomplete(fork, rest)? && found.incomplete.len() == 1;
                return Ok(is_gone && is_last);
            }
        }
        match self.new.clone() {
            Some(new) => self.step_of_new(fork, &new),
            None => fork.settle_form(),
        }
    }

    fn step_of_new(&mut self, fork: &mut ChangedXattrs<'_, '_>, new: &OwnedXattr) -> Result<bool> {
        let FoundXattrs { complete, incomplete } = fork.matches(new)?;
        let is_ours =
            |found: &&FoundXattr| self.blocks.is_some_and(|blocks| blocks.are_of(fork, new, found));
        let ours = incomplete.iter().find(is_ours);
        let is_there =
            self.is_written || self.blocks.is_none() && has_value(fork, complete.as_ref(), new)?;
        let is_old = |found: &&FoundXattr| ours.is_none_or(|ours| !std::ptr::eq(ours, *found));
        self.is_in_force |= is_there;
        if let Some(old) = incomplete.iter().find(is_old) {
            let is_gone = drop_incomplete(fork, old)?;
            return Ok(is_gone && is_there && incomplete.len() == 1);
        }
        if is_there {
            return Ok(true);
        }
        let path = match &complete {
            Some(found) => found.path.clone(),
            None => fork.blocks.find(new.hash()?)?,
        };
        if new.is_local(fork.geometry()) {
            let is_done = complete.as_ref().map_or(Ok(true), |old| make_way(fork, old))?;
            fork.insert(&path, &new.local())?;
            self.is_in_force = true;
            // A shorter value may let all attributes return to the inode.
            return Ok(is_done && (complete.is_none() || fork.settle_form()?));
        }
        let needed = fork.value_blocks(new.value.len());
        let Some((ours, blocks)) = ours.zip(self.blocks) else {
            fork.insert(&path, &new.incomplete())?;
            self.blocks = Some(ValueBlocks { first: FileBlock(0), count: 0 });
            return Ok(false);
        };
        if blocks.count < needed {
            self.blocks = Some(blocks.grown(fork, ours, new)?);
            return Ok(false);
        }
        fork.write_value(blocks.first, &new.value)?;
        fork.mark_complete(ours)?;
        (self.blocks, self.is_written, self.is_in_force) = (None, true, true);
        let Some(old) = complete else { return Ok(true) };
        give_up(fork, &old)
    }
}

impl ValueBlocks {
    /// The bytes of a value that they hold.
    fn bytes(self, fork: &ChangedXattrs<'_, '_>, value: &OwnedXattr) -> usize {
        fork.value_bytes(self.count).min(value.value.len())
    }

    /// Whether the incomplete entry names these blocks.
    fn are_of(self, fork: &ChangedXattrs<'_, '_>, value: &OwnedXattr, found: &FoundXattr) -> bool {
        found.value == FoundValue::Remote(self.first, self.bytes(fork, value))
    }

    /// Maps more blocks for a value, whose entry names them.
    fn grown(
        self,
        fork: &mut ChangedXattrs<'_, '_>,
        entry: &FoundXattr,
        value: &OwnedXattr,
    ) -> Result<Self> {
        let needed = fork.value_blocks(value.value.len());
        let Self { mut first, count } = self;
        if count == 0 {
            first = fork.hole(needed)?;
        }
        let at = FileBlock(first.0 + u64::from(count));
        let count = count + fork.blocks.map(at, needed - count)?;
        let grown = Self { first, count };
        let bytes = grown.bytes(fork, value);
        fork.set_remote(entry, (first, bytes))?;
        Ok(grown)
    }
}

/// Whether an attribute that was found has the value of `wanted`.
fn has_value(
    fork: &mut ChangedXattrs<'_, '_>,
    found: Option<&FoundXattr>,
    wanted: &OwnedXattr,
) -> Result<bool> {
    match found.map(|found| &found.value) {
        None => Ok(false),
        Some(FoundValue::Local(value)) => Ok(*value == wanted.value),
        Some(&FoundValue::Remote(_, len)) if len != wanted.value.len() => Ok(false),
        Some(&FoundValue::Remote(block, len)) => match fork.read_value(block, len) {
            Ok(value) => Ok(value == wanted.value),
            // A damaged value is replaced.
            Err(Error::Corrupt(_)) => Ok(false),
            Err(error) => Err(error),
        },
    }
}

/// Takes a complete entry out of its leaf, in which another follows in the same step. One with a
/// value in blocks stays as an incomplete one. Returns whether it is gone.
fn make_way(fork: &mut ChangedXattrs<'_, '_>, old: &FoundXattr) -> Result<bool> {
    match old.value {
        FoundValue::Local(_) => fork.take_out(old).map(|()| true),
        FoundValue::Remote(..) => fork.mark_incomplete(old).map(|()| false),
    }
}

/// Removes a complete entry; one with a value in blocks becomes incomplete. Returns whether nothing
/// is left to do for it.
fn give_up(fork: &mut ChangedXattrs<'_, '_>, old: &FoundXattr) -> Result<bool> {
    match old.value {
        FoundValue::Local(_) => {
            fork.remove(old)?;
            fork.settle_form()
        }
        FoundValue::Remote(..) => fork.mark_incomplete(old).map(|()| false),
    }
}

/// Takes blocks from an incomplete entry, and removes it when it has none. Returns whether nothing
/// is left to do for it.
fn drop_incomplete(fork: &mut ChangedXattrs<'_, '_>, old: &FoundXattr) -> Result<bool> {
    if let FoundValue::Remote(first @ FileBlock(1..), len @ 1..) = old.value {
        let range = first.0..first.0 + u64::from(fork.value_blocks(len));
        let is_unmapped = fork.blocks.unmap(range, MOST_UNMAPPED)?;
        if !is_unmapped {
            let last = fork.blocks.step.extents.last().map_or(first.0, |last| last.offset.0);
            let left = u32::try_from(last.saturating_sub(first.0)).unwrap_or(0);
            let left = fork.value_bytes(left).min(len);
            fork.set_remote(old, (first, left))?;
            return Ok(false);
        }
    }
    fork.remove(old)?;
    fork.settle_form()
}
