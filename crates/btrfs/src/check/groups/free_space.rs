//! The free-space tree against the space between extents, block group by block group.
//!
//! Both sides ascend, so they are compared as streams of ranges: what is free by the extents comes
//! from above ([`expect`](FreeSpaceCheck::expect)), what is listed as free is read from the tree as
//! far as that needs it. Bytes that are never allocated, because superblocks are there, may be
//! listed or not.

use std::ops::Range;

use offshoot_btrfs_format::space::{FREE_SPACE_USING_BITMAPS, FreeSpaceInfo};
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};

use super::super::finding::{BtrfsFindingCode, BtrfsFindingPlace, BtrfsFindings};
use super::stream::ItemStream;

/// Compares the free-space tree.
pub(super) struct FreeSpaceCheck<'v> {
    findings: &'v BtrfsFindings,
    stream: ItemStream<'v>,
    sector: u64,
    group: Range<u64>,
    /// The ranges of the group that are never allocated.
    left_out: Vec<Range<u64>>,
    info: Option<FreeSpaceInfo>,
    /// The bit of the current bitmap at which to go on.
    bit: u64,
    /// Where the next bitmap must begin.
    bitmap_start: u64,
    /// How many free ranges the items of the group have.
    ranges: u64,
    /// What is left of the current free range; empty at the end.
    current: Range<u64>,
    /// The free range behind the current one, and whether it is in a bitmap.
    ahead: Option<(Range<u64>, bool)>,
    /// The addresses of the group that may be listed as free in blocks that cannot be used.
    unknown: Range<u64>,
    is_whole: bool,
    /// The difference that was found last and may go on.
    open: Option<(BtrfsFindingCode, Range<u64>)>,
}

impl<'v> FreeSpaceCheck<'v> {
    pub(super) fn new(findings: &'v BtrfsFindings, stream: ItemStream<'v>, sector: u64) -> Self {
        Self {
            findings,
            stream,
            sector,
            group: 0..0,
            left_out: Vec::new(),
            info: None,
            bit: 0,
            bitmap_start: 0,
            ranges: 0,
            current: 0..0,
            ahead: None,
            unknown: 0..0,
            is_whole: true,
            open: None,
        }
    }

    /// Begins a block group.
    pub(super) fn begin(&mut self, group: Range<u64>, left_out: Vec<Range<u64>>) {
        self.skip_to(group.start);
        (self.bitmap_start, self.bit, self.ranges) = (group.start, 0, 0);
        (self.group, self.left_out, self.unknown) = (group, left_out, 0..0);
        self.is_whole = true;
        self.note_gap();
        self.info = self.take_info();
        if self.info.is_none() && self.is_whole {
            let place = BtrfsFindingPlace::Logical(Logical(self.group.start));
            let problem = "the block group has no FREE_SPACE_INFO item";
            self.findings.add(BtrfsFindingCode::FreeSpaceInfo, place, problem);
        }
        self.ahead = self.pull();
        self.next_range();
    }

    /// Passes over items that belong to no block group. `mkfs.btrfs` leaves those of its first
    /// block groups behind.
    fn skip_to(&mut self, start: u64) {
        let mut end = 0;
        while let Some((key, _)) = self.stream.item().filter(|(key, _)| key.objectid < start) {
            if key.item_type == ItemType::FREE_SPACE_INFO {
                end = key.objectid.saturating_add(key.offset);
            } else if key.objectid >= end && self.stream.gap().is_none() {
                self.wrong_item(key, "free space of no block group");
            }
            self.stream.advance();
        }
    }

    /// The info of the group, if the current item is that.
    fn take_info(&mut self) -> Option<FreeSpaceInfo> {
        let (key, data) = self.stream.item()?;
        let len = self.group.end - self.group.start;
        if key != Key::new(self.group.start, ItemType::FREE_SPACE_INFO, len) {
            return None;
        }
        let info = FreeSpaceInfo::view(data).ok().copied();
        self.advance();
        info
    }

    fn advance(&mut self) {
        self.stream.advance();
        self.note_gap();
    }

    /// Notes what of the group is in the gap in front of the current item.
    fn note_gap(&mut self) {
        let Some(gap) = self.stream.gap() else { return };
        let begin = Key::new(self.group.start, ItemType::FREE_SPACE_INFO, 0);
        let end = gap.end.unwrap_or(Key::MAX);
        if gap.first.objectid < self.group.end && end > begin {
            self.is_whole = false;
            let start =
                if self.unknown.is_empty() { gap.first.objectid } else { self.unknown.start };
            self.unknown = start..end.objectid.max(start);
            self.bitmap_start = self.bitmap_start.max(end.objectid);
        }
    }

