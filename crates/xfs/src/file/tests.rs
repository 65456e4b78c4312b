//! Files that the kernel has made, changed by transactions of ours. The kernel, our own reader and
//! the checks find the bytes of a model.

mod cuts;
mod forms;
mod full;
mod settled;

use std::ops::Range;
use std::path::Path;
use std::thread;

use offshoot_testkit::random::{Random, is_in_run, seed_of_run};
use offshoot_testkit::xfs::disk::{LARGE_BLOCKS, RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{FileId, FileSystem};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::{AgNumber, FileBlock, Ino};

use super::XfsFileChanges;
use super::share::XfsCloneRange;
use super::write::XfsWritePlace;
use crate::defer::IntentIds;
use crate::group;
use crate::inode::SPACE;
use crate::test_volumes::engine;
use crate::trans::{XfsTransactionKind as Kind, XfsTransactions};
use crate::{XfsOptions, XfsVolume, check_xfs};

const FILES: [&str; 4] = ["one", "two", "three", "four"];

/// A file, and the bytes that it should have.
struct ModelFile {
    name: &'static str,
    ino: Ino,
    bytes: Vec<u8>,
}

/// Files that are changed at random.
struct FileModel {
    files: Vec<ModelFile>,
    random: Random,
    /// The blocks that the test gives a file.
    most_blocks: u64,
}

/// A volume with files, and a model of their bytes.
struct ModelVolume {
    disk: XfsDisk,
    ids: IntentIds,
    model: FileModel,
    kernel_says: Vec<&'static str>,
}

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

impl FileModel {
    /// A range of bytes, at times of whole blocks, at most `most` blocks long.
    fn range(&mut self, block: u64, most: u64) -> Range<u64> {
        let (start, len) = (self.random.below(self.most_blocks), 1 + self.random.below(most));
        let end = (start + len).min(self.most_blocks);
        let (start, end) = (start * block, end * block);
        match self.random.below(3) {
            0 => start..end,
            1 => start + self.random.below(block)..end,
            _ => start + self.random.below(block / 2)..end - self.random.below(block / 2),
        }
    }

    /// What a program writes: the blocks that the bytes lie in, as a page cache has them.
    fn write(
        &mut self,
        changes: XfsFileChanges<'_>,
        file: usize,
        bytes: Range<u64>,
        is_lost: bool,
    ) {
        let block = changes.transactions.geometry().block_size() as u64;
        let blocks = bytes.start / block..bytes.end.div_ceil(block);
        let ino = self.files[file].ino;
        let places = changes.prepare_write(ino, blocks).unwrap();
        if is_lost {
            return changes.abandon_write(ino, &places).unwrap();
        }
        let new = self.random.bytes(index(bytes.end - bytes.start));
        let content = &mut self.files[file].bytes;
        let old_size = content.len();
        content.resize(old_size.max(index(bytes.end)), 0);
        content[index(bytes.start)..index(bytes.end)].copy_from_slice(&new);
        let size = (content.len() > old_size).then_some(content.len() as u64);
        store(changes.transactions, content, &places);
        changes.commit_write(ino, &places, size).unwrap();
    }

    fn truncate(&mut self, changes: XfsFileChanges<'_>, file: usize, size: u64) {
        changes.truncate(self.files[file].ino, size).unwrap();
        self.files[file].bytes.resize(index(size), 0);
    }

    /// Makes a hole, or zeros, of a range.
    fn punch(
        &mut self,
        changes: XfsFileChanges<'_>,
        file: usize,
        bytes: &Range<u64>,
        is_hole: bool,
    ) {
        let ino = self.files[file].ino;
        if is_hole {
            changes.punch(ino, bytes).unwrap();
        } else {
            changes.zero(ino, bytes).unwrap();
        }
        let content = &mut self.files[file].bytes;
        let [start, end] = [bytes.start, bytes.end].map(|at| index(at).min(content.len()));
        content[start..end].fill(0);
    }

    fn collapse(&mut self, changes: XfsFileChanges<'_>, file: usize, bytes: &Range<u64>) {
        let len = self.files[file].bytes.len() as u64;
        let outcome = changes.collapse(self.files[file].ino, bytes);
        assert_eq!(outcome.is_ok(), bytes.end < len, "{outcome:?}");
        if bytes.end < len {
            self.files[file].bytes.drain(index(bytes.start)..index(bytes.end));
        }
    }

    fn insert(&mut self, changes: XfsFileChanges<'_>, file: usize, bytes: &Range<u64>) {
        let (at, len) = (bytes.start, bytes.end - bytes.start);
        let outcome = changes.insert(self.files[file].ino, at, len);
        let is_inside = at < self.files[file].bytes.len() as u64;
        assert_eq!(outcome.is_ok(), is_inside, "{outcome:?}");
        if is_inside {
            let hole = vec![0; index(len)];
            self.files[file].bytes.splice(index(at)..index(at), hole);
        }
    }

    /// Clones blocks from one place to another, and the end of the source if it lies in them.
    fn share(
        &mut self,
        changes: XfsFileChanges<'_>,
        from: (usize, u64),
        to: (usize, u64),
        len: u64,
    ) {
        let block = changes.transactions.geometry().block_size() as u64;
        let source = &self.files[from.0].bytes;
        let start = from.1 * block;
        let end = (start + len * block).min(source.len() as u64);
        if end <= start || from.0 == to.0 && from.1.abs_diff(to.1) < len {
            return;
        }
        let copied = source[index(start)..index(end)].to_vec();
        let at = to.1 * block;
        let size = at + copied.len() as u64;
        let destination = self.files[to.0].bytes.len();
        if (copied.len() as u64).is_multiple_of(block) || size >= destination as u64 {
            let range = XfsCloneRange {
                from: (self.files[from.0].ino, FileBlock(from.1)),
                to: (self.files[to.0].ino, FileBlock(to.1)),
                blocks: (copied.len() as u64).div_ceil(block),
            };
            changes.clone_range(&range, Some(size)).unwrap();
            let content = &mut self.files[to.0].bytes;
            content.resize(destination.max(index(size)), 0);
            content[index(at)..index(size)].copy_from_slice(&copied);
        }
    }

    fn step(&mut self, changes: XfsFileChanges<'_>) {
        let choice = self.random.below(40);
        self.change(changes, choice);
    }

    /// A change at random, of the kind that `choice` says.
    fn change(&mut self, changes: XfsFileChanges<'_>, choice: u64) {
        let block = changes.transactions.geometry().block_size() as u64;
        let file = index(self.random.below(self.files.len() as u64));
        let has_sharing = changes.transactions.geometry().layout.contains(XfsLayout::SHARED_BLOCKS);
        let whole =
            |bytes: Range<u64>| bytes.start / block * block..bytes.end.div_ceil(block) * block;
        match choice {
            0..16 => {
                let (bytes, is_lost) = (self.range(block, 9), self.random.below(8) == 0);
                self.write(changes, file, bytes, is_lost);
            }
            16..19 => {
                let size = self.random.below(self.most_blocks * block);
                self.truncate(changes, file, size);
            }
            19..23 => {
                let (bytes, is_hole) = (self.range(block, 12), self.random.below(2) == 0);
                self.punch(changes, file, &bytes, is_hole);
            }
            23..25 => {
                let bytes = whole(self.range(block, 9));
                self.collapse(changes, file, &bytes);
            }
            25..27 => {
                let bytes = whole(self.range(block, 9));
                let len = self.files[file].bytes.len() as u64 + (bytes.end - bytes.start);
                if len <= self.most_blocks * block {
                    self.insert(changes, file, &bytes);
                }
            }
            27..30 => {
                let bytes = self.range(block, 30);
                let blocks = bytes.start / block..bytes.end.div_ceil(block);
                changes.allocate(self.files[file].ino, blocks).unwrap();
            }
            30..37 if has_sharing => {
                let from = index(self.random.below(self.files.len() as u64));
                let from = (from, self.random.below(self.most_blocks));
                let len = 1 + self.random.below(40);
                let at = self.random.below(self.most_blocks - len.min(self.most_blocks - 1));
                let len = len.min(self.most_blocks - at);
                self.share(changes, from, (file, at), len);
            }
            37 if self.random.below(8) == 0 => changes.transactions.log().force_all().unwrap(),
            38 if self.random.below(20) == 0 => changes.transactions.log().push_tail().unwrap(),
            _ => {}
        }
    }
}

impl ModelVolume {
    fn make(mib: u64, options: &str, seed: u64) -> Option<Self> {
        let disk = XfsDisk::create(&judges::require()?, mib);
        disk.mkfs(options);
        let has_large_blocks = options.contains("65536");
        let kernel_says = if has_large_blocks { vec![LARGE_BLOCKS] } else { vec![] };
        let mount = disk.mount("", &kernel_says);
        let file = |name: &'static str| {
            let path = mount.path().join(name);
            std::fs::write(&path, b"").unwrap();
            ModelFile { name, ino: Ino(XfsDisk::ino(&path)), bytes: Vec::new() }
        };
        let files = FILES.map(file).into();
        drop(mount);
        let random = Random::new(seed);
        let most_blocks = if has_large_blocks { 20 } else { 160 };
        let model = FileModel { files, random, most_blocks };
        Some(Self { disk, ids: IntentIds::default(), model, kernel_says })
    }

    /// Our reader finds what the model says, and our check finds nothing, with a log that is not
    /// replayed.
    fn assert_we_find(&self) {
        let volume = XfsVolume::open(self.disk.device(), &XfsOptions::default()).unwrap();
        for file in &self.model.files {
            assert_same(file, &contents(&volume, file.ino));
        }
        drop(volume);
        let found = check_xfs(&self.disk.device(), &XfsOptions::default()).unwrap();
        assert!(found.findings.is_empty(), "{:#?}", found.findings);
    }

    fn assert_kernel_finds(&self, root: &Path) {
        for file in &self.model.files {
            assert_same(file, &std::fs::read(root.join(file.name)).unwrap());
        }
    }

    /// Cuts the log. The kernel recovers it, and finds what the model says.
    fn assert_cut_recovers(&self, engine: &XfsTransactions) {
        engine.log().force_all().unwrap();
        let cut = self.disk.copy();
        let recovering = [&self.kernel_says[..], &[RECOVERY]].concat();
        self.assert_kernel_finds(cut.mount("nouuid", &recovering).path());
        cut.assert_checks();
    }

    /// Our reader, our check, `xfs_repair` and the kernel find what the model says, after a clean
    /// unmount. The kernel removes the files afterwards.
    fn assert_unmounts(self, engine: XfsTransactions) {
        assert_nothing_is_staged(&engine);
        let kept = group::held_back_of_all(engine.buffers(), engine.superblock()).unwrap();
        assert_eq!(engine.counters().held_back(), kept);
        engine.unmount().unwrap();
        self.disk.assert_checks();
        self.assert_we_find();
        let mount = self.disk.mount("", &self.kernel_says);
        self.assert_kernel_finds(mount.path());
        for file in &self.model.files {
            std::fs::remove_file(mount.path().join(file.name)).unwrap();
        }
        drop(mount);
        self.disk.assert_checks();
    }
}

