//! The programs in `examples/`: they run, and a stranger can build them.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use offshoot::Volume;

const EXAMPLES: [&str; 5] = [
    "open_and_list",
    "build_and_snapshot",
    "edit_in_place",
    "read_with_four_threads",
    "recover_after_a_crash",
];

/// Runs an example that `cargo test` has built, and returns what it printed.
fn run(name: &str, args: &[&OsStr]) -> String {
    // The directory of this test is beside that of the examples.
    let test = env::current_exe().expect("the test has a path");
    let target = test.ancestors().nth(2).expect("it is in target/debug/deps");
    let program = target.join("examples").join(name);
    let output = Command::new(&program).args(args).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it prints text")
}

#[test]
fn the_examples_build_edit_list_and_read_a_volume() {
    let dir = tempfile::tempdir().expect("a directory is made");
    let (source, image) = (dir.path().join("source"), dir.path().join("new.img"));
    fs::create_dir_all(source.join("etc")).expect("a directory is made");
    fs::write(source.join("etc/hosts"), "127.0.0.1 localhost\n").expect("a file is made");
    std::os::unix::fs::symlink("hosts", source.join("etc/link")).expect("a link is made");
    let image = image.as_os_str();
    run("build_and_snapshot", &[image, source.as_os_str()]);
    run("edit_in_place", &[image, "/current/etc/hosts".as_ref(), "10.0.0.1 home".as_ref()]);

    let listed = run("open_and_list", &[image, "/current/etc".as_ref()]);
    let lines: Vec<&str> = listed.lines().collect();
    assert_eq!(lines, ["120777            5 link", "100644           34 hosts"]);
    assert_eq!(run("read_with_four_threads", &[image]), "2 files, 54 bytes\n");

    let volume = Volume::open(image).expect("it opens");
    let read = |path: &str| volume.read(path).expect("the file is there");
    assert_eq!(read("/current/etc/link"), b"127.0.0.1 localhost\n10.0.0.1 home\n");
    assert_eq!(read("/first/etc/hosts"), b"127.0.0.1 localhost\n");
}

#[test]
fn the_example_recovers_from_every_power_cut() {
    let printed = run("recover_after_a_crash", &[]);
    let mut numbers = printed.split(|c: char| !c.is_ascii_digit()).filter(|text| !text.is_empty());
    let mut number = || numbers.next().and_then(|text| text.parse::<u32>().ok()).unwrap_or(0);
    let (opened, promised) = (number(), number());
    assert!(promised > 10 && opened > promised, "{printed}");
}

/// A package outside of the workspace that depends on the crate by its path.
#[test]
fn a_stranger_can_build_the_examples() {
    let dir = tempfile::tempdir().expect("a directory is made");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = here.ancestors().nth(2).expect("the crate is in crates/");
    let manifest = format!(
        "[package]\nname = \"stranger\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\noffshoot = {{ path = {:?} }}\n\n[workspace]\n\n\
         [profile.dev]\nopt-level = 0\ndebug = false\nincremental = false\n",
        here.display().to_string()
    );
    let programs = dir.path().join("src/bin");
    fs::create_dir_all(&programs).expect("a directory is made");
    fs::write(dir.path().join("Cargo.toml"), manifest).expect("the manifest is written");
    // The versions that this machine has.
    let copy = |from: PathBuf, to: PathBuf| fs::copy(from, to).expect("a file is copied");
    copy(root.join("Cargo.lock"), dir.path().join("Cargo.lock"));
    for name in EXAMPLES {
        let file = format!("{name}.rs");
        copy(here.join("examples").join(&file), programs.join(&file));
    }
    // Kept, so that the crates are compiled once.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stranger");
    let cargo = |args: &[&str]| {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(args).args(["--offline", "--quiet"]).current_dir(dir.path());
        let output = cargo.env("CARGO_TARGET_DIR", &target).output().expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    cargo(&["build"]);
    for name in EXAMPLES {
        assert!(target.join("debug").join(name).is_file(), "{name}");
    }
    cargo(&["clean", "--package", "stranger"]);
}
