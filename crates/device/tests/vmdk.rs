//! VMDK images that are read and written, what a power cut leaves of them, and descriptors with
//! false statements. `qemu-img` makes and judges the images.

mod bodies;

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use offshoot_device::{
    BlockDevice, CrashDevice, CrashPlan, Fault, FaultDevice, FileDevice, ImageKind, MemoryDevice,
    RequestKind, VmdkDescriptor, open_vmdk,
};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};

const MIB: u64 = 1 << 20;

#[track_caller]
fn run(dir: &Path, program: &str, words: &[&str]) {
    let output = Command::new(program).args(words).current_dir(dir).output();
    let output = output.expect("it runs; `cargo xtask setup` installs it");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(output.status.success(), "{program} {words:?}: {said}");
}

fn create(dir: &Path, name: &str, options: &str, size: &str) {
    run(dir, "qemu-img", &["create", "-q", "-f", "vmdk", "-o", options, name, size]);
}

/// Opens the disk in the image `name`; the files that it names are in the same directory.
fn opened(dir: &Path, name: &str, is_writable: bool) -> io::Result<Arc<dyn BlockDevice>> {
    let file = |name: &Path| -> io::Result<Arc<dyn BlockDevice>> {
        let path = dir.join(name);
        Ok(if is_writable {
            Arc::new(FileDevice::open_writable(&path)?.growing())
        } else {
            Arc::new(FileDevice::open(&path)?)
        })
    };
    let below = file(name.as_ref())?;
    match ImageKind::detect(&*below)? {
        Some(ImageKind::VmdkDescriptor) => {
            let descriptor = VmdkDescriptor::read(&*below)?;
            let files = descriptor.files.iter().map(|one| file(one.name.as_ref()));
            let files = files.collect::<io::Result<Vec<_>>>()?;
            descriptor.open(below, &files, is_writable)
        }
        kind => {
            assert_eq!(kind, Some(ImageKind::Vmdk), "{name}");
            open_vmdk(below, is_writable)
        }
    }
}

/// The content id (`CID=`) in a file.
fn content_id(path: &Path) -> String {
    let mut start = vec![0; 2048];
    let len = File::open(path).and_then(|file| file.read_at(&mut start, 0)).expect("a file");
    content_id_in(&start[..len])
}

fn content_id_in(start: &[u8]) -> String {
    let text = String::from_utf8_lossy(start);
    let at = text.find("\nCID=").expect("there is one") + 5;
    text[at..].lines().next().expect("a line").to_owned()
}

