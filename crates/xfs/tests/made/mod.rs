//! Volumes that `mkfs.xfs` makes and the kernel fills.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test crate uses a part of it")]

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_device::FileDevice;
use offshoot_testkit::btrfs::judges::skip;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::{run, try_run};
use offshoot_testkit::scratch_dir;
use offshoot_xfs::{XfsOptions, XfsVolume};
use rustix::fs::{FallocateFlags, FileType, Mode, XattrFlags};
use tempfile::TempDir;

/// Whether this machine can mount volumes; otherwise the test says that it is skipped.
pub fn can_mount() -> bool {
    match offshoot_machine::may_mount() {
        Ok(()) => true,
        Err(reason) => {
            skip(&reason);
            false
        }
    }
}

/// A volume in a file, which is removed with the value.
pub struct MadeXfs {
    folder: TempDir,
}

/// A mount of the kernel, which ends with the value.
pub struct KernelMount {
    point: PathBuf,
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        if let Err(error) = try_run("umount", &[&self.point]) {
            // A file that is still open keeps the mount busy, but not for the next program.
            let _ = try_run("umount", &["-l".as_ref(), self.point.as_os_str()]);
            assert!(std::thread::panicking(), "unmounting: {error}");
            eprintln!("unmounting: {error}");
        }
    }
}

impl KernelMount {
    pub fn path(&self) -> &Path {
        &self.point
    }
}

impl MadeXfs {
    /// An empty volume in a file of `mib` MiB, which may be too small for `mkfs.xfs` of today.
    pub fn new(mib: u64, options: &[&str]) -> Self {
        let folder = scratch_dir();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(mib << 20).unwrap();
        let mut args: Vec<&OsStr> = vec!["-q".as_ref()];
        args.extend(options.iter().map(OsStr::new));
        args.push(image.as_ref());
        run("mkfs.xfs", &args);
        fs::create_dir(folder.path().join("point")).unwrap();
        Self { folder }
    }

    pub fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    /// Mounts it with the kernel.
    pub fn mount(&self, options: &str) -> KernelMount {
        let point = self.folder.path().join("point");
        let options = format!("loop,{options}");
        let args = ["-t", "xfs", "-o", &options].map(OsStr::new);
        let image = self.image();
        run("mount", &[&args[..], &[image.as_ref(), point.as_ref()]].concat());
        KernelMount { point }
    }

    /// Opens it with our engine.
    pub fn open(&self) -> Arc<XfsVolume> {
        self.try_open(&XfsOptions::default()).unwrap()
    }

    pub fn try_open(&self, options: &XfsOptions) -> offshoot_vfs::Result<Arc<XfsVolume>> {
        XfsVolume::open(Arc::new(FileDevice::open(&self.image()).unwrap()), options)
    }

    pub fn xfs_db(&self, commands: &[&str]) -> String {
        let mut args: Vec<&OsStr> = vec!["-r".as_ref()];
        for command in commands {
            args.extend(["-c".as_ref(), OsStr::new(command)]);
        }
        let image = self.image();
        args.push(image.as_ref());
        run("xfs_db", &args)
    }
}

fn set(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty())
        .unwrap_or_else(|error| panic!("{name} of {}: {error}", path.display()));
}

/// What a volume is filled with.
#[derive(Clone, Copy)]
pub struct Filling {
    /// The entries of the largest directory.
    pub names: usize,
    /// The extents of the most scattered file.
    pub extents: u64,
    pub has_reflink: bool,
}

/// Makes files of all types and shapes below `root`.
pub fn fill(root: &Path, seed: u64, filling: Filling) {
    let mut random = Random::new(seed);
    eprintln!("filled with seed {seed:#x}");
    files(root, &mut random, filling);
    nodes(root);
    directories(root, filling.names);
    collisions(&root.join("collisions"));
    attributes(&root.join("attributes"), &mut random);
}

