//! A filesystem that is only read, as one that can be changed.

use std::sync::Arc;

use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
use offshoot_vfs::{
    EntryPlace, Errno, Fallocate, FileFlags, FilePosition, FileSystem, FileSystemMut, NewFile,
    ReadOnlyFiles, SetAttr, Timestamp, XattrMode,
};

#[test]
fn reads_go_through_and_changes_are_refused() {
    let mut fs = MemoryFilesystem::new();
    fs.file(ROOT, b"file", 300, b"contents");
    let fs = Arc::new(fs);
    let files = ReadOnlyFiles::new(fs.clone());
    let file = files.lookup(files.root(), b"file").unwrap();
    let mut bytes = [0; 8];
    assert_eq!((files.read(file, 0, &mut bytes).unwrap(), &bytes), (8, b"contents"));
    assert_eq!(files.attr(file).unwrap(), fs.attr(file).unwrap());
    files.open(file).unwrap();
    files.fsync(file).unwrap();
    files.fdatasync(file).unwrap();
    files.release(file).unwrap();
    files.sync().unwrap();
    assert_eq!(files.open(id(999)).unwrap_err().errno(), Errno::NOENT);

    let at = Timestamp { secs: 1, nanos: 0 };
    let new = NewFile { permissions: 0o644, uid: 0, gid: 0, umask: None, at };
    let place = |name| EntryPlace { dir: files.root(), name };
    let here = FilePosition { file, offset: 0 };
    for refused in [
        files.create(place(b"new"), &new).map(drop),
        files.mkdir(place(b"new"), &new).map(drop),
        files.symlink(place(b"new"), b"file", &new).map(drop),
        files.create_unnamed(files.root(), true, &new).map(drop),
        files.link(file, place(b"new"), at),
        files.unlink(place(b"file"), at),
        files.rmdir(place(b"file"), at),
        files.rename(place(b"file"), place(b"new"), at),
        files.set_attr(file, &SetAttr::TOUCH, at),
        files.set_flags(file, FileFlags::empty(), at),
        files.write(file, 0, b"x", at),
        files.write_direct(file, 0, b"x", at),
        files.fallocate(file, Fallocate::PunchHole, 0, 1, at),
        files.clone_range(here, here, 1, at),
        files.dedupe_range(here, here, 1).map(drop),
        files.copy_range(here, here, 1, at).map(drop),
        files.set_xattr(file, b"user.a", b"b", XattrMode::Set, at),
        files.remove_xattr(file, b"user.a", at),
    ] {
        assert_eq!(refused.unwrap_err().errno(), Errno::ROFS);
    }
}
