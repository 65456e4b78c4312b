//! The verbs that read show what the kernel's mount shows.

use std::ffi::OsStr;
use std::fs;

use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::run::run;
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::fill::EVERYTHING_AT_LEAST;
use offshoot_testkit::xfs::judges;
use offshoot_testkit::xfs::matrix::XfsVolumeKind;
use offshoot_testkit::xfs::recipe::XfsRecipe;

use super::{FewFiles, lines};

/// One of everything, taken out onto another XFS, which can hold all of it.
#[test]
fn a_directory_that_was_taken_out_is_what_the_kernel_shows() {
    let Some(judges) = judges::require() else { return };
    let filled = XfsRecipe::new(XfsVolumeKind::named("today")).make(&judges);
    let empty = XfsDisk::create(&judges, 2048);
    empty.mkfs("");
    {
        // Otherwise the kernel allocates space ahead, also where a hole is to be.
        let to = empty.mount("rw,noatime,allocsize=4k", &[]);
        let image = filled.disk.image().display();
        lines::does(to.path(), &format!("extract {image} extracted"));
        lines::does(to.path(), &format!("cp -a {image}:/ copied"));
    }
    // What was written is in no cache.
    let to = empty.mount("ro,noatime", &[]);
    for name in ["extracted", "copied"] {
        let ours = HostFilesystem::new(&to.path().join(name)).expect("the destination opens");
        // What was read of preallocated space is no hole any more until it is mounted anew.
        let kernel = filled.disk.mount("ro,noatime", &[]);
        let compare = Compare::of_copies().without(Aspect::DirectorySize);
        let outcome = compare.run(&ours, kernel.path());
        outcome.assert_same(EVERYTHING_AT_LEAST);
    }
}

/// What the host's program prints in the mount of the kernel.
fn told(program: &str, words: &str) -> String {
    let words: Vec<&OsStr> = words.split(' ').map(OsStr::new).collect();
    run(program, &words)
}

#[test]
fn every_verb_shows_what_the_kernel_shows() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let (shown, host);
    {
        let mount = few.filled.disk.mount("ro,noatime", &[]);
        let root = mount.path().display();
        let big = |program: &str, words: &str| told(program, &format!("{words} {root}/dir/big"));
        let df = told("df", &format!("-k --output=size,used,avail {root}"));
        host = [
            told("ls", &format!("-A1 {root}")),
            big("stat", "-c %F,%a,%u,%g,%s,%h,%i,%b,%X,%Y,%Z,%W"),
            told("du", &format!("-s {root}")).split('\t').next().unwrap_or_default().to_owned(),
            df.lines().last().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" "),
        ];
    }
    let df = few.does("df v.img");
    let df: Vec<_> = df.lines().last().unwrap_or_default().split_whitespace().collect();
    shown = [
        few.does("ls -A1 v.img"),
        few.does("stat -c %F,%a,%u,%g,%s,%h,%i,%b,%X,%Y,%Z,%W v.img:/dir/big"),
        few.does("du -s v.img").split('\t').next().unwrap_or_default().to_owned(),
        df[1..4].join(" "),
    ];
    assert_eq!(shown, host);

    assert_eq!(few.does("cat v.img:/text v.img:/te*"), "what the kernel wrote\n".repeat(2));
    assert_eq!(few.does("find v.img -type f -size +100k -links 2 -name b*"), "v.img:/dir/big\n");
    assert!(few.does("tree v.img").contains("link -> dir/big"));
    let flags = few.does("lsattr -d v.img:/dir v.img:/text");
    assert!(flags.contains("/dir\n") && flags.contains("/text\n"), "{flags}");
    assert!(few.does("getfattr -d v.img:/text").contains("user.origin=\"here\"\n"));
    few.does("extract --tar stream.tar v.img");
    let listed = told("tar", &format!("-tf {}/stream.tar", few.dir().display()));
    assert!(listed.lines().any(|line| line.ends_with("dir/big")), "{listed}");
    // Onto a volume of the other format, and from there to the host.
    few.does("mkfs other.img --size 256M");
    few.does("cp -a v.img:/ other.img:/copy");
    few.does("cp other.img:/copy/dir/big big");
    assert!(fs::read(few.dir().join("big")).expect("a file") == vec![b'x'; 300_000]);
    assert_eq!(few.does("cp -a v.img:/dir/again v.img:/text ."), "");
    assert!(fs::read(few.dir().join("again")).expect("a file") == vec![b'x'; 300_000]);
}

