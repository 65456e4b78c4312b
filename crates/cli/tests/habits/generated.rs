//! Random combinations of the options that both sides have. A seed draws each line, and the line
//! runs beside the core utilities.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_or};

use super::change::ChangeSides;
use super::look::{filled, is_same};
use super::{is_xfs, on_both};

fn pick<'t>(random: &mut Random, from: &[&'t str]) -> &'t str {
    from[usize::try_from(random.below(from.len() as u64)).expect("small")]
}

/// Some of `from`, each at most once.
fn some(random: &mut Random, from: &[&str]) -> String {
    let taken: Vec<&str> = from.iter().copied().filter(|_| random.below(3) == 0).collect();
    taken.join(" ")
}

/// Up to three of `from`.
fn few(random: &mut Random, from: &[&str]) -> String {
    let count = 1 + random.below(3);
    (0..count).map(|_| pick(random, from)).collect::<Vec<_>>().join(" ")
}

const SEEN: &[&str] = &[
    "@/od",
    "@/od/sub",
    "@/od/.hidden",
    "@/empty",
    "@/empty/dir",
    "@/od/b.c",
    "@/od/a.c",
    "@/od/big",
    "@/od/link",
    "@/od/dangling",
    "@/od/to-sub",
    "@/od/fifo",
    "@/od/null",
    "@/od/sub/hard",
    "@/od/empty",
    "@/home",
    "@/none",
    "@/od/none",
    "@/od/b.c/x",
];

/// A condition of find.
fn condition(random: &mut Random, depth: u32) -> String {
    let inner = |random: &mut Random| condition(random, depth + 1);
    match random.below(if depth > 2 { 11 } else { 15 }) {
        0 => format!("-name '{}'", pick(random, &["*.c", "[a-c]*", "?", "*", ".*", "s?b"])),
        1 => format!("-type {}", pick(random, &["f", "d", "l", "f,l", "p", "b,c"])),
        2 => {
            let size = ["+1M", "-2k", "70000c", "1", "0", "+0", "-100c", "3000000c", "69k"];
            format!("-size {}", pick(random, &size))
        }
        3 => format!("-links {}", pick(random, &["1", "2", "+1", "-2"])),
        4 => format!("-uid {}", pick(random, &["0", "1000", "+999", "-1000"])),
        5 => format!("-perm {}", pick(random, &["644", "-u+x", "/4000", "-1000", "/222", "0"])),
        6 => format!("-newer @/od/{}", pick(random, &["b.c", "a.c", "link", "sub"])),
        7 => format!("-mtime {}", pick(random, &["0", "+1000", "-1", "+0"])),
        8 => "-empty".to_owned(),
        9 => format!("-path '*{}'", pick(random, &["/sub/*", "od/*.c", "/[.]*", "deep"])),
        10 => pick(random, &["-true", "-false", "-prune", "-print"]).to_owned(),
        11 => format!("! {}", inner(random)),
        12 => format!("( {} -o {} )", inner(random), inner(random)),
        13 => format!("{} {}", inner(random), inner(random)),
        _ => format!("{} -o {}", inner(random), inner(random)),
    }
}

#[test]
fn what_is_shown() {
    let Some(beside) = filled() else { return };
    let mut random = Random::new(seed_or(20));
    let image = &beside.disks.images()[0];
    let mount = beside.disks.mount("ro");
    let both = |ours: &str, theirs: &str, sorted| {
        is_same(image, mount.path(), (ours, theirs), sorted, |text| text)
    };
    for _ in 0..60 {
        let random = &mut random;
        let flags =
            some(random, &["-a", "-A", "-1", "-r", "-t", "-S", "-i", "-d", "-R", "-n", "-h"]);
        let line = format!("ls {flags} {}", few(random, SEEN));
        let mut compared = both(&line, &format!("{line} --time-style=long-iso"), false);

        let depth = pick(random, &["", "", "-maxdepth 1", "-mindepth 1", "-depth", "-xdev"]);
        let end = pick(random, &["", "-print", "-print0"]);
        // Without parentheses, an action would belong to the last condition only.
        let line = format!("find {} {depth} ( {} ) {end}", few(random, SEEN), condition(random, 0));
        compared |= both(&line, &line, true);

        let flags = some(random, &["-a", "-h", "-c", "-x", "-0"]);
        let depth =
            if flags.contains("-a") { "" } else { pick(random, &["", "-s", "-d 1", "-d 0"]) };
        let line = format!("du {flags} {depth} {}", few(random, SEEN));
        compared |= both(&line, &line, true);

        let letters = [
            "%a", "%A", "%b", "%B", "%f", "%F", "%g", "%h", "%i", "%n", "%N", "%s", "%t", "%T",
            "%u", "%o", "%x", "%y", "%z", "%w", "%X", "%Y", "%Z", "%W", "%10s", "%-10s", "%010s",
            "%#a", "%5u", "%%", "%r", "%Hr", "%Lr", "text", "%12n", "%-12F",
        ];
        let format: Vec<&str> = (0..=random.below(5)).map(|_| pick(random, &letters)).collect();
        let flag = pick(random, &["", "-L"]);
        let line = format!("stat {flag} -c '{}' {}", format.join("|"), few(random, SEEN));
        compared |= both(&line, &line, false);
        assert!(compared, "nothing is compared");

        let line = format!("df {}", few(random, &["@/", "@/od", "@/home", "@/none"]));
        let output = super::offshoot(
            image.parent().expect("a directory"),
            &super::words(&line.replace('@', &format!("{}:", image.display()))),
        );
        let judge = offshoot_testkit::run::command("df")
            .args(
                super::words(&line.replace('@', mount.path().to_str().expect("text"))).split_off(1),
            )
            .output()
            .expect("df is there");
        let lines = |bytes: &[u8]| bytes.split(|&byte| byte == b'\n').count();
        assert_eq!(output.status.code(), judge.status.code(), "{line}");
        assert_eq!(lines(&output.stdout), lines(&judge.stdout), "{line}");
    }
}

