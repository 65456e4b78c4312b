//! Tests of the comparison itself: it must find no difference where there is none, and every
//! mistake that a filesystem can make.
//!
//! The truth is a directory of the host. [`Liar`] wraps it and tells one lie.

use std::ops::{ControlFlow, Range};
use std::path::Path;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::{fill, judges};
use offshoot_testkit::compare::{Aspect, Compare, sorted_xattrs};
use offshoot_testkit::host::HostFilesystem;
use offshoot_vfs::{
    Attr, DirEntry, Errno, Error, FileFlags, FileId, FileSystem, FileType, Parent, Result, StatFs,
};

/// The lie about one file, entry or directory.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    None,
    EntryMissing,
    EntryTwice,
    Order,
    EntryType,
    LookupElsewhere,
    MissingNameFound,
    Parent,
    Permissions,
    Owner,
    Links,
    Size,
    Allocated,
    AccessTime,
    ModificationTime,
    ChangeTime,
    BirthTime,
    XattrMissing,
    XattrValue,
    XattrGet,
    LinkTarget,
    ReadByte,
    ReadShort,
    ReadDataByte,
    ReadDataMissing,
    HoleFilled,
    ReadDataHole,
    DataHidden,
    ReadsPastTheEnd,
    ReadsDirectories,
    Identity,
    HardLink,
    Flags,
    CompressionFlags,
}

const ALL: [Lie; 33] = [
    Lie::EntryMissing,
    Lie::EntryTwice,
    Lie::Order,
    Lie::EntryType,
    Lie::LookupElsewhere,
    Lie::MissingNameFound,
    Lie::Parent,
    Lie::Permissions,
    Lie::Owner,
    Lie::Links,
    Lie::Size,
    Lie::Allocated,
    Lie::AccessTime,
    Lie::ModificationTime,
    Lie::ChangeTime,
    Lie::BirthTime,
    Lie::XattrMissing,
    Lie::XattrValue,
    Lie::XattrGet,
    Lie::LinkTarget,
    Lie::ReadByte,
    Lie::ReadShort,
    Lie::ReadDataByte,
    Lie::ReadDataMissing,
    Lie::HoleFilled,
    Lie::ReadDataHole,
    Lie::DataHidden,
    Lie::ReadsPastTheEnd,
    Lie::ReadsDirectories,
    Lie::Identity,
    Lie::HardLink,
    Lie::Flags,
    Lie::CompressionFlags,
];

struct Liar {
    truth: HostFilesystem,
    lie: Lie,
    file: FileId,
    symlink: FileId,
}

impl Liar {
    fn new(dir: &Path, lie: Lie) -> Self {
        let truth = HostFilesystem::new(dir).expect("the directory opens");
        let file = truth.lookup(truth.root(), b"file").expect("it is there");
        let symlink = truth.lookup(truth.root(), b"symlink").expect("it is there");
        Self { truth, lie, file, symlink }
    }

    fn lies(&self, lie: Lie, file: FileId) -> bool {
        self.lie == lie && file == self.file
    }

    fn different(&self, file: FileId) -> FileId {
        match self.lie {
            Lie::Identity if file == self.file => FileId { dev: file.dev ^ 1, ino: file.ino },
            _ => file,
        }
    }

    fn really(&self, file: FileId) -> FileId {
        let back = FileId { dev: file.dev ^ 1, ino: file.ino };
        if self.lie == Lie::Identity && back == self.file { back } else { file }
    }
}

impl FileSystem for Liar {
    fn root(&self) -> FileId {
        self.truth.root()
    }

