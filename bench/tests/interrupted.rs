//! After an interrupted benchmark, nothing stays mounted, attached or running.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use offshoot_device::FileDevice;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::scratch_dir;
use rustix::process::{Pid, Signal, kill_process};

/// Waits until `is_so` returns true, for at most 5 minutes. On a healthy machine it takes less than
/// one.
#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < Duration::from_secs(300), "{what} never came");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The loop devices of images in `dir`.
fn loops(dir: &Path) -> Vec<String> {
    let names = fs::read_dir("/sys/block").expect("it is there").flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names
        .filter(|name| {
            let file = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"));
            file.is_ok_and(|file| Path::new(file.trim()).starts_with(dir))
        })
        .map(|name| format!("/dev/{name} "))
        .collect()
}

/// Whether something is mounted in `dir`, or from an image there.
fn is_mounted(dir: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    let places = [vec![format!(" {}/", dir.display())], loops(dir)].concat();
    places.iter().any(|place| table.contains(place))
}

fn started(line: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_offshoot-bench"));
    let command = command.args(line.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().expect("the program starts")
}

#[test]
fn nothing_stays_mounted() {
    let Some(_judges) = judges::require() else { return };
    // `cargo test --workspace` builds all programs into one directory before it runs tests.
    let program = Path::new(env!("CARGO_BIN_EXE_offshoot-bench")).with_file_name("offshoot");
    assert!(program.exists(), "{} is not there: build the workspace", program.display());
    let mount = format!("mount --offshoot {} --loads empty --files 1000000", program.display());
    for (what, signal) in [
        (format!("{mount} --sides ours-dev"), Signal::TERM),
        (format!("{mount} --sides btrfs"), Signal::INT),
        (format!("{mount} --sides null-dev"), Signal::TERM),
        ("data --groups plain --mib 256 --random-mib 16 --turns 50".to_owned(), Signal::HUP),
    ] {
        let temp = scratch_dir();
        let dir: PathBuf = temp.path().canonicalize().expect("it is there");
        let mut child = started(&format!("{what} --dir {}", dir.display()));
        wait_until("a mount", || is_mounted(&dir));
        kill_process(Pid::from_child(&child), signal).expect("it runs");
        let status = child.wait().expect("it ends");
        assert_eq!(status.code(), Some(128 + signal.as_raw()), "{what}");
        assert!(!is_mounted(&dir) && loops(&dir).is_empty(), "{what}");
        // A server in the background lets go of the image soon after.
        for image in
            ["mount.img", "data.img"].map(|name| dir.join(name)).iter().filter(|i| i.exists())
        {
            wait_until("the end of the program that has the image", || {
                FileDevice::open_writable(image).is_ok()
            });
        }
    }
}
