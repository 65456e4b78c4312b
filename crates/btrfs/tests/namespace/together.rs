//! Small new files that are written back together, beside files that are not.

use offshoot_btrfs::{EngineOptions, SubvolumeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_vfs::{FileFlags, FileSystem, FileSystemMut, SetAttr, Timestamp};

use crate::common::{AT, NEW, judge, open_read_only, open_with, place};

/// Lengths around the limits at which the engine treats a file differently.
const LENGTHS: [usize; 11] = [1, 100, 2047, 2048, 2049, 4095, 4096, 4097, 30_000, 65_536, 65_537];

/// A file's story before it is stored, and whether it can still be stored with others.
const STORIES: [(&str, bool); 7] = [
    ("plain", true),
    ("overwritten", true),
    ("cut", true),
    ("longer", false),
    ("hole", false),
    ("stored", false),
    ("in-place", false),
];

/// Every file holds what was written, whatever its story, and as many as possible were stored
/// together.
#[test]
fn small_files_are_stored_together() {
    const EACH: usize = 3;
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 1024);
    disks.mkfs(&[]);
    let options = EngineOptions { commit_interval: None, ..EngineOptions::default() };
    let fs = open_with(&disks, &options).filesystem(SubvolumeId::FS).expect("every volume has one");
    let seed = seed_of_run();
    println!("seed {seed}");
    let mut random = Random::new(seed);
    let (mut files, mut together) = (Vec::new(), 0);
    for _ in 0..EACH {
        for (story, is_small) in STORIES {
            for len in LENGTHS {
                let name = format!("{}-{story}-{len}", files.len());
                let file = fs.create(place(fs.root(), &name), &NEW).expect("a file");
                let mut data = random.bytes(len);
                let write = |at: usize, data: &[u8]| {
                    fs.write(file, at as u64, data, AT).expect("there is room");
                };
                let set_size = |size: usize| {
                    let set = SetAttr { size: Some(size as u64), ..SetAttr::default() };
                    fs.set_attr(file, &set, AT).expect("it may be set");
                };
                if story == "in-place" {
                    fs.set_flags(file, FileFlags::NODATACOW, AT).expect("it is empty");
                }
                write(0, &data);
                match story {
                    "overwritten" => {
                        data[len / 2..].fill(7);
                        write(len / 2, &data[len / 2..]);
                    }
                    "cut" => {
                        data.truncate(len.div_ceil(2));
                        set_size(data.len());
                    }
                    "longer" => {
                        data.resize(len + 10_000, 0);
                        set_size(data.len());
                    }
                    "hole" => {
                        data.resize(len.next_multiple_of(4096) + 8192, 0);
                        let at = data.len();
                        data.extend([9; 50]);
                        write(at, &[9; 50]);
                    }
                    "stored" => {
                        fs.fsync(file).expect("it is stored");
                        data[0] ^= 1;
                        write(0, &data[..1]);
                    }
                    _ => {}
                }
                together += u64::from(is_small && data.len() <= 65_536);
                files.push((name, file, data));
            }
        }
    }
    fs.sync().expect("a commit");
    assert_eq!(fs.volume().stats().files_stored_together, together);
    let later = Timestamp { secs: AT.secs + 5, ..AT };
    let (_, first, data) = &mut files[0];
    data.extend([3; 5000]);
    fs.write(*first, data.len() as u64 - 5000, &[3; 5000], later).expect("there is room");
    fs.sync().expect("a commit");
    drop(fs);

    let fs = open_read_only(&disks);
    for (name, file, data) in &files {
        let mut found = vec![0; data.len() + 1];
        assert_eq!(fs.read(*file, 0, &mut found).expect("it reads"), data.len(), "{name}");
        assert!(found[..data.len()] == data[..], "{name}");
    }
    judge(&disks, files.len() as u64);
    let mount = disks.mount("ro,noatime");
    for (name, _, data) in &files {
        assert!(std::fs::read(mount.path().join(name)).expect("it reads") == *data, "{name}");
    }
    drop(mount);
    let image = disks.images()[0].to_str().expect("a plain path").to_owned();
    run("btrfs", &["check", "--readonly", "--check-data-csum", &image]);
}