/// The 64-bit number at byte `at` of the header of a sparse extent.
fn header(bytes: &[u8], at: usize) -> usize {
    usize::try_from(u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight")))
        .expect("small")
}

fn number(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four")) as usize
}

/// The table entries of all grains, by one directory: 56 selects the primary one, 48 the redundant
/// one.
fn entries(bytes: &[u8], directory: usize, tables: usize) -> Vec<usize> {
    let at = header(bytes, directory) * 512;
    let table = |table| number(bytes, at + table * 4) * 512;
    let tables = (0..tables).map(table);
    tables.flat_map(|at| (0..512).map(move |entry| number(bytes, at + entry * 4))).collect()
}

/// Writes random ranges over data that QEMU wrote, in images of every kind. QEMU then reads the
/// bytes of the model, and both copies of the tables agree.
#[test]
fn images_of_every_kind_are_written_as_a_model_has_it() {
    /// The test writes to two windows of the disk; one of them lies around the end of the first
    /// piece.
    const WINDOW: u64 = 6 << 20;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    for (options, size) in [
        ("subformat=monolithicSparse", 200 * MIB),
        ("subformat=monolithicSparse,zeroed_grain=on", 200 * MIB),
        ("subformat=monolithicSparse,compat6=on", 200 * MIB - 512),
        ("subformat=monolithicFlat", 200 * MIB),
        ("subformat=twoGbMaxExtentFlat", 2100 * MIB),
        ("subformat=twoGbMaxExtentSparse", 2100 * MIB),
    ] {
        let what = format!("seed {seed}, {options}");
        create(dir, "a.vmdk", options, &size.to_string());
        let mut model = File::options();
        model.read(true).write(true).create(true).truncate(true);
        let model = model.open(dir.join("model")).expect("a file");
        model.set_len(size).expect("it is made longer");
        let starts = [0, (2048 * MIB).min(size - WINDOW / 2) - WINDOW / 2];
        for start in starts {
            let at = start + random.below(WINDOW / 2) / 512 * 512;
            let zeros = start + random.below(WINDOW / 2) / 512 * 512;
            let words = [format!("write -P 77 {at} 100k"), format!("write -z {zeros} 64k")];
            let words = ["-f", "vmdk", "-c", &words[0], "-c", &words[1], "a.vmdk"];
            run(dir, "qemu-io", &words);
            model.write_all_at(&vec![77; 100 << 10], at).expect("a write");
            model.write_all_at(&vec![0; 64 << 10], zeros).expect("a write");
        }
        let before = content_id(&dir.join("a.vmdk"));
        for round in 0..3 {
            let disk = opened(dir, "a.vmdk", true).expect("it opens");
            assert_eq!(disk.size_bytes(), size, "{what}");
            for _ in 0..30 {
                let start = starts[usize::try_from(random.below(2)).expect("small")];
                let at = start + random.below(WINDOW - 200_000);
                let most = [200_000, 5000][usize::try_from(random.below(2)).expect("small")];
                let len = random.below(most).min(size - at);
                let bytes = random.bytes(usize::try_from(len).expect("small"));
                match random.below(10) {
                    0 => disk.flush().expect("a flush"),
                    1 => {
                        disk.discard(at, len).expect("a discard");
                        // The contents are not defined now, so overwrite them.
                        disk.write_at(at, &bytes).expect("a write");
                        model.write_all_at(&bytes, at).expect("a write");
                    }
                    _ => {
                        disk.write_at(at, &bytes).expect("a write");
                        model.write_all_at(&bytes, at).expect("a write");
                    }
                }
                let mut found = vec![0; bytes.len()];
                disk.read_at(at, &mut found).expect("a read");
                let mut expected = found.clone();
                model.read_exact_at(&mut expected, at).expect("a read");
                assert!(found == expected, "{what}: {at}+{len}");
            }
            disk.write_at(size, &[1]).expect_err("behind the end");
            drop(disk);
            run(dir, "qemu-img", &["check", "-q", "a.vmdk"]);
            run(dir, "qemu-img", &["compare", "-q", "-f", "vmdk", "-F", "raw", "a.vmdk", "model"]);
            let disk = opened(dir, "a.vmdk", false).expect("it opens");
            for start in starts {
                let len = usize::try_from(WINDOW.min(size - start)).expect("small");
                let (mut found, mut expected) = (vec![1; len], vec![2; len]);
                disk.read_at(start, &mut found).expect("a read");
                model.read_exact_at(&mut expected, start).expect("a read");
                assert!(found == expected, "{what}, round {round}");
            }
            let error = disk.write_at(0, &[1]).expect_err("it is only read");
            assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem, "{what}");
        }
        assert_ne!(before, content_id(&dir.join("a.vmdk")), "{what}");
        if options.starts_with("subformat=monolithicSparse") {
            let bytes = std::fs::read(dir.join("a.vmdk")).expect("a file");
            assert!(entries(&bytes, 56, 7) == entries(&bytes, 48, 7), "{what}: the copies differ");
            assert_eq!(bytes[72], 0, "{what}: it was closed");
        }
    }
}

/// A device that is as long as what was written to it.
#[derive(Debug)]
struct GrowingDevice(Arc<dyn BlockDevice>, AtomicU64);

/// One on which a table of 2 KiB takes some time, so that other threads come in between.
#[derive(Debug)]
struct SlowTables(GrowingDevice, AtomicU64);

impl offshoot_device::Delegate for SlowTables {
    fn inner(&self) -> &dyn BlockDevice {
        &self.0
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        if buf.len() == 2048 {
            let number = self.1.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(number * 5 % 7));
        }
        self.inner().write_at(offset, buf)
    }
}

impl offshoot_device::Delegate for GrowingDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0
    }

    fn size_bytes(&self) -> u64 {
        self.1.load(Ordering::Relaxed)
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.1.fetch_max(offset + buf.len() as u64, Ordering::Relaxed);
        self.inner().write_at(offset, buf)
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[io::IoSlice<'_>]) -> io::Result<()> {
        let len: usize = bufs.iter().map(|buf| buf.len()).sum();
        self.1.fetch_max(offset + len as u64, Ordering::Relaxed);
        self.inner().write_vectored_at(offset, bufs)
    }
}

