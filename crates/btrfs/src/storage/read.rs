//! Reading a logical address: the first way whose bytes verify gives the result.

use std::ops::Range;

use offshoot_btrfs_format::check::{self, ExpectedBlock};
use offshoot_btrfs_format::csum::Checksum;
use offshoot_btrfs_format::{Logical, Malformed};
use offshoot_device::BlockDevice;
use offshoot_kit::read_ahead::near_runs;
use offshoot_vfs::{Corrupt, Error, Result, Structure};

use super::chunk_map::MappedChunk;
use super::ways::{MemberOffset, ReadSegment, ReadWay, Rebuild, WaySelection, segment};
use super::{DeviceError, Storage, StorageTrees, parity};
use crate::report::{VolumeReport, place};

/// One way that failed, and why.
struct ReadFailure {
    source: String,
    /// The member that failed, if the way reads only one.
    member: Option<usize>,
    error: Error,
}

impl ReadFailure {
    /// The problem without the structure and the address, because the report names those itself.
    fn problem(&self) -> String {
        match &self.error {
            Error::Corrupt(corrupt) => corrupt.problem.clone(),
            other => other.to_string(),
        }
    }
}

fn corrupt(malformed: Malformed, logical: Logical) -> Error {
    Error::corrupt_at(malformed.structure, logical.0, malformed.problem)
}

impl Storage {
    /// Reads the tree block that `expected` describes from the devices and verifies it.
    ///
    /// # Errors
    /// When no way gives a block that verifies. The error is that of the first way.
    pub(crate) fn read_block(&self, expected: &ExpectedBlock) -> Result<Box<[u8]>> {
        let logical = expected.logical;
        let verify = |bytes: &[u8]| {
            check::verify(bytes, &self.geometry, logical)?;
            check::expect(bytes, expected)
        };
        let (block, failures) = self.search_block(logical, verify)?;
        self.report_failures("tree block", logical, &failures);
        Ok(block)
    }

    /// Reads the tree block at `logical` by the first way whose bytes pass `verify`, and reports
    /// nothing.
    ///
    /// # Errors
    /// As [`read_block`](Self::read_block).
    pub(crate) fn find_block(
        &self,
        logical: Logical,
        verify: impl Fn(&[u8]) -> Result<(), Malformed>,
    ) -> Result<Box<[u8]>> {
        Ok(self.search_block(logical, verify)?.0)
    }

    /// The first block that passes `verify`, and the failures of the ways that were tried before.
    fn search_block(
        &self,
        logical: Logical,
        verify: impl Fn(&[u8]) -> Result<(), Malformed>,
    ) -> Result<(Box<[u8]>, Vec<ReadFailure>)> {
        let mut bytes = vec![0; self.superblock.node_size as usize].into_boxed_slice();
        let len = bytes.len() as u64;
        let mut failures = Vec::new();
        for effort in [WaySelection::First, WaySelection::All] {
            let segments = self.chunk_segments(Structure::TreeBlock, logical, len, effort)?;
            let attempts = attempts(&segments);
            // The second effort tries all ways of the first one again.
            failures.clear();
            for attempt in 0..attempts {
                let (source, member) =
                    (self.describe(&segments, attempt), only_member(chosen(&segments, attempt)));
                let verified = self
                    .read_segments(&segments, attempt, &mut bytes)
                    .and_then(|()| verify(&bytes).map_err(|e| corrupt(e, logical)));
                let Err(error) = verified else {
                    return Ok((bytes, failures));
                };
                failures.push(ReadFailure { source, member, error });
            }
        }
        Err(self.first_error(Structure::TreeBlock, logical, failures))
    }

    /// Reads all segments of a block, each in the way that belongs to the number `attempt`.
    fn read_segments(
        &self,
        segments: &[ReadSegment],
        attempt: usize,
        bytes: &mut [u8],
    ) -> Result<()> {
        let mut rest = bytes;
        for (segment, way) in segments.iter().zip(chosen(segments, attempt)) {
            let part;
            (part, rest) = rest.split_at_mut(segment_len(segment));
            self.read_way(way, 0, part)?;
        }
        Ok(())
    }

