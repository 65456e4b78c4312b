//! Damaged volumes: every call ends, without a panic. With wrong checksums it gives an error or
//! what the volume held; with checksums that were made right again, or in version 4, which has
//! none, it may give anything.

use std::collections::HashSet;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::fill;
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;
use offshoot_vfs::{FileId, FileSystem};
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::csum;
use offshoot_xfs_format::superblock::XfsSuperblock;
use rustix::fs::XattrFlags;

use crate::survey::survey;
use crate::units::units;

/// How many damaged versions of a volume are read.
const ROUNDS: u32 = 24;

/// Opens and reads damaged versions of a volume.
fn damage(disk: &XfsDisk, reseals: bool, is_checked: bool) {
    let device = disk.device();
    let open = |device| {
        let options = XfsOptions { is_log_ignored: true, ..XfsOptions::default() };
        XfsVolume::open(device, &options)
    };
    let mut sector = vec![0; 4096];
    device.read_at(0, &mut sector).unwrap();
    let geometry = XfsSuperblock::parse(&sector).unwrap().geometry;
    let units = units(&*device, &geometry);
    let original = survey(&*open(device.clone()).unwrap());
    assert!(original.len() > 100 && original.values().all(Result::is_ok), "{original:?}");
    let mut random = Random::new(seed_of_run());
    let mut errors = 0;
    for _ in 0..ROUNDS {
        let damaged: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over(device.clone()));
        let mut changes = Vec::new();
        for _ in 0..=random.below(3) {
            let unit = units[usize::try_from(random.below(units.len() as u64)).unwrap()];
            let mut bytes = vec![0; unit.len];
            damaged.read_at(unit.at, &mut bytes).unwrap();
            for _ in 0..=random.below(4) {
                // Headers are where most fields are.
                let most = if random.below(2) == 0 { 100 } else { unit.len as u64 };
                let place = usize::try_from(random.below(most)).unwrap();
                let value = match random.below(4) {
                    0 => 0,
                    1 => 0xff,
                    2 => bytes[place] ^ 1 << random.below(8),
                    _ => u8::try_from(random.below(256)).unwrap(),
                };
                changes.push((unit, place, bytes[place], value));
                bytes[place] = value;
            }
            if reseals {
                csum::store(&mut bytes, unit.crc);
            }
            damaged.write_at(unit.at, &bytes).unwrap();
        }
        let started = Instant::now();
        let Ok(fs) = open(damaged) else {
            errors += 1;
            continue;
        };
        let _ = fs.statfs();
        let shown = survey(&*fs);
        assert!(started.elapsed() < Duration::from_secs(20), "{changes:?}");
        let has_error = shown.values().any(Result::is_err);
        errors += u32::from(has_error);
        if is_checked {
            for (path, text) in shown.iter().filter(|(_, text)| text.is_ok()) {
                assert_eq!(Some(text), original.get(path), "{changes:?}");
            }
            assert!(has_error || shown == original, "{changes:?}");
        }
    }
    eprintln!("{errors} of {ROUNDS} damaged volumes gave errors");
    assert!(!is_checked || errors > 0);
}

/// Files of all forms of metadata, and few of each.
fn fill_with_all_forms(root: &Path) {
    fill::some(root, seed_of_run());
    let scattered = File::create(root.join("scattered")).unwrap();
    for index in 0..300 {
        scattered.write_all_at(b"data", index * 131_072).unwrap();
    }
    let attributed = root.join("attributed");
    fs::write(&attributed, []).unwrap();
    for index in 0..300 {
        let value = vec![b'v'; index % 200 + index / 299 * 5000];
        let name = format!("user.number {index}");
        rustix::fs::lsetxattr(&attributed, name, &value, XattrFlags::empty()).unwrap();
    }
}

fn filled(judges: &XfsJudges) -> XfsDisk {
    XfsRecipe::new(XfsVolumeKind::named("block-1k")).fill(fill_with_all_forms).make(judges).disk
}

#[test]
fn damage_with_wrong_checksums_gives_errors_and_with_right_ones_no_panic() {
    let Some(judges) = judges::require() else { return };
    let disk = filled(&judges);
    damage(&disk, false, true);
    damage(&disk, true, false);
}

#[test]
fn damage_without_checksums_ends_without_a_panic() {
    let Some(judges) = judges::require() else { return };
    for kind in ["v4", "v4-block-512"] {
        damage(&XfsRecipe::new(XfsVolumeKind::named(kind)).make(&judges).disk, false, false);
    }
}

#[test]
fn rings_and_wrong_levels_are_found() {
    let Some(judges) = judges::require() else { return };
    let disk = filled(&judges);
    let open = || XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
    let before = open();
    let at = |path: &[&str]| {
        let lookup = |dir, name: &&str| before.lookup(dir, name.as_bytes()).unwrap();
        path.iter().fold(before.root(), lookup)
    };
    let inode = |file: FileId| format!("inode {}", file.ino);
    let attributes = at(&["attributed"]);
    let (names, scattered) = (at(&["directories", "of-4000"]), at(&["scattered"]));
    // The last leaf of the attributes leads to the first one.
    let said = disk.xfs_db(&[&inode(attributes), "ablock 0", "p btree"]);
    let leaf =
        |line: &str| line.split_once(',').unwrap().1.trim_end().trim_end_matches(']').to_owned();
    let leaves: Vec<_> = said.lines().filter(|line| line.contains(":[")).map(leaf).collect();
    assert!(leaves.len() > 2, "{said}");
    let (first, last) = (&leaves[0], &leaves[leaves.len() - 1]);
    let (to_leaf, forw) = (format!("ablock {last}"), format!("write hdr.info.hdr.forw {first}"));
    disk.change_with_xfs_db(&[&inode(attributes), &to_leaf, &forw]);
    // The root of the tree of hashes leads to itself.
    let root = (1_u64 << 35 >> 10).to_string();
    let to_root = format!("dblock {root}");
    let before_it = format!("write nbtree[0].before {root}");
    disk.change_with_xfs_db(&[&inode(names), &to_root, &before_it]);
    // Two children of the root of a tree of extents are one block.
    let said = disk.xfs_db(&[&inode(scattered), "p u3.bmbt.ptrs[1]"]);
    let child = said.split(':').nth(1).unwrap_or(&said).trim();
    let child = child.rsplit(' ').next().unwrap();
    disk.change_with_xfs_db(&[&inode(scattered), &format!("write u3.bmbt.ptrs[2] {child}")]);
    let ours = open();
    let mut count = 0;
    let read = ours.xattrs(attributes, &mut |_, _| {
        count += 1;
        ControlFlow::Continue(())
    });
    let error = read.unwrap_err().to_string();
    assert!(error.contains("ring") && count < 2000, "{error} after {count}");
    let mut found = 0;
    let mut errors = HashSet::new();
    before
        .read_dir(names, 0, &mut |entry| {
            match ours.lookup(names, entry.name) {
                Ok(file) => found += u32::from(file == entry.file),
                Err(error) => drop(errors.insert(error.to_string())),
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    let errors: Vec<_> = errors.into_iter().collect();
    assert!(found > 100 && errors.len() == 1 && errors[0].contains("its level"), "{errors:?}");
    let error = ours.read_data(scattered, 0..u64::MAX, &mut |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("first key"), "{error}");
    assert_eq!(error.code(), offshoot_vfs::Code::TreeBlock);
}
