//! Layers of container images as snapshots, and snapshots that options name.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::loops::LoopMount;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::oci::make_images;
use super::{BuildJudges, check, does, fails, program, words};

/// The whole volume, whatever its default subvolume is.
fn mount_top(image: &Path, options: &str) -> LoopMount {
    let options = format!("{options},noatime,subvolid=5");
    MountedMembers::try_new(&[image.to_path_buf()], &options)
        .unwrap_or_else(|reason| panic!("{reason}"))
        .into_mount()
}

/// Directories that no layer describes have times of the build, which two builds have in common
/// only so.
#[track_caller]
fn does_at_a_time(dir: &Path, line: &str) -> String {
    let mut program = program(dir);
    program.args(words(line)).env("SOURCE_DATE_EPOCH", "1700000000");
    let output = program.output().expect("the program starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "offshoot {line}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[track_caller]
fn assert_same_trees(one: &Path, other: &Path, at_least: u64) {
    let ours = HostFilesystem::new(one).expect("a tree");
    let compare = Compare::of_copies().without(Aspect::DirectorySize);
    compare.run(&ours, other).assert_same(at_least);
}

/// What `btrfs subvolume list` says of the subvolume at `path`: its UUID, and that of its parent.
#[track_caller]
fn uuids(mount: &Path, path: &str) -> (String, String) {
    let listed =
        run("btrfs", &["subvolume".as_ref(), "show".as_ref(), mount.join(path).as_os_str()]);
    let field = |name: &str| {
        let line = listed.lines().find_map(|line| line.trim().strip_prefix(name));
        line.unwrap_or_else(|| panic!("{name} {listed}")).trim().to_owned()
    };
    (field("UUID:"), field("Parent UUID:"))
}

fn is_read_only(mount: &Path, path: &str) -> bool {
    let path = mount.join(path);
    let shown = run(
        "btrfs",
        &["property", "get"]
            .map(AsRef::as_ref)
            .into_iter()
            .chain([path.as_os_str(), "ro".as_ref()])
            .collect::<Vec<_>>(),
    );
    shown.trim() == "ro=true"
}

/// Each layer is a snapshot of the one below it, and has what the layers up to it make together.
/// Layers that several images have are built once.
#[test]
fn each_layer_is_a_snapshot_of_the_one_below() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let ids = make_images(dir.path(), 1, 300);
    let path = |name: &str| dir.path().join(name);
    run(
        "tar",
        &["-C", "one", "-cf", "one.tar", "blobs", "index.json"].map(|word| match word {
            "one" | "one.tar" => path(word).into_os_string(),
            word => word.into(),
        }),
    );
    let shown = does_at_a_time(
        dir.path(),
        "build v.img --from oci-archive:one.tar --from oci:two --to /srv/two --from \
         docker-archive:three.tar --to three --layers snapshots --subvolume ro:/three --json",
    );
    for (at, id) in ids.iter().enumerate() {
        let layer = format!("{{\"path\":\"layers/sha256/{id}\",\"diff_id\":\"sha256:");
        assert_eq!(shown.matches(&layer).count(), 1, "{at}: {shown}");
        let chain = format!("\"chain_id\":\"sha256:{id}\"}}");
        assert_eq!(shown.matches(&chain).count(), 1, "{at}: {shown}");
    }
    check(&judges, &path("v.img"));
    // Eight trees have the large file.
    let stored = fs::metadata(path("v.img")).expect("an image").blocks() * 512;
    assert!(stored < 30 << 20, "{stored}");

    let mount = mount_top(&path("v.img"), "ro");
    let layer = |at: usize| format!("layers/sha256/{}", ids[at]);
    let parents = [None, Some(layer(0)), Some(layer(1)), Some(layer(1)), Some(layer(0))];
    for (at, parent) in parents.iter().enumerate() {
        assert!(is_read_only(mount.path(), &layer(at)), "{at}");
        let of = uuids(mount.path(), &layer(at)).1;
        let expected = parent.as_ref().map_or("-".to_owned(), |path| uuids(mount.path(), path).0);
        assert_eq!(of, expected, "{at}");
    }
    for (tree, of, ro) in [("rootfs", 2, false), ("srv/two", 3, false), ("three", 4, true)] {
        assert_eq!(uuids(mount.path(), tree).1, uuids(mount.path(), &layer(of)).0, "{tree}");
        assert_eq!(is_read_only(mount.path(), tree), ro, "{tree}");
        assert_same_trees(&mount.path().join(layer(of)), &mount.path().join(tree), 100);
    }
    let default =
        run("btrfs", &["subvolume".as_ref(), "get-default".as_ref(), mount.path().as_os_str()]);
    assert!(default.trim().ends_with(" path rootfs"), "{default}");
    let listed = run("btrfs", &["subvolume".as_ref(), "list".as_ref(), mount.path().as_os_str()]);
    assert_eq!(listed.lines().count(), ids.len() + 3, "{listed}");
    // The layers up to each, put one over the other.
    for count in 1..=3 {
        does_at_a_time(dir.path(), &format!("build m.img --force --from oci:merged-{count}"));
        let merged = mount_top(&path("m.img"), "ro");
        assert_same_trees(merged.path(), &mount.path().join(layer(count - 1)), 100);
    }
    drop(mount);
    // The trees can be written, and the layers stay as they are.
    let mount = mount_top(&path("v.img"), "rw");
    fs::write(mount.path().join("rootfs/etc/a"), "changed").expect("a write");
    let below = fs::read_to_string(mount.path().join(layer(2)).join("etc/a"));
    assert_eq!(below.expect("a file"), "a of 3");
    fs::write(mount.path().join("three/etc/a"), "x").expect_err("it is read-only");
    drop(mount);
    check(&judges, &path("v.img"));
    // A kind that names the tree alone leaves it the default.
    does(dir.path(), "build r.img --from oci:one --layers snapshots --subvolume ro:/rootfs");
    let mount = mount_top(&path("r.img"), "ro");
    let default =
        run("btrfs", &["subvolume".as_ref(), "get-default".as_ref(), mount.path().as_os_str()]);
    assert!(default.trim().ends_with(" path rootfs"), "{default}");
    assert!(is_read_only(mount.path(), "rootfs"));
    drop(mount);
}

/// The last layer of an image that comes first is that of one that comes later.
#[test]
fn an_image_that_is_the_beginning_of_another_adds_no_layer() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let ids = make_images(dir.path(), 2, 20);
    let shown = does(
        dir.path(),
        "build v.img --from oci:one --to /one --from oci:merged-2 --to /two --layers snapshots \
         --owner 7:8 --compress zstd --subvolume /srv --subvolume default:two",
    );
    assert!(shown.contains(" and 3 layers,"), "{shown}");
    check(&judges, &dir.path().join("v.img"));
    let mount = mount_top(&dir.path().join("v.img"), "ro");
    let of = uuids(mount.path(), "two").1;
    assert_eq!(of, uuids(mount.path(), &format!("layers/sha256/{}", ids[1])).0);
    let owner = fs::metadata(mount.path().join("two/etc")).expect("a directory");
    assert_eq!((owner.uid(), owner.gid()), (7, 8));
    let default =
        run("btrfs", &["subvolume".as_ref(), "get-default".as_ref(), mount.path().as_os_str()]);
    assert!(default.trim().ends_with(" path two"), "{default}");
}

