//! `offshoot scrub`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_device::FileDevice;
use offshoot_testkit::random::Random;
use offshoot_testkit::scratch_dir;
use serde_json::Value;

use super::{check, does, fails, offshoot, volume, words};

/// Inverts the byte behind `sector`, 4 KiB of a file, in its only copy.
pub(super) fn damage(image: &Path, sector: &[u8]) {
    let bytes = fs::read(image).expect("an image");
    let places = bytes.chunks(4096).enumerate().filter(|(_, found)| *found == sector);
    let places: Vec<_> = places.map(|(number, _)| number as u64 * 4096).collect();
    let [place] = places[..] else { panic!("it is at {places:?}") };
    let file = fs::File::options().write(true).open(image).expect("an image");
    file.write_all_at(&[!sector[9]], place + 9).expect("it is written");
}

#[test]
fn what_is_bad_is_told_and_what_can_be_is_repaired() {
    let dir = scratch_dir();
    let image = dir.path().join("v.img");
    let noise = Random::new(1).bytes(3 << 20);
    fs::write(dir.path().join("noise"), &noise).expect("a file");
    volume(dir.path(), "v.img", 256);
    does(dir.path(), "mkdir v.img:/below");
    does(dir.path(), "cp noise v.img:/below");
    let said = does(dir.path(), "scrub v.img");
    assert!(
        said.contains(" scrubbed, no errors\n") && said.contains("\n  csum_errors: 0\n"),
        "{said}"
    );
    // A superblock is repaired from another copy of it.
    let file = fs::File::options().write(true).open(&image).expect("an image");
    file.write_all_at(b"bad", (64 << 20) + 300).expect("it is written");
    let said = fails(dir.path(), "scrub -r v.img", 3);
    assert!(
        said.contains("bad superblock, 4096 bytes") && said.contains(": not corrected"),
        "{said}"
    );
    let output = offshoot(dir.path(), &words("scrub v.img"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("warning: bad superblock"), "{said}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains(" scrubbed, all 1 errors corrected\n"), "{said}");
    assert!(does(dir.path(), "scrub v.img").contains("no errors"));
    check(&image);
    // Data with a single copy is not repaired.
    damage(&image, &noise[1 << 20..][..4096]);
    for line in ["scrub v.img", "scrub -r v.img"] {
        let said = fails(dir.path(), line, 3);
        assert!(said.contains("bad data at logical address"), "{said}");
        assert!(said.contains("it cannot be corrected\n  file /below/noise\n"), "{said}");
    }
    let output = offshoot(dir.path(), &words("scrub --json v.img"));
    assert_eq!(output.status.code(), Some(3));
    let values: Vec<Value> = serde_json::Deserializer::from_slice(&output.stdout)
        .into_iter()
        .map(|value| value.expect("JSON"))
        .collect();
    let [found, counts] = &values[..] else { panic!("{values:?}") };
    assert_eq!(found["outcome"], "uncorrectable", "{found}");
    assert_eq!(found["owners"][0]["path"], "/below/noise", "{found}");
    assert_eq!(
        (&counts["csum_errors"], &counts["left_errors"]),
        (&1.into(), &1.into()),
        "{counts}"
    );
    let _holder = FileDevice::open_writable(&image).expect("no other program has it");
    assert!(fails(dir.path(), "scrub v.img", 1).contains("v.img: in use by"));
    fails(dir.path(), "scrub -r v.img", 3);
}
