//! Volumes that the program changes. After each verb `xfs_repair` finds nothing, and the kernel,
//! which has nothing to recover, shows the change.

use std::fs::File;
use std::path::Path;

use offshoot_testkit::run::command;
use offshoot_testkit::xfs::judges;

use super::{FewFiles, lines};

/// Runs a script in a directory, and returns what it prints.
#[track_caller]
fn shell(dir: &Path, script: &str) -> String {
    let output = command("bash").args(["-c", script]).current_dir(dir).output().expect("bash");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What the kernel must show after each verb: the output of a script in its mount.
const CHANGES: &[(&str, &str, &str)] = &[
    ("mkdir -p -m 750 v.img:/new/deep", "stat -c '%a %h' new/deep", "750 2\n"),
    ("cp file v.img:/new/copy", "cat new/copy; stat -c %Y new/copy", "of the host\n1000000000\n"),
    ("cp -r tree v.img:/tree", "cat tree/a/b tree/a/c; readlink tree/link", "bbcc\na\n"),
    (
        "cp --reflink=always v.img:/dir/big v.img:/shared",
        "cmp shared dir/big && echo same",
        "same\n",
    ),
    ("cp -r v.img:/tree v.img:/again", "diff -r tree again && echo same", "same\n"),
    (
        "mv v.img:/text v.img:/new/moved",
        "cat new/moved; ls",
        "what the kernel wrote\nagain\ndir\nlink\nnew\nshared\ntree\n",
    ),
    ("mv --exchange v.img:/new/moved v.img:/new/copy", "cat new/moved", "of the host\n"),
    ("ln v.img:/new/copy v.img:/hard", "stat -c %h hard", "2\n"),
    ("ln -s new/copy v.img:/soft", "readlink soft", "new/copy\n"),
    ("chmod -R u=rwX,go= v.img:/tree", "stat -c %a tree tree/a/b", "700\n600\n"),
    ("chown -R 7:8 v.img:/tree", "stat -c %u:%g tree/a/b", "7:8\n"),
    ("touch -d 2001-02-03T04:05:06Z v.img:/hard", "stat -c %Y hard", "981173106\n"),
    ("truncate -s 10 v.img:/hard", "cat hard", "what the k"),
    ("truncate -s 5G v.img:/large", "stat -c '%s %b' large", "5368709120 0\n"),
    ("fallocate -l 1M v.img:/room", "stat -c '%s %b' room", "1048576 2048\n"),
    (
        "fallocate -p -o 64K -l 64K v.img:/dir/big",
        "cmp -n 65536 dir/big shared && stat -c %s dir/big",
        "300000\n",
    ),
    (
        "setfattr -n user.new -v value v.img:/hard",
        "getfattr --only-values -n user.new hard",
        "value",
    ),
    ("setfattr -x user.new v.img:/hard", "getfattr -d hard | grep -c new || true", "0\n"),
    ("chattr +i v.img:/hard", "lsattr hard | cut -c5", "i\n"),
    ("chattr -i v.img:/hard", "lsattr hard | cut -c5", "-\n"),
    (
        "mknod -m 600 v.img:/node c 1 3",
        "stat -c '%F %t,%T %a' node",
        "character special file 1,3 600\n",
    ),
    ("dedupe v.img:/shared v.img:/copy-of-big", "cmp copy-of-big shared && echo same", "same\n"),
    ("find v.img:/again -name b -delete", "ls again/a", "c\n"),
    (
        "rm v.img:/hard v.img:/soft v.img:/node",
        "ls",
        "again\ncopy-of-big\ndir\nlarge\nlink\nnew\nroom\nshared\ntree\n",
    ),
    ("rm -r v.img:/tree v.img:/again", "ls -d tree again 2>/dev/null | wc -l", "0\n"),
    ("rmdir v.img:/dir/empty", "ls dir", "again\nbig\n"),
    ("property set v.img:/ label seen", "true", ""),
    ("trim v.img", "true", ""),
];

#[test]
fn after_each_verb_the_kernel_shows_the_change() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let disk = &few.filled.disk;
    shell(
        few.dir(),
        "echo of the host > file; touch -d @1000000000 file; mkdir -p tree/a; printf bb > tree/a/b
         echo cc > tree/a/c; ln -s a tree/link",
    );
    for (line, script, shown) in CHANGES {
        if line.starts_with("dedupe") {
            few.does("cp --reflink=never v.img:/shared v.img:/copy-of-big");
        }
        few.does(line);
        disk.assert_checks();
        let mount = disk.mount("rw,noatime", &[]);
        assert_eq!(shell(mount.path(), script), *shown, "{line}");
    }
    assert_eq!(few.does("property get v.img:/ label"), "label=seen\n");
    assert_eq!(few.does("property list v.img:/").lines().count(), 1);
    assert_eq!(disk.xfs_db(&["label"]).trim(), "label = \"seen\"");
    let said = few.fails("property set v.img:/ label thirteen-byte", 1);
    assert!(said.contains("label cannot be thirteen-byte"), "{said}");
    let stats = few.does("stats v.img");
    assert!(stats.starts_with("size ") && stats.lines().count() == 3, "{stats}");
    let json: serde_json::Value =
        serde_json::from_str(&few.does("stats --json v.img")).expect("JSON");
    assert!(json["available"].as_u64().is_some_and(|bytes| bytes > 100 << 20), "{json}");
    let output = lines::offshoot(few.dir(), &["mkdir", "--stats", "v.img:/last"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("log_checkpoints"), "{said}");
}

/// A volume that was not unmounted is recovered before it is changed, and the user is told.
#[test]
fn a_log_that_is_not_empty_is_recovered_first() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let disk = &few.filled.disk;
    few.leave_a_log();
    let output = lines::offshoot(few.dir(), &["mkdir", "v.img:/new"]);
    let said = String::from_utf8_lossy(&output.stderr);
    let is_told = said.contains("its log is replayed to the device") && said.lines().count() == 1;
    assert!(output.status.success() && is_told, "{said}");
    disk.assert_checks();
    let mount = disk.mount("rw", &[]);
    assert_eq!(std::fs::read(mount.path().join("after")).expect("a file"), b"logged");
    assert!(mount.path().join("new").is_dir());
    drop(mount);
    // It cannot be changed with the log ignored.
    let said = few.fails("mkdir --ignore-log v.img:/other", 4);
    assert!(said.contains("writing XFS with the log ignored"), "{said}");
}

