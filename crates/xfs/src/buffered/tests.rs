//! Files that the kernel has made, changed through memory. The kernel, our own reader and the
//! checks find the bytes of a model.

mod counted;
mod cuts;
mod faults;
mod full;
mod threads;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use offshoot_device::BlockDevice;
use offshoot_kit::counter::WriteStop;
use offshoot_kit::read_ahead::ReadAhead;
use offshoot_testkit::random::{Random, is_in_run, seed_of_run};
use offshoot_testkit::xfs::disk::{LARGE_BLOCKS, RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::FileSystem;
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::{FileBlock, Ino};

use super::{BufferLimits, BufferedFile, BufferedFiles, XfsBufferedData};
use crate::defer::IntentIds;
use crate::file::{XfsCloneRange, index};
use crate::inode::{XfsInodes, file_id};
use crate::log::XfsLogOptions;
use crate::test_volumes::engine_with;
use crate::trans::XfsTransactions;
use crate::{XfsOptions, XfsVolume, check_xfs};

const FILES: [&str; 4] = ["one", "two", "three", "four"];

/// A bound that no test reaches by itself.
const WIDE: BufferLimits = BufferLimits { bytes: 64 << 20, age: Duration::from_secs(30) };

/// A volume that the kernel has made, with empty files.
struct BufferedVolume {
    disk: XfsDisk,
    files: Vec<(&'static str, Ino)>,
    kernel_says: Vec<&'static str>,
}

impl BufferedVolume {
    fn make(mib: u64, options: &str) -> Option<Self> {
        let disk = XfsDisk::create(&judges::require()?, mib);
        disk.mkfs(options);
        let kernel_says = if options.contains("65536") { vec![LARGE_BLOCKS] } else { vec![] };
        let mount = disk.mount("", &kernel_says);
        let file = |name: &'static str| {
            let path = mount.path().join(name);
            std::fs::write(&path, b"").unwrap();
            (name, Ino(XfsDisk::ino(&path)))
        };
        let files = FILES.map(file).into();
        drop(mount);
        Some(Self { disk, files, kernel_says })
    }

    /// Cuts the log. The kernel recovers it, and finds what the model says.
    fn assert_cut_recovers(&self, engine: &BufferedEngine, model: &BufferModel) {
        engine.data().write_back_all().unwrap();
        engine.transactions.buffers().flush().unwrap();
        engine.transactions.log().force_all().unwrap();
        self.assert_we_find(model);
        let cut = self.disk.copy();
        let recovering = [&self.kernel_says[..], &[RECOVERY]].concat();
        let mount = cut.mount("nouuid", &recovering);
        for file in &model.files {
            assert_same(file, &std::fs::read(mount.path().join(file.name)).unwrap());
        }
        drop(mount);
        cut.assert_checks();
    }

    /// Our reader finds what the model says, and our check finds nothing.
    fn assert_we_find(&self, model: &BufferModel) {
        let volume = XfsVolume::open(self.disk.device(), &XfsOptions::default()).unwrap();
        for file in &model.files {
            assert_same(file, &contents(&volume, file.ino));
        }
        drop(volume);
        let found = check_xfs(&self.disk.device(), &XfsOptions::default()).unwrap();
        assert!(found.findings.is_empty(), "{:#?}", found.findings);
    }

    /// The judges find what the model says, after a clean unmount. Nothing is promised any more.
    fn assert_unmounts(&self, engine: BufferedEngine, model: &BufferModel) {
        engine.data().write_back_all().unwrap();
        engine.assert_at_rest();
        engine.transactions.unmount().unwrap();
        self.disk.assert_checks();
        self.assert_we_find(model);
        let mount = self.disk.mount("", &self.kernel_says);
        for file in &model.files {
            let path = mount.path().join(file.name);
            assert_same(file, &std::fs::read(&path).unwrap());
            std::fs::remove_file(path).unwrap();
        }
        drop(mount);
        self.disk.assert_checks();
    }
}

/// Writes a file back, and what was written in place is durable then.
fn make_durable(data: &XfsBufferedData<'_>, file: &BufferedFile) -> offshoot_vfs::Result<()> {
    data.write_back(file)?;
    data.flush_places()
}

/// All bytes of a file.
fn contents(volume: &XfsVolume, ino: Ino) -> Vec<u8> {
    let mut found = vec![0; index(volume.attr(file_id(ino)).unwrap().size)];
    assert_eq!(volume.read(file_id(ino), 0, &mut found).unwrap(), found.len());
    found
}

/// Everything that writes a volume through memory.
struct BufferedEngine {
    transactions: XfsTransactions,
    ids: IntentIds,
    inodes: XfsInodes,
    read_ahead: ReadAhead,
    files: BufferedFiles,
}

impl BufferedEngine {
    fn new(disk: &XfsDisk, limits: BufferLimits) -> Self {
        Self::on(disk.writable_device(), limits, &XfsLogOptions::default())
    }

    fn on(device: Arc<dyn BlockDevice>, limits: BufferLimits, log: &XfsLogOptions) -> Self {
        Self {
            transactions: engine_with(device, log),
            ids: IntentIds::default(),
            inodes: XfsInodes::new(1 << 20),
            read_ahead: ReadAhead::default(),
            files: BufferedFiles::new(limits, &WriteStop::new(None)),
        }
    }

    fn data(&self) -> XfsBufferedData<'_> {
        let Self { transactions, ids, inodes, read_ahead, files } = self;
        XfsBufferedData { transactions, ids, inodes, read_ahead, files }
    }

    fn assert_at_rest(&self) {
        assert_eq!((self.files.bytes(), self.files.all().len()), (0, 0));
        assert_eq!(self.transactions.counters().promised(), 0);
    }
}

