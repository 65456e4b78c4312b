//! What is built is what the source has, by the kernel's mount.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Stdio;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::fill;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::{command, run, try_run};
use offshoot_testkit::scratch_dir;

use super::other_program::copy_program;
use super::{BuildJudges, check, does, format_name, offshoot, on_both, program, words};

on_both!(
    a_directory_with_one_of_everything,
    archives_of_gnu_tar,
    archives_of_bsdtar,
    archives_of_python,
    an_extraction_is_built_again,
    an_unprivileged_user_builds_an_image_of_root,
    several_sources_become_one_tree,
    layers_of_a_container_image,
);

/// One of everything that both formats take.
fn everything(root: &Path) {
    fill::names::fill(&fill::directory(root, "names"));
    fill::names::hard_links(&fill::directory(root, "links"));
    fill::shapes::unshared(&fill::directory(root, "shapes"));
    fill::special::fill(&fill::directory(root, "special"));
    fill::xattrs::fill(&fill::directory(root, "xattrs"));
    fill::xattrs::access_control_lists(&fill::directory(root, "lists"));
    fill::names::deep(&fill::directory(root, "deep"));
    fill::sync(root);
}

/// The same without what no archive of other programs holds.
fn what_tar_holds(root: &Path) {
    everything(root);
    fs::remove_dir_all(root.join("deep")).expect("the deep directories go");
    fs::remove_file(root.join("special/socket")).expect("the socket goes");
}

const EVERYTHING_AT_LEAST: u64 = 900;

pub(crate) fn build(dir: &Path, args: &[&OsStr]) -> String {
    let format = ["build", "v.img", "--force", "--format", format_name()].map(OsStr::new);
    let output = offshoot(dir, &[&format, args].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "offshoot build {args:?}: {said}");
    said
}

/// Compares the image with the tree that it was built from.
#[track_caller]
pub(crate) fn assert_built(
    judges: &BuildJudges,
    dir: &Path,
    source: &Path,
    at_least: u64,
    without: &[Aspect],
) {
    let image = dir.join("v.img");
    check(judges, &image);
    let mount = judges.mount(&image);
    let ours = HostFilesystem::new(mount.path()).expect("the mount opens");
    let compare = Compare::of_copies().without(Aspect::DirectorySize);
    let compare = without.iter().fold(compare, |compare, &aspect| compare.without(aspect));
    compare.run(&ours, source).assert_same(at_least);
}

fn a_directory_with_one_of_everything() {
    let Some(judges) = BuildJudges::require() else { return };
    let source = judges.scratch(1024);
    everything(source.path());
    let dir = scratch_dir();
    let said = build(dir.path(), &["--from".as_ref(), source.path().as_os_str()]);
    assert_eq!(said, "");
    assert_built(&judges, dir.path(), source.path(), EVERYTHING_AT_LEAST, &[]);
}

/// Packs the tree with `program` and builds from the archive.
#[track_caller]
fn through_archive(
    judges: &BuildJudges,
    source: &Path,
    program: &str,
    options: &str,
    without: &[Aspect],
) {
    let dir = scratch_dir();
    let archive = dir.path().join("a.tar");
    let mut args: Vec<&OsStr> = options.split(' ').map(OsStr::new).collect();
    args.extend(["-cf".as_ref(), archive.as_os_str(), "-C".as_ref(), source.as_os_str()]);
    args.push(".".as_ref());
    run(program, &args);
    build(dir.path(), &["--from".as_ref(), archive.as_os_str()]);
    assert_built(judges, dir.path(), source, EVERYTHING_AT_LEAST, without);
}

fn archives_of_gnu_tar() {
    let Some(judges) = BuildJudges::require() else { return };
    let source = judges.scratch(1024);
    what_tar_holds(source.path());
    let pax = "--format=pax --numeric-owner --xattrs --xattrs-include=* --acls --sparse";
    for version in ["0.0", "0.1", "1.0"] {
        let options = format!("{pax} --sparse-version={version} --hole-detection=seek");
        through_archive(&judges, source.path(), "tar", &options, &[Aspect::Holes]);
    }
}

