//! Directories that were crafted: their checksums are right, and what they say is not.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_testkit::xfs::judges;
use offshoot_vfs::walk::{DEPTH_MAX, WalkVisitor, WalkedFile, walk};
use offshoot_vfs::{Code, Error, FileId, FileSystem, ReadOnlyFiles, Result};
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::record::{XfsExtent, XfsExtentItem};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{FileBlock, Ino, XfsGeometry, csum};

/// The core of an inode, and fields in it.
const CORE: usize = 176;
const SIZE: usize = 56;
const EXTENTS: usize = 76;
const INODE_CRC: usize = 100;

/// The checksum of a block of a directory.
const BLOCK_CRC: usize = 4;

/// The bytes of an inode with its forks, and of a block.
const INODE_LEN: usize = 512;
const BLOCK_LEN: usize = 4096;

/// A volume that a test changes in memory.
struct CraftedVolume {
    device: Arc<dyn BlockDevice>,
    geometry: XfsGeometry,
}

/// A volume with directories of the short and the block form, with `a` and `b` in each, and one of
/// the leaf form; `None` where no judges are.
fn filled() -> Option<XfsDisk> {
    let disk = XfsDisk::create(&judges::require()?, 512);
    disk.mkfs("-i size=512,nrext64=0,sparse=0 -m rmapbt=0");
    fill(disk.mount("rw", &[]).path());
    Some(disk)
}

fn fill(root: &Path) {
    for (folder, files) in [("short", 0), ("block", 40), ("leaf", 300)] {
        let folder = root.join(folder);
        fs::create_dir(&folder).unwrap();
        for number in 0..files {
            fs::write(folder.join(format!("a long name with the number {number}")), "").unwrap();
        }
        for name in ["a", "b"] {
            fs::create_dir(folder.join(name)).unwrap();
            fs::write(folder.join(name).join("file"), "content").unwrap();
        }
    }
    fs::remove_file(root.join("leaf/a long name with the number 7")).unwrap();
}

impl CraftedVolume {
    fn over(disk: &XfsDisk) -> Self {
        let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over(disk.device()));
        let mut sector = vec![0; 512];
        device.read_at(0, &mut sector).unwrap();
        let geometry = XfsSuperblock::parse(&sector).unwrap().geometry;
        Self { device, geometry }
    }

    fn open(&self, cache_bytes: u64) -> Arc<XfsVolume> {
        let options = XfsOptions { cache_bytes, ..XfsOptions::default() };
        XfsVolume::open(self.device.clone(), &options).unwrap()
    }

    fn at(&self, path: &str) -> FileId {
        let fs = self.open(1 << 20);
        path.split('/').fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()).unwrap())
    }

    /// Changes bytes, and makes their checksum right.
    fn change(&self, at: u64, len: usize, crc: usize, change: impl FnOnce(&mut [u8])) {
        let mut bytes = vec![0; len];
        self.device.read_at(at, &mut bytes).unwrap();
        change(&mut bytes);
        csum::store(&mut bytes, crc);
        self.device.write_at(at, &bytes).unwrap();
    }

    fn change_inode(&self, file: FileId, change: impl FnOnce(&mut [u8])) {
        let geometry = &self.geometry;
        let (ag, block, index) = geometry.locate(Ino(file.ino)).unwrap();
        let at = geometry.place(ag, block).bytes() + (u64::from(index) << geometry.inode_log);
        self.change(at, INODE_LEN, INODE_CRC, change);
    }

    /// Changes the first block of a directory whose extents are in its inode.
    fn change_block(&self, dir: FileId, change: impl FnOnce(&mut [u8])) {
        let mut start = None;
        self.change_inode(dir, |inode| start = Some(extents(inode)[0].start));
        let at = self.geometry.place_of(start.unwrap()).unwrap().bytes();
        self.change(at, BLOCK_LEN, BLOCK_CRC, change);
    }

    /// Lets the entry `b` of a directory have another name, type and inode.
    fn change_entry_b(&self, folder: &str, name: u8, file_type: u8, to: FileId) {
        let b = self.at(&format!("{folder}/b"));
        let dir = self.at(folder);
        if folder == "short" {
            let short = |name, file_type, file: FileId| {
                [&[name, file_type][..], &file.ino.to_be_bytes()[4..]].concat()
            };
            let (from, to) = (short(b'b', 2, b), short(name, file_type, to));
            self.change_inode(dir, |inode| replace(&mut inode[CORE..], &from, &to));
            return;
        }
        let in_block = |name, file_type, file: FileId| {
            [&file.ino.to_be_bytes()[..], &[1, name, file_type]].concat()
        };
        let (from, to) = (in_block(b'b', 2, b), in_block(name, file_type, to));
        self.change_block(dir, |block| {
            replace(block, &from, &to);
            // The hash of a name of one letter is the letter, so `b` follows `a`.
            let is_hash = |hash: &[u8], letter| hash[..4] == [0, 0, 0, letter];
            let hashes =
                |at: &usize| is_hash(&block[*at..], b'a') && is_hash(&block[*at + 8..], b'b');
            let at = (0..BLOCK_LEN - 16).step_by(8).rfind(hashes).unwrap();
            block[at + 11] = name;
        });
    }
}

