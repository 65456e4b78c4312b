//! The arithmetic of the ring.

use super::{bad_record, record::MAGIC};
use crate::{Lsn, Malformed, XfsGeometry};

/// The blocks before the head that may have been written in any order: 8 log buffers of 256 KiB.
pub const IN_FLIGHT: u32 = 4096;

/// The ring of basic blocks that holds the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsLogRing {
    blocks: u32,
}

impl XfsLogRing {
    /// The head of a ring that is zeroed, where its first record goes. No other ring has it.
    pub const NEVER_WRITTEN: Lsn = Lsn(1 << 32);

    /// The ring of a volume.
    ///
    /// # Errors
    /// When the log has no blocks, or more than any kernel makes.
    pub fn of(geometry: &XfsGeometry) -> Result<Self, Malformed> {
        let blocks = u64::from(geometry.log_blocks) << geometry.block_log >> 9;
        u32::try_from(blocks)
            .ok()
            .and_then(Self::new)
            .ok_or_else(|| bad_record(format!("a log of {} blocks", geometry.log_blocks)))
    }

    /// The ring of `blocks` basic blocks; `None` for none, or from 2^31 on.
    #[must_use]
    pub fn new(blocks: u32) -> Option<Self> {
        (blocks > 0 && i32::try_from(blocks).is_ok()).then_some(Self { blocks })
    }

    /// The basic blocks of the ring.
    #[must_use]
    pub fn blocks(self) -> u32 {
        self.blocks
    }

    /// Whether `lsn` is a place in the ring. No record has cycle 0.
    #[must_use]
    pub fn has(self, lsn: Lsn) -> bool {
        lsn.cycle() > 0 && lsn.block() < self.blocks
    }

    /// The place `count` blocks behind `lsn`.
    #[must_use]
    pub fn advance(self, lsn: Lsn, count: u32) -> Lsn {
        let at = u64::from(lsn.block()) + u64::from(count);
        let (rounds, block) = (at / u64::from(self.blocks), at % u64::from(self.blocks));
        // The sum is below 2^33 and a ring has at least one block, so both fit but for hostile
        // numbers.
        let rounds = u32::try_from(rounds).unwrap_or(u32::MAX);
        let block = u32::try_from(block).unwrap_or(0);
        let cycle = lsn.cycle();
        let skips = cycle < MAGIC && cycle.saturating_add(rounds) >= MAGIC;
        Lsn::new(cycle.saturating_add(rounds).saturating_add(u32::from(skips)), block)
    }

    /// How many blocks lie between `from` and the later place `to`: at most the whole ring, when
    /// `to` has come around to `from`. `None` when `to` is before `from`, or a round further.
    #[must_use]
    pub fn distance(self, from: Lsn, to: Lsn) -> Option<u32> {
        if !self.has(from) || !self.has(to) {
            return None;
        }
        let (older, newer) = (from.cycle(), to.cycle());
        if older == newer {
            return to.block().checked_sub(from.block());
        }
        let is_next = next_cycle(older) == newer;
        from.block().checked_sub(to.block()).filter(|_| is_next).map(|back| self.blocks - back)
    }

    /// The blocks that can be written at `head` before they reach `tail`.
    #[must_use]
    pub fn free(self, tail: Lsn, head: Lsn) -> Option<u32> {
        self.distance(tail, head).map(|used| self.blocks - used)
    }

    /// The place `count` blocks before `lsn`; `None` before the start of cycle 1.
    #[must_use]
    pub fn retreat(self, lsn: Lsn, count: u32) -> Option<Lsn> {
        if let Some(block) = lsn.block().checked_sub(count) {
            return Some(Lsn::new(lsn.cycle(), block));
        }
        let block = lsn.block().checked_add(self.blocks)?.checked_sub(count)?;
        let cycle = previous_cycle(lsn.cycle())?;
        (cycle > 0).then_some(Lsn::new(cycle, block))
    }