#[test]
fn info_tells_what_xfs_db_tells() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let uuid = few.filled.disk.xfs_db(&["uuid"]);
    let uuid = uuid.trim().strip_prefix("UUID = ").expect("a UUID");
    let text = few.does("info v.img");
    let line = |name: &str, value: &str| format!("\n{name:<18} {value}\n");
    assert!(text.starts_with(&line("label", "root")[1..]), "{text}");
    for line in [
        line("UUID", uuid),
        line("format", "XFS, version 5"),
        line("size", "512 MiB"),
        line("groups", "4"),
        line("log", "64.0 MiB, empty"),
    ] {
        assert!(text.contains(&line), "{line:?} in {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&few.does("info --json v.img")).unwrap();
    let groups = few.filled.disk.field(&["sb 0"], "agcount");
    assert_eq!((&json["uuid"], &json["groups"]), (&uuid.into(), &groups.into()));
    assert_eq!((&json["log"], &json["layers"]), (&"empty".into(), &["XFS"][..].into()));
    let features = json["features"].as_array().expect("a list");
    assert!(features.contains(&"REFLINK".into()) && features.contains(&"BIGTIME".into()));
    assert_eq!(json["reports"], serde_json::json!([]));
}

#[test]
fn dump_tells_what_xfs_db_tells() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let disk = &few.filled.disk;
    let json = |line: &str| -> Vec<serde_json::Value> {
        serde_json::from_str(&few.does(line)).expect("JSON")
    };
    let (supers, groups) = (json("dump super --json v.img"), json("dump groups --json v.img"));
    assert_eq!((supers.len(), groups.len()), (4, 12));
    let ino = few.does("stat -c %i v.img:/dir/big").trim().to_owned();
    let inode = json(&format!("dump inode --json v.img {ino}"));
    let is_same = |found: &serde_json::Value, place: &str, prefix: &str, names: &str| {
        assert_eq!(found["problem"], serde_json::Value::Null, "{found}");
        for name in names.split(' ') {
            let number = disk.field(&[place], &format!("{prefix}{name}"));
            assert_eq!(found["fields"][name], number, "{place} {name}");
        }
    };
    is_same(&supers[0], "sb 0", "", "blocksize dblocks agblocks icount fdblocks");
    is_same(&supers[3], "sb 3", "", "blocksize logstart inopblock features2");
    is_same(&groups[0], "agf 0", "", "length freeblks longest flcount btreeblks");
    is_same(&groups[10], "agi 3", "", "length count root level free_root");
    is_same(&groups[1], "agi 0", "", "count freecount newino free_level");
    is_same(&inode[0], &format!("inode {ino}"), "core.", "size nblocks nextents forkoff format");
    let extents = inode[0]["fields"]["data"]["extents"].as_array().expect("a list");
    let blocks: u64 = extents.iter().filter_map(|extent| extent["count"].as_u64()).sum();
    assert_eq!(blocks, 300_000_u64.div_ceil(4096));
    // The free list is that of xfs_db, too, and an empty log has its last record.
    let list = disk.xfs_db(&["agfl 0", "print"]);
    let first = groups[2]["fields"]["blocks"][0].to_string();
    assert!(list.contains(&format!(":{first} ")), "{first} in {list}");
    let log = few.does("dump log v.img");
    assert!(log.starts_with("record ") && log.contains(" ops=1 "), "{log}");
    dumped_trees_are_those_of_xfs_db(&few);
    let text = few.does("dump super v.img");
    assert!(text.starts_with("superblock of group 0 at 0: verifies\nmagicnum "), "{text}");
    assert!(text.contains("REFLINK"), "{text}");
}

fn dumped_trees_are_those_of_xfs_db(few: &FewFiles) {
    let disk = &few.filled.disk;
    for (tree, header, root) in [
        ("free-by-block", "agf", "bnoroot"),
        ("free-by-size", "agf", "cntroot"),
        ("inodes", "agi", "root"),
        ("free-inodes", "agi", "free_root"),
        ("references", "agf", "refcntroot"),
    ] {
        let place = format!("{header} 0");
        let count = disk.field(&[&place, &format!("addr {root}")], "numrecs");
        let said = few.does(&format!("dump tree v.img {tree}@0"));
        let records = said.lines().filter(|line| line.starts_with("record ")).count();
        assert_eq!(records as u64, count, "{tree}: {said}");
        let all = few.does(&format!("dump tree --json v.img {tree}"));
        let blocks = all.lines().filter(|line| line.starts_with("{\"block\":")).count();
        assert_eq!(blocks, 4, "a root in each group: {all}");
    }
    let free = disk.field(&["agf 1", "addr bnoroot"], "recs[1].blockcount");
    assert!(few.does("dump tree v.img free-by-block@1").contains(&format!(" count={free}\n")));
    for line in ["dump tree v.img reverse-map", "dump tree v.img inodes@9"] {
        few.fails(line, 1);
    }
    let ino = few.does("stat -c %i v.img:/dir/big").trim().to_owned();
    assert!(few.fails(&format!("dump tree v.img extents@{ino}"), 1).contains("has them in itself"));
    // A name of neither format is an error of usage, and one of btrfs alone is none of the volume.
    assert!(few.fails("dump tree v.img roots", 2).contains("free-by-size"));
    assert!(few.fails("dump tree v.img uuid", 1).contains("free-by-size"));
}