    fn wrong_item(&self, key: Key, problem: impl Into<String>) {
        let place = BtrfsFindingPlace::Item { tree: TreeId::FREE_SPACE, key };
        self.findings.add(BtrfsFindingCode::FreeSpaceInfo, place, problem);
    }

    /// The next free range of an item of the group, and whether it is in a bitmap.
    fn pull(&mut self) -> Option<(Range<u64>, bool)> {
        loop {
            let (key, data) = self.stream.item()?;
            if key.objectid >= self.group.end {
                return None;
            }
            if key.item_type == ItemType::FREE_SPACE_BITMAP {
                let sectors = (key.offset / self.sector).min(data.len() as u64 * 8);
                let run = next_run(data, self.bit, sectors);
                if self.bit == 0 {
                    self.begin_item(key);
                }
                if let Some(run) = run {
                    self.bit = run.end;
                    let at = |bit| key.objectid.saturating_add(bit * self.sector);
                    return Some((at(run.start)..at(run.end).min(self.group.end), true));
                }
                self.bit = 0;
            } else if key.item_type == ItemType::FREE_SPACE_EXTENT {
                self.begin_item(key);
                self.advance();
                let end = key.objectid.saturating_add(key.offset).min(self.group.end);
                return Some((key.objectid..end.max(key.objectid), false));
            } else {
                self.wrong_item(key, "an item that does not belong into this block group");
            }
            self.advance();
        }
    }

    /// Checks the key of an item of the group.
    fn begin_item(&mut self, key: Key) {
        let end = key.objectid.saturating_add(key.offset);
        if end > self.group.end {
            self.wrong_item(key, "it goes beyond the end of its block group");
        }
        let is_bitmap = key.item_type == ItemType::FREE_SPACE_BITMAP;
        if let Some(info) = self.info
            && (info.flags.get() & FREE_SPACE_USING_BITMAPS != 0) != is_bitmap
        {
            self.wrong_item(key, "its form is not the one that the block group uses");
        }
        if is_bitmap {
            if key.objectid > self.bitmap_start {
                let problem =
                    format!("no bitmap covers the addresses from {} to it", self.bitmap_start);
                self.wrong_item(key, problem);
            } else if key.objectid < self.bitmap_start {
                self.wrong_item(key, "it covers addresses of the bitmap before it");
            }
            self.bitmap_start = self.bitmap_start.max(end);
        }
    }

    fn uses_bitmaps(&self) -> bool {
        self.info.is_some_and(|info| info.flags.get() & FREE_SPACE_USING_BITMAPS != 0)
    }

    /// Makes the next free range the current one. Joins those that touch.
    fn next_range(&mut self) {
        let Some((mut range, _)) = self.ahead.take() else {
            self.current = 0..0;
            return;
        };
        self.ranges += 1;
        self.ahead = self.pull();
        while let Some((next, is_bit)) = self.ahead.clone()
            && next.start <= range.end
        {
            // Bits count by the run, also where one goes over several bitmaps.
            if !is_bit || next.start < range.end {
                let key = Key::new(next.start, ItemType::FREE_SPACE_EXTENT, next.end - next.start);
                let how = if next.start < range.end { "overlaps" } else { "touches" };
                self.wrong_item(key, format!("it {how} the free range before it"));
                self.ranges += 1;
            }
            range.end = range.end.max(next.end);
            self.ahead = self.pull();
        }
        self.current = range;
    }

    /// Compares a range that no extent of the group has. The ranges ascend.
    pub(super) fn expect(&mut self, range: Range<u64>) {
        let mut at = range.start;
        self.pass(at, Some(BtrfsFindingCode::AllocatedSpace));
        while at < range.end {
            if self.current.is_empty() || self.current.start >= range.end {
                return self.note(BtrfsFindingCode::LostSpace, at..range.end);
            }
            if self.current.start > at {
                self.note(BtrfsFindingCode::LostSpace, at..self.current.start);
            }
            at = self.current.end.min(range.end);
            self.pass(at, None);
        }
    }

    /// Passes over a range of which it is not known what is free.
    pub(super) fn skip(&mut self, range: Range<u64>) {
        self.pass(range.start, Some(BtrfsFindingCode::AllocatedSpace));
        self.pass(range.end, None);
    }

    /// Takes what is listed as free before `to`. Reports it as `code`.
    fn pass(&mut self, to: u64, code: Option<BtrfsFindingCode>) {
        while !self.current.is_empty() && self.current.start < to {
            let end = self.current.end.min(to);
            if let Some(code) = code {
                self.note(code, self.current.start..end);
            }
            self.current.start = end;
            if self.current.is_empty() {
                self.next_range();
            }
        }
    }

