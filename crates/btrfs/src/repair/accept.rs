//! Data of files that no checksum fits, accepted as it is on the devices.
//!
//! The caller names the files. For each sector of their data that no copy fits the checksum of, or
//! that has no checksum, the checksum tree gets that of the bytes on the devices. The data itself
//! is not written, so the old state stays whole, and the repair can be undone.
//!
//! | | why it is refused |
//! |---|---|
//! | the readable copies of a sector differ | it is not known which one the user wants |
//! | no copy can be read | there is nothing to accept |
//! | a compressed extent does not decompress | the file would not be readable afterwards |
//! | a file with fs-verity | its hashes refuse the data, whatever the checksums say |
//!
//! A copy that cannot be read while others agree stays bad, and a scrub writes it anew. Extents may
//! be shared: clones and snapshots that use an accepted sector read it as well from then on. They
//! are part of the outcome.

mod checksums;
mod lookup;

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_btrfs_format::compress::{self, Compression};
use offshoot_btrfs_format::csum::Checksum;
use offshoot_btrfs_format::file_extent::{FileExtent, FileExtentBody, MAX_COMPRESSED_EXTENT};
use offshoot_btrfs_format::inode::inode_flags;
use offshoot_btrfs_format::{ItemType, Key, Logical, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Result, Structure};

use super::editor::TreeEdits;
use super::{RepairOptions, require_repairable};
use crate::check::{
    self, CheckWatch, CheckedVolume, DataUser, DataUsers, KeyRange, bad_data_in, used_range,
    users_of,
};
use lookup::FoundFile;

pub(super) use checksums::StoredChecksums;

/// About what a new checksum takes in memory, in bytes.
const CHECKSUM_BYTES: u64 = 64;

/// Data that a repair accepts as it is on the devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptedData {
    /// The files that the caller named, in that order.
    pub files: Vec<FileOfAcceptedData>,
    /// Other files that use the same data.
    pub others: Vec<DataUser>,
    /// Whether there are more of them.
    pub are_more_others: bool,
}

/// A file whose data is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOfAcceptedData {
    /// Its path, as the caller named it.
    pub path: Vec<u8>,
    /// Its subvolume.
    pub subvolume: TreeId,
    /// Its inode number.
    pub ino: u64,
    /// What is accepted. Empty when all data of the file fits its checksums.
    pub ranges: Vec<AcceptedRange>,
}

/// A range of a file that is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedRange {
    /// Where it begins in the file, in bytes. Of a compressed extent the whole extent is a range.
    pub offset: u64,
    /// Its length in the file, in bytes.
    pub len: u64,
    /// The address of the first sector that is accepted.
    pub logical: Logical,
}

/// What is accepted, and the changes that this takes.
#[derive(Debug, Default)]
pub(super) struct Acceptance {
    pub(super) data: AcceptedData,
    /// The changes of the checksum tree.
    pub(super) edits: TreeEdits,
    /// The addresses of all data of the files that has checksums.
    needed: Vec<Range<u64>>,
}

/// A part of a file.
struct ChecksummedPart {
    /// Where it is in the file.
    offset: u64,
    len: u64,
    /// The addresses that it needs.
    range: Range<u64>,
    compression: Compression,
    ram_bytes: u64,
}

/// Looks for what is to be accepted.
struct Acceptor<'a, 'c> {
    volume: &'a CheckedVolume<'c>,
    stored: StoredChecksums<'a, 'c>,
    /// The new checksums, by address.
    sums: BTreeMap<u64, Checksum>,
    needed: Vec<Range<u64>>,
}

/// Looks at the files of `paths`, from the top level of the volume.
///
/// # Errors
/// `ENOENT`, `ENOTDIR`, `EISDIR` and `EINVAL` for a path that leads to no regular file, and when
/// data cannot be accepted: see the table above.
fn plan(volume: &CheckedVolume<'_>, paths: &[Vec<u8>]) -> Result<Acceptance> {
    let checksums = volume.tree(TreeId::CSUM);
    let checksums = checksums
        .ok_or_else(|| Error::corrupt(Structure::RootTree, "there is no checksum tree"))?;
    let mut acceptor = Acceptor {
        volume,
        stored: StoredChecksums::new(volume, checksums),
        sums: BTreeMap::new(),
        needed: Vec::new(),
    };
    let mut files = Vec::with_capacity(paths.len());
    for path in paths {
        let named = path.escape_ascii();
        let file = lookup::find(volume, path)?;
        let ranges = acceptor.accept_file(&file).map_err(|error| error.in_file(&named))?;
        let (subvolume, ino) = (file.root.id, file.ino);
        files.push(FileOfAcceptedData { path: path.clone(), subvolume, ino, ranges });
    }
    let sectors = runs(acceptor.sums.keys().copied(), volume.sector_size());
    let mut others = DataUsers::default();
    if !sectors.is_empty() {
        others = users_of(volume, &sectors)?;
    }
    let is_named = |user: &DataUser| {
        files.iter().any(|file| (file.subvolume, file.ino) == (user.subvolume, user.ino))
    };
    others.files.retain(|user| !is_named(user));
    let data = AcceptedData { files, others: others.files, are_more_others: others.are_more };
    let edits = acceptor.stored.edits(&sectors, &acceptor.sums);
    Ok(Acceptance { data, edits, needed: acceptor.needed })
}

