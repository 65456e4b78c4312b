//! Damaged volumes: every call ends, without a panic. With wrong checksums it gives an error or
//! what the volume held; with checksums that were made right again, or in version 4, which has
//! none, it may give anything.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
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
use offshoot_vfs::{FileId, FileSystem, FileType, Result};
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::XfsGeometry;
use offshoot_xfs_format::csum;
use offshoot_xfs_format::superblock::XfsSuperblock;
use rustix::fs::XattrFlags;

/// What each path shows, or the error.
type ShownPaths = BTreeMap<Vec<u8>, std::result::Result<String, String>>;

/// Everything that a file shows. Of data, and of many attributes, only a part is read.
fn show(fs: &dyn FileSystem, file: FileId) -> Result<String> {
    let attr = fs.attr(file)?;
    let mut text = format!("{attr:?}");
    fs.xattrs(file, &mut |name, value| {
        write!(text, " {}={}", name.escape_ascii(), value.escape_ascii()).unwrap();
        ControlFlow::Continue(())
    })?;
    fs.xattr(file, b"user.number 8").map(drop).or_else(is_posix)?;
    match attr.file_type {
        FileType::Regular => {
            let mut bytes = vec![0; 100_000];
            let count = fs.read(file, 0, &mut bytes)?;
            write!(text, " {:x}", crc32(&bytes[..count])).unwrap();
            for offset in [0, 1 << 20, attr.size / 2] {
                write!(text, " {:?}", fs.next_data(file, offset)?).unwrap();
            }
            let mut left = 20;
            let read = fs.read_data(file, 0..attr.size, &mut |at, bytes| {
                write!(text, " {at}+{}", bytes.len()).unwrap();
                left -= 1;
                let error = || offshoot_vfs::Error::posix(offshoot_vfs::Errno::INTR, "enough");
                if left == 0 { Err(error()) } else { Ok(()) }
            });
            read.or_else(is_posix)?;
        }
        FileType::Symlink => text += &fs.read_link(file)?.escape_ascii().to_string(),
        _ => {}
    }
    Ok(text)
}

/// Lets errors of the kind POSIX pass.
fn is_posix(error: offshoot_vfs::Error) -> Result<()> {
    if matches!(error, offshoot_vfs::Error::Posix { .. }) { Ok(()) } else { Err(error) }
}

fn crc32(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum: u32, &byte| sum.rotate_left(5) ^ u32::from(byte))
}

/// Everything that a volume shows; each directory once, and so many entries.
fn survey(fs: &dyn FileSystem) -> ShownPaths {
    let mut shown = ShownPaths::new();
    let mut seen = HashSet::new();
    let mut stack = vec![(b"/".to_vec(), fs.root())];
    let mut left = 20_000;
    while let Some((path, file)) = stack.pop() {
        let text = show(fs, file);
        let is_directory = fs.attr(file).is_ok_and(|attr| attr.file_type == FileType::Directory);
        if is_directory && seen.insert(file) {
            let mut names = Vec::new();
            let read = fs.read_dir(file, 0, &mut |entry| {
                names.push((entry.name.to_vec(), entry.file));
                left -= 1;
                if left > 0 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            });
            if let Err(error) = read.and_then(|()| fs.parent(file).map(drop)) {
                shown.insert([&path[..], b"/"].concat(), Err(error.to_string()));
            }
            for (index, (name, below)) in names.into_iter().enumerate() {
                let below_path = [&path[..], b"/", &name].concat();
                // Looking all names up would take most of the time.
                if index % 16 == 0
                    && let Err(error) = fs.lookup(file, &name)
                {
                    shown.insert([&below_path[..], b"?"].concat(), Err(error.to_string()));
                }
                stack.push((below_path, below));
            }
        }
        shown.insert(path, text.map_err(|error| error.to_string()));
        if left <= 0 {
            break;
        }
    }
    shown
}

/// A piece of metadata: where it is, and where its checksum is in it.
#[derive(Clone, Copy, Debug)]
struct SealedUnit {
    at: u64,
    len: usize,
    crc: usize,
}

/// The metadata of a volume, by magic numbers. In version 4 `crc` is not used.
fn units(device: &dyn BlockDevice, geometry: &XfsGeometry) -> Vec<SealedUnit> {
    let mut units = Vec::new();
    let log = geometry.log_start;
    let log = geometry.place_of(log).unwrap().bytes();
    let log = log..log + (u64::from(geometry.log_blocks) << geometry.block_log);
    let mut bytes = vec![0; 1 << 20];
    for start in (0..device.size_bytes()).step_by(bytes.len()) {
        device.read_at(start, &mut bytes).unwrap();
        if bytes.iter().all(|&byte| byte == 0) {
            continue;
        }
        for (index, sector) in bytes.chunks_exact(512).enumerate() {
            let at = start + index as u64 * 512;
            let (block, size) = (geometry.block_size(), geometry.sector_size());
            let (len, crc) = match (&sector[..4], &sector[8..10]) {
                (b"XFSB", _) => (size, 224),
                (b"XAGF", _) => (size, 216),
                (b"XAGI", _) => (size, 312),
                (b"AB3B" | b"AB3C" | b"IAB3" | b"FIB3", _) => (block, 52),
                (b"ABTB" | b"ABTC" | b"IABT" | b"BMAP", _) => (block, 0),
                (b"BMA3", _) => (block, 64),
                (b"XDB3" | b"XDD3" | b"XDF3", _) => (geometry.dir_block_size(), 4),
                (b"XD2B" | b"XD2D" | b"XD2F", _) => (geometry.dir_block_size(), 0),
                (b"XARM" | b"XSLM", _) => (block, 12),
                ([b'I', b'N', ..], _) => (geometry.inode_size(), 100),
                (_, [0x3d, 0xf1 | 0xff] | [0x3e, 0xbe] | [0x3b, 0xee]) => (block, 12),
                (_, [0xd2, 0xf1 | 0xff] | [0xfe, 0xbe] | [0xfb, 0xee]) => (block, 0),
                _ => continue,
            };
            if !log.contains(&at) {
                units.push(SealedUnit { at, len, crc });
            }
        }
    }
    units
}

/// Opens and reads damaged versions of a volume for some seconds. Returns how often there was an
/// error.
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
    let (mut errors, mut rounds) = (0, 0);
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        rounds += 1;
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
    eprintln!("{errors} of {rounds} damaged volumes gave errors");
    assert!(rounds > 10 && errors > 0);
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
