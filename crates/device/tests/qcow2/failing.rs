//! Files that fail, are full or were cut off, and hosts that refuse a request.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use offshoot_device::{
    BlockDevice, Fault, FaultDevice, MemoryDevice, Qcow2Header, Qcow2Limits, Qcow2Options,
    RequestKind, open_qcow2_within,
};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::scratch_dir;

use super::cuts::{assert_no_corruption, small};
use super::damaged::{COPIED, number, put};
use super::qemu::{made, qemu_img, qemu_io};

/// Limits so small that the test reaches each of them.
pub(super) const TINY: Qcow2Limits =
    Qcow2Limits { kept_bytes: 2048, changed_bytes: 2048, dropped: 3, freed: 3 };

/// A file that becomes longer by what is written behind its end, but not by a write that fails.
#[derive(Debug)]
struct Growing {
    below: Arc<dyn BlockDevice>,
    size_bytes: AtomicU64,
}

impl Growing {
    fn new(below: Arc<dyn BlockDevice>, size_bytes: u64) -> Arc<Self> {
        Arc::new(Self { below, size_bytes: AtomicU64::new(size_bytes) })
    }
}

impl offshoot_device::Delegate for Growing {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        assert!(offset + buf.len() as u64 <= BlockDevice::size_bytes(self), "read behind the end");
        self.inner().read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.inner().write_at(offset, buf)?;
        self.size_bytes.fetch_max(offset + buf.len() as u64, Ordering::AcqRel);
        Ok(())
    }
}

/// The disk in the image on `file`, over `backing`.
fn opened(
    file: Arc<dyn BlockDevice>,
    backing: Option<Arc<dyn BlockDevice>>,
    limits: Qcow2Limits,
) -> Arc<dyn BlockDevice> {
    let header = Qcow2Header::read(&*file).expect("a header");
    let options = Qcow2Options { is_writable: true, backing, snapshot: None };
    open_qcow2_within(file, &header, options, limits).expect("it opens")
}

/// A device of `size_bytes` that begins with `bytes`.
fn device(bytes: &[u8], size_bytes: u64) -> Arc<MemoryDevice> {
    let device = MemoryDevice::sparse(size_bytes);
    device.write_at(0, bytes).expect("the bytes fit");
    Arc::new(device)
}

fn bytes_of(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0; small(device.size_bytes())];
    device.read_at(0, &mut bytes).expect("memory is read");
    bytes
}

/// Makes an image of 1 MiB whose first `len` bytes are 7, and returns its bytes.
fn image(dir: &Path, options: &str, len: u64) -> Vec<u8> {
    made(dir, "qcow2", "1M", options);
    qemu_io(&dir.join("made"), "qcow2", &[format!("write -P 7 0 {len}")]);
    std::fs::read(dir.join("made")).expect("an image")
}

/// `qemu-img` finds nothing wrong, and no leak.
#[track_caller]
fn assert_right(dir: &Path, bytes: &[u8]) {
    std::fs::write(dir.join("made"), bytes).expect("a file");
    qemu_img(dir, &["check", "made"]);
}

/// The file fails at each request in turn, also in the middle of a write past its end. The writer
/// gets an error and continues. Afterwards the image has no corruption, the disk has what was
/// flushed, and the bytes of a failed write show nowhere else.
#[test]
fn a_file_that_fails_leaves_no_corruption() {
    if !judges::are_present() {
        return;
    }
    failing_at_each_request(0, Qcow2Limits::default());
}

/// The same with small limits, so that few tables stay in memory.
#[test]
fn a_file_that_fails_leaves_no_corruption_with_little_in_memory() {
    if !judges::are_present() {
        return;
    }
    failing_at_each_request(0, TINY);
}

/// The same while the table of reference counts grows.
#[test]
fn a_file_that_fails_while_its_count_table_grows_is_not_corrupt() {
    if !judges::are_present() {
        return;
    }
    // A count table of one cluster counts 2 MiB.
    failing_at_each_request(1960 << 10, Qcow2Limits::default());
}

