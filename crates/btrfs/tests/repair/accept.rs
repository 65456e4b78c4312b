//! Data of chosen files is accepted as it is: afterwards the kernel reads it, and `btrfs check`
//! finds no wrong checksum.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{AcceptedRange, BtrfsFindingCode as Code, RepairOptions, RepairOutcome};
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::run::run;
use offshoot_vfs::Errno;

use crate::common::{DamagedVolume, checked, progs_complaints, show};
use crate::judged::{bytes, repair_with, undo};

/// What each sector of the file begins with, before its number.
const MARKER: &[u8; 28] = b"a sector that will be broken";

const SECTOR: usize = 4096;

/// The sectors of a file.
const SECTORS: u32 = 100;

/// The contents of the file, of which `is_broken` sectors are broken.
fn contents(is_broken: impl Fn(u32) -> bool) -> Vec<u8> {
    let sector = |number: u32| {
        let mut bytes = vec![u8::try_from(number % 251).expect("small"); SECTOR];
        bytes[..28].copy_from_slice(MARKER);
        bytes[28..32].copy_from_slice(&number.to_le_bytes());
        if is_broken(number) {
            bytes[1000] ^= 0x40;
        }
        bytes
    };
    (0..SECTORS).flat_map(sector).collect()
}

/// A subvolume with the file, a snapshot of it, and a clone of the file.
fn fill(root: &Path) {
    let at = |name: &str| root.join(name).to_str().expect("a plain path").to_owned();
    run("btrfs", &["subvolume", "create", &at("sub")]);
    std::fs::write(at("sub/file"), contents(|_| false)).expect("it is written");
    std::fs::write(at("sub/other"), vec![9; 50_000]).expect("it is written");
    std::os::unix::fs::symlink("sub/file", at("link")).expect("a link");
    run("sync", &["-f", &at("")]);
    run("cp", &["--reflink=always", &at("sub/file"), &at("clone")]);
    run("btrfs", &["subvolume", "snapshot", "-r", &at("sub"), &at("snapshot")]);
}

fn recipe() -> Recipe {
    Recipe::new().mib(256).fill(fill)
}

/// Breaks sectors of the file on some members. Returns how many copies of sectors it broke.
fn spoil(disks: &Disks, members: &[usize], bit: u8, is_broken: impl Fn(u32) -> bool) -> usize {
    let mut broken = 0;
    for &member in members {
        let path = &disks.images()[member];
        let image = std::fs::read(path).expect("an image reads");
        let file = File::options().write(true).open(path).expect("an image opens");
        for (page, bytes) in image.chunks(SECTOR).enumerate() {
            if !bytes.starts_with(MARKER) {
                continue;
            }
            let number = u32::from_le_bytes(bytes[28..32].try_into().expect("four bytes"));
            if is_broken(number) {
                let at = (page * SECTOR + 1000) as u64;
                file.write_all_at(&[bytes[1000] ^ bit], at).expect("it is written");
                broken += 1;
            }
        }
    }
    broken
}

fn accept(disks: &Disks, path: &str, is_dry_run: bool) -> offshoot_vfs::Result<RepairOutcome> {
    let accepted = vec![path.as_bytes().to_vec()];
    let options = RepairOptions { accepted, is_dry_run, ..RepairOptions::default() };
    repair_with(disks, &options)
}

/// What the kernel reads of all files that share the data.
fn read_by_kernel(disks: &Disks) -> Vec<Result<Vec<u8>, i32>> {
    let mount = disks.mount_watched("ro", &["csum failed", "errs: wr 0, rd 0", "read error"]);
    let read = |name: &&str| {
        std::fs::read(mount.path().join(name)).map_err(|e| e.raw_os_error().unwrap_or_default())
    };
    ["sub/file", "clone", "snapshot/file"].iter().map(read).collect()
}

const IO_ERROR: i32 = 5;

/// The repair does not accept the data, for a reason that names `what`, and writes nothing.
#[track_caller]
fn require_refused(disks: &Disks, path: &str, what: &str) {
    let before = bytes(disks);
    let error = accept(disks, path, false).expect_err("it is refused");
    assert!(error.to_string().contains(what), "{error}");
    assert!(bytes(disks) == before, "nothing was written");
}

fn is_in_the_middle(number: u32) -> bool {
    [3, 4, 5, 70].contains(&number)
}

