//! Every code is unique and documented, and errors have the right one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use offshoot::device::MemoryDevice;
use offshoot::{BlockDevice, Code, CreateOptions, OpenOptions, Volume};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the crate is in crates/")
}

#[test]
fn numbers_and_names_are_unique_and_documented() {
    let numbers: BTreeSet<u16> = Code::ALL.iter().map(|code| code.number()).collect();
    assert_eq!(numbers.len(), Code::ALL.len());
    assert!(numbers.iter().copied().eq(Code::ALL.iter().map(|code| code.number())), "in order");
    let page = fs::read_to_string(root().join("docs/errors.md")).expect("the page is there");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
    let ours = Code::ALL.iter();
    let ours = ours.map(|c| format!("| `{}` | {} | {} |", c.name(), c.number(), c.meaning()));
    assert_eq!(rows, ours.collect::<Vec<_>>(), "docs/errors.md");
}

#[test]
fn damaged_volumes_and_missing_members_have_their_codes() {
    let devices = [(); 2].map(|()| Arc::new(MemoryDevice::sparse(256 << 20)));
    let all = || devices.iter().map(|device| device.clone() as Arc<dyn BlockDevice>);
    let volume = Volume::create_on(all().collect(), &CreateOptions::new()).expect("it is made");
    volume.write("/file", vec![0xa5; 1 << 20]).expect("it is written");
    volume.sync().expect("it is durable");
    drop(volume);
    let code = |options: OpenOptions, devices| {
        options.open_devices(devices).err().expect("it does not open").code()
    };
    assert_eq!(code(OpenOptions::new(), all().take(1).collect()), Code::Incomplete);
    let degraded = OpenOptions::new().degraded(true);
    assert_eq!(code(degraded.clone().write(true), all().take(1).collect()), Code::MemberMissing);
    assert!(degraded.open_devices(all().take(1).collect()).is_ok());
    let empty = Arc::new(MemoryDevice::sparse(256 << 20));
    assert_eq!(code(OpenOptions::new(), vec![empty]), Code::NoVolume);

    // Data has one copy: one byte of it is changed.
    let mut block = vec![0; 4096];
    for device in &devices {
        for at in (1 << 20..device.size_bytes()).step_by(4096) {
            device.read_at(at, &mut block).expect("memory is read");
            if block.iter().all(|&byte| byte == 0xa5) {
                device.write_at(at, b"?").expect("memory is written");
                break;
            }
        }
    }
    let volume = OpenOptions::new().open_devices(all().collect()).expect("it opens");
    let error = volume.read("/file").expect_err("it is damaged");
    assert_eq!(error.code(), Code::Data, "{error}");
    assert!(error.to_string().starts_with("/file: corrupt data at logical address "), "{error}");
}
