//! Archives byte by byte: the dialects, and what is wrong in hostile ones.

use std::io::Cursor;

use offshoot_vfs::FileType;

use super::*;
use crate::build::unpack::unpack;
use crate::extract::tests::Printed;

/// What a test sees of an entry.
#[derive(Debug, PartialEq, Eq)]
struct SeenEntry {
    path: String,
    kind: String,
    /// Offset and bytes of each piece of data.
    data: Vec<(u64, Vec<u8>)>,
}

#[derive(Default)]
struct Collected {
    entries: Vec<BuildEntry>,
    seen: Vec<SeenEntry>,
}

impl EntrySink for Collected {
    fn put(&mut self, entry: BuildEntry, contents: &mut dyn Contents) -> Result {
        let mut data = Vec::new();
        let mut buf = vec![0; 64];
        while let Some((offset, len)) = contents.read_piece(&mut buf)? {
            data.push((offset, buf[..len].to_vec()));
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let kind = match &entry.kind {
            EntryKind::Regular { size } => format!("file of {size}"),
            EntryKind::Directory => "directory".to_owned(),
            EntryKind::Symlink(target) => format!("symlink to {}", text(target)),
            EntryKind::HardLink(target) => format!("link to {}", text(target)),
            EntryKind::Node(node) => format!("{:?} {:?}", node.file_type, node.rdev),
        };
        self.seen.push(SeenEntry { path: text(&entry.path), kind, data });
        self.entries.push(entry);
        Ok(())
    }
}

/// The field of a header that is at `at` becomes `bytes`.
pub(in crate::build) fn set(block: &mut [u8], at: usize, bytes: &[u8]) {
    block[at..at + bytes.len()].copy_from_slice(bytes);
}

/// A header of ustar, before `change`.
fn header(name: &str, entry_type: u8, size: usize, change: impl Fn(&mut [u8])) -> Vec<u8> {
    let mut block = vec![0; BLOCK];
    set(&mut block, 0, name.as_bytes());
    set(&mut block, 100, b"0000644\0");
    set(&mut block, 108, b"0001750\0");
    set(&mut block, 116, b"0000144\0");
    set(&mut block, 124, format!("{size:011o}\0").as_bytes());
    set(&mut block, 136, b"00000000005\0");
    set(&mut block, 156, &[entry_type]);
    set(&mut block, 257, b"ustar\x0000");
    change(&mut block);
    set(&mut block, 148, b"        ");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    set(&mut block, 148, format!("{sum:06o}\0 ").as_bytes());
    block
}

/// A header and its data.
pub(in crate::build) fn member(
    name: &str,
    entry_type: u8,
    data: &[u8],
    change: impl Fn(&mut [u8]),
) -> Vec<u8> {
    let mut bytes = header(name, entry_type, data.len(), change);
    bytes.extend_from_slice(data);
    bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
    bytes
}

pub(in crate::build) fn plain(name: &str, entry_type: u8, data: &[u8]) -> Vec<u8> {
    member(name, entry_type, data, |_| {})
}

fn record(key: &str, value: &str) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while rest + len.to_string().len() != len {
        len = rest + len.to_string().len();
    }
    format!("{len} {key}={value}\n").into_bytes()
}

pub(in crate::build) fn records(entry_type: u8, pairs: &[(&str, &str)]) -> Vec<u8> {
    let text: Vec<u8> = pairs.iter().flat_map(|(key, value)| record(key, value)).collect();
    plain("PaxHeader", entry_type, &text)
}

fn read(archive: &[u8]) -> Result<(Collected, ArchiveEnd), String> {
    let mut input =
        unpack(Cursor::new(archive), &Printed).map_err(|problem| problem.to_string())?;
    let mut sink = Collected::default();
    let end = read_tar(&mut *input, b"a.tar", &Printed, &mut sink);
    end.map(|end| (sink, end)).map_err(|failure| failure.to_string())
}

pub(in crate::build) fn ended(mut archive: Vec<u8>) -> Vec<u8> {
    archive.resize(archive.len() + 2 * BLOCK, 0);
    archive
}

