//! Properties, extended attributes, ranges of files and shared data: the tools of the host set and
//! find the same on the kernel's mount.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::btrfs::{judges, sharing};
use offshoot_testkit::random::Random;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::{check, does, fails, offshoot, volume, words};

/// Mounts the volume, runs a script in it, and returns its output.
#[track_caller]
fn kernel(image: &Path, script: &str) -> String {
    let mount = MountedMembers::try_new(&[image.to_path_buf()], "rw,noatime").expect("it mounts");
    let script = format!("set -e; cd '{}'; {script}", mount.path().display());
    run("sh", &["-c", &script])
}

#[test]
fn properties_are_those_of_btrfs_property() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    volume(dir, "v.img", 256);
    does(dir, "subvolume create v.img:/sub");
    does(dir, "mkdir v.img:/dir");
    assert_eq!(does(dir, "property get v.img:/dir"), "");
    does(dir, "property set v.img:/dir compression zstd");
    does(dir, "property set v.img label a-label");
    does(dir, "property set v.img:/sub ro true");
    assert_eq!(does(dir, "property get v.img"), "ro=false\nlabel=a-label\n");
    assert_eq!(does(dir, "property get v.img:/sub ro"), "ro=true\n");
    assert_eq!(does(dir, "property get v.img:/dir compression"), "compression=zstd\n");
    assert_eq!(does(dir, "property list v.img:/sub").lines().count(), 2);
    assert!(does(dir, "info v.img").contains("a-label"));
    assert!(fails(dir, "mkdir v.img:/sub/x", 1).contains("Read-only"));
    for line in [
        "set v.img:/dir ro true",
        "set v.img:/dir label x",
        "set v.img:/sub ro yes",
        "set v.img:/dir compression gzip",
    ] {
        fails(dir, &format!("property {line}"), 1);
    }
    fails(dir, "property set v.img:/dir colour red", 2);
    check(&image);
    if judges::require().is_some() {
        let names =
            "for one in sub dir; do btrfs property get $one; done; btrfs filesystem label .";
        assert_eq!(kernel(&image, names), "ro=true\ncompression=zstd\na-label\n");
        kernel(
            &image,
            "btrfs property set sub ro false; btrfs property set dir compression ''; \
            btrfs filesystem label . another; btrfs property set sub compression lzo",
        );
        assert_eq!(does(dir, "property get v.img label"), "label=another\n");
        assert_eq!(does(dir, "property get v.img:/dir"), "");
        assert_eq!(does(dir, "property get v.img:/sub"), "ro=false\ncompression=lzo\n");
    }
}

#[test]
fn extended_attributes_are_those_of_getfattr() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    volume(dir, "v.img", 256);
    does(dir, "mkdir v.img:/dir");
    does(dir, "setfattr -n user.text -v words v.img:/dir");
    does(dir, "setfattr -n user.bytes -v 0x0001ff v.img:/dir");
    does(dir, "setfattr -n user.empty v.img:/dir");
    // The list gives read, write and search to the owner and nothing to others: the group loses its
    // permissions.
    let list = "0x0200000001000700ffffffff04000000ffffffff20000000ffffffff";
    does(dir, &format!("setfattr -n system.posix_acl_access -v {list} v.img:/dir"));
    let shown = "# file: /dir\nuser.bytes=0x0001ff\nuser.empty=\"\"\nuser.text=\"words\"\n";
    assert_eq!(does(dir, "getfattr v.img:/dir"), shown);
    assert!(does(dir, "stat v.img:/dir").contains("(0700/"));
    does(dir, "setfattr -x user.empty v.img:/dir");
    assert!(fails(dir, "getfattr -n user.empty v.img:/dir", 1).contains("No data"));
    fails(dir, "setfattr -x user.empty v.img:/dir", 1);
    fails(dir, "setfattr -n nowhere.x -v 1 v.img:/dir", 1);
    fails(dir, "setfattr -n user.x -v 0x1 v.img:/dir", 2);
    check(&image);
    if judges::require().is_some() {
        let script = "getfattr -d -e hex dir; setfattr -n user.kernel -v 1 dir";
        let found = kernel(&image, script);
        assert_eq!(found, "# file: dir\nuser.bytes=0x0001ff\nuser.text=0x776f726473\n\n");
        assert_eq!(
            does(dir, "getfattr -n user.kernel v.img:/dir"),
            "# file: /dir\nuser.kernel=\"1\"\n"
        );
    }
}

