//! Opening: from a device to a verified superblock, and the state of the log.

mod superblock;

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Malformed, Result, Structure};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::features::{XfsHindrance, XfsIncompat, XfsObstacleKind};
use offshoot_xfs_format::geometry::XfsGeometry;
use offshoot_xfs_format::ids::BASIC_BLOCK;
use offshoot_xfs_format::log::{XfsLogEnds, XfsLogRing, ends};
use offshoot_xfs_format::superblock::XfsSuperblock;

use crate::buffer::{XfsBuffers, malformed};
use crate::options::XfsOptions;
use crate::report::{XfsReport, tell};
use superblock::VolumeSuperblock;

/// What a log holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XfsLogState {
    /// Nothing: the volume was unmounted.
    Empty,
    /// Changes that are not in their places yet.
    Pending,
    /// It cannot be read, for this reason.
    Unreadable(String),
}

impl XfsLogState {
    fn of(ends: &Result<XfsLogEnds>) -> Self {
        match ends {
            Ok(ends) if ends.is_clean => Self::Empty,
            Ok(_) => Self::Pending,
            Err(error) => Self::Unreadable(error.to_string()),
        }
    }
}

/// A volume whose superblock and log were looked at.
#[derive(Debug)]
pub(crate) struct OpenedXfs {
    pub(crate) superblock: XfsSuperblock,
    pub(crate) buffers: XfsBuffers,
    /// Whether the counters of the superblock are right.
    pub(crate) are_counters_right: bool,
    pub(crate) log: XfsLogState,
    /// The state of the volume ([`VolumeVersion::state`](offshoot_vfs::VolumeVersion::state)).
    pub(crate) state: String,
}

/// Opens the volume on `device` for reading.
pub(crate) fn open(device: Arc<dyn BlockDevice>, options: &XfsOptions) -> Result<OpenedXfs> {
    let reporter = options.reporter.as_ref();
    let VolumeSuperblock { superblock, is_first } = superblock::read(&*device, reporter)?;
    let obstacles = superblock.fields.obstacles();
    if let Some(obstacle) =
        obstacles.iter().find(|obstacle| obstacle.kind.hindrance() == XfsHindrance::Reading)
    {
        return Err(Error::unsupported(Code::UnknownFeature, format!("XFS with {obstacle}")));
    }
    if superblock.fields.incompat().contains(XfsIncompat::NEEDSREPAIR) {
        tell(reporter, &XfsReport::NeedsRepair);
    }
    let geometry = superblock.geometry.clone();
    let (size_bytes, expected_bytes) = (device.size_bytes(), geometry.blocks << geometry.block_log);
    if size_bytes < expected_bytes {
        let device = device.name().to_owned();
        tell(reporter, &XfsReport::ShortDevice { device, size_bytes, expected_bytes });
    }
    let buffers = XfsBuffers::new(device, geometry, options.cache_bytes);
    let ends = log_ends(&superblock, &buffers);
    let log = XfsLogState::of(&ends);
    let ends = match (ends, &log) {
        (Ok(ends), XfsLogState::Empty) => Some(ends),
        _ if options.is_log_ignored => {
            tell(reporter, &XfsReport::LogIgnored);
            None
        }
        (Ok(_), _) => {
            let what = format!("an XFS log that is not empty: {NEXT_STEP}");
            return Err(Error::unsupported(Code::LogNotReplayed, what));
        }
        (Err(error), _) => return Err(error),
    };
    let are_counters_right = is_first && !options.is_log_ignored;
    let ends = ends.filter(|_| is_first);
    let state = ends.and_then(|ends| state(&superblock, &ends)).unwrap_or_else(state_of_opening);
    Ok(OpenedXfs { superblock, buffers, are_counters_right, log, state })
}

/// The state of a volume with this empty log: where the log ends, which each change moves. `None`
/// when that does not tell. A log that was zeroed begins anew, as repairs of V4 do with each log.
fn state(superblock: &XfsSuperblock, ends: &XfsLogEnds) -> Option<String> {
    let tells = ends.last.is_some() && superblock.geometry.has_checksums();
    tells.then(|| format!("superblock {}, log {}", Lsn(superblock.fields.lsn.get()), ends.head))
}

/// A state that no other opening has.
fn state_of_opening() -> String {
    let time = UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("unknown, opened by process {} at {time:?}", std::process::id())
}

/// What a user can do about a log that is not replayed.
const NEXT_STEP: &str = "mount the volume once with the kernel, or open it with the log ignored";

fn log_ends(superblock: &XfsSuperblock, buffers: &XfsBuffers) -> Result<XfsLogEnds> {
    let obstacles = superblock.fields.obstacles();
    let has = |kind| obstacles.iter().find(|obstacle| obstacle.kind == kind);
    if let Some(obstacle) = has(XfsObstacleKind::ExternalLog) {
        let what = format!("XFS with {obstacle}: {NEXT_STEP}");
        return Err(Error::unsupported(Code::LogNotReplayed, what));
    }
    let geometry = &superblock.geometry;
    let uuid = uuid::Uuid::from_bytes(superblock.fields.uuid);
    let ends = XfsLogRing::of(geometry)
        .map_err(malformed)
        .and_then(|ring| find_ends(ring, uuid, geometry, buffers))
        .map_err(in_log)?;
    let changed = Lsn(superblock.fields.lsn.get());
    if geometry.has_checksums() && changed != Lsn::NONE && changed > ends.head {
        let problem = format!("it ends at {}, and the superblock is of {changed}", ends.head);
        return Err(in_log(Error::corrupt(Structure::LogRecord, problem)));
    }
    Ok(ends)
}

fn find_ends(
    ring: XfsLogRing,
    uuid: uuid::Uuid,
    geometry: &XfsGeometry,
    buffers: &XfsBuffers,
) -> Result<XfsLogEnds> {
    let start = geometry
        .place_of(geometry.log_start)
        .ok_or_else(|| Error::corrupt(Structure::Superblock, "the log is not in the volume"))?;
    let mut read = |block: u32, bytes: &mut [u8]| {
        let at = start.bytes() + u64::from(block) * BASIC_BLOCK;
        buffers.read_into(at, bytes).map_err(LogFailure)
    };
    ends::find(ring, uuid, &mut read).map_err(|failure| failure.0)
}

/// An error of the search in the log.
struct LogFailure(Error);

impl From<Malformed> for LogFailure {
    fn from(problem: Malformed) -> Self {
        Self(malformed(problem))
    }
}

/// Says where an error was found, and how to go on.
fn in_log(mut error: Error) -> Error {
    if let Error::Corrupt(corrupt) = &mut error {
        corrupt.problem = format!("{}; the log cannot be used: {NEXT_STEP}", corrupt.problem);
    }
    error
}
