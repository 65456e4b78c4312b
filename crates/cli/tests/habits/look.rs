//! Verbs that show things, beside the tools of the host on the kernel's mount.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::run::{command, run};
use offshoot_testkit::scratch_dir;

use super::{offshoot, words};

/// A script that fills the volume: every file type, times, modes, owners with and without names,
/// access control lists, links.
const FILL: &str = r#"
set -e
mkdir -p etc od/sub/deep od/.hidden empty/dir
printf 'root:x:0:0::/root:/bin/sh\nalice:x:1000:100::/home:/bin/sh\n' > etc/passwd
printf 'root:x:0:\nusers:x:100:\n' > etc/group
printf 'some text\n' > od/b.c
head -c 70000 /dev/zero | tr '\0' a > od/a.c
head -c 3000000 /dev/urandom > od/big
: > od/.config
: > od/empty
printf x > "od/two
lines"
printf x > "od/$(printf 'raw\377byte')"
ln -s b.c od/link
ln -s nowhere od/dangling
ln -s sub od/to-sub
ln od/b.c od/sub/hard
mkfifo od/fifo
mknod od/null c 1 3
mknod od/disk b 8 17
chown 1000:100 od/b.c od/sub
chown 1234:4321 od/a.c
chmod 4755 od/a.c
chmod 1777 od/sub
chmod 2750 od/.hidden
setfacl -m u:1000:r od/big
setfattr -n user.origin -v 0x6122625c630a64656667686970 od/b.c
setfattr -n user.binary -v 0x00ff01fe80 od/b.c
setfattr -n security.other -v plain od/b.c
touch -d '2020-02-29 12:34:56.123456789Z' od/b.c
touch -d '2021-06-01 00:00:00Z' od/a.c od/big
touch -h -d '1999-01-01 00:00:00Z' od/link
printf deep > od/sub/deep/file
chattr +C empty/dir
chattr +i od/empty
cp --reflink=always od/big od/sub/clone
"#;

pub(super) struct LookSides {
    pub(super) disks: Disks,
    _judges: Judges,
}

