//! The floors of the btrfs engine: which room may call which.
//!
//! A room is a file or folder right under `crates/btrfs/src`. A room calls only rooms on lower
//! floors; rooms on one floor do not call each other. Tests may call anything.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use offshoot_machine::repository;

use crate::shell::Result;

/// The floors from the ground up.
const FLOORS: &[&[&str]] = &[
    &["report", "stats"],
    &["storage"],
    &["block"],
    &["tree"],
    &["options"],
    &["space"],
    &["transaction"],
    &["delayed"],
    &["data"],
    &["inode"],
    &["subvolume"],
    &["log"],
    &["upkeep"],
    &["engine"],
    &["mkfs", "scrub"],
    &["filesystem"],
    &["bench"],
];

/// Arrows that still run up. Remove an arrow from this list when the code no longer has it. Never
/// add one.
const STILL_UP: &[(&str, &str)] = &[];

/// Names in the root of the crate, which every room may use. Some are modules of `crates/kit`.
const OF_THE_CRATE: &[&str] = &["SubvolumeId", "cores", "counter", "sync"];

/// Checks every `crate::` of the engine against the floors.
///
/// # Errors
/// Arrows that run up and are not in [`STILL_UP`], and arrows in that list that are gone.
pub(crate) fn check() -> Result {
    let rooms = repository().join("crates/btrfs/src");
    let mut files = Vec::new();
    collect(&rooms, &mut files).map_err(|error| format!("{}: {error}", rooms.display()))?;
    let mut up = BTreeSet::new();
    let mut complaints = Vec::new();
    for (file, text) in &files {
        let room = room_of(file);
        for (line, target) in calls(text) {
            if let Err(reason) = verdict(&room, &target) {
                let is_known = STILL_UP.contains(&(&*room, &*target));
                if !is_known {
                    complaints.push(format!("crates/btrfs/src/{file}:{line}: {reason}"));
                }
                up.insert((room.clone(), target));
            }
        }
    }
    for (from, to) in STILL_UP {
        if !up.contains(&((*from).to_owned(), (*to).to_owned())) {
            complaints.push(format!("{from} does not call {to} any more: take that off the list"));
        }
    }
    if complaints.is_empty() {
        return Ok(());
    }
    Err(format!("the floors of the engine:\n{}", complaints.join("\n")))
}

/// Collects the files of the engine except tests: the path of each below `dir`, and its text.
fn collect(dir: &Path, files: &mut Vec<(String, String)>) -> std::io::Result<()> {
    let mut pending = vec![dir.to_owned()];
    while let Some(at) = pending.pop() {
        for entry in fs::read_dir(&at)? {
            let path = entry?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if is_test(&name) {
                continue;
            }
            if path.is_dir() {
                pending.push(path);
            } else {
                let below = path.strip_prefix(dir).expect("it was found there");
                files.push((below.to_string_lossy().into_owned(), fs::read_to_string(&path)?));
            }
        }
    }
    files.sort();
    Ok(())
}

/// Whether a file or folder of this name is outside the rooms: tests, and the root `lib.rs`.
fn is_test(name: &str) -> bool {
    name == "tests"
        || name.ends_with("_tests")
        || ["model", "faults", "test_volumes", "lib"].contains(&name)
}

/// The room of a file: `tree` for `tree/write/path.rs`.
fn room_of(file: &str) -> String {
    file.split('/').next().unwrap_or(file).trim_end_matches(".rs").to_owned()
}

/// The names that follow `crate::` in code outside tests, each with its line number.
fn calls(text: &str) -> Vec<(usize, String)> {
    let mut calls = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        // Unit tests are the last module of a file.
        if line.starts_with("mod tests {") {
            break;
        }
        let code = line.split("//").next().unwrap_or_default();
        for (at, call) in code.match_indices("crate::") {
            let is_whole = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let rest = &code[at + call.len()..];
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            if is_whole && end > 0 {
                calls.push((number, rest[..end].to_owned()));
            }
        }
    }
    calls
}

/// Whether `room` may call `target`.
fn verdict(room: &str, target: &str) -> Result {
    let floor = |name: &str| FLOORS.iter().position(|floor| floor.contains(&name));
    let Some(own) = floor(room) else {
        return Err(format!("the room {room} is on no floor"));
    };
    match floor(target) {
        _ if room == target || OF_THE_CRATE.contains(&target) => Ok(()),
        None => Err(format!("{room} calls {target}, which is on no floor")),
        Some(other) if other < own => Ok(()),
        Some(_) => Err(format!("{room} calls {target}, which is not below it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrow_that_runs_up_is_found() {
        assert!(verdict("tree", "block").is_ok());
        assert!(verdict("tree", "tree").is_ok());
        let up = verdict("tree", "transaction").expect_err("it runs up");
        assert_eq!(up, "tree calls transaction, which is not below it");
        let beside = verdict("mkfs", "scrub").expect_err("they are on one floor");
        assert_eq!(beside, "mkfs calls scrub, which is not below it");
        assert!(verdict("attic", "tree").is_err());
        assert!(verdict("tree", "attic").is_err());
    }

    #[test]
    fn calls_are_found_in_code_alone() {
        let text = "use crate::tree::Cursor;\n// crate::log is above\nlet a = \
                    crate::space::of(crate::engine::X);\nmy_crate::inode();\nmod tests {\n    use \
                    crate::handle::Volume;\n";
        let found = calls(text);
        let expected = [(1, "tree"), (3, "space"), (3, "engine")];
        let expected: Vec<_> =
            expected.into_iter().map(|(line, room)| (line, room.to_owned())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_file_is_in_the_room_that_its_folder_is() {
        assert_eq!(room_of("tree/write/path.rs"), "tree");
        assert_eq!(room_of("tree.rs"), "tree");
        assert!(is_test("tests") && is_test("line_tests") && !is_test("transaction"));
    }
}
