//! Opens what the command line names: devices, volume, subvolume, file. A volume that this process
//! has mounted is open already ([`crate::live`]).

mod devices;
mod tree;

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Reporter, Rescue, SubvolumeId};
use offshoot_btrfs_format::TreeId;
use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_vfs::path::{LastLink, resolve, resolve_held};
use offshoot_vfs::{self as vfs, Errno, Error, FileSystem, FileType, HeldFile};
use offshoot_xfs::{XfsOptions, XfsVolume};

use crate::args::{OpenArguments, PlaceArguments, TreeArguments, VolumeArguments};
use crate::disk::MemberDisk;
use crate::edit::source_date;
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, Escaped};
use crate::place::VolumePath;
use crate::verbs::btrfs::storing::Storing;
use devices::OpenDevices;
pub(crate) use devices::{member_disk, only_in_btrfs};
pub(crate) use tree::OpenTree;
use tree::OpenXfsFiles;

/// How many reports are kept for `info`.
const REPORTS_KEPT: usize = 100;

/// The access with which a volume is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    /// Read the volume, whatever other processes do with it.
    Read,
    /// Change the volume, while no other process does.
    Write,
}

/// The verb of the command line, in errors about the formats that it is for.
pub(crate) const THIS_VERB: &str = "this verb";

/// Receives a warning.
type OnSessionWarning = Arc<dyn Fn(&dyn fmt::Display) + Send + Sync>;

/// Receives the devices of a volume.
pub(crate) type OnOpenDevices = Box<dyn FnOnce(&[Arc<dyn BlockDevice>]) -> vfs::Result<()>>;

/// How a volume is opened.
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(crate) struct Opening {
    pub(crate) access: Access,
    /// Refuse a volume of another format before it is read.
    pub(crate) is_for_btrfs: bool,
    /// What only btrfs has, and was asked for: in an error on a volume of XFS.
    pub(crate) only_btrfs: Option<String>,
    /// The same for XFS.
    pub(crate) only_xfs: Option<String>,
    /// Open the volume as it is stored, without replaying a pending log; it cannot be changed as a
    /// whole.
    pub(crate) is_stored: bool,
    /// How data that is written is stored.
    pub(crate) storing: Storing,
    /// How often the volume commits by itself; `None` for the default.
    pub(crate) commit: Option<Duration>,
    /// How many bytes may be changed and not on the devices yet; `None` for the default.
    pub(crate) dirty_bytes: Option<u64>,
    /// Whether fsync writes the tree log instead of committing.
    pub(crate) has_tree_log: bool,
    /// Whether the devices are told which ranges commits free.
    pub(crate) is_discarding: bool,
    /// Whether files are written back before each commit.
    pub(crate) flushes_on_commit: bool,
    /// Whether the same calls make the same bytes each time: nothing is written because time
    /// passes, or on several threads in an order of their own, and no UUID is random.
    pub(crate) is_reproducible: bool,
    /// What the verb itself needs to read a damaged volume of btrfs.
    pub(crate) rescue: Rescue,
    /// Receives what the engine of btrfs reports, instead of `warned`.
    pub(crate) told: Option<Reporter>,
    /// Receives the reports of survived faults; `None` for the console, which prints the first
    /// ones.
    pub(crate) warned: Option<OnSessionWarning>,
    /// Called when all devices are open, before anything of the volume is read.
    pub(crate) when_devices_are_open: Option<Box<dyn FnOnce()>>,
    /// Called before the volume is opened for writing, when it could be opened for reading.
    pub(crate) before_writing: Option<OnOpenDevices>,
}

impl Opening {
    pub(crate) fn to(access: Access) -> Self {
        Self {
            access,
            is_for_btrfs: false,
            only_btrfs: None,
            only_xfs: None,
            is_stored: false,
            storing: Storing::default(),
            commit: None,
            dirty_bytes: None,
            has_tree_log: true,
            is_discarding: false,
            flushes_on_commit: false,
            is_reproducible: false,
            rescue: Rescue::default(),
            told: None,
            warned: None,
            when_devices_are_open: None,
            before_writing: None,
        }
    }

    /// The same for a verb that does its work and ends. What it changes is reproducible when the
    /// environment sets the time.
    pub(crate) fn of_verb(access: Access) -> Result<Self> {
        let is_reproducible = access == Access::Write && source_date()?.is_some();
        Ok(Self { is_reproducible, ..Self::to(access) })
    }
}

/// An open volume of the format of `V`.
pub(crate) struct Session<V = BtrfsVolume> {
    /// The volume.
    pub(crate) volume: Arc<V>,
    /// The layers between the file of the first member and the volume, lowest first.
    pub(crate) layers: Vec<String>,
    reports: KeptReports,
}

/// An open volume of any format.
pub(crate) enum AnySession {
    Btrfs(Session),
    Xfs(Session<XfsVolume>),
}

