//! Builds from manifests.

use std::fs;

use offshoot_vfs::FileFlags;

use super::*;

/// A manifest of go-mtree, which calls SHA-512/256 by the name of SHA-512.
#[test]
fn a_manifest_of_go_mtree() {
    let site = built(
        r"#          user: root
#      keywords: size,type,uid,gid,mode,link,nlink,time,xattr,md5digest,sha512256digest

# .
/set type=file nlink=1 mode=0664 uid=0 gid=0
. size=4096 type=dir mode=0755 nlink=5 time=1795820710.800374874
    hello size=5 mode=04755 time=1795820710.783522394 xattr.user.k=dmEgbA== md5digest=5d41402abc4b2a76b9719d911017c592 ripemd160digest=108f07b8382412612c048d07d13f814118445acd cksum=3287646509 sha512digest=e30d87cfa2a75db545eac4d61baf970366a8357c7f72fa95b52d0accb698f13a
    fifo size=0 type=fifo mode=0644 time=1795820710.800374874
    sym size=8 type=link mode=0777 link=f\040target time=1795820710.788374873

# sub
sub size=4096 type=dir mode=0755 nlink=3 time=-2.250000000
    world size=5 mode=0644 time=1795820710.804374874 tar_time=1795820710.000000000
..
..
",
    );
    assert_eq!(
        site.shown(),
        "fifo Fifo
hello x1 hello
sub /
sub/world x1 world
sym -> f target
"
    );
    assert_eq!(site.attr("/sub").mtime, Timestamp { secs: -2, nanos: 250_000_000 });
    assert_eq!(site.attr("/hello").permissions, 0o4755);
}

/// A manifest of mtree, or of composefs if it begins like one, and the directory `contents` beside
/// it.
fn manifest(site: &BuildSite, text: &str) -> BuildSource {
    let form = if text.starts_with("/ ") { "composefs" } else { "mtree" };
    let path = site.path("manifest");
    fs::write(&path, text).expect("a manifest");
    let contents = site.path("contents");
    if !contents.exists() {
        fs::create_dir(&contents).expect("a directory");
        fs::write(contents.join("hello"), "hello").expect("a file");
        fs::create_dir(contents.join("sub")).expect("a directory");
        fs::write(contents.join("sub/world"), "world").expect("a file");
        fs::write(site.path("secret"), "secret").expect("a file");
    }
    let named = format!("{form}:{},contents={}", path.display(), contents.display());
    BuildSource::named(named.as_ref())
}

fn build_from(site: &BuildSite, text: &str) -> Result<ExtractOutcome> {
    site.build_with(&BuildOptions::new(AT), vec![(manifest(site, text), "")])
}

#[track_caller]
fn built(text: &str) -> BuildSite {
    let site = BuildSite::new();
    build_from(&site, text).unwrap_or_else(|failure| panic!("{failure}"));
    site
}

#[track_caller]
fn refuses(text: &str, said: &str) {
    let failure = build_from(&BuildSite::new(), text).expect_err("it is refused").to_string();
    assert!(failure.contains(said), "{failure}, not {said}");
}

#[test]
fn names_are_in_the_directories_before_them_and_paths_are_from_the_top() {
    let site = built(
        "#mtree\n\
         /set type=file uid=1 gid=2 mode=0600 nlink=1\n\
         . type=dir mode=0711\n\
         \thello size=5 time=7.000000008 # a comment\n\
         # directory\n\
         a\\sb type=dir mode=01777\n\
         world contents=sub/world \\\n\
         \x20  mode=0640\n\
         deep type=dir\n\
         null type=char device=linux,1,3\n\
         ./sub/world size=5\n\
         link type=link link=no\\040where\n\
         ..\n\
         fifo type=fifo\n\
         ..\n\
         ..\n\
         /unset uid\n\
         empty size=0\n",
    );
    assert_eq!(
        site.shown(),
        "a b /\na b/deep /\na b/deep/link -> no where\na b/deep/null CharDevice\na b/fifo Fifo\n\
         a b/world x1 world\nempty x1 \nhello x1 hello\nsub /\nsub/world x1 world\n"
    );
    let hello = site.attr("/hello");
    assert_eq!((hello.uid, hello.gid, hello.permissions), (1, 2, 0o600));
    assert_eq!(hello.mtime, Timestamp { secs: 7, nanos: 8 });
    assert_eq!(site.attr("/a b/deep/null").rdev, (1, 3));
    assert_eq!((site.attr("/a b").permissions, site.attr("/").permissions), (0o1777, 0o711));
    assert_eq!((site.attr("/empty").uid, site.attr("/empty").mtime), (0, AT));
}

