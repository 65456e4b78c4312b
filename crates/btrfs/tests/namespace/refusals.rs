//! Impossible operations fail as POSIX requires, and change nothing.

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::run;
use offshoot_vfs::{Errno, FileSystem, FileSystemMut, FileType, NewNode, Result, XattrMode};

use crate::common::{AT, NEW, at, judge, open_read_only, open_top, place};

#[track_caller]
fn refused<T>(result: Result<T>, errno: Errno) {
    match result {
        Ok(_) => panic!("it was done, {errno} was expected"),
        Err(error) => assert_eq!(error.errno(), errno, "{error}"),
    }
}

#[test]
fn what_posix_refuses() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime");
    let path = |name: &str| mount.path().join(name);
    run("btrfs", &["subvolume".as_ref(), "create".as_ref(), path("nested").as_os_str()]);
    std::fs::write(path("fixed"), b"immutable").expect("a file");
    run("chattr", &["+i".as_ref(), path("fixed").as_os_str()]);
    std::fs::write(path("full"), b"some data").expect("a file");
    drop(mount);
    let fs = open_top(&disks);
    let root = fs.root();
    let dir = fs.mkdir(place(root, "dir"), &NEW).expect("a directory");
    let inner = fs.mkdir(place(dir, "inner"), &NEW).expect("a directory");
    let file = fs.create(place(root, "file"), &NEW).expect("a file");
    let link = fs.symlink(place(root, "link"), b"file", &NEW).expect("a link");
    let nested = at(&fs, "nested");

    refused(fs.create(place(root, "file"), &NEW), Errno::EXIST);
    refused(fs.create(place(root, ".."), &NEW), Errno::EXIST);
    refused(fs.create(place(root, ""), &NEW), Errno::NOENT);
    refused(fs.create(place(root, "a/b"), &NEW), Errno::INVAL);
    refused(fs.create(place(root, &[b'n'; 256]), &NEW), Errno::NAMETOOLONG);
    refused(fs.create(place(file, "x"), &NEW), Errno::NOTDIR);
    refused(fs.unlink(place(root, "none"), AT), Errno::NOENT);
    refused(fs.unlink(place(root, "dir"), AT), Errno::ISDIR);
    refused(fs.rmdir(place(root, "file"), AT), Errno::NOTDIR);
    refused(fs.rmdir(place(root, "dir"), AT), Errno::NOTEMPTY);
    refused(fs.link(dir, place(root, "x"), AT), Errno::PERM);
    refused(fs.link(file, place(root, "dir"), AT), Errno::EXIST);
    refused(fs.link(file, place(nested, "x"), AT), Errno::XDEV);
    refused(fs.rename(place(root, "file"), place(nested, "x"), AT), Errno::XDEV);
    refused(fs.rename(place(root, "dir"), place(inner, "x"), AT), Errno::INVAL);
    refused(fs.rename(place(root, "dir"), place(dir, "x"), AT), Errno::INVAL);
    refused(fs.rename(place(root, "dir"), place(root, "file"), AT), Errno::NOTDIR);
    refused(fs.rename(place(root, "file"), place(root, "dir"), AT), Errno::ISDIR);
    refused(fs.rename(place(dir, "inner"), place(root, "dir"), AT), Errno::NOTEMPTY);
    refused(fs.symlink(place(root, "x"), b"", &NEW), Errno::NOENT);
    let device = NewNode { file_type: FileType::CharDevice, rdev: (4096, 0) };
    refused(fs.mknod(place(root, "x"), device, &NEW), Errno::INVAL);
    refused(fs.unlink(place(root, "fixed"), AT), Errno::PERM);
    refused(fs.set_xattr(link, b"user.x", b"", XattrMode::Set, AT), Errno::PERM);
    refused(fs.set_xattr(file, b"other.x", b"", XattrMode::Set, AT), Errno::OPNOTSUPP);
    refused(fs.remove_xattr(file, b"user.x", AT), Errno::NODATA);
    for (name, errno) in
        [("user.x", Errno::NODATA), ("other.x", Errno::OPNOTSUPP), ("user.", Errno::INVAL)]
    {
        refused(fs.xattr(file, name.as_bytes()).map(drop), errno);
    }
    refused(fs.release(file), Errno::BADF);

    fs.create(place(nested, "inside"), &NEW).expect("the other subvolume can be changed");
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, 9);
    let fs = open_read_only(&disks);
    refused(fs.create(place(root, "x"), &NEW), Errno::ROFS);
}
