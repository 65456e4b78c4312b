//! Exit codes: each verb with existing places, with missing ones, and with both.

use offshoot_testkit::btrfs::judges;

use super::change::ChangeSides;
use super::generated::is_apart;

/// Verbs with their first words. Places follow.
const VERBS: &[&str] = &[
    "ls",
    "ls -l",
    "ls -R",
    "ls -d",
    "cat",
    "stat -c %n",
    "find",
    "du",
    "df",
    "getfattr",
    "touch -c",
    "touch -d 2001-01-01",
    "chmod 755",
    "chmod -f 755",
    "chmod -R u+x",
    "chown 0:0",
    "chown -R 0:0",
    "truncate -s 10",
    "truncate -c -s 10",
    "mkdir",
    "mkdir -p",
    "mkdir -m 700",
    "rmdir",
    "rmdir -p",
    "rm",
    "rm -f",
    "rm -d",
    "cp -pt @e",
    "cp -at @e",
    "cp -pnt @e",
    "cp -put @e",
    "cp -pt @none",
    "cp -pt @a",
];

/// Verbs for two places. (`mv -n` of the core utilities reports no error for names with a slash or
/// a dot at their end, although they are wrong.)
const PAIRS: &[(&str, &[&str])] = &[
    ("cp -p", SOME),
    ("cp -aT", SOME),
    ("mv", SOME),
    ("mv -n", &["@a", "@d", "@none", "@dangling", "@to-d", "@a/x", "@none/x"]),
    ("ln", SOME),
    ("ln -f", SOME),
];

/// The places that are tried in pairs.
const SOME: &[&str] =
    &["@a", "@d/", "@a/", "@a/x", "@none/", "@none/x", "@dangling", "@to-a/", "@to-d", "@d/.."];

const PLACES: &[&str] = &[
    "@a",
    "@d",
    "@d/",
    "@a/",
    "@a/x",
    "@none",
    "@none/",
    "@none/x",
    "@dangling",
    "@dangling/",
    "@to-a",
    "@to-a/",
    "@to-d",
    "@to-d/",
    "@d/.",
    "@d/..",
    "@d/../a",
    "@d/x/..",
];

#[test]
fn codes_are_those_of_the_core_utilities() {
    if judges::require().is_none() {
        return;
    }
    let mut wrong = Vec::new();
    let mut check = |sides: &ChangeSides, line: &str| {
        let [ours, theirs] = sides.both(line, "");
        let said =
            [&ours, &theirs].map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
        let is_same =
            ours.status.code() == theirs.status.code() && said[0].is_empty() == said[1].is_empty();
        if !is_same {
            let codes = (ours.status.code(), theirs.status.code());
            wrong.push(format!("{line}: {codes:?}\n{}{}", said[0], said[1]));
        }
    };
    let mut all = |lines: Vec<String>| {
        let sides = ChangeSides::new();
        let mut apart = Vec::new();
        for line in lines {
            if is_apart(&sides.host(), &line) {
                apart.push(line);
            } else {
                check(&sides, &line);
            }
        }
        sides.compare();
        // These end with the same code, and leave different files.
        for line in &apart {
            check(&sides, line);
        }
    };
    for verb in VERBS {
        let places = ["@a @none @b"].iter().chain(PLACES);
        all(places.map(|place| format!("{verb} {place}")).collect());
    }
    for (verb, places) in PAIRS {
        for one in *places {
            all(places.iter().map(|other| format!("{verb} {one} {other}")).collect());
        }
    }
    // With a wrong command line, every verb of ours ends with 2.
    let sides = ChangeSides::new();
    for verb in VERBS {
        let [ours, theirs] = sides.both(&format!("{verb} --no-such-option @a"), "");
        assert_eq!(ours.status.code(), Some(2), "{verb}: {ours:?}");
        assert!(!theirs.status.success(), "{verb}: {theirs:?}");
    }
    assert!(wrong.is_empty(), "{} lines differ:\n{}", wrong.len(), wrong.join("\n"));
}
