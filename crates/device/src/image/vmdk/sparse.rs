//! Sparse extents: files that store only the parts of a disk, its *grains*, that were written.
//!
//! ```text
//!   sector 0    header: size, grain size, where the directories are     12..20, 20..28, 48..64
//!               text of the descriptor                                  28..44
//!   directory   the sector of each table; 0: none of its grains is there
//!   table       the sector of each of its grains (512 mostly); 0: it was never written
//! ```
//!
//! There are two directories, each with its own tables. Readers use the primary one. The redundant
//! one is a copy.
//!
//! # What a power cut leaves
//!
//! A new grain goes to the end of the file. The entry for it stays in memory until the next
//! [`flush`](BlockDevice::flush), which writes in this order, with a barrier between two steps:
//!
//! | step | what is written | what it refers to is on the medium since |
//! |---|---|---|
//! | 1 | grains, by the earlier writes | |
//! | 2 | the tables with new entries, in both copies | step 1 |
//! | 3 | directory entries for tables that are new | step 2 |
//!
//! The first write to an opened image may overwrite a grain in place. So before it changes a grain,
//! it stores the mark of an unclean shutdown and the new content id, and flushes them.
//!
//! So every table refers only to grains that are whole. At worst, the two copies differ in entries
//! that no flush has promised, and the end of the file has grains to which no table refers. Opening
//! an image for writing checks both copies: the primary tables are right, and the first flush after
//! a write makes the redundant ones equal to them.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::text::{ContentId, DescriptorText};
use super::{SECTOR_BYTES, WAY};
use crate::fields::{invalid, u32_le, u64_le};
use crate::image::mapped::{BlockPlace, MappedDevice, numbers, part};
use crate::image::{TABLE_BYTES_MAX, unsupported};
use crate::{BlockDevice, request_range, together};

const HAS_REDUNDANT: u32 = 1 << 1;
const HAS_ZEROED_GRAINS: u32 = 1 << 2;
const HAS_DEFLATED: u32 = 1 << 16;
const HAS_MARKERS: u32 = 1 << 17;

/// The table entry of a grain of zeros, if the header has [`HAS_ZEROED_GRAINS`].
const ZEROED: u32 = 1;

/// The first bytes of a sparse extent of ESX, which has another header.
pub(in crate::image) const COWD: &[u8] = b"COWD";

/// The byte of the header that is 1 while the file is being written.
const UNCLEAN_AT: u64 = 72;

/// The header of a sparse extent.
struct SparseHeader {
    flags: u32,
    size_bytes: u64,
    grain_bytes: u64,
    per_table: u64,
    /// This header is the copy at the end of the file. The writer of a stream does not know yet
    /// where the directory will be when it writes the first header.
    is_footer: bool,
    /// The primary directory, and the redundant one.
    directories: Vec<u64>,
    /// Where the text of the descriptor begins in the file, and its length in bytes.
    text: (u64, u64),
}