/// Removes table number `table` from both directories.
fn drop_table(bytes: &mut [u8], table: usize) {
    for directory in [56, 48] {
        let at = header(bytes, directory) * 512 + table * 4;
        bytes[at..at + 4].fill(0);
    }
}

/// Opens a sparse VMDK and writes to its disk, which makes both copies of the tables equal again.
/// Returns the bytes of the file.
fn written_on(bytes: &[u8]) -> Vec<u8> {
    let len = bytes.len() as u64;
    let below = bodies::disk(bytes, len + MIB);
    let grows = GrowingDevice(below.clone(), AtomicU64::new(len));
    let disk = open_vmdk(Arc::new(grows), true).expect("it opens");
    disk.write_at(2 * MIB, &[0xee; 100]).expect("a write");
    drop(disk);
    let mut after = vec![0; usize::try_from(len + MIB).expect("small")];
    below.read_at(0, &mut after).expect("memory is read");
    after
}

/// Whatever a power cut leaves of a sparse VMDK: QEMU finds no error in it; each copy of the tables
/// has everything that was flushed and refers to nothing that was not written; a changed disk has
/// another content id; and the image can be written again.
#[test]
fn a_power_cut_leaves_a_vmdk_with_all_that_was_flushed() {
    const DISK_BYTES: u64 = 40 << 20;
    const FILE_BYTES: u64 = 4 << 20;
    /// A value that no write has.
    const STALE: u8 = 0xdd;
    /// The test writes to both ends of the disk. Each end has its own table.
    const WINDOW: u64 = 512 << 10;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let read = |disk: &dyn BlockDevice| {
        let mut found = vec![0; usize::try_from(2 * WINDOW).expect("small")];
        let (one, other) = found.split_at_mut(usize::try_from(WINDOW).expect("small"));
        disk.read_at(0, one).expect("it is read");
        disk.read_at(DISK_BYTES - WINDOW, other).expect("it is read");
        found
    };
    for (options, dropped) in [
        ("subformat=monolithicSparse", &[][..]),
        ("subformat=monolithicSparse", &[0, 1]),
        ("subformat=monolithicSparse,zeroed_grain=on", &[1]),
    ] {
        let what = format!("seed {seed}, {options} without {dropped:?}");
        create(dir, "cut", options, "40M");
        // The test overwrites these grains in place.
        run(dir, "qemu-io", &["-f", "vmdk", "-c", "write -P 200 0 512k", "cut"]);
        let mut image = std::fs::read(dir.join("cut")).expect("an image");
        for &table in dropped {
            drop_table(&mut image, table);
        }
        let len = AtomicU64::new(image.len() as u64);
        // The bytes past the end of the file.
        image.resize(usize::try_from(FILE_BYTES).expect("small"), STALE);
        let device = Arc::new(CrashDevice::new(bodies::disk(&image, FILE_BYTES)));
        let below = GrowingDevice(device.clone(), len);
        let disk = open_vmdk(Arc::new(below), true).expect("it opens");
        assert_eq!(disk.size_bytes(), DISK_BYTES);
        let mut model = read(&*disk);
        let mut flushed = vec![model.clone()];
        let mut is_discarded = vec![false; model.len()];
        for step in 0..26u8 {
            let second = random.below(2);
            let inside = random.below(WINDOW - 100_000);
            let len = 1 + random.below(100_000);
            let at = second * (DISK_BYTES - WINDOW) + inside;
            let start = usize::try_from(second * WINDOW + inside).expect("small");
            let bytes = vec![step + 1; usize::try_from(len).expect("small")];
            match random.below(8) {
                0..3 => {
                    disk.flush().expect("a flush");
                    flushed.push(model.clone());
                    device.mark("flush");
                    continue;
                }
                3 => {
                    disk.discard(at, len).expect("a discard");
                    is_discarded[start..start + bytes.len()].fill(true);
                }
                _ => {}
            }
            disk.write_at(at, &bytes).expect("a write");
            model[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        drop(disk);
        let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 4, seed, tears: true };
        let mut count = 0;
        for state in device.log().states(&plan) {
            let state = state.expect("memory is read");
            let mut bytes = vec![0; usize::try_from(FILE_BYTES).expect("small")];
            state.devices[0].read_at(0, &mut bytes).expect("memory is read");
            let before = &flushed[state.marks().len()];
            let is_same_id = content_id_in(&bytes[..2048]) == content_id_in(&image[..2048]);
            let mut other = bytes.clone();
            other.copy_within(48..56, 56);
            for (copy, bytes) in [("primary", &bytes), ("redundant", &other)] {
                let disk = open_vmdk(Arc::new(MemoryDevice::new(bytes.clone())), false);
                let found = read(&*disk.expect("it opens"));
                let is_told = !is_same_id || found == flushed[0];
                assert!(is_told, "{what}, {copy}, {}: the same content id", state.description);
                // Each step writes its own value, so an equal byte was not written since the flush.
                let is_lost = |at: &usize| before[*at] == model[*at] && found[*at] != model[*at];
                let lost = (0..found.len()).find(is_lost);
                assert_eq!(lost, None, "{what}, {copy}, {}", state.description);
                let is_foreign = |at: &usize| found[*at] == STALE && !is_discarded[*at];
                let foreign = (0..found.len()).find(is_foreign);
                assert_eq!(foreign, None, "{what}, {copy}, {}", state.description);
            }
            if count % 8 == 0 {
                let after = written_on(&bytes);
                let copies = [56, 48].map(|directory| entries(&after, directory, 2));
                let name = state.description;
                assert!(copies[0] == copies[1], "{what}, {name}: the copies differ");
                for bytes in [bytes, after] {
                    std::fs::write(dir.join("cut"), bytes).expect("a file");
                    run(dir, "qemu-img", &["check", "-q", "-f", "vmdk", "cut"]);
                }
            }
            count += 1;
        }
        println!("{what}: {count} states");
        assert!(count > 50, "only {count} states");
    }
}

/// Several threads write and flush at the same time. After a power cut, each thread finds what it
/// flushed.
#[test]
fn a_flush_beside_other_writers_keeps_its_promise() {
    const FILE_BYTES: u64 = 8 << 20;
    const GRAIN: u64 = 64 << 10;
    const GRAINS: u64 = 6;
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    create(dir.path(), "a", "subformat=monolithicSparse", "100M");
    let mut image = std::fs::read(dir.path().join("a")).expect("an image");
    drop_table(&mut image, 2);
    let device = Arc::new(CrashDevice::new(bodies::disk(&image, FILE_BYTES)));
    let below = GrowingDevice(device.clone(), AtomicU64::new(image.len() as u64));
    let below = SlowTables(below, AtomicU64::new(0));
    let disk = open_vmdk(Arc::new(below), true).expect("it opens");
    // Threads 0 and 1 share a table, and the table of thread 2 is new.
    let place = |thread: u64, grain: u64| {
        [0, GRAINS, 1024][usize::try_from(thread).expect("small")] * GRAIN + grain * GRAIN
    };
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (disk, device) = (&disk, &device);
            scope.spawn(move || {
                for grain in 0..GRAINS {
                    disk.write_at(place(thread, grain), &[7; 3000]).expect("a write");
                    disk.flush().expect("a flush");
                    device.mark(&format!("{thread} {grain}"));
                }
            });
        }
    });
    drop(disk);
    let plan = CrashPlan { exhaustive_limit: 3, samples_per_epoch: 4, seed: 3, tears: true };
    let mut count = 0;
    for state in device.log().states(&plan) {
        let state = state.expect("memory is read");
        let disk = open_vmdk(Arc::new(state.devices[0].snapshot()), false).expect("it opens");
        for mark in state.marks() {
            let (thread, grain) = mark.split_once(' ').expect("two numbers");
            let number = |text: &str| text.parse().expect("a number");
            let mut found = [0; 3001];
            disk.read_at(place(number(thread), number(grain)), &mut found).expect("it is read");
            let is_there = found[..3000] == [7; 3000] && found[3000] == 0;
            assert!(is_there, "{mark} is lost: {}", state.description);
        }
        count += 1;
    }
    assert!(count > 30, "only {count} states");
}

