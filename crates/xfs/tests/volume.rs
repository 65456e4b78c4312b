//! Volumes as they are opened: logs, features, superblocks, sizes; and calls for what is not there.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use offshoot_device::BlockDevice;
use offshoot_testkit::host::HostFilesystem;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk, XfsShutdown};
use offshoot_testkit::xfs::fill;
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Code, Errno, FileId, FileSystem, FileType, ReadOnlyFiles, Volume};
use offshoot_xfs::{XfsOptions, XfsPending, XfsReport, XfsVolume};
use offshoot_xfs_format::superblock::XfsSuperblock;

/// A new volume of 512 MiB.
fn made(judges: &XfsJudges, options: &str) -> XfsDisk {
    let disk = XfsDisk::create(judges, 512);
    disk.mkfs(options);
    disk
}

/// A new volume with a file.
fn with_file(judges: &XfsJudges, options: &str) -> XfsDisk {
    let disk = made(judges, options);
    let mount = disk.mount("rw", &[]);
    fs::write(mount.path().join("file"), "content").unwrap();
    drop(mount);
    disk
}

fn try_open(disk: &XfsDisk, options: &XfsOptions) -> offshoot_vfs::Result<Arc<XfsVolume>> {
    XfsVolume::open(disk.device(), options)
}

fn open(disk: &XfsDisk) -> Arc<XfsVolume> {
    try_open(disk, &XfsOptions::default()).unwrap()
}

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
                let mut hasher = DefaultHasher::new();
                bytes.hash(&mut hasher);
                write!(text, " {} {:x}", bytes.len(), hasher.finish()).unwrap();
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
fn a_log_that_is_not_empty_is_replayed_or_ignored() {
    let Some(judges) = judges::require() else { return };
    let disk = with_file(&judges, "");
    let mut mount = disk.mount("rw", &[]);
    let after = mount.path().join("after");
    fs::write(&after, "logged").unwrap();
    File::open(after).unwrap().sync_all().unwrap();
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    let (options, reports) = ignoring_log();
    let replaying = XfsOptions { is_log_ignored: false, ..options.clone() };
    let ours = try_open(&disk, &replaying).unwrap();
    let replayed = XfsReport::LogReplayed { is_stored: false, pending: XfsPending::default() };
    assert_eq!(std::mem::take(&mut *reports.lock().unwrap()), [replayed]);
    let mut bytes = [0; 10];
    assert_eq!(ours.read(at(&*ours, "after"), 0, &mut bytes).unwrap(), 6);
    let tight = XfsOptions { replay_bytes: 1000, ..replaying };
    let error = try_open(&disk, &tight).unwrap_err();
    assert_eq!(error.code(), Code::LogNotReplayed, "{error}");
    let ours = try_open(&disk, &options).unwrap();
    assert_eq!(*reports.lock().unwrap(), [XfsReport::LogIgnored]);
    assert_eq!(ours.read(at(&*ours, "file"), 0, &mut bytes).unwrap(), 7);
    assert_eq!(ours.lookup(ours.root(), b"after").unwrap_err().errno(), Errno::NOENT);
    // The kernel recovers the log, and empties it.
    drop(disk.mount("rw", &[RECOVERY]));
    let ours = open(&disk);
    let file = at(&*ours, "after");
    assert_eq!(ours.read(file, 0, &mut bytes).unwrap(), 6);
    assert_eq!(&bytes[..6], b"logged");
}

#[test]
fn sizes_are_those_of_the_kernel_and_acls_have_one_name() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, "");
    let mount = disk.mount("rw", &[]);
    fill::some(mount.path(), seed_of_run());
    let folder = format!("{}/directories", mount.path().display());
    run("setfacl", &["-m", "u:1000:rwx,g:5:r", &folder]);
    run("setfacl", &["-d", "-m", "u:77:rx", &folder]);
    drop(mount);
    let ours = open(&disk);
    let mount = disk.mount("ro", &[]);
    let kernel = HostFilesystem::new(mount.path()).unwrap();
    let (stat, judge) = (ours.statfs().unwrap(), kernel.statfs().unwrap());
    assert_eq!(stat, judge);
    // The counters of all groups give the same sum as the superblock.
    let (options, _) = ignoring_log();
    assert_eq!(try_open(&disk, &options).unwrap().statfs().unwrap(), stat);
    for (path, acl) in [
        ("directories", "system.posix_acl_access"),
        ("directories", "system.posix_acl_default"),
        ("directories", "trusted.SGI_ACL_FILE"),
    ] {
        let mut expected = vec![0; 1000];
        let len = rustix::fs::lgetxattr(mount.path().join(path), acl, &mut expected).unwrap();
        expected.truncate(len);
        let file = at(&*ours, path);
        assert_eq!(ours.xattr(file, acl.as_bytes()).unwrap(), expected, "{acl} of {path}");
        let mut names = Vec::new();
        ours.xattrs(file, &mut |name, _| {
            names.push(name.to_vec());
            ControlFlow::Continue(())
        })
        .unwrap();
        let is_shown = names.contains(&acl.as_bytes().to_vec());
        assert_eq!(is_shown, acl.starts_with("system."), "{names:?}");
    }
}

