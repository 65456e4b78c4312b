//! Verbs that change, beside the core utilities in a directory of the host.
//!
//! Every line of a script runs on both sides, and must end with the same exit code. Its standard
//! output must be the same, except for the volume in front of paths. At the end the volume is
//! extracted, and `find` of the host lists both trees.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::{command, run};
use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs::disk::XfsDisk;

use super::{check, does, fails, is_xfs, offshoot, on_both, program, volume, words};

/// A script that makes the files that both sides start with.
const FILL: &str = r"
set -e
mkdir -p d/sub/deep e empty/one t
printf a > a; printf b > b; printf x > d/x; printf y > d/sub/y.o; printf z > d/sub/deep/z
printf 'root:x:0:0::/:\nalice:x:1000:100::/:\n' > passwd
chmod 640 a; chmod 4755 b; chmod 2711 d; chmod 1777 e
ln -s a to-a; ln -s d to-d; ln -s none dangling
for file in t/1 t/2 t/3; do printf t > $file; touch -d '2001-02-03 04:05:06Z' $file; done
touch -d '2010-01-01Z' d/x; touch -d '2005-01-01Z' a
";

pub(super) struct ChangeSides {
    dir: tempfile::TempDir,
}

impl ChangeSides {
    pub(super) fn new() -> Self {
        let dir = scratch_dir();
        fs::create_dir(dir.path().join("host")).expect("a directory");
        shell(&dir.path().join("host"), FILL);
        volume(dir.path(), "v.img", 128);
        does(dir.path(), "cp -r host/. v.img:/");
        Self { dir }
    }

    pub(super) fn host(&self) -> std::path::PathBuf {
        self.dir.path().join("host")
    }

    /// Runs one line on both sides, ours first. In the line, `@` is in front of each path.
    pub(super) fn both(&self, line: &str, input: &str) -> [Output; 2] {
        let replaced = |with: &str| -> Vec<String> {
            words(line).iter().map(|word| word.replace('@', with)).collect()
        };
        let ours = with_input(program(self.dir.path()).args(replaced("v.img:/")), input);
        let theirs = replaced("");
        let mut judge = command(&theirs[0]);
        [ours, with_input(judge.args(&theirs[1..]).current_dir(self.host()), input)]
    }