/// A write or a flush fails and is repeated. The second attempt writes everything, and the file
/// takes no more space than without the failure.
#[test]
fn what_fails_is_made_up_for() {
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    create(dir.path(), "a", "subformat=monolithicSparse", "40M");
    let mut image = std::fs::read(dir.path().join("a")).expect("an image");
    drop_table(&mut image, 1);
    let write = |fault: Option<(RequestKind, u64)>| {
        let below = bodies::disk(&image, 4 << 20);
        let device = Arc::new(FaultDevice::new(below.clone()));
        if let Some((requests, number)) = fault {
            device.strike(requests, number, Fault::Error);
        }
        let grows = Arc::new(GrowingDevice(device.clone(), AtomicU64::new(image.len() as u64)));
        let disk = open_vmdk(grows.clone(), true).expect("it opens");
        let mut failures = 0;
        for at in [35 * MIB, 5 * MIB] {
            for request in [&|| disk.write_at(at, &[7; 3000]) as io::Result<()>, &|| {
                disk.flush() as io::Result<()>
            }] as [&dyn Fn() -> io::Result<()>; 2]
            {
                if request().is_err() {
                    failures += 1;
                    request().expect("it fails once");
                }
            }
        }
        let requests = [RequestKind::Writes, RequestKind::Flushes].map(|one| device.count(one));
        let size_bytes = grows.size_bytes();
        // The image is not closed yet, so this is what the flushes stored.
        let mut bytes = vec![0; 4 << 20];
        below.read_at(0, &mut bytes).expect("memory is read");
        let read = open_vmdk(Arc::new(MemoryDevice::new(bytes)), false).expect("it opens");
        for at in [5 * MIB, 35 * MIB] {
            let mut found = [0; 3000];
            read.read_at(at, &mut found).expect("it is read");
            assert!(found == [7; 3000], "what was written at {at}, {fault:?}");
        }
        (failures, requests, size_bytes)
    };
    let (failures, [writes, flushes], size_bytes) = write(None);
    assert!(failures == 0 && writes > 8 && flushes > 5, "{writes} writes, {flushes} flushes");
    let faults = (0..writes).map(|number| (RequestKind::Writes, number));
    for fault in faults.chain((0..flushes).map(|number| (RequestKind::Flushes, number))) {
        let (failures, _, bytes) = write(Some(fault));
        assert_eq!((failures, bytes), (1, size_bytes), "{fault:?}");
    }
}

