//! The program on a terminal, and interrupted by Ctrl-C. `script` of util-linux provides the
//! terminal.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use offshoot_testkit::btrfs::disks::assert_image_checks;
use offshoot_testkit::random::{Random, seed_of_run};
use rustix::fs::{XattrFlags, setxattr};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

fn program() -> &'static str {
    env!("CARGO_BIN_EXE_offshoot")
}

/// Runs the program, which must succeed.
#[track_caller]
fn does(args: &[&str]) -> String {
    let output = Command::new(program()).args(args).output().expect("it starts");
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).expect("it is text")
}

/// Runs a shell command on a terminal, with this locale. Returns its exit code, and what the
/// terminal got.
fn on_terminal(words: &str, locale: &str) -> (Option<i32>, String) {
    let (code, shown) = on_terminal_raw(words, locale);
    (code, String::from_utf8_lossy(&shown).into_owned())
}

fn on_terminal_raw(words: &str, locale: &str) -> (Option<i32>, Vec<u8>) {
    let mut script = Command::new("script");
    script.args(["-qec", words, "/dev/null"]).stdin(Stdio::null());
    let output = script.env("LC_ALL", locale).env("TERM", "xterm").output();
    let output = output.expect("`script` is there (Debian package bsdutils)");
    (output.status.code(), output.stdout)
}

/// A volume, with a directory of the host copied into it.
struct TerminalVolume {
    dir: TempDir,
}

