//! An open volume: the `vfs` traits over it.

mod change;

use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::thread;

use offshoot_device::BlockDevice;
use offshoot_kit::counter::Counter;
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_vfs::{
    Attr, DirEntry, Errno, Error, FileFlags, FileId, FileSystem, FileSystemMut, FileType, Parent,
    ReadOnlyFiles, Result, StatFs, Structure, Trimmed, Volume, VolumeVersion, missing,
};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgNumber, Ino, XfsGeometry};

use crate::attr::FileXattrs;
use crate::buffer::MOST_TRIES;
use crate::data::{FileContent, ReadHints};
use crate::dir::{DirectoryChildren, XfsDirectory};
use crate::group;
use crate::inode::{LoadedInode, XfsInodes, file_id};
use crate::live::{XfsIdleThreads, XfsLive, open_live};
use crate::options::XfsOptions;
use crate::recover::XfsRecovery;
use crate::symlink;
use crate::volume::{self, OpenedXfs, XfsLogState};
use change::XfsFiles;

/// The blocks of each group that the kernel keeps free, so that its trees of free space can be
/// changed. `statfs` counts them as used (seen).
const KEPT_BLOCKS: u64 = 8;

/// An XFS volume that is open, for reading or for writing.
#[derive(Debug)]
pub struct XfsVolume {
    /// The threads that make changes durable in time.
    idle: Option<XfsIdleThreads>,
    /// What writes it, when it is open for writing.
    live: Option<Arc<XfsLive>>,
    volume: OpenedXfs,
    root: Ino,
    inodes: Arc<XfsInodes>,
    read_ahead: ReadAheads,
    children: DirectoryChildren,
}

/// The last share of a volume that is written shuts it down. An error is told to the reporter. A
/// thread that panics leaves the volume as a power cut would.
impl Drop for XfsVolume {
    fn drop(&mut self) {
        drop(self.idle.take());
        if let Some(live) = self.live.as_ref().filter(|_| !thread::panicking()) {
            live.shut_down_at_last();
        }
    }
}

/// The last reads, without a text for debugging.
#[derive(Default)]
struct ReadAheads(ReadAhead);

impl std::fmt::Debug for ReadAheads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReadAheads")
    }
}

/// Names the file in errors that do not name one yet.
fn of(file: FileId) -> impl Fn(Error) -> Error {
    move |error| error.in_file_if_unnamed(file)
}

impl XfsVolume {
    /// Opens the volume that begins with the first byte of `device`, which is not written. If the
    /// volume was not unmounted, its log is replayed in memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the device holds no XFS volume, when the volume needs a feature
    /// that the engine does not have, or when its log has what cannot be replayed and
    /// [`XfsOptions::is_log_ignored`] is not set; [`Error::Corrupt`] when the superblock, the log
    /// or the root directory is damaged.
    pub fn open(device: Arc<dyn BlockDevice>, options: &XfsOptions) -> Result<Arc<Self>> {
        Self::over(volume::open(device, options)?, options, |_, _| Ok(None))
    }

    /// Opens the volume that begins with the first byte of `device` for reading and writing. The
    /// device must be writable, and no other program may use it. A volume that was not unmounted is
    /// recovered first.
    ///
    /// [`Volume::shut_down`] ends it as an unmount does, and so does dropping the last share of it,
    /// which cannot return an error. A program that is killed leaves it as a power cut would: what
    /// was synced is there, and the log has to be recovered, by us or by the kernel.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`recover`](Self::recover); [`Error::Unsupported`] also when the
    /// volume has a feature that the engine does not write, such as quotas or a realtime device,
    /// and with [`XfsOptions::is_log_ignored`].
    pub fn open_writable(device: Arc<dyn BlockDevice>, options: &XfsOptions) -> Result<Arc<Self>> {
        let (opened, log) = volume::open_writable(device, options)?;
        Self::over(opened, options, |opened, inodes| {
            open_live(opened, &log, inodes, options).map(Some)
        })
    }

