//! Parts of compressed extents: each extent is decoded once, as long as it belongs to a file, and
//! no reader gets the bytes of an extent that is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Barrier};

use offshoot_btrfs::{BtrfsVolume, Compress, EngineOptions, Filesystem};
use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::file_extent::FileExtentBody;
use offshoot_testkit::btrfs::checked::CheckedDevice;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{FileId, FileSystem, FileSystemMut, SetAttr};

use crate::common::{AT, NEW, in_memory, place};
use crate::layout::for_each_extent;

/// The longest compressed extent.
const EXTENT: usize = 128 << 10;

/// A small read.
const PART: usize = 4096;

fn open(device: Arc<CheckedDevice>, method: &str) -> Filesystem {
    let compress = Compress { method: method.parse().expect("a method"), is_forced: true };
    let options = EngineOptions {
        compress: Some(compress),
        commit_interval: None,
        ..EngineOptions::default()
    };
    let volume = BtrfsVolume::open_writable(vec![device], &options).expect("it opens");
    volume.filesystem(TreeId::FS).expect("the top level")
}

/// A committed file with this text.
fn file_of(fs: &Filesystem, name: &str, text: &[u8]) -> FileId {
    let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
    fs.write(file, 0, text, AT).expect("there is room");
    fs.sync().expect("a commit");
    file
}

fn decoded(fs: &Filesystem) -> u64 {
    fs.volume().stats().extents_decoded
}

/// Reads a part at a random place, and compares it.
fn read_part(fs: &Filesystem, file: FileId, text: &[u8], random: &mut Random) {
    let below = |random: &mut Random, bound: usize| {
        usize::try_from(random.below(bound as u64)).expect("small")
    };
    let start = below(random, text.len());
    let mut found = vec![9; 1 + below(random, PART)];
    let len = fs.read(file, start as u64, &mut found).expect("it reads");
    assert_eq!(len, found.len().min(text.len() - start), "at {start}");
    assert!(found[..len] == text[start..start + len], "{len} bytes at {start} of {file}");
}

#[test]
fn a_thousand_small_reads_decode_an_extent_once() {
    let mut random = Random::new(seed_of_run());
    for method in ["zlib", "lzo", "zstd:3"] {
        let fs = open(in_memory(4096, 300), method);
        let text = random.text(EXTENT);
        let file = file_of(&fs, "one", &text);
        for _ in 0..1000 {
            read_part(&fs, file, &text, &mut random);
        }
        assert_eq!(decoded(&fs), 1, "{method}");
    }
}

/// Eight readers begin at the same time, and their first reads want the same extent.
#[test]
fn threads_decode_an_extent_once_together() {
    const THREADS: u64 = 8;
    let seed = seed_of_run();
    let fs = open(in_memory(4096, 300), "zstd:3");
    let texts: Vec<_> = (0..20).map(|number| Random::new(seed + number).text(EXTENT)).collect();
    let files: Vec<_> =
        texts.iter().zip(0..).map(|(text, n)| file_of(&fs, &format!("file{n}"), text)).collect();
    let begin = Barrier::new(usize::try_from(THREADS).expect("few"));
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let (fs, files, texts, begin) = (&fs, &files, &texts, &begin);
            scope.spawn(move || {
                let mut random = Random::new(seed ^ number << 32);
                for (file, text) in files.iter().zip(texts) {
                    begin.wait();
                    read_part(fs, *file, text, &mut random);
                }
            });
        }
    });
    assert_eq!(decoded(&fs), 20);
}

/// Large reads decode every extent once, and keep none of them, so they evict nothing.
#[test]
fn large_reads_keep_nothing() {
    const EXTENTS: usize = 40;
    let mut random = Random::new(seed_of_run());
    let fs = open(in_memory(4096, 300), "zstd:3");
    // The end of the file is within a sector.
    let text = random.text(EXTENTS * EXTENT - 5000);
    let file = file_of(&fs, "long", &text);
    let mut found = vec![0; 1 << 20];
    for (number, part) in (0..).zip(text.chunks(found.len())) {
        let len = fs.read(file, number << 20, &mut found).expect("it reads");
        assert!(found[..len] == *part, "MiB {number}");
    }
    assert_eq!(decoded(&fs), EXTENTS as u64);
    for (at, _) in text.chunks(EXTENT).enumerate() {
        fs.read(file, (at * EXTENT) as u64, &mut found[..PART]).expect("it reads");
    }
    assert_eq!(decoded(&fs), 2 * EXTENTS as u64, "a large read had kept some");
    // A reader of 100,000 bytes at a time meets each extent twice or three times.
    for (number, part) in (0..).zip(text.chunks(100_000)) {
        let len = fs.read(file, number * 100_000, &mut found[..100_000]).expect("it reads");
        assert!(found[..len] == *part, "bytes from {number} * 100,000 on");
    }
    let more = decoded(&fs) - 2 * EXTENTS as u64;
    assert!(more <= EXTENTS as u64, "{more} extents were decoded again");
}

/// Files are overwritten, cut and committed between small reads, so that freed space gets other
/// extents at once.
#[test]
fn an_extent_that_is_gone_is_not_read() {
    const FILES: usize = 6;
    let mut random = Random::new(seed_of_run());
    let fs = open(in_memory(4096, 300), "zstd:3");
    let mut texts: Vec<_> = (0..FILES).map(|_| random.text(3 * EXTENT)).collect();
    let files: Vec<_> =
        texts.iter().zip(0..).map(|(text, n)| file_of(&fs, &format!("file{n}"), text)).collect();
    // The beginnings of the texts that were at each address.
    let mut held: BTreeMap<u64, BTreeSet<Vec<u8>>> = BTreeMap::new();
    let mut reads = 0;
    for _ in 0..300 {
        let which = usize::try_from(random.below(FILES as u64)).expect("small");
        let (file, text) = (files[which], &mut texts[which]);
        let chunk = usize::try_from(random.below(3)).expect("small") * EXTENT;
        match random.below(3) {
            0 => {
                let set = SetAttr { size: Some(0), ..SetAttr::default() };
                fs.set_attr(file, &set, AT).expect("it is cut");
                fs.sync().expect("a commit");
                *text = random.text(3 * EXTENT);
                fs.write(file, 0, text, AT).expect("there is room");
            }
            1 => {
                let new = random.text(EXTENT);
                fs.write(file, chunk as u64, &new, AT).expect("there is room");
                text[chunk..chunk + EXTENT].copy_from_slice(&new);
            }
            _ => {
                let new = random.text(PART);
                fs.write(file, chunk as u64, &new, AT).expect("there is room");
                text[chunk..chunk + PART].copy_from_slice(&new);
            }
        }
        if random.below(3) > 0 {
            fs.sync().expect("a commit");
            for_each_extent(&fs, file, |at, extent| {
                if let FileExtentBody::Extent { disk_bytenr, offset: 0, .. } = extent.body {
                    let at = usize::try_from(at).expect("small");
                    held.entry(disk_bytenr.0).or_default().insert(text[at..at + 64].to_vec());
                }
            });
        }
        for (file, text) in files.iter().zip(&texts) {
            for _ in 0..20 {
                read_part(&fs, *file, text, &mut random);
                reads += 1;
            }
        }
    }
    let reused = held.values().filter(|texts| texts.len() > 1).count();
    assert!(reused > 20, "only {reused} addresses were used again");
    let decoded = decoded(&fs);
    assert!(decoded < reads / 2, "{decoded} of {reads} reads decoded an extent");
}