const PLACES: &[&str] = &[
    "@a",
    "@b",
    "@d",
    "@d/x",
    "@d/sub",
    "@d/sub/deep",
    "@d/sub/deep/z",
    "@d/sub/y.o",
    "@e",
    "@empty",
    "@empty/one",
    "@t",
    "@t/1",
    "@t/2",
    "@t/3",
    "@to-a",
    "@to-d",
    "@dangling",
    "@none",
    "@n/o/ne",
    "@new",
    "@d/new",
    "@e/new",
    "@a/x",
    "@to-d/x",
    "@d/",
];

/// A line that changes files, or is refused.
fn change(random: &mut Random) -> String {
    let places = few(random, PLACES);
    let (one, other) = (pick(random, PLACES), pick(random, PLACES));
    let date = pick(
        random,
        &[
            "-d '2001-02-03 04:05:06Z'",
            "-d 2011-12-13",
            "-t 200102030405.06",
            "-r @t/1",
            "-d '1970-01-02 00:00:00.123456789 +0100'",
        ],
    );
    match random.below(10) {
        0 => {
            let owner = pick(random, &["1:2", "7", ":8", "0:0", "1000:100"]);
            // The links that -R follows have an option of their own.
            let flag = pick(random, &["", "-R", "--no-dereference"]);
            format!("chown {flag} {owner} {places}")
        }
        1 => {
            let flags = some(random, &["-a", "-m", "-c", "--no-dereference"]);
            format!("touch {flags} {date} {places}")
        }
        2 => {
            // With these, mkdir keeps the umask for bits that the mode does not name.
            let mode = Some(mode(random)).filter(|mode| !mode.contains(['s', 't']));
            let mode = mode.unwrap_or_else(|| "u=rwx,go-w".to_owned());
            let flags = ["", "-p", "-pv", &format!("-v -m {mode}"), &format!("-p -m {mode}")];
            format!("mkdir {} {places}", pick(random, &flags))
        }
        3 => format!("rmdir {} {places}", some(random, &["-p"])),
        4 => format!("rm {} {places}", some(random, &["-r", "-f", "-v", "-d"])),
        5 => {
            let flags = some(random, &["-n", "-f", "-v"]);
            match random.below(3) {
                0 => format!("mv {flags} {places} {other}"),
                1 => format!("mv {flags} -T {one} {other}"),
                _ => format!("mv {flags} {one} {other}"),
            }
        }
        6 => format!("ln {} {one} {other}", some(random, &["-f", "-T", "-v", "-n"])),
        7 => {
            // With -f, ln looks for the target text in the working directory, and would compare
            // files.
            let (flags, targets) = match random.below(3) {
                0 => ("-f -T -v", ["./d", "nowhere", "d/sub"]),
                1 => ("-n -v", ["a", "none", "d/sub"]),
                _ => ("", ["a", "none", "./d"]),
            };
            format!("ln -s {flags} {} {other}", pick(random, &targets))
        }
        8 => {
            // Below a directory, the order of names decides by which name a file is reported.
            let flags = [some(random, &["-R", "-f"]), some(random, &["-v", "-c", "-f"])];
            let flags = pick(random, &[&flags[0], &flags[1]]);
            format!("chmod {flags} {} {places}", mode(random))
        }
        _ => {
            // Attributes that `cp` of the core utilities preserves only on request. Ours always
            // preserves them.
            let kept = ["-a", "-dp", "-p --preserve=links", "-rp --preserve=links"];
            let kept = pick(random, &kept);
            let flags = some(random, &["-f", "-v", "-n", "-u", "-x"]);
            match random.below(4) {
                0 => format!("cp {kept} {flags} -t {other} {places}"),
                1 => format!("cp {kept} {flags} {places} {other}"),
                2 => format!("cp {kept} {flags} -T {one} {other}"),
                _ => format!("cp {kept} {flags} {one} {other}"),
            }
        }
    }
}

