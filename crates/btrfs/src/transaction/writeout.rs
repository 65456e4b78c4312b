//! Writing a finished transaction to the devices.
//!
//! All cores compute checksums and check every block once more, a few blocks ahead of the one
//! thread that writes. Blocks are written in physical order: each device from its beginning to its
//! end, whatever the logical addresses are. For example, the first copies of all blocks of a DUP
//! chunk come before the second copies. Neighbouring blocks go out in one request. Then follow a
//! barrier, the superblocks, a barrier, and the copies of the superblocks.
//!
//! All members are written at a time (`storage/lanes`), in rounds: a round has one request for each
//! member that still has some. A step takes as long as its slowest member, and begins when all
//! members have ended the step before.
//!
//! ```text
//!   member 0   blocks blocks | barrier | superblock | barrier | copies
//!   member 1   blocks        | barrier | superblock | barrier | copies
//! ```
//!
//! A power cut may tear a superblock, because it is several sectors. Its copies are written only
//! after the primary is on the medium, and the first barrier of the next commit covers them. So at
//! any time the primary or its copies are whole, with the last commit or the one before. A log is
//! written in the same way, with the superblock of the last commit, which then names the log. So if
//! writing the next primary tears it, for a log or for a commit, the copies lead to everything that
//! was acknowledged. A cut may lose copies that no barrier has covered yet, so opening for writing
//! begins with those that differ from their primary.
//!
//! When a write to one member fails and other members have the copy, the volume survives
//! (`storage/failing`): it leaves the member out, or the copy stays bad.

#[cfg(test)]
mod tests;

use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use offshoot_btrfs_format::check;
use offshoot_btrfs_format::encode::{seal_block, sealed_superblock};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, SuperblockItem};
use offshoot_btrfs_format::{Logical, Physical};
use offshoot_vfs::{Error, Result};
use smallvec::SmallVec;
use tracing::debug;

use super::Base;
use super::{LiveVolume, MemberSizes, Transaction};
use crate::block::{Latch, TreeBlock};
use crate::cores;
use crate::events::{COMMIT, DEVICE};
use crate::storage::{
    DeviceError, Member, MemberWrite, MemberWrites, RecordedFailures, WrittenCopy,
};
use crate::sync::{RwLock, mpsc, thread};
use crate::tree::TreeRoot;

/// The most bytes of one request.
const REQUEST_BYTES: usize = 1 << 20;

/// How many requests each thread seals ahead of the one that is written.
const PARTS_AHEAD: usize = 2;

/// Whether a member has a superblock at this offset.
fn is_inside(member: &Member, offset: u64) -> bool {
    offset + SUPERBLOCK_SIZE as u64 <= member.total_bytes()
}

/// A block that is to be written, with its address.
type AddressedBlock = (Logical, Arc<Latch>);

/// The part of a block that goes to one place of a member.
struct WritePiece {
    member: usize,
    /// The offset on the member, in bytes.
    physical: u64,
    /// The number of the block.
    block: usize,
    /// The range of its bytes.
    part: Range<usize>,
}

/// How blocks are written.
struct WritePlan {
    pieces: Vec<WritePiece>,
    /// The round of each request, and its range of `pieces`. By round, then by member.
    requests: Vec<(usize, Range<usize>)>,
}

/// A part of a sealed block.
struct BlockPart {
    block: Arc<TreeBlock>,
    part: Range<usize>,
}

impl AsRef<[u8]> for BlockPart {
    fn as_ref(&self) -> &[u8] {
        &self.block.bytes()[self.part.clone()]
    }
}

impl WritePiece {
    fn is_next_to(&self, behind: &Self) -> bool {
        let end = self.physical + self.part.len() as u64;
        (self.member, end) == (behind.member, behind.physical)
    }
}

impl Base {
    /// Writes a finished transaction, and the superblocks that lead to it. Returns false when a
    /// member has failed and the superblocks were not written: then the transaction is postponed.
    pub(super) fn write_out(
        &self,
        transaction: &Transaction,
        superblock: &SuperblockItem,
    ) -> Result<bool> {
        let sizes = transaction.sizes.get().map(Vec::as_slice);
        let blocks = transaction.dirty.all();
        debug!(
            target: COMMIT,
            generation = transaction.id.0,
            blocks = blocks.len(),
            bytes = blocks.len() as u64 * u64::from(self.superblock().node_size),
            "writing tree blocks",
        );
        self.write_state(&blocks, superblock, sizes, RecordedFailures::WhatIsNoted)
    }

