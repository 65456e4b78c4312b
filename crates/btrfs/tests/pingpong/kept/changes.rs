//! The changes of a file, which we and the model do.

use offshoot_testkit::random::Random;
use offshoot_vfs::{
    Dedupe, EntryPlace, Errno, Fallocate, FileFlags, FileId, FilePosition, FileSystemMut, NewFile,
    Rename, SetAttr, Timestamp, XattrMode,
};

use super::kinds::{bytes, text};
use super::{KIB, PROPERTY, access_list};

pub(super) struct ChangedFile<'a> {
    pub(super) fs: &'a dyn FileSystemMut,
    /// Whether this is the model, which does not derive anything from attributes.
    pub(super) is_model: bool,
    /// The directory and the name.
    pub(super) place: EntryPlace<'a>,
    pub(super) file: FileId,
    pub(super) size: u64,
    /// Whether the file's data has checksums. No call of a filesystem tells that.
    pub(super) has_checksums: bool,
    /// A file that is never changed, and whether its data has checksums.
    pub(super) source: (FileId, bool),
}

/// A change: its name, and the function that does it.
pub(super) type FileChange = (&'static str, fn(&ChangedFile<'_>));

pub(super) const CHANGES: [FileChange; 32] = [
    ("first_byte", |to| to.write(0, 1)),
    ("within_the_first_sector", |to| to.write(600, 50)),
    ("within", |to| to.write(10_123, 5000)),
    ("over_the_middle", |to| to.write(50_000, 200_000)),
    ("a_sector", |to| to.write(12 * KIB, 4096)),
    ("all", |to| to.write(0, to.size.max(1))),
    ("append", |to| to.write(to.size, 3)),
    ("far_behind", |to| to.write(2048 * KIB + 7, 10_000)),
    ("between_islands", |to| to.write(350 * KIB + 1, 100)),
    ("cut_to_nothing", |to| to.resize(0)),
    ("cut_to_ten", |to| to.resize(10)),
    ("cut_to_a_sector", |to| to.resize(4096)),
    ("cut_to_half", |to| to.resize(to.size / 2)),
    ("grow", |to| to.resize(1024 * KIB + 3)),
    ("attributes", |to| {
        to.set(b"user.short", &bytes(700));
        to.set(b"user.ours", b"ours");
        to.set(b"security.kind", b"ours");
        to.set_attr(SetAttr { uid: Some(1234), gid: Some(5), ..SetAttr::default() });
    }),
    ("access_list", |to| {
        // As the access control list says.
        to.set_attr(SetAttr { permissions: Some(0o674), ..SetAttr::default() });
        to.set(b"system.posix_acl_access", &access_list());
    }),
    ("allocated", |to| to.allocate(Fallocate::Allocate { keeps_size: false }, 5000, 300_000)),
    ("allocated_behind", |to| {
        to.allocate(Fallocate::Allocate { keeps_size: true }, to.size + 8 * KIB, 200_000);
    }),
    ("punched", |to| to.allocate(Fallocate::PunchHole, 5000, 60_000)),
    ("zeroed", |to| to.allocate(Fallocate::Zero { keeps_size: false }, 3000, 100_000)),
    ("collapsed", |to| {
        if to.size > 12 * KIB {
            to.allocate(Fallocate::Collapse, 4 * KIB, 8 * KIB);
        }
    }),
    ("inserted", |to| {
        if to.size > 4 * KIB {
            to.allocate(Fallocate::Insert, 4 * KIB, 16 * KIB);
        }
    }),
    ("cloned_behind", |to| {
        let end = to.size.next_multiple_of(4 * KIB) + 16 * KIB;
        let cloned = to.fs.clone_range(to.at(0), to.at(end), to.size, at());
        cloned.expect("it shares with itself");
    }),
    ("cloned_over", |to| {
        // The model knows of missing checksums only for files that are written in place.
        let in_place = |flags: FileFlags| flags.contains(FileFlags::NODATACOW);
        let of_source = to.fs.flags(to.source.0).expect("its flags");
        if to.has_checksums == to.source.1 && in_place(to.flags()) == in_place(of_source) {
            let from = FilePosition { file: to.source.0, offset: 16 * KIB };
            let cloned = to.fs.clone_range(from, to.at(8 * KIB), 64 * KIB, at());
            cloned.expect("they share");
        }
    }),
    ("copied_over", |to| {
        let from = FilePosition { file: to.source.0, offset: 904 };
        let copied = to.fs.copy_range(from, to.at(5000), 60_000, at());
        assert_eq!(copied.expect("there is room"), 60_000);
    }),
    ("deduped", |to| {
        let same = bytes(40 << 10);
        for offset in [0, 64 * KIB] {
            to.fs.write(to.file, offset, &same, at()).expect("there is room");
        }
        let deduped = to.fs.dedupe_range(to.at(0), to.at(64 * KIB), 40 * KIB);
        assert!(matches!(deduped, Ok(Dedupe::Same { .. })), "it is the same: {deduped:?}");
    }),
    ("exchanged", |to| {
        let partner = EntryPlace { name: b"partner", ..to.place };
        to.fs.rename_with(to.place, partner, Rename::Exchange, at()).expect("both are there");
    }),
    ("replaced", |to| {
        let new = NewFile { permissions: 0o640, uid: 7, gid: 8, umask: None, at: at() };
        let place = EntryPlace { name: b"new", ..to.place };
        let file = to.fs.create(place, &new).expect("a new file");
        to.fs.write(file, 0, &text(7000), at()).expect("there is room");
        to.fs.rename(place, to.place, at()).expect("it takes the place");
    }),
    ("linked", |to| {
        let name = [b"also-", to.place.name].concat();
        to.fs.link(to.file, EntryPlace { name: &name, ..to.place }, at()).expect("one more name");
    }),
    ("flags", |to| {
        // The kernel lets files inherit both flags, although no call may set both.
        if to.flags().contains(FileFlags::NODATACOW | FileFlags::COMPRESS) {
            return;
        }
        let flags = to.flags() ^ (FileFlags::NODUMP | FileFlags::NOATIME | FileFlags::SYNC);
        to.fs.set_flags(to.file, flags, at()).expect("flags");
    }),
    ("never_compressed", |to| {
        let flags = to.flags();
        if !flags.intersects(FileFlags::NOCOMPRESS | FileFlags::NODATACOW) {
            let flags = (flags - FileFlags::COMPRESS) | FileFlags::NOCOMPRESS;
            to.fs.set_flags(to.file, flags, at()).expect("flags");
            if to.is_model && to.fs.xattr(to.file, PROPERTY.as_bytes()).is_ok() {
                let removed = to.fs.remove_xattr(to.file, PROPERTY.as_bytes(), at());
                removed.expect("it goes with the flag");
            }
        }
        to.fs.write(to.file, 30_000, &text(100_000), at()).expect("there is room");
    }),
    ("compressed_by_property", |to| {
        let flags = to.flags();
        if to.has_checksums && !flags.contains(FileFlags::NODATACOW) {
            to.set(PROPERTY.as_bytes(), b"zstd");
            if to.is_model {
                let flags = (flags - FileFlags::NOCOMPRESS) | FileFlags::COMPRESS;
                to.fs.set_flags(to.file, flags, at()).expect("it follows from the property");
            }
        }
        to.fs.write(to.file, 30_000, &text(100_000), at()).expect("there is room");
    }),
];

