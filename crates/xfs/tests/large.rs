//! Large directories, files of many extents, and many attributes, as the kernel makes them.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_testkit::compare::Aspect;
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;
use offshoot_vfs::FileSystem;
use offshoot_xfs::{XfsOptions, XfsVolume, check_xfs};
use rustix::fs::{FallocateFlags, XattrFlags};

/// How many names and extents an ordinary run makes.
const ORDINARY: u64 = 20_000;

/// The variable with another number.
const NUMBER: &str = "OFFSHOOT_LARGE";

/// How many names a file gets before the next one.
const NAMES_OF_A_FILE: u64 = 1000;

/// The length of an extent, and of the hole behind it.
const EXTENT_BYTES: u64 = 4096;

/// No more names of attributes fit into the list that a system call returns.
const MOST_ATTRIBUTES: u64 = 3000;

const ORDINARY_KIND: XfsVolumeKind =
    kind("today-1k", "-b size=1024 -n parent=1 -i exchange=1,nrext64=1 -m rmapbt=1");

/// The volumes of the campaign.
static LARGE_KINDS: [XfsVolumeKind; 3] = [
    ORDINARY_KIND,
    kind("usual", "-m finobt=1,reflink=1,bigtime=1,inobtcount=1,rmapbt=0 -i sparse=1,nrext64=0"),
    kind("dir-64k", "-n size=65536"),
];

const fn kind(name: &'static str, mkfs: &'static str) -> XfsVolumeKind {
    XfsVolumeKind {
        name,
        mkfs,
        mib: 8192,
        changes: &[],
        is_mounted: true,
        kernel_says: &[],
        names_at_least: 0,
    }
}

fn number() -> u64 {
    std::env::var(NUMBER).map_or(ORDINARY, |number| number.parse().expect("a number"))
}

/// Fills a volume. One in 16 extents has data, and the others are unwritten.
fn large(root: &Path) {
    let number = number();
    let dir = root.join("directory");
    fs::create_dir(&dir).unwrap();
    for at in 0..number {
        let first = dir.join(format!("name-{}", at - at % NAMES_OF_A_FILE));
        if at.is_multiple_of(NAMES_OF_A_FILE) {
            fs::write(first, at.to_string()).unwrap();
        } else {
            fs::hard_link(first, dir.join(format!("name-{at}"))).unwrap();
        }
    }
    let path = root.join("extents");
    let file = File::create(&path).unwrap();
    for at in 0..number {
        let offset = at * 2 * EXTENT_BYTES;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), offset, EXTENT_BYTES).unwrap();
        if at.is_multiple_of(16) {
            file.write_all_at(&at.to_le_bytes().repeat(512), offset).unwrap();
        }
    }
    for at in 0..MOST_ATTRIBUTES.min(number / 100) {
        let (name, value) = (format!("user.attribute-{at}"), at.to_string().repeat(20));
        rustix::fs::setxattr(&path, name, value.as_bytes(), XattrFlags::CREATE).unwrap();
    }
}

fn reads_as_the_kernel(kind: &'static XfsVolumeKind) {
    let Some(judges) = judges::require() else { return };
    let filled = XfsRecipe::new(kind).fill(large).make(&judges);
    let ours = XfsVolume::open(filled.disk.device(), &XfsOptions::default()).unwrap();
    let outcome = filled.compare_without(&[Aspect::StoredAcls], &*ours);
    outcome.assert_same(number());
    let last = format!("name-{}", number() - 1);
    let dir = ours.lookup(ours.root(), b"directory").unwrap();
    ours.lookup(dir, last.as_bytes()).unwrap();
    let extents = filled.disk.field(&["path /extents"], "core.nextents");
    assert_eq!(extents, number());
    let checked = check_xfs(&filled.disk.device(), &XfsOptions::default()).unwrap();
    assert!(checked.findings.is_empty(), "{:#?}", checked.findings);
}

#[test]
fn many_names_extents_and_attributes_read_as_the_kernel_shows_them() {
    reads_as_the_kernel(&ORDINARY_KIND);
}

/// A million names and extents: `cargo xtask campaign xfs-large`.
#[test]
#[ignore = "takes minutes; cargo xtask campaign xfs-large runs it"]
fn campaign() {
    for kind in &LARGE_KINDS {
        println!("{}: {} names and extents", kind.name, number());
        reads_as_the_kernel(kind);
    }
}