fn archives_of_bsdtar() {
    let Some(judges) = BuildJudges::require() else { return };
    if try_run("bsdtar", &["--version"]).is_err() {
        // Not `eprintln!`: the test runner shows that only for tests that fail.
        let _ = writeln!(std::io::stderr(), "skipped: bsdtar (Debian package libarchive-tools)");
        return;
    }
    let source = judges.scratch(1024);
    what_tar_holds(source.path());
    // libarchive writes names that are not UTF-8 in a form that only it reads.
    fs::remove_dir_all(source.path().join("names")).expect("the names go");
    let dir = scratch_dir();
    let built_from = |format: &str| {
        let archive = dir.path().join(format).with_extension("tar");
        let format = format!("--format={format}");
        let words = [&format, "--xattrs", "--acls", "--numeric-owner", "--read-sparse", "-cf"];
        let rest = [archive.as_os_str(), "-C".as_ref(), source.path().as_os_str(), ".".as_ref()];
        run("bsdtar", &[&words.map(OsStr::new)[..], &rest].concat());
        build(dir.path(), &["--from".as_ref(), archive.as_os_str()]);
    };
    built_from("pax");
    assert_built(&judges, dir.path(), source.path(), 300, &[Aspect::Holes]);
    // The older formats, as it writes them, hold no extended attributes and no holes, and whole
    // seconds. The shapes have holes of terabytes.
    for part in ["xattrs", "lists", "special", "shapes"] {
        fs::remove_dir_all(source.path().join(part)).expect("a directory");
    }
    fs::write(source.path().join("file"), "text ".repeat(10_000)).expect("a file");
    let without = [Aspect::Holes, Aspect::Nanoseconds];
    built_from("gnutar");
    assert_built(&judges, dir.path(), source.path(), 20, &without);
    // This one holds paths of 256 bytes, the last name of at most 100.
    fs::remove_dir_all(source.path().join("links")).expect("a directory");
    let deep = fill::directory(&fill::directory(source.path(), &"d".repeat(90)), &"e".repeat(60));
    fs::hard_link(source.path().join("file"), deep.join("f".repeat(90))).expect("a link");
    std::os::unix::fs::symlink("../file", deep.join("symlink")).expect("a link");
    built_from("ustar");
    assert_built(&judges, dir.path(), source.path(), 5, &without);
}

/// An archive with entries that few programs write, and what they must become.
fn archives_of_python() {
    const MAKE: &str = r"
import io, os, tarfile
gnu = tarfile.open('gnu.tar', 'w', format=tarfile.GNU_FORMAT)
pax = tarfile.open('pax.tar', 'w', format=tarfile.PAX_FORMAT, pax_headers={'gid': '77'})
for tar in (gnu, pax):
    def add(name, kind=tarfile.REGTYPE, data=b'', **more):
        info = tarfile.TarInfo(name)
        info.type, info.size, info.mtime, info.mode = kind, len(data), 1000000000, 0o640
        for key, value in more.items():
            setattr(info, key, value)
        tar.addfile(info, io.BytesIO(data))
    add('/absolute', data=b'absolute')
    add('later', tarfile.LNKTYPE, linkname='./comes//last')
    add('twice', data=b'first')
    add('twice', data=b'second')
    add('d', data=b'no directory')
    add('d', tarfile.DIRTYPE, mode=0o2755)
    add('d/' + 'n' * 200 + '/' + 'm' * 200, data=b'long')
    add('large-ids', uid=4000000000, gid=3000000000)
    add('before-1970', mtime=-5)
    add('node', tarfile.CHRTYPE, devmajor=10, devminor=200)
    add('comes/last', data=b'last')
gnu.close(); pax.close()
";
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let made = command("python3").args(["-c", MAKE]).current_dir(dir.path()).status();
    assert!(made.expect("python3 starts").success());
    for (archive, gid) in [("gnu.tar", 3_000_000_000), ("pax.tar", 3_000_000_000)] {
        build(dir.path(), &["--from".as_ref(), archive.as_ref()]);
        check(&judges, &dir.path().join("v.img"));
        let mount = judges.mount(&dir.path().join("v.img"));
        let path = |name: &str| mount.path().join(name);
        let read = |name: &str| fs::read_to_string(path(name)).expect("a file");
        let metadata = |name: &str| fs::symlink_metadata(path(name)).expect("a file");
        assert_eq!(read("absolute"), "absolute");
        assert_eq!(read("twice"), "second");
        assert_eq!(read("later"), "last");
        assert_eq!(metadata("later").ino(), metadata("comes/last").ino());
        assert_eq!(metadata("d").mode(), 0o042_755);
        assert_eq!(metadata("d").mtime(), 1_000_000_000);
        assert_eq!(read(&format!("d/{}/{}", "n".repeat(200), "m".repeat(200))), "long");
        let large = metadata("large-ids");
        assert_eq!((large.uid(), large.gid()), (4_000_000_000, gid));
        assert_eq!(metadata("before-1970").mtime(), -5);
        assert_eq!(metadata("node").rdev(), rustix::fs::makedev(10, 200));
    }
}