/// `mtree -D` of NetBSD.
#[test]
fn a_path_may_come_last() {
    let site = built(
        "type=dir uid=0 gid=0 mode=0700 nlink=5 flags=none .\n\
         type=file uid=0 mode=0644 nlink=1 size=5 optional ./hello\n\
         type=link link=a/b nlink=1 ./link\n\
         a=b type=file contents=hello\n",
    );
    assert_eq!(site.shown(), "a=b x1 hello\nhello x1 hello\nlink -> a/b\n");
}

#[test]
fn what_a_manifest_leaves_out_the_contents_say() {
    use std::os::unix::fs::PermissionsExt;
    let site = BuildSite::new();
    let source = manifest(&site, ". type=dir\nhello\nsub\nworld\n..\nlink\nother contents=hello\n");
    let contents = site.path("contents");
    std::os::unix::fs::symlink("target", contents.join("link")).expect("a link");
    fs::set_permissions(contents.join("hello"), fs::Permissions::from_mode(0o4711))
        .expect("a mode");
    site.build_with(&BuildOptions::new(AT), vec![(source, "")]).expect("a build");
    assert_eq!(
        site.shown(),
        "hello x1 hello\nlink -> target\nother x1 hello\nsub /\nsub/world x1 world\n"
    );
    assert_eq!(site.attr("/hello").permissions, 0o4711);
}

#[test]
fn several_lines_are_one_file_where_the_manifest_says_so() {
    let site = BuildSite::new();
    let text = "a type=file contents=hello inode=7 resdevice=native,8,1 size=5\n\
                b type=file contents=hello inode=7 resdevice=native,8,1 size=5\n\
                c type=file contents=hello inode=7 resdevice=native,8,2 size=5\n\
                d type=file contents=hello size=5\n\
                e type=file contents=hello size=5 nlink=2\n\
                f type=file contents=hello size=5 nlink=2\n\
                s type=link link=x inode=9 nlink=2\n\
                t type=link link=x inode=9 nlink=2\n";
    build_from(&site, text).expect("a build");
    assert_eq!(
        site.shown(),
        "a x2 hello\nb x2 hello\nc x1 hello\nd x1 hello\ne x2 hello\nf x2 hello\n\
         s -> x\nt -> x\n"
    );
    assert_eq!(site.attr("/s").file, site.attr("/t").file);
    // What the manifest does not count, the directory says, but not of other contents.
    let other = BuildSite::new();
    let source = manifest(&other, "hello\nhard\nown nlink=1\ncopy contents=hard\n");
    for name in ["hard", "own"] {
        let path = |name: &str| other.path("contents").join(name);
        fs::hard_link(path("hello"), path(name)).expect("a link");
    }
    other.build_with(&BuildOptions::new(AT), vec![(source, "")]).expect("a build");
    assert_eq!(other.shown(), "copy x1 hello\nhard x2 hello\nhello x2 hello\nown x1 hello\n");
    // The digest of a further name is compared, too.
    let wrong = format!(
        "{text}g type=file contents=hello inode=7 resdevice=native,8,1 size=5 \
                         md5=00000000000000000000000000000000\n"
    );
    refuses(&wrong, "g: its contents have the md5 5d41402abc4b2a76b9719d911017c592");
}

