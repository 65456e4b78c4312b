//! The program on a terminal, and when somebody presses Ctrl-C: `script` of util-linux gives it a
//! terminal.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

fn program() -> &'static str {
    env!("CARGO_BIN_EXE_offshoot")
}

/// Runs the program, which must do what it is asked for.
#[track_caller]
fn does(args: &[&str]) -> String {
    let output = Command::new(program()).args(args).output().expect("it starts");
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).expect("it is text")
}

/// Runs words of the shell on a terminal, with this locale: its code, and what the terminal got.
fn on_terminal(words: &str, locale: &str) -> (Option<i32>, String) {
    let mut script = Command::new("script");
    script.args(["-qec", words, "/dev/null"]).stdin(Stdio::null());
    let output = script.env("LC_ALL", locale).env("TERM", "xterm").output();
    let output = output.expect("`script` is there (Debian package bsdutils)");
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A volume, with a directory of the host copied into it.
struct Volume {
    dir: TempDir,
}

impl Volume {
    fn new(fill: impl FnOnce(&Path)) -> Self {
        let volume = Self { dir: tempfile::tempdir().expect("a directory") };
        fs::create_dir(volume.path("source")).expect("a directory");
        fill(&volume.path("source"));
        does(&["mkfs", &volume.image(), "--size", "512M"]);
        let source = volume.path("source/.");
        does(&["cp", "-r", source.to_str().expect("text"), &format!("{}:/", volume.image())]);
        volume
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn image(&self) -> String {
        self.path("v.img").to_str().expect("text").to_owned()
    }
}

#[test]
fn a_terminal_gets_no_binary() {
    let volume = Volume::new(|source| {
        fs::write(source.join("text"), "some text\n").expect("a file");
        fs::write(source.join("binary"), b"some \0 bytes\n").expect("a file");
    });
    let (program, image) = (program(), volume.image());
    let shown = on_terminal(&format!("{program} cat {image}:/text"), "C");
    assert_eq!(shown, (Some(0), "some text\r\n".to_owned()));
    for words in ["cat @:/binary", "cp @:/binary -", "extract @ --tar -"] {
        let words = format!("{program} {}", words.replace('@', &image));
        let (code, shown) = on_terminal(&words, "C");
        assert_eq!(code, Some(1), "{words}: {shown}");
        assert!(shown.contains("to a terminal") && !shown.contains('\0'), "{words}: {shown}");
        // A pipe takes all of it.
        let (code, _) = on_terminal(&format!("{words} | cat > /dev/null"), "C");
        assert_eq!(code, Some(0), "{words}");
    }
}

#[test]
fn progress_says_how_far_it_is() {
    // Enough that the line is drawn before it is over.
    let volume = Volume::new(|source| {
        for n in 0..400 {
            fs::write(source.join(format!("file-{n}")), vec![7; 100_000]).expect("a file");
        }
    });
    for (locale, is_ascii) in [("C", true), ("C.UTF-8", false)] {
        let out = volume.path(locale);
        let words = format!("{} extract {} {}", program(), volume.image(), out.display());
        let (code, shown) = on_terminal(&words, locale);
        assert_eq!(code, Some(0), "{shown}");
        assert!(shown.contains("extracted") && shown.contains("/s, "), "{shown:?}");
        assert_eq!(shown.is_ascii(), is_ascii, "{shown:?}");
        assert!(!out.join(".offshoot-extract").exists());
    }
    // With somebody who reads slowly there is time to count.
    let words = format!(
        "{} extract {} --tar - | (head -c 1000000; sleep 2; cat) > /dev/null",
        program(),
        volume.image()
    );
    let (_, shown) = on_terminal(&words, "C");
    let is_whole = |line: &str| {
        line.contains(" of 38.1")
            && line.contains("%), ")
            && line.contains(" files, ")
            && line.contains(" left")
    };
    assert!(shown.split('\r').any(is_whole), "{shown:?}");
    // Nobody watches a file.
    let out = volume.path("silent");
    let silent = Command::new(program()).arg("extract").arg(volume.path("v.img")).arg(out).output();
    assert!(silent.is_ok_and(|output| output.status.success() && output.stderr.is_empty()));
}

/// Starts an extraction, and presses Ctrl-C as soon as there is something in `out`.
fn interrupted(volume: &Volume, out: &Path) -> Output {
    let mut command = Command::new(program());
    command.arg("extract").arg(volume.path("v.img")).arg(out);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    let signal = |signal| kill_process(pid, signal).expect("it runs");
    while fs::read_dir(out).map_or(0, Iterator::count) < 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // It gets no further before the signal is there.
    signal(Signal::STOP);
    signal(Signal::INT);
    signal(Signal::CONT);
    child.wait_with_output().expect("a child")
}

#[test]
fn an_extraction_goes_on_after_ctrl_c() {
    const FILES: usize = 6_000;
    let volume = Volume::new(|source| {
        for n in 0..FILES {
            fs::write(source.join(format!("file-{n:05}")), format!("contents {n}"))
                .expect("a file");
        }
        fs::hard_link(source.join("file-00000"), source.join("zz-link")).expect("a link");
    });
    let out = volume.path("out");
    let output = interrupted(&volume, &out);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("interrupted: ") && said.contains("goes on where"), "{said}");
    let left: Vec<_> = fs::read_dir(&out)
        .expect("it is there")
        .map(|entry| entry.expect("an entry"))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("file-"))
        .map(|entry| (entry.file_name(), entry.metadata().expect("it is there").ino()))
        .collect();
    assert!(!left.is_empty() && left.len() < FILES, "{} of {FILES} are there", left.len());
    // All of them are whole, and nobody else may look yet.
    for (name, _) in &left {
        let theirs = fs::read(volume.path("source").join(name)).expect("it is there");
        assert!(fs::read(out.join(name)).expect("it is there") == theirs, "{name:?}");
    }
    assert_eq!(out.metadata().expect("it is there").mode() & 0o777, 0o700);
    // Another place does not go on there.
    does(&["mkdir", &format!("{}:/other", volume.image())]);
    let other = format!("{}:/other", volume.image());
    let refused = Command::new(program())
        .args(["extract".as_ref(), OsStr::new(&other), out.as_os_str()])
        .output()
        .expect("it starts");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("half done"), "{refused:?}");
    does(&["rm", "-r", &other]);
    // One that was cut is made anew.
    let (cut, _) = &left[left.len() / 2];
    let path = out.join(cut);
    fs::write(&path, "cut").expect("it can be written");
    does(&["extract", &volume.image(), out.to_str().expect("text")]);
    for (name, ino) in &left {
        if name != cut {
            assert_eq!(out.join(name).metadata().expect("it is there").ino(), *ino, "{name:?}");
        }
    }
    let diff = Command::new("diff").arg("-r").arg(volume.path("source")).arg(&out).output();
    let diff = diff.expect("diff runs");
    assert!(diff.status.success(), "{}", String::from_utf8_lossy(&diff.stdout));
    let links = |name: &str| out.join(name).metadata().expect("it is there");
    assert_eq!(links("file-00000").ino(), links("zz-link").ino());
    // It is whole now: once more it is a directory that is not empty.
    let image = volume.path("v.img");
    let words = [OsStr::new("extract"), image.as_os_str(), out.as_os_str()];
    let refused = Command::new(program()).args(words).output().expect("it starts");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
}

