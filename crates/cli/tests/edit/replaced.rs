//! An existing file stays until the copy or link that replaces it is complete.

use std::fs;
use std::path::Path;

use offshoot_testkit::random::Random;
use offshoot_testkit::scratch_dir;

use super::scrub::damage;
use super::{check, does, fails, offshoot, on_both, program, volume, words};

/// A volume, and a directory `src` of the host with the names `h1` and `sub/h2` of one file.
fn start() -> tempfile::TempDir {
    let dir = scratch_dir();
    let path = dir.path();
    volume(path, "v.img", 128);
    fs::write(path.join("mine"), "mine").expect("a file");
    fs::create_dir_all(path.join("src/sub")).expect("a directory");
    fs::write(path.join("src/h1"), "copy").expect("a file");
    fs::hard_link(path.join("src/h1"), path.join("src/sub/h2")).expect("a hard link");
    dir
}

/// Fills a new volume with `/f`, whose first sector cannot be read, and `/sub/f`, another name of
/// it.
fn spoilt(dir: &Path, image: &str) {
    let data = Random::new(7).bytes(100_000);
    fs::write(dir.join("spoilt"), &data).expect("a file");
    does(dir, &format!("mkdir {image}:/sub"));
    does(dir, &format!("cp spoilt {image}:/f"));
    does(dir, &format!("ln {image}:/f {image}:/sub/f"));
    damage(&dir.join(image), &data[..4096]);
}

/// Runs a command line that must end with `code`, and returns its messages.
#[track_caller]
fn ends(dir: &Path, line: &str, code: i32) -> String {
    let output = offshoot(dir, &words(line));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{line}: {said}");
    said
}

#[test]
fn a_file_that_is_kept_survives_a_link_that_cannot_be_made() {
    let dir = start();
    let path = dir.path();
    does(path, "mkdir v.img:/dst");
    does(path, "subvolume create v.img:/dst/sub");
    does(path, "cp mine v.img:/dst/sub/h2");
    does(path, "touch -d 2100-01-01 v.img:/dst/sub/h2");
    ends(path, "cp -au src/h1 src/sub v.img:/dst", 0);
    assert_eq!(does(path, "cat v.img:/dst/sub/h2 v.img:/dst/h1"), "minecopy");
    // A directory that is kept, in the place of the first name, cannot get another name.
    does(path, "rm v.img:/dst/h1");
    does(path, "mkdir v.img:/dst/h1");
    does(path, "cp mine v.img:/dst/h2");
    does(path, "touch -d 2100-01-01 v.img:/dst/h1 v.img:/dst/h2");
    ends(path, "cp -au src/h1 src/sub/h2 v.img:/dst", 0);
    assert_eq!(does(path, "cat v.img:/dst/h2"), "mine");
    // A file that cannot be changed, in the place of the second name.
    does(path, "rmdir v.img:/dst/h1");
    does(path, "chattr +i v.img:/dst/h2");
    let said = fails(path, "cp -au src/h1 src/sub/h2 v.img:/dst", 1);
    assert!(said.contains("Operation not permitted"), "{said}");
    assert_eq!(does(path, "cat v.img:/dst/h1 v.img:/dst/h2"), "copymine");
    assert_eq!(does(path, "ls -A v.img:/dst"), "h1\nh2\nsub\n");
    check(&path.join("v.img"));
}

#[test]
fn ln_costs_nothing_when_it_fails() {
    let dir = start();
    let path = dir.path();
    does(path, "subvolume create v.img:/sub");
    does(path, "cp mine v.img:/sub/x");
    does(path, "cp src/h1 v.img:/a");
    let said = fails(path, "ln -f v.img:/a v.img:/sub/x", 1);
    assert!(said.contains("different subvolumes"), "{said}");
    let long = "x".repeat(5000);
    fails(path, &format!("ln -sf {long} v.img:/sub/x"), 1);
    does(path, "chattr +i v.img:/sub/x");
    fails(path, "ln -sf a v.img:/sub/x", 1);
    assert_eq!(does(path, "cat v.img:/sub/x"), "mine");
    assert_eq!(does(path, "ls -A v.img:/sub"), "x\n");
    does(path, "chattr -i v.img:/sub/x");
    does(path, "ln -sf ../a v.img:/sub/x");
    does(path, "cp mine v.img:/b");
    does(path, "ln -f v.img:/a v.img:/b");
    assert_eq!(does(path, "cat v.img:/sub/x v.img:/b"), "copycopy");
    assert_eq!(does(path, "stat -c %h v.img:/a").trim(), "2");
    assert_eq!(does(path, "ls -A v.img:/"), "a\nb\nsub\n");
    check(&path.join("v.img"));
}