#[test]
fn contents_that_do_not_fit_end_the_build_by_name() {
    let digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    built(&format!("hello type=file size=5 sha256digest={digest} cksum=3287646509\n"));
    refuses(
        &format!("sub/world type=file size=5 sha256={digest}\n"),
        "manifest: sub/world: its contents have the sha256 486ea46224d1bb4f",
    );
    refuses("hello type=file size=6\n", "hello: its data has 5 bytes, and the manifest says 6");
    refuses("gone type=file size=1\n", "gone: its data is not in the directory");
    refuses("sub type=file size=1 \n", "contents/sub: ");
    let site = built(&format!("hello type=file size=9 sha1={} nochange\n", "0".repeat(40)));
    assert_eq!(site.shown(), "hello x1 hello\n");
    let site = built("gone type=file size=1 optional\nhello optional\n");
    assert_eq!(site.shown(), "hello x1 hello\n");
    // Digests of holes are those of zeros.
    let site = BuildSite::new();
    let sum = "30e14955ebf1352266dc2ff8067e68104607e750abb9d3b36582b8af909fcb58";
    let text = format!("hole type=file size=1048576 sha256={sum}\n");
    let source = manifest(&site, &text);
    let hole = fs::File::create(site.path("contents/hole")).expect("a file");
    hole.set_len(1 << 20).expect("a length");
    site.build_with(&BuildOptions::new(AT), vec![(source, "")]).expect("a build");
    assert_eq!(site.attr("/hole").size, 1 << 20);
}

/// A manifest reads nothing outside of its directory and writes nothing outside of the volume.
#[test]
fn hostile_manifests() {
    let site = BuildSite::new();
    let contents = manifest(&site, "");
    for (link, target) in [("up", "../secret"), ("abs", "/secret"), ("dir", "..")] {
        let path = site.path("contents").join(link);
        std::os::unix::fs::symlink(target, path).expect("a link");
    }
    std::os::unix::fs::symlink(site.path("secret"), site.path("contents/full")).expect("a link");
    drop(contents);
    for place in ["../secret", "/../secret", "up", "abs", "full", "dir/secret", "sub/../../secret"]
    {
        let text = format!("stolen type=file size=6 contents={place}\n");
        let source = manifest(&site, &text);
        let failure = site.build_with(&BuildOptions::new(AT), vec![(source, "")]);
        let said = failure.expect_err(place).to_string();
        assert!(said.contains("its data is not in the directory"), "{place}: {said}");
    }
    // Magic links of the host and devices are not opened.
    let text = "null type=file contents=null size=0\n";
    let source = manifest(&site, text);
    let status = std::process::Command::new("mkfifo").arg(site.path("contents/null")).status();
    assert!(status.expect("mkfifo starts").success());
    let failure = site.build_with(&BuildOptions::new(AT), vec![(source, "")]);
    assert!(failure.expect_err("a fifo").to_string().contains("it is no regular file"));

    refuses("../out type=dir\n", "line 1: the name ../out leads upwards");
    refuses("a/../../out type=dir\n", "leads upwards");
    refuses("\n. type=dir\n..\n..\n", "line 4: one `..` more than there are directories");
    refuses("/etc type=dir\n", "line 1: /etc is no command of a manifest");
    refuses("a\\400 type=dir\n", "line 1: a\\\\400 is no name");
    refuses("a\\000 type=dir\n", "a NUL byte");
    refuses("a type=file rubbish=1\n", "line 1: the keyword rubbish is not known");
    refuses("a type=char\n", "line 1: a: a device without a device=");
    refuses("a type=link\n", "a: a symbolic link without a link=");
    refuses("a mode=0644\n", "a: a file without a type=");
    refuses("a type=dir uname=lisa\n", "the number of lisa is not known: give it as uid=");
    refuses(&format!("{}a type=dir\n", "d/".repeat(2048)), "a path of more than 2048 names");
    refuses(&format!("/set uname={}\n", "x".repeat(70_000)), "a /set of more than 64 KiB");
    refuses(&". type=dir\n".repeat(5000), "line 4097: more than 4096 directories");
    refuses(&format!("a type=dir {}", "optional ".repeat(70_000)), "more than 65536 words");
    // A line that does not end.
    let site = BuildSite::new();
    let source = manifest(&site, &format!("a type=dir {}", "optional ".repeat(3 << 20)));
    let failure = site.build_with(&BuildOptions::new(AT), vec![(source, "")]);
    assert!(
        failure.expect_err("a line").to_string().contains("line 1: a line of more than 24 MiB")
    );
}

