//! The two sides of `data`, `fsync` and `scale`: the library in this process, and the kernel over a
//! loop device with direct I/O.

use std::fs::File;
use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use offshoot_btrfs::SubvolumeId;
use offshoot_device::{BlockDevice, FileDevice};
use offshoot_testkit::loops::LoopMount;
use offshoot_testkit::run::{command, try_run};
use offshoot_vfs::{
    DirEntry, EntryPlace, Fallocate, FileId, FilePosition, FileSystem, FileSystemMut, NewFile,
    Timestamp,
};
use rustix::fs::{FallocateFlags, OFlags, fallocate};

use crate::Result;
use crate::formats::BenchFormat;
use crate::kernel::remove_image;
use crate::measure::drop_caches;

/// How a write is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteWay {
    /// The data may stay in memory.
    Buffered,
    /// With `O_DIRECT` on the kernel's side, and `write_direct` on ours: no data stays in memory.
    Direct,
}

/// An open volume.
pub(crate) trait ComparedVolume: Sized + Sync {
    /// The format of the volume.
    type Format: BenchFormat;
    /// An open file.
    type File: Send + Sync;
    /// A subvolume.
    type Subvolume;
    /// Whether to check what this side writes.
    const IS_OURS: bool;

    /// Makes a new volume on a new image of this size. Replaces an image that exists.
    fn make(image: &Path, size_bytes: u64) -> Result;
    /// Opens the volume. With `compress` it compresses all data that is written.
    fn open(image: &Path, compress: Option<&str>) -> Result<Self>;
    /// Opens the volume as [`open`](Self::open) does, with cold caches.
    fn open_cold(image: &Path, compress: Option<&str>) -> Result<Self> {
        drop_caches()?;
        Self::open(image, compress)
    }
    /// Makes a file in the root directory.
    fn create(&self, name: &str) -> Result<Self::File>;
    /// Opens a file in the root directory.
    fn file(&self, name: &str) -> Result<Self::File>;
    /// Writes all of `data` at `offset`.
    fn write(&self, file: &Self::File, offset: u64, data: &[u8], way: WriteWay) -> Result;
    /// Fills `buf` from `offset` on.
    fn read(&self, file: &Self::File, offset: u64, buf: &mut [u8]) -> Result;
    /// Allocates space for a range of a file that has none there.
    fn preallocate(&self, file: &Self::File, offset: u64, len: u64) -> Result;
    /// Makes a range of a file a hole.
    fn punch(&self, file: &Self::File, offset: u64, len: u64) -> Result;
    /// Finds a file in the root directory, and its attributes.
    fn find(&self, name: &str) -> Result;
    /// Lists the root directory. Returns the number of its entries.
    fn list(&self) -> Result<u64>;
    /// Removes a file from the root directory.
    fn remove(&self, name: &str) -> Result;
    /// How many bytes of data can still be written.
    fn available_bytes(&self) -> Result<u64>;
    /// Clones all data of `from` into `to`, which is empty.
    fn clone(&self, from: &Self::File, to: &Self::File) -> Result;
    /// Makes a subvolume with `files` files that each hold `data`.
    fn make_subvolume(&self, name: &str, files: u64, data: &[u8]) -> Result<Self::Subvolume>;
    /// Takes `count` snapshots of `source`. Before each it writes `data` into the next of the
    /// files.
    fn snapshots(&self, source: &Self::Subvolume, files: u64, count: u64, data: &[u8]) -> Result;
    /// Makes a file durable.
    fn fsync(&self, file: &Self::File) -> Result;
    /// Makes everything durable.
    fn sync(&self) -> Result;
    /// The number of commits so far, if this side counts them.
    fn commits(&self) -> Option<u64>;
}

/// The name of a file in a subvolume.
fn file_name(number: u64) -> String {
    format!("file{number}")
}

/// The name of a snapshot.
pub(crate) fn snapshot_name(number: u64) -> String {
    format!("snapshot{number}")
}

#[expect(clippy::needless_pass_by_value, reason = "it is passed to `map_err`")]
pub(crate) fn said(error: impl ToString) -> String {
    error.to_string()
}

/// The library in this process.
pub(crate) struct LibraryVolume<F: BenchFormat>(F::Opened);

impl<F: BenchFormat> LibraryVolume<F> {
    fn files(&self) -> &dyn FileSystemMut {
        F::files(&self.0)
    }

    fn place<'n>(&self, name: &'n str) -> EntryPlace<'n> {
        EntryPlace { dir: self.files().root(), name: name.as_bytes() }
    }
}

/// The first attributes of a new file.
fn new_file() -> NewFile {
    NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: Timestamp::now() }
}

impl<F: BenchFormat> ComparedVolume for LibraryVolume<F> {
    type Format = F;
    type File = FileId;
    type Subvolume = SubvolumeId;
    const IS_OURS: bool = true;

