//! The rules for the data of one file.

use offshoot_vfs::FileType;

use super::History;
use crate::crash::picture::{PictureFile, SECTOR, hash_of_zeros};

impl History {
    /// Checks rule 4.
    pub(super) fn data(
        &self,
        found: &PictureFile,
        versions: &[&PictureFile],
    ) -> Result<(), String> {
        if found.kind != FileType::Regular {
            return Ok(());
        }
        let unit = self.manners.data_unit();
        let is_size = versions.iter().any(|version| version.size == found.size);
        let is_between = |pair: &[&PictureFile]| {
            let (from, to) = (pair[0].size.min(pair[1].size), pair[0].size.max(pair[1].size));
            (from..=to).contains(&found.size) && found.size.is_multiple_of(unit)
        };
        if !is_size && !versions.windows(2).any(is_between) {
            let sizes: Vec<_> = versions.iter().map(|version| version.size).collect();
            return Err(format!("size {}, which may be {sizes:?}", found.size));
        }
        // Corrupt data is counted elsewhere. To report it as corrupt does not break a promise.
        let Some(sectors) = &found.sectors else { return Ok(()) };
        for number in 0..sectors.len() {
            if !versions.iter().any(|version| self.has_sector(found, version, number)) {
                return Err(format!("sector {number} of {} bytes is of no moment", found.size));
            }
        }
        Ok(())
    }

    /// Whether a unit of the data that was found is as `version` has it.
    fn has_sector(&self, found: &PictureFile, version: &PictureFile, number: usize) -> bool {
        let unit = self.manners.data_unit();
        let start = number as u64 * unit;
        let end = found.size.min(start + unit);
        let Some(theirs) = &version.sectors else { return false };
        let sector = found.sectors.as_ref().and_then(|sectors| sectors.get(number));
        let is_overwriting = self.manners.is_overwriting;
        let is_reached = version.size >= end || is_overwriting && version.size > start;
        // Zeros behind a new end may be there before the new size is, and what an operation moves
        // leaves a hole in between.
        let behind_end = version.size..version.size.next_multiple_of(SECTOR);
        let may_be_zero = is_overwriting && (behind_end.contains(&start) || self.moves_data);
        // The last sector may come from a longer file, up to the end that the file has now.
        let part = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        let part = part.filter(|_| !end.is_multiple_of(unit)).map(|(start, end)| start..end);
        let is_part = || {
            let bytes = part.clone().and_then(|part| found.head.get(part));
            let theirs = part.clone().and_then(|part| version.head.get(part));
            bytes.is_some() && bytes == theirs
        };
        is_reached && (theirs.get(number) == sector || is_part())
            || may_be_zero && sector == Some(&hash_of_zeros(unit))
    }
}
