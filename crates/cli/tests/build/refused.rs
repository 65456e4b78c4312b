//! What is refused, what ends a build, and that nothing is left then.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use rustix::process::{Pid, Signal, kill_process};

use super::{does, fails, format_name, on_both, program, words};

on_both!(
    wrong_command_lines,
    an_image_that_is_there_stays,
    hostile_archives_leave_nothing,
    a_volume_that_is_too_small,
    nothing_is_left_after_a_signal,
    an_image_that_is_replaced_keeps_its_permissions,
    a_full_disk_of_the_host_ends_a_build,
);

/// The names in a directory, hidden ones too.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).expect("a directory");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry.expect("an entry").file_name().to_string_lossy().into_owned()
    };
    let mut names: Vec<_> = entries.map(name).collect();
    names.sort();
    names
}

fn wrong_command_lines() {
    let dir = scratch_dir();
    fs::create_dir(dir.path().join("d")).expect("a directory");
    let format = format_name();
    for (line, said) in [
        ("build v.img", "--from <SOURCE>"),
        ("build v.img --from d --size minimal-1G", "minimal or minimal+SIZE"),
        ("build v.img --to /x --from d", "--to stands behind the --from"),
        ("build v.img --from d --to /a --to /b", "a source has two --to"),
        ("build v.img --from -", "with --size"),
        ("build v.img --from - --from - --size 1G", "one source, and not two"),
        ("build v.img --from d --owner x", "two numbers"),
    ] {
        let line = format!("{line} --format {format}");
        let text = fails(dir.path(), &line, 2);
        assert!(text.contains(said), "{line}: {text}");
    }
    let parsed = format!("build v.img --from d --subvolume ro:/ --format {format}");
    assert!(fails(dir.path(), &parsed, 2).contains("no path of a subvolume"));
    let foreign = if format == "xfs" { "--compress zstd" } else { "--inode-size 1K" };
    fails(dir.path(), &format!("build v.img --from d --format {format} {foreign}"), 2);
    assert_eq!(names(dir.path()), ["d"]);
}

fn an_image_that_is_there_stays() {
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("d")).expect("a directory");
    fs::write(path("d/f"), "f").expect("a file");
    fs::write(path("v.img"), "of value").expect("a file");
    std::os::unix::fs::symlink("v.img", path("link.img")).expect("a link");
    let format = format_name();
    for image in ["v.img", "link.img"] {
        let said = fails(dir.path(), &format!("build {image} --from d --format {format}"), 1);
        assert!(said.contains("it exists already; --force replaces it"), "{said}");
    }
    fails(dir.path(), &format!("build d --from d --format {format} --force"), 1);
    fails(dir.path(), &format!("build /dev/null --from d --format {format} --force"), 1);
    // A build that fails leaves the old image, too.
    fs::write(path("bad.tar"), "bad").expect("a file");
    fails(dir.path(), &format!("build v.img --from bad.tar --format {format} --force"), 1);
    assert_eq!(fs::read_to_string(path("v.img")).expect("a file"), "of value");
    does(dir.path(), &format!("build link.img --from d --format {format} --force"));
    assert_eq!(does(dir.path(), "cat v.img:/f"), "f");
    assert!(path("link.img").is_symlink());
    // The image itself is no part of the directory that it is built from.
    does(dir.path(), &format!("build v.img --from . --format {format} --force"));
    let listed = does(dir.path(), "ls -A v.img");
    assert_eq!(listed, "bad.tar\nd\nlink.img\n");
}

fn hostile_archives_leave_nothing() {
    let dir = scratch_dir();
    let inside = dir.path().join("in");
    fs::create_dir(&inside).expect("a directory");
    fs::write(dir.path().join("outside"), "outside").expect("a file");
    let tar = |name: &str, words: &str| {
        let line = format!("-C in -P -cf {name} {words}");
        let args: Vec<_> = line.split(' ').map(std::ffi::OsStr::new).collect();
        let done =
            offshoot_testkit::run::command("tar").args(args).current_dir(dir.path()).status();
        assert!(done.expect("tar starts").success(), "{line}");
    };
    tar("up.tar", "../outside");
    let good = {
        fs::write(inside.join("f"), vec![b'x'; 100_000]).expect("a file");
        tar("good.tar", "f");
        fs::read(dir.path().join("good.tar")).expect("an archive")
    };
    fs::write(dir.path().join("cut.tar"), &good[..50_000]).expect("a file");
    let mut flipped = good;
    flipped[0] ^= 1;
    fs::write(dir.path().join("flipped.tar"), flipped).expect("a file");
    fs::write(dir.path().join("text.tar"), "no archive\n".repeat(1000)).expect("a file");
    fs::write(dir.path().join("zip.tar"), b"PK\x03\x04").expect("a file");
    let before = names(dir.path());
    for (archive, said) in [
        ("up.tar", "up.tar: ../outside: the name ../outside leads upwards with `..`"),
        ("cut.tar", "cut.tar: it ends before it should: it is cut off"),
        ("flipped.tar", "flipped.tar: it is no tar archive"),
        ("text.tar", "text.tar: it is no tar archive"),
        ("zip.tar", "zip.tar: it is a zip archive, and not a tar archive"),
        ("missing.tar", "missing.tar: "),
        ("oci:missing", "missing: it is damaged: index.json is missing"),
    ] {
        let line = format!("build v.img --from {archive} --format {}", format_name());
        let text = fails(dir.path(), &line, 1);
        assert!(text.contains(said), "{archive}: {text}");
        assert_eq!(names(dir.path()), before, "{archive}");
    }
}