fn require_accepted(recipe: &Recipe, members: &[usize]) {
    let Some(judges) = judges::require() else { return };
    let disks = recipe.make(&judges);
    assert!(spoil(&disks, members, 0x40, is_in_the_middle) >= 4);
    assert_eq!(read_by_kernel(&disks), vec![Err(IO_ERROR); 3]);
    let before = bytes(&disks);
    let outcome = accept(&disks, "/sub/file", true).expect("it can be accepted");
    assert!(!outcome.is_written && bytes(&disks) == before);
    let [file] = &outcome.accepted.files[..] else { panic!("{:?}", outcome.accepted) };
    let ranges: Vec<_> = file.ranges.iter().map(|one| (one.offset, one.len)).collect();
    assert_eq!(ranges, [(3 * 4096, 3 * 4096), (70 * 4096, 4096)]);
    let others = outcome.accepted.others.iter().map(|user| user.path.as_deref());
    let others: Vec<_> = others.map(|path| path.expect("it has one").to_vec()).collect();
    assert_eq!(others, [b"/clone".to_vec(), b"/snapshot/file".to_vec()]);

    let outcome = accept(&disks, "sub/file", false).expect("it is accepted");
    assert!(outcome.is_written && outcome.classes.is_empty());
    let after = checked(&disks);
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(&disks), None);
    assert_eq!(read_by_kernel(&disks), vec![Ok(contents(is_in_the_middle)); 3]);

    undo(&disks).expect("it is undone");
    let found = checked(&disks);
    let is_data = found.findings.iter().all(|one| one.code == Code::Data);
    assert!(is_data && !found.findings.is_empty(), "{}", show(&found));
    assert_eq!(read_by_kernel(&disks), vec![Err(IO_ERROR); 3]);
}

#[test]
fn a_file_is_accepted_as_it_is() {
    require_accepted(&recipe(), &[0]);
}

#[test]
fn a_file_is_accepted_with_long_checksums() {
    require_accepted(&recipe().mkfs("--csum sha256 -n 4096"), &[0]);
}

#[test]
fn equal_copies_are_accepted() {
    require_accepted(&recipe().devices(2).mkfs("-d raid1 -m raid1"), &[0, 1]);
}

/// One good copy is enough to read the file, so there is nothing to accept. Two bad ones that
/// differ are not decided between.
#[test]
fn copies_that_differ_are_refused() {
    let Some(judges) = judges::require() else { return };
    let disks = recipe().devices(2).mkfs("-d raid1 -m raid1").make(&judges);
    spoil(&disks, &[0], 0x40, is_in_the_middle);
    let outcome = accept(&disks, "/sub/file", false).expect("there is nothing to accept");
    assert!(!outcome.is_written && outcome.accepted.files[0].ranges.is_empty());
    spoil(&disks, &[1], 0x20, |number| number == 70);
    require_refused(&disks, "/sub/file", "differ");
}

/// What parity gives fits the checksum, so there is nothing to accept.
#[test]
fn parity_is_used_first() {
    let Some(judges) = judges::require() else { return };
    let disks = recipe().devices(3).mkfs("-d raid5 -m raid1").make(&judges);
    assert_eq!(spoil(&disks, &[0, 1, 2], 0x40, |number| number == 3), 1);
    let outcome = accept(&disks, "/sub/file", false).expect("there is nothing to accept");
    assert!(!outcome.is_written && outcome.accepted.files[0].ranges.is_empty());
}

#[test]
fn data_without_checksums_gets_some() {
    let Some(judges) = judges::require() else { return };
    let damaged = DamagedVolume::of(recipe().mkfs("-n 4096").make(&judges));
    let is_sums = |key: Key, data: &[u8]| {
        key.item_type == ItemType::EXTENT_CSUM && data.len() >= 4 * SECTORS as usize
    };
    damaged.edit(TreeId::CSUM, is_sums, |items, slot| {
        // The first item becomes shorter, so checksums are missing at both of its ends.
        let (key, data) = &mut items[slot];
        key.offset += if slot == 0 { 0 } else { 2 * 4096 };
        data.truncate(data.len() - 4 * 10);
        drop(data.drain(..if slot == 0 { 0 } else { 8 }));
    });
    let found = checked(damaged.disks());
    assert!(found.findings.iter().any(|one| one.code == Code::MissingChecksum), "{}", show(&found));
    for path in ["/sub/file", "/sub/other"] {
        accept(damaged.disks(), path, false).expect("it is accepted");
    }
    let after = checked(damaged.disks());
    assert!(after.findings.is_empty(), "{}", show(&after));
    assert_eq!(progs_complaints(damaged.disks()), None);
    assert_eq!(read_by_kernel(damaged.disks()), vec![Ok(contents(|_| false)); 3]);
}

