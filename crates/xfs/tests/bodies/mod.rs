//! The body of a test with hostile logs.
//!
//! The input is a program that writes a log: each of its steps is an item of a kind, at a place of
//! the volume that makes sense, with what the volume holds there. Then it changes bytes of the
//! item. The record is sealed, so that everything behind the checksums of the log is reached.
//! Opening, recovering and checking the volume must return for every input, without a panic, an
//! endless loop or much memory. The stable tests pass in random bytes, and the fuzz target any
//! bytes.

#![expect(clippy::cast_possible_truncation, reason = "any number will do")]

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::{FileSystem, Malformed, Timestamp};
use offshoot_xfs::{XfsMkfsOptions, XfsOptions, XfsVolume, check_xfs, mkfs_xfs};
use offshoot_xfs_format::log::ends;
use offshoot_xfs_format::log::items::{
    CORE_SIZE, XfsBufferFlags, XfsCountExtent, XfsEfiExtent, XfsEfiExtents, XfsFreeIntent,
    XfsIcreateItem, XfsInodeFields, XfsInodeItem, XfsIntent, XfsItemType, XfsMapExtent,
    core_for_log, encode_buffer,
};
use offshoot_xfs_format::log::op::{XfsOpWriter, XfsTransactionHeader};
use offshoot_xfs_format::log::record::padded_len;
use offshoot_xfs_format::log::{XfsLogEnds, XfsLogItem, XfsLogRecord, XfsLogRing, XfsLogVector};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgNumber, BasicBlock, FsBlock, Ino, XfsGeometry};
use uuid::Uuid;
use zerocopy::little_endian as le;

const BASIC_BLOCK: usize = 512;

/// The cluster of the root inode: where it is, and how many bytes it has.
const CLUSTER: (u64, usize) = (16 * 4096, 16 << 10);

/// Blocks of a new volume: where they are, how many bytes they have, and their type in the log.
const PLACES: [(u64, usize, u16); 14] = [
    (0, 512, 18),
    (512, 512, 5),
    (1024, 512, 7),
    (1536, 512, 6),
    (4096, 4096, 4),
    (2 * 4096, 4096, 4),
    (3 * 4096, 4096, 4),
    (4 * 4096, 4096, 4),
    (5 * 4096, 4096, 4),
    (6 * 4096, 4096, 4),
    (CLUSTER.0, CLUSTER.1, 8),
    (30 * 4096, 4096, 11),
    (31 * 4096, 4096, 16),
    // Behind the end of the volume.
    (1 << 40, 4096, 9),
];

/// A new volume.
struct NewVolume {
    device: MemoryDevice,
    geometry: XfsGeometry,
    uuid: Uuid,
    ends: XfsLogEnds,
    unit: usize,
}

impl NewVolume {
    fn get() -> &'static Self {
        static VOLUME: OnceLock<NewVolume> = OnceLock::new();
        VOLUME.get_or_init(|| {
            let device = MemoryDevice::sparse(320 << 20);
            let options = XfsMkfsOptions::new(Uuid::from_u128(7), Timestamp::default());
            mkfs_xfs(&device, &options).expect("a new volume");
            let mut sector = [0; BASIC_BLOCK];
            device.read_at(0, &mut sector).expect("memory");
            let XfsSuperblock { fields, geometry } =
                XfsSuperblock::parse(&sector).expect("a superblock");
            let (uuid, unit) = (Uuid::from_bytes(fields.uuid), fields.log_unit());
            let ring = XfsLogRing::of(&geometry).expect("a log");
            let start = log_start(&geometry);
            let mut read = |block: u32, bytes: &mut [u8]| -> Result<(), Malformed> {
                device.read_at(start + u64::from(block) * 512, bytes).expect("memory");
                Ok(())
            };
            let ends = ends::find(ring, uuid, &mut read).expect("an empty log");
            Self { device, geometry, uuid, ends, unit }
        })
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if at < self.device.size_bytes() {
            self.device.read_at(at, &mut bytes).expect("memory");
        }
        bytes
    }

    /// Writes a record with these ops behind the head of the log on `device`.
    fn write_record(&self, device: &MemoryDevice, body: &[u8], ops: u32) {
        let ring = XfsLogRing::of(&self.geometry).expect("a log");
        let lsn = self.ends.head;
        let record = XfsLogRecord {
            lsn,
            tail: lsn,
            version: 2,
            len: u32::try_from(body.len()).expect("below 32 KiB"),
            previous: self.ends.last.as_ref().map(|last| last.lsn.block()),
            ops,
            byte_order: 1,
            uuid: self.uuid,
            buffer: 32 << 10,
        };
        let mut blocks = vec![0; BASIC_BLOCK];
        blocks.extend_from_slice(body);
        record.seal(ring, &mut blocks).expect("it fits its blocks");
        device
            .write_at(log_start(&self.geometry) + u64::from(lsn.block()) * 512, &blocks)
            .expect("memory");
    }
}

