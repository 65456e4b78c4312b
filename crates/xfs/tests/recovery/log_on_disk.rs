//! The log in the image of a volume: reads it, changes it, and adds records to it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use offshoot_testkit::xfs::disk::XfsDisk;
use offshoot_vfs::Malformed;
use offshoot_xfs_format::log::ends::{self, read_record};
use offshoot_xfs_format::log::op::{XfsOpWriter, XfsTransactionHeader};
use offshoot_xfs_format::log::record::padded_len;
use offshoot_xfs_format::log::{XfsLogEnds, XfsLogRecord, XfsLogRing, XfsLogVector};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{Lsn, XfsGeometry};
use uuid::Uuid;

const BLOCK: usize = 512;

/// The log in an image.
pub(crate) struct LogOnDisk {
    image: File,
    pub(crate) geometry: XfsGeometry,
    pub(crate) uuid: Uuid,
    unit: usize,
    start: u64,
    pub(crate) ring: XfsLogRing,
    pub(crate) ends: XfsLogEnds,
}

impl LogOnDisk {
    pub(crate) fn of(disk: &XfsDisk) -> Self {
        let image = File::options().read(true).write(true).open(disk.image()).unwrap();
        let mut sector = [0; 4096];
        image.read_exact_at(&mut sector, 0).unwrap();
        let XfsSuperblock { fields, geometry } = XfsSuperblock::parse(&sector).unwrap();
        let ring = XfsLogRing::of(&geometry).unwrap();
        let start = geometry.place_of(geometry.log_start).unwrap().bytes();
        let (uuid, unit) = (Uuid::from_bytes(fields.uuid), fields.log_unit());
        let mut read = reader(&image, start);
        let ends = ends::find(ring, uuid, &mut read).unwrap();
        drop(read);
        Self { image, geometry, uuid, unit, start, ring, ends }
    }

    /// The bytes of a place in the device.
    pub(crate) fn device_bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.image.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub(crate) fn write_device(&self, at: u64, bytes: &[u8]) {
        self.image.write_all_at(bytes, at).unwrap();
    }

    /// The records from the tail to the head.
    pub(crate) fn records(&self) -> Vec<XfsLogRecord> {
        let (mut at, mut records) = (self.ends.tail, Vec::new());
        while at != self.ends.head {
            let (record, _) = self.read(at);
            at = self.ring.advance(at, record.block_count());
            records.push(record);
        }
        records
    }

    /// A record, and its blocks, still packed.
    pub(crate) fn read(&self, at: Lsn) -> (XfsLogRecord, Vec<u8>) {
        let mut blocks = Vec::new();
        let mut read = reader(&self.image, self.start);
        let (record, _) = read_record(self.ring, at, &mut read, &mut blocks).unwrap().unwrap();
        (record, blocks)
    }

    /// Where a block of the ring lies in the device.
    pub(crate) fn place(&self, at: Lsn) -> u64 {
        self.start + u64::from(at.block()) * BLOCK as u64
    }

    /// Changes the bytes of one basic block.
    pub(crate) fn change_block(&self, at: Lsn, change: impl FnOnce(&mut [u8])) {
        let place = self.place(at);
        let mut block = self.device_bytes(place, BLOCK);
        change(&mut block);
        self.write_device(place, &block);
    }

    /// Puts blocks of the round before into the place of `count` blocks.
    pub(crate) fn lose(&self, from: Lsn, count: u32) {
        for index in 0..count {
            let at = self.ring.advance(from, index);
            self.change_block(at, |block| {
                block.fill(0);
                block[..4].copy_from_slice(&(at.cycle() - 1).to_be_bytes());
            });
        }
    }

    /// Loses all blocks from a place to the head.
    pub(crate) fn lose_from(&self, from: Lsn) {
        self.lose(from, self.ring.distance(from, self.ends.head).unwrap());
    }

    /// Changes the header and the unpacked body of a record, and seals it again.
    pub(crate) fn change_record(&self, at: Lsn, change: impl FnOnce(&mut XfsLogRecord, &mut [u8])) {
        let (mut record, mut blocks) = self.read(at);
        record.unpack(&mut blocks).unwrap();
        let headers = record.header_blocks() as usize * BLOCK;
        change(&mut record, &mut blocks[headers..]);
        record.seal(self.ring, &mut blocks).unwrap();
        self.write_blocks(at, &blocks);
    }

    fn write_blocks(&self, at: Lsn, blocks: &[u8]) {
        for (block, index) in blocks.chunks(BLOCK).zip(0..) {
            self.change_block(self.ring.advance(at, index), |to| to.copy_from_slice(block));
        }
    }

    /// Adds a record with one transaction, whose items are `items`, to the head. In a clean log it
    /// is the tail.
    pub(crate) fn add(&mut self, items: &XfsLogVector) -> Lsn {
        self.add_ops(|writer| {
            let header = XfsTransactionHeader { tid: 7, regions: 1 }.encode();
            assert!(writer.start(7));
            for region in std::iter::once(&header[..]).chain(items.regions().iter()) {
                assert_eq!(writer.region(7, region, 0), region.len());
            }
            assert!(writer.commit(7));
        })
    }

    /// Adds a record with these ops to the head.
    pub(crate) fn add_ops(&mut self, write: impl FnOnce(&mut XfsOpWriter<'_>)) -> Lsn {
        let mut body = vec![0; 31 << 10];
        let mut writer = XfsOpWriter::new(&mut body, 0, 0);
        write(&mut writer);
        let (used, ops) = (writer.used(), writer.count());
        let len = padded_len(used, 1, self.unit);
        let last = self.ends.last.clone().unwrap();
        let lsn = self.ends.head;
        let record = XfsLogRecord {
            lsn,
            tail: if self.ends.is_clean { lsn } else { self.ends.tail },
            version: 2,
            len: u32::try_from(len).unwrap(),
            previous: Some(last.lsn.block()),
            ops,
            byte_order: 1,
            uuid: self.uuid,
            buffer: 32 << 10,
        };
        let mut blocks = vec![0; BLOCK];
        blocks.extend_from_slice(&body[..len]);
        record.seal(self.ring, &mut blocks).unwrap();
        self.write_blocks(lsn, &blocks);
        self.ends.head = self.ring.advance(lsn, record.block_count());
        self.ends.tail = record.tail;
        self.ends.is_clean = false;
        self.ends.last = Some(record);
        lsn
    }
}

fn reader(
    image: &File,
    start: u64,
) -> impl FnMut(u32, &mut [u8]) -> Result<(), Malformed> + use<'_> {
    move |block, buffer| {
        let at = start + u64::from(block) * BLOCK as u64;
        image.read_exact_at(buffer, at).unwrap();
        Ok(())
    }
}
