//! Directories that mkfs and the kernel made.

use std::fmt::Write;

use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::leaf::DirLeaf;

use crate::volume;
use crate::volume::MadeVolume;
use crate::{DIRECTORIES, SHAPES, compare, contents, kinds, names};

#[test]
fn directories_of_mkfs_are_read_in_all_forms() {
    if !volume::has_judges() {
        return;
    }
    let contents = contents();
    let mut seen = Vec::new();
    for options in SHAPES {
        let volume = MadeVolume::make(options, &contents);
        for &(name, count, len) in DIRECTORIES {
            let file = volume.file(&format!("/{name}"));
            compare(&volume, &file, &names(count, len));
            seen.extend(kinds(&volume, &file));
        }
    }
    for kind in [
        DaKind::DirBlock,
        DaKind::DirData,
        DaKind::DirFree,
        DaKind::DirLeaf,
        DaKind::DirNodeLeaf,
        DaKind::DirNode,
    ] {
        assert!(seen.contains(&kind), "{kind:?}");
    }
}

#[test]
fn a_tree_of_two_levels_and_an_index_of_two_blocks_are_read() {
    if !volume::has_judges() {
        return;
    }
    let names = names(265_000, 16);
    let mut text = "deep d--755 0 0\n".to_owned();
    for name in &names {
        writeln!(text, "{name} ---644 0 0 /dev/null").unwrap();
    }
    let volume = MadeVolume::make(SHAPES[0], &format!("{text}$\n"));
    let file = volume.file("/deep");
    compare(&volume, &file, &names);
    let kinds = kinds(&volume, &file);
    for kind in [DaKind::DirNode, DaKind::DirFree] {
        assert!(kinds.iter().filter(|&&other| other == kind).count() > 1, "{kind:?}");
    }
}

#[test]
fn directories_that_the_kernel_thinned_out_are_read() {
    if !volume::has_judges() {
        return;
    }
    let volume = MadeVolume::make(SHAPES[1], &contents());
    let gone = |i: usize| !i.is_multiple_of(5);
    volume.mounted(|point| {
        for &(name, count, len) in &DIRECTORIES[2..] {
            for (i, entry) in names(count, len).iter().enumerate() {
                if gone(i) {
                    std::fs::remove_file(point.join(name).join(entry)).unwrap();
                }
            }
        }
    });
    let mut stale = 0;
    for &(name, count, len) in &DIRECTORIES[2..] {
        let file = volume.file(&format!("/{name}"));
        let kept = names(count, len).into_iter().enumerate().filter(|&(i, _)| !gone(i));
        compare(&volume, &file, &kept.map(|(_, name)| name).collect::<Vec<_>>());
        for (expected, bytes) in volume.directory_blocks(&file) {
            let kind = DaKind::of_directory(&volume.geometry, &bytes).unwrap();
            if matches!(kind, DaKind::DirLeaf | DaKind::DirNodeLeaf) {
                let leaf = DirLeaf::parse(&volume.geometry, kind, &bytes, &expected).unwrap();
                stale += leaf.stale;
            }
        }
    }
    assert!(stale > 0);
}