fn log_start(geometry: &XfsGeometry) -> u64 {
    geometry.place_of(geometry.log_start).expect("a log inside").bytes()
}

/// Numbers out of the input; zeros behind its end.
struct FuzzProgram<'a>(&'a [u8]);

impl FuzzProgram<'_> {
    fn step(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn byte(&mut self) -> u8 {
        self.step().unwrap_or(0)
    }

    fn index(&mut self, len: usize) -> usize {
        usize::from(self.byte()) % len
    }

    fn word(&mut self) -> u32 {
        u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// A number that is small more often than not.
    fn number(&mut self) -> u64 {
        match self.byte() {
            0xff => u64::from(self.word()) << 32 | u64::from(self.word()),
            0xfe => u64::from(self.word()),
            small => small.into(),
        }
    }

    fn take(&mut self, most: usize) -> Vec<u8> {
        let len = self.index(most);
        (0..len).map(|_| self.byte()).collect()
    }

    /// Changes a few bytes, or none.
    fn change(&mut self, bytes: &mut [u8]) {
        for _ in 0..self.index(4) {
            let at = usize::from(u16::from_le_bytes([self.byte(), self.byte()]));
            let value = self.byte();
            if let Some(byte) = bytes.get_mut(at % bytes.len().max(1)) {
                *byte = value;
            }
        }
    }

    /// Adds the regions of an item of a kind.
    fn item(&mut self, kind: u8, volume: &NewVolume, to: &mut XfsLogVector) {
        match kind % 10 {
            0..=2 => self.buffer(volume, to),
            3 | 4 => self.inode(volume, to),
            5 => {
                let item = XfsIcreateItem {
                    ag: AgNumber(u32::from(self.byte()) % 5),
                    block: AgBlock(self.number() as u32),
                    count: 64,
                    inode_size: 512,
                    blocks: 8,
                    generation: self.word(),
                };
                let _ = XfsLogItem::Icreate(item).encode(to);
            }
            6 => {
                let extents: Vec<_> = (0..=self.index(3))
                    .map(|_| XfsEfiExtent::new((FsBlock(self.number()), self.number() as u32)))
                    .collect();
                let extents = XfsEfiExtents::Wide(&extents);
                let intent = XfsFreeIntent { id: self.number(), extents };
                let is_done = self.index(3) == 0;
                let item = if is_done { XfsLogItem::Efd(intent) } else { XfsLogItem::Efi(intent) };
                let _ = item.encode(to);
            }
            7 => self.mappings(to),
            8 => {
                let records: Vec<_> = (0..=self.index(3))
                    .map(|_| XfsCountExtent {
                        start: self.number().into(),
                        count: (self.number() as u32).into(),
                        flags: u32::from(self.byte()).into(),
                    })
                    .collect();
                let item = XfsLogItem::Cui(XfsIntent { id: self.number(), records: &records });
                let _ = item.encode(to);
            }
            _ => {
                let types = [XfsItemType::Attri, XfsItemType::Xmi, XfsItemType::Cud];
                let kind = [types[self.index(3)] as u16, self.word() as u16][self.index(2)];
                let regions = 1 + self.index(4);
                let count = u16::try_from(regions).expect("small");
                to.push(&[&kind.to_le_bytes(), &count.to_le_bytes(), &self.take(96)]);
                (1..regions).for_each(|_| to.push(&[&self.take(64)]));
            }
        }
    }

    fn buffer(&mut self, volume: &NewVolume, to: &mut XfsLogVector) {
        let (at, len, block_type) = PLACES[self.index(PLACES.len())];
        let block_type = if self.index(8) == 0 { self.byte().into() } else { block_type };
        let mut flags = block_type << 11;
        if block_type == 8 || self.index(16) == 0 {
            flags |= u16::from(self.byte()) & 3;
        }
        let mut bytes = volume.bytes(at, len);
        self.change(&mut bytes);
        let words = (len / 128).div_ceil(32);
        let dirty: Vec<_> = (0..words).map(|_| le::U32::new(self.word())).collect();
        let flags = XfsBufferFlags::from_bits_retain(flags);
        encode_buffer(flags, BasicBlock(at / 512), &bytes, &dirty, to);
    }

    fn inode(&mut self, volume: &NewVolume, to: &mut XfsLogVector) {
        let index = self.index(8) as u64;
        let mut bytes = volume.bytes(CLUSTER.0 + index * 512, CORE_SIZE);
        self.change(&mut bytes);
        let core = core_for_log(&<[u8; CORE_SIZE]>::try_from(&bytes[..]).expect("its size"));
        let fork = |program: &mut Self| (program.index(2) == 0).then(|| program.take(200));
        let (data, attributes) = (fork(self), fork(self));
        let item = XfsInodeItem {
            fields: XfsInodeFields::from_bits_retain(self.number() as u32),
            ino: Ino(128 + index),
            device: self.byte().into(),
            place: BasicBlock(CLUSTER.0 / 512),
            blocks: 32,
            offset: index as u32 * 512,
            core: &core,
            data: data.as_deref(),
            attributes: attributes.as_deref(),
        };
        let _ = XfsLogItem::Inode(item).encode(to);
    }

    fn mappings(&mut self, to: &mut XfsLogVector) {
        let records: Vec<_> = (0..=self.index(3))
            .map(|_| XfsMapExtent {
                owner: self.number().into(),
                start: self.number().into(),
                offset: self.number().into(),
                count: (self.number() as u32).into(),
                flags: (u32::from(self.byte()) << 24 | u32::from(self.byte() % 12)).into(),
            })
            .collect();
        let (id, is_reverse) = (self.number(), self.index(2) == 0);
        let intent = XfsIntent { id, records: &records };
        let item = if is_reverse { XfsLogItem::Rui(intent) } else { XfsLogItem::Bui(intent) };
        let _ = item.encode(to);
    }
}

/// Writes the transactions of a program. Returns the ops and the bytes that they take.
fn write_transactions(
    program: &mut FuzzProgram<'_>,
    volume: &NewVolume,
    body: &mut [u8],
) -> (u32, usize) {
    let mut writer = XfsOpWriter::new(body, 0, 0);
    let mut tid = 1;
    let begin = |writer: &mut XfsOpWriter<'_>, tid| {
        let header = XfsTransactionHeader { tid, regions: 1 }.encode();
        writer.start(tid) && writer.region(tid, &header, 0) == header.len()
    };
    let mut is_room = begin(&mut writer, tid);
    while is_room && let Some(kind) = program.step() {
        if kind >= 0xe0 {
            is_room = writer.commit(tid);
            tid += u32::from(kind & 3);
            is_room = is_room && begin(&mut writer, tid);
            continue;
        }
        let mut regions = XfsLogVector::default();
        program.item(kind, volume, &mut regions);
        for region in regions.regions().iter() {
            let mut region = region.to_vec();
            if kind & 0x10 != 0 {
                program.change(&mut region);
            }
            is_room = is_room && writer.region(tid, &region, 0) == region.len();
        }
    }
    if is_room {
        let _ = writer.commit(tid);
    }
    (writer.count(), writer.used())
}

/// Recovers the volume whose log the input writes. Returns whether it could be opened.
pub(crate) fn replay(data: &[u8]) -> bool {
    let volume = NewVolume::get();
    let mut body = vec![0; 31 << 10];
    let (ops, used) = write_transactions(&mut FuzzProgram(data), volume, &mut body);
    body.truncate(padded_len(used, 1, volume.unit));
    let device = Arc::new(volume.device.snapshot());
    volume.write_record(&device, &body, ops);
    let device: Arc<dyn BlockDevice> = device;
    let options = XfsOptions { replay_bytes: 32 << 20, cache_bytes: 4 << 20, ..Default::default() };
    let opened = XfsVolume::open(device.clone(), &options);
    if let Ok(opened) = &opened {
        let _ = opened.read_dir(opened.root(), 0, &mut |_| ControlFlow::Continue(()));
        let _ = opened.statfs();
    }
    if let Ok(Some(_)) = XfsVolume::recover(&device, &options) {
        // What is recovered has an empty log.
        assert_eq!(XfsVolume::recover(&device, &options).map_err(|e| e.to_string()), Ok(None));
    }
    let _ = check_xfs(&device, &options);
    opened.is_ok()
}
