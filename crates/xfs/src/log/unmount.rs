//! The record that says that the log is empty.

use offshoot_vfs::{Malformed, Structure};
use offshoot_xfs_format::log::op::XfsOpWriter;
use offshoot_xfs_format::log::record::{BUFFER_MAX, padded_len};
use offshoot_xfs_format::log::{BLOCK, XfsLogRecord, XfsLogRing};

/// The transaction of an unmount op, any number but 0.
const UNMOUNT_TID: u32 = 0xb0c0_d0d0;

/// Makes an unmount record of `record`, which says where it goes, and from which buffer and to
/// which volume. Returns it with its blocks. Records fill a multiple of `unit` bytes.
pub(crate) fn unmount_record(
    ring: XfsLogRing,
    unit: usize,
    record: &XfsLogRecord,
) -> Result<(XfsLogRecord, Vec<u8>), Malformed> {
    let headers = record.header_blocks();
    let len = padded_len(BLOCK, headers, unit);
    let header_len = headers as usize * BLOCK;
    let mut blocks = vec![0; header_len + len];
    let body = blocks.get_mut(header_len..).unwrap_or_default();
    if !XfsOpWriter::new(body, 0, 0).unmount(UNMOUNT_TID) {
        let problem = "a record without room for the unmount";
        return Err(Malformed::new(Structure::LogRecord, problem));
    }
    let len = u32::try_from(len).unwrap_or(BUFFER_MAX);
    let record = XfsLogRecord { len, ops: 1, ..record.clone() };
    record.seal(ring, &mut blocks)?;
    Ok((record, blocks))
}
