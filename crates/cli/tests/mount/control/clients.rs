//! Clients that are killed, and requests that are not sound.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use offshoot_testkit::random::{Random, seed_of_run};

use super::super::{ServedMount, command, require, volume};
use super::{LiveCommands, names};

/// Starts a listing that waits until its output is read.
fn listing(mounted: &ServedMount) -> Child {
    let list = ["subvolume", "list", "--json"].map(OsStr::new);
    let mut child = command()
        .args([&list[..], &[mounted.path().as_os_str()]].concat())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // With the first byte, the other process is doing the job.
    let mut first = [0];
    child.stdout.as_mut().expect("a pipe").read_exact(&mut first).expect("a byte");
    child
}

/// The CPUs that a thread may run on. `thread` is its directory in `/proc`.
fn cpus(thread: &Path) -> String {
    let status = fs::read_to_string(thread.join("status")).expect("it is there");
    let line = status.lines().find(|line| line.starts_with("Cpus_allowed:"));
    line.expect("the kernel says it").to_owned()
}

/// The same of each thread that does a verb for another process.
fn cpus_of_jobs(mounted: &ServedMount) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", mounted.child.id())).expect("it runs");
    let threads = threads.map(|thread| thread.expect("an entry").path());
    let is_job = |thread: &std::path::PathBuf| {
        fs::read_to_string(thread.join("comm")).is_ok_and(|name| name == "job\n")
    };
    threads.filter(is_job).map(|thread| cpus(&thread)).collect()
}

/// Clients that are killed leave nothing behind: all jobs that can run at a time are free again.
#[test]
fn clients_that_are_killed() {
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 512);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    // More output than pipes and jobs can hold.
    for hundred in 0..10 {
        let all = (0..100).map(|number| format!("@/s{hundred}{number:02}"));
        mounted.does(&format!("subvolume create {}", all.collect::<Vec<_>>().join(" ")));
    }
    for _ in 0..3 {
        let mut clients: Vec<_> = (0..6).map(|_| listing(&mounted)).collect();
        // One more client waits in the queue.
        let mut late = command()
            .args([
                "subvolume".as_ref(),
                "create".as_ref(),
                mounted.path().join("late").as_os_str(),
            ])
            .spawn()
            .expect("the program starts");
        std::thread::sleep(Duration::from_millis(200));
        assert!(!mounted.path().join("late").exists(), "it is done beside six others");
        assert_eq!(cpus_of_jobs(&mounted), vec![cpus(Path::new("/proc/self")); 6]);
        // They hold no lock that others need.
        fs::write(mounted.path().join("file"), "x").expect("a file");
        File::open(mounted.path()).and_then(|root| root.sync_all()).expect("a commit");
        for client in &mut clients {
            client.kill().expect("it runs");
            client.wait().expect("a child");
        }
        let mut patience = (0..300).map(|_| {
            std::thread::sleep(Duration::from_millis(100));
            late.try_wait().expect("a child")
        });
        let status = patience.find_map(|status| status);
        assert!(
            status.is_some_and(|status| status.success()),
            "it waits for a client that is gone"
        );
        mounted.does("subvolume delete @/late");
    }
    // A reader that closes its pipe ends the verb without an error.
    let mut client = listing(&mounted);
    drop(client.stdout.take());
    assert!(client.wait().is_ok_and(|status| status.success()));
    let mut client = listing(&mounted);
    let mut rest = String::from("[");
    client.stdout.take().expect("a pipe").read_to_string(&mut rest).expect("text");
    assert!(client.wait().is_ok_and(|status| status.success()));
    assert_eq!(rest.matches("\"id\"").count(), 1001);
    mounted.unmount();
    disks.assert_checks();
}

/// The request for a verb with these words and places.
fn request(words: &[&str], places: &[&str]) -> [u8; 16_000] {
    let texts = [words, places].concat().join("\0") + "\0";
    let number = |len: usize| u32::try_from(len).expect("short");
    let [count, others, len] = [words.len(), places.len(), texts.len()].map(number);
    let head = [0, 0, 1, 0o022, 0, count, others, len].map(u32::to_ne_bytes).concat();
    let mut data = [0; 16_000];
    data[..32].copy_from_slice(&head);
    data[32..][..texts.len()].copy_from_slice(texts.as_bytes());
    data
}

