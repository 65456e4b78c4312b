//! Extractions that go on where others were left.

use std::fs::{File, Permissions, set_permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use offshoot_testkit::memory::{MemoryFilesystem, ROOT, id};
use offshoot_vfs::{FileType, ReadOnlyFiles};

use super::*;
use crate::TransferFailure;
use crate::extract::{ExtractSource, marker};

/// Makes of what was extracted what is left when the process is killed at the very end.
fn leave_half_done(sandbox: &ExtractSandbox) {
    set_permissions(sandbox.out(), Permissions::from_mode(0o700)).expect("it is ours");
    marker::write(File::open(sandbox.out()).expect("it opens"), &mark()).expect("a mark");
}

#[test]
fn what_was_not_applied_is_told_again() {
    let mut fs = MemoryFilesystem::new();
    fs.add(ROOT, b"dir", 300, FileType::Directory).attr.uid = u32::MAX;
    let node = fs.file(300, b"file", 301, b"hello");
    node.xattrs = vec![(b"bogus.key".to_vec(), b"value".to_vec())];
    (node.attr.gid, node.attr.permissions) = (u32::MAX, 0o6400);
    fs.file(ROOT, b"whole", 302, b"data").xattrs = vec![(b"user.a".to_vec(), b"b".to_vec())];
    fs.add(ROOT, b"link", 303, FileType::Symlink).target = b"/etc/passwd".to_vec();
    let sandbox = ExtractSandbox::new();
    let at_once = sandbox.extract(&fs);
    assert!(at_once.0.not_applied.len() >= 3, "{at_once:?}");
    leave_half_done(&sandbox);
    let before = sandbox.out().join("whole").metadata().expect("it is there");
    let resumed = sandbox.extract(&fs);
    let shown = |(outcome, status): &(ExtractOutcome, Option<Worst>)| {
        let ExtractOutcome { directories, files, errors, not_applied, .. } = outcome;
        format!("{directories} {files} {errors} {not_applied:?} {status:?}")
    };
    assert_eq!(shown(&resumed), shown(&at_once));
    let after = sandbox.out().join("whole").metadata().expect("it is there");
    assert_eq!((before.ino(), before.mtime_nsec()), (after.ino(), after.mtime_nsec()));
}

/// Attributes that were never set, because the process was killed, are set by the next one, and
/// what a directory that was done gives to new files is taken off first.
#[test]
fn what_was_not_set_yet_is_set() {
    let mut fs = MemoryFilesystem::new();
    let acl = [
        &[2, 0, 0, 0][..],
        &[1, 0, 7, 0, 255, 255, 255, 255],
        &[4, 0, 5, 0, 255, 255, 255, 255],
        &[32, 0, 0, 0, 255, 255, 255, 255],
    ];
    let dir = fs.add(ROOT, b"dir", 300, FileType::Directory);
    dir.xattrs = vec![(b"system.posix_acl_default".to_vec(), acl.concat())];
    dir.attr.permissions = 0o2555;
    fs.file(300, b"file", 301, b"hello").attr.permissions = 0o604;
    let sandbox = ExtractSandbox::new();
    sandbox.extract(&fs);
    leave_half_done(&sandbox);
    let file = sandbox.out().join("dir/file");
    std::fs::remove_file(&file).expect("it is ours");
    assert_eq!(sandbox.extract(&fs).1, None);
    assert_eq!(file.metadata().expect("it is there").mode(), 0o100_604);
    let list = rustix::fs::getxattr(&file, "system.posix_acl_access", &mut [0; 64]);
    assert!(list.is_err(), "{list:?}");
    let dir = sandbox.out().join("dir");
    assert_eq!(dir.metadata().expect("it is there").mode(), 0o42555);
    rustix::fs::getxattr(&dir, "system.posix_acl_default", &mut [0; 64]).expect("it has it");
}

/// The name of the mark is refused in the volume, before anything is made.
#[test]
fn a_file_with_the_name_of_the_mark_is_refused() {
    let mut fs = MemoryFilesystem::new();
    fs.file(ROOT, marker::NAME.as_bytes(), 301, b"a place\na state\n");
    fs.add(ROOT, b"dir", 302, FileType::Directory);
    fs.file(302, marker::NAME.as_bytes(), 303, b"mine");
    let sandbox = ExtractSandbox::new();
    let refused = |top, path: &[u8]| {
        let source = ExtractSource { fs: &ReadOnlyFiles::new(&fs), top: id(top), path };
        let result =
            extract(&source, &sandbox.out(), &mark(), Timestamp::now(), process(), &Printed);
        let Err(failure @ TransferFailure::HasMark(_)) = result else { panic!("{result:?}") };
        assert!(failure.to_string().contains(marker::NAME), "{failure}");
        assert!(!sandbox.out().exists());
    };
    refused(ROOT, b"");
    refused(301, b"/.offshoot-extract");
    // Below the top it is a name like any other.
    let mut fs = MemoryFilesystem::new();
    fs.add(ROOT, b"dir", 302, FileType::Directory);
    fs.file(302, marker::NAME.as_bytes(), 303, b"mine");
    assert_eq!(sandbox.extract(&fs).1, None);
    let mine = sandbox.out().join("dir").join(marker::NAME);
    assert_eq!(std::fs::read(mine).expect("it is there"), b"mine");
}
