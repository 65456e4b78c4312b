//! Verbs on volumes with chosen damage.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use offshoot_testkit::btrfs::damage::{
    Features, edit_superblocks, lead_nowhere, set_features, use_nothing,
};
use offshoot_testkit::btrfs::{fixture, judges};
use offshoot_testkit::run;
use serde_json::Value;

fn offshoot(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_offshoot")).args(arguments).output().expect("it runs")
}

fn json(arguments: &[&str]) -> (Value, Output) {
    let output = offshoot(arguments);
    let value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{arguments:?}: {error}: {output:?}"));
    (value, output)
}

fn volume() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let image = dir.path().join("volume.img");
    fixture::unpack(&image).expect("the fixture unpacks");
    (dir, image)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary path is text")
}

/// Writes noise over all copies of the block at a logical address.
fn destroy(image: &Path, logical: u64) {
    let (chunks, _) = json(&["dump", "chunks", "--json", text(image)]);
    let number = |value: &Value| value.as_u64().expect("a number");
    let chunks = chunks.as_array().expect("an array");
    let within = |chunk: &Value| logical.checked_sub(number(&chunk["logical"]));
    let (chunk, at) = chunks
        .iter()
        .filter_map(|chunk| Some((chunk, within(chunk)?)))
        .find(|(chunk, at)| *at < number(&chunk["length"]))
        .expect("a chunk has it");
    let file = File::options().write(true).open(image).expect("the image opens");
    for stripe in chunk["stripes"].as_array().expect("an array") {
        file.write_all_at(&[0xa5; 512], number(&stripe["offset"]) + at).expect("it is written");
    }
}

/// The root of the tree `id`.
fn root_of(image: &Path, id: u64) -> u64 {
    let output = offshoot(&["dump", "tree", "--json", text(image), "root"]);
    let lines = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let item = lines
        .map(|line| line.expect("JSON"))
        .find(|line| line["key"]["objectid"] == id && line["key"]["type"] == "ROOT_ITEM")
        .expect("the tree is there");
    item["item"]["bytenr"].as_u64().expect("a number")
}

