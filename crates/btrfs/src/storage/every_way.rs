//! Reading data in every way, and not only in the first good one.
//!
//! A copy is a whole stripe on a member. What is computed from parity is no copy: it is only asked
//! where no copy is good.

use std::collections::BTreeMap;

use offshoot_btrfs_format::Logical;
use offshoot_vfs::Result;

use super::read::segment_len;
use super::ways::{ReadWay, WaySelection};
use super::{Storage, StorageTrees};

/// What one way to read a sector gives.
pub(crate) struct WayRead {
    /// The place on a member, or what the sector is computed from.
    pub(crate) source: String,
    /// The bytes; an error when a device failed.
    pub(crate) bytes: Result<Vec<u8>>,
}

/// Sectors of a copy that are bad, one behind the other.
pub(crate) struct BadSectors {
    pub(crate) logical: Logical,
    pub(crate) len_bytes: u64,
    /// The place of the first one.
    pub(crate) source: String,
    /// What is wrong with the first one.
    pub(crate) problem: String,
}

impl Storage {
    /// The bytes of the sector of data at `logical` in every way there is, unverified.
    ///
    /// # Errors
    /// When no chunk covers the address.
    pub(crate) fn read_every_way(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
    ) -> Result<Vec<WayRead>> {
        let sector = self.superblock.sector_size as usize;
        let segments = self.data_segments(trees, logical, sector as u64, WaySelection::All)?;
        let read = |way: &ReadWay| {
            let mut bytes = vec![0; sector];
            let read = self.read_way(way, 0, &mut bytes);
            WayRead { source: self.describe_way(way, 0), bytes: read.map(|()| bytes) }
        };
        Ok(segments.iter().flat_map(|segment| &segment.ways).map(read).collect())
    }

    /// Whether there is more than one copy of the data from `logical` on.
    pub(crate) fn has_copies(&self, trees: &impl StorageTrees, logical: Logical, len: u64) -> bool {
        let segments = self.data_segments(trees, logical, len, WaySelection::First);
        segments.is_ok_and(|segments| segments.iter().any(|segment| segment.ways.len() > 1))
    }

    /// Reads every copy of the data at `logical` on members that are not behind, and compares it
    /// with `checksums`. `buf` is room for one copy. Calls `bad` with the sectors of a copy that
    /// are bad while another copy is good. Returns the offsets of the sectors without a good copy.
    ///
    /// # Errors
    /// When no chunk covers the address.
    pub(crate) fn verify_copies(
        &self,
        trees: &impl StorageTrees,
        logical: Logical,
        (buf, checksums): (&mut [u8], &[u8]),
        bad: &mut dyn FnMut(BadSectors),
    ) -> Result<Vec<u64>> {
        let sector = self.superblock.sector_size as usize;
        let sum_len = self.superblock.checksum.len();
        let len = buf.len() as u64;
        let (mut lost, mut done) = (Vec::new(), 0);
        for mut segment in self.data_segments(trees, logical, len, WaySelection::First)? {
            if segment.ways.iter().any(|way| !way.is_stale(&self.members)) {
                segment.ways.retain(|way| !way.is_stale(&self.members));
            }
            let len = segment_len(&segment);
            let sums = checksums.get(done / sector * sum_len..).unwrap_or_default();
            let Some(buf) = buf.get_mut(done..done + len) else { break };
            let copies: Vec<_> =
                segment.ways.iter().map(|way| self.problems_of(way, buf, sums)).collect();
            let good = |number: usize| copies.iter().any(|copy| !copy.contains_key(&number));
            let at = |number: usize| (done + number * sector) as u64;
            lost.extend((0..len / sector).filter(|&number| !good(number)).map(at));
            for (way, problems) in segment.ways.iter().zip(&copies) {
                let mut run: Option<BadSectors> = None;
                for (&number, problem) in problems.iter().filter(|(number, _)| good(**number)) {
                    let next = Logical(logical.0 + at(number));
                    match &mut run {
                        Some(run) if run.end() == next => run.len_bytes += sector as u64,
                        _ => {
                            let new = BadSectors {
                                logical: next,
                                len_bytes: sector as u64,
                                source: self.describe_way(way, (number * sector) as u64),
                                problem: problem.clone(),
                            };
                            run.replace(new).into_iter().for_each(&mut *bad);
                        }
                    }
                }
                run.into_iter().for_each(&mut *bad);
            }
            done += len;
        }
        Ok(lost)
    }

    /// The problems of a copy of a segment, by the number of the sector.
    fn problems_of(&self, way: &ReadWay, buf: &mut [u8], sums: &[u8]) -> BTreeMap<usize, String> {
        let sector = self.superblock.sector_size as usize;
        let is_read = self.read_way(way, 0, buf).is_ok();
        let mut problems = BTreeMap::new();
        let sums = sums.chunks(self.superblock.checksum.len());
        for (number, (buf, sum)) in buf.chunks_mut(sector).zip(sums).enumerate() {
            let read =
                if is_read { Ok(()) } else { self.read_way(way, (number * sector) as u64, buf) };
            let problem = match read {
                Ok(()) => self.verify_sector(buf, Some(sum)).err().map(|e| e.problem.into_owned()),
                Err(error) => Some(error.to_string()),
            };
            problems.extend(problem.map(|problem| (number, problem)));
        }
        problems
    }
}

impl BadSectors {
    fn end(&self) -> Logical {
        Logical(self.logical.0 + self.len_bytes)
    }
}
