//! The program from outside, where no volume is needed: exit codes, help, messages.

use std::process::{Command, Output};

fn offshoot(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot")).args(arguments).output().expect("it runs")
}

fn error(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("messages are text")
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [&["--help"][..], &["--version"], &["extract", "--help"], &["help", "ls"]] {
        let output = offshoot(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty());
        assert!(!output.stdout.is_empty());
    }
    let help = String::from_utf8(offshoot(&["--help"]).stdout).expect("help is text");
    assert!(help.contains("Examples:") && help.contains("offshoot extract disk.img out"));
}

#[test]
fn wrong_usage_is_2() {
    for arguments in [
        &[][..],
        &["frobnicate"],
        &["ls"],
        &["cat"],
        &["ls", "--no-such-option", "x"],
        &["extract", "x"],
        &["extract", "x", "out", "--tar", "-"],
        &["extract", "x", "--tar", "-", "--json"],
        &["dump", "tree", "x", "no-such-tree"],
        &["dump", "tree", "x"],
    ] {
        let output = offshoot(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", error(&output));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn messages_have_one_form() {
    let output = offshoot(&["ls", "/no/such\u{1b}[2J/disk.img:/etc"]);
    assert_eq!(output.status.code(), Some(1));
    let message = error(&output);
    assert!(message.starts_with("offshoot: /no/such\\u{1b}[2J/disk.img: "), "{message}");
    assert_eq!(message.lines().count(), 1);
    assert!(error(&offshoot(&["frobnicate"])).starts_with("offshoot: "));
}

#[test]
fn what_is_no_volume_is_1_and_a_damaged_one_is_3() {
    let temp = tempfile::tempdir().expect("a temporary directory");
    let noise = vec![7; 1 << 20];
    let mut damaged = noise.clone();
    damaged[(64 << 10) + 64..][..8].copy_from_slice(b"_BHRfS_M");
    for (name, bytes, code) in [("noise", noise, 1), ("damaged", damaged, 3)] {
        let path = temp.path().join(name);
        std::fs::write(&path, bytes).expect("a file in it");
        let text = path.to_str().expect("its path is text");
        for arguments in [
            &["info", text][..],
            &["stats", text],
            &["ls", text],
            &["stat", text],
            &["cat", text],
            &["extract", text, "/no/such/destination"],
            &["subvolume", "list", text],
            &["dump", "super", text],
            &["dump", "chunks", text],
            &["dump", "tree", text, "fs"],
        ] {
            let output = offshoot(arguments);
            assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", error(&output));
            // `dump super` shows whatever is in the place of a superblock.
            assert_eq!(output.stdout.is_empty(), arguments[1] != "super", "{arguments:?}");
        }
    }
    assert_eq!(offshoot(&["info", temp.path().to_str().expect("text")]).status.code(), Some(1));
}