/// Writes blocks of a file to their places, with zeros behind its end.
fn store(engine: &XfsTransactions, content: &[u8], places: &[XfsWritePlace]) {
    let block = engine.geometry().block_size();
    for place in places {
        let start = index(place.at.0) * block;
        let end = start + place.count as usize * block;
        let mut bytes = content.get(start..end.min(content.len())).unwrap_or_default().to_vec();
        bytes.resize(end - start, 0);
        let at = engine.geometry().place_of(place.start).unwrap();
        engine.buffers().write(at, &bytes).unwrap();
    }
}

/// All bytes of a file.
fn contents(volume: &XfsVolume, ino: Ino) -> Vec<u8> {
    let id = FileId { dev: SPACE, ino: ino.0 };
    let mut found = vec![0; index(volume.attr(id).unwrap().size)];
    assert_eq!(volume.read(id, 0, &mut found).unwrap(), found.len());
    found
}

fn assert_same(file: &ModelFile, found: &[u8]) {
    assert_eq!(found.len(), file.bytes.len(), "the size of {}", file.name);
    let differs = |(found, wanted): (&u8, &u8)| found != wanted;
    let first = found.iter().zip(&file.bytes).position(differs);
    assert_eq!(first, None, "a byte of {}, inode {}", file.name, file.ino);
}