    fn make(image: &Path, size_bytes: u64) -> Result {
        remove_image(image)?;
        let device: Arc<dyn BlockDevice> =
            Arc::new(FileDevice::create(image, size_bytes).map_err(said)?);
        F::make(&device)
    }

    fn open(image: &Path, compress: Option<&str>) -> Result<Self> {
        let device = Arc::new(FileDevice::open_writable(image).map_err(said)?);
        F::open(device, compress).map(Self)
    }

    fn create(&self, name: &str) -> Result<FileId> {
        self.files().create(self.place(name), &new_file()).map_err(said)
    }

    fn file(&self, name: &str) -> Result<FileId> {
        self.files().lookup(self.files().root(), name.as_bytes()).map_err(said)
    }

    fn write(&self, &file: &FileId, offset: u64, data: &[u8], way: WriteWay) -> Result {
        let now = Timestamp::now();
        match way {
            WriteWay::Buffered => self.files().write(file, offset, data, now),
            WriteWay::Direct => self.files().write_direct(file, offset, data, now),
        }
        .map_err(said)
    }

    fn read(&self, &file: &FileId, offset: u64, buf: &mut [u8]) -> Result {
        let read = self.files().read(file, offset, buf).map_err(said)?;
        if read == buf.len() { Ok(()) } else { Err(format!("{read} bytes at {offset}")) }
    }

    fn preallocate(&self, &file: &FileId, offset: u64, len: u64) -> Result {
        let what = Fallocate::Allocate { keeps_size: false };
        self.files().fallocate(file, what, offset, len, Timestamp::now()).map_err(said)
    }

    fn punch(&self, &file: &FileId, offset: u64, len: u64) -> Result {
        self.files()
            .fallocate(file, Fallocate::PunchHole, offset, len, Timestamp::now())
            .map_err(said)
    }

    fn find(&self, name: &str) -> Result {
        self.files().attr(self.file(name)?).map(drop).map_err(said)
    }

    fn list(&self) -> Result<u64> {
        let mut found = 0;
        let mut count = |_: DirEntry<'_>| {
            found += 1;
            ControlFlow::Continue(())
        };
        self.files().read_dir(self.files().root(), 0, &mut count).map_err(said)?;
        Ok(found)
    }

    fn remove(&self, name: &str) -> Result {
        self.files().unlink(self.place(name), Timestamp::now()).map_err(said)
    }

    fn available_bytes(&self) -> Result<u64> {
        self.files().statfs().map(|stat| stat.available_bytes).map_err(said)
    }

    fn clone(&self, &from: &FileId, &to: &FileId) -> Result {
        let at = |file| FilePosition { file, offset: 0 };
        self.files().clone_range(at(from), at(to), 0, Timestamp::now()).map_err(said)
    }

    fn make_subvolume(&self, name: &str, files: u64, data: &[u8]) -> Result<SubvolumeId> {
        let top = F::subvolume(&self.0)?;
        let id = top.create_subvolume(self.place(name), &new_file()).map_err(said)?;
        let dir = self.file(name)?;
        for number in 0..files {
            let name = file_name(number);
            let file = top.create(EntryPlace { dir, name: name.as_bytes() }, &new_file());
            top.write(file.map_err(said)?, 0, data, Timestamp::now()).map_err(said)?;
        }
        Ok(id)
    }

    fn snapshots(&self, &source: &SubvolumeId, files: u64, count: u64, data: &[u8]) -> Result {
        let top = F::subvolume(&self.0)?;
        let dir = top.volume().filesystem(source).map_err(said)?.root();
        for number in 0..count {
            let file = top.lookup(dir, file_name(number % files).as_bytes()).map_err(said)?;
            top.write(file, 0, data, Timestamp::now()).map_err(said)?;
            let name = snapshot_name(number);
            top.snapshot(source, self.place(&name), false, Timestamp::now()).map_err(said)?;
        }
        Ok(())
    }

    fn fsync(&self, &file: &FileId) -> Result {
        self.files().fsync(file).map_err(said)
    }

    fn sync(&self) -> Result {
        self.files().sync().map_err(said)
    }

    fn commits(&self) -> Option<u64> {
        F::commits(&self.0)
    }
}

/// A volume that the kernel has mounted.
pub(crate) struct MountedVolume<F>(LoopMount, PhantomData<F>);

/// A file on it, opened once more for its first direct write.
pub(crate) struct KernelFile {
    buffered: File,
    direct: OnceLock<File>,
    path: PathBuf,
}

impl KernelFile {
    fn direct(&self) -> Result<&File> {
        if let Some(file) = self.direct.get() {
            return Ok(file);
        }
        let mut options = File::options();
        options.read(true).write(true).custom_flags(OFlags::DIRECT.bits().cast_signed());
        let file = options.open(&self.path).map_err(said)?;
        Ok(self.direct.get_or_init(|| file))
    }
}