impl SparseHeader {
    fn read(below: &dyn BlockDevice) -> io::Result<Self> {
        const AT_END: u64 = u64::MAX;
        let mut header = part(below, 0, SECTOR_BYTES)?;
        let is_footer = u64_le(&header, 56) == AT_END;
        if is_footer {
            // The last three sectors are a marker, the header again, and the end of the stream.
            let at = below.size_bytes().checked_sub(2 * SECTOR_BYTES);
            let at = at.ok_or_else(|| invalid("its end is missing"))?;
            header = part(below, at, SECTOR_BYTES)?;
        }
        if header.starts_with(COWD) {
            return Err(unsupported(format!("a sparse VMDK of ESX is not read here: {WAY}")));
        }
        let (version, flags) = (u32_le(&header, 4), u32_le(&header, 8));
        let bytes_at = |at: usize| {
            let sectors = u64_le(&header, at).checked_mul(SECTOR_BYTES);
            sectors.ok_or_else(|| invalid("a number in its header is impossible"))
        };
        let mut directories = vec![bytes_at(56)?];
        if flags & HAS_REDUNDANT != 0 && flags & HAS_DEFLATED == 0 {
            directories.push(bytes_at(48)?);
        }
        let found = Self {
            flags,
            size_bytes: bytes_at(12)?,
            grain_bytes: bytes_at(20)?,
            per_table: u32_le(&header, 44).into(),
            is_footer,
            directories,
            text: (bytes_at(28)?, bytes_at(36)?.min(super::DESCRIPTOR_BYTES_MAX)),
        };
        let is_possible = header.starts_with(b"KDMV")
            && found.grain_bytes.is_power_of_two()
            && (4096..=TABLE_BYTES_MAX).contains(&found.grain_bytes)
            && (1..=4096).contains(&found.per_table);
        if !is_possible {
            return Err(invalid("its header is damaged"));
        }
        if !(1..=3).contains(&version) {
            return Err(unsupported(format!(
                "a VMDK of version {version} is not read here: {WAY}"
            )));
        }
        if found.grains().saturating_mul(4) > TABLE_BYTES_MAX {
            return Err(unsupported(format!("a VMDK with so many grains is not read here: {WAY}")));
        }
        Ok(found)
    }

    /// Refuses images that this crate can only read.
    fn check_writable(&self) -> io::Result<()> {
        let refused = |what: &str| {
            Err(unsupported(format!(
                "{what} is only read here, and not written: qemu-img convert -O qcow2 IN OUT \
                 makes an image that is"
            )))
        };
        // New grains would go behind the footer, which readers expect at the end.
        if self.is_footer || self.flags & (HAS_DEFLATED | HAS_MARKERS) != 0 {
            return refused("a stream-optimised VMDK");
        }
        // A torn write of one table could damage another table in the same sector.
        if !(self.per_table * 4).is_multiple_of(SECTOR_BYTES) {
            return refused(&format!("a VMDK with {} entries in a table", self.per_table));
        }
        Ok(())
    }

    fn grains(&self) -> u64 {
        self.size_bytes.div_ceil(self.grain_bytes)
    }

    fn tables(&self) -> u64 {
        self.grains().div_ceil(self.per_table)
    }

    /// Reads the tables of the directory at `directory_at`. Returns the sector of each table, and
    /// the entries of all of them.
    fn entries(
        &self,
        below: &dyn BlockDevice,
        directory_at: u64,
    ) -> io::Result<(Vec<u32>, Vec<u32>)> {
        let tables = numbers(below, directory_at, self.tables(), u32_le)?;
        let mut entries = Vec::new();
        for &at in &tables {
            match at {
                0 => entries.extend((0..self.per_table).map(|_| 0)),
                at => entries.extend(numbers(below, bytes(at), self.per_table, u32_le)?),
            }
        }
        Ok((tables, entries))
    }

    fn is_zeros(&self, entry: u32) -> bool {
        entry == 0 || entry == ZEROED && self.flags & HAS_ZEROED_GRAINS != 0
    }
}

/// The byte of the file at which a sector begins.
fn bytes(sector: u32) -> u64 {
    u64::from(sector) * SECTOR_BYTES
}

/// Opens a disk in one file: a sparse extent that contains its descriptor.
///
/// # Errors
/// Those of the device; of kind `InvalidData` for a damaged image, and `Unsupported`, with the next
/// step, for one that this crate cannot read or, if `is_writable`, cannot write.
pub fn open_vmdk(
    below: Arc<dyn BlockDevice>,
    is_writable: bool,
) -> io::Result<Arc<dyn BlockDevice>> {
    let header = SparseHeader::read(&*below)?;
    let text = DescriptorText::read(&*below, header.text.0, header.text.1)?;
    if text.extents.is_empty() {
        return Err(unsupported(
            "it is one of the files of a VMDK: name the one that has the names of all of them",
        ));
    }
    if text.extents.len() > 1 || text.has_parent {
        return Err(unsupported(format!("a VMDK that needs other files is not read here: {WAY}")));
    }
    let extent = &text.extents[0];
    extent.check_readable()?;
    if extent.kind != "SPARSE" {
        return Err(extent.unknown_kind());
    }
    if is_writable {
        text.check_writable()?;
        extent.check_writable()?;
    }
    open(below, &header, Some(text.content_id), is_writable)
}