    /// A volume that `begin` begins to write, once its root directory is known to be one.
    fn over(
        volume: OpenedXfs,
        options: &XfsOptions,
        begin: impl FnOnce(&OpenedXfs, Arc<XfsInodes>) -> Result<Option<Arc<XfsLive>>>,
    ) -> Result<Arc<Self>> {
        let root =
            volume.superblock.fields.root().ok_or_else(|| {
                Error::corrupt(Structure::Superblock, "it names no root directory")
            })?;
        let inodes = Arc::new(XfsInodes::new(options.cache_bytes / 4));
        let children = DirectoryChildren::new(options.cache_bytes / 4);
        let (read_ahead, live, idle) = (ReadAheads::default(), None, None);
        let mut volume = Self { idle, live, volume, root, inodes, read_ahead, children };
        volume.inode(file_id(root)).and_then(|root| root.require_directory()).map_err(|error| {
            match error {
                Error::Posix { .. } => {
                    let problem = format!("inode {root}, its root, is not a directory");
                    Error::corrupt(Structure::Superblock, problem)
                }
                error => error,
            }
        })?;
        volume.live = begin(&volume.volume, volume.inodes.clone())?;
        if let (Some(live), Some(interval)) = (&volume.live, options.sync_interval) {
            volume.idle = Some(XfsIdleThreads::start(live, interval)?);
        }
        Ok(Arc::new(volume))
    }

    /// Recovers the volume on `device` if it was not unmounted: replays its log, does what that
    /// leaves to do, and empties it.
    /// Everything is durable when the call returns. `None` when the log was empty; nothing is
    /// written then. A recovery that is cut can be done again, by the kernel too.
    ///
    /// # Errors
    /// As [`open`](Self::open). [`Error::Unsupported`] also when the volume has a feature that the
    /// engine does not write, and when a group is damaged: see [`XfsPending`](crate::XfsPending).
    /// Nothing is written in these cases.
    pub fn recover(
        device: &Arc<dyn BlockDevice>,
        options: &XfsOptions,
    ) -> Result<Option<XfsRecovery>> {
        volume::recover(device, options)
    }

    /// The superblock.
    #[must_use]
    pub fn superblock(&self) -> &XfsSuperblock {
        &self.volume.superblock
    }

    /// What the log held when the volume was opened.
    #[must_use]
    pub fn log_state(&self) -> &XfsLogState {
        &self.volume.log
    }