/// The extents in an inode.
fn extents(inode: &[u8]) -> Vec<XfsExtent> {
    let count = u32::from_be_bytes(*inode[EXTENTS..].first_chunk().unwrap()) as usize;
    let items = inode[CORE..].chunks_exact(16).take(count);
    items.map(|item| XfsExtentItem(*item.first_chunk().unwrap()).get()).collect()
}

fn replace(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let found = |at: &usize| bytes[*at..].starts_with(from);
    let places: Vec<_> = (0..bytes.len()).filter(found).collect();
    assert_eq!(places.len(), 1, "{from:?}");
    bytes[places[0]..][..to.len()].copy_from_slice(to);
}

/// What a walk entered, and the codes of its errors.
#[derive(Default)]
struct WalkedPaths {
    entered: Vec<Vec<u8>>,
    errors: Vec<(Vec<u8>, Code)>,
}

impl WalkVisitor for WalkedPaths {
    type Directory = ();

    fn enter(&mut self, (): &(), entry: &WalkedFile<'_>) -> Option<()> {
        self.entered.push(entry.path.to_vec());
        Some(())
    }

    fn visit(&mut self, (): &(), _: &WalkedFile<'_>) {}

    fn failed(&mut self, path: &[u8], error: &Error) {
        self.errors.push((path.to_vec(), error.code()));
    }

    fn is_stopped(&self) -> bool {
        false
    }
}

#[test]
fn a_walk_enters_no_directory_that_has_two_names() {
    let Some(disk) = filled() else { return };
    for folder in ["short", "block"] {
        // The same name twice, then with the type of a file, then another name.
        for (name, file_type) in [(b'a', 2), (b'a', 1), (b'b', 2)] {
            let volume = CraftedVolume::over(&disk);
            let a = volume.at(&format!("{folder}/a"));
            volume.change_entry_b(folder, name, file_type, a);
            for cache_bytes in [0, 1 << 20] {
                let fs = volume.open(cache_bytes);
                let mut paths = WalkedPaths::default();
                let top = volume.at(folder);
                walk(&ReadOnlyFiles::new(fs.clone()), top, (), DEPTH_MAX, &mut paths);
                assert!(paths.entered.is_empty(), "{:?}", paths.entered);
                let names = [vec![b'a'], vec![name]];
                assert_eq!(paths.errors, names.map(|name| (name, Code::Directory)));
                let other = if folder == "short" { "block/a" } else { "short/a" };
                let parent = fs.parent(volume.at(other)).unwrap().unwrap();
                assert_eq!(parent.name, b"a");
            }
        }
    }
}

#[test]
fn the_directory_above_is_a_directory() {
    let Some(disk) = filled() else { return };
    let volume = CraftedVolume::over(&disk);
    let a = volume.at("short/a");
    let file = volume.at("short/a/file");
    let gone = volume.at("leaf/a long name with the number 6").ino + 1;
    let fs = volume.open(1 << 20);
    assert!(fs.attr(FileId { ino: gone, ..file }).is_err(), "inode {gone} is in use");
    for above in [gone, file.ino] {
        let above = u32::try_from(above).unwrap().to_be_bytes();
        volume.change_inode(a, |inode| inode[CORE + 2..][..4].copy_from_slice(&above));
        let error = volume.open(1 << 20).parent(a).unwrap_err();
        assert_eq!(error.code(), Code::Directory, "{error}");
        assert!(error.to_string().contains(&a.to_string()), "{error}");
    }
}

fn count(fs: &dyn FileSystem, dir: FileId) -> Result<u32> {
    let mut count = 0;
    fs.read_dir(dir, 0, &mut |_| {
        count += 1;
        ControlFlow::Continue(())
    })?;
    Ok(count)
}

#[test]
fn a_directory_in_one_block_has_the_size_of_a_block() {
    let Some(disk) = filled() else { return };
    let volume = CraftedVolume::over(&disk);
    let dir = volume.at("block");
    for size in [2048, 2 * BLOCK_LEN as u64] {
        volume.change_inode(dir, |inode| {
            inode[SIZE..SIZE + 8].copy_from_slice(&size.to_be_bytes());
        });
        let fs = volume.open(1 << 20);
        let errors = [count(&*fs, dir).map(drop), fs.lookup(dir, b"a").map(drop)];
        for error in errors.map(Result::unwrap_err) {
            assert!(matches!(error, Error::Corrupt(_)), "{size}: {error}");
        }
    }
}

#[test]
fn a_block_at_many_places_of_a_directory_is_found() {
    let Some(disk) = filled() else { return };
    let volume = CraftedVolume::over(&disk);
    let dir = volume.at("leaf");
    assert_eq!(count(&*volume.open(1 << 20), dir).unwrap(), 301);
    volume.change_inode(dir, |inode| {
        let mut list = extents(inode);
        let leaves = list.pop().unwrap();
        list.push(XfsExtent { offset: FileBlock(1000), ..list[0] });
        list.push(leaves);
        for (item, extent) in inode[CORE..].chunks_exact_mut(16).zip(&list) {
            item.copy_from_slice(&XfsExtentItem::from(*extent).0);
        }
        let count = u32::try_from(list.len()).unwrap();
        inode[EXTENTS..EXTENTS + 4].copy_from_slice(&count.to_be_bytes());
    });
    let fs = volume.open(1 << 20);
    let error = count(&*fs, dir).unwrap_err();
    assert!(error.to_string().contains("blocks or more"), "{error}");
    assert!(fs.parent(volume.at("leaf/a")).is_err());
}
