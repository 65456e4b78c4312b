//! The file device: what it writes, and whose writes it refuses.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use offshoot_device::{BlockDevice, FileDevice, FileUse};
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use rustix::fs::FlockOperation;
use tempfile::TempDir;

fn scratch() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("disk.img");
    (dir, path)
}

fn kind<T: std::fmt::Debug>(result: std::io::Result<T>) -> ErrorKind {
    result.expect_err("it should be refused").kind()
}

#[test]
fn writes_end_up_in_the_file() {
    let (_dir, path) = scratch();
    let device = FileDevice::create(&path, 8 << 20).expect("a new image");
    assert_eq!(fs::metadata(&path).expect("it is there").blocks(), 0, "a new image is a hole");

    // More buffers than the kernel takes in one call, some of them empty.
    let mut random = Random::new(1);
    let buffers: Vec<Vec<u8>> = (0..3000).map(|number| random.bytes(number % 700)).collect();
    let slices: Vec<_> = buffers.iter().map(|buffer| IoSlice::new(buffer)).collect();
    device.write_vectored_at(12_345, &slices).expect("a large write");
    device.write_at(5, b"five").expect("a small write");
    device.write_vectored_at(0, &[]).expect("nothing");
    device.write_vectored_at(0, &[IoSlice::new(&[])]).expect("nothing again");
    device.flush().expect("a flush after the file was made");
    device.flush().expect("and one more");

    let file = fs::read(&path).expect("the image");
    let expected = buffers.concat();
    assert_eq!(file.len(), 8 << 20);
    assert_eq!(&file[5..9], b"five");
    assert!(file[12_345..12_345 + expected.len()] == expected);
    assert!(file[12_345 + expected.len()..].iter().all(|&byte| byte == 0));

    let blocks = fs::metadata(&path).expect("it is there").blocks();
    device.discard(0, 8 << 20).expect("a discard");
    assert!(fs::metadata(&path).expect("it is there").blocks() < blocks, "space is given back");
    let mut bytes = [1; 100];
    device.read_at(12_345, &mut bytes).expect("a read");
    assert_eq!(bytes, [0; 100]);
}

#[test]
fn a_write_makes_no_device_longer() {
    let (_dir, path) = scratch();
    let device = FileDevice::create(&path, 10_000).expect("a new image");
    assert_eq!(kind(device.write_at(9_999, &[1, 2])), ErrorKind::UnexpectedEof);
    assert_eq!(kind(device.write_at(u64::MAX, &[1])), ErrorKind::UnexpectedEof);
    let bufs = [IoSlice::new(&[1]), IoSlice::new(&[2])];
    assert_eq!(kind(device.write_vectored_at(9_999, &bufs)), ErrorKind::UnexpectedEof);
    assert_eq!(kind(device.discard(9_999, 2)), ErrorKind::UnexpectedEof);
    assert_eq!(fs::read(&path).expect("the image"), vec![0; 10_000]);
}

#[test]
fn a_device_for_reading_is_not_written() {
    let (_dir, path) = scratch();
    fs::write(&path, [7; 4096]).expect("an image");
    let device = FileDevice::open(&path).expect("it opens");
    let bufs = [IoSlice::new(&[1])];
    assert_eq!(kind(device.write_at(0, &[1])), ErrorKind::ReadOnlyFilesystem);
    assert_eq!(kind(device.write_vectored_at(0, &bufs)), ErrorKind::ReadOnlyFilesystem);
    assert_eq!(kind(device.discard(0, 4096)), ErrorKind::ReadOnlyFilesystem);
    device.flush().expect("nothing was written, so it is all durable");
    assert_eq!(fs::read(&path).expect("the image"), [7; 4096]);
}

