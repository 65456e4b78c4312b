//! The rights of the process that serves a mount, as the kernel reports them.

use std::collections::BTreeSet;
use std::fs;

use rustix::process::{Pid, Signal, kill_process};

use super::{ServedMount, is_done, require, unmount, volume};

/// The lines of a thread's status that show its rights.
const RIGHTS: [&str; 5] = ["CapInh:", "CapPrm:", "CapEff:", "NoNewPrivs:", "Seccomp:"];

/// The rights of all threads of the process, without repetitions.
fn rights(pid: u32) -> BTreeSet<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    // A thread may end while this reads.
    let status =
        threads.flatten().filter_map(|one| fs::read_to_string(one.path().join("status")).ok());
    let rights = |status: String| {
        let lines = status.lines().filter(|line| RIGHTS.iter().any(|name| line.starts_with(name)));
        lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
    };
    status.map(rights).collect()
}

#[test]
fn no_thread_keeps_rights() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let none = "CapInh: 0000000000000000 CapPrm: 0000000000000000 CapEff: 0000000000000000 \
                NoNewPrivs: 1 Seccomp: 2";
    let mounted = ServedMount::new(&disks.images()[0], "rw,compress=zstd");
    assert_eq!(rights(mounted.child.id()), [none.to_owned()].into());
    // Threads that start later have no more rights.
    fs::write(mounted.path().join("file"), vec![1; 10 << 20]).expect("a file");
    assert_eq!(rights(mounted.child.id()), [none.to_owned()].into());
    mounted.unmount();
}

#[test]
fn it_can_be_switched_off() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw,nosandbox");
    assert_eq!(rights(mounted.child.id()), rights(std::process::id()));
    mounted.unmount();
}

/// The process that unmounts for the server is gone. The server goes on, and another program
/// unmounts.
#[test]
fn without_its_helper() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    let pid = mounted.child.id();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let helper = children.expect("it runs").trim().parse().ok().and_then(Pid::from_raw);
    kill_process(helper.expect("one child"), Signal::KILL).expect("it runs");
    mounted.signal(Signal::TERM);
    while mounted.log().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(mounted.log().contains("asking the process that mounts"), "{}", mounted.log());
    fs::write(mounted.path().join("file"), "contents").expect("it serves on");
    let args = [mounted.path().as_os_str()];
    is_done(&args, &unmount(&args));
    drop(mounted);
    disks.assert_checks();
    assert!(disks.mount("ro").path().join("file").exists());
}
