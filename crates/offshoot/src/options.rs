//! How a volume is opened or made.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use offshoot_btrfs as btrfs;
use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_vfs::{Errno, Error, Result, Timestamp};
use offshoot_xfs::{XfsOptions, XfsReport};
use rustix::process;

use crate::Volume;
use crate::volume::only_in_btrfs;

/// Receives a warning, in words.
type OnWarning = Arc<dyn Fn(&str) + Send + Sync>;

/// How a volume is opened. Each method returns the options with one of them changed:
///
/// ```no_run
/// # fn main() -> offshoot::Result<()> {
/// let volume = offshoot::OpenOptions::new().write(true).partition(2).open("disk.img")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct OpenOptions {
    pub(crate) is_writable: bool,
    pub(crate) is_raw: bool,
    pub(crate) partition: Option<u32>,
    pub(crate) members: Vec<PathBuf>,
    pub(crate) subvolume: Option<PathBuf>,
    pub(crate) owner: (u32, u32),
    pub(crate) time: Option<Timestamp>,
    pub(crate) read_limit: u64,
    pub(crate) engine: btrfs::EngineOptions,
    compression: Option<String>,
    pub(crate) warned: Option<OnWarning>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            is_writable: false,
            is_raw: false,
            partition: None,
            members: Vec::new(),
            subvolume: None,
            owner: (process::geteuid().as_raw(), process::getegid().as_raw()),
            time: None,
            read_limit: 1 << 30,
            engine: btrfs::EngineOptions::default(),
            compression: None,
            warned: None,
        }
    }
}

impl OpenOptions {
    /// The defaults: for reading, with all members present.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Opens the volume for writing too. No other program may use it meanwhile.
    #[must_use]
    pub fn write(mut self, is_writable: bool) -> Self {
        self.is_writable = is_writable;
        self
    }

    /// Takes the file for a plain disk, whatever image format its first bytes look like. A guest
    /// can write such bytes to its disk.
    #[must_use]
    pub fn raw(mut self, is_raw: bool) -> Self {
        self.is_raw = is_raw;
        self
    }

    /// Opens the partition of this number of the first disk. By default the volume is the whole
    /// disk, or its only partition that holds one.
    #[must_use]
    pub fn partition(mut self, number: u32) -> Self {
        self.partition = Some(number);
        self
    }

    /// Adds a further device or image that the volume has a part on.
    #[must_use]
    pub fn member(mut self, path: impl AsRef<Path>) -> Self {
        self.members.push(path.as_ref().to_path_buf());
        self
    }

    /// Opens the volume although members are missing. Only for btrfs.
    #[must_use]
    pub fn degraded(mut self, is_degraded: bool) -> Self {
        self.engine.is_degraded = is_degraded;
        self
    }

    /// Reads the volume without its log: btrfs as its last commit left it, without what was fsynced
    /// since, and XFS as its blocks are. It cannot be written then.
    #[must_use]
    pub fn ignore_log(mut self, is_ignored: bool) -> Self {
        self.engine.is_log_ignored = is_ignored;
        self
    }

    /// Paths begin at the subvolume that has this path from the top level. By default they begin at
    /// the default subvolume, as on a mount. Only for btrfs.
    #[must_use]
    pub fn subvolume(mut self, path: impl AsRef<Path>) -> Self {
        self.subvolume = Some(path.as_ref().to_path_buf());
        self
    }

    /// The user and the group of new files; by default those of the process.
    #[must_use]
    pub fn owner(mut self, uid: u32, gid: u32) -> Self {
        self.owner = (uid, gid);
        self
    }

    /// The moment of all changes, so that the same program makes the same files. By default each
    /// change has the time of its call.
    #[must_use]
    pub fn time(mut self, at: Timestamp) -> Self {
        self.time = Some(at);
        self
    }

    /// How the data of files is compressed that do not say so themselves: `zlib`, `lzo` or `zstd`,
    /// with a level if need be, as in `zstd:3`. Not at all by default. Only for btrfs.
    #[must_use]
    pub fn compress(mut self, method: impl Into<String>) -> Self {
        self.compression = Some(method.into());
        self
    }

    /// The largest file that [`Volume::read`] reads into memory, in bytes: 1 GiB by default. A file
    /// of holes may be of any size, in an image of a few kilobytes.
    #[must_use]
    pub fn read_limit(mut self, bytes: u64) -> Self {
        self.read_limit = bytes;
        self
    }

    /// How much the cache of metadata may hold, in bytes: 64 MiB by default. The volume may take
    /// half as much again for decoded extents of compressed files that are read in small pieces.
    #[must_use]
    pub fn cache_bytes(mut self, bytes: u64) -> Self {
        self.engine.cache_bytes = bytes;
        self
    }

    /// How much may be changed and not yet on the devices, in bytes: 64 MiB by default. On XFS that
    /// is data; the size of the log bounds the rest.
    #[must_use]
    pub fn dirty_bytes(mut self, bytes: u64) -> Self {
        self.engine.dirty_bytes = bytes;
        self
    }

