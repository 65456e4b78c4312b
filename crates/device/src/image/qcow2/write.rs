//! Writing and discarding parts of the disk.
//!
//! | target | where the data goes |
//! |---|---|
//! | a unit that is stored in a cluster with a count of 1 | in place, while other requests go on |
//! | another unit of such a cluster | there, with the rest of the unit; then the entry says so |
//! | a shared, compressed or missing cluster | to a new cluster; then the entry leads there |
//!
//! The file has the data before the entry in memory changes. The [committer](super::commit) sees to
//! it that the medium gets both in this order.

use std::io;
use std::ops::Range;

use super::Qcow2Disk;
use super::layout::L2Entry;
use super::tables::Qcow2Tables;
use crate::image::unsupported;

/// How many bytes are written, or discarded, under one exclusive lock of the tables: a multiple of
/// the largest cluster.
const PIECE_BYTES: u64 = 2 << 20;
const DISCARDED_PIECE_BYTES: u64 = 256 << 20;

/// Where a part of a request within one cluster goes.
#[derive(Clone, Debug)]
struct ClusterWrite {
    /// The bytes of the cluster to write, and the byte of the file at which the first of them goes.
    span: Range<u64>,
    place: u64,
    /// The change of the entry that follows the write.
    change: Option<EntryChange>,
}

/// A change of an entry.
#[derive(Clone, Debug)]
struct EntryChange {
    entry_at: u64,
    old: L2Entry,
    new: L2Entry,
}

impl EntryChange {
    /// Whether the new entry leads to another cluster than the old one.
    fn is_moved(&self) -> bool {
        self.old.compressed.is_some() || self.old.host != self.new.host
    }
}

/// A part of a request that one write puts into the file.
#[derive(Debug, Default)]
struct WriteRun {
    place: u64,
    data: Range<usize>,
    changes: Vec<EntryChange>,
}

impl Qcow2Disk {
    /// Writes `data` at byte `at` of the disk. The caller has checked the range.
    pub(super) fn write(&self, at: u64, data: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < data.len() {
            self.check_not_failed()?;
            self.commit_if_needed()?;
            done += self.write_in_place(at + done as u64, &data[done..])?;
            let here = at + done as u64;
            let left = usize::try_from(PIECE_BYTES - here % PIECE_BYTES).expect("2 MiB");
            let piece = &data[done..(done + left).min(data.len())];
            self.write_piece(here, piece)?;
            done += piece.len();
        }
        Ok(())
    }

    /// Writes as much of the front of `data` as can be written in place. Returns how many bytes
    /// that is.
    fn write_in_place(&self, at: u64, data: &[u8]) -> io::Result<usize> {
        let tables = self.tables.read();
        let (mut place, mut run) = (0, 0..0);
        for (here, part) in self.by_clusters(at, data.len()) {
            let entry = tables.entry(here)?;
            let inside = self.layout.inside(here);
            let touched = self.layout.units(&(inside..inside + part.len() as u64));
            if touched & !entry.stored != 0 || !tables.is_written_in_place(&entry)? {
                break;
            }
            if place + run.len() as u64 != entry.host + inside {
                self.file.write(place, &data[run])?;
                (place, run) = (entry.host + inside, part.start..part.start);
            }
            run.end = part.end;
        }
        self.file.write(place, &data[run.clone()])?;
        Ok(run.end)
    }

