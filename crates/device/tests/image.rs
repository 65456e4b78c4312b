//! Images of disks: hostile ones, and what a power cut leaves of a qcow2 that is written.

mod bodies;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use offshoot_device::{
    BlockDevice, CrashDevice, CrashPlan, FileDevice, ImageKind, MemoryDevice, Qcow2Header,
    Qcow2Options, open_image, open_qcow2,
};
use offshoot_testkit::judges;
use offshoot_testkit::random::{Random, seed_of_run};

/// Makes an image of `size` with `options`, and some data in its middle; its bytes.
fn made(dir: &Path, format: &str, size: &str, options: &str) -> Vec<u8> {
    let path = dir.join("made");
    let _ = std::fs::remove_file(&path);
    let plain = dir.join("plain");
    let mut bytes = vec![0; 3 << 20];
    bytes[1 << 20..(1 << 20) + 9000].fill(0xab);
    std::fs::write(&plain, &bytes).expect("a file");
    let mut command = Command::new("qemu-img");
    match size {
        "" => command.args(["convert", "-O", format]),
        _ => command.args(["create", "-q", "-f", format]),
    };
    command.args(options.split_whitespace());
    match size {
        "" => command.args([&plain, &path]),
        size => command.arg(&path).arg(size),
    };
    let output = command.output().expect("qemu-img runs; `cargo xtask setup` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(&path).expect("an image")
}

/// The file at `path` compressed in every way.
fn streams(path: &Path) -> Vec<Vec<u8>> {
    let stream = |program: &&str| {
        let output = Command::new(program).args(["-1", "-c"]).arg(path).output();
        let output = output.expect("it runs; `cargo xtask setup` installs it");
        assert!(output.status.success(), "{program}: {}", output.status);
        output.stdout
    };
    ["gzip", "xz", "zstd"].iter().map(stream).collect()
}

/// Seeded mutations of small images of every kind, as the fuzz target has them.
#[test]
fn hostile_images() {
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    made(dir.path(), "qcow2", "", "-o cluster_size=512");
    let mut images = streams(&dir.path().join("made"));
    for (format, options) in [
        ("qcow2", ""),
        ("qcow2", "-c"),
        ("qcow2", "-o cluster_size=512"),
        ("qcow2", "-o extended_l2=on,cluster_size=16k"),
        ("qcow2", "-c -o compression_type=zstd"),
        ("vdi", ""),
        ("vpc", ""),
        ("vhdx", "-o block_size=1M"),
        ("vmdk", ""),
        ("vmdk", "-o subformat=streamOptimized"),
        ("vmdk", "-o subformat=monolithicFlat"),
        ("vmdk", "-o subformat=twoGbMaxExtentSparse"),
    ] {
        images.push(made(dir.path(), format, "", options));
    }
    let mut random = Random::new(0x696d_6167);
    for image in images {
        bodies::image(&image);
        for _ in 0..40 {
            let mut bytes = image.clone();
            for _ in 0..=random.below(4) {
                // Mostly in a header.
                let most = if random.below(3) == 0 { bytes.len() as u64 } else { 1024 };
                let at = usize::try_from(random.below(most.min(bytes.len() as u64)));
                let which = usize::try_from(random.below(4)).expect("small");
                let value = [0, 0xff, 1, random.bytes(1)[0]][which];
                bytes[at.expect("small")] = value;
            }
            if random.below(4) == 0 {
                bytes.truncate(usize::try_from(random.below(bytes.len() as u64)).expect("small"));
            }
            bodies::image(&bytes);
        }
    }
}

/// A table with entries for bitmaps, which blocks of the largest size bring after 4 GiB, and
/// headers of which one is damaged, or that say that a log has to be replayed.
#[test]
fn a_large_vhdx_is_read_by_the_header_that_is_whole() {
    const MIB: u64 = 1 << 20;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("disk.vhdx");
    let name = path.to_str().expect("text");
    let words = ["create", "-q", "-f", "vhdx", "-o", "block_size=256M", name, "40G"];
    let made = Command::new("qemu-img").args(words).status().expect("it runs");
    assert!(made.success());
    // Right before and behind the place of a bitmap, and at the end.
    let places = [0, 4095, 4096, 4097, 8191, 8192, 20_480, 40_959].map(|mib| mib * MIB);
    let write = |at: &u64| format!("write -P {} {at} 4k", 1 + at / MIB % 251);
    qemu_io(&path, "vhdx", &places.iter().map(write).collect::<Vec<_>>());
    let opens = || {
        let file = FileDevice::open(&path).expect("it opens");
        open_image(Arc::new(file), ImageKind::Vhdx)
    };
    let is_right = || {
        let disk = opens().expect("it is whole");
        assert_eq!(disk.size_bytes(), 40 << 30);
        for at in places {
            let mut found = [0; 8192];
            disk.read_at(at, &mut found).expect("it is read");
            let expected = u8::try_from(1 + at / MIB % 251).expect("small");
            assert!(found[..4096] == [expected; 4096] && found[4096..] == [0; 4096], "{at}");
        }
    };
    is_right();
    let file = File::options().read(true).write(true).open(&path).expect("a file");
    let sequence = |at: u64| {
        let mut number = [0; 8];
        file.read_exact_at(&mut number, at + 8).expect("a header");
        u64::from_le_bytes(number)
    };
    // The older one, and the first table of regions, are not needed.
    let headers = [64 << 10, 128 << 10];
    let [newer, older] = if sequence(headers[0]) > sequence(headers[1]) {
        headers
    } else {
        [headers[1], headers[0]]
    };
    for at in [older, 192 << 10] {
        file.write_all_at(&[7; 8], at + 20).expect("it is written");
    }
    is_right();
    let mut header = [0; 4096];
    file.read_exact_at(&mut header, newer).expect("a header");
    header[48..64].fill(7);
    header[4..8].fill(0);
    let sum = crc32c::crc32c(&header).to_le_bytes();
    header[4..8].copy_from_slice(&sum);
    file.write_all_at(&header, newer).expect("it is written");
    let error = opens().expect_err("it was not closed").to_string();
    assert!(error.contains("its log has to be replayed"), "{error}");
    header[4] ^= 1;
    file.write_all_at(&header, newer).expect("it is written");
    let error = opens().expect_err("both are damaged").to_string();
    assert!(error.contains("both of its headers"), "{error}");
}

/// Whatever a power cut leaves of a qcow2, `qemu-img` finds no corruption in it, though there may
/// be clusters that are counted and not used; and what was flushed is there.
#[test]
fn a_power_cut_leaves_a_qcow2_without_corruption() {
    const DISK_BYTES: u64 = 8 << 20;
    const FILE_BYTES: u64 = 12 << 20;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or(20);
    println!("OFFSHOOT_SEED={seed}");
    let mut random = Random::new(seed);
    for options in ["-o cluster_size=4k", "-o compat=0.10,cluster_size=512"] {
        let image = made(dir.path(), "qcow2", "8M", options);
        let base = bodies::disk(&image, FILE_BYTES);
        let device = Arc::new(CrashDevice::new(base));
        let header = Qcow2Header::read(&*device).expect("a header");
        let writable = Qcow2Options { is_writable: true, ..Qcow2Options::default() };
        let disk = open_qcow2(device.clone(), &header, writable).expect("it opens");
        assert_eq!(disk.size_bytes(), DISK_BYTES);
        // What was flushed, one image for each flush.
        let mut model = vec![0; usize::try_from(DISK_BYTES).expect("small")];
        let mut flushed = vec![model.clone()];
        for step in 0..28u8 {
            let at = random.below(DISK_BYTES - 20_000);
            let len = 1 + random.below(20_000);
            let range =
                usize::try_from(at).expect("small")..usize::try_from(at + len).expect("small");
            match random.below(8) {
                0 => match disk.discard(at, len) {
                    // What is read there now is not defined: it is written again.
                    Ok(()) => {
                        disk.write_at(at, &vec![step + 1; range.len()]).expect("a write");
                        model[range].fill(step + 1);
                    }
                    Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::Unsupported),
                },
                1 | 2 => {
                    disk.flush().expect("a flush");
                    flushed.push(model.clone());
                    device.mark("flush");
                }
                _ => {
                    disk.write_at(at, &vec![step + 1; range.len()]).expect("a write");
                    model[range].fill(step + 1);
                }
            }
        }
        let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 2, seed, torn: true };
        let (mut count, path) = (0, dir.path().join("cut"));
        for state in device.log().states(&plan) {
            let state = state.expect("memory is read");
            let mut bytes = vec![0; usize::try_from(FILE_BYTES).expect("small")];
            state.devices[0].read_at(0, &mut bytes).expect("memory is read");
            let device = Arc::new(MemoryDevice::new(bytes.clone()));
            let header = Qcow2Header::read(&*device).expect("a header");
            let disk = open_qcow2(device, &header, Qcow2Options::default()).expect("it opens");
            let mut found = vec![0; model.len()];
            disk.read_at(0, &mut found).expect("it is read");
            let before = &flushed[state.marks().len()];
            // Every write has bytes of its own, so these were not written since.
            let is_lost = |at: &usize| before[*at] == model[*at] && found[*at] != model[*at];
            let lost = (0..found.len()).find(is_lost);
            assert_eq!(lost, None, "seed {seed}, {options}, {}", state.description);
            if count % 8 == 0 {
                std::fs::write(&path, &bytes).expect("a file");
                let output = Command::new("qemu-img")
                    .args(["check", "-f", "qcow2"])
                    .arg(&path)
                    .output()
                    .expect("it runs");
                // 3: leaked clusters.
                let said = String::from_utf8_lossy(&output.stderr);
                let code = output.status.code();
                let what = &state.description;
                assert!(matches!(code, Some(0 | 3)), "seed {seed}, {options}, {what}: {said}");
            }
            count += 1;
        }
        assert!(count > 50, "only {count} states");
    }
}

