//! Volumes in a qcow2 whose file is cut by a power failure: the image is not corrupt, and the
//! volume in it holds what was promised.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryDevice, Qcow2Header, Qcow2Options, open_qcow2};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::crash::explore::{StateExplorer, StateJudge};
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::manners::EngineManners;
use offshoot_testkit::crash::{MemberDevices, OpenedVolume, TestedEngine, report};
use offshoot_testkit::random::seed_of_run;
use offshoot_vfs::{Error, Result};

use crate::engine::{DISCARDING, ONE, OURS, OurEngine, volume};
use crate::{plan, some_twos};

/// The size that the file of an image may grow to, in bytes.
const FILE_BYTES: u64 = 256 << 20;

const CHUNK: usize = 64 << 10;

/// An engine whose devices are images.
struct InImages(OurEngine);

impl TestedEngine for InImages {
    fn open(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        self.0.open(disks(devices, false)?)
    }

    fn open_writable(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        self.0.open_writable(disks(devices, true)?)
    }

    fn check(&self, devices: MemberDevices) -> Result<()> {
        self.0.check(disks(devices, false)?)
    }

    /// An image that is closed stores what was written behind the last flush: copies of the
    /// superblock, and counts.
    fn manners(&self) -> EngineManners {
        EngineManners { ends_with_writes: true, ..EngineManners::default() }
    }
}

fn disks(files: MemberDevices, is_writable: bool) -> Result<MemberDevices> {
    let disk = |file: Arc<dyn BlockDevice>| {
        let header = Qcow2Header::read(&*file)?;
        open_qcow2(file, &header, Qcow2Options { is_writable, ..Qcow2Options::default() })
    };
    files
        .into_iter()
        .map(disk)
        .collect::<std::io::Result<_>>()
        .map_err(|error| Error::io("opening an image", error))
}

/// Writes the bytes of `device` to a file at `path`, with holes for zeros.
fn write_out(device: &dyn BlockDevice, path: &Path) {
    let file = File::create(path).expect("a file");
    file.set_len(device.size_bytes()).expect("a file");
    let mut chunk = vec![0; CHUNK];
    for at in (0..device.size_bytes()).step_by(CHUNK) {
        device.read_at(at, &mut chunk).expect("memory is read");
        if chunk.iter().any(|&byte| byte != 0) {
            file.write_all_at(&chunk, at).expect("a write");
        }
    }
}

fn qemu_img(dir: &Path, words: &[&str]) -> std::process::Output {
    let output = Command::new("qemu-img").args(words).current_dir(dir).output();
    output.expect("qemu-img runs; `cargo xtask setup` installs it")
}

#[test]
fn in_images() {
    if judges::require().is_none() {
        return;
    }
    let (seed, generator) = (seed_of_run(), Generator::default());
    let dir = tempfile::tempdir().expect("a directory");
    for (number, engine, words) in [
        (1, OURS, &["-o", "cluster_size=64k"][..]),
        (2, OURS, &["-o", "extended_l2=on,cluster_size=16k"]),
        (3, DISCARDING, &["-c", "-o", "cluster_size=4k,compression_type=zstd"]),
    ] {
        write_out(&*volume(seed.wrapping_add(number), ONE)[0], &dir.path().join("disk"));
        let convert = ["convert", "-f", "raw", "-O", "qcow2"];
        let words = [&convert, words, &["disk", "image"]].concat();
        for words in [&words[..], &["snapshot", "-c", "kept", "image"]] {
            assert!(qemu_img(dir.path(), words).status.success(), "{words:?}");
        }
        let image = MemoryDevice::sparse(FILE_BYTES);
        let bytes = std::fs::read(dir.path().join("image")).expect("an image");
        image.write_at(0, &bytes).expect("memory is written");
        let judge = |devices: &[Arc<MemoryDevice>]| {
            let dir = tempfile::tempdir().expect("a directory");
            write_out(&*devices[0], &dir.path().join("cut"));
            let output = qemu_img(dir.path(), &["check", "-f", "qcow2", "cut"]);
            // `qemu-img check` exits with 3 when it finds leaked clusters and nothing worse.
            match output.status.code() {
                Some(0 | 3) => Ok(()),
                _ => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            }
        };
        let judge = Some((&judge as &StateJudge<'_>, 10));
        let engine = &InImages(engine);
        let explorer =
            StateExplorer { engine, image: vec![Arc::new(image)], plan: plan(seed), judge };
        let tally = explorer.explore_all(some_twos(&generator, 10, seed.wrapping_add(number)));
        report(format_args!("{words:?}: {tally}"));
        assert!(tally.judged > 20, "{tally}");
    }
}
