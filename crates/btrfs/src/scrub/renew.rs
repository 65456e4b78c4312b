//! Brings members up to date that missed commits.
//!
//! The contents of such a member may be old, and only its superblock shows it. So a scrub
//! overwrites everything on it that differs, and its superblock last:
//!
//! 1. Data without checksums is compared with the other members, because nothing else shows that it
//!    is old. This comes first, followed by a barrier. Otherwise blocks of the last commit could
//!    reach the member first, and a member that is one generation behind but has these is taken for
//!    complete (`transaction/newest`).
//! 2. The scrub verifies all else, and repairs it ([`settle`](super::settle)).
//! 3. If no error remains, the member gets the superblock of the last commit.
//!
//! If a scrub ends earlier, the member still counts as one that missed commits, and the next scrub
//! repairs the differences that remain.
//!
//! This needs a volume that no other program uses, because the member would miss what others write
//! meanwhile. It leaves out members with chunks that have parity, because those are not repaired.
//! While a tree log is pending it leaves out all members, because a scrub sees only extents in the
//! extent tree, and data that only the log refers to is not there.

use std::io::IoSlice;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::{Chunk, DevItem};
use offshoot_btrfs_format::encode::sealed_superblock;
use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_btrfs_format::{Generation, ItemType, Key, Logical, Physical};
use offshoot_vfs::{Error, Result, Structure};

use super::gather::{CommittedTrees, ScrubContent};
use super::look::{ScrubBuffer, cut};
use super::{ScrubFinding, ScrubOutcome, ScrubRun};
use crate::inode::Rooms;
use crate::storage::{CopyPart, MemberOffset, malformed};
use crate::transaction::chunk_tree_root;
use crate::tree::with_item;

/// The members that missed commits, and whether the scrub brings them up to date.
pub(super) struct Renewal {
    /// The indexes of the members that are brought up to date.
    pub(super) members: Vec<usize>,
    /// The other members that missed commits, each with the reason why it stays behind.
    left: Vec<(usize, &'static str)>,
}

impl Renewal {
    /// Finds the members of the volume that missed commits.
    pub(super) fn of(volume: &Rooms, is_read_only: bool) -> Self {
        let (mut members, mut left) = (Vec::new(), Vec::new());
        let is_live = volume.live_part().is_some();
        for (index, member) in volume.members().iter().enumerate() {
            // On a volume that is open for writing, a member that has not failed gets every write,
            // and its superblock with the next commit.
            let is_behind = if is_live { member.has_failed() } else { member.is_stale() };
            if !is_behind || member.device.is_none() || member.is_seed {
                continue;
            }
            let is_on = |chunk: &Chunk| chunk.stripes.iter().any(|s| s.device_uuid == member.uuid);
            let has_parity = |chunk: Chunk| chunk.profile.shape().parity > 0 && is_on(&chunk);
            if is_live {
                left.push((index, "it is brought up to date when nothing else uses the volume"));
            } else if is_read_only {
                left.push((index, "nothing is to be written"));
            } else if volume.superblock().has_pending_log() {
                left.push((index, "a tree log is pending; open the volume for writing once"));
            } else if volume.chunks().any(has_parity) {
                left.push((index, "it has stripes with parity"));
            } else {
                members.push(index);
            }
        }
        Self { members, left }
    }

    /// Overwrites data without checksums that differs from the other members.
    ///
    /// # Errors
    /// The error of a device that fails to flush.
    pub(super) fn plain_data(&self, run: &ScrubRun<'_>, chunks: &[Arc<Chunk>]) -> Result<()> {
        if self.members.is_empty() {
            return Ok(());
        }
        let mut pages = ScrubBuffer::default();
        for chunk in chunks.iter().filter(|chunk| chunk.flags.has_data()) {
            if let Err(error) = self.plain_data_of(run, chunk, &mut pages) {
                run.skip(chunk, error);
            }
        }
        run.volume.storage.flush_members()
    }

    fn plain_data_of(
        &self,
        run: &ScrubRun<'_>,
        chunk: &Chunk,
        pages: &mut ScrubBuffer,
    ) -> Result<()> {
        let volume = run.volume;
        let end = chunk.start.0 + volume.storage.reachable_bytes(chunk);
        let committed = CommittedTrees::of(volume)?;
        let mut from = chunk.start.0;
        while from < end && !run.is_over() {
            let Some(window) = committed.next_window(chunk, from, end)? else { break };
            from = window.range.end;
            let plain = window.pieces.iter().filter(|piece| piece.content == ScrubContent::Plain);
            for piece in plain {
                let parts = volume.storage.copies_of(&piece.range)?;
                let own = parts.iter().filter(|part| self.members.contains(&part.member));
                own.flat_map(cut).for_each(|part| renew_part(run, &part, pages));
            }
        }
        Ok(())
    }

