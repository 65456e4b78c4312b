//! What fails, or is refused, in the middle: what it leaves, and what goes on afterwards. The
//! volumes are in memory, so no test here needs the kernel.

use std::sync::Mutex;

use offshoot_device::{BlockDevice, Fault, FaultDevice, MemoryDevice, RequestKind};
use offshoot_vfs::{Errno, Fallocate, FilePosition, SetAttr, XattrMode};
use offshoot_xfs_format::AgNumber;
use offshoot_xfs_format::record::XfsOwner;
use uuid::Uuid;

use super::*;
use crate::check_xfs;
use crate::group::{self, ExtentWish, FreedFrom, KeptBlocks, ReverseOwner};
use crate::mkfs::{XfsMkfsOptions, mkfs_xfs};
use crate::report::XfsReport;
use crate::trans::{AgExtent, XfsTransaction};

const LATER: Timestamp = Timestamp { secs: 1_700_000_100, nanos: 7 };
const BLOCK: u64 = 4096;

/// A new volume in memory that is open for writing.
struct MemoryXfs {
    device: Arc<dyn BlockDevice>,
    faults: Arc<FaultDevice>,
    live: Arc<XfsLive>,
    root: FileId,
    told: Arc<Mutex<Vec<XfsReport>>>,
}

impl MemoryXfs {
    fn new() -> Self {
        let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(300 << 20));
        let mkfs = XfsMkfsOptions::new(Uuid::from_u128(0x0f5), AT);
        mkfs_xfs(&*device, &mkfs).unwrap();
        let faults = Arc::new(FaultDevice::new(device.clone()));
        let (opened, log) = volume::open_writable(faults.clone(), &XfsOptions::default()).unwrap();
        let root = crate::inode::file_id(opened.superblock.fields.root().unwrap());
        let told = Arc::new(Mutex::new(Vec::new()));
        let telling = told.clone();
        let reporter: XfsReporter =
            Arc::new(move |report| telling.lock().unwrap().push(report.clone()));
        let reading = Arc::new(XfsInodes::new(1 << 20));
        let options = XfsOptions { reporter: Some(reporter), ..XfsOptions::default() };
        let live = open_live(&opened, &log, reading, &options).unwrap();
        Self { device, faults, live, root, told }
    }

    fn make(&self, name: &str, bytes: &[u8]) -> FileId {
        let file = make(&self.live, self.root, name);
        self.live.write(file, 0, bytes, AT).unwrap();
        file
    }

    /// Promises all free blocks that files may have but for so many, so that the volume is full.
    fn fill(&self, left: u64) -> XfsTransaction<'_> {
        let free = self.live.free_blocks();
        self.live.transactions.begin(Kind::Write, free - left).unwrap()
    }

    fn blocks(&self, file: FileId) -> u64 {
        self.live.inode(file).unwrap().core.nblocks.get()
    }

    fn mtime(&self, file: FileId) -> Timestamp {
        let inode = self.live.inode(file).unwrap();
        inode.attr(self.live.transactions.geometry()).unwrap().mtime
    }

    fn bytes(&self, file: FileId) -> Vec<u8> {
        let size = self.live.inode(file).unwrap().core.size.get();
        let mut bytes = vec![0; usize::try_from(size).unwrap()];
        assert_eq!(self.live.read(file, 0, &mut bytes).unwrap(), bytes.len());
        bytes
    }

    /// Takes all free blocks of a group, also those that it holds back.
    fn drain(&self, ag: AgNumber) -> Vec<AgExtent> {
        let mut t = self.live.transactions.begin_step(Kind::Truncate, 0).unwrap();
        let owner = Some(ReverseOwner::special(XfsOwner::Inodes));
        let kept = KeptBlocks::None;
        let wish = ExtentWish { least: 1, owner, kept, ..ExtentWish::blocks(1 << 20) };
        let mut taken = Vec::new();
        while let Some(extent) = group::allocate(&mut t, ag, &wish).unwrap() {
            taken.push(extent);
        }
        t.commit().unwrap();
        taken
    }

    fn refill(&self, ag: AgNumber, taken: Vec<AgExtent>) {
        let mut t = self.live.transactions.begin_step(Kind::Truncate, 0).unwrap();
        for extent in taken {
            let owner = ReverseOwner::special(XfsOwner::Inodes);
            group::free_extent(&mut t, ag, extent, FreedFrom::Owner(owner)).unwrap();
        }
        t.commit().unwrap();
    }

    /// The group and the place on the device of the first block of a file.
    fn first_block(&self, file: FileId) -> (AgNumber, u64) {
        let places = self.live.data().changes().prepare_write(Ino(file.ino), 0..1).unwrap();
        let start = places[0].start;
        let at = self.live.data().changes().device_place(start).unwrap().bytes();
        (self.live.transactions.geometry().split(start).unwrap().0, at)
    }

    fn end(self) {
        self.live.shut_down().unwrap();
        let found = check_xfs(&self.device, &XfsOptions::default()).unwrap();
        assert!(found.findings.is_empty(), "{:#?}", found.findings);
    }
}

