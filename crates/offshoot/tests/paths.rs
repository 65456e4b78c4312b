//! Calls by path, and what volumes are found in.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use offshoot::device::MemoryDevice;
use offshoot::{
    BlockDevice, Code, CreateOptions, Errno, Error, FileType, OpenOptions, Result, SetAttr,
    Timestamp, Volume,
};

const SIZE: u64 = 256 << 20;

fn new_volume() -> (Arc<MemoryDevice>, Volume) {
    let device = Arc::new(MemoryDevice::sparse(SIZE));
    let volume = Volume::create_on(vec![device.clone()], &CreateOptions::new());
    (device, volume.expect("a volume is made"))
}

fn errno<T>(result: Result<T>) -> Errno {
    result.err().expect("it fails").errno()
}

fn names(volume: &Volume, path: &str) -> Result<Vec<OsString>> {
    volume.read_dir(path)?.map(|entry| entry.map(|entry| entry.name)).collect()
}

#[test]
fn files_are_written_read_moved_and_removed() -> Result<()> {
    let (device, volume) = new_volume();
    volume.create_dir_all("/a/b/../b//c/")?;
    volume.create_dir_all("a/b/c")?;
    volume.write("a/b/c/file", "first contents")?;
    volume.write("/a/b/c/file", "second")?;
    volume.write_at("/a/b/c/file", 10, "end")?;
    assert_eq!(volume.read("a/b/c/file")?, b"second\0\0\0\0end");
    let mut part = [0; 8];
    assert_eq!(volume.read_at("a/b/c/file", 8, &mut part)?, 5);

    volume.symlink("/a/b", "/link")?;
    volume.symlink("nowhere", "/a/dangling")?;
    volume.write("/a/dangling", "made through the link")?;
    assert_eq!(volume.read("/a/nowhere")?, b"made through the link");
    assert_eq!(volume.read_link("/link")?, Path::new("/a/b"));
    assert_eq!(volume.metadata("/link")?.file_type, FileType::Directory);
    assert_eq!(volume.symlink_metadata("/link")?.file_type, FileType::Symlink);
    volume.hard_link("/link/c/file", "/two")?;
    assert_eq!(volume.metadata("/two")?.nlink, 2);
    volume.set_xattr("/two", "user.color", "blue")?;
    assert_eq!(volume.xattr("/a/b/c/file", "user.color")?, b"blue");
    volume.set_attr("/two", &SetAttr { permissions: Some(0o600), ..SetAttr::default() })?;
    assert_eq!(volume.metadata("/two")?.permissions, 0o600);

    volume.rename("/two", "/a/one")?;
    assert!(volume.exists("/a/one")? && !volume.exists("/two")? && !volume.exists("/a/one/x")?);
    assert_eq!(errno(volume.create_dir("/a")), Errno::EXIST);
    assert_eq!(errno(volume.create_dir_all("/a/one/below")), Errno::NOTDIR);
    assert_eq!(errno(volume.remove_file("/a")), Errno::ISDIR);
    assert_eq!(errno(volume.remove_dir("/a")), Errno::NOTEMPTY);
    assert_eq!(errno(volume.remove_dir_all("/")), Errno::BUSY);
    assert_eq!(errno(volume.remove_dir_all("/a/one")), Errno::NOTDIR);
    assert_eq!(errno(volume.write("/a", "")), Errno::ISDIR);
    assert_eq!(errno(volume.read("/a")), Errno::ISDIR);
    let error = volume.read("/a/none").expect_err("it is not there");
    assert_eq!(error.to_string(), "/a/none: no such file");

    volume.remove_dir_all("/a")?;
    volume.remove_file("/link")?;
    assert!(names(&volume, "/")?.is_empty());
    volume.write("/last", "kept")?;
    volume.sync()?;
    drop(volume);
    let volume = OpenOptions::new().open_devices(vec![device])?;
    assert_eq!(volume.read("/last")?, b"kept");
    assert_eq!(errno(volume.write("/last", "no")), Errno::ROFS);
    Ok(())
}

