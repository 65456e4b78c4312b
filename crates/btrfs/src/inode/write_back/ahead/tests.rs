//! Files that change while their data is on its way to the devices.

use offshoot_btrfs_format::TreeId;
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{EntryPlace, Fallocate, FileSystem, FileSystemMut, NewFile, SetAttr, Timestamp};

use super::*;
use crate::inode::write_back;
use crate::test_volumes::in_memory;
use crate::{BtrfsVolume, Compress, EngineOptions, Filesystem, NewFiles};

const AT: Timestamp = Timestamp { secs: 1_000_000, nanos: 7 };
const NEW: NewFile = NewFile { permissions: 0o644, uid: 1, gid: 2, umask: None, at: AT };
const MIB: usize = 1 << 20;

fn open(device: &Arc<CheckedDevice>, options: EngineOptions) -> (Arc<BtrfsVolume>, Filesystem) {
    let options = EngineOptions { commit_interval: None, ..options };
    let volume = BtrfsVolume::open_writable(vec![device.clone()], &options).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    (volume, fs)
}

fn create(fs: &Filesystem) -> FileId {
    fs.create(EntryPlace { dir: fs.root(), name: b"file" }, &NEW).expect("a file")
}

fn set_len(fs: &Filesystem, file: FileId, len: usize) {
    let size = SetAttr { size: Some(len as u64), ..SetAttr::default() };
    fs.set_attr(file, &size, AT).expect("a length");
}

fn assert_holds(fs: &Filesystem, file: FileId, bytes: &[u8], when: &str) {
    let mut found = vec![0; bytes.len() + 1];
    let len = fs.read(file, 0, &mut found).expect("it reads");
    assert_eq!(len, bytes.len(), "{when}");
    let differs = found.iter().zip(bytes).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{when}");
}

/// Requires that after a commit no data space is taken without being used.
fn assert_nothing_is_lost(volume: &BtrfsVolume) {
    volume.commit().expect("a commit");
    let data = &volume.space_stats().kinds[0];
    let free = data.total_bytes - data.used_bytes;
    assert_eq!((data.pinned_bytes, data.reserved_bytes), (0, 0), "{data:?}");
    assert_eq!(data.free_bytes, free, "{data:?}");
}

/// Writes 4 MiB, runs `change` on the file while they are on their way or just after, and stores
/// the rest.
fn with_a_change(is_written_first: bool, change: impl Fn(&Filesystem, FileId, &mut Vec<u8>)) {
    let device = in_memory(16384);
    let (volume, fs) = open(&device, EngineOptions::default());
    let file = create(&fs);
    let mut bytes = vec![7; 4 * MIB];
    fs.write(file, 0, &bytes, AT).expect("there is room");
    let (extent, is_new) = begin(fs.volume(), file).expect("it reads").expect("it can go ahead");
    assert!(is_new && extent.data().len == 4 << 20);
    let write = || write(fs.volume(), &extent).expect("the device works");
    if is_written_first {
        write();
    }
    change(&fs, file, &mut bytes);
    if !is_written_first {
        write();
    }
    if fs.attr(file).is_ok() {
        assert_holds(&fs, file, &bytes, "before its items");
        end(fs.volume(), file, &extent).expect("there is room");
        assert_holds(&fs, file, &bytes, "with the items of what was written ahead");
        fs.sync().expect("a commit");
        assert_holds(&fs, file, &bytes, "with all items");
    } else {
        end(fs.volume(), file, &extent).expect("it is gone");
        fs.sync().expect("a commit");
    }
    assert_nothing_is_lost(&volume);
}

fn overwrite(fs: &Filesystem, file: FileId, bytes: &mut Vec<u8>, at: usize, len: usize) {
    bytes.resize(bytes.len().max(at + len), 0);
    bytes[at..at + len].fill(9);
    fs.write(file, at as u64, &bytes[at..at + len], AT).expect("there is room");
}

#[test]
fn what_is_on_its_way_is_written_over() {
    for at in [0, MIB + 5000, 4 * MIB - 1, 4 * MIB] {
        for len in [1, 2 * MIB] {
            with_a_change(false, |fs, file, bytes| overwrite(fs, file, bytes, at, len));
        }
    }
}

