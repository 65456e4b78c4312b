//! The threads of a mount over `/dev/fuse`.
//!
//! The test needs root and `/dev/fuse`, as the judges do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use offshoot_fuse::{MountOptions, MountPoint, Mounter, ServeOptions, Server, Transport, Unmount};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::memory::{MemoryFilesystem, ROOT};
use offshoot_testkit::scratch_dir;
use offshoot_vfs::ReadOnlyFiles;

/// Lookups that wait until they may go on.
#[derive(Default)]
struct StuckLookups {
    count: AtomicUsize,
    may_go_on: Mutex<bool>,
    goes_on: Condvar,
}

impl StuckLookups {
    fn wait(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        let may_go_on = self.may_go_on.lock().unwrap();
        drop(self.goes_on.wait_while(may_go_on, |may| !*may).unwrap());
    }

    fn go_on(&self) {
        *self.may_go_on.lock().unwrap() = true;
        self.goes_on.notify_all();
    }
}

/// Calls that wait for long do not keep others from an answer, however many they are and even if
/// calls in quick succession kept the first threads busy before.
#[test]
fn stuck_calls_do_not_stop_others() {
    const STUCK: usize = 40;
    const TIME_TO_ANSWER: Duration = Duration::from_secs(60);

    if judges::require().is_none() {
        return;
    }
    let mut files = MemoryFilesystem::new();
    files.file(ROOT, b"file", 300, b"contents");
    let stuck = Arc::new(StuckLookups::default());
    let waiting_there = stuck.clone();
    files.on_lookup = Some(Box::new(move |name| {
        if name.starts_with(b"stuck") {
            waiting_there.wait();
        }
    }));
    let dir = scratch_dir();
    let mount = Arc::new(MountPoint::new(dir.path(), MountOptions::new("stuck", "test")));
    let files = Box::new(ReadOnlyFiles::new(Arc::new(files)));
    let server = Server::start(files, mount.clone(), ServeOptions::over(Transport::Device));
    let server = server.expect("it mounts");
    let serving = thread::spawn(move || server.wait());

    let missing = |name: String| {
        let path = dir.path().join(name);
        move || assert!(!path.exists())
    };
    let mut waiting = Vec::new();
    for first in (0..STUCK).step_by(4) {
        (0..500).for_each(|call| missing(format!("missing {first} {call}"))());
        waiting.extend((first..first + 4).map(|n| thread::spawn(missing(format!("stuck {n}")))));
    }
    let (answered, answer) = mpsc::channel();
    let path = dir.path().join("file");
    thread::spawn(move || answered.send(std::fs::read(path).ok()));
    let answer = answer.recv_timeout(TIME_TO_ANSWER);
    let are_stuck = (0..6000).any(|_| {
        thread::sleep(Duration::from_millis(10));
        stuck.count.load(Ordering::SeqCst) == STUCK
    });
    stuck.go_on();
    for thread in waiting {
        thread.join().expect("it is not there");
    }
    mount.unmount(Unmount::Lazily).expect("it unmounts");
    serving.join().expect("no panic").expect("it was served");
    assert_eq!(answer, Ok(Some(b"contents".to_vec())));
    assert!(are_stuck, "all calls reach the filesystem");
}
