//! Opening what the command line names: devices, volume, subvolume, file. What is mounted by this
//! process is open already ([`crate::live`]).

use std::ffi::OsStr;
use std::ops::Deref;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use offshoot_btrfs::{
    Compress, Filesystem, NewFiles, OpenOptions, Report, Reporter, SubvolumeId, Volume,
};
use offshoot_btrfs_format::TreeId;
use offshoot_vfs::path::{LastLink, resolve};
use offshoot_vfs::{self as vfs, Errno, Error, FileId, FileSystem, FileSystemMut, FileType};

use crate::args::{OpenArguments, PlaceArguments, TreeArguments, VolumeArguments};
use crate::disk::{Disk, refuse_shared};
use crate::exit::{Failure, Result};
use crate::output::{Console, Escaped};
use crate::place::Place;

/// How many reports are kept for `info`.
const REPORTS_KEPT: usize = 100;

/// What a volume is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    /// To be looked at, whoever else uses it.
    Read,
    /// To be changed, while nobody else does that.
    Write,
}

/// How a volume is opened.
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
pub(crate) struct Opening {
    pub(crate) access: Access,
    /// As it is stored, without the log that may be pending, and not to be changed as a whole.
    pub(crate) is_stored: bool,
    /// How data is compressed that is written.
    pub(crate) compress: Option<Compress>,
    /// How the data of new files is stored.
    pub(crate) new_files: NewFiles,
    /// The largest file that is kept in its extent item, in bytes; `None` for the usual one.
    pub(crate) max_inline: Option<u64>,
    /// How often it commits by itself; `None` for the usual time.
    pub(crate) commit: Option<Duration>,
    /// What may be changed and not on the devices yet, in bytes; `None` for the usual amount.
    pub(crate) dirty_bytes: Option<u64>,
    /// Whether fsync writes the tree log instead of committing.
    pub(crate) tree_log: bool,
    /// Whether the devices are told what commits free.
    pub(crate) discard: bool,
    /// Whether files are written back before each commit.
    pub(crate) flush_on_commit: bool,
    /// Who is told of what was survived; `None` for the console, which shows the first ones.
    pub(crate) reporter: Option<Reporter>,
    /// What happens when all devices are open, before anything of the volume is looked at.
    pub(crate) when_devices_are_open: Option<Box<dyn FnOnce()>>,
}

impl Opening {
    pub(crate) fn to(access: Access) -> Self {
        Self {
            access,
            is_stored: false,
            compress: None,
            new_files: NewFiles::default(),
            max_inline: None,
            commit: None,
            dirty_bytes: None,
            tree_log: true,
            discard: false,
            flush_on_commit: false,
            reporter: None,
            when_devices_are_open: None,
        }
    }
}

/// A volume that is open.
pub(crate) struct Session {
    /// The volume.
    pub(crate) volume: Arc<Volume>,
    /// What lies between the file of its first member and the volume, the lowest layer first.
    pub(crate) layers: Vec<String>,
    reports: Arc<Mutex<Vec<String>>>,
}

/// A tree of files of a volume that is open. Verbs that every format has see the traits of `vfs`.
#[derive(Clone)]
pub(crate) struct OpenTree(Filesystem);

impl Deref for OpenTree {
    type Target = dyn FileSystemMut;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl OpenTree {
    /// The tree of files in the number space `dev` of the same volume.
    pub(crate) fn at(&self, dev: u64) -> vfs::Result<Self> {
        self.0.volume().filesystem(TreeId(dev)).map(Self)
    }

    /// The volume that it is in.
    pub(crate) fn volume(&self) -> Arc<dyn vfs::Volume> {
        self.0.volume().clone()
    }

    /// Whether both are in one volume, opened once.
    pub(crate) fn is_beside(&self, other: &Self) -> bool {
        Arc::ptr_eq(self.0.volume(), other.0.volume())
    }

    /// What only btrfs has of it.
    pub(crate) fn btrfs(&self) -> &Filesystem {
        &self.0
    }
}

/// A volume that is open, with a place in it.
pub(crate) struct PlaceSession {
    /// The image or block device that the place names.
    pub(crate) volume: PathBuf,
    /// The tree of files that the place is in.
    pub(crate) fs: OpenTree,
    /// The path in it.
    pub(crate) path: Vec<u8>,
}

impl Session {
    /// Opens a volume that the command line names without a path.
    pub(crate) fn open(arguments: &VolumeArguments, console: &Arc<Console>) -> Result<Self> {
        Self::open_to(Access::Read, arguments, console)
    }

    /// The same for what is to be done with it, unless it is open already.
    pub(crate) fn open_to(
        access: Access,
        arguments: &VolumeArguments,
        console: &Arc<Console>,
    ) -> Result<Self> {
        if let Some(live) = &arguments.open.live {
            let volume = live.fs.btrfs().volume().clone();
            return Ok(Self { volume, layers: Vec::new(), reports: Arc::default() });
        }
        let disk = Disk::open(&arguments.volume, access, &arguments.open.layers, false)?;
        Self::open_with(disk, &arguments.open, Opening::to(access), console)
    }

    /// Opens it as it is stored, whatever a log has to say of it.
    pub(crate) fn open_stored(arguments: &VolumeArguments, console: &Arc<Console>) -> Result<Self> {
        if arguments.open.live.is_some() {
            return Self::open(arguments, console);
        }
        let disk = Disk::open(&arguments.volume, Access::Read, &arguments.open.layers, false)?;
        let opening = Opening { is_stored: true, ..Opening::to(Access::Read) };
        Self::open_with(disk, &arguments.open, opening, console)
    }