/// A discard that discards nothing does not mark the image as changed, and a read from the medium
/// reaches the medium below.
#[test]
fn a_sparse_extent_passes_on_what_is_there() {
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    create(dir.path(), "a", "subformat=monolithicSparse", "40M");
    run(dir.path(), "qemu-io", &["-f", "vmdk", "-c", "write -P 7 0 64k", "a"]);
    let image = std::fs::read(dir.path().join("a")).expect("an image");
    let below = Arc::new(MemoryDevice::new(image.clone()));
    let disk = open_vmdk(below.clone(), true).expect("it opens");
    disk.discard(MIB, 1 << 20).expect("there is nothing");
    let mut bytes = vec![0; image.len()];
    below.read_at(0, &mut bytes).expect("memory is read");
    assert!(bytes == image, "something was written");
    drop(disk);
    let disk = open_vmdk(Arc::new(Medium(below)), false).expect("it opens");
    let mut found = vec![1; 65536 + 100];
    disk.read_medium_at(0, &mut found).expect("it is read");
    assert!(found == [vec![9; 65536], vec![0; 100]].concat());
}

/// A device whose medium has nines.
#[derive(Debug)]
struct Medium(Arc<dyn BlockDevice>);

impl offshoot_device::Delegate for Medium {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0
    }

    fn read_medium_at(&self, _: u64, buf: &mut [u8]) -> io::Result<()> {
        buf.fill(9);
        Ok(())
    }
}

