//! Reading damaged volumes: through other roots, without checksums, around what is lost.

#[path = "shared/damaged.rs"]
mod damaged;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;

use damaged::{Damaged, FILE, PLAIN_FILE, extent_of, json, number, offshoot, text};
use serde_json::Value;

impl Damaged {
    fn run(&self, arguments: &[&str]) -> Output {
        let place = self.place("");
        offshoot(&[arguments, &[place.as_str()]].concat())
    }
}

#[test]
fn without_a_readable_checksum_tree_files_are_read_when_asked() {
    let damaged = Damaged::new();
    let sound = offshoot(&["cat", &damaged.place(FILE)]);
    assert!(sound.status.success() && !sound.stdout.is_empty(), "{sound:?}");
    damaged.destroy(damaged.root_of(7));
    let place = damaged.place(FILE);
    assert_eq!(offshoot(&["cat", &place]).status.code(), Some(3));
    for option in ["--rescue=ignorebadroots", "--rescue=all", "--ignore-checksums"] {
        let read = offshoot(&["cat", option, &place]);
        assert_eq!((read.status.code(), read.stdout), (Some(0), sound.stdout.clone()), "{option}");
    }
    let refused = offshoot(&["mkdir", "--rescue=all", &damaged.place("new")]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("writing"), "{refused:?}");
}

#[test]
fn a_backup_root_is_used_when_asked() {
    let damaged = Damaged::new();
    let sound = damaged.run(&["ls", "-l"]);
    damaged.destroy(number(&damaged.superblock["root"]));
    assert_eq!(damaged.run(&["ls", "-l"]).status.code(), Some(3));
    let found = damaged.run(&["ls", "-l", "--rescue", "usebackuproot"]);
    assert_eq!((found.status.code(), found.stdout), (Some(0), sound.stdout), "{:?}", found.stderr);
    assert!(String::from_utf8_lossy(&found.stderr).contains("ROOT_TREE"), "{:?}", found.stderr);
}

#[test]
fn bad_sectors_become_zeros_when_asked_and_are_listed() {
    let damaged = Damaged::new();
    let path = PLAIN_FILE;
    let sound = offshoot(&["cat", &damaged.place(path)]).stdout;
    let logical = extent_of(&damaged, path);
    let file = File::options().write(true).open(&damaged.image).expect("the image opens");
    for at in damaged.copies(logical + 4096) {
        file.write_all_at(&[0xa5; 512], at).expect("it is written");
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let out = |name: &str| dir.path().join(name);
    let strict = offshoot(&["extract", &damaged.place(path), text(&out("strict"))]);
    assert_eq!(strict.status.code(), Some(3));
    let said = String::from_utf8_lossy(&strict.stderr).into_owned();
    assert!(said.contains("--salvage") && said.contains("offshoot recover"), "{said}");
    let read = |dir: &Path| {
        let name = Path::new(path).file_name().expect("a name");
        std::fs::read(dir.join(name)).expect("it was written")
    };
    let (place, salvaged) = (damaged.place(path), out("salvaged"));
    let output = offshoot(&["extract", "--salvage", "--json", &place, text(&salvaged)]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let mut expected = sound.clone();
    expected[4096..8192].fill(0);
    assert!(read(&salvaged) == expected);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let replaced = report["replaced"].as_array().expect("a list");
    assert_eq!(replaced.len(), 1, "{report}");
    assert_eq!((&replaced[0]["offset"], &replaced[0]["length"]), (&4096.into(), &4096.into()));
    assert_eq!(replaced[0]["path"], format!("/{path}"));
    let raw = offshoot(&["cat", "--ignore-checksums", &damaged.place(path)]).stdout;
    expected[4096..4608].fill(0xa5);
    expected[4608..8192].copy_from_slice(&sound[4608..8192]);
    assert!(raw == expected);
    let recovered = offshoot(&["recover", text(&damaged.image), text(&out("recovered"))]);
    assert_eq!(recovered.status.code(), Some(3), "{recovered:?}");
    let said = String::from_utf8_lossy(&recovered.stderr).into_owned();
    assert!(said.contains(path) && said.contains("4096 bytes at 4096"), "{said}");
}

#[test]
fn older_generations_are_listed_and_read() {
    let damaged = Damaged::new();
    let image = text(&damaged.image);
    let listed = offshoot(&["recover", "--list-roots", "--json", image]);
    let roots: Vec<Value> = serde_json::Deserializer::from_slice(&listed.stdout)
        .into_iter()
        .map(|root| root.expect("JSON"))
        .collect();
    let generations: Vec<_> = roots.iter().map(|root| number(&root["generation"])).collect();
    assert!(generations.is_sorted_by(|one, next| one >= next), "{generations:?}");
    let used: Vec<_> = roots.iter().filter(|root| root["used"] == true).collect();
    assert_eq!(used.len(), 1, "{roots:?}");
    assert_eq!(used[0]["generation"], damaged.superblock["generation"]);
    assert!(roots.iter().filter(|root| root["source"] == "backup").count() >= 3, "{roots:?}");
    let dir = tempfile::tempdir().expect("a temporary directory");
    let out = dir.path().join("older");
    let older = (generations[0] - 1).to_string();
    let report = json(&["recover", "--generation", &older, "--json", image, text(&out)]);
    assert_eq!(report["generation"].to_string(), older);
    assert!(number(&report["files"]) > 10, "{report}");
    let missing = offshoot(&["recover", "--generation", "999", image, text(&out)]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("--list-roots"), "{missing:?}");
}