/// A file, and the bytes that it should have.
struct BufferedModelFile {
    name: &'static str,
    ino: Ino,
    buffer: Arc<BufferedFile>,
    bytes: Vec<u8>,
}

/// Files that are changed at random.
struct BufferModel {
    files: Vec<BufferedModelFile>,
    random: Random,
    /// The blocks that the test gives a file.
    most_blocks: u64,
}

fn assert_same(file: &BufferedModelFile, found: &[u8]) {
    assert_eq!(found.len(), file.bytes.len(), "the size of {}", file.name);
    let differs = |(found, wanted): (&u8, &u8)| found != wanted;
    let first = found.iter().zip(&file.bytes).position(differs);
    assert_eq!(first, None, "a byte of {}, inode {}", file.name, file.ino);
}

impl BufferModel {
    fn new(volume: &BufferedVolume, data: XfsBufferedData<'_>, seed: u64) -> Self {
        let file = |&(name, ino): &(&'static str, Ino)| {
            let buffer = data.file(ino).unwrap();
            BufferedModelFile { name, ino, buffer, bytes: Vec::new() }
        };
        let files = volume.files.iter().map(file).collect();
        let most_blocks = if data.block_bytes() > 4096 { 20 } else { 160 };
        Self { files, random: Random::new(seed), most_blocks }
    }

    /// A range of bytes, at times of whole blocks, at most `most` blocks long.
    fn range(&mut self, block: u64, most: u64) -> Range<u64> {
        let (start, len) = (self.random.below(self.most_blocks), 1 + self.random.below(most));
        let end = (start + len).min(self.most_blocks);
        let (start, end) = (start * block, end * block);
        match self.random.below(4) {
            0 => start..end,
            1 => start + self.random.below(block)..end,
            2 => start + 7..start + 8 + self.random.below(block - 9),
            _ => start + self.random.below(block / 2)..end - self.random.below(block / 2),
        }
    }

    /// A range of whole blocks.
    fn whole(&mut self, block: u64, most: u64) -> Range<u64> {
        let bytes = self.range(block, most);
        bytes.start / block * block..bytes.end.div_ceil(block) * block
    }

    fn write(
        &mut self,
        data: XfsBufferedData<'_>,
        file: usize,
        bytes: Range<u64>,
        is_direct: bool,
    ) {
        let new = self.random.bytes(index(bytes.end - bytes.start));
        let file = &mut self.files[file];
        if is_direct {
            data.write_direct(&file.buffer, bytes.start, &new).unwrap();
        } else {
            data.write(&file.buffer, bytes.start, &new).unwrap();
        }
        file.bytes.resize(file.bytes.len().max(index(bytes.end)), 0);
        file.bytes[index(bytes.start)..index(bytes.end)].copy_from_slice(&new);
    }

