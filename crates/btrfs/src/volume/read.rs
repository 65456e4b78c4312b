//! Reading a logical address by whichever way gives bytes that verify.

use offshoot_btrfs_format::check::{self, Expected};
use offshoot_btrfs_format::csum::Checksum;
use offshoot_btrfs_format::{Logical, Malformed};
use offshoot_vfs::{Corrupt, Error, Result};

use super::report::{Report, place};
use super::ways::{Place, Rebuild, Segment, Way, segment};
use super::{Volume, parity};
use crate::block::TreeBlock;

/// Ranges that are closer than this are fetched in one go, in bytes: skipping the gap
/// would cost the device more than reading it.
const PREFETCH_GAP: u64 = 64 << 10;

/// One way that failed, and why.
struct Failure {
    source: String,
    error: Error,
}

impl Failure {
    /// What is wrong, without the structure and the address, which the report names itself.
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

impl Volume {
    /// Reads the tree block that `expected` describes from the devices and verifies it.
    ///
    /// # Errors
    /// When no way gives a block that verifies: what was wrong with the first.
    pub(crate) fn read_block(&self, expected: &Expected) -> Result<TreeBlock> {
        let mut bytes = vec![0; self.superblock.node_size as usize].into_boxed_slice();
        let segments = self.segments("tree block", expected.logical, bytes.len() as u64)?;
        let attempts = segments.iter().map(|s| s.ways.len()).max().unwrap_or(0);
        let mut failures = Vec::new();
        for attempt in 0..attempts {
            let source = self.describe(&segments, attempt);
            let mut rest = &mut bytes[..];
            let mut read = Ok(());
            for segment in &segments {
                let part;
                (part, rest) = rest.split_at_mut(segment_len(segment));
                // A block that lies across two stripes is read by the same attempt in both.
                match segment.ways.get(attempt).or(segment.ways.last()) {
                    Some(way) => read = read.and_then(|()| self.read_way(way, 0, part)),
                    None => return Err(self.lost("tree block", expected.logical)),
                }
            }
            let verified = read.and_then(|()| {
                self.verify_block(&bytes, expected).map_err(|e| corrupt(e, expected.logical))
            });
            let Err(error) = verified else {
                self.report_failures("tree block", expected.logical, &failures);
                return Ok(TreeBlock::verified(bytes));
            };
            failures.push(Failure { source, error });
        }
        Err(self.first_error("tree block", expected.logical, failures))
    }

    fn verify_block(&self, bytes: &[u8], expected: &Expected) -> Result<(), Malformed> {
        check::verify(bytes, &self.geometry, expected.logical)?;
        check::expect(bytes, expected)
    }

    /// Fills `buf`, whole sectors, with the data at `logical`. `checksums` are those of
    /// its sectors; without them, what a device returns is taken as it is.
    ///
    /// # Errors
    /// When a sector verifies in no way: the address of that sector, and what was wrong.
    pub(crate) fn read_data(
        &self,
        logical: Logical,
        buf: &mut [u8],
        checksums: Option<&[u8]>,
    ) -> Result<()> {
        let sector = self.superblock.sector_size as usize;
        let csum_len = self.superblock.checksum.len();
        let mut done = 0;
        for segment in self.segments("data", logical, buf.len() as u64)? {
            let len = segment_len(&segment);
            let at = Logical(logical.0 + done as u64);
            let sums = checksums.map(|sums| &sums[done / sector * csum_len..]);
            self.read_data_segment(at, &mut buf[done..done + len], sums, segment)?;
            done += len;
        }
        Ok(())
    }