    /// Fills `buf`, which is whole sectors, with the data at `logical`. `checksums` are those of
    /// its sectors. Without them, nothing verifies the bytes.
    ///
    /// # Errors
    /// When no way gives a sector that verifies: the address of that sector, and what was wrong.
    pub(crate) fn read_data(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
        buf: &mut [u8],
        checksums: Option<&[u8]>,
    ) -> Result<()> {
        let sector = self.superblock.sector_size as usize;
        let csum_len = self.superblock.checksum.len();
        let mut segments =
            self.data_segments(trees, logical, buf.len() as u64, WaySelection::First)?;
        for segment in &mut segments {
            self.leave_out_stale(trees, segment, checksums);
        }
        let is_read = self.read_at_once(&segments, buf);
        let mut done = 0;
        for (number, segment) in segments.iter().enumerate() {
            let len = segment_len(segment);
            let (at, buf) = (Logical(logical.0 + done as u64), &mut buf[done..done + len]);
            let sums = checksums.map(|sums| &sums[done / sector * csum_len..]);
            let Some(first) = segment.ways.first() else {
                return Err(self.lost(Structure::Data, at));
            };
            let is_read = is_read.as_ref().is_some_and(|is_read| is_read[number])
                || self.read_way(first, 0, buf).is_ok();
            self.verify_segment(trees, at, buf, sums, is_read)?;
            done += len;
        }
        Ok(())
    }

    /// Verifies a segment that was read, and reads each bad sector in the other ways; all sectors,
    /// when `is_read` is false.
    fn verify_segment(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
        buf: &mut [u8],
        checksums: Option<&[u8]>,
        is_read: bool,
    ) -> Result<()> {
        let sector = self.superblock.sector_size as usize;
        let csum_len = self.superblock.checksum.len();
        let len = buf.len() as u64;
        let mut all = None;
        for (i, buf) in buf.chunks_mut(sector).enumerate() {
            let sum = checksums.map(|sums| &sums[i * csum_len..][..csum_len]);
            if is_read && self.verify_sector(buf, sum).is_ok() {
                continue;
            }
            if all.is_none() {
                let mut segments = self.data_segments(trees, logical, len, WaySelection::All)?;
                for segment in &mut segments {
                    self.leave_out_stale(trees, segment, checksums);
                }
                all = segments.into_iter().next();
            }
            let ways = all.as_ref().map_or(&[][..], |segment| &segment.ways);
            self.read_sector(logical, i * sector, buf, sum, ways)?;
        }
        Ok(())
    }

    /// Without checksums, a redundant segment is not read from a stale member while a current one
    /// has it. A power cut between superblocks may leave all members of a segment one generation
    /// behind. Then this keeps the members that have what the newest commit wrote.
    fn leave_out_stale(
        &self,
        trees: &impl StorageTrees,
        segment: &mut ReadSegment,
        checksums: Option<&[u8]>,
    ) {
        if checksums.is_some() || !segment.is_redundant {
            return;
        }
        if segment.ways.iter().any(|way| !way.is_stale(&self.members)) {
            segment.ways.retain(|way| !way.is_stale(&self.members));
            return;
        }
        let is_whole = |place: MemberOffset| {
            // A member counts as outdated when a read error leaves the question open.
            let is_current = || self.is_current(trees, place.member).unwrap_or(false);
            !self.members.get(place.member).has_failed() && is_current()
        };
        segment.ways.retain(|way| way.places().all(is_whole));
    }

    /// Reads the sector `offset` bytes into the segment at `segment_start` by the first way whose
    /// bytes verify.
    fn read_sector(
        &self,
        segment_start: Logical,
        offset: usize,
        buf: &mut [u8],
        checksum: Option<&[u8]>,
        ways: &[ReadWay],
    ) -> Result<()> {
        let logical = Logical(segment_start.0 + offset as u64);
        let failures = self.search_sector(logical, offset as u64, buf, checksum, ways)?;
        self.report_failures("data", logical, &failures);
        Ok(())
    }

