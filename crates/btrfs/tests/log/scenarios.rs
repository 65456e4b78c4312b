//! Operations that broke real filesystems, each with its story.
//!
//! Every scenario has a subvolume of its own, and so a log of its own.

use std::path::Path;

use offshoot_testkit::btrfs::judges;

use crate::cut::{LogShape, SHAPES, cut, judge, logs, make, mount_options, shell};

/// What the kernel does to an empty subvolume: before a commit, and after it up to an fsync.
struct Scenario {
    name: &'static str,
    before: &'static str,
    after: &'static str,
}

const fn scenario(name: &'static str, before: &'static str, after: &'static str) -> Scenario {
    Scenario { name, before, after }
}

/// Scenarios for which the kernel writes a log.
const LOGGED: &[Scenario] = &[
    // The new name is there, or the old one: never neither. Where only the new parent is synced,
    // the kernel may leave both.
    scenario("rename-file", "mkdir a b; echo 1 > a/x", "mv a/x b/y; sync b/y"),
    scenario("rename-new-parent", "mkdir a b; echo 1 > a/x", "mv a/x b/y; sync b"),
    scenario("rename-old-parent", "mkdir a b; echo 1 > a/x", "mv a/x b/y; sync a"),
    scenario("rename-in-place", "echo 1 > x", "mv x y; sync y"),
    scenario("rename-and-new-file", "echo 1 > x", "mv x y; echo 2 > x; sync x"),
    scenario("rename-chain", "echo 1 > x; echo 2 > y", "mv y z; mv x y; sync y"),
    scenario("exchange", "echo 1 > x; echo 2 > y", "mv x t; mv y x; mv t y; sync x"),
    // The steps of editors and package managers.
    scenario("replace", "echo old > x", "echo new > x.new; sync x.new; mv x.new x; sync x"),
    scenario("replace-parent", "echo old > x", "echo new > x.new; sync x.new; mv x.new x; sync ."),
    // Links: the link count is the number of names.
    scenario("link-count", "echo 1 > x", "ln x y; ln x z; sync x"),
    scenario("link-and-unlink", "mkdir a; echo 1 > x; ln x a/y; ln x z", "rm z; ln x w; sync x"),
    // The log has the property of the moved file, and its flags as they were before.
    scenario(
        "property-of-a-moved-file",
        "mkdir a b; echo 1 > a/x",
        "btrfs property set a/x compression zstd; mv a/x b/x; sync b",
    ),
    scenario(
        "link-after-log",
        "mkdir a; echo 1 > x",
        "echo 2 >> x; sync x; ln x a/y; echo 3 > z; sync z",
    ),
    scenario("link-after-log-dir", "mkdir a; echo 1 > x", "echo 2 >> x; sync x; ln x a/y; sync a"),
    scenario("unlink-one-of-two", "mkdir a; echo 1 > x; ln x a/y", "rm a/y; sync x"),
    scenario(
        "many-links",
        "echo 1 > x; for i in $(seq 200); do ln x a-long-name-of-a-link-$i; done",
        "for i in $(seq 100); do rm a-long-name-of-a-link-$i; done; for i in $(seq 300 400); do ln x a-long-name-of-a-link-$i; done; sync x",
    ),
    // Directories.
    scenario("dir-over-empty", "mkdir a b; echo 1 > a/x", "mv -T a b; sync b"),
    scenario("dir-over-empty-parent", "mkdir a b; echo 1 > a/x", "mv -T a b; sync ."),
    scenario("dir-moved", "mkdir -p a/c b; echo 1 > a/c/x", "mv a/c b/c; sync b/c"),
    scenario("new-tree", ":", "mkdir -p a/b/c; echo 1 > a/b/c/x; sync a/b/c/x"),
    scenario(
        "new-tree-dir",
        ":",
        "mkdir -p a/b/c; echo 1 > a/b/c/x; ln -s x a/b/l; mkfifo a/p; sync a",
    ),
    scenario(
        "deleted-entries",
        "for i in $(seq 300); do echo $i > file-$i; done",
        "rm file-1* file-300; touch new; sync .",
    ),
    scenario("deleted-dir", "mkdir -p a/b; echo 1 > a/b/x", "rm -r a; touch b; sync ."),
    scenario(
        "deleted-and-made",
        "mkdir a; echo 1 > a/x",
        "rm -r a; mkdir a; echo 2 > a/y; sync a/y",
    ),
    scenario(
        "log-twice",
        "mkdir a; echo 1 > a/x; echo 1 > a/w",
        "rm a/x; echo 1 > a/y; sync a; rm a/y; rm a/w; echo 2 > a/z; sync a",
    ),
    scenario(
        "large-dir",
        "mkdir a; echo 1 > a/first",
        "for i in $(seq 1500); do : > a/a-file-with-a-name-$i; done; sync a; rm a/a-file-with-a-name-1*; sync a",
    ),
    // Data.
    scenario(
        "append",
        "head -c 100000 /dev/urandom > x",
        "head -c 50000 /dev/urandom >> x; sync x",
    ),
    scenario(
        "overwrite",
        "head -c 1000000 /dev/urandom > x",
        "head -c 5000 /dev/urandom | dd of=x bs=1000 seek=77 conv=notrunc status=none; sync x",
    ),
    scenario(
        "text",
        "seq 20000 > x",
        "seq 30000 40000 | dd of=x bs=1000 seek=20 conv=notrunc status=none; sync x; seq 1000 | dd of=x bs=1000 seek=25 conv=notrunc status=none; sync x",
    ),
    scenario("inline", "echo 1 > x; echo 1 > y", "echo 22 > x; sync x; seq 2000 >> y; sync y"),
    scenario("truncate", "head -c 100000 /dev/urandom > x", "truncate -s 5000 x; sync x"),
    scenario(
        "truncate-and-write",
        "head -c 100000 /dev/urandom > x",
        "truncate -s 5000 x; truncate -s 50000 x; echo 1 >> x; sync x",
    ),
    scenario(
        "hole-at-end",
        "head -c 65536 /dev/urandom > x",
        "fallocate -p -o 40960 -l 24576 x; sync x",
    ),
    scenario(
        "hole-inside",
        "head -c 1048576 /dev/urandom > x",
        "fallocate -p -o 40960 -l 245760 x; sync x",
    ),
    scenario("hole-grown", "head -c 65536 /dev/urandom > x", "truncate -s 1M x; sync x"),
    scenario(
        "prealloc-behind",
        "head -c 65536 /dev/urandom > x",
        "fallocate -n -o 65536 -l 131072 x; sync x",
    ),
    scenario(
        "prealloc-written",
        "fallocate -l 262144 x",
        "head -c 65536 /dev/urandom | dd of=x bs=4096 seek=3 conv=notrunc status=none; sync x",
    ),
    scenario(
        "prealloc-cut",
        "head -c 65536 /dev/urandom > x; fallocate -n -o 65536 -l 131072 x",
        "truncate -s 70000 x; sync x",
    ),
    scenario(
        "reflink",
        "head -c 262144 /dev/urandom > x; : > y",
        "cp --reflink=always x y; sync y; cp --reflink=always x z; sync z",
    ),
    scenario(
        "reflink-new",
        ":",
        "head -c 262144 /dev/urandom > x; cp --reflink=always x y; sync x; head -c 9000 /dev/urandom | dd of=y bs=4096 seek=7 conv=notrunc status=none; sync y",
    ),
    scenario(
        "nocow",
        ": > x; chattr +C x; head -c 65536 /dev/urandom > x",
        "head -c 9000 /dev/urandom | dd of=x bs=4096 seek=3 conv=notrunc status=none; head -c 90000 /dev/urandom >> x; sync x",
    ),
    scenario(
        "collapse",
        "head -c 262144 /dev/urandom > x",
        "dd if=/dev/urandom of=x bs=4096 count=3 conv=notrunc status=none; fallocate -p -o 8192 -l 4096 x; sync x",
    ),
    // Attributes.
    scenario(
        "xattr-removed",
        "echo 1 > x; setfattr -n user.one -v 1 x; setfattr -n user.two -v 2 x",
        "echo 2 > x; sync x; setfattr -x user.one x; sync x",
    ),
    scenario(
        "xattr-dir",
        "mkdir a; setfattr -n user.one -v 1 a",
        "setfattr -x user.one a; setfattr -n user.two -v 2 a; sync a",
    ),
    scenario("mode", "echo 1 > x", "chmod 600 x; chown 5:6 x; sync x"),
    scenario("flags", "echo 1 > x", "chattr +dA x; sync x"),
    // An orphan is known only to the process that has it open.
    scenario(
        "orphan",
        "echo 1 > x; echo 1 > y",
        "exec 3<>x; rm x; echo 2 >&3; echo 2 > y; sync /proc/self/fd/3; sync y",
    ),
    scenario("orphan-and-name", "echo 1 > x", "exec 3<>x; rm x; echo 3 > x; sync x"),
    scenario("symlink", "ln -s a l", "rm l; ln -s b l; echo 1 > x; sync x; sync ."),
];