/// Writes to the part of a disk that begins at `start`. The disk before it is full.
fn failing_at_each_request(start: u64, limits: Qcow2Limits) {
    const PART_BYTES: usize = 256 << 10;
    const FILE_BYTES: u64 = 3 << 20;
    let dir = scratch_dir();
    let seed = seed_of_run();
    let size = (start + PART_BYTES as u64).to_string();
    made(dir.path(), "qcow2", &size, "-o cluster_size=512,refcount_bits=64");
    let path = dir.path().join("made");
    let mut first_bytes = vec![Some(0); PART_BYTES];
    if start == 0 {
        qemu_io(&path, "qcow2", &["write -P 7 10k 50k".to_owned()]);
        qemu_img(dir.path(), &["snapshot", "-c", "kept", "made"]);
        first_bytes[10 << 10..60 << 10].fill(Some(7));
    } else {
        qemu_io(&path, "qcow2", &[format!("write -P 7 0 {start}")]);
    }
    let image = std::fs::read(&path).expect("an image");
    let mut request = 0;
    loop {
        let base = device(&image, FILE_BYTES);
        let faults = Arc::new(FaultDevice::new(base.clone()));
        let file = Growing::new(faults.clone(), image.len() as u64);
        let fault = [Fault::Error, Fault::Short][small(request % 2)];
        let disk = opened(file, None, limits);
        let first = faults.count(RequestKind::All);
        faults.strike(RequestKind::All, first + request, fault);
        let what = format!("OFFSHOOT_SEED={seed}, request {request} fails");
        let mut random = Random::new(seed);
        let mut model: Vec<Option<u8>> = first_bytes.clone();
        let mut flushed = model.clone();
        for step in 0..40 {
            let len = 1 + small(random.below(9000));
            let at = small(random.below((PART_BYTES - len) as u64));
            let (range, at) = (at..at + len, start + at as u64);
            match random.below(6) {
                0 if disk.flush().is_ok() => flushed.clone_from(&model),
                0 => {}
                1 => {
                    // The contents of a discarded range are not defined.
                    let _ = disk.discard(at, len as u64);
                    model[range.clone()].fill(None);
                    flushed[range].fill(None);
                }
                _ => {
                    let is_written = disk.write_at(at, &vec![0x80 | step; len]).is_ok();
                    model[range.clone()].fill(is_written.then_some(0x80 | step));
                    flushed[range].fill(None);
                }
            }
        }
        drop(disk);
        let requests = faults.count(RequestKind::All) - first;
        let bytes = bytes_of(&*base);
        std::fs::write(&path, &bytes).expect("a file");
        assert_no_corruption(&path, &what);
        let mut found = vec![1; small(start) + PART_BYTES];
        opened(base, None, limits).read_at(0, &mut found).expect("it is read");
        let (before, found) = found.split_at(small(start));
        assert!(before.iter().all(|byte| *byte == 7), "{what}");
        let is_lost = |(new, old): (&u8, &Option<u8>)| old.is_some_and(|old| old != *new);
        assert_eq!(found.iter().zip(&flushed).position(is_lost), None, "{what}");
        if request >= requests {
            let count_table = 48..60;
            assert_eq!(bytes[count_table.clone()] != image[count_table], start != 0, "{what}");
            break;
        }
        request += 1;
    }
    assert!(request > 50, "only {request} requests");
}

/// A write that fails in its middle leaves bytes past the end of the file. A later small write gets
/// the same cluster, and these bytes must not show around it.
#[test]
fn what_a_failed_write_left_behind_the_end_does_not_show() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = made(dir.path(), "qcow2", "1M", "-o cluster_size=64k");
    let faults = Arc::new(FaultDevice::new(device(&image, 4 << 20)));
    let file = Growing::new(faults.clone(), image.len() as u64);
    let disk = opened(file, None, Qcow2Limits::default());
    disk.write_at(0, &[1; 512]).expect("a write");
    faults.strike(RequestKind::Writes, faults.count(RequestKind::Writes), Fault::Short);
    disk.write_at(128 << 10, &vec![2; 256 << 10]).expect_err("it fails");
    disk.write_at(640 << 10, &[3; 4096]).expect("a write");
    disk.write_at(704 << 10, &[3; 4096]).expect("a write");
    let mut found = vec![1; 128 << 10];
    disk.read_at(640 << 10, &mut found).expect("it is read");
    for cluster in found.chunks(64 << 10) {
        assert!(cluster[..4096].iter().all(|byte| *byte == 3));
        assert!(cluster[4096..].iter().all(|byte| *byte == 0));
    }
}

