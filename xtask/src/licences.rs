//! The licences of all dependencies.
//!
//! `cargo deny` is the thorough check and runs where it is installed. The rule that
//! matters most, that everything is under a permissive licence, is checked on every machine
//! from what cargo itself knows; the list of licences is the one in `deny.toml`.

use serde_json::Value;

use crate::shell::{Result, cargo, output};

/// Fails when a dependency is under no licence that `deny.toml` allows.
pub(crate) fn check() -> Result {
    let allowed = allowed()?;
    let args = ["metadata", "--format-version", "1", "--locked"];
    let text = output("cargo", &args).ok_or("`cargo metadata` failed")?;
    let metadata: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let packages = metadata["packages"].as_array().ok_or("no packages in the metadata")?;
    let mut bad = Vec::new();
    for package in packages {
        let licence = package["license"].as_str().unwrap_or("none");
        if !is_allowed(licence, &allowed) {
            bad.push(format!("{}: {licence}", package["name"]));
        }
    }
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

/// The strings of the list `allow` in `deny.toml`.
fn allowed() -> Result<Vec<String>> {
    let path = offshoot_testkit::fixture::repository().join("deny.toml");
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

/// Whether one alternative of an SPDX expression is allowed as a whole. Parentheses are
/// taken as if they were not there, which makes the answer stricter, never laxer, for
/// the expressions that crates have.
fn is_allowed(licence: &str, allowed: &[String]) -> bool {
    let plain = licence.replace(['(', ')'], "").replace('/', " OR ");
    let ok = |one: &str| allowed.iter().any(|known| known == one.trim());
    plain.split(" OR ").any(|alternative| alternative.split(" AND ").all(ok))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_understood() {
        let allowed = ["MIT", "Unicode-3.0", "Apache-2.0"].map(str::to_owned);
        for good in
            ["MIT", "GPL-3.0 OR MIT", "MIT/Apache-2.0", "(MIT OR Apache-2.0) AND Unicode-3.0"]
        {
            assert!(is_allowed(good, &allowed), "{good}");
        }
        for bad in ["GPL-2.0-only", "none", "MIT AND GPL-3.0", "LGPL-2.1 OR MPL-2.0"] {
            assert!(!is_allowed(bad, &allowed), "{bad}");
        }
    }
}