/// `extract --tar`, and back.
fn an_extraction_is_built_again() {
    let Some(judges) = BuildJudges::require() else { return };
    let source = judges.scratch(1024);
    everything(source.path());
    fs::remove_file(source.path().join("special/socket")).expect("the socket goes");
    let dir = scratch_dir();
    build(dir.path(), &["--from".as_ref(), source.path().as_os_str()]);
    does(dir.path(), "extract v.img --tar out.tar");
    fs::rename(dir.path().join("v.img"), dir.path().join("first.img")).expect("a rename");
    // Through a pipe, packed.
    let archive = fs::File::open(dir.path().join("out.tar")).expect("an archive");
    let mut zstd = command("zstd");
    zstd.args(["-1", "-c"]).stdin(archive).stdout(Stdio::piped());
    let mut zstd = zstd.spawn().expect("zstd starts");
    let line = format!("build v.img --from - --size 1G --format {}", format_name());
    let packed = zstd.stdout.take().expect("a pipe");
    let output = program(dir.path()).args(words(&line)).stdin(packed).output();
    let output = output.expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && zstd.wait().expect("it ends").success(), "{said}");
    assert_built(&judges, dir.path(), source.path(), EVERYTHING_AT_LEAST, &[]);
}

/// Subvolumes hold what the sources have at their paths.
#[test]
fn subvolumes() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    for file in ["@/etc/motd", "@home/alice/f", "@/var/log/messages"] {
        let file = path("top").join(file);
        fs::create_dir_all(file.parent().expect("a parent")).expect("directories");
        fs::write(&file, file.file_name().expect("a name").as_encoded_bytes()).expect("a file");
    }
    fs::set_permissions(path("top/@home"), fs::Permissions::from_mode(0o700)).expect("a mode");
    does(
        dir.path(),
        "build v.img --from top --subvolume default:/@ --subvolume ro:@home \
         --subvolume rw:/@/var/log --json",
    );
    check(&judges, &path("v.img"));
    let listed = does(dir.path(), "subvolume list v.img");
    let names: Vec<_> = listed.lines().filter_map(|line| line.split(' ').next_back()).collect();
    assert_eq!(names, ["PATH", "/", "/@", "/@home", "/@/var/log"]);
    let mount = judges.mount(&path("v.img"));
    let read = |name: &str| fs::read_to_string(mount.path().join(name)).expect("a file");
    assert_eq!((read("etc/motd"), read("var/log/messages")), ("motd".into(), "messages".into()));
    drop(mount);
    assert_eq!(does(dir.path(), "cat --subvolume 5 v.img:/@home/alice/f"), "f");
    let shown = does(dir.path(), "stat --subvolume 5 -c %a v.img:/@home");
    assert_eq!(shown, "700\n");
    let shown = does(dir.path(), "property get --subvolume 5 v.img:/@home ro");
    assert_eq!(shown, "ro=true\n");
}