    fn truncate(&mut self, data: XfsBufferedData<'_>, file: usize, size: u64) {
        data.truncate(&self.files[file].buffer, size).unwrap();
        self.files[file].bytes.resize(index(size), 0);
    }

    /// Makes a hole, or zeros, of a range.
    fn punch(&mut self, data: XfsBufferedData<'_>, file: usize, bytes: &Range<u64>, is_hole: bool) {
        let file = &mut self.files[file];
        let _settled = data.settle(&file.buffer, bytes).unwrap();
        if is_hole {
            data.changes().punch(file.ino, bytes).unwrap();
        } else {
            data.changes().zero(file.ino, bytes).unwrap();
        }
        let [start, end] = [bytes.start, bytes.end].map(|at| index(at).min(file.bytes.len()));
        file.bytes[start..end].fill(0);
    }

    /// Takes a range out, or puts a hole in.
    fn shift(&mut self, data: XfsBufferedData<'_>, file: usize, bytes: &Range<u64>, is_out: bool) {
        let file = &mut self.files[file];
        let (size, len) = (file.bytes.len() as u64, bytes.end - bytes.start);
        let end = if is_out { bytes.end } else { bytes.start + 1 };
        if end >= size {
            return;
        }
        let settled = data.settle(&file.buffer, &(bytes.start..u64::MAX)).unwrap();
        if is_out {
            data.changes().collapse(file.ino, bytes).unwrap();
            settled.resized(size - len);
            file.bytes.drain(index(bytes.start)..index(bytes.end));
        } else {
            data.changes().insert(file.ino, bytes.start, len).unwrap();
            settled.resized(size + len);
            let at = index(bytes.start);
            file.bytes.splice(at..at, vec![0; index(len)]);
        }
    }

    /// Clones blocks from one place to another, and the end of the source if it lies in them.
    fn share(
        &mut self,
        data: XfsBufferedData<'_>,
        (from, start): (usize, u64),
        (to, at): (usize, u64),
        len: u64,
    ) {
        let block = data.block_bytes();
        let source = &self.files[from].bytes;
        let (first, at_byte) = (start * block, at * block);
        let end = ((start + len) * block).min(source.len() as u64);
        if end <= first || from == to && start.abs_diff(at) < len {
            return;
        }
        let copied = source[index(first)..index(end)].to_vec();
        let size = at_byte + copied.len() as u64;
        let old = self.files[to].bytes.len() as u64;
        if !(copied.len() as u64).is_multiple_of(block) && size < old {
            return;
        }
        let everything = 0..u64::MAX;
        let held: Vec<_> = [from.min(to), from.max(to)][..if from == to { 1 } else { 2 }]
            .iter()
            .map(|file| (*file, data.settle(&self.files[*file].buffer, &everything).unwrap()))
            .collect();
        let range = XfsCloneRange {
            from: (self.files[from].ino, FileBlock(start)),
            to: (self.files[to].ino, FileBlock(at)),
            blocks: (copied.len() as u64).div_ceil(block),
        };
        data.changes().clone_range(&range, Some(size)).unwrap();
        let (_, settled) = held.iter().find(|(file, _)| *file == to).unwrap();
        settled.resized(old.max(size));
        drop(held);
        let content = &mut self.files[to].bytes;
        content.resize(index(old.max(size)), 0);
        content[index(at_byte)..index(size)].copy_from_slice(&copied);
    }

    /// Reads a part of a file, and looks for its data.
    fn read(&mut self, data: XfsBufferedData<'_>, file: usize) {
        let bytes = self.range(data.block_bytes(), 12);
        let file = &self.files[file];
        let mut found = vec![9; index(bytes.end - bytes.start)];
        let count = data.read(&file.buffer, bytes.start, &mut found).unwrap();
        let [start, end] = [bytes.start, bytes.end].map(|at| index(at).min(file.bytes.len()));
        assert!(found[..count] == file.bytes[start..end], "{bytes:?} of {}", file.name);
        let mut shown = vec![0; file.bytes.len()];
        let mut at = 0;
        while let Some(found) = data.next_data(&file.buffer, at).unwrap() {
            at = found.end;
            let part = &mut shown[index(found.start)..index(found.end)];
            assert_eq!(data.read(&file.buffer, found.start, part).unwrap(), part.len());
        }
        assert!(shown == file.bytes, "the data of {}", file.name);
        assert_eq!(file.buffer.size(), file.bytes.len() as u64);
    }

