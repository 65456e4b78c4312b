//! Each verb beside the core utility of the same name.
//!
//! A script runs twice over the same files: with the core utilities in a directory, and with the
//! program in a volume. Every command must end with the same exit code on both sides, and both
//! trees must be the same afterwards. Our `cp` keeps attributes, so its counterparts are `cp -p`
//! and `cp -a`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use offshoot_testkit::run::command;
use offshoot_testkit::scratch_dir;

use super::{check, does, offshoot, on_both, volume};

/// Makes the files that both sides start with.
fn fill(root: &Path) {
    let dir = |path: &str| fs::create_dir(root.join(path)).expect("a directory");
    let file = |path: &str, text: &str| fs::write(root.join(path), text).expect("a file");
    let link = |path: &str, to: &str| symlink(to, root.join(path)).expect("a symbolic link");
    for path in ["d", "d/sub", "e", "empty", "full", "full/sub"] {
        dir(path);
    }
    file("a", "contents of a\n");
    file("b", "b\n");
    file("big", &"twelve bytes".repeat(100_000));
    file("d/a", "another a\n");
    file("d/sub/x", "x\n");
    file("e/x", "x in e\n");
    file("full/sub/y", "y\n");
    fs::hard_link(root.join("b"), root.join("b2")).expect("a hard link");
    link("to-a", "a");
    link("to-d", "d");
    link("nowhere", "no/such/file");
    link("loop", "loop");
    link("d/up", "../a");
    let mode = |path: &str, mode| {
        fs::set_permissions(root.join(path), fs::Permissions::from_mode(mode)).expect("a mode");
    };
    mode("a", 0o640);
    mode("d/sub", 0o2711);
    let fifo = rustix::fs::FileType::Fifo;
    let path = root.join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, path, fifo, rustix::fs::Mode::from_raw_mode(0o600), 0)
        .expect("a fifo");
}

/// Every file by its path: type, permissions, links and contents.
type PathListing = BTreeMap<PathBuf, String>;

fn list(root: &Path) -> PathListing {
    let mut found = PathListing::new();
    let mut names = BTreeMap::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(root.join(&dir)).expect("a directory is listed") {
            let path = dir.join(entry.expect("an entry").file_name());
            let at = root.join(&path);
            let stat = at.symlink_metadata().expect("it is there");
            let kind = stat.file_type();
            let contents = if kind.is_dir() {
                todo.push(path.clone());
                "directory".to_owned()
            } else if kind.is_symlink() {
                format!("link to {}", fs::read_link(&at).expect("a link").display())
            } else if kind.is_fifo() {
                "fifo".to_owned()
            } else {
                names.entry(stat.ino()).or_insert_with(Vec::new).push(path.clone());
                fs::read_to_string(&at).expect("a file is read")
            };
            found.insert(path, format!("{:04o} {contents}", stat.mode() & 0o7777));
        }
    }
    for mut same in names.into_values().filter(|names| names.len() > 1) {
        same.sort();
        for path in &same {
            found.entry(path.clone()).and_modify(|text| *text = format!("{same:?} {text}"));
        }
    }
    found
}

/// The two sides of a script.
struct ScriptSides {
    dir: tempfile::TempDir,
}

impl ScriptSides {
    fn new() -> Self {
        let dir = scratch_dir();
        let host = dir.path().join("host");
        fs::create_dir(&host).expect("a directory");
        fill(&host);
        volume(dir.path(), "v.img", 128);
        does(dir.path(), "cp -r host/. v.img:/");
        Self { dir }
    }