impl TerminalVolume {
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
    let volume = TerminalVolume::new(|source| {
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
        // A pipe gets all of it.
        let (code, _) = on_terminal(&format!("{words} | cat > /dev/null"), "C");
        assert_eq!(code, Some(0), "{words}");
    }
}

#[test]
fn progress_says_how_far_it_is() {
    // So many files that the progress line is drawn before the end.
    let volume = TerminalVolume::new(|source| {
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
    // A slow reader gives the program time to count.
    let words = format!(
        "{} extract {} --tar - | (head -c 1000000; sleep 2; cat) > /dev/null",
        program(),
        volume.image()
    );
    let (code, shown) = on_terminal(&words, "C");
    assert_eq!(code, Some(0), "{shown:?}");
    let is_whole = |line: &str| {
        line.contains(" of 38.1")
            && line.contains("%), ")
            && line.contains(" files, ")
            && line.contains(" left")
    };
    assert!(shown.split('\r').any(is_whole), "{shown:?}");
    // Without a terminal, there is no progress.
    let out = volume.path("silent");
    let silent = Command::new(program()).arg("extract").arg(volume.path("v.img")).arg(out).output();
    assert!(silent.is_ok_and(|output| output.status.success() && output.stderr.is_empty()));
}

/// Starts an extraction, and sends Ctrl-C as soon as `out` has something in it.
fn interrupted(volume: &TerminalVolume, out: &Path) -> Output {
    let mut command = Command::new(program());
    command.arg("extract").arg(volume.path("v.img")).arg(out);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    let signal = |signal| kill_process(pid, signal).expect("it runs");
    while fs::read_dir(out).map_or(0, Iterator::count) < 3 {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The program is stopped until it has the signal.
    signal(Signal::STOP);
    signal(Signal::INT);
    signal(Signal::CONT);
    child.wait_with_output().expect("a child")
}

#[test]
fn an_extraction_goes_on_after_ctrl_c() {
    const FILES: usize = 6_000;
    let volume = TerminalVolume::new(|source| {
        for n in 0..FILES {
            fs::write(source.join(format!("file-{n:05}")), format!("contents {n}"))
                .expect("a file");
        }
        fs::hard_link(source.join("file-00000"), source.join("zz-link")).expect("a link");
        fs::create_dir(source.join("other")).expect("a directory");
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
    // All of these files are complete, and other users may not read them yet.
    for (name, _) in &left {
        let theirs = fs::read(volume.path("source").join(name)).expect("it is there");
        assert!(fs::read(out.join(name)).expect("it is there") == theirs, "{name:?}");
    }
    assert_eq!(out.metadata().expect("it is there").mode() & 0o777, 0o700);
    // Extracting another place is not resumed here.
    let other = format!("{}:/other", volume.image());
    let refused = Command::new(program())
        .args(["extract".as_ref(), OsStr::new(&other), out.as_os_str()])
        .output()
        .expect("it starts");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("half done"), "{refused:?}");
    // A file that was cut short is made anew.
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
    // Now the extraction is complete. Once more, `out` is just a directory that is not empty.
    let image = volume.path("v.img");
    let words = [OsStr::new("extract"), image.as_os_str(), out.as_os_str()];
    let refused = Command::new(program()).args(words).output().expect("it starts");
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
}

/// Sends Ctrl-C when a verb has opened the volume for writing: by then it handles signals.
///
/// A verb that writes more output than a pipe holds waits there until it is interrupted. A verb
/// that has nothing more to change the second time may end before we look. Then this starts it
/// again.
fn interrupted_when_open(volume: &TerminalVolume, mut start: impl FnMut() -> Child) -> Output {
    const TRIES: usize = 100;
    let interrupted = (0..TRIES).find_map(|_| interrupted_if_open(volume, start()));
    interrupted.unwrap_or_else(|| panic!("it ended before, {TRIES} times"))
}

/// The same for one run; `None` when the run ended before.
fn interrupted_if_open(volume: &TerminalVolume, mut child: Child) -> Option<Output> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    let ino = fs::metadata(volume.path("v.img")).expect("an image").ino();
    let is_open = || {
        let locks = fs::read_to_string("/proc/locks").expect("the locks");
        locks.lines().any(|line| line.contains("FLOCK") && line.contains(&format!(":{ino} ")))
    };
    while !is_open() {
        if child.try_wait().expect("a child").is_some() {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // A verb that waits for an answer gets none, not even the end of its input.
    let input = child.stdin.take();
    kill_process(pid, Signal::INT).expect("it runs");
    let output = child.wait_with_output().expect("a child");
    drop(input);
    (!output.status.success()).then_some(output)
}

/// Verbs that change many files: what they have done is stored, and the volume is sound.
#[test]
fn a_change_that_is_interrupted_says_what_is_stored() {
    const FILES: usize = 3000;
    // The lines with the names of a third of the files are more than a pipe holds.
    let name = |n| format!("file-{n}-{}", "x".repeat(100));
    let volume = TerminalVolume::new(|source| {
        fs::create_dir(source.join("dir")).expect("a directory");
        for n in 0..FILES {
            fs::write(source.join("dir").join(name(n)), vec![7; 8192]).expect("a file");
        }
    });
    let place = |path: &str| format!("{}:{path}", volume.image());
    let starts = |args: &[&str]| {
        let mut command = Command::new(program());
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("it starts")
    };
    let count = || does(&["find", &place("/dir"), "-type", "f"]).lines().count();
    let ends = |args: &[&str]| {
        let output = interrupted_when_open(&volume, || starts(args));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {said}");
        assert!(said.contains("interrupted: "), "{args:?}: {said}");
        assert!(said.contains("is stored"), "{args:?}: {said}");
        assert_image_checks(Path::new(&volume.image()));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let same = ends(&["dedupe", &place(&format!("/dir/{}", name(0))), &place("/dir/file-1*")]);
    assert!(same.lines().count() < FILES / 3, "{same}");
    ends(&["scrub", &volume.image()]);
    assert_eq!(count(), FILES);
    ends(&["rm", "-rv", &place("/dir")]);
    let left = count();
    assert!(left > 0, "all are gone");
    ends(&["find", &place("/dir"), "-print", "-delete"]);
    assert!(count() > 0 && count() <= left, "{} of {left}", count());
    // `rm -ri` waits for an answer.
    let left = count();
    ends(&["rm", "-ri", &place("/dir")]);
    assert_eq!(count(), left);
}

/// What was done is stored, even if the reader of the output is gone.
#[test]
fn changes_are_stored_when_nobody_reads_of_them() {
    const FILES: usize = 3000;
    let volume = TerminalVolume::new(|source| {
        for dir in ["a", "b"] {
            fs::create_dir(source.join(dir)).expect("a directory");
        }
        for n in 0..FILES {
            fs::write(source.join(format!("a/file-{n}-{}", "x".repeat(60))), "").expect("a file");
        }
    });
    let place = |path: &str| format!("{}:{path}", volume.image());
    let count = |dir: &str| does(&["find", &place(dir), "-type", "f"]).lines().count();
    let unread = |args: &[&str]| {
        let mut command = Command::new(program());
        command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("a child");
        // A reader that closes its pipe has had enough, so this is not an error.
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
    };
    unread(&["mv", "-v", &place("/a/file-1*"), &place("/b")]);
    let moved = count("/b");
    assert!(moved > 0, "nothing was moved");
    assert_eq!(count("/a"), FILES - moved);
    unread(&["find", &place("/a"), "-name", "file*", "-delete", "-print"]);
    let left = count("/a");
    assert!(left > 0 && left < FILES - moved, "{left} are left");
    unread(&["rm", "-rv", &place("/a")]);
    assert!(count("/") < left + moved);
    assert_image_checks(Path::new(&volume.image()));
}

/// A match that is gone does not keep back the other matches.
#[test]
fn find_goes_on_after_a_match_that_cannot_be_looked_at() {
    let volume = TerminalVolume::new(|source| {
        for dir in ["one", "other"] {
            fs::create_dir(source.join(dir)).expect("a directory");
            fs::write(source.join(dir).join("x"), "").expect("a file");
        }
        for (link, to) in [("l1", "one"), ("l2", "one"), ("l3", "other")] {
            symlink(to, source.join(link)).expect("a link");
        }
    });
    let place = format!("{}:/l*/x", volume.image());
    let output = Command::new(program()).args(["find", &place, "-delete", "-print"]).output();
    let output = output.expect("it starts");
    let told = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("/l2/x: ") && said.lines().count() == 1, "{said}");
    assert!(told.contains("/l1/x\n") && told.contains("/l3/x\n"), "{told}");
    assert_eq!(does(&["find", &format!("{}:/", volume.image()), "-name", "x"]), "");
}

#[test]
fn a_copy_that_is_interrupted_says_what_is_stored() {
    let volume = TerminalVolume::new(|source| {
        fs::write(source.join("first"), "first").expect("a file");
    });
    let source = volume.path("more");
    fs::create_dir(&source).expect("a directory");
    for n in 0..4000 {
        fs::write(source.join(format!("file-{n}")), "x").expect("a file");
    }
    let mut command = Command::new(program());
    command.args(["cp", "-rv"]).arg(&source).arg(format!("{}:/more", volume.image()));
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = interrupted_when_open(&volume, || command.spawn().expect("it starts"));
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

/// Shells accept the completion scripts, and `man` accepts the pages. The program makes both from
/// the definitions that it parses with.
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
        // A shell that is not installed is no judge.
        if let Ok(output) = known {
            assert!(output.status.success(), "{shell}: {output:?}");
        }
    }
    // What bash offers for the beginning of a verb.
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

/// Parts of names that control a terminal.
const DANGEROUS: [&[u8]; 14] = [
    b"\x1b[2J",
    b"\x1b]0;title\x07",
    b"\nNEWLINE",
    b"\r",
    b"\tTAB",
    b"\x08\x08",
    b"\x7f",
    b"\x9b31m",
    b"\xc2\x9b31m",
    b"\xff\xfe",
    "\u{202e}".as_bytes(),
    "\u{2066}".as_bytes(),
    "\u{200b}".as_bytes(),
    b"\x0e\x0f",
];

fn dangerous_name(random: &mut Random) -> Vec<u8> {
    let mut name = b"n".to_vec();
    for _ in 0..=random.below(3) {
        name.extend(DANGEROUS[usize::try_from(random.below(14)).expect("small")]);
        name.extend(random.number().to_string().as_bytes());
    }
    name
}

/// The first thing in `shown` that controls a terminal, except the ends of lines.
fn acted_upon(shown: &[u8]) -> Option<String> {
    // Some lines end with a NUL, and columns are separated by tabs.
    let is_dangerous = |c: char| {
        (c.is_control() && !matches!(c, '\n' | '\r' | '\0' | '\t'))
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    // A terminal's lines end with a carriage return and a newline.
    let is_end = |at: usize| shown.get(at + 1).is_none_or(|&byte| byte == b'\n');
    if shown.iter().enumerate().any(|(at, &byte)| byte == b'\r' && !is_end(at)) {
        return Some("a carriage return".to_owned());
    }
    if [&b"\nNEWLINE"[..], b"\tTAB"].iter().any(|raw| shown.windows(raw.len()).any(|w| w == *raw)) {
        return Some("a name on two lines, or with a tab".to_owned());
    }
    shown.utf8_chunks().find_map(|chunk| {
        let bad = chunk.valid().chars().find(|&c| is_dangerous(c)).map(|c| format!("{c:?}"));
        bad.or((!chunk.invalid().is_empty()).then(|| format!("{:?}", chunk.invalid())))
    })
}

/// Every verb that shows names, with names that contain control sequences.
#[test]
#[expect(clippy::too_many_lines, reason = "one line for each verb")]
fn no_name_speaks_to_the_terminal() {
    let mut random = Random::new(seed_of_run());
    let evil = |random: &mut Random| OsString::from_vec(dangerous_name(random));
    let volume = TerminalVolume::new(|source| {
        fs::create_dir(source.join("etc")).expect("a directory");
        let (user, group) = (dangerous_name(&mut random), dangerous_name(&mut random));
        let entry = |name: &[u8], rest: &str| {
            let name: Vec<u8> = name.iter().copied().filter(|b| !b"\n:".contains(b)).collect();
            [&name[..], rest.as_bytes()].concat()
        };
        fs::write(source.join("etc/passwd"), entry(&user, ":x:1234:4321::/:/bin/sh\n"))
            .expect("a file");
        fs::write(source.join("etc/group"), entry(&group, ":x:4321:\n")).expect("a file");
        for _ in 0..6 {
            let directory = source.join(evil(&mut random));
            fs::create_dir(&directory).expect("a directory");
            for _ in 0..3 {
                let file = directory.join(evil(&mut random));
                fs::write(&file, "text").expect("a file");
                chown(&file, Some(1234), Some(4321)).expect("we are root");
                symlink(evil(&mut random), directory.join(evil(&mut random))).expect("a link");
                let name = [b"user.", &dangerous_name(&mut random)[..]].concat();
                let value = dangerous_name(&mut random);
                setxattr(&file, &name[..], &value, XattrFlags::empty()).expect("an attribute");
            }
            symlink(evil(&mut random), source.join(evil(&mut random))).expect("a link");
        }
    });
    let place = format!("{}:/", volume.image());
    let with_name = |words: &[&str], name: OsString| {
        let mut command = Command::new(program());
        let mut place = OsString::from(&place);
        place.push(name);
        let output = command.args(words).arg(place).output().expect("it starts");
        assert!(output.status.success(), "{words:?}: {output:?}");
    };
    for _ in 0..3 {
        with_name(&["subvolume", "create"], evil(&mut random));
    }
    let image = volume.image();
    let out = volume.path("out");
    let other = volume.path("other.img");
    let (out, other) = (out.to_str().expect("text"), other.to_str().expect("text"));
    does(&["mkfs", other, "--size", "512M", "-L", "a\u{1b}[2J\u{9b}label"]);
    // Lines with a `!` in front may fail: links lead nowhere, and directories are not empty.
    let lines = [
        "ls --color=never -laR @".to_owned(),
        "ls --color=never -R @".into(),
        "ls --color=never -1 @".into(),
        "ls --color=never --zero @".into(),
        "ls --json -R @".into(),
        "ls --color=never -ld '@n*'".into(),
        "stat '@n*'".into(),
        "stat --json '@n*'".into(),
        "stat -c '%n %N %U %G' '@n*/n*'".into(),
        "stat --printf '%-30n %N %U %G\\n' '@n*/n*'".into(),
        "find @".into(),
        "find @ -print0".into(),
        "du -a @".into(),
        "du --shares @".into(),
        "du -a0 @".into(),
        "df @".into(),
        format!("df {other}"),
        format!("info {other}"),
        "tree -a @".into(),
        "tree --json @".into(),
        "lsattr -R @".into(),
        "! getfattr -d '@n*/n*'".into(),
        "! getfattr '@n*/n*'".into(),
        "! getfattr -d -e text -m - '@n*/n*'".into(),
        "! getfattr --only-values '@n*/n*'".into(),
        "! getfattr --json '@n*/n*'".into(),
        "! property get '@n*'".into(),
        format!("subvolume list {image}"),
        format!("subvolume list --json {image}"),
        format!("dump tree {image} 5"),
        format!("dump super {other}"),
        "! cat '@n*'".into(),
        "! cat '@n*/n*/none'".into(),
        format!("extract @ {out}-1"),
        format!("cp -rv @ {out}-2"),
        format!("cp -rv @. {other}:/"),
        "! chmod -R u+w '@n*'".into(),
        "! chmod u+w '@n*/none*'".into(),
        "! rmdir '@n*'".into(),
        "! mkdir '@n*'".into(),
        "mkdir @into".into(),
        "mv -v '@n*' @into".into(),
        "! ln '@into/n*/n*' @into".into(),
        "! dedupe @etc/passwd '@into/n*/n*'".into(),
        "! rm -rv '@into/n*'".into(),
    ];
    // Without a terminal, formats print the raw bytes.
    let words = ["stat", "-c", "%n", &format!("{place}n*")];
    let raw = Command::new(program()).args(words).output().expect("it starts").stdout;
    assert!(acted_upon(&raw).is_some(), "{raw:?}");
    for line in lines {
        let expected = i32::from(line.starts_with('!'));
        let line = line.trim_start_matches("! ").replace('@', &place);
        // Progress would also be drawn on the terminal, so its output goes to a file.
        let (code, shown) =
            on_terminal_raw(&format!("{} {line} 2>{out}.err", program()), "C.UTF-8");
        assert_eq!(code, Some(expected), "{line}: {}", String::from_utf8_lossy(&shown));
        if let Some(bad) = acted_upon(&shown) {
            let bad_line = shown.split(|&b| b == b'\n').find(|line| acted_upon(line).is_some());
            let bad_line = String::from_utf8_lossy(bad_line.unwrap_or_default());
            panic!("{line}: {bad}\n{bad_line:?}");
        }
        let said = fs::read(format!("{out}.err")).expect("it was written");
        let said = [said.split(|&b| b == b'\r').next_back().unwrap_or_default(), b""].concat();
        assert_eq!(acted_upon(&said), None, "{line}: {:?}", String::from_utf8_lossy(&said));
        let errors = String::from_utf8_lossy(&said).contains("Usage:");
        assert!(!errors, "{line}: {}", String::from_utf8_lossy(&said));
    }
}