    /// Finds the head by the cycles of blocks alone: the first block that a crash may have kept
    /// from being written. `cycle_at` reads the cycle of a block
    /// ([`record::cycle_of`](super::record::cycle_of)).
    ///
    /// Blocks before the head have its cycle, those from it on the one before: a binary search
    /// finds the change. Up to [`IN_FLIGHT`] blocks before it may have been written in any order,
    /// so the first of them that still has the older cycle is the head. For example, in a ring of
    /// 8 blocks with cycles `3 3 2 3 2 2 2 2` the change is at 4 and the head at 2. A ring whose
    /// first block has cycle 0 has the head [`NEVER_WRITTEN`](Self::NEVER_WRITTEN).
    ///
    /// # Errors
    /// Those of `cycle_at`, and a [`Malformed`] when the cycles are not those of a log.
    pub fn find_head<E: From<Malformed>>(
        self,
        mut cycle_at: impl FnMut(u32) -> Result<u32, E>,
    ) -> Result<Lsn, E> {
        let (first, last) = (cycle_at(0)?, cycle_at(self.blocks - 1)?);
        if first == 0 {
            return Ok(Self::NEVER_WRITTEN);
        }
        // The last write of a round may be missing while the first one of the next is there.
        let skipped = next_cycle(next_cycle(last));
        if first != last && first != next_cycle(last) && first != skipped {
            return Err(bad_record(format!(
                "cycle {first} in the first block of the log, and {last} in the last one"
            ))
            .into());
        }
        let (mut low, mut high) = (0, self.blocks);
        if first != last {
            // `low` does not have the last cycle, `high` does.
            high -= 1;
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if cycle_at(middle)? == last { high = middle } else { low = middle }
            }
        }
        let change = high;
        let newer = if first == skipped && first != last { next_cycle(last) } else { first };
        let window = self.blocks.min(IN_FLIGHT);
        let older = previous_cycle(newer);
        // What the window has before the start of the ring is of the round before.
        let wrapped = window.saturating_sub(change);
        if let (Some(older), Some(hole)) = (older, older.and_then(previous_cycle)) {
            for block in (self.blocks - wrapped).max(change)..self.blocks {
                if cycle_at(block)? == hole {
                    return Ok(Lsn::new(older, block));
                }
            }
        }
        for block in change.saturating_sub(window)..change {
            if Some(cycle_at(block)?) == older {
                return Ok(Lsn::new(newer, block));
            }
        }
        Ok(if change == self.blocks {
            Lsn::new(next_cycle(newer), 0)
        } else {
            Lsn::new(newer, change)
        })
    }
}

/// The cycle behind `cycle`. One that equals the word of a header is skipped.
fn next_cycle(cycle: u32) -> u32 {
    let next = cycle.saturating_add(1);
    if next == MAGIC { next + 1 } else { next }
}

/// The cycle before `cycle`.
pub(super) fn previous_cycle(cycle: u32) -> Option<u32> {
    let previous = cycle.checked_sub(1)?;
    Some(if previous == MAGIC { previous - 1 } else { previous })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(cycles: &[u32]) -> Result<(u32, u32), Malformed> {
        let ring =
            XfsLogRing::new(u32::try_from(cycles.len()).expect("few")).expect("it has blocks");
        let head = ring.find_head(|block| Ok::<_, Malformed>(cycles[block as usize]))?;
        Ok((head.cycle(), head.block()))
    }

    #[test]
    fn the_head_is_where_the_older_cycle_begins() {
        assert_eq!(head(&[1, 1, 0, 0, 0, 0]), Ok((1, 2)));
        assert_eq!(head(&[1, 1, 1, 1]), Ok((2, 0)));
        assert_eq!(head(&[3, 2, 2, 2]), Ok((3, 1)));
        assert_eq!(head(&[3, 3, 2, 3, 2, 2, 2, 2]), Ok((3, 2)), "a hole in front");
        assert_eq!(head(&[4, 4, 3, 3, 3, 2, 3, 3]), Ok((3, 5)), "a hole before the wrap");
        assert_eq!(head(&[4, 3, 3, 3, 3, 3, 2, 2]), Ok((3, 6)), "the end is missing");
        assert_eq!(head(&[3, 3, 3, 3, 2, 3]), Ok((3, 4)), "a hole in a full round");
        assert_eq!(head(&[3, 3, 4, 3, 3, 3]), Ok((4, 0)), "a write behind a missing one");
        assert_eq!(head(&[0, 0, 0]), Ok((1, 0)));
        assert!(head(&[1, 1, 5]).is_err());
        assert_eq!(head(&[MAGIC + 1, MAGIC - 1, MAGIC - 1]), Ok((MAGIC + 1, 1)));
    }

    #[test]
    fn distances_advance_and_retreat_agree() {
        let ring = XfsLogRing::new(7).expect("it has blocks");
        for start in [Lsn::new(1, 0), Lsn::new(5, 6), Lsn::new(MAGIC - 1, 3)] {
            for count in 0..=7 {
                let end = ring.advance(start, count);
                assert_eq!(ring.distance(start, end), Some(count));
                assert_eq!(ring.free(start, end), Some(7 - count));
                assert_eq!(ring.retreat(end, count), Some(start));
            }
        }
        assert_eq!(ring.distance(Lsn::new(1, 0), Lsn::new(2, 1)), None);
        assert_eq!(ring.distance(Lsn::new(2, 0), Lsn::new(1, 6)), None);
        assert_eq!(ring.retreat(Lsn::new(1, 2), 3), None);
    }
}