#[test]
fn what_is_on_its_way_is_cut_off() {
    for len in [0, 1, MIB, 2 * MIB + 100, 4 * MIB - 1] {
        // Cutting off everything stores the length, and waits for the data.
        let is_written_first = len == 0;
        with_a_change(is_written_first, |fs, file, bytes| {
            set_len(fs, file, len);
            bytes.truncate(len);
        });
        // The part is then written again.
        with_a_change(is_written_first, |fs, file, bytes| {
            set_len(fs, file, len);
            bytes.truncate(len);
            overwrite(fs, file, bytes, 4 * MIB, 1);
            overwrite(fs, file, bytes, 0, 3 * MIB);
        });
    }
}

/// A thread that stores the file waits for the data on its way, and stores its items.
#[test]
fn others_store_what_was_written_ahead() {
    with_a_change(true, |fs, file, _| fs.fsync(file).expect("an fsync"));
    with_a_change(true, |fs, file, bytes| {
        overwrite(fs, file, bytes, MIB, 1);
        fs.sync().expect("a commit");
    });
    with_a_change(true, |fs, file, bytes| {
        fs.fallocate(file, Fallocate::PunchHole, 4096, 2 << 20, AT).expect("a hole");
        bytes[4096..4096 + 2 * MIB].fill(0);
    });
}

#[test]
fn a_file_is_removed_while_its_data_is_on_its_way() {
    for is_written_first in [true, false] {
        with_a_change(is_written_first, |fs, _, _| {
            fs.unlink(EntryPlace { dir: fs.root(), name: b"file" }, AT).expect("it goes");
        });
    }
}

/// Changes `file` at random, and `bytes` with it.
fn change_at_random(fs: &Filesystem, file: FileId, bytes: &mut Vec<u8>, seed: u64) {
    const LEN: usize = 6 * MIB;
    let mut random = Random::new(seed);
    let mut below =
        |bound: usize| usize::try_from(random.below(bound as u64)).expect("it is in memory");
    for step in 0..300 {
        match below(10) {
            0 => {
                bytes.resize(below(LEN), 0);
                set_len(fs, file, bytes.len());
            }
            1 => fs.fsync(file).expect("an fsync"),
            2 => {
                let (from, len) = (below(LEN), 1 + below(MIB));
                let what = Fallocate::PunchHole;
                fs.fallocate(file, what, from as u64, len as u64, AT).expect("a hole");
                let end = bytes.len();
                bytes[from.min(end)..(from + len).min(end)].fill(0);
            }
            _ => {
                let (from, len) = (below(LEN), 1 + below(2 * MIB));
                bytes.resize(bytes.len().max(from + len), 0);
                bytes[from..from + len].fill(u8::try_from(step % 251).expect("below 251"));
                fs.write(file, from as u64, &bytes[from..from + len], AT).expect("there is room");
            }
        }
        if step % 8 == 0 {
            assert_holds(fs, file, bytes, &format!("step {step}"));
        }
    }
}

/// Random changes of a file beside a thread that writes it back all the time.
#[test]
fn a_file_changes_while_it_is_written_back() {
    let seed = seed_of_run();
    println!("OFFSHOOT_SEED={seed}");
    let compress = Some(Compress { method: "lzo".parse().expect("a method"), is_forced: true });
    for options in [
        EngineOptions::default(),
        EngineOptions { dirty_bytes: 4 << 20, ..EngineOptions::default() },
        EngineOptions { new_files: NewFiles::InPlace, ..EngineOptions::default() },
        EngineOptions { compress, ..EngineOptions::default() },
    ] {
        let device = in_memory(16384);
        let (volume, fs) = open(&device, options);
        let (file, mut bytes) = (create(&fs), Vec::new());
        std::thread::scope(|scope| {
            let changes = scope.spawn(|| change_at_random(&fs, file, &mut bytes, seed));
            while !changes.is_finished() {
                write_back::ease(fs.volume()).expect("there is room");
                std::thread::yield_now();
            }
        });
        fs.sync().expect("a commit");
        assert_holds(&fs, file, &bytes, "at the end");
        assert_nothing_is_lost(&volume);
    }
}
