//! `offshoot trim`.

use std::fs;
use std::os::unix::fs::MetadataExt;

use offshoot_device::FileDevice;
use offshoot_testkit::random::Random;
use offshoot_testkit::scratch_dir;

use super::{check, does, fails, on_both, volume};

fn an_image_takes_less_of_the_host() {
    let dir = scratch_dir();
    let image = dir.path().join("v.img");
    let allocated = || fs::metadata(&image).expect("an image").blocks() * 512;
    fs::write(dir.path().join("kept"), Random::new(1).bytes(3 << 20)).expect("a file");
    fs::write(dir.path().join("large"), Random::new(2).bytes(40 << 20)).expect("a file");
    volume(dir.path(), "v.img", 256);
    does(dir.path(), "cp kept large v.img:/");
    does(dir.path(), "rm v.img:/large");
    let before = allocated();
    let said = does(dir.path(), "trim v.img");
    assert!(said.ends_with(" MiB trimmed\n"), "{said:?}");
    assert!(before > 40 << 20 && allocated() < 10 << 20, "{before} bytes, then {}", allocated());
    let said = does(dir.path(), "trim v.img --json");
    assert!(said.starts_with("{\"bytes\":2") && said.ends_with(",\"unable\":[]}\n"), "{said:?}");
    check(&image);
    does(dir.path(), "cp v.img:/kept back");
    let read = |name| fs::read(dir.path().join(name)).expect("a file");
    assert!(read("kept") == read("back"), "it is something else");
    let _holder = FileDevice::open_writable(&image).expect("no other program has it");
    assert!(fails(dir.path(), "trim v.img", 1).contains("v.img: in use by"));
}

on_both! {
    an_image_takes_less_of_the_host,
}
