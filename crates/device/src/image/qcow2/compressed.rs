//! Clusters that are compressed with deflate or zstd.

use std::io::{self, Read};

use flate2::{Decompress, FlushDecompress};

use super::file::ImageFile;
use super::layout::{CompressedCluster, Qcow2Geometry};
use crate::fields::invalid;

/// The base-2 logarithm of the window that a zstd frame may ask for: 8 MiB, four times the largest
/// cluster.
const ZSTD_WINDOW_BITS: u32 = 23;

/// Unpacks the cluster at `compressed`. Its length is rounded up to whole sectors, so the last
/// sector may hold other bytes behind the stream.
pub(super) fn unpack(
    file: &ImageFile,
    layout: &Qcow2Geometry,
    compressed: CompressedCluster,
) -> io::Result<Vec<u8>> {
    let mut packed = vec![0; usize::try_from(compressed.len).map_err(io::Error::other)?];
    file.read(compressed.offset, &mut packed)?;
    let mut cluster = vec![0; 1 << layout.cluster_bits];
    let is_whole = if layout.has_zstd {
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
