//! Options that change what the sources have: owners, labels and properties.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use offshoot_testkit::run::{command, run, try_run};
use offshoot_testkit::scratch_dir;

use super::other_program::copy_program;
use super::{BuildJudges, check, does, fails, format_name, on_both};

on_both!(
    labels_are_those_of_setfiles,
    owners_become_others,
    the_root_of_a_new_volume_is_its_makers,
);

/// The policy of Debian, where it is installed.
const POLICY: &str = "/etc/selinux/default/contexts/files/file_contexts";

/// Lines of all kinds.
const CONTEXTS: &str = r"
/.*                             system_u:object_r:default_t:s0
/[^/]+                  --      system_u:object_r:etc_runtime_t:s0
/                       -d      system_u:object_r:root_t:s0
/usr(/.*)?                      system_u:object_r:usr_t:s0
/usr/(.*/)?lib(64|32)?/.+\.so(\.[0-9]+)*   --  system_u:object_r:lib_t:s0
/usr/bin(/.*)?                  system_u:object_r:bin_t:s0
/usr/bin/passwd         --      system_u:object_r:passwd_exec_t:s0
/usr/bin/[a-m][[:alnum:]_-]{2,}  --  system_u:object_r:early_t:s0
/dev(/.*)?                      system_u:object_r:device_t:s0
/dev/null               -c      system_u:object_r:null_device_t:s0
/dev/[^/]*              -b      system_u:object_r:fixed_disk_t:s0-s15:c0.c1023
/run(/.*)?                      <<none>>
/run/lock               -d      system_u:object_r:lock_t:s0
/etc/run\.d                     system_u:object_r:exact_t:s0
/etc(/.*)?                      system_u:object_r:etc_t:s0
/home/[^/]+             -d      system_u:object_r:home_t:s0
";

/// Makes a tree like that of a small system.
fn system(root: &Path) {
    for name in [
        "usr/bin/passwd",
        "usr/bin/sh",
        "usr/bin/awk",
        "usr/bin/a-k",
        "usr/lib/libc.so.6",
        "usr/lib/x/lib64/m.so",
        "usr/lib/x/lib64/m.so.x",
        "usr/share/doc",
        "run/lock/subsys",
        "run/x",
        "etc/run.d/x",
        "etc/fstab",
        "home/lisa/file",
        "file",
        "odd \u{fc}\n[x]",
    ] {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(path, name).expect("a file");
    }
    fs::create_dir(root.join("dev")).expect("a directory");
    for words in ["null c 1 3", "sda b 8 0", "pipe p"] {
        let (name, rest) = words.split_once(' ').expect("words");
        let path = root.join("dev").join(name);
        let rest = rest.split(' ').map(OsStr::new);
        run("mknod", &[path.as_os_str()].into_iter().chain(rest).collect::<Vec<_>>());
    }
    symlink("usr/lib", root.join("lib")).expect("a link");
    symlink("null", root.join("dev/zero")).expect("a link");
    fs::hard_link(root.join("usr/bin/sh"), root.join("usr/bin/dash")).expect("a link");
}

/// All paths below `root`, from the root of a volume.
fn paths(root: &Path, dir: &str, into: &mut Vec<String>) {
    let mut names: Vec<_> = fs::read_dir(root.join(dir.trim_start_matches('/')))
        .expect("a directory")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .collect();
    names.sort();
    for name in names {
        let path = format!("{dir}/{name}");
        let metadata = fs::symlink_metadata(root.join(&path[1..])).expect("a file");
        into.push(path.clone());
        if metadata.is_dir() {
            paths(root, &path, into);
        }
    }
}

/// What `matchpathcon` says of a path.
fn judged(contexts: &Path, root: &Path, path: &str) -> Option<String> {
    let metadata = fs::symlink_metadata(root.join(&path[1..])).expect("a file");
    let file_type = match metadata.mode() & 0o170_000 {
        0o010_000 => "pipe",
        0o020_000 => "chr_file",
        0o040_000 => "dir",
        0o060_000 => "blk_file",
        0o120_000 => "lnk_file",
        _ => "file",
    };
    let contexts = contexts.to_str().expect("text");
    let said = run("matchpathcon", &["-n", "-m", file_type, "-f", contexts, path]);
    let said = said.strip_suffix('\n').expect("a line");
    (said != "<<none>>").then(|| said.to_owned())
}

/// The label in the mount of the kernel.
fn label(mount: &Path, path: &str) -> Option<String> {
    let path = mount.join(&path[1..]);
    let args = ["-h", "--only-values", "-n", "security.selinux"].map(OsStr::new);
    let value = try_run("getfattr", &[&args[..], &[path.as_os_str()]].concat()).ok()?;
    // The value is a string of C.
    Some(value.strip_suffix('\0').expect("a NUL byte at its end").to_owned())
}

