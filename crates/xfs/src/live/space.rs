//! Free space, the label, and discards.
//!
//! No transaction takes free extents while they are discarded: a few at a time, and without the
//! lock of their group. What was freed and is not durable is left out: a crash would bring it back.

use std::io::ErrorKind;
use std::iter;
use std::ops::Range;

use offshoot_kit::counter::Counter;
use offshoot_vfs::{Code, Errno, Error, Result, Trimmed};
use offshoot_xfs_format::superblock::{CRC, XfsSuperblock, XfsSuperblockFields};
use offshoot_xfs_format::{AgBlock, AgNumber, csum};

use super::XfsLive;
use crate::buffer::{malformed, sector_at};
use crate::group;
use crate::trans::{AgExtent, XfsTransactionKind as Kind};

/// The free extents of a group that are discarded at once, and their bytes. Others wait for them
/// where no other space is left.
const MOST_AT_ONCE: usize = 64;
const MOST_BYTES_AT_ONCE: u64 = 32 << 20;

impl XfsLive {
    /// The free blocks that files may have.
    pub(crate) fn free_blocks(&self) -> u64 {
        self.transactions.counters().free_for_files()
    }

    /// What the log, transactions, their commits, and the buffers of files did.
    pub(crate) fn counters(&self) -> Vec<Counter> {
        let log = self.transactions.log().statistics().list();
        let work = self.transactions.block_work().list();
        let commits = self.transactions.statistics().list();
        [log, work, commits, self.buffered.statistics().list()].concat()
    }

    /// What is durable: another text after each change that was made durable.
    pub(crate) fn durable_state(&self) -> String {
        let context = self.transactions.log().durable().0;
        format!("context {context}, flush {}", self.buffered.flushed())
    }

    /// The label.
    pub(crate) fn label(&self) -> Vec<u8> {
        let label = *self.label.lock();
        label.split(|byte| *byte == 0).next().unwrap_or_default().to_vec()
    }

    /// Sets the label, in the copies of the superblock too. The copies are not in the log.
    pub(crate) fn set_label(&self, label: &[u8]) -> Result<()> {
        let _call = self.enter()?;
        let mut proof = *self.transactions.superblock();
        if !proof.set_label(label) {
            let what = format!("the label `{}` of XFS", label.escape_ascii());
            return Err(Error::posix(Errno::INVAL, what));
        }
        let mut label = self.label.lock();
        self.transactions.change_superblock(|fields| fields.fname = proof.fname)?;
        *label = proof.fname;
        let groups = 1..self.transactions.geometry().ag_count;
        groups.map(AgNumber).try_for_each(|ag| self.set_label_of_copy(ag, &proof))?;
        // No later record flushes them: the log may be written home already.
        self.transactions.note_in_place();
        self.data().flush_places()
    }

    fn set_label_of_copy(&self, ag: AgNumber, labelled: &XfsSuperblockFields) -> Result<()> {
        let (buffers, geometry) = (self.buffers(), self.transactions.geometry());
        let place = geometry.place(ag, AgBlock(0));
        let mut sector = sector_at(&**buffers.device(), place.bytes())?;
        sector.truncate(geometry.sector_size());
        XfsSuperblock::parse(&sector).map_err(malformed)?;
        let at = std::mem::offset_of!(XfsSuperblockFields, fname);
        if let Some(field) = sector.get_mut(at..at + labelled.fname.len()) {
            field.copy_from_slice(&labelled.fname);
        }
        csum::store(&mut sector, CRC);
        buffers.write(place, &sector)
    }

    /// Discards the free blocks in a range of the device.
    pub(crate) fn trim(&self, within: &Range<u64>) -> Result<Trimmed> {
        let _call = self.enter()?;
        let mut trimmed = Trimmed::default();
        for ag in (0..self.transactions.geometry().ag_count).map(AgNumber) {
            let mut from = 0;
            while let Some(next) = self.trim_some(ag, from, within, &mut trimmed)? {
                from = next;
            }
        }
        if trimmed.bytes == 0 && !trimmed.unable.is_empty() {
            let names: Vec<_> = trimmed.unable.into_iter().collect();
            let what = format!("discarding on {}", names.join(", "));
            return Err(Error::unsupported(Code::Discard, what));
        }
        Ok(trimmed)
    }

    /// Discards free extents of a group from block `from` on. Returns where to go on; `None` when
    /// there are no more.
    fn trim_some(
        &self,
        ag: AgNumber,
        from: u32,
        within: &Range<u64>,
        trimmed: &mut Trimmed,
    ) -> Result<Option<u32>> {
        self.require_writing()?;
        let mut t = self.transactions.begin(Kind::ChangeTimes, 0)?;
        let blocks = self.blocks_within(ag, within);
        let from = from.max(blocks.start);
        let free = group::free_extents(&mut t, ag, from, MOST_AT_ONCE)?;
        let busy = t.busy(ag);
        let most = u32::try_from(MOST_BYTES_AT_ONCE / self.block_bytes()).unwrap_or(u32::MAX);
        let (mut pieces, mut left, mut next) = (Vec::new(), most.max(1), None);
        for extent in &free {
            let (mut at, end) = (extent.start.0.max(from), extent.end().min(blocks.end));
            let gaps = busy.in_extent(*extent).into_iter().map(|busy| busy.start.0..busy.end());
            for gap in gaps.chain(iter::once(end..end)) {
                let count = gap.start.min(end).saturating_sub(at).min(left);
                pieces.extend((count > 0).then(|| AgExtent::new(at, count)));
                (at, left) = (at + count, left - count);
                if left == 0 {
                    break;
                }
                at = at.max(gap.end);
            }
            next = Some(at).filter(|at| *at < blocks.end);
            if left == 0 {
                break;
            }
        }
        let is_all = left > 0 && free.len() < MOST_AT_ONCE;
        let kept = t.begin_discard(ag, pieces);
        // The device may be slow, and others want the group.
        drop(t);
        for extent in kept.extents() {
            self.discard(ag, *extent, trimmed)?;
        }
        Ok(next.filter(|_| !is_all))
    }

    /// The blocks of a group that lie in a range of the device as a whole.
    fn blocks_within(&self, ag: AgNumber, within: &Range<u64>) -> Range<u32> {
        let (geometry, block) = (self.transactions.geometry(), self.block_bytes());
        let first = geometry.place(ag, AgBlock(0)).bytes();
        let number = |blocks| u32::try_from(blocks).unwrap_or(u32::MAX);
        let start = number(within.start.saturating_sub(first).div_ceil(block));
        start..number(within.end.saturating_sub(first) / block).max(start)
    }

    fn discard(&self, ag: AgNumber, extent: AgExtent, trimmed: &mut Trimmed) -> Result<()> {
        let place = |block| self.transactions.geometry().place(ag, AgBlock(block)).bytes();
        let (start, end) = (place(extent.start.0), place(extent.end()));
        let device = self.buffers().device();
        match device.discard(start, end - start) {
            Ok(()) => trimmed.bytes += end - start,
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                trimmed.unable.insert(device.name().to_owned());
            }
            Err(error) => {
                let what = format!("{}: discarding at {start}", device.name());
                return Err(Error::io(what, error));
            }
        }
        Ok(())
    }
}