    fn statfs(&self) -> Result<StatFs> {
        self.truth.statfs()
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        match self.truth.lookup(self.really(dir), name) {
            Ok(_) if self.lie == Lie::LookupElsewhere && name == b"file" => Ok(self.symlink),
            Err(_) if self.lie == Lie::MissingNameFound && name != b"x" => Ok(self.file),
            Ok(_) if self.lie == Lie::HardLink && name == b"second name" => Ok(self.symlink),
            found => found.map(|file| self.different(file)),
        }
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        let parent = self.truth.parent(dir)?;
        Ok(match parent {
            Some(parent) if self.lie == Lie::Parent => {
                Some(Parent { name: b"elsewhere".to_vec(), ..parent })
            }
            parent => parent,
        })
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        let file = self.really(file);
        let mut attr = self.truth.attr(file)?;
        attr.file = self.different(attr.file);
        if file == self.file {
            match self.lie {
                Lie::Permissions => attr.permissions ^= 0o4000,
                Lie::Owner => attr.gid ^= 1,
                Lie::Links => attr.nlink += 1,
                Lie::Size => attr.size += 1,
                Lie::Allocated => attr.allocated_bytes += 4096,
                Lie::AccessTime => attr.atime.nanos ^= 1,
                Lie::ModificationTime => attr.mtime.secs += 1,
                Lie::ChangeTime => attr.ctime.secs += 1,
                Lie::BirthTime => attr.btime.secs += 1,
                _ => {}
            }
        }
        Ok(attr)
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        let lie = match self.lie {
            lie if !self.lies(lie, file) => FileFlags::empty(),
            Lie::Flags => FileFlags::NODUMP,
            Lie::CompressionFlags => FileFlags::NOCOMPRESS,
            _ => FileFlags::empty(),
        };
        Ok(self.truth.flags(self.really(file))? ^ lie)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut list: Vec<(Vec<u8>, FileId, FileType)> = Vec::new();
        self.truth.read_dir(dir, 0, &mut |entry| {
            list.push((entry.name.to_vec(), self.different(entry.file), entry.file_type));
            ControlFlow::Continue(())
        })?;
        match self.lie {
            Lie::EntryMissing => list.retain(|entry| entry.0 != b"file"),
            Lie::EntryTwice => list.extend(list.first().cloned()),
            Lie::Order => list.reverse(),
            Lie::EntryType => list.iter_mut().for_each(|entry| entry.2 = FileType::Fifo),
            Lie::HardLink => {
                for entry in list.iter_mut().filter(|entry| entry.0 == b"second name") {
                    entry.1 = self.symlink;
                }
            }
            _ => {}
        }
        for (cookie, (name, file, file_type)) in (1..).zip(list) {
            if cookie > after && visit(DirEntry { name: &name, file, file_type, cookie }).is_break()
            {
                break;
            }
        }
        Ok(())
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        let mut target = self.truth.read_link(self.really(file))?;
        if self.lie == Lie::LinkTarget {
            target.push(b'/');
        }
        Ok(target)
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        let mut value = self.truth.xattr(self.really(file), name)?;
        if self.lies(Lie::XattrGet, file) {
            value.push(0);
        }
        Ok(value)
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let mut list = sorted_xattrs(&self.truth, self.really(file))?;
        if self.lies(Lie::XattrMissing, file) {
            list.pop();
        }
        if self.lies(Lie::XattrValue, file) {
            list[0].1.push(b'!');
        }
        let _ = list.iter().try_for_each(|(name, value)| visit(name, value));
        Ok(())
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let file = self.really(file);
        if self.lie == Lie::ReadsDirectories && file == self.truth.root() {
            return Ok(0);
        }
        let count = self.truth.read(file, offset, buf)?;
        if self.lies(Lie::ReadByte, file)
            && let Some(byte) = buf[..count].last_mut()
        {
            *byte ^= 0x40;
        }
        if self.lies(Lie::ReadShort, file) && count > 1 {
            return Ok(count - 1);
        }
        if self.lies(Lie::ReadsPastTheEnd, file) && count < buf.len() {
            return Ok(buf.len());
        }
        Ok(count)
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let file = self.really(file);
        if self.lies(Lie::ReadDataMissing, file) {
            return Ok(());
        }
        if self.lies(Lie::ReadDataHole, file) && range.start < 4096 && range.end >= 4096 {
            let hole = usize::try_from(4096 - range.start).expect("at most 4096");
            visit(range.start, &vec![0; hole])?;
        }
        self.truth.read_data(file, range, &mut |offset, bytes| {
            let mut bytes = bytes.to_vec();
            if self.lies(Lie::ReadDataByte, file) {
                bytes[0] ^= 1;
            }
            visit(offset, &bytes)
        })
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let file = self.really(file);
        let size = self.truth.attr(file)?.size;
        if self.lies(Lie::HoleFilled, file) {
            return Ok((offset < size).then_some(offset..size));
        }
        if self.lies(Lie::DataHidden, file) {
            return Ok(None);
        }
        self.truth.next_data(file, offset)
    }

    fn prefetch(&self, _files: &[FileId]) {}
}