#[test]
fn numbers_that_lead_to_no_file_are_refused() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, "");
    let mount = disk.mount("rw", &[]);
    for index in 0..200 {
        fs::write(mount.path().join(format!("{index}")), "content").unwrap();
    }
    let inode = |name: &str| XfsDisk::ino(&mount.path().join(name));
    let (gone, kept) = (inode("100"), inode("101"));
    fs::remove_file(mount.path().join("100")).unwrap();
    drop(mount);
    let ours = open(&disk);
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
fn a_volume_may_have_another_identity_than_its_blocks() {
    let Some(judges) = judges::require() else { return };
    let disk = with_file(&judges, "");
    let before = open(&disk).version();
    disk.change_with_xfs_db(&["uuid generate", "label label"]);
    let ours = open(&disk);
    assert_ne!(ours.version().volume, before.volume);
    assert!(ours.features().contains(&"META_UUID"), "{:?}", ours.features());
    assert_eq!((ours.label(), ours.block_size()), (b"label".to_vec(), 4096));
    assert_eq!(ours.attr(at(&*ours, "file")).unwrap().size, 7);
    drop(disk.mount("rw", &[]));
    let again = open(&disk);
    assert_eq!(again.version().volume, ours.version().volume);
    assert_ne!(again.version().state, before.state);
}

/// What two openings say of the state, or `None` when they do not agree.
fn state(disk: &XfsDisk, options: &XfsOptions) -> Option<String> {
    let [first, second] = [(), ()].map(|()| try_open(disk, options).unwrap().version().state);
    (first == second).then_some(first)
}

#[test]
fn a_state_is_another_one_after_each_change_or_is_not_known() {
    let Some(judges) = judges::require() else { return };
    let (default, ignoring) = (XfsOptions::default(), ignoring_log().0);
    let disk = with_file(&judges, "");
    let mut states = vec![state(&disk, &default).expect("a state")];
    for content in ["CONTENT", "another", "c"] {
        let mount = disk.mount("rw", &[]);
        fs::write(mount.path().join("file"), content).unwrap();
        drop(mount);
        let state = state(&disk, &default).expect("a state");
        assert!(!states.contains(&state), "{state} of {states:?}");
        states.push(state);
    }
    assert_eq!(state(&disk, &ignoring).as_ref(), states.last());
    let mut mount = disk.mount("rw", &[]);
    fs::write(mount.path().join("file"), "logged").unwrap();
    disk.shut_down(&mut mount, XfsShutdown::LogWritten);
    drop(mount);
    assert_eq!(state(&disk, &ignoring), None, "the log is not clean");
    assert_eq!(state(&made(&judges, "-m crc=0"), &default), None, "version 4");
}

/// Zeroes the log, as a program does that copies a volume without it.
fn zero_log(disk: &XfsDisk) {
    let file = File::options().read(true).write(true).open(disk.image()).unwrap();
    let mut sector = [0; 512];
    file.read_exact_at(&mut sector, 0).unwrap();
    let geometry = XfsSuperblock::parse(&sector).unwrap().geometry;
    let start = geometry.place_of(geometry.log_start).unwrap().bytes();
    let len = (geometry.log_blocks as usize) << geometry.block_log;
    file.write_all_at(&vec![0; len], start).unwrap();
}

#[test]
fn a_log_of_zeroes_is_clean_if_nothing_was_logged() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, "");
    zero_log(&disk);
    assert_eq!(state(&disk, &XfsOptions::default()), None, "each log of zeroes ends at its start");
    assert!(entries(&*open(&disk), open(&disk).root()).is_empty());
    drop(disk.mount("rw", &["totally zeroed log"]));
    assert!(state(&disk, &XfsOptions::default()).is_some());
    // The superblock is of a later time than such a log.
    let disk = with_file(&judges, "");
    zero_log(&disk);
    assert!(disk.try_mount("rw").is_err());
    let error = try_open(&disk, &XfsOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::Log, "{error}");
}

/// Threads that read everything at the same time, with caches that hold next to nothing.
#[test]
fn threads_and_small_caches_change_nothing() {
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, "");
    let mount = disk.mount("rw", &[]);
    fill::some(mount.path(), seed_of_run());
    drop(mount);
    let expected = contents(&*open(&disk));
    for cache_bytes in [0, 20_000, 1 << 20] {
        let ours = try_open(&disk, &XfsOptions { cache_bytes, ..XfsOptions::default() }).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(contents(&*ours) == expected, "{cache_bytes}"));
            }
        });
    }
}