/// A write fails because one read of a table fails. It must leak no cluster and forget no free one:
/// after the write is repeated, the file is as long as without the failure.
#[test]
fn a_read_that_fails_leaves_no_cluster_counted() {
    const LEN: usize = 16 << 10;
    /// An L2 table maps 32 KiB.
    const AT: u64 = 24 << 10;
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = made(dir.path(), "qcow2", "1M", "-o cluster_size=512");
    let limits = Qcow2Limits { kept_bytes: 0, ..Qcow2Limits::default() };
    let (mut request, mut sizes) = (0, Vec::new());
    loop {
        let base = device(&image, 3 << 20);
        let faults = Arc::new(FaultDevice::new(base.clone()));
        let file = Growing::new(faults.clone(), image.len() as u64);
        let disk = opened(file.clone(), None, limits);
        // Makes the tables, which do not stay in memory.
        for at in [0, 40 << 10] {
            disk.write_at(at, &[1; 512]).expect("a write");
        }
        // The second flush frees some clusters.
        disk.write_at(512 << 10, &[1; 4 << 10]).expect("a write");
        disk.flush().expect("a flush");
        disk.discard(512 << 10, 4 << 10).expect("a discard");
        disk.flush().expect("a flush");
        disk.flush().expect("a flush");
        faults.strike(RequestKind::Reads, faults.count(RequestKind::Reads) + request, Fault::Error);
        if disk.write_at(AT, &[2; LEN]).is_ok() {
            break;
        }
        disk.write_at(AT, &[2; LEN]).expect("a write");
        drop(disk);
        assert_right(dir.path(), &bytes_of(&*base));
        sizes.push(file.size_bytes());
        request += 1;
    }
    assert!(request > 10, "only {request} reads");
    assert!(sizes.iter().all(|size| *size == sizes[0]), "{sizes:?}");
}

/// A host that refuses to make a hole costs space, but the flush succeeds and its data is durable.
#[test]
fn a_hole_that_is_refused_fails_no_flush() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = image(dir.path(), "-o cluster_size=4k", 64 << 10);
    let base = device(&image, 3 << 20);
    let faults = Arc::new(FaultDevice::new(base.clone()));
    faults.add_to(RequestKind::Discards, 0..u64::MAX, Fault::Error);
    let disk = opened(faults.clone(), None, Qcow2Limits::default());
    disk.discard(0, 64 << 10).expect("a discard");
    disk.flush().expect("a flush");
    assert_ne!(faults.count(RequestKind::Discards), 0);
    disk.flush().expect("a flush");
    assert_right(dir.path(), &bytes_of(&*base));
}

/// Two entries lead to a cluster whose count is 1. Dropping both must not free it: the flush that
/// would count below zero fails, the cluster keeps its bytes, and all later writes fail.
#[test]
fn no_count_falls_below_zero() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let mut image = image(dir.path(), "-o cluster_size=4k", 12 << 10);
    let l2 = number(&image, number(&image, 40)) & !COPIED;
    let entry = number(&image, l2);
    put(&mut image, l2 + 8, entry);
    let data = small(entry & !COPIED);
    let base = device(&image, 3 << 20);
    let disk = opened(base.clone(), None, Qcow2Limits::default());
    disk.discard(0, 8 << 10).expect("a discard");
    let error = disk.flush().expect_err("its counts are wrong");
    assert!(error.to_string().contains("its reference counts are wrong"), "{error}");
    // A write in place and one to a new cluster.
    for at in [8 << 10, 64 << 10] {
        let error = disk.write_at(at, &[1; 512]).expect_err("a flush failed").to_string();
        assert!(error.contains("an earlier flush failed"), "{error}");
    }
    drop(disk);
    assert!(bytes_of(&*base)[data..data + 4096] == [7; 4096]);
}

