//! Where the metadata of a volume is.

use offshoot_device::BlockDevice;
use offshoot_xfs_format::XfsGeometry;

/// A piece of metadata: where it is, and where its checksum is in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SealedUnit {
    pub(crate) at: u64,
    pub(crate) len: usize,
    pub(crate) crc: usize,
}

/// The metadata of a volume, by magic numbers. In version 4 `crc` is not used.
pub(crate) fn units(device: &dyn BlockDevice, geometry: &XfsGeometry) -> Vec<SealedUnit> {
    let mut units = Vec::new();
    let log = geometry.log_start;
    let log = geometry.place_of(log).unwrap().bytes();
    let log = log..log + (u64::from(geometry.log_blocks) << geometry.block_log);
    let mut bytes = vec![0; 1 << 20];
    for start in (0..device.size_bytes()).step_by(bytes.len()) {
        device.read_at(start, &mut bytes).unwrap();
        if bytes.iter().all(|&byte| byte == 0) {
            continue;
        }
        for (index, sector) in bytes.chunks_exact(512).enumerate() {
            let at = start + index as u64 * 512;
            let (block, size) = (geometry.block_size(), geometry.sector_size());
            let (len, crc) = match (&sector[..4], &sector[8..10]) {
                (b"XFSB", _) => (size, 224),
                (b"XAGF", _) => (size, 216),
                (b"XAGI", _) => (size, 312),
                (b"XAFL", _) => (size, 32),
                (b"AB3B" | b"AB3C" | b"IAB3" | b"FIB3" | b"RMB3" | b"R3FC", _) => (block, 52),
                (b"ABTB" | b"ABTC" | b"IABT" | b"BMAP", _) => (block, 0),
                (b"BMA3", _) => (block, 64),
                (b"XDB3" | b"XDD3" | b"XDF3", _) => (geometry.dir_block_size(), 4),
                (b"XD2B" | b"XD2D" | b"XD2F", _) => (geometry.dir_block_size(), 0),
                (b"XARM" | b"XSLM", _) => (block, 12),
                ([b'I', b'N', ..], _) => (geometry.inode_size(), 100),
                (_, [0x3d, 0xf1 | 0xff] | [0x3e, 0xbe] | [0x3b, 0xee]) => (block, 12),
                (_, [0xd2, 0xf1 | 0xff] | [0xfe, 0xbe] | [0xfb, 0xee]) => (block, 0),
                _ => continue,
            };
            if !log.contains(&at) {
                units.push(SealedUnit { at, len, crc });
            }
        }
    }
    units
}