#[test]
fn create_keeps_what_is_there_and_never_cuts_it_off() {
    let (_dir, path) = scratch();
    fs::write(&path, b"contents").expect("an image");
    assert_eq!(kind(FileDevice::create(&path, 7)), ErrorKind::InvalidInput);
    assert_eq!(fs::read(&path).expect("the image"), b"contents");
    let device = FileDevice::create(&path, 10).expect("a longer image");
    assert_eq!(device.size_bytes(), 10);
    device.write_at(9, b"!").expect("a write to the new part");
    assert_eq!(fs::read(&path).expect("the image"), b"contents\0!");

    // A size that no file can have leaves no file behind.
    let huge = path.with_file_name("huge.img");
    FileDevice::create(&huge, u64::MAX).expect_err("no file is as long");
    assert!(!huge.exists());
    assert_eq!(kind(FileDevice::open_writable(&huge)), ErrorKind::NotFound);
    FileDevice::open_writable(path.parent().expect("a parent")).expect_err("a directory");
}

#[test]
fn a_second_writer_is_refused_and_told_who_is_first() {
    let (_dir, path) = scratch();
    let first = FileDevice::create(&path, 4096).expect("a new image");
    for second in [FileDevice::open_writable(&path), FileDevice::create(&path, 8192)] {
        let error = second.expect_err("two writers");
        assert_eq!(error.kind(), ErrorKind::ResourceBusy);
        let me = format!("in use by process {} (", std::process::id());
        assert!(error.to_string().starts_with(&me), "{error}");
    }
    let reader = FileDevice::open(&path).expect("a reader keeps no other program out");
    drop(first);
    let next = FileDevice::open_writable(&path).expect("a reader keeps no writer away");
    drop((reader, next));
}

#[test]
fn another_process_is_named() {
    let (_dir, path) = scratch();
    File::create(&path).expect("an image");
    // The child holds the lock until its standard input is closed.
    let mut holder = Command::new("flock")
        .args([path.as_os_str(), OsStr::new("sh"), "-c".as_ref(), "echo locked; read _".as_ref()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("flock of util-linux");
    let mut line = String::new();
    let mut output = std::io::BufReader::new(holder.stdout.take().expect("a pipe"));
    std::io::BufRead::read_line(&mut output, &mut line).expect("it says that it has the lock");
    let error = FileDevice::open_writable(&path);
    drop(holder.stdin.take());
    holder.wait().expect("it ends");

    let error = error.expect_err("it is locked");
    let expected = format!("in use by process {} (flock)", holder.id());
    assert_eq!((error.kind(), error.to_string()), (ErrorKind::ResourceBusy, expected));
    FileDevice::open_writable(&path).expect("it is free again");
}

/// A `qemu-io` process that has an image open until this is dropped.
struct QemuIo(Child);

impl QemuIo {
    fn with(path: &Path, words: &[&str]) -> Self {
        let mut child = Command::new("qemu-io")
            .args(["-f", "qcow2"])
            .args(words)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io runs; `cargo xtask setup` installs it");
        // `qemu-io` answers only after it has opened the image.
        writeln!(child.stdin.as_ref().expect("a pipe"), "length").expect("it reads");
        let mut answer = [0; 16];
        let answers = child.stdout.as_mut().expect("a pipe").read(&mut answer).expect("it answers");
        assert!(answers > 0, "it ends");
        Self(child)
    }

    /// Runs one command on the image. Returns the message of `qemu-io` when it fails.
    fn does(path: &Path, words: &[&str]) -> Result<(), String> {
        let output = Command::new("qemu-io").args(["-f", "qcow2"]).args(words).arg(path).output();
        let output = output.expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(()) } else { Err(said) }
    }
}

fn make_qcow2(path: &Path) {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]).arg(path).arg("1M");
    assert!(command.status().expect("qemu-img runs").success());
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn what_qemu_has_open_is_read_but_not_written() {
    if !judges::are_present() {
        return;
    }
    let (_dir, path) = scratch();
    make_qcow2(&path);
    let refused = |result: std::io::Result<FileDevice>, qemu: &QemuIo, does: &str| {
        let error = result.expect_err("QEMU has it open");
        let expected = format!(
            "in use by process {} (qemu-io), which {does} (it has locked it as QEMU does)",
            qemu.0.id()
        );
        assert_eq!((error.kind(), error.to_string()), (ErrorKind::ResourceBusy, expected));
        FileDevice::open(&path).expect("reading stays possible");
    };
    let writer = QemuIo::with(&path, &[]);
    refused(FileDevice::open_writable(&path), &writer, "writes it");
    refused(FileDevice::create(&path, 1 << 17), &writer, "writes it");
    refused(FileDevice::open_relied_on(&path), &writer, "writes it");
    drop(writer);
    let reader = QemuIo::with(&path, &["-r"]);
    refused(FileDevice::open_writable(&path), &reader, "reads it and allows no writer");
    FileDevice::open_relied_on(&path).expect("both only read");
    drop(reader);
    let _careless = QemuIo::with(&path, &["-r", "-U"]);
    FileDevice::open_writable(&path).expect("it said that it does not mind");
}