/// What fails in the middle leaves a volume that is whole, and ends with an error.
#[test]
fn a_full_volume_is_an_error_and_stays_whole() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let disk = &few.filled.disk;
    File::create(few.dir().join("huge"))
        .and_then(|file| {
            use std::io::Write;
            let piece = vec![7; 1 << 20];
            (0..600).try_for_each(|_| (&file).write_all(&piece))
        })
        .expect("a file");
    let said = few.fails("cp huge v.img:/", 1);
    assert!(said.contains("No space left"), "{said}");
    disk.assert_checks();
    let mount = disk.mount("rw", &[]);
    assert!(!mount.path().join("huge").exists());
    drop(mount);
    few.does("mkdir v.img:/new");
    disk.assert_checks();
}

/// Where files cannot share blocks, a copy inside the volume copies.
#[test]
fn files_are_copied_where_none_can_share_blocks() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    few.does("mkfs --format xfs --size 300M -O ^reflink w.img");
    few.does("cp v.img:/text w.img:/text");
    few.does("cp w.img:/text w.img:/copy");
    assert_eq!(few.does("cat w.img:/copy"), few.does("cat v.img:/text"));
    let said = few.fails("cp --reflink=always w.img:/text w.img:/shared", 1);
    assert!(said.contains("sharing its data: Operation not supported"), "{said}");
}