fn errno<T>(outcome: Result<T>) -> Errno {
    outcome.map(drop).unwrap_err().errno()
}

/// What the cache of the device has lost is not known, and a second flush succeeds.
#[test]
fn a_data_sync_whose_flush_fails_ends_all_writing() {
    let volume = MemoryXfs::new();
    let live = &volume.live;
    let file = make(live, volume.root, "file");
    live.open(file).unwrap();
    live.write(file, 0, &[1; 9000], AT).unwrap();
    live.fsync(file).unwrap();
    live.write(file, 0, &[2; 5000], AT).unwrap();
    let flushes = volume.faults.count(RequestKind::Flushes);
    volume.faults.strike(RequestKind::Flushes, flushes, Fault::Error);
    live.fdatasync(file).unwrap_err();
    assert_eq!(errno(live.fdatasync(file)), Errno::ROFS);
    assert_eq!(errno(live.shut_down()), Errno::ROFS);
}

#[test]
fn a_shut_down_that_failed_is_not_taken_for_one() {
    let volume = MemoryXfs::new();
    volume.make("file", &[1; 9000]);
    let writes = volume.faults.count(RequestKind::Writes);
    volume.faults.strike(RequestKind::Writes, writes + 1, Fault::Error);
    volume.live.shut_down().unwrap_err();
    assert_eq!(errno(volume.live.shut_down()), Errno::ROFS);
}