pub(super) fn at() -> Timestamp {
    Timestamp { secs: 1_900_000_000, nanos: 1 }
}

impl ChangedFile<'_> {
    fn at(&self, offset: u64) -> FilePosition {
        FilePosition { file: self.file, offset }
    }

    fn flags(&self) -> FileFlags {
        self.fs.flags(self.file).expect("its flags")
    }

    fn write(&self, offset: u64, len: u64) {
        let data = Random::new(offset).bytes(usize::try_from(len).expect("small"));
        self.fs.write(self.file, offset, &data, at()).expect("there is room");
    }

    fn set_attr(&self, set: SetAttr) {
        self.fs.set_attr(self.file, &set, at()).expect("other attributes");
    }

    fn resize(&self, size: u64) {
        self.set_attr(SetAttr { size: Some(size), ..SetAttr::default() });
    }

    fn set(&self, name: &[u8], value: &[u8]) {
        let set = self.fs.set_xattr(self.file, name, value, XattrMode::Set, at());
        set.expect("an attribute");
    }

    fn allocate(&self, what: Fallocate, offset: u64, len: u64) {
        self.fs.fallocate(self.file, what, offset, len, at()).expect("there is room");
    }

    /// Clears the flags that forbid changes.
    pub(super) fn unlock(&self) {
        let (flags, locks) = (self.flags(), FileFlags::APPEND | FileFlags::IMMUTABLE);
        if flags.intersects(locks) {
            if !self.is_model {
                let refused = self.fs.write(self.file, 0, b"ours", at()).expect_err("it is locked");
                assert_eq!(refused.errno(), Errno::PERM);
            }
            self.fs.set_flags(self.file, flags - locks, at()).expect("chattr -ai");
        }
    }
}

/// Makes a file in a directory. It inherits what new files inherit there.
pub(super) fn make_in(fs: &dyn FileSystemMut, is_model: bool, dir: FileId, name: &str) {
    let new = NewFile { permissions: 0o644, uid: 3, gid: 4, umask: None, at: at() };
    let file = fs.create(EntryPlace { dir, name: name.as_bytes() }, &new).expect("a new file");
    if is_model && let Ok(property) = fs.xattr(dir, PROPERTY.as_bytes()) {
        let set = fs.set_xattr(file, PROPERTY.as_bytes(), &property, XattrMode::Set, at());
        set.expect("it is inherited");
    }
    fs.write(file, 0, &text(60_000), at()).expect("there is room");
}