    /// As [`read_sector`](Self::read_sector) without a report. Returns the failures of the ways
    /// that were tried before.
    fn search_sector(
        &self,
        logical: Logical,
        offset: u64,
        buf: &mut [u8],
        checksum: Option<&[u8]>,
        ways: &[ReadWay],
    ) -> Result<Vec<ReadFailure>> {
        let mut failures = Vec::new();
        for way in ways {
            let source = self.describe_way(way, offset);
            let verified = self
                .read_way(way, offset, buf)
                .and_then(|()| self.verify_sector(buf, checksum).map_err(|e| corrupt(e, logical)));
            let Err(error) = verified else { return Ok(failures) };
            failures.push(ReadFailure { source, member: only_member([way].into_iter()), error });
        }
        Err(self.first_error(Structure::Data, logical, failures))
    }

    /// Fills `buf` with the sector of data at `logical` by the first way whose bytes verify, and
    /// reports nothing.
    ///
    /// # Errors
    /// As [`read_data`](Self::read_data).
    pub(crate) fn find_sector(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
        buf: &mut [u8],
        checksum: Option<&[u8]>,
    ) -> Result<()> {
        for mut segment in
            self.data_segments(trees, logical, buf.len() as u64, WaySelection::All)?
        {
            self.leave_out_stale(trees, &mut segment, checksum);
            self.search_sector(logical, 0, buf, checksum, &segment.ways)?;
        }
        Ok(())
    }

    pub(crate) fn verify_sector(
        &self,
        sector: &[u8],
        checksum: Option<&[u8]>,
    ) -> Result<(), Malformed> {
        let Some(stored) = checksum else { return Ok(()) };
        let computed = self.superblock.checksum.compute(sector);
        if computed.bytes() == stored {
            return Ok(());
        }
        let stored = Checksum::stored(stored);
        Err(Malformed::new(
            Structure::Data,
            format!("checksum {stored} expected, {computed} found"),
        ))
    }

    /// The segments of `len` bytes from `logical` on, as the chunks alone describe them.
    pub(super) fn chunk_segments(
        &self,
        what: Structure,
        logical: Logical,
        len: u64,
        effort: WaySelection,
    ) -> Result<Vec<ReadSegment>> {
        self.segments(what, logical, len, |mapped, at, len| {
            Ok(segment(mapped, &self.members, at, len, effort))
        })
    }

    /// The segments of `len` bytes of data from `logical` on. The RAID stripe tree describes them
    /// if the volume has one.
    pub(super) fn data_segments(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
        len: u64,
        effort: WaySelection,
    ) -> Result<Vec<ReadSegment>> {
        self.segments(Structure::Data, logical, len, |mapped, at, len| {
            let Some(mut recorded) = trees.recorded_segment(mapped, at, len)? else {
                return Ok(segment(mapped, &self.members, at, len, effort));
            };
            recorded.ways.sort_by_key(|way| way.is_stale(&self.members));
            Ok(recorded)
        })
    }

    /// The segments of `len` bytes from `logical` on. `find` gets the start and the greatest length
    /// of each.
    fn segments(
        &self,
        what: Structure,
        logical: Logical,
        len: u64,
        find: impl Fn(&MappedChunk, Logical, u64) -> Result<ReadSegment>,
    ) -> Result<Vec<ReadSegment>> {
        let chunks = self.chunk_map();
        let mut segments = Vec::with_capacity(1);
        let mut done = 0;
        while done < len {
            let at = Logical(logical.0.saturating_add(done));
            let mapped = chunks
                .find(at)
                .ok_or_else(|| Error::corrupt_at(what, logical.0, "no chunk covers the address"))?;
            let mut segment = find(mapped, at, len - done)?;
            self.mirrors.choose(at, &mut segment.ways, &self.members);
            done += segment.len;
            segments.push(segment);
        }
        Ok(segments)
    }

    /// Reads `buf` by `way`, from `offset` bytes into its segment on.
    pub(super) fn read_way(&self, way: &ReadWay, offset: u64, buf: &mut [u8]) -> Result<()> {
        match way {
            ReadWay::Direct(place) => self.read_place(*place, offset, buf),
            ReadWay::Rebuild(rebuild) => self.rebuild(rebuild, offset, buf),
        }
    }