/// The judge is `matchpathcon`, which asks libselinux as `setfiles` does.
fn labels_are_those_of_setfiles() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let top = dir.path().join("top");
    system(&top);
    fs::write(dir.path().join("fc"), CONTEXTS).expect("a file");
    fs::write(dir.path().join("fc.subs_dist"), "/lib /usr/lib\n/usr/lib/x /usr/x\n")
        .expect("a file");
    let mut all = vec!["/".to_owned()];
    paths(&top, "", &mut all);
    let own = dir.path().join("fc");
    let policies = [own.as_path(), Path::new(POLICY)];
    for contexts in policies.into_iter().filter(|contexts| contexts.exists()) {
        let shown = contexts.display();
        let line =
            format!("build v.img --force --format {} --from top --selinux {shown}", format_name());
        does(dir.path(), line.trim_end());
        check(&judges, &dir.path().join("v.img"));
        let mount = judges.mount(&dir.path().join("v.img"));
        let mut labels = 0;
        for path in &all {
            // The other name of the shell is met first.
            if path == "/usr/bin/sh" {
                continue;
            }
            let expected = judged(contexts, &top, path);
            assert_eq!(label(mount.path(), path), expected, "{shown}: {path}");
            labels += u32::from(expected.is_some());
        }
        assert!(labels >= 20, "{shown}: {labels}");
        let shared = judged(contexts, &top, "/usr/bin/dash");
        assert_eq!(label(mount.path(), "/usr/bin/sh"), shared);
    }
    fs::write(dir.path().join("fc"), "/a u:r:t:s0\n/(?!b) u:r:t:s0\n").expect("a file");
    let line = format!("build w.img --format {} --from top --selinux fc", format_name());
    let said = fails(dir.path(), &line, 1);
    assert!(said.contains("fc: line 2: the expression /(?!b) has a group"), "{said}");
    assert!(!dir.path().join("w.img").exists());
}

fn owners_become_others() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let top = dir.path().join("top");
    fs::create_dir(&top).expect("a directory");
    for (name, owner) in [("root", "0:0"), ("user", "1000:50"), ("other", "70000:7")] {
        fs::write(top.join(name), name).expect("a file");
        run("chown", &[owner.as_ref(), top.join(name).as_os_str()]);
    }
    let list = ["-m", "u:5:rwx,g:50:r", "user"];
    let set = command("setfacl").args(list).current_dir(&top).status();
    assert!(set.expect("setfacl starts").success());
    let line = format!(
        "build v.img --format {} --from top --to /a/b --map-uid 0:100000:65536 --map-gid 0:200000 \
         --map-gid 50:5",
        format_name()
    );
    does(dir.path(), &line);
    check(&judges, &dir.path().join("v.img"));
    let mount = judges.mount(&dir.path().join("v.img"));
    let owner = |name: &str| {
        let metadata = fs::metadata(mount.path().join(name)).expect("a file");
        (metadata.uid(), metadata.gid())
    };
    assert_eq!(owner("a/b/root"), (100_000, 200_000));
    assert_eq!(owner("a/b/user"), (101_000, 5));
    assert_eq!(owner("a/b/other"), (70_000, 7));
    // Directories that no source has, and the root of the volume.
    assert_eq!((owner("a"), owner(".")), ((100_000, 200_000), (100_000, 200_000)));
    let args = ["-n", "-c", "-p"].map(OsStr::new);
    let user = mount.path().join("a/b/user");
    let shown = run("getfacl", &[&args[..], &[user.as_os_str()]].concat());
    assert!(shown.contains("user:100005:rwx") && shown.contains("group:5:r--"), "{shown}");
    drop(mount);
    for (options, said) in [
        ("--map-uid 0:1:5 --map-uid 4:9", "--map-uid: the ranges from 4 and from 0 have numbers"),
        ("--map-gid 1:2:0", "--map-gid: 1:2:0 is no range of numbers"),
    ] {
        let said_now = fails(dir.path(), &format!("build w.img --from top {options}"), 2);
        assert!(said_now.contains(said), "{said_now}");
    }
    fails(dir.path(), "build w.img --from top --map-uid 1", 2);
}