/// Opens a part of a disk: a sparse extent that a descriptor in another file names.
pub(super) fn open_extent(
    below: Arc<dyn BlockDevice>,
    is_writable: bool,
) -> io::Result<Arc<dyn BlockDevice>> {
    let header = SparseHeader::read(&*below)?;
    open(below, &header, None, is_writable)
}

fn open(
    below: Arc<dyn BlockDevice>,
    header: &SparseHeader,
    content_id: Option<ContentId>,
    is_writable: bool,
) -> io::Result<Arc<dyn BlockDevice>> {
    if is_writable {
        header.check_writable()?;
    }
    let (primary, entries) = header.entries(&*below, header.directories[0])?;
    if header.flags & HAS_DEFLATED != 0 {
        let place = |entry| match entry {
            entry if header.is_zeros(entry) => BlockPlace::Zeros,
            entry => BlockPlace::Deflated(bytes(entry)),
        };
        let table = entries.into_iter().map(place).collect();
        return MappedDevice::open(below, header.size_bytes, header.grain_bytes, table);
    }
    let mut state = SparseState {
        entries,
        copies: vec![GrainTables { directory_at: header.directories[0], tables: primary }],
        changed: BTreeSet::new(),
        new: BTreeSet::new(),
        end: 0,
        is_marked: false,
    };
    if is_writable {
        for &directory_at in &header.directories[1..] {
            let (tables, entries) = header.entries(&*below, directory_at)?;
            let per_table = usize::try_from(header.per_table).map_err(io::Error::other)?;
            let pairs = state.entries.chunks(per_table).zip(entries.chunks(per_table));
            let differ = pairs.enumerate().filter(|(_, (one, other))| one != other);
            state.changed.extend(differ.map(|(number, _)| number));
            state.copies.push(GrainTables { directory_at, tables });
        }
        let used_end = state.check(&*below, header)?;
        state.end = used_end.max(below.size_bytes()).next_multiple_of(header.grain_bytes);
    }
    Ok(Arc::new(SparseDevice {
        name: below.name().to_owned(),
        below,
        size_bytes: header.size_bytes,
        grain_bytes: header.grain_bytes,
        per_table: usize::try_from(header.per_table).map_err(io::Error::other)?,
        has_zeroed_grains: header.flags & HAS_ZEROED_GRAINS != 0,
        is_writable,
        content_id,
        state: RwLock::new(state),
        flush: Mutex::new(()),
    }))
}

/// A directory and its tables.
#[derive(Debug)]
struct GrainTables {
    directory_at: u64,
    /// The sector of each table; 0 for a table that does not exist.
    tables: Vec<u32>,
}

/// The part of an extent that writes change.
#[derive(Debug)]
struct SparseState {
    /// The sector of each grain, as the tables have it after the next flush.
    entries: Vec<u32>,
    /// The primary directory, and the redundant one.
    copies: Vec<GrainTables>,
    /// The numbers of the tables that the next flush writes.
    changed: BTreeSet<usize>,
    /// The new tables, by copy and number, whose directory entry is not on the medium yet.
    new: BTreeSet<(usize, usize)>,
    /// The byte of the file for the next grain or table: the end, rounded up to a grain.
    end: u64,
    /// The mark of an unclean shutdown is on the medium.
    is_marked: bool,
}

