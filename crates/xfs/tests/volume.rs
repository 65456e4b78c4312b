//! Volumes that other tests do not make: with a log that is not empty, in version 4, with sparse
//! chunks of inodes, with wide numbers, and with access control lists.

mod made;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use made::{CopiedTree, Filling, MadeXfs, can_mount, fill};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use offshoot_vfs::{Code, Errno, FileId, FileSystem, FileType};
use offshoot_xfs::{XfsOptions, XfsReport, XfsVolume};

/// The file that a path without links leads to.
fn at(fs: &dyn FileSystem, path: &str) -> FileId {
    let names = path.split('/').filter(|name| !name.is_empty());
    names.fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()).unwrap())
}

/// The names and files of a directory.
fn entries(fs: &dyn FileSystem, dir: FileId) -> Vec<(Vec<u8>, FileId)> {
    let mut list = Vec::new();
    fs.read_dir(dir, 0, &mut |entry| {
        list.push((entry.name.to_vec(), entry.file));
        ControlFlow::Continue(())
    })
    .unwrap();
    list
}

/// What a tree holds, without what a copy changes: times, links of directories, places.
fn contents(fs: &dyn FileSystem) -> BTreeMap<Vec<u8>, String> {
    let mut tree = BTreeMap::new();
    let mut stack = vec![(Vec::new(), fs.root())];
    while let Some((path, file)) = stack.pop() {
        let attr = fs.attr(file).unwrap();
        let mut text = format!("{:o} {} {} {:?}", attr.mode(), attr.uid, attr.gid, attr.rdev);
        match attr.file_type {
            FileType::Regular => {
                let mut bytes = vec![0; usize::try_from(attr.size).unwrap()];
                assert_eq!(fs.read(file, 0, &mut bytes).unwrap(), bytes.len());
                write!(text, " {bytes:?}").unwrap();
            }
            FileType::Symlink => {
                write!(text, " {}", fs.read_link(file).unwrap().escape_ascii()).unwrap();
            }
            FileType::Directory => {
                for (name, below) in entries(fs, file) {
                    stack.push(([&path[..], b"/", &name].concat(), below));
                }
            }
            _ => {}
        }
        tree.insert(path, text);
    }
    tree
}

fn ignoring_log() -> (XfsOptions, Arc<Mutex<Vec<XfsReport>>>) {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let told = reports.clone();
    let options = XfsOptions {
        is_log_ignored: true,
        reporter: Some(Arc::new(move |report| told.lock().unwrap().push(report.clone()))),
        ..XfsOptions::default()
    };
    (options, reports)
}

#[test]
fn a_log_that_is_not_empty_is_refused_or_ignored() {
    if !can_mount() {
        return;
    }
    let made = MadeXfs::new(512, &[]);
    let mount = made.mount("rw");
    fs::write(mount.path().join("before"), "stored").unwrap();
    drop(mount);
    let mount = made.mount("rw");
    let after = mount.path().join("after");
    fs::write(&after, "logged").unwrap();
    File::open(after).unwrap().sync_all().unwrap();
    run("xfs_io", &["-x", "-c", "shutdown -f", mount.path().to_str().unwrap()]);
    drop(mount);
    let error = made.try_open(&XfsOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::LogNotReplayed, "{error}");
    let (options, reports) = ignoring_log();
    let ours = made.try_open(&options).unwrap();
    assert_eq!(*reports.lock().unwrap(), [XfsReport::LogIgnored]);
    let file = at(&*ours, "before");
    let mut bytes = [0; 10];
    assert_eq!(ours.read(file, 0, &mut bytes).unwrap(), 6);
    assert_eq!(ours.lookup(ours.root(), b"after").unwrap_err().errno(), Errno::NOENT);
    // The kernel recovers the log, and empties it.
    drop(made.mount("rw"));
    let ours = made.open();
    let file = at(&*ours, "after");
    assert_eq!(ours.read(file, 0, &mut bytes).unwrap(), 6);
    assert_eq!(&bytes[..6], b"logged");
}