/// Runs commands of `qemu-io` on the image at `path`.
fn qemu_io(path: &Path, format: &str, commands: &[String]) {
    let mut command = Command::new("qemu-io");
    command.args(["-f", format]).args(commands.iter().flat_map(|one| ["-c", one])).arg(path);
    let output = command.output().expect("qemu-io runs; `cargo xtask setup` installs it");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Parts of clusters that are stored, zeros, compressed, given back or in the backing file, and
/// a snapshot of them, are what QEMU makes of them.
#[test]
fn what_qemu_stored_in_parts_of_clusters_is_read() {
    const DISK_BYTES: u64 = 4 << 20;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let run = |words: &[&str]| {
        let mut command = Command::new("qemu-img");
        let output = command.args(words).current_dir(dir.path()).output().expect("it runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    // Shorter than the disk above it.
    let base = random.bytes(usize::try_from(DISK_BYTES - 300_000).expect("small"));
    std::fs::write(dir.path().join("base"), &base).expect("a file");
    run(&["convert", "-O", "qcow2", "-f", "raw", "base", "base.qcow2"]);
    let path = dir.path().join("top");
    for options in [
        "extended_l2=on",
        "extended_l2=on,cluster_size=16k,compression_type=zstd",
        "compression_type=zstd",
    ] {
        let _ = std::fs::remove_file(&path);
        let base = ["-b", "base", "-F", "raw", "-o", options];
        run(&[&["create", "-q", "-f", "qcow2"], &base[..], &["top", "4M"]].concat());
        let mut commands = |count: u64| -> Vec<String> {
            let one = |_| {
                let len = (1 + random.below(80)) * 1024;
                let at = random.below((DISK_BYTES - len) / 512) * 512;
                match random.below(4) {
                    0 => format!("write -z {at} {len}"),
                    1 => format!("discard {at} {len}"),
                    _ => format!("write -P {} {at} {len}", 1 + at % 250),
                }
            };
            (0..count).map(one).collect()
        };
        // QEMU compresses only what is not there yet.
        let packed = (0..DISK_BYTES >> 16).step_by(3);
        let packed = packed.map(|at| format!("write -c -P {} {} 64k", 1 + at, at << 16));
        qemu_io(&path, "qcow2", &packed.collect::<Vec<_>>());
        qemu_io(&path, "qcow2", &commands(20));
        run(&["snapshot", "-c", "kept", "top"]);
        run(&["convert", "-O", "raw", "top", "kept"]);
        qemu_io(&path, "qcow2", &commands(20));
        run(&["convert", "-O", "raw", "top", "now"]);
        let file = Arc::new(FileDevice::open(&path).expect("it opens"));
        let header = Qcow2Header::read(&*file).expect("a header");
        let opens =
            |name: &str| Arc::new(FileDevice::open(&dir.path().join(name)).expect("it opens"));
        let packed = opens("base.qcow2");
        let packed_header = Qcow2Header::read(&*packed).expect("a header");
        let packed = open_qcow2(packed, &packed_header, Qcow2Options::default());
        let bases: [Arc<dyn BlockDevice>; 2] = [opens("base"), packed.expect("it opens")];
        let kept = header.snapshot("kept").cloned();
        for (base, name, snapshot) in
            [(0, "now", None), (0, "kept", kept.clone()), (1, "now", None), (1, "kept", kept)]
        {
            let backing = Some(bases[base].clone());
            let options = Qcow2Options { is_writable: false, backing, snapshot };
            let disk = open_qcow2(file.clone(), &header, options).expect("it opens");
            let expected = std::fs::read(dir.path().join(name)).expect("a file");
            assert_eq!(disk.size_bytes(), expected.len() as u64);
            let mut found = vec![1; expected.len()];
            disk.read_at(0, &mut found).expect("it is read");
            let differs = (0..found.len()).find(|&at| found[at] != expected[at]);
            assert_eq!(differs, None, "seed {seed}, {name}");
        }
        // What is behind the end of a file that was cut is not what the base has there.
        let len = file.size_bytes();
        File::options()
            .write(true)
            .open(&path)
            .expect("a file")
            .set_len(len / 2)
            .expect("it is cut");
        let cut: Arc<dyn BlockDevice> = opens("top");
        let options = Qcow2Options { backing: Some(bases[0].clone()), ..Qcow2Options::default() };
        open_qcow2(cut, &header, options)
            .and_then(|disk| {
                disk.read_at(0, &mut vec![0; usize::try_from(DISK_BYTES).expect("small")])
            })
            .expect_err("it is cut");
    }
}

/// A device on which small reads take long, so that other threads come between them and the write
/// that follows.
#[derive(Debug)]
struct SlowSmallReads(Arc<CrashDevice>);

impl BlockDevice for SlowSmallReads {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)?;
        if buf.len() <= 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.flush()
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.discard(offset, len)
    }
}

/// Several threads write and flush at once, with counts that share a byte too: no cluster that is
/// referred to is ever counted as free on the medium, and at the end all counts are right.
#[test]
fn writers_at_once_lose_no_count() {
    /// What one table of the second level maps, with clusters of 512 bytes.
    const TABLE_SPAN: u64 = 32 << 10;
    const TABLES: u64 = 64;
    const FILE_BYTES: u64 = 3 << 20;
    const THREADS: u64 = 4;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("cut");
    let check = |device: &dyn BlockDevice| {
        let mut bytes = vec![0; usize::try_from(FILE_BYTES).expect("small")];
        device.read_at(0, &mut bytes).expect("memory is read");
        std::fs::write(&path, &bytes).expect("a file");
        let mut command = Command::new("qemu-img");
        let output = command.args(["check", "-f", "qcow2"]).arg(&path).output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for bits in [1, 2, 4, 16] {
        let options = format!("-o cluster_size=512,refcount_bits={bits}");
        let image = made(dir.path(), "qcow2", "2M", &options);
        let device = Arc::new(CrashDevice::new(bodies::disk(&image, FILE_BYTES)));
        let below = Arc::new(SlowSmallReads(device.clone()));
        let header = Qcow2Header::read(&*device).expect("a header");
        let writable = Qcow2Options { is_writable: true, ..Qcow2Options::default() };
        let disk = open_qcow2(below, &header, writable).expect("it opens");
        let write = |thread: u64| {
            for table in (thread..TABLES).step_by(usize::try_from(THREADS).expect("small")) {
                for at in 0..4 {
                    disk.write_at(table * TABLE_SPAN + at * 512, &[7; 512]).expect("a write");
                    disk.flush().expect("a flush");
                }
            }
        };
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                scope.spawn(move || write(thread));
            }
        });
        drop(disk);
        let (code, said) = check(&*device);
        assert_eq!(code, Some(0), "{bits} bits: {said}");
        let plan = CrashPlan { exhaustive_limit: 1, samples_per_epoch: 1, seed: 6, torn: false };
        let mut count = 0;
        for state in device.log().states(&plan).step_by(5) {
            let state = state.expect("memory is read");
            let (code, said) = check(&state.devices[0]);
            let what = &state.description;
            // 3: leaked clusters.
            assert!(matches!(code, Some(0 | 3)), "{bits} bits, {what}: {said}");
            count += 1;
        }
        assert!(count > 30, "only {count} states");
    }
}