/// An ordinary user can write in the volume that he made with `mkfs`, and builds one of root.
fn the_root_of_a_new_volume_is_its_makers() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let program = copy_program(dir.path());
    fs::create_dir(dir.path().join("top")).expect("a directory");
    run("chown", &["-R".as_ref(), "65534:65533".as_ref(), dir.path().as_os_str()]);
    let as_user = |line: &str| {
        let user = ["--reuid=65534", "--regid=65533", "--clear-groups"];
        let mut words: Vec<&str> = line.split(' ').collect();
        words.extend(["--format", format_name()]);
        let output = command("setpriv")
            .args(user)
            .arg(&program)
            .args(words)
            .current_dir(dir.path())
            .output()
            .expect("setpriv starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {said}");
        let mount = judges.mount(&dir.path().join("v.img"));
        let metadata = fs::metadata(mount.path()).expect("the root");
        (metadata.uid(), metadata.gid())
    };
    assert_eq!(as_user("mkfs v.img --size 320M"), (65534, 65533));
    assert_eq!(as_user("mkfs v.img --force --root-owner 0:7"), (0, 7));
    assert_eq!(as_user("build v.img --force --from top --to /x"), (0, 0));
    let line = "build v.img --force --from top --root-owner 5:6 --map-uid 0:9";
    assert_eq!(as_user(line), (5, 6));
    assert_eq!(as_user("build v.img --force --from top --to /x --map-uid 0:9"), (9, 0));
}

/// Properties are those that `btrfs property` and `chattr` set, and files inherit them.
#[test]
fn properties() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let top = dir.path().join("top");
    let text = "text that compression makes much smaller\n".repeat(10_000);
    for name in ["log/a/f", "db/f", "db/plain", "plain/f", "never/f", "odd:x/f", "later/f"] {
        let path = top.join(name);
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(path, &text).expect("a file");
    }
    run(
        "tar",
        &[
            OsStr::new("-cf"),
            dir.path().join("t.tar").as_ref(),
            "-C".as_ref(),
            top.as_ref(),
            ".".as_ref(),
        ],
    );
    // A source with every directory, one that makes directories without saying so, and subvolumes.
    for more in ["--from top", "--from t.tar", "--from top --subvolume log --subvolume db"] {
        let line = format!(
            "build v.img --force {more} --property log:compression=zstd --property \
             /db/:nodatacow --property db/plain:compression=lzo --property never:nocompress \
             --property /odd:x:compression=zlib --property later/f:compression=none"
        );
        does(dir.path(), &line);
        check(&judges, &dir.path().join("v.img"));
        let mount = judges.mount(&dir.path().join("v.img"));
        let path = |name: &str| mount.path().join(name);
        let compression = |name: &str| {
            let path = path(name);
            let args = ["property", "get"].map(OsStr::new);
            let last = "compression".as_ref();
            run("btrfs", &[&args[..], &[path.as_os_str(), last]].concat()).trim().to_owned()
        };
        let flags = |name: &str| {
            let path = path(name);
            let shown = run("lsattr", &["-d".as_ref(), path.as_os_str()]);
            shown.split(' ').next().unwrap_or_default().replace('-', "")
        };
        for (name, shown, letters) in [
            ("log", "compression=zstd", "c"),
            ("log/a", "compression=zstd", "c"),
            ("log/a/f", "compression=zstd", "c"),
            ("db", "", "C"),
            ("db/f", "", "C"),
            ("db/plain", "compression=lzo", "c"),
            ("plain", "", ""),
            ("plain/f", "", ""),
            ("never", "", "m"),
            ("never/f", "", "m"),
            ("odd:x/f", "compression=zlib", "c"),
            ("later", "", ""),
        ] {
            assert_eq!((compression(name), flags(name)), (shown.into(), letters.into()), "{name}");
        }
        for name in ["log/a/f", "db/f", "never/f"] {
            assert_eq!(fs::read_to_string(path(name)).expect("a file"), text, "{name}");
        }
        let stored = |name: &str| {
            let extents = run("filefrag", &["-v".as_ref(), path(name).as_os_str()]);
            extents.contains("encoded")
        };
        assert!(stored("log/a/f") && stored("odd:x/f"));
        assert!(!stored("db/f") && !stored("never/f") && !stored("plain/f"));
    }
    for (options, status, said) in [
        ("--property log:compression=zstd:3", 2, "the property holds no level"),
        ("--property log:compression=brotli", 2, "compression is zstd, lzo, zlib, none or no"),
        ("--property log", 2, "compression=VALUE, nodatacow or nocompress is expected"),
        ("--property log:nodatacow --property /log:nocompress", 1, "it is given two properties"),
        ("--property ../x:nodatacow", 1, "leads upwards"),
        ("--property none:nodatacow", 1, "/none: it has a property, and nothing was made"),
        (
            "--property log:nodatacow --layers snapshots",
            2,
            "layers as snapshots have no --property yet: leave out --layers",
        ),
        ("--property log:nodatacow --format xfs", 2, "XFS volumes have no --property"),
    ] {
        let said_now = fails(dir.path(), &format!("build w.img --from top {options}"), status);
        assert!(said_now.contains(said), "{options}: {said_now}");
    }
}