#[test]
fn numbers_and_sizes_are_those_of_the_kernel() {
    if !can_mount() {
        return;
    }
    let made = MadeXfs::new(512, &[]);
    let mount = made.mount("rw");
    let filling = Filling { names: 300, extents: 10, has_reflink: true };
    fill(mount.path(), seed_of_run(), filling);
    run("setfacl", &["-m", "u:1000:rwx,g:5:r", &format!("{}/size-1", mount.path().display())]);
    let folder = format!("{}/attributes", mount.path().display());
    run("setfacl", &["-d", "-m", "u:77:rx", &folder]);
    drop(mount);
    let ours = made.open();
    let mount = made.mount("ro");
    for (name, file) in entries(&*ours, ours.root()) {
        let path = mount.path().join(String::from_utf8(name).unwrap());
        assert_eq!(file.ino, fs::symlink_metadata(&path).unwrap().ino(), "{}", path.display());
    }
    let kernel = HostFilesystem::new(mount.path()).unwrap();
    let (stat, judge) = (ours.statfs().unwrap(), kernel.statfs().unwrap());
    assert_eq!(stat, judge);
    // The counters of all groups give the same sum as the superblock.
    let (options, _) = ignoring_log();
    assert_eq!(made.try_open(&options).unwrap().statfs().unwrap(), stat);
    for (path, list) in [
        ("size-1", "system.posix_acl_access"),
        ("attributes", "system.posix_acl_default"),
        ("size-1", "trusted.SGI_ACL_FILE"),
    ] {
        let mut expected = vec![0; 1000];
        let len = rustix::fs::lgetxattr(mount.path().join(path), list, &mut expected).unwrap();
        expected.truncate(len);
        let file = at(&*ours, path);
        assert_eq!(ours.xattr(file, list.as_bytes()).unwrap(), expected, "{list} of {path}");
        let mut names = Vec::new();
        ours.xattrs(file, &mut |name, _| {
            names.push(name.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
        let is_shown = names.contains(&list.as_bytes().to_vec());
        assert_eq!(is_shown, list.starts_with("system."), "{names:?}");
    }
}

#[test]
fn numbers_that_lead_to_no_file_are_refused() {
    if !can_mount() {
        return;
    }
    let made = MadeXfs::new(512, &[]);
    let mount = made.mount("rw");
    for index in 0..200 {
        fs::write(mount.path().join(format!("{index}")), "content").unwrap();
    }
    let inode = |index| fs::metadata(mount.path().join(format!("{index}"))).unwrap().ino();
    let (gone, kept) = (inode(100), inode(101));
    fs::remove_file(mount.path().join("100")).unwrap();
    drop(mount);
    let ours = made.open();
    let errno = |dev, ino| ours.attr(FileId { dev, ino }).map_err(|error| error.errno());
    let mut numbers = Random::new(seed_of_run());
    let random = (0..1000).map(|_| 1 << 20 | numbers.number());
    for ino in [gone, 0, 1, u64::MAX, 127, 1 << 40].into_iter().chain(random) {
        assert_eq!(errno(0, ino).unwrap_err(), Errno::NOENT, "{ino}");
    }
    assert!(errno(0, kept).is_ok());
    assert_eq!(errno(5, kept).unwrap_err(), Errno::NOENT);
    // Every number near the files is one that the root names, or that of a hidden file, or none.
    let named: Vec<_> = entries(&*ours, ours.root()).iter().map(|entry| entry.1.ino).collect();
    let found: Vec<_> = (100..600).filter(|&ino| errno(0, ino).is_ok()).collect();
    let hidden: Vec<_> = found.iter().filter(|ino| !named.contains(ino)).collect();
    assert_eq!(hidden, [&ours.root().ino, &(ours.root().ino + 1), &(ours.root().ino + 2)]);
}

#[test]
fn a_chunk_of_inodes_may_be_sparse() {
    if !can_mount() {
        return;
    }
    let made = MadeXfs::new(64, &["--unsupported"]);
    let mount = made.mount("rw");
    // No 8 blocks in a row are free, as a whole chunk needs them, but 4 are.
    let space = File::create(mount.path().join("space")).unwrap();
    let free = rustix::fs::fstatvfs(&space).unwrap();
    let len = (free.f_bavail - 200) * free.f_frsize / 65_536 * 65_536;
    let none = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&space, none, 0, len).unwrap();
    let filler = File::create(mount.path().join("filler")).unwrap();
    let mut end = 0;
    while rustix::fs::fallocate(&filler, none, end, 4096).is_ok() {
        end += 4096;
    }
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    for at in (0..len).step_by(65_536) {
        rustix::fs::fallocate(&space, punch, at, 28_672).unwrap();
    }
    let mut count = 0;
    while count < 20_000 && File::create(mount.path().join(format!("{count}"))).is_ok() {
        count += 1;
    }
    drop((space, filler));
    drop(mount);
    let ours = made.open();
    let mount = made.mount("ro");
    let outcome = Compare::default().without(Aspect::Ids).run(&*ours, mount.path());
    assert!(outcome.differences.is_empty(), "{outcome}");
    drop(mount);
    // A record is `number:[start,hole mask,...]`.
    let records = made.xfs_db(&["agi 0", "addr root", "p recs", "agi 1", "addr root", "p recs"]);
    let mut masks = records.lines().filter_map(|line| line.split(":[").nth(1)?.split(',').nth(1));
    assert!(masks.any(|mask| mask != "0" && mask.starts_with("0x")), "{records}");
}

#[test]
fn numbers_above_32_bits() {
    if !can_mount() {
        return;
    }
    let made = MadeXfs::new(8 << 20, &["-l", "size=64m"]);
    let mount = made.mount("rw,inode64");
    for index in 0..40 {
        let folder = mount.path().join(format!("{index}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("file"), format!("{index}")).unwrap();
    }
    drop(mount);
    let ours = made.open();
    assert!(entries(&*ours, ours.root()).iter().any(|entry| entry.1.ino > u32::MAX.into()));
    let mount = made.mount("ro");
    let outcome = Compare::default().without(Aspect::Ids).run(&*ours, mount.path());
    assert!(outcome.differences.is_empty(), "{outcome}");
}

/// Makes a volume of version 4 with files of all forms, and compares it with what it was made of.
fn version_4(options: &[&str]) -> (MadeXfs, Arc<XfsVolume>) {
    let (made, tree) = CopiedTree::volume(options, 3000);
    let ours = made.open();
    let expected = contents(&HostFilesystem::new(tree.path()).unwrap());
    let found = contents(&*ours);
    let names = |tree: &BTreeMap<Vec<u8>, String>| tree.keys().cloned().collect::<Vec<_>>();
    assert!(expected.len() > 3000 && names(&found) == names(&expected));
    for (path, text) in expected {
        assert!(found[&path] == text, "{} differs", path.escape_ascii());
    }
    for (name, below) in entries(&*ours, ours.root()) {
        if ours.attr(below).unwrap().file_type == FileType::Directory {
            let parent = ours.parent(below).unwrap().unwrap();
            assert_eq!((parent.dir, parent.name), (ours.root(), name));
        }
    }
    (made, ours)
}

#[test]
fn version_4_of_the_format() {
    version_4(&["-m", "crc=0"]);
    version_4(&["-m", "crc=0", "-n", "ftype=0"]);
    version_4(&["-m", "crc=0", "-b", "size=512", "-i", "size=256", "-n", "size=4096"]);
    let (made, ours) = version_4(&["-m", "crc=0", "-b", "size=1024", "-i", "size=256"]);
    let file = at(&*ours, "size-1");
    let inode = format!("inode {}", file.ino);
    let image = made.image();
    let set = |name: &str, len: usize| {
        let change = format!("attr_set -u -v {len} {name}");
        let args = ["-x", "-c", &inode, "-c", &change].map(OsStr::new);
        run("xfs_db", &[&args[..], &[image.as_ref()]].concat());
    };
    let expect = |names: &BTreeMap<String, usize>| {
        let ours = made.open();
        let mut found = BTreeMap::new();
        ours.xattrs(file, &mut |name, value| {
            assert!(value.iter().all(|&byte| byte == b'v'), "{}", value.escape_ascii());
            found.insert(String::from_utf8(name.to_vec()).unwrap(), value.len());
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(&found, names);
        for (name, len) in names {
            assert_eq!(ours.xattr(file, name.as_bytes()).unwrap().len(), *len, "{name}");
        }
    };
    let mut names = BTreeMap::new();
    for (name, len) in [("one", 5), ("two", 300), ("three", 5000)] {
        set(name, len);
        names.insert(format!("user.{name}"), len);
        expect(&names);
    }
    for index in 0..60 {
        set(&format!("number-{index}"), 100);
        names.insert(format!("user.number-{index}"), 100);
    }
    expect(&names);
}

#[test]
fn a_volume_may_have_another_identity_than_its_blocks() {
    if !can_mount() {
        return;
    }
    let made = MadeXfs::new(512, &[]);
    let mount = made.mount("rw");
    fs::write(mount.path().join("file"), "content").unwrap();
    drop(mount);
    let before = made.open().version();
    run("xfs_admin", &["-U".as_ref(), OsStr::new("generate"), made.image().as_ref()]);
    run("xfs_admin", &["-L".as_ref(), OsStr::new("label"), made.image().as_ref()]);
    let ours = made.open();
    assert_ne!(ours.version().volume, before.volume);
    assert!(ours.features().contains(&"META_UUID"), "{:?}", ours.features());
    assert_eq!((ours.label(), ours.block_size()), (b"label".to_vec(), 4096));
    assert_eq!(ours.attr(at(&*ours, "file")).unwrap().size, 7);
    drop(made.mount("rw"));
    let again = made.open();
    assert_eq!(again.version().volume, ours.version().volume);
    assert_ne!(again.version().state, before.state);
}

/// Threads that read everything at the same time, with caches that hold next to nothing.
#[test]
fn threads_and_small_caches_change_nothing() {
    let (made, _) = CopiedTree::volume(&[], 1000);
    let expected = contents(&*made.open());
    for cache_bytes in [0, 20_000, 1 << 20] {
        let ours = made.try_open(&XfsOptions { cache_bytes, ..XfsOptions::default() }).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(contents(&*ours) == expected, "{cache_bytes}"));
            }
        });
    }
}

#[test]
fn a_damaged_superblock_has_copies_if_they_agree() {
    if !can_mount() {
        return;
    }
    for options in [&[][..], &["-b", "size=1024", "-s", "size=1024"]] {
        let made = MadeXfs::new(512, options);
        let mount = made.mount("rw");
        fs::write(mount.path().join("file"), "content").unwrap();
        drop(mount);
        let expected = made.open().statfs().unwrap();
        let image = File::options().read(true).write(true).open(made.image()).unwrap();
        image.write_all_at(b"L", 108).unwrap();
        let reports = Arc::new(Mutex::new(Vec::new()));
        let told = reports.clone();
        let options = XfsOptions {
            reporter: Some(Arc::new(move |report| told.lock().unwrap().push(report.clone()))),
            ..XfsOptions::default()
        };
        let ours = made.try_open(&options).unwrap();
        assert!(matches!(reports.lock().unwrap()[..], [XfsReport::SuperblockCopy { .. }]));
        assert_eq!(ours.statfs().unwrap(), expected);
        assert_eq!(ours.attr(at(&*ours, "file")).unwrap().size, 7);
        // Another one that differs is of another age, or of another volume.
        let size = expected.total_bytes;
        let copies = (1 << 20..size).step_by(512).filter(|&at| {
            let mut magic = [0; 4];
            image.read_exact_at(&mut magic, at).unwrap();
            &magic == b"XFSB"
        });
        let last = copies.last().unwrap();
        let mut byte = [0];
        image.read_exact_at(&mut byte, last + 32).unwrap();
        image.write_all_at(&[!byte[0]], last + 32).unwrap();
        let error = made.try_open(&options).unwrap_err();
        assert_eq!(error.code(), Code::Superblock, "{error}");
        assert!(error.to_string().contains("xfs_repair"), "{error}");
    }
}

/// An image of 512 MiB, with the field of its first superblock set so.
fn with_field(options: &[&str], field: &str, value: &str) -> MadeXfs {
    let made = MadeXfs::new(512, options);
    let image = made.image();
    let change = format!("write -d {field} {value}");
    run("xfs_db", &["-x", "-c", "sb 0", "-c", &change, image.to_str().unwrap()]);
    // The field was written without a new checksum.
    let file = File::options().read(true).write(true).open(&image).unwrap();
    let mut sector = [0; 512];
    file.read_exact_at(&mut sector, 0).unwrap();
    offshoot_xfs_format::csum::store(&mut sector, offshoot_xfs_format::superblock::CRC);
    file.write_all_at(&sector, 0).unwrap();
    made
}

#[test]
fn features_are_refused_by_name_or_do_not_matter() {
    let refused = |made: &MadeXfs, options: &XfsOptions, code, word: &str| {
        let error = made.try_open(options).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(word), "{word}: {error}");
    };
    let (ignoring, reports) = ignoring_log();
    let default = XfsOptions::default();
    for (field, value, word) in [
        ("features_incompat", "0x8000000b", "0x80000000"),
        ("features_incompat", "0x20b", "zoned"),
        ("inprogress", "1", "did not finish"),
    ] {
        let made = with_field(&[], field, value);
        refused(&made, &default, Code::UnknownFeature, word);
        refused(&made, &ignoring, Code::UnknownFeature, word);
    }
    refused(
        &MadeXfs::new(512, &["-n", "version=ci"]),
        &default,
        Code::UnknownFeature,
        "case of letters",
    );
    for (field, value) in [
        ("features_ro_compat", "0x8000000d"),
        ("features_log_incompat", "0x80000000"),
        ("features_compat", "0x1"),
        ("features_incompat", "0x1b"),
    ] {
        let made = with_field(&[], field, value);
        made.try_open(&default).unwrap_or_else(|error| panic!("{field}: {error}"));
        made.try_open(&ignoring).unwrap();
    }
    assert!(reports.lock().unwrap().contains(&XfsReport::NeedsRepair));
    let folder = scratch_dir();
    let log = folder.path().join("log");
    File::create(&log).unwrap().set_len(100 << 20).unwrap();
    let made = MadeXfs::new(512, &["-l", &format!("logdev={},size=64m", log.display())]);
    refused(&made, &default, Code::LogNotReplayed, "another device");
    made.try_open(&ignoring).unwrap();
}

#[test]
fn a_device_may_be_short_or_fail() {
    let (made, _) = CopiedTree::volume(&[], 301);
    let image = File::options().write(true).open(made.image()).unwrap();
    image.set_len(500 << 20).unwrap();
    let (options, reports) = ignoring_log();
    let ours = made.try_open(&options).unwrap();
    let is_short = |report: &XfsReport| matches!(report, XfsReport::ShortDevice { .. });
    assert!(reports.lock().unwrap().iter().any(is_short));
    assert!(contents(&*ours).len() > 300);
    image.set_len(4 << 20).unwrap();
    let error = ours.statfs().unwrap_err();
    assert_eq!(error.code(), Code::Device, "{error}");
    assert!(error.to_string().contains("image"), "{error}");
}

#[test]
fn other_contents_are_refused_by_name() {
    let folder = scratch_dir();
    let image: PathBuf = folder.path().join("image");
    let open = |path: &Path| {
        let device = offshoot_device::FileDevice::open(path).unwrap();
        XfsVolume::open(Arc::new(device), &XfsOptions::default()).map(drop).unwrap_err()
    };
    for content in [vec![], vec![0; 100], vec![0xff; 70_000]] {
        fs::write(&image, content).unwrap();
        let error = open(&image);
        assert_eq!(error.code(), Code::NoVolume, "{error}");
    }
    let mut content = b"XFSB".to_vec();
    content.resize(70_000, 0);
    fs::write(&image, content).unwrap();
    assert_eq!(open(&image).code(), Code::Superblock);
}