/// Does all of `scenarios` side by side, and returns how many logs there are.
fn all(shape: LogShape, scenarios: &[Scenario]) {
    let Some(judges) = judges::require() else { return };
    let in_each = |path: &Path, script: &dyn Fn(&Scenario) -> &'static str| {
        for one in scenarios {
            shell(&path.join(one.name), script(one));
        }
    };
    let before = |path: &Path| {
        for one in scenarios {
            shell(path, &format!("btrfs -q subvolume create {}", one.name));
        }
        in_each(path, &|one| one.before);
    };
    let cut = cut(&judges, shape, before, |path| in_each(path, &|one| one.after));
    let logs = logs(&cut);
    println!("{shape:?}: {logs} logs of {} scenarios", scenarios.len());
    assert!(logs > 0, "{shape:?}: the kernel committed");
    judge(&judges, &cut, &format!("{shape:?}"), scenarios.len() as u64);
}

/// Does one scenario alone, and requires that the kernel writes a log for it.
fn alone(name: &str) {
    let Some(judges) = judges::require() else { return };
    let one = LOGGED.iter().find(|one| one.name == name).expect("a scenario");
    let cut = cut(
        &judges,
        crate::cut::PLAIN,
        |path| shell(path, one.before),
        |path| shell(path, one.after),
    );
    println!("{name}: {} logs", logs(&cut));
    judge(&judges, &cut, name, 1);
}