impl Acceptance {
    /// What the caller wants to be accepted.
    ///
    /// # Errors
    /// Those of [`plan`], and for a volume that cannot be repaired.
    pub(super) fn of(
        devices: &[Arc<dyn BlockDevice>],
        options: &RepairOptions,
        watch: &CheckWatch<'_>,
    ) -> Result<Self> {
        if options.accepted.is_empty() {
            return Ok(Self::default());
        }
        let volume = check::open(devices.to_vec(), None, &options.check, watch)?;
        let chunks: Vec<_> = volume.storage.chunks().collect();
        require_repairable(&volume, &chunks)?;
        plan(&volume, &options.accepted)
    }

    /// Requires that all data of the files fits its checksums in `volume`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] with the first address whose data does not.
    pub(super) fn require_readable(&self, volume: &CheckedVolume<'_>) -> Result<()> {
        let Some(checksums) = volume.tree(TreeId::CSUM).filter(|_| !self.needed.is_empty()) else {
            return Ok(());
        };
        let stored = StoredChecksums::new(volume, checksums);
        for range in &self.needed {
            volume.require_going_on()?;
            if let Some(at) = bad_sectors(volume, &stored, range)?.first() {
                let problem = "it would still not fit its checksum; nothing was written";
                return Err(Error::corrupt_at(Structure::Data, *at, problem));
            }
        }
        Ok(())
    }
}

impl Acceptor<'_, '_> {
    fn accept_file(&mut self, file: &FoundFile) -> Result<Vec<AcceptedRange>> {
        let mut accepted: Vec<AcceptedRange> = Vec::new();
        if file.inode.flags.get() & inode_flags::NODATASUM != 0 {
            return Ok(accepted);
        }
        for part in self.parts_of(file)? {
            self.volume.require_going_on()?;
            let bad = bad_sectors(self.volume, &self.stored, &part.range)?;
            self.needed.push(part.range.clone());
            for &at in &bad {
                self.accept_sector(at)?;
            }
            let Some(&first) = bad.first() else { continue };
            if part.compression != Compression::None {
                self.require_decompresses(&part)?;
                let logical = Logical(first);
                accepted.push(AcceptedRange { offset: part.offset, len: part.len, logical });
                continue;
            }
            for run in runs(bad.iter().copied(), self.volume.sector_size()) {
                let offset = part.offset + (run.start - part.range.start);
                let len = run.end - run.start;
                match accepted.last_mut() {
                    Some(last) if last.offset + last.len == offset => last.len += len,
                    _ => accepted.push(AcceptedRange { offset, len, logical: Logical(run.start) }),
                }
            }
        }
        Ok(accepted)
    }

    /// The parts of a file that have checksums.
    fn parts_of(&self, file: &FoundFile) -> Result<Vec<ChecksummedPart>> {
        let key = |item_type, offset| Key::new(file.ino, item_type, offset);
        let range = KeyRange {
            first: key(ItemType::VERITY_DESC_ITEM, 0),
            last: key(ItemType::EXTENT_DATA, u64::MAX),
        };
        let (mut parts, mut failure) = (Vec::new(), None);
        let sector = self.volume.sector_size();
        let walked = self.volume.each_item(file.root, range, &mut |key, data| match part_of(
            key, data, sector,
        ) {
            Ok(part) => {
                parts.extend(part);
                ControlFlow::Continue(())
            }
            Err(error) => {
                failure = Some(error);
                ControlFlow::Break(())
            }
        });
        failure.map_or(Ok(()), Err)?;
        if !walked.is_whole() {
            let problem = "a block that says where its data is cannot be used";
            return Err(Error::corrupt(Structure::FileExtent, problem));
        }
        Ok(parts)
    }

    /// Computes the checksum of what is on the devices.
    fn accept_sector(&mut self, at: u64) -> Result<()> {
        if self.sums.len() >= most_sectors(self.volume) {
            return Err(too_many(self.volume));
        }
        let ways = self.volume.storage.read_every_way(self.volume, Logical(at))?;
        let (mut found, mut failure): (Option<(String, Vec<u8>)>, _) = (None, None);
        for way in ways {
            match (way.bytes, &found) {
                (Err(error), _) => failure = failure.or(Some(error)),
                (Ok(bytes), None) => found = Some((way.source, bytes)),
                (Ok(bytes), Some((source, first))) if bytes != *first => {
                    let problem = format!(
                        "no copy fits its checksum, and those at {source} and {} differ, so it is \
                         not known which one to accept: get the file out with extract \
                         --ignore-checksums, and write it anew; nothing was written",
                        way.source
                    );
                    return Err(Error::corrupt_at(Structure::Data, at, problem));
                }
                _ => {}
            }
        }
        let Some((_, bytes)) = found else {
            let problem = "no device has it";
            let error = failure.unwrap_or_else(|| Error::corrupt_at(Structure::Data, at, problem));
            return Err(error);
        };
        let sum = self.volume.superblock().checksum.compute(&bytes);
        self.sums.insert(at, sum);
        Ok(())
    }