#[test]
fn paths_are_bytes_and_directories_are_large() -> Result<()> {
    let (_, volume) = new_volume();
    let name = OsStr::from_bytes(b"\xff\xfe name\n");
    volume.write(name, "bytes")?;
    assert_eq!(volume.read(name)?, b"bytes");
    assert_eq!(names(&volume, "/")?, [name]);
    volume.create_dir("/many")?;
    for number in 0..1500 {
        volume.write(format!("/many/{number}"), "")?;
    }
    assert_eq!(names(&volume, "/many")?.len(), 1500);
    let mut seen = Vec::new();
    volume.walk("/", |entry| {
        let entry = entry.expect("everything can be read");
        seen.push(entry.path.to_path_buf());
        if seen.len() == 100 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    assert_eq!(seen[..2], [PathBuf::from(name), PathBuf::from("many")]);
    assert_eq!(seen.len(), 100);
    assert_eq!(errno(volume.walk(name, |_| ControlFlow::Continue(()))), Errno::NOTDIR);
    Ok(())
}

#[test]
fn a_file_of_holes_does_not_take_the_memory() -> Result<()> {
    let (_, volume) = new_volume();
    volume.write_at("/holes", 1 << 50, "end")?;
    assert_eq!(errno(volume.read("/holes")), Errno::FBIG);
    let mut end = [0; 4];
    assert_eq!(volume.read_at("/holes", 1 << 50, &mut end)?, 3);
    Ok(())
}

#[test]
fn subvolumes_are_made_snapshot_and_kept_from_removal() -> Result<()> {
    let (device, volume) = new_volume();
    volume.create_subvolume("/home")?;
    volume.write("/home/file", "old")?;
    volume.snapshot("/home", "/before", true)?;
    volume.write("/home/file", "new")?;
    assert_eq!(volume.read("/before/file")?, b"old");
    assert_eq!(errno(volume.write("/before/file", "no")), Errno::ROFS);
    volume.create_dir("/dir")?;
    assert_eq!(errno(volume.snapshot("/dir", "/no", false)), Errno::INVAL);
    volume.rename("/home", "/dir/home")?;
    assert_eq!(errno(volume.remove_dir_all("/dir")), Errno::XDEV);
    assert_eq!(errno(volume.remove_dir_all("/dir/home")), Errno::XDEV);
    volume.sync()?;
    drop(volume);

    let inside = OpenOptions::new().write(true).subvolume("dir/home");
    let volume = inside.open_devices(vec![device.clone()])?;
    assert_eq!(volume.read("/file")?, b"new");
    drop(volume);
    let volume = OpenOptions::new().write(true).open_devices(vec![device])?;
    volume.delete_subvolume("/dir/home")?;
    volume.remove_dir_all("/dir")?;
    assert_eq!(names(&volume, "/")?, ["before"]);
    Ok(())
}

#[test]
fn the_same_options_make_the_same_bytes() -> Result<()> {
    let make = || -> Result<Vec<u8>> {
        let device = Arc::new(MemoryDevice::sparse(SIZE));
        let opened = OpenOptions::new()
            .owner(7, 8)
            .time(Timestamp { secs: 1, nanos: 2 })
            .commit_interval(None)
            .compress("zstd:9");
        let options = CreateOptions::new().id([3; 16]).label("same").opened(opened);
        let volume = Volume::create_on(vec![device.clone()], &options)?;
        volume.write("/file", vec![b'x'; 1 << 20])?;
        let attr = volume.metadata("/file")?;
        assert_eq!((attr.uid, attr.gid, attr.mtime.nanos), (7, 8, 2));
        assert_eq!(volume.file_system().label(), b"same");
        volume.sync()?;
        drop(volume);
        let mut bytes = vec![0; usize::try_from(SIZE).expect("it fits")];
        device.read_at(0, &mut bytes).expect("memory is read");
        Ok(bytes)
    };
    assert!(make()? == make()?);
    let wrong = OpenOptions::new().compress("brotli");
    assert_eq!(errno(wrong.open_devices(Vec::new())), Errno::INVAL);
    Ok(())
}

/// An MBR with partitions of 128 MiB from 1 MiB on.
fn mbr(count: usize) -> [u8; 512] {
    let mut sector = [0; 512];
    for number in 0..count {
        let entry = &mut sector[446 + 16 * number..][..16];
        let first = 2048 + 262_144 * u32::try_from(number).expect("it is small");
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&262_144_u32.to_le_bytes());
    }
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

fn in_partition(disk: &Path, number: u64) -> Result<()> {
    let disk = Arc::new(offshoot::device::FileDevice::open_writable(disk).expect("it opens"));
    let start = (1 + 128 * (number - 1)) << 20;
    let window = offshoot::device::WindowDevice::new(disk, start..start + (128 << 20), "p".into());
    let window = Arc::new(window.expect("it is on the disk"));
    let volume = Volume::create_on(vec![window], &CreateOptions::new())?;
    volume.write("/number", number.to_string())?;
    volume.sync()
}

#[test]
fn a_volume_is_found_in_a_partition() -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory is made");
    let disk = dir.path().join("disk.img");
    let code = |options: OpenOptions| options.open(&disk).err().expect("it fails").code();
    let mut bytes = mbr(2).to_vec();
    bytes.resize(257 << 20, 0);
    fs::write(&disk, bytes).expect("the disk is made");
    assert_eq!(code(OpenOptions::new()), Code::NoVolume);
    in_partition(&disk, 2)?;
    assert_eq!(Volume::open(&disk)?.read("/number")?, b"2");
    in_partition(&disk, 1)?;
    assert_eq!(code(OpenOptions::new()), Code::SeveralVolumes);
    assert_eq!(OpenOptions::new().partition(1).open(&disk)?.read("/number")?, b"1");
    assert_eq!(OpenOptions::new().partition(2).open(&disk)?.read("/number")?, b"2");
    assert_eq!(code(OpenOptions::new().partition(3)), Code::Call);
    Ok(())
}

#[test]
fn a_volume_is_found_in_a_compressed_image_which_is_only_read() -> Result<()> {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/kernel.btrfs.zst");
    let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
    let kept = warnings.clone();
    let warned = move |what: &str| kept.lock().expect("not poisoned").push(what.to_owned());
    let volume = OpenOptions::new().on_warning(warned).open(&fixture)?;
    let mut count = 0;
    volume.walk("/", |entry| {
        entry.expect("everything can be read");
        count += 1;
        ControlFlow::Continue(())
    })?;
    assert!(count > 50, "{count}");
    let refused = OpenOptions::new().write(true).open(&fixture).err().expect("it fails");
    assert_eq!(refused.code(), Code::ImageNotWritten, "{refused}");
    Ok(())
}

#[test]
fn another_format_is_refused_by_name_and_left_alone() {
    let dir = tempfile::tempdir().expect("a directory is made");
    let path = dir.path().join("f2fs.img");
    let mut bytes = vec![0; 300 << 20];
    // The magic of an F2FS.
    bytes[1024..1028].copy_from_slice(&[0x10, 0x20, 0xf5, 0xf2]);
    fs::write(&path, &bytes).expect("the image is made");
    let error = Volume::open(&path).err().expect("it fails");
    assert_eq!(error.code(), Code::OtherFormat, "{error}");
    assert!(error.to_string().contains("F2FS"), "{error}");
    assert_eq!(errno(Volume::create(&path, 300 << 20, &CreateOptions::new())), Errno::EXIST);
    assert!(fs::read(&path).expect("it is there") == bytes);
}

#[test]
fn a_volume_that_cannot_be_made_leaves_no_file() {
    let dir = tempfile::tempdir().expect("a directory is made");
    let path = dir.path().join("small.img");
    assert!(Volume::create(&path, 1 << 20, &CreateOptions::new()).is_err());
    assert!(!path.exists());
    let none = Volume::open(dir.path().join("none.img")).err().expect("it fails");
    let is_not_found = |source: &io::Error| source.kind() == io::ErrorKind::NotFound;
    assert!(matches!(&none, Error::Io { source, .. } if is_not_found(source)), "{none}");
}

fn qemu_img(dir: &Path, words: &[&str]) {
    let output = Command::new("qemu-img").args(words).current_dir(dir).output();
    let output = output.expect("qemu-img runs; `cargo xtask setup` installs it");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "qemu-img {words:?}: {said}");
}

