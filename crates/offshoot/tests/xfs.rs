//! Volumes of XFS through the library.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use offshoot::device::{BlockDevice, MemoryDevice, VolumeFormat};
use offshoot::{
    Code, CreateOptions, Errno, OpenOptions, Result, SetAttr, Timestamp, Volume, VolumeFindings,
    XfsCheckResult, XfsLogState,
};
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;

fn few(root: &Path) {
    fs::create_dir_all(root.join("etc/deep")).expect("directories");
    fs::write(root.join("etc/motd"), "hello\n").expect("a file");
    std::os::unix::fs::symlink("motd", root.join("etc/issue")).expect("a link");
}

/// A volume of the kernel with a log that has to be replayed.
fn with_pending_log(judges: &XfsJudges) -> XfsDisk {
    let disk = XfsDisk::create(judges, 512);
    disk.mkfs("");
    let mut mount = disk.mount("rw", &[]);
    few(mount.path());
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    disk
}

fn code(result: Result<Volume>) -> Code {
    result.err().expect("it fails").code()
}

#[test]
fn a_volume_that_the_kernel_filled_is_read_and_not_written() -> Result<()> {
    let Some(judges) = judges::require() else { return Ok(()) };
    let recipe = XfsRecipe::new(XfsVolumeKind::named("usual")).fill(few);
    let filled = recipe.make(&judges);
    let image = filled.disk.image();
    let volume = Volume::open(image)?;
    assert_eq!(volume.read("/etc/issue")?, b"hello\n");
    let names: Result<Vec<_>> =
        volume.read_dir("etc")?.map(|entry| entry.map(|it| it.name)).collect();
    assert_eq!(names?.len(), 3);
    let mut count = 0;
    volume.walk("/", |entry| {
        entry.expect("everything can be read");
        count += 1;
        ControlFlow::Continue(())
    })?;
    assert_eq!(count, 4);
    assert_eq!(volume.file_system().block_size(), 4096);
    filled.compare(volume.files()).assert_same(4);

    let refused = |result: Result<()>| result.expect_err("it is refused").errno();
    assert_eq!(refused(volume.write("/etc/motd", "x")), Errno::ROFS);
    assert_eq!(refused(volume.write("/new", "x")), Errno::ROFS);
    assert_eq!(refused(volume.create_dir_all("/a/b")), Errno::ROFS);
    assert_eq!(refused(volume.remove_dir_all("/etc")), Errno::ROFS);
    assert_eq!(refused(volume.rename("/etc/motd", "/motd")), Errno::ROFS);
    volume.sync()?;
    let error = volume.create_subvolume("/sub").expect_err("it is refused");
    assert_eq!(error.code(), Code::NotInFormat, "{error}");
    let files = volume.files().root();
    assert!(volume.file_system().files(files.dev).is_ok());
    assert!(volume.file_system().files(files.dev + 1).is_err());

    let options = OpenOptions::new();
    assert_eq!(code(options.clone().subvolume("/sub").open(image)), Code::NotInFormat);
    assert_eq!(code(options.clone().member(image).open(image)), Code::NotInFormat);
    for refused in [options.clone().compress("zstd"), options.degraded(true)] {
        assert_eq!(code(refused.write(true).open(image)), Code::NotInFormat);
    }
    Ok(())
}

#[test]
fn a_log_that_is_not_empty_is_replayed_in_memory_or_ignored() -> Result<()> {
    let Some(judges) = judges::require() else { return Ok(()) };
    let disk = with_pending_log(&judges);
    // The data of the file was never written.
    let volume = Volume::open(disk.image())?;
    assert_eq!(volume.read_link("/etc/issue")?, Path::new("motd"));
    assert!(volume.exists("/etc/motd")?);
    let volume = OpenOptions::new().ignore_log(true).open(disk.image())?;
    assert!(!volume.exists("/etc")?);
    Ok(())
}

#[test]
fn a_new_volume_is_one_that_the_kernel_mounts() -> Result<()> {
    let Some(judges) = judges::require() else { return Ok(()) };
    let disk = XfsDisk::create(&judges, 512);
    let opened = OpenOptions::new().owner(7, 8).time(Timestamp { secs: 1_000_000_000, nanos: 5 });
    let options = CreateOptions::new().format(VolumeFormat::Xfs).label("data").opened(opened);
    let volume = Volume::create(disk.image(), 512 << 20, &options)?;
    assert_eq!(volume.file_system().label(), b"data");
    assert_eq!(volume.read_dir("/")?.count(), 0);
    let root = volume.metadata("/")?;
    assert_eq!((root.uid, root.gid, root.mtime.secs), (7, 8, 1_000_000_000));
    volume.create_dir_all("/etc/deep")?;
    volume.write("/etc/motd", "hello\n")?;
    volume.rename("/etc/motd", "/etc/deep/motd")?;
    // The last handle ends writing too.
    drop(volume);
    disk.assert_checks();
    let mount = disk.mount("rw", &[]);
    assert_eq!(fs::read(mount.path().join("etc/deep/motd")).expect("a file"), b"hello\n");
    drop(mount);
    let volume = OpenOptions::new().write(true).open(disk.image())?;
    let other = volume.clone();
    volume.remove_dir_all("/etc")?;
    volume.write("/new", vec![7; 100_000])?;
    volume.close()?;
    assert_eq!(other.write("/new", "x").expect_err("it was closed").errno(), Errno::ROFS);
    assert_eq!(other.read("/new")?, vec![7; 100_000]);
    drop(other);
    disk.assert_checks();
    drop(disk.mount("rw", &[]));

    let image = disk.image();
    let errno = |options: &CreateOptions| {
        Volume::create(image, 512 << 20, options).err().expect("it fails").errno()
    };
    assert_eq!(errno(&options), Errno::EXIST);
    assert_eq!(errno(&options.clone().force(true).label("thirteen bytes")), Errno::INVAL);
    let compressed = options.clone().force(true).opened(OpenOptions::new().compress("zstd"));
    let refused = Volume::create(image, 512 << 20, &compressed).err().expect("it fails");
    assert_eq!(refused.code(), Code::NotInFormat, "{refused}");
    let both = |options| {
        let device = || Arc::new(MemoryDevice::sparse(512 << 20)) as _;
        Volume::create_on(vec![device(), device()], options)
    };
    assert_eq!(code(both(&options)), Code::NotInFormat);
    let small = image.with_extension("small");
    let too_small = Volume::create(&small, 100 << 20, &options).err().expect("it fails");
    assert_eq!(too_small.errno(), Errno::NOSPC, "{too_small}");
    assert!(!small.exists());
    Ok(())
}

