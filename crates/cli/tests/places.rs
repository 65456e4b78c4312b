//! Several places on one command line, in the carried volume.

use std::path::Path;
use std::process::{Command, Output};

use offshoot_testkit::btrfs::fixture;

/// Runs the program in `dir`.
fn offshoot(dir: &Path, arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_offshoot");
    Command::new(program).args(arguments).current_dir(dir).output().expect("it runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("names and messages are text here")
}

/// Two volumes with the same contents, `a.img` and `b.img`.
fn volumes() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    fixture::unpack(&dir.path().join("a.img")).expect("the volume is unpacked");
    std::fs::hard_link(dir.path().join("a.img"), dir.path().join("b.img")).expect("a second name");
    dir
}

#[test]
fn ls_shows_files_first_and_names_directories() {
    let volumes = volumes();
    let output = offshoot(
        volumes.path(),
        &["ls", "a.img:/root/usr/bin", "a.img:/root/etc/hostname", "a.img:/home"],
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let expected = "/root/etc/hostname\n\n/home:\nalice\n\n\
                    /root/usr/bin:\nnew-tool\nping\nping4\nping6\n";
    assert_eq!(text(&output.stdout), expected);
    // One place alone is listed without a heading, as before.
    let output = offshoot(volumes.path(), &["ls", "a.img:/home"]);
    assert_eq!(text(&output.stdout), "alice\n");
}

#[test]
fn places_in_several_volumes_are_told_apart() {
    let volumes = volumes();
    let places = ["a.img:/home", "b.img:/home", "b.img:/nowhere"];
    let output = offshoot(volumes.path(), &[&["ls"], &places[..]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stdout), "a.img:/home:\nalice\n\nb.img:/home:\nalice\n");
    let message = "offshoot: b.img:/nowhere: no such file\n";
    assert_eq!(text(&output.stderr), message);
    let output = offshoot(volumes.path(), &[&["ls", "--json"], &places[..]].concat());
    assert_eq!(output.status.code(), Some(2));
    let records: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("what was found is JSON");
    let volume = |at: usize| records[at]["volume"].as_str();
    assert_eq!((volume(0), volume(1), volume(2)), (Some("a.img"), Some("b.img"), None));
}

#[test]
fn cat_goes_on_after_a_file_that_it_cannot_read() {
    let volumes = volumes();
    let one = offshoot(volumes.path(), &["cat", "a.img:/root/etc/hostname"]);
    let other = offshoot(volumes.path(), &["cat", "a.img:/root/usr/share/doc/zstd.txt"]);
    assert!(one.status.success() && other.status.success() && !other.stdout.is_empty());
    let output = offshoot(
        volumes.path(),
        &[
            "cat",
            "a.img:/root/etc/hostname",
            "a.img:/root/etc",
            "a.img:/root/nowhere",
            "a.img:/root/usr/share/doc/zstd.txt",
        ],
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout == [one.stdout, other.stdout].concat());
    let messages = "offshoot: a.img:/root/etc: is a directory\n\
                    offshoot: a.img:/root/nowhere: no such file\n";
    assert_eq!(text(&output.stderr), messages);
}

#[test]
fn the_worst_failure_decides_the_exit_code() {
    let volumes = volumes();
    let mut damaged = vec![7; 1 << 20];
    damaged[(64 << 10) + 64..][..8].copy_from_slice(b"_BHRfS_M");
    std::fs::write(volumes.path().join("damaged"), damaged).expect("a file in it");
    for verb in ["ls", "cat"] {
        let places = [verb, "a.img:/nowhere", "damaged:/x", "absent:/x"];
        let output = offshoot(volumes.path(), &places);
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        // Lines that belong to a message are indented.
        let messages = text(&output.stderr).lines().filter(|line| line.starts_with("offshoot"));
        assert_eq!(messages.count(), 3, "{}", text(&output.stderr));
        assert!(output.stdout.is_empty());
    }
}

/// Regression: for all of these, the message was only that there is no such file.
#[test]
fn a_place_that_is_almost_one_is_told_how_to_write_it() {
    let volumes = volumes();
    for (arguments, hint) in [
        (&["ls", "a.img:etc"][..], "a place is VOLUME:/PATH"),
        (&["ls", "a.img:"], "a place is VOLUME:/PATH"),
        (&["stat", "a.img:etc:x"], "a place is VOLUME:/PATH"),
        (&["info", "a.img:/"], "this takes a volume without a path"),
        (&["info", "a.img:"], "this takes a volume without a path"),
        (&["subvolume", "list", "a.img:/home"], "this takes a volume without a path"),
        (&["dump", "super", "a.img:/home"], "this takes a volume without a path"),
    ] {
        let output = offshoot(volumes.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let message = text(&output.stderr);
        assert!(message.contains(hint) && message.contains("a.img"), "{arguments:?}: {message}");
    }
    let output = offshoot(volumes.path(), &["ls", "c.img:etc"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "offshoot: c.img:etc: No such file or directory\n");
}