/// The size of a list stays, and its blocks are there.
#[test]
fn permissions_of_a_file_with_a_list_change_on_a_full_volume() {
    let volume = MemoryXfs::new();
    let (live, file) = (&volume.live, volume.make("file", b"content"));
    let entry = |tag: u16, permissions: u16, id: u32| {
        [&tag.to_le_bytes()[..], &permissions.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let users = (0..300).map(|id| entry(2, 6, id)).collect::<Vec<_>>().concat();
    let ends = [entry(4, 4, u32::MAX), entry(16, 6, u32::MAX), entry(32, 4, u32::MAX)].concat();
    let list = [&2_u32.to_le_bytes()[..], &entry(1, 6, u32::MAX), &users, &ends].concat();
    live.set_xattr(file, offshoot_vfs::acl::ACCESS, &list, XattrMode::Set, AT).unwrap();
    let full = volume.fill(0);
    assert_eq!(
        errno(live.set_xattr(file, b"user.a", &[1; 9000], XattrMode::Set, AT)),
        Errno::NOSPC
    );
    let set = SetAttr { permissions: Some(0o600), ..SetAttr::default() };
    live.set_attr(file, &set, LATER).unwrap();
    assert_eq!(live.inode(file).unwrap().core.mode.get() & 0o777, 0o600);
    drop(full);
    volume.end();
}

/// The first piece lies in blocks that are there, and the second finds none.
#[test]
fn a_write_that_fails_in_the_middle_has_times_and_gives_its_blocks_back() {
    let volume = MemoryXfs::new();
    let (live, piece) = (&volume.live, 1 << 20);
    let file = volume.make("file", &vec![1; piece]);
    live.sync().unwrap();
    let (blocks, before) = (volume.blocks(file), live.transactions.last_commit(Ino(file.ino)));
    let full = volume.fill(100);
    // Each piece has 256 blocks.
    let refused = live.write(file, piece as u64, &vec![2; piece], LATER);
    assert_eq!(errno(refused), Errno::NOSPC);
    assert_eq!((volume.blocks(file), volume.mtime(file)), (blocks, AT), "nothing was written");
    let refused = live.write(file, 0, &vec![3; 2 * piece], LATER);
    assert_eq!(errno(refused), Errno::NOSPC);
    assert_eq!((volume.blocks(file), volume.mtime(file)), (blocks, LATER));
    assert!(volume.bytes(file) == vec![3; piece]);
    // A sync knows of it.
    assert_ne!(live.transactions.last_commit(Ino(file.ino)), before);
    drop(full);
    volume.end();
}

/// The group of a removed file is full, and its blocks are shared, so that its trees may grow.
#[test]
fn an_inode_that_could_not_be_freed_is_freed_when_there_is_room() {
    let volume = MemoryXfs::new();
    let live = &volume.live;
    let files = ["one", "two"].map(|name| volume.make(name, &vec![1; 80_000]));
    let place = |file| FilePosition { file, offset: 0 };
    live.clone_range(place(files[0]), place(files[1]), 80_000, AT).unwrap();
    let (full, _) = volume.first_block(files[0]);
    live.sync().unwrap();
    let taken = volume.drain(full);
    live.unlink(EntryPlace { dir: volume.root, name: b"two" }, AT).unwrap();
    live.free_again();
    live.free_again();
    let is_not_freed = |report: &XfsReport| matches!(report, XfsReport::NotFreed { .. });
    assert_eq!(volume.told.lock().unwrap().iter().filter(|told| is_not_freed(told)).count(), 1);
    assert_eq!(live.inodes.not_freed(), [Ino(files[1].ino)]);
    volume.refill(full, taken);
    live.free_again();
    assert_eq!(live.inodes.len(), 0);
    assert_eq!(errno(live.inode(files[1])), Errno::NOENT);
    volume.end();
}

/// Nothing moves where the last extent could not follow.
#[test]
fn a_collapse_on_a_full_group_changes_nothing() {
    let volume = MemoryXfs::new();
    let live = &volume.live;
    let bytes: Vec<_> = (0..20 * BLOCK).map(|at| u8::try_from(at / BLOCK).unwrap()).collect();
    let file = volume.make("file", &bytes);
    let (full, _) = volume.first_block(file);
    live.sync().unwrap();
    let taken = volume.drain(full);
    for what in [Fallocate::Collapse, Fallocate::Insert] {
        let refused = live.fallocate(file, what, BLOCK, BLOCK, LATER);
        assert_eq!(errno(refused), Errno::NOSPC, "{what:?}");
        assert!(volume.bytes(file) == bytes);
    }
    volume.refill(full, taken);
    live.fallocate(file, Fallocate::Collapse, BLOCK, BLOCK, LATER).unwrap();
    assert_eq!(volume.bytes(file).len(), bytes.len() - 4096);
    volume.end();
}

/// Space behind the end of the largest file goes only when the hole can come in.
#[test]
fn a_hole_that_is_refused_frees_nothing() {
    let volume = MemoryXfs::new();
    let (live, file) = (&volume.live, volume.make("file", &[1; 9000]));
    let last = (i64::MAX.cast_unsigned() / BLOCK - 1) * BLOCK;
    let keeping = Fallocate::Allocate { keeps_size: true };
    live.fallocate(file, keeping, last, BLOCK, AT).unwrap();
    let blocks = volume.blocks(file);
    assert_eq!(errno(live.fallocate(file, Fallocate::Insert, 1, 3 * BLOCK, AT)), Errno::INVAL);
    assert_eq!(volume.blocks(file), blocks);
    live.fallocate(file, Fallocate::Insert, BLOCK, 3 * BLOCK, AT).unwrap();
    assert_eq!(volume.blocks(file), blocks - 1);
    volume.end();
}

/// A crash may bring the old size back.
#[test]
fn a_truncation_writes_zeros_behind_it_when_it_is_durable() {
    let volume = MemoryXfs::new();
    let (live, file) = (&volume.live, volume.make("file", &[7; 4000]));
    live.sync().unwrap();
    let (_, at) = volume.first_block(file);
    let stored = || {
        let mut bytes = vec![0; 4000];
        volume.device.read_at(at, &mut bytes).unwrap();
        bytes
    };
    let sized = |size| SetAttr { size: Some(size), ..SetAttr::default() };
    live.set_attr(file, &sized(3000), LATER).unwrap();
    assert!(stored() == [[7; 3000].as_slice(), &[0; 1000]].concat());
    live.set_attr(file, &sized(3500), LATER).unwrap();
    live.sync().unwrap();
    // The log cannot say that the file is shorter.
    let flushes = volume.faults.count(RequestKind::Flushes);
    volume.faults.strike(RequestKind::Flushes, flushes, Fault::Error);
    live.set_attr(file, &sized(100), LATER).unwrap_err();
    assert!(stored() == [[7; 3000].as_slice(), &[0; 1000]].concat());
}
