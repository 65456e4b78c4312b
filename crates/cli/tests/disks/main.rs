//! Disks around volumes: partitions by `sfdisk`, images by `qemu-img`, and volumes in them that the
//! kernel filled.
//!
//! The kernel makes a volume once. Other tests judge what the program extracts from the plain
//! image. So here, a stream of the same volume inside a disk must have the same bytes. What the
//! program writes into a disk is copied out of it again, and `btrfs check` and the kernel judge it.

mod cloud;
mod images;
mod partitions;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges::Judges;

const MIB: u64 = 1 << 20;

/// The size of the volume, in bytes.
const VOLUME_BYTES: u64 = 128 * MIB;

/// A directory with `raw.img`, the image of a volume that the kernel filled, labelled `root`.
struct KernelImage {
    disks: Disks,
    dir: PathBuf,
    /// The stream that `extract` makes of it.
    stream: Vec<u8>,
}

impl KernelImage {
    fn new(judges: &Judges) -> Self {
        let disks = Disks::create(judges, 1, VOLUME_BYTES / MIB);
        disks.mkfs_and_settle(&["-L", "root"]);
        {
            let mount = disks.mount("rw,noatime,compress=zstd");
            fill::handful::fill(mount.path());
            fill::write(&mount.path().join("text"), b"what the kernel wrote\n");
        }
        let raw = disks.images()[0].clone();
        let dir = raw.parent().expect("images are in a directory").to_owned();
        std::fs::rename(&raw, dir.join("raw.img")).expect("it is renamed");
        let mut bench = Self { disks, dir, stream: Vec::new() };
        bench.stream = bench.stream_of("raw.img");
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Runs the program in the directory.
    fn offshoot(&self, words: &[&str]) -> Output {
        let program = env!("CARGO_BIN_EXE_offshoot");
        let mut command = Command::new(program);
        command.args(words).current_dir(&self.dir).stdin(Stdio::null());
        command.output().expect("the program starts")
    }

    /// Runs the program. It must succeed without messages. Returns its output.
    #[track_caller]
    fn does(&self, words: &[&str]) -> String {
        let output = self.offshoot(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.is_empty(), "{words:?}: {}\n{said}", output.status);
        String::from_utf8(output.stdout).expect("text")
    }

    /// Runs the program. It must fail with `code`. Returns its messages.
    #[track_caller]
    fn fails(&self, words: &[&str], code: i32) -> String {
        let output = self.offshoot(words);
        let said = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        assert!(output.stdout.is_empty(), "{words:?} prints something");
        said
    }

    /// A stream of the whole volume.
    #[track_caller]
    fn stream_of(&self, volume: &str) -> Vec<u8> {
        self.stream(&[volume])
    }

    #[track_caller]
    fn stream(&self, words: &[&str]) -> Vec<u8> {
        let output = self.offshoot(&[&["extract", "--tar", "-"], words].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {}\n{said}", output.status);
        output.stdout
    }

    /// Requires that the volume holds what the plain image holds.
    #[track_caller]
    fn is_same(&self, words: &[&str]) {
        assert!(self.stream(words) == self.stream, "{words:?} has something else");
    }

    /// Makes a disk of `size` bytes, with the partitions that `sfdisk` makes of `script`.
    fn partitioned(&self, name: &str, size: u64, script: &str) -> PathBuf {
        let path = self.path(name);
        File::create(&path).and_then(|file| file.set_len(size)).expect("an image");
        pipe("sfdisk", &["--quiet".as_ref(), path.as_os_str()], script.as_bytes());
        path
    }

    /// Copies the volume to offset `start` of the image `name`.
    fn put_volume(&self, name: &str, start: u64) {
        copy_range(&self.path("raw.img"), 0, &self.path(name), start, VOLUME_BYTES);
    }

    /// Copies the volume at offset `start` of the image `name` to the image that the kernel mounts.
    fn take_volume(&self, name: &str, start: u64) {
        let target = &self.disks.images()[0];
        let _ = std::fs::remove_file(target);
        File::create(target).and_then(|file| file.set_len(VOLUME_BYTES)).expect("an image");
        copy_range(&self.path(name), start, target, 0, VOLUME_BYTES);
    }
}

/// Runs a program with `input`.
#[track_caller]
fn pipe(program: &str, args: &[&OsStr], input: &[u8]) {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap_or_else(|error| {
        panic!("{program}: {error}; `cargo xtask setup` installs it");
    });
    child.stdin.take().expect("it has a pipe").write_all(input).expect("it reads");
    let status = child.wait().expect("it ends");
    assert!(status.success(), "{program} {args:?}: {status}");
}

fn copy_range(from: &Path, start: u64, to: &Path, target: u64, len: u64) {
    let mut from = File::open(from).expect("an image");
    let to = File::options().write(true).open(to).expect("an image");
    from.seek(SeekFrom::Start(start)).expect("it is long enough");
    let mut bytes = vec![0; 1 << 20];
    let mut done = 0;
    while done < len {
        let part = usize::try_from((len - done).min(MIB)).expect("small");
        from.read_exact(&mut bytes[..part]).expect("a read");
        if bytes[..part].iter().any(|&byte| byte != 0) {
            to.write_all_at(&bytes[..part], target + done).expect("a write");
        }
        done += part as u64;
    }
}