    /// How often the volume makes changes durable by itself: each 30 s by default, or never.
    #[must_use]
    pub fn commit_interval(mut self, interval: Option<Duration>) -> Self {
        self.engine.commit_interval = interval;
        self
    }

    /// Calls `warned` with everything that was wrong and could be survived, such as a bad copy that
    /// has a good mirror. It must not call back into the volume.
    #[must_use]
    pub fn on_warning(mut self, warned: impl Fn(&str) + Send + Sync + 'static) -> Self {
        self.warned = Some(Arc::new(warned));
        self
    }

    /// Opens the volume in the image or on the block device at `path`.
    ///
    /// # Errors
    /// [`Code`](crate::Code) lists the obstacles.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<Volume> {
        Volume::open_at(path.as_ref(), self)
    }

    /// Opens the volume whose members are `devices`, in any order. Each device holds one from its
    /// first byte on.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_devices(&self, devices: Vec<Arc<dyn BlockDevice>>) -> Result<Volume> {
        Volume::over(devices, self)
    }

    /// What the engine is told.
    ///
    /// # Errors
    /// `EINVAL` for a method of compression that there is not.
    pub(crate) fn for_engine(&self) -> Result<btrfs::EngineOptions> {
        let mut engine = self.engine.clone();
        if let Some(method) = &self.compression {
            let method = method.parse().map_err(|what: String| Error::posix(Errno::INVAL, what))?;
            engine.compress = Some(btrfs::Compress { method, is_forced: false });
        }
        if let Some(warned) = self.warned.clone() {
            engine.reporter = Some(Arc::new(move |report| warned(&report.to_string())));
        }
        Ok(engine)
    }

    /// What the engine of XFS is told.
    ///
    /// # Errors
    /// [`Code::NotInFormat`] for an option that only btrfs has.
    pub(crate) fn for_xfs(&self) -> Result<XfsOptions> {
        for (is_set, what) in [
            (self.subvolume.is_some(), "a subvolume"),
            (!self.members.is_empty(), "a further device"),
            (self.engine.is_degraded, "opening without members"),
            (self.compression.is_some(), "compression"),
        ] {
            if is_set {
                return Err(only_in_btrfs(what));
            }
        }
        let mut engine = XfsOptions {
            is_log_ignored: self.engine.is_log_ignored,
            cache_bytes: self.engine.cache_bytes,
            dirty_bytes: self.engine.dirty_bytes,
            sync_interval: self.engine.commit_interval,
            ..XfsOptions::default()
        };
        if let Some(warned) = self.warned.clone() {
            engine.reporter = Some(Arc::new(move |report: &XfsReport| warned(&report.to_string())));
        }
        Ok(engine)
    }
}

/// How a volume is made. Each method returns the options with one of them changed.
#[derive(Clone)]
pub struct CreateOptions {
    pub(crate) format: VolumeFormat,
    pub(crate) label: String,
    pub(crate) id: Option<[u8; 16]>,
    pub(crate) is_forced: bool,
    pub(crate) opened: OpenOptions,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            format: VolumeFormat::Btrfs,
            label: String::new(),
            id: None,
            is_forced: false,
            opened: OpenOptions::default(),
        }
    }
}

impl CreateOptions {
    /// The defaults: a btrfs without a label, with what `mkfs.btrfs` chooses too.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The format: btrfs by default. A volume of XFS has what `mkfs.xfs` 6.18 chooses, and at least
    /// 300 MiB on one device.
    ///
    /// ```
    /// use offshoot::device::VolumeFormat;
    /// use offshoot::{CreateOptions, Volume};
    ///
    /// # fn main() -> offshoot::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # std::env::set_current_dir(&dir).unwrap();
    /// let options = CreateOptions::new().format(VolumeFormat::Xfs).label("data");
    /// let volume = Volume::create("data.img", 300 << 20, &options)?;
    /// volume.write("/motd", "hello\n")?;
    /// volume.close()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn format(mut self, format: VolumeFormat) -> Self {
        self.format = format;
        self
    }

    /// The label: at most 255 bytes, and 12 for XFS, without NUL and line break.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// The UUID of the volume; a random one by default. Two volumes on one machine must not share
    /// it. With [`OpenOptions::time`] it makes new volumes the same byte by byte.
    #[must_use]
    pub fn id(mut self, id: [u8; 16]) -> Self {
        self.id = Some(id);
        self
    }

    /// Overwrites a filesystem or a partition table that is there.
    #[must_use]
    pub fn force(mut self, is_forced: bool) -> Self {
        self.is_forced = is_forced;
        self
    }

    /// How the new volume is opened: whole, and for writing. The owner and the time are those of
    /// its root directory too.
    #[must_use]
    pub fn opened(mut self, options: OpenOptions) -> Self {
        self.opened = options;
        self
    }
}