#[test]
fn a_copy_that_fails_removes_no_names_of_other_files() {
    let dir = start();
    let path = dir.path();
    volume(path, "w.img", 128);
    spoilt(path, "w.img");
    does(path, "mkdir v.img:/dst");
    does(path, "subvolume create v.img:/dst/sub");
    does(path, "cp mine v.img:/dst/f");
    does(path, "touch -d 2100-01-01 v.img:/dst/f");
    // The first name is kept. The second becomes a file of its own, because it is in a subvolume.
    let said = ends(path, "cp -au w.img:/f w.img:/sub v.img:/dst", 3);
    assert!(said.contains("/sub/f"), "{said}");
    assert_eq!(does(path, "cat v.img:/dst/f"), "mine");
    assert_eq!(does(path, "ls -A v.img:/dst/sub"), "");
    check(&path.join("v.img"));
}

#[test]
fn a_name_stays_that_no_link_will_have() {
    let dir = start();
    let path = dir.path();
    volume(path, "w.img", 128);
    spoilt(path, "w.img");
    does(path, "mkdir v.img:/dst v.img:/first");
    does(path, "cp mine v.img:/dst/f");
    does(path, "ln v.img:/dst/f v.img:/dst/other");
    // The first name cannot be read, so neither can the second.
    let said = ends(path, "cp -a w.img:/f v.img:/first", 3);
    assert!(said.contains("/f"), "{said}");
    does(path, "mkdir w.img:/two");
    does(path, "ln w.img:/f w.img:/two/e");
    does(path, "ln w.img:/f w.img:/two/f");
    let said = ends(path, "cp -a w.img:/two/e w.img:/two/f v.img:/dst", 3);
    assert!(said.contains("another name of it could not be copied"), "{said}");
    assert_eq!(does(path, "cat v.img:/dst/f"), "mine");
    assert_eq!(does(path, "stat -c %h v.img:/dst/f").trim(), "2");
    check(&path.join("v.img"));
}

/// Regression: `cp` removed the copy that it was about to give one more name.
fn a_copy_is_not_removed_for_another_name_of_its_source() {
    let dir = start();
    let path = dir.path();
    // The order of two names in one directory is not known.
    for name in ["x/f", "x/g", "y/f", "z/f"] {
        let name = path.join(name);
        fs::create_dir_all(name.parent().expect("a directory")).expect("a directory");
        fs::hard_link(path.join("src/h1"), name).expect("a hard link");
    }
    ends(path, "cp -a x/. y/. z/. v.img:/", 0);
    assert_eq!(does(path, "cat v.img:/f v.img:/g"), "copycopy");
    assert_eq!(does(path, "stat -c %h v.img:/f").trim(), "2");
    check(&path.join("v.img"));
}

fn a_link_is_made_to_the_file_that_was_written_through_a_link() {
    let dir = start();
    let path = dir.path();
    does(path, "cp mine v.img:/real");
    does(path, "ln -s real v.img:/h1");
    does(path, "cp -a src/h1 src/sub/h2 v.img:/");
    assert_eq!(does(path, "stat -c '%F %h' v.img:/h2").trim(), "regular file 2");
    assert_eq!(does(path, "cat v.img:/h2 v.img:/real"), "copycopy");
    assert_eq!(does(path, "stat -c %F v.img:/h1").trim(), "symbolic link");
    check(&path.join("v.img"));
}

