//! `offshoot resize`.

use std::fs;

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::Random;
use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs::disk::XfsDisk;

use super::{check, does, fails, volume};

const MIB: u64 = 1 << 20;

/// An image gets every kind of size, and its file has it too.
#[test]
fn an_image_gets_other_sizes() {
    if judges::require().is_none() {
        return;
    }
    let dir = scratch_dir();
    let image = dir.path().join("v.img");
    let len = || fs::metadata(&image).expect("an image").len();
    fs::write(dir.path().join("kept"), Random::new(1).bytes(30 << 20)).expect("a file");
    volume(dir.path(), "v.img", 256);
    does(dir.path(), "cp kept v.img:/");
    for (size, mib) in [("512M", 512), ("+256M", 768), ("-300M", 468), ("1:300M", 300)] {
        let said = does(dir.path(), &format!("resize v.img {size}"));
        assert!(said.starts_with(&format!("device 1 has {mib} MiB, and had ")), "{said}");
        assert_eq!(len(), mib * MIB, "{size}");
        check(&image);
    }
    does(dir.path(), "resize v.img minimal");
    let least = len();
    assert!(least < 140 * MIB, "{least}");
    check(&image);
    let said = does(dir.path(), "resize v.img minimal+1M --json");
    let expected = format!(
        "{{\"device\":1,\"before\":{least},\"after\":{0},\"device_bytes\":{0}}}\n",
        least + MIB
    );
    assert_eq!(said, expected);
    // Bytes behind the volume are not part of it.
    fs::File::options()
        .write(true)
        .open(&image)
        .expect("an image")
        .set_len(400 * MIB)
        .expect("room");
    does(dir.path(), "resize v.img max");
    does(dir.path(), "cp v.img:/kept back");
    let read = |name| fs::read(dir.path().join(name)).expect("a file");
    assert!(read("kept") == read("back"), "it is something else");
    check(&image);
}

#[test]
fn what_does_not_fit_is_refused() {
    let dir = scratch_dir();
    volume(dir.path(), "v.img", 256);
    fs::write(dir.path().join("large"), Random::new(1).bytes(60 << 20)).expect("a file");
    does(dir.path(), "cp large v.img:/");
    let before = fs::metadata(dir.path().join("v.img")).expect("an image").len();
    let said = fails(dir.path(), "resize v.img 40M", 1);
    assert!(said.contains("does not fit in 41943040 bytes") && said.contains("minimal"), "{said}");
    let said = fails(dir.path(), "resize v.img 2:300M", 1);
    assert!(said.contains("device 2, which the volume does not have"), "{said}");
    for wrong in ["", "x", "1:", "minimal-1M"] {
        fails(dir.path(), &format!("resize v.img {wrong}"), 2);
    }
    assert_eq!(fs::metadata(dir.path().join("v.img")).expect("an image").len(), before);
}

/// An XFS volume grows with its image, and shrinks never.
#[test]
fn an_xfs_image_gets_larger() {
    let Some(judges) = offshoot_testkit::xfs::judges::require() else { return };
    let dir = scratch_dir();
    let image = dir.path().join("x.img");
    let len = || fs::metadata(&image).expect("an image").len();
    does(dir.path(), "mkfs --format xfs --size 400M x.img");
    does(dir.path(), "mkdir x.img:/kept");
    assert_eq!(does(dir.path(), "resize x.img +200M"), "device 1 has 600 MiB, and had 400 MiB\n");
    assert_eq!(len(), 600 * MIB);
    does(dir.path(), "resize x.img 1G");
    assert!(does(dir.path(), "ls x.img").contains("kept"));
    XfsDisk::served(&judges, &image).assert_checks();
    for (size, code) in [("900M", 4), ("minimal", 4), ("-1M", 4), ("2:2G", 1)] {
        let said = fails(dir.path(), &format!("resize x.img -- {size}"), code);
        assert!(said.contains("XFS"), "{said}");
    }
    assert_eq!(len(), 1 << 30);
}