/// What an engine reported: shown to the user, and the first ones kept for `info`.
#[derive(Clone)]
struct KeptReports {
    kept: Arc<Mutex<Vec<String>>>,
    tell: OnSessionWarning,
}

impl KeptReports {
    fn new(warned: Option<OnSessionWarning>, console: &Arc<Console>) -> Self {
        let console = console.clone();
        let tell = warned.unwrap_or_else(|| Arc::new(move |report| console.warning(report)));
        Self { kept: Arc::default(), tell }
    }

    /// Adds what an engine reports as `R`.
    fn reporter<R: fmt::Display + 'static>(&self) -> Arc<dyn Fn(&R) + Send + Sync> {
        let reports = self.clone();
        Arc::new(move |report| reports.add(report))
    }

    fn add(&self, report: &dyn fmt::Display) {
        (self.tell)(report);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < REPORTS_KEPT {
            kept.push(report.to_string());
        }
    }
}

/// An open volume, with a place in it.
pub(crate) struct PlaceSession {
    /// The image or block device that the place names.
    pub(crate) volume: PathBuf,
    /// The tree of files that contains the place.
    pub(crate) fs: OpenTree,
    /// The path in it.
    pub(crate) path: Vec<u8>,
}

impl Session {
    /// Opens a volume that the command line names without a path.
    pub(crate) fn open(arguments: &VolumeArguments, console: &Arc<Console>) -> Result<Self> {
        Self::open_to(Access::Read, arguments, console)
    }

    /// The same with this access. A volume that is open already is used as it is.
    pub(crate) fn open_to(
        access: Access,
        arguments: &VolumeArguments,
        console: &Arc<Console>,
    ) -> Result<Self> {
        if let Some(live) = &arguments.open.live {
            let volume = live.fs.btrfs(THIS_VERB)?.volume().clone();
            let reports = KeptReports::new(None, console);
            return Ok(Self { volume, layers: Vec::new(), reports });
        }
        let opening = Opening { is_for_btrfs: true, ..Opening::of_verb(access)? };
        let disk = member_disk(&arguments.volume, &arguments.open, &opening, false)?;
        Self::open_with(disk, &arguments.open, opening, console)
    }

    /// Opens the volume as it is stored, without replaying its log.
    pub(crate) fn open_stored(arguments: &VolumeArguments, console: &Arc<Console>) -> Result<Self> {
        if arguments.open.live.is_some() {
            return Self::open(arguments, console);
        }
        let disk =
            MemberDisk::open(&arguments.volume, Access::Read, &arguments.open.layers, false)?;
        let opening = Opening { is_stored: true, ..Opening::to(Access::Read) };
        Self::open_with(disk, &arguments.open, opening, console)
    }

    /// The same, with devices that can be written.
    pub(crate) fn open_to_rescue(
        arguments: &VolumeArguments,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let opening = Opening { is_stored: true, is_for_btrfs: true, ..Opening::to(Access::Write) };
        let disk = member_disk(&arguments.volume, &arguments.open, &opening, false)?;
        Self::open_with(disk, &arguments.open, opening, console)
    }

    /// Opens the volume on devices that are open already in this way, to read it.
    pub(crate) fn open_to_read(
        devices: Vec<Arc<dyn BlockDevice>>,
        arguments: &OpenArguments,
        opening: Opening,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let opened = OpenDevices { format: VolumeFormat::Btrfs, devices, layers: Vec::new() };
        Self::of(opened, arguments, opening, console)
    }

    /// Opens the volume to scrub it, as it is stored and without changing it as a whole. A volume
    /// that is open already is used as it is.
    pub(crate) fn open_to_scrub(
        access: Access,
        arguments: &VolumeArguments,
        console: &Arc<Console>,
    ) -> Result<Self> {
        match access {
            _ if arguments.open.live.is_some() => Self::open_to(access, arguments, console),
            Access::Read => Self::open_stored(arguments, console),
            Access::Write => Self::open_to_rescue(arguments, console),
        }
    }

    /// The devices of a btrfs volume that is not opened, with this access.
    pub(crate) fn devices_of(
        access: Access,
        (volume, arguments): (&Path, &OpenArguments),
        console: &Arc<Console>,
    ) -> Result<Vec<Arc<dyn BlockDevice>>> {
        let mut opening = Opening { is_for_btrfs: true, is_stored: true, ..Opening::to(access) };
        let disk = member_disk(volume, arguments, &opening, false)?;
        Ok(OpenDevices::open(disk, arguments, &mut opening, console)?.devices)
    }

    /// Opens the volume whose first member is on `disk`, which must be btrfs.
    fn open_with(
        disk: MemberDisk,
        arguments: &OpenArguments,
        opening: Opening,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let mut opening = Opening { is_for_btrfs: true, ..opening };
        let opened = OpenDevices::open(disk, arguments, &mut opening, console)?;
        Self::of(opened, arguments, opening, console)
    }