/// An old QEMU, and other programs that lock the whole file with `fcntl`, hold their locks as a
/// process, so the kernel can name it.
#[test]
fn who_locks_as_a_process_is_named() {
    let (_dir, path) = scratch();
    let file = File::create(&path).expect("an image");
    let lock = FlockOperation::NonBlockingLockExclusive;
    rustix::fs::fcntl_lock(&file, lock).expect("no other program has it");
    let error = FileDevice::open_writable(&path).expect_err("it is locked");
    let me = format!("in use by process {} (", std::process::id());
    let said = error.to_string();
    assert!(said.starts_with(&me) && said.ends_with("), which has locked it"), "{said}");
}

#[test]
fn qemu_leaves_alone_what_is_open_here() {
    if !judges::are_present() {
        return;
    }
    let (_dir, path) = scratch();
    make_qcow2(&path);
    let device = FileDevice::open_writable(&path).expect("no other program has it");
    let write = ["-c", "write 0 512"];
    for words in [&write[..], &["-r", "-c", "read 0 512"]] {
        let said = QemuIo::does(&path, words).expect_err("it is being written");
        assert!(said.contains("lock"), "{said}");
    }
    QemuIo::does(&path, &["-r", "-U", "-c", "read 0 512"]).expect("it does not mind");
    drop(device);
    QemuIo::does(&path, &write).expect("it is free again");
    let base = FileDevice::open_relied_on(&path).expect("no other program has it");
    let second = FileDevice::open_relied_on(&path).expect("both only read");
    let said = QemuIo::does(&path, &write).expect_err("a reader relies on it");
    assert!(said.contains("lock"), "{said}");
    QemuIo::does(&path, &["-r", "-c", "read 0 512"]).expect("it only reads");
    let error = FileDevice::open_writable(&path).expect_err("a reader relies on it");
    assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
    drop((base, second));
    let _writer = FileDevice::open_writable(&path).expect("it is free again");
    FileDevice::open_relied_on(&path).expect_err("it is being written");
}

#[test]
fn what_the_kernel_uses_is_read_but_not_written() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let image = &disks.images()[0];
    let refused = |path: &std::path::Path, user: &str| {
        let error = FileDevice::open_writable(path).expect_err("the kernel uses it");
        assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
        assert_eq!(error.to_string(), format!("in use by the kernel{user}"));
        FileDevice::open(path).expect("reading stays possible");
        if path == image {
            let error = FileDevice::open_relied_on(path).expect_err("the kernel may write it");
            assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
        }
    };

    let attached = AttachedImages::new(&disks.images()[..1]);
    let device = PathBuf::from(attached.devices()[0]);
    refused(image, &format!(", through {}", device.display()));
    let writer = FileDevice::open_writable(&device).expect("the kernel has not mounted it");
    assert_eq!(writer.size_bytes(), 256 << 20);
    writer.write_at(1 << 20, &[7; 12_288]).expect("a write to a block device");
    writer.discard((1 << 20) + 1, 12_287).expect("a discard on a block device");
    writer.discard(1 << 20, 100).expect("less than a unit of it");
    let mut bytes = [1; 12_288];
    writer.read_at(1 << 20, &mut bytes).expect("a read");
    assert!(bytes[..4096] == [7; 4096] && bytes[4096..] == [0; 8192], "whole units go");
    assert_eq!(kind(writer.discard((256 << 20) - 1, 2)), ErrorKind::UnexpectedEof);
    writer.flush().expect("a flush of a block device");
    assert_eq!(kind(FileDevice::open_writable(&device)), ErrorKind::ResourceBusy);
    assert_eq!(kind(writer.write_at(256 << 20, &[1])), ErrorKind::UnexpectedEof);
    drop(writer);
    assert_eq!(kind(FileDevice::create(&device, 1 << 20)), ErrorKind::InvalidInput);
    drop(attached);

    let mount = disks.mount("");
    let device = PathBuf::from(mount.devices()[0]);
    refused(image, &format!(", through {}", device.display()));
    refused(&device, &format!(": mounted at {}", mount.path().display()));
    drop(mount);
    FileDevice::open_writable(image).expect("the kernel is done with it");
}

