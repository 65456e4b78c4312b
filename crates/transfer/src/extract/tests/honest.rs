//! Trees that are what they seem.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};

use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
use offshoot_vfs::{FileType, ReadOnlyFiles};

use super::*;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn everything_is_kept() {
    let mut fs = MemoryFilesystem::new();
    fs.node(ROOT, FileType::Directory).attr.permissions = 0o751;
    fs.add(ROOT, b"dir", 300, FileType::Directory).attr.permissions = 0o2555;
    let node = fs.file(300, b"file", 301, b"hello");
    node.attr.permissions = 0o4751;
    node.attr.nlink = 3;
    node.xattrs = vec![(b"user.key".to_vec(), b"value\0".to_vec())];
    fs.enter(300, b"same", 301);
    fs.enter(ROOT, b"elsewhere", 301);
    fs.add(ROOT, b"link", 302, FileType::Symlink).target = b"/etc/passwd".to_vec();
    fs.add(ROOT, b"fifo", 303, FileType::Fifo).attr.permissions = 0o622;
    fs.add(ROOT, b"socket", 304, FileType::Socket);
    let sparse = fs.add(ROOT, b"sparse", 305, FileType::Regular);
    sparse.attr.size = 1 << 30;
    sparse.pieces = vec![(1 << 20, vec![7; 4096]), (40 << 20, vec![8; 5000])];
    let hole = fs.add(ROOT, b"hole", 306, FileType::Regular);
    hole.attr.size = 123_456;
    if is_root() {
        let node = fs.add(ROOT, b"null", 307, FileType::CharDevice);
        node.attr.rdev = (1, 3);
        node.attr.permissions = 0o4666;
        let owned = fs.file(ROOT, b"owned", 308, b"");
        (owned.attr.uid, owned.attr.gid, owned.attr.permissions) = (1234, 5678, 0o6755);
    }
    let sandbox = ExtractSandbox::new();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!(status, None, "{outcome:?}");
    assert_eq!(outcome.not_applied.len(), 0, "{outcome:?}");
    let out = sandbox.out();
    let stat = |path: &str| out.join(path).symlink_metadata().unwrap();
    for (path, mode) in [
        ("", 0o40751),
        ("dir", 0o42555),
        ("dir/file", 0o104_751),
        ("fifo", 0o10622),
        ("sparse", 0o100_644),
    ] {
        assert_eq!(stat(path).mode(), mode, "{path}");
    }
    for path in ["", "dir", "dir/file", "link", "fifo", "socket", "sparse", "hole"] {
        let found = (stat(path).mtime(), stat(path).mtime_nsec());
        assert_eq!(found, (1_100_000_000, 123_456_789), "{path}");
    }
    assert_eq!(stat("dir/file").atime(), 1_000_000_000);
    assert_eq!(stat("dir/file").nlink(), 3);
    assert_eq!(stat("dir/file").ino(), stat("elsewhere").ino());
    assert_eq!(std::fs::read(out.join("dir/same")).unwrap(), b"hello");
    let mut value = vec![0; 64];
    let len = rustix::fs::getxattr(out.join("dir/file"), "user.key", &mut value).unwrap();
    assert_eq!(&value[..len], b"value\0");
    assert_eq!(std::fs::read_link(out.join("link")).unwrap().to_str(), Some("/etc/passwd"));
    assert!(stat("socket").file_type().is_socket());
    assert_eq!((stat("sparse").size(), stat("hole").size()), (1 << 30, 123_456));
    assert!(stat("sparse").blocks() < 100 && stat("hole").blocks() == 0);
    let sparse = std::fs::File::open(out.join("sparse")).unwrap();
    let mut data = [0; 6];
    std::os::unix::fs::FileExt::read_exact_at(&sparse, &mut data, (40 << 20) + 4997).unwrap();
    assert_eq!(data, [8, 8, 8, 0, 0, 0]);
    if is_root() {
        assert_eq!(
            (stat("null").mode(), stat("null").rdev()),
            (0o24666, rustix::fs::makedev(1, 3))
        );
        let owned = stat("owned");
        assert_eq!((owned.uid(), owned.gid(), owned.mode()), (1234, 5678, 0o106_755));
    }
}