/// The file was cut off, and a cluster lies past its end. A write to it fails with the same error
/// as a read, and does not make the file longer.
#[test]
fn a_cluster_that_was_cut_off_is_not_written() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let mut image = image(dir.path(), "-o cluster_size=4k", 64 << 10);
    let l2 = number(&image, number(&image, 40)) & !COPIED;
    let cut = number(&image, l2 + 8 * 8) & !COPIED;
    image.truncate(small(cut));
    let base = device(&image, 3 << 20);
    let file = Growing::new(base.clone(), cut);
    let disk = opened(file.clone(), None, Qcow2Limits::default());
    for at in [32 << 10, 60 << 10] {
        let read = disk.read_at(at, &mut [0; 512]).expect_err("it was cut off");
        for len in [512, 4096] {
            let written = disk.write_at(at, &vec![1; len]).expect_err("it was cut off");
            assert_eq!(written.kind(), io::ErrorKind::InvalidData);
            assert_eq!(written.to_string(), read.to_string());
        }
    }
    disk.write_at(28 << 10, &[1; 4096]).expect("it is there");
    drop(disk);
    assert_eq!(file.size_bytes(), cut);
}

/// A full block device gives the error for it (`StorageFull`), and its earlier contents stay right.
#[test]
fn a_full_device_is_out_of_space() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let image = image(dir.path(), "-o cluster_size=4k", 64 << 10);
    let base = device(&image, (image.len() as u64).next_multiple_of(4096) + (32 << 10));
    let disk = opened(base.clone(), None, Qcow2Limits::default());
    let error = disk.write_at(128 << 10, &vec![1; 64 << 10]).expect_err("it is full");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    disk.write_at(128 << 10, &[2; 8 << 10]).expect("it has room");
    disk.flush().expect("a flush");
    drop(disk);
    assert_right(dir.path(), &bytes_of(&*base));
}

/// A trim of a disk over a backing file stores zeros for the clusters that the image stores, and
/// changes nothing for the others, however large the disk is.
#[test]
fn a_trim_over_a_backing_file_stores_no_entry_for_what_is_not_stored() {
    const DISK_BYTES: u64 = 2 << 40;
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    std::fs::write(dir.path().join("base"), vec![9; 1 << 20]).expect("a file");
    for options in ["cluster_size=64k", "cluster_size=64k,extended_l2=on"] {
        let _ = std::fs::remove_file(dir.path().join("made"));
        let create = ["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "-o", options];
        qemu_img(dir.path(), &[&create[..], &["made", &DISK_BYTES.to_string()]].concat());
        let image = std::fs::read(dir.path().join("made")).expect("an image");
        let base = device(&image, 8 << 20);
        let file = Growing::new(base.clone(), image.len() as u64);
        let backing = Arc::new(MemoryDevice::new(vec![9; 1 << 20]));
        let disk = opened(file.clone(), Some(backing), Qcow2Limits::default());
        disk.discard(0, DISK_BYTES).expect("a discard");
        disk.flush().expect("a flush");
        assert_eq!(file.size_bytes(), image.len() as u64, "{options}");
        assert!(bytes_of(&*base)[..image.len()] == image, "{options}: it was changed");
        disk.write_at(64 << 10, &vec![1; 64 << 10]).expect("a write");
        disk.flush().expect("a flush");
        disk.discard(0, DISK_BYTES).expect("a discard");
        let mut found = vec![1; 1 << 20];
        disk.read_at(0, &mut found).expect("it is read");
        let (stored, around) = (64 << 10..128 << 10, 128 << 10..1 << 20);
        assert!(found[stored].iter().all(|byte| *byte == 0), "{options}");
        assert!(found[around].iter().all(|byte| *byte == 9), "{options}");
        drop(disk);
        assert_right(dir.path(), &bytes_of(&*base));
    }
}