    /// Writes the blocks of a log that were taken off, and the superblock of the last commit, which
    /// names the log now. The caller has a handle, and the commit before is on the devices. Returns
    /// whether a crash would find the log: not when a member has failed and no superblock leads to
    /// that.
    pub(crate) fn write_log(
        &self,
        live: &LiveVolume,
        blocks: &[AddressedBlock],
        root: &TreeRoot,
    ) -> Result<bool> {
        let mut superblock = Box::new(*live.last_superblock());
        superblock.log_root = root.logical.0.into();
        superblock.log_root_level = root.level;
        superblock.log_root_transid = 0.into();
        let last = live.phases.read().before.clone();
        let sizes = last.as_ref().and_then(|last| last.sizes.get()).map(Vec::as_slice);
        let is_written =
            self.write_state(blocks, &superblock, sizes, RecordedFailures::WhatIsShown)?;
        Ok(is_written && !self.storage.hides_failures())
    }

    /// Writes blocks, and then the superblock that names them. Returns false, without writing the
    /// superblock, when a member has failed and the superblock would not lead to that.
    fn write_state(
        &self,
        blocks: &[AddressedBlock],
        superblock: &SuperblockItem,
        sizes: Option<&[MemberSizes]>,
        tells: RecordedFailures,
    ) -> Result<bool> {
        self.write_blocks(blocks)?;
        let [primary, copies @ ..] = SUPERBLOCK_OFFSETS;
        self.storage.flush_members()?;
        let Some(failed) = self.storage.begin_superblocks(tells) else { return Ok(false) };
        debug!(target: DEVICE, generation = superblock.generation.get(), "writing superblocks");
        self.write_superblocks(superblock, sizes, &[primary], |_| true)?;
        self.storage.flush_members()?;
        self.storage.end_superblocks(failed);
        self.write_superblocks(superblock, sizes, &copies, |_| true)?;
        Ok(true)
    }

    /// Writes the superblock, as it was when the volume was opened, to the copies on members whose
    /// primary says the same, unless the copies do too. A power cut may have come before the last
    /// copies were on the medium, and the kernel names a log in the primary ones alone. The next
    /// commit may overwrite what only an old copy leads to, and if it tears a primary, the copies
    /// must lead to everything. A member that is a commit behind catches up with the next one.
    pub(crate) fn refresh_superblock_copies(&self) -> Result<()> {
        let [primary, copies @ ..] = SUPERBLOCK_OFFSETS;
        let superblock = &self.superblock().item;
        let is_stale = |member: &Member| {
            self.has_superblock(member, superblock, primary)
                && !copies.iter().all(|&copy| self.has_superblock(member, superblock, copy))
        };
        if self.members().iter().any(is_stale) {
            self.write_superblocks(superblock, None, &copies, is_stale)?;
            self.storage.flush_members()?;
        }
        Ok(())
    }

    /// Whether a member has this superblock at an offset that it reaches to. One that is not there,
    /// or has failed, lacks none.
    fn has_superblock(&self, member: &Member, superblock: &SuperblockItem, offset: u64) -> bool {
        let device = member.device.as_ref().filter(|_| !member.has_failed());
        let Some(device) = device.filter(|_| is_inside(member, offset)) else { return true };
        let item = SuperblockItem { dev_item: member.item, ..*superblock };
        let wanted = sealed_superblock(&item, Physical(offset), self.superblock().checksum);
        let mut found = [0; SUPERBLOCK_SIZE];
        device.read_at(offset, &mut found).is_ok() && found == *wanted
    }

    /// Seals blocks and writes them to all their places, in physical order. The requests are the
    /// same however many threads seal.
    pub(super) fn write_blocks(&self, blocks: &[AddressedBlock]) -> Result<()> {
        let most = (REQUEST_BYTES / self.superblock().node_size as usize).max(1);
        let (plan, order) = self.plan(blocks, most)?;
        let parts: Vec<_> = order.chunks(most).collect();
        let threads = cores::count().min(parts.len());
        if parts.len() < 2 {
            let mut parts = parts.into_iter();
            let next = || parts.next().map_or(Ok(Vec::new()), |part| self.seal(part));
            return self.write_pieces(&plan, next);
        }
        let parts = &parts;
        thread::scope(|scope| {
            let sealers: Vec<_> = (0..threads)
                .map(|first| {
                    let (sender, sealed) = mpsc::sync_channel(PARTS_AHEAD);
                    scope.spawn(move || {
                        cores::use_all();
                        let mut own = parts.iter().skip(first).step_by(threads);
                        // The receiver is gone when a write failed.
                        while own.next().is_some_and(|part| sender.send(self.seal(part)).is_ok()) {}
                    });
                    sealed
                })
                .collect();
            let mut turns = sealers.iter().cycle();
            self.write_pieces(&plan, move || {
                let sealed = turns.next().expect("there is one at least").recv();
                sealed.expect("who seals ends when nobody listens")
            })
        })
    }

