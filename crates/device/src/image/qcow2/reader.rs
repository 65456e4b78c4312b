//! A qcow2 with what `imago` does not know: extended L2 entries, and clusters compressed by zstd.
//! It is read.
//!
//! ```text
//! L1 entry   9-55 where the L2 table is
//! L2 entry   0 all zeros   9-55 where the cluster is   62 compressed
//! extended   a second word: 0-31 which of 32 subclusters are stored, 32-63 which are zeros
//! compressed 0-x where, in bytes   x-61 how many sectors beyond the first, x = 70 - cluster bits
//! ```
//!
//! What is stored nowhere is in the backing file. No table is kept: the host has the entries in its
//! page cache, and one is read for each cluster.

use std::io::{self, Read};
use std::sync::Arc;

use flate2::{Decompress, FlushDecompress};
use parking_lot::Mutex;

use crate::fields::{invalid, u64_be};
use crate::image::read_by_blocks;
use crate::{BlockDevice, request_range};

const OFFSET_BITS: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ALL_ZEROS: u64 = 1;
const SECTOR_BYTES: u64 = 512;

/// The logarithm of the subclusters of a cluster.
const SUBCLUSTER_BITS: u32 = 5;

/// The logarithm of the memory that a frame of zstd may ask for: four times the largest cluster.
const ZSTD_WINDOW_BITS: u32 = 23;

/// How an image stores its clusters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) size_bytes: u64,
    pub(super) l1_offset: u64,
    pub(super) cluster_bits: u32,
    pub(super) has_subclusters: bool,
    pub(super) has_zstd: bool,
}

/// The disk in such an image.
#[derive(Debug)]
pub(super) struct Reader {
    below: Arc<dyn BlockDevice>,
    backing: Option<Arc<dyn BlockDevice>>,
    name: String,
    layout: Layout,
    /// The cluster that was unpacked last, which most reads go on in.
    unpacked: Mutex<Option<(u64, Vec<u8>)>>,
}

impl Reader {
    pub(super) fn new(
        below: Arc<dyn BlockDevice>,
        backing: Option<Arc<dyn BlockDevice>>,
        layout: Layout,
    ) -> Self {
        let name = below.name().to_owned();
        Self { below, backing, name, layout, unpacked: Mutex::default() }
    }

    /// Reads what is in one cluster or subcluster.
    fn read_unit(&self, at: u64, buf: &mut [u8]) -> io::Result<()> {
        let Layout { l1_offset, cluster_bits, has_subclusters, .. } = self.layout;
        let entry_bits = if has_subclusters { 4 } else { 3 };
        let l2_bits = cluster_bits - entry_bits;
        let mut l1_entry = [0; 8];
        // The header was checked: the L1 table has an entry for every byte of the disk.
        let l1_at = l1_offset + (at >> (cluster_bits + l2_bits)) * 8;
        self.below.read_at(l1_at, &mut l1_entry)?;
        let table = u64::from_be_bytes(l1_entry) & OFFSET_BITS;
        if table == 0 {
            return self.read_backing(at, buf);
        }
        let mut entry = [0; 16];
        let index = (at >> cluster_bits) & ((1 << l2_bits) - 1);
        self.below.read_at(table + (index << entry_bits), &mut entry[..1 << entry_bits])?;
        let (word, subclusters) = (u64_be(&entry, 0), u64_be(&entry, 8));
        if word & COMPRESSED != 0 {
            return self.read_compressed(word, at, buf);
        }
        let cluster = word & OFFSET_BITS;
        let (is_stored, is_zeros) = if has_subclusters {
            let inside = at >> (cluster_bits - SUBCLUSTER_BITS) & 31;
            (subclusters >> inside & 1 != 0, subclusters >> (32 + inside) & 1 != 0)
        } else {
            (cluster != 0, word & ALL_ZEROS != 0)
        };
        let is_aligned = (table | cluster) & ((1 << cluster_bits) - 1) == 0;
        if !is_aligned || has_subclusters && is_stored && is_zeros {
            return Err(invalid("an entry of its tables is damaged"));
        }
        match (is_zeros, is_stored, cluster) {
            (true, ..) => buf.fill(0),
            (false, true, 0) => return Err(invalid("a part of the disk is stored nowhere")),
            (false, true, cluster) if cluster >= self.below.size_bytes() => {
                return Err(invalid("a part of the disk is behind the end of the file"));
            }
            (false, true, cluster) => {
                let inside = at & ((1 << cluster_bits) - 1);
                read_or_zeros(&*self.below, cluster + inside, buf)?;
            }
            (false, false, _) => self.read_backing(at, buf)?,
        }
        Ok(())
    }

    fn read_backing(&self, at: u64, buf: &mut [u8]) -> io::Result<()> {
        let Some(backing) = &self.backing else {
            buf.fill(0);
            return Ok(());
        };
        read_or_zeros(&**backing, at, buf)
    }

    fn read_compressed(&self, word: u64, at: u64, buf: &mut [u8]) -> io::Result<()> {
        let Layout { cluster_bits, .. } = self.layout;
        let mut unpacked = self.unpacked.lock();
        if unpacked.as_ref().is_none_or(|(known, _)| *known != word) {
            *unpacked = None;
            *unpacked = Some((word, self.unpack(word)?));
        }
        let (_, cluster) = unpacked.as_ref().expect("it was put there");
        let inside = usize::try_from(at & ((1 << cluster_bits) - 1)).map_err(io::Error::other)?;
        buf.copy_from_slice(&cluster[inside..inside + buf.len()]);
        Ok(())
    }

    /// The cluster that a compressed entry stands for.
    fn unpack(&self, word: u64) -> io::Result<Vec<u8>> {
        let Layout { cluster_bits, has_zstd, .. } = self.layout;
        let count_bits = cluster_bits - 8;
        let place_bits = 62 - count_bits;
        let place = word & ((1 << place_bits) - 1);
        let sectors = 1 + (word >> place_bits & ((1 << count_bits) - 1));
        let len = sectors * SECTOR_BYTES - place % SECTOR_BYTES;
        let mut packed = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        read_or_zeros(&*self.below, place, &mut packed)?;
        let mut cluster = vec![0; 1 << cluster_bits];
        let is_whole = if has_zstd {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(&*packed)?;
            decoder.window_log_max(ZSTD_WINDOW_BITS)?;
            decoder.read_exact(&mut cluster).is_ok()
        } else {
            let mut inflater = Decompress::new(false);
            let result = inflater.decompress(&packed, &mut cluster, FlushDecompress::Finish);
            result.is_ok() && inflater.total_out() == cluster.len() as u64
        };
        if is_whole { Ok(cluster) } else { Err(invalid("a compressed cluster is damaged")) }
    }
}

/// Reads what is there; behind the end there are zeros.
pub(super) fn read_or_zeros(
    device: &dyn BlockDevice,
    offset: u64,
    buf: &mut [u8],
) -> io::Result<()> {
    let left = device.size_bytes().saturating_sub(offset);
    let there = usize::try_from(left).map_or(buf.len(), |left| left.min(buf.len()));
    if there > 0 {
        device.read_at(offset, &mut buf[..there])?;
    }
    buf[there..].fill(0);
    Ok(())
}

impl BlockDevice for Reader {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.layout.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let Layout { size_bytes, cluster_bits, has_subclusters, .. } = self.layout;
        request_range(size_bytes, offset, buf.len() as u64)?;
        let unit_bits = cluster_bits - if has_subclusters { SUBCLUSTER_BITS } else { 0 };
        read_by_blocks(offset, buf, 1 << unit_bits, |at, part| self.read_unit(at, part))
    }

    read_only!();
}