    /// Runs one command on both sides.
    #[track_caller]
    fn run(&self, line: &str) {
        let dir = self.dir.path();
        let (verb, rest) = line.split_once(' ').expect("a verb and more");
        let ours: Vec<String> = ours(verb, rest);
        let output = offshoot(dir, &ours);
        let said = String::from_utf8_lossy(&output.stderr);
        let theirs = command(verb)
            .args(theirs(verb, rest))
            .current_dir(dir.join("host"))
            .env("LC_ALL", "C")
            .output()
            .expect("the core utilities are there");
        let judge = String::from_utf8_lossy(&theirs.stderr);
        assert_eq!(output.status.code(), theirs.status.code(), "{line}\n{said}\n{judge}");
        assert_eq!(said.is_empty(), judge.is_empty(), "{line}\n{said}\n{judge}");
        let out = dir.join("out");
        if out.exists() {
            fs::remove_dir_all(&out).expect("it is removed");
        }
        does(dir, "extract v.img out");
        let (found, expected) = (list(&out), list(&dir.join("host")));
        for path in found.keys().chain(expected.keys()) {
            let sides =
                (found.get(path).map(|text| cut(text)), expected.get(path).map(|text| cut(text)));
            assert_eq!(sides.0, sides.1, "{line}: {}\n{said}\n{judge}", path.display());
        }
    }
}

fn cut(text: &str) -> &str {
    &text[..text.len().min(100)]
}

/// The words for the program. Words that are not options become places in the volume, except the
/// target text of a symbolic link and the argument of an option.
fn ours(verb: &str, rest: &str) -> Vec<String> {
    let is_symbolic = verb == "ln" && rest.starts_with("-s");
    let mut words = vec![verb.to_owned()];
    let mut plain = 0;
    let mut is_mode = false;
    for word in rest.split_whitespace() {
        let is_option = word.starts_with('-');
        plain += usize::from(!is_option);
        words.push(match word {
            _ if is_option || is_mode || (is_symbolic && plain == 1) => word.to_owned(),
            path => format!("v.img:/{path}"),
        });
        is_mode = word == "-m";
    }
    words
}

fn theirs(verb: &str, rest: &str) -> Vec<String> {
    let mut words: Vec<String> = rest.split_whitespace().map(ToOwned::to_owned).collect();
    if verb == "cp" {
        match words.iter().position(|word| word == "-r" || word == "-rT") {
            Some(at) => words[at] = words[at].replace('r', "a"),
            None => words.insert(0, "-p".to_owned()),
        }
    }
    words
}

/// Runs scripts, each on files of its own.
#[track_caller]
fn scripts(scripts: &[&[&str]]) {
    for script in scripts {
        let sides = ScriptSides::new();
        for line in *script {
            sides.run(line);
        }
        check(&sides.dir.path().join("v.img"));
    }
}

fn mkdir() {
    scripts(&[&[
        "mkdir new",
        "mkdir new",
        "mkdir a",
        "mkdir nowhere",
        "mkdir new/x new/y no/such new/z",
        "mkdir -p new/p/q/r",
        "mkdir -p new/p/q/r d",
        "mkdir -p a/b",
        "mkdir -p a",
        "mkdir -p -m 700 new/m/n",
        "mkdir -m 1777 tmp/",
        "mkdir -p to-d/through",
        "mkdir -p nowhere/x",
        "mkdir loop/x",
        "mkdir d/sub/of-set-gid",
        "mkdir -m 2755 d/sub/of-set-gid-too",
    ]]);
}

fn rm() {
    scripts(&[&[
        "rm a",
        "rm a",
        "rm -f a",
        "rm d",
        "rm -f d",
        "rm b fifo nothing to-a",
        "rm -r to-d",
        "rm nowhere loop",
        "rm -f d/a/x nothing/at/all",
        "rm big/",
        "rm -r d empty",
        "rm -r d",
        "rm -rf d full",
    ]]);
}