/// Other ioctls, and ours with random contents, are refused. The next request is served as before.
#[test]
#[expect(unsafe_code, reason = "the standard library has no ioctls")]
fn garbage() {
    use rustix::io::Errno;
    use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
    const START: Opcode = opcode::read_write::<[u8; 16_000]>(0xbf, 0x51);
    const NEXT: Opcode = opcode::read_write::<[u8; 8_000]>(0xbf, 0x52);
    const OTHER: Opcode = opcode::read_write::<[u8; 16_000]>(0xbf, 0x53);
    let Some(judges) = require() else { return };
    let disks = volume(&judges, 256);
    let mounted = ServedMount::new(&disks.images()[0], "rw");
    fs::write(mounted.path().join("file"), "x").expect("a file");
    let dir = File::open(mounted.path()).expect("a directory");
    let file = File::open(mounted.path().join("file")).expect("a file");
    // SAFETY: each number contains the length of the array that it is used with.
    let start = |on: &File, mut data| unsafe { ioctl(on, Updater::<START, _>::new(&mut data)) };
    let other = |on: &File, mut data| unsafe { ioctl(on, Updater::<OTHER, _>::new(&mut data)) };
    let next = |on: &File| {
        let mut data = [0_u8; 8_000];
        unsafe { ioctl(on, Updater::<NEXT, _>::new(&mut data)) }?;
        let number = |at: usize| u32::from_ne_bytes(*data[at..].first_chunk().expect("8,000"));
        Ok::<_, Errno>((number(0), number(4)))
    };
    let ends = || loop {
        match next(&dir).expect("a job") {
            (3, code) => return code,
            (kind, _) => assert!(kind < 3),
        }
    };
    assert_eq!(next(&dir), Err(Errno::INVAL), "there is no job");
    assert_eq!(other(&dir, [0_u8; 16_000]), Err(Errno::NOTTY));
    let sound = request(&["subvolume", "create", "x"], &["/x"]);
    assert_eq!(start(&file, sound), Err(Errno::NOTTY), "a file has no jobs");
    assert_eq!(next(&file), Err(Errno::NOTTY));
    assert_eq!(start(&dir, [0; 16_000]), Err(Errno::OPNOTSUPP), "another version");
    let mut random = Random::new(seed_of_run());
    let (mut done, mut refused) = (0, 0);
    for _ in 0..300 {
        let mut data = request(&["subvolume", "get", "x"], &["/"]);
        for _ in 0..=random.below(2) {
            let at = usize::try_from(random.below(60)).expect("little");
            data[at] = random.bytes(1)[0];
        }
        match start(&dir, data) {
            Ok(()) => {
                ends();
                done += 1;
            }
            Err(Errno::INVAL | Errno::OPNOTSUPP) => refused += 1,
            Err(errno) => panic!("{errno}"),
        }
    }
    assert!(done > 30 && refused > 30, "{done} done, {refused} refused");
    // Verbs that use files of the host, or more than the places that came with the request, are
    // refused.
    for (words, places) in [
        (&["rm", "-r", "/x"][..], &["/"][..]),
        (&["cp", "/etc/passwd", "x:/y"], &["/a", "/b"]),
        (&["subvolume", "create", "--device", "/dev/null", "x"], &["/x"]),
        (&["subvolume", "create", "x", "y"], &["/x"]),
        (&["stats", "x"], &[]),
        (&["mount", "x", "y"], &["/x"]),
        (&["--help"], &[]),
        (&[""], &[]),
    ] {
        start(&dir, request(words, places)).expect("a job");
        assert_eq!(ends(), 2, "{words:?}");
    }
    assert_eq!(names(mounted.path()), ["file"]);
    // A path cannot lead out of the volume.
    start(&dir, request(&["subvolume", "create", "x"], &["../../x"])).expect("a job");
    assert_eq!(ends(), 0);
    assert_eq!(next(&dir), Ok((3, 0)), "as often as it is asked for");
    assert_eq!(names(mounted.path()), ["file", "x"]);
    start(&dir, request(&["subvolume", "create", "x"], &["/"])).expect("a job");
    assert_eq!(ends(), 1);
    drop((dir, file));
    mounted.unmount();
    disks.assert_checks();
}