/// Owners, devices and set-id bits come from the archive, and need no rights.
fn an_unprivileged_user_builds_an_image_of_root() {
    let Some(judges) = BuildJudges::require() else { return };
    let source = judges.scratch(512);
    fill::special::fill(&fill::directory(source.path(), "special"));
    fill::xattrs::fill(&fill::directory(source.path(), "xattrs"));
    fs::remove_file(source.path().join("special/socket")).expect("the socket goes");
    let dir = scratch_dir();
    let archive = dir.path().join("a.tar");
    let options = ["--format=pax", "--xattrs", "--xattrs-include=*", "-cf"].map(OsStr::new);
    let rest = [archive.as_os_str(), "-C".as_ref(), source.path().as_os_str(), ".".as_ref()];
    run("tar", &[&options[..], &rest].concat());
    let program = copy_program(dir.path());
    run("chown", &["-R".as_ref(), "65534:65534".as_ref(), dir.path().as_os_str()]);
    let words = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let output = command("setpriv")
        .args(words)
        .arg(program)
        .args(["build", "v.img", "--from", "a.tar", "--format", format_name()])
        .current_dir(dir.path())
        .output()
        .expect("setpriv starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    assert_built(&judges, dir.path(), source.path(), 40, &[]);
}

fn several_sources_become_one_tree() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    let source = |name: &str, files: &[(&str, &str)]| {
        for (file, text) in files {
            let file = path(name).join(file);
            fs::create_dir_all(file.parent().expect("a parent")).expect("directories");
            fs::write(file, text).expect("a file");
        }
    };
    source("base", &[("etc/motd", "of base"), ("etc/hosts", "hosts"), ("lib/a.o", "object")]);
    source("over", &[("etc/motd", "of over"), ("cache/x", "x")]);
    run(
        "tar",
        &[
            "-C".as_ref(),
            path("over").as_os_str(),
            "-czf".as_ref(),
            path("o.tgz").as_os_str(),
            "etc".as_ref(),
            "cache".as_ref(),
        ],
    );
    let format = format_name();
    let line = format!(
        "build v.img --format {format} --from base --from o.tgz --from base --to /srv//base/ \
         --exclude *.o --exclude /cache --owner 7:8 --label built --json --uuid \
         0ff50007-0000-4000-8000-00000000bbbb"
    );
    let shown = does(dir.path(), &line);
    let start = format!(
        "{{\"image\":\"v.img\",\"format\":\"{format}\",\
         \"uuid\":\"0ff50007-0000-4000-8000-00000000bbbb\",\"total_bytes\":"
    );
    assert!(shown.starts_with(&start), "{shown}");
    assert!(shown.contains("\"files\":5,") && shown.contains("\"not_applied\":[]"), "{shown}");
    check(&judges, &path("v.img"));
    let mount = judges.mount(&path("v.img"));
    let read = |name: &str| fs::read_to_string(mount.path().join(name)).expect("a file");
    assert_eq!(read("etc/motd"), "of over");
    assert_eq!(read("etc/hosts"), "hosts");
    assert_eq!(read("srv/base/etc/motd"), "of base");
    for gone in ["lib/a.o", "cache", "srv/base/lib/a.o"] {
        assert!(!mount.path().join(gone).exists(), "{gone}");
    }
    let owner = fs::metadata(mount.path().join("srv/base/etc")).expect("a directory");
    assert_eq!((owner.uid(), owner.gid()), (7, 8));
    let mode = fs::metadata(path("v.img")).expect("an image").mode();
    assert_eq!(mode & 0o133, 0, "{mode:o}");
}

/// Layers in the layout of OCI, packed and not, with whiteouts of every kind.
fn layers_of_a_container_image() {
    const MAKE: &str = r"
import gzip, hashlib, io, json, os, tarfile
os.makedirs('oci/blobs/sha256')
def blob(data):
    digest = hashlib.sha256(data).hexdigest()
    open('oci/blobs/sha256/' + digest, 'wb').write(data)
    return {'digest': 'sha256:' + digest, 'size': len(data)}
layers, unpacked = [], []
def layer(*entries):
    out = io.BytesIO()
    tar = tarfile.open(fileobj=out, mode='w')
    for name, what in entries:
        info = tarfile.TarInfo(name)
        info.mtime = 1000000000
        kind, data = what[0], what[1:].encode()
        info.type = {'f': tarfile.REGTYPE, 'd': tarfile.DIRTYPE, 's': tarfile.SYMTYPE,
                     'l': tarfile.LNKTYPE}[kind]
        info.mode = 0o755 if kind == 'd' else 0o640
        if kind == 'f':
            info.size = len(data)
        else:
            info.linkname = what[1:]
        tar.addfile(info, io.BytesIO(data) if kind == 'f' else None)
    tar.close()
    data = out.getvalue()
    unpacked.append('sha256:' + hashlib.sha256(data).hexdigest())
    layers.append(blob(gzip.compress(data) if len(layers) % 2 else data))
layer(('etc/', 'd'), ('etc/a', 'fa of 1'), ('etc/b', 'fb of 1'), ('opaque/x', 'fx'),
      ('gone/deep/z', 'fz'), ('lib', 'susr/lib'), ('usr/lib/kept', 'fkept'),
      ('usr/lib/sub/kept', 'fkept'), ('early', 'lfile'), ('file', 'ffile'), ('bin', 'susr/bin'))
layer(('etc/.wh.a', 'f'), ('etc/b', 'fb of 2'), ('opaque/new', 'fnew'),
      ('opaque/.wh..wh..opq', 'f'),
      ('.wh.gone', 'f'), ('lib/', 'd'), ('lib/.wh..wh..opq', 'f'), ('lib/sub/.wh.kept', 'f'),
      ('lib/own', 'fown'), ('.wh.early', 'f'))
layer(('etc/a', 'fa of 3'), ('bin/sh', 'fsh'), ('hard', 'lusr/bin/sh'))
config = blob(json.dumps({'rootfs': {'type': 'layers', 'diff_ids': unpacked}}).encode())
manifest = blob(json.dumps({'config': config, 'layers': layers}).encode())
json.dump({'schemaVersion': 2, 'manifests': [manifest]}, open('oci/index.json', 'w'))
";
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let made = command("python3").args(["-c", MAKE]).current_dir(dir.path()).status();
    assert!(made.expect("python3 starts").success());
    run(
        "tar",
        &[
            "-C".as_ref(),
            dir.path().join("oci").as_os_str(),
            "-cf".as_ref(),
            dir.path().join("oci.tar").as_os_str(),
            "blobs".as_ref(),
            "index.json".as_ref(),
        ],
    );
    for source in ["oci:oci", "oci-archive:oci.tar"] {
        assert_eq!(build(dir.path(), &["--from".as_ref(), source.as_ref()]), "");
        check(&judges, &dir.path().join("v.img"));
        let mount = judges.mount(&dir.path().join("v.img"));
        let path = |name: &str| mount.path().join(name);
        for (name, text) in [
            ("etc/a", "a of 3"),
            ("etc/b", "b of 2"),
            ("opaque/new", "new"),
            ("usr/lib/kept", "kept"),
            ("usr/lib/sub/kept", "kept"),
            ("lib/own", "own"),
            ("file", "file"),
            ("usr/bin/sh", "sh"),
        ] {
            assert_eq!(fs::read_to_string(path(name)).expect(name), text, "{source}: {name}");
        }
        for gone in ["opaque/x", "gone", "lib/kept", "early", "lib/.wh..wh..opq"] {
            assert!(fs::symlink_metadata(path(gone)).is_err(), "{source}: {gone}");
        }
        assert!(path("lib").symlink_metadata().expect("it is there").is_dir());
        assert!(path("bin").symlink_metadata().expect("it is there").is_symlink());
        let metadata = |name: &str| fs::metadata(path(name)).expect("it is there");
        assert_eq!(metadata("hard").ino(), metadata("usr/bin/sh").ino());
        assert_eq!((metadata("etc").mode(), metadata("etc").mtime()), (0o040_755, 1_000_000_000));
    }
}