impl SparseState {
    /// Refuses to write an image whose tables or grains overlap, or lie outside of the file.
    /// Returns the end of the last one.
    fn check(&self, below: &dyn BlockDevice, header: &SparseHeader) -> io::Result<u64> {
        let damaged = |what| invalid(format!("{what}, so it is not written: {WAY}"));
        let mut grains: Vec<u32> = self.entries.clone();
        grains.retain(|&entry| !header.is_zeros(entry));
        grains.sort_unstable();
        let grain_sectors = header.grain_bytes / SECTOR_BYTES;
        if grains.windows(2).any(|two| u64::from(two[1] - two[0]) < grain_sectors) {
            return Err(damaged("two of its grains have bytes in common"));
        }
        let table_bytes = header.per_table * 4;
        let (text_at, text_bytes) = header.text;
        let mut others = vec![(0, SECTOR_BYTES), (text_at, text_bytes)];
        for copy in &self.copies {
            others.push((copy.directory_at, header.tables() * 4));
            let tables = copy.tables.iter().filter(|&&at| at != 0);
            others.extend(tables.map(|&at| (bytes(at), table_bytes)));
        }
        others.retain(|(_, len)| *len > 0);
        others.sort_unstable();
        if others.windows(2).any(|two| two[0].0.saturating_add(two[0].1) > two[1].0) {
            return Err(damaged("two of its tables have bytes in common"));
        }
        for &(at, len) in &others {
            // The first grain that ends behind `at`.
            let next = grains.partition_point(|&grain| bytes(grain) + header.grain_bytes <= at);
            if grains.get(next).is_some_and(|&grain| bytes(grain) < at.saturating_add(len)) {
                return Err(damaged("one of its grains is where a table is"));
            }
        }
        let last = grains.last().map_or(0, |&grain| bytes(grain));
        if last >= below.size_bytes() {
            return Err(damaged("one of its grains is behind the end of the file"));
        }
        let end = others.last().map_or(0, |(at, len)| at.saturating_add(*len));
        if end > below.size_bytes() {
            return Err(damaged("its descriptor is behind the end of the file"));
        }
        Ok(if grains.is_empty() { end } else { end.max(last + header.grain_bytes) })
    }
}

/// The disk in a sparse extent, or a part of it.
#[derive(Debug)]
struct SparseDevice {
    below: Arc<dyn BlockDevice>,
    name: String,
    size_bytes: u64,
    grain_bytes: u64,
    per_table: usize,
    has_zeroed_grains: bool,
    is_writable: bool,
    /// The content id in the descriptor of this file; `None` when the descriptor is in another
    /// file.
    content_id: Option<ContentId>,
    state: RwLock<SparseState>,
    /// The flushing thread holds it. Without it, the slower of two flushes could write an older
    /// table over a newer one.
    flush: Mutex<()>,
}

/// A part of a request that is contiguous in the file.
struct GrainRun {
    /// Its first byte in the file; `None` for grains that read as zeros.
    place: Option<u64>,
    len: usize,
}

impl SparseDevice {
    /// The first byte of grain `number` in the file; `None` when it reads as zeros.
    fn place(&self, state: &SparseState, number: u64) -> io::Result<Option<u64>> {
        let index = usize::try_from(number).map_err(io::Error::other)?;
        // The header check guarantees an entry for every grain of the disk.
        let entry = state.entries[index];
        let is_zeros = entry == 0 || entry == ZEROED && self.has_zeroed_grains;
        Ok((!is_zeros).then(|| bytes(entry)))
    }