fn standard_input_that_does_not_read_costs_nothing() {
    let dir = start();
    let path = dir.path();
    does(path, "cp mine v.img:/f");
    let input = fs::File::open(path).expect("a directory");
    let mut command = program(path);
    let output = command.args(["cp", "-", "v.img:/f"]).stdin(input).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(does(path, "cat v.img:/f"), "mine");
    let input = fs::File::open(path.join("src/h1")).expect("a file");
    let mut command = program(path);
    let output = command.args(["cp", "-", "v.img:/f"]).stdin(input).output().expect("it starts");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(does(path, "cat v.img:/f"), "copy");
}

#[test]
fn a_source_that_failed_keeps_no_other_from_its_name() {
    let dir = start();
    let path = dir.path();
    volume(path, "w.img", 128);
    spoilt(path, "w.img");
    does(path, "mkdir w.img:/y v.img:/d v.img:/y");
    does(path, "cp mine w.img:/y/f");
    does(path, "cp src/h1 v.img:/d/f");
    ends(path, "cp w.img:/f w.img:/y/f v.img:/d", 3);
    assert_eq!(does(path, "cat v.img:/d/f"), "mine");
    fs::create_dir(path.join("out")).expect("a directory");
    fs::write(path.join("out/f"), "old").expect("a file");
    ends(path, "cp w.img:/f w.img:/y/f out", 3);
    assert_eq!(fs::read(path.join("out/f")).expect("a file"), b"mine");
    // A file of another subvolume is not moved.
    does(path, "subvolume create v.img:/x");
    does(path, "cp src/h1 v.img:/x/f");
    does(path, "cp src/h1 v.img:/y/f");
    ends(path, "mv v.img:/x/f v.img:/y/f v.img:/d", 1);
    assert_eq!(does(path, "cat v.img:/d/f"), "copy");
}

fn a_pattern_for_two_is_more_than_one_source() {
    let dir = start();
    let path = dir.path();
    does(path, "cp mine v.img:/p1");
    does(path, "cp mine v.img:/p2");
    for verb in ["cp", "mv"] {
        let said = fails(path, &format!("{verb} -T v.img:/p* v.img:/new"), 2);
        assert!(said.contains("-T takes one source, and v.img:/p2 is one more"), "{said}");
    }
    assert_eq!(does(path, "ls v.img:/"), "p1\np2\n");
    does(path, "mv -T v.img:/*1 v.img:/new");
}

#[test]
fn data_that_is_shared_is_not_read() {
    let dir = start();
    let path = dir.path();
    spoilt(path, "v.img");
    does(path, "cp mine v.img:/there");
    does(path, "cp mine v.img:/apart");
    does(path, "ln v.img:/apart v.img:/other");
    ends(path, "cp --reflink=never v.img:/f v.img:/there", 3);
    assert_eq!(does(path, "cat v.img:/there"), "mine");
    does(path, "cp v.img:/f v.img:/there");
    does(path, "cp -a v.img:/f v.img:/apart");
    for name in ["there", "apart"] {
        assert_eq!(does(path, &format!("stat -c %s v.img:/{name}")).trim(), "100000");
    }
    assert_eq!(does(path, "cat v.img:/other"), "mine");
}

fn without_links_a_file_is_written_into() {
    let dir = start();
    let path = dir.path();
    does(path, "cp mine v.img:/x");
    does(path, "ln v.img:/x v.img:/y");
    does(path, "cp -a --no-preserve=links src/h1 v.img:/x");
    assert_eq!(does(path, "cat v.img:/x v.img:/y"), "copycopy");
    does(path, "cp -a mine v.img:/x");
    assert_eq!(does(path, "cat v.img:/x v.img:/y"), "minecopy");
}

on_both! {
    a_copy_is_not_removed_for_another_name_of_its_source,
    a_link_is_made_to_the_file_that_was_written_through_a_link,
    standard_input_that_does_not_read_costs_nothing,
    a_pattern_for_two_is_more_than_one_source,
    without_links_a_file_is_written_into,
}