fn files(root: &Path, random: &mut Random, filling: Filling) {
    fs::write(root.join("empty"), []).unwrap();
    for size in [1, 100, 511, 512, 4095, 4096, 4097, 65_537, 3_000_001] {
        fs::write(root.join(format!("size-{size}")), random.bytes(size)).unwrap();
    }
    let holes = File::create(root.join("holes")).unwrap();
    for at in [0, 65_536, 1 << 20, (1 << 30) + 5] {
        holes.write_all_at(&random.bytes(5000), at).unwrap();
    }
    holes.set_len((1 << 40) + 77).unwrap();
    let scattered = File::create(root.join("scattered")).unwrap();
    for index in 0..filling.extents {
        scattered.write_all_at(&random.bytes(100), index * 131_072).unwrap();
    }
    let unwritten = File::create(root.join("unwritten")).unwrap();
    let none = FallocateFlags::empty();
    rustix::fs::fallocate(&unwritten, none, 0, 1 << 20).unwrap();
    unwritten.write_all_at(&random.bytes(70_000), 131_072).unwrap();
    rustix::fs::fallocate(&unwritten, FallocateFlags::KEEP_SIZE, 1 << 20, 1 << 20).unwrap();
    fs::hard_link(root.join("size-4097"), root.join("another name")).unwrap();
    if filling.has_reflink {
        let (from, to) = (root.join("size-3000001"), root.join("shared"));
        let args: [&OsStr; 3] = ["--reflink=always".as_ref(), from.as_ref(), to.as_ref()];
        run("cp", &args);
        File::options()
            .write(true)
            .open(to)
            .unwrap()
            .write_all_at(&random.bytes(9000), 1_000_000)
            .unwrap();
    }
    let old = rustix::fs::Timespec { tv_sec: -1_000_000_000, tv_nsec: 5 };
    let late = rustix::fs::Timespec { tv_sec: 2_100_000_000, tv_nsec: 999_999_999 };
    let times = rustix::fs::Timestamps { last_access: old, last_modification: late };
    rustix::fs::utimensat(
        rustix::fs::CWD,
        root.join("size-100"),
        &times,
        rustix::fs::AtFlags::empty(),
    )
    .unwrap();
    run("chattr", &["+AdS".as_ref(), root.join("size-512").as_os_str()]);
}

fn nodes(root: &Path) {
    for len in [1, 20, 100, 300, 400, 500, 1023] {
        symlink("t".repeat(len), root.join(format!("link-{len}"))).unwrap();
    }
    let make = |name: &str, kind, dev| {
        let mode = Mode::from_raw_mode(0o640);
        rustix::fs::mknodat(rustix::fs::CWD, root.join(name), kind, mode, dev).unwrap();
    };
    make("pipe", FileType::Fifo, 0);
    make("socket", FileType::Socket, 0);
    make("character", FileType::CharacterDevice, rustix::fs::makedev(5, 1));
    make("block", FileType::BlockDevice, rustix::fs::makedev(300, 70_000));
    std::os::unix::fs::lchown(root.join("pipe"), Some(1234), Some(70_000)).unwrap();
}

fn directories(root: &Path, most: usize) {
    for count in [0, 1, 5, 40, 200, 1000, most] {
        let folder = root.join(format!("names-{count}"));
        if fs::create_dir(&folder).is_err() {
            continue;
        }
        for index in 0..count {
            let width = 8 + index * 7 % 40;
            let path = folder.join(format!("{index:0width$}"));
            if index % 50 == 3 { fs::create_dir(path) } else { File::create(path).map(drop) }
                .unwrap();
        }
        // Removed names leave gaps, and stale hashes.
        for index in (0..count).filter(|index| index % 3 == 1) {
            let width = 8 + index * 7 % 40;
            let path = folder.join(format!("{index:0width$}"));
            if index % 50 == 3 { fs::remove_dir(path) } else { fs::remove_file(path) }.unwrap();
        }
    }
    let odd = root.join("odd names");
    fs::create_dir_all(odd.join("a/b/c/d/e")).unwrap();
    for name in [&b"\xff\xfe"[..], b"new\nline", b" ", b"...", &[b'n'; 255]] {
        fs::write(odd.join(OsStr::from_bytes(name)), name).unwrap();
    }
}

/// Names with the same hash, which fill several leaves of a directory and of attributes.
fn collisions(folder: &Path) {
    fs::create_dir(folder).unwrap();
    let names: Vec<Vec<u8>> = (0..1000_u32).map(colliding).collect();
    let hash = offshoot_xfs_format::hash::name_hash(&names[0]);
    let file = folder.join("with attributes");
    fs::write(&file, []).unwrap();
    for (index, name) in names.iter().enumerate() {
        assert_eq!(offshoot_xfs_format::hash::name_hash(name), hash);
        fs::write(folder.join(OsStr::from_bytes(name)), []).unwrap();
        if index < 200 {
            let name = [b"user.", &name[..]].concat();
            rustix::fs::lsetxattr(&file, name, &index.to_le_bytes(), XattrFlags::empty()).unwrap();
        }
    }
}

