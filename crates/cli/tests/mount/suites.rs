//! Suites that others wrote, on a mount.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Mounted, require, volume};

/// The program of a suite, which `cargo xtask setup` puts beside what is built.
#[track_caller]
fn suite(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_BIN_EXE_offshoot")).ancestors().nth(2).expect("target");
    let program = built.join("tools/bin").join(name);
    assert!(program.exists(), "{name} is missing: `cargo xtask setup` installs it");
    program
}

/// What `pjdfstest` may use, and whom it may pretend to be.
const CONFIGURATION: &str = r#"
[features]
posix_fallocate = {}
rename_ctime = {}
stat_st_birthtime = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.01
# Directories of btrfs have one link, whatever is in them; the kernel's fail it too.
expected_failures = ["rename::updates_link_parent"]

[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"#;

#[test]
fn pjdfstest() {
    let Some(judges) = require() else { return };
    let program = suite("pjdfstest");
    let disks = volume(&judges, 512);
    let mounted = Mounted::new(&disks.images()[0], "allow_other,suid,dev");
    let configuration = disks.images()[0].with_extension("toml");
    std::fs::write(&configuration, CONFIGURATION).expect("a file");
    let dir = mounted.path().join("dir");
    std::fs::create_dir(&dir).expect("a directory");
    let output = Command::new(program)
        .args(["-c".as_ref(), configuration.as_os_str(), "-p".as_ref(), dir.as_os_str()])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}\n{said}", output.status);
    let passed = said.lines().rfind(|line| line.starts_with("Summary:")).unwrap_or_default();
    let passed = passed.split(", ").find_map(|part| part.strip_suffix(" passed"));
    let passed: u32 = passed.and_then(|number| number.parse().ok()).unwrap_or(0);
    assert!(passed >= 381, "only {passed} tests passed:\n{said}");
    mounted.unmount();
    disks.assert_checks();
}