/// Compressed data that does not decompress would not be readable with any checksum. The padding
/// behind it does not matter to readers.
#[test]
fn compressed_data_must_decompress() {
    fn packed(root: &Path) {
        let bytes: Vec<u8> =
            (0u32..90_000).flat_map(|n| (n % 9000 * (n % 9000) % 977).to_le_bytes()).collect();
        std::fs::write(root.join("packed"), bytes).expect("it is written");
    }
    let Some(judges) = judges::require() else { return };
    let mount = "compress-force=zlib";
    let disks = Recipe::new().mib(256).mount(mount).fill(packed).make(&judges);
    let disks = (disks.copy(&judges), disks);
    let plain = std::fs::read(disks.0.mount("ro").path().join("packed")).expect("it reads");
    for (disks, is_in_stream) in [(&disks.0, true), (&disks.1, false)] {
        let (start, len) = {
            let damaged = DamagedVolume::of(disks.copy(&judges));
            let items = damaged.leaves(TreeId::FS).into_iter().flatten();
            let mut extents = items.filter(|(key, _)| key.item_type == ItemType::EXTENT_DATA);
            let (_, data) = extents.next_back().expect("an extent");
            let word = |at: usize| u64::from_le_bytes(data[at..at + 8].try_into().expect("8"));
            (word(21), word(29))
        };
        let at = if is_in_stream { start + 500 } else { start + len - 1 };
        change_logical(disks, at);
        if is_in_stream {
            require_refused(disks, "/packed", "another checksum");
        } else {
            let outcome = accept(disks, "/packed", false).expect("it is accepted");
            let AcceptedRange { offset, len, .. } = outcome.accepted.files[0].ranges[0];
            assert!(offset > 0 && len < 128 << 10, "the last extent");
            assert_eq!(progs_complaints(disks), None);
            let read = std::fs::read(disks.mount("ro").path().join("packed"));
            assert!(read.expect("it reads") == plain);
        }
    }
}

/// Changes a byte of data, by its logical address, in a volume of one member.
fn change_logical(disks: &Disks, logical: u64) {
    let output = std::process::Command::new("btrfs-map-logical")
        .args(["-l", &(logical / 4096 * 4096).to_string()])
        .arg(&disks.images()[0])
        .output()
        .expect("it runs");
    let text = String::from_utf8(output.stdout).expect("text");
    let place = text.split_whitespace().skip_while(|word| *word != "physical").nth(1);
    let physical: u64 = place.expect("a place").parse().expect("a number");
    let file = File::options().read(true).write(true).open(&disks.images()[0]).expect("an image");
    let mut byte = [0];
    let at = physical + logical % 4096;
    file.read_exact_at(&mut byte, at).expect("it reads");
    file.write_all_at(&[byte[0] ^ 0x55], at).expect("it is written");
}

#[test]
fn only_regular_files_are_accepted() {
    let Some(judges) = judges::require() else { return };
    let disks = recipe().make(&judges);
    let before = bytes(&disks);
    for (path, errno) in [
        ("/nothing", Errno::NOENT),
        ("/sub/file/below", Errno::NOTDIR),
        ("/sub", Errno::ISDIR),
        ("/", Errno::ISDIR),
        ("/link", Errno::INVAL),
    ] {
        assert_eq!(accept(&disks, path, false).expect_err(path).errno(), errno, "{path}");
    }
    let outcome = accept(&disks, "//sub/./other", false).expect("nothing is wrong");
    assert!(outcome.accepted.files[0].ranges.is_empty() && !outcome.is_written);
    assert!(bytes(&disks) == before, "nothing was written");
    let damaged = DamagedVolume::of(disks);
    let is_file = |key: Key, _: &[u8]| key.item_type == ItemType::EXTENT_DATA;
    damaged.edit(TreeId(256), is_file, |items, slot| {
        let ino = items[slot].0.objectid;
        let at = items.partition_point(|(key, _)| (key.objectid, key.item_type.0) < (ino, 36));
        items.insert(at, (Key::new(ino, ItemType::VERITY_DESC_ITEM, 0), vec![0; 8]));
    });
    require_refused(damaged.disks(), "/sub/file", "fs-verity");
}