    fn read_data_segment(
        &self,
        logical: Logical,
        buf: &mut [u8],
        checksums: Option<&[u8]>,
        mut segment: Segment,
    ) -> Result<()> {
        if checksums.is_none() && segment.redundant {
            segment.ways.retain(|way| !way.is_stale(&self.members));
        }
        let Some(first) = segment.ways.first() else { return Err(self.lost("data", logical)) };
        let read = self.read_way(first, 0, buf);
        let sector = self.superblock.sector_size as usize;
        let csum_len = self.superblock.checksum.len();
        for (i, buf) in buf.chunks_mut(sector).enumerate() {
            let sum = checksums.map(|sums| &sums[i * csum_len..][..csum_len]);
            if read.is_err() || self.verify_sector(buf, sum).is_err() {
                self.read_sector(logical, i * sector, buf, sum, &segment.ways)?;
            }
        }
        Ok(())
    }

    /// Reads the sector `offset` bytes into the segment at `segment_start` by the first
    /// way that gives one that verifies.
    fn read_sector(
        &self,
        segment_start: Logical,
        offset: usize,
        buf: &mut [u8],
        checksum: Option<&[u8]>,
        ways: &[Way],
    ) -> Result<()> {
        let logical = Logical(segment_start.0 + offset as u64);
        let mut failures = Vec::new();
        for way in ways {
            let source = self.describe_way(way, offset as u64);
            let verified = self
                .read_way(way, offset as u64, buf)
                .and_then(|()| self.verify_sector(buf, checksum).map_err(|e| corrupt(e, logical)));
            let Err(error) = verified else {
                self.report_failures("data", logical, &failures);
                return Ok(());
            };
            failures.push(Failure { source, error });
        }
        Err(self.first_error("data", logical, failures))
    }

    fn verify_sector(&self, sector: &[u8], checksum: Option<&[u8]>) -> Result<(), Malformed> {
        let Some(stored) = checksum else { return Ok(()) };
        let computed = self.superblock.checksum.compute(sector);
        if computed.bytes() == stored {
            return Ok(());
        }
        let stored = Checksum::stored(stored);
        Err(Malformed::new("data", format!("checksum {stored} expected, {computed} found")))
    }

    /// The segments that `len` bytes from `logical` on consist of.
    fn segments(&self, what: &str, logical: Logical, len: u64) -> Result<Vec<Segment>> {
        let mut segments = Vec::with_capacity(1);
        let mut done = 0;
        while done < len {
            let at = Logical(logical.0.saturating_add(done));
            let mapped = self
                .chunks
                .find(at)
                .ok_or_else(|| Error::corrupt_at(what, logical.0, "no chunk covers the address"))?;
            let segment = segment(mapped, &self.members, at, len - done);
            done += segment.len;
            segments.push(segment);
        }
        Ok(segments)
    }

    /// Reads `buf` by `way`, from `offset` bytes into its segment on.
    fn read_way(&self, way: &Way, offset: u64, buf: &mut [u8]) -> Result<()> {
        match way {
            Way::Direct(place) => self.read_place(*place, offset, buf),
            Way::Rebuild(rebuild) => self.rebuild(rebuild, offset, buf),
        }
    }

    fn read_place(&self, at: Place, offset: u64, buf: &mut [u8]) -> Result<()> {
        let member = self.members.get(at.member);
        let device = member.device.as_ref().expect("a place is on a member that is present");
        let from = at.physical.0.saturating_add(offset);
        device.read_at(from, buf).map_err(|e| {
            Error::io(format!("{}: reading {} bytes at {from}", device.name(), buf.len()), e)
        })
    }

    /// Solves for the lost stripe of a row. `buf` becomes the P or the Q sum first.
    fn rebuild(&self, rebuild: &Rebuild, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut stripe = vec![0; buf.len()];
        let mut q_sum = vec![0; buf.len()];
        buf.fill(0);
        for (index, at) in &rebuild.data {
            self.read_place(*at, offset, &mut stripe)?;
            parity::add(buf, &stripe);
            parity::add_to_q(&mut q_sum, &stripe, *index);
        }
        if let Some(p) = rebuild.p {
            self.read_place(p, offset, &mut stripe)?;
            parity::add(buf, &stripe);
        }
        if let Some(q) = rebuild.q {
            self.read_place(q, offset, &mut stripe)?;
            parity::add(&mut q_sum, &stripe);
        }
        match (rebuild.p, rebuild.other_lost) {
            (_, Some(other)) => parity::solve_pq(buf, &q_sum, rebuild.target, other),
            (Some(_), None) => {}
            (None, None) => {
                parity::solve_q(&mut q_sum, rebuild.target);
                buf.copy_from_slice(&q_sum);
            }
        }
        Ok(())
    }