/// An image that must not be written is refused for writing, and can still be read.
#[test]
fn a_sparse_extent_whose_tables_lie_is_not_written() {
    if !judges::are_present() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let dir = dir.path();
    create(dir, "a", "subformat=monolithicSparse", "40M");
    run(dir, "qemu-io", &["-f", "vmdk", "-c", "write -P 7 0 192k", "a"]);
    let mut image = std::fs::read(dir.join("a")).expect("an image");
    // Adds a footer and the end of a stream.
    image.extend_from_within(..512);
    image.extend([0; 512]);
    let table = number(&image, header(&image, 56) * 512) * 512;
    let first = number(&image, table);
    let find = |text: &[u8]| image.windows(text.len()).position(|here| here == text);
    let text_at = find(b"\nCID=").expect("a descriptor");
    let extent_at = find(b"\nRW ").expect("an extent");
    let kind_at = find(b" SPARSE ").expect("its type");
    let entry = |sector: usize| u32::try_from(sector).expect("small").to_le_bytes().to_vec();
    for (at, value, what) in [
        (table + 4, entry(first), "two of its grains have bytes in common"),
        (table + 4, entry(first + 1), "two of its grains have bytes in common"),
        (table, [entry(0), entry(table / 512)].concat(), "one of its grains is where a table is"),
        (table + 4, entry(1 << 30), "behind the end of the file"),
        (48, header(&image, 56).to_le_bytes().to_vec(), "two of its tables have bytes in common"),
        (8, vec![3, 0, 2, 0], "stream-optimised"),
        (56, vec![0xff; 8], "stream-optimised"),
        (44, entry(100), "a VMDK with 100 entries in a table is only read here"),
        (extent_at, b"\nRDONLY 1 SPARSE \"a\"\n#".to_vec(), "only read (RDONLY)"),
        (text_at, b"\nchangeTrackPath=".to_vec(), "changeTrackPath"),
    ] {
        let mut bytes = image.clone();
        bytes[at..at + value.len()].copy_from_slice(&value);
        let open = |is_writable| open_vmdk(Arc::new(MemoryDevice::new(bytes.clone())), is_writable);
        let error = open(true).expect_err("it lies").to_string();
        assert!(error.contains(what) && error.contains("qemu-img convert"), "{error}");
        open(false).expect("it is read").read_at(0, &mut [0; 512]).expect("its first grain");
    }
    for (at, value, what) in [
        (extent_at, &b"\nNOACCESS 1 SPARSE \"a\"\n#"[..], "not to be accessed (NOACCESS)"),
        (kind_at, b" SESPARSE 1 ", "type \"SESPARSE\" is not read here"),
        (4, b"\x04", "a VMDK of version 4 is not read here"),
        (0, b"COWD", "a sparse VMDK of ESX is not read here"),
    ] {
        let mut bytes = image.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        let device = Arc::new(MemoryDevice::new(bytes));
        assert_eq!(ImageKind::detect(&*device).expect("it is read"), Some(ImageKind::Vmdk));
        let error = open_vmdk(device, false).expect_err("another format").to_string();
        assert!(error.contains(what) && error.contains("qemu-img convert"), "{error}");
    }
}

/// A device that holds a descriptor with these lines.
fn descriptor(lines: &str) -> Arc<dyn BlockDevice> {
    let text = format!("# Disk DescriptorFile\nversion=1\nCID=01234567\n{lines}");
    Arc::new(MemoryDevice::new(text.into_bytes()))
}

