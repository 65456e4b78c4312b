//! Opening: from a device to a verified superblock and a log that is empty or replayed.

mod superblock;

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, Result, Structure};
use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::features::{XfsHindrance, XfsIncompat, XfsObstacleKind};
use offshoot_xfs_format::log::XfsLogEnds;
use offshoot_xfs_format::superblock::XfsSuperblock;

use crate::buffer::XfsBuffers;
use crate::options::XfsOptions;
use crate::recover::{self, NEXT_STEP, VolumeLog, XfsRecovery};
use crate::report::{XfsReport, tell};
use superblock::VolumeSuperblock;

/// What a user can do about a log that is on another device, which this version does not read.
const EXTERNAL_LOG_STEP: &str = "mount and unmount the volume once with the kernel and logdev=, \
                                 then open it with the log ignored";

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
    /// The state in a word.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Pending => "pending",
            Self::Unreadable(_) => "unreadable",
        }
    }

    fn of(log: &Result<VolumeLog>) -> Self {
        match log {
            Ok(log) if log.ends.is_clean => Self::Empty,
            Ok(_) => Self::Pending,
            Err(error) => Self::Unreadable(error.to_string()),
        }
    }
}

/// A volume whose superblock and log were looked at.
#[derive(Debug)]
pub(crate) struct OpenedXfs {
    pub(crate) superblock: XfsSuperblock,
    pub(crate) buffers: Arc<XfsBuffers>,
    /// Whether the counters of the superblock are right.
    pub(crate) are_counters_right: bool,
    /// Whether that of group 0 is sound.
    pub(crate) is_superblock_first: bool,
    pub(crate) log: XfsLogState,
    /// Where the log ends, if it can be read.
    pub(crate) head: Option<Lsn>,
    /// The state of the volume ([`VolumeVersion::state`](offshoot_vfs::VolumeVersion::state)).
    pub(crate) state: String,
}

/// Opens the volume on `device` for reading.
pub(crate) fn open(device: Arc<dyn BlockDevice>, options: &XfsOptions) -> Result<OpenedXfs> {
    let reporter = options.reporter.as_ref();
    let VolumeSuperblock { superblock, is_first } = superblock::read(&*device, reporter)?;
    require_readable(&superblock)?;
    if superblock.fields.incompat().contains(XfsIncompat::NEEDSREPAIR) {
        tell(reporter, &XfsReport::NeedsRepair);
    }
    let geometry = &superblock.geometry;
    let (size_bytes, expected_bytes) = (device.size_bytes(), geometry.blocks << geometry.block_log);
    if size_bytes < expected_bytes {
        let device = device.name().to_owned();
        tell(reporter, &XfsReport::ShortDevice { device, size_bytes, expected_bytes });
    }
    let found = find_log(&device, &superblock);
    let head = |found: &Result<VolumeLog>| found.as_ref().ok().map(|log| log.ends.head);
    let head_found = head(&found);
    let over = |device, superblock: XfsSuperblock, are_counters_right, (log, head), state| {
        let buffers = XfsBuffers::new(device, superblock.geometry.clone(), options.cache_bytes);
        OpenedXfs {
            superblock,
            buffers: Arc::new(buffers),
            are_counters_right,
            is_superblock_first: is_first,
            log,
            head,
            state,
        }
    };
    let state_of_log = XfsLogState::of(&found);
    if state_of_log != XfsLogState::Empty && options.is_log_ignored {
        tell(reporter, &XfsReport::LogIgnored);
        return Ok(over(device, superblock, false, (state_of_log, head_found), state_of_opening()));
    }
    let log = found?;
    if log.ends.is_clean {
        let state = Some(&log.ends).filter(|_| is_first).and_then(|ends| state(&superblock, ends));
        let state = state.unwrap_or_else(state_of_opening);
        let are_counters_right = is_first && !options.is_log_ignored;
        return Ok(over(device, superblock, are_counters_right, (state_of_log, head_found), state));
    }
    let device = recover::in_memory(&device, &superblock, &log, options)?;
    // The log may have changed the superblock. A damaged one was reported above.
    let VolumeSuperblock { superblock, .. } = superblock::read(&*device, None)?;
    require_readable(&superblock)?;
    // What the log left to do was done behind its head.
    let head = head(&find_log(&device, &superblock));
    Ok(over(device, superblock, false, (state_of_log, head), state_of_opening()))
}

/// Opens the volume on `device` for writing, and recovers it first if it was not unmounted. Returns
/// it with its log, which is empty.
pub(crate) fn open_writable(
    device: Arc<dyn BlockDevice>,
    options: &XfsOptions,
) -> Result<(OpenedXfs, VolumeLog)> {
    if options.is_log_ignored {
        let what = "writing XFS with the log ignored: open it without that, or for reading";
        return Err(Error::unsupported(Code::LogNotReplayed, what));
    }
    let found = superblock::read(&*device, options.reporter.as_ref())?;
    require_writable(&*device, &found)?;
    let before = find_log(&device, &found.superblock);
    let log_before = XfsLogState::of(&before);
    if !before?.ends.is_clean {
        recover(&device, options)?;
    }
    // The log may have changed the superblock.
    let found = superblock::read(&*device, None)?;
    require_writable(&*device, &found)?;
    let log = find_log(&device, &found.superblock)?;
    if !log.ends.is_clean {
        let problem = "it is not empty behind its recovery";
        return Err(Error::corrupt(Structure::LogRecord, problem));
    }
    let VolumeSuperblock { superblock, is_first } = found;
    let geometry = superblock.geometry.clone();
    let opened = OpenedXfs {
        buffers: Arc::new(XfsBuffers::new(device, geometry, options.cache_bytes)),
        superblock,
        are_counters_right: true,
        is_superblock_first: is_first,
        log: log_before,
        head: Some(log.ends.head),
        state: state_of_opening(),
    };
    Ok((opened, log))
}