    /// The contiguous parts of a range of the disk.
    fn runs(&self, state: &SparseState, offset: u64, len: u64) -> io::Result<Vec<GrainRun>> {
        let range = request_range(self.size_bytes, offset, len)?;
        let mut runs: Vec<GrainRun> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let inside = at % self.grain_bytes;
            let len = (self.grain_bytes - inside).min(range.end - at);
            let place = self.place(state, at / self.grain_bytes)?.map(|place| place + inside);
            at += len;
            let len = usize::try_from(len).map_err(io::Error::other)?;
            match runs.last_mut() {
                Some(last) if last.place.map(|place| place + last.len as u64) == place => {
                    last.len += len;
                }
                _ => runs.push(GrainRun { place, len }),
            }
        }
        Ok(runs)
    }

    /// Sets the mark of an unclean shutdown and changes the content id. Both are on the medium when
    /// it returns.
    fn mark(&self, state: &mut SparseState) -> io::Result<()> {
        if !state.is_marked {
            self.below.write_at(UNCLEAN_AT, &[1])?;
            match &self.content_id {
                Some(content_id) => content_id.change(&*self.below)?,
                None => self.below.flush()?,
            }
            state.is_marked = true;
        }
        Ok(())
    }

    /// The sector for the next grain or table.
    fn end_sector(state: &SparseState) -> io::Result<u32> {
        u32::try_from(state.end / SECTOR_BYTES).map_err(|_| {
            let what = "a sparse VMDK cannot be larger than 2 TiB";
            io::Error::new(io::ErrorKind::StorageFull, what)
        })
    }

    /// Reserves `len` bytes at the end of the file.
    fn take(&self, state: &mut SparseState, len: u64) {
        state.end = (state.end + len).next_multiple_of(self.grain_bytes);
    }

    /// Writes `data` to a grain that the file does not store yet, with zeros around it.
    fn write_new(
        &self,
        state: &mut SparseState,
        number: u64,
        inside: u64,
        data: &[u8],
    ) -> io::Result<()> {
        let sector = Self::end_sector(state)?;
        let zeros = |len: u64| usize::try_from(len).map(|len| vec![0; len]);
        let before = zeros(inside).map_err(io::Error::other)?;
        let after = self.grain_bytes - inside - data.len() as u64;
        let after = zeros(after).map_err(io::Error::other)?;
        let grain = [&before[..], data, &after].map(IoSlice::new);
        self.below.write_vectored_at(bytes(sector), &grain)?;
        self.take(state, self.grain_bytes);
        let index = usize::try_from(number).map_err(io::Error::other)?;
        state.entries[index] = sector;
        state.changed.insert(index / self.per_table);
        Ok(())
    }

    /// Takes the changed tables: the bytes of each, and where they go.
    fn changed(&self, state: &mut SparseState) -> io::Result<FlushedChanges> {
        let table_bytes = self.per_table as u64 * 4;
        for &number in &state.changed.clone() {
            for copy in 0..state.copies.len() {
                if state.copies[copy].tables[number] == 0 {
                    // The sector stays reserved: a flush that fails is tried again with the same
                    // sector.
                    state.copies[copy].tables[number] = Self::end_sector(state)?;
                    self.take(state, table_bytes);
                    state.new.insert((copy, number));
                }
            }
        }
        let mut changed =
            FlushedChanges { numbers: state.changed.clone(), ..FlushedChanges::default() };
        for &number in &state.changed {
            let entries = &state.entries[number * self.per_table..][..self.per_table];
            let table: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
            for (copy, GrainTables { directory_at, tables }) in state.copies.iter().enumerate() {
                changed.tables.insert(bytes(tables[number]), table.clone());
                if state.new.contains(&(copy, number)) {
                    let at = directory_at + number as u64 * 4;
                    changed.directories.push((at, tables[number]));
                    changed.new.push((copy, number));
                }
            }
        }
        state.changed.clear();
        Ok(changed)
    }

    /// Writes tables, and then the directory entries that lead to them, with barriers between them.
    fn store(&self, changed: &FlushedChanges) -> io::Result<()> {
        self.below.flush()?;
        if changed.tables.is_empty() {
            return Ok(());
        }
        for (at, table) in &changed.tables {
            self.below.write_at(*at, table)?;
        }
        self.below.flush()?;
        if changed.directories.is_empty() {
            return Ok(());
        }
        for (at, sector) in &changed.directories {
            self.below.write_at(*at, &sector.to_le_bytes())?;
        }
        self.below.flush()
    }

    /// Fills `buf` with `read`, which reads from a byte of the file on.
    fn read_by(
        &self,
        offset: u64,
        buf: &mut [u8],
        read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let runs = self.runs(&self.state.read(), offset, buf.len() as u64)?;
        let mut rest = buf;
        for GrainRun { place, len } in runs {
            let (part, behind) = rest.split_at_mut(len);
            match place {
                Some(place) => read(place, part)?,
                None => part.fill(0),
            }
            rest = behind;
        }
        Ok(())
    }

    fn check_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if !self.is_writable {
            return Err(rustix::io::Errno::ROFS.into());
        }
        request_range(self.size_bytes, offset, len).map(drop)
    }
}

