//! Results of dedupes.

use std::fs::File;
use std::path::Path;

use offshoot_btrfs_format::TreeId;
use offshoot_testkit::random::Random;
use offshoot_testkit::sharing;
use offshoot_vfs::{
    Dedupe, Errno, FileFlags, FilePosition, FileSystem, FileSystemMut, NewFile, SetAttr,
};

use super::{TOUCH, mkdir, shell, twins_that_share};
use crate::common::{AT, NEW, at, place};

/// The other file of one of [`DEDUPES`].
#[derive(Clone, Copy, Debug)]
enum OtherFile {
    /// The file with this name, which both volumes have.
    Named(&'static str),
    /// A file of its own, with the first bytes of "base".
    First(usize),
    /// With all of "base", and this many bytes behind it.
    Longer(usize),
    /// With all of "base", except for this byte.
    Changed(usize),
    /// As `First` and `Changed`, for "large".
    FirstOfLarge(usize),
    ChangedOfLarge(usize),
    /// This many zeros.
    Zeros(usize),
}

use OtherFile::{Changed, ChangedOfLarge, First, FirstOfLarge, Longer, Named, Zeros};

/// The result of a dedupe: that the bytes are the same, and how many of them are shared; or an
/// error.
type DedupeResult = Result<Dedupe, Errno>;

const fn same(len: u64) -> Dedupe {
    Dedupe::Same { len }
}

const DIFFERS: DedupeResult = Ok(Dedupe::Differs);
const INVALID: DedupeResult = Err(Errno::INVAL);
const BASE: usize = 300_001;
const LARGE: usize = 20 << 20;

/// The file and its offset, the other file and its offset, the length, and the expected result.
const DEDUPES: &[(&str, u64, OtherFile, u64, u64, DedupeResult)] = &[
    // Ends within a sector.
    ("base", 0, First(BASE), 0, 300_001, Ok(same(300_001))),
    ("base", 0, Longer(4), 0, 300_001, Ok(same(299_008))),
    ("base", 0, First(200_001), 0, 200_001, Ok(same(196_608))),
    ("base", 0, First(BASE), 0, 100_001, Ok(same(98_304))),
    ("base", 0, First(BASE), 0, 100, Ok(same(0))),
    ("base", 0, Changed(8195), 0, 8200, Ok(same(8192))),
    ("base", 0, Changed(300_000), 0, 300_001, DIFFERS),
    ("base", 0, Changed(300_000), 0, 300_000, Ok(same(299_008))),
    ("base", 0, Changed(150_000), 0, 300_001, DIFFERS),
    ("base", 8192, First(BASE), 8192, 40_000, Ok(same(36_864))),
    ("base", 8192, First(BASE), 4096, 4096, DIFFERS),
    // Behind the end, or unaligned.
    ("base", 0, Longer(10_000), 0, 300_002, INVALID),
    ("base", 0, First(4096), 0, 8192, INVALID),
    ("base", 303_104, Longer(10_000), 303_104, 4096, INVALID),
    ("base", 5, First(BASE), 0, 4096, INVALID),
    ("base", 0, First(BASE), 5, 4096, INVALID),
    ("base", 5, First(BASE), 5, 100, INVALID),
    ("base", 0, First(BASE), 0, 0, Ok(same(0))),
    ("base", 5, First(BASE), 7, 0, Ok(same(0))),
    ("base", 0, First(BASE), 1 << 31, 0, Ok(same(0))),
    ("base", 4096, First(BASE), 0, i64::MAX.cast_unsigned(), INVALID),
    ("base", 0, First(BASE), 0, u64::MAX, INVALID),
    // Twice the same file.
    ("zeros1", 0, Named("zeros1"), 40_960, 40_960, Ok(same(40_960))),
    ("zeros2", 0, Named("zeros2"), 36_864, 40_960, INVALID),
    ("zeros3", 0, Named("zeros3"), 36_864, 36_869, Ok(same(36_864))),
    ("zeros4", 0, Named("zeros4"), 0, 8192, INVALID),
    ("zeros4", 0, Named("zeros4"), 0, 100, Ok(same(0))),
    ("zeros5", 0, Named("zeros5"), 0, 163_940, INVALID),
    ("zeros5", 0, Named("zeros5"), 159_744, 4196, Ok(same(4096))),
    // More than the kernel shares in one piece.
    ("large", 0, FirstOfLarge(LARGE), 0, 20 << 20, Ok(same(20 << 20))),
    ("large", 0, FirstOfLarge(LARGE), 0, (20 << 20) - 1, Ok(same((20 << 20) - 4096))),
    ("large", 0, ChangedOfLarge(18 << 20), 0, 20 << 20, DIFFERS),
    ("large", 0, ChangedOfLarge(18 << 20), 0, (16 << 20) + 4096, Ok(same((16 << 20) + 4096))),
    // A file that must not be changed, and what is not a file.
    ("base", 0, Named("fixed"), 0, 4096, Err(Errno::PERM)),
    ("base", 0, Named("log"), 0, 8192, Ok(same(8192))),
    ("base", 0, Named("kept/base"), 0, 4096, Ok(same(4096))),
    ("base", 1, Named("kept/base"), 0, 4096, INVALID),
    ("kept/base", 4096, First(BASE), 4096, 8192, Ok(same(8192))),
    ("base", 0, Named("dir"), 0, 4096, Err(Errno::ISDIR)),
    ("base", 0, Named("dir"), 0, 0, Err(Errno::ISDIR)),
    ("nocow", 0, First(BASE), 0, 4096, INVALID),
    ("base", 0, Named("nocow"), 0, 4096, INVALID),
    // Inline data, and holes.
    ("small", 0, First(100), 0, 100, Ok(same(100))),
    ("small", 0, First(BASE), 0, 100, Ok(same(0))),
    ("base", 0, First(100), 0, 100, Ok(same(0))),
    ("hole", 0, Zeros(1 << 20), 0, 1 << 20, Ok(same(1 << 20))),
    ("hole", 0, Named("other-hole"), 0, 1 << 20, Ok(same(1 << 20))),
    ("zeros4", 0, Named("last-hole"), 0, 81_920, Ok(same(81_920))),
];

/// The named files, and their contents. Files that are holes have the same length.
fn named_files() -> Vec<(&'static str, Vec<u8>)> {
    let (base, large) = (Random::new(8).bytes(BASE), Random::new(9).bytes(LARGE));
    let zeros = |name| (name, vec![0; 40 * 4096]);
    let mut files = vec![("large", large)];
    files.extend(["base", "live/base", "fixed", "log", "nocow"].map(|name| (name, base.clone())));
    files.push(("small", base[..100].to_vec()));
    files.extend(["zeros1", "zeros2", "zeros3", "zeros4"].map(zeros));
    files.push(("zeros5", vec![0; 40 * 4096 + 100]));
    files
}

const HOLES: [(&str, u64); 3] = [("hole", 1 << 20), ("other-hole", 1 << 20), ("last-hole", 81_920)];

/// The contents of the other files of [`DEDUPES`], by name.
fn other_files() -> Vec<(String, Vec<u8>)> {
    let (base, large) = (Random::new(8).bytes(BASE), Random::new(9).bytes(LARGE));
    let changed = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1;
        bytes
    };
    let held = |other| match other {
        Named(_) => None,
        First(len) => Some(base[..len].to_vec()),
        Longer(len) => Some([&base[..], &vec![1; len]].concat()),
        Changed(at) => Some(changed(&base, at)),
        FirstOfLarge(len) => Some(large[..len].to_vec()),
        ChangedOfLarge(at) => Some(changed(&large, at)),
        Zeros(len) => Some(vec![0; len]),
    };
    let all = DEDUPES.iter().enumerate();
    all.filter_map(|(number, one)| Some((other_name(number, one.2), held(one.2)?))).collect()
}

