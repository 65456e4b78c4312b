//! The names of types: a search for a name finds one type.
//!
//! A type name is defined once in the repository, tests included, and is not a word that fits any
//! type. Associated types do not count: their trait is part of their name.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use offshoot_machine::repository;

use crate::shell::Result;

/// The folders with sources.
const PLACES: &[&str] = &["bench", "crates", "fuzz", "xtask"];

/// Words that do not say what a type is.
const VAGUE: &str = "At By Context Disk End Entry File Found Held How Id Is Item Items Job Kind \
                     Known Level Line Made Map Name Names Node Op Order Ours Outcome Page Pair \
                     Part Pending Piece Place Plan Problem Report Row Run Seen Shown Side Sides \
                     Source Stage State Step Story Stream Tally Target Task Told Work";

/// Names that every crate may define for itself.
const OF_EACH_CRATE: &[&str] = &["Result"];

/// Names that a folder still defines although they are vague, or although another file has them
/// too. Remove a name from this list when the code no longer needs it. Never add one.
const STILL: &[(&str, &str)] = &[
    (
        "crates/btrfs/src",
        "Above Begun Block Change Chosen Chunk Claim Content Copied Counters Destination \
         Directory Edits End Engine Entry Failure Fault Found Handle Held How Inline Item Items \
         Kind Known Length Live Maker Model Moving Name Node Noted OpenOptions Outcome \
         Owners Pair Part Pending Phase Piece Place Places Progress Record Report \
         Row Run Seen Segment Shard Shared Source Space Start State Step Sums Target Told Total \
         Tree Trees Usage Volume Walk Wanted Window Work Xattr",
    ),
    (
        "crates/cli/src",
        "Attribute Bits Change Chosen Claim Content Copying Counters Disk Engine Failure Found \
         Held Hidden Job Kind Length Level Line Listing Live Made Maker Names Open Opened Order \
         Ours Outcome Owners Pair Part Phase Place Places Progress Ranges Reflink Removal \
         Report Row Sandbox Seen Shown Side Source Space Start State Stream Sums Told Tree \
         Usage Walk Wanted",
    ),
    ("crates/offshoot", "DirEntry Name OpenOptions Removal Volume"),
    (
        "crates/transfer",
        "Attribute Begun Context Copied Copying Counters Destination Directory DirectoryRef \
         Failure Found Handle Hidden Job Known Level Made Name Names Order Outcome Pending \
         Progress Record Reflink Sandbox Seen Segment Shared Source State Stream Target Total \
         Tree Trouble Walk Window Xattr",
    ),
];

/// A definition of a type: its name, file and line.
type TypeName = (String, String, usize);

/// Checks the names of all types.
///
/// # Errors
/// Names that are vague or have several definitions and are not in [`STILL`], and names in that
/// list that no longer need it.
pub(crate) fn check() -> Result {
    let mut names = Vec::new();
    for place in PLACES {
        let place = repository().join(place);
        visit(&place, &mut names).map_err(|error| format!("{}: {error}", place.display()))?;
    }
    let complaints = complaints(&names, STILL);
    if complaints.is_empty() {
        return Ok(());
    }
    Err(format!("the names of types:\n{}", complaints.join("\n")))
}

fn visit(path: &Path, names: &mut Vec<TypeName>) -> std::io::Result<()> {
    if path.is_dir() {
        let entries: std::io::Result<Vec<PathBuf>> =
            fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect();
        let mut entries = entries?;
        entries.sort();
        // A separate workspace, such as `fuzz`, builds into its own folder `target`.
        entries.retain(|path| path.file_name().is_some_and(|name| name != "target"));
        return entries.iter().try_for_each(|entry| visit(entry, names));
    }
    if path.extension().is_some_and(|extension| extension == "rs") {
        let file = path.strip_prefix(repository()).unwrap_or(path).to_string_lossy();
        for (number, line) in (1..).zip(fs::read_to_string(path)?.lines()) {
            names.extend(defined(line).map(|name| (name.to_owned(), file.to_string(), number)));
        }
    }
    Ok(())
}