    /// Opens the btrfs volume on these devices.
    fn of(
        OpenDevices { devices, layers, .. }: OpenDevices,
        arguments: &OpenArguments,
        opening: Opening,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let reports = KeptReports::new(opening.warned, console);
        let mut options = EngineOptions {
            is_degraded: arguments.degraded,
            is_log_ignored: opening.is_stored
                || arguments.ignore_log
                || arguments.rescue.ignores_log(),
            rescue: arguments.rescue.of_engine(opening.rescue),
            reporter: Some(opening.told.unwrap_or_else(|| reports.reporter())),
            has_tree_log: opening.has_tree_log,
            is_discarding: opening.is_discarding,
            flushes_on_commit: opening.flushes_on_commit,
            ..EngineOptions::default()
        };
        if opening.access == Access::Write && options.rescue.is_set() {
            let what = "writing to a volume that is read around damage: leave out --rescue and \
                        --ignore-checksums";
            return Err(Error::posix(Errno::INVAL, what).into());
        }
        opening.storing.apply_to(&mut options);
        if let Some(bytes) = opening.dirty_bytes {
            options.dirty_bytes = bytes;
        }
        if opening.commit.is_some() {
            options.commit_interval = opening.commit;
        }
        if opening.is_reproducible {
            options.is_reproducible = true;
            options.commit_interval = None;
        }
        let opened = match opening.access {
            Access::Write if !opening.is_stored => {
                if let Some(happens) = opening.before_writing {
                    // The second opening reports what the first one finds.
                    let reading =
                        EngineOptions { is_log_ignored: true, reporter: None, ..options.clone() };
                    drop(BtrfsVolume::open(devices.clone(), &reading)?);
                    happens(&devices)?;
                }
                BtrfsVolume::open_writable(devices, &options)
            }
            _ => BtrfsVolume::open(devices, &options),
        };
        Ok(Self { volume: opened?, layers, reports })
    }

    /// The tree of files that `arguments` select.
    fn tree(&self, arguments: &TreeArguments) -> Result<OpenTree> {
        let root = subvolume_of(&self.volume, arguments.subvolume.as_deref())?;
        Ok(OpenTree::Btrfs(self.volume.filesystem(root)?))
    }
}

