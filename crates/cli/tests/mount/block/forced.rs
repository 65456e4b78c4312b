//! Ends of a mount in which the kernel gives the device up without asking for what is not stored.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offshoot_device::hold_block_device;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};

use super::super::{ServedMount, require, unmount, unmount_here};
use super::{BlockVolume, bytes_of, kind_of};

/// The helper of a mount, stopped: the serving process cannot have the device back meanwhile.
struct StoppedHelper(Pid);

impl StoppedHelper {
    fn of(mounted: &ServedMount) -> Self {
        let pid = mounted.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let helper = children.expect("it runs").trim().parse().ok().and_then(Pid::from_raw);
        let helper = Self(helper.expect("one child"));
        kill_process(helper.0, Signal::STOP).expect("it runs");
        helper
    }
}

impl Drop for StoppedHelper {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Takes the device as another program does, as soon as the kernel gives it up.
#[track_caller]
fn take(device: &Path) -> OwnedFd {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(60) {
        if let Ok(held) = hold_block_device(device) {
            return held;
        }
    }
    panic!("{} stays in use", device.display());
}

/// Waits for the server's end, which must be a failure. Returns the log.
#[track_caller]
fn ends_badly(mut mounted: ServedMount) -> String {
    let status = mounted.wait_for_end();
    let log = mounted.log();
    assert!(!status.success(), "it ends with {status}: {log}");
    log
}

/// Calls `end` while four threads write files and sync them.
fn under_load(dir: &Path, end: impl FnOnce()) {
    let is_over = AtomicBool::new(false);
    let write = |thread: u32| -> std::io::Result<()> {
        for round in 0..u32::MAX {
            if is_over.load(Ordering::SeqCst) {
                break;
            }
            let mut file = File::create(dir.join(format!("{thread}-{}", round % 20)))?;
            file.write_all(&vec![u8::try_from(thread).expect("small"); 200_000])?;
            if round % 3 == 0 {
                file.sync_all()?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // Their calls fail when the mount ends.
        let threads = [0, 1, 2, 3].map(|thread| scope.spawn(move || drop(write(thread))));
        std::thread::sleep(Duration::from_millis(300));
        end();
        is_over.store(true, Ordering::SeqCst);
        for thread in threads {
            thread.join().expect("no panic");
        }
    });
}

/// Ends the mount by force, also while files are open.
fn end_by_force(mounted: &ServedMount) {
    let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
    rustix::mount::unmount(mounted.path(), flags).expect("its end");
}

/// After a forced end, the serving process takes the device back before it stores what is left.
#[test]
fn what_nobody_took_is_stored() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    for (options, name) in [("rw", "file"), ("rw,nosandbox", "other")] {
        let mounted = volume.mount(options);
        fs::write(mounted.path().join(name), "data").expect("a file");
        mounted.signal(Signal::STOP);
        let waiting = mounted.path().join("not asked for before");
        let waiting = std::thread::spawn(move || waiting.symlink_metadata());
        std::thread::sleep(Duration::from_millis(100));
        let output = unmount(&["-f".as_ref(), mounted.path().as_os_str()]);
        waiting.join().expect("no panic").expect_err("no such file, or no such mount");
        let said = String::from_utf8_lossy(&output.stderr);
        let is_told = output.status.code() == Some(1) && said.contains("may not be stored");
        assert!(is_told && said.contains("was stopped"), "{}: {said}", output.status);
        assert_eq!(kind_of(mounted.path()), None);
        mounted.ends_well();
        assert_eq!(volume.read_by_kernel(name).as_deref(), Some("data"));
    }
    volume.assert_checks();
}

/// Another program has the device before the serving process can have it back: no byte of it
/// changes any more, and the log says what is lost.
#[test]
fn nothing_is_written_once_another_program_has_the_device() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    for _ in 0..5 {
        let mounted = volume.mount("rw");
        let helper = StoppedHelper::of(&mounted);
        let (mut held, mut before) = (None, Vec::new());
        under_load(mounted.path(), || {
            end_by_force(&mounted);
            held = Some(take(volume.device()));
            before = bytes_of(volume.device());
            std::thread::sleep(Duration::from_millis(500));
            assert!(bytes_of(volume.device()) == before, "it was written");
        });
        drop(helper);
        let log = ends_badly(mounted);
        let is_told = log.contains("what was done after the commit of generation")
            && log.contains("is lost")
            && log.contains("in use by the kernel");
        assert!(is_told, "{log}");
        std::thread::sleep(Duration::from_millis(100));
        assert!(bytes_of(volume.device()) == before, "it was written");
        drop(held);
    }
    // The volume is as after a power cut.
    let mounted = volume.mount("rw");
    fs::write(mounted.path().join("file"), "data").expect("a file");
    unmount_here(mounted.path());
    assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    volume.assert_checks();
}

/// Another program had the device, wrote a superblock, and gave the device up: what it left stays.
#[test]
fn what_another_program_wrote_stays() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    let mounted = volume.mount("rw");
    let helper = StoppedHelper::of(&mounted);
    let mut before = Vec::new();
    under_load(mounted.path(), || {
        end_by_force(&mounted);
        let held = take(volume.device());
        let other = File::options().write(true).open(volume.device()).expect("it opens");
        other.write_all_at(b"the mark of another program", 64 << 10).expect("it is written");
        drop((held, other));
        before = bytes_of(volume.device());
    });
    drop(helper);
    let log = ends_badly(mounted);
    assert!(log.contains("another program has written the device meanwhile"), "{log}");
    volume.wait_until_free();
    assert!(bytes_of(volume.device()) == before, "it was written");
}

/// An end by force under load, with no other program: everything is stored, or what was not synced
/// is lost, and the volume is whole.
#[test]
fn forced_ends_under_load_leave_a_whole_volume() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    for _ in 0..5 {
        let mut mounted = volume.mount("rw");
        under_load(mounted.path(), || end_by_force(&mounted));
        mounted.wait_for_end();
        let mounted = volume.mount("rw");
        fs::write(mounted.path().join("file"), "data").expect("a file");
        unmount_here(mounted.path());
        assert_eq!(volume.read_by_kernel("file").as_deref(), Some("data"));
    }
    volume.assert_checks();
}

/// After SIGKILL, the kernel gives the device up when no call of the process writes it any more.
#[test]
fn nothing_is_written_after_a_kill() {
    let Some(judges) = require() else { return };
    let volume = BlockVolume::new(&judges);
    for _ in 0..3 {
        let mounted = volume.mount("rw");
        under_load(mounted.path(), || {
            mounted.signal(Signal::KILL);
            let held = take(volume.device());
            let before = bytes_of(volume.device());
            std::thread::sleep(Duration::from_millis(300));
            assert!(bytes_of(volume.device()) == before, "it was written");
            assert_eq!(kind_of(mounted.path()), None, "it is unmounted");
            drop(held);
        });
    }
    drop(volume.mount("rw"));
    volume.wait_until_free();
    volume.assert_checks();
}
