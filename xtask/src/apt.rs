//! Installs the judges from the packages of Debian and Ubuntu.
//!
//! `btrfs-progs` of Debian 12 is too old; the suite `bookworm-backports` has a newer one. When no
//! configured suite offers a new enough version, setup adds that suite. It takes the mirror of the
//! release itself, in whichever of the two formats of sources it finds it. So a machine with a
//! mirror of its own keeps using it.

use std::fmt::Write;
use std::path::Path;

use offshoot_machine::{PROGS_AT_LEAST, progs_version};

use crate::shell::{Result, output, run};

const PACKAGE: &str = "btrfs-progs";

/// The file that adds the suite.
const ADDED: &str = "/etc/apt/sources.list.d/offshoot-backports.sources";

/// The command that installs the judges and `tools` without this program.
pub(crate) fn by_hand(tools: &[&str]) -> String {
    let tools = tools.join(" ");
    match release() {
        Some((id, codename)) if id == "debian" => {
            format!("apt-get install -t {codename}-backports {PACKAGE} {tools}")
        }
        _ => format!("apt-get install {PACKAGE} {tools}"),
    }
}

/// What [`install`] does to get `btrfs-progs`, in words.
pub(crate) fn progs_change() -> String {
    let (major, minor) = PROGS_AT_LEAST;
    format!(
        "install {PACKAGE} {major}.{minor} or newer; on Debian, if no configured source offers it, \
         add {ADDED}"
    )
}

/// Installs the packages `tools`, and `btrfs-progs` if it is missing. Needs root.
pub(crate) fn install(tools: &[&str], is_progs_missing: bool) -> Result {
    update();
    if !tools.is_empty() {
        apt_get(&[&["install", "--yes", "--no-install-recommends"], tools].concat())?;
    }
    if !is_progs_missing {
        return Ok(());
    }
    if !is_offered() {
        add_backports()?;
        update();
    }
    let Some((version, suite)) = best() else {
        let (major, minor) = PROGS_AT_LEAST;
        return Err(format!("no package source offers {PACKAGE} {major}.{minor} or newer"));
    };
    println!("{PACKAGE} {version} comes from {suite}");
    let package = format!("{PACKAGE}={version}");
    apt_get(&["install", "--yes", "--no-install-recommends", "-t", &suite, &package])
}

/// Runs `apt-get` so that it asks no questions.
fn apt_get(args: &[&str]) -> Result {
    run("env", &[&["DEBIAN_FRONTEND=noninteractive", "apt-get"], args].concat())
}

/// Reads the lists of packages. A failure does not end the task, because the source that fails may
/// not be the one with the judges. If it is, the search for the package fails.
fn update() {
    if let Err(reason) = apt_get(&["update", "--quiet"]) {
        println!("going on although {reason}");
    }
}

fn is_offered() -> bool {
    best().is_some()
}

/// The newest version that is new enough, with its suite. apt lists the newest first.
fn best() -> Option<(String, String)> {
    let table = output("apt-cache", &["madison", PACKAGE])?;
    // `btrfs-progs | 6.14-1~bpo12+1 | http://... bookworm-backports/main amd64 Packages`
    table.lines().find_map(|line| {
        let mut columns = line.split('|').map(str::trim);
        let (_, number, source) = (columns.next()?, columns.next()?, columns.next()?);
        let suite = source.split_whitespace().nth(1)?.split('/').next()?;
        let new_enough = progs_version(&format!("v{number}"))? >= PROGS_AT_LEAST;
        new_enough.then(|| (number.to_owned(), suite.to_owned()))
    })
}

/// Name and code name of the distribution.
fn release() -> Option<(String, String)> {
    let text = std::fs::read_to_string("/etc/os-release").ok()?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.strip_prefix('=')?.trim_matches('"').to_owned())
    };
    Some((field("ID")?, field("VERSION_CODENAME")?))
}

