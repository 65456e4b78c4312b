//! Damage to blocks of directories.

use offshoot_xfs_format::Lsn;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::short::ShortDir;

use crate::bodies::names::{change_blindly, walk};
use crate::volume;
use crate::volume::MadeVolume;
use crate::{SHAPES, contents};

#[test]
fn every_damage_to_a_block_is_found_or_harmless() {
    if !volume::has_judges() {
        return;
    }
    for options in [SHAPES[1], SHAPES[5], SHAPES[6]] {
        let volume = MadeVolume::make(options, &contents());
        let geometry = &volume.geometry;
        let mut blocks = Vec::new();
        for name in ["/block", "/leaf", "/node"] {
            let mut all = volume.directory_blocks(&volume.file(name));
            all.dedup_by_key(|(_, bytes)| DaKind::of_directory(geometry, bytes));
            blocks.extend(all);
        }
        for (expected, bytes) in &blocks {
            let kind = DaKind::of_directory(geometry, bytes).unwrap();
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << (at % 8);
                let found = walk(geometry, &damaged, expected);
                assert!(found.is_err() || kind.header_len(geometry) != 64, "{kind:?} at {at}");
                for byte in [0, 0xff, damaged[at]] {
                    damaged[at] = byte;
                    kind.seal(geometry, &mut damaged, Lsn(7));
                    let _ = walk(geometry, &damaged, expected);
                    change_blindly(geometry, kind, &mut damaged.clone());
                }
                assert!(walk(geometry, &bytes[..at], expected).is_err());
            }
        }
        let short = volume.file("/short").data;
        for at in 0..short.len() {
            for byte in 0..=255 {
                let mut damaged = short.clone();
                damaged[at] = byte;
                if let Ok(short) = ShortDir::parse(geometry, &damaged) {
                    assert_eq!(short.encode(geometry).unwrap(), damaged);
                }
            }
            assert!(ShortDir::parse(geometry, &short[..at]).is_err());
        }
    }
}