    /// Writes `data`, and allocates the clusters that it needs.
    fn write_piece(&self, at: u64, data: &[u8]) -> io::Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let mut tables = self.tables.write();
        self.check_not_failed()?;
        let mut run = WriteRun::default();
        let mut result = Ok(());
        for (here, part) in self.by_clusters(at, data.len()) {
            result = self.write_cluster(&mut tables, &mut run, here, part, data);
            if result.is_err() {
                break;
            }
        }
        let finished = self.finish(&mut tables, run, data);
        result.and(finished)
    }

    /// Writes `data[part]`, all in one cluster, or adds it to `run`.
    fn write_cluster(
        &self,
        tables: &mut Qcow2Tables,
        run: &mut WriteRun,
        here: u64,
        part: Range<usize>,
        data: &[u8],
    ) -> io::Result<()> {
        let (inside, part_len) = (self.layout.inside(here), part.len() as u64);
        let written = inside..inside + part_len;
        let ClusterWrite { span, place, change } = self.plan(tables, here, &written)?;
        if span != written {
            // Fill the rest of the units around the data with their old contents.
            let old = here - inside + span.start;
            let mut bytes = vec![0; usize::try_from(span.end - span.start).expect("2 MiB")];
            let front = usize::try_from(inside - span.start).expect("2 MiB");
            let (before, rest) = bytes.split_at_mut(front);
            let (middle, behind) = rest.split_at_mut(part.len());
            middle.copy_from_slice(&data[part]);
            let rest = self.read(tables, old, before);
            let rest = rest.and_then(|()| self.read(tables, here + part_len, behind));
            let changes: Vec<_> = change.into_iter().collect();
            if let Err(error) = rest {
                return self.take_back(tables, &changes).and(Err(error));
            }
            let data = 0..bytes.len();
            return self.finish(tables, WriteRun { place, data, changes }, &bytes);
        }
        let mut result = Ok(());
        if run.place + run.data.len() as u64 != place {
            let next = WriteRun { place, data: part.start..part.start, changes: Vec::new() };
            result = self.finish(tables, std::mem::replace(run, next), data);
        }
        run.data.end = part.end;
        run.changes.extend(change);
        result
    }

    /// Decides where the bytes `written` of the cluster with byte `here` of the disk go.
    fn plan(
        &self,
        tables: &mut Qcow2Tables,
        here: u64,
        written: &Range<u64>,
    ) -> io::Result<ClusterWrite> {
        let touched = self.layout.units(written);
        let entry = tables.entry(here)?;
        if tables.is_written_in_place(&entry)? && touched & !entry.stored == 0 {
            let place = entry.host + written.start;
            return Ok(ClusterWrite { span: written.clone(), place, change: None });
        }
        tables.check_drop(&entry)?;
        let (entry_at, old) = tables.entry_to_change(here)?;
        let mut new = L2Entry { is_copied: true, compressed: None, ..old };
        let is_moved = !tables.is_written_in_place(&old)?;
        if is_moved {
            new.host = tables.allocate()? << self.layout.cluster_bits;
        }
        let is_empty = old.stored == 0 && old.compressed.is_none();
        let span = if is_moved && !is_empty {
            0..self.layout.cluster_bytes()
        } else if is_moved && self.backing.is_none() && self.file.is_untouched_from(new.host) {
            // The file ends before the new cluster, so the bytes around the data are zeros without
            // a write.
            written.clone()
        } else {
            self.span(written, old.stored)
        };
        let kept = if old.compressed.is_some() { self.layout.all_units() } else { old.stored };
        new.stored = kept | touched;
        new.zeros &= !touched;
        let place = new.host + span.start;
        Ok(ClusterWrite { span, place, change: Some(EntryChange { entry_at, old, new }) })
    }

    /// The bytes `written` of a cluster, extended to whole units where a unit is not `stored` yet.
    fn span(&self, written: &Range<u64>, stored: u32) -> Range<u64> {
        let unit_bits = self.layout.unit_bits();
        let is_stored = |at: u64| stored >> (at >> unit_bits) & 1 != 0;
        let Range { mut start, mut end } = *written;
        if !is_stored(start) {
            start = start >> unit_bits << unit_bits;
        }
        if !is_stored(end - 1) {
            end = end.next_multiple_of(1 << unit_bits);
        }
        start..end
    }

    /// Writes a run to the file, and then changes its entries.
    fn finish(&self, tables: &mut Qcow2Tables, run: WriteRun, data: &[u8]) -> io::Result<()> {
        let WriteRun { place, data: range, changes } = run;
        if let Err(error) = self.file.write(place, &data[range]) {
            return self.take_back(tables, &changes).and(Err(error));
        }
        for (done, change) in changes.iter().enumerate() {
            if let Err(error) = tables.set_entry(change.entry_at, &change.new) {
                return self.take_back(tables, &changes[done..]).and(Err(error));
            }
            if change.is_moved() {
                tables.drop_references(&change.old);
            }
        }
        Ok(())
    }

    /// Frees the new clusters of changes that were not made.
    fn take_back(&self, tables: &mut Qcow2Tables, changes: &[EntryChange]) -> io::Result<()> {
        let mut moved = changes.iter().filter(|change| change.is_moved());
        moved.try_for_each(|change| tables.free(change.new.host >> self.layout.cluster_bits))
    }

    /// Discards the whole units in a range of the disk. The caller has checked the range.
    pub(super) fn discard(&self, at: u64, len: u64) -> io::Result<()> {
        if self.layout.version < 3 && self.backing.is_some() {
            return Err(unsupported(
                "in an image of version 2, what is discarded shows what its backing file has",
            ));
        }
        let unit_bytes = 1 << self.layout.unit_bits();
        let mut here = at.next_multiple_of(unit_bytes);
        let end = match at + len {
            end if end == self.layout.size_bytes => end.next_multiple_of(unit_bytes),
            end => end / unit_bytes * unit_bytes,
        };
        while here < end {
            self.commit_if_needed()?;
            let piece_end = (here / DISCARDED_PIECE_BYTES + 1) * DISCARDED_PIECE_BYTES;
            here = self.discard_piece(here..piece_end.min(end))?;
        }
        Ok(())
    }

    /// Discards `range`. It skips the whole span of an L2 table that does not exist, so it may end
    /// past `range`. Returns the byte at which it ended.
    fn discard_piece(&self, range: Range<u64>) -> io::Result<u64> {
        let mut tables = self.tables.write();
        self.check_not_failed()?;
        let mut here = range.start;
        while here < range.end {
            if !tables.has_table(here)? {
                let span_bits = self.layout.table_span_bits();
                here = ((here >> span_bits) + 1) << span_bits;
                continue;
            }
            let inside = self.layout.inside(here);
            let left = (self.layout.cluster_bytes() - inside).min(range.end - here);
            self.discard_in_cluster(&mut tables, here, &(inside..inside + left))?;
            here += left;
        }
        Ok(here)
    }

    fn discard_in_cluster(
        &self,
        tables: &mut Qcow2Tables,
        here: u64,
        range: &Range<u64>,
    ) -> io::Result<()> {
        let discarded = self.layout.units(range);
        let after = |old: &L2Entry| {
            let gone = match old.compressed {
                Some(_) if discarded == self.layout.all_units() => discarded,
                Some(_) => return *old,
                None => old.stored & discarded,
            };
            let stored = old.stored & !gone;
            let zeros = match self.backing {
                // Without an entry, a read still shows what the backing file has.
                Some(_) => old.zeros | gone,
                None => old.zeros & !discarded,
            };
            let (host, is_copied) =
                if stored == 0 { (0, false) } else { (old.host, old.is_copied) };
            L2Entry { host, is_copied, stored, zeros, compressed: None }
        };
        let old = tables.entry(here)?;
        if after(&old) == old {
            return Ok(());
        }
        tables.check_drop(&old)?;
        let (entry_at, old) = tables.entry_to_change(here)?;
        let change = EntryChange { entry_at, old, new: after(&old) };
        tables.set_entry(entry_at, &change.new)?;
        if change.is_moved() {
            tables.drop_references(&change.old);
        }
        Ok(())
    }

    /// Splits a request for `len` bytes at byte `at` of the disk at cluster boundaries. Each item
    /// is the byte of the disk at which a part begins, and its range in the buffer.
    fn by_clusters(&self, at: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>)> {
        let layout = self.layout;
        let mut done = 0;
        std::iter::from_fn(move || {
            let here = at + done as u64;
            let left = usize::try_from(layout.cluster_bytes() - layout.inside(here));
            let part = done..(done + left.expect("2 MiB")).min(len);
            done = part.end;
            (!part.is_empty()).then_some((here, part))
        })
    }
}