    /// Ends the group.
    pub(super) fn finish(&mut self) {
        self.pass(self.group.end, Some(BtrfsFindingCode::AllocatedSpace));
        self.tell_open();
        if !self.is_whole {
            return;
        }
        let place = BtrfsFindingPlace::Logical(Logical(self.group.start));
        if let Some(info) = self.info
            && u64::from(info.extent_count.get()) != self.ranges
        {
            let (code, found) = (BtrfsFindingCode::FreeSpaceInfo, info.extent_count);
            self.findings.differs(code, place, "its count of free ranges", self.ranges, found);
        }
        if self.uses_bitmaps() && self.bitmap_start < self.group.end {
            let problem = format!("no bitmap covers its addresses from {} on", self.bitmap_start);
            self.findings.add(BtrfsFindingCode::FreeSpaceInfo, place, problem);
        }
    }

    /// Ends the partition. `end` is that of the last block group of the volume.
    pub(super) fn finish_all(&mut self, end: u64) {
        self.skip_to(end);
        while let Some((key, _)) = self.stream.item() {
            self.wrong_item(key, "free space behind the last block group");
            self.stream.advance();
        }
    }

    /// Notes a difference, without what is never allocated or not known.
    fn note(&mut self, code: BtrfsFindingCode, range: Range<u64>) {
        let mut at = range.start;
        for number in 0..self.left_out.len() {
            let Some(hole) = self.left_out.get(number).cloned() else { break };
            if hole.end > at && hole.start < range.end {
                self.note_part(code, at..hole.start);
                at = hole.end;
            }
        }
        self.note_part(code, at..range.end);
    }

    fn note_part(&mut self, code: BtrfsFindingCode, range: Range<u64>) {
        if code == BtrfsFindingCode::LostSpace && !self.unknown.is_empty() {
            let unknown = self.unknown.clone();
            self.open_part(code, range.start..range.end.min(unknown.start));
            return self.open_part(code, range.start.max(unknown.end)..range.end);
        }
        self.open_part(code, range);
    }

    fn open_part(&mut self, code: BtrfsFindingCode, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        if let Some((open, before)) = &mut self.open
            && *open == code
            && before.end == range.start
        {
            before.end = range.end;
            return;
        }
        self.tell_open();
        self.open = Some((code, range));
    }

    fn tell_open(&mut self) {
        let Some((code, range)) = self.open.take() else { return };
        let len = range.end - range.start;
        let what = if code == BtrfsFindingCode::LostSpace {
            "no extent has them, and the free-space tree does not list them"
        } else {
            "extents have them, and the free-space tree lists them as free"
        };
        let place = BtrfsFindingPlace::Logical(Logical(range.start));
        self.findings.add(code, place, format!("{len} bytes from there on: {what}"));
    }
}

/// The first run of ones from bit `from` on, among the first `bits` of a bitmap.
pub(super) fn next_run(bitmap: &[u8], from: u64, bits: u64) -> Option<Range<u64>> {
    let start = next_bit(bitmap, from, bits, true);
    (start < bits).then(|| start..next_bit(bitmap, start, bits, false))
}

/// The first bit from `from` on that is `is_one`; `bits` if there is none.
fn next_bit(bitmap: &[u8], from: u64, bits: u64, is_one: bool) -> u64 {
    let flip = if is_one { 0 } else { u8::MAX };
    let mut at = from;
    while at < bits {
        let byte = usize::try_from(at / 8).ok().and_then(|byte| bitmap.get(byte));
        let Some(byte) = byte else { return bits };
        let rest = (byte ^ flip) >> (at % 8);
        if rest != 0 {
            return (at + u64::from(rest.trailing_zeros())).min(bits);
        }
        at = (at / 8 + 1) * 8;
    }
    bits
}

#[cfg(test)]
mod tests {
    use offshoot_testkit::random::Random;

    use super::*;

    /// The runs of a bitmap are those that a look at each bit finds.
    #[test]
    fn runs_are_those_of_single_bits() {
        let seed = 31;
        println!("seed {seed}");
        let mut random = Random::new(seed);
        for _ in 0..300 {
            let bitmap: Vec<u8> = (0..40)
                .map(|_| match random.below(4) {
                    0 => 0,
                    1 => 255,
                    _ => u8::try_from(random.below(256)).unwrap(),
                })
                .collect();
            let bits = 300 + random.below(21);
            let byte = |bit: u64| bitmap[usize::try_from(bit / 8).unwrap()];
            let is_one = |bit: &u64| byte(*bit) & (1 << (bit % 8)) != 0;
            let expected: Vec<_> = (0..bits).filter(is_one).collect();
            let (mut found, mut at) = (Vec::new(), 0);
            while let Some(run) = next_run(&bitmap, at, bits) {
                assert!(run.start < run.end && run.end <= bits);
                assert!(run.end == bits || !is_one(&run.end), "it is maximal");
                found.extend(run.clone());
                at = run.end;
            }
            assert_eq!(found, expected);
        }
    }
}