fn a_volume_that_is_too_small() {
    let dir = scratch_dir();
    let size = if format_name() == "xfs" { "300M" } else { "128M" };
    let file = fs::File::create(dir.path().join("large")).expect("a file");
    let mut noise = 1_u64;
    let mut out = std::io::BufWriter::new(file);
    for _ in 0..(400 << 20) / 8 {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        out.write_all(&noise.to_le_bytes()).expect("a write");
    }
    out.flush().expect("a write");
    run(
        "tar",
        &[
            "-C".as_ref(),
            dir.path().as_os_str(),
            "-cf".as_ref(),
            dir.path().join("a.tar").as_os_str(),
            "large".as_ref(),
        ],
    );
    let line = format!("build v.img --from a.tar --size {size} --format {}", format_name());
    let said = fails(dir.path(), &line, 1);
    assert!(said.contains("No space left on device"), "{said}");
    assert_eq!(names(dir.path()), ["a.tar", "large"]);
}

/// The header of an archive with one file of 1 GiB.
fn large_header() -> Vec<u8> {
    let mut header = vec![0; 512];
    header[..5].copy_from_slice(b"large");
    header[100..107].copy_from_slice(b"0000644");
    header[124..135].copy_from_slice(b"07777777777");
    header[148..156].fill(b' ');
    header[156] = b'0';
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    header
}

/// The first signal ends a build in order, also one that waits for its pipe. The second ends it at
/// once.
fn nothing_is_left_after_a_signal() {
    for (signals, goes_on) in [
        (&[Signal::INT][..], true),
        (&[Signal::TERM], false),
        (&[Signal::HUP], false),
        (&[Signal::INT, Signal::INT], false),
    ] {
        let dir = scratch_dir();
        let line = format!("build v.img --from - --size 2G --format {}", format_name());
        let mut command = program(dir.path());
        command.args(words(&line)).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(&large_header()).expect("it reads");
        let is_begun = || names(dir.path()).iter().any(|name| name.starts_with(".offshoot-build-"));
        let piece = vec![b'x'; 1 << 20];
        while !is_begun() {
            std::thread::sleep(Duration::from_millis(5));
        }
        input.write_all(&piece).expect("it reads");
        for &signal in signals {
            kill_process(pid, signal).expect("it runs");
        }
        while goes_on && input.write_all(&piece).is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let output = child.wait_with_output().expect("it ends");
        drop(input);
        let said = String::from_utf8_lossy(&output.stderr);
        // Two signals of one number may become one.
        if output.status.code().is_some() || signals.len() == 1 {
            assert_eq!(output.status.code(), Some(1), "{signals:?}: {said}");
            assert!(said.contains("interrupted: v.img was not made"), "{signals:?}: {said}");
        }
        assert_eq!(names(dir.path()), Vec::<String>::new(), "{signals:?}: {said}");
    }
}

fn an_image_that_is_replaced_keeps_its_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let dir = scratch_dir();
    fs::create_dir(dir.path().join("d")).expect("a directory");
    let image = dir.path().join("v.img");
    let mode = || fs::metadata(&image).expect("an image").permissions().mode() & 0o7777;
    let line = format!("build v.img --from d --format {} --force", format_name());
    does(dir.path(), &line);
    let usual = mode();
    for kept in [0o600, 0o666] {
        fs::set_permissions(&image, fs::Permissions::from_mode(kept)).expect("a mode");
        does(dir.path(), &line);
        assert_eq!(mode(), kept);
    }
    fs::remove_file(&image).expect("it goes");
    does(dir.path(), &line);
    assert_eq!(mode(), usual);
}

/// A larger volume does not help against a full disk, so the build is not repeated.
fn a_full_disk_of_the_host_ends_a_build() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = scratch_dir();
    let source = scratch_dir();
    fs::write(source.path().join("f"), vec![b'x'; 100 << 20]).expect("a file");
    let size = Some(c"size=64m");
    rustix::mount::mount("small", dir.path(), "tmpfs", rustix::mount::MountFlags::empty(), size)
        .expect("a tmpfs");
    let format = format_name();
    let line = format!("build v.img --from {} --format {format}", source.path().display());
    let begin = std::time::Instant::now();
    let said = fails(dir.path(), &line, 1);
    let left = names(dir.path());
    let once = begin.elapsed();
    rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::DETACH).expect("it goes");
    assert!(said.contains("No space left on device"), "{said}");
    assert_eq!(left, Vec::<String>::new());
    assert!(once < Duration::from_secs(60), "{once:?}");
}
