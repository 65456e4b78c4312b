//! Reading the disk.

use std::io;
use std::sync::Arc;

use super::Qcow2Disk;
use super::compressed::unpack;
use super::file::read_or_zeros;
use super::layout::{CompressedCluster, L2Entry};
use super::tables::{Qcow2Tables, behind_the_end};

/// Where the bytes of a part of the disk come from.
#[derive(Clone, Copy, Debug)]
enum ReadSource {
    /// In the file, from this byte on.
    File(u64),
    Compressed(CompressedCluster),
    Zeros,
    Backing,
}

/// A part of a request that one read serves.
#[derive(Clone, Copy, Debug)]
struct ReadRun {
    source: ReadSource,
    start: usize,
    end: usize,
}

impl ReadRun {
    /// Whether `next` continues the source of this run, so that one read serves both.
    fn is_followed_by(self, next: ReadSource) -> bool {
        match (self.source, next) {
            (ReadSource::File(at), ReadSource::File(next)) => {
                at + (self.end - self.start) as u64 == next
            }
            (ReadSource::Zeros, ReadSource::Zeros) | (ReadSource::Backing, ReadSource::Backing) => {
                true
            }
            _ => false,
        }
    }
}

impl Qcow2Disk {
    /// Fills `buf` from byte `at` of the disk on.
    pub(super) fn read(&self, tables: &Qcow2Tables, at: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut run: Option<ReadRun> = None;
        let mut done = 0;
        while done < buf.len() {
            let here = at + done as u64;
            let entry = tables.entry(here)?;
            let inside = self.layout.inside(here);
            let left = (self.layout.cluster_bytes() - inside).min((buf.len() - done) as u64);
            let end = inside + left;
            let (mut from, unit_bytes) = (inside, 1 << self.layout.unit_bits());
            while from < end {
                let source = self.source(&entry, from)?;
                let to = match source {
                    ReadSource::Compressed(_) => end,
                    _ => ((from / unit_bytes + 1) * unit_bytes).min(end),
                };
                let start = done;
                done += usize::try_from(to - from).map_err(io::Error::other)?;
                from = to;
                run = match run {
                    Some(run) if run.is_followed_by(source) => Some(ReadRun { end: done, ..run }),
                    before => {
                        self.fetch(before, at, buf)?;
                        Some(ReadRun { source, start, end: done })
                    }
                };
            }
        }
        self.fetch(run, at, buf)
    }

    /// The source of byte `inside` of a cluster.
    fn source(&self, entry: &L2Entry, inside: u64) -> io::Result<ReadSource> {
        if let Some(compressed) = entry.compressed {
            return Ok(ReadSource::Compressed(compressed));
        }
        let unit = 1u32 << (inside >> self.layout.unit_bits());
        if entry.stored & unit == 0 {
            let is_zeros = entry.zeros & unit != 0 || self.backing.is_none();
            return Ok(if is_zeros { ReadSource::Zeros } else { ReadSource::Backing });
        }
        if entry.host >= self.file.size_bytes() {
            return Err(behind_the_end());
        }
        Ok(ReadSource::File(entry.host + inside))
    }

    /// Reads a run of the request that begins at byte `at` of the disk.
    fn fetch(&self, run: Option<ReadRun>, at: u64, buf: &mut [u8]) -> io::Result<()> {
        let Some(ReadRun { source, start, end }) = run else { return Ok(()) };
        let (at, part) = (at + start as u64, &mut buf[start..end]);
        match (source, &self.backing) {
            (ReadSource::File(offset), _) => self.file.read(offset, part),
            (ReadSource::Compressed(compressed), _) => {
                let cluster = self.unpacked(compressed)?;
                let inside = usize::try_from(self.layout.inside(at)).map_err(io::Error::other)?;
                part.copy_from_slice(&cluster[inside..inside + part.len()]);
                Ok(())
            }
            (ReadSource::Backing, Some(backing)) => read_or_zeros(&**backing, at, part),
            (ReadSource::Zeros | ReadSource::Backing, _) => {
                part.fill(0);
                Ok(())
            }
        }
    }

    /// The unpacked cluster. The last one is cached, because most reads continue in it.
    fn unpacked(&self, compressed: CompressedCluster) -> io::Result<Arc<Vec<u8>>> {
        if let Some((known, cluster)) = &*self.unpacked.lock()
            && *known == compressed
        {
            return Ok(cluster.clone());
        }
        let cluster = Arc::new(unpack(&self.file, &self.layout, compressed)?);
        *self.unpacked.lock() = Some((compressed, cluster.clone()));
        Ok(cluster)
    }
}