    /// Gives the members the superblock of the last commit if no error remains, and reports members
    /// that stay behind.
    ///
    /// # Errors
    /// When the chunk tree cannot be read, or a device fails to flush.
    pub(super) fn finish(&self, run: &ScrubRun<'_>) -> Result<()> {
        let is_clean = run.counts.lock().left_errors == 0 && run.failure.lock().is_none();
        for &(index, why) in &self.left {
            Self::tell(run, index, SUPERBLOCK_OFFSETS[0], ScrubOutcome::NotWritten, why);
        }
        for &index in self.members.iter().filter(|_| !run.is_over()) {
            if is_clean {
                Self::renew_superblocks(run, index)?;
            } else {
                let why = "not all that it missed could be repaired";
                Self::tell(run, index, SUPERBLOCK_OFFSETS[0], ScrubOutcome::NotWritten, why);
            }
        }
        Ok(())
    }

    fn renew_superblocks(run: &ScrubRun<'_>, index: usize) -> Result<()> {
        let (volume, member) = (run.volume, &run.volume.members()[index]);
        // The device item in the member's own superblock is from before it missed commits, so this
        // takes the one in the chunk tree.
        let key = Key::new(objectid::DEV_ITEMS, ItemType::DEV_ITEM, member.id.0);
        let dev_item = with_item(volume, chunk_tree_root(volume), key, |data| {
            DevItem::view(data).copied().map_err(malformed)
        })?;
        let missing =
            || Error::corrupt(Structure::ChunkTree, format!("it has no device {}", member.id));
        let mut item = volume.superblock().item.clone();
        item.dev_item = dev_item.ok_or_else(missing)?;
        let mut pages = ScrubBuffer::default();
        for offset in SUPERBLOCK_OFFSETS {
            if offset + SUPERBLOCK_SIZE as u64 > member.total_bytes() {
                continue;
            }
            let bytes = sealed_superblock(&item, Physical(offset), volume.superblock().checksum);
            let part = MemberOffset { member: index, physical: Physical(offset) };
            let outcome = write(run, part, &bytes[..], &mut pages);
            // Write the copies only after the primary is durable.
            volume.storage.flush_members()?;
            Self::tell(run, index, offset, outcome, "now it is brought up to date");
            if outcome != ScrubOutcome::Corrected {
                break;
            }
        }
        Ok(())
    }

    fn tell(run: &ScrubRun<'_>, index: usize, offset: u64, outcome: ScrubOutcome, why: &str) {
        let member = &run.volume.members()[index];
        let newest = match run.volume.live_part() {
            Some(live) => Generation(live.last_superblock().generation.get()),
            None => run.volume.superblock().generation,
        };
        run.count_superblock(outcome);
        run.found(&ScrubFinding {
            structure: "superblock",
            logical: None,
            len_bytes: SUPERBLOCK_SIZE as u64,
            device: member.name(),
            physical: Physical(offset),
            problem: format!("the device missed commits, the volume is at {newest}; {why}"),
            outcome,
            owners: Vec::new(),
        });
    }
}

/// Overwrites a part of a copy of data if the other members have other contents there.
fn renew_part(run: &ScrubRun<'_>, part: &CopyPart, pages: &mut ScrubBuffer) {
    let volume = run.volume;
    let len = usize::try_from(part.range.end - part.range.start).expect("no more than is read");
    let mut good = vec![0; len];
    let sectors = (len as u64).div_ceil(u64::from(volume.superblock().sector_size));
    let read = volume.read_data(Logical(part.range.start), &mut good, None);
    let (problem, outcome) = if let Err(error) = read {
        (error.to_string(), ScrubOutcome::Uncorrectable)
    } else {
        let own = pages.of(len);
        let is_same = volume.storage.read_medium(part.member, part.physical, own).is_ok();
        if is_same && *own == *good {
            return;
        }
        let place = MemberOffset { member: part.member, physical: part.physical };
        let problem = "it is not what the other devices have".to_owned();
        (problem, write(run, place, &good, pages))
    };
    run.count_outcome(outcome, sectors);
    run.found(&ScrubFinding {
        structure: "data",
        logical: Some(Logical(part.range.start)),
        len_bytes: len as u64,
        device: volume.members()[part.member].name(),
        physical: part.physical,
        problem,
        outcome,
        owners: Vec::new(),
    });
}

/// Writes the good contents to a place, and reads them back.
fn write(
    run: &ScrubRun<'_>,
    part: MemberOffset,
    good: &[u8],
    pages: &mut ScrubBuffer,
) -> ScrubOutcome {
    let MemberOffset { member, physical } = part;
    let written = run.volume.storage.write_member(member, physical.0, &[IoSlice::new(good)]);
    let buf = pages.of(good.len());
    let is_there =
        written.and_then(|()| run.volume.storage.read_medium(member, physical, buf)).is_ok();
    super::settle::after(is_there && *buf == *good)
}