#[track_caller]
fn seen(archive: Vec<u8>) -> Collected {
    let (collected, end) = read(&ended(archive)).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(end, ArchiveEnd::Marked);
    collected
}

#[track_caller]
fn refused(archive: Vec<u8>) -> String {
    read(&ended(archive)).err().expect("it is refused")
}

fn one(path: &str, kind: &str, data: &[(u64, &[u8])]) -> SeenEntry {
    let data = data.iter().map(|(at, bytes)| (*at, bytes.to_vec())).collect();
    SeenEntry { path: path.to_owned(), kind: kind.to_owned(), data }
}

#[test]
fn every_type_of_entry() {
    let linked = |name, entry_type, target: &'static str| {
        member(name, entry_type, b"", move |block| set(block, 157, target.as_bytes()))
    };
    let device = |name, entry_type| {
        member(name, entry_type, b"", |block| {
            set(block, 329, b"0000010\0");
            set(block, 337, b"\x80\0\0\0\0\x01\0\0");
        })
    };
    let archive = [
        plain("./", b'5', b""),
        plain("/etc/passwd", b'0', b"root"),
        plain("old", 0, b"old"),
        plain("old-directory/", b'0', b""),
        plain("contiguous", b'7', b"c"),
        linked("hard", b'1', "./etc//passwd"),
        linked("soft", b'2', "../outside"),
        device("char", b'3'),
        device("block", b'4'),
        plain("fifo", b'6', b""),
        plain("a label", b'V', b""),
        plain("dump", b'D', b"Yold\0Nnew\0"),
    ]
    .concat();
    let expected = [
        one("", "directory", &[]),
        one("etc/passwd", "file of 4", &[(0, b"root")]),
        one("old", "file of 3", &[(0, b"old")]),
        one("old-directory", "directory", &[]),
        one("contiguous", "file of 1", &[(0, b"c")]),
        one("hard", "link to etc/passwd", &[]),
        one("soft", "symlink to ../outside", &[]),
        one("char", &format!("{:?} (8, 65536)", FileType::CharDevice), &[]),
        one("block", &format!("{:?} (8, 65536)", FileType::BlockDevice), &[]),
        one("fifo", &format!("{:?} (0, 0)", FileType::Fifo), &[]),
        one("dump", "directory", &[]),
    ];
    let Collected { seen, entries } = seen(archive);
    assert_eq!(seen, expected);
    let entry = &entries[1];
    assert_eq!((entry.permissions, entry.uid, entry.gid), (0o644, 1000, 100));
    assert_eq!((entry.mtime.secs, entry.atime), (5, None));
}

#[test]
fn long_names_of_each_dialect() {
    let long = format!("{}/{}", "d".repeat(150), "f".repeat(90));
    let (directory, name) = long.split_once('/').expect("two names");
    let prefixed = member(name, b'0', b"", |block| set(block, 345, directory.as_bytes()));
    let gnu_name = [long.as_bytes(), b"\0"].concat();
    let gnu = [plain("././@LongLink", b'L', &gnu_name), plain("cut", b'0', b"")].concat();
    let gnu_link = [
        plain("././@LongLink", b'K', &gnu_name),
        plain("././@LongLink", b'L', b"link\0"),
        plain("cut", b'1', b""),
    ]
    .concat();
    let pax =
        [records(b'x', &[("path", &long), ("linkpath", "t")]), plain("cut", b'2', b"")].concat();
    let star = member("name", b'0', b"", |block| {
        set(block, 345, &[b'p'; 131]);
        set(block, 476, b"00000000007 00000000007 ");
        set(block, 508, b"tar\0");
    });
    let Collected { seen, .. } = seen([prefixed, gnu, gnu_link, pax, star].concat());
    let paths: Vec<_> = seen.iter().map(|entry| &*entry.path).collect();
    assert_eq!(paths, [&long, &long, "link", &long, &format!("{}/name", "p".repeat(131))]);
    assert_eq!(seen[2].kind, format!("link to {long}"));
    assert_eq!(seen[3].kind, "symlink to t");
}

