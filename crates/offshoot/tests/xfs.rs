//! Volumes of XFS through the library.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use offshoot::{Code, Errno, OpenOptions, Result, Volume};
use offshoot_testkit::xfs::disk::{XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;

fn few(root: &Path) {
    fs::create_dir_all(root.join("etc/deep")).expect("directories");
    fs::write(root.join("etc/motd"), "hello\n").expect("a file");
    std::os::unix::fs::symlink("motd", root.join("etc/issue")).expect("a link");
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
    assert_eq!(code(options.clone().write(true).open(image)), Code::FormatOnlyRead);
    assert_eq!(code(options.clone().subvolume("/sub").open(image)), Code::NotInFormat);
    assert_eq!(code(options.member(image).open(image)), Code::NotInFormat);
    Ok(())
}

#[test]
fn a_log_that_is_not_empty_is_replayed_in_memory_or_ignored() -> Result<()> {
    let Some(judges) = judges::require() else { return Ok(()) };
    let disk = XfsDisk::create(&judges, 512);
    disk.mkfs("");
    let mut mount = disk.mount("rw", &[]);
    few(mount.path());
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    // The data of the file was never written.
    let volume = Volume::open(disk.image())?;
    assert_eq!(volume.read_link("/etc/issue")?, Path::new("motd"));
    assert!(volume.exists("/etc/motd")?);
    let volume = OpenOptions::new().ignore_log(true).open(disk.image())?;
    assert!(!volume.exists("/etc")?);
    Ok(())
}
