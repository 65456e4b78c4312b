//! Finding the smallest size of a member, and other ways to lower its end.
//!
//! ```text
//! squeeze |sys···|meta·········|data 1|data 2····| move what lies behind what is needed into
//!             |s|    |me|          |data 1|data|           free space before it, and end there
//!   pack      |s|me|               |data 1|data|           move copies of tree blocks down
//! lower |s|me|data| |data 1| move the last group into the lowest hole,
//!             |s|me|data|data 1|                           or a part of it, as a chunk that just fits
//! ```
//!
//! Squeezing needs no other space. A group of metadata keeps as much free space as the kernel wants
//! to mount and write a volume. Lowering repeats until no hole is left that something fits into, or
//! the end is low enough. Every step ends in a commit, and leaves a volume that lacks nothing.
//!
//! This is for members whose chunks have all copies on that member alone.

use std::io::IoSlice;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{Profile, STRIPE_LEN};
use offshoot_btrfs_format::{Physical, TreeId};
use offshoot_vfs::{Code, Errno, Error, Result};
use tracing::debug;

use super::relocate::Relocator;
use super::resize::{end_on, last_behind};
use crate::events::RELOCATE;
use crate::inode::Rooms;
use crate::ranges::joined;
use crate::space::chunk_plan::MemberSpace;
use crate::space::{BlockGroup, Claim, Purpose};
use crate::transaction::{CommitCause, TransactionHandle, extents_in};

/// The least length of a group that is kept empty, and of a system group, in bytes.
const LEAST_GROUP: u64 = 1 << 20;

/// What stays free behind the last extent of a group of data, in bytes. The kernel reserves space
/// for data also where the data then goes into the leaf.
const DATA_SLACK: u64 = 256 << 10;

/// A hole below this is left as it is, in bytes.
const LEAST_HOLE: u64 = 256 << 10;

/// The longest extent of data, in bytes.
const MOST_EXTENT: u64 = 128 << 20;

/// How many bytes of a copy are moved at once.
const COPY_BYTES: usize = 1 << 20;

/// A group of data in which less than this part is used is squeezed, in percent.
const DENSE_PERCENT: u64 = 98;

/// The blocks that the kernel reserves for work that cannot fail, where its trees are small.
const KERNEL_RESERVE: u64 = 352;

/// The blocks that changes of a few files may reserve beside that.
const KERNEL_WORK: u64 = 384;

/// The most bytes that the kernel reserves for work that cannot fail.
const MOST_KERNEL_RESERVE: u64 = 512 << 20;

/// How often a group may still be in use behind its new end.
const MOST_TRIES: u32 = 100;

/// Makes block groups as short as they can be, and moves them down.
pub(super) struct Compactor<'k, 'v> {
    relocator: Relocator<'k, 'v>,
    /// The index of the member.
    index: usize,
}

impl<'k, 'v> Compactor<'k, 'v> {
    /// Prepares to lower the end of the member at `index`. No chunk is allocated but by this.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when chunks have copies on several members.
    pub(super) fn new(mut relocator: Relocator<'k, 'v>, index: usize) -> Result<Self> {
        relocator.may_grow = false;
        let volume = relocator.volume;
        let is_plain = |profile| matches!(profile, Profile::Single | Profile::Dup);
        let are_plain = volume.chunks().all(|chunk| is_plain(chunk.profile));
        if volume.members().len() > 1 || !are_plain {
            let what = "finding the smallest size of a volume with several members";
            return Err(Error::unsupported(Code::Relocation, what));
        }
        Ok(Self { relocator, index })
    }

    /// Lowers the end of the member to `target` or, if that is not possible, as far as it goes.
    /// Returns the end, in bytes.
    pub(super) fn lower_to(&self, target: u64) -> Result<u64> {
        if self.end()? <= target {
            return self.end();
        }
        self.squeeze_all()?;
        self.pack_blocks()?;
        loop {
            let end = self.end()?;
            debug!(target: RELOCATE, end, target, "the end of the member");
            if end <= target || !self.lower(end)? || self.end()? >= end {
                return self.end();
            }
        }
    }

    /// Where the last chunk on the member ends.
    fn end(&self) -> Result<u64> {
        let volume = self.relocator.volume;
        let ends = volume.chunks().filter_map(|chunk| end_on(volume, &chunk, self.index));
        ends.max().ok_or_else(|| Error::posix(Errno::INVAL, "a member without chunks"))
    }

    /// The groups for `purpose`, the last one on the member first.
    fn groups(&self, purpose: Purpose) -> Result<Vec<Arc<BlockGroup>>> {
        let (volume, space) = (self.relocator.volume, &self.relocator.volume.live()?.space);
        let mut all = Vec::new();
        for chunk in volume.chunks() {
            let group = space.group_of(chunk.start)?;
            if space.purpose_of(&group) == purpose {
                all.push((end_on(volume, &chunk, self.index), group));
            }
        }
        all.sort_by_key(|(end, _)| std::cmp::Reverse(*end));
        Ok(all.into_iter().map(|(_, group)| group).collect())
    }