#[test]
fn records_count_for_one_entry_and_global_ones_for_all() {
    let archive = [
        records(b'g', &[("uid", "7"), ("mtime", "1.5"), ("comment", "x")]),
        plain("a", b'0', b""),
        records(
            b'x',
            &[
                ("uid", "4294967294"),
                ("mtime", "-4.75"),
                ("atime", "9"),
                ("SCHILY.xattr.user.a", "1"),
                ("LIBARCHIVE.xattr.user.b%3d", "Mg"),
                ("SCHILY.acl.access", "user::rw-,group::r--,other::---"),
            ],
        ),
        plain("b", b'0', b""),
        plain("c", b'0', b""),
        records(b'g', &[("uid", "")]),
        plain("d", b'0', b""),
    ]
    .concat();
    let Collected { entries, .. } = seen(archive);
    let uids: Vec<_> = entries.iter().map(|entry| entry.uid).collect();
    assert_eq!(uids, [7, u32::MAX - 1, 7, 1000]);
    let time = |secs, nanos| Timestamp { secs, nanos };
    assert_eq!(entries[0].mtime, time(1, 500_000_000));
    assert_eq!((entries[1].mtime, entries[1].atime), (time(-5, 250_000_000), Some(time(9, 0))));
    let names: Vec<_> =
        entries[1].xattrs.iter().map(|(name, _)| name.escape_ascii().to_string()).collect();
    assert_eq!(names, ["system.posix_acl_access", "user.a", "user.b="]);
    assert!(entries[2].xattrs.is_empty());
}

#[test]
fn sparse_files_of_all_formats() {
    let gnu = member("gnu", b'S', b"ABCDEF", |block| {
        set(block, 257, b"ustar  \0");
        for (at, (offset, len)) in [(512, 3), (2048, 3), (4096, 0)].into_iter().enumerate() {
            set(block, 386 + at * 24, format!("{offset:011o}\0{len:011o}\0").as_bytes());
        }
        set(block, 483, b"00000010000\0");
    });
    let pairs = [
        ("GNU.sparse.size", "4096"),
        ("GNU.sparse.numblocks", "2"),
        ("GNU.sparse.offset", "512"),
        ("GNU.sparse.numbytes", "3"),
        ("GNU.sparse.offset", "2048"),
        ("GNU.sparse.numbytes", "3"),
    ];
    let pax_0_0 = [records(b'x', &pairs), plain("pax-0.0", b'0', b"ABCDEF")].concat();
    let map = [
        ("GNU.sparse.name", "pax-0.1"),
        ("GNU.sparse.size", "4096"),
        ("GNU.sparse.map", "512,3,2048,3"),
    ];
    let pax_0_1 = [records(b'x', &map), plain("GNUSparseFile.1/x", b'0', b"ABCDEF")].concat();
    let version = [
        ("GNU.sparse.major", "1"),
        ("GNU.sparse.minor", "0"),
        ("GNU.sparse.name", "pax-1.0"),
        ("GNU.sparse.realsize", "4096"),
        ("path", "GNUSparseFile.2/x"),
    ];
    let mut data = b"3\n512\n3\n2048\n3\n4096\n0\n".to_vec();
    data.resize(BLOCK, 0);
    data.extend_from_slice(b"ABCDEF");
    let pax_1_0 = [records(b'x', &version), plain("GNUSparseFile.2/x", b'0', &data)].concat();
    let after = plain("after", b'0', b"x");
    let Collected { seen, .. } = seen([gnu, pax_0_0, pax_0_1, pax_1_0, after].concat());
    let pieces: &[(u64, &[u8])] = &[(512, b"ABC"), (2048, b"DEF")];
    let mut expected: Vec<_> = ["gnu", "pax-0.0", "pax-0.1", "pax-1.0"]
        .iter()
        .map(|name| one(name, "file of 4096", pieces))
        .collect();
    expected.push(one("after", "file of 1", &[(0, b"x")]));
    assert_eq!(seen, expected);
}