    pub(crate) fn read_place(&self, at: MemberOffset, offset: u64, buf: &mut [u8]) -> Result<()> {
        let (member, device) = self.present(at.member);
        let from = at.physical.0.saturating_add(offset);
        let _under_way = member.condition.begin_read();
        device.read_at(from, buf).map_err(|e| read_error(&**device, from, buf.len(), e))
    }

    /// Computes the lost stripe of a row. `buf` first becomes the P sum. With Q alone, the result
    /// of the Q sum replaces it.
    fn rebuild(&self, rebuild: &Rebuild, offset: u64, buf: &mut [u8]) -> Result<()> {
        let places: Vec<_> = rebuild.places().collect();
        let mut stripes = self.read_places(&places, offset, buf.len())?.into_iter();
        let mut next = || stripes.next().expect("there is one for each place");
        let mut q_sum = rebuild.q.map(|_| vec![0; buf.len()]);
        buf.fill(0);
        for (index, _) in &rebuild.data {
            let stripe = next();
            parity::add(buf, &stripe);
            if let Some(q_sum) = &mut q_sum {
                parity::add_to_q(q_sum, &stripe, *index);
            }
        }
        if rebuild.p.is_some() {
            parity::add(buf, &next());
        }
        if let Some(q_sum) = &mut q_sum {
            parity::add(q_sum, &next());
            if let Some(other) = rebuild.other_lost {
                parity::solve_pq(buf, q_sum, rebuild.target, other);
            } else {
                parity::solve_q(q_sum, rebuild.target);
                buf.copy_from_slice(q_sum);
            }
        }
        Ok(())
    }

    /// Tells the devices that `ranges` of the logical space will be read soon, in the
    /// order of the devices and with small gaps closed.
    pub(crate) fn prefetch(
        &self,
        trees: &impl StorageTrees,
        ranges: impl IntoIterator<Item = (Logical, u64)>,
    ) {
        let mut places = Vec::new();
        for (logical, len) in ranges {
            self.places_to_read(trees, logical, len, 1, &mut places);
        }
        self.prefetch_places(places);
    }

    /// Tells the devices that every copy of the data at `logical` will be read soon.
    pub(crate) fn prefetch_copies(&self, trees: &impl StorageTrees, logical: Logical, len: u64) {
        let mut places = Vec::new();
        self.places_to_read(trees, logical, len, usize::MAX, &mut places);
        self.prefetch_places(places);
    }

    /// Adds where at most `copies` copies of a range are, by the member.
    fn places_to_read(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
        len: u64,
        copies: usize,
        places: &mut Vec<(usize, Range<u64>)>,
    ) {
        // An address that no chunk covers fails when it is read.
        let segments = self.data_segments(trees, logical, len, WaySelection::First);
        for segment in segments.into_iter().flatten() {
            for way in segment.ways.iter().take(copies) {
                if let ReadWay::Direct(at) = way {
                    // A damaged stripe tree may name any place; reading there fails.
                    let end = at.physical.0.saturating_add(segment.len);
                    places.push((at.member, at.physical.0..end));
                }
            }
        }
    }

    fn prefetch_places(&self, places: Vec<(usize, Range<u64>)>) {
        for (member, run) in near_runs(places) {
            if let Some(device) = &self.members.get(member).device {
                device.prefetch(run.start, run.end - run.start);
            }
        }
    }

    fn describe(&self, segments: &[ReadSegment], attempt: usize) -> String {
        let ways = chosen(segments, attempt).map(|way| self.describe_way(way, 0));
        ways.collect::<Vec<_>>().join(" and ")
    }

    pub(super) fn describe_way(&self, way: &ReadWay, offset: u64) -> String {
        let at = |at: &MemberOffset| {
            let physical = offshoot_btrfs_format::Physical(at.physical.0.saturating_add(offset));
            place(&self.members.get(at.member).name(), physical)
        };
        match way {
            ReadWay::Direct(place) => at(place),
            ReadWay::Rebuild(Rebuild { p: Some(p), q: None, .. }) => {
                format!("rebuilt from P at {}", at(p))
            }
            ReadWay::Rebuild(Rebuild { p: None, q: Some(q), .. }) => {
                format!("rebuilt from Q at {}", at(q))
            }
            ReadWay::Rebuild(_) => "rebuilt from P and Q".into(),
        }
    }