impl<F> MountedVolume<F> {
    fn open_file(&self, name: &str, is_new: bool) -> Result<KernelFile> {
        let path = self.0.path().join(name);
        let mut options = File::options();
        options.read(true).write(true).create(is_new);
        let buffered =
            options.open(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(KernelFile { buffered, direct: OnceLock::new(), path })
    }
}

impl<F: BenchFormat + Sync> ComparedVolume for MountedVolume<F> {
    type Format = F;
    type File = KernelFile;
    type Subvolume = String;
    const IS_OURS: bool = false;

    fn make(image: &Path, size_bytes: u64) -> Result {
        remove_image(image)?;
        File::create(image).and_then(|file| file.set_len(size_bytes)).map_err(said)?;
        F::mkfs(image)
    }

    fn open(image: &Path, compress: Option<&str>) -> Result<Self> {
        let options = compress.map_or_else(String::new, |how| format!("compress-force={how}"));
        Ok(Self(F::mount(image, &options)?, PhantomData))
    }

    fn create(&self, name: &str) -> Result<KernelFile> {
        self.open_file(name, true)
    }

    fn file(&self, name: &str) -> Result<KernelFile> {
        self.open_file(name, false)
    }

    fn write(&self, file: &KernelFile, offset: u64, data: &[u8], way: WriteWay) -> Result {
        let file = if way == WriteWay::Direct { file.direct()? } else { &file.buffered };
        file.write_all_at(data, offset).map_err(said)
    }

    fn read(&self, file: &KernelFile, offset: u64, buf: &mut [u8]) -> Result {
        file.buffered.read_exact_at(buf, offset).map_err(said)
    }

    fn preallocate(&self, file: &KernelFile, offset: u64, len: u64) -> Result {
        fallocate(&file.buffered, FallocateFlags::empty(), offset, len).map_err(said)
    }

    fn punch(&self, file: &KernelFile, offset: u64, len: u64) -> Result {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file.buffered, flags, offset, len).map_err(said)
    }

    fn find(&self, name: &str) -> Result {
        std::fs::symlink_metadata(self.0.path().join(name)).map(drop).map_err(said)
    }

    fn list(&self) -> Result<u64> {
        Ok(std::fs::read_dir(self.0.path()).map_err(said)?.count() as u64)
    }

    fn remove(&self, name: &str) -> Result {
        std::fs::remove_file(self.0.path().join(name)).map_err(said)
    }

    fn available_bytes(&self) -> Result<u64> {
        let stat = rustix::fs::statvfs(self.0.path()).map_err(said)?;
        Ok(stat.f_bavail * stat.f_frsize)
    }

    fn clone(&self, from: &KernelFile, to: &KernelFile) -> Result {
        rustix::fs::ioctl_ficlone(&to.buffered, &from.buffered).map_err(said)
    }

    fn make_subvolume(&self, name: &str, files: u64, data: &[u8]) -> Result<String> {
        let path = self.0.path().join(name);
        try_run("btrfs", &["subvolume".as_ref(), "create".as_ref(), path.as_os_str()])?;
        for number in 0..files {
            std::fs::write(path.join(file_name(number)), data).map_err(said)?;
        }
        Ok(name.to_owned())
    }

    /// Calls `BTRFS_IOC_SNAP_CREATE_V2` from Perl, because that needs unsafe code in Rust. Starting
    /// a program for each snapshot would take longer than the snapshot.
    fn snapshots(&self, name: &String, files: u64, count: u64, data: &[u8]) -> Result {
        const SCRIPT: &str = r#"
            my ($root, $name, $files, $count, $byte, $size) = @ARGV;
            open(my $dir, '<', $root) or die "$root: $!";
            open(my $source, '<', "$root/$name") or die "$name: $!";
            for my $n (0 .. $count - 1) {
                my $path = "$root/$name/file" . $n % $files;
                open(my $file, '+<', $path) or die "$path: $!";
                syswrite($file, chr($byte) x $size) == $size or die "$path: $!";
                close($file) or die "$path: $!";
                my $args = pack('q Q Q x32 a4040', fileno($source), 0, 0, "snapshot$n");
                ioctl($dir, 0x50009417, $args) or die "snapshot $n: $!";
            }"#;
        let numbers =
            [files, count, data.first().copied().unwrap_or_default().into(), data.len() as u64];
        let mut perl = command("perl");
        perl.args(["-e", SCRIPT]).arg(self.0.path()).arg(name);
        perl.args(numbers.map(|number| number.to_string()));
        let output = perl.output().map_err(|error| format!("perl: {error}"))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!("perl: {}", String::from_utf8_lossy(&output.stderr)))
    }

    fn fsync(&self, file: &KernelFile) -> Result {
        file.buffered.sync_all().map_err(said)
    }

    fn sync(&self) -> Result {
        let root: OwnedFd = File::open(self.0.path()).map_err(said)?.into();
        rustix::fs::syncfs(root).map_err(said)
    }

    fn commits(&self) -> Option<u64> {
        None
    }
}