#[test]
fn a_gnu_sparse_file_goes_on_in_more_blocks() {
    let field = |block: &mut [u8], at: usize, n: usize| {
        set(block, at, format!("{:011o}\0{:011o}\0", n * 1024, 1).as_bytes());
    };
    let mut archive = header("many", b'S', 30, |block| {
        set(block, 257, b"ustar  \0");
        (0..4).for_each(|n| field(block, 386 + n * 24, n));
        set(block, 482, &[1]);
        set(block, 483, format!("{:011o}\0", 30 * 1024).as_bytes());
    });
    for first in [4, 25] {
        let mut block = vec![0; BLOCK];
        (first..30.min(first + 21)).for_each(|n| field(&mut block, (n - first) * 24, n));
        set(&mut block, 504, &[u8::from(first == 4)]);
        archive.extend_from_slice(&block);
    }
    archive.extend_from_slice(&[b'x'; 30]);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    let Collected { seen, .. } = seen(archive);
    let offsets: Vec<u64> = seen[0].data.iter().map(|(at, _)| *at).collect();
    assert_eq!(offsets, (0..30).map(|n| n * 1024).collect::<Vec<_>>());
}

#[test]
fn what_leads_out_or_makes_no_sense_is_refused() {
    let sparse = |pairs: &[(&str, &str)], data: &[u8]| {
        [records(b'x', pairs), plain("s", b'0', data)].concat()
    };
    let version_1 = |text: &str| {
        let mut data = text.as_bytes().to_vec();
        data.resize(BLOCK, 0);
        sparse(&[("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "9")], &data)
    };
    for (archive, said) in [
        (plain("../a", b'0', b""), "leads upwards"),
        (plain("a/../../b", b'5', b""), "leads upwards"),
        (member("l", b'1', b"", |block| set(block, 157, b"../etc")), "leads upwards"),
        (plain("l", b'2', b""), "without a target"),
        (plain("m", b'M', b""), "another volume"),
        (plain("q", b'q', b""), "unknown type `q`"),
        (member("n", b'0', b"", |block| set(block, 124, b"00000000009\0")), "size is no number"),
        (member("n", b'0', b"", |block| set(block, 124, &[0xff; 12])), "size is negative"),
        (member("n", b'0', b"", |block| set(block, 108, b"\x80\0\0\x01\0\0\0\0")), "too large"),
        (records(b'x', &[("uid", "x")]), "record uid is wrong"),
        (plain("p", b'x', b"99 a=b\n"), "a record that is none"),
        (member("p", b'x', b"", |block| set(block, 124, b"77777777777\0")), "more than 24 MiB"),
        (sparse(&[("GNU.sparse.map", "0,1,0,1")], b"xx"), "map of a sparse file"),
        (sparse(&[("GNU.sparse.size", "9"), ("GNU.sparse.map", "0,99")], b"xx"), "map of a sparse"),
        (sparse(&[("GNU.sparse.map", "0,1,2")], b"x"), "map of a sparse file"),
        (sparse(&[("GNU.sparse.numbytes", "1")], b"x"), "numbytes is wrong"),
        (sparse(&[("GNU.sparse.major", "2")], b"x"), "newer format"),
        (version_1("99999999999999999999\n"), "map of a sparse file"),
        (version_1("4294967296\n"), "more than 4194304 ranges"),
        (version_1("1\n18446744073709551615\n1\n"), "map of a sparse file"),
        (version_1(&"1".repeat(60)), "map of a sparse file"),
    ] {
        let why = refused(archive);
        assert!(why.starts_with("a.tar: ") && why.contains(said), "{why}, not {said}");
    }
}

#[test]
fn an_archive_that_is_cut_off_or_damaged() {
    let archive = ended([plain("a", b'0', &[b'x'; 600]), plain("b", b'0', b"y")].concat());
    let (whole, end) = read(&archive).expect("an archive");
    assert_eq!((whole.seen.len(), end), (2, ArchiveEnd::Marked));
    // Behind a whole entry nothing shows that something is missing.
    for (len, count) in [(3 * BLOCK, 1), (5 * BLOCK, 2)] {
        let (cut, end) = read(&archive[..len]).expect("whole entries");
        assert_eq!((cut.seen.len(), end), (count, ArchiveEnd::Missing), "{len}");
    }
    for len in [1, 100, 511, 513, 1100, 1600, 2047] {
        assert!(read(&archive[..len]).is_err(), "{len}");
    }
    let mut flipped = archive.clone();
    flipped[3 * BLOCK + 20] ^= 1;
    assert!(read(&flipped).err().is_some_and(|error| error.contains("wrong checksum")));
    for other in [&b""[..], b"no archive at all", &[b'z'; 2000], b"PK\x03\x04", b"\x1f\x8bx"] {
        assert!(read(other).is_err(), "{}", other.escape_ascii());
    }
}

/// Every byte of an archive changed, and every length: nothing panics.
#[test]
fn no_change_of_a_byte_ends_the_program() {
    let pairs = [("GNU.sparse.major", "1"), ("GNU.sparse.realsize", "4096"), ("uid", "5")];
    let mut data = b"2\n512\n3\n2048\n3\n".to_vec();
    data.resize(BLOCK, 0);
    data.extend_from_slice(b"ABCDEF");
    let archive = ended(
        [
            records(b'g', &[("mtime", "5")]),
            records(b'x', &pairs),
            plain("s", b'0', &data),
            member("g", b'S', b"AB", |block| {
                set(block, 386, b"00000000000\x0000000000002\0");
                set(block, 483, b"00000000002\0");
            }),
            plain("l", b'L', b"name\0"),
            plain("d", b'5', b""),
        ]
        .concat(),
    );
    for at in 0..archive.len() {
        for value in [0, b'0', b'9', b' ', 0x80, 0xff, archive[at] ^ 1] {
            let mut changed = archive.clone();
            changed[at] = value;
            // The checksum of a header would keep most changes from being read.
            let start = at / BLOCK * BLOCK;
            let sum: u32 = (start..start + BLOCK)
                .map(|at| if (148..156).contains(&(at - start)) { b' ' } else { changed[at] })
                .map(u32::from)
                .sum();
            if changed[start + 257..start + 262] == *b"ustar" {
                set(&mut changed, start + 148, format!("{sum:06o}\0 ").as_bytes());
            }
            drop(read(&changed));
        }
    }
}

/// Records of one entry pile up over several headers.
#[test]
fn records_of_many_headers_have_one_bound() {
    let many = |count: usize, bytes: usize| {
        let mut archive = Vec::new();
        for number in 0..count {
            let key = format!("SCHILY.xattr.user.{number}");
            archive.extend(records(b'x', &[(&key, &"v".repeat(bytes))]));
        }
        archive.extend(plain("f", b'0', b""));
        archive
    };
    assert_eq!(seen(many(3, 1 << 20)).entries[0].xattrs.len(), 3);
    assert!(refused(many(30, 1 << 20)).contains("records that take more than"));
    // What is small takes more in memory than in the archive.
    let small: Vec<_> = (0..300_000).map(|at| (format!("SCHILY.xattr.u{at}"), "")).collect();
    let pairs: Vec<_> = small.iter().map(|(key, value)| (&key[..], *value)).collect();
    assert!(refused(records(b'x', &pairs)).contains("records that take more than"));
    let global = records(b'g', &[("SCHILY.xattr.user.a", &"v".repeat(70_000))]);
    assert!(refused(global).contains("of more than 64 KiB"));
    let pairs: Vec<_> = pairs.into_iter().take(1000).collect();
    assert!(refused(records(b'g', &pairs)).contains("records that take more than"));
    // A later one replaces the one before it.
    let again = records(b'g', &[("SCHILY.xattr.user.a", &"v".repeat(50_000))]);
    seen([again.clone(), again.clone(), again].concat());
}

#[test]
fn paths_of_too_many_names_are_refused() {
    let deep = "d/".repeat(3000);
    let archive = [records(b'x', &[("path", &deep)]), plain("f", b'0', b"")].concat();
    assert!(refused(archive).contains("a path of more than 2048 names"));
}
