//! The same story, done by the kernel.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::run::{command, run};

use super::SnapshotStory;

/// Takes snapshots of one subvolume by `BTRFS_IOC_SNAP_CREATE_V2`, for which there is no safe
/// function here. Starting a program for each snapshot would take longer than the snapshot. So one
/// process reads the names of snapshots, and reports each one that is done.
struct Snapshotter {
    perl: Child,
    names: ChildStdin,
    done: BufReader<ChildStdout>,
}

impl Snapshotter {
    const SCRIPT: &str = r#"
        my ($root, $name) = @ARGV;
        $| = 1;
        open(my $dir, '<', $root) or die "$root: $!";
        open(my $source, '<', "$root/$name") or die "$name: $!";
        while (my $to = <STDIN>) {
            chomp($to);
            my $args = pack('q Q Q x32 a4040', fileno($source), 0, 0, $to);
            ioctl($dir, 0x50009417, $args) or die "$to: $!";
            print("$to\n");
        }"#;

    fn new(root: &Path, source: &str) -> Self {
        let mut perl = command("perl")
            .args(["-e", Self::SCRIPT])
            .arg(root)
            .arg(source)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("perl runs");
        let names = perl.stdin.take().expect("a pipe");
        let done = BufReader::new(perl.stdout.take().expect("a pipe"));
        Self { perl, names, done }
    }

    fn take(&mut self, name: &str) -> Duration {
        let (asked, mut said) = (Instant::now(), String::new());
        writeln!(self.names, "{name}").expect("perl reads");
        self.done.read_line(&mut said).expect("perl answers");
        assert_eq!(said.trim_end(), name, "a snapshot was refused");
        asked.elapsed()
    }

    fn end(mut self) {
        drop(self.names);
        assert!(self.perl.wait().expect("it was started").success());
    }
}

/// Does the story on an empty volume, deletes half of the snapshots, and prints how long that took.
pub(super) fn many(disks: &Disks, story: SnapshotStory) {
    let SnapshotStory { snapshots, files, .. } = story;
    let mount = disks.mount("rw,noatime");
    let (path, live) = (mount.path(), mount.path().join("live"));
    let btrfs = |words: &[&str], paths: &[&Path]| {
        let words = words.iter().map(AsRef::as_ref);
        run("btrfs", &words.chain(paths.iter().map(|path| path.as_os_str())).collect::<Vec<_>>());
    };
    btrfs(&["-q", "subvolume", "create"], &[&live]);
    for number in 0..files {
        File::create_new(live.join(number.to_string())).expect("a file");
    }
    let mut snapshotter = Snapshotter::new(path, "live");
    let began = Instant::now();
    let times = story.tell(
        |file, offset, bytes| {
            let file = File::options().write(true).open(live.join(file.to_string()));
            file.expect("it is there").write_all_at(bytes, offset).expect("there is room");
        },
        |number| snapshotter.take(&number.to_string()),
    );
    snapshotter.end();
    println!("kernel: {snapshots} snapshots of {files} files in {:.1?}", began.elapsed());
    times.print("kernel");
    let began = Instant::now();
    let gone: Vec<_> = (0..snapshots)
        .filter(|&number| !SnapshotStory::is_left(number))
        .map(|number| path.join(number.to_string()))
        .collect();
    for some in gone.chunks(500) {
        btrfs(&["-q", "subvolume", "delete"], &some.iter().map(AsRef::as_ref).collect::<Vec<_>>());
    }
    // The sync wakes the kernel's cleaner, which otherwise sleeps for half a minute.
    btrfs(&["filesystem", "sync"], &[path]);
    btrfs(&["-q", "subvolume", "sync"], &[path]);
    btrfs(&["filesystem", "sync"], &[path]);
    println!("kernel: half of them deleted in {:.1?}", began.elapsed());
}
