//! The log: its records from the tail to the head, and the transactions in them.
//!
//! Of a log that is empty only its last record is left to show.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Malformed};
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::log::record::XfsLogChecksum;
use offshoot_xfs_format::log::{
    XfsCheckpoint, XfsCheckpoints, XfsLogItem, XfsLogRecord, XfsLogRing, XfsRegions, ends, op,
};

use super::{DumpOutput, open};
use crate::exit::{Result, VerbFailure};
use crate::verbs::fields::Fields;

/// The most memory that transactions may take that are open at one time. The log buffers of the
/// kernel let them take much less; a hostile log of 2 GiB may have as much of them.
const MOST_OPEN_BYTES: u64 = 128 << 20;

/// Why the log is not read on.
struct LogDumpFailure(VerbFailure);

impl From<VerbFailure> for LogDumpFailure {
    fn from(failure: VerbFailure) -> Self {
        Self(failure)
    }
}

impl From<Malformed> for LogDumpFailure {
    fn from(Malformed { structure, problem }: Malformed) -> Self {
        Self(Error::corrupt(structure, problem).into())
    }
}

/// Shows the log.
pub(in crate::verbs) fn run(device: &Arc<dyn BlockDevice>, mut to: DumpOutput<'_>) -> Result {
    let volume = open(device)?;
    let superblock = volume.superblock();
    let geometry = &superblock.geometry;
    let start = geometry.place_of(geometry.log_start).filter(|_| geometry.log_start.0 != 0);
    let Some(start) = start else {
        let what = "the log of an XFS volume on another device: xfs_logprint -f shows that device";
        return Err(Error::unsupported(Code::Unsupported, what).into());
    };
    let mut read = |block: u32, bytes: &mut [u8]| {
        let at = start.bytes() + u64::from(block) * BASIC_BLOCK;
        let what = format!("reading {} bytes at {at} of {}", bytes.len(), device.name());
        device.read_at(at, bytes).map_err(|error| LogDumpFailure(Error::io(what, error).into()))
    };
    let mut shown = || -> Result<(), LogDumpFailure> {
        let ring = XfsLogRing::of(geometry)?;
        let uuid = uuid::Uuid::from_bytes(superblock.fields.uuid);
        let ends = ends::find(ring, uuid, &mut read)?;
        let last = ends.last.as_ref().map_or(ends.head, |record| record.lsn);
        let mut at = if ends.is_clean { last } else { ends.tail };
        let mut checkpoints = XfsCheckpoints::new(ring);
        let mut blocks = Vec::new();
        // Each record has a block at least, so the walk ends.
        while at != ends.head {
            let (record, checksum) = ends::read_record(ring, at, &mut read, &mut blocks)??;
            to.line("record", record_fields(&record, checksum))?;
            for op in op::ops(record.unpack(&mut blocks)?, record.ops) {
                if let Some(checkpoint) = checkpoints.add(at, &op?)? {
                    to.line("transaction", transaction_fields(&checkpoint))?;
                    for item in checkpoint.items() {
                        to.line("item", item_fields(item))?;
                    }
                }
                if checkpoints.byte_count() > MOST_OPEN_BYTES {
                    let what = "the transactions that are open there take too much memory, and are \
                                not shown";
                    to.console.warning(&format_args!("record {at}: {what}"));
                    checkpoints = XfsCheckpoints::new(ring);
                }
            }
            at = ring.advance(at, record.block_count());
        }
        Ok(())
    };
    shown().map_err(|LogDumpFailure(failure)| match failure {
        VerbFailure::Volume(error) => VerbFailure::Inside(device.name().into(), error),
        other => other,
    })
}

fn record_fields(record: &XfsLogRecord, checksum: XfsLogChecksum) -> Fields {
    let checksum = match checksum {
        XfsLogChecksum::Right => "right",
        XfsLogChecksum::Wrong => "wrong",
        XfsLogChecksum::Missing => "missing",
    };
    Fields::default()
        .with("lsn", record.lsn.to_string())
        .with("tail", record.tail.to_string())
        .with("version", record.version)
        .with("bytes", record.len)
        .with("ops", record.ops)
        .with("checksum", checksum)
}

fn transaction_fields(checkpoint: &XfsCheckpoint) -> Fields {
    Fields::default()
        .with("tid", checkpoint.tid)
        .with("begun", checkpoint.lsn.to_string())
        .with("committed", checkpoint.committed.to_string())
        .with("regions", checkpoint.regions().len() as u64)
}

fn item_fields(regions: XfsRegions<'_>) -> Fields {
    let bytes: usize = regions.iter().map(<[u8]>::len).sum();
    let sized = |fields: Fields| fields.with("bytes", bytes as u64);
    let of = |name: &str| Fields::default().with("type", name);
    let item = match XfsLogItem::parse(regions) {
        Ok(item) => item,
        Err(problem) => return sized(of("unknown").with("problem", problem.to_string())),
    };
    sized(match item {
        XfsLogItem::Buffer(buffer) => of("buffer")
            .with("place", buffer.place.0)
            .with("blocks", buffer.blocks)
            .with("flags", format!("{:?}", buffer.flags)),
        XfsLogItem::Inode(inode) => {
            of("inode").with("ino", inode.ino.0).with("fields", format!("{:?}", inode.fields))
        }
        XfsLogItem::Icreate(chunk) => of("new inodes")
            .with("group", chunk.ag.0)
            .with("block", chunk.block.0)
            .with("count", chunk.count),
        XfsLogItem::Efi(intent) => of("EFI").with("id", intent.id),
        XfsLogItem::Efd(done) => of("EFD").with("id", done.id),
        XfsLogItem::Rui(intent) => of("RUI").with("id", intent.id),
        XfsLogItem::Cui(intent) => of("CUI").with("id", intent.id),
        XfsLogItem::Bui(intent) => of("BUI").with("id", intent.id),
        XfsLogItem::Attri(intent) => {
            of("ATTRI").with("id", intent.id).with("ino", intent.ino.0).name("name", intent.name)
        }
        XfsLogItem::Xmi(intent) => of("XMI").with("id", intent.id),
        XfsLogItem::Done { item, id } => of(item.name()).with("id", id),
        XfsLogItem::Unsupported(item) => of(item.name()),
    })
}