/// Access control lists that name users are set and shown as attributes. They equal those of
/// `setfacl`, and new files inherit from them.
#[test]
fn access_lists_are_those_of_setfacl() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    volume(dir, "v.img", 256);
    let list = |entries: &[(u16, u16, u32)]| {
        let entry = |&(tag, may, id): &(u16, u16, u32)| {
            let [tag, may] = [tag, may].map(u16::swap_bytes);
            format!("{tag:04x}{may:04x}{:08x}", id.swap_bytes())
        };
        format!("0x02000000{}", entries.iter().map(entry).collect::<String>())
    };
    let none = u32::MAX;
    let access = list(&[
        (1, 7, none),
        (2, 6, 1000),
        (4, 5, none),
        (8, 1, 100),
        (16, 7, none),
        (32, 0, none),
    ]);
    let default = list(&[(1, 7, none), (2, 7, 1000), (4, 5, none), (16, 5, none), (32, 4, none)]);
    does(dir, "mkdir v.img:/ours");
    does(dir, &format!("setfattr -n system.posix_acl_access -v {access} v.img:/ours"));
    does(dir, &format!("setfattr -n system.posix_acl_default -v {default} v.img:/ours"));
    does(dir, "mkdir v.img:/ours/by-ours");
    assert!(does(dir, "stat v.img:/ours").contains("(0770/"));
    let no_list = "setfattr -n system.posix_acl_access -v 0x02000000ff v.img:/ours";
    fails(dir, no_list, 1);
    check(&image);
    if judges::require().is_some() {
        let script = "umask 022; mkdir theirs; \
            setfacl --set u::rwx,u:1000:rw,g::rx,g:100:x,m::rwx,o::- theirs; \
            setfacl -d --set u::rwx,u:1000:rwx,g::rx,m::rx,o::r theirs; mkdir theirs/by-ours; \
            for one in ours theirs; do mkdir $one/sub; : > $one/file; \
            for file in $one $one/by-ours $one/sub $one/file; do getfacl -cn $file; done; \
            echo end; done";
        let said = kernel(&image, script);
        let [ours, theirs, ""] = said.split("end\n").collect::<Vec<_>>()[..] else {
            panic!("{said}")
        };
        assert_eq!(ours, theirs);
        for name in ["access", "default"] {
            let shown = |dir_of| {
                let line = format!("getfattr -n system.posix_acl_{name} v.img:/{dir_of}");
                let said = does(dir, &line);
                said.split_once('\n').expect("a file and its attribute").1.to_owned()
            };
            assert_eq!(shown("ours"), shown("theirs"), "{name}");
            assert_eq!(shown("ours/sub"), shown("theirs/sub"), "{name}");
        }
        does(dir, "setfattr -x system.posix_acl_default v.img:/theirs");
        check(&image);
        assert!(!kernel(&image, "getfacl -cn theirs").contains("default:"));
    }
}

#[test]
fn fallocate_does_what_that_of_the_host_does() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    volume(dir, "v.img", 256);
    let data: Vec<u8> =
        (0..100_000u32).map(|at| u8::try_from(at / 4096 + 1).expect("small")).collect();
    std::fs::write(dir.join("file"), &data).expect("a file");
    does(dir, "cp file v.img:/file");
    does(dir, "fallocate -l 1M v.img:/new");
    // The kernel's btrfs does not move data within files, so the test computes these results.
    let mut expected = data;
    for options in ["-n -o 96K -l 64K", "-p -o 8K -l 5000", "-z -o 20K -l 100", "-o 90000 -l 30000"]
    {
        does(dir, &format!("fallocate {options} v.img:/file"));
    }
    expected[8192..13_192].fill(0);
    expected[20_480..20_580].fill(0);
    expected.resize(120_000, 0);
    does(dir, "fallocate -c -o 40K -l 8K v.img:/file");
    expected.drain(40_960..49_152);
    does(dir, "fallocate -i -o 4K -l 4K v.img:/file");
    expected.splice(4096..4096, [0; 4096]);
    fails(dir, "fallocate -p -l 4K v.img:/none", 1);
    fails(dir, "fallocate -c -l 100 v.img:/file", 1);
    fails(dir, "fallocate -p -z -l 4K v.img:/file", 2);
    fails(dir, "fallocate v.img:/file", 2);
    does(dir, "cp v.img:/file out");
    assert!(std::fs::read(dir.join("out")).expect("it came back") == expected, "bytes of the file");
    check(&image);
    if judges::require().is_some() {
        let mount = MountedMembers::try_new(&[image], "ro").expect("it mounts");
        assert!(std::fs::read(mount.path().join("file")).expect("it reads") == expected);
        let new = mount.path().join("new").metadata().expect("it was made");
        assert_eq!((new.len(), new.blocks() * 512), (1 << 20, 1 << 20));
    }
}

