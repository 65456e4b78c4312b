//! The names of types: a search for a name finds one type.
//!
//! A type name is defined once in the repository, tests included, and is not a word that fits any
//! type. Associated types do not count: their trait is part of their name.

use std::collections::BTreeMap;
use std::path::Path;

use crate::shell::Result;
use crate::sources;

/// The folders with sources.
const PLACES: &[&str] = &["bench", "crates", "fuzz", "xtask"];

/// Words that do not say what a type is.
const VAGUE: &str = "At By Context Disk End Entry File Found Held How Id Is Item Items Job Kind \
                     Known Level Line Made Map Name Names Node Op Order Ours Outcome Page Pair \
                     Part Pending Piece Place Plan Problem Report Row Run Seen Shown Side Sides \
                     Source Stage State Step Story Stream Tally Target Task Told Work";

/// Names that every crate may define for itself.
const OF_EACH_CRATE: &[&str] = &["Result"];

/// Names of the library that people embed. They are those that its users know from the standard
/// library and from other filesystems, so another crate may define them once too.
const FACADE: &[(&str, &str)] = &[("crates/offshoot/src", "DirEntry OpenOptions Volume")];

/// A definition of a type: its name, file and line.
type TypeName = (String, String, usize);

/// Checks the names of all types.
///
/// # Errors
/// Names that are vague or have several definitions and are not in [`FACADE`], and names in that
/// list that its folder does not define.
pub(crate) fn check() -> Result {
    let mut names = Vec::new();
    sources::each(PLACES, &["rs"], |file, text| {
        let file = file.to_string_lossy();
        for (number, line) in (1..).zip(text.lines()) {
            names.extend(defined(line).map(|name| (name.to_owned(), file.to_string(), number)));
        }
    })?;
    let complaints = complaints(&names, FACADE);
    if complaints.is_empty() {
        return Ok(());
    }
    Err(format!("the names of types:\n{}", complaints.join("\n")))
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

/// What is wrong with `names`, if definitions in the folders of `facade` do not count.
fn complaints(names: &[TypeName], facade: &[(&str, &str)]) -> Vec<String> {
    let is_vague = |name: &str| VAGUE.split_whitespace().any(|word| word == name);
    let is_in = |file: &str, folder: &str| Path::new(file).starts_with(folder);
    let is_facade = |name: &str, file: &str| {
        let has_name = |list: &str| list.split_whitespace().any(|word| word == name);
        facade.iter().any(|(folder, list)| is_in(file, folder) && has_name(list))
    };
    let mut by_name: BTreeMap<&str, Vec<(&str, usize)>> = BTreeMap::new();
    for (name, file, line) in names.iter().filter(|(name, file, _)| !is_facade(name, file)) {
        by_name.entry(name).or_default().push((file, *line));
    }
    let mut complaints = Vec::new();
    for (&name, places) in &by_name {
        let shown: Vec<_> = places.iter().map(|(file, line)| format!("{file}:{line}")).collect();
        if is_vague(name) {
            complaints.push(format!("{name} fits any type: {}", shown.join(", ")));
        } else if places.len() > 1 && !OF_EACH_CRATE.contains(&name) {
            complaints.push(format!("{name} is defined several times: {}", shown.join(", ")));
        }
    }
    for (folder, list) in facade {
        let is_defined =
            |word: &str| names.iter().any(|(name, file, _)| name == word && is_in(file, folder));
        for name in list.split_whitespace().filter(|name| !is_defined(name)) {
            complaints.push(format!("{name} in {folder} is gone: take it off the list"));
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
    }

    #[test]
    fn a_name_of_the_facade_does_not_count_and_must_be_there() {
        let names = [("Volume", "crates/a/src/lib.rs"), ("Volume", "crates/b/src/lib.rs")];
        let names = names.map(|(name, file)| (name.to_owned(), file.to_owned(), 7));
        let facade = [("crates/a", "Volume")];
        assert!(complaints(&names, &facade).is_empty());
        assert_eq!(
            complaints(&names[1..], &facade),
            ["Volume in crates/a is gone: take it off the list"]
        );
    }
}