    /// Tells the devices that `ranges` of the logical space will be read soon, in the
    /// order of the devices and with small gaps closed.
    pub(crate) fn prefetch(&self, ranges: impl IntoIterator<Item = (Logical, u64)>) {
        let mut places = Vec::new();
        for (logical, len) in ranges {
            // What is not mapped fails when it is read.
            let Ok(segments) = self.segments("data", logical, len) else { continue };
            for segment in segments {
                if let Some(Way::Direct(at)) = segment.ways.first() {
                    places.push((at.member, at.physical.0, at.physical.0 + segment.len));
                }
            }
        }
        places.sort_unstable();
        let mut runs = places.into_iter();
        let Some(mut run) = runs.next() else { return };
        for next in runs {
            if next.0 == run.0 && next.1 <= run.2 + PREFETCH_GAP {
                run.2 = run.2.max(next.2);
            } else {
                self.prefetch_run(run);
                run = next;
            }
        }
        self.prefetch_run(run);
    }

    fn prefetch_run(&self, (member, start, end): (usize, u64, u64)) {
        if let Some(device) = &self.members.get(member).device {
            device.prefetch(start, end - start);
        }
    }

    fn describe(&self, segments: &[Segment], attempt: usize) -> String {
        segments
            .first()
            .and_then(|segment| segment.ways.get(attempt).or(segment.ways.last()))
            .map_or_else(String::new, |way| self.describe_way(way, 0))
    }

    fn describe_way(&self, way: &Way, offset: u64) -> String {
        let at = |at: &Place| {
            let physical = offshoot_btrfs_format::Physical(at.physical.0 + offset);
            place(&self.members.get(at.member).name(), physical)
        };
        match way {
            Way::Direct(place) => at(place),
            Way::Rebuild(Rebuild { p: Some(p), q: None, .. }) => {
                format!("rebuilt from P at {}", at(p))
            }
            Way::Rebuild(Rebuild { p: None, q: Some(q), .. }) => {
                format!("rebuilt from Q at {}", at(q))
            }
            Way::Rebuild(_) => "rebuilt from P and Q".into(),
        }
    }

    fn report_failures(&self, structure: &'static str, logical: Logical, failures: &[Failure]) {
        for failure in failures {
            self.report(&Report::BadCopy {
                structure,
                logical,
                source: failure.source.clone(),
                problem: failure.problem(),
            });
        }
    }

    /// The error of a read that failed in every way: the first, which tells most.
    fn first_error(&self, what: &str, logical: Logical, failures: Vec<Failure>) -> Error {
        let ways = failures.len();
        let Some(Failure { source, error }) = failures.into_iter().next() else {
            return self.lost(what, logical);
        };
        let others = if ways > 1 { ", and every other way to read it failed" } else { "" };
        match error {
            Error::Corrupt(corrupt) => {
                let problem = format!("{} ({source}){others}", corrupt.problem);
                Corrupt { problem, ..*corrupt }.into()
            }
            Error::Io { what: doing, source } => {
                Error::io(format!("{what} at logical address {logical}: {doing}{others}"), source)
            }
            other => other,
        }
    }

    fn lost(&self, what: &str, logical: Logical) -> Error {
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

fn segment_len(segment: &Segment) -> usize {
    usize::try_from(segment.len).expect("a segment is no longer than the buffer it is read into")
}
