//! The least log: what the kernel needs to mount a volume.
//!
//! A transaction reserves the log space of the most that it can change. The kernel refuses a log
//! that does not hold the largest reservation several times. Its formula is a part of the format,
//! so it is followed to the byte: with blocks of 16 KiB and more, it is the default log size.
//!
//! ```text
//! reservation   what one transaction logs: whole blocks with their headers, inodes with theirs
//! unit          the reservation, and the headers of ops and records around it
//! least log     3 * (units that one operation takes, and two records or 1024 basic blocks)
//! ```
//!
//! Volumes without parent pointers keep the larger numbers of older kernels, so that these mount
//! them too.

use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::ids::BASIC_BLOCK;

use crate::trans::{
    HASH_BLOCKS, MostTreeLevels, QUOTAS, ReservationSizes, XfsLogReservation,
    XfsTransactionKind as Kind,
};

/// The records of the log that are reckoned with, and the headers of one.
const RECORD: u64 = 256 << 10;
const RECORD_HEADERS: u64 = 8 * BASIC_BLOCK;

/// The header of an op, and those of one transaction.
const OP: u64 = 12;
const TRANSACTION: u64 = 40;

/// The least blocks of any log.
const LEAST_BLOCKS: u64 = 512;

/// The least blocks of the log of a volume. Records of the log fill multiples of `log_stripe`
/// bytes, if that is not 0.
pub(super) fn least_log_blocks(
    geometry: &XfsGeometry,
    levels: &MostTreeLevels,
    log_stripe: u64,
) -> u64 {
    let XfsLogReservation { bytes, count } = largest(geometry, levels);
    let is_striped = log_stripe > BASIC_BLOCK;
    let unit = unit(bytes, if log_stripe == 0 { BASIC_BLOCK } else { log_stripe });
    let basic_blocks = (unit * count).div_ceil(BASIC_BLOCK);
    let one = if is_striped {
        let stripe = log_stripe / BASIC_BLOCK;
        basic_blocks.next_multiple_of(stripe) + 2 * stripe
    } else {
        // The kernel means two basic blocks here, and adds their bytes.
        basic_blocks + 2 * BASIC_BLOCK
    };
    (3 * one * BASIC_BLOCK).div_ceil(geometry.block_size() as u64).max(LEAST_BLOCKS)
}

/// The log space of a transaction with this reservation. Its records are rounded up to `rounding`
/// bytes.
fn unit(reservation: u64, rounding: u64) -> u64 {
    let room = RECORD - RECORD_HEADERS;
    let mut bytes = reservation + TRANSACTION;
    let mut records = bytes.div_ceil(room);
    bytes += records * OP;
    while bytes.div_ceil(room) > records {
        records += 1;
        bytes += OP;
    }
    // One more record for the op that commits, and the rounding of both ends.
    bytes + (records + 1) * RECORD_HEADERS + 2 * rounding
}

/// The reservation that decides.
fn largest(geometry: &XfsGeometry, levels: &MostTreeLevels) -> XfsLogReservation {
    let sizes = ReservationSizes {
        geometry,
        levels,
        is_old: !geometry.layout.contains(XfsLayout::PARENTS),
    };
    // No other is larger.
    let of_operations = [Kind::Write, Kind::Truncate, Kind::Rename, Kind::Symlink]
        .map(|kind| sizes.reservation(kind));
    let total = |reservation: &XfsLogReservation| reservation.bytes * reservation.count;
    let [first, rest @ ..] = of_operations;
    let most = rest.into_iter().fold(
        first,
        |most, next| {
            if total(&next) > total(&most) { next } else { most }
        },
    );
    // The kernel compares one setting of an attribute with whole operations.
    let attribute = largest_attribute(&sizes);
    if attribute > total(&most) { XfsLogReservation { bytes: attribute, count: 3 } } else { most }
}

/// That of setting the largest attribute that still lies in a leaf.
fn largest_attribute(sizes: &ReservationSizes<'_>) -> u64 {
    let block = sizes.geometry.block_size() as u64;
    let size = block / 2 + block / 4 - 256;
    let levels = sizes.levels.attributes;
    let blocks = HASH_BLOCKS * (1 + sizes.extent_blocks(1, levels))
        + size.div_ceil(block)
        // The kernel takes the bytes for extents here.
        + sizes.extent_blocks(size, levels);
    let set = QUOTAS + sizes.inodes(1) + sizes.sectors(1) + sizes.blocks(HASH_BLOCKS);
    set + blocks * (sizes.sectors(1) + sizes.blocks(levels))
}