#[test]
fn a_qcow2_is_written_in_place_and_opens_no_file_that_was_not_named() -> Result<()> {
    let dir = tempfile::tempdir().expect("a directory is made");
    let path = |name: &str| dir.path().join(name);
    let raw = Volume::create(path("raw.img"), SIZE, &CreateOptions::new())?;
    raw.write("/file", "raw")?;
    raw.sync()?;
    drop(raw);
    qemu_img(dir.path(), &["convert", "-O", "qcow2", "raw.img", "new.qcow2"]);
    let volume = OpenOptions::new().write(true).open(path("new.qcow2"))?;
    volume.write("/file", "qcow2")?;
    volume.sync()?;
    drop(volume);
    qemu_img(dir.path(), &["check", "new.qcow2"]);
    qemu_img(dir.path(), &["convert", "-O", "raw", "new.qcow2", "judged.img"]);
    assert_eq!(Volume::open(path("judged.img"))?.read("/file")?, b"qcow2");

    let code = |options: OpenOptions, name: &str| {
        options.open(path(name)).err().expect("it does not open").code()
    };
    let over = ["create", "-f", "qcow2", "-b", "new.qcow2", "-F", "qcow2", "over.qcow2"];
    qemu_img(dir.path(), &over);
    assert_eq!(code(OpenOptions::new(), "over.qcow2"), Code::ImageOverFiles);
    let flat = ["convert", "-O", "vmdk", "-o", "subformat=monolithicFlat", "raw.img", "flat.vmdk"];
    qemu_img(dir.path(), &flat);
    assert_eq!(code(OpenOptions::new(), "flat.vmdk"), Code::ImageOverFiles);
    // As a plain disk it holds no volume.
    assert_eq!(code(OpenOptions::new().raw(true), "new.qcow2"), Code::OtherFormat);
    Ok(())
}
