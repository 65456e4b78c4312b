//! Blocks with a header that transactions of tests change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_kit::counter::WriteStop;
use offshoot_testkit::random::Random;
use offshoot_vfs::{Result, Timestamp};
use offshoot_xfs_format::da::DaExpected;
use offshoot_xfs_format::log::items::{
    CHUNK, XfsBufferFlags, XfsBufferType, buffer_size, encode_buffer,
};
use offshoot_xfs_format::log::{XfsLogEnds, XfsLogVector};
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgNumber, BasicBlock, Ino, Lsn, XfsGeometry};
use parking_lot::Mutex;
use uuid::Uuid;
use zerocopy::little_endian as le;

use crate::buffer::sector_at;
use crate::log::{
    HomeOutcome, HomeWrites, LogDisk, LogSequence, LoggedItem, LoggedKind, LoggedSize, LoggedState,
    XfsLog, XfsLogOptions,
};
use crate::mkfs::{XfsMkfsOptions, mkfs_xfs};
use crate::recover::VolumeLog;

/// A volume with a log of any size.
pub(super) struct TestVolume {
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) superblock: XfsSuperblock,
}

impl TestVolume {
    /// A new volume in memory, with a log of `log_blocks` blocks.
    pub(super) fn new(log_blocks: u32, options: impl FnOnce(&mut XfsMkfsOptions)) -> Self {
        let device = Arc::new(MemoryDevice::sparse(300 << 20));
        let time = Timestamp { secs: 1_700_000_000, nanos: 0 };
        let mut mkfs = XfsMkfsOptions::new(Uuid::from_u128(0x0f5), time);
        options(&mut mkfs);
        mkfs_xfs(&*device, &mkfs).unwrap();
        let mut volume = Self::on(device);
        // No program makes logs this small.
        volume.superblock.fields.logblocks = log_blocks.into();
        let sector = volume.superblock.fields.encode();
        volume.device.write_at(0, &sector).unwrap();
        Self::on(volume.device)
    }

    /// The volume on a device.
    pub(super) fn on(device: Arc<dyn BlockDevice>) -> Self {
        let sector = sector_at(&*device, 0).unwrap();
        let superblock = XfsSuperblock::parse(&sector).unwrap();
        Self { device, superblock }
    }

    /// The same volume on another device.
    pub(super) fn moved_to(&self, device: Arc<dyn BlockDevice>) -> Self {
        Self { device, superblock: self.superblock.clone() }
    }

    pub(super) fn geometry(&self) -> &XfsGeometry {
        &self.superblock.geometry
    }

    pub(super) fn log(&self) -> VolumeLog {
        VolumeLog::find(&self.device, &self.superblock).unwrap()
    }

    pub(super) fn ends(&self) -> XfsLogEnds {
        self.log().ends
    }

    pub(super) fn start(&self, options: &XfsLogOptions) -> XfsLog {
        self.start_with(options, &WriteStop::new(None))
    }

    pub(super) fn start_with(&self, options: &XfsLogOptions, stop: &Arc<WriteStop>) -> XfsLog {
        let disk = LogDisk::new(&self.device, &self.superblock).unwrap();
        XfsLog::start(disk, &self.ends(), &[], stop, options).unwrap()
    }

    /// Free blocks, with headers.
    pub(super) fn blocks(&self, count: u32) -> Vec<Arc<TestBlock>> {
        let geometry = self.geometry();
        let place = |index| geometry.place(AgNumber(0), AgBlock(1000 + 3 * index));
        (0..count).map(|index| TestBlock::new(self, place(index))).collect()
    }
}

/// What a context has of a block.
#[derive(Clone, Debug)]
struct BlockVersion {
    sequence: u64,
    bytes: Vec<u8>,
}

#[derive(Debug)]
struct BlockNow {
    bytes: Vec<u8>,
    dirty: Vec<le::U32>,
    pins: u32,
    lsn: Lsn,
    /// How often it was changed.
    changes: u64,
    /// How often it had been when its bytes were taken to be written home.
    taken: u64,
    versions: Vec<BlockVersion>,
}

/// A block that transactions change.
#[derive(Debug)]
pub(super) struct TestBlock {
    state: LoggedState,
    geometry: XfsGeometry,
    pub(super) place: BasicBlock,
    /// Held by a transaction from the change to the end of the commit.
    gate: Mutex<()>,
    now: Mutex<BlockNow>,
    is_cancelled: AtomicBool,
}

impl TestBlock {
    /// Writes the block to the device of a volume.
    pub(super) fn new(volume: &TestVolume, place: BasicBlock) -> Arc<Self> {
        let geometry = volume.geometry();
        let size = geometry.block_size();
        let expected = DaExpected { place, owner: Some(Ino(131)), block: None, is_sealed: true };
        let kind = RemoteKind::SymlinkTarget;
        let mut bytes = kind.encode(geometry, &expected, 0, b"a target", size).unwrap();
        kind.seal(geometry, &mut bytes, Lsn(0));
        volume.device.write_at(place.bytes(), &bytes).unwrap();
        let words = size.div_ceil(32 * CHUNK);
        let versions = vec![BlockVersion { sequence: 0, bytes: bytes.clone() }];
        let now = BlockNow {
            bytes,
            dirty: vec![le::U32::ZERO; words],
            pins: 0,
            lsn: Lsn(0),
            changes: 0,
            taken: 0,
            versions,
        };
        Arc::new(Self {
            state: LoggedState::default(),
            geometry: geometry.clone(),
            place,
            gate: Mutex::default(),
            now: Mutex::new(now),
            is_cancelled: AtomicBool::new(false),
        })
    }