    /// Plans the writing of blocks. Joins neighbours into requests of at most `most` pieces. Also
    /// returns the blocks in the order in which they first occur in the requests.
    fn plan<'b>(
        &self,
        blocks: &'b [AddressedBlock],
        most: usize,
    ) -> Result<(WritePlan, Vec<&'b AddressedBlock>)> {
        let node_size = u64::from(self.superblock().node_size);
        let mut pieces = Vec::with_capacity(2 * blocks.len());
        for (block, (logical, _)) in blocks.iter().enumerate() {
            for (member, physical, part) in self.storage.write_places(*logical, node_size)? {
                let [from, to] =
                    [part.start, part.end].map(|at| usize::try_from(at).expect("in a block"));
                pieces.push(WritePiece { member, physical: physical.0, block, part: from..to });
            }
        }
        pieces.sort_unstable_by_key(|piece| (piece.member, piece.physical));
        let mut requests = Vec::new();
        let (mut begin, mut round, mut last) = (0, 0, None);
        for request in pieces.chunk_by(WritePiece::is_next_to).flat_map(|run| run.chunks(most)) {
            let member = request[0].member;
            round = if last.replace(member) == Some(member) { round + 1 } else { 0 };
            requests.push((round, begin..begin + request.len()));
            begin += request.len();
        }
        // Stable: in a round the members stay in order.
        requests.sort_by_key(|(round, _)| *round);
        let (mut order, mut ranks) = (Vec::with_capacity(blocks.len()), vec![None; blocks.len()]);
        for piece in requests.iter().flat_map(|(_, request)| request.clone()) {
            let block = pieces[piece].block;
            pieces[piece].block = *ranks[block].get_or_insert_with(|| {
                order.push(&blocks[block]);
                order.len() - 1
            });
        }
        Ok((WritePlan { pieces, requests }, order))
    }

    /// Writes the requests of a plan. `seal` returns the next sealed blocks. They stay in memory
    /// until the end, because another copy of each may come much later. This takes no extra memory:
    /// they belong to the transaction.
    fn write_pieces(
        &self,
        plan: &WritePlan,
        mut seal: impl FnMut() -> Result<Vec<Arc<TreeBlock>>>,
    ) -> Result<()> {
        let pieces = &plan.pieces[..];
        let mut sealed = Vec::new();
        // The requests that were not written, and the first error.
        let (mut unwritten, mut cause) = (Vec::new(), None);
        for round in plan.requests.chunk_by(|(one, _), (next, _)| one == next) {
            let all = round.iter().flat_map(|(_, request)| &pieces[request.clone()]);
            let last = all.map(|piece| piece.block).max().expect("no request is empty");
            while sealed.len() <= last {
                sealed.append(&mut seal()?);
            }
            let mut take = |request: &Range<usize>, written| {
                match written {
                    Ok(true) => return,
                    Ok(false) => {}
                    Err(error) => drop(cause.get_or_insert(error)),
                }
                unwritten.push(request.clone());
            };
            let is_left_out =
                |range: &Range<usize>| self.members()[pieces[range.start].member].has_failed();
            let (left_out, round): (SmallVec<[_; 1]>, SmallVec<[_; 1]>) =
                round.iter().map(|(_, range)| range).partition(|range| is_left_out(range));
            left_out.into_iter().for_each(|range| take(range, Ok(false)));
            if let [range] = round[..] {
                let request = &pieces[range.clone()];
                let slice = |piece: &WritePiece| &sealed[piece.block].bytes()[piece.part.clone()];
                let bufs: Vec<_> = request.iter().map(|piece| IoSlice::new(slice(piece))).collect();
                take(range, self.write_copy(request[0].member, request[0].physical, &bufs));
                continue;
            }
            let share = |range: &&Range<usize>| {
                let request = &pieces[(*range).clone()];
                let bytes = request.iter().map(|piece| BlockPart {
                    block: sealed[piece.block].clone(),
                    part: piece.part.clone(),
                });
                let write = MemberWrite { offset: request[0].physical, bytes: bytes.collect() };
                self.storage.writes_to(request[0].member, [write])
            };
            let shares = round.iter().map(share).collect::<Result<Vec<_>>>()?;
            self.write_copies(&shares, |share, _, written| take(round[share], written));
        }
        if unwritten.is_empty() {
            return Ok(());
        }
        let part =
            |piece: &WritePiece| (piece.block, piece.part.start as u64..piece.part.end as u64);
        let copy = |piece: &WritePiece| WrittenCopy {
            member: piece.member,
            part: part(piece),
            is_written: true,
        };
        let mut copies: Vec<_> = pieces.iter().map(copy).collect();
        for index in unwritten.into_iter().flatten() {
            copies[index].is_written = false;
            if !self.members()[pieces[index].member].has_failed() {
                self.require_other(&pieces[index], &sealed[pieces[index].block])?;
            }
        }
        self.storage.require_copies(&copies, cause)
    }

    /// Requires that the old bytes at the place of `piece`, which was not written, do not pass for
    /// the block that should be there.
    fn require_other(&self, piece: &WritePiece, block: &TreeBlock) -> Result<()> {
        let mut found = vec![0; piece.part.len()];
        if self.storage.read_medium(piece.member, Physical(piece.physical), &mut found).is_err() {
            return Ok(());
        }
        let (logical, generation) =
            (Logical(block.header().bytenr.get()), block.header().generation());
        let passes = found.len() == block.bytes().len()
            && check::verify(&found, self.storage.geometry(), logical).is_ok()
            && TreeBlock::verified(found.clone().into_boxed_slice()).header().generation()
                == generation;
        if passes && found[..] != block.bytes()[piece.part.clone()] {
            let name = self.members()[piece.member].name();
            let what =
                format!("{name}: writing at {}, where an older block passes", piece.physical);
            return Err(Error::io(what, offshoot_vfs::Errno::IO));
        }
        Ok(())
    }

    /// Computes the checksums of blocks, and checks the blocks once more.
    fn seal(&self, blocks: &[&AddressedBlock]) -> Result<Vec<Arc<TreeBlock>>> {
        blocks.iter().map(|(at, latch)| self.seal_one(*at, latch)).collect()
    }

    fn seal_one(&self, logical: Logical, latch: &RwLock<Arc<TreeBlock>>) -> Result<Arc<TreeBlock>> {
        let mut latch = latch.write();
        let bytes = Arc::make_mut(&mut latch).bytes_mut();
        seal_block(bytes, self.superblock().checksum);
        check::verify(bytes, self.storage.geometry(), logical).map_err(|e| {
            Error::corrupt_at(e.structure, logical.0, format!("about to be written: {}", e.problem))
        })?;
        Ok(latch.clone())
    }

    /// Writes a superblock to all members that `is_wanted` takes, at each of `offsets` that they
    /// reach to.
    fn write_superblocks(
        &self,
        superblock: &SuperblockItem,
        sizes: Option<&[MemberSizes]>,
        offsets: &[u64],
        is_wanted: impl Fn(&Member) -> bool,
    ) -> Result<()> {
        let mut shares = Vec::with_capacity(self.members().len());
        for (index, member) in self.members().iter().enumerate() {
            if member.device.is_none() || member.has_failed() || !is_wanted(member) {
                continue;
            }
            let mut item = Box::new(*superblock);
            item.dev_item = member.item;
            if let Some(sizes) = sizes.and_then(|sizes| sizes.get(index)) {
                item.dev_item.bytes_used = sizes.allocated.into();
                item.dev_item.total_bytes = sizes.total.into();
            }
            let inside = offsets.iter().copied().filter(|offset| is_inside(member, *offset));
            let writes = inside.map(|offset| {
                let bytes = sealed_superblock(&item, Physical(offset), self.superblock().checksum);
                MemberWrite { offset, bytes: vec![bytes as Box<[u8]>] }
            });
            shares.push(self.storage.writes_to(index, writes)?);
        }
        let mut result = Ok(());
        self.write_copies(&shares, |_, _, written| {
            if result.is_ok() {
                result = written.map(drop);
            }
        });
        result
    }

    /// Writes a copy to a member. Returns false when the member has failed, with this write or
    /// before, and the volume can do without it.
    ///
    /// # Errors
    /// The error of the device, when the volume needs the member.
    pub(crate) fn write_copy(
        &self,
        member: usize,
        offset: u64,
        bufs: &[IoSlice<'_>],
    ) -> Result<bool> {
        if self.members()[member].has_failed() {
            return Ok(false);
        }
        self.survive_write(member, self.storage.write_member(member, offset, bufs))
    }

    /// Writes copies to several members at a time. `take` gets the number of each share and of each
    /// write in it, and what [`write_copy`](Self::write_copy) returns for such a copy.
    pub(crate) fn write_copies<B: AsRef<[u8]> + Send + Sync + 'static>(
        &self,
        shares: &[MemberWrites<B>],
        mut take: impl FnMut(usize, usize, Result<bool>),
    ) {
        self.storage.write_members(shares, |share, write, written| {
            let member = shares[share].member();
            // What went to a member after it had failed does not count.
            let has_failed = self.members()[member].has_failed();
            let outcome = if has_failed { Ok(false) } else { self.survive_write(member, written) };
            take(share, write, outcome);
        });
    }

    fn survive_write(&self, member: usize, written: Result<()>) -> Result<bool> {
        match written {
            Ok(()) => Ok(true),
            Err(error) => {
                self.storage.survive_failure(member, DeviceError::Write, error).map(|()| false)
            }
        }
    }
}
