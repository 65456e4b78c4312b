//! What a power cut leaves of a qcow2, and several threads that write at the same time.

use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use offshoot_device::{
    BlockDevice, CrashDevice, CrashPlan, MemoryDevice, Qcow2Header, Qcow2Options, open_qcow2,
};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::scratch_dir;

use super::bodies;
use super::qemu::{made, qemu_img};

/// An image on which the test makes power cuts.
#[expect(clippy::struct_excessive_bools, reason = "each is a property by itself")]
struct CutCase {
    /// The options with which `qemu-img` makes it.
    options: &'static str,
    /// The disk is full of compressible data.
    is_filled: bool,
    has_snapshot: bool,
    /// The image stores nothing and shows its backing file.
    has_backing: bool,
    /// The test writes all of the disk, so that the table of reference counts must grow.
    has_growth: bool,
}

const CASES: [CutCase; 7] = [
    CutCase::empty("-o cluster_size=4k"),
    CutCase::empty("-o compat=0.10,cluster_size=512"),
    CutCase { has_growth: true, ..CutCase::empty("-o cluster_size=512,refcount_bits=64") },
    CutCase::empty("-o cluster_size=16k,extended_l2=on"),
    CutCase { is_filled: true, ..CutCase::empty("-c -o cluster_size=4k") },
    CutCase {
        is_filled: true,
        has_snapshot: true,
        ..CutCase::empty("-c -o cluster_size=16k,extended_l2=on,compression_type=zstd")
    },
    CutCase { has_snapshot: true, has_backing: true, ..CutCase::empty("-o cluster_size=2k") },
];

impl CutCase {
    const fn empty(options: &'static str) -> Self {
        Self {
            options,
            is_filled: false,
            has_snapshot: false,
            has_backing: false,
            has_growth: false,
        }
    }

    /// Makes the image. Returns the bytes of the file, of the disk, and of the backing file.
    fn make(&self, dir: &Path, random: &mut Random) -> (Vec<u8>, Vec<u8>, Option<Vec<u8>>) {
        let _ = std::fs::remove_file(dir.join("made"));
        let mut disk = vec![0; small(DISK_BYTES)];
        let mut backing = None;
        if self.is_filled || self.has_backing {
            disk = random.text(disk.len());
        }
        std::fs::write(dir.join("plain"), &disk).expect("a file");
        let options: Vec<_> = self.options.split_whitespace().collect();
        if self.has_backing {
            let create = ["create", "-q", "-f", "qcow2", "-b", "plain", "-F", "raw"];
            qemu_img(dir, &[&create[..], &options, &["made"]].concat());
            backing = Some(disk.clone());
        } else {
            qemu_img(
                dir,
                &[&["convert", "-O", "qcow2"], &options[..], &["plain", "made"]].concat(),
            );
        }
        if self.has_snapshot {
            qemu_img(dir, &["snapshot", "-c", "kept", "made"]);
        }
        (std::fs::read(dir.join("made")).expect("an image"), disk, backing)
    }
}

const DISK_BYTES: u64 = 3 << 20;
const FILE_BYTES: u64 = 8 << 20;

pub(super) fn small(number: u64) -> usize {
    usize::try_from(number).expect("small")
}

/// The disk in the image on `file`.
fn opened(
    file: Arc<dyn BlockDevice>,
    backing: Option<&Vec<u8>>,
    snapshot: Option<&str>,
    is_writable: bool,
) -> Arc<dyn BlockDevice> {
    let header = Qcow2Header::read(&*file).expect("a header");
    let snapshot = snapshot.map(|name| header.snapshot(name).expect("it is there").clone());
    let backing = backing.map(|bytes| Arc::new(MemoryDevice::new(bytes.clone())) as _);
    open_qcow2(file, &header, Qcow2Options { is_writable, backing, snapshot }).expect("it opens")
}