/// Random bytes, which no compression makes smaller.
fn noise(path: &Path, mib: u64) {
    let mut random = offshoot_testkit::random::Random::new(mib);
    let mut file = fs::File::create(path).expect("a file");
    for _ in 0..mib {
        file.write_all(&random.bytes(1 << 20)).expect("a write");
    }
}

/// Runs a line that succeeds, and says what could not be applied.
#[track_caller]
fn counts(dir: &Path, line: &str) -> String {
    let output = offshoot(dir, &words(line));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "offshoot {line}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A file with names in two subvolumes is measured once, and stored twice: the volume turns out too
/// small, and is built again.
#[test]
fn a_volume_that_was_estimated_too_small_grows() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let top = dir.path().join("top");
    fs::create_dir_all(top.join("sub")).expect("directories");
    noise(&top.join("a"), 200);
    // The names alternate between the subvolumes.
    for name in ["sub/b", "sub/c", "sub/d", "z"] {
        fs::hard_link(top.join("a"), top.join(name)).expect("a link");
    }
    let shown = counts(dir.path(), "build v.img --from top --subvolume /sub --json");
    assert!(shown.contains("\"kind\":\"hard_link\",\"count\":1,"), "{shown}");
    check(&judges, &dir.path().join("v.img"));
    let size = fs::metadata(dir.path().join("v.img")).expect("an image").len();
    assert!(size > 500 << 20, "{size}");
    let mount = judges.mount(&dir.path().join("v.img"));
    let metadata = |name: &str| fs::metadata(mount.path().join(name)).expect("it is there");
    assert_eq!((metadata("a").nlink(), metadata("sub/b").nlink()), (2, 3));
}

/// One that does not fit a tree block is left out and counted, and the build goes on.
#[test]
fn an_attribute_too_large_for_btrfs_is_counted() {
    const MAKE: &str = r"
import tarfile
tar = tarfile.open('a.tar', 'w', format=tarfile.PAX_FORMAT)
for name, size in (('most', 4096 - 101 - 25 - 30 - 6), ('more', 4096 - 101 - 25 - 30 - 5)):
    info = tarfile.TarInfo(name)
    info.pax_headers = {'SCHILY.xattr.user.a': 'v' * size}
    tar.addfile(info)
tar.close()
";
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let made = command("python3").args(["-c", MAKE]).current_dir(dir.path()).status();
    assert!(made.expect("python3 starts").success());
    let shown = counts(dir.path(), "build v.img --from a.tar --nodesize 4K --json");
    assert!(shown.contains("{\"kind\":\"xattr\",\"count\":1,\"first\":\"more\""), "{shown}");
    check(&judges, &dir.path().join("v.img"));
}
