//! The bytes of files under random calls, in blocks of all sizes, against plain vectors of bytes.

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::LARGE_BLOCKS;
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{Errno, Fallocate, FilePosition, SetAttr};

use super::*;

struct ByteChurn<'a> {
    opened: &'a WrittenXfs,
    files: Vec<(FileId, Vec<u8>)>,
    random: Random,
    /// The bytes of a block.
    block: u64,
    /// The most bytes of a file.
    most: u64,
}

fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}

impl ByteChurn<'_> {
    /// A number of bytes, at times whole blocks.
    fn bytes(&mut self, most: u64) -> u64 {
        let bytes = self.random.below(most);
        if self.random.below(2) == 0 { bytes / self.block * self.block } else { bytes }
    }

    fn any_file(&mut self) -> usize {
        index(self.random.below(self.files.len() as u64))
    }

    fn step(&mut self) {
        let (number, at, len) = (self.any_file(), self.bytes(self.most), self.bytes(self.most / 3));
        let range = index(at)..index(at + len);
        let new = self.random.bytes(index(len));
        let files = &self.opened.files;
        let (file, bytes) = &mut self.files[number];
        match self.random.below(10) {
            0..3 if len > 0 => {
                files.write(*file, at, &new, AT).unwrap();
                bytes.resize(bytes.len().max(range.end), 0);
                bytes[range].copy_from_slice(&new);
            }
            3 => {
                let set = SetAttr { size: Some(at), ..SetAttr::default() };
                files.set_attr(*file, &set, AT).unwrap();
                bytes.resize(index(at), 0);
            }
            4 if len > 0 => {
                let what = [Fallocate::PunchHole, Fallocate::Zero { keeps_size: true }];
                let what = what[index(self.random.below(2))];
                files.fallocate(*file, what, at, len, AT).unwrap();
                let [start, end] = [range.start, range.end].map(|at| at.min(bytes.len()));
                bytes[start..end].fill(0);
            }
            5 if len > 0 => {
                let allocate = Fallocate::Allocate { keeps_size: len % 2 == 0 };
                files.fallocate(*file, allocate, at, len, AT).unwrap();
                if len % 2 == 1 {
                    bytes.resize(bytes.len().max(range.end), 0);
                }
            }
            6 => self.shift(number, at / self.block * self.block, len / self.block * self.block),
            7 | 8 => self.share(number, at, len),
            _ => self.opened.files.fsync(*file).unwrap(),
        }
    }

    /// Takes whole blocks out of a file, or puts some in.
    fn shift(&mut self, number: usize, at: u64, len: u64) {
        let files = &self.opened.files;
        let (file, bytes) = &mut self.files[number];
        let size = bytes.len() as u64;
        if len == 0 {
            return;
        }
        if self.random.below(2) == 0 {
            let outcome = files.fallocate(*file, Fallocate::Collapse, at, len, AT);
            assert_eq!(outcome.is_ok(), at + len < size);
            if at + len < size {
                bytes.drain(index(at)..index(at + len));
            }
        } else if size + len < 2 * self.most {
            let outcome = files.fallocate(*file, Fallocate::Insert, at, len, AT);
            assert_eq!(outcome.is_ok(), at < size);
            if at < size {
                bytes.splice(index(at)..index(at), vec![0; index(len)]);
            }
        }
    }

    /// Copies or clones a range of another file, or of the same.
    fn share(&mut self, number: usize, at: u64, len: u64) {
        let (other, offset) = (self.any_file(), self.bytes(self.most));
        let files = &self.opened.files;
        let from = FilePosition { file: self.files[other].0, offset };
        let to = FilePosition { file: self.files[number].0, offset: at };
        if other == number && offset.abs_diff(at) < len + self.block {
            return;
        }
        let source = &self.files[other].1;
        let available = (source.len() as u64).saturating_sub(offset).min(len);
        let copied = source.get(index(offset)..index(offset + available)).unwrap_or_default();
        let copied = copied.to_vec();
        if available == 0 || self.random.below(2) == 0 {
            assert_eq!(files.copy_range(from, to, len, AT).unwrap(), available);
        } else if let Err(error) = files.clone_range(from, to, available, AT) {
            assert!(matches!(error.errno(), Errno::INVAL | Errno::OPNOTSUPP), "{error}");
            return;
        }
        if !copied.is_empty() {
            let bytes = &mut self.files[number].1;
            let range = index(at)..index(at) + copied.len();
            bytes.resize(bytes.len().max(range.end), 0);
            bytes[range].copy_from_slice(&copied);
        }
    }

    fn verify(&self, files: &dyn FileSystem) {
        for (file, bytes) in &self.files {
            let found = content(files, *file);
            let differs = found.iter().zip(bytes).position(|(found, wanted)| found != wanted);
            assert_eq!((found.len(), differs), (bytes.len(), None), "of {file}");
            let mut at = 0;
            files
                .read_data(*file, 0..u64::MAX, &mut |start, part| {
                    assert!(bytes[at..index(start)].iter().all(|byte| *byte == 0));
                    at = index(start) + part.len();
                    assert!(bytes[index(start)..at] == *part, "shown from {start} on of {file}");
                    Ok(())
                })
                .unwrap();
            assert!(bytes[at..].iter().all(|byte| *byte == 0), "behind what is shown of {file}");
        }
    }
}

fn churn(mib: u64, options: &str, block: u64, kernel_says: &[&'static str]) {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let disk = made(&judges, mib, options);
    let opened = WrittenXfs::new(&disk);
    let files: Vec<_> =
        ["a", "b", "c"].iter().map(|name| (opened.make(name, b""), Vec::new())).collect();
    let most = 60 * block.max(4096);
    let mut churn = ByteChurn { opened: &opened, files, random: Random::new(seed), block, most };
    for _ in 0..4 {
        (0..100).for_each(|_| churn.step());
        churn.verify(&*opened.files);
    }
    opened.volume.shut_down().unwrap();
    assert_checks(&disk);
    churn.verify(&*XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap());
    let mount = disk.mount("", kernel_says);
    for (name, (_, bytes)) in ["a", "b", "c"].iter().zip(&churn.files) {
        assert!(std::fs::read(mount.path().join(name)).unwrap() == *bytes, "{name}");
    }
    drop(mount);
    disk.assert_checks();
}

#[test]
fn files_hold_what_vectors_hold_in_small_blocks() {
    churn(64, "--unsupported -b size=1024", 1024, &[]);
}

#[test]
fn files_hold_what_vectors_hold_in_usual_blocks_with_a_hint() {
    churn(300, "-d extszinherit=7 -m rmapbt=0", 4096, &[]);
}

#[test]
fn files_hold_what_vectors_hold_in_large_blocks() {
    churn(1 << 10, "-b size=65536", 65_536, &[LARGE_BLOCKS]);
}

#[test]
fn files_hold_what_vectors_hold_without_shared_blocks() {
    churn(64, "--unsupported -b size=1024 -m reflink=0,rmapbt=0", 1024, &[]);
}