#[test]
fn what_is_refused() {
    let dir = scratch_dir();
    make_images(dir.path(), 3, 0);
    fs::create_dir(dir.path().join("d")).expect("a directory");
    for (line, code, said) in [
        ("--from d --layers snapshots", 2, "and d has no layers"),
        ("--from oci:one --from three.tar --layers snapshots", 2, "and three.tar has no layers"),
        (
            "--from oci:one --layers snapshots --format xfs",
            2,
            "XFS volumes have no --layers snapshots",
        ),
        ("--from d --snapshot /:/x --format xfs", 2, "XFS volumes have no --snapshot"),
        ("--from oci:one --from oci:two --layers snapshots", 2, "have the place /rootfs"),
        (
            "--from oci:one --to /x --from oci:two --to ./x/ --layers snapshots",
            2,
            "have the place ./x/",
        ),
        (
            "--from oci:one --to /x --subvolume /x/etc --layers snapshots",
            2,
            "--subvolume /x/etc: with --layers snapshots the tree at /x is a snapshot",
        ),
        ("--from oci:one --to / --layers snapshots", 1, "the top of a volume is no snapshot"),
        ("--from d --snapshot /x", 2, "write SOURCE:PATH"),
        ("--from d --snapshot /x:/y", 1, "/x: no such file"),
        ("--from oci:one --snapshot /etc:/y", 1, "/etc is no subvolume"),
        ("--from oci:one --snapshot /:/etc", 1, "/etc: "),
    ] {
        let text = fails(dir.path(), &format!("build v.img {line}"), code);
        assert!(text.contains(said), "{line}: {text}");
    }
    // A layer that is not what its image says.
    let layers = dir.path().join("two/blobs/sha256");
    for blob in fs::read_dir(layers).expect("blobs") {
        let blob = blob.expect("a blob").path();
        let mut bytes = fs::read(&blob).expect("a blob");
        if bytes.len() > 1 << 20 {
            *bytes.last_mut().expect("a byte") ^= 1;
            fs::write(&blob, bytes).expect("a blob");
        }
    }
    fails(dir.path(), "build v.img --from oci:two --layers snapshots", 1);
    assert!(!dir.path().join("v.img").exists());
}

/// Snapshots are taken of what was built, in directories that keep their times.
#[test]
fn snapshots_of_what_was_built() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir_all(path("top/@/etc")).expect("directories");
    fs::create_dir_all(path("top/keeps")).expect("directories");
    fs::write(path("top/@/etc/motd"), "of the day").expect("a file");
    run("touch", &["-d".as_ref(), "2001-02-03".as_ref(), path("top/keeps").as_os_str()]);
    does(
        dir.path(),
        "build v.img --from top --subvolume default:/@ --subvolume /@/var --subvolume ro:/box \
         --snapshot /@:/keeps/first --snapshot rw:@:/keeps/made/way --snapshot /:/box/all",
    );
    check(&judges, &path("v.img"));
    let mount = mount_top(&path("v.img"), "ro");
    for (snapshot, of, ro) in
        [("keeps/first", "@", true), ("keeps/made/way", "@", false), ("box/all", ".", true)]
    {
        assert_eq!(is_read_only(mount.path(), snapshot), ro, "{snapshot}");
        assert_eq!(uuids(mount.path(), snapshot).1, uuids(mount.path(), of).0, "{snapshot}");
    }
    for file in ["keeps/first/etc/motd", "keeps/made/way/etc/motd", "@/etc/motd"] {
        let text = fs::read_to_string(mount.path().join(file)).expect(file);
        assert_eq!(text, "of the day");
    }
    // A subvolume in what the snapshot is of is an empty directory in it, as with the kernel.
    assert_eq!(fs::read_dir(mount.path().join("keeps/first/var")).expect("it is there").count(), 0);
    let of = |path: std::path::PathBuf| fs::metadata(path).expect("it is there").mtime();
    assert_eq!(of(mount.path().join("keeps")), of(path("top/keeps")));
    assert!(is_read_only(mount.path(), "box") && !is_read_only(mount.path(), "@"));
}