/// Name number `index` of those with the hash of `abcdabcdabcdabcd`. The bytes of a word lie seven
/// bits apart in a hash, so the highest bit of each and the lowest one of the byte before it cancel.
fn colliding(index: u32) -> Vec<u8> {
    let mut name = b"abcdabcdabcdabcd".to_vec();
    for bit in (0..12).filter(|bit| index & 1 << bit != 0) {
        let at = bit / 3 * 4 + bit % 3;
        name[at] ^= 1;
        name[at + 1] ^= 0x80;
    }
    name
}

fn attributes(folder: &Path, random: &mut Random) {
    fs::create_dir(folder).unwrap();
    let file = |name: &str| {
        let path = folder.join(name);
        fs::write(&path, name).unwrap();
        path
    };
    let few = file("few");
    set(&few, "user.one", b"value");
    set(&few, "user.empty", b"");
    set(&few, "trusted.two", b"another");
    set(&few, "security.three", &[0, 255, 1]);
    for (name, count) in [("leaf", 20), ("node", 400)] {
        let path = file(name);
        for index in 0..count {
            set(&path, &format!("user.number {index}"), &random.bytes(index % 200));
        }
        for index in (0..count).step_by(7) {
            rustix::fs::lremovexattr(&path, format!("user.number {index}")).unwrap();
        }
    }
    let large = file("large");
    for len in [1000, 3000, 5000, 20_000, 65_536] {
        set(&large, &format!("user.with {len}"), &random.bytes(len));
    }
    let link = folder.join("link");
    symlink("target", &link).unwrap();
    set(&link, "trusted.of a link", b"value");
    set(folder, "user.of a directory", &random.bytes(300));
}

/// A tree of files, and the text that tells `mkfs.xfs` to copy it.
pub struct CopiedTree {
    folder: tempfile::TempDir,
    text: String,
}

impl CopiedTree {
    fn new() -> Self {
        let folder = scratch_dir();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder, text: "/dev/null\n0 0\nd--755 0 0\n".to_owned() }
    }

    fn file(&mut self, path: &str, content: &[u8]) {
        let place = self.folder.path().join(path);
        fs::write(&place, content).unwrap();
        fs::set_permissions(&place, fs::Permissions::from_mode(0o640)).unwrap();
        let name = place.file_name().unwrap().to_str().unwrap();
        writeln!(self.text, "{name} ---640 0 0 {}", place.display()).unwrap();
    }

    fn link(&mut self, name: &str, target: &str) {
        symlink(target, self.folder.path().join(name)).unwrap();
        writeln!(self.text, "{name} l--777 0 0 {target}").unwrap();
    }

    fn directory(&mut self, name: &str, count: usize) {
        let place = self.folder.path().join(name);
        fs::create_dir(&place).unwrap();
        fs::set_permissions(&place, fs::Permissions::from_mode(0o755)).unwrap();
        writeln!(self.text, "{name} d--755 0 0").unwrap();
        for index in 0..count {
            self.file(&format!("{name}/a-name-of-some-length-{index}"), &[]);
        }
        self.text.push_str("$\n");
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A volume with files of all types and directories of all forms, and what it was made of.
    pub fn volume(options: &[&str], most: usize) -> (MadeXfs, Self) {
        let mut random = Random::new(seed_of_run());
        let mut tree = CopiedTree::new();
        for size in [0, 1, 511, 4096, 100_000] {
            tree.file(&format!("size-{size}"), &random.bytes(size));
        }
        // In V5 mkfs.xfs 6.1 gives long links no header, so that the kernel does not read them.
        let longest = if options.contains(&"crc=0") { 1000 } else { 300 };
        for len in [1, 60, 200, longest] {
            tree.link(&format!("link-{len}"), &"t".repeat(len));
        }
        for count in [0, 3, 30, 300, most] {
            tree.directory(&format!("names-{count}"), count);
        }
        tree.text.push_str("$\n");
        let proto = tree.folder.path().with_extension("proto");
        fs::write(&proto, &tree.text).unwrap();
        let made = MadeXfs::new(512, &[options, &["-p", proto.to_str().unwrap()]].concat());
        fs::remove_file(proto).unwrap();
        (made, tree)
    }
}