fn other_name(number: usize, other: OtherFile) -> String {
    if let Named(name) = other { name.to_owned() } else { format!("other{number}") }
}

/// Ranges that are compared and shared: both volumes share the same ones, and refuse the others for
/// the same reason.
#[test]
fn dedupes() {
    let theirs = |path: &Path| {
        shell(
            path,
            "umask 022; btrfs -q subvolume create live; chmod 755 live; \
             mkdir dir; : > nocow; chattr +C nocow",
        );
        let write = |name: &str, bytes: &[u8]| {
            std::fs::write(path.join(name), bytes).expect("there is room");
        };
        for (name, bytes) in &named_files() {
            write(name, bytes);
        }
        for (name, bytes) in &other_files() {
            write(name, bytes);
        }
        for (name, len) in HOLES {
            File::create(path.join(name)).and_then(|file| file.set_len(len)).expect("a hole");
        }
        shell(
            path,
            &format!(
                "{TOUCH}; btrfs -q subvolume snapshot -r live kept; \
                 touch -d '2020-09-13 12:26:40.123456789 UTC' .; \
                sync -f .; chattr +i fixed; chattr +a log"
            ),
        );
        for (number, dedupe) in DEDUPES.iter().enumerate() {
            let &(from, at, other, other_at, len, found) = dedupe;
            let (from, other) = (path.join(from), path.join(other_name(number, other)));
            let kernel = sharing::dedupe_range((&from, at), (&other, other_at), len);
            let expected = found.map(|found| found != Dedupe::Differs);
            assert_eq!(kernel, expected.map_err(Errno::raw_os_error), "{dedupe:?}");
        }
    };
    twins_that_share(18, theirs, |fs| {
        let new = NewFile { permissions: 0o755, ..NEW };
        fs.create_subvolume(place(fs.root(), "live"), &new).expect("a subvolume");
        mkdir(fs, fs.root(), "dir", &new);
        let nocow = fs.create(place(fs.root(), "nocow"), &NEW).expect("a file");
        fs.set_flags(nocow, FileFlags::NODATACOW, AT).expect("it is empty");
        let create = |name: &str| match name.strip_prefix("live/") {
            Some(below) => fs.create(place(at(fs, "live"), below), &NEW).expect("a file"),
            None => fs.create(place(fs.root(), name), &NEW).expect("a file"),
        };
        let write = |name: &str, bytes: &[u8]| {
            let file = if name == "nocow" { nocow } else { create(name) };
            fs.write(file, 0, bytes, AT).expect("there is room");
        };
        for (name, bytes) in &named_files() {
            write(name, bytes);
        }
        for (name, bytes) in &other_files() {
            write(name, bytes);
        }
        for (name, len) in HOLES {
            let set = SetAttr { size: Some(len), ..SetAttr::default() };
            fs.set_attr(create(name), &set, AT).expect("a hole");
        }
        let live = TreeId(at(fs, "live").dev);
        fs.snapshot(live, place(fs.root(), "kept"), true, AT).expect("a snapshot");
        fs.sync().expect("a commit");
        for (name, flag) in [("fixed", FileFlags::IMMUTABLE), ("log", FileFlags::APPEND)] {
            fs.set_flags(at(fs, name), flag, AT).expect("a flag");
        }
        for (number, dedupe) in DEDUPES.iter().enumerate() {
            let &(from, offset, other, other_at, len, expected) = dedupe;
            let place = |name: &str, offset| FilePosition { file: at(fs, name), offset };
            let to = place(&other_name(number, other), other_at);
            let found = fs.dedupe_range(place(from, offset), to, len);
            assert_eq!(found.map_err(|error| error.errno()), expected, "{dedupe:?}");
        }
    });
}