#[test]
fn descriptors_that_lie_are_refused() {
    let many = "RW 1 FLAT \"a\" 0\n".repeat(257);
    let large = format!("{}\nRW 1 FLAT \"a\" 0", "#".repeat(70_000));
    for (lines, what) in [
        ("", "names 0 extents"),
        (&*many, "names 257 extents"),
        (&large, "too large for one: if it is a plain disk, say so with --image-format raw"),
        ("RW 0 FLAT \"a\" 0", "makes no sense"),
        ("RW x FLAT \"a\" 0", "makes no sense"),
        ("RW 99999999999999999999 FLAT \"a\" 0", "makes no sense"),
        ("RW 36028797018963968 FLAT \"a\" 0", "makes no sense"),
        ("RW 8 FLAT \"a\" 0x", "makes no sense"),
        ("RW 8 FLAT \"a 0", "makes no sense"),
        ("RW 8", "makes no sense"),
        ("RW 8 FLAT", "has no file"),
        ("RW 8 FLAT a 0", "has no file"),
        ("RW 8 VMFSSPARSE \"a\"", "type \"VMFSSPARSE\" is not read here: qemu-img convert"),
        ("RW 8 SESPARSE \"a\"", "type \"SESPARSE\" is not read here: qemu-img convert"),
        ("NOACCESS 8 FLAT \"a\" 0", "not to be accessed"),
        ("RW 8 SPARSE \"a\"\nRW 8 SPARSE \"a\"", "two of its extents are in one file"),
        ("RW 8 SPARSE \"a\"\nRW 8 FLAT \"a\" 9", "two of its extents are in one file"),
        ("RW 8 FLAT \"a\" 9\nRW 8 SPARSE \"a\"", "two of its extents are in one file"),
        ("parentCID=01234567\nRW 8 FLAT \"a\" 0", "stands over another"),
    ] {
        let error = VmdkDescriptor::read(&*descriptor(lines)).expect_err("it lies").to_string();
        assert!(error.contains(what), "{lines:.80}: {error}");
    }
    for (lines, what) in [
        ("RW 8 FLAT \"a\" 0\nRW 8 FLAT \"a\" 7", "have bytes in common"),
        ("RW 8 FLAT \"a\" 99999", "the extent of the VMDK in it"),
        ("RW 36028797018963967 ZERO\nRW 36028797018963967 ZERO", "it is too large"),
        ("changeTrackPath=\"x\"\nRW 8 FLAT \"a\" 0", "changeTrackPath"),
    ] {
        let below = descriptor(lines);
        let text = VmdkDescriptor::read(&*below).expect("it is read");
        let files = vec![bodies::disk(&[], 1 << 20); text.files.len()];
        let error = text.open(below, &files, true).expect_err("it lies").to_string();
        assert!(error.contains(what), "{lines}: {error}");
    }
}

/// Parts without a file read as zeros. Writes to them, and to read-only parts, fail.
#[test]
fn extents_of_every_type_make_one_disk() {
    let below = descriptor(
        "parentCID=ffffffff\r\nRW 4 FLAT \"a b\" 2\r\nRW 3 ZERO\r\nRDONLY 2 VMFS \"c\"\r\n\
         RW 1 FLAT \"a b\" 0\r\n",
    );
    let text = VmdkDescriptor::read(&*below).expect("it is read");
    let names: Vec<_> = text.files.iter().map(|file| file.name.to_str()).collect();
    assert_eq!(names, [Some("a b"), Some("c")]);
    let is_written: Vec<_> = text.files.iter().map(|file| file.is_written).collect();
    assert_eq!(is_written, [true, false]);
    let files = [bodies::disk(&[0xaa; 4096], 4096), bodies::disk(&[0xcc; 4096], 4096)];
    let disk = text.open(below.clone(), &files, true).expect("it opens");
    assert_eq!(disk.size_bytes(), 10 * 512);
    let mut found = [1; 10 * 512];
    disk.read_at(0, &mut found).expect("it is read");
    let expected =
        [vec![0xaa; 4 * 512], vec![0; 3 * 512], vec![0xcc; 1024], vec![0xaa; 512]].concat();
    assert!(found[..] == expected);
    for (at, what) in [(4 * 512 - 100, "ZERO"), (4 * 512, "ZERO"), (7 * 512, "RDONLY")] {
        let error = disk.write_at(at, &[1; 200]).expect_err("it is refused").to_string();
        assert!(error.contains(what), "{error}");
    }
    let error = disk.discard(3 * 512, 5 * 512).expect_err("it is refused").to_string();
    assert!(error.contains("RDONLY"), "{error}");
    disk.discard(4 * 512, 512).expect("there is nothing to discard");
    // The disk is unchanged so far, and so is the content id.
    disk.read_at(0, &mut found).expect("it is read");
    assert!(found[..] == expected);
    let mut text = [0; 80];
    below.read_at(0, &mut text).expect("it is read");
    assert!(String::from_utf8_lossy(&text).contains("CID=01234567"));
    disk.write_at(9 * 512, &[3; 512]).expect("a write");
    disk.flush().expect("a flush");
    let mut start = [0; 1024];
    files[0].read_at(0, &mut start).expect("it is read");
    assert!(start == [[3; 512], [0xaa; 512]].concat()[..]);
    below.read_at(0, &mut text).expect("it is read");
    let text = String::from_utf8_lossy(&text);
    assert!(!text.contains("CID=01234567") && text.contains("\nparentCID=ffffffff"), "{text}");
}
