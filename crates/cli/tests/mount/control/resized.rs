//! `offshoot resize` of mounted volumes.

use std::fs;

use offshoot_testkit::random::Random;

use super::super::{ServedMount, require, volume};
use super::LiveCommands;

const MIB: u64 = 1 << 20;

/// A mounted volume gets other sizes while programs use it. The kernel finds what they wrote.
#[test]
fn a_mounted_volume_gets_other_sizes() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 512);
    let image = &disks.images()[0];
    let mounted = ServedMount::new(image, "rw");
    let contents: Vec<_> = (0..20).map(|number| Random::new(number).bytes(1 << 20)).collect();
    let path = |number: usize| mounted.path().join(format!("file-{number}"));
    let write = |numbers: std::ops::Range<usize>| {
        for number in numbers {
            fs::write(path(number), &contents[number]).expect("a file");
        }
    };
    write(0..8);
    mounted.does("subvolume snapshot -r @ @/before");
    let said = mounted.does("resize @ 800M");
    assert!(said.starts_with("device 1 has 800 MiB, and had 512 MiB"), "{said}");
    assert_eq!(fs::metadata(image).expect("an image").len(), 800 * MIB);
    write(8..16);
    let (code, out, said) = mounted.run("resize @ 300M");
    assert_eq!(code, Some(0), "{said}");
    assert!(out.starts_with("device 1 has 300 MiB"), "{out}");
    write(16..20);
    for (number, expected) in contents.iter().enumerate() {
        assert!(fs::read(path(number)).expect("a file") == *expected, "file {number}");
    }
    let said = mounted.fails("resize @ 10M", 1);
    assert!(said.contains("does not fit"), "{said}");
    mounted.unmount();
    disks.assert_checks();
    let mount = disks.mount("rw");
    for (number, expected) in contents.iter().enumerate() {
        let found = fs::read(mount.path().join(format!("file-{number}"))).expect("a file");
        assert!(found == *expected, "file {number}");
        let kept = mount.path().join(format!("before/file-{number}"));
        assert_eq!(kept.exists(), number < 8, "file {number} of the snapshot");
    }
}
