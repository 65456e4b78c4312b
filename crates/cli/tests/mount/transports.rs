//! The transport of a mount when no option names one.

use std::fs;
use std::process::{Command, Stdio};

use offshoot_testkit::io_uring::{self, SwitchedOn};
use offshoot_testkit::scratch_dir;

use super::{ServedMount, command, require, volume};

/// Mounts a volume with the program that `command` starts, and requires that it serves over
/// `transport`.
#[track_caller]
fn is_served(command: Command, transport: &'static str) {
    let Some(judges) = require() else { return };
    if let Err(reason) = io_uring::can_be_had() {
        offshoot_testkit::btrfs::judges::skip(&reason);
        return;
    }
    let switched = SwitchedOn::new().expect("the switch can be turned");
    let disks = volume(&judges, 256);
    let image = &disks.images()[0];
    let mounted =
        ServedMount::serve(command, scratch_dir(), image, "rw", transport, Some(switched));
    let file = mounted.path().join("file");
    fs::write(&file, "contents").expect("a file");
    assert_eq!(fs::read(&file).expect("a file"), b"contents");
    let log = fs::read_to_string(&mounted.log).expect("a log");
    mounted.unmount();
    // The log says why it is not the better transport.
    assert_eq!(log.contains("RLIMIT_NOFILE"), transport == "/dev/fuse", "{log}");
}

#[test]
fn over_io_uring_where_the_kernel_offers_it() {
    is_served(command(), "io_uring");
}

/// Each thread of io_uring takes a descriptor, and there are at least eight of them for each CPU.
#[test]
fn over_the_device_where_there_are_too_few_descriptors() {
    let mut few = Command::new("sh");
    few.args(["-c", "ulimit -n 100 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_offshoot")]);
    few.stdin(Stdio::null());
    is_served(few, "/dev/fuse");
}