fn assert_nothing_is_staged(engine: &XfsTransactions) {
    for ag in (0..engine.geometry().ag_count).map(AgNumber) {
        let mut t = engine.begin(Kind::ClearUnlinked, 0).unwrap();
        assert!(group::staged(&mut t, ag, 10).unwrap().is_empty());
    }
}

/// Two threads change two files each, in the same groups.
#[test]
fn judges_find_what_threads_have_written() {
    let Some(mut volume) = ModelVolume::make(300, "", seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    let changes = XfsFileChanges::new(&engine, &volume.ids);
    let mut other = FileModel {
        files: volume.model.files.split_off(2),
        random: Random::new(volume.model.random.number()),
        most_blocks: volume.model.most_blocks,
    };
    thread::scope(|scope| {
        for model in [&mut volume.model, &mut other] {
            scope.spawn(|| (0..400).for_each(|_| model.step(changes)));
        }
    });
    volume.model.files.append(&mut other.files);
    volume.assert_cut_recovers(&engine);
    volume.assert_unmounts(engine);
}

/// Changes files at random.
fn churn(mib: u64, options: &str, steps: usize) {
    if !is_in_run(&format!("churn of file, {options}")) {
        return;
    }
    let Some(mut volume) = ModelVolume::make(mib, options, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    for _ in 0..3 {
        for _ in 0..steps {
            volume.model.step(XfsFileChanges::new(&engine, &volume.ids));
        }
        engine.log().force_all().unwrap();
        volume.assert_we_find();
    }
    volume.assert_cut_recovers(&engine);
    volume.assert_unmounts(engine);
}

#[test]
fn judges_find_the_bytes_of_the_model() {
    churn(1 << 10, "", 400);
}

#[test]
fn judges_find_the_bytes_of_the_model_in_small_blocks() {
    churn(1 << 10, "-b size=1024", 400);
}

#[test]
fn judges_find_the_bytes_of_the_model_in_large_blocks() {
    churn(4 << 10, "-b size=65536 -m rmapbt=1", 100);
}

#[test]
fn judges_find_the_bytes_of_the_model_without_reverse_map() {
    churn(1 << 10, "-m rmapbt=0", 300);
}

#[test]
fn judges_find_the_bytes_of_the_model_without_shared_blocks() {
    churn(1 << 10, "-m reflink=0 -i nrext64=0", 300);
}

#[test]
fn judges_find_the_bytes_of_the_model_with_neither_and_a_stripe() {
    churn(1 << 10, "-m reflink=0,rmapbt=0 -d su=64k,sw=4 -s size=4096", 300);
}