/// Regression: `info` failed completely, and `subvolume list --json` ended in the middle of its
/// array.
#[test]
fn subvolumes_below_a_damaged_directory_are_still_listed() {
    let (_dir, image) = volume();
    let (sound, _) = json(&["subvolume", "list", "--json", text(&image)]);
    let sound = sound.as_array().expect("an array");
    // The directory with the snapshots is in the tree of the top level.
    destroy(&image, root_of(&image, 5));
    let (found, output) = json(&["subvolume", "list", "--json", text(&image)]);
    assert_eq!(output.status.code(), Some(3));
    assert!(!output.stderr.is_empty());
    let found = found.as_array().expect("an array");
    assert_eq!(found.len(), sound.len());
    for (found, sound) in found.iter().zip(sound) {
        assert_eq!(found["id"], sound["id"]);
        assert!(found["path"] == sound["path"] || found["path"].is_null(), "{found}");
    }
    assert!(found.iter().any(|found| found["path"].is_null()));
    assert!(found.iter().any(|found| !found["path"].is_null()));
    let listed = offshoot(&["subvolume", "list", text(&image)]);
    assert_eq!(listed.status.code(), Some(3));
    let lines = String::from_utf8(listed.stdout).expect("text");
    assert_eq!(lines.lines().count(), sound.len() + 1);
    let (info, output) = json(&["info", "--json", text(&image)]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(info["subvolumes"], sound.len());
}

/// Regression: `stat` asked for the sizes of the whole volume, so it failed when block groups could
/// not be read.
#[test]
fn a_file_is_shown_beside_damaged_block_groups() {
    let (_dir, image) = volume();
    let place = format!("{}:/", text(&image));
    let sound = offshoot(&["stat", &place]);
    assert_eq!(sound.status.code(), Some(0), "{sound:?}");
    destroy(&image, root_of(&image, 2));
    let found = offshoot(&["stat", &place]);
    assert_eq!((found.status.code(), found.stdout), (Some(0), sound.stdout), "{:?}", found.stderr);
}

/// Regression: `dump super` opened the volume first, so it showed nothing when an administrator
/// needed it.
#[test]
fn superblocks_are_shown_of_volumes_that_do_not_open() {
    let (_dir, image) = volume();
    let show = || json(&["dump", "super", "--json", text(&image)]);
    let (sound, output) = show();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(sound.as_array().map(Vec::len), Some(2), "the primary and one copy");
    for at in 0..2 {
        assert_eq!(sound[at]["problem"], Value::Null);
        assert_eq!(sound[at]["superblock"]["bytenr"], sound[at]["offset"]);
    }

    set_features(&image, Features::Incompatible, 1 << 60);
    destroy_chunk_root(&image, &sound);
    assert_eq!(offshoot(&["info", text(&image)]).status.code(), Some(4));
    let (unknown, output) = show();
    assert_eq!(output.status.code(), Some(0));
    for at in 0..2 {
        assert_eq!(unknown[at]["problem"], Value::Null);
        let features = unknown[at]["superblock"]["incompat_flags"].as_array().expect("a list");
        assert!(features.contains(&Value::from("bit 60")), "{features:?}");
    }

    // Only the primary superblock, whose checksum is wrong now.
    let file = File::options().write(true).open(&image).expect("the image opens");
    file.write_all_at(b"another label", (64 << 10) + 299).expect("it is written");
    let (one, output) = show();
    assert_eq!(output.status.code(), Some(0), "a copy is good");
    assert!(one[0]["problem"].as_str().is_some_and(|problem| problem.contains("checksum")));
    assert_eq!(one[0]["superblock"]["label"].as_str().map(|l| &l[..7]), Some("another"));
    assert_eq!(one[1]["problem"], Value::Null);

    // Both superblocks, with right checksums and a sector size of zero.
    edit_superblocks(&image, |block| block[144..148].fill(0));
    let (both, output) = show();
    assert_eq!(output.status.code(), Some(3));
    assert!(both[1]["problem"].as_str().is_some_and(|problem| problem.contains("sector size")));
    let people = offshoot(&["dump", "super", text(&image)]);
    let shown = String::from_utf8(people.stdout).expect("text");
    assert_eq!(shown.matches("does NOT verify: sector size 0").count(), 2, "{shown}");
}

fn destroy_chunk_root(image: &Path, superblocks: &Value) {
    let superblock = &superblocks[0]["superblock"];
    let root = superblock["chunk_root"].as_u64().expect("a number");
    let chunk = &superblock["sys_chunk_array"][0];
    let at = root - chunk["logical"].as_u64().expect("a number");
    let file = File::options().write(true).open(image).expect("the image opens");
    for stripe in chunk["stripes"].as_array().expect("stripes") {
        let offset = stripe["offset"].as_u64().expect("a number") + at;
        file.write_all_at(&[0xa5; 512], offset).expect("it is written");
    }
}

/// A name without an inode is damage, and the error gives the name. It must not look like a file
/// that does not exist.
#[test]
fn a_name_without_an_inode_is_corrupt() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let image = dir.path().join("v.img");
    let place = |path: &str| format!("{}:{path}", text(&image));
    let run = |words: &[&str]| {
        let output = offshoot(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), said)
    };
    let done = |words: &[&str]| assert_eq!(run(words).0, Some(0), "{words:?}: {}", run(words).2);
    done(&["mkfs", text(&image), "--size", "128M"]);
    let host = dir.path().join("d");
    std::fs::create_dir(&host).expect("a directory");
    for name in ["before", "gone-file", "later"] {
        std::fs::write(host.join(name), name).expect("a file");
    }
    done(&["cp", "-r", text(&host), &place("/d")]);
    let ino = lead_nowhere(&image, "gone-file");
    let sound = std::fs::read(&image).expect("an image");
    let named = format!("leads to inode {ino} of subvolume 5, which is missing");
    let corrupt = |words: &[&str]| {
        let (code, out, said) = run(words);
        assert_eq!(code, Some(3), "{words:?}: {said}");
        assert!(said.contains("gone-file") && said.contains(&named), "{words:?}: {said}");
        assert_eq!(said.matches(&named).count(), 1, "{words:?}: {said}");
        out
    };
    assert_eq!(corrupt(&["ls", &place("/d")]), "before\ngone-file\nlater\n");
    for words in [&["ls", "-l"][..], &["ls", "-R"], &["ls", "--json"]] {
        let out = corrupt(&[words, &[&place("/d")[..]]].concat());
        assert!(out.contains("before") && out.contains("later"), "{words:?}: {out}");
    }
    for verb in ["ls", "stat", "cat", "rm"] {
        corrupt(&[verb, &place("/d/gone-file")]);
    }
    corrupt(&["mv", &place("/d/gone-file"), &place("/d/other")]);
    corrupt(&["cp", &place("/d/gone-file"), text(&dir.path().join("copy"))]);
    for (words, out) in [(&["extract"][..], "out/d"), (&["cp", "-r"], "copied/d")] {
        let out = dir.path().join(out);
        let parent = out.parent().expect("it has one");
        corrupt(&[words, &[&place("/"), text(parent)]].concat());
        for name in ["before", "later"] {
            assert_eq!(std::fs::read_to_string(out.join(name)).expect("a file"), name);
        }
        assert!(!out.join("gone-file").exists());
    }
    let archive = dir.path().join("archive.tar");
    corrupt(&["extract", "--tar", text(&archive), text(&image)]);
    assert!(std::fs::read(&image).expect("an image") == sound, "it was changed");
    // New names can still be made beside it, and the other names still work.
    done(&["cp", text(&host.join("later")), &place("/d/new")]);
    assert_eq!(run(&["cat", &place("/d/before")]).1, "before");
}