macro_rules! scenarios {
    ($($test:ident: $name:literal;)*) => {$(
        #[test]
        fn $test() {
            alone($name);
        }
    )*};
}

scenarios! {
    a_renamed_file_that_is_synced: "rename-file";
    a_rename_whose_new_parent_is_synced: "rename-new-parent";
    a_rename_whose_old_parent_is_synced: "rename-old-parent";
    a_name_that_is_taken_over_by_a_synced_file: "rename-and-new-file";
    a_name_that_is_replaced: "replace";
    links_are_counted: "link-count";
    a_link_to_a_file_that_was_logged_before: "link-after-log";
    a_directory_over_an_empty_one: "dir-over-empty";
    a_hole_at_the_end: "hole-at-end";
    space_preallocated_behind_the_end: "prealloc-behind";
    an_attribute_removed_after_a_log: "xattr-removed";
    a_compression_property_without_its_flags: "property-of-a-moved-file";
    an_orphan_that_is_synced: "orphan";
}

#[test]
fn all_of_them_on_all_kinds_of_volumes() {
    for shape in SHAPES {
        for part in LOGGED.chunks(12) {
            all(shape, part);
        }
    }
}

/// A snapshot includes what the log holds, so the kernel ends the log before it.
#[test]
fn a_snapshot_between_log_and_commit() {
    let Some(judges) = judges::require() else { return };
    let before = |path: &Path| shell(path, "btrfs -q subvolume create s; echo 1 > s/x");
    let after = |path: &Path| {
        shell(
            path,
            "echo 2 > s/x; sync s/x; btrfs -q subvolume snapshot s t; echo 3 > s/y; sync s/y",
        );
    };
    let cut = cut(&judges, crate::cut::PLAIN, before, after);
    assert_eq!(logs(&cut), 1);
    judge(&judges, &cut, "a snapshot", 4);
}

/// The log of a subvolume that was deleted afterwards is not replayed.
#[test]
fn a_subvolume_deleted_after_its_fsync() {
    let Some(judges) = judges::require() else { return };
    let before = |path: &Path| {
        shell(path, "btrfs -q subvolume create s; btrfs -q subvolume create t; echo 1 > s/x");
    };
    let after = |path: &Path| {
        shell(
            path,
            "echo 2 > s/x; sync s/x; btrfs -q subvolume delete -C s; echo 3 > t/y; sync t/y",
        );
    };
    let cut = cut(&judges, crate::cut::PLAIN, before, after);
    judge(&judges, &cut, "a deleted subvolume", 2);
}

/// A long log: one fsync after another without a commit.
#[test]
fn many_fsyncs() {
    let Some(judges) = judges::require() else { return };
    let disks = make(&judges, SHAPES[1]);
    let mount = disks.mount(&mount_options(SHAPES[1]));
    shell(mount.path(), "mkdir a b; for i in $(seq 20); do seq $i 3000 > a/$i; done; sync -f .");
    for round in 0..6 {
        let script = format!(
            "for i in $(seq 1 3 20); do seq {round} 500 >> a/$i; sync a/$i; done; mv a/$((2 + {round} * 3)) b/{round}; sync b/{round}; rm -f a/{round}; sync a"
        );
        shell(mount.path(), &script);
    }
    let cut = disks.copy(&judges);
    drop(mount);
    judge(&judges, &cut, "many fsyncs", 10);
}
