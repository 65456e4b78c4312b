//! What lines of a file of contexts mean. The judge of that is `matchpathcon`, in the tests of the
//! program.

use super::*;

fn contexts(text: &str) -> Result<FileContexts> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("file_contexts");
    std::fs::write(&path, text).expect("a file");
    FileContexts::read(&path)
}

#[track_caller]
fn label(text: &str, path: &str, file_type: FileType) -> Option<String> {
    let contexts = contexts(text).unwrap_or_else(|failure| panic!("{failure}"));
    let label = contexts.label(path.as_bytes(), file_type)?;
    let label = label.strip_suffix(b"\0").expect("a NUL byte at the end");
    Some(String::from_utf8(label.to_vec()).expect("text"))
}

#[test]
fn the_last_line_counts_and_exact_paths_before_all() {
    let text = "# a comment\n\
                /etc/motd  u:r:exact:s0\n\
                /.*  u:r:all:s0\n\
                /etc(/.*)?\t u:r:etc:s0\n\
                /etc/.*  -d u:r:dirs:s0\n\
                /[a-z]+/m.* -- u:r:somewhere:s0\n\
                /etc/run\\.d(/.*)?  <<none>>\n\
                /etc/a\\.b -- u:r:escaped:s0\n";
    let of = |path, file_type| label(text, path, file_type);
    let is = |text: &str| Some(format!("u:r:{text}:s0"));
    assert_eq!(of("/etc/motd", FileType::Regular), is("exact"));
    assert_eq!(of("/usr", FileType::Directory), is("all"));
    assert_eq!(of("/etc", FileType::Directory), is("etc"));
    assert_eq!(of("/etc/x", FileType::Directory), is("dirs"));
    assert_eq!(of("/etc/x", FileType::Symlink), is("etc"));
    assert_eq!(of("/etc/mtab", FileType::Regular), is("somewhere"));
    assert_eq!(of("/lib/mtab", FileType::Regular), is("somewhere"));
    assert_eq!(of("/etc/run.d/x", FileType::Regular), None);
    assert_eq!(of("/etc/a.b", FileType::Regular), is("escaped"));
    assert_eq!(of("/etc/axb", FileType::Regular), is("etc"));
    assert_eq!(label("/etc u:r:t:s0", "/etcetera", FileType::Regular), None);
    // Bytes that are no text, and a line end in a name.
    let contexts = contexts("/a/[^/]+b u:r:t:s0").expect("contexts");
    assert!(contexts.label(b"/a/\xff\n\xfeb", FileType::Regular).is_some());
}

#[test]
fn files_beside_it_are_read() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("fc");
    let write = |end: &str, text: &str| {
        let path = dir.path().join(format!("fc{end}"));
        std::fs::write(path, text).expect("a file");
    };
    write("", "/usr/lib(/.*)? u:r:lib:s0\n/home/.* u:r:file:s0\n/data u:r:data:s0\n");
    write(".homedirs", "/home/[^/]+ -d u:r:home:s0\n");
    write(".local", "/home/lisa u:r:lisa:s0\n");
    write(".subs_dist", "# aliases\n/lib /usr/lib\n/lib64 /usr/lib\n");
    write(".subs", "/srv/lib64 /lib64\n/export /\n");
    let contexts = FileContexts::read(&path).expect("contexts");
    let of = |path: &str, file_type| {
        contexts
            .label(path.as_bytes(), file_type)
            .map(|label| String::from_utf8_lossy(label).into_owned())
    };
    for (path, is) in [
        ("/home/lisa", "lisa"),
        ("/home/bart", "home"),
        ("/lib64/ld.so", "lib"),
        ("/lib", "lib"),
        ("/srv/lib64/x", "lib"),
        ("/export/data", "data"),
    ] {
        assert_eq!(of(path, FileType::Directory), Some(format!("u:r:{is}:s0\0")), "{path}");
    }
    assert_eq!(of("/library", FileType::Directory), None);
}

#[test]
fn what_is_not_known_is_refused_with_its_line() {
    for (line, said) in [
        ("/a", "line 3: a path without a label"),
        ("/a -x u:r:t:s0", "line 3: -x is no type of a file"),
        ("/a -- u:r:t:s0 more", "line 3: more than a path, a type and a label"),
        ("/a label", "line 3: label is no label"),
        ("/a(?=b) u:r:t:s0", "a group that begins with `(?`"),
        ("/a(?i:b) u:r:t:s0", "a group that begins with `(?`"),
        ("/(a)\\1 u:r:t:s0", "a reference `\\1`"),
        ("/a\\Kb u:r:t:s0", "the escape `\\K`"),
        ("/a.*+b u:r:t:s0", "a quantifier that gives nothing back"),
        ("/a|/b u:r:t:s0", "alternatives outside of parentheses"),
        ("/(a|b u:r:t:s0", "the expression /(a|b: unclosed group"),
        ("/[a u:r:t:s0", "a `[` without its `]`"),
        ("/(*FAIL) u:r:t:s0", "a verb `(*`"),
        ("/[[.a.]] u:r:t:s0", "a class of classes"),
        ("/((a{999}){999}){9} u:r:t:s0", "takes more than 256 KiB"),
        ("/a\\ u:r:t:s0", "nothing behind its last backslash"),
        ("/a{2,1} u:r:t:s0", "the expression /a{2,1}: "),
    ] {
        let said_now = match contexts(&format!("# one\n\n{line}\n")) {
            Ok(_) => panic!("{line} is taken"),
            Err(failure) => failure.to_string(),
        };
        assert!(said_now.contains(said), "{line}: {said_now}");
        assert!(said_now.contains("file_contexts: line 3: "), "{line}: {said_now}");
    }
    // What the crate means in another way within a class.
    let of = |class: &str, path: &str| {
        label(&format!("/{class} u:r:t:s0"), path, FileType::Regular).is_some()
    };
    assert!(of("[[a&&b]", "/[") && of("[[a&&b]", "/&") && of("[a~~]", "/~"));
    assert!(of("[]a]", "/]") && of("[^]a]", "/b") && !of("[^]a]", "/]"));
    assert!(of("[[:alpha:]_-]", "/-") && of("a\\<b[]]", "/a<b]"));
}