    /// A change at random, of the kind that `choice` below 40 says.
    fn change(&mut self, data: XfsBufferedData<'_>, choice: u64) {
        let block = data.block_bytes();
        let file = index(self.random.below(self.files.len() as u64));
        let layout = data.transactions.geometry().layout;
        match choice {
            0..14 => {
                let bytes = self.range(block, 9);
                self.write(data, file, bytes, false);
            }
            14 => {
                let end = self.files[file].bytes.len() as u64;
                if end + 3000 < self.most_blocks * block {
                    self.write(data, file, end..end + 3000, false);
                }
            }
            15 => {
                let is_aligned = self.random.below(2) == 0;
                let bytes = if is_aligned { self.whole(block, 9) } else { self.range(block, 3) };
                self.write(data, file, bytes, true);
            }
            16..19 => {
                let size = self.random.below(self.most_blocks * block);
                self.truncate(data, file, size);
            }
            19..22 => {
                let (bytes, is_hole) = (self.range(block, 12), self.random.below(2) == 0);
                self.punch(data, file, &bytes, is_hole);
            }
            22..26 if layout.contains(XfsLayout::SHARED_BLOCKS) => {
                let from = index(self.random.below(self.files.len() as u64));
                let from = (from, self.random.below(self.most_blocks));
                let len = 1 + self.random.below(40);
                let at = self.random.below(self.most_blocks - len.min(self.most_blocks - 1));
                self.share(data, from, (file, at), len.min(self.most_blocks - at));
            }
            26..28 => {
                let bytes = self.range(block, 20);
                data.write_back_range(&self.files[file].buffer, &bytes).unwrap();
            }
            28 => make_durable(&data, &self.files[file].buffer).unwrap(),
            29 => data.write_back_all().unwrap(),
            30 => {
                let blocks = self.whole(block, 20);
                let _settled = data.settle(&self.files[file].buffer, &blocks).unwrap();
                let blocks = blocks.start / block..blocks.end / block;
                data.changes().allocate(self.files[file].ino, blocks).unwrap();
            }
            31..33 => {
                let (bytes, is_out) = (self.whole(block, 9), self.random.below(2) == 0);
                let len = self.files[file].bytes.len() as u64 + (bytes.end - bytes.start);
                if is_out || len <= self.most_blocks * block {
                    self.shift(data, file, &bytes, is_out);
                }
            }
            _ => self.read(data, file),
        }
    }
}

/// Changes files at random.
fn churn(mib: u64, options: &str, steps: usize) {
    if !is_in_run(&format!("churn of buffered, {options}")) {
        return;
    }
    let Some(volume) = BufferedVolume::make(mib, options) else { return };
    let engine = BufferedEngine::new(&volume.disk, WIDE);
    let data = engine.data();
    let mut model = BufferModel::new(&volume, data, seed_of_run());
    for _ in 0..2 {
        for _ in 0..steps {
            let choice = model.random.below(40);
            model.change(data, choice);
        }
        (0..FILES.len()).for_each(|file| model.read(data, file));
        volume.assert_cut_recovers(&engine, &model);
    }
    volume.assert_unmounts(engine, &model);
}

#[test]
fn judges_find_what_went_through_memory() {
    churn(1 << 10, "", 500);
}

#[test]
fn judges_find_what_went_through_memory_in_small_blocks() {
    churn(1 << 10, "-b size=1024", 500);
}

#[test]
fn judges_find_what_went_through_memory_in_large_blocks() {
    churn(4 << 10, "-b size=65536 -m rmapbt=1", 120);
}

#[test]
fn judges_find_what_went_through_memory_without_reverse_map() {
    churn(1 << 10, "-m rmapbt=0", 400);
}

#[test]
fn judges_find_what_went_through_memory_without_shared_blocks() {
    churn(1 << 10, "-m reflink=0,rmapbt=0 -i nrext64=0", 400);
}