#[test]
fn one_file_goes_into_the_directory() {
    let mut fs = MemoryFilesystem::new();
    fs.file(ROOT, b"file", 300, b"hello").attr.nlink = 2;
    let sandbox = ExtractSandbox::new();
    std::fs::create_dir(sandbox.out()).unwrap();
    std::fs::set_permissions(sandbox.out(), PermissionsExt::from_mode(0o750)).unwrap();
    let source = ExtractSource { fs: &ReadOnlyFiles::new(&fs), top: id(300), path: b"/a/file" };
    let outcome =
        extract(&source, &sandbox.out(), &mark(), Timestamp::now(), process(), &Printed).unwrap();
    assert!(outcome.worst.is_none(), "{outcome:?}");
    assert_eq!(std::fs::read(sandbox.out().join("file")).unwrap(), b"hello");
    assert_eq!(sandbox.out().metadata().unwrap().mode(), 0o40750);
}

/// It stayed with the caller as its owner, and without its default ACL.
#[test]
fn a_directory_that_takes_one_file_stays_what_it_is() {
    let mut fs = MemoryFilesystem::new();
    fs.file(ROOT, b"file", 300, b"hello");
    let sandbox = ExtractSandbox::new();
    std::fs::create_dir(sandbox.out()).unwrap();
    if is_root() {
        std::os::unix::fs::chown(sandbox.out(), Some(1234), Some(5678)).unwrap();
    }
    std::fs::set_permissions(sandbox.out(), PermissionsExt::from_mode(0o2750)).unwrap();
    let state = || {
        let stat = sandbox.out().metadata().unwrap();
        (stat.uid(), stat.gid(), stat.mode())
    };
    let before = state();
    let source = ExtractSource { fs: &ReadOnlyFiles::new(&fs), top: id(300), path: b"/file" };
    let outcome =
        extract(&source, &sandbox.out(), &mark(), Timestamp::now(), process(), &Printed).unwrap();
    assert!(outcome.worst.is_none(), "{outcome:?}");
    assert_eq!(state(), before);
}

/// Without root an attribute needs a file that may be written, which a read-only file is
/// only as long as it has not got its mode.
#[test]
fn read_only_files_keep_their_user_attributes_without_root() {
    let mut fs = MemoryFilesystem::new();
    let xattrs = vec![(b"user.key".to_vec(), b"value".to_vec())];
    let node = fs.file(ROOT, b"file", 300, b"x");
    (node.attr.permissions, node.xattrs) = (0o444, xattrs.clone());
    let node = fs.add(ROOT, b"dir", 301, FileType::Directory);
    (node.attr.permissions, node.xattrs) = (0o555, xattrs);
    let sandbox = ExtractSandbox::new();
    std::os::unix::fs::chown(sandbox.temp.path(), Some(65_534), Some(65_534)).unwrap_or(());
    for node in fs.nodes.values_mut().filter(|_| is_root()) {
        (node.attr.uid, node.attr.gid) = (65_534, 65_534);
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if is_root() {
                // Of this thread alone, and of those that it starts.
                let (user, group) = (rustix::fs::Uid::from_raw(65_534), 65_534);
                let group = rustix::fs::Gid::from_raw(group);
                rustix::thread::set_thread_res_gid(group, group, group).unwrap();
                rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            }
            let (outcome, status) = sandbox.extract(&fs);
            assert_eq!((status, outcome.not_applied.len()), (None, 0), "{outcome:?}");
        });
    });
    for (name, mode) in [("file", 0o100_444), ("dir", 0o40555)] {
        let path = sandbox.out().join(name);
        assert_eq!(path.metadata().unwrap().mode(), mode, "{name}");
        let mut value = [0; 64];
        let len = rustix::fs::getxattr(&path, "user.key", &mut value).unwrap();
        assert_eq!(&value[..len], b"value", "{name}");
    }
}

#[test]
fn many_files_in_many_directories() {
    let mut fs = MemoryFilesystem::new();
    let mut ino = 300;
    for directory in 0..40u64 {
        let parent = ino;
        fs.add(ROOT, format!("d{directory}").as_bytes(), parent, FileType::Directory);
        ino += 1;
        for file in 0..(directory * 40) {
            fs.file(parent, format!("f{file}").as_bytes(), ino, &file.to_le_bytes());
            ino += 1;
        }
    }
    let sandbox = ExtractSandbox::new();
    let (outcome, status) = sandbox.extract(&fs);
    assert_eq!((status, outcome.directories, outcome.files), (None, 41, 780 * 40));
    for directory in 0..40u64 {
        let path = sandbox.out().join(format!("d{directory}"));
        assert_eq!(names(&path).len() as u64, directory * 40);
        assert_eq!(path.metadata().unwrap().mtime(), 1_100_000_000);
    }
    assert_eq!(std::fs::read(sandbox.out().join("d39/f1000")).unwrap(), 1000u64.to_le_bytes());
}
