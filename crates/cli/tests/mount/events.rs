//! What the engine does while it is mounted: `-v`, `OFFSHOOT_LOG` and SIGUSR1.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use offshoot_testkit::scratch_dir;
use rustix::process::Signal;

use super::{ServedMount, command, is_done, require, unmount, volume};

impl ServedMount {
    /// Makes the file `name` durable.
    fn syncs(&self, name: &str) {
        let path = self.path().join(name);
        fs::write(&path, "contents").expect("a file");
        File::open(path).and_then(|file| file.sync_all()).expect("an fsync");
    }

    /// Unmounts it, and returns its log.
    fn ends(mut self) -> String {
        let args = [self.path().as_os_str()];
        is_done(&args, &unmount(&args));
        assert!(self.child.wait().expect("a child").success());
        self.log()
    }
}

#[test]
fn the_variable_tells_of_requests_commits_and_the_log() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mut program = command();
    program.env("OFFSHOOT_LOG", "debug,fuse::request=trace");
    let mounted = ServedMount::of(program, scratch_dir(), &disks.images()[0], "rw");
    mounted.syncs("first");
    mounted.syncs("second");
    let log = mounted.ends();
    for text in [
        "fuse::request: a request begins opcode=\"FSYNC\" node=",
        "btrfs::log: fsync subvolume=5 inode=",
        "btrfs::device: the barrier is done us=",
        "fuse::request: the request ends opcode=\"FSYNC\" node=",
        "btrfs::commit: committed generation=",
        "fuse::mount: everything is stored",
    ] {
        assert!(log.contains(text), "{text} is not in {log}");
    }
    disks.assert_checks();
}

/// The run in the background gets the option too, before the verb or behind it.
#[test]
fn the_option_reaches_the_server() {
    let Some(judges) = require() else { return };
    for words in [&["-v", "mount"][..], &["mount", "--verbose"]] {
        let disks = volume(&judges, 256);
        let (image, dir) = (&disks.images()[0], scratch_dir());
        let log = image.with_extension("log");
        let output = command()
            .args(words)
            .args(["--log".as_ref(), log.as_os_str(), image.as_os_str(), dir.path().as_os_str()])
            .output()
            .expect("the program starts");
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("btrfs::open: opened fsid="));
        fs::write(dir.path().join("file"), "contents").expect("a file");
        let args = [dir.path().as_os_str()];
        is_done(&args, &unmount(&args));
        let log = fs::read_to_string(log).expect("a log");
        assert!(log.contains(" INFO ") && log.contains("btrfs::commit: committed "), "{log}");
        assert!(!log.contains("DEBUG"), "{log}");
    }
}

/// A mount that hangs was seldom started with an option.
#[test]
fn a_signal_switches_events_on_and_off() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    mounted.syncs("before");
    assert_eq!(mounted.log(), "");
    let is_on = |mounted: &ServedMount| {
        let before = mounted.log();
        mounted.syncs("file");
        mounted.log() != before
    };
    for expected in [true, false, true] {
        mounted.signal(Signal::USR1);
        let begun = Instant::now();
        while is_on(&mounted) != expected {
            assert!(begun.elapsed() < Duration::from_secs(60), "no switch: {}", mounted.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let log = mounted.ends();
    assert!(log.contains("btrfs::log: fsync ") && log.contains("btrfs::commit: "), "{log}");
}