pub(super) fn filled() -> Option<LookSides> {
    let judges = judges::require()?;
    let disks = Disks::create(&judges, 1, 256);
    run("mkfs.btrfs", &["-q".as_ref(), disks.images()[0].as_os_str()]);
    {
        let mount = disks.mount("");
        let shell = |script: &str| {
            let output = command("bash")
                .args(["-c", script])
                .current_dir(mount.path())
                .output()
                .expect("bash starts");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        shell(FILL);
        let sub = mount.path().join("home");
        run("btrfs", &["-q".as_ref(), "subvolume".as_ref(), "create".as_ref(), sub.as_os_str()]);
        shell(
            "head -c 500000 /dev/urandom > home/file; head -c 900000 /dev/urandom > home/new; sync -f .",
        );
        let snapshot = mount.path().join("snapshot");
        let words = ["-q".as_ref(), "subvolume".as_ref(), "snapshot".as_ref()];
        run("btrfs", &[&words[..], &[sub.as_os_str(), snapshot.as_os_str()]].concat());
        shell(
            "head -c 400000 /dev/urandom > home/only; head -c 100000 /dev/urandom > home/file; sync -f .",
        );
    }
    Some(LookSides { disks, _judges: judges })
}

/// Runs a line on both sides, and requires the same output. In the line, `@` is in front of each
/// path: ours gets a place in the volume, theirs a path of the mount.
#[track_caller]
fn same(
    image: &Path,
    mount: &Path,
    (ours, theirs): (&str, &str),
    is_sorted: bool,
    edit: impl Fn(Vec<u8>) -> Vec<u8>,
) {
    let is_anything = is_same(image, mount, (ours, theirs), is_sorted, edit);
    assert!(is_anything, "{ours}: nothing is compared");
}

/// The same. Returns whether there was any output to compare.
#[track_caller]
pub(super) fn is_same(
    image: &Path,
    mount: &Path,
    (ours, theirs): (&str, &str),
    is_sorted: bool,
    edit: impl Fn(Vec<u8>) -> Vec<u8>,
) -> bool {
    let dir = image.parent().expect("a directory");
    let name = image.file_name().expect("a name").to_str().expect("text");
    let our_words: Vec<String> =
        words(ours).iter().map(|word| word.replace('@', &format!("{name}:"))).collect();
    let root = mount.to_str().expect("text");
    let their_words: Vec<String> =
        words(theirs).iter().map(|word| word.replace('@', root)).collect();
    let found = offshoot(dir, &our_words);
    let judge = command(&their_words[0])
        .args(&their_words[1..])
        .env_remove("LS_COLORS")
        // Without `LS_COLORS`, `ls` gives no colours to terminals that it does not know.
        .env("TERM", "xterm")
        .output()
        .expect("the tool is there");
    let said = String::from_utf8_lossy(&found.stderr);
    let reason = String::from_utf8_lossy(&judge.stderr);
    assert_eq!(found.status.code(), judge.status.code(), "{ours}\n{said}\n{reason}");
    assert_eq!(said.is_empty(), reason.is_empty(), "{ours}\n{said}\n{reason}");
    let lines = |bytes: &[u8], prefix: &str| -> Vec<String> {
        let text = edit(bytes.to_vec());
        // Names are bytes, and must be the same bytes.
        let text: String = text.utf8_chunks().fold(String::new(), |mut all, chunk| {
            all.push_str(chunk.valid());
            all.extend(chunk.invalid().iter().map(|byte| format!("<{byte:02x}>")));
            all
        });
        let mut lines: Vec<String> =
            text.replace('\0', "\n").replace(prefix, "").lines().map(str::to_owned).collect();
        if is_sorted {
            lines.sort();
        }
        lines
    };
    let (found, expected) = (lines(&found.stdout, &format!("{name}:")), lines(&judge.stdout, root));
    assert_eq!(found, expected, "{ours} | {theirs}");
    !found.is_empty() || !reason.is_empty()
}

#[test]
fn ls_stat_find_du_and_lsattr_say_what_the_tools_of_the_host_say() {
    let Some(beside) = filled() else { return };
    let image = &beside.disks.images()[0];
    let mount = beside.disks.mount("ro");
    let root = mount.path();
    // Owners have the names of the volume, and not those of the host.
    let names = |text: Vec<u8>| text;
    let both = |ours: &str, theirs: &str| same(image, root, (ours, theirs), false, names);
    let sorted = |ours: &str, theirs: &str| same(image, root, (ours, theirs), true, names);

    for options in [
        "",
        "-a",
        "-A",
        "-1",
        "-r",
        "-t",
        "-S",
        "-tr",
        "-Sr",
        "-at",
        "-i",
        "-ai",
        "-d",
        "-R",
        "-aR",
        "--color=always",
        "--color=never",
        "-a --color=always",
    ] {
        let line = format!("ls {options} @/od");
        both(&line, &line);
    }
    for options in ["-n", "-ln", "-lna", "-lnh", "-lni", "-lnt", "-lnS", "-lnd", "-lnR", "-lnar"] {
        both(&format!("ls {options} @/od"), &format!("ls --time-style=long-iso {options} @/od"));
    }
    both("ls -0 @/od", "ls --zero @/od");
    both(
        "ls -d @/od/b.c @/od/a.c @/od/sub @/od/link",
        "ls -d @/od/b.c @/od/a.c @/od/sub @/od/link",
    );
    both(
        "ls @/od/link @/od/dangling @/od/sub @/empty",
        "ls @/od/link @/od/dangling @/od/sub @/empty",
    );
    both("ls -d '@/od/*.c' '@/o?/s*'", "bash -c 'LC_ALL=C; ls -d @/od/*.c @/o?/s*'");

    let formats = [
        "%a %A %b %B %f %F %g %h %i %s %t %T %u %o",
        "%x|%y|%z|%w",
        "%X|%Y|%Z|%W",
        "%10s|%-10s|%010s|%#a|%5u|%%|%r|%Hr,%Lr",
    ];
    for format in formats {
        let files = "@/od @/od/b.c @/od/a.c @/od/empty @/od/link @/od/fifo @/od/null @/od/disk";
        let (ours, theirs) =
            (format!("stat -c '{format}' {files}"), format!("stat -c '{format}' {files}"));
        both(&ours, &theirs);
    }
    both("stat --printf '%s\\t%a\\n\\101' @/od/b.c", "stat --printf '%s\\t%a\\n\\101' @/od/b.c");
    both("stat -L -c %s @/od/link", "stat -L -c %s @/od/link");
    both("stat -c '%n %N' @/od/link", "stat -c '%n %N' @/od/link");

    for expression in [
        "",
        "-name '*.c'",
        "-iname '*.C' -o -name .hidden",
        "-type d",
        "-type f,l -name '[bl]*'",
        "-type f -size +1M",
        "-size -2k -type f",
        "-size 70000c",
        "-empty",
        "-newermt 2021-01-01",
        "! -newermt '2020-02-29 12:34:57 +0000'",
        "-newer @/od/b.c -type f",
        "-mtime +1000",
        "-mmin -600 -type f",
        "-mtime 0",
        "-perm 644",
        "-perm -u+x",
        "-perm /4000",
        "-uid 1234",
        "-gid +99 -uid -2000",
        "-links 2",
        "-maxdepth 1",
        "-mindepth 2 -maxdepth 2",
        "-name sub -prune -o -print",
        "-depth -type d",
        "( -name a.c -o -name b.c ) -not -uid 1000",
        "-type f -a -links +1",
        "-false -o -name big -true",
    ] {
        let line = format!("find @/od {expression}");
        sorted(&line, &line);
    }
    both("find @/od/sub -maxdepth 0 -print0", "find @/od/sub -maxdepth 0 -print0");
    sorted("find @/od -print0", "find @/od -print0");
    sorted("find @/ -xdev -type f", "find @/ -xdev -type f");

    for options in ["", "-s", "-a", "-h", "-sh", "-d 1", "-c", "-x", "-0", "-ah"] {
        let line = format!("du {options} @/od @/empty");
        sorted(&line, &line);
    }
    both("du -s @/od/big @/od/b.c @/od/sub/hard", "du -s @/od/big @/od/b.c @/od/sub/hard");
    for options in ["", "-a", "-d", "-R", "-aR"] {
        // The host's `lsattr` complains about everything that is neither a file nor a directory.
        let line = format!("lsattr {options} @/od");
        sorted(&line, &format!("bash -c '{line} 2>/dev/null; true'"));
    }
    both("lsattr -d @/empty/dir", "lsattr -d @/empty/dir");
    for options in [
        "-d",
        "-d -m -",
        "-d -m '^user\\.b'",
        "-d -e hex",
        "-d -e text -m user.origin",
        "-d -e base64",
        "-d -m origin",
        "-d -m '(bin|ori).*[yn]$'",
        "-d -m '^[[:alpha:]]+\\.other'",
        "-d -m 'user.{7}$'",
        "-d -m 'x*'",
    ] {
        let without_root = |text: Vec<u8>| {
            let text = String::from_utf8_lossy(&text).into_owned();
            text.replace(&format!("# file: {}/", root.display()), "# file: ").into_bytes()
        };
        let (ours, theirs) = (
            format!("getfattr {options} @/od/b.c"),
            format!("getfattr --absolute-names {options} @/od/b.c"),
        );
        same(image, root, (&ours, &theirs), false, without_root);
    }
    both(
        "getfattr -n user.origin --only-values @/od/b.c",
        "getfattr --absolute-names -n user.origin --only-values @/od/b.c",
    );
}

/// Names of owners come from the files in `/etc` of the volume, and not from those of this host.
#[test]
fn owners_have_the_names_that_the_volume_gives_them() {
    let Some(beside) = filled() else { return };
    let image = &beside.disks.images()[0];
    let dir = image.parent().expect("a directory");
    let name = image.file_name().expect("a name").to_str().expect("text");
    let listed = |line: &str| {
        let output = offshoot(dir, &words(&line.replace('@', &format!("{name}:"))));
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let line = listed("ls -l @/od/b.c");
    assert!(line.starts_with("-rw-r--r-- 2 alice users 10 2020-02-29 12:34 "), "{line}");
    // In columns, names are aligned to the left and numbers to the right.
    let lines = listed("ls -l @/od");
    assert!(lines.contains("-rwsr-xr-x  1  1234  4321   70000 2021-06-01 00:00 a.c\n"), "{lines}");
    assert!(lines.contains("-rw-r--r--  2 alice users      10 2020-02-29 12:34 b.c\n"), "{lines}");
    assert_eq!(listed("stat -c '%U %G' @/od/b.c @/od/a.c"), "alice users\nUNKNOWN UNKNOWN\n");
    assert_eq!(listed("find @/od -user alice -type f").lines().count(), 2);
    // Times are in the time zone of the caller.
    let output = super::program(dir)
        .env("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        .args(["stat", "-c", "%y", &format!("{name}:/od/b.c")])
        .output()
        .expect("the program starts");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2020-02-29 13:34:56.123456789 +0100\n");
}

#[test]
fn space_is_what_btrfs_and_df_say() {
    let Some(beside) = filled() else { return };
    let image = &beside.disks.images()[0];
    let dir = image.parent().expect("a directory");
    let name = image.file_name().expect("a name").to_str().expect("text");
    let mount = beside.disks.mount("ro");
    for path in ["od", "od/sub", "od/big", "home", "snapshot", "home/only", "home/new", "empty"] {
        let at = mount.path().join(path);
        let words = ["filesystem", "du", "--raw", "-s"].map(std::ffi::OsStr::new);
        let judge = run("btrfs", &[&words[..], &[at.as_os_str()]].concat());
        let expected: Vec<u64> = judge
            .lines()
            .last()
            .expect("a line")
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let place = format!("{name}:/{path}");
        let output = offshoot(dir, &["du", "-s", "--shares", "--json", &place]);
        let line = String::from_utf8_lossy(&output.stdout).into_owned();
        let told: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        let number = |key: &str| told[key].as_u64().expect(key);
        let found = [number("bytes"), number("exclusive"), number("shared")];
        // For a single file btrfs prints `-` instead of the bytes that a set of files shares.
        assert_eq!(found[..expected.len()], expected[..], "{path}\n{judge}\n{line}");
    }
    let judge = run(
        "df",
        &["-k".as_ref(), "--output=size,used,avail,pcent".as_ref(), mount.path().as_os_str()],
    );
    let output = offshoot(dir, &["df", name]);
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    let last = |text: &str| -> Vec<String> {
        text.lines().last().expect("a line").split_whitespace().map(str::to_owned).collect()
    };
    // The kernel counts its own reserve as used.
    let (ours, theirs) = (last(&line), last(&judge));
    assert_eq!((&ours[1], &ours[3]), (&theirs[0], &theirs[2]), "{line}\n{judge}");
}

/// Bytes that are escaped on a terminal are raw in other output.
#[test]
fn names_are_raw_off_a_terminal() {
    let dir = scratch_dir();
    let bytes: &[u8] = b"a\x1b[2J\xff\\";
    std::fs::write(dir.path().join(std::ffi::OsStr::from_bytes(bytes)), "x").expect("a file");
    super::does(dir.path(), "mkfs v.img --size 128M");
    let output =
        offshoot(dir.path(), &[b"cp" as &[u8], bytes, b"v.img:/"].map(std::ffi::OsStr::from_bytes));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(offshoot(dir.path(), &["ls", "v.img"]).stdout, [bytes, b"\n"].concat());
    let tree = offshoot(dir.path(), &["tree", "v.img:/"]).stdout;
    let line =
        [&b"v.img:/\n"[..], "└── ".as_bytes(), bytes, b"\n\n0 directories, 1 file\n"].concat();
    assert_eq!(tree, line);
    let found = offshoot(dir.path(), &["find", "v.img:/", "-type", "f", "-print0"]).stdout;
    assert_eq!(found, [&b"v.img:/"[..], bytes, b"\0"].concat());
}