fn checked(options: &OpenOptions, image: &Path) -> Result<XfsCheckResult> {
    match options.check(image)? {
        VolumeFindings::Xfs(result) => Ok(result),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_volume_is_checked_and_recovered_to_disk() -> Result<()> {
    let Some(judges) = judges::require() else { return Ok(()) };
    let disk = with_pending_log(&judges);
    let options = OpenOptions::new();
    let before = fs::read(disk.image()).expect("an image");
    let result = checked(&options, disk.image())?;
    assert_eq!((result.findings.len(), result.log), (0, XfsLogState::Pending));
    assert!(fs::read(disk.image()).expect("an image") == before, "the check wrote");
    assert!(options.recover(disk.image())?.is_some_and(|done| done.transactions > 0));
    assert_eq!(options.recover(disk.image())?, None);
    assert_eq!(checked(&options, disk.image())?.log, XfsLogState::Empty);
    disk.assert_checks();
    drop(disk.mount("rw", &[]));

    let btrfs = disk.image().with_extension("btrfs");
    drop(Volume::create(&btrfs, 256 << 20, &CreateOptions::new())?);
    assert!(options.check(&btrfs)?.is_sound());
    let refused = options.recover(&btrfs).expect_err("a btrfs volume");
    assert_eq!(refused.code(), Code::NotInFormat, "{refused}");
    fs::remove_file(btrfs).expect("an image");
    Ok(())
}

/// Calls by path change the files that have the paths, while other threads remove files and make
/// new ones, which get their numbers.
#[test]
fn calls_by_path_change_no_file_that_has_another_path() -> Result<()> {
    const ROUNDS: usize = 400;
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(320 << 20));
    let options = CreateOptions::new().format(VolumeFormat::Xfs);
    let volume = Volume::create_on(vec![device.clone()], &options)?;
    volume.create_dir("/d")?;
    let is_expected = |result: &Result<()>| match result {
        Ok(()) => true,
        Err(error) => matches!(error.errno(), Errno::NOENT | Errno::NOTDIR),
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| -> Result<()> {
            for _ in 0..ROUNDS {
                volume.remove_file("/a").or_else(|error| match error.errno() {
                    Errno::NOENT => Ok(()),
                    _ => Err(error),
                })?;
                // It gets the number of the removed file, unless that is open.
                volume.write("/kept", "kept")?;
                assert_eq!(volume.read("/kept")?, b"kept");
                assert_eq!(volume.metadata("/kept")?.permissions, 0o644);
                while let Err(error) = volume.remove_dir_all("/d") {
                    // A file was made there meanwhile.
                    if error.errno() != Errno::NOTEMPTY {
                        return Err(error);
                    }
                }
                volume.create_dir("/d")?;
                volume.write("/d/kept", "kept")?;
                assert_eq!(volume.read("/d/kept")?, b"kept");
                volume.remove_file("/kept")?;
            }
            Ok(())
        });
        let mut rounds = 0;
        while !other.is_finished() {
            let permissions = Some(0o600);
            let set = SetAttr { permissions, ..SetAttr::default() };
            for result in [
                volume.write("/a", "of another path"),
                volume.set_attr("/a", &set),
                volume.write_at("/d/a", 3, "of another path"),
                volume.set_xattr("/a", "user.path", "/a"),
            ] {
                assert!(is_expected(&result), "{result:?}");
            }
            rounds += 1;
        }
        assert!(rounds > 20, "only {rounds} rounds");
        other.join().expect("no wrong file")
    })?;
    volume.close()?;
    drop(volume_of(device)?);
    Ok(())
}

/// Opens a volume and reads all of it.
fn volume_of(device: Arc<dyn BlockDevice>) -> Result<Volume> {
    let volume = OpenOptions::new().open_devices(vec![device])?;
    volume.walk("/", |entry| {
        entry.expect("everything can be read");
        ControlFlow::Continue(())
    })?;
    Ok(volume)
}

/// The kernel shows such a file; what its inode says about names is damage.
#[test]
fn a_file_that_counts_no_names_is_damaged() -> Result<()> {
    let Some(judges) = judges::require() else { return Ok(()) };
    let disk = XfsDisk::create(&judges, 512);
    disk.mkfs("");
    let mount = disk.mount("rw", &[]);
    few(mount.path());
    let ino = XfsDisk::ino(&mount.path().join("etc/motd"));
    drop(mount);
    disk.change_with_xfs_db(&[&format!("inode {ino}"), "write core.nlinkv2 0"]);
    let volume = OpenOptions::new().write(true).open(disk.image())?;
    let error = volume.write("/etc/motd", "x").expect_err("it is damaged");
    assert_eq!(error.code(), Code::Directory, "{error}");
    Ok(())
}
