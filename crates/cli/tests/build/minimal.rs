//! `--size minimal`, with the smallest images of `mkfs.btrfs` as the ruler.

use std::fs;
use std::path::Path;

use offshoot_testkit::btrfs::disks::{MountedMembers, assert_image_checks};
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::{does, fails};

const MIB: u64 = 1 << 20;

/// How many trees a run builds. More are built where `OFFSHOOT_MINIMAL_TREES` says so.
const TREES: u64 = 6;

/// The bytes of files of the largest tree.
const MOST_BYTES: u64 = 96 * MIB;

/// Makes a tree of files with about `bytes` bytes.
fn tree(dir: &Path, bytes: u64, random: &mut Random) {
    fs::create_dir(dir).expect("a new directory");
    let (mut left, mut number) = (bytes, 0);
    while left > 0 {
        let most =
            [2000, 40_000, 3 * MIB, 40 * MIB][usize::try_from(random.below(4)).expect("small")];
        let len = (1 + random.below(most)).min(left);
        let parent = dir.join(format!("{}", number / 50));
        fs::create_dir_all(&parent).expect("a directory");
        let mut bytes = random.bytes(usize::try_from(len.min(MIB)).expect("small"));
        let mut contents = Vec::with_capacity(usize::try_from(len).expect("small"));
        while (contents.len() as u64) < len {
            bytes[0] = bytes[0].wrapping_add(1);
            let rest = usize::try_from(len).expect("small") - contents.len();
            contents.extend_from_slice(&bytes[..bytes.len().min(rest)]);
        }
        fs::write(parent.join(format!("{number}")), contents).expect("a file");
        (left, number) = (left - len, number + 1);
    }
}

/// The size of the smallest image of `mkfs.btrfs`.
fn ruler(dir: &Path, source: &Path) -> u64 {
    let image = dir.join("ruler.img");
    let paths = [source.as_os_str(), image.as_os_str()];
    let words = ["-q".as_ref(), "--shrink".as_ref(), "--rootdir".as_ref(), paths[0], paths[1]];
    run("mkfs.btrfs", &words);
    let len = fs::metadata(&image).expect("an image").len();
    fs::remove_file(&image).expect("it goes");
    len
}

/// The smallest images of trees of many sizes are smaller than those of `mkfs.btrfs`. They hold the
/// tree, the kernel writes them, and it fills them when they are larger.
#[test]
fn minimal_images() {
    let Some(judges) = judges::require() else { return };
    let trees = std::env::var("OFFSHOOT_MINIMAL_TREES").ok().and_then(|text| text.parse().ok());
    let trees: u64 = trees.unwrap_or(TREES);
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let (scratch, mut gained) = (scratch_dir(), Vec::new());
    let dir = scratch.path();
    for number in 0..trees {
        let bytes = if number == 0 { 0 } else { random.below(MOST_BYTES >> (number % 6)) };
        let source = dir.join("tree");
        tree(&source, bytes, &mut random);
        let theirs = ruler(dir, &source);
        does(dir, "build v.img --force --from tree --size minimal");
        let image = dir.join("v.img");
        let ours = fs::metadata(&image).expect("an image").len();
        println!("seed {seed}, tree {number}: {bytes} bytes, ours {ours}, theirs {theirs}");
        assert!(ours <= (theirs + 2 * MIB).max(theirs / 20 * 21), "{ours}, theirs {theirs}");
        gained.push(theirs.cast_signed() - ours.cast_signed());
        assert_image_checks(&image);
        writes_and_shows(&image, &source);
        does(dir, "resize v.img +200M");
        fills(&image);
        fs::remove_dir_all(&source).expect("it goes");
    }
    gained.sort_unstable();
    assert!(gained[gained.len() / 2] > 0, "not smaller in the median: {gained:?}");
    drop(judges);
}

/// Has the kernel show the tree, and write to the volume as it is.
fn writes_and_shows(image: &Path, source: &Path) {
    {
        let mount = MountedMembers::try_new(&[image.to_path_buf()], "rw,noatime").expect("a mount");
        let mount = mount.into_mount();
        // Attributes are compared in `judged`.
        run("diff", &["-r".as_ref(), source.as_os_str(), mount.path().as_os_str()]);
        let path = mount.path().join("of the kernel");
        fs::write(&path, b"a few bytes").expect("room for a file");
        mount.sync();
        fs::remove_file(&path).expect("it goes");
    }
    assert_image_checks(image);
}

/// Has the kernel write much to the volume.
fn fills(image: &Path) {
    {
        let mount = MountedMembers::try_new(&[image.to_path_buf()], "rw,noatime").expect("a mount");
        let mount = mount.into_mount();
        for number in 0..100 {
            let bytes = Random::new(number).bytes(1 << 20);
            fill::write(&mount.path().join(format!("large-{number}")), &bytes);
        }
        mount.sync();
    }
    assert_image_checks(image);
}

#[test]
fn room_at_the_end() {
    let scratch = scratch_dir();
    let dir = scratch.path();
    fs::create_dir(dir.join("d")).expect("a directory");
    let len = |name: &str| fs::metadata(dir.join(name)).expect("an image").len();
    does(dir, "build a.img --from d --size minimal");
    does(dir, "build b.img --from d --size minimal+100M");
    assert_eq!(len("b.img"), len("a.img") + 100 * MIB);
    does(dir, "resize b.img minimal");
    assert!(len("b.img") <= len("a.img"), "{} and {}", len("a.img"), len("b.img"));
    let said = fails(dir, "build x.img --from d --size minimal --format xfs", 2);
    assert!(said.contains("XFS volumes have no --size minimal"), "{said}");
    for wrong in ["minimal+", "minimal-4K", "minimalist"] {
        fails(dir, &format!("build x.img --from d --size {wrong}"), 2);
    }
    assert!(!dir.join("x.img").exists());
}