    /// The same from devices that can be written.
    pub(crate) fn open_to_rescue(
        arguments: &VolumeArguments,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let disk = Disk::open(&arguments.volume, Access::Write, &arguments.open.layers, false)?;
        let opening = Opening { is_stored: true, ..Opening::to(Access::Write) };
        Self::open_with(disk, &arguments.open, opening, console)
    }

    /// Opens it to be scrubbed, which is about what is stored and changes nothing as a whole,
    /// unless it is open already.
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

    /// Opens the volume whose first member is on `disk`.
    fn open_with(
        disk: Disk,
        arguments: &OpenArguments,
        opening: Opening,
        console: &Arc<Console>,
    ) -> Result<Self> {
        let mut disks = vec![disk];
        let layers = arguments.layers.of_further_device();
        for path in &arguments.devices {
            disks.push(Disk::open(path, opening.access, &layers, false)?);
        }
        refuse_shared(&disks)?;
        disks.iter().flat_map(|disk| &disk.warnings).for_each(|what| console.warning(what));
        let layers = disks[0].layers.clone();
        let devices: Vec<_> = disks.into_iter().map(|disk| disk.device).collect();
        if let Some(happens) = opening.when_devices_are_open {
            happens();
        }
        let reports = Arc::new(Mutex::new(Vec::new()));
        let (console, kept) = (console.clone(), reports.clone());
        let tell =
            opening.reporter.unwrap_or_else(|| Arc::new(move |report| console.warning(report)));
        let reporter = move |report: &Report| {
            tell(report);
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() < REPORTS_KEPT {
                kept.push(report.to_string());
            }
        };
        let mut options = OpenOptions {
            degraded: arguments.degraded,
            ignore_log: opening.is_stored || arguments.ignore_log,
            reporter: Some(Arc::new(reporter)),
            compress: opening.compress,
            new_files: opening.new_files,
            tree_log: opening.tree_log,
            discard: opening.discard,
            flush_on_commit: opening.flush_on_commit,
            ..OpenOptions::default()
        };
        if let Some(bytes) = opening.max_inline {
            options.max_inline = bytes;
        }
        if let Some(bytes) = opening.dirty_bytes {
            options.dirty_bytes = bytes;
        }
        if opening.commit.is_some() {
            options.commit_interval = opening.commit;
        }
        let opened = match opening.access {
            Access::Write if !opening.is_stored => Volume::open_writable(devices, &options),
            _ => Volume::open(devices, &options),
        };
        Ok(Self { volume: opened?, layers, reports })
    }

    /// What the library reported so far.
    pub(crate) fn reports(&self) -> Vec<String> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The tree of files that `arguments` name.
    fn tree(&self, arguments: &TreeArguments) -> Result<OpenTree> {
        let root = subvolume_of(&self.volume, arguments.subvolume.as_deref())?;
        Ok(OpenTree(self.volume.filesystem(root)?))
    }
}

/// The subvolume that `name` (an id, or a path from the top level) names, or the default one. A `/`
/// in front tells a path that is a number from an id.
pub(crate) fn subvolume_of(volume: &Arc<Volume>, name: Option<&OsStr>) -> Result<SubvolumeId> {
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

/// Opens a volume, and in it the tree of files that `arguments` name.
pub(crate) fn open_tree(
    volume: &Path,
    arguments: &TreeArguments,
    opening: Opening,
    console: &Arc<Console>,
) -> Result<OpenTree> {
    if let Some(live) = &arguments.open.live {
        return Ok(live.fs.clone());
    }
    let disk = Disk::open(volume, opening.access, &arguments.open.layers, true)?;
    open_tree_on(disk, arguments, opening, console)
}

/// The same on a disk that is open.
pub(crate) fn open_tree_on(
    disk: Disk,
    arguments: &TreeArguments,
    opening: Opening,
    console: &Arc<Console>,
) -> Result<OpenTree> {
    Session::open_with(disk, &arguments.open, opening, console)?.tree(arguments)
}

impl PlaceSession {
    /// Opens a place.
    pub(crate) fn open(arguments: &PlaceArguments, console: &Arc<Console>) -> Result<Self> {
        let Place { volume, path } = arguments.tree.open.place(&arguments.place);
        let fs = open_tree(&volume, &arguments.tree, Opening::to(Access::Read), console)?;
        Ok(Self { volume, fs, path })
    }

    /// The file at the place.
    pub(crate) fn file(&self, last: LastLink) -> Result<FileId> {
        resolve(&*self.fs, &self.path, last).map_err(|error| self.named(error))
    }

    /// Names the place in an error about the file there.
    pub(crate) fn named(&self, error: Error) -> Failure {
        Failure::Inside(self.volume.clone(), error.in_file(Escaped(&self.path)))
    }

    /// The file at the place, which must not be a directory.
    pub(crate) fn regular_file(&self) -> Result<FileId> {
        let file = self.file(LastLink::Follow)?;
        let name = Escaped(&self.path);
        match self.fs.attr(file).map_err(|error| self.named(error))?.file_type {
            FileType::Regular => Ok(file),
            FileType::Directory => Err(self.named(Error::posix(Errno::ISDIR, name.to_string()))),
            _ => {
                let what = format!("{name} is no regular file");
                Err(self.named(Error::posix(Errno::INVAL, what)))
            }
        }
    }
}
