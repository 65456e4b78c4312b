//! The kinds of volumes that a reader of XFS has to know.
//!
//! The options name every feature whose default changed over the years, so that each version of
//! `mkfs.xfs` makes the same volume. Blocks of 512 bytes exist only in version 4. The kernel mounts
//! blocks larger than its pages since 6.12, and calls that experimental.

use crate::xfs::disk::{LARGE_BLOCKS, METADIR};
use crate::xfs::fill::{EVERYTHING_AT_LEAST, SOME_AT_LEAST};

/// Makes four tests that share the kinds of volumes. `$test` is called with every fourth kind of
/// those that `$kinds` gives.
#[macro_export]
macro_rules! in_shares {
    ($kinds:expr, $test:expr) => {
        #[test]
        fn the_first_share_of_volumes() {
            $kinds.step_by(4).for_each($test);
        }

        #[test]
        fn the_second_share_of_volumes() {
            $kinds.skip(1).step_by(4).for_each($test);
        }

        #[test]
        fn the_third_share_of_volumes() {
            $kinds.skip(2).step_by(4).for_each($test);
        }

        #[test]
        fn the_fourth_share_of_volumes() {
            $kinds.skip(3).step_by(4).for_each($test);
        }
    };
}

/// One kind of volume.
#[derive(Clone, Copy, Debug)]
pub struct XfsVolumeKind {
    /// The name of the kind.
    pub name: &'static str,
    /// Options of `mkfs.xfs`, separated by spaces.
    pub mkfs: &'static str,
    /// The size of the image in MiB.
    pub mib: u64,
    /// Commands of `xfs_db` that change the volume after it is filled.
    pub changes: &'static [&'static str],
    /// Whether the kernel mounts it. It mounts no volume of version 4.
    pub is_mounted: bool,
    /// What the kernel complains of when it mounts the volume.
    pub kernel_says: &'static [&'static str],
    /// The least number of names that a recipe puts into it.
    pub names_at_least: u64,
}

/// Most features of a volume of 2021 to 2025.
const USUAL: &str = "-m finobt=1,reflink=1,bigtime=1,inobtcount=1,rmapbt=0 -i sparse=1,nrext64=0";

impl XfsVolumeKind {
    const fn new(name: &'static str, mkfs: &'static str) -> Self {
        Self {
            name,
            mkfs,
            mib: 512,
            changes: &[],
            is_mounted: true,
            kernel_says: &[],
            names_at_least: EVERYTHING_AT_LEAST,
        }
    }

    const fn large_blocks(name: &'static str, mkfs: &'static str) -> Self {
        Self { kernel_says: &[LARGE_BLOCKS], mib: 1024, ..Self::new(name, mkfs) }
    }

    const fn version_4(name: &'static str, mkfs: &'static str) -> Self {
        Self { is_mounted: false, names_at_least: SOME_AT_LEAST, ..Self::new(name, mkfs) }
    }

    /// The kind with this name.
    #[must_use]
    pub fn named(name: &str) -> &'static Self {
        let found = MATRIX.iter().find(|kind| kind.name == name);
        found.unwrap_or_else(|| panic!("no kind of volume has the name {name}"))
    }
}

/// All kinds.
pub const MATRIX: &[XfsVolumeKind] = &[
    XfsVolumeKind::new("usual", USUAL),
    XfsVolumeKind::new("rmapbt", "-m rmapbt=1,reflink=1,bigtime=1,inobtcount=1 -i nrext64=1"),
    XfsVolumeKind::new("first-v5", "-m finobt=0,reflink=0,bigtime=0,rmapbt=0 -i sparse=0"),
    XfsVolumeKind::new("reflink-without-bigtime", "-m reflink=1,bigtime=0,inobtcount=0,rmapbt=0"),
    XfsVolumeKind::new("rmapbt-without-reflink", "-m rmapbt=1,reflink=0"),
    XfsVolumeKind::new("block-1k", "-b size=1024 -m rmapbt=0"),
    XfsVolumeKind::new("block-1k-rmapbt", "-b size=1024 -m rmapbt=1 -i nrext64=1"),
    XfsVolumeKind::new("block-2k-dir-8k", "-b size=2048 -n size=8192"),
    XfsVolumeKind::large_blocks("block-8k", "-b size=8192"),
    XfsVolumeKind::large_blocks("block-16k", "-b size=16384 -m rmapbt=1"),
    XfsVolumeKind::large_blocks("block-32k", "-b size=32768"),
    XfsVolumeKind::large_blocks("block-64k", "-b size=65536 -m rmapbt=1"),
    XfsVolumeKind::new("sector-4k", "-s size=4096"),
    XfsVolumeKind::new("two-groups", "-i size=512 -n size=4096 -d agcount=2"),
    XfsVolumeKind::new("inode-1k", "-i size=1024"),
    XfsVolumeKind::new("inode-2k", "-i size=2048"),
    XfsVolumeKind::new("dir-16k", "-n size=16384"),
    XfsVolumeKind::new("dir-64k", "-n size=65536"),
    // A group has to hold the log, which has at least 64 MiB.
    XfsVolumeKind { mib: 1500, ..XfsVolumeKind::new("many-groups", "-d agcount=17") },
    XfsVolumeKind::new("stripes", "-d agcount=4,su=64k,sw=4 -l su=256k"),
    XfsVolumeKind::new("sparse-off", "-i sparse=0,maxpct=50"),
    XfsVolumeKind { changes: &["uuid generate"], ..XfsVolumeKind::new("meta-uuid", "-m rmapbt=1") },
    // The groups from the third on have inode numbers above 32 bits.
    XfsVolumeKind {
        mib: 4 << 20,
        ..XfsVolumeKind::new("large-numbers", "-l size=64m -m rmapbt=0")
    },
    XfsVolumeKind::new("parent", "-n parent=1 -m rmapbt=1 -i exchange=0"),
    XfsVolumeKind::new("today", "-n parent=1 -i exchange=1,nrext64=1 -m rmapbt=1"),
    XfsVolumeKind::new("today-1k", "-b size=1024 -n parent=1 -i exchange=1 -m rmapbt=1"),
    XfsVolumeKind { kernel_says: &[METADIR], ..XfsVolumeKind::new("metadir", "-m metadir=1") },
    XfsVolumeKind::version_4("v4", "-m crc=0"),
    XfsVolumeKind::version_4("v4-block-512", "-m crc=0 -b size=512 -n size=4096"),
    XfsVolumeKind::version_4("v4-without-types", "-m crc=0 -n ftype=0 -i size=256"),
    XfsVolumeKind::version_4("v4-oldest", "-m crc=0 -n ftype=0 -i attr=1,projid32bit=0"),
];