/// Fails when the volume has what we do not write, or lies on a device that is too short.
fn require_writable(device: &dyn BlockDevice, found: &VolumeSuperblock) -> Result<()> {
    let superblock = &found.superblock;
    require_readable(superblock)?;
    if let Some(obstacle) = superblock.fields.obstacles().first() {
        let what = format!("writing XFS with {obstacle}: open it for reading");
        return Err(Error::unsupported(Code::FeatureNotKept, what));
    }
    require_first(found)?;
    let geometry = &superblock.geometry;
    let (size, expected) = (device.size_bytes(), geometry.blocks << geometry.block_log);
    if size >= expected {
        return Ok(());
    }
    let name = device.name();
    let what = format!("writing a volume of {expected} bytes on {name}, which has {size}");
    Err(Error::unsupported(Code::Incomplete, what))
}

/// Fails when the superblock of group 0 is damaged.
fn require_first(found: &VolumeSuperblock) -> Result<()> {
    if found.is_first {
        return Ok(());
    }
    let problem = format!("that of group 0 is damaged: {NEXT_STEP}");
    Err(Error::corrupt(Structure::Superblock, problem))
}

/// Recovers the volume on `device` to disk.
pub(crate) fn recover(
    device: &Arc<dyn BlockDevice>,
    options: &XfsOptions,
) -> Result<Option<XfsRecovery>> {
    let found = superblock::read(&**device, options.reporter.as_ref())?;
    let superblock = &found.superblock;
    require_readable(superblock)?;
    let log = find_log(device, superblock)?;
    if log.ends.is_clean {
        return Ok(None);
    }
    require_first(&found)?;
    recover::require_recoverable(superblock)?;
    recover::to_disk(device, superblock, &log, options).map(Some)
}

/// The superblock of the volume on `device`, and its log, which is to be thrown away whether or not
/// it can be read. `None` when it is empty.
pub(crate) fn log_to_zero(
    device: &Arc<dyn BlockDevice>,
    options: &XfsOptions,
) -> Result<Option<(XfsSuperblock, Result<VolumeLog>)>> {
    let VolumeSuperblock { superblock, is_first } =
        superblock::read(&**device, options.reporter.as_ref())?;
    require_readable(&superblock)?;
    // A log that we do not know is thrown away like any other.
    let is_in_the_way = |kind| kind != XfsObstacleKind::UnknownLogIncompat;
    let obstacles = superblock.fields.obstacles();
    if let Some(obstacle) = obstacles.iter().find(|obstacle| is_in_the_way(obstacle.kind)) {
        let what = format!(
            "zeroing the log of XFS with {obstacle}: xfs_repair -L does that, with -l for a log on \
             another device"
        );
        return Err(Error::unsupported(Code::UnknownFeature, what));
    }
    if !is_first {
        return Err(Error::corrupt(Structure::Superblock, "that of group 0 is damaged"));
    }
    match find_log(device, &superblock) {
        Ok(log) if log.ends.is_clean => Ok(None),
        Err(error @ (Error::Io { .. } | Error::Posix { .. })) => Err(error),
        found => Ok(Some((superblock, found))),
    }
}

/// Fails when the volume has a feature without which it cannot be read.
fn require_readable(superblock: &XfsSuperblock) -> Result<()> {
    let obstacles = superblock.fields.obstacles();
    let is_in_the_way = |kind: XfsObstacleKind| kind.hindrance() == XfsHindrance::Reading;
    match obstacles.iter().find(|obstacle| is_in_the_way(obstacle.kind)) {
        Some(obstacle) => {
            Err(Error::unsupported(Code::UnknownFeature, format!("XFS with {obstacle}")))
        }
        None => Ok(()),
    }
}

/// The log; fails when it lies elsewhere, or is not empty and has what we do not know.
fn find_log(device: &Arc<dyn BlockDevice>, superblock: &XfsSuperblock) -> Result<VolumeLog> {
    let obstacles = superblock.fields.obstacles();
    let refused = |kind, next_step| {
        let obstacle = obstacles.iter().find(|obstacle| obstacle.kind == kind)?;
        let what = format!("XFS with {obstacle}: {next_step}");
        Some(Error::unsupported(Code::LogNotReplayed, what))
    };
    if let Some(error) = refused(XfsObstacleKind::ExternalLog, EXTERNAL_LOG_STEP) {
        return Err(error);
    }
    let log = VolumeLog::find(device, superblock)?;
    match refused(XfsObstacleKind::UnknownLogIncompat, NEXT_STEP) {
        Some(error) if !log.ends.is_clean => Err(error),
        _ => Ok(log),
    }
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