#[test]
fn copies_inside_a_volume_share_their_data() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    for name in ["v.img", "w.img"] {
        volume(dir, name, 256);
    }
    std::fs::create_dir(dir.join("src")).expect("a directory");
    for (name, len) in [("large", 500_001), ("small", 100), ("none", 0)] {
        std::fs::write(dir.join("src").join(name), vec![7; len]).expect("a file");
    }
    does(dir, "cp -r src v.img:/src");
    does(dir, "subvolume create v.img:/sub");
    does(dir, "cp -r v.img:/src v.img:/sub/copy");
    does(dir, "cp --reflink=always v.img:/src/large v.img:/always");
    does(dir, "cp --reflink v.img:/src/small v.img:/small");
    does(dir, "cp --reflink=never v.img:/src/large v.img:/never");
    // An existing file that is longer.
    does(dir, "cp v.img:/src/small v.img:/sub/copy/large");
    let said = fails(dir, "cp --reflink=always v.img:/src/large w.img:/large", 1);
    assert!(said.contains("large"), "{said}");
    assert_eq!(does(dir, "ls w.img"), "");
    fails(dir, "cp --reflink=always v.img:/src/large out", 2);
    fails(dir, "cp --reflink=always src/large v.img:/host", 1);
    does(dir, "cp v.img:/src/large w.img:/large");
    does(dir, "extract v.img out");
    for path in ["always", "never", "src/large"] {
        let found = std::fs::read(dir.join("out").join(path)).expect("it came back");
        assert!(found == vec![7; 500_001], "bytes of {path}");
    }
    assert_eq!(std::fs::read(dir.join("out/sub/copy/large")).expect("it came back"), [7; 100]);
    check(&image);
    if judges::require().is_some() {
        let mount = MountedMembers::try_new(&[image], "ro").expect("it mounts");
        let spaces = sharing::spaces(mount.path());
        let exclusive = |path: &str| spaces[path].usage;
        let whole = 503_808;
        assert_eq!(exclusive("./src/large"), (whole, 0));
        assert_eq!(exclusive("./always"), (whole, 0));
        assert_eq!(exclusive("./never"), (whole, whole));
    }
}

/// The flags of the first file of a volume, and how its extents are compressed, by `dump-tree`.
fn stored(image: &Path) -> (String, Vec<String>) {
    let dump =
        run("btrfs", &["inspect-internal", "dump-tree", "-t", "5", &image.display().to_string()]);
    let (_, inode) = dump.split_once("key (257 INODE_ITEM 0)").expect("a file");
    let behind = |text: &str, word: &str| {
        text.split_once(word).map(|(_, rest)| rest.lines().next().unwrap_or_default().to_owned())
    };
    let mut compressed: Vec<_> =
        inode.lines().filter_map(|line| behind(line, "extent compression ")).collect();
    compressed.sort();
    compressed.dedup();
    (behind(inode, " flags ").expect("an inode has flags"), compressed)
}

/// Files are stored as the options say, and as on a mount of the kernel with the same options.
#[test]
fn files_are_stored_as_the_options_say() {
    let Some(_judges) = judges::require() else { return };
    let dir = scratch_dir();
    let dir = dir.path();
    // The beginning of the data cannot be compressed.
    let data = [Random::new(5).bytes(1 << 20), vec![7; 1 << 20]].concat();
    std::fs::write(dir.join("file"), data).expect("a file");
    for (option, flags) in [
        ("compress=zstd:1", None),
        ("compress-force=zstd:1", Some("0x0(none)")),
        ("nodatasum", Some("0x1(NODATASUM)")),
        ("nodatacow", Some("0x3(NODATASUM|NODATACOW)")),
    ] {
        for image in ["ours.img", "theirs.img"] {
            does(dir, &format!("mkfs --force --size 256M {image}"));
        }
        does(dir, &format!("cp --{option} file ours.img:/file"));
        let mount = MountedMembers::try_new(&[dir.join("theirs.img")], option).expect("it mounts");
        std::fs::copy(dir.join("file"), mount.path().join("file")).expect("it is copied");
        drop(mount);
        let [ours, theirs] = ["ours.img", "theirs.img"].map(|image| stored(&dir.join(image)));
        assert_eq!(ours.1, theirs.1, "{option}");
        assert_eq!(ours.1.len() > 1, option.starts_with("compress-force"), "{option}: {ours:?}");
        // The kernel does not always mark a file that is not worth compressing.
        for found in flags.iter().flat_map(|_| [&ours, &theirs]) {
            assert_eq!(Some(found.0.as_str()), flags, "{option}");
        }
        check(&dir.join("ours.img"));
    }
    for options in [
        "--compress lzo --compress-force lzo",
        "--nodatacow --compress lzo",
        "--nodatasum --nodatacow",
    ] {
        fails(dir, &format!("cp {options} file ours.img:/other"), 2);
    }
}