    /// Requires that a compressed extent decompresses, with what was accepted.
    fn require_decompresses(&self, part: &ChecksummedPart) -> Result<()> {
        let (at, sector) = (part.range.start, self.volume.sector_size());
        let sums = self.stored.sums(&part.range, &self.sums);
        let mut bytes = vec![0; small(part.range.end - at)];
        self.volume.storage.read_data(self.volume, Logical(at), &mut bytes, Some(&sums))?;
        let mut plain = vec![0; small(part.ram_bytes.min(MAX_COMPRESSED_EXTENT))];
        let sector = u32::try_from(sector).unwrap_or(u32::MAX);
        match compress::decompress(part.compression, &bytes, sector, &mut plain) {
            Ok(_) => Ok(()),
            Err(malformed) => {
                let problem = format!(
                    "{}: it would not be readable with another checksum either; nothing was \
                     written",
                    malformed.problem
                );
                Err(Error::corrupt_at(Structure::CompressedExtent, at, problem))
            }
        }
    }
}

/// The part of a file that an item describes, if it has data with checksums.
fn part_of(key: Key, data: &[u8], sector: u64) -> Result<Option<ChecksummedPart>> {
    if matches!(key.item_type, ItemType::VERITY_DESC_ITEM | ItemType::VERITY_MERKLE_ITEM) {
        let what = "accepting data of a file with fs-verity: its own hashes would refuse it. Copy \
                    what can be read of it to a new file";
        return Err(Error::unsupported(Code::Unsupported, what));
    }
    if key.item_type != ItemType::EXTENT_DATA {
        return Ok(None);
    }
    let bad = |problem: String| Error::corrupt(Structure::FileExtent, problem);
    let extent = FileExtent::parse(data).map_err(|error| bad(error.problem.into_owned()))?;
    let (Some(range), FileExtentBody::Extent { num_bytes, .. }) =
        (used_range(&extent), extent.body)
    else {
        return Ok(None);
    };
    let is_aligned = range.start.is_multiple_of(sector) && range.end.is_multiple_of(sector);
    let is_short =
        extent.compression == Compression::None || range.end - range.start <= MAX_COMPRESSED_EXTENT;
    if !is_aligned || !is_short || range.is_empty() {
        return Err(bad(format!("the extent at {} in the file is impossible", key.offset)));
    }
    Ok(Some(ChecksummedPart {
        offset: key.offset,
        len: num_bytes,
        range,
        compression: extent.compression,
        ram_bytes: extent.ram_bytes,
    }))
}

/// The sectors of `range` that no copy fits the checksum of, or that have none. They ascend.
fn bad_sectors(
    volume: &CheckedVolume<'_>,
    stored: &StoredChecksums<'_, '_>,
    range: &Range<u64>,
) -> Result<Vec<u64>> {
    let bad = bad_data_in(volume, stored.root, range);
    volume.require_going_on()?;
    let mut ranges = bad.all_ranges().ok_or_else(|| too_many(volume))?;
    ranges.extend(stored.missing(range)?);
    let sectors = |one: &Range<u64>| (one.start..one.end).step_by(small(volume.sector_size()));
    let most = most_sectors(volume);
    let mut all: Vec<_> = ranges.iter().flat_map(sectors).take(most + 1).collect();
    if all.len() > most {
        return Err(too_many(volume));
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

/// The most sectors that are accepted at once.
fn most_sectors(volume: &CheckedVolume<'_>) -> usize {
    small(volume.memory_bytes() / 4 / CHECKSUM_BYTES)
}

fn too_many(volume: &CheckedVolume<'_>) -> Error {
    let what = format!(
        "accepting more than {} sectors at once: give the repair more memory, or name fewer files",
        most_sectors(volume)
    );
    Error::unsupported(Code::Unsupported, what)
}

/// Joins sectors that follow each other.
fn runs(sectors: impl Iterator<Item = u64>, sector: u64) -> Vec<Range<u64>> {
    let mut runs = Vec::<Range<u64>>::new();
    for at in sectors {
        match runs.last_mut() {
            Some(last) if last.end == at => last.end += sector,
            _ => runs.push(at..at.saturating_add(sector)),
        }
    }
    runs
}

/// An offset in a buffer in memory.
fn small(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}
