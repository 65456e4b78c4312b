//! Directories in an inode.

use offshoot_xfs_format::Ino;
use offshoot_xfs_format::dir::block::{self, DirBlock};
use offshoot_xfs_format::dir::short::{ShortDir, ShortDirView};

use crate::volume::numbers_only;
use crate::{EXPECTED, V5, entry, names};

#[test]
fn a_short_directory_widens_and_narrows() {
    let mut geometry = numbers_only(10, 0, V5);
    (geometry.ag_block_log, geometry.ag_blocks) = (28, 1 << 28);
    (geometry.ag_count, geometry.blocks) = (64, 64 << 28);
    let wide = Ino(1 << 32 | 128);
    let mut short = ShortDir { parent: Ino(128), entries: Vec::new() };
    assert!(short.insert(&geometry, entry(b"near", 131)));
    let narrow = short.encode(&geometry).unwrap();
    assert_eq!(narrow[..6], [1, 0, 0, 0, 0, 128]);
    assert!(short.insert(&geometry, entry(b"far", wide.0)));
    let bytes = short.encode(&geometry).unwrap();
    assert_eq!(bytes[..10], [2, 1, 0, 0, 0, 0, 0, 0, 0, 128]);
    ShortDir::parse(&geometry, &bytes).unwrap();
    let view = ShortDirView::new(&geometry, &bytes).unwrap();
    assert_eq!(view.find(b"far").unwrap().ino, wide);
    assert_eq!(short.remove(b"far").unwrap().ino, wide);
    assert_eq!(short.encode(&geometry).unwrap(), narrow);
    short.parent = wide;
    let bytes = short.encode(&geometry).unwrap();
    assert_eq!(bytes[1], 1);
    assert_eq!(ShortDir::parse(&geometry, &bytes).unwrap().parent, wide);
    for (at, byte) in [(0, 0), (0, 2), (1, 0), (1, 2), (9, 0)] {
        let mut damaged = bytes.clone();
        damaged[at] = byte;
        assert!(ShortDir::parse(&geometry, &damaged).is_err() || at == 9);
    }
}

#[test]
fn a_short_directory_reuses_gaps_when_its_block_would_be_full() {
    let geometry = numbers_only(9, 0, V5);
    let names = names(40, 8);
    let mut short = ShortDir { parent: Ino(128), entries: Vec::new() };
    let mut all = names.iter().map(|name| entry(name.as_bytes(), 131));
    let refused = all.find(|entry| !short.insert(&geometry, *entry)).unwrap();
    let gone = short.remove(short.entries[2].name).unwrap();
    assert!(short.insert(&geometry, refused));
    let bytes = short.encode(&geometry).unwrap();
    let view = ShortDirView::new(&geometry, &bytes).unwrap();
    assert_eq!(view.find(refused.name).unwrap().offset, gone.offset);
    assert!(view.entries().eq(short.entries.iter().copied()));
    let again = ShortDir::parse(&geometry, &bytes).unwrap();
    let block = block::from_short(&geometry, &EXPECTED, &again).unwrap();
    let block = DirBlock::view(&geometry, &block).unwrap();
    assert_eq!(block::to_short(&geometry, &block).unwrap().encode(&geometry).unwrap(), bytes);
}