#[test]
fn a_damaged_superblock_has_copies_if_they_agree() {
    let Some(judges) = judges::require() else { return };
    for options in ["", "-b size=1024 -s size=1024"] {
        let disk = with_file(&judges, options);
        let expected = open(&disk).statfs().unwrap();
        let image = File::options().read(true).write(true).open(disk.image()).unwrap();
        image.write_all_at(b"L", 108).unwrap();
        let reports = Arc::new(Mutex::new(Vec::new()));
        let told = reports.clone();
        let options = XfsOptions {
            reporter: Some(Arc::new(move |report| told.lock().unwrap().push(report.clone()))),
            ..XfsOptions::default()
        };
        let ours = try_open(&disk, &options).unwrap();
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
        let error = try_open(&disk, &options).unwrap_err();
        assert_eq!(error.code(), Code::Superblock, "{error}");
        assert!(error.to_string().contains("xfs_repair"), "{error}");
    }
}

/// The search for copies ends at the end of the device, whatever sizes it tries.
#[test]
fn a_volume_without_a_sound_superblock_is_damaged() {
    let Some(judges) = judges::require() else { return };
    let disk = with_file(&judges, "");
    let group = disk.field(&["sb 0"], "agblocks") * disk.field(&["sb 0"], "blocksize");
    let image = File::options().write(true).open(disk.image()).unwrap();
    for number in 0..disk.field(&["sb 0"], "agcount") {
        image.write_all_at(&[0xa5; 64], number * group + 16).unwrap();
    }
    let error = try_open(&disk, &XfsOptions::default()).unwrap_err();
    assert_eq!(error.code(), Code::Superblock, "{error}");
}

/// An image of 512 MiB, with the field of its first superblock set so.
fn with_field(judges: &XfsJudges, field: &str, value: &str) -> XfsDisk {
    let disk = made(judges, "");
    disk.change_with_xfs_db(&["sb 0", &format!("write -d {field} {value}")]);
    // The field was written without a new checksum.
    let file = File::options().read(true).write(true).open(disk.image()).unwrap();
    let mut sector = [0; 512];
    file.read_exact_at(&mut sector, 0).unwrap();
    offshoot_xfs_format::csum::store(&mut sector, offshoot_xfs_format::superblock::CRC);
    file.write_all_at(&sector, 0).unwrap();
    disk
}

#[test]
fn features_are_refused_by_name_or_do_not_matter() {
    let Some(judges) = judges::require() else { return };
    let refused = |disk: &XfsDisk, options: &XfsOptions, code, word: &str| {
        let error = try_open(disk, options).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(word), "{word}: {error}");
    };
    let (ignoring, reports) = ignoring_log();
    let default = XfsOptions::default();
    for (field, value, word) in [
        ("features_incompat", "0x8000002b", "0x80000000"),
        ("features_incompat", "0x22b", "zoned"),
        ("inprogress", "1", "did not finish"),
    ] {
        let disk = with_field(&judges, field, value);
        refused(&disk, &default, Code::UnknownFeature, word);
        refused(&disk, &ignoring, Code::UnknownFeature, word);
    }
    refused(&made(&judges, "-n version=ci"), &default, Code::UnknownFeature, "case of letters");
    for (field, value) in [
        ("features_ro_compat", "0x8000000f"),
        ("features_log_incompat", "0x80000000"),
        ("features_compat", "0x1"),
        ("features_incompat", "0x3b"),
    ] {
        let disk = with_field(&judges, field, value);
        try_open(&disk, &default).unwrap_or_else(|error| panic!("{field}: {error}"));
        try_open(&disk, &ignoring).unwrap();
    }
    assert!(reports.lock().unwrap().contains(&XfsReport::NeedsRepair));
    let folder = scratch_dir();
    let log = folder.path().join("log");
    File::create(&log).unwrap().set_len(100 << 20).unwrap();
    let disk = made(&judges, &format!("-l logdev={},size=64m", log.display()));
    refused(&disk, &default, Code::LogNotReplayed, "another device");
    try_open(&disk, &ignoring).unwrap();
}

#[test]
fn a_device_may_be_short_or_fail() {
    let Some(judges) = judges::require() else { return };
    let disk = with_file(&judges, "");
    let image = File::options().write(true).open(disk.image()).unwrap();
    image.set_len(500 << 20).unwrap();
    let (options, reports) = ignoring_log();
    let ours = try_open(&disk, &options).unwrap();
    let is_short = |report: &XfsReport| matches!(report, XfsReport::ShortDevice { .. });
    assert!(reports.lock().unwrap().iter().any(is_short));
    assert!(contents(&*ours).len() > 1);
    image.set_len(4 << 20).unwrap();
    let error = ours.statfs().unwrap_err();
    assert_eq!(error.code(), Code::Device, "{error}");
    assert!(error.to_string().contains(disk.image().to_str().unwrap()), "{error}");
}

