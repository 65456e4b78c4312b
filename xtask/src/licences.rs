//! The licences of all dependencies.
//!
//! `cargo deny` is the thorough check, and runs where it is installed. Every machine checks the
//! most important rule, from the data of cargo itself: all dependencies are under a permissive
//! licence. The list of licences is the one in `deny.toml`.

use std::collections::BTreeSet;
use std::iter::Peekable;
use std::str::SplitWhitespace;

use offshoot_machine::repository;

use crate::shell::{Result, cargo, output};

/// Fails when a dependency is under no licence that `deny.toml` allows.
pub(crate) fn check() -> Result {
    let allowed = allowed()?;
    // The name, version and licence of every package that any target, feature or test needs.
    let tree = ["tree", "--workspace", "--all-features", "--edges", "all", "--target", "all"];
    let shown = ["--prefix", "none", "--format", "{p}\t{l}\t", "--locked"];
    let text = output("cargo", &[&tree[..], &shown].concat()).ok_or("`cargo tree` failed")?;
    let packages: BTreeSet<(&str, &str)> = text.lines().filter_map(package).collect();
    if packages.is_empty() {
        return Err("`cargo tree` shows no packages".to_owned());
    }
    let bad: Vec<_> = packages
        .iter()
        .filter(|(_, licence)| !is_allowed(licence, &allowed))
        .map(|(name, licence)| format!("{name}: {licence}"))
        .collect();
    if !bad.is_empty() {
        return Err(format!("licences that deny.toml does not allow: {}", bad.join("; ")));
    }
    println!("licences: {} packages, all permissive", packages.len());
    if output("cargo", &["deny", "--version"]).is_some() {
        return cargo(&["deny", "--workspace", "check", "licenses", "bans", "sources"]);
    }
    println!("skipped: duplicates and sources; `cargo install --locked cargo-deny` checks them");
    Ok(())
}

/// The name with its version, and the licence, in a line of `cargo tree`. After the second tab,
/// `(*)` marks a package that it printed before.
fn package(line: &str) -> Option<(&str, &str)> {
    let mut parts = line.split('\t');
    Some((parts.next().filter(|name| !name.is_empty())?, parts.next()?))
}

/// The strings of the list `allow` in `deny.toml`.
fn allowed() -> Result<Vec<String>> {
    let path = repository().join("deny.toml");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let list: Vec<_> = text
        .lines()
        .skip_while(|line| !line.starts_with("allow = ["))
        .skip(1)
        .take_while(|line| !line.starts_with(']'))
        .filter_map(|line| line.split('"').nth(1).map(str::to_owned))
        .collect();
    if list.is_empty() { Err("deny.toml allows no licence".to_owned()) } else { Ok(list) }
}

/// Whether one alternative of an SPDX expression is allowed as a whole. `AND` binds closer than
/// `OR`; a slash is an old way to write `OR`.
fn is_allowed(licence: &str, allowed: &[String]) -> bool {
    let spaced = licence.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let is_one_allowed = is_one_alternative_allowed(&mut words, allowed);
    // What is left over was not understood.
    is_one_allowed && words.next().is_none()
}

type ExpressionWords<'w> = Peekable<SplitWhitespace<'w>>;

fn is_one_alternative_allowed(words: &mut ExpressionWords<'_>, allowed: &[String]) -> bool {
    let mut is_one_allowed = are_all_terms_allowed(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        is_one_allowed |= are_all_terms_allowed(words, allowed);
    }
    is_one_allowed
}

fn are_all_terms_allowed(words: &mut ExpressionWords<'_>, allowed: &[String]) -> bool {
    let mut are_all_allowed = is_term_allowed(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        are_all_allowed &= is_term_allowed(words, allowed);
    }
    are_all_allowed
}

/// A licence with its exception, or an expression in parentheses.
fn is_term_allowed(words: &mut ExpressionWords<'_>, allowed: &[String]) -> bool {
    if words.next_if_eq(&"(").is_some() {
        return is_one_alternative_allowed(words, allowed) & words.next_if_eq(&")").is_some();
    }
    let mut name = Vec::new();
    while let Some(word) = words.next_if(|word| !["AND", "OR", "(", ")"].contains(word)) {
        name.push(word);
    }
    allowed.contains(&name.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_tree_are_understood() {
        assert_eq!(
            package("tar v0.4.1\tMIT OR Apache-2.0\t"),
            Some(("tar v0.4.1", "MIT OR Apache-2.0"))
        );
        assert_eq!(package("x v1.0.0 (/a b)\tMIT\t (*)"), Some(("x v1.0.0 (/a b)", "MIT")));
        // A package without a licence has an empty text, which no list allows.
        assert_eq!(package("x v1.0.0\t\t"), Some(("x v1.0.0", "")));
        assert_eq!(package(""), None);
    }

    #[test]
    fn expressions_are_understood() {
        let allowed = ["MIT", "Unicode-3.0", "Apache-2.0"].map(str::to_owned);
        for good in
            ["MIT", "GPL-3.0 OR MIT", "MIT/Apache-2.0", "(MIT OR Apache-2.0) AND Unicode-3.0"]
        {
            assert!(is_allowed(good, &allowed), "{good}");
        }
        for bad in [
            "GPL-2.0-only",
            "",
            "MIT AND GPL-3.0",
            "LGPL-2.1 OR MPL-2.0",
            "(MIT OR Apache-2.0) AND GPL-3.0",
            "GPL-3.0 AND (MIT OR Apache-2.0)",
            "(MIT OR GPL-3.0",
            "MIT)",
        ] {
            assert!(!is_allowed(bad, &allowed), "{bad}");
        }
    }
}