/// Names are those of the system that is built, and not of the host.
#[test]
fn names_of_users_are_those_of_the_contents() {
    let site = BuildSite::new();
    let text = "./a type=dir uname=lisa gname=wheel\n./b type=dir uname=root gname=staff uid=7\n\
                ./c type=dir uname=toor gname=lisa\n";
    let source = manifest(&site, text);
    fs::create_dir(site.path("contents/etc")).expect("a directory");
    let write = |name: &str, text: &str| {
        fs::write(site.path("contents/etc").join(name), text).expect("a file");
    };
    write("passwd", "# users\nroot:*:0:0::/root:\nlisa:x:1001:100::/:\nlisa:x:5:5::/:\nodd:x\n");
    write("master.passwd", "toor:*:9:0::0:0::/root:\nlisa:*:6:6::0:0::/:\n");
    write("group", "wheel:*:10:root\nstaff:*:20:\nlisa:*:1002:\n");
    site.build_with(&BuildOptions::new(AT), vec![(source, "")]).expect("a build");
    let owner = |path| (site.attr(path).uid, site.attr(path).gid);
    assert_eq!((owner("/a"), owner("/b"), owner("/c")), ((1001, 10), (7, 20), (9, 1002)));
    refuses(
        "a type=dir gname=lisa\n",
        "line 1: a: the number of lisa is not known: give it as gid=",
    );
    let mut options = BuildOptions::new(AT);
    options.owner = Some((3, 4));
    let source = manifest(&site, "d type=dir uname=nobody gname=nobody\n");
    site.build_with(&options, vec![(source, "")]).expect("a build");
    assert_eq!(owner("/d"), (3, 4));
}

/// Flags that forbid changes are set in the end, on what is there then.
#[test]
fn files_that_cannot_be_changed_are_replaced_before() {
    let site = BuildSite::new();
    let first = manifest(
        &site,
        "hello type=file flags=schg\nkept type=file size=0 flags=uappnd\n\
         sub type=dir flags=schg\nworld\n",
    );
    let over = site.archive(&[file("hello", "later"), file("sub/more", "more")]);
    let mut options = BuildOptions::new(AT);
    options.add_property(b"/sub/./", FileProperty::Flags(FileFlags::NODUMP)).expect("a property");
    options.add_property(b"sub", FileProperty::Flags(FileFlags::SYNC)).expect_err("two");
    site.build_with(&options, vec![(first, ""), (over, "")]).expect("a build");
    let flags = |path: &str| {
        let file = resolve(&site.model, path.as_bytes(), LastLink::Keep).expect("a file");
        site.model.flags(file).expect("flags").to_string()
    };
    assert_eq!((flags("/hello"), flags("/kept")), (String::new(), "a".to_owned()));
    assert!(flags("/sub").contains('i'));
    assert_eq!(
        site.shown(),
        "hello x1 later\nkept x1 \nsub /\nsub/more x1 more\nsub/world x1 world\n"
    );
    options.add_property(b"none", FileProperty::Flags(FileFlags::SYNC)).expect("a property");
    let source = site.archive(&[file("a", "")]);
    let failure = BuildSite::new().build_with(&options, vec![(source, "")]).expect_err("no file");
    assert!(failure.to_string().contains("/none: it has a property, and nothing"), "{failure}");
}

