//! Runs the first command of the README, with the program that was built with the tests.

use std::path::Path;
use std::process::{Command, Output};

use offshoot_testkit::btrfs::fixture;
use offshoot_testkit::run::{run, try_run};
use offshoot_testkit::scratch_dir;

fn xtask(words: &[&str], dir: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(words)
        .current_dir(dir)
        .output()
        .expect("the program starts")
}

#[test]
fn it_makes_a_volume_and_shows_what_is_in_it() {
    let readme = std::fs::read_to_string(fixture::repository().join("README.md"));
    let readme = readme.expect("the README reads");
    let first = readme.split("```\n").nth(1).and_then(|commands| commands.lines().next());
    let first = first.and_then(|line| line.split('#').next()).map(str::trim);
    assert_eq!(first, Some("cargo xtask demo"));

    // `cargo test --workspace` builds all programs into one directory before it runs tests.
    let program = Path::new(env!("CARGO_BIN_EXE_xtask")).with_file_name("offshoot");
    assert!(program.exists(), "{} is not there: build the workspace", program.display());
    let program = program.to_str().expect("its path is text");
    let dir = scratch_dir();
    let path = dir.path().to_str().expect("its path is text");
    // The second run finds the files of the first.
    for _ in 0..2 {
        let output = xtask(&["demo", "--program", program, "--dir", path], Path::new("/"));
        let [said, errors] = [&output.stdout, &output.stderr].map(|s| String::from_utf8_lossy(s));
        assert!(output.status.success() && errors.is_empty(), "{}: {errors}", output.status);
        for shown in [" about -> notes/about.md", " about.md", " main.rs", "demo"] {
            let is_shown = said.lines().any(|line| !line.starts_with('$') && line.ends_with(shown));
            assert!(is_shown, "{shown:?} is missing:\n{said}");
        }
    }
    let image = dir.path().join("disk.img");
    if try_run("btrfs", &["--version"]).is_ok() {
        run("btrfs", &["check".as_ref(), "--readonly".as_ref(), image.as_os_str()]);
    }
    let place = format!("{}:/home/alice/about", image.display());
    assert_eq!(run(program, &["cat", &place]), readme);
}

#[test]
fn wrong_options_are_refused() {
    let dir = scratch_dir();
    for words in [&["demo", "--dir"][..], &["demo", "--fast"], &["demo", "dir"]] {
        let output = xtask(words, dir.path());
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("demo [--program"), "{words:?}");
    }
}