/// A small tree of the host in which every lie can be told.
fn truth() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = std::fs::File::create(dir.path().join("file")).expect("a file");
    file.set_len(300_000).expect("a length");
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![b'd'; 50_000], 131_072).expect("data");
    rustix::fs::fsetxattr(&file, "user.one", b"1", rustix::fs::XattrFlags::empty())
        .expect("an attribute");
    std::fs::hard_link(dir.path().join("file"), dir.path().join("second name")).expect("a link");
    std::os::unix::fs::symlink("target", dir.path().join("symlink")).expect("a symbolic link");
    std::fs::create_dir(dir.path().join("directory")).expect("a directory");
    std::fs::write(dir.path().join("directory/below"), b"below").expect("a file");
    dir
}

fn compare(dir: &Path, lie: Lie) -> offshoot_testkit::compare::ComparisonOutcome {
    let judge = HostFilesystem::new(dir).expect("the directory opens");
    Compare::default().run_filesystems(&Liar::new(dir, lie), &judge)
}

#[test]
fn the_truth_is_the_same() {
    let dir = truth();
    let outcome = compare(dir.path(), Lie::None);
    outcome.assert_same(6);
    assert_eq!((outcome.directories, outcome.files, outcome.xattrs), (2, 4, 1));
}

#[test]
fn every_lie_is_found() {
    let dir = truth();
    for lie in ALL {
        let outcome = compare(dir.path(), lie);
        assert!(!outcome.differences.is_empty(), "{lie:?} was not found");
    }
}

#[test]
fn what_is_left_out_is_not_compared() {
    let dir = truth();
    let judge = HostFilesystem::new(dir.path()).expect("the directory opens");
    let cases = [
        (Lie::Identity, Aspect::Ids),
        (Lie::Order, Aspect::Order),
        (Lie::ChangeTime, Aspect::StoredTimes),
        (Lie::Allocated, Aspect::Allocation),
        (Lie::Flags, Aspect::Flags),
        (Lie::CompressionFlags, Aspect::CompressionFlags),
    ];
    for (lie, aspect) in cases {
        let compare = Compare::default().without(aspect);
        compare.run_filesystems(&Liar::new(dir.path(), lie), &judge).assert_same(6);
    }
}

#[test]
fn a_failing_judge_is_no_agreement() {
    struct BrokenHost(HostFilesystem);
    impl FileSystem for BrokenHost {
        fn root(&self) -> FileId {
            self.0.root()
        }
        fn statfs(&self) -> Result<StatFs> {
            self.0.statfs()
        }
        fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
            self.0.lookup(dir, name)
        }
        fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
            self.0.parent(dir)
        }
        fn attr(&self, file: FileId) -> Result<Attr> {
            self.0.attr(file)
        }
        fn read_dir(
            &self,
            _: FileId,
            _: u64,
            _: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
        ) -> Result<()> {
            Err(Error::posix(Errno::IO, "broken"))
        }
        fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
            self.0.read_link(file)
        }
        fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
            self.0.xattr(file, name)
        }
        fn xattrs(
            &self,
            file: FileId,
            visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
        ) -> Result<()> {
            self.0.xattrs(file, visit)
        }
        fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
            self.0.read(file, offset, buf)
        }
        fn read_data(
            &self,
            file: FileId,
            range: Range<u64>,
            visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
        ) -> Result<()> {
            self.0.read_data(file, range, visit)
        }
        fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
            self.0.next_data(file, offset)
        }
        fn prefetch(&self, _: &[FileId]) {}
    }
    let dir = truth();
    let open = || BrokenHost(HostFilesystem::new(dir.path()).expect("the directory opens"));
    let outcome = Compare::default().run_filesystems(&open(), &open());
    assert!(!outcome.differences.is_empty(), "two failures passed for agreement");
}

/// The whole filler through the kernel: the mount equals itself, and the comparison reaches all of
/// it.
#[test]
fn a_full_volume_equals_itself() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 512);
    disks.mkfs(&[]);
    let mount = disks.mount("rw,noatime");
    fill::everything(mount.path());
    drop(mount);
    let mount = disks.mount("ro,noatime");
    let ours = HostFilesystem::new(mount.path()).expect("the mount opens");
    assert!(ours.tells_subvolumes(), "the kernel tells no subvolume ids");
    let outcome = Compare::default().run(&ours, mount.path());
    outcome.assert_same(fill::EVERYTHING_AT_LEAST);
    eprintln!("{outcome}");
}