fn mv() {
    scripts(&[
        &[
            "mv a renamed",
            "mv a renamed",
            "mv renamed d",
            "mv d/renamed d/a",
            "mv b b2",
            "mv to-a to-a2",
            "mv nowhere d/nowhere",
            "mv d e",
            "mv e/d e/d",
            "mv e e/d",
            "mv big fifo e/d/sub",
            "mv to-d/x here",
            "mv e/x e/d/sub/x here",
        ],
        &["mv -n a b", "mv -n a new", "mv -n new big d"],
        &[
            "mv d full",
            "mv full/d full/sub",
            "mv -T empty full",
            "mv -T full empty",
            "mv -T a empty",
            "mv -T empty a",
            "mv empty new/",
            "mv a new2/",
            "mv a/ new3",
            "mv a b nothing",
            "mv a b big",
            "mv a nothing b e",
            "mv e to-d",
            "mv to-d e2",
        ],
    ]);
}

fn ln() {
    scripts(&[&[
        "ln a hard",
        "ln a hard",
        "ln -f a hard",
        "ln b hard",
        "ln -f b hard",
        "ln d hard-d",
        "ln nothing x",
        "ln a e",
        "ln to-a hard-link-of-a-link",
        "ln -s anything/at/all soft",
        "ln -s again soft",
        "ln -sf again soft",
        "ln -s x/y/name d",
        "ln -sT x d",
        "ln -sfT x d",
        "ln -s x no/such",
        "ln -f a a",
    ]]);
}

fn cp() {
    scripts(&[
        &[
            "cp a new",
            "cp a b",
            "cp a d",
            "cp big a",
            "cp a nothing/x",
            "cp nothing x",
            "cp d x",
            "cp to-a copied",
            "cp nowhere x",
            "cp loop x",
            "cp a b big e",
            "cp a nothing b empty",
            "cp a b new",
            "cp a a",
            "cp a new4/",
            "cp -T a e",
            "cp e/a to-a",
        ],
        &[
            "cp -r d d2",
            "cp -r d d2",
            "cp -r d/. d2",
            "cp -rT e d2",
            "cp -r d a",
            "cp -r a e",
            "cp -r d e",
            "cp -r nowhere fifo to-d loop e",
            "cp -r to-a a2",
            "cp -r b b2 e",
            "cp -r full/. empty",
            "cp -r nothing e d empty",
        ],
    ]);
}

fn truncate() {
    scripts(&[&[
        "truncate -s5 a",
        "truncate -s+3 a new",
        "truncate -s-100 b",
        "truncate --size=<6 a big",
        "truncate --size=>20 a b2 other",
        "truncate -s/8 a",
        "truncate -s%16 a b big new",
        "truncate -s1K to-a new",
        "truncate -c -s5 nothing d/none/x nowhere",
        "truncate -s5 d e/x",
        "truncate -s5 loop",
        "truncate -s5 d/none/x",
        "truncate -s5 nowhere",
        "truncate -s5 slash/",
        "truncate -s5 fifo",
        "truncate -s+9223372036854775807 a",
        "truncate -s0 a b d/a",
    ]]);
}

/// Names with every byte that a name can have.
fn names_are_bytes() {
    let dir = scratch_dir();
    let host = dir.path().join("host");
    fs::create_dir(&host).expect("a directory");
    for byte in (1..=255u8).filter(|byte| *byte != b'/' && *byte != b'.') {
        fs::write(host.join(std::ffi::OsStr::from_bytes(&[byte])), [byte]).expect("a file");
    }
    volume(dir.path(), "v.img", 128);
    does(dir.path(), "cp -r host v.img:/");
    does(dir.path(), "cp -r v.img:/host out");
    for byte in (1..=255u8).filter(|byte| *byte != b'/' && *byte != b'.') {
        let path = dir.path().join("out").join(std::ffi::OsStr::from_bytes(&[byte]));
        assert_eq!(fs::read(path).expect("it came back"), [byte]);
    }
    does(dir.path(), "rm -r v.img:/host");
    assert_eq!(does(dir.path(), "ls v.img"), "");
}

on_both! {
    mkdir,
    rm,
    mv,
    ln,
    cp,
    truncate,
    names_are_bytes,
}