#[test]
fn other_contents_are_refused_by_name() {
    let folder = scratch_dir();
    let image: PathBuf = folder.path().join("image");
    let refused = |path: &Path| {
        let device = offshoot_device::FileDevice::open(path).unwrap();
        XfsVolume::open(Arc::new(device), &XfsOptions::default()).map(drop).unwrap_err()
    };
    for content in [vec![], vec![0; 100], vec![0xff; 70_000]] {
        fs::write(&image, content).unwrap();
        let error = refused(&image);
        assert_eq!(error.code(), Code::NoVolume, "{error}");
    }
    let mut content = b"XFSB".to_vec();
    content.resize(70_000, 0);
    fs::write(&image, content).unwrap();
    assert_eq!(refused(&image).code(), Code::Superblock);
}

/// What a device is told to read soon, and what was read that it was not told of.
#[derive(Debug)]
struct ToldDevice {
    device: Arc<dyn BlockDevice>,
    told: Mutex<Vec<Range<u64>>>,
    surprises: Mutex<Vec<u64>>,
}

impl ToldDevice {
    fn new(device: Arc<dyn BlockDevice>) -> Arc<Self> {
        Arc::new(Self { device, told: Mutex::default(), surprises: Mutex::default() })
    }
}

impl offshoot_device::Delegate for ToldDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.device
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if !self.told.lock().unwrap().iter().any(|range| range.contains(&offset)) {
            self.surprises.lock().unwrap().push(offset);
        }
        self.inner().read_at(offset, buf)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.told.lock().unwrap().push(offset..offset + len);
    }
}

/// Files of a directory lie near each other, and the device is told of their data as a whole.
#[test]
fn the_device_is_told_of_neighbouring_files_at_once() {
    const FILES: u64 = 1000;
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, "");
    let mount = disk.mount("rw", &[]);
    for number in 0..FILES {
        fs::write(mount.path().join(number.to_string()), [1; 4096]).unwrap();
    }
    drop(mount);
    let device = ToldDevice::new(disk.device());
    let volume = XfsVolume::open(device.clone(), &XfsOptions::default()).unwrap();
    let files: Vec<FileId> =
        entries(&*volume, volume.root()).into_iter().map(|(_, file)| file).collect();
    device.told.lock().unwrap().clear();
    volume.prefetch(&files);
    let told = std::mem::take(&mut *device.told.lock().unwrap());
    assert!(told.len() < 20, "{} times: {told:?}", told.len());
    let bytes: u64 = told.iter().map(|range| range.end - range.start).sum();
    assert!(bytes >= FILES * 4096, "{bytes} bytes");
}

/// A walk tells the device of the inodes and directories that it comes to.
#[test]
fn a_walk_reads_hardly_anything_that_the_device_was_not_told_of() {
    const DIRECTORIES: usize = 100;
    let Some(judges) = judges::require() else { return };
    let disk = made(&judges, "");
    let mount = disk.mount("rw", &[]);
    for number in 0..DIRECTORIES {
        let dir = mount.path().join(number.to_string());
        fs::create_dir(&dir).unwrap();
        (0..40).for_each(|file| fs::write(dir.join(format!("file {file}")), "").unwrap());
    }
    drop(mount);
    let device = ToldDevice::new(disk.device());
    let volume = XfsVolume::open(device.clone(), &XfsOptions::default()).unwrap();
    let surprises = || std::mem::take(&mut *device.surprises.lock().unwrap()).len();
    let (fs, root) = (ReadOnlyFiles::new(&*volume), volume.root());
    surprises();
    let mut seen = ShownEntries(0);
    walk(&fs, root, (), DEPTH_MAX, &mut seen);
    assert_eq!(seen.0, DIRECTORIES * 41);
    // Those of the tops of groups and of their trees, and of the root.
    let count = surprises();
    assert!(count < 20, "{count} reads of {DIRECTORIES} directories");
}

/// Counts what a walk shows.
struct ShownEntries(usize);

impl WalkVisitor for ShownEntries {
    type Directory = ();

    fn enter(&mut self, (): &(), _: &WalkedFile<'_>) -> Option<()> {
        self.0 += 1;
        Some(())
    }

    fn visit(&mut self, (): &(), _: &WalkedFile<'_>) {
        self.0 += 1;
    }

    fn failed(&mut self, path: &[u8], error: &offshoot_vfs::Error) {
        panic!("{}: {error}", String::from_utf8_lossy(path));
    }

    fn is_stopped(&self) -> bool {
        false
    }
}