/// Whether the core utilities do a line in a way of their own:
///
/// - A directory is copied into itself, or one source is inside of another. `cp` copies some files
///   before it notices, and we copy none.
/// - `cp` copies to a file or directory with special bits, or makes something in a directory with
///   set-id bits. The copy gets these bits too, although `cp` preserves the mode of the source.
/// - Two sources name the same entry of a directory by different links. We take them for one.
pub(super) fn is_apart(host: &Path, line: &str) -> bool {
    let words = super::words(line);
    if words.iter().any(|word| word == "@d/x") && words.iter().any(|word| word == "@to-d/x") {
        return true;
    }
    if words[0] != "cp" {
        return false;
    }
    let real = |place: &str| {
        let path = host.join(place);
        let parent = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
        path.canonicalize().ok().or_else(parent)
    };
    let mut places: Vec<&str> = words.iter().filter_map(|word| word.strip_prefix('@')).collect();
    if !words.iter().any(|word| word == "-t") {
        places.rotate_right(1);
    }
    let Some((target, sources)) = places.split_first() else { return false };
    let Some(target) = real(target) else { return false };
    let sources: Vec<PathBuf> = sources.iter().filter_map(|place| real(place)).collect();
    let is_inside = |one: &Path, of: &PathBuf| of.is_dir() && one.starts_with(of);
    let is_any = |one: &PathBuf| sources.iter().any(|of| one != of && is_inside(one, of));
    let makes_directories = sources.iter().any(|source| source.is_dir());
    let top = if target.exists() { &target } else { target.parent().expect("inside of host") };
    let is_named = words.iter().any(|word| word == "-T");
    sources.iter().any(|source| is_inside(&target, source) || is_any(source))
        || has_special_bits(top, makes_directories, is_named)
}

/// Whether a file at `path` or below it has special bits. Directories count only if directories are
/// made. The sticky bit of the top directory counts only if it is the copy itself.
fn has_special_bits(path: &Path, do_directories: bool, is_copy: bool) -> bool {
    let Ok(stat) = path.symlink_metadata() else { return false };
    let special = stat.mode() & 0o7000;
    if !stat.is_dir() {
        return special != 0;
    }
    do_directories && (if is_copy { special } else { special & 0o6000 }) != 0
        || path
            .read_dir()
            .into_iter()
            .flatten()
            .flatten()
            .any(|entry| has_special_bits(&entry.path(), do_directories, true))
}

/// A mode of chmod: octal digits, or up to three clauses.
fn mode(random: &mut Random) -> String {
    if random.below(3) == 0 {
        let octal = ["644", "0755", "7", "4711", "00755", "02000", "1777", "0"];
        return pick(random, &octal).to_owned();
    }
    let clause = |random: &mut Random| {
        let who = pick(random, &["", "u", "g", "o", "a", "ug", "go", "uo"]);
        let parts = (0..=random.below(2)).map(|_| {
            let sign = pick(random, &["+", "-", "="]);
            let letters = ["", "r", "w", "x", "X", "s", "t", "rw", "rwX", "xs", "u", "g", "o"];
            format!("{sign}{}", pick(random, &letters))
        });
        format!("{who}{}", parts.collect::<String>())
    };
    let mode = (0..=random.below(3)).map(|_| clause(random)).collect::<Vec<_>>().join(",");
    // A mode that begins with two dashes would be a long option.
    mode.strip_prefix('-').filter(|rest| rest.starts_with('-')).map_or(mode.clone(), str::to_owned)
}

fn what_is_changed() {
    const COPIES: usize = 2;
    // The kernel judges a volume of XFS after each line, which takes as long as ten lines.
    let (volumes, lines_each) = if is_xfs() { (1, 30) } else { (6, 36) };
    if judges::require().is_none() {
        return;
    }
    let mut random = Random::new(seed_or(20));
    for _ in 0..volumes {
        let sides = ChangeSides::new();
        let mut lines = Vec::new();
        let mut copies = 0;
        // Many copies are lines that [`is_apart`] leaves out.
        for _ in 0..lines_each * 10 {
            if lines.len() >= lines_each && copies >= COPIES {
                break;
            }
            let line = change(&mut random);
            if is_apart(&sides.host(), &line) {
                continue;
            }
            lines.push(line);
            let told = std::panic::catch_unwind(|| {
                sides.run(lines.last().expect("one"), "");
                if is_xfs() {
                    sides.judge();
                }
            });
            assert!(told.is_ok(), "the lines: {lines:#?}");
            copies += usize::from(lines.last().is_some_and(|line| line.starts_with("cp ")));
        }
        assert!(copies >= COPIES, "only {copies} copies ran: {lines:#?}");
        let same = std::panic::catch_unwind(|| sides.compare());
        assert!(same.is_ok(), "the lines: {lines:#?}");
    }
}

on_both! {
    what_is_changed,
}