    /// Fills a chunk behind the header. The caller has the block locked.
    pub(super) fn fill(&self, chunk: usize, bytes: &[u8]) {
        let mut now = self.now.lock();
        let chunk = 1 + chunk % (now.bytes.len() / CHUNK - 1);
        now.bytes[chunk * CHUNK..][..bytes.len()].copy_from_slice(bytes);
        let word = &mut now.dirty[chunk / 32];
        *word = le::U32::new(word.get() | 1 << (chunk % 32));
        now.changes += 1;
    }

    fn remember(&self, sequence: LogSequence) {
        let mut now = self.now.lock();
        let version = BlockVersion { sequence: sequence.0, bytes: now.bytes.clone() };
        match now.versions.last_mut() {
            Some(last) if last.sequence == version.sequence => *last = version,
            _ => now.versions.push(version),
        }
    }

    /// Makes the block a free one.
    pub(super) fn cancel(&self) {
        self.is_cancelled.store(true, SeqCst);
    }

    pub(super) fn lsn(&self) -> Lsn {
        self.now.lock().lsn
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.now.lock().pins > 0
    }

    /// The contexts of which the block on a device can be: from the one with its bytes to the one
    /// before its next change. `None` when no context ever had these bytes.
    pub(super) fn found_on(&self, device: &dyn BlockDevice) -> Option<(u64, u64)> {
        let mut bytes = vec![0; self.geometry.block_size()];
        device.read_at(self.place.bytes(), &mut bytes).unwrap();
        let now = self.now.lock();
        let same = |version: &BlockVersion| {
            version.bytes[CHUNK..] == bytes[CHUNK..] && version.bytes[..12] == bytes[..12]
        };
        let at = now.versions.iter().position(same)?;
        let next = now.versions.get(at + 1).map_or(u64::MAX, |next| next.sequence - 1);
        Some((now.versions[at].sequence, next))
    }
}

impl LoggedItem for TestBlock {
    fn state(&self) -> &LoggedState {
        &self.state
    }

    fn kind(&self) -> LoggedKind {
        if self.is_cancelled.load(SeqCst) { LoggedKind::Cancelled } else { LoggedKind::Home }
    }

    fn size(&self) -> LoggedSize {
        let now = self.now.lock();
        let (bytes, regions) = buffer_size(&now.bytes, &now.dirty);
        LoggedSize { bytes, regions }
    }

    fn format(&self, to: &mut XfsLogVector) {
        let now = self.now.lock();
        let flags = XfsBufferFlags::of(XfsBufferType::Symlink);
        encode_buffer(flags, self.place, &now.bytes, &now.dirty, to);
    }

    fn pin(&self) {
        self.now.lock().pins += 1;
    }

    fn unpin(&self, lsn: Option<Lsn>) {
        let mut now = self.now.lock();
        now.pins -= 1;
        now.lsn = now.lsn.max(lsn.expect("a block leaves no context"));
    }

    fn write_home(self: Arc<Self>, home: &mut HomeWrites) -> Result<HomeOutcome> {
        let Some(_gate) = self.gate.try_lock() else { return Ok(HomeOutcome::Busy) };
        let mut now = self.now.lock();
        if now.pins > 0 {
            return Ok(HomeOutcome::Pinned);
        }
        now.taken = now.changes;
        let mut bytes = now.bytes.clone();
        RemoteKind::SymlinkTarget.seal(&self.geometry, &mut bytes, now.lsn);
        drop(now);
        let item: Arc<dyn LoggedItem> = self.clone();
        home.add(self.place, bytes, &[item]);
        Ok(HomeOutcome::Queued)
    }

    fn written(&self, is_clean: bool) {
        let mut now = self.now.lock();
        if is_clean && now.taken == now.changes {
            now.dirty.fill(le::U32::ZERO);
        }
    }
}

/// Changes chunks of some blocks in one transaction.
pub(super) fn change(
    log: &XfsLog,
    blocks: &[Arc<TestBlock>],
    random: &mut Random,
) -> Result<LogSequence> {
    let len = blocks.len() as u64;
    let mut chosen: Vec<_> = (0..=random.below(4)).map(|_| random.below(len)).collect();
    chosen.sort_unstable();
    chosen.dedup();
    let chosen: Vec<_> =
        chosen.into_iter().map(|index| &blocks[usize::try_from(index).unwrap()]).collect();
    let mut ticket = log.reserve(chosen.len() as u64 * 6000, 1)?;
    let _gates: Vec<_> = chosen.iter().map(|block| block.gate.lock()).collect();
    for block in &chosen {
        for _ in 0..=random.below(4) {
            let chunk = usize::try_from(random.below(1000)).unwrap();
            block.fill(chunk, &random.bytes(CHUNK));
        }
    }
    let items: Vec<_> = chosen.iter().map(|&block| block.clone() as Arc<dyn LoggedItem>).collect();
    let sequence = log.commit(&mut ticket, &items)?;
    for block in chosen {
        block.remember(sequence);
    }
    Ok(sequence)
}

/// Proves that the blocks on a device are those of one moment between two contexts, and that it is
/// not before the context `forced`. Returns the first context that it can be.
pub(super) fn assert_whole(
    blocks: &[Arc<TestBlock>],
    device: &dyn BlockDevice,
    forced: u64,
) -> u64 {
    let (mut low, mut high) = (forced, u64::MAX);
    for (index, block) in blocks.iter().enumerate() {
        let found = block.found_on(device);
        let (first, last) = found.unwrap_or_else(|| panic!("block {index} is of no context"));
        (low, high) = (low.max(first), high.min(last));
        assert!(low <= high, "block {index} is of {first} to {last}; forced {forced}, low {low}");
    }
    low
}