#[test]
fn data_needs_a_directory() {
    let site = BuildSite::new();
    fs::write(site.path("m"), "empty type=file size=0\nfull type=file size=1\n").expect("a file");
    let source = BuildSource::named(format!("mtree:{}", site.path("m").display()).as_ref());
    let failure = site.build_with(&BuildOptions::new(AT), vec![(source, "")]);
    let said = failure.expect_err("no contents").to_string();
    assert!(said.contains("name one with `,contents=DIRECTORY` behind the manifest"), "{said}");
}

#[test]
fn extended_attributes_and_flags() {
    let site = BuildSite::new();
    let outcome = build_from(
        &site,
        "hello type=file xattr.user.k=dmEgbA== xattr.user.a\\040b=AA== flags=nodump\n\
         sub type=dir flags=uarch,schg\n\
         sub/world type=file flags=none\n\
         link type=link link=x flags=uchg\n",
    )
    .expect("a build");
    let lost: Vec<_> =
        outcome.not_applied.iter().map(|one| (one.kind, one.count, &one.first[..])).collect();
    assert_eq!(lost, [("flags", 2, "sub")]);
    let file = |path: &str| resolve(&site.model, path.as_bytes(), LastLink::Keep).expect("a file");
    let xattr = |name: &str| site.model.xattr(file("/hello"), name.as_bytes()).expect("a value");
    assert_eq!((xattr("user.k"), xattr("user.a b")), (b"va l".to_vec(), vec![0]));
    let flags = |path: &str| site.model.flags(file(path)).expect("flags").to_string();
    assert_eq!(
        (flags("/hello"), flags("/sub"), flags("/sub/world")),
        ("d".into(), "i".into(), String::new())
    );
}

#[test]
fn packed_manifests_and_excluded_files() {
    let site = BuildSite::new();
    drop(manifest(&site, ""));
    let text =
        b"#mtree\nhello type=file\nsub/world type=file md5=00000000000000000000000000000000\n";
    fs::write(site.path("manifest"), zstd::encode_all(&text[..], 1).expect("memory"))
        .expect("a file");
    let named = format!(
        "mtree:{},contents={}",
        site.path("manifest").display(),
        site.path("contents").display()
    );
    let mut options = BuildOptions::new(AT);
    options.exclude(b"world");
    let source = BuildSource::named(named.as_ref());
    site.build_with(&options, vec![(source, "to")]).expect("a build");
    assert_eq!(site.shown(), "to /\nto/hello x1 hello\n");
}

const TOP: &str = "/ 4096 40711 2 0 0 0 7.8 - - -\n";

/// The fields between the path and the payload, of a file of 5 bytes.
const FIELDS: &str = "5 100640 1 1 2 0 7.8";

#[test]
fn composefs_lines_say_everything_of_a_file() {
    let site = built(&format!(
        "{TOP}/a\\x20dir 0 41755 2 1 2 0 -1.5 - - - user.k\\x3d=v\\x00=\n\
         /a\\x20dir/hello {FIELDS} hello - -\n\
         /inline {FIELDS} - a\\n\\\\\\t\\r - user.empty=\n\
         /early 5 @100640 2 1 2 0 7.8 /later - - user.k=ignored\n\
         /later {FIELDS} sub/world - -\n\
         /link 4 120777 1 1 2 0 7.8 /\\x2d - -\n\
         /null 0 20666 1 0 0 259 7.8 - - -\n\
         /fifo 0 10644 1 0 0 0 7.8 - - -\n\
         /empty 0 100644 1 0 0 0 7.8 - - -",
    ));
    assert_eq!(
        site.shown(),
        "a dir /\na dir/hello x1 hello\nearly x2 world\nempty x1 \nfifo Fifo\n\
         inline x1 a\n\\\t\r\nlater x2 world\nlink -> /-\nnull CharDevice\n"
    );
    let attr = site.attr("/a dir");
    assert_eq!((attr.permissions, attr.uid, attr.gid), (0o1755, 1, 2));
    assert_eq!(attr.mtime, Timestamp { secs: -1, nanos: 5 });
    assert_eq!((site.attr("/null").rdev, site.attr("/").permissions), ((1, 3), 0o711));
    let file = resolve(&site.model, b"/a dir", LastLink::Keep).expect("a directory");
    assert_eq!(site.model.xattr(file, b"user.k=").expect("a value"), b"v\0=");
}

