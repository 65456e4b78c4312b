//! Extractions that are killed and resumed, judged by the kernel's mount.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::fill;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::btrfs::recipe::Recipe;
use offshoot_testkit::compare::Compare;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::scratch_dir;

#[path = "shared/program.rs"]
mod program;

use program::copy_program;

const NOBODY: u32 = 65534;

fn extract(volume: &Path, out: &Path) -> Command {
    extract_with(Path::new(env!("CARGO_BIN_EXE_offshoot")), volume, out)
}

fn extract_with(program: &Path, volume: &Path, out: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("extract").arg(volume).arg(out).stdin(Stdio::null());
    command
}

fn start(mut command: Command) -> Child {
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts")
}

/// The messages, without the line about going on.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    text.lines().filter(|line| !line.contains("going on")).collect::<Vec<_>>().join("\n")
}

fn crowded(root: &Path) {
    fill::everything(root);
    fill::crowd(&fill::directory(root, "many"), 3000);
    fill::bulk(&fill::directory(root, "large"), 48);
}

#[test]
fn an_extraction_that_was_killed_goes_on_to_what_the_kernel_shows() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let disks = Recipe::new().mib(1024).fill(crowded).make(&judges);
    let empty = Disks::create(&judges, 1, 2048);
    empty.mkfs(&[]);
    let to = empty.mount("rw,noatime");
    let volume = &disks.images()[0];
    let mount = disks.mount("ro,noatime");
    let begun = Instant::now();
    let at_once = extract(volume, &to.path().join("once")).output().expect("it starts");
    let whole = u64::try_from(begun.elapsed().as_micros()).expect("a short time");
    assert!(at_once.status.success(), "{at_once:?}");
    fs::remove_dir_all(to.path().join("once")).expect("it goes");
    let mut kills = 0;
    for round in 0..6 {
        let out = to.path().join("out");
        for _ in 0..=random.below(3) {
            let mut child = start(extract(volume, &out));
            std::thread::sleep(Duration::from_micros(random.below(whole)));
            child.kill().expect("it is ours");
            let is_killed = child.wait().expect("a child").signal().is_some();
            kills += u32::from(is_killed);
            if !is_killed {
                fs::remove_dir_all(&out).expect("it goes");
            }
        }
        let output = extract(volume, &out).output().expect("it starts");
        assert_eq!(output.status.code(), at_once.status.code(), "round {round}: {output:?}");
        assert_eq!(said(&output), said(&at_once), "round {round}");
        let ours = HostFilesystem::new(&out).expect("the destination opens");
        Compare::of_copies().run(&ours, mount.path()).assert_same(fill::EVERYTHING_AT_LEAST);
        fs::remove_dir_all(&out).expect("it goes");
    }
    assert!(kills > 0, "none was killed");
}

/// A user extracts directories that their owner may not enter, list or write.
#[test]
fn a_user_goes_on_into_directories_that_are_closed() {
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    let program = copy_program(dir.path());
    let does = |args: &[&str]| {
        let output = Command::new(&program).args(args).current_dir(dir.path()).output();
        let output = output.expect("it starts");
        assert!(output.status.success(), "{args:?}: {output:?}");
    };
    // The directories hold no files, so each is complete before the file after it begins.
    for mode in [0o000, 0o100, 0o200, 0o400, 0o555] {
        let closed = path("source").join(format!("{mode:o}"));
        fs::create_dir_all(closed.join("below/again")).expect("directories");
        fs::set_permissions(closed.join("below"), fs::Permissions::from_mode(mode)).expect("ours");
        fs::set_permissions(&closed, fs::Permissions::from_mode(mode)).expect("it is ours");
    }
    fs::write(path("zz-large"), vec![7; 40 << 20]).expect("a file");
    fs::write(path("small"), "small").expect("a file");
    does(&["mkfs", "v.img", "--size", "256M"]);
    does(&["cp", "-a", "source/.", "v.img:/"]);
    for mode in ["0", "100", "200", "400", "555"] {
        does(&["cp", "small", &format!("v.img:/{mode}/below/file")]);
    }
    does(&["cp", "zz-large", "v.img:/"]);
    chown(dir.path(), Some(NOBODY), Some(NOBODY)).expect("we are root");
    fs::set_permissions(path("v.img"), fs::Permissions::from_mode(0o644)).expect("it is ours");
    let (volume, out) = (path("v.img"), path("out"));
    let as_user = |out: &Path| {
        let mut command = extract_with(&program, &volume, out);
        command.uid(NOBODY).gid(NOBODY);
        command
    };
    let at_once = as_user(&path("once")).output().expect("it starts");
    assert!(at_once.status.success(), "{at_once:?}");
    // The kernel ends it when it has written this much of the large file.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 20000; exec \"$0\" extract \"$1\" \"$2\""]);
    limited.arg(&program).arg(&volume).arg(&out).uid(NOBODY).gid(NOBODY);
    let killed = limited.output().expect("sh starts");
    assert!(killed.status.signal().is_some(), "{killed:?}");
    let resumed = as_user(&out).output().expect("it starts");
    assert!(String::from_utf8_lossy(&resumed.stderr).contains("going on"), "{resumed:?}");
    assert_eq!(resumed.status.code(), at_once.status.code(), "{resumed:?}");
    assert_eq!(said(&resumed).replace("/out", "/once"), said(&at_once));
    let ours = HostFilesystem::new(&out).expect("the destination opens");
    Compare::of_copies().run(&ours, &path("once")).assert_same(20);
    assert_eq!(out.join("0").metadata().expect("it is there").mode() & 0o777, 0);
}

/// If the volume has changed, an extraction is not resumed.
#[test]
fn an_extraction_does_not_go_on_when_the_volume_was_changed() {
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    let does = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_offshoot"))
            .args(args)
            .current_dir(dir.path())
            .output()
            .expect("it starts");
        assert!(output.status.success(), "{args:?}: {output:?}");
    };
    fs::write(path("large"), vec![7; 64 << 20]).expect("a file");
    does(&["mkfs", "v.img", "--size", "256M"]);
    does(&["cp", "large", "v.img:/"]);
    let mut limited = Command::new("sh");
    let program = env!("CARGO_BIN_EXE_offshoot");
    limited.args(["-c", "ulimit -f 20000; exec \"$0\" extract v.img out", program]);
    let killed = limited.current_dir(dir.path()).output().expect("sh starts");
    assert!(killed.status.signal().is_some(), "{killed:?}");
    let refused = || {
        let output = extract(&path("v.img"), &path("out")).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("the volume was changed, or this machine was started"), "{said}");
    };
    // After a reboot, files that were written before may be missing data, whatever their size and
    // time say.
    let mark = fs::read_to_string(path("out/.offshoot-extract")).expect("a mark");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("it is Linux");
    let before = mark.replace(boot.trim(), "0b0b0b0b-0000-0000-0000-000000000000");
    assert!(before != mark, "{mark}");
    fs::write(path("out/.offshoot-extract"), before).expect("a mark");
    refused();
    fs::write(path("out/.offshoot-extract"), mark).expect("a mark");
    does(&["mkdir", "v.img:/more"]);
    refused();
    assert!(!path("out/more").exists());
    fs::remove_dir_all(path("out")).expect("it is ours");
    does(&["extract", "v.img", "out"]);
    assert!(path("out/more").is_dir());
}