    /// Runs one line on both sides, and requires that both do the same.
    #[track_caller]
    pub(super) fn run(&self, line: &str, input: &str) {
        let [ours, judge] = self.both(line, input);
        let [said, reason] =
            [&ours.stderr, &judge.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert_eq!(ours.status.code(), judge.status.code(), "{line}\n{said}\n{reason}");
        assert_eq!(said.is_empty(), reason.is_empty(), "{line}\n{said}\n{reason}");
        let sorted = |text: &[u8]| {
            // Our paths have no `.` and no double slashes, so the comparison removes them.
            let text = String::from_utf8_lossy(text).replace("v.img:/", "");
            let text = text.replace("/./", "/").replace("//", "/").replace("/.'", "'");
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        let messages = sorted(&ours.stderr);
        let (ours, mut theirs) = (sorted(&ours.stdout), sorted(&judge.stdout));
        if line.starts_with("cp ") {
            // We report what was copied. `cp -v` also prints a file that it then fails to copy; for
            // such a file, we print only the error.
            let is_failed = |told: &String| {
                let mut names = told.split('\'').skip(1).step_by(2);
                names.any(|name| {
                    let of_it = ["offshoot: ", name].concat();
                    let rest = |line: &String| line.strip_prefix(&of_it)?.chars().next();
                    messages.iter().filter_map(rest).any(|next| matches!(next, ':' | ','))
                })
            };
            theirs.retain(|told| ours.contains(told) || !is_failed(told));
        }
        assert_eq!(ours, theirs, "{line}\n{said}\n{reason}");
    }

    /// Compares both trees.
    #[track_caller]
    pub(super) fn compare(&self) {
        let out = self.dir.path().join("out");
        does(self.dir.path(), "extract v.img out");
        assert_eq!(described(&out), described(&self.host()));
        check(&self.image());
    }

    /// Has the kernel, and the check of the format, judge the volume as the last line left it.
    #[track_caller]
    pub(super) fn judge(&self) {
        check(&self.image());
        let look = |root: &Path| assert_eq!(described(root), described(&self.host()));
        if !is_xfs() {
            let images = [self.image()];
            look(MountedMembers::try_new(&images, "ro,noatime").expect("it mounts").path());
        } else if let Some(judges) = offshoot_testkit::xfs::judges::require() {
            // It complains of nothing, and has no log to recover.
            let disk = XfsDisk::served(&judges, &self.image());
            look(disk.mount("rw,noatime", &[]).path());
        }
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("v.img")
    }
}

/// The files of a tree, the times of those below `t` and of those that were copied there, and its
/// devices.
fn described(root: &Path) -> [String; 3] {
    let all = "find . -mindepth 1 -printf '%P %y %m %U:%G %l\\n' | sort";
    let times = "find . -type f ! -newermt 2024-01-01 -printf '%P %T@\\n' | sort";
    let types = "find . -type b,c -exec stat -c '%n %t,%T' {} + | sort";
    [all, times, types].map(|script| shell(root, script))
}

fn shell(dir: &Path, script: &str) -> String {
    let mut bash = command("bash");
    let output = bash.args(["-c", script]).current_dir(dir).output().expect("bash starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn with_input(command: &mut std::process::Command, input: &str) -> Output {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().expect("it starts");
    // A command that asks nothing may have ended already.
    let _ = child.stdin.take().expect("its input").write_all(input.as_bytes());
    child.wait_with_output().expect("it ends")
}

#[track_caller]
fn script(lines: &[&str]) {
    if judges::require().is_none() {
        return;
    }
    let sides = ChangeSides::new();
    for line in lines {
        let (line, input) = line.split_once(" < ").unwrap_or((line, ""));
        sides.run(line, &input.replace(',', "\n"));
    }
    sides.compare();
}

fn chmod() {
    script(&[
        "chmod 600 @a",
        "chmod 755 @d",
        "chmod 0755 @d",
        "chmod u+x,g=u-w,o= @a",
        "chmod a=rX @b @e",
        "chmod +t,u+s @t/1",
        "chmod -R go-rwx @d",
        "chmod -R u=rwX,g=rX,o=g @d",
        "chmod = @t/2",
        "chmod u=s @t/3 @e",
        "chmod 644 @to-a",
        "chmod 644 @dangling",
        "chmod 644 @none @t/2",
        "chmod g=o,o=u @t/2",
        "chmod -v 644 @a @none @dangling @a/x",
        "chmod -c u+x,g=u-w,o= @a @b",
        "chmod -cv 4755 @a @b @to-a",
        "chmod -Rv =750,+1000 @d @t",
        "chmod -Rc g+s @d",
        "chmod -f 600 @none @b",
        "chmod -vf 600 @none",
        "chmod 666 @t/1",
        "chmod -w @t/1",
        "chmod -fv -wx @t/2",
    ]);
    let dir = scratch_dir();
    does(dir.path(), "mkfs v.img --size 128M");
    assert!(fails(dir.path(), "chmod u+q v.img:/", 2).contains("u+x,go-w"));
}

fn chown() {
    script(&[
        "chown 1000:100 @a",
        "chown 7 @b",
        "chown :8 @b",
        "chown -R 5:6 @d",
        "chown 9:9 @to-a",
        "chown --no-dereference 11:12 @to-a",
        "chown 1:1 @none",
        "chown -R 3:3 @to-d",
    ]);
}

fn owners_are_found_by_the_names_of_the_volume() {
    let dir = scratch_dir();
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).expect("a file");
    write("passwd", "root:x:0:0::/:\nalice:x:1000:100::/:\n");
    write("group", "users:x:100:\nstaff:x:50:\n");
    volume(dir.path(), "v.img", 128);
    does(dir.path(), "mkdir v.img:/etc");
    does(dir.path(), "cp passwd group v.img:/etc");
    for (owner, ids) in
        [("alice", "1000 0"), ("0:staff", "0 50"), ("alice:", "1000 100"), (":users", "1000 100")]
    {
        does(dir.path(), "chown 0 v.img:/etc/group");
        if owner == ":users" {
            does(dir.path(), "chown 1000 v.img:/etc/group");
        }
        if owner == "alice" {
            does(dir.path(), "chown :0 v.img:/etc/group");
        }
        does(dir.path(), &format!("chown {owner} v.img:/etc/group"));
        assert_eq!(does(dir.path(), "stat -c '%u %g' v.img:/etc/group").trim(), ids, "{owner}");
    }
    assert!(fails(dir.path(), "chown bob v.img:/etc/group", 1).contains("no user is called bob"));
}

fn touch() {
    script(&[
        "touch -d '2022-03-04 05:06:07.5Z' @t/1",
        "touch -m -d '1970-01-02 00:00:00Z' @t/2",
        "touch -a -t 200102030405.06 @t/2",
        "touch -r @t/1 @t/3",
        "touch -c @t/none",
        "touch -d '2022-03-04 05:06 +0100' @t/new",
        "touch @new",
        "touch @none/x",
        "touch -d 2022-01-01 @to-a",
        "touch --no-dereference -d 2021-01-01 @to-a",
    ]);
    let dir = scratch_dir();
    does(dir.path(), "mkfs v.img --size 128M");
    assert!(fails(dir.path(), "touch -d soon v.img:/x", 2).contains("2026-11-20"));
}

fn mknod_and_rmdir() {
    script(&[
        "mknod -m 666 @null c 1 3",
        "mknod @disk b 259 70000",
        "mknod @fifo p",
        "mknod @fifo p",
        "mknod @a c 1 3",
        "rmdir @empty/one",
        "rmdir @empty @d",
        "rmdir @a @none",
        "mkdir -p @x/y/z",
        "rmdir -p @x/y/z",
        "mkdir -p @x/y/z @x/w",
        "rmdir -p @x/y/z",
        "rmdir @to-d",
    ]);
}

fn rm_asks_and_tells() {
    script(&[
        "rm -v @a",
        "rm -ri @empty < y,n",
        "rm -rv @empty",
        "rm -i @b < n",
        "rm -i @b < y",
        "rm -ri @d < y,y,y,y,y,y,y,y,y",
        "rm -d @e",
        "rm -d @t",
        "rm -iv @t/1 @t/2 @t/3 < y,no,yes",
        "rm -if @none",
        "rm -vf @none @to-a",
    ]);
}

fn find_deletes() {
    script(&[
        "find @d -name '*.o' -delete",
        "find @t -type f -newermt 1990-01-01 -delete",
        "find @e -delete",
    ]);
}

fn cp_keeps_updates_and_tells() {
    script(&[
        "cp -pn @a @b",
        "cp -pu @a @d/x",
        "cp -pu @d/x @a",
        "cp -av @d @t",
        "cp -av @a @b @e",
        "cp -dp @to-a @dangling @t",
        "cp -pf @a @t/1",
        "cp -a -t @e @t @to-d",
        "cp -pt @none @a",
        "cp -pnv @a @t/2 @e",
    ]);
}

fn cp_goes_about_what_is_there_as_cp() {
    script(&[
        "cp -av @a @a @./a @e",
        "cp -av @d @d/ @e",
        "cp -av @t/1 @none @t/1 @empty",
        "cp -av @d/x @e/d/x @empty",
        "cp -avn @a @t/2 @empty/a",
        "ln @t/1 @t/one",
        "cp -pv @a @t/one",
        "ln @t/1 @t/uno",
        "cp -av @b @t/uno",
        "cp -av @t/1 @t/one @empty",
        "cp -av @t/1 @t/one @empty",
        "touch -d 2030-01-01 @empty/1",
        "cp -avu @t/1 @t/one @empty",
        "cp -pv @t/2 @to-a",
        "cp -pv @a @to-a",
        "cp -pnv @a @to-a",
        "cp -av @to-a @a",
        "cp -pv @t/2 @dangling",
        "cp -av @to-a @dangling",
        "cp -aTv @d @to-d",
        "cp -aTn @t/1 @e/",
        "ln -s loop @loop",
        "cp -pv @t/1 @loop",
        "cp -pfv @t/1 @loop",
        "ln -s ../../../a @e/d/sub/y.a",
        "cp -p @t/2 @d/sub/y.a",
        "cp -av @d @e",
        "mkdir @x @y @z",
        "touch @x/f @y/f",
        "cp -pv @x/f @y/f @z",
        "mv -v @x/f @y/f @z",
        "mv -nv @y/f @z",
    ]);
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs v.img --size 128M");
    does(dir, "mkdir v.img:/x v.img:/y");
    does(dir, "touch v.img:/x/f v.img:/y/f");
    assert!(fails(dir, "cp -T v.img:/x/f v.img:/y/f v.img:/z", 2).contains("-T takes one source"));
    assert!(fails(dir, "mv -T v.img:/x/f v.img:/y/f v.img:/z", 2).contains("-T takes one source"));
    // To the host and from the host, too.
    fs::create_dir(dir.join("to")).expect("a directory");
    let said = fails(dir, "cp v.img:/x/f v.img:/y/f to", 1);
    assert!(said.contains("to/f: another source of this command"), "{said}");
    does(dir, "cp -n v.img:/x/f v.img:/y/f to");
    fs::write(dir.join("f"), "f").expect("a file");
    let said = fails(dir, "cp f to/f v.img:/x", 1);
    assert!(said.contains("to/f: another source of this command"), "{said}");
    let again = offshoot(dir, &["cp", "f", "./f", "v.img:/x"]);
    assert_eq!(again.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&again.stderr).contains("named before"));
}

/// If nothing of a source can be read, the file with its name in the volume stays as it was, also
/// behind a link. If a read fails later, the existing file keeps what was written by then.
#[test]
fn what_is_there_outlives_a_source_that_does_not_read() {
    let dir = scratch_dir();
    let dir = dir.path();
    does(dir, "mkfs v.img --size 128M");
    fs::write(dir.join("f"), "text").expect("a file");
    does(dir, "cp f v.img:/f");
    does(dir, "ln -s f v.img:/link");
    does(dir, "mkdir v.img:/d");
    does(dir, "ln -s ../f v.img:/d/mem");
    // A file that can be opened, but not read at its beginning.
    for line in [
        "cp /proc/self/mem v.img:/f",
        "cp /proc/self/mem v.img:/link",
        "cp -r /proc/self/mem v.img:/d",
        "cp --no-preserve=mode /proc/self/mem v.img:/d",
    ] {
        assert!(fails(dir, line, 1).contains("/proc/self/mem"), "{line}");
        assert_eq!(does(dir, "cat v.img:/f v.img:/link v.img:/d/mem"), "texttexttext", "{line}");
    }
    fails(dir, "cp /proc/self/mem v.img:/new", 1);
    assert_eq!(does(dir, "ls v.img:/"), "d\nf\nlink\n");
    // A file whose second half is damaged on its volume.
    let half = 1 << 20;
    let spoilt = b"a sector that no other file has";
    fs::write(dir.join("src"), [&vec![b'1'; half][..], spoilt].concat()).expect("a file");
    does(dir, "mkfs w.img --size 128M");
    does(dir, "cp src w.img:/src");
    let mut image = fs::read(dir.join("w.img")).expect("an image");
    let at = image.windows(spoilt.len()).position(|bytes| bytes == spoilt).expect("its data");
    image[at] ^= 1;
    fs::write(dir.join("w.img"), image).expect("an image");
    for target in ["f", "link"] {
        fails(dir, &format!("cp w.img:/src v.img:/{target}"), 3);
        assert_eq!(does(dir, "cat v.img:/f"), "1".repeat(half), "{target}");
        does(dir, "cp f v.img:/f");
    }
    fails(dir, "cp w.img:/src v.img:/new", 3);
    assert_eq!(does(dir, "ls v.img:/"), "d\nf\nlink\n");
}

#[test]
fn cp_leaves_out_and_stays() {
    if judges::require().is_none() {
        return;
    }
    let sides = ChangeSides::new();
    let dir = sides.dir.path();
    does(dir, "mkdir v.img:/in");
    does(dir, "cp -r --exclude '*.o' --exclude sub/deep host/d v.img:/in");
    does(dir, "subvolume create v.img:/in/d/volume");
    does(dir, "touch v.img:/in/d/volume/file");
    let listed = |place: &str| {
        let mut lines: Vec<String> =
            does(dir, &format!("find {place}")).lines().map(str::to_owned).collect();
        lines.sort();
        lines.join(" ").replace(place, "")
    };
    assert_eq!(listed("v.img:/in/d"), " /sub /volume /volume/file /x");
    does(dir, "cp -rx v.img:/in/d v.img:/copy");
    assert_eq!(listed("v.img:/copy"), " /sub /volume /x");
    does(dir, "cp -rx --exclude x v.img:/in/d out");
    let out = shell(dir, "cd out && find . | sort | tr '\\n' ' '");
    assert_eq!(out, ". ./sub ./volume ");
    // To the host, too: a newer file stays.
    fs::write(dir.join("a"), "newer").expect("a file");
    does(dir, "cp -u v.img:/a .");
    does(dir, "cp -n v.img:/a .");
    assert_eq!(fs::read(dir.join("a")).expect("a file"), b"newer");
    let told = |line: &str| {
        let mut lines: Vec<String> = does(dir, line).lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let line = |at: &str| format!("'v.img:/d/sub{at}' -> 'told{at}'");
    let all = ["", "/deep", "/deep/z", "/y.o"].map(line);
    assert_eq!(told("cp -rv v.img:/d/sub told"), all);
    // With -T, because the target exists. The directories are not made again.
    assert_eq!(told("cp -rvT v.img:/d/sub told"), ["/deep/z", "/y.o"].map(line));
}

/// A log that is truncated while it is copied, and files of the kernel, whose sizes are wrong.
#[test]
fn what_changes_meanwhile_is_copied_as_far_as_it_goes() {
    let dir = scratch_dir();
    does(dir.path(), "mkfs v.img --size 128M");
    // Each of these claims a size of one page, or of zero.
    for file in ["/sys/kernel/mm/transparent_hugepage/enabled", "/proc/version"] {
        if let Ok(text) = fs::read(file) {
            does(dir.path(), &format!("cp {file} v.img:/file"));
            assert_eq!(does(dir.path(), "cat v.img:/file").as_bytes(), text, "{file}");
            assert_eq!(does(dir.path(), "stat -c %s v.img:/file").trim(), text.len().to_string());
        }
    }
}

/// The user who makes a volume can write in it when it is mounted.
#[test]
fn the_root_of_a_volume_is_whose_it_is_said_to_be() {
    let dir = scratch_dir();
    let owner = |name: &str| does(dir.path(), &format!("stat -c %u:%g {name}:/")).trim().to_owned();
    does(dir.path(), "mkfs a.img --size 128M --root-owner 1000:100");
    assert_eq!(owner("a.img"), "1000:100");
    does(dir.path(), "mkfs b.img --size 128M");
    let own = fs::metadata(dir.path()).expect("a directory");
    assert_eq!(owner("b.img"), format!("{}:{}", own.uid(), own.gid()));
    if judges::are_present() {
        let image = dir.path().join("a.img");
        run("btrfs", &["check".as_ref(), "--readonly".as_ref(), image.as_os_str()]);
    }
    let bad = offshoot(dir.path(), &["mkfs", "c.img", "--size", "1G", "--root-owner", "alice"]);
    assert_eq!(bad.status.code(), Some(2));
}

/// A source that `--exclude` names is left out, whatever the name of its copy, as with rsync.
#[test]
fn cp_leaves_out_a_source() {
    if judges::require().is_none() {
        return;
    }
    let sides = ChangeSides::new();
    let dir = sides.dir.path();
    for exclude in ["a", "*", "x", "d", "new", "sub", "sub/deep", "b"] {
        shell(dir, "rm -rf theirs ours; mkdir theirs ours; true");
        let judge = |words: &str| {
            shell(dir, &format!("rsync -a --exclude '{exclude}' {words}"));
        };
        let ours = |words: &str| {
            does(dir, &format!("cp -r --exclude '{exclude}' {words}"));
        };
        // Into the volume and out of it.
        does(dir, "mkdir v.img:/w");
        ours("host/a host/d v.img:/w");
        ours("host/b v.img:/w/new");
        does(dir, "cp -r v.img:/w/. ours");
        does(dir, "rm -r v.img:/w");
        judge("host/a host/d theirs");
        judge("host/b theirs/new");
        let listed = |of: &str| shell(dir, &format!("cd {of} && find . | sort"));
        assert_eq!(listed("ours"), listed("theirs"), "{exclude} into the volume");
        shell(dir, "rm -rf ours; mkdir ours");
        ours("v.img:/a v.img:/d ours");
        ours("v.img:/b ours/new");
        assert_eq!(listed("ours"), listed("theirs"), "{exclude} out of the volume");
    }
}

on_both! {
    chmod,
    chown,
    owners_are_found_by_the_names_of_the_volume,
    touch,
    mknod_and_rmdir,
    rm_asks_and_tells,
    find_deletes,
    cp_keeps_updates_and_tells,
    cp_goes_about_what_is_there_as_cp,
}
