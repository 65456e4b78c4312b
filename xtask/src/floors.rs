//! The floors of the engines: which room may call which.
//!
//! A room is a file or folder right under the `src` of an engine. A room calls only rooms on lower
//! floors; rooms on one floor do not call each other. It adds methods only to its own types. Tests
//! may call anything.

use std::collections::HashMap;
use std::ffi::OsStr;

use crate::shell::Result;
use crate::sources;

/// An engine with its floors.
struct EngineFloors {
    /// The folder of the rooms.
    folder: &'static str,
    /// The floors from the ground up.
    floors: &'static [&'static [&'static str]],
    /// Names in the root of the crate, which every room may use. Some are modules of `crates/kit`.
    of_the_crate: &'static [&'static str],
}

const BTRFS: EngineFloors = EngineFloors {
    folder: "crates/btrfs/src",
    floors: &[
        &["events"],
        &["report", "stats"],
        &["storage"],
        &["block"],
        &["tree"],
        &["options"],
        &["check", "rescue"],
        &["repair"],
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
    ],
    of_the_crate: &["SubvolumeId", "cores", "counter", "ranges", "shared", "spread", "sync"],
};

const XFS: EngineFloors = EngineFloors {
    folder: "crates/xfs/src",
    floors: &[
        &["report"],
        &["options"],
        &["buffer"],
        &["log"],
        &["btree"],
        &["trans"],
        &["group"],
        &["inode"],
        &["da", "remote"],
        &["attr"],
        &["defer"],
        &["data", "dir", "file", "symlink"],
        &["buffered"],
        &["names"],
        &["recover"],
        &["volume"],
        &["live"],
        &["check", "filesystem", "mkfs"],
        &["grow", "rescue"],
    ],
    of_the_crate: &[],
};

/// Checks the engines against their floors.
///
/// # Errors
/// Calls of rooms that are not below, and methods for types of other rooms.
pub(crate) fn check() -> Result {
    let mut all = Vec::new();
    for engine in [&BTRFS, &XFS] {
        sources::each(&[engine.folder], &["rs"], |file, text| {
            let below = file.strip_prefix(engine.folder).unwrap_or(file);
            let is_outside = |part: &OsStr| is_test(part.to_string_lossy().trim_end_matches(".rs"));
            if !below.iter().any(is_outside) {
                let found = complaints(engine, &below.to_string_lossy(), text).into_iter();
                all.extend(found.map(|(line, what)| format!("{}:{line}: {what}", file.display())));
            }
        })?;
    }
    if all.is_empty() {
        return Ok(());
    }
    Err(format!("the floors of the engines:\n{}", all.join("\n")))
}

/// What a file does that its room must not, each with its line number.
fn complaints(engine: &EngineFloors, file: &str, text: &str) -> Vec<(usize, String)> {
    let (room, code) = (room_of(file), code_of(text));
    let calls = calls(file, &code);
    let mut complaints = Vec::new();
    let mut foreign = HashMap::new();
    for (line, path) in &calls {
        let target = &path[0];
        if let Err(reason) = verdict(engine, &room, target) {
            complaints.push((*line, reason));
        }
        if *target != room {
            foreign.insert(path[path.len() - 1].as_str(), target);
        }
    }
    for (number, line) in (1..).zip(code.lines()) {
        if let Some(name) = has_methods(line)
            && let Some(owner) = foreign.get(name)
        {
            complaints.push((number, format!("{room} adds methods to {name} of {owner}")));
        }
    }
    complaints
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

/// The lines of a file up to its unit tests, which are the last module, without comments.
fn code_of(text: &str) -> String {
    let lines = text.lines().take_while(|line| !line.starts_with("mod tests {"));
    lines.flat_map(|line| [line.split("//").next().unwrap_or_default(), "\n"]).collect()
}

/// The paths from the root of the crate in this code, each with its line number: those that begin
/// with `crate::`, and those that leave the room with `super::`. `use crate::{a::b, c::{d, e as
/// f}};` has the paths `a::b`, `c::d` and `c::f`.
fn calls(file: &str, code: &str) -> Vec<(usize, Vec<String>)> {
    // `tree.rs` leaves the room with one `super::`, `tree/write.rs` with two.
    let leaving = "super::".repeat(file.matches('/').count() + 1);
    let mut calls = Vec::new();
    for start in ["crate::", &leaving] {
        for (at, _) in code.match_indices(start) {
            let before = &code[..at];
            let is_whole = !before.ends_with(|c: char| is_of_name(c) || c == ':');
            if is_whole {
                let mut paths = Vec::new();
                expand(&code[at + start.len()..], &[], &mut paths);
                let line = before.matches('\n').count() + 1;
                calls.extend(paths.into_iter().map(|path| (line, path)));
            }
        }
    }
    calls
}

/// Adds the paths of the tree that `code` begins with, each below `prefix`. Returns the rest of the
/// code.
fn expand<'c>(code: &'c str, prefix: &[String], paths: &mut Vec<Vec<String>>) -> &'c str {
    let code = code.trim_start();
    if let Some(group) = code.strip_prefix('{') {
        let mut rest = group.trim_start();
        while !rest.is_empty() && !rest.starts_with('}') {
            let after = expand(rest, prefix, paths).trim_start();
            rest = after.strip_prefix(',').unwrap_or(after).trim_start();
            if !rest.starts_with(|c: char| is_of_name(c) || c == '{') {
                break;
            }
        }
        return rest.strip_prefix('}').unwrap_or(rest);
    }
    let (name, rest) = code.split_at(code.find(|c| !is_of_name(c)).unwrap_or(code.len()));
    if name.is_empty() {
        return rest;
    }
    let path = [prefix, &[name.to_owned()]].concat();
    if let Some(below) = rest.strip_prefix("::")
        && below.starts_with(|c: char| is_of_name(c) || c == '{')
    {
        return expand(below, &path, paths);
    }
    if let Some(alias) = rest.strip_prefix(" as ") {
        return expand(alias, prefix, paths);
    }
    paths.push(path);
    rest
}

fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The type that gets methods of its own, not those of a trait, if that begins in this line.
fn has_methods(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(parameters) => parameters.split_once("> ")?.1,
        None => rest.strip_prefix(' ')?,
    };
    let path = &rest[..rest.find(|c| !is_of_name(c) && c != ':').unwrap_or(rest.len())];
    let name = path.rsplit("::").next()?;
    (!name.is_empty() && !line.contains(" for ")).then_some(name)
}

/// Whether `room` may call `target`.
fn verdict(engine: &EngineFloors, room: &str, target: &str) -> Result {
    let floor = |name: &str| engine.floors.iter().position(|floor| floor.contains(&name));
    let Some(own) = floor(room) else {
        return Err(format!("the room {room} is on no floor"));
    };
    match floor(target) {
        _ if room == target || engine.of_the_crate.contains(&target) => Ok(()),
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
        assert!(verdict(&BTRFS, "tree", "block").is_ok());
        assert!(verdict(&BTRFS, "tree", "tree").is_ok());
        let up = verdict(&BTRFS, "tree", "transaction").expect_err("it runs up");
        assert_eq!(up, "tree calls transaction, which is not below it");
        let beside = verdict(&BTRFS, "mkfs", "scrub").expect_err("they are on one floor");
        assert_eq!(beside, "mkfs calls scrub, which is not below it");
        assert!(verdict(&BTRFS, "attic", "tree").is_err());
        assert!(verdict(&BTRFS, "tree", "attic").is_err());
    }

    /// The paths that are found in a file of this name.
    fn found(file: &str, text: &str) -> Vec<(usize, String)> {
        let joined = |(line, path): (usize, Vec<String>)| (line, path.join("::"));
        calls(file, &code_of(text)).into_iter().map(joined).collect()
    }

    fn paths<const N: usize>(expected: [(usize, &str); N]) -> Vec<(usize, String)> {
        expected.into_iter().map(|(line, path)| (line, path.to_owned())).collect()
    }

    #[test]
    fn calls_are_found_in_code_alone() {
        let text = "use crate::tree::Cursor;\n// crate::log is above\nlet a = \
                    crate::space::of(crate::engine::X);\nmy_crate::inode();\nmod tests {\n    use \
                    crate::handle::Volume;\n";
        let expected = [(1, "tree::Cursor"), (3, "space::of"), (3, "engine::X")];
        assert_eq!(found("log.rs", text), paths(expected));
    }

    #[test]
    fn calls_are_found_in_braces() {
        let text = "use crate::{a, b::{c::D, e as f},\n    g::H};\npub(in crate::space) fn i() {}";
        let expected = [(1, "a"), (1, "b::c::D"), (1, "b::f"), (1, "g::H"), (3, "space")];
        assert_eq!(found("log.rs", text), paths(expected));
        let up = complaints(&BTRFS, "tree.rs", "use crate::{block::TreeBlock, log::Wanted};\n");
        assert_eq!(up, [(1, "tree calls log, which is not below it".to_owned())]);
    }

    #[test]
    fn calls_that_leave_the_room_upwards_are_found() {
        let text = "use super::super::engine::Engine;\nuse super::path;\n";
        assert_eq!(found("tree/write.rs", text), paths([(1, "engine::Engine")]));
        let (in_room, out) = ("use super::super::path;\n", "let a = super::engine::open();\n");
        assert_eq!(found("tree/write/batch.rs", in_room), []);
        assert_eq!(found("tree.rs", out), paths([(1, "engine::open")]));
    }

    #[test]
    fn methods_for_types_of_another_room_are_found() {
        let (rooms, handle) = ("use crate::inode::Rooms;\n", "use crate::inode::{self, Handle};\n");
        let own = format!("{rooms}impl Upkeep for Rooms {{\n}}\nimpl<'v> Line<'v> {{\n}}\n");
        assert_eq!(complaints(&BTRFS, "upkeep.rs", &own), []);
        let foreign = format!("{rooms}{handle}impl Rooms {{\n}}\nimpl<'v> Handle<'v> {{\n}}\n");
        let complaint = |name| format!("upkeep adds methods to {name} of inode");
        let expected = [(3, complaint("Rooms")), (5, complaint("Handle"))];
        assert_eq!(complaints(&BTRFS, "upkeep.rs", &foreign), expected);
        let by_path = complaints(&BTRFS, "upkeep.rs", "impl crate::inode::Rooms {\n}\n");
        assert_eq!(by_path, [(1, complaint("Rooms"))]);
        assert_eq!(complaints(&BTRFS, "inode/join.rs", &foreign), []);
    }

    #[test]
    fn a_file_is_in_the_room_that_its_folder_is() {
        assert_eq!(room_of("tree/write/path.rs"), "tree");
        assert_eq!(room_of("tree.rs"), "tree");
        assert!(is_test("tests") && is_test("line_tests") && !is_test("transaction"));
    }
}