fn add_backports() -> Result {
    let (id, codename) = release().ok_or("/etc/os-release does not name the release")?;
    if id != "debian" {
        let (major, minor) = PROGS_AT_LEAST;
        return Err(format!(
            "{id} {codename} offers no {PACKAGE} {major}.{minor} or newer; a newer release does"
        ));
    }
    let mirror = sources()
        .into_iter()
        .find_map(|text| mirror(&text, &codename))
        .ok_or_else(|| format!("no package source for {codename} is configured"))?;
    let mut text = format!(
        "Types: deb\nURIs: {}\nSuites: {codename}-backports\nComponents: main\n",
        mirror.uri
    );
    if let Some(key) = mirror.signed_by {
        writeln!(text, "Signed-By: {key}").expect("writing to a string");
    }
    println!("writing {ADDED}");
    std::fs::write(ADDED, text).map_err(|error| format!("{ADDED}: {error}"))
}

/// The mirror of Debian that this machine uses, if it runs Debian.
pub(crate) fn debian_mirror() -> Option<String> {
    let (_, codename) = release().filter(|(id, _)| id == "debian")?;
    sources().into_iter().find_map(|text| mirror(&text, &codename)).map(|mirror| mirror.uri)
}

/// The texts of all files that name package sources.
fn sources() -> Vec<String> {
    let mut paths = vec![Path::new("/etc/apt/sources.list").to_owned()];
    let listed = std::fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    paths.extend(listed.map(|entry| entry.path()));
    // apt does not read files with other endings.
    paths.retain(|path| path.extension().is_some_and(|end| end == "list" || end == "sources"));
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect()
}

/// The source of a release.
#[derive(Debug, PartialEq, Eq)]
struct Mirror {
    uri: String,
    signed_by: Option<String>,
}

/// The mirror that `text` gives for the suite `codename`, in either format.
fn mirror(text: &str, codename: &str) -> Option<Mirror> {
    one_line(text, codename).or_else(|| deb822(text, codename))
}

/// `deb [signed-by=/key] http://mirror/debian bookworm main`
fn one_line(text: &str, codename: &str) -> Option<Mirror> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(inside) => inside.split_once(']')?,
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        let key = options.split_whitespace().find_map(|word| word.strip_prefix("signed-by="));
        (suite == codename)
            .then(|| Mirror { uri: uri.to_owned(), signed_by: key.map(str::to_owned) })
    })
}

/// Stanzas of `Name: value` lines, separated by empty lines.
fn deb822(text: &str, codename: &str) -> Option<Mirror> {
    let without_comments: Vec<_> =
        text.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    without_comments.split(|line| line.trim().is_empty()).find_map(|stanza| {
        let field = |name: &str| {
            stanza.iter().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                key.eq_ignore_ascii_case(name).then(|| value.trim())
            })
        };
        let suites = field("Suites")?;
        if field("Enabled").is_some_and(|value| value == "no")
            || !suites.split_whitespace().any(|suite| suite == codename)
        {
            return None;
        }
        let uri = field("URIs")?.split_whitespace().next()?.to_owned();
        // Only the path of a key ring is copied. A key in the stanza itself takes several lines,
        // and apt's own key ring has it too.
        let signed_by = field("Signed-By").filter(|key| key.starts_with('/'));
        Some(Mirror { uri, signed_by: signed_by.map(str::to_owned) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_found_in_both_formats() {
        let plain = "# comment\ndeb-src http://a/debian bookworm main\n\
                     deb http://b/debian bookworm main contrib\n";
        let found = mirror(plain, "bookworm").expect("a mirror");
        assert_eq!(found, Mirror { uri: "http://b/debian".to_owned(), signed_by: None });

        let signed = "deb [arch=amd64 signed-by=/k.gpg] http://c/debian bookworm main\n";
        let found = mirror(signed, "bookworm").expect("a mirror");
        assert_eq!(found.signed_by.as_deref(), Some("/k.gpg"));

        let stanzas = "Types: deb\n# why\nURIs: http://x/security\nSuites: bookworm-security\n\n\
                       Types: deb\nURIs: http://d/debian\nSuites: bookworm bookworm-updates\n\
                       Components: main\nSigned-By: /ring.gpg\n";
        let found = mirror(stanzas, "bookworm").expect("a mirror");
        let signed_by = Some("/ring.gpg".to_owned());
        assert_eq!(found, Mirror { uri: "http://d/debian".to_owned(), signed_by });
        assert_eq!(mirror(stanzas, "trixie"), None);
        assert_eq!(mirror("", "bookworm"), None);
    }
}