/// The digests are those of `fsverity digest`.
#[test]
fn composefs_digests_are_compared() {
    let sha256 = "f3c13e80b1dbb6ecd3e8a5dd0d5b2c4e";
    let refused = |digest: &str, said: &str| {
        refuses(&format!("{TOP}/f {FIELDS} hello - {digest}\n"), said);
    };
    refused(sha256, "is no value of the field DIGEST");
    refused(&"0".repeat(64), "manifest: f: its contents have the fs-verity digest ");
    refused(&"0".repeat(128), "manifest: f: its contents have the fs-verity digest ");
    refused(&"x".repeat(64), "is no value of the field DIGEST");
}

#[test]
fn hostile_composefs_manifests() {
    for (line, said) in [
        ("/a", "line 2: the field SIZE is missing"),
        ("/a  100644 1 0 0 0 0.0 - - -", "the field SIZE is missing"),
        ("a 0 100644 1 0 0 0 0.0 - - -", "a is no value of the field PATH"),
        ("/. 0 40755 1 0 0 0 0.0 - - -", "is no value of the field PATH"),
        ("/a//b 0 40755 1 0 0 0 0.0 - - -", "is no value of the field PATH"),
        ("/../a 0 40755 1 0 0 0 0.0 - - -", "leads upwards"),
        ("/a\\x0 0 40755 1 0 0 0 0.0 - - -", "is no value of the field PATH"),
        ("/a -1 100644 1 0 0 0 0.0 - - -", "-1 is no value of the field SIZE"),
        ("/a 0 644 1 0 0 0 0.0 - - -", "a: the mode 644 names no type"),
        ("/a 0 100644 1 4294967296 0 0 0.0 - - -", "is no value of the field UID"),
        ("/a 0 100644 1 0 0 0 0 - - -", "0 is no value of the field MTIME"),
        ("/a 0 100644 1 0 0 0 0.1000000000 - - -", "is no value of the field MTIME"),
        ("/a 5 100644 1 0 0 0 0.0 - - -", "a: it has neither a payload nor data in the line"),
        ("/a 5 100644 1 0 0 0 0.0 - four -", "a: it has 4 bytes in the line, and the size 5"),
        ("/a 5 100644 1 0 0 0 0.0 ../secret - -", "its data is not in the directory"),
        ("/a 6 100644 1 0 0 0 0.0 hello - -", "a: its data has 5 bytes, and the manifest says 6"),
        ("/a 0 120777 1 0 0 0 0.0 - - -", "a: a symbolic link without a payload"),
        ("/a 0 @100644 1 0 0 0 0.0 - - -", "a: a hard link without a payload"),
        ("/a 0 @100644 1 0 0 0 0.0 /a - -", "a: it is a hard link to a, which is not there"),
        ("/a 0 @100644 1 0 0 0 0.0 / - -", "it is a hard link to , which is not there"),
        ("/a 0 100644 1 0 0 0 0.0 - - - user.a", "user.a is no attribute"),
        ("/a 0 100644 1 0 0 0 0.0 - - - =v", "=v is no attribute"),
    ] {
        refuses(&format!("{TOP}{line}\n"), said);
    }
    let many = "/a 0 100644 1 0 0 0 0.0 - - -".to_owned() + &" user.a=b".repeat(70_000);
    refuses(&format!("{TOP}{many}\n"), "a line of more than 65536 attributes");
}