/// Trees that are not subvolumes are shown by name. In JSON they keep their numbers.
#[test]
fn special_trees_have_names() {
    let (_dir, image) = volume();
    let shown = |words: &[&str]| String::from_utf8(offshoot(words).stdout).expect("text");
    let roots = shown(&["dump", "tree", text(&image), "root"]);
    assert!(roots.contains("(DATA_RELOC_TREE ROOT_ITEM 0)"), "{roots}");
    assert!(roots.contains("(EXTENT_TREE ROOT_ITEM 0)") && roots.contains("(5 ROOT_ITEM 0)"));
    let extents = shown(&["dump", "tree", text(&image), "extent"]);
    assert!(extents.contains("root=CSUM_TREE") && extents.contains("root=DATA_RELOC_TREE"));
    for shown in [&roots, &extents] {
        assert!(!shown.contains("18446744073709551607"), "{shown}");
    }
    let json = shown(&["dump", "tree", "--json", text(&image), "root"]);
    assert!(json.contains("\"objectid\":18446744073709551607"), "{json}");
    let output = offshoot(&["dump", "tree", text(&image), "18446744073709551610"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("tree TREE_LOG"), "{output:?}");
}

/// An archive leaves out a socket, reports an error, and has everything else.
#[test]
fn a_socket_in_an_archive_is_an_error() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (image, host) = (dir.path().join("v.img"), dir.path().join("d"));
    std::fs::create_dir(&host).expect("a directory");
    for name in ["socket-1", "socket-2"] {
        std::os::unix::net::UnixListener::bind(host.join(name)).expect("a socket");
    }
    std::fs::write(host.join("z-file"), "z").expect("a file");
    let archive = dir.path().join("archive.tar");
    for words in [&["mkfs", text(&image), "--size", "128M"][..], &["cp", "-r", text(&host)]] {
        let place = format!("{}:/", text(&image));
        let words = if words[0] == "cp" { [words, &[&place[..]]].concat() } else { words.to_vec() };
        assert_eq!(offshoot(&words).status.code(), Some(0), "{words:?}");
    }
    let output = offshoot(&["extract", "--tar", text(&archive), text(&image)]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for name in ["/d/socket-1", "/d/socket-2"] {
        assert!(said.contains(&format!("{name}: a socket")), "{said}");
    }
    let listed = Command::new("tar").arg("-tf").arg(&archive).output().expect("tar is there");
    assert!(listed.status.success(), "{listed:?}");
    let listed = String::from_utf8_lossy(&listed.stdout);
    assert!(listed.contains("z-file") && !listed.contains("socket"), "{listed}");
}

/// The first verb that leaves the numbers of quotas unchanged says so once. So does a verb that
/// finds wrong numbers.
#[test]
fn what_becomes_of_quotas_is_said() {
    if judges::require().is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let of_kind = |kind: &str| {
        let image = dir.path().join(kind);
        File::create(&image).and_then(|file| file.set_len(256 << 20)).expect("an image");
        run::run("mkfs.btrfs", &["-q".as_ref(), "-O".as_ref(), kind.as_ref(), image.as_os_str()]);
        image
    };
    let said = |image: &Path, verb: &[&str], path: &str| {
        let place = format!("{}:{path}", text(image));
        let output = offshoot(&[verb, &[&place]].concat());
        assert_eq!(output.status.code(), Some(0), "{verb:?}: {output:?}");
        String::from_utf8(output.stderr).expect("text")
    };
    let inconsistent = "warning: the numbers of quotas are not kept up with what is written: \
                        they are marked as inconsistent";
    let quota = of_kind("quota");
    let first = said(&quota, &["mkdir", "-p"], "/a/b/c");
    assert!(first.contains(inconsistent) && first.lines().count() == 1, "{first}");
    assert!(first.contains("`btrfs quota rescan`"), "{first}");
    assert_eq!(said(&quota, &["touch"], "/a/file"), "");
    let simple = of_kind("squota");
    assert_eq!(said(&simple, &["mkdir", "-p"], "/a/b/c"), "");
    assert_eq!(said(&simple, &["fallocate", "-l", "1M"], "/a/file"), "");
    use_nothing(&simple, 5);
    let wrong = said(&simple, &["rm"], "/a/file");
    let expected = "warning: the numbers of quota group 0/5 do not fit what the volume holds";
    assert!(wrong.contains(expected) && wrong.lines().count() == 1, "{wrong}");
    assert!(wrong.contains("`btrfs quota disable`"), "{wrong}");
}

/// `check` of a sound volume, and of one with a damaged tree: findings on standard error and as
/// objects, a verdict, and the exit code.
#[test]
fn a_check_says_what_is_wrong_and_whether_data_is_in_danger() {
    let (_dir, image) = volume();
    let output = offshoot(&["check", "--data", text(&image)]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(said.contains("of data compared") && said.contains("nothing is wrong"), "{said}");

    let logical = root_of(&image, 5);
    destroy(&image, logical);
    let output = offshoot(&["check", "--json", text(&image)]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let lines = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let lines: Vec<_> = lines.map(|line| line.expect("JSON")).collect();
    let [finding, .., summary] = &lines[..] else { panic!("{lines:?}") };
    let place = [&finding["code"], &finding["number"], &finding["tree"], &finding["logical"]];
    assert_eq!(place, [&Value::from("TreeBlock"), &721.into(), &5.into(), &logical.into()]);
    assert_eq!((&summary["findings"], &summary["severity"]), (&1.into(), &"lost".into()));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("721 TreeBlock"), "{errors}");

    let output = offshoot(&["check", "--memory", "1M", text(&image)]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let output = offshoot(&["check", "--scratch", "/nonexistent/folder", text(&image)]);
    assert_eq!(output.status.code(), Some(3), "nothing has to go to files: {output:?}");
}