/// Whatever a power cut leaves of a qcow2, `qemu-img` finds at worst leaked clusters, and no
/// corruption. The disk has what was flushed, and the snapshot is unchanged.
#[test]
fn a_power_cut_leaves_a_qcow2_without_corruption() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    for case in CASES {
        let (image, kept, backing) = case.make(dir.path(), &mut random);
        // The steps that wrote each byte, as bits.
        let mut writers = vec![0u64; kept.len()];
        // `None` for bytes that are not defined.
        let mut model: Vec<_> = kept.iter().copied().map(Some).collect();
        let device = Arc::new(CrashDevice::new(bodies::disk(&image, FILE_BYTES)));
        let disk = opened(device.clone(), backing.as_ref(), None, true);
        assert_eq!(disk.size_bytes(), DISK_BYTES);
        // The growing table takes many writes in one epoch: use fewer steps, and check more states
        // of each epoch.
        let (steps, samples_per_epoch, checked) =
            if case.has_growth { (16, 8, 1) } else { (34, 2, 8) };
        // What the disk held at each flush.
        let mut flushed = vec![model.clone()];
        for step in 0..steps {
            // Some writes are large, so that they need several blocks of counts and several L2
            // tables.
            let most = if random.below(8) == 0 { 600_000 } else { 20_000 };
            let at = random.below(DISK_BYTES - most);
            let len = 1 + random.below(most);
            if case.has_growth && step == 10 {
                disk.write_at(0, &vec![0x80 | step; model.len()]).expect("a write");
                model.fill(Some(0x80 | step));
                for steps in &mut writers {
                    *steps |= 1 << step;
                }
                continue;
            }
            let range = small(at)..small(at + len);
            match random.below(8) {
                0 => match disk.discard(at, len) {
                    Ok(()) => model[range].fill(None),
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::Unsupported),
                },
                1 | 2 => {
                    disk.flush().expect("a flush");
                    flushed.push(model.clone());
                    device.mark("flush");
                }
                _ => {
                    disk.write_at(at, &vec![0x80 | step; range.len()]).expect("a write");
                    model[range.clone()].fill(Some(0x80 | step));
                    for steps in &mut writers[range] {
                        *steps |= 1 << step;
                    }
                }
            }
        }
        drop(disk);
        let mut count_table = [0; 12];
        device.read_at(48, &mut count_table).expect("memory is read");
        assert_eq!(count_table != image[48..60], case.has_growth, "{}", case.options);
        let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch, seed, tears: true };
        let (mut count, path) = (0, dir.path().join("cut"));
        for state in device.log().states(&plan) {
            let state = state.expect("memory is read");
            let what = format!("seed {seed}, {}, {}", case.options, state.description);
            let mut bytes = vec![0; small(FILE_BYTES)];
            state.devices[0].read_at(0, &mut bytes).expect("memory is read");
            let device = Arc::new(MemoryDevice::new(bytes.clone()));
            let disk = opened(device.clone(), backing.as_ref(), None, false);
            let mut found = vec![0; model.len()];
            disk.read_at(0, &mut found).expect("it is read");
            let before = &flushed[state.marks().len()];
            // Each step writes its own value, so an equal byte was not written since the flush.
            let is_lost = |at: &usize| {
                before[*at] == model[*at] && model[*at].is_some_and(|byte| byte != found[*at])
            };
            assert_eq!((0..found.len()).find(is_lost), None, "{what}");
            // A byte that is not defined may still show only a value that was written to this
            // place.
            let is_own = |at: usize| match found[at] {
                0 => true,
                byte if byte == kept[at] => true,
                byte => writers[at].checked_shr(u32::from(byte ^ 0x80)).unwrap_or(0) & 1 != 0,
            };
            assert_eq!((0..found.len()).find(|at| !is_own(*at)), None, "{what}");
            if case.has_snapshot {
                opened(device, backing.as_ref(), Some("kept"), false)
                    .read_at(0, &mut found)
                    .expect("it is read");
                assert!(found == kept, "{what}");
            }
            if count % checked == 0 {
                std::fs::write(&path, &bytes).expect("a file");
                assert_no_corruption(&path, &what);
            }
            count += 1;
        }
        assert!(count > 50, "only {count} states");
    }
}