/// The name of the type that a line defines. An indented `type` is an associated type.
fn defined(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let is_indented = code.len() < line.len();
    let code = match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => code,
    };
    let (keyword, rest) = code.split_once(' ')?;
    if !(["struct", "enum", "trait", "union"].contains(&keyword)
        || keyword == "type" && !is_indented)
    {
        return None;
    }
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    Some(&rest[..end]).filter(|name| name.starts_with(|c: char| c.is_uppercase()))
}

/// What is wrong with `names`, if the folders in `still` may keep theirs.
fn complaints(names: &[TypeName], still: &[(&str, &str)]) -> Vec<String> {
    let is_in = |file: &str, folder: &str| Path::new(file).starts_with(folder);
    let is_vague = |name: &str| VAGUE.split_whitespace().any(|word| word == name);
    let is_kept = |name: &str, file: &str| {
        let listed = |list: &str| list.split_whitespace().any(|word| word == name);
        still.iter().any(|(folder, list)| is_in(file, folder) && listed(list))
    };
    let mut by_name: BTreeMap<&str, Vec<(&str, usize)>> = BTreeMap::new();
    for (name, file, line) in names {
        by_name.entry(name).or_default().push((file, *line));
    }
    let mut complaints = Vec::new();
    for (&name, places) in &by_name {
        let others: Vec<_> = places.iter().filter(|(file, _)| !is_kept(name, file)).collect();
        let shown: Vec<_> = others.iter().map(|(file, line)| format!("{file}:{line}")).collect();
        if is_vague(name) && !others.is_empty() {
            complaints.push(format!("{name} fits any type: {}", shown.join(", ")));
        } else if others.len() > 1 && !OF_EACH_CRATE.contains(&name) {
            complaints.push(format!("{name} is defined several times: {}", shown.join(", ")));
        }
    }
    for (folder, list) in still {
        for name in list.split_whitespace() {
            let places = by_name.get(name).map_or(&[][..], Vec::as_slice);
            let is_defined = places.iter().any(|(file, _)| is_in(file, folder));
            if !is_defined || places.len() == 1 && !is_vague(name) {
                complaints.push(format!("{name} in {folder} is mended: take it off the list"));
            }
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_found_and_associated_types_are_not() {
        let lines = [
            "pub(crate) struct Wide<'a> {",
            "    pub enum Inner {",
            "type Alias<T = ()> = Option<T>;",
            "trait Bare {}",
            "    type Item;",
            "    type Item = u64;",
            "pub struct $name(u64);",
            "struct_of(State)",
            "// struct State",
            "pub use state::State;",
        ];
        let found: Vec<_> = lines.into_iter().filter_map(defined).collect();
        assert_eq!(found, ["Wide", "Inner", "Alias", "Bare"]);
    }

    #[test]
    fn a_name_that_two_files_define_is_found_and_so_is_a_vague_one() {
        let names = [
            ("Cursor", "crates/a/src/lib.rs"),
            ("Cursor", "crates/b/tests/log.rs"),
            ("State", "crates/a/src/lib.rs"),
            ("Latch", "crates/a/src/lib.rs"),
            ("Result", "crates/a/src/lib.rs"),
            ("Result", "crates/b/src/lib.rs"),
        ];
        let names = names.map(|(name, file)| (name.to_owned(), file.to_owned(), 7));
        let twice = "Cursor is defined several times: crates/a/src/lib.rs:7, \
                     crates/b/tests/log.rs:7";
        let vague = "State fits any type: crates/a/src/lib.rs:7";
        assert_eq!(complaints(&names, &[]), [twice, vague]);
        // One definition may stay without the list, so the list needs one folder alone.
        assert!(complaints(&names, &[("crates/a", "Cursor State")]).is_empty());
        let mended = |name: &str| format!("{name} in crates/a/src is mended: take it off the list");
        assert_eq!(
            complaints(&names, &[("crates/a/src", "Cursor Latch Gone State")]),
            [mended("Latch"), mended("Gone")]
        );
        // A folder keeps its own definitions alone, not those of a folder with a longer name.
        assert_eq!(complaints(&names[2..], &[("crates/a/src/li", "State")]).len(), 2);
    }
}
