//! The kernel does the same on a volume of its own, and the same data gets compressed.
//!
//! The test compares which ranges of which files are compressed, whether they are inline, how much
//! smaller they are, and which files are marked as not worth it. It leaves out where the two differ
//! by design (`docs/decisions.md`):
//!
//! | input | what differs |
//! |---|---|
//! | the mark of `noise` | the kernel takes a sample before it compresses, and does not mark a file that it did not try |
//! | a few bytes | the kernel marks a file for a single sector too that does not become smaller, and keeps data that LZO made longer |
//! | data behind the beginning that looks better in the sample than it is | the kernel marks the file for it |
//! | noise and text within 512 KiB | the kernel does not compress what follows the noise there |
//! | a write from the middle of a chunk of 128 KiB into the next one | the kernel's chunks begin where the write began |

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{Compress, EngineOptions, Filesystem};
use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::FileExtentBody;
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::random::Random;
use offshoot_vfs::{FileFlags, FileSystem, FileSystemMut, NewFile, XattrMode};

use crate::common::{AT, NEW, at, open_read_only, place};
use crate::layout::{flags, for_each_extent};
use crate::twins::{TOUCH, mkdir, shell, twins_with};

const PROPERTY: &[u8] = b"btrfs.compression";
const SECTOR: u64 = 4096;
const CHUNK: usize = 131_072;