    /// Squeezes all groups.
    fn squeeze_all(&self) -> Result<()> {
        self.squeeze_blocks(Purpose::System, LEAST_GROUP)?;
        for group in self.groups(Purpose::Data)? {
            self.squeeze_data(&group)?;
        }
        let slack = self.kernel_slack()?;
        self.squeeze_blocks(Purpose::Metadata, slack)
    }

    /// Moves the copies of tree blocks down, the lowest first, into holes before them. The bytes
    /// are copied as they are, and no address in the trees changes.
    fn pack_blocks(&self) -> Result<()> {
        let volume = self.relocator.volume;
        let mut stripes = Vec::new();
        for purpose in [Purpose::System, Purpose::Metadata] {
            for group in self.groups(purpose)?.into_iter().filter(|group| !group.flags.has_data()) {
                let chunk = volume.storage.chunk_at(group.start)?;
                let places = chunk.stripes.iter().map(|stripe| stripe.physical.0);
                let own = places.enumerate().map(|(number, at)| (at, number, group.clone()));
                stripes.extend(own);
            }
        }
        stripes.sort_unstable_by_key(|(at, ..)| *at);
        for (at, number, group) in stripes {
            self.tolerate(self.move_stripe(&group, number, at))?;
        }
        Ok(())
    }

