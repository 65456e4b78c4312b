//! Volumes that `mkfs.xfs` makes, and their blocks by what `xfs_db` says.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test crate uses a part of it")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::da::{DaEdit, DaExpected, DaKind};
use offshoot_xfs_format::geometry::XfsLayout;
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{FileBlock, FsBlock, Ino, XfsGeometry};
use uuid::Uuid;

/// A volume, and its sizes.
pub struct MadeVolume {
    pub disk: XfsDisk,
    pub geometry: XfsGeometry,
}

/// A file of a volume: its inode and where its blocks lie.
pub struct FileBytes {
    pub ino: Ino,
    pub format: u8,
    pub attr_format: u8,
    pub data: Vec<u8>,
    pub attr: Vec<u8>,
    /// The blocks of the data fork: the block in the fork, and in the volume.
    pub blocks: Vec<(FileBlock, FsBlock)>,
    pub attr_blocks: Vec<(FileBlock, FsBlock)>,
}

/// Whether the judges are here. If not, the test is skipped, or fails where they could be.
pub fn has_judges() -> bool {
    judges::require().is_some()
}

/// The superblock of an image.
pub fn superblock(image: &Path) -> XfsSuperblock {
    let mut sector = vec![0; 32 << 10];
    File::open(image).unwrap().read_exact_at(&mut sector, 0).unwrap();
    XfsSuperblock::parse(&sector).unwrap()
}

impl MadeVolume {
    /// Makes a volume with these options and contents: a "protofile" of mkfs. The caller has asked
    /// whether the judges are here.
    pub fn make(options: &[&str], contents: &str) -> Self {
        let disk = XfsDisk::create(&judges::require().expect("the judges"), 640);
        let proto = disk.image().with_extension("contents");
        fs::write(&proto, format!("/dev/null\n0 0\nd--755 0 0\n{contents}$\n")).unwrap();
        disk.mkfs(&format!("{} -p {}", options.join(" "), proto.display()));
        let geometry = superblock(disk.image()).geometry;
        Self { disk, geometry }
    }

    /// Mounts the volume, and lets `change` work in it.
    pub fn mounted(&self, change: impl FnOnce(&Path)) {
        change(self.disk.mount("", &[]).path());
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        File::open(self.disk.image()).unwrap().read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        let image = File::options().write(true).open(self.disk.image());
        image.unwrap().write_all_at(bytes, at).unwrap();
    }

    /// The file with a path.
    pub fn file(&self, path: &str) -> FileBytes {
        let path = format!("path {path}");
        let said = self.disk.xfs_db(&[&path, "stack", "bmap -d", "bmap -a"]);
        let number = said.split("inode ").nth(1).unwrap().split(',').next().unwrap();
        let ino = Ino(number.parse().unwrap());
        let at = self.geometry.inode_offset(ino).unwrap();
        let inode = self.read(at, self.geometry.inode_size());
        let is_v5 = self.geometry.layout.contains(XfsLayout::CHECKSUMS);
        let fork = if is_v5 { 176 } else { 100 };
        let attr_at = match inode[82] {
            0 => inode.len(),
            words => fork + usize::from(words) * 8,
        };
        let length = u64::from_be_bytes(inode[56..64].try_into().unwrap());
        let local = usize::try_from(length).unwrap().min(attr_at - fork);
        FileBytes {
            ino,
            format: inode[5],
            attr_format: inode[83],
            data: inode[fork..fork + local].to_vec(),
            attr: inode[attr_at..].to_vec(),
            blocks: Self::blocks(&said).0,
            attr_blocks: Self::blocks(&said).1,
        }
    }

    #[expect(clippy::type_complexity, reason = "both forks")]
    fn blocks(said: &str) -> (Vec<(FileBlock, FsBlock)>, Vec<(FileBlock, FsBlock)>) {
        let (mut data, mut attr) = (Vec::new(), Vec::new());
        for line in said.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let [fork, "offset", offset, "startblock", start, _, "count", count, ..] = words[..]
            else {
                continue;
            };
            let [offset, start, count] = [offset, start, count].map(|word| word.parse().unwrap());
            let blocks = (0..count).map(|i: u64| (FileBlock(offset + i), FsBlock(start + i)));
            if fork == "data" { &mut data } else { &mut attr }.extend(blocks);
        }
        (data, attr)
    }

    /// The directory blocks of a directory, with what they have to be.
    pub fn directory_blocks(&self, file: &FileBytes) -> Vec<(DaExpected, Vec<u8>)> {
        let unit = 1 << self.geometry.dir_block_log;
        file.blocks
            .chunk_by(|a, b| a.0.0 / unit == b.0.0 / unit)
            .map(|blocks| self.block(file.ino, blocks))
            .collect()
    }

    /// Writes back directory blocks, each of which has one extent.
    pub fn write_blocks(&self, blocks: &[(DaExpected, Vec<u8>)]) {
        for (expected, bytes) in blocks {
            self.write(expected.place.bytes(), bytes);
        }
    }

    /// The blocks of an attribute fork, with what they have to be.
    pub fn attribute_blocks(&self, file: &FileBytes) -> Vec<(DaExpected, Vec<u8>)> {
        file.attr_blocks.chunks(1).map(|blocks| self.block(file.ino, blocks)).collect()
    }

    fn block(&self, ino: Ino, blocks: &[(FileBlock, FsBlock)]) -> (DaExpected, Vec<u8>) {
        let place = |block: FsBlock| self.geometry.place_of(block).unwrap();
        let expected = DaExpected {
            place: place(blocks[0].1),
            owner: Some(ino),
            block: Some(blocks[0].0),
            is_sealed: true,
        };
        let size = self.geometry.block_size();
        let bytes = blocks.iter().flat_map(|&(_, block)| self.read(place(block).bytes(), size));
        (expected, bytes.collect())
    }
}

/// A volume that is only numbers.
pub fn numbers_only(block_log: u8, dir_block_log: u8, layout: XfsLayout) -> XfsGeometry {
    XfsGeometry {
        layout,
        block_log,
        sector_log: 9,
        inode_log: 9,
        cluster_blocks: XfsGeometry::cluster_blocks(9, block_log, 0),
        dir_block_log,
        ag_block_log: 16,
        ag_blocks: 1 << 16,
        ag_count: 4,
        blocks: 4 << 16,
        log_start: FsBlock(1 << 17),
        log_blocks: 4096,
        uuid: Uuid::from_u128(7),
    }
}

/// Changes a block by `change`, and proves that it told all bytes that changed.
pub fn told<T>(kind: DaKind, bytes: &mut [u8], change: impl FnOnce(&mut DaEdit<'_>) -> T) -> T {
    let before = bytes.to_vec();
    let mut ranges = Vec::new();
    let mut hear = |range| ranges.push(range);
    let result = change(&mut DaEdit::new(kind, bytes, &mut hear));
    let mut copy = before;
    for range in ranges {
        copy[range.clone()].copy_from_slice(&bytes[range]);
    }
    assert!(copy == bytes, "a change was not told");
    result
}

/// Numbers that look random, from a seed.
pub struct SeededNumbers(pub u64);

impl SeededNumbers {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from((self.0 >> 11) % limit as u64).unwrap()
    }
}