/// What one flush writes.
#[derive(Default)]
struct FlushedChanges {
    numbers: BTreeSet<usize>,
    /// The bytes of each table, by their offset in the file.
    tables: BTreeMap<u64, Vec<u8>>,
    /// The offset of each directory entry in the file, and the sector that it holds.
    directories: Vec<(u64, u32)>,
    /// As [`SparseState::new`].
    new: Vec<(usize, usize)>,
}

impl BlockDevice for SparseDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_by(offset, buf, |place, part| self.below.read_at(place, part))
    }

    fn read_medium_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_by(offset, buf, |place, part| self.below.read_medium_at(place, part))
    }

    fn prefetch(&self, offset: u64, len: u64) {
        let len = len.min(self.size_bytes.saturating_sub(offset));
        let runs = self.runs(&self.state.read(), offset, len);
        for GrainRun { place, len } in runs.into_iter().flatten() {
            if let Some(place) = place {
                self.below.prefetch(place, len as u64);
            }
        }
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.check_change(offset, buf.len() as u64)?;
        let (runs, is_marked) = {
            let state = self.state.read();
            (self.runs(&state, offset, buf.len() as u64)?, state.is_marked)
        };
        let mut rest = buf;
        if is_marked && runs.iter().all(|run| run.place.is_some()) {
            // All grains exist, so no table changes.
            for GrainRun { place, len } in runs {
                let (part, behind) = rest.split_at(len);
                self.below.write_at(place.unwrap_or_default(), part)?;
                rest = behind;
            }
            return Ok(());
        }
        let state = &mut *self.state.write();
        self.mark(state)?;
        let mut at = offset;
        while !rest.is_empty() {
            let (number, inside) = (at / self.grain_bytes, at % self.grain_bytes);
            let left = usize::try_from(self.grain_bytes - inside).map_err(io::Error::other)?;
            let (part, behind) = rest.split_at(left.min(rest.len()));
            match self.place(state, number)? {
                Some(place) => self.below.write_at(place + inside, part)?,
                None => self.write_new(state, number, inside, part)?,
            }
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        self.write_at(offset, &together(bufs))
    }

    fn flush(&self) -> io::Result<()> {
        if !self.is_writable {
            return Ok(());
        }
        let _alone = self.flush.lock();
        let changed = {
            let state = &mut *self.state.write();
            // If only the copies differ, wait: an image stays unchanged until its first write.
            if state.is_marked { self.changed(state)? } else { FlushedChanges::default() }
        };
        let result = self.store(&changed);
        let state = &mut *self.state.write();
        match &result {
            Ok(()) => state.new.retain(|one| !changed.new.contains(one)),
            Err(_) => state.changed.extend(changed.numbers),
        }
        result
    }

    /// Discards the grains of the range that exist. They stay allocated.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.check_change(offset, len)?;
        let there: Vec<_> = {
            let state = &mut *self.state.write();
            let runs = self.runs(state, offset, len)?.into_iter();
            let there: Vec<_> = runs.filter_map(|run| Some((run.place?, run.len))).collect();
            if !there.is_empty() {
                self.mark(state)?;
            }
            there
        };
        there.into_iter().try_for_each(|(place, len)| self.below.discard(place, len as u64))
    }
}

impl Drop for SparseDevice {
    fn drop(&mut self) {
        // No caller waits for this flush, so its error is dropped. The file keeps the mark of an
        // unclean shutdown then, and loses only what the caller never flushed.
        if self.is_writable && self.state.get_mut().is_marked && self.flush().is_ok() {
            let _ = self.below.write_at(UNCLEAN_AT, &[0]).and_then(|()| self.below.flush());
        }
    }
}