#[test]
fn files_that_are_the_same_share_their_space() {
    let dir = scratch_dir();
    let (dir, image) = (dir.path(), dir.path().join("v.img"));
    for name in ["v.img", "w.img"] {
        volume(dir, name, 256);
    }
    let len = (3 << 20) + 77;
    let data = Random::new(6).bytes(len);
    let mut other = data.clone();
    other[(1 << 20) + 5] ^= 1;
    for (name, data) in [
        ("a", &data[..]),
        ("other", &other),
        ("short", &data[..500_000]),
        ("late", &data[1 << 20..]),
    ] {
        std::fs::write(dir.join(name), data).expect("a file");
    }
    does(dir, "cp a other short late v.img:/");
    does(dir, "cp a v.img:/b");
    does(dir, "cp a w.img:/");
    let said = does(dir, "dedupe --json v.img:/a v.img:/b v.img:/other v.img:/short");
    let outcomes: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let outcome = |path: &str, compared: usize, same: usize| serde_json::json!({ "path": path, "compared": compared, "same": same });
    let expected = [
        outcome("/b", len, len),
        outcome("/other", len, len - (128 << 10)),
        // Only whole sectors, because the other file continues behind its end.
        outcome("/short", 500_000, 500_000 / 4096 * 4096),
    ];
    assert_eq!(outcomes.as_array().expect("an array")[..], expected);
    let said = does(dir, "dedupe -o 1M --to-offset 0 v.img:/a v.img:/late");
    assert_eq!(said, "/late: 2.00 MiB of 2.00 MiB are the same\n");
    check(&image);

    does(dir, "mkdir v.img:/plain");
    does(dir, "chattr +C v.img:/plain");
    does(dir, "cp a v.img:/plain/a");
    let said = fails(dir, "dedupe v.img:/a v.img:/plain/a", 1);
    assert!(said.contains("/plain/a") && said.contains("checksums"), "{said}");
    for wrong in [
        "v.img:/a v.img:/plain",
        "v.img:/a v.img:/none",
        "-o 100 v.img:/a v.img:/b",
        "-o 4M v.img:/a v.img:/b",
        "-o 4M -l 4K v.img:/a v.img:/b",
    ] {
        fails(dir, &format!("dedupe {wrong}"), 1);
    }
    fails(dir, "dedupe v.img:/a w.img:/a", 2);
    fails(dir, "dedupe v.img:/a", 2);
    // An error for one file does not keep back the others.
    let output = offshoot(dir, &words("dedupe v.img:/a v.img:/none v.img:/b"));
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "/b: 3.00 MiB of 3.00 MiB are the same\n");

    does(dir, "extract v.img out");
    for (name, expected) in [
        ("a", &data[..]),
        ("b", &data),
        ("other", &other),
        ("short", &data[..500_000]),
        ("late", &data[1 << 20..]),
    ] {
        assert!(
            std::fs::read(dir.join("out").join(name)).expect("it came back") == expected,
            "{name}"
        );
    }
    if judges::require().is_some() {
        let mount = MountedMembers::try_new(&[image], "ro").expect("it mounts");
        let spaces = sharing::spaces(mount.path());
        let exclusive = |path: &str| spaces[path].usage.1;
        assert_eq!(["./a", "./b", "./late"].map(exclusive), [0; 3]);
        assert_eq!(exclusive("./other"), 128 << 10);
        assert_eq!(exclusive("./short"), 4096);
    }
}