impl<V> Session<V> {
    /// The reports of the library so far.
    pub(crate) fn reports(&self) -> Vec<String> {
        self.reports.kept.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Session<XfsVolume> {
    /// Opens the XFS volume on these devices.
    fn of(
        OpenDevices { devices, layers, .. }: OpenDevices,
        arguments: &OpenArguments,
        opening: Opening,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let reports = KeptReports::new(opening.warned, console);
        let mut options = XfsOptions {
            is_log_ignored: opening.is_stored
                || arguments.ignore_log
                || arguments.rescue.ignores_log(),
            reporter: Some(reports.reporter()),
            ..XfsOptions::default()
        };
        if let Some(bytes) = opening.dirty_bytes {
            options.dirty_bytes = bytes;
        }
        if opening.commit.is_some() {
            options.sync_interval = opening.commit;
        }
        if opening.is_reproducible {
            options.is_reproducible = true;
            options.sync_interval = None;
        }
        let device = devices[0].clone();
        let name = device.name().to_owned();
        let volume = match opening.access {
            Access::Write if !opening.is_stored => XfsVolume::open_writable(device, &options),
            _ => XfsVolume::open(device, &options),
        };
        let volume = volume.map_err(|error| VerbFailure::Inside(name.into(), error))?;
        Ok(Self { volume, layers, reports })
    }

    fn tree(&self, arguments: &TreeArguments) -> Result<OpenTree> {
        let tree = OpenTree::Xfs(OpenXfsFiles::of(&self.volume)?);
        tree.subvolume(arguments.subvolume.as_deref()).map(|_| tree)
    }
}

impl AnySession {
    /// Opens the volume with this access. A volume that is open already is used as it is.
    pub(crate) fn open_to(
        access: Access,
        arguments: &VolumeArguments,
        console: &Arc<Console>,
    ) -> Result<Self> {
        if arguments.open.live.is_some() {
            return Self::open_stored(arguments, console);
        }
        let opening = Opening::of_verb(access)?;
        let disk = member_disk(&arguments.volume, &arguments.open, &opening, false)?;
        Self::open_with(disk, &arguments.open, opening, console)
    }

    /// The volume.
    pub(crate) fn volume(&self) -> Arc<dyn vfs::Volume> {
        match self {
            Self::Btrfs(session) => session.volume.clone(),
            Self::Xfs(session) => session.volume.clone(),
        }
    }

    /// Opens the volume as it is stored, without replaying its log.
    pub(crate) fn open_stored(arguments: &VolumeArguments, console: &Arc<Console>) -> Result<Self> {
        let Some(live) = &arguments.open.live else {
            let disk =
                MemberDisk::open(&arguments.volume, Access::Read, &arguments.open.layers, false)?;
            let opening = Opening { is_stored: true, ..Opening::to(Access::Read) };
            return Self::open_with(disk, &arguments.open, opening, console);
        };
        Ok(match &live.fs {
            OpenTree::Btrfs(_) => Self::Btrfs(Session::open(arguments, console)?),
            OpenTree::Xfs(tree) => Self::Xfs(Session {
                volume: tree.volume.clone(),
                layers: Vec::new(),
                reports: KeptReports::new(None, console),
            }),
        })
    }

    fn open_with(
        disk: MemberDisk,
        arguments: &OpenArguments,
        mut opening: Opening,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let opened = OpenDevices::open(disk, arguments, &mut opening, console)?;
        Ok(match opened.format {
            VolumeFormat::Btrfs => {
                Self::Btrfs(Session::<BtrfsVolume>::of(opened, arguments, opening, console)?)
            }
            VolumeFormat::Xfs => {
                Self::Xfs(Session::<XfsVolume>::of(opened, arguments, opening, console)?)
            }
        })
    }
}

/// The subvolume `name`, which is an id or a path from the top level, or else the default one. A
/// path that is a number is told from an id by a leading `/`.
pub(crate) fn subvolume_of(volume: &Arc<BtrfsVolume>, name: Option<&OsStr>) -> Result<SubvolumeId> {
    let Some(name) = name else { return Ok(volume.default_subvolume()?) };
    if let Some(id) = name.to_str().and_then(|name| name.parse().ok()) {
        return Ok(volume.subvolume(TreeId(id))?.id);
    }
    let top = volume.filesystem(TreeId::FS)?;
    let file = resolve(&top, name.as_bytes(), LastLink::Follow)?;
    let root = volume.filesystem(TreeId(file.dev))?.root();
    if file != root {
        let what = format!("{} is no subvolume", Escaped(name.as_bytes()));
        return Err(Error::posix(Errno::INVAL, what).into());
    }
    Ok(TreeId(file.dev))
}

/// Opens a volume and the tree of files in it that `arguments` select.
pub(crate) fn open_tree(
    volume: &Path,
    arguments: &TreeArguments,
    opening: Opening,
    console: &Arc<Console>,
) -> Result<OpenTree> {
    if let Some(live) = &arguments.open.live {
        return Ok(live.fs.clone());
    }
    let disk = member_disk(volume, &arguments.open, &opening, true)?;
    open_tree_on(disk, arguments, opening, console)
}

/// The same on an open disk.
pub(crate) fn open_tree_on(
    disk: MemberDisk,
    arguments: &TreeArguments,
    opening: Opening,
    console: &Arc<Console>,
) -> Result<OpenTree> {
    match AnySession::open_with(disk, &arguments.open, opening, console)? {
        AnySession::Btrfs(session) => session.tree(arguments),
        AnySession::Xfs(session) => session.tree(arguments),
    }
}

impl PlaceSession {
    /// Opens a place.
    pub(crate) fn open(arguments: &PlaceArguments, console: &Arc<Console>) -> Result<Self> {
        Self::open_with(arguments, Opening::to(Access::Read), console)
    }

    /// Opens a place in this way.
    pub(crate) fn open_with(
        arguments: &PlaceArguments,
        opening: Opening,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let VolumePath { volume, path } = arguments.tree.open.place(&arguments.place);
        let fs = open_tree(&volume, &arguments.tree, opening, console)?;
        Ok(Self { volume, fs, path })
    }

    /// The file at the place.
    pub(crate) fn file(&self, last: LastLink) -> Result<HeldFile<'_>> {
        resolve_held(&*self.fs, &self.path, last).map_err(|error| self.named(error))
    }

    /// Adds the place to an error about the file there.
    pub(crate) fn named(&self, error: Error) -> VerbFailure {
        VerbFailure::Inside(self.volume.clone(), error.in_file(Escaped(&self.path)))
    }

    /// The file at the place, which must not be a directory.
    pub(crate) fn regular_file(&self) -> Result<HeldFile<'_>> {
        let file = self.file(LastLink::Follow)?;
        let name = Escaped(&self.path);
        match self.fs.attr(file.file()).map_err(|error| self.named(error))?.file_type {
            FileType::Regular => Ok(file),
            FileType::Directory => Err(self.named(Error::posix(Errno::ISDIR, name.to_string()))),
            _ => {
                let what = format!("{name} is no regular file");
                Err(self.named(Error::posix(Errno::INVAL, what)))
            }
        }
    }
}