/// A step for a file, on both volumes.
enum CompressStep {
    Make,
    /// The letter of a flag.
    Flag(&'static str),
    Property(&'static str),
    Write(u64, Vec<u8>),
    Sync,
}

/// Bytes of which the first 16 of each 256 are the same. The kernel's sample has only these.
/// Together they are less than a sector, so compressing saves nothing.
fn better_in_a_sample(random: &mut Random) -> Vec<u8> {
    let mut bytes = random.bytes(32 << 10);
    bytes.chunks_mut(256).for_each(|chunk| chunk[..16].fill(b'x'));
    bytes
}

/// The files, each with its steps.
fn files() -> Vec<(String, Vec<CompressStep>)> {
    use CompressStep::{Flag, Make, Property, Sync, Write};

    let mut random = Random::new(21);
    let mut files = Vec::new();
    let mut add = |name: &str, steps: Vec<CompressStep>| files.push((name.to_owned(), steps));
    for len in [900, 2048, 2500, 4096, 4097, 8192, 20_000, 70_000, CHUNK, CHUNK + 100, 1_300_000] {
        add(&format!("text{len}"), vec![Make, Write(0, random.text(len))]);
    }
    let text = |random: &mut Random| random.text(200_000);
    add("noise", vec![Make, Write(0, random.bytes(300_000))]);
    let between =
        [random.text(4 * CHUNK), random.bytes(4 * CHUNK), random.text(4 * CHUNK)].concat();
    add("noise-between", vec![Make, Write(0, between)]);
    let later = Write(2 * CHUNK as u64, text(&mut random));
    add("sampled", vec![Make, Write(0, better_in_a_sample(&mut random)), Sync, later]);
    let part = Write(33 * SECTOR, random.text(30_000));
    add("overwritten", vec![Make, Write(0, random.text(400_000)), Sync, part]);
    let sector = Write(2 * SECTOR, random.text(4096));
    add("one-sector", vec![Make, Write(0, random.text(300_000)), Sync, sector]);
    add("behind-a-hole", vec![Make, Write(1 << 20, text(&mut random))]);
    for name in ["zlib", "lzo", "zstd", "none"] {
        let steps = vec![Make, Property(name), Write(0, text(&mut random))];
        add(&format!("property-{name}"), steps);
    }
    let later = Write(2 * CHUNK as u64, text(&mut random));
    let steps =
        vec![Make, Property("zstd"), Write(0, better_in_a_sample(&mut random)), Sync, later];
    add("property-sampled", steps);
    for letter in ["c", "m", "C"] {
        let steps = vec![Make, Flag(letter), Write(0, text(&mut random))];
        add(&format!("flag-{letter}"), steps);
    }
    files
}

fn by_kernel(root: &Path, files: &[(String, Vec<CompressStep>)]) {
    for (name, steps) in files {
        let path = root.join(name);
        for step in steps {
            match step {
                CompressStep::Make => drop(File::create(&path).expect("a file")),
                CompressStep::Flag(letter) => shell(root, &format!("chattr +{letter} {name}")),
                CompressStep::Property(value) => {
                    shell(root, &format!("btrfs property set {name} compression {value}"));
                }
                CompressStep::Write(offset, bytes) => {
                    let file = File::options().write(true).open(&path).expect("it opens");
                    file.write_all_at(bytes, *offset).expect("it writes");
                }
                CompressStep::Sync => {
                    rustix::fs::syncfs(File::open(root).expect("the root")).expect("a sync");
                }
            }
        }
    }
    shell(root, &format!("chmod 644 *; {TOUCH}"));
}

fn by_us(fs: &Filesystem, files: &[(String, Vec<CompressStep>)]) {
    for (name, steps) in files {
        let file = || at(fs, name);
        for step in steps {
            match step {
                CompressStep::Make => {
                    fs.create(place(fs.root(), name), &NEW).expect("a file");
                }
                CompressStep::Flag(letter) => {
                    let flags = letter.chars().filter_map(FileFlags::of_letter).collect();
                    fs.set_flags(file(), flags, AT).expect("flags");
                }
                CompressStep::Property(value) => fs
                    .set_xattr(file(), PROPERTY, value.as_bytes(), XattrMode::Set, AT)
                    .expect("a property"),
                CompressStep::Write(offset, bytes) => {
                    fs.write(file(), *offset, bytes, AT).expect("there is room");
                }
                CompressStep::Sync => fs.sync().expect("a commit"),
            }
        }
    }
}

/// A range of a file: its start and length, its compression, whether it is inline, and the bytes
/// that it takes on disk. All numbers are in bytes.
#[derive(Debug)]
struct CompressedRange {
    start: u64,
    len: u64,
    compression: Compression,
    is_inline: bool,
    stored: u64,
}

impl CompressedRange {
    fn is_plain(&self) -> bool {
        self.compression == Compression::None && !self.is_inline
    }

    /// Whether two ranges are the same, except for the bytes on disk, where compressors differ a
    /// little.
    fn is_like(&self, other: &Self) -> bool {
        let unit = if self.is_inline { 32 } else { SECTOR };
        let all = |one: &Self| (one.start, one.len, one.compression, one.is_inline);
        let is_packed = self.compression != Compression::None;
        // There are several ways to search for repetitions, and a level does not mean the same in
        // all compressors.
        let allowed = if is_packed { unit.max(other.stored / 2) } else { 0 };
        all(self) == all(other) && self.stored.abs_diff(other.stored) <= allowed
    }
}

/// The ranges of a file. Uncompressed data is one range even if it is in several extents.
fn ranges(fs: &Filesystem, name: &str) -> Vec<CompressedRange> {
    let mut all: Vec<CompressedRange> = Vec::new();
    for_each_extent(fs, at(fs, name), |start, extent| {
        let compression = extent.compression;
        let range = match extent.body {
            FileExtentBody::Inline(data) => CompressedRange {
                start,
                len: extent.ram_bytes,
                compression,
                is_inline: true,
                stored: data.len() as u64,
            },
            FileExtentBody::Hole { .. } => return,
            FileExtentBody::Extent { disk_num_bytes, num_bytes, .. } => {
                let is_plain = compression == Compression::None;
                let stored = if is_plain { num_bytes } else { disk_num_bytes };
                CompressedRange { start, len: num_bytes, compression, is_inline: false, stored }
            }
        };
        match all.last_mut() {
            Some(last) if last.is_plain() && range.is_plain() && last.start + last.len == start => {
                last.len += range.len;
                last.stored += range.stored;
            }
            _ => all.push(range),
        }
    });
    all
}

#[test]
fn the_kernel_compresses_the_same() {
    let files = files();
    for (mount, method) in [
        ("noatime", None),
        ("noatime,compress=zlib:1", Some("zlib:1")),
        ("noatime,compress=zlib:9", Some("zlib:9")),
        ("noatime,compress=lzo", Some("lzo")),
        ("noatime,compress=zstd:1", Some("zstd:1")),
        ("noatime,compress=zstd:15", Some("zstd:15")),
        ("noatime,compress-force=zlib", Some("zlib")),
        ("noatime,compress-force=lzo", Some("lzo")),
        ("noatime,compress-force=zstd", Some("zstd")),
    ] {
        println!("{mount}");
        let forced = mount.contains("force");
        let method = method.map(|method| method.parse().expect("a method"));
        let compress = method.map(|method| Compress { method, is_forced: forced });
        let options = EngineOptions { compress, ..EngineOptions::default() };
        let compare = Compare::default()
            .without(Aspect::Ids)
            .without(Aspect::StoredTimes)
            // The test compares sizes extent by extent, and ignores one file's mark.
            .without(Aspect::Allocation)
            .without(Aspect::Flags);
        let theirs = |path: &Path| by_kernel(path, &files);
        let volumes = twins_with(&options, mount, &compare, 0, theirs, |fs| by_us(fs, &files));
        let Some(volumes) = volumes else { return };
        let [ours, theirs] = volumes.each_ref().map(open_read_only);
        let (mut compressed, mut stored) = (0, [0; 2]);
        for (name, _) in &files {
            let [our_ranges, their_ranges] = [&ours, &theirs].map(|fs| ranges(fs, name));
            let alike = our_ranges.iter().zip(&their_ranges).all(|(one, other)| one.is_like(other));
            assert!(
                alike && our_ranges.len() == their_ranges.len(),
                "{name} with {mount}: ours is {our_ranges:#?}, the kernel's {their_ranges:#?}"
            );
            for (sum, ranges) in stored.iter_mut().zip([&our_ranges, &their_ranges]) {
                *sum += ranges.iter().map(|range| range.stored).sum::<u64>();
            }
            compressed +=
                their_ranges.iter().filter(|one| one.compression != Compression::None).count();
            let [our_flags, their_flags] = [&ours, &theirs].map(|fs| flags(fs, at(fs, name)));
            if name != "noise" || compress.is_none() || forced {
                assert_eq!(our_flags, their_flags, "flags of {name} with {mount}");
            }
        }
        println!("{} bytes, the kernel's {}", stored[0], stored[1]);
        assert!(stored[0] < stored[1] + stored[1] / 6, "{stored:?} bytes with {mount}");
        let at_least = if compress.is_some() { 30 } else { 6 };
        assert!(compressed >= at_least, "only {compressed} ranges are compressed with {mount}");
    }
}

/// New subvolumes inherit their compression from the root of the subvolume in which they are made,
/// and not from their directory. Snapshots keep the compression of their source.
#[test]
fn subvolumes_inherit_how_data_is_compressed() {
    // In the order in which they are made: directories, and subvolumes with `:` in front, each with
    // its property.
    const MADE: &[(&str, &str)] = &[
        (":before", ""),
        ("plain", ""),
        ("lzo", "lzo"),
        (":lzo/in-lzo", ""),
        (":zlib", "zlib"),
        (":zlib/below", ""),
        ("zlib/dir", "none"),
        (":zlib/dir/below", ""),
        ("zlib/dir/dir", ""),
        (":none", "none"),
        (":none/below", ""),
        (":alone-zlib", "zlib"),
        (":alone-none", "none"),
        (".", "zstd"),
        (":in-zstd", ""),
        (":lzo/in-both", ""),
        (":plain/in-zstd", ""),
        ("in-zstd/dir", ""),
    ];
    const SNAPSHOTS: [(&str, &str); 3] =
        [("alone-zlib", "of-zlib"), ("alone-none", "of-none"), ("in-zstd", "lzo/of-zstd")];
    let text = Random::new(22).text(50_000);
    let dirs = || {
        let made = MADE.iter().map(|(path, _)| path.trim_start_matches(':'));
        made.chain(SNAPSHOTS.iter().map(|(_, path)| *path))
    };
    let theirs = |root: &Path| {
        let made = MADE.iter().map(|(path, value)| {
            let make = match path.strip_prefix(':') {
                Some(path) => format!("btrfs -q subvolume create {path}; chmod 755 {path}"),
                None => format!("mkdir -p {path}"),
            };
            let path = path.trim_start_matches(':');
            let set = format!("btrfs property set {path} compression {value}");
            if value.is_empty() { make } else { format!("{make}; {set}") }
        });
        let taken = SNAPSHOTS
            .iter()
            .map(|(source, target)| format!("btrfs -q subvolume snapshot {source} {target}"));
        let script: Vec<_> = made.chain(taken).collect();
        shell(root, &format!("umask 022; {}", script.join("; ")));
        for dir in dirs() {
            std::fs::write(root.join(dir).join("file"), &text).expect("a file");
        }
        shell(root, TOUCH);
    };
    let compare = Compare::default()
        .without(Aspect::Ids)
        .without(Aspect::StoredTimes)
        .without(Aspect::Allocation);
    let volumes = twins_with(&EngineOptions::default(), "noatime", &compare, 0, theirs, |fs| {
        let new = NewFile { permissions: 0o755, ..NEW };
        let split = |path: &'static str| match path.rsplit_once('/') {
            Some((dir, name)) => place(at(fs, dir), name),
            None => place(fs.root(), path),
        };
        let dir = |path: &str| if path == "." { fs.root() } else { at(fs, path) };
        for &(path, value) in MADE {
            match path.strip_prefix(':') {
                Some(path) => drop(fs.create_subvolume(split(path), &new).expect("a subvolume")),
                None if path == "." => {}
                None => {
                    let name = path.rsplit('/').next().expect("a name");
                    mkdir(fs, split(path).dir, name, &new);
                }
            }
            if !value.is_empty() {
                let file = dir(path.trim_start_matches(':'));
                fs.set_xattr(file, PROPERTY, value.as_bytes(), XattrMode::Set, AT)
                    .expect("a property");
            }
        }
        for (source, target) in SNAPSHOTS {
            fs.snapshot(TreeId(at(fs, source).dev), split(target), false, AT).expect("a snapshot");
        }
        for path in dirs() {
            let file = fs.create(place(dir(path), "file"), &NEW).expect("a file");
            fs.write(file, 0, &text, AT).expect("there is room");
        }
    });
    let Some(volumes) = volumes else { return };
    // The comparison saw the same properties on both volumes. Here they must also differ from each
    // other.
    let fs = open_read_only(&volumes[1]);
    let value = |path: &str| fs.xattr(at(&fs, path), PROPERTY).ok();
    assert_eq!(value("in-zstd").as_deref(), Some(&b"zstd"[..]));
    assert_eq!(value("lzo/in-lzo"), None);
    assert_eq!(value("lzo/in-both").as_deref(), Some(&b"zstd"[..]));
    assert_eq!(value("zlib/dir/below").as_deref(), Some(&b"zlib"[..]));
}