    /// The names of the features that the superblock has, as the book spells them.
    #[must_use]
    pub fn features(&self) -> Vec<&'static str> {
        self.volume.superblock.fields.feature_names().collect()
    }

    /// What the engine did since the volume was opened for writing; nothing of one that is read.
    #[must_use]
    pub fn counters(&self) -> Vec<Counter> {
        self.live.as_ref().map(|live| live.counters()).unwrap_or_default()
    }

    fn geometry(&self) -> &XfsGeometry {
        self.volume.buffers.geometry()
    }

    fn inode(&self, file: FileId) -> Result<Arc<LoadedInode>> {
        self.inodes.get(&self.volume.buffers, file).map_err(of(file))
    }

    /// Calls `read` with a directory.
    fn in_directory<T>(
        &self,
        dir: FileId,
        read: impl FnOnce(&XfsDirectory<'_>) -> Result<T>,
    ) -> Result<T> {
        let inode = self.inode(dir)?;
        XfsDirectory::new(&self.volume.buffers, &self.inodes, &inode)
            .and_then(|directory| read(&directory))
            .map_err(of(dir))
    }

    /// Calls `read` with the data of a file.
    fn in_data<T>(
        &self,
        file: FileId,
        read: impl FnOnce(&FileContent<'_>) -> Result<T>,
    ) -> Result<T> {
        let inode = self.inode(file)?;
        FileContent::new(&self.volume.buffers, &inode)
            .and_then(|content| read(&content))
            .map_err(of(file))
    }

    /// The name of a directory in the one above it.
    fn name_in(&self, above: FileId, dir: FileId) -> Result<Vec<u8>> {
        let child = Ino(dir.ino);
        let name = self.in_directory(above, |above| self.children.name_of(above, child));
        name.map_err(|error| match error {
            Error::Posix { errno, .. } if errno != Errno::AGAIN => {
                let problem = format!("{above}, which is above it, is not a directory");
                Error::corrupt(Structure::Directory, problem).in_file(dir)
            }
            error => error,
        })
    }

    /// What writes the volume.
    ///
    /// # Errors
    /// `EROFS` when it is open for reading.
    fn live(&self) -> Result<&XfsLive> {
        let live = self.live.as_deref();
        live.ok_or_else(|| Error::posix(Errno::ROFS, "a volume that is open for reading"))
    }

    /// The free blocks that the superblock counts.
    fn free_blocks(&self) -> Result<u64> {
        let fields = &self.volume.superblock.fields;
        if self.volume.are_counters_right {
            return Ok(fields.fdblocks.get());
        }
        let groups = 0..self.geometry().ag_count;
        groups.map(|ag| group::free_blocks(&self.volume.buffers, AgNumber(ag))).sum()
    }
}

impl Volume for XfsVolume {
    fn files(self: Arc<Self>, dev: u64) -> Result<Box<dyn FileSystemMut>> {
        if dev != self.root().dev {
            return Err(Error::posix(Errno::NOENT, format!("number space {dev} of an XFS volume")));
        }
        Ok(match self.live {
            Some(_) => Box::new(XfsFiles::new(self)),
            None => Box::new(ReadOnlyFiles::new(self)),
        })
    }

    /// The state is known when the volume was unmounted and has checksums; otherwise it is another
    /// one each time the volume is opened.
    fn version(&self) -> VolumeVersion {
        let fields = &self.volume.superblock.fields;
        let opened = &self.volume.state;
        VolumeVersion {
            volume: uuid::Uuid::from_bytes(fields.uuid).to_string(),
            state: match &self.live {
                Some(live) => format!("{opened}, {}", live.durable_state()),
                None => opened.clone(),
            },
        }
    }

    fn block_size(&self) -> u32 {
        self.volume.superblock.fields.blocksize.get()
    }

    fn label(&self) -> Vec<u8> {
        match &self.live {
            Some(live) => live.label(),
            None => self.volume.superblock.fields.label().to_vec(),
        }
    }

    fn set_label(&self, label: &[u8]) -> Result<()> {
        self.live()?.set_label(label)
    }

    fn trim(&self, within: Range<u64>) -> Result<Trimmed> {
        self.live()?.trim(&within)
    }

    fn shut_down(&self) -> Result<()> {
        self.live.as_ref().map_or(Ok(()), |live| live.shut_down())
    }
}

impl FileSystem for XfsVolume {
    fn root(&self) -> FileId {
        file_id(self.root)
    }

    fn statfs(&self) -> Result<StatFs> {
        let geometry = self.geometry();
        let is_internal = geometry.log_start.0 != 0;
        let log = if is_internal { u64::from(geometry.log_blocks) } else { 0 };
        let total = geometry.blocks.saturating_sub(log);
        let free = if let Some(live) = &self.live {
            live.free_blocks().min(total)
        } else {
            let kept = KEPT_BLOCKS * u64::from(geometry.ag_count);
            self.free_blocks()?.min(total).saturating_sub(kept)
        };
        let bytes = |blocks: u64| blocks << geometry.block_log;
        Ok(StatFs {
            total_bytes: bytes(total),
            used_bytes: bytes(total - free),
            available_bytes: bytes(free),
            block_size: self.block_size(),
        })
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        self.in_directory(dir, |directory| directory.lookup(name)).map(file_id)
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        let buffers = &self.volume.buffers;
        for _ in 0..MOST_TRIES {
            let moment = buffers.moment(Ino(dir.ino));
            let above = self.in_directory(dir, |directory| directory.above().map(file_id))?;
            if dir == self.root() {
                return Ok(None);
            }
            let error = match self.name_in(above, dir) {
                Ok(name) => return Ok(Some(Parent { dir: above, name })),
                Err(error) => error,
            };
            // Another thread may have moved or removed it, or its name changes all the time.
            let is_busy = error.errno() == Errno::AGAIN;
            if !is_busy && moment.is_some_and(|moment| buffers.is_moment(Ino(dir.ino), moment)) {
                let is_removed = self.live.is_some() && self.inode(dir)?.core.links() == 0;
                let removed = || Error::posix(Errno::NOENT, format!("{dir}, which was removed"));
                return Err(if is_removed { removed() } else { error });
            }
            thread::yield_now();
        }
        Err(Error::posix(Errno::AGAIN, format!("{dir} moves all the time")))
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        match &self.live {
            Some(live) => live.attr(file),
            None => self.inode(file).and_then(|inode| inode.attr(self.geometry())),
        }
        .map_err(of(file))
    }

    /// The numbers of inodes are used again. So a name that is still there may be a new one, unless
    /// the directory stayed the same.
    fn attr_of_entry(&self, dir: FileId, name: &[u8], file: FileId) -> Result<Attr> {
        let buffers = &self.volume.buffers;
        for _ in 0..MOST_TRIES {
            let moment = buffers.moment(Ino(dir.ino));
            let found = self.attr(file);
            let is_missing = found.as_ref().is_err_and(|error| error.errno() == Errno::NOENT);
            if !is_missing || self.lookup(dir, name)? != file {
                return found;
            }
            if moment.is_some_and(|moment| buffers.is_moment(Ino(dir.ino), moment)) {
                return Err(missing(name, file).in_file(dir));
            }
            thread::yield_now();
        }
        Err(Error::posix(Errno::AGAIN, format!("{dir} never stays the same")))
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        self.inode(file).map(|inode| inode.flags())
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        self.in_directory(dir, |directory| directory.read(after, visit))
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        let buffers = &self.volume.buffers;
        let target =
            self.inodes.at_one_moment(buffers, file, |inode| symlink::target(buffers, inode));
        target.map_err(of(file))
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        FileXattrs::new(&self.volume.buffers, &self.inodes, file).get(name).map_err(of(file))
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        FileXattrs::new(&self.volume.buffers, &self.inodes, file).list(visit).map_err(of(file))
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        if let Some(live) = &self.live {
            return live.read(file, offset, buf).map_err(of(file));
        }
        self.in_data(file, |content| content.read(&self.read_ahead.0, offset, buf))
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        if let Some(live) = &self.live {
            return live.read_data(file, range, visit).map_err(of(file));
        }
        self.in_data(file, |content| content.visit(range, visit))
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        if let Some(live) = &self.live {
            return live.next_data(file, offset).map_err(of(file));
        }
        self.in_data(file, |content| content.next_data(offset))
    }

    fn prefetch(&self, files: &[FileId]) {
        let mut hints = ReadHints::default();
        for &file in files {
            // An error is ignored here: the read of the file meets it again.
            let _ = match &self.live {
                Some(live) => live.add_hints(file, &mut hints),
                None => self.in_data(file, |content| {
                    hints.add(content, 0..content.size());
                    Ok(())
                }),
            };
        }
        hints.tell(&self.volume.buffers);
    }

    fn prefetch_listed(&self, files: &[(FileId, FileType)]) {
        let buffers = &self.volume.buffers;
        let mut clusters = ReadHints::default();
        for &(file, _) in files {
            clusters.add_inode(buffers, Ino(file.ino));
        }
        clusters.tell(buffers);
        let mut blocks = ReadHints::default();
        let directories = files.iter().filter(|(_, file_type)| *file_type == FileType::Directory);
        for &(file, _) in directories {
            // An error is ignored here: the walk into the directory meets it again.
            if let Ok(inode) = self.inode(file) {
                blocks.add_directory(buffers, &inode);
            }
        }
        blocks.tell(buffers);
    }
}