    /// Counts failures for the members that caused them. `has_good` says that another way was good.
    /// While the volume is written and no way is good, other bytes may have been written to a freed
    /// address before the reader came: this is no error of the device.
    fn count_failures(&self, failures: &[ReadFailure], has_good: bool) {
        for failure in failures {
            let kind = match &failure.error {
                Error::Io { .. } => DeviceError::Read,
                _ if !has_good && self.geometry.is_written => continue,
                _ => DeviceError::Corruption,
            };
            // Outdated bytes of a stale member are no error of the device.
            let of = failure.member.filter(|&member| !self.members.get(member).is_stale());
            if let Some(member) = of {
                self.count_error(member, kind);
            }
        }
    }

    fn report_failures(&self, structure: &'static str, logical: Logical, failures: &[ReadFailure]) {
        self.count_failures(failures, true);
        for failure in failures {
            self.report(&VolumeReport::BadCopy {
                structure,
                logical,
                source: failure.source.clone(),
                problem: failure.problem(),
            });
        }
    }

    /// The error of a read that failed in every way: that of the first way, with a note about the
    /// others.
    fn first_error(&self, what: Structure, logical: Logical, failures: Vec<ReadFailure>) -> Error {
        self.count_failures(&failures, false);
        let ways = failures.len();
        let Some(ReadFailure { source, error, .. }) = failures.into_iter().next() else {
            return self.lost(what, logical);
        };
        let others = if ways > 1 { ", and every other way to read it failed" } else { "" };
        match error {
            Error::Corrupt(corrupt) => {
                let problem = format!("{} ({source}){others}", corrupt.problem);
                Corrupt { problem, ..*corrupt }.into()
            }
            Error::Io { what: doing, source, .. } => {
                Error::io(format!("{what} at logical address {logical}: {doing}{others}"), source)
            }
            other => other,
        }
    }

    fn lost(&self, what: Structure, logical: Logical) -> Error {
        let missing: Vec<_> = self
            .members
            .all()
            .iter()
            .filter(|member| member.device.is_none() || member.is_stale())
            .map(|member| member.id.to_string())
            .collect();
        Error::io(
            format!(
                "{what} at logical address {logical}: too many members are missing or outdated (device {})",
                missing.join(", ")
            ),
            offshoot_vfs::Errno::NXIO,
        )
    }
}

/// The most combinations of ways that are tried for a block.
const MAX_ATTEMPTS: usize = 1024;

/// In how many combinations of ways a block can be read. A block across two stripes has two ways
/// for each on RAID1-like profiles, so four combinations: the first stripe may be bad on one
/// member, and the second stripe on the other.
fn attempts(segments: &[ReadSegment]) -> usize {
    segments
        .iter()
        .fold(1usize, |product, segment| product.saturating_mul(segment.ways.len()))
        .min(MAX_ATTEMPTS)
}

/// The member that all of these ways read; `None` when they read several.
fn only_member<'w>(ways: impl Iterator<Item = &'w ReadWay>) -> Option<usize> {
    let mut places = ways.flat_map(ReadWay::places).map(|place| place.member);
    let first = places.next()?;
    places.all(|member| member == first).then_some(first)
}

/// For each segment, the way that belongs to the number `attempt`.
fn chosen(segments: &[ReadSegment], mut attempt: usize) -> impl Iterator<Item = &ReadWay> {
    segments.iter().map(move |segment| {
        let way = &segment.ways[attempt % segment.ways.len()];
        attempt /= segment.ways.len();
        way
    })
}

/// The error of a read from `device`.
pub(super) fn read_error(
    device: &dyn BlockDevice,
    from: u64,
    len: usize,
    error: std::io::Error,
) -> Error {
    Error::io(format!("{}: reading {len} bytes at {from}", device.name()), error)
}

pub(super) fn segment_len(segment: &ReadSegment) -> usize {
    usize::try_from(segment.len).expect("a segment is no longer than the buffer it is read into")
}