#[test]
fn a_copy_that_is_interrupted_says_what_is_stored() {
    let volume = Volume::new(|source| {
        fs::write(source.join("first"), "first").expect("a file");
    });
    let source = volume.path("more");
    fs::create_dir(&source).expect("a directory");
    for n in 0..4000 {
        fs::write(source.join(format!("file-{n}")), "x").expect("a file");
    }
    let mut command = Command::new(program());
    command.args(["cp", "-r"]).arg(&source).arg(format!("{}:/more", volume.image()));
    let child = command.stderr(Stdio::piped()).spawn().expect("it starts");
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    // The signals are watched for before the volume is opened for writing.
    let image = fs::File::open(volume.path("v.img")).expect("an image");
    let is_open = || {
        use rustix::fs::{FlockOperation, flock};
        let locked = flock(&image, FlockOperation::NonBlockingLockShared).is_err();
        let _ = flock(&image, FlockOperation::Unlock);
        locked
    };
    while !is_open() {
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(pid, Signal::INT).expect("it runs");
    let output = child.wait_with_output().expect("a child");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let told = said.lines().find_map(|line| line.strip_prefix("offshoot: interrupted: "));
    let lines: Vec<_> = said.lines().filter(|line| line.contains("are stored")).collect();
    assert!(told.is_some() && lines.len() == 1, "{said}");
    let count: usize = lines[0]
        .trim_start_matches("offshoot: interrupted: ")
        .split(' ')
        .next()
        .and_then(|count| count.parse().ok())
        .expect("a number");
    let listed =
        Command::new(program()).args(["ls", &format!("{}:/more", volume.image())]).output();
    let listed = String::from_utf8(listed.expect("it starts").stdout).expect("text");
    assert_eq!(listed.lines().count(), count, "{said}");
    assert!(count < 4000, "{said}");
}

/// Scripts that their shells take, and pages that `man` would show: made of the definitions that
/// the program parses with.
#[test]
fn completions_and_pages() {
    let dir = tempfile::tempdir().expect("a directory");
    for shell in ["bash", "zsh", "fish"] {
        let script = does(&["completions", shell]);
        assert!(script.contains("unmount") && script.contains("no-target-directory"), "{shell}");
        assert!(!script.contains("in-background"), "{shell}: what is hidden stays hidden");
        let path = dir.path().join(shell);
        fs::write(&path, &script).expect("a file");
        let known = Command::new(shell).arg("-n").arg(&path).output();
        // A shell that is not there judges nothing.
        if let Ok(output) = known {
            assert!(output.status.success(), "{shell}: {output:?}");
        }
    }
    // What bash offers behind a verb that was begun.
    let script = dir.path().join("bash");
    let words = format!(
        "source {}; COMP_WORDS=(offshoot unm); COMP_CWORD=1; _offshoot offshoot unm offshoot; echo \"${{COMPREPLY[@]}}\"",
        script.display()
    );
    let offered = Command::new("bash").args(["-c", &words]).output().expect("bash is there");
    assert_eq!(String::from_utf8_lossy(&offered.stdout), "unmount\n", "{offered:?}");
    let pages = dir.path().join("man");
    does(&["man", pages.to_str().expect("text")]);
    let page = |name: &str| fs::read_to_string(pages.join(name)).unwrap_or_default();
    assert!(page("offshoot.1").contains(".TH offshoot 1"));
    assert!(page("offshoot-mount.1").contains("norecovery"));
    assert!(page("offshoot-subvolume-create.1").contains(".TH"));
}
