//! The sessions of `docs/mount.md`: the program must print what the page shows.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::scratch_dir;

/// The lines of all `sh` blocks. A command begins with `$ `, and its output follows.
fn sessions(page: &str) -> Vec<&str> {
    let (mut lines, mut is_session) = (Vec::new(), false);
    for line in page.lines() {
        match line.strip_prefix("```") {
            Some(kind) => is_session = kind == "sh",
            None if is_session => lines.push(line),
            None => {}
        }
    }
    lines
}

/// A script that runs the commands of a session and shows each before its output.
fn script(session: &[&str]) -> String {
    let mut script = "exec 2>&1\n".to_owned();
    for command in session.iter().filter_map(|line| line.strip_prefix("$ ")) {
        let quoted = command.replace('\'', r"'\''");
        writeln!(script, "printf '%s\\n' '$ {quoted}'\n{command}").expect("it is text");
    }
    script
}

/// Unmounts what a failed session has mounted.
struct SessionMounts(PathBuf);

impl Drop for SessionMounts {
    fn drop(&mut self) {
        for name in ["home", "mnt"] {
            let unmount = Command::new("umount").arg("-l").arg(self.0.join(name)).output();
            drop(unmount);
        }
    }
}

#[test]
fn the_sessions_of_the_page_on_mounting_are_true() {
    if judges::require().is_none() {
        return;
    }
    let dir = scratch_dir();
    let _mounts = SessionMounts(dir.path().to_owned());
    let expected = sessions(include_str!("../../../docs/mount.md"));
    let program = PathBuf::from(env!("CARGO_BIN_EXE_offshoot"));
    let places = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("sh")
        .args(["-c", &script(&expected)])
        .current_dir(dir.path())
        .env("LC_ALL", "C")
        .env("PATH", format!("{}:{places}", program.parent().expect("a folder").display()))
        .stdin(Stdio::null())
        .output()
        .expect("there is a shell");
    let shown = String::from_utf8_lossy(&output.stdout);
    let mut shown = shown.lines();
    for (number, line) in expected.iter().enumerate() {
        let before = &expected[number.saturating_sub(5)..number];
        assert_eq!(shown.next(), Some(*line), "after {before:#?}");
    }
    assert_eq!(shown.next(), None, "more than the page says");
}