#[track_caller]
pub(super) fn assert_no_corruption(path: &Path, what: &str) {
    let mut command = Command::new("qemu-img");
    let output = command.args(["check", "-f", "qcow2"]).arg(path).output().expect("it runs");
    // Status 3 means leaked clusters.
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{what}: {said}");
}

/// A device on which a page of metadata takes long, so that other threads come between two of them.
#[derive(Debug)]
struct SlowPages(Arc<CrashDevice>);

impl SlowPages {
    fn take_time(len: usize) {
        if len <= 512 {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
}

impl offshoot_device::Delegate for SlowPages {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner().read_at(offset, buf)?;
        Self::take_time(buf.len());
        Ok(())
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        Self::take_time(buf.len());
        self.inner().write_at(offset, buf)
    }
}

/// Several threads write and flush at the same time, also with reference counts that share a byte.
/// The medium never counts a cluster as free while an entry leads to it, and at the end all counts
/// are right.
#[test]
fn writers_at_once_lose_no_count() {
    /// The bytes of the disk that one L2 table maps, with clusters of 512 bytes.
    const TABLE_SPAN: u64 = 32 << 10;
    const TABLES: u64 = 64;
    const FILE_BYTES: u64 = 3 << 20;
    const THREADS: u64 = 4;
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
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
        let below = Arc::new(SlowPages(device.clone()));
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
        let plan = CrashPlan { exhaustive_limit: 1, samples_per_epoch: 1, seed: 6, tears: false };
        let mut count = 0;
        for state in device.log().states(&plan).step_by(5) {
            let state = state.expect("memory is read");
            let (code, said) = check(&state.devices[0]);
            let what = &state.description;
            // Status 3 means leaked clusters.
            assert!(matches!(code, Some(0 | 3)), "{bits} bits, {what}: {said}");
            count += 1;
        }
        assert!(count > 30, "only {count} states");
    }
}

/// A device whose barrier takes as long as the test wants.
#[derive(Debug)]
struct HeldBarrier {
    below: MemoryDevice,
    is_reached: Mutex<mpsc::Sender<()>>,
    may_end: Mutex<mpsc::Receiver<()>>,
}

impl offshoot_device::Delegate for HeldBarrier {
    fn inner(&self) -> &dyn BlockDevice {
        &self.below
    }

    fn flush(&self) -> io::Result<()> {
        self.is_reached.lock().expect("no panic").send(()).expect("the test listens");
        let most = Duration::from_secs(60);
        self.may_end.lock().expect("no panic").recv_timeout(most).map_err(io::Error::other)
    }
}

/// While one thread waits for a barrier, others read and write. The next barrier covers their
/// writes.
#[test]
fn requests_go_on_while_a_barrier_is_waited_for() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = made(dir.path(), "qcow2", "1M", "-o cluster_size=4k");
    let below = MemoryDevice::sparse(2 << 20);
    below.write_at(0, &image).expect("memory is written");
    let (reached, is_reached) = mpsc::channel();
    let (let_end, may_end) = mpsc::channel();
    let (is_reached_in, may_end) = (Mutex::new(reached), Mutex::new(may_end));
    let file = Arc::new(HeldBarrier { below, is_reached: is_reached_in, may_end });
    let disk = opened(file, None, None, true);
    disk.write_at(0, &[1; 10_000]).expect("a write");
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| disk.flush());
        let mut found = [0; 10_000];
        // The commit makes one barrier before the tables, and one behind them.
        for step in 2..4 {
            is_reached.recv().expect("a barrier");
            disk.read_at(0, &mut found).expect("it is read");
            assert_eq!(found, [step - 1; 10_000]);
            disk.write_at(0, &[step; 10_000]).expect("in place");
            disk.write_at(u64::from(step) << 16, &[step; 5000]).expect("to new clusters");
            let_end.send(()).expect("it waits");
        }
        flush.join().expect("no panic").expect("a flush");
        // Dropping the disk commits, which needs more barriers.
        (0..8).for_each(|_| let_end.send(()).expect("it waits"));
    });
    let mut found = [0; 5000];
    disk.read_at(3 << 16, &mut found).expect("it is read");
    assert_eq!(found, [3; 5000]);
}