/// Large writes bypass the page cache of the host, and small ones go through it. A reader sees both
/// in the order in which they were made.
fn assert_seen_alike(path: &Path) {
    const SIZE: u64 = 4 << 20;
    let seed = seed_of_run();
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let device = FileDevice::open_writable(path).expect("no other program uses it");
    let mut expected = vec![0; usize::try_from(SIZE).expect("it fits")];
    for _ in 0..400 {
        let most = [600, 200_000, 1 << 20][usize::try_from(random.below(3)).expect("of three")];
        let mut len = 1 + random.below(most);
        if random.below(2) == 0 {
            len = len.next_multiple_of(4096);
        }
        let mut at = random.below(SIZE - len);
        if random.below(3) > 0 {
            at -= at % 4096;
        }
        let bytes = random.bytes(usize::try_from(len).expect("it fits"));
        device.write_at(at, &bytes).expect("a write");
        let range = usize::try_from(at).expect("it fits")..;
        expected[range.clone()][..bytes.len()].copy_from_slice(&bytes);
        let mut read = vec![0; bytes.len().min(5000)];
        device.read_at(at, &mut read).expect("a read");
        assert!(read == expected[range][..read.len()], "at {at}, {len} bytes");
    }
    device.flush().expect("a flush");
    drop(device);
    let mut stored = vec![0; expected.len()];
    File::open(path).and_then(|mut file| file.read_exact(&mut stored)).expect("it is read");
    assert!(stored == expected);
}

#[test]
fn large_and_small_writes_to_a_file_are_seen_alike() {
    let (_dir, path) = scratch();
    drop(FileDevice::create(&path, 8 << 20).expect("a new image"));
    assert_seen_alike(&path);
}

#[test]
fn large_and_small_writes_to_a_block_device_are_seen_alike() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 8);
    let attached = AttachedImages::new(disks.images());
    assert_seen_alike(Path::new(attached.devices()[0]));
}

/// `open_plain` does not follow a symbolic link, and opens only regular files.
#[test]
fn a_plain_file_is_what_the_name_itself_is() {
    let Some(_judges) = judges::require() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let [file, link, pipe] = ["file", "link", "pipe"].map(|name| dir.path().join(name));
    fs::write(&file, vec![7; 1 << 20]).expect("a file");
    std::os::unix::fs::symlink("file", &link).expect("a link");
    let made = Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    for usage in [FileUse::Read, FileUse::Rely, FileUse::Write] {
        let device = FileDevice::open_plain(&file, usage).expect("a file");
        let (opened, there) = (device.metadata().expect("it is open"), file.metadata());
        assert_eq!(opened.ino(), there.expect("it is there").ino());
        drop(device);
        FileDevice::open_for(&link, usage).expect("a link to a file");
        for path in [&link, &pipe, Path::new("/dev/zero")] {
            FileDevice::open_plain(path, usage).expect_err("it is no plain file");
        }
    }
    let attached = AttachedImages::new(&[file]);
    let device = Path::new(attached.devices()[0]);
    FileDevice::open_for(device, FileUse::Read).expect("a block device");
    FileDevice::open_plain(device, FileUse::Read).expect_err("it is no plain file");
}

/// What another process adds to a file is no part of the device.
#[test]
fn a_file_that_becomes_longer_is_read_to_the_size_that_it_had() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("file");
    std::fs::write(&path, [1; 8192]).expect("it is written");
    let device = FileDevice::open(&path).expect("it opens");
    std::fs::write(&path, [2; 16384]).expect("it is written");
    let mut buf = [0; 4096];
    device.read_at(4096, &mut buf).expect("within the device");
    device.read_at(8192, &mut buf).expect_err("behind its end");
}