    /// Moves a stripe of a group of tree blocks, which begins at `from`, into the lowest hole
    /// before it. Its old place is free when that is on the devices.
    fn move_stripe(&self, group: &Arc<BlockGroup>, number: usize, from: u64) -> Result<()> {
        let (volume, space) = (self.relocator.volume, &self.relocator.volume.live()?.space);
        let reserved = volume.reserve_for(space.chunk_items(), Claim::LastResort)?;
        let mut outcome = Ok(());
        let last = |handle: &TransactionHandle<'v>| {
            let _chunks = handle.space().chunk_lock.lock();
            let lowest =
                |all: &mut [MemberSpace]| all.get(self.index)?.lowest_clear(group.len, from);
            let Some(to) = volume.with_member_spaces(lowest)? else { return Ok(()) };
            if !handle.has_system_space()? {
                return Ok(());
            }
            // No thread writes to the group: tree blocks are written by commits, and logs by
            // threads with a handle.
            outcome = copy_stripe(volume, self.index, group, from, to);
            if outcome.is_err() {
                return Ok(());
            }
            debug!(target: RELOCATE, group = group.start.0, from, to, "a copy moves");
            handle.repoint_stripe(group.start, number, Physical(to))
        };
        self.relocator.keeper.commit_with(volume, CommitCause::Space, Box::new(last))?;
        drop(reserved);
        let handle = volume.enter()?;
        let _chunks = space.chunk_lock.lock();
        *space.member_spaces.lock() = None;
        handle.note_next_chunk()?;
        outcome
    }

    /// The free metadata with which the kernel mounts and writes a volume, in bytes.
    fn kernel_slack(&self) -> Result<u64> {
        let (volume, live) = (self.relocator.volume, self.relocator.volume.live()?);
        let mut trees = 0u64;
        for id in [TreeId::EXTENT, TreeId::CSUM, TreeId::FREE_SPACE, TreeId::BLOCK_GROUP] {
            if let Ok(tree) = live.tree(&volume.base, id) {
                let bytes = tree.used.load(std::sync::atomic::Ordering::Relaxed);
                trees = trees.saturating_add(bytes);
            }
        }
        let node_size = live.space.node_size();
        let reserve = trees.clamp(KERNEL_RESERVE * node_size, MOST_KERNEL_RESERVE);
        Ok(reserve + KERNEL_WORK * node_size)
    }

    /// Squeezes the groups of tree blocks until only `slack` bytes of them are free.
    fn squeeze_blocks(&self, purpose: Purpose, slack: u64) -> Result<()> {
        for group in self.groups(purpose)? {
            let all = self.groups(purpose)?;
            let free = all.iter().map(|group| group.len.saturating_sub(group.used_bytes()));
            let free: u64 = free.sum();
            let own = group.len.saturating_sub(group.used_bytes());
            let (spare, used) = (free.saturating_sub(slack), group.used_bytes());
            if all.len() > 1 && spare >= own + used {
                self.tolerate(self.relocator.relocate(&group))?;
                continue;
            }
            let least = (group.len - spare.min(own)).max(LEAST_GROUP);
            self.tolerate(self.squeeze(&group, least))?;
        }
        Ok(())
    }

    /// Squeezes a group of data, or removes an empty one.
    fn squeeze_data(&self, group: &Arc<BlockGroup>) -> Result<()> {
        let (volume, space) = (self.relocator.volume, &self.relocator.volume.live()?.space);
        let used = group.used_bytes();
        if used == 0 && !space.is_last_to_take(Purpose::Data, group) {
            return self.tolerate(self.relocator.relocate(group));
        }
        let last = |group: &BlockGroup| {
            let all = extents_in(&volume.base, &(group.start.0..group.end()))?;
            Ok::<_, Error>(all.last().map_or(0, |last| last.end - group.start.0))
        };
        let mut end = last(group)?;
        if used.saturating_mul(100) < end.saturating_mul(DENSE_PERCENT) {
            // The holes between extents may be too short for what comes behind them.
            self.tolerate(self.squeeze(group, used))?;
            let Ok(again) = space.group_of(group.start) else { return Ok(()) };
            end = last(&again)?;
            return self.tolerate(self.squeeze(&again, (end + DATA_SLACK).max(LEAST_GROUP)));
        }
        self.tolerate(self.squeeze(group, (end + DATA_SLACK).max(LEAST_GROUP)))
    }

    /// That there is no room for a step only means that the end stays higher.
    fn tolerate(&self, outcome: Result<()>) -> Result<()> {
        match outcome {
            Err(error) if matches!(error.errno(), Errno::NOSPC | Errno::BUSY) => {
                debug!(target: RELOCATE, %error, "a step was left out");
                self.relocator.volume.live()?.require_writing()
            }
            outcome => outcome,
        }
    }

    /// Makes `group` end after `least` bytes, rounded up to whole rows. What is behind that moves.
    fn squeeze(&self, group: &Arc<BlockGroup>, least: u64) -> Result<()> {
        let (volume, space) = (self.relocator.volume, &self.relocator.volume.live()?.space);
        let len = least.next_multiple_of(STRIPE_LEN);
        if len >= group.len {
            return Ok(());
        }
        let (limit, purpose) = (group.start.0 + len, space.purpose_of(group));
        let keep = match purpose {
            Purpose::Metadata => space.commit_cost() + space.cost(space.chunk_items()),
            Purpose::Data | Purpose::System => 0,
        };
        let is_limited = {
            let _handle = volume.enter()?;
            space.limit_group(&volume.base, group, limit, keep)?
        };
        if !is_limited {
            return Err(Error::posix(Errno::NOSPC, format!("other room for {purpose}")));
        }
        // An extent may reach over the new end. Those of the running transaction are in the extent
        // tree behind a commit.
        let listed = volume.sync().and_then(|()| {
            let _handle = volume.enter()?;
            extents_in(&volume.base, &(group.start.0..group.end()))
        });
        let all = listed.inspect_err(|_| space.lift_limit(group))?;
        let behind = || all.iter().filter(|one| one.end > limit);
        let from = behind().map(|one| one.start).min().map_or(limit, |start| start.min(limit));
        let range = from..group.end();
        let bytes = behind().map(|one| one.end - one.start).sum();
        let outcome = self.relocator.empty(group, &range, bytes);
        let outcome = outcome.and_then(|()| self.shorten(group, len));
        if outcome.is_err() && !group.is_retired() {
            space.lift_limit(group);
        }
        outcome
    }

    /// Makes `group`, in which nothing lies behind its limit, end there.
    fn shorten(&self, group: &Arc<BlockGroup>, len: u64) -> Result<()> {
        let (volume, space) = (self.relocator.volume, &self.relocator.volume.live()?.space);
        for _ in 0..MOST_TRIES {
            let reserved = volume.reserve_for(space.chunk_items(), Claim::LastResort)?;
            let mut is_done = false;
            let last = |handle: &TransactionHandle<'v>| {
                let _chunks = handle.space().chunk_lock.lock();
                if group.is_free_behind_limit() && handle.has_system_space()? {
                    handle.shorten_group(group, len)?;
                    is_done = true;
                }
                Ok(())
            };
            self.relocator.keeper.commit_with(volume, CommitCause::Space, Box::new(last))?;
            drop(reserved);
            if is_done {
                debug!(target: RELOCATE, group = group.start.0, len, "shortened");
                return Ok(());
            }
            // Threads under way may have taken space there, or a commit has freed some.
            volume.sync()?;
            std::thread::yield_now();
        }
        Err(Error::posix(Errno::BUSY, format!("the block group at {}", group.start)))
    }

    /// Moves the last group of the member, or a part of it, into holes before `end`. Returns
    /// whether anything moved.
    fn lower(&self, end: u64) -> Result<bool> {
        let volume = self.relocator.volume;
        let Some(group) = last_behind(volume, self.index, 0)? else { return Ok(false) };
        let purpose = volume.live()?.space.purpose_of(&group);
        // Room for the copies of the superblock, which a chunk leaves out.
        let (whole, more) = match purpose {
            Purpose::Data => {
                let used = group.used_bytes().next_multiple_of(STRIPE_LEN) + STRIPE_LEN;
                // Extents may not fill it to the end. What is too much is cut off again.
                (used, (used / 4).next_multiple_of(STRIPE_LEN) + MOST_EXTENT)
            }
            Purpose::Metadata | Purpose::System => (group.len + STRIPE_LEN, 0),
        };
        let most = self.most_in_holes(&group, end)?;
        if most >= whole
            && let Some(new) = self.allocate(purpose, most.min(whole + more), end)?
        {
            let moved = self.relocator.relocate(&group);
            return self.settle(purpose, &new, moved);
        }
        if purpose == Purpose::Data { self.lower_part(&group, most, end) } else { Ok(false) }
    }

    /// The most bytes of a chunk like that of `group` in holes before `end`.
    fn most_in_holes(&self, group: &BlockGroup, end: u64) -> Result<u64> {
        let volume = self.relocator.volume;
        let copies = volume.storage.chunk_at(group.start)?.stripes.len();
        let _handle = volume.enter()?;
        let _chunks = volume.live()?.space.chunk_lock.lock();
        let sizes = volume.with_member_spaces(|all| {
            all.get(self.index).map(|member| member.hole_sizes(end)).unwrap_or_default()
        })?;
        let most = match (copies, &sizes[..]) {
            (1, [first, ..]) => *first,
            (_, [first, second, ..]) => (first / 2).max(*second),
            (_, [first]) => first / 2,
            (_, []) => 0,
        };
        Ok(most / STRIPE_LEN * STRIPE_LEN)
    }

    /// Moves the end of a group of data into holes before `end`, into a chunk of `most` bytes.
    fn lower_part(&self, group: &Arc<BlockGroup>, most: u64, end: u64) -> Result<bool> {
        let volume = self.relocator.volume;
        let extents = extents_in(&volume.base, &(group.start.0..group.end()))?;
        let (mut bytes, mut from) = (0u64, None);
        for extent in extents.iter().rev() {
            let more = bytes + (extent.end - extent.start);
            if more + STRIPE_LEN > most {
                break;
            }
            (bytes, from) = (more, Some(extent.start));
        }
        let Some(from) = from.filter(|_| bytes >= LEAST_HOLE) else { return Ok(false) };
        let Some(new) = self.allocate(Purpose::Data, most, end)? else { return Ok(false) };
        let moved = self.squeeze(group, from - group.start.0);
        self.settle(Purpose::Data, &new, moved)
    }

    /// Allocates a chunk of `bytes` bytes in the lowest holes before `end`, and returns its group.
    fn allocate(&self, purpose: Purpose, bytes: u64, end: u64) -> Result<Option<Arc<BlockGroup>>> {
        let (volume, space) = (self.relocator.volume, &self.relocator.volume.live()?.space);
        let handle = volume.join_for(space.chunk_items(), Claim::LastResort)?;
        let _chunks = space.chunk_lock.lock();
        if !handle.has_system_space()? {
            return Ok(None);
        }
        let start = handle.allocate_tight_chunk(purpose, self.index, bytes, end)?;
        start.map(|start| space.group_of(start)).transpose()
    }

    /// Cuts off what the new group `new` has too much, or removes it if nothing moved there.
    fn settle(&self, purpose: Purpose, new: &Arc<BlockGroup>, moved: Result<()>) -> Result<bool> {
        let is_moved = moved.is_ok();
        self.tolerate(moved)?;
        if purpose == Purpose::Data {
            self.squeeze_data(new)?;
        } else if new.used_bytes() == 0 {
            self.tolerate(self.relocator.relocate(new))?;
        }
        Ok(is_moved)
    }
}

/// Copies what is used of a stripe of `group`, which begins at `from`, to `to` on the same member.
fn copy_stripe(volume: &Rooms, index: usize, group: &BlockGroup, from: u64, to: u64) -> Result<()> {
    let range = group.start.0..group.end();
    let used = joined(extents_in(&volume.base, &range)?);
    let mut buf = vec![0; COPY_BYTES];
    for extent in used {
        let mut at = extent.start - range.start;
        let end = extent.end - range.start;
        while at < end {
            let len = (end - at).min(COPY_BYTES as u64);
            let part =
                buf.get_mut(..usize::try_from(len).unwrap_or(COPY_BYTES)).unwrap_or_default();
            volume.storage.read_medium(index, Physical(from + at), part)?;
            if !volume.write_copy(index, to + at, &[IoSlice::new(part)])? {
                return Err(Error::io("moving a copy", Errno::IO));
            }
            at += len;
        }
    }
    Ok(())
}
